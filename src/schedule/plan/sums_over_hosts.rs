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

use std::ops::Range;

use smallvec::smallvec;

use super::chunks::{RAIL_BYTES, first_turn, most_on_rail};
use super::pieces::{SumPlan, chunk_rows_of_block};
use crate::refusal::Result;
use crate::route::Route;
use crate::schedule::limits::require;
use crate::schedule::plan::matrices::{A, PARTIALS};
use crate::schedule::plan::partials::{Incoming, Partial, Piece};
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
    let incoming = sums.all_incoming();
    let (mut rows, mut blocks, mut departures) = (Vec::new(), Vec::new(), Vec::new());
    for (block, piece) in sums.made[rank].iter().enumerate() {
        let sum = sums.sum(piece);
        let waits = !sum.addends.is_empty();
        let flags = |tile: &Range<usize>| match waits {
            true => incoming[rank].flags(piece.owner, tile),
            false => 0..0,
        };
        planner.tile_rows(block, &piece.rows, flags, &mut rows);
        let to = sums.goes_to(rank, piece.owner);
        departures.extend(to.map(|to| sums.transfer([rank, to], &incoming[to], piece, block)));
        blocks.push(OutputBlock {
            rows: piece.rows.clone(),
            weight: 0,
            sum,
        });
    }
    let product = planner.product(A, blocks);
    let tiles = tile_order::walk(rank, &product, &rows)?;
    let product = Some((product, tiles));
    let arrivals = sums.arrivals(&incoming[rank]);
    planner.schedule(true, arrivals, departures, product, None)
}

/// The ways of partials.
struct SumsOverHosts<'a> {
    planner: &'a SumPlan<'a>,
    layout: &'a Layout,
    hosts: &'a Hosts,
    /// By rank: the pieces that it makes.
    made: Vec<Vec<Piece>>,
}

