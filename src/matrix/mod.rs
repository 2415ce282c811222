//! Matrices of one rank, views of them, and matrices whose rows are sharded over the ranks.

mod host;
mod memory;
mod place;
mod sharded;
mod view;

pub use memory::Memory;
pub(crate) use place::Place;
pub use sharded::{ShardMut, ShardedMatrix};
pub(crate) use view::ViewMemory;
pub use view::{MatrixView, MatrixViewMut};

use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;

use rustix::io::Errno;

use crate::backend::Backend;
use crate::element::{DType, Value};
#[cfg(doc)]
use crate::error::Kind;
use crate::error::{Error, Result, require_elements};
use crate::group::Group;
use crate::resources::require_available;
use crate::schedule::layout::MAX_EXTENT;
use crate::schedule::limits::limit;

/// A row-major [rows, columns] matrix in this rank's own memory: a weight, a bias (one row) or an output.
///
/// [`Group::upload`] and [`Group::zeros`] make one.
///
/// ```
/// use gemmesh::{Error, Group, Host};
///
/// Group::<Host>::threads(1, |group| {
///     let mut matrix = group.zeros::<f32>(2, 3)?;
///     matrix.copy_from_host(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0])?;
///     assert_eq!(matrix.shape(), [2, 3]);
///     assert_eq!(matrix.to_vec()?[3], 4.0);
///     assert_eq!(matrix.rows(1..2)?.shape(), [1, 3]); // a view of the second row
///     Ok::<_, Error>(())
/// })?;
/// # Ok::<_, Error>(())
/// ```
///
/// A matrix may be dropped at any time, and dropping it waits for nothing. Operations that use it go on, and its memory
/// is freed after them.
pub struct Matrix<B: Backend, T> {
    // Freed before the group that it belongs to can end.
    memory: B::Buffer,
    group: Group<B>,
    rows: usize,
    /// How many rows fit.
    capacity: usize,
    columns: usize,
    element: PhantomData<T>,
}

/// Matrices of this rank.
impl<B: Backend> Group<B> {
    /// Allocates a [rows, columns] matrix of this rank, filled with zeros.
    ///
    /// There may be no rows. Operations then have nothing to do.
    ///
    /// # Errors
    /// [`Kind::OutOfMemory`]; [`Kind::Limit`] if there are no columns, unless the type is f32: the scales of no rows
    /// are [1, 0].
    #[track_caller]
    pub fn zeros<T: Value>(&self, rows: usize, columns: usize) -> Result<Matrix<B, T>> {
        self.zeros_for("Group::zeros", rows, columns)
    }

    #[track_caller]
    fn zeros_for<T: Value>(&self, call: &str, rows: usize, columns: usize) -> Result<Matrix<B, T>> {
        let memory = || -> Result<B::Buffer> {
            bytes_of::<T>(rows, columns)?;
            let width = bytes_of::<T>(1, columns)?;
            let inner = self.inner();
            inner.members.refuse_fork()?;
            inner.backend.buffer(&inner.members, rows, width)
        };
        let memory = self.judged(call, memory())?;
        Ok(Matrix::new(self.clone(), memory, rows, columns))
    }

    /// Allocates a [rows, columns] matrix of this rank, and copies `values` into it, row by row.
    ///
    /// # Errors
    /// As [`Group::zeros`]; [`Kind::Unsuitable`] unless there are rows · columns values.
    #[track_caller]
    pub fn upload<T: Value>(
        &self,
        values: &[T],
        rows: usize,
        columns: usize,
    ) -> Result<Matrix<B, T>> {
        const CALL: &str = "Group::upload";
        let mut matrix = self.zeros_for(CALL, rows, columns)?;
        matrix.require_length(CALL, values.len())?;
        matrix.write(values)?;
        Ok(matrix)
    }

    /// A vector of zeros on the host, which the caller writes at once. `vec!` would end the process if the memory
    /// cannot be allocated, or is promised and then missing when it is written.
    ///
    /// # Errors
    /// [`Kind::OutOfMemory`].
    pub(crate) fn zeros_of_host<T: Value>(&self, elements: usize) -> Result<Vec<T>> {
        let bytes = elements.saturating_mul(size_of::<T>());
        let values = require_available(bytes).and_then(|()| {
            let values = bytemuck::allocation::try_zeroed_vec(elements);
            values.map_err(|()| Errno::NOMEM.into())
        });
        self.noted(values.map_err(Error::out_of_memory(self.rank(), bytes)))
    }
}

/// The bytes of a [rows, columns] matrix.
pub(crate) fn bytes_of<T: Value>(rows: usize, columns: usize) -> Result<usize> {
    bytes_of_dtype(T::DTYPE, rows, columns)
}

/// As [`bytes_of`], of a type that is known at run time.
pub(crate) fn bytes_of_dtype(dtype: DType, rows: usize, columns: usize) -> Result<usize> {
    limit("the number of rows", rows, 0, MAX_EXTENT)?;
    // The scales of no rows are [1, 0].
    let least = usize::from(dtype != DType::F32);
    limit("the number of columns", columns, least, MAX_EXTENT)?;
    // Two extents below 2³¹ have a product below 2⁶². A saturated size is more than the memory of any machine.
    Ok((rows * columns).saturating_mul(dtype.bytes()))
}

