//! Rank 0's side: it listens for the leaders of the other hosts.

use std::io::{self, Read};
use std::net::TcpListener;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::net::{self, SendFlags, send};

use super::handshake::{Greeting, Key, Nonces, Proof, nonce};
use super::{MAX_REPORT, Report};
use crate::error::{Error, Result};
use crate::ranks::search::RETRY;
use crate::ranks::tcp;
use crate::ranks::wire::Connection;

/// How long a connection may take to prove that it is a leader's.
const INTRODUCTION: Duration = Duration::from_secs(2);
/// How many connections are kept that have not greeted, and how many that have and prove nothing.
const MAX_STRANGERS: usize = 256;
/// How many connections are accepted before rank 0 looks at the time again.
const ACCEPTED: usize = 64;

/// The connections that have come by TCP.
pub struct Lobby {
    listener: TcpListener,
    key: Key,
    strangers: Vec<Stranger>,
}

/// A leader that has proved that it has the key.
pub struct Visitor {
    pub rank: usize,
    pub version: u32,
    /// None if its protocol version is different, because then its words can't be understood.
    pub report: Option<Report>,
    pub stream: Connection,
}

/// A connection that has not proved anything, or not all.
struct Stranger {
    stream: Connection,
    since: Instant,
    bytes: Vec<u8>,
    greeted: Option<(Greeting, Nonces)>,
}

/// What a stranger turned out to be.
enum Seen {
    NotYet,
    Nobody,
    Leader(Option<Report>),
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
        })
    }

    /// Stops listening, also if a forked child has the socket too.
    pub fn close(self) {
        // The call does not fail for a listening socket.
        let _ = net::shutdown(&self.listener, net::Shutdown::Both);
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
    pub fn receive(&mut self, version: u32) -> (usize, Vec<Visitor>) {
        let accepted = self.accept();
        let mut visitors = Vec::new();
        let strangers = std::mem::take(&mut self.strangers);
        for mut stranger in strangers {
            match stranger.listen(&self.key, version) {
                Seen::Leader(report) => visitors.extend(stranger.introduced(report)),
                Seen::NotYet if stranger.since.elapsed() < INTRODUCTION => {
                    self.strangers.push(stranger);
                }
                Seen::NotYet | Seen::Nobody => {}
            }
        }
        // A leader greets as soon as it is connected. So the oldest of many strangers are the least likely to be one.
        self.drop_oldest(false);
        self.drop_oldest(true);
        (accepted, visitors)
    }

    fn accept(&mut self) -> usize {
        for accepted in 0..ACCEPTED {
            match self.listener.accept() {
                Ok((stream, _)) => {
                    // The calls fail only for sockets that are not connections.
                    if let Ok(stream) = tcp::connection(stream) {
                        self.strangers.push(Stranger {
                            stream,
                            since: Instant::now(),
                            bytes: Vec::new(),
                            greeted: None,
                        });
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return accepted,
                // Of the others, only a lack of descriptors lasts. Strangers leave, and then there are some.
                Err(_) => {
                    std::thread::sleep(RETRY);
                    return accepted;
                }
            }
        }
        ACCEPTED
    }

    /// Drops the oldest of the strangers that have greeted, or of those that have not, if they are too many.
    fn drop_oldest(&mut self, have_greeted: bool) {
        let is_one = |stranger: &Stranger| stranger.greeted.is_some() == have_greeted;
        let count = self.strangers.iter().filter(|one| is_one(one)).count();
        let mut crowd = count.saturating_sub(MAX_STRANGERS);
        self.strangers.retain(|stranger| {
            let goes = crowd > 0 && is_one(stranger);
            crowd -= usize::from(goes);
            !goes
        });
    }
}

impl Stranger {
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
        let (Some(greeting), Ok(first)) = (Greeting::decode(bytes, key), nonce()) else {
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

    fn introduced(self, report: Option<Report>) -> Option<Visitor> {
        let (greeting, _) = self.greeted?;
        Some(Visitor {
            rank: greeting.rank as usize,
            version: greeting.version,
            report,
            stream: self.stream,
        })
    }
}
