//! What all products share: options, weights and outputs, without element types.

use std::fmt;

use smallvec::SmallVec;

use super::call::{Added, RawOutput, RawView, require_dtype, require_same_group, require_shape};
use super::quantized::{OutputForm, ProductOutput};
use super::scales::{self, Expected, RawOperand};
use crate::backend::Backend;
use crate::backend::sealed::Bound;
use crate::element::DType;
use crate::error::{Error, Result, require_count};
use crate::group::Group;
use crate::one_line::write_parts;
use crate::schedule::layout::MAX_EXTENT;
use crate::schedule::limits::limit;
use crate::schedule::operation::{RowResult, RowSource};
use crate::schedule::plan::matrices::{self, MATRICES};
use crate::schedule::scaling::WeightScalings;
use crate::schedule::{
    Accumulation, Activation, Config, DTypes, Form, Layout, MAX_WEIGHTS, Operation, Problem,
    Product, Quantization, Scaling, Schedule, WeightLayout, Widths,
};

/// The weights of a product. All of them use one gather of the rows.
pub type RawWeights<'a, B> = SmallVec<[RawOperand<'a, B>; MAX_WEIGHTS]>;
/// The outputs of a product.
pub type RawOutputs<'a, B> = SmallVec<[ProductOutput<'a, B>; MAX_WEIGHTS]>;

