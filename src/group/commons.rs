//! What all ranks of a group share beside their matrices: one block of host memory, for whatever backend.
//!
//! It holds the first failure, which ranks have left, which wait for whom, and what each rank called in its
//! latest operations.
//! All of it is atomics over zeroed memory, so any rank may die at any moment and leave it readable.
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::reports::Outbox;
use crate::element::DType;
use crate::error::{Error, Result};
use crate::memory::Mapping;
use crate::protocol::board::{Post, Report};
use crate::protocol::plan::MAX_WORLD;
use crate::protocol::{Epoch, Flag};

/// How many operations the fastest rank may be ahead of the slowest.
const POSTS: usize = 256;
const FAULT_BYTES: usize = 4096;

#[repr(C)]
struct Block {
    /// The first failure, as JSON.
    fault: Report<FAULT_BYTES>,
    /// Whether a rank has left in order: [`YES`] if so.
    left: [Flag; MAX_WORLD],
    /// Whether a rank has stopped mapping its peers' memory.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    closed: [Flag; MAX_WORLD],
    /// Whom a rank waits for: 256 · the time in ms when it last looked + 1 + the other rank. For reports only.
    waits: [AtomicU64; MAX_WORLD],
    posts: [[Post<{ Operation::WORDS }>; POSTS]; MAX_WORLD],
}

/// What a flag of zeroed memory has not reached.
const YES: Epoch = Epoch::FIRST;

fn now_ms() -> u64 {
    crate::trace::now() / 1_000_000
}

/// A collective operation, as far as all ranks must agree on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operation {
    pub name: OperationName,
    pub dtype: DType,
    pub m: usize,
    /// 0 where there is no N.
    pub n: usize,
    pub k: usize,
    /// Which of the group's sharded matrices, counted from 0.
    pub matrix: u32,
    /// Where rows are pushed, ranks must agree on how they are cut.
    pub pushed: Option<Cuts>,
}

/// How rows are cut into chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cuts {
    /// Rows of a table entry.
    pub rows: u32,
    /// Chunks of a shard, and of the one that comes last.
    pub chunks: [u8; 2],
    /// Whether the last chunk of all is cut along K.
    pub cut_last: bool,
}

impl Cuts {
    /// Never 0, for an entry has rows.
    fn to_word(self) -> u64 {
        let [chunks, last] = self.chunks.map(u64::from);
        u64::from(self.rows) << 32 | chunks << 16 | last << 8 | u64::from(self.cut_last)
    }

