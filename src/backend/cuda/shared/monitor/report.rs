//! What an operation waits for, and the errors that say so.

use std::mem::offset_of;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use super::{GRACE, OUTSTANDING, OperationWaits, Running, Watch, lock, no_flags};
use crate::backend::cuda::abi::{
    GEMMESH_FAULT_RECORDED, GEMMESH_LOW_LATENCY, GEMMESH_READY, GemmeshMailbox, GemmeshPushEpoch,
};
use crate::backend::cuda::gpu::streams::LANES;
use crate::backend::cuda::shared::words::{FlagLine, Snapshot, Waits};
use crate::error::{Deadline, Error, Kind, Result};
use crate::protocol::epoch::Epoch;
use crate::protocol::flag::Awaited;

impl Watch {
    pub(super) fn look(&self) {
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
            0 => self.waits_of(epoch).words,
            _ => no_flags(),
        };
        let missing = self.read_words().ok();
        let missing = missing.and_then(|words| words.missing(rank, world, epoch, &waits));
        let awaited = match missing {
            Some((awaited @ Awaited::Ready { .. }, _)) => awaited,
            _ => noted,
        };
        // The record names the operation. Flags of pushes have a count of their own, and by now this kernel and those
        // after it may have run through.
        let running = match fault.recording {
            0 => Running::Live(Epoch::from_raw(fault.operation)),
            recording => Running::Replay(recording),
        };
        let passed = (Deadline::Call, self.failures.deadlines.call());
        self.failures
            .fail(self.late(running, passed, awaited, waited));
    }

    /// The error of an operation that has waited too long. `passed` is the deadline and its length.
    pub(super) fn diagnose(
        &self,
        running: Running,
        passed: (Deadline, Duration),
        waited: Duration,
    ) -> Error {
        let rank = self.failures.rank;
        let unknown = |reason: String| {
            Kind::Timeout {
                waiting: rank,
                what: format!("{} on its own GPU ({reason})", self.name(running)),
                waited_ms: waited.as_millis() as u64,
                deadline: passed.0,
            }
            .on(rank)
        };
        if self.waits_for_its_caller(running) {
            return unknown("its caller's function has not returned".into());
        }
        let by_kernel = |epoch| matches!(self.waits_of(epoch).words, Waits::Kernel { .. });
        match self.missing(running) {
            Ok(Some((awaited, ..))) => self.late(running, passed, awaited, waited),
            Ok(None) if matches!(running, Running::Live(epoch) if by_kernel(epoch)) => {
                unknown("its kernel does not run, or does not end".into())
            }
            Ok(None) => unknown("all peers have done their part".into()),
            Err(error) => unknown(error.to_string()),
        }
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

    /// What an operation waits for, in words. Ranks are those of the job.
    pub(super) fn describe(&self, running: Running, awaited: Awaited) -> String {
        let failures = &self.failures;
        let what = awaited.describe(failures.job_rank(failures.rank));
        let peer = failures.job_rank(awaited.peer());
        format!("{}: rank {peer} {what}", self.name(running))
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

    /// The error with which `rank`, which an operation waits for, was refused that call, if it was.
    fn refusal(&self, running: Running, rank: usize) -> Option<Error> {
        match running {
            Running::Live(epoch) => self.failures.refusal(rank, epoch),
            Running::Replay(_) => None,
        }
    }

    /// Whether the operation waits for work that a callback on this rank has not enqueued yet.
    pub(super) fn waits_for_its_caller(&self, running: Running) -> bool {
        let latest = Epoch::from_raw(self.begun.load(Ordering::Acquire));
        let is_latest = matches!(running, Running::Live(epoch) if epoch == latest);
        is_latest && self.calling.load(Ordering::Relaxed)
    }

    /// The name of a captured operation, and which ranks it waits for.
    fn recording(&self, number: u32) -> Option<(String, Waits)> {
        let index = (number as usize).checked_sub(1)?;
        lock(&self.recordings).get(index).cloned()
    }

    fn waits_of(&self, epoch: Epoch) -> OperationWaits {
        lock(&self.waits)[epoch.raw() as usize % OUTSTANDING].clone()
    }

    /// The first missing word of an operation, the epoch that it should have reached, and its value.
    pub(super) fn missing(&self, running: Running) -> Result<Option<(Awaited, Epoch, u32)>> {
        let words = self.read_words()?;
        let (waits, expected, has_ended) = match running {
            Running::Live(epoch) => {
                let waits = self.waits_of(epoch);
                let expected = match waits.words {
                    // None if no kernel waits.
                    Waits::Kernel { .. } => words.pushed_epoch(),
                    _ => Some(epoch),
                };
                let has_ended = epoch.reached_by(self.completed.read());
                (waits, expected, has_ended)
            }
            Running::Replay(number) => {
                let Some((_, waits)) = self.recording(number) else {
                    return Ok(None);
                };
                let has_ended = self.replayed.read().running != number;
                (OperationWaits::of(waits), Some(Epoch::OPEN), has_ended)
            }
        };
        if has_ended {
            return Ok(None);
        }
        let missing = expected.and_then(|epoch| {
            let missing = words.missing(self.failures.rank, self.world, epoch, &waits.words);
            missing.map(|(awaited, seen)| (awaited, epoch, seen))
        });
        Ok(missing.or_else(|| {
            let OperationWaits { turns, before, .. } = &waits;
            let (awaited, count) = turns.missing(*before, words.turns)?;
            Some((awaited, Epoch::from_raw(count).next(), count))
        }))
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
            let turns = at(offset_of!(Snapshot, turns));
            self.rescue.copy(turns, self.own.turns, 4 * LANES)?;
        }
        let deadline = Instant::now() + GRACE;
        while !self.rescue.is_idle()? {
            if Instant::now() > deadline {
                return Err(Kind::System {
                    action: "read its flags".into(),
                    reason: "its GPU does not copy them".into(),
                }
                .on(self.failures.rank));
            }
            std::thread::sleep(Duration::from_micros(100));
        }
        Ok(self.snapshot.read())
    }
}
