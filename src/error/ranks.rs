//! The ranks that an error names, and which of them are at fault.

use super::Error;

/// The ranks of an error's group that are numbers in it.
#[derive(Default)]
struct Named<'a> {
    at_fault: Vec<&'a mut usize>,
    others: Vec<&'a mut usize>,
}

impl Error {
    /// The ranks at fault, as far as the error names them. They are ranks of the job if the error says its group.
    pub fn at_fault(&self) -> Vec<usize> {
        let mut error = self.cause().clone();
        let ranks = error.named().at_fault.into_iter();
        ranks.map(|rank| *rank).collect()
    }

    /// The error of a group with its ranks numbered as ranks of the job. `job_ranks` has them by rank of the group.
    pub(crate) fn of_job(mut self, job_ranks: &[usize]) -> Error {
        let Named { at_fault, others } = self.named();
        for rank in at_fault.into_iter().chain(others) {
            *rank = job_ranks.get(*rank).copied().unwrap_or(*rank);
        }
        self
    }

    fn named(&mut self) -> Named<'_> {
        match self {
            Error::Poisoned { cause } => cause.named(),
            // The first has ranks of the job already. The others name no rank.
            Error::InGroup { .. }
            | Error::Environment { .. }
            | Error::EnvironmentValue { .. }
            | Error::AlreadyRank { .. } => Named::default(),
            Error::RanksMissing { ranks, .. } => named(ranks.iter_mut(), []),
            Error::SharedGpu { ranks, .. } => named(ranks.iter_mut(), []),
            Error::UnknownUser { ranks, rank, .. } => named(ranks.iter_mut(), [rank]),
            Error::Limit { rank, .. } | Error::System { rank, .. } => named(rank.iter_mut(), []),
            Error::AddressTaken { rank, .. } => named([], [rank]),
            Error::RankFailed {
                rank,
                cause,
                killed,
                ..
            } => {
                let cause = cause.as_mut().map(|cause| cause.named());
                let cause = cause
                    .into_iter()
                    .flat_map(|of| of.at_fault.into_iter().chain(of.others));
                named([rank], killed.iter_mut().chain(cause))
            }
            error => error.named_alone(),
        }
    }

    /// The ranks of an error in which one is at fault, and at most one other has a part.
    fn named_alone(&mut self) -> Named<'_> {
        match self {
            Error::Mismatch { rank, other, .. }
            | Error::CallMismatch { rank, other, .. }
            | Error::RankLost {
                rank,
                noticed_by: other,
            }
            | Error::HostLost {
                rank,
                noticed_by: other,
                ..
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
            | Error::PeerMemory { rank, peer: other } => named([rank], [other]),
            Error::Unsupported { rank, .. }
            | Error::Refused { rank, .. }
            | Error::Shape { rank, .. }
            | Error::Count { rank, .. }
            | Error::DType { rank, .. }
            | Error::Unsuitable { rank, .. }
            | Error::ForeignArgument { rank, .. }
            | Error::RankNeverJoined { rank }
            | Error::KeyRefused { rank, .. }
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
            | Error::NoNccl { rank, .. }
            | Error::BuiltWithoutKernels { rank }
            | Error::UnsupportedGpu { rank, .. }
            | Error::NoKernel { rank, .. }
            | Error::NoRoute { rank, .. }
            | Error::QueuedTogether { rank, .. }
            | Error::Capturing { rank }
            | Error::Cuda { rank, .. } => named([rank], []),
            // `named` has these. sentences.rs has an example of each variant.
            _ => Named::default(),
        }
    }
}

fn named<'a>(
    at_fault: impl IntoIterator<Item = &'a mut usize>,
    others: impl IntoIterator<Item = &'a mut usize>,
) -> Named<'a> {
    Named {
        at_fault: at_fault.into_iter().collect(),
        others: others.into_iter().collect(),
    }
}
