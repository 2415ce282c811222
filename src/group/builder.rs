//! Options of a group, and how it is opened.

use std::fmt;
use std::marker::PhantomData;
use std::panic::Location;
use std::sync::Arc;
use std::time::Duration;

use super::gathered::JoinRecord;
use super::{Group, in_words, threads};
use crate::backend::transport::{HostTransport, Mailboxes};
use crate::backend::{Backend, OpenOptions};
use crate::error::{Call, Error, Kind, Result, require_count};
use crate::one_line::{beginning, option, write_parts};
use crate::protocol::epoch::Epoch;
use crate::ranks::address::Address;
use crate::ranks::deadlines::Deadlines;
use crate::ranks::env::{self, Described, NamedMeeting};
use crate::ranks::identity::Identity;
use crate::ranks::meeting::{Meeting, MeetingPlace};
use crate::ranks::members::Members;
use crate::ranks::naming::{self, Arrival, JobRank, Naming};
use crate::ranks::rendezvous;
use crate::ranks::reports::ReportSender;
use crate::ranks::split::{Claim, SPLIT};
use crate::schedule::layout::MAX_WORLD;
use crate::schedule::limits::limit;
use crate::schedule::{Hosts, Numerics};

/// The bytes that each rank sends in the gather of [`Builder::connect_with`].
pub const GATHERED_BYTES: usize = 256;

/// How long a rank waits in a call that all ranks have begun, unless [`Builder::timeout`] says otherwise.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30);

/// Options of a group, made by [`Group::builder`].
///
/// ```
/// use std::time::Duration;
///
/// use gemmesh::tuning::Numerics;
/// use gemmesh::{Group, Host};
///
/// let options = Group::<Host>::builder()
///     .timeout(Duration::from_secs(5))
///     .numerics(Numerics::Invariant);
/// options.threads(2, |group| group.barrier())?;
/// # Ok::<(), gemmesh::Error>(())
/// ```
#[must_use = "there is no group before ranks have met"]
pub struct Builder<B: Backend> {
    timeout: Option<Duration>,
    arrival_timeout: Option<Duration>,
    host_timeout: Option<Duration>,
    workers: Option<usize>,
    link: Option<usize>,
    device: Option<usize>,
    max_ctas: Option<usize>,
    numerics: Option<Numerics>,
    pub(super) name: Option<String>,
    first_epoch: Epoch,
    pub(super) hosts: Hosts,
    meeting: Option<Arc<Meeting>>,
    transport: Option<Arc<HostTransport>>,
    backend: PhantomData<B>,
}

impl<B: Backend> fmt::Debug for Builder<B> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let words = |time: Option<Duration>| time.map(|time| format!("{time:?}"));
        let numerics = self.numerics.map(|numerics| format!("{numerics:?}"));
        let options = [
            option("name", self.name.as_deref().map(beginning)),
            option("timeout", words(self.timeout)),
            option("arrival_timeout", words(self.arrival_timeout)),
            option("host_timeout", words(self.host_timeout)),
            option("workers", self.workers),
            option("link", self.link),
            option("device", self.device),
            option("max_ctas", self.max_ctas),
            option("numerics", numerics),
        ];
        write!(f, "Builder<{}>", B::NAME)?;
        write_parts(f, options.into_iter().flatten())
    }
}

impl<B: Backend> Builder<B> {
    /// Default options.
    pub(super) fn new() -> Builder<B> {
        Builder {
            timeout: None,
            arrival_timeout: None,
            host_timeout: None,
            workers: None,
            link: None,
            device: None,
            max_ctas: None,
            numerics: None,
            name: None,
            first_epoch: Epoch::FIRST,
            hosts: Hosts::default(),
            meeting: None,
            transport: None,
            backend: PhantomData,
        }
    }

