//! Walks a schedule with a rank's threads.

use std::ops::Range;
use std::sync::atomic::AtomicUsize;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::matmul::Weight;
use super::sum::{Columns, Place, Places};
use super::workers::Role;
use super::{Host, Program, Scratch, matmul};
use crate::backend::chunk_delay;
use crate::backend::sealed::{Bound, Call, Callback};
use crate::element::{DType, Element, bf16, f16};
use crate::error::{Error, Result};
use crate::profile::nvtx::range;
use crate::profile::span::{Lane, Span, Work, now};
use crate::protocol::epoch::Epoch;
use crate::protocol::flag::FlagBlock;
use crate::ranks::members::Members;
use crate::schedule::drive::{self, CopyThread};
use crate::schedule::layout::MAX_WORLD;
use crate::schedule::{
    Block, Extent, MatrixSpec, Move, Product, Reduction, Region, Schedule, Tile, Transfer,
    WeightLayout,
};

/// Where the matrices of a call lie. Threads share it; the protocol says who may touch which rows when.
struct Pointers([Place; MAX_MATRICES]);

/// The most matrices of a schedule.
pub const MAX_MATRICES: usize = 12;

// SAFETY: the pointers are to memory that `run`'s caller borrows while the threads use it: what is only read shared, what is
// written exclusively and in disjoint parts; symmetric memory as the protocol says.
unsafe impl Sync for Pointers {}

impl Pointers {
    fn of(matrices: &[Bound<Host>], specs: &[MatrixSpec]) -> Pointers {
        let mut places = [Place::NOWHERE; MAX_MATRICES];
        for ((place, matrix), spec) in places.iter_mut().zip(matrices).zip(specs) {
            let (first, offset, pitch) = match matrix {
                Bound::Nothing => continue,
                Bound::Symmetric(memory) => (memory.own(), 0, spec.row_bytes()),
                Bound::Part(memory, offset) => (memory.own(), *offset, spec.row_bytes()),
                Bound::Input(memory, offset) | Bound::Output(memory, offset) => {
                    (memory.memory.as_ptr(), *offset, memory.pitch)
                }
            };
            // SAFETY: the operation that binds it has checked that it lies within.
            let ptr = unsafe { first.add(offset) };
            *place = Place { ptr, pitch };
        }
        Pointers(places)
    }
}

