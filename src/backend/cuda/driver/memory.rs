//! Memory: a rank's own, memory that ranks share, and host memory that the device can reach.
//!
//! No call that waits for the device frees memory (see [`super::Device`]). A rank's own memory comes from a pool.
//! Shared memory is virtual memory, which the driver keeps as long as any process maps it. So no rank needs to know
//! when the others have dropped the memory, closed their group, or died.

use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use cudarc::driver::sys;
use rustix::event::{EventfdFlags, eventfd};

use super::{BLOCK, Device, DevicePtr, check, is_fork, lock};
use crate::error::{Error, Kind, Result};
use crate::resources::Bytes;

/// A range of device memory that somebody else owns.
#[derive(Debug)]
pub struct DeviceRegion {
    device: Arc<Device>,
    ptr: DevicePtr,
    bytes: usize,
}

impl DeviceRegion {
    /// # Safety
    /// `bytes` bytes at `ptr` on `device` stay allocated as long as the result is used.
    pub unsafe fn new(device: &Arc<Device>, ptr: DevicePtr, bytes: usize) -> DeviceRegion {
        DeviceRegion {
            device: device.clone(),
            ptr,
            bytes,
        }
    }

    pub fn ptr(&self) -> DevicePtr {
        self.ptr
    }

    /// Copies rows of `width` bytes from the host, to byte `offset` and on, `pitch` bytes apart. Returns when done.
    pub fn write_rows(
        &mut self,
        offset: usize,
        pitch: usize,
        width: usize,
        from: &[u8],
    ) -> Result<()> {
        let (length, host) = (from.len(), from.as_ptr().cast());
        let rows = self.rows(offset, pitch, width, length)?;
        let (rank, stream) = (self.device.rank, self.device.gpu.lasting.host_stream);
        let device = self.ptr + offset as u64;
        let _bound = self.device.bind()?;
        self.device.settle()?;
        // SAFETY: the device's side lies within this range, as `rows` has checked; the host's is as long. `finish`
        // returns when the bytes have been copied.
        let begun = unsafe {
            match (rows, width == pitch) {
                (0, _) => return Ok(()),
                (_, true) => cuda!(rank, cuMemcpyHtoDAsync_v2(device, host, length, stream)),
                (_, false) => {
                    let mut copy = plain(width, rows);
                    copy.srcMemoryType = sys::CUmemorytype_enum::CU_MEMORYTYPE_HOST;
                    copy.srcHost = host;
                    copy.srcPitch = width;
                    copy.dstDevice = device;
                    copy.dstPitch = pitch;
                    cuda!(rank, cuMemcpy2DAsync_v2(&copy, stream))
                }
            }
        };
        begun.and_then(|()| self.device.finish())
    }

    /// Copies rows of `width` bytes to the host, from byte `offset` on, `pitch` bytes apart. Returns when done.
    pub fn read_rows(
        &self,
        offset: usize,
        pitch: usize,
        width: usize,
        to: &mut [u8],
    ) -> Result<()> {
        let (length, host) = (to.len(), to.as_mut_ptr().cast());
        let rows = self.rows(offset, pitch, width, length)?;
        let (rank, stream) = (self.device.rank, self.device.gpu.lasting.host_stream);
        let device = self.ptr + offset as u64;
        let _bound = self.device.bind()?;
        self.device.settle()?;
        // SAFETY: as in `write_rows`.
        let begun = unsafe {
            match (rows, width == pitch) {
                (0, _) => return Ok(()),
                (_, true) => cuda!(rank, cuMemcpyDtoHAsync_v2(host, device, length, stream)),
                (_, false) => {
                    let mut copy = plain(width, rows);
                    copy.srcDevice = device;
                    copy.srcPitch = pitch;
                    copy.dstMemoryType = sys::CUmemorytype_enum::CU_MEMORYTYPE_HOST;
                    copy.dstHost = host;
                    copy.dstPitch = width;
                    cuda!(rank, cuMemcpy2DAsync_v2(&copy, stream))
                }
            }
        };
        begun.and_then(|()| self.device.finish())
    }

    /// How many rows of `width` bytes the host's `bytes` bytes are. Fails if they do not fit this range.
    fn rows(&self, offset: usize, pitch: usize, width: usize, bytes: usize) -> Result<usize> {
        let rows = bytes / width.max(1);
        let last = rows.saturating_sub(1).saturating_mul(pitch);
        let end = offset.saturating_add(last).saturating_add(width);
        let is_within = end <= self.bytes && width <= pitch && rows * width == bytes;
        if rows > 0 && !is_within {
            let all = self.bytes;
            return Err(Kind::Internal {
                what: format!(
                    "a copy of {bytes} bytes in rows of {width} ends at byte {end} of {all}"
                ),
            }
            .on(self.device.rank));
        }
        Ok(rows)
    }

