//! The stream that a call is put on. Here it is decided, for all calls.
//!
//! A **current stream** is the one that a library puts this thread's work on. PyTorch and CuPy have one. A call is put on
//! 1. the current stream of the library whose tensors it gets, else
//! 2. the stream that `Group.set_stream` has given, else
//! 3. PyTorch's current stream, if PyTorch is loaded and has initialised CUDA, else
//! 4. CuPy's, if CuPy is loaded, else
//! 5. the stream that the group is on.
//!
//! So work that was put on the current stream before a call comes before it on the GPU, and later work comes after it.

use std::any::Any;
use std::sync::Arc;

use gemmesh::error::Kind;
use gemmesh::error::called_at;
use gemmesh::raw::{AnyGroup, BackendKind};
use gemmesh::{Error, Result};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyString};
use pyo3::{ffi, intern};

use crate::errors::{exception, misuse};

/// The CUstream that is a different one on each thread.
const PER_THREAD: usize = 2;

/// A stream of the caller's.
#[derive(Clone)]
pub struct CallStream {
    /// A CUstream.
    pub raw: usize,
    /// What the stream lives as long as, if its library destroys it.
    owner: Option<Arc<Py<PyAny>>>,
}

impl CallStream {
    /// A stream that its library keeps.
    pub fn lasting(raw: usize) -> CallStream {
        CallStream { raw, owner: None }
    }

    /// True if the two are one stream. The legacy default stream has two handles.
    pub fn is(&self, other: &CallStream) -> bool {
        self.raw.max(1) == other.raw.max(1)
    }

    /// Fails if it is a different stream on each thread. Then no other thread's work is ordered with the call's.
    pub fn require_one(&self, py: Python<'_>, group: &dyn AnyGroup, call: &str) -> PyResult<()> {
        if self.raw != PER_THREAD {
            return Ok(());
        }
        let rank = group.rank();
        Err(misuse(
            py,
            &format!(
                "rank {rank}: {call}: the current stream is the default stream of each thread, which is a different one \
                 for the library's threads; make another stream current"
            ),
        ))
    }

    /// Makes a call with the group on this stream. `awaited`: its name, if other ranks wait for this one in it.
    pub fn run<R>(
        self,
        group: &dyn AnyGroup,
        awaited: Option<&str>,
        call: impl FnOnce() -> Result<R>,
    ) -> Result<R> {
        let owner = self.owner.map(|owner| owner as Arc<dyn Any + Send + Sync>);
        let (mut call, mut result) = (Some(call), None);
        let mut make = || {
            if let Some(call) = call.take() {
                result = Some(call()?);
            }
            Ok(())
        };
        // SAFETY: streams of libraries live as long as they are current, or as their owner.
        unsafe { group.on_stream(self.raw, owner, awaited, &mut make)? };
        result.ok_or_else(|| {
            Kind::Internal {
                what: "a call was not made on its stream".into(),
            }
            .on(group.rank())
        })
    }
}

/// The stream of a call that gets no tensors of a library with a current stream. None if the group stays where it is.
pub fn of_own(py: Python<'_>, group: &dyn AnyGroup) -> PyResult<Option<CallStream>> {
    let streams = all(py, group)?;
    Ok(streams.into_iter().find_map(|(_, stream)| stream))
}

/// As [`of_own`]. Fails if a library captures a graph on its current stream, of which the call would be no part.
pub fn of_call(py: Python<'_>, group: &dyn AnyGroup, call: &str) -> PyResult<Option<CallStream>> {
    let mut streams = all(py, group)?.into_iter();
    let Some(stream) = streams.find_map(|(_, stream)| stream) else {
        return Ok(None);
    };
    stream.require_one(py, group, call)?;
    for (library, current) in streams {
        let Some(current) = current.filter(|current| !current.is(&stream)) else {
            continue;
        };
        // SAFETY: both live, as in `CallStream::run`.
        let captured = |stream: &CallStream| unsafe { group.is_captured(stream.raw) };
        let is_left_out = called_at(None, || Ok(captured(&current)? && !captured(&stream)?));
        if is_left_out.map_err(|error: Error| exception(py, &error, Some(group.rank())))? {
            let (rank, raw) = (group.rank(), stream.raw);
            return Err(misuse(
                py,
                &format!(
                    "rank {rank}: {call}: {library} captures a CUDA graph on its current stream, and the call would be \
                     put on stream {raw:#x}, which is no part of the capture; make the call on the stream that is \
                     captured (Group.set_stream)"
                ),
            ));
        }
    }
    Ok(Some(stream))
}

