//! The planner of gathers, and of products of gathered rows: `out[M, N] = gather(a)[M, K] · b[N, K]ᵀ`.

use std::ops::Range;

use smallvec::{SmallVec, smallvec};

use crate::error::{Error, of_configuration};
use crate::refusal::{Refusal, Result};
use crate::route::Route;
use crate::schedule::config::{CUT_COLUMNS, Chunking, Config};
use crate::schedule::layout::{Layout, MAX_CHUNKS, MAX_EXTENT, RowOrder, chunk_rows};
use crate::schedule::limits::limit;
use crate::schedule::plan::matrices::{
    self, A, A_SCALES, B, B_SCALES, BESIDE, BIAS, OUT, OUT_SCALES, RESIDUAL,
};
use crate::schedule::plan::tile_order;
use crate::schedule::{
    Agreed, Bias, DTypes, DeferredChunk, Hosts, MatrixSpec, Move, OutputBlock, OutputScales, Parts,
    Problem, Product, Region, Residual, ScaleMatrix, Schedule, Sum, Transfer, Weight, Widths,
};

/// Gathers rows and multiplies them at the same time. A tile waits for its rows.
pub(super) fn gather_and_multiply(
    problem: &Problem,
    rank: usize,
    config: Config,
) -> Result<Schedule> {
    plan(problem, rank, config, Moves::Chunks, true)
}

/// Gathers rows. Each rank pulls them without a kernel, or their owners store them.
pub(super) fn gather(problem: &Problem, rank: usize, config: Config) -> Result<Schedule> {
    plan(problem, rank, config, Moves::Chunks, false)
}

/// Gathers rows, which each rank pulls, whatever the configuration says.
pub(super) fn gather_pulled(problem: &Problem, rank: usize, config: Config) -> Result<Schedule> {
    gather(problem, rank, pulled(config))
}

/// Multiplies rows that are gathered already. The other ranks take no part.
pub(super) fn multiply(problem: &Problem, rank: usize, config: Config) -> Result<Schedule> {
    plan(problem, rank, config, Moves::Nothing, true)
}

/// The product of `matmul`, which `rank` makes alone.
pub(super) fn multiply_alone(problem: &Problem, rank: usize, config: Config) -> Result<Schedule> {
    let planned = multiply(problem, 0, config);
    // The schedule has one rank, 0. The error has to name this rank's number in its group.
    planned.map_err(|refusal| match refusal {
        Refusal::Failure(Error::OutOfMemory { bytes, reason, .. }) => {
            Refusal::Failure(Error::OutOfMemory {
                rank,
                bytes,
                reason,
            })
        }
        other => other,
    })
}

/// Copies the other ranks' rows without synchronisation.
pub(super) fn copy(problem: &Problem, rank: usize, config: Config) -> Result<Schedule> {
    plan(problem, rank, pulled(config), Moves::Shards, false)
}

/// What a schedule moves.
#[derive(Clone, Copy, PartialEq)]
enum Moves {
    /// The other ranks' rows in chunks, each with its flag.
    Chunks,
    /// The other ranks' rows, a shard at a time, without synchronisation.
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
    let config = over_hosts(problem, config);
    let widths = match multiplies {
        true => widths(problem, &config)?,
        false => Widths::new(),
    };
    let (mut arrivals, mut departures) = transfers(problem, &config, moves, rank);
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
        matrices: matrices(problem, &widths, product.as_ref())?,
        arrivals,
        departures,
        product,
        tiles,
        requests: Vec::new(),
        reduction: None,
        one_shot: false,
    })
}

/// The configuration of a gather, whose rows are passed on within a host if there are several. Only the rank that got
/// them knows when, so it pushes them, and a kernel waits alike for all rows that are moved by copy engines.
fn over_hosts(problem: &Problem, config: Config) -> Config {
    match config.route {
        Route::Pull if problem.hosts.count() > 1 => config.with_route(Route::Push),
        _ => config,
    }
}

