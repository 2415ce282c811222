//! How long a rank waits for others.

use std::cell::Cell;
use std::time::{Duration, Instant};

use crate::error::Deadline;

/// A longer time is cut to this one, which can still be added to a time.
const LONGEST: Duration = Duration::from_secs(1 << 32);
/// The deadline of the rendezvous, unless there is one for arrivals. A process that was never started cannot be seen
/// to have ended.
const RENDEZVOUS: Duration = Duration::from_secs(600);
/// A rank that was refused a call has this long to make it after all, from when a different rank waits for it there.
const CORRECTION: Duration = Duration::from_millis(500);

/// A group's deadlines.
#[derive(Clone, Copy, Debug)]
pub struct Deadlines {
    /// The longest wait in a call that all ranks have begun.
    call: Duration,
    /// The longest wait for a rank that has not begun the call. None: as long as the rank lives.
    arrival: Option<Duration>,
}

impl Deadlines {
    pub fn new(call: Duration, arrival: Option<Duration>) -> Deadlines {
        Deadlines {
            call: call.min(LONGEST),
            arrival: arrival.map(|arrival| arrival.min(LONGEST)),
        }
    }

    /// The longest wait in a call that all ranks have begun.
    pub fn call(&self) -> Duration {
        self.call
    }

    /// The longest wait for a rank that has not begun the call, if it has a limit.
    pub fn arrival(&self) -> Option<Duration> {
        self.arrival
    }

    /// The longest wait for processes that have not come to the rendezvous.
    pub fn rendezvous(&self) -> Duration {
        self.arrival.unwrap_or(RENDEZVOUS)
    }

    /// How long a rank that was refused a call has to make it after all.
    pub fn correction(&self) -> Duration {
        self.arrival
            .map_or(CORRECTION, |arrival| CORRECTION.min(arrival / 2))
    }

    /// How long it has if the rank that waits for it was refused the call as often.
    ///
    /// Then all ranks may be about to try again. Without a limit for arrivals they have as long as a call may take.
    pub fn another_try(&self) -> Duration {
        self.arrival.unwrap_or(self.call).max(self.correction())
    }

    /// The deadline that a wait has passed by more than `grace`, and its length.
    pub fn passed(&self, clock: &Clock, grace: Duration) -> Option<(Deadline, Duration)> {
        let (deadline, longest) = match clock.has_begun() {
            true => (Deadline::Call, self.call),
            false => (Deadline::Arrival, self.arrival?),
        };
        (clock.waited() >= longest + grace).then_some((deadline, longest))
    }
}

/// The clock of a wait.
///
/// It starts again when all ranks have begun the call, because then a different deadline holds.
#[derive(Debug)]
pub struct Clock {
    since: Instant,
    begun: Cell<Option<Instant>>,
}

impl Clock {
    pub fn start() -> Clock {
        Clock {
            since: Instant::now(),
            begun: Cell::new(None),
        }
    }

    /// How long the wait has lasted, whoever was waited for.
    pub fn total(&self) -> Duration {
        self.since.elapsed()
    }

    /// How long the wait has lasted towards the deadline that holds now.
    pub fn waited(&self) -> Duration {
        self.begun.get().unwrap_or(self.since).elapsed()
    }

    /// True if all ranks have been seen to have begun the call.
    pub fn has_begun(&self) -> bool {
        self.begun.get().is_some()
    }

    /// Starts the clock again, if that has not happened yet and `all_have_begun`.
    pub fn look(&self, all_have_begun: impl FnOnce() -> bool) {
        if self.begun.get().is_none() && all_have_begun() {
            self.begun.set(Some(Instant::now()));
        }
    }
}
