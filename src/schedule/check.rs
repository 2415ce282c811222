//! The rules that every schedule keeps. Engines rely on them.

use std::ops::Range;

use super::layout::MAX_WORLD;
use super::limits::{limit, out_of, require};
use super::scaling;
use super::{
    Addend, Bias, HostSum, MAX_BLOCKS, MAX_FLAGS, MAX_WEIGHTS, Move, OutputBlock, Parts, Product,
    Reduction, Region, Request, Residual, ScaleMatrix, Sum, Tile, Transfer, WeightLayout,
};
use crate::element::DType;
use crate::error::{Error, Result};
use crate::route::Route;

/// N and K of fp8 operands are multiples of this.
const FP8_MULTIPLE: usize = 16;

/// Checks that transfers over a network have increasing turns.
fn check_turns(transfers: &[Transfer]) -> Result<()> {
    let over_network = transfers.iter().filter(|moved| moved.route == Route::Net);
    let turns = over_network.map(|moved| moved.turn);
    let what = "transfers over a network must have increasing turns";
    require(what, turns.is_sorted_by(|one, next| one < next))
}

impl Parts {
    /// Checks that every part is in bounds and of a supported type. Returns, by chunk flag, whether tiles wait for it.
    pub(super) fn check(&self) -> Result<Vec<bool>> {
        self.check_flags()?;
        for transfer in self.arrivals.iter().chain(&self.departures) {
            self.check_transfer(transfer)?;
        }
        let is_own = self.arrivals.iter().all(|moved| moved.to == self.rank)
            && self.departures.iter().all(|moved| moved.from == self.rank);
        require("transfers must come to this rank or go from it", is_own)?;
        let blocks = self.product.as_ref().map_or(0, |p| p.blocks.len());
        let blocks = blocks.max(self.requests.len());
        limit("blocks that a rank makes", blocks, 0, MAX_BLOCKS)?;
        self.check_requests()?;
        self.check_pushes(blocks)?;
        check_turns(&self.arrivals)?;
        check_turns(&self.departures)?;
        self.check_host_sums()?;
        if let Some(reduction) = &self.reduction {
            self.check_reduction(reduction)?;
        }
        let Some(product) = &self.product else {
            require("tiles must be of a product", self.tiles.is_empty())?;
            return Ok(vec![false; self.arrivals.len()]);
        };
        product.config.check()?;
        self.check_operands(product)?;
        for block in &product.blocks {
            self.check_block(product, block)?;
        }
        self.check_tiles(product)
    }

    /// Checks that each transfer to this rank has a flag of its own.
    fn check_flags(&self) -> Result<()> {
        let flags = self.arrivals.len();
        let mut seen = vec![false; flags];
        for arrival in &self.arrivals {
            below("a transfer's flag", arrival.flag, flags)?;
            let twice = std::mem::replace(&mut seen[arrival.flag], true);
            require(
                "each transfer to a rank must have a flag of its own",
                !twice,
            )?;
        }
        Ok(())
    }

    fn check_transfer(&self, transfer: &Transfer) -> Result<()> {
        let ranks = [transfer.from, transfer.to, transfer.source];
        below("a rank", ranks.into_iter().fold(0, usize::max), self.world)?;
        below("a transfer's flag", transfer.flag, MAX_FLAGS)?;
        limit("flags to wait for", transfer.after.end, 0, MAX_FLAGS)?;
        for Move { from, to } in &transfer.regions {
            self.check_region(from)?;
            // Most moves have the same region as source and target.
            if from != to {
                self.check_region(to)?;
                let lengths = |region: &Region| {
                    let width = self.matrices[region.matrix].dtype.bytes();
                    (region.rows.len(), region.columns.len() * width)
                };
                let what = "source and target of a transfer must have the same size";
                require(what, lengths(from) == lengths(to))?;
            }
            let overlap = transfer.from == transfer.to && from.overlaps(to);
            require("regions of one memory must not overlap", !overlap)?;
        }
        if transfer.route == Route::Net {
            let what = "rows that go over a network must not be rows that are passed on";
            require(what, transfer.after.is_empty())?;
            let what = "a rank must not send to itself over a network";
            require(what, transfer.from != transfer.to)?;
        } else {
            let what = "sums of a host's addends must go over a network";
            require(what, transfer.added.is_none())?;
        }
        Ok(())
    }

