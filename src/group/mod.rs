//! Groups: the ranks that multiply together.

mod builder;
#[cfg(feature = "mpi")]
mod mpi;
mod threads;
mod turns;

pub use builder::{Builder, DEFAULT_TIMEOUT};

use std::cell::RefCell;
use std::fmt::{self, Write};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use lru::LruCache;

use self::turns::{Turn, Turns};
use crate::backend::{Backend, KEPT};
use crate::error::{Error, Result};
use crate::process::Own;
use crate::profile::nvtx::range;
use crate::protocol::epoch::Epoch;
use crate::ranks::call::Operation;
use crate::ranks::members::Members;
use crate::resources::require_available;
use crate::schedule::plan::tile_order;
use crate::schedule::{Agreed, Config, Numerics, Planner, Problem, Schedule};

/// This rank's membership of a group of ranks, which all make the same collective calls in the same
/// order: calls of several threads of a rank have no order, unless the program gives them one. An operation waits for
/// those of other threads to return, but no longer than the group's timeout ([`Error::Busy`]). Cheap to clone; the
/// group ends when its last clone, matrix and prepared product are dropped.
///
/// It belongs to the process that made it. In a fork of that, calls return [`Error::Forked`], and dropping it does
/// nothing.
///
/// ```
/// use gemmesh::{Group, Host, all_gather_matmul, bf16};
///
/// // Four ranks as threads; processes use Group::from_env or Group::connect.
/// Group::<Host>::threads(4, |group| {
///     let (m, n, k) = (64, 32, 16);
///     let mut a = group.sharded::<bf16>(m, k)?;
///     let rows = vec![bf16::from_f32(0.5); a.rows().len() * k];
///     a.shard_mut().copy_from_host(&rows)?;
///     let b = group.upload(&vec![bf16::ONE; n * k], n, k)?;
///     let mut out = group.zeros::<bf16>(m, n)?;
///     all_gather_matmul(&a, &b, &mut out)?;
///     group.synchronize()?;
///     assert!(out.to_vec()?.iter().all(|&x| x == bf16::from_f32(8.0)));
///     Ok::<(), gemmesh::Error>(())
/// })?;
/// # Ok::<(), gemmesh::Error>(())
/// ```
pub struct Group<B: Backend> {
    inner: Arc<Own<Inner<B>>>,
}

pub(crate) struct Inner<B: Backend> {
    // Dropped in this order: the engine may still use the connections to end in step.
    pub backend: B,
    pub members: Members,
    numerics: Numerics,
    /// Held while an operation runs.
    state: Turns<State<B>>,
    /// Programs that are not kept any longer. To drop one takes the host a tenth of planning another, so they go while it waits anyway.
    evicted: Mutex<Vec<Kept<B>>>,
    /// The memory of partial sums, and its bytes: what the largest operation so far needed. Its next ones use it too.
    /// Held while more is made: not for ever, for ranks that wait for one another in that have deadlines, and call no
    /// function of the caller's.
    partials: Mutex<Option<(Arc<B::Symmetric>, usize)>>,
    /// How many sharded matrices the group has made. Held while one is made, so that two threads of a rank number theirs
    /// in the order in which the ranks have met for them. As `partials`, it is not held for ever.
    matrices: Mutex<u32>,
}

impl<B: Backend> Inner<B> {
    /// What `make` makes in a collective call, and its number.
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
        // Before what may wait for the others, who may be waiting for this rank.
        self.members.report_panic();
        self.backend.close(&self.members);
    }
}

struct State<B: Backend> {
    /// The next operation.
    epoch: Epoch,
    programs: LruCache<(Problem, Option<Config>), Kept<B>>,
    /// What graphs run.
    recorded: Vec<Arc<B::Program>>,
    /// The partials of operations that are.
    recorded_partials: Vec<Arc<B::Symmetric>>,
}

