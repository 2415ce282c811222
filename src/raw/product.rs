//! Products of any kind, type and backend.

use super::Memory;
use super::group::{AnyBackend, AnyGroup};
use super::shards::AnyShards;
use crate::backend::Backend;
use crate::element::DType;
use crate::error::{Error, Result};
use crate::group::Group;
use crate::ops::call::{RawOutput, RawShards, RawView, require_property};
use crate::ops::gather_product::{GatherProduct, PlannedGather, RawProduct};
use crate::ops::own_product::{self, PlannedProduct};
use crate::ops::partial_sums::{PlannedSums, SumOperands};
use crate::ops::product::{Addends, ProductOptions, RawOutputs, RawWeights};
use crate::ops::quantized::ProductOutput;
use crate::ops::scales::{Placed as PlacedScales, RawOperand, RawShardedOperand, Scales};
use crate::ops::sum_product::{self, PlannedAllReduce, ScatterProduct};
use crate::ops::{Quantized, RowSplit};
use crate::profile::span::Span;
use crate::refusal::{self, Refusal};
use crate::route::Route;
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
        let operation = match self {
            ProductKind::Matmul => Operation::Matmul,
            ProductKind::AllGatherMatmul => Operation::AllGatherMatmul,
            ProductKind::MatmulReduceScatter => Operation::MatmulReduceScatter,
            ProductKind::MatmulAllReduce => Operation::MatmulAllReduce,
        };
        operation.name()
    }

    /// True if the rows of `a` are sharded.
    pub fn gathers(self) -> bool {
        self == ProductKind::AllGatherMatmul
    }
}

/// A product: what the typed builders say.
#[derive(Clone, Debug)]
pub struct Product {
    pub kind: ProductKind,
    /// The type of `a`.
    pub dtype: DType,
    pub activation: Activation,
    pub gated: bool,
    pub weight_layout: WeightLayout,
    pub accumulation: Accumulation,
    pub constant_weights: bool,
    /// The stages of a gather.
    pub stages: Option<usize>,
    /// The rows that each rank gets of sums that are scattered.
    pub rows: Option<Vec<usize>>,
    // For `prepare` and `supports`, what the arguments of a call say otherwise.
    pub weight_dtype: Option<DType>,
    pub output_dtype: Option<DType>,
    /// Who moves rows, for `prepare`. By default the backend chooses.
    pub route: Option<Route>,
    /// Of `a`, and of the weights: one entry for each, or one for all.
    pub scaling: (Scaling, Vec<Scaling>),
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

    fn options(&self) -> refusal::Result<ProductOptions> {
        let fits = self.dtype.is_multiplied();
        let expected = "bf16, f16, f8e4m3 or f8e5m2";
        require_property("a", "the dtype", fits, expected, self.dtype)?;
        let (a, weights) = &self.scaling;
        Ok(ProductOptions {
            activation: self.activation,
            gated: self.gated,
            weights: self.weight_layout,
            scaling: (*a, weights.iter().copied().collect()),
            accumulation: self.accumulation,
            weight_dtype: self.weight_dtype,
            output_dtype: self.output_dtype,
            quantization: self.quantization,
            constant_weights: self.constant_weights,
            ..ProductOptions::new(self.dtype)
        })
    }
}

/// An operand in this rank's memory, with its scales if it has any: f32, shaped as their [`Scaling`] says.
#[derive(Clone, Copy, Debug)]
pub struct Operand {
    pub values: Memory,
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
    Own(Operand),
    Sharded(&'a AnyShards, Option<ShardedScales<'a>>),
}

/// An output in this rank's memory, with its scales if it is quantised.
#[derive(Clone, Copy, Debug)]
pub struct Output {
    pub values: Memory,
    pub scales: Option<(Memory, Quantization)>,
}

