//! Groups of ranks.

use std::ffi::{CString, c_char, c_void};
use std::sync::Arc;
use std::time::Duration;

use gemmesh::GATHERED_BYTES;
use gemmesh::raw::{AnyGroup, BackendKind, Joining, Options, join, unsuitable};

use crate::calls::{Call, guarded, in_group};
use crate::convert::{check_by_rank, check_out, given, put, sized, slice, slice_mut, words};
use crate::failure::{Failure, Result, text};
use crate::numbers;
use crate::pipelines::outcome;
use crate::status::gemmesh_status;
use crate::table::Table;
use crate::types::*;

/// A group of ranks, which make collective calls together. Made by gemmesh_group_from_env, gemmesh_group_connect,
/// gemmesh_group_connect_with or gemmesh_group_split, freed by gemmesh_group_free.
pub struct gemmesh_group(());

/// A group with what C reads of it.
pub(crate) struct Opened {
    pub group: Arc<dyn AnyGroup>,
    name: Option<CString>,
}

pub(crate) static GROUPS: Table<Opened> = Table::new("group", 0xa1);

/// The handle of a new group.
fn opened(group: Arc<dyn AnyGroup>) -> Result<*mut gemmesh_group> {
    let name = group.name().map(text);
    GROUPS.insert(Arc::new(Opened { group, name }))
}

/// The options and the backend. Null stands for the defaults.
///
/// # Safety
/// As [`sized`], for the options and the name.
unsafe fn options(pointer: *const gemmesh_group_options) -> Result<(BackendKind, Options)> {
    if pointer.is_null() {
        return Ok((BackendKind::Host, Options::default()));
    }
    // SAFETY: as this function's.
    let options = unsafe { sized("the options", pointer)? };
    let if_not_0 = |number: usize| (number != 0).then_some(number);
    let time = |ms: u64| (ms != 0).then_some(Duration::from_millis(ms));
    let name = match options.name.is_null() {
        true => None,
        // SAFETY: as this function's.
        false => Some(unsafe { words("the name", options.name)? }.into()),
    };
    let converted = Options {
        timeout: time(options.timeout_ms),
        arrival_timeout: time(options.arrival_timeout_ms),
        host_timeout: time(options.host_timeout_ms),
        workers: if_not_0(options.workers),
        device: usize::try_from(options.device).ok(),
        max_ctas: if_not_0(options.max_ctas),
        numerics: numbers::numerics(options.numerics)?,
        name,
    };
    Ok((numbers::backend(options.backend)?, converted))
}

/// Joins the group that a launcher (torchrun, mpirun, srun) describes in the environment. `options` may be NULL.
/// Collective.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gemmesh_group_from_env(
    options: *const gemmesh_group_options,
    group: *mut *mut gemmesh_group,
) -> gemmesh_status {
    guarded("gemmesh_group_from_env", || {
        check_out("group", group)?;
        // SAFETY: as the crate says.
        let (backend, options) = unsafe { self::options(options)? };
        let joined = opened(join(backend, options, Joining::Env)?)?;
        // SAFETY: as the crate says.
        unsafe { put("group", group, joined) }
    })
}

/// Joins a group of `world` ranks of one host, which give the same address: a name of their choice. This process is
/// rank `rank`, from 0 to world - 1. `options` may be NULL. Collective.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gemmesh_group_connect(
    rank: usize,
    world: usize,
    address: *const c_char,
    options: *const gemmesh_group_options,
    group: *mut *mut gemmesh_group,
) -> gemmesh_status {
    guarded("gemmesh_group_connect", || {
        check_out("group", group)?;
        // SAFETY: as the crate says.
        let (address, (backend, options)) =
            unsafe { (words("address", address)?, self::options(options)?) };
        let joining = Joining::Address {
            rank,
            world,
            address,
        };
        let joined = opened(join(backend, options, joining)?)?;
        // SAFETY: as the crate says.
        unsafe { put("group", group, joined) }
    })
}

