//! An attempt of a leader: it listens until all ranks have come, or until they cannot become a group.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::net;

use super::introduction::{Guest, Hello, Introduced, Stranger};
use super::leaders::Leader;
use super::{LINGER, allocate, members};
use crate::error::{Class, Error, Kind, Result};
use crate::json;
use crate::ranks::address;
use crate::ranks::identity::Identity;
use crate::ranks::meeting::Lobby;
use crate::ranks::members::Members;
use crate::ranks::memfd::Mapping;
use crate::ranks::mirror::HostLink;
use crate::ranks::notice::LongWait;
use crate::ranks::peer::{Peer, User, user_of};
use crate::ranks::poll;
use crate::ranks::search::{ACCEPT, RETRY};
use crate::ranks::wire::{Channel, Connection};
use crate::resources::is_out_of_descriptors;
use crate::schedule::layout::MAX_WORLD;

/// How long a connection may take to introduce itself.
const INTRODUCTION: Duration = Duration::from_secs(2);
/// After all ranks have come, rank 0 listens this long for a rank that comes twice. If one does, or if a leader begins
/// another visit, rank 0 waits again until all have come.
const LAST_CALL: Duration = Duration::from_millis(20);
/// How many connections that have not introduced themselves are kept.
const MAX_STRANGERS: usize = 256;
/// How many connections are accepted before rank 0 looks at the time again.
const ACCEPTED: usize = 64;
/// How often rank 0 does that at its deadline, for ranks that were there in time. It is enough for as many connections
/// as the system keeps by default.
const LAST_TURNS: usize = 4096 / ACCEPTED;

/// A leader while it waits for the others: rank 0 for its host's ranks and the other leaders, and these for their hosts'
/// ranks.
pub struct Rendezvous<'a> {
    pub(super) identity: &'a Identity,
    pub(super) hello: Hello,
    /// The protocol version that this rank speaks.
    pub(super) version: u32,
    listener: UnixListener,
    /// A spare descriptor. If there are no others left, the leader uses it to hear and tell ranks one after the other.
    spare: Option<UnixListener>,
    strangers: Vec<Stranger>,
    /// The guests by rank. Rank 0 has none.
    guests: Vec<Option<Guest>>,
    /// Guests that have no place in the group.
    rejected: Vec<Guest>,
    /// Where the other leaders come, if this is rank 0 and there are any.
    pub(super) lobby: Option<Lobby>,
    pub(super) leaders: Vec<Leader>,
    /// Ranks that have not come to leaders that have.
    pub(super) missing_elsewhere: Vec<usize>,
    /// Leaders that have no place in the group.
    pub(super) rejected_leaders: Vec<Connection>,
    /// By rank, for as many ranks as a guest expects: true if the rank has been told already that there is no group.
    told: Vec<bool>,
    /// Why the user of the latest connection with an unknown user is not known.
    unknown_user: Option<String>,
}

