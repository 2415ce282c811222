//! Plans and runs the products whose K is spread over the ranks.
#![allow(unsafe_code)]

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use super::call::{
    self, Arguments, RawShards, RawView, require_dtype, require_same_group, require_shape,
};
use super::operands::Weights;
use super::product::{
    self, Addends, CallForm, ProductOptions, RawWeights, bind_weights, check_outputs, check_weights,
};
use super::quantized::{OutputForm, ProductOutput};
use super::scales::{Expected, Operand, RawOperand};
use crate::backend::Backend;
use crate::backend::sealed::Bound;
use crate::element::Element;
use crate::error::{Error, Result, require_count};
use crate::explanation::Explanation;
use crate::group::Group;
use crate::profile::span::Span;
use crate::schedule::layout::MAX_EXTENT;
use crate::schedule::limits::limit;
use crate::schedule::plan::matrices::{self, MATRICES, PARTIALS};
use crate::schedule::plan::partials::is_one_shot;
use crate::schedule::{Config, Layout, Operation, Problem, Route, Schedule};

/// Which sums each rank gets.
#[derive(Clone, Copy, Debug)]
pub enum Which {
    /// The sums of its own rows.
    Own,
    /// All sums, in a sharded matrix.
    All,
}

impl Which {
    fn operation(self) -> Operation {
        match self {
            Which::Own => Operation::MATMUL_REDUCE_SCATTER,
            Which::All => Operation::MATMUL_ALL_REDUCE,
        }
    }

    /// The name of the call.
    pub fn name(self) -> &'static str {
        self.operation().name()
    }

    /// The problem of the sums of products with weights of N = `n`.
    fn problem<B: Backend>(
        self,
        options: &ProductOptions,
        addends: &Addends<B>,
        group: &Group<B>,
        layout: Layout,
        n: usize,
        call: &CallForm,
    ) -> Result<Problem> {
        limit("N", n, 1, MAX_EXTENT)?;
        let problem = Problem {
            hosts: group.host_map().clone(),
            ..options.problem::<B>(self.operation(), layout, &[n], call)?
        };
        addends.check(group, &problem, self.rows(group, &problem))?;
        Ok(problem)
    }

    /// How many sums this rank gets rows of.
    fn rows<B: Backend>(self, group: &Group<B>, problem: &Problem) -> usize {
        match self {
            Which::Own => problem.layout.rows_of(group.rank()).len(),
            Which::All => problem.layout.m(),
        }
    }

    /// True for an all-reduce of two steps.
    fn reduces_own_rows(self, problem: &Problem, config: &Config) -> bool {
        matches!(self, Which::All) && !is_one_shot(problem, config)
    }

    /// True if a gather must follow, so that all ranks have all sums: over several hosts, and if the sum's schedule has no
    /// product, unless each rank adds all rows.
    fn needs_gather(self, problem: &Problem, config: &Config, has_product: bool) -> bool {
        let sends_none = !has_product || problem.hosts.count() > 1;
        sends_none && self.reduces_own_rows(problem, config)
    }

    /// Checks that [`PlannedSums::new`] would plan the sums. If a gather must follow, returns their configuration.
    pub fn check<B: Backend>(
        self,
        options: &ProductOptions,
        addends: &Addends<B>,
        group: &Group<B>,
        layout: Layout,
        n: usize,
        call: &CallForm,
    ) -> Result<Option<Config>> {
        let problem = self.problem(options, addends, group, layout, n, call)?;
        let (schedule, config) = group.checked_schedule(&problem, options.config)?;
        let has_product = schedule.product().is_some();
        if !has_product {
            group.checked_schedule(&multiply(&problem), Some(config))?;
        }
        let needs_gather = self.needs_gather(&problem, &config, has_product);
        Ok(needs_gather.then_some(config))
    }
}

/// The product that runs before a sum, if the sum's schedule has none.
fn multiply(sum: &Problem) -> Problem {
    Problem {
        operation: Operation::MULTIPLY_PARTIALS,
        ..sum.clone()
    }
}

impl<B: Backend> PlannedSums<B> {
    /// Plans the sums of products with weights of N = `n`. `layout`: who owns which rows, and this rank's slice of K.
    pub fn new(
        options: &ProductOptions,
        addends: &Addends<B>,
        which: Which,
        group: &Group<B>,
        layout: Layout,
        n: usize,
        call: &CallForm,
    ) -> Result<PlannedSums<B>> {
        let problem = which.problem(options, addends, group, layout, n, call)?;
        let (sum, config) = group.configured_program(problem.clone(), options.config)?;
        let multiply = match B::schedule(&sum).product() {
            Some(_) => None,
            None => Some(group.program(multiply(&problem), Some(config))?),
        };
        Ok(PlannedSums {
            reduces_own_rows: which.reduces_own_rows(&problem, &config),
            sum,
            multiply,
            group: group.clone(),
            which,
            problem,
            config,
        })
    }
}

