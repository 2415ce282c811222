//! Walks a schedule with a GPU: a stream copies and writes flags while one kernel multiplies.

pub mod announce;
pub mod copies;
mod push;
pub mod stamps;

use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::backend::cuda::Cuda;
use smallvec::SmallVec;

use crate::backend::cuda::driver::{Stream, StreamMemOp};
use crate::backend::cuda::program::sends;
use crate::backend::cuda::program::support::{COMMANDS, commands};
use crate::backend::cuda::program::{self, EnqueueContext, Launch, Program};
use crate::backend::cuda::shared::monitor::OUTSTANDING;
use crate::backend::cuda::shared::words::{Signals, close};
use crate::backend::sealed::{Call, Callback, Consumer, Producer};
use crate::error::Result;
use crate::profile::span::{Lane, Work};
use crate::protocol::epoch::Epoch;
use crate::ranks::members::Members;
use crate::schedule::{Request, Route, Schedule};
use announce::{announce, announce_by_gates, pause};
use copies::Enqueued;
use stamps::{Stamps, stamp};

pub fn run(cuda: &Cuda, members: &Members, program: &Program, mut call: Call<Cuda>) -> Result<()> {
    let _bound = cuda.device.bind()?;
    let main = cuda.main();
    let recorded = main.is_capturing();
    let schedule = &program.schedule;
    // Otherwise it has a number, which the others and the monitor count.
    if schedule.is_idle() && (matches!(recorded, Ok(true)) || !schedule.handshake()) {
        return Ok(());
    }
    let mut begin = || -> Result<()> {
        let at = EnqueueContext {
            cuda,
            members,
            main: &main,
            recorded: recorded.clone()?,
        };
        make_room(&at, schedule)?;
        let launch = Launch::new(&at, program, &call)?;
        match launch {
            Some(launch) if schedule.is_pushed() => enqueue_pushed(&at, program, &mut call, launch),
            None if schedule.is_pushed() => {
                begin_pushed(&at, program, call.epoch)?;
                sends::launch(&at, program, &call)
            }
            launch => enqueue(&at, program, &mut call, launch),
        }
    };
    let begun = begin();
    // A function of the caller's may have forked. What follows locks what other threads may have locked then.
    members.refuse_fork()?;
    let begun = match recorded {
        Ok(true) => {
            cuda.recorded.store(true, Ordering::Relaxed);
            begun.inspect_err(|_| rejoin(cuda, &main))
        }
        // Also what was put on the streams before something failed.
        _ => {
            let joined = match &begun {
                Ok(()) => Ok(()),
                Err(_) => cuda.copies().wait_for(cuda.deferred_copies(), &cuda.joined),
            };
            let marked = cuda.reclaimer.mark();
            begun.and(joined).and(marked)
        }
    };
    begun.map_err(|error| {
        // If an operation has its number, and this rank does not do it, the peers wait for it in vain and must hear.
        let numbered = schedule.handshake() && !matches!(recorded, Ok(true));
        if numbered { members.fail(error) } else { error }
    })
}

/// A capture that ends while a stream that it has spread to was not joined ends in an error of its own.
fn rejoin(cuda: &Cuda, main: &Stream) {
    for stream in [cuda.copies(), cuda.deferred_copies()] {
        if matches!(stream.is_capturing(), Ok(true)) {
            // If this fails too, the first error says why.
            let _ = main.wait_for(stream, &cuda.joined);
        }
    }
}

/// Waits until the device's queues have room for another operation. They are bounded, and a driver that waits for room has
/// no deadline and does not hear of a failure.
fn make_room(at: &EnqueueContext, schedule: &Schedule) -> Result<()> {
    let EnqueueContext { cuda, members, .. } = *at;
    let most = (COMMANDS / commands(schedule)).clamp(1, OUTSTANDING) as u32;
    let has_room = || match cuda.monitor.outstanding() < most {
        true => Ok(true),
        false => members.fault().map_or(Ok(false), Err),
    };
    cuda.poll(members, has_room)
}

