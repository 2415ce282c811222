//! A product, its blocks and tiles, and sums.

use std::ops::Range;

use smallvec::SmallVec;

use super::{
    Accumulation, Activation, Config, MatrixSpec, OutputScales, ScaleMatrix, WeightLayout,
};
use crate::element::DType;

/// Products of fp8 are summed separately over every 128 of K, in ascending order. These sums are then added in f32.
pub const PROMOTED: usize = 128;

/// The product `a[m, k] · b[n, k]ᵀ` of numbered matrices, with one or several weights b and one or several outputs.
#[derive(Clone, Debug)]
pub struct Product {
    /// `[m, k]`
    pub a: usize,
    /// The scales of `a`, if it has any.
    pub a_scales: Option<ScaleMatrix>,
    /// The matrices that `a` is multiplied with. A gated product has two, first the gate and then up.
    pub weights: SmallVec<[Weight; 1]>,
    /// How the weights lie in memory.
    pub weight_layout: WeightLayout,
    /// Whether nothing that may still run when the product begins writes the weights.
    pub constant_weights: bool,
    /// How sums of products of fp8 are made.
    pub accumulation: Accumulation,
    /// True for a gated product: its output is `activation(a · gateᵀ) * (a · upᵀ)`.
    pub gated: bool,
    /// Rows of the product.
    pub m: usize,
    /// The extent that is summed over.
    pub k: usize,
    /// How the product is cut up, with the shape of its tiles.
    pub config: Config,
    /// Blocks of its rows. Each weight has each row in at most one block. Tiles are counted from the first row of a
    /// block, and end at its last.
    pub blocks: Vec<OutputBlock>,
    /// The one chunk, if any, that tiles need only for their later steps through K.
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

    /// Columns of the output in an entry of the table. In a gated product they are half of the columns that are
    /// multiplied.
    pub fn tile_columns(&self) -> usize {
        self.config.entry_columns() >> usize::from(self.gated)
    }

    /// True if all of K is summed by tensor cores, without promotion. Blocks that have scales are always summed apart.
    pub fn is_fast(&self) -> bool {
        let has_blocks = self
            .a_scales
            .is_some_and(|scales| scales.scaling.has_blocks());
        self.accumulation == Accumulation::Fast && !has_blocks
    }

    /// The place of the first column of `a` and of the weights in its block of scales.
    pub fn first_column(&self) -> usize {
        self.a_scales
            .map_or(0, |scales| scales.scaling.first_column())
    }

    /// The number of outputs: one for each weight, or one for both weights of a gated product.
    pub fn outputs(&self) -> usize {
        if self.gated { 1 } else { self.weights.len() }
    }

    /// Columns of all outputs.
    pub fn n(&self) -> usize {
        let outputs = &self.weights[..self.outputs()];
        outputs.iter().map(|weight| weight.n).sum()
    }

    /// The block of a tile.
    pub fn block(&self, tile: &Tile) -> &OutputBlock {
        &self.blocks[tile.block as usize]
    }
}

/// A weight of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Weight {
    /// Its matrix, `[n, k]`, or `[k, n]`.
    pub b: usize,
    /// Columns of the product with this weight.
    pub n: usize,
    /// Its scales, if it has any.
    pub scales: Option<ScaleMatrix>,
}

impl Sum {
    /// A sum of nothing yet, which is stored as it is from row `first` of a matrix on.
    pub(crate) fn plain(out: usize, first: usize) -> Sum {
        Sum {
            out,
            first,
            addends: Vec::new(),
            bias: None,
            activation: Activation::Identity,
            residual: None,
            scales: None,
        }
    }

    /// The type of the addends, the bias and the residual. The output may have a different type.
    pub(crate) fn dtype(&self, matrices: &[MatrixSpec]) -> DType {
        let rows = |addend: &Addend| match addend {
            Addend::Rows { matrix, .. } => Some(*matrix),
            Addend::Product => None,
        };
        let added = self.addends.iter().find_map(rows);
        let added = added.or(self.bias.map(|bias| bias.matrix));
        let added = added.or(self.residual.map(|residual| residual.matrix));
        matrices[added.unwrap_or(self.out)].dtype
    }
}

/// Rows of the product with one weight, and their output.
#[derive(Clone, Debug)]
pub struct OutputBlock {
    /// The rows of the product.
    pub rows: Range<usize>,
    /// The number of the weight, or of the gate in a gated product.
    pub weight: usize,
    /// What is added, and where the result is stored.
    pub sum: Sum,
}

