//! The product of one tile, by the `gemm` crate's kernels of f32.

use std::ops::Range;

use gemm_common::Parallelism;
use gemm_f32::gemm::f32::get_gemm_fn;

use super::matrices::RowsView;
use super::scratch::{DEEPEST, FEWEST_COLUMNS, LANES, TileScratch, grown};
use crate::element::{DType, Element};
use crate::schedule::Scaling;
use crate::schedule::product::PROMOTED;

/// The operands of one tile.
pub struct TileOperands<'a, T, W> {
    /// [rows, k]
    pub a: RowsView<'a, T>,
    pub b: TileWeight<'a, W>,
    pub a_scales: Option<ScalesView<'a>>,
    pub b_scales: Option<ScalesView<'a>>,
}

/// The scales of an operand.
pub struct ScalesView<'a> {
    pub scales: RowsView<'a, f32>,
    pub scaling: Scaling,
    /// The row and the column of the scale of a row of the operand and a block of K.
    pub place: fn(Scaling, usize, usize) -> [usize; 2],
    /// The operand's first row in the tile.
    pub first: usize,
}

impl ScalesView<'_> {
    /// The scale of a row of the tile's operand and a block of K. Without scales it is one.
    fn of(this: &Option<Self>, row: usize, block: usize) -> f32 {
        let Some(ScalesView {
            scales,
            scaling,
            place,
            first,
        }) = this
        else {
            return 1.0;
        };
        let [row, column] = place(*scaling, first + row, block);
        scales.get(row).map_or(f32::NAN, |scales| scales[column])
    }

    fn has_blocks(this: &Option<Self>) -> bool {
        this.as_ref().is_some_and(|view| view.scaling.has_blocks())
    }
}

/// A weight in its layout.
pub enum TileWeight<'a, T> {
    /// [columns, k]
    Nk(RowsView<'a, T>),
    /// [k, columns]
    Kn(RowsView<'a, T>),
}

/// `a · bᵀ` in f32, handed to `store` row by row, unrounded. `tile_k` of K is widened at a time.
///
/// Every block of 128 of K of fp8 is summed separately, whatever `tile_k` is, and `store` gets scaled sums.
pub fn multiply<T: Element, W: Element>(
    scratch: &mut TileScratch,
    operands: &TileOperands<T, W>,
    tile_k: usize,
    mut store: impl FnMut(usize, &mut [f32]),
) {
    let TileOperands { a, b, .. } = operands;
    let (rows, k) = (a.rows, a.columns);
    let columns = match b {
        TileWeight::Nk(b) => b.rows,
        TileWeight::Kn(b) => b.columns,
    };
    let padded = rows.next_multiple_of(LANES);
    let is_promoted = T::DTYPE.is_fp8();
    let room = columns.max(FEWEST_COLUMNS) * padded;
    let sums = grown(&mut scratch.sums, room);
    let part_sums = if is_promoted {
        grown(&mut scratch.part, room)
    } else {
        &mut []
    };
    for (number, part) in parts(k, step(T::DTYPE, tile_k), operands.first_column()).enumerate() {
        let (begin, depth) = (part.start, part.len());
        let wide_a = grown(&mut scratch.a, depth * padded);
        let wide_b = grown(&mut scratch.b, columns * depth);
        widen_transposed(a, begin, padded, wide_a);
        let strides = widen_weight(b, part, wide_b);
        let (to, add) = if is_promoted {
            (&mut *part_sums, false)
        } else {
            (&mut *sums, number > 0)
        };
        // SAFETY: `wide_b` has its elements at these strides; `to` and `wide_a` have the required lengths.
        unsafe {
            add_product(to, [padded, columns, depth], wide_a, (wide_b, strides), add);
        }
        if is_promoted {
            if number == 0 {
                sums.fill(0.0);
            }
            let own = columns * padded;
            operands.promote(&mut sums[..own], &part_sums[..own], padded, number);
        }
    }
    let sums_of_row = grown(&mut scratch.row, columns);
    for row in 0..rows {
        for (sum, column) in sums_of_row.iter_mut().zip(sums.chunks_exact(padded)) {
            *sum = column[row];
        }
        operands.scale(row, sums_of_row);
        store(row, sums_of_row);
    }
}

/// The columns of K that are multiplied in one step.
pub fn step(dtype: DType, tile_k: usize) -> usize {
    if dtype.is_fp8() {
        PROMOTED
    } else {
        tile_k.min(DEEPEST)
    }
}

/// The parts of K that are multiplied in one step each. The first one ends `first` columns before a whole step would.
fn parts(k: usize, step: usize, first: usize) -> impl Iterator<Item = Range<usize>> {
    let begin = move |number: usize| begin_of_part(number * step, first).min(k);
    (0..(first + k).div_ceil(step)).map(move |number| begin(number)..begin(number + 1))
}

/// The column at `place` of steps that begin `first` columns in front of the operands.
fn begin_of_part(place: usize, first: usize) -> usize {
    place.saturating_sub(first)
}

impl<T, W> TileOperands<'_, T, W> {
    /// The place of the operands' first column in its block.
    fn first_column(&self) -> usize {
        let scales = self.a_scales.as_ref();
        scales.map_or(0, |scales| scales.scaling.first_column())
    }

    /// True if each part of K has scales of its own.
    fn has_blocks(&self) -> bool {
        ScalesView::has_blocks(&self.a_scales)
    }

    /// Adds the sums of a part of K, which is block `block`, to the sums of the parts before it.
    fn promote(&self, sums: &mut [f32], part: &[f32], padded: usize, block: usize) {
        if !self.has_blocks() {
            for (sum, part) in sums.iter_mut().zip(part) {
                *sum += part;
            }
            return;
        }
        let columns = sums.chunks_exact_mut(padded).zip(part.chunks_exact(padded));
        for (column, (sums, part)) in columns.enumerate() {
            let of_column = ScalesView::of(&self.b_scales, column, block);
            let sums = sums.iter_mut().zip(part).take(self.a.rows);
            for (row, (sum, part)) in sums.enumerate() {
                let scale = ScalesView::of(&self.a_scales, row, block) * of_column;
                *sum = scale.mul_add(*part, *sum);
            }
        }
    }

    /// Scales the sums of a row, unless their parts were.
    fn scale(&self, row: usize, sums: &mut [f32]) {
        let is_scaled = self.a_scales.is_some() || self.b_scales.is_some();
        if !is_scaled || self.has_blocks() {
            return;
        }
        let of_row = ScalesView::of(&self.a_scales, row, 0);
        for (column, sum) in sums.iter_mut().enumerate() {
            *sum = of_row * (ScalesView::of(&self.b_scales, column, 0) * *sum);
        }
    }
}

