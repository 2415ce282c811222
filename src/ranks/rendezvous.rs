//! The rendezvous, in which processes of one host that agree on an address become a group.
//!
//! The address gives names in the abstract socket namespace, so nothing lies in a directory, and a killed process
//! leaves nothing behind. Rank 0 listens at one of these names. The others connect, introduce themselves, and get
//! either the group's shared memory or the reason why there is no group. A connection of a different user, or one that
//! does not speak this protocol, is dropped, and rank 0 goes on listening.
//!
//! Each time that rank 0 listens is an **attempt**. All ranks that come to an attempt get the same **verdict**, when
//! rank 0 has stopped listening. Ranks that come later take part in the next attempt. So a connection that ends without
//! a verdict says nothing, and its rank goes on searching.

use std::fs;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net;
use serde::{Deserialize, Serialize};

use super::address;
use super::identity::Identity;
use super::members::{Members, OPENING};
use super::naming::{Arrival, Naming};
use super::peer::{Peer, User, user_of};
use super::pidfd::{self, Ended};
use super::poll;
use super::search::{Found, RETRY, Search};
use super::shared_state::SharedState;
use super::watcher::Watched;
use super::wire::{self, Channel, Connection, Frame, WireError};
use crate::error::{Error, Result};
use crate::json;
use crate::ranks::memfd::{Mapping, memfd};
use crate::schedule::layout::MAX_WORLD;

const MAGIC: [u8; 8] = *b"gemmesh\0";
/// Changes whenever ranks of older builds cannot work with ranks of this build.
pub const PROTOCOL_VERSION: u32 = 6;
/// The longest introduction: a few numbers and names.
const MAX_HELLO: usize = 4096;
/// The longest answer: an error.
const MAX_VERDICT: usize = 64 << 10;
/// How long a connection may take to introduce itself.
const INTRODUCTION: Duration = Duration::from_secs(2);
/// If there can be no group, rank 0 listens this long for late ranks, to tell them, and a rank waits this long for
/// that.
const LINGER: Duration = Duration::from_secs(1);
/// After all ranks have come, rank 0 listens this long for a rank that comes twice.
const LAST_CALL: Duration = Duration::from_millis(20);
/// How many connections that have not introduced themselves are kept.
const MAX_STRANGERS: usize = 256;
/// How many connections are accepted before rank 0 looks at the time again.
const ACCEPTED: usize = 64;
/// How often rank 0 does that at its deadline, for ranks that were there in time. It is enough for as many connections
/// as the system keeps by default.
const LAST_TURNS: usize = 4096 / ACCEPTED;

/// The introduction, after its [`Prefix`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Hello {
    world: usize,
    backend: String,
    /// The running kernel's id: the same for all processes that can share memory.
    boot_id: String,
    pid: u32,
}

impl Hello {
    /// # Errors
    /// If this process has no descriptors left.
    fn new(identity: &Identity) -> Result<Hello> {
        let boot_id = match fs::read_to_string("/proc/sys/kernel/random/boot_id") {
            Ok(id) => id.trim().into(),
            Err(error) if is_out_of_descriptors(&error) => {
                return Err(Error::system(identity.rank, "read the kernel's id")(error));
            }
            Err(_) => "unknown".into(),
        };
        Ok(Hello {
            world: identity.world,
            backend: identity.backend.into(),
            boot_id,
            pid: std::process::id(),
        })
    }
}

/// The first bytes of an introduction. Their layout is the same in every version.
struct Prefix {
    version: u32,
    rank: u32,
    length: u32,
}

impl Prefix {
    const BYTES: usize = 20;

    fn encode(&self) -> [u8; Prefix::BYTES] {
        let mut bytes = [0; Prefix::BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        for (field, value) in [self.version, self.rank, self.length].iter().enumerate() {
            bytes[8 + 4 * field..][..4].copy_from_slice(&value.to_le_bytes());
        }
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<Prefix> {
        let (magic, rest) = bytes.split_at_checked(8)?;
        if magic != MAGIC {
            return None;
        }
        let mut fields = rest
            .chunks_exact(4)
            .map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]));
        Some(Prefix {
            version: fields.next()?,
            rank: fields.next()?,
            length: fields.next()?,
        })
    }
}

