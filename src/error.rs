//! What can go wrong, and who is at fault.

pub(crate) mod call;
mod made_call;
mod ranks;
mod words;

pub use self::call::{Call, called_at};

use std::fmt;

pub use self::made_call::MadeCall;
use self::made_call::{Difference, Refused, Whole};
pub(crate) use self::made_call::{Ordinal, of_configuration};
pub(crate) use self::words::Counted;
#[cfg(not(loom))]
pub(crate) use self::words::Listed;
use self::words::{
    Alike, Because, Bounds, DifferentGroup, Ended, GroupOf, InBrackets, Killed, Nearest, OneLine,
    Panic, Prepare, Ranks, Transposed, Who, WithinGroup,
};
use crate::element::DType;
use crate::resources::{self, Bytes};
use crate::route::Route;

/// A result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything that can go wrong.
///
/// Ranks are numbered from 0 to W - 1. In an error of a part of a job or of a group, in its fields and in its sentence,
/// they have the numbers of the job: see [`Error::InGroup`]. If one rank fails or makes a mistake in a collective call,
/// all ranks get the same error. It names the rank at fault, and the group has failed.
///
/// An argument that only this rank can judge is at first an error on this rank alone, for example an [`Error::Shape`].
/// Nothing has been done, and the rank may make the call with a different argument. If it does not, the ranks that wait
/// for it in that call get its error half a second later, or at once if it leaves. The group has then failed.
///
/// An error of an argument also names the call's place in the program's source, on other ranks too:
/// `rank 1: all_gather_matmul at src/block.rs:31: b [N, K] is [5, 3] and must be [5, 4]`.
///
/// `Debug` prints the same sentence as `Display`, because a program prints it whose `main` returns a [`Result`].
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A number is outside what this library can do.
    #[error("{}{call}: {what} is {value}; it must be {}", Who(.rank), Bounds(*.min, *.max))]
    Limit {
        /// The rank that made the call. None if there are no ranks yet.
        rank: Option<usize>,
        /// The call.
        call: Call,
        /// What the number is.
        what: String,
        /// The number.
        value: usize,
        /// The least that works.
        min: usize,
        /// The most that works.
        max: usize,
    },

    /// A call, a configuration or a schedule asks for something that is not supported.
    #[error("rank {rank}: {call}: not supported: {what}")]
    Unsupported {
        /// The rank that made the call.
        rank: usize,
        /// The call.
        call: Call,
        /// What must hold instead.
        what: String,
    },

    /// A package that is built on this library refuses an argument of a call.
    #[error("rank {rank}: {call}: {what}")]
    Refused {
        /// The rank that made the call.
        rank: usize,
        /// The call.
        call: Call,
        /// What is wrong.
        what: String,
    },

    /// An argument has the wrong shape for the operation.
    #[error("rank {rank}: {call}: {argument} is {found:?} and must be {expected:?}{}",
        Transposed(.argument, .expected, .found))]
    Shape {
        /// The rank that made the call.
        rank: usize,
        /// The call.
        call: Call,
        /// The argument, with the names of its extents.
        argument: String,
        /// The shape it must have.
        expected: Vec<usize>,
        /// The shape it has.
        found: Vec<usize>,
    },

    /// There are too many or too few of something, such as values for the elements of a matrix.
    #[error("rank {rank}: {call}: {whole} has {}, but {part} has {found}",
        Counted(*.expected, .unit))]
    Count {
        /// The rank that made the call.
        rank: usize,
        /// The call.
        call: Call,
        /// What says how many there must be, such as a matrix.
        whole: String,
        /// What is counted, such as "element".
        unit: String,
        /// How many there must be.
        expected: usize,
        /// What has a different number, such as a slice.
        part: String,
        /// How many there are.
        found: usize,
    },

    /// The elements of an argument have a different type than the call was prepared for.
    #[error("rank {rank}: {call}: {argument} is {found}, but this call was prepared for {expected}; {}",
        Prepare(.argument, *.expected, *.found))]
    DType {
        /// The rank that made the call.
        rank: usize,
        /// The call.
        call: Call,
        /// The argument.
        argument: String,
        /// The type that the call was prepared for.
        expected: DType,
        /// The argument's type.
        found: DType,
    },

    /// An argument from another library has the wrong device, type or layout, or an operand or an output has different
    /// scales than the call was prepared for.
    #[error("rank {rank}: {call}: {what} is {found} and must be {expected}")]
    Unsuitable {
        /// The rank that made the call.
        rank: usize,
        /// The call.
        call: Call,
        /// The property that does not fit, and the argument that has it, such as "the device of the tensors".
        what: String,
        /// What the property must be.
        expected: String,
        /// What the property is.
        found: String,
    },

    /// An argument belongs to a different group.
    #[error(
        "rank {rank}: {call}: {argument} belongs to {}; make all arguments with one group",
        DifferentGroup(.found.as_deref(), .expected.as_deref())
    )]
    ForeignArgument {
        /// The rank that made the call.
        rank: usize,
        /// The call.
        call: Call,
        /// The argument.
        argument: String,
        /// The name of the group that the call is made in, if it has one.
        expected: Option<Box<str>>,
        /// The name of the argument's group, if it has one.
        found: Option<Box<str>>,
    },

    /// The environment does not say who this rank is.
    #[error(
        "cannot tell this process's rank from {launcher}'s environment, which lacks {missing}; \
         start it with torchrun, mpirun, srun or gemmesh::launch, or give its rank to Group::connect"
    )]
    Environment {
        /// The launcher whose variables were found, or a list of those looked for.
        launcher: String,
        /// The variables that are missing.
        missing: String,
    },

    /// An environment variable cannot be used.
    #[error("environment variable {name} is {value:?}: {reason}")]
    EnvironmentValue {
        /// Its name.
        name: String,
        /// Its value.
        value: String,
        /// What is wrong with it.
        reason: String,
    },

    /// Ranks did not come to the rendezvous.
    #[error("{} not come to {address:?} within {waited_ms} ms{}; see whether {} started, and with the same address, or \
             raise Builder::arrival_timeout",
        Ranks(.ranks, "has", "have"), InBrackets(.reason), if .ranks.len() == 1 { "it was" } else { "they were" })]
    RanksMissing {
        /// The ranks that did not come.
        ranks: Vec<usize>,
        /// The address at which the ranks were to meet.
        address: String,
        /// How long this rank waited.
        waited_ms: u64,
        /// What is known of them: how a leader's latest tries to reach rank 0 failed, or which process rank 0 turned away
        /// because of its key.
        reason: Option<Box<str>>,
    },

    /// The process of a launched rank ended before it joined the group.
    #[error("rank {rank} ended before it joined the group; see that rank's own output")]
    RankNeverJoined {
        /// The rank.
        rank: usize,
    },

    /// The socket names at which the ranks could meet are taken.
    ///
    /// Other processes hold them, or a process of the same user holds one and gives no answer.
    #[error(
        "rank {rank} found the names of address {address:?} taken for {waited_ms} ms, by {holder}; end that process, or choose another address"
    )]
    AddressTaken {
        /// The rank.
        rank: usize,
        /// The address at which it was to meet the others.
        address: String,
        /// A process that holds a name, and its user, as far as the system tells.
        holder: String,
        /// How long the rank tried.
        waited_ms: u64,
    },

    /// Ranks did not come to the rendezvous, and a process came whose user is not known.
    #[error("{} not come to {address:?}, where rank {rank} turned a process away: {reason}", Ranks(.ranks, "has", "have"))]
    UnknownUser {
        /// The ranks that did not come.
        ranks: Vec<usize>,
        /// The rank that turned the process away.
        rank: usize,
        /// The address at which the ranks were to meet.
        address: String,
        /// Why the user of the process is not known, and what to do.
        reason: String,
    },

    /// Rank 0 turned this rank away, because their keys differ. Or another program listens where rank 0 was expected.
    #[error(
        "rank {rank} was turned away at {address}: the process there does not have this rank's key; give all ranks of \
             the job the same GEMMESH_KEY, and see that no other program listens there"
    )]
    KeyRefused {
        /// The rank.
        rank: usize,
        /// Where it was turned away.
        address: String,
    },

    /// Two processes claim the same rank.
    #[error("two processes are rank {rank} (pids {} and {}); give each its own rank", .pids[0], .pids[1])]
    DuplicateRank {
        /// The rank.
        rank: usize,
        /// The two processes.
        pids: [u32; 2],
    },

    /// A rank disagrees with others about something that must be the same on all ranks.
    #[error(
        "rank {rank} has {what} {theirs} and rank {other} has {expected}{}",
        Alike(.call.as_ref())
    )]
    Mismatch {
        /// The rank that differs.
        rank: usize,
        /// What differs.
        what: String,
        /// Its value on that rank.
        theirs: String,
        /// The first rank that has the expected value.
        other: usize,
        /// Its value on that rank.
        expected: String,
        /// The call of the rank that differs, if it gave its group a name in it: [`Builder::split`](crate::Builder::split).
        /// None if ranks differ where they meet.
        call: Option<Call>,
    },

    /// A rank made a different call than the others.
    ///
    /// All ranks must make the same calls in the same order. A rank knows the place of its own call, and that of the rank
    /// that noticed.
    #[error(
        "{}{}; all ranks must make the same calls in the same order (the {} collective call of the group: {})",
        Difference(*.rank, .theirs, *.other, .expected), Refused(.refused), Ordinal(*.call),
        Whole(Difference(*.rank, .theirs, *.other, .expected))
    )]
    CallMismatch {
        /// The rank that differs.
        rank: usize,
        /// Its call.
        theirs: Box<MadeCall>,
        /// A rank that made the expected call.
        other: usize,
        /// The call that was expected.
        expected: Box<MadeCall>,
        /// Which of the group's collective calls it is, counted from 1. Making the group is none.
        call: u64,
        /// Why the rank that differs was refused a call, if it then made this one instead.
        refused: Option<Box<Error>>,
    },

    /// Memory could not be allocated.
    #[error(
        "rank {rank} has no memory for {}: {reason}; use smaller matrices or fewer ranks", Bytes(*.bytes as u64)
    )]
    OutOfMemory {
        /// The rank.
        rank: usize,
        /// How much was asked for.
        bytes: usize,
        /// Who refused it.
        reason: String,
    },

    /// A rank died.
    ///
    /// Its control connection ended without a farewell or a panic.
    #[error("rank {rank} died (noticed by rank {noticed_by}); see that rank's own output")]
    RankLost {
        /// The rank that died.
        rank: usize,
        /// The rank that saw it.
        noticed_by: usize,
    },

    /// The host of a rank does not answer any more.
    ///
    /// Its system has acknowledged nothing that was sent to it. A host whose processes are only stopped does answer.
    #[error(
        "the host of rank {rank} has not answered rank {noticed_by} for {silent_ms} ms; see whether it runs, and \
             whether the network between the hosts works, or raise Builder::host_timeout"
    )]
    HostLost {
        /// The lowest rank of the host.
        rank: usize,
        /// The rank that saw it.
        noticed_by: usize,
        /// How long the host had been silent.
        silent_ms: u64,
    },

    /// A rank panicked, which ended its part in the group.
    #[error("rank {rank} panicked{}", Panic(.message))]
    RankPanicked {
        /// The rank.
        rank: usize,
        /// What the panic said, and where, if that is known. (The first group of a process installs a panic hook that
        /// notes this and then calls the program's own hook. If the program replaces that hook, it is not noted.)
        message: Option<String>,
    },

    /// A rank's own program has failed, so the rank does not go on.
    ///
    /// The rank called [`Group::fail`](crate::Group::fail), or returned an error from the function that it gave to
    /// [`Group::threads`](crate::Group::threads).
    #[error("the program of rank {rank} failed: {}", OneLine(.reason))]
    ProgramFailed {
        /// The rank.
        rank: usize,
        /// The program's error, in its own words.
        reason: String,
    },

    /// A function that a program gave to a call has returned an error, which ended the operation on every rank.
    #[error("rank {rank}: the function that was given to {call} failed: {}", OneLine(.reason))]
    Callback {
        /// The rank whose program it is.
        rank: usize,
        /// The call.
        call: String,
        /// The function's error, in its own words.
        reason: String,
    },

    /// A function that a program gave to a call of a group has called the same group.
    ///
    /// The group cannot do anything else before the function returns.
    #[error(
        "rank {rank}: a function that was given to a call of a group makes another call of the same group; return from it first"
    )]
    CallInCallback {
        /// The rank.
        rank: usize,
    },

    /// A call of a group was made in a fork of the process that the group belongs to.
    #[error(
        "rank {rank}: process {child} is a fork of process {process}, which is the rank; make the call there, \
         or exec a program in the fork that joins as a rank of its own"
    )]
    Forked {
        /// The rank of the process that made the group.
        rank: usize,
        /// The process that made the group.
        process: u32,
        /// The process that made the call.
        child: u32,
    },

    /// Another thread of this rank was still in a call of the same group when the timeout had passed.
    ///
    /// Nothing has been done. This rank may make its call again.
    #[error(
        "rank {rank} waited {waited_ms} ms for another thread's {call} of the same group to return; \
         a function that is given to a call must not wait for other calls of its group"
    )]
    Busy {
        /// The rank.
        rank: usize,
        /// The call of the other thread.
        call: String,
        /// How long this thread waited for it.
        waited_ms: u64,
    },

    /// A rank left the group while this rank still waited for it.
    ///
    /// It left in order, and gave no reason.
    #[error(
        "rank {rank} left the group while rank {waiting} waited in {what}; \
         see that rank's own output, and whether all ranks make the same calls"
    )]
    RankLeft {
        /// The rank that left.
        rank: usize,
        /// The rank that waits.
        waiting: usize,
        /// The call in which it waits, and its place. For an operation, also what it waits for.
        what: String,
    },

    /// A rank did not do its part in time.
    #[error(
        "rank {waiting} gave up after {waited_ms} ms in {what}; \
         see whether rank {rank} is stopped, slow, or making other calls, or raise {deadline}"
    )]
    Timeout {
        /// The rank that is waited for. If it waits for a rank too, in this group or in one that was split from the same
        /// one, the last rank of the chain.
        rank: usize,
        /// The rank that waits.
        waiting: usize,
        /// The call in which it waits, its place, and what it waits for.
        what: String,
        /// For how long it waited. If all ranks have begun the call, since then.
        waited_ms: u64,
        /// The deadline that has passed.
        deadline: Deadline,
    },

    /// The group has failed before and can do nothing more.
    #[error("{} has failed: {}", GroupOf(.cause, "the group"), WithinGroup(.cause))]
    Poisoned {
        /// The first failure.
        cause: Box<Error>,
    },

    /// An error of a group that has a name, or that is a part of a job or of a different group.
    ///
    /// [`Error::cause`] returns the error without the group. Ranks in its fields, as in its sentence, have the numbers of
    /// the job, also if the group numbers them differently.
    #[error("{}: {}", GroupOf(self, "the group"), WithinGroup(self))]
    InGroup {
        /// The group's name ([`Group::name`](crate::Group::name)).
        group: String,
        /// By rank of the group: which rank of the job it is. Without a launcher, the job is the group that was split.
        job_ranks: Vec<usize>,
        /// The error. The ranks that it names are those of the job.
        error: Box<Error>,
    },

    /// A launched rank process failed.
    #[error("rank {rank} {}{}{}", Ended(.status), Because(.cause), Killed(.killed))]
    RankFailed {
        /// The rank at fault.
        rank: usize,
        /// How its process ended.
        status: String,
        /// The group's first failure, if the ranks had a group that failed.
        cause: Option<Box<Error>>,
        /// The other ranks that still ran 1.5 seconds after a rank had failed, and that the launcher killed.
        killed: Vec<usize>,
    },

    /// A process that is a rank tried to launch ranks.
    #[error(
        "this process is a rank, started by {launcher}, and cannot launch ranks; where gemmesh::launch::is_rank() is true, call Group::from_env instead"
    )]
    AlreadyRank {
        /// The launcher that started it.
        launcher: String,
    },

    /// A message from a rank cannot be read.
    #[error("rank {rank} sent a message that cannot be read: {reason}")]
    Message {
        /// The rank that sent it.
        rank: usize,
        /// What is wrong with it.
        reason: String,
    },

    /// A bug of this library.
    ///
    /// No argument that a program gives can cause this.
    #[error(
        "rank {rank}: {what}; this is a bug of gemmesh, please report it with the call that it came from"
    )]
    Internal {
        /// The rank that found it.
        rank: usize,
        /// What is wrong.
        what: String,
    },

    /// A number or an address is not aligned as this backend needs.
    #[error("rank {rank}: {call}: {what} is {value}; this backend needs a multiple of {multiple}{}",
        Nearest(*.value, *.multiple))]
    Unaligned {
        /// The rank that made the call.
        rank: usize,
        /// The call.
        call: Call,
        /// What the number is.
        what: String,
        /// The number.
        value: usize,
        /// What it must be a multiple of.
        multiple: usize,
    },

    /// Ranks on GPUs must be processes.
    ///
    /// In one process, the driver puts copies of different devices' streams one behind the other, and a wait in one
    /// stream would block all.
    #[error(
        "rank {rank} is in one process with another rank: ranks on GPUs must be processes of their own; start them with gemmesh::launch, torchrun or mpirun"
    )]
    NeedsProcesses {
        /// The rank.
        rank: usize,
    },

    /// Two ranks use the same GPU, though there are enough GPUs for all ranks.
    #[error(
        "ranks {} and {} use the same GPU, though the ranks see {visible}; give CUDA_VISIBLE_DEVICES the same order on every rank, or choose each rank's GPU with Builder::device",
        .ranks[0], .ranks[1]
    )]
    SharedGpu {
        /// The two ranks.
        ranks: [usize; 2],
        /// How many GPUs the ranks see in all.
        visible: usize,
    },

    /// No GPU can be used.
    #[error("rank {rank} finds no GPU: {reason}")]
    NoGpu {
        /// The rank.
        rank: usize,
        /// What is missing.
        reason: String,
    },

    /// The CUDA driver is older than the functions that this library calls.
    #[error(
        "rank {rank}: the CUDA driver has no {function}; install a newer driver, one for CUDA 12.4 at least"
    )]
    DriverTooOld {
        /// The rank.
        rank: usize,
        /// The function that the driver lacks.
        function: String,
    },

    /// NCCL, which carries rows to GPUs of other hosts, cannot be used.
    #[error(
        "rank {rank} has no network to the GPUs of other hosts: {reason}; install NCCL 2.18 or newer (libnccl.so.2)"
    )]
    NoNccl {
        /// The rank.
        rank: usize,
        /// What is missing.
        reason: String,
    },

    /// The program was built without the GPU kernels.
    #[error(
        "rank {rank}: this program was built without GPU kernels, as GEMMESH_NO_KERNELS was set; build it with nvcc and without that variable"
    )]
    BuiltWithoutKernels {
        /// The rank.
        rank: usize,
    },

    /// There are no kernels for this generation of GPU.
    #[error(
        "rank {rank} has {name:?} (compute capability {capability}); the kernels need a Hopper GPU (9.0), such as H100 or H200"
    )]
    UnsupportedGpu {
        /// The rank.
        rank: usize,
        /// The GPU.
        name: String,
        /// Its compute capability.
        capability: String,
    },

    /// A rank's GPU cannot map the memory of a peer's GPU.
    #[error(
        "rank {rank} cannot map the memory of rank {peer}'s GPU ({reason}); the GPUs must be peers, see nvidia-smi topo -p2p r"
    )]
    NoPeerAccess {
        /// The rank that maps.
        rank: usize,
        /// The rank that owns the memory.
        peer: usize,
        /// Why it cannot.
        reason: String,
    },

    /// A GPU did not read what its peer wrote.
    #[error(
        "the GPUs of ranks {rank} and {peer} do not read what they write to each other; do not trust results between these GPUs"
    )]
    PeerMemory {
        /// The rank that read.
        rank: usize,
        /// Its peer.
        peer: usize,
    },

    /// There is no kernel for a configuration.
    #[error("rank {rank}: there is no kernel {asked}; choose one of {known}")]
    NoKernel {
        /// The rank.
        rank: usize,
        /// The configuration.
        asked: String,
        /// The kernels that there are.
        known: String,
    },

    /// This backend cannot do an operation by this route.
    #[error(
        "rank {rank}: GPUs cannot do {operation} by Route::{asked:?}; choose Route::{instead:?} (Config::route)"
    )]
    NoRoute {
        /// The rank.
        rank: usize,
        /// The name of the call.
        operation: String,
        /// The route that was asked for.
        asked: Route,
        /// A route that works.
        instead: Route,
    },

    /// Streams that must not block one another share a queue of the device.
    #[error(
        "rank {rank}: {what} needs streams that do not block one another, which {cause} prevents; remove the cause, or choose another route or stream"
    )]
    QueuedTogether {
        /// The rank.
        rank: usize,
        /// What needs separate queues.
        what: String,
        /// Why the streams share a queue: a variable of the environment, or a property of the driver.
        cause: String,
    },

    /// Something that can't be captured in a CUDA graph was put on a stream that is being captured.
    #[error(
        "rank {rank}: this call cannot be captured in a CUDA graph; capture only operations without a trace that have run \
         once before, and all_gather_matmul only by a route other than Route::Pull (Config::route)"
    )]
    Capturing {
        /// The rank.
        rank: usize,
    },

    /// The CUDA driver refused a call.
    #[error("rank {rank}: {call} failed: {reason}")]
    Cuda {
        /// The rank.
        rank: usize,
        /// The call.
        call: String,
        /// The driver's words.
        reason: String,
    },

    /// The operating system refused something.
    #[error("{}cannot {action}: {reason}", Who(.rank))]
    System {
        /// The rank, where it is known.
        rank: Option<usize>,
        /// What was tried.
        action: String,
        /// The system's words, with its error number.
        reason: String,
    },
}

