//! Views: some rows and columns of a matrix or of a sharded matrix.

use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;

use super::require_length;
#[cfg(doc)]
use super::{Matrix, ShardMut, ShardedMatrix};
use crate::backend::Backend;
use crate::backend::sealed::Bound;
use crate::element::Value;
#[cfg(doc)]
use crate::error::Kind;
use crate::error::{Error, Result, require_count, require_shape};
use crate::group::Group;
use crate::ops::overlap::check_copy;
use crate::schedule::MatrixSpec;
use crate::schedule::limits::limit;

/// The memory of a view.
#[derive(Debug)]
pub(crate) enum ViewMemory<'a, B: Backend> {
    /// A matrix of this rank.
    Buffer(&'a B::Buffer),
    /// This rank's part of a sharded matrix, and the bytes from row to row.
    Shared(&'a B::Symmetric, usize),
}

// Derived, they would need a backend that can be copied.
impl<B: Backend> Clone for ViewMemory<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Backend> Copy for ViewMemory<'_, B> {}

impl<'a, B: Backend> ViewMemory<'a, B> {
    /// Bytes from row to row.
    pub(super) fn pitch(self) -> usize {
        match self {
            ViewMemory::Buffer(memory) => B::place(memory).1,
            ViewMemory::Shared(_, pitch) => pitch,
        }
    }

    /// Binds the memory from byte `offset` on as an input.
    pub fn input(self, offset: usize) -> Bound<'a, B> {
        match self {
            ViewMemory::Buffer(memory) => Bound::Input(memory, offset),
            ViewMemory::Shared(memory, pitch) => Bound::Rows(memory, offset, pitch),
        }
    }

    /// Binds the memory from byte `offset` on as an output.
    fn output(self, offset: usize) -> Bound<'a, B> {
        match self {
            ViewMemory::Buffer(memory) => Bound::Output(memory, offset),
            ViewMemory::Shared(memory, pitch) => Bound::Rows(memory, offset, pitch),
        }
    }
}

/// Some rows and columns of a [`Matrix`] or of a [`ShardedMatrix`], as an operand.
///
/// [`Matrix::view`], [`ShardedMatrix::view`] and [`ShardedMatrix::shard`] make one.
#[must_use = "a view does nothing"]
pub struct MatrixView<'a, B: Backend, T> {
    pub(super) memory: ViewMemory<'a, B>,
    pub(super) group: &'a Group<B>,
    /// Bytes from the memory's beginning.
    pub(super) offset: usize,
    pub(super) shape: [usize; 2],
    pub(super) element: PhantomData<T>,
}

// Derived, they would need a backend that can be copied.
impl<B: Backend, T> Clone for MatrixView<'_, B, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Backend, T> Copy for MatrixView<'_, B, T> {}

impl<'a, B: Backend, T: Value> MatrixView<'a, B, T> {
    /// The shape [rows, columns].
    pub fn shape(&self) -> [usize; 2] {
        self.shape
    }

    /// Some of the view's rows, or none.
    ///
    /// # Errors
    /// [`Kind::Limit`] if the view does not have these rows.
    #[track_caller]
    pub fn rows(self, rows: Range<usize>) -> Result<Self> {
        self.rows_for("MatrixView::rows", rows)
    }

    #[track_caller]
    pub(super) fn rows_for(self, call: &str, rows: Range<usize>) -> Result<Self> {
        let [all, columns] = self.shape;
        let fits = require_range("row", &rows, 0, all);
        self.group.judged(call, fits)?;
        // An empty view begins at the start, because there may be no memory after the last row.
        let offset = if rows.is_empty() {
            0
        } else {
            self.offset + rows.start * self.memory.pitch()
        };
        Ok(MatrixView {
            offset,
            shape: [rows.len(), columns],
            ..self
        })
    }

    /// Some of the view's columns.
    ///
    /// # Errors
    /// [`Kind::Limit`] if there are none, or if the view does not have them; on GPUs [`Kind::Unsuitable`] unless the
    /// first column begins at a multiple of 16 bytes.
    #[track_caller]
    pub fn columns(self, columns: Range<usize>) -> Result<Self> {
        self.columns_for("MatrixView::columns", columns)
    }

    #[track_caller]
    pub(super) fn columns_for(self, call: &str, columns: Range<usize>) -> Result<Self> {
        let [rows, all] = self.shape;
        let fits = require_range("column", &columns, 1, all)
            .and_then(|()| require_aligned::<B>("the first column", columns.start, size_of::<T>()));
        self.group.judged(call, fits)?;
        // As in `rows`.
        let before = match rows {
            0 => 0,
            _ => columns.start * size_of::<T>(),
        };
        Ok(MatrixView {
            offset: self.offset + before,
            shape: [rows, columns.len()],
            ..self
        })
    }

    /// Copies the view to `values`, row by row. It waits as [`Matrix::copy_from_host`].
    ///
    /// # Errors
    /// [`Kind::Unsuitable`] unless there are rows · columns values; as [`Group::synchronize`].
    #[track_caller]
    pub fn copy_to_host(&self, values: &mut [T]) -> Result<()> {
        self.read("MatrixView::copy_to_host", values)
    }

