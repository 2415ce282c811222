//! The planner of products whose partial sums are added up over the ranks: `out[rows of this rank, N] = Σ_p a_p[rows,
//! K_p] · b_p[N, K_p]ᵀ + bias`, or the same for all rows on every rank.
//!
//! Each rank multiplies its part of K for all rows. A *partial*, which is what it makes of the rows of a peer, goes to
//! a slot in the peer's memory. The peer adds up all partials in the order of the ranks, with its own among them. So
//! the bits do not depend on who owns a row, on the route, or on which partial comes first. (Over several hosts they do
//! depend on which host owns a row: `ways.rs` says why.)

pub use super::pieces::agree;

use super::one_shot::one_shot;
use super::pieces::{SumOwners, SumPlan};
use super::sums_over_hosts;
use crate::Result;
use crate::route::Route;
use crate::schedule::config::{Chunking, Config};
use crate::schedule::plan::matrices::{A, PARTIALS};
use crate::schedule::plan::partials::{Incoming, Piece, is_one_shot};
use crate::schedule::plan::tile_order::{self, ring};
use crate::schedule::{Addend, OutputBlock, Problem, Reduction, Schedule, Transfer};

/// Gives each rank its rows of the sum.
///
/// If partials are pushed or stored, a rank multiplies the peers' rows first, and sends each block to its owner when it
/// is made. It multiplies its own rows last, and adds the partials that have come.
///
/// If partials are pulled, this schedule follows that of [`multiply`]. It pulls the peers' partials of this rank's rows
/// and adds them up. No kernel of a peer has to run at that time. If they are stored after the product,
/// the schedule follows that of [`multiply`] too. Its kernel stores the partials of the peers' rows, and adds up what comes.
///
/// If [`is_one_shot`](super::partials::is_one_shot) is true, all rows are made first, and then each rank gets the
/// partials of its own rows.
///
/// # Errors
/// `Kind::Limit` if N or a field of the configuration is out of bounds, or if there are too
/// many tiles or blocks.
pub(super) fn reduce_scatter(problem: &Problem, rank: usize, config: Config) -> Result<Schedule> {
    let planner = SumPlan::new(problem, rank, config, SumOwners::Own)?;
    if problem.hosts.count() > 1 {
        return sums_over_hosts::reduce_scatter(&planner);
    }
    if planner.one_shot {
        return one_shot(&planner);
    }
    in_steps(&planner)
}

/// Gives each rank all rows of the sum, in a shared matrix.
///
/// If partials are pushed or stored, rows are cut into panels. Each panel of this rank's rows is sent on to all peers
/// when it is made, while the next panels are multiplied. If partials are pulled, or stored after the product, or if there
/// are several hosts, a gather has to follow.
///
/// If [`is_one_shot`](super::partials::is_one_shot) is true, every rank gets all partials and adds up all rows.
///
/// # Errors
/// As [`reduce_scatter`].
pub(super) fn all_reduce(problem: &Problem, rank: usize, config: Config) -> Result<Schedule> {
    if problem.hosts.count() > 1 {
        sums_over_hosts::check_route(&config)?;
    }
    if is_one_shot(problem, &config) {
        return one_shot(&SumPlan::new(problem, rank, config, SumOwners::Everywhere)?);
    }
    let planner = SumPlan::new(problem, rank, config, SumOwners::All)?;
    if problem.hosts.count() > 1 {
        return sums_over_hosts::reduce_scatter(&planner);
    }
    in_steps(&planner)
}

/// Gives each rank the sums of its own rows, after the product or while it is made.
fn in_steps(planner: &SumPlan) -> Result<Schedule> {
    match planner.config.route {
        Route::Pull => reduce(planner),
        Route::Store if planner.config.stores_behind() => one_shot(planner),
        Route::Push | Route::Store | Route::Net => multiply_and_reduce(planner),
    }
}