    /// Sets all bytes to zero.
    fn clear(&mut self) -> Result<()> {
        if self.bytes == 0 {
            return Ok(());
        }
        let (rank, stream) = (self.device.rank, self.device.gpu.lasting.host_stream);
        let _bound = self.device.bind()?;
        // SAFETY: the range is allocated.
        unsafe { cuda!(rank, cuMemsetD8Async(self.ptr, 0, self.bytes, stream))? };
        self.device.settle()
    }
}

/// A copy of `rows` rows of `width` bytes on the device, without its addresses.
pub(super) fn plain(width: usize, rows: usize) -> sys::CUDA_MEMCPY2D {
    sys::CUDA_MEMCPY2D {
        srcXInBytes: 0,
        srcY: 0,
        srcMemoryType: sys::CUmemorytype_enum::CU_MEMORYTYPE_DEVICE,
        srcHost: std::ptr::null(),
        srcDevice: 0,
        srcArray: std::ptr::null_mut(),
        srcPitch: width,
        dstXInBytes: 0,
        dstY: 0,
        dstMemoryType: sys::CUmemorytype_enum::CU_MEMORYTYPE_DEVICE,
        dstHost: std::ptr::null_mut(),
        dstDevice: 0,
        dstArray: std::ptr::null_mut(),
        dstPitch: width,
        WidthInBytes: width,
        Height: rows,
    }
}

/// Memory of this rank's own, from the pool.
#[derive(Debug)]
pub struct DeviceMemory(DeviceRegion);

impl DeviceMemory {
    /// Zeroed memory.
    pub fn zeroed(device: &Arc<Device>, bytes: usize) -> Result<DeviceMemory> {
        let mut memory = DeviceMemory::uninitialised(device, bytes)?;
        memory.0.clear()?;
        Ok(memory)
    }

    /// Memory with these bytes in it.
    pub fn holding(device: &Arc<Device>, bytes: &[u8]) -> Result<DeviceMemory> {
        let mut memory = DeviceMemory::uninitialised(device, bytes.len())?;
        let length = bytes.len();
        memory.0.write_rows(0, length, length, bytes)?;
        Ok(memory)
    }

    fn uninitialised(device: &Arc<Device>, bytes: usize) -> Result<DeviceMemory> {
        let gpu = &device.gpu;
        let _bound = device.bind()?;
        let bytes = bytes.max(16);
        fits(device, bytes)?;
        let mut ptr = 0;
        // SAFETY: writes the local.
        let result = unsafe {
            sys::cuMemAllocFromPoolAsync(&mut ptr, bytes, gpu.lasting.pool, gpu.lasting.host_stream)
        };
        refused(device, bytes, "cuMemAllocFromPoolAsync", result)?;
        let memory = DeviceMemory(DeviceRegion {
            device: device.clone(),
            ptr,
            bytes,
        });
        // Before this, only the host stream may use the memory.
        device.settle()?;
        Ok(memory)
    }

    pub fn region(&self) -> &DeviceRegion {
        &self.0
    }

    pub fn region_mut(&mut self) -> &mut DeviceRegion {
        &mut self.0
    }

    pub fn ptr(&self) -> DevicePtr {
        self.0.ptr
    }
}

impl Drop for DeviceMemory {
    /// Nothing uses it any more.
    fn drop(&mut self) {
        let device = &self.0.device;
        if let Ok(_bound) = device.bind() {
            let lasting = &device.gpu.lasting;
            // Memory that cannot be freed is lost, because a drop returns no error.
            // SAFETY: allocated by this value.
            let _ = unsafe { sys::cuMemFreeAsync(self.0.ptr, lasting.host_stream) };
            // A pool learns which memory is free when the stream is synchronized. A query is not enough.
            let _ = device.settle().and_then(|()| device.finish());
            // SAFETY: the pool lives as long as the context.
            let _ = unsafe { sys::cuMemPoolTrimTo(lasting.pool, 0) };
        }
    }
}

/// Memory that several ranks map, each at an address of its own.
#[derive(Debug)]
pub struct DeviceMapping {
    region: DeviceRegion,
    /// Reserved bytes of the address space.
    reserved: usize,
}

