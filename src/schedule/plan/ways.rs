//! Routes of partial sums across hosts.
//!
//! A partial of a peer's rows goes to the peer if that is of the same host. Otherwise it goes to the **gateway**, the
//! rank of the own host that has the peer's place. The gateway adds up the partials of its host, and sends their sum
//! over its rail. So each row of the sum crosses the network once a host.
//!
//! A rank adds up host by host, in the order of the hosts: of its own host each rank's partial, in the order of the
//! ranks, and of another host the sum that its gateway has made in that order and has rounded. So the bits depend on
//! which host owns a row, and neither on the configuration nor on what comes first.
//!
//! No rank waits for another in a circle. A gateway's sums wait for partials that its neighbours make for the same host,
//! and all ranks make those before they wait for any of that host. Sums of own rows come last.

use std::ops::Range;

use super::chunks::RAIL_BYTES;
use super::partials::{Incoming, Partial, Partials, Piece};
use super::pieces::chunk_rows_of_block;
use crate::route::Route;
use crate::schedule::plan::matrices::PARTIALS;
use crate::schedule::transfer::first_turn;
use crate::schedule::{Addend, Hosts, Layout, Move, Problem, Region, Transfer};

/// The ways of partials.
pub(super) struct Ways<'a> {
    rank: usize,
    layout: &'a Layout,
    hosts: &'a Hosts,
    partials: Partials,
    /// By rank: the pieces that it makes.
    made: Vec<Vec<Piece>>,
}

/// A piece on its way.
#[derive(Clone, Copy)]
pub(super) struct Way {
    pub(super) from: usize,
    pub(super) to: usize,
    /// Its number among those that `from` makes.
    pub(super) number: usize,
}

