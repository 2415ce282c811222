//! Which ranks share a host.

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::route::Route;

/// Which ranks share a host. Every host has the same number of **places**, numbered from 0, and each rank has a place.
/// The ranks of equal places of all hosts are a **rail**. A host's lowest rank is its **leader**.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Hosts {
    /// None if all ranks share one host. Then a rank's place is its number.
    several: Option<Arc<Several>>,
}

#[derive(Debug, PartialEq, Eq, Hash)]
struct Several {
    /// The ranks host by host, and of a host place by place.
    ranks: Vec<usize>,
    /// By rank: its index in `ranks`.
    indices: Vec<usize>,
    /// The places of a host.
    places: usize,
    /// How rows go from host to host.
    route: Route,
}

impl Hosts {
    /// The hosts of ranks, of which `names` says each one's. Hosts and places are numbered in the order of ranks.
    ///
    /// # Errors
    /// `Kind::Unsupported` if one host has more ranks than another.
    pub fn of<N: PartialEq>(names: &[N]) -> Result<Hosts> {
        let mut hosts: Vec<(&N, Vec<usize>)> = Vec::new();
        for (rank, name) in names.iter().enumerate() {
            match hosts.iter_mut().find(|(known, _)| *known == name) {
                Some((_, ranks)) => ranks.push(rank),
                None => hosts.push((name, vec![rank])),
            }
        }
        let places = hosts.first().map_or(0, |(_, ranks)| ranks.len());
        if let Some((_, odd)) = hosts.iter().find(|(_, ranks)| ranks.len() != places) {
            let what = format!(
                "each host must have as many ranks as the others, but the host of rank 0 has {places} and that of \
                 rank {} has {}",
                odd[0],
                odd.len()
            );
            return Err(Error::unsupported(what));
        }
        if hosts.len() <= 1 {
            return Ok(Hosts::default());
        }
        let ranks: Vec<usize> = hosts.into_iter().flat_map(|(_, ranks)| ranks).collect();
        let mut indices = vec![0; ranks.len()];
        for (index, &rank) in ranks.iter().enumerate() {
            indices[rank] = index;
        }
        Ok(Hosts {
            several: Some(Arc::new(Several {
                ranks,
                indices,
                places,
                route: Route::Net,
            })),
        })
    }

    /// The same hosts, if the ranks of all hosts share memory: then rows are pushed along a rail.
    pub fn sharing_memory(&self) -> Hosts {
        let several = self.several.as_deref().map(|several| {
            Arc::new(Several {
                ranks: several.ranks.clone(),
                indices: several.indices.clone(),
                route: Route::Push,
                ..*several
            })
        });
        Hosts { several }
    }

    /// How rows go from one rank to another. `near` is how they go within a host.
    pub fn route(&self, one: usize, other: usize, near: Route) -> Route {
        match &self.several {
            Some(several) if !self.share(one, other) => several.route,
            _ => near,
        }
    }

    /// The number of hosts.
    pub fn count(&self) -> usize {
        let several = self.several.as_ref();
        several.map_or(1, |several| several.ranks.len() / several.places)
    }

    /// Several hosts of `world` ranks in words that ranks compare.
    pub(super) fn agreed(&self, world: usize) -> Option<String> {
        let hosts = self.count();
        (hosts > 1).then(|| format!("{hosts} hosts of {} ranks", world / hosts))
    }

    /// The host of a rank.
    pub fn host_of(&self, rank: usize) -> usize {
        let several = self.several.as_ref();
        several.map_or(0, |several| several.indices[rank] / several.places)
    }

    /// The place of a rank on its host.
    pub fn place_of(&self, rank: usize) -> usize {
        let several = self.several.as_ref();
        several.map_or(rank, |several| several.indices[rank] % several.places)
    }

    /// How many hosts on around the ring of hosts the host of `to` is from that of `from`.
    pub fn steps(&self, from: usize, to: usize) -> usize {
        let hosts = self.count();
        (self.host_of(to) + hosts - self.host_of(from)) % hosts
    }

    /// True if two ranks share a host.
    pub fn share(&self, one: usize, other: usize) -> bool {
        self.host_of(one) == self.host_of(other)
    }

    /// The other ranks of `rank`'s host, of `world` ranks in all: that of the next place first, and so on around the
    /// host's ring.
    pub fn neighbours(&self, rank: usize, world: usize) -> impl DoubleEndedIterator<Item = usize> {
        let places = world / self.count();
        (1..places).map(move |step| self.neighbour(rank, step, places))
    }

    /// The rank `step` places on around the ring of the host of `rank`, which has this number of places.
    fn neighbour(&self, rank: usize, step: usize, places: usize) -> usize {
        match &self.several {
            None => (rank + step) % places,
            Some(several) => {
                let index = several.indices[rank];
                let (host, place) = (index / places, index % places);
                several.ranks[host * places + (place + step) % places]
            }
        }
    }

    /// The ranks of a host, of `world` ranks in all, in their order.
    pub fn ranks_of(&self, host: usize, world: usize) -> impl Iterator<Item = usize> {
        (0..world).filter(move |&rank| self.host_of(rank) == host)
    }

    /// The leader of `rank`'s host: its lowest rank.
    pub fn leader_of(&self, rank: usize) -> usize {
        let several = self.several.as_ref();
        several.map_or(0, |several| {
            several.ranks[several.indices[rank] / several.places * several.places]
        })
    }

    /// The leaders of all hosts. The first one is rank 0.
    pub fn leaders(&self) -> Vec<usize> {
        match &self.several {
            None => vec![0],
            Some(several) => several
                .ranks
                .iter()
                .copied()
                .step_by(several.places)
                .collect(),
        }
    }

    /// The other ranks of `rank`'s rail: that of the next host first, and so on around the ring of hosts.
    pub fn rail(&self, rank: usize) -> impl DoubleEndedIterator<Item = usize> {
        let several = self.several.as_deref();
        (1..self.count()).filter_map(move |step| {
            let Several {
                ranks,
                indices,
                places,
                ..
            } = several?;
            Some(ranks[(indices[rank] + step * places) % ranks.len()])
        })
    }

    /// The rank of `rank`'s host that has the place of `other`.
    pub fn beside(&self, rank: usize, other: usize) -> usize {
        match &self.several {
            None => other,
            Some(several) => {
                let places = several.places;
                let host = several.indices[rank] / places;
                several.ranks[host * places + several.indices[other] % places]
            }
        }
    }
}
