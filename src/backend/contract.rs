//! The contract of a backend: what it does, and what it is given.

use std::any::Any;
use std::ffi::c_void;
use std::fmt::Debug;
use std::num::NonZeroUsize;
use std::sync::Arc;

use crate::backend::transport::HostTransport;
use crate::error::{MadeCall, Result};
use crate::explanation::Prediction;
use crate::profile::span::Span;
use crate::protocol::epoch::Epoch;
use crate::ranks::members::Members;
use crate::schedule::{Config, Numerics, Problem, Request, Schedule, Transfer};

/// How many programs a group keeps for the short calls.
///
/// This is enough for some hundred values of M in a serving loop, with a few products each.
pub const KEPT_PROGRAMS: usize = KEPT.get();
/// The same number, as caches take it. The compiler evaluates it.
pub(crate) const KEPT: NonZeroUsize = NonZeroUsize::new(512).expect("512 is not 0");

/// A way to run the protocol: [`Host`](crate::Host) on any machine, `Cuda` on NVIDIA GPUs (feature `cuda`).
///
/// Sealed: the protocol's safety rests on its implementations.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a backend",
    label = "must be `Host` or `Cuda`",
    note = "`Host` runs on any machine; `Cuda` runs on NVIDIA GPUs and needs the feature `cuda`"
)]
pub trait Backend: sealed::Implementation {}

/// An object that gives another library's memory back when it is dropped.
pub struct Owner(#[allow(dead_code)] Box<dyn Any + Send>);

// SAFETY: it is only ever dropped.
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

/// The options with which a backend is opened.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    pub workers: Option<usize>,
    /// The limit of the host's copies in bytes per second, if there is one.
    pub link: Option<usize>,
    /// What carries rows to other hosts on the host backend, if there are several.
    pub transport: Option<Arc<HostTransport>>,
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    pub device: Option<usize>,
    /// The most CTAs of a kernel.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    pub max_ctas: Option<usize>,
    /// Whether ranks of the group that this one is a part of share a GPU.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    pub shares_gpu: bool,
    pub first_epoch: Epoch,
}

/// The side of backends that only this library sees.
pub(crate) mod sealed {
    use super::*;

