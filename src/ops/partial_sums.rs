//! What products have in common whose K is spread over the ranks.
#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::Arc;

use super::call::{
    self, Added, Arguments, RawOutput, RawShards, RawView, require_dtype, require_same_group,
    require_shape,
};
use super::product::{ProductOptions, check_outputs, check_weights};
use crate::backend::Backend;
use crate::backend::sealed::Bound;
use crate::element::DType;
use crate::error::{Error, Result};
use crate::explanation::Explanation;
use crate::group::Group;
use crate::profile::span::Span;
use crate::schedule::layout::MAX_EXTENT;
use crate::schedule::limits::limit;
use crate::schedule::plan::matrices::{self, MATRICES, PARTIALS};
use crate::schedule::plan::partials::is_one_shot;
use crate::schedule::{Config, Layout, Operation, Problem, Route, Schedule};

/// Who gets which sums.
#[derive(Clone, Copy, Debug)]
pub enum Which {
    /// Each rank those of its rows.
    Own,
    /// All ranks all of them, in a matrix that they share.
    All,
}

impl Which {
    fn operation(self) -> Operation {
        match self {
            Which::Own => Operation::MatmulReduceScatter,
            Which::All => Operation::MatmulAllReduce,
        }
    }

    /// The name of the call.
    pub fn name(self) -> &'static str {
        self.operation().name()
    }
}

impl<'a, B: Backend> PlannedSums<'a, B> {
    /// Plans the sums of products with weights of N = `n`. `layout`: who owns which rows, and this rank's part of K;
    /// `out`: the type of the output, if it is known to be another than that of the operands.
    pub fn new(
        options: &ProductOptions<'a, B>,
        which: Which,
        group: &Group<B>,
        layout: Layout,
        n: usize,
        out: Option<DType>,
    ) -> Result<PlannedSums<'a, B>> {
        limit("N", n, 1, MAX_EXTENT)?;
        let problem = options.problem(which.operation(), layout, &[n], out);
        let layout = &problem.layout;
        let rows = match which {
            Which::Own => layout.rows_of(group.rank()).len(),
            Which::All => layout.m(),
        };
        options.check(group, &problem, rows)?;
        let (sum, config) = group.configured_program(problem.clone(), options.config)?;
        let multiply = match B::schedule(&sum).product() {
            Some(_) => None,
            None => {
                let operation = Operation::MultiplyPartials;
                let problem = Problem {
                    operation,
                    ..problem.clone()
                };
                Some(group.program(problem, Some(config))?)
            }
        };
        let one_shot = is_one_shot(&problem, &config);
        Ok(PlannedSums {
            reduces_own_rows: matches!(which, Which::All) && !one_shot,
            sum,
            multiply,
            group: group.clone(),
            which,
            problem,
            config,
            options: options.clone(),
        })
    }
}

/// Sums that have been planned.
#[derive(Debug)]
pub struct PlannedSums<'a, B: Backend> {
    // Freed before the group that they belong to can end.
    /// The sum; with the product, where partials are pushed or stored.
    sum: Arc<B::Program>,
    /// Where partials are pulled, they are made before.
    multiply: Option<Arc<B::Program>>,
    group: Group<B>,
    which: Which,
    /// Pulled sums must still be gathered: those of an all-reduce of two steps.
    pub reduces_own_rows: bool,
    /// The sum: who owns which of its rows, and this rank's part of K.
    problem: Problem,
    config: Config,
    options: ProductOptions<'a, B>,
}

