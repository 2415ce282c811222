//! A group: the ranks that multiply together, and what they share.

mod builder;
mod gathered;
#[cfg(feature = "mpi")]
mod mpi;
mod operation;
mod programs;
mod threads;
mod turns;

pub use builder::{Builder, DEFAULT_TIMEOUT, GATHERED_BYTES};

use std::fmt::{self, Write};
use std::panic::Location;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use lru::LruCache;

use self::programs::Kept;
use self::turns::Turns;
use crate::backend::{Backend, KEPT, OpenOptions};
use crate::error::{Call, Error, Kind, MadeCall, Result, called_at};
use crate::one_line::beginning;
use crate::process::Own;
use crate::profile::nvtx::range;
use crate::protocol::epoch::Epoch;
use crate::ranks::deadlines::Deadlines;
use crate::ranks::members::Members;
use crate::ranks::split::{self, Claim, split_call};
use crate::schedule::{Config, Hosts, Numerics, Problem};

/// This rank's membership of a group of ranks that multiply together.
///
/// [`Group::from_env`] joins the group of a launcher's processes, [`Group::connect`] the group of the processes that
/// give the same address, and [`Group::threads`] runs the ranks as threads. [`Group::builder`] has options. A group
/// makes matrices ([`Group::sharded`], [`Group::upload`], [`Group::zeros`]); operations take them.
///
/// ```
/// use gemmesh::{Group, Host, Result, all_gather};
///
/// fn rank(group: Group<Host>) -> Result<()> {
///     let mut ranks = group.sharded::<u32>(group.world_size(), 1)?;
///     ranks.shard_mut().copy_from_host(&[group.rank() as u32])?;
///     all_gather(&ranks)?;
///     group.synchronize()?;
///     assert_eq!(ranks.to_vec()?, [0, 1, 2, 3]);
///     Ok(())
/// }
///
/// Group::threads(4, rank)?; // as processes: rank(Group::from_env()?)
/// # Ok::<(), gemmesh::Error>(())
/// ```
///
/// All ranks make the same collective calls in the same order. If several threads of a rank make them, the program must
/// order them. A call waits until the operations of other threads have returned, at most for the group's timeout
/// ([`Kind::Busy`]). Time in which such an operation waits for a rank that has not begun it does not count.
///
/// A group is cheap to clone. It ends when its last clone, matrix and prepared call have been dropped. It belongs to
/// the process that made it: in a fork, calls return [`Kind::Misuse`], and dropping the group does nothing.
pub struct Group<B: Backend> {
    inner: Arc<Own<Inner<B>>>,
}

pub(crate) struct Inner<B: Backend> {
    // Dropped in this order: the engine may still use the connections to end in step.
    pub backend: B,
    pub members: Members,
    numerics: Numerics,
    /// Held while an operation runs.
    state: Turns<GroupState<B>>,
    /// Programs that are no longer kept. Dropping one takes a tenth of the time of planning one, so they are dropped
    /// while the host waits anyway.
    evicted: Mutex<Vec<Kept<B>>>,
    /// The memory of partial sums, and its bytes: as much as the largest operation so far needed. Later operations use
    /// it too. The lock is held while more is made. It is not held for ever by a failed rank, because ranks that wait
    /// for one another there see failures and call no function of the caller's.
    partials: Mutex<Option<(Arc<B::Symmetric>, usize)>>,
    /// How many sharded matrices the group has made. The lock is held while one is made, so that two threads of a rank
    /// number theirs in the order in which the ranks meet for them. As with `partials`, a failure ends it.
    matrices: Mutex<u32>,
    /// Locked while the group is split, so that two threads of a rank split it one after the other.
    splits: Mutex<()>,
    /// The turns of calls of [`raw`](crate::raw) that set the group's stream first, so that no other thread sets it
    /// before the call has begun.
    stream_turns: Turns<()>,
    /// The stream that the program has set through [`raw`](crate::raw), a CUstream.
    pub set_stream: Mutex<Option<usize>>,
}

