//! The functions of the caller's that an operation calls, and the streams that they get.

use smallvec::SmallVec;

use super::collective::reduce;
use super::context::{EnqueueContext, ProgramCall};
use super::copies::{self, Enqueued};
use super::stamps::Stamps;
use crate::backend::contract::sealed::{Consumer, Producer};
use crate::backend::cuda::driver::{Stream, StreamMemOp};
use crate::backend::cuda::gpu::Gpu;
use crate::backend::cuda::program::Program;
use crate::backend::cuda::shared::words::Signals;
use crate::error::Result;
use crate::profile::span::{Lane, Work};
use crate::schedule::{Request, Schedule};

/// The streams of a caller's function. Calls use them by turns, so that one call's work begins while the last of the
/// call before ends. A device may start two streams in either order, and a kernel that takes all multiprocessors keeps
/// them to its end. So an event fixes the order in which the streams start. From then on each stream waits for its own
/// work, and the other's stands first in line. The order is that of the calls, on all ranks.
pub(super) struct Callers<'a> {
    gpu: &'a Gpu,
    calls: usize,
    pub(super) stamps: Stamps,
}

impl<'a> Callers<'a> {
    pub(super) fn new(gpu: &'a Gpu, is_traced: bool) -> Self {
        Callers {
            gpu,
            calls: 0,
            stamps: Stamps::new(&gpu.device, is_traced),
        }
    }

    /// That of call `index`.
    fn of(&self, index: usize) -> &'a Stream {
        &self.gpu.streams().callers[index % 2]
    }

    /// That of the next call, behind what was on the main stream when the operation began.
    fn next(&mut self) -> Result<&'a Stream> {
        let stream = self.of(self.calls);
        match self.calls {
            0 => {
                stream.wait_until(&self.gpu.streams().begun)?;
                self.gpu.streams().turn.record(stream)?;
            }
            1 => stream.wait_until(&self.gpu.streams().turn)?,
            _ => {}
        }
        self.calls += 1;
        Ok(stream)
    }

    /// Puts something on the stream of call `index`.
    fn put(
        &mut self,
        index: usize,
        work: Work,
        put: impl FnOnce(&Stream) -> Result<()>,
    ) -> Result<()> {
        let stream = self.of(index);
        let before = self.stamps.now(stream)?;
        put(stream)?;
        let lane = Lane::Caller(index % 2);
        self.stamps.add(lane, before, stream, || work)
    }

    /// The main stream goes on when all is done, on each of those that were used, whatever comes of the other.
    pub(super) fn join(&self, main: &Stream) -> Result<()> {
        let used = 0..self.calls.min(2);
        let joined = used.map(|index| main.wait_for(self.of(index), &self.gpu.streams().called));
        joined.fold(Ok(()), Result::and)
    }
}

/// Calls the caller's function for this rank's own rows and for each arrival, as
/// [`drive::consume`](crate::schedule::drive::consume) of the host, with a stream that waits for the arrival's flag.
/// All copies are on their stream, and what completes the operation is on the main one: peers wait neither for the
/// function nor for what it puts on the streams. If the operation fails, the copies run through, and so their flags are
/// written.
pub(super) fn consume(
    at: &EnqueueContext,
    schedule: &Schedule,
    signals: &Signals,
    copies: &Enqueued,
    consumer: &mut Consumer,
    callers: &mut Callers,
) -> Result<()> {
    let rank = at.members.rank;
    callers.next()?;
    callers.put(0, Work::Call { rank }, |stream| {
        consumer(None, stream.raw())
    })?;
    for (index, arrival) in (1..).zip(schedule.arrivals()) {
        callers.next()?;
        let source = arrival.source;
        let flag = signals.chunk(rank, arrival.flag);
        callers.put(index, Work::Wait { source }, |stream| {
            if copies.precedes(arrival.flag, stream)? {
                return Ok(());
            }
            // SAFETY: the control block is unmapped when the streams have passed: the main one waits for this.
            unsafe { stream.words(&[signals.wait(flag)]) }
        })?;
        callers.put(index, Work::Call { rank: source }, |stream| {
            consumer(Some(arrival), stream.raw())
        })?;
    }
    Ok(())
}

/// Has the caller's function make block after block, as [`drive::produce`](crate::schedule::drive::produce) of the
/// host, on streams of its calls: the copy stream asks for a block when it comes to it, and what this rank keeps
/// follows. Of that a block is added to what has come as soon as both are there, while the next is made: by the stream
/// that made it, or, in a graph, by the main one behind the copies, for a graph may run its branches one after the
/// other, and a branch that waited for a peer would keep back what that waits for.
pub(super) fn produce(
    at: &EnqueueContext,
    program: &Program,
    call: &ProgramCall,
    signals: &Signals,
    producer: &mut Producer,
    callers: &mut Callers,
) -> Result<Enqueued> {
    let (rank, schedule, streams) = (at.members.rank, &program.schedule, at.gpu.streams());
    let requests = schedule.requests();
    let mut up_to = |block: usize| make(at, requests, producer, callers, block);
    let copies = copies::enqueue(at, &streams.copies, schedule, call, Some(&mut up_to))?;
    let own = |request: &&Request| request.owner == rank;
    let first = requests.iter().find(own).map_or(0, |own| own.rows.start);
    if at.recorded {
        at.main.wait_for(&streams.copies, &streams.gathered)?;
    }
    for (block, request) in requests.iter().enumerate() {
        let made = make(at, requests, producer, callers, block)?;
        if program.reduction().is_none() || !own(&request) {
            continue;
        }
        let addends = request.addends.clone();
        let words = addends.map(|flag| signals.wait(signals.chunk(rank, flag)));
        let words: SmallVec<[StreamMemOp; 16]> = words.collect();
        let source = schedule.sources()[request.addends.clone()].last();
        let source = source.map_or(rank, |&source| source);
        let rows = request.rows.start - first..request.rows.end - first;
        // SAFETY: the control block is unmapped when the streams have passed: the main one waits for this.
        let wait = |stream: &Stream| unsafe { stream.words(&words) };
        let work = Work::Add { rows: rows.clone() };
        let add = |stream: &Stream| reduce(stream, program, Some(rows), &call.operands);
        if at.recorded {
            at.main.wait_for(made, &streams.called)?;
            wait(at.main)?;
            add(at.main)?;
        } else {
            callers.put(block, Work::Wait { source }, wait)?;
            callers.put(block, work, add)?;
        }
    }
    Ok(copies)
}

/// Has the caller's function make all blocks up to `block`, each once; returns its stream.
fn make<'a>(
    at: &EnqueueContext,
    requests: &[Request],
    producer: &mut Producer,
    callers: &mut Callers<'a>,
    block: usize,
) -> Result<&'a Stream> {
    while callers.calls <= block {
        let index = callers.calls;
        let request = &requests[index];
        let stream = callers.next()?;
        if at.recorded && index > 0 {
            // A graph has no order but its edges: it might make first what is sent to nobody.
            stream.wait_for(callers.of(index - 1), &at.gpu.streams().called)?;
        }
        let work = Work::Call {
            rank: request.owner,
        };
        callers.put(index, work, |stream| {
            let mut call = || producer(request, stream.raw());
            match at.recorded {
                true => call(),
                false => at.shared.monitor.calling(call),
            }
        })?;
    }
    Ok(callers.of(block))
}