/// A deadline of a group, which a wait has passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deadline {
    /// That of calls that all ranks have begun: [`Builder::timeout`](crate::Builder::timeout).
    Call,
    /// That of ranks that have not come: [`Builder::arrival_timeout`](crate::Builder::arrival_timeout).
    Arrival,
}

impl fmt::Display for Deadline {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            Deadline::Call => "Builder::timeout",
            Deadline::Arrival => "Builder::arrival_timeout",
        })
    }
}

impl Error {
    /// For `map_err`: the operating system refused `action`.
    pub(crate) fn system(
        rank: impl Into<Option<usize>>,
        action: impl Into<String>,
    ) -> impl FnOnce(std::io::Error) -> Error {
        let (rank, action) = (rank.into(), action.into());
        move |error| Error::System {
            rank,
            action,
            reason: resources::explain(&error),
        }
    }

    /// For `map_err`: `what`, a thread or a process, could not be started.
    pub(crate) fn not_started(
        rank: usize,
        what: impl Into<String>,
    ) -> impl FnOnce(std::io::Error) -> Error {
        let what = what.into();
        move |error| Error::System {
            rank: Some(rank),
            action: format!("start {what}"),
            reason: resources::explain_start(&error),
        }
    }

    /// For `map_err`: `bytes` bytes of memory, or a descriptor for them, could not be allocated.
    pub(crate) fn out_of_memory(rank: usize, bytes: usize) -> impl FnOnce(std::io::Error) -> Error {
        move |error| match resources::is_memory(&error) {
            true => Error::OutOfMemory {
                rank,
                bytes,
                reason: resources::explain_memory(&error),
            },
            false => Error::system(rank, format!("share {} of memory", Bytes(bytes as u64)))(error),
        }
    }

