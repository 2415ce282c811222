//! Rank 0's side: it listens for the leaders of the other hosts.

use std::io::{self, Read};
use std::net::{SocketAddr, TcpListener};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::net::{self, SendFlags, send};

use super::handshake::{Greeting, Key, Nonces, Proof, nonce};
use super::{MAX_REPORT, VisitReport};
use crate::error::{Error, Result};
use crate::ranks::notice;
use crate::ranks::search::RETRY;
use crate::ranks::tcp;
use crate::ranks::wire::Connection;
use crate::resources::is_out_of_descriptors;

/// How long a connection may take to greet, and then to prove that it is a leader's: packets may be lost, and sent again
/// after a while.
const GREETING: Duration = Duration::from_secs(5);
const PROOF: Duration = Duration::from_secs(20);
/// How many connections are kept that have not greeted, and how many that have and prove nothing.
const MAX_STRANGERS: usize = 256;
/// How many connections are accepted before rank 0 looks at the time again.
const ACCEPTED: usize = 64;

/// What is said of a process that has greeted with another key.
pub const ANOTHER_KEY: &str = "it does not have this job's key (GEMMESH_KEY)";

/// The connections that have come by TCP.
pub struct Lobby {
    listener: TcpListener,
    key: Key,
    strangers: Vec<UnknownVisitor>,
    /// The first process that greeted with another key.
    turned_away: Option<SocketAddr>,
}

/// A leader that has proved that it has the key.
pub struct Visitor {
    pub rank: usize,
    pub version: u32,
    /// None if its protocol version is different, because then its words can't be understood.
    pub report: Option<VisitReport>,
    pub stream: Connection,
}

/// A connection that has not proved anything, or not all.
struct UnknownVisitor {
    stream: Connection,
    address: SocketAddr,
    since: Instant,
    bytes: Vec<u8>,
    greeted: Option<(Greeting, Nonces)>,
}

/// What a stranger turned out to be.
enum Seen {
    NotYet,
    Nobody,
    /// It has greeted with another key.
    Refused,
    Leader(Option<VisitReport>),
}

impl Lobby {
    /// # Errors
    /// If the listener can't be set up.
    pub fn new(listener: TcpListener, key: Key) -> Result<Lobby> {
        let set_up = listener.set_nonblocking(true);
        set_up.map_err(Error::system(0, "set up a socket"))?;
        Ok(Lobby {
            listener,
            key,
            strangers: Vec::new(),
            turned_away: None,
        })
    }

    /// The first process that greeted with another key, if there was one.
    pub fn turned_away(&self) -> Option<SocketAddr> {
        self.turned_away
    }

    /// Stops listening, also if a forked child has the socket too.
    pub fn close(self) {
        // The call does not fail for a listening socket.
        let _ = net::shutdown(&self.listener, net::Shutdown::Both);
    }

    /// True if there are connections that have not proved that they are a leader's.
    pub fn has_strangers(&self) -> bool {
        !self.strangers.is_empty()
    }

    /// The events to wait for.
    pub fn events(&self) -> impl Iterator<Item = PollFd<'_>> {
        let strangers = self.strangers.iter();
        let strangers = strangers.map(|stranger| PollFd::new(&*stranger.stream, PollFlags::IN));
        [PollFd::new(&self.listener, PollFlags::IN)]
            .into_iter()
            .chain(strangers)
    }

    /// Handles a bounded number of connections, without waiting. Returns how many were accepted, and the leaders that
    /// have come, which speak `version` or another.
    ///
    /// # Errors
    /// If there is no descriptor for a connection, and no stranger's will become free.
    pub fn receive(&mut self, version: u32) -> Result<(usize, Vec<Visitor>)> {
        let accepted = self.accept()?;
        let mut visitors = Vec::new();
        let strangers = std::mem::take(&mut self.strangers);
        for mut stranger in strangers {
            match stranger.listen(&self.key, version) {
                Seen::Leader(report) => visitors.extend(stranger.introduced(report)),
                Seen::NotYet if stranger.since.elapsed() < stranger.patience() => {
                    self.strangers.push(stranger);
                }
                Seen::NotYet | Seen::Nobody => {}
                Seen::Refused => self.turn_away(stranger.address),
            }
        }
        // A leader greets as soon as it is connected. So the oldest of many strangers are the least likely to be one.
        self.drop_oldest(false);
        self.drop_oldest(true);
        Ok((accepted, visitors))
    }

    /// Takes a connection as if it had come to the listener.
    #[cfg(fuzzing)]
    pub fn admit(&mut self, stream: Connection) {
        self.strangers.push(UnknownVisitor {
            stream,
            address: ([127, 0, 0, 1], 1).into(),
            since: Instant::now(),
            bytes: Vec::new(),
            greeted: None,
        });
    }

    /// Says once that a process has another key.
    fn turn_away(&mut self, address: SocketAddr) {
        if self.turned_away.is_none() {
            self.turned_away = Some(address);
            notice::say(format_args!(
                "rank 0 has turned away a process at {address}: {ANOTHER_KEY}"
            ));
        }
    }

    fn accept(&mut self) -> Result<usize> {
        for accepted in 0..ACCEPTED {
            match self.listener.accept() {
                Ok((stream, from)) => {
                    // The calls fail only for sockets that are not connections.
                    if let Ok(stream) = tcp::connection(stream) {
                        self.strangers.push(UnknownVisitor {
                            stream,
                            address: SocketAddr::new(from.ip().to_canonical(), from.port()),
                            since: Instant::now(),
                            bytes: Vec::new(),
                            greeted: None,
                        });
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return Ok(accepted);
                }
                Err(error) if is_out_of_descriptors(&error) && self.strangers.is_empty() => {
                    return Err(Error::system(0, "accept another host's connection")(error));
                }
                // Of the others, only a lack of descriptors lasts. Strangers leave, and then there are some.
                Err(_) => {
                    std::thread::sleep(RETRY);
                    return Ok(accepted);
                }
            }
        }
        Ok(ACCEPTED)
    }

    /// Drops the oldest of the strangers that have greeted, or of those that have not, if they are too many.
    fn drop_oldest(&mut self, have_greeted: bool) {
        let is_one = |stranger: &UnknownVisitor| stranger.greeted.is_some() == have_greeted;
        let count = self.strangers.iter().filter(|one| is_one(one)).count();
        let mut crowd = count.saturating_sub(MAX_STRANGERS);
        self.strangers.retain(|stranger| {
            let goes = crowd > 0 && is_one(stranger);
            crowd -= usize::from(goes);
            !goes
        });
    }
}

