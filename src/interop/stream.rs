//! Streams, events and device pointers of groups and matrices on GPUs, for other CUDA code.
#![allow(unsafe_code)]

use std::any::Any;
use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;

use crate::backend::{Cuda, Variant};
use crate::element::{DType, Value};
#[cfg(doc)]
use crate::error::Kind;
use crate::error::{Error, Result};
use crate::group::Group;
use crate::matrix::{
    Matrix, MatrixView, MatrixViewMut, Memory, ShardedMatrix, ViewMemory, bytes_of,
};
use crate::schedule::Config;

/// CU_STREAM_PER_THREAD, which is a different stream on each thread.
pub(super) const PER_THREAD: usize = 2;

/// Keeps a group's operations on their stream until it is dropped. [`Group::hold_stream_of`] makes it.
#[cfg_attr(docsrs, doc(cfg(feature = "cuda")))]
#[must_use = "the stream may change once the guard is dropped"]
pub struct StreamGuard {
    _guard: Arc<()>,
    _owner: Arc<dyn Any + Send + Sync>,
}

impl fmt::Debug for StreamGuard {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("StreamGuard")
    }
}

/// The GPU, and raw streams and events of CUDA.
#[cfg_attr(docsrs, doc(cfg(feature = "cuda")))]
impl Group<Cuda> {
    /// The stream that operations are put on, a CUstream of the device's primary context.
    pub fn stream(&self) -> *mut c_void {
        self.inner().backend.stream()
    }

