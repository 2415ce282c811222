//! Plans and runs the product of one rank, without element types.

use std::fmt;
use std::sync::Arc;

use super::call::{
    self, Added, Arguments, RawView, require_dtype, require_same_group, require_shape,
};
use super::product::{
    self, Addends, CallForm, ProductOptions, RawProduct, bind_outputs, bind_weights, check_outputs,
    check_weights, product_of,
};
use super::quantized::OutputForm;
use super::scales::{Expected, RawOperand};
use crate::backend::Backend;
use crate::backend::sealed::Bound;
use crate::error::Result;
use crate::explanation::Explanation;
use crate::group::Group;
use crate::schedule::plan::matrices::{self, MATRICES};
use crate::schedule::{Config, Layout, Operation, Problem, Schedule, Widths};

const OPERATION: Operation = Operation::MATMUL;

/// Plans the product, unless the group has its program, and runs it.
#[track_caller]
pub fn run<B: Backend>(
    options: &ProductOptions,
    addends: &Addends<B>,
    a: &RawOperand<B>,
    product: RawProduct<B>,
) -> Result<()> {
    let RawView { group, shape, .. } = a.values;
    let (weights, outputs) = &product;
    let plan = || {
        let call = options.called(a.scaling()?, weights, OutputForm::of(outputs)?)?;
        let widths = options.widths(group, shape[1], weights)?;
        plan(options, group, addends, shape, &widths, &call)
    };
    let planned = group.judged(OPERATION.name(), plan())?;
    planned.run(addends, a, product)
}

/// Plans products of a matrix [m, k] with weights of these N.
#[track_caller]
pub fn prepare<B: Backend>(
    options: &ProductOptions,
    group: &Group<B>,
    addends: &Addends<B>,
    shape: [usize; 2],
    widths: &Widths,
) -> Result<PlannedProduct<B>> {
    let planned = options.check_widths(widths).and_then(|()| {
        let call = options.planned();
        plan(options, group, addends, shape, widths, &call)
    });
    group.judged(OPERATION.name(), planned)
}

/// Whether the group can multiply a matrix [m, k] with weights of these N.
#[track_caller]
pub fn supported<B: Backend>(
    options: &ProductOptions,
    group: &Group<B>,
    addends: &Addends<B>,
    shape: [usize; 2],
    widths: &Widths,
) -> Result<()> {
    let answer = || {
        options.check_widths(widths)?;
        let call = options.planned();
        let problem = problem(options, group, addends, shape, widths, &call)?;
        group.checked_schedule(&problem, options.config).map(drop)
    };
    group.answered(OPERATION.name(), answer())
}

fn plan<B: Backend>(
    options: &ProductOptions,
    group: &Group<B>,
    addends: &Addends<B>,
    shape: [usize; 2],
    widths: &[usize],
    call: &CallForm,
) -> Result<PlannedProduct<B>> {
    let problem = problem(options, group, addends, shape, widths, call)?;
    Ok(PlannedProduct {
        program: group.program(problem.clone(), options.config)?,
        group: group.clone(),
        problem,
    })
}

/// The problem of the product of a matrix [m, k].
fn problem<B: Backend>(
    options: &ProductOptions,
    group: &Group<B>,
    addends: &Addends<B>,
    [m, k]: [usize; 2],
    widths: &[usize],
    call: &CallForm,
) -> Result<Problem> {
    let layout = Layout::new(&[m], k)?;
    let problem = options.problem::<B>(OPERATION, layout, widths, call)?;
    addends.check(group, &problem, m)?;
    Ok(problem)
}

/// A product of one rank that has been planned.
pub struct PlannedProduct<B: Backend> {
    // Freed before the group that it belongs to can end.
    program: Arc<B::Program>,
    group: Group<B>,
    problem: Problem,
}

impl<B: Backend> PlannedProduct<B> {
    pub fn describe(&self, f: &mut fmt::Formatter) -> fmt::Result {
        product::describe::<B>(f, "PreparedMatmul", &self.problem)
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

    #[track_caller]
    pub fn run(
        &self,
        addends: &Addends<B>,
        a: &RawOperand<B>,
        product: RawProduct<B>,
    ) -> Result<()> {
        let checked = self.check(addends, a, &product);
        self.group.judged(OPERATION.name(), checked)?;
        let (weights, outputs) = product;
        let mut bound = [const { Bound::Nothing }; MATRICES];
        a.bind(&mut bound, matrices::A, matrices::A_SCALES);
        addends.bind(&mut bound);
        bind_weights(&mut bound, weights);
        bind_outputs(&mut bound, outputs);
        let arguments = Arguments {
            call: OPERATION.name(),
            matrices: &bound,
            shared: &[],
            added: Added::default(),
        };
        call::run(&self.group, None, &self.program, arguments, None)
    }

    /// Checks the arguments against the plan, before anything is done.
    fn check(
        &self,
        addends: &Addends<B>,
        a: &RawOperand<B>,
        (weights, outputs): &RawProduct<B>,
    ) -> Result<()> {
        let (group, problem) = (&self.group, &self.problem);
        let layout = &problem.layout;
        let widths = problem.form.columns(problem.n)?;
        let expected = [layout.m(), layout.k()];
        let RawView {
            group: its,
            dtype,
            shape,
            ..
        } = a.values;
        require_same_group("a", its, group)?;
        // Only a prepared call can fail here; a short call was planned from these arguments.
        require_shape("a [M, K] of a prepared call", expected, shape)?;
        require_dtype("a", problem.dtypes.operands, dtype)?;
        a.check_scales(group, &Expected::rows(problem.form.a_scaling, expected))?;
        addends.check(group, problem, layout.m())?;
        check_weights(group, problem, &widths, weights)?;
        check_outputs(group, "out [M, N]", problem, &widths, layout.m(), outputs)
    }
}
