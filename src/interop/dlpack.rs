//! Interop by [DLPack](https://dmlc.github.io/dlpack/latest/): matrices from and for other libraries, without a copy.
//!
//! [`Matrix::from_dlpack`] takes a tensor of PyTorch, JAX, CuPy or any other library that speaks DLPack.
//! [`Matrix::into_dlpack`] gives a matrix to them. In Python a tensor is in a capsule named `dltensor`. Code that takes
//! the tensor out renames the capsule to `used_dltensor`.
//!
//! DLPack says where memory is, but not when it is written. On GPUs, code that gives a tensor writes it on the group's
//! stream, or joins its own stream to the group's by an event. Code that gets a tensor reads it in that order too, or
//! after [`Group::synchronize`].
//!
//! ```
//! use gemmesh::{Group, Host, Matmul, Matrix, bf16};
//!
//! # #[allow(unsafe_code)]
//! fn rank(group: Group<Host>) -> gemmesh::Result<()> {
//!     // As it comes from elsewhere: here from this library.
//!     let tensor = group.upload(&[bf16::ONE; 4 * 8], 4, 8)?.into_dlpack();
//!     // SAFETY: a tensor that no one else uses any more.
//!     let a = unsafe { Matrix::<Host, bf16>::from_dlpack(&group, tensor)? };
//!     let b = group.upload(&[bf16::ONE; 2 * 8], 2, 8)?;
//!     let mut out = group.zeros::<f32>(4, 2)?;
//!     Matmul::new().run(&a, &b, &mut out)?;
//!     assert_eq!(out.to_vec()?, [8.0; 4 * 2]);
//!     Ok(())
//! }
//!
//! Group::threads(1, rank)?;
//! # Ok::<_, gemmesh::Error>(())
//! ```
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::fmt;

use super::tensors;
use crate::backend::{Backend, Owner};
use crate::element::{DType, Value};
#[cfg(doc)]
use crate::error::Kind;
use crate::error::{Error, Result};
use crate::group::Group;
use crate::matrix::{Matrix, Memory, bytes_of};

/// Which device memory is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct DLDevice {
    /// 1: the host's memory; 2: a CUDA GPU's.
    pub device_type: i32,
    /// The GPU's ordinal among those visible to the process.
    pub device_id: i32,
}

/// The type of an element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct DLDataType {
    /// 1: unsigned integers; 2: IEEE 754 floats; 4: bfloat16.
    pub code: u8,
    /// How wide it is.
    pub bits: u8,
    /// 1, unless it is a vector.
    pub lanes: u16,
}

/// Elements in memory.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct DLTensor {
    /// The beginning of the memory.
    pub data: *mut c_void,
    /// The device of the memory.
    pub device: DLDevice,
    /// How many dimensions there are.
    pub ndim: i32,
    /// The type of an element.
    pub dtype: DLDataType,
    /// The extent of each dimension.
    pub shape: *mut i64,
    /// Elements from one to the next along each dimension; null if they follow one another, row by row.
    pub strides: *mut i64,
    /// Bytes from the memory's beginning to the first element.
    pub byte_offset: u64,
}

impl fmt::Debug for DLTensor {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let (data, offset) = (self.data, self.byte_offset);
        let (ndim, dtype, device) = (self.ndim, self.dtype, self.device);
        write!(
            f,
            "DLTensor({data:p} + {offset}, ndim {ndim}, {dtype:?}, {device:?})"
        )
    }
}

/// A tensor, and how its memory is given back: version 0 of the ABI, which all libraries read.
#[repr(C)]
pub struct DLManagedTensor {
    /// The tensor.
    pub dl_tensor: DLTensor,
    /// For the library that made the tensor.
    pub manager_ctx: *mut c_void,
    /// The function that gives the memory back. The last holder of the tensor calls it once, on any thread.
    pub deleter: Option<unsafe extern "C" fn(*mut DLManagedTensor)>,
}

