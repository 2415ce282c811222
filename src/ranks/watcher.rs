//! Who is still there: a rank's process that ends closes its control connection.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};

use super::shared_state::SharedState;
use super::wire;
use crate::error::{Error, Result};

/// A thread that sees the other ends of the control connections close.
#[derive(Debug)]
pub struct Watcher {
    /// Closing it ends the thread.
    stop: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
}

impl Watcher {
    /// Starts it. A connection that closes before its rank has left is the group's failure.
    pub fn spawn(
        rank: usize,
        shared: Arc<SharedState>,
        connections: Vec<Arc<UnixStream>>,
    ) -> Result<Watcher> {
        let (stop, stopped) = wire::pair().map_err(Error::system(rank, "open a socket pair"))?;
        let thread = std::thread::Builder::new()
            .name(format!("gemmesh-watch-{rank}"))
            .spawn(move || watch(rank, &shared, &connections, &stopped))
            .map_err(Error::system(rank, "start a thread"))?;
        Ok(Watcher {
            stop: Some(stop),
            thread: Some(thread),
        })
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // It can't panic, and there is nothing to do if it did.
            let _ = thread.join();
        }
    }
}

fn watch(rank: usize, shared: &SharedState, connections: &[Arc<UnixStream>], stopped: &UnixStream) {
    // Nothing wakes the thread but an end that closes, so the pause between looks can be long.
    const PAUSE: Duration = Duration::from_secs(3600);
    let peer_of = |index: usize| if rank == 0 { index + 1 } else { 0 };
    let mut open: Vec<usize> = (0..connections.len()).collect();
    loop {
        let mut fds: Vec<PollFd> = open
            .iter()
            .map(|&index| PollFd::new(&*connections[index], PollFlags::RDHUP))
            .collect();
        fds.push(PollFd::new(stopped, PollFlags::IN | PollFlags::RDHUP));
        if wire::poll(&mut fds, PAUSE).is_err() {
            return;
        }
        let closed = PollFlags::HUP | PollFlags::RDHUP | PollFlags::ERR;
        if fds.pop().is_some_and(|fd| fd.revents().intersects(closed)) {
            return;
        }
        let hung_up: Vec<usize> = open
            .iter()
            .zip(&fds)
            .filter(|(_, fd)| fd.revents().intersects(closed))
            .map(|(&index, _)| index)
            .collect();
        drop(fds);
        for index in hung_up {
            open.retain(|&other| other != index);
            if !shared.has_left(peer_of(index)) {
                shared.fail(Error::RankLost {
                    rank: peer_of(index),
                    noticed_by: rank,
                });
            }
        }
    }
}
