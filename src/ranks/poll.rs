//! Waiting for descriptors.

use std::io;
use std::os::fd::BorrowedFd;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};

/// What is true of an output whose reader has gone. A write would raise SIGPIPE, which ends a program that does not ignore
/// it.
pub const GONE: PollFlags = PollFlags::ERR.union(PollFlags::HUP).union(PollFlags::NVAL);

/// Waits until something happens on one of `fds`, or `timeout` has passed.
pub fn poll(fds: &mut [PollFd], timeout: Duration) -> io::Result<()> {
    let timeout = Timespec {
        tv_sec: timeout.as_secs() as i64,
        tv_nsec: timeout.subsec_nanos().into(),
    };
    match rustix::event::poll(fds, Some(&timeout)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

/// True if `output` takes bytes at once. A pipe then takes 4096.
pub fn takes_bytes(output: BorrowedFd) -> bool {
    let mut events = [PollFd::from_borrowed_fd(output, PollFlags::OUT)];
    let polled = poll(&mut events, Duration::ZERO);
    let happened = events[0].revents();
    polled.is_ok() && happened.contains(PollFlags::OUT) && !happened.intersects(GONE)
}
