//! Plans and runs the product of rows that are gathered, without element types.
#![allow(unsafe_code)]

use std::fmt;
use std::sync::Arc;

use super::call::{self, Added, Arguments, RawShards, require_same_group};
use super::product::{
    self, Addends, ProductOptions, RawProduct, bind_outputs, bind_weights, check_outputs,
    check_weights, product_of,
};
use super::quantized::OutputForm;
use super::row_split::{RowSplit, staged};
use super::scales::{Expected, RawShardedOperand};
use crate::backend::Backend;
use crate::backend::sealed::Bound;
use crate::error::{Error, Result};
use crate::explanation::Explanation;
use crate::group::Group;
use crate::profile::span::Span;
use crate::schedule::plan::matrices::MATRICES;
use crate::schedule::{Config, Operation, Problem, Schedule, Widths};

const PRODUCT: Operation = Operation::ALL_GATHER_MATMUL;
const MULTIPLY: Operation = Operation::MULTIPLY;
const COPY: Operation = Operation::COPY;

/// A product of rows that are gathered: its options.
#[derive(Clone, Copy)]
pub struct GatherProduct<'p> {
    pub options: &'p ProductOptions,
    pub stages: Option<usize>,
}

impl GatherProduct<'_> {
    /// Plans the product, unless the group has its program, and runs it.
    #[track_caller]
    pub fn run<B: Backend>(
        &self,
        addends: &Addends<B>,
        a: &RawShardedOperand<B>,
        (weights, outputs): RawProduct<B>,
    ) -> Result<()> {
        let (RawShards { group, layout, .. }, options) = (a.values, self.options);
        let planned = || {
            let widths = options.widths(group, layout.k(), weights)?;
            let call = options.called(a.scaling()?, weights, OutputForm::of(outputs)?)?;
            let layout = staged(a.values.layout.clone(), self.stages)?;
            let problem = options.problem::<B>(PRODUCT, layout, &widths, &call)?;
            let program = self.program(group, addends, &problem)?;
            Ok((problem, program))
        };
        let (problem, program) = planned().map_err(group.refusal(PRODUCT.name()))?;
        let call = GatherCall {
            program: &program,
            group,
            problem: &problem,
        };
        call.collective(addends, a, Some((weights, outputs)), None)
    }

    /// Plans the product of matrices like `a` with weights of these N.
    #[track_caller]
    pub fn prepare<B: Backend>(
        &self,
        addends: &Addends<B>,
        a: RawShards<B>,
        widths: &Widths,
    ) -> Result<PlannedGather<B>> {
        let group = a.group;
        let prepare = || -> Result<PlannedGather<B>> {
            self.options.check_widths(widths)?;
            let layout = staged(a.layout.clone(), self.stages)?;
            let call = self.options.planned();
            let problem = self.options.problem::<B>(PRODUCT, layout, widths, &call)?;
            let program = self.program(group, addends, &problem)?;
            let config = Some(product_of(B::schedule(&program)).config);
            let layout = problem.layout.clone();
            let gather = Problem {
                beside: problem.beside,
                ..Problem::new(Operation::GATHER, self.options.dtype, layout, 0)
            };
            let multiply = Problem {
                operation: MULTIPLY,
                ..problem.clone()
            };
            Ok(PlannedGather {
                gather: group.program(gather, config)?,
                multiply: group.program(multiply, config)?,
                program,
                group: group.clone(),
                problem,
            })
        };
        group.judged(PRODUCT.name(), prepare())
    }

    /// Whether the group can gather and multiply such rows.
    #[track_caller]
    pub fn supported<B: Backend>(
        &self,
        group: &Group<B>,
        addends: &Addends<B>,
        rows: &RowSplit,
        widths: &Widths,
    ) -> Result<()> {
        let answer = || {
            let layout = rows.layout(group)?;
            let (k, options) = (layout.k(), self.options);
            options.check_widths(widths)?;
            let layout = staged(layout, self.stages)?;
            let problem = options.problem::<B>(PRODUCT, layout, widths, &options.planned())?;
            addends.check(group, &problem, problem.layout.m())?;
            group.checked_schedule(&problem, options.config)?;
            group.require_whole_pieces("K", k, options.dtype)
        };
        group.answered(PRODUCT.name(), answer())
    }

    fn program<B: Backend>(
        &self,
        group: &Group<B>,
        addends: &Addends<B>,
        problem: &Problem,
    ) -> Result<Arc<B::Program>> {
        addends.check(group, problem, problem.layout.m())?;
        group.program(problem.clone(), self.options.config)
    }
}

/// A product of gathered rows that has been planned.
pub struct PlannedGather<B: Backend> {
    // Freed before the group that they belong to can end.
    program: Arc<B::Program>,
    gather: Arc<B::Program>,
    multiply: Arc<B::Program>,
    group: Group<B>,
    problem: Problem,
}

// A derived `Clone` would need a backend that can be cloned.
impl<B: Backend> Clone for PlannedGather<B> {
    fn clone(&self) -> Self {
        PlannedGather {
            program: self.program.clone(),
            gather: self.gather.clone(),
            multiply: self.multiply.clone(),
            group: self.group.clone(),
            problem: self.problem.clone(),
        }
    }
}

impl<B: Backend> PlannedGather<B> {
    pub fn describe(&self, f: &mut fmt::Formatter) -> fmt::Result {
        product::describe::<B>(f, "Prepared", &self.problem)
    }

    pub fn schedule(&self) -> &Schedule {
        B::schedule(&self.program)
    }

    pub fn config(&self) -> Config {
        product_of(self.schedule()).config
    }