/// Checks that a slice of `length` values has one for each element.
#[track_caller]
fn require_length<B: Backend>(
    group: &Group<B>,
    call: &str,
    shape: [usize; 2],
    length: usize,
) -> Result<()> {
    group.judged(call, require_elements(shape, "the slice", length))
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

    /// The shape [rows, columns].
    pub fn shape(&self) -> [usize; 2] {
        [self.rows, self.columns]
    }

    /// Makes later calls use only the first `rows` rows, for an output whose M changes from step to step.
    ///
    /// [`Matrix::shape`] then says so. Operations that have begun keep the rows that they began with.
    ///
    /// # Errors
    /// [`Kind::Limit`] if the matrix was made with fewer rows.
    #[track_caller]
    pub fn set_rows(&mut self, rows: usize) -> Result<()> {
        let fits = limit("the number of rows", rows, 0, self.capacity);
        self.group.judged("Matrix::set_rows", fits)?;
        self.rows = rows;
        Ok(())
    }

    /// Overwrites the matrix with `values`, row by row, when the operations before are complete, and on GPUs all other
    /// work on the group's stream, however long it takes.
    ///
    /// # Errors
    /// [`Kind::Unsuitable`] unless there are rows · columns values; as [`Group::synchronize`].
    #[track_caller]
    pub fn copy_from_host(&mut self, values: &[T]) -> Result<()> {
        self.require_length("Matrix::copy_from_host", values.len())?;
        self.write(values)
    }

    /// Overwrites the matrix with as many values.
    fn write(&mut self, values: &[T]) -> Result<()> {
        self.group.settle()?;
        let bytes = bytemuck::cast_slice(values);
        let written = self.group.inner().backend.write(&mut self.memory, bytes);
        self.group.noted(written)
    }

    /// Copies the matrix to `values`, row by row. It waits as [`Matrix::copy_from_host`].
    ///
    /// # Errors
    /// [`Kind::Unsuitable`] unless there are rows · columns values; as [`Group::synchronize`].
    #[track_caller]
    pub fn copy_to_host(&self, values: &mut [T]) -> Result<()> {
        self.view().read("Matrix::copy_to_host", values)
    }

    /// Copies the matrix to a new vector, row by row. It waits as [`Matrix::copy_from_host`].
    ///
    /// # Errors
    /// [`Kind::OutOfMemory`]; as [`Group::synchronize`].
    pub fn to_vec(&self) -> Result<Vec<T>> {
        let mut values = self.group.zeros_of_host(self.rows * self.columns)?;
        self.copy_to_host(&mut values)?;
        Ok(values)
    }

    #[track_caller]
    fn require_length(&self, call: &str, length: usize) -> Result<()> {
        require_length(&self.group, call, self.shape(), length)
    }

    pub(crate) fn group(&self) -> &Group<B> {
        &self.group
    }

    pub(crate) fn memory(&self) -> &B::Buffer {
        &self.memory
    }

    /// A view of the whole matrix.
    pub fn view(&self) -> MatrixView<'_, B, T> {
        MatrixView {
            memory: ViewMemory::Buffer(&self.memory),
            group: &self.group,
            offset: 0,
            shape: self.shape(),
            element: PhantomData,
        }
    }

    /// A view of the whole matrix, to be written.
    pub fn view_mut(&mut self) -> MatrixViewMut<'_, B, T> {
        MatrixViewMut {
            view: self.view(),
            exclusive: PhantomData,
        }
    }

    /// A view of some rows: [`MatrixView::rows`].
    ///
    /// # Errors
    /// As [`MatrixView::rows`].
    #[track_caller]
    pub fn rows(&self, rows: Range<usize>) -> Result<MatrixView<'_, B, T>> {
        self.view().rows_for("Matrix::rows", rows)
    }

    /// A view of some columns: [`MatrixView::columns`].
    ///
    /// # Errors
    /// As [`MatrixView::columns`].
    #[track_caller]
    pub fn columns(&self, columns: Range<usize>) -> Result<MatrixView<'_, B, T>> {
        self.view().columns_for("Matrix::columns", columns)
    }
}

impl<B: Backend, T: Value> fmt::Debug for Matrix<B, T> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "Matrix<{}, {}>{:?}", B::NAME, T::DTYPE, self.shape())
    }
}

impl<'a, B: Backend, T: Value> From<&'a Matrix<B, T>> for MatrixView<'a, B, T> {
    fn from(matrix: &'a Matrix<B, T>) -> Self {
        matrix.view()
    }
}

impl<'a, B: Backend, T: Value> From<&'a mut Matrix<B, T>> for MatrixViewMut<'a, B, T> {
    fn from(matrix: &'a mut Matrix<B, T>) -> Self {
        matrix.view_mut()
    }
}
