//! Who owns which rows of a matrix, and how rows are cut.

use std::ops::Range;
use std::sync::Arc;

use super::limits::limit;
use crate::error::Result;

/// The most ranks a group can have. (Whatever borrows their flags, miri looks at all of them.)
pub const MAX_WORLD: usize = if cfg!(miri) { 4 } else { 64 };
/// The largest extent of a matrix: tile coordinates are 32-bit signed numbers on a GPU.
pub const MAX_EXTENT: usize = i32::MAX as usize;
/// The most parts that a rank's rows can be cut into, as stages or as chunks.
pub const MAX_CHUNKS: usize = 64;

/// A matrix of M rows and K columns whose rows are spread over the ranks: rank r owns some that follow one another,
/// behind those of r - 1; or none. They may be cut into stages: a gather goes stage by stage over all ranks.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Layout {
    /// Rank r owns the rows `offsets[r]..offsets[r + 1]`.
    offsets: Arc<[usize]>,
    columns: usize,
    /// Into how many blocks each rank's rows are cut.
    stages: usize,
    order: RowOrder,
}

/// Where the blocks of the stages lie in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RowOrder {
    /// Rank after rank: a row's number is its place.
    ByRank,
    /// Stage after stage, of each the ranks' blocks: [stages, ranks, rows, K].
    ByStage,
}

impl Layout {
    /// `m` rows split over `world` ranks as evenly as whole rows allow, the longer shards first.
    ///
    /// # Errors
    /// [`Error::Limit`](crate::Error::Limit) when an extent is above [`MAX_EXTENT`], `k` is 0, or `world` is 0 or above
    /// [`MAX_WORLD`].
    pub fn balanced(m: usize, k: usize, world: usize) -> Result<Layout> {
        limit("world size", world, 1, MAX_WORLD)?;
        Layout::new(&balanced_rows(m, world), k)
    }

    /// `rows[r]` rows for rank r; a rank may have none, and so may all.
    ///
    /// # Errors
    /// As [`Layout::balanced`]; M is the sum of `rows`.
    pub fn new(rows: &[usize], k: usize) -> Result<Layout> {
        limit("world size", rows.len(), 1, MAX_WORLD)?;
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

    /// The same, with each rank's rows cut into `stages` blocks, as evenly as whole rows allow.
    ///
    /// # Errors
    /// [`Error::Limit`](crate::Error::Limit) for no stages, or more than [`MAX_CHUNKS`].
    pub fn staged(self, stages: usize, order: RowOrder) -> Result<Layout> {
        limit("stages", stages, 1, MAX_CHUNKS)?;
        Ok(Layout {
            stages,
            order,
            ..self
        })
    }

    /// The same split of the rows, in one stage, for a matrix of `k` columns.
    ///
    /// # Errors
    /// [`Error::Limit`](crate::Error::Limit) when `k` is 0 or above [`MAX_EXTENT`].
    pub fn of_columns(&self, k: usize) -> Result<Layout> {
        limit("K", k, 1, MAX_EXTENT)?;
        Ok(Layout {
            offsets: self.offsets.clone(),
            columns: k,
            stages: 1,
            order: RowOrder::ByRank,
        })
    }

    /// Of a matrix without rows: the same with one, for whoever has to say something of it that only rows have.
    pub(crate) fn with_a_row(&self) -> Option<Layout> {
        let offsets = (0..=self.world()).map(|rank| usize::from(rank > 0));
        (self.m() == 0).then(|| Layout {
            offsets: offsets.collect(),
            ..self.clone()
        })
    }

    /// Into how many blocks each rank's rows are cut.
    pub fn stages(&self) -> usize {
        self.stages
    }

    /// Where the blocks lie: of one stage, all the same.
    pub fn order(&self) -> RowOrder {
        match self.stages {
            1 => RowOrder::ByRank,
            _ => self.order,
        }
    }

    /// Where the block of `rank` lies in stage `stage`; perhaps it is empty.
    pub fn block(&self, rank: usize, stage: usize) -> Range<usize> {
        let rows = self.rows_of(rank);
        // What a rank has in the stages before one.
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

    /// Where the rows of `rank` lie, in their order.
    pub fn blocks_of(&self, rank: usize) -> impl Iterator<Item = Range<usize>> {
        let blocks = (0..self.stages).map(move |stage| self.block(rank, stage));
        blocks.filter(|rows| !rows.is_empty())
    }

    /// M, the rows of all ranks together.
    pub fn m(&self) -> usize {
        self.offsets[self.world()]
    }

    /// K, the columns.
    pub fn k(&self) -> usize {
        self.columns
    }

    /// The number of ranks.
    pub fn world(&self) -> usize {
        self.offsets.len() - 1
    }

    /// The rows that `rank` owns, by number: where they lie, [`Layout::blocks_of`] says.
    pub fn rows_of(&self, rank: usize) -> Range<usize> {
        self.offsets[rank]..self.offsets[rank + 1]
    }

    /// Whether the rows are split as by [`Layout::balanced`].
    pub fn is_balanced(&self) -> bool {
        let world = self.world();
        let even = |rank| balanced_rows_of(rank, self.m(), world);
        (0..world).all(|rank| self.rows_of(rank).len() == even(rank))
    }

    /// Whether the two have the same rows in the same places, and each has the same owner.
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

/// `m` rows over `world` ranks, as evenly as whole rows allow, the longer shards first.
pub fn balanced_rows(m: usize, world: usize) -> Vec<usize> {
    (0..world)
        .map(|rank| balanced_rows_of(rank, m, world))
        .collect()
}

fn balanced_rows_of(rank: usize, m: usize, world: usize) -> usize {
    m / world + usize::from(rank < m % world)
}

/// Cuts `rows` into at most `chunks` parts, about equal, at boundaries of tiles, so that few tiles wait for
/// two chunks; parts that this leaves empty are dropped.
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
