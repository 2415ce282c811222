//! Matrices whose rows are spread over the ranks.

use std::ops::Range;
use std::sync::{Arc, RwLock, RwLockReadGuard, TryLockError};

use gemmesh::error::called_at;
use gemmesh::raw::{AnyGroup, AnyShards, Memory};
use pyo3::prelude::*;

use crate::callbacks::Keeper;
use crate::errors::{exception, misuse, refused};
use crate::matrix::{Freed, Kept, Matrix, copy, rows_of};
use crate::names::{Count, counts};

/// A row-major matrix [M, K] of which each rank owns some rows, in memory that all ranks map.
///
/// `Group.sharded` makes one. A rank writes its own rows (`shard`, `copy_from`). An operation that gathers fills the
/// other rows, which stay there afterwards (`whole`).
#[pyclass(frozen, module = "gemmesh")]
pub struct Sharded {
    shards: Freed<Arc<RwLock<AnyShards>>>,
    group: Freed<Arc<dyn AnyGroup>>,
}

impl Sharded {
    pub fn new(shards: AnyShards, group: Arc<dyn AnyGroup>) -> Sharded {
        Sharded {
            shards: Freed::new(Arc::new(RwLock::new(shards))),
            group: Freed::new(group),
        }
    }

    /// The matrix, for a call that reads its layout.
    pub fn read(&self, py: Python<'_>) -> PyResult<RwLockReadGuard<'_, AnyShards>> {
        self.shards.try_read().map_err(|_| in_use(py))
    }

    /// Changes how many rows each rank owns.
    fn split(&self, py: Python<'_>, rows: &[usize]) -> PyResult<()> {
        let mut shards = match self.shards.try_write() {
            Ok(shards) => shards,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return Err(in_use(py)),
        };
        let set = called_at(None, || shards.set_rows(rows));
        set.map_err(|error| exception(py, &error, Some(self.group.rank())))
    }

    /// Makes each rank own so many rows.
    pub fn split_evenly(&self, py: Python<'_>, rows: usize) -> PyResult<()> {
        let world = self.group.world_size();
        let [m, _] = self.read(py)?.shape();
        if m == rows * world {
            Ok(())
        } else {
            self.split(py, &vec![rows; world])
        }
    }

    /// This rank's own rows, if they lie in one place and no one changes them.
    pub fn own_memory(&self, py: Python<'_>) -> Option<Memory> {
        self.read(py).ok()?.own_rows().ok()
    }

    /// What keeps the memory.
    pub fn keeper(&self) -> Keeper {
        Arc::clone(&self.shards) as Keeper
    }

    /// Memory of the matrix as a matrix of this rank's own.
    fn part(&self, memory: Memory) -> Kept {
        Kept::new(memory, Arc::clone(&self.group), self.keeper())
    }

    /// Makes the exception of what is wrong with an argument of `call`.
    fn refuse<'a>(&'a self, py: Python<'a>, call: &'a str) -> impl Fn(String) -> PyErr + 'a {
        move |what| refused(py, &**self.group, call, &what)
    }

    fn own_rows(&self, py: Python<'_>) -> PyResult<Kept> {
        let shards = self.read(py)?;
        let own = called_at(None, || shards.own_rows());
        drop(shards);
        let memory = own.map_err(|error| exception(py, &error, Some(self.group.rank())))?;
        Ok(self.part(memory))
    }
}

fn range<'py>(py: Python<'py>, rows: Range<usize>) -> PyResult<Bound<'py, PyAny>> {
    let range = py.import("builtins")?.getattr("range")?;
    range.call1((rows.start, rows.end))
}

fn in_use(py: Python<'_>) -> PyErr {
    misuse(
        py,
        "another thread is in a call with this sharded matrix, or changes its rows; make one call after the other",
    )
}

#[pymethods]
impl Sharded {
    /// [M, K]
    #[getter]
    fn shape(&self, py: Python<'_>) -> PyResult<(usize, usize)> {
        let [m, k] = self.read(py)?.shape();
        Ok((m, k))
    }

    /// The name of the type of its elements, such as "bf16".
    #[getter]
    fn dtype(&self, py: Python<'_>) -> PyResult<String> {
        Ok(self.read(py)?.dtype().to_string())
    }

    /// How many rows fit.
    #[getter]
    fn capacity(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.read(py)?.capacity())
    }

    /// The rows that this rank owns, as a range.
    #[getter]
    fn rows<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        range(py, self.read(py)?.rows_of(self.group.rank()))
    }

    /// The rows that `rank` owns, as a range; empty if the group has no such rank.
    fn rows_of<'py>(&self, py: Python<'py>, rank: Count) -> PyResult<Bound<'py, PyAny>> {
        let rank = rank
            .of("rank")
            .map_err(self.refuse(py, "Sharded.rows_of"))?;
        range(py, self.read(py)?.rows_of(rank))
    }

    /// Changes how many rows each rank owns: `rows[r]` for rank r. All ranks must give the same. The contents are lost.
    fn set_rows(&self, py: Python<'_>, rows: Vec<Count>) -> PyResult<()> {
        let rows = counts("rows", Some(rows)).map_err(self.refuse(py, "Sharded.set_rows"))?;
        self.split(py, &rows.unwrap_or_default())
    }

    /// This rank's own rows, as a matrix that may be written. If the matrix has stages, they lie in several places;
    /// then use copy_from.
    #[getter]
    fn shard(&self, py: Python<'_>) -> PyResult<Matrix> {
        Ok(Matrix(self.own_rows(py)?))
    }

    /// This rank's copy of the whole matrix. Rows of other ranks are there after a gather.
    #[getter]
    fn whole(&self, py: Python<'_>) -> PyResult<Matrix> {
        let memory = self.read(py)?.whole();
        Ok(Matrix(self.part(memory)))
    }

    /// Overwrites this rank's own rows with the values of `source`, a matrix or a tensor [rows, K] of the same type.
    /// The copy runs after this rank's earlier operations and before its later ones. If the matrix has stages, the rows
    /// of the first stage come first.
    fn copy_from(&self, py: Python<'_>, source: &Bound<'_, PyAny>) -> PyResult<()> {
        let (whole, blocks) = {
            let shards = self.read(py)?;
            (shards.whole(), shards.blocks_of(self.group.rank()))
        };
        let blocks: Vec<_> = blocks
            .into_iter()
            .map(|block| rows_of(whole, block))
            .collect();
        copy(py, source, &self.part(whole), &blocks)
    }

    /// Refuses to be an array of NumPy, which would be one of an object.
    #[pyo3(signature = (dtype=None, copy=None))]
    fn __array__(
        &self,
        py: Python<'_>,
        dtype: Option<Py<PyAny>>,
        copy: Option<bool>,
    ) -> PyResult<()> {
        let _ = (dtype, copy);
        let what =
            "a Sharded is no array; take its shard, which is this rank's own rows, or its whole";
        Err(self.refuse(py, "Sharded.__array__")(what.into()))
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let shards = self.read(py)?;
        let ([m, k], dtype) = (shards.shape(), shards.dtype());
        let rows = shards.rows_of(self.group.rank());
        Ok(format!("Sharded([{m}, {k}], {dtype}, rows {rows:?})"))
    }
}
