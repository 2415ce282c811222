//! The benchmark's device memory, and the addresses of matrices.

use std::fmt::Debug;

use cudarc::driver::{result as driver, sys as driver_sys};
use gemmesh::elements::Value;
use gemmesh::error::Kind;
use gemmesh::{Cuda, DType, Error, Matrix, Result};

/// For `map_err`: the driver, cuBLASLt or NCCL refused `action`.
pub fn refused<E: Debug>(action: &str) -> impl FnOnce(E) -> Error {
    move |reason| {
        Error::of_kind(Kind::System {
            action: action.into(),
            reason: format!("{reason:?}"),
        })
    }
}

/// A buffer of this benchmark's own.
pub struct Scratch(driver_sys::CUdeviceptr);

impl Scratch {
    pub fn new(bytes: usize) -> Result<Scratch> {
        // SAFETY: the context of the group's device is current.
        let memory = unsafe { driver::malloc_sync(bytes) };
        memory
            .map(Scratch)
            .map_err(refused("allocate device memory"))
    }

    /// A buffer of these.
    pub fn of(values: &[f32]) -> Result<Scratch> {
        let buffer = Scratch::new(size_of_val(values))?;
        // SAFETY: the buffer has this length.
        unsafe { driver::memcpy_htod_sync(buffer.0, values) }.map_err(refused("copy scales"))?;
        Ok(buffer)
    }

    pub fn ptr(&self) -> driver_sys::CUdeviceptr {
        self.0
    }

    /// Copies `bytes` bytes, which both hold.
    ///
    /// # Safety
    /// Both hold `bytes` bytes, and no one else uses them during the call.
    pub unsafe fn copy_from(&self, from: driver_sys::CUdeviceptr, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: as this function's.
        unsafe { driver::memcpy_dtod_sync(self.0, from, bytes) }.map_err(refused("copy a matrix"))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // SAFETY: allocated by `new`, and the streams that used it have been waited for.
        let _ = unsafe { driver::free_sync(self.0) };
    }
}

/// Where a matrix lies.
#[derive(Clone, Copy)]
pub struct Place {
    pub ptr: driver_sys::CUdeviceptr,
    /// Elements from row to row.
    pub pitch: usize,
    pub dtype: DType,
}

impl Place {
    pub fn of<T: Value>(matrix: &Matrix<Cuda, T>) -> Place {
        let (ptr, pitch) = matrix.as_device_ptr();
        Place {
            ptr,
            pitch: pitch / size_of::<T>(),
            dtype: T::DTYPE,
        }
    }
}
