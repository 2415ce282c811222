//! The CUDA driver, as far as this library uses it: the only folder with CUDA calls.
//!
//! Types own what they name and give it back when dropped. Every call that fails becomes an error that names the
//! rank, the call and the driver's own words.

use std::ffi::CStr;
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
    pub rank: usize,
    device: sys::CUdevice,
    context: sys::CUcontext,
    symbols: symbols::Symbols,
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

mod kernel;
mod memory;
mod stream;
mod symbols;

pub use kernel::{Function, Layout, Module, TensorMap};
pub use memory::{Import, Memory, Pinned};
pub use stream::{Event, Stream, Urgency, WordOp};

impl Device {
    /// Opens the GPU with this ordinal among the visible ones; if none is given, the ranks share them in turn.
    ///
    /// # Errors
    /// [`Error::NoGpu`] without a driver or a GPU; [`Error::DriverTooOld`]; [`Error::UnsupportedGpu`] unless it is a Hopper GPU.
    pub fn open(rank: usize, ordinal: Option<usize>) -> Result<Arc<Device>> {
        let none = |reason: String| Error::NoGpu { rank, reason };
        // cudarc panics if it does not find the library or a function of it; so look first.
        // SAFETY: loading the driver runs its initialisers, which any CUDA program does.
        let library = unsafe { libloading::Library::new("libcuda.so.1") };
        let library =
            library.map_err(|e| none(format!("the CUDA driver is not installed ({e})")))?;
        let symbols = symbols::Symbols::find(rank, library)?;
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
                symbols,
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
