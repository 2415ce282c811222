//! Copies of rows that the caller moves within this rank's memory.

use crate::backend::cuda::gpu::Gpu;
use crate::backend::cuda::program::operands::CallMatrix;
use crate::error::Result;

/// Copies `rows` rows of `width` bytes on the main stream.
pub fn copy_rows(
    gpu: &Gpu,
    from: CallMatrix,
    to: CallMatrix,
    rows: usize,
    width: usize,
) -> Result<()> {
    let _bound = gpu.device.bind()?;
    let main = gpu.main();
    // SAFETY: the caller has checked that both matrices have these rows. Their memory is freed after the mark. No peer
    // reads or writes the rows: earlier operations wait for the peers on this stream, and peers begin later ones with
    // this rank when its stream gets there. In a capture the caller keeps the matrices, as for every operation.
    unsafe {
        main.copy_rows((to.ptr, to.pitch), (from.ptr, from.pitch), width, rows)?;
    }
    if main.is_capturing()? {
        Ok(())
    } else {
        gpu.reclaimer.mark()
    }
}
