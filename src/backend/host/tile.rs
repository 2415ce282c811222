//! What a worker does: a tile of a product, or rows of a reduction.

use std::ops::Range;

use super::matmul::{TileOperands, TileWeight, multiply};
use super::matrices::BoundMatrices;
use super::scratch::{WorkerScratch, grown};
use super::sum::Columns;
use crate::element::{DType, Element, bf16, f16};
use crate::schedule::{Product, Reduction, Tile, WeightLayout};

/// # Safety
/// The matrices lie at their places, aligned for their type. Nobody writes the tile's rows or their addends meanwhile,
/// and nobody else touches the tile of the output.
pub unsafe fn multiply_tile(
    scratch: &mut WorkerScratch,
    product: &Product,
    tile: &Tile,
    matrices: &BoundMatrices,
) {
    // SAFETY: as this function's.
    unsafe {
        match matrices.spec(product.a).dtype {
            DType::Bf16 => multiply_tile_of::<bf16>(scratch, product, tile, matrices),
            DType::F16 => multiply_tile_of::<f16>(scratch, product, tile, matrices),
            other => unreachable!("a schedule multiplies no {other}"),
        }
    }
}

/// # Safety
/// As [`multiply_tile`], and the operands are of this type.
unsafe fn multiply_tile_of<T: Element>(
    scratch: &mut WorkerScratch,
    product: &Product,
    tile: &Tile,
    matrices: &BoundMatrices,
) {
    let (rows, columns) = (product.rows(tile), product.columns(tile));
    let block = product.block(tile);
    let width = columns.len();
    let columns_of_sum = Columns {
        sum: &block.sum,
        matrices,
        begin: columns.start,
        length: width,
    };
    // SAFETY: as this function's.
    let operands = |weight: usize| unsafe { operands_of::<T>(product, weight, tile, matrices) };
    let tile_k = product.config.tile.k;
    let of_tile = &mut scratch.tile;
    let up = product.gated.then(|| {
        let up = grown(&mut scratch.up, rows.len() * width);
        multiply(
            of_tile,
            &operands(block.weight + 1),
            tile_k,
            |row, values| {
                up[row * width..][..width].copy_from_slice(values);
            },
        );
        &*up
    });
    multiply(of_tile, &operands(block.weight), tile_k, |row, values| {
        let up = up.map(|up| &up[row * width..][..width]);
        let row = rows.start - block.rows.start + row;
        // SAFETY: as this function's.
        unsafe { columns_of_sum.store::<T>(&mut scratch.sum, row, values, up) };
    });
}

/// A tile's rows of `a`, and its columns of a weight.
///
/// # Safety
/// As [`multiply_tile_of`].
unsafe fn operands_of<'a, T: Element>(
    product: &Product,
    weight: usize,
    tile: &Tile,
    matrices: &BoundMatrices<'a>,
) -> TileOperands<'a, T> {
    let (rows, columns, depth) = (product.rows(tile), product.columns(tile), 0..product.k);
    let b = matrices.place(product.weights[weight].b);
    // SAFETY: as this function's; any bits are a valid float.
    unsafe {
        TileOperands {
            a: matrices.place(product.a).part(rows, depth.clone()),
            b: match product.weight_layout {
                WeightLayout::Nk => TileWeight::Nk(b.part(columns, depth)),
                WeightLayout::Kn => TileWeight::Kn(b.part(depth, columns)),
            },
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
        unsafe {
            match dtype {
                DType::Bf16 => columns.store::<bf16>(scratch, row, &mut [], None),
                DType::F16 => columns.store::<f16>(scratch, row, &mut [], None),
                DType::F32 => columns.store::<f32>(scratch, row, &mut [], None),
                other => unreachable!("a schedule adds no {other}"),
            }
        }
    }
}
