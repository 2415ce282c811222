//! The rendezvous: processes of one host that agree on an address become a group.
//!
//! The address is a name in the abstract socket namespace, so nothing lies in any directory and nothing
//! stays behind when a process is killed. Rank 0 listens; the others connect, say who they are, and get
//! either the group's shared memory or the reason why there is no group. Whoever connects and does not
//! speak this language, or is another user, is dropped, and listening goes on.

use std::fs;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use serde::{Deserialize, Serialize};

use super::members::Members;
use super::reports::ReportSender;
use super::shared_state::SharedState;
use super::wire::{self, Channel, WireError};
use crate::error::{Error, Result};
use crate::json;
use crate::memory::{Mapping, memfd};
use crate::schedule::layout::MAX_WORLD;

const MAGIC: [u8; 8] = *b"gemmesh\0";
/// Changes whenever ranks of an older build could not work with ranks of this one.
pub const PROTOCOL_VERSION: u32 = 4;
/// The longest introduction: a few numbers and names.
const MAX_HELLO: usize = 4096;
/// The longest answer: an error.
const MAX_VERDICT: usize = 64 << 10;
/// How long a connection may take to introduce itself.
const INTRODUCTION: Duration = Duration::from_secs(2);
/// How long rank 0 goes on listening, once the group has failed, to tell those who come late.
const LINGER: Duration = Duration::from_secs(1);
/// How long rank 0 listens, once all have come, for a process that has come twice.
const LAST_CALL: Duration = Duration::from_millis(20);
/// How many connections that have not introduced themselves are kept.
const MAX_STRANGERS: usize = 256;
const RETRY: Duration = Duration::from_millis(5);

/// Who a process says it is.
#[derive(Clone, Debug)]
pub struct Identity {
    pub rank: usize,
    pub world: usize,
    pub address: String,
    pub backend: &'static str,
    pub timeout: Duration,
    /// To the launcher, if it described this rank.
    pub launcher: Option<ReportSender>,
}

/// The introduction, after its [`Prefix`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Hello {
    world: usize,
    address: String,
    backend: String,
    /// The running kernel's id: the same for all processes that can share memory.
    boot_id: String,
    pid: u32,
}

impl Hello {
    fn new(identity: &Identity) -> Hello {
        Hello {
            world: identity.world,
            address: identity.address.clone(),
            backend: identity.backend.into(),
            boot_id: fs::read_to_string("/proc/sys/kernel/random/boot_id")
                .map_or_else(|_| "unknown".into(), |id| id.trim().into()),
            pid: std::process::id(),
        }
    }
}

/// The first bytes of an introduction; their layout is the same in every version.
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

/// Meets the other ranks, speaking protocol version `version`.
///
/// # Errors
/// On every rank that comes, the same: [`Error::RanksMissing`], [`Error::DuplicateRank`] or
/// [`Error::Mismatch`].
pub fn meet_speaking(identity: &Identity, version: u32) -> Result<Members> {
    let rank = identity.rank;
    let address = wire::abstract_address(&identity.address).map_err(Error::system(
        rank,
        format!("use the address {:?}", identity.address),
    ))?;
    if rank == 0 {
        match UnixListener::bind_addr(&address) {
            Ok(listener) => return Rendezvous::new(identity, listener, version)?.run(),
            // Another process is rank 0. Introduce this one too, so that every rank hears of it.
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
            Err(error) => return Err(Error::system(rank, "listen for the other ranks")(error)),
        }
    }
    join(identity, &address, version)
}

/// A connection that does not block, also when it is made: a stopped rank 0 accepts only so many.
fn connect(address: &SocketAddr) -> io::Result<UnixStream> {
    let name = address.as_abstract_name().unwrap_or_default();
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    net::connect(&socket, &SocketAddrUnix::new_abstract_name(name)?)?;
    Ok(socket.into())
}

/// The part of every rank but 0.
fn join(identity: &Identity, address: &SocketAddr, version: u32) -> Result<Members> {
    let begin = Instant::now();
    let missing = |rank| Error::RanksMissing {
        ranks: vec![rank],
        address: identity.address.clone(),
        waited_ms: begin.elapsed().as_millis() as u64,
    };
    let stream = loop {
        match connect(address) {
            Ok(stream) => break stream,
            Err(_) if begin.elapsed() < identity.timeout => std::thread::sleep(RETRY),
            Err(_) => return Err(missing(0)),
        }
    };
    let system = |action: &str| Error::system(identity.rank, action.to_string());
    require_same_user(&stream).map_err(system("trust the process that listens as rank 0"))?;

    let hello = serde_json::to_vec(&Hello::new(identity))
        .map_err(io::Error::from)
        .map_err(system("encode an introduction"))?;
    let prefix = Prefix {
        version,
        rank: identity.rank as u32,
        length: hello.len() as u32,
    };
    let channel = Channel {
        stream: &stream,
        // Rank 0 may have begun later than this rank, and knows better who is missing.
        deadline: Instant::now() + identity.timeout + LINGER,
        check: || Ok::<(), Error>(()),
    };
    let answer = channel
        .send_raw(&[prefix.encode().as_slice(), &hello].concat())
        .and_then(|()| channel.receive(MAX_VERDICT));
    let (verdict, fds) = answer.map_err(|error| match error {
        WireError::Late => missing(0),
        WireError::Closed => Error::RankLost {
            rank: 0,
            noticed_by: identity.rank,
        },
        WireError::Stopped(error) => error,
        WireError::Garbage(reason) => Error::Message { rank: 0, reason },
        WireError::Io(error) => system("talk to rank 0")(error),
    })?;
    let verdict = json::outcome::<()>(&verdict);
    verdict.map_err(|e| Error::Message {
        rank: 0,
        reason: e.to_string(),
    })??;
    let memory = fds.first().ok_or_else(|| Error::Message {
        rank: 0,
        reason: "it sent no shared memory".into(),
    })?;
    let memory = Mapping::shared(memory, SharedState::BYTES)
        .map_err(system("map the group's shared memory"))?;
    members(identity, memory, vec![stream])
}

