//! The operands and the outputs of products, without element types: how they are checked against a plan, and bound.

use smallvec::SmallVec;

use super::call::{
    Added, RawOutput, RawShards, RawView, require_dtype, require_same_group, require_shape,
};
use super::product::expected_weight;
use super::quantized::{OutputForm, ProductOutput};
use super::row_split::RowSplit;
use super::scales::{Expected, RawOperand, RawShardedOperand};
use crate::backend::Backend;
use crate::backend::sealed::Bound;
use crate::error::{Error, Result, require_count};
use crate::group::Group;
use crate::schedule::layout::MAX_EXTENT;
use crate::schedule::limits::limit;
use crate::schedule::operation::{RowResult, RowSource};
use crate::schedule::plan::matrices::{self, MATRICES};
use crate::schedule::{MAX_WEIGHTS, Problem, Scaling};

/// The weights of a product. All of them use one gather of the rows.
pub type RawWeights<'a, B> = SmallVec<[RawOperand<'a, B>; MAX_WEIGHTS]>;
/// The outputs of a product.
pub type RawOutputs<'a, B> = SmallVec<[ProductOutput<'a, B>; MAX_WEIGHTS]>;

/// The rows that a product multiplies.
pub enum RawRows<'a, B: Backend> {
    /// This rank's own, [M, K].
    Own(RawOperand<'a, B>),
    /// Those of all ranks, which are gathered.
    Sharded(RawShardedOperand<'a, B>),
}

/// Where a product goes.
// A box would cost an allocation for each call.
#[expect(clippy::large_enum_variant)]
pub enum RawResults<'a, B: Backend> {
    /// Matrices of this rank's own: one for each weight, or the rank's rows of a sum.
    Own(RawOutputs<'a, B>),
    /// A sharded matrix, which gets a sum: the rank's own rows, or all.
    Sharded(RawShards<'a, B>),
}

/// What is added to a product.
pub struct Addends<'a, B: Backend> {
    pub bias: Option<RawView<'a, B>>,
    pub residual: Option<RawView<'a, B>>,
}

/// What a product reads.
pub struct ProductOperands<'a, B: Backend> {
    pub a: RawRows<'a, B>,
    pub weights: RawWeights<'a, B>,
    pub addends: Addends<'a, B>,
}

/// The matrices of a call, by number in its schedule.
pub struct CallMatrices<'a, B: Backend> {
    pub bound: [Bound<'a, B>; MATRICES],
    /// The numbers of the sharded matrices that ranks compare.
    pub shared: SmallVec<[u32; 2]>,
    pub added: Added,
}

impl<B: Backend> Default for CallMatrices<'_, B> {
    fn default() -> Self {
        CallMatrices {
            bound: [const { Bound::Nothing }; MATRICES],
            shared: SmallVec::new(),
            added: Added::default(),
        }
    }
}

// Derived, they would need a backend that can be copied.
impl<B: Backend> Clone for Addends<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Backend> Copy for Addends<'_, B> {}

impl<B: Backend> Default for Addends<'_, B> {
    fn default() -> Self {
        Addends {
            bias: None,
            residual: None,
        }
    }
}

impl<'a, B: Backend> RawRows<'a, B> {
    pub fn group(&self) -> &'a Group<B> {
        match self {
            RawRows::Own(a) => a.values.group,
            RawRows::Sharded(a) => a.values.group,
        }
    }

    /// The extents [M, K], and which rank owns which rows if they are sharded.
    pub fn split(&self) -> RowSplit {
        match self {
            RawRows::Own(a) => a.values.shape.into(),
            RawRows::Sharded(a) => RowSplit::of(a.values.layout),
        }
    }

    /// How many values share a scale.
    pub fn scaling(&self) -> Result<Scaling> {
        match self {
            RawRows::Own(a) => a.scaling(),
            RawRows::Sharded(a) => a.scaling(),
        }
    }

    /// Checks the rows and their scales against what `planned` has planned.
    pub fn check(&self, planned: &Group<B>, problem: &Problem) -> Result<()> {
        let (layout, group) = (&problem.layout, self.group());
        let shape = [layout.m(), layout.k()];
        let scales = Expected::rows(problem.form.a_scaling, shape);
        let foreign = if problem.operation.is_alone() {
            "a"
        } else {
            "the prepared product"
        };
        require_same_group(foreign, planned, group)?;
        // Only a prepared call can fail here; a short call is planned from these arguments.
        const NAME: &str = "a [M, K] of a prepared call";
        match (self, problem.operation.rows) {
            (RawRows::Sharded(a), RowSource::Gathered) => {
                let of_rows = "a (rows of each rank) of a prepared call";
                a.values
                    .require_split([NAME, of_rows], layout, layout.k())?;
                require_dtype("a", problem.dtypes.operands, a.values.dtype)?;
                a.check_scales(layout, &scales)
            }
            (RawRows::Own(a), RowSource::Own) => {
                require_shape(NAME, shape, a.values.shape)?;
                require_dtype("a", problem.dtypes.operands, a.values.dtype)?;
                a.check_scales(group, &scales)
            }
            (RawRows::Own(_), _) => Err(misplaced("a", SHARDED)),
            (RawRows::Sharded(_), _) => Err(misplaced("a", OWN)),
        }
    }

    pub fn bind<'m>(&self, matrices: &mut CallMatrices<'m, B>)
    where
        'a: 'm,
    {
        match self {
            RawRows::Own(a) => a.bind(&mut matrices.bound, matrices::A, matrices::A_SCALES),
            RawRows::Sharded(a) => {
                a.bind(&mut matrices.bound);
                matrices.shared.extend(a.shared());
            }
        }
    }
}

