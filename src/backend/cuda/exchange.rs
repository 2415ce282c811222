//! Rows that a kernel stores to the peers where nothing is multiplied.

use std::ffi::c_void;

use super::Cuda;
use super::abi::{
    GEMMESH_EXCHANGE_THREADS, GemmeshParams, GemmeshReduction, GemmeshSend, GemmeshSends,
};
use super::program::{self, Place, Program};
use crate::backend::sealed::Call;
use crate::error::{Error, Result};
use crate::schedule::layout::{MAX_WORLD, limit};
use crate::schedule::{Move, Route, Schedule};

/// What a kernel stores and loads at once.
const PIECE: usize = 16;
/// CTAs of a grid, all of which run at the same time: as many fit at least, for a multiprocessor holds two.
const MOST_CTAS: usize = 128;

/// Refuses what the kernel can't store: it goes from one matrix to another, in whole pieces.
pub fn check(schedule: &Schedule) -> Result<()> {
    let mut matrices = None;
    for stored in schedule.moves().filter(|moved| moved.route == Route::Store) {
        limit("regions that a kernel stores", stored.regions.len(), 1, 1)?;
        let Move { from, to } = &stored.regions[0];
        let first = *matrices.get_or_insert((from.matrix, to.matrix));
        let others = usize::from(first != (from.matrix, to.matrix));
        limit("other matrices that a kernel stores", others, 0, 0)?;
        let bytes = schedule.matrices()[from.matrix].dtype.bytes();
        for column in [from.columns.start, from.columns.end, to.columns.start] {
            let what = "bytes of a row beyond 16, of what a kernel stores,";
            limit(what, column * bytes % PIECE, 0, 0)?;
        }
        let what = "bytes of a row of which a kernel stores a part";
        limit(what, from.columns.end * bytes, 0, u32::MAX as usize)?;
        let shifted = usize::from(from.columns != to.columns);
        limit("other columns that a kernel stores", shifted, 0, 0)?;
    }
    Ok(())
}

/// What the kernel stores: the peers' first.
pub fn sends(schedule: &Schedule) -> Vec<GemmeshSend> {
    if schedule.product().is_some() {
        return Vec::new();
    }
    let stored = schedule.moves().filter(|moved| moved.route == Route::Store);
    let sends = stored.map(|transfer| {
        let Move { from, to } = &transfer.regions[0];
        let bytes = schedule.matrices()[from.matrix].dtype.bytes();
        GemmeshSend {
            from_row: from.rows.start as u32,
            to_row: to.rows.start as u32,
            column: (from.columns.start * bytes) as u32,
            width: (from.columns.len() * bytes) as u32,
            rows: from.rows.len() as u32,
            peer: transfer.to as u32,
            flag: transfer.flag as u32,
            reserved: 0,
        }
    });
    sends.collect()
}

/// Puts the kernel on the main stream.
pub fn launch(at: &Place, program: &Program, call: &Call<Cuda>) -> Result<()> {
    let Place { cuda, main, .. } = *at;
    let (schedule, matrices) = (&program.schedule, call.matrices);
    let rank = at.members.rank;
    let moved = schedule.arrivals().iter().chain(schedule.moves());
    let Some(Move { from, to }) = moved.map(|moved| &moved.regions[0]).next() else {
        return Err(Error::Message {
            rank,
            reason: "an exchange of nothing".into(),
        });
    };
    let (source, target) = (from.matrix, to.matrix);
    // Who sends nothing may have nothing bound.
    let (from, from_pitch) = program::place(schedule, matrices, source).unwrap_or((0, 0));
    let (sends, count) = program.sends();
    let reduction = schedule.reduction();
    let mut sums = match reduction {
        Some(reduction) => program::sums(at, schedule, reduction, 0..reduction.rows, call)?,
        None => NOTHING_ADDED,
    };
    let mut sends = GemmeshSends {
        sends: sends as *const GemmeshSend,
        from: from as *const c_void,
        from_pitch: from_pitch as u64,
        to_pitch: schedule.matrices()[target].row_bytes() as u64,
        count,
        flags: schedule.arrivals().len() as u32,
    };
    let mut params: GemmeshParams = program.params(at, call, target);
    let dtype = schedule.matrices()[target].dtype;
    let kernel = cuda.kernels.exchange(dtype);
    let pieces = reduction.map_or(0, |r| r.rows * (r.n * dtype.bytes()).div_ceil(PIECE));
    let adders = pieces.div_ceil(GEMMESH_EXCHANGE_THREADS as usize);
    let most = MOST_CTAS.min(2 * cuda.device.multiprocessors());
    let grid = adders.max(count as usize).clamp(1, most);
    let mut arguments = [
        (&raw mut params).cast(),
        (&raw mut sends).cast(),
        (&raw mut sums).cast(),
    ];
    // SAFETY: the arguments are what abi.h says. The matrices, the tables and the flags are alive until the stream has passed: as in
    // `Launch::launch`.
    unsafe {
        kernel.launch(
            main,
            grid as u32,
            GEMMESH_EXCHANGE_THREADS,
            0,
            &mut arguments,
        )
    }
}

const NOTHING_ADDED: GemmeshReduction = GemmeshReduction {
    addends: [std::ptr::null(); MAX_WORLD],
    addend_pitches: [0; MAX_WORLD],
    bias: std::ptr::null(),
    out: std::ptr::null_mut(),
    out_pitch: 0,
    count: 0,
    rows: 0,
    n: 0,
    reserved: 0,
};