    /// The error, of `refused`.
    pub(crate) fn in_call(mut self, refused: Call) -> Error {
        if let Error::Limit { call, .. }
        | Error::Unsupported { call, .. }
        | Error::Refused { call, .. }
        | Error::Shape { call, .. }
        | Error::Count { call, .. }
        | Error::DType { call, .. }
        | Error::Unsuitable { call, .. }
        | Error::ForeignArgument { call, .. }
        | Error::Unaligned { call, .. } = &mut self
        {
            *call = refused;
        }
        self
    }

    /// The call that was refused, if an argument is wrong.
    pub fn call(&self) -> Option<&Call> {
        match self.cause() {
            Error::Limit { call, .. }
            | Error::Unsupported { call, .. }
            | Error::Refused { call, .. }
            | Error::Shape { call, .. }
            | Error::Count { call, .. }
            | Error::DType { call, .. }
            | Error::Unsuitable { call, .. }
            | Error::ForeignArgument { call, .. }
            | Error::Unaligned { call, .. } => Some(call),
            Error::Mismatch { call, .. } => call.as_ref(),
            _ => None,
        }
    }

    /// The failure itself, without saying that it happened earlier, nor in which group it happened. If it happened in a
    /// part of a job or of a group, the ranks in its fields are those of the job.
    ///
    /// ```
    /// use gemmesh::{Error, Group, Host};
    ///
    /// Group::<Host>::threads(4, |world| {
    ///     let pair = world.split(world.rank() / 2, 0)?;
    ///     if world.rank() == 3 {
    ///         pair.fail("no more data");
    ///     }
    ///     if let Err(error) = pair.barrier() {
    ///         // Rank 1 of its pair.
    ///         assert!(matches!(error.cause(), Error::ProgramFailed { rank: 3, .. }));
    ///     }
    ///     Ok::<_, Error>(())
    /// })?;
    /// # Ok::<_, Error>(())
    /// ```
    pub fn cause(&self) -> &Error {
        match self {
            Error::Poisoned { cause } => cause.cause(),
            Error::InGroup { error, .. } => error.cause(),
            other => other,
        }
    }

