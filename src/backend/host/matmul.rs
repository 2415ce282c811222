//! The product of one tile, by the `gemm` crate in f32.

use gemm::Parallelism;

use crate::element::Element;

/// The rows of a tile are padded to a multiple of this, which every SIMD width divides: `gemm` then takes the
/// operands as they are, and packs nothing.
const LANES: usize = 16;

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

/// What one tile is computed from.
pub struct Operands<'a, T> {
    /// [rows, k]
    pub a: &'a [T],
    /// [columns, k]
    pub b: &'a [T],
    pub k: usize,
}

/// `a · bᵀ` in f32, handed to `store` row by row, unrounded. `tile_k` of K is widened at a time.
pub fn tile<T: Element>(
    scratch: &mut Scratch,
    operands: &Operands<T>,
    tile_k: usize,
    mut store: impl FnMut(usize, &mut [f32]),
) {
    let &Operands { a, b, k } = operands;
    let (rows, columns) = (a.len() / k, b.len() / k);
    let padded = rows.next_multiple_of(LANES);
    let Scratch {
        a: wide_a,
        b: wide_b,
        sums,
        row: sums_of_row,
    } = scratch;
    // Deeper steps `gemm` cuts itself, where depends on the tile's height and width: then a row's bits would too.
    let tile_k = tile_k.min(512);
    let sums = grown(sums, columns * padded);
    for begin in (0..k).step_by(tile_k) {
        let depth = tile_k.min(k - begin);
        let wide_a = grown(wide_a, depth * padded);
        let wide_b = grown(wide_b, columns * depth);
        widen_transposed(a, k, begin, padded, wide_a);
        for (row, wide) in b.chunks_exact(k).zip(wide_b.chunks_exact_mut(depth)) {
            T::widen(&row[begin..begin + depth], wide);
        }
        // SAFETY: the operands hold padded · depth and columns · depth elements with these strides, the result
        // padded · columns, and it overlaps neither.
        unsafe {
            gemm::gemm(
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
                depth as isize,
                1,
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

/// Columns from `begin` on of a matrix of `k` columns, as f32, column by column; as many as `to` has room for
/// with `padded` elements each, zeros behind the matrix's rows.
fn widen_transposed<T: Element>(from: &[T], k: usize, begin: usize, padded: usize, to: &mut [f32]) {
    // A block of rows is widened as it lies and turned from there, so that both are done in registers.
    const BLOCK: usize = 64;
    let mut block = [[0.0f32; BLOCK]; LANES];
    for first in (0..padded).step_by(LANES) {
        for (step, to) in to.chunks_mut(padded * BLOCK).enumerate() {
            let width = to.len() / padded;
            for (lane, wide) in block.iter_mut().enumerate() {
                let row = (first + lane) * k;
                let column = begin + step * BLOCK;
                match from.get(row + column..row + column + width) {
                    Some(row) => T::widen(row, &mut wide[..width]),
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