/// What is added up, what is applied to the sum, and where it is stored.
#[derive(Clone, Debug)]
pub struct Sum {
    /// The number of the output matrix. It has as many columns as the product, or more if rows are padded.
    pub out: usize,
    /// The first of its rows that this sum is written to.
    pub first: usize,
    /// The addends, which are added in f32 in this order. Each one is first rounded to the type of the sum's matrices.
    /// If there are none, the sum is the product, without that rounding.
    pub addends: Vec<Addend>,
    /// Added next, if the call binds it.
    pub bias: Option<Bias>,
    /// Applied next.
    pub activation: Activation,
    /// Added last, if the call binds it. Then the sum is rounded.
    pub residual: Option<Residual>,
    /// If the sum is quantised, its values are multiplied by one over their scale before they are rounded.
    pub scales: Option<OutputScales>,
}

/// Columns of a matrix with one row. They are added to each row of a sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bias {
    /// The number of the matrix.
    pub matrix: usize,
    /// The first of the columns. In a gated product, they are added to the gate's product, and as many columns after
    /// them to up's product.
    pub first: usize,
}

/// Rows of a matrix of the call, which are added to the rows of a sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Residual {
    /// The number of the matrix.
    pub matrix: usize,
    /// The first row.
    pub first: usize,
}

/// One of the rows that a sum adds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Addend {
    /// The product that this rank makes.
    Product,
    /// Rows of a matrix that ranks share, in this rank's memory.
    Rows {
        /// The number of the matrix.
        matrix: usize,
        /// The first row.
        first: usize,
    },
}

/// A sum that is made once all transfers have arrived and this rank's own blocks are made.
///
/// The rows that this rank makes are addends like the others, as rows of a matrix.
#[derive(Clone, Debug)]
pub struct Reduction {
    /// The number of rows.
    pub rows: usize,
    /// The number of columns.
    pub n: usize,
    /// What is added, and where the result is stored.
    pub sum: Sum,
}

/// Addends of one host that a rank adds up, when they have come, and sends to another host.
#[derive(Clone, Debug)]
pub struct HostSum {
    /// What is added.
    pub sum: Reduction,
    /// The chunk flags of the addends that come from other ranks.
    pub flags: Range<usize>,
}

impl Reduction {
    /// The type of the addends. The output may have a different type.
    pub(crate) fn dtype(&self, matrices: &[MatrixSpec]) -> DType {
        self.sum.dtype(matrices)
    }
}

/// The second part of a chunk that is cut along K, which tiles need only for their later steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeferredChunk {
    /// The flag of this part.
    pub flag: usize,
    /// The first column of this part, a multiple of [`CUT_COLUMNS`](super::config::CUT_COLUMNS).
    pub column: usize,
}

/// One entry of the table: a tile of the output, or one tile for each CTA of a cluster, in rows and columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Tile {
    /// The tile's row: rows of the block from `m * tile_m * cluster_m`.
    pub m: u32,
    /// The tile's column: output columns from `n * tile_n * cluster_n`.
    pub n: u32,
    /// The number of its block in the product.
    pub block: u32,
    pub(crate) flag_begin: u16,
    pub(crate) flag_end: u16,
}

impl Tile {
    /// Makes the tile in row `m` and column `n` of a block, whose operands wait for `flags`.
    ///
    /// `m` and `n` must be below [`MAX_EXTENT`](super::layout::MAX_EXTENT). `flags` must not end after
    /// [`MAX_FLAGS`](super::MAX_FLAGS).
    pub fn new(block: usize, m: usize, n: usize, flags: Range<usize>) -> Tile {
        // A flag that is too large stays too large, so the schedule's check refuses it.
        let word = |flag: usize| u16::try_from(flag).unwrap_or(u16::MAX);
        Tile {
            m: m as u32,
            n: n as u32,
            block: block as u32,
            flag_begin: word(flags.start),
            flag_end: word(flags.end),
        }
    }

    /// The chunk flags that this tile's operands wait for. Empty if the operands are there from the beginning.
    pub fn flags(&self) -> Range<usize> {
        self.flag_begin as usize..self.flag_end as usize
    }

    /// True if both tiles are in the same block and wait for the same flags.
    pub(super) fn is_alike(&self, other: &Tile) -> bool {
        let of = |tile: &Tile| (tile.block, tile.flag_begin, tile.flag_end);
        of(self) == of(other)
    }
}

fn extent(index: u32, length: usize, end: usize) -> Range<usize> {
    let begin = index as usize * length;
    begin..(begin + length).min(end)
}
