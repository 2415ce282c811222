//! What a schedule is made of: matrices, transfers, the product and its tiles, sums.

use std::ops::Range;

use smallvec::SmallVec;

use super::layout::{MAX_WORLD, limit, out_of};
use super::{Activation, Agreed, Config, MAX_BLOCKS, MAX_FLAGS, MAX_WEIGHTS, Route, WeightLayout};
use crate::element::DType;
use crate::error::Result;

/// What a planner says of an operation.
#[derive(Clone, Debug)]
pub struct Parts {
    /// This rank.
    pub rank: usize,
    /// The number of ranks.
    pub world: usize,
    /// What all ranks must agree on. If they do, they tell one another when rows may be moved and have been; if there is
    /// nothing, the others take no part, or the caller keeps them apart.
    pub agreed: Option<Agreed>,
    /// By number.
    pub matrices: Vec<MatrixSpec>,
    /// What comes to this rank, whoever moves it, in the order in which it should come.
    pub arrivals: Vec<Transfer>,
    /// What goes from this rank, whoever moves it, in the order in which it should go.
    pub departures: Vec<Transfer>,
    /// The product that the tiles are of; none if nothing is multiplied.
    pub product: Option<Product>,
    /// In the order in which they become ready.
    pub tiles: Vec<Tile>,
    /// What the caller makes, in this order.
    pub requests: Vec<Request>,
    /// What is added up at the end.
    pub reduction: Option<Reduction>,
    /// Whether all ranks make all rows, by the same tiles in the same order, before partials are stored and added: then they may as well
    /// do both tile by tile.
    pub exchanged: bool,
}

/// What is known of a matrix before a call binds it: its rows follow one another without padding where ranks share it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatrixSpec {
    /// Of its elements.
    pub dtype: DType,
    /// Its rows.
    pub rows: usize,
    /// Its columns.
    pub columns: usize,
}

impl MatrixSpec {
    /// The bytes of a row.
    pub fn row_bytes(&self) -> usize {
        self.columns * self.dtype.bytes()
    }

    /// What a region of it takes in memory whose rows begin `pitch` bytes apart: where ranks share it, [`row_bytes`](Self::row_bytes).
    pub fn extent_of(&self, region: &Region, pitch: usize) -> Extent {
        let width = self.dtype.bytes();
        Extent {
            offset: region.rows.start * pitch + region.columns.start * width,
            width: region.columns.len() * width,
            pitch,
            rows: region.rows.len(),
        }
    }
}

/// A region of a matrix in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// From the matrix's beginning.
    pub offset: usize,
    /// Of a row of the region.
    pub width: usize,
    /// From row to row.
    pub pitch: usize,
    /// How many rows.
    pub rows: usize,
}

impl Extent {
    /// Its one length, if its rows follow one another without a gap.
    pub fn contiguous(&self) -> Option<usize> {
        (self.width == self.pitch || self.rows <= 1).then_some(self.width * self.rows)
    }
}

/// Rows and columns of a matrix that ranks share; or, in the memory of the rank that moves them, of any.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Region {
    /// The matrix's number.
    pub matrix: usize,
    /// Its rows.
    pub rows: Range<usize>,
    /// Its columns.
    pub columns: Range<usize>,
}

impl Region {
    /// Whether the two have an element in common.
    fn overlaps(&self, other: &Region) -> bool {
        let meet = |a: &Range<usize>, b: &Range<usize>| a.start.max(b.start) < a.end.min(b.end);
        self.matrix == other.matrix
            && meet(&self.rows, &other.rows)
            && meet(&self.columns, &other.columns)
    }
}

/// A region of one rank's memory and where it goes in another's: as many rows and columns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Move {
    /// What is read.
    pub from: Region,
    /// What is written.
    pub to: Region,
}

impl Move {
    /// To the same place.
    pub fn in_place(region: Region) -> Move {
        Move {
            from: region.clone(),
            to: region,
        }
    }
}

/// Regions that are moved at once, from one rank's memory into another's, under one flag.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// The rank whose memory is read.
    pub from: usize,
    /// The rank whose memory is written.
    pub to: usize,
    /// The rank whose rows they are: `from`, unless that passes on what it got.
    pub source: usize,
    /// What is moved.
    pub regions: SmallVec<[Move; 1]>,
    /// Chunk flags of the rank that moves them: it waits for these first.
    pub after: Range<usize>,
    /// A block of the product of the rank that moves them, or one that its caller makes: it waits for that too.
    pub produced: Option<usize>,
    /// The chunk flag of `to` that says that they have arrived.
    pub flag: usize,
    /// Who moves them.
    pub route: Route,
}

