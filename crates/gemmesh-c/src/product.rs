//! Products of matrices.

use std::ffi::{CString, c_char};
use std::sync::{Arc, OnceLock};

use gemmesh::fp8::Scaling;
use gemmesh::products::MAX_WEIGHTS;
use gemmesh::products::RowSplit;
use gemmesh::raw::{
    AnyGroup, AnyOperand, AnyOutput, AnyOutputs, AnyPrepared, AnyProduct, AnyShardedScales,
    AnyShards, Memory, PreparedFor, ProductCall, RowOperand,
};
use smallvec::SmallVec;

use crate::calls::{Call, guarded, in_group, with};
use crate::convert::{
    by_rank, check_out, given, memory, memory_if_given, memory_of, put, sized, slice_of_few,
};
use crate::failure::{Failure, Result, text};
use crate::group::{GROUPS, gemmesh_group};
use crate::numbers;
use crate::sharded::{gemmesh_sharded, shards, shards_if_given};
use crate::status::gemmesh_status;
use crate::table::Table;
use crate::types::*;

/// A product that has been planned for a shape, so that it can run many times. Made by gemmesh_prepare, freed by
/// gemmesh_prepared_free. It keeps its group alive.
pub struct gemmesh_prepared(());

/// A planned product, and what C reads of it.
struct Planned {
    group: Arc<dyn AnyGroup>,
    is_collective: Call,
    prepared: Box<dyn AnyPrepared>,
    explanation: OnceLock<CString>,
}

static PREPARED: Table<Planned> = Table::new("prepared product", 0xa4);

/// A product of a group of `world` ranks.
///
/// # Safety
/// As [`sized`], for what it points to, too.
unsafe fn product(pointer: *const gemmesh_product, world: usize) -> Result<AnyProduct> {
    // SAFETY: as this function's.
    let asked = unsafe { sized("the product", pointer)? };
    let (scalings, count) = (asked.weight_scaling, asked.weight_scaling_count);
    let mut of_weights = Vec::new();
    // SAFETY: as this function's.
    for scaling in unsafe { slice_of_few("weight_scaling", scalings, count, MAX_WEIGHTS)? } {
        of_weights.push(numbers::scaling("the weights", *scaling)?);
    }
    let rows = match asked.rows.is_null() {
        true => None,
        // SAFETY: as this function's.
        false => Some(unsafe { by_rank("rows", asked.rows, asked.row_count, world)? }.to_vec()),
    };
    Ok(AnyProduct {
        activation: numbers::activation(asked.activation)?,
        gated: asked.gated != 0,
        weight_layout: numbers::weight_layout(asked.weight_layout)?,
        accumulation: numbers::accumulation(asked.accumulation)?,
        constant_weights: asked.constant_weights != 0,
        stages: (asked.stages != 0).then_some(asked.stages),
        rows,
        weight_dtype: numbers::dtype_if_given("the weights", asked.weight_dtype)?,
        output_dtype: numbers::dtype_if_given("out", asked.output_dtype)?,
        scaling: (numbers::scaling("a", asked.scaling)?, of_weights),
        quantization: numbers::quantization(asked.quantization)?,
        route: numbers::route(asked.route)?,
        ..AnyProduct::new(
            numbers::product_kind(asked.kind)?,
            numbers::dtype("a", asked.dtype)?,
        )
    })
}

/// An operand.
///
/// # Safety
/// As [`given`], for its scales.
unsafe fn operand(argument: &str, operand: &gemmesh_operand) -> Result<AnyOperand> {
    // SAFETY: as this function's.
    let scales = unsafe { memory_if_given("the scales", operand.scales)? };
    let scaling = numbers::scaling(argument, operand.scaling)?;
    Ok(AnyOperand {
        values: memory_of(argument, &operand.values)?,
        scales: together(argument, scales, scaling)?,
    })
}

