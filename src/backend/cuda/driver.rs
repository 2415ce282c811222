//! The CUDA driver, as far as this library uses it: the only file with CUDA calls.
//!
//! Types own what they name and give it back when dropped. Every call that fails becomes an error that names the
//! rank, the call and the driver's own words.

use std::ffi::{CStr, c_void};
use std::mem::MaybeUninit;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cudarc::driver::sys;

use crate::error::{Error, Result};

/// A pointer to a device's memory.
pub type DevicePtr = u64;

/// Memory that is exported is taken in whole blocks of this size, so that a peer that maps it sees nothing else.
pub const BLOCK: usize = 2 << 20;

/// The least compute capability, and the only major one, that the kernels are built for.
const HOPPER: (i32, i32) = (9, 0);

/// A GPU, through its primary context, which candle, cust and the runtime API use too.
#[derive(Debug)]
pub struct Device {
    rank: usize,
    device: sys::CUdevice,
    context: sys::CUcontext,
    /// As the driver calls it.
    pub name: String,
    pub uuid: [u8; 16],
    pub multiprocessors: u32,
    /// Whether nothing may be given back to the driver any more.
    abandoned: AtomicBool,
}

// SAFETY: a context may be used by any thread that makes it current.
unsafe impl Send for Device {}
// SAFETY: the driver's calls are thread-safe.
unsafe impl Sync for Device {}

/// Turns a result of the driver into one of this library.
fn check(rank: usize, call: &str, result: sys::CUresult) -> Result<()> {
    if result == sys::CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let text = |get: unsafe fn(sys::CUresult, *mut *const std::ffi::c_char) -> sys::CUresult| {
        let mut words = std::ptr::null();
        // SAFETY: `words` is written with null or a static string.
        unsafe {
            let found = get(result, &mut words) == sys::CUresult::CUDA_SUCCESS && !words.is_null();
            found.then(|| CStr::from_ptr(words).to_string_lossy().into_owned())
        }
    };
    let name = text(sys::cuGetErrorName).unwrap_or_else(|| format!("{result:?}"));
    let words = text(sys::cuGetErrorString).unwrap_or_default();
    Err(Error::Cuda {
        rank,
        call: call.into(),
        reason: format!("{name}: {words}"),
    })
}

/// Calls the driver and checks the result, naming the call by its own name.
macro_rules! cuda {
    ($rank:expr, $call:ident($($argument:expr),* $(,)?)) => {
        check($rank, stringify!($call), sys::$call($($argument),*))
    };
}

