//! Memory: the device's, other processes', and the host's that the device can reach.

use std::mem::MaybeUninit;
use std::sync::Arc;

use cudarc::driver::sys;

use super::{BLOCK, Device, DevicePtr, check};
use crate::error::{Error, Result};

/// Memory of this rank's own on its device, or memory of a caller's.
#[derive(Debug)]
pub struct Memory {
    device: Arc<Device>,
    ptr: DevicePtr,
    bytes: usize,
    borrowed: bool,
}

impl Memory {
    /// Zeroed memory in whole blocks, which can be exported.
    pub fn blocks(device: &Arc<Device>, bytes: usize) -> Result<Memory> {
        Memory::zeroed(device, bytes.next_multiple_of(BLOCK))
    }

    /// Zeroed memory.
    pub fn zeroed(device: &Arc<Device>, bytes: usize) -> Result<Memory> {
        device.bind()?;
        let mut ptr = 0;
        // SAFETY: writes the local.
        let result = unsafe { sys::cuMemAlloc_v2(&mut ptr, bytes.max(16)) };
        if result == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            return Err(Error::OutOfMemory {
                rank: device.rank,
                bytes,
                reason: format!("{} bytes are free on the GPU", device.free_bytes()?),
            });
        }
        check(device.rank, "cuMemAlloc", result)?;
        let memory = Memory {
            device: device.clone(),
            ptr,
            bytes: bytes.max(16),
            borrowed: false,
        };
        // SAFETY: the range was just allocated.
        unsafe { cuda!(device.rank, cuMemsetD8_v2(ptr, 0, memory.bytes))? };
        device.settle()?;
        Ok(memory)
    }

    /// Memory with these bytes in it.
    pub fn holding(device: &Arc<Device>, bytes: &[u8]) -> Result<Memory> {
        let mut memory = Memory::zeroed(device, bytes.len())?;
        if !bytes.is_empty() {
            memory.write_rows(0, bytes.len(), bytes.len(), bytes)?;
        }
        Ok(memory)
    }

    /// Memory that belongs to the caller.
    ///
    /// # Safety
    /// `bytes` bytes at `ptr` on `device` stay allocated as long as the result lives.
    pub unsafe fn borrowed(device: &Arc<Device>, ptr: DevicePtr, bytes: usize) -> Memory {
        Memory {
            device: device.clone(),
            ptr,
            bytes,
            borrowed: true,
        }
    }

    pub fn ptr(&self) -> DevicePtr {
        self.ptr
    }

    /// Copies `rows` rows of `width` bytes from the host, from byte `offset` on, `pitch` bytes apart; returns when done.
    pub fn write_rows(
        &mut self,
        offset: usize,
        pitch: usize,
        width: usize,
        from: &[u8],
    ) -> Result<()> {
        let mut copy = Memory::rows(width, from.len());
        copy.srcMemoryType = sys::CUmemorytype_enum::CU_MEMORYTYPE_HOST;
        copy.srcHost = from.as_ptr().cast();
        copy.srcPitch = width;
        copy.dstMemoryType = sys::CUmemorytype_enum::CU_MEMORYTYPE_DEVICE;
        copy.dstDevice = self.ptr + offset as u64;
        copy.dstPitch = pitch;
        self.copy(offset, pitch, &copy)
    }

    /// Copies rows of `width` bytes to the host, from byte `offset` on, `pitch` bytes apart; returns when done.
    pub fn read_rows(
        &self,
        offset: usize,
        pitch: usize,
        width: usize,
        to: &mut [u8],
    ) -> Result<()> {
        let mut copy = Memory::rows(width, to.len());
        copy.srcMemoryType = sys::CUmemorytype_enum::CU_MEMORYTYPE_DEVICE;
        copy.srcDevice = self.ptr + offset as u64;
        copy.srcPitch = pitch;
        copy.dstMemoryType = sys::CUmemorytype_enum::CU_MEMORYTYPE_HOST;
        copy.dstHost = to.as_mut_ptr().cast();
        copy.dstPitch = width;
        self.copy(offset, pitch, &copy)
    }

    fn rows(width: usize, bytes: usize) -> sys::CUDA_MEMCPY2D {
        // SAFETY: a plain struct, for which zero means "from the start" and "not this kind of memory".
        let mut copy: sys::CUDA_MEMCPY2D = unsafe { MaybeUninit::zeroed().assume_init() };
        copy.WidthInBytes = width;
        copy.Height = bytes / width.max(1);
        copy
    }

    fn copy(&self, offset: usize, pitch: usize, copy: &sys::CUDA_MEMCPY2D) -> Result<()> {
        let end = offset + copy.Height.saturating_sub(1) * pitch + copy.WidthInBytes;
        assert!(
            end <= self.bytes && copy.WidthInBytes <= pitch,
            "checked by the caller"
        );
        if copy.Height == 0 || copy.WidthInBytes == 0 {
            return Ok(());
        }
        self.device.bind()?;
        // SAFETY: the device's side lies within this allocation, as asserted; the host's is as long as
        // the rows, as `rows` computed from its length. The call returns when the bytes have been copied.
        unsafe { cuda!(self.device.rank, cuMemcpy2DUnaligned_v2(copy))? };
        self.device.settle()
    }

    /// A handle with which another process maps this memory.
    pub fn export(&self) -> Result<[u8; 64]> {
        // SAFETY: writes the local; the memory is an allocation of cuMemAlloc.
        unsafe {
            let mut handle = MaybeUninit::<sys::CUipcMemHandle>::zeroed().assume_init();
            cuda!(self.device.rank, cuIpcGetMemHandle(&mut handle, self.ptr))?;
            Ok(handle.reserved.map(|byte| byte as u8))
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if !self.borrowed && self.device.takes_back() {
            // SAFETY: allocated by this value. The call waits for what the device is doing with it.
            let _ = unsafe { sys::cuMemFree_v2(self.ptr) };
        }
    }
}

