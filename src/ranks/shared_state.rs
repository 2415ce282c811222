//! The block of host memory that all ranks of a group share, on every backend.
//!
//! It holds the first failure, and for each rank whether it has left, which rank it waits for, its latest calls, and
//! why it was refused a call. All of it is atomics over zeroed memory. So if a rank dies at any moment, it stays
//! readable.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use super::call::{FIXED, MESSAGES, PostedCall, WORDS, describe};
use super::deadlines::Deadlines;
use super::last_panic;
use super::naming::Naming;
use super::reports::ReportSender;
use crate::error::{Deadline, Error, Result};
use crate::json;
use crate::process::Process;
use crate::protocol::board::{Note, Post, Report};
use crate::protocol::epoch::Epoch;
use crate::protocol::flag::Awaited;
use crate::protocol::flag::Flag;
use crate::ranks::memfd::Mapping;
use crate::schedule::layout::MAX_WORLD;

/// How many calls the fastest rank may be ahead of the slowest. (Miri checks the whole block at each borrow, so there
/// it is lower.)
const POSTS: u64 = if cfg!(miri) { 4 } else { 256 };
const FAULT_BYTES: usize = 4096;
/// A call in words, whatever the number of ranks; or why it was refused.
const NOTE_BYTES: usize = 2048;

/// A rank that waits notes it more often than this, even on a busy machine.
const FRESH: Duration = Duration::from_millis(250);
/// If calls differ, a rank waits this long for ranks that have not called, to learn which call most ranks made.
const LATE_VOTES: Duration = Duration::from_millis(500);
/// If a rank has let go of the group, the ranks that wait for it give it this long to say why.
const FAREWELL: Duration = Duration::from_secs(1);

#[repr(C)]
struct StateBlock {
    /// The first failure, as JSON.
    fault: Report<FAULT_BYTES>,
    /// [`LEFT`] or [`GONE`] for each rank that has left in order.
    left: [Flag; MAX_WORLD],
    /// The rank that each rank waits for: 256 · the time in ms when it last looked + 1 + the other rank. For reports
    /// only.
    waits: [AtomicU64; MAX_WORLD],
    /// A rank's latest exchange, in words.
    message_calls: [Note<NOTE_BYTES>; MAX_WORLD],
    /// Why each rank was last refused a call: the time in ms as 8 bytes, the number of refusals of that call as 8
    /// bytes, and the error as JSON.
    refusals: [Note<NOTE_BYTES>; MAX_WORLD],
    /// Why each rank that is gone has left, as JSON, under the number [`GIVEN`].
    reasons: [Note<NOTE_BYTES>; MAX_WORLD],
    posts: [[Post<WORDS, FIXED>; POSTS as usize]; MAX_WORLD],
}

/// The rank has completed all that it began and let go of the group. But its thread goes on, and may say why.
const LEFT: Epoch = Epoch::FIRST;
/// The rank has left, and has nothing more to say.
const GONE: Epoch = Epoch::from_raw(2);
/// The number of a given reason. A note of zeroed memory has a different number.
const GIVEN: u64 = 1;

fn now_ms() -> u64 {
    crate::profile::span::now() / 1_000_000
}

/// An error as JSON, in at most `most` bytes.
fn encode(error: &Error, most: usize) -> Vec<u8> {
    json::of_error(&json::fitted(error.clone(), most))
}

/// One rank's view of the block.
#[derive(Debug)]
pub struct SharedState {
    memory: Mapping,
    rank: usize,
    world: usize,
    /// By call, how often this rank was refused it.
    refused: Mutex<BTreeMap<u64, u64>>,
    departure: Mutex<Departure>,
    /// What the group is called, once its ranks have agreed on it.
    naming: OnceLock<Naming>,
    /// Sends the first failure to the launcher, if it wants to know it.
    launcher: Option<ReportSender>,
    /// The rank's process. A fork of it tells nothing.
    process: Process,
}

/// What is known of why this rank leaves.
#[derive(Debug, Default)]
struct Departure {
    /// The last error that the rank got, unless it has made a call since.
    got: Option<Error>,
    /// True if the rank is a thread and its function has ended.
    has_ended: bool,
}

