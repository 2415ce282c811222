//! The planners of collectives without a product. Rows are sent and perhaps added up, but not multiplied.
//!
//! A rank has its rows already, or its caller makes them block by block while earlier blocks are on their way.
//!
//! The rank that has rows pushes them. Streams wait, and no kernel does. Or, if the rows are there and few, its kernel
//! stores them and waits for the rows that come.

use std::ops::Range;

use smallvec::smallvec;

use crate::error::of_configuration;
use crate::refusal::Result;
use crate::route::Route;
use crate::schedule::config::{Chunking, Config, TileShape};
use crate::schedule::layout::{MAX_EXTENT, MAX_WORLD, chunk_rows};
use crate::schedule::limits::limit;
use crate::schedule::plan::chunks::{
    Cutter, Part, RAIL_BYTES, first_turn, most_on_rail, stored_parts,
};
use crate::schedule::plan::matrices::{self, A, OUT, PARTIALS};
use crate::schedule::plan::partials::{Incoming, Partials, Piece, among_others};
use crate::schedule::plan::tile_order::ring;
use crate::schedule::{
    Activation, Addend, Agreed, DTypes, MatrixSpec, Move, Operation, Parts, Problem, Reduction,
    Region, Request, Schedule, Sum, Transfer,
};

/// Cuts each block into `chunks` chunks.
pub const fn chunked(chunks: usize) -> Config {
    // Nothing is multiplied. Chunks are cut at multiples of the tile's rows, which suits kernels.
    let tile = TileShape::new(128, 128, 64);
    Config::new(tile, Chunking::new(chunks), Route::Push)
}

/// Stores rows by a kernel, cut as finely as kernels need.
pub const fn stored() -> Config {
    chunked(1).with_route(Route::Store)
}

/// Gives each rank its rows of the sum of all inputs, [M, N].
///
/// Over several hosts too, each rank's rows go to the rank that adds them, so the bits are those of one host. Sums of
/// products are added within a host first.
///
/// # Errors
/// `Refusal::Limit` if N or a field of the configuration is out of bounds.
pub(super) fn reduce_scatter(problem: &Problem, rank: usize, config: Config) -> Result<Schedule> {
    CollectivePlan::new(problem, rank, config)?.sums(Blocks::Had, SumPlace::Own)
}

/// Gives each rank all inputs, and each rank adds up all rows.
///
/// If [`leaves_gather`] is true, each rank only gets its own rows of the sum, in a shared matrix of all rows.
///
/// # Errors
/// As [`reduce_scatter`].
pub(super) fn all_reduce(problem: &Problem, rank: usize, config: Config) -> Result<Schedule> {
    let plan = CollectivePlan::new(problem, rank, config)?;
    match leaves_gather(problem) {
        true => plan.sums(Blocks::Had, SumPlace::OwnAmongAll),
        false => plan.all_sums(),
    }
}

/// True if a gather has to follow an all-reduce, because each rank has the sums of its own rows only.
///
/// This is so if more than two ranks would each get many bytes.
pub fn leaves_gather(problem: &Problem) -> bool {
    /// The most bytes of an addend, if each of more than two ranks gets all of it.
    const FEW_BYTES: usize = 256 << 10;
    let elements = problem.layout.m().saturating_mul(problem.n);
    let bytes = elements.saturating_mul(problem.dtypes.operands.bytes());
    problem.layout.world() > 2 && bytes > FEW_BYTES
}

/// As [`reduce_scatter`], of blocks that the caller makes: first those of the peers' rows, in ring order, then its own.
///
/// # Errors
/// As [`reduce_scatter`].
pub(super) fn produce_and_reduce_scatter(
    problem: &Problem,
    rank: usize,
    config: Config,
) -> Result<Schedule> {
    CollectivePlan::new(problem, rank, config)?.sums(Blocks::Made, SumPlace::Own)
}

/// Each rank sends every rank a block of rows.
///
/// Rank s sends each rank as many rows as s has in the layout of the output, and they come to lie in the place of s:
/// row i of block p of the input of s becomes the i-th row of s in the output of rank p. Blocks for other hosts go to
/// their ranks at once, because no two of them are the same rows.
///
/// # Errors
/// As [`reduce_scatter`].
pub(super) fn all_to_all(problem: &Problem, rank: usize, config: Config) -> Result<Schedule> {
    CollectivePlan::new(problem, rank, config)?.exchange(Blocks::Had)
}