pub fn run(host: &Host, members: &Members, program: &Program, call: Call<Host>) -> Result<()> {
    let schedule = &program.schedule;
    let Call {
        epoch,
        matrices,
        trace,
        callback,
    } = call;
    let rank = members.rank;
    let blocks: [FlagBlock; MAX_WORLD] =
        std::array::from_fn(|rank| host.flags.of(rank.min(members.world - 1)));
    let blocks = &blocks[..members.world];
    let pointers = &Pointers::of(matrices, schedule.matrices());
    let mut produced = program
        .produced
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
    produced
        .iter_mut()
        .for_each(|produced| produced.begin(epoch));
    let produced = &produced[..];
    let recorder = Recorder(trace.map(Mutex::new));

    let transfer = || {
        let copy = |transfer: &Transfer| {
            let _range = range(|| format!("gemmesh {}", transfer.name()));
            let begin = recorder.begin();
            let begun = Instant::now();
            let mut bytes = 0;
            delay(transfer.to, transfer.flag, epoch);
            for Move { from, to } in &transfer.regions {
                // Memory of this rank's own may be no other's, and its rows may be padded.
                let of = |region: &Region, of: usize| {
                    let spec = schedule.matrices()[region.matrix];
                    let own = pointers.0[region.matrix];
                    let (place, pitch) = match of == rank {
                        true => (own.ptr, own.pitch),
                        false => (
                            matrices[region.matrix].symmetric()?.of(of),
                            spec.row_bytes(),
                        ),
                    };
                    Some((place, spec.extent_of(region, pitch)))
                };
                let (read, written) = (of(from, transfer.from), of(to, transfer.to));
                let (Some((source, read)), Some((target, written))) = (read, written) else {
                    continue;
                };
                // SAFETY: the memories of both ranks hold the matrix. What is read is final: `ready` of a source that is
                // pulled from has been acquired, and it does not write its rows before `done`; the own rows are the
                // caller's, who waits for this; and of what is passed on the flags have been acquired. Nobody reads what is
                // written before this transfer's flag is released, nor do tiles of an operation before any more: this
                // rank's have ended, and a peer has said `ready` since. What tiles of this rank make, or its caller, they have
                // made: the block's count has been acquired. Regions of one rank's memory do not overlap.
                unsafe { copy_part(source, &read, target, &written) };
                bytes += read.rows * read.width;
            }
            if let Some(rate) = host.link {
                let time = Duration::from_secs_f64(bytes as f64 / rate as f64);
                pace(members, begun, time);
            }
            recorder.end(begin, Lane::Copy, || {
                let rows = transfer.regions[0].to.rows.clone();
                match transfer.to == rank {
                    true => Work::Pull {
                        source: transfer.source,
                        rows,
                    },
                    false => Work::Push {
                        to: transfer.to,
                        rows,
                    },
                }
            });
        };
        let mut engine = CopyThread {
            rank,
            blocks,
            produced,
            waiter: members,
            copy,
        };
        drive::transfer(schedule, schedule.moves(), epoch, &mut engine)
    };

    let next = AtomicUsize::new(0);
    let multiply = |worker: usize, product: &Product| {
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
            // made sure of them in another way. Tiles of the output are disjoint, and taken once each.
            unsafe { multiply_tile(&mut scratch, schedule, product, tile, &pointers.0) };
            recorder.end(begin, lane, || Work::Tile {
                source: schedule.owner_of_tile(tile),
                m: tile.m,
                n: tile.n,
            });
            idle_since = recorder.begin();
        };
        let chunk = blocks[rank].chunk;
        drive::multiply(schedule, epoch, chunk, &next, produced, members, tile)
    };
    let reduce = |worker: usize, reduction: &Reduction| -> Result<()> {
        let chunk = blocks[rank].chunk;
        let idle_since = recorder.begin();
        drive::wait_addends(schedule, epoch, chunk, produced, members)?;
        if let Some(&source) = schedule.sources().last() {
            recorder.end(idle_since, Lane::Worker(worker), || Work::Wait { source });
        }
        let begin = recorder.begin();
        let workers = host.scratch.len();
        let share = |part: usize| reduction.rows * part / workers;
        let rows = share(worker)..share(worker + 1);
        let mut scratch = host.scratch[worker]
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        // SAFETY: all that comes has come, and what this rank makes is made. Workers make rows of their own.
        unsafe {
            add_rows(&mut scratch, schedule, reduction, rows.clone(), &pointers.0);
        }
        recorder.end(begin, Lane::Worker(worker), || Work::Add { rows });
        Ok(())
    };

    if schedule.handshake() {
        drive::announce(rank, epoch, blocks);
    }
    let failure = Mutex::new(None);
    let note = |result: Result<()>| {
        // Where a function of the caller's has forked and returns in the child, a thread that is not there may have
        // locked this.
        if let Err(error) = result
            && members.refuse_fork().is_ok()
        {
            let mut failure = failure.lock().unwrap_or_else(PoisonError::into_inner);
            failure.get_or_insert(error);
        }
    };
    let job = |role| {
        let _guard = ReportsPanic(members);
        let work = |worker| {
            let product = schedule.product();
            product.map_or(Ok(()), |product| multiply(worker, product))?;
            let reduction = schedule.reduction();
            reduction.map_or(Ok(()), |reduction| reduce(worker, reduction))
        };
        note(match role {
            Role::Copier => transfer(),
            Role::Worker(worker) => work(worker),
        });
    };
    let beside = || {
        let chunk = blocks[rank].chunk;
        let no_stream = std::ptr::null_mut();
        note(match callback {
            None => Ok(()),
            Some(Callback::Consumer(consumer)) => {
                let lane = Lane::Caller(0);
                let mut idle_since = recorder.begin();
                drive::consume(schedule, epoch, chunk, members, |transfer| {
                    let source = transfer.map_or(rank, |transfer| transfer.source);
                    if transfer.is_some() {
                        recorder.end(idle_since, lane, || Work::Wait { source });
                    }
                    let begin = recorder.begin();
                    let consumed = consumer(transfer, no_stream);
                    members.refuse_fork()?;
                    recorder.end(begin, lane, || Work::Call { rank: source });
                    idle_since = recorder.begin();
                    consumed
                })
            }
            Some(Callback::Producer(producer)) => {
                drive::produce(schedule, epoch, produced, |request| {
                    let begin = recorder.begin();
                    let produced = producer(request, no_stream);
                    members.refuse_fork()?;
                    let rank = request.owner;
                    recorder.end(begin, Lane::Caller(0), || Work::Call { rank });
                    produced
                })
            }
        });
    };
    host.workers.run(&job, beside);
    members.refuse_fork()?;
    let failure: Option<Error> = failure.into_inner().unwrap_or_else(PoisonError::into_inner);
    if let Some(error) = failure {
        return Err(error);
    }
    drive::complete(schedule, epoch, blocks, members)
}

/// Tells of a panic of its thread at once: also this rank's other threads may be waiting for what that was to do.
struct ReportsPanic<'a>(&'a Members);

impl Drop for ReportsPanic<'_> {
    fn drop(&mut self) {
        self.0.report_panic();
    }
}

