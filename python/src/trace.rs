//! Traces of calls.

use gemmesh::trace;
use pyo3::prelude::*;

/// What one rank did when in a traced call.
#[pyclass(frozen, module = "gemmesh")]
pub struct Trace(pub trace::Trace);

#[pymethods]
impl Trace {
    fn __repr__(&self) -> String {
        format!("{:?}", self.0)
    }
}