impl<B: Backend> Inner<B> {
    /// Makes a sharded matrix in a collective call, and numbers it.
    pub fn numbered<R>(&self, make: impl FnOnce() -> Result<R>) -> Result<(R, u32)> {
        // A panic while it was held has not left it half-changed.
        let mut matrices = self.matrices.lock().unwrap_or_else(PoisonError::into_inner);
        let made = make()?;
        let number = *matrices;
        *matrices += 1;
        Ok((made, number))
    }
}

impl<B: Backend> Drop for Inner<B> {
    fn drop(&mut self) {
        // First: closing may wait for ranks that wait for this one.
        self.members.report_panic();
        self.backend.close(&self.members);
    }
}

struct GroupState<B: Backend> {
    /// The next operation.
    epoch: Epoch,
    programs: LruCache<(Problem, Option<Config>), Kept<B>>,
    /// The programs that captured graphs run.
    recorded: Vec<Arc<B::Program>>,
    /// The partial sums of captured operations.
    recorded_partials: Vec<Arc<B::Symmetric>>,
}

impl<B: Backend> Group<B> {
    /// Options of a group: timeout, numerics, threads of a rank, its GPU.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// use gemmesh::{Group, Host};
    ///
    /// let builder = Group::<Host>::builder().timeout(Duration::from_secs(10));
    /// builder.threads(2, |group| group.barrier())?;
    /// # Ok::<(), gemmesh::Error>(())
    /// ```
    pub fn builder() -> Builder<B> {
        Builder::new()
    }

    /// Joins the group that this process's launcher describes in the environment.
    ///
    /// The launchers are [`launch`](crate::launch), torchrun, Open MPI's mpirun, srun, and mpiexec of a PMI
    /// implementation. If one launcher has started another, as srun starts mpiexec's agents, the inner one counts.
    ///
    /// Ranks that torchrun or srun has started may run on several hosts, if `GEMMESH_KEY` is set: see docs/hosts.md.
    ///
    /// ```no_run
    /// use gemmesh::{Group, Host};
    ///
    /// let group = Group::<Host>::from_env()?;
    /// println!("rank {} of {}", group.rank(), group.world_size());
    /// # Ok::<(), gemmesh::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Kind::Environment`] names the variables that are missing, and [`Kind::EnvironmentValue`] one that cannot be
    /// used. If there are several hosts: [`Kind::KeyRefused`] if this rank's key is not rank 0's, and [`Kind::System`]
    /// if rank 0's host is not found or its port is taken. All other errors are those of [`Group::connect`].
    #[track_caller]
    pub fn from_env() -> Result<Group<B>> {
        Builder::new().from_env()
    }

    /// Joins, as `rank`, the group of `world` processes on this host that give the same `address`, which is any text.
    ///
    /// The processes must belong to one user and share a network namespace; all other namespaces may differ. Whoever
    /// can guess the address can keep the ranks from meeting, but cannot take part: see "Who can join" in the guide.
    ///
    /// ```
    /// use gemmesh::{Group, Host};
    ///
    /// let address = format!("example {}", std::process::id());
    /// let group = Group::<Host>::connect(0, 1, &address)?;
    /// assert_eq!(group.world_size(), 1);
    /// # Ok::<(), gemmesh::Error>(())
    /// ```
    ///
    /// # Errors
    /// On every rank that comes: [`Kind::RanksMissing`], [`Kind::DuplicateRank`], [`Kind::Mismatch`], and errors of
    /// a backend that does not find what it needs. [`Kind::AddressTaken`] if other processes hold the address,
    /// [`Kind::RanksMissing`] if the system does not say which user a process belongs to.
    #[track_caller]
    pub fn connect(rank: usize, world: usize, address: &str) -> Result<Group<B>> {
        Builder::new().connect(rank, world, address)
    }