/// The weights and the outputs of a call. They are large, so they stay where they were made.
pub type RawProduct<'p, 'w, 'o, B> = (&'p [RawOperand<'w, B>], &'p mut [ProductOutput<'o, B>]);

/// What [`MAX_WEIGHTS`] limits, in messages.
const WEIGHTS: &str = "the number of weights of a product";

/// The options of a product, wherever its rows come from and go to.
#[derive(Clone)]
pub struct ProductOptions {
    /// The type of the operands.
    pub dtype: DType,
    pub activation: Activation,
    pub gated: bool,
    pub weights: WeightLayout,
    /// How many values of the operands share scales, for `prepare`.
    pub scaling: (Scaling, WeightScalings),
    pub accumulation: Accumulation,
    /// The weights' type for `prepare`, if the caller says one.
    pub weight_dtype: Option<DType>,
    /// The output's type for `prepare`, if the caller says one.
    pub output_dtype: Option<DType>,
    /// How outputs are quantised, for `prepare`.
    pub quantization: Option<Quantization>,
    pub constant_weights: bool,
    pub config: Option<Config>,
}

/// What a problem has of the builder if the call is prepared, and of its arguments if it is not.
#[derive(Clone, Debug)]
pub struct CallForm {
    /// The type of the weights.
    pub weights: DType,
    /// The outputs' type, and how they are quantised.
    pub output: OutputForm,
    /// How many values of `a` share a scale.
    pub a_scaling: Scaling,
    /// How many values of each weight share a scale. One entry may stand for all.
    pub b_scaling: WeightScalings,
}

/// What is added to a product.
pub struct Addends<'a, B: Backend> {
    pub bias: Option<RawView<'a, B>>,
    pub residual: Option<RawView<'a, B>>,
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

impl ProductOptions {
    pub fn new(dtype: DType) -> Self {
        ProductOptions {
            dtype,
            activation: Activation::Identity,
            gated: false,
            weights: WeightLayout::Nk,
            scaling: Default::default(),
            accumulation: Accumulation::default(),
            weight_dtype: None,
            output_dtype: None,
            quantization: None,
            constant_weights: false,
            config: None,
        }
    }

    /// Writes a builder with these options for `Debug`. `more`: options that only this builder has.
    pub fn describe<B: Backend>(
        &self,
        f: &mut fmt::Formatter,
        builder: &str,
        addends: &Addends<B>,
        more: impl IntoIterator<Item = Option<String>>,
    ) -> fmt::Result {
        write!(f, "{builder}<{}, {}>", B::NAME, self.dtype)?;
        let activation = self.activation;
        let shared = [
            addends.bias.is_some().then(|| "bias".into()),
            addends.residual.is_some().then(|| "residual".into()),
            (activation != Activation::Identity).then(|| format!("{activation:?}")),
            self.gated.then(|| "gated".into()),
            (self.weights == WeightLayout::Kn).then(|| "weights [K, N]".into()),
            self.weight_dtype.map(|dtype| format!("{dtype} weights")),
            self.output_dtype.map(|dtype| format!("{dtype} output")),
            self.quantization.map(|_| "quantized".into()),
            self.is_scaled().then(|| "scaled".into()),
            (self.accumulation == Accumulation::Fast).then(|| "fast accumulation".into()),
            self.constant_weights.then(|| "constant weights".into()),
            self.config.is_some().then(|| "config".into()),
        ];
        write_parts(f, shared.into_iter().chain(more).flatten())
    }

    /// True if calls are prepared for scales.
    fn is_scaled(&self) -> bool {
        let (a, b) = &self.scaling;
        [*a].iter()
            .chain(b)
            .any(|&scaling| scaling != Scaling::None)
    }

    /// What the builder says of calls that it prepares.
    pub fn planned(&self) -> CallForm {
        CallForm {
            weights: self.planned_weights(),
            output: self.planned_output(),
            a_scaling: self.scaling.0.normalised(),
            b_scaling: self.scaling.1.iter().map(|of| of.normalised()).collect(),
        }
    }

    fn planned_weights(&self) -> DType {
        self.weight_dtype.unwrap_or(self.half_or(DType::F8E4M3))
    }

    fn planned_output(&self) -> OutputForm {
        let dtype = self.output_dtype.unwrap_or(match self.quantization {
            Some(_) => DType::F8E4M3,
            None => self.half_or(DType::Bf16),
        });
        OutputForm {
            dtype,
            quantization: self.quantization,
        }
    }

    /// The type of the operands, if it has 16 bits.
    fn half_or(&self, otherwise: DType) -> DType {
        if self.dtype.is_half() {
            self.dtype
        } else {
            otherwise
        }
    }

    /// What the arguments say of a call that was not prepared.
    pub fn called<B: Backend>(
        &self,
        a_scaling: Scaling,
        weights: &[RawOperand<B>],
        output: Option<OutputForm>,
    ) -> Result<CallForm> {
        let weight = weights.first().map(|weight| weight.values.dtype);
        let mut b_scaling = WeightScalings::new();
        for weight in weights {
            b_scaling.push(weight.scaling()?);
        }
        Ok(CallForm {
            weights: weight.unwrap_or_else(|| self.planned_weights()),
            output: output.unwrap_or_else(|| self.planned_output()),
            a_scaling,
            b_scaling,
        })
    }

    /// The problem of a product with weights of these widths.
    pub fn problem<B: Backend>(
        &self,
        operation: Operation,
        layout: Layout,
        widths: &[usize],
        call: &CallForm,
    ) -> Result<Problem> {
        let several = widths.len() > 1 && !self.gated;
        let mut form = Form {
            widths: if several {
                widths.into()
            } else {
                Widths::new()
            },
            gated: self.gated,
            activation: self.activation,
            weights: self.weights,
            constant_weights: self.constant_weights,
            a_scaling: call.a_scaling,
            b_scaling: WeightScalings::new(),
            accumulation: self.accumulation,
            quantization: call.output.quantization,
        };
        form.b_scaling = for_each_weight(&call.b_scaling, form.weight_count())?;
        let n = form.n_of(widths);
        let OutputForm {
            dtype,
            quantization,
        } = call.output;
        let gathers = operation.rows == RowSource::Gathered;
        Ok(Problem {
            beside: scales::beside::<B>(call.a_scaling, layout.k(), gathers)?,
            dtypes: DTypes::of_product([self.dtype, call.weights], dtype, quantization)?,
            form,
            ..Problem::new(operation, self.dtype, layout, n)
        })
    }

    /// Checks the number of weights, and that gate and up have the same N. One N may stand for both.
    pub fn check_widths(&self, widths: &[usize]) -> Result<()> {
        if let [_] = widths {
            return Ok(());
        }
        self.check_count(widths.len())?;
        if self.gated {
            let (what, gate) = ("N of up, the second weight of a gated product,", widths[0]);
            limit(what, widths[1], gate, gate)?;
        }
        Ok(())
    }

    /// Checks the number of weights.
    fn check_count(&self, weights: usize) -> Result<()> {
        limit(WEIGHTS, weights, 1, MAX_WEIGHTS)?;
        if self.gated {
            require_count("a gated product", "weight", 2, "this call", weights)
        } else {
            Ok(())
        }
    }

    /// N of each weight of a call that was not prepared.
    pub fn widths<B: Backend>(
        &self,
        group: &Group<B>,
        k: usize,
        weights: &[RawOperand<B>],
    ) -> Result<Widths> {
        self.check_count(weights.len())?;
        let widths = weights.iter().enumerate().map(|(number, weight)| {
            let n = self.n_of(group, k, &weight.values);
            n.map_err(Error::one_of("weight", number, weights.len()))
        });
        widths.collect()
    }

    /// N of a weight of a call that was not prepared, and whose other operand is K = `k` deep.
    pub fn n_of<B: Backend>(
        &self,
        group: &Group<B>,
        k: usize,
        weight: &RawView<B>,
    ) -> Result<usize> {
        require_same_group("b", weight.group, group)?;
        let [rows, columns] = weight.shape;
        let [n, depth] = match self.weights {
            WeightLayout::Nk => [rows, columns],
            WeightLayout::Kn => [columns, rows],
        };
        // A weight that has K in the other place has its N there too.
        let n = if n == k { depth } else { n };
        let (what, shape) = expected_weight(self.weights, n, k);
        require_shape(what, shape, weight.shape)?;
        Ok(n)
    }
}

impl<'a, B: Backend> Addends<'a, B> {
    /// Which there are, for ranks to compare.
    pub fn added(&self) -> Added {
        Added {
            bias: self.bias.is_some(),
            residual: self.residual.is_some(),
        }
    }

    /// Checks the bias and the residual, which are added to `rows` rows.
    pub fn check(&self, group: &Group<B>, problem: &Problem, rows: usize) -> Result<()> {
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
            let shape = [rows, n];
            let what = match problem.operation.result {
                RowResult::SumOfOwnRows => "residual [rows of this rank, N]",
                RowResult::Kept | RowResult::SumOfAllRows | RowResult::Blocks => "residual [M, N]",
            };
            require_shape(what, shape, residual.shape)?;
            require_dtype("residual", problem.dtypes.partials, residual.dtype)?;
        }
        Ok(())
    }

    pub fn bind<'m>(&self, matrices: &mut [Bound<'m, B>; MATRICES])
    where
        'a: 'm,
    {
        if let Some(view) = &self.bias {
            matrices[matrices::BIAS] = view.input();
        }
        if let Some(view) = &self.residual {
            matrices[matrices::RESIDUAL] = view.input();
        }
    }
}

