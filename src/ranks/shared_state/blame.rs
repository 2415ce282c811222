//! Which rank is to blame for a wait that was in vain: through other ranks' waits, in this group and in all that were
//! split from the same one, and through leaders that pass nothing on.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::leaders::Leaders;
use super::{FRESH, PART_BYTES, SharedState, now_ms};
use crate::error::{Deadline, Error, Kind};
use crate::protocol::waits::{Blame, LastWait, blame};
use crate::ranks::deadlines::Deadlines;

/// A leader whose thread has not run for this long passes nothing on. It says four times a second that it runs.
///
/// A rank that stood still has not seen that: only what it has watched counts.
const SILENT: Duration = Duration::from_millis(750);
/// The words of a wait in a part are noted again this often.
const WORDS: Duration = Duration::from_millis(50);

/// What a part is of the group from which it was split, directly or not.
#[derive(Clone, Debug)]
pub struct PartOf {
    whole: Arc<SharedState>,
    /// By rank of the part: the rank of the whole group.
    ranks: Vec<usize>,
}

impl PartOf {
    /// Of `ranks` of `above`, which may be a part itself.
    pub fn new(above: &Arc<SharedState>, ranks: &[usize]) -> PartOf {
        let Some(of) = &above.part_of else {
            return PartOf {
                whole: above.clone(),
                ranks: ranks.to_vec(),
            };
        };
        PartOf {
            whole: of.whole.clone(),
            ranks: ranks.iter().map(|&rank| of.ranks[rank]).collect(),
        }
    }
}

/// When the words of a rank's waits in parts were last noted. All groups of a family share it, so one thread writes.
#[derive(Debug, Default)]
pub struct NotedWords(Mutex<Option<Instant>>);

/// A rank to blame, of the whole group, and the wait for it in a part of that, in words.
struct Culprit {
    rank: usize,
    in_part: Option<String>,
}

impl SharedState {
    /// Notes that this rank waits for `peer` now. It has to be called every few milliseconds during a wait. `what` is
    /// the call and what `peer` has not done.
    pub fn note_wait(&self, peer: usize, what: impl FnOnce() -> String) {
        self.block().waits[self.rank].note(peer, now_ms());
        self.whole().look_at_leaders();
        if let Some(of) = &self.part_of {
            self.note_wait_in_part(of, peer, what);
        }
    }

    /// Notes it for the ranks of the whole group too.
    fn note_wait_in_part(&self, of: &PartOf, peer: usize, what: impl FnOnce() -> String) {
        let wait = &of.whole.block().part_waits[of.ranks[self.rank]];
        // If another thread of this rank notes a wait at this moment, that will do.
        let Ok(mut noted) = self.family.noted_words.0.try_lock() else {
            return;
        };
        let are_old = noted.is_none_or(|noted| noted.elapsed() >= WORDS);
        let words = are_old.then(|| {
            *noted = Some(Instant::now());
            let name = self.naming().and_then(|naming| naming.name.as_deref());
            let mut words = format!("group {:?} in {}", name.unwrap_or_default(), what());
            let whole = |end: &usize| words.is_char_boundary(*end);
            let end = (0..=words.len().min(PART_BYTES)).rev().find(whole);
            words.truncate(end.unwrap_or(0));
            words
        });
        wait.note(
            of.ranks[peer],
            now_ms(),
            words.as_deref().map(str::as_bytes),
        );
    }

    /// Notes that the mirror of the leader `leader` runs.
    pub fn note_running(&self, leader: usize) {
        self.block().running[leader].store(now_ms(), Ordering::Relaxed);
    }

    /// The rank to blame for a wait for `peer` that was in vain. A wait counts if it was noted during the last `fresh`.
    ///
    /// A rank has one note of its waits in all parts, so threads of it that wait in two parts overwrite it in turn. In
    /// this group's own memory it shows for which rank it waits here.
    fn find_culprit(&self, peer: usize, fresh: Duration) -> Culprit {
        let whole = self.whole();
        let Blame {
            rank,
            waiting_in_part,
        } = blame(self.in_whole(peer), whole.rank, |rank| {
            let [in_whole, in_part] = whole.waits_of(rank, fresh);
            let here = self.wait_here(rank, fresh);
            [here.or(in_whole), in_part]
        });
        let in_part = waiting_in_part.and_then(|waiting| whole.words_of(waiting, rank));
        Culprit { rank, in_part }
    }

    /// For which rank `rank` waits in this part. Both are ranks of the whole group.
    fn wait_here(&self, rank: usize, fresh: Duration) -> Option<usize> {
        let of = self.part_of.as_ref()?;
        let rank = of.ranks.iter().position(|&its| its == rank)?;
        let peer = self.peer_of(&self.block().waits[rank], fresh)?;
        Some(of.ranks[peer])
    }

    /// The rank of the whole group that is `rank` of this one.
    fn in_whole(&self, rank: usize) -> usize {
        self.part_of.as_ref().map_or(rank, |of| of.ranks[rank])
    }

