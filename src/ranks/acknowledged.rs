//! What another system acknowledges on a TCP connection.
#![allow(unsafe_code)]

use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// The most of the time between two looks that counts as watched.
///
/// A thread that has not run for longer, or a machine that stood still, has not received what was acknowledged meanwhile.
const MOST_OF_A_LOOK: Duration = Duration::from_millis(250);

/// How long another system has acknowledged nothing of what it was sent.
///
/// It acknowledges what comes also while its process is stopped. If it has no room left, nothing is on its way. Then this
/// system probes it now and then, and it answers.
///
/// What the other system sends says nothing: it may come although nothing of this system's goes there.
#[derive(Debug)]
pub struct Acknowledged {
    /// The bytes that were acknowledged when that was last seen to change.
    bytes: u64,
    /// Since when something is to be acknowledged and nothing was. None if nothing is.
    since: Option<Instant>,
    /// How much of that time was watched.
    watched: Duration,
    looked: Instant,
}

impl Acknowledged {
    pub fn new() -> Acknowledged {
        Acknowledged {
            bytes: 0,
            since: None,
            watched: Duration::ZERO,
            looked: Instant::now(),
        }
    }

    /// Looks at `stream`, on every look at the same one.
    pub fn look(&mut self, stream: &UnixStream) {
        let Some(told) = TcpState::of(stream) else {
            return;
        };
        let has_changed = told.bytes_acknowledged != self.bytes;
        self.bytes = told.bytes_acknowledged;
        self.note(told.awaits(), has_changed, Instant::now());
    }

    /// Notes a look at `now`: whether something is to be acknowledged, and whether something was since the last look.
    fn note(&mut self, awaits: bool, has_changed: bool, now: Instant) {
        let between = now.duration_since(self.looked).min(MOST_OF_A_LOOK);
        self.looked = now;
        let goes_on = self.since.filter(|_| awaits && !has_changed);
        self.watched = goes_on.map_or(Duration::ZERO, |_| self.watched + between);
        self.since = goes_on.or(awaits.then_some(now));
    }

    /// How long that is, by the clock.
    pub fn silence(&self) -> Duration {
        self.since.map_or(Duration::ZERO, |since| since.elapsed())
    }

    /// How much of it was watched, until the last look.
    pub fn watched_silence(&self) -> Duration {
        self.watched
    }
}

/// What the system reports of a connection that is open.
#[derive(Debug, Default)]
struct TcpState {
    /// Probes without an answer.
    probes: u8,
    /// Packets on their way.
    unacknowledged: u32,
    bytes_acknowledged: u64,
    /// Bytes that have not been sent.
    unsent: u32,
    /// The bytes for which the other end has room. 0 on systems before Linux 5.4.
    window: u32,
}

impl TcpState {
    /// None if the connection has ended, of which the system knows no more.
    fn of(stream: &UnixStream) -> Option<TcpState> {
        // Of `struct tcp_info`, in words: four bytes, of which the first is the state and the last counts probes; and so
        // on.
        const STATE: usize = 0;
        const UNACKED: usize = 6;
        const BYTES_ACKED: usize = 30;
        const NOTSENT_BYTES: usize = 36;
        const SND_WND: usize = 57;
        const ESTABLISHED: u8 = 1;
        const CLOSE_WAIT: u8 = 8;
        let mut words = [0_u32; SND_WND + 1];
        let mut bytes = size_of_val(&words) as libc::socklen_t;
        // SAFETY: the system writes at most the number of bytes that it is told, which is the local's size. All bytes
        // are valid for it.
        let result = unsafe {
            libc::getsockopt(
                stream.as_raw_fd(),
                libc::IPPROTO_TCP,
                libc::TCP_INFO,
                words.as_mut_ptr().cast(),
                &mut bytes,
            )
        };
        let [state, _, _, probes] = words[STATE].to_ne_bytes();
        let is_open = result == 0 && matches!(state, ESTABLISHED | CLOSE_WAIT);
        let pair = [words[BYTES_ACKED], words[BYTES_ACKED + 1]].map(u32::to_ne_bytes);
        let pair = pair.concat().try_into().unwrap_or_default();
        is_open.then_some(TcpState {
            probes,
            unacknowledged: words[UNACKED],
            bytes_acknowledged: u64::from_ne_bytes(pair),
            unsent: words[NOTSENT_BYTES],
            window: words[SND_WND],
        })
    }

    /// True if the other system should acknowledge something.
    fn awaits(&self) -> bool {
        // The answer to one probe may be on its way. If this system's own device is down, there are only probes. If its
        // rules let nothing out, there is only what has not been sent, though the other end has room for it.
        let is_kept_here = self.unsent > 0 && self.unsent <= self.window;
        self.unacknowledged > 0 || self.probes > 1 || is_kept_here
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use std::io::{ErrorKind, Read, Write};

    use super::*;
    use crate::ranks::tcp;

    const LONG: Duration = Duration::from_millis(1200);

    /// Looks for two seconds, and returns the longest silence.
    fn longest_silence(stream: &UnixStream) -> Duration {
        let mut acknowledged = Acknowledged::new();
        let looks = (0..200).map(|_| {
            std::thread::sleep(Duration::from_millis(10));
            acknowledged.look(stream);
            acknowledged.silence()
        });
        looks.max().unwrap_or_default()
    }

    #[test]
    fn an_end_that_reads_nothing_acknowledges_as_long_as_it_has_room_and_answers_afterwards() {
        let (one, other) = tcp::pair().unwrap();
        assert!(longest_silence(&one) < LONG);
        let refused = loop {
            if let Err(error) = (&*one).write(&[0; 4096]) {
                break error;
            }
        };
        assert_eq!(refused.kind(), ErrorKind::WouldBlock);
        assert!(longest_silence(&one) < LONG, "it has no room left");
        while (&*other).read(&mut [0; 4096]).is_ok_and(|count| count > 0) {}
        assert!(longest_silence(&one) < LONG);
    }

    #[test]
    fn a_thread_that_seldom_runs_counts_a_part_of_each_gap() {
        let mut acknowledged = Acknowledged::new();
        let begin = acknowledged.looked;
        let mut look = |seconds, awaits, has_changed| {
            acknowledged.note(awaits, has_changed, begin + Duration::from_secs(seconds));
            acknowledged.watched_silence()
        };
        assert_eq!(look(10, true, false), Duration::ZERO);
        // One gap says nothing, however long it is.
        assert_eq!(look(3600, true, false), MOST_OF_A_LOOK);
        assert_eq!(look(3610, true, false), 2 * MOST_OF_A_LOOK);
        assert_eq!(look(3620, true, true), Duration::ZERO);
        assert_eq!(look(3630, true, false), MOST_OF_A_LOOK);
        assert_eq!(look(3640, false, false), Duration::ZERO);
    }

    #[test]
    fn only_what_is_awaited_without_a_change_is_silence() {
        let mut state = TcpState::default();
        assert!(!state.awaits());
        state.probes = 1;
        assert!(!state.awaits(), "its answer may be on its way");
        (state.probes, state.unsent, state.window) = (0, 10, 9);
        assert!(!state.awaits(), "there is no room for it");
        state.window = 10;
        assert!(state.awaits());
        let waits = [
            TcpState {
                probes: 2,
                ..TcpState::default()
            },
            TcpState {
                unacknowledged: 1,
                ..TcpState::default()
            },
        ];
        assert!(waits.iter().all(TcpState::awaits));
    }
}
