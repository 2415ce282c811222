//! Memory for the sums of slices of K, until the last slice of a tile has been added up.

use std::sync::Arc;

use super::kernels::CONSUMER_WARPS;
use super::reclaim::{Deferred, Reclaimer};
use crate::backend::cuda::driver::{Device, DeviceMemory, DevicePtr};
use crate::error::Result;

/// Bytes of partial sums: of 512 slices of the largest tiles.
pub const BYTES: usize = 64 << 20;
/// The smallest tile of a CTA.
const SMALLEST: usize = 64 * 64;
/// Warps of as many tiles as there is room for.
pub const COUNTS: usize = BYTES / (SMALLEST * size_of::<f32>()) * CONSUMER_WARPS as usize;

/// One memory for all operations of one main stream, whose kernels run one after the other.
#[derive(Debug)]
pub struct Workspace(Deferred<DeviceMemory>);

impl Workspace {
    pub fn new(device: &Arc<Device>, reclaimer: &Arc<Reclaimer>) -> Result<Workspace> {
        let bytes = BYTES + COUNTS * size_of::<u32>();
        let memory = DeviceMemory::zeroed(device, bytes)?;
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
