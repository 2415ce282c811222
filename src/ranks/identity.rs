//! How a process that looks for its group introduces itself.

use std::borrow::Cow;
use std::sync::Arc;

use super::address::Address;
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
    pub address: Address,
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
    pub fn local_address(&self) -> Cow<'_, Address> {
        match self.hosts.host_of(self.rank) {
            0 => Cow::Borrowed(&self.address),
            host => Cow::Owned(self.address.for_part(&format!("host {host}"))),
        }
    }

    /// True if `rank` is another rank, and this rank's launcher says that its process has ended.
    ///
    /// The launcher speaks of ranks of its job. A group that meets at an address of its own does not know yet which of them
    /// it has, so it waits until the deadline.
    pub fn has_ended(&self, rank: usize) -> bool {
        let naming = self.naming.as_ref().filter(|naming| naming.is_of_one_job);
        let of_job = naming.and_then(|naming| naming.job_ranks.get(rank));
        let launcher = self.launcher.as_ref().filter(|_| rank != self.rank);
        let of_launcher = launcher.zip(of_job);
        of_launcher.is_some_and(|(launcher, &rank)| launcher.has_ended(rank))
    }

    /// A rank of a group on one host, as tests need it.
    #[cfg(any(test, fuzzing))]
    pub fn of_test(rank: usize, world: usize, address: &str) -> Identity {
        use std::time::Duration;

        let deadline = Duration::from_secs(5);
        Identity {
            rank,
            world,
            address: Address::of(address),
            hosts: Hosts::default(),
            meeting: None,
            backend: "host",
            deadlines: Deadlines::new(deadline, Some(deadline)),
            arrival: Arrival {
                name: None,
                job: None,
            },
            naming: None,
            launcher: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ranks::address::draw;
    use crate::ranks::reports::ReportReceiver;

    #[test]
    fn the_end_of_a_rank_of_the_job_is_none_of_a_group_that_counts_its_ranks_anew() {
        let launch = draw().unwrap();
        let mut receiver = ReportReceiver::new(&launch, 4).unwrap();
        receiver.show_end(0);
        // Ranks 2 and 3 of the job meet as 0 and 1.
        let pair = Identity {
            launcher: ReportSender::new(3, &launch),
            ..Identity::of_test(1, 2, "pair")
        };
        assert!(!pair.has_ended(0));
        let job = Identity {
            launcher: ReportSender::new(3, &launch),
            naming: Some(Naming::of_job(None, 4)),
            ..Identity::of_test(3, 4, launch.reveal())
        };
        assert!(job.has_ended(0) && !job.has_ended(1));
        let part = |is_of_one_job| Identity {
            launcher: ReportSender::new(3, &launch),
            naming: Some(Naming {
                name: None,
                job_ranks: vec![2, 0, 3],
                is_of_one_job,
            }),
            ..Identity::of_test(2, 3, "part")
        };
        assert!(part(true).has_ended(1) && !part(true).has_ended(0));
        assert!(!part(false).has_ended(1));
    }
}