/// Scales and how they belong to values: both or none.
fn together<T>(
    argument: &str,
    scales: Option<T>,
    scaling: Scaling,
) -> Result<Option<(T, Scaling)>> {
    match (scales, scaling) {
        (None, Scaling::None) => Ok(None),
        (Some(scales), scaling) if scaling != Scaling::None => Ok(Some((scales, scaling))),
        (scales, _) => {
            let found = match scales {
                Some(_) => "GEMMESH_SCALING_NONE, with scales",
                None => "a kind of scales, without scales",
            };
            let expected = "given with the scales";
            Err(Failure::unsuitable(
                argument,
                "the scaling",
                expected,
                found,
            ))
        }
    }
}

/// An output.
///
/// # Safety
/// As [`given`], for its scales.
unsafe fn output(output: &gemmesh_output) -> Result<AnyOutput> {
    // SAFETY: as this function's.
    let scales = unsafe { memory_if_given("the scales of out", output.scales)? };
    let how = numbers::quantization(output.quantization)?;
    let scales = match (scales, how) {
        (Some(scales), Some(how)) => Some((scales, how)),
        (None, None) => None,
        (scales, _) => {
            let found = match scales {
                Some(_) => "GEMMESH_QUANTIZATION_NONE, with scales",
                None => "a kind of scales, without scales",
            };
            let expected = "given with the scales";
            return Err(Failure::unsuitable(
                "out",
                "the quantization",
                expected,
                found,
            ));
        }
    };
    Ok(AnyOutput {
        values: memory_of("out", &output.values)?,
        scales,
    })
}

/// The rows as C gives them, of which the sharded matrices are held.
enum RowsGiven {
    Own(AnyOperand),
    Sharded(Arc<AnyShards>, Option<(ScalesGiven, Scaling)>),
}

enum ScalesGiven {
    Own(Memory),
    Sharded(Arc<AnyShards>),
}

impl RowsGiven {
    /// # Safety
    /// As [`sized`], for what the call points to, too.
    unsafe fn new(call: &gemmesh_product_call) -> Result<RowsGiven> {
        // SAFETY: as this function's.
        let (own, sharded) = unsafe { (call.a.as_ref(), call.sharded_a.as_ref()) };
        match (own, sharded) {
            // SAFETY: as this function's.
            (Some(own), None) => Ok(RowsGiven::Own(unsafe { operand("a", own)? })),
            // SAFETY: as this function's.
            (None, Some(sharded)) => unsafe { RowsGiven::sharded(sharded) },
            (None, None) => Err(Failure::null("a")),
            (Some(_), Some(_)) => Err(only_one("a", "a and sharded_a")),
        }
    }

    /// # Safety
    /// As [`given`], for the operand's scales.
    unsafe fn sharded(operand: &gemmesh_sharded_operand) -> Result<RowsGiven> {
        // SAFETY: as this function's.
        let own = unsafe { memory_if_given("the scales of a", operand.own_scales)? };
        let sharded = shards_if_given("the scales of a", operand.sharded_scales)?;
        let scales = match (own, sharded) {
            (Some(own), None) => Some(ScalesGiven::Own(own)),
            (None, Some(sharded)) => Some(ScalesGiven::Sharded(sharded)),
            (None, None) => None,
            (Some(_), Some(_)) => {
                return Err(only_one("the scales of a", "own_scales and sharded_scales"));
            }
        };
        let scaling = numbers::scaling("a", operand.scaling)?;
        let scales = together("a", scales, scaling)?;
        Ok(RowsGiven::Sharded(shards("a", operand.values)?, scales))
    }

    fn operand(&self) -> RowOperand<'_> {
        match self {
            RowsGiven::Own(own) => RowOperand::Own(*own),
            RowsGiven::Sharded(values, scales) => {
                let scales = scales.as_ref().map(|(scales, scaling)| match scales {
                    ScalesGiven::Own(memory) => AnyShardedScales::Own(*memory, *scaling),
                    ScalesGiven::Sharded(shards) => AnyShardedScales::Sharded(shards, *scaling),
                });
                RowOperand::Sharded(values, scales)
            }
        }
    }
}

/// Two pointers of which one must be null.
fn only_one(argument: &str, found: &str) -> Failure {
    Failure::unsuitable(argument, "the pointer", "given once", found)
}

