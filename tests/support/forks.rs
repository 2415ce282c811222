//! Forks of a rank's process.
#![allow(unsafe_code)] // To fork.

use std::time::{Duration, Instant};

use gemmesh::Error;
use rustix::process::{Pid, Signal, WaitOptions, waitpid};

use super::patience::stretched;

/// What a child that only looks and ends takes at the most, if the machine is not busy.
const TIMEOUT: Duration = Duration::from_secs(20);

/// Goes on in a child too, where it returns none; in the parent, the child.
pub fn fork() -> Option<Pid> {
    // SAFETY: what the child does until it ends needs no other thread.
    Pid::from_raw(unsafe { libc::fork() })
}

/// Ends a child: 0 if what it has seen was right. Nothing is dropped, nor flushed.
pub fn end(right: bool) -> ! {
    // SAFETY: a plain call.
    unsafe { libc::_exit(i32::from(!right)) }
}

/// Waits for a child that has found everything right.
#[track_caller]
pub fn assert_right(child: Pid) {
    let begin = Instant::now();
    loop {
        if let Some((_, status)) = waitpid(Some(child), WaitOptions::NOHANG).unwrap() {
            assert_eq!(status.exit_status(), Some(0), "{status:?}");
            return;
        }
        if begin.elapsed() > stretched(TIMEOUT) {
            rustix::process::kill_process(child, Signal::KILL).unwrap();
            panic!("the child hangs");
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Whether a call was refused because this is a fork.
pub fn is_refused<T>(result: Result<T, Error>, rank: usize) -> bool {
    let (parent, child) = (rustix::process::getppid(), std::process::id());
    let parent = parent.map_or(0, Pid::as_raw_pid);
    let words = format!("rank {rank}: process {child} is a fork of process {parent}");
    result.is_err_and(|error| error.to_string().starts_with(&words))
}