impl<'a> Rendezvous<'a> {
    pub fn new(
        identity: &'a Identity,
        hello: Hello,
        [listener, spare]: [UnixListener; 2],
        version: u32,
    ) -> Result<Rendezvous<'a>> {
        let rank = identity.rank;
        listener
            .set_nonblocking(true)
            .map_err(Error::system(rank, "set up a socket"))?;
        let mut leaders = identity.hosts.leaders();
        leaders.retain(|&leader| leader != 0 && rank == 0);
        Ok(Rendezvous {
            identity,
            hello,
            version,
            listener,
            spare: Some(spare),
            strangers: Vec::new(),
            guests: (0..identity.world).map(|_| None).collect(),
            rejected: Vec::new(),
            lobby: None,
            leaders: leaders.into_iter().map(Leader::expected).collect(),
            missing_elsewhere: Vec::new(),
            rejected_leaders: Vec::new(),
            told: Vec::new(),
            unknown_user: None,
        })
    }

    /// Makes one attempt, as part of a search that began at `begin`.
    pub fn run(mut self, begin: Instant) -> Result<Members> {
        let outcome = self.open_lobby().and_then(|()| self.receive_all(begin));
        let outcome = outcome.and_then(|()| {
            self.spare = None;
            allocate(self.identity.rank)
        });
        let is_over =
            |error: &Error| matches!(error.kind(), Kind::RanksMissing { .. } | Kind::NeverJoined);
        if let Err(error) = &outcome
            && !is_over(error)
        {
            self.await_late(error);
        }
        // This comes before the verdict, so that a rank that has heard it and comes again finds the next attempt.
        self.close();
        let outcome = outcome.map(|memory| (memory, Vec::new()));
        let outcome = match &self.identity.meeting {
            Some(meeting) if self.identity.rank != 0 => self.verdict(meeting, outcome, begin),
            _ => outcome,
        };
        self.tell_all(outcome)
    }

    /// Tells all that have come whether there is a group, and makes this rank's end of it.
    fn tell_all(mut self, outcome: Result<Outcome>) -> Result<Members> {
        let guests = self.guests.into_iter().flatten();
        match outcome {
            Ok(((memory, fd), mut links)) => {
                let mut connections = Vec::new();
                for guest in guests {
                    tell(&guest.stream, &Ok(()), &[fd.as_fd()]);
                    connections.push(guest.stream);
                }
                for leader in self.leaders {
                    let rank = leader.rank;
                    if let (Some(messages), Some(mirror)) = leader.into_connections() {
                        tell(&messages, &Ok(()), &[]);
                        links.push(HostLink {
                            rank,
                            messages: Arc::new(messages),
                            mirror,
                        });
                    }
                }
                members(self.identity, memory, connections, links)
            }
            Err(error) => {
                for guest in guests.chain(self.rejected) {
                    tell(&guest.stream, &Err(error.clone()), &[]);
                }
                let leaders = self.leaders.iter_mut().map(Leader::leave);
                // The mirrors' connections end when all are told.
                let (leaders, _mirrors): (Vec<_>, Vec<_>) = leaders.unzip();
                let leaders = leaders.into_iter().flatten();
                for stream in leaders.chain(self.rejected_leaders) {
                    tell(&stream, &Err(error.clone()), &[]);
                }
                Err(error)
            }
        }
    }

    /// Stops listening.
    fn close(&mut self) {
        close(&self.listener);
        self.strangers.clear();
        if let Some(lobby) = self.lobby.take() {
            lobby.close();
        }
    }

    /// Receives guests until each rank has come once.
    pub(super) fn receive_all(&mut self, begin: Instant) -> Result<()> {
        // Leaders that lack a rank at their deadline report it a little later.
        let grace = if self.leaders.is_empty() {
            Duration::ZERO
        } else {
            LINGER
        };
        let deadline = begin + self.identity.deadlines.rendezvous() + grace;
        let mut turns = 0;
        let mut wait = LongWait::since(begin);
        let mut last_call = None;
        loop {
            if self.complete() {
                if !self.missing_elsewhere.is_empty() {
                    return Err(self.incomplete(begin));
                }
                let until = *last_call.get_or_insert_with(|| Instant::now() + LAST_CALL);
                self.receive(until)?;
                let is_over = Instant::now() >= until && self.complete();
                if is_over && self.missing_elsewhere.is_empty() {
                    return Ok(());
                }
                continue;
            }
            last_call = None;
            if wait.is_to_be_told(Instant::now()) {
                self.tell_of_wait();
            }
            let is_late = Instant::now() >= deadline;
            let accepted = self.receive(deadline)?;
            let is_alone = accepted == 0 || turns == LAST_TURNS;
            if is_late && is_alone && self.missing().next().is_some() {
                return Err(self.incomplete(begin));
            }
            let mut missing = self.missing();
            let ended = missing.find(|&rank| accepted == 0 && self.identity.has_ended(rank));
            if let Some(rank) = ended {
                return Err(Kind::NeverJoined.on(rank));
            }
            turns += usize::from(is_late);
        }
    }

    /// The error that ranks are missing at the deadline.
    fn incomplete(&mut self, begin: Instant) -> Error {
        let ranks = self.missing().chain(self.missing_elsewhere.iter().copied());
        let mut ranks: Vec<usize> = ranks.collect();
        ranks.sort_unstable();
        let address = address::shown(&self.identity.address);
        let waited_ms = begin.elapsed().as_millis() as u64;
        let unknown = self
            .unknown_user
            .take()
            .map(|why| crate::ranks::search::turned_away(self.identity.rank, &why));
        let reason = unknown.or_else(|| self.turned_away());
        Error::of_kind(Kind::RanksMissing {
            ranks,
            address,
            waited_ms,
            reason,
        })
    }

    /// The ranks that have not come. If a leader has not, it is not known which of its host's ranks have.
    pub(super) fn missing(&self) -> impl Iterator<Item = usize> {
        let identity = self.identity;
        let near = identity.neighbours();
        let near = near.filter(|&rank| rank != identity.rank && self.guests[rank].is_none());
        let leaders = self.leaders.iter().filter(|leader| !leader.has_come());
        near.chain(leaders.map(|leader| leader.rank))
    }

    fn complete(&self) -> bool {
        self.missing().next().is_none() && !self.leaders.iter().any(Leader::has_rivals)
    }

    /// Receives late ranks for a while, to tell them too that there is no group.
    fn await_late(&mut self, error: &Error) {
        let deadline = Instant::now() + LINGER;
        self.spare = None;
        while !self.all_have_come() && Instant::now() < deadline {
            // Other errors of late ranks do not matter any more.
            let received = self.receive(deadline);
            if received.is_err_and(|error| error.kind().class() == Class::System) {
                // There is no descriptor for a new connection, so ranks that have come make room.
                self.tell_early(error);
                std::thread::sleep(RETRY);
            }
        }
    }

    /// If world sizes differ, rank 0's may be wrong, so this counts all ranks that the guests expect.
    fn all_have_come(&self) -> bool {
        let guests = || self.guests.iter().flatten().chain(&self.rejected);
        let theirs = guests().filter_map(|guest| Some(guest.hello.as_ref()?.world));
        let world = theirs.fold(self.identity.world.max(self.told.len()), usize::max);
        let has_come =
            |rank| self.told.get(rank) == Some(&true) || guests().any(|guest| guest.rank == rank);
        if self.identity.hosts.count() > 1 {
            return self.complete();
        }
        (1..world.min(MAX_WORLD)).all(has_come)
    }

    /// Tells the ranks and leaders that have come, and closes their connections.
    fn tell_early(&mut self, error: &Error) {
        let leaders = self.leaders.iter_mut();
        let leaders = leaders.flat_map(|leader| leader.leave().0);
        for stream in leaders.chain(self.rejected_leaders.drain(..)) {
            tell(&stream, &Err(error.clone()), &[]);
        }
        let seated = self.guests.iter_mut().filter_map(Option::take);
        for guest in seated.chain(self.rejected.drain(..)) {
            tell(&guest.stream, &Err(error.clone()), &[]);
            let world = guest.hello.as_ref().map_or(0, |hello| hello.world);
            self.told
                .resize(world.clamp(self.told.len(), MAX_WORLD), false);
            if let Some(told) = self.told.get_mut(guest.rank) {
                *told = true;
            }
        }
    }

    /// Waits until something happens, or until `until`, and handles a bounded number of connections. Returns how many
    /// it has accepted.
    fn receive(&mut self, until: Instant) -> Result<usize> {
        let mut fds = vec![PollFd::new(&self.listener, PollFlags::IN)];
        fds.extend(
            self.strangers
                .iter()
                .map(|stranger| PollFd::new(&**stranger.stream, PollFlags::IN)),
        );
        fds.extend(self.lobby.iter().flat_map(Lobby::events));
        let left = until.saturating_duration_since(Instant::now());
        poll::poll(&mut fds, left.min(Duration::from_millis(50))).map_err(Error::system(
            self.identity.rank,
            "wait for the other ranks",
        ))?;
        drop(fds);
        // Those who have come go on, also if there is no descriptor for more.
        let accepted = self.accept();
        let heard = self.listen();
        let (visited, welcomed) = self.welcome();
        heard.and(welcomed)?;
        Ok(accepted? + visited)
    }

    /// Accepts connections of this user.
    fn accept(&mut self) -> Result<usize> {
        for accepted in 0..ACCEPTED {
            let stream = match self.listener.accept() {
                Ok((stream, _)) => stream,
                // One of the strangers may turn out to be no rank, and free its descriptor.
                Err(error) if is_out_of_descriptors(&error) && self.has_strangers() => {
                    std::thread::sleep(RETRY);
                    return Ok(accepted);
                }
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock => return Ok(accepted),
                    io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted => continue,
                    _ => {
                        return Err(Error::system(self.identity.rank, ACCEPT)(error));
                    }
                },
            };
            // These calls fail only for sockets that are not connections.
            let Ok(peer) = Peer::of(&stream) else {
                continue;
            };
            if stream.set_nonblocking(true).is_err() {
                continue;
            }
            match user_of(&stream, peer) {
                User::Same => self.strangers.push(Stranger::new(Connection::from(stream))),
                User::Other => {}
                User::Unknown(reason) => self.unknown_user = Some(reason),
            }
        }
        Ok(ACCEPTED)
    }

    /// True if there are connections that have not introduced themselves.
    pub(super) fn has_strangers(&self) -> bool {
        let lobby = self.lobby.as_ref();
        !self.strangers.is_empty() || lobby.is_some_and(Lobby::has_strangers)
    }

    /// Reads introductions, and gives ranks their places.
    fn listen(&mut self) -> Result<()> {
        let mut introduced = Vec::new();
        let version = self.version;
        self.strangers
            .retain_mut(|stranger| match stranger.listen(version) {
                Introduced::Rank(guest) => {
                    introduced.push(guest);
                    false
                }
                Introduced::Nobody => false,
                Introduced::NotYet => stranger.since.elapsed() < INTRODUCTION,
            });
        // A rank introduces itself as soon as it is connected. So the oldest of many strangers is the least likely to
        // be a rank.
        let crowd = self.strangers.len().saturating_sub(MAX_STRANGERS);
        self.strangers.drain(..crowd);
        // Every rank that has come is told, also of what is wrong with a different rank.
        let verdicts = introduced.into_iter().map(|guest| self.seat(guest));
        verdicts.fold(Ok(()), Result::and)
    }

    /// Gives a guest its place, or says why it has none.
    fn seat(&mut self, guest: Guest) -> Result<()> {
        let verdict = self.judge(&guest);
        match verdict {
            Ok(()) => {
                let rank = guest.rank;
                self.guests[rank] = Some(guest);
            }
            Err(_) => self.rejected.push(guest),
        }
        verdict
    }

    /// The error if what `rank` has is not what this rank expects.
    pub(super) fn mismatch(
        &self,
        rank: usize,
        what: &str,
        theirs: String,
        expected: String,
    ) -> Result<()> {
        if theirs == expected {
            return Ok(());
        }
        let (what, other) = (what.into(), self.identity.rank);
        Err(Kind::Mismatch {
            what,
            theirs,
            other,
            expected,
        }
        .on(rank))
    }

    /// Judges what ranks of this host and leaders of others say alike.
    pub(super) fn judge_hello(
        &self,
        rank: usize,
        version: u32,
        hello: Option<&Hello>,
    ) -> Result<()> {
        let own = &self.hello;
        let mismatch = |what, theirs, expected| self.mismatch(rank, what, theirs, expected);
        let own_version = self.version.to_string();
        mismatch("protocol version", version.to_string(), own_version)?;
        let Some(hello) = hello else {
            return Ok(());
        };
        let is_near = rank < own.world && self.identity.hosts.share(rank, self.identity.rank);
        if is_near || self.identity.hosts.count() == 1 {
            mismatch("host (boot id)", hello.boot_id.clone(), own.boot_id.clone())?;
        }
        mismatch("backend", hello.backend.clone(), own.backend.clone())?;
        mismatch("world size", hello.world.to_string(), own.world.to_string())?;
        if rank >= own.world {
            return Err(Kind::Limit {
                what: "the rank".into(),
                value: rank,
                min: 0,
                max: own.world - 1,
            }
            .on(rank)
            .in_call("Group::connect".into()));
        }
        Ok(())
    }

    pub fn judge(&self, guest: &Guest) -> Result<()> {
        let (rank, own) = (guest.rank, &self.hello);
        self.judge_hello(rank, guest.version, guest.hello.as_ref())?;
        let Some(hello) = &guest.hello else {
            return Ok(());
        };
        let first = match rank {
            _ if rank == self.identity.rank => Some(own.pid),
            // A rank that has gone and comes again is the same rank.
            _ => self.guests[rank]
                .as_ref()
                .filter(|seated| !seated.has_gone())
                .and_then(|seated| seated.hello.as_ref())
                .map(|hello| hello.pid),
        };
        first.map_or(Ok(()), |first| {
            Err(Kind::DuplicateRank {
                pids: [first, hello.pid],
            }
            .on(rank))
        })
    }
}

