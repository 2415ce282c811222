//! What a backend does, and what it is told.

use std::any::Any;
use std::ffi::c_void;
use std::fmt::Debug;
use std::num::NonZeroUsize;

use crate::error::Result;
use crate::explanation::Prediction;
use crate::profile::span::Span;
use crate::protocol::epoch::Epoch;
use crate::ranks::members::Members;
use crate::schedule::{Config, Numerics, Problem, Request, Schedule, Transfer};

/// How many programs a group keeps for the short calls: those of some hundred M of a serving loop, for a few products
/// each.
#[doc(hidden)]
pub const KEPT_PROGRAMS: usize = KEPT.get();
/// The same, as caches take it.
pub(crate) const KEPT: NonZeroUsize = NonZeroUsize::new(512).expect("512 is not 0");

/// A way to run the protocol: [`Host`](crate::Host) on any machine, `Cuda` on NVIDIA GPUs (feature `cuda`).
///
/// Sealed: the protocol's safety rests on its implementations.
pub trait Backend: sealed::Implementation {}

/// What gives another library's memory back when it is dropped.
pub struct Owner(#[allow(dead_code)] Box<dyn Any + Send>);

// SAFETY: nobody touches it but to drop it.
#[allow(unsafe_code)]
unsafe impl Sync for Owner {}

impl Owner {
    pub fn new(owner: impl Any + Send) -> Owner {
        Owner(Box::new(owner))
    }
}

impl Debug for Owner {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.write_str("Owner")
    }
}

/// What a backend is told when it is opened.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    pub workers: Option<usize>,
    /// Bytes per second of the host's copies, if they are to be that slow.
    pub link: Option<usize>,
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    pub device: Option<usize>,
    pub first_epoch: Epoch,
}

/// The side of backends that only this library sees.
pub(crate) mod sealed {
    use super::*;