impl<'a, B: Backend> ProductOperands<'a, B> {
    /// Checks the rows and the weights against what `planned` has planned.
    pub fn check(&self, planned: &Group<B>, problem: &Problem) -> Result<()> {
        self.a.check(planned, problem)?;
        check_weights(planned, problem, &self.weights)
    }

    pub fn bind<'m>(&self, matrices: &mut CallMatrices<'m, B>, problem: &Problem)
    where
        'a: 'm,
    {
        self.a.bind(matrices);
        for (number, weight) in self.weights.iter().enumerate().take(MAX_WEIGHTS) {
            let (values, scales) = (matrices::B + number, matrices::B_SCALES + number);
            weight.bind(&mut matrices.bound, values, scales);
        }
        self.addends.bind(matrices, problem);
    }
}

impl<'a, B: Backend> Addends<'a, B> {
    /// Checks the bias and the residual.
    pub fn check(&self, group: &Group<B>, problem: &Problem) -> Result<()> {
        let (form, n) = (&problem.form, problem.n);
        if let Some(bias) = &self.bias {
            // Before the shape, so that an N that no product can have is refused as a limit.
            limit("N", n, 1, MAX_EXTENT)?;
            require_same_group("bias", bias.group, group)?;
            let (what, columns) = if form.gated {
                ("bias [1, 2 N]", form.multiplied(n))
            } else {
                ("bias [1, N]", n)
            };
            require_shape(what, [1, columns], bias.shape)?;
            require_dtype("bias", problem.dtypes.partials, bias.dtype)?;
        }
        if let Some(residual) = &self.residual {
            let outputs = form.widths.len().max(1);
            let what = "the number of outputs of a product with a residual";
            limit(what, outputs, 1, 1)?;
            require_same_group("residual", residual.group, group)?;
            let what = match problem.operation.result {
                RowResult::SumOfOwnRows => "residual [rows of this rank, N]",
                RowResult::Kept | RowResult::SumOfAllRows | RowResult::Blocks => "residual [M, N]",
            };
            require_shape(what, [result_rows(group, problem), n], residual.shape)?;
            require_dtype("residual", problem.dtypes.partials, residual.dtype)?;
        }
        Ok(())
    }

    pub fn bind<'m>(&self, matrices: &mut CallMatrices<'m, B>, problem: &Problem)
    where
        'a: 'm,
    {
        if let Some(view) = &self.bias {
            matrices.bound[matrices::BIAS] = view.input();
        }
        if let Some(view) = &self.residual {
            matrices.bound[matrices::RESIDUAL] = view.input();
        }
        // What a rank adds to a result that it keeps does not concern the others.
        if problem.operation.sends_product() {
            matrices.added = Added {
                bias: self.bias.is_some(),
                residual: self.residual.is_some(),
            };
        }
    }
}

