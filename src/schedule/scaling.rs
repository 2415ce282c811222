//! Scales of fp8 operands: how many values share one, and where it lies.

use super::Product;
use super::form::MAX_WEIGHTS;
use super::limits::{limit, require};
use crate::element::DType;
use crate::error::{Error, Result};

/// The rows and columns of a block of a weight that share a scale, and the columns of a row that do.
pub const SCALED_BLOCK: usize = 128;

/// A matrix may begin at a multiple of so many rows or columns of a block, because GPUs read one scale for 16 rows, and
/// 16 bytes of a row at a time.
const FIRST_MULTIPLE: usize = 16;

/// How many values of an fp8 operand share a scale, and where the scales lie. They are f32.
///
/// Without blocks, rows and weights may be scaled in different ways. Blocks of rows need blocks of weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Scaling {
    /// No scales.
    #[default]
    None,
    /// All values share one, [1, 1].
    Tensor,
    /// The values of a row share one: [1, M] for `a`, and [1, N] for a weight.
    Rows,
    /// The values of a block share one. A block of `a` is 1 × 128, [M, ⌈K/128⌉]. A block of a weight is 128 × 128,
    /// [⌈N/128⌉, ⌈K/128⌉].
    Blocks,
    /// Blocks of a part of a larger matrix, which begins inside a block. A weight's scales are
    /// [⌈(row + N)/128⌉, ⌈(column + K)/128⌉], and those of `a`, whose blocks have one row, [M, ⌈(column + K)/128⌉].
    ///
    /// Both operands begin at the same column, so that each part of K has one scale of either. Row and column are
    /// multiples of 16 below 128. If both are 0, this is [`Scaling::Blocks`].
    BlocksFrom {
        /// The place of the first row in its block. 0 for `a`.
        row: usize,
        /// The place of the first column in its block.
        column: usize,
    },
    /// Blocks of `a`, with the scales of a row in a column: [⌈K/128⌉, M].
    TransposedBlocks,
    /// The values of a row of a sharded `a` share one. The scales are sharded with it, [M, 1].
    ShardedRows,
    /// Blocks of a sharded `a`. The scales are sharded with it, [M, ⌈K/128⌉].
    ShardedBlocks,
}

/// One entry for each weight.
pub type WeightScalings = smallvec::SmallVec<[Scaling; MAX_WEIGHTS]>;

impl Scaling {
    /// True if blocks of K have scales of their own.
    pub fn has_blocks(self) -> bool {
        match self {
            Scaling::None | Scaling::Tensor | Scaling::Rows | Scaling::ShardedRows => false,
            Scaling::Blocks
            | Scaling::BlocksFrom { .. }
            | Scaling::TransposedBlocks
            | Scaling::ShardedBlocks => true,
        }
    }

    /// True if the scales are gathered with the rows.
    pub fn is_sharded(self) -> bool {
        matches!(self, Scaling::ShardedRows | Scaling::ShardedBlocks)
    }

    /// Blocks of a matrix that begins at this row and column of its first block.
    pub const fn blocks_from(row: usize, column: usize) -> Scaling {
        match [row, column] {
            [0, 0] => Scaling::Blocks,
            [row, column] => Scaling::BlocksFrom { row, column },
        }
    }

    /// The same by the name that scales have: blocks that begin at row 0 and column 0 are [`Scaling::Blocks`].
    pub(crate) fn normalised(self) -> Scaling {
        match self {
            Scaling::BlocksFrom { row, column } => Scaling::blocks_from(row, column),
            other => other,
        }
    }

    /// The same, wherever a matrix begins.
    fn of_any_place(self) -> Scaling {
        match self {
            Scaling::BlocksFrom { .. } => Scaling::Blocks,
            other => other,
        }
    }

    /// The shape of the scales of `a`, [M, K], and its name in messages. None if there are no such scales.
    pub fn of_rows(self, [m, k]: [usize; 2]) -> Option<([usize; 2], &'static str)> {
        let blocks = self.first_column().saturating_add(k).div_ceil(SCALED_BLOCK);
        match self {
            Scaling::None => None,
            Scaling::Tensor => Some(([1, 1], "scales of a [1, 1]")),
            Scaling::Rows => Some(([1, m], "scales of a [1, M]")),
            Scaling::Blocks | Scaling::ShardedBlocks => {
                Some(([m, blocks], "scales of a [M, ⌈K/128⌉]"))
            }
            Scaling::BlocksFrom { .. } => {
                Some(([m, blocks], "scales of a [M, ⌈(first column + K)/128⌉]"))
            }
            Scaling::TransposedBlocks => Some(([blocks, m], "scales of a [⌈K/128⌉, M]")),
            Scaling::ShardedRows => Some(([m, 1], "scales of a [M, 1]")),
        }
    }

    /// The shape of the scales of a weight [N, K], and its name in messages. None if there are no such scales.
    pub fn of_weight(self, [n, k]: [usize; 2]) -> Option<([usize; 2], &'static str)> {
        let blocks = self.first_column().saturating_add(k).div_ceil(SCALED_BLOCK);
        match self {
            Scaling::Tensor => Some(([1, 1], "scales of b [1, 1]")),
            Scaling::Rows => Some(([1, n], "scales of b [1, N]")),
            Scaling::Blocks => {
                let shape = [n.div_ceil(SCALED_BLOCK), blocks];
                Some((shape, "scales of b [⌈N/128⌉, ⌈K/128⌉]"))
            }
            Scaling::BlocksFrom { row, column } => {
                let shape = [row.saturating_add(n).div_ceil(SCALED_BLOCK), blocks];
                let name = match column {
                    0 => "scales of b [⌈(first row + N)/128⌉, ⌈K/128⌉]",
                    _ => "scales of b [⌈(first row + N)/128⌉, ⌈(first column + K)/128⌉]",
                };
                Some((shape, name))
            }
            _ => None,
        }
    }

