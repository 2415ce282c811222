//! Products of any kind, type and backend.

use smallvec::SmallVec;

use super::group::{AnyBackend, AnyGroup};
use super::shards::AnyShards;
use super::{Memory, Placed};
use crate::backend::Backend;
use crate::element::DType;
use crate::error::{Error, Result};
use crate::group::Group;
use crate::ops::call::{RawShards, require_property};
use crate::ops::gather_product::{GatherProduct, PlannedGather};
use crate::ops::own_product::{self, PlannedProduct};
use crate::ops::partial_sums::{PlannedSums, SumOperands};
use crate::ops::product::{Addends, ProductOptions, RawOutputs, RawWeights};
use crate::ops::quantized::ProductOutput;
use crate::ops::scales::{Placed as PlacedScales, RawOperand, RawShardedOperand, Scales};
use crate::ops::sum_product::{self, PlannedAllReduce, ScatterProduct};
use crate::ops::{Quantized, RowSplit};
use crate::profile::span::Span;
use crate::refusal::{self, Refusal};
use crate::schedule::{
    Accumulation, Activation, MAX_WEIGHTS, Operation, Quantization, Scaling, WeightLayout, Widths,
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
    /// How it is cut up, and how long that is expected to take.
    fn explain(&self) -> String;
}

/// An operand and its scales, placed.
struct PlacedOperand<'g, B: Backend> {
    values: Placed<'g, B>,
    scales: Option<(Placed<'g, B>, Scaling)>,
}

impl<'g, B: Backend> PlacedOperand<'g, B> {
    /// # Safety
    /// As [`Placed::new`].
    unsafe fn new(group: &'g Group<B>, name: &str, operand: &Operand) -> refusal::Result<Self> {
        // SAFETY: as this function's.
        unsafe {
            Ok(PlacedOperand {
                values: Placed::new(group, name, operand.values)?,
                scales: match operand.scales {
                    Some((memory, scaling)) => Some((scales_in(group, name, memory)?, scaling)),
                    None => None,
                },
            })
        }
    }

    fn raw(&self) -> RawOperand<'_, B> {
        let scales = self.scales.as_ref();
        let scales = scales.map(|(placed, scaling)| Scales::raw(placed.view(), *scaling));
        RawOperand::new(self.values.view(), scales)
    }
}

/// Scales in this rank's memory. `of`: what they are scales of.
///
/// # Safety
/// As [`Placed::new`].
unsafe fn scales_in<'g, B: Backend>(
    group: &'g Group<B>,
    of: &str,
    memory: Memory,
) -> refusal::Result<Placed<'g, B>> {
    let name = format!("scales of {of}");
    let is_f32 = memory.dtype == DType::F32;
    require_property(&name, "the dtype", is_f32, DType::F32, memory.dtype)?;
    // SAFETY: as this function's.
    unsafe { Placed::new(group, &name, memory) }
}

