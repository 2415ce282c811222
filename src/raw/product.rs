//! Products of any kind, type and backend.

use super::Memory;
use super::arguments::{CallArguments, misplaced};
use super::group::AnyBackend;
#[cfg(doc)]
use super::group::AnyGroup;
use super::planned::BoundProduct;
use super::shards::AnyShards;
use crate::backend::Backend;
use crate::element::DType;
use crate::error::{Error, Result, require_count};
use crate::group::Group;
use crate::ops::RowSplit;
use crate::ops::call::require_property;
use crate::ops::gather_product::GatherProduct;
use crate::ops::own_product;
use crate::ops::product::{Addends, ProductOptions, RawOutputs};
use crate::ops::sum_product::{self, ScatterProduct};
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
pub struct Product {
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

impl Product {
    /// A product with default options.
    pub fn new(kind: ProductKind, dtype: DType) -> Product {
        Product {
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

    fn options(&self) -> ProductOptions {
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
            ..ProductOptions::new(self.dtype)
        }
    }
}

/// An operand in this rank's memory, with its scales if it has any: f32, shaped as their [`Scaling`] says.
#[derive(Clone, Copy, Debug)]
pub struct Operand {
    /// The matrix.
    pub values: Memory,
    /// Its scales, and what each of them is of.
    pub scales: Option<(Memory, Scaling)>,
}

/// The scales of a sharded operand.
#[derive(Clone, Copy)]
pub enum ShardedScales<'a> {
    /// Each rank has all of them.
    Own(Memory, Scaling),
    /// They are gathered with the rows.
    Sharded(&'a AnyShards, Scaling),
}

/// The rows that a product multiplies.
#[derive(Clone, Copy)]
pub enum RowOperand<'a> {
    /// This rank's own.
    Own(Operand),
    /// Those of all ranks, which are gathered.
    Sharded(&'a AnyShards, Option<ShardedScales<'a>>),
}

/// An output in this rank's memory, with its scales if it is quantised.
#[derive(Clone, Copy, Debug)]
pub struct Output {
    /// The matrix.
    pub values: Memory,
    /// Where its scales go, and what each of them is of.
    pub scales: Option<(Memory, Quantization)>,
}

/// Where a product goes.
#[derive(Clone, Copy)]
pub enum Outputs<'a> {
    /// To this rank's own matrices.
    Own(&'a [Output]),
    /// Sums: this rank's own rows, or all.
    Sharded(&'a AnyShards),
}

/// The arguments of a product.
#[derive(Clone, Copy)]
pub struct ProductCall<'a> {
    /// The rows.
    pub a: RowOperand<'a>,
    /// The weights.
    pub weights: &'a [Operand],
    /// Where the products go.
    pub outputs: Outputs<'a>,
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
pub trait Prepared: Send + Sync {
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

/// The error of a product that is refused. The other ranks are told, unless the product is this rank's alone.
pub(super) fn refused<B: Backend>(group: &Group<B>, kind: ProductKind, error: Error) -> Error {
    match kind {
        ProductKind::Matmul => {
            let error = Error::of(group.rank(), kind.name())(error);
            super::noted(group, error)
        }
        _ => group.refusal(kind.name())(error),
    }
}

/// Makes a product.
///
/// # Safety
/// As the calls of [`AnyGroup`].
pub(super) unsafe fn run<B: AnyBackend>(
    group: &Group<B>,
    product: &Product,
    call: &ProductCall,
) -> Result<()> {
    let refuse = |refusal| refused(group, product.kind, refusal);
    product.check().map_err(refuse)?;
    let options = product.options();
    let arguments = CallArguments { group, call };
    match product.kind {
        ProductKind::Matmul => {
            let a = arguments.own().map_err(refuse)?;
            let addends = arguments.addends().map_err(refuse)?;
            arguments.with_product(&refuse, |product| {
                own_product::run(&options, &addends, &a, product)
            })
        }
        ProductKind::AllGatherMatmul => {
            let a = arguments.sharded().map_err(refuse)?;
            let addends = arguments.addends().map_err(refuse)?;
            let gather = GatherProduct {
                options: &options,
                stages: product.stages,
            };
            arguments.with_product(&refuse, |product| gather.run(&addends, &a, product))
        }
        ProductKind::MatmulReduceScatter => {
            let operands = arguments.operands().map_err(refuse)?;
            let scatter = ScatterProduct {
                options: &options,
                rows: product.rows.as_deref(),
            };
            match call.outputs {
                Outputs::Own(_) => {
                    let mut outputs = RawOutputs::new();
                    arguments.outputs(&mut outputs).map_err(refuse)?;
                    scatter.run(&operands, &mut outputs)
                }
                Outputs::Sharded(_) => {
                    let out = arguments.sums().map_err(refuse)?;
                    scatter.run_into(&operands, out)
                }
            }
        }
        ProductKind::MatmulAllReduce => {
            let operands = arguments.operands().map_err(refuse)?;
            let out = arguments.sums().map_err(refuse)?;
            sum_product::all_reduce(&options, &operands, out)
        }
    }
}

/// What a product is planned for is of the wrong kind.
fn planned_for(kind: ProductKind) -> Error {
    match kind {
        ProductKind::AllGatherMatmul => misplaced("a", "a sharded matrix"),
        ProductKind::MatmulAllReduce => misplaced("out", "a sharded matrix"),
        _ => misplaced("a", "a matrix of this rank's own"),
    }
}

/// Plans a product.
pub(super) fn prepare<B: AnyBackend>(
    group: &Group<B>,
    product: &Product,
    rows: PreparedFor,
    widths: &[usize],
) -> Result<Box<dyn Prepared>> {
    let planned = plan(group, product, None, rows, widths)?;
    match product.route {
        Some(route) if planned.route() != route => {
            let config = planned.config().with_route(route);
            plan(group, product, Some(config), rows, widths)
        }
        _ => Ok(planned),
    }
}

/// Plans a product as `config` says, or as the backend chooses.
fn plan<B: AnyBackend>(
    group: &Group<B>,
    product: &Product,
    config: Option<Config>,
    rows: PreparedFor,
    widths: &[usize],
) -> Result<Box<dyn Prepared>> {
    let judge = Error::of(group.rank(), product.kind.name());
    product.check().map_err(judge)?;
    let options = ProductOptions {
        config,
        ..product.options()
    };
    let (addends, widths) = (Addends::default(), Widths::from(widths));
    match (product.kind, rows) {
        (ProductKind::Matmul, PreparedFor::Own(shape)) => {
            let planned = own_product::prepare(&options, group, &addends, shape, &widths)?;
            Ok(Box::new(BoundProduct(group.clone(), product.kind, planned)))
        }
        (ProductKind::AllGatherMatmul, PreparedFor::Sharded(a)) => {
            let a = a.raw("a").map_err(judge)?;
            group.require_same("a", a.group).map_err(judge)?;
            let gather = GatherProduct {
                options: &options,
                stages: product.stages,
            };
            let planned = gather.prepare(&addends, a, &widths)?;
            Ok(Box::new(BoundProduct(group.clone(), product.kind, planned)))
        }
        (ProductKind::MatmulReduceScatter, PreparedFor::Own(shape)) => {
            let n = only_width(&widths).map_err(judge)?;
            let scatter = ScatterProduct {
                options: &options,
                rows: product.rows.as_deref(),
            };
            let planned = scatter.prepare(group, &addends, shape, n)?;
            Ok(Box::new(BoundProduct(group.clone(), product.kind, planned)))
        }
        (ProductKind::MatmulAllReduce, PreparedFor::OwnInto(shape, out)) => {
            let out = out.raw("out").map_err(judge)?;
            let planned = sum_product::prepare_all_reduce(&options, group, &addends, shape, out)?;
            Ok(Box::new(BoundProduct(group.clone(), product.kind, planned)))
        }
        (kind, _) => Err(judge(planned_for(kind))),
    }
}

/// The N of the only weight.
fn only_width(widths: &Widths) -> Result<usize> {
    require_count("a sum over ranks", "weight", 1, "this call", widths.len())?;
    Ok(widths[0])
}

/// Whether a product is supported.
pub(super) fn supports<B: AnyBackend>(
    group: &Group<B>,
    product: &Product,
    rows: &RowSplit,
    widths: &[usize],
) -> Result<()> {
    let judge = Error::of(group.rank(), product.kind.name());
    product.check().map_err(judge)?;
    let options = product.options();
    let (addends, widths) = (Addends::default(), Widths::from(widths));
    let shape = rows.shape();
    match product.kind {
        ProductKind::Matmul => own_product::supported(&options, group, &addends, shape, &widths),
        ProductKind::AllGatherMatmul => {
            let gather = GatherProduct {
                options: &options,
                stages: product.stages,
            };
            gather.supported(group, &addends, rows, &widths)
        }
        ProductKind::MatmulReduceScatter => {
            let n = only_width(&widths).map_err(judge)?;
            let scatter = ScatterProduct {
                options: &options,
                rows: product.rows.as_deref(),
            };
            scatter.supported(group, &addends, shape, n)
        }
        ProductKind::MatmulAllReduce => {
            let n = only_width(&widths).map_err(judge)?;
            sum_product::supports_all_reduce(&options, group, &addends, rows, n)
        }
    }
}
