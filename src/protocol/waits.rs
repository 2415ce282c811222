//! Which ranks wait for which, so that a wait that was in vain blames the rank that waits for none.
//!
//! Like flags these are atomics over zeroed memory. So if a rank dies at any moment, they stay readable.

use super::board::Note;
use super::primitive::{AtomicU64, Ordering};

/// The rank that a rank waits for, and when it last looked whether that has come. Of zeroed memory: none.
#[repr(transparent)]
pub struct LastWait(AtomicU64);

impl LastWait {
    /// Of a rank that has waited for none.
    #[allow(clippy::new_without_default)]
    pub fn new() -> LastWait {
        LastWait(AtomicU64::new(0))
    }

    /// Notes that the rank looks for `peer` at `now_ms`. A rank that waits calls it again and again.
    ///
    /// Release: whoever sees it sees all that the rank wrote before, such as the call in which it waits.
    pub fn note(&self, peer: usize, now_ms: u64) {
        self.note_word(now_ms << 8 | (peer as u64 + 1));
    }

    /// 256 · the time in ms + 1 + the peer; 0 before the first wait.
    ///
    /// Acquire: as [`LastWait::note`].
    pub fn word(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }

    /// Notes such a word, as another host has noted it.
    pub fn note_word(&self, word: u64) {
        self.0.store(word, Ordering::Release);
    }

    /// The rank that it waits for, if it has looked during the last `fresh_ms`.
    pub fn peer(&self, now_ms: u64, fresh_ms: u64) -> Option<usize> {
        let word = self.word();
        let peer = ((word & 0xff) as usize).checked_sub(1)?;
        (now_ms.saturating_sub(word >> 8) <= fresh_ms).then_some(peer)
    }
}

/// A rank's latest wait in a part of the group, for the ranks of the whole group: they cannot read the part's memory. It
/// has one writer at a time.
#[repr(C)]
pub struct PartWait<const BYTES: usize> {
    wait: LastWait,
    /// The part and its call in words, under the number 1 + the rank that is waited for.
    call: Note<BYTES>,
}

impl<const BYTES: usize> PartWait<BYTES> {
    /// Of a rank that has waited for none. The same as zeroed memory.
    #[allow(clippy::new_without_default)]
    pub fn new() -> PartWait<BYTES> {
        PartWait {
            wait: LastWait::new(),
            call: Note::new(),
        }
    }

    /// Notes that the rank looks for `peer` at `now_ms`. `call`: the part and its call in words, if they may be new.
    pub fn note(&self, peer: usize, now_ms: u64, call: Option<&[u8]>) {
        if let Some(call) = call {
            self.call.write(peer as u64 + 1, call);
        }
        self.wait.note(peer, now_ms);
    }

    /// The rank that it waits for, and when it last looked.
    pub fn wait(&self) -> &LastWait {
        &self.wait
    }

    /// The part and the call in which it waits for `peer`, unless it waits for a different rank by now.
    pub fn call(&self, peer: usize) -> Option<Vec<u8>> {
        self.call.read(peer as u64 + 1)
    }
}

/// The rank to blame for a wait, and how it was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blame {
    /// The rank to blame.
    pub rank: usize,
    /// The rank that waits for it in a part of the group, if the wait for it is in a part.
    pub waiting_in_part: Option<usize>,
}

/// The rank to blame for a wait for `peer` that was in vain.
///
/// If `peer` waits for a rank, the blame goes on to that rank, and so on to a rank that waits for none. If all wait in a
/// circle, it is `peer`. `waits` says for which rank a rank waits in the whole group, and for which in a part of it: a
/// rank's threads may wait in both. Ranks of which it says nothing are `innocent`, such as the one that asks.
pub fn blame(peer: usize, innocent: usize, waits: impl Fn(usize) -> [Option<usize>; 2]) -> Blame {
    let mut seen: Vec<usize> = Vec::new();
    let mut open = vec![Blame {
        rank: peer,
        waiting_in_part: None,
    }];
    while let Some(next) = open.pop() {
        if seen.contains(&next.rank) {
            continue;
        }
        seen.push(next.rank);
        let [whole, part] = waits(next.rank);
        if whole.or(part).is_none() && next.rank != innocent {
            return next;
        }
        // Those of the whole group are followed first.
        let in_part = part.map(|rank| (rank, Some(next.rank)));
        let edges = in_part.into_iter().chain(whole.map(|rank| (rank, None)));
        open.extend(edges.map(|(rank, waiting_in_part)| Blame {
            rank,
            waiting_in_part,
        }));
    }
    Blame {
        rank: peer,
        waiting_in_part: None,
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// The blame for a wait of rank 0 for rank 1, by each rank's waits in the whole group and in parts.
    fn blamed(waits: &[[Option<usize>; 2]]) -> (usize, Option<usize>) {
        let Blame {
            rank,
            waiting_in_part,
        } = blame(1, 0, |rank| waits[rank]);
        (rank, waiting_in_part)
    }

    const NONE: [Option<usize>; 2] = [None; 2];

    #[test]
    fn the_rank_that_waits_for_none_is_to_blame_through_parts_too() {
        let whole = |rank| [Some(rank), None];
        let part = |rank| [None, Some(rank)];
        assert_eq!(blamed(&[whole(1), NONE, NONE, NONE]), (1, None));
        assert_eq!(blamed(&[whole(1), whole(2), NONE, NONE]), (2, None));
        assert_eq!(blamed(&[whole(1), part(2), NONE, NONE]), (2, Some(1)));
        assert_eq!(blamed(&[whole(1), part(2), whole(3), NONE]), (3, None));
        assert_eq!(blamed(&[whole(1), whole(2), part(3), NONE]), (3, Some(2)));
        // In a circle, and in one that a thread of rank 1 leaves.
        assert_eq!(blamed(&[whole(1), part(0), NONE, NONE]), (1, None));
        let both = [Some(0), Some(2)];
        assert_eq!(blamed(&[whole(1), both, NONE, NONE]), (2, Some(1)));
        // The one that asks has not noted its wait yet.
        assert_eq!(blamed(&[NONE, part(0), NONE, NONE]), (1, None));
    }
}