/// Checks the product and its number of tiles, and returns the columns of each output.
fn widths(problem: &Problem, config: &Config) -> Result<Widths> {
    let form = &problem.form;
    let widths = form.columns(problem.n)?;
    // In a gated product, gate and up share a tile.
    let least = form.multiplied(1);
    limit("Config::tile.n", config.tile.n, least, MAX_EXTENT)?;
    let rows = problem.layout.m().div_ceil(config.entry_rows());
    let columns = widths
        .iter()
        .map(|&n| form.multiplied(n).div_ceil(config.entry_columns()));
    let count = rows.saturating_mul(columns.sum());
    limit("the number of tiles of the output", count, 0, 1 << 28)?;
    Ok(widths)
}

/// The transfers to this rank, and the transfers from it.
fn transfers(
    problem: &Problem,
    config: &Config,
    moves: Moves,
    rank: usize,
) -> (Vec<Transfer>, Vec<Transfer>) {
    let cutter = match moves {
        Moves::Chunks => Cutter::new(problem, config),
        Moves::Shards => {
            let whole = Config {
                chunking: Chunking::new(1),
                ..*config
            };
            Cutter::new(problem, &whole)
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

/// Adds the same rows of the second matrix to a transfer.
fn move_beside(transfer: &mut Transfer, columns: usize) {
    let Region {
        rows,
        columns: of_first,
        ..
    } = &transfer.regions[0].to;
    // The first part of rows that are cut along K brings them.
    if of_first.start > 0 {
        return;
    }
    let rows = rows.clone();
    transfer.regions.push(Move::in_place(Region {
        matrix: BESIDE,
        rows,
        columns: 0..columns,
    }));
}

fn matrices(
    problem: &Problem,
    widths: &[usize],
    product: Option<&Product>,
) -> Result<Vec<MatrixSpec>> {
    let Problem { form, n, .. } = problem;
    let DTypes {
        operands,
        weights,
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
    for &Weight { b, n, .. } in product.iter().flat_map(|product| &product.weights) {
        matrices[b] = form.weights.spec(weights, n, k);
    }
    if let Some(product) = product {
        matrices::specify_scales(&mut matrices, product);
        for OutputBlock { weight, sum, .. } in &product.blocks {
            matrices::specify_output_scales(&mut matrices, sum, widths[*weight])?;
        }
    }
    if let Some((dtype, columns)) = problem.beside {
        matrices[BESIDE] = MatrixSpec::new(dtype, m, columns);
    }
    Ok(matrices)
}

/// The product of all rows with each weight. Each output has a block.
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
        OutputBlock {
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
                scales: OutputScales::new(OUT_SCALES + weight, form.quantization),
            },
        }
    });
    let blocks = blocks.collect();
    let weights = (0..form.weight_count()).map(|number| Weight {
        b: B + number,
        n: widths[if form.gated { 0 } else { number }],
        scales: ScaleMatrix::new(B_SCALES + number, form.scaling_of_weight(number)),
    });
    let a_scales = match form.a_scaling.is_sharded() {
        true => BESIDE,
        false => A_SCALES,
    };
    Product {
        a: A,
        a_scales: ScaleMatrix::new(a_scales, form.a_scaling),
        weights: weights.collect(),
        weight_layout: form.weights,
        constant_weights: form.constant_weights,
        accumulation: form.accumulation,
        gated: form.gated,
        m: layout.m(),
        k: layout.k(),
        config,
        deferred,
        blocks,
    }
}