/// Joins a group whose ranks have no common address, but can send one another bytes, as by MPI or by a store. `gather`
/// is called once, with `context`. gemmesh_mpi.h has one for MPI. `options` may be NULL. Collective.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gemmesh_group_connect_with(
    rank: usize,
    world: usize,
    gather: gemmesh_gather,
    context: *mut c_void,
    options: *const gemmesh_group_options,
    group: *mut *mut gemmesh_group,
) -> gemmesh_status {
    guarded("gemmesh_group_connect_with", || {
        check_out("group", group)?;
        let gather = gather.ok_or_else(|| Failure::null("gather"))?;
        // SAFETY: as the crate says.
        let (backend, options) = unsafe { self::options(options)? };
        let mut gather = |mine: &[u8; GATHERED_BYTES]| {
            let mut all = vec![0; world * GATHERED_BYTES];
            // SAFETY: as the crate says; `all` has room for the bytes of all ranks.
            let returned = unsafe {
                let (mine, all) = (mine.as_ptr().cast(), all.as_mut_ptr().cast());
                gather(mine, all, GATHERED_BYTES, context)
            };
            outcome(returned).map_err(|reason| -> Box<dyn std::error::Error> { reason })?;
            Ok(all.chunks(GATHERED_BYTES).map(<[u8]>::to_vec).collect())
        };
        let joining = Joining::Gather {
            rank,
            world,
            gather: &mut gather,
        };
        let joined = opened(join(backend, options, joining)?)?;
        // SAFETY: as the crate says.
        unsafe { put("group", group, joined) }
    })
}

/// Splits a group into parts. The ranks that give the same `color` are a group of their own, numbered by `key`, then by
/// rank. `options` may be NULL; the part then has those of the group. Collective.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gemmesh_group_split(
    group: *const gemmesh_group,
    color: usize,
    key: usize,
    options: *const gemmesh_group_options,
    part: *mut *mut gemmesh_group,
) -> gemmesh_status {
    in_group("gemmesh_group_split", Call::Collective, group, |group| {
        check_out("part", part)?;
        // SAFETY: as the crate says.
        let (_, options) = unsafe { self::options(options)? };
        let joined = opened(group.split(options, color, key)?)?;
        // SAFETY: as the crate says.
        unsafe { put("part", part, joined) }
    })
}

/// Frees a group's handle; NULL is none. The group ends when its matrices and prepared products are freed too.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gemmesh_group_free(group: *mut gemmesh_group) -> gemmesh_status {
    guarded("gemmesh_group_free", || {
        if !group.is_null() {
            drop(GROUPS.take("group", group)?);
        }
        Ok(())
    })
}

/// The number of this rank in the group.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gemmesh_group_rank(
    group: *const gemmesh_group,
    rank: *mut usize,
) -> gemmesh_status {
    in_group("gemmesh_group_rank", Call::Own, group, |group| {
        // SAFETY: as the crate says.
        unsafe { put("rank", rank, group.rank()) }
    })
}

/// The number of ranks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gemmesh_group_world_size(
    group: *const gemmesh_group,
    world: *mut usize,
) -> gemmesh_status {
    in_group("gemmesh_group_world_size", Call::Own, group, |group| {
        // SAFETY: as the crate says.
        unsafe { put("world", world, group.world_size()) }
    })
}

/// The group's name, or NULL if it has none. It is valid until the handle is freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gemmesh_group_name(
    group: *const gemmesh_group,
    name: *mut *const c_char,
) -> gemmesh_status {
    guarded("gemmesh_group_name", || {
        let opened = GROUPS.get("group", group)?;
        let found = opened.name.as_ref();
        let found = found.map_or(std::ptr::null(), |name| name.as_ptr());
        // SAFETY: as the crate says.
        unsafe { put("name", name, found) }
    })
}

