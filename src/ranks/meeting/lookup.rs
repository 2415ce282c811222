//! The addresses at which rank 0 may listen.
//!
//! A name is looked up in a thread of its own, because the system's call waits as long as its configuration says for a
//! name service that does not answer. That thread is left when the meeting is over, and ends with its call.

use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use super::MeetingPlace;

/// The time between two look-ups of a name that has no address, and of one that has: its address may change.
const AGAIN: Duration = Duration::from_millis(500);
const REFRESH: Duration = Duration::from_secs(5);

/// A function that finds a name's addresses, with this port.
pub type Resolve = fn(&str, u16) -> io::Result<Vec<SocketAddr>>;

/// Asks the system.
pub fn resolve(name: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
    Ok((name, port).to_socket_addrs()?.collect())
}

/// What is known of rank 0's addresses.
pub struct Lookup {
    addresses: Vec<SocketAddr>,
    /// Why the name has no address, and since when that is known.
    failure: Option<(Instant, io::Error)>,
    thread: Option<LookupThread>,
}

struct LookupThread {
    answers: Receiver<io::Result<Vec<SocketAddr>>>,
    /// The thread ends when this is dropped.
    _running: Sender<()>,
}

impl Lookup {
    /// # Errors
    /// If a thread can't be started.
    pub fn of(place: &MeetingPlace, resolve: Resolve) -> io::Result<Lookup> {
        let fixed = |addresses| Lookup {
            addresses,
            failure: None,
            thread: None,
        };
        Ok(match place {
            MeetingPlace::Listening(listener) => fixed(vec![listener.local_addr()?]),
            MeetingPlace::At(addresses) => fixed(addresses.clone()),
            MeetingPlace::Named(name, port) => match name.parse::<IpAddr>() {
                Ok(address) => fixed(vec![(address, *port).into()]),
                Err(_) => Lookup {
                    thread: Some(LookupThread::spawn(name.clone(), *port, resolve)?),
                    ..fixed(Vec::new())
                },
            },
        })
    }

    /// The latest addresses, without waiting. A name that had one keeps it if its next look-up fails.
    pub fn addresses(&mut self) -> &[SocketAddr] {
        let thread = self.thread.as_ref();
        for answer in thread.iter().flat_map(|thread| thread.answers.try_iter()) {
            match answer {
                Ok(addresses) => (self.addresses, self.failure) = (addresses, None),
                Err(error) if self.addresses.is_empty() => {
                    let since = self.failure.take().map(|(since, _)| since);
                    self.failure = Some((since.unwrap_or_else(Instant::now), error));
                }
                Err(_) => {}
            }
        }
        &self.addresses
    }

    /// Since when it is known that the name has no address.
    pub fn nameless_since(&self) -> Option<Instant> {
        self.failure.as_ref().map(|(since, _)| *since)
    }

    /// Why the name has no address, if it has none.
    pub fn failure(self) -> Option<io::Error> {
        if self.thread.is_none() || !self.addresses.is_empty() {
            return None;
        }
        let unanswered =
            || io::Error::new(io::ErrorKind::TimedOut, "the name service has not answered");
        Some(self.failure.map_or_else(unanswered, |(_, error)| error))
    }
}

impl LookupThread {
    fn spawn(name: String, port: u16, resolve: Resolve) -> io::Result<LookupThread> {
        let (send, answers) = channel();
        let (running, stopped) = channel::<()>();
        let look = move || {
            loop {
                let answer = resolve(&name, port);
                let pause = if answer.is_ok() { REFRESH } else { AGAIN };
                if send.send(answer).is_err()
                    || stopped.recv_timeout(pause) != Err(RecvTimeoutError::Timeout)
                {
                    return;
                }
            }
        };
        std::thread::Builder::new()
            .name("gemmesh-lookup".into())
            .spawn(look)?;
        Ok(LookupThread {
            answers,
            _running: running,
        })
    }
}
