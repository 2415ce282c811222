//! Sockets that a forked child does not keep open.
//!
//! A connection to another machine ends only when no process has it open. If a rank is killed and a child of it lives on,
//! no one there would see it. (Within a machine, the end of the process is seen.) So a fork of a rank's process loses
//! these sockets at once. It has no use for them, because a group belongs to the process that made it.
#![allow(unsafe_code)]

use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, Ordering};

/// More than the groups of a process have. Further sockets stay open in children.
const MOST: usize = 1024;

/// 1 + the descriptor of each such socket, or 0. A child may read it at any moment, so there is no lock.
static SOCKETS: [AtomicI32; MOST] = [const { AtomicI32::new(0) }; MOST];
/// 1 + the descriptor that takes their places in a child.
static CLOSED: AtomicI32 = AtomicI32::new(0);

/// Lets forks of this process lose a socket, as long as this value lives. It must be dropped before the socket.
#[derive(Debug)]
pub struct LostInForks(&'static AtomicI32);

impl LostInForks {
    /// None if the system or this module has no room.
    pub fn new(socket: &UnixStream) -> Option<LostInForks> {
        install()?;
        let descriptor = socket.as_raw_fd() + 1;
        let is_free = |slot: &&AtomicI32| {
            let taken = slot.compare_exchange(0, descriptor, Ordering::Relaxed, Ordering::Relaxed);
            taken.is_ok()
        };
        SOCKETS.iter().find(is_free).map(LostInForks)
    }
}

impl Drop for LostInForks {
    fn drop(&mut self) {
        self.0.store(0, Ordering::Relaxed);
    }
}

/// Has the system call [`in_child`] in each fork from now on.
fn install() -> Option<()> {
    static INSTALLED: OnceLock<Option<OwnedFd>> = OnceLock::new();
    let installed = INSTALLED.get_or_init(|| {
        let closed = OwnedFd::from(UnixStream::pair().ok()?.0);
        CLOSED.store(closed.as_raw_fd() + 1, Ordering::Relaxed);
        // SAFETY: the function may be called in a child at any moment: it makes only system calls.
        let result = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
        (result == 0).then_some(closed)
    });
    installed.as_ref().map(|_| ())
}

unsafe extern "C" fn in_child() {
    lose_all();
}

/// Puts a closed socket in the place of each. Their numbers stay taken, because the child has copies of their owners.
fn lose_all() {
    let closed = CLOSED.load(Ordering::Relaxed) - 1;
    for socket in &SOCKETS {
        let descriptor = socket.load(Ordering::Relaxed) - 1;
        if descriptor >= 0 {
            // SAFETY: a system call on descriptors of this child, which no one uses: it has only this thread.
            unsafe { libc::dup3(closed, descriptor, libc::O_CLOEXEC) };
        }
    }
}
