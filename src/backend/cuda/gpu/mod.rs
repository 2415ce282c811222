//! One GPU as a rank uses it: context, kernels, streams, memory and deferred frees. Knows no group.
//!
//! All groups of a process share the context with its modules and page-locked host memory (`driver::Context`). Each
//! group has its own streams. If two groups' copies shared a stream, a wait for a peer in one group would hold up the
//! other.

pub mod buffer;
pub mod kernels;
pub mod queues;
pub mod reclaim;
pub mod streams;
pub mod tables;
pub mod workspace;

use std::any::Any;
use std::ffi::c_void;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::driver::{Device, DeviceMemory, Event, Stream};
use super::family;
use crate::backend::contract::{OpenOptions, Owner};
use crate::error::{Error, Kind, Result};
use crate::schedule::Product;
use crate::schedule::layout::MAX_EXTENT;
use crate::schedule::limits::limit;
use buffer::DeviceBuffer;
use kernels::Kernels;
use queues::Queues;
use reclaim::{Deferred, Reclaimer};
use streams::Streams;
use tables::Tables;
use workspace::Workspace;

/// A GPU, opened.
#[derive(Debug)]
pub struct Gpu {
    pub device: Arc<Device>,
    pub kernels: Kernels,
    /// Which streams may hold one another up.
    pub queues: Queues,
    pub reclaimer: Arc<Reclaimer>,
    pub tables: Arc<Tables>,
    pub workspace: Workspace,
    /// The most CTAs of a kernel, if the caller sets a limit.
    pub max_ctas: Option<usize>,
    /// Multiprocessors that kernels leave free for those of the network, whatever the caller says.
    pub room: usize,
}

impl Gpu {
    /// Opens the visible GPU that `options` name or, if they name none, the GPU that falls to the rank's `place` on its
    /// host. `timeout`: how long an allocation may take.
    ///
    /// # Errors
    /// As [`Device::open`] and [`Kernels::load`]; [`Kind::Limit`]; [`Kind::Misuse`]; [`Kind::OutOfMemory`].
    pub fn open(
        rank: usize,
        place: usize,
        options: &OpenOptions,
        timeout: Duration,
    ) -> Result<Gpu> {
        let most = options.max_ctas.unwrap_or(MAX_EXTENT);
        limit("the most CTAs of a kernel", most, 1, MAX_EXTENT)
            .map_err(Error::of(rank, "Builder::max_ctas"))?;
        let has_kernels = |gpu: &str, capability| family::of_gpu(gpu, capability).map(drop);
        let device = Device::open(rank, place, options.device, timeout, &has_kernels)?;
        let family = family::of_gpu(device.name(), device.capability())
            .map_err(|what| Kind::Device { what }.on(rank))?;
        let kernels = Kernels::load(&device, family)?;
        let queues = Queues::found(device.priorities()?);
        queues.check(rank)?;
        let reclaimer = Reclaimer::new(&device)?;
        Ok(Gpu {
            tables: Tables::new(&device, &reclaimer)?,
            workspace: Workspace::new(&device, &reclaimer, family)?,
            kernels,
            queues,
            reclaimer,
            device,
            max_ctas: options.max_ctas,
            room: 0,
        })
    }

    /// The most CTAs of a kernel of a program with this product, or without one.
    pub fn most_ctas(&self, product: Option<&Product>) -> usize {
        let of_product = product.and_then(|product| product.config.max_ctas);
        let left = self.device.multiprocessors().saturating_sub(self.room);
        let beside_network = (self.room > 0).then(|| left.max(1));
        let limits = self.max_ctas.into_iter().chain(of_product);
        limits.chain(beside_network).min().unwrap_or(usize::MAX)
    }

    /// Its streams.
    pub fn streams(&self) -> &Streams {
        &self.reclaimer.streams
    }

    /// The stream that operations are put on at this moment.
    pub fn main(&self) -> Arc<Stream> {
        self.streams().main()
    }

