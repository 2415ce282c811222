//! Sharded matrices.

use std::sync::Arc;

use gemmesh::raw::{AnyShards, Split};

use crate::calls::{Call, guarded, in_group};
use crate::convert::{by_rank, check_out, described, put};
use crate::failure::{Failure, Result};
use crate::group::gemmesh_group;
use crate::numbers::{self, DtypeNumber};
use crate::status::gemmesh_status;
use crate::table::Table;
use crate::types::{gemmesh_memory, gemmesh_range};

/// A matrix whose rows are spread over the ranks. Every rank has memory for all rows, owns some, and gets the others by
/// gathers. Made by the gemmesh_sharded_new functions, freed by gemmesh_sharded_free. It keeps its group alive.
pub struct gemmesh_sharded(());

static SHARDED: Table<AnyShards> = Table::new("sharded matrix", 0xa3);

/// The matrix of a handle.
pub(crate) fn shards(argument: &str, handle: *const gemmesh_sharded) -> Result<Arc<AnyShards>> {
    SHARDED.get(argument, handle)
}

/// The matrix of a handle, if one is given.
pub(crate) fn shards_if_given(
    argument: &str,
    handle: *const gemmesh_sharded,
) -> Result<Option<Arc<AnyShards>>> {
    if handle.is_null() {
        Ok(None)
    } else {
        shards(argument, handle).map(Some)
    }
}

/// Makes a sharded matrix in function `call`. `split` gets the number of ranks.
///
/// # Safety
/// As the crate says.
unsafe fn make(
    call: &'static str,
    group: *const gemmesh_group,
    (dtype, k): (DtypeNumber, usize),
    split: impl FnOnce(usize) -> Result<Split<'static>>,
    matrix: *mut *mut gemmesh_sharded,
) -> gemmesh_status {
    in_group(call, Call::Collective, group, |group| {
        check_out("matrix", matrix)?;
        let dtype = numbers::dtype("the matrix", dtype)?;
        let made = group.sharded(dtype, split(group.world_size())?, k)?;
        let handle = SHARDED.insert(Arc::new(made))?;
        // SAFETY: as this function's.
        unsafe { put("matrix", matrix, handle) }
    })
}

/// Allocates a sharded matrix [m, k], whose rows are split evenly. Collective.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gemmesh_sharded_new(
    group: *const gemmesh_group,
    dtype: DtypeNumber,
    m: usize,
    k: usize,
    matrix: *mut *mut gemmesh_sharded,
) -> gemmesh_status {
    let split = |_| Ok(Split::Even(m));
    // SAFETY: as the crate says.
    unsafe { make("gemmesh_sharded_new", group, (dtype, k), split, matrix) }
}

/// Allocates a sharded matrix of which each rank owns as many rows as `rows` says: `count` numbers, by rank, the same
/// on every rank. Collective.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gemmesh_sharded_new_by_rank(
    group: *const gemmesh_group,
    dtype: DtypeNumber,
    rows: *const usize,
    count: usize,
    k: usize,
    matrix: *mut *mut gemmesh_sharded,
) -> gemmesh_status {
    let split = |world| {
        // SAFETY: as the crate says. The matrix is made before this function returns.
        let rows = unsafe { by_rank("rows", rows, count, world)? };
        Ok(Split::ByRank(rows))
    };
    // SAFETY: as the crate says.
    unsafe {
        make(
            "gemmesh_sharded_new_by_rank",
            group,
            (dtype, k),
            split,
            matrix,
        )
    }
}

/// Allocates a sharded matrix with room for `capacity` rows, split evenly at first. gemmesh_sharded_set_rows says how
/// many there are. Collective.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gemmesh_sharded_new_with_capacity(
    group: *const gemmesh_group,
    dtype: DtypeNumber,
    capacity: usize,
    k: usize,
    matrix: *mut *mut gemmesh_sharded,
) -> gemmesh_status {
    let split = |_| Ok(Split::Capacity(capacity));
    // SAFETY: as the crate says.
    unsafe {
        make(
            "gemmesh_sharded_new_with_capacity",
            group,
            (dtype, k),
            split,
            matrix,
        )
    }
}

