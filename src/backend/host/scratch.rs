//! The memory of a worker, kept from tile to tile and from row to row.

use std::collections::TryReserveError;

use super::matmul::step;
use crate::schedule::Schedule;

/// The rows of a tile are padded to a multiple of this.
///
/// Every SIMD width divides it, so `gemm` takes the operands as they are and packs nothing.
pub const LANES: usize = 16;

/// The deepest step through K.
///
/// `gemm` cuts deeper steps at places that depend on the tile's height and width. Then a row's bits would depend on
/// them too.
pub const DEEPEST: usize = 512;

/// The fewest columns that are multiplied together.
///
/// `gemm` multiplies a single column by other kernels. Then its bits would depend on the tile's width.
pub const FEWEST_COLUMNS: usize = 2;

/// A worker's memory.
#[derive(Debug, Default)]
pub struct WorkerScratch {
    pub tile: TileScratch,
    pub sum: SumScratch,
    /// The up projection by which an activated gate is multiplied: [rows, columns] of a tile.
    pub up: Vec<f32>,
}

/// For the product of a tile.
#[derive(Debug, Default)]
pub struct TileScratch {
    /// [depth, padded rows]
    pub a: Vec<f32>,
    /// [columns, depth]
    pub b: Vec<f32>,
    /// [columns, or [`FEWEST_COLUMNS`]; padded rows]
    pub sums: Vec<f32>,
    /// The sums of a part of K, if they are made separately. As `sums`.
    pub part: Vec<f32>,
    /// `[columns]`
    pub row: Vec<f32>,
}

/// For a row of a sum: `[columns]` each.
#[derive(Debug, Default)]
pub struct SumScratch {
    pub total: Vec<f32>,
    pub wide: Vec<f32>,
    /// Room for rounded elements of any type.
    pub rounded: Vec<f32>,
}

/// How many numbers each vector of a worker's memory holds.
pub type Lengths = [usize; 9];

impl WorkerScratch {
    fn vectors(&mut self) -> [&mut Vec<f32>; 9] {
        let WorkerScratch {
            tile:
                TileScratch {
                    a,
                    b,
                    sums,
                    part,
                    row,
                },
            sum:
                SumScratch {
                    total,
                    wide,
                    rounded,
                },
            up,
        } = self;
        [a, b, sums, part, row, up, total, wide, rounded]
    }

    /// What any tile of a schedule needs, and any row of its sums.
    pub fn needed(schedule: &Schedule) -> Lengths {
        let mut needed = [0; 9];
        let of_sums = schedule.reductions().map(|reduction| reduction.n);
        let mut columns = of_sums.max().unwrap_or(0);
        if let Some(product) = schedule.product() {
            let tiles = || schedule.tiles().iter();
            let rows = tiles().map(|tile| product.rows(tile).len()).max();
            let widest = tiles().map(|tile| product.columns(tile).len()).max();
            let (rows, widest) = (rows.unwrap_or(0), widest.unwrap_or(0));
            let padded = rows.next_multiple_of(LANES);
            let dtype = schedule.matrices()[product.a].dtype;
            let depth = product.k.min(step(dtype, product.config.tile.k));
            let sums = widest.max(FEWEST_COLUMNS) * padded;
            let part = if dtype.is_fp8() { sums } else { 0 };
            let up = if product.gated { rows * widest } else { 0 };
            let of_tile = [depth * padded, widest * depth, sums, part, widest, up];
            needed[..6].copy_from_slice(&of_tile);
            columns = columns.max(widest);
        }
        needed[6..].fill(columns);
        needed
    }

    /// The bytes that are missing.
    pub fn missing(&mut self, needed: &Lengths) -> usize {
        let vectors = self.vectors().into_iter().zip(needed);
        let missing = vectors.map(|(vector, &needed)| needed.saturating_sub(vector.capacity()));
        missing.sum::<usize>().saturating_mul(size_of::<f32>())
    }

    pub fn reserve(&mut self, needed: &Lengths) -> Result<(), TryReserveError> {
        let mut vectors = self.vectors().into_iter().zip(needed);
        vectors.try_for_each(|(vector, &needed)| {
            if needed <= vector.capacity() {
                return Ok(());
            }
            let length = vector.len();
            vector.try_reserve_exact(needed - length)?;
            // Written once, so that whoever asks for memory next sees that it is taken.
            vector.resize(needed, 0.0);
            vector.truncate(length);
            Ok(())
        })
    }
}

/// The first `length` elements. Grows the memory if it has fewer.
pub fn grown(memory: &mut Vec<f32>, length: usize) -> &mut [f32] {
    if memory.len() < length {
        memory.resize(length, 0.0);
    }
    &mut memory[..length]
}
