#![doc = include_str!("README.md")]

pub(crate) mod agreed;
mod check;
pub(crate) mod config;
mod counts;
pub mod drive;
pub(crate) mod form;
mod hosts;
pub(crate) mod layout;
pub(crate) mod limits;
pub(crate) mod operation;
mod parts;
pub mod plan;
mod problem;
pub(crate) mod product;
pub(crate) mod quantization;
pub(crate) mod scaling;
mod transfer;

pub use agreed::Agreed;
pub use config::{CUT_COLUMNS, MAX_CLUSTER, MAX_SLICES};
pub use counts::Counts;
pub use form::{Form, Widths};
pub use hosts::Hosts;
pub use layout::{Layout, MAX_CHUNKS, MAX_EXTENT, MAX_WORLD, RowOrder, balanced_rows};
pub use operation::{Operation, OperationPart, RowResult, RowSource, RowWork};
pub use parts::Parts;
pub use problem::{DTypes, Problem};
pub use product::{
    Addend, Bias, DeferredChunk, HostSum, OutputBlock, Product, Reduction, Residual, Sum, Tile,
    Weight,
};
pub use quantization::OutputScales;
pub use scaling::ScaleMatrix;
pub use transfer::{Extent, MatrixSpec, Move, Region, Request, Transfer, Turn};
// Users find these elsewhere.
pub(crate) use crate::route::Route;
pub(crate) use config::{Chunking, Config, Numerics, TileShape};
pub(crate) use form::{Accumulation, Activation, MAX_WEIGHTS, WeightLayout};
pub(crate) use quantization::Quantization;
pub(crate) use scaling::Scaling;

use std::ops::Range;

use limits::limit;
use plan::matrices::PARTIALS;

use crate::Result;
use crate::protocol::flag::Awaited;

/// The most chunk flags that a rank keeps, and so the most transfers that can come to it.
pub const MAX_FLAGS: usize = MAX_WORLD * MAX_CHUNKS;

/// The most blocks of a product: one for each transfer that it makes, and its own.
pub const MAX_BLOCKS: usize = MAX_FLAGS + 1;

/// What one rank does in an operation, as data.
///
/// Matrices have numbers. A call binds memory to the numbers, and an epoch to the flags. Engines that walk a schedule
/// know no operation.
#[derive(Clone, Debug)]
pub struct Schedule {
    parts: Parts,
    /// By chunk flag of this rank: the rank whose rows it guards.
    sources: Vec<usize>,
    /// By chunk flag of this rank: what a wait for it is for.
    awaited: Vec<Awaited>,
    /// The ranks that move rows out of this rank's memory or into it, and then say so in `done`.
    movers: Vec<usize>,
    /// True if tiles wait for every flag, or if no one writes the flags.
    awaits_all: bool,
    /// The smallest range that holds every chunk flag of this rank that no tile awaits.
    unawaited: Range<usize>,
    /// The routes by which rows come to this rank or go from it.
    routes: Vec<Route>,
}

impl Schedule {
    /// Checks these parts and makes a schedule of them.
    ///
    /// # Errors
    /// `Kind::Limit` if more transfers come to this rank than it has flags, if there are more
    /// than 2²⁸ tiles, or if something is out of bounds. `Kind::Unsupported` if a type or
    /// a combination of parts is not supported.
    pub fn new(parts: Parts) -> Result<Schedule> {
        limit(
            "the number of transfers to a rank",
            parts.arrivals.len(),
            0,
            MAX_FLAGS,
        )?;
        limit(
            "the number of tiles of the output",
            parts.tiles.len(),
            0,
            1 << 28,
        )?;
        let awaited = parts.check()?;
        let handshake = parts.agreed.is_some();
        let mut sources = vec![0; parts.arrivals.len()];
        let mut waits = vec![Awaited::Ready { source: 0 }; parts.arrivals.len()];
        for arrival in &parts.arrivals {
            let flag = arrival.flag;
            sources[flag] = arrival.source;
            waits[flag] = Awaited::Chunk {
                source: arrival.from,
                flag,
                pulled: matches!(arrival.route, Route::Pull | Route::Net),
            };
        }
        let (mut movers, mut routes) = (Vec::new(), Vec::new());
        for transfer in parts.arrivals.iter().chain(&parts.departures) {
            if !routes.contains(&transfer.route) {
                routes.push(transfer.route);
            }
            let mover = transfer.mover();
            let says = handshake && mover != parts.rank && says_done(&parts, transfer);
            if says && !movers.contains(&mover) {
                movers.push(mover);
            }
        }
        movers.sort_unstable();
        let first = awaited.iter().position(|flag| !flag);
        let last = awaited.iter().rposition(|flag| !flag);
        let unawaited = first
            .zip(last)
            .map_or(0..0, |(first, last)| first..last + 1);
        Ok(Schedule {
            awaits_all: !handshake || parts.reduction.is_some() || unawaited.is_empty(),
            unawaited,
            sources,
            awaited: waits,
            movers,
            routes,
            parts,
        })
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.parts.rank
    }