/// As [`all_to_all`], of blocks that the caller makes: first those for the peers, in ring order, then its own.
///
/// # Errors
/// As [`reduce_scatter`].
pub(super) fn produce_and_all_to_all(
    problem: &Problem,
    rank: usize,
    config: Config,
) -> Result<Schedule> {
    CollectivePlan::new(problem, rank, config)?.exchange(Blocks::Made)
}

/// Gives all ranks the rows of the root, which has all rows in the layout.
///
/// If rows are pushed, the root sends each other rank a share of them, which that rank sends on. So each link carries
/// all rows about once. If rows are stored, the root stores them to all ranks. Over several hosts they go as in a gather.
///
/// # Errors
/// As [`reduce_scatter`].
pub(super) fn broadcast(problem: &Problem, rank: usize, config: Config) -> Result<Schedule> {
    CollectivePlan::new(problem, rank, config)?.broadcast()
}

/// Where the rows that a rank sends come from.
#[derive(Clone, Copy, PartialEq)]
enum Blocks {
    /// The rank has them.
    Had,
    /// The caller makes them.
    Made,
}

/// Where a rank's sums are stored.
#[derive(Clone, Copy, PartialEq)]
enum SumPlace {
    /// In a matrix of the rank's own rows.
    Own,
    /// In a matrix of all rows, at the place of the rank's own.
    OwnAmongAll,
}

struct CollectivePlan<'a> {
    problem: &'a Problem,
    rank: usize,
    config: Config,
}