/// Meets the other ranks by protocol version `version`.
///
/// # Errors
/// The same on every rank that comes: [`Error::RanksMissing`], [`Error::DuplicateRank`] or [`Error::Mismatch`].
pub fn meet_speaking(identity: &Identity, version: u32) -> Result<Members> {
    if identity.world == 1 {
        // There are no other ranks, so no process can be in the way.
        return members(identity, allocate()?.0, Vec::new());
    }
    // This opens a file. What follows opens files only when rank 0 can be told of a failure.
    let hello = Hello::new(identity)?;
    let mut search = Search::new(identity)?;
    loop {
        let (stream, peer) = match search.look()? {
            Found::Here(listener) => {
                let attempt = Rendezvous::new(identity, hello, listener, version)?;
                return attempt.run(search.begin());
            }
            Found::There(stream, peer) => (Arc::new(Connection::from(stream)), peer),
        };
        match introduce(identity, &hello, &stream, version) {
            Ok(memory) => return members(identity, memory, vec![stream]),
            Err(WireError::Closed) => search.was_closed()?,
            Err(WireError::Late) => return Err(search.was_silent(peer)),
            Err(WireError::Stopped(error)) => return Err(error),
            Err(WireError::Garbage(reason)) => return Err(Error::Message { rank: 0, reason }),
            Err(WireError::Io(error)) => {
                return Err(Error::system(identity.rank, "talk to rank 0")(error));
            }
        }
    }
}

/// Introduces this rank to the process that listens, and waits for the verdict.
fn introduce(
    identity: &Identity,
    hello: &Hello,
    stream: &UnixStream,
    version: u32,
) -> Result<Mapping, WireError<Error>> {
    let (verdict, fds) =
        verdict_on(identity, hello, stream, version).map_err(WireError::or_closed)?;
    let garbage = |e: serde_json::Error| WireError::Garbage(e.to_string());
    let verdict = json::outcome::<()>(&verdict).map_err(garbage)?;
    verdict.map_err(WireError::Stopped)?;
    map(identity.rank, fds).map_err(|error| {
        Members::decline(stream, &identity.deadlines, &error);
        WireError::Stopped(error)
    })
}

/// The verdict as bytes. The wait stops if the other process has ended.
fn verdict_on(
    identity: &Identity,
    hello: &Hello,
    stream: &UnixStream,
    version: u32,
) -> Result<Frame, WireError<Ended>> {
    let hello = serde_json::to_vec(hello).map_err(|error| WireError::Io(io::Error::from(error)))?;
    let prefix = Prefix {
        version,
        rank: identity.rank as u32,
        length: hello.len() as u32,
    };
    let channel = Channel {
        stream,
        // Rank 0 may have begun later than this rank, and it knows which ranks are missing.
        deadline: Instant::now() + identity.deadlines.rendezvous() + LINGER,
        check: || pidfd::check(stream),
    };
    channel.send_raw(&[prefix.encode().as_slice(), &hello].concat())?;
    channel.receive(MAX_VERDICT)
}

/// Maps the group's shared memory from the descriptors that came with rank 0's verdict.
fn map(rank: usize, fds: io::Result<Vec<OwnedFd>>) -> Result<Mapping> {
    let fds = fds.map_err(Error::system(rank, "receive the group's shared memory"))?;
    let [memory] = &fds[..] else {
        let reason = format!("{} descriptors of shared memory", fds.len());
        return Err(Error::Message { rank: 0, reason });
    };
    Mapping::shared(memory, SharedState::BYTES)
        .map_err(Error::out_of_memory(rank, SharedState::BYTES))
}

