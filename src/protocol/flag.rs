//! Flags, which are words of symmetric memory that say how far a rank has come.

use super::epoch::Epoch;
use super::primitive::{AtomicU32, Ordering};

/// One word of symmetric memory with one writer. It holds the epoch in which it was last written.
#[repr(transparent)]
#[derive(Debug)]
pub struct Flag(AtomicU32);

impl Flag {
    /// A flag that says that everything up to `epoch` has happened.
    pub fn new(epoch: Epoch) -> Flag {
        Flag(AtomicU32::new(epoch.raw()))
    }

    /// Says that what this flag stands for has happened in `epoch`.
    ///
    /// Release: whoever sees this value with [`Flag::reached`] also sees every byte written before it.
    pub fn signal(&self, epoch: Epoch) {
        self.0.store(epoch.raw(), Ordering::Release);
    }

    /// True if `epoch` has been signalled.
    ///
    /// Acquire: pairs with [`Flag::signal`], so that the bytes that the flag guards may be read.
    pub fn reached(&self, epoch: Epoch) -> bool {
        epoch.reached_by(self.0.load(Ordering::Acquire))
    }

    /// The value, for reports only. It orders nothing.
    pub fn peek(&self) -> u32 {
        self.0.load(Ordering::Relaxed)
    }
}

/// The flags in one rank's symmetric memory. Only that rank polls them. The flags of a rank of another host are
/// [`FlagBlock::ELSEWHERE`].
#[derive(Clone, Copy, Debug)]
pub struct FlagBlock<'a> {
    /// `ready[p]`, written by rank p: p's own rows are final and may be pulled, and its gathered rows may be
    /// overwritten.
    pub ready: &'a [Flag],
    /// `done[p]`, written by rank p: p has made its last transfer out of this rank's memory, or into it.
    pub done: &'a [Flag],
    /// `chunk[f]`, written by this rank's copy engine or by its thread that receives over a network, or by the rank that
    /// pushes or stores: transfer f of the schedule has arrived.
    pub chunk: &'a [Flag],
}

impl FlagBlock<'_> {
    /// No flags.
    pub const ELSEWHERE: FlagBlock<'static> = FlagBlock {
        ready: &[],
        done: &[],
        chunk: &[],
    };
}

/// What a wait is for. Errors name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Awaited {
    /// `ready[source]`
    Ready {
        /// The rank whose rows are to be pulled, or that they are to be pushed to.
        source: usize,
    },
    /// `chunk[flag]`
    Chunk {
        /// The rank in whose memory the chunk lies until it is moved.
        source: usize,
        /// The flag's index in the schedule.
        flag: usize,
        /// True if this rank pulls it, or receives it over a network. Then the wait is for a thread or an engine of this
        /// rank, which may wait for another rank.
        pulled: bool,
    },
    /// Rows or partials in this rank's low-latency area. Each of its words says whether it has come.
    LowLatency {
        /// The rank that makes them.
        source: usize,
    },
    /// A block of this rank's product, or a block that its caller makes.
    Produced {
        /// This rank.
        rank: usize,
        /// The number of the block.
        block: usize,
    },
    /// `done[peer]`
    Done {
        /// The rank that makes the transfers.
        peer: usize,
    },
    /// The end of a transfer over a network, which no flag says.
    Taken {
        /// The rank that receives it.
        peer: usize,
    },
}

impl Awaited {
    /// What [`Awaited::peer`] has not done for `rank`, which waits. The words follow the peer's name.
    pub fn describe(self, rank: usize) -> String {
        match self {
            Awaited::Ready { .. } => "has not begun it".into(),
            Awaited::Chunk { .. } | Awaited::LowLatency { .. } => {
                format!("has rows that have not come to rank {rank}")
            }
            Awaited::Produced { .. } => "has not made what it sends".into(),
            Awaited::Taken { .. } => format!("has not taken what rank {rank} sends"),
            Awaited::Done { .. } => {
                format!("has not moved all that it takes from rank {rank}, or brings it")
            }
        }
    }

    /// The rank that is at fault if this wait never ends.
    pub fn peer(self) -> usize {
        match self {
            Awaited::Ready { source }
            | Awaited::Chunk { source, .. }
            | Awaited::LowLatency { source } => source,
            Awaited::Produced { rank, .. } => rank,
            Awaited::Done { peer } | Awaited::Taken { peer } => peer,
        }
    }
}

/// A way to wait for flags, with a deadline, that watches for failures and gives way to other threads.
pub trait Wait {
    /// Why a wait ended without its flag.
    type Error;

    /// Returns when `flag` has reached `epoch`.
    fn wait(&self, flag: &Flag, epoch: Epoch, awaited: Awaited) -> Result<(), Self::Error>;
}
