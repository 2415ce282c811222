//! The process at the other end of a connection, and its user, as the system reports them.
#![allow(unsafe_code)]

use std::fmt;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::OnceLock;

use rustix::io::Errno;
use rustix::process::geteuid;
use rustix::thread::{CapabilitySet, capabilities};

/// A process that has connected, or that has begun to listen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// `None` if this process cannot see the other's PID namespace.
    pub pid: Option<u32>,
    /// Its effective user, as this process's user namespace numbers it. All users that are not mapped there have the
    /// same number.
    pub uid: u32,
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self.pid {
            Some(pid) => write!(f, "process {pid}")?,
            None => write!(f, "a process of another PID namespace")?,
        }
        write!(f, " of user {}", self.uid)
    }
}

/// The user whom a process belongs to.
#[derive(Debug, PartialEq, Eq)]
pub enum User {
    /// This process's effective user.
    Same,
    Other,
    /// It may be this user or a different one, for the stated reason.
    Unknown(String),
}

impl Peer {
    /// The process at the other end of `stream`.
    ///
    /// rustix does not fit here: it has no process 0, which is what the system says of a process in a different PID
    /// namespace.
    pub fn of(stream: &UnixStream) -> io::Result<Peer> {
        let [pid, uid, _gid] = option(stream, libc::SO_PEERCRED)?;
        let pid = (pid > 0).then_some(pid);
        Ok(Peer { pid, uid })
    }
}

/// Finds the user of the process at the other end of `stream`.
///
/// Equal numbers prove that the users are the same, with one exception. The system gives the overflow uid to every user
/// that this process's user namespace does not map. A process that runs as that number, for example as `nobody` of a
/// container, needs a different proof.
pub fn user_of(stream: &UnixStream, peer: Peer) -> User {
    let own = geteuid().as_raw();
    if peer.uid != own {
        return User::Other;
    }
    if own != overflow_uid() || all_users_are_mapped() {
        return User::Same;
    }
    match prove(stream) {
        Ok(()) => User::Same,
        Err(reason) => User::Unknown(format!(
            "this process runs as user {own}, which is what the system calls all users that its user \
             namespace does not map, and {reason}; run the ranks as a user of another number"
        )),
    }
}

/// The number that the system gives to users that are not mapped.
fn overflow_uid() -> u32 {
    static UID: OnceLock<u32> = OnceLock::new();
    *UID.get_or_init(|| {
        let text = fs::read_to_string("/proc/sys/kernel/overflowuid").unwrap_or_default();
        // The system's default, where it does not say.
        text.trim().parse().unwrap_or(65534)
    })
}

/// True if this process's user namespace maps every user, as the first namespace does.
///
/// A nested namespace can only do so if all namespaces around it do.
fn all_users_are_mapped() -> bool {
    let map = fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    maps_all(&map)
}

fn maps_all(map: &str) -> bool {
    let fields: Vec<&str> = map.split_whitespace().collect();
    matches!(fields[..], [_, _, "4294967295"])
}

/// Proves that the process at the other end has this process's effective user, or says why it cannot.
///
/// The system lets a process look into another's namespaces if the other's real, effective and saved users are all the
/// effective user of the first, whatever their names are. It also does so for capabilities. Those of this process are
/// checked for. Others come with user namespaces that it has made, so the other process must be in the same namespace.
///
/// The process is the one that the system has noted for this connection, so no one can pass on another's proof. Its
/// number is read from the same mount of /proc that is then asked, before and after. As long as the process has the
/// number, no other process has it. This does not prove that the process had the same user when it connected. But a
/// process that has become this user in all three respects got this user's rights from a program of this user or of
/// root, as with `su`.
fn prove(stream: &UnixStream) -> Result<(), String> {
    let is_capable = capabilities(None).map_or(true, |own| {
        own.effective.contains(CapabilitySet::SYS_PTRACE)
    });
    if is_capable {
        return Err("this process may look into other users' processes (CAP_SYS_PTRACE)".into());
    }
    let pidfd = pidfd(stream)
        .map_err(|error| format!("the system does not point at the other process ({error})"))?;
    let pid = number(&pidfd).ok_or("the other process has ended or is in another PID namespace")?;
    let theirs = fs::read_link(format!("/proc/{pid}/ns/user")).map_err(|error| {
        format!("the other process is not shown to be of the same user ({error})")
    })?;
    let own = fs::read_link("/proc/self/ns/user").map_err(|error| error.to_string())?;
    if theirs != own {
        return Err("the other process is in another user namespace".into());
    }
    if number(&pidfd) != Some(pid) {
        return Err("the other process has ended".into());
    }
    Ok(())
}

/// A descriptor of the process at the other end, which stays valid when its number is reused. Needs Linux 6.5.
pub fn pidfd(stream: &UnixStream) -> Result<OwnedFd, Errno> {
    let [fd] = option(stream, libc::SO_PEERPIDFD)?;
    // SAFETY: the system has just opened it, for this caller alone.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// The number of a process in /proc. None once it is reaped, or if /proc does not show it.
fn number(pidfd: &OwnedFd) -> Option<u32> {
    let info = fs::read_to_string(format!("/proc/self/fdinfo/{}", pidfd.as_raw_fd())).ok()?;
    let mut lines = info.lines();
    let number = lines.find_map(|line| line.strip_prefix("Pid:"))?;
    number.trim().parse().ok().filter(|&number| number > 0)
}

/// Reads a socket option of `N` numbers.
fn option<const N: usize>(socket: &UnixStream, name: libc::c_int) -> Result<[u32; N], Errno> {
    let mut numbers = [0; N];
    let mut bytes = size_of_val(&numbers) as libc::socklen_t;
    // SAFETY: the system writes at most the number of bytes that it is told, which is the local's size. All bytes are
    // valid for it.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            name,
            numbers.as_mut_ptr().cast(),
            &mut bytes,
        )
    };
    match result {
        0 if bytes as usize == size_of_val(&numbers) => Ok(numbers),
        0 => Err(Errno::NOPROTOOPT),
        _ => Err(Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::NOPROTOOPT)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_other_end_of_a_pair_is_this_process() {
        let (one, _two) = UnixStream::pair().unwrap();
        let peer = Peer::of(&one).unwrap();
        let own = Peer {
            pid: Some(std::process::id()),
            uid: geteuid().as_raw(),
        };
        assert_eq!(peer, own);
        assert_eq!(user_of(&one, peer), User::Same);
        let other = Peer {
            uid: own.uid + 1,
            ..own
        };
        assert_eq!(user_of(&one, other), User::Other);
    }

    #[test]
    fn only_a_map_of_all_users_makes_numbers_unique() {
        assert!(maps_all("         0          0 4294967295\n"));
        assert!(!maps_all(""));
        assert!(!maps_all("0 1000 1\n"));
        assert!(!maps_all("0 100000 65536\n65536 0 4294967295\n"));
    }
}
