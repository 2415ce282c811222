//! Products of any kind, type and backend.

use super::Memory;
use super::arguments::CallArguments;
use super::group::{AnyBackend, AnyGroup};
use super::shards::AnyShards;
use crate::element::DType;
use crate::error::{Error, Result};
use crate::group::Group;
use crate::ops::RowSplit;
use crate::ops::call::require_property;
use crate::ops::planned_product::{PlannedProduct, judged};
use crate::ops::product::{ProductOptions, ProductRequest};
use crate::ops::product_operands::{Addends, OWN, SHARDED, misplaced};
use crate::profile::span::Span;
use crate::route::Route;
use crate::schedule::operation::RowSource;
use crate::schedule::scaling::WeightScalings;
use crate::schedule::{
    Accumulation, Activation, Config, Operation, Quantization, Scaling, WeightLayout, Widths,
};
use crate::trace::Trace;

/// Which product: by what it does before and after.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProductKind {
    /// [`matmul`](crate::matmul)
    Matmul,
    /// [`all_gather_matmul`](crate::all_gather_matmul)
    AllGatherMatmul,
    /// [`matmul_reduce_scatter`](crate::matmul_reduce_scatter)
    MatmulReduceScatter,
    /// [`matmul_all_reduce`](crate::matmul_all_reduce)
    MatmulAllReduce,
}

impl ProductKind {
    /// The name of the call.
    pub fn name(self) -> &'static str {
        self.operation().name()
    }

    fn operation(self) -> Operation {
        match self {
            ProductKind::Matmul => Operation::MATMUL,
            ProductKind::AllGatherMatmul => Operation::ALL_GATHER_MATMUL,
            ProductKind::MatmulReduceScatter => Operation::MATMUL_REDUCE_SCATTER,
            ProductKind::MatmulAllReduce => Operation::MATMUL_ALL_REDUCE,
        }
    }

    /// True if the rows of `a` are sharded.
    pub fn gathers(self) -> bool {
        self.operation().rows == RowSource::Gathered
    }
}

/// A product: what the typed builders say.
#[derive(Clone, Debug)]
pub struct AnyProduct {
    /// Which product.
    pub kind: ProductKind,
    /// The type of `a`.
    pub dtype: DType,
    /// What is applied to the result.
    pub activation: Activation,
    /// True if two weights make an output: the activation of the first product times the second.
    pub gated: bool,
    /// How weights lie in memory.
    pub weight_layout: WeightLayout,
    /// How sums of products of fp8 are made.
    pub accumulation: Accumulation,
    /// True if every kernel that wrote the weights has ended when the product is enqueued.
    pub constant_weights: bool,
    /// The stages of a gather.
    pub stages: Option<usize>,
    /// The rows that each rank gets of sums that are scattered.
    pub rows: Option<Vec<usize>>,
    /// The type of the weights, for `prepare` and `supports`.
    pub weight_dtype: Option<DType>,
    /// The type of the outputs, for `prepare` and `supports`.
    pub output_dtype: Option<DType>,
    /// Who moves rows, for `prepare`. By default the backend chooses.
    pub route: Option<Route>,
    /// Of `a`, and of the weights: one entry for each, or one for all.
    pub scaling: (Scaling, Vec<Scaling>),
    /// How the outputs are quantised, for `prepare` and `supports`.
    pub quantization: Option<Quantization>,
}

impl AnyProduct {
    /// A product with default options.
    pub fn new(kind: ProductKind, dtype: DType) -> AnyProduct {
        AnyProduct {
            kind,
            dtype,
            activation: Activation::default(),
            gated: false,
            weight_layout: WeightLayout::default(),
            accumulation: Accumulation::default(),
            constant_weights: false,
            stages: None,
            rows: None,
            weight_dtype: None,
            output_dtype: None,
            route: None,
            scaling: Default::default(),
            quantization: None,
        }
    }

    fn check(&self) -> Result<()> {
        let fits = self.dtype.is_multiplied();
        let expected = "bf16, f16, f8e4m3 or f8e5m2";
        require_property("a", "the dtype", fits, expected, self.dtype)
    }

