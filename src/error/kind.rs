//! The kinds of failures, each with its sentence.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::Error;
use super::words::{
    also_killed, because, bounds, ended, failed_in, have, if_any, of_peer, one_line, panic,
    transposed,
};
use crate::call::{Difference, MadeCall, Ordinal};
use crate::resources::Bytes;

/// What has failed.
///
/// `Display` prints what an [`Error`] says of its rank or of its call.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Kind {
    /// A number is outside what this library can do.
    #[error("{what} is {value}; it must be {}", bounds(*.min, *.max))]
    Limit {
        /// What the number is.
        what: String,
        /// The number.
        value: usize,
        /// The least that works.
        min: usize,
        /// The most that works.
        max: usize,
    },
    /// An argument has the wrong shape for the operation.
    #[error("{argument} is {found:?} and must be {expected:?}{}", transposed(.argument, .expected, .found))]
    Shape {
        /// The argument, with the names of its extents.
        argument: String,
        /// The shape it must have.
        expected: Vec<usize>,
        /// The shape it has.
        found: Vec<usize>,
    },
    /// A property of an argument is not as it must be: its type, its device, its group, its place, how much it holds.
    #[error("{what} is {found} and must be {expected}{}", if_any("; ", .remedy, ""))]
    Unsuitable {
        /// The property and the argument that has it, such as "the device of b".
        what: String,
        /// What the property must be.
        expected: String,
        /// What the property is.
        found: String,
        /// What to do, unless that is clear.
        remedy: Option<String>,
    },
    /// A call, a configuration or a schedule asks for something that is not supported.
    #[error("{what}")]
    Unsupported {
        /// What must hold instead.
        what: String,
    },
    /// The call may not be made here or now. Nothing has been done.
    #[error("{what}")]
    Misuse {
        /// Why, and what to do.
        what: String,
    },
    /// Another thread of this rank was still in a call of the same group when the timeout had passed.
    ///
    /// Nothing has been done. This rank may make its call again.
    #[error(
        "waited {waited_ms} ms for another thread's {call} of the same group to return; \
         a function that is given to a call must not wait for other calls of its group"
    )]
    Busy {
        /// The call of the other thread.
        call: String,
        /// How long this thread waited for it.
        waited_ms: u64,
    },
    /// Something that can't be captured in a CUDA graph was put on a stream that is being captured.
    #[error(
        "this call cannot be captured in a CUDA graph; capture only operations without a trace that have run once before, \
         and all_gather_matmul only by a route other than Route::Pull (Config::route)"
    )]
    Capturing,
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
    #[error("{} not come to {address:?} within {waited_ms} ms{}; see whether {} started, and with the same address, \
         or raise Builder::arrival_timeout",
        have(.ranks), if_any(" (", .reason, ")"), if .ranks.len() == 1 { "it was" } else { "they were" })]
    RanksMissing {
        /// The ranks that did not come.
        ranks: Vec<usize>,
        /// The address at which the ranks were to meet.
        address: String,
        /// How long this rank waited.
        waited_ms: u64,
        /// What is known of them: how a leader's latest tries to reach rank 0 failed, or which process was turned away.
        reason: Option<String>,
    },
    /// The process of a launched rank ended before it joined the group.
    #[error("ended before it joined the group; see that rank's own output")]
    NeverJoined,
    /// The socket names at which the ranks could meet are taken.
    ///
    /// Other processes hold them, or a process of the same user holds one and gives no answer.
    #[error(
        "found the names of address {address:?} taken for {waited_ms} ms, by {holder}; end that process, or choose \
         another address"
    )]
    AddressTaken {
        /// The address at which the rank was to meet the others.
        address: String,
        /// A process that holds a name, and its user, as far as the system tells.
        holder: String,
        /// How long the rank tried.
        waited_ms: u64,
    },
    /// Rank 0 turned this rank away, because their keys differ. Or another program listens where rank 0 was expected.
    #[error(
        "was turned away at {address}: the process there does not have this rank's key; give all ranks of the job \
         the same GEMMESH_KEY, and see that no other program listens there"
    )]
    KeyRefused {
        /// Where it was turned away.
        address: String,
    },
    /// Two processes claim the same rank.
    #[error("is claimed by two processes (pids {} and {}); give each its own rank", .pids[0], .pids[1])]
    DuplicateRank {
        /// The two processes.
        pids: [u32; 2],
    },
    /// A rank disagrees with others about something that must be the same on all ranks.
    #[error(
        "has {what} {theirs} and rank {other} has {expected}; all ranks of a group must have the same"
    )]
    Mismatch {
        /// What differs.
        what: String,
        /// Its value on that rank.
        theirs: String,
        /// The first rank that has the expected value.
        other: usize,
        /// Its value on that rank.
        expected: String,
    },
    /// Two ranks use the same GPU, though there are enough GPUs for all ranks.
    #[error("ranks {} and {} use the same GPU, though the ranks see {visible}; give CUDA_VISIBLE_DEVICES the same order on \
         every rank, or choose each rank's GPU with Builder::device",
        .ranks[0], .ranks[1])]
    SharedGpu {
        /// The two ranks.
        ranks: [usize; 2],
        /// How many GPUs the ranks see in all.
        visible: usize,
    },
    /// A rank made a different call than the others.
    ///
    /// All ranks must make the same calls in the same order. A rank knows the place of its own call, and that of the rank
    /// that noticed.
    #[error("{}{}; all ranks must make the same calls in the same order (the {} collective call of the group: {expected} \
         on rank {other})",
        Difference(.theirs, *.other, .expected), if_any(", after it was refused a call (", .refused, ")"), Ordinal(*.number))]
    CallMismatch {
        /// Its call.
        theirs: MadeCall,
        /// A rank that made the expected call.
        other: usize,
        /// The call that was expected.
        expected: MadeCall,
        /// Which of the group's collective calls it is, counted from 1. Making the group does not count.
        number: u64,
        /// Why the rank that differs was refused a call, if it then made this one instead.
        refused: Option<Error>,
    },
    /// Memory could not be allocated.
    #[error("has no memory for {}: {reason}; use smaller matrices or fewer ranks", Bytes(*.bytes as u64))]
    OutOfMemory {
        /// How much was asked for.
        bytes: usize,
        /// Who refused it.
        reason: String,
    },
    /// A rank died.
    ///
    /// Its control connection ended without a farewell or a panic.
    #[error("died (noticed by rank {noticed_by}); see that rank's own output")]
    RankLost {
        /// The rank that saw it.
        noticed_by: usize,
    },
    /// The host of a rank, the lowest of the host, does not answer any more.
    ///
    /// Its system has acknowledged nothing that was sent to it. A host whose processes are only stopped does answer.
    #[error(
        "is on a host that has not answered rank {noticed_by} for {silent_ms} ms; see whether the host runs, and whether \
         the network between the hosts works, or raise Builder::host_timeout"
    )]
    HostLost {
        /// The rank that saw it.
        noticed_by: usize,
        /// How long the host had been silent.
        silent_ms: u64,
    },
    /// A rank panicked, which ended its part in the group.
    #[error("panicked{}", panic(.message))]
    RankPanicked {
        /// What the panic said, and where, if that is known. (The first group of a process installs a panic hook that
        /// notes this and then calls the program's own hook. If the program replaces that hook, it is not noted.)
        message: Option<String>,
    },
    /// A rank's own program has failed: it called [`Group::fail`](crate::Group::fail), returned an error from the
    /// function that it gave to [`Group::threads`](crate::Group::threads), or a function that it gave to a call did.
    #[error("{}: {}", failed_in(.function_of), one_line(.reason))]
    ProgramFailed {
        /// The call that was given the function, if there is one.
        function_of: Option<String>,
        /// The program's error, in its own words.
        reason: String,
    },
    /// A rank left the group while another still waited for it.
    ///
    /// It left in order, and gave no reason.
    #[error(
        "left the group while rank {waiting} waited in {what}; see that rank's own output, and whether all ranks make \
         the same calls"
    )]
    RankLeft {
        /// The rank that waits.
        waiting: usize,
        /// The call in which it waits, and its place. For an operation, also what it waits for.
        what: String,
    },
    /// A launched rank process failed.
    #[error("{}{}{}", ended(.status), because(.cause), also_killed(.killed))]
    RankFailed {
        /// How its process ended.
        status: String,
        /// The group's first failure, if the ranks had a group that failed.
        cause: Option<Error>,
        /// The other ranks that still ran 1.5 seconds after a rank had failed, and that the launcher killed.
        killed: Vec<usize>,
    },
    /// A rank did not do its part in time.
    ///
    /// If that rank waits for a rank too, in this group or in one that was split from the same one, the error is of the
    /// last rank of the chain.
    #[error("kept rank {waiting} waiting for {waited_ms} ms in {what}; see whether it is stopped, slow, or making other calls, \
         or raise {}",
        .deadline)]
    Timeout {
        /// The rank that waits.
        waiting: usize,
        /// The call, the caller's location, and what it waits for.
        what: String,
        /// For how long it waited. If all ranks have begun the call, since then.
        waited_ms: u64,
        /// The deadline that has passed.
        deadline: Deadline,
    },
    /// A GPU, its driver or a library of it lacks something or failed.
    #[error("{what}")]
    Device {
        /// What it is, and what to do.
        what: String,
    },
    /// A GPU cannot reach the memory of another rank's GPU.
    #[error("{}", of_peer(*.peer, .reason))]
    PeerMemory {
        /// The rank that owns the memory.
        peer: usize,
        /// Why the memory can't be mapped. None if it was mapped, and what was written there was not read.
        reason: Option<String>,
    },
    /// The operating system refused something.
    #[error("cannot {action}: {reason}")]
    System {
        /// What was tried.
        action: String,
        /// The system's words, with its error number.
        reason: String,
    },
    /// A message from a rank cannot be read.
    #[error("sent a message that cannot be read: {reason}")]
    Message {
        /// What is wrong with it.
        reason: String,
    },
    /// A bug of this library.
    ///
    /// No argument that a program gives can cause this.
    #[error("{what}; this is a bug of gemmesh, please report it with the call that it came from")]
    Internal {
        /// What is wrong.
        what: String,
    },
}

