//! The planner of gathers, and of products of gathered rows: `out[M, N] = gather(a)[M, K] · b[N, K]ᵀ`.

use std::ops::Range;

use smallvec::{SmallVec, smallvec};

use crate::error::{Error, of_configuration};
use crate::refusal::{Refusal, Result};
use crate::route::Route;
use crate::schedule::config::{CUT_COLUMNS, Chunking, Config};
use crate::schedule::layout::{Layout, MAX_EXTENT, RowOrder, chunk_rows};
use crate::schedule::limits::limit;
use crate::schedule::plan::matrices::{
    self, A, A_SCALES, B, B_SCALES, BESIDE, BIAS, OUT, OUT_SCALES, RESIDUAL,
};
use crate::schedule::plan::tile_order::{self, ring};
use crate::schedule::{
    Agreed, Bias, DTypes, DeferredChunk, MatrixSpec, Move, OutputBlock, OutputScales, Parts,
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

/// How rows are cut into chunks.
struct Cutter<'a> {
    layout: &'a Layout,
    route: Route,
    /// The chunks of each source's shard.
    chunks: Vec<Vec<StagedChunk>>,
    /// The chunks of each source's shard for the rank to which it comes last, if they differ.
    last_chunks: Option<Vec<Vec<StagedChunk>>>,
}

/// A part of a shard that one transfer moves.
struct StagedChunk {
    /// The stage of its block.
    stage: usize,
    part: Part,
}

/// Rows, or a range of their columns.
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

    /// The chunks in which the shard of `source` is moved to `peer`.
    fn chunks_of(&self, source: usize, peer: usize) -> &[StagedChunk] {
        let is_last = peer == (source + 1) % self.layout.world();
        let last_chunks = self.last_chunks.as_ref().filter(|_| is_last);
        &last_chunks.unwrap_or(&self.chunks)[source]
    }

    /// The transfers to `rank`, stage by stage, and in each stage source by source around the ring.
    fn arrivals(&self, rank: usize) -> Vec<Transfer> {
        let sources = ring(rank, self.layout.world());
        self.by_stage(sources.map(|source| (source, rank)))
    }

    /// The transfers from `rank`, stage by stage, and in each stage backwards around the ring: the rank before needs
    /// these rows first.
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

    /// The transfers of a stage's rows from `source` to `peer`, each with its flag at `peer`.
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
        let own =
            self.chunks_before(source, peer, stage)..self.chunks_before(source, peer, stage + 1);
        let chunks = self.chunks_of(source, peer)[own].iter().enumerate();
        chunks.map(move |(index, StagedChunk { part, .. })| Transfer {
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
