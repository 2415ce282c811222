//! The block of host memory that the ranks of a group share, on every backend. Each host has one, for all ranks.
//!
//! It holds the first failure, and for each rank whether it has left, which rank it waits for, its latest calls, and
//! why it was refused a call. All of it is atomics over zeroed memory. So if a rank dies at any moment, it stays
//! readable.

mod blame;
mod calls;
mod leaders;
mod mirrored;
mod refusals;
#[cfg(test)]
mod tests;

pub use self::blame::{NotedWords, PartOf};
pub use self::calls::LATE_VOTES;
pub use self::mirrored::Known;

use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use self::leaders::Leaders;
use super::call::{FIXED, WORDS};
use super::family::{GotError, GroupFamily};
use super::last_panic;
use super::naming::Naming;
use super::reports::ReportSender;
use crate::call::SourceLine;
use crate::error::{Error, Kind, Result};
use crate::json;
use crate::process::Process;
use crate::protocol::board::{Note, Post, Report};
use crate::protocol::epoch::Epoch;
use crate::protocol::flag::Flag;
use crate::protocol::waits::{LastWait, PartWait};
use crate::ranks::memfd::Mapping;
use crate::schedule::Hosts;
use crate::schedule::layout::MAX_WORLD;

// Miri checks the whole block at each borrow, so there it is smaller.

/// How many calls the fastest rank may be ahead of the slowest.
const POSTS: u64 = if cfg!(miri) { 4 } else { 256 };
pub const FAULT_BYTES: usize = if cfg!(miri) { 512 } else { 4096 };
/// A call in words, whatever the number of ranks; or why it was refused.
pub const NOTE_BYTES: usize = if cfg!(miri) { 256 } else { 2048 };

/// A part of the group and its call in words.
const PART_BYTES: usize = if cfg!(miri) { 64 } else { 512 };

/// A rank that waits notes it more often than this, even on a busy machine.
const FRESH: Duration = Duration::from_millis(250);
/// How long a rank waits for rank 0's host to say which failure was the first.
const VERDICT: Duration = Duration::from_millis(500);
/// If a rank has let go of the group, the ranks that wait for it give it this long to say why.
const FAREWELL: Duration = Duration::from_secs(1);

#[repr(C)]
struct StateBlock {
    /// The first failure, as JSON.
    fault: Report<FAULT_BYTES>,
    /// On hosts other than rank 0's: the first failure of this host's ranks. The first that comes to rank 0's host is the
    /// group's.
    proposal: Report<FAULT_BYTES>,
    /// [`LEFT`] or [`GONE`] for each rank that has left in order.
    left: [Flag; MAX_WORLD],
    /// The rank that each rank waits for. For reports only.
    waits: [LastWait; MAX_WORLD],
    /// The rank that each rank waits for in a part of this group, with the call. For reports only.
    part_waits: [PartWait<PART_BYTES>; MAX_WORLD],
    /// If there are several hosts: when the mirror of each leader was last known to run, in ms. For reports only.
    running: [AtomicU64; MAX_WORLD],
    /// A rank's latest exchange, in words.
    message_calls: [Note<NOTE_BYTES>; MAX_WORLD],
    /// Why each rank was last refused a call: the time in ms as 8 bytes, the number of refusals of that call as 8
    /// bytes, and the error as JSON.
    refusals: [Note<NOTE_BYTES>; MAX_WORLD],
    /// Why each rank that is gone has left, as JSON, under the number [`GIVEN`].
    reasons: [Note<NOTE_BYTES>; MAX_WORLD],
    posts: [[Post<WORDS, FIXED>; POSTS as usize]; MAX_WORLD],
    /// If there are several hosts: the latest call of each rank of this host that has gone to the others.
    mirrored: [AtomicU64; MAX_WORLD],
}

