//! How a process that looks for its group introduces itself.

use super::deadlines::Deadlines;
use super::naming::{Arrival, Naming};
use super::reports::ReportSender;

/// A process that looks for the others of its group.
#[derive(Clone, Debug)]
pub struct Identity {
    pub rank: usize,
    pub world: usize,
    pub address: String,
    pub backend: &'static str,
    pub deadlines: Deadlines,
    /// What it says of itself when all have come.
    pub arrival: Arrival,
    /// What the group is called, if that is known before all have come.
    pub naming: Option<Naming>,
    /// Sends reports to the launcher, if it has started this process.
    pub launcher: Option<ReportSender>,
}

impl Identity {
    /// True if `rank` is another rank, and this rank's launcher says that its process has ended.
    pub fn has_ended(&self, rank: usize) -> bool {
        let launcher = self.launcher.as_ref().filter(|_| rank != self.rank);
        launcher.is_some_and(|launcher| launcher.has_ended(rank))
    }
}
