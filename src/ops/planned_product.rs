//! Plans and runs products, without element types.
#![allow(unsafe_code)]

use std::fmt;
use std::sync::{Arc, OnceLock};

use super::call::{self, Arguments, RawShards};
use super::product::{ProductOptions, ProductRequest, describe};
use super::product_operands::{Addends, CallMatrices, ProductOperands, RawResults, RawRows};
use crate::backend::Backend;
use crate::backend::sealed::Bound;
use crate::error::{Error, Result};
use crate::explanation::Explanation;
use crate::group::Group;
use crate::profile::span::Span;
use crate::schedule::limits::limit;
use crate::schedule::operation::{OperationPart, RowResult, RowSource};
use crate::schedule::plan::collectives::stored;
use crate::schedule::plan::matrices::{A, PARTIALS};
use crate::schedule::plan::partials::is_one_shot;
use crate::schedule::{Config, Operation, Problem, Route, Schedule};

/// Notes the result of a check of `operation`. The other ranks are told of a failure, unless this rank is alone in it.
#[track_caller]
pub fn judged<B: Backend, R>(
    group: &Group<B>,
    operation: Operation,
    result: Result<R>,
) -> Result<R> {
    if operation.is_alone() || operation.part == OperationPart::Work {
        group.judged(operation.name(), result)
    } else {
        result.map_err(group.refusal(operation.name()))
    }
}

impl ProductOptions<'_> {
    /// Plans the product, unless the group has its programs, and runs it.
    #[track_caller]
    pub fn run<B: Backend>(
        &self,
        operands: &ProductOperands<B>,
        results: &mut RawResults<B>,
    ) -> Result<()> {
        let group = operands.a.group();
        let problem = self.problem_of_call(operands, results);
        let planned = problem.and_then(|problem| self.plan(group, problem));
        let planned = judged(group, self.operation, planned)?;
        planned.check(self.operation, operands, Some(results))?;
        planned.launch(operands, results, None)
    }

    /// Plans the product.
    #[track_caller]
    pub fn prepare<B: Backend>(&self, request: ProductRequest<B>) -> Result<PlannedProduct<B>> {
        let group = request.group;
        let problem = self.prepared_problem(request);
        let planned = problem.and_then(|problem| self.plan(group, problem));
        group.judged(self.operation.name(), planned)
    }

    /// Whether the group can make the product.
    #[track_caller]
    pub fn supported<B: Backend>(&self, request: ProductRequest<B>) -> Result<()> {
        let group = request.group;
        let answer = || {
            let problem = self.prepared_problem(request)?;
            let (schedule, config) = group.checked_schedule(&problem, self.config)?;
            let has_product = schedule.product().is_some();
            if let Some(before) = product_before(&problem, has_product) {
                group.checked_schedule(&before, Some(config))?;
            }
            if needs_gather(&problem, &config, has_product) {
                let (gather, config) = gather_after(&problem, config)?;
                group.checked_schedule(&gather, Some(config))?;
            }
            let Problem { operation, n, .. } = problem;
            if operation.rows == RowSource::Gathered {
                group.require_whole_pieces("K", problem.layout.k(), self.dtype)?;
            }
            if operation.result.is_for_all() {
                group.require_whole_pieces("N", n, problem.dtypes.output)?;
            }
            Ok(())
        };
        group.answered(self.operation.name(), answer())
    }

    fn plan<B: Backend>(&self, group: &Group<B>, problem: Problem) -> Result<PlannedProduct<B>> {
        let (program, config) = group.configured_program(problem.clone(), self.config)?;
        let has_product = B::schedule(&program).product().is_some();
        let before = match product_before(&problem, has_product) {
            Some(before) => Some(group.program(before, Some(config))?),
            None => None,
        };
        let after = if needs_gather(&problem, &config, has_product) {
            let (gather, config) = gather_after(&problem, config)?;
            Some(group.program(gather, Some(config))?)
        } else {
            None
        };
        Ok(PlannedProduct {
            program,
            before,
            after,
            gather: OnceLock::new(),
            multiply: OnceLock::new(),
            group: group.clone(),
            problem,
            config,
        })
    }
}

