//! What another system acknowledges on a TCP connection.
#![allow(unsafe_code)]

use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use super::silence::Silence;

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
    /// True if something was to be acknowledged at the last look.
    awaits: bool,
    silence: Silence,
}

impl Acknowledged {
    pub fn new() -> Acknowledged {
        Acknowledged {
            bytes: 0,
            awaits: false,
            silence: Silence::new(),
        }
    }

    /// Another system that has been silent for a time.
    #[cfg(test)]
    pub fn nothing_for(silence: Silence) -> Acknowledged {
        Acknowledged {
            silence,
            ..Acknowledged::new()
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
        self.silence
            .look(self.awaits && awaits && !has_changed, now);
        self.awaits = awaits;
    }

    /// How long that is, as far as it was watched.
    pub fn silence(&self) -> Duration {
        self.silence.watched()
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
    fn silence_begins_at_a_look_that_awaits_something_and_ends_when_anything_is_acknowledged() {
        const WATCHED: Duration = Duration::from_millis(100);
        let mut acknowledged = Acknowledged::new();
        let begin = Instant::now() + WATCHED;
        let mut look = |number, awaits, has_changed| {
            acknowledged.note(awaits, has_changed, begin + number * WATCHED);
            acknowledged.silence()
        };
        assert_eq!(look(0, true, false), Duration::ZERO);
        assert_eq!(look(1, true, false), WATCHED);
        assert_eq!(look(2, true, false), 2 * WATCHED);
        assert_eq!(look(3, true, true), Duration::ZERO);
        assert_eq!(look(4, true, false), WATCHED);
        assert_eq!(look(5, false, false), Duration::ZERO);
        assert_eq!(look(6, true, false), Duration::ZERO);
    }

    #[test]
    fn time_in_which_no_one_looked_is_no_silence() {
        let hours_ago = Instant::now().checked_sub(Duration::from_secs(7200));
        let Some(begin) = hours_ago else {
            return;
        };
        let mut acknowledged = Acknowledged::new();
        acknowledged.note(true, false, begin);
        acknowledged.note(true, false, begin + Duration::from_millis(40));
        assert_eq!(acknowledged.silence(), Duration::from_millis(40));
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