    /// How long a rank waits for another in a call that all ranks have begun, before it gives up with
    /// [`Kind::Timeout`]. The default is [`DEFAULT_TIMEOUT`].
    ///
    /// Ranks that are threads of one process open their group without it, as they do parts of it ([`Group::split`]). A
    /// wait for another thread there may take ten minutes, or this time if it is longer.
    ///
    /// The clock starts when the last rank begins the call. The time the peer spends computing before it sends counts.
    /// On GPUs a rank begins a call when it enqueues it, and a replay of a graph has no beginning that others see. So
    /// there the work that stands before it on the other rank's stream counts too.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// How long a rank waits for another that has not come, before it gives up with [`Kind::Timeout`].
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
    /// default is ten minutes, after which ranks get [`Kind::RanksMissing`].
    ///
    /// Ranks that are threads of one process have no rendezvous. While they open their group, or parts of it
    /// ([`Group::split`]), a wait for another thread may take ten minutes, or this time if it is longer.
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

    /// How long the system of another host may acknowledge nothing that it is sent, before the host is lost
    /// ([`Kind::HostLost`]). The default is 1.25 s. A time below half a second is taken for half a second.
    ///
    /// Raise it if the network between the hosts is away for longer now and then. A host whose processes are stopped or
    /// slow is not lost, because its system acknowledges what comes. A group of one host has no use for this time.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// use gemmesh::{Group, Host};
    ///
    /// let builder = Group::<Host>::builder().host_timeout(Duration::from_secs(10));
    /// # builder.threads(1, |group| group.barrier())?;
    /// # Ok::<_, gemmesh::Error>(())
    /// ```
    pub fn host_timeout(mut self, timeout: Duration) -> Self {
        self.host_timeout = Some(timeout);
        self
    }

    /// Deadlines that are not set are those of `whole`, of which the group is a part.
    pub(super) fn deadlines(&self, whole: Option<&Deadlines>) -> Deadlines {
        let call = self.timeout.or(whole.map(Deadlines::call));
        let arrival = whole.and_then(Deadlines::arrival);
        let call = call.unwrap_or(DEFAULT_TIMEOUT);
        let host = self.host_timeout.or(whole.map(Deadlines::host));
        Deadlines::new(call, self.arrival_timeout.or(arrival)).with_host(host)
    }

