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
        let verdict = self.judge_leader(&visitor);
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
