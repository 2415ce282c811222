//! The primary context of a GPU, which all groups of a process share, and what lasts as long as it.

use std::collections::HashMap;
use std::ffi::CStr;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::sync::{Arc, Mutex};

use cudarc::driver::sys;

use super::kernel::Loaded;
use super::symbols::Symbols;
use super::{DevicePtr, check, is_fork, lock, memory};
use crate::error::{Kind, Result};

/// A GPU, through its primary context, which candle, cust and the runtime API use too.
///
/// Some driver calls wait until the whole device is idle: freeing memory of cuMemAlloc or cuMemHostAlloc, loading and
/// unloading modules. Most of them hold up every other call meanwhile. While a stream waits for a peer, such a call
/// would keep even this library's own threads from releasing the stream. So objects that need such calls are made once
/// for all groups of the process, and kept as long as the context lives (see [`Lasting`]).
#[derive(Debug)]
pub(super) struct DeviceContext {
    pub(super) device: sys::CUdevice,
    pub(super) context: sys::CUcontext,
    pub(super) symbols: Symbols,
    /// The driver's name of the GPU.
    pub(super) name: String,
    pub(super) capability: (i32, i32),
    pub(super) uuid: Uuid,
    pub(super) multiprocessors: u32,
    /// Its memory in bytes, free or not.
    pub(super) bytes: usize,
    pub(super) lasting: Arc<Lasting>,
}

/// Objects that live as long as a context.
///
/// The last group of a process releases the context. If no one else retains it, the driver destroys it and these
/// objects. Otherwise the next group finds them again.
#[derive(Debug)]
pub(super) struct Lasting {
    pub(super) device: sys::CUdevice,
    /// The context's number, which no other context ever has.
    pub(super) context: u64,
    /// The pool of a rank's own memory. Freed memory goes back to the driver.
    pub(super) pool: sys::CUmemoryPool,
    /// For allocations and for copies between host and device. The host waits for each of them. The stream never waits
    /// for a peer.
    pub(super) host_stream: sys::CUstream,
    /// Page-locked host memory that no group uses any more, by bytes.
    pub(super) pages: Mutex<HashMap<usize, Vec<Pages>>>,
    pub(super) modules: Mutex<Vec<Arc<Loaded>>>,
}

// SAFETY: streams, pools and modules may be used by any thread that makes their context current.
unsafe impl Send for Lasting {}
// SAFETY: the driver's calls are thread-safe.
unsafe impl Sync for Lasting {}

/// Page-locked host memory that the device can write: its address on the host and its address on the device.
pub(super) type Pages = (usize, DevicePtr);

/// Whether the caller can use a GPU with this name and compute capability. If not, why, in words.
pub type Admits<'a> = &'a dyn Fn(&str, (i32, i32)) -> Result<(), String>;

/// Identifies a GPU.
pub type Uuid = [u8; 16];

// SAFETY: a context may be used by any thread that makes it current.
unsafe impl Send for DeviceContext {}
// SAFETY: the driver's calls are thread-safe.
unsafe impl Sync for DeviceContext {}

/// The lasting objects of this process's contexts.
static LASTING: Mutex<Vec<Arc<Lasting>>> = Mutex::new(Vec::new());

/// A context that is current on this thread.
///
/// Meanwhile the caller's stream captures, on this or any other thread, do not forbid this library's calls. None of
/// these calls touches a stream that is being captured, unless the call is to be captured.
pub struct BoundContext {
    /// Whether the context was put on top of the caller's.
    pushed: bool,
    mode: sys::CUstreamCaptureMode,
    /// Belongs to this thread.
    _here: PhantomData<*const ()>,
}

impl Drop for BoundContext {
    fn drop(&mut self) {
        // SAFETY: restores what was replaced, on the same thread; the pointers are to locals. The calls fail only if
        // the process's driver has ended.
        unsafe {
            let _ = sys::cuThreadExchangeStreamCaptureMode(&mut self.mode);
            if self.pushed {
                let mut ours = std::ptr::null_mut();
                let _ = sys::cuCtxPopCurrent_v2(&mut ours);
            }
        }
    }
}