    /// For which rank `rank` waits in this group, and for which in a part of it. A rank of which no news can come waits
    /// for the leader that should pass them on.
    fn waits_of(&self, rank: usize, fresh: Duration) -> [Option<usize>; 2] {
        if let Some(leader) = self.silent_leader(rank).filter(|&leader| leader != rank) {
            return [Some(leader), None];
        }
        self.noted_waits_of(rank, fresh)
    }

    fn noted_waits_of(&self, rank: usize, fresh: Duration) -> [Option<usize>; 2] {
        let block = self.block();
        let waits = [&block.waits[rank], block.part_waits[rank].wait()];
        waits.map(|wait| self.peer_of(wait, fresh))
    }

    /// The rank for which a rank of this group waits, if it has noted that during the last `fresh`.
    fn peer_of(&self, wait: &LastWait, fresh: Duration) -> Option<usize> {
        let peer = wait.peer(now_ms(), fresh.as_millis() as u64);
        peer.filter(|&peer| peer < self.world)
    }

    /// The wait of `rank` for `peer` in a part, in words.
    fn words_of(&self, rank: usize, peer: usize) -> Option<String> {
        let words = self.block().part_waits[rank].call(peer)?;
        let words = String::from_utf8_lossy(&words);
        Some(format!("rank {} waits in {words}", self.job_rank(rank)))
    }

    /// The first leader on the way of what this rank knows of `rank`, of another host, that passes nothing on, because
    /// it is stopped.
    pub fn silent_leader(&self, rank: usize) -> Option<usize> {
        if self.hosts.share(rank, self.rank) {
            return None;
        }
        let way = [self.rank, 0, rank].map(|rank| self.hosts.leader_of(rank));
        let mut way = way.into_iter().filter(|&leader| leader != self.rank);
        way.find(|&leader| self.is_silent(leader))
    }

    /// True if the mirror of `leader` has not run lately, and the leader itself shows no wait, if this rank can see that.
    fn is_silent(&self, leader: usize) -> bool {
        self.look_at_leaders();
        let is_long = self.leaders().silence(leader) >= SILENT;
        let is_near = self.hosts.share(leader, self.rank);
        let waits = || is_near && self.noted_waits_of(leader, FRESH) != [None; 2];
        is_long && !self.has_left(leader) && !waits()
    }

    /// Looks whether leaders' mirrors have run. A rank that waits does so again and again.
    fn look_at_leaders(&self) {
        if self.hosts.count() > 1 {
            let ran = |leader: usize| self.block().running[leader].load(Ordering::Relaxed);
            self.leaders().look(ran);
        }
    }

    fn leaders(&self) -> MutexGuard<'_, Leaders> {
        // A panic while it was held has left no leader half-changed.
        self.leaders.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// This rank's view of the whole group.
    fn whole(&self) -> &SharedState {
        self.part_of.as_ref().map_or(self, |of| &of.whole)
    }

    /// True if `rank` has shown lately that it waits for a different rank.
    pub fn is_waiting(&self, rank: usize, deadlines: &Deadlines) -> bool {
        let fresh = FRESH.min(deadlines.call() / 2);
        self.find_culprit(rank, fresh).rank != self.in_whole(rank)
    }

    /// The error if this rank has waited for `rank` this long in vain. `passed` is the deadline and its length. `what`
    /// is the call and what `rank` has not done.
    pub fn timed_out(
        &self,
        (deadline, longest): (Deadline, Duration),
        rank: usize,
        waited: Duration,
        what: String,
    ) -> Error {
        self.blame_for(deadline, rank, FRESH.min(longest / 2), waited, what)
    }

    /// The error of a wait for `rank` that was in vain, in which a wait counts if it was noted during the last `fresh`.
    pub(super) fn blame_for(
        &self,
        deadline: Deadline,
        rank: usize,
        fresh: Duration,
        waited: Duration,
        what: String,
    ) -> Error {
        let culprit = self.find_culprit(rank, fresh);
        let its = self.whole().job_rank(culprit.rank);
        let what = match (&culprit.in_part, culprit.rank == self.in_whole(rank)) {
            (_, true) => what,
            (Some(wait), false) => format!("{what}, held up by rank {its}, for which {wait}"),
            (None, false) => format!("{what}, held up by rank {its}"),
        };
        let error = |rank, waiting| {
            Kind::Timeout {
                waiting,
                what: what.clone(),
                waited_ms: waited.as_millis() as u64,
                deadline,
            }
            .on(rank)
        };
        let Some(of) = &self.part_of else {
            return error(culprit.rank, self.rank);
        };
        match of.ranks.iter().position(|&rank| rank == culprit.rank) {
            Some(culprit) => error(culprit, self.rank),
            // It is no rank of this part, so the error has ranks of the job already.
            None => self.with_job_ranks(error(its, self.job_rank(self.rank))),
        }
    }

    /// An error of this group whose ranks are those of the job.
    fn with_job_ranks(&self, error: Error) -> Error {
        match self.naming() {
            Some(naming) => error.of_group(
                naming.name.as_deref().unwrap_or_default(),
                &naming.job_ranks,
            ),
            None => error,
        }
    }

    /// The rank of this group that is to blame for a wait for `peer`.
    #[cfg(test)]
    pub(super) fn culprit(&self, peer: usize, fresh: Duration) -> usize {
        self.find_culprit(peer, fresh).rank
    }
}
