//! Operations that move or add rows without a product. They return when the operation has been begun.

use crate::calls::{Call, in_group};
use crate::convert::{by_pair, memory};
use crate::group::gemmesh_group;
use crate::sharded::{gemmesh_sharded, shards};
use crate::status::gemmesh_status;
use crate::types::gemmesh_memory;

/// Gathers the rows of a sharded matrix on every rank. Collective.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gemmesh_all_gather(
    group: *const gemmesh_group,
    a: *const gemmesh_sharded,
) -> gemmesh_status {
    in_group("gemmesh_all_gather", Call::Collective, group, |group| {
        Ok(group.all_gather(&*shards("a", a)?)?)
    })
}

/// Gives every rank all rows of a sharded matrix as rank `root` has them. Collective.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gemmesh_broadcast(
    group: *const gemmesh_group,
    a: *const gemmesh_sharded,
    root: usize,
) -> gemmesh_status {
    in_group("gemmesh_broadcast", Call::Collective, group, |group| {
        Ok(group.broadcast(&*shards("a", a)?, root)?)
    })
}

/// Adds the matrices [M, N] of all ranks. Each rank gets its rows of the sum in `out`, whose rows say how many.
/// Collective.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gemmesh_reduce_scatter(
    group: *const gemmesh_group,
    a: *const gemmesh_memory,
    out: *const gemmesh_memory,
) -> gemmesh_status {
    in_group("gemmesh_reduce_scatter", Call::Collective, group, |group| {
        // SAFETY: as the crate and the header's gemmesh_memory say.
        unsafe { Ok(group.reduce_scatter(memory("a", a)?, memory("out", out)?)?) }
    })
}

/// Adds the matrices [M, N] of all ranks. Every rank gets the whole sum, in a sharded matrix [M, N]. Collective.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gemmesh_all_reduce(
    group: *const gemmesh_group,
    a: *const gemmesh_memory,
    out: *const gemmesh_sharded,
) -> gemmesh_status {
    in_group("gemmesh_all_reduce", Call::Collective, group, |group| {
        // SAFETY: as the crate and the header's gemmesh_memory say.
        unsafe { Ok(group.all_reduce(memory("a", a)?, &*shards("out", out)?)?) }
    })
}

/// Sends each rank its block of `a`: block r of rank s becomes block s of rank r, in a sharded matrix. Collective.
///
/// `counts` is NULL if a rank sends every rank as many rows as it has of `out`. Otherwise rank s sends rank r
/// `counts[s * W + r]` rows, `pair_count` numbers, W * W in all, the same on every rank. The blocks follow one another in
/// `a`, and in the first rows of `out`. Its other rows stay as they are.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gemmesh_all_to_all(
    group: *const gemmesh_group,
    a: *const gemmesh_memory,
    out: *const gemmesh_sharded,
    counts: *const usize,
    pair_count: usize,
) -> gemmesh_status {
    in_group("gemmesh_all_to_all", Call::Collective, group, |group| {
        // SAFETY: as the crate and the header's gemmesh_memory say.
        unsafe {
            let counts = by_pair(counts, pair_count)?;
            Ok(group.all_to_all(memory("a", a)?, &*shards("out", out)?, counts)?)
        }
    })
}