/// The memory that all ranks of a group share, and the descriptor for the others.
fn allocate() -> Result<(Mapping, OwnedFd)> {
    let lacking = |error| Error::out_of_memory(0, SharedState::BYTES)(error);
    let fd = memfd(SharedState::BYTES).map_err(lacking)?;
    let memory = Mapping::shared(&fd, SharedState::BYTES).map_err(lacking)?;
    Ok((memory, fd))
}

/// True if this process, or the machine, has no descriptors or no memory left to open anything at the moment.
fn is_out_of_descriptors(error: &io::Error) -> bool {
    let refused = [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM];
    Errno::from_io_error(error).is_some_and(|errno| refused.contains(&errno))
}

/// Makes this rank's end of the group, when all ranks have what they need. If a rank lacks something, all get its
/// error.
fn members(
    identity: &Identity,
    memory: Mapping,
    connections: Vec<Arc<Connection>>,
) -> Result<Members> {
    let &Identity {
        rank,
        world,
        deadlines,
        ..
    } = identity;
    if let Some(launcher) = &identity.launcher {
        // All ranks are here, so reports about earlier groups are void.
        launcher.withdraw();
    }
    let shared_state =
        SharedState::new(memory, rank, world).with_launcher(identity.launcher.clone());
    let processes = connections
        .iter()
        .map(|connection| pidfd::of_peer(connection));
    let peers = Watched::of(rank, &connections, processes)
        .map_err(Error::system(rank, "watch another rank's process"))
        .map_err(|error| shared_state.fail(error))?;
    if let Some(naming) = &identity.naming {
        shared_state.set_naming(naming.clone());
    }
    let members = Members::new(rank, deadlines, false, shared_state, world, peers)?;
    members.set_naming(agree(&members, identity)?);
    Ok(members)
}

/// Agrees with the other ranks on what the group is called.
fn agree(members: &Members, identity: &Identity) -> Result<Naming> {
    let own = serde_json::to_vec(&identity.arrival).map_err(|error| Error::Internal {
        rank: identity.rank,
        what: format!("an arrival cannot be written: {error}"),
    });
    let gathered = members.gather_messages(OPENING, own.map(|bytes| (bytes, None)))?;
    let arrivals = gathered.payloads.iter().enumerate().map(|(rank, bytes)| {
        serde_json::from_slice::<Arrival>(bytes).map_err(|error| Error::Message {
            rank,
            reason: error.to_string(),
        })
    });
    let arrivals = arrivals.collect::<Result<Vec<_>>>();
    let arrivals = arrivals.map_err(|error| members.fail(error))?;
    Naming::agreed(&arrivals, || address::shown(&identity.address))
}

/// A connection that has not introduced itself yet.
struct Stranger {
    stream: Arc<Connection>,
    since: Instant,
    bytes: Vec<u8>,
}

/// What a stranger turned out to be.
enum Introduced {
    NotYet,
    /// A process that is not a rank of this library. Its connection is dropped.
    Nobody,
    Rank(Guest),
}

/// A connection that has introduced itself.
struct Guest {
    stream: Arc<Connection>,
    rank: usize,
    version: u32,
    /// None if its protocol version is different, because then its words can't be understood.
    hello: Option<Hello>,
}

impl Guest {
    fn has_gone(&self) -> bool {
        wire::has_hung_up(&self.stream) || pidfd::has_ended(&self.stream)
    }
}