/// What has no kernel that waits for peers: the streams wait.
fn enqueue(
    at: &EnqueueContext,
    program: &Program,
    call: &mut Call<Cuda>,
    launch: Option<Launch>,
) -> Result<()> {
    let EnqueueContext {
        cuda,
        members,
        main,
        recorded,
    } = *at;
    let epoch = call.epoch;
    let (schedule, monitor) = (&program.schedule, &cuda.monitor);
    let signals = at.signals(epoch);
    let traced = call.trace.is_some();
    let mut begun = None;
    let gated = schedule.handshake() && recorded;
    if gated {
        announce_by_gates(at, program)?;
    } else if schedule.handshake() {
        monitor.begin(epoch, program.waits);
        if traced {
            // So that the picture shows the device and not the host: everything is on the streams before any rank begins.
            pause(main, ENQUEUED)?;
            crate::backend::cuda::align(cuda, members, main)?;
        }
        let started = StreamMemOp::Write(monitor.started(), epoch.raw());
        announce(at, epoch, Some(started))?;
    }
    // All copies are put on their stream before the kernel that waits for them; and none of them begins
    // before the kernel of the operation before, which is on the main stream, has ended. Where nothing runs beside them, that is theirs
    // too: streams take a while to hear of one another.
    let callback = call.callback.take();
    let moves = schedule.moves().next().is_some();
    let beside = callback.is_some() || (launch.is_some() && moves);
    let stream = if beside { cuda.copies() } else { main };
    if beside {
        cuda.begun.record(main)?;
        stream.wait_until(&cuda.begun)?;
    }
    // Of a trace without a kernel, whose times then count.
    if traced && launch.is_none() {
        begun = Some(stamp(&cuda.device, main)?);
    }
    let mut copies = None;
    let mut callers = Callers::new(cuda, traced);
    let mut consumer = None;
    let mut made = Ok(());
    match callback {
        Some(Callback::Producer(producer)) => {
            let produced = produce(at, schedule, call, &signals, producer, &mut callers);
            // Also what was put there before something failed.
            let joined = callers.join(main);
            match produced {
                Ok(enqueued) => (copies, made) = (Some(enqueued), joined),
                Err(error) => made = Err(error),
            }
        }
        other => {
            let (matrices, no_maker) = (call.matrices, None);
            let enqueued =
                copies::enqueue(at, stream, schedule, matrices, epoch, no_maker, traced)?;
            copies = Some(enqueued);
            if let Some(Callback::Consumer(function)) = other {
                consumer = Some(function);
            }
        }
    }
    if let Some(launch) = &launch {
        if traced {
            begun = Some(stamp(&cuda.device, main)?);
        }
        launch.launch(main)?;
    }
    // Tiles that wait for all transfers end after them.
    let awaited = schedule.handshake() && schedule.awaits_all() && launch.is_some();
    // (What is captured must be joined.)
    if beside && (moves || recorded) && !awaited {
        main.wait_for(cuda.copies(), &cuda.gathered)?;
    }
    made?;
    // Own rows are free again, and what peers bring is there, when they say that they are done.
    let done = || {
        let peers = schedule.movers().iter();
        peers.map(|&peer| signals.done(members.rank, peer))
    };
    let mut words: SmallVec<[StreamMemOp; 16]> = done().map(|word| signals.wait(word)).collect();
    if let Some(reduction) = schedule.reduction() {
        // What the caller makes has been added as it came.
        if schedule.requests().is_empty() {
            if schedule.uses(Route::Push) {
                // SAFETY: control blocks are unmapped when the streams have passed.
                unsafe { main.words(&words)? };
                words.clear();
            }
            program::reduce(at, main, schedule, reduction, 0..reduction.rows, call)?;
        }
    }
    if schedule.handshake() {
        // Then the operation is complete.
        if gated {
            words.push(StreamMemOp::Write(monitor.running(), 0));
            words.extend(done().chain([cuda.control.moved()]).map(close));
        } else {
            words.push(StreamMemOp::Write(monitor.completed(), epoch.raw()));
        }
        // SAFETY: as above; the monitor's words live as long as the backend.
        unsafe { main.words(&words)? };
    }
    if let (Some(consumer), Some(copies)) = (consumer, &copies) {
        let consumed = consume(at, schedule, &signals, copies, consumer, &mut callers);
        // Also what was put there before something failed.
        let joined = callers.join(main);
        consumed.and(joined)?;
    }
    if gated {
        // As complete_by_gates of the host: those who wait for chunks have been joined. What this rank pulls opens none.
        let brought = schedule.arrivals().iter();
        let brought =
            brought.filter(|arrival| arrival.from != members.rank && arrival.route != Route::Pull);
        let chunks = brought.map(|arrival| close(signals.chunk(members.rank, arrival.flag)));
        let words: SmallVec<[StreamMemOp; 16]> = chunks.collect();
        // SAFETY: as above.
        unsafe { main.words(&words)? };
        main.wait_for(cuda.deferred_copies(), &cuda.joined)?;
    }
    if let (Some(spans), Some(begun)) = (call.trace.as_deref_mut(), begun) {
        cuda.wait_idle(members, main)?;
        if let Some(launch) = launch {
            launch.spans(program, spans)?;
        }
        if let Some(copies) = copies {
            copies.stamps.spans(&begun, spans)?;
        }
        callers.stamps.spans(&begun, spans)?;
    }
    Ok(())
}