/// A deadline of a group, which a wait has passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
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

/// Whom a failure concerns, and what it means for the group. C's statuses and Python's exceptions are these.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Class {
    /// An argument does not fit, or asks for something that is not supported. Nothing has been done.
    Argument,
    /// The call may not be made here or now. Nothing has been done.
    Misuse,
    /// The environment does not say who this rank is.
    Environment,
    /// The ranks did not find one another, or do not fit together.
    Rendezvous,
    /// The ranks made different calls. The group has failed.
    CallMismatch,
    /// There is no memory.
    OutOfMemory,
    /// A rank died, panicked, left, or its program failed. The group has failed.
    Rank,
    /// A deadline has passed. The group has failed.
    Timeout,
    /// A GPU or its driver lacks something or failed.
    Device,
    /// The operating system refused something.
    System,
    /// A bug of this library.
    Internal,
}

impl Kind {
    /// The error of this kind, of `rank`.
    pub fn on(self, rank: usize) -> Error {
        Error::new(self, Some(rank))
    }

    /// Whom the failure concerns.
    pub fn class(&self) -> Class {
        match self {
            Kind::Limit { .. }
            | Kind::Shape { .. }
            | Kind::Unsuitable { .. }
            | Kind::Unsupported { .. } => Class::Argument,
            Kind::Misuse { .. } | Kind::Busy { .. } | Kind::Capturing => Class::Misuse,
            Kind::Environment { .. } | Kind::EnvironmentValue { .. } => Class::Environment,
            Kind::RanksMissing { .. }
            | Kind::NeverJoined
            | Kind::AddressTaken { .. }
            | Kind::KeyRefused { .. }
            | Kind::DuplicateRank { .. }
            | Kind::Mismatch { .. }
            | Kind::SharedGpu { .. } => Class::Rendezvous,
            Kind::CallMismatch { .. } => Class::CallMismatch,
            Kind::OutOfMemory { .. } => Class::OutOfMemory,
            Kind::RankLost { .. }
            | Kind::HostLost { .. }
            | Kind::RankPanicked { .. }
            | Kind::ProgramFailed { .. }
            | Kind::RankLeft { .. }
            | Kind::RankFailed { .. } => Class::Rank,
            Kind::Timeout { .. } => Class::Timeout,
            Kind::Device { .. } | Kind::PeerMemory { .. } => Class::Device,
            Kind::System { .. } => Class::System,
            Kind::Message { .. } | Kind::Internal { .. } => Class::Internal,
        }
    }

