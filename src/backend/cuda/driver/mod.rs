//! The CUDA driver, as far as this library uses it: the only folder with CUDA calls.
//!
//! Types own their driver objects, and release them when dropped. Every call that fails becomes an error that names the
//! rank, the call and the driver's own words.

use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use cudarc::driver::sys;

use crate::error::{Deadline, Kind, Result};
use crate::process::Process;

/// A pointer to a device's memory.
pub type DevicePtr = u64;

/// Memory that other processes map is allocated in whole blocks of this size, so a peer that maps it sees nothing else.
///
/// It is the granularity of virtual memory on every GPU that is supported.
pub const BLOCK: usize = 2 << 20;

/// A GPU as one rank uses it. All groups of a process that use the same GPU share its context.
#[derive(Debug)]
pub struct Device {
    pub rank: usize,
    /// How long an allocation may take at the most.
    timeout: Duration,
    /// True while an operation on this GPU waits for a rank that has not begun it. Such a wait has no end of its own.
    awaits_a_rank: AtomicBool,
    ordinal: usize,
    gpu: Arc<DeviceContext>,
}

/// The GPUs that this process uses.
static CONTEXTS: Mutex<Vec<Weak<DeviceContext>>> = Mutex::new(Vec::new());

/// The process that has loaded the driver. The driver does not work in a fork of it.
static LOADED: OnceLock<Process> = OnceLock::new();

/// Fails in a fork of the process that has loaded the driver.
fn refuse_fork(rank: usize) -> Result<()> {
    LOADED.get_or_init(Process::this).require(rank)
}

/// Whether this process is a fork of the one that has loaded the driver.
///
/// Then drops do nothing, because the driver is the parent's and its locks may be held.
pub fn is_fork() -> bool {
    LOADED.get().is_some_and(|loaded| !loaded.is_this())
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Each change of these lists is one call.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

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
    let what = format!("{call} failed: {name}: {words}");
    Err(Kind::Device { what }.on(rank))
}

/// Calls the driver and checks the result, naming the call by its own name.
macro_rules! cuda {
    ($rank:expr, $call:ident($($argument:expr),* $(,)?)) => {
        match $crate::backend::cuda::driver::refuse_fork($rank) {
            Ok(()) => check($rank, stringify!($call), sys::$call($($argument),*)),
            Err(forked) => Err(forked),
        }
    };
}

mod context;
mod kernel;
mod memory;
mod stream;
mod symbols;

pub use context::{Admits, BoundContext, Uuid};
use context::{DeviceContext, bind, free_and_total, uuid};
pub use kernel::{DeviceMatrix, Function, LaunchShape, Module, TensorMap};
pub use memory::{DeviceMapping, DeviceMemory, DeviceRegion, Pinned};
pub use stream::{Event, Priority, Stream, StreamMemOp};
use symbols::Symbols;

impl Device {
    /// Opens the visible GPU with this ordinal. Without one, the ranks of a host take the visible GPUs in turn. `place`
    /// is this rank's among them.
    ///
    /// # Errors
    /// [`Kind::Device`] without a driver or a GPU, or unless `admits` it.
    pub fn open(
        rank: usize,
        place: usize,
        ordinal: Option<usize>,
        timeout: Duration,
        admits: Admits,
    ) -> Result<Arc<Device>> {
        refuse_fork(rank)?;
        let none = |reason: String| {
            let what = format!("no GPU is found: {reason}");
            Kind::Device { what }.on(rank)
        };
        // cudarc panics if it does not find the library or a function of it; so look first.
        // SAFETY: loading the driver runs its initialisers, which any CUDA program does.
        let library = unsafe { libloading::Library::new("libcuda.so.1") };
        let library =
            library.map_err(|e| none(format!("the CUDA driver is not installed ({e})")))?;
        let symbols = Symbols::find(rank, library)?;
        // SAFETY: a plain call.
        unsafe { cuda!(rank, cuInit(0)) }.map_err(|e| none(e.to_string()))?;
        let count = visible(rank)?;
        if count < 1 {
            return Err(none("the driver shows none".into()));
        }
        let ordinal = ordinal.unwrap_or(place % count);
        if ordinal >= count {
            return Err(none(format!(
                "there is no GPU {ordinal}, {count} are visible"
            )));
        }
        let device = device(rank, ordinal)?;
        // Held while one is opened, so that it is opened once.
        let mut gpus = lock(&CONTEXTS);
        gpus.retain(|gpu| gpu.strong_count() > 0);
        let known = gpus.iter().filter_map(Weak::upgrade);
        let known = known.into_iter().find(|gpu| gpu.device == device);
        let gpu = match known {
            Some(gpu) => gpu,
            None => {
                let gpu = Arc::new(DeviceContext::open(rank, device, symbols, admits)?);
                gpus.push(Arc::downgrade(&gpu));
                gpu
            }
        };
        Ok(Arc::new(Device {
            rank,
            timeout,
            awaits_a_rank: AtomicBool::new(false),
            ordinal,
            gpu,
        }))
    }