    /// Runs `f` on `world` threads, each of which is a rank, and returns the results by rank.
    ///
    /// ```
    /// use gemmesh::{Error, Group, Host};
    ///
    /// let ranks = Group::<Host>::threads(3, |group| Ok::<_, Error>(group.rank()))?;
    /// assert_eq!(ranks, [0, 1, 2]);
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    /// The error of the rank that failed first. If `f` returns an error, the ranks that wait for this one get it: as it
    /// is if this library made it, else as the words of an [`Kind::ProgramFailed`].
    ///
    /// # Panics
    /// If `f` panics on a rank. All ranks have ended then.
    #[track_caller]
    pub fn threads<T, E>(
        world: usize,
        f: impl Fn(Group<B>) -> Result<T, E> + Sync,
    ) -> Result<Vec<T>, E>
    where
        T: Send,
        E: From<Error> + fmt::Display + Send,
    {
        Builder::new().threads(world, f)
    }

    /// This rank's number, from 0 to `world_size() - 1`.
    pub fn rank(&self) -> usize {
        self.inner.members.rank
    }

    /// The number of hosts on which the ranks run. Each has as many ranks as the others.
    pub fn host_count(&self) -> usize {
        self.inner().members.hosts.count()
    }

    /// The ranks of each host. Hosts are in the order of their lowest ranks, and the ranks of a host are in order.
    ///
    /// Ranks of the same index in these lists are a rail: what goes from one host to another goes between two of them.
    ///
    /// ```
    /// use gemmesh::{Error, Group, Host};
    ///
    /// Group::<Host>::threads(3, |group| {
    ///     assert_eq!(group.hosts(), [[0, 1, 2]]);
    ///     Ok::<_, Error>(())
    /// })?;
    /// # Ok::<_, Error>(())
    /// ```
    pub fn hosts(&self) -> Vec<Vec<usize>> {
        let Members { hosts, world, .. } = &self.inner().members;
        let ranks_of = |host| hosts.ranks_of(host, *world).collect();
        (0..hosts.count()).map(ranks_of).collect()
    }

    /// The number of ranks.
    pub fn world_size(&self) -> usize {
        self.inner.members.world
    }

    /// The group's name: the one that [`Builder::name`] gave it, or a default if it is a part of a job or of a different
    /// group. `None` if it is the job itself and was given no name.
    pub fn name(&self) -> Option<&str> {
        self.inner.members.name()
    }

    /// Splits the group: ranks that give the same `color` become a group of their own. Collective.
    ///
    /// The new ranks are numbered in the order of their keys. Of equal keys, the lower rank of this group comes first.
    /// It is what MPI calls `MPI_Comm_split` and NCCL `ncclCommSplit`. The ranks need no address, because they are
    /// connected already.
    ///
    /// The new group has this group's options: its timeouts, numerics, workers, link and GPU. [`Builder::split`] gives it
    /// other options, or a name. Without a name it is called `color 1`, for example. Apart from that, the groups have
    /// nothing to do with each other. Matrices stay with the group that made them. Either group may end or fail without
    /// the other.
    ///
    /// The call waits for this rank's operations in this group first. On GPUs, operations of two groups at the same time
    /// have rules. They are those of two kernels that wait for other GPUs: see `Cuda`.
    ///
    /// ```
    /// use gemmesh::{Error, Group, Host};
    ///
    /// // Tensor parallelism in the pairs {0, 1} and {2, 3}, data parallelism in {0, 2} and {1, 3}.
    /// Group::<Host>::threads(4, |world| {
    ///     let rank = world.rank();
    ///     let tensor = world.split(rank / 2, rank)?;
    ///     let data = world.split(rank % 2, rank)?;
    ///     assert_eq!((tensor.rank(), tensor.world_size()), (rank % 2, 2));
    ///     assert_eq!((data.rank(), data.world_size()), (rank / 2, 2));
    ///     Ok::<_, Error>(())
    /// })?;
    /// # Ok::<_, Error>(())
    /// ```
    ///
    /// # Errors
    /// The same on every rank of this group, and it goes on: the error of a rank that has no memory or descriptors left,
    /// or whose new group does not open. If this group fails, its failure.
    #[track_caller]
    pub fn split(&self, color: usize, key: usize) -> Result<Group<B>> {
        Builder::new().split(self, color, key)
    }

