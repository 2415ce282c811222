//! What a builder says of a product, without element types, and the problem that it makes of that.

use std::fmt;

use super::call::{RawShards, require_same_group, require_shape};
use super::product_operands::{Addends, ProductOperands, RawResults};
use super::quantized::OutputForm;
use super::row_split::{self, RowSplit};
use super::scales::{self, RawOperand};
use crate::backend::Backend;
use crate::element::DType;
use crate::error::{Error, Result, require_count};
use crate::group::Group;
use crate::one_line::{option, write_parts};
use crate::schedule::layout::MAX_EXTENT;
use crate::schedule::limits::limit;
use crate::schedule::operation::RowSource;
use crate::schedule::scaling::WeightScalings;
use crate::schedule::{
    Accumulation, Activation, Config, DTypes, Form, Layout, MAX_WEIGHTS, Operation, Problem,
    Quantization, Scaling, WeightLayout, Widths,
};

/// What [`MAX_WEIGHTS`] limits, in messages.
const WEIGHTS: &str = "the number of weights of a product";

/// What a builder says of a product.
#[derive(Clone)]
pub struct ProductOptions<'a> {
    /// Where the rows come from, and what becomes of the product.
    pub operation: Operation,
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
    /// The stages of a gather.
    pub stages: Option<usize>,
    /// The rows that each rank gets of sums that are scattered. They are split evenly if nothing is said.
    pub rows: Option<&'a [usize]>,
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

/// What a product is planned for.
pub struct ProductRequest<'m, B: Backend> {
    pub group: &'m Group<B>,
    /// What can be added.
    pub addends: Addends<'m, B>,
    pub rows: RowSplit,
    /// A sharded matrix like that of the sums.
    pub into: Option<RawShards<'m, B>>,
    /// N of each weight.
    pub widths: &'m [usize],
}

