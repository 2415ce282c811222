//! Products that are summed over the ranks, without element types: who gets which sums, and by which calls.
#![allow(unsafe_code)]

use std::sync::Arc;

use super::call::{self, Added, Arguments, RawShards, RawView, require_same_group, require_shape};
use super::partial_sums::{PlannedSums, SumOperands, Which, split};
use super::product::{Addends, CallForm, ProductOptions};
use super::quantized::{OutputForm, ProductOutput};
use super::row_split::RowSplit;
use crate::backend::Backend;
use crate::backend::sealed::Bound;
use crate::element::DType;
use crate::error::{Error, Result};
use crate::group::Group;
use crate::profile::span::Span;
use crate::schedule::plan::collectives::stored;
use crate::schedule::plan::matrices::{self, MATRICES};
use crate::schedule::{Config, Layout, Operation, Problem, Route};

/// A product whose sums are scattered: its options.
#[derive(Clone, Copy)]
pub struct ScatterProduct<'a> {
    pub options: &'a ProductOptions,
    /// The rows that each rank gets. They are split evenly if nothing is said.
    pub rows: Option<&'a [usize]>,
}

impl ScatterProduct<'_> {
    /// Plans the sum, unless the group has its programs, and runs it.
    #[track_caller]
    pub fn run<B: Backend>(
        &self,
        operands: &SumOperands<B>,
        out: &mut [ProductOutput<B>],
    ) -> Result<()> {
        let RawView { group, shape, .. } = operands.a.values;
        let plan = || {
            let call = operands.called(self.options, OutputForm::of(out)?)?;
            let (n, layout) = (operands.n(self.options)?, self.layout(group, shape)?);
            self.plan(group, &operands.addends, n, layout, &call)
        };
        let planned = plan().map_err(group.refusal(Which::Own.name()))?;
        planned.scatter(operands, out, None)
    }

    /// As [`ScatterProduct::run`], into this rank's own rows of `out`.
    #[track_caller]
    pub fn run_into<B: Backend>(&self, operands: &SumOperands<B>, out: RawShards<B>) -> Result<()> {
        let RawView { group, shape, .. } = operands.a.values;
        let [m, k] = shape;
        let plan = || -> Result<PlannedSums<B>> {
            let n = operands.n(self.options)?;
            require_same_group("out", out.group, group)?;
            require_shape("out [M, N]", [m, n], out.shape())?;
            out.require_by_rank("out")?;
            let layout = match self.rows {
                Some(_) => self.layout(group, shape)?,
                None => out.layout.of_columns(k)?,
            };
            let call = operands.called(self.options, Some(out.dtype.into()))?;
            self.plan(group, &operands.addends, n, layout, &call)
        };
        let planned = plan().map_err(group.refusal(Which::Own.name()))?;
        planned.scatter_into(operands, out, None)
    }

    /// Plans the sum for matrices [m, k] and weights of N = `n`.
    #[track_caller]
    pub fn prepare<B: Backend>(
        &self,
        group: &Group<B>,
        addends: &Addends<B>,
        shape: [usize; 2],
        n: usize,
    ) -> Result<PlannedSums<B>> {
        let layout = || self.layout(group, shape);
        let plan = || self.plan(group, addends, n, layout()?, &self.options.planned());
        group.judged(Which::Own.name(), plan())
    }

    /// Whether the group can multiply a matrix [m, k] by a weight of N = `n` and sum.
    #[track_caller]
    pub fn supported<B: Backend>(
        &self,
        group: &Group<B>,
        addends: &Addends<B>,
        shape: [usize; 2],
        n: usize,
    ) -> Result<()> {
        let answer = || {
            let (layout, call) = (self.layout(group, shape)?, self.options.planned());
            let checked = Which::Own.check(self.options, addends, group, layout, n, &call);
            checked.map(drop)
        };
        group.answered(Which::Own.name(), answer())
    }

    fn plan<B: Backend>(
        &self,
        group: &Group<B>,
        addends: &Addends<B>,
        n: usize,
        layout: Layout,
        call: &CallForm,
    ) -> Result<PlannedSums<B>> {
        PlannedSums::new(self.options, addends, Which::Own, group, layout, n, call)
    }

    /// Which rank owns which rows of the product of a matrix [m, k].
    fn layout<B: Backend>(&self, group: &Group<B>, [m, k]: [usize; 2]) -> Result<Layout> {
        match self.rows {
            Some(rows) => split(group, rows, [m, k]),
            None => Layout::balanced(m, k, group.world_size()),
        }
    }
}

