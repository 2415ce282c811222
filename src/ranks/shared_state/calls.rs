//! The latest calls of each rank, which ranks compare.

use std::sync::atomic::Ordering;
use std::sync::{MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::{OwnCall, OwnCalls, POSTS, SharedState};
use crate::call::{self, SourceLine};
use crate::error::{Error, Kind, MadeCall, Result};
use crate::protocol::board::Post;
use crate::protocol::epoch::Epoch;
use crate::protocol::flag::Awaited;
use crate::ranks::call::{FIXED, MESSAGES, PostedCall, WORDS, describe};
use crate::schedule::agreed::hash;

/// If calls differ, a rank waits this long for ranks that have not called, to learn which call most ranks made.
pub const LATE_VOTES: Duration = Duration::from_millis(500);

impl SharedState {
    /// Checks that this rank may post its call `number`, because no slower rank needs the slot any more. Otherwise
    /// returns the rank that needs it.
    pub fn may_post(&self, number: u64) -> Result<(), usize> {
        if self.slot(self.rank, number).latest() == 0 {
            return Ok(());
        }
        // A rank that has posted the call after the one in the slot no longer compares with the slot.
        let oldest = SharedState::needed_for(number);
        let slow = (0..self.world).find(|&rank| !self.has_begun(rank, oldest));
        // Nor the mirror, which its host's leader runs.
        let is_unsent = self.hosts.count() > 1 && !self.has_been_sent(oldest - 1);
        let mirror = is_unsent.then(|| self.hosts.leader_of(self.rank));
        slow.or(mirror).map_or(Ok(()), Err)
    }

    /// True if this rank's call `number` has gone to the other hosts.
    ///
    /// Acquire: all reads of the call happen before what the caller does next.
    fn has_been_sent(&self, number: u64) -> bool {
        self.block().mirrored[self.rank].load(Ordering::Acquire) >= number
    }

    /// The call that every rank must have begun before one may post its call `number`.
    pub fn needed_for(number: u64) -> u64 {
        number.saturating_sub(POSTS - 1)
    }

    /// True if `rank` has posted its call `number`.
    pub fn has_begun(&self, rank: usize, number: u64) -> bool {
        self.slot(rank, number).latest() >= number
    }

    /// The first rank that has not posted its call `number`.
    pub fn first_late(&self, number: u64) -> Option<usize> {
        (0..self.world).find(|&rank| !self.has_begun(rank, number))
    }

    /// True if every rank has posted its call `number`.
    pub fn all_have_begun(&self, number: u64) -> bool {
        self.first_late(number).is_none()
    }

    pub(super) fn slot(&self, rank: usize, number: u64) -> &Post<WORDS, FIXED> {
        &self.block().posts[rank][(number % POSTS) as usize]
    }

    /// Posts that this rank's call `number` is operation `epoch`, and compares it with what the others have posted.
    /// Of two ranks that differ, the one that posts later sees it.
    pub fn post_operation(&self, number: u64, epoch: Epoch, operation: PostedCall) -> Result<()> {
        self.post(number, operation.to_words(epoch), operation.place)
    }

    /// As [`SharedState::post_operation`], for an exchange of messages.
    pub fn post_messages(&self, number: u64, call: &MadeCall, place: SourceLine) -> Result<()> {
        let lines = call.to_lines();
        let call = hash(lines.as_bytes());
        self.block().message_calls[self.rank].write(number, lines.as_bytes());
        let mut post = [0; WORDS];
        post[..2].copy_from_slice(&[MESSAGES, call]);
        self.post(number, post, place)
    }

    fn post(&self, number: u64, words: [u64; WORDS], place: SourceLine) -> Result<()> {
        let made = self.made.load(Ordering::Relaxed);
        self.places()[(number % POSTS) as usize] = OwnCall {
            number,
            place,
            made,
        };
        let others = (0..self.world).filter(|&rank| rank != self.rank);
        let others = others.map(|rank| (rank, self.slot(rank, number)));
        match self.slot(self.rank, number).post(number, words, others) {
            Some(_) => Err(self.odd_one_out(number)),
            None => Ok(()),
        }
    }

    /// Where this rank's program makes its latest calls.
    fn places(&self) -> MutexGuard<'_, OwnCalls> {
        // Each change is one assignment.
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that this rank's program has made a collective call, which posted one call or several.
    pub fn note_made(&self) {
        self.made.fetch_add(1, Ordering::Relaxed);
    }

    /// Waits until all ranks have made their call `number`, and names the odd one.
    fn odd_one_out(&self, number: u64) -> Error {
        // The majority is known when all have called. But a late rank is not awaited for long.
        let deadline = Instant::now() + LATE_VOTES;
        while !self.all_have_begun(number) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.name_odd_one(number)
    }

    /// The error that names the rank whose call `number` fewer ranks made. In a tie, a rank that was not refused a call
    /// is right, and then the lowest.
    pub(super) fn name_odd_one(&self, number: u64) -> Error {
        let posted = (0..self.world).filter_map(|r| Some((r, self.slot(r, number).read(number)?)));
        let calls: Vec<(usize, [u64; WORDS])> = posted.collect();
        let votes = |call| {
            let ranks = calls.iter().filter(|(_, other)| *other == call);
            let refused = |(rank, _): &(usize, _)| self.was_refused(*rank, number).is_some();
            (ranks.clone().count(), !ranks.clone().any(refused))
        };
        let most = calls.iter().map(|(_, call)| votes(*call)).max();
        let right = calls.iter().find(|(_, call)| Some(votes(*call)) == most);
        let (other, expected) = right.copied().unwrap_or((0, [0; WORDS]));
        let odd = calls.iter().find(|(_, call)| *call != expected);
        let rank = odd.map_or(0, |(rank, _)| *rank);
        Kind::CallMismatch {
            theirs: self.call(rank, number),
            other,
            expected: self.call(other, number),
            number: self.made_before(number) + 1,
            refused: self.was_refused(rank, number),
        }
        .on(rank)
    }

    /// How many collective calls this rank's program made before its call `number`.
    fn made_before(&self, number: u64) -> u64 {
        let placed = self.places()[(number % POSTS) as usize];
        if placed.number == number {
            placed.made
        } else {
            self.made.load(Ordering::Relaxed)
        }
    }

    /// The call `number` of `rank`. If it is this rank's, its place is known.
    fn call(&self, rank: usize, number: u64) -> MadeCall {
        let posted = match self.slot(rank, number).read(number) {
            Some([MESSAGES, ..]) => self.block().message_calls[rank]
                .read(number)
                .map(|lines| MadeCall::from_lines(&String::from_utf8_lossy(&lines))),
            words => words.map(describe),
        };
        let mut call = posted.unwrap_or_else(|| MadeCall::named(&format!("its call {number}")));
        let placed = self.places()[(number % POSTS) as usize];
        if rank == self.rank && placed.number == number {
            call.place = call::in_words(placed.place);
        }
        call
    }

    /// The error, if it tells of calls that differ, with the place of this rank's call.
    pub(super) fn placed(&self, mut error: Error) -> Error {
        let rank = self.job_rank(self.rank);
        let odd = error.rank();
        if let Kind::CallMismatch {
            theirs,
            other,
            expected,
            ..
        } = error.kind_mut()
        {
            let calls = [(odd.unwrap_or(rank), theirs), (*other, expected)];
            let own = calls.into_iter().find(|(of, _)| *of == rank);
            if let Some((_, call)) = own.filter(|(_, call)| call.place.is_none()) {
                call.place = self.latest_place_of(call);
            }
        }
        error
    }

    /// Where this rank has made its latest call that is equal to `call`.
    fn latest_place_of(&self, call: &MadeCall) -> Option<String> {
        let places = self.places();
        let mut numbers: Vec<u64> = places.iter().map(|placed| placed.number).collect();
        drop(places);
        numbers.sort_unstable_by(|one, other| other.cmp(one));
        let made = numbers.into_iter().filter(|&number| number > 0);
        let mut made = made.map(|number| self.call(self.rank, number));
        made.find(|made| made == call)?.place
    }

    /// The number of this rank's call that is operation `epoch`, if it is one of the latest.
    ///
    /// This rank may post the next call at the same time. Its slot then shows the words of either call, and neither is
    /// this operation.
    pub fn number_of(&self, epoch: Epoch) -> Option<u64> {
        let posts = self.block().posts[self.rank].iter();
        let mut numbers = posts.map(Post::latest).filter(|&number| number > 0);
        numbers.find(|&number| {
            let words = self.slot(self.rank, number).read(number);
            words.is_some_and(|[name, its, ..]| name != MESSAGES && its == u64::from(epoch.raw()))
        })
    }

    /// Operation `epoch` of this rank, in words, with its place.
    pub fn call_of(&self, epoch: Epoch) -> String {
        let number = self.number_of(epoch);
        number.map_or_else(
            || "an operation".into(),
            |number| self.call(self.rank, number).in_words(),
        )
    }

    /// What this rank waits for in operation `epoch`, in words: the call, and what a peer has not done. Ranks are those
    /// of the job.
    pub fn describe(&self, epoch: Epoch, awaited: Awaited) -> String {
        let what = awaited.describe(self.job_rank(self.rank));
        let (call, peer) = (self.call_of(epoch), self.job_rank(awaited.peer()));
        format!("{call}: rank {peer} {what}")
    }
}