    /// Copies the view to a new vector, row by row. It waits as [`Matrix::copy_from_host`].
    ///
    /// ```
    /// use gemmesh::{Error, Group, Host};
    ///
    /// Group::<Host>::threads(1, |group| {
    ///     let matrix = group.upload(&[1.0f32, 2.0, 3.0, 4.0], 2, 2)?;
    ///     assert_eq!(matrix.columns(1..2)?.to_vec()?, [2.0, 4.0]);
    ///     Ok::<_, Error>(())
    /// })?;
    /// # Ok::<_, Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Kind::OutOfMemory`]; as [`Group::synchronize`].
    pub fn to_vec(&self) -> Result<Vec<T>> {
        let [rows, columns] = self.shape;
        let mut values = self.group.zeros_of_host(rows * columns)?;
        self.copy_to_host(&mut values)?;
        Ok(values)
    }

    /// [`MatrixView::copy_to_host`], as the method `call`.
    #[track_caller]
    pub(super) fn read(&self, call: &str, values: &mut [T]) -> Result<()> {
        let (group, [_, columns]) = (self.group, self.shape);
        require_length(group, call, self.shape, values.len())?;
        group.settle()?;
        let inner = group.inner();
        let (from, width) = (self.memory.input(self.offset), columns * size_of::<T>());
        let values = bytemuck::cast_slice_mut(values);
        if let ViewMemory::Buffer(_) = self.memory {
            return group.noted(inner.backend.read(&from, width, values));
        }
        // A different thread may call an operation that gathers rows into this memory through a shared borrow. It
        // waits, and what it has begun since is complete first.
        group.exclusively(|_| {
            inner.backend.synchronize(&inner.members)?;
            inner.backend.read(&from, width, values)
        })?;
        // A peer whose operation has failed meanwhile may have written to other ranks' rows.
        group.check()
    }

    /// Checks that the view can be copied into rows of `shape` of the same group. `argument` is the view, with the names of
    /// its extents.
    #[track_caller]
    pub(super) fn require_copied(
        &self,
        call: &str,
        group: &Group<B>,
        argument: &str,
        shape: [usize; 2],
    ) -> Result<()> {
        let fits = group
            .require_same("the view to copy", self.group)
            .and_then(|()| require_shape(argument, shape, self.shape));
        group.judged(call, fits)
    }

    pub(crate) fn group(&self) -> &'a Group<B> {
        self.group
    }

    /// The memory, and the bytes before the view's first element.
    pub(crate) fn memory(&self) -> (ViewMemory<'a, B>, usize) {
        (self.memory, self.offset)
    }
}

/// Checks that a view, which has `all` rows or columns, has these, and that they are at least `least`. `unit` is the
/// name of one.
fn require_range(
    unit: &str,
    &Range { start, end }: &Range<usize>,
    least: usize,
    all: usize,
) -> Result<()> {
    let last_start = all.saturating_sub(least);
    // The texts are made only for the refusal.
    if start > last_start {
        return limit(&format!("the first {unit}"), start, 0, last_start);
    }
    if (start + least..=all).contains(&end) {
        return Ok(());
    }
    let begin = match start {
        0 => String::new(),
        _ => format!(", which begin at {start},"),
    };
    limit(
        &format!("the end of the {unit}s{begin}"),
        end,
        start + least,
        all,
    )
}

/// Checks that a column begins a piece of `B::ROW_ALIGNMENT` bytes, by which memory is read and written.
fn require_aligned<B: Backend>(what: &str, column: usize, size: usize) -> Result<()> {
    let multiple = (B::ROW_ALIGNMENT / size).max(1);
    if column.is_multiple_of(multiple) {
        return Ok(());
    }
    Err(Error::unaligned(what, column, multiple))
}

impl<B: Backend, T: Value> fmt::Debug for MatrixView<'_, B, T> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "MatrixView<{}, {}>{:?}", B::NAME, T::DTYPE, self.shape)
    }
}

/// Some rows and columns of a [`Matrix`], or own rows of a [`ShardedMatrix`], as an output.
///
/// [`Matrix::view_mut`] and [`ShardMut::view_mut`] make one.
#[must_use = "a view does nothing"]
pub struct MatrixViewMut<'a, B: Backend, T> {
    pub(super) view: MatrixView<'a, B, T>,
    pub(super) exclusive: PhantomData<&'a mut T>,
}

impl<'a, B: Backend, T: Value> MatrixViewMut<'a, B, T> {
    /// The shape [rows, columns].
    pub fn shape(&self) -> [usize; 2] {
        self.view.shape
    }

    /// Some of the view's rows.
    ///
    /// # Errors
    /// As [`MatrixView::rows`].
    #[track_caller]
    pub fn rows(self, rows: Range<usize>) -> Result<Self> {
        let view = self.view.rows_for("MatrixViewMut::rows", rows)?;
        Ok(MatrixViewMut { view, ..self })
    }

