//! The kernel of a product.

use crate::backend::cuda::abi::GEMMESH_THREADS;
use crate::backend::cuda::driver::Stream;
use crate::backend::cuda::program::launch::ProductLaunch;
use crate::error::Result;

/// Puts a kernel on `stream`.
pub fn launch(stream: &Stream, launch: &ProductLaunch) -> Result<()> {
    let instance = &launch.kernel.instance;
    let (grid, shared_bytes) = (launch.grid(), instance.shared_bytes);
    let mut arguments = launch.arguments();
    // SAFETY: the arguments are what abi.h says. The matrices, the tables and the flags are alive until the stream
    // has passed: a caller's memory by contract of its view, the rest because it is freed after that only.
    unsafe {
        let function = &instance.function;
        function.launch(stream, grid, GEMMESH_THREADS, shared_bytes, &mut arguments)
    }
}
