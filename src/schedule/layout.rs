//! Which rank owns which rows of a matrix, and how rows are cut.

use std::ops::Range;
use std::sync::Arc;

use super::limits::limit;
use crate::Result;

/// The most ranks that a group can have. (Miri checks all flags at each borrow, so there it is lower.)
pub const MAX_WORLD: usize = if cfg!(miri) { 4 } else { 64 };
/// The most ranks of a simulation.
#[cfg(feature = "unstable-tools")]
const MAX_SIMULATED: usize = 1024;
/// The largest extent of a matrix: tile coordinates are 32-bit signed numbers on a GPU.
pub const MAX_EXTENT: usize = i32::MAX as usize;
/// The most stages or chunks that a rank's rows can be cut into.
pub const MAX_CHUNKS: usize = 64;

/// How the rows of an M×K matrix are spread over the ranks.
///
/// Rank r owns consecutive rows, which follow those of rank r - 1. It may own none. Rows may be cut into stages, and
/// then a gather brings stage after stage of all ranks.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Layout {
    /// Rank r owns the rows `offsets[r]..offsets[r + 1]`.
    offsets: Arc<[usize]>,
    columns: usize,
    /// The number of blocks that each rank's rows are cut into.
    stages: usize,
    order: RowOrder,
}

/// In which order the blocks of the stages lie in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RowOrder {
    /// Rank by rank. A row's number is its place.
    ByRank,
    /// Stage by stage, and in each stage rank by rank: [stages, ranks, rows, K].
    ByStage,
}

impl Layout {
    /// Splits `m` rows over `world` ranks as evenly as whole rows allow, the longer shards first.
    ///
    /// # Errors
    /// `Kind::Limit` when an extent is above [`MAX_EXTENT`], `k` is 0, or `world` is 0 or above
    /// [`MAX_WORLD`].
    pub fn balanced(m: usize, k: usize, world: usize) -> Result<Layout> {
        limit("world size", world, 1, MAX_WORLD)?;
        Layout::new(&balanced_rows(m, world), k)
    }

    /// Gives rank r `rows[r]` rows. A rank may have none, and so may all.
    ///
    /// # Errors
    /// As [`Layout::balanced`]; M is the sum of `rows`.
    pub fn new(rows: &[usize], k: usize) -> Result<Layout> {
        limit("world size", rows.len(), 1, MAX_WORLD)?;
        Layout::of_rows(rows, k)
    }

    /// As [`Layout::balanced`], for simulations, which may have more ranks than a group.
    ///
    /// # Errors
    /// As [`Layout::balanced`], if `world` is above 1024.
    #[cfg(feature = "unstable-tools")]
    pub fn simulated(m: usize, k: usize, world: usize) -> Result<Layout> {
        limit("the number of ranks", world, 1, MAX_SIMULATED)?;
        Layout::of_rows(&balanced_rows(m, world), k)
    }

    fn of_rows(rows: &[usize], k: usize) -> Result<Layout> {
        let mut end = 0usize;
        let mut offsets = vec![0];
        for &count in rows {
            end = end.saturating_add(count);
            offsets.push(end);
        }
        limit("M", end, 0, MAX_EXTENT)?;
        limit("K", k, 1, MAX_EXTENT)?;
        Ok(Layout {
            offsets: offsets.into(),
            columns: k,
            stages: 1,
            order: RowOrder::ByRank,
        })
    }

    /// The same layout, with each rank's rows cut into `stages` blocks, as evenly as whole rows allow.
    ///
    /// # Errors
    /// `Kind::Limit` if `stages` is 0 or above [`MAX_CHUNKS`].
    pub fn staged(self, stages: usize, order: RowOrder) -> Result<Layout> {
        limit("the number of stages", stages, 1, MAX_CHUNKS)?;
        Ok(Layout {
            stages,
            order,
            ..self
        })
    }

    /// The same split of the rows, in one stage, for a matrix of `k` columns.
    ///
    /// # Errors
    /// `Kind::Limit` when `k` is 0 or above [`MAX_EXTENT`].
    pub fn of_columns(&self, k: usize) -> Result<Layout> {
        limit("K", k, 1, MAX_EXTENT)?;
        Ok(Layout {
            offsets: self.offsets.clone(),
            columns: k,
            stages: 1,
            order: RowOrder::ByRank,
        })
    }

    /// For a matrix without rows, the same layout with one row, for checks that need a row.
    pub(crate) fn with_a_row(&self) -> Option<Layout> {
        let offsets = (0..=self.world()).map(|rank| usize::from(rank > 0));
        (self.m() == 0).then(|| Layout {
            offsets: offsets.collect(),
            ..self.clone()
        })
    }