impl DeviceMapping {
    /// Zeroed memory of the device, and a descriptor with which another process maps it.
    pub fn create(device: &Arc<Device>, bytes: usize) -> Result<(DeviceMapping, OwnedFd)> {
        let rank = device.rank;
        fits(device, bytes)?;
        let _bound = device.bind()?;
        // SAFETY: a plain struct, for which zero means "nothing special".
        let mut properties: sys::CUmemAllocationProp =
            unsafe { MaybeUninit::zeroed().assume_init() };
        properties.type_ = sys::CUmemAllocationType_enum::CU_MEM_ALLOCATION_TYPE_PINNED;
        properties.location = location(device.gpu.device);
        properties.requestedHandleTypes = HANDLE;
        let reserved = bytes.max(1).next_multiple_of(BLOCK);
        let mut handle = 0;
        // SAFETY: writes the local.
        let result = unsafe { sys::cuMemCreate(&mut handle, reserved, &properties, 0) };
        refused(device, bytes, "cuMemCreate", result)?;
        let handle = Handle(handle);
        let mut fd = -1;
        // SAFETY: writes the local, which is what this type of handle is.
        let fd = unsafe {
            let to = (&raw mut fd).cast();
            let exported = cuda!(rank, cuMemExportToShareableHandle(to, handle.0, HANDLE, 0));
            exported.map_err(|error| no_descriptor(rank).unwrap_or(error))?;
            OwnedFd::from_raw_fd(fd)
        };
        let mut mapping = DeviceMapping::map(device, &handle, bytes, reserved)?;
        mapping.region.clear()?;
        Ok((mapping, fd))
    }

    /// Maps memory that another process has created with `bytes` bytes.
    ///
    /// The driver refuses a descriptor that is not its own, and any size other than the created one. So no mapping is
    /// longer than its memory.
    pub fn import(device: &Arc<Device>, fd: &OwnedFd, bytes: usize) -> Result<DeviceMapping> {
        let _bound = device.bind()?;
        let mut handle = 0;
        // SAFETY: writes the local; the descriptor is passed by value in the pointer's place.
        unsafe {
            let fd = fd.as_raw_fd() as usize as *mut c_void;
            cuda!(
                device.rank,
                cuMemImportFromShareableHandle(&mut handle, fd, HANDLE)
            )?;
        }
        let reserved = bytes.max(1).next_multiple_of(BLOCK);
        DeviceMapping::map(device, &Handle(handle), bytes, reserved)
    }

    /// Maps a handle's memory. The mapping keeps the memory, so the handle may be released.
    fn map(
        device: &Arc<Device>,
        handle: &Handle,
        bytes: usize,
        reserved: usize,
    ) -> Result<DeviceMapping> {
        let rank = device.rank;
        let mut ptr = 0;
        // SAFETY: a new range of the address space; each step is undone if the next one fails.
        unsafe {
            cuda!(rank, cuMemAddressReserve(&mut ptr, reserved, 0, 0, 0))?;
            let mapped = cuda!(rank, cuMemMap(ptr, reserved, 0, handle.0, 0));
            if mapped.is_err() {
                let _ = sys::cuMemAddressFree(ptr, reserved);
            }
            mapped?;
        }
        // From here on, a failure drops the mapping.
        let mapping = DeviceMapping {
            region: DeviceRegion {
                device: device.clone(),
                ptr,
                bytes,
            },
            reserved,
        };
        let access = sys::CUmemAccessDesc {
            location: location(device.gpu.device),
            flags: sys::CUmemAccess_flags_enum::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: the range was just mapped.
        unsafe { cuda!(rank, cuMemSetAccess(ptr, reserved, &access, 1))? };
        Ok(mapping)
    }

    pub fn ptr(&self) -> DevicePtr {
        self.region.ptr
    }

    pub fn region(&self) -> &DeviceRegion {
        &self.region
    }

    pub fn region_mut(&mut self) -> &mut DeviceRegion {
        &mut self.region
    }
}

impl Drop for DeviceMapping {
    /// Nothing of this rank uses it any more.
    fn drop(&mut self) {
        if let Ok(_bound) = self.region.device.bind() {
            // SAFETY: mapped and reserved by this value.
            unsafe {
                let _ = sys::cuMemUnmap(self.region.ptr, self.reserved);
                let _ = sys::cuMemAddressFree(self.region.ptr, self.reserved);
            }
        }
    }
}

/// The error that this process can have no more descriptors, if this is so. The driver does not say it.
fn no_descriptor(rank: usize) -> Option<Error> {
    let refused = eventfd(0, EventfdFlags::CLOEXEC).err()?;
    Some(Error::system(rank, "share memory of its GPU")(
        refused.into(),
    ))
}

/// One reference to memory, which the driver counts.
struct Handle(sys::CUmemGenericAllocationHandle);

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: created or imported once.
        let _ = unsafe { sys::cuMemRelease(self.0) };
    }
}

