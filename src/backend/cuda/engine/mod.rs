//! Runs a schedule on a GPU: streams copy rows and write flags while one kernel multiplies.
//!
//! Only this folder enqueues operations on streams. Each file has one kind of work.

pub mod align;
mod announce;
mod callbacks;
pub mod check_peers;
mod collective;
pub mod context;
mod copies;
pub mod copy_rows;
mod lanes;
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
use crate::backend::cuda::program::GpuProgram;
use crate::backend::cuda::program::support::{COMMANDS, commands};
use crate::backend::cuda::shared::monitor::OUTSTANDING;
use crate::error::Result;
use crate::schedule::Schedule;
use context::{EnqueueContext, ProgramCall};

/// A pause that is longer than enqueueing an operation takes.
const ENQUEUED: Duration = Duration::from_millis(2);

/// Enqueues a call. `callback`: the caller's function that runs during the call.
pub fn run(
    at: &EnqueueContext,
    program: &GpuProgram,
    mut call: ProgramCall,
    callback: Option<Callback>,
) -> Result<()> {
    let EnqueueContext { gpu, members, .. } = *at;
    let begun = enqueue(at, program, &mut call, callback);
    // The callback may have forked. The code below takes locks that other threads may have held at the fork.
    members.refuse_fork()?;
    if at.recorded {
        return begun.inspect_err(|_| rejoin(at));
    }
    // This also covers work that was enqueued before a failure.
    let Streams {
        copies,
        deferred_copies,
        joined,
        lanes,
        carried,
        ..
    } = gpu.streams();
    let rejoined = match &begun {
        Ok(()) => Ok(()),
        Err(_) => {
            let mut lanes = lanes.iter();
            let lanes = lanes.try_for_each(|lane| copies.wait_for(lane, carried));
            copies.wait_for(deferred_copies, joined).and(lanes)
        }
    };
    let marked = gpu.reclaimer.mark();
    begun.and(rejoined).and(marked)
}

fn enqueue(
    at: &EnqueueContext,
    program: &GpuProgram,
    call: &mut ProgramCall,
    callback: Option<Callback>,
) -> Result<()> {
    make_room(at, &program.schedule)?;
    let run = || at.run(program, call.epoch);
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

/// Joins the streams of a capture after a failure.
///
/// Otherwise the capture would end in an error of its own, because a stream that it has spread to is not joined.
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

/// Waits until the device's queues have room for another operation.
///
/// The queues are bounded. If the driver waited for room, it would have no deadline and would not notice a failed
/// group.
fn make_room(at: &EnqueueContext, schedule: &Schedule) -> Result<()> {
    let EnqueueContext {
        shared, members, ..
    } = *at;
    let most = (COMMANDS / commands(schedule)).clamp(1, OUTSTANDING) as u32;
    let has_room = || {
        if shared.monitor.outstanding() < most {
            Ok(true)
        } else {
            members.fault().map_or(Ok(false), Err)
        }
    };
    wait::poll(shared, members, has_room)
}
