//! The thread that sees when operations on the device get stuck, says why, and sets the device free.
//!
//! Kernels have deadlines of their own. Streams have none: a wait for a word lasts until the word is written. So
//! this thread looks at the oldest operation that is not complete; and once the group has failed, whoever
//! noticed it, it writes what this rank's kernels and streams wait for, so that they run through.

use std::mem::offset_of;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering, fence};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::abi::{
    GEMMESH_FAULT_RECORDED, GEMMESH_GROUP_FAILED, GEMMESH_LANDED, GEMMESH_READY, GemmeshFault,
    GemmeshPushEpoch,
};
use super::driver::{Device, DevicePtr, Pinned, Priority, Stream, StreamMemOp};
use super::memory::{FlagLine, OwnWords, Snapshot, Waits};
use crate::error::{Error, Result};
use crate::ranks::members::{FailureReporter, Members};
use crate::schedule::{Awaited, Epoch, MAX_BLOCKS, MAX_FLAGS};

/// How often the thread looks.
const PERIOD: Duration = Duration::from_millis(2);
/// How much longer than the kernels' own deadline it waits: they know more.
const GRACE: Duration = Duration::from_millis(500);
/// How long an operation must have waited before it is asked whether its peers are still there.
const LEFT_AFTER: Duration = Duration::from_millis(100);

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
    /// In the control block, which outlives the thread.
    own: OwnWords,
    /// Written by kernels.
    fault: Pinned<GemmeshFault>,
    /// The last operation that streams have come to, or whose kernel runs.
    started: Pinned<u32>,
    /// The last operation that is complete, or whose rows have all come; written by streams and kernels.
    completed: Pinned<u32>,
    /// A copy of this rank's words, for a report.
    snapshot: Pinned<Snapshot>,
    /// The last operation that was begun.
    begun: AtomicU32,
    /// A function of the caller's is to put a part of the latest operation on the device.
    calling: AtomicBool,
    /// By epoch, modulo their number: for whom the operation waits.
    waits: Mutex<[Waits; OUTSTANDING]>,
    /// For the words that set the device free, behind nothing else.
    rescue: Stream,
    closing: Mutex<bool>,
    closed: Condvar,
}

// SAFETY: plain words and pointers, for which zero is valid.
unsafe impl bytemuck::Zeroable for GemmeshFault {}

impl Monitor {
    pub fn start(
        device: &Arc<Device>,
        members: &Members,
        own: OwnWords,
        first: Epoch,
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
            snapshot: Pinned::zeroed(device)?,
            begun: AtomicU32::new(before),
            calling: AtomicBool::new(false),
            waits: Mutex::new([Waits::Kernel; OUTSTANDING]),
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
            .map_err(Error::system(members.rank, "start a thread"))?;
        Ok(Monitor {
            watch,
            thread: Some(thread),
        })
    }

    /// An operation is about to be put on the device.
    pub fn begin(&self, epoch: Epoch, waits: Waits) {
        lock(&self.watch.waits)[epoch.raw() as usize % OUTSTANDING] = waits;
        self.watch.begun.store(epoch.raw(), Ordering::Release);
    }

    /// Runs what calls a function of the caller's, without which the operation that was begun last does not go on.
    pub fn calling<R>(&self, call: impl FnOnce() -> R) -> R {
        self.watch.calling.store(true, Ordering::Relaxed);
        let result = call();
        self.watch.calling.store(false, Ordering::Relaxed);
        result
    }

    /// Operations that were begun and are not complete.
    pub fn outstanding(&self) -> u32 {
        let begun = self.watch.begun.load(Ordering::Acquire);
        begun.wrapping_sub(self.watch.completed.read())
    }

    /// Where it is written that streams have come to an operation.
    pub fn started(&self) -> DevicePtr {
        self.watch.started.ptr()
    }

    /// Where it is written that an operation is complete.
    pub fn completed(&self) -> DevicePtr {
        self.watch.completed.ptr()
    }

    /// Where a kernel writes that it has given up.
    pub fn fault(&self) -> DevicePtr {
        self.watch.fault.ptr()
    }

    /// Reports what a kernel has written, if it has.
    pub fn look(&self) {
        self.watch.look();
    }

    /// Lets whatever waits on the device run through, now and later.
    pub fn release(&self) {
        // What can't be written can't be helped; the device itself has failed then.
        let _ = self.watch.release();
    }

