//! What every schedule keeps, whoever planned it: engines rely on that.

use std::ops::Range;

use super::layout::MAX_WORLD;
use super::limits::{limit, out_of};
use super::{
    Addend, Bias, Block, MAX_BLOCKS, MAX_FLAGS, MAX_WEIGHTS, Move, Parts, Product, Reduction,
    Region, Request, Residual, Sum, Tile, WeightLayout,
};
use crate::element::DType;
use crate::error::Result;
use crate::route::Route;

impl Parts {
    /// Nothing lies outside of what it is a part of: engines rely on that. Says, by chunk flag, whether tiles wait for it.
    pub(super) fn check(&self) -> Result<Vec<bool>> {
        let flags = self.arrivals.len();
        let mut seen = vec![false; flags];
        for arrival in &self.arrivals {
            below("a transfer's flag", arrival.flag, flags)?;
            let twice = std::mem::replace(&mut seen[arrival.flag], true);
            limit("transfers under one flag", 1 + usize::from(twice), 1, 1)?;
        }
        for transfer in self.arrivals.iter().chain(&self.departures) {
            let ranks = [transfer.from, transfer.to, transfer.source];
            below("a rank", ranks.into_iter().fold(0, usize::max), self.world)?;
            below("a transfer's flag", transfer.flag, MAX_FLAGS)?;
            limit("flags to wait for", transfer.after.end, 0, MAX_FLAGS)?;
            for Move { from, to } in &transfer.regions {
                self.check_region(from)?;
                // Most go where they come from.
                if from != to {
                    self.check_region(to)?;
                    let lengths = |region: &Region| {
                        let width = self.matrices[region.matrix].dtype.bytes();
                        (region.rows.len(), region.columns.len() * width)
                    };
                    none(
                        "source and target of a transfer whose sizes differ",
                        lengths(from) != lengths(to),
                    )?;
                }
                let overlap = transfer.from == transfer.to && from.overlaps(to);
                none("regions of one memory that overlap", overlap)?;
            }
        }
        let elsewhere = self.arrivals.iter().any(|moved| moved.to != self.rank)
            || self.departures.iter().any(|moved| moved.from != self.rank);
        none("transfers between other ranks", elsewhere)?;
        let blocks = self.product.as_ref().map_or(0, |p| p.blocks.len());
        let blocks = blocks.max(self.requests.len());
        limit("blocks that a rank makes", blocks, 0, MAX_BLOCKS)?;
        if self.product.is_some() {
            limit(
                "what a caller makes beside a product",
                self.requests.len(),
                0,
                0,
            )?;
        }
        for Request {
            owner,
            rows,
            place,
            addends,
        } in &self.requests
        {
            below("a rank", *owner, self.world)?;
            self.check_region(place)?;
            limit("rows of a place", place.rows.len(), rows.len(), rows.len())?;
            limit("flags of addends", addends.end, addends.start, flags)?;
        }
        for transfer in self
            .departures
            .iter()
            .filter(|moved| moved.route != Route::Pull)
        {
            limit("flags to wait for", transfer.after.end, 0, flags)?;
            if let Some(block) = transfer.produced {
                below("a block that is made", block, blocks)?;
            }
        }
        if let Some(Reduction { rows, n, sum }) = &self.reduction {
            let product = usize::from(sum.addends.contains(&Addend::Product));
            limit("products that a reduction adds", product, 0, 0)?;
            limit("what a reduction adds", sum.addends.len(), 1, MAX_WORLD)?;
            self.check_sum(sum, *rows, *n, None)?;
        }
        let mut awaited = vec![false; flags];
        let Some(product) = &self.product else {
            limit("tiles without a product", self.tiles.len(), 0, 0)?;
            return Ok(awaited);
        };
        product.config.check()?;
        let is_multiplied = self
            .matrices
            .get(product.a)
            .is_none_or(|a| a.dtype.is_multiplied());
        limit(
            "bytes that are no 16-bit floats, of a product's matrix,",
            usize::from(!is_multiplied),
            0,
            0,
        )?;
        let Product { m, k, .. } = *product;
        limit(
            "weights of a product",
            product.weights.len(),
            1,
            MAX_WEIGHTS,
        )?;
        let others = product
            .weights
            .iter()
            .filter(|b| b.n != product.weights[0].n);
        let others = others.count() * usize::from(product.gated);
        limit("weights of other widths than the gate", others, 0, 0)?;
        let gated = 2 * usize::from(product.gated);
        limit(
            "weights of a product with a gate",
            product.weights.len(),
            gated,
            if product.gated { 2 } else { MAX_WEIGHTS },
        )?;
        let weights = product
            .weights
            .iter()
            .map(|weight| match product.weight_layout {
                WeightLayout::Nk => (weight.b, weight.n, k),
                WeightLayout::Kn => (weight.b, k, weight.n),
            });
        for (number, rows, columns) in [(product.a, m, k)].into_iter().chain(weights) {
            below("a matrix", number, self.matrices.len())?;
            let spec = self.matrices[number];
            limit("rows of a product's matrix", spec.rows, rows, rows)?;
            let what = "columns of a product's matrix";
            limit(what, spec.columns, columns, columns)?;
            let differs = spec.dtype != self.matrices[product.a].dtype;
            none("operands of another type than the first", differs)?;
        }
        for Block { rows, weight, sum } in &product.blocks {
            limit("rows of a block", rows.end, rows.start, m)?;
            below("a block's weight", *weight, product.outputs())?;
            let n = product.weights[*weight].n;
            let products = sum.addends.iter().filter(|a| **a == Addend::Product);
            let least = usize::from(!sum.addends.is_empty());
            limit("products that a block adds", products.count(), least, 1)?;
            let dtype = self.matrices[product.a].dtype;
            self.check_sum(sum, rows.len(), n, Some(dtype))?;
        }
        let entry_rows = product.config.entry_rows();
        // There may be thousands, of few blocks, that wait for few ranges of flags.
        for tiles in self.tiles.chunk_by(Tile::is_alike) {
            let Tile { block, .. } = tiles[0];
            below("a tile's block", block as usize, blocks)?;
            let Block { rows, weight, .. } = &product.blocks[block as usize];
            let rows = rows.len();
            let columns = product.weights[*weight].n.div_ceil(product.tile_columns());
            let (mut m, mut n) = (0, 0);
            for tile in tiles {
                (m, n) = (m.max(tile.m), n.max(tile.n));
            }
            below("a tile's row", m as usize, rows.div_ceil(entry_rows))?;
            below("a tile's column", n as usize, columns)?;
            let Range { start, end } = tiles[0].flags();
            limit("a tile's flags", end, start, flags)?;
            awaited[start..end].fill(true);
        }
        Ok(awaited)
    }

