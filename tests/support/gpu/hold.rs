//! Other people's kernels.

use cudarc::driver::sys;

use super::driver;

/// A kernel that holds multiprocessors until it is told to let go.
pub struct Hold {
    stream: sys::CUstream,
    module: sys::CUmodule,
    word: *mut u32,
}

/// Each CTA takes so much shared memory that it has its multiprocessor to itself, and ends when the word is not zero,
/// or after some twenty seconds whatever happens.
const HOLD: &str = "
.version 7.8
.target sm_80
.address_size 64
.visible .entry hold(.param .u64 word)
{
    .reg .u64 %address;
    .reg .u32 %value;
    .reg .u32 %turns;
    .reg .pred %go_on;
    ld.param.u64 %address, [word];
    mov.u32 %turns, 0;
again:
    nanosleep.u32 2000;
    ld.relaxed.sys.global.u32 %value, [%address];
    setp.ne.u32 %go_on, %value, 0;
    @%go_on bra done;
    add.u32 %turns, %turns, 1;
    setp.lt.u32 %go_on, %turns, 10000000;
    @%go_on bra again;
done:
    ret;
}
\0";

impl Hold {
    /// Puts the kernel with `ctas` CTAs on `stream`, or on a stream of its own, of the current context.
    pub fn start(ctas: u32, stream: Option<sys::CUstream>) -> Hold {
        const SHARED: u32 = 200 << 10;
        let (mut module, mut function) = (std::ptr::null_mut(), std::ptr::null_mut());
        let (mut word, mut at) = (std::ptr::null_mut(), 0u64);
        let own = super::stream(0);
        // SAFETY: writes the locals; the kernel reads the word, which lives until it has ended.
        unsafe {
            driver(sys::cuModuleLoadData(&mut module, HOLD.as_ptr().cast()));
            driver(sys::cuModuleGetFunction(
                &mut function,
                module,
                c"hold".as_ptr(),
            ));
            driver(sys::cuFuncSetAttribute(
                function,
                sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                SHARED as i32,
            ));
            driver(sys::cuMemHostAlloc(
                &mut word,
                4,
                sys::CU_MEMHOSTALLOC_DEVICEMAP,
            ));
            word.cast::<u32>().write_volatile(0);
            driver(sys::cuMemHostGetDevicePointer_v2(&mut at, word, 0));
            driver(sys::cuLaunchKernel(
                function,
                ctas,
                1,
                1,
                32,
                1,
                1,
                SHARED,
                stream.unwrap_or(own),
                [(&raw mut at).cast()].as_mut_ptr(),
                std::ptr::null_mut(),
            ));
        }
        Hold {
            stream: own,
            module,
            word: word.cast(),
        }
    }

    pub fn release(&self) {
        // SAFETY: the word lives.
        unsafe { self.word.write_volatile(1) };
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.release();
        // SAFETY: made by `start`. Freeing waits for the kernel.
        unsafe {
            driver(sys::cuCtxSynchronize());
            driver(sys::cuMemFreeHost(self.word.cast()));
            driver(sys::cuModuleUnload(self.module));
            driver(sys::cuStreamDestroy_v2(self.stream));
        }
    }
}
