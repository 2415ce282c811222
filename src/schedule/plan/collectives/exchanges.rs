//! Rows that ranks exchange, and rows of a root. Nothing is added.

use super::CollectivePlan;
use crate::Result;
use crate::route::Route;
use crate::schedule::limits::require;
use crate::schedule::plan::chunks::{Cutter, Part};
use crate::schedule::plan::matrices::{A, OUT, PARTIALS};
use crate::schedule::plan::partials::Partials;
use crate::schedule::plan::tile_order::ring;
use crate::schedule::{Counts, Move, Region, Request, Schedule, Transfer};

impl CollectivePlan<'_> {
    pub(super) fn exchange(&self) -> Result<Schedule> {
        let (layout, world) = (&self.problem.layout, self.world());
        let counts = self.problem.counts.clone();
        let counts = counts.unwrap_or_else(|| Counts::of_senders(layout));
        require(
            "there must be a count for each pair of ranks",
            counts.world() == world,
        )?;
        // All kernels that store wait for one another, and a rank without transfers has none.
        let what = "rows must not be stored if only some ranks send or get any";
        require(
            what,
            self.config.route != Route::Store || counts.reach_all(),
        )?;
        let most = |rows: &dyn Fn(usize) -> usize| (0..world).map(rows).max().unwrap_or(0);
        let input = most(&|rank| counts.sent(rank));
        let callers = if self.is_produced() {
            most(&|rank| counts.sent(rank) - counts.between(rank, rank))
        } else {
            0
        };
        let room = Partials::of_callers(self.problem, callers, 0);
        let exchange = BlockTransfers { plan: self, counts };
        // A matrix has the same extents on all ranks, those of the longest input.
        let mut parts = self.parts([input, layout.m()], &room);
        parts.arrivals = exchange.arrivals();
        (parts.departures, parts.requests) = exchange.departures();
        Schedule::new(parts)
    }

    /// Over several hosts it is a gather of rows that are all the root's. So they cross the network once a host.
    fn broadcast_over_hosts(&self) -> Result<Schedule> {
        let cutter = Cutter::new(self.problem, &self.config);
        let room = Partials::of_callers(self.problem, 0, 0);
        let mut parts = self.parts([self.problem.layout.m(); 2], &room);
        parts.arrivals = cutter.arrivals(self.rank);
        parts.departures = cutter.departures(self.rank);
        let transfers = parts.arrivals.iter_mut().chain(&mut parts.departures);
        for Move { from, to } in transfers.flat_map(|transfer| &mut transfer.regions) {
            (from.matrix, to.matrix) = (OUT, OUT);
        }
        Schedule::new(parts)
    }

    pub(super) fn broadcast(&self) -> Result<Schedule> {
        if self.problem.hosts.count() > 1 {
            return self.broadcast_over_hosts();
        }
        let &CollectivePlan { problem, rank, .. } = self;
        let (root, world) = (self.root(), self.world());
        let stored = self.config.route == Route::Store;
        let transfer = |from: usize, to: usize, chunk: &Part, flag: usize| Transfer {
            source: root,
            after: if from == root { 0..0 } else { flag..flag + 1 },
            ..self.transfer(
                [from, to],
                Move::in_place(self.part(OUT, chunk.rows.clone(), &chunk.columns)),
                0,
                flag,
            )
        };
        let room = Partials::of_callers(problem, 0, 0);
        let mut parts = self.parts([problem.layout.m(); 2], &room);
        for &(receiver, ref chunk, flag) in &self.chunks_of_root() {
            if rank == root {
                parts.departures.push(transfer(root, receiver, chunk, flag));
            } else if receiver == rank {
                parts.arrivals.push(transfer(root, rank, chunk, flag));
            } else if !stored {
                parts.arrivals.push(transfer(receiver, rank, chunk, flag));
            }
            if receiver == rank && !stored {
                let others = ring(rank, world).filter(|&other| other != root);
                let onward = others.map(|other| transfer(rank, other, chunk, flag));
                parts.departures.extend(onward);
            }
        }
        Schedule::new(parts)
    }

    /// The chunks that a root sends, each with its receiver and its flag, in the order in which they are sent: the first
    /// chunk of the share of every other rank, then the second, and so on. Stored rows go to all ranks at once.
    fn chunks_of_root(&self) -> Vec<(usize, Part, usize)> {
        let (layout, stored) = (&self.problem.layout, self.config.route == Route::Store);
        let count = self.world() - 1;
        let share = |number: usize| {
            if stored {
                0..layout.m()
            } else {
                layout.m() * number / count..layout.m() * (number + 1) / count
            }
        };
        let (mut all, mut first) = (Vec::new(), 0);
        for (number, receiver) in ring(self.root(), self.world()).enumerate() {
            let chunks = self.cut(share(number)).into_iter().enumerate();
            let end = first + chunks.len();
            all.extend(chunks.map(|(number, chunk)| (number, receiver, chunk, first + number)));
            first = if stored { 0 } else { end };
        }
        all.sort_by_key(|&(number, ..)| number);
        let chunks = all.into_iter();
        chunks
            .map(|(_, receiver, chunk, flag)| (receiver, chunk, flag))
            .collect()
    }
}