/// Runs a call with its arguments as gemmesh takes them. The lists are made here and only lent, because they are large.
///
/// # Safety
/// As [`sized`], for what the call points to, too.
unsafe fn with_arguments(
    pointer: *const gemmesh_product_call,
    run: impl FnOnce(&ProductCall) -> Result<()>,
) -> Result<()> {
    // SAFETY: as this function's, for all that the call points to.
    unsafe {
        let call = sized("the call", pointer)?;
        let a = RowsGiven::new(call)?;
        let mut weights = SmallVec::<[AnyOperand; MAX_WEIGHTS]>::new();
        for weight in slice_of_few("weights", call.weights, call.weight_count, MAX_WEIGHTS)? {
            weights.push(operand("b", weight)?);
        }
        let mut outputs = SmallVec::<[AnyOutput; MAX_WEIGHTS]>::new();
        for out in slice_of_few("outputs", call.outputs, call.output_count, MAX_WEIGHTS)? {
            outputs.push(output(out)?);
        }
        let sharded_output = shards_if_given("out", call.sharded_output)?;
        let bias = memory_if_given("bias", call.bias)?;
        let residual = memory_if_given("residual", call.residual)?;
        let outputs = match &sharded_output {
            Some(_) if !outputs.is_empty() => {
                return Err(only_one("out", "outputs and sharded_output"));
            }
            Some(shards) => AnyOutputs::Sharded(shards),
            None => AnyOutputs::Own(&outputs),
        };
        run(&ProductCall {
            a: a.operand(),
            weights: &weights,
            outputs,
            bias,
            residual,
        })
    }
}

/// Who waits for a product.
///
/// # Safety
/// As [`given`].
unsafe fn waiting(product: *const gemmesh_product) -> Call {
    // SAFETY: as this function's.
    match unsafe { product.as_ref() } {
        Some(product) if product.kind == gemmesh_product_kind::GEMMESH_MATMUL as u32 => Call::Own,
        _ => Call::Collective,
    }
}

/// Runs a product: matmul, all_gather_matmul, matmul_reduce_scatter or matmul_all_reduce. It returns when the operation
/// has been begun: wait by gemmesh_synchronize before the host reads the outputs. Collective, unless it is
/// GEMMESH_MATMUL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gemmesh_run(
    group: *const gemmesh_group,
    product: *const gemmesh_product,
    call: *const gemmesh_product_call,
) -> gemmesh_status {
    // SAFETY: as the crate says.
    let kind = unsafe { waiting(product) };
    in_group("gemmesh_run", kind, group, |group| {
        // SAFETY: as the crate and the header's gemmesh_memory say.
        unsafe {
            let product = self::product(product, group.world_size())?;
            with_arguments(call, |call| Ok(group.run(&product, call)?))
        }
    })
}

/// Plans a product, so that it can run many times. The weights have the N of `widths`, `width_count` numbers.
///
/// GEMMESH_MATMUL: a is [m, k], and `sharded` is NULL. GEMMESH_ALL_GATHER_MATMUL: a is like `sharded`, and m and k are
/// not read. GEMMESH_MATMUL_REDUCE_SCATTER: a is [m, k], and `sharded` is NULL, although sums may go to a sharded
/// matrix. GEMMESH_MATMUL_ALL_REDUCE: a is [m, k], and sums go to a matrix like `sharded`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gemmesh_prepare(
    group: *const gemmesh_group,
    product: *const gemmesh_product,
    m: usize,
    k: usize,
    sharded: *const gemmesh_sharded,
    widths: *const usize,
    width_count: usize,
    prepared: *mut *mut gemmesh_prepared,
) -> gemmesh_status {
    const CALL: &str = "gemmesh_prepare";
    guarded(CALL, || {
        let opened = GROUPS.get("group", group)?;
        with(CALL, Call::Own, &opened.group, |group| {
            check_out("prepared", prepared)?;
            // SAFETY: as the crate says.
            let (asked, widths, kind) = unsafe {
                let widths = slice_of_few("widths", widths, width_count, MAX_WEIGHTS)?;
                let asked = self::product(product, group.world_size())?;
                (asked, widths, waiting(product))
            };
            let sharded = shards_if_given("sharded", sharded)?;
            let rows = match &sharded {
                Some(a) if asked.kind.gathers() => PreparedFor::Sharded(a),
                Some(out) => PreparedFor::OwnInto([m, k], out),
                None => PreparedFor::Own([m, k]),
            };
            let planned = Planned {
                group: opened.group.clone(),
                is_collective: kind,
                prepared: group.prepare(&asked, rows, widths)?,
                explanation: OnceLock::new(),
            };
            let handle = PREPARED.insert(Arc::new(planned))?;
            // SAFETY: as the crate says.
            unsafe { put("prepared", prepared, handle) }
        })
    })
}

