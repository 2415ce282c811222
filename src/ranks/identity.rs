//! How a process that looks for its group introduces itself.

use std::borrow::Cow;
use std::sync::Arc;

use super::deadlines::Deadlines;
use super::meeting::Meeting;
use super::naming::{Arrival, Naming};
use super::reports::ReportSender;
use crate::schedule::Hosts;

/// A process that looks for the others of its group.
#[derive(Clone, Debug)]
pub struct Identity {
    pub rank: usize,
    pub world: usize,
    pub address: String,
    /// Which ranks share a host.
    pub hosts: Hosts,
    /// Where leaders meet, if there are several hosts.
    pub meeting: Option<Arc<Meeting>>,
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
    /// The rank at which the ranks of this rank's host meet.
    pub fn leader(&self) -> usize {
        self.hosts.leader_of(self.rank)
    }

    /// True if this rank is that rank.
    pub fn leads(&self) -> bool {
        self.leader() == self.rank
    }

    /// The ranks of this rank's host.
    pub fn neighbours(&self) -> impl Iterator<Item = usize> {
        let host = self.hosts.host_of(self.rank);
        self.hosts.ranks_of(host, self.world)
    }

    /// The address at which they meet. Hosts that share a machine need different ones.
    pub fn local_address(&self) -> Cow<'_, str> {
        match self.hosts.host_of(self.rank) {
            0 => Cow::Borrowed(&self.address),
            host => Cow::Owned(format!("{}/host {host}", self.address)),
        }
    }

    /// True if `rank` is another rank, and this rank's launcher says that its process has ended.
    pub fn has_ended(&self, rank: usize) -> bool {
        let launcher = self.launcher.as_ref().filter(|_| rank != self.rank);
        launcher.is_some_and(|launcher| launcher.has_ended(rank))
    }
}
