//! DLPack's tensors, of versions 0 and 1, as [`Memory`] and from it.
#![allow(unsafe_code)]

use std::any::Any;
use std::ffi::c_void;

use super::dlpack::{self, DLDevice, DLManagedTensor, DLTensor};
use crate::error::{Error, Result};
use crate::matrix::Memory;

/// The version of DLPack's ABI that [`VersionedTensor`] is of. Numbers of fp8 types came with 1.1.
const VERSION: [u32; 2] = [1, 1];
/// The bit of [`VersionedTensor::flags`] that forbids to write the tensor.
const READ_ONLY: u64 = 1;

/// A tensor, and how its memory is given back: version 1 of the ABI, `DLManagedTensorVersioned`.
#[repr(C)]
pub struct VersionedTensor {
    /// Major and minor. If the major version is unknown, nothing after `deleter` may be read.
    pub version: [u32; 2],
    /// For the library that made the tensor.
    pub manager_ctx: *mut c_void,
    /// The function that gives the memory back.
    pub deleter: Option<unsafe extern "C" fn(*mut VersionedTensor)>,
    /// Bit 0: the tensor must not be written.
    pub flags: u64,
    /// The tensor.
    pub dl_tensor: DLTensor,
}

/// A tensor of another library, which is given back when this is dropped.
pub enum Tensor {
    /// Of version 0.
    Legacy(*mut DLManagedTensor),
    /// Of version 1.
    Versioned(*mut VersionedTensor),
}

// SAFETY: DLPack's deleters may be called on any thread.
unsafe impl Send for Tensor {}
// SAFETY: it is only read, and dropped once.
unsafe impl Sync for Tensor {}

impl Drop for Tensor {
    fn drop(&mut self) {
        // SAFETY: the tensor is alive, because no one else gives it back.
        unsafe {
            match *self {
                Tensor::Legacy(tensor) => {
                    if let Some(deleter) = (*tensor).deleter {
                        deleter(tensor);
                    }
                }
                Tensor::Versioned(tensor) => {
                    if let Some(deleter) = (*tensor).deleter {
                        deleter(tensor);
                    }
                }
            }
        }
    }
}

impl Tensor {
    /// The tensor's description, unless its version is unknown.
    pub fn described(&self) -> Option<DLTensor> {
        // SAFETY: the tensor is alive.
        unsafe {
            match *self {
                Tensor::Legacy(tensor) => Some((*tensor).dl_tensor),
                Tensor::Versioned(tensor) if (*tensor).version[0] == VERSION[0] => {
                    Some((*tensor).dl_tensor)
                }
                Tensor::Versioned(_) => None,
            }
        }
    }

    /// True if the tensor must not be written.
    pub fn is_read_only(&self) -> bool {
        match *self {
            Tensor::Legacy(_) => false,
            // SAFETY: the tensor is alive.
            Tensor::Versioned(tensor) => unsafe { (*tensor).flags & READ_ONLY != 0 },
        }
    }
}

/// The memory of a tensor of one dimension or more. All but the last dimension are rows, which lie a fixed distance
/// apart. A tensor of one dimension is one row.
///
/// # Safety
/// The tensor's fields are true.
pub unsafe fn memory_of(tensor: &DLTensor, device: DLDevice, argument: &str) -> Result<Memory> {
    let unsuitable = |what: &str, expected: String, found: String| {
        Error::unsuitable(format!("{what} of {argument}"), expected, found)
    };
    let [expected, found] = [device, tensor.device].map(dlpack::device);
    if expected != found {
        return Err(unsuitable("the device", expected, found));
    }
    let Some(dtype) = dlpack::dtype_of(tensor.dtype) else {
        let known = "bf16, f16, f32, f8e4m3, f8e5m2, u8, u16, u32 or u64".into();
        return Err(unsuitable("the dtype", known, dlpack::dtype(tensor.dtype)));
    };
    let dimensions = usize::try_from(tensor.ndim).unwrap_or(0);
    if dimensions == 0 {
        let found = tensor.ndim.to_string();
        return Err(unsuitable(
            "the number of dimensions",
            "1 or more".into(),
            found,
        ));
    }
    // SAFETY: as this function's.
    let list = |of: *const i64| unsafe { std::slice::from_raw_parts(of, dimensions) };
    let extents = list(tensor.shape);
    let (&columns, leading) = extents.split_last().unwrap_or((&0, &[]));
    let extent = |extent: i64| usize::try_from(extent).unwrap_or(usize::MAX);
    let rows = leading.iter().map(|&rows| extent(rows));
    let memory = Memory {
        address: (tensor.data as u64).wrapping_add(tensor.byte_offset),
        dtype,
        shape: [rows.fold(1, usize::saturating_mul), extent(columns)],
        pitch: extent(columns).saturating_mul(dtype.bytes()),
    };
    if extents.contains(&0) {
        // Of a tensor without elements, libraries say any strides.
        return Ok(memory);
    }
    let dense = row_major(extents);
    let strides = if tensor.strides.is_null() {
        &dense[..]
    } else {
        list(tensor.strides)
    };
    let pitch = pitch_of(leading, &strides[..leading.len()], columns);
    let Some(pitch) = pitch.filter(|pitch| *pitch >= 0) else {
        let expected =
            "rows a fixed distance apart, one behind the other; give a contiguous copy".into();
        return Err(unsuitable("the layout", expected, format!("{strides:?}")));
    };
    if columns > 1 && strides[leading.len()] != 1 {
        let found = strides[leading.len()].to_string();
        let what = "the stride of the last dimension";
        let expected = "1; give a contiguous copy, or the matrix of which it is the transpose";
        return Err(unsuitable(what, expected.into(), found));
    }
    Ok(Memory {
        pitch: extent(pitch).saturating_mul(dtype.bytes()),
        ..memory
    })
}

