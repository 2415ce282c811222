//! Sums of rows over the ranks of a host, and over the few bytes of several.

use std::ops::Range;

use super::{CollectivePlan, SumPlace, over_hosts};
use crate::Result;
use crate::schedule::plan::chunks::Part;
use crate::schedule::plan::matrices::{A, OUT, PARTIALS};
use crate::schedule::plan::partials::{Incoming, Partials, Piece, among_others};
use crate::schedule::plan::tile_order::ring;
use crate::schedule::{Addend, Move, Reduction, Request, Schedule, Sum, Transfer};

impl CollectivePlan<'_> {
    /// Gives each rank its rows of the sum.
    pub(super) fn sums(&self, place: SumPlace) -> Result<Schedule> {
        let &CollectivePlan { problem, rank, .. } = self;
        if problem.hosts.count() > 1 {
            return over_hosts::sums(self, place);
        }
        let (layout, world) = (&problem.layout, self.world());
        let own = layout.rows_of(rank);
        let (first, out) = place.of(layout, rank);
        let addends = AddendTransfers::new(self);
        let senders = (1..world).map(|step| (rank + world - step) % world);
        let mut parts = self.parts([layout.m(), out], &addends.room);
        let arrivals = senders.flat_map(|from| addends.sent(from, Some(rank)));
        parts.arrivals = arrivals.collect();
        parts.departures = addends.sent(rank, None).collect();
        parts.requests = addends.requests();
        parts.reduction = (!own.is_empty()).then(|| {
            let added = (0..world).map(|from| addends.of_rank(from, own.start));
            self.reduction(own.len(), first, added.collect())
        });
        Schedule::new(parts)
    }

    /// Gives all ranks all sums, of which each rank adds up all.
    pub(super) fn all_sums(&self) -> Result<Schedule> {
        let &CollectivePlan { problem, rank, .. } = self;
        let (m, world) = (problem.layout.m(), self.world());
        let room = Partials::of_callers(problem, 0, m);
        let cut = self.cut(0..m);
        let transfers = |from: usize, to: usize| {
            let (slot, before) = (room.slot(from, to), among_others(from, to) * cut.len());
            let parts = cut.iter().enumerate();
            let transfer = move |(part, Part { rows, columns }): (usize, &Part)| {
                let moved = Move {
                    from: self.part(A, rows.clone(), columns),
                    to: self.part(PARTIALS, slot + rows.start..slot + rows.end, columns),
                };
                self.transfer([from, to], moved, part, before + part)
            };
            parts.map(transfer).collect::<Vec<_>>()
        };
        let addend = |from: usize| {
            if from == rank {
                Addend::Rows {
                    matrix: A,
                    first: 0,
                }
            } else {
                Addend::Rows {
                    matrix: PARTIALS,
                    first: room.slot(from, rank),
                }
            }
        };
        let mut parts = self.parts([m, m], &room);
        let senders = (1..world).map(|step| (rank + world - step) % world);
        parts.arrivals = senders.flat_map(|from| transfers(from, rank)).collect();
        let receivers = ring(rank, world);
        parts.departures = receivers.flat_map(|to| transfers(rank, to)).collect();
        parts.reduction = (m > 0).then(|| self.reduction(m, 0, (0..world).map(addend).collect()));
        Schedule::new(parts)
    }

    /// The sum of this number of rows of these addends, which is stored from row `first` of OUT on.
    fn reduction(&self, rows: usize, first: usize, addends: Vec<Addend>) -> Reduction {
        Reduction {
            rows,
            n: self.problem.n,
            sum: Sum {
                addends,
                ..Sum::plain(OUT, first)
            },
        }
    }

    /// The parts of this rank's own rows. The last is a quarter. When it is made, only adding it up is left to do.
    pub(super) fn cut_own(&self, rows: Range<usize>) -> Vec<Part> {
        let height = self.config.entry_rows();
        let quarter = (rows.len() / 4).next_multiple_of(height);
        let last = rows.end.saturating_sub(quarter).max(rows.start);
        let parts = [rows.start..last, last..rows.end].into_iter();
        let parts = parts.filter(|rows| !rows.is_empty());
        let columns = 0..self.problem.n;
        parts
            .map(|rows| Part {
                rows,
                columns: columns.clone(),
            })
            .collect()
    }
}

