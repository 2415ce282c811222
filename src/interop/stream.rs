//! What groups and matrices on GPUs have beside: streams and device pointers, on which other CUDA code can stand.
#![allow(unsafe_code)]

use std::any::Any;
use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;

use crate::backend::{Cuda, Sample};
use crate::element::Value;
use crate::error::{Error, Result};
use crate::group::Group;
use crate::matrix::ShardedMatrix;
use crate::matrix::{Matrix, bytes_of};
use crate::schedule::Config;

/// As long as it lives, a group's operations stay on the stream that they are put on: [`Group::hold_stream_of`] makes it.
#[must_use = "another stream may take over once it is dropped"]
pub struct StreamGuard {
    _guard: Arc<()>,
    _owner: Arc<dyn Any + Send + Sync>,
}

impl fmt::Debug for StreamGuard {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("StreamGuard")
    }
}

impl Group<Cuda> {
    /// The stream that operations are put on: a CUstream of the device's primary context.
    pub fn stream(&self) -> *mut c_void {
        self.inner().backend.stream()
    }

    /// Puts later operations on `stream`, a CUstream of the device's primary context, instead of the group's own.
    /// They begin after what was put on the stream before.
    ///
    /// # Errors
    /// [`Error::Unsuitable`] while a [`StreamGuard`] or a matrix in memory of cudarc's holds the stream before;
    /// [`Error::QueuedTogether`] for a stream that shares a queue of the device with this library's own, as all of one
    /// priority do under CUDA_DEVICE_MAX_CONNECTIONS=1; [`Error::Cuda`] if the driver refuses; the group's failure.
    ///
    /// # Safety
    /// The stream lives until another takes over or the group has ended.
    pub unsafe fn set_stream(&self, stream: *mut c_void) -> Result<()> {
        // SAFETY: as this function's; there is nothing to keep.
        unsafe { self.set_stream_of(stream, Arc::new(())) }
    }