/// What the ranks must agree on. How a rank pulls rows is its own choice.
fn agree(problem: &Problem, config: &Config) -> Agreed {
    let layout = &problem.layout;
    let mut arguments = problem.agreed(format!("K = {}", layout.k()));
    let mut say = |words: String| arguments.push(words);
    match (config.route, config.chunking.count, config.chunking.last) {
        (Route::Pull, ..) => {}
        (Route::Store, ..) => say(of_configuration("stored")),
        (Route::Push, chunks, last) => {
            say(of_configuration("pushed"));
            say(of_configuration(format!("chunks = {chunks}")));
            say(of_configuration(format!(
                "chunks of the last shard = {last}"
            )));
            if config.cut(layout.k()).is_some() {
                say(of_configuration("a cut along K"));
            }
        }
    }
    if let Some((dtype, columns)) = problem.beside {
        say(format!("{columns} columns of {dtype} beside"));
    }
    if problem.hosts.count() > 1 {
        let (hosts, ranks) = (problem.hosts.count(), layout.world());
        say(format!("{hosts} hosts of {} ranks", ranks / hosts));
    }
    let stages = layout.stages();
    match (layout.order(), config.route) {
        (RowOrder::ByStage, _) => say(format!("stages in memory = {stages}")),
        (RowOrder::ByRank, Route::Push | Route::Store) if stages > 1 => {
            say(format!("stages of the gather = {stages}"));
        }
        (RowOrder::ByRank, _) => {}
    }
    // This comes last, because it may be long and there is not always room for all words.
    arguments.extend(layout.agreed());
    Agreed::new(problem.operation.name(), arguments)
}

/// How rows are cut into chunks, and the ways that they go.
///
/// If there are several hosts, a rank sends its rows over its rail, to the rank of its place on each other host. That
/// rank passes them on to its neighbours, chunk by chunk as they arrive. So each row crosses the network once a host.
struct Cutter<'a> {
    layout: &'a Layout,
    hosts: &'a Hosts,
    route: Route,
    /// The chunks of each source's shard for the ranks of its host.
    chunks: Vec<Vec<StagedChunk>>,
    /// The chunks of each source's shard for the rank to which it comes last, if they differ.
    last_chunks: Option<Vec<Vec<StagedChunk>>>,
    /// The chunks of each source's shard for the ranks of other hosts. Empty if there are none.
    rail_chunks: Vec<Vec<StagedChunk>>,
}

/// About how many bytes of a shard cross the network at a time: enough to make its latency small, and little enough
/// that passing them on ends soon after the last have come.
const RAIL_BYTES: usize = 2 << 20;
/// How rows go from host to host. A network's route is not there yet: the ranks of all hosts share memory so far.
const RAIL: Route = Route::Push;

/// A part of a shard that one transfer moves.
struct StagedChunk {
    /// The stage of its block.
    stage: usize,
    part: Part,
}

/// How rows come to a rank.
#[derive(Clone, Copy)]
struct Way {
    from: usize,
    route: Route,
    /// The flag of the first chunk at `from`, if that passes them on.
    come: Option<usize>,
}

impl Way {
    /// The flags that the mover waits for before it moves chunk `index`.
    fn after(&self, index: usize) -> Range<usize> {
        let come = self.come.map(|first| first + index);
        come.map_or(0..0, |flag| flag..flag + 1)
    }
}

/// Rows, or a range of their columns.
pub(super) struct Part {
    pub(super) rows: Range<usize>,
    pub(super) columns: Range<usize>,
}