    /// What a call binds to a matrix of its schedule. Shapes have been checked.
    #[derive(Debug)]
    pub enum Bound<'a, B: Implementation> {
        /// The call does not have this matrix.
        Nothing,
        /// Symmetric memory: the same on every rank.
        Symmetric(&'a B::Symmetric),
        /// This rank's own memory from a byte on. It is only read.
        Input(&'a B::Buffer, usize),
        /// This rank's own memory from a byte on. It is written, and no one else reads or writes it.
        Output(&'a B::Buffer, usize),
        /// Memory of this rank's own that the caller keeps: its address, and the bytes from row to row. The call reads it,
        /// or writes it while no one else reads or writes it.
        Place(u64, usize),
        /// Rows of this rank's part of symmetric memory: the byte of the first row, and the bytes from row to row. The
        /// call reads them, or writes them while no one else reads or writes them.
        Rows(&'a B::Symmetric, usize, usize),
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

    /// The caller's function for rows of the first matrix: those that a transfer has brought or, without a transfer,
    /// this rank's own.
    ///
    /// On a backend with streams, the rows are there for work that is put on the given stream from now on. Elsewhere
    /// they are there when the function is called.
    pub type Consumer<'a> = dyn FnMut(Option<&Transfer>, *mut c_void) -> Result<()> + 'a;

    /// The caller's function that makes rows.
    ///
    /// On a backend with streams, the rows are there once the given stream has done the work that was put on it.
    /// Elsewhere they are there when the function returns.
    pub type Producer<'a> = dyn FnMut(&Request, *mut c_void) -> Result<()> + 'a;

    /// The caller's function that runs during an operation.
    pub enum Callback<'a> {
        /// Called once with the own rows and then with each arrival, in the schedule's order. Whatever it returns, all
        /// transfers are made. After an error it is not called again.
        Consumer(&'a mut Consumer<'a>),
        /// Called for each request, in the schedule's order. After an error it is not called again, and the operation
        /// fails.
        Producer(&'a mut Producer<'a>),
    }

    /// One run of a schedule.
    pub struct Run<'a, B: Implementation> {
        /// The operation's epoch. A call that is no operation has the epoch of the operation before.
        pub epoch: Epoch,
        /// By number in the schedule.
        pub matrices: &'a [Bound<'a, B>],
        /// Where the spans of a traced call go.
        pub trace: Option<&'a mut Vec<Span>>,
        /// The caller's function, if it has one.
        pub callback: Option<Callback<'a>>,
    }

    /// The backend's side of the library.
    pub trait Implementation: Sized + Send + Sync + 'static {
        /// The backend's name in error messages and results.
        const NAME: &'static str;
        /// The bytes of a row of a matrix that ranks share must be a multiple of this.
        const ROW_ALIGNMENT: usize;
        /// Memory that ranks share comes in multiples of this many bytes.
        const BLOCK: usize;
        /// Memory that every rank of the group maps.
        type Symmetric: Send + Sync + Debug;
        /// Memory of this rank's own.
        type Buffer: Send + Sync + Debug;
        /// A schedule, ready to run.
        type Program: Send + Sync + Debug;

        /// Opens the backend: allocates the flags, and starts its threads. Collective.
        fn open(members: &Members, options: &OpenOptions) -> Result<Self>;
        /// The options that open it again for a part of the group: on the same device, with as many threads.
        fn reopening(&self) -> OpenOptions;
        /// Closes the backend, because the group ends. Memory lives as long as any rank maps it.
        fn close(&mut self, members: &Members);
        /// A good configuration for a problem.
        fn default_config(&self, problem: &Problem, numerics: Numerics) -> Config;
        /// Whether a collective of this many bytes a rank is faster if a kernel stores the rows than if they are
        /// copied.
        ///
        /// All ranks get the same answer.
        fn is_better_stored(&self, _bytes: usize) -> bool {
            false
        }
        /// Predicts the times of a problem's parts, and last of the whole. Empty if they are not known.
        fn predict(&self, _problem: &Problem, _config: &Config) -> Vec<Prediction> {
            Vec::new()
        }
        /// Whether operations that begin now are captured into a graph, to run later and often.
        fn is_recording(&self, members: &Members) -> Result<bool>;
        /// Checks all of a schedule that [`Implementation::prepare`] checks, without memory for it.
        fn check(&self, schedule: &Schedule) -> Result<()>;
        /// Makes a schedule ready to run.
        fn prepare(&self, members: &Members, schedule: Schedule) -> Result<Self::Program>;
        /// The schedule of a program.
        fn schedule(program: &Self::Program) -> &Schedule;

        /// Allocates `bytes` zeroed bytes on each rank. Collective, as `call`.
        fn symmetric(
            &self,
            members: &Members,
            call: &MadeCall,
            bytes: usize,
        ) -> Result<Self::Symmetric>;
        /// Adopts another library's memory for `shape[0]` rows of `shape[1]` bytes, `pitch` bytes from row to row.
        ///
        /// `owner` is dropped when nothing uses the memory any more. Without an owner, the caller keeps the memory.
        ///
        /// # Safety
        /// While anything uses it the memory is valid, and all writes by others are ordered with this rank's
        /// operations.
        #[allow(unsafe_code)]
        unsafe fn adopt(
            &self,
            ptr: u64,
            shape: [usize; 2],
            pitch: usize,
            owner: Option<Owner>,
        ) -> Self::Buffer;
        /// The address of this rank's part of symmetric memory.
        fn address(of: &Self::Symmetric) -> u64;
        /// A buffer's address, and the bytes from row to row.
        fn place(of: &Self::Buffer) -> (u64, usize);
        /// DLPack's type and number of the device.
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
        /// Copies to a buffer's first rows, as many as `from` has.
        fn write(&self, to: &mut Self::Buffer, from: &[u8]) -> Result<()>;
        /// Copies the first rows, as many as `to` has room for, of `width` bytes each. The caller has checked that the
        /// matrix has them.
        ///
        /// No operation of this rank writes them meanwhile. If ranks share the memory, none runs at all, because peers
        /// may write it during one.
        fn read(&self, from: &Bound<'_, Self>, width: usize, to: &mut [u8]) -> Result<()>;
        /// Copies `rows` rows of `width` bytes after this rank's earlier operations and before its later ones. The
        /// caller has checked that both matrices have them.
        fn copy(
            &self,
            from: &Bound<'_, Self>,
            to: &Bound<'_, Self>,
            rows: usize,
            width: usize,
        ) -> Result<()>;

        /// Runs the program's schedule.
        fn run(
            &self,
            members: &Members,
            program: &Self::Program,
            call: Run<'_, Self>,
        ) -> Result<()>;

        /// Returns when everything that was begun is complete.
        fn synchronize(&self, members: &Members) -> Result<()>;

        /// As `synchronize`, and then waits for all other work on the stream of operations, however long it takes.
        fn settle(&self, members: &Members) -> Result<()>;

        /// Frees what was dropped while the device used it, and is used no longer. This calls functions of other
        /// libraries, which give back their tensors, so the caller holds no turn of the group.
        fn free_dropped(&self);
    }
}
