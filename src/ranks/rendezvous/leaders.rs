//! An attempt over several hosts: leaders come to rank 0 by TCP, or go there.

use std::time::{Duration, Instant};

use super::attempt::{Outcome, Rendezvous};
use super::{Hello, LINGER};
use crate::error::{Error, Kind, Listed, Result};
use crate::json;
use crate::protocol::seat::{Line, Seat, Seating};
use crate::ranks::address;
use crate::ranks::identity::Identity;
use crate::ranks::meeting::{ANOTHER_KEY, Limits, Lobby, Meeting, Visitor, report};
use crate::ranks::mirror::HostLink;
use crate::ranks::notice;
use crate::ranks::search::RETRY;
use crate::ranks::wire::{self, Connection};

/// How long two processes of one rank may both seem to be there. The end of the first one's connections may be late.
const RIVALRY: Duration = Duration::from_secs(1);

/// The leader of another host, as rank 0 sees it.
pub struct Leader {
    pub rank: usize,
    seat: Seat<Connection>,
    /// The process that has the seat.
    pid: u32,
    /// True if ranks of its host have not come. It has no connection for the mirror then.
    lacks_ranks: bool,
    /// Connections of other processes that claim this rank, and since when.
    rivals: Vec<(Instant, Visitor)>,
}

/// The ranks that are missing, if this is the error.
fn lacks(error: &Error) -> Option<&[usize]> {
    match error.kind() {
        Kind::RanksMissing { ranks, .. } => Some(ranks),
        _ => None,
    }
}

impl Leader {
    pub fn expected(rank: usize) -> Leader {
        Leader {
            rank,
            seat: Seat::default(),
            pid: 0,
            lacks_ranks: false,
            rivals: Vec::new(),
        }
    }

    pub fn has_come(&self) -> bool {
        self.seat.has(Line::Messages) && (self.seat.has(Line::Mirror) || self.lacks_ranks)
    }

    /// True if other processes claim this rank.
    pub fn has_rivals(&self) -> bool {
        !self.rivals.is_empty()
    }

    /// The connections for messages and for the mirror.
    pub fn into_connections(self) -> (Option<Connection>, Option<Connection>) {
        self.seat.into_connections()
    }

    /// Gives up the connections of all processes that claim this rank: those for messages, and those for mirrors.
    pub fn leave(&mut self) -> (Vec<Connection>, Vec<Connection>) {
        let (messages, mirror) = std::mem::take(&mut self.seat).into_connections();
        let mut connections = (Vec::from_iter(messages), Vec::from_iter(mirror));
        for (_, rival) in self.rivals.drain(..) {
            match rival.report.map(|report| report.line) {
                Some(Line::Mirror) => connections.1.push(rival.stream),
                _ => connections.0.push(rival.stream),
            }
        }
        connections
    }

    /// Takes a connection of this leader. `lacks_ranks`: as the field. A connection of another process waits until the
    /// first one's have ended; if they have not after a while, there are two.
    fn take(&mut self, visitor: Visitor, lacks_ranks: bool, since: Instant) -> Result<()> {
        let Some(report) = visitor.report else {
            return Ok(());
        };
        let (visit, line, pid) = (report.visit, report.line, report.hello.pid);
        let has_ended = |stream: &Connection| wire::has_hung_up(stream);
        match self.seat.take(visit, line, visitor.stream, has_ended) {
            Seating::Seated => (self.pid, self.lacks_ranks) = (pid, lacks_ranks),
            Seating::Stale => {}
            Seating::Rival(stream) => {
                let report = Some(report);
                let visitor = Visitor {
                    report,
                    stream,
                    ..visitor
                };
                self.rivals.push((since, visitor));
                if since.elapsed() >= RIVALRY {
                    return Err(Kind::DuplicateRank {
                        pids: [self.pid, pid],
                    }
                    .on(self.rank));
                }
            }
        }
        Ok(())
    }
}

