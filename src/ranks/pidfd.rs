//! Notices the end of the process at the other end of a connection. The connection does not tell, because a forked
//! child may hold it open.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, getpid, pidfd_open};

use super::{peer, poll};

/// What is known of a peer.
#[derive(Debug)]
pub enum PeerProcess {
    /// A descriptor that is readable when the process has ended.
    Process(OwnedFd),
    Ended,
    /// The system does not tell, so only the connection does.
    Unknown,
}

/// The process that has made the connection, or that listens at its other end.
///
/// # Errors
/// If this process has no descriptors left.
pub fn of_peer(stream: &UnixStream) -> io::Result<PeerProcess> {
    match peer::pidfd(stream) {
        Ok(fd) => Ok(PeerProcess::Process(fd)),
        // Its number is free again.
        Err(Errno::SRCH | Errno::INVAL) => Ok(PeerProcess::Ended),
        Err(error @ (Errno::MFILE | Errno::NFILE | Errno::NOMEM)) => Err(error.into()),
        // Linux before 6.5.
        Err(_) => by_number(stream),
    }
}

/// As [`of_peer`], on kernels that give no descriptor for a connection.
///
/// The process may have ended, and its number may belong to a different process by now. Then that process is watched,
/// and only the connection tells.
fn by_number(stream: &UnixStream) -> io::Result<PeerProcess> {
    let number = peer::Peer::of(stream).ok().and_then(|peer| peer.pid);
    // A process in a different PID namespace has no number here.
    let Some(pid) = number.and_then(|number| Pid::from_raw(number as i32)) else {
        return Ok(PeerProcess::Unknown);
    };
    match pidfd_open(pid, PidfdFlags::empty()) {
        Ok(fd) => Ok(PeerProcess::Process(fd)),
        Err(Errno::SRCH) => Ok(PeerProcess::Ended),
        Err(error @ (Errno::MFILE | Errno::NFILE | Errno::NOMEM)) => Err(error.into()),
        Err(_) => Ok(PeerProcess::Unknown),
    }
}

/// A descriptor of this process for other processes, which may be in other PID namespaces. It is readable when the
/// process has ended. If the system has no such descriptors, it is one that is never readable.
///
/// # Errors
/// If this process has no descriptors left.
pub fn of_this_process() -> io::Result<OwnedFd> {
    let fd = match pidfd_open(getpid(), PidfdFlags::empty()) {
        Err(error @ (Errno::MFILE | Errno::NFILE | Errno::NOMEM)) => return Err(error.into()),
        Err(_) => eventfd(0, EventfdFlags::CLOEXEC)?,
        Ok(fd) => fd,
    };
    Ok(fd)
}

/// True if the process is known to have ended. This keeps no descriptor.
pub fn has_ended(stream: &UnixStream) -> bool {
    match of_peer(stream) {
        Ok(PeerProcess::Process(fd)) => {
            let mut events = [PollFd::new(&fd, PollFlags::IN)];
            poll::poll(&mut events, Duration::ZERO).is_ok() && !events[0].revents().is_empty()
        }
        Ok(PeerProcess::Ended) => true,
        Ok(PeerProcess::Unknown) | Err(_) => false,
    }
}

/// The process has ended.
#[derive(Debug)]
pub struct Ended;

/// Checks that more may come on a connection: the process lives, or has sent something that has not been read.
pub fn check(stream: &UnixStream) -> Result<(), Ended> {
    if !has_ended(stream) {
        return Ok(());
    }
    // This comes after that look, so that it finds all that the process has sent.
    let mut events = [PollFd::new(stream, PollFlags::IN)];
    let looked = poll::poll(&mut events, Duration::ZERO);
    if looked.is_ok() && events[0].revents().contains(PollFlags::IN) {
        Ok(())
    } else {
        Err(Ended)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;

    #[test]
    fn both_ways_find_the_process_at_the_other_end() {
        let (here, _there) = UnixStream::pair().unwrap();
        for found in [of_peer(&here), by_number(&here)] {
            let Ok(PeerProcess::Process(fd)) = found else {
                panic!("{found:?}");
            };
            let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", fd.as_raw_fd()));
            let own = format!("Pid:\t{}\n", std::process::id());
            assert!(info.unwrap().contains(&own), "not this process");
        }
    }
}