/// The streams that a call without tensors may be put on, and who says them. The first one counts.
fn all(py: Python<'_>, group: &dyn AnyGroup) -> PyResult<[(&'static str, Option<CallStream>); 3]> {
    const SAY: [&str; 3] = ["set_stream", "PyTorch", "CuPy"];
    if group.backend() == BackendKind::Host {
        return Ok(SAY.map(|library| (library, None)));
    }
    let set = group.stream_that_was_set().map(CallStream::lasting);
    let [by_hand, torch, cupy] = SAY;
    Ok([
        (by_hand, set),
        (torch, of_torch(py, group)?),
        (cupy, of_cupy(py, group)?),
    ])
}

/// PyTorch's current stream of the group's GPU, if PyTorch has initialised CUDA.
fn of_torch(py: Python<'_>, group: &dyn AnyGroup) -> PyResult<Option<CallStream>> {
    static FUNCTION: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let function = match FUNCTION.get(py) {
        Some(function) => function,
        None => {
            let Some(torch) = loaded(intern!(py, "torch")) else {
                return Ok(None);
            };
            // Another thread may import it at this moment. Then it has put nothing on a stream.
            let initialized = || -> PyResult<Option<Bound<'_, PyAny>>> {
                let cuda = torch.getattr(intern!(py, "cuda"))?;
                match cuda
                    .call_method0(intern!(py, "is_initialized"))?
                    .is_truthy()?
                {
                    true => torch
                        .getattr("_C")?
                        .getattr("_cuda_getCurrentRawStream")
                        .map(Some),
                    false => Ok(None),
                }
            };
            let Some(function) = initialized().ok().flatten() else {
                return Ok(None);
            };
            FUNCTION.get_or_init(py, || function.unbind())
        }
    };
    let raw = function
        .call1(py, (group.device().device_id,))?
        .extract(py)?;
    Ok(Some(CallStream::lasting(raw)))
}

/// CuPy's current stream of the group's GPU, if CuPy is loaded.
pub fn of_cupy(py: Python<'_>, group: &dyn AnyGroup) -> PyResult<Option<CallStream>> {
    static FUNCTION: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let function = match FUNCTION.get(py) {
        Some(function) => function,
        None => {
            let cuda = loaded(intern!(py, "cupy")).and_then(|cupy| cupy.getattr("cuda").ok());
            // As with PyTorch.
            let Some(function) = cuda.and_then(|cuda| cuda.getattr("get_current_stream").ok())
            else {
                return Ok(None);
            };
            FUNCTION.get_or_init(py, || function.unbind())
        }
    };
    let stream = function.call1(py, (group.device().device_id,))?;
    let raw = stream.getattr(py, intern!(py, "ptr"))?.extract(py)?;
    Ok(Some(CallStream {
        raw,
        // CuPy destroys a stream with its last object.
        owner: Some(Arc::new(stream)),
    }))
}

/// True for an array of CuPy, also of a class that is derived from its arrays.
pub fn is_of_cupy(object: &Bound<'_, PyAny>) -> bool {
    let py = object.py();
    let class = loaded(intern!(py, "cupy")).and_then(|cupy| cupy.getattr("ndarray").ok());
    class.is_some_and(|class| object.is_instance(&class).unwrap_or(false))
}

/// A module that the program has imported.
fn loaded<'py>(name: &Bound<'py, PyString>) -> Option<Bound<'py, PyAny>> {
    // SAFETY: the GIL is held, and the interpreter keeps the dictionary, which is borrowed.
    let modules =
        unsafe { Bound::from_borrowed_ptr_or_opt(name.py(), ffi::PyImport_GetModuleDict()) };
    let module = modules?.cast_into::<PyDict>().ok()?.get_item(name).ok()??;
    (!module.is_none()).then_some(module)
}
