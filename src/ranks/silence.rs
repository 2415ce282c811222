//! How long something has not happened, as far as this process has watched.

use std::time::{Duration, Instant};

/// The most of the time between two looks that counts as watched.
///
/// A thread that has not run for longer, or a machine that stood still, has not seen what happened meanwhile.
const MOST_OF_A_LOOK: Duration = Duration::from_millis(250);

/// How long that is.
#[derive(Debug)]
pub struct Silence {
    watched: Duration,
    looked: Instant,
}

impl Silence {
    pub fn new() -> Silence {
        Silence {
            watched: Duration::ZERO,
            looked: Instant::now(),
        }
    }

    /// A silence of `watched` until now.
    #[cfg(test)]
    pub fn of(watched: Duration) -> Silence {
        Silence {
            watched,
            ..Silence::new()
        }
    }

    /// Notes a look at `now`. `goes_on`: true if it has not happened since the look before.
    pub fn look(&mut self, goes_on: bool, now: Instant) {
        let between = now.duration_since(self.looked);
        self.looked = now;
        self.watched = if goes_on {
            self.watched + between.min(MOST_OF_A_LOOK)
        } else {
            Duration::ZERO
        };
    }

    /// How long it was until the last look.
    pub fn watched(&self) -> Duration {
        self.watched
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_seldom_runs_counts_a_part_of_each_gap() {
        let mut silence = Silence::new();
        let begin = silence.looked;
        let mut look = |seconds, goes_on| {
            silence.look(goes_on, begin + Duration::from_secs(seconds));
            silence.watched()
        };
        assert_eq!(look(10, false), Duration::ZERO);
        // One gap says nothing, however long it is.
        assert_eq!(look(3600, true), MOST_OF_A_LOOK);
        assert_eq!(look(3610, true), 2 * MOST_OF_A_LOOK);
        assert_eq!(look(3620, false), Duration::ZERO);
        assert_eq!(look(3630, true), MOST_OF_A_LOOK);
    }
}