    /// The failure itself, with its group, without saying that it happened earlier.
    pub(crate) fn first(&self) -> &Error {
        match self {
            Error::Poisoned { cause } => cause.first(),
            other => other,
        }
    }
}

/// Written at once, so that the lines of several ranks do not mix.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(&self.to_string())
    }
}

#[cfg(test)]
pub(crate) mod sentences;

#[cfg(test)]
mod tests {
    use super::*;

    /// Counts what is written to it.
    #[derive(Default)]
    struct Writes(Vec<String>);

    impl fmt::Write for Writes {
        fn write_str(&mut self, text: &str) -> fmt::Result {
            self.0.push(text.into());
            Ok(())
        }
    }

    #[test]
    fn debug_is_the_sentence_written_at_once() {
        let error = Error::DuplicateRank {
            rank: 1,
            pids: [7, 8],
        };
        let sentence = error.to_string();
        let (mut short, mut long) = (Writes::default(), Writes::default());
        fmt::write(&mut short, format_args!("{error:?}")).unwrap();
        fmt::write(&mut long, format_args!("{error:#?}")).unwrap();
        assert_eq!([short.0, long.0], [[sentence.clone()], [sentence]]);
    }

    #[test]
    fn messages_name_the_rank_the_value_and_the_remedy() {
        let missing = Error::RanksMissing {
            ranks: vec![3],
            address: "job".into(),
            waited_ms: 500,
            reason: None,
        };
        assert_eq!(
            missing.to_string(),
            "rank 3 has not come to \"job\" within 500 ms; see whether it was started, and with the same \
             address, or raise Builder::arrival_timeout"
        );
        let unsupported = Error::Unsupported {
            rank: 1,
            call: "matmul".into(),
            what: "operands must be bf16 or f16".into(),
        };
        assert_eq!(
            unsupported.to_string(),
            "rank 1: matmul: not supported: operands must be bf16 or f16"
        );
        let internal = Error::Internal {
            rank: 4,
            what: "nobody makes block 7".into(),
        };
        assert_eq!(
            internal.to_string(),
            "rank 4: nobody makes block 7; this is a bug of gemmesh, please report it with the call that it came from"
        );
        let refused = Error::System {
            rank: Some(2),
            action: "map 4096 bytes".into(),
            reason: "Cannot allocate memory".into(),
        };
        assert_eq!(
            refused.to_string(),
            "rank 2: cannot map 4096 bytes: Cannot allocate memory"
        );
    }