    fn options(&self) -> ProductOptions<'_> {
        let (a, weights) = &self.scaling;
        ProductOptions {
            activation: self.activation,
            gated: self.gated,
            weights: self.weight_layout,
            scaling: (*a, WeightScalings::from_slice(weights)),
            accumulation: self.accumulation,
            weight_dtype: self.weight_dtype,
            output_dtype: self.output_dtype,
            quantization: self.quantization,
            constant_weights: self.constant_weights,
            stages: self.stages,
            rows: self.rows.as_deref(),
            ..ProductOptions::new(self.kind.operation(), self.dtype)
        }
    }
}

/// An operand in this rank's memory, with its scales if it has any: f32, shaped as their [`Scaling`] says.
#[derive(Clone, Copy, Debug)]
pub struct AnyOperand {
    /// The matrix.
    pub values: Memory,
    /// Its scales, and what each of them is of.
    pub scales: Option<(Memory, Scaling)>,
}

/// The scales of a sharded operand.
#[derive(Clone, Copy)]
pub enum AnyShardedScales<'a> {
    /// Each rank has all of them.
    Own(Memory, Scaling),
    /// They are gathered with the rows.
    Sharded(&'a AnyShards, Scaling),
}

/// The rows that a product multiplies.
#[derive(Clone, Copy)]
pub enum RowOperand<'a> {
    /// This rank's own.
    Own(AnyOperand),
    /// Those of all ranks, which are gathered.
    Sharded(&'a AnyShards, Option<AnyShardedScales<'a>>),
}

/// An output in this rank's memory, with its scales if it is quantised.
#[derive(Clone, Copy, Debug)]
pub struct AnyOutput {
    /// The matrix.
    pub values: Memory,
    /// Where its scales go, and what each of them is of.
    pub scales: Option<(Memory, Quantization)>,
}

/// Where a product goes.
#[derive(Clone, Copy)]
pub enum AnyOutputs<'a> {
    /// To this rank's own matrices.
    Own(&'a [AnyOutput]),
    /// Sums: this rank's own rows, or all.
    Sharded(&'a AnyShards),
}

/// The arguments of a product.
#[derive(Clone, Copy)]
pub struct ProductCall<'a> {
    /// The rows.
    pub a: RowOperand<'a>,
    /// The weights.
    pub weights: &'a [AnyOperand],
    /// Where the products go.
    pub outputs: AnyOutputs<'a>,
    /// A row that is added to each row of the product.
    pub bias: Option<Memory>,
    /// A matrix that is added to the product.
    pub residual: Option<Memory>,
}