impl<'a> CollectivePlan<'a> {
    fn new(problem: &'a Problem, rank: usize, config: Config) -> Result<CollectivePlan<'a>> {
        limit("rank", rank, 0, problem.layout.world() - 1)?;
        config.check()?;
        limit("N", problem.n, 1, MAX_EXTENT)?;
        let what = "the number of rows that are exchanged, of all ranks,";
        limit(what, problem.layout.m(), 0, MAX_EXTENT / MAX_WORLD)?;
        Ok(CollectivePlan {
            problem,
            rank,
            config,
        })
    }

    fn world(&self) -> usize {
        self.problem.layout.world()
    }

    /// The parts of these rows that are each made and sent as one. The caller's are as many as the configuration says. If
    /// there are several hosts, other parts are no longer than a gather's are on the network.
    fn cut(&self, rows: Range<usize>, blocks: Blocks) -> Vec<Part> {
        let Problem {
            n, dtypes, hosts, ..
        } = self.problem;
        if self.config.route == Route::Store {
            return stored_parts(rows, *n, self.world());
        }
        let bytes = rows.len().saturating_mul(n * dtypes.operands.bytes());
        let least = match blocks {
            Blocks::Had if hosts.count() > 1 => {
                let places = self.world() / hosts.count();
                (bytes / RAIL_BYTES).min(most_on_rail(self.world() - places))
            }
            _ => 1,
        };
        let count = self.config.chunking.count.max(least);
        let height = self.config.entry_rows();
        let parts = chunk_rows(0..rows.len(), count, height);
        let parts = parts.map(|part| Part {
            rows: rows.start + part.start..rows.start + part.end,
            columns: 0..*n,
        });
        parts.collect()
    }

    /// The parts of this rank's own rows. The last is a quarter. When it is made, only adding it up is left to do.
    fn cut_own(&self, rows: Range<usize>) -> Vec<Part> {
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

    fn region(&self, matrix: usize, rows: Range<usize>) -> Region {
        self.part(matrix, rows, &(0..self.problem.n))
    }

    fn part(&self, matrix: usize, rows: Range<usize>, columns: &Range<usize>) -> Region {
        Region {
            matrix,
            rows,
            columns: columns.clone(),
        }
    }

    /// A transfer under `flag`. `part`: its number among those from `from` to `to`.
    fn transfer(&self, [from, to]: [usize; 2], moved: Move, part: usize, flag: usize) -> Transfer {
        let hosts = &self.problem.hosts;
        // A rank sends around the ring of ranks, and receives from it backwards.
        let step = (to + self.world() - from) % self.world();
        let route = hosts.route(from, to, self.config.route);
        Transfer {
            from,
            to,
            source: from,
            regions: smallvec![moved],
            after: 0..0,
            produced: None,
            flag,
            route,
            turn: match route {
                Route::Net => first_turn(step) + part,
                _ => 0,
            },
        }
    }

    fn sums(&self, blocks: Blocks, sums: SumPlace) -> Result<Schedule> {
        let &CollectivePlan { problem, rank, .. } = self;
        let (layout, world) = (&problem.layout, self.world());
        let own = layout.rows_of(rank);
        let (first, out) = match sums {
            SumPlace::Own => (0, own.len()),
            SumPlace::OwnAmongAll => (own.start, layout.m()),
        };
        let addends = AddendTransfers::new(self, blocks);
        let senders = (1..world).map(|step| (rank + world - step) % world);
        let mut parts = self.parts([layout.m(), out], &addends.room);
        let arrivals = senders.flat_map(|from| addends.sent(from, Some(rank)));
        parts.arrivals = arrivals.collect();
        parts.departures = addends.sent(rank, None).collect();
        parts.requests = addends.requests();
        parts.reduction = (!own.is_empty())
            .then(|| self.reduction(own.len(), first, |from| addends.of_rank(from, own.start)));
        Schedule::new(parts)
    }

    fn all_sums(&self) -> Result<Schedule> {
        let &CollectivePlan { problem, rank, .. } = self;
        let (m, world) = (problem.layout.m(), self.world());
        let room = Partials::of_callers(problem, 0, m);
        let cut = self.cut(0..m, Blocks::Had);
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
        let addend = |from: usize| match from == rank {
            true => Addend::Rows {
                matrix: A,
                first: 0,
            },
            false => Addend::Rows {
                matrix: PARTIALS,
                first: room.slot(from, rank),
            },
        };
        let mut parts = self.parts([m, m], &room);
        let senders = (1..world).map(|step| (rank + world - step) % world);
        parts.arrivals = senders.flat_map(|from| transfers(from, rank)).collect();
        let receivers = ring(rank, world);
        parts.departures = receivers.flat_map(|to| transfers(rank, to)).collect();
        parts.reduction = (m > 0).then(|| self.reduction(m, 0, addend));
        Schedule::new(parts)
    }

    fn exchange(&self, blocks: Blocks) -> Result<Schedule> {
        let (layout, world) = (&self.problem.layout, self.world());
        let most = layout.rows().into_iter().max().unwrap_or(0);
        let callers = match blocks {
            Blocks::Had => 0,
            Blocks::Made => (world - 1) * most,
        };
        let room = Partials::of_callers(self.problem, callers, 0);
        let exchange = BlockTransfers { plan: self, blocks };
        // A matrix has the same extents on all ranks, those of the longest input.
        let mut parts = self.parts([world * most, layout.m()], &room);
        parts.arrivals = exchange.arrivals();
        (parts.departures, parts.requests) = exchange.departures();
        Schedule::new(parts)
    }

    /// The rank whose rows are broadcast. If there are none, it makes no difference.
    fn root(&self) -> usize {
        let layout = &self.problem.layout;
        let mut ranks = 0..self.world();
        let root = ranks.find(|&rank| !layout.rows_of(rank).is_empty());
        root.unwrap_or(0)
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

    fn broadcast(&self) -> Result<Schedule> {
        if self.problem.hosts.count() > 1 {
            return self.broadcast_over_hosts();
        }
        let &CollectivePlan { problem, rank, .. } = self;
        let (layout, world) = (&problem.layout, self.world());
        let root = self.root();
        let stored = self.config.route == Route::Store;
        // The share of each other rank, in ring order, chunk by chunk. Stored rows go to all ranks at once.
        let count = world - 1;
        let share = |number: usize| match stored {
            true => 0..layout.m(),
            false => layout.m() * number / count..layout.m() * (number + 1) / count,
        };
        let chunks: Vec<Vec<Part>> = (0..count)
            .map(|number| self.cut(share(number), Blocks::Had))
            .collect();
        let first = |share: usize| match stored {
            true => 0,
            false => chunks[..share].iter().map(Vec::len).sum::<usize>(),
        };
        let receivers: Vec<usize> = ring(root, world).collect();
        let most = chunks.iter().map(Vec::len).max().unwrap_or(0);
        // All chunks in the order in which they are sent: the first chunk of every share, then the second, and so on.
        let mut all = Vec::new();
        for number in 0..most {
            for (share, chunks) in chunks.iter().enumerate() {
                if let Some(chunk) = chunks.get(number) {
                    all.push((receivers[share], chunk, first(share) + number));
                }
            }
        }
        let transfer = |from: usize, to: usize, chunk: &Part, flag: usize| Transfer {
            source: root,
            after: match from == root {
                true => 0..0,
                false => flag..flag + 1,
            },
            ..self.transfer(
                [from, to],
                Move::in_place(self.part(OUT, chunk.rows.clone(), &chunk.columns)),
                0,
                flag,
            )
        };
        let room = Partials::of_callers(problem, 0, 0);
        let mut parts = self.parts([layout.m(); 2], &room);
        for &(receiver, chunk, flag) in &all {
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

    fn reduction(
        &self,
        rows: usize,
        first: usize,
        addend: impl FnMut(usize) -> Addend,
    ) -> Reduction {
        Reduction {
            rows,
            n: self.problem.n,
            sum: Sum {
                out: OUT,
                first,
                addends: (0..self.world()).map(addend).collect(),
                bias: None,
                activation: Activation::Identity,
                residual: None,
                scales: None,
            },
        }
    }

    /// The parts of a schedule that moves nothing yet, with an input and an output of these numbers of rows.
    fn parts(&self, [input, out]: [usize; 2], room: &Partials) -> Parts {
        let problem = self.problem;
        let DTypes {
            operands,
            partials,
            output,
            weights: _,
        } = problem.dtypes;
        let mut matrices = matrices::unused(operands);
        matrices[A] = MatrixSpec::new(operands, input, problem.n);
        matrices[OUT] = MatrixSpec::new(output, out, problem.n);
        matrices[PARTIALS] = MatrixSpec::new(partials, room.rows(), room.columns());
        Parts {
            rank: self.rank,
            world: self.world(),
            agreed: Some(self.agree()),
            matrices,
            arrivals: Vec::new(),
            departures: Vec::new(),
            product: None,
            tiles: Vec::new(),
            requests: Vec::new(),
            reduction: None,
            one_shot: false,
        }
    }

    /// What the ranks must agree on. A rank that sends has to know the flag numbers of the ranks that it sends to.
    fn agree(&self) -> Agreed {
        let Problem {
            layout,
            hosts,
            n,
            dtypes,
            ..
        } = self.problem;
        let mut arguments = self.problem.agreed(format!("N = {n}"));
        arguments.extend(dtypes.agreed());
        arguments.extend(hosts.agreed(layout.world()));
        arguments.push(match self.config.route {
            Route::Store => of_configuration("stored"),
            _ => of_configuration(format!("chunks = {}", self.config.chunking.count)),
        });
        match self.problem.operation {
            Operation::Broadcast => arguments.push(format!("root = {}", self.root())),
            _ => arguments.extend(layout.agreed()),
        }
        Agreed::new(self.problem.operation.name(), arguments)
    }
}

/// The transfers of addends to the owners of rows, which add them up.
struct AddendTransfers<'a> {
    plan: &'a CollectivePlan<'a>,
    blocks: Blocks,
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
    fn new(plan: &'a CollectivePlan<'a>, blocks: Blocks) -> AddendTransfers<'a> {
        let (layout, world) = (&plan.problem.layout, plan.world());
        let most = layout.rows().into_iter().max().unwrap_or(0);
        let (source, callers) = match blocks {
            Blocks::Had => (A, 0),
            Blocks::Made => (PARTIALS, layout.m()),
        };
        let pieces = |rank: usize| -> (Vec<Piece>, Vec<Range<usize>>) {
            let owners = ring(rank, world).chain([rank]);
            let pieces = owners.flat_map(|owner| {
                let rows = layout.rows_of(owner);
                let parts = match owner == rank {
                    true => plan.cut_own(rows),
                    false => plan.cut(rows, blocks),
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
            blocks,
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
            produced: (self.blocks == Blocks::Made).then_some(number),
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
            addends: match *owner == rank {
                true => self.incoming[rank].flags(rank, rows),
                false => 0..0,
            },
        };
        let made = self.made[rank].iter();
        let made = made.filter(|_| self.blocks == Blocks::Made);
        made.map(request).collect()
    }

    /// The addend of `from` for the rows of this rank, of which `own` is the first.
    fn of_rank(&self, from: usize, own: usize) -> Addend {
        let rank = self.plan.rank;
        match from == rank {
            true => Addend::Rows {
                matrix: self.source,
                first: own,
            },
            false => Addend::Rows {
                matrix: PARTIALS,
                first: self.room.slot(from, rank),
            },
        }
    }
}

/// The transfers between ranks, if nothing is added up.
struct BlockTransfers<'a> {
    plan: &'a CollectivePlan<'a>,
    blocks: Blocks,
}

impl BlockTransfers<'_> {
    /// The parts of the rows that a rank sends to each other rank.
    fn parts_of(&self, from: usize) -> Vec<Part> {
        let rows = self.plan.problem.layout.rows_of(from);
        self.plan.cut(rows, self.blocks)
    }

    /// The region in the memory of `from` of a part that it sends to `to`.
    fn source(&self, [from, to]: [usize; 2], Part { rows, columns }: &Part) -> Region {
        let own = self.plan.problem.layout.rows_of(from);
        let (matrix, before) = match self.blocks {
            Blocks::Had => (A, to),
            Blocks::Made => (PARTIALS, among_others(to, from)),
        };
        let first = before * own.len() + rows.start - own.start;
        self.plan.part(matrix, first..first + rows.len(), columns)
    }

    /// Flags are numbered by source, then by row.
    fn flag(&self, [from, to]: [usize; 2], part: usize) -> usize {
        let before = (0..from).filter(|&other| self.blocks == Blocks::Had || other != to);
        before
            .map(|other| self.parts_of(other).len())
            .sum::<usize>()
            + part
    }

    fn transfer(&self, ends: [usize; 2], number: usize, part: &Part) -> Transfer {
        let moved = Move {
            from: self.source(ends, part),
            to: self.plan.part(OUT, part.rows.clone(), &part.columns),
        };
        self.plan
            .transfer(ends, moved, number, self.flag(ends, number))
    }

    fn arrivals(&self) -> Vec<Transfer> {
        let (rank, world) = (self.plan.rank, self.plan.world());
        let senders = (1..world).map(|step| (rank + world - step) % world);
        let senders = senders.chain((self.blocks == Blocks::Had).then_some(rank));
        let arrivals = senders.flat_map(|from| {
            let parts = self.parts_of(from).into_iter().enumerate();
            parts.map(move |(number, part)| self.transfer([from, rank], number, &part))
        });
        arrivals.collect()
    }

    /// The transfers from this rank, and the blocks that its caller makes.
    fn departures(&self) -> (Vec<Transfer>, Vec<Request>) {
        let rank = self.plan.rank;
        let first = self.plan.problem.layout.rows_of(rank).start;
        let (mut departures, mut requests) = (Vec::new(), Vec::new());
        let is_made = self.blocks == Blocks::Made;
        for to in ring(rank, self.plan.world()).chain([rank]) {
            let stays = to == rank && is_made;
            for (number, part) in self.parts_of(rank).iter().enumerate() {
                if !stays {
                    departures.push(Transfer {
                        produced: is_made.then_some(requests.len()),
                        ..self.transfer([rank, to], number, part)
                    });
                }
                if is_made {
                    requests.push(Request {
                        owner: to,
                        rows: part.rows.start - first..part.rows.end - first,
                        place: match stays {
                            true => self.plan.region(OUT, part.rows.clone()),
                            false => self.source([rank, to], part),
                        },
                        addends: 0..0,
                    });
                }
            }
        }
        (departures, requests)
    }
}
