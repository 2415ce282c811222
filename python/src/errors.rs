//! Errors of the library as the exceptions of `gemmesh.errors`.

use gemmesh::Error;
use gemmesh::raw::{Dialect, ErrorKind};
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
    let call = error.call().map(|call| Dialect::Python.of(call.name()));
    // Errors name ranks by their numbers in the job.
    let kind = rank.map_or(error.kind(), |rank| error.kind_on(rank));
    let rank = rank.map(|rank| error.job_rank(rank));
    let class = class_of(kind);
    let sentence = Dialect::Python.of(&error.to_string());
    made(
        py,
        class,
        &sentence,
        rank,
        &error.at_fault(),
        call.as_deref(),
    )
}

/// A `MisuseError` of the package's own.
pub fn misuse(py: Python<'_>, sentence: &str) -> PyErr {
    made(py, "MisuseError", sentence, None, &[], None)
}

/// The `ArgumentError` of a `call` of the package's own. `what` is wrong. Without a rank, this process has none yet.
pub fn argument(py: Python<'_>, rank: Option<usize>, call: &str, what: &str) -> PyErr {
    let sentence = match rank {
        Some(rank) => format!("rank {rank}: {call}: {what}"),
        None => format!("{call}: {what}"),
    };
    made(
        py,
        "ArgumentError",
        &sentence,
        rank,
        rank.as_slice(),
        Some(call),
    )
}

/// The `ArgumentError` of a call that would write what is read-only.
pub fn read_only(py: Python<'_>, rank: usize, call: &str, name: &str) -> PyErr {
    let what = format!("{name} is read-only, and the call writes it");
    argument(py, Some(rank), call, &what)
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