impl<'a> Cutter<'a> {
    fn new(problem: &'a Problem, config: &Config) -> Cutter<'a> {
        let (layout, hosts) = (&problem.layout, &problem.hosts);
        let all = |cut: &dyn Fn(usize) -> Vec<StagedChunk>| (0..layout.world()).map(cut).collect();
        let cut = |is_last| all(&|source| cut_shard(layout, config, source, is_last));
        let Chunking { count, last, .. } = config.chunking;
        let differs = count != last || config.cut(layout.k()).is_some();
        let is_one_host = hosts.count() == 1;
        let width = problem.dtypes.operands.bytes();
        Cutter {
            layout,
            hosts,
            route: config.route,
            chunks: cut(false),
            // Rows of other hosts come last.
            last_chunks: (differs && is_one_host && config.route != Route::Store)
                .then(|| cut(true)),
            rail_chunks: match is_one_host {
                true => Vec::new(),
                false => all(&|source| cut_for_rail(layout, width, source)),
            },
        }
    }

    /// The chunks in which the shard of `source` is moved to `peer`.
    fn chunks_of(&self, source: usize, peer: usize) -> &[StagedChunk] {
        if !self.hosts.share(source, peer) {
            return &self.rail_chunks[source];
        }
        let is_last = peer == (source + 1) % self.layout.world();
        let last_chunks = self.last_chunks.as_ref().filter(|_| is_last);
        &last_chunks.unwrap_or(&self.chunks)[source]
    }

    /// The other ranks of `rank`'s host, in the order of its ring.
    fn neighbours(&self, rank: usize) -> impl DoubleEndedIterator<Item = usize> {
        self.hosts.neighbours(rank, self.layout.world())
    }

    /// The transfers to `rank`, stage by stage. In each stage the rows of its own host come first, and then host by host
    /// those of the others: from the rail, and then from its neighbours.
    fn arrivals(&self, rank: usize) -> Vec<Transfer> {
        let by_rail = self.hosts.rail(rank);
        let from_afar =
            by_rail.flat_map(|source| std::iter::once(source).chain(self.neighbours(source)));
        let sources: Vec<usize> = self.neighbours(rank).chain(from_afar).collect();
        let stages = 0..self.layout.stages();
        let ways = stages.flat_map(|stage| sources.iter().map(move |&source| (source, stage)));
        ways.flat_map(|(source, stage)| self.transfers(source, rank, stage))
            .collect()
    }

    /// The transfers from `rank`, stage by stage. In each stage its own rows go backwards around the rings, because the
    /// rank before needs them first: around the ring of its host, and then around that of hosts. Then it passes on the
    /// rows that come from its rail.
    fn departures(&self, rank: usize) -> Vec<Transfer> {
        let mut all = Vec::new();
        for stage in 0..self.layout.stages() {
            let peers = self
                .neighbours(rank)
                .rev()
                .chain(self.hosts.rail(rank).rev());
            all.extend(peers.flat_map(|peer| self.transfers(rank, peer, stage)));
            for source in self.hosts.rail(rank) {
                all.extend(self.passed_on(source, rank, stage));
            }
        }
        all
    }

    /// The transfers by which `rank` passes on rows of `source`, each chunk to all neighbours.
    fn passed_on(&self, source: usize, rank: usize, stage: usize) -> Vec<Transfer> {
        let neighbours = self.neighbours(rank).rev();
        let mut each: Vec<_> = neighbours
            .map(|peer| self.transfers(source, peer, stage))
            .collect();
        let mut all = Vec::new();
        loop {
            let before = all.len();
            all.extend(each.iter_mut().filter_map(Iterator::next));
            if all.len() == before {
                return all;
            }
        }
    }

    /// The transfers of a stage's rows of `source` to `peer`, each with its flag at `peer`.
    ///
    /// A rank numbers all chunks that come to it in the order of their rows. So the flags that a tile needs are one
    /// range, even if the tile straddles chunks or shards. The second part of a chunk that is cut along K has the
    /// number after the first's.
    fn transfers(
        &self,
        source: usize,
        peer: usize,
        stage: usize,
    ) -> impl Iterator<Item = Transfer> {
        let first = self.first_flag(source, peer, stage);
        let way = self.way(source, peer, stage);
        let own =
            self.chunks_before(source, peer, stage)..self.chunks_before(source, peer, stage + 1);
        let chunks = self.chunks_of(source, peer)[own].iter().enumerate();
        chunks.map(move |(index, StagedChunk { part, .. })| Transfer {
            from: way.from,
            to: peer,
            source,
            regions: smallvec![Move::in_place(Region {
                matrix: A,
                rows: part.rows.clone(),
                columns: part.columns.clone(),
            })],
            after: way.after(index),
            produced: None,
            flag: first + index,
            route: way.route,
        })
    }

    /// How a stage's rows of `source` come to `peer`.
    fn way(&self, source: usize, peer: usize, stage: usize) -> Way {
        // The rank of the peer's host to which the rail brings them.
        let gateway = self.hosts.beside(peer, source);
        let (from, route) = match gateway {
            _ if gateway == source => (source, self.route),
            _ if gateway == peer => (source, RAIL),
            _ => (gateway, Route::Push),
        };
        let come = (from != source).then(|| self.first_flag(source, from, stage));
        Way { from, route, come }
    }

    /// The flag of a block's first chunk at the rank to which it comes.
    fn first_flag(&self, source: usize, peer: usize, stage: usize) -> usize {
        let before = |other, stage| self.chunks_before(other, peer, stage);
        let others = (0..self.layout.world()).filter(|&other| other != peer);
        let lower = others.clone().take_while(|&other| other < source);
        match self.layout.order() {
            RowOrder::ByRank => {
                let shards: usize = lower.map(|other| self.chunks_of(other, peer).len()).sum();
                shards + before(source, stage)
            }
            RowOrder::ByStage => {
                let earlier: usize = others.map(|other| before(other, stage)).sum();
                let beside = lower.map(|other| before(other, stage + 1) - before(other, stage));
                earlier + beside.sum::<usize>()
            }
        }
    }

    /// The chunks of a shard in the stages before one.
    fn chunks_before(&self, source: usize, peer: usize, stage: usize) -> usize {
        let chunks = self.chunks_of(source, peer);
        chunks.partition_point(|chunk| chunk.stage < stage)
    }
}

/// Cuts each block of a shard into chunks.
///
/// All blocks together have about as many chunks as the configuration says, and each block has at least one.
fn cut_shard(layout: &Layout, config: &Config, source: usize, is_last: bool) -> Vec<StagedChunk> {
    let (k, stages) = (layout.k(), layout.stages());
    let mut all = Vec::new();
    for stage in 0..stages {
        let block = layout.block(source, stage);
        if config.route == Route::Store {
            let parts = stored_parts(block, k, layout.world());
            all.extend(parts.into_iter().map(|part| StagedChunk { stage, part }));
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
            parts.map(move |part| StagedChunk { stage, part })
        }));
    }
    all
}

