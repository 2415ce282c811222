//! Tensors of other libraries, by DLPack.

use std::ffi::{CStr, c_int, c_void};
use std::sync::Mutex;

use gemmesh::error::called_at;
use gemmesh::interop::dlpack::{DLDevice, DLManagedTensor, DLTensor};
use gemmesh::raw::{AnyGroup, BackendKind, Memory, Tensor, VersionedTensor, wrong_device};
use pyo3::exceptions::{PyBufferError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyCapsuleMethods, PyDict, PyType};
use pyo3::{IntoPyObjectExt, ffi, intern};

use crate::ending::Lent;
use crate::errors::{exception, refused};

const LEGACY: &CStr = c"dltensor";
const USED_LEGACY: &CStr = c"used_dltensor";
const VERSIONED: &CStr = c"dltensor_versioned";
const USED_VERSIONED: &CStr = c"used_dltensor_versioned";

/// The number by which DLPack says CUDA's legacy default stream.
const LEGACY_DEFAULT_STREAM: usize = 1;

/// The table of functions of a library that gives tensors without calls of Python: `DLPackExchangeAPI`.
#[repr(C)]
pub struct Exchange {
    version: [u32; 2],
    previous: *mut Exchange,
    allocate: *const c_void,
    managed_of: *const c_void,
    object_of: *const c_void,
    tensor_of: Option<unsafe extern "C" fn(*mut ffi::PyObject, *mut DLTensor) -> c_int>,
    current_stream: Option<unsafe extern "C" fn(i32, i32, *mut *mut c_void) -> c_int>,
}

/// The tables of the types that have been seen, by the type's address; none is null.
static EXCHANGES: Mutex<Vec<(usize, usize)>> = Mutex::new(Vec::new());

/// The table of an object's type, if it has one.
pub fn exchange_of(object: &Bound<'_, PyAny>) -> Option<&'static Exchange> {
    let class = object.get_type();
    let key = class.as_ptr() as usize;
    let known = {
        let all = EXCHANGES.lock().ok()?;
        all.iter().find(|entry| entry.0 == key).copied()
    };
    let address = match known {
        Some((_, address)) => address,
        None => {
            // Not under the lock: a type's attributes may run Python, and other threads with it.
            let address = find_exchange(&class);
            if address != 0 {
                // The table belongs to the type, which lives as long as the entry.
                std::mem::forget(class.clone());
            }
            EXCHANGES.lock().ok()?.push((key, address));
            address
        }
    };
    // SAFETY: it is null or the address of a table, which its library keeps for ever.
    unsafe { (address as *const Exchange).as_ref() }
}

/// The address of a type's table, or 0.
fn find_exchange(class: &Bound<'_, PyType>) -> usize {
    const NAME: &CStr = c"dlpack_exchange_api";
    let capsule = class.getattr("__dlpack_c_exchange_api__").ok();
    let capsule = capsule.and_then(|capsule| capsule.cast_into::<PyCapsule>().ok());
    let pointer = capsule.and_then(|capsule| capsule.pointer_checked(Some(NAME)).ok());
    let Some(pointer) = pointer else { return 0 };
    let mut table = pointer.as_ptr().cast::<Exchange>();
    // SAFETY: the capsule's name says what it points to. Tables of other versions are chained.
    unsafe {
        while !table.is_null() && (*table).version[0] != 1 {
            table = (*table).previous;
        }
    }
    table as usize
}

/// The memory of a tensor of a library, whose object lives. `call` and `name` say whose argument it is.
pub fn memory_of(
    py: Python<'_>,
    tensor: &DLTensor,
    group: &dyn AnyGroup,
    call: &str,
    name: &str,
) -> PyResult<Memory> {
    // SAFETY: the tensor's library says what is true.
    let memory = called_at(None, || unsafe { group.memory_of(call, name, tensor) });
    memory.map_err(|error| exception(py, &error, Some(group.rank())))
}

/// The memory of a tensor that has been taken, as [`memory_of`].
pub fn memory_of_managed(
    py: Python<'_>,
    tensor: &Lent,
    group: &dyn AnyGroup,
    call: &str,
    name: &str,
) -> PyResult<Memory> {
    match tensor.tensor().and_then(Tensor::described) {
        Some(described) => memory_of(py, &described, group, call, name),
        None => Err(PyBufferError::new_err(format!(
            "{name} is a tensor of a version of DLPack that is not known; version 1 is"
        ))),
    }
}

impl Exchange {
    /// The tensor of an object whose type has the table. The description is valid until the object changes. None if the
    /// table cannot say it.
    pub fn tensor(&self, object: &Bound<'_, PyAny>) -> PyResult<Option<DLTensor>> {
        let Some(tensor_of) = self.tensor_of else {
            return Ok(None);
        };
        let mut tensor = std::mem::MaybeUninit::<DLTensor>::zeroed();
        // SAFETY: the object is of the table's type, and the GIL is held.
        if unsafe { tensor_of(object.as_ptr(), tensor.as_mut_ptr()) } != 0 {
            return Err(PyErr::fetch(object.py()));
        }
        // SAFETY: the function has succeeded, so it has written the tensor.
        Ok(Some(unsafe { tensor.assume_init() }))
    }

    /// The library's current stream of a group's GPU, a CUstream. None on the host, or if the table does not say it.
    pub fn stream_for(&self, py: Python<'_>, group: &dyn AnyGroup) -> PyResult<Option<usize>> {
        let Some(current_stream) = self.current_stream else {
            return Ok(None);
        };
        if group.backend() == BackendKind::Host {
            return Ok(None);
        }
        let DLDevice {
            device_type,
            device_id,
        } = group.device();
        let mut stream = std::ptr::null_mut();
        // SAFETY: the device is that of tensors of the library.
        match unsafe { current_stream(device_type, device_id, &mut stream) } {
            0 => Ok(Some(stream as usize)),
            _ => Err(PyErr::fetch(py)),
        }
    }
}

/// The tensor of an object, by `__dlpack__`, for use on `stream`, a CUstream. `call` and `name` say whose argument it is.
pub fn managed(
    object: &Bound<'_, PyAny>,
    group: &dyn AnyGroup,
    (call, name): (&str, &str),
    stream: usize,
) -> PyResult<Lent> {
    let py = object.py();
    let dlpack = match object.getattr(intern!(py, "__dlpack__")) {
        Ok(dlpack) => dlpack,
        Err(_) => {
            let class = object.get_type().qualname()?;
            let what = format!(
                "{name} is a {class} and must be a gemmesh.Matrix or have __dlpack__, as tensors of PyTorch, JAX, CuPy \
                 and NumPy do"
            );
            return Err(refused(py, group, call, &what));
        }
    };
    // First, because a library refuses the streams of other devices in words of its own.
    if let Ok(device) = object.call_method0(intern!(py, "__dlpack_device__")) {
        let (device_type, device_id): (i32, i32) = device.extract()?;
        let found = DLDevice {
            device_type,
            device_id,
        };
        if found != group.device() {
            let error = wrong_device(group, call, name, found);
            return Err(exception(py, &error, Some(group.rank())));
        }
    }
    let stream = match group.backend() {
        BackendKind::Host => py.None(),
        BackendKind::Cuda => stream.max(LEGACY_DEFAULT_STREAM).into_py_any(py)?,
    };
    let options = PyDict::new(py);
    options.set_item(intern!(py, "stream"), &stream)?;
    options.set_item(intern!(py, "max_version"), (1, 1))?;
    let capsule = match dlpack.call((), Some(&options)) {
        Ok(capsule) => capsule,
        // A library of before version 1.
        Err(error) if error.is_instance_of::<PyTypeError>(py) => {
            options.del_item(intern!(py, "max_version"))?;
            dlpack.call((), Some(&options))?
        }
        Err(error) => return Err(error),
    };
    taken(&capsule.cast_into::<PyCapsule>()?).map(Lent::new)
}

/// Takes the tensor out of a capsule, once.
fn taken(capsule: &Bound<'_, PyCapsule>) -> PyResult<Tensor> {
    let py = capsule.py();
    let take = |name: &CStr, used: &'static CStr| -> PyResult<Option<*mut c_void>> {
        // SAFETY: the capsule lives.
        if unsafe { ffi::PyCapsule_IsValid(capsule.as_ptr(), name.as_ptr()) } == 0 {
            return Ok(None);
        }
        let pointer = capsule.pointer_checked(Some(name))?;
        // SAFETY: the capsule lives, and the name for ever.
        match unsafe { ffi::PyCapsule_SetName(capsule.as_ptr(), used.as_ptr()) } {
            0 => Ok(Some(pointer.as_ptr())),
            _ => Err(PyErr::fetch(py)),
        }
    };
    if let Some(tensor) = take(VERSIONED, USED_VERSIONED)? {
        return Ok(Tensor::Versioned(tensor.cast()));
    }
    if let Some(tensor) = take(LEGACY, USED_LEGACY)? {
        return Ok(Tensor::Legacy(tensor.cast()));
    }
    Err(PyBufferError::new_err(
        "the capsule holds no DLPack tensor, or its tensor has been taken before",
    ))
}