fn members(identity: &Identity, memory: Mapping, connections: Vec<UnixStream>) -> Result<Members> {
    let &Identity {
        rank,
        world,
        timeout,
        ..
    } = identity;
    if let Some(launcher) = &identity.launcher {
        // All ranks are here, whatever became of an earlier group.
        launcher.withdraw();
    }
    let shared_state =
        SharedState::new(memory, rank, world).with_launcher(identity.launcher.clone());
    Members::new(rank, timeout, false, shared_state, world, connections)
}

/// A process of another user could otherwise take part by guessing the address.
fn require_same_user(stream: &UnixStream) -> io::Result<()> {
    let peer = rustix::net::sockopt::socket_peercred(stream)?.uid;
    if peer == rustix::process::getuid() {
        return Ok(());
    }
    Err(io::Error::new(
        io::ErrorKind::PermissionDenied,
        format!("it runs as user {}", peer.as_raw()),
    ))
}

/// A connection that has not introduced itself yet.
struct Stranger {
    stream: UnixStream,
    since: Instant,
    bytes: Vec<u8>,
}

/// What a stranger turned out to be.
enum Introduced {
    NotYet,
    /// Not a rank of this library: to be dropped.
    Nobody,
    Rank(Guest),
}

/// A connection that speaks our language.
struct Guest {
    stream: UnixStream,
    rank: usize,
    version: u32,
    /// None if its version is another, so that the words can't be understood.
    hello: Option<Hello>,
}

