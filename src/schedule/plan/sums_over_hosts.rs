//! The planner of sums of products over the ranks of several hosts. [`Ways`] has the rules.

use std::ops::Range;

use super::chunks::most_on_rails;
use super::host_sums::{Source, SumsOverHosts};
use super::pieces::{SumPlan, chunk_rows_of_block};
use super::ways::{Way, Ways, cut_for_rail};
use crate::Result;
use crate::route::Route;
use crate::schedule::limits::require;
use crate::schedule::plan::matrices::A;
use crate::schedule::plan::partials::{Incoming, Piece};
use crate::schedule::plan::tile_order;
use crate::schedule::{Addend, Config, OutputBlock, Parts, Schedule, Sum, Transfer};

/// Gives each rank its rows of the sum. If all ranks get all rows, a gather has to follow.
///
/// If partials are pushed, they are sent while others are made. If they are pulled, this schedule follows that of
/// [`multiply`](super::partial_sums::multiply), and moves and adds what that has made. (Then too they are pushed, because
/// only the rank that has made a sum knows when.)
///
/// # Errors
/// As the planner's within one host; `Kind::Unsupported` if partials are stored.
pub(super) fn reduce_scatter(planner: &SumPlan) -> Result<Schedule> {
    check_route(&planner.config)?;
    match planner.config.route {
        Route::Pull => reduce(planner),
        _ => multiply_and_reduce(planner),
    }
}

/// # Errors
/// `Kind::Unsupported` if partials are stored.
pub(super) fn check_route(config: &Config) -> Result<()> {
    let what = "over several hosts Config::route of a sum must be Route::Push or Route::Pull";
    require(what, matches!(config.route, Route::Push | Route::Pull))
}

fn reduce(planner: &SumPlan) -> Result<Schedule> {
    let (of, columns) = ((planner.problem, planner.rank), planner.partials.columns());
    let sums = SumsOverHosts::new(of, Source::Partials, columns, ways(planner));
    let own = sums.own_sum(planner.finished(planner.place()));
    Schedule::new(Parts {
        host_sums: sums.host_sums(),
        ..planner.parts(true, sums.arrivals(), sums.departures(), None, own)
    })
}

fn multiply_and_reduce(planner: &SumPlan) -> Result<Schedule> {
    let rank = planner.rank;
    let ways = ways(planner);
    let incoming = ways.incoming();
    let (mut rows, mut blocks) = (Vec::new(), Vec::new());
    for (block, piece) in ways.made().iter().enumerate() {
        let sum = sum(planner, &ways, piece);
        let waits = !sum.addends.is_empty();
        let flags = |tile: &Range<usize>| {
            if waits {
                incoming[rank].flags(piece.owner, tile)
            } else {
                0..0
            }
        };
        planner.tile_rows(block, &piece.rows, flags, &mut rows);
        blocks.push(OutputBlock {
            rows: piece.rows.clone(),
            weight: 0,
            sum,
        });
    }
    let product = planner.product(A, blocks);
    let tiles = tile_order::walk(&product, &rows)?;
    let transfers = |all: Vec<Way>| -> Vec<Transfer> {
        let all = all.into_iter();
        all.map(|way| transfer(planner, &ways, way, &incoming[way.to]))
            .collect()
    };
    let (arrivals, departures) = (transfers(ways.arrivals()), transfers(ways.departures()));
    Schedule::new(planner.parts(true, arrivals, departures, Some((product, tiles)), None))
}

/// Pushed pieces are blocks of the product. A rank makes its own rows as one. Of partials that are made before, each rank
/// has chosen the tiles for itself, so the pieces do not depend on them.
fn ways<'a>(planner: &SumPlan<'a>) -> Ways<'a> {
    /// Partials that are made before are cut at multiples of this number of rows.
    const HEIGHT: usize = 64;
    let (layout, hosts) = (&planner.problem.layout, &planner.problem.hosts);
    let (height, count) = match planner.config.route {
        Route::Pull => (HEIGHT, 1),
        _ => (planner.config.entry_rows(), planner.config.chunking.count),
    };
    let row = planner.partials.columns() * planner.problem.dtypes.partials.bytes();
    let most = most_on_rails(hosts, layout);
    let cut = |maker: usize, owner: usize| {
        let rows = layout.rows_of(owner);
        if maker == owner {
            return Some(rows)
                .filter(|rows| !rows.is_empty())
                .into_iter()
                .collect();
        }
        if hosts.share(maker, owner) {
            chunk_rows_of_block(rows, count, height).collect()
        } else {
            cut_for_rail(most, rows, row, height)
        }
    };
    Ways::new(planner.problem, planner.rank, planner.partials, cut)
}

/// The transfer of a piece. `incoming`: what comes to the rank that gets it.
fn transfer(planner: &SumPlan, ways: &Ways, way: Way, incoming: &Incoming) -> Transfer {
    let Piece { owner, rows } = ways.piece(way);
    let first = planner.partials.own(*owner, rows.start);
    let source = planner.partial(first..first + rows.len());
    Transfer {
        produced: Some(way.number),
        ..ways.transfer(way, source, incoming.flag(way.from, way.number))
    }
}

/// What this rank makes of a piece: the sum of its own rows, the sum of its host's partials, which goes over its rail, or
/// its partial alone, which goes to a rank of its host.
fn sum(planner: &SumPlan, ways: &Ways, piece: &Piece) -> Sum {
    let first = planner.partials.own(piece.owner, piece.rows.start);
    let (sum, adds) = if piece.owner == planner.rank {
        let first = planner.place() + ways.offset(piece);
        (planner.finished(first), true)
    } else {
        let is_gateway = ways.is_gateway(planner.rank, piece.owner);
        (planner.own_partials(first), is_gateway)
    };
    let addends = if adds {
        ways.addends(piece, Addend::Product)
    } else {
        Vec::new()
    };
    Sum { addends, ..sum }
}
