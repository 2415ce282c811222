//! What a planner says of an operation.

use super::{Agreed, MatrixSpec, Product, Reduction, Request, Tile, Transfer};

/// What a planner says of an operation, before it is checked.
#[derive(Clone, Debug)]
pub struct Parts {
    /// This rank.
    pub rank: usize,
    /// The number of ranks.
    pub world: usize,
    /// What all ranks must agree on. If they do, they tell one another when rows may be moved and have been; if there
    /// is nothing, the others take no part, or the caller keeps them apart.
    pub agreed: Option<Agreed>,
    /// By number.
    pub matrices: Vec<MatrixSpec>,
    /// What comes to this rank, whoever moves it, in the order in which it should come.
    pub arrivals: Vec<Transfer>,
    /// What goes from this rank, whoever moves it, in the order in which it should go.
    pub departures: Vec<Transfer>,
    /// The product that the tiles are of; none if nothing is multiplied.
    pub product: Option<Product>,
    /// In the order in which they become ready.
    pub tiles: Vec<Tile>,
    /// What the caller makes, in this order.
    pub requests: Vec<Request>,
    /// What is added up at the end.
    pub reduction: Option<Reduction>,
    /// Whether all ranks make all rows, by the same tiles in the same order, before partials are stored and added: then
    /// they may as well do both tile by tile.
    pub one_shot: bool,
}
