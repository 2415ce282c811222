//! A rank's right to report failures, for the threads of its backend.

use std::sync::Arc;
use std::time::Duration;

use super::deadlines::Deadlines;
use super::shared_state::SharedState;
use super::wait_times::WaitTimes;
use crate::error::{Deadline, Error};
use crate::protocol::epoch::Epoch;

/// A share in a rank's right to report failures, for a thread of its backend.
#[derive(Debug)]
pub struct FailureReporter {
    pub rank: usize,
    pub deadlines: Deadlines,
    pub(super) shared: Arc<SharedState>,
    pub(super) waits: Arc<WaitTimes>,
}

impl FailureReporter {
    /// As [`SharedState::fail`].
    pub fn fail(&self, error: Error) -> Error {
        self.shared.fail(error)
    }

    /// As [`SharedState::fault`].
    pub fn fault(&self) -> Option<Error> {
        self.shared.fault()
    }

    /// Notes that this rank waits for `peer`, and has waited for `time` since the last note. It has to be called a few
    /// times a second during a wait. `what` is the call and what `peer` has not done.
    pub fn note_wait(&self, peer: usize, time: Duration, what: impl FnOnce() -> String) {
        self.shared.note_wait(peer, what);
        self.waits.add(peer, time);
    }

    /// The error if this rank has waited for `peer` this long in vain. `passed` is the deadline and its length. `what`
    /// is the call and what `peer` has not done.
    pub fn timed_out(
        &self,
        passed: (Deadline, Duration),
        peer: usize,
        waited: Duration,
        what: String,
    ) -> Error {
        self.shared.timed_out(passed, peer, waited, what)
    }

    /// True if every rank has begun operation `epoch`, which this rank has begun.
    pub fn all_have_begun(&self, epoch: Epoch) -> bool {
        let number = self.shared.number_of(epoch);
        number.is_none_or(|number| self.shared.all_have_begun(number))
    }

    /// The rank of the job that is this rank of the group.
    pub fn job_rank(&self, rank: usize) -> usize {
        self.shared.job_rank(rank)
    }

    /// True if `rank` has left the group in order.
    pub fn has_left(&self, rank: usize) -> bool {
        self.shared.has_left(rank)
    }

    /// Operation `epoch` of this rank, in words.
    pub fn call_of(&self, epoch: Epoch) -> String {
        self.shared.call_of(epoch)
    }

    /// Why `rank`, which has left, does not come to operation `epoch`, or to any operation, if it has said so.
    pub fn why_left(&self, rank: usize, epoch: Option<Epoch>) -> Option<Error> {
        let number = epoch.and_then(|epoch| self.shared.number_of(epoch));
        self.shared.why_left(rank, number)
    }

    /// Why `rank` was refused operation `epoch`, if it was.
    pub fn refusal(&self, rank: usize, epoch: Epoch) -> Option<Error> {
        let number = self.shared.number_of(epoch)?;
        self.shared.refusal(rank, number)
    }

    /// Why some rank was refused operation `epoch`. None until this rank has waited there for so long that the other
    /// had time to make the call after all.
    pub fn standing_refusal(&self, epoch: Epoch, waited: Duration) -> Option<Error> {
        let number = || self.shared.number_of(epoch);
        self.shared
            .standing_refusal(number, waited, &self.deadlines)
    }
}
