//! The thread that notices operations that are stuck on the device, says why, and releases the device.
//!
//! Kernels have a deadline of their own in graphs alone, because they cannot see whether all ranks have begun a call.
//! Streams have none: they wait for a word until it is written. So this thread watches the oldest operation that is not
//! complete. Once the group has failed, whoever noticed it, the thread writes the words that this rank's kernels and
//! streams wait for, so that they run through.

use std::mem::offset_of;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering, fence};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::words::{FlagLine, OwnWords, Snapshot, Waits};
use crate::backend::cuda::abi::{
    GEMMESH_FAULT_RECORDED, GEMMESH_GROUP_FAILED, GEMMESH_LOW_LATENCY, GEMMESH_READY, GemmeshFault,
    GemmeshMailbox, GemmeshPushEpoch,
};
use crate::backend::cuda::driver::{Device, DevicePtr, Pinned, Priority, Stream, StreamMemOp};
use crate::error::{Deadline, Error, Result};
use crate::protocol::epoch::Epoch;
use crate::protocol::flag::Awaited;
use crate::ranks::deadlines::{Clock, Deadlines};
use crate::ranks::failure_reporter::FailureReporter;
use crate::ranks::members::Members;
use crate::schedule::{MAX_BLOCKS, MAX_FLAGS};

/// How often the thread looks.
const PERIOD: Duration = Duration::from_millis(2);
/// How much longer than the deadline it waits. A kernel in a graph has the deadline itself and knows more. A call that a
/// function waits for gives up at the deadline, and then the function may return. It is also how long a copy of words
/// may take.
const GRACE: Duration = Duration::from_millis(500);
/// An operation has waited this long before the monitor asks whether all ranks have begun it.
const NOT_SHORT: Duration = Duration::from_millis(10);
/// How long an operation must have waited before the monitor checks whether peers have left. It is also the time
/// between two notes of which rank the operation waits for.
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
    /// By epoch, modulo the array's length: which ranks the operation waits for.
    waits: Mutex<[Waits; OUTSTANDING]>,
    /// When it was last noted which rank an operation waits for.
    noted: Mutex<Instant>,
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

/// Values that copies bring to the words that streams wait for.
///
/// (A fill will not do, because it is a kernel, which may have to wait for the kernel that it is to release.)
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Satisfying {
    chunks: [u32; MAX_FLAGS],
    open: [u32; MAX_BLOCKS],
}

