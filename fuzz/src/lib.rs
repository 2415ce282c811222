//! What all fuzz targets share: seeds on disk, and a bound on what is allocated.

use std::alloc::{GlobalAlloc, Layout, System};
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

/// What may be allocated at once, whatever the input says ...
const ALLOWANCE: usize = 1 << 20;
/// ... and for each byte of the input: a list grows by doubling, and in JSON a number of eight bytes may take two.
const PER_BYTE: usize = 16;
/// All that is allocated at a time may be this many times as much.
const TOTAL: usize = 4;

/// Bytes that one allocation may take at this moment.
static LIMIT: AtomicUsize = AtomicUsize::new(usize::MAX);
/// Bytes that are allocated, and how many may be at this moment.
static LIVE: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(usize::MAX);

struct Bounded;

impl Bounded {
    fn require(bytes: usize, more: usize) {
        let live = LIVE.fetch_add(more, Ordering::Relaxed).wrapping_add(more);
        let fits = bytes <= LIMIT.load(Ordering::Relaxed) && live <= MOST.load(Ordering::Relaxed);
        // What tells of a panic may take what it needs.
        if !fits && !std::thread::panicking() {
            // What prints also allocates.
            let limits = [&LIMIT, &MOST].map(|limit| limit.swap(usize::MAX, Ordering::Relaxed));
            eprintln!(
                "{bytes} bytes are allocated at once, and {live} are in use; the limits are {limits:?}"
            );
            std::process::abort();
        }
    }
}

// SAFETY: the system's allocator, after a check.
unsafe impl GlobalAlloc for Bounded {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        Bounded::require(layout.size(), layout.size());
        // SAFETY: as this function's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as this function's.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        Bounded::require(bytes, bytes.wrapping_sub(layout.size()));
        // SAFETY: as this function's.
        unsafe { System.realloc(ptr, layout, bytes) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        Bounded::require(layout.size(), layout.size());
        // SAFETY: as this function's.
        unsafe { System.alloc_zeroed(layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Bounded = Bounded;

/// Runs `parse`. Ends the process if it allocates more at once, or in all, than the length of `data` explains.
pub fn bounded(data: &[u8], parse: impl FnOnce(&[u8])) {
    let limit = ALLOWANCE + PER_BYTE * data.len();
    let before = LIVE.load(Ordering::Relaxed);
    LIMIT.store(limit, Ordering::Relaxed);
    MOST.store(before + TOTAL * limit, Ordering::Relaxed);
    parse(data);
    LIMIT.store(usize::MAX, Ordering::Relaxed);
    MOST.store(usize::MAX, Ordering::Relaxed);
}

/// Writes a target's seeds into the folder that `GEMMESH_FUZZ_SEEDS` names, if it does, before the fuzzer reads it.
pub fn write(target: &str, seeds: &[Vec<u8>]) {
    let Some(folder) = std::env::var_os("GEMMESH_FUZZ_SEEDS") else {
        return;
    };
    for (number, seed) in seeds.iter().enumerate() {
        let path = Path::new(&folder).join(format!("{target}-{number}"));
        fs::write(&path, seed).unwrap_or_else(|e| panic!("cannot write {}: {e}", path.display()));
    }
}