/// Another process's memory, mapped here.
#[derive(Debug)]
pub struct Import {
    device: Arc<Device>,
    ptr: DevicePtr,
}

impl Import {
    /// Maps what `handle` names.
    pub fn open(device: &Arc<Device>, handle: &[u8; 64]) -> Result<Import> {
        device.bind()?;
        let handle = sys::CUipcMemHandle {
            reserved: handle.map(|byte| byte as std::ffi::c_char),
        };
        let flags = sys::CUipcMem_flags_enum::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        let mut ptr = 0;
        // SAFETY: writes the local; the handle came from cuIpcGetMemHandle of another process.
        unsafe { cuda!(device.rank, cuIpcOpenMemHandle_v2(&mut ptr, handle, flags))? };
        Ok(Import {
            device: device.clone(),
            ptr,
        })
    }

    pub fn ptr(&self) -> DevicePtr {
        self.ptr
    }
}

impl Drop for Import {
    fn drop(&mut self) {
        if self.device.takes_back() {
            // SAFETY: opened by this value.
            let _ = unsafe { sys::cuIpcCloseMemHandle(self.ptr) };
        }
    }
}

/// Page-locked host memory that the device can write: one zeroed `T`.
#[derive(Debug)]
pub struct Pinned<T> {
    device: Arc<Device>,
    host: *mut T,
    ptr: DevicePtr,
}

// SAFETY: plain memory; access goes through volatile reads of a Copy type.
unsafe impl<T: Copy + Send> Send for Pinned<T> {}
// SAFETY: as above.
unsafe impl<T: Copy + Send> Sync for Pinned<T> {}

impl<T: bytemuck::Zeroable + Copy> Pinned<T> {
    pub fn zeroed(device: &Arc<Device>) -> Result<Pinned<T>> {
        device.bind()?;
        let (mut host, mut ptr) = (std::ptr::null_mut(), 0);
        let flags = sys::CU_MEMHOSTALLOC_DEVICEMAP | sys::CU_MEMHOSTALLOC_PORTABLE;
        // SAFETY: writes the locals, then the memory that was just allocated.
        unsafe {
            cuda!(
                device.rank,
                cuMemHostAlloc(&mut host, size_of::<T>(), flags)
            )?;
            host.cast::<T>().write(T::zeroed());
            let found = cuda!(device.rank, cuMemHostGetDevicePointer_v2(&mut ptr, host, 0));
            let pinned = Pinned {
                device: device.clone(),
                host: host.cast(),
                ptr,
            };
            found.map(|()| pinned)
        }
    }

    /// The value at this moment.
    pub fn read(&self) -> T {
        // SAFETY: the memory lives as long as `self`; the device may write it at any time, which a volatile
        // read of plain words bears.
        unsafe { self.host.read_volatile() }
    }

    /// Where the value lies on the host.
    pub fn as_ptr(&self) -> *const T {
        self.host
    }

    /// Sets the value.
    pub fn write(&self, value: T) {
        // SAFETY: as in `read`.
        unsafe { self.host.write_volatile(value) }
    }

    pub fn ptr(&self) -> DevicePtr {
        self.ptr
    }
}

impl<T> Drop for Pinned<T> {
    fn drop(&mut self) {
        if self.device.takes_back() {
            // SAFETY: allocated by this value.
            let _ = unsafe { sys::cuMemFreeHost(self.host.cast()) };
        }
    }
}
