//! The mirror, by which each host's block shows what ranks of other hosts have written in theirs.
//!
//! Each host's leader has a thread that sends news of its ranks to rank 0's host, and rank 0's thread passes that on to
//! the other hosts. No one waits for it to go on. So it looks at intervals, and ranks do not wake it.
//!
//! The leaders' connections are also how hosts are seen to have ended. A connection that ends before its leader has left
//! is a lost rank. A host whose system acknowledges nothing any more is a lost host, at both ends: frames may be lost in
//! one direction, so what still comes from the host says nothing. A leader that is stopped does not look so,
//! because its system goes on: only deadlines tell.

mod peer;
pub mod record;

use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::net;

use self::peer::{End, PeerLeader};
use self::record::Record;
use super::poll;
use super::shared_state::{Known, LATE_VOTES, SharedState};
use super::tcp;
use super::wire::{self, Connection};
use crate::error::{Error, Kind, Result};

/// The time between two looks, while something happens and else.
const PACE: Duration = Duration::from_millis(1);
const LULL: Duration = Duration::from_millis(10);
/// Something may follow what has happened for this long.
const LIVELY: Duration = Duration::from_millis(50);
/// A leader says this often that it runs.
const BEAT: Duration = Duration::from_millis(250);
/// How long a leader that has left waits for the ranks that it speaks for, and then for the other ends to close.
const PARTING: Duration = Duration::from_secs(1);

/// A leader's connections to the leader of another host.
#[derive(Debug)]
pub struct HostLink {
    pub rank: usize,
    /// For calls that exchange messages. Non-blocking.
    pub messages: Arc<Connection>,
    /// For the mirror. Non-blocking.
    pub mirror: Connection,
}

impl HostLink {
    /// Both ends of a link between the leaders `ranks`, which are threads of this process.
    pub fn pair(ranks: [usize; 2]) -> io::Result<[HostLink; 2]> {
        let (messages, mirrors) = (tcp::pair()?, tcp::pair()?);
        let [one, other] = ranks;
        let link = |(rank, messages, mirror)| HostLink {
            rank,
            messages: Arc::new(messages),
            mirror,
        };
        Ok([
            link((other, messages.0, mirrors.0)),
            link((one, messages.1, mirrors.1)),
        ])
    }
}

/// A leader's thread.
#[derive(Debug)]
pub struct Mirror {
    /// The thread ends when this connection ends.
    stop: Option<Connection>,
    thread: Option<JoinHandle<()>>,
}

impl Mirror {
    /// Starts the thread of the leader whose view is `shared`. A host whose system has acknowledged nothing for `longest`
    /// is lost.
    pub fn spawn(
        shared: Arc<SharedState>,
        links: Vec<HostLink>,
        longest: Duration,
    ) -> Result<Mirror> {
        let rank = shared.rank();
        let (stop, stopped) = wire::pair().map_err(Error::system(rank, "open a socket pair"))?;
        let mut relay = Relay::new(shared, links, longest);
        let thread = std::thread::Builder::new()
            .name(format!("gemmesh-mirror-{rank}"))
            .spawn(move || relay.run(&stopped))
            .map_err(Error::not_started(rank, "a thread"))?;
        Ok(Mirror {
            stop: Some(stop),
            thread: Some(thread),
        })
    }
}

impl Drop for Mirror {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // The thread can't panic, and there would be nothing to do if it did.
            let _ = thread.join();
        }
    }
}

/// What the thread knows and does: it relays news between hosts.
struct Relay {
    shared: Arc<SharedState>,
    known: Known,
    peers: Vec<PeerLeader>,
    /// How long a host may be silent.
    longest: Duration,
    /// A call that differs between ranks, and since when that is known.
    differing: Option<(u64, Instant)>,
    /// When something was last sent or received.
    lively: Instant,
    /// True if this rank has left, so that ends of connections say nothing.
    is_parting: bool,
}

impl Relay {
    fn new(shared: Arc<SharedState>, links: Vec<HostLink>, longest: Duration) -> Relay {
        Relay {
            known: Known::new(&shared),
            peers: links.into_iter().map(PeerLeader::new).collect(),
            shared,
            longest,
            differing: None,
            lively: Instant::now(),
            is_parting: false,
        }
    }

    fn run(&mut self, stopped: &Connection) {
        while !self.peers.is_empty() && !wire::has_hung_up(stopped) {
            self.look();
            self.pause(Some(stopped));
        }
        self.part();
    }

    /// Waits until something may have happened.
    fn pause(&self, stopped: Option<&Connection>) {
        let pace = if self.lively.elapsed() < LIVELY {
            PACE
        } else {
            LULL
        };
        let mut events: Vec<PollFd> = self.peers.iter().map(PeerLeader::event).collect();
        events.extend(stopped.map(|stopped| PollFd::new(&**stopped, PollFlags::RDHUP)));
        if poll::poll(&mut events, pace).is_err() {
            std::thread::sleep(pace);
        }
    }

    /// Sends and receives what there is, without waiting.
    fn look(&mut self) {
        self.shared.note_running(self.shared.rank());
        // This end of the connections is closed when this rank parts.
        if !self.is_parting {
            self.send_news();
        }
        self.receive_news();
        self.judge();
        let peers = std::mem::take(&mut self.peers).into_iter();
        let (ended, going_on): (Vec<PeerLeader>, Vec<PeerLeader>) =
            peers.partition(PeerLeader::is_over);
        self.peers = going_on;
        ended.iter().for_each(|peer| self.lose(peer));
    }

