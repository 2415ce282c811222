//! Spans of time in which a rank did something, and their clock.

use std::fs;
use std::ops::Range;
use std::sync::OnceLock;

use rustix::time::{ClockId, clock_gettime};

const SECOND: i64 = 1_000_000_000;

/// Nanoseconds of the machine's monotonic clock, which all processes of a host share, in whichever time namespace.
pub(crate) fn now() -> u64 {
    // A process does not change its namespace as long as it has threads.
    static OFFSET: OnceLock<i64> = OnceLock::new();
    let offset = *OFFSET.get_or_init(|| namespace_offset("monotonic"));
    let time = clock_gettime(ClockId::Monotonic);
    let shown = time.tv_sec * SECOND + time.tv_nsec;
    shown.wrapping_sub(offset) as u64
}

/// By how many nanoseconds this process's time namespace sets a clock forward, `monotonic` or `boottime`.
pub(crate) fn namespace_offset(clock: &str) -> i64 {
    // The offsets are of the namespace in which this process's children are born. Where that is another, this process
    // has made it, and is in the first one: we ignore intermediate namespaces.
    let namespace = |name| fs::read_link(format!("/proc/self/ns/{name}")).ok();
    let offsets = fs::read_to_string("/proc/self/timens_offsets").unwrap_or_default();
    let is_own = namespace("time") == namespace("time_for_children");
    is_own
        .then(|| offset(&offsets, clock))
        .flatten()
        .unwrap_or(0)
}

/// Reads the line of a clock, its seconds and its nanoseconds.
fn offset(offsets: &str, clock: &str) -> Option<i64> {
    let mut lines = offsets.lines().map(str::split_whitespace);
    lines.find_map(|mut fields| {
        fields.next().filter(|&name| name == clock)?;
        let mut number = || fields.next()?.parse::<i64>().ok();
        Some(number()? * SECOND + number()?)
    })
}

/// Which part of a rank did something.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Lane {
    /// The copy engine.
    Copy,
    /// The network card.
    Network,
    /// The caller's functions, or their work on one of two streams, counted from 0.
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
        /// Its rows of the gathered matrix, or of the memory of partial sums.
        rows: Range<usize>,
    },
    /// Rows were pushed to another rank.
    Push {
        /// The rank they went to.
        to: usize,
        /// Its rows of the matrix there, or of the memory of partial sums.
        rows: Range<usize>,
    },
    /// A worker or a function waited for rows, or for partial sums of them.
    Wait {
        /// The rank whose rows they are.
        source: usize,
    },
    /// A tile was multiplied, and what is added to it was added.
    Tile {
        /// The rank whose rows it holds, or the last of these ranks. Of partial sums that are pulled or sent in one
        /// step, the rank that makes them.
        source: usize,
        /// The tile's row, counted from its block's first.
        m: u32,
        /// The tile's column.
        n: u32,
    },
    /// The caller's function ran, or on GPUs its work on a stream.
    Call {
        /// The rank whose rows it consumed, or that gets the rows it made.
        rank: usize,
    },
    /// A worker, or a kernel, added up the ranks' partial sums.
    Add {
        /// The rows of the sum.
        rows: Range<usize>,
    },
}

/// A span of time in which one part of a rank did something.
///
/// Times are nanoseconds of a clock that all ranks share. On the host it is the monotonic clock. GPUs' clocks differ,
/// so there it is the time since the ranks began the operation together.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_offset_of_a_time_namespace_is_read_in_seconds_and_nanoseconds() {
        let offsets = |seconds| format!("monotonic {seconds:>11} 5\nboottime 7 0\n");
        let monotonic = |offsets: &str| offset(offsets, "monotonic");
        assert_eq!(monotonic(&offsets("100")), Some(100 * SECOND + 5));
        assert_eq!(monotonic(&offsets("-3")), Some(-3 * SECOND + 5));
        assert_eq!(monotonic(""), None);
        assert_eq!(monotonic("monotonic\n"), None);
        assert_eq!(offset(&offsets("100"), "boottime"), Some(7 * SECOND));
    }
}
