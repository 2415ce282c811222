//! The planner of gathers, and of products of gathered rows: `out[M, N] = gather(a)[M, K] · b[N, K]ᵀ`.

use crate::call::of_configuration;
use crate::error::Result;
use crate::route::Route;
use crate::schedule::config::{Chunking, Config};
use crate::schedule::layout::{MAX_EXTENT, RowOrder};
use crate::schedule::limits::limit;
use crate::schedule::operation::{OperationPart, RowSource, RowWork};
use crate::schedule::plan::chunks::Cutter;
use crate::schedule::plan::matrices::{
    self, A, A_SCALES, B, B_SCALES, BESIDE, BIAS, OUT, OUT_SCALES, RESIDUAL,
};
use crate::schedule::plan::tile_order;
use crate::schedule::{
    Agreed, Bias, DTypes, DeferredChunk, MatrixSpec, Move, Operation, OutputBlock, OutputScales,
    Parts, Problem, Product, Region, Residual, ScaleMatrix, Schedule, Sum, Transfer, Weight,
    Widths,
};

/// What a schedule moves.
#[derive(Clone, Copy, PartialEq)]
enum Moves {
    /// The other ranks' rows in chunks, each with its flag.
    Chunks,
    /// The other ranks' rows, a shard at a time, without synchronisation.
    Shards,
    Nothing,
}

impl Moves {
    fn of(operation: Operation) -> Moves {
        match (operation.part, operation.rows) {
            (OperationPart::Copies, _) => Moves::Shards,
            (OperationPart::Gather, _) => Moves::Chunks,
            (OperationPart::Whole, RowSource::Gathered) => Moves::Chunks,
            (OperationPart::Whole, RowSource::Own | RowSource::Root) => Moves::Nothing,
            (OperationPart::Work, _) => Moves::Nothing,
        }
    }
}

/// True if each rank pulls the rows, whatever the configuration says.
fn is_pulled(operation: Operation) -> bool {
    match operation.part {
        OperationPart::Copies => true,
        // Sums may also be stored.
        OperationPart::Gather => operation.rows == RowSource::Gathered,
        OperationPart::Whole | OperationPart::Work => operation.work == RowWork::Caller,
    }
}

/// Gathers rows, multiplies rows, or does both at the same time: then a tile waits for its rows.
pub(super) fn plan(problem: &Problem, rank: usize, config: Config) -> Result<Schedule> {
    let layout = &problem.layout;
    limit("rank", rank, 0, layout.world() - 1)?;
    config.check()?;
    let operation = problem.operation;
    let config = if is_pulled(operation) {
        config.with_route(Route::Pull)
    } else {
        config
    };
    let config = over_hosts(problem, config);
    let (moves, multiplies) = (Moves::of(operation), operation.multiplies());
    let widths = if multiplies {
        widths(problem, &config)?
    } else {
        Widths::new()
    };
    let (mut arrivals, mut departures) = transfers(problem, &config, moves, rank);
    let product = multiplies.then(|| product(problem, &widths, config, deferred(&arrivals)));
    let tiles = match &product {
        Some(product) => tile_order::tiles(product, A, &arrivals)?,
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
        host_sums: Vec::new(),
        reduction: None,
        one_shot: false,
    })
}

/// The configuration by which an operation is planned. In a gather over several hosts rows are passed on within a host.
/// Only the rank that got them knows when, so it pushes them, and a kernel waits alike for all rows that are moved by copy
/// engines. A sum's configuration says itself that it pushes.
pub fn over_hosts(problem: &Problem, config: Config) -> Config {
    let operation = problem.operation;
    let is_sent = operation.multiplies() && operation.result.is_sent();
    match config.route {
        Route::Pull if problem.hosts.count() > 1 && !is_sent => config.with_route(Route::Push),
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
    let a_scales = if form.a_scaling.is_sharded() {
        BESIDE
    } else {
        A_SCALES
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
        (Route::Pull | Route::Net, ..) => {}
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
    problem
        .hosts
        .agreed(layout.world())
        .into_iter()
        .for_each(&mut say);
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