/// Sets `to` to `a · b`, or adds `a · b` to it if `add`.
///
/// `to`: [padded, columns], column by column. `a`: [padded, depth], column by column. `b`: [depth, columns], with the
/// elements from one column to the next, and from one step through K to the next.
///
/// `gemm` adds up the product of a single column in a different order. So a single column is multiplied twice, which
/// gives it the bits that it has next to others: `to` has room for [`FEWEST_COLUMNS`].
///
/// # Safety
/// `to` and `a` are as long as that, and `b` has each element at its strides.
unsafe fn add_product(
    to: &mut [f32],
    [padded, columns, depth]: [usize; 3],
    a: &[f32],
    (b, [next_column, next_step]): (&[f32], [usize; 2]),
    add: bool,
) {
    let (columns, next_column) = match columns {
        1 => (FEWEST_COLUMNS, 0),
        _ => (columns, next_column),
    };
    // SAFETY: as this function's; the result is borrowed exclusively, so that it overlaps neither operand.
    unsafe {
        get_gemm_fn()(
            padded,
            columns,
            depth,
            to.as_mut_ptr(),
            padded as isize,
            1,
            add,
            a.as_ptr(),
            padded as isize,
            1,
            b.as_ptr(),
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

/// Widens a part of K of a weight to f32, in its layout. Returns the elements from one column to the next, and from one
/// step through K to the next.
fn widen_weight<T: Element>(
    weight: &TileWeight<T>,
    part: Range<usize>,
    to: &mut [f32],
) -> [usize; 2] {
    let depth = part.len();
    match weight {
        TileWeight::Nk(b) => {
            widen_rows(b, 0..b.rows, part, to);
            [depth, 1]
        }
        TileWeight::Kn(b) => {
            widen_rows(b, part, 0..b.columns, to);
            [1, b.columns]
        }
    }
}

/// Widens a part of a matrix to f32, row by row.
fn widen_rows<T: Element>(
    from: &RowsView<T>,
    rows: Range<usize>,
    columns: Range<usize>,
    to: &mut [f32],
) {
    let rows = rows.filter_map(|row| from.get(row));
    for (row, wide) in rows.zip(to.chunks_exact_mut(columns.len())) {
        T::widen(&row[columns.clone()], wide);
    }
}

/// Widens columns of a matrix to f32, column by column, from `begin` on.
///
/// There are as many as `to` has room for with `padded` elements each. Zeros follow the matrix's rows.
fn widen_transposed<T: Element>(from: &RowsView<T>, begin: usize, padded: usize, to: &mut [f32]) {
    // A block of rows is widened in its layout and then transposed, so that both are done in registers.
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
