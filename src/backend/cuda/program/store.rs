//! Rows that their owner's kernel stores, by warps that have nothing else to do.

use crate::backend::cuda::abi::GemmeshCopyTask;
use crate::schedule::{Route, Schedule};

/// What the kernel stores: a task for each chunk.
pub fn tasks(schedule: &Schedule) -> Vec<GemmeshCopyTask> {
    let stored = schedule
        .moves()
        .filter(|transfer| transfer.route == Route::Store && transfer.produced.is_none());
    let tasks = stored.flat_map(|transfer| {
        transfer.regions.iter().map(move |moved| {
            let spec = &schedule.matrices()[moved.from.matrix];
            let extent = spec.extent_of(&moved.from, spec.row_bytes());
            GemmeshCopyTask {
                offset: extent.offset as u64,
                bytes: extent.contiguous().unwrap_or(0) as u32,
                peer: transfer.to as u32,
                flag: transfer.flag as u32,
                reserved: [0; 3],
            }
        })
    });
    let mut all = Vec::with_capacity(schedule.moves().count());
    all.extend(tasks);
    all
}