/// The product that runs before a sum, if the sum's schedule has none.
fn product_before(problem: &Problem, has_product: bool) -> Option<Problem> {
    let is_needed = problem.operation.sends_product() && !has_product;
    is_needed.then(|| Problem {
        operation: Operation::MULTIPLY_PARTIALS,
        ..problem.clone()
    })
}

/// True if each rank adds up only its own rows of a sum that all ranks get.
fn reduces_own_rows(problem: &Problem, config: &Config) -> bool {
    problem.operation.result.is_for_all() && !is_one_shot(problem, config)
}

/// True if a gather must follow, so that all ranks have all sums: over several hosts, and if the sum's schedule has no
/// product, unless each rank adds all rows.
fn needs_gather(problem: &Problem, config: &Config, has_product: bool) -> bool {
    let sends_none = !has_product || problem.hosts.count() > 1;
    sends_none && reduces_own_rows(problem, config)
}

/// The problem of that gather, and its configuration. `config`: of the sums.
fn gather_after(problem: &Problem, config: Config) -> Result<(Problem, Config)> {
    let (dtype, layout) = (problem.dtypes.output, problem.layout.of_columns(problem.n)?);
    // Kernels store whole pieces of rows.
    let row = layout.k() * dtype.bytes();
    let config = if config.stores_behind() && row.is_multiple_of(16) {
        stored()
    } else {
        config.with_route(Route::Pull)
    };
    let operation = Operation::GATHER_OF_MATMUL_ALL_REDUCE;
    Ok((Problem::new(operation, dtype, layout, 0), config))
}

/// A product that has been planned.
pub struct PlannedProduct<B: Backend> {
    // Freed before the group that they belong to can end.
    program: Arc<B::Program>,
    /// The product of a sum, if no partial is moved before it is complete.
    before: Option<Arc<B::Program>>,
    /// Gathers the sums, if each rank has those of its own rows only.
    after: Option<Arc<B::Program>>,
    /// The gather of rows alone, once it has been asked for.
    gather: OnceLock<Arc<B::Program>>,
    /// The product of gathered rows alone, once it has been asked for.
    multiply: OnceLock<Arc<B::Program>>,
    pub group: Group<B>,
    problem: Problem,
    pub config: Config,
}

// A derived `Clone` would need a backend that can be cloned.
impl<B: Backend> Clone for PlannedProduct<B> {
    fn clone(&self) -> Self {
        PlannedProduct {
            program: self.program.clone(),
            before: self.before.clone(),
            after: self.after.clone(),
            gather: self.gather.clone(),
            multiply: self.multiply.clone(),
            group: self.group.clone(),
            problem: self.problem.clone(),
            config: self.config,
        }
    }
}

impl<B: Backend> PlannedProduct<B> {
    pub fn describe(&self, f: &mut fmt::Formatter, prepared: &str) -> fmt::Result {
        describe::<B>(f, prepared, &self.problem)
    }

    pub fn operation(&self) -> Operation {
        self.problem.operation
    }

    pub fn schedule(&self) -> &Schedule {
        B::schedule(&self.program)
    }

    pub fn explain(&self) -> Explanation {
        call::explain(&self.group, &self.problem, self.config)
    }

    /// The rank that owns a row.
    pub fn owner(&self, row: usize) -> Option<usize> {
        let layout = &self.problem.layout;
        (0..layout.world()).find(|&rank| layout.rows_of(rank).contains(&row))
    }

    /// Checks the arguments, and runs the product.
    #[track_caller]
    pub fn run(
        &self,
        operands: &ProductOperands<B>,
        results: &mut RawResults<B>,
        trace: Option<&mut Vec<Span>>,
    ) -> Result<()> {
        let operation = self.problem.operation;
        self.check(operation, operands, Some(results))?;
        let added = operands.addends.check(&self.group, &self.problem);
        judged(&self.group, operation, added)?;
        self.launch(operands, results, trace)
    }

    /// Only gathers the rows. Collective.
    #[track_caller]
    pub fn gather(&self, a: &RawRows<B>, trace: Option<&mut Vec<Span>>) -> Result<()> {
        let operation = Operation::GATHER;
        judged(a.group(), operation, a.check(&self.group, &self.problem))?;
        let program = self.kept_part(&self.gather, operation)?;
        let mut matrices = CallMatrices::default();
        a.bind(&mut matrices);
        self.enqueue(operation, None, &program, matrices, trace)
    }