    #[test]
    fn errors_of_a_group_name_it_and_ranks_of_the_job() {
        let in_group = |job_ranks: &[usize]| Error::InGroup {
            group: "tp 1".into(),
            job_ranks: job_ranks.to_vec(),
            error: Box::new(Error::Capturing { rank: 1 }.of_job(job_ranks)),
        };
        let within = |job_ranks| in_group(job_ranks).to_string();
        let of = |rank| Error::Capturing { rank };
        assert_eq!(within(&[0, 1]), format!("group \"tp 1\": {}", of(1)));
        assert_eq!(
            within(&[4, 6]),
            format!("group \"tp 1\" of the job's ranks 4 and 6: {}", of(6))
        );
        assert_eq!(
            within(&[4, 5, 6]),
            format!("group \"tp 1\" of the job's ranks 4 to 6: {}", of(5))
        );
        let poisoned = Error::Poisoned {
            cause: Box::new(in_group(&[5, 3])),
        };
        assert_eq!(
            poisoned.to_string(),
            format!(
                "group \"tp 1\" of the job's ranks 5 and 3 has failed: {}",
                of(3)
            )
        );
        assert_eq!((poisoned.cause(), poisoned.at_fault()), (&of(3), vec![3]));
    }

    #[test]
    fn a_launcher_says_why_a_rank_failed_and_which_ranks_it_killed() {
        let left = Error::RankFailed {
            rank: 1,
            status: "exit status: 0".into(),
            cause: Some(Box::new(Error::RankLeft {
                rank: 1,
                waiting: 0,
                what: "barrier()".into(),
            })),
            killed: vec![2, 3],
        };
        assert_eq!(
            left.to_string(),
            "rank 1 ended: exit status: 0 (its group failed: rank 1 left the group while rank 0 waited in barrier(); \
             see that rank's own output, and whether all ranks make the same calls); \
             the launcher killed ranks 2 and 3, which still ran 1.5 seconds after the failure"
        );
    }
}
