//! Child processes, by descriptor. A process's number may belong to a different process as soon as somebody has waited
//! for the first one.
#![allow(unsafe_code)]

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::process::{self, Command, ExitStatus};
use std::ptr::null;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, WaitIdStatus, pidfd_open, pidfd_send_signal,
    waitid,
};

use super::poll;

/// How long a killed process may take to end. A process that the kernel holds longer, for example in a driver, is left
/// behind.
const LAST: Duration = Duration::from_secs(5);

/// A child process, which does not outlive this value.
#[derive(Debug)]
pub struct Child {
    process: OwnedFd,
    /// How it ended, once that is known.
    ended: Option<ExitStatus>,
    /// Held as long as the child may have to be waited for.
    _waitable: Waitable,
}

impl Child {
    pub fn start(command: &mut Command) -> io::Result<Child> {
        let waitable = Waitable::hold()?;
        Ok(Child {
            process: descriptor(command.spawn()?)?,
            ended: None,
            _waitable: waitable,
        })
    }

    /// How the child has ended, if it has.
    ///
    /// # Errors
    /// If something else in this process has waited for the child.
    pub fn look(&mut self) -> io::Result<Option<ExitStatus>> {
        if self.ended.is_none() {
            let seen = waitid(self.id(), WaitIdOptions::EXITED | WaitIdOptions::NOHANG);
            self.ended = match seen {
                Err(Errno::CHILD) => return Err(waited_for()),
                seen => seen?.map(status),
            };
        }
        Ok(self.ended)
    }

    /// True if the child is stopped, by SIGSTOP or from a terminal.
    pub fn is_stopped(&self) -> bool {
        let options = WaitIdOptions::STOPPED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        self.ended.is_none()
            && matches!(waitid(self.id(), options), Ok(Some(seen)) if seen.stopped())
    }

    /// Kills the child, unless it has ended.
    pub fn kill(&self) {
        let _ = pidfd_send_signal(&self.process, Signal::KILL);
    }

    fn id(&self) -> WaitId<'_> {
        WaitId::PidFd(self.process.as_fd())
    }
}

impl AsFd for Child {
    /// Readable once it has ended.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.process.as_fd()
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        if self.ended.is_none() {
            self.kill();
            let _ = poll::poll(&mut [PollFd::new(&self.process, PollFlags::IN)], LAST);
            let _ = self.look();
        }
    }
}

/// A descriptor of a started process. If no descriptor is left, the process is killed.
fn descriptor(mut started: process::Child) -> io::Result<OwnedFd> {
    let pid = Pid::from_child(&started);
    match pidfd_open(pid, PidfdFlags::empty()) {
        Ok(process) => Ok(process),
        Err(Errno::SRCH) => Err(waited_for()),
        Err(error) => {
            // After somebody has waited for it, its number may belong to a different process. For that to happen
            // between this look and the signal, the system would have to use up all other numbers in that time.
            let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
            if matches!(waitid(WaitId::Pid(pid), options), Err(Errno::CHILD)) {
                return Err(waited_for());
            }
            // Fails if it has ended already.
            let _ = started.kill();
            let _ = started.wait();
            Err(error.into())
        }
    }
}

/// No one can learn how a child ended.
fn waited_for() -> io::Error {
    io::Error::other(
        "something else in this process, such as a handler of SIGCHLD, waits for all its children",
    )
}

/// The status as `wait` encodes it.
fn status(seen: WaitIdStatus) -> ExitStatus {
    const CORE: i32 = 0x80;
    let core = if seen.dumped() { CORE } else { 0 };
    let exited = seen.exit_status().map(|code| (code & 0xff) << 8);
    let killed = || seen.terminating_signal().map(|signal| signal | core);
    ExitStatus::from_raw(exited.or_else(killed).unwrap_or(0))
}

/// While a value of this type lives, a child that has ended stays until it is waited for, so that the launcher can
/// learn how it ended.
///
/// In a process that ignores SIGCHLD, perhaps because its parent did, children do not stay. So the signal has its
/// default action, which does nothing, for that time. Other children of this process that end in that time stay too,
/// until somebody waits for them or this process ends.
#[derive(Debug)]
struct Waitable;

struct Held {
    /// Several threads may launch.
    holders: usize,
    /// The action before the change, and the new one.
    changed: Option<[libc::sigaction; 2]>,
}

fn held() -> MutexGuard<'static, Held> {
    static HELD: Mutex<Held> = Mutex::new(Held {
        holders: 0,
        changed: None,
    });
    // Each change leaves it whole.
    HELD.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Waitable {
    fn hold() -> io::Result<Waitable> {
        let mut held = held();
        if held.holders == 0 {
            let before = action(None)?;
            if !keeps_children(&before) {
                let mut keeping = before;
                keeping.sa_flags &= !libc::SA_NOCLDWAIT;
                if before.sa_sigaction == libc::SIG_IGN {
                    keeping.sa_sigaction = libc::SIG_DFL;
                }
                action(Some(&keeping))?;
                held.changed = Some([before, keeping]);
            }
        }
        held.holders += 1;
        Ok(Waitable)
    }
}

impl Drop for Waitable {
    fn drop(&mut self) {
        let mut held = held();
        held.holders -= 1;
        if held.holders == 0
            && let Some([before, keeping]) = held.changed.take()
        {
            // The calls fail only for signals that do not exist. An action that the program has set since then stays.
            let is_ours = |now: libc::sigaction| now.sa_sigaction == keeping.sa_sigaction;
            if action(None).is_ok_and(is_ours) {
                let _ = action(Some(&before));
            }
        }
    }
}

fn keeps_children(action: &libc::sigaction) -> bool {
    action.sa_sigaction != libc::SIG_IGN && action.sa_flags & libc::SA_NOCLDWAIT == 0
}

/// Returns the action of SIGCHLD before the call, and sets the `new` one if there is one.
fn action(new: Option<&libc::sigaction>) -> io::Result<libc::sigaction> {
    let mut before = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: the call reads a valid action or none, and writes the local, for which zero is valid. The new action is
    // one that was there before, the default, or the same handler with other flags.
    unsafe {
        let new = new.map_or(null(), |new| new as *const libc::sigaction);
        match libc::sigaction(libc::SIGCHLD, new, before.as_mut_ptr()) {
            0 => Ok(before.assume_init()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::process::{WaitOptions, waitpid};

    use super::*;

    #[test]
    fn a_child_that_something_else_has_waited_for_is_sent_no_signal() {
        let started = Command::new("true").spawn().unwrap();
        waitpid(Some(Pid::from_child(&started)), WaitOptions::empty()).unwrap();
        let error = descriptor(started).unwrap_err();
        assert!(
            error
                .to_string()
                .starts_with("something else in this process"),
            "{error}"
        );
    }
}