/// Cuts each block of a shard into chunks for the network.
fn cut_for_rail(layout: &Layout, width: usize, source: usize) -> Vec<StagedChunk> {
    let (k, stages) = (layout.k(), layout.stages());
    let most = (MAX_CHUNKS / stages).max(1);
    let blocks = (0..stages).map(|stage| (stage, layout.block(source, stage)));
    let chunks = blocks.flat_map(|(stage, block)| {
        let bytes = block.len().saturating_mul(k).saturating_mul(width);
        let count = (bytes / RAIL_BYTES).clamp(1, most);
        let rows = chunk_rows(block.clone(), count, boundary(block.len() / count));
        rows.map(move |rows| StagedChunk {
            stage,
            part: Part {
                rows,
                columns: 0..k,
            },
        })
    });
    chunks.collect()
}

/// The number of rows at whose multiples chunks of `rows` rows are cut.
///
/// It is a power of two, like the height of tiles, so that few tiles wait for two chunks. It does not depend on the
/// tiles, because each rank chooses its own.
fn boundary(rows: usize) -> usize {
    const MOST: usize = 128;
    1 << (rows / 8).clamp(1, MOST).ilog2()
}

/// Cuts rows that a kernel stores into parts, one for each CTA: some rows each, or a piece of a row if there are few
/// rows.
///
/// Each part has a flag. Looking at the flag costs no more than storing the bytes. If there are many peers, each gets
/// fewer parts.
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
