//! The launch of a product's kernel, and of the kernel that quantises its results.

use super::collective;
use crate::backend::cuda::driver::{LaunchShape, Stream};
use crate::backend::cuda::program::launch::ProductLaunch;
use crate::error::Result;

/// Launches a product's kernel on `stream`, and after it the one that quantises its results, if there is one.
pub fn launch(stream: &Stream, launch: &ProductLaunch) -> Result<()> {
    let instance = &launch.kernel.instance;
    let kernel = launch.kernel;
    let shape = LaunchShape {
        begins_early: kernel.begins_early,
        shared_bytes: instance.shared_bytes,
        ..LaunchShape::new(launch.grid(), instance.family.threads())
    };
    let mut arguments = launch.arguments();
    // SAFETY: the arguments are what abi.h says. The matrices, the tables and the flags are alive until the stream has
    // passed: a caller's memory by the contract of its view, all other memory because it is freed only after that.
    unsafe {
        let function = launch.function();
        function.launch(stream, shape, &mut arguments)?;
    }
    launch
        .quantized()
        .try_for_each(|(of, told)| collective::quantize(stream, of.kernel, of.begins_early, told))
}
