//! Ranks of several hosts, as their launcher's environment and the user's describe them.

use std::collections::BTreeSet;

use super::{Launcher, NOT_SHOWN, SRUN, first_of, number, secret, text};
use crate::error::{Error, Kind, Result};
use crate::ranks::address::Address;
use crate::ranks::meeting::Key;
use crate::ranks::secret::Secret;
use crate::ranks::surroundings::Surroundings;
use crate::schedule::Hosts;
use crate::schedule::layout::MAX_WORLD;

/// The key of a job of several hosts.
pub const KEY: &str = "GEMMESH_KEY";
/// A key with fewer characters could be guessed.
const FEWEST_CHARACTERS: usize = 16;
/// So could one of few different characters. Sixteen random decimal digits hold more than three different ones, but for
/// five in ten million.
const FEWEST_DIFFERENT: usize = 4;
/// The port at which rank 0 listens for other hosts. Without it, it is the one after `MASTER_PORT`.
const PORT: &str = "GEMMESH_PORT";
const MASTER_ADDR: &str = "MASTER_ADDR";
const MASTER_PORT: &str = "MASTER_PORT";
/// How srun numbers ranks.
const DISTRIBUTION: &str = "SLURM_DISTRIBUTION";

/// Where leaders meet, as the environment says it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedMeeting {
    pub name: String,
    pub port: u16,
    pub key: Key,
}

/// Which ranks share a host. If there are several hosts, this rank must be where their numbers say.
pub fn hosts(
    process: &impl Surroundings,
    launcher: &Launcher,
    rank: usize,
    world: usize,
) -> Result<Hosts> {
    let Some(name) = first_of(process, launcher.local_world) else {
        return one_host(process, launcher, rank, world);
    };
    let value = text(process, name)?;
    let Some(value) = value.filter(|value| value.parse() != Ok(world)) else {
        return Ok(Hosts::default());
    };
    let wrong = |reason| {
        Error::of_kind(Kind::EnvironmentValue {
            name: name.into(),
            value: value.clone(),
            reason,
        })
    };
    if !launcher.spans_hosts {
        return Err(wrong(format!("all {world} ranks must be on one host")));
    }
    if process.variable(KEY).is_none() {
        let reason = format!("all {world} ranks must be on one host, unless {KEY} is set");
        return Err(wrong(reason));
    }
    if world > MAX_WORLD {
        // The rendezvous refuses it.
        return Ok(Hosts::default());
    }
    let own =
        ranks_of_a_host(&value).filter(|&own| own > 0 && world.is_multiple_of(own) && world > own);
    let own = own.ok_or_else(|| {
        wrong(format!(
            "each host must have as many of the {world} ranks as the others"
        ))
    })?;
    let host_and_place = places_of_ranks(process, launcher, world / own, own)?;
    let (place, found) = number(process, launcher.local_rank)?;
    let [_, expected] = host_and_place(rank);
    if found != expected {
        return Err(Error::of_kind(Kind::EnvironmentValue {
            name: place.into(),
            value: found.to_string(),
            reason: format!(
                "rank {rank} must be the rank {expected} of its host, because ranks are numbered host by host"
            ),
        }));
    }
    let names: Vec<usize> = (0..world).map(|rank| host_and_place(rank)[0]).collect();
    // The numbers of ranks are equal.
    Ok(Hosts::of(&names).unwrap_or_default())
}

/// From a rank to its host and its place there. `own`: the ranks of each of the `hosts`.
fn places_of_ranks(
    process: &impl Surroundings,
    launcher: &Launcher,
    hosts: usize,
    own: usize,
) -> Result<impl Fn(usize) -> [usize; 2]> {
    let is_cyclic = launcher.name == SRUN
        && text(process, DISTRIBUTION)?.is_some_and(|how| how.starts_with("cyclic"));
    Ok(move |rank| {
        if is_cyclic {
            [rank % hosts, rank / hosts]
        } else {
            [rank / own, rank % own]
        }
    })
}

