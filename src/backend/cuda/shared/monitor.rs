//! The thread that notices operations that are stuck on the device, says why, and releases the device.
//!
//! Kernels have a deadline of their own in graphs alone, because they cannot see whether all ranks have begun a call.
//! Streams have none: they wait for a word until it is written. So this thread watches the oldest operation that is not
//! complete. Once the group has failed, whoever noticed it, the thread writes the words that this rank's kernels and
//! streams wait for, so that they run through.

mod release;
mod report;
mod watch;

use std::mem::offset_of;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use self::release::Satisfying;
use super::lanes::Lanes;
use super::words::{NetworkTurns, OwnWords, Snapshot, Waits};
use crate::backend::cuda::abi::GemmeshFault;
use crate::backend::cuda::driver::{Device, DevicePtr, Pinned, Priority, Stream};
use crate::backend::cuda::gpu::streams::LANES;
use crate::error::{Error, Result};
use crate::protocol::epoch::Epoch;
use crate::ranks::failure_reporter::FailureReporter;
use crate::ranks::members::Members;

/// How much longer than the deadline the thread waits. A kernel in a graph has the deadline itself and knows more. A
/// call that a function waits for gives up at the deadline, and then the function may return. It is also how long a
/// copy of words may take.
const GRACE: Duration = Duration::from_millis(500);

/// The most operations that are on the device at a time.
pub const OUTSTANDING: usize = 64;

/// The thread, and what the device reports to it.
#[derive(Debug)]
pub struct Monitor {
    watch: Arc<Watch>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Watch {
    failures: FailureReporter,
    world: usize,
    device: Arc<Device>,
    /// Words in the control block, which outlives the thread.
    own: OwnWords,
    /// Written by kernels.
    fault: Pinned<GemmeshFault>,
    /// The last operation that streams have reached, or whose kernel runs.
    started: Pinned<u32>,
    /// The last operation that is complete, or whose rows have all arrived. Written by streams and kernels.
    completed: Pinned<u32>,
    /// The progress of captured operations. Written by streams and a kernel.
    replayed: Pinned<Replayed>,
    /// By the number in `replayed`, less one: a captured operation's name, and which ranks it waits for.
    recordings: Mutex<Vec<(String, Waits)>>,
    /// A copy of this rank's words, for a report.
    snapshot: Pinned<Snapshot>,
    /// The values that release the device.
    satisfying: Pinned<Satisfying>,
    /// The last operation that was begun.
    begun: AtomicU32,
    /// Whether a rank that has not come has only as long as a call.
    hurried: AtomicBool,
    /// Whether a callback is running that is to enqueue a part of the latest operation.
    calling: AtomicBool,
    /// By epoch, modulo the array's length.
    waits: Mutex<[OperationWaits; OUTSTANDING]>,
    /// When it was last noted which rank an operation waits for.
    noted: Mutex<Instant>,
    /// The lanes to other hosts, which are aborted once the group has failed.
    lanes: Option<Arc<Lanes>>,
    /// Held while `satisfying` is written.
    releases: Mutex<()>,
    /// For the words that release the device. Nothing else stands in front of them.
    rescue: Stream,
    closing: Mutex<bool>,
    closed: Condvar,
}

// SAFETY: plain words and pointers, for which zero is valid.
unsafe impl bytemuck::Zeroable for GemmeshFault {}

/// A rank's progress in captured operations. Streams write the same values at each replay, so they can't count.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Replayed {
    /// The number of the recording that runs. 0 between replays.
    running: u32,
    /// How many replays have begun. A kernel counts them.
    begun: u32,
}

// SAFETY: plain words, for which zero is valid.
unsafe impl bytemuck::Zeroable for Replayed {}

/// An operation that has not ended.
#[derive(Clone, Copy, Debug)]
enum Running {
    /// Identified by its epoch.
    Live(Epoch),
    /// Identified by the number of its recording.
    Replay(u32),
}

impl Monitor {
    pub fn start(
        device: &Arc<Device>,
        members: &Members,
        own: OwnWords,
        first: Epoch,
        lanes: Option<Arc<Lanes>>,
    ) -> Result<Monitor> {
        let before = first.previous().raw();
        let watch = Arc::new(Watch {
            failures: members.failure_reporter(),
            world: members.world,
            device: device.clone(),
            own,
            fault: Pinned::zeroed(device)?,
            started: Pinned::zeroed(device)?,
            completed: Pinned::zeroed(device)?,
            replayed: Pinned::zeroed(device)?,
            recordings: Mutex::default(),
            snapshot: Pinned::zeroed(device)?,
            satisfying: Pinned::zeroed(device)?,
            begun: AtomicU32::new(before),
            hurried: AtomicBool::new(false),
            calling: AtomicBool::new(false),
            lanes,
            waits: Mutex::new(std::array::from_fn(|_| OperationWaits::of(no_flags()))),
            noted: Mutex::new(Instant::now()),
            releases: Mutex::new(()),
            rescue: Stream::new(device, Priority::Rescue)?,
            closing: Mutex::new(false),
            closed: Condvar::new(),
        });
        watch.started.write(before);
        watch.completed.write(before);
        let thread = std::thread::Builder::new()
            .name(format!("gemmesh-monitor-{}", members.rank))
            .spawn({
                let watch = watch.clone();
                move || watch.run()
            })
            .map_err(Error::not_started(members.rank, "a thread"))?;
        Ok(Monitor {
            watch,
            thread: Some(thread),
        })
    }