impl<B: Backend> PlannedSums<B> {
    /// Runs a sum that is scattered.
    #[track_caller]
    pub fn scatter(
        &self,
        operands: &SumOperands<B>,
        out: &mut [ProductOutput<B>],
        trace: Option<&mut Vec<Span>>,
    ) -> Result<()> {
        let checked = self.check_out(out);
        self.run(operands, checked, only(out), &[], trace)
    }

    /// As [`PlannedSums::scatter`], into this rank's own rows of `out`.
    #[track_caller]
    pub fn scatter_into(
        &self,
        operands: &SumOperands<B>,
        out: RawShards<B>,
        trace: Option<&mut Vec<Span>>,
    ) -> Result<()> {
        let checked = self.check_sharded(out);
        self.run(operands, checked, out.own_rows(), &[], trace)
    }
}

/// Takes the memory of the only output, which has been checked.
pub fn only<'o, B: Backend>(outputs: &mut [ProductOutput<'o, B>]) -> Bound<'o, B> {
    let out = outputs.first_mut();
    out.map_or(Bound::Nothing, |out| out.values.take_bound())
}

/// Plans a sum that all ranks get, unless the group has its programs, and runs it.
#[track_caller]
pub fn all_reduce<B: Backend>(
    options: &ProductOptions,
    operands: &SumOperands<B>,
    out: RawShards<B>,
) -> Result<()> {
    let RawView { group, shape, .. } = operands.a.values;
    let plan = || {
        let call = operands.called(options, Some(out.dtype.into()))?;
        PlannedAllReduce::plan(options, group, &operands.addends, shape, out, &call)
    };
    let planned = plan().map_err(group.refusal(Which::All.name()))?;
    planned.run(operands, out, None)
}

/// Plans the sums of products of a matrix [m, k] for outputs like `out`.
#[track_caller]
pub fn prepare_all_reduce<B: Backend>(
    options: &ProductOptions,
    group: &Group<B>,
    addends: &Addends<B>,
    shape: [usize; 2],
    out: RawShards<B>,
) -> Result<PlannedAllReduce<B>> {
    let call = CallForm {
        output: out.dtype.into(),
        ..options.planned()
    };
    let planned = PlannedAllReduce::plan(options, group, addends, shape, out, &call);
    group.judged(Which::All.name(), planned)
}

/// Whether the group can sum such products for all ranks.
#[track_caller]
pub fn supports_all_reduce<B: Backend>(
    options: &ProductOptions,
    group: &Group<B>,
    addends: &Addends<B>,
    rows: &RowSplit,
    n: usize,
) -> Result<()> {
    let answer = || {
        let (layout, call) = (rows.layout(group)?, options.planned());
        let out = call.output.dtype;
        let gathered = Which::All.check(options, addends, group, layout.clone(), n, &call)?;
        if let Some(config) = gathered {
            let (problem, config) = gather_problem(out, layout.of_columns(n)?, config);
            group.checked_schedule(&problem, Some(config))?;
        }
        group.require_whole_pieces("N", n, out)
    };
    group.answered(Which::All.name(), answer())
}

/// A product and its sums for all ranks, which have been planned.
pub struct PlannedAllReduce<B: Backend> {
    // Freed before the group that it belongs to can end.
    /// Gathers the sums, if the product is a program of its own and owners add up. Each rank then has the sums of only
    /// its own rows.
    gather: Option<Arc<B::Program>>,
    pub sums: PlannedSums<B>,
}