    /// How many threads a rank multiplies with on the host backend. By default the ranks of a host share its cores.
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
        self.numerics = Some(numerics);
        self
    }

    /// The GPU of this rank on the CUDA backend, as an ordinal among those visible to this process. By default the
    /// ranks take the visible GPUs in turn.
    pub fn device(mut self, ordinal: usize) -> Self {
        self.device = Some(ordinal);
        self
    }

    /// The most CTAs of each of the group's kernels on the CUDA backend, so that other kernels have room beside them. All
    /// ranks give the same number.
    ///
    /// A kernel that multiplies has one CTA on a multiprocessor, so it leaves the other multiprocessors free. Tiles and
    /// routes are chosen for that part of the device, and tables of measured winners are not used. By default a kernel
    /// may take the whole device. [`Config::max_ctas`](crate::Config::max_ctas) sets a lower number for one product. The
    /// host backend has [`Builder::workers`] instead.
    pub fn max_ctas(mut self, max_ctas: usize) -> Self {
        self.max_ctas = Some(max_ctas);
        self
    }

    /// The group's name, which its errors and [`Group::name`] say. All ranks give the same name, of at most 100 bytes.
    ///
    /// ```
    /// use gemmesh::{Error, Group, Host};
    ///
    /// Group::<Host>::threads(4, |world| {
    ///     let pair = world.rank() / 2;
    ///     let builder = Group::builder().name(format!("pair {pair}"));
    ///     let group = builder.split(&world, pair, world.rank())?;
    ///     assert_eq!(group.name(), Some(format!("pair {pair}").as_str()));
    ///     Ok::<_, Error>(())
    /// })?;
    /// # Ok::<_, Error>(())
    /// ```
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// The number of the first operation, for tests of what happens when it wraps.
    #[cfg(feature = "unstable-tools")]
    pub fn first_epoch(mut self, epoch: u32) -> Self {
        self.first_epoch = Epoch::from_raw(epoch);
        self
    }

    /// Makes the ranks of [`Builder::threads`], which are as many, play hosts. For tests.
    #[cfg(feature = "unstable-tools")]
    pub fn play_hosts(mut self, hosts: Hosts) -> Self {
        self.hosts = hosts;
        self.over(Arc::new(Mailboxes::default()))
    }

    /// Makes `transport` carry rows between hosts on the host backend.
    pub(super) fn over(mut self, transport: Arc<HostTransport>) -> Self {
        self.transport = Some(transport);
        self
    }

    /// Opens the group of `members`. Options that are not set are those of `whole`, of which the group is a part.
    /// `place`: of the call that opens it.
    pub(super) fn open(
        &self,
        members: Members,
        whole: Option<&Group<B>>,
        place: &'static Location<'static>,
    ) -> Result<Group<B>> {
        let whole = whole.map(Group::inner);
        let its = whole.map(|whole| whole.backend.reopening());
        let shares_gpu = its.as_ref().is_some_and(|its| its.shares_gpu);
        let its = |option: fn(&OpenOptions) -> Option<usize>| its.as_ref().and_then(option);
        let numerics = self.numerics.or(whole.map(|whole| whole.numerics));
        let options = OpenOptions {
            workers: self.workers.or(its(|its| its.workers)),
            link: self.link.or(its(|its| its.link)),
            transport: self.transport.clone(),
            device: self.device.or(its(|its| its.device)),
            max_ctas: self.max_ctas.or(its(|its| its.max_ctas)),
            shares_gpu,
            first_epoch: self.first_epoch,
        };
        let numerics = numerics.unwrap_or(Numerics::Fast);
        Group::open(members, numerics, &options, place)
    }

    /// [`Group::split`] with these options. Options that are not set are those of `group`.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// use gemmesh::{Error, Group, Host};
    ///
    /// Group::<Host>::threads(4, |world| {
    ///     let builder = Group::builder().name("replicas").timeout(Duration::from_secs(5));
    ///     let group = builder.split(&world, world.rank() % 2, world.rank() / 2)?;
    ///     assert_eq!((group.rank(), group.world_size()), (world.rank() / 2, 2));
    ///     Ok::<_, Error>(())
    /// })?;
    /// # Ok::<_, Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Group::split`]; [`Kind::Mismatch`] if ranks of a color give different names.
    #[track_caller]
    pub fn split(self, group: &Group<B>, color: usize, key: usize) -> Result<Group<B>> {
        let checked = naming::check(Some(group.rank()), self.name.as_deref());
        let place = Location::caller();
        let claim = checked.map(|()| Claim {
            color,
            key,
            name: self.name.clone(),
            place: Call::at(SPLIT, place).place().map(String::from),
        });
        let deadlines = self.deadlines(Some(&group.inner().members.deadlines));
        let open = |members| self.open(members, Some(group), place);
        group.noted(group.split_into(claim, deadlines, place, open))
    }

    /// [`Group::from_env`] with these options.
    ///
    /// # Errors
    /// As [`Group::from_env`].
    #[track_caller]
    pub fn from_env(mut self) -> Result<Group<B>> {
        let described = env::describe_this_process()?.ok_or_else(env::no_launcher)?;
        naming::check(Some(described.rank), self.name.as_deref())?;
        self.hosts = described.hosts.clone();
        self.meeting = described
            .meeting
            .clone()
            .map(|NamedMeeting { name, port, key }| {
                let place = MeetingPlace::Named(name, port);
                Arc::new(Meeting { key, place })
            });
        let (rank, address) = (described.rank, &described.address);
        let identity = Identity {
            naming: Some(Naming::of_job(self.name.clone(), described.world)),
            ..self.identity(rank, described.world, address.clone(), Some(&described))
        };
        let group = self.meet(&identity, rendezvous::PROTOCOL_VERSION);
        if let (Some(launcher), Err(error)) = (identity.launcher, &group) {
            launcher.tell(rank, error);
        }
        group
    }

    /// [`Group::connect`] with these options.
    ///
    /// # Errors
    /// As [`Group::connect`].
    #[track_caller]
    pub fn connect(self, rank: usize, world: usize, address: &str) -> Result<Group<B>> {
        self.connect_speaking(rank, world, address, rendezvous::PROTOCOL_VERSION)
    }

    /// Joins a group whose ranks have no launcher and no common address, but can send one another bytes, as by MPI or by
    /// a store. Collective.
    ///
    /// `gather` gets this rank's bytes and returns those of all ranks, by rank. All ranks send [`GATHERED_BYTES`] bytes.
    /// It is called once, and its waits are its own. All later steps have the builder's deadlines. The bytes of rank 0
    /// are an address that no one can guess, from which the ranks' key follows. So it must not be shown to others.
    ///
    /// The ranks may run on several hosts, each of which has as many ranks as the others. Then the lowest rank of each
    /// host connects to rank 0 by TCP, at a free port of one of its host's addresses. Across hosts, products and
    /// collectives also need a data network (`Builder::from_communicator`). Groups on one host need none
    /// ([`Group::split`]).
    ///
    /// ```
    /// use std::sync::Mutex;
    /// use std::sync::mpsc::channel;
    ///
    /// use gemmesh::{Group, Host};
    ///
    /// let (send, receive) = channel();
    /// let receive = Mutex::new(receive);
    /// let join = |rank: usize| {
    ///     Group::<Host>::builder().connect_with(rank, 2, |mine| {
    ///         let first = match rank {
    ///             0 => mine.to_vec(),
    ///             _ => receive.lock().expect("one thread receives").recv()?,
    ///         };
    ///         if rank == 0 {
    ///             send.clone().send(first.clone())?;
    ///         }
    ///         Ok(vec![first; 2]) // only the bytes of rank 0 matter
    ///     })
    /// };
    /// std::thread::scope(|scope| {
    ///     let first = scope.spawn(|| join(0).map(|group| group.world_size()));
    ///     assert_eq!(join(1)?.rank(), 1);
    ///     assert_eq!(first.join().expect("it does not panic")?, 2);
    ///     Ok::<_, gemmesh::Error>(())
    /// })?;
    /// # Ok::<_, gemmesh::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Builder::connect`], and those of several hosts, as [`Group::from_env`]; [`Kind::ProgramFailed`] with the error of `gather`; [`Kind::Unsuitable`] unless it returns the
    /// bytes of each rank; [`Kind::NeverJoined`] if rank 0 has no address; [`Kind::Unsupported`] if one host has more
    /// ranks than another.
    #[track_caller]
    pub fn connect_with(
        self,
        rank: usize,
        world: usize,
        gather: impl FnOnce(&[u8; GATHERED_BYTES]) -> Result<Vec<Vec<u8>>, Box<dyn std::error::Error>>,
    ) -> Result<Group<B>> {
        self.connect_by(rank, world, None, gather)
    }

    /// [`Builder::connect_with`], if the ranks know already which of them share a host.
    #[track_caller]
    pub(super) fn connect_by(
        mut self,
        rank: usize,
        world: usize,
        hosts: Option<Hosts>,
        gather: impl FnOnce(&[u8; GATHERED_BYTES]) -> Result<Vec<Vec<u8>>, Box<dyn std::error::Error>>,
    ) -> Result<Group<B>> {
        const CALL: &str = "Group::connect_with";
        // All ranks give the same size, so all are refused before any waits in its gather.
        limit("the world size", world, 1, MAX_WORLD).map_err(Error::of(rank, CALL))?;
        let several = hosts.as_ref().is_none_or(|hosts| hosts.count() > 1);
        let place = JoinRecord::of(rank, several && world > 1);
        let mut mine = [b' '; GATHERED_BYTES];
        if let Ok((words, _)) = &place {
            let bytes = words.encode();
            mine[..bytes.len()].copy_from_slice(&bytes);
        }
        // Also if there is no address, because the other ranks wait in their gathers.
        let gathered = gather(&mine).map_err(|error| {
            Kind::ProgramFailed {
                function_of: Some(CALL.into()),
                reason: in_words(&error),
            }
            .on(rank)
        });
        let (_, listener) = place?;
        let gathered = gathered?;
        let bytes: usize = gathered.iter().map(Vec::len).sum();
        let of = Error::of(rank, CALL);
        let expected = world * GATHERED_BYTES;
        require_count("the group", "byte", expected, "what was gathered", bytes).map_err(of)?;
        let all = gathered.concat();
        let all: Vec<JoinRecord> = all.chunks(GATHERED_BYTES).map(JoinRecord::decode).collect();
        let first = &all[0];
        if first.address == Address::default() {
            return Err(Kind::NeverJoined.on(0));
        }
        let tags: Vec<&str> = all.iter().map(|told| told.host.as_str()).collect();
        let found = || Hosts::of(&tags).map_err(Error::of(rank, CALL));
        self.hosts = hosts.map_or_else(found, Ok)?;
        match self.hosts.count() {
            1 => drop(listener),
            _ => self.meeting = Some(Arc::new(first.meeting(listener)?)),
        }
        self.connect(rank, world, first.address.reveal())
    }

    /// [`Builder::connect`] as a build of protocol version `version`, for tests.
    #[track_caller]
    pub(crate) fn connect_speaking(
        self,
        rank: usize,
        world: usize,
        address: &str,
        version: u32,
    ) -> Result<Group<B>> {
        naming::check(Some(rank), self.name.as_deref())?;
        // A process whose environment is wrong belongs to no job.
        let described = env::describe_this_process().ok().flatten();
        let identity = self.identity(rank, world, Address::of(address), described.as_ref());
        self.meet(&identity, version)
    }

    fn identity(
        &self,
        rank: usize,
        world: usize,
        address: Address,
        described: Option<&Described>,
    ) -> Identity {
        Identity {
            rank,
            world,
            address,
            hosts: self.hosts.clone(),
            meeting: self.meeting.clone(),
            backend: B::NAME,
            deadlines: self.deadlines(None),
            arrival: Arrival {
                name: self.name.clone(),
                job: described.map(JobRank::of),
            },
            naming: None,
            launcher: described
                .filter(|described| described.launched())
                .and_then(|described| ReportSender::new(described.rank, &described.address)),
        }
    }

    #[track_caller]
    fn meet(&self, identity: &Identity, version: u32) -> Result<Group<B>> {
        limit("the world size", identity.world, 1, MAX_WORLD)
            .and_then(|()| limit("the rank", identity.rank, 0, identity.world - 1))
            .map_err(Error::of(identity.rank, "Group::connect"))?;
        let members = rendezvous::meet_speaking(identity, version)?;
        self.open(members, None, Location::caller())
    }

    /// [`Group::threads`] with these options.
    ///
    /// # Errors
    /// As [`Group::threads`].
    ///
    /// # Panics
    /// As [`Group::threads`].
    #[track_caller]
    pub fn threads<T, E>(
        self,
        world: usize,
        f: impl Fn(Group<B>) -> Result<T, E> + Sync,
    ) -> Result<Vec<T>, E>
    where
        T: Send,
        E: From<Error> + fmt::Display + Send,
    {
        naming::check(None, self.name.as_deref())?;
        threads::run(&self, world, f)
    }
}