/// Where a product goes.
#[derive(Clone, Copy)]
pub enum Outputs<'a> {
    Own(&'a [Output]),
    /// Sums: this rank's own rows, or all.
    Sharded(&'a AnyShards),
}

/// The arguments of a product.
#[derive(Clone, Copy)]
pub struct ProductCall<'a> {
    pub a: RowOperand<'a>,
    pub weights: &'a [Operand],
    pub outputs: Outputs<'a>,
    pub bias: Option<Memory>,
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

/// The arguments of a call as its group takes them. They have the safety of the call that gives them.
struct Arguments<'g, 'c, B: Backend> {
    group: &'g Group<B>,
    call: &'c ProductCall<'c>,
}

impl<'g, 'c: 'g, B: AnyBackend> Arguments<'g, 'c, B> {
    fn view(&self, name: &str, memory: Memory) -> refusal::Result<RawView<'g, B>> {
        // SAFETY: as that of the call.
        unsafe { RawView::at(self.group, name, memory) }
    }

    fn output(&self, name: &str, memory: Memory) -> refusal::Result<RawOutput<'g, B>> {
        // SAFETY: as that of the call.
        unsafe { RawOutput::at(self.group, name, memory) }
    }

    /// Scales in this rank's memory. `name`: theirs in messages.
    fn scales(&self, name: &str, memory: Memory) -> refusal::Result<RawView<'g, B>> {
        require_f32(name, memory.dtype)?;
        self.view(name, memory)
    }

    fn operand(
        &self,
        [name, scales]: [&str; 2],
        operand: &Operand,
    ) -> refusal::Result<RawOperand<'g, B>> {
        let scales = match operand.scales {
            Some((memory, scaling)) => Some(Scales::raw(self.scales(scales, memory)?, scaling)),
            None => None,
        };
        Ok(RawOperand::new(self.view(name, operand.values)?, scales))
    }

    fn addends(&self) -> refusal::Result<Addends<'g, B>> {
        let ProductCall { bias, residual, .. } = self.call;
        Ok(Addends {
            bias: bias.map(|bias| self.view("bias", bias)).transpose()?,
            residual: residual
                .map(|residual| self.view("residual", residual))
                .transpose()?,
        })
    }

    fn weights(&self) -> refusal::Result<RawWeights<'g, B>> {
        let weights = self.call.weights.iter();
        weights
            .map(|weight| self.operand(["b", SCALES_OF_B], weight))
            .collect()
    }

    /// The rows, which must be this rank's own.
    fn own(&self) -> refusal::Result<RawOperand<'g, B>> {
        match &self.call.a {
            RowOperand::Own(own) => self.operand(["a", SCALES_OF_A], own),
            RowOperand::Sharded(..) => Err(misplaced("a", "a matrix of this rank's own")),
        }
    }

    /// The rows, which must be sharded.
    fn sharded(&self) -> refusal::Result<RawShardedOperand<'g, B>> {
        let RowOperand::Sharded(shards, scales) = &self.call.a else {
            return Err(misplaced("a", "a sharded matrix"));
        };
        let scales = match scales {
            None => None,
            Some(ShardedScales::Own(memory, scaling)) => {
                let scales = self.scales(SCALES_OF_A, *memory)?;
                Some(PlacedScales::Own(Scales::raw(scales, *scaling)))
            }
            Some(ShardedScales::Sharded(shards, scaling)) => {
                Some(PlacedScales::sharded(shards.raw(SCALES_OF_A)?, *scaling)?)
            }
        };
        let shards = shards.raw("a")?;
        self.group.require_same("a", shards.group)?;
        Ok(RawShardedOperand::new(shards, scales))
    }

    fn operands(&self) -> refusal::Result<SumOperands<'g, 'g, B>> {
        Ok(SumOperands {
            a: self.own()?,
            weights: self.weights()?,
            addends: self.addends()?,
        })
    }

    /// The outputs, which must be this rank's own.
    fn outputs(&self) -> refusal::Result<RawOutputs<'g, B>> {
        let Outputs::Own(outputs) = self.call.outputs else {
            return Err(misplaced("out", "a matrix of this rank's own"));
        };
        let outputs = outputs.iter().map(|output| {
            let scales = match output.scales {
                // SAFETY: as that of the call.
                Some((memory, how)) => Some(unsafe { quantized(self.group, memory, how)? }),
                None => None,
            };
            Ok(ProductOutput::new(
                self.output("out", output.values)?,
                scales,
            ))
        });
        outputs.collect()
    }

    /// The weights and the outputs, which must be this rank's own.
    fn product(&self) -> refusal::Result<RawProduct<'g, 'g, B>> {
        Ok((self.weights()?, self.outputs()?))
    }

    /// The sums, which must go to a sharded matrix.
    fn sums(&self) -> refusal::Result<RawShards<'g, B>> {
        match self.call.outputs {
            Outputs::Sharded(shards) => shards.raw("out"),
            Outputs::Own(_) => Err(misplaced("out", "a sharded matrix")),
        }
    }
}

