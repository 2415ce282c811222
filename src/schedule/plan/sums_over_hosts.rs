//! The planner of sums over the ranks of several hosts.
//!
//! A partial of a peer's rows goes to the peer if that is of the same host. Otherwise it goes to the **gateway**, the
//! rank of the own host that has the peer's place. The gateway adds up the partials of its host, and sends their sum
//! over its rail. So each row of the sum crosses the network once a host.
//!
//! A rank adds up host by host, in the order of the hosts: of its own host each rank's partial, in the order of the
//! ranks, and of another host the sum that its gateway has made in that order and has rounded. So the bits depend on
//! which host owns a row, and neither on the configuration nor on what comes first.
//!
//! No rank waits for another in a circle. A gateway's tiles wait for tiles that its neighbours make for the same host,
//! and all ranks make those before they wait for any of that host. The tiles of own rows stand last.

use std::collections::BTreeMap;
use std::ops::Range;

use smallvec::smallvec;

use super::chunks::RAIL_BYTES;
use super::pieces::{SumPlan, chunk_rows_of_block};
use crate::refusal::Result;
use crate::route::Route;
use crate::schedule::layout::MAX_CHUNKS;
use crate::schedule::limits::require;
use crate::schedule::plan::matrices::{A, PARTIALS};
use crate::schedule::plan::partials::Piece;
use crate::schedule::plan::tile_order;
use crate::schedule::{Addend, Hosts, Layout, Move, OutputBlock, Schedule, Sum, Transfer};

/// Gives each rank its rows of the sum. If all ranks get all rows, a gather has to follow.
///
/// # Errors
/// As the planner's within one host; `Refusal::Unsupported` unless partials are pushed.
pub(super) fn reduce_scatter(planner: &SumPlan) -> Result<Schedule> {
    let what = "over several hosts Config::route of a sum must be Route::Push";
    require(what, planner.config.route == Route::Push)?;
    let sums = SumsOverHosts::of(planner);
    let rank = planner.rank;
    let peers = sums
        .neighbours(rank)
        .chain(planner.problem.hosts.rail(rank));
    let all_come: BTreeMap<usize, Vec<Come>> = peers
        .chain([rank])
        .map(|to| (to, sums.come_to(to)))
        .collect();
    let (mut rows, mut blocks, mut departures) = (Vec::new(), Vec::new(), Vec::new());
    for (block, piece) in sums.pieces(rank).iter().enumerate() {
        let owner = piece.owner;
        let (to, sum) = match sums.goal(rank, owner) {
            Goal::Own => (None, sums.own_sum(piece)),
            Goal::Rail => (Some(owner), sums.sum_of_host(piece)),
            Goal::Near(to) => (Some(to), sums.partial(piece)),
        };
        let waits = !sum.addends.is_empty();
        let flags = |tile: &Range<usize>| match waits {
            true => flags_of(&all_come[&rank], owner, tile),
            false => 0..0,
        };
        planner.tile_rows(block, &piece.rows, flags, &mut rows);
        departures.extend(to.map(|to| sums.transfer(rank, to, &all_come[&to], piece, block)));
        blocks.push(OutputBlock {
            rows: piece.rows.clone(),
            weight: 0,
            sum,
        });
    }
    let product = planner.product(A, blocks);
    let tiles = tile_order::walk(rank, &product, &rows)?;
    let product = Some((product, tiles));
    let arrivals = sums.arrivals(rank, &all_come[&rank]);
    planner.schedule(true, arrivals, departures, product, None)
}

/// Where a rank's partial of rows goes.
enum Goal {
    /// Nowhere: the rows are its own.
    Own,
    /// Over its rail, with those of its neighbours.
    Rail,
    /// To a rank of its host: the owner, or the gateway to it.
    Near(usize),
}

/// A piece that comes to a rank, and the rank from which it comes.
type Come = (usize, Piece);

/// The ways of partials.
struct SumsOverHosts<'a> {
    planner: &'a SumPlan<'a>,
    layout: &'a Layout,
    hosts: &'a Hosts,
}

