//! The planner of the product whose partial sums are added up by who owns the rows:
//! `out[rows of this rank, N] = Σ_p a_p[rows, K_p] · b_p[N, K_p]ᵀ + bias`; and of that whose sums all ranks get.
//!
//! Each rank multiplies its part of K for all rows. What it makes of another's rows, a *partial*, goes to a slot in the
//! memory of that one, which adds up all partials in the order of the ranks, its own among them: so the bits do not
//! depend on who owns a row, on the route, or on what comes first.

pub use super::pieces::agree;

use super::one_shot::one_shot;
use super::pieces::{Plan, Sums};
use crate::error::Result;
use crate::route::Route;
use crate::schedule::config::{Chunking, Config};
use crate::schedule::plan::matrices::{A, PARTIALS};
use crate::schedule::plan::partials::{Incoming, Piece, are_few};
use crate::schedule::plan::tile_order::{self, ring};
use crate::schedule::{Addend, Block, Operation, Problem, Reduction, Schedule, Transfer};

/// Where partials are pushed or stored: multiplies the peers' rows first, each block sent to its owner when it is
/// there, and this rank's own last, to which is added what has come. Where they are pulled, this stands behind
/// [`multiply`]: takes what the others have made of this rank's rows, and adds it up; nobody needs a kernel of another
/// rank to run. But where [`is_one_shot`](super::partials::is_one_shot) says so, all rows are made at once, and then
/// each rank gets the partials of its own.
///
/// # Errors
/// [`Error::Limit`](crate::Error::Limit) when N is out of bounds, a field of the configuration is, or there are too
/// many tiles or blocks.
pub(super) fn reduce_scatter(problem: &Problem, rank: usize, config: Config) -> Result<Schedule> {
    let planner = Plan::new(problem, rank, config, Sums::Own)?;
    if planner.one_shot {
        return one_shot(&planner);
    }
    match config.route {
        Route::Pull => reduce(&planner),
        Route::Push | Route::Store => multiply_and_reduce(&planner),
    }
}

/// The same, into a matrix of all rows that ranks share. Where partials are pushed or stored, rows are cut into panels,
/// and each panel of this rank's rows is sent on to all others when it is made, while the next ones are multiplied;
/// where they are pulled, a gather has to follow. But where [`is_one_shot`](super::partials::is_one_shot) says so,
/// every rank gets all partials, and adds up all rows itself.
///
/// # Errors
/// As [`reduce_scatter`].
pub(super) fn all_reduce(problem: &Problem, rank: usize, config: Config) -> Result<Schedule> {
    if are_few(problem) {
        return one_shot(&Plan::new(problem, rank, config, Sums::Everywhere)?);
    }
    let planner = Plan::new(problem, rank, config, Sums::All)?;
    match config.route {
        Route::Pull => reduce(&planner),
        Route::Push | Route::Store => multiply_and_reduce(&planner),
    }
}

fn multiply_and_reduce(planner: &Plan) -> Result<Schedule> {
    let &Plan { problem, rank, .. } = planner;
    let layout = &problem.layout;
    let world = layout.world();
    let made = planner.all_pieces();
    let incoming: Vec<Incoming> = (0..world).map(|to| Incoming::of(&made, to)).collect();
    let mut rows = Vec::new();
    let mut blocks = Vec::new();
    let mut departures = Vec::new();
    for (block, piece) in made[rank].iter().enumerate() {
        let owner = piece.owner;
        let sum = if owner == rank {
            let first = piece.rows.start - layout.rows_of(rank).start;
            planner.tile_rows(
                block,
                &piece.rows,
                |tile| incoming[rank].flags(tile),
                &mut rows,
            );
            planner.sum(first, |_| Addend::Product)
        } else {
            planner.tile_rows(block, &piece.rows, |_| 0..0, &mut rows);
            planner.own_partials(planner.partials.own(owner, piece.rows.start))
        };
        let is_shared = owner == rank && planner.sums == Sums::All;
        for peer in ring(rank, world).filter(|&peer| peer == owner || is_shared) {
            let flag = incoming[peer].flag(rank, block);
            departures.push(planner.transfer(rank, peer, piece, flag, Some(block)));
        }
        blocks.push(Block {
            rows: piece.rows.clone(),
            weight: 0,
            sum,
        });
    }
    // In the order in which they are made: at the same time, those of the nearest rank first.
    let mut arrivals: Vec<(usize, usize, Transfer)> = Vec::new();
    for step in 1..world {
        let from = (rank + world - step) % world;
        for (block, piece) in made[from].iter().enumerate() {
            let is_shared = piece.owner == from && planner.sums == Sums::All;
            if piece.owner == rank || is_shared {
                let flag = incoming[rank].flag(from, block);
                let transfer = planner.transfer(from, rank, piece, flag, Some(block));
                arrivals.push((block, step, transfer));
            }
        }
    }
    arrivals.sort_by_key(|&(block, step, _)| (block, step));
    let arrivals = arrivals.into_iter().map(|(_, _, transfer)| transfer);
    let product = planner.product(A, blocks);
    let tiles = tile_order::walk(rank, &product, &rows)?;
    let product = Some((product, tiles));
    planner.schedule(true, arrivals.collect(), departures, product, None)
}

