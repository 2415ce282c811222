//! Walks a schedule with a rank's threads.

use std::sync::atomic::AtomicUsize;
use std::sync::{Mutex, PoisonError};

use super::Host;
use super::matmul::{self, Scratch};
use super::workers::Role;
use crate::backend::chunk_delay;
use crate::backend::sealed::{Bound, Call};
use crate::element::{DType, bf16, f16};
use crate::error::{Error, Result};
use crate::ranks::members::Members;
use crate::schedule::drive::{self, CopyThread};
use crate::schedule::layout::MAX_WORLD;
use crate::schedule::{Epoch, Extent, FlagBlock, Product, Schedule, Tile, Transfer};
use crate::span::{Lane, Span, Work, now};

/// Where a product's matrices lie. Threads share it; the protocol says who may touch which rows when.
#[derive(Clone, Copy)]
struct Pointers {
    dtype: DType,
    a: *const u8,
    b: *const u8,
    bias: Option<*const u8>,
    out: *mut u8,
}

// SAFETY: the pointers are to memory that `run`'s caller borrows while the threads use it: `b` and `bias`
// shared and only read, `out` exclusively and written in disjoint tiles; `a` as the protocol says.
unsafe impl Sync for Pointers {}

impl Pointers {
    fn of(schedule: &Schedule, matrices: &[Bound<Host>]) -> Option<Pointers> {
        let product = schedule.product()?;
        let input = |number: usize| Some(matrices[number].input()?.as_ptr().cast_const());
        Some(Pointers {
            dtype: schedule.matrices()[product.a].dtype,
            a: matrices[product.a].symmetric()?.own().cast_const(),
            b: input(product.b)?,
            bias: input(product.bias),
            out: matrices[product.out].output()?.as_ptr(),
        })
    }
}

pub fn run(host: &Host, members: &Members, schedule: &Schedule, call: Call<Host>) -> Result<()> {
    let Call {
        epoch,
        matrices,
        trace,
    } = call;
    let rank = members.rank;
    let blocks: [FlagBlock; MAX_WORLD] =
        std::array::from_fn(|rank| host.flags.of(rank.min(members.world - 1)));
    let blocks = &blocks[..members.world];
    let pointers = Pointers::of(schedule, matrices);
    let recorder = Recorder(trace.map(Mutex::new));

    let transfer = || {
        let copy = |transfer: &Transfer| {
            let begin = recorder.begin();
            delay(transfer.to, transfer.flag, epoch);
            for region in &transfer.regions {
                let extent = schedule.matrices()[region.matrix].extent_of(region);
                let Some(memory) = matrices[region.matrix].symmetric() else {
                    continue;
                };
                // SAFETY: the memories of both ranks hold the matrix. What is read is final: `ready` of a source that is
                // pulled from has been acquired, and it does not write its rows before `done`; the own rows are the
                // caller's, who waits for this; and of what is passed on the flags have been acquired. Nobody reads what is
                // written before this transfer's flag is released, nor do tiles of an operation before any more: this
                // rank's have ended, and a peer has said `ready` since.
                unsafe { copy_part(memory.of(transfer.from), memory.of(transfer.to), &extent) };
            }
            if transfer.to == rank {
                recorder.end(begin, Lane::Copy, || Work::Pull {
                    source: transfer.source,
                    rows: transfer.regions[0].rows.clone(),
                });
            }
        };
        let mut engine = CopyThread {
            rank,
            blocks,
            waiter: members,
            copy,
        };
        drive::transfer(schedule, schedule.moves(), epoch, &mut engine)
    };

    let next = AtomicUsize::new(0);
    let multiply = |worker: usize, product: &Product, pointers: &Pointers| {
        // A panic in a tile leaves nothing in the scratch that the next tile would read.
        let mut scratch = host.scratch[worker]
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let lane = Lane::Worker(worker);
        let mut idle_since = recorder.begin();
        let tile = |_: usize, tile: &Tile| {
            let source = schedule.source_of_tile(tile);
            if !tile.flags().is_empty() {
                recorder.end(idle_since, lane, || Work::Wait { source });
            }
            let begin = recorder.begin();
            // SAFETY: the tile's flags have been acquired; if it has none, its rows are this rank's own, or the caller has
            // made sure of them in another way, or does not use the output (racing reads of plain bytes, whose values
            // nobody looks at). Tiles of the output are disjoint, and taken once each.
            unsafe { multiply_tile(&mut scratch, product, tile, pointers) };
            recorder.end(begin, lane, || Work::Tile {
                source,
                m: tile.m,
                n: tile.n,
            });
            idle_since = recorder.begin();
        };
        drive::multiply(schedule, epoch, blocks[rank].chunk, &next, members, tile)
    };

    if schedule.handshake() {
        drive::announce(rank, epoch, blocks);
    }
    let failure = Mutex::new(None);
    host.workers.run(&|role| {
        let result = match (role, schedule.product(), &pointers) {
            (Role::Copier, ..) => transfer(),
            (Role::Worker(worker), Some(product), Some(pointers)) => {
                multiply(worker, product, pointers)
            }
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
    drive::complete(schedule, epoch, blocks, members)
}

/// Copies a part of a matrix to the same place of another rank's.
///
/// # Safety
/// Both hold the part; nobody writes what is read, nor reads or writes what is written.
unsafe fn copy_part(from: *const u8, to: *mut u8, extent: &Extent) {
    let copy = |offset: usize, bytes: usize| {
        // SAFETY: as this function's.
        unsafe { std::ptr::copy_nonoverlapping(from.add(offset), to.add(offset), bytes) };
    };
    if let Some(bytes) = extent.contiguous() {
        return copy(extent.offset, bytes);
    }
    for row in 0..extent.rows {
        copy(extent.offset + row * extent.pitch, extent.width);
    }
}

/// # Safety
/// The pointers are to [m, k], [n, k], [n] and [m, n] elements of their type; the rows of the tile are not written meanwhile,
/// and nobody else touches the tile of the output.
unsafe fn multiply_tile(
    scratch: &mut Scratch,
    product: &Product,
    tile: &Tile,
    pointers: &Pointers,
) {
    let (rows, columns) = (product.rows(tile), product.columns(tile));
    let Product { n, k, .. } = *product;
    let Pointers { a, b, out, .. } = *pointers;
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
            matmul::tile(scratch, &matrices, product.config.tile.k, |row, values| {
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