/// The strides of a tensor without gaps.
fn row_major(extents: &[i64]) -> Vec<i64> {
    let mut strides = vec![1i64; extents.len()];
    for index in (1..extents.len()).rev() {
        strides[index - 1] = strides[index].saturating_mul(extents[index]);
    }
    strides
}

/// The elements from row to row if all leading dimensions together are rows a fixed distance apart.
fn pitch_of(extents: &[i64], strides: &[i64], columns: i64) -> Option<i64> {
    // Dimensions of one row have no stride.
    let mut steps = extents
        .iter()
        .zip(strides)
        .rev()
        .filter(|&(&extent, _)| extent != 1);
    let Some((&rows, &pitch)) = steps.next() else {
        return Some(columns);
    };
    let mut next = pitch.checked_mul(rows)?;
    for (&extent, &stride) in steps {
        if stride != next {
            return None;
        }
        next = stride.checked_mul(extent)?;
    }
    Some(pitch)
}

/// Memory that has been given to another library: the tensor, its extents, and what keeps the memory.
#[repr(C)]
struct Exported<H> {
    // First, so that a pointer to it also points to this struct.
    tensor: H,
    extents: [i64; 2],
    strides: [i64; 2],
    _owner: Box<dyn Any + Send>,
}

/// Gives memory to another library as a tensor of version 0. `owner` is dropped when that library gives it back.
pub fn export(
    memory: Memory,
    device: DLDevice,
    owner: Box<dyn Any + Send>,
) -> *mut DLManagedTensor {
    unsafe extern "C" fn give_back(tensor: *mut DLManagedTensor) {
        // SAFETY: the tensor is the first field of such a box. It is given back once.
        drop(unsafe { Box::from_raw(tensor.cast::<Exported<DLManagedTensor>>()) });
    }
    let tensor = DLManagedTensor {
        dl_tensor: unplaced(memory, device),
        manager_ctx: std::ptr::null_mut(),
        deleter: Some(give_back),
    };
    place(tensor, memory, owner, |tensor| &mut tensor.dl_tensor)
}

/// As [`export`], as a tensor of version 1. `read_only`: the other library must not write it.
pub fn export_versioned(
    memory: Memory,
    device: DLDevice,
    read_only: bool,
    owner: Box<dyn Any + Send>,
) -> *mut VersionedTensor {
    unsafe extern "C" fn give_back(tensor: *mut VersionedTensor) {
        // SAFETY: the tensor is the first field of such a box. It is given back once.
        drop(unsafe { Box::from_raw(tensor.cast::<Exported<VersionedTensor>>()) });
    }
    let tensor = VersionedTensor {
        version: VERSION,
        manager_ctx: std::ptr::null_mut(),
        deleter: Some(give_back),
        flags: if read_only { READ_ONLY } else { 0 },
        dl_tensor: unplaced(memory, device),
    };
    place(tensor, memory, owner, |tensor| &mut tensor.dl_tensor)
}

/// A tensor whose extents have no place yet.
fn unplaced(memory: Memory, device: DLDevice) -> DLTensor {
    DLTensor {
        data: memory.address as *mut c_void,
        device,
        ndim: 2,
        dtype: dlpack::data_type(memory.dtype),
        shape: std::ptr::null_mut(),
        strides: std::ptr::null_mut(),
        byte_offset: 0,
    }
}

/// Puts a tensor where it stays, with its extents.
fn place<H>(
    tensor: H,
    memory: Memory,
    owner: Box<dyn Any + Send>,
    described: impl FnOnce(&mut H) -> &mut DLTensor,
) -> *mut H {
    let exported = Box::into_raw(Box::new(Exported {
        tensor,
        extents: memory.shape.map(|extent| extent as i64),
        strides: [(memory.pitch / memory.dtype.bytes()) as i64, 1],
        _owner: owner,
    }));
    // A pointer into a box is invalid once the box moves or is borrowed. So the pointers are made from the raw pointer
    // that the box's owner gets, and the box is never borrowed again.
    // SAFETY: the pointer points to a whole value that no one else knows.
    unsafe {
        let tensor = described(&mut (*exported).tensor);
        tensor.shape = (&raw mut (*exported).extents).cast();
        tensor.strides = (&raw mut (*exported).strides).cast();
    }
    exported.cast()
}
