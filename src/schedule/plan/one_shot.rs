//! Partials of all rows, which go to those who are to have the sums once all have been made; or, where ranks have the same tiles, once each
//! tile has.

use std::ops::Range;

use smallvec::smallvec;

use super::pieces::{Plan, Sums};
use crate::error::Result;
use crate::route::Route;
use crate::schedule::layout::chunk_rows;
use crate::schedule::plan::matrices::{A, PARTIALS};
use crate::schedule::plan::partials::among_others;
use crate::schedule::plan::tile_order::{self, ring};
use crate::schedule::{Addend, Block, Move, Reduction, Schedule, Sum, Transfer};

/// All rows are multiplied, then their partials go to those who are to have the sums, who add them up at the end.
pub(super) fn exchange(planner: &Plan) -> Result<Schedule> {
    let &Plan {
        problem,
        rank,
        config,
        partials,
        sums,
        ..
    } = planner;
    let (m, world) = (problem.layout.m(), problem.layout.world());
    let count = match sums {
        Sums::Everywhere => config.chunking.count,
        // Parts that owners' rows straddle have no one place to go to.
        Sums::Own | Sums::All => 1,
    };
    let parts: Vec<Range<usize>> = chunk_rows(0..m, count, config.entry_rows()).collect();
    let is_pulled = config.route == Route::Pull;
    let rows_for = |to: usize| match sums {
        Sums::Everywhere => 0..m,
        Sums::Own | Sums::All => problem.layout.rows_of(to),
    };
    let transfer = |from: usize, to: usize, (index, part): (usize, &Range<usize>)| {
        let wanted = rows_for(to);
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
            produced: (!is_pulled).then_some(index),
            flag: among_others(from, to) * parts.len() + index,
            route: config.route,
        })
    };
    let all = || parts.iter().enumerate();
    let arrivals = ring(rank, world).flat_map(|from| all().map(move |part| (from, part)));
    let arrivals = arrivals.filter_map(|(from, part)| transfer(from, rank, part));
    let departures = all().flat_map(|part| ring(rank, world).map(move |to| (to, part)));
    let departures = departures.filter_map(|(to, part)| transfer(rank, to, part));
    let (arrivals, departures) = (arrivals.collect(), departures.collect());
    let product = || -> Result<_> {
        let mut rows = Vec::new();
        let blocks = all().map(|(block, part)| {
            planner.tile_rows(block, part, |_| 0..0, &mut rows);
            Block {
                rows: part.clone(),
                weight: 0,
                sum: planner.own_partials(partials.own(0, part.start)),
            }
        });
        let product = planner.product(A, blocks.collect());
        let tiles = tile_order::walk(rank, &product, &rows)?;
        Ok((product, tiles))
    };
    let product = (!is_pulled).then(product).transpose()?;
    let own = rows_for(rank);
    let addend = |from: usize| Addend::Rows {
        matrix: PARTIALS,
        first: match from == rank {
            true => partials.own(0, own.start),
            false => partials.slot(from, rank),
        },
    };
    let reduction = (!own.is_empty()).then(|| Reduction {
        rows: own.len(),
        n: problem.n,
        sum: Sum {
            addends: (0..world).map(addend).collect(),
            ..planner.finished()
        },
    });
    planner.schedule(true, arrivals, departures, product, reduction)
}
