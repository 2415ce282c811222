//! The planner of operations that gather the rows of a matrix, and may multiply them with another:
//! `out[M, N] = gather(a)[M, K] · b[N, K]ᵀ`.

use std::fmt::Write;
use std::ops::Range;

use smallvec::{SmallVec, smallvec};

use crate::error::{Error, Result};
use crate::route::Route;
use crate::schedule::config::{CUT_COLUMNS, Chunking, Config};
use crate::schedule::layout::{Layout, MAX_EXTENT, RowOrder, chunk_rows};
use crate::schedule::limits::limit;
use crate::schedule::plan::matrices::{self, A, B, BESIDE, BIAS, OUT, RESIDUAL};
use crate::schedule::plan::tile_order::{self, ring};
use crate::schedule::{
    Agreed, Bias, Block, DTypes, DeferredChunk, MatrixSpec, Move, Parts, Problem, Product, Region,
    Residual, Schedule, Sum, Transfer, Weight, Widths,
};

/// Gathers the rows while it multiplies them: a tile waits for its rows.
pub(super) fn gather_and_multiply(
    problem: &Problem,
    rank: usize,
    config: Config,
) -> Result<Schedule> {
    plan(problem, rank, config, Moves::Chunks, true)
}

/// Gathers the rows. Each rank pulls them, and nothing is launched; or their owners store them.
pub(super) fn gather(problem: &Problem, rank: usize, config: Config) -> Result<Schedule> {
    plan(problem, rank, config, Moves::Chunks, false)
}

/// Gathers the rows, which each rank pulls, whatever the configuration says.
pub(super) fn gather_pulled(problem: &Problem, rank: usize, config: Config) -> Result<Schedule> {
    gather(problem, rank, pulled(config))
}

/// Multiplies rows that are there. The other ranks take no part.
pub(super) fn multiply(problem: &Problem, rank: usize, config: Config) -> Result<Schedule> {
    plan(problem, rank, config, Moves::Nothing, true)
}

/// Multiplies rows of this rank's own, of which there are no others.
pub(super) fn multiply_alone(problem: &Problem, rank: usize, config: Config) -> Result<Schedule> {
    let planned = multiply(problem, 0, config);
    // In its schedule it is the only rank. In its group it is the one that lacks memory.
    planned.map_err(|error| match error {
        Error::OutOfMemory { bytes, reason, .. } => Error::OutOfMemory {
            rank,
            bytes,
            reason,
        },
        error => error,
    })
}

/// Copies the other ranks' rows, with no word to anyone.
pub(super) fn copy(problem: &Problem, rank: usize, config: Config) -> Result<Schedule> {
    plan(problem, rank, pulled(config), Moves::Shards, false)
}

/// What is moved.
#[derive(Clone, Copy, PartialEq)]
enum Moves {
    /// Rows of the others, in chunks, each with its flag.
    Chunks,
    /// Rows of the others, a shard at a time, with no word to anyone.
    Shards,
    Nothing,
}

fn pulled(config: Config) -> Config {
    config.with_route(Route::Pull)
}

fn plan(
    problem: &Problem,
    rank: usize,
    config: Config,
    moves: Moves,
    multiplies: bool,
) -> Result<Schedule> {
    let layout = &problem.layout;
    limit("rank", rank, 0, layout.world() - 1)?;
    config.check()?;
    let widths = match multiplies {
        true => widths(problem, &config)?,
        false => Widths::new(),
    };
    let (mut arrivals, mut departures) = transfers(layout, &config, moves, rank);
    let product = multiplies.then(|| product(problem, &widths, config, deferred(&arrivals)));
    let tiles = match &product {
        Some(product) => tile_order::tiles(rank, product, A, &arrivals)?,
        None => Vec::new(),
    };
    if let Some((_, columns)) = problem.beside {
        limit("columns", columns, 1, MAX_EXTENT)?;
        let all = arrivals.iter_mut().chain(&mut departures);
        all.for_each(|transfer| move_beside(transfer, columns));
    }
    Schedule::new(Parts {
        rank,
        world: layout.world(),
        agreed: (moves == Moves::Chunks).then(|| agree(problem, &config)),
        matrices: matrices(problem, &widths, product.as_ref()),
        arrivals,
        departures,
        product,
        tiles,
        requests: Vec::new(),
        reduction: None,
        one_shot: false,
    })
}