    /// Sends the news of this host to the others.
    fn send_news(&mut self) {
        let (peers, lively) = (&mut self.peers, &mut self.lively);
        self.shared.tell_news(&mut self.known, |record| {
            if !record.is_minor() {
                *lively = Instant::now();
            }
            peers.iter_mut().for_each(|peer| peer.queue(&record));
        });
        for peer in &mut self.peers {
            peer.flush(self.shared.rank());
            peer.listen_for_silence(self.longest);
        }
    }

    /// Receives the news of the other hosts.
    fn receive_news(&mut self) {
        for index in 0..self.peers.len() {
            self.peers[index].receive();
            while let Some(record) = self.peers[index].next_record() {
                if !self.may_tell(self.peers[index].rank, &record) {
                    let reason = "a record that is not its host's".into();
                    self.peers[index].end = Some(End::Garbage(reason));
                    break;
                }
                self.take(index, &record);
            }
        }
    }

    /// True if the leader `sender` may tell this one what a record says.
    fn may_tell(&self, sender: usize, record: &Record) -> bool {
        let hosts = self.shared.hosts();
        let is_known = |rank: usize| rank < self.shared.world();
        let leads = self.shared.rank() == 0;
        let leads_its_host = |rank: usize| hosts.leader_of(rank) == rank;
        match record {
            Record::Beat { leader } if leads => *leader == sender,
            Record::Beat { leader } if !is_known(*leader) || !leads_its_host(*leader) => false,
            Record::PartWait { peer, .. } if !is_known((*peer).into()) => false,
            Record::Fault { rank, .. } => !leads && is_known(*rank),
            Record::Proposal { rank, .. } if !leads || !is_known(*rank) => false,
            record => record.rank().is_some_and(|rank| {
                let is_its = |rank: usize| {
                    if leads {
                        hosts.share(rank, sender)
                    } else {
                        !hosts.share(rank, self.shared.rank())
                    }
                };
                is_known(rank) && is_its(rank) && self.may_be_next(record)
            }),
        }
    }

    /// False for a call that its rank cannot have made yet. So what is kept of a host's calls has a bound.
    fn may_be_next(&self, record: &Record) -> bool {
        match record {
            Record::Post { rank, number, .. } => self.shared.may_be_next(*rank, *number),
            _ => true,
        }
    }

    /// Writes a record into this host's block. Rank 0's host passes it on.
    fn take(&mut self, from: usize, record: &Record) {
        if let Record::Left { rank, is_gone, .. } = record
            && self.shared.is_known_to_leave(*rank, *is_gone)
        {
            return;
        }
        if !record.is_minor() {
            self.lively = Instant::now();
        }
        if let Some(number) = self.shared.take_news(record) {
            self.differing.get_or_insert((number, Instant::now()));
        }
        if let Record::Proposal { .. } = record {
            return;
        }
        // Only rank 0's host has several peers.
        let others = self.peers.iter_mut().enumerate();
        for (_, peer) in others.filter(|(index, _)| *index != from) {
            peer.queue(record);
        }
    }

    /// Reports calls that differ, when all ranks have called or a late one has had its time.
    fn judge(&mut self) {
        let Some((number, since)) = self.differing else {
            return;
        };
        if self.shared.all_have_begun(number) || since.elapsed() >= LATE_VOTES {
            self.shared.report_odd_one(number);
            self.differing = None;
        }
    }

    /// Says what the end of a peer means.
    fn lose(&self, peer: &PeerLeader) {
        if self.is_parting {
            return;
        }
        let (rank, noticed_by) = (peer.rank, self.shared.rank());
        let hosts = self.shared.hosts();
        if self.shared.has_left(rank) {
            let its = hosts.ranks_of(hosts.host_of(rank), self.shared.world());
            its.for_each(|rank| self.shared.note_left(rank));
            return;
        }
        let error = match &peer.end {
            Some(End::Garbage(reason)) => Kind::Message {
                reason: reason.clone(),
            }
            .on(rank),
            Some(End::Closed) | None if !peer.was_silent() => {
                Kind::RankLost { noticed_by }.on(rank)
            }
            Some(End::CutOff | End::Closed) | None => Kind::HostLost {
                noticed_by,
                silent_ms: self.longest.as_millis() as u64,
            }
            .on(rank),
        };
        self.shared.report(error, false);
    }

    /// Waits for the ranks that this leader speaks for, and closes the connections when all is sent.
    fn part(&mut self) {
        self.until(PARTING, |relay| {
            relay.shared.reporter().is_some() || relay.have_gone()
        });
        self.until(PARTING, |relay| {
            relay.peers.iter().all(|peer| peer.out.is_empty())
        });
        self.is_parting = true;
        for peer in &self.peers {
            // The other end closes when it has received all. If this end closed first, some might be lost on the way.
            let _ = net::shutdown(&*peer.stream, net::Shutdown::Write);
        }
        self.until(PARTING, |_| false);
    }

    /// Looks until `is_done`, or until there are no peers any more, at most for `longest`.
    fn until(&mut self, longest: Duration, is_done: impl Fn(&Relay) -> bool) {
        let deadline = Instant::now() + longest;
        while !self.peers.is_empty() && Instant::now() < deadline {
            self.look();
            if is_done(self) {
                return;
            }
            self.pause(None);
        }
    }

    /// True if all ranks have gone of which other hosts hear by this leader.
    fn have_gone(&self) -> bool {
        let (rank, world) = (self.shared.rank(), self.shared.world());
        let hosts = self.shared.hosts();
        let mut its = (0..world).filter(|&other| rank == 0 || hosts.share(other, rank));
        its.all(|rank| self.shared.is_gone(rank))
    }
}

#[cfg(fuzzing)]
pub mod fuzzing;
#[cfg(all(test, not(miri)))]
mod tests;