/// The transfers between ranks, if nothing is added up.
struct BlockTransfers<'a> {
    plan: &'a CollectivePlan<'a>,
    counts: Counts,
}

impl BlockTransfers<'_> {
    /// The parts of the rows from one rank to another, counted among these rows.
    fn parts_of(&self, [from, to]: [usize; 2]) -> Vec<Part> {
        self.plan.cut(0..self.counts.between(from, to))
    }

    /// The region in the memory of `from` of a part that it sends to `to`.
    fn source(&self, [from, to]: [usize; 2], part: &Part) -> Region {
        let counts = &self.counts;
        let before = counts.sent_before(from, to);
        if !self.plan.is_produced() {
            return self.region(A, before, part);
        }
        // A caller makes the rows that stay at their place.
        let own = if from < to {
            counts.between(from, from)
        } else {
            0
        };
        self.region(PARTIALS, before - own, part)
    }

    /// The region in the memory of `to` of a part that it gets from `from`.
    fn target(&self, [from, to]: [usize; 2], part: &Part) -> Region {
        let before = self.counts.received_before(from, to);
        self.region(OUT, before, part)
    }

    fn region(&self, matrix: usize, first: usize, Part { rows, columns }: &Part) -> Region {
        let rows = first + rows.start..first + rows.end;
        self.plan.part(matrix, rows, columns)
    }

    /// Flags are numbered by source, then by row.
    fn flag(&self, [from, to]: [usize; 2], part: usize) -> usize {
        let before = (0..from).filter(|&other| other != to || !self.plan.is_produced());
        before
            .map(|other| self.parts_of([other, to]).len())
            .sum::<usize>()
            + part
    }

    fn transfer(&self, ends: [usize; 2], number: usize, part: &Part) -> Transfer {
        let moved = Move {
            from: self.source(ends, part),
            to: self.target(ends, part),
        };
        self.plan
            .transfer(ends, moved, number, self.flag(ends, number))
    }

    fn arrivals(&self) -> Vec<Transfer> {
        let (rank, world) = (self.plan.rank, self.plan.world());
        let senders = (1..world).map(|step| (rank + world - step) % world);
        let senders = senders.chain((!self.plan.is_produced()).then_some(rank));
        let arrivals = senders.flat_map(|from| {
            let parts = self.parts_of([from, rank]).into_iter().enumerate();
            parts.map(move |(number, part)| self.transfer([from, rank], number, &part))
        });
        arrivals.collect()
    }

    /// The transfers from this rank, and the blocks that its caller makes.
    fn departures(&self) -> (Vec<Transfer>, Vec<Request>) {
        let rank = self.plan.rank;
        let (mut departures, mut requests) = (Vec::new(), Vec::new());
        let is_produced = self.plan.is_produced();
        for to in ring(rank, self.plan.world()).chain([rank]) {
            let ends = [rank, to];
            let stays = to == rank && is_produced;
            for (number, part) in self.parts_of(ends).iter().enumerate() {
                if !stays {
                    departures.push(Transfer {
                        produced: is_produced.then_some(requests.len()),
                        ..self.transfer(ends, number, part)
                    });
                }
                if is_produced {
                    requests.push(Request {
                        owner: to,
                        rows: part.rows.clone(),
                        place: if stays {
                            self.target(ends, part)
                        } else {
                            self.source(ends, part)
                        },
                        addends: 0..0,
                    });
                }
            }
        }
        (departures, requests)
    }
}