impl fmt::Debug for DLManagedTensor {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "DLManagedTensor({:?})", self.dl_tensor)
    }
}

/// A tensor that is given back when this is dropped.
struct Managed(*mut DLManagedTensor);

// SAFETY: DLPack's deleters may be called on any thread.
unsafe impl Send for Managed {}

impl Drop for Managed {
    fn drop(&mut self) {
        // SAFETY: the tensor is alive, because no one else gives it back.
        unsafe {
            if let Some(deleter) = (*self.0).deleter {
                deleter(self.0);
            }
        }
    }
}

impl<B: Backend, T: Value> Matrix<B, T> {
    /// Makes a matrix of a tensor of two dimensions.
    ///
    /// The tensor is given back when the matrix has been dropped and the operations that use it have ended. If the call
    /// returns an error, the tensor is still the caller's.
    ///
    /// # Errors
    /// [`Kind::Unsuitable`] unless the tensor has the group's device, the type `T` and two dimensions, and unless its
    /// rows lie a fixed distance apart with their elements side by side, and on GPUs unless its first
    /// element and each row begin at a multiple of 16 bytes; [`Kind::Limit`] if it has no columns and is not of f32, or if
    /// its rows are too far apart for memory. (The address of a tensor without elements does not matter and may be null.)
    ///
    /// # Safety
    /// - `tensor` points to a tensor whose fields are true and which has not been given back.
    /// - Until the tensor is given back, no one else writes its memory while an operation uses it, and no one else
    ///   reads the memory while an operation writes it.
    /// - On GPUs each row is allocated in whole pieces of 16 bytes. If the matrix is an output, these pieces hold
    ///   nothing else, because an operation may write after a row's last element, up to the next piece.
    #[track_caller]
    pub unsafe fn from_dlpack(
        group: &Group<B>,
        tensor: *mut DLManagedTensor,
    ) -> Result<Matrix<B, T>> {
        // SAFETY: as this function's.
        let adopted = unsafe { Matrix::adopt(group, tensor) };
        adopted.map_err(Error::of(group.rank(), "Matrix::from_dlpack"))
    }

    /// # Safety
    /// As [`Matrix::from_dlpack`].
    unsafe fn adopt(group: &Group<B>, tensor: *mut DLManagedTensor) -> Result<Matrix<B, T>> {
        // SAFETY: as this function's.
        let given = unsafe { (*tensor).dl_tensor };
        let backend = &group.inner().backend;
        let (device_type, device_id) = backend.dlpack_device();
        require(
            "the device",
            device(given.device),
            device(DLDevice {
                device_type,
                device_id,
            }),
        )?;
        require("the dtype", dtype(given.dtype), T::DTYPE.to_string())?;
        require("the number of dimensions", given.ndim, 2)?;
        // SAFETY: as this function's. There are two dimensions, so there are two of each.
        let pair = |of: *const i64| unsafe { [*of, *of.add(1)] };
        let [rows, columns] =
            pair(given.shape).map(|extent| usize::try_from(extent).unwrap_or(usize::MAX));
        bytes_of::<T>(rows, columns)?;
        let width = bytes_of::<T>(1, columns)?;
        let strides = if given.strides.is_null() {
            [columns as i64, 1]
        } else {
            pair(given.strides)
        };
        let pitch = usize::try_from(strides[0]).unwrap_or(0);
        let memory = Memory {
            address: (given.data as u64).wrapping_add(given.byte_offset),
            dtype: T::DTYPE,
            shape: [rows, columns],
            pitch: pitch.saturating_mul(size_of::<T>()),
        };
        let pitch = memory.effective_pitch::<B>();
        require_rows([rows, columns], strides, pitch < width)?;
        memory.check::<B>("the tensor")?;
        let owner = Owner::new(Managed(tensor));
        // SAFETY: as this function's.
        let memory = unsafe { backend.adopt(memory.address, [rows, width], pitch, Some(owner)) };
        Ok(Matrix::new(group.clone(), memory, rows, columns))
    }