/// The transfers of addends to the owners of rows, which add them up.
struct AddendTransfers<'a> {
    plan: &'a CollectivePlan<'a>,
    /// The number of the matrix that rows are sent from.
    source: usize,
    room: Partials,
    /// The pieces that each rank makes: first the other ranks' rows, then its own.
    made: Vec<Vec<Piece>>,
    /// The columns of each of these pieces.
    columns: Vec<Vec<Range<usize>>>,
    /// The transfers to each rank.
    incoming: Vec<Incoming>,
}

impl<'a> AddendTransfers<'a> {
    fn new(plan: &'a CollectivePlan<'a>) -> AddendTransfers<'a> {
        let (layout, world) = (&plan.problem.layout, plan.world());
        let most = layout.rows().into_iter().max().unwrap_or(0);
        let (source, callers) = if plan.is_produced() {
            (PARTIALS, layout.m())
        } else {
            (A, 0)
        };
        let pieces = |rank: usize| -> (Vec<Piece>, Vec<Range<usize>>) {
            let owners = ring(rank, world).chain([rank]);
            let pieces = owners.flat_map(|owner| {
                let rows = layout.rows_of(owner);
                let parts = if owner == rank {
                    plan.cut_own(rows)
                } else {
                    plan.cut(rows)
                };
                parts
                    .into_iter()
                    .map(move |Part { rows, columns }| (Piece { owner, rows }, columns))
            });
            pieces.unzip()
        };
        let (made, columns): (Vec<_>, Vec<_>) = (0..world).map(pieces).unzip();
        AddendTransfers {
            plan,
            source,
            room: Partials::of_callers(plan.problem, callers, most),
            incoming: (0..world).map(|to| Incoming::of(&made, to)).collect(),
            made,
            columns,
        }
    }

    fn transfer(&self, from: usize, number: usize, piece: &Piece) -> Transfer {
        let Piece { owner, rows } = piece;
        let before = rows.start - self.plan.problem.layout.rows_of(*owner).start;
        let slot = self.room.slot(from, *owner) + before;
        let columns = &self.columns[from][number];
        let moved = Move {
            from: self.plan.part(self.source, rows.clone(), columns),
            to: self.plan.part(PARTIALS, slot..slot + rows.len(), columns),
        };
        let flag = self.incoming[*owner].flag(from, number);
        // Pieces of one owner follow one another.
        let before = self.made[from][..number].iter().rev();
        let part = before.take_while(|piece| piece.owner == *owner).count();
        Transfer {
            produced: self.plan.is_produced().then_some(number),
            ..self.plan.transfer([from, *owner], moved, part, flag)
        }
    }

    /// The transfers from `from` to one rank, or to all.
    fn sent(&self, from: usize, to: Option<usize>) -> impl Iterator<Item = Transfer> {
        let pieces = self.made[from].iter().enumerate();
        let pieces = pieces.filter(move |(_, piece)| piece.owner != from);
        let pieces = pieces.filter(move |(_, piece)| to.is_none_or(|to| piece.owner == to));
        pieces.map(move |(number, piece)| self.transfer(from, number, piece))
    }

    /// The blocks that the caller of this rank makes.
    fn requests(&self) -> Vec<Request> {
        let rank = self.plan.rank;
        let request = |Piece { owner, rows }: &Piece| Request {
            owner: *owner,
            rows: rows.clone(),
            place: self.plan.region(PARTIALS, rows.clone()),
            addends: if *owner == rank {
                self.incoming[rank].flags(rank, rows)
            } else {
                0..0
            },
        };
        let made = self.made[rank].iter();
        let made = made.filter(|_| self.plan.is_produced());
        made.map(request).collect()
    }

    /// The addend of `from` for the rows of this rank, of which `own` is the first.
    fn of_rank(&self, from: usize, own: usize) -> Addend {
        let rank = self.plan.rank;
        if from == rank {
            Addend::Rows {
                matrix: self.source,
                first: own,
            }
        } else {
            Addend::Rows {
                matrix: PARTIALS,
                first: self.room.slot(from, rank),
            }
        }
    }
}
