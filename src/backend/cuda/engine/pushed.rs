//! Operations whose kernel waits for what peers push.

use super::ENQUEUED;
use super::announce::{announce, pause};
use super::push;
use crate::backend::cuda::Cuda;
use crate::backend::cuda::driver::StreamMemOp;
use crate::backend::cuda::program::{self, EnqueueContext, Launch, Program};
use crate::backend::sealed::Call;
use crate::error::Result;
use crate::protocol::epoch::Epoch;
use crate::schedule::Route;

/// The host's part of an operation whose kernel waits for peers.
pub(super) fn begin_pushed(at: &EnqueueContext, program: &Program, epoch: Epoch) -> Result<()> {
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
pub(super) fn enqueue_pushed(
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
