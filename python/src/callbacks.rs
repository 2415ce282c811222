//! Functions of Python that operations call.

use std::any::Any;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use gemmesh::raw::{AnyGroup, Memory};
use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::ending::{attached, called};
use crate::matrix::{InFunction, Kept, Matrix};
use crate::names::Said;

/// What memory lives as long as.
pub type Keeper = Arc<dyn Any + Send + Sync>;

/// The result of a function that an operation calls.
type Called = Result<(), Box<dyn std::error::Error + Send + Sync>>;

/// A Python function that an operation calls, and the exception that it raised.
pub struct Function {
    function: Py<PyAny>,
    group: Arc<dyn AnyGroup>,
    /// What keeps the memory of chunks, unless a chunk says it.
    keeper: Keeper,
    raised: Mutex<Option<PyErr>>,
}

/// Checks that the argument `name` can be called.
pub fn require_callable(function: &Bound<'_, PyAny>, name: &str) -> Said<()> {
    if function.is_callable() {
        Ok(())
    } else {
        Err(format!("{name} is no function, and must take a Chunk"))
    }
}

impl Function {
    pub fn new(function: &Bound<'_, PyAny>, group: &Arc<dyn AnyGroup>, keeper: Keeper) -> Function {
        Function {
            keeper,
            function: function.clone().unbind(),
            group: group.clone(),
            raised: Mutex::new(None),
        }
    }

    /// Calls it with a chunk of rows. A function that keeps the matrix finds other values in it later, but the memory
    /// lives as long.
    pub fn call(
        &self,
        rows: std::ops::Range<usize>,
        rank: usize,
        (memory, keeper): (Memory, Option<Keeper>),
        stream: usize,
    ) -> Called {
        let runs = Arc::new(AtomicBool::new(true));
        let ends = runs.clone();
        let called = attached(|py| {
            let call = || -> PyResult<()> {
                let keeper = keeper.unwrap_or_else(|| self.keeper.clone());
                let chunk = InFunction { stream, runs };
                let kept = Kept::of_chunk(memory, self.group.clone(), keeper, chunk);
                let matrix = Matrix(kept);
                let range = py.import("builtins")?.getattr("range")?;
                let rows = range.call1((rows.start, rows.end))?;
                let chunk = py.import("gemmesh")?.getattr("Chunk")?;
                let chunk = chunk.call1((matrix, rows, rank, stream))?;
                let arguments = PyTuple::new(py, [chunk])?;
                called(self.function.bind(py), &arguments).map(drop)
            };
            call().map_err(|error| {
                let words = error.to_string();
                let mut raised = self.raised.lock().unwrap_or_else(PoisonError::into_inner);
                *raised = Some(error);
                words.into()
            })
        });
        ends.store(false, Ordering::Relaxed);
        called.unwrap_or_else(|| Err("the interpreter ends".into()))
    }

    /// The result of the operation. If the function has raised an exception, it is the cause of the operation's.
    pub fn finish(self, py: Python<'_>, result: PyResult<()>) -> PyResult<()> {
        let raised = self
            .raised
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner);
        match raised {
            // Such as that of sys.exit, which programs don't catch with the others.
            Some(raised) if !raised.is_instance_of::<PyException>(py) => Err(raised),
            raised => result.inspect_err(|error| {
                if raised.is_some() {
                    error.set_cause(py, raised);
                }
            }),
        }
    }
}