    /// Waits until all operations of this rank are complete.
    ///
    /// # Errors
    /// The failure of an operation, if it has not been reported yet. On GPUs [`Kind::Capturing`] while the group's
    /// stream is captured, and [`Kind::Timeout`], after which the group goes on, if work of the program's own stands
    /// before an operation and takes longer than [`Builder::timeout`].
    pub fn synchronize(&self) -> Result<()> {
        self.wait(B::synchronize)
    }

    /// Waits until everything on this rank's stream is complete: its operations, and the caller's own work.
    pub(crate) fn settle(&self) -> Result<()> {
        self.wait(B::settle)
    }

    fn wait(&self, wait: impl FnOnce(&B, &Members) -> Result<()>) -> Result<()> {
        self.check()?;
        let _range = range(|| "gemmesh synchronize".into());
        let evicted = std::mem::take(&mut *self.evicted());
        drop(evicted);
        let waited = self.noted(wait(&self.inner.backend, &self.inner.members));
        // Here no turn is held, for which functions of other libraries might wait.
        self.inner.backend.free_dropped();
        waited
    }

    /// Waits until every rank has called it. Collective.
    ///
    /// # Errors
    /// The group's failure.
    #[track_caller]
    pub fn barrier(&self) -> Result<()> {
        self.refuse_misplaced()?;
        self.collective(Location::caller(), |members| members.barrier())
    }

    /// Sends `bytes` to every rank, and returns what each rank sent, by rank. Collective.
    ///
    /// It is for small messages, because all of them go through rank 0.
    ///
    /// ```
    /// use gemmesh::{Error, Group, Host};
    ///
    /// Group::<Host>::threads(2, |group| {
    ///     let sent = group.all_gather_bytes(&[group.rank() as u8])?;
    ///     assert_eq!(sent, [[0], [1]]);
    ///     Ok::<_, Error>(())
    /// })?;
    /// # Ok::<_, Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Kind::Limit`] on this rank alone, and nothing is sent, if `bytes` is longer than 256 MiB / W - 4 KiB; the group's
    /// failure.
    #[track_caller]
    pub fn all_gather_bytes(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.gather_bytes(&MadeCall::named("all_gather_bytes"), bytes)
    }

    /// How long this rank has waited for each other rank in operations since the group was opened, by rank.
    ///
    /// It counts waits for a rank to begin an operation, for the data that it moves, and for it to be done. Compare two
    /// readings: all ranks wait for a late rank. A rank that others wait for may be waiting too, for example to push to
    /// a late rank first. The late rank is the one that has waited for no one.
    ///
    /// On the host a wait counts if it lasts some microseconds. On GPUs a thread looks at an operation that has waited
    /// for 100 ms, and then ten times a second. It does not see shorter waits, nor the rest of longer ones. Calls in
    /// which ranks meet, such as [`Group::barrier`], do not count.
    pub fn wait_times(&self) -> Vec<Duration> {
        self.inner.members.wait_times()
    }

    /// Checks that the group has not failed, without waiting.
    ///
    /// It fails once a rank has died, panicked, left with an error, or ended the group by [`Group::fail`]. A rank that
    /// waits for something outside this library, such as a server's next request, calls it now and then. A library that
    /// locks something of its own calls it first.
    ///
    /// # Errors
    /// The group's failure; [`Kind::Misuse`].
    pub fn check(&self) -> Result<()> {
        self.inner.members.check()?;
        self.refuse_misplaced()
    }