const SCALES_OF_A: &str = "scales of a";
const SCALES_OF_B: &str = "scales of b";
const SCALES_OF_OUT: &str = "scales of out";

fn require_f32(name: &str, found: DType) -> refusal::Result<()> {
    require_property(name, "the dtype", found == DType::F32, DType::F32, found)
}

fn misplaced(argument: &str, expected: &str) -> Refusal {
    let found = match expected {
        "a sharded matrix" => "a matrix of this rank's own",
        _ => "a sharded matrix",
    };
    Refusal::Unsuitable {
        argument: argument.into(),
        what: "the kind".into(),
        expected: expected.into(),
        found: found.into(),
    }
}

/// Scales of an output, which are made or given as `how` says.
///
/// # Safety
/// As [`RawOutput::at`].
pub(super) unsafe fn quantized<B: Backend>(
    group: &Group<B>,
    memory: Memory,
    how: Quantization,
) -> refusal::Result<Quantized<'_, B>> {
    require_f32(SCALES_OF_OUT, memory.dtype)?;
    // SAFETY: as this function's.
    unsafe {
        let given = RawView::at(group, SCALES_OF_OUT, memory)?;
        let made = RawOutput::at(group, SCALES_OF_OUT, memory)?;
        Ok(Quantized::raw(given, made, how))
    }
}