impl ProductOptions<'_> {
    pub fn new(operation: Operation, dtype: DType) -> Self {
        ProductOptions {
            operation,
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
            stages: None,
            rows: None,
        }
    }

    /// Writes a builder with these options for `Debug`.
    pub fn describe<B: Backend>(
        &self,
        f: &mut fmt::Formatter,
        builder: &str,
        addends: &Addends<B>,
    ) -> fmt::Result {
        write!(f, "{builder}<{}, {}>", B::NAME, self.dtype)?;
        let (activation, rows) = (self.activation, self.rows);
        let options = [
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
            option("stages", self.stages),
            rows.map(|rows| format!("rows of {} ranks", rows.len())),
        ];
        write_parts(f, options.into_iter().flatten())
    }

    /// True if calls are prepared for scales.
    fn is_scaled(&self) -> bool {
        let (a, b) = &self.scaling;
        [*a].iter()
            .chain(b)
            .any(|&scaling| scaling != Scaling::None)
    }

    /// What the builder says of calls that it prepares.
    fn planned(&self) -> CallForm {
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

    /// The problem of a call that is prepared.
    pub fn prepared_problem<B: Backend>(&self, request: ProductRequest<B>) -> Result<Problem> {
        self.check_widths(request.widths)?;
        let mut call = self.planned();
        if let Some(out) = request.into {
            call.output = out.dtype.into();
        }
        self.problem(request, call)
    }

    /// The problem of a call that was not prepared. The plan of it is what its other arguments are checked against.
    pub fn problem_of_call<B: Backend>(
        &self,
        operands: &ProductOperands<B>,
        results: &RawResults<B>,
    ) -> Result<Problem> {
        let (rows, weights) = (operands.a.split(), &operands.weights);
        self.check_count(weights.len())?;
        let into = results.sharded();
        let widths = match into {
            Some(out) if self.operation.result.is_for_all() => {
                Widths::from_slice(&[out.shape()[1]])
            }
            _ => self.widths(rows.shape()[1], weights)?,
        };
        let mut b_scaling = WeightScalings::new();
        for weight in weights {
            b_scaling.push(weight.scaling()?);
        }
        let call = CallForm {
            weights: weights[0].values.dtype,
            output: results.form()?.unwrap_or_else(|| self.planned_output()),
            a_scaling: operands.a.scaling()?,
            b_scaling,
        };
        let request = ProductRequest {
            group: operands.a.group(),
            addends: operands.addends,
            rows,
            into,
            widths: &widths,
        };
        self.problem(request, call)
    }

    fn problem<B: Backend>(&self, request: ProductRequest<B>, call: CallForm) -> Result<Problem> {
        let ProductRequest {
            group,
            addends,
            rows,
            into,
            widths,
        } = request;
        let sums = self.operation.sends_product();
        if let Some(out) = into.filter(|_| sums) {
            require_same_group("out", out.group, group)?;
            require_shape("out [M, N]", [rows.shape()[0], widths[0]], out.shape())?;
            out.require_by_rank("out")?;
        }
        let layout = self.layout(group, rows, into)?;
        let mut problem = self.problem_of_layout::<B>(layout, widths, call)?;
        if sums {
            limit("N", widths[0], 1, MAX_EXTENT)?;
            problem.hosts = group.host_map().clone();
        }
        addends.check(group, &problem)?;
        Ok(problem)
    }

    /// Which rank owns which rows: those that are gathered, or those of the sums.
    fn layout<B: Backend>(
        &self,
        group: &Group<B>,
        rows: RowSplit,
        into: Option<RawShards<B>>,
    ) -> Result<Layout> {
        let [m, k] = rows.shape();
        if self.operation.rows == RowSource::Gathered {
            return row_split::staged(rows.layout(group)?, self.stages);
        }
        if self.operation.is_alone() {
            return Layout::new(&[m], k);
        }
        match (self.rows, into) {
            (Some(split), _) => row_split::split(group, split, [m, k]),
            (None, Some(out)) => out.layout.of_columns(k),
            (None, None) => rows.layout(group),
        }
    }

    fn problem_of_layout<B: Backend>(
        &self,
        layout: Layout,
        widths: &[usize],
        call: CallForm,
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
        let gathers = self.operation.rows == RowSource::Gathered;
        Ok(Problem {
            beside: scales::beside::<B>(call.a_scaling, layout.k(), gathers)?,
            dtypes: DTypes::of_product([self.dtype, call.weights], dtype, quantization)?,
            form,
            ..Problem::new(self.operation, self.dtype, layout, n)
        })
    }

    /// Checks the number of weights, and that gate and up have the same N. One N may stand for both.
    fn check_widths(&self, widths: &[usize]) -> Result<()> {
        if widths.len() == 1 {
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
        if self.operation.sends_product() {
            return require_count("a sum over ranks", "weight", 1, "this call", weights);
        }
        limit(WEIGHTS, weights, 1, MAX_WEIGHTS)?;
        if self.gated {
            require_count("a gated product", "weight", 2, "this call", weights)
        } else {
            Ok(())
        }
    }

    /// N of each weight, whose other operand is K = `k` deep.
    fn widths<B: Backend>(&self, k: usize, weights: &[RawOperand<B>]) -> Result<Widths> {
        let n = |(number, weight): (usize, &RawOperand<B>)| {
            let found = weight.values.shape;
            let [n, depth] = match self.weights {
                WeightLayout::Nk => found,
                WeightLayout::Kn => [found[1], found[0]],
            };
            // A weight that has K in the other place has its N there too.
            let n = if n == k { depth } else { n };
            let (what, shape) = expected_weight(self.weights, n, k);
            let fits = require_shape(what, shape, found).map(|()| n);
            fits.map_err(Error::one_of("weight", number, weights.len()))
        };
        weights.iter().enumerate().map(n).collect()
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
pub fn expected_weight(layout: WeightLayout, n: usize, k: usize) -> (&'static str, [usize; 2]) {
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