/// Runs a prepared product, as gemmesh_run.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gemmesh_prepared_run(
    prepared: *const gemmesh_prepared,
    call: *const gemmesh_product_call,
) -> gemmesh_status {
    const CALL: &str = "gemmesh_prepared_run";
    guarded(CALL, || {
        let planned = PREPARED.get("prepared", prepared)?;
        with(CALL, planned.is_collective, &planned.group, |_| {
            // SAFETY: as the crate and the header's gemmesh_memory say.
            unsafe { with_arguments(call, |call| Ok(planned.prepared.run(call)?)) }
        })
    })
}

/// How a prepared product is cut up, and how long that is expected to take: some lines of text. They are valid until it
/// is freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gemmesh_prepared_explain(
    prepared: *const gemmesh_prepared,
    explanation: *mut *const c_char,
) -> gemmesh_status {
    guarded("gemmesh_prepared_explain", || {
        let planned = PREPARED.get("prepared", prepared)?;
        let explain = || text(&planned.prepared.explain());
        let lines = planned.explanation.get_or_init(explain).as_ptr();
        // SAFETY: as the crate says.
        unsafe { put("explanation", explanation, lines) }
    })
}

/// Frees a prepared product; NULL is none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gemmesh_prepared_free(prepared: *mut gemmesh_prepared) -> gemmesh_status {
    guarded("gemmesh_prepared_free", || {
        if !prepared.is_null() {
            drop(PREPARED.take("prepared", prepared)?);
        }
        Ok(())
    })
}

/// Returns GEMMESH_OK if the group can multiply rows [m, k] with weights of the N of `widths`, `width_count` numbers.
/// Otherwise the status and the sentence are those that the call would give. `rows` is NULL, or says how many rows each
/// rank owns, `row_count` numbers; `m` is not read then. Each rank asks for itself.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gemmesh_supported(
    group: *const gemmesh_group,
    product: *const gemmesh_product,
    m: usize,
    k: usize,
    rows: *const usize,
    row_count: usize,
    widths: *const usize,
    width_count: usize,
) -> gemmesh_status {
    in_group("gemmesh_supported", Call::Own, group, |group| {
        // SAFETY: as the crate says.
        unsafe {
            let world = group.world_size();
            let split = if rows.is_null() {
                RowSplit::from([m, k])
            } else {
                RowSplit::from((by_rank("rows", rows, row_count, world)?, k))
            };
            let widths = slice_of_few("widths", widths, width_count, MAX_WEIGHTS)?;
            Ok(group.supports(&self::product(product, world)?, &split, widths)?)
        }
    })
}

/// Makes fp8 and its scales of bf16, f16 or f32. `out` is GEMMESH_F8E4M3, of the shape of `x`. `scales` is written,
/// unless the quantization is GEMMESH_QUANTIZATION_TENSOR. All three may be own rows of sharded matrices.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gemmesh_quantize(
    group: *const gemmesh_group,
    x: *const gemmesh_memory,
    out: *const gemmesh_memory,
    scales: *const gemmesh_memory,
    quantization: *const gemmesh_quantization,
) -> gemmesh_status {
    in_group("gemmesh_quantize", Call::Own, group, |group| {
        // SAFETY: as the crate and the header's gemmesh_memory say.
        unsafe {
            let how = numbers::quantization(*given("quantization", quantization)?)?;
            let how = how.ok_or_else(|| {
                let found = "GEMMESH_QUANTIZATION_NONE";
                Failure::unsuitable("out", "the quantization", "a kind of scales", found)
            })?;
            let scales = memory("the scales", scales)?;
            Ok(group.quantize(memory("x", x)?, memory("out", out)?, (scales, how))?)
        }
    })
}
