//! What all fuzz targets share: seeds on disk, and a bound on what is allocated.

use std::alloc::{GlobalAlloc, Layout, System};
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

/// What may be allocated at once, whatever the input says ...
const ALLOWANCE: usize = 1 << 20;
/// ... and for each byte of the input: a list grows by doubling, and in JSON a number of eight bytes may take two.
const PER_BYTE: usize = 16;

/// Bytes that one allocation may take at this moment.
static LIMIT: AtomicUsize = AtomicUsize::new(usize::MAX);

struct Bounded;

impl Bounded {
    fn require(bytes: usize) {
        // What tells of a panic may take what it needs.
        if bytes > LIMIT.load(Ordering::Relaxed) && !std::thread::panicking() {
            // What prints also allocates.
            let limit = LIMIT.swap(usize::MAX, Ordering::Relaxed);
            eprintln!("{bytes} bytes are allocated at once, more than {limit}");
            std::process::abort();
        }
    }
}

// SAFETY: the system's allocator, after a check.
unsafe impl GlobalAlloc for Bounded {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        Bounded::require(layout.size());
        // SAFETY: as this function's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: as this function's.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        Bounded::require(bytes);
        // SAFETY: as this function's.
        unsafe { System.realloc(ptr, layout, bytes) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        Bounded::require(layout.size());
        // SAFETY: as this function's.
        unsafe { System.alloc_zeroed(layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Bounded = Bounded;

/// Runs `parse`. Ends the process if it allocates more at once than the length of `data` explains.
pub fn bounded(data: &[u8], parse: impl FnOnce(&[u8])) {
    LIMIT.store(ALLOWANCE + PER_BYTE * data.len(), Ordering::Relaxed);
    parse(data);
    LIMIT.store(usize::MAX, Ordering::Relaxed);
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