impl<B: Backend> PlannedAllReduce<B> {
    fn plan(
        options: &ProductOptions,
        group: &Group<B>,
        addends: &Addends<B>,
        [m, k]: [usize; 2],
        out: RawShards<B>,
        call: &CallForm,
    ) -> Result<PlannedAllReduce<B>> {
        let [_, n] = out.shape();
        require_same_group("out", out.group, group)?;
        require_shape("out [M, N]", [m, n], out.shape())?;
        out.require_by_rank("out")?;
        let layout = out.layout.of_columns(k)?;
        let sums = PlannedSums::new(options, addends, Which::All, group, layout, n, call)?;
        let gather = if sums.needs_gather() {
            Some(gather_of(out, sums.config())?)
        } else {
            None
        };
        Ok(PlannedAllReduce { gather, sums })
    }

    /// Multiplies, sums, and gathers the sums. Collective.
    #[track_caller]
    pub fn run(
        &self,
        operands: &SumOperands<B>,
        out: RawShards<B>,
        mut trace: Option<&mut Vec<Span>>,
    ) -> Result<()> {
        let checked = self.sums.check_sharded(out);
        let (sums, shared) = (out.bound(), [out.id]);
        let first = trace.as_deref_mut();
        self.sums.run(operands, checked, sums, &shared, first)?;
        match &self.gather {
            Some(gather) => self.gather(gather, out, trace),
            None => Ok(()),
        }
    }

    /// Only sums and gathers, with the partials of an earlier run. Collective.
    #[track_caller]
    pub fn reduce(&self, addends: &Addends<B>, out: RawShards<B>) -> Result<()> {
        let of = Error::of(self.sums.group().rank(), Which::All.name());
        self.sums.check_sharded(out).map_err(of)?;
        let gather = match (&self.gather, self.sums.reduces_own_rows) {
            (Some(gather), _) => Some(gather.clone()),
            (None, true) => Some(gather_of(out, self.sums.config()).map_err(of)?),
            (None, false) => None,
        };
        self.sums.reduce(addends, out.bound(), &[out.id])?;
        gather.map_or(Ok(()), |gather| self.gather(&gather, out, None))
    }

    /// Only copies what a run moves, without notifying other ranks. Not collective.
    ///
    /// # Safety
    /// As [`PlannedSums::copy`].
    #[track_caller]
    pub unsafe fn copy(&self, out: RawShards<B>) -> Result<()> {
        let checked = self.sums.check_sharded(out);
        checked.map_err(Error::of(self.sums.group().rank(), Which::All.name()))?;
        // SAFETY: as this function's.
        unsafe { self.sums.copy(out.bound()) }
    }

    #[track_caller]
    fn gather(
        &self,
        gather: &Arc<B::Program>,
        out: RawShards<B>,
        trace: Option<&mut Vec<Span>>,
    ) -> Result<()> {
        let mut bound = [const { Bound::Nothing }; MATRICES];
        bound[matrices::A] = out.bound();
        let arguments = Arguments {
            call: Which::All.name(),
            matrices: &bound,
            shared: &[out.id],
            added: Added::default(),
        };
        call::run(self.sums.group(), None, gather, arguments, trace)
    }
}

/// The program that gathers the sums of all rows, if each rank has the sums of its own rows.
fn gather_of<B: Backend>(out: RawShards<B>, config: Config) -> Result<Arc<B::Program>> {
    let (problem, config) = gather_problem(out.dtype, out.layout.clone(), config);
    out.group.program(problem, Some(config))
}

/// The problem of that gather, and its configuration. `layout`: of the output [M, N]. `config`: of the sums.
fn gather_problem(dtype: DType, layout: Layout, config: Config) -> (Problem, Config) {
    // Kernels store whole pieces of rows.
    let row = layout.k() * dtype.bytes();
    let config = if config.stores_behind() && row.is_multiple_of(16) {
        stored()
    } else {
        config.with_route(Route::Pull)
    };
    let operation = Operation::GATHER_OF_MATMUL_ALL_REDUCE;
    (Problem::new(operation, dtype, layout, 0), config)
}