impl<'a, B: Backend> RawResults<'a, B> {
    /// The sharded matrix, if it is one.
    pub fn sharded(&self) -> Option<RawShards<'a, B>> {
        match self {
            RawResults::Own(_) => None,
            RawResults::Sharded(out) => Some(*out),
        }
    }

    /// None if there are no outputs.
    pub fn form(&self) -> Result<Option<OutputForm>> {
        match self {
            RawResults::Own(outputs) => OutputForm::of(outputs),
            RawResults::Sharded(out) => Ok(Some(out.dtype.into())),
        }
    }

    /// Checks the outputs against what `planned` has planned.
    pub fn check(&self, planned: &Group<B>, problem: &Problem) -> Result<()> {
        let result = problem.operation.result;
        match self {
            RawResults::Own(_) if result.is_for_all() => Err(misplaced("out", SHARDED)),
            RawResults::Own(outputs) => check_outputs(planned, problem, outputs),
            RawResults::Sharded(_) if !result.is_sent() => Err(misplaced("out", OWN)),
            RawResults::Sharded(out) => {
                require_dtype("out", problem.dtypes.output, out.dtype)?;
                require_same_group("out", out.group, planned)?;
                let names = ["out [M, N]", "out (rows of each rank)"];
                out.require_split(names, &problem.layout, problem.n)
            }
        }
    }

    /// Moves the outputs' memory into `matrices`.
    pub fn bind<'m>(&mut self, matrices: &mut CallMatrices<'m, B>, problem: &Problem)
    where
        'a: 'm,
    {
        match self {
            RawResults::Own(outputs) => {
                for (number, out) in outputs.iter_mut().enumerate().take(MAX_WEIGHTS) {
                    out.bind(&mut matrices.bound, number);
                }
            }
            RawResults::Sharded(out) if problem.operation.result.is_for_all() => {
                matrices.bound[matrices::OUT] = out.bound();
                matrices.shared.push(out.id);
            }
            RawResults::Sharded(out) => matrices.bound[matrices::OUT] = out.own_rows(),
        }
    }
}

/// The rows of the result that this rank gets.
fn result_rows<B: Backend>(group: &Group<B>, problem: &Problem) -> usize {
    match problem.operation.result {
        RowResult::SumOfOwnRows => problem.layout.rows_of(group.rank()).len(),
        RowResult::Kept | RowResult::SumOfAllRows | RowResult::Blocks => problem.layout.m(),
    }
}

/// Checks the weights' widths and depth K against the plan.
fn check_weights<B: Backend>(
    group: &Group<B>,
    problem: &Problem,
    weights: &[RawOperand<B>],
) -> Result<()> {
    let (form, k) = (&problem.form, problem.layout.k());
    let widths = form.columns(problem.n)?;
    let whole = if form.gated {
        "a gated product"
    } else {
        "the prepared product"
    };
    let count = form.weight_count();
    require_count(whole, "weight", count, "this call", weights.len())?;
    for (number, weight) in weights.iter().enumerate() {
        let n = widths[if form.gated { 0 } else { number }];
        let (what, shape) = expected_weight(form.weights, n, k);
        let expected = Expected::weight(form.scaling_of_weight(number), [n, k]);
        let values = weight.values;
        let fits = require_same_group("b", values.group, group)
            .and_then(|()| require_shape(what, shape, values.shape))
            .and_then(|()| require_dtype("b", problem.dtypes.weights, values.dtype))
            .and_then(|()| weight.check_scales(group, &expected));
        fits.map_err(Error::one_of("weight", number, weights.len()))?;
    }
    Ok(())
}

/// Checks the widths and the rows of outputs of this rank's own against the plan.
fn check_outputs<B: Backend>(
    group: &Group<B>,
    problem: &Problem,
    outputs: &[ProductOutput<B>],
) -> Result<()> {
    let (form, rows) = (&problem.form, result_rows(group, problem));
    let widths = form.columns(problem.n)?;
    let what = match problem.operation.result {
        RowResult::SumOfOwnRows => "out [rows of this rank, N]",
        RowResult::Kept | RowResult::SumOfAllRows | RowResult::Blocks => "out [M, N]",
    };
    // A text of its own for each would be made for every call.
    let whole = match form.weight_count() {
        2 if form.gated => "a gated product",
        1 => "a product with 1 weight",
        2 => "a product with 2 weights",
        3 => "a product with 3 weights",
        _ => "a product with 4 weights",
    };
    require_count(whole, "output", widths.len(), "this call", outputs.len())?;
    for (number, (out, &n)) in outputs.iter().zip(&widths).enumerate() {
        let RawOutput { dtype, shape, .. } = out.values;
        let fits = require_same_group("out", out.values.group, group)
            .and_then(|()| require_shape(what, [rows, n], shape))
            .and_then(|()| require_dtype("out", problem.dtypes.output, dtype))
            .and_then(|()| out.check_scales(group, form.quantization));
        fits.map_err(Error::one_of("output", number, outputs.len()))?;
    }
    Ok(())
}

pub const OWN: &str = "a matrix of this rank's own";
pub const SHARDED: &str = "a sharded matrix";

/// An argument is of the other kind of matrix. The compiler has not checked that without element types.
pub fn misplaced(argument: &str, expected: &str) -> Error {
    let found = if expected == SHARDED { OWN } else { SHARDED };
    Error::unsuitable(format!("the kind of {argument}"), expected, found)
}