impl Device {
    /// Opens the GPU with this ordinal among the visible ones; if none is given, the ranks share them in turn.
    ///
    /// # Errors
    /// [`Error::NoGpu`] without a driver or a GPU; [`Error::UnsupportedGpu`] unless it is a Hopper GPU.
    pub fn open(rank: usize, ordinal: Option<usize>) -> Result<Arc<Device>> {
        let none = |reason: String| Error::NoGpu { rank, reason };
        // cudarc panics if it does not find the library; so look first.
        // SAFETY: loading the driver runs its initialisers, which any CUDA program does.
        let library = unsafe { libloading::Library::new("libcuda.so.1") };
        drop(library.map_err(|e| none(format!("the CUDA driver is not installed ({e})")))?);
        // SAFETY: plain calls; every pointer is to a local of the type that the call writes.
        unsafe {
            cuda!(rank, cuInit(0)).map_err(|e| none(e.to_string()))?;
            let mut count = 0;
            cuda!(rank, cuDeviceGetCount(&mut count))?;
            if count < 1 {
                return Err(none("the driver shows none".into()));
            }
            let ordinal = ordinal.unwrap_or(rank % count as usize);
            if ordinal >= count as usize {
                return Err(none(format!(
                    "there is no GPU {ordinal}, {count} are visible"
                )));
            }
            let mut device = 0;
            cuda!(rank, cuDeviceGet(&mut device, ordinal as i32))?;
            let attribute = |attribute| -> Result<i32> {
                let mut value = 0;
                cuda!(rank, cuDeviceGetAttribute(&mut value, attribute, device))?;
                Ok(value)
            };
            use sys::CUdevice_attribute_enum as attr;
            let mut name = [0; 128];
            cuda!(
                rank,
                cuDeviceGetName(name.as_mut_ptr(), name.len() as i32, device)
            )?;
            let name = CStr::from_ptr(name.as_ptr()).to_string_lossy().into_owned();
            let capability = (
                attribute(attr::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                attribute(attr::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            );
            // The kernels use instructions that no other generation has.
            if capability != HOPPER {
                return Err(Error::UnsupportedGpu {
                    rank,
                    name,
                    capability: format!("{}.{}", capability.0, capability.1),
                });
            }
            let multiprocessors = attribute(attr::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as u32;
            let mut uuid = MaybeUninit::<sys::CUuuid>::zeroed().assume_init();
            cuda!(rank, cuDeviceGetUuid_v2(&mut uuid, device))?;
            let mut context = std::ptr::null_mut();
            cuda!(rank, cuDevicePrimaryCtxRetain(&mut context, device))?;
            let device = Arc::new(Device {
                rank,
                device,
                context,
                name,
                uuid: uuid.bytes.map(|byte| byte as u8),
                multiprocessors,
                abandoned: AtomicBool::new(false),
            });
            device.bind()?;
            Ok(device)
        }
    }

    /// Makes the context current on this thread.
    pub fn bind(&self) -> Result<()> {
        // SAFETY: the context is retained as long as `self` lives.
        unsafe { cuda!(self.rank, cuCtxSetCurrent(self.context)) }
    }

    /// From now on nothing is freed: the device still works on it and does not come to an end, and freeing would
    /// wait for that.
    pub fn abandon(&self) {
        self.abandoned.store(true, Ordering::Relaxed);
    }

    /// Whether what this thread drops may be given back; makes the context current.
    fn takes_back(&self) -> bool {
        !self.abandoned.load(Ordering::Relaxed) && self.bind().is_ok()
    }

    /// Waits for the host's own copies and fills, which the driver may return from early, and which no other stream of this
    /// library waits for.
    fn settle(&self) -> Result<()> {
        // SAFETY: null is the legacy default stream, which those calls use.
        unsafe { cuda!(self.rank, cuStreamSynchronize(std::ptr::null_mut())) }
    }

    /// Whether this device can read and write the memory of the visible device with this UUID; true for one that
    /// is not visible, which opening its memory will tell.
    pub fn can_access(&self, uuid: &[u8; 16]) -> Result<bool> {
        if *uuid == self.uuid {
            return Ok(true);
        }
        // SAFETY: as in `open`.
        unsafe {
            let mut count = 0;
            cuda!(self.rank, cuDeviceGetCount(&mut count))?;
            for ordinal in 0..count {
                let mut other = 0;
                cuda!(self.rank, cuDeviceGet(&mut other, ordinal))?;
                let mut found = MaybeUninit::<sys::CUuuid>::zeroed().assume_init();
                cuda!(self.rank, cuDeviceGetUuid_v2(&mut found, other))?;
                if found.bytes.map(|byte| byte as u8) == *uuid {
                    let mut can = 0;
                    cuda!(
                        self.rank,
                        cuDeviceCanAccessPeer(&mut can, self.device, other)
                    )?;
                    return Ok(can != 0);
                }
            }
        }
        Ok(true)
    }

    /// The version of the driver, as major · 1000 + minor · 10.
    pub fn driver_version(&self) -> Result<i32> {
        let mut version = 0;
        // SAFETY: writes the local.
        unsafe { cuda!(self.rank, cuDriverGetVersion(&mut version))? };
        Ok(version)
    }

    /// Free bytes of the device's memory.
    pub fn free_bytes(&self) -> Result<usize> {
        self.bind()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: writes the locals.
        unsafe { cuda!(self.rank, cuMemGetInfo_v2(&mut free, &mut total))? };
        Ok(free)
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: retained once in `open`; whatever lived in the context holds an Arc of this value.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

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

/// Work that the device does in order. It may be the caller's.
#[derive(Debug)]
pub struct Stream {
    device: Arc<Device>,
    stream: sys::CUstream,
    borrowed: bool,
}

// SAFETY: streams may be used by any thread.
unsafe impl Send for Stream {}
// SAFETY: the driver's calls are thread-safe.
unsafe impl Sync for Stream {}

/// How urgent a stream's work is. Streams of different urgency share no queue of the device.
#[derive(Clone, Copy, Debug)]
pub enum Urgency {
    Kernels,
    Copies,
    Rescue,
}

/// One word that a stream waits for or writes.
#[derive(Clone, Copy, Debug)]
pub enum WordOp {
    /// Waits until the word has reached the value, cyclically.
    Wait(DevicePtr, u32),
    /// Writes the value, after everything before on the stream.
    Write(DevicePtr, u32),
}

impl Stream {
    /// A stream that does not wait for the default stream.
    pub fn new(device: &Arc<Device>, urgency: Urgency) -> Result<Stream> {
        device.bind()?;
        let flags = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
        let mut stream = std::ptr::null_mut();
        // SAFETY: writes the locals.
        unsafe {
            let (mut least, mut greatest) = (0, 0);
            cuda!(
                device.rank,
                cuCtxGetStreamPriorityRange(&mut least, &mut greatest)
            )?;
            // Greater is less.
            let priority = match urgency {
                Urgency::Kernels => least,
                Urgency::Copies => (greatest + 1).min(least),
                Urgency::Rescue => greatest,
            };
            cuda!(
                device.rank,
                cuStreamCreateWithPriority(&mut stream, flags, priority)
            )?;
        }
        Ok(Stream {
            device: device.clone(),
            stream,
            borrowed: false,
        })
    }

    /// A stream of the caller's.
    ///
    /// # Safety
    /// `stream` is a stream of the device's primary context and outlives the result.
    pub unsafe fn borrowed(device: &Arc<Device>, stream: *mut c_void) -> Stream {
        Stream {
            device: device.clone(),
            stream: stream.cast(),
            borrowed: true,
        }
    }

    pub fn raw(&self) -> *mut c_void {
        self.stream.cast()
    }

    /// Whether everything on the stream is done.
    pub fn is_idle(&self) -> Result<bool> {
        self.device.bind()?;
        // SAFETY: the stream lives.
        match unsafe { sys::cuStreamQuery(self.stream) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            result => check(self.device.rank, "cuStreamQuery", result).map(|()| true),
        }
    }

    /// Whether what is put on the stream is being recorded into a graph.
    pub fn is_capturing(&self) -> Result<bool> {
        let mut status = sys::CUstreamCaptureStatus_enum::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: writes the local; the stream lives.
        unsafe {
            cuda!(
                self.device.rank,
                cuStreamIsCapturing(self.stream, &mut status)
            )?
        };
        Ok(status != sys::CUstreamCaptureStatus_enum::CU_STREAM_CAPTURE_STATUS_NONE)
    }

    /// # Safety
    /// Both ranges are allocated, and stay so until the copy is done; nobody reads or writes them in a way that this copy's
    /// place on the stream does not order.
    pub unsafe fn copy(&self, to: DevicePtr, from: DevicePtr, bytes: usize) -> Result<()> {
        // SAFETY: as this function's.
        unsafe {
            cuda!(
                self.device.rank,
                cuMemcpyDtoDAsync_v2(to, from, bytes, self.stream)
            )
        }
    }

    /// # Safety
    /// As [`Stream::copy`], for `words` words at `to`.
    pub unsafe fn fill(&self, to: DevicePtr, value: u32, words: usize) -> Result<()> {
        // SAFETY: as this function's.
        unsafe {
            cuda!(
                self.device.rank,
                cuMemsetD32Async(to, value, words, self.stream)
            )
        }
    }

    /// Does word operations in order, in one call.
    ///
    /// # Safety
    /// The words are allocated and stay so until the stream has passed.
    pub unsafe fn words(&self, operations: &[WordOp]) -> Result<()> {
        use sys::CUstreamBatchMemOpType_enum as Type;
        // As many as one call for a full group needs.
        const MOST: usize = 72;
        for operations in operations.chunks(MOST) {
            // SAFETY: a union of plain structs.
            let mut batch: [sys::CUstreamBatchMemOpParams; MOST] =
                unsafe { MaybeUninit::zeroed().assume_init() };
            for (entry, operation) in batch.iter_mut().zip(operations) {
                match *operation {
                    WordOp::Wait(address, value) => {
                        entry.waitValue.operation = Type::CU_STREAM_MEM_OP_WAIT_VALUE_32;
                        entry.waitValue.address = address;
                        entry.waitValue.__bindgen_anon_1.value = value;
                        entry.waitValue.flags =
                            sys::CUstreamWaitValue_flags_enum::CU_STREAM_WAIT_VALUE_GEQ as u32;
                    }
                    WordOp::Write(address, value) => {
                        entry.writeValue.operation = Type::CU_STREAM_MEM_OP_WRITE_VALUE_32;
                        entry.writeValue.address = address;
                        entry.writeValue.__bindgen_anon_1.value = value;
                    }
                }
            }
            let count = operations.len() as u32;
            // SAFETY: as this function's; the driver copies the batch.
            unsafe {
                cuda!(
                    self.device.rank,
                    cuStreamBatchMemOp_v2(self.stream, count, batch.as_mut_ptr(), 0)
                )?;
            }
        }
        Ok(())
    }

    /// Everything put on this stream later waits for what is on `other` now. `event` carries the news.
    pub fn wait_for(&self, other: &Stream, event: &Event) -> Result<()> {
        self.device.bind()?;
        // SAFETY: all live; an event may be recorded again once a wait for it has been put on a stream.
        unsafe {
            cuda!(self.device.rank, cuEventRecord(event.event, other.stream))?;
            cuda!(
                self.device.rank,
                cuStreamWaitEvent(self.stream, event.event, 0)
            )
        }
    }

    /// Calls `function(data)` on a thread of the driver when the stream has come to it.
    ///
    /// # Safety
    /// `data` may be used by another thread until the stream has passed. The function makes no CUDA call.
    pub unsafe fn call(
        &self,
        function: unsafe extern "C" fn(*mut c_void),
        data: *mut c_void,
    ) -> Result<()> {
        // SAFETY: as this function's.
        unsafe {
            cuda!(
                self.device.rank,
                cuLaunchHostFunc(self.stream, Some(function), data)
            )
        }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if !self.borrowed && self.device.takes_back() {
            // SAFETY: created by this value; what is on it still runs to its end.
            let _ = unsafe { sys::cuStreamDestroy_v2(self.stream) };
        }
    }
}

/// A place on a stream; with its time, if it was made to take it.
#[derive(Debug)]
pub struct Event {
    device: Arc<Device>,
    event: sys::CUevent,
}

// SAFETY: events may be used by any thread.
unsafe impl Send for Event {}
// SAFETY: the driver's calls are thread-safe.
unsafe impl Sync for Event {}

impl Event {
    pub fn new(device: &Arc<Device>, timed: bool) -> Result<Event> {
        device.bind()?;
        use sys::CUevent_flags_enum as flags;
        let flags = if timed {
            flags::CU_EVENT_DEFAULT
        } else {
            flags::CU_EVENT_DISABLE_TIMING
        };
        let mut event = std::ptr::null_mut();
        // SAFETY: writes the local.
        unsafe { cuda!(device.rank, cuEventCreate(&mut event, flags as u32))? };
        Ok(Event {
            device: device.clone(),
            event,
        })
    }

    pub fn record(&self, stream: &Stream) -> Result<()> {
        // SAFETY: both live.
        unsafe { cuda!(self.device.rank, cuEventRecord(self.event, stream.stream)) }
    }

    /// Microseconds from `earlier` to this. Both were made to take the time and have been passed.
    pub fn micros_since(&self, earlier: &Event) -> Result<f64> {
        let mut millis = 0f32;
        // SAFETY: writes the local; both live.
        unsafe {
            cuda!(
                self.device.rank,
                cuEventElapsedTime_v2(&mut millis, earlier.event, self.event)
            )?;
        }
        Ok(f64::from(millis) * 1e3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.device.takes_back() {
            // SAFETY: created by this value.
            let _ = unsafe { sys::cuEventDestroy_v2(self.event) };
        }
    }
}

/// Kernels, loaded from a cubin.
#[derive(Debug)]
pub struct Module {
    device: Arc<Device>,
    module: sys::CUmodule,
}

// SAFETY: modules may be used by any thread.
unsafe impl Send for Module {}
// SAFETY: the driver's calls are thread-safe.
unsafe impl Sync for Module {}

/// A kernel of a module that lives as long as the backend.
#[derive(Clone, Copy, Debug)]
pub struct Function(sys::CUfunction);

// SAFETY: functions may be used by any thread.
unsafe impl Send for Function {}
// SAFETY: they are handles.
unsafe impl Sync for Function {}

impl Module {
    pub fn load(device: &Arc<Device>, cubin: &[u8]) -> Result<Module> {
        device.bind()?;
        let mut module = std::ptr::null_mut();
        // SAFETY: writes the local; the image is a whole cubin, which says its own length.
        unsafe {
            cuda!(
                device.rank,
                cuModuleLoadData(&mut module, cubin.as_ptr().cast())
            )?
        };
        Ok(Module {
            device: device.clone(),
            module,
        })
    }

    /// The bytes of a variable.
    pub fn global(&self, name: &CStr) -> Result<Vec<u8>> {
        self.device.bind()?;
        let (mut ptr, mut bytes) = (0, 0);
        // SAFETY: writes the locals, then as many bytes as the variable has.
        unsafe {
            cuda!(
                self.device.rank,
                cuModuleGetGlobal_v2(&mut ptr, &mut bytes, self.module, name.as_ptr())
            )?;
            let mut value = vec![0u8; bytes];
            cuda!(
                self.device.rank,
                cuMemcpyDtoH_v2(value.as_mut_ptr().cast(), ptr, bytes)
            )?;
            Ok(value)
        }
    }

    /// A kernel, loaded now and not at its first launch, which could wait for what the launch is to release.
    pub fn function(&self, name: &CStr, shared_bytes: u32) -> Result<Function> {
        self.device.bind()?;
        let rank = self.device.rank;
        use sys::CUfunction_attribute_enum as attr;
        let mut function = std::ptr::null_mut();
        // SAFETY: writes the local; the module lives.
        unsafe {
            cuda!(
                rank,
                cuModuleGetFunction(&mut function, self.module, name.as_ptr())
            )?;
            cuda!(
                rank,
                cuFuncSetAttribute(
                    function,
                    attr::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                    shared_bytes as i32
                )
            )?;
            let mut registers = 0;
            cuda!(
                rank,
                cuFuncGetAttribute(&mut registers, attr::CU_FUNC_ATTRIBUTE_NUM_REGS, function)
            )?;
        }
        Ok(Function(function))
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        if self.device.takes_back() {
            // SAFETY: loaded by this value; its kernels have ended.
            let _ = unsafe { sys::cuModuleUnload(self.module) };
        }
    }
}

impl Function {
    /// # Safety
    /// `arguments` point to values of the kernel's parameters' types; what those point to is as the kernel needs it.
    pub unsafe fn launch(
        self,
        stream: &Stream,
        grid: u32,
        block: u32,
        shared_bytes: u32,
        arguments: &mut [*mut c_void],
    ) -> Result<()> {
        // SAFETY: as this function's; the driver copies the arguments.
        unsafe {
            cuda!(
                stream.device.rank,
                cuLaunchKernel(
                    self.0,
                    grid,
                    1,
                    1,
                    block,
                    1,
                    1,
                    shared_bytes,
                    stream.stream,
                    arguments.as_mut_ptr(),
                    std::ptr::null_mut()
                )
            )
        }
    }
}

/// How a kernel's bulk copies see a matrix.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub struct TensorMap(sys::CUtensorMap);

/// A row-major matrix of 16-bit floats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    pub ptr: DevicePtr,
    pub rows: usize,
    pub columns: usize,
    /// Bytes from row to row, a multiple of 16.
    pub pitch: usize,
}

impl TensorMap {
    /// Boxes of `rows` by `columns` elements, swizzled by 128 bytes; zeros beyond the edges.
    pub fn new(
        rank: usize,
        bf16: bool,
        matrix: Layout,
        rows: u32,
        columns: u32,
        promote_to_l2: bool,
    ) -> Result<TensorMap> {
        use sys::CUtensorMapDataType_enum as Type;
        use sys::CUtensorMapL2promotion_enum as Promotion;
        // SAFETY: a plain struct.
        let mut map: sys::CUtensorMap = unsafe { MaybeUninit::zeroed().assume_init() };
        // SAFETY: the pointers are to locals of the lengths that rank 2 means.
        unsafe {
            cuda!(
                rank,
                cuTensorMapEncodeTiled(
                    &mut map,
                    if bf16 {
                        Type::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                    } else {
                        Type::CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                    },
                    2,
                    matrix.ptr as *mut c_void,
                    [matrix.columns as u64, matrix.rows as u64].as_ptr(),
                    [matrix.pitch as u64].as_ptr(),
                    [columns, rows].as_ptr(),
                    [1, 1].as_ptr(),
                    sys::CUtensorMapInterleave_enum::CU_TENSOR_MAP_INTERLEAVE_NONE,
                    sys::CUtensorMapSwizzle_enum::CU_TENSOR_MAP_SWIZZLE_128B,
                    if promote_to_l2 {
                        Promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B
                    } else {
                        Promotion::CU_TENSOR_MAP_L2_PROMOTION_NONE
                    },
                    sys::CUtensorMapFloatOOBfill_enum::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE
                )
            )?;
        }
        Ok(TensorMap(map))
    }
}
