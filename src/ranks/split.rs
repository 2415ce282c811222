//! Parts of a group as groups of their own, without a rendezvous.
//!
//! The ranks tell one another over the group's control connections which part each goes to. Then the first rank of each
//! part makes the part's shared memory, and each of its other ranks makes a connection to the first. Every rank sends
//! one descriptor to all, and keeps those of its own part.
//!
//! The system names the process that made a connection at both of its ends. So ranks send descriptors of their
//! processes too, which tell when one ends.

use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::deadlines::Deadlines;
use super::members::{Connections, Members};
use super::memfd::{Mapping, memfd};
use super::naming::{self, Naming};
use super::pidfd::{self, PeerProcess};
use super::reports::ReportSender;
use super::shared_state::SharedState;
use super::watcher::Watched;
use super::wire::Connection;
use crate::error::{Call, Error, Kind, MadeCall, Result};

/// The name of the call.
pub const SPLIT: &str = "split";

/// The call in words.
pub fn split_call() -> MadeCall {
    MadeCall::new(SPLIT, ["color", "key"].map(String::from))
}

/// What a rank asks for.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Claim {
    /// Ranks of one color become a group.
    pub color: usize,
    /// The group's ranks are in the order of their keys.
    pub key: usize,
    /// The group's name, if it is given one.
    pub name: Option<String>,
    /// The place of the call, if it is known.
    pub place: Option<String>,
}

/// The part of a group to which a rank goes.
struct GroupPart {
    /// This rank's number in it.
    rank: usize,
    /// By rank in the part: the ranks of the whole group.
    ranks: Vec<usize>,
    naming: Naming,
}

/// Splits `whole`, and returns this rank's end of its part. Collective.
///
/// # Errors
/// The same on every rank of `whole`, which goes on: [`Kind::Mismatch`] if ranks of a color give different names, and
/// errors of a rank that has no descriptors or memory left. If `whole` fails, its failure.
pub fn split(whole: &Members, claim: Result<Claim>, deadlines: Deadlines) -> Result<Members> {
    let part = GroupPart::of(whole, &claims(whole, claim)?)?;
    // All ranks are here, so reports about earlier groups are void.
    let launcher = whole.launcher().map(ReportSender::for_next_group);
    if let Some(launcher) = &launcher {
        launcher.withdraw();
    }
    let (memory, connections) = share_memory(whole, &part)?;
    let processes = share_processes(whole, &part)?;
    let (rank, world) = (part.rank, part.ranks.len());
    let ends = part.ends(rank);
    let near = Watched::of(
        ends,
        &connections,
        processes.into_iter().map(Ok::<_, Error>),
    )?;
    let connections = Connections {
        near,
        ..Connections::default()
    };
    let state = SharedState::new(memory, rank, world)
        .with_launcher(launcher)
        .split_from(&whole.shared_state(), &part.ranks);
    state.set_naming(part.naming);
    let mut members = Members::new(rank, deadlines, whole.in_process, state, world, connections)?;
    // Functions of threads end with the whole group.
    members.says_farewell = false;
    Ok(members)
}

/// What each rank asks for, by rank.
fn claims(whole: &Members, own: Result<Claim>) -> Result<Vec<Claim>> {
    let bytes = own.and_then(|claim| {
        let bytes = serde_json::to_vec(&claim).map_err(|error| {
            Kind::Internal {
                what: format!("a claim cannot be written: {error}"),
            }
            .on(whole.rank)
        });
        Ok((bytes?, None))
    });
    let gathered = whole.gather_messages(&split_call(), bytes)?;
    let claims = gathered.payloads.iter().enumerate().map(|(rank, bytes)| {
        serde_json::from_slice(bytes).map_err(|error| {
            Kind::Message {
                reason: error.to_string(),
            }
            .on(rank)
        })
    });
    claims
        .collect::<Result<_>>()
        .map_err(|error| whole.fail(error))
}

