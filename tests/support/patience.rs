//! How long tests wait, on a machine as busy as it may be.

use std::collections::VecDeque;
use std::io::{Write, stderr};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

/// Deadlines are right on a machine that takes this many times longer than an idle one.
const ROOM: f64 = 3.0;
/// The most that a deadline grows, and one that passes in a test.
const MOST: f64 = 30.0;
const MOST_PASSED: f64 = 5.0;
/// The variable by which a test tells its ranks how long they wait. So all wait alike.
pub const STRETCH: &str = "GEMMESH_TEST_STRETCH";
/// How many of the latest looks count.
const LOOKS: usize = 5;

/// `time`, on a machine as busy as this process has found it. For the most that something may take.
pub fn stretched(time: Duration) -> Duration {
    time.mul_f64(meter().most())
}

/// `time`, on a machine as busy as it is when a test begins. For deadlines that pass in a test: its ranks have the
/// same.
///
/// A test calls it once, because it grows. What has passed such a deadline has waited for `time` at least.
pub fn agreed(time: Duration) -> Duration {
    let times = told().unwrap_or_else(|| meter().most()).min(MOST_PASSED);
    // Errors say whole milliseconds, which are compared with it.
    Duration::from_millis(time.mul_f64(times).as_millis() as u64)
}

/// What a test tells its ranks.
pub fn stretch() -> String {
    told().unwrap_or_else(|| meter().most()).to_string()
}

/// What this process, a rank, was told.
fn told() -> Option<f64> {
    static TOLD: OnceLock<Option<f64>> = OnceLock::new();
    *TOLD.get_or_init(|| std::env::var(STRETCH).ok()?.parse().ok())
}

/// Runs a test again, a few times at most, if it fails while the machine is busy, and says so.
///
/// The library has times of its own: how fresh a wait must be to count, how long rank 0 tells late ranks why there is no
/// group, how long a launcher lets ranks end. Whoever does not run for so long is blamed, or hears nothing.
pub fn again_if_busy(test: impl Fn()) {
    const TIMES: usize = 5;
    // A rank fails as its test has it fail.
    if told().is_some() {
        return test();
    }
    for left in (0..TIMES).rev() {
        let (begin, meter) = (Instant::now(), meter());
        let Err(panic) = catch_unwind(AssertUnwindSafe(&test)) else {
            return;
        };
        if left == 0 || !meter.was_busy_since(begin) {
            resume_unwind(panic);
        }
        // libtest keeps what is printed to itself, unless a test fails.
        let thread = std::thread::current();
        let name = thread.name().unwrap_or("a test");
        let _ = writeln!(stderr(), "{name} failed on a busy machine, and runs again");
    }
}

/// A thread that looks now and then how busy the machine is.
struct Meter {
    /// The most that it has found, as bits.
    most: AtomicU64,
    /// When it last found the machine busy.
    busy: Mutex<Option<Instant>>,
}

fn meter() -> &'static Meter {
    static METER: OnceLock<Meter> = OnceLock::new();
    let mut is_new = false;
    let meter = METER.get_or_init(|| {
        is_new = true;
        let first =
            told().unwrap_or_else(|| stretch_of(&[(); LOOKS].map(|()| Look::take()).into()));
        Meter {
            most: AtomicU64::new(first.to_bits()),
            busy: Mutex::default(),
        }
    });
    if is_new {
        // Where there can't be one more thread, the first looks count.
        let thread = std::thread::Builder::new().name("patience".into());
        let _ = thread.stack_size(128 << 10).spawn(|| meter.run());
    }
    meter
}

impl Meter {
    fn most(&self) -> f64 {
        f64::from_bits(self.most.load(Ordering::Relaxed))
    }

    fn was_busy_since(&self, begin: Instant) -> bool {
        self.busy.lock().unwrap().is_some_and(|busy| busy > begin)
    }

    fn run(&self) {
        let mut looks: VecDeque<Look> = VecDeque::with_capacity(LOOKS + 1);
        loop {
            looks.push_back(Look::take());
            if looks.len() > LOOKS {
                looks.pop_front();
                let stretch = stretch_of(&looks);
                if stretch > 1.0 {
                    *self.busy.lock().unwrap() = Some(Instant::now());
                }
                let most = self.most().max(stretch);
                self.most.store(most.to_bits(), Ordering::Relaxed);
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

/// By how much deadlines grow if looks took so long.
fn stretch_of(looks: &VecDeque<Look>) -> f64 {
    let sum = |time: fn(&Look) -> Duration| looks.iter().map(time).sum::<Duration>();
    let times = sum(|look| look.took).as_secs_f64() / sum(|look| look.worked).as_secs_f64();
    (times / ROOM).clamp(1.0, MOST)
}

/// A nap and some work.
struct Look {
    /// The processor's time.
    worked: Duration,
    /// From when the nap should have ended.
    took: Duration,
}

impl Look {
    fn take() -> Look {
        const NAP: Duration = Duration::from_millis(5);
        // About as long as a thread runs until it is the next one's turn.
        const WORK: Duration = Duration::from_millis(4);
        let due = Instant::now() + NAP;
        std::thread::sleep(NAP);
        let begin = processor_time();
        loop {
            let worked = processor_time() - begin;
            if worked >= WORK {
                let took = due.elapsed();
                return Look { worked, took };
            }
        }
    }
}

/// Of this thread.
fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