    /// As [`Group::set_stream`], and keeps `owner` as long as the group uses the stream: what would destroy it when dropped, such as an
    /// `Arc` of cudarc's `CudaStream`.
    ///
    /// # Errors
    /// As [`Group::set_stream`].
    ///
    /// # Safety
    /// The stream lives as long as `owner`.
    pub unsafe fn set_stream_of(
        &self,
        stream: *mut c_void,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<()> {
        // SAFETY: as this function's.
        self.exclusively(|_| unsafe { self.take_over(stream, owner) })
    }

    /// As [`Group::set_stream_of`], unless it is the group's stream already; and as long as what is returned lives, no other takes over:
    /// for code that gives the group memory which `stream` keeps in order, such as one that is freed there.
    ///
    /// # Errors
    /// As [`Group::set_stream`].
    ///
    /// # Safety
    /// As [`Group::set_stream_of`].
    pub unsafe fn hold_stream_of(
        &self,
        stream: *mut c_void,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<StreamGuard> {
        self.exclusively(|_| {
            if self.stream() != stream {
                // SAFETY: as this function's.
                unsafe { self.take_over(stream, owner.clone())? };
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
        let gpu = self.inner().backend.gpu();
        // SAFETY: as this function's.
        let stream = unsafe { gpu.borrow_stream(stream, owner)? };
        // What is in memory that the stream before orders may be freed there.
        let guards = gpu.streams().guards();
        if guards > 0 {
            return Err(Error::Unsuitable {
                rank: self.rank(),
                argument: "the stream before".into(),
                what: "the number of holders (StreamGuard, CudarcMatrix)".into(),
                expected: "0".into(),
                found: guards.to_string(),
            });
        }
        // SAFETY: as this function's.
        unsafe { gpu.streams().set_main(stream) }
    }

    /// Within [`Group::exclusively`], lest another stream take over at this moment.
    pub(crate) fn guard_stream(&self) -> StreamGuard {
        StreamGuard {
            _guard: self.inner().backend.gpu().streams().guard(),
            _owner: Arc::new(()),
        }
    }

    /// Records a CUevent behind all operations so far, for other streams, or the host, to wait for them.
    ///
    /// # Errors
    /// [`Error::Cuda`] if the driver refuses; the group's failure.
    ///
    /// # Safety
    /// It is an event of the device's primary context.
    pub unsafe fn record_event(&self, event: *mut c_void) -> Result<()> {
        // SAFETY: as this function's.
        self.exclusively(|_| unsafe { self.inner().backend.gpu().main().record(event) })
    }

    /// Lets all later operations wait, on the device, for where a CUevent was recorded last.
    ///
    /// # Errors
    /// As [`Group::record_event`].
    ///
    /// # Safety
    /// It is an event of a CUDA context of this process.
    pub unsafe fn wait_for_event(&self, event: *mut c_void) -> Result<()> {
        // SAFETY: as this function's.
        self.exclusively(|_| unsafe { self.inner().backend.gpu().main().wait(event) })
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
    /// [`Error::Cuda`] if the driver refuses.
    pub fn driver_version(&self) -> Result<i32> {
        self.inner().backend.gpu().device.driver_version()
    }

    /// Writes a pattern into every peer's memory, reads every peer's, and verifies both. Collective.
    ///
    /// # Errors
    /// [`Error::PeerMemory`] names a pair that fails; the group's failure.
    pub fn check_peers(&self) -> Result<()> {
        self.check()?;
        let inner = self.inner();
        inner.backend.check_peers(&inner.members)
    }
}

impl Cuda {
    /// The release of nvcc that this program's kernels were compiled by, such as "13.0"; none if it was built without kernels.
    pub fn nvcc_release() -> Option<&'static str> {
        let release = include_str!(concat!(env!("OUT_DIR"), "/nvcc.txt"));
        Some(release).filter(|release| !release.is_empty())
    }
}

/// `config` with the tile shape of each kernel there is, or of those that add partials; for benchmarks and tests.
#[doc(hidden)]
pub fn with_each_kernel(config: &Config, sums: bool) -> Vec<Config> {
    Cuda::configs(config, sums).collect()
}

/// Rates of this device, as a file that `GEMMESH_RATES` may name, and the median of how far the model is from the samples; for
/// benchmarks.
///
/// # Errors
/// [`Error::System`] if they can't be written as JSON.
#[doc(hidden)]
pub fn calibrate(group: &Group<Cuda>, samples: &[Sample]) -> Result<(String, f64)> {
    group.inner().backend.calibrate(group.rank(), samples)
}

/// Whether some ranks have the same GPU; for benchmarks.
#[doc(hidden)]
pub fn ranks_share_gpus(group: &Group<Cuda>) -> bool {
    !group.inner().backend.is_distinct()
}

/// Aligns the ranks' streams: what is put on them later begins at the same time. Collective; for benchmarks.
///
/// # Errors
/// [`Error::Cuda`] if the driver refuses.
#[doc(hidden)]
pub fn align_streams(group: &Group<Cuda>) -> Result<()> {
    let inner = group.inner();
    inner.backend.align_streams(&inner.members)
}

impl<T: Value> Matrix<Cuda, T> {
    /// A matrix in memory of the caller's, such as a tensor of candle, cust or burn, or a part of one (some rows; some
    /// columns, with the pitch of the whole): the door for other stacks. It is a view: making and dropping it costs
    /// nothing and waits for nothing.
    ///
    /// # Errors
    /// [`Error::Unaligned`] unless `ptr` and `pitch`, the bytes from row to row, are multiples of 16;
    /// [`Error::Shape`] if a row is longer than the pitch; [`Error::Limit`] for no columns. (Without rows `ptr` does not matter; it may be 0.)
    ///
    /// # Safety
    /// `ptr` is memory of the group's device of at least `(rows - 1) * pitch` bytes and a row, in whole pieces of 16 bytes, which
    /// stays allocated until the operations that use the matrix are complete (dropping the matrix does not wait for them), and
    /// which nobody else writes meanwhile, nor reads if it is an output. If a row is no whole number of such pieces, an operation
    /// whose output it is writes numbers of no meaning into its padding, up to the next.
    pub unsafe fn from_device_ptr(
        group: &Group<Cuda>,
        ptr: u64,
        rows: usize,
        columns: usize,
        pitch: usize,
    ) -> Result<Matrix<Cuda, T>> {
        let rank = group.rank();
        bytes_of::<T>(rows, columns)?;
        let width = bytes_of::<T>(1, columns)?;
        for (what, value) in [("device pointer", ptr as usize), ("pitch", pitch)] {
            if rows > 0 && !value.is_multiple_of(16) {
                return Err(Error::Unaligned {
                    rank,
                    what: what.into(),
                    value,
                    multiple: 16,
                });
            }
        }
        if pitch < width {
            return Err(Error::Shape {
                rank,
                argument: "the bytes of a row".into(),
                expected: vec![pitch],
                found: vec![width],
            });
        }
        let gpu = group.inner().backend.gpu();
        // SAFETY: as this function's.
        let buffer = unsafe { gpu.view(ptr, [rows, width], pitch, None) };
        Ok(Matrix::new(group.clone(), buffer, rows, columns))
    }

    /// Where the matrix lies on the device, and the bytes from row to row.
    pub fn as_device_ptr(&self) -> (u64, usize) {
        self.memory().place()
    }
}

impl<T: Value> ShardedMatrix<Cuda, T> {
    /// Where the whole [M, K] matrix of this rank lies on the device; its rows follow one another without padding.
    pub fn as_device_ptr(&self) -> u64 {
        self.memory().own()
    }
}
