//! The ranks that an error names.

use super::Error;

impl Error {
    /// The error of a group with its ranks numbered as ranks of the job. `job_ranks` has them by rank of the group.
    pub(super) fn of_job(&self, job_ranks: &[usize]) -> Error {
        let mut error = self.clone();
        for rank in error.ranks_mut() {
            *rank = job_ranks.get(*rank).copied().unwrap_or(*rank);
        }
        error
    }

    /// Every rank of this error's group that is a number in it.
    fn ranks_mut(&mut self) -> Vec<&mut usize> {
        match self {
            Error::Poisoned { cause } => cause.ranks_mut(),
            // It numbers the ranks of a group of its own.
            Error::InGroup { .. } => Vec::new(),
            Error::RanksMissing { ranks, .. } => ranks.iter_mut().collect(),
            Error::UnknownUser { ranks, rank, .. } => ranks.iter_mut().chain([rank]).collect(),
            Error::RankFailed {
                rank,
                cause,
                killed,
                ..
            } => {
                let cause = cause.as_mut().map(|cause| cause.ranks_mut());
                let named = killed.iter_mut().chain([rank]);
                named.chain(cause.into_iter().flatten()).collect()
            }
            Error::SharedGpu { ranks, .. } => ranks.iter_mut().collect(),
            Error::Limit { rank, .. } | Error::System { rank, .. } => rank.iter_mut().collect(),
            Error::Mismatch { rank, other, .. }
            | Error::CallMismatch { rank, other, .. }
            | Error::RankLost {
                rank,
                noticed_by: other,
            }
            | Error::RankLeft {
                rank,
                waiting: other,
                ..
            }
            | Error::Timeout {
                rank,
                waiting: other,
                ..
            }
            | Error::NoPeerAccess {
                rank, peer: other, ..
            }
            | Error::PeerMemory { rank, peer: other } => vec![rank, other],
            Error::Unsupported { rank, .. }
            | Error::Shape { rank, .. }
            | Error::Count { rank, .. }
            | Error::DType { rank, .. }
            | Error::Unsuitable { rank, .. }
            | Error::ForeignArgument { rank, .. }
            | Error::RankNeverJoined { rank }
            | Error::AddressTaken { rank, .. }
            | Error::DuplicateRank { rank, .. }
            | Error::OutOfMemory { rank, .. }
            | Error::RankPanicked { rank, .. }
            | Error::ProgramFailed { rank, .. }
            | Error::Callback { rank, .. }
            | Error::CallInCallback { rank }
            | Error::Forked { rank, .. }
            | Error::Busy { rank, .. }
            | Error::Message { rank, .. }
            | Error::Internal { rank, .. }
            | Error::Unaligned { rank, .. }
            | Error::NeedsProcesses { rank }
            | Error::NoGpu { rank, .. }
            | Error::DriverTooOld { rank, .. }
            | Error::BuiltWithoutKernels { rank }
            | Error::UnsupportedGpu { rank, .. }
            | Error::NoKernel { rank, .. }
            | Error::NoRoute { rank, .. }
            | Error::QueuedTogether { rank, .. }
            | Error::Capturing { rank }
            | Error::Cuda { rank, .. } => vec![rank],
            Error::Environment { .. }
            | Error::EnvironmentValue { .. }
            | Error::AlreadyRank { .. } => Vec::new(),
        }
    }
}