    /// What a call binds to a number of its schedule. Shapes have been checked.
    #[derive(Debug)]
    pub enum Bound<'a, B: Implementation> {
        /// A matrix that the call does without.
        Nothing,
        /// The same on every rank.
        Symmetric(&'a B::Symmetric),
        /// This rank's own from a byte on, and only read.
        Input(&'a B::Buffer, usize),
        /// This rank's own from a byte on, and written: by nobody else, nor read.
        Output(&'a B::Buffer, usize),
        /// This rank's memory of what ranks share, from a byte on: written, and not shared meanwhile.
        Part(&'a mut B::Symmetric, usize),
    }

    impl<'a, B: Implementation> Bound<'a, B> {
        /// Memory that ranks share.
        pub fn symmetric(&self) -> Option<&'a B::Symmetric> {
            match self {
                Bound::Symmetric(memory) => Some(memory),
                _ => None,
            }
        }
    }

    /// What a caller does with rows of the first matrix: this rank's own if there is no transfer, or those that a
    /// transfer has brought. On a backend with streams they are there on a stream, for what is put there from now on;
    /// elsewhere they are there.
    pub type Consumer<'a> = dyn FnMut(Option<&Transfer>, *mut c_void) -> Result<()> + 'a;

    /// What a caller does to make rows. On a backend with streams they are there once a stream has done what was put on
    /// it; elsewhere when the function returns.
    pub type Producer<'a> = dyn FnMut(&Request, *mut c_void) -> Result<()> + 'a;

    /// What a caller does amid an operation.
    pub enum Callback<'a> {
        /// Called once with the own rows and then with each arrival, in the schedule's order. Whatever it returns, all
        /// that is moved is moved; after an error it is not called again.
        Consumer(&'a mut Consumer<'a>),
        /// Called for each request, in the schedule's order. After an error it is not called again, and the operation
        /// fails.
        Producer(&'a mut Producer<'a>),
    }

    /// A call of a schedule.
    pub struct Call<'a, B: Implementation> {
        /// The operation's number; that of the one before for what is no operation.
        pub epoch: Epoch,
        /// By number in the schedule.
        pub matrices: &'a [Bound<'a, B>],
        /// Where what happened when is noted.
        pub trace: Option<&'a mut Vec<Span>>,
        /// What the caller does beside.
        pub callback: Option<Callback<'a>>,
    }

    /// The backend's side of the library.
    pub trait Implementation: Sized + Send + Sync + 'static {
        /// As in error messages and results.
        const NAME: &'static str;
        /// The bytes of a row of a matrix that ranks share must be a multiple of this.
        const ROW_ALIGNMENT: usize;
        /// Memory that ranks share comes in multiples of so many bytes.
        const BLOCK: usize;
        /// Memory that every rank of the group maps.
        type Symmetric: Send + Sync + Debug;
        /// Memory of this rank's own.
        type Buffer: Send + Sync + Debug;
        /// A schedule, ready to run.
        type Program: Send + Sync + Debug;

        /// Collective. Allocates the flags and starts what runs operations.
        fn open(members: &Members, options: &OpenOptions) -> Result<Self>;
        /// The group ends: lets go of the peers' memory, then of its own when no peer maps it any more.
        fn close(&mut self, members: &Members);
        /// A good way to cut up what is asked.
        fn default_config(&self, problem: &Problem, numerics: Numerics) -> Config;
        /// Whether rows of so many bytes a rank, which are exchanged and not multiplied, are better stored by a kernel
        /// than copied: the same on all ranks.
        fn is_better_stored(&self, _bytes: usize) -> bool {
            false
        }
        /// What it is expected to take, cut up like that: parts of it, and at last the whole. Nothing if that is not
        /// known.
        fn predict(&self, _problem: &Problem, _config: &Config) -> Vec<Prediction> {
            Vec::new()
        }
        /// Whether what is begun now is only recorded, to run later and often.
        fn is_recording(&self, members: &Members) -> Result<bool>;
        /// Makes a schedule ready to run.
        fn prepare(&self, members: &Members, schedule: Schedule) -> Result<Self::Program>;
        /// The schedule of a program.
        fn schedule(program: &Self::Program) -> &Schedule;

        /// Collective, as `call`. Zeroed memory of `bytes` bytes on each rank.
        fn symmetric(&self, members: &Members, call: &str, bytes: usize)
        -> Result<Self::Symmetric>;
        /// Memory of another library's for `shape[0]` rows of `shape[1]` bytes, `pitch` bytes from row to row. `owner`
        /// is dropped when nothing uses it any more.
        ///
        /// # Safety
        /// Until then it is there, and nobody else writes it in a way that the order of this rank's operations does not
        /// know.
        #[allow(unsafe_code)]
        unsafe fn adopt(
            &self,
            ptr: u64,
            shape: [usize; 2],
            pitch: usize,
            owner: Owner,
        ) -> Self::Buffer;
        /// Where a buffer lies, and the bytes from row to row.
        fn place(of: &Self::Buffer) -> (u64, usize);
        /// What DLPack calls the memory: the type of the device, and its number.
        fn dlpack_device(&self) -> (i32, i32);
        /// Zeroed memory for `rows` rows of `width` bytes.
        fn buffer(&self, members: &Members, rows: usize, width: usize) -> Result<Self::Buffer>;

        /// Copies into this rank's memory, from byte `offset` on. The caller has checked the range.
        fn write_symmetric(
            &self,
            to: &mut Self::Symmetric,
            offset: usize,
            from: &[u8],
        ) -> Result<()>;
        /// Copies from this rank's memory, from byte `offset` on. The caller has checked the range.
        fn read_symmetric(
            &self,
            from: &mut Self::Symmetric,
            offset: usize,
            to: &mut [u8],
        ) -> Result<()>;
        /// Copies to a buffer's first rows, as many as `from` has.
        fn write(&self, to: &mut Self::Buffer, from: &[u8]) -> Result<()>;
        /// Copies a buffer's first rows, as many as `to` has room for.
        fn read(&self, from: &Self::Buffer, to: &mut [u8]) -> Result<()>;

        /// Does what the program's schedule says.
        fn run(
            &self,
            members: &Members,
            program: &Self::Program,
            call: Call<'_, Self>,
        ) -> Result<()>;

        /// Returns when everything that was begun is complete.
        fn synchronize(&self, members: &Members) -> Result<()>;
    }
}
