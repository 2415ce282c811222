//! The meeting of the leaders of several hosts, at rank 0 by TCP.
//!
//! The ranks of a host meet their leader as those of one host meet rank 0. When they have all come, or when they can't
//! become a group, the leader reports that to rank 0, and passes rank 0's verdict on. A leader has two connections to
//! rank 0, one for messages and one for the mirror. [`seat`](crate::protocol::seat) says how rank 0 tells them apart.
//!
//! All ranks of a job have a key. `handshake` says how the two ends of a connection prove that they have it. A process
//! without the key learns nothing. It gets a place among a bounded number of strangers for five seconds, and no one waits
//! for it.

mod dial;
mod handshake;
mod lobby;
mod lookup;
mod reach;

#[cfg(fuzzing)]
pub mod fuzzing {
    pub use super::handshake::{Greeting, Nonces, Proof};
    pub use super::reach::fuzz_answer as read_answer;
}

use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpListener};

use serde::{Deserialize, Serialize};

pub use self::dial::{Limits, report};
pub use self::handshake::Key;
#[cfg(test)]
pub use self::handshake::{Greeting, Nonces, Proof};
pub use self::lobby::{ANOTHER_KEY, Lobby, Visitor};
use super::rendezvous::Hello;
use super::tcp;
use crate::protocol::seat::{Line, Visit};

/// The longest report: an error, with its words.
pub const MAX_REPORT: usize = 64 << 10;

/// Where the leaders meet.
#[derive(Debug)]
pub struct Meeting {
    pub key: Key,
    pub place: MeetingPlace,
}

#[derive(Debug)]
pub enum MeetingPlace {
    /// This process is rank 0, and listens.
    Listening(TcpListener),
    /// Rank 0 listens at this port, of this name's addresses.
    Named(String, u16),
    /// Rank 0 listens at one of these addresses.
    At(Vec<SocketAddr>),
}

impl Meeting {
    /// What rank 0 listens with.
    pub fn listener(&self) -> io::Result<TcpListener> {
        match &self.place {
            MeetingPlace::Listening(listener) => listener.try_clone(),
            MeetingPlace::Named(_, port) => tcp::listen(*port),
            MeetingPlace::At(addresses) => {
                tcp::listen(addresses.first().map_or(0, SocketAddr::port))
            }
        }
    }
}

impl fmt::Display for MeetingPlace {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            MeetingPlace::Listening(_) => f.write_str("this process"),
            MeetingPlace::Named(name, port) if name.contains(':') => write!(f, "[{name}]:{port}"),
            MeetingPlace::Named(name, port) => write!(f, "{name}:{port}"),
            MeetingPlace::At(addresses) => {
                let words: Vec<String> = addresses.iter().map(SocketAddr::to_string).collect();
                f.write_str(&words.join(" or "))
            }
        }
    }
}

/// What a leader says when it has proved that it has the key.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct VisitReport {
    pub visit: Visit,
    pub line: Line,
    pub hello: Hello,
    /// The ranks of its host.
    pub ranks: Vec<usize>,
    /// Whether they have come: a result as JSON. If they have not, there is no connection for the mirror.
    pub outcome: String,
}
