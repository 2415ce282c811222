//! The rendezvous, in which processes of one host that agree on an address become a group.
//!
//! The address gives names in the abstract socket namespace, so nothing lies in a directory, and a killed process
//! leaves nothing behind. Rank 0 listens at one of these names. The others connect, introduce themselves, and get
//! either the group's shared memory or the reason why there is no group. A connection of a different user, or one that
//! does not speak this protocol, is dropped, and rank 0 goes on listening.
//!
//! Each time that rank 0 listens is an **attempt**. All ranks that come to an attempt get the same **verdict**, when
//! rank 0 has stopped listening. Ranks that come later take part in the next attempt. So a connection that ends without
//! a verdict says nothing, and its rank goes on searching.
//!
//! If there are several hosts, each host's leader listens as rank 0 does, and leaders meet rank 0: see
//! [`meeting`](super::meeting).

mod attempt;
#[cfg(fuzzing)]
pub mod fuzzing;
#[cfg(fuzzing)]
pub mod fuzzing_visits;
mod introduction;
mod leaders;

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use self::attempt::Rendezvous;
pub use self::introduction::Hello;
use self::introduction::Prefix;
use super::address;
use super::identity::Identity;
use super::members::{Connections, Members, opening};
use super::mirror::HostLink;
use super::naming::{Arrival, Naming};
use super::pidfd::{self, Ended};
use super::search::{ACCEPT, Found, HostSearch};
use super::shared_state::SharedState;
use super::watcher::Watched;
use super::wire::{Channel, Connection, Frame, WireError};
use crate::error::{Error, Kind, Result};
use crate::json;
use crate::ranks::memfd::{Mapping, memfd};

/// Changes whenever ranks of older builds cannot work with ranks of this build.
pub const PROTOCOL_VERSION: u32 = 10;
/// The longest answer: an error.
pub const MAX_VERDICT: usize = 64 << 10;
/// If there can be no group, rank 0 listens this long for late ranks, to tell them, and a rank waits this long for
/// that.
pub const LINGER: Duration = Duration::from_secs(1);

/// Meets the other ranks by protocol version `version`.
///
/// # Errors
/// The same on every rank that comes: [`Kind::RanksMissing`], [`Kind::DuplicateRank`] or [`Kind::Mismatch`].
pub fn meet_speaking(identity: &Identity, version: u32) -> Result<Members> {
    if identity.world == 1 {
        // There are no other ranks, so no process can be in the way.
        return members(identity, allocate(0)?.0, Vec::new(), Vec::new());
    }
    // This opens a file. What follows opens files only when rank 0 can be told of a failure.
    let hello = Hello::new(identity)?;
    let mut search = HostSearch::new(identity)?;
    loop {
        let (stream, peer) = match search.look()? {
            Found::Here(listener) => {
                // A spare, for when there are no others left.
                let spare = match listener.try_clone() {
                    Ok(spare) => spare,
                    Err(error) => {
                        attempt::close(&listener);
                        drop(listener);
                        let error = Error::system(identity.rank, ACCEPT)(error);
                        return Err(with_one_descriptor(
                            error, identity, &hello, &search, version,
                        ));
                    }
                };
                let attempt = Rendezvous::new(identity, hello, [listener, spare], version)?;
                return attempt.run(search.begin());
            }
            Found::There(stream, peer) => (Arc::new(Connection::from(stream)), peer),
        };
        match introduce(identity, &hello, &stream, version) {
            Ok(memory) => return members(identity, memory, vec![stream], Vec::new()),
            Err(WireError::Closed) => search.was_closed()?,
            Err(WireError::Late) => return Err(search.was_silent(peer)),
            Err(WireError::Stopped(error)) => return Err(error),
            Err(WireError::Garbage(reason)) => {
                let rank = identity.leader();
                return Err(Kind::Message { reason }.on(rank));
            }
            Err(WireError::Io(error)) => {
                let action = format!("talk to rank {}", identity.leader());
                return Err(Error::system(identity.rank, action)(error));
            }
        }
    }
}

/// Ends the part of a leader that lacks descriptors for others' connections: tells rank 0 and its host's ranks of
/// `error`, with one descriptor.
fn with_one_descriptor(
    error: Error,
    identity: &Identity,
    hello: &Hello,
    search: &HostSearch,
    version: u32,
) -> Error {
    if let Some(meeting) = identity.meeting.as_ref().filter(|_| identity.rank != 0) {
        let own = Err(error.clone());
        // This rank has its error, whatever rank 0 says.
        let _ = leaders::report_to_rank_0(identity, meeting, hello, version, &own, search.begin());
    }
    search.show_last_descriptor();
    error
}