/// The rank has completed all that it began and let go of the group. But its thread goes on, and may say why.
const LEFT: Epoch = Epoch::FIRST;
/// The rank has left, and has nothing more to say.
const GONE: Epoch = Epoch::from_raw(2);
/// What a group without a name is called in groups that were split from it.
const WHOLE: &str = "world";
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
    hosts: Hosts,
    /// What this rank has seen of leaders' mirrors.
    leaders: Mutex<Leaders>,
    /// By call, how often this rank was refused it.
    refused: Mutex<BTreeMap<u64, u64>>,
    /// Where this rank's program makes its latest calls.
    places: Mutex<OwnCalls>,
    /// How many of the program's collective calls this rank has made. A call has one number or several.
    made: AtomicU64,
    departure: Mutex<Departure>,
    family: Arc<GroupFamily>,
    /// If this group was split from another one.
    part_of: Option<PartOf>,
    /// What the group is called, once its ranks have agreed on it.
    naming: OnceLock<Naming>,
    /// Sends the first failure to the launcher, if it wants to know it.
    launcher: Option<ReportSender>,
    /// The rank's process. A fork of it tells nothing.
    process: Process,
}

/// This rank's latest calls.
type OwnCalls = Box<[OwnCall]>;

/// A call of this rank.
#[derive(Clone, Copy, Debug, Default)]
struct OwnCall {
    /// Its number. The first is 1.
    number: u64,
    place: SourceLine,
    /// How many collective calls the program had made before.
    made: u64,
}

