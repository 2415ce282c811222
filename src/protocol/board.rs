//! What ranks let one another read beside the flags: what each calls, and the group's first failure.
//!
//! Like flags these are atomics over zeroed memory, so any rank may die at any moment and leave them readable.

use super::epoch::Epoch;
use super::primitive::{AtomicU8, AtomicU32, AtomicU64, Ordering, fence};

/// What a rank calls as one operation, in `N` words. One writer.
#[repr(C)]
pub struct Post<const N: usize> {
    /// 0 before the first post, else more than any epoch: 2³² + the epoch.
    stamp: AtomicU64,
    words: [AtomicU64; N],
}

impl<const N: usize> Post<N> {
    /// A post that nothing has been written to. The same as zeroed memory.
    #[allow(clippy::new_without_default)]
    pub fn new() -> Post<N> {
        Post {
            stamp: AtomicU64::new(0),
            words: std::array::from_fn(|_| AtomicU64::new(0)),
        }
    }

    /// The epoch of the latest post.
    ///
    /// Acquire: what its rank has read before it posted that, it has read before what the caller does next.
    pub fn latest(&self) -> Option<Epoch> {
        let stamp = self.stamp.load(Ordering::Acquire);
        (stamp != 0).then(|| Epoch::from_raw(stamp as u32))
    }

    /// What was posted for `epoch`, if that is the latest post.
    pub fn read(&self, epoch: Epoch) -> Option<[u64; N]> {
        (self.latest() == Some(epoch))
            .then(|| std::array::from_fn(|word| self.words[word].load(Ordering::Relaxed)))
    }

    /// Posts `words` for `epoch`, and returns the first of `others` that differs. Of two ranks that differ, the one
    /// that posts later sees it at least.
    pub fn post<'p>(
        &self,
        epoch: Epoch,
        words: [u64; N],
        others: impl IntoIterator<Item = (usize, &'p Post<N>)>,
    ) -> Option<(usize, [u64; N])> {
        for (cell, word) in self.words.iter().zip(words) {
            cell.store(word, Ordering::Relaxed);
        }
        // Release: whoever sees the stamp sees the words.
        let stamp = 1 << 32 | u64::from(epoch.raw());
        self.stamp.store(stamp, Ordering::Release);
        // Store, then load, on every rank: without a sequentially consistent fence in between, two ranks
        // that post at once could both miss the other's post.
        fence(Ordering::SeqCst);
        others
            .into_iter()
            .filter_map(|(rank, post)| Some((rank, post.read(epoch)?)))
            .find(|(_, theirs)| *theirs != words)
    }
}

/// The first failure, in at most `BYTES` bytes. Any rank may write it, one does.
#[repr(C)]
pub struct Report<const BYTES: usize> {
    /// 0, or 1 + the rank that reports.
    by: AtomicU32,
    /// The length of `bytes`, once they are written.
    len: AtomicU32,
    bytes: [AtomicU8; BYTES],
}

impl<const BYTES: usize> Report<BYTES> {
    /// A report that nobody has written. The same as zeroed memory.
    #[allow(clippy::new_without_default)]
    pub fn new() -> Report<BYTES> {
        Report {
            by: AtomicU32::new(0),
            len: AtomicU32::new(0),
            bytes: std::array::from_fn(|_| AtomicU8::new(0)),
        }
    }

    /// The rank that reports, if one does. It may still be writing.
    pub fn reporter(&self) -> Option<usize> {
        (self.by.load(Ordering::Relaxed) as usize).checked_sub(1)
    }

    /// Reports `bytes`, as many as there is room for, unless a rank did so before. Whether it is the first.
    pub fn write(&self, rank: usize, bytes: &[u8]) -> bool {
        let by = rank as u32 + 1;
        let claimed = self
            .by
            .compare_exchange(0, by, Ordering::Relaxed, Ordering::Relaxed);
        if claimed.is_err() {
            return false;
        }
        for (cell, byte) in self.bytes.iter().zip(bytes) {
            cell.store(*byte, Ordering::Relaxed);
        }
        // Release: whoever sees the length sees the bytes.
        let len = bytes.len().min(BYTES) as u32;
        self.len.store(len, Ordering::Release);
        true
    }

    /// What was reported, once it is written.
    pub fn read(&self) -> Option<Vec<u8>> {
        let len = self.len.load(Ordering::Acquire) as usize;
        let bytes = self.bytes.iter().take(len);
        (len > 0).then(|| bytes.map(|cell| cell.load(Ordering::Relaxed)).collect())
    }
}