    fn describe(word: u64) -> String {
        let (rows, [_, chunks, last, cut]) = (word >> 32, (word as u32).to_be_bytes());
        let cut = if cut == 0 { "" } else { " and a cut along K" };
        format!("pushed in {chunks} chunks, the last shard in {last}{cut}, of {rows}s of rows")
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OperationName {
    AllGatherMatmul,
    AllGather,
    TracedAllGatherMatmul,
}

impl Operation {
    const WORDS: usize = 7;

    fn to_words(self) -> [u64; Operation::WORDS] {
        [
            self.name as u64,
            self.dtype as u64,
            self.m as u64,
            self.n as u64,
            self.k as u64,
            self.matrix.into(),
            self.pushed.map_or(0, Cuts::to_word),
        ]
    }
}

/// Says what a rank posted, in the words of the call.
fn describe(words: [u64; Operation::WORDS]) -> String {
    let [name, dtype, m, n, k, matrix, pushed] = words;
    let name = match name {
        w if w == OperationName::AllGatherMatmul as u64 => "all_gather_matmul",
        w if w == OperationName::AllGather as u64 => "gather",
        w if w == OperationName::TracedAllGatherMatmul as u64 => "traced all_gather_matmul",
        _ => "an unknown operation",
    };
    let dtype = [DType::Bf16, DType::F16]
        .into_iter()
        .find(|d| *d as u64 == dtype)
        .map_or("unknown dtype".into(), |d| d.to_string());
    let n = if n == 0 {
        String::new()
    } else {
        format!(", N = {n}")
    };
    let pushed = if pushed == 0 {
        String::new()
    } else {
        format!(", {}", Cuts::describe(pushed))
    };
    format!("{name}(M = {m}{n}, K = {k}, {dtype}, sharded matrix {matrix}{pushed})")
}

/// One rank's view of the block.
#[derive(Debug)]
pub struct Commons {
    memory: Mapping,
    rank: usize,
    world: usize,
    /// To a launcher that wants to know of the first failure.
    outbox: Option<Outbox>,
}

impl Commons {
    /// How many bytes of shared memory the block takes.
    pub const BYTES: usize = size_of::<Block>();

    /// `memory` holds [`Commons::BYTES`] bytes that were zero when the first rank mapped them.
    pub fn new(memory: Mapping, rank: usize, world: usize) -> Commons {
        Commons {
            memory,
            rank,
            world,
            outbox: None,
        }
    }

    /// Tells the launcher of the group's first failure, before this rank learns of it.
    pub(super) fn with_outbox(self, outbox: Option<Outbox>) -> Commons {
        Commons { outbox, ..self }
    }

    fn tell_launcher(&self, first: &Error) {
        if let (Some(outbox), Some(by)) = (&self.outbox, self.reporter()) {
            outbox.tell(by, first);
        }
    }

    fn block(&self) -> &Block {
        // SAFETY: the mapping is page-aligned and as long as a Block, which consists of atomics, for which
        // any bytes are valid and shared writing is defined. It lives as long as `self`.
        unsafe { &*self.memory.as_ptr().cast::<Block>() }
    }

    /// Reports a failure to every rank. Returns the group's first failure: this one, or an earlier.
    pub fn fail(&self, error: Error) -> Error {
        let mut bytes = serde_json::to_vec(&error).unwrap_or_default();
        if bytes.is_empty() || bytes.len() > FAULT_BYTES {
            let mut reason = error.to_string();
            let end = (0..=reason.len().min(1000))
                .rev()
                .find(|&end| reason.is_char_boundary(end))
                .unwrap_or(0);
            reason.truncate(end);
            let short = Error::Message {
                rank: self.rank,
                reason,
            };
            bytes = serde_json::to_vec(&short).unwrap_or_default();
        }
        if self.block().fault.write(self.rank, &bytes) {
            self.tell_launcher(&error);
            error
        } else {
            self.fault().unwrap_or(error)
        }
    }

    /// The rank that reported the group's first failure, if there is one.
    pub fn reporter(&self) -> Option<usize> {
        self.block().fault.reporter()
    }

    /// The group's first failure. Costs one load as long as there is none.
    pub fn fault(&self) -> Option<Error> {
        let by = self.reporter()?;
        let fault = self.read_fault(by);
        self.tell_launcher(&fault);
        Some(fault)
    }

    fn read_fault(&self, by: usize) -> Error {
        // The reporter writes a few hundred bytes; if it was killed in between, that is the failure.
        let deadline = Instant::now() + Duration::from_millis(500);
        loop {
            if let Some(bytes) = self.block().fault.read() {
                return serde_json::from_slice(&bytes).unwrap_or_else(|e| Error::Message {
                    rank: by,
                    reason: format!("its report of a failure: {e}"),
                });
            }
            if Instant::now() > deadline {
                return Error::RankLost {
                    rank: by,
                    noticed_by: self.rank,
                };
            }
            std::thread::yield_now();
        }
    }

    /// Says that this rank leaves in order: it has completed all it began.
    pub fn leave(&self) {
        self.block().left[self.rank].signal(YES);
    }

    /// Whether `rank` has left in order. If so, all flags that it signalled before are seen.
    pub fn has_left(&self, rank: usize) -> bool {
        self.block().left[rank].reached(YES)
    }

    /// Says that this rank has stopped mapping its peers' memory.
    #[cfg(feature = "cuda")]
    pub fn mark_closed(&self) {
        self.block().closed[self.rank].signal(YES);
    }

    /// Whether `rank` has stopped mapping its peers' memory.
    #[cfg(feature = "cuda")]
    pub fn is_closed(&self, rank: usize) -> bool {
        self.block().closed[rank].reached(YES)
    }

    /// Notes that this rank waits for `peer`, now. To be called every few milliseconds while it does.
    pub fn note_wait(&self, peer: usize) {
        let word = now_ms() << 8 | (peer as u64 + 1);
        self.block().waits[self.rank].store(word, Ordering::Relaxed);
    }

    /// Who is to blame for a wait for `peer` that has been in vain: if `peer` itself waits, whom it waits for,
    /// and so on to a rank that waits for nobody, be it stopped or busy elsewhere. `peer` if all wait in a
    /// circle. A wait counts if it was noted during the last `fresh`.
    pub fn culprit(&self, peer: usize, fresh: Duration) -> usize {
        let mut culprit = peer;
        for _ in 0..self.world {
            let word = self.block().waits[culprit].load(Ordering::Relaxed);
            let age = now_ms().saturating_sub(word >> 8);
            match (word & 0xff) as usize {
                0 => return culprit,
                _ if u128::from(age) > fresh.as_millis() => return culprit,
                next => culprit = (next - 1).min(self.world - 1),
            }
        }
        peer
    }

    /// Whether this rank may post the operation `epoch`: its slot is not needed by a slower rank any more.
    /// If it is, returns that rank.
    pub fn may_post(&self, epoch: Epoch) -> Result<(), usize> {
        // A rank that has posted the operation after the one in the slot no longer compares with the slot.
        let oldest = Epoch::from_raw(epoch.raw().wrapping_sub(POSTS as u32 - 1));
        if self.slot(self.rank, epoch).latest().is_none() {
            return Ok(());
        }
        (0..self.world)
            .find(|&rank| {
                let seen = self.slot(rank, oldest).latest();
                !seen.is_some_and(|seen| oldest.reached_by(seen.raw()))
            })
            .map_or(Ok(()), Err)
    }

    fn slot(&self, rank: usize, epoch: Epoch) -> &Post<{ Operation::WORDS }> {
        &self.block().posts[rank][epoch.raw() as usize % POSTS]
    }

    /// Posts what this rank calls as operation `epoch` and compares it with what the others have posted.
    /// Of two ranks that differ, the one that posts later sees it.
    pub fn post(&self, epoch: Epoch, operation: Operation) -> Result<()> {
        let words = operation.to_words();
        let others = (0..self.world).filter(|&rank| rank != self.rank);
        let others = others.map(|rank| (rank, self.slot(rank, epoch)));
        match self.slot(self.rank, epoch).post(epoch, words, others) {
            Some((rank, theirs)) => Err(self.odd_one_out(epoch, rank, theirs, words)),
            None => Ok(()),
        }
    }

    /// Of two ranks that differ, blames the one whose call fewer ranks made.
    fn odd_one_out(
        &self,
        epoch: Epoch,
        rank: usize,
        theirs: [u64; Operation::WORDS],
        mine: [u64; Operation::WORDS],
    ) -> Error {
        let posted = || (0..self.world).filter_map(|rank| self.slot(rank, epoch).read(epoch));
        // The majority is known once all have called; a rank that is late is not waited for long.
        let deadline = Instant::now() + Duration::from_secs(1);
        while posted().count() < self.world && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
        let votes = |call| posted().filter(|words| *words == call).count();
        let mine_is_odd = match votes(theirs).cmp(&votes(mine)) {
            std::cmp::Ordering::Greater => true,
            std::cmp::Ordering::Less => false,
            std::cmp::Ordering::Equal => self.rank > rank,
        };
        let ((rank, theirs), (other, expected)) = if mine_is_odd {
            ((self.rank, mine), (rank, theirs))
        } else {
            ((rank, theirs), (self.rank, mine))
        };
        Error::CallMismatch {
            rank,
            theirs: describe(theirs),
            other,
            expected: describe(expected),
            call: epoch.raw(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::memfd;

    fn ranks(world: usize) -> Vec<Commons> {
        let fd = memfd(Commons::BYTES).unwrap();
        (0..world)
            .map(|rank| Commons::new(Mapping::shared(&fd, Commons::BYTES).unwrap(), rank, world))
            .collect()
    }

    const OPERATION: Operation = Operation {
        name: OperationName::AllGatherMatmul,
        dtype: DType::Bf16,
        m: 4096,
        n: 512,
        k: 64,
        matrix: 2,
        pushed: None,
    };

    #[test]
    fn the_first_failure_is_everybodys() {
        let ranks = ranks(3);
        assert_eq!(ranks[2].fault(), None);
        let first = Error::RankLost {
            rank: 0,
            noticed_by: 1,
        };
        let second = Error::RankLost {
            rank: 1,
            noticed_by: 2,
        };
        assert_eq!(ranks[1].fail(first.clone()), first);
        assert_eq!(ranks[2].fail(second), first);
        assert_eq!(ranks[0].fault(), Some(first));
    }

    #[test]
    fn a_failure_too_long_for_the_block_is_shortened_not_lost() {
        let ranks = ranks(2);
        ranks[0].fail(Error::OutOfMemory {
            rank: 0,
            bytes: 1,
            reason: "ü".repeat(FAULT_BYTES),
        });
        let seen = ranks[1].fault().unwrap().to_string();
        assert!(seen.contains("has no memory for 1 bytes"), "{seen}");
    }

    #[test]
    fn the_rank_that_waits_for_nobody_is_to_blame() {
        let fresh = Duration::from_secs(60);
        let ranks = ranks(4);
        assert_eq!(ranks[0].culprit(1, fresh), 1);
        ranks[1].note_wait(2);
        ranks[2].note_wait(3);
        assert_eq!(ranks[0].culprit(1, fresh), 3);
        std::thread::sleep(Duration::from_millis(3));
        let stopped = ranks[0].culprit(1, Duration::ZERO);
        assert_eq!(stopped, 1, "it has not looked for its flag since");
        ranks[3].note_wait(1);
        assert_eq!(ranks[0].culprit(1, fresh), 1, "a circle");
    }

    #[test]
    fn the_rank_that_calls_something_else_is_named() {
        let other = Operation {
            n: 256,
            ..OPERATION
        };
        let ranks = ranks(3);
        ranks[2].post(Epoch::FIRST, OPERATION).unwrap();
        ranks[0].post(Epoch::FIRST, OPERATION).unwrap();
        let error = ranks[1].post(Epoch::FIRST, other).unwrap_err();
        let Error::CallMismatch { rank, theirs, .. } = &error else {
            panic!("{error}")
        };
        assert_eq!(*rank, 1);
        assert_eq!(
            theirs,
            "all_gather_matmul(M = 4096, N = 256, K = 64, bf16, sharded matrix 2)"
        );
    }

    #[test]
    fn the_odd_one_is_named_also_when_it_came_first() {
        let other = Operation { k: 32, ..OPERATION };
        let ranks = ranks(3);
        ranks[1].post(Epoch::FIRST, other).unwrap();
        let error = ranks[0].post(Epoch::FIRST, OPERATION).unwrap_err();
        assert!(
            matches!(
                error,
                Error::CallMismatch {
                    rank: 1,
                    other: 0,
                    ..
                }
            ),
            "{error}"
        );
    }

    #[test]
    fn a_rank_cannot_overwrite_what_a_slower_one_still_needs() {
        let ranks = ranks(2);
        let mut epoch = Epoch::from_raw(u32::MAX - 9);
        for _ in 0..POSTS {
            assert_eq!(ranks[0].may_post(epoch), Ok(()));
            ranks[0].post(epoch, OPERATION).unwrap();
            epoch = epoch.next();
        }
        assert_eq!(ranks[0].may_post(epoch), Err(1));
        let mut slow = Epoch::from_raw(u32::MAX - 9);
        ranks[1].post(slow, OPERATION).unwrap();
        assert_eq!(
            ranks[0].may_post(epoch),
            Err(1),
            "the slot after it is needed"
        );
        slow = slow.next();
        ranks[1].post(slow, OPERATION).unwrap();
        assert_eq!(ranks[0].may_post(epoch), Ok(()));
        // A rank that is ahead across the wrap is no reason to wait.
        for _ in 2..POSTS + 2 {
            slow = slow.next();
            ranks[1].post(slow, OPERATION).unwrap();
        }
        assert_eq!(ranks[0].may_post(epoch), Ok(()));
    }
}
