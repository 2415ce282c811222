//! The product of one tile, by the `gemm` crate in f32.

use gemm::Parallelism;

use crate::element::Element;

/// A worker's memory, kept from tile to tile.
#[derive(Debug, Default)]
pub struct Scratch {
    a: Vec<f32>,
    b: Vec<f32>,
    sums: Vec<f32>,
}

/// What one tile is computed from.
pub struct Operands<'a, T> {
    /// [rows, k]
    pub a: &'a [T],
    /// [columns, k]
    pub b: &'a [T],
    /// [columns]
    pub bias: Option<&'a [T]>,
    pub k: usize,
}

/// `a · bᵀ + bias` in f32, handed to `store` row by row, unrounded. `tile_k` of K is widened at a time.
pub fn tile<T: Element>(
    scratch: &mut Scratch,
    operands: &Operands<T>,
    tile_k: usize,
    mut store: impl FnMut(usize, &[f32]),
) {
    let &Operands { a, b, bias, k } = operands;
    let (rows, columns) = (a.len() / k, b.len() / k);
    let Scratch {
        a: wide_a,
        b: wide_b,
        sums,
    } = scratch;
    sums.resize((rows * columns).max(sums.len()), 0.0);
    let sums = &mut sums[..rows * columns];
    for begin in (0..k).step_by(tile_k) {
        let depth = tile_k.min(k - begin);
        widen(a, k, begin, depth, wide_a);
        widen(b, k, begin, depth, wide_b);
        // SAFETY: the operands hold rows · depth and columns · depth elements with these strides, the result
        // rows · columns, and it overlaps neither.
        unsafe {
            gemm::gemm(
                rows,
                columns,
                depth,
                sums.as_mut_ptr(),
                1,
                columns as isize,
                begin > 0,
                wide_a.as_ptr(),
                1,
                depth as isize,
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
    for (row, sums) in sums.chunks_exact_mut(columns).enumerate() {
        if let Some(bias) = bias {
            for (sum, bias) in sums.iter_mut().zip(bias) {
                *sum += bias.to_f32();
            }
        }
        store(row, sums);
    }
}

/// Columns `begin..begin + depth` of a matrix of `k` columns, as f32, packed.
fn widen<T: Element>(from: &[T], k: usize, begin: usize, depth: usize, to: &mut Vec<f32>) {
    let length = from.len() / k * depth;
    to.resize(length.max(to.len()), 0.0);
    for (row, to) in from.chunks_exact(k).zip(to.chunks_exact_mut(depth)) {
        T::widen(&row[begin..begin + depth], to);
    }
}