/// One entry for each weight, or none if weights have no scales. One entry may stand for all.
fn for_each_weight(scalings: &WeightScalings, weights: usize) -> Result<WeightScalings> {
    if scalings.iter().all(|&scaling| scaling == Scaling::None) {
        return Ok(WeightScalings::new());
    }
    if let [scaling] = scalings[..] {
        return Ok(WeightScalings::from_elem(scaling, weights));
    }
    let count = scalings.len();
    require_count(
        "the product",
        "weight",
        weights,
        "the list of scalings",
        count,
    )?;
    Ok(scalings.clone())
}

/// The name of a weight's shape in messages, and the shape.
fn expected_weight(layout: WeightLayout, n: usize, k: usize) -> (&'static str, [usize; 2]) {
    match layout {
        WeightLayout::Nk => ("b [N, K]", [n, k]),
        WeightLayout::Kn => ("b [K, N]", [k, n]),
    }
}

/// Writes a product that has been planned for `Debug`. N is that of all weights together.
pub fn describe<B: Backend>(
    f: &mut fmt::Formatter,
    prepared: &str,
    problem: &Problem,
) -> fmt::Result {
    let (layout, form) = (&problem.layout, &problem.form);
    let [m, k] = [layout.m(), layout.k()];
    let (_, weights) = expected_weight(form.weights, form.multiplied(problem.n), k);
    let (name, dtype) = (B::NAME, problem.dtypes.operands);
    write!(f, "{prepared}<{name}, {dtype}>[{m}, {k}] x {weights:?}")
}