    /// The number of ranks.
    pub fn world(&self) -> usize {
        self.parts.world
    }

    /// What all ranks must agree on. None if the other ranks take no part.
    pub fn agreed(&self) -> Option<&Agreed> {
        self.parts.agreed.as_ref()
    }

    /// True if ranks tell one another when rows may be moved and when they have been. Otherwise the caller orders the
    /// accesses.
    pub fn handshake(&self) -> bool {
        self.parts.agreed.is_some()
    }

    /// The types and extents of the matrices, by number.
    pub fn matrices(&self) -> &[MatrixSpec] {
        &self.parts.matrices
    }

    /// The transfers that this rank makes within its host, in this order: first its pulls, then its pushes and stores.
    pub fn moves(&self) -> impl Iterator<Item = &Transfer> + Clone {
        let pulled = self.parts.arrivals.iter();
        let pulled = pulled.filter(|transfer| transfer.route == Route::Pull);
        let pushed = self.parts.departures.iter();
        let pushed = pushed.filter(|transfer| matches!(transfer.route, Route::Push | Route::Store));
        pulled.chain(pushed)
    }

    /// The transfers that this rank sends over a network, in this order.
    pub fn sent(&self) -> impl Iterator<Item = &Transfer> + Clone {
        let all = self.parts.departures.iter();
        all.filter(|transfer| transfer.route == Route::Net)
    }

    /// The transfers that this rank receives over a network, in this order.
    pub fn received(&self) -> impl Iterator<Item = &Transfer> + Clone {
        let all = self.parts.arrivals.iter();
        all.filter(|transfer| transfer.route == Route::Net)
    }