/// The operands of a sum over ranks.
pub struct SumOperands<'m, 'd, B: Backend> {
    /// [M, K]
    pub a: RawOperand<'m, B>,
    /// One weight.
    pub weights: RawWeights<'m, B>,
    pub addends: Addends<'d, B>,
}

impl<B: Backend> SumOperands<'_, '_, B> {
    /// What the operands say of a call that was not prepared. `out`: the output's form, if there is an output.
    pub fn called(&self, options: &ProductOptions, out: Option<OutputForm>) -> Result<CallForm> {
        options.called(self.a.scaling()?, &self.weights, out)
    }

    /// N of a call that was not prepared.
    pub fn n(&self, options: &ProductOptions) -> Result<usize> {
        let SumOperands { a, weights, .. } = self;
        require_count("a sum over ranks", "weight", 1, "this call", weights.len())?;
        let RawView { group, shape, .. } = a.values;
        options.n_of(group, shape[1], &weights[0].values)
    }
}

/// The operands of a call.
pub fn operands<'m, 'd, B: Backend, T: Element>(
    a: impl Into<Operand<'m, B, T>>,
    b: impl Into<Weights<'m, B, T>>,
    addends: Addends<'d, B>,
) -> SumOperands<'m, 'd, B> {
    SumOperands {
        a: RawOperand::from(a.into()),
        weights: b.into().all,
        addends,
    }
}

/// Sums that have been planned.
pub struct PlannedSums<B: Backend> {
    // Freed before the group that they belong to can end.
    /// The sum. If partials are moved while the product is made, it includes the product.
    sum: Arc<B::Program>,
    /// The product, if no partial is moved before it is complete. It runs before the sum.
    multiply: Option<Arc<B::Program>>,
    group: Group<B>,
    which: Which,
    /// True for an all-reduce of two steps.
    pub reduces_own_rows: bool,
    /// The problem of the sum: who owns which rows, and this rank's slice of K.
    problem: Problem,
    config: Config,
}

impl<B: Backend> PlannedSums<B> {
    pub fn group(&self) -> &Group<B> {
        &self.group
    }

