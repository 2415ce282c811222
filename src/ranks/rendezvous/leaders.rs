//! An attempt over several hosts: leaders come to rank 0 by TCP, or go there.

use std::time::Instant;

use super::LINGER;
use super::attempt::{Outcome, Rendezvous};
use crate::error::{Error, Result};
use crate::json;
use crate::ranks::meeting::{Line, Lobby, Meeting, Visitor, report};
use crate::ranks::wire::{self, Connection};

/// The leader of another host, as rank 0 sees it.
pub struct Leader {
    pub rank: usize,
    /// With its process.
    pub messages: Option<(Connection, u32)>,
    pub mirror: Option<Connection>,
}

impl Leader {
    pub fn expected(rank: usize) -> Leader {
        Leader {
            rank,
            messages: None,
            mirror: None,
        }
    }

    pub fn has_come(&self) -> bool {
        self.messages.is_some() && self.mirror.is_some()
    }
}

impl Rendezvous<'_> {
    /// Opens the lobby, if leaders will come.
    pub(super) fn open_lobby(&mut self) -> Result<()> {
        let meeting = self.identity.meeting.as_ref();
        if let Some(meeting) = meeting.filter(|_| !self.leaders.is_empty()) {
            let action = "listen for the other hosts' ranks (if its port is taken, set GEMMESH_PORT to a free one)";
            let listener = meeting.listener().map_err(Error::system(0, action))?;
            self.lobby = Some(Lobby::new(listener, meeting.key.clone())?);
        }
        Ok(())
    }

    /// Reports the outcome on this host to rank 0, and returns that of all hosts. If it is a group, this leader's link to
    /// rank 0 comes with it.
    pub(super) fn verdict(
        &self,
        meeting: &Meeting,
        outcome: Result<Outcome>,
        begin: Instant,
    ) -> Result<Outcome> {
        // A rank 0 that is not there keeps nobody for long from an error that is known.
        let longest = self.identity.deadlines.rendezvous() + 2 * LINGER;
        let deadline = match &outcome {
            Ok(_) => begin + longest,
            Err(_) => Instant::now() + 2 * LINGER,
        };
        let told = outcome.as_ref().map(|_| ()).map_err(Error::clone);
        let link = report(
            self.identity,
            meeting,
            &self.hello,
            self.version,
            &told,
            deadline,
        );
        let (memory, _) = outcome.map_err(|own| match &link {
            // Rank 0 has all hosts' missing ranks.
            Err(error @ Error::RanksMissing { ranks, .. }) if !ranks.contains(&0) => error.clone(),
            _ => own,
        })?;
        Ok((memory, vec![link?]))
    }

    /// Gives leaders that have come by TCP their places. Returns how many connections were accepted.
    pub(super) fn welcome(&mut self) -> (usize, Result<()>) {
        let Some(lobby) = &mut self.lobby else {
            return (0, Ok(()));
        };
        let (accepted, visitors) = lobby.receive(self.version);
        let verdicts = visitors
            .into_iter()
            .map(|visitor| self.seat_leader(visitor));
        (accepted, verdicts.fold(Ok(()), Result::and))
    }

    /// Gives a leader its place, or says why it has none, or why there is no group.
    fn seat_leader(&mut self, visitor: Visitor) -> Result<()> {
        let verdict = match self.judge_leader(&visitor) {
            // Other hosts may lack ranks too, and all are named.
            Err(Error::RanksMissing { ranks, .. }) => {
                self.missing_elsewhere.extend(ranks);
                Ok(())
            }
            verdict => verdict,
        };
        let line = visitor.report.as_ref().map(|report| report.line);
        let mut leaders = self.leaders.iter_mut();
        let leader = leaders.find(|leader| leader.rank == visitor.rank);
        match (leader, line) {
            (Some(leader), Some(Line::Mirror)) => leader.mirror = Some(visitor.stream),
            (Some(leader), Some(Line::Messages)) if verdict.is_ok() => {
                let pid = visitor.report.map_or(0, |report| report.hello.pid);
                leader.messages = Some((visitor.stream, pid));
            }
            _ => self.rejected_leaders.push(visitor.stream),
        }
        verdict
    }

    fn judge_leader(&self, visitor: &Visitor) -> Result<()> {
        let rank = visitor.rank;
        let report = visitor.report.as_ref();
        self.judge_hello(rank, visitor.version, report.map(|report| &report.hello))?;
        let Some(report) = report else {
            return Ok(());
        };
        let hosts = &self.identity.hosts;
        let its: Vec<usize> = hosts
            .ranks_of(hosts.host_of(rank), self.identity.world)
            .collect();
        let leader = hosts.leader_of(rank).to_string();
        self.mismatch(rank, "leader of its host", rank.to_string(), leader)?;
        let words = |ranks: &[usize]| format!("{ranks:?}");
        self.mismatch(rank, "ranks of its host", words(&report.ranks), words(&its))?;
        let seated = self.leaders.iter().find(|leader| leader.rank == rank);
        let seated = seated.and_then(|leader| leader.messages.as_ref());
        if let Some((_, first)) = seated.filter(|(stream, _)| !wire::has_hung_up(stream)) {
            return Err(Error::DuplicateRank {
                rank,
                pids: [*first, report.hello.pid],
            });
        }
        let outcome = json::outcome::<()>(report.outcome.as_bytes());
        outcome.map_err(|error| Error::Message {
            rank,
            reason: error.to_string(),
        })?
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, SocketAddr};
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;
    use crate::ranks::address;
    use crate::ranks::deadlines::Deadlines;
    use crate::ranks::identity::Identity;
    use crate::ranks::meeting::{Key, Place};
    use crate::ranks::rendezvous::{PROTOCOL_VERSION, meet_speaking};
    use crate::ranks::tcp;
    use crate::schedule::Hosts;

    /// The errors of ranks that meet, each alone on its host, after `change` of the rank at a place. Ranks stand at the
    /// places of `ranks`.
    fn errors(
        ranks: &[usize],
        world: usize,
        version: impl Fn(usize) -> u32 + Sync,
        change: impl Fn(usize, &mut Identity) + Sync,
    ) -> Vec<Error> {
        let listener = tcp::listen(0).unwrap();
        let port = listener.local_addr().unwrap().port();
        let rank_0 = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let address = address::draw().unwrap();
        let hosts: Vec<usize> = (0..world).collect();
        let identity = |place: usize| {
            let place_of_rank_0 = match ranks[place] {
                0 => Place::Listening(listener.try_clone().unwrap()),
                _ => Place::At(vec![rank_0]),
            };
            let mut identity = Identity {
                hosts: Hosts::of(&hosts).unwrap(),
                meeting: Some(Arc::new(Meeting {
                    key: Key::of(address.reveal(), "test"),
                    place: place_of_rank_0,
                })),
                ..Identity::of_test(ranks[place], world, address.reveal())
            };
            change(place, &mut identity);
            identity
        };
        let (identity, version) = (&identity, &version);
        std::thread::scope(|scope| {
            let meet = |place| move || meet_speaking(&identity(place), version(place)).unwrap_err();
            let threads: Vec<_> = (0..ranks.len())
                .map(|place| scope.spawn(meet(place)))
                .collect();
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap())
                .collect()
        })
    }

    #[track_caller]
    fn assert_mismatch(errors: &[Error], of: usize, expected: &str) {
        for error in errors {
            let Error::Mismatch { rank, what, .. } = error else {
                panic!("{error}");
            };
            assert_eq!((*rank, what.as_str()), (of, expected));
        }
    }

    #[test]
    fn all_hosts_are_told_which_one_speaks_another_version() {
        let version = |place| PROTOCOL_VERSION + u32::from(place == 2);
        let errors = errors(&[0, 1, 2], 3, version, |_, _| {});
        assert_mismatch(&errors, 2, "protocol version");
    }

    #[test]
    fn all_hosts_are_told_which_one_has_another_backend() {
        let change = |place, identity: &mut Identity| {
            if place == 1 {
                identity.backend = "cuda";
            }
        };
        let errors = errors(&[0, 1, 2], 3, |_| PROTOCOL_VERSION, change);
        assert_mismatch(&errors, 1, "backend");
    }

    #[test]
    fn two_hosts_that_are_one_are_told() {
        let errors = errors(&[0, 1, 1], 3, |_| PROTOCOL_VERSION, |_, _| {});
        let own = std::process::id();
        for error in errors {
            let duplicate = Error::DuplicateRank {
                rank: 1,
                pids: [own, own],
            };
            assert_eq!(error, duplicate);
        }
    }

    #[test]
    fn hosts_that_disagree_about_hosts_are_told() {
        let change = |place, identity: &mut Identity| {
            if place == 1 {
                identity.hosts = Hosts::of(&[0, 1, 0, 1]).unwrap();
                identity.deadlines = Deadlines::new(Duration::ZERO, Some(Duration::ZERO));
            }
        };
        let errors = errors(&[0, 1], 4, |_| PROTOCOL_VERSION, change);
        assert_mismatch(&errors[..1], 1, "ranks of its host");
    }
}
