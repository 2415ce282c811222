//! Options of a group, and how it is opened.

use std::fmt;
use std::marker::PhantomData;
use std::time::Duration;

use super::{Group, threads};
use crate::backend::{Backend, OpenOptions};
use crate::error::{Error, Result};
use crate::protocol::epoch::Epoch;
use crate::ranks::deadlines::Deadlines;
use crate::ranks::identity::Identity;
use crate::ranks::reports::ReportSender;
use crate::ranks::{env, rendezvous};
use crate::schedule::Numerics;
use crate::schedule::layout::MAX_WORLD;
use crate::schedule::limits::limit;

/// How long a rank waits in a call that all ranks have begun, unless [`Builder::timeout`] says otherwise.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30);

/// Options of a group, made by [`Group::builder`].
///
/// ```
/// use std::time::Duration;
///
/// use gemmesh::{Group, Host, Numerics};
///
/// let options = Group::<Host>::builder()
///     .timeout(Duration::from_secs(5))
///     .numerics(Numerics::Invariant);
/// options.threads(2, |group| group.barrier())?;
/// # Ok::<(), gemmesh::Error>(())
/// ```
#[derive(Debug)]
#[must_use = "there is no group before ranks have met"]
pub struct Builder<B: Backend> {
    timeout: Duration,
    arrival_timeout: Option<Duration>,
    workers: Option<usize>,
    link: Option<usize>,
    device: Option<usize>,
    pub(super) numerics: Numerics,
    pub(super) first_epoch: Epoch,
    backend: PhantomData<B>,
}

impl<B: Backend> Builder<B> {
    /// Default options.
    pub(super) fn new() -> Builder<B> {
        Builder {
            timeout: DEFAULT_TIMEOUT,
            arrival_timeout: None,
            workers: None,
            link: None,
            device: None,
            numerics: Numerics::Fast,
            first_epoch: Epoch::FIRST,
            backend: PhantomData,
        }
    }

    /// How long a rank waits for another in a call that all ranks have begun, before it gives up with
    /// [`Error::Timeout`]. The default is [`DEFAULT_TIMEOUT`].
    ///
    /// The clock starts when the last rank begins the call. The time in which the other rank multiplies what it will
    /// send counts. On GPUs a rank begins a call when it enqueues it, and a replay of a graph has no beginning that
    /// others see. So there the work that stands before it on the other rank's stream counts too.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// How long a rank waits for another that has not come, before it gives up with [`Error::Timeout`].
    ///
    /// By default it waits as long as that rank lives. The wait ends at once if that rank dies, panics, leaves, fails
    /// or makes a different call. So ranks may load weights at different speeds, and a server may be idle:
    ///
    /// ```
    /// use gemmesh::{Error, Group, Host};
    ///
    /// Group::<Host>::threads(2, |group| loop {
    ///     // Rank 0 takes requests, and the other ranks wait here for as long as none comes.
    ///     let request = match group.rank() {
    ///         0 => b"stop".to_vec(),
    ///         _ => Vec::new(),
    ///     };
    ///     let request = group.all_gather_bytes(&request)?.swap_remove(0);
    ///     if request == b"stop" {
    ///         return Ok::<_, Error>(());
    ///     }
    /// })?;
    /// # Ok::<_, Error>(())
    /// ```
    ///
    /// It also bounds the rendezvous, in which a process that was never started cannot be seen to be dead. There the
    /// default is ten minutes, after which ranks get [`Error::RanksMissing`].
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// use gemmesh::{Error, Group, Host};
    ///
    /// let builder = Group::<Host>::builder().arrival_timeout(Duration::from_secs(600));
    /// builder.threads(2, |group| group.barrier())?;
    /// # Ok::<_, Error>(())
    /// ```
    pub fn arrival_timeout(mut self, timeout: Duration) -> Self {
        self.arrival_timeout = Some(timeout);
        self
    }

