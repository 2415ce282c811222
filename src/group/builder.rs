//! How a group is made.

use std::fmt;
use std::marker::PhantomData;
use std::time::Duration;

use super::{Group, threads};
use crate::backend::{Backend, Options};
use crate::error::{Error, Result};
use crate::protocol::epoch::Epoch;
use crate::ranks::reports::ReportSender;
use crate::ranks::{env, rendezvous};
use crate::schedule::Numerics;
use crate::schedule::layout::MAX_WORLD;
use crate::schedule::limits::limit;

/// How long a rank waits for another before it gives up, unless the builder says otherwise.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30);

/// Any longer one is for ever, and still a time that can be added to another.
const LONGEST_TIMEOUT: Duration = Duration::from_secs(1 << 32);

/// Options of a group, for [`Group::builder`].
#[derive(Debug)]
#[must_use = "there is no group before ranks have met"]
pub struct Builder<B: Backend> {
    pub(super) timeout: Duration,
    workers: Option<usize>,
    link: Option<usize>,
    device: Option<usize>,
    pub(super) numerics: Numerics,
    pub(super) first_epoch: Epoch,
    backend: PhantomData<B>,
}

impl<B: Backend> Builder<B> {
    /// The defaults.
    pub(super) fn new() -> Builder<B> {
        Builder {
            timeout: DEFAULT_TIMEOUT,
            workers: None,
            link: None,
            device: None,
            numerics: Numerics::Fast,
            first_epoch: Epoch::FIRST,
            backend: PhantomData,
        }
    }

    /// How long a rank waits for another, in any call, before it gives up; what the other multiplies meanwhile, to send it, counts
    /// too. [`DEFAULT_TIMEOUT`] if not given.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout.min(LONGEST_TIMEOUT);
        self
    }

    /// How many threads a rank multiplies with on the host backend. If not given, the ranks share the cores.
    pub fn workers(mut self, workers: usize) -> Self {
        self.workers = Some(workers);
        self
    }

    /// Makes each rank of the host backend copy no faster than `bytes_per_second`. In one machine's memory a gather costs next to
    /// nothing; between GPUs it does not, and this shows what that changes. Products are as fast as before. Other backends have
    /// links of their own.
    pub fn link(mut self, bytes_per_second: usize) -> Self {
        self.link = Some(bytes_per_second);
        self
    }

    /// What the bits of products may depend on. [`Numerics::Fast`] if not given.
    pub fn numerics(mut self, numerics: Numerics) -> Self {
        self.numerics = numerics;
        self
    }

    /// The GPU of this rank on the CUDA backend, as an ordinal among those visible to this process. If not given,
    /// the ranks take the visible ones in turn.
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

    pub(super) fn options(&self) -> Options {
        Options {
            workers: self.workers,
            link: self.link,
            device: self.device,
            first_epoch: self.first_epoch,
        }
    }

    /// As [`Group::from_env`].
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

    /// As [`Group::connect`].
    ///
    /// # Errors
    /// As [`Group::connect`].
    pub fn connect(self, rank: usize, world: usize, address: &str) -> Result<Group<B>> {
        self.connect_speaking(rank, world, address, rendezvous::PROTOCOL_VERSION)
    }

    /// As [`Builder::connect`], as a build of another protocol version would, for tests.
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
        let identity = rendezvous::Identity {
            rank,
            world,
            address: address.into(),
            backend: B::NAME,
            timeout: self.timeout,
            launcher,
        };
        Group::open(rendezvous::meet_speaking(&identity, version)?, &self)
    }

    /// As [`Group::threads`].
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
