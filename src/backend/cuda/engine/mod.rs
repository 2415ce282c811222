//! Walks a schedule with a GPU: a stream copies and writes flags while one kernel multiplies.

pub mod announce;
mod callbacks;
mod collective;
pub mod copies;
mod push;
mod pushed;
pub mod stamps;

use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::backend::cuda::Cuda;
use smallvec::SmallVec;

use crate::backend::cuda::driver::{Stream, StreamMemOp};
use crate::backend::cuda::program::support::{COMMANDS, commands};
use crate::backend::cuda::program::{self, EnqueueContext, Launch, Program};
use crate::backend::cuda::shared::monitor::OUTSTANDING;
use crate::backend::cuda::shared::words::close;
use crate::backend::sealed::{Call, Callback};
use crate::error::Result;
use crate::ranks::members::Members;
use crate::schedule::{Route, Schedule};
use announce::{announce, announce_by_gates, pause};
use callbacks::{Callers, consume, produce};
use pushed::{begin_pushed, enqueue_pushed};
use stamps::stamp;

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
                collective::launch(&at, program, &call)
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

/// Longer than it takes to put an operation on the streams.
const ENQUEUED: Duration = Duration::from_millis(2);
