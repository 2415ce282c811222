//! One thing that a rank did, and the clock that says when.

use std::ops::Range;

/// Nanoseconds of the machine's monotonic clock, which all processes of a host share.
pub(crate) fn now() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Who did something.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Lane {
    /// The copy engine.
    Copy,
    /// The caller's functions, or what they put on one of two streams, counted from 0.
    Caller(usize),
    /// A worker that multiplies, counted from 0.
    Worker(usize),
}

/// What was done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Work {
    /// A chunk was pulled.
    Pull {
        /// The rank it came from.
        source: usize,
        /// Its rows of the matrix that they are gathered in; of partials, rows of the memory that these have.
        rows: Range<usize>,
    },
    /// Rows were pushed to another rank.
    Push {
        /// The rank they went to.
        to: usize,
        /// Rows of the matrix that they go to there; of partials, rows of the memory that these have.
        rows: Range<usize>,
    },
    /// The rows of a tile, of a chunk that is consumed, or what is added to them, were waited for.
    Wait {
        /// The rank whose rows they are.
        source: usize,
    },
    /// A tile was multiplied, and what is added to it was added.
    Tile {
        /// The rank whose rows it holds; if it straddles shards, the last one's. Of partials that are pulled or exchanged, the rank
        /// that makes them.
        source: usize,
        /// The tile's row, counted from its block's first.
        m: u32,
        /// The tile's column.
        n: u32,
    },
    /// A function of the caller's ran, or on GPUs what it had put on a stream.
    Call {
        /// The rank whose rows it consumed, or that gets what it made.
        rank: usize,
    },
    /// A worker, or a kernel, added up what ranks have made of the same rows.
    Add {
        /// The rows of the sum.
        rows: Range<usize>,
    },
}

/// One thing that was done, from when to when, in nanoseconds of a clock that all ranks share: the host's monotonic
/// clock, or on GPUs, whose clocks differ, the time since the ranks began the operation together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    /// Who did it.
    pub lane: Lane,
    /// What it was.
    pub work: Work,
    /// When it began.
    pub begin: u64,
    /// When it ended.
    pub end: u64,
}