impl Stranger {
    /// Reads what has come, without waiting.
    fn listen(&mut self, version: u32) -> Introduced {
        let mut piece = [0; 1024];
        let ended = loop {
            match self.stream.read(&mut piece) {
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
        let Ok(stream) = self.stream.try_clone() else {
            return Some(Introduced::Nobody);
        };
        Some(Introduced::Rank(Guest {
            stream,
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
    strangers: Vec<Stranger>,
    /// By rank; none for rank 0.
    guests: Vec<Option<Guest>>,
    /// Guests that have no place.
    rejected: Vec<Guest>,
}

impl<'a> Rendezvous<'a> {
    fn new(identity: &'a Identity, listener: UnixListener, version: u32) -> Result<Rendezvous<'a>> {
        listener
            .set_nonblocking(true)
            .map_err(Error::system(0, "set up a socket"))?;
        Ok(Rendezvous {
            identity,
            hello: Hello::new(identity),
            version,
            listener,
            strangers: Vec::new(),
            guests: (0..identity.world).map(|_| None).collect(),
            rejected: Vec::new(),
        })
    }

    fn run(mut self) -> Result<Members> {
        let outcome = self.receive_all().and_then(|()| {
            let system = |action| Error::system(0, action);
            let fd =
                memfd(SharedState::BYTES).map_err(system("allocate the group's shared memory"))?;
            let memory = Mapping::shared(&fd, SharedState::BYTES)
                .map_err(system("map the group's shared memory"))?;
            Ok((memory, fd))
        });
        match outcome {
            Ok((memory, fd)) => {
                let mut connections = Vec::new();
                for guest in self.guests.iter_mut().filter_map(Option::take) {
                    tell(
                        &guest.stream,
                        &Ok(()),
                        &[fd.try_clone()
                            .map_err(Error::system(0, "duplicate a descriptor"))?],
                    );
                    connections.push(guest.stream);
                }
                members(self.identity, memory, connections)
            }
            Err(error) => {
                self.tell_all(&error);
                Err(error)
            }
        }
    }

    /// Receives guests until each rank has come once.
    fn receive_all(&mut self) -> Result<()> {
        let begin = Instant::now();
        let deadline = begin + self.identity.timeout;
        while !self.complete() {
            if Instant::now() >= deadline {
                return Err(Error::RanksMissing {
                    ranks: self.missing(),
                    address: self.identity.address.clone(),
                    waited_ms: begin.elapsed().as_millis() as u64,
                });
            }
            self.receive(deadline)?;
        }
        let last_call = Instant::now() + LAST_CALL;
        while self.identity.world > 1 && Instant::now() < last_call {
            self.receive(last_call)?;
        }
        Ok(())
    }

    fn complete(&self) -> bool {
        self.guests.iter().skip(1).all(Option::is_some)
    }

    fn missing(&self) -> Vec<usize> {
        (1..self.identity.world)
            .filter(|&rank| self.guests[rank].is_none())
            .collect()
    }

    /// Tells everybody who has come, or comes soon, that there is no group.
    fn tell_all(&mut self, error: &Error) {
        let deadline = Instant::now() + LINGER;
        // If world sizes differ, it may be rank 0 that is wrong: all that the others count on will come.
        let guests = self.guests.iter().flatten().chain(&self.rejected);
        let theirs = guests.filter_map(|guest| Some(guest.hello.as_ref()?.world));
        let world = theirs.fold(self.identity.world, usize::max);
        let mut told = vec![false; world.min(MAX_WORLD)];
        told[0] = true;
        loop {
            let seated = self.guests.iter_mut().filter_map(Option::take);
            for guest in seated.chain(self.rejected.drain(..)) {
                tell(&guest.stream, &Err(error.clone()), &[]);
                if let Some(told) = told.get_mut(guest.rank) {
                    *told = true;
                }
            }
            if told.iter().all(|&told| told) || Instant::now() >= deadline {
                return;
            }
            // What else is wrong with those who come now does not matter any more.
            let _ = self.receive(deadline);
        }
    }

    /// Waits for something to happen, and handles it.
    fn receive(&mut self, deadline: Instant) -> Result<()> {
        let mut fds = vec![PollFd::new(&self.listener, PollFlags::IN)];
        fds.extend(
            self.strangers
                .iter()
                .map(|stranger| PollFd::new(&stranger.stream, PollFlags::IN)),
        );
        let left = deadline.saturating_duration_since(Instant::now());
        wire::poll(&mut fds, left.min(Duration::from_millis(50)))
            .map_err(Error::system(0, "wait for the other ranks"))?;
        drop(fds);

        while let Ok((stream, _)) = self.listener.accept() {
            let welcome = require_same_user(&stream).and_then(|()| stream.set_nonblocking(true));
            if welcome.is_ok() {
                self.strangers.push(Stranger {
                    stream,
                    since: Instant::now(),
                    bytes: Vec::new(),
                });
            }
        }
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
        // A rank introduces itself as soon as it is connected; so the oldest of a crowd is the least likely one.
        let crowd = self.strangers.len().saturating_sub(MAX_STRANGERS);
        self.strangers.drain(..crowd);
        // Everyone who has come is to be told, also of what is wrong with another.
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
        mismatch("address", hello.address.clone(), own.address.clone())?;
        mismatch("host (boot id)", hello.boot_id.clone(), own.boot_id.clone())?;
        mismatch("backend", hello.backend.clone(), own.backend.clone())?;
        mismatch("world size", hello.world.to_string(), own.world.to_string())?;
        if rank >= own.world {
            return Err(Error::Limit {
                what: "rank".into(),
                value: rank,
                min: 0,
                max: own.world - 1,
            });
        }
        let first = match rank {
            0 => Some(own.pid),
            _ => self.guests[rank]
                .as_ref()
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

/// Sends the verdict. A guest that has gone meanwhile is found missing by the first call it should make.
fn tell(stream: &UnixStream, verdict: &Result<()>, fds: &[OwnedFd]) {
    let channel = Channel {
        stream,
        deadline: Instant::now() + LINGER,
        check: || Ok::<(), Error>(()),
    };
    let _ = channel.send(&json::of_outcome(verdict), &wire::borrow(fds));
}

#[cfg(fuzzing)]
pub mod fuzzing {
    //! What comes to a connection on which rank 0 waits for the others.
    use std::io::Write;
    use std::net::Shutdown;

    use super::*;

    const IDENTITY: Identity = Identity {
        rank: 0,
        world: 4,
        address: String::new(),
        backend: "host",
        timeout: Duration::from_secs(1),
        launcher: None,
    };

    thread_local! {
        static HOST: Rendezvous<'static> = {
            let name = format!("gemmesh/fuzz/{}", std::process::id());
            let address = SocketAddr::from_abstract_name(name).expect("an address");
            let listener = UnixListener::bind_addr(&address).expect("a listener");
            let identity = Box::leak(Box::new(IDENTITY));
            Rendezvous::new(identity, listener, PROTOCOL_VERSION).expect("a host")
        };
    }

    /// The first byte says how much of the rest comes first.
    pub fn parse(data: &[u8]) {
        let Some((&first, sent)) = data.split_first() else {
            return;
        };
        let Ok((mut other, stream)) = wire::pair() else {
            return;
        };
        let mut stranger = Stranger {
            stream,
            since: Instant::now(),
            bytes: Vec::new(),
        };
        let (early, late) = sent.split_at(sent.len().min(first.into()));
        let _ = other.write(early);
        if let Introduced::NotYet = stranger.listen(PROTOCOL_VERSION) {
            let _ = other.write(late);
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

    /// The introductions of a rank, of the same on another host, and of one of another version.
    pub fn seeds() -> Vec<Vec<u8>> {
        let hello = Hello::new(&IDENTITY);
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