/// Why a rank was refused a call that it has not made after all.
struct Refusal {
    error: Error,
    age: Duration,
    /// How often the rank has been refused that call by now.
    count: u64,
}

impl SharedState {
    /// How many bytes of shared memory the block takes.
    pub const BYTES: usize = size_of::<StateBlock>();

    /// `memory` holds [`SharedState::BYTES`] bytes that were zero when the first rank mapped them.
    pub fn new(memory: Mapping, rank: usize, world: usize) -> SharedState {
        SharedState {
            memory,
            rank,
            world,
            refused: Mutex::default(),
            departure: Mutex::default(),
            naming: OnceLock::new(),
            launcher: None,
            process: Process::this(),
        }
    }

    /// Tells the launcher of the group's first failure, before this rank learns of it.
    pub fn with_launcher(self, launcher: Option<ReportSender>) -> SharedState {
        SharedState { launcher, ..self }
    }

    /// The sender of reports to the launcher, if it wants to know of failures.
    pub fn launcher(&self) -> Option<&ReportSender> {
        self.launcher.as_ref()
    }

    /// Names the group, once.
    pub fn set_naming(&self, naming: Naming) {
        // Ranks agree on one name.
        let _ = self.naming.set(naming);
    }

    /// What the group is called, once its ranks have agreed on it.
    pub fn naming(&self) -> Option<&Naming> {
        self.naming.get()
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Does nothing before the ranks of a part of the job know which ranks of the job they are.
    fn tell_launcher(&self, first: &Error) {
        let (Some(launcher), Some(naming)) = (&self.launcher, self.naming()) else {
            return;
        };
        let by = self.reporter().and_then(|by| naming.job_ranks.get(by));
        if let Some(&by) = by {
            launcher.tell(by, first);
        }
    }

    /// An error of this rank or of a different one, with the group's name if it has one.
    pub fn named(&self, error: Error) -> Error {
        match self.naming() {
            Some(naming) => naming.named(error),
            None => error,
        }
    }

    fn block(&self) -> &StateBlock {
        // SAFETY: the mapping is page-aligned and as long as a StateBlock, which consists of atomics, for which
        // any bytes are valid and shared writing is defined. It lives as long as `self`.
        unsafe { &*self.memory.as_ptr().cast::<StateBlock>() }
    }

    /// Reports a failure to every rank. Returns the group's first failure, which is this one or an earlier one.
    pub fn fail(&self, error: Error) -> Error {
        if let Err(forked) = self.refuse_fork() {
            return forked;
        }
        // The error as the other ranks will read it.
        let error = json::fitted(self.named(error), FAULT_BYTES);
        let bytes = json::of_error(&error);
        if self.block().fault.write(self.rank, &bytes) {
            self.tell_launcher(&error);
            error
        } else {
            self.fault().unwrap_or(error)
        }
    }

    /// Fails in a fork of this rank's process. It touches nothing there that other threads may have locked, and tells
    /// the other ranks and the launcher nothing.
    pub fn refuse_fork(&self) -> Result<()> {
        let required = self.process.require(self.rank);
        required.map_err(|forked| self.named(forked))
    }

    /// Tells the other ranks that this rank panics, if this thread does.
    pub fn report_panic(&self) {
        if std::thread::panicking() {
            self.fail(Error::RankPanicked {
                rank: self.rank,
                message: last_panic::message(),
            });
        }
    }

    /// The rank that reported the group's first failure, if there is one.
    pub fn reporter(&self) -> Option<usize> {
        self.block().fault.reporter()
    }

    /// The group's first failure. Costs one load as long as there is none.
    pub fn fault(&self) -> Option<Error> {
        let by = self.reporter()?;
        let fault = self.named(self.read_fault(by));
        self.tell_launcher(&fault);
        Some(fault)
    }

    fn read_fault(&self, by: usize) -> Error {
        // The reporter writes a few hundred bytes. If it was killed while it wrote, that is the failure.
        let deadline = Instant::now() + Duration::from_millis(500);
        loop {
            if let Some(bytes) = self.block().fault.read() {
                return json::error(&bytes).unwrap_or_else(|e| Error::Message {
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

    /// Notes an error from a call that this rank may make again. None says that a later call has worked.
    pub fn note_got(&self, error: Option<&Error>) {
        if self.refuse_fork().is_ok() {
            self.departure().got = error.cloned().map(|error| self.named(error));
        }
    }

    fn departure(&self) -> MutexGuard<'_, Departure> {
        // Each change is one assignment.
        let departure = self.departure.lock();
        departure.unwrap_or_else(PoisonError::into_inner)
    }

    /// The failure of this rank's program with this reason. If this rank has got the error here and the error names the
    /// rank, it is that error.
    pub fn program_failed(&self, reason: String) -> Error {
        let got = self.departure().got.clone();
        let got = got.filter(|error| error.to_string() == reason);
        let got = got.filter(|error| error.cause().at_fault().contains(&self.rank));
        got.unwrap_or(Error::ProgramFailed {
            rank: self.rank,
            reason,
        })
    }

    /// Says that this rank lets go of the group in order, having completed all that it began. Its function may say why
    /// until it ends.
    pub fn let_go(&self) {
        if self.refuse_fork().is_err() {
            return;
        }
        let departure = self.departure();
        let has_ended = departure.has_ended;
        self.block().left[self.rank].signal(if has_ended { GONE } else { LEFT });
    }

    /// Notes that this rank's function has ended. The ranks that wait for this rank get the `reason`, if there is one.
    ///
    /// The function may have handed the group on. Then the rank has not left yet.
    pub fn end(&self, reason: Option<Error>) {
        if self.refuse_fork().is_err() {
            return;
        }
        let mut departure = self.departure();
        departure.has_ended = true;
        match (self.has_left(self.rank), reason) {
            (true, reason) => self.leave(reason.as_ref()),
            (false, Some(reason)) => drop(self.fail(reason)),
            (false, None) => {}
        }
    }

    /// Says that this rank leaves, and why. The ranks that wait for it get the reason, if there is one.
    fn leave(&self, reason: Option<&Error>) {
        if self.refuse_fork().is_err() {
            return;
        }
        if let Some(reason) = reason {
            let bytes = encode(reason, NOTE_BYTES);
            self.block().reasons[self.rank].write(GIVEN, &bytes);
        }
        self.block().left[self.rank].signal(GONE);
    }

    /// Says that this rank, a process, leaves in order. The reason is the last thing that it got from the group, if
    /// that was an error.
    pub fn leave_with_what_it_got(&self) {
        if self.refuse_fork().is_err() {
            return;
        }
        let got = self.departure().got.as_ref().map(Error::to_string);
        let reason = got.map(|words| self.program_failed(words));
        self.leave(reason.as_ref());
    }

    /// True if `rank` has left in order. Then all flags that it signalled before are seen.
    pub fn has_left(&self, rank: usize) -> bool {
        self.block().left[rank].reached(LEFT)
    }

    /// Why `rank`, which has left, does not make its call `number`, or any call, if it says so within a moment.
    pub fn why_left(&self, rank: usize, number: Option<u64>) -> Option<Error> {
        let deadline = Instant::now() + FAREWELL;
        let is_gone = || self.block().left[rank].reached(GONE) || self.reporter().is_some();
        while !is_gone() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_micros(100));
        }
        let reason = self.block().reasons[rank].read(GIVEN);
        let reason = reason.and_then(|bytes| json::error(&bytes).ok());
        reason.or_else(|| self.refusal(rank, number?))
    }

    /// Notes that this rank waits for `peer` now. It has to be called every few milliseconds during a wait.
    pub fn note_wait(&self, peer: usize) {
        let word = now_ms() << 8 | (peer as u64 + 1);
        self.block().waits[self.rank].store(word, Ordering::Relaxed);
    }

    /// The rank to blame for a wait for `peer` that was in vain.
    ///
    /// If `peer` waits for a rank, the blame goes on to that rank, and so on to a rank that waits for nobody. If all
    /// wait in a circle, it is `peer`. A wait counts if it was noted during the last `fresh`.
    fn culprit(&self, peer: usize, fresh: Duration) -> usize {
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

    /// The error if this rank has waited for `rank` this long in vain. `passed` is the deadline and its length. `what`
    /// is the call and what `rank` has not done.
    pub fn timed_out(
        &self,
        (deadline, longest): (Deadline, Duration),
        rank: usize,
        waited: Duration,
        what: String,
    ) -> Error {
        let culprit = self.culprit(rank, FRESH.min(longest / 2));
        Error::Timeout {
            rank: culprit,
            waiting: self.rank,
            what: if culprit == rank {
                what
            } else {
                format!("{what}, held up by rank {culprit}")
            },
            waited_ms: waited.as_millis() as u64,
            deadline,
        }
    }

    /// Checks that this rank may post its call `number`, because no slower rank needs the slot any more. Otherwise
    /// returns the rank that needs it.
    pub fn may_post(&self, number: u64) -> Result<(), usize> {
        if self.slot(self.rank, number).latest() == 0 {
            return Ok(());
        }
        // A rank that has posted the call after the one in the slot no longer compares with the slot.
        let oldest = SharedState::needed_for(number);
        let slow = (0..self.world).find(|&rank| !self.has_begun(rank, oldest));
        slow.map_or(Ok(()), Err)
    }

    /// The call that every rank must have begun before one may post its call `number`.
    pub fn needed_for(number: u64) -> u64 {
        number.saturating_sub(POSTS - 1)
    }

    fn has_begun(&self, rank: usize, number: u64) -> bool {
        self.slot(rank, number).latest() >= number
    }

    /// True if every rank has posted its call `number`.
    pub fn all_have_begun(&self, number: u64) -> bool {
        (0..self.world).all(|rank| self.has_begun(rank, number))
    }

    fn slot(&self, rank: usize, number: u64) -> &Post<WORDS, FIXED> {
        &self.block().posts[rank][(number % POSTS) as usize]
    }

    /// Posts that this rank's call `number` is operation `epoch`, and compares it with what the others have posted.
    /// Of two ranks that differ, the one that posts later sees it.
    pub fn post_operation(&self, number: u64, epoch: Epoch, operation: PostedCall) -> Result<()> {
        self.post(number, operation.to_words(epoch))
    }

    /// As [`SharedState::post_operation`], for an exchange of messages. `call` is a number that tells calls apart.
    pub fn post_messages(&self, number: u64, call: u64, words: &str) -> Result<()> {
        self.block().message_calls[self.rank].write(number, words.as_bytes());
        let mut post = [0; WORDS];
        post[..2].copy_from_slice(&[MESSAGES, call]);
        self.post(number, post)
    }

    fn post(&self, number: u64, words: [u64; WORDS]) -> Result<()> {
        let others = (0..self.world).filter(|&rank| rank != self.rank);
        let others = others.map(|rank| (rank, self.slot(rank, number)));
        match self.slot(self.rank, number).post(number, words, others) {
            Some(_) => Err(self.odd_one_out(number)),
            None => Ok(()),
        }
    }

    /// The error that names the rank whose call `number` fewer ranks made. In a tie, the lowest rank is right.
    fn odd_one_out(&self, number: u64) -> Error {
        let posted =
            || (0..self.world).filter_map(|r| Some((r, self.slot(r, number).read(number)?)));
        // The majority is known when all have called. But a late rank is not awaited for long.
        let deadline = Instant::now() + LATE_VOTES;
        while posted().count() < self.world && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
        let calls: Vec<(usize, [u64; WORDS])> = posted().collect();
        let votes = |call| calls.iter().filter(|(_, other)| *other == call).count();
        let most = calls.iter().map(|(_, call)| votes(*call)).max();
        let right = calls.iter().find(|(_, call)| Some(votes(*call)) == most);
        let (other, expected) = right.copied().unwrap_or((0, [0; WORDS]));
        let odd = calls.iter().find(|(_, call)| *call != expected);
        let rank = odd.map_or(0, |(rank, _)| *rank);
        Error::CallMismatch {
            rank,
            theirs: self.call(rank, number),
            other,
            expected: self.call(other, number),
            call: number,
        }
    }

    /// The call `number` of `rank`, in words.
    fn call(&self, rank: usize, number: u64) -> String {
        let words = match self.slot(rank, number).read(number) {
            Some([MESSAGES, ..]) => self.block().message_calls[rank]
                .read(number)
                .map(|words| String::from_utf8_lossy(&words).into_owned()),
            words => words.map(describe),
        };
        words.unwrap_or_else(|| format!("its call {number}"))
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

    /// Operation `epoch` of this rank, in words.
    pub fn call_of(&self, epoch: Epoch) -> String {
        let number = self.number_of(epoch);
        number.map_or_else(
            || "an operation".into(),
            |number| self.call(self.rank, number),
        )
    }

    /// What this rank waits for in operation `epoch`, in words: the call, and what a peer has not done.
    pub fn describe(&self, epoch: Epoch, awaited: Awaited) -> String {
        let (call, what) = (self.call_of(epoch), awaited.describe(self.rank));
        format!("{call}: rank {} {what}", awaited.peer())
    }

    /// Notes why this rank was refused what would have been its call `number`. Two threads must not call this at once.
    pub fn note_refusal(&self, number: u64, error: &Error) {
        let mut refused = self.refused();
        let count = refused.get(&number).unwrap_or(&0) + 1;
        refused.insert(number, count);
        // Nobody waits in a call from that long ago.
        refused.retain(|of, _| of + POSTS > number);
        drop(refused);
        let mut bytes = [now_ms(), count].map(u64::to_le_bytes).concat();
        bytes.extend(encode(error, NOTE_BYTES - bytes.len()));
        self.block().refusals[self.rank].write(number, &bytes);
    }

    fn refused(&self) -> MutexGuard<'_, BTreeMap<u64, u64>> {
        // A panic while it was held has not left it half-changed.
        self.refused.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that this rank makes its next call, whatever it was refused before. Two threads must not call this at
    /// once.
    pub fn withdraw_refusal(&self) {
        // Calls are numbered from 1.
        self.block().refusals[self.rank].write(0, &[]);
    }

    /// Why `rank` was refused its call `number`, if it has not made that call after all.
    fn refusal_of(&self, rank: usize, number: u64) -> Option<Refusal> {
        let bytes = self.block().refusals[rank].read(number)?;
        if self.has_begun(rank, number) {
            return None;
        }
        let (noted, bytes) = bytes.split_first_chunk::<8>()?;
        let (count, error) = bytes.split_first_chunk::<8>()?;
        let age = now_ms().saturating_sub(u64::from_le_bytes(*noted));
        Some(Refusal {
            error: json::error(error).ok()?,
            age: Duration::from_millis(age),
            count: u64::from_le_bytes(*count),
        })
    }

    /// The error of that refusal.
    pub fn refusal(&self, rank: usize, number: u64) -> Option<Error> {
        Some(self.refusal_of(rank, number)?.error)
    }

    /// Why some rank was refused its call `number`. `waited` is how long this rank has waited in that call.
    ///
    /// None until that, and the age of the refusal, reach [`Deadlines::correction`]: until then the other rank may
    /// still make the call.
    ///
    /// If this rank was refused the same call before, the other ranks may have been refused too, and may try again
    /// within [`Deadlines::another_try`]. Until then a refusal counts only if its rank was refused more often than this
    /// one.
    pub fn standing_refusal(
        &self,
        number: impl FnOnce() -> Option<u64>,
        waited: Duration,
        deadlines: &Deadlines,
    ) -> Option<Error> {
        let time = deadlines.correction();
        if waited < time {
            return None;
        }
        let number = number()?;
        let own = self.refused().get(&number).copied().unwrap_or(0);
        let mut refusals = (0..self.world).filter_map(|rank| self.refusal_of(rank, number));
        refusals
            .find(|refusal| {
                let may_try_again = refusal.count <= own && waited < deadlines.another_try();
                refusal.age >= time && !may_try_again
            })
            .map(|refusal| refusal.error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ranks::memfd::memfd;
    use crate::schedule::Agreed;

    fn ranks(world: usize) -> Vec<SharedState> {
        let fd = memfd(SharedState::BYTES).unwrap();
        (0..world)
            .map(|rank| {
                SharedState::new(
                    Mapping::shared(&fd, SharedState::BYTES).unwrap(),
                    rank,
                    world,
                )
            })
            .collect()
    }

    /// A call as ranks must agree on it.
    fn product(k: usize) -> Agreed {
        Agreed::new("all_gather_matmul", &format!("M = 4096, K = {k}, bf16"))
    }

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
        assert!(seen.contains("has no memory for 1 byte:"), "{seen}");
    }

    #[test]
    fn a_rank_that_leaves_says_why_if_it_knows() {
        let ranks = ranks(4);
        let got = Error::Capturing { rank: 0 };
        ranks[0].note_got(Some(&got));
        let other = Error::ProgramFailed {
            rank: 0,
            reason: "no such file".into(),
        };
        assert_eq!(ranks[0].program_failed(got.to_string()), got);
        assert_eq!(ranks[0].program_failed("no such file".into()), other);
        ranks[0].leave_with_what_it_got();
        ranks[1].note_got(Some(&got));
        ranks[1].note_got(None);
        ranks[1].leave_with_what_it_got();
        ranks[2].let_go();
        assert!(
            (0..4)
                .map(|rank| ranks[3].has_left(rank))
                .eq([true, true, true, false])
        );
        assert_eq!(ranks[3].why_left(0, None), Some(got));
        assert_eq!(ranks[3].why_left(1, None), None);
        std::thread::scope(|scope| {
            let asked = scope.spawn(|| ranks[3].why_left(2, None));
            ranks[2].end(Some(other.clone()));
            assert_eq!(asked.join().unwrap(), Some(other));
        });
    }

    #[test]
    fn a_rank_that_hands_its_group_on_has_not_left_when_its_function_ends() {
        let ranks = ranks(2);
        ranks[0].end(None);
        assert!(!ranks[1].has_left(0));
        ranks[0].let_go();
        assert!(ranks[1].has_left(0));
        // A busy machine may hold this thread up, but not each time.
        let is_quick = (0..20).any(|_| {
            let begin = Instant::now();
            assert_eq!(ranks[1].why_left(0, None), None);
            begin.elapsed() < FAREWELL
        });
        assert!(is_quick, "it has nothing more to say");
        // But a failed rank makes no more calls, whoever has the group.
        let reason = Error::Capturing { rank: 1 };
        ranks[1].end(Some(reason.clone()));
        assert_eq!(ranks[0].fault(), Some(reason));
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

    fn operation(agreed: &Agreed) -> PostedCall<'_> {
        PostedCall {
            agreed,
            matrices: &[2],
            traced: false,
            biased: false,
            residual: false,
        }
    }

    fn post(shared_state: &SharedState, number: u64, agreed: &Agreed) -> Result<()> {
        shared_state.post_operation(number, Epoch::FIRST, operation(agreed))
    }

    #[track_caller]
    fn assert_blamed(result: Result<()>, blamed: usize, right: usize) {
        match result {
            Err(Error::CallMismatch { rank, other, .. }) => {
                assert_eq!((rank, other), (blamed, right));
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_rank_that_calls_something_else_is_named() {
        let other = Agreed::new("gather", "M = 4096, K = 64, bf16");
        let ranks = ranks(3);
        post(&ranks[2], 1, &product(64)).unwrap();
        post(&ranks[0], 1, &product(64)).unwrap();
        assert_eq!(
            post(&ranks[1], 1, &other),
            Err(Error::CallMismatch {
                rank: 1,
                theirs: "gather(M = 4096, K = 64, bf16, sharded matrix 2)".into(),
                other: 0,
                expected: "all_gather_matmul(M = 4096, K = 64, bf16, sharded matrix 2)".into(),
                call: 1,
            })
        );
    }

    #[test]
    fn traced_calls_biased_ones_and_those_of_other_matrices_differ_and_a_long_text_is_cut() {
        let ranks = ranks(2);
        let long = Agreed::new("all_gather_matmul", &"rows, ".repeat(100));
        let call = operation(&long);
        ranks[0].post_operation(1, Epoch::FIRST, call).unwrap();
        let traced = PostedCall {
            traced: true,
            ..call
        };
        let biased = PostedCall {
            biased: true,
            ..call
        };
        let residual = PostedCall {
            residual: true,
            ..call
        };
        let other = PostedCall {
            matrices: &[0, 7],
            ..call
        };
        for (differs, word) in [
            (traced, "traced all_gather"),
            (biased, "with a bias)"),
            (residual, "with a residual)"),
            (other, "sharded matrix 0, sharded matrix 7)"),
        ] {
            assert!(differs.to_string().contains(word), "{differs}");
            assert!(differs.to_string().contains("rows, rows"), "{differs}");
            assert!(differs.to_string().contains('…'), "{differs}");
            assert_blamed(ranks[1].post_operation(1, Epoch::FIRST, differs), 1, 0);
        }
        // Only the end differs, for which the post has no room.
        let longer = Agreed::new("all_gather_matmul", &"rows, ".repeat(101));
        assert_blamed(post(&ranks[1], 1, &longer), 1, 0);
    }

    #[test]
    fn the_odd_one_is_named_also_when_it_came_first_and_in_a_tie_the_lowest_is_right() {
        let other = product(32);
        let ranks = ranks(3);
        post(&ranks[1], 1, &other).unwrap();
        // Rank 2 has not called.
        assert_blamed(post(&ranks[0], 1, &product(64)), 1, 0);
        assert_blamed(post(&ranks[2], 1, &other), 0, 1);
    }

    #[test]
    fn exchanges_and_operations_are_one_sequence() {
        let ranks = ranks(2);
        ranks[0].post_messages(1, 7, "barrier()").unwrap();
        ranks[1].post_messages(1, 7, "barrier()").unwrap();
        post(&ranks[0], 2, &product(64)).unwrap();
        assert_eq!(
            ranks[1].post_messages(2, 7, "barrier()"),
            Err(Error::CallMismatch {
                rank: 1,
                theirs: "barrier()".into(),
                other: 0,
                expected: "all_gather_matmul(M = 4096, K = 64, bf16, sharded matrix 2)".into(),
                call: 2,
            })
        );
        ranks[0].post_messages(3, 7, "barrier()").unwrap();
        assert_blamed(ranks[1].post_messages(3, 8, "another()"), 1, 0);
    }

    #[test]
    fn a_rank_cannot_overwrite_what_a_slower_one_still_needs() {
        let ranks = ranks(2);
        for number in 1..=POSTS {
            assert_eq!(ranks[0].may_post(number), Ok(()));
            post(&ranks[0], number, &product(64)).unwrap();
        }
        assert_eq!(ranks[0].may_post(POSTS + 1), Err(1));
        post(&ranks[1], 1, &product(64)).unwrap();
        let too_early = ranks[0].may_post(POSTS + 1);
        assert_eq!(too_early, Err(1), "the slot after it is needed");
        for number in 2..=POSTS {
            post(&ranks[1], number, &product(64)).unwrap();
            assert_eq!(ranks[0].may_post(POSTS + 1), Ok(()));
        }
        // A rank that is ahead is no reason to wait.
        for number in POSTS + 1..2 * POSTS {
            assert_eq!(ranks[1].may_post(number), Ok(()));
            post(&ranks[1], number, &product(64)).unwrap();
            assert_eq!(ranks[0].may_post(POSTS + 1), Ok(()));
        }
        assert_eq!(ranks[1].may_post(2 * POSTS), Err(0));
    }

    #[test]
    fn a_refusal_stands_until_its_rank_makes_the_call() {
        const WAITED: Duration = Duration::from_secs(1);
        // A rank has half of this to make its call after all. That is longer than a busy machine delays this test.
        const TIMEOUT: Duration = Duration::from_secs(1);
        let ranks = ranks(2);
        let error = |value| Error::Limit {
            rank: Some(1),
            call: "matmul".into(),
            what: "N".into(),
            value,
            min: 1,
            max: 9,
        };
        post(&ranks[1], 1, &product(64)).unwrap();
        ranks[1].note_refusal(2, &error(10));
        ranks[1].note_refusal(2, &error(11));
        assert_eq!(ranks[0].refusal(1, 2), Some(error(11)));
        assert_eq!(ranks[0].refusal(1, 1), None);
        assert_eq!(ranks[0].refusal(1, 3), None);
        assert_eq!(ranks[0].refusal(0, 2), None);

        let deadlines = Deadlines::new(Duration::ZERO, Some(TIMEOUT));
        let standing =
            |number, waited| ranks[0].standing_refusal(|| Some(number), waited, &deadlines);
        assert_eq!(standing(2, WAITED), None, "it was refused only now");
        std::thread::sleep(TIMEOUT);
        assert_eq!(standing(2, WAITED), Some(error(11)));
        assert_eq!(standing(2, TIMEOUT / 4), None, "nobody has waited long");
        assert_eq!(standing(1, WAITED), None);

        post(&ranks[1], 2, &product(64)).unwrap();
        assert_eq!(ranks[0].refusal(1, 2), None);
        assert_eq!(standing(2, WAITED), None);
    }

    #[test]
    fn what_all_were_refused_counts_for_nobody_who_tries_again() {
        const TIMEOUT: Duration = Duration::from_millis(20);
        const WAITED: Duration = Duration::from_millis(15);
        let ranks = ranks(2);
        let error = Error::Capturing { rank: 1 };
        let refuse = |rank: usize, number| ranks[rank].note_refusal(number, &error);
        let standing = |number, waited| {
            std::thread::sleep(TIMEOUT);
            let deadlines = Deadlines::new(Duration::ZERO, Some(TIMEOUT));
            ranks[0].standing_refusal(|| Some(number), waited, &deadlines)
        };
        (0..2).for_each(|rank| refuse(rank, 1));
        assert_eq!(standing(1, WAITED), None);
        assert_eq!(standing(1, TIMEOUT), Some(error.clone()), "it did not come");
        // The other rank has tried again, and was refused again.
        refuse(1, 1);
        assert_eq!(standing(1, WAITED), Some(error.clone()));
        refuse(0, 1);
        assert_eq!(standing(1, WAITED), None);
        // The next call has a new count, and the note about this call stays.
        refuse(0, 2);
        assert_eq!(standing(1, WAITED), None);
        refuse(1, 2);
        refuse(1, 2);
        assert_eq!(standing(2, WAITED), Some(error.clone()));
    }

    #[test]
    fn a_refusal_is_withdrawn_when_its_rank_prepares_the_call() {
        const WAITED: Duration = Duration::from_secs(1);
        let ranks = ranks(2);
        let error = Error::Capturing { rank: 1 };
        let deadlines = Deadlines::new(Duration::ZERO, Some(Duration::ZERO));
        let standing = || ranks[0].standing_refusal(|| Some(1), WAITED, &deadlines);
        ranks[1].note_refusal(1, &error);
        assert_eq!(standing(), Some(error.clone()));
        ranks[1].withdraw_refusal();
        assert_eq!(ranks[0].refusal(1, 1), None);
        assert_eq!(standing(), None);
        ranks[1].note_refusal(1, &error);
        assert_eq!(standing(), Some(error));
    }

    #[test]
    fn a_wait_is_described_by_the_call_the_peer_and_what_that_has_not_done() {
        let ranks = ranks(2);
        let epoch = Epoch::from_raw(u32::MAX);
        ranks[1].post_messages(1, 7, "barrier()").unwrap();
        let product = product(64);
        ranks[1]
            .post_operation(2, epoch, operation(&product))
            .unwrap();
        ranks[1].post_messages(3, 7, "barrier()").unwrap();
        let says = |awaited, what: &str| {
            let call = "all_gather_matmul(M = 4096, K = 64, bf16, sharded matrix 2)";
            let expected = format!("{call}: rank 0 {what}");
            assert_eq!(ranks[1].describe(epoch, awaited), expected);
        };
        let (source, peer) = (0, 0);
        says(Awaited::Ready { source }, "has not begun it");
        let come = "has rows that have not come to rank 1";
        let (flag, pulled) = (3, false);
        says(
            Awaited::Chunk {
                source,
                flag,
                pulled,
            },
            come,
        );
        says(Awaited::LowLatency { source }, come);
        let moved = "has not moved all that it takes from rank 1, or brings it";
        says(Awaited::Done { peer }, moved);
        assert_eq!(ranks[1].call_of(epoch.next()), "an operation");
    }
}
