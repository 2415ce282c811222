//! What a planner hands to [`Schedule::new`](super::Schedule::new).

use super::{Agreed, HostSum, MatrixSpec, Product, Reduction, Request, Tile, Transfer};

/// A schedule as its planner made it, before it is checked.
#[derive(Clone, Debug)]
pub struct Parts {
    /// This rank.
    pub rank: usize,
    /// The number of ranks.
    pub world: usize,
    /// What all ranks must agree on. If it is given, ranks tell one another when rows may be moved and when they have
    /// been. If it is none, the other ranks take no part, or the caller orders the accesses.
    pub agreed: Option<Agreed>,
    /// The matrices, by number.
    pub matrices: Vec<MatrixSpec>,
    /// The transfers to this rank, whoever makes them, in the order in which they should come.
    pub arrivals: Vec<Transfer>,
    /// The transfers from this rank, whoever makes them, in the order in which they should go.
    pub departures: Vec<Transfer>,
    /// The product that the tiles are part of. None if nothing is multiplied.
    pub product: Option<Product>,
    /// The tiles, in the order in which they become ready.
    pub tiles: Vec<Tile>,
    /// The blocks that the caller makes, in this order.
    pub requests: Vec<Request>,
    /// The sums of this host's addends that go to other hosts, in the order in which they go.
    pub host_sums: Vec<HostSum>,
    /// The sum that is made at the end.
    pub reduction: Option<Reduction>,
    /// True if all ranks make all rows, by the same tiles in the same order, before partials are stored and added. An
    /// engine may then store and add tile by tile.
    pub one_shot: bool,
}
