//! The process at the other end of a connection. A connection alone does not tell that it has ended: a child that it
//! has forked may hold it open.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// The number of the option, but on a few processors whose kernels don't know this one.
const SO_PEERPIDFD: i32 = 77;

/// What is known of a peer.
#[derive(Debug)]
pub enum Peer {
    /// The descriptor is readable once it has ended.
    Process(OwnedFd),
    Ended,
    /// The system does not say: its connection has to do.
    Unknown,
}

/// Who has made the connection, or listens where it leads to.
///
/// # Errors
/// If this process can have no more descriptors.
pub fn of_peer(stream: &UnixStream) -> io::Result<Peer> {
    let asked = option(stream, SO_PEERPIDFD, -1).map(|fd: i32| {
        // SAFETY: the call has made it, for this process to own.
        unsafe { OwnedFd::from_raw_fd(fd) }
    });
    match asked {
        Ok(fd) => Ok(Peer::Process(fd)),
        // Its number is free again.
        Err(Errno::SRCH | Errno::INVAL) => Ok(Peer::Ended),
        Err(error @ (Errno::MFILE | Errno::NFILE | Errno::NOMEM)) => Err(error.into()),
        // Linux before 6.5.
        Err(_) => by_number(stream),
    }
}

/// The same where the kernel has no descriptor for it. Should it have ended and its number be another's by now, the
/// other is watched: then the connection has to do.
fn by_number(stream: &UnixStream) -> io::Result<Peer> {
    let nobody = libc::ucred {
        pid: 0,
        uid: 0,
        gid: 0,
    };
    let number = option(stream, libc::SO_PEERCRED, nobody).map_or(0, |who| who.pid);
    // In another namespace of processes it has no number here.
    let Some(pid) = Pid::from_raw(number).filter(|_| number > 0) else {
        return Ok(Peer::Unknown);
    };
    match pidfd_open(pid, PidfdFlags::empty()) {
        Ok(fd) => Ok(Peer::Process(fd)),
        Err(Errno::SRCH) => Ok(Peer::Ended),
        Err(error @ (Errno::MFILE | Errno::NFILE | Errno::NOMEM)) => Err(error.into()),
        Err(_) => Ok(Peer::Unknown),
    }
}

/// An option of a socket that is a `T` of plain numbers.
fn option<T: Copy>(stream: &UnixStream, name: i32, mut value: T) -> Result<T, Errno> {
    let mut length = size_of::<T>() as libc::socklen_t;
    // SAFETY: writes as much of the local as it is told at most, and any numbers are a `T`.
    let result = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            name,
            (&raw mut value).cast(),
            &raw mut length,
        )
    };
    match result {
        0 if length as usize == size_of::<T>() => Ok(value),
        0 => Err(Errno::NOPROTOOPT),
        _ => Err(Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::NOPROTOOPT)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ways_find_the_process_at_the_other_end() {
        let (here, _there) = UnixStream::pair().unwrap();
        for found in [of_peer(&here), by_number(&here)] {
            let Ok(Peer::Process(fd)) = found else {
                panic!("{found:?}");
            };
            let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", fd.as_raw_fd()));
            let own = format!("Pid:\t{}\n", std::process::id());
            assert!(info.unwrap().contains(&own), "not this process");
        }
    }
}
