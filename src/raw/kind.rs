//! Kinds of errors, for languages that tell errors apart by a number or by an exception's class.

use crate::error::Error;

/// What kind of failure an error is, and whom it concerns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// An argument does not fit, or asks for something that is not supported. Nothing has been done.
    Argument,
    /// The call may not be made here or now. Nothing has been done.
    Misuse,
    /// The environment does not say who this rank is.
    Environment,
    /// The ranks did not find one another, or do not fit together.
    Rendezvous,
    /// The ranks made different calls.
    CallMismatch,
    /// There is no memory.
    OutOfMemory,
    /// A rank died, panicked, left, or its program failed.
    Rank,
    /// A deadline has passed.
    Timeout,
    /// A GPU or its driver lacks something or failed.
    Device,
    /// The operating system refused something.
    System,
    /// A bug of this library.
    Internal,
}

impl Error {
    /// The kind of the failure to a rank of the group that gets the error.
    ///
    /// What another rank was refused, or what has ended the group before, is a failure of that rank to all others.
    #[doc(hidden)]
    pub fn kind_on(&self, rank: usize) -> ErrorKind {
        let (own, is_over) = (self.job_rank(rank), self.has_ended_the_group());
        match self.kind() {
            ErrorKind::Argument | ErrorKind::Misuse
                if is_over || !(self.at_fault().is_empty() || self.at_fault().contains(&own)) =>
            {
                ErrorKind::Rank
            }
            kind => kind,
        }
    }

    /// The number that this error has for a rank of its group: that in the job.
    #[doc(hidden)]
    pub fn job_rank(&self, rank: usize) -> usize {
        match self {
            Error::InGroup { job_ranks, .. } => job_ranks.get(rank).copied().unwrap_or(rank),
            Error::Poisoned { cause } => cause.job_rank(rank),
            _ => rank,
        }
    }

    fn has_ended_the_group(&self) -> bool {
        match self {
            Error::Poisoned { .. } => true,
            Error::InGroup { error, .. } => error.has_ended_the_group(),
            _ => false,
        }
    }

    /// The kind of the failure itself: [`Error::cause`].
    #[doc(hidden)]
    pub fn kind(&self) -> ErrorKind {
        match self.cause() {
            Error::Limit { .. }
            | Error::Unsupported { .. }
            | Error::Refused { .. }
            | Error::Shape { .. }
            | Error::Count { .. }
            | Error::DType { .. }
            | Error::Unsuitable { .. }
            | Error::ForeignArgument { .. }
            | Error::Unaligned { .. }
            | Error::NoKernel { .. }
            | Error::NoRoute { .. } => ErrorKind::Argument,
            Error::CallInCallback { .. }
            | Error::Forked { .. }
            | Error::Busy { .. }
            | Error::Capturing { .. }
            | Error::AlreadyRank { .. }
            | Error::NeedsProcesses { .. }
            | Error::QueuedTogether { .. } => ErrorKind::Misuse,
            Error::Environment { .. } | Error::EnvironmentValue { .. } => ErrorKind::Environment,
            Error::RanksMissing { .. }
            | Error::RankNeverJoined { .. }
            | Error::AddressTaken { .. }
            | Error::UnknownUser { .. }
            | Error::KeyRefused { .. }
            | Error::DuplicateRank { .. }
            | Error::Mismatch { .. }
            | Error::SharedGpu { .. } => ErrorKind::Rendezvous,
            Error::CallMismatch { .. } => ErrorKind::CallMismatch,
            Error::OutOfMemory { .. } => ErrorKind::OutOfMemory,
            Error::RankLost { .. }
            | Error::HostLost { .. }
            | Error::RankPanicked { .. }
            | Error::ProgramFailed { .. }
            | Error::Callback { .. }
            | Error::RankLeft { .. }
            | Error::RankFailed { .. } => ErrorKind::Rank,
            Error::Timeout { .. } => ErrorKind::Timeout,
            Error::NoGpu { .. }
            | Error::DriverTooOld { .. }
            | Error::NoNccl { .. }
            | Error::BuiltWithoutKernels { .. }
            | Error::UnsupportedGpu { .. }
            | Error::NoPeerAccess { .. }
            | Error::PeerMemory { .. }
            | Error::Cuda { .. } => ErrorKind::Device,
            Error::System { .. } => ErrorKind::System,
            Error::Message { .. } | Error::Internal { .. } => ErrorKind::Internal,
            // `cause` takes these off.
            Error::Poisoned { .. } | Error::InGroup { .. } => ErrorKind::Internal,
        }
    }
}
