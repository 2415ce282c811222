//! Matrices of one rank.

use std::any::Any;
use std::ffi::c_void;
use std::sync::Arc;

use gemmesh::raw::Memory;

use crate::calls::{Call, guarded, in_group};
use crate::convert::{check_out, described, memory, put, slice, slice_mut};
use crate::group::gemmesh_group;
use crate::numbers::{self, DtypeNumber};
use crate::status::gemmesh_status;
use crate::table::Table;
use crate::types::gemmesh_memory;

/// A matrix in memory of this rank that gemmesh has allocated. Made by gemmesh_matrix_zeros, freed by
/// gemmesh_matrix_free. It keeps its group alive.
pub struct gemmesh_matrix(());

/// A matrix and its owner.
struct Allocated {
    memory: Memory,
    /// Frees it when its operations are complete.
    _owner: Box<dyn Any + Send + Sync>,
}

static MATRICES: Table<Allocated> = Table::new("matrix", 0xa2);

/// Allocates a matrix of zeros.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gemmesh_matrix_zeros(
    group: *const gemmesh_group,
    dtype: DtypeNumber,
    rows: usize,
    columns: usize,
    matrix: *mut *mut gemmesh_matrix,
) -> gemmesh_status {
    in_group("gemmesh_matrix_zeros", Call::Own, group, |group| {
        check_out("matrix", matrix)?;
        let dtype = numbers::dtype("the matrix", dtype)?;
        let (memory, owner) = group.zeros(dtype, [rows, columns])?;
        let allocated = Allocated {
            memory,
            _owner: owner,
        };
        let handle = MATRICES.insert(Arc::new(allocated))?;
        // SAFETY: as the crate says.
        unsafe { put("matrix", matrix, handle) }
    })
}

/// Describes a matrix. The description is valid until the matrix is freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gemmesh_matrix_memory(
    matrix: *const gemmesh_matrix,
    memory: *mut gemmesh_memory,
) -> gemmesh_status {
    guarded("gemmesh_matrix_memory", || {
        let found = MATRICES.get("matrix", matrix)?;
        // SAFETY: as the crate says.
        unsafe { put("memory", memory, described(found.memory)) }
    })
}

/// Frees a matrix; NULL is none. Its memory is freed when the operations that use it are complete.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gemmesh_matrix_free(matrix: *mut gemmesh_matrix) -> gemmesh_status {
    guarded("gemmesh_matrix_free", || {
        if !matrix.is_null() {
            drop(MATRICES.take("matrix", matrix)?);
        }
        Ok(())
    })
}

/// Copies from the host, when all work on the group's stream is complete. The host's rows lie one after the other,
/// `bytes` bytes in all.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gemmesh_copy_from_host(
    group: *const gemmesh_group,
    to: *const gemmesh_memory,
    from: *const c_void,
    bytes: usize,
) -> gemmesh_status {
    in_group("gemmesh_copy_from_host", Call::Own, group, |group| {
        // SAFETY: as the crate and the header's gemmesh_memory say.
        unsafe {
            let from = slice("from", from.cast::<u8>(), bytes)?;
            Ok(group.write(memory("to", to)?, from, false)?)
        }
    })
}

/// Copies to the host, when all work on the group's stream is complete. The host's rows lie one after the other,
/// `bytes` bytes in all.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gemmesh_copy_to_host(
    group: *const gemmesh_group,
    from: *const gemmesh_memory,
    to: *mut c_void,
    bytes: usize,
) -> gemmesh_status {
    in_group("gemmesh_copy_to_host", Call::Own, group, |group| {
        // SAFETY: as the crate and the header's gemmesh_memory say. Memory of C has bytes, whatever they are.
        unsafe {
            let to = slice_mut("to", to.cast::<u8>(), bytes)?;
            Ok(group.read(memory("from", from)?, to, false)?)
        }
    })
}

/// Copies a matrix to another of the same shape and type, after the earlier operations and before the later ones.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gemmesh_copy(
    group: *const gemmesh_group,
    from: *const gemmesh_memory,
    to: *const gemmesh_memory,
) -> gemmesh_status {
    in_group("gemmesh_copy", Call::Own, group, |group| {
        // SAFETY: as the crate and the header's gemmesh_memory say.
        unsafe { Ok(group.copy(memory("from", from)?, memory("to", to)?)?) }
    })
}