/// Introduces this rank to the process that listens, and waits for the verdict.
fn introduce(
    identity: &Identity,
    hello: &Hello,
    stream: &UnixStream,
    version: u32,
) -> Result<Mapping, WireError<Error>> {
    let (verdict, fds) =
        verdict_on(identity, hello, stream, version).map_err(WireError::or_closed)?;
    let garbage = |e: serde_json::Error| WireError::Garbage(e.to_string());
    let verdict = json::outcome::<()>(&verdict).map_err(garbage)?;
    verdict.map_err(WireError::Stopped)?;
    map(identity, fds).map_err(|error| {
        Members::decline(stream, &identity.deadlines, &error);
        WireError::Stopped(error)
    })
}

/// The verdict as bytes. The wait stops if the other process has ended.
fn verdict_on(
    identity: &Identity,
    hello: &Hello,
    stream: &UnixStream,
    version: u32,
) -> Result<Frame, WireError<Ended>> {
    let hello = serde_json::to_vec(hello).map_err(|error| WireError::Io(io::Error::from(error)))?;
    let prefix = Prefix {
        version,
        rank: identity.rank as u32,
        length: hello.len() as u32,
    };
    let longest = identity.deadlines.rendezvous();
    // Those that are waited for may have begun later than this rank, and they know which ranks are missing.
    let patience = match identity.leader() {
        _ if identity.hosts.count() == 1 => longest + LINGER,
        // Rank 0 waits for leaders a little longer.
        0 => longest + 3 * LINGER,
        // Another leader waits for its host's ranks, and then for rank 0.
        _ => 2 * longest + 3 * LINGER,
    };
    let channel = Channel {
        stream,
        deadline: Instant::now() + patience,
        check: || pidfd::check(stream),
    };
    channel.send_raw(&[prefix.encode().as_slice(), &hello].concat())?;
    channel.receive(MAX_VERDICT)
}

/// Maps the group's shared memory from the descriptors that came with the leader's verdict.
fn map(identity: &Identity, fds: io::Result<Vec<OwnedFd>>) -> Result<Mapping> {
    let rank = identity.rank;
    let fds = fds.map_err(Error::system(rank, "receive the group's shared memory"))?;
    let [memory] = &fds[..] else {
        let reason = format!("{} descriptors of shared memory", fds.len());
        let rank = identity.leader();
        return Err(Kind::Message { reason }.on(rank));
    };
    Mapping::shared(memory, SharedState::BYTES)
        .map_err(Error::out_of_memory(rank, SharedState::BYTES))
}

/// The memory that all ranks of a group share, and the descriptor for the others.
fn allocate(rank: usize) -> Result<(Mapping, OwnedFd)> {
    let lacking = |error| Error::out_of_memory(rank, SharedState::BYTES)(error);
    let fd = memfd(SharedState::BYTES).map_err(lacking)?;
    let memory = Mapping::shared(&fd, SharedState::BYTES).map_err(lacking)?;
    Ok((memory, fd))
}

/// Makes this rank's end of the group, when all ranks have what they need. If a rank lacks something, all get its
/// error.
fn members(
    identity: &Identity,
    memory: Mapping,
    connections: Vec<Arc<Connection>>,
    links: Vec<HostLink>,
) -> Result<Members> {
    let &Identity {
        rank,
        world,
        deadlines,
        ..
    } = identity;
    if let Some(launcher) = &identity.launcher {
        // All ranks are here, so reports about earlier groups are void.
        launcher.withdraw();
    }
    let shared_state = SharedState::new(memory, rank, world)
        .on_hosts(identity.hosts.clone())
        .with_launcher(identity.launcher.clone());
    let processes = connections
        .iter()
        .map(|connection| pidfd::of_peer(connection));
    let leader = identity.leader();
    let ends: Vec<usize> = if identity.leads() {
        identity
            .neighbours()
            .filter(|&other| other != rank)
            .collect()
    } else {
        vec![leader]
    };
    let near = Watched::of(ends, &connections, processes)
        .map_err(Error::system(rank, "watch another rank's process"))
        .map_err(|error| shared_state.fail(error))?;
    if let Some(naming) = &identity.naming {
        shared_state.set_naming(naming.clone());
    }
    let connections = Connections { near, links };
    let members = Members::new(rank, deadlines, false, shared_state, world, connections)?;
    members.set_naming(agree(&members, identity)?);
    Ok(members)
}

/// Agrees with the other ranks on what the group is called.
fn agree(members: &Members, identity: &Identity) -> Result<Naming> {
    let own = serde_json::to_vec(&identity.arrival).map_err(|error| {
        Kind::Internal {
            what: format!("an arrival cannot be written: {error}"),
        }
        .on(identity.rank)
    });
    let gathered = members.gather_messages(&opening(), own.map(|bytes| (bytes, None)))?;
    let arrivals = gathered.payloads.iter().enumerate().map(|(rank, bytes)| {
        serde_json::from_slice::<Arrival>(bytes).map_err(|error| {
            Kind::Message {
                reason: error.to_string(),
            }
            .on(rank)
        })
    });
    let arrivals = arrivals.collect::<Result<Vec<_>>>();
    let arrivals = arrivals.map_err(|error| members.fail(error))?;
    Naming::agreed(&arrivals, || address::shown(&identity.address))
}