/// The streams of a caller's function. Calls use them by turns, so that one call's work begins while the last of the call before ends.
/// A device may start two streams in either order, and a kernel that takes all multiprocessors keeps them to its end. So an event fixes
/// the order in which the streams start. From then on each stream waits for its own work, and the other's stands first in line. The
/// order is that of the calls, on all ranks.
struct Callers<'a> {
    cuda: &'a Cuda,
    calls: usize,
    stamps: Stamps,
}

impl<'a> Callers<'a> {
    fn new(cuda: &'a Cuda, is_traced: bool) -> Self {
        Callers {
            cuda,
            calls: 0,
            stamps: Stamps::new(&cuda.device, is_traced),
        }
    }

    /// That of call `index`.
    fn of(&self, index: usize) -> &'a Stream {
        &self.cuda.callers()[index % 2]
    }

    /// That of the next call, behind what was on the main stream when the operation began.
    fn next(&mut self) -> Result<&'a Stream> {
        let stream = self.of(self.calls);
        match self.calls {
            0 => {
                stream.wait_until(&self.cuda.begun)?;
                self.cuda.turn.record(stream)?;
            }
            1 => stream.wait_until(&self.cuda.turn)?,
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
    fn join(&self, main: &Stream) -> Result<()> {
        let used = 0..self.calls.min(2);
        let joined = used.map(|index| main.wait_for(self.of(index), &self.cuda.called));
        joined.fold(Ok(()), Result::and)
    }
}