impl Transfer {
    /// The rank that moves them.
    pub fn mover(&self) -> usize {
        match self.route {
            Route::Pull => self.to,
            Route::Push | Route::Store => self.from,
        }
    }

    /// The other rank, for the one that moves them.
    pub fn peer(&self) -> usize {
        match self.route {
            Route::Pull => self.from,
            Route::Push | Route::Store => self.to,
        }
    }

    /// For a profiler.
    pub(crate) fn name(&self) -> String {
        let rows = self
            .regions
            .first()
            .map_or(0..0, |moved| moved.to.rows.clone());
        let Range { start, end } = rows;
        match self.route {
            Route::Pull => format!("pull rows {start}..{end} from rank {}", self.from),
            Route::Push => format!("push rows {start}..{end} to rank {}", self.to),
            Route::Store => format!("store rows {start}..{end} to rank {}", self.to),
        }
    }

    /// Whether they are the part of a copied chunk that tiles need late.
    pub fn is_deferred(&self) -> bool {
        let is_behind = |moved: &Move| moved.to.columns.start > 0;
        self.route != Route::Store && self.regions.iter().any(is_behind)
    }
}

/// `a[m, k] · b[n, k]ᵀ`, of matrices by number, with one or several weights b, whose rows go to one or several places.
#[derive(Clone, Debug)]
pub struct Product {
    /// `[m, k]`
    pub a: usize,
    /// What it is multiplied with. Of a gated product the gate, and then what the gate's function is multiplied with.
    pub weights: SmallVec<[Weight; 1]>,
    /// How these lie.
    pub weight_layout: WeightLayout,
    /// Whether the first weight's product is a gate of the second's: the output is the sum's function of the one, times the other.
    pub gated: bool,
    /// Rows of the product.
    pub m: usize,
    /// What is summed over.
    pub k: usize,
    /// The shape of the tiles.
    pub config: Config,
    /// Its rows, each at most once. Tiles are counted from the first row of a block, and end with it.
    pub blocks: Vec<Block>,
    /// The one flag that tiles which wait for it need late, if there is one.
    pub deferred: Option<DeferredChunk>,
}

/// A weight of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Weight {
    /// Its matrix, `[n, k]`, or `[k, n]`.
    pub b: usize,
    /// Columns of the product with it.
    pub n: usize,
}

/// Rows of the product with one weight that go to one place.
#[derive(Clone, Debug)]
pub struct Block {
    /// Which.
    pub rows: Range<usize>,
    /// The number of the weight. Of a gated product, that of the gate.
    pub weight: usize,
    /// Where they go, and what is added.
    pub sum: Sum,
}

/// Rows of a matrix, and what they become.
#[derive(Clone, Debug)]
pub struct Sum {
    /// The number of the matrix, of as many columns as the product or, for padding, more.
    pub out: usize,
    /// The first of its rows that is written.
    pub first: usize,
    /// What is added up in f32, in this order, each of it rounded to the matrix's type before. If nothing is named, it is the
    /// product, not rounded before.
    pub addends: Vec<Addend>,
    /// Added then, if the call binds it.
    pub bias: Option<Bias>,
    /// What becomes of the sum then.
    pub activation: Activation,
    /// Added last, if the call binds it. Then the sum is rounded.
    pub residual: Option<Residual>,
}

/// Columns of a matrix of one row, which are added to each row of a sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bias {
    /// Its number.
    pub matrix: usize,
    /// The first of its columns. Of a gated product these are added to the gate, and as many behind them to what it is multiplied with.
    pub first: usize,
}

/// Rows of a matrix of the call's, of the operands' type, which are added to those of a sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Residual {
    /// Its number.
    pub matrix: usize,
    /// The first row.
    pub first: usize,
}

/// What is added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Addend {
    /// The product that this rank makes.
    Product,
    /// Rows of a matrix that ranks share, in this rank's memory.
    Rows {
        /// Its number.
        matrix: usize,
        /// The first row.
        first: usize,
    },
}

