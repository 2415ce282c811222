//! What ranks show one another besides flags: each rank's latest call, why a rank was refused a call, and the group's
//! first failure.
//!
//! Like flags these are atomics over zeroed memory. So if a rank dies at any moment, they stay readable.

use super::primitive::{AtomicU8, AtomicU32, AtomicU64, Ordering, fence};

/// A rank's latest call, in `N` words, and its number. Calls are numbered from 1. It has one writer.
///
/// The first `KEY` words tell calls apart, and the rest is for readers, so comparing takes one line of the cache.
#[repr(C, align(64))]
pub struct Post<const N: usize, const KEY: usize> {
    /// 0 before the first post.
    number: AtomicU64,
    words: [AtomicU64; N],
}

impl<const N: usize, const KEY: usize> Post<N, KEY> {
    /// A post that nothing has been written to. The same as zeroed memory.
    #[allow(clippy::new_without_default)]
    pub fn new() -> Post<N, KEY> {
        Post {
            number: AtomicU64::new(0),
            words: std::array::from_fn(|_| AtomicU64::new(0)),
        }
    }

    /// The number of the latest call that was posted here; 0 if none was.
    ///
    /// Acquire: all reads of that rank before its post happen before what the caller does next.
    pub fn latest(&self) -> u64 {
        self.number.load(Ordering::Acquire)
    }

    /// What was posted as call `number`, if that is the latest post.
    pub fn read(&self, number: u64) -> Option<[u64; N]> {
        (self.latest() == number).then(|| self.first())
    }

    fn first<const COUNT: usize>(&self) -> [u64; COUNT] {
        std::array::from_fn(|word| self.words[word].load(Ordering::Relaxed))
    }

    /// Posts `words` as call `number`, and returns the first of `others` whose key differs, with its words. Of two
    /// ranks that differ, the one that posts later sees it at least.
    pub fn post<'p>(
        &self,
        number: u64,
        words: [u64; N],
        others: impl IntoIterator<Item = (usize, &'p Post<N, KEY>)>,
    ) -> Option<(usize, [u64; N])> {
        for (cell, word) in self.words.iter().zip(words) {
            cell.store(word, Ordering::Relaxed);
        }
        // Release: whoever sees the number sees the words.
        self.number.store(number, Ordering::Release);
        // Store, then load, on every rank: without a sequentially consistent fence in between, two ranks
        // that post at once could both miss the other's post.
        fence(Ordering::SeqCst);
        others
            .into_iter()
            .filter(|(_, post)| post.latest() == number)
            .find(|(_, post)| post.first::<KEY>() != words[..KEY])
            .map(|(rank, post)| (rank, post.first()))
    }
}

/// A rank's latest note about one of its calls, in at most `BYTES` bytes. It has one writer, which may write the next
/// note while others read, or die while it writes.
#[repr(C)]
pub struct Note<const BYTES: usize> {
    /// Odd while a note is written.
    version: AtomicU64,
    /// Of the call.
    number: AtomicU64,
    len: AtomicU64,
    bytes: [AtomicU8; BYTES],
}

impl<const BYTES: usize> Note<BYTES> {
    /// A note about no call. The same as zeroed memory.
    #[allow(clippy::new_without_default)]
    pub fn new() -> Note<BYTES> {
        Note {
            version: AtomicU64::new(0),
            number: AtomicU64::new(0),
            len: AtomicU64::new(0),
            bytes: std::array::from_fn(|_| AtomicU8::new(0)),
        }
    }

    /// Replaces the note by `bytes`, as many as there is room for, about call `number`.
    pub fn write(&self, number: u64, bytes: &[u8]) {
        let version = self.version.load(Ordering::Relaxed);
        self.version.store(version + 1, Ordering::Relaxed);
        // Whoever sees any of what follows sees the odd version, once it has passed a fence of its own.
        fence(Ordering::Release);
        self.number.store(number, Ordering::Relaxed);
        self.len.store(bytes.len() as u64, Ordering::Relaxed);
        for (cell, byte) in self.bytes.iter().zip(bytes) {
            cell.store(*byte, Ordering::Relaxed);
        }
        // Release: whoever sees the version sees the note.
        self.version.store(version + 2, Ordering::Release);
    }

    /// What was noted about call `number`, if that is the latest note and it is not being written at this moment.
    pub fn read(&self, number: u64) -> Option<Vec<u8>> {
        let (_, _, bytes) = self.read_if(|_, its| its == number)?;
        Some(bytes)
    }

    /// The latest note, unless its version is `known` or it is being written at this moment: its version, its number and
    /// its bytes. The first version is 0, and there is no note then.
    pub fn read_unless(&self, known: u64) -> Option<(u64, u64, Vec<u8>)> {
        self.read_if(|version, _| version != known)
    }

    /// The latest note with its version and number, if both are `wanted` and it is not being written at this moment.
    fn read_if(&self, wanted: impl FnOnce(u64, u64) -> bool) -> Option<(u64, u64, Vec<u8>)> {
        let version = self.version.load(Ordering::Acquire);
        let number = self.number.load(Ordering::Relaxed);
        if version % 2 == 1 || !wanted(version, number) {
            return None;
        }
        let len = self.len.load(Ordering::Relaxed) as usize;
        let bytes = self.bytes.iter().take(len);
        let bytes = bytes.map(|cell| cell.load(Ordering::Relaxed)).collect();
        // If any of it was of a later note, that note's odd version is seen after this.
        fence(Ordering::Acquire);
        let is_whole = self.version.load(Ordering::Relaxed) == version;
        is_whole.then_some((version, number, bytes))
    }
}

/// The first failure, in at most `BYTES` bytes. Any rank may write it, and one does.
#[repr(C)]
pub struct Report<const BYTES: usize> {
    /// 0, or 1 + the rank that reports.
    by: AtomicU32,
    /// The length of `bytes`, once they are written.
    len: AtomicU32,
    bytes: [AtomicU8; BYTES],
}

impl<const BYTES: usize> Report<BYTES> {
    /// A report that no one has written. The same as zeroed memory.
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

    /// Reports `bytes`, as many as there is room for, unless a rank did so before. Returns true if this report is the
    /// first.
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