    /// Only multiplies, with rows that have been gathered.
    #[track_caller]
    pub fn multiply(
        &self,
        operands: &ProductOperands<B>,
        results: &mut RawResults<B>,
        trace: Option<&mut Vec<Span>>,
    ) -> Result<()> {
        let operation = Operation::MULTIPLY;
        self.check(operation, operands, Some(results))?;
        let program = self.kept_part(&self.multiply, operation)?;
        let mut matrices = CallMatrices::default();
        operands.bind(&mut matrices, &self.problem);
        results.bind(&mut matrices, &self.problem);
        self.enqueue(operation, None, &program, matrices, trace)
    }

    /// Only multiplies, and leaves the partials where they are made. Not collective.
    #[track_caller]
    pub fn multiply_partials(&self, operands: &ProductOperands<B>) -> Result<()> {
        let operation = Operation::MULTIPLY_PARTIALS;
        self.check(operation, operands, None)?;
        let program = self.part(operation)?;
        let mut matrices = CallMatrices::default();
        operands.bind(&mut matrices, &self.problem);
        self.enqueue(self.problem.operation, None, &program, matrices, None)
    }

    /// Only sums the partials of an earlier run. Collective.
    #[track_caller]
    pub fn reduce(&self, addends: &Addends<B>, results: &mut RawResults<B>) -> Result<()> {
        let (group, operation) = (&self.group, self.problem.operation);
        let of = Error::of(group.rank(), operation.name());
        results.check(group, &self.problem).map_err(of)?;
        let config = Some(self.config.with_route(Route::Pull));
        let program = group.program(self.problem.clone(), config).map_err(of)?;
        let after = if reduces_own_rows(&self.problem, &self.config) {
            let (gather, config) = gather_after(&self.problem, self.config).map_err(of)?;
            Some(group.program(gather, Some(config)).map_err(of)?)
        } else {
            None
        };
        let out = results.sharded();
        let mut matrices = CallMatrices::default();
        addends.bind(&mut matrices, &self.problem);
        results.bind(&mut matrices, &self.problem);
        self.enqueue(operation, None, &program, matrices, None)?;
        self.gather_sums(after.as_ref(), out, None)
    }

    /// Only copies what a run moves, without notifying other ranks. Not collective. `a`: rows that are gathered.
    ///
    /// # Safety
    /// Until the copy has ended, no other rank writes its own rows of these matrices, or begins an operation that makes
    /// partials or sums.
    #[track_caller]
    pub unsafe fn copy(
        &self,
        a: Option<&RawRows<B>>,
        results: Option<&mut RawResults<B>>,
    ) -> Result<()> {
        let operation = match self.problem.operation.result {
            RowResult::Kept | RowResult::Blocks => Operation::COPY,
            RowResult::SumOfOwnRows => Operation::COPY_PARTIALS,
            RowResult::SumOfAllRows => Operation::COPY_PARTIALS_AND_SUMS,
        };
        let mut matrices = CallMatrices::default();
        let of = Error::of(self.group.rank(), operation.name());
        if let Some(a) = a {
            a.check(&self.group, &self.problem).map_err(of)?;
            a.bind(&mut matrices);
        }
        if let Some(results) = results {
            results.check(&self.group, &self.problem).map_err(of)?;
            results.bind(&mut matrices, &self.problem);
        }
        let program = self.part(operation)?;
        self.enqueue(operation, None, &program, matrices, None)
    }

    /// Checks the rows, weights and outputs of `operation` against the plan, before anything is done.
    #[track_caller]
    fn check(
        &self,
        operation: Operation,
        operands: &ProductOperands<B>,
        results: Option<&RawResults<B>>,
    ) -> Result<()> {
        let (group, problem) = (&self.group, &self.problem);
        let results = results.map_or(Ok(()), |results| results.check(group, problem));
        let checked = operands.check(group, problem).and(results);
        judged(operands.a.group(), operation, checked)
    }

