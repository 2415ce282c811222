//! How rows get from each rank of a group to each other rank. Only groups of GPUs have it measured.
#![cfg_attr(not(feature = "cuda"), allow(dead_code))]

use super::report::{Peer, Via};

/// What a group's ranks have measured.
pub struct Rates {
    /// How rows go within a host.
    pub near: Via,
    /// By rank: the rates from the other ranks of its host, by rank.
    pub within: Vec<Vec<Option<f64>>>,
    /// By rank: the rate along its rail.
    pub rails: Vec<f64>,
}

/// The routes between all ranks of `hosts`, which have the ranks of each.
pub fn peers(hosts: &[Vec<usize>], rates: &Rates) -> Vec<Peer> {
    let world = hosts.iter().map(Vec::len).sum();
    let mut places = vec![(0, 0); world];
    for (host, ranks) in hosts.iter().enumerate() {
        for (place, &rank) in ranks.iter().enumerate() {
            places[rank] = (host, place);
        }
    }
    let pairs = (0..world).flat_map(|from| (0..world).map(move |to| (from, to)));
    let pairs = pairs.filter(|(from, to)| from != to);
    let peer = |(from, to): (usize, usize)| {
        let ((host, place), (other, at)) = (places[from], places[to]);
        let (via, gb_per_s) = match (host == other, place == at) {
            (true, _) => (rates.near, rates.within[to][from]),
            (_, true) => (Via::Network, Some(rates.rails[from].min(rates.rails[to]))),
            _ => (Via::Rank(hosts[other][place]), None),
        };
        Peer {
            from,
            to,
            via,
            gb_per_s,
        }
    };
    pairs.map(peer).collect()
}

/// The partner of `place` in a round, in which each of `places` has at most one. In `rounds(places)` rounds each meets
/// each other once.
pub fn partner(place: usize, round: usize, places: usize) -> Option<usize> {
    // All but the last meet around a circle. The last meets whoever would meet itself.
    let circle = rounds(places);
    let opposite = |place: usize| (round + circle - place) % circle;
    let partner = match place == circle {
        true => (0..circle).find(|&other| opposite(other) == other)?,
        false if opposite(place) == place => circle,
        false => opposite(place),
    };
    (partner < places).then_some(partner)
}

/// The number of rounds, which is odd: so one of the circle is left over in each.
pub fn rounds(places: usize) -> usize {
    places.next_multiple_of(2).max(2) - 1
}
