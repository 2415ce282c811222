//! What stands in the place of `memory.rs` under miri, which knows no shared mappings, and under an address sanitizer
//! (`--cfg gemmesh_heap`), which sees where memory of the heap ends: for ranks of one process, as threads are.
#![allow(unsafe_code)]

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

/// As a mapping begins.
const PAGE: usize = 4096;
/// More than tests need, and less than there is.
const MOST: usize = 64 << 30;

/// Zeroed memory, for as long as somebody holds it.
#[derive(Debug)]
struct HeapBlock {
    begin: NonNull<u8>,
    layout: Layout,
}

// SAFETY: memory belongs to the process, not to a thread.
unsafe impl Send for HeapBlock {}
// SAFETY: as above; shared access yields only a raw pointer.
unsafe impl Sync for HeapBlock {}

impl HeapBlock {
    fn zeroed(bytes: usize) -> io::Result<Arc<HeapBlock>> {
        require_available(bytes)?;
        let layout = Layout::from_size_align(bytes.max(1), PAGE).map_err(io::Error::other)?;
        // SAFETY: there is at least one byte.
        let begin = NonNull::new(unsafe { alloc_zeroed(layout) });
        let begin = begin.ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))?;
        Ok(Arc::new(HeapBlock { begin, layout }))
    }
}

impl Drop for HeapBlock {
    fn drop(&mut self) {
        // SAFETY: allocated like this, and no one holds it any more.
        unsafe { dealloc(self.begin.as_ptr(), self.layout) };
    }
}

/// As the one of `memory.rs`.
#[derive(Debug)]
pub struct Mapping(Arc<HeapBlock>);

impl Mapping {
    /// Memory of this process alone.
    pub fn private(bytes: usize) -> io::Result<Mapping> {
        HeapBlock::zeroed(bytes).map(Mapping)
    }

    /// The memory that a descriptor names.
    pub fn shared(fd: impl AsFd, bytes: usize) -> io::Result<Mapping> {
        let file = File::from(fd.as_fd().try_clone_to_owned()?);
        let number = file.metadata()?.len() as usize;
        let shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
        let block = number.checked_sub(1).and_then(|index| shared.get(index));
        let block = block.filter(|block| block.layout.size() == bytes.max(1));
        let block = block.ok_or_else(|| io::Error::other("no such memory of this process"))?;
        Ok(Mapping(block.clone()))
    }

    /// The first byte, at the beginning of a page.
    pub fn as_ptr(&self) -> *mut u8 {
        self.0.begin.as_ptr()
    }
}

/// Kept to the end: a descriptor does not say when it is closed.
static SHARED: Mutex<Vec<Arc<HeapBlock>>> = Mutex::new(Vec::new());

/// Zeroed memory, and a descriptor that names it: of a file without a name, as long as the memory's number.
pub(crate) fn memfd(bytes: usize) -> io::Result<OwnedFd> {
    let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
    shared.push(HeapBlock::zeroed(bytes)?);
    // Not by a name of ours, of which tests see in the same moment that it was left behind.
    let name = format!("heap-{}-{}", std::process::id(), shared.len());
    let path = std::env::temp_dir().join(name);
    let file = File::create_new(&path)?;
    fs::remove_file(&path)?;
    file.set_len(shared.len() as u64)?;
    Ok(file.into())
}

/// Whether there may be so much.
fn require_available(bytes: usize) -> io::Result<()> {
    if bytes <= MOST {
        Ok(())
    } else {
        Err(io::ErrorKind::OutOfMemory.into())
    }
}