fn multiply_and_reduce(planner: &SumPlan) -> Result<Schedule> {
    let &SumPlan { problem, rank, .. } = planner;
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
                |tile| incoming[rank].flags(rank, tile),
                &mut rows,
            );
            planner.sum(first, |_| Addend::Product)
        } else {
            planner.tile_rows(block, &piece.rows, |_| 0..0, &mut rows);
            planner.own_partials(planner.partials.own(owner, piece.rows.start))
        };
        let is_shared = owner == rank && planner.sums == SumOwners::All;
        for peer in ring(rank, world).filter(|&peer| peer == owner || is_shared) {
            let flag = incoming[peer].flag(rank, block);
            departures.push(planner.transfer(rank, peer, piece, flag, Some(block)));
        }
        blocks.push(OutputBlock {
            rows: piece.rows.clone(),
            weight: 0,
            sum,
        });
    }
    // Sorted by when they are made. Of those made at the same time, the nearest rank's come first.
    let mut arrivals: Vec<(usize, usize, Transfer)> = Vec::new();
    for step in 1..world {
        let from = (rank + world - step) % world;
        for (block, piece) in made[from].iter().enumerate() {
            let is_shared = piece.owner == from && planner.sums == SumOwners::All;
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
    let tiles = tile_order::walk(&product, &rows)?;
    let product = Some((product, tiles));
    Schedule::new(planner.parts(true, arrivals.collect(), departures, product, None))
}

/// The pieces that a rank makes and sends, in this order, if its kernel runs during the transfers and the sum is not
/// made in one step.
///
/// # Errors
/// As the planner's.
pub fn pieces(problem: &Problem, rank: usize, config: Config) -> Result<Vec<Piece>> {
    let sums = if problem.operation.result.is_for_all() {
        SumOwners::All
    } else {
        SumOwners::Own
    };
    Ok(SumPlan::new(problem, rank, config, sums)?.pieces(rank))
}

/// Multiplies all rows. The partials stay on this rank. The other ranks take no part.
///
/// # Errors
/// As [`reduce_scatter`].
pub(super) fn multiply(problem: &Problem, rank: usize, config: Config) -> Result<Schedule> {
    let planner = SumPlan::new(problem, rank, config, SumOwners::Own)?;
    let all = 0..problem.layout.m();
    let mut rows = Vec::new();
    planner.tile_rows(0, &all, |_| 0..0, &mut rows);
    let sum = planner.own_partials(planner.partials.own(0, 0));
    let product = planner.product(
        A,
        vec![OutputBlock {
            rows: all,
            weight: 0,
            sum,
        }],
    );
    let tiles = tile_order::walk(&product, &rows)?;
    Schedule::new(planner.parts(false, Vec::new(), Vec::new(), Some((product, tiles)), None))
}

/// Copies the peers' partials of this rank's rows, one block from each peer, without synchronisation.
///
/// # Errors
/// As [`reduce_scatter`].
pub(super) fn copy(problem: &Problem, rank: usize, config: Config) -> Result<Schedule> {
    let planner = SumPlan::new(problem, rank, whole(config), SumOwners::Own)?;
    let copies = planner.pulls(&planner.all_pieces());
    Schedule::new(planner.parts(false, copies, Vec::new(), None, None))
}

/// As [`copy`], and then copies the sums of the peers' rows.
///
/// # Errors
/// As [`reduce_scatter`].
pub(super) fn copy_all(problem: &Problem, rank: usize, config: Config) -> Result<Schedule> {
    let planner = SumPlan::new(problem, rank, whole(config), SumOwners::All)?;
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
    Schedule::new(planner.parts(false, copies, Vec::new(), None, None))
}

/// The configuration that pulls each block in one part.
fn whole(config: Config) -> Config {
    Config {
        chunking: Chunking::new(1),
        ..config.with_route(Route::Pull)
    }
}

fn reduce(planner: &SumPlan) -> Result<Schedule> {
    let &SumPlan { problem, rank, .. } = planner;
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
    Schedule::new(planner.parts(true, planner.pulls(&made), departures, None, reduction))
}
