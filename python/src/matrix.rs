//! Matrices of a rank's own.

use std::any::Any;
use std::mem::ManuallyDrop;
use std::ops::{Deref, Range};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use gemmesh::DType;
use gemmesh::error::called_at;
use gemmesh::interop::dlpack::DLDevice;
use gemmesh::raw::{AnyGroup, BackendKind, Memory, Tensor, export, export_versioned};
use pyo3::exceptions::{PyBufferError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::ending::{Lent, through_the_gate};
use crate::errors::{exception, read_only, refused};
use crate::operands::Reader;
use crate::streams;
use crate::tensors::{legacy_capsule, managed, memory_of_managed, versioned_capsule};
use crate::waiting::{enqueued_on, is_main_thread, waited, waited_behind, waited_in_function};

/// Something that is dropped without the GIL. The last part of a group waits for the other ranks, which may be threads
/// of this process. Once the interpreter ends, it is left to the process's end.
pub struct Freed<T: Send>(ManuallyDrop<T>);

impl<T: Send> Freed<T> {
    pub fn new(value: T) -> Freed<T> {
        Freed(ManuallyDrop::new(value))
    }
}

impl<T: Send> Deref for Freed<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T: Send + Clone> Clone for Freed<T> {
    fn clone(&self) -> Self {
        Freed(self.0.clone())
    }
}

impl<T: Send> Drop for Freed<T> {
    fn drop(&mut self) {
        // SAFETY: it is taken once, because no one uses this afterwards.
        let value = unsafe { ManuallyDrop::take(&mut self.0) };
        // The main thread ends the interpreter, and may take the GIL to the last.
        if is_main_thread() {
            return drop_without_gil(value);
        }
        let mut value = Some(value);
        through_the_gate(|| value.take().map(drop_without_gil));
        // The gate is closed. This thread may hold the GIL, which it could not take back, and the value's end may wait.
        std::mem::forget(value);
    }
}

/// Drops a value without the GIL, whether this thread holds it or not.
fn drop_without_gil<T: Send>(value: T) {
    // SAFETY: the functions of Python's interface are called in their order, and the value holds no Python object.
    // A library that gives a tensor back may have released the GIL without PyO3's knowledge, so PyO3 is not asked.
    unsafe {
        if ffi::Py_IsInitialized() == 0 {
            return drop(value);
        }
        let held = ffi::PyGILState_Ensure();
        let thread = ffi::PyEval_SaveThread();
        drop(value);
        ffi::PyEval_RestoreThread(thread);
        ffi::PyGILState_Release(held);
    }
}

/// How an operation's function uses rows that it has got.
#[derive(Clone)]
pub struct InFunction {
    /// The stream on which it finds them.
    pub stream: usize,
    /// False when it has returned.
    pub runs: Arc<AtomicBool>,
}

/// Memory, and what keeps it. Its group lives as long.
#[derive(Clone)]
pub struct Kept {
    pub memory: Memory,
    /// True if the memory must not be written: it is a tensor's that is read-only.
    pub read_only: bool,
    pub group: Freed<Arc<dyn AnyGroup>>,
    /// If the memory is rows that an operation's function has got, how the function uses them.
    chunk: Option<InFunction>,
    _owner: Freed<Arc<dyn Any + Send + Sync>>,
}

impl Kept {
    pub fn new(
        memory: Memory,
        group: Arc<dyn AnyGroup>,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Kept {
        Kept {
            memory,
            read_only: false,
            group: Freed::new(group),
            chunk: None,
            _owner: Freed::new(owner),
        }
    }

    /// Rows for a function that an operation calls.
    pub fn of_chunk(
        memory: Memory,
        group: Arc<dyn AnyGroup>,
        keeper: Arc<dyn Any + Send + Sync>,
        chunk: InFunction,
    ) -> Kept {
        Kept {
            chunk: Some(chunk),
            ..Kept::new(memory, group, keeper)
        }
    }

    /// True for rows that an operation's function has got, while the function runs.
    fn is_in_function(&self) -> bool {
        let chunk = self.chunk.as_ref();
        chunk.is_some_and(|chunk| chunk.runs.load(Ordering::Relaxed))
    }

    /// Makes a call `name` that copies to or from the host. It is told whether an operation's function makes it with
    /// rows that it has got, which have a stream of their own.
    fn on_host<R: Send>(
        &self,
        py: Python<'_>,
        name: &'static str,
        call: impl FnOnce(bool) -> gemmesh::Result<R> + Send,
    ) -> PyResult<R> {
        let group = &**self.group;
        if self.is_in_function() {
            return waited_in_function(py, group, || call(true));
        }
        // In a function of an operation the group refuses the call, whatever its stream would be.
        let stream = if group.is_in_function() {
            None
        } else {
            Reader::alone(group, name).stream(py)?
        };
        waited_behind(py, group, stream, || call(false))
    }

    /// A matrix of zeros.
    pub fn zeros(
        py: Python<'_>,
        group: &Arc<dyn AnyGroup>,
        dtype: DType,
        shape: [usize; 2],
    ) -> PyResult<Kept> {
        let (memory, owner) = waited(py, &**group, || group.zeros(dtype, shape))?;
        Ok(Kept::new(memory, group.clone(), Arc::from(owner)))
    }

    /// A tensor of another library, without a copy. The library has it ready for the stream that the group is then on,
    /// so calls on other streams come after that too.
    pub fn adopted(object: &Bound<'_, PyAny>, group: &Arc<dyn AnyGroup>) -> PyResult<Kept> {
        let (py, call, name) = (object.py(), "Group.matrix", "the tensor");
        let stream = match group.is_in_function() {
            // The group stays on the operation's stream.
            true => None,
            false => streams::of_own(py, &**group)?,
        };
        if let Some(stream) = &stream {
            stream.require_one(py, &**group, call)?;
        }
        let told = stream.as_ref().map(|stream| stream.raw);
        let told = told.unwrap_or_else(|| group.stream());
        let tensor = managed(object, &**group, (call, name), told)?;
        if stream.is_some() {
            enqueued_on(py, &**group, stream, None, || Ok(()))?;
        }
        let memory = memory_of_managed(py, &tensor, &**group, call, name)?;
        let read_only = tensor.tensor().is_some_and(Tensor::is_read_only);
        let adopted = Adopted {
            tensor: Some(tensor),
            group: group.clone(),
        };
        let kept = Kept::new(memory, group.clone(), Arc::new(adopted));
        Ok(Kept { read_only, ..kept })
    }

    /// The memory, for a call that writes it.
    pub fn written(&self, py: Python<'_>, call: &str, name: &str) -> PyResult<Memory> {
        if self.read_only {
            Err(read_only(py, &**self.group, call, name))
        } else {
            Ok(self.memory)
        }
    }
}

/// A tensor of another library that a matrix keeps. Operations may still use it when the matrix is gone.
struct Adopted {
    tensor: Option<Lent>,
    group: Arc<dyn AnyGroup>,
}

impl Drop for Adopted {
    fn drop(&mut self) {
        if let Some(tensor) = self.tensor.take() {
            tensor.keep(&*self.group);
        }
    }
}

/// A row-major matrix [rows, columns] in this rank's memory: on the host, or on its GPU.
///
/// `Group.zeros` makes one, `Group.matrix` makes one of another library's tensor without a copy, and operations return
/// them. Other libraries read it by DLPack: `numpy.from_dlpack(matrix)`, `torch.from_dlpack(matrix)`.
#[pyclass(frozen, module = "gemmesh")]
pub struct Matrix(pub Kept);

#[pymethods]
impl Matrix {
    /// [rows, columns]
    #[getter]
    fn shape(&self) -> (usize, usize) {
        let [rows, columns] = self.0.memory.shape;
        (rows, columns)
    }

    /// The name of the type of its elements, such as "bf16".
    #[getter]
    fn dtype(&self) -> String {
        self.0.memory.dtype.to_string()
    }

    /// The address of the first element.
    #[getter]
    fn address(&self) -> u64 {
        self.0.memory.address
    }

    /// Bytes from row to row.
    #[getter]
    fn pitch(&self) -> usize {
        self.0.memory.pitch
    }

    /// Overwrites the matrix with the values of `source`, a matrix or a tensor of the same shape and type. The copy
    /// runs after this rank's earlier operations and before its later ones; or, on the host, in the function that has got
    /// the matrix as a chunk. On GPUs such a function copies on the chunk's stream by other libraries.
    fn copy_from(&self, py: Python<'_>, source: &Bound<'_, PyAny>) -> PyResult<()> {
        copy(py, source, &self.0, &[self.0.memory])
    }

    /// The values as bytes, row by row, when the operations before are complete. Those of a chunk are there in the
    /// operation's function; on GPUs it waits for the chunk's stream.
    fn tobytes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, pyo3::types::PyBytes>> {
        let Kept { memory, group, .. } = &self.0;
        let mut bytes = vec![0; memory.shape[0] * memory.width()];
        let target = &mut bytes;
        // SAFETY: the owner keeps the memory.
        self.0.on_host(py, "tobytes", |in_function| unsafe {
            group.read(*memory, target, in_function)
        })?;
        Ok(pyo3::types::PyBytes::new(py, &bytes))
    }

    /// Overwrites the values with as many bytes, row by row, when the operations before are complete. Those of a chunk may
    /// be overwritten in the operation's function, as `tobytes` reads them.
    fn frombytes(&self, py: Python<'_>, bytes: &[u8]) -> PyResult<()> {
        let memory = self.0.written(py, "frombytes", "the matrix")?;
        let group = &self.0.group;
        // SAFETY: the owner keeps the memory.
        self.0.on_host(py, "frombytes", |in_function| unsafe {
            group.write(memory, bytes, in_function)
        })
    }

    /// The matrix as a DLPack tensor, without a copy. It keeps the memory. If the matrix is made of a read-only tensor,
    /// it is read-only too, which only versions from 1 on can say.
    ///
    /// On GPUs `stream` waits for the operations so far: a CUstream as a number, 1 for the legacy default stream, 2 for
    /// the thread's, -1 for none. Without a stream, the legacy default stream waits.
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__(
        &self,
        py: Python<'_>,
        stream: Option<i64>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Py<PyAny>> {
        let Kept { memory, group, .. } = &self.0;
        let device = group.device();
        if dl_device.is_some_and(|asked| asked != (device.device_type, device.device_id)) {
            return Err(PyBufferError::new_err(
                "a matrix is exported on its own device only; see __dlpack_device__",
            ));
        }
        if copy == Some(true) {
            return Err(PyBufferError::new_err(
                "a matrix is exported without a copy; copy the tensor that you get",
            ));
        }
        let is_versioned = matches!(max_version, Some((1.., _)));
        if self.0.read_only && !is_versioned {
            return Err(PyBufferError::new_err(
                "the matrix is read-only, which DLPack says from version 1 on; ask for max_version=(1, 0)",
            ));
        }
        match &self.0.chunk {
            Some(chunk) => require_stream(&***group, chunk.stream, stream)?,
            None => order(py, &***group, stream)?,
        }
        let owner: Box<dyn Any + Send> = Box::new(self.0.clone());
        if is_versioned {
            let tensor = export_versioned(*memory, device, self.0.read_only, owner);
            versioned_capsule(py, tensor)
        } else {
            legacy_capsule(py, export(*memory, device, owner))
        }
    }

    /// DLPack's type and number of the device.
    fn __dlpack_device__(&self) -> (i32, i32) {
        let DLDevice {
            device_type,
            device_id,
        } = self.0.group.device();
        (device_type, device_id)
    }

    /// The matrix as an array of NumPy, without a copy if none is asked for.
    #[pyo3(signature = (dtype=None, copy=None))]
    fn __array__<'py>(
        slf: &Bound<'py, Self>,
        dtype: Option<&Bound<'py, PyAny>>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (py, Kept { memory, group, .. }) = (slf.py(), &slf.get().0);
        let lacks = match (group.backend(), memory.dtype) {
            (BackendKind::Cuda, _) => Some("arrays on GPUs".into()),
            (_, own @ (DType::Bf16 | DType::F8E4M3 | DType::F8E5M2)) => Some(format!("type {own}")),
            _ => None,
        };
        if let Some(lacks) = lacks {
            let what =
                format!("NumPy has no {lacks}; use torch.from_dlpack(matrix) or matrix.tobytes()");
            return Err(refused(py, &***group, "Matrix.__array__", &what));
        }
        let numpy = py.import("numpy")?;
        let array = numpy.call_method1("from_dlpack", (slf,))?;
        let options = PyDict::new(py);
        options.set_item("dtype", dtype)?;
        options.set_item("copy", copy)?;
        numpy.call_method("array", (array,), Some(&options))
    }

    fn __repr__(&self) -> String {
        let Memory { dtype, shape, .. } = self.0.memory;
        let DLDevice { device_id, .. } = self.0.group.device();
        let place = match self.0.group.backend() {
            BackendKind::Host => "host".into(),
            BackendKind::Cuda => format!("cuda:{device_id}"),
        };
        format!("Matrix({shape:?}, {dtype}, {place})")
    }
}

/// Checks that rows for an operation's function are used on their own stream. The function makes no calls of the group,
/// so it cannot order others.
fn require_stream(group: &dyn AnyGroup, own: usize, stream: Option<i64>) -> PyResult<()> {
    let is_own = match stream {
        Some(-1) => true,
        _ if group.backend() == BackendKind::Host => stream.is_none(),
        Some(1) => own <= 1,
        Some(stream) => stream as usize == own,
        None => false,
    };
    if is_own {
        Ok(())
    } else {
        Err(PyBufferError::new_err(
            "the rows of a chunk are used on chunk.stream; make it the current stream first, such as by \
             torch.cuda.ExternalStream",
        ))
    }
}

/// Makes a stream of another library wait for the group's operations so far, as DLPack numbers streams.
fn order(py: Python<'_>, group: &dyn AnyGroup, stream: Option<i64>) -> PyResult<()> {
    if group.backend() == BackendKind::Host {
        return match stream {
            None | Some(-1) => Ok(()),
            Some(_) => Err(PyValueError::new_err("a matrix on the host has no stream")),
        };
    }
    let stream = match stream {
        None | Some(1) => 1,
        Some(-1) => return Ok(()),
        Some(stream @ 2..) => stream as usize,
        Some(other) => {
            return Err(PyValueError::new_err(format!(
                "stream {other} is ambiguous; give 1 for the legacy default stream, 2 for the thread's, or a CUstream"
            )));
        }
    };
    // SAFETY: DLPack's consumers name a stream that lives.
    let ordered = py.detach(|| called_at(None, || unsafe { group.order_stream(stream) }));
    ordered.map_err(|error| exception(py, &error, Some(group.rank())))
}

/// Copies a matrix or a tensor to memory that `target` keeps: row after row to the blocks, which are parts of it.
pub fn copy(
    py: Python<'_>,
    source: &Bound<'_, PyAny>,
    target: &Kept,
    blocks: &[Memory],
) -> PyResult<()> {
    const CALL: &str = "copy_from";
    let group = &target.group;
    let memory = target.written(py, CALL, "the target")?;
    let mut reader = Reader::alone(&***group, CALL);
    let from = reader.memory(source, "the source")?;
    let rows = blocks.iter().map(|block| block.shape[0]).sum();
    let expected = [rows, memory.shape[1]];
    if (from.dtype, from.shape) != (memory.dtype, expected) {
        let what = format!(
            "the source is {:?} of {} and must be {expected:?} of {}",
            from.shape, from.dtype, memory.dtype
        );
        return Err(refused(py, &***group, CALL, &what));
    }
    if target.is_in_function() && group.backend() == BackendKind::Host {
        let mut bytes = vec![0; from.shape[0] * from.width()];
        // SAFETY: owners keep both memories. Between them the bytes lie elsewhere, so the two may overlap.
        return waited_in_function(py, &***group, || unsafe {
            group.read(from, &mut bytes, true)?;
            group.write(memory, &bytes, true)
        });
    }
    reader.enqueued(py, || {
        let mut first = 0;
        blocks.iter().try_for_each(|block| {
            let part = rows_of(from, first..first + block.shape[0]);
            first += block.shape[0];
            // SAFETY: owners keep both memories until the copy is complete.
            unsafe { group.copy(part, *block) }
        })
    })?;
    reader.keep();
    Ok(())
}

/// Rows of a matrix.
pub fn rows_of(memory: Memory, rows: Range<usize>) -> Memory {
    Memory {
        address: memory.address + (rows.start * memory.pitch) as u64,
        shape: [rows.len(), memory.shape[1]],
        ..memory
    }
}
