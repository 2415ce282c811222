//! The thread: it looks at the oldest operation that is not complete, and fails the group if that waits in vain.

use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::{GRACE, Running, Watch, lock};
use crate::backend::cuda::shared::lanes::EXPLAINED;
use crate::error::Kind;
use crate::protocol::epoch::Epoch;
use crate::ranks::deadlines::{Clock, Deadlines};

/// How often the thread looks.
const PERIOD: Duration = Duration::from_millis(2);
/// An operation has waited this long before the monitor asks whether all ranks have begun it.
const NOT_SHORT: Duration = Duration::from_millis(10);
/// How long an operation must have waited before the monitor checks whether peers have left. It is also the time
/// between two notes of which rank the operation waits for.
const LEFT_AFTER: Duration = Duration::from_millis(100);

impl Watch {
    pub(super) fn run(&self) {
        let mut last = (self.completed.read(), self.replayed.read());
        let mut clocks = (Clock::start(), Clock::start());
        let mut hurried = false;
        let mut released = false;
        let mut lanes_failed = None;
        let mut closing = lock(&self.closing);
        while !*closing {
            closing = self
                .closed
                .wait_timeout(closing, PERIOD)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
            let completed = self.completed.read();
            // An operation that the streams have not reached is not late, because the caller's own work may be in front
            // of it.
            let is_idle = completed == self.started.read();
            let hurry = !hurried && self.hurried.load(Ordering::Relaxed);
            if is_idle || completed != last.0 || hurry {
                last.0 = completed;
                clocks.0 = Clock::start();
                hurried |= hurry;
            }
            let replayed = self.replayed.read();
            if replayed.running == 0 || replayed != last.1 {
                last.1 = replayed;
                clocks.1 = Clock::start();
            }
            self.look();
            let next = Epoch::from_raw(completed).next();
            if clocks.0.total() >= NOT_SHORT {
                clocks.0.look(|| self.failures.all_have_begun(next));
            }
            let has_failed = self.failures.fault().is_some();
            self.device
                .note_awaited_rank(!is_idle && !clocks.0.has_begun() && !has_failed);
            // No one sees whether a rank has begun a replay.
            clocks.1.look(|| true);
            self.judge(Running::Live(next), &clocks.0);
            self.judge(Running::Replay(replayed.running), &clocks.1);
            // Release once, and again while work is on the device, because replays close graph words behind themselves.
            // (Not more often, because each release takes a turn of the GPU from other processes.)
            let is_busy = self.outstanding() > 0 || self.replayed.read().running > 0;
            self.watch_lanes(&mut lanes_failed);
            if self.failures.fault().is_some() && (is_busy || !released) {
                // If the words can't be written, the device has failed, and nothing helps.
                released = self.release().is_ok();
                if let Some(lanes) = &self.lanes {
                    lanes.abort(|| self.release_again());
                }
            }
        }
        self.device.note_awaited_rank(false);
    }

    /// Fails the group if a lane has failed under an operation. The monitor waits a while, because a rank that has
    /// died or left is named by whoever sees that. `since`: when the failure was seen.
    fn watch_lanes(&self, since: &mut Option<Instant>) {
        let failure = self.lanes.as_ref().and_then(|lanes| lanes.failure());
        let Some(failure) = failure.filter(|_| self.outstanding() > 0) else {
            *since = None;
            return;
        };
        if since.get_or_insert_with(Instant::now).elapsed() > EXPLAINED {
            self.failures.fail(failure);
        }
    }

    fn deadlines(&self) -> Deadlines {
        let deadlines = self.failures.deadlines;
        if self.hurried.load(Ordering::Relaxed) {
            Deadlines::new(deadlines.call(), Some(deadlines.call()))
        } else {
            deadlines
        }
    }

    /// Fails the group if an operation has waited too long, or waits in vain.
    fn judge(&self, running: Running, clock: &Clock) {
        let waited = clock.total();
        let refusal = || match running {
            Running::Live(epoch) => self.failures.standing_refusal(epoch, waited),
            Running::Replay(_) => None,
        };
        if let Some(passed) = self.deadlines().passed(clock, GRACE) {
            self.failures
                .fail(self.diagnose(running, passed, clock.waited()));
        } else if let Some(error) = refusal() {
            self.failures.fail(error);
        } else if waited > LEFT_AFTER {
            self.note(running, waited);
            if self.someone_has_left() {
                self.blame_the_one_who_left(running);
            }
        }
    }

    /// Notes now and then which rank an operation waits for. `waited`: for how long it has waited.
    ///
    /// The waiting ranks then report that rank as the cause.
    fn note(&self, running: Running, waited: Duration) {
        let mut noted = lock(&self.noted);
        if noted.elapsed() < LEFT_AFTER || self.waits_for_its_caller(running) {
            return;
        }
        let time = noted.elapsed().min(waited);
        *noted = Instant::now();
        if let Ok(Some((awaited, ..))) = self.missing(running) {
            let what = || self.describe(running, awaited);
            self.failures.note_wait(awaited.peer(), time, what);
        }
    }

    fn someone_has_left(&self) -> bool {
        (0..self.world).any(|rank| self.failures.has_left(rank))
    }

    /// Fails the group if an operation waits for a rank that has left.
    fn blame_the_one_who_left(&self, running: Running) {
        let Ok(Some((awaited, expected, seen))) = self.missing(running) else {
            return;
        };
        // A rank that left may have done its part first, so the words are read again after it has left. This rank's own
        // part may end while they are read, so both reads must be the same.
        if !self.failures.has_left(awaited.peer()) {
            return;
        }
        let again = self.missing(running);
        if matches!(again, Ok(Some(again)) if again == (awaited, expected, seen)) {
            let epoch = match running {
                Running::Live(epoch) => Some(epoch),
                Running::Replay(_) => None,
            };
            let reason = self.failures.why_left(awaited.peer(), epoch);
            self.failures.fail(reason.unwrap_or_else(|| {
                Kind::RankLeft {
                    waiting: self.failures.rank,
                    what: self.describe(running, awaited),
                }
                .on(awaited.peer())
            }));
        }
    }
}