/// A capsule with a tensor of version 0.
pub fn legacy_capsule(py: Python<'_>, tensor: *mut DLManagedTensor) -> PyResult<Py<PyAny>> {
    unsafe extern "C" fn destroy(capsule: *mut ffi::PyObject) {
        // SAFETY: Python gives a capsule that it destroys. If no one has taken the tensor, it is alive.
        unsafe {
            if ffi::PyCapsule_IsValid(capsule, LEGACY.as_ptr()) != 0 {
                let tensor = ffi::PyCapsule_GetPointer(capsule, LEGACY.as_ptr());
                drop(Tensor::Legacy(tensor.cast()));
            }
        }
    }
    new_capsule(py, tensor.cast(), LEGACY, destroy)
}

/// A capsule with a tensor of version 1.
pub fn versioned_capsule(py: Python<'_>, tensor: *mut VersionedTensor) -> PyResult<Py<PyAny>> {
    unsafe extern "C" fn destroy(capsule: *mut ffi::PyObject) {
        // SAFETY: Python gives a capsule that it destroys. If no one has taken the tensor, it is alive.
        unsafe {
            if ffi::PyCapsule_IsValid(capsule, VERSIONED.as_ptr()) != 0 {
                let tensor = ffi::PyCapsule_GetPointer(capsule, VERSIONED.as_ptr());
                drop(Tensor::Versioned(tensor.cast()));
            }
        }
    }
    new_capsule(py, tensor.cast(), VERSIONED, destroy)
}

fn new_capsule(
    py: Python<'_>,
    tensor: *mut c_void,
    name: &'static CStr,
    destroy: unsafe extern "C" fn(*mut ffi::PyObject),
) -> PyResult<Py<PyAny>> {
    // SAFETY: the pointer is not null, the name lives for ever, and the GIL is held.
    unsafe {
        let capsule = ffi::PyCapsule_New(tensor, name.as_ptr(), Some(destroy));
        Bound::from_owned_ptr_or_err(py, capsule).map(Bound::unbind)
    }
}