/// The error of a product that is refused. The other ranks are told, unless the product is this rank's alone.
fn refused<B: Backend>(group: &Group<B>, kind: ProductKind, refusal: Refusal) -> Error {
    match kind {
        ProductKind::Matmul => {
            let error = Refusal::of(group.rank(), kind.name())(refusal);
            let noted = group.noted::<()>(Err(error.clone()));
            noted.err().unwrap_or(error)
        }
        _ => group.refusal(kind.name())(refusal),
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
    let options = product.options().map_err(refuse)?;
    let arguments = Arguments { group, call };
    match product.kind {
        ProductKind::Matmul => {
            let a = arguments.own().map_err(refuse)?;
            let addends = arguments.addends().map_err(refuse)?;
            let product = arguments.product().map_err(refuse)?;
            own_product::run(&options, addends, a, product)
        }
        ProductKind::AllGatherMatmul => {
            let a = arguments.sharded().map_err(refuse)?;
            let addends = arguments.addends().map_err(refuse)?;
            let operands = arguments.product().map_err(refuse)?;
            let gather = GatherProduct {
                options,
                stages: product.stages,
            };
            gather.run(addends, a, operands)
        }
        ProductKind::MatmulReduceScatter => {
            let operands = arguments.operands().map_err(refuse)?;
            let scatter = ScatterProduct {
                options,
                rows: product.rows.as_deref(),
            };
            match call.outputs {
                Outputs::Own(_) => {
                    let outputs = arguments.outputs().map_err(refuse)?;
                    scatter.run(operands, outputs)
                }
                Outputs::Sharded(_) => {
                    let out = arguments.sums().map_err(refuse)?;
                    scatter.run_into(operands, out)
                }
            }
        }
        ProductKind::MatmulAllReduce => {
            let operands = arguments.operands().map_err(refuse)?;
            let out = arguments.sums().map_err(refuse)?;
            sum_product::all_reduce(&options, operands, out)
        }
    }
}

/// What a product is planned for is of the wrong kind.
fn planned_for(kind: ProductKind) -> Refusal {
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
    let judge =
        |refusal: Refusal| -> Error { Refusal::of(group.rank(), product.kind.name())(refusal) };
    let options = ProductOptions {
        config,
        ..product.options().map_err(judge)?
    };
    let (addends, widths) = (Addends::default(), Widths::from(widths));
    match (product.kind, rows) {
        (ProductKind::Matmul, PreparedFor::Own(shape)) => {
            let planned = own_product::prepare(&options, group, addends, shape, &widths)?;
            Ok(Box::new(Bound(group.clone(), product.kind, planned)))
        }
        (ProductKind::AllGatherMatmul, PreparedFor::Sharded(a)) => {
            let a = a.raw("a").map_err(judge)?;
            group.require_same("a", a.group).map_err(judge)?;
            let gather = GatherProduct {
                options,
                stages: product.stages,
            };
            let planned = gather.prepare(addends, a, &widths)?;
            Ok(Box::new(Bound(group.clone(), product.kind, planned)))
        }
        (ProductKind::MatmulReduceScatter, PreparedFor::Own(shape)) => {
            let n = only_width(&widths).map_err(judge)?;
            let scatter = ScatterProduct {
                options,
                rows: product.rows.as_deref(),
            };
            let planned = scatter.prepare(group, &addends, shape, n)?;
            Ok(Box::new(Bound(group.clone(), product.kind, planned)))
        }
        (ProductKind::MatmulAllReduce, PreparedFor::OwnInto(shape, out)) => {
            let out = out.raw("out").map_err(judge)?;
            let planned = sum_product::prepare_all_reduce(&options, group, &addends, shape, out)?;
            Ok(Box::new(Bound(group.clone(), product.kind, planned)))
        }
        (kind, _) => Err(judge(planned_for(kind))),
    }
}

/// The N of the only weight.
fn only_width(widths: &Widths) -> refusal::Result<usize> {
    refusal::require_count("a sum over ranks", "weight", 1, "this call", widths.len())?;
    Ok(widths[0])
}

/// Whether a product is supported.
pub(super) fn supports<B: AnyBackend>(
    group: &Group<B>,
    product: &Product,
    rows: &RowSplit,
    widths: &[usize],
) -> Result<()> {
    let judge = Refusal::of(group.rank(), product.kind.name());
    let options = product.options().map_err(judge)?;
    let (addends, widths) = (Addends::default(), Widths::from(widths));
    let shape = rows.shape();
    match product.kind {
        ProductKind::Matmul => own_product::supported(&options, group, addends, shape, &widths),
        ProductKind::AllGatherMatmul => {
            let gather = GatherProduct {
                options,
                stages: product.stages,
            };
            gather.supported(group, addends, rows, &widths)
        }
        ProductKind::MatmulReduceScatter => {
            let n = only_width(&widths).map_err(judge)?;
            let scatter = ScatterProduct {
                options,
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

/// A planned product with the group whose calls it makes.
struct Bound<B: Backend, P>(Group<B>, ProductKind, P);

/// A product that has been planned, as it takes arguments.
trait Planned<B: Backend>: Send + Sync {
    fn run(
        &self,
        arguments: &Arguments<'_, '_, B>,
        refuse: &dyn Fn(Refusal) -> Error,
        trace: Option<&mut Vec<Span>>,
    ) -> Result<()>;
    fn explain(&self) -> String;
    fn config(&self) -> Config;
}

impl<B: AnyBackend, P: Planned<B>> Bound<B, P> {
    /// # Safety
    /// As the calls of [`AnyGroup`].
    unsafe fn call(&self, call: &ProductCall, trace: Option<&mut Vec<Span>>) -> Result<()> {
        let Bound(group, kind, planned) = self;
        let refuse = |refusal| refused(group, *kind, refusal);
        planned.run(&Arguments { group, call }, &refuse, trace)
    }
}

impl<B: AnyBackend, P: Planned<B>> Prepared for Bound<B, P> {
    unsafe fn run(&self, call: &ProductCall) -> Result<()> {
        // SAFETY: as this function's.
        unsafe { self.call(call, None) }
    }

    unsafe fn run_traced(&self, call: &ProductCall) -> Result<Trace> {
        let mut spans = Vec::new();
        // SAFETY: as this function's.
        unsafe { self.call(call, Some(&mut spans))? };
        Ok(Trace::new(AnyGroup::rank(&self.0), spans))
    }

    fn explain(&self) -> String {
        self.2.explain()
    }

    fn config(&self) -> Config {
        self.2.config()
    }
}

impl<B: AnyBackend> Planned<B> for PlannedProduct<B> {
    fn run(
        &self,
        arguments: &Arguments<'_, '_, B>,
        refuse: &dyn Fn(Refusal) -> Error,
        trace: Option<&mut Vec<Span>>,
    ) -> Result<()> {
        if trace.is_some() {
            let what = "a product of one rank has no trace".into();
            return Err(refuse(Refusal::Unsupported { what }));
        }
        let a = arguments.own().map_err(refuse)?;
        let addends = arguments.addends().map_err(refuse)?;
        self.run(addends, a, arguments.product().map_err(refuse)?)
    }

    fn explain(&self) -> String {
        self.explain().to_string()
    }

    fn config(&self) -> Config {
        self.config()
    }
}

impl<B: AnyBackend> Planned<B> for PlannedGather<B> {
    fn run(
        &self,
        arguments: &Arguments<'_, '_, B>,
        refuse: &dyn Fn(Refusal) -> Error,
        trace: Option<&mut Vec<Span>>,
    ) -> Result<()> {
        let a = arguments.sharded().map_err(refuse)?;
        let addends = arguments.addends().map_err(refuse)?;
        self.run(addends, a, arguments.product().map_err(refuse)?, trace)
    }

    fn explain(&self) -> String {
        self.explain().to_string()
    }

    fn config(&self) -> Config {
        self.config()
    }
}

impl<B: AnyBackend> Planned<B> for PlannedSums<B> {
    fn run(
        &self,
        arguments: &Arguments<'_, '_, B>,
        refuse: &dyn Fn(Refusal) -> Error,
        trace: Option<&mut Vec<Span>>,
    ) -> Result<()> {
        let operands = arguments.operands().map_err(refuse)?;
        match arguments.call.outputs {
            Outputs::Own(_) => {
                let outputs = arguments.outputs().map_err(refuse)?;
                self.scatter(&operands, outputs, trace)
            }
            Outputs::Sharded(_) => {
                let out = arguments.sums().map_err(refuse)?;
                self.scatter_into(&operands, out, trace)
            }
        }
    }

    fn explain(&self) -> String {
        self.explain().to_string()
    }

    fn config(&self) -> Config {
        self.config()
    }
}

impl<B: AnyBackend> Planned<B> for PlannedAllReduce<B> {
    fn run(
        &self,
        arguments: &Arguments<'_, '_, B>,
        refuse: &dyn Fn(Refusal) -> Error,
        trace: Option<&mut Vec<Span>>,
    ) -> Result<()> {
        let operands = arguments.operands().map_err(refuse)?;
        let out = arguments.sums().map_err(refuse)?;
        self.run(&operands, out, trace)
    }

    fn explain(&self) -> String {
        self.sums.explain().to_string()
    }

    fn config(&self) -> Config {
        self.sums.config()
    }
}