    /// Writes the prepared call that these sums are of for `Debug`.
    pub fn describe(&self, f: &mut fmt::Formatter, prepared: &str) -> fmt::Result {
        product::describe::<B>(f, prepared, &self.problem)
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

    /// True if a gather must follow, so that all ranks have all sums.
    pub fn needs_gather(&self) -> bool {
        let has_product = self.multiply.is_none();
        self.which
            .needs_gather(&self.problem, &self.config, has_product)
    }

    /// The rows of the sum that this rank owns.
    pub fn own_rows(&self) -> Range<usize> {
        self.problem.layout.rows_of(self.group.rank())
    }

    /// Checks the operands, the bias and the residual.
    pub fn check(
        &self,
        SumOperands {
            a,
            weights,
            addends,
        }: &SumOperands<B>,
    ) -> Result<()> {
        let RawView {
            group,
            dtype,
            shape,
            ..
        } = a.values;
        let problem = &self.problem;
        let layout = &problem.layout;
        require_same_group("the prepared sum", &self.group, group)?;
        let what = match self.which {
            // Only a prepared call can fail here; a short call was planned from these arguments.
            Which::Own => "a [M, K] of a prepared call",
            Which::All => "a [M, K]",
        };
        let expected = [layout.m(), layout.k()];
        require_shape(what, expected, shape)?;
        require_dtype("a", problem.dtypes.operands, dtype)?;
        a.check_scales(group, &Expected::rows(problem.form.a_scaling, expected))?;
        addends.check(group, problem, self.which.rows(group, problem))?;
        check_weights(group, problem, &[problem.n], weights)
    }

    /// Checks an output that is this rank's own.
    pub fn check_out(&self, out: &[ProductOutput<B>]) -> Result<()> {
        let (rows, problem) = (self.own_rows().len(), &self.problem);
        let what = "out [rows of this rank, N]";
        check_outputs(&self.group, what, problem, &[problem.n], rows, out)
    }

    /// Checks an output that is a sharded matrix: its rows are split like the sum's.
    pub fn check_sharded(&self, out: RawShards<B>) -> Result<()> {
        let Problem { layout, n, .. } = &self.problem;
        let planned = self.problem.dtypes.output;
        require_dtype("out", planned, out.dtype)?;
        require_same_group("out", out.group, &self.group)?;
        out.require_split(["out [M, N]", "out (rows of each rank)"], layout, *n)
    }

    /// Runs the sum, once the operands have been checked too. `checked`: the result of checking `out`. `shared`: the
    /// numbers of the sharded matrices that are written.
    #[track_caller]
    pub fn run(
        &self,
        operands: &SumOperands<B>,
        checked: Result<()>,
        out: Bound<B>,
        shared: &[u32],
        trace: Option<&mut Vec<Span>>,
    ) -> Result<()> {
        let fits = self.check(operands).and(checked);
        fits.map_err(operands.a.values.group.refusal(self.which.name()))?;
        let before = self.multiply.as_ref();
        let addends = &operands.addends;
        self.launch(
            before,
            &self.sum,
            addends,
            Some(operands),
            (out, shared),
            trace,
        )
    }

    /// Only multiplies, and leaves the partials where they are made. Not collective.
    #[track_caller]
    pub fn matmul(&self, operands: &SumOperands<B>) -> Result<()> {
        let checked = self.check(operands);
        checked.map_err(Error::of(self.group.rank(), self.which.name()))?;
        let program = self.part(Operation::MULTIPLY_PARTIALS)?;
        let addends = &operands.addends;
        self.launch(
            None,
            &program,
            addends,
            Some(operands),
            (Bound::Nothing, &[]),
            None,
        )
    }

    /// Only moves the partials that have been made, and adds them.
    #[track_caller]
    pub fn reduce(&self, addends: &Addends<B>, out: Bound<B>, shared: &[u32]) -> Result<()> {
        let config = Some(self.config.with_route(Route::Pull));
        let program = self.group.program(self.problem.clone(), config);
        let program = program.map_err(Error::of(self.group.rank(), self.which.name()))?;
        self.launch(None, &program, addends, None, (out, shared), None)
    }

    /// Only copies what a run moves, without notifying other ranks. Not collective.
    ///
    /// # Safety
    /// Until the copy has ended, no other rank begins an operation that makes partials or sums, or writes its rows of
    /// `out`.
    #[track_caller]
    pub unsafe fn copy(&self, out: Bound<B>) -> Result<()> {
        let program = match self.which {
            Which::Own => self.part(Operation::COPY_PARTIALS),
            Which::All => self.part(Operation::COPY_PARTIALS_AND_SUMS),
        };
        self.launch(None, &program?, &Addends::default(), None, (out, &[]), None)
    }

    #[track_caller]
    fn part(&self, operation: Operation) -> Result<Arc<B::Program>> {
        let problem = Problem {
            operation,
            ..self.problem.clone()
        };
        let program = self.group.program(problem, Some(self.config));
        program.map_err(Error::of(self.group.rank(), operation.name()))
    }

    /// `out`: the output, and the numbers of the sharded matrices that are written.
    #[track_caller]
    fn launch(
        &self,
        before: Option<&Arc<B::Program>>,
        program: &Arc<B::Program>,
        addends: &Addends<B>,
        operands: Option<&SumOperands<B>>,
        (out, shared): (Bound<B>, &[u32]),
        trace: Option<&mut Vec<Span>>,
    ) -> Result<()> {
        let bytes = |schedule: &Schedule| {
            let partials = schedule.matrices()[PARTIALS];
            partials.rows.saturating_mul(partials.row_bytes())
        };
        let schedule = self.schedule();
        let room = bytes(schedule);
        for part in before.into_iter().chain([program]) {
            // A part of a sum is planned as with pulled partials, and only these lie without gaps.
            limit("bytes of partials", bytes(B::schedule(part)), 0, room)
                .map_err(Error::of(self.group.rank(), self.which.name()))?;
        }
        let partials = if schedule.is_idle() {
            None
        } else {
            Some(self.group.partials(schedule)?)
        };
        let mut bound = [const { Bound::Nothing }; MATRICES];
        if let Some(SumOperands { a, weights, .. }) = operands {
            a.bind(&mut bound, matrices::A, matrices::A_SCALES);
            bind_weights(&mut bound, weights);
        }
        addends.bind(&mut bound);
        bound[matrices::OUT] = out;
        if let Some(partials) = &partials {
            bound[PARTIALS] = Bound::Symmetric(partials.as_ref());
        }
        let arguments = Arguments {
            call: self.which.name(),
            matrices: &bound,
            shared,
            added: addends.added(),
        };
        call::run(&self.group, before, program, arguments, trace)
    }
}

/// The split of `m` rows of a product over `k`: rank r gets `rows[r]` rows.
pub fn split<B: Backend>(group: &Group<B>, rows: &[usize], [m, k]: [usize; 2]) -> Result<Layout> {
    let layout = group.row_layout(rows, k)?;
    // The text is made only for the refusal.
    if layout.m() != m {
        let part = format!("a split into {rows:?}");
        require_count("the product", "row", m, &part, layout.m())?;
    }
    Ok(layout)
}
