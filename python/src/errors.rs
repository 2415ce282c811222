//! Errors of the library as the exceptions of `gemmesh.errors`.

use gemmesh::Error;
use gemmesh::error::{Class, Dialect};
use gemmesh::raw::{self, AnyGroup};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

/// The class of `gemmesh.errors`.
fn name_of(class: Class) -> &'static str {
    match class {
        Class::Argument => "ArgumentError",
        Class::Misuse => "MisuseError",
        Class::Environment => "LaunchError",
        Class::Rendezvous => "RendezvousError",
        Class::CallMismatch => "CallMismatchError",
        Class::OutOfMemory => "OutOfMemoryError",
        Class::Rank => "RankError",
        Class::Timeout => "DeadlineError",
        Class::Device => "DeviceError",
        Class::System => "HostError",
        // What is new says what it is.
        _ => "InternalError",
    }
}

/// The exception for `error`, which `rank` has got.
pub fn exception(py: Python<'_>, error: &Error, rank: Option<usize>) -> PyErr {
    let call = error.call().map(|call| Dialect::Python.of(call.name()));
    // Errors name ranks by their numbers in the job.
    let class = rank.map_or(error.kind().class(), |rank| error.class_on(rank));
    let rank = rank.map(|rank| error.job_rank(rank));
    let sentence = Dialect::Python.sentence(error);
    made(
        py,
        name_of(class),
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

/// The `ArgumentError` of a `call` of a group. `what` is wrong with an argument that only this package sees.
pub fn refused(py: Python<'_>, group: &dyn AnyGroup, call: &str, what: &str) -> PyErr {
    exception(py, &raw::refused(group, call, what), Some(group.rank()))
}

/// The `ArgumentError` of a `call` without a group. `what` is wrong. Without a rank, this process has none yet.
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
pub fn read_only(py: Python<'_>, group: &dyn AnyGroup, call: &str, name: &str) -> PyErr {
    let what = format!("{name} is read-only, and the call writes it");
    refused(py, group, call, &what)
}

/// The same error, of a call that has called `inner`.
pub fn of_outer(py: Python<'_>, error: PyErr, inner: &str, outer: &str) -> PyErr {
    let value = error.value(py);
    let renamed = || -> PyResult<PyErr> {
        let call: Option<String> = value.getattr("call")?.extract()?;
        let sentence = value.str()?.to_string().replace(inner, outer);
        let call = call.map(|call| call.replace(inner, outer));
        let (rank, at_fault) = (value.getattr("rank")?, value.getattr("at_fault")?);
        let made = value.get_type().call1((sentence, rank, at_fault, call))?;
        Ok(PyErr::from_value(made))
    };
    // An exception that is not gemmesh's has no call.
    renamed().unwrap_or(error)
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
