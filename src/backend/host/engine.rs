//! Walks a plan with a rank's threads.

use std::ops::Range;
use std::sync::atomic::AtomicUsize;
use std::sync::{Mutex, PoisonError};

use super::Host;
use super::crew::Role;
use super::matmul::{self, Scratch};
use crate::backend::{Part, chunk_delay, sealed};
use crate::element::{DType, bf16, f16};
use crate::error::{Error, Result};
use crate::protocol::drive::{self, CopyThread};
use crate::protocol::plan::MAX_WORLD;
use crate::protocol::{Epoch, FlagBlock, Plan, Pull, Tile};
use crate::ranks::members::Members;
use crate::trace::span::{Lane, Span, Work, now};

/// Where an operation's matrices lie. Threads share it; the protocol says who may touch which rows when.
#[derive(Clone, Copy)]
struct Pointers {
    dtype: DType,
    b: Option<*const u8>,
    bias: Option<*const u8>,
    out: Option<*mut u8>,
}

// SAFETY: the pointers are to memory that `run`'s caller borrows while the threads use it: `b` and `bias`
// shared and only read, `out` exclusively and written in disjoint tiles.
unsafe impl Sync for Pointers {}

pub fn run(
    host: &Host,
    members: &Members,
    plan: &Plan,
    part: Part,
    epoch: Epoch,
    operands: sealed::Operands<Host>,
    trace: Option<&mut Vec<Span>>,
) -> Result<()> {
    let rank = members.rank;
    let blocks: [FlagBlock; MAX_WORLD] =
        std::array::from_fn(|rank| host.flags.of(rank.min(members.world - 1)));
    let blocks = &blocks[..members.world];
    let a = operands.a;
    let pointers = Pointers {
        dtype: operands.dtype,
        b: operands.b.map(|b| b.as_ptr().cast_const()),
        bias: operands.bias.map(|bias| bias.as_ptr().cast_const()),
        out: operands.out.map(|out| out.as_ptr()),
    };
    let pushes = part.pushes(plan, epoch);
    let recorder = Recorder(trace.map(Mutex::new));
    let k = plan.problem().k();

    let copy = || {
        let copy = |pull: &Pull| {
            let begin = recorder.begin();
            delay(rank, pull.flag, epoch);
            // SAFETY: both ranks' memories hold M rows of `row_bytes`. The source's rows are final: `ready`
            // has been acquired, and the source does not write them before `done`. Nobody reads the same
            // rows here before this pull's flag is released, and no tile of an earlier operation does any
            // more, because an operation ends after its tiles.
            unsafe { copy_part(a.of(pull.source), a.own(), &pull.rows, &pull.columns, k) };
            let work = Work::Pull {
                source: pull.source,
                rows: pull.rows.clone(),
            };
            recorder.end(begin, Lane::Copy, || work);
        };
        let mut engine = CopyThread {
            rank,
            blocks,
            waiter: members,
            copy,
        };
        drive::gather(plan, epoch, &mut engine)
    };

    let push = || {
        drive::push(plan, epoch, blocks, members, |push| {
            delay(push.peer, push.flag, epoch);
            // SAFETY: as above, from the other side. The own rows are the caller's, who waits for this. Nobody reads the
            // peer's before this push's flag is released, nor tiles of an earlier operation any more, for the peer's
            // `ready` has been acquired.
            unsafe { copy_part(a.own(), a.of(push.peer), &push.rows, &push.columns, k) };
        })
    };

    let next = AtomicUsize::new(0);
    let multiply = |worker: usize| {
        // A panic in a tile leaves nothing in the scratch that the next tile would read.
        let mut scratch = host.scratch[worker]
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let lane = Lane::Worker(worker);
        let mut idle_since = recorder.begin();
        let mut tile = |_: usize, tile: &Tile| {
            let source = plan.source_of_tile(tile);
            if !tile.flags().is_empty() {
                recorder.end(idle_since, lane, || Work::Wait { source });
            }
            let begin = recorder.begin();
            // SAFETY: the tile's flags have been acquired, or the caller has made sure of its rows in
            // another way, or does not use the output (Part::Unordered: racing reads of plain bytes, whose
            // values nobody looks at). Tiles of the output are disjoint, and taken once each.
            unsafe { multiply_tile(&mut scratch, plan, tile, a.own(), &pointers) };
            recorder.end(begin, lane, || Work::Tile {
                source,
                m: tile.m,
                n: tile.n,
            });
            idle_since = recorder.begin();
        };
        if part == Part::Fused {
            return drive::multiply(plan, epoch, blocks[rank].chunk, &next, members, tile);
        }
        while let Some((index, entry)) = drive::take(plan, &next) {
            tile(index, entry);
        }
        Ok(())
    };

    if part.gathers() {
        drive::announce(rank, epoch, blocks);
    }
    let failure = Mutex::new(None);
    host.crew.run(&|role| {
        let result = match role {
            Role::Copier if pushes => push(),
            Role::Copier if part.gathers() => copy(),
            Role::Worker(worker) if part.multiplies() => multiply(worker),
            _ => Ok(()),
        };
        if let Err(error) = result {
            let mut failure = failure.lock().unwrap_or_else(PoisonError::into_inner);
            failure.get_or_insert(error);
        }
    });
    let failure: Option<Error> = failure.into_inner().unwrap_or_else(PoisonError::into_inner);
    if let Some(error) = failure {
        return Err(error);
    }
    // What was pushed is on its way no more; what is pulled, the peers must say.
    if part.gathers() && !pushes {
        drive::await_done(rank, epoch, blocks, members)?;
    }
    Ok(())
}

