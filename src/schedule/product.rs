//! What is multiplied, into which tiles, and what is added up.

use std::ops::Range;

use smallvec::SmallVec;

use super::{Activation, Config, MatrixSpec, WeightLayout};
use crate::element::DType;

/// `a[m, k] · b[n, k]ᵀ`, of matrices by number, with one or several weights b, whose rows go to one or several places.
#[derive(Clone, Debug)]
pub struct Product {
    /// `[m, k]`
    pub a: usize,
    /// What it is multiplied with. Of a gated product the gate, and then what the gate's function is multiplied with.
    pub weights: SmallVec<[Weight; 1]>,
    /// How these lie.
    pub weight_layout: WeightLayout,
    /// Whether the first weight's product is a gate of the second's: the output is the sum's function of the one, times
    /// the other.
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
    /// What is added up in f32, in this order, each of it rounded to the matrix's type before. If nothing is named, it
    /// is the product, not rounded before.
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
    /// The first of its columns. Of a gated product these are added to the gate, and as many behind them to what it is
    /// multiplied with.
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

/// Rows that are added up once everything has arrived and this rank's own blocks are made. What this rank makes is
/// among the addends as rows of a matrix.
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
    /// The tile in row `m` of a block and column `n`, both below [`MAX_EXTENT`](super::layout::MAX_EXTENT), whose
    /// operands wait for `flags`, which end with [`MAX_FLAGS`] at the most.
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
    pub(super) fn is_alike(&self, other: &Tile) -> bool {
        let of = |tile: &Tile| (tile.block, tile.flag_begin, tile.flag_end);
        of(self) == of(other)
    }
}

fn extent(index: u32, length: usize, end: usize) -> Range<usize> {
    let begin = index as usize * length;
    begin..(begin + length).min(end)
}
