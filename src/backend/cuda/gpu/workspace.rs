//! Memory for the partial sums of slices of K, until a tile's last slice has been added.

use std::sync::Arc;

use super::reclaim::{Deferred, Reclaimer};
use crate::backend::cuda::driver::{Device, DeviceMemory, DevicePtr};
use crate::backend::cuda::family::Family;
use crate::error::Result;

/// Bytes of partial sums: enough for 512 slices of the largest tiles.
pub const BYTES: usize = 64 << 20;
/// Elements of a CTA's smallest tile.
const SMALLEST: usize = 16 * 64;
/// Counts of arrivals: one for each warp's part of as many of the smallest tiles as there is room for. A tile has at most
/// as many parts as there are warps.
pub fn counts(family: &dyn Family) -> usize {
    BYTES / (SMALLEST * size_of::<f32>()) * family.storing_warps() as usize
}

/// One memory for all operations of a main stream, because each kernel uses it when the ones before have ended.
#[derive(Debug)]
pub struct Workspace(Deferred<DeviceMemory>);

impl Workspace {
    pub fn new(
        device: &Arc<Device>,
        reclaimer: &Arc<Reclaimer>,
        family: &dyn Family,
    ) -> Result<Workspace> {
        let bytes = BYTES + counts(family) * size_of::<u32>();
        let memory = DeviceMemory::zeroed(device, bytes)?;
        Ok(Workspace(Deferred::new(memory, reclaimer)))
    }

    pub fn partials(&self) -> DevicePtr {
        self.0.ptr()
    }

    /// Counts of arrived slices. They are zero between operations, because whoever counts the last slice resets the
    /// count.
    pub fn arrived(&self) -> DevicePtr {
        self.0.ptr() + BYTES as u64
    }
}