impl DeviceContext {
    pub(super) fn open(
        rank: usize,
        device: sys::CUdevice,
        symbols: Symbols,
        admits: Admits,
    ) -> Result<DeviceContext> {
        let attribute = |attribute| -> Result<i32> {
            let mut value = 0;
            // SAFETY: writes the local.
            unsafe { cuda!(rank, cuDeviceGetAttribute(&mut value, attribute, device))? };
            Ok(value)
        };
        use sys::CUdevice_attribute_enum as attr;
        let name = name(rank, device)?;
        let capability = (
            attribute(attr::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(attr::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        );
        admits(&name, capability).map_err(|what| Kind::Device { what }.on(rank))?;
        let shareable = [
            attr::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
            attr::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
            attr::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED,
        ];
        for what in shareable {
            if attribute(what)? == 0 {
                let what = format!(
                    "no GPU is found: {name} cannot share memory between processes here ({what:?} is 0)"
                );
                return Err(Kind::Device { what }.on(rank));
            }
        }
        let multiprocessors = attribute(attr::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as u32;
        let uuid = uuid(rank, device)?;
        let context = Retained::new(rank, device)?;
        let (bytes, lasting) = {
            let _bound = bind(rank, context.context)?;
            (free_and_total(rank)?.1, Lasting::of_current(rank, device)?)
        };
        Ok(DeviceContext {
            device,
            context: context.keep(),
            symbols,
            name,
            capability,
            uuid,
            multiprocessors,
            bytes,
            lasting,
        })
    }
}

/// The driver's name of a GPU.
fn name(rank: usize, device: sys::CUdevice) -> Result<String> {
    let mut name = [0; 128];
    // SAFETY: writes at most as many bytes as it is told, with a zero after the name.
    unsafe {
        cuda!(
            rank,
            cuDeviceGetName(name.as_mut_ptr(), name.len() as i32, device)
        )?;
        Ok(CStr::from_ptr(name.as_ptr()).to_string_lossy().into_owned())
    }
}

/// The free bytes and all bytes of the current context's GPU.
pub(super) fn free_and_total(rank: usize) -> Result<(usize, usize)> {
    let (mut free, mut total) = (0, 0);
    // SAFETY: writes the locals.
    unsafe { cuda!(rank, cuMemGetInfo_v2(&mut free, &mut total))? };
    Ok((free, total))
}

/// A primary context that is released if opening the GPU fails.
struct Retained {
    device: sys::CUdevice,
    context: sys::CUcontext,
}

impl Retained {
    fn new(rank: usize, device: sys::CUdevice) -> Result<Retained> {
        let mut context = std::ptr::null_mut();
        // SAFETY: writes the local.
        unsafe { cuda!(rank, cuDevicePrimaryCtxRetain(&mut context, device))? };
        Ok(Retained { device, context })
    }

    fn keep(self) -> sys::CUcontext {
        let context = self.context;
        std::mem::forget(self);
        context
    }
}

impl Drop for Retained {
    fn drop(&mut self) {
        // SAFETY: retained once.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

impl Lasting {
    /// The lasting objects of the current context, which are made if there are none yet.
    fn of_current(rank: usize, device: sys::CUdevice) -> Result<Arc<Lasting>> {
        let mut context = 0;
        // SAFETY: writes the local; null is the current context.
        unsafe { cuda!(rank, cuCtxGetId(std::ptr::null_mut(), &mut context))? };
        // Held while it is made, so that it is made once.
        let mut all = lock(&LASTING);
        // Objects of the device's earlier contexts have ended with these contexts.
        all.retain(|lasting| lasting.device != device || lasting.context == context);
        if let Some(known) = all.iter().find(|lasting| lasting.context == context) {
            return Ok(known.clone());
        }
        // SAFETY: a plain struct, for which zero means "nothing special".
        let mut properties: sys::CUmemPoolProps = unsafe { MaybeUninit::zeroed().assume_init() };
        properties.allocType = sys::CUmemAllocationType_enum::CU_MEM_ALLOCATION_TYPE_PINNED;
        properties.location = memory::location(device);
        let (mut pool, mut host_stream) = (std::ptr::null_mut(), std::ptr::null_mut());
        let (mut least, mut greatest) = (0, 0);
        let flags = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: writes the locals. What is made lasts as long as the context, also if the next step fails.
        unsafe {
            cuda!(rank, cuMemPoolCreate(&mut pool, &properties))?;
            cuda!(rank, cuCtxGetStreamPriorityRange(&mut least, &mut greatest))?;
            // Neither the priority of copies between ranks nor that of the rescue stream.
            let priority = (greatest + 2).min(least);
            cuda!(
                rank,
                cuStreamCreateWithPriority(&mut host_stream, flags, priority)
            )?;
        }
        let lasting = Arc::new(Lasting {
            device,
            context,
            pool,
            host_stream,
            pages: Mutex::default(),
            modules: Mutex::default(),
        });
        all.push(lasting.clone());
        Ok(lasting)
    }
}

/// Makes a retained context current on this thread as long as the result lives. Meanwhile all calls are allowed.
pub(super) fn bind(rank: usize, context: sys::CUcontext) -> Result<BoundContext> {
    let mut current = std::ptr::null_mut();
    let mut mode = sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_RELAXED;
    // SAFETY: writes the locals.
    unsafe {
        cuda!(rank, cuCtxGetCurrent(&mut current))?;
        let pushed = current != context;
        if pushed {
            cuda!(rank, cuCtxPushCurrent_v2(context))?;
        }
        let exchanged = cuda!(rank, cuThreadExchangeStreamCaptureMode(&mut mode));
        if exchanged.is_err() && pushed {
            let _ = sys::cuCtxPopCurrent_v2(&mut current);
        }
        exchanged.map(|()| BoundContext {
            pushed,
            mode,
            _here: PhantomData,
        })
    }
}

impl Drop for DeviceContext {
    fn drop(&mut self) {
        if is_fork() {
            return;
        }
        // SAFETY: retained once in `open`.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

pub(super) fn uuid(rank: usize, device: sys::CUdevice) -> Result<Uuid> {
    let mut uuid = MaybeUninit::<sys::CUuuid>::zeroed();
    // SAFETY: writes the local, for which zero is valid too.
    unsafe {
        cuda!(rank, cuDeviceGetUuid_v2(uuid.as_mut_ptr(), device))?;
        Ok(uuid.assume_init().bytes.map(|byte| byte as u8))
    }
}