/// The columns of each output, once it is known that there can be such a product.
fn widths(problem: &Problem, config: &Config) -> Result<Widths> {
    let form = &problem.form;
    let widths = form.columns(problem.n)?;
    // Of a gated product gate and up share a tile.
    let least = form.multiplied(1);
    limit("Config::tile.n", config.tile.n, least, MAX_EXTENT)?;
    let rows = problem.layout.m().div_ceil(config.entry_rows());
    let columns = widths
        .iter()
        .map(|&n| form.multiplied(n).div_ceil(config.tile.n));
    let count = rows.saturating_mul(columns.sum());
    limit("tiles of the output", count, 0, 1 << 28)?;
    Ok(widths)
}

/// What comes to this rank, and what goes from it.
fn transfers(
    layout: &Layout,
    config: &Config,
    moves: Moves,
    rank: usize,
) -> (Vec<Transfer>, Vec<Transfer>) {
    let cutter = match moves {
        Moves::Chunks => Cutter::new(layout, config),
        Moves::Shards => {
            let whole = Config {
                chunking: Chunking::new(1),
                ..*config
            };
            Cutter::new(layout, &whole)
        }
        Moves::Nothing => return Default::default(),
    };
    (cutter.arrivals(rank), cutter.departures(rank))
}

fn deferred(arrivals: &[Transfer]) -> Option<DeferredChunk> {
    let arrival = arrivals.iter().find(|arrival| arrival.is_deferred())?;
    Some(DeferredChunk {
        flag: arrival.flag,
        column: arrival.regions[0].to.columns.start,
    })
}

/// Moves the same rows of what is gathered beside.
fn move_beside(transfer: &mut Transfer, columns: usize) {
    let rows = transfer.regions[0].to.rows.clone();
    transfer.regions.push(Move::in_place(Region {
        matrix: BESIDE,
        rows,
        columns: 0..columns,
    }));
}

fn matrices(problem: &Problem, widths: &[usize], product: Option<&Product>) -> Vec<MatrixSpec> {
    let Problem { form, n, .. } = problem;
    let DTypes {
        operands,
        partials,
        output,
    } = problem.dtypes;
    let (m, k) = (problem.layout.m(), problem.layout.k());
    let mut matrices = matrices::unused(operands);
    matrices[A] = MatrixSpec::new(operands, m, k);
    matrices[BIAS] = MatrixSpec::new(partials, 1, form.multiplied(*n));
    matrices[RESIDUAL] = MatrixSpec::new(partials, m, *n);
    for (number, &n) in widths.iter().enumerate() {
        matrices[OUT + number] = MatrixSpec::new(output, m, n);
    }
    for &Weight { b, n } in product.iter().flat_map(|product| &product.weights) {
        matrices[b] = form.weights.spec(operands, n, k);
    }
    if let Some((dtype, columns)) = problem.beside {
        matrices[BESIDE] = MatrixSpec::new(dtype, m, columns);
    }
    matrices
}

/// All rows, by each weight: a block for each output.
fn product(
    problem: &Problem,
    widths: &[usize],
    config: Config,
    deferred: Option<DeferredChunk>,
) -> Product {
    let Problem { layout, form, .. } = problem;
    let rows = 0..layout.m();
    let blocks = (0..widths.len()).map(|weight| {
        let begin = widths[..weight].iter().sum();
        Block {
            rows: rows.clone(),
            weight,
            sum: Sum {
                out: OUT + weight,
                first: 0,
                addends: Vec::new(),
                bias: Some(Bias {
                    matrix: BIAS,
                    first: begin,
                }),
                activation: form.activation,
                residual: (widths.len() == 1).then_some(Residual {
                    matrix: RESIDUAL,
                    first: 0,
                }),
            },
        }
    });
    let blocks = blocks.collect();
    let weights = (0..form.weight_count()).map(|number| Weight {
        b: B + number,
        n: widths[if form.gated { 0 } else { number }],
    });
    Product {
        a: A,
        weights: weights.collect(),
        weight_layout: form.weights,
        gated: form.gated,
        m: layout.m(),
        k: layout.k(),
        config,
        deferred,
        blocks,
    }
}

