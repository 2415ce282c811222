//! Operations that multiply nothing: one kernel stores the rows, waits for the peers' and adds them.

use std::ffi::c_void;

use crate::backend::cuda::Cuda;
use crate::backend::cuda::abi::{
    GEMMESH_EXCHANGE_THREADS, GEMMESH_IDENTITY, GemmeshParams, GemmeshReduction, GemmeshSend,
    GemmeshSends,
};
use crate::backend::cuda::program::sends::PIECE;
use crate::backend::cuda::program::{self, EnqueueContext, Program};
use crate::backend::sealed::Call;
use crate::error::{Error, Result};
use crate::schedule::Move;
use crate::schedule::layout::MAX_WORLD;

/// CTAs of a grid, all of which run at the same time: as many fit at least, for a multiprocessor holds two.
const MOST_CTAS: usize = 128;

/// Puts the kernel on the main stream.
pub fn launch(at: &EnqueueContext, program: &Program, call: &Call<Cuda>) -> Result<()> {
    let EnqueueContext { cuda, main, .. } = *at;
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
        pieces: (schedule.matrices()[source].row_bytes() / PIECE) as u32,
        reserved: 0,
    };
    let mut params: GemmeshParams = program.params(at, call, target);
    let dtype = schedule.matrices()[target].dtype;
    let kernel = cuda.kernels.exchange(dtype);
    let pieces = reduction.map_or(0, |r| r.rows * (r.n * dtype.bytes()).div_ceil(PIECE));
    let adders = pieces.div_ceil(GEMMESH_EXCHANGE_THREADS as usize);
    let most = MOST_CTAS.min(2 * cuda.device.multiprocessors());
    let moved = schedule.arrivals().len().max(count as usize);
    let grid = adders.max(moved).clamp(1, most);
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
    residual: std::ptr::null(),
    residual_pitch: 0,
    count: 0,
    rows: 0,
    n: 0,
    activation: GEMMESH_IDENTITY,
    is_f32: 0,
    reserved: 0,
};
