//! First uses of stream commands, at set-up.

use super::wait;
use crate::backend::cuda::driver::StreamMemOp;
use crate::backend::cuda::gpu::Gpu;
use crate::backend::cuda::shared::Shared;
use crate::backend::cuda::shared::words::BOX;
use crate::error::Result;
use crate::ranks::members::Members;

/// Uses each kind of stream command once, while nothing waits for the streams.
///
/// At a command's first use, the driver may wait for kernels to end.
pub fn warm_up(gpu: &Gpu, shared: &Shared, members: &Members) -> Result<()> {
    let _bound = gpu.device.bind()?;
    // The boxes are not memory of the pool, because no stream can wait for a word of pool memory.
    let [from, to] = [0, 1].map(|by| shared.control.inbox(members.rank, by));
    let streams = gpu.streams();
    for stream in [&streams.copies, &streams.deferred_copies] {
        // SAFETY: two boxes of the control block, which no rank uses before all have met again.
        unsafe {
            stream.fill(from, 0, BOX / 4)?;
            stream.copy(to, from, BOX)?;
            stream.copy_rows((to, BOX / 4), (from, BOX / 4), BOX / 8, 4)?;
            stream.words(&[StreamMemOp::Write(from, 1), StreamMemOp::Wait(from, 1)])?;
        }
        wait::until_idle(shared, members, stream)?;
    }
    drop(gpu.tables.hold([&[0]])?);
    wait::until_idle(shared, members, &gpu.main())
}
