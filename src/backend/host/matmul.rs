//! The product of one tile, by the `gemm` crate's kernels of f32.

use std::ops::Range;

use gemm_common::Parallelism;
use gemm_f32::gemm::f32::get_gemm_fn;

use super::sum::Rows;
use crate::element::Element;

/// The rows of a tile are padded to a multiple of this, which every SIMD width divides: `gemm` then takes the
/// operands as they are, and packs nothing.
const LANES: usize = 16;

/// Deeper steps `gemm` cuts itself, where depends on the tile's height and width: then a row's bits would too.
const DEEPEST: usize = 512;

/// A worker's memory, kept from tile to tile.
#[derive(Debug, Default)]
pub struct Scratch {
    /// [depth, padded rows]
    a: Vec<f32>,
    /// [columns, depth]
    b: Vec<f32>,
    /// [columns, padded rows]
    sums: Vec<f32>,
    /// [columns]
    row: Vec<f32>,
}

impl Scratch {
    /// How much of each a tile of so many rows and columns needs.
    pub fn needed(rows: usize, columns: usize, tile_k: usize) -> [usize; 4] {
        let (padded, depth) = (rows.next_multiple_of(LANES), tile_k.min(DEEPEST));
        [depth * padded, columns * depth, columns * padded, columns]
    }

    pub fn vectors(&mut self) -> [&mut Vec<f32>; 4] {
        let Scratch { a, b, sums, row } = self;
        [a, b, sums, row]
    }
}

/// What one tile is computed from.
pub struct Operands<'a, T> {
    /// [rows, k]
    pub a: Rows<'a, T>,
    pub b: Weight<'a, T>,
}

/// A weight, as it lies.
pub enum Weight<'a, T> {
    /// [columns, k]
    Nk(Rows<'a, T>),
    /// [k, columns]
    Kn(Rows<'a, T>),
}

/// `a · bᵀ` in f32, handed to `store` row by row, unrounded. `tile_k` of K is widened at a time.
pub fn tile<T: Element>(
    scratch: &mut Scratch,
    operands: &Operands<T>,
    tile_k: usize,
    mut store: impl FnMut(usize, &mut [f32]),
) {
    let Operands { a, b } = operands;
    let (rows, k) = (a.rows, a.columns);
    let columns = match b {
        Weight::Nk(b) => b.rows,
        Weight::Kn(b) => b.columns,
    };
    let padded = rows.next_multiple_of(LANES);
    let Scratch {
        a: wide_a,
        b: wide_b,
        sums,
        row: sums_of_row,
    } = scratch;
    let tile_k = tile_k.min(DEEPEST);
    let sums = grown(sums, columns * padded);
    for begin in (0..k).step_by(tile_k) {
        let depth = tile_k.min(k - begin);
        let wide_a = grown(wide_a, depth * padded);
        let wide_b = grown(wide_b, columns * depth);
        let part = begin..begin + depth;
        widen_transposed(a, begin, padded, wide_a);
        // where a column of the product, and a step through K, has its next element
        let (next_column, next_step) = match b {
            Weight::Nk(b) => {
                widen_rows(b, 0..columns, part, wide_b);
                (depth, 1)
            }
            Weight::Kn(b) => {
                widen_rows(b, part, 0..columns, wide_b);
                (1, columns)
            }
        };
        // SAFETY: the operands hold padded · depth and columns · depth elements with these strides, the result
        // padded · columns, and it overlaps neither.
        unsafe {
            get_gemm_fn()(
                padded,
                columns,
                depth,
                sums.as_mut_ptr(),
                padded as isize,
                1,
                begin > 0,
                wide_a.as_ptr(),
                padded as isize,
                1,
                wide_b.as_ptr(),
                next_column as isize,
                next_step as isize,
                1.0f32,
                1.0f32,
                false,
                false,
                false,
                Parallelism::None,
            );
        }
    }
    let sums_of_row = grown(sums_of_row, columns);
    for row in 0..rows {
        for (sum, column) in sums_of_row.iter_mut().zip(sums.chunks_exact(padded)) {
            *sum = column[row];
        }
        store(row, sums_of_row);
    }
}

/// A part of a matrix, as f32, row by row.
fn widen_rows<T: Element>(
    from: &Rows<T>,
    rows: Range<usize>,
    columns: Range<usize>,
    to: &mut [f32],
) {
    let rows = rows.filter_map(|row| from.get(row));
    for (row, wide) in rows.zip(to.chunks_exact_mut(columns.len())) {
        T::widen(&row[columns.clone()], wide);
    }
}

/// Columns from `begin` on of a matrix, as f32, column by column; as many as `to` has room for
/// with `padded` elements each, zeros behind the matrix's rows.
fn widen_transposed<T: Element>(from: &Rows<T>, begin: usize, padded: usize, to: &mut [f32]) {
    // A block of rows is widened as it lies and turned from there, so that both are done in registers.
    const BLOCK: usize = 64;
    let mut block = [[0.0f32; BLOCK]; LANES];
    for first in (0..padded).step_by(LANES) {
        for (step, to) in to.chunks_mut(padded * BLOCK).enumerate() {
            let width = to.len() / padded;
            for (lane, wide) in block.iter_mut().enumerate() {
                let column = begin + step * BLOCK;
                match from.get(first + lane) {
                    Some(row) => T::widen(&row[column..column + width], &mut wide[..width]),
                    None => wide.fill(0.0),
                }
            }
            for (column, to) in to.chunks_exact_mut(padded).enumerate() {
                for (to, wide) in to[first..first + LANES].iter_mut().zip(&block) {
                    *to = wide[column];
                }
            }
        }
    }
}

/// The first `length` elements, more memory being taken where there is less.
pub fn grown(memory: &mut Vec<f32>, length: usize) -> &mut [f32] {
    if memory.len() < length {
        memory.resize(length, 0.0);
    }
    &mut memory[..length]
}