/// The group's backend.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gemmesh_group_backend(
    group: *const gemmesh_group,
    backend: *mut gemmesh_backend,
) -> gemmesh_status {
    in_group("gemmesh_group_backend", Call::Own, group, |group| {
        let found = match group.backend() {
            BackendKind::Host => gemmesh_backend::GEMMESH_HOST,
            BackendKind::Cuda => gemmesh_backend::GEMMESH_CUDA,
        };
        // SAFETY: as the crate says.
        unsafe { put("backend", backend, found) }
    })
}

/// The number of this rank's GPU in this process. 0 on the host backend.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gemmesh_group_device(
    group: *const gemmesh_group,
    device: *mut i32,
) -> gemmesh_status {
    in_group("gemmesh_group_device", Call::Own, group, |group| {
        // SAFETY: as the crate says.
        unsafe { put("device", device, group.device().device_id) }
    })
}

/// Addresses and pitches of matrices are multiples of so many bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gemmesh_group_row_alignment(
    group: *const gemmesh_group,
    bytes: *mut usize,
) -> gemmesh_status {
    in_group("gemmesh_group_row_alignment", Call::Own, group, |group| {
        // SAFETY: as the crate says.
        unsafe { put("bytes", bytes, group.row_alignment()) }
    })
}

/// How many of `m` rows each rank owns, if they are split evenly. `rows` has room for a number for each rank, `count`
/// of them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gemmesh_group_even_rows(
    group: *const gemmesh_group,
    m: usize,
    rows: *mut usize,
    count: usize,
) -> gemmesh_status {
    in_group("gemmesh_group_even_rows", Call::Own, group, |group| {
        // SAFETY: as the crate says.
        unsafe { put_by_rank("rows", rows, count, &group.even_rows(m)) }
    })
}

/// Writes a value for each rank.
///
/// # Safety
/// As [`put`], for `count` values.
unsafe fn put_by_rank<T: Copy>(
    argument: &str,
    to: *mut T,
    count: usize,
    values: &[T],
) -> Result<()> {
    check_by_rank(argument, count, values.len())?;
    check_out(argument, to)?;
    // SAFETY: as this function's, and there are as many.
    unsafe { to.copy_from_nonoverlapping(values.as_ptr(), count) };
    Ok(())
}

/// Waits until this rank's operations are complete.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gemmesh_synchronize(group: *const gemmesh_group) -> gemmesh_status {
    in_group("gemmesh_synchronize", Call::Own, group, |group| {
        Ok(group.synchronize()?)
    })
}

/// Waits until all ranks have come to the barrier. Collective.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gemmesh_barrier(group: *const gemmesh_group) -> gemmesh_status {
    in_group("gemmesh_barrier", Call::Collective, group, |group| {
        Ok(group.barrier()?)
    })
}

/// Sends this rank's `bytes` bytes to all ranks, and writes those of all ranks to `all`, by rank. All ranks send the
/// same number of bytes, so `all` has room for W times as many. Collective.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gemmesh_all_gather_bytes(
    group: *const gemmesh_group,
    mine: *const c_void,
    all: *mut c_void,
    bytes: usize,
) -> gemmesh_status {
    const CALL: &str = "gemmesh_all_gather_bytes";
    in_group(CALL, Call::Collective, group, |group| {
        let room = bytes.saturating_mul(group.world_size());
        // SAFETY: as the crate says. Memory of C has bytes, whatever they are.
        let (mine, all) = unsafe {
            let mine = slice("mine", mine.cast::<u8>(), bytes)?;
            (mine, slice_mut("all", all.cast::<u8>(), room)?)
        };
        let gathered = group.all_gather_bytes(mine)?;
        if let Some(other) = gathered.iter().find(|other| other.len() != bytes) {
            // All ranks have come, and each sees this.
            let expected = format!("another rank's, {}", other.len());
            let words = ["the number of bytes", &expected, &bytes.to_string()];
            return Err(unsuitable(group, CALL, "mine", words).into());
        }
        for (to, from) in all.chunks_mut(bytes.max(1)).zip(&gathered) {
            to.copy_from_slice(from);
        }
        Ok(())
    })
}

