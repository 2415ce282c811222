//! The calls of the caller's functions, and the streams that these functions get.

use smallvec::SmallVec;

use super::collective::reduce;
use super::context::{EnqueueContext, ProgramCall};
use super::copies::{self, Enqueued};
use super::lanes::{self, ChunkFlags};
use super::stamps::Stamps;
use crate::backend::contract::sealed::{Consumer, Producer};
use crate::backend::cuda::driver::{Event, Stream, StreamMemOp};
use crate::backend::cuda::gpu::Gpu;
use crate::backend::cuda::program::GpuProgram;
use crate::backend::cuda::shared::words::Signals;
use crate::error::Result;
use crate::profile::span::{Lane, Work};
use crate::schedule::{Request, Schedule};

/// The streams of a caller's function.
///
/// Calls alternate between two streams, so that one call's work begins while the end of the previous call's work runs.
/// The device may start two streams in either order, and a kernel that takes all multiprocessors keeps them until it
/// ends. So an event fixes the order in which the streams start. From then on, each stream waits for its own earlier
/// work, and the other stream's work is next in line. So the work runs in the order of the calls, on all ranks.
pub(super) struct Callers<'a> {
    gpu: &'a Gpu,
    calls: usize,
    /// By call: the event after its work, if blocks go over a network.
    made: Vec<Event>,
    pub(super) stamps: Stamps,
}

impl<'a> Callers<'a> {
    pub(super) fn new(gpu: &'a Gpu, is_traced: bool) -> Self {
        Callers {
            gpu,
            calls: 0,
            made: Vec::new(),
            stamps: Stamps::new(&gpu.device, is_traced),
        }
    }

    /// The stream of call `index`.
    fn of(&self, index: usize) -> &'a Stream {
        &self.gpu.streams().callers[index % 2]
    }

    /// The stream of the next call, after the work that was on the main stream when the operation began.
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

    /// Makes later work on `stream` wait for the work of call `index`, which has been made. Without a network, that is the
    /// last work on its stream.
    fn precede(&self, index: usize, stream: &Stream) -> Result<()> {
        match self.made.get(index) {
            Some(event) => stream.wait_until(event),
            None => stream.wait_for(self.of(index), &self.gpu.streams().produced),
        }
    }

    /// Enqueues work on the stream of call `index`.
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

    /// Makes the main stream wait for each stream that was used, also if the wait for the other one fails.
    pub(super) fn join(&self, main: &Stream) -> Result<()> {
        let used = 0..self.calls.min(2);
        let joined = used.map(|index| main.wait_for(self.of(index), &self.gpu.streams().called));
        joined.fold(Ok(()), Result::and)
    }
}

/// Calls the consumer for this rank's own rows and for each arrival, with a stream that waits for the arrival's flag.
///
/// Does what [`drive::consume`](crate::schedule::drive::consume) does on the host. All copies are already on their
/// stream, and the commands that complete the operation are on the main stream. So peers wait neither for the consumer
/// nor for the work that it enqueues. If the operation fails, the copies run through, so their flags are written.
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
            // SAFETY: the control block is unmapped when the streams have passed, and the main stream waits for this.
            unsafe { stream.words(&[signals.wait(flag)]) }
        })?;
        callers.put(index, Work::Call { rank: source }, |stream| {
            consumer(Some(arrival), stream.raw())
        })?;
    }
    Ok(())
}

/// Has the producer make block after block, on the streams of its calls.
///
/// Does what [`drive::produce`](crate::schedule::drive::produce) does on the host. The copy stream asks for a block
/// when it comes to it. The blocks that this rank keeps follow. A kept block is added to the arrived partials as soon
/// as both are there, while the next block is made. The stream that made the block adds it. In a graph, the main stream
/// adds it, after the copies. A graph may run its branches one after the other, so a branch that waited for a peer
/// could hold back the work that this peer waits for.
pub(super) fn produce(
    at: &EnqueueContext,
    program: &GpuProgram,
    call: &ProgramCall,
    signals: &Signals,
    producer: &mut Producer,
    callers: &mut Callers,
) -> Result<(Enqueued, Stamps)> {
    let (rank, schedule, streams) = (at.members.rank, &program.schedule, at.gpu.streams());
    let requests = schedule.requests();
    let crosses = schedule.sent().next().is_some();
    let mut up_to = |block: usize, stream: &Stream| {
        make(at, requests, producer, callers, crosses, block)?;
        callers.precede(block, stream)
    };
    let copies = copies::enqueue(at, &streams.copies, schedule, call, Some(&mut up_to))?;
    let flags = ChunkFlags::Streams(*signals);
    let carried = lanes::enqueue(at, program, call, flags, Some(&mut up_to))?;
    let own = |request: &&Request| request.owner == rank;
    let first = requests.iter().find(own).map_or(0, |own| own.rows.start);
    if at.recorded {
        at.main.wait_for(&streams.copies, &streams.gathered)?;
    }
    for (block, request) in requests.iter().enumerate() {
        let made = make(at, requests, producer, callers, crosses, block)?;
        if program.reduction().is_none() || !own(&request) {
            continue;
        }
        let addends = request.addends.clone();
        let words = addends.map(|flag| signals.wait(signals.chunk(rank, flag)));
        let words: SmallVec<[StreamMemOp; 16]> = words.collect();
        let source = schedule.sources()[request.addends.clone()].last();
        let source = source.map_or(rank, |&source| source);
        let rows = request.rows.start - first..request.rows.end - first;
        // SAFETY: the control block is unmapped when the streams have passed, and the main stream waits for this.
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
    Ok((copies, carried))
}

/// Has the producer make all blocks up to `block`, each once. Returns the stream of `block`. `crosses`: each gets an event,
/// because blocks that go over a network wait for it later, when more has been made.
fn make<'a>(
    at: &EnqueueContext,
    requests: &[Request],
    producer: &mut Producer,
    callers: &mut Callers<'a>,
    crosses: bool,
    block: usize,
) -> Result<&'a Stream> {
    while callers.calls <= block {
        let index = callers.calls;
        let request = &requests[index];
        let stream = callers.next()?;
        if at.recorded && index > 0 {
            // Only edges order a graph. Without this one it might first make a block that is sent to no one.
            stream.wait_for(callers.of(index - 1), &at.gpu.streams().called)?;
        }
        let work = Work::Call {
            rank: request.owner,
        };
        callers.put(index, work, |stream| {
            let mut call = || producer(request, stream.raw());
            if at.recorded {
                call()
            } else {
                at.shared.monitor.calling(call)
            }
        })?;
        if crosses {
            let event = Event::new(&at.gpu.device, false)?;
            event.record(stream)?;
            callers.made.push(event);
        }
    }
    Ok(callers.of(block))
}
