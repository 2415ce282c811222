//! Rows that the rank which needs them pulls: copies on a stream, each with its flag behind it.

use super::super::Cuda;
use super::super::driver::{Event, StreamMemOp};
use super::super::program::Place;
use super::{copy_regions, delay};
use crate::backend::sealed::Bound;
use crate::error::{Error, Result};
use crate::schedule::drive::{self, CopyEngine};
use crate::schedule::layout::limit;
use crate::schedule::{Awaited, Epoch, Schedule, Transfer};
use crate::span::{Lane, Span, Work};

/// Puts all that this rank pulls on the copy stream, behind what is on the main stream. What is returned knows when each pull
/// was made, if the call is traced.
pub fn enqueue<'a>(
    at: &Place<'a>,
    schedule: &'a Schedule,
    matrices: &'a [Bound<'a, Cuda>],
    epoch: Epoch,
    is_traced: bool,
) -> Result<Copies<'a>> {
    let Place { cuda, members, .. } = *at;
    let mut copies = Copies {
        cuda,
        rank: members.rank,
        epoch,
        schedule,
        matrices,
        words: [StreamMemOp::Write(0, 0); BATCH],
        pending: 0,
        stamps: is_traced.then(Vec::new),
    };
    cuda.copies().wait_for(at.main, &cuda.begun)?;
    drive::transfer(schedule, schedule.moves(), epoch, &mut copies)?;
    copies.flush()?;
    Ok(copies)
}

/// Word operations between two copies: a chunk's flag, `done`, and the next `ready`.
const BATCH: usize = 8;

/// The copy engine: a stream.
pub struct Copies<'a> {
    cuda: &'a Cuda,
    rank: usize,
    epoch: Epoch,
    schedule: &'a Schedule,
    matrices: &'a [Bound<'a, Cuda>],
    /// Word operations that are still to be put on the stream: those between two copies go there in one call.
    words: [StreamMemOp; BATCH],
    pending: usize,
    /// Before and after each pull, if somebody wants to know.
    stamps: Option<Vec<(Transfer, Event, Event)>>,
}

impl Copies<'_> {
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
            unsafe { self.cuda.copies().words(&self.words[..self.pending])? };
            self.pending = 0;
        }
        Ok(())
    }

    /// What was pulled when, since `begun`.
    pub fn spans(self, begun: &Event, spans: &mut Vec<Span>) -> Result<()> {
        let nanos = |event: &Event| -> Result<u64> {
            Ok((event.micros_since(begun)?.max(0.0) * 1e3) as u64)
        };
        for (pull, before, after) in self.stamps.unwrap_or_default() {
            spans.push(Span {
                lane: Lane::Copy,
                begin: nanos(&before)?,
                end: nanos(&after)?,
                work: Work::Pull {
                    source: pull.source,
                    rows: pull.regions[0].to.rows.clone(),
                },
            });
        }
        Ok(())
    }
}

impl CopyEngine for Copies<'_> {
    type Error = Error;

    fn wait_ready(&mut self, source: usize, epoch: Epoch) -> Result<()> {
        let flag = self.cuda.control.ready(self.rank, source);
        self.push(StreamMemOp::Wait(flag, epoch.raw()))
    }

    fn wait_chunk(&mut self, flag: usize, epoch: Epoch, _: Awaited) -> Result<()> {
        self.push(StreamMemOp::Wait(
            self.cuda.control.chunk(flag),
            epoch.raw(),
        ))
    }

    fn wait_produced(&mut self, block: usize, _: Epoch) -> Result<()> {
        // What a rank pulls, others have made.
        limit("blocks that a pull waits for", block + 1, 0, 0)
    }

    fn copy(&mut self, pull: &Transfer) -> Result<()> {
        self.flush()?;
        delay(self.cuda.copies(), self.rank, pull.flag, self.epoch)?;
        let stamp = |engine: &Self| -> Result<Event> {
            let event = Event::new(&engine.cuda.device, true)?;
            event.record(engine.cuda.copies())?;
            Ok(event)
        };
        let before = match self.stamps {
            Some(_) => Some(stamp(self)?),
            None => None,
        };
        // SAFETY: both ranks' memories hold the matrix. The source's rows are final, for the stream has waited
        // for `ready`, and the source does not write them before `done`. Here, nobody reads the same
        // rows before this pull's flag is written, and the kernels of earlier operations have ended.
        unsafe { copy_regions(self.cuda.copies(), self.schedule, self.matrices, pull)? };
        if let Some(before) = before {
            let after = stamp(self)?;
            self.stamps
                .get_or_insert_default()
                .push((pull.clone(), before, after));
        }
        Ok(())
    }

    fn signal_chunk(&mut self, pull: &Transfer, epoch: Epoch) -> Result<()> {
        let flag = self.cuda.control.chunk(pull.flag);
        self.push(StreamMemOp::Write(flag, epoch.raw()))
    }

    fn signal_done(&mut self, source: usize, epoch: Epoch) -> Result<()> {
        let flag = self.cuda.control.done(source, self.rank);
        self.push(StreamMemOp::Write(flag, epoch.raw()))
    }
}