    /// The primary context, a CUcontext.
    pub fn context(&self) -> *mut c_void {
        self.gpu.context.cast()
    }

    /// Among the GPUs that are visible to this process.
    pub fn ordinal(&self) -> usize {
        self.ordinal
    }

    /// The driver's name of the GPU.
    pub fn name(&self) -> &str {
        &self.gpu.name
    }

    pub fn capability(&self) -> (i32, i32) {
        self.gpu.capability
    }

    pub fn uuid(&self) -> Uuid {
        self.gpu.uuid
    }

    pub fn multiprocessors(&self) -> usize {
        self.gpu.multiprocessors as usize
    }

    /// The UUIDs of all GPUs that this process sees.
    pub fn visible_uuids(&self) -> Result<Vec<Uuid>> {
        (0..visible(self.rank)?)
            .map(|ordinal| uuid(self.rank, device(self.rank, ordinal)?))
            .collect()
    }

    /// Makes the context current on this thread as long as the result lives. Then the caller's context is current
    /// again.
    pub fn bind(&self) -> Result<BoundContext> {
        bind(self.rank, self.gpu.context)
    }

    /// Whether this device can read and write the memory of the device with this UUID.
    ///
    /// True if that device is not visible here. Mapping its memory will tell.
    pub fn can_access(&self, other: &Uuid) -> Result<bool> {
        if *other == self.gpu.uuid {
            return Ok(true);
        }
        for ordinal in 0..visible(self.rank)? {
            let peer = device(self.rank, ordinal)?;
            if uuid(self.rank, peer)? == *other {
                let mut can = 0;
                // SAFETY: writes the local.
                unsafe {
                    cuda!(
                        self.rank,
                        cuDeviceCanAccessPeer(&mut can, self.gpu.device, peer)
                    )?;
                }
                return Ok(can != 0);
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

    /// The free bytes of the GPU's memory.
    pub fn free_bytes(&self) -> Result<usize> {
        let _bound = self.bind()?;
        Ok(free_and_total(self.rank)?.0)
    }

    /// The GPU's memory in bytes, free or not.
    pub fn bytes(&self) -> usize {
        self.gpu.bytes
    }

    /// The least and the greatest priority of streams: lower numbers are higher priorities.
    pub fn priorities(&self) -> Result<(i32, i32)> {
        let _bound = self.bind()?;
        let (mut least, mut greatest) = (0, 0);
        // SAFETY: writes the locals.
        unsafe {
            cuda!(
                self.rank,
                cuCtxGetStreamPriorityRange(&mut least, &mut greatest)
            )?;
        }
        Ok((least, greatest))
    }

    /// Whether the context has ended, because a kernel or the hardware has failed or somebody has destroyed the
    /// context.
    ///
    /// Then the device no longer does any work that was put on it, even if no other query succeeds.
    pub fn has_ended(&self) -> bool {
        use sys::CUresult as is;
        // If binding fails, the query itself fails.
        let _bound = self.bind();
        matches!(
            self.ask(),
            is::CUDA_ERROR_DEINITIALIZED
                | is::CUDA_ERROR_ECC_UNCORRECTABLE
                | is::CUDA_ERROR_NVLINK_UNCORRECTABLE
                | is::CUDA_ERROR_ILLEGAL_ADDRESS
                | is::CUDA_ERROR_LAUNCH_TIMEOUT
                | is::CUDA_ERROR_CONTEXT_IS_DESTROYED
                | is::CUDA_ERROR_ASSERT
                | is::CUDA_ERROR_HARDWARE_STACK_ERROR
                | is::CUDA_ERROR_ILLEGAL_INSTRUCTION
                | is::CUDA_ERROR_MISALIGNED_ADDRESS
                | is::CUDA_ERROR_INVALID_ADDRESS_SPACE
                | is::CUDA_ERROR_INVALID_PC
                | is::CUDA_ERROR_LAUNCH_FAILED
        )
    }

    /// Fails if the device has failed.
    pub fn require_alive(&self) -> Result<()> {
        let _bound = self.bind()?;
        match self.ask() {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(()),
            result => check(self.rank, "cuStreamQuery", result),
        }
    }

    /// The driver's answer about a stream that is never captured.
    fn ask(&self) -> sys::CUresult {
        // SAFETY: the stream lives as long as the context, and the driver knows which have ended.
        unsafe { sys::cuStreamQuery(self.gpu.lasting.host_stream) }
    }

    /// Waits for copies to or from the caller's memory.
    ///
    /// There is no deadline, because the memory must outlive the copies. They need no multiprocessor, and nothing
    /// stands in front of them, because [`Device::settle`] has returned before.
    fn finish(&self) -> Result<()> {
        // SAFETY: the stream lives as long as the context.
        unsafe { cuda!(self.rank, cuStreamSynchronize(self.gpu.lasting.host_stream)) }
    }

    /// Notes whether an operation on this GPU waits for a rank that has not begun it.
    pub fn note_awaited_rank(&self, awaits: bool) {
        self.awaits_a_rank.store(awaits, Ordering::Relaxed);
    }

    /// True while an operation on this GPU waits for a rank that has not begun it.
    pub fn awaits_a_rank(&self) -> bool {
        self.awaits_a_rank.load(Ordering::Relaxed)
    }

    /// Waits for the work on the host stream, with a deadline. Time in which an operation waits for a rank that has not
    /// begun it does not count.
    fn settle(&self) -> Result<()> {
        const SPINS: u32 = 10_000;
        const NAP: Duration = Duration::from_micros(20);
        /// A kernel that waits for a peer and leaves no room for a fill ends this much after the deadline.
        const GRACE: Duration = Duration::from_secs(2);
        let mut begin = Instant::now();
        let mut turn = 0;
        loop {
            // SAFETY: the stream lives as long as the context.
            let result = unsafe { sys::cuStreamQuery(self.gpu.lasting.host_stream) };
            if result != sys::CUresult::CUDA_ERROR_NOT_READY {
                return check(self.rank, "cuStreamQuery", result);
            }
            if self.awaits_a_rank() {
                begin = Instant::now();
            }
            if begin.elapsed() > self.timeout + GRACE {
                return Err(Kind::Timeout {
                    waiting: self.rank,
                    what: "a fill or a free of memory: its GPU is busy".into(),
                    waited_ms: begin.elapsed().as_millis() as u64,
                    deadline: Deadline::Call,
                }
                .on(self.rank));
            }
            turn += 1;
            if turn > SPINS {
                std::thread::sleep(NAP);
            }
        }
    }
}

/// How many GPUs this process sees.
fn visible(rank: usize) -> Result<usize> {
    let mut count = 0;
    // SAFETY: writes the local.
    unsafe { cuda!(rank, cuDeviceGetCount(&mut count))? };
    Ok(count.max(0) as usize)
}

fn device(rank: usize, ordinal: usize) -> Result<sys::CUdevice> {
    let mut device = 0;
    // SAFETY: writes the local.
    unsafe { cuda!(rank, cuDeviceGet(&mut device, ordinal as i32))? };
    Ok(device)
}