    /// Gives the matrix to a different library, which calls the tensor's deleter when it no longer needs the tensor.
    ///
    /// The group lives as long as the tensor. On GPUs, operations on the group's stream may still be writing it.
    ///
    /// Unless somebody calls the deleter, the memory is never freed.
    #[must_use = "the tensor is lost unless somebody calls its deleter"]
    pub fn into_dlpack(self) -> *mut DLManagedTensor {
        let (address, pitch) = B::place(self.memory());
        let memory = Memory {
            address,
            dtype: T::DTYPE,
            shape: self.shape(),
            pitch,
        };
        let (device_type, device_id) = self.group().inner().backend.dlpack_device();
        let device = DLDevice {
            device_type,
            device_id,
        };
        tensors::export(memory, device, Box::new(self))
    }
}

/// The DLPack type of `dtype`.
pub(super) fn data_type(dtype: DType) -> DLDataType {
    const UNSIGNED: u8 = 1;
    const FLOAT: u8 = 2;
    const BFLOAT: u8 = 4;
    const E4M3FN: u8 = 10;
    const E5M2: u8 = 12;
    let code = match dtype {
        DType::Bf16 => BFLOAT,
        DType::F16 | DType::F32 => FLOAT,
        DType::F8E4M3 => E4M3FN,
        DType::F8E5M2 => E5M2,
        DType::U8 | DType::U16 | DType::U32 | DType::U64 => UNSIGNED,
    };
    DLDataType {
        code,
        bits: 8 * dtype.bytes() as u8,
        lanes: 1,
    }
}

/// This library's type for a DLPack type, if there is one.
pub(super) fn dtype_of(of: DLDataType) -> Option<DType> {
    use DType::{Bf16, F8E4M3, F8E5M2, F16, F32, U8, U16, U32, U64};
    let known = [Bf16, F16, F32, F8E4M3, F8E5M2, U8, U16, U32, U64];
    known.into_iter().find(|&dtype| data_type(dtype) == of)
}

/// This library's name of a DLPack type, or a description if it has none.
pub(super) fn dtype(of: DLDataType) -> String {
    match dtype_of(of) {
        Some(dtype) => dtype.to_string(),
        None => unknown(of),
    }
}

/// A DLPack type that this library does not have, in words.
fn unknown(of: DLDataType) -> String {
    let DLDataType { code, bits, lanes } = of;
    match (code, lanes) {
        (0, 1) => format!("i{bits}"),
        (1, 1) => format!("u{bits}"),
        (2, 1) => format!("f{bits}"),
        (5, 1) => format!("complex{bits}"),
        (6, 1) => "bool".into(),
        _ => format!("code {code} of {bits} bits, {lanes} lanes"),
    }
}

/// The device in words.
pub(crate) fn device(of: DLDevice) -> String {
    match of.device_type {
        1 => "the host".into(),
        2 => format!("GPU {}", of.device_id),
        other => format!("DLPack's device type {other}, number {}", of.device_id),
    }
}

/// Fails if the elements of a row are apart, or if rows `overlap`.
fn require_rows(
    [rows, columns]: [usize; 2],
    [next_row, next_column]: [i64; 2],
    overlap: bool,
) -> Result<()> {
    if rows > 0 && columns > 1 {
        require("the distance of a row's elements", next_column, 1)?;
    }
    if overlap {
        let found = format!("{next_row} elements");
        let least = format!("{columns} elements at least");
        require("the distance of rows", found, least)?;
    }
    Ok(())
}

fn require<V: PartialEq + ToString>(what: &str, found: V, expected: V) -> Result<()> {
    if found == expected {
        return Ok(());
    }
    Err(Error::unsuitable(
        format!("{} of {}", what, "a DLPack tensor"),
        expected.to_string(),
        found.to_string(),
    ))
}
