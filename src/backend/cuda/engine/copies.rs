//! Copies by a stream, each with its flag behind it: pulls, and pushes that no kernel waits for.

use super::announce::{copy_regions, delay};
use super::context::{EnqueueContext, ProgramCall};
use super::stamps::Stamps;
use crate::backend::cuda::driver::{Event, Stream, StreamMemOp};
use crate::backend::cuda::program::operands::Operands;
use crate::backend::cuda::shared::words::{Signals, close};
use crate::backend::work::work_of;
use crate::error::{Error, Kind, Result};
use crate::profile::span::Lane;
use crate::protocol::epoch::Epoch;
use crate::protocol::flag::Awaited;
use crate::schedule::drive::{self, CopyEngine, GraphCopyEngine};
use crate::schedule::{Schedule, Transfer};

/// Has the caller make all blocks up to an index, and makes later work on the stream wait for them.
pub type Make<'a> = dyn FnMut(usize, &Stream) -> Result<()> + 'a;

/// The copies that have been enqueued.
pub struct Enqueued {
    /// When each transfer was made, if the call is traced.
    pub stamps: Stamps,
    /// By chunk flag of this rank: the event behind this rank's pull, if the operation is captured.
    pulled: Vec<Option<Event>>,
}

impl Enqueued {
    /// Makes later work on `stream` wait for this rank's pull of chunk `flag`. Returns false if the pull has no event:
    /// then its flag says when the chunk has arrived.
    pub fn precedes(&self, flag: usize, stream: &Stream) -> Result<bool> {
        match self.pulled.get(flag) {
            Some(Some(event)) => stream.wait_until(event).map(|()| true),
            _ => Ok(false),
        }
    }
}

/// Enqueues all of this rank's transfers on `stream`.
pub fn enqueue<'a, 'm, 'o>(
    at: &'a EnqueueContext<'a>,
    stream: &'a Stream,
    schedule: &'a Schedule,
    call: &'a ProgramCall<'o>,
    make: Option<&'a mut Make<'m>>,
) -> Result<Enqueued> {
    let in_graph = at.recorded && schedule.handshake();
    let mut copies = Copies {
        at,
        stream,
        signals: at.signals(call.epoch),
        schedule,
        operands: &call.operands,
        make,
        words: [StreamMemOp::Write(0, 0); BATCH],
        pending: 0,
        stamps: Stamps::new(&at.gpu.device, call.trace.is_some()),
        pulled: Vec::new(),
        in_graph,
    };
    if in_graph {
        drive::transfer_in_graph(schedule, schedule.moves(), &mut copies)?
    } else {
        drive::transfer(schedule, schedule.moves(), call.epoch, &mut copies)?
    }
    copies.flush()?;
    let Copies { stamps, pulled, .. } = copies;
    Ok(Enqueued { stamps, pulled })
}

/// Word operations in one call. Between two copies stand a chunk's flag, `done`, and the next `ready`.
const BATCH: usize = 8;

/// The copy engine: a stream.
struct Copies<'a, 'm, 'o> {
    at: &'a EnqueueContext<'a>,
    stream: &'a Stream,
    signals: Signals<'a>,
    schedule: &'a Schedule,
    operands: &'a Operands<'o>,
    /// Makes the rows, if a producer does.
    make: Option<&'a mut Make<'m>>,
    /// Word operations that are not enqueued yet. Those between two copies are enqueued in one call.
    words: [StreamMemOp; BATCH],
    pending: usize,
    stamps: Stamps,
    /// Whether the operation is captured. A graph may run its branches one after the other, so no branch waits for a
    /// graph word that a different branch writes.
    in_graph: bool,
    /// By chunk flag: in a capture, the event behind this rank's pull, for which other branches wait.
    pulled: Vec<Option<Event>>,
}

impl Copies<'_, '_, '_> {
    fn push(&mut self, operation: StreamMemOp) -> Result<()> {
        if self.pending == BATCH {
            self.flush()?;
        }
        self.words[self.pending] = operation;
        self.pending += 1;
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        if self.pending > 0 {
            // SAFETY: control blocks are unmapped when the streams have passed.
            unsafe { self.stream.words(&self.words[..self.pending])? };
            self.pending = 0;
        }
        Ok(())
    }
}

impl CopyEngine for Copies<'_, '_, '_> {
    type Error = Error;

    fn wait_ready(&mut self, peer: usize, _: Epoch) -> Result<()> {
        let flag = self.signals.ready(self.at.members.rank, peer);
        self.push(self.signals.wait(flag))
    }

    fn wait_chunk(&mut self, flag: usize, _: Epoch, awaited: Awaited) -> Result<()> {
        // This rank's pull stands earlier on this stream.
        if self.in_graph && matches!(awaited, Awaited::Chunk { pulled: true, .. }) {
            return Ok(());
        }
        let flag = self.signals.chunk(self.at.members.rank, flag);
        self.push(self.signals.wait(flag))
    }

    fn wait_produced(&mut self, block: usize, _: Epoch) -> Result<()> {
        // Earlier flags need not wait for the caller.
        self.flush()?;
        match &mut self.make {
            Some(make) => make(block, self.stream),
            None => Err(Kind::Internal {
                what: format!("nobody makes block {block}"),
            }
            .on(self.at.members.rank)),
        }
    }

    fn copy(&mut self, moved: &Transfer) -> Result<()> {
        self.flush()?;
        delay(self.stream, moved.to, moved.flag, self.signals.epoch)?;
        let before = self.stamps.now(self.stream)?;
        // SAFETY: both ranks' memories hold the matrix. A peer's rows are final, because the stream has waited for its
        // `ready`, and the peer does not write them before `done`. This rank's rows are final, because the stream has
        // waited for the work that made them, or for the flag of rows that it passes on. At the target, no one reads
        // the rows before the flag is written, and the kernels of earlier operations have ended: this rank's in front
        // of this copy, a peer's before its `ready`.
        unsafe {
            copy_regions(self.stream, self.schedule, self.operands, moved)?;
        }
        let work = || work_of(moved, self.at.members.rank);
        self.stamps.add(Lane::Copy, before, self.stream, work)
    }

    fn signal_chunk(&mut self, moved: &Transfer, _: Epoch) -> Result<()> {
        if self.in_graph && moved.to == self.at.members.rank {
            let event = Event::new(&self.at.gpu.device, false)?;
            event.record(self.stream)?;
            self.pulled
                .resize_with(self.schedule.arrivals().len(), || None);
            self.pulled[moved.flag] = Some(event);
            return Ok(());
        }
        let flag = self.signals.chunk(moved.to, moved.flag);
        self.push(self.signals.signal(flag))
    }

    fn signal_done(&mut self, peer: usize, _: Epoch) -> Result<()> {
        let flag = self.signals.done(peer, self.at.members.rank);
        self.push(self.signals.signal(flag))
    }
}

impl GraphCopyEngine for Copies<'_, '_, '_> {
    fn all_moved(&mut self) -> Result<()> {
        self.push(self.signals.signal(self.at.shared.control.moved()))
    }

    fn close_ready(&mut self, peer: usize) -> Result<()> {
        self.push(close(self.signals.ready(self.at.members.rank, peer)))
    }
}