// SAFETY: plain words, for which zero is valid.
unsafe impl bytemuck::Zeroable for Satisfying {}

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
            waits: Mutex::new(std::array::from_fn(|_| no_flags())),
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
    pub fn begin(&self, epoch: Epoch, waits: &Waits) {
        lock(&self.watch.waits)[epoch.raw() as usize % OUTSTANDING] = waits.clone();
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

/// The waits of a kernel of which only `ready` of its peers is known.
fn no_flags() -> Waits {
    Waits::Kernel {
        sources: Arc::default(),
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    // No code that can panic runs while one is held.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Watch {
    fn run(&self) {
        let mut last = (self.completed.read(), self.replayed.read());
        let mut clocks = (Clock::start(), Clock::start());
        let mut hurried = false;
        let mut released = false;
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
            // Nobody sees whether a rank has begun a replay.
            clocks.1.look(|| true);
            self.judge(Running::Live(next), &clocks.0);
            self.judge(Running::Replay(replayed.running), &clocks.1);
            // Release once, and again while work is on the device, because replays close graph words behind themselves.
            // (Not more often, because each release takes a turn of the GPU from other processes.)
            let is_busy = self.outstanding() > 0 || self.replayed.read().running > 0;
            if self.failures.fault().is_some() && (is_busy || !released) {
                // If the words can't be written, the device has failed, and nothing helps.
                released = self.release().is_ok();
            }
        }
        self.device.note_awaited_rank(false);
    }

    fn outstanding(&self) -> u32 {
        let begun = self.begun.load(Ordering::Acquire);
        begun.wrapping_sub(self.completed.read())
    }

    fn deadlines(&self) -> Deadlines {
        let deadlines = self.failures.deadlines;
        match self.hurried.load(Ordering::Relaxed) {
            true => Deadlines::new(deadlines.call(), Some(deadlines.call())),
            false => deadlines,
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
    /// Ranks that wait for this rank then blame that one instead.
    fn note(&self, running: Running, waited: Duration) {
        let mut noted = lock(&self.noted);
        if noted.elapsed() < LEFT_AFTER || self.waits_for_its_caller(running) {
            return;
        }
        let time = noted.elapsed().min(waited);
        *noted = Instant::now();
        if let Ok(Some((awaited, ..))) = self.missing(running) {
            self.failures.note_wait(awaited.peer(), time);
        }
    }

    /// Whether the operation waits for work that a callback on this rank has not enqueued yet.
    fn waits_for_its_caller(&self, running: Running) -> bool {
        let latest = Epoch::from_raw(self.begun.load(Ordering::Acquire));
        let is_latest = matches!(running, Running::Live(epoch) if epoch == latest);
        is_latest && self.calling.load(Ordering::Relaxed)
    }

    /// The name of a captured operation, and which ranks it waits for.
    fn recording(&self, number: u32) -> Option<(String, Waits)> {
        let index = (number as usize).checked_sub(1)?;
        lock(&self.recordings).get(index).cloned()
    }

    fn waits_of(&self, epoch: Epoch) -> Waits {
        lock(&self.waits)[epoch.raw() as usize % OUTSTANDING].clone()
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
            self.failures
                .fail(reason.unwrap_or_else(|| Error::RankLeft {
                    rank: awaited.peer(),
                    waiting: self.failures.rank,
                    what: self.describe(running, awaited),
                }));
        }
    }

    /// The error with which `rank`, which an operation waits for, was refused that call, if it was.
    fn refusal(&self, running: Running, rank: usize) -> Option<Error> {
        match running {
            Running::Live(epoch) => self.failures.refusal(rank, epoch),
            Running::Replay(_) => None,
        }
    }

    fn look(&self) {
        // SAFETY: the record lives as long as `self`. The kernel writes the state after the rest. So once the state is
        // seen and the fence has passed, the rest is final.
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
            GEMMESH_LOW_LATENCY => Awaited::LowLatency { source },
            flag => Awaited::Chunk {
                source,
                flag: flag as usize,
                pulled: fault.pushed == 0,
            },
        };
        // The owner of late rows may be waiting for `ready` of a third rank. Then the rank whose `ready` is missing is
        // to blame.
        let (rank, world) = (self.failures.rank, self.world);
        let waits = match fault.pushed {
            0 => self.waits_of(epoch),
            _ => no_flags(),
        };
        let missing = self.read_words().ok();
        let missing = missing.and_then(|words| words.missing(rank, world, epoch, &waits));
        let awaited = match missing {
            Some((awaited @ Awaited::Ready { .. }, _)) => awaited,
            _ => noted,
        };
        // The record names the operation. Flags of pushes have a count of their own, and by now this kernel and those
        // behind it may have run through.
        let running = match fault.recording {
            0 => Running::Live(Epoch::from_raw(fault.operation)),
            recording => Running::Replay(recording),
        };
        let passed = (Deadline::Call, self.failures.deadlines.call());
        self.failures
            .fail(self.late(running, passed, awaited, waited));
    }

    /// The error if `awaited` has not come before the deadline that has `passed`, which is given with its length.
    fn late(
        &self,
        running: Running,
        passed: (Deadline, Duration),
        awaited: Awaited,
        waited: Duration,
    ) -> Error {
        let refusal = self.refusal(running, awaited.peer());
        refusal.unwrap_or_else(|| {
            let what = self.describe(running, awaited);
            self.failures
                .timed_out(passed, awaited.peer(), waited, what)
        })
    }

    /// What an operation waits for, in words.
    fn describe(&self, running: Running, awaited: Awaited) -> String {
        let what = awaited.describe(self.failures.rank);
        format!("{}: rank {} {what}", self.name(running), awaited.peer())
    }

    fn name(&self, running: Running) -> String {
        match running {
            Running::Live(epoch) => self.failures.call_of(epoch),
            Running::Replay(number) => {
                let recording = self.recording(number);
                let name = recording.map_or(String::new(), |(name, _)| name);
                format!("{name} in a graph")
            }
        }
    }

    /// The error of an operation that has waited too long. `passed` is the deadline and its length.
    fn diagnose(&self, running: Running, passed: (Deadline, Duration), waited: Duration) -> Error {
        let rank = self.failures.rank;
        let unknown = |reason: String| Error::Timeout {
            rank,
            waiting: rank,
            what: format!("{} on its own GPU ({reason})", self.name(running)),
            waited_ms: waited.as_millis() as u64,
            deadline: passed.0,
        };
        if self.waits_for_its_caller(running) {
            return unknown("its caller's function has not returned".into());
        }
        let by_kernel = |epoch| matches!(self.waits_of(epoch), Waits::Kernel { .. });
        match self.missing(running) {
            Ok(Some((awaited, ..))) => self.late(running, passed, awaited, waited),
            Ok(None) if matches!(running, Running::Live(epoch) if by_kernel(epoch)) => {
                unknown("its kernel does not run, or does not end".into())
            }
            Ok(None) => unknown("all peers have done their part".into()),
            Err(error) => unknown(error.to_string()),
        }
    }

    /// The first missing word of an operation, the epoch that it should have reached, and its value.
    fn missing(&self, running: Running) -> Result<Option<(Awaited, Epoch, u32)>> {
        let words = self.read_words()?;
        let (waits, expected, has_ended) = match running {
            Running::Live(epoch) => {
                let waits = self.waits_of(epoch);
                let expected = match (&waits, words.pushed_epoch()) {
                    (Waits::Kernel { .. }, Some(expected)) => expected,
                    // No kernel waits.
                    (Waits::Kernel { .. }, None) => return Ok(None),
                    _ => epoch,
                };
                let has_ended = epoch.reached_by(self.completed.read());
                (waits, expected, has_ended)
            }
            Running::Replay(number) => {
                let Some((_, waits)) = self.recording(number) else {
                    return Ok(None);
                };
                let has_ended = self.replayed.read().running != number;
                (waits, Epoch::OPEN, has_ended)
            }
        };
        if has_ended {
            return Ok(None);
        }
        let missing = words.missing(self.failures.rank, self.world, expected, &waits);
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
            self.rescue.copy(snapshot, self.own.flags.ready, 2 * line)?;
            let graph = at(offset_of!(Snapshot, graph_ready));
            self.rescue.copy(graph, self.own.graph.ready, 2 * line)?;
            let moved = at(offset_of!(Snapshot, moved));
            self.rescue.copy(moved, self.own.moved, size_of::<u32>())?;
            let mailbox = at(offset_of!(Snapshot, mailbox));
            let length = size_of::<GemmeshMailbox>();
            self.rescue.copy(mailbox, self.own.mailbox, length)?;
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

    /// Lets this rank's kernels and streams run through. Their results are void, because the group has failed.
    ///
    /// It is safe that this writes flags of other writers, because nobody uses what they guard any more.
    fn release(&self) -> Result<()> {
        let last = self.begun.load(Ordering::Acquire);
        let _bound = self.device.bind()?;
        let mut words = vec![
            StreamMemOp::Write(self.own.abort, GEMMESH_GROUP_FAILED),
            StreamMemOp::Write(
                self.own.push_epoch + offset_of!(GemmeshPushEpoch, permit) as u64,
                1,
            ),
        ];
        let OwnWords { flags, graph, .. } = &self.own;
        for (lines, value) in [(flags, last), (graph, Epoch::OPEN.raw())] {
            for peer in 0..self.world as u64 {
                words.push(StreamMemOp::Write(lines.ready + 4 * peer, value));
                words.push(StreamMemOp::Write(lines.done + 4 * peer, value));
            }
        }
        const { assert!(MAX_FLAGS <= MAX_BLOCKS) };
        // The monitor's thread and the thread that closes the group may both be here.
        let _alone = lock(&self.releases);
        self.satisfying.write(Satisfying {
            chunks: [last; MAX_FLAGS],
            open: [Epoch::OPEN.raw(); MAX_BLOCKS],
        });
        let chunks = self.satisfying.ptr() + offset_of!(Satisfying, chunks) as u64;
        let open = self.satisfying.ptr() + offset_of!(Satisfying, open) as u64;
        let (flags_bytes, blocks_bytes) = (4 * MAX_FLAGS, 4 * MAX_BLOCKS);
        // SAFETY: the control block lives as long as this thread, and what is copied until its stream has passed.
        unsafe {
            self.rescue.words(&words)?;
            self.rescue.copy(flags.chunk, chunks, flags_bytes)?;
            // A replay closes them again, so this is repeated as long as the replay goes on.
            self.rescue.copy(graph.chunk, open, flags_bytes)?;
            // For the blocks of a product whose kernel was not launched.
            self.rescue.copy(self.own.stored, open, blocks_bytes)
        }
    }
}
