//! A call's operands, as a product's kernel reads and writes them.

use std::ffi::c_void;

use smallvec::SmallVec;

use super::block_table::{Places, TARGETS};
use super::operands::{Matrices, Operand, Operands, part};
use super::product::{Finished, ProductKernel};
use crate::backend::cuda::abi::GemmeshOutput;
use crate::backend::cuda::driver::DeviceMatrix;
use crate::element::DType;
use crate::error::Result;
use crate::schedule::{Bias, MAX_WEIGHTS, MatrixSpec, OutputBlock, Product, Route, Schedule};

/// The matrices that a product's kernel reads and writes.
pub fn matrices(
    kernel: &ProductKernel,
    schedule: &Schedule,
    product: &Product,
    operands: &Operands,
) -> Result<Matrices> {
    let a = operands.whole(schedule, product.a)?;
    let weights = product.weights.iter();
    let weights = weights.map(|weight| operands.whole(schedule, weight.b));
    let (outputs, targets) = match &kernel.places {
        Some(places) => {
            let targets = targets(schedule, product, places, operands)?;
            // A rank alone adds nothing, and a rank without rows of its own stores nothing. Any matrix will do for
            // these.
            let added = targets[0].or(targets[TARGETS]).unwrap_or(a);
            (SmallVec::from_slice(&[added]), Some(targets))
        }
        None => (outputs(kernel, schedule, product, operands)?, None),
    };
    Ok(Matrices {
        a,
        weights: weights.collect::<Result<_>>()?,
        weight_layout: product.weight_layout,
        gated: product.gated,
        outputs,
        stores_f32: kernel.stores_f32,
        targets,
    })
}

/// Where each weight's tiles go: to the rows of its block or, for low-latency partials, to the rows of their sums.
fn outputs(
    kernel: &ProductKernel,
    schedule: &Schedule,
    product: &Product,
    operands: &Operands,
) -> Result<SmallVec<[DeviceMatrix; MAX_WEIGHTS]>> {
    let out = |block: &OutputBlock| {
        let (rows, sum) = match (&kernel.low_latency, schedule.reduction()) {
            (Some(_), Some(reduction)) => (reduction.rows, &reduction.sum),
            _ => (product.m, &block.sum),
        };
        operands.part(sum.out, sum.first, rows, product.weights[block.weight].n)
    };
    product.blocks.iter().map(out).collect()
}

/// Where the tiles of a kernel that adds partials go: partials in the memory of each rank that it reaches, then sums.
fn targets(
    schedule: &Schedule,
    product: &Product,
    places: &Places,
    operands: &Operands,
) -> Result<[Option<DeviceMatrix>; 2 * TARGETS]> {
    let (rank, world) = (schedule.rank(), schedule.world());
    // If copies push, no kernel stores to peers' memory.
    let reached = match schedule.uses(Route::Store) {
        true => world.min(TARGETS),
        false => 1,
    };
    let mut targets = [None; 2 * TARGETS];
    let mut add = |own: usize, number: usize, first, rows, columns| {
        targets[own] = operands
            .get(number)
            .map(|Operand { ptr, pitch, .. }| part(ptr, pitch, first, rows, columns));
        let pitch = schedule.matrices()[number].row_bytes();
        for distance in 1..reached {
            let ptr = operands.of_rank(number, (rank + distance) % world);
            targets[own + distance] = ptr.map(|ptr| part(ptr, pitch, first, rows, columns));
        }
    };
    if let Some(number) = places.partials {
        let MatrixSpec { rows, columns, .. } = schedule.matrices()[number];
        add(0, number, 0, rows, columns);
    }
    // f32 sums are stored without a tensor map.
    let is_f32 = |number: usize| schedule.matrices()[number].dtype == DType::F32;
    let out = places.out.as_ref().filter(|(number, _)| !is_f32(*number));
    if let Some((number, rows)) = out {
        add(TARGETS, *number, rows.start, rows.len(), product.n());
    }
    Ok(targets)
}

/// Sets where each weight's product goes, and what is added to it.
pub fn finish(
    outputs: &mut [GemmeshOutput; MAX_WEIGHTS],
    finished: &[Finished],
    product: &Product,
    dtype: DType,
    operands: &Operands,
) {
    for &Finished { weight, row, sum } in finished {
        let at = |number: usize, first: usize| {
            let Operand { ptr, pitch, .. } = operands.get(number)?;
            // The kernel counts from row 0 of `a`, whose address may lie before the matrix.
            let before = (row as u64)
                .wrapping_sub(first as u64)
                .wrapping_mul(pitch as u64);
            Some((ptr.wrapping_sub(before), pitch as u64))
        };
        let output = &mut outputs[weight];
        if let Some((ptr, pitch)) = at(sum.out, sum.first) {
            (output.out, output.out_pitch) = (ptr as *mut c_void, pitch);
        }
        let residual = sum.residual;
        if let Some((ptr, pitch)) = residual.and_then(|r| at(r.matrix, r.first)) {
            (output.residual, output.residual_pitch) = (ptr as *const c_void, pitch);
        }
        if let Some(Bias { matrix, first }) = sum.bias
            && let Some(Operand { ptr, .. }) = operands.get(matrix)
        {
            let column = |column: usize| (ptr + (column * dtype.bytes()) as u64) as *const c_void;
            output.bias = column(first);
            if product.gated {
                outputs[1].bias = column(first + product.weights[0].n);
            }
        }
    }
}