    /// Ends the group on every rank, because this rank's own program cannot go on.
    ///
    /// All ranks get [`Kind::ProgramFailed`] with this rank and `reason`, from the calls that they are in and from
    /// later ones. Without it, waiting ranks learn that this rank left, but not why.
    ///
    /// It returns the group's failure, which is the first one if the group had failed before. If `reason` is an error that
    /// this rank has got from this group, or from a group that was split from it or from which it was split, the failure
    /// is that error, and not a failure of this rank's program. It may be called at any time, also in a function that was
    /// given to a call.
    ///
    /// ```
    /// use gemmesh::error::Kind;
    /// use gemmesh::{Group, Host, Result};
    ///
    /// fn rank(group: &Group<Host>) -> Result<()> {
    ///     if group.rank() == 1 {
    ///         let weights = std::fs::read("no such file");
    ///         weights.map_err(|error| group.fail(format!("cannot read weights: {error}")))?;
    ///     }
    ///     group.barrier()
    /// }
    ///
    /// let error = Group::<Host>::threads(2, |group| rank(&group)).unwrap_err();
    /// assert!(matches!(error.kind(), Kind::ProgramFailed { .. }) && error.rank() == Some(1));
    /// ```
    ///
    /// A whole program reports its error so: `run(&group).map_err(|error| group.fail(error))`.
    pub fn fail(&self, reason: impl fmt::Display) -> Error {
        self.inner.members.fail_because(in_words(&reason))
    }
}

/// For libraries that are built on this one.
impl<B: Backend> Group<B> {
    /// Tells the other ranks why this rank does not make the collective call `call`, and returns the error with the
    /// name of this call, and its place as [`Call::here`]. A library that refuses arguments before it makes the call
    /// uses this.
    ///
    /// Ranks that wait for this one in the call get `error` half a second later, unless this rank makes the call after
    /// all. A rank that was refused the call as often as this one, or more often, waits longer, because all ranks may
    /// be about to try again: for [`Builder::arrival_timeout`] or, without one, for [`Builder::timeout`].
    #[track_caller]
    pub fn refuse(&self, call: &str, error: Error) -> Error {
        self.tell(error.in_call(Call::here(call)))
    }

    /// For `map_err`: tells the other ranks why this rank does not make the collective call `call`, which is refused
    /// for this error.
    #[track_caller]
    pub(crate) fn refusal<'g>(&'g self, call: &'g str) -> impl FnOnce(Error) -> Error + 'g {
        let of = Error::of(self.rank(), call);
        move |error| self.tell(of(error))
    }

    /// Notes the result of a check of `call`, which this rank makes alone.
    #[track_caller]
    pub(crate) fn judged<R>(&self, call: &str, result: Result<R>) -> Result<R> {
        self.noted(result.map_err(Error::of(self.rank(), call)))
    }

    /// The answer to a question about `call`. It is not noted, because a rank that is told no goes on.
    #[track_caller]
    pub(crate) fn answered(&self, call: &str, answer: Result<()>) -> Result<()> {
        let answer = answer.map_err(Error::of(self.rank(), call));
        answer.map_err(|error| self.inner.members.named(error))
    }

    fn tell(&self, error: Error) -> Error {
        let error = self.inner.members.named(error);
        // No one waits for a call that stands within another, or in a fork.
        if !self.is_in_callback() {
            self.inner.members.refuse(&error);
        }
        error
    }

    /// Notes the result of a call that leaves the group as it is. If this rank then leaves, the ranks that wait for it
    /// get the noted error. A call that succeeds clears the note.
    pub(crate) fn noted<R>(&self, result: Result<R>) -> Result<R> {
        let result = result.map_err(|error| self.inner.members.named(error));
        self.inner.members.note(result.as_ref().err());
        result
    }
}

impl<B: Backend> Group<B> {
    /// Which ranks share a host.
    pub(crate) fn host_map(&self) -> &Hosts {
        &self.inner.members.hosts
    }

    /// `place`: of the call that opens the group.
    fn open(
        mut members: Members,
        numerics: Numerics,
        options: &OpenOptions,
        place: &'static Location<'static>,
    ) -> Result<Group<B>> {
        let backend = called_at(Some(place), || B::open(&members, options));
        let backend = backend.map_err(|error| members.named(error))?;
        members.is_opening = false;
        Ok(Group {
            inner: Arc::new(Own::new(Inner {
                backend,
                members,
                numerics,
                state: Turns::new(GroupState {
                    epoch: options.first_epoch,
                    programs: LruCache::new(KEPT),
                    recorded: Vec::new(),
                    recorded_partials: Vec::new(),
                }),
                evicted: Mutex::new(Vec::new()),
                partials: Mutex::new(None),
                matrices: Mutex::new(0),
                splits: Mutex::new(()),
                stream_turns: Turns::new(()),
                set_stream: Mutex::new(None),
            })),
        })
    }

