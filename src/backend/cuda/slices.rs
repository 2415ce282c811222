//! Memory for what slices of K have added up, until the last of a tile's is there.

use super::driver::{Device, DevicePtr, Memory};
use super::kernel::CONSUMER_WARPS;
use super::reclaim::{Deferred, Reclaimer};
use crate::error::Result;
use crate::schedule::Config;
use crate::schedule::layout::limit;
use std::sync::Arc;

/// Bytes of partial sums: of 512 slices of the largest tiles.
const BYTES: usize = 64 << 20;
/// The smallest tile of a CTA.
const SMALLEST: usize = 64 * 64;
/// Warps of as many tiles as there is room for.
const COUNTS: usize = BYTES / (SMALLEST * size_of::<f32>()) * CONSUMER_WARPS as usize;

/// One memory for all operations of a group, for their kernels run one after the other.
#[derive(Debug)]
pub struct Workspace(Deferred<Memory>);

impl Workspace {
    pub fn new(device: &Arc<Device>, reclaimer: &Arc<Reclaimer>) -> Result<Workspace> {
        let bytes = BYTES + COUNTS * size_of::<u32>();
        let memory = Memory::zeroed(device, bytes)?;
        Ok(Workspace(Deferred::new(memory, reclaimer)))
    }

    pub fn partials(&self) -> DevicePtr {
        self.0.ptr()
    }

    /// Zero between operations: who counts the last takes the count back.
    pub fn arrived(&self) -> DevicePtr {
        self.0.ptr() + BYTES as u64
    }
}

/// Whether there is room for what slices of so many entries of the table add up, and a kernel that does it: none that adds partials.
///
/// # Errors
/// [`Error::Limit`](crate::Error::Limit).
pub fn check(config: &Config, entries: usize, adds_partials: bool) -> Result<()> {
    if adds_partials {
        let what = "Config::tile.k_slices of partial sums that are sent,";
        limit(what, config.tile.k_slices, 1, 1)?;
    }
    limit(
        "bytes that Config::tile.k_slices adds up",
        bytes(config, entries),
        0,
        BYTES,
    )
}

/// What they take.
fn bytes(config: &Config, entries: usize) -> usize {
    match config.tile.k_slices {
        1 => 0,
        slices => {
            let of_entry = config.entry_rows() * config.tile.n * size_of::<f32>();
            entries.saturating_mul(slices * of_entry)
        }
    }
}

/// As [`check`].
pub fn fit(config: &Config, entries: usize) -> bool {
    bytes(config, entries) <= BYTES
}
