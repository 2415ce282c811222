//! Walks a schedule with a GPU: a stream copies and writes flags while one kernel multiplies. Only this folder puts
//! operations on streams; each file has one kind of work.

pub mod align;
mod announce;
mod callbacks;
pub mod check_peers;
mod collective;
pub mod context;
mod copies;
mod product;
mod push;
mod pushed;
mod stamps;
mod streamed;
pub mod wait;
pub mod warm_up;

use std::time::Duration;

use crate::backend::contract::sealed::Callback;
use crate::backend::cuda::gpu::streams::Streams;
use crate::backend::cuda::program::Program;
use crate::backend::cuda::program::support::{COMMANDS, commands};
use crate::backend::cuda::shared::monitor::OUTSTANDING;
use crate::error::Result;
use crate::schedule::Schedule;
use context::{EnqueueContext, ProgramCall};

/// Longer than it takes to put an operation on the streams.
const ENQUEUED: Duration = Duration::from_millis(2);

/// Puts a call on the streams. `callback`: what the caller does amid it.
pub fn run(
    at: &EnqueueContext,
    program: &Program,
    mut call: ProgramCall,
    callback: Option<Callback>,
) -> Result<()> {
    let EnqueueContext { gpu, members, .. } = *at;
    let begun = enqueue(at, program, &mut call, callback);
    // A function of the caller's may have forked. What follows locks what other threads may have locked then.
    members.refuse_fork()?;
    if at.recorded {
        return begun.inspect_err(|_| rejoin(at));
    }
    // Also what was put on the streams before something failed.
    let Streams {
        copies,
        deferred_copies,
        joined,
        ..
    } = gpu.streams();
    let rejoined = match &begun {
        Ok(()) => Ok(()),
        Err(_) => copies.wait_for(deferred_copies, joined),
    };
    let marked = gpu.reclaimer.mark();
    begun.and(rejoined).and(marked)
}

fn enqueue(
    at: &EnqueueContext,
    program: &Program,
    call: &mut ProgramCall,
    callback: Option<Callback>,
) -> Result<()> {
    make_room(at, &program.schedule)?;
    let run = at.run(program, call.epoch);
    let traced = call.trace.is_some();
    let launch = program.launch(at.gpu, run, &call.operands, traced)?;
    match launch {
        Some(launch) if program.schedule.is_pushed() => {
            pushed::enqueue_product(at, program, call, launch)
        }
        None if program.schedule.is_pushed() => pushed::enqueue_collective(at, program, call),
        launch => streamed::enqueue(at, program, call, launch, callback),
    }
}

/// A capture that ends while a stream that it has spread to was not joined ends in an error of its own.
fn rejoin(at: &EnqueueContext) {
    let Streams {
        copies,
        deferred_copies,
        joined,
        ..
    } = at.gpu.streams();
    for stream in [copies, deferred_copies] {
        if matches!(stream.is_capturing(), Ok(true)) {
            // If this fails too, the first error says why.
            let _ = at.main.wait_for(stream, joined);
        }
    }
}

/// Waits until the device's queues have room for another operation. They are bounded, and a driver that waits for room
/// has no deadline and does not hear of a failure.
fn make_room(at: &EnqueueContext, schedule: &Schedule) -> Result<()> {
    let EnqueueContext {
        shared, members, ..
    } = *at;
    let most = (COMMANDS / commands(schedule)).clamp(1, OUTSTANDING) as u32;
    let has_room = || match shared.monitor.outstanding() < most {
        true => Ok(true),
        false => members.fault().map_or(Ok(false), Err),
    };
    wait::poll(shared, members, has_room)
}
