//! A leader's side: it finds rank 0, and waits for the verdict.

use std::convert::Infallible;
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::handshake::{Greeting, Nonces, Proof, nonce};
use super::{Line, Meeting, Place, Report};
use crate::error::{Error, Result};
use crate::json;
use crate::ranks::identity::Identity;
use crate::ranks::mirror::Link;
use crate::ranks::rendezvous::{Hello, MAX_VERDICT};
use crate::ranks::search::RETRY;
use crate::ranks::tcp;
use crate::ranks::wire::{Channel, Connection, WireError};

/// How long an address has to accept a connection, and then to answer a greeting.
const CONNECT: Duration = Duration::from_millis(500);
const ANSWER: Duration = Duration::from_secs(2);
/// How long a leader tries again if it is turned away, or if a name has no address. A job may be just beginning, or an
/// earlier one just ending.
const PATIENCE: Duration = Duration::from_secs(5);

/// Reports to rank 0 whether the ranks of this leader's host have come, and waits for the verdict, until `deadline`.
///
/// # Errors
/// The verdict, if it is one; [`Error::KeyRefused`]; [`Error::System`] if a name has no address;
/// [`Error::RanksMissing`] if rank 0 has not come at the deadline.
pub fn report(
    identity: &Identity,
    meeting: &Meeting,
    hello: &Hello,
    version: u32,
    outcome: &Result<()>,
    deadline: Instant,
) -> Result<Link> {
    let caller = Caller {
        identity,
        meeting,
        hello,
        version,
        outcome,
        begin: Instant::now(),
        deadline,
    };
    // Since when each of these has been so.
    let (mut turned_away, mut nameless) = (None, None);
    loop {
        match meeting.addresses() {
            Ok(addresses) => {
                nameless = None;
                for address in addresses {
                    match caller.call(address) {
                        Called::Verdict(verdict) => return verdict,
                        Called::TurnedAway => {
                            let since = *turned_away.get_or_insert_with(Instant::now);
                            if since.elapsed() >= PATIENCE {
                                return Err(Error::KeyRefused {
                                    rank: identity.rank,
                                    address: address.to_string(),
                                });
                            }
                        }
                        Called::Answered => turned_away = None,
                        Called::Nobody => {}
                    }
                }
            }
            Err(error) => {
                let since = *nameless.get_or_insert_with(Instant::now);
                if since.elapsed() >= PATIENCE || Instant::now() >= deadline {
                    return Err(caller.nameless(error));
                }
                std::thread::sleep(PATIENCE / 10);
            }
        }
        if Instant::now() >= deadline {
            return Err(caller.missing());
        }
        std::thread::sleep(4 * RETRY);
    }
}

/// A leader that looks for rank 0.
struct Caller<'a> {
    identity: &'a Identity,
    meeting: &'a Meeting,
    hello: &'a Hello,
    version: u32,
    outcome: &'a Result<()>,
    begin: Instant,
    deadline: Instant,
}

/// How a call at an address ended.
enum Called {
    Verdict(Result<Link>),
    /// Nobody listens there, or nobody answers.
    Nobody,
    /// Somebody has ended the connection without an answer, or has answered wrongly.
    TurnedAway,
    /// It was rank 0, which has gone again.
    Answered,
}

impl Caller<'_> {
    /// Calls the process that listens at `address`.
    fn call(&self, address: SocketAddr) -> Called {
        let mirror = match self.introduce(address, Line::Mirror) {
            Ok(mirror) => mirror,
            Err(called) => return called,
        };
        let messages = match self.introduce(address, Line::Messages) {
            Ok(messages) => messages,
            // It has answered a moment ago.
            Err(_) => return Called::Answered,
        };
        let verdict = channel(&messages, self.deadline).receive(MAX_VERDICT);
        match verdict {
            Ok((verdict, _)) => Called::Verdict(self.verdict(&verdict, messages, mirror)),
            Err(WireError::Late) => Called::Verdict(Err(self.missing())),
            Err(_) => Called::Answered,
        }
    }

    fn verdict(&self, verdict: &[u8], messages: Connection, mirror: Connection) -> Result<Link> {
        let verdict = json::outcome::<()>(verdict).map_err(|error| Error::Message {
            rank: 0,
            reason: error.to_string(),
        });
        verdict??;
        Ok(Link {
            rank: 0,
            messages: Arc::new(messages),
            mirror,
        })
    }

    /// Makes a connection, and proves that this leader has the key if the other end does.
    fn introduce(&self, address: SocketAddr, line: Line) -> Result<Connection, Called> {
        let connected = TcpStream::connect_timeout(&address, CONNECT);
        let stream = connected.and_then(tcp::connection);
        let stream = stream.map_err(|_| Called::Nobody)?;
        let leaders = nonce().map_err(|_| Called::Nobody)?;
        let key = &self.meeting.key;
        let greeting = Greeting {
            version: self.version,
            rank: self.identity.rank as u32,
            nonce: leaders,
        };
        let channel = channel(&stream, Instant::now() + ANSWER);
        let mut answer = [0; Nonces::ANSWER_BYTES];
        let answered = channel
            .send_raw(&greeting.encode(key))
            .and_then(|()| channel.receive_raw(&mut answer));
        match answered {
            Ok(()) => {}
            Err(WireError::Late) => return Err(Called::Nobody),
            Err(_) => return Err(Called::TurnedAway),
        }
        let nonces = Nonces::of_answer(leaders, &answer, key).ok_or(Called::TurnedAway)?;
        let report = serde_json::to_vec(&self.report(line)).unwrap_or_default();
        let proof = Proof::encode(&nonces, &report, key);
        let sent = channel.send_raw(&proof);
        sent.map_err(|_| Called::Answered)?;
        Ok(stream)
    }

    fn report(&self, line: Line) -> Report {
        // The verdict comes on the line for messages, so the outcome goes there.
        let outcome = match line {
            Line::Messages => self.outcome.clone(),
            Line::Mirror => Ok(()),
        };
        // JSON within JSON is longer.
        let outcome = outcome.map_err(|error| json::fitted(error, super::MAX_REPORT / 4));
        Report {
            line,
            hello: self.hello.clone(),
            ranks: self.identity.neighbours().collect(),
            outcome: String::from_utf8_lossy(&json::of_outcome(&outcome)).into_owned(),
        }
    }

    /// The error that rank 0 has not come.
    fn missing(&self) -> Error {
        Error::RanksMissing {
            ranks: vec![0],
            address: self.meeting.place.to_string(),
            waited_ms: self.begin.elapsed().as_millis() as u64,
        }
    }

    /// The error that the name of rank 0's host has no address.
    fn nameless(&self, error: io::Error) -> Error {
        let name = match &self.meeting.place {
            Place::Named(name, _) => name.as_str(),
            Place::Listening(_) | Place::At(_) => "rank 0's host",
        };
        let action = format!("find the address of {name:?}, which MASTER_ADDR names");
        Error::system(self.identity.rank, action)(error)
    }
}

fn channel(
    stream: &Connection,
    deadline: Instant,
) -> Channel<'_, impl Fn() -> Result<(), Infallible> + use<>> {
    Channel {
        stream,
        deadline,
        check: || Ok(()),
    }
}