    /// Makes the part of this group that `claim` asks for, in a call at `place`. Collective.
    fn split_into(
        &self,
        claim: Result<Claim>,
        deadlines: Deadlines,
        place: &'static Location<'static>,
        open: impl FnOnce(Members) -> Result<Group<B>>,
    ) -> Result<Group<B>> {
        // A group that opens runs kernels, which operations of this group must not keep from starting.
        self.synchronize()
            .inspect_err(|error| self.inner.members.refuse(error))?;
        // A panic while it was held has not left it half-changed.
        let splits = self.inner.splits.lock();
        let _split = splits.unwrap_or_else(PoisonError::into_inner);
        self.collective(place, |members| {
            let opened = open(split::split(members, claim, deadlines)?);
            let outcome = opened.as_ref().map(|_| (Vec::new(), None));
            members.gather_messages(&split_call(), outcome.map_err(Error::clone))?;
            opened
        })
    }

    #[track_caller]
    pub(crate) fn gather_bytes(&self, call: &MadeCall, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.refuse_misplaced()?;
        let place = Location::caller();
        called_at(Some(place), || self.inner.members.admit(call, bytes.len()))?;
        let gather = |members: &Members| members.all_gather(call, bytes, None);
        Ok(self.collective(place, gather)?.payloads)
    }

    /// A collective call of the program, at `place`, which posts calls of messages.
    pub(crate) fn collective<R>(
        &self,
        place: &'static Location<'static>,
        call: impl FnOnce(&Members) -> Result<R>,
    ) -> Result<R> {
        let members = &self.inner.members;
        let result = called_at(Some(place), || call(members));
        members.note_made();
        result
    }

    pub(crate) fn inner(&self) -> &Inner<B> {
        &self.inner
    }

    /// Checks that `argument`, which belongs to the group `its`, belongs to this one.
    pub(crate) fn require_same(&self, argument: &str, its: &Group<B>) -> Result<()> {
        if self.is_same(its) {
            return Ok(());
        }
        let of_name = |name: Option<&str>| {
            name.map_or("a group without a name".into(), |name| {
                format!("group {name:?}")
            })
        };
        let [expected, found] = match [self.name(), its.name()] {
            [None, None] => ["that of this call".into(), "a different group".into()],
            // For example the end of a different rank, which is a thread.
            [Some(name), Some(other)] if name == other => [
                "that of this call".into(),
                format!("a different group of the same name, {name:?},"),
            ],
            [own, its] => [format!("that of this call, {}", of_name(own)), of_name(its)],
        };
        Err(Error::of_kind(Kind::Unsuitable {
            what: format!("the group of {argument}"),
            expected,
            found,
            remedy: Some("make all arguments with one group".into()),
        }))
    }

    pub(crate) fn is_same(&self, other: &Group<B>) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }
}

/// A program's error in words, with its causes if its type prints them in the alternate form.
pub(crate) fn in_words(error: &impl fmt::Display) -> String {
    let mut words = String::new();
    // If printing fails, the words so far are kept.
    let _ = write!(words, "{error:#}");
    match words.trim() {
        "" => "it gives no reason".into(),
        _ => words,
    }
}

impl<B: Backend> Clone for Group<B> {
    fn clone(&self) -> Self {
        Group {
            inner: self.inner.clone(),
        }
    }
}

impl<B: Backend> fmt::Debug for Group<B> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let (rank, world) = (self.rank(), self.world_size());
        let name = self.name().map(|name| format!("{} ", beginning(name)));
        let name = name.unwrap_or_default();
        write!(f, "Group<{}>({name}rank {rank} of {world})", B::NAME)
    }
}
