//! Reductions by a kernel of their own, after the work that brings the rows.

use std::ffi::c_void;
use std::ops::Range;

use super::operands::{CallMatrix, Operands, output_scales};
use super::params::function;
use crate::backend::cuda::abi::{
    GEMMESH_IDENTITY, GEMMESH_REDUCE_THREADS, GEMMESH_SCALE_BLOCK, GEMMESH_STORED_E4M3,
    GEMMESH_STORED_F16, GEMMESH_STORED_F32, GEMMESH_STORED_OUTPUT, GemmeshQuantization,
    GemmeshReduction,
};
use crate::backend::cuda::driver::Function;
use crate::backend::cuda::gpu::Gpu;
use crate::element::DType;
use crate::error::{Kind, Result};
use crate::schedule::layout::MAX_WORLD;
use crate::schedule::{Addend, OutputScales, Reduction, Schedule, Sum};

/// The kernel that adds up the rows of a schedule's reduction, or quantises them.
#[derive(Clone, Copy, Debug)]
pub struct ReductionKernel {
    pub function: Function,
    /// Bytes of an element.
    bytes: usize,
    /// The most CTAs of a launch.
    most_ctas: usize,
}

/// CTAs of a reduction that a multiprocessor holds.
const CTAS: usize = 8;

impl ReductionKernel {
    pub fn new(gpu: &Gpu, schedule: &Schedule, reduction: &Reduction) -> Result<ReductionKernel> {
        let dtype = reduction.dtype(schedule.matrices());
        let function = match reduction.sum.scales {
            Some(_) => gpu.kernels.quantize(dtype),
            None => gpu.kernels.reduce(dtype),
        };
        ReductionKernel::of(gpu, schedule, function, dtype)
    }

    /// A kernel for rows of `dtype`, behind a product of `schedule` if it has one.
    pub fn of(
        gpu: &Gpu,
        schedule: &Schedule,
        function: Option<Function>,
        dtype: DType,
    ) -> Result<ReductionKernel> {
        let function = function.ok_or_else(|| {
            Kind::Internal {
                what: format!("a schedule adds {dtype}, which no kernel does"),
            }
            .on(schedule.rank())
        })?;
        let most = gpu.device.multiprocessors() * CTAS;
        Ok(ReductionKernel {
            function,
            bytes: dtype.bytes(),
            most_ctas: most.min(gpu.most_ctas(schedule.product())),
        })
    }

    /// How many CTAs add these sums: at most as many as fill the device, each with about the same number of pieces.
    pub fn grid(&self, sums: &GemmeshReduction) -> u32 {
        let pieces = sums.n.div_ceil(16 / self.bytes as u32) as usize * sums.rows as usize;
        let ctas = pieces.div_ceil(GEMMESH_REDUCE_THREADS as usize);
        ctas.clamp(1, self.most_ctas) as u32
    }

    /// How many CTAs quantise these rows: likewise, with a block for each warp.
    pub fn grid_of_blocks(&self, of: &GemmeshQuantization) -> u32 {
        let columns = of.scales.first_column + of.columns;
        let blocks = columns.div_ceil(GEMMESH_SCALE_BLOCK) as usize * of.rows as usize;
        let ctas = blocks.div_ceil(GEMMESH_REDUCE_THREADS as usize / 32);
        ctas.clamp(1, self.most_ctas) as u32
    }
}