/// The group's memory with its descriptor, and links to other leaders.
pub type Outcome = ((Mapping, OwnedFd), Vec<HostLink>);

/// Stops listening, also if a forked child has the socket too. Ranks that have connected and were not heard go on
/// searching.
pub fn close(listener: &UnixListener) {
    // The call does not fail for a listening socket. From now on connections are refused.
    let _ = net::shutdown(listener, net::Shutdown::Both);
    // A process without descriptors leaves the connections to the end of the socket. So does one without a child.
    while let Ok((stream, _)) = listener.accept() {
        drop(Connection::from(stream));
    }
}

/// Sends the verdict. If a guest has gone by then, the first call finds it missing.
fn tell(stream: &UnixStream, verdict: &Result<()>, fds: &[BorrowedFd]) {
    let channel = Channel {
        stream,
        deadline: Instant::now() + LINGER,
        check: || Ok::<(), Error>(()),
    };
    let _ = channel.send(&json::of_outcome(verdict), fds);
}

#[cfg(test)]
mod tests {
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::SocketAddr;

    use super::*;
    use crate::ranks::wire;

    #[test]
    fn a_socket_that_listens_no_more_turns_all_away_whoever_has_it_open() {
        let name = format!("gemmesh/test/{}", std::process::id());
        let address = SocketAddr::from_abstract_name(name).unwrap();
        let listener = UnixListener::bind_addr(&address).unwrap();
        listener.set_nonblocking(true).unwrap();
        // A copy as a forked child has it.
        let _copy = listener.try_clone().unwrap();
        let waiting = [(); 3].map(|()| UnixStream::connect_addr(&address).unwrap());
        close(&listener);
        drop(listener);
        assert!(waiting.iter().all(wire::has_hung_up));
        let refused = UnixStream::connect_addr(&address).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
    }
}
