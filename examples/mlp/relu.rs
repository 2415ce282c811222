//! A kernel of the example's own, between two operations on the group's stream.

use std::cell::OnceCell;
use std::ffi::c_void;

use cudarc::driver::{result, sys};
use gemmesh::{Cuda, Error, Group, Matrix, Result, bf16};

use crate::Activation;

/// Two elements a thread. A program of some size has a .cu file and nvcc.
const RELU: &str = "
.version 7.8
.target sm_90
.address_size 64
.visible .entry relu(.param .u64 at, .param .u32 count) {
    .reg .pred %past;
    .reg .b32 %i, %n, %cta, %size, %x, %zero;
    .reg .b64 %base, %offset;
    ld.param.u64 %base, [at];
    ld.param.u32 %n, [count];
    mov.u32 %cta, %ctaid.x;
    mov.u32 %size, %ntid.x;
    mov.u32 %i, %tid.x;
    mad.lo.u32 %i, %cta, %size, %i;
    setp.ge.u32 %past, %i, %n;
    @%past ret;
    mul.wide.u32 %offset, %i, 4;
    add.u64 %base, %base, %offset;
    ld.global.b32 %x, [%base];
    mov.b32 %zero, 0;
    max.bf16x2 %x, %x, %zero;
    st.global.b32 [%base], %x;
    ret;
}
\0";

thread_local! {
    static KERNEL: OnceCell<sys::CUfunction> = const { OnceCell::new() };
}

/// The kernel, loaded once, into the context that the group uses: the device's primary one. It stays current on this thread.
fn kernel(group: &Group<Cuda>) -> Result<sys::CUfunction> {
    if let Some(kernel) = KERNEL.with(|kernel| kernel.get().copied()) {
        return Ok(kernel);
    }
    let refused = || refused(group.rank());
    let mut context = std::ptr::null_mut();
    // SAFETY: the stream lives as long as the group; the call writes the local.
    let found = unsafe { sys::cuStreamGetCtx(group.stream().cast(), &mut context) };
    found.result().map_err(refused())?;
    // SAFETY: the context is the group's; the text ends with a zero; the module is never unloaded.
    let function = unsafe {
        result::ctx::set_current(context).map_err(refused())?;
        let module = result::module::load_data(RELU.as_ptr().cast()).map_err(refused())?;
        result::module::get_function(module, c"relu".to_owned()).map_err(refused())?
    };
    KERNEL.with(|kernel| kernel.set(function).ok());
    Ok(function)
}

fn refused(rank: usize) -> impl FnOnce(result::DriverError) -> Error {
    move |error| Error::System {
        rank: Some(rank),
        action: "load or launch the kernel of relu".into(),
        reason: error.to_string(),
    }
}

impl Activation for Cuda {
    fn relu(group: &Group<Cuda>, hidden: &mut Matrix<Cuda, bf16>) -> Result<()> {
        const THREADS: u32 = 256;
        let (at, pitch) = hidden.as_device_ptr();
        let [rows, _] = hidden.shape();
        // Padding too: nobody reads it.
        let pairs = (rows * pitch / 4) as u32;
        let arguments = &mut [
            (&raw const at).cast_mut().cast::<c_void>(),
            (&raw const pairs).cast_mut().cast(),
        ];
        let grid = (pairs.div_ceil(THREADS), 1, 1);
        let (kernel, stream) = (kernel(group)?, group.stream().cast());
        // SAFETY: the kernel takes an address and a count of pairs; the matrix is as long, and lives until the stream has
        // passed, as gemmesh's own do.
        let launched =
            unsafe { result::launch_kernel(kernel, grid, (THREADS, 1, 1), 0, stream, arguments) };
        launched.map_err(refused(group.rank()))
    }
}