    /// The number of blocks that each rank's rows are cut into.
    pub fn stages(&self) -> usize {
        self.stages
    }

    /// The order of the blocks. With one stage it is always [`RowOrder::ByRank`].
    pub fn order(&self) -> RowOrder {
        match self.stages {
            1 => RowOrder::ByRank,
            _ => self.order,
        }
    }

    /// The rows in memory of the block of `rank` in stage `stage`, which may be empty.
    pub fn block(&self, rank: usize, stage: usize) -> Range<usize> {
        let rows = self.rows_of(rank);
        // The rows of a rank in the stages before this one.
        let before = |rank: usize, stage: usize| self.rows_of(rank).len() * stage / self.stages;
        let length = |rank: usize| before(rank, stage + 1) - before(rank, stage);
        let begin = match self.order() {
            RowOrder::ByRank => rows.start + before(rank, stage),
            RowOrder::ByStage => {
                let earlier = (0..self.world()).map(|other| before(other, stage));
                earlier.sum::<usize>() + (0..rank).map(length).sum::<usize>()
            }
        };
        begin..begin + length(rank)
    }

    /// The rows in memory of all blocks of `rank` that are not empty, in their order.
    pub fn blocks_of(&self, rank: usize) -> impl Iterator<Item = Range<usize>> {
        let blocks = (0..self.stages).map(move |stage| self.block(rank, stage));
        blocks.filter(|rows| !rows.is_empty())
    }

    /// Where the rows that `rank` owns lie in memory, in order: one range, or one for each stage. None is empty.
    pub fn rows_in_memory(&self, rank: usize) -> Vec<Range<usize>> {
        let rows = self.rows_of(rank);
        match self.order() {
            _ if rows.is_empty() => Vec::new(),
            RowOrder::ByRank => vec![rows],
            RowOrder::ByStage => self.blocks_of(rank).collect(),
        }
    }

    /// The rows of each rank in words that ranks compare, unless they are split evenly.
    pub fn agreed(&self) -> Option<String> {
        (!self.is_balanced()).then(|| format!("rows of each rank = {:?}", self.rows()))
    }

    /// M, the number of rows of all ranks together.
    pub fn m(&self) -> usize {
        self.offsets[self.world()]
    }

    /// K, the number of columns.
    pub fn k(&self) -> usize {
        self.columns
    }

    /// The number of ranks.
    pub fn world(&self) -> usize {
        self.offsets.len() - 1
    }

    /// The numbers of the rows that `rank` owns. [`Layout::blocks_of`] says where they lie.
    pub fn rows_of(&self, rank: usize) -> Range<usize> {
        self.offsets[rank]..self.offsets[rank + 1]
    }

    /// True if the rows are split as by [`Layout::balanced`].
    pub fn is_balanced(&self) -> bool {
        let world = self.world();
        let even = |rank| balanced_rows_of(rank, self.m(), world);
        (0..world).all(|rank| self.rows_of(rank).len() == even(rank))
    }

    /// True if both layouts have the same rows in the same places with the same owners.
    pub fn is_split_as(&self, other: &Layout) -> bool {
        let places = |layout: &Layout| (layout.order(), layout.stages);
        let alike = self.order() == RowOrder::ByRank && other.order() == RowOrder::ByRank;
        self.offsets == other.offsets && (alike || places(self) == places(other))
    }

    /// How many rows each rank owns.
    pub fn rows(&self) -> Vec<usize> {
        (0..self.world())
            .map(|rank| self.rows_of(rank).len())
            .collect()
    }
}

/// The rows of each rank if `m` rows are split as evenly as whole rows allow, the longer shards first.
pub fn balanced_rows(m: usize, world: usize) -> Vec<usize> {
    (0..world)
        .map(|rank| balanced_rows_of(rank, m, world))
        .collect()
}

fn balanced_rows_of(rank: usize, m: usize, world: usize) -> usize {
    m / world + usize::from(rank < m % world)
}

/// Cuts `rows` into at most `chunks` parts of about the same size, at boundaries of tiles, so that few tiles wait for
/// two chunks. Empty parts are dropped.
pub fn chunk_rows(
    rows: Range<usize>,
    chunks: usize,
    entry_rows: usize,
) -> impl Iterator<Item = Range<usize>> {
    let mut begin = rows.start;
    let cut = move |i: usize| {
        let even = rows.start + rows.len() * i / chunks;
        match i {
            _ if i == chunks => rows.end,
            _ => ((even + entry_rows / 2) / entry_rows * entry_rows).clamp(rows.start, rows.end),
        }
    };
    (1..=chunks)
        .map(move |i| {
            let end = cut(i);
            std::mem::replace(&mut begin, end)..end
        })
        .filter(|rows| !rows.is_empty())
}
