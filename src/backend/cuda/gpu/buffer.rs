//! The memory of one matrix.

use std::sync::Arc;

use super::reclaim::Deferred;
use crate::backend::contract::Owner;
use crate::backend::cuda::driver::{Device, DeviceMemory, DeviceRegion};

/// The memory of one matrix. Rows begin at multiples of 16 bytes.
#[derive(Debug)]
pub struct DeviceBuffer {
    storage: Storage,
    /// Bytes from row to row.
    pub pitch: usize,
    /// Bytes of a row that are elements.
    pub width: usize,
}

#[derive(Debug)]
enum Storage {
    Own(Deferred<DeviceMemory>),
    /// Somebody else's. Dropping the owner gives it back. Without an owner, the caller keeps it alive.
    Foreign(DeviceRegion, #[allow(dead_code)] Option<Deferred<Owner>>),
}

impl DeviceBuffer {
    /// A matrix in this library's memory.
    pub fn own(memory: Deferred<DeviceMemory>, pitch: usize, width: usize) -> DeviceBuffer {
        DeviceBuffer {
            storage: Storage::Own(memory),
            pitch,
            width,
        }
    }

    /// A matrix in somebody else's memory.
    ///
    /// # Safety
    /// While the buffer is used, `ptr` is device memory of at least `(rows - 1) * pitch + width` bytes. Without rows it
    /// may be 0.
    pub unsafe fn foreign(
        device: &Arc<Device>,
        ptr: u64,
        [rows, width]: [usize; 2],
        pitch: usize,
        owner: Option<Deferred<Owner>>,
    ) -> DeviceBuffer {
        let bytes = match rows {
            0 => 0,
            _ => (rows - 1).saturating_mul(pitch).saturating_add(width),
        };
        // SAFETY: as this function's.
        let region = unsafe { DeviceRegion::new(device, ptr, bytes) };
        DeviceBuffer {
            storage: Storage::Foreign(region, owner),
            pitch,
            width,
        }
    }

    pub fn region(&self) -> &DeviceRegion {
        match &self.storage {
            Storage::Own(memory) => memory.region(),
            Storage::Foreign(region, _) => region,
        }
    }

    pub fn region_mut(&mut self) -> &mut DeviceRegion {
        match &mut self.storage {
            Storage::Own(memory) => memory.region_mut(),
            Storage::Foreign(region, _) => region,
        }
    }

    /// Its address, and the bytes from row to row.
    pub fn place(&self) -> (u64, usize) {
        (self.region().ptr(), self.pitch)
    }
}