    /// Some of the view's columns.
    ///
    /// # Errors
    /// As [`MatrixView::columns`]; on GPUs also [`Kind::Unsuitable`] unless the columns end at a multiple of 16 bytes
    /// or at the end of the view.
    #[track_caller]
    pub fn columns(self, columns: Range<usize>) -> Result<Self> {
        self.columns_for("MatrixViewMut::columns", columns)
    }

    #[track_caller]
    fn columns_for(self, call: &str, columns: Range<usize>) -> Result<Self> {
        let [_, all] = self.shape();
        let end = columns.end;
        let view = self.view.columns_for(call, columns)?;
        if end < all {
            let what = "the end of the columns of an output";
            let fits = require_aligned::<B>(what, end, size_of::<T>());
            self.view.group.judged(call, fits)?;
        }
        Ok(MatrixViewMut { view, ..self })
    }

    /// Splits the view into columns of these widths, such as those of Q, K and V.
    ///
    /// ```
    /// use gemmesh::{Error, Group, Host};
    ///
    /// Group::<Host>::threads(1, |group| {
    ///     let mut qkv = group.zeros::<f32>(2, 16)?;
    ///     let [q, k, v] = qkv.view_mut().split_columns([8, 4, 4])?;
    ///     assert_eq!([q.shape(), k.shape(), v.shape()], [[2, 8], [2, 4], [2, 4]]);
    ///     Ok::<_, Error>(())
    /// })?;
    /// # Ok::<_, Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Kind::Unsuitable`] unless the sum of the widths is the number of columns; as [`MatrixViewMut::columns`].
    #[track_caller]
    pub fn split_columns<const N: usize>(self, widths: [usize; N]) -> Result<[Self; N]> {
        const CALL: &str = "MatrixViewMut::split_columns";
        let [_, columns] = self.shape();
        let all = widths
            .iter()
            .fold(0, |sum: usize, &n| sum.saturating_add(n));
        let part = format!("a split into {widths:?}");
        let fits = require_count("the view", "column", columns, &part, all).and_then(|()| {
            let mut widths = widths.iter();
            widths.try_for_each(|&width| limit("a width", width, 1, columns))
        });
        self.view.group.judged(CALL, fits)?;
        let mut begin = 0;
        let mut parts = Vec::with_capacity(N);
        for width in widths {
            let whole = MatrixViewMut {
                view: self.view,
                exclusive: PhantomData,
            };
            parts.push(whole.columns_for(CALL, begin..begin + width)?);
            begin += width;
        }
        let parts: std::result::Result<[Self; N], _> = parts.try_into();
        Ok(parts.unwrap_or_else(|_| unreachable!("there is one for each width")))
    }

    /// Overwrites the view with the values of a view of the same shape, after this rank's earlier operations and before
    /// its later ones.
    ///
    /// On GPUs the copy is put on the group's stream, and no host waits.
    ///
    /// ```
    /// use gemmesh::{Error, Group, Host};
    ///
    /// Group::<Host>::threads(1, |group| {
    ///     let from = group.upload(&[1.0f32, 2.0, 3.0, 4.0], 2, 2)?;
    ///     let mut to = group.zeros::<f32>(2, 3)?;
    ///     to.view_mut().columns(0..2)?.copy_from(&from)?;
    ///     assert_eq!(to.to_vec()?, [1.0, 2.0, 0.0, 3.0, 4.0, 0.0]);
    ///     Ok::<_, Error>(())
    /// })?;
    /// # Ok::<_, Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Kind::Shape`] unless the shapes are equal; [`Kind::Unsuitable`] if the matrices belong to different
    /// groups, and if the memory of both overlaps, unless it is the same; the group's failure.
    #[track_caller]
    pub fn copy_from<'m>(&mut self, from: impl Into<MatrixView<'m, B, T>>) -> Result<()> {
        const CALL: &str = "MatrixViewMut::copy_from";
        let (from, group) = (from.into(), self.view.group);
        let [rows, columns] = self.shape();
        const VIEW: &str = "the view to copy [rows, columns]";
        from.require_copied(CALL, group, VIEW, [rows, columns])?;
        let (from, to) = (from.memory.input(from.offset), self.output());
        let spec = MatrixSpec::new(T::DTYPE, rows, columns);
        let is_done = group.judged(CALL, check_copy(&from, &to, &spec))?;
        let backend = &group.inner().backend;
        group.exclusively(|_| {
            if is_done {
                Ok(())
            } else {
                backend.copy(&from, &to, rows, spec.row_bytes())
            }
        })
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn as_view(&self) -> MatrixView<'_, B, T> {
        self.view
    }

    pub(crate) fn group(&self) -> &'a Group<B> {
        self.view.group
    }

    /// Binds the view as an output.
    pub(crate) fn output(&self) -> Bound<'a, B> {
        self.view.memory.output(self.view.offset)
    }
}

impl<B: Backend, T: Value> fmt::Debug for MatrixViewMut<'_, B, T> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(
            f,
            "MatrixViewMut<{}, {}>{:?}",
            B::NAME,
            T::DTYPE,
            self.shape()
        )
    }
}
