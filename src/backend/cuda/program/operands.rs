//! The addresses of a call's matrices, and what a product's kernel is told of them.

use std::ffi::c_void;

use smallvec::SmallVec;

use super::block_table::Places;
use crate::backend::cuda::abi::{GemmeshOutput, GemmeshOutputScales, GemmeshParams, GemmeshScales};
use crate::backend::cuda::driver::{DeviceMatrix, DevicePtr};
use crate::backend::cuda::family::launch::{Matrices, TARGETS};
use crate::backend::cuda::shared::symmetric::Symmetric;
use crate::element::DType;
use crate::error::{Kind, Result};
use crate::schedule::plan::matrices::MATRICES;
use crate::schedule::{
    Bias, MAX_WEIGHTS, MatrixSpec, OutputBlock, OutputScales, Product, Route, ScaleMatrix,
    Schedule, Sum,
};

/// A matrix of a call.
#[derive(Clone, Copy, Debug)]
pub struct CallMatrix<'a> {
    /// Its address in this rank's memory.
    pub ptr: DevicePtr,
    /// Bytes from row to row.
    pub pitch: usize,
    /// Its memory on every rank, if it is symmetric.
    pub symmetric: Option<&'a Symmetric>,
}

/// The matrices of a call, by number in its schedule.
#[derive(Debug)]
pub struct Operands<'a> {
    pub rank: usize,
    pub all: SmallVec<[Option<CallMatrix<'a>>; MATRICES]>,
}

impl<'a> Operands<'a> {
    /// The matrix with this number, if the call has it.
    pub fn get(&self, number: usize) -> Option<CallMatrix<'a>> {
        self.all[number]
    }

    /// A matrix that every call of the schedule must have.
    pub fn require(&self, number: usize) -> Result<CallMatrix<'a>> {
        self.get(number).ok_or_else(|| {
            Kind::Internal {
                what: format!("a call lacks matrix {number} of its schedule"),
            }
            .on(self.rank)
        })
    }

    /// The address of a matrix in the memory of `rank`, if it is symmetric and the rank is on this host.
    pub fn of_rank(&self, number: usize, rank: usize) -> Option<DevicePtr> {
        let place = self.get(number)?.symmetric?.of(rank);
        (place != 0).then_some(place)
    }

    /// `rows` rows from `first` on, of `columns` columns.
    fn part(
        &self,
        number: usize,
        first: usize,
        rows: usize,
        columns: usize,
    ) -> Result<DeviceMatrix> {
        let CallMatrix { ptr, pitch, .. } = self.require(number)?;
        Ok(part(ptr, pitch, first, rows, columns))
    }

    fn whole(&self, schedule: &Schedule, number: usize) -> Result<DeviceMatrix> {
        let MatrixSpec { rows, columns, .. } = schedule.matrices()[number];
        self.part(number, 0, rows, columns)
    }
}

/// Rows of a matrix that lies at `ptr`, `pitch` bytes from row to row.
pub fn part(
    ptr: DevicePtr,
    pitch: usize,
    first: usize,
    rows: usize,
    columns: usize,
) -> DeviceMatrix {
    DeviceMatrix {
        ptr: ptr + (first * pitch) as u64,
        rows,
        columns,
        pitch,
    }
}

/// The matrices that a product's kernel reads and writes.
///
/// `places`: where blocks go, if they go to several places. `sends_low_latency`: true if all rows are partials that go
/// through low-latency areas.
pub fn matrices(
    schedule: &Schedule,
    product: &Product,
    places: Option<&Places>,
    sends_low_latency: bool,
    stored: DType,
    operands: &Operands,
) -> Result<Matrices> {
    // The kernel loads no row after the product's last one.
    let a = DeviceMatrix {
        rows: product.m,
        ..operands.whole(schedule, product.a)?
    };
    let weights = product.weights.iter();
    let weights = weights.map(|weight| operands.whole(schedule, weight.b));
    let (outputs, targets) = match places {
        Some(places) => {
            let targets = targets(schedule, product, places, operands)?;
            // A rank alone adds nothing, and a rank without rows of its own stores nothing. Unused slots: any valid
            // pointer will do.
            let added = targets[0].or(targets[TARGETS]).unwrap_or(a);
            (SmallVec::from_slice(&[added]), Some(targets))
        }
        None => (
            outputs(schedule, product, sends_low_latency, operands)?,
            None,
        ),
    };
    Ok(Matrices {
        a,
        weights: weights.collect::<Result<_>>()?,
        weight_layout: product.weight_layout,
        gated: product.gated,
        outputs,
        stored,
        targets,
    })
}