impl<'a> SumsOverHosts<'a> {
    fn of(planner: &'a SumPlan<'a>) -> SumsOverHosts<'a> {
        SumsOverHosts {
            planner,
            layout: &planner.problem.layout,
            hosts: &planner.problem.hosts,
        }
    }

    fn goal(&self, rank: usize, owner: usize) -> Goal {
        match self.hosts.beside(rank, owner) {
            _ if rank == owner => Goal::Own,
            gateway if gateway == rank => Goal::Rail,
            gateway => Goal::Near(gateway),
        }
    }

    fn neighbours(&self, rank: usize) -> impl DoubleEndedIterator<Item = usize> {
        self.hosts.neighbours(rank, self.layout.world())
    }

    /// The pieces that a rank makes, in this order: host by host, from the next host on, the rows of that host's ranks,
    /// and one host later those of its rail, for which its neighbours' partials have come by then. Then those of its
    /// neighbours, and its own.
    fn pieces(&self, rank: usize) -> Vec<Piece> {
        let rail: Vec<usize> = self.hosts.rail(rank).collect();
        let mut pieces = Vec::new();
        for step in 0..=rail.len() {
            let near = rail.get(step).map(|&peer| self.neighbours(peer));
            let over_rail = step.checked_sub(1).map(|before| rail[before]);
            let owners = near.into_iter().flatten().chain(over_rail);
            pieces.extend(owners.flat_map(|owner| self.cut_for_rail(owner)));
        }
        pieces.extend(self.neighbours(rank).flat_map(|owner| self.cut(owner)));
        let rows = self.layout.rows_of(rank);
        if !rows.is_empty() {
            pieces.push(Piece { owner: rank, rows });
        }
        pieces
    }

    /// The rows of `owner`, as its neighbours send them.
    fn cut(&self, owner: usize) -> impl Iterator<Item = Piece> + use<> {
        self.cut_into(owner, self.planner.config.chunking.count)
    }

    /// The rows of `owner`, as they go to gateways and over the network.
    fn cut_for_rail(&self, owner: usize) -> impl Iterator<Item = Piece> + use<> {
        let width = self.planner.problem.dtypes.partials.bytes();
        let row = self.planner.partials.columns().saturating_mul(width);
        let bytes = self.layout.rows_of(owner).len().saturating_mul(row);
        self.cut_into(owner, (bytes / RAIL_BYTES).clamp(1, MAX_CHUNKS))
    }

    fn cut_into(&self, owner: usize, count: usize) -> impl Iterator<Item = Piece> + use<> {
        let height = self.planner.config.entry_rows();
        let rows = chunk_rows_of_block(self.layout.rows_of(owner), count, height);
        rows.map(move |rows| Piece { owner, rows })
    }

    /// What comes to a rank, by flag.
    ///
    /// Partials of its own rows are numbered by first row and then by sender, so that the flags of a tile are one range.
    /// The range may hold flags of smaller pieces too, which come before those that the tile needs. Those for which it
    /// is the gateway follow, owner by owner and piece by piece.
    fn come_to(&self, rank: usize) -> Vec<Come> {
        let near = self.neighbours(rank);
        let near = near.flat_map(|from| self.cut(rank).map(move |piece| (from, piece)));
        let rail = self.hosts.rail(rank);
        let far = rail.flat_map(|from| self.cut_for_rail(rank).map(move |piece| (from, piece)));
        let mut come: Vec<_> = near.chain(far).collect();
        come.sort_by_key(|(from, piece)| (piece.rows.start, *from));
        for piece in self
            .hosts
            .rail(rank)
            .flat_map(|owner| self.cut_for_rail(owner))
        {
            let from = self.neighbours(rank).map(|from| {
                let rows = piece.rows.clone();
                (from, Piece { rows, ..piece })
            });
            come.extend(from);
        }
        come
    }

    /// The transfers to a rank, in the order in which they are made: for its rail, from its neighbours, over its rail.
    fn arrivals(&self, rank: usize, come: &[Come]) -> Vec<Transfer> {
        let of_neighbours = |owner: usize| self.neighbours(rank).map(move |from| (from, owner));
        let for_rail = self.hosts.rail(rank).flat_map(of_neighbours);
        let over_rail = self.hosts.rail(rank).rev().map(|from| (from, rank));
        let all = for_rail.chain(of_neighbours(rank)).chain(over_rail);
        let mut made: BTreeMap<usize, Vec<Piece>> = BTreeMap::new();
        let mut transfers = Vec::new();
        for (from, owner) in all {
            let pieces = made.entry(from).or_insert_with(|| self.pieces(from));
            let pieces = pieces.iter().enumerate();
            let pieces = pieces.filter(|(_, piece)| piece.owner == owner);
            transfers
                .extend(pieces.map(|(block, piece)| self.transfer(from, rank, come, piece, block)));
        }
        transfers
    }

    /// The transfer of a piece, which is a block of the product of `from`.
    /// `come`: what comes to `to`.
    fn transfer(
        &self,
        from: usize,
        to: usize,
        come: &[Come],
        piece: &Piece,
        block: usize,
    ) -> Transfer {
        let Piece { owner, rows } = piece;
        let first = self.planner.partials.own(*owner, rows.start);
        let region = |first: usize| self.planner.partial(first..first + rows.len());
        let of_piece = |(sender, come): &Come| {
            (*sender, come.owner, come.rows.start) == (from, *owner, rows.start)
        };
        Transfer {
            from,
            to,
            source: from,
            regions: smallvec![Move {
                from: region(first),
                to: region(self.slot(from, to, *owner) + self.offset(piece)),
            }],
            after: 0..0,
            produced: Some(block),
            // A piece that does not come to the rank has no flag. A schedule that names it is refused.
            flag: come.iter().position(of_piece).unwrap_or(usize::MAX),
            route: match self.hosts.share(from, to) {
                true => Route::Push,
                false => self.hosts.rail_route(),
            },
        }
    }

    /// The first row of the slot, in the memory of `to`, for what `from` sends of the rows of `owner`.
    ///
    /// A gateway has a slot for each neighbour and owner: that of the rank on the owner's host beside the neighbour,
    /// which sends nothing to the gateway itself.
    fn slot(&self, from: usize, to: usize, owner: usize) -> usize {
        let sender = if owner == to {
            from
        } else {
            self.hosts.beside(owner, from)
        };
        self.planner.partials.slot(sender, to)
    }

    /// How many rows of the same owner stand before a piece.
    fn offset(&self, piece: &Piece) -> usize {
        piece.rows.start - self.layout.rows_of(piece.owner).start
    }

    /// This rank's partial, which it sends as it is.
    fn partial(&self, piece: &Piece) -> Sum {
        let first = self.planner.partials.own(piece.owner, piece.rows.start);
        self.planner.own_partials(first)
    }

    /// The sum of the partials of this rank's host, which it sends over its rail.
    fn sum_of_host(&self, piece: &Piece) -> Sum {
        let host = self.hosts.host_of(self.planner.rank);
        let ranks = self.hosts.ranks_of(host, self.layout.world());
        Sum {
            addends: ranks.map(|from| self.addend(from, piece)).collect(),
            ..self.partial(piece)
        }
    }

    /// The sum of all partials of this rank's own rows.
    fn own_sum(&self, piece: &Piece) -> Sum {
        let (rank, world) = (self.planner.rank, self.layout.world());
        let own = self.hosts.host_of(rank);
        let of_host = |host: usize| {
            let gateway = self
                .hosts
                .rail(rank)
                .find(|&peer| self.hosts.host_of(peer) == host);
            let near = (host == own).then(|| self.hosts.ranks_of(host, world));
            near.into_iter().flatten().chain(gateway)
        };
        let from = (0..self.hosts.count()).flat_map(of_host);
        Sum {
            addends: from.map(|from| self.addend(from, piece)).collect(),
            ..self
                .planner
                .finished(self.planner.place() + self.offset(piece))
        }
    }

    /// What `from` adds to a piece that this rank adds up.
    fn addend(&self, from: usize, piece: &Piece) -> Addend {
        let rank = self.planner.rank;
        match from == rank {
            true => Addend::Product,
            false => Addend::Rows {
                matrix: PARTIALS,
                first: self.slot(from, rank, piece.owner) + self.offset(piece),
            },
        }
    }
}

/// The flags of the partials of these rows of `owner`.
fn flags_of(come: &[Come], owner: usize, rows: &Range<usize>) -> Range<usize> {
    let is_needed = |(_, piece): &Come| {
        piece.owner == owner && piece.rows.start < rows.end && rows.start < piece.rows.end
    };
    let begin = come.iter().position(is_needed).unwrap_or(0);
    let last = come.iter().rposition(is_needed);
    begin..last.map_or(begin, |last| last + 1)
}