impl<B: Backend> PlannedSums<'_, B> {
    pub fn group(&self) -> &Group<B> {
        &self.group
    }

    pub fn schedule(&self) -> &Schedule {
        B::schedule(&self.sum)
    }

    pub fn config(&self) -> Config {
        self.config
    }

    pub fn explain(&self) -> Explanation {
        call::explain(&self.group, &self.problem, self.config)
    }

    /// Whether what all ranks are to have still has to be gathered.
    pub fn needs_gather(&self) -> bool {
        self.multiply.is_some() && self.reduces_own_rows
    }

    /// [M, N] of the sum.
    pub fn shape(&self) -> [usize; 2] {
        [self.problem.layout.m(), self.problem.n]
    }

    /// The rows of the sum that this rank owns.
    pub fn own_rows(&self) -> Range<usize> {
        self.problem.layout.rows_of(self.group.rank())
    }

    /// Checks the operands. What is added was checked when it was planned.
    pub fn check(&self, [a, b]: [RawView<B>; 2]) -> Result<()> {
        let (group, problem) = (a.group, &self.problem);
        let (rank, layout) = (group.rank(), &problem.layout);
        require_same_group("the prepared sum", &self.group, group)?;
        require_shape(rank, "a [M, K]", [layout.m(), layout.k()], a.shape)?;
        require_dtype(rank, "a", problem.dtypes.operands, a.dtype)?;
        check_weights(group, problem, &[problem.n], &[b])
    }

    /// Checks an output of this rank's own.
    pub fn check_out(&self, out: &[RawOutput<B>]) -> Result<()> {
        let (rows, problem) = (self.own_rows().len(), &self.problem);
        let what = "out [rows of this rank, N]";
        check_outputs(&self.group, what, problem, &[problem.n], rows, out)
    }

    /// Checks an output that is a sharded matrix: its rows are split like the sum's.
    pub fn check_sharded(&self, out: RawShards<B>) -> Result<()> {
        let Problem { layout, n, .. } = &self.problem;
        let planned = self.problem.dtypes.output;
        require_dtype(self.group.rank(), "out", planned, out.dtype)?;
        require_same_group("out", out.group, &self.group)?;
        out.require_split(["out [M, N]", "out (rows of each rank)"], layout, *n)
    }

    /// Does it, once the operands have been checked too. `checked`: whether `out` fits; `shared`: the numbers of the
    /// sharded matrices that are written.
    pub fn run(
        &self,
        operands: [RawView<B>; 2],
        checked: Result<()>,
        out: Bound<B>,
        shared: &[u32],
        trace: Option<&mut Vec<Span>>,
    ) -> Result<()> {
        let fits = self.check(operands).and(checked);
        fits.map_err(|error| self.group.refuse(self.which.name(), error))?;
        let before = self.multiply.as_ref();
        self.launch(before, &self.sum, Some(operands), out, shared, trace)
    }

    /// Only multiplies: what is made stays here. Not collective.
    pub fn matmul(&self, operands: [RawView<B>; 2]) -> Result<()> {
        self.check(operands)?;
        let program = self.part(Operation::MultiplyPartials)?;
        self.launch(None, &program, Some(operands), Bound::Nothing, &[], None)
    }

    /// Only adds up what has been made, and pulls it before.
    pub fn reduce(&self, out: Bound<B>, shared: &[u32]) -> Result<()> {
        let config = Some(self.config.with_route(Route::Pull));
        let program = self.group.program(self.problem.clone(), config)?;
        self.launch(None, &program, None, out, shared, None)
    }

    /// Only copies what a run moves, with no word to anyone. Not collective.
    ///
    /// # Safety
    /// Until it has ended no other rank begins anything that makes partials or sums, nor writes its rows of `out`.
    pub unsafe fn copy(&self, out: Bound<B>) -> Result<()> {
        let program = match self.which {
            Which::Own => self.part(Operation::CopyPartials),
            Which::All => self.part(Operation::CopyPartialsAndSums),
        };
        self.launch(None, &program?, None, out, &[], None)
    }

    fn part(&self, operation: Operation) -> Result<Arc<B::Program>> {
        let problem = Problem {
            operation,
            ..self.problem.clone()
        };
        self.group.program(problem, Some(self.config))
    }

    fn launch(
        &self,
        before: Option<&Arc<B::Program>>,
        program: &Arc<B::Program>,
        operands: Option<[RawView<B>; 2]>,
        out: Bound<B>,
        shared: &[u32],
        trace: Option<&mut Vec<Span>>,
    ) -> Result<()> {
        let bytes = |schedule: &Schedule| {
            let partials = schedule.matrices()[PARTIALS];
            partials.rows.saturating_mul(partials.row_bytes())
        };
        let schedule = self.schedule();
        let room = bytes(schedule);
        for part in before.into_iter().chain([program]) {
            // Only pulled partials lie without gaps, and a part of a sum is planned as those are.
            limit("bytes of partials", bytes(B::schedule(part)), 0, room)?;
        }
        let partials = match schedule.is_idle() {
            true => None,
            false => Some(self.group.partials(schedule)?),
        };
        let mut bound = [const { Bound::Nothing }; MATRICES];
        if let Some([a, b]) = operands {
            bound[matrices::A] = a.input();
            bound[matrices::B] = b.input();
        }
        bound[matrices::OUT] = out;
        if let Some(partials) = &partials {
            bound[PARTIALS] = Bound::Symmetric(partials.as_ref());
        }
        self.options.bind(&mut bound);
        let added = Added {
            bias: self.options.bias.is_some(),
            residual: self.options.residual.is_some(),
        };
        let arguments = Arguments {
            matrices: &bound,
            shared,
            added,
        };
        call::run(&self.group, before, program, arguments, trace)
    }
}

/// `m` rows, of which rank r gets `rows[r]`, of a product over `k`.
pub fn split<B: Backend>(group: &Group<B>, rows: &[usize], [m, k]: [usize; 2]) -> Result<Layout> {
    let shape = |argument: &str, expected: usize, found: usize| {
        if expected == found {
            return Ok(());
        }
        Err(Error::Shape {
            rank: group.rank(),
            argument: argument.into(),
            expected: vec![expected],
            found: vec![found],
        })
    };
    shape("rows [world size]", group.world_size(), rows.len())?;
    let layout = Layout::new(rows, k)?;
    shape("the rows of all ranks [M]", m, layout.m())?;
    Ok(layout)
}