    pub fn explain(&self) -> Explanation {
        call::explain(&self.group, &self.problem, self.config())
    }

    /// Gathers and multiplies. Collective.
    #[track_caller]
    pub fn run(
        &self,
        addends: &Addends<B>,
        a: &RawShardedOperand<B>,
        product: RawProduct<B>,
        trace: Option<&mut Vec<Span>>,
    ) -> Result<()> {
        let call = self.call(&self.program);
        call.collective(addends, a, Some(product), trace)
    }

    /// Only gathers. Collective.
    #[track_caller]
    pub fn gather(&self, a: &RawShardedOperand<B>, trace: Option<&mut Vec<Span>>) -> Result<()> {
        let call = self.call(&self.gather);
        call.collective(&Addends::default(), a, None, trace)
    }

    /// Only multiplies, with rows that have been gathered.
    #[track_caller]
    pub fn matmul(
        &self,
        addends: &Addends<B>,
        a: &RawShardedOperand<B>,
        product: RawProduct<B>,
        trace: Option<&mut Vec<Span>>,
    ) -> Result<()> {
        let call = self.call(&self.multiply);
        call.alone(MULTIPLY, addends, a, Some(product), trace)
    }

    /// Copies all rows from the other ranks without notifying them. Not collective.
    ///
    /// # Safety
    /// Until the copy has ended, no other rank writes its own rows of this matrix.
    #[track_caller]
    pub unsafe fn copy(&self, a: &RawShardedOperand<B>) -> Result<()> {
        let Problem { layout, beside, .. } = self.problem.clone();
        let problem = Problem {
            beside,
            ..Problem::new(COPY, self.problem.dtypes.operands, layout, 0)
        };
        let program = self.group.program(problem, Some(self.config()));
        let program = program.map_err(Error::of(self.group.rank(), COPY.name()))?;
        let call = self.call(&program);
        call.alone(COPY, &Addends::default(), a, None, None)
    }

    fn call<'c>(&'c self, program: &'c Arc<B::Program>) -> GatherCall<'c, B> {
        GatherCall {
            program,
            group: &self.group,
            problem: &self.problem,
        }
    }
}

/// A program that is about to be run.
struct GatherCall<'c, B: Backend> {
    program: &'c Arc<B::Program>,
    /// The group that the program belongs to.
    group: &'c Group<B>,
    /// The problem of the whole product. The program may do only a part of it.
    problem: &'c Problem,
}

impl<B: Backend> GatherCall<'_, B> {
    /// Runs the program as an operation of all ranks.
    #[track_caller]
    fn collective(
        &self,
        addends: &Addends<B>,
        a: &RawShardedOperand<B>,
        product: Option<RawProduct<B>>,
        trace: Option<&mut Vec<Span>>,
    ) -> Result<()> {
        let operation = match product {
            Some(_) => PRODUCT,
            None => Operation::GATHER,
        };
        if B::schedule(self.program).agreed().is_none() {
            return self.alone(operation, addends, a, product, None);
        }
        self.check(addends, a, product.as_ref())
            .map_err(a.values.group.refusal(operation.name()))?;
        self.launch(operation, addends, a, product, trace)
    }

    /// Runs the program on this rank alone.
    #[track_caller]
    fn alone(
        &self,
        operation: Operation,
        addends: &Addends<B>,
        a: &RawShardedOperand<B>,
        product: Option<RawProduct<B>>,
        trace: Option<&mut Vec<Span>>,
    ) -> Result<()> {
        let checked = self.check(addends, a, product.as_ref());
        a.values.group.judged(operation.name(), checked)?;
        self.launch(operation, addends, a, product, trace)
    }

    #[track_caller]
    fn launch(
        &self,
        operation: Operation,
        addends: &Addends<B>,
        a: &RawShardedOperand<B>,
        product: Option<RawProduct<B>>,
        trace: Option<&mut Vec<Span>>,
    ) -> Result<()> {
        let mut bound = [const { Bound::Nothing }; MATRICES];
        a.bind(&mut bound);
        addends.bind(&mut bound);
        if let Some((weights, outputs)) = product {
            bind_weights(&mut bound, weights);
            bind_outputs(&mut bound, outputs);
        }
        let arguments = Arguments {
            call: operation.name(),
            matrices: &bound,
            shared: &a.shared(),
            // What a rank adds to its own columns does not concern the others.
            added: Added::default(),
        };
        call::run(self.group, None, self.program, arguments, trace)
    }

    /// Checks the arguments against the plan, before anything is done.
    fn check(
        &self,
        addends: &Addends<B>,
        a: &RawShardedOperand<B>,
        product: Option<&RawProduct<B>>,
    ) -> Result<()> {
        let (group, problem) = (a.values.group, self.problem);
        let layout = &problem.layout;
        require_same_group("the prepared product", self.group, group)?;
        // Only a prepared call can fail here; a short call was planned from these arguments.
        let names = [
            "a [M, K] of a prepared call",
            "a (rows of each rank) of a prepared call",
        ];
        a.values.require_split(names, layout, layout.k())?;
        call::require_dtype("a", problem.dtypes.operands, a.values.dtype)?;
        let shape = [layout.m(), layout.k()];
        a.check_scales(layout, &Expected::rows(problem.form.a_scaling, shape))?;
        if let Some((weights, outputs)) = product {
            addends.check(group, problem, layout.m())?;
            let widths = problem.form.columns(problem.n)?;
            check_weights(group, problem, &widths, weights)?;
            check_outputs(group, "out [M, N]", problem, &widths, layout.m(), outputs)?;
        }
        Ok(())
    }
}