/// The hosts of ranks that are not told how many share one: all of them, unless a rank's own numbers say that it is on
/// another host than rank 0.
///
/// `LOCAL_RANK` says so only with a key. Without one it may be 0 on all ranks of a host, each of which sees one GPU.
fn one_host(
    process: &impl Surroundings,
    launcher: &Launcher,
    rank: usize,
    world: usize,
) -> Result<Hosts> {
    let size = launcher
        .local_world
        .first()
        .filter(|_| launcher.spans_hosts);
    let has_key = process.variable(KEY).is_some();
    let is_told = has_key || launcher.local_rank != ["LOCAL_RANK"];
    if is_told && first_of(process, launcher.local_rank).is_some() {
        let (name, place) = number(process, launcher.local_rank)?;
        if place != rank && world > 1 {
            let remedy = match size {
                Some(size) if has_key => {
                    format!("{size} must be set to the number of ranks of a host")
                }
                Some(size) => {
                    format!(
                        "all {world} ranks must be on one host, unless {KEY} is set, and {size} to the number of \
                         ranks of a host"
                    )
                }
                None => format!("all {world} ranks must be on one host"),
            };
            return Err(Error::of_kind(Kind::EnvironmentValue {
                name: name.into(),
                value: place.to_string(),
                reason: format!("so rank {rank} is not on rank 0's host, and {remedy}"),
            }));
        }
    }
    match size {
        // Ranks of rank 0's host would wait for those of others.
        Some(size) if has_key && world > 1 => Err(Error::of_kind(Kind::Environment {
            launcher: launcher.name.into(),
            missing: format!("{size} (or unset {KEY}, if all ranks are on one host)"),
        })),
        _ => Ok(Hosts::default()),
    }
}

/// The number of ranks of each host, if it is the same for all: 4, or srun's 4(x2).
fn ranks_of_a_host(value: &str) -> Option<usize> {
    let Some((ranks, hosts)) = value.split_once("(x") else {
        return value.parse().ok();
    };
    hosts.strip_suffix(')')?.parse::<usize>().ok()?;
    ranks.parse().ok()
}

/// Where the leaders of the hosts of job `address` meet.
pub fn meeting(
    process: &impl Surroundings,
    launcher: &Launcher,
    address: &Address,
) -> Result<NamedMeeting> {
    let missing = |names: &str| {
        Error::of_kind(Kind::Environment {
            launcher: launcher.name.into(),
            missing: names.into(),
        })
    };
    let key = secret(process, KEY)?.ok_or_else(|| missing(KEY))?;
    check_key(&key)?;
    let name = text(process, MASTER_ADDR)?.ok_or_else(|| missing(MASTER_ADDR))?;
    let port = match first_of(process, &[PORT, MASTER_PORT]) {
        None => Err(missing(PORT)),
        Some(variable) => {
            let (_, value) = number(process, &[variable])?;
            // The launcher's own store listens at MASTER_PORT.
            let port = value.checked_add(usize::from(variable == MASTER_PORT));
            let port = port.and_then(|port| u16::try_from(port).ok());
            port.filter(|&port| port > 0).ok_or_else(|| {
                Error::of_kind(Kind::EnvironmentValue {
                    name: variable.into(),
                    value: value.to_string(),
                    reason: match variable {
                        MASTER_PORT => "rank 0 cannot listen at the port after it for other hosts",
                        _ => "rank 0 cannot listen at that port for other hosts",
                    }
                    .into(),
                })
            })
        }
    };
    Ok(NamedMeeting {
        name,
        port: port?,
        key: Key::of(key.reveal(), address.reveal()),
    })
}

/// Refuses a key that is easily guessed. Whether it was drawn at random, no check can tell.
fn check_key(key: &Secret<String>) -> Result<()> {
    let characters: Vec<char> = key.reveal().chars().collect();
    let different: BTreeSet<char> = characters.iter().copied().collect();
    if characters.len() >= FEWEST_CHARACTERS && different.len() >= FEWEST_DIFFERENT {
        return Ok(());
    }
    Err(Error::of_kind(Kind::EnvironmentValue {
        name: KEY.into(),
        value: NOT_SHOWN.into(),
        reason: format!(
            "it must have {FEWEST_CHARACTERS} characters or more, {FEWEST_DIFFERENT} of them different, and be drawn \
             at random, for example by openssl rand -hex 16; it has {} characters, {} of them different",
            characters.len(),
            different.len()
        ),
    }))
}