/// How long this rank has waited for each other rank in operations, in nanoseconds, by rank. `times` has room for
/// `count` numbers, one for each rank.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gemmesh_wait_times(
    group: *const gemmesh_group,
    times: *mut u64,
    count: usize,
) -> gemmesh_status {
    in_group("gemmesh_wait_times", Call::Own, group, |group| {
        let waited = group.wait_times();
        let waited: Vec<u64> = waited.iter().map(|time| time.as_nanos() as u64).collect();
        // SAFETY: as the crate says.
        unsafe { put_by_rank("times", times, count, &waited) }
    })
}

/// Returns the group's failure, if it has failed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gemmesh_check(group: *const gemmesh_group) -> gemmesh_status {
    in_group(
        "gemmesh_check",
        Call::Own,
        group,
        |group| Ok(group.check()?),
    )
}

/// Says that this rank's program has failed, and why. The group fails on every rank. Returns the status of that
/// failure, so that a program can return it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gemmesh_fail(
    group: *const gemmesh_group,
    reason: *const c_char,
) -> gemmesh_status {
    in_group("gemmesh_fail", Call::Own, group, |group| {
        // SAFETY: as the crate says.
        let reason = unsafe { words("reason", reason)? };
        Err(group.fail(reason).into())
    })
}

/// The CUstream on which the group's operations run. NULL on the host backend.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gemmesh_group_stream(
    group: *const gemmesh_group,
    stream: *mut *mut c_void,
) -> gemmesh_status {
    in_group("gemmesh_group_stream", Call::Own, group, |group| {
        // SAFETY: as the crate says.
        unsafe { put("stream", stream, group.stream() as *mut c_void) }
    })
}

/// Puts later operations on a CUstream of the group's device, which stays valid until the group ends or has another.
/// They begin after the earlier ones. Nothing is done on the host backend.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gemmesh_group_set_stream(
    group: *const gemmesh_group,
    stream: *mut c_void,
) -> gemmesh_status {
    in_group("gemmesh_group_set_stream", Call::Own, group, |group| {
        // SAFETY: as the function's text says.
        unsafe { group.set_stream(stream as usize)? };
        Ok(())
    })
}

/// Records a CUevent after all operations so far. Nothing is done on the host backend.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gemmesh_record_event(
    group: *const gemmesh_group,
    event: *mut c_void,
) -> gemmesh_status {
    in_group("gemmesh_record_event", Call::Own, group, |group| {
        // SAFETY: the event is one of CUDA's.
        unsafe { group.record_event(event as usize)? };
        Ok(())
    })
}

/// Makes later operations wait for a CUevent. Nothing is done on the host backend.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gemmesh_wait_for_event(
    group: *const gemmesh_group,
    event: *mut c_void,
) -> gemmesh_status {
    in_group("gemmesh_wait_for_event", Call::Own, group, |group| {
        // SAFETY: the event is one of CUDA's.
        unsafe { group.wait_for_event(event as usize)? };
        Ok(())
    })
}

/// The columns of scales that are sharded with an operand [M, K], whose scaling is GEMMESH_SCALING_SHARDED_ROWS or
/// GEMMESH_SCALING_SHARDED_BLOCKS. Those after the scales have no meaning.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gemmesh_scale_columns(
    group: *const gemmesh_group,
    scaling: *const gemmesh_scaling,
    k: usize,
    columns: *mut usize,
) -> gemmesh_status {
    in_group("gemmesh_scale_columns", Call::Own, group, |group| {
        // SAFETY: as the crate says.
        unsafe {
            let scaling = numbers::scaling("a", *given("scaling", scaling)?)?;
            put("columns", columns, group.scale_columns(scaling, k))
        }
    })
}