impl Stranger {
    /// Reads what has come, without waiting.
    fn listen(&mut self, version: u32) -> Introduced {
        let mut piece = [0; 1024];
        let ended = loop {
            match (&**self.stream).read(&mut piece) {
                Ok(0) => break true,
                Ok(count) => self.bytes.extend(&piece[..count]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => break error.kind() != io::ErrorKind::WouldBlock,
            }
            if self.bytes.len() > Prefix::BYTES + MAX_HELLO {
                return Introduced::Nobody;
            }
        };
        let known = self.bytes.len().min(MAGIC.len());
        if self.bytes[..known] != MAGIC[..known] {
            return Introduced::Nobody;
        }
        match self.introduction(version) {
            Some(guest) => guest,
            None if ended => Introduced::Nobody,
            None => Introduced::NotYet,
        }
    }

    /// The introduction, once it is complete.
    fn introduction(&mut self, version: u32) -> Option<Introduced> {
        let words = self.bytes.get(Prefix::BYTES..)?;
        let prefix = Prefix::decode(&self.bytes[..Prefix::BYTES])?;
        if prefix.length as usize > MAX_HELLO {
            return Some(Introduced::Nobody);
        }
        let hello = if prefix.version == version {
            match serde_json::from_slice(words.get(..prefix.length as usize)?) {
                Ok(hello) => Some(hello),
                Err(_) => return Some(Introduced::Nobody),
            }
        } else {
            None
        };
        Some(Introduced::Rank(Guest {
            stream: self.stream.clone(),
            rank: prefix.rank as usize,
            version: prefix.version,
            hello,
        }))
    }
}

/// Rank 0 while it waits for the others.
struct Rendezvous<'a> {
    identity: &'a Identity,
    hello: Hello,
    /// The protocol version that this rank speaks.
    version: u32,
    listener: UnixListener,
    /// A spare descriptor. If there are no others left, rank 0 uses it to hear and tell ranks one after the other.
    spare: Option<UnixListener>,
    strangers: Vec<Stranger>,
    /// The guests by rank. Rank 0 has none.
    guests: Vec<Option<Guest>>,
    /// Guests that have no place in the group.
    rejected: Vec<Guest>,
    /// By rank, for as many ranks as a guest expects: true if the rank has been told already that there is no group.
    told: Vec<bool>,
    /// Why the user of the latest connection with an unknown user is not known.
    unknown_user: Option<String>,
}