/// Checks the weights' widths and depth K against the plan.
pub fn check_weights<B: Backend>(
    group: &Group<B>,
    problem: &Problem,
    widths: &[usize],
    weights: &[RawOperand<B>],
) -> Result<()> {
    let (form, k) = (&problem.form, problem.layout.k());
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
        let RawView {
            group: its,
            dtype,
            shape: found,
            ..
        } = weight.values;
        let fits = require_same_group("b", its, group)
            .and_then(|()| require_shape(what, shape, found))
            .and_then(|()| require_dtype("b", problem.dtypes.weights, dtype))
            .and_then(|()| weight.check_scales(group, &expected));
        fits.map_err(Error::one_of("weight", number, weights.len()))?;
    }
    Ok(())
}

/// Checks the outputs' widths and their `rows` rows against the plan. `what`: the name of an output in messages.
pub fn check_outputs<B: Backend>(
    group: &Group<B>,
    what: &str,
    problem: &Problem,
    widths: &[usize],
    rows: usize,
    outputs: &[ProductOutput<B>],
) -> Result<()> {
    // A text of its own for each would be made for every call.
    let whole = match problem.form.weight_count() {
        2 if problem.form.gated => "a gated product",
        1 => "a product with 1 weight",
        2 => "a product with 2 weights",
        3 => "a product with 3 weights",
        _ => "a product with 4 weights",
    };
    require_count(whole, "output", widths.len(), "this call", outputs.len())?;
    for (number, (out, &n)) in outputs.iter().zip(widths).enumerate() {
        let RawOutput {
            group: its,
            dtype,
            shape,
            ..
        } = out.values;
        let planned = problem.form.quantization;
        let fits = require_same_group("out", its, group)
            .and_then(|()| require_shape(what, [rows, n], shape))
            .and_then(|()| require_dtype("out", problem.dtypes.output, dtype))
            .and_then(|()| out.check_scales(group, planned));
        fits.map_err(Error::one_of("output", number, outputs.len()))?;
    }
    Ok(())
}

/// Binds weights.
pub fn bind_weights<'m, B: Backend>(
    matrices: &mut [Bound<'m, B>; MATRICES],
    weights: &[RawOperand<'m, B>],
) {
    for (number, weight) in weights.iter().enumerate().take(MAX_WEIGHTS) {
        weight.bind(matrices, matrices::B + number, matrices::B_SCALES + number);
    }
}

/// Moves the outputs' memory into `matrices`.
pub fn bind_outputs<'m, 'o: 'm, B: Backend>(
    matrices: &mut [Bound<'m, B>; MATRICES],
    outputs: &mut [ProductOutput<'o, B>],
) {
    for (number, out) in outputs.iter_mut().enumerate().take(MAX_WEIGHTS) {
        out.bind(matrices, number);
    }
}

/// The product of a schedule, which must have one.
pub fn product_of(schedule: &Schedule) -> &Product {
    match schedule.product() {
        Some(product) => product,
        None => unreachable!("the planner of a product makes one"),
    }
}
