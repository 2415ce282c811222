//! The planner of sums in one step: each rank makes the partials of all rows, then sends them to the ranks that add
//! them.
//!
//! If all ranks have the same tiles, each tile may be sent as soon as it is made. Or the product has a schedule of its
//! own, and this one follows. Over several hosts it always does: then each rank sends its partials to all ranks, and each
//! adds them up in the order of the ranks.

use std::ops::Range;

use super::pieces::{SumOwners, SumPlan};
use crate::Result;
use crate::route::Route;
use crate::schedule::layout::chunk_rows;
use crate::schedule::plan::chunks::{Part, stored_parts, straight_transfer};
use crate::schedule::plan::matrices::{A, PARTIALS};
use crate::schedule::plan::partials::{among_others, follows_product};
use crate::schedule::plan::tile_order::{self, ring};
use crate::schedule::{
    Addend, Move, OutputBlock, Product, Reduction, Region, Schedule, Sum, Tile, Transfer,
};

/// Multiplies all rows, and sends their partials to the ranks that get the sums. These add them up at the end.
///
/// If the product comes first, it has a schedule of its own, and is not part of this one.
pub(super) fn one_shot(planner: &SumPlan) -> Result<Schedule> {
    let rank = planner.rank;
    let peers = || ring(rank, planner.problem.layout.world());
    let arrivals = peers().flat_map(|from| transfers(planner, [from, rank]));
    let departures = peers().flat_map(|to| transfers(planner, [rank, to]));
    let (mut arrivals, mut departures): (Vec<_>, Vec<_>) =
        (arrivals.collect(), departures.collect());
    // What comes over a network comes turn by turn.
    arrivals.sort_by_key(|transfer| transfer.turn);
    // What is made first is sent first.
    departures.sort_by_key(|transfer| transfer.produced);
    let product = if has_product(planner) {
        Some(product(planner)?)
    } else {
        None
    };
    Schedule::new(planner.parts(true, arrivals, departures, product, reduction(planner)))
}

/// Whether the schedule has the product.
fn has_product(planner: &SumPlan) -> bool {
    let config = &planner.config;
    let comes_first = config.route == Route::Pull || config.stores_behind();
    !comes_first && !follows_product(planner.problem, config)
}

/// The blocks of rows that are each made as one.
fn blocks(planner: &SumPlan) -> Vec<Range<usize>> {
    let config = &planner.config;
    let count = match planner.sums {
        // What goes over a network is so little that it goes as one.
        SumOwners::Everywhere if planner.problem.hosts.count() > 1 => 1,
        SumOwners::Everywhere => config.chunking.count,
        // A block with rows of several owners has no single target.
        SumOwners::Own | SumOwners::All => 1,
    };
    let all = 0..planner.problem.layout.m();
    chunk_rows(all, count, config.entry_rows()).collect()
}

/// The rows whose sums `rank` gets.
fn rows_for(planner: &SumPlan, rank: usize) -> Range<usize> {
    let layout = &planner.problem.layout;
    match planner.sums {
        SumOwners::Everywhere => 0..layout.m(),
        SumOwners::Own | SumOwners::All => layout.rows_of(rank),
    }
}

/// The parts that each other rank sends to `to`, and the block in which each is made.
fn parts(planner: &SumPlan, to: usize) -> Vec<(Option<usize>, Part)> {
    let config = &planner.config;
    let wanted = rows_for(planner, to);
    let columns = planner.partials.columns();
    if config.stores_behind() {
        let parts = stored_parts(wanted, columns, planner.problem.layout.world());
        return parts.into_iter().map(|part| (None, part)).collect();
    }
    let blocks = blocks(planner).into_iter().enumerate();
    let parts = blocks.map(|(block, rows)| {
        let part = Part {
            rows: rows.start.max(wanted.start)..rows.end.min(wanted.end),
            columns: 0..columns,
        };
        (has_product(planner).then_some(block), part)
    });
    parts.filter(|(_, part)| !part.rows.is_empty()).collect()
}

/// The transfers from one rank to another.
fn transfers(planner: &SumPlan, [from, to]: [usize; 2]) -> impl Iterator<Item = Transfer> {
    let partials = planner.partials;
    let route = match planner.problem.hosts.count() {
        1 => planner.config.route,
        // Who sends over the network pushes within its host, too.
        _ => Route::Push,
    };
    let first = rows_for(planner, to).start;
    let parts = parts(planner, to);
    let before = among_others(from, to) * parts.len();
    let parts = parts.into_iter().enumerate();
    parts.map(move |(index, (produced, Part { rows, columns }))| {
        let region = |first: usize| Region {
            matrix: PARTIALS,
            rows: first..first + rows.len(),
            columns: columns.clone(),
        };
        let moved = Move {
            from: region(partials.own(0, rows.start)),
            to: region(partials.slot(from, to) + rows.start - first),
        };
        Transfer {
            produced,
            ..straight_transfer(
                planner.problem,
                route,
                [from, to],
                moved,
                [index, before + index],
            )
        }
    })
}

/// The product, block by block.
fn product(planner: &SumPlan) -> Result<(Product, Vec<Tile>)> {
    let mut tile_rows = Vec::new();
    let blocks = blocks(planner).into_iter().enumerate();
    let blocks = blocks.map(|(block, rows)| {
        planner.tile_rows(block, &rows, |_| 0..0, &mut tile_rows);
        OutputBlock {
            sum: planner.own_partials(planner.partials.own(0, rows.start)),
            rows,
            weight: 0,
        }
    });
    let product = planner.product(A, blocks.collect());
    let tiles = tile_order::walk(&product, &tile_rows)?;
    Ok((product, tiles))
}

/// The sum of all ranks' partials of the rows that this rank gets. None if it gets no rows.
fn reduction(planner: &SumPlan) -> Option<Reduction> {
    let &SumPlan {
        problem,
        rank,
        partials,
        ..
    } = planner;
    let own = rows_for(planner, rank);
    let addend = |from: usize| Addend::Rows {
        matrix: PARTIALS,
        first: if from == rank {
            partials.own(0, own.start)
        } else {
            partials.slot(from, rank)
        },
    };
    let first = match planner.sums {
        SumOwners::All => own.start,
        SumOwners::Own | SumOwners::Everywhere => 0,
    };
    (!own.is_empty()).then(|| Reduction {
        rows: own.len(),
        n: problem.n,
        sum: Sum {
            addends: (0..problem.layout.world()).map(addend).collect(),
            ..planner.finished(first)
        },
    })
}
