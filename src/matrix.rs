//! Matrices of one rank's own.

use std::fmt;
use std::marker::PhantomData;

use crate::backend::Backend;
use crate::element::Value;
use crate::error::{Error, Result};
use crate::group::Group;
use crate::schedule::layout::{MAX_EXTENT, limit};

/// A row-major [rows, columns] matrix in this rank's own memory: a weight, a bias (one row) or an output.
///
/// It may be dropped at any time, and waits for nothing: operations that use it go on, and the memory is freed after them.
pub struct Matrix<B: Backend, T> {
    // Freed before the group that it belongs to can end.
    memory: B::Buffer,
    group: Group<B>,
    rows: usize,
    /// Rows that there is room for.
    capacity: usize,
    columns: usize,
    element: PhantomData<T>,
}

impl<B: Backend> Group<B> {
    /// Allocates a [rows, columns] matrix of this rank's own, all zero.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`]; [`Error::Limit`] for no columns. (A rank that owns no rows has an output of none.)
    pub fn zeros<T: Value>(&self, rows: usize, columns: usize) -> Result<Matrix<B, T>> {
        let width = bytes_of::<T>(1, columns)?;
        bytes_of::<T>(rows.max(1), columns)?;
        let memory = {
            let inner = self.inner();
            inner.backend.buffer(&inner.members, rows, width)?
        };
        Ok(Matrix::new(self.clone(), memory, rows, columns))
    }

    /// Allocates a [rows, columns] matrix of this rank's own and copies `values`, row by row, into it.
    ///
    /// # Errors
    /// As [`Group::zeros`]; [`Error::Shape`] unless there are rows · columns values.
    pub fn upload<T: Value>(
        &self,
        values: &[T],
        rows: usize,
        columns: usize,
    ) -> Result<Matrix<B, T>> {
        let mut matrix = self.zeros(rows, columns)?;
        matrix.copy_from_host(values)?;
        Ok(matrix)
    }
}

/// The bytes of a [rows, columns] matrix.
pub(crate) fn bytes_of<T: Value>(rows: usize, columns: usize) -> Result<usize> {
    limit("rows", rows, 1, MAX_EXTENT)?;
    limit("columns", columns, 1, MAX_EXTENT)?;
    // Two extents below 2³¹ stay below 2⁶²; what is larger than the memory of any machine is too large for this one.
    Ok((rows * columns).saturating_mul(size_of::<T>()))
}

impl<B: Backend, T: Value> Matrix<B, T> {
    pub(crate) fn new(group: Group<B>, memory: B::Buffer, rows: usize, columns: usize) -> Self {
        Matrix {
            memory,
            group,
            rows,
            capacity: rows,
            columns,
            element: PhantomData,
        }
    }

    /// [rows, columns]
    pub fn shape(&self) -> [usize; 2] {
        [self.rows, self.columns]
    }

    /// Uses the first `rows` of the rows that the matrix was made with in what follows, as [`shape`](Matrix::shape) says then: for an
    /// output whose M changes from step to step. Operations that were begun before keep theirs.
    ///
    /// # Errors
    /// [`Error::Limit`] for more rows than the matrix was made with.
    pub fn set_rows(&mut self, rows: usize) -> Result<()> {
        limit("rows of a matrix", rows, 0, self.capacity)?;
        self.rows = rows;
        Ok(())
    }

    /// Overwrites the matrix with `values`, row by row, once the operations before are complete.
    ///
    /// # Errors
    /// [`Error::Shape`] unless there are rows · columns values; the group's failure.
    pub fn copy_from_host(&mut self, values: &[T]) -> Result<()> {
        self.check_length(values.len())?;
        self.group.synchronize()?;
        let bytes = bytemuck::cast_slice(values);
        self.group.inner().backend.write(&mut self.memory, bytes)
    }

    /// Copies the matrix to `values`, row by row, once the operations before are complete.
    ///
    /// # Errors
    /// [`Error::Shape`] unless there are rows · columns values; the group's failure.
    pub fn copy_to_host(&self, values: &mut [T]) -> Result<()> {
        self.check_length(values.len())?;
        self.group.synchronize()?;
        let bytes = bytemuck::cast_slice_mut(values);
        self.group.inner().backend.read(&self.memory, bytes)
    }

    /// A copy of the matrix, row by row, once the operations before are complete.
    ///
    /// # Errors
    /// The group's failure.
    pub fn to_vec(&self) -> Result<Vec<T>> {
        let mut values = vec![T::zeroed(); self.rows * self.columns];
        self.copy_to_host(&mut values)?;
        Ok(values)
    }

    fn check_length(&self, length: usize) -> Result<()> {
        if length == self.rows * self.columns {
            return Ok(());
        }
        Err(Error::Shape {
            rank: self.group.rank(),
            argument: format!(
                "the host copy of a [{}, {}] matrix",
                self.rows, self.columns
            ),
            expected: vec![self.rows * self.columns],
            found: vec![length],
        })
    }

    pub(crate) fn group(&self) -> &Group<B> {
        &self.group
    }

    pub(crate) fn memory(&self) -> &B::Buffer {
        &self.memory
    }

    pub(crate) fn memory_mut(&mut self) -> &mut B::Buffer {
        &mut self.memory
    }
}

impl<B: Backend, T: Value> fmt::Debug for Matrix<B, T> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "Matrix<{}, {}>{:?}", B::NAME, T::DTYPE, self.shape())
    }
}