/// Where each weight's tiles go: to the rows of its block or, for low-latency partials, to the rows of their sums.
fn outputs(
    schedule: &Schedule,
    product: &Product,
    sends_low_latency: bool,
    operands: &Operands,
) -> Result<SmallVec<[DeviceMatrix; MAX_WEIGHTS]>> {
    let out = |block: &OutputBlock| {
        let (rows, sum) = match schedule.reduction().filter(|_| sends_low_latency) {
            Some(reduction) => (reduction.rows, &reduction.sum),
            None => (product.m, &block.sum),
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
    let reached = if schedule.uses(Route::Store) {
        world.min(TARGETS)
    } else {
        1
    };
    let mut targets = [None; 2 * TARGETS];
    let mut add = |own: usize, number: usize, first, rows, columns| {
        targets[own] = operands
            .get(number)
            .map(|CallMatrix { ptr, pitch, .. }| part(ptr, pitch, first, rows, columns));
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
    // Sums of another type than partials are stored without a tensor map.
    let is_alike = |number: usize| {
        let dtype = |number: usize| schedule.matrices()[number].dtype;
        places
            .partials
            .is_none_or(|partials| dtype(number) == dtype(partials))
    };
    let out = places.out.as_ref().filter(|(number, _)| is_alike(*number));
    if let Some((number, rows)) = out {
        add(TARGETS, *number, rows.start, rows.len(), product.n());
    }
    Ok(targets)
}

/// A sum that a product's kernel finishes, with bias, activation and residual.
pub struct Finished<'a> {
    /// The number of the weight.
    pub weight: usize,
    /// The row of `a` to which its first row belongs.
    pub row: usize,
    pub sum: &'a Sum,
}

/// Sets where each weight's product goes, and what is added to it.
pub fn finish(
    outputs: &mut [GemmeshOutput; MAX_WEIGHTS],
    finished: &[Finished],
    product: &Product,
    schedule: &Schedule,
    operands: &Operands,
) {
    for &Finished { weight, row, sum } in finished {
        let at = |number: usize, first: usize| {
            let CallMatrix { ptr, pitch, .. } = operands.get(number)?;
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
        if let Some(scales) = sum.scales
            && let Some(place) = operands.get(scales.matrix)
        {
            output.quantized = output_scales(scales, row, sum.first, place);
        }
        if let Some(Bias { matrix, first }) = sum.bias
            && let Some(CallMatrix { ptr, .. }) = operands.get(matrix)
        {
            let bytes = schedule.matrices()[matrix].dtype.bytes();
            let column = |column: usize| (ptr + (column * bytes) as u64) as *const c_void;
            output.bias = column(first);
            if product.gated {
                outputs[1].bias = column(first + product.weights[0].n);
            }
        }
    }
}

/// How a kernel quantises rows. It counts `row` for row `first` of the output. `place`: the matrix of their scales.
pub fn output_scales(
    OutputScales { quantization, .. }: OutputScales,
    row: usize,
    first: usize,
    place: CallMatrix,
) -> GemmeshOutputScales {
    let CallMatrix { ptr, pitch, .. } = place;
    let pitch = (pitch / size_of::<f32>()) as u32;
    let scaling = quantization.scaling;
    let distance = scaling.row_distance(pitch);
    // As in `finish`, the address may lie before the matrix.
    let before = (row as u64)
        .wrapping_sub(first as u64)
        .wrapping_mul(u64::from(distance) * size_of::<f32>() as u64);
    GemmeshOutputScales {
        scales: ptr.wrapping_sub(before) as *mut f32,
        row: distance,
        block: scaling.block_distance(pitch),
        power_of_two: quantization.power_of_two.into(),
        first_column: scaling.first_column() as u32,
    }
}

/// Sets the scales of operands of fp8.
pub fn scale(params: &mut GemmeshParams, product: &Product, operands: &Operands) {
    let of = |scales: Option<ScaleMatrix>| {
        let scales = scales?;
        let CallMatrix { ptr, pitch, .. } = operands.get(scales.matrix)?;
        let pitch = (pitch / size_of::<f32>()) as u32;
        Some((scales.scaling, ptr as *const f32, pitch))
    };
    if let Some((scaling, ptr, pitch)) = of(product.a_scales) {
        params.scales = GemmeshScales {
            a: ptr,
            a_row: scaling.row_distance(pitch),
            a_block: scaling.block_distance(pitch),
            first_column: scaling.first_column() as u32,
            reserved: 0,
        };
    }
    for (weight, output) in product.weights.iter().zip(&mut params.outputs) {
        if let Some((scaling, ptr, pitch)) = of(weight.scales) {
            output.scales = ptr;
            output.scale_row = scaling.row_distance(pitch);
            output.scale_first = scaling.first_row() as u32;
        }
    }
}
