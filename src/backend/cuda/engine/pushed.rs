//! Operations whose kernel waits for rows that peers push or store.

use super::announce::{announce, pause};
use super::context::{EnqueueContext, ProgramCall};
use super::lanes::{self, ChunkFlags};
use super::stamps::stamp;
use super::{ENQUEUED, align, collective, product, push, wait};
use crate::backend::cuda::driver::StreamMemOp;
use crate::backend::cuda::program::GpuProgram;
use crate::backend::cuda::program::launch::ProductLaunch;
use crate::error::Result;
use crate::protocol::epoch::Epoch;
use crate::schedule::Route;

/// Enqueues an operation that multiplies nothing and whose kernel moves its rows.
pub fn enqueue_collective(
    at: &EnqueueContext,
    program: &GpuProgram,
    call: &ProgramCall,
) -> Result<()> {
    begin(at, program, call.epoch)?;
    collective::launch(at, program, call)
}

/// Begins an operation whose kernel waits for peers, unless it is captured.
fn begin(at: &EnqueueContext, program: &GpuProgram, epoch: Epoch) -> Result<()> {
    if at.recorded {
        return Ok(());
    }
    at.shared.begin(epoch, &program.waits, &program.turns);
    if epoch.refreshes() {
        // Refreshes the flags that only pulls write. Their old values too must never compare as future epochs.
        announce(at, epoch, None)?;
    }
    Ok(())
}

/// Enqueues a product whose rows their owners push or store.
///
/// The kernel tells the peers that it runs, and gives the copy stream its permit when their kernels run. It counts
/// epochs on the device, so the enqueued work can also be captured and replayed.
pub fn enqueue_product(
    at: &EnqueueContext,
    program: &GpuProgram,
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
    let schedule = &program.schedule;
    let by_copies = schedule.awaits_permit();
    lanes::fork(at, schedule)?;
    if by_copies {
        push::enqueue(at, program, call)?;
    }
    let begun = if call.trace.is_some() && schedule.uses(Route::Net) {
        Some(stamp(&gpu.device, main)?)
    } else {
        None
    };
    product::launch(main, &launch)?;
    let carried = lanes::enqueue(at, program, call, ChunkFlags::Mailbox, None)?;
    // The kernel has waited for the flags that no tile awaits, and copies only read the addends.
    collective::reduce(main, program, None, &call.operands)?;
    if by_copies {
        let streams = gpu.streams();
        main.wait_for(&streams.copies, &streams.gathered)?;
    }
    lanes::join(at, schedule)?;
    if !program.ends_with_kernel() && !recorded {
        let completed = StreamMemOp::Write(shared.monitor.completed(), call.epoch.raw());
        // SAFETY: the word lives as long as the backend.
        unsafe { main.words(&[completed])? };
    }
    if let Some(spans) = call.trace.as_deref_mut() {
        wait::until_idle(shared, members, main)?;
        launch.spans(spans)?;
        if let Some(begun) = begun {
            carried.spans(&begun, spans)?;
        }
    }
    Ok(())
}