/// Reports the outcome on this leader's host to rank 0, as part of a search that began at `begin`. Returns the verdict:
/// a link to rank 0 if both are good.
pub fn report_to_rank_0(
    identity: &Identity,
    meeting: &Meeting,
    hello: &Hello,
    version: u32,
    outcome: &Result<()>,
    begin: Instant,
) -> Result<HostLink> {
    let now = Instant::now();
    let longest = identity.deadlines.rendezvous();
    let limits = match outcome {
        Ok(()) => Limits {
            begin,
            reach: (begin + longest).max(now + LINGER),
            verdict: longest + 2 * LINGER,
        },
        // An error that is known is delayed only for a moment.
        Err(_) => Limits {
            begin,
            reach: now + 2 * LINGER,
            verdict: 2 * LINGER,
        },
    };
    report(identity, meeting, hello, version, outcome, limits)
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
        let told = outcome.as_ref().map(|_| ()).map_err(Error::clone);
        let link = report_to_rank_0(
            self.identity,
            meeting,
            &self.hello,
            self.version,
            &told,
            begin,
        );
        let (memory, _) = outcome.map_err(|own| match &link {
            // Rank 0 has all hosts' missing ranks.
            Err(error) if lacks(error).is_some_and(|ranks| !ranks.contains(&0)) => error.clone(),
            _ => own,
        })?;
        Ok((memory, vec![link?]))
    }

    /// Gives leaders that have come by TCP their places. Returns how many connections were accepted.
    pub(super) fn welcome(&mut self) -> (usize, Result<()>) {
        let Some(lobby) = &mut self.lobby else {
            return (0, Ok(()));
        };
        let (accepted, visitors) = match lobby.receive(self.version) {
            Ok(received) => received,
            Err(error) => return (0, self.without_descriptor(error)),
        };
        let rivals = self.leaders.iter_mut();
        let mut all: Vec<_> = rivals.flat_map(|leader| leader.rivals.drain(..)).collect();
        let now = Instant::now();
        all.extend(visitors.into_iter().map(|visitor| (now, visitor)));
        let verdicts = all
            .into_iter()
            .map(|(since, visitor)| self.seat_leader(visitor, since));
        (accepted, verdicts.fold(Ok(()), Result::and))
    }

    /// `error`, which is that there is no descriptor for a connection of another host, if that keeps a leader away.
    fn without_descriptor(&self, error: Error) -> Result<()> {
        let is_missing = self.leaders.iter().any(|leader| !leader.has_come());
        // One of this host's strangers may free its descriptor.
        if is_missing && !self.has_strangers() {
            return Err(error);
        }
        std::thread::sleep(RETRY);
        Ok(())
    }

    /// Gives a leader its place, or says why it has none, or why there is no group.
    pub(super) fn seat_leader(&mut self, visitor: Visitor, since: Instant) -> Result<()> {
        let lacks_ranks = match self.judge_leader(&visitor) {
            Ok(()) => false,
            Err(error) => {
                let Some(ranks) = lacks(&error) else {
                    self.rejected_leaders.push(visitor.stream);
                    return Err(error);
                };
                // Other hosts may lack ranks too, and all are named.
                let known = &mut self.missing_elsewhere;
                let more = ranks.iter().filter(|rank| !known.contains(rank));
                let more: Vec<usize> = more.copied().collect();
                known.extend(more);
                true
            }
        };
        let mut leaders = self.leaders.iter_mut();
        match leaders.find(|leader| leader.rank == visitor.rank) {
            Some(leader) => leader.take(visitor, lacks_ranks, since),
            None => Ok(()),
        }
    }

    /// What is known of leaders that have not come.
    pub(super) fn turned_away(&self) -> Option<String> {
        let address = self.lobby.as_ref()?.turned_away()?;
        Some(format!(
            "rank 0 has turned away a process at {address}: {ANOTHER_KEY}"
        ))
    }

    /// Says for whom this rank waits.
    pub(super) fn tell_of_wait(&self) {
        let (rank, seconds) = (self.identity.rank, notice::LONG.as_secs());
        let missing: Vec<usize> = self.missing().collect();
        let address = address::shown(&self.identity.address);
        let hosts = &self.identity.hosts;
        let away = self.leaders.iter().filter(|leader| !leader.has_come());
        let speakers = away.filter_map(|leader| {
            let ranks = hosts.ranks_of(hosts.host_of(leader.rank), self.identity.world);
            let ranks: Vec<usize> = ranks.collect();
            let words = format!("; rank {} speaks for {}", leader.rank, Listed(&ranks));
            (ranks.len() > 1).then_some(words)
        });
        let speakers: String = speakers.collect();
        notice::say(format_args!(
            "rank {rank} has waited for {seconds} s at {address:?} for {}{}",
            Listed(&missing),
            speakers
        ));
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
        let outcome = json::outcome::<()>(report.outcome.as_bytes());
        outcome.map_err(|error| {
            Kind::Message {
                reason: error.to_string(),
            }
            .on(rank)
        })?
    }
}

#[cfg(test)]
mod tests;
