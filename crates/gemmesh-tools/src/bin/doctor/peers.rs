//! Measures the routes of a group of GPUs, whose ranks a launcher has started.

use std::time::Duration;

use gemmesh::error::Class;
use gemmesh::tools::{NcclLibrary, network_gb_per_s};
use gemmesh::tuning::Route;
use gemmesh::{AllGatherMatmul, Cuda, Group, bf16};

use super::common::Failure;
use super::measure::{self, Way};
use super::report::{Nccl, Peer, Via};
use super::routes::{self, Rates};

/// Bytes of each rank of a pair.
const BYTES: usize = 32 << 20;

/// Opens the launcher's group, and measures how its ranks reach one another. Collective.
pub fn measure(wait: Duration) -> Result<Vec<Peer>, Failure> {
    let builder = Group::<Cuda>::builder().timeout(wait).arrival_timeout(wait);
    let group = builder.from_env()?;
    group.check_peers()?;
    let own = within_host(&group)?;
    let rates = Rates {
        near: route(&group)?,
        within: gather(&group, &own)?,
        rails: network_gb_per_s(&group),
    };
    Ok(routes::peers(&group.hosts(), &rates))
}

/// The route that a product's rows take within a host.
fn route(group: &Group<Cuda>) -> Result<Via, Failure> {
    const N: usize = 2048;
    let a = group.sharded::<bf16>(1024 * group.world_size(), N)?;
    let config = AllGatherMatmul::new().prepare(&a, N)?.config();
    Ok(match config.route {
        Route::Pull => Via::Pull,
        Route::Push => Via::Push,
        Route::Store => Via::Store,
        Route::Net => Via::Network,
    })
}

/// The rates of this rank and the other ranks of its host, by rank. Pairs of all hosts copy at the same time, and each
/// GPU is in one pair. Collective.
fn within_host(group: &Group<Cuda>) -> Result<Vec<Option<f64>>, Failure> {
    let (rank, world, hosts) = (group.rank(), group.world_size(), group.hosts());
    let ranks = hosts.into_iter().find(|ranks| ranks.contains(&rank));
    let ranks = ranks.unwrap_or_default();
    let place = ranks.iter().position(|&other| other == rank).unwrap_or(0);
    let mut rates = vec![None; world];
    for round in 0..routes::rounds(ranks.len()) {
        let peer = routes::partner(place, round, ranks.len()).map(|place| ranks[place]);
        let pair = group.split(peer.map_or(rank, |peer| peer.min(rank)), rank)?;
        if let Some(peer) = peer {
            rates[peer] = Some(measure::gather(&pair, Way::Copies, BYTES)?.gb_per_s);
        }
    }
    Ok(rates)
}

/// What each rank says, by rank. Collective.
fn gather(group: &Group<Cuda>, own: &[Option<f64>]) -> Result<Vec<Vec<Option<f64>>>, Failure> {
    const UNREADABLE: Failure = Failure::Usage("a rank's rates can't be read");
    let own = serde_json::to_vec(own).map_err(|_| UNREADABLE)?;
    let all = group.all_gather_bytes(&own)?;
    let read = |bytes: &Vec<u8>| serde_json::from_slice(bytes).map_err(|_| UNREADABLE);
    all.iter().map(read).collect()
}

/// The NCCL that this process finds.
///
/// # Errors
/// What is missing.
pub fn nccl() -> Result<Nccl, String> {
    match NcclLibrary::find(0) {
        Ok(found) => Ok(Nccl {
            version: found.version,
            path: found.path.map(|path| path.display().to_string()),
            has_put_signal: found.has_put_signal,
        }),
        Err(error) if error.kind().class() == Class::Device => Err(error.kind().to_string()),
        Err(error) => Err(error.to_string()),
    }
}