/// Copies a part of a matrix to a part of another that is as large.
///
/// # Safety
/// Both matrices hold the part; nobody writes what is read, nor reads or writes what is written.
unsafe fn copy_part(from: *const u8, read: &Extent, to: *mut u8, written: &Extent) {
    let copy = |from_offset: usize, to_offset: usize, bytes: usize| {
        // SAFETY: as this function's.
        unsafe { std::ptr::copy_nonoverlapping(from.add(from_offset), to.add(to_offset), bytes) };
    };
    if let (Some(bytes), Some(_)) = (read.contiguous(), written.contiguous()) {
        return copy(read.offset, written.offset, bytes);
    }
    for row in 0..read.rows {
        let [from, to] = [read, written].map(|extent| extent.offset + row * extent.pitch);
        copy(from, to, read.width);
    }
}

/// # Safety
/// The matrices lie at their places, aligned for their type; the rows of the tile are not written meanwhile, nor what is added to
/// them, and nobody else touches the tile of the output.
unsafe fn multiply_tile(
    scratch: &mut Scratch,
    schedule: &Schedule,
    product: &Product,
    tile: &Tile,
    places: Places,
) {
    let matrices = schedule.matrices();
    // SAFETY: as this function's.
    unsafe {
        match matrices[product.a].dtype {
            DType::Bf16 => multiply_tile_of::<bf16>(scratch, matrices, product, tile, places),
            DType::F16 => multiply_tile_of::<f16>(scratch, matrices, product, tile, places),
            other => unreachable!("a schedule multiplies no {other}"),
        }
    }
}

/// # Safety
/// As [`multiply_tile`], and the operands are of this type.
unsafe fn multiply_tile_of<T: Element>(
    scratch: &mut Scratch,
    matrices: &[MatrixSpec],
    product: &Product,
    tile: &Tile,
    places: Places,
) {
    let (rows, columns) = (product.rows(tile), product.columns(tile));
    let Block {
        rows: block,
        weight,
        sum,
    } = product.block(tile);
    let columns_of_sum = Columns {
        sum,
        matrices,
        places,
        begin: columns.start,
        length: columns.len(),
    };
    let Scratch {
        tile: tile_scratch,
        sum: sum_scratch,
        times,
    } = scratch;
    let operands = |weight: usize| {
        // SAFETY: as this function's; any bits are a valid float.
        unsafe {
            matmul::Operands::<T> {
                a: places[product.a].part(rows.clone(), 0..product.k),
                b: match product.weight_layout {
                    WeightLayout::Nk => Weight::Nk(
                        places[product.weights[weight].b].part(columns.clone(), 0..product.k),
                    ),
                    WeightLayout::Kn => Weight::Kn(
                        places[product.weights[weight].b].part(0..product.k, columns.clone()),
                    ),
                },
            }
        }
    };
    let tile_k = product.config.tile.k;
    let width = columns.len();
    let times = product.gated.then(|| {
        let times = matmul::grown(times, rows.len() * width);
        matmul::tile(
            tile_scratch,
            &operands(weight + 1),
            tile_k,
            |row, values| {
                times[row * width..][..width].copy_from_slice(values);
            },
        );
        &*times
    });
    matmul::tile(tile_scratch, &operands(*weight), tile_k, |row, values| {
        let times = times.map(|times| &times[row * width..][..width]);
        let row = rows.start - block.start + row;
        // SAFETY: as this function's.
        unsafe { columns_of_sum.store::<T>(sum_scratch, row, values, times) };
    });
}

/// Makes some rows of a reduction.
///
/// # Safety
/// As [`multiply_tile`].
unsafe fn add_rows(
    scratch: &mut Scratch,
    schedule: &Schedule,
    reduction: &Reduction,
    rows: Range<usize>,
    places: Places,
) {
    let matrices = schedule.matrices();
    let columns = Columns {
        sum: &reduction.sum,
        matrices,
        places,
        begin: 0,
        length: reduction.n,
    };
    let dtype = reduction.dtype(matrices);
    for row in rows {
        // SAFETY: as this function's.
        unsafe {
            match dtype {
                DType::Bf16 => columns.store::<bf16>(&mut scratch.sum, row, &mut [], None),
                DType::F16 => columns.store::<f16>(&mut scratch.sum, row, &mut [], None),
                DType::F32 => columns.store::<f32>(&mut scratch.sum, row, &mut [], None),
                other => unreachable!("a schedule adds no {other}"),
            }
        }
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

/// Returns when `time` has passed since `begun`, or the group has failed.
fn pace(members: &Members, begun: Instant, time: Duration) {
    const NAP: Duration = Duration::from_millis(5);
    while let Some(left) = time.checked_sub(begun.elapsed()) {
        if left.is_zero() || members.fault().is_some() {
            return;
        }
        std::thread::sleep(left.min(NAP));
    }
}

fn delay(rank: usize, flag: usize, epoch: Epoch) {
    if let Some(time) = chunk_delay(rank, flag, epoch) {
        std::thread::sleep(time);
    }
}