/// Rows that the caller makes: a block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// The rank that gets them.
    pub owner: usize,
    /// Which rows, of all that this rank makes.
    pub rows: Range<usize>,
    /// Where they are to lie in this rank's memory.
    pub place: Region,
    /// Of what this rank keeps, and others' is added to: the chunk flags of that.
    pub addends: Range<usize>,
}

/// Rows that are added up once everything has arrived and this rank's own blocks are made. What this rank makes is among the addends
/// as rows of a matrix.
#[derive(Clone, Debug)]
pub struct Reduction {
    /// How many rows.
    pub rows: usize,
    /// How many columns.
    pub n: usize,
    /// Where they go, and what is added.
    pub sum: Sum,
}

impl Reduction {
    /// The type of what is added. The output's may be another.
    pub(crate) fn dtype(&self, matrices: &[MatrixSpec]) -> DType {
        let rows = |addend: &Addend| match addend {
            Addend::Rows { matrix, .. } => Some(*matrix),
            Addend::Product => None,
        };
        let addend = self.sum.addends.iter().find_map(rows);
        matrices[addend.unwrap_or(self.sum.out)].dtype
    }
}

impl Product {
    /// The rows of the product in a tile.
    pub fn rows(&self, tile: &Tile) -> Range<usize> {
        let Range { start, end } = self.block(tile).rows;
        let rows = extent(tile.m, self.config.entry_rows(), end - start);
        start + rows.start..start + rows.end
    }

    /// The columns of the output in a tile.
    pub fn columns(&self, tile: &Tile) -> Range<usize> {
        let n = self.weights[self.block(tile).weight].n;
        extent(tile.n, self.tile_columns(), n)
    }

    /// Columns of the output that a tile has: of a gated product half of those that are multiplied.
    pub fn tile_columns(&self) -> usize {
        self.config.tile.n >> usize::from(self.gated)
    }

    /// How many outputs there are: one for each weight, or for both of a gated product.
    pub fn outputs(&self) -> usize {
        if self.gated { 1 } else { self.weights.len() }
    }

    /// Columns of all outputs.
    pub fn n(&self) -> usize {
        let outputs = &self.weights[..self.outputs()];
        outputs.iter().map(|weight| weight.n).sum()
    }

    /// The block that a tile is of.
    pub fn block(&self, tile: &Tile) -> &Block {
        &self.blocks[tile.block as usize]
    }
}

fn extent(index: u32, length: usize, end: usize) -> Range<usize> {
    let begin = index as usize * length;
    begin..(begin + length).min(end)
}

/// The second part of a chunk that is cut along K: what tiles need of it they need late.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeferredChunk {
    /// Its chunk flag.
    pub flag: usize,
    /// Its first column, a multiple of [`CUT_COLUMNS`](super::config::CUT_COLUMNS).
    pub column: usize,
}

/// One entry of the table: a tile of the output, or as many, one above the other, as a cluster has CTAs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Tile {
    /// The tile's row: rows of the block from `m * tile_m * cluster`.
    pub m: u32,
    /// The tile's column: output columns from `n * tile_n`.
    pub n: u32,
    /// The block of the product that it is of.
    pub block: u32,
    pub(crate) flag_begin: u16,
    pub(crate) flag_end: u16,
}

impl Tile {
    /// The tile in row `m` of a block and column `n`, both below [`MAX_EXTENT`](super::layout::MAX_EXTENT), whose operands wait for
    /// `flags`, which end with [`MAX_FLAGS`] at the most.
    pub fn new(block: usize, m: usize, n: usize, flags: Range<usize>) -> Tile {
        // What is too large stays too large, and is refused.
        let word = |flag: usize| u16::try_from(flag).unwrap_or(u16::MAX);
        Tile {
            m: m as u32,
            n: n as u32,
            block: block as u32,
            flag_begin: word(flags.start),
            flag_end: word(flags.end),
        }
    }

    /// The chunk flags that this tile's operands wait for; none if they are there from the beginning.
    pub fn flags(&self) -> Range<usize> {
        self.flag_begin as usize..self.flag_end as usize
    }

    /// Whether the two are of one block and wait for the same.
    fn is_alike(&self, other: &Tile) -> bool {
        let of = |tile: &Tile| (tile.block, tile.flag_begin, tile.flag_end);
        of(self) == of(other)
    }
}

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
                    none("regions of other lengths", lengths(from) != lengths(to))?;
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