    /// A stream of the caller's, if operations can be put on it.
    ///
    /// # Safety
    /// `stream` belongs to the device's primary context, and lives until a different stream replaces it or the group
    /// has ended.
    pub unsafe fn borrow_stream(
        &self,
        stream: *mut c_void,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<Stream> {
        // SAFETY: as this function's.
        let stream = unsafe { Stream::borrowed(&self.device, stream, owner) };
        self.queues
            .check_main(self.device.rank, stream.priority()?)?;
        Ok(stream)
    }

    /// Whether what is put on a stream of the caller's is recorded into a graph.
    ///
    /// # Safety
    /// `stream` belongs to the device's primary context.
    pub unsafe fn is_captured(&self, stream: *mut c_void) -> Result<bool> {
        // SAFETY: as this function's. It is used in this function only.
        unsafe { Stream::borrowed(&self.device, stream, Arc::new(())) }.is_capturing()
    }

    /// Makes later work on a stream of the caller's wait for the work that is on the main stream now.
    ///
    /// # Safety
    /// `stream` belongs to the device's primary context.
    pub unsafe fn order(&self, stream: *mut c_void) -> Result<()> {
        // SAFETY: as this function's. It is used in this function only.
        let stream = unsafe { Stream::borrowed(&self.device, stream, Arc::new(())) };
        self.streams()
            .order(&stream, &Event::new(&self.device, false)?)
    }

    /// Zeroed memory that is used on these streams, and is not freed while they may use it.
    pub fn scratch(&self, bytes: usize) -> Result<Deferred<DeviceMemory>> {
        let memory = DeviceMemory::zeroed(&self.device, bytes)?;
        Ok(Deferred::new(memory, &self.reclaimer))
    }

    /// Zeroed memory for `rows` rows of `width` bytes.
    ///
    /// If there is no room, this rank first frees what was dropped, when its operations have ended. Other ranks may
    /// free theirs a moment later. `patience`: how long the operations may take.
    pub fn buffer(&self, [rows, width]: [usize; 2], patience: Duration) -> Result<DeviceBuffer> {
        let pitch = width.next_multiple_of(16);
        let memory = self.memory(rows.saturating_mul(pitch), patience)?;
        Ok(DeviceBuffer::own(
            Deferred::new(memory, &self.reclaimer),
            pitch,
            width,
        ))
    }

    fn memory(&self, bytes: usize, patience: Duration) -> Result<DeviceMemory> {
        const MOMENT: Duration = Duration::from_millis(250);
        const NAP: Duration = Duration::from_millis(5);
        self.reclaimer.settle();
        let mut memory = DeviceMemory::zeroed(&self.device, bytes);
        let is_refused = |memory: &Result<_>| {
            let kind = memory.as_ref().err().map(Error::kind);
            matches!(kind, Some(Kind::OutOfMemory { .. }))
        };
        if is_refused(&memory) && bytes <= self.device.bytes() {
            self.reclaimer.drain(patience);
            let begin = Instant::now();
            while is_refused(&memory) && begin.elapsed() < MOMENT {
                std::thread::sleep(NAP);
                memory = DeviceMemory::zeroed(&self.device, bytes);
            }
        }
        memory
    }

    /// The caller's memory as a matrix. `owner`, if there is one, is dropped when the device no longer uses the memory.
    ///
    /// # Safety
    /// While the buffer is used, `ptr` is device memory of at least `(rows - 1) * pitch + width` bytes. Without rows it
    /// may be 0.
    pub unsafe fn view(
        &self,
        ptr: u64,
        shape: [usize; 2],
        pitch: usize,
        owner: Option<Owner>,
    ) -> DeviceBuffer {
        let owner = owner.map(|owner| Deferred::new(owner, &self.reclaimer));
        // SAFETY: as this function's.
        unsafe { DeviceBuffer::foreign(&self.device, ptr, shape, pitch, owner) }
    }
}