    fn check_region(
        &self,
        Region {
            matrix,
            rows,
            columns,
        }: &Region,
    ) -> Result<()> {
        below("a matrix", *matrix, self.matrices.len())?;
        let spec = self.matrices[*matrix];
        limit("rows of a region", rows.end, rows.start, spec.rows)?;
        limit(
            "columns of a region",
            columns.end,
            columns.start,
            spec.columns,
        )
    }

    /// The matrices of `rows` rows and `n` columns that become a sum hold them, and what is added is of one type:
    /// `dtype`, that of the operands, if there are any.
    fn check_sum(&self, sum: &Sum, rows: usize, n: usize, dtype: Option<DType>) -> Result<()> {
        let mut added = dtype;
        let mut check_type = |number: usize| {
            let its = self.matrices[number].dtype;
            let differs = *added.get_or_insert(its) != its;
            none("addends of another type", differs)
        };
        let check = |number: usize, first: usize, rows: usize| -> Result<()> {
            below("a matrix", number, self.matrices.len())?;
            let spec = self.matrices[number];
            limit(
                "rows of a sum's matrix",
                first.saturating_add(rows),
                0,
                spec.rows,
            )?;
            limit("columns of a sum's matrix", n, 0, spec.columns)
        };
        check(sum.out, sum.first, rows)?;
        let is_float = self.matrices[sum.out].dtype.is_float();
        limit(
            "matrices of sums that are no floats",
            usize::from(!is_float),
            0,
            0,
        )?;
        for addend in &sum.addends {
            if let Addend::Rows { matrix, first } = *addend {
                check(matrix, first, rows)?;
                check_type(matrix)?;
            }
        }
        if let Some(Bias { matrix, first }) = sum.bias {
            check(matrix, 0, 1)?;
            check_type(matrix)?;
            let spec = self.matrices[matrix];
            let gated = self.product.as_ref().is_some_and(|product| product.gated);
            let end = first.saturating_add(n * (1 + usize::from(gated)));
            limit("columns of a bias", end, 0, spec.columns)?;
        }
        if let Some(Residual { matrix, first }) = sum.residual {
            check(matrix, first, rows)?;
            check_type(matrix)?;
        }
        // Sums are stored as what is added, or as f32.
        match self.matrices[sum.out].dtype {
            DType::F32 => Ok(()),
            _ => check_type(sum.out),
        }
    }
}

/// There are none of what is not to be.
#[inline]
fn none(what: &str, some: bool) -> Result<()> {
    limit(what, some.into(), 0, 0)
}

/// `value` is the number of one of `end` things.
#[inline]
fn below(what: &str, value: usize, end: usize) -> Result<()> {
    match value < end {
        true => Ok(()),
        false => Err(out_of(what, value, 0, end.saturating_sub(1))),
    }
}
