//! The addresses of a call's matrices.

use std::marker::PhantomData;
use std::ops::Range;

use super::Host;
use crate::backend::contract::sealed::Bound;
use crate::schedule::plan::matrices::MATRICES;
use crate::schedule::{Extent, MatrixSpec, Region};

/// The most matrices of a schedule.
pub const MAX_MATRICES: usize = MATRICES;

/// The matrices of a call, by number. Threads share it; the protocol says who may touch which rows when.
pub struct BoundMatrices<'a> {
    rank: usize,
    specs: &'a [MatrixSpec],
    bound: &'a [Bound<'a, Host>],
    own: [MatrixPlace; MAX_MATRICES],
}

// SAFETY: the pointers are to memory that the call borrows while the threads use it. Memory that is only read is
// borrowed shared. Memory that is written is borrowed exclusively, and the threads write disjoint parts. Symmetric
// memory is used as the protocol says.
unsafe impl Sync for BoundMatrices<'_> {}

impl<'a> BoundMatrices<'a> {
    pub fn new(
        rank: usize,
        specs: &'a [MatrixSpec],
        bound: &'a [Bound<'a, Host>],
    ) -> BoundMatrices<'a> {
        let mut own = [MatrixPlace::NOWHERE; MAX_MATRICES];
        for ((place, matrix), spec) in own.iter_mut().zip(bound).zip(specs) {
            if let Some(found) = MatrixPlace::of(matrix, spec.row_bytes()) {
                *place = found;
            }
        }
        BoundMatrices {
            rank,
            specs,
            bound,
            own,
        }
    }

    pub fn specs(&self) -> &'a [MatrixSpec] {
        self.specs
    }

    pub fn spec(&self, matrix: usize) -> &MatrixSpec {
        &self.specs[matrix]
    }

    /// The place of a matrix in this rank's memory.
    pub fn place(&self, matrix: usize) -> MatrixPlace {
        self.own[matrix]
    }

    /// Where a region lies in the memory of `rank`. None if `rank` is a peer and the matrix is not symmetric, or if it runs
    /// on another host.
    pub fn region(&self, region: &Region, rank: usize) -> Option<(*mut u8, Extent)> {
        let spec = self.spec(region.matrix);
        let own = self.place(region.matrix);
        // Rows of this rank's own memory may be padded.
        let (ptr, pitch) = if rank == self.rank {
            (own.ptr, own.pitch)
        } else {
            let memory = self.bound[region.matrix].symmetric()?;
            (memory.of(rank)?, spec.row_bytes())
        };
        Some((ptr, spec.extent_of(region, pitch)))
    }
}

/// Where a matrix lies.
#[derive(Clone, Copy, Debug)]
pub struct MatrixPlace {
    ptr: *mut u8,
    /// Bytes from row to row.
    pitch: usize,
}

impl MatrixPlace {
    /// The place of a matrix that the call does not have.
    const NOWHERE: MatrixPlace = MatrixPlace {
        ptr: std::ptr::null_mut(),
        pitch: 0,
    };

    /// The place of a bound matrix. `shared`: bytes from row to row of symmetric memory.
    pub fn of(bound: &Bound<Host>, shared: usize) -> Option<MatrixPlace> {
        let (first, offset, pitch) = match bound {
            Bound::Nothing => return None,
            Bound::Symmetric(memory) => (memory.own(), 0, shared),
            Bound::Rows(memory, offset, pitch) => (memory.own(), *offset, *pitch),
            Bound::Place(address, pitch) => (*address as *mut u8, 0, *pitch),
            Bound::Input(memory, offset) | Bound::Output(memory, offset) => {
                (memory.memory.as_ptr(), *offset, memory.pitch)
            }
        };
        // SAFETY: the call that binds the memory has checked that the offset lies within it.
        let ptr = unsafe { first.add(offset) };
        Some(MatrixPlace { ptr, pitch })
    }

    pub fn is_bound(self) -> bool {
        !self.ptr.is_null()
    }

    /// The address of an element.
    ///
    /// # Safety
    /// The matrix has the element, or it is the one after a row's last.
    pub unsafe fn element<T>(self, row: usize, column: usize) -> *mut T {
        // SAFETY: as this function's.
        unsafe { self.ptr.add(row * self.pitch).cast::<T>().add(column) }
    }

    /// A part of the matrix.
    ///
    /// # Safety
    /// The matrix holds it, is of this type and aligned for it; no one writes it while it is used.
    pub unsafe fn part<'a, T>(self, rows: Range<usize>, columns: Range<usize>) -> RowsView<'a, T> {
        RowsView {
            // SAFETY: as this function's.
            first: unsafe { self.element(rows.start, columns.start) },
            pitch: self.pitch,
            rows: rows.len(),
            columns: columns.len(),
            values: PhantomData,
        }
    }
}

/// Rows of a matrix, or a part of each, that no one writes meanwhile.
#[derive(Clone, Copy)]
pub struct RowsView<'a, T> {
    first: *const T,
    /// Bytes from row to row.
    pitch: usize,
    pub rows: usize,
    pub columns: usize,
    values: PhantomData<&'a [T]>,
}

impl<'a, T> RowsView<'a, T> {
    /// A row; none after the last.
    pub fn get(&self, row: usize) -> Option<&'a [T]> {
        if row >= self.rows {
            return None;
        }
        // SAFETY: whoever made this view has promised that the row is there.
        unsafe {
            let first = self.first.byte_add(row * self.pitch);
            Some(std::slice::from_raw_parts(first, self.columns))
        }
    }
}
