//! A leader reaches rank 0: it tries all addresses at which rank 0 may listen, at the same time, until a process there
//! proves that it has the key.
//!
//! Each address is tried again and again. A try may take two seconds, and twice as long after each that was not answered,
//! so that hosts far apart meet, and a host that comes late is found. No try lasts longer than the deadline.

use std::io::{self, Read};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::net::{SendFlags, send, sockopt};

use super::handshake::{Greeting, Key, Nonce, Nonces, nonce};
use super::lookup::Lookup;
use crate::ranks::poll::poll;
use crate::ranks::search::RETRY;
use crate::ranks::tcp;
use crate::ranks::wire::Connection;
use crate::resources;

/// How long the first try at an address may take, and the longest.
const FIRST_TRY: Duration = Duration::from_secs(2);
const LONGEST_TRY: Duration = Duration::from_secs(16);
/// The pause after a failed try.
const PAUSE: Duration = RETRY.saturating_mul(4);
/// How long a leader waits at most before it looks at its name's addresses again.
const TURN: Duration = Duration::from_millis(20);
/// How long a leader tries again if it is turned away, or if a name has no address. A job may be just beginning, or an
/// earlier one just ending.
pub const PATIENCE: Duration = Duration::from_secs(5);

/// How long a try may take after `unanswered` tries, if so much time is `left`.
fn time_for_try(unanswered: u32, left: Duration) -> Duration {
    let doubled = FIRST_TRY.saturating_mul(1 << unanswered.min(8));
    doubled.min(LONGEST_TRY).min(left)
}

/// A process that has proved that it has the key.
pub struct Answered {
    pub stream: Connection,
    pub nonces: Nonces,
    pub address: SocketAddr,
}

/// How the tries ended.
pub enum Reached {
    Answered(Answered),
    /// The process at this address does not have the key.
    Refused(SocketAddr),
    /// Rank 0's name has no address.
    Nameless,
    /// The deadline has passed.
    Late,
    /// The caller said so.
    Stopped,
}

/// The tries at all addresses.
pub struct Reach<'a> {
    key: &'a Key,
    version: u32,
    rank: usize,
    tries: Vec<Try>,
}

/// The tries at one address.
struct Try {
    address: SocketAddr,
    /// How many of the latest were not answered.
    unanswered: u32,
    /// Since when they are turned away.
    turned_away: Option<Instant>,
    /// How the latest failed.
    failure: Option<String>,
    state: TryState,
}

enum TryState {
    Resting {
        until: Instant,
    },
    Connecting {
        stream: Connection,
        limit: Instant,
    },
    Greeted {
        stream: Connection,
        nonce: Nonce,
        answer: Vec<u8>,
        limit: Instant,
    },
}

