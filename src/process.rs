//! Values that belong to one process. A fork has copies of them, which it must leave alone.
//!
//! A forked child has its parent's memory and descriptors, but only the thread that forked. Other threads may have held
//! locks at that moment, which no one releases in the child, and joining them would last for ever. Shared memory and
//! connections are still the parent's, so a farewell of the child would be taken for the parent's.

#![allow(unsafe_code)]

use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::error::{Kind, Result};

/// A process. The upper half is its pid, and the lower half is the time when it first asked. The time is needed,
/// because PIDs repeat across namespaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Process(u64);

impl Process {
    /// The calling process. Usually this costs one load.
    pub fn this() -> Process {
        let ask = |time: u64| u64::from(std::process::id()) << 32 | time & 0xffff_ffff;
        let Some(word) = word() else {
            return Process(ask(0));
        };
        // Only this process writes the word, and it publishes nothing else by it.
        match word.load(Ordering::Relaxed) {
            0 => {
                let new = ask(crate::profile::span::now());
                let known = word.compare_exchange(0, new, Ordering::Relaxed, Ordering::Relaxed);
                Process(known.map_or_else(|known| known, |_| new))
            }
            known => Process(known),
        }
    }

    /// True if it is the calling process.
    pub fn is_this(self) -> bool {
        self == Process::this()
    }

    /// A process in which no test runs.
    #[cfg(test)]
    pub fn another() -> Process {
        Process(1)
    }

    fn number(self) -> u32 {
        (self.0 >> 32) as u32
    }

    /// Fails if the caller is not in this process, which belongs to `rank`.
    pub fn require(self, rank: usize) -> Result<()> {
        let child = Process::this();
        if self == child {
            return Ok(());
        }
        let (process, child) = (self.number(), child.number());
        let what = format!(
            "process {child} is a fork of process {process}, which is the rank; make the call there, or exec a program in \
             the fork that joins as a rank of its own"
        );
        Err(Kind::Misuse { what }.on(rank))
    }
}

/// A word that is zero until this process writes it, because the kernel clears its page in every kind of fork. None if
/// the kernel can't do that.
fn word() -> Option<&'static AtomicU64> {
    // Null until it is first asked for. This is no lock, because a lock that is held during a fork stays locked in the
    // child.
    static WORD: AtomicPtr<AtomicU64> = AtomicPtr::new(null_mut());
    let known = WORD.load(Ordering::Acquire);
    if !known.is_null() {
        // SAFETY: the pointer is to a page that was mapped below and is never unmapped.
        return Some(unsafe { &*known });
    }
    if cfg!(miri) {
        return None;
    }
    const PAGE: usize = 4096;
    // SAFETY: a new mapping at an address that the kernel chooses overlaps nothing, and the advice applies only to it.
    // It is zeroed, and aligned for the word.
    let page = unsafe {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let page = rustix::mm::mmap_anonymous(null_mut(), PAGE, access, MapFlags::PRIVATE);
        let page = page.ok()?;
        if rustix::mm::madvise(page, PAGE, Advice::LinuxWipeOnFork).is_err() {
            let _ = rustix::mm::munmap(page, PAGE);
            return None;
        }
        page
    };
    let first = WORD.compare_exchange(null_mut(), page.cast(), Ordering::AcqRel, Ordering::Acquire);
    // SAFETY: if another thread was first, its page is never unmapped, and no one knows this one.
    unsafe {
        if let Err(first) = first {
            let _ = rustix::mm::munmap(page, PAGE);
            return Some(&*first);
        }
        Some(&*page.cast::<AtomicU64>())
    }
}

/// A value that is dropped only in the process that made it. In other processes dropping it does nothing.
pub struct Own<T> {
    process: Process,
    value: ManuallyDrop<T>,
}

impl<T> Own<T> {
    pub fn new(value: T) -> Own<T> {
        Own {
            process: Process::this(),
            value: ManuallyDrop::new(value),
        }
    }
}

impl<T> Deref for Own<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> DerefMut for Own<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}

impl<T: fmt::Debug> fmt::Debug for Own<T> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        (**self).fmt(f)
    }
}

impl<T> Drop for Own<T> {
    fn drop(&mut self) {
        if self.process.is_this() {
            // SAFETY: the value is dropped once and not used afterwards.
            unsafe {
                ManuallyDrop::drop(&mut self.value);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    struct Counts<'a>(&'a AtomicUsize);

    impl Drop for Counts<'_> {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn all_threads_are_of_one_process() {
        let here = Process::this();
        assert_eq!(here.number(), std::process::id());
        let threads: Vec<_> = (0..4).map(|_| std::thread::spawn(Process::this)).collect();
        for thread in threads {
            assert_eq!(thread.join().unwrap(), here);
        }
    }

    #[test]
    fn what_another_process_made_is_not_dropped_here() {
        let drops = AtomicUsize::new(0);
        drop(Own::new(Counts(&drops)));
        assert_eq!(drops.load(Ordering::Relaxed), 1);
        let mut elsewhere = Own::new(Counts(&drops));
        elsewhere.process = Process::another();
        let error = elsewhere.process.require(3).unwrap_err().to_string();
        let words = format!(
            "rank 3: process {} is a fork of process 0",
            std::process::id()
        );
        assert!(error.starts_with(&words), "{error}");
        drop(elsewhere);
        assert_eq!(drops.load(Ordering::Relaxed), 1);
    }
}
