//! Lines on standard error for whoever watches a job that does not begin.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use super::poll;

/// A rank that has waited this long says for whom.
pub const LONG: Duration = Duration::from_secs(10);

/// The longest line: a pipe takes it in one piece.
const LINE: usize = 4096;

/// Writes a line in one piece. If it can't be written at once, it is lost, so that no reader can stop the rendezvous.
pub fn say(words: impl fmt::Display) {
    // The lock of Rust's standard error may be held by a thread that waits for a reader.
    write(io::stderr().as_fd(), &format!("gemmesh: {words}\n"));
}

fn write(to: BorrowedFd, line: &str) {
    if line.len() <= LINE && poll::takes_bytes(to) {
        let _ = rustix::io::write(to, line.as_bytes());
    }
}

/// A wait that is told of once.
pub struct LongWait {
    begin: Instant,
    is_told: bool,
}

impl LongWait {
    pub fn since(begin: Instant) -> LongWait {
        let is_told = false;
        LongWait { begin, is_told }
    }

    /// True once, when the wait has become long.
    pub fn is_to_be_told(&mut self, now: Instant) -> bool {
        let is_long = now.saturating_duration_since(self.begin) >= LONG;
        is_long && !std::mem::replace(&mut self.is_told, true)
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use std::io::Read;
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn a_long_wait_is_told_of_once() {
        let begin = Instant::now();
        let mut wait = LongWait::since(begin);
        let after = |ms| begin + Duration::from_millis(ms);
        let told = [0, 9_999, 10_000, 10_001, 60_000].map(|ms| wait.is_to_be_told(after(ms)));
        assert_eq!(told, [false, false, true, false, false]);
    }

    #[test]
    fn a_line_that_cannot_be_written_at_once_is_lost() {
        let (mut read, full) = io::pipe().unwrap();
        write(full.as_fd(), "a line\n");
        let mut line = [0; 7];
        read.read_exact(&mut line).unwrap();
        assert_eq!(&line, b"a line\n");

        rustix::io::ioctl_fionbio(&full, true).unwrap();
        while rustix::io::write(&full, &[0; LINE]).is_ok() {}
        rustix::io::ioctl_fionbio(&full, false).unwrap();
        let (done, is_done) = mpsc::channel();
        let writer = std::thread::spawn(move || {
            write(full.as_fd(), "lost\n");
            done.send(()).unwrap();
        });
        let in_time = is_done.recv_timeout(Duration::from_secs(60));
        let mut bytes = Vec::new();
        // This also lets a writer go on that waits.
        read.read_to_end(&mut bytes).unwrap();
        writer.join().unwrap();
        assert_eq!(in_time, Ok(()), "it waits for a reader");
        assert!(bytes.iter().all(|&byte| byte == 0));
    }

    #[test]
    fn an_output_whose_reader_has_gone_takes_no_line() {
        let (read, write_end) = io::pipe().unwrap();
        assert!(poll::takes_bytes(write_end.as_fd()));
        drop(read);
        assert!(!poll::takes_bytes(write_end.as_fd()));
    }
}
