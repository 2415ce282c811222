//! Rows that a collective's kernel stores to the peers. Nothing is multiplied.

use super::low_latency;
use crate::Result;
use crate::backend::cuda::abi::GemmeshSend;
use crate::schedule::limits::{limit, require};
use crate::schedule::{Move, Route, Schedule, Transfer};

/// Bytes that a kernel stores or loads at once.
pub const PIECE: usize = 16;

/// Checks that the kernel can store these rows: from one matrix to one other, in whole pieces.
pub fn check(schedule: &Schedule) -> Result<()> {
    let mut matrices = None;
    for stored in schedule.moves().filter(|moved| moved.route == Route::Store) {
        limit("regions that a kernel stores", stored.regions.len(), 1, 1)?;
        let Move { from, to } = &stored.regions[0];
        let first = *matrices.get_or_insert((from.matrix, to.matrix));
        let alike = first == (from.matrix, to.matrix);
        require("a kernel must store from one matrix to one", alike)?;
        let bytes = schedule.matrices()[from.matrix].dtype.bytes();
        for column in [from.columns.start, from.columns.end, to.columns.start] {
            let what = "a kernel must store multiples of 16 bytes of a row";
            require(what, (column * bytes).is_multiple_of(PIECE))?;
        }
        let what = "bytes of a row of which a kernel stores a part";
        limit(what, from.columns.end * bytes, 0, u32::MAX as usize)?;
        let alike = from.columns == to.columns;
        require("a kernel must store columns to the same columns", alike)?;
    }
    Ok(())
}

/// Whether the kernel's stores go through low-latency areas. The same on every rank.
pub fn is_low_latency(schedule: &Schedule) -> bool {
    /// The most bytes. Above this, sending twice the bytes takes longer than it saves.
    const MOST: usize = 512 << 10;
    let is_stored = schedule.product().is_none() && schedule.uses(Route::Store);
    let moved = schedule.arrivals().iter().chain(schedule.moves()).next();
    let Some(Move { from, .. }) = moved.filter(|_| is_stored).map(|moved| &moved.regions[0]) else {
        return false;
    };
    // No rank sends another more than this whole matrix, and all ranks know its extents.
    let source = &schedule.matrices()[from.matrix];
    source.rows * source.row_bytes() <= MOST.min(low_latency::room(schedule.world()))
}

/// The kernel's table, and how many of its entries are stores. Arrivals stand after these if they come through
/// low-latency areas.
pub fn table(schedule: &Schedule) -> (Vec<GemmeshSend>, u32) {
    let mut table = sends(schedule);
    let count = table.len() as u32;
    if is_low_latency(schedule) {
        table.extend(arrivals(schedule));
    }
    (table, count)
}

/// What the kernel stores, in the schedule's order.
fn sends(schedule: &Schedule) -> Vec<GemmeshSend> {
    let stored = schedule.moves().filter(|moved| moved.route == Route::Store);
    entries(
        schedule,
        stored,
        |sent| sent.to,
        |moved| moved.from.rows.start,
    )
}

/// What comes to this rank through low-latency areas.
fn arrivals(schedule: &Schedule) -> Vec<GemmeshSend> {
    let come = schedule.arrivals().iter();
    entries(
        schedule,
        come,
        |came| came.from,
        |moved| moved.to.rows.start,
    )
}

/// The kernel's entries for `transfers`. In a low-latency area, the rows from one rank lie one after the other, in the
/// order of `row`.
fn entries<'a>(
    schedule: &Schedule,
    transfers: impl Iterator<Item = &'a Transfer> + Clone,
    peer: fn(&Transfer) -> usize,
    row: fn(&Move) -> usize,
) -> Vec<GemmeshSend> {
    if schedule.product().is_some() {
        return Vec::new();
    }
    let first_row = |of: usize| {
        let shared = transfers.clone().filter(|&transfer| peer(transfer) == of);
        shared.map(|transfer| row(&transfer.regions[0])).min()
    };
    let entry = |transfer: &Transfer| {
        let moved = &transfer.regions[0];
        let Move { from, to } = moved;
        let bytes = schedule.matrices()[from.matrix].dtype.bytes();
        let area_row = row(moved) - first_row(peer(transfer)).unwrap_or(0);
        GemmeshSend {
            from_row: from.rows.start as u32,
            to_row: to.rows.start as u32,
            column: (from.columns.start * bytes) as u32,
            width: (from.columns.len() * bytes) as u32,
            rows: from.rows.len() as u32,
            peer: peer(transfer) as u32,
            flag: transfer.flag as u32,
            area_row: area_row as u32,
        }
    };
    transfers.clone().map(entry).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::element::DType;
    use crate::schedule::plan::collectives::stored;
    use crate::schedule::plan::plan;
    use crate::schedule::{Layout, Operation, Problem};

    /// Every piece that a rank sends has a place of its own in the low-latency area. The receiver looks for it there,
    /// and puts it where it would have been stored.
    #[test]
    fn what_is_sent_is_sought_where_it_was_sent() {
        for (rows, n) in [([5, 1, 0], 1024), ([16, 16, 16], 2048), ([1, 2, 40], 8)] {
            for operation in [
                Operation::ALL_GATHER,
                Operation::REDUCE_SCATTER,
                Operation::ALL_TO_ALL,
                Operation::ALL_REDUCE,
            ] {
                let layout = Layout::new(&rows, n).unwrap();
                let problem = Problem::new(operation, DType::Bf16, layout, n);
                let plan = |rank| plan(&problem, rank, stored()).unwrap();
                let schedules: Vec<Schedule> = (0..rows.len()).map(plan).collect();
                let pieces = n * DType::Bf16.bytes() / PIECE;
                for (from, sender) in schedules.iter().enumerate() {
                    assert!(is_low_latency(sender), "{operation} {rows:?} rank {from}");
                    for (to, receiver) in schedules.iter().enumerate().filter(|&(to, _)| to != from)
                    {
                        let case = format!("{operation} {rows:?} by {n} from {from} to {to}");
                        let mut sent = sends(sender);
                        sent.retain(|sent| sent.peer as usize == to);
                        let mut come = arrivals(receiver);
                        come.retain(|come| come.peer as usize == from);
                        let place = |send: &GemmeshSend| {
                            let GemmeshSend {
                                area_row,
                                column,
                                width,
                                rows,
                                to_row,
                                ..
                            } = *send;
                            [area_row, column, width, rows, to_row]
                        };
                        let mut places =
                            [&sent, &come].map(|sends| sends.iter().map(place).collect::<Vec<_>>());
                        places.iter_mut().for_each(|places| places.sort());
                        assert_eq!(places[0], places[1], "{case}");
                        let mut taken = HashSet::new();
                        for [row, column, width, count, _] in &places[0] {
                            for row in *row..row + count {
                                for at in (*column..column + width).step_by(PIECE) {
                                    let piece = row as usize * pieces + at as usize / PIECE;
                                    assert!(taken.insert(piece), "{case}: piece {piece} twice");
                                    assert!(
                                        (piece + 1) * PIECE <= low_latency::room(rows.len()),
                                        "{case}"
                                    );
                                }
                            }
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn many_rows_are_not_sent_by_low_latency() {
        for (rows, expected) in [(16, true), (17, false)] {
            let layout = Layout::new(&[rows; 4], 4096).unwrap();
            let problem = Problem::new(Operation::REDUCE_SCATTER, DType::Bf16, layout, 4096);
            let plan = plan(&problem, 1, stored()).unwrap();
            assert_eq!(is_low_latency(&plan), expected, "{rows} rows a rank");
        }
    }
}