impl<'a> Rendezvous<'a> {
    fn new(
        identity: &'a Identity,
        hello: Hello,
        listener: UnixListener,
        version: u32,
    ) -> Result<Rendezvous<'a>> {
        listener
            .set_nonblocking(true)
            .map_err(Error::system(0, "set up a socket"))?;
        let spare = listener.try_clone();
        let spare = spare.map_err(Error::system(0, "accept another rank's connection"))?;
        Ok(Rendezvous {
            identity,
            hello,
            version,
            listener,
            spare: Some(spare),
            strangers: Vec::new(),
            guests: (0..identity.world).map(|_| None).collect(),
            rejected: Vec::new(),
            told: Vec::new(),
            unknown_user: None,
        })
    }

    /// Makes one attempt, as part of a search that began at `begin`.
    fn run(mut self, begin: Instant) -> Result<Members> {
        let outcome = self.receive_all(begin).and_then(|()| {
            self.spare = None;
            allocate()
        });
        let is_over = |error: &Error| {
            matches!(
                error,
                Error::RanksMissing { .. }
                    | Error::RankNeverJoined { .. }
                    | Error::UnknownUser { .. }
            )
        };
        if let Err(error) = &outcome
            && !is_over(error)
        {
            self.await_late(error);
        }
        let Rendezvous {
            identity,
            guests,
            rejected,
            listener,
            strangers,
            ..
        } = self;
        // This comes before the verdict, so that a rank that has heard it and comes again finds the next attempt.
        close(&listener);
        drop((listener, strangers));
        let guests = guests.into_iter().flatten();
        match outcome {
            Ok((memory, fd)) => {
                let mut connections = Vec::new();
                for guest in guests {
                    tell(&guest.stream, &Ok(()), &[fd.as_fd()]);
                    connections.push(guest.stream);
                }
                members(identity, memory, connections)
            }
            Err(error) => {
                for guest in guests.chain(rejected) {
                    tell(&guest.stream, &Err(error.clone()), &[]);
                }
                Err(error)
            }
        }
    }

    /// Receives guests until each rank has come once.
    fn receive_all(&mut self, begin: Instant) -> Result<()> {
        let deadline = begin + self.identity.deadlines.rendezvous();
        let mut turns = 0;
        while !self.complete() {
            let is_late = Instant::now() >= deadline;
            let accepted = self.receive(deadline)?;
            if is_late && !self.complete() && (accepted == 0 || turns == LAST_TURNS) {
                return Err(self.incomplete(begin));
            }
            let mut missing = self.missing();
            let ended = missing.find(|&rank| accepted == 0 && self.identity.has_ended(rank));
            if let Some(rank) = ended {
                return Err(Error::RankNeverJoined { rank });
            }
            turns += usize::from(is_late);
        }
        let last_call = Instant::now() + LAST_CALL;
        while Instant::now() < last_call {
            self.receive(last_call)?;
        }
        Ok(())
    }

    /// The error that ranks are missing at the deadline.
    fn incomplete(&mut self, begin: Instant) -> Error {
        let ranks = self.missing().collect();
        let address = address::shown(&self.identity.address);
        match self.unknown_user.take() {
            Some(reason) => Error::UnknownUser {
                ranks,
                rank: 0,
                address,
                reason,
            },
            None => Error::RanksMissing {
                ranks,
                address,
                waited_ms: begin.elapsed().as_millis() as u64,
            },
        }
    }

    /// The ranks that have not come.
    fn missing(&self) -> impl Iterator<Item = usize> {
        (1..self.identity.world).filter(|&rank| self.guests[rank].is_none())
    }

    fn complete(&self) -> bool {
        self.missing().next().is_none()
    }

    /// Receives late ranks for a while, to tell them too that there is no group.
    fn await_late(&mut self, error: &Error) {
        let deadline = Instant::now() + LINGER;
        self.spare = None;
        while !self.all_have_come() && Instant::now() < deadline {
            // Other errors of late ranks do not matter any more.
            if let Err(Error::System { .. }) = self.receive(deadline) {
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
        (1..world.min(MAX_WORLD)).all(has_come)
    }

    /// Tells the ranks that have come, and closes their connections.
    fn tell_early(&mut self, error: &Error) {
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
        let left = until.saturating_duration_since(Instant::now());
        poll::poll(&mut fds, left.min(Duration::from_millis(50)))
            .map_err(Error::system(0, "wait for the other ranks"))?;
        drop(fds);
        let accepted = self.accept()?;
        self.listen()?;
        Ok(accepted)
    }

    /// Accepts connections of this user.
    fn accept(&mut self) -> Result<usize> {
        for accepted in 0..ACCEPTED {
            let stream = match self.listener.accept() {
                Ok((stream, _)) => stream,
                // One of the strangers may turn out to be no rank, and free its descriptor.
                Err(error) if is_out_of_descriptors(&error) && !self.strangers.is_empty() => {
                    std::thread::sleep(RETRY);
                    return Ok(accepted);
                }
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock => return Ok(accepted),
                    io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted => continue,
                    _ => return Err(Error::system(0, "accept another rank's connection")(error)),
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
                User::Same => self.strangers.push(Stranger {
                    stream: Arc::new(Connection::from(stream)),
                    since: Instant::now(),
                    bytes: Vec::new(),
                }),
                User::Other => {}
                User::Unknown(reason) => self.unknown_user = Some(reason),
            }
        }
        Ok(ACCEPTED)
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

    fn judge(&self, guest: &Guest) -> Result<()> {
        let rank = guest.rank;
        let mismatch = |what: &str, theirs: String, expected: String| {
            if theirs == expected {
                return Ok(());
            }
            Err(Error::Mismatch {
                rank,
                what: what.into(),
                theirs,
                other: 0,
                expected,
            })
        };
        mismatch(
            "protocol version",
            guest.version.to_string(),
            self.version.to_string(),
        )?;
        let Some(hello) = &guest.hello else {
            return Ok(());
        };
        let own = &self.hello;
        mismatch("host (boot id)", hello.boot_id.clone(), own.boot_id.clone())?;
        mismatch("backend", hello.backend.clone(), own.backend.clone())?;
        mismatch("world size", hello.world.to_string(), own.world.to_string())?;
        if rank >= own.world {
            return Err(Error::Limit {
                rank: Some(rank),
                call: "Group::connect".into(),
                what: "the rank".into(),
                value: rank,
                min: 0,
                max: own.world - 1,
            });
        }
        let first = match rank {
            0 => Some(own.pid),
            // A rank that has gone and comes again is the same rank.
            _ => self.guests[rank]
                .as_ref()
                .filter(|seated| !seated.has_gone())
                .and_then(|seated| seated.hello.as_ref())
                .map(|hello| hello.pid),
        };
        first.map_or(Ok(()), |first| {
            Err(Error::DuplicateRank {
                rank,
                pids: [first, hello.pid],
            })
        })
    }
}

/// Stops listening, also if a forked child has the socket too. Ranks that have connected and were not heard go on
/// searching.
fn close(listener: &UnixListener) {
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

#[cfg(fuzzing)]
pub mod fuzzing {
    //! The bytes that come to a connection on which rank 0 waits for the other ranks.
    use std::io::Write;
    use std::net::Shutdown;
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::SocketAddr;

    use super::*;
    use crate::ranks::deadlines::Deadlines;

    fn identity() -> Identity {
        Identity {
            rank: 0,
            world: 4,
            address: String::new(),
            backend: "host",
            deadlines: Deadlines::new(Duration::from_secs(1), None),
            arrival: Arrival {
                name: None,
                job: None,
            },
            naming: None,
            launcher: None,
        }
    }

    thread_local! {
        static HOST: Rendezvous<'static> = {
            let name = format!("gemmesh/fuzz/{}", std::process::id());
            let address = SocketAddr::from_abstract_name(name).expect("an address");
            let listener = UnixListener::bind_addr(&address).expect("a listener");
            let identity = Box::leak(Box::new(identity()));
            let hello = Hello::new(identity).expect("the kernel's id");
            Rendezvous::new(identity, hello, listener, PROTOCOL_VERSION).expect("a host")
        };
    }

    /// The first byte says how much of the rest comes first.
    pub fn parse(data: &[u8]) {
        let Some((&first, sent)) = data.split_first() else {
            return;
        };
        let Ok((other, stream)) = wire::pair() else {
            return;
        };
        let mut stranger = Stranger {
            stream: Arc::new(Connection::from(stream)),
            since: Instant::now(),
            bytes: Vec::new(),
        };
        let (early, late) = sent.split_at(sent.len().min(first.into()));
        let _ = (&*other).write(early);
        if let Introduced::NotYet = stranger.listen(PROTOCOL_VERSION) {
            let _ = (&*other).write(late);
            let _ = other.shutdown(Shutdown::Write);
            if let Introduced::Rank(guest) = stranger.listen(PROTOCOL_VERSION) {
                judge(&guest);
            }
        }
        assert!(stranger.bytes.len() <= Prefix::BYTES + MAX_HELLO + 1024);
    }

    fn judge(guest: &Guest) {
        if let Err(error) = HOST.with(|host| host.judge(guest)) {
            let _ = error.to_string();
        }
    }

    /// The introductions of a rank, of the same rank on a different host, and of one with a different version.
    pub fn seeds() -> Vec<Vec<u8>> {
        let hello = Hello::new(&identity()).expect("the kernel's id");
        let elsewhere = Hello {
            boot_id: "another".into(),
            ..hello.clone()
        };
        let versions = [PROTOCOL_VERSION, PROTOCOL_VERSION, PROTOCOL_VERSION + 1];
        let introductions = versions.into_iter().zip([&hello, &elsewhere, &hello]);
        let bytes = introductions.map(|(version, hello)| {
            let words = serde_json::to_vec(hello).unwrap_or_default();
            let prefix = Prefix {
                version,
                rank: 1,
                length: words.len() as u32,
            };
            [&[10], &prefix.encode()[..], &words].concat()
        });
        bytes.collect()
    }
}