    /// Puts later operations on `stream`, a CUstream of the device's primary context.
    ///
    /// They begin after the stream's earlier work, and after the operations on the group's stream before. Operations that
    /// are captured on `stream` wait for no operation that is not captured. So launch the graph after those, for example
    /// on the stream that they are on.
    ///
    /// ```no_run
    /// # fn set(group: gemmesh::Group<gemmesh::Cuda>, mine: *mut std::ffi::c_void) -> gemmesh::Result<()> {
    /// // SAFETY: `mine` is a stream of the primary context, and is destroyed after the group has ended.
    /// # #[allow(unsafe_code)]
    /// unsafe { group.set_stream(mine) }
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Kind::Unsuitable`] while a [`StreamGuard`] or a matrix in cudarc's memory holds the current stream, and for
    /// CU_STREAM_PER_THREAD, which is a different stream on each thread; [`Kind::Misuse`] if the stream shares
    /// a queue of the device with the library's streams, as all streams of one priority do under
    /// CUDA_DEVICE_MAX_CONNECTIONS=1; [`Kind::Device`] if the driver refuses; the group's failure.
    ///
    /// # Safety
    /// The stream lives until the group uses a different one or has ended.
    #[track_caller]
    pub unsafe fn set_stream(&self, stream: *mut c_void) -> Result<()> {
        // SAFETY: as this function's; there is nothing to keep.
        unsafe { self.set_stream_of(stream, Arc::new(())) }
    }

    /// [`Group::set_stream`], which keeps `owner` as long as the group uses the stream.
    ///
    /// The owner is what destroys the stream when it is dropped, such as an `Arc` of cudarc's `CudaStream`.
    ///
    /// # Errors
    /// As [`Group::set_stream`].
    ///
    /// # Safety
    /// The stream lives as long as `owner`.
    #[track_caller]
    pub unsafe fn set_stream_of(
        &self,
        stream: *mut c_void,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<()> {
        // SAFETY: as this function's.
        let of = Error::of(self.rank(), "Group::set_stream");
        // SAFETY: as this function's.
        self.exclusively(|_| unsafe { self.take_over(stream, owner) }.map_err(of))
    }

    /// [`Group::set_stream_of`], after which the group's stream cannot change until the guard is dropped.
    ///
    /// It is for code that gives the group memory whose uses `stream` orders, for example memory that is freed on it.
    /// If the group is on `stream` already, only the guard is made.
    ///
    /// # Errors
    /// As [`Group::set_stream`].
    ///
    /// # Safety
    /// As [`Group::set_stream_of`].
    #[track_caller]
    pub unsafe fn hold_stream_of(
        &self,
        stream: *mut c_void,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<StreamGuard> {
        let of = Error::of(self.rank(), "Group::hold_stream_of");
        self.exclusively(|_| {
            if self.stream() != stream {
                // SAFETY: as this function's.
                unsafe { self.take_over(stream, owner.clone()) }.map_err(of)?;
            }
            Ok(StreamGuard {
                _owner: owner,
                ..self.guard_stream()
            })
        })
    }

    /// # Safety
    /// As [`Group::set_stream_of`].
    unsafe fn take_over(
        &self,
        stream: *mut c_void,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<()> {
        if stream.addr() == PER_THREAD {
            return Err(Error::unsuitable(
                "the handle of the stream",
                "one stream, whichever thread uses it",
                "CU_STREAM_PER_THREAD",
            ));
        }
        let gpu = self.inner().backend.gpu();
        // SAFETY: as this function's.
        let stream = unsafe { gpu.borrow_stream(stream, owner)? };
        // The current stream may free memory that matrices still use.
        let guards = gpu.streams().guards();
        if guards > 0 {
            return Err(Error::unsuitable(
                "the number of holders (StreamGuard, CudarcMatrix) of the stream before",
                "0",
                guards.to_string(),
            ));
        }
        // SAFETY: as this function's.
        unsafe { gpu.streams().set_main(stream) }
    }

    /// Must be called within [`Group::exclusively`], so that the stream does not change at the same moment.
    pub(crate) fn guard_stream(&self) -> StreamGuard {
        StreamGuard {
            _guard: self.inner().backend.gpu().streams().guard(),
            _owner: Arc::new(()),
        }
    }

    /// Whether what is put on a stream is recorded into a graph.
    ///
    /// # Safety
    /// `stream` is a CUstream of the device's primary context.
    pub(crate) unsafe fn is_captured(&self, stream: *mut c_void) -> Result<bool> {
        // SAFETY: as this function's.
        unsafe { self.inner().backend.gpu().is_captured(stream) }
    }

    /// Records a CUevent after all operations so far. Other streams, or the host, can wait for it.
    ///
    /// # Errors
    /// [`Kind::Device`] if the driver refuses; the group's failure.
    ///
    /// # Safety
    /// `event` is an event of the device's primary context.
    pub unsafe fn record_event(&self, event: *mut c_void) -> Result<()> {
        // SAFETY: as this function's.
        self.exclusively(|_| unsafe { self.inner().backend.gpu().main().record(event) })
    }

    /// Makes all later operations wait, on the device, for the last recording of a CUevent.
    ///
    /// # Errors
    /// As [`Group::record_event`].
    ///
    /// # Safety
    /// `event` is an event of a CUDA context of this process.
    pub unsafe fn wait_for_event(&self, event: *mut c_void) -> Result<()> {
        // SAFETY: as this function's.
        self.exclusively(|_| unsafe { self.inner().backend.gpu().main().wait(event) })
    }

    /// Makes later work on `stream` wait for all operations so far.
    ///
    /// # Safety
    /// `stream` is a CUstream of the device's primary context.
    pub(crate) unsafe fn order_stream(&self, stream: *mut c_void) -> Result<()> {
        // SAFETY: as this function's.
        self.exclusively(|_| unsafe { self.inner().backend.gpu().order(stream) })
    }

    /// This rank's GPU, as an ordinal among those visible to this process.
    pub fn device_ordinal(&self) -> usize {
        self.inner().backend.gpu().device.ordinal()
    }

    /// The name of this rank's GPU.
    pub fn device_name(&self) -> &str {
        self.inner().backend.gpu().device.name()
    }

    /// The version of CUDA that the driver supports, as major · 1000 + minor · 10.
    ///
    /// # Errors
    /// [`Kind::Device`] if the driver refuses.
    pub fn driver_version(&self) -> Result<i32> {
        self.inner().backend.gpu().device.driver_version()
    }

    /// Writes a pattern into every peer's memory, reads every peer's memory, and verifies both. Collective.
    ///
    /// # Errors
    /// [`Kind::PeerMemory`] names a pair of GPUs that fails; the group's failure.
    pub fn check_peers(&self) -> Result<()> {
        self.check()?;
        let inner = self.inner();
        inner.backend.check_peers(&inner.members)
    }
}

#[cfg_attr(docsrs, doc(cfg(feature = "cuda")))]
impl Cuda {
    /// The release of nvcc that compiled this program's kernels, such as "13.0". It is `None` if the program was built
    /// without kernels.
    pub fn nvcc_release() -> Option<&'static str> {
        let release = include_str!(concat!(env!("OUT_DIR"), "/nvcc.txt"));
        Some(release).filter(|release| !release.is_empty())
    }
}

/// `config` with the tile shape of each kernel of this variant for these types of `a` and `b`; for benchmarks and tests.
#[cfg(feature = "unstable-tools")]
pub fn with_each_kernel(config: &Config, variant: Variant, dtypes: [DType; 2]) -> Vec<Config> {
    Cuda::configs(*config, variant, dtypes).collect()
}

/// True if some ranks share a GPU; for benchmarks.
#[cfg(feature = "unstable-tools")]
pub fn ranks_share_gpus(group: &Group<Cuda>) -> bool {
    !group.inner().backend.is_distinct()
}

/// Aligns the ranks' streams, so that later work begins on all of them at the same time. Collective; for benchmarks.
///
/// # Errors
/// [`Kind::Device`] if the driver refuses.
#[cfg(feature = "unstable-tools")]
pub fn align_streams(group: &Group<Cuda>) -> Result<()> {
    let inner = group.inner();
    inner.backend.align_streams(&inner.members)
}

#[cfg_attr(docsrs, doc(cfg(feature = "cuda")))]
impl<T: Value> Matrix<Cuda, T> {
    /// A matrix in the caller's device memory, such as a tensor of candle, cust or burn, or a part of one.
    ///
    /// `pitch` is the number of bytes from row to row; a part of a tensor has the pitch of the whole. The matrix is a
    /// view, so making and dropping it costs nothing and waits for nothing.
    ///
    /// ```no_run
    /// # fn wrap(group: gemmesh::Group<gemmesh::Cuda>, address: u64) -> gemmesh::Result<()> {
    /// use gemmesh::{Cuda, Matrix, bf16};
    ///
    /// let (rows, columns) = (4096, 1024);
    /// let pitch = columns * size_of::<bf16>();
    /// // SAFETY: at `address` lie as many bf16 on the group's GPU, which no one frees or writes before `synchronize`.
    /// # #[allow(unsafe_code)]
    /// let matrix =
    ///     unsafe { Matrix::<Cuda, bf16>::from_device_ptr(&group, address, rows, columns, pitch)? };
    /// group.synchronize()
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Kind::Unsuitable`] unless `ptr` and `pitch` are multiples of 16; [`Kind::Limit`] if a row is longer
    /// than the pitch, if there are no columns and the type is not f32, or if there are more rows or columns than
    /// 2³¹ - 1; [`Kind::Unsuitable`] if `ptr` is null, or if the memory would not end within the address space. The
    /// pitch of one row does not matter. Without elements, neither `ptr` nor `pitch` matters, and both may be 0.
    ///
    /// # Safety
    /// - `ptr` is memory of the group's device, with at least `(rows - 1) * pitch` bytes and a row, in whole pieces of
    ///   16 bytes.
    /// - It stays allocated until the operations that use the matrix are complete. Dropping the matrix does not wait
    ///   for them.
    /// - Until then no one else writes it, and no one reads it if it is an output. If a row of an output does not end
    ///   at a piece of 16 bytes, operations write meaningless numbers into its padding, up to the next piece.
    #[track_caller]
    pub unsafe fn from_device_ptr(
        group: &Group<Cuda>,
        ptr: u64,
        rows: usize,
        columns: usize,
        pitch: usize,
    ) -> Result<Matrix<Cuda, T>> {
        // SAFETY: as this function's.
        let matrix = unsafe { Matrix::of_device_ptr(group, ptr, [rows, columns], pitch) };
        matrix.map_err(Error::of(group.rank(), "Matrix::from_device_ptr"))
    }

    /// # Safety
    /// As [`Matrix::from_device_ptr`].
    pub(crate) unsafe fn of_device_ptr(
        group: &Group<Cuda>,
        ptr: u64,
        [rows, columns]: [usize; 2],
        pitch: usize,
    ) -> Result<Matrix<Cuda, T>> {
        bytes_of::<T>(rows, columns)?;
        let width = bytes_of::<T>(1, columns)?;
        let memory = Memory {
            address: ptr,
            dtype: T::DTYPE,
            shape: [rows, columns],
            pitch,
        };
        memory.check::<Cuda>("the matrix")?;
        let pitch = memory.effective_pitch::<Cuda>();
        let gpu = group.inner().backend.gpu();
        // SAFETY: as this function's.
        let buffer = unsafe { gpu.view(ptr, [rows, width], pitch, None) };
        Ok(Matrix::new(group.clone(), buffer, rows, columns))
    }

    /// The matrix's address on the device, and its pitch, the number of bytes from row to row.
    pub fn as_device_ptr(&self) -> (u64, usize) {
        self.memory().place()
    }
}

#[cfg_attr(docsrs, doc(cfg(feature = "cuda")))]
impl<T: Value> MatrixView<'_, Cuda, T> {
    /// The address of the first element on the device, and the pitch, the number of bytes from row to row.
    pub fn as_device_ptr(&self) -> (u64, usize) {
        let (memory, offset) = self.memory();
        let (first, pitch) = match memory {
            ViewMemory::Buffer(memory) => memory.place(),
            ViewMemory::Shared(memory, pitch) => (memory.own(), pitch),
        };
        (first + offset as u64, pitch)
    }
}

#[cfg_attr(docsrs, doc(cfg(feature = "cuda")))]
impl<T: Value> MatrixViewMut<'_, Cuda, T> {
    /// As [`MatrixView::as_device_ptr`]. Write the memory on the group's stream, or between
    /// [`Group::synchronize`] and the next operation.
    pub fn as_device_ptr(&self) -> (u64, usize) {
        self.as_view().as_device_ptr()
    }
}

#[cfg_attr(docsrs, doc(cfg(feature = "cuda")))]
impl<T: Value> ShardedMatrix<Cuda, T> {
    /// The address on the device of this rank's whole [M, K] matrix. Its rows follow one another without padding.
    pub fn as_device_ptr(&self) -> u64 {
        self.memory().own()
    }
}
