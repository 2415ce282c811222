//! What a profiler sees of NVTX's ranges: this program is one. NVTX calls it at the first range, as it does a tool that
//! is linked in.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::{Mutex, PoisonError};
use std::thread::{self, ThreadId};

use gemmesh::{AllGatherMatmul, Error, Group, Host, all_gather, bf16};

/// Begins of ranges with their names, and ends.
static SEEN: Mutex<Vec<(ThreadId, Option<String>)>> = Mutex::new(Vec::new());

fn note(name: Option<String>) {
    let mut seen = SEEN.lock().unwrap_or_else(PoisonError::into_inner);
    seen.push((thread::current().id(), name));
}

extern "C" fn push(name: *const c_char) -> c_int {
    // SAFETY: NVTX hands on the caller's string.
    let name = unsafe { CStr::from_ptr(name) };
    note(Some(name.to_str().unwrap_or("no UTF-8").into()));
    0
}

extern "C" fn pop() -> c_int {
    note(None);
    0
}

/// As nvtxTypes.h declares it.
#[repr(C)]
struct Callbacks {
    size: usize,
    table: extern "C" fn(c_int, *mut *const *mut *const c_void, *mut c_uint) -> c_int,
}

type ExportTable = extern "C" fn(c_uint) -> *const Callbacks;

/// Attaches to what NVTX calls for ranges of a thread.
extern "C" fn attach(export: ExportTable) -> c_int {
    const CALLBACKS: c_uint = 1;
    const CORE: c_int = 1;
    const RANGE_PUSH: usize = 9;
    const RANGE_POP: usize = 11;
    let (mut table, mut entries) = (std::ptr::null(), 0);
    // SAFETY: the table is a static of NVTX. Of the core module it has that many entries, each of which points to where
    // the function is looked up.
    unsafe {
        let callbacks = &*export(CALLBACKS);
        if (callbacks.table)(CORE, &mut table, &mut entries) == 0 || entries as usize <= RANGE_POP {
            return 0;
        }
        **table.add(RANGE_PUSH) = push as *const c_void;
        **table.add(RANGE_POP) = pop as *const c_void;
    }
    1
}

/// What NVTX looks for.
#[used]
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals)]
static InitializeInjectionNvtx2_fnptr: extern "C" fn(ExportTable) -> c_int = attach;

#[test]
fn a_profiler_sees_operations_transfers_and_waits_by_name() -> Result<(), Error> {
    let (m, n, k) = (8, 12, 16);
    Group::<Host>::threads(2, |group| {
        let mut a = group.sharded::<bf16>(m, k)?;
        let rows = vec![bf16::ONE; a.rows().len() * k];
        a.shard_mut().copy_from_host(&rows)?;
        let b = group.upload(&vec![bf16::ONE; n * k], n, k)?;
        let mut out = group.zeros::<bf16>(m, n)?;
        let prepared = AllGatherMatmul::new().prepare(&a, n)?;
        prepared.run(&a, &b, &mut out)?;
        all_gather(&a)?;
        prepared.matmul(&a, &b, &mut out)?;
        group.synchronize()?;
        assert!(out.to_vec()?.iter().all(|x| x.to_f32() == 16.0));
        Ok::<_, Error>(())
    })?;
    let seen = SEEN.lock().unwrap_or_else(PoisonError::into_inner);
    let count = |wanted: &str| {
        let names = seen.iter().filter_map(|(_, name)| name.as_deref());
        names.filter(|name| *name == wanted).count()
    };
    for name in [
        "gemmesh prepare all_gather_matmul",
        "gemmesh all_gather_matmul 8x12x16 bf16, epoch 1",
        "gemmesh all_gather M = 8, K = 16, bf16, epoch 2",
        "gemmesh matmul 8x12x16 bf16",
    ] {
        assert_eq!(count(name), 2, "{name}: {seen:?}");
    }
    // What reads and writes matrices from the host waits too.
    assert!(count("gemmesh synchronize") >= 2, "{seen:?}");
    // Rank 1's rows come in chunks, and are gathered once more.
    let moves = seen.iter().filter_map(|(_, name)| name.as_deref());
    let moves = moves
        .filter(|name| name.starts_with("gemmesh pull rows 4..") && name.ends_with(" from rank 1"));
    assert!(moves.count() >= 2, "{seen:?}");
    let mut depths = HashMap::<ThreadId, i32>::new();
    for (thread, name) in seen.iter() {
        let depth = depths.entry(*thread).or_default();
        *depth += if name.is_some() { 1 } else { -1 };
        assert!(*depth >= 0, "a range ends that has not begun: {seen:?}");
    }
    assert!(
        depths.values().all(|depth| *depth == 0),
        "a range does not end: {seen:?}"
    );
    Ok(())
}
