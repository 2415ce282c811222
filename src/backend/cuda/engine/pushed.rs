//! Operations whose kernel waits for what peers push.

use super::announce::{announce, pause};
use super::context::{EnqueueContext, ProgramCall};
use super::{ENQUEUED, align, collective, product, push, wait};
use crate::backend::cuda::driver::StreamMemOp;
use crate::backend::cuda::program::Program;
use crate::backend::cuda::program::launch::ProductLaunch;
use crate::error::Result;
use crate::protocol::epoch::Epoch;
use crate::schedule::Route;

/// An operation that multiplies nothing, and whose kernel moves its rows.
pub fn enqueue_collective(
    at: &EnqueueContext,
    program: &Program,
    call: &ProgramCall,
) -> Result<()> {
    begin(at, program, call.epoch)?;
    collective::launch(at, program, call)
}

/// The host's part of an operation whose kernel waits for peers.
fn begin(at: &EnqueueContext, program: &Program, epoch: Epoch) -> Result<()> {
    if at.recorded {
        return Ok(());
    }
    at.shared.monitor.begin(epoch, program.waits);
    if epoch.refreshes() {
        // Words that only pulls write, and others read: they too must not come to look like the future.
        announce(at, epoch, None)?;
    }
    Ok(())
}

/// An operation whose rows their owners push: the kernel tells the peers that it runs, and the copy stream when they
/// do. It counts its epochs on the device, so what is enqueued here may as well be recorded, to run again and again.
pub fn enqueue_product(
    at: &EnqueueContext,
    program: &Program,
    call: &mut ProgramCall,
    launch: ProductLaunch,
) -> Result<()> {
    let EnqueueContext {
        gpu,
        shared,
        members,
        main,
        recorded,
    } = *at;
    begin(at, program, call.epoch)?;
    if call.trace.is_some() {
        pause(main, ENQUEUED)?;
        align::align(gpu, shared, members, main)?;
    }
    let by_copies = program.schedule.uses(Route::Push);
    if by_copies {
        push::enqueue(at, program, call)?;
    }
    product::launch(main, &launch)?;
    // The kernel has waited for what no tile waits for, and copies only read what is added.
    collective::reduce(main, program, None, &call.operands)?;
    if by_copies {
        let streams = gpu.streams();
        main.wait_for(&streams.copies, &streams.gathered)?;
    }
    if program.reduction().is_some() && !recorded {
        let completed = StreamMemOp::Write(shared.monitor.completed(), call.epoch.raw());
        // SAFETY: the word lives as long as the backend.
        unsafe { main.words(&[completed])? };
    }
    if let Some(spans) = call.trace.as_deref_mut() {
        wait::until_idle(shared, members, main)?;
        launch.spans(spans)?;
    }
    Ok(())
}
