//! A starting line: the ranks' streams go on at the same time.

use crate::backend::cuda::abi::{GEMMESH_MAX_WORLD, GemmeshAlignment};
use crate::backend::cuda::driver::{LaunchShape, Stream};
use crate::backend::cuda::gpu::Gpu;
use crate::backend::cuda::program::params::nanoseconds;
use crate::backend::cuda::shared::Shared;
use crate::error::Result;
use crate::ranks::members::Members;

/// Makes later work on `stream` begin at the same time on all ranks of this host. Collective.
pub fn align(gpu: &Gpu, shared: &Shared, members: &Members, stream: &Stream) -> Result<()> {
    let control = &shared.control;
    let mut words = [std::ptr::null_mut(); GEMMESH_MAX_WORLD as usize];
    let near = |rank: &usize| members.hosts.share(*rank, members.rank);
    for rank in (0..members.world).filter(near) {
        words[rank] = control.aligned(rank) as *mut u32;
    }
    let mut alignment = GemmeshAlignment {
        words,
        abort: control.abort() as *const u32,
        // If a rank that has not come fails, the monitor writes the abort word.
        deadline_ns: match members.deadlines.arrival() {
            Some(arrival) => nanoseconds(arrival),
            None => u64::MAX,
        },
        count: shared.next_alignment(),
        rank: members.rank as u32,
        world: members.world as u32,
        reserved: 0,
    };
    let mut arguments = [(&raw mut alignment).cast()];
    let _bound = gpu.device.bind()?;
    // SAFETY: the argument is what abi.h says; control blocks are unmapped when the streams have passed.
    unsafe {
        let align = gpu.kernels.align;
        align.launch(
            stream,
            LaunchShape::new(1, GEMMESH_MAX_WORLD),
            &mut arguments,
        )
    }
}
