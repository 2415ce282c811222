//! Interop with cust: its streams and memory.
#![allow(unsafe_code)]

use cust::memory::{DeviceCopy, DeviceSlice};
use cust::stream::Stream;

use crate::backend::Cuda;
use crate::element::Value;
#[cfg(doc)]
use crate::error::Kind;
use crate::error::{Error, Result, require_elements};
use crate::group::Group;
use crate::matrix::{Matrix, bytes_of};

/// Streams of cust.
#[cfg_attr(docsrs, doc(cfg(feature = "cust")))]
impl Group<Cuda> {
    /// Puts later operations on a stream of cust.
    ///
    /// They begin after the stream's earlier work, and its later work begins after them.
    ///
    /// # Errors
    /// As [`Group::set_stream`].
    ///
    /// # Safety
    /// As [`Group::set_stream`]: the stream is of the GPU's primary context, which cust's `Context::new` gives, and
    /// lives until the group uses a different one or has ended.
    #[track_caller]
    pub unsafe fn use_cust_stream(&self, stream: &Stream) -> Result<()> {
        // SAFETY: as this function's.
        unsafe { self.set_stream(stream.as_inner().cast()) }
    }
}

#[cfg_attr(docsrs, doc(cfg(feature = "cust")))]
impl<T: Value> Matrix<Cuda, T> {
    /// A [rows, columns] matrix, row by row, in memory of cust: a `DeviceBuffer`, or a part of one.
    ///
    /// cust knows only the types of an older version of half. So the memory's elements may have any type of the width
    /// of `T`, such as `u16`.
    ///
    /// # Errors
    /// [`Kind::Unsuitable`] if elements are not as wide as `T`, and unless there are rows · columns of
    /// them; as [`Matrix::from_device_ptr`].
    ///
    /// # Safety
    /// As [`Matrix::from_device_ptr`]: the memory is of the group's GPU, and is neither freed nor used otherwise before
    /// the operations that use the matrix have ended. A `DeviceBuffer` does not wait for them when it is dropped.
    #[track_caller]
    pub unsafe fn from_cust<D: DeviceCopy>(
        group: &Group<Cuda>,
        memory: &DeviceSlice<D>,
        rows: usize,
        columns: usize,
    ) -> Result<Matrix<Cuda, T>> {
        // SAFETY: as this function's.
        let matrix = unsafe { Matrix::of_cust(group, memory, rows, columns) };
        matrix.map_err(Error::of(group.rank(), "Matrix::from_cust"))
    }

    /// # Safety
    /// As [`Matrix::from_cust`].
    unsafe fn of_cust<D: DeviceCopy>(
        group: &Group<Cuda>,
        memory: &DeviceSlice<D>,
        rows: usize,
        columns: usize,
    ) -> Result<Matrix<Cuda, T>> {
        if size_of::<D>() != size_of::<T>() {
            return Err(Error::unsuitable(
                "an element's width of the memory of a matrix",
                format!("{} bytes, of {}", size_of::<T>(), T::DTYPE),
                format!("{} bytes", size_of::<D>()),
            ));
        }
        bytes_of::<T>(rows, columns)?;
        let pitch = bytes_of::<T>(1, columns)?;
        require_elements([rows, columns], "the memory", memory.len())?;
        let ptr = memory.as_device_ptr().as_raw();
        // SAFETY: as this function's.
        unsafe { Matrix::of_device_ptr(group, ptr, [rows, columns], pitch) }
    }
}