/// What the ranks must agree on. How rows are pulled is each rank's own affair.
fn agree(problem: &Problem, config: &Config) -> Agreed {
    let layout = &problem.layout;
    let mut details = String::with_capacity(128);
    // To write to a string does not fail.
    let mut say = |words: std::fmt::Arguments| _ = details.write_fmt(words);
    say(format_args!(
        "M = {}, K = {}, {}",
        layout.m(),
        layout.k(),
        problem.dtypes.operands
    ));
    match (config.route, config.chunking.count, config.chunking.last) {
        (Route::Pull, ..) => {}
        (Route::Store, ..) => say(format_args!(", stored")),
        (Route::Push, chunks, last) => {
            let cut = match config.cut(layout.k()) {
                Some(_) => " and a cut along K",
                None => "",
            };
            say(format_args!(
                ", pushed in {chunks} chunks, the last shard in {last}{cut}"
            ));
        }
    }
    if let Some((dtype, columns)) = problem.beside {
        say(format_args!(", with {columns} columns of {dtype}"));
    }
    let stages = layout.stages();
    match (layout.order(), config.route) {
        (RowOrder::ByStage, _) => say(format_args!(", {stages} stages in memory")),
        (RowOrder::ByRank, Route::Push | Route::Store) if stages > 1 => {
            say(format_args!(", gathered in {stages} stages"));
        }
        (RowOrder::ByRank, _) => {}
    }
    // Last, for it may be long, and there is not always room for all words.
    if !layout.is_balanced() {
        say(format_args!(", rows of each rank = {:?}", layout.rows()));
    }
    Agreed::new(problem.operation.name(), &details)
}

/// How rows are cut into chunks.
struct Cutter<'a> {
    layout: &'a Layout,
    route: Route,
    /// By source: the chunks that its shard is moved in.
    chunks: Vec<Vec<Chunk>>,
    /// Those for the rank for which it is the last, if they are others.
    last_chunks: Option<Vec<Vec<Chunk>>>,
}

/// What is moved of a shard at once.
struct Chunk {
    /// The block of the shard that it is of.
    stage: usize,
    part: Part,
}

/// Rows, or a part of each.
pub(super) struct Part {
    pub(super) rows: Range<usize>,
    pub(super) columns: Range<usize>,
}

