//! Planners of what no operation does yet, so that schedules are seen to be able to say it: rows that each rank owns in
//! several blocks, a matrix and its scales that arrive together, rows that others pass on.

#![allow(dead_code)] // Each test file uses a part of it.

use std::ops::Range;

use gemmesh::DType;
use gemmesh::fp8::Accumulation;
use gemmesh::products::WeightLayout;
use gemmesh::schedule::plan::tile_order;
use gemmesh::schedule::{
    Agreed, Bias, MatrixSpec, Move, OutputBlock, Parts, Product, Region, Schedule, Sum, Tile,
    Transfer, Weight,
};
use gemmesh::tuning::Route;
use gemmesh::{Activation, Config};

/// What is gathered, and perhaps multiplied.
#[derive(Clone, Copy, Debug)]
pub struct Asked {
    /// Ranks.
    pub world: usize,
    /// Rows of a block: what a rank owns at once.
    pub block: usize,
    /// Columns of the matrix that is gathered.
    pub k: usize,
    /// Columns of the output; 0 if nothing is multiplied.
    pub n: usize,
}

/// The numbers of the matrices: what is gathered, its scales or else the weight, and so on.
pub const A: usize = 0;
pub const SCALES: usize = 1;
pub const B: usize = 2;
pub const BIAS: usize = 3;
pub const OUT: usize = 4;
/// A scale is for as many columns.
pub const SCALED: usize = 4;

fn matrix(rows: usize, columns: usize) -> MatrixSpec {
    MatrixSpec {
        dtype: DType::Bf16,
        rows,
        columns,
    }
}

fn region(matrix: usize, rows: Range<usize>, columns: usize) -> Move {
    Move::in_place(Region {
        matrix,
        rows,
        columns: 0..columns,
    })
}

/// All rows in one block; nothing without columns.
fn product(problem: Asked, rows: usize, config: Config) -> Option<Product> {
    let Asked { k, n, .. } = problem;
    (n > 0).then_some(Product {
        a: A,
        a_scales: None,
        accumulation: Accumulation::default(),
        weights: [Weight {
            b: B,
            n,
            scales: None,
        }]
        .into_iter()
        .collect(),
        weight_layout: WeightLayout::Nk,
        constant_weights: false,
        gated: false,
        m: rows,
        k,
        config,
        deferred: None,
        blocks: vec![OutputBlock {
            rows: 0..rows,
            weight: 0,
            sum: Sum {
                out: OUT,
                first: 0,
                addends: Vec::new(),
                bias: Some(Bias {
                    matrix: BIAS,
                    first: 0,
                }),
                activation: Activation::Identity,
                residual: None,
                scales: None,
            },
        }],
    })
}

/// The schedule of transfers; their flags are numbered by rows.
fn schedule(
    name: &str,
    problem: Asked,
    rank: usize,
    rows: usize,
    config: Config,
    arrivals: Vec<Transfer>,
    departures: Vec<Transfer>,
) -> Schedule {
    let Asked { world, k, n, .. } = problem;
    let product = product(problem, rows, config);
    let tiles: Vec<Tile> = match &product {
        Some(product) => tile_order::tiles(product, A, &arrivals).unwrap(),
        None => Vec::new(),
    };
    let scales = k.div_ceil(SCALED);
    Schedule::new(Parts {
        rank,
        world,
        agreed: Some(Agreed::new(name, [format!("{problem:?}")])),
        matrices: vec![
            matrix(rows, k),
            matrix(rows, scales),
            matrix(n, k),
            matrix(1, n),
            matrix(rows, n),
        ],
        arrivals,
        departures,
        product,
        tiles,
        requests: Vec::new(),
        host_sums: Vec::new(),
        reduction: None,
        one_shot: false,
    })
    .unwrap()
}

/// Rank d of D owns block d of each of `stages` stages: the rows of stage s, rank d begin at (s · D + d) · block. The
/// gather goes stage by stage over all ranks.
pub fn staged(problem: Asked, stages: usize, rank: usize, config: Config) -> Schedule {
    let Asked {
        world, block, k, ..
    } = problem;
    let transfers = |from: &dyn Fn(usize) -> usize, to: &dyn Fn(usize) -> usize| {
        let steps = (0..stages).flat_map(|stage| (1..world).map(move |step| (stage, step)));
        steps
            .map(|(stage, step)| {
                let (from, to) = (from(step), to(step));
                let first = (stage * world + from) * block;
                // Of each stage, `to` keeps its own block.
                let flag = stage * (world - 1) + from - usize::from(from > to);
                Transfer {
                    from,
                    to,
                    source: from,
                    regions: [region(A, first..first + block, k)].into(),
                    after: 0..0,
                    produced: None,
                    added: None,
                    flag,
                    route: config.route,
                    turn: 0,
                    last_step: false,
                }
            })
            .collect()
    };
    let arrivals = transfers(&|step| (rank + step) % world, &|_| rank);
    let departures = transfers(&|_| rank, &|step| (rank + world - step) % world);
    let rows = stages * world * block;
    schedule("staged", problem, rank, rows, config, arrivals, departures)
}

/// Each rank owns a block of a matrix and of its scales. Both arrive under one flag, or, `apart`, the scales after the
/// matrix under a flag that no tile waits for.
pub fn with_scales(problem: Asked, apart: bool, rank: usize, config: Config) -> Schedule {
    let Asked {
        world, block, k, ..
    } = problem;
    let transfers = |from: usize, to: usize| {
        let rows = from * block..(from + 1) * block;
        let values = region(A, rows.clone(), k);
        let scales = region(SCALES, rows, k.div_ceil(SCALED));
        let flag = from - usize::from(from > to);
        let carried = match apart {
            // The flags of what is multiplied are the last ones, numbered by rows.
            true => vec![(vec![values], world - 1 + flag), (vec![scales], flag)],
            false => vec![(vec![values, scales], flag)],
        };
        carried.into_iter().map(move |(regions, flag)| Transfer {
            from,
            to,
            source: from,
            regions: regions.into(),
            after: 0..0,
            produced: None,
            added: None,
            flag,
            route: config.route,
            turn: 0,
            last_step: false,
        })
    };
    let arrivals = (1..world).flat_map(|step| transfers((rank + step) % world, rank));
    let departures = (1..world).flat_map(|step| transfers(rank, (rank + world - step) % world));
    schedule(
        "with_scales",
        problem,
        rank,
        world * block,
        config,
        arrivals.collect(),
        departures.collect(),
    )
}

/// Each rank owns a block, and writes only to the next one of a ring: its own block, then what came from the one
/// before, when it has come.
pub fn relayed(problem: Asked, rank: usize, config: Config) -> Schedule {
    let Asked {
        world, block, k, ..
    } = problem;
    let flag_of = |source: usize, at: usize| source - usize::from(source > at);
    // What `to` gets from the rank before it, in this order: that one's own block, the block of the one before that,
    // ...
    let transfers = |to: usize| -> Vec<Transfer> {
        let from = (to + world - 1) % world;
        let transfer = |step: usize| {
            let source = (to + world - step) % world;
            let come = flag_of(source, from);
            Transfer {
                from,
                to,
                source,
                regions: [region(A, source * block..(source + 1) * block, k)].into(),
                after: if source == from { 0..0 } else { come..come + 1 },
                produced: None,
                added: None,
                flag: flag_of(source, to),
                route: Route::Push,
                turn: 0,
                last_step: false,
            }
        };
        (1..world).map(transfer).collect()
    };
    schedule(
        "relayed",
        problem,
        rank,
        world * block,
        config,
        transfers(rank),
        transfers((rank + 1) % world),
    )
}