    /// The row and the column of the scale of a row of `a` and a block of K.
    pub fn place_of_row(self, row: usize, block: usize) -> [usize; 2] {
        match self {
            Scaling::Rows => [0, row],
            Scaling::ShardedRows => [row, 0],
            Scaling::Blocks | Scaling::BlocksFrom { .. } | Scaling::ShardedBlocks => [row, block],
            Scaling::TransposedBlocks => [block, row],
            Scaling::None | Scaling::Tensor => [0, 0],
        }
    }

    /// The row and the column of the scale of a row of a weight and a block of K.
    pub fn place_of_column(self, n: usize, block: usize) -> [usize; 2] {
        match self {
            Scaling::Rows => [0, n],
            Scaling::Blocks => [n / SCALED_BLOCK, block],
            Scaling::BlocksFrom { row, .. } => [(row + n) / SCALED_BLOCK, block],
            _ => [0, 0],
        }
    }

    /// The place of an operand's first column in its first block.
    pub(crate) fn first_column(self) -> usize {
        match self {
            Scaling::BlocksFrom { column, .. } => column,
            _ => 0,
        }
    }

    /// The place of a weight's first row in its first block.
    pub(crate) fn first_row(self) -> usize {
        match self {
            Scaling::BlocksFrom { row, .. } => row,
            _ => 0,
        }
    }
}

/// How kernels find scales.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
impl Scaling {
    /// How many scales a matrix of this pitch has from the scale of a row, or of a block of rows of a weight, to the next.
    pub(crate) fn row_distance(self, pitch: u32) -> u32 {
        match self {
            Scaling::None | Scaling::Tensor => 0,
            Scaling::Rows | Scaling::TransposedBlocks => 1,
            Scaling::Blocks
            | Scaling::BlocksFrom { .. }
            | Scaling::ShardedRows
            | Scaling::ShardedBlocks => pitch,
        }
    }

    /// The same from the scale of a block of K of `a` to the next. 0 if blocks have no scales.
    pub(crate) fn block_distance(self, pitch: u32) -> u32 {
        match self {
            Scaling::TransposedBlocks => pitch,
            other => u32::from(other.has_blocks()),
        }
    }
}

/// The scales of an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScaleMatrix {
    /// Its matrix, of f32.
    pub matrix: usize,
    /// How many values share one.
    pub scaling: Scaling,
}

impl ScaleMatrix {
    /// None without scales.
    pub(super) fn new(matrix: usize, scaling: Scaling) -> Option<ScaleMatrix> {
        (scaling != Scaling::None).then_some(ScaleMatrix { matrix, scaling })
    }
}

/// Checks the row or the column of a block at which a matrix begins: `what`.
pub(super) fn check_first(what: &str, first: usize) -> Result<()> {
    limit(what, first, 0, SCALED_BLOCK - 1)?;
    if first.is_multiple_of(FIRST_MULTIPLE) {
        return Ok(());
    }
    Err(Error::unsupported(format!(
        "{what} must be a multiple of {FIRST_MULTIPLE}, not {first}"
    )))
}

/// Checks the places at which the operands begin in their blocks.
fn check_places(a: Scaling, weights: impl Iterator<Item = Scaling>) -> Result<()> {
    let has_no_row = a.first_row() == 0;
    require("only blocks of a weight begin at a row", has_no_row)?;
    let column = a.first_column();
    check_first("the first column of a in its first block", column)?;
    for weight in weights {
        check_first(
            "the first row of a weight in its first block",
            weight.first_row(),
        )?;
        let what = "the first column of a weight in its first block";
        check_first(what, weight.first_column())?;
        if weight.first_column() != column {
            let what = format!(
                "{what} must be that of a, {column}, not {}, so that each part of K has one scale of either",
                weight.first_column()
            );
            return Err(Error::unsupported(what));
        }
    }
    Ok(())
}

/// Checks that the scales of a product of these operands can be used together.
///
/// # Errors
/// `Kind::Unsupported`; `Kind::Limit` for the first row or column of a block.
pub(super) fn check(operands: DType, product: &Product) -> Result<()> {
    let of = |scales: Option<ScaleMatrix>| scales.map_or(Scaling::None, |scales| scales.scaling);
    let a = of(product.a_scales);
    let mut weights = product.weights.iter().map(|weight| of(weight.scales));
    let b = weights.next().unwrap_or_default().of_any_place();
    let is_scaled = a != Scaling::None || b != Scaling::None;
    require(
        "only operands of fp8 have scales",
        operands.is_fp8() || !is_scaled,
    )?;
    let are_alike = weights.all(|other| other.of_any_place() == b);
    require("all weights must be scaled alike", are_alike)?;
    let what = "scales of blocks must be those of both operands, or of none";
    require(what, a.has_blocks() == b.has_blocks())?;
    let fits = !(b.is_sharded() || b == Scaling::TransposedBlocks);
    require("scales of a weight must be Tensor, Rows or Blocks", fits)?;
    check_places(a, product.weights.iter().map(|weight| of(weight.scales)))
}