impl GroupPart {
    /// The part of the calling rank. All names are checked, so that every rank gets the same error.
    fn of(whole: &Members, claims: &[Claim]) -> Result<GroupPart> {
        let of_color = |color| {
            let ranks = (0..claims.len()).filter(move |&rank| claims[rank].color == color);
            ranks.map(|rank| (rank, &claims[rank].name))
        };
        for claim in claims {
            let named = naming::agree(of_color(claim.color));
            named.map_err(|error| in_split(error, claims))?;
            let mut ranks = of_color(claim.color).map(|(rank, _)| rank);
            let first = ranks.next().unwrap_or(whole.rank);
            if let Some(rank) = ranks.find(|&rank| !whole.hosts.share(first, rank)) {
                return Err(Kind::Unsupported {
                    what: "the ranks of a part must all run on one host".into(),
                }
                .on(rank)
                .in_call(Call::new(SPLIT.into(), claims[rank].place.clone())));
            }
        }
        let own = &claims[whole.rank];
        let mut ranks: Vec<usize> = of_color(own.color).map(|(rank, _)| rank).collect();
        ranks.sort_by_key(|&rank| (claims[rank].key, rank));
        let above = whole.naming();
        let default = || match &above.name {
            Some(name) => format!("color {} of {name}", own.color),
            None => format!("color {}", own.color),
        };
        let naming = Naming {
            name: Some(own.name.clone().unwrap_or_else(default)),
            job_ranks: ranks.iter().map(|&rank| above.job_ranks[rank]).collect(),
            is_of_one_job: above.is_of_one_job,
        };
        let rank = ranks.iter().position(|&rank| rank == whole.rank);
        Ok(GroupPart {
            rank: rank.unwrap_or(0),
            ranks,
            naming,
        })
    }

    /// The ranks of the part at the other ends of this rank's control connections.
    fn ends(&self, rank: usize) -> Range<usize> {
        match rank {
            0 => 1..self.ranks.len(),
            _ => 0..1,
        }
    }

    /// The ranks of the whole group at the other ends of this rank's control connections.
    fn peers(&self) -> &[usize] {
        match self.rank {
            0 => &self.ranks[1..],
            _ => &self.ranks[..1],
        }
    }
}

/// The mismatch of names with the call of the rank that differs.
fn in_split(error: Error, claims: &[Claim]) -> Error {
    match (error.kind(), error.rank()) {
        (Kind::Mismatch { .. }, Some(rank)) => {
            let place = claims[rank].place.clone();
            error.with_call(Call::new(SPLIT.into(), place))
        }
        _ => error,
    }
}

/// The memory of this rank's part, and this rank's control connections in it.
fn share_memory(whole: &Members, part: &GroupPart) -> Result<(Mapping, Vec<Arc<Connection>>)> {
    let lacking = || Error::out_of_memory(whole.rank, SharedState::BYTES);
    let mut connection = None;
    let own = match part.rank {
        0 => memfd(SharedState::BYTES).map_err(lacking()),
        _ => connect()
            .map_err(Error::system(whole.rank, "open a socket pair"))
            .map(|(own, first)| {
                connection = Some(own);
                first
            }),
    };
    whole.share(&split_call(), own, |fds| {
        let first = fds[part.ranks[0]].as_ref();
        let first = first.ok_or_else(|| {
            Kind::Internal {
                what: "a part's ranks have no memory in common".into(),
            }
            .on(whole.rank)
        })?;
        let memory = Mapping::shared(first.as_fd(), SharedState::BYTES).map_err(lacking())?;
        let connections = match connection {
            Some(own) => vec![Arc::new(own)],
            None => taken(fds, part.peers())
                .map(|fd| Arc::new(UnixStream::from(fd).into()))
                .collect(),
        };
        Ok((memory, connections))
    })
}

/// A connection: this rank's end, and that of the first rank of its part.
fn connect() -> std::io::Result<(Connection, OwnedFd)> {
    let (own, first) = UnixStream::pair()?;
    own.set_nonblocking(true)?;
    first.set_nonblocking(true)?;
    Ok((own.into(), first.into()))
}

/// The descriptors of `ranks`. The others are closed.
fn taken(mut fds: Vec<Option<OwnedFd>>, ranks: &[usize]) -> impl Iterator<Item = OwnedFd> {
    ranks.iter().filter_map(move |&rank| fds[rank].take())
}

/// The processes at the other ends of this rank's control connections in its part.
fn share_processes(whole: &Members, part: &GroupPart) -> Result<Vec<PeerProcess>> {
    // Threads of one process end with it.
    if whole.in_process {
        return Ok(part.peers().iter().map(|_| PeerProcess::Unknown).collect());
    }
    let own = pidfd::of_this_process();
    let own = own.map_err(Error::system(
        whole.rank,
        "open a descriptor of its process",
    ));
    whole.share(&split_call(), own, |fds| {
        let processes = taken(fds, part.peers());
        Ok(processes.map(PeerProcess::Process).collect())
    })
}