/// Why a try failed.
enum TryFailure {
    System(io::Error),
    Unanswered(&'static str),
    TurnedAway(&'static str),
}

impl<'a> Reach<'a> {
    pub fn new(key: &'a Key, version: u32, rank: usize) -> Reach<'a> {
        Reach {
            key,
            version,
            rank,
            tries: Vec::new(),
        }
    }

    /// Tries until `until`, or until `stop`.
    pub fn reach(
        &mut self,
        lookup: &mut Lookup,
        until: Instant,
        mut stop: impl FnMut(&Reach) -> bool,
    ) -> Reached {
        loop {
            self.follow(lookup.addresses());
            let now = Instant::now();
            let mut answered = None;
            for place in 0..self.tries.len() {
                answered = answered.or_else(|| self.advance(place, now, until));
            }
            if let Some(answered) = answered {
                self.rest();
                return Reached::Answered(answered);
            }
            let is_over = |since: Instant| now - since >= PATIENCE;
            let mut refused = self.tries.iter();
            let refused = refused.find(|one| one.turned_away.is_some_and(is_over));
            if let Some(refused) = refused {
                return Reached::Refused(refused.address);
            }
            if lookup.nameless_since().is_some_and(is_over) {
                return Reached::Nameless;
            }
            if stop(self) {
                return Reached::Stopped;
            }
            if now >= until {
                return Reached::Late;
            }
            self.pause();
        }
    }

    /// How the latest try at each address failed.
    pub fn failures(&self) -> Option<String> {
        let words = self.tries.iter().filter_map(|one| {
            let failure = one.failure.as_ref()?;
            Some(format!("{}: {failure}", one.address))
        });
        let words: Vec<String> = words.collect();
        (!words.is_empty()).then(|| words.join("; "))
    }

    /// How the latest try at `address` failed.
    pub fn failure_at(&self, address: SocketAddr) -> Option<&str> {
        let mut tries = self.tries.iter();
        tries.find(|one| one.address == address)?.failure.as_deref()
    }

    /// Notes why the process at `address`, which had answered, has given no verdict.
    pub fn was_left(&mut self, address: SocketAddr, reason: String) {
        let mut tries = self.tries.iter_mut();
        if let Some(one) = tries.find(|one| one.address == address) {
            one.failure = Some(reason);
        }
    }

    /// Tries `addresses`, and no others.
    fn follow(&mut self, addresses: &[SocketAddr]) {
        self.tries.retain(|one| addresses.contains(&one.address));
        for &address in addresses {
            if self.tries.iter().all(|one| one.address != address) {
                self.tries.push(Try {
                    address,
                    unanswered: 0,
                    turned_away: None,
                    failure: None,
                    state: TryState::resting(),
                });
            }
        }
    }

    /// Ends all tries. The next begin after a pause.
    fn rest(&mut self) {
        for one in &mut self.tries {
            (one.turned_away, one.state) = (None, TryState::resting_for(PAUSE));
        }
    }

    /// Waits until something happens, or for a turn.
    fn pause(&self) {
        let events = self.tries.iter().filter_map(|one| match &one.state {
            TryState::Resting { .. } => None,
            TryState::Connecting { stream, .. } => Some(PollFd::new(&**stream, PollFlags::OUT)),
            TryState::Greeted { stream, .. } => Some(PollFd::new(&**stream, PollFlags::IN)),
        });
        // If the system can't wait, the next turn comes at once.
        let _ = poll(&mut events.collect::<Vec<_>>(), TURN);
    }

    /// Takes the try at a place one step further, without waiting.
    fn advance(&mut self, place: usize, now: Instant, until: Instant) -> Option<Answered> {
        let (key, version, rank) = (self.key, self.version, self.rank);
        let one = &mut self.tries[place];
        let next = match std::mem::replace(&mut one.state, TryState::resting()) {
            TryState::Resting { until } if now < until => Ok(TryState::Resting { until }),
            TryState::Resting { .. } => one.begin(now, until),
            TryState::Connecting { stream, limit } => match is_connected(&stream) {
                Ok(true) => greet(stream, limit, key, version, rank),
                Ok(false) if now < limit => Ok(TryState::Connecting { stream, limit }),
                Ok(false) => Err(TryFailure::Unanswered("no answer to a connection")),
                Err(error) => Err(TryFailure::System(error)),
            },
            TryState::Greeted {
                stream,
                nonce,
                mut answer,
                limit,
            } => match hear(&stream, nonce, &mut answer, key) {
                Ok(Some(nonces)) => {
                    let address = one.address;
                    return Some(Answered {
                        stream,
                        nonces,
                        address,
                    });
                }
                Ok(None) if now < limit => Ok(TryState::Greeted {
                    stream,
                    nonce,
                    answer,
                    limit,
                }),
                Ok(None) => Err(TryFailure::Unanswered("the process there does not answer")),
                Err(failure) => Err(failure),
            },
        };
        one.state = next.unwrap_or_else(|failure| one.fail(failure, now));
        None
    }
}

impl TryState {
    fn resting() -> TryState {
        TryState::resting_for(Duration::ZERO)
    }

    fn resting_for(pause: Duration) -> TryState {
        let until = Instant::now() + pause;
        TryState::Resting { until }
    }
}

impl Try {
    fn begin(&self, now: Instant, until: Instant) -> Result<TryState, TryFailure> {
        let time = time_for_try(self.unanswered, until.saturating_duration_since(now));
        let stream = tcp::begin_to_connect(self.address).map_err(TryFailure::System)?;
        let limit = now + time;
        Ok(TryState::Connecting { stream, limit })
    }

    /// Notes a failure. The next try begins after a pause.
    fn fail(&mut self, failure: TryFailure, now: Instant) -> TryState {
        let (turned_away, unanswered) = (self.turned_away, self.unanswered);
        (self.turned_away, self.unanswered) = (None, 0);
        self.failure = Some(match failure {
            TryFailure::System(error) => resources::explain(&error),
            TryFailure::Unanswered(words) => {
                self.unanswered = unanswered + 1;
                words.into()
            }
            TryFailure::TurnedAway(words) => {
                self.turned_away = turned_away.or(Some(now));
                words.into()
            }
        });
        let until = now + PAUSE;
        TryState::Resting { until }
    }
}

/// True if `stream` is connected; an error if that has failed.
fn is_connected(stream: &Connection) -> io::Result<bool> {
    let mut events = [PollFd::new(&**stream, PollFlags::OUT)];
    poll(&mut events, Duration::ZERO)?;
    if events[0].revents().is_empty() {
        return Ok(false);
    }
    sockopt::socket_error(&**stream)??;
    Ok(true)
}

/// Greets the process at the other end.
fn greet(
    stream: Connection,
    limit: Instant,
    key: &Key,
    version: u32,
    rank: usize,
) -> Result<TryState, TryFailure> {
    let nonce = nonce().map_err(TryFailure::System)?;
    let rank = rank as u32;
    let greeting = Greeting {
        version,
        rank,
        nonce,
    };
    let greeting = greeting.encode(key);
    // A new connection has room for so few bytes.
    match send(&*stream, &greeting, SendFlags::NOSIGNAL) {
        Ok(sent) if sent == greeting.len() => Ok(TryState::Greeted {
            stream,
            nonce,
            answer: Vec::new(),
            limit,
        }),
        _ => Err(TryFailure::TurnedAway(TURNED_AWAY)),
    }
}

const TURNED_AWAY: &str = "the process there ended the connection";

/// Reads what has come of the answer to a greeting with `nonce`. The numbers of both ends, once all has come.
fn hear(
    stream: &Connection,
    nonce: Nonce,
    answer: &mut Vec<u8>,
    key: &Key,
) -> Result<Option<Nonces>, TryFailure> {
    let mut bytes = [0; Nonces::ANSWER_BYTES];
    while answer.len() < Nonces::ANSWER_BYTES {
        let room = Nonces::ANSWER_BYTES - answer.len();
        match (&**stream).read(&mut bytes[..room]) {
            Ok(0) => return Err(TryFailure::TurnedAway(TURNED_AWAY)),
            Ok(count) => answer.extend(&bytes[..count]),
            Err(error) => match error.kind() {
                io::ErrorKind::Interrupted => {}
                io::ErrorKind::WouldBlock => return Ok(None),
                _ => return Err(TryFailure::TurnedAway(TURNED_AWAY)),
            },
        }
    }
    let whole = answer.first_chunk();
    let nonces = whole.and_then(|answer| Nonces::of_answer(nonce, answer, key));
    nonces.map(Some).ok_or(TryFailure::TurnedAway(
        "the process there does not have this rank's key",
    ))
}

/// Reads `bytes` as the answer to a greeting.
#[cfg(fuzzing)]
pub fn fuzz_answer(bytes: &[u8], key: &Key) {
    let Ok((other, stream)) = crate::ranks::wire::pair() else {
        return;
    };
    let _ = std::io::Write::write(&mut &*other, bytes);
    drop(other);
    let _ = hear(&stream, [7; 32], &mut Vec::new(), key);
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::sync::{Mutex, PoisonError};

    use super::super::MeetingPlace;
    use super::*;

    const LONG: Duration = Duration::from_secs(600);

    #[test]
    fn a_try_may_take_twice_as_long_after_each_that_was_not_answered() {
        let times = |left| [0, 1, 2, 3, 4, 1000].map(|unanswered| time_for_try(unanswered, left));
        let seconds = [2, 4, 8, 16, 16, 16].map(Duration::from_secs);
        assert_eq!(times(LONG), seconds);
        let left = Duration::from_millis(700);
        assert_eq!(times(left), [left; 6]);
        assert_eq!(times(Duration::ZERO), [Duration::ZERO; 6]);
    }

    #[test]
    fn addresses_at_which_no_process_answers_share_the_deadline() {
        let key = Key::of("secret", "job");
        // Their queues take connections, which no one accepts.
        let silent = [(); 8].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
        let addresses = silent.each_ref().map(|one| one.local_addr().unwrap());
        let mut lookup = Lookup::of(&MeetingPlace::At(addresses.to_vec()), no_names).unwrap();
        let mut reach = Reach::new(&key, 1, 2);
        let begin = Instant::now();
        let mut most = 0;
        let deadline = begin + Duration::from_millis(700);
        let reached = reach.reach(&mut lookup, deadline, |reach| {
            let is_greeted = |one: &&Try| matches!(one.state, TryState::Greeted { .. });
            most = most.max(reach.tries.iter().filter(is_greeted).count());
            false
        });
        assert!(matches!(reached, Reached::Late));
        assert_eq!(most, 8, "they are tried at the same time");
        let failures = reach.failures().unwrap();
        for address in addresses {
            let words = format!("{address}: the process there does not answer");
            assert!(failures.contains(&words), "{failures}");
        }
        // Each would take two seconds.
        assert!(begin.elapsed() < Duration::from_secs(10));
    }

    #[test]
    fn an_address_at_which_no_process_listens_is_told_with_the_systems_words() {
        let key = Key::of("secret", "job");
        let free = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = free.local_addr().unwrap();
        drop(free);
        let mut lookup = Lookup::of(&MeetingPlace::At(vec![address]), no_names).unwrap();
        let mut reach = Reach::new(&key, 1, 2);
        let deadline = Instant::now() + Duration::from_millis(100);
        let reached = reach.reach(&mut lookup, deadline, |_| false);
        assert!(matches!(reached, Reached::Late));
        let failures = reach.failures().unwrap();
        let words = format!("{address}: Connection refused");
        assert!(failures.starts_with(&words), "{failures}");
    }

    fn no_names(_: &str, _: u16) -> io::Result<Vec<SocketAddr>> {
        Err(io::ErrorKind::NotFound.into())
    }

    #[test]
    fn a_name_service_that_does_not_answer_takes_no_longer_than_the_deadline() {
        static SILENCE: Mutex<()> = Mutex::new(());
        // The look-up ends with the test.
        let silence = SILENCE.lock().unwrap();
        let resolve = |_: &str, _| {
            let _heard = SILENCE.lock().unwrap_or_else(PoisonError::into_inner);
            Ok(Vec::new())
        };
        let key = Key::of("secret", "job");
        let place = MeetingPlace::Named("node1".into(), 7000);
        let mut lookup = Lookup::of(&place, resolve).unwrap();
        let mut reach = Reach::new(&key, 1, 2);
        let deadline = Instant::now() + Duration::from_millis(200);
        let reached = reach.reach(&mut lookup, deadline, |_| false);
        assert!(matches!(reached, Reached::Late));
        let failure = lookup.failure().unwrap().to_string();
        assert_eq!(failure, "the name service has not answered");
        drop(silence);
    }

    #[test]
    fn an_address_as_a_name_needs_no_name_service() {
        for (name, shown) in [("fd00::1", "[fd00::1]:7"), ("10.0.0.1", "10.0.0.1:7")] {
            let place = MeetingPlace::Named(name.into(), 7);
            let mut lookup = Lookup::of(&place, no_names).unwrap();
            assert_eq!(lookup.addresses(), [shown.parse().unwrap()]);
            assert!(lookup.failure().is_none());
        }
    }
}