impl<'a> Cutter<'a> {
    fn new(layout: &'a Layout, config: &Config) -> Cutter<'a> {
        let cut = |is_last| {
            let sources = 0..layout.world();
            sources
                .map(|source| cut_shard(layout, config, source, is_last))
                .collect()
        };
        let Chunking { count, last, .. } = config.chunking;
        let differs = count != last || config.cut(layout.k()).is_some();
        Cutter {
            layout,
            route: config.route,
            chunks: cut(false),
            last_chunks: (differs && config.route != Route::Store).then(|| cut(true)),
        }
    }

    /// What the shard of `source` is moved to `peer` in.
    fn chunks_of(&self, source: usize, peer: usize) -> &[Chunk] {
        let is_last = peer == (source + 1) % self.layout.world();
        let last_chunks = self.last_chunks.as_ref().filter(|_| is_last);
        &last_chunks.unwrap_or(&self.chunks)[source]
    }

    /// What comes to `rank`: stage by stage, of each source by source around the ring.
    fn arrivals(&self, rank: usize) -> Vec<Transfer> {
        let sources = ring(rank, self.layout.world());
        self.by_stage(sources.map(|source| (source, rank)))
    }

    /// What goes from `rank`, stage by stage: to r - 1 first, for it needs this rank's rows first, then to r - 2, …
    /// around the ring.
    fn departures(&self, rank: usize) -> Vec<Transfer> {
        let world = self.layout.world();
        let peers = (1..world).map(|step| (rank + world - step) % world);
        self.by_stage(peers.map(|peer| (rank, peer)))
    }

    fn by_stage(&self, pairs: impl Iterator<Item = (usize, usize)> + Clone) -> Vec<Transfer> {
        let mut all = Vec::new();
        for stage in 0..self.layout.stages() {
            for (source, peer) in pairs.clone() {
                all.extend(self.transfers(source, peer, stage));
            }
        }
        all
    }

    /// How the rows of `source` in a stage are moved to `peer`, each chunk with its flag there: a rank numbers the
    /// chunks of all others by the places of their rows. So the flags that a tile needs, whatever chunks or shards it
    /// straddles, are one range. The second part of a chunk that is cut along K has the number after the first's.
    fn transfers(
        &self,
        source: usize,
        peer: usize,
        stage: usize,
    ) -> impl Iterator<Item = Transfer> {
        let chunks = |other: usize| self.chunks_of(other, peer);
        // A shard's chunks in the stages before one.
        let before = |other, stage| chunks(other).partition_point(|chunk| chunk.stage < stage);
        let others = (0..self.layout.world()).filter(|&other| other != peer);
        let lower = others.clone().take_while(|&other| other < source);
        let own = before(source, stage)..before(source, stage + 1);
        let first: usize = match self.layout.order() {
            RowOrder::ByRank => lower.map(|other| chunks(other).len()).sum::<usize>() + own.start,
            RowOrder::ByStage => {
                let earlier: usize = others.map(|other| before(other, stage)).sum();
                let beside = lower.map(|other| before(other, stage + 1) - before(other, stage));
                earlier + beside.sum::<usize>()
            }
        };
        let chunks = chunks(source)[own].iter().enumerate();
        chunks.map(move |(index, Chunk { part, .. })| Transfer {
            from: source,
            to: peer,
            source,
            regions: smallvec![Move::in_place(Region {
                matrix: A,
                rows: part.rows.clone(),
                columns: part.columns.clone(),
            })],
            after: 0..0,
            produced: None,
            flag: first + index,
            route: self.route,
        })
    }
}

/// Each block of the shard is cut apart, into as many chunks as make, of all together, about what the configuration
/// says, one at least.
fn cut_shard(layout: &Layout, config: &Config, source: usize, is_last: bool) -> Vec<Chunk> {
    let (k, stages) = (layout.k(), layout.stages());
    let mut all = Vec::new();
    for stage in 0..stages {
        let block = layout.block(source, stage);
        if config.route == Route::Store {
            let parts = stored_parts(block, k, layout.world());
            all.extend(parts.into_iter().map(|part| Chunk { stage, part }));
            continue;
        }
        let (count, cut) = match is_last && stage + 1 == stages {
            true => (config.chunking.last, config.cut(k)),
            false => (config.chunking.count, None),
        };
        let count = (count / stages).max(1);
        let end = block.end;
        let chunks = chunk_rows(block.clone(), count, boundary(block.len() / count));
        all.extend(chunks.flat_map(|rows| {
            let cut = cut.filter(|_| rows.end == end);
            let columns = [Some(0..cut.unwrap_or(k)), cut.map(|column| column..k)];
            let parts = columns.into_iter().flatten().map(move |columns| Part {
                rows: rows.clone(),
                columns,
            });
            parts.map(move |part| Chunk { stage, part })
        }));
    }
    all
}

/// Chunks of so many rows are cut at multiples of this: a power of two, as tiles are high, so that few of these wait
/// for two chunks. It does not depend on the tiles, for each rank has its own.
fn boundary(rows: usize) -> usize {
    const MOST: usize = 128;
    1 << (rows / 8).clamp(1, MOST).ilog2()
}

/// What a kernel stores is cut into parts, for as many CTAs: some rows each or, of few rows, a piece of one. Each has
/// its flag, which is no more to look at than the bytes are to store; where there are many peers, fewer parts are for
/// each.
pub(super) fn stored_parts(shard: Range<usize>, k: usize, world: usize) -> Vec<Part> {
    const MOST: usize = 64;
    const ELEMENTS: usize = 3072;
    const LEAST_COLUMNS: usize = 512;
    let count = (shard.len() * k / ELEMENTS).min(MOST / (world - 1).max(1));
    let count = count.max(1);
    let pieces = (count / shard.len().max(1)).min(k / LEAST_COLUMNS).max(1);
    let column = |piece: usize| (k.div_ceil(CUT_COLUMNS) * piece / pieces * CUT_COLUMNS).min(k);
    let columns: SmallVec<[Range<usize>; 8]> = (0..pieces)
        .map(|piece| column(piece)..column(piece + 1))
        .collect();
    let bands = count.min(shard.len());
    let mut parts = Vec::with_capacity(bands * pieces);
    let mut begin = shard.start;
    for band in 1..=bands {
        let end = shard.start + shard.len() * band / bands;
        let rows = std::mem::replace(&mut begin, end)..end;
        parts.extend(columns.iter().map(|columns| Part {
            rows: rows.clone(),
            columns: columns.clone(),
        }));
    }
    parts
}
