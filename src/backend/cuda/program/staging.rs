//! Memory for rows with gaps between them, which go over the network without the gaps.

use crate::backend::cuda::driver::{DeviceMemory, DevicePtr};
use crate::backend::cuda::gpu::Gpu;
use crate::backend::cuda::gpu::reclaim::Deferred;
use crate::backend::cuda::gpu::streams::LANES;
use crate::error::Result;
use crate::schedule::plan::matrices::A;
use crate::schedule::{Schedule, Transfer};

/// Addresses at whose multiples copies are fast.
const ALIGNMENT: usize = 256;

/// Room for a message each way on each lane, if rows may have gaps.
#[derive(Debug)]
pub struct Staging {
    memory: Option<Deferred<DeviceMemory>>,
    /// Bytes of the longest message.
    bytes: usize,
}

impl Staging {
    /// # Errors
    /// [`Kind::OutOfMemory`](crate::error::Kind::OutOfMemory).
    pub fn new(gpu: &Gpu, schedule: &Schedule) -> Result<Staging> {
        let moved = schedule.sent().chain(schedule.received());
        let with_gaps = moved.filter(|moved| may_have_gaps(schedule, moved));
        let longest = with_gaps.map(|moved| schedule.bytes_of(moved)).max();
        let bytes = longest.unwrap_or(0).next_multiple_of(ALIGNMENT);
        let memory = (bytes > 0).then(|| gpu.scratch(2 * LANES * bytes));
        Ok(Staging {
            memory: memory.transpose()?,
            bytes,
        })
    }

    /// The room for what a lane sends or receives. 0 if no rows have gaps.
    pub fn room(&self, lane: usize, is_sent: bool) -> DevicePtr {
        let number = 2 * lane + usize::from(is_sent);
        let memory = self.memory.as_ref();
        memory.map_or(0, |memory| memory.ptr() + (number * self.bytes) as u64)
    }
}

/// Whether this rank's rows of a transfer may have gaps. Whole rows of memory that ranks share have none. The input of a
/// collective lies as the caller wishes.
fn may_have_gaps(schedule: &Schedule, moved: &Transfer) -> bool {
    let is_sent = moved.from == schedule.rank();
    moved.regions.iter().any(|its| {
        let region = if is_sent { &its.from } else { &its.to };
        let is_whole = region.columns.len() == schedule.matrices()[region.matrix].columns;
        let is_input = region.matrix == A && schedule.product().is_none();
        !is_whole || is_input
    })
}
