//! How long a rank waits for others.

use std::cell::Cell;
use std::time::{Duration, Instant};

use crate::error::Deadline;

/// A longer time is cut to this one, which can still be added to a time.
const LONGEST: Duration = Duration::from_secs(1 << 32);
/// The deadline of the rendezvous, unless there is one for arrivals. A process that was never started cannot be seen
/// to have ended.
const RENDEZVOUS: Duration = Duration::from_secs(600);
/// A host that is silent for this long is lost, unless another time is given.
const HOST: Duration = Duration::from_millis(1250);
/// A shorter time is taken for this one. Hosts say twice as often that they are there.
const SHORTEST_HOST: Duration = Duration::from_millis(500);
/// A rank that was refused a call has this long to make it after all, from when a different rank waits for it there.
const CORRECTION: Duration = Duration::from_millis(500);

/// A group's deadlines.
#[derive(Clone, Copy, Debug)]
pub struct Deadlines {
    /// The longest wait in a call that all ranks have begun.
    call: Duration,
    /// The longest wait for a rank that has not begun the call. None: as long as the rank lives.
    arrival: Option<Duration>,
    /// How long the system of another host may acknowledge nothing.
    host: Duration,
}

impl Deadlines {
    pub fn new(call: Duration, arrival: Option<Duration>) -> Deadlines {
        Deadlines {
            call: call.min(LONGEST),
            arrival: arrival.map(|arrival| arrival.min(LONGEST)),
            host: HOST,
        }
    }

    /// With another time after which a silent host is lost, if there is one.
    pub fn with_host(self, host: Option<Duration>) -> Deadlines {
        let host = host.unwrap_or(self.host).clamp(SHORTEST_HOST, LONGEST);
        Deadlines { host, ..self }
    }

    /// The longest wait in a call that all ranks have begun.
    pub fn call(&self) -> Duration {
        self.call
    }

    /// The longest wait for a rank that has not begun the call, if it has a limit.
    pub fn arrival(&self) -> Option<Duration> {
        self.arrival
    }

    /// The time after which a host is lost whose system acknowledges nothing.
    pub fn host(&self) -> Duration {
        self.host
    }

    /// The longest wait for processes that have not come to the rendezvous.
    pub fn rendezvous(&self) -> Duration {
        self.arrival.unwrap_or(RENDEZVOUS)
    }

    /// While ranks that are threads of one process open their group: all have been started, so only a busy machine makes
    /// one late.
    pub fn of_opening(&self) -> Deadlines {
        let arrival = self.rendezvous().max(RENDEZVOUS);
        Deadlines::new(self.call.max(RENDEZVOUS), Some(arrival))
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
        let (deadline, longest) = if clock.has_begun() {
            (Deadline::Call, self.call)
        } else {
            (Deadline::Arrival, self.arrival?)
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

#[cfg(test)]
mod tests {
    use super::*;

    const MOMENT: Duration = Duration::from_millis(20);
    const LONG: Duration = Duration::from_secs(3600);

    #[test]
    fn a_rank_that_has_not_come_has_no_deadline_unless_one_is_given() {
        let clock = Clock::start();
        clock.look(|| false);
        let passed = |arrival| Deadlines::new(Duration::ZERO, arrival).passed(&clock, MOMENT);
        std::thread::sleep(MOMENT);
        assert_eq!(passed(None), None);
        assert_eq!(passed(Some(LONG)), None);
        let arrival = Some((Deadline::Arrival, Duration::ZERO));
        assert_eq!(passed(Some(Duration::ZERO)), arrival);
    }

    #[test]
    fn the_clock_starts_again_once_when_all_have_begun() {
        let clock = Clock::start();
        std::thread::sleep(MOMENT);
        clock.look(|| true);
        let waited = clock.waited();
        assert!(clock.total() >= waited + MOMENT);
        std::thread::sleep(MOMENT);
        clock.look(|| true);
        assert!(clock.waited() >= MOMENT);
        let call = |call| Deadlines::new(call, Some(Duration::ZERO)).passed(&clock, MOMENT);
        assert_eq!(call(LONG), None);
        assert_eq!(call(Duration::ZERO), Some((Deadline::Call, Duration::ZERO)));
    }

    #[test]
    fn a_refused_rank_has_a_limited_time_also_without_a_deadline_for_arrivals() {
        let times = |call, arrival| {
            let deadlines = Deadlines::new(call, arrival);
            (deadlines.correction(), deadlines.another_try())
        };
        assert_eq!(times(LONG, None), (CORRECTION, LONG));
        assert_eq!(times(MOMENT, None), (CORRECTION, CORRECTION));
        assert_eq!(times(LONG, Some(MOMENT)), (MOMENT / 2, MOMENT));
        let rendezvous = |arrival| Deadlines::new(MOMENT, arrival).rendezvous();
        assert_eq!(rendezvous(None), RENDEZVOUS);
        assert_eq!(rendezvous(Some(LONG)), LONG);
        let host = |host| Deadlines::new(MOMENT, None).with_host(host).host();
        let times = [None, Some(Duration::ZERO), Some(LONG)];
        assert_eq!(times.map(host), [HOST, SHORTEST_HOST, LONG]);
    }
}