thread_local! {
    /// The groups in whose operations this thread runs a function of the caller's.
    static CALLBACKS: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// Bytes of tiles that are not there without notice.
const LONG_LIST: usize = 1 << 20;

/// A program for the short calls.
struct Kept<B: Backend> {
    program: Arc<B::Program>,
    config: Config,
}

impl<B: Backend> Group<B> {
    /// What varies of a group: deadlines, threads of a rank, its GPU.
    pub fn builder() -> Builder<B> {
        Builder::new()
    }

    /// The group that the launcher of this process describes in the environment: [`launch`](crate::launch), torchrun,
    /// Open MPI's mpirun, srun, or mpiexec of a PMI implementation. Of a launcher that started another, as srun does
    /// mpiexec's agents, the inner one counts.
    ///
    /// # Errors
    /// [`Error::Environment`] names the variables that are missing, [`Error::EnvironmentValue`] one that can't be used; else
    /// as [`Group::connect`].
    pub fn from_env() -> Result<Group<B>> {
        Builder::new().from_env()
    }

    /// The group of `world` processes on this host that give the same `address`, any text; `rank` is this one. The
    /// processes must be the same user's and share a network namespace; other namespaces may differ. Who can guess
    /// the address can keep the ranks from meeting, but not take part: see "Who can join" in the guide.
    ///
    /// # Errors
    /// On every rank that comes: [`Error::RanksMissing`], [`Error::DuplicateRank`], [`Error::Mismatch`]; and
    /// what the backend needs and does not find. [`Error::AddressTaken`] if other processes are in the way,
    /// [`Error::UnknownUser`] if the system does not tell whose a process is.
    pub fn connect(rank: usize, world: usize, address: &str) -> Result<Group<B>> {
        Builder::new().connect(rank, world, address)
    }

    /// Runs `f` as `world` ranks on as many threads, and returns their results by rank.
    ///
    /// # Errors
    /// The error of the rank that failed first. A rank that fails should return: those who wait for it then get its
    /// error, in words, as [`Error::ProgramFailed`], or as what it is if this library made it.
    ///
    /// # Panics
    /// If `f` does on some rank, once all ranks have ended.
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

    fn open(members: Members, builder: &Builder<B>) -> Result<Group<B>> {
        let backend = B::open(&members, &builder.options())?;
        Ok(Group {
            inner: Arc::new(Own::new(Inner {
                backend,
                members,
                numerics: builder.numerics,
                state: Turns::new(State {
                    epoch: builder.first_epoch,
                    programs: LruCache::new(KEPT),
                    recorded: Vec::new(),
                    recorded_partials: Vec::new(),
                }),
                evicted: Mutex::new(Vec::new()),
                partials: Mutex::new(None),
                matrices: Mutex::new(0),
            })),
        })
    }

    /// This rank: 0 to `world_size() - 1`.
    pub fn rank(&self) -> usize {
        self.inner.members.rank
    }

    /// The number of ranks.
    pub fn world_size(&self) -> usize {
        self.inner.members.world
    }

    /// Returns when every rank has called it.
    ///
    /// # Errors
    /// The group's failure.
    pub fn barrier(&self) -> Result<()> {
        self.refuse_misplaced()?;
        self.inner.members.barrier()
    }

    /// Sends `bytes` to every rank and returns what each sent, by rank. For small things: it goes through rank 0.
    ///
    /// # Errors
    /// [`Error::Limit`] if a rank sends more than its part of 256 MiB; the group's failure.
    pub fn all_gather_bytes(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.gather_bytes("all_gather_bytes()", bytes)
    }

    pub(crate) fn gather_bytes(&self, call: &str, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.refuse_misplaced()?;
        let gathered = self.inner.members.all_gather(call, bytes, None)?;
        Ok(gathered.payloads)
    }

    /// How long this rank has waited for each other in operations, by rank, since the group was opened: for it to begin the operation, for
    /// what it moves, and for it to be done. To be compared before and after; a rank that is late is waited for by all others.
    ///
    /// On the host a wait counts if it lasts some microseconds. On GPUs a thread looks at an operation that has waited for 100 ms, and
    /// then ten times a second: shorter waits, and the rest of longer ones, are not seen. Calls in which ranks meet, such as
    /// [`Group::barrier`], do not count.
    ///
    /// A rank that waits itself may be waited for too, as one that pushes to a late rank first: the late rank is the one
    /// that has waited for nobody.
    pub fn wait_times(&self) -> Vec<Duration> {
        self.inner.members.wait_times()
    }

    /// Returns when all operations of this rank are complete.
    ///
    /// # Errors
    /// The failure of an operation that had not been reported yet.
    pub fn synchronize(&self) -> Result<()> {
        self.check()?;
        let _range = range(|| "gemmesh synchronize".into());
        let evicted = std::mem::take(&mut *self.evicted());
        drop(evicted);
        self.noted(self.inner.backend.synchronize(&self.inner.members))
    }

    pub(crate) fn inner(&self) -> &Inner<B> {
        &self.inner
    }

    /// Symmetric memory for matrix `number` of a schedule, in which partial sums lie; operations use it one after the other. Ranks
    /// that agree on the operation need as much: it is collective where there is not as much yet.
    pub(crate) fn partials(&self, schedule: &Schedule, number: usize) -> Result<Arc<B::Symmetric>> {
        self.check()?;
        let matrix = schedule.matrices()[number];
        let bytes = matrix.rows.saturating_mul(matrix.row_bytes());
        // All of what is taken, so that some rows more need no other allocation. What overflows is too large for any
        // machine.
        let bytes = bytes.checked_next_multiple_of(B::BLOCK);
        let bytes = bytes.unwrap_or(usize::MAX);
        let Inner {
            backend, members, ..
        } = self.inner();
        // A panic while it was held has not left it half-changed.
        let partials = &self.inner.partials;
        let mut partials = partials.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((memory, room)) = &*partials
            && *room >= bytes
        {
            if self.is_recording()? {
                let kept = &mut self.state(None)?.recorded_partials;
                if !kept.iter().any(|kept| Arc::ptr_eq(kept, memory)) {
                    kept.push(memory.clone());
                }
            }
            return Ok(memory.clone());
        }
        self.refuse_recording()
            .inspect_err(|error| members.refuse(error))?;
        members.withdraw_refusal();
        // All ranks are here: what is too small goes first, and leaves its room.
        *partials = None;
        let call = schedule.agreed().map_or(String::new(), |agreed| {
            format!("{}({})", agreed.name(), agreed.details())
        });
        let memory = Arc::new(self.noted(backend.symmetric(members, &call, bytes))?);
        *partials = Some((memory.clone(), bytes));
        Ok(memory)
    }

    pub(crate) fn is_same(&self, other: &Group<B>) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    /// The program for what is asked: prepared at its first use, kept for the next. Of too many, the one that has not been
    /// used for the longest time goes. Without a configuration the backend's is taken. The operation's name in `problem` stands for
    /// its planner.
    pub(crate) fn program(
        &self,
        planner: Planner,
        problem: Problem,
        config: Option<Config>,
    ) -> Result<Arc<B::Program>> {
        let (program, _) = self.configured_program(planner, problem, config)?;
        Ok(program)
    }

    /// The same, with its configuration.
    pub(crate) fn configured_program(
        &self,
        planner: Planner,
        problem: Problem,
        config: Option<Config>,
    ) -> Result<(Arc<B::Program>, Config)> {
        let key = (problem, config);
        self.refuse_misplaced()?;
        let mut state = self.state(None)?;
        if let Some(kept) = state.programs.get(&key) {
            return Ok((kept.program.clone(), kept.config));
        }
        // What a program needs can't be allocated now.
        self.refuse_recording()?;
        let Inner {
            backend,
            members,
            numerics,
            ..
        } = self.inner();
        let _range = range(|| format!("gemmesh prepare {}", key.0.operation));
        let config = config.unwrap_or_else(|| {
            let rows = key.0.layout.with_a_row();
            let problem = rows.map(|layout| Problem {
                layout,
                ..key.0.clone()
            });
            backend.default_config(problem.as_ref().unwrap_or(&key.0), *numerics)
        });
        config.check_numerics(*numerics)?;
        let listed = tile_order::bytes(&key.0, &config);
        // To ask takes longer than to plan little.
        if listed > LONG_LIST {
            require_available(listed).map_err(Error::out_of_memory(members.rank, listed))?;
        }
        let schedule = planner(&key.0, members.rank, config)?;
        let program = Arc::new(backend.prepare(members, schedule)?);
        let kept = Kept {
            program: program.clone(),
            config,
        };
        let evicted = state.programs.push(key, kept);
        drop(state);
        if let Some((_, evicted)) = evicted {
            self.evict(evicted);
        }
        Ok((program, config))
    }

    /// Drops a program when this rank waits for the device, or the oldest of many at once.
    fn evict(&self, program: Kept<B>) {
        const MOST: usize = 16;
        let mut evicted = self.evicted();
        let oldest = (evicted.len() == MOST).then(|| evicted.remove(0));
        evicted.push(program);
        // Nobody need wait while it goes.
        drop(evicted);
        drop(oldest);
    }

    fn evicted(&self) -> MutexGuard<'_, Vec<Kept<B>>> {
        // Each change is one call.
        let evicted = &self.inner.evicted;
        evicted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps what a graph runs for as long as the group lives.
    pub(crate) fn keep_recorded(&self, program: &Arc<B::Program>) -> Result<()> {
        let recorded = &mut self.state(None)?.recorded;
        if !recorded.iter().any(|kept| Arc::ptr_eq(kept, program)) {
            recorded.push(program.clone());
        }
        Ok(())
    }

    /// Calls a function of the caller's amid an operation. Calls of this group that it makes are refused: they would wait for the operation.
    pub(crate) fn in_callback<R>(&self, f: impl FnOnce() -> R) -> R {
        let this = Arc::as_ptr(&self.inner).addr();
        CALLBACKS.with_borrow_mut(|groups| groups.push(this));
        let result = f();
        CALLBACKS.with_borrow_mut(|groups| groups.pop());
        result
    }

    /// Whether this rank can make a call: for code that stands on this library, and locks something of its own before
    /// it makes one.
    ///
    /// # Errors
    /// The group's failure; [`Error::CallInCallback`]; [`Error::Forked`].
    pub fn check(&self) -> Result<()> {
        self.inner.members.check()?;
        self.refuse_misplaced()
    }

    /// Fails in a fork of this rank's process, and in a function of the caller's amid an operation.
    pub(crate) fn refuse_misplaced(&self) -> Result<()> {
        self.inner.members.refuse_fork()?;
        let this = Arc::as_ptr(&self.inner).addr();
        match CALLBACKS.with_borrow(|groups| groups.contains(&this)) {
            true => Err(Error::CallInCallback { rank: self.rank() }),
            false => Ok(()),
        }
    }

    /// Tells the ranks that will wait for this one in the collective call `call` why it does not make it: for code that stands on this
    /// library and refuses arguments before it makes the call. They get `error` half a second later, unless this rank makes the call
    /// after all. Those that were themselves refused the call, as often or more, get it at their deadline, for all ranks may be about to try
    /// again. Returns the error with the call's name.
    pub fn refuse(&self, call: &str, error: Error) -> Error {
        let error = Error::refused(self.rank(), call)(error);
        // Nobody waits for a call that stands within another, or in a fork.
        if !matches!(error.cause(), Error::CallInCallback { .. }) {
            self.inner.members.refuse(&error);
        }
        error
    }

    /// What this rank gets of a call that leaves the group as it is: those who wait for it get the error, if it leaves
    /// because of that. After a call that works it does not leave because of one before.
    #[doc(hidden)]
    pub fn noted<R>(&self, result: Result<R>) -> Result<R> {
        self.inner.members.note(result.as_ref().err());
        result
    }

    /// Ends the group on every rank, because this rank's own program cannot go on: all get [`Error::ProgramFailed`]
    /// with this rank and `reason`, from the calls that they are in and from later ones. Without it, those who wait for
    /// a rank that leaves are told that it left, and not why.
    ///
    /// Returns the group's failure: this one or, if the group had failed before, what it has failed of. (An error of
    /// this library's that this rank has just got remains what it is.) It may be called at any time, also by a function
    /// that was given to a call.
    ///
    /// ```
    /// use gemmesh::{Error, Group, Host, Result};
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
    /// assert!(matches!(error, Error::ProgramFailed { rank: 1, .. }));
    /// ```
    ///
    /// For whatever a whole program may return: `run(&group).map_err(|error| group.fail(error))`.
    pub fn fail(&self, reason: impl fmt::Display) -> Error {
        self.inner.members.fail_because(in_words(&reason))
    }

    /// Begins a collective operation: no other begins on this rank before `run` returns.
    pub(crate) fn operate<R>(
        &self,
        operation: Operation<'_>,
        run: impl FnOnce(Epoch) -> Result<R>,
    ) -> Result<R> {
        self.check()?;
        // Before the operation gets its number, so that a refusal on one rank leaves all ranks in step.
        self.refuse_recording()
            .inspect_err(|error| self.inner.members.refuse(error))?;
        let state = self.state(Some(operation.agreed));
        let mut state = state.inspect_err(|error| self.inner.members.refuse(error))?;
        let epoch = state.epoch;
        self.inner.members.post(epoch, operation)?;
        state.epoch = epoch.next();
        run(epoch)
    }

    /// Runs something that has no number of its own, but must not overlap with what has. It is given the epoch of the
    /// last operation.
    pub(crate) fn exclusively<R>(&self, run: impl FnOnce(Epoch) -> Result<R>) -> Result<R> {
        self.check()?;
        let state = self.state(None);
        self.noted(state.and_then(|state| run(state.epoch.previous())))
    }

    /// Whether operations are only recorded at this moment, to run later.
    pub(crate) fn is_recording(&self) -> Result<bool> {
        self.refuse_misplaced()?;
        self.inner.backend.is_recording(&self.inner.members)
    }

    fn refuse_recording(&self) -> Result<()> {
        if self.is_recording()? {
            let rank = self.rank();
            return Err(Error::Capturing { rank });
        }
        Ok(())
    }

    /// This thread's turn, for `operation` or something else, once other threads have had theirs.
    fn state(&self, operation: Option<&Agreed>) -> Result<Turn<'_, State<B>>> {
        let Members { rank, timeout, .. } = self.inner.members;
        self.inner.state.take(operation, |waited, other| {
            self.inner.members.check()?;
            if waited < timeout {
                return Ok(());
            }
            Err(Error::Busy {
                rank,
                call: other.map_or("call", Agreed::name).into(),
                waited_ms: waited.as_millis() as u64,
            })
        })
    }
}

/// An error of a program's, with what stands behind it, where its type tells that so.
fn in_words(error: &impl fmt::Display) -> String {
    let mut words = String::new();
    // Of one that cannot be told to its end, what was told so far.
    let _ = write!(words, "{error:#}");
    words
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
        f.debug_struct("Group")
            .field("backend", &B::NAME)
            .field("rank", &self.rank())
            .field("world_size", &self.world_size())
            .finish()
    }
}