/// Copies a part of a matrix whose rows have `k` columns to the same place of another.
///
/// # Safety
/// Both hold the part; nobody writes what is read, nor reads or writes what is written.
unsafe fn copy_part(
    from: *const u8,
    to: *mut u8,
    rows: &Range<usize>,
    columns: &Range<usize>,
    k: usize,
) {
    let copy = |first: usize, count: usize| {
        let (offset, bytes) = (first * size_of::<u16>(), count * size_of::<u16>());
        // SAFETY: as this function's.
        unsafe { std::ptr::copy_nonoverlapping(from.add(offset), to.add(offset), bytes) };
    };
    if columns.len() == k {
        return copy(rows.start * k, rows.len() * k);
    }
    for row in rows.clone() {
        copy(row * k + columns.start, columns.len());
    }
}

/// # Safety
/// `a` is [M, K] of the plan's problem, and the rows of the tile are not written meanwhile; the pointers are to
/// [N, K], [N] and [M, N] elements of their type, and nobody else touches the tile of the output.
unsafe fn multiply_tile(
    scratch: &mut Scratch,
    plan: &Plan,
    tile: &Tile,
    a: *const u8,
    pointers: &Pointers,
) {
    let (Some(b), Some(out)) = (pointers.b, pointers.out) else {
        return;
    };
    let (rows, columns) = (plan.tile_rows(tile), plan.tile_columns(tile));
    let (n, k) = (plan.problem().n(), plan.problem().k());
    macro_rules! run {
        ($type:ty) => {{
            // SAFETY: as this function's; memory is page-aligned, so every element is aligned, and any bits are
            // a valid float.
            let matrices = unsafe {
                let first = rows.start * k;
                matmul::Operands::<$type> {
                    a: std::slice::from_raw_parts(a.cast::<$type>().add(first), rows.len() * k),
                    b: std::slice::from_raw_parts(
                        b.cast::<$type>().add(columns.start * k),
                        columns.len() * k,
                    ),
                    bias: pointers.bias.map(|bias| {
                        std::slice::from_raw_parts(
                            bias.cast::<$type>().add(columns.start),
                            columns.len(),
                        )
                    }),
                    k,
                }
            };
            matmul::tile(scratch, &matrices, plan.config().tile_k, |row, values| {
                let offset = (rows.start + row) * n + columns.start;
                // SAFETY: as above; the slice is one row of this tile.
                let to = unsafe {
                    std::slice::from_raw_parts_mut(out.cast::<$type>().add(offset), columns.len())
                };
                <$type as crate::element::Element>::round(values, to);
            });
        }};
    }
    match pointers.dtype {
        DType::Bf16 => run!(bf16),
        DType::F16 => run!(f16),
    }
}

/// Notes what happened when, if somebody wants to know.
struct Recorder<'a>(Option<Mutex<&'a mut Vec<Span>>>);

impl Recorder<'_> {
    fn begin(&self) -> u64 {
        if self.0.is_some() { now() } else { 0 }
    }

    fn end(&self, begin: u64, lane: Lane, work: impl FnOnce() -> Work) {
        if let Some(spans) = &self.0 {
            let span = Span {
                lane,
                work: work(),
                begin,
                end: now(),
            };
            spans
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .push(span);
        }
    }
}

fn delay(rank: usize, flag: usize, epoch: Epoch) {
    if let Some(time) = chunk_delay(rank, flag, epoch) {
        std::thread::sleep(time);
    }
}
