//! Walks a schedule with a GPU: a stream copies and writes flags while one kernel multiplies.

use std::sync::atomic::Ordering;
use std::time::Duration;

use super::Cuda;
use super::driver::{Event, StreamMemOp};
use super::limits::{COMMANDS, commands};
use super::monitor::OUTSTANDING;
use super::program::{self, Launch, Place, Program};
use super::route::{announce, pause, pull, push};
use crate::backend::sealed::{Call, Consumer};
use crate::error::Result;
use crate::ranks::members::Members;
use crate::schedule::layout::MAX_WORLD;
use crate::schedule::{Epoch, Route, Schedule};

pub fn run(cuda: &Cuda, members: &Members, program: &Program, mut call: Call<Cuda>) -> Result<()> {
    let _bound = cuda.device.bind()?;
    let main = cuda.main();
    let recorded = main.is_capturing();
    let schedule = &program.schedule;
    let mut begin = || -> Result<()> {
        let at = Place {
            cuda,
            members,
            main: &main,
            recorded: recorded.clone()?,
        };
        make_room(&at, schedule)?;
        let launch = Launch::new(&at, program, &call)?;
        match launch {
            Some(launch) if schedule.is_pushed() => enqueue_pushed(&at, program, &mut call, launch),
            launch => enqueue(&at, program, &mut call, launch),
        }
    };
    let begun = begin();
    let begun = match recorded {
        Ok(true) => {
            cuda.recorded.store(true, Ordering::Relaxed);
            begun
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

/// Waits until the device's queues have room for another operation. They are bounded, and a driver that waits for room has
/// no deadline and does not hear of a failure.
fn make_room(at: &Place, schedule: &Schedule) -> Result<()> {
    let Place { cuda, members, .. } = *at;
    let most = (COMMANDS / commands(schedule)).clamp(1, OUTSTANDING) as u32;
    let has_room = || match cuda.monitor.outstanding() < most {
        true => Ok(true),
        false => members.fault().map_or(Ok(false), Err),
    };
    cuda.poll(members, has_room)
}

/// What has no kernel that waits for peers: the streams wait.
fn enqueue(
    at: &Place,
    program: &Program,
    call: &mut Call<Cuda>,
    launch: Option<Launch>,
) -> Result<()> {
    let Place {
        cuda,
        members,
        main,
        ..
    } = *at;
    let epoch = call.epoch;
    let (schedule, monitor) = (&program.schedule, &cuda.monitor);
    let traced = call.trace.is_some();
    let mut begun = None;
    if schedule.handshake() {
        monitor.begin(epoch, program.waits);
        if traced {
            // So that the picture shows the device and not the host: everything is on the streams before any rank begins.
            pause(main, ENQUEUED)?;
            super::align(cuda, members, main)?;
        }
        let started = StreamMemOp::Write(monitor.started(), epoch.raw());
        announce(at, epoch, Some(started))?;
    }
    // All copies are put on their stream before the kernel that waits for them; and none of them begins
    // before the kernel of the operation before, which is on the main stream, has ended.
    let copies = match schedule.moves().next() {
        Some(_) => Some(pull::enqueue(at, schedule, call.matrices, epoch, traced)?),
        None => None,
    };
    if call.consumer.is_some() {
        // Behind what was put on the main stream before the call, as the copies, and not behind what it waits for from here on.
        if copies.is_none() {
            cuda.begun.record(main)?;
        }
        let mut consumers = cuda.consumers().iter();
        consumers.try_for_each(|stream| stream.wait_until(&cuda.begun))?;
    }
    if let Some(launch) = &launch {
        if traced {
            let event = Event::new(&cuda.device, true)?;
            event.record(main)?;
            begun = Some(event);
        }
        launch.launch(main)?;
    }
    // Tiles that wait for all transfers end after them.
    let awaited = schedule.handshake() && schedule.awaits_all() && schedule.reduction().is_none();
    if copies.is_some() && !awaited {
        main.wait_for(cuda.copies(), &cuda.gathered)?;
    }
    if let Some(reduction) = schedule.reduction() {
        program::reduce(at, schedule, reduction, call)?;
    }
    if schedule.handshake() {
        // Own rows are free again when every peer has pulled them; then the operation is complete.
        let mut words = [StreamMemOp::Write(0, 0); MAX_WORLD + 1];
        let mut count = 0;
        for &peer in schedule.readers() {
            words[count] = StreamMemOp::Wait(cuda.control.done(members.rank, peer), epoch.raw());
            count += 1;
        }
        words[count] = StreamMemOp::Write(monitor.completed(), epoch.raw());
        // SAFETY: control blocks are unmapped when the streams have passed; the completed word lives as long as the backend.
        unsafe { main.words(&words[..=count])? };
    }
    if let Some(consumer) = call.consumer.as_mut() {
        let consumed = consume(at, schedule, epoch, consumer);
        // Also what was put there before something failed, and on each, whatever comes of the other.
        let joined = cuda.consumers().each_ref();
        let [first, second] = joined.map(|stream| main.wait_for(stream, &cuda.consumed));
        consumed.and(first).and(second)?;
    }
    if let (Some(spans), Some(launch)) = (call.trace.as_deref_mut(), launch) {
        cuda.wait_idle(members, main)?;
        launch.spans(program, spans)?;
        if let (Some(begun), Some(copies)) = (begun, copies) {
            copies.spans(&begun, spans)?;
        }
    }
    Ok(())
}

/// Calls the caller's function for this rank's own rows and for each arrival, as [`drive::consume`](crate::schedule::drive::consume) of the
/// host, with a stream that waits for the arrival's flag. All copies are on their stream, and what completes the operation is on the main
/// one: peers wait neither for the function nor for what it puts on the streams. If the operation fails, the copies run through, and so their
/// flags are written.
fn consume(at: &Place, schedule: &Schedule, epoch: Epoch, consumer: &mut Consumer) -> Result<()> {
    let [first, second] = at.cuda.consumers();
    consumer(None, first.raw())?;
    for (arrival, stream) in schedule
        .arrivals()
        .iter()
        .zip([second, first].into_iter().cycle())
    {
        let flag = at.cuda.control.chunk(arrival.flag);
        // SAFETY: the control block is unmapped when the streams have passed: the main one waits for this.
        unsafe { stream.words(&[StreamMemOp::Wait(flag, epoch.raw())])? };
        consumer(Some(arrival), stream.raw())?;
    }
    Ok(())
}

/// An operation whose rows their owners push: the kernel tells the peers that it runs, and the copy stream when they do. It
/// counts its epochs on the device, so what is enqueued here may as well be recorded, to run again and again.
fn enqueue_pushed(
    at: &Place,
    program: &Program,
    call: &mut Call<Cuda>,
    launch: Launch,
) -> Result<()> {
    let Place {
        cuda,
        members,
        main,
        recorded,
    } = *at;
    let epoch = call.epoch;
    let (schedule, monitor) = (&program.schedule, &cuda.monitor);
    if !recorded {
        monitor.begin(epoch, program.waits);
        if epoch.refreshes() {
            // Words that only pulls write, and others read: they too must not come to look like the future.
            announce(at, epoch, None)?;
        }
    }
    if call.trace.is_some() {
        pause(main, ENQUEUED)?;
        super::align(cuda, members, main)?;
    }
    let by_copies = schedule.uses(Route::Push);
    if by_copies {
        push::enqueue(at, program, call)?;
    }
    launch.launch(main)?;
    // The kernel has waited for what no tile waits for, and copies only read what is added.
    if let Some(reduction) = program.reduction() {
        program::reduce(at, schedule, reduction, call)?;
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