    pub(super) fn deadlines(&self) -> Deadlines {
        Deadlines::new(self.timeout, self.arrival_timeout)
    }

    /// How many threads a rank multiplies with on the host backend. By default the ranks share the cores.
    pub fn workers(mut self, workers: usize) -> Self {
        self.workers = Some(workers);
        self
    }

    /// Makes each rank of the host backend copy no faster than `bytes_per_second`, as over a link between GPUs.
    ///
    /// Within one machine's memory a gather costs almost nothing. With this option the host backend shows what
    /// overlapping gains between GPUs. Products are as fast as before. The CUDA backend ignores it.
    pub fn link(mut self, bytes_per_second: usize) -> Self {
        self.link = Some(bytes_per_second);
        self
    }

    /// What the bits of products may depend on. The default is [`Numerics::Fast`].
    pub fn numerics(mut self, numerics: Numerics) -> Self {
        self.numerics = numerics;
        self
    }

    /// The GPU of this rank on the CUDA backend, as an ordinal among those visible to this process. By default the
    /// ranks take the visible GPUs in turn.
    pub fn device(mut self, ordinal: usize) -> Self {
        self.device = Some(ordinal);
        self
    }

    /// The number of the first operation, for tests of what happens when it wraps.
    #[doc(hidden)]
    pub fn first_epoch(mut self, epoch: u32) -> Self {
        self.first_epoch = Epoch::from_raw(epoch);
        self
    }

    pub(super) fn options(&self) -> OpenOptions {
        OpenOptions {
            workers: self.workers,
            link: self.link,
            device: self.device,
            first_epoch: self.first_epoch,
        }
    }

    /// [`Group::from_env`] with these options.
    ///
    /// # Errors
    /// As [`Group::from_env`].
    pub fn from_env(self) -> Result<Group<B>> {
        let described = env::describe_this_process()?.ok_or_else(env::no_launcher)?;
        let (rank, address) = (described.rank, &described.address);
        let launcher = match described.launched() {
            true => ReportSender::new(rank, address),
            false => None,
        };
        let version = rendezvous::PROTOCOL_VERSION;
        let group = self.meet(rank, described.world, address, version, launcher.clone());
        if let (Some(launcher), Err(error)) = (launcher, &group) {
            launcher.tell(rank, error);
        }
        group
    }

    /// [`Group::connect`] with these options.
    ///
    /// # Errors
    /// As [`Group::connect`].
    pub fn connect(self, rank: usize, world: usize, address: &str) -> Result<Group<B>> {
        self.connect_speaking(rank, world, address, rendezvous::PROTOCOL_VERSION)
    }

    /// [`Builder::connect`] as a build of protocol version `version`, for tests.
    #[doc(hidden)]
    pub fn connect_speaking(
        self,
        rank: usize,
        world: usize,
        address: &str,
        version: u32,
    ) -> Result<Group<B>> {
        self.meet(rank, world, address, version, None)
    }

    fn meet(
        self,
        rank: usize,
        world: usize,
        address: &str,
        version: u32,
        launcher: Option<ReportSender>,
    ) -> Result<Group<B>> {
        limit("world size", world, 1, MAX_WORLD)?;
        limit("rank", rank, 0, world - 1)?;
        let identity = Identity {
            rank,
            world,
            address: address.into(),
            backend: B::NAME,
            deadlines: self.deadlines(),
            launcher,
        };
        Group::open(rendezvous::meet_speaking(&identity, version)?, &self)
    }

    /// [`Group::threads`] with these options.
    ///
    /// # Errors
    /// As [`Group::threads`].
    ///
    /// # Panics
    /// As [`Group::threads`].
    pub fn threads<T, E>(
        self,
        world: usize,
        f: impl Fn(Group<B>) -> Result<T, E> + Sync,
    ) -> Result<Vec<T>, E>
    where
        T: Send,
        E: From<Error> + fmt::Display + Send,
    {
        threads::run(&self, world, f)
    }
}
