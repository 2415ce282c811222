//! What a worker does: a tile of a product, or rows of a reduction.

use std::ops::Range;

use super::matmul::{ScalesView, TileOperands, TileWeight, multiply};
use super::matrices::BoundMatrices;
use super::scratch::{WorkerScratch, grown};
use super::sum::Columns;
use crate::element::{DType, Element, F8E4M3, F8E5M2, bf16, f16};
use crate::schedule::{Product, Reduction, ScaleMatrix, Scaling, Tile, Weight, WeightLayout};

/// # Safety
/// The matrices lie at their places, aligned for their type. No one writes the tile's rows or their addends meanwhile,
/// and no one else touches the tile of the output.
pub unsafe fn multiply_tile(
    scratch: &mut WorkerScratch,
    product: &Product,
    tile: &Tile,
    matrices: &BoundMatrices,
) {
    let dtypes = [product.a, product.weights[0].b].map(|number| matrices.spec(number).dtype);
    let of_tile = TileProduct {
        product,
        tile,
        matrices,
    };
    // SAFETY: as this function's.
    unsafe {
        match dtypes {
            [DType::Bf16, DType::Bf16] => of_tile.multiply::<bf16, bf16>(scratch),
            [DType::F16, DType::F16] => of_tile.multiply::<f16, f16>(scratch),
            [DType::F8E4M3, DType::F8E4M3] => of_tile.multiply::<F8E4M3, F8E4M3>(scratch),
            [DType::F8E4M3, DType::F8E5M2] => of_tile.multiply::<F8E4M3, F8E5M2>(scratch),
            [DType::F8E5M2, DType::F8E4M3] => of_tile.multiply::<F8E5M2, F8E4M3>(scratch),
            [a, b] => unreachable!("a schedule does not multiply {a} by {b}"),
        }
    }
}

/// A tile of a call's product.
struct TileProduct<'a> {
    product: &'a Product,
    tile: &'a Tile,
    matrices: &'a BoundMatrices<'a>,
}

impl<'a> TileProduct<'a> {
    /// # Safety
    /// As [`multiply_tile`], and the operands are of these types.
    unsafe fn multiply<T: Element, W: Element>(&self, scratch: &mut WorkerScratch) {
        let &TileProduct {
            product,
            tile,
            matrices,
        } = self;
        let (rows, columns) = (product.rows(tile), product.columns(tile));
        let block = product.block(tile);
        let width = columns.len();
        let columns_of_sum = Columns {
            sum: &block.sum,
            matrices,
            begin: columns.start,
            length: width,
        };
        let dtype = block.sum.dtype(matrices.specs());
        // SAFETY: as this function's.
        let operands = |weight: usize| unsafe { self.operands::<T, W>(weight) };
        let tile_k = product.config.tile.k;
        let WorkerScratch {
            tile: of_tile,
            sum: of_sum,
            up,
        } = scratch;
        let up = product.gated.then(|| {
            let up = grown(up, rows.len() * width);
            let operands = operands(block.weight + 1);
            multiply(of_tile, &operands, tile_k, |row, values| {
                up[row * width..][..width].copy_from_slice(values);
            });
            &*up
        });
        multiply(of_tile, &operands(block.weight), tile_k, |row, values| {
            let up = up.map(|up| &up[row * width..][..width]);
            let row = rows.start - block.rows.start + row;
            // SAFETY: as this function's.
            unsafe { columns_of_sum.store(dtype, of_sum, row, values, up) };
        });
    }

    /// The tile's rows of `a`, and its columns of a weight.
    ///
    /// # Safety
    /// As [`TileProduct::multiply`].
    unsafe fn operands<T: Element, W: Element>(&self, weight: usize) -> TileOperands<'a, T, W> {
        let &TileProduct {
            product,
            tile,
            matrices,
        } = self;
        let (rows, columns, depth) = (product.rows(tile), product.columns(tile), 0..product.k);
        let Weight { b, scales, .. } = product.weights[weight];
        let b = matrices.place(b);
        // SAFETY: as this function's.
        let view = |scales: ScaleMatrix| unsafe {
            let spec = matrices.spec(scales.matrix);
            let place = matrices.place(scales.matrix);
            place.part(0..spec.rows, 0..spec.columns)
        };
        let a_scales = product.a_scales.map(|scales| ScalesView {
            scales: view(scales),
            scaling: scales.scaling,
            place: Scaling::place_of_row,
            first: rows.start,
        });
        let b_scales = scales.map(|scales| ScalesView {
            scales: view(scales),
            scaling: scales.scaling,
            place: Scaling::place_of_column,
            first: columns.start,
        });
        // SAFETY: as this function's; any bits are a valid float.
        unsafe {
            TileOperands {
                a: matrices.place(product.a).part(rows, depth.clone()),
                b: match product.weight_layout {
                    WeightLayout::Nk => TileWeight::Nk(b.part(columns, depth)),
                    WeightLayout::Kn => TileWeight::Kn(b.part(depth, columns)),
                },
                a_scales,
                b_scales,
            }
        }
    }
}

/// Makes some rows of a reduction.
///
/// # Safety
/// As [`multiply_tile`].
pub unsafe fn add_rows(
    scratch: &mut WorkerScratch,
    reduction: &Reduction,
    rows: Range<usize>,
    matrices: &BoundMatrices,
) {
    let columns = Columns {
        sum: &reduction.sum,
        matrices,
        begin: 0,
        length: reduction.n,
    };
    let dtype = reduction.dtype(matrices.specs());
    let scratch = &mut scratch.sum;
    for row in rows {
        // SAFETY: as this function's.
        unsafe { columns.store(dtype, scratch, row, &mut [], None) };
    }
}
