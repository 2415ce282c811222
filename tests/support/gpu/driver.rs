//! Calls of the CUDA driver: contexts, captures, memory of the caller's.

use std::ffi::c_void;
use std::ops::RangeInclusive;
use std::time::Duration;

use cudarc::driver::sys;
use gemmesh::{Cuda, Group};

#[track_caller]
pub fn driver(result: sys::CUresult) {
    assert_eq!(result, sys::CUresult::CUDA_SUCCESS);
}

/// The primary context of a rank's GPU, current on this thread and kept while groups come and go.
pub struct Context(sys::CUdevice);

impl Context {
    pub fn retain(rank: usize) -> Context {
        let (mut count, mut device, mut context) = (0, 0, std::ptr::null_mut());
        // SAFETY: writes the locals.
        unsafe {
            driver(sys::cuInit(0));
            driver(sys::cuDeviceGetCount(&mut count));
            driver(sys::cuDeviceGet(&mut device, rank as i32 % count));
            driver(sys::cuDevicePrimaryCtxRetain(&mut context, device));
            driver(sys::cuCtxSetCurrent(context));
        }
        Context(device)
    }

    pub fn free_bytes(&self) -> usize {
        let (mut free, mut total) = (0, 0);
        // SAFETY: writes the locals.
        unsafe { driver(sys::cuMemGetInfo_v2(&mut free, &mut total)) };
        free
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once.
        unsafe { driver(sys::cuDevicePrimaryCtxRelease_v2(self.0)) };
    }
}

/// The priorities of the current context's streams, the greatest first: it is the least number.
pub fn priorities() -> RangeInclusive<i32> {
    let (mut least, mut greatest) = (0, 0);
    // SAFETY: writes the locals.
    unsafe { driver(sys::cuCtxGetStreamPriorityRange(&mut least, &mut greatest)) };
    greatest..=least
}

/// A stream of the current context that waits for no other, of a priority; 0 is the default.
pub fn stream(priority: i32) -> sys::CUstream {
    let mut stream = std::ptr::null_mut();
    let non_blocking = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
    // SAFETY: writes the local.
    unsafe {
        driver(sys::cuStreamCreateWithPriority(
            &mut stream,
            non_blocking,
            priority,
        ));
    }
    stream
}

/// Makes what is put on a stream of the current context later wait.
pub fn pause(stream: sys::CUstream, time: Duration) {
    unsafe extern "C" fn sleep(micros: *mut c_void) {
        std::thread::sleep(Duration::from_micros(micros as u64));
    }
    let micros = time.as_micros() as u64 as *mut c_void;
    // SAFETY: the function reads the number that the pointer is, and makes no CUDA call.
    unsafe { driver(sys::cuLaunchHostFunc(stream, Some(sleep), micros)) };
}

/// Records what `f` puts on the group's stream, and throws it away.
pub fn captured(group: &Group<Cuda>, mode: sys::CUstreamCaptureMode, f: impl FnOnce()) {
    let stream: sys::CUstream = group.stream().cast();
    // SAFETY: the stream lives as long as the group.
    unsafe { driver(sys::cuStreamBeginCapture_v2(stream, mode)) };
    f();
    let mut graph = std::ptr::null_mut();
    // SAFETY: as above; a graph that was made is destroyed once.
    unsafe {
        driver(sys::cuStreamEndCapture(stream, &mut graph));
        driver(sys::cuGraphDestroy(graph));
    }
}

pub const GLOBAL: sys::CUstreamCaptureMode =
    sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_GLOBAL;
pub const RELAXED: sys::CUstreamCaptureMode =
    sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_RELAXED;

/// A graph that was captured from the group's stream, ready to run.
pub struct Replay {
    graph: sys::CUgraph,
    executable: sys::CUgraphExec,
    stream: sys::CUstream,
}

impl Replay {
    pub fn capture(
        group: &Group<Cuda>,
        mode: sys::CUstreamCaptureMode,
        f: impl FnOnce(),
    ) -> Replay {
        let stream: sys::CUstream = group.stream().cast();
        let (mut graph, mut executable) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the stream lives as long as the group; the calls write the locals.
        unsafe {
            driver(sys::cuStreamBeginCapture_v2(stream, mode));
            f();
            driver(sys::cuStreamEndCapture(stream, &mut graph));
            driver(sys::cuGraphInstantiateWithFlags(&mut executable, graph, 0));
        }
        Replay {
            graph,
            executable,
            stream,
        }
    }

    pub fn launch(&self) {
        // SAFETY: both live, and so does what was captured.
        unsafe { driver(sys::cuGraphLaunch(self.executable, self.stream)) };
    }
}

impl Drop for Replay {
    fn drop(&mut self) {
        // SAFETY: made by `capture`; the stream lives as long as the group, and the last launch is waited for.
        unsafe {
            driver(sys::cuStreamSynchronize(self.stream));
            driver(sys::cuGraphExecDestroy(self.executable));
            driver(sys::cuGraphDestroy(self.graph));
        }
    }
}

/// Device memory of the caller's, full of 0x5a.
pub struct Foreign {
    pub ptr: u64,
    pub bytes: usize,
}

impl Foreign {
    pub fn new(bytes: usize) -> Foreign {
        let mut ptr = 0;
        // SAFETY: writes the local, then what was allocated.
        unsafe {
            driver(sys::cuMemAlloc_v2(&mut ptr, bytes));
            driver(sys::cuMemsetD8_v2(ptr, 0x5a, bytes));
            driver(sys::cuCtxSynchronize());
        }
        Foreign { ptr, bytes }
    }

    pub fn read(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.bytes];
        // SAFETY: as many bytes as were allocated.
        unsafe {
            driver(sys::cuMemcpyDtoH_v2(
                bytes.as_mut_ptr().cast(),
                self.ptr,
                self.bytes,
            ));
        }
        bytes
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        // SAFETY: allocated once.
        unsafe { driver(sys::cuMemFree_v2(self.ptr)) };
    }
}
