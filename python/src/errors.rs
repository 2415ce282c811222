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
    let call = error.call().map(|call| in_python(call.name().into()));
    let class = class_of(error.kind());
    let sentence = in_python(error.to_string());
    made(
        py,
        class,
        &sentence,
        rank,
        &error.at_fault(),
        call.as_deref(),
    )
}

/// A sentence with the names that calls and options have in Python.
fn in_python(sentence: String) -> String {
    const NAMES: [(&str, &str); 12] = [
        (
            ".weight_layout(WeightLayout::Kn)",
            "it with weight_layout=\"kn\"",
        ),
        (
            ".weight_layout(WeightLayout::Nk)",
            "it with weight_layout=\"nk\"",
        ),
        ("output_dtype(DType::F32)", "dtype=\"f32\""),
        ("output_dtype(DType::Bf16)", "dtype=\"bf16\""),
        ("output_dtype(DType::F16)", "dtype=\"f16\""),
        ("Builder::", "the option "),
        ("gemmesh::launch::", "gemmesh."),
        ("gemmesh::launch", "gemmesh.launch"),
        ("Group::", "Group."),
        ("ShardedMatrix::", "Sharded."),
        ("Matrix::copy_from_host", "Matrix.frombytes"),
        ("Matrix::copy_to_host", "Matrix.tobytes"),
    ];
    let replace = |words: String, (rust, python): &(&str, &str)| words.replace(rust, python);
    NAMES.iter().fold(sentence, replace)
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

/// The `ArgumentError` of a call that would write what is read-only.
pub fn read_only(py: Python<'_>, rank: usize, call: &str, name: &str) -> PyErr {
    let sentence = format!("rank {rank}: {call}: {name} is read-only, and the call writes it");
    argument(py, &sentence, rank, call)
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