    /// Checks that there is room for the caller's blocks, and no product with them.
    fn check_requests(&self) -> Result<()> {
        let alone = self.product.is_none() || self.requests.is_empty();
        require("callers must make no rows beside a product", alone)?;
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
            let flags = self.arrivals.len();
            limit("flags of addends", addends.end, addends.start, flags)?;
        }
        Ok(())
    }

    /// Checks that the flags and blocks exist for which this rank's pushes wait.
    fn check_pushes(&self, blocks: usize) -> Result<()> {
        let pushed = |moved: &&Transfer| moved.route != Route::Pull;
        for transfer in self.departures.iter().filter(pushed) {
            let flags = self.arrivals.len();
            limit("flags to wait for", transfer.after.end, 0, flags)?;
            if let Some(block) = transfer.produced {
                below("a block that is made", block, blocks)?;
            }
            if let Some(sum) = transfer.added {
                below("a sum that is sent", sum, self.host_sums.len())?;
            }
        }
        Ok(())
    }

    /// Checks that each sum of this host's addends is sent once, and that no worker multiplies meanwhile.
    fn check_host_sums(&self) -> Result<()> {
        let alone = self.product.is_none() || self.host_sums.is_empty();
        require("sums of a host must not be made beside a product", alone)?;
        for (number, HostSum { sum, flags }) in self.host_sums.iter().enumerate() {
            self.check_reduction(sum)?;
            limit(
                "flags of addends",
                flags.end,
                flags.start,
                self.arrivals.len(),
            )?;
            let sent = self.departures.iter();
            let sent = sent.filter(|moved| moved.added == Some(number)).count();
            limit("transfers of a host's sum", sent, 1, 1)?;
        }
        Ok(())
    }

    fn check_reduction(&self, Reduction { rows, n, sum }: &Reduction) -> Result<()> {
        let adds_product = sum.addends.contains(&Addend::Product);
        require("a reduction must add rows of matrices alone", !adds_product)?;
        limit("what a reduction adds", sum.addends.len(), 1, MAX_WORLD)?;
        self.check_sum(sum, *rows, *n, None)
    }

    /// Checks that the operands have the extents of the product, and types that can be multiplied.
    fn check_operands(&self, product: &Product) -> Result<()> {
        let Product {
            a,
            weights,
            weight_layout,
            gated,
            m,
            k,
            ..
        } = product;
        below("a matrix", *a, self.matrices.len())?;
        let a_spec = self.matrices[*a];
        let what = "operands must be bf16, f16 or fp8 (F8E4M3, F8E5M2)";
        require(what, a_spec.dtype.is_multiplied())?;
        if a_spec.dtype.is_fp8() {
            check_fp8(product)?;
        }
        limit(
            "the number of weights of a product",
            weights.len(),
            1,
            MAX_WEIGHTS,
        )?;
        if *gated {
            let of_one_width = weights.iter().all(|b| b.n == weights[0].n);
            let what = "the weights of a gated product must have the same N";
            require(what, of_one_width)?;
            limit(
                "the number of weights of a product with a gate",
                weights.len(),
                2,
                2,
            )?;
        }
        let shapes = weights.iter().map(|weight| match weight_layout {
            WeightLayout::Nk => (weight.b, weight.n, *k),
            WeightLayout::Kn => (weight.b, *k, weight.n),
        });
        for (number, rows, columns) in [(*a, *m, *k)].into_iter().chain(shapes) {
            below("a matrix", number, self.matrices.len())?;
            let spec = self.matrices[number];
            limit("rows of a product's matrix", spec.rows, rows, rows)?;
            let what = "columns of a product's matrix";
            limit(what, spec.columns, columns, columns)?;
        }
        for weight in weights {
            let dtype = self.matrices[weight.b].dtype;
            if !a_spec.dtype.is_multiplied_by(dtype) {
                let what = format!(
                    "rows of {} cannot be multiplied by weights of {dtype}",
                    a_spec.dtype
                );
                return Err(Error::unsupported(what));
            }
        }
        scaling::check(a_spec.dtype, product)?;
        self.check_scales(product)
    }

    /// Checks that scales have the extents of their operands, and are f32.
    fn check_scales(&self, product: &Product) -> Result<()> {
        let Product { m, k, .. } = *product;
        let of_rows = product.a_scales.map(|of| (of, of.scaling.of_rows([m, k])));
        let of_weights = product.weights.iter().filter_map(|weight| {
            let scales = weight.scales?;
            Some((scales, scales.scaling.of_weight([weight.n, k])))
        });
        for (ScaleMatrix { matrix, scaling }, shape) in of_rows.into_iter().chain(of_weights) {
            let shape = shape.map_or([0, 0], |(shape, _)| shape);
            self.check_scale_matrix(matrix, shape, scaling.is_sharded())?;
        }
        Ok(())
    }

    fn check_scale_matrix(
        &self,
        matrix: usize,
        [rows, columns]: [usize; 2],
        is_sharded: bool,
    ) -> Result<()> {
        /// Columns after sharded scales, whose rows are whole pieces of up to 16 bytes.
        const BEHIND: usize = 3;
        below("a matrix", matrix, self.matrices.len())?;
        let spec = self.matrices[matrix];
        require("scales must be f32", spec.dtype == DType::F32)?;
        limit("rows of scales", spec.rows, rows, rows)?;
        let most = columns + if is_sharded { BEHIND } else { 0 };
        limit("columns of scales", spec.columns, columns, most)
    }

    fn check_block(&self, product: &Product, block: &OutputBlock) -> Result<()> {
        let OutputBlock { rows, weight, sum } = block;
        limit("rows of a block", rows.end, rows.start, product.m)?;
        below("a block's weight", *weight, product.outputs())?;
        let products = sum.addends.iter().filter(|a| **a == Addend::Product);
        let what = "a block's sum must add the product once";
        require(what, sum.addends.is_empty() || products.count() == 1)?;
        // Nothing of 8 bits is added to a product of fp8.
        let dtype = Some(self.matrices[product.a].dtype).filter(|dtype| dtype.is_half());
        let n = product.weights[*weight].n;
        if let Some(scales) = &sum.scales {
            scales.check_width(n)?;
        }
        self.check_sum(sum, rows.len(), n, dtype)
    }

    /// Returns, by chunk flag, whether tiles wait for it.
    fn check_tiles(&self, product: &Product) -> Result<Vec<bool>> {
        let flags = self.arrivals.len();
        let mut awaited = vec![false; flags];
        let entry_rows = product.config.entry_rows();
        // There may be thousands of tiles, but they have few blocks and wait for few ranges of flags.
        for tiles in self.tiles.chunk_by(Tile::is_alike) {
            let Tile { block, .. } = tiles[0];
            below("a tile's block", block as usize, product.blocks.len())?;
            let OutputBlock { rows, weight, .. } = &product.blocks[block as usize];
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

    /// Checks that the sum's matrices have room for `rows` rows and `n` columns, and that all addends are of one type.
    ///
    /// The type is `dtype`, that of the operands, if there are any of 16 bits.
    fn check_sum(&self, sum: &Sum, rows: usize, n: usize, dtype: Option<DType>) -> Result<()> {
        let mut added = dtype;
        let mut check_type = |number: usize| {
            let its = self.matrices[number].dtype;
            let alike = *added.get_or_insert(its) == its;
            require("all that a sum adds must be of one type", alike)
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
        let output = self.matrices[sum.out].dtype;
        let is_stored = output.is_float() || output == DType::F8E4M3;
        require("sums must be bf16, f16, f32 or F8E4M3", is_stored)?;
        for addend in &sum.addends {
            if let Addend::Rows { matrix, first } = *addend {
                check(matrix, first, rows)?;
                check_type(matrix)?;
                let is_added = self.matrices[matrix].dtype.is_float();
                require("addends must be bf16, f16 or f32", is_added)?;
            }
        }
        if let Some(Bias { matrix, first }) = sum.bias {
            check(matrix, 0, 1)?;
            check_type(matrix)?;
            let spec = self.matrices[matrix];
            let gated = self.product.as_ref().is_some_and(|product| product.gated);
            let end = first.saturating_add(n.saturating_mul(1 + usize::from(gated)));
            limit("columns of a bias", end, 0, spec.columns)?;
        }
        if let Some(Residual { matrix, first }) = sum.residual {
            check(matrix, first, rows)?;
            check_type(matrix)?;
        }
        if let Some(scales) = sum.scales {
            let spec = scales.spec(self.matrices[sum.out], n)?;
            self.check_scale_matrix(scales.matrix, [spec.rows, spec.columns], false)?;
        }
        // Sums are stored in the addends' type, in f32 or in F8E4M3. Those of fp8 add bf16, and may be f16 too.
        match (output, dtype) {
            (DType::F32 | DType::F8E4M3, _) | (DType::F16, None) => Ok(()),
            _ => check_type(sum.out),
        }
    }
}

/// Checks that tensor cores can multiply fp8 of these extents: K is loaded in pieces of 16 bytes and lies along the
/// rows of both operands.
fn check_fp8(product: &Product) -> Result<()> {
    let is_nk = product.weight_layout == WeightLayout::Nk;
    require("weights of fp8 must be [N, K] (WeightLayout::Nk)", is_nk)?;
    let widths = product.weights.iter().map(|weight| ("N", weight.n));
    for (what, extent) in widths.chain([("K", product.k)]) {
        if !extent.is_multiple_of(FP8_MULTIPLE) {
            let what = format!("{what} of fp8 must be a multiple of {FP8_MULTIPLE}, not {extent}");
            return Err(Error::unsupported(what));
        }
    }
    Ok(())
}

/// Checks that `value` is the number of one of `end` things.
#[inline]
fn below(what: &str, value: usize, end: usize) -> Result<()> {
    if value < end {
        Ok(())
    } else {
        Err(out_of(what, value, 0, end.saturating_sub(1)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Kind;
    use crate::schedule::plan::matrices::{A, A_SCALES, B_SCALES, OUT, OUT_SCALES};
    use crate::schedule::plan::plan;
    use crate::schedule::{
        Chunking, Config, DTypes, Form, Layout, MatrixSpec, Operation, Problem, Quantization,
        Scaling, Schedule, TileShape,
    };

    const CONFIG: Config = Config::new(TileShape::new(16, 16, 64), Chunking::new(1), Route::Pull);

    /// The schedule that quantises the rows of a matrix [5, 200].
    fn quantized() -> Result<Schedule> {
        let problem = Problem {
            dtypes: DTypes {
                output: DType::F8E4M3,
                ..DTypes::all(DType::F16)
            },
            form: Form {
                quantization: Some(Quantization::transposed_blocks()),
                ..Form::default()
            },
            ..Problem::new(
                Operation::QUANTIZE,
                DType::F16,
                Layout::new(&[5], 200)?,
                200,
            )
        };
        plan(&problem, 0, CONFIG)
    }

    /// The schedule of a product with scales of rows.
    fn scaled(operands: DType, weights: DType) -> Result<Schedule> {
        let layout = Layout::new(&[5], 32)?;
        let problem = Problem {
            dtypes: DTypes::of_product([operands, weights], DType::Bf16, None)?,
            form: Form {
                a_scaling: Scaling::Rows,
                b_scaling: [Scaling::Rows].into_iter().collect(),
                ..Form::default()
            },
            ..Problem::new(Operation::MATMUL, operands, layout, 16)
        };
        plan(&problem, 0, CONFIG)
    }

    fn unsupported(what: &str) -> Option<Error> {
        Some(Error::unsupported(what))
    }

    #[test]
    fn rows_of_e5m2_have_no_weights_of_e5m2() {
        assert!(scaled(DType::F8E4M3, DType::F8E5M2).is_ok());
        let words = "rows of f8e5m2 cannot be multiplied by weights of f8e5m2";
        let refused = scaled(DType::F8E5M2, DType::F8E5M2).err();
        assert_eq!(refused, unsupported(words));
    }

    #[test]
    fn scales_are_f32() {
        let schedule = scaled(DType::F8E4M3, DType::F8E4M3).unwrap();
        for number in [A_SCALES, B_SCALES] {
            let mut parts = schedule.parts.clone();
            parts.matrices[number].dtype = DType::Bf16;
            let refused = Schedule::new(parts).err();
            assert_eq!(refused, unsupported("scales must be f32"));
        }
    }

    #[test]
    fn a_quantised_sum_has_its_scales_and_its_types() {
        let schedule = quantized().unwrap();
        let scales = schedule.matrices()[OUT_SCALES];
        assert_eq!(scales, MatrixSpec::new(DType::F32, 2, 5));
        assert!(schedule.quantizes());
        let refused = |number: usize, spec: MatrixSpec| {
            let mut parts = schedule.parts.clone();
            parts.matrices[number] = spec;
            Schedule::new(parts).err()
        };
        let wrong = MatrixSpec::new(DType::F16, 2, 5);
        assert_eq!(
            refused(OUT_SCALES, wrong),
            unsupported("scales must be f32")
        );
        let wrong = refused(OUT_SCALES, MatrixSpec::new(DType::F32, 5, 2));
        assert!(matches!(wrong.unwrap().kind(), Kind::Limit { .. }));
        let words = "outputs that are quantised must be F8E4M3";
        let wrong = MatrixSpec::new(DType::F16, 5, 200);
        assert_eq!(refused(OUT, wrong), unsupported(words));
        let words = "addends must be bf16, f16 or f32";
        let wrong = MatrixSpec::new(DType::U8, 5, 200);
        assert_eq!(refused(A, wrong), unsupported(words));
    }
}