/// What a product is prepared for.
#[derive(Clone, Copy)]
pub enum PreparedFor<'a> {
    /// Rows [M, K] of this rank's own.
    Own([usize; 2]),
    /// Rows of this rank's own, and sums in a matrix like this.
    OwnInto([usize; 2], &'a AnyShards),
    /// The rows of a matrix like this.
    Sharded(&'a AnyShards),
}

/// A product that has been planned. It keeps its group alive.
pub trait AnyPrepared: Send + Sync {
    /// Runs it.
    ///
    /// # Safety
    /// As the calls of [`AnyGroup`].
    unsafe fn run(&self, call: &ProductCall) -> Result<()>;
    /// Runs it, and returns a trace of this rank's work. Either all ranks trace an operation or none does.
    ///
    /// # Safety
    /// As the calls of [`AnyGroup`].
    unsafe fn run_traced(&self, call: &ProductCall) -> Result<Trace>;
    /// How it is cut up, and how long that is expected to take, in words.
    fn explain(&self) -> String;
    /// How it is cut up.
    fn config(&self) -> Config;

    /// Who moves rows.
    fn route(&self) -> Route {
        self.config().route
    }
}

impl<B: AnyBackend> PlannedProduct<B> {
    /// # Safety
    /// As the calls of [`AnyGroup`].
    unsafe fn call(&self, call: &ProductCall, trace: Option<&mut Vec<Span>>) -> Result<()> {
        let (group, operation) = (&self.group, self.operation());
        let arguments = CallArguments { group, call };
        let operands = judged(group, operation, arguments.operands())?;
        let mut results = judged(group, operation, arguments.results())?;
        self.run(&operands, &mut results, trace)
    }
}

impl<B: AnyBackend> AnyPrepared for PlannedProduct<B> {
    unsafe fn run(&self, call: &ProductCall) -> Result<()> {
        // SAFETY: as this function's.
        unsafe { self.call(call, None) }
    }

    unsafe fn run_traced(&self, call: &ProductCall) -> Result<Trace> {
        if self.operation().is_alone() {
            let refusal = Error::unsupported("a product of one rank has no trace");
            return self.group.judged(self.operation().name(), Err(refusal));
        }
        let mut spans = Vec::new();
        // SAFETY: as this function's.
        unsafe { self.call(call, Some(&mut spans))? };
        Ok(Trace::new(AnyGroup::rank(&self.group), spans))
    }

    fn explain(&self) -> String {
        self.explain().to_string()
    }

    fn config(&self) -> Config {
        self.config
    }
}

/// Makes a product.
///
/// # Safety
/// As the calls of [`AnyGroup`].
pub(super) unsafe fn run<B: AnyBackend>(
    group: &Group<B>,
    product: &AnyProduct,
    call: &ProductCall,
) -> Result<()> {
    let operation = product.kind.operation();
    judged(group, operation, product.check())?;
    let arguments = CallArguments { group, call };
    let operands = judged(group, operation, arguments.operands())?;
    let mut results = judged(group, operation, arguments.results())?;
    product.options().run(&operands, &mut results)
}

/// Plans a product.
pub(super) fn prepare<B: AnyBackend>(
    group: &Group<B>,
    product: &AnyProduct,
    rows: PreparedFor,
    widths: &[usize],
) -> Result<Box<dyn AnyPrepared>> {
    let planned = plan(group, product, None, rows, widths)?;
    match product.route {
        Some(route) if planned.config.route != route => {
            let config = planned.config.with_route(route);
            Ok(Box::new(plan(group, product, Some(config), rows, widths)?))
        }
        _ => Ok(Box::new(planned)),
    }
}

/// Plans a product as `config` says, or as the backend chooses.
fn plan<B: AnyBackend>(
    group: &Group<B>,
    product: &AnyProduct,
    config: Option<Config>,
    rows: PreparedFor,
    widths: &[usize],
) -> Result<PlannedProduct<B>> {
    let operation = product.kind.operation();
    let judge = Error::of(group.rank(), operation.name());
    product.check().map_err(judge)?;
    let (gathers, is_for_all) = (product.kind.gathers(), operation.result.is_for_all());
    let mut widths = Widths::from(widths);
    let (rows, into) = match rows {
        PreparedFor::Own(shape) if !gathers && !is_for_all => (shape.into(), None),
        PreparedFor::Sharded(a) if gathers => {
            let a = a.raw("a").map_err(judge)?;
            group.require_same("a", a.group).map_err(judge)?;
            (RowSplit::of(a.layout), None)
        }
        PreparedFor::OwnInto(shape, out) if is_for_all => {
            let out = out.raw("out").map_err(judge)?;
            widths = Widths::from_slice(&out.shape()[1..]);
            (shape.into(), Some(out))
        }
        _ if gathers => return Err(judge(misplaced("a", SHARDED))),
        _ if is_for_all => return Err(judge(misplaced("out", SHARDED))),
        _ => return Err(judge(misplaced("a", OWN))),
    };
    let options = ProductOptions {
        config,
        ..product.options()
    };
    options.prepare(ProductRequest {
        group,
        addends: Addends::default(),
        rows,
        into,
        widths: &widths,
    })
}

/// Whether a product is supported.
pub(super) fn supports<B: AnyBackend>(
    group: &Group<B>,
    product: &AnyProduct,
    rows: &RowSplit,
    widths: &[usize],
) -> Result<()> {
    let judge = Error::of(group.rank(), product.kind.name());
    product.check().map_err(judge)?;
    product.options().supported(ProductRequest {
        group,
        addends: Addends::default(),
        rows: rows.clone(),
        into: None,
        widths,
    })
}
