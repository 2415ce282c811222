//! Matrices on the host as slices.
#![allow(unsafe_code)]

use super::{Matrix, MatrixView, ShardedMatrix, ViewMemory};
use crate::backend::Host;
use crate::element::Value;
#[cfg(doc)]
use crate::error::Error;
#[cfg(doc)]
use crate::error::Kind;
use crate::error::Result;
use crate::schedule::limits::require;

/// On the host, memory that the caller may read and write in place.
impl<T: Value> Matrix<Host, T> {
    /// The values, row by row.
    ///
    /// ```
    /// use gemmesh::{Error, Group, Host};
    ///
    /// Group::<Host>::threads(1, |group| {
    ///     let mut matrix = group.zeros::<f32>(2, 2)?;
    ///     matrix.as_mut_slice()?[3] = 1.0;
    ///     assert_eq!(matrix.as_slice()?, [0.0, 0.0, 0.0, 1.0]);
    ///     Ok::<_, Error>(())
    /// })?;
    /// # Ok::<_, Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Kind::Unsupported`] if other bytes lie between the rows, as in a part of another library's tensor; the
    /// group's failure.
    #[track_caller]
    pub fn as_slice(&self) -> Result<&[T]> {
        let (first, values) = place(&self.view())?;
        // SAFETY: as `place` says. The memory is written only through exclusive borrows of the matrix.
        Ok(unsafe { std::slice::from_raw_parts(first, values) })
    }

    /// As [`Matrix::as_slice`], to be written.
    ///
    /// # Errors
    /// As [`Matrix::as_slice`].
    #[track_caller]
    pub fn as_mut_slice(&mut self) -> Result<&mut [T]> {
        let (first, values) = place(&self.view())?;
        // SAFETY: as `place` says. The matrix is borrowed exclusively.
        Ok(unsafe { std::slice::from_raw_parts_mut(first, values) })
    }
}

/// On the host, own rows that the caller may read and write in place.
impl<T: Value> ShardedMatrix<Host, T> {
    /// The values of this rank's own rows, row by row.
    ///
    /// # Errors
    /// As [`ShardedMatrix::shard`]; the group's failure.
    #[track_caller]
    pub fn shard_slice(&self) -> Result<&[T]> {
        let (first, values) = place(&self.shard_for("ShardedMatrix::shard_slice")?)?;
        // SAFETY: as `place` says. Own rows are written only through exclusive borrows of the matrix: operations that
        // borrow it shared, such as a gather, write other ranks' rows.
        Ok(unsafe { std::slice::from_raw_parts(first, values) })
    }

    /// As [`ShardedMatrix::shard_slice`], to be written.
    ///
    /// ```
    /// use gemmesh::{Group, Host, Result, all_gather};
    ///
    /// fn rank(group: Group<Host>) -> Result<()> {
    ///     let mut x = group.sharded::<u32>(2, 1)?;
    ///     x.shard_slice_mut()?[0] = group.rank() as u32;
    ///     all_gather(&x)?;
    ///     assert_eq!(x.to_vec()?, [0, 1]);
    ///     Ok(())
    /// }
    ///
    /// Group::threads(2, rank)?;
    /// # Ok::<_, gemmesh::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`ShardedMatrix::shard_slice`].
    #[track_caller]
    pub fn shard_slice_mut(&mut self) -> Result<&mut [T]> {
        let (first, values) = place(&self.shard_for("ShardedMatrix::shard_slice_mut")?)?;
        // SAFETY: as `place` says. The matrix is borrowed exclusively, so this rank is in no operation of it, and peers
        // read own rows only during one. If an operation had failed, a peer might still be in it; `place` has refused
        // that.
        Ok(unsafe { std::slice::from_raw_parts_mut(first, values) })
    }
}

/// The first value of a view, and how many there are. The memory is aligned for the type, of which every bit pattern is
/// a value.
#[track_caller]
fn place<T: Value>(view: &MatrixView<'_, Host, T>) -> Result<(*mut T, usize)> {
    view.group.check()?;
    let [rows, columns] = view.shape;
    let pitch = view.memory.pitch();
    if rows > 1 && pitch != columns * size_of::<T>() {
        let what = format!("rows must follow one another, but they are {pitch} bytes apart");
        view.group
            .judged("Matrix::as_slice", require(&what, false))?;
    }
    let first = match view.memory {
        ViewMemory::Buffer(buffer) => buffer.first(),
        ViewMemory::Shared(memory, _) => memory.own(),
    };
    // Without rows there may be no memory.
    let first = match rows {
        0 => std::ptr::NonNull::dangling().as_ptr(),
        // SAFETY: the view lies within its memory.
        _ => unsafe { first.add(view.offset).cast() },
    };
    Ok((first, rows * columns))
}
