//! Notices that a rank's process ends, or that it closes its control connection.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};

use super::pidfd::PeerProcess;
use super::poll;
use super::shared_state::SharedState;
use super::wire::{self, Connection};
use crate::error::{Error, Kind, Result};

/// A thread that notices when control connections close and when the processes at their other ends end.
#[derive(Debug)]
pub struct Watcher {
    /// The thread ends when this connection ends.
    stop: Option<Connection>,
    thread: Option<JoinHandle<()>>,
}

impl Watcher {
    /// Starts the thread.
    ///
    /// If a connection closes before its rank has left, the group has failed. The same is true if its rank's process
    /// ends.
    pub fn spawn(rank: usize, shared: Arc<SharedState>, peers: Vec<Watched>) -> Result<Watcher> {
        let (stop, stopped) = wire::pair().map_err(Error::system(rank, "open a socket pair"))?;
        let thread = std::thread::Builder::new()
            .name(format!("gemmesh-watch-{rank}"))
            .spawn(move || watch(rank, &shared, peers, &stopped))
            .map_err(Error::not_started(rank, "a thread"))?;
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
            // The thread can't panic, and there would be nothing to do if it did.
            let _ = thread.join();
        }
    }
}

/// A rank at the other end of a control connection.
#[derive(Debug)]
pub struct Watched {
    pub rank: usize,
    /// Non-blocking.
    pub connection: Arc<Connection>,
    pub process: PeerProcess,
}

impl Watched {
    /// The ranks at the other ends of `connections`, and the process of each.
    pub fn of<E>(
        ranks: impl IntoIterator<Item = usize>,
        connections: &[Arc<Connection>],
        processes: impl IntoIterator<Item = Result<PeerProcess, E>>,
    ) -> Result<Vec<Watched>, E> {
        let peers = ranks.into_iter().zip(connections).zip(processes);
        let peers = peers.map(|((rank, connection), process)| {
            Ok(Watched {
                rank,
                connection: connection.clone(),
                process: process?,
            })
        });
        peers.collect()
    }

    /// The events to wait for.
    fn events(&self) -> impl Iterator<Item = PollFd<'_>> {
        let process = match &self.process {
            PeerProcess::Process(fd) => Some(PollFd::new(fd, PollFlags::IN)),
            PeerProcess::Ended | PeerProcess::Unknown => None,
        };
        [PollFd::new(&**self.connection, PollFlags::RDHUP)]
            .into_iter()
            .chain(process)
    }

    /// True if there is no one at the other end any more.
    fn is_gone(&self) -> bool {
        let mut events: Vec<PollFd> = self.events().collect();
        let looked = poll::poll(&mut events, Duration::ZERO);
        let mut happened = events.iter().map(PollFd::revents);
        matches!(self.process, PeerProcess::Ended)
            || looked.is_ok() && happened.any(|happened| happened.intersects(END))
    }
}

/// Events of a closed connection or an ended process.
const END: PollFlags = PollFlags::HUP
    .union(PollFlags::RDHUP)
    .union(PollFlags::ERR)
    .union(PollFlags::IN);

fn watch(rank: usize, shared: &SharedState, mut peers: Vec<Watched>, stopped: &UnixStream) {
    // Every end wakes the thread, so the pause between looks can be long.
    const PAUSE: Duration = Duration::from_secs(3600);
    loop {
        peers.retain(|peer| {
            let is_gone = peer.is_gone();
            if is_gone && !shared.has_left(peer.rank) {
                shared.fail(Kind::RankLost { noticed_by: rank }.on(peer.rank));
            }
            !is_gone
        });
        let mut events: Vec<PollFd> = peers.iter().flat_map(Watched::events).collect();
        events.push(PollFd::new(stopped, PollFlags::IN | PollFlags::RDHUP));
        if poll::poll(&mut events, PAUSE).is_err() {
            return;
        }
        if events
            .pop()
            .is_some_and(|stop| stop.revents().intersects(END))
        {
            return;
        }
    }
}