/// The parameters of the kernel that adds `rows` of a reduction.
pub fn sums(
    schedule: &Schedule,
    reduction: &Reduction,
    rows: Range<usize>,
    operands: &Operands,
) -> Result<GemmeshReduction> {
    let Reduction { n, sum, .. } = reduction;
    let row = |CallMatrix { ptr, pitch, .. }: CallMatrix, first: usize| {
        ptr + ((first + rows.start) * pitch) as u64
    };
    let mut told = NOTHING_ADDED;
    for (index, addend) in sum.addends.iter().enumerate() {
        let &Addend::Rows { matrix, first } = addend else {
            return Err(Kind::Internal {
                what: "a reduction adds a product".into(),
            }
            .on(schedule.rank()));
        };
        let rows = operands.require(matrix)?;
        told.addends[index] = row(rows, first) as *const c_void;
        told.addend_pitches[index] = rows.pitch as u64;
    }
    if let Some(bias) = sum.bias.and_then(|bias| operands.get(bias.matrix)) {
        told.bias = bias.ptr as *const c_void;
    }
    if let Some(residual) = sum.residual
        && let Some(rows) = operands.get(residual.matrix)
    {
        told.residual = row(rows, residual.first) as *const c_void;
        told.residual_pitch = rows.pitch as u64;
    }
    let out = operands.require(sum.out)?;
    told.out = row(out, sum.first) as *mut c_void;
    told.out_pitch = out.pitch as u64;
    told.count = sum.addends.len() as u32;
    told.rows = rows.len() as u32;
    told.n = *n as u32;
    told.activation = function(sum.activation);
    let dtype = reduction.dtype(schedule.matrices());
    told.stored_type = match schedule.matrices()[sum.out].dtype {
        stored if stored == dtype => GEMMESH_STORED_OUTPUT,
        DType::F32 => GEMMESH_STORED_F32,
        DType::F16 => GEMMESH_STORED_F16,
        DType::F8E4M3 => GEMMESH_STORED_E4M3,
        other => {
            return Err(Kind::Internal {
                what: format!("a sum of {dtype} is stored as {other}, which no kernel does"),
            }
            .on(schedule.rank()));
        }
    };
    Ok(told)
}

/// The parameters of the kernel that quantises the rows of a reduction, which has one addend.
pub fn quantization(
    schedule: &Schedule,
    reduction: &Reduction,
    scales: OutputScales,
    operands: &Operands,
) -> Result<GemmeshQuantization> {
    let Reduction { rows, n, sum } = reduction;
    let [Addend::Rows { matrix, first }] = sum.addends[..] else {
        return Err(Kind::Internal {
            what: "a sum of several addends is quantised".into(),
        }
        .on(schedule.rank()));
    };
    let from = (operands, (matrix, first));
    quantized_rows(from, [*rows, *n], sum, scales, operands)
}

/// The parameters of the kernel that quantises rows [rows, n] to where `sum` is stored. `from`: the operands that have the
/// rows, their matrix among them, and the first of them.
pub fn quantized_rows(
    (from, (matrix, first)): (&Operands, (usize, usize)),
    [rows, n]: [usize; 2],
    sum: &Sum,
    scales: OutputScales,
    operands: &Operands,
) -> Result<GemmeshQuantization> {
    let at = |CallMatrix { ptr, pitch, .. }: CallMatrix, row: usize| ptr + (row * pitch) as u64;
    let (from, to) = (from.require(matrix)?, operands.require(sum.out)?);
    Ok(GemmeshQuantization {
        from: at(from, first) as *const c_void,
        from_pitch: from.pitch as u64,
        to: at(to, sum.first) as *mut c_void,
        to_pitch: to.pitch as u64,
        scales: output_scales(scales, 0, sum.first, operands.require(scales.matrix)?),
        rows: rows as u32,
        columns: n as u32,
    })
}

/// A reduction of no addends.
pub const NOTHING_ADDED: GemmeshReduction = GemmeshReduction {
    addends: [std::ptr::null(); MAX_WORLD],
    addend_pitches: [0; MAX_WORLD],
    bias: std::ptr::null(),
    out: std::ptr::null_mut(),
    out_pitch: 0,
    residual: std::ptr::null(),
    residual_pitch: 0,
    count: 0,
    rows: 0,
    n: 0,
    activation: GEMMESH_IDENTITY,
    stored_type: GEMMESH_STORED_OUTPUT,
    reserved: 0,
};
