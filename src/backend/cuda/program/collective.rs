//! The kernel of a collective: it stores rows to the peers, waits for the peers' rows and adds them.

use std::ffi::c_void;

use super::low_latency;
use super::operands::Operands;
use super::params::Fixed;
use super::reduction::{self, NOTHING_ADDED};
use super::sends::{self, PIECE};
use super::tables::ProgramTables;
use crate::backend::cuda::abi::{
    GEMMESH_COLLECTIVE_THREADS, GemmeshParams, GemmeshReduction, GemmeshSend, GemmeshSends,
};
use crate::backend::cuda::driver::Function;
use crate::backend::cuda::gpu::Gpu;
use crate::backend::cuda::shared::words::Control;
use crate::error::Result;
use crate::schedule::{Move, Schedule};

/// The most CTAs of a grid. All run at the same time, and at least as many fit, because a multiprocessor holds two.
const MOST_CTAS: usize = 128;

/// A kernel that stores rows, waits for the peers' rows and adds them.
#[derive(Debug)]
pub struct CollectiveKernel {
    pub function: Function,
    pub grid: u32,
    /// The number of the matrix whose rows it sends.
    source: usize,
    /// The number of the matrix that it stores to.
    pub target: usize,
    pub params: Fixed<GemmeshParams>,
    sends: Fixed<GemmeshSends>,
}

impl CollectiveKernel {
    /// The kernel of a schedule without a product. None if nothing is moved. `fixed`: its parameters as a kernel that
    /// may wait for peers.
    pub fn new(
        gpu: &Gpu,
        control: &Control,
        schedule: &Schedule,
        tables: &ProgramTables,
        mut fixed: GemmeshParams,
    ) -> Option<CollectiveKernel> {
        let mut moved = schedule.arrivals().iter().chain(schedule.moves());
        let Move { from, to } = &moved.next()?.regions[0];
        if sends::is_low_latency(schedule) {
            fixed.low_latency = low_latency::areas(control, schedule.world());
        }
        let [source, target] = [from, to].map(|region| schedule.matrices()[region.matrix]);
        let sends = GemmeshSends {
            sends: tables.sends as *const GemmeshSend,
            from: std::ptr::null(),
            from_pitch: 0,
            to_pitch: target.row_bytes() as u64,
            count: tables.send_count,
            flags: schedule.arrivals().len() as u32,
            pieces: (source.row_bytes() / PIECE) as u32,
            reserved: 0,
        };
        let bytes = target.dtype.bytes();
        let added = schedule.reduction();
        let pieces = added.map_or(0, |added| added.rows * (added.n * bytes).div_ceil(PIECE));
        let adders = pieces.div_ceil(GEMMESH_COLLECTIVE_THREADS as usize);
        let moved = schedule.arrivals().len().max(tables.send_count as usize);
        let most = MOST_CTAS.min(2 * gpu.device.multiprocessors());
        let most = most.min(gpu.most_ctas(None));
        Some(CollectiveKernel {
            function: gpu.kernels.collective(target.dtype),
            grid: adders.max(moved).clamp(1, most) as u32,
            source: from.matrix,
            target: to.matrix,
            params: Fixed(fixed),
            sends: Fixed(sends),
        })
    }

    /// The kernel's parameters for one call: what it sends, and what it adds.
    pub fn told(
        &self,
        schedule: &Schedule,
        operands: &Operands,
    ) -> Result<(GemmeshSends, GemmeshReduction)> {
        let mut sends = self.sends.0;
        // A rank that sends nothing may have no source matrix.
        if let Some(source) = operands.get(self.source) {
            sends.from = source.ptr as *const c_void;
            sends.from_pitch = source.pitch as u64;
        }
        let sums = match schedule.reduction() {
            Some(added) => reduction::sums(schedule, added, 0..added.rows, operands)?,
            None => NOTHING_ADDED,
        };
        Ok((sends, sums))
    }
}
