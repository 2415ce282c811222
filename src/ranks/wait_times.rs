//! How long this rank has waited for each of the other ranks.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The times by rank. Threads of this rank that wait for the same rank at the same time count once.
#[derive(Debug)]
pub struct WaitTimes(Vec<Mutex<Waited>>);

#[derive(Debug, Default)]
struct Waited {
    /// Waits that have ended.
    before: Duration,
    /// The number of threads that wait now, and when the first of them began.
    now: Option<(usize, Instant)>,
}

impl WaitTimes {
    pub fn new(world: usize) -> WaitTimes {
        WaitTimes((0..world).map(|_| Mutex::default()).collect())
    }

    /// Notes that a thread waits for `rank` as long as the returned value lives.
    pub fn begin(&self, rank: usize) -> WaitingThread<'_> {
        let mut waited = self.of(rank);
        let (threads, since) = waited.now.unwrap_or((0, Instant::now()));
        waited.now = Some((threads + 1, since));
        WaitingThread { times: self, rank }
    }

    /// Adds a time for which this rank has waited for `rank`.
    #[cfg(feature = "cuda")]
    pub fn add(&self, rank: usize, time: Duration) {
        self.of(rank).before += time;
    }

    /// The times by rank, with the waits that go on.
    pub fn all(&self) -> Vec<Duration> {
        let ranks = 0..self.0.len();
        let time = |rank| {
            let Waited { before, now } = &*self.of(rank);
            *before + now.map_or(Duration::ZERO, |(_, since)| since.elapsed())
        };
        ranks.map(time).collect()
    }

    fn of(&self, rank: usize) -> MutexGuard<'_, Waited> {
        // A panic while it was held has not left it half-changed.
        self.0[rank].lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A thread that waits.
pub struct WaitingThread<'a> {
    times: &'a WaitTimes,
    rank: usize,
}

impl Drop for WaitingThread<'_> {
    fn drop(&mut self) {
        let mut waited = self.times.of(self.rank);
        match waited.now {
            Some((threads, since)) if threads > 1 => waited.now = Some((threads - 1, since)),
            Some((_, since)) => {
                waited.before += since.elapsed();
                waited.now = None;
            }
            None => (),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_that_wait_together_wait_once() {
        const WAIT: Duration = Duration::from_millis(40);
        let times = WaitTimes::new(3);
        let begin = Instant::now();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let _waiting = times.begin(1);
                    std::thread::sleep(WAIT);
                });
            }
        });
        let [zero, one, two] = times.all()[..] else {
            panic!("three ranks");
        };
        assert!(one >= WAIT && one <= begin.elapsed(), "{one:?}");
        assert_eq!((zero, two), (Duration::ZERO, Duration::ZERO));
        let _waiting = times.begin(1);
        std::thread::sleep(WAIT);
        assert!(times.all()[1] >= one + WAIT, "a wait that goes on counts");
    }
}