    /// Runs the product, whose arguments have been checked.
    #[track_caller]
    fn launch(
        &self,
        operands: &ProductOperands<B>,
        results: &mut RawResults<B>,
        mut trace: Option<&mut Vec<Span>>,
    ) -> Result<()> {
        let (out, operation) = (results.sharded(), self.problem.operation);
        let mut matrices = CallMatrices::default();
        operands.bind(&mut matrices, &self.problem);
        results.bind(&mut matrices, &self.problem);
        let (before, first) = (self.before.as_ref(), trace.as_deref_mut());
        self.enqueue(operation, before, &self.program, matrices, first)?;
        self.gather_sums(self.after.as_ref(), out, trace)
    }

    #[track_caller]
    fn gather_sums(
        &self,
        gather: Option<&Arc<B::Program>>,
        out: Option<RawShards<B>>,
        trace: Option<&mut Vec<Span>>,
    ) -> Result<()> {
        let (Some(gather), Some(out)) = (gather, out) else {
            return Ok(());
        };
        let mut matrices = CallMatrices::default();
        matrices.bound[A] = out.bound();
        let arguments = Arguments {
            call: self.problem.operation.name(),
            matrices: &matrices.bound,
            shared: &[out.id],
            added: matrices.added,
        };
        call::run(&self.group, None, gather, arguments, trace)
    }

    /// The program of a part of the product, which a later call finds in `kept`.
    #[track_caller]
    fn kept_part(
        &self,
        kept: &OnceLock<Arc<B::Program>>,
        operation: Operation,
    ) -> Result<Arc<B::Program>> {
        match kept.get() {
            Some(program) => Ok(program.clone()),
            None => {
                let program = self.part(operation)?;
                Ok(kept.get_or_init(|| program).clone())
            }
        }
    }

    #[track_caller]
    fn part(&self, operation: Operation) -> Result<Arc<B::Program>> {
        let whole = &self.problem;
        let problem = if operation.rows == RowSource::Gathered && !operation.multiplies() {
            // Only the rows count, so products that differ otherwise share it.
            let (dtype, layout) = (whole.dtypes.operands, whole.layout.clone());
            Problem {
                beside: whole.beside,
                ..Problem::new(operation, dtype, layout, 0)
            }
        } else {
            Problem {
                operation,
                ..whole.clone()
            }
        };
        let program = self.group.program(problem, Some(self.config));
        judged(&self.group, operation, program)
    }

    /// Runs `program`, and `before` before it, as a call of `operation`.
    #[track_caller]
    fn enqueue(
        &self,
        operation: Operation,
        before: Option<&Arc<B::Program>>,
        program: &Arc<B::Program>,
        matrices: CallMatrices<B>,
        trace: Option<&mut Vec<Span>>,
    ) -> Result<()> {
        let CallMatrices {
            mut bound,
            shared,
            added,
        } = matrices;
        let partials = self.partials(before.into_iter().chain([program]))?;
        if let Some(partials) = &partials {
            bound[PARTIALS] = Bound::Symmetric(partials.as_ref());
        }
        let arguments = Arguments {
            call: operation.name(),
            matrices: &bound,
            shared: &shared,
            added,
        };
        call::run(&self.group, before, program, arguments, trace)
    }

    /// The memory for partials of a sum, which is enough for `programs`.
    #[track_caller]
    fn partials<'p>(
        &self,
        mut programs: impl Iterator<Item = &'p Arc<B::Program>>,
    ) -> Result<Option<Arc<B::Symmetric>>>
    where
        B::Program: 'p,
    {
        let (schedule, operation) = (self.schedule(), self.problem.operation);
        if !operation.sends_product() {
            return Ok(None);
        }
        let bytes = |schedule: &Schedule| {
            let partials = schedule.matrices()[PARTIALS];
            partials.rows.saturating_mul(partials.row_bytes())
        };
        let room = bytes(schedule);
        // A part of a sum is planned as with pulled partials, and only these lie without gaps.
        let fits = programs
            .try_for_each(|part| limit("bytes of partials", bytes(B::schedule(part)), 0, room));
        fits.map_err(Error::of(self.group.rank(), operation.name()))?;
        if schedule.is_idle() {
            return Ok(None);
        }
        self.group.partials(schedule).map(Some)
    }
}
