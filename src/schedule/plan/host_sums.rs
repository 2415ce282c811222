//! Sums over the ranks of several hosts of rows that are made already, or that a caller makes. [`Ways`] has the rules.
//!
//! A gateway adds up its host's addends of a piece when all have come, and then sends their sum on. The sum takes the place
//! of an addend that has come, whose slot is overwritten by the next operation anyway. Where hosts have one rank each,
//! there is nothing to add before.

use super::matrices::{A, PARTIALS};
use super::partials::{Incoming, Piece};
use super::ways::{Way, Ways};
use crate::schedule::{Addend, HostSum, Problem, Reduction, Region, Request, Sum, Transfer};

/// Where a rank's addends are.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Source {
    /// In the input, [M, N].
    Input,
    /// In the first rows of the partials.
    Partials,
    /// There too, where the caller makes them block by block.
    Caller,
}

/// The sums and transfers of a rank.
pub(super) struct SumsOverHosts<'a> {
    problem: &'a Problem,
    rank: usize,
    source: Source,
    /// The columns of a row that move.
    columns: usize,
    ways: Ways<'a>,
    /// By rank: what comes to it.
    incoming: Vec<Incoming>,
}

impl<'a> SumsOverHosts<'a> {
    pub(super) fn new(
        (problem, rank): (&'a Problem, usize),
        source: Source,
        columns: usize,
        ways: Ways<'a>,
    ) -> SumsOverHosts<'a> {
        SumsOverHosts {
            problem,
            rank,
            source,
            columns,
            incoming: ways.incoming(),
            ways,
        }
    }

    /// True if `rank` adds up partials of its host of rows of `owner`, and sends the sum on.
    fn adds_for(&self, rank: usize, owner: usize) -> bool {
        let is_alone = self.problem.layout.world() == self.problem.hosts.count();
        !is_alone && self.ways.is_gateway(rank, owner)
    }

    /// Where each rank has a piece of its own addend.
    fn own_place(&self, piece: &Piece) -> Region {
        let matrix = match self.source {
            Source::Input => A,
            Source::Partials | Source::Caller => PARTIALS,
        };
        Region {
            matrix,
            rows: piece.rows.clone(),
            columns: 0..self.columns,
        }
    }

    fn own_addend(&self, piece: &Piece) -> Addend {
        let Region { matrix, rows, .. } = self.own_place(piece);
        Addend::Rows {
            matrix,
            first: rows.start,
        }
    }

    /// Where gateway `rank` has the sum of its host's addends to a piece.
    fn place_of_sum(&self, rank: usize, piece: &Piece) -> Region {
        let first = self.ways.first_slot(rank, piece);
        Region {
            matrix: PARTIALS,
            rows: first..first + piece.rows.len(),
            columns: 0..self.columns,
        }
    }

    /// What this rank adds up as a gateway, in the order of its pieces.
    pub(super) fn host_sums(&self) -> Vec<HostSum> {
        let rank = self.rank;
        let made = self.ways.made().iter();
        let added = made.filter(|piece| self.adds_for(rank, piece.owner));
        let sum = |piece: &Piece| {
            let out = self.place_of_sum(rank, piece);
            let sum = Sum::plain(out.matrix, out.rows.start);
            HostSum {
                sum: self.reduction(piece, sum),
                flags: self.incoming[rank].flags(piece.owner, &piece.rows),
            }
        };
        added.map(sum).collect()
    }

    /// The sum of this rank's own rows, which is finished and stored as `sum` says. None if it has no rows.
    pub(super) fn own_sum(&self, sum: Sum) -> Option<Reduction> {
        let all = Piece {
            owner: self.rank,
            rows: self.problem.layout.rows_of(self.rank),
        };
        (!all.rows.is_empty()).then(|| self.reduction(&all, sum))
    }

    fn reduction(&self, piece: &Piece, sum: Sum) -> Reduction {
        Reduction {
            rows: piece.rows.len(),
            n: self.problem.n,
            sum: Sum {
                addends: self.ways.addends(piece, self.own_addend(piece)),
                ..sum
            },
        }
    }

    /// The transfers to this rank.
    pub(super) fn arrivals(&self) -> Vec<Transfer> {
        self.transfers(self.ways.arrivals())
    }

    /// The transfers from this rank.
    pub(super) fn departures(&self) -> Vec<Transfer> {
        self.transfers(self.ways.departures())
    }

    fn transfers(&self, ways: Vec<Way>) -> Vec<Transfer> {
        ways.into_iter().map(|way| self.transfer(way)).collect()
    }

    fn transfer(&self, way: Way) -> Transfer {
        let Way { from, number, .. } = way;
        let piece = self.ways.piece(way);
        let is_added = self.adds_for(from, piece.owner);
        let source = if is_added {
            self.place_of_sum(from, piece)
        } else {
            self.own_place(piece)
        };
        let flag = self.incoming[way.to].flag(from, number);
        Transfer {
            produced: (self.source == Source::Caller).then_some(number),
            added: is_added.then(|| self.sums_before(from, number)),
            ..self.ways.transfer(way, source, flag)
        }
    }

    /// How many pieces `rank` adds up as a gateway before its piece `number`.
    fn sums_before(&self, rank: usize, number: usize) -> usize {
        let before = self.ways.made_by(rank)[..number].iter();
        before
            .filter(|piece| self.adds_for(rank, piece.owner))
            .count()
    }

    /// The blocks that the caller of this rank makes.
    pub(super) fn requests(&self) -> Vec<Request> {
        let rank = self.rank;
        let request = |piece: &Piece| Request {
            owner: piece.owner,
            rows: piece.rows.clone(),
            place: self.own_place(piece),
            addends: if piece.owner == rank {
                self.incoming[rank].flags(rank, &piece.rows)
            } else {
                0..0
            },
        };
        let made = self.ways.made().iter();
        let made = made.filter(|_| self.source == Source::Caller);
        made.map(request).collect()
    }
}
