//! Launches of the kernels that multiply nothing.
//!
//! One stores rows to the peers, waits for the peers' rows and adds them. Another only adds, and the last quantises.

use std::ops::Range;

use super::context::{EnqueueContext, ProgramCall};
use crate::backend::cuda::abi::{
    GEMMESH_COLLECTIVE_THREADS, GEMMESH_REDUCE_THREADS, GemmeshQuantization,
};
use crate::backend::cuda::driver::{LaunchShape, Stream};
use crate::backend::cuda::program::operands::Operands;
use crate::backend::cuda::program::reduction::ReductionKernel;
use crate::backend::cuda::program::{GpuProgram, params, reduction};
use crate::error::Result;
use crate::schedule::{Reduction, Schedule};

/// Launches the kernel that stores rows and adds arrivals on the main stream, if the program has one.
pub fn launch(at: &EnqueueContext, program: &GpuProgram, call: &ProgramCall) -> Result<()> {
    let Some(kernel) = program.collective() else {
        return Ok(());
    };
    let (schedule, operands) = (&program.schedule, &call.operands);
    let run = at.run(program, call.epoch);
    let world = schedule.world();
    let mut params = params::of_call(&kernel.params, world, run, operands, kernel.target);
    let (mut sends, mut sums) = kernel.told(schedule, operands)?;
    let mut arguments = [
        (&raw mut params).cast(),
        (&raw mut sends).cast(),
        (&raw mut sums).cast(),
    ];
    let shape = LaunchShape::new(kernel.grid, GEMMESH_COLLECTIVE_THREADS);
    // SAFETY: the arguments are what abi.h says. The matrices, the tables and the flags are alive until the stream has
    // passed, as in `product::launch`.
    unsafe { kernel.function.launch(at.main, shape, &mut arguments) }
}

/// Launches the program's reduction on `stream`, behind the work that brings its addends.
///
/// Adds `rows`, or all rows if none are given. Does nothing if the program's main kernel adds them.
pub fn reduce(
    stream: &Stream,
    program: &GpuProgram,
    rows: Option<Range<usize>>,
    operands: &Operands,
) -> Result<()> {
    let Some((reduction, kernel)) = program.reduction() else {
        return Ok(());
    };
    if let Some(scales) = reduction.sum.scales {
        let told = reduction::quantization(&program.schedule, reduction, scales, operands)?;
        return quantize(stream, *kernel, false, told);
    }
    let rows = rows.unwrap_or(0..reduction.rows);
    add(
        stream,
        &program.schedule,
        (reduction, kernel),
        rows,
        operands,
    )
}

/// Launches a kernel that adds up `rows` of a reduction, after the work that brings the addends.
pub fn add(
    stream: &Stream,
    schedule: &Schedule,
    (reduction, kernel): (&Reduction, &ReductionKernel),
    rows: Range<usize>,
    operands: &Operands,
) -> Result<()> {
    let mut sums = reduction::sums(schedule, reduction, rows, operands)?;
    let shape = LaunchShape::new(kernel.grid(&sums), GEMMESH_REDUCE_THREADS);
    let mut arguments = [(&raw mut sums).cast()];
    // SAFETY: the argument is what abi.h says. The matrices are alive until the stream has passed, as in
    // `product::launch`.
    unsafe {
        let function = &kernel.function;
        function.launch(stream, shape, &mut arguments)
    }
}

/// Launches the kernel that quantises rows, after the work that makes them. `begins_early`: before a kernel that does so
/// has ended.
pub fn quantize(
    stream: &Stream,
    kernel: ReductionKernel,
    begins_early: bool,
    mut told: GemmeshQuantization,
) -> Result<()> {
    let shape = LaunchShape {
        begins_early,
        ..LaunchShape::new(kernel.grid_of_blocks(&told), GEMMESH_REDUCE_THREADS)
    };
    let mut arguments = [(&raw mut told).cast()];
    // SAFETY: the argument is what abi.h says. The matrices are alive until the stream has passed, as in
    // `product::launch`.
    unsafe { kernel.function.launch(stream, shape, &mut arguments) }
}