impl UnknownVisitor {
    /// Reads what has come, without waiting, and answers a greeting.
    fn listen(&mut self, key: &Key, version: u32) -> Seen {
        let mut piece = [0; 1024];
        let ended = loop {
            match (&*self.stream).read(&mut piece) {
                Ok(0) => break true,
                Ok(count) => self.bytes.extend(&piece[..count]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => break error.kind() != io::ErrorKind::WouldBlock,
            }
            if self.bytes.len() > self.most() {
                return Seen::Nobody;
            }
        };
        let seen = match self.greeted {
            None => self.greeting(key),
            Some((greeting, nonces)) => self.proof(key, &greeting, &nonces, version),
        };
        match seen {
            Seen::NotYet if ended => Seen::Nobody,
            seen => seen,
        }
    }

    /// How long it may take.
    fn patience(&self) -> Duration {
        match self.greeted {
            None => GREETING,
            Some(_) => PROOF,
        }
    }

    /// The most bytes that may have come. A leader that has not been answered has no more to say.
    fn most(&self) -> usize {
        match self.greeted {
            None => Greeting::BYTES,
            Some(_) => Proof::HEADER + MAX_REPORT,
        }
    }

    fn greeting(&mut self, key: &Key) -> Seen {
        if !Greeting::may_begin_with(&self.bytes) {
            return Seen::Nobody;
        }
        let Some(bytes) = self.bytes.first_chunk() else {
            return Seen::NotYet;
        };
        let Some(greeting) = Greeting::decode(bytes, key) else {
            return Seen::Refused;
        };
        let Ok(first) = nonce() else {
            return Seen::Nobody;
        };
        let nonces = Nonces {
            leaders: greeting.nonce,
            first,
        };
        let answer = nonces.answer(key);
        // A new connection has room for so few bytes.
        match send(&*self.stream, &answer, SendFlags::NOSIGNAL) {
            Ok(sent) if sent == answer.len() => {}
            _ => return Seen::Nobody,
        }
        self.bytes.clear();
        self.greeted = Some((greeting, nonces));
        Seen::NotYet
    }

    fn proof(&self, key: &Key, greeting: &Greeting, nonces: &Nonces, version: u32) -> Seen {
        let Some((header, rest)) = self.bytes.split_first_chunk() else {
            return Seen::NotYet;
        };
        let length = Proof::length(header);
        if length > MAX_REPORT {
            return Seen::Nobody;
        }
        let Some(report) = rest.get(..length) else {
            return Seen::NotYet;
        };
        if !Proof::is_right(nonces, header, report, key) {
            return Seen::Nobody;
        }
        if greeting.version != version {
            return Seen::Leader(None);
        }
        match serde_json::from_slice(report) {
            Ok(report) => Seen::Leader(Some(report)),
            Err(_) => Seen::Nobody,
        }
    }

    fn introduced(self, report: Option<VisitReport>) -> Option<Visitor> {
        let (greeting, _) = self.greeted?;
        Some(Visitor {
            rank: greeting.rank as usize,
            version: greeting.version,
            report,
            stream: self.stream,
        })
    }
}