/// File descriptors. Any process, container or user that receives one can map the memory, and no one else can.
const HANDLE: sys::CUmemAllocationHandleType =
    sys::CUmemAllocationHandleType_enum::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// A device as a memory location. The bindings of some CUDA versions have the second field in a union.
pub(super) fn location(device: sys::CUdevice) -> sys::CUmemLocation {
    const { assert!(size_of::<sys::CUmemLocation>() == 8) };
    let kind = sys::CUmemLocationType_enum::CU_MEM_LOCATION_TYPE_DEVICE as i32;
    // SAFETY: in every version the struct is these two words, and the first one is a value of its enumeration.
    unsafe { std::mem::transmute::<[i32; 2], sys::CUmemLocation>([kind, device]) }
}

/// Refuses more bytes than the GPU has.
///
/// The driver might take longer to refuse them than other ranks wait, and would take memory from others meanwhile.
fn fits(device: &Device, bytes: usize) -> Result<()> {
    if bytes > device.bytes() {
        return Err(out_of_memory(device, bytes)?);
    }
    Ok(())
}

fn refused(device: &Device, bytes: usize, call: &str, result: sys::CUresult) -> Result<()> {
    if result == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY {
        return Err(out_of_memory(device, bytes)?);
    }
    check(device.rank, call, result)
}

fn out_of_memory(device: &Device, bytes: usize) -> Result<Error> {
    Ok(Kind::OutOfMemory {
        bytes,
        reason: format!(
            "{} of the GPU's {} are free",
            Bytes(device.free_bytes()? as u64),
            Bytes(device.bytes() as u64)
        ),
    }
    .on(device.rank))
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

impl<T> Pinned<T> {
    /// Whole pages, so that memory that another group has left can be reused for any type of as many pages.
    const BYTES: usize = size_of::<T>().next_multiple_of(4096);
}

impl<T: bytemuck::Zeroable + Copy> Pinned<T> {
    pub fn zeroed(device: &Arc<Device>) -> Result<Pinned<T>> {
        let rank = device.rank;
        let left = lock(&device.gpu.lasting.pages)
            .get_mut(&Self::BYTES)
            .and_then(Vec::pop);
        let (host, ptr) = match left {
            Some((host, ptr)) => (host as *mut c_void, ptr),
            None => {
                let _bound = device.bind()?;
                let (mut host, mut ptr) = (std::ptr::null_mut(), 0);
                let flags = sys::CU_MEMHOSTALLOC_DEVICEMAP | sys::CU_MEMHOSTALLOC_PORTABLE;
                // SAFETY: writes the locals.
                unsafe {
                    cuda!(rank, cuMemHostAlloc(&mut host, Self::BYTES, flags))?;
                    cuda!(rank, cuMemHostGetDevicePointer_v2(&mut ptr, host, 0))?;
                }
                (host, ptr)
            }
        };
        let host = host.cast::<T>();
        // SAFETY: memory that no one else knows, for a type for which zeros are valid.
        unsafe { host.write_bytes(0, 1) };
        Ok(Pinned {
            device: device.clone(),
            host,
            ptr,
        })
    }

    /// The value at this moment.
    pub fn read(&self) -> T {
        // SAFETY: the memory lives as long as `self`; the device may write it at any time, which is fine for a volatile
        // read of plain words.
        unsafe { self.host.read_volatile() }
    }

    /// The value's address on the host.
    pub fn as_ptr(&self) -> *mut T {
        self.host
    }

    /// Sets the value. No other thread may set it at the same time.
    pub fn write(&self, value: T) {
        // SAFETY: as in `read`.
        unsafe { self.host.write_volatile(value) }
    }

    pub fn ptr(&self) -> DevicePtr {
        self.ptr
    }
}

impl<T> Drop for Pinned<T> {
    /// The device no longer writes it. It is kept for the next group, because freeing it would wait for the device.
    fn drop(&mut self) {
        if is_fork() {
            return;
        }
        lock(&self.device.gpu.lasting.pages)
            .entry(Self::BYTES)
            .or_default()
            .push((self.host as usize, self.ptr));
    }
}