    /// True if the sentence goes on after "rank 3 ". Otherwise it is whole, after "rank 3: ".
    pub(super) fn is_said_of_rank(&self) -> bool {
        !matches!(
            self.class(),
            Class::Argument | Class::Environment | Class::Device | Class::System
        ) && !matches!(
            self,
            Kind::Misuse { .. } | Kind::Capturing | Kind::SharedGpu { .. } | Kind::Internal { .. }
        )
    }

    /// The ranks that are at fault besides the error's own, and the other ranks that the kind names.
    pub(super) fn ranks(&mut self) -> [Vec<&mut usize>; 2] {
        match self {
            Kind::RanksMissing { ranks, .. } => [ranks.iter_mut().collect(), vec![]],
            Kind::SharedGpu { ranks, .. } => [ranks.iter_mut().collect(), vec![]],
            Kind::CallMismatch { other, refused, .. } => [vec![], with_ranks_of(refused, [other])],
            Kind::RankFailed { cause, killed, .. } => [vec![], with_ranks_of(cause, killed)],
            Kind::Mismatch { other, .. }
            | Kind::RankLost { noticed_by: other }
            | Kind::HostLost {
                noticed_by: other, ..
            }
            | Kind::RankLeft { waiting: other, .. }
            | Kind::Timeout { waiting: other, .. }
            | Kind::PeerMemory { peer: other, .. } => [vec![], vec![other]],
            _ => [vec![], vec![]],
        }
    }
}

/// These ranks, and those that `error` names.
fn with_ranks_of<'a>(
    error: &'a mut Option<Error>,
    ranks: impl IntoIterator<Item = &'a mut usize>,
) -> Vec<&'a mut usize> {
    let of_error = error.iter_mut().flat_map(Error::ranks);
    ranks.into_iter().chain(of_error).collect()
}