/// The rows of a call, placed.
enum PlacedRows<'g, 'c, B: Backend> {
    Own(PlacedOperand<'g, B>),
    Sharded(RawShards<'c, B>, Option<PlacedShardedScales<'g, 'c, B>>),
}

enum PlacedShardedScales<'g, 'c, B: Backend> {
    Own(Placed<'g, B>, Scaling),
    Sharded(RawShards<'c, B>, Scaling),
}

/// An output and its scales, placed.
struct PlacedOutput<'g, B: Backend> {
    values: Placed<'g, B>,
    scales: Option<(Placed<'g, B>, Quantization)>,
}

/// The outputs of a call, placed.
enum PlacedOutputs<'g, 'c, B: Backend> {
    Own(SmallVec<[PlacedOutput<'g, B>; MAX_WEIGHTS]>),
    Sharded(RawShards<'c, B>),
}

/// The arguments of a call, placed.
struct PlacedCall<'g, 'c, B: Backend> {
    rows: PlacedRows<'g, 'c, B>,
    weights: SmallVec<[PlacedOperand<'g, B>; MAX_WEIGHTS]>,
    outputs: PlacedOutputs<'g, 'c, B>,
    bias: Option<Placed<'g, B>>,
    residual: Option<Placed<'g, B>>,
}

impl<'g, 'c, B: AnyBackend> PlacedCall<'g, 'c, B> {
    /// # Safety
    /// As [`Placed::new`].
    unsafe fn new(group: &'g Group<B>, call: &ProductCall<'c>) -> refusal::Result<Self> {
        // SAFETY: as this function's.
        let place = |name, memory| unsafe { Placed::new(group, name, memory) };
        // SAFETY: as this function's.
        let operand = |name, operand| unsafe { PlacedOperand::new(group, name, operand) };
        let rows = match &call.a {
            RowOperand::Own(own) => PlacedRows::Own(operand("a", own)?),
            RowOperand::Sharded(shards, scales) => {
                let scales = match scales {
                    None => None,
                    Some(ShardedScales::Own(memory, scaling)) => {
                        // SAFETY: as this function's.
                        let placed = unsafe { scales_in(group, "a", *memory)? };
                        Some(PlacedShardedScales::Own(placed, *scaling))
                    }
                    Some(ShardedScales::Sharded(shards, scaling)) => {
                        let shards = shards.raw("scales of a")?;
                        Some(PlacedShardedScales::Sharded(shards, *scaling))
                    }
                };
                let shards = shards.raw("a")?;
                group.require_same("a", shards.group)?;
                PlacedRows::Sharded(shards, scales)
            }
        };
        let outputs = match call.outputs {
            Outputs::Own(outputs) => {
                let outputs = outputs.iter().map(|output| {
                    Ok(PlacedOutput {
                        values: place("out", output.values)?,
                        scales: match output.scales {
                            // SAFETY: as this function's.
                            Some((memory, how)) => unsafe {
                                Some((scales_in(group, "out", memory)?, how))
                            },
                            None => None,
                        },
                    })
                });
                PlacedOutputs::Own(outputs.collect::<refusal::Result<_>>()?)
            }
            Outputs::Sharded(shards) => PlacedOutputs::Sharded(shards.raw("out")?),
        };
        let weights = call.weights.iter().map(|weight| operand("b", weight));
        Ok(PlacedCall {
            rows,
            weights: weights.collect::<refusal::Result<_>>()?,
            outputs,
            bias: call.bias.map(|bias| place("bias", bias)).transpose()?,
            residual: call
                .residual
                .map(|residual| place("residual", residual))
                .transpose()?,
        })
    }

    fn addends(&self) -> Addends<'_, B> {
        Addends {
            bias: self.bias.as_ref().map(Placed::view),
            residual: self.residual.as_ref().map(Placed::view),
        }
    }

    fn weights(&self) -> RawWeights<'_, B> {
        self.weights.iter().map(PlacedOperand::raw).collect()
    }

    /// The rows, which must be this rank's own.
    fn own(&self) -> refusal::Result<RawOperand<'_, B>> {
        match &self.rows {
            PlacedRows::Own(operand) => Ok(operand.raw()),
            PlacedRows::Sharded(..) => Err(misplaced("a", "a matrix of this rank's own")),
        }
    }

    /// The rows, which must be sharded.
    fn sharded(&self) -> refusal::Result<RawShardedOperand<'_, B>> {
        let PlacedRows::Sharded(shards, scales) = &self.rows else {
            return Err(misplaced("a", "a sharded matrix"));
        };
        let scales = match scales {
            None => None,
            Some(PlacedShardedScales::Own(placed, scaling)) => {
                Some(PlacedScales::Own(Scales::raw(placed.view(), *scaling)))
            }
            Some(PlacedShardedScales::Sharded(shards, scaling)) => {
                Some(PlacedScales::sharded(*shards, *scaling)?)
            }
        };
        Ok(RawShardedOperand::new(*shards, scales))
    }

    fn operands(&self) -> refusal::Result<SumOperands<'_, '_, B>> {
        Ok(SumOperands {
            a: self.own()?,
            weights: self.weights(),
            addends: self.addends(),
        })
    }

    /// The outputs, which must be this rank's own.
    fn outputs(&self) -> refusal::Result<RawOutputs<'_, B>> {
        let PlacedOutputs::Own(outputs) = &self.outputs else {
            return Err(misplaced("out", "a matrix of this rank's own"));
        };
        let outputs = outputs.iter().map(|output| {
            let scales = output.scales.as_ref();
            let scales = scales.map(|(placed, how)| quantized(placed, *how));
            Ok(ProductOutput::new(
                output.values.output(),
                scales.transpose()?,
            ))
        });
        outputs.collect()
    }

    /// The sums for all ranks, which must be sharded.
    fn sums(&self) -> refusal::Result<RawShards<'_, B>> {
        match &self.outputs {
            PlacedOutputs::Sharded(shards) => Ok(*shards),
            PlacedOutputs::Own(_) => Err(misplaced("out", "a sharded matrix")),
        }
    }
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
pub(super) fn quantized<'p, B: Backend>(
    placed: &'p Placed<'_, B>,
    how: Quantization,
) -> refusal::Result<Quantized<'p, B>> {
    let Memory { dtype, .. } = placed.memory;
    require_property(
        "scales of out",
        "the dtype",
        dtype == DType::F32,
        DType::F32,
        dtype,
    )?;
    Ok(Quantized::raw(placed.view(), placed.output(), how))
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

/// Places the arguments of a call and makes it.
///
/// # Safety
/// As the calls of [`AnyGroup`].
pub(super) unsafe fn run<B: AnyBackend>(
    group: &Group<B>,
    product: &Product,
    call: &ProductCall,
) -> Result<()> {
    // SAFETY: as this function's.
    let placed = unsafe { PlacedCall::new(group, call) };
    let refuse = |refusal| refused(group, product.kind, refusal);
    let placed = placed.map_err(refuse)?;
    let options = product.options().map_err(refuse)?;
    match product.kind {
        ProductKind::Matmul => {
            let a = placed.own().map_err(refuse)?;
            let outputs = placed.outputs().map_err(refuse)?;
            let call = (placed.weights(), outputs);
            own_product::run(&options, placed.addends(), a, call)
        }
        ProductKind::AllGatherMatmul => {
            let a = placed.sharded().map_err(refuse)?;
            let outputs = placed.outputs().map_err(refuse)?;
            let gather = GatherProduct {
                options,
                stages: product.stages,
            };
            gather.run(placed.addends(), a, (placed.weights(), outputs))
        }
        ProductKind::MatmulReduceScatter => {
            let operands = placed.operands().map_err(refuse)?;
            let scatter = ScatterProduct {
                options,
                rows: product.rows.as_deref(),
            };
            match &placed.outputs {
                PlacedOutputs::Own(_) => {
                    let outputs = placed.outputs().map_err(refuse)?;
                    scatter.run(operands, outputs)
                }
                PlacedOutputs::Sharded(out) => scatter.run_into(operands, *out),
            }
        }
        ProductKind::MatmulAllReduce => {
            let operands = placed.operands().map_err(refuse)?;
            let out = placed.sums().map_err(refuse)?;
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
    let judge =
        |refusal: Refusal| -> Error { Refusal::of(group.rank(), product.kind.name())(refusal) };
    let options = product.options().map_err(judge)?;
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

/// A product that has been planned, as it takes arguments that have been placed.
trait Planned<B: Backend>: Send + Sync {
    fn run(
        &self,
        call: &PlacedCall<'_, '_, B>,
        refuse: &dyn Fn(Refusal) -> Error,
        trace: Option<&mut Vec<Span>>,
    ) -> Result<()>;
    fn explain(&self) -> String;
}

impl<B: AnyBackend, P: Planned<B>> Bound<B, P> {
    /// # Safety
    /// As the calls of [`AnyGroup`].
    unsafe fn call(&self, call: &ProductCall, trace: Option<&mut Vec<Span>>) -> Result<()> {
        let Bound(group, kind, planned) = self;
        let refuse = |refusal| refused(group, *kind, refusal);
        // SAFETY: as this function's.
        let placed = unsafe { PlacedCall::new(group, call) };
        planned.run(&placed.map_err(refuse)?, &refuse, trace)
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
}

impl<B: AnyBackend> Planned<B> for PlannedProduct<B> {
    fn run(
        &self,
        call: &PlacedCall<'_, '_, B>,
        refuse: &dyn Fn(Refusal) -> Error,
        trace: Option<&mut Vec<Span>>,
    ) -> Result<()> {
        if trace.is_some() {
            let what = "a product of one rank has no trace".into();
            return Err(refuse(Refusal::Unsupported { what }));
        }
        let a = call.own().map_err(refuse)?;
        let outputs = call.outputs().map_err(refuse)?;
        self.run(call.addends(), a, (call.weights(), outputs))
    }

    fn explain(&self) -> String {
        self.explain().to_string()
    }
}

impl<B: AnyBackend> Planned<B> for PlannedGather<B> {
    fn run(
        &self,
        call: &PlacedCall<'_, '_, B>,
        refuse: &dyn Fn(Refusal) -> Error,
        trace: Option<&mut Vec<Span>>,
    ) -> Result<()> {
        let a = call.sharded().map_err(refuse)?;
        let outputs = call.outputs().map_err(refuse)?;
        self.run(call.addends(), a, (call.weights(), outputs), trace)
    }

    fn explain(&self) -> String {
        self.explain().to_string()
    }
}

impl<B: AnyBackend> Planned<B> for PlannedSums<B> {
    fn run(
        &self,
        call: &PlacedCall<'_, '_, B>,
        refuse: &dyn Fn(Refusal) -> Error,
        trace: Option<&mut Vec<Span>>,
    ) -> Result<()> {
        let operands = call.operands().map_err(refuse)?;
        match &call.outputs {
            PlacedOutputs::Own(_) => {
                let outputs = call.outputs().map_err(refuse)?;
                self.scatter(&operands, outputs, trace)
            }
            PlacedOutputs::Sharded(out) => self.scatter_into(&operands, *out, trace),
        }
    }

    fn explain(&self) -> String {
        self.explain().to_string()
    }
}

impl<B: AnyBackend> Planned<B> for PlannedAllReduce<B> {
    fn run(
        &self,
        call: &PlacedCall<'_, '_, B>,
        refuse: &dyn Fn(Refusal) -> Error,
        trace: Option<&mut Vec<Span>>,
    ) -> Result<()> {
        let operands = call.operands().map_err(refuse)?;
        let out = call.sums().map_err(refuse)?;
        self.run(&operands, out, trace)
    }

    fn explain(&self) -> String {
        self.sums.explain().to_string()
    }
}