impl<'a> Ways<'a> {
    /// `cut` cuts the rows of the second rank, as the first one makes them.
    pub(super) fn new(
        problem: &'a Problem,
        rank: usize,
        partials: Partials,
        cut: impl Fn(usize, usize) -> Vec<Range<usize>>,
    ) -> Ways<'a> {
        let (layout, hosts) = (&problem.layout, &problem.hosts);
        let pieces = |maker: usize| {
            let owners = owners_in_order(hosts, maker, layout.world());
            let pieces = owners.into_iter().flat_map(|owner| {
                let cut = cut(maker, owner).into_iter();
                cut.map(move |rows| Piece { owner, rows })
            });
            pieces.collect()
        };
        Ways {
            rank,
            layout,
            hosts,
            partials,
            made: (0..layout.world()).map(pieces).collect(),
        }
    }

    /// The pieces that this rank makes, in their order.
    pub(super) fn made(&self) -> &[Piece] {
        self.made_by(self.rank)
    }

    /// The pieces that a rank makes, in their order.
    pub(super) fn made_by(&self, rank: usize) -> &[Piece] {
        &self.made[rank]
    }

    /// The piece that is on a way.
    pub(super) fn piece(&self, way: Way) -> &Piece {
        &self.made[way.from][way.number]
    }

    /// The rank to which `from` sends its partials of rows of `owner`. None if they are its own.
    pub(super) fn goes_to(&self, from: usize, owner: usize) -> Option<usize> {
        let gateway = self.hosts.beside(from, owner);
        let to = if gateway == from { owner } else { gateway };
        (to != from).then_some(to)
    }

    /// True if `rank` adds up its host's partials of rows of `owner`, and sends the sum on.
    pub(super) fn is_gateway(&self, rank: usize, owner: usize) -> bool {
        let to = self.goes_to(rank, owner);
        to.is_some_and(|to| !self.hosts.share(rank, to))
    }

    fn neighbours(&self, rank: usize) -> impl DoubleEndedIterator<Item = usize> {
        self.hosts.neighbours(rank, self.layout.world())
    }

    /// What comes to each rank: partials of its own rows and, as a gateway, of those of its rail.
    pub(super) fn incoming(&self) -> Vec<Incoming> {
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

    /// The ways to this rank, in the order in which pieces should come: for its rail, from its neighbours, over its rail.
    pub(super) fn arrivals(&self) -> Vec<Way> {
        let to = self.rank;
        let of_neighbours = |owner: usize| self.neighbours(to).map(move |from| (from, owner));
        let for_rail = self.hosts.rail(to).flat_map(of_neighbours);
        let over_rail = self.hosts.rail(to).rev().map(|from| (from, to));
        let all = for_rail.chain(of_neighbours(to)).chain(over_rail);
        let ways = all.flat_map(|(from, owner)| {
            let made = self.made[from].iter().enumerate();
            let made = made.filter(move |(_, piece)| piece.owner == owner);
            made.map(move |(number, _)| Way { from, to, number })
        });
        ways.collect()
    }

    /// The ways from this rank, in the order in which it makes the pieces.
    pub(super) fn departures(&self) -> Vec<Way> {
        let from = self.rank;
        let made = self.made().iter().enumerate();
        let ways = made.filter_map(|(number, piece)| {
            let to = self.goes_to(from, piece.owner)?;
            Some(Way { from, to, number })
        });
        ways.collect()
    }

    /// The transfer of a piece to its slot. `source` is where the piece is at the rank that sends it, and `flag` its flag.
    pub(super) fn transfer(&self, way: Way, source: Region, flag: usize) -> Transfer {
        let Way { from, to, .. } = way;
        let piece = self.piece(way);
        let slot = self.slot(from, to, piece.owner) + self.offset(piece);
        let route = self.hosts.route(from, to, Route::Push);
        let to_slot = Region {
            matrix: PARTIALS,
            rows: slot..slot + piece.rows.len(),
            columns: source.columns.clone(),
        };
        let moved = Move {
            from: source,
            to: to_slot,
        };
        let step = self.hosts.steps(from, to);
        Transfer {
            turn: match route {
                Route::Net => first_turn(step) + self.part(way),
                _ => 0,
            },
            last_step: route == Route::Net && step + 1 == self.hosts.count(),
            ..Transfer::of_own([from, to], moved, route, flag)
        }
    }

    /// The number of a piece among those that its rank makes for the same owner, which follow one another.
    fn part(&self, way: Way) -> usize {
        let owner = self.piece(way).owner;
        let before = self.made[way.from][..way.number].iter().rev();
        before.take_while(|piece| piece.owner == owner).count()
    }

    /// How many rows of the same owner stand before a piece.
    pub(super) fn offset(&self, piece: &Piece) -> usize {
        piece.rows.start - self.layout.rows_of(piece.owner).start
    }

    /// The first row of the slot, in the memory of `to`, for what `from` sends of the rows of `owner`.
    ///
    /// The addends of a piece lie one slot apart, in the order in which they are added: first those of own rows, and then
    /// as a gateway, owner by owner, those of the neighbours. So there is a slot less than there are ranks.
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
            let neighbours = self.ranks_of_host(self.hosts.host_of(to));
            let before = self.place_on_rail(to, owner) * (neighbours.len() - 1);
            of_own.len() - 1 + before + number(&neighbours, from)
        };
        self.partials.numbered_slot(number)
    }

    /// The place of `owner` among the other ranks of the rail of `rank`, in the order of ranks.
    fn place_on_rail(&self, rank: usize, owner: usize) -> usize {
        self.hosts.rail(rank).filter(|&peer| peer < owner).count()
    }

    /// The first row of the slot, in the memory of gateway `rank`, for what comes first in the order of the ranks to a piece
    /// of another host's rows.
    pub(super) fn first_slot(&self, rank: usize, piece: &Piece) -> usize {
        let mut ranks = self
            .hosts
            .ranks_of(self.hosts.host_of(rank), self.layout.world());
        let first = ranks.find(|&other| other != rank).unwrap_or(rank);
        self.slot(first, rank, piece.owner) + self.offset(piece)
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
        let of_host = |host: usize| {
            if host == own {
                self.ranks_of_host(host)
            } else {
                gateway(host).into_iter().collect()
            }
        };
        (0..self.hosts.count()).flat_map(of_host).collect()
    }

    /// What this rank adds up to a piece of its own rows, or of rows of its rail. `own` is its own addend.
    pub(super) fn addends(&self, piece: &Piece, own: Addend) -> Vec<Addend> {
        let rank = self.rank;
        let added = if piece.owner == rank {
            self.added_by_owner(rank)
        } else {
            self.ranks_of_host(self.hosts.host_of(rank))
        };
        let addend = |from: usize| {
            if from == rank {
                own
            } else {
                Addend::Rows {
                    matrix: PARTIALS,
                    first: self.slot(from, rank, piece.owner) + self.offset(piece),
                }
            }
        };
        added.into_iter().map(addend).collect()
    }
}

/// The owners of the rows that a rank makes, in this order: host by host, from the next host on, that host's ranks, and
/// one host later the rank of its rail, for which its neighbours' partials have come by then. Then its neighbours, and
/// itself.
fn owners_in_order(hosts: &Hosts, rank: usize, world: usize) -> Vec<usize> {
    let rail: Vec<usize> = hosts.rail(rank).collect();
    let mut owners = Vec::with_capacity(world);
    for step in 0..=rail.len() {
        let near = rail.get(step).map(|&peer| hosts.neighbours(peer, world));
        let over_rail = step.checked_sub(1).map(|before| rail[before]);
        owners.extend(near.into_iter().flatten().chain(over_rail));
    }
    owners.extend(hosts.neighbours(rank, world));
    owners.push(rank);
    owners
}

/// Rows of another host, as they go to gateways and over the network, in at most `most` parts. `row` is the bytes of a row,
/// and `height` the rows at whose multiples they are cut.
pub(super) fn cut_for_rail(
    most: usize,
    rows: Range<usize>,
    row: usize,
    height: usize,
) -> Vec<Range<usize>> {
    let bytes = rows.len().saturating_mul(row);
    chunk_rows_of_block(rows, (bytes / RAIL_BYTES).clamp(1, most), height).collect()
}
