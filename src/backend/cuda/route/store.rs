//! Rows that their owner's kernel stores, by warps that have nothing else to do.

use super::super::abi::GemmeshCopyTask;
use crate::schedule::{Route, Schedule, Transfer};

/// What the kernel stores, cut so that every warp that pushes has some, and that a fence after each costs little.
///
/// Returned with the number of transfers that they are of.
pub fn tasks(schedule: &Schedule, multiprocessors: usize) -> (Vec<GemmeshCopyTask>, usize) {
    const MOVERS: usize = 3;
    const UNIT: usize = 2048;
    const LARGEST: usize = 8 * UNIT;
    let stored: Vec<&Transfer> = schedule
        .moves()
        .filter(|transfer| transfer.route == Route::Store && transfer.produced.is_none())
        .collect();
    // Whole rows, for what is stored is not cut along K.
    let extents: Vec<(usize, usize)> = stored
        .iter()
        .flat_map(|transfer| &transfer.regions)
        .map(|moved| {
            let region = &moved.from;
            let extent = schedule.matrices()[region.matrix].extent_of(region);
            (extent.offset, extent.rows * extent.width)
        })
        .collect();
    let total: usize = extents.iter().map(|(_, bytes)| bytes).sum();
    let share = total / (MOVERS * multiprocessors);
    let length = share.next_multiple_of(UNIT).clamp(UNIT, LARGEST);
    let mut tasks = Vec::new();
    for (index, (transfer, &(offset, bytes))) in stored.iter().zip(&extents).enumerate() {
        for begin in (0..bytes).step_by(length) {
            tasks.push(GemmeshCopyTask {
                offset: (offset + begin) as u64,
                bytes: length.min(bytes - begin) as u32,
                peer: transfer.to as u32,
                flag: transfer.flag as u32,
                push: index as u32,
                tasks: bytes.div_ceil(length) as u32,
                reserved: 0,
            });
        }
    }
    (tasks, stored.len())
}
