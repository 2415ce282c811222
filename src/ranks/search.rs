//! The search for rank 0 among the names of an address. Any process may hold any of these names. (If there are several
//! hosts, each host's leader takes rank 0's part there.)
//!
//! Rank 0 listens at the first name that no other process holds. The other ranks look for it at all names, and pass
//! over names that a different user's process holds.

use std::io;
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::{Duration, Instant};

use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::address::{self, NAMES};
use super::identity::Identity;
use super::notice::{self, LongWait};
use super::peer::{Peer, User, user_of};
use super::pidfd;
use super::rendezvous::LINGER;
use crate::error::{Error, Kind, Result};
use crate::resources;

/// The pause after a failed try.
pub const RETRY: Duration = Duration::from_millis(5);
/// How long rank 0 tries to see who holds a name before it takes a different one. (A rank 0 binds its name a moment
/// before it listens.)
const PATIENCE: Duration = Duration::from_millis(50);

/// What a leader does.
pub const ACCEPT: &str = "accept another rank's connection";

/// Where the ranks meet.
pub enum Found {
    /// This process is rank 0 and listens.
    Here(UnixListener),
    /// A process of this user listens.
    There(UnixStream, Peer),
}

/// Who holds a name.
enum Holder {
    /// A process of this user, with a connection to it.
    Same(UnixStream, Peer),
    /// A process of a different user.
    Other,
    /// A process that accepts no connections. Its user cannot be known before it does.
    Full,
    /// No process, or one that does not listen.
    Silent,
}

/// This rank's search, from its first try to its deadline.
pub struct HostSearch<'a> {
    identity: &'a Identity,
    names: Vec<SocketAddr>,
    /// Where rank 0 says that it can accept no connection.
    last_descriptor: SocketAddr,
    begin: Instant,
    wait: LongWait,
    /// A process that is in the way.
    holder: Option<Peer>,
    /// True if a process that accepts no connections is in the way.
    full: bool,
    /// Why a process that listened could not be trusted.
    untrusted: Option<String>,
    /// Since when rank 0 has found only names that are taken but that no one listens at.
    silent: Option<Instant>,
    /// True if a connection to rank 0 has ended without an answer.
    closed: bool,
}

