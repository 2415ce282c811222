//! Errors of the library as the exceptions of `gemmesh.errors`.

use gemmesh::Error;
use gemmesh::raw::ErrorKind;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

/// The class of `gemmesh.errors` for a kind.
fn class_of(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::Argument => "ArgumentError",
        ErrorKind::Misuse => "MisuseError",
        ErrorKind::Environment => "LaunchError",
        ErrorKind::Rendezvous => "RendezvousError",
        ErrorKind::CallMismatch => "CallMismatchError",
        ErrorKind::OutOfMemory => "OutOfMemoryError",
        ErrorKind::Rank => "RankError",
        ErrorKind::Timeout => "DeadlineError",
        ErrorKind::Device => "DeviceError",
        ErrorKind::System => "HostError",
        ErrorKind::Internal => "InternalError",
    }
}

/// The exception for `error`, which `rank` has got.
pub fn exception(py: Python<'_>, error: &Error, rank: Option<usize>) -> PyErr {
    let call = error.call().map(|call| call.name());
    let class = class_of(error.kind());
    made(py, class, &error.to_string(), rank, &error.at_fault(), call)
}

/// A `MisuseError` of the package's own.
pub fn misuse(py: Python<'_>, sentence: &str) -> PyErr {
    made(py, "MisuseError", sentence, None, &[], None)
}

/// An `ArgumentError` of the package's own.
pub fn argument(py: Python<'_>, sentence: &str, rank: usize, call: &str) -> PyErr {
    made(
        py,
        "ArgumentError",
        sentence,
        Some(rank),
        &[rank],
        Some(call),
    )
}

fn made(
    py: Python<'_>,
    class: &str,
    sentence: &str,
    rank: Option<usize>,
    at_fault: &[usize],
    call: Option<&str>,
) -> PyErr {
    let make = || -> PyResult<Bound<'_, PyAny>> {
        let class = py.import("gemmesh.errors")?.getattr(class)?;
        class.call1((sentence, rank, PyTuple::new(py, at_fault)?, call))
    };
    match make() {
        Ok(exception) => PyErr::from_value(exception),
        // At the end of the interpreter there may be no modules.
        Err(_) => PyRuntimeError::new_err(sentence.to_owned()),
    }
}
