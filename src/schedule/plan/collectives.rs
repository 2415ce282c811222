//! The planners of collectives without a product. Rows are sent and perhaps added up, but not multiplied.
//!
//! A rank has its rows already, or its caller makes them block by block while earlier blocks are on their way.
//!
//! The rank that has rows pushes them. Streams wait, and no kernel does. Or, if the rows are there and few, its kernel
//! stores them and waits for the rows that come.

mod exchanges;
mod over_hosts;
mod sums;

use std::ops::Range;

use crate::call::of_configuration;
use crate::error::Result;
use crate::route::Route;
use crate::schedule::config::{Chunking, Config, TileShape};
use crate::schedule::layout::{MAX_EXTENT, MAX_WORLD, chunk_rows};
use crate::schedule::limits::limit;
use crate::schedule::operation::{RowSource, RowWork};
use crate::schedule::plan::chunks::{
    Part, RAIL_BYTES, most_on_rail, stored_parts, straight_transfer,
};
use crate::schedule::plan::matrices::{self, A, OUT, PARTIALS};
use crate::schedule::plan::partials::{FEW_BYTES, Partials, is_little_for_network};
use crate::schedule::{
    Agreed, Counts, DTypes, Layout, MatrixSpec, Move, Parts, Problem, Region, Schedule, Transfer,
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
/// Over several hosts, addends are added within a host first, as those of products.
///
/// A caller makes first the blocks of the peers' rows, in ring order, then its own. Over several hosts, the rows of other
/// hosts come before those of the own host.
///
/// # Errors
/// `Kind::Limit` if N or a field of the configuration is out of bounds.
pub(super) fn reduce_scatter(problem: &Problem, rank: usize, config: Config) -> Result<Schedule> {
    CollectivePlan::new(problem, rank, config)?.sums(SumPlace::Own)
}

/// Gives each rank all inputs, and each rank adds up all rows.
///
/// If [`leaves_gather`] is true, each rank only gets its own rows of the sum, in a shared matrix of all rows.
///
/// # Errors
/// As [`reduce_scatter`].
pub(super) fn all_reduce(problem: &Problem, rank: usize, config: Config) -> Result<Schedule> {
    let plan = CollectivePlan::new(problem, rank, config)?;
    if leaves_gather(problem) {
        plan.sums(SumPlace::OwnAmongAll)
    } else {
        plan.all_sums()
    }
}

/// True if a gather has to follow an all-reduce, because each rank has the sums of its own rows only.
///
/// This is so if more than two ranks would each get many bytes.
pub fn leaves_gather(problem: &Problem) -> bool {
    let elements = problem.layout.m().saturating_mul(problem.n);
    let bytes = elements.saturating_mul(problem.dtypes.operands.bytes());
    let are_few = bytes <= FEW_BYTES && is_little_for_network(problem, bytes);
    problem.layout.world() > 2 && !are_few
}

/// Each rank sends every rank a block of rows.
///
/// Block p of the input of rank s becomes block s of the output of rank p. The blocks of an output follow one another,
/// as many rows each as the problem counts. Blocks for other hosts go to their ranks at once, because no two of them are
/// the same rows. A caller makes first the blocks for the peers, in ring order, then its own.
///
/// # Errors
/// As [`reduce_scatter`]; `Kind::Unsupported` if a rank that sends and gets no rows would have to store.
pub(super) fn all_to_all(problem: &Problem, rank: usize, config: Config) -> Result<Schedule> {
    CollectivePlan::new(problem, rank, config)?.exchange()
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

/// Where a rank's sums are stored.
#[derive(Clone, Copy, PartialEq)]
enum SumPlace {
    /// In a matrix of the rank's own rows.
    Own,
    /// In a matrix of all rows, at the place of the rank's own.
    OwnAmongAll,
}

impl SumPlace {
    /// The first of a rank's sums in OUT, and the rows of OUT.
    fn of(self, layout: &Layout, rank: usize) -> (usize, usize) {
        let own = layout.rows_of(rank);
        match self {
            SumPlace::Own => (0, own.len()),
            SumPlace::OwnAmongAll => (own.start, layout.m()),
        }
    }
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

    /// True if the caller makes the rows that this rank sends. Otherwise the rank has them.
    fn is_produced(&self) -> bool {
        self.problem.operation.work == RowWork::Caller
    }

    /// The parts of these rows that are each made and sent as one. The caller's are as many as the configuration says. If
    /// there are several hosts, other parts are no longer than a gather's are on the network.
    fn cut(&self, rows: Range<usize>) -> Vec<Part> {
        let Problem {
            n, dtypes, hosts, ..
        } = self.problem;
        if self.config.route == Route::Store {
            return stored_parts(rows, *n, self.world());
        }
        let bytes = rows.len().saturating_mul(n * dtypes.operands.bytes());
        let least = if hosts.count() > 1 && !self.is_produced() {
            let places = self.world() / hosts.count();
            (bytes / RAIL_BYTES).min(most_on_rail(self.world() - places, 0))
        } else {
            1
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

    /// A transfer under `flag`. `part`: its number among those from the first of `ends` to the second.
    fn transfer(&self, ends: [usize; 2], moved: Move, part: usize, flag: usize) -> Transfer {
        straight_transfer(self.problem, self.config.route, ends, moved, [part, flag])
    }

    /// The rank whose rows are broadcast. If there are none, it makes no difference.
    fn root(&self) -> usize {
        let layout = &self.problem.layout;
        let mut ranks = 0..self.world();
        let root = ranks.find(|&rank| !layout.rows_of(rank).is_empty());
        root.unwrap_or(0)
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
            host_sums: Vec::new(),
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
        match self.problem.operation.rows {
            RowSource::Root => arguments.push(format!("root = {}", self.root())),
            RowSource::Own | RowSource::Gathered => arguments.extend(layout.agreed()),
        }
        arguments.extend(self.problem.counts.iter().flat_map(Counts::agreed));
        Agreed::new(self.problem.operation.name(), arguments)
    }
}