impl<'a> HostSearch<'a> {
    pub fn new(identity: &'a Identity) -> Result<HostSearch<'a>> {
        let address = identity.local_address();
        let system = || Error::system(identity.rank, "name a socket");
        let begin = Instant::now();
        Ok(HostSearch {
            identity,
            names: address::meeting_names(&address).map_err(system())?,
            last_descriptor: address::last_descriptor_name(&address).map_err(system())?,
            begin,
            wait: LongWait::since(begin),
            holder: None,
            full: false,
            untrusted: None,
            silent: None,
            closed: false,
        })
    }

    /// When the search began.
    pub fn begin(&self) -> Instant {
        self.begin
    }

    /// Searches until it has found a place to meet, or until the deadline.
    pub fn look(&mut self) -> Result<Found> {
        loop {
            let found = if self.identity.leads() {
                self.bind()?
            } else {
                self.find()?
            };
            if let Some(found) = found {
                return Ok(found);
            }
            self.pause()?;
        }
    }

    /// Notes that the process that was found has closed the connection without an answer. The next attempt may be under
    /// way.
    pub fn was_closed(&mut self) -> Result<()> {
        self.closed = true;
        self.pause()
    }

    /// The error if `peer`, which listens, gave no answer in time. To a rank other than 0 it may be rank 0.
    pub fn was_silent(&mut self, peer: Peer) -> Error {
        self.holder = self.identity.leads().then_some(peer);
        self.failure()
    }

    /// Shows ranks that look for this leader, for a while, that it has one descriptor left.
    pub fn show_last_descriptor(&self) {
        // If another process has the name, the others find out that this rank has not come.
        if let Ok(_last) = UnixListener::bind_addr(&self.last_descriptor) {
            std::thread::sleep(LINGER);
        }
    }

    /// Says for whom this rank waits.
    fn tell_of_wait(&self) {
        let (rank, leader) = (self.identity.rank, self.identity.leader());
        let (address, seconds) = (
            address::shown(&self.identity.address),
            notice::LONG.as_secs(),
        );
        notice::say(if rank == leader {
            format!("rank {rank} has found the names of {address:?} taken for {seconds} s")
        } else {
            format!("rank {rank} has waited for {seconds} s at {address:?} for rank {leader}")
        });
    }

    fn pause(&mut self) -> Result<()> {
        if self.wait.is_to_be_told(Instant::now()) {
            self.tell_of_wait();
        }
        let leader = self.identity.leader();
        if self.identity.has_ended(leader) {
            return Err(Kind::NeverJoined.on(leader));
        }
        if self.begin.elapsed() >= self.identity.deadlines.rendezvous() {
            return Err(self.failure());
        }
        std::thread::sleep(RETRY);
        Ok(())
    }

    /// Binds a name, as rank 0.
    fn bind(&mut self) -> Result<Option<Found>> {
        let mut socket = None;
        for number in 0..self.names.len() {
            match UnixListener::bind_addr(&self.names[number]) {
                Ok(listener) => return Ok(Some(Found::Here(listener))),
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
                Err(error) => {
                    let action = "listen for the other ranks";
                    return Err(Error::system(self.identity.rank, action)(error));
                }
            }
            let name = self.names[number].clone();
            match self.visit(&name, &mut socket)? {
                // A second rank 0, which tells all ranks of it.
                Holder::Same(stream, peer) => return Ok(Some(Found::There(stream, peer))),
                Holder::Other => {}
                Holder::Full | Holder::Silent => {
                    let since = *self.silent.get_or_insert_with(Instant::now);
                    if since.elapsed() < PATIENCE {
                        return Ok(None);
                    }
                }
            }
        }
        Ok(None)
    }

    /// Looks for rank 0, as one of the other ranks.
    fn find(&mut self) -> Result<Option<Found>> {
        let (mut taken, mut socket) = (0, None);
        for number in 0..self.names.len() {
            let name = self.names[number].clone();
            match self.visit(&name, &mut socket)? {
                Holder::Same(stream, peer) => return Ok(Some(Found::There(stream, peer))),
                Holder::Other | Holder::Full => taken += 1,
                Holder::Silent => {}
            }
        }
        let name = self.last_descriptor.clone();
        if let Holder::Same(_, peer) = self.visit(&name, &mut socket)? {
            return Err(Kind::System {
                action: ACCEPT.into(),
                reason: resources::explain_open_files(peer.pid),
            }
            .on(self.identity.leader()));
        }
        // There was a name left for rank 0.
        if taken < NAMES {
            (self.holder, self.full) = (None, false);
        }
        Ok(None)
    }

    /// Sees who holds a name, by connecting `socket`. After a failed try the socket is still there.
    fn visit(&mut self, name: &SocketAddr, socket: &mut Option<OwnedFd>) -> Result<Holder> {
        let opened = socket.take().map_or_else(open, Ok);
        let opened = opened.map_err(Error::system(self.identity.rank, "open a socket"))?;
        if let Err(error) = connect(&opened, name) {
            *socket = Some(opened);
            let is_full = error.kind() == io::ErrorKind::WouldBlock;
            self.full |= is_full;
            return Ok(if is_full {
                Holder::Full
            } else {
                Holder::Silent
            });
        }
        let stream = UnixStream::from(opened);
        // The call fails only for sockets that are not connections.
        let Ok(peer) = Peer::of(&stream) else {
            return Ok(Holder::Silent);
        };
        Ok(match user_of(&stream, peer) {
            // A child that the process has forked still has the socket, and never accepts from it.
            User::Same if pidfd::has_ended(&stream) => Holder::Silent,
            User::Same => Holder::Same(stream, peer),
            User::Other => {
                self.holder = Some(peer);
                Holder::Other
            }
            User::Unknown(reason) => {
                self.holder = Some(peer);
                self.untrusted = Some(reason);
                Holder::Other
            }
        })
    }

    /// The error of a search that found nothing.
    fn failure(&self) -> Error {
        let (rank, leader) = (self.identity.rank, self.identity.leader());
        let leads = self.identity.leads();
        let address = address::shown(&self.identity.address);
        let waited_ms = self.begin.elapsed().as_millis() as u64;
        let missing = |reason| {
            Error::of_kind(Kind::RanksMissing {
                ranks: vec![leader],
                address: address.clone(),
                waited_ms,
                reason,
            })
        };
        match (&self.untrusted, self.holder) {
            (Some(why), _) if !leads => missing(Some(turned_away(rank, why))),
            (_, holder) if leads || holder.is_some() || self.full => Kind::AddressTaken {
                address,
                holder: match holder {
                    Some(peer) => peer.to_string(),
                    None if self.full => "a process that accepts no connections".into(),
                    None => "a process that does not listen".into(),
                },
                waited_ms,
            }
            .on(rank),
            _ if self.closed => Kind::RankLost { noticed_by: rank }.on(leader),
            _ => missing(None),
        }
    }
}

/// What is known of ranks that have not come, if `rank` turned a process away, whose user is not known for this reason.
pub fn turned_away(rank: usize, why: &str) -> String {
    format!("rank {rank} turned a process away: {why}")
}

/// Opens a socket that does not block, also when it connects. (A stopped rank 0 accepts only a few connections.)
fn open() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    Ok(socket)
}

fn connect(socket: &OwnedFd, name: &SocketAddr) -> io::Result<()> {
    let name = name.as_abstract_name().unwrap_or_default();
    net::connect(socket, &SocketAddrUnix::new_abstract_name(name)?)?;
    Ok(())
}
