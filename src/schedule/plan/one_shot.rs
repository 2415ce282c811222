//! Partials of all rows, which go to those who are to have the sums once all have been made; or, where ranks have the
//! same tiles, once each tile has.

use std::ops::Range;

use smallvec::smallvec;

use super::pieces::{Plan, Sums};
use crate::error::Result;
use crate::route::Route;
use crate::schedule::layout::chunk_rows;
use crate::schedule::plan::matrices::{A, PARTIALS};
use crate::schedule::plan::partials::among_others;
use crate::schedule::plan::tile_order::{self, ring};
use crate::schedule::{Addend, Block, Move, Product, Reduction, Schedule, Sum, Tile, Transfer};

/// All rows are multiplied, then their partials go to those who are to have the sums, who add them up at the end.
pub(super) fn one_shot(planner: &Plan) -> Result<Schedule> {
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

/// The rows that are made, and sent, at once.
fn parts(planner: &Plan) -> Vec<Range<usize>> {
    let config = &planner.config;
    let count = match planner.sums {
        Sums::Everywhere => config.chunking.count,
        // Parts that owners' rows straddle have no one place to go to.
        Sums::Own | Sums::All => 1,
    };
    let all = 0..planner.problem.layout.m();
    chunk_rows(all, count, config.entry_rows()).collect()
}

/// The rows whose sums `rank` is to have.
fn rows_for(planner: &Plan, rank: usize) -> Range<usize> {
    let layout = &planner.problem.layout;
    match planner.sums {
        Sums::Everywhere => 0..layout.m(),
        Sums::Own | Sums::All => layout.rows_of(rank),
    }
}

/// What goes from one rank to another of the part of a number; none if that one is to have none of its rows.
fn transfer(
    planner: &Plan,
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

/// A block for each part.
fn product(planner: &Plan, parts: &[Range<usize>]) -> Result<(Product, Vec<Tile>)> {
    let mut rows = Vec::new();
    let blocks = parts.iter().enumerate().map(|(block, part)| {
        planner.tile_rows(block, part, |_| 0..0, &mut rows);
        Block {
            rows: part.clone(),
            weight: 0,
            sum: planner.own_partials(planner.partials.own(0, part.start)),
        }
    });
    let product = planner.product(A, blocks.collect());
    let tiles = tile_order::walk(planner.rank, &product, &rows)?;
    Ok((product, tiles))
}

/// All ranks' partials of the rows that this rank is to have, if it is to have any.
fn reduction(planner: &Plan) -> Option<Reduction> {
    let &Plan {
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