    /// Ends the thread, and waits until the words that it has sent have arrived: what they are written to may be unmapped
    /// then. False if that can't be known. What is returned is used by the device as long as an operation runs.
    pub fn stop(&mut self) -> (bool, impl Send + use<>) {
        self.end();
        let begin = Instant::now();
        let mut arrived = false;
        while !arrived && begin.elapsed() < GRACE {
            // A device that has failed writes nothing any more.
            arrived = self.watch.rescue.is_idle().unwrap_or(true);
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

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    // No code that can panic runs while one is held.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Watch {
    fn run(&self) {
        let mut last = self.completed.read();
        let mut since = Instant::now();
        let mut closing = lock(&self.closing);
        while !*closing {
            closing = self
                .closed
                .wait_timeout(closing, PERIOD)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
            let completed = self.completed.read();
            // What a stream has not come to yet is not late: the caller's own work may be in front of it.
            if completed == self.started.read() || completed != last {
                last = completed;
                since = Instant::now();
            }
            self.look();
            let epoch = Epoch::from_raw(completed).next();
            if since.elapsed() > self.failures.timeout + GRACE {
                self.failures.fail(self.diagnose(epoch, since.elapsed()));
            } else if let Some(error) = self.failures.standing_refusal(epoch, since.elapsed()) {
                self.failures.fail(error);
            } else if since.elapsed() > LEFT_AFTER && self.someone_has_left() {
                self.blame_the_one_who_left(epoch);
            }
            if self.failures.fault().is_some() {
                // What can't be written can't be helped; the device itself has failed then.
                let _ = self.release();
            }
        }
    }

    fn waits_of(&self, epoch: Epoch) -> Waits {
        lock(&self.waits)[epoch.raw() as usize % OUTSTANDING]
    }

    fn someone_has_left(&self) -> bool {
        (0..self.world).any(|rank| self.failures.has_left(rank))
    }

    /// If operation `epoch` waits for a rank that has left, it waits in vain.
    fn blame_the_one_who_left(&self, epoch: Epoch) {
        let Ok(Some((awaited, expected, seen))) = self.missing(epoch) else {
            return;
        };
        // A rank that left had done its part; so look at the words after that. And this rank's own part may be ending at this
        // moment, while they are read: they must be the same twice.
        if !self.failures.has_left(awaited.peer()) {
            return;
        }
        let again = self.missing(epoch);
        if matches!(again, Ok(Some(again)) if again == (awaited, expected, seen)) {
            let refusal = self.failures.refusal(awaited.peer(), epoch);
            self.failures
                .fail(refusal.unwrap_or_else(|| Error::RankLeft {
                    rank: awaited.peer(),
                    waiting: self.failures.rank,
                    what: self.failures.describe(epoch, awaited, expected, seen),
                }));
        }
    }

    fn look(&self) {
        // SAFETY: the record lives as long as `self`. The kernel marks it after it has filled it; so once the mark is
        // seen, and the fence passed, the rest is final.
        let state = unsafe { (&raw const (*self.fault.as_ptr()).state).read_volatile() };
        if state != GEMMESH_FAULT_RECORDED || self.failures.fault().is_some() {
            return;
        }
        fence(Ordering::Acquire);
        let fault = self.fault.read();
        let epoch = Epoch::from_raw(fault.expected);
        let waited = Duration::from_nanos(fault.waited_ns);
        let source = fault.peer as usize;
        let noted = match fault.flag {
            GEMMESH_READY => Awaited::Ready { source },
            GEMMESH_LANDED => Awaited::Landed { source },
            flag => Awaited::Chunk {
                source,
                flag: flag as usize,
                pulled: fault.pushed == 0,
            },
        };
        // Rows that come late may be those of a rank that waits itself, for another's word: the one that has not given
        // its word is to blame.
        let (rank, world) = (self.failures.rank, self.world);
        let waits = match fault.pushed {
            0 => self.waits_of(epoch),
            _ => Waits::Kernel,
        };
        let missing = self.read_words().ok();
        let missing = missing.and_then(|words| words.missing(rank, world, epoch, waits));
        let (awaited, seen) = match missing {
            Some((awaited @ Awaited::Ready { .. }, seen)) => (awaited, seen),
            _ => (noted, fault.seen),
        };
        // Flags of pushes count operations of their own.
        let operation = match fault.pushed {
            0 => epoch,
            _ => Epoch::from_raw(self.completed.read()).next(),
        };
        self.failures
            .fail(self.late(operation, awaited, epoch, seen, waited));
    }

    fn late(
        &self,
        operation: Epoch,
        awaited: Awaited,
        expected: Epoch,
        seen: u32,
        waited: Duration,
    ) -> Error {
        Error::Timeout {
            rank: awaited.peer(),
            waiting: self.failures.rank,
            what: self.failures.describe(operation, awaited, expected, seen),
            waited_ms: waited.as_millis() as u64,
        }
    }

    /// Says what operation `epoch` waits for.
    fn diagnose(&self, epoch: Epoch, waited: Duration) -> Error {
        let rank = self.failures.rank;
        let unknown = |reason: String| Error::Timeout {
            rank,
            waiting: rank,
            what: format!("operation {} on its own GPU ({reason})", epoch.raw()),
            waited_ms: waited.as_millis() as u64,
        };
        if self.calling.load(Ordering::Relaxed) && epoch.raw() == self.begun.load(Ordering::Acquire)
        {
            return unknown("its caller's function has not returned".into());
        }
        match self.missing(epoch) {
            Ok(Some((awaited, expected, seen))) => {
                self.late(epoch, awaited, expected, seen, waited)
            }
            Ok(None) if self.waits_of(epoch) == Waits::Kernel => {
                unknown("its kernel does not run, or does not end".into())
            }
            Ok(None) => unknown("all peers have done their part".into()),
            Err(error) => unknown(error.to_string()),
        }
    }

    /// The first word that operation `epoch` waits for and that has not come, the epoch that it should have, and its value.
    fn missing(&self, epoch: Epoch) -> Result<Option<(Awaited, Epoch, u32)>> {
        let words = self.read_words()?;
        let waits = self.waits_of(epoch);
        let expected = match (waits, words.pushed_epoch()) {
            (Waits::Streams { .. }, _) => epoch,
            (Waits::Kernel, Some(expected)) => expected,
            // No kernel waits.
            (Waits::Kernel, None) => return Ok(None),
        };
        if epoch.reached_by(self.completed.read()) {
            return Ok(None);
        }
        let missing = words.missing(self.failures.rank, self.world, expected, waits);
        Ok(missing.map(|(awaited, seen)| (awaited, expected, seen)))
    }

    fn read_words(&self) -> Result<Snapshot> {
        let _bound = self.device.bind()?;
        let snapshot = self.snapshot.ptr();
        let at = |offset: usize| snapshot + offset as u64;
        let line = size_of::<FlagLine>();
        // SAFETY: the control block and the snapshot live as long as this thread, which waits for the copies below
        // or, if the device does not do them, never reads it.
        unsafe {
            self.rescue.copy(snapshot, self.own.ready, 2 * line)?;
            let mailbox = at(offset_of!(Snapshot, mailbox));
            self.rescue.copy(mailbox, self.own.mailbox, line)?;
            let push_epoch = at(offset_of!(Snapshot, push_epoch));
            let length = size_of::<GemmeshPushEpoch>();
            self.rescue.copy(push_epoch, self.own.push_epoch, length)?;
        }
        let deadline = Instant::now() + GRACE;
        while !self.rescue.is_idle()? {
            if Instant::now() > deadline {
                return Err(Error::System {
                    rank: Some(self.failures.rank),
                    action: "read its flags".into(),
                    reason: "its GPU does not copy them".into(),
                });
            }
            std::thread::sleep(Duration::from_micros(100));
        }
        Ok(self.snapshot.read())
    }

    /// Lets this rank's kernels and streams run through. Their results are void: the group has failed.
    ///
    /// It is safe that this writes flags that are others' to write: nobody uses what they guard any more.
    fn release(&self) -> Result<()> {
        let last = self.begun.load(Ordering::Acquire);
        let _bound = self.device.bind()?;
        let mut words = vec![
            StreamMemOp::Write(self.own.abort, GEMMESH_GROUP_FAILED),
            StreamMemOp::Write(
                self.own.push_epoch + offset_of!(GemmeshPushEpoch, gate) as u64,
                1,
            ),
        ];
        for peer in 0..self.world as u64 {
            words.push(StreamMemOp::Write(self.own.ready + 4 * peer, last));
            words.push(StreamMemOp::Write(self.own.done + 4 * peer, last));
        }
        // SAFETY: the control block lives as long as this thread.
        unsafe {
            self.rescue.words(&words)?;
            self.rescue.fill(self.own.chunk, last, MAX_FLAGS)?;
            // Of a product whose kernel was not launched.
            self.rescue.fill(self.own.stored, 1, MAX_BLOCKS)
        }
    }
}