    /// Notes that an operation is about to be enqueued.
    pub fn begin(&self, epoch: Epoch, waits: OperationWaits) {
        lock(&self.watch.waits)[epoch.raw() as usize % OUTSTANDING] = waits;
        self.watch.begun.store(epoch.raw(), Ordering::Release);
    }

    /// Notes that an operation `name` is being captured. Returns the number of its recording.
    pub fn record(&self, name: &str, waits: &Waits) -> u32 {
        let mut recordings = lock(&self.watch.recordings);
        let known = recordings
            .iter()
            .position(|(its, w)| (&**its, w) == (name, waits));
        let index = known.unwrap_or_else(|| {
            recordings.push((name.into(), waits.clone()));
            recordings.len() - 1
        });
        index as u32 + 1
    }

    /// Where streams write the number of the recording that runs, and 0 when it has ended.
    pub fn running(&self) -> DevicePtr {
        self.watch.replayed.ptr() + offset_of!(Replayed, running) as u64
    }

    /// Where the count of replays that have begun is written.
    pub fn replays(&self) -> DevicePtr {
        self.watch.replayed.ptr() + offset_of!(Replayed, begun) as u64
    }

    /// Runs `call`, which calls a function of the caller's. The latest operation can't go on before this function
    /// returns.
    pub fn calling<R>(&self, call: impl FnOnce() -> R) -> R {
        self.watch.calling.store(true, Ordering::Relaxed);
        let result = call();
        self.watch.calling.store(false, Ordering::Relaxed);
        result
    }

    /// Numbers that change when operations end or replays begin.
    pub fn progress(&self) -> (u32, u32) {
        (self.outstanding(), self.watch.replayed.read().begun)
    }

    /// How many operations were begun and are not complete.
    pub fn outstanding(&self) -> u32 {
        self.watch.outstanding()
    }

    /// True while the operation that runs waits for a rank that has not begun it.
    pub fn awaits_a_rank(&self) -> bool {
        self.watch.device.awaits_a_rank()
    }

    /// From now on a rank that has not come is waited for no longer than a call may take.
    pub fn hurry(&self) {
        self.watch.hurried.store(true, Ordering::Relaxed);
    }

    /// Where streams and kernels write the last operation that has started.
    pub fn started(&self) -> DevicePtr {
        self.watch.started.ptr()
    }

    /// Where streams and kernels write the last operation that is complete.
    pub fn completed(&self) -> DevicePtr {
        self.watch.completed.ptr()
    }

    /// Where a kernel writes that it has given up.
    pub fn fault(&self) -> DevicePtr {
        self.watch.fault.ptr()
    }

    /// Reports the fault that a kernel has written, if there is one.
    pub fn look(&self) {
        self.watch.look();
    }

    /// Lets everything that waits on the device run through, now and later.
    ///
    /// Replays run through only once, because they close graph words behind themselves.
    pub fn release(&self) {
        // If the words can't be written, the device has failed, and nothing helps.
        let _ = self.watch.release();
    }

    /// The same for what has been put on the device since.
    pub fn release_again(&self) {
        self.watch.release_again();
    }

    /// Ends the thread, and waits until the words that it has sent have arrived.
    ///
    /// Returns true if they have: then the memory to which they go may be unmapped. False if that can't be known. The
    /// device uses the second value as long as an operation runs.
    pub fn stop(&mut self) -> (bool, impl Send + use<>) {
        self.end();
        let begin = Instant::now();
        let mut arrived = false;
        while !arrived && begin.elapsed() < GRACE {
            arrived = self.watch.rescue.is_over();
            std::thread::yield_now();
        }
        (arrived, self.watch.clone())
    }

    fn end(&mut self) {
        *lock(&self.watch.closing) = true;
        self.watch.closed.notify_all();
        if let Some(thread) = self.thread.take() {
            // It can't panic, and there is nothing to do if it did.
            let _ = thread.join();
        }
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        self.end();
    }
}

/// What an operation waits for.
#[derive(Clone, Debug)]
pub struct OperationWaits {
    pub words: Waits,
    pub turns: Arc<NetworkTurns>,
    /// By lane: its turns before the operation.
    pub before: [u32; LANES],
}

impl OperationWaits {
    /// Those of an operation that uses no lanes.
    fn of(words: Waits) -> OperationWaits {
        OperationWaits {
            words,
            turns: Arc::default(),
            before: [0; LANES],
        }
    }
}

/// The waits of a kernel of which only `ready` of its peers is known.
fn no_flags() -> Waits {
    Waits::Kernel {
        ready: u64::MAX,
        sources: Arc::default(),
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    // No code that can panic runs while one is held.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Watch {
    fn outstanding(&self) -> u32 {
        let begun = self.begun.load(Ordering::Acquire);
        begun.wrapping_sub(self.completed.read())
    }
}