    /// The transfers over a network, turn by turn: what this rank sends, and what it receives at the same time.
    pub fn turns(&self) -> impl Iterator<Item = Turn<'_>> {
        let (mut sent, mut received) = (self.sent().peekable(), self.received().peekable());
        std::iter::from_fn(move || {
            let both = [sent.peek(), received.peek()].into_iter().flatten();
            let number = both.map(|transfer| transfer.turn).min()?;
            let sent_now = sent.next_if(|transfer| transfer.turn == number);
            let received_now = received.next_if(|transfer| transfer.turn == number);
            let stays_alone = |now: Option<&Transfer>, next: Option<&&Transfer>| {
                now.is_some_and(|now| now.stays_alone(next.copied()))
            };
            Some(Turn {
                number,
                sent: sent_now,
                received: received_now,
                sends_alone: stays_alone(sent_now, sent.peek()),
                receives_alone: stays_alone(received_now, received.peek()),
            })
        })
    }

    /// The bytes of a transfer.
    pub fn bytes_of(&self, transfer: &Transfer) -> usize {
        let bytes = |moved: &Move| {
            let width = self.matrices()[moved.to.matrix].dtype.bytes();
            moved.to.rows.len() * moved.to.columns.len() * width
        };
        transfer.regions.iter().map(bytes).sum()
    }

    /// The transfers to this rank, whoever makes them, in the order in which they should come.
    pub fn arrivals(&self) -> &[Transfer] {
        &self.parts.arrivals
    }

    /// The transfers from this rank, whoever makes them.
    pub fn departures(&self) -> &[Transfer] {
        &self.parts.departures
    }

    /// The ranks that move rows out of this rank's memory or into it, and then say so in `done`.
    pub fn movers(&self) -> &[usize] {
        &self.movers
    }

    /// True if the rank that makes this transfer writes `done` at its peer after the last such transfer.
    pub fn says_done(&self, transfer: &Transfer) -> bool {
        says_done(&self.parts, transfer)
    }

    /// By chunk flag of this rank: the rank whose rows it guards.
    pub fn sources(&self) -> &[usize] {
        &self.sources
    }

    /// What a wait for a chunk flag of this rank is for.
    pub fn awaited(&self, flag: usize) -> Awaited {
        self.awaited[flag]
    }

    /// True if rows come to this rank, or go from it, by `route`.
    pub fn uses(&self, route: Route) -> bool {
        self.routes.contains(&route)
    }

    /// True if a copy stream waits for the kernel's permit: to push rows, or to say that rows have come over a network.
    pub fn awaits_permit(&self) -> bool {
        self.uses(Route::Push) || self.uses(Route::Net)
    }

    /// The routes by which rows come to this rank or go from it.
    pub fn routes(&self) -> &[Route] {
        &self.routes
    }

    /// The operation's name for a profiler, with the extents of its product, or else with what ranks agree on.
    pub(crate) fn name(&self) -> String {
        let agreed = self.agreed();
        let operation = agreed.map_or(Operation::MATMUL.name(), Agreed::name);
        match (self.product(), self.reduction()) {
            (Some(product), _) => {
                let dtype = self.matrices()[product.a].dtype;
                let (m, n, k) = (product.m, product.n(), product.k);
                format!("{operation} {m}x{n}x{k} {dtype}")
            }
            // A sum that this rank makes alone.
            (None, Some(Reduction { rows, n, .. })) if agreed.is_none() => {
                format!("{} {rows}x{n}", Operation::QUANTIZE)
            }
            (None, _) => format!(
                "{operation} {}",
                agreed.map_or_else(String::new, Agreed::details)
            ),
        }
    }

    /// True if there is nothing to do because there are no rows. Unless a rank is alone, or ranks exchange blocks, this is
    /// true on all ranks or on none.
    pub fn is_idle(&self) -> bool {
        let Parts {
            arrivals,
            departures,
            tiles,
            requests,
            reduction,
            ..
        } = &self.parts;
        let moves_nothing = arrivals.is_empty() && departures.is_empty();
        moves_nothing && tiles.is_empty() && requests.is_empty() && reduction.is_none()
    }

    /// True if a kernel waits for pushed rows, or would if anything were moved.
    pub fn is_pushed(&self) -> bool {
        let Some(product) = self.product() else {
            return self.handshake() && self.uses(Route::Store);
        };
        if self.is_idle() {
            return false;
        }
        let pushed = if self.routes.is_empty() {
            product.config.route != Route::Pull
        } else {
            !self.uses(Route::Pull)
        };
        self.handshake() && pushed
    }

    /// True if tiles wait for every transfer to this rank. When they have ended, no transfer to it is left.
    pub fn awaits_all(&self) -> bool {
        self.awaits_all
    }

    /// The smallest range that holds every chunk flag of this rank that no tile awaits.
    pub fn unawaited(&self) -> Range<usize> {
        self.unawaited.clone()
    }

    /// The product that the tiles are part of.
    pub fn product(&self) -> Option<&Product> {
        self.parts.product.as_ref()
    }

    /// The blocks that the caller makes, in this order.
    pub fn requests(&self) -> &[Request] {
        &self.parts.requests
    }

    /// The sums of this host's addends that go to other hosts, in the order in which they go.
    pub fn host_sums(&self) -> &[HostSum] {
        &self.parts.host_sums
    }

    /// All sums that are not of a product.
    pub fn reductions(&self) -> impl Iterator<Item = &Reduction> {
        let of_hosts = self.host_sums().iter().map(|of_host| &of_host.sum);
        of_hosts.chain(self.reduction())
    }

    /// The sum that is made when all transfers to this rank have come.
    pub fn reduction(&self) -> Option<&Reduction> {
        self.parts.reduction.as_ref()
    }

    /// All sums: those of the product's blocks, and those that are not of a product.
    pub fn sums(&self) -> impl Iterator<Item = &Sum> {
        let product = self.product().into_iter();
        let blocks = product.flat_map(|product| &product.blocks);
        let of_blocks = blocks.map(|block| &block.sum);
        of_blocks.chain(self.reductions().map(|reduction| &reduction.sum))
    }

    /// True if a sum is quantised.
    pub fn quantizes(&self) -> bool {
        self.sums().any(|sum| sum.scales.is_some())
    }

    /// True if all ranks make all rows, by the same tiles in the same order, before partials are stored and added. An
    /// engine may then store and add tile by tile.
    pub fn is_one_shot(&self) -> bool {
        self.parts.one_shot
    }

    /// Every tile of the output once, in the order in which tiles become ready.
    pub fn tiles(&self) -> &[Tile] {
        &self.parts.tiles
    }

    /// True if some tile's operands wait for chunk flags.
    pub fn has_waiting_tiles(&self) -> bool {
        self.tiles().iter().any(|tile| !tile.flags().is_empty())
    }

    /// The rank whose rows a tile holds, as far as the schedule says.
    ///
    /// If partials are pulled, or sent in one step, the owner is this rank: it makes them. For rows of several ranks,
    /// see [`Schedule::source_of_tile`].
    pub fn owner_of_tile(&self, tile: &Tile) -> usize {
        let adds = self.product().map(|product| {
            let block = product.block(tile);
            // A gateway adds up rows of another rank, as partials.
            !block.sum.addends.is_empty() && block.sum.out != PARTIALS
        });
        let block = tile.block as usize;
        let sent = self.parts.departures.iter();
        let mut sent = sent.filter(|transfer| transfer.produced == Some(block));
        match (adds, sent.next()) {
            (Some(true), _) => self.rank(),
            (_, Some(transfer)) if self.reduction().is_none() => transfer.to,
            _ => self.source_of_tile(tile),
        }
    }

    /// The rank whose rows a tile waits for: the last one if there are several, and this rank if it waits for none.
    pub fn source_of_tile(&self, tile: &Tile) -> usize {
        let last = tile.flags().last();
        last.map_or(self.rank(), |flag| self.sources[flag])
    }
}

/// A rank that pulls says when it has, because then the owner has its rows back. A kernel waits for the flags of pushed
/// and stored rows. If there is no product, a rank that pushes says so too.
fn says_done(parts: &Parts, moved: &Transfer) -> bool {
    moved.from != moved.to
        && match moved.route {
            Route::Pull => true,
            Route::Push => parts.product.is_none(),
            // The rank that receives rows says itself that they have come.
            Route::Store | Route::Net => false,
        }
}
