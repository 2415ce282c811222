//! The planner of sums in one step: each rank makes the partials of all rows, then sends them to the ranks that add
//! them.
//!
//! If all ranks have the same tiles, each tile may be sent as soon as it is made.

use std::ops::Range;

use smallvec::smallvec;

use super::pieces::{SumOwners, SumPlan};
use crate::refusal::Result;
use crate::route::Route;
use crate::schedule::layout::chunk_rows;
use crate::schedule::plan::matrices::{A, PARTIALS};
use crate::schedule::plan::partials::among_others;
use crate::schedule::plan::tile_order::{self, ring};
use crate::schedule::{
    Addend, Move, OutputBlock, Product, Reduction, Schedule, Sum, Tile, Transfer,
};

/// Multiplies all rows, and sends their partials to the ranks that get the sums. These add them up at the end.
pub(super) fn one_shot(planner: &SumPlan) -> Result<Schedule> {
    let rank = planner.rank;
    let parts = parts(planner);
    let all = || parts.iter().enumerate();
    let peers = || ring(rank, planner.problem.layout.world());
    let transfer = |from, to, (index, part): (usize, &Range<usize>)| {
        let flag = among_others(from, to) * parts.len() + index;
        transfer(planner, [from, to], index, part, flag)
    };
    let arrivals = peers().flat_map(|from| all().map(move |part| (from, part)));
    let arrivals = arrivals.filter_map(|(from, part)| transfer(from, rank, part));
    let departures = all().flat_map(|part| peers().map(move |to| (to, part)));
    let departures = departures.filter_map(|(to, part)| transfer(rank, to, part));
    let (arrivals, departures) = (arrivals.collect(), departures.collect());
    let product = match planner.config.route {
        Route::Pull => None,
        Route::Push | Route::Store => Some(product(planner, &parts)?),
    };
    planner.schedule(true, arrivals, departures, product, reduction(planner))
}

/// The parts of the rows that are each made and sent as one.
fn parts(planner: &SumPlan) -> Vec<Range<usize>> {
    let config = &planner.config;
    let count = match planner.sums {
        SumOwners::Everywhere => config.chunking.count,
        // A part with rows of several owners has no single target.
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

/// The transfer of part `number` from one rank to another. None if that rank gets none of its rows.
fn transfer(
    planner: &SumPlan,
    [from, to]: [usize; 2],
    number: usize,
    part: &Range<usize>,
    flag: usize,
) -> Option<Transfer> {
    let (partials, route) = (&planner.partials, planner.config.route);
    let wanted = rows_for(planner, to);
    let rows = part.start.max(wanted.start)..part.end.min(wanted.end);
    let region = |first: usize| planner.partial(first..first + rows.len());
    (!rows.is_empty()).then(|| Transfer {
        from,
        to,
        source: from,
        regions: smallvec![Move {
            from: region(partials.own(0, rows.start)),
            to: region(partials.slot(from, to) + rows.start - wanted.start),
        }],
        after: 0..0,
        produced: (route != Route::Pull).then_some(number),
        flag,
        route,
    })
}

/// The product, with a block for each part.
fn product(planner: &SumPlan, parts: &[Range<usize>]) -> Result<(Product, Vec<Tile>)> {
    let mut rows = Vec::new();
    let blocks = parts.iter().enumerate().map(|(block, part)| {
        planner.tile_rows(block, part, |_| 0..0, &mut rows);
        OutputBlock {
            rows: part.clone(),
            weight: 0,
            sum: planner.own_partials(planner.partials.own(0, part.start)),
        }
    });
    let product = planner.product(A, blocks.collect());
    let tiles = tile_order::walk(planner.rank, &product, &rows)?;
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
        first: match from == rank {
            true => partials.own(0, own.start),
            false => partials.slot(from, rank),
        },
    };
    (!own.is_empty()).then(|| Reduction {
        rows: own.len(),
        n: problem.n,
        sum: Sum {
            addends: (0..problem.layout.world()).map(addend).collect(),
            ..planner.finished()
        },
    })
}
