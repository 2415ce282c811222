//! Values that belong to one process. A fork has copies of them, which it must leave alone.
//!
//! A forked child has its parent's memory and descriptors, but only the thread that forked. Other threads may have held
//! locks at that moment, which nobody releases in the child, and joining them would last for ever. Shared memory and
//! connections are still the parent's, so a farewell of the child would be taken for the parent's.

#![allow(unsafe_code)]

use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::error::{Error, Result};

/// A process. The upper half is its number, the lower half the time when it first asked, because a child may be number
/// 1 of its own namespace as its parent is of its.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Process(u64);

impl Process {
    /// The calling process. It usually costs a load.
    pub fn this() -> Process {
        let ask = |time: u64| u64::from(std::process::id()) << 32 | time & 0xffff_ffff;
        let Some(word) = word() else {
            return Process(ask(0));
        };
        // Only this process writes the word, and nothing else is published by it.
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

    /// None that a test runs in.
    #[cfg(test)]
    pub fn another() -> Process {
        Process(1)
    }

    fn number(self) -> u32 {
        (self.0 >> 32) as u32
    }

    /// Fails in every process but this one, which belongs to `rank`.
    pub fn require(self, rank: usize) -> Result<()> {
        let child = Process::this();
        if self == child {
            return Ok(());
        }
        Err(Error::Forked {
            rank,
            process: self.number(),
            child: child.number(),
        })
    }
}

/// A word that is zero until this process writes it, for the kernel clears its page in a fork, however that is made.
/// None where it cannot.
fn word() -> Option<&'static AtomicU64> {
    // Null: not asked for. A lock would be held for ever in the child of a fork amid that.
    static WORD: AtomicPtr<AtomicU64> = AtomicPtr::new(null_mut());
    let known = WORD.load(Ordering::Acquire);
    if !known.is_null() {
        // SAFETY: below, a page that is never unmapped is put there.
        return Some(unsafe { &*known });
    }
    if cfg!(miri) {
        return None;
    }
    const PAGE: usize = 4096;
    // SAFETY: a new mapping at an address of the kernel's choice overlaps nothing, and the advice is for it alone. It
    // is zeroed and aligned for the word.
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
    // SAFETY: the page of another thread that was first is never unmapped, and this one nobody knows then.
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
            // SAFETY: dropped once, and not used after this.
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
        assert_eq!(
            elsewhere.process.require(3),
            Err(Error::Forked {
                rank: 3,
                process: 0,
                child: std::process::id()
            })
        );
        drop(elsewhere);
        assert_eq!(drops.load(Ordering::Relaxed), 1);
    }
}