/// Allocates a sharded matrix that is gathered in `stages` stages. Each rank's rows are cut into as many blocks, and
/// memory has the first block of each rank, then the second of each: gemmesh_sharded_blocks_of. Collective.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gemmesh_sharded_new_staged(
    group: *const gemmesh_group,
    dtype: DtypeNumber,
    m: usize,
    k: usize,
    stages: usize,
    matrix: *mut *mut gemmesh_sharded,
) -> gemmesh_status {
    let split = |_| Ok(Split::Staged(m, stages));
    // SAFETY: as the crate says.
    unsafe {
        make(
            "gemmesh_sharded_new_staged",
            group,
            (dtype, k),
            split,
            matrix,
        )
    }
}

/// Frees a sharded matrix; NULL is none. Its memory is freed when the operations that use it are complete on all ranks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gemmesh_sharded_free(matrix: *mut gemmesh_sharded) -> gemmesh_status {
    guarded("gemmesh_sharded_free", || {
        if !matrix.is_null() {
            drop(SHARDED.take("matrix", matrix)?);
        }
        Ok(())
    })
}

/// Describes this rank's copy of the whole matrix [M, K]. The rows of other ranks are those of the last gather. The
/// description is valid until the matrix has other rows or is freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gemmesh_sharded_whole(
    matrix: *const gemmesh_sharded,
    memory: *mut gemmesh_memory,
) -> gemmesh_status {
    guarded("gemmesh_sharded_whole", || {
        let found = shards("matrix", matrix)?;
        // SAFETY: as the crate says.
        unsafe { put("memory", memory, described(found.whole())) }
    })
}

/// Describes the rows that this rank owns, to be read or written. They must lie in one place, so the matrix has one
/// stage. The description is valid until the matrix has other rows or is freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gemmesh_sharded_own_rows(
    matrix: *const gemmesh_sharded,
    memory: *mut gemmesh_memory,
) -> gemmesh_status {
    guarded("gemmesh_sharded_own_rows", || {
        let own = shards("matrix", matrix)?.own_rows()?;
        // SAFETY: as the crate says.
        unsafe { put("memory", memory, described(own)) }
    })
}

/// The rows that `rank` owns, counted rank after rank. There are none if the group has no such rank.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gemmesh_sharded_rows_of(
    matrix: *const gemmesh_sharded,
    rank: usize,
    rows: *mut gemmesh_range,
) -> gemmesh_status {
    guarded("gemmesh_sharded_rows_of", || {
        let found = shards("matrix", matrix)?.rows_of(rank);
        // SAFETY: as the crate says.
        unsafe { put("rows", rows, found.into()) }
    })
}

/// Where the rows that `rank` owns lie in the matrix: one range, or one for each stage of a staged matrix. `count` gets
/// their number. `blocks` has room for `room` ranges; the first ones are written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gemmesh_sharded_blocks_of(
    matrix: *const gemmesh_sharded,
    rank: usize,
    blocks: *mut gemmesh_range,
    room: usize,
    count: *mut usize,
) -> gemmesh_status {
    guarded("gemmesh_sharded_blocks_of", || {
        check_out("count", count)?;
        let found = shards("matrix", matrix)?.blocks_of(rank);
        if room > 0 {
            check_out("blocks", blocks)?;
        }
        for (index, block) in found.iter().take(room).enumerate() {
            // SAFETY: as the crate says; there is room for the block.
            unsafe { blocks.add(index).write(block.clone().into()) };
        }
        // SAFETY: as the crate says.
        unsafe { put("count", count, found.len()) }
    })
}

/// How many rows fit into the matrix.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gemmesh_sharded_capacity(
    matrix: *const gemmesh_sharded,
    capacity: *mut usize,
) -> gemmesh_status {
    guarded("gemmesh_sharded_capacity", || {
        let found = shards("matrix", matrix)?.capacity();
        // SAFETY: as the crate says.
        unsafe { put("capacity", capacity, found) }
    })
}

/// Changes how many rows each rank owns. `rows` has `count` numbers, one for each rank. The contents are lost. It is
/// not collective, but all ranks give the same numbers. No call that uses the matrix may be running on another thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gemmesh_sharded_set_rows(
    matrix: *mut gemmesh_sharded,
    rows: *const usize,
    count: usize,
) -> gemmesh_status {
    guarded("gemmesh_sharded_set_rows", || {
        let set = |matrix: &mut AnyShards| {
            // SAFETY: as the crate says.
            let rows = unsafe { by_rank("rows", rows, count, matrix.world())? };
            Ok(matrix.set_rows(rows)?)
        };
        match SHARDED.change("matrix", matrix, set)? {
            Some(set) => set,
            None => Err(Failure::Misuse(
                "a call uses the matrix; wait for it".into(),
            )),
        }
    })
}