/// What a rank makes and sends at once, in this order, where its kernel runs beside the transfers and no partials go in
/// one step.
///
/// # Errors
/// As the operation's.
pub fn pieces(problem: &Problem, rank: usize, config: Config) -> Result<Vec<Piece>> {
    let sums = match problem.operation {
        Operation::MatmulAllReduce => Sums::All,
        _ => Sums::Own,
    };
    Ok(Plan::new(problem, rank, config, sums)?.pieces(rank))
}

/// Multiplies all rows; what is made of them stays here. The other ranks take no part.
///
/// # Errors
/// As [`reduce_scatter`].
pub(super) fn multiply(problem: &Problem, rank: usize, config: Config) -> Result<Schedule> {
    let planner = Plan::new(problem, rank, config, Sums::Own)?;
    let all = 0..problem.layout.m();
    let mut rows = Vec::new();
    planner.tile_rows(0, &all, |_| 0..0, &mut rows);
    let sum = planner.own_partials(planner.partials.own(0, 0));
    let product = planner.product(
        A,
        vec![Block {
            rows: all,
            weight: 0,
            sum,
        }],
    );
    let tiles = tile_order::walk(rank, &product, &rows)?;
    planner.schedule(false, Vec::new(), Vec::new(), Some((product, tiles)), None)
}

/// Takes what the others have made of this rank's rows, a block of each rank's at a time, with no word to anyone.
///
/// # Errors
/// As [`reduce_scatter`].
pub(super) fn copy(problem: &Problem, rank: usize, config: Config) -> Result<Schedule> {
    let planner = Plan::new(problem, rank, whole(config), Sums::Own)?;
    let copies = planner.pulls(&planner.all_pieces());
    planner.schedule(false, copies, Vec::new(), None, None)
}

/// The same, and then the sums of the others' rows.
///
/// # Errors
/// As [`reduce_scatter`].
pub(super) fn copy_all(problem: &Problem, rank: usize, config: Config) -> Result<Schedule> {
    let planner = Plan::new(problem, rank, whole(config), Sums::All)?;
    let made = planner.all_pieces();
    let mut copies = planner.pulls(&made);
    let incoming = Incoming::of(&made, rank);
    for owner in ring(rank, problem.layout.world()) {
        let pieces = made[owner].iter().enumerate();
        let sums = pieces.filter(|(_, piece)| piece.owner == owner);
        copies.extend(sums.map(|(number, piece)| {
            planner.transfer(owner, rank, piece, incoming.flag(owner, number), None)
        }));
    }
    planner.schedule(false, copies, Vec::new(), None, None)
}

/// Pulled in as few parts as there can be.
fn whole(config: Config) -> Config {
    Config {
        chunking: Chunking::new(1),
        ..config.with_route(Route::Pull)
    }
}

fn reduce(planner: &Plan) -> Result<Schedule> {
    let &Plan { problem, rank, .. } = planner;
    let world = problem.layout.world();
    let made = planner.all_pieces();
    let mut departures = Vec::new();
    for to in (1..world).map(|step| (rank + world - step) % world) {
        let incoming = Incoming::of(&made, to);
        departures.extend(planner.pulls_of(&made, &incoming, rank, to));
    }
    let own = problem.layout.rows_of(rank);
    let matrix = PARTIALS;
    let first = planner.partials.own(rank, own.start);
    let reduction = (!own.is_empty()).then(|| Reduction {
        rows: own.len(),
        n: problem.n,
        sum: planner.sum(0, |_| Addend::Rows { matrix, first }),
    });
    planner.schedule(true, planner.pulls(&made), departures, None, reduction)
}