/// Calls the caller's function for this rank's own rows and for each arrival, as [`drive::consume`](crate::schedule::drive::consume) of the
/// host, with a stream that waits for the arrival's flag. All copies are on their stream, and what completes the operation is on the main
/// one: peers wait neither for the function nor for what it puts on the streams. If the operation fails, the copies run through, and so their
/// flags are written.
fn consume(
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

/// Has the caller's function make block after block, as [`drive::produce`](crate::schedule::drive::produce) of the host, on streams of its
/// calls: the copy stream asks for a block when it comes to it, and what this rank keeps follows. Of that a block is added to what has
/// come as soon as both are there, while the next is made: by the stream that made it, or, in a graph, by the main one behind the copies, for
/// a graph may run its branches one after the other, and a branch that waited for a peer would keep back what that waits for.
fn produce(
    at: &EnqueueContext,
    schedule: &Schedule,
    call: &Call<Cuda>,
    signals: &Signals,
    producer: &mut Producer,
    callers: &mut Callers,
) -> Result<Enqueued> {
    let EnqueueContext { cuda, members, .. } = *at;
    let requests = schedule.requests();
    let mut up_to = |block: usize| make(at, requests, producer, callers, block);
    let copies = copies::enqueue(
        at,
        cuda.copies(),
        schedule,
        call.matrices,
        call.epoch,
        Some(&mut up_to),
        call.trace.is_some(),
    )?;
    let own = |request: &&Request| request.owner == schedule.rank();
    let first = requests.iter().find(own).map_or(0, |own| own.rows.start);
    if at.recorded {
        at.main.wait_for(cuda.copies(), &cuda.gathered)?;
    }
    for (block, request) in requests.iter().enumerate() {
        let made = make(at, requests, producer, callers, block)?;
        let Some(reduction) = schedule.reduction().filter(|_| own(&request)) else {
            continue;
        };
        let addends = request.addends.clone();
        let words = addends.map(|flag| signals.wait(signals.chunk(members.rank, flag)));
        let words: SmallVec<[StreamMemOp; 16]> = words.collect();
        let source = schedule.sources()[request.addends.clone()].last();
        let source = source.map_or(members.rank, |&source| source);
        let rows = request.rows.start - first..request.rows.end - first;
        // SAFETY: the control block is unmapped when the streams have passed: the main one waits for this.
        let wait = |stream: &Stream| unsafe { stream.words(&words) };
        let work = Work::Add { rows: rows.clone() };
        let add = |stream: &Stream| program::reduce(at, stream, schedule, reduction, rows, call);
        if at.recorded {
            at.main.wait_for(made, &cuda.called)?;
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
            stream.wait_for(callers.of(index - 1), &at.cuda.called)?;
        }
        let work = Work::Call {
            rank: request.owner,
        };
        callers.put(index, work, |stream| {
            let mut call = || producer(request, stream.raw());
            match at.recorded {
                true => call(),
                false => at.cuda.monitor.calling(call),
            }
        })?;
    }
    Ok(callers.of(block))
}

/// The host's part of an operation whose kernel waits for peers.
fn begin_pushed(at: &EnqueueContext, program: &Program, epoch: Epoch) -> Result<()> {
    if at.recorded {
        return Ok(());
    }
    at.cuda.monitor.begin(epoch, program.waits);
    if epoch.refreshes() {
        // Words that only pulls write, and others read: they too must not come to look like the future.
        announce(at, epoch, None)?;
    }
    Ok(())
}

/// An operation whose rows their owners push: the kernel tells the peers that it runs, and the copy stream when they do. It
/// counts its epochs on the device, so what is enqueued here may as well be recorded, to run again and again.
fn enqueue_pushed(
    at: &EnqueueContext,
    program: &Program,
    call: &mut Call<Cuda>,
    launch: Launch,
) -> Result<()> {
    let EnqueueContext {
        cuda,
        members,
        main,
        recorded,
    } = *at;
    let epoch = call.epoch;
    let (schedule, monitor) = (&program.schedule, &cuda.monitor);
    begin_pushed(at, program, epoch)?;
    if call.trace.is_some() {
        pause(main, ENQUEUED)?;
        crate::backend::cuda::align(cuda, members, main)?;
    }
    let by_copies = schedule.uses(Route::Push);
    if by_copies {
        push::enqueue(at, program, call)?;
    }
    launch.launch(main)?;
    // The kernel has waited for what no tile waits for, and copies only read what is added.
    if let Some(reduction) = program.reduction() {
        program::reduce(at, main, schedule, reduction, 0..reduction.rows, call)?;
    }
    if by_copies {
        main.wait_for(cuda.copies(), &cuda.gathered)?;
    }
    if program.reduction().is_some() && !recorded {
        let completed = StreamMemOp::Write(monitor.completed(), epoch.raw());
        // SAFETY: the word lives as long as the backend.
        unsafe { main.words(&[completed])? };
    }
    if let Some(spans) = call.trace.as_deref_mut() {
        cuda.wait_idle(members, main)?;
        launch.spans(program, spans)?;
    }
    Ok(())
}

/// Longer than it takes to put an operation on the streams.
const ENQUEUED: Duration = Duration::from_millis(2);