impl<'a> SumsOverHosts<'a> {
    fn of(planner: &'a SumPlan<'a>) -> SumsOverHosts<'a> {
        let layout = &planner.problem.layout;
        let mut sums = SumsOverHosts {
            planner,
            layout,
            hosts: &planner.problem.hosts,
            made: Vec::new(),
        };
        sums.made = (0..layout.world()).map(|rank| sums.pieces(rank)).collect();
        sums
    }

    /// The rank to which `from` sends its partials of rows of `owner`. None if they are its own.
    fn goes_to(&self, from: usize, owner: usize) -> Option<usize> {
        let gateway = self.hosts.beside(from, owner);
        let to = if gateway == from { owner } else { gateway };
        (to != from).then_some(to)
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
        let most = most_on_rail(self.hosts.count() - 1);
        self.cut_into(owner, (bytes / RAIL_BYTES).clamp(1, most))
    }

    fn cut_into(&self, owner: usize, count: usize) -> impl Iterator<Item = Piece> + use<> {
        let height = self.planner.config.entry_rows();
        let rows = chunk_rows_of_block(self.layout.rows_of(owner), count, height);
        rows.map(move |rows| Piece { owner, rows })
    }

    /// What comes to each rank: partials of its own rows and, as a gateway, of those of its rail.
    fn all_incoming(&self) -> Vec<Incoming> {
        let mut partials: Vec<Vec<Partial>> = vec![Vec::new(); self.layout.world()];
        for (from, made) in self.made.iter().enumerate() {
            for (number, piece) in made.iter().enumerate() {
                if let Some(to) = self.goes_to(from, piece.owner) {
                    partials[to].push((from, number, piece.clone()));
                }
            }
        }
        let partials = partials.into_iter();
        partials
            .map(|to| Incoming::of_partials(to.into_iter()))
            .collect()
    }

    /// The transfers to this rank, in the order in which they are made: for its rail, from its neighbours, over its rail.
    fn arrivals(&self, incoming: &Incoming) -> Vec<Transfer> {
        let rank = self.planner.rank;
        let of_neighbours = |owner: usize| self.neighbours(rank).map(move |from| (from, owner));
        let for_rail = self.hosts.rail(rank).flat_map(of_neighbours);
        let over_rail = self.hosts.rail(rank).rev().map(|from| (from, rank));
        let all = for_rail.chain(of_neighbours(rank)).chain(over_rail);
        let transfers = all.flat_map(|(from, owner)| {
            let made = self.made[from].iter().enumerate();
            let made = made.filter(move |(_, piece)| piece.owner == owner);
            made.map(move |(block, piece)| self.transfer([from, rank], incoming, piece, block))
        });
        transfers.collect()
    }

    /// The transfer of a piece, which is a block of the product of `from`. `incoming`: what comes to `to`.
    fn transfer(
        &self,
        [from, to]: [usize; 2],
        incoming: &Incoming,
        piece: &Piece,
        block: usize,
    ) -> Transfer {
        let Piece { owner, rows } = piece;
        let region = |first: usize| self.planner.partial(first..first + rows.len());
        let own = self.planner.partials.own(*owner, rows.start);
        let slot = self.slot(from, to, *owner) + self.offset(piece);
        let route = self.hosts.route(from, to, Route::Push);
        Transfer {
            from,
            to,
            source: from,
            regions: smallvec![Move {
                from: region(own),
                to: region(slot),
            }],
            after: 0..0,
            produced: Some(block),
            flag: incoming.flag(from, block),
            route,
            turn: match route {
                Route::Net => first_turn(self.hosts.steps(from, to)) + self.part(from, block),
                _ => 0,
            },
        }
    }

    /// The first row of the slot, in the memory of `to`, for what `from` sends of the rows of `owner`.
    ///
    /// The addends of a piece lie one slot apart, in the order in which they are added: first those of own rows, and then
    /// as a gateway, owner by owner, those of the neighbours.
    fn slot(&self, from: usize, to: usize, owner: usize) -> usize {
        let number = |added: &[usize], from: usize| {
            let others = added.iter().filter(|&&other| other != to);
            let before = others.take_while(|&&other| other != from);
            before.count()
        };
        let of_own = self.added_by_owner(to);
        let number = if owner == to {
            number(&of_own, from)
        } else {
            let mut owners: Vec<usize> = self.hosts.rail(to).collect();
            owners.sort_unstable();
            let neighbours = self.ranks_of_host(self.hosts.host_of(to));
            let before = number(&owners, owner) * (neighbours.len() - 1);
            of_own.len() - 1 + before + number(&neighbours, from)
        };
        self.planner.partials.numbered_slot(number)
    }

    /// The ranks of a host, in their order.
    fn ranks_of_host(&self, host: usize) -> Vec<usize> {
        self.hosts.ranks_of(host, self.layout.world()).collect()
    }

    /// The ranks whose partials, or hosts' partials, a rank adds up for its own rows, in this order: host by host, of its
    /// own host all, and of another host the gateway.
    fn added_by_owner(&self, rank: usize) -> Vec<usize> {
        let own = self.hosts.host_of(rank);
        let gateway = |host: usize| {
            let mut rail = self.hosts.rail(rank);
            rail.find(|&peer| self.hosts.host_of(peer) == host)
        };
        let of_host = |host: usize| match host == own {
            true => self.ranks_of_host(host),
            false => gateway(host).into_iter().collect(),
        };
        (0..self.hosts.count()).flat_map(of_host).collect()
    }

    /// The number of a piece among those that `from` makes for the same owner, which follow one another.
    fn part(&self, from: usize, block: usize) -> usize {
        let made = &self.made[from];
        let before = made[..block].iter().rev();
        before
            .take_while(|piece| piece.owner == made[block].owner)
            .count()
    }

    /// How many rows of the same owner stand before a piece.
    fn offset(&self, piece: &Piece) -> usize {
        piece.rows.start - self.layout.rows_of(piece.owner).start
    }

    /// What this rank makes of a piece: the sum of its own rows, the sum of its host's partials, which goes over its rail,
    /// or its partial alone, which goes to a rank of its host.
    fn sum(&self, piece: &Piece) -> Sum {
        let rank = self.planner.rank;
        let first = self.planner.partials.own(piece.owner, piece.rows.start);
        let partial = self.planner.own_partials(first);
        match self.goes_to(rank, piece.owner) {
            None => self.own_sum(piece),
            Some(to) if self.hosts.share(rank, to) => partial,
            Some(_) => Sum {
                addends: self.addends(&self.ranks_of_host(self.hosts.host_of(rank)), piece),
                ..partial
            },
        }
    }

    /// What these ranks add to a piece that this rank adds up.
    fn addends(&self, ranks: &[usize], piece: &Piece) -> Vec<Addend> {
        ranks.iter().map(|&from| self.addend(from, piece)).collect()
    }

    /// The sum of all partials of this rank's own rows.
    fn own_sum(&self, piece: &Piece) -> Sum {
        let first = self.planner.place() + self.offset(piece);
        Sum {
            addends: self.addends(&self.added_by_owner(self.planner.rank), piece),
            ..self.planner.finished(first)
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