/// What is known of why this rank leaves.
#[derive(Debug, Default)]
struct Departure {
    /// The last error that the rank got, unless it has made a call since.
    got: Option<Error>,
    /// True if the rank is a thread and its function has ended.
    has_ended: bool,
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
            hosts: Hosts::default(),
            leaders: Mutex::default(),
            refused: Mutex::default(),
            places: Mutex::new([OwnCall::default(); POSTS as usize].into()),
            made: AtomicU64::new(0),
            departure: Mutex::default(),
            family: Arc::default(),
            part_of: None,
            naming: OnceLock::new(),
            launcher: None,
            process: Process::this(),
        }
    }

    /// The number of ranks.
    pub fn world(&self) -> usize {
        self.world
    }

    /// Tells the launcher of the group's first failure, before this rank learns of it.
    pub fn with_launcher(self, launcher: Option<ReportSender>) -> SharedState {
        SharedState { launcher, ..self }
    }

    /// Of a group whose ranks run on `hosts`.
    pub fn on_hosts(self, hosts: Hosts) -> SharedState {
        let leaders = Mutex::new(Leaders::of(&hosts, self.world));
        SharedState {
            hosts,
            leaders,
            ..self
        }
    }

    /// Which ranks share a host.
    pub fn hosts(&self) -> &Hosts {
        &self.hosts
    }

    /// As a part of the group that `whole` is this rank's view of, which has these `ranks` of it.
    pub fn split_from(self, whole: &Arc<SharedState>, ranks: &[usize]) -> SharedState {
        SharedState {
            family: whole.family.clone(),
            part_of: Some(PartOf::new(whole, ranks)),
            ..self
        }
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

    /// Does nothing before the ranks of a part of the job know which ranks of the job they are, or if they are not all of
    /// one job.
    fn tell_launcher(&self, first: &Error) {
        let naming = self.naming().filter(|naming| naming.is_of_one_job);
        let (Some(launcher), Some(naming)) = (&self.launcher, naming) else {
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

    /// The rank of the job that is this rank of the group.
    pub fn job_rank(&self, rank: usize) -> usize {
        let job_ranks = self.naming().map(|naming| &naming.job_ranks);
        let of_job = job_ranks.and_then(|ranks| ranks.get(rank).copied());
        of_job.unwrap_or(rank)
    }

    #[allow(unsafe_code)]
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
        if self.is_apart() {
            self.propose(&bytes);
        }
        if self.block().fault.write(self.rank, &bytes) {
            self.tell_launcher(&error);
            error
        } else {
            self.fault().unwrap_or(error)
        }
    }

    /// True if rank 0 runs on another host.
    fn is_apart(&self) -> bool {
        self.hosts.host_of(self.rank) != 0
    }

    /// Tells rank 0's host of a failure, and waits for a moment until it says which was the first.
    fn propose(&self, failure: &[u8]) {
        self.block().proposal.write(self.rank, failure);
        let deadline = Instant::now() + VERDICT;
        while self.reporter().is_none() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_micros(200));
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
            self.fail(
                Kind::RankPanicked {
                    message: last_panic::message(),
                }
                .on(self.rank),
            );
        }
    }

    /// The rank that reported the group's first failure, if there is one.
    pub fn reporter(&self) -> Option<usize> {
        self.block().fault.reporter()
    }

    /// The group's first failure. Costs one load until there is one.
    pub fn fault(&self) -> Option<Error> {
        let by = self.reporter()?;
        let fault = self.placed(self.named(self.read_failure(&self.block().fault, by)));
        self.tell_launcher(&fault);
        Some(fault)
    }

    /// The failure that `by` has reported, or is about to.
    fn read_failure(&self, report: &Report<FAULT_BYTES>, by: usize) -> Error {
        // The reporter writes a few hundred bytes. If it was killed while it wrote, that is the failure.
        let deadline = Instant::now() + Duration::from_millis(500);
        loop {
            if let Some(bytes) = report.read() {
                return json::error(&bytes).unwrap_or_else(|e| {
                    Kind::Message {
                        reason: format!("its report of a failure: {e}"),
                    }
                    .on(by)
                });
            }
            if Instant::now() > deadline {
                return Kind::RankLost {
                    noticed_by: self.rank,
                }
                .on(by);
            }
            std::thread::yield_now();
        }
    }

    /// Notes an error from a call that this rank may make again. None says that a later call has worked.
    pub fn note_got(&self, error: Option<&Error>) {
        if self.refuse_fork().is_err() {
            return;
        }
        let error = error.cloned().map(|error| self.named(error));
        if let Some(error) = &error {
            self.note_given(error);
            // A failure of the group itself is no refusal.
            if self.reporter().is_none() {
                self.family.forget();
            }
        }
        self.departure().got = error;
    }

    /// Notes an error of this group that the program gets, so that it is known if the program passes it on.
    pub fn note_given(&self, error: &Error) {
        self.family.note(self.got(error));
    }

    /// This rank's error, also in the rank numbering of its parent groups.
    fn got(&self, error: &Error) -> GotError {
        let got = error.clone().first();
        // Ranks of a group without a name have the numbers of the job.
        let job_ranks: Vec<usize> = (0..self.world).collect();
        let named = got.clone().of_group(WHOLE, &job_ranks);
        GotError { got, named }
    }

    /// Notes that this rank's program has got the group's failure.
    pub fn note_got_failure(&self, failure: &Error) {
        if self.refuse_fork().is_err() {
            return;
        }
        self.family.note_failure(self.got(failure));
    }

    /// Notes that this rank makes a collective call, whatever it got before.
    pub fn note_next_call(&self) {
        self.note_got(None);
        self.family.forget();
    }

    fn departure(&self) -> MutexGuard<'_, Departure> {
        // Each change is one assignment.
        let departure = self.departure.lock();
        departure.unwrap_or_else(PoisonError::into_inner)
    }

    /// The failure of this rank's program with this reason. If the program passes on an error that it got from a group of
    /// this family, it is that error.
    pub fn program_failed(&self, reason: String) -> Error {
        let is_named = self.naming().is_some_and(|naming| naming.name.is_some());
        match self.family.told_by(&reason, self.job_rank(self.rank)) {
            Some(error) if is_named => error.named,
            // A group without a name is the whole one.
            Some(error) => error.got,
            None => Kind::ProgramFailed {
                function_of: None,
                reason,
            }
            .on(self.rank),
        }
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

    /// Says that this rank, a process, leaves in order. The reason is the last thing that it got from the group, or from
    /// a group of the same family that has failed, if that was an error.
    pub fn leave_with_what_it_got(&self) {
        if self.refuse_fork().is_err() {
            return;
        }
        let got = self.departure().got.clone();
        self.leave(self.family.latest_failure().or(got).as_ref());
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
}
