//! Streams, events and graphs that time the rows of the benchmark's table.

use cudarc::driver::{result as driver, sys as driver_sys};
use gemmesh::{Cuda, Group, Result};

use super::memory::{Scratch, refused};

/// More than the L2 cache of any supported GPU holds.
const FLUSH_BYTES: usize = 256 << 20;

/// The starting line of every measurement, and the clock.
pub struct Timer {
    pub group: Group<Cuda>,
    pub stream: driver_sys::CUstream,
    /// The beginning of the timed work.
    pub begin: driver_sys::CUevent,
    end: driver_sys::CUevent,
    flush: Scratch,
}

impl Timer {
    pub fn new(group: &Group<Cuda>) -> Result<Timer> {
        Ok(Timer {
            group: group.clone(),
            stream: group.stream().cast(),
            begin: event()?,
            end: event()?,
            flush: Scratch::new(FLUSH_BYTES)?,
        })
    }

    /// Flushes the L2 cache and aligns the ranks, on the device.
    pub fn prepare(&self) -> Result<()> {
        // SAFETY: the buffer has this length.
        unsafe { driver::memset_d8_async(self.flush.ptr(), 0, FLUSH_BYTES, self.stream) }
            .map_err(refused("flush the cache"))?;
        gemmesh::testing::align_streams(&self.group)
    }

    /// Microseconds on the device from the starting line to the end of the work that `run` enqueues on the stream.
    pub fn time(&self, run: impl FnOnce() -> Result<()>) -> Result<f64> {
        self.prepare()?;
        record(self.begin, self.stream)?;
        run()?;
        record(self.end, self.stream)?;
        self.group.synchronize()?;
        // This also waits for the baselines' work, which the group does not know.
        // SAFETY: the event lives.
        unsafe { driver::event::synchronize(self.end) }.map_err(refused("wait for the end"))?;
        // SAFETY: both have been recorded, and passed.
        unsafe { driver::event::elapsed(self.begin, self.end) }
            .map(|millis| f64::from(millis) * 1e3)
            .map_err(refused("read the time"))
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        // SAFETY: made by `new`, and the streams that recorded them have been waited for.
        unsafe {
            let _ = driver::event::destroy(self.begin);
            let _ = driver::event::destroy(self.end);
        }
    }
}

/// A stream beside the group's.
pub struct Side {
    pub stream: driver_sys::CUstream,
    joined: driver_sys::CUevent,
}

impl Side {
    pub fn new() -> Result<Side> {
        let stream = driver::stream::create(driver::stream::StreamKind::NonBlocking);
        Ok(Side {
            stream: stream.map_err(refused("make a stream"))?,
            joined: event()?,
        })
    }

    /// Runs both at the same time: `beside` on this stream, and `run` on that of `timer`, which then waits for both.
    pub fn run(
        &self,
        timer: &Timer,
        beside: impl FnOnce(driver_sys::CUstream) -> Result<()>,
        run: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        wait(self.stream, timer.begin)?;
        beside(self.stream)?;
        record(self.joined, self.stream)?;
        run()?;
        wait(timer.stream, self.joined)
    }
}

impl Drop for Side {
    fn drop(&mut self) {
        // SAFETY: made by `new` and not used again, because every row has been waited for.
        unsafe {
            let _ = driver::stream::destroy(self.stream);
            let _ = driver::event::destroy(self.joined);
        }
    }
}

fn event() -> Result<driver_sys::CUevent> {
    driver::event::create(driver_sys::CUevent_flags::CU_EVENT_DEFAULT)
        .map_err(refused("make an event"))
}

fn record(event: driver_sys::CUevent, stream: driver_sys::CUstream) -> Result<()> {
    // SAFETY: both live.
    unsafe { driver::event::record(event, stream) }.map_err(refused("record an event"))
}

fn wait(stream: driver_sys::CUstream, event: driver_sys::CUevent) -> Result<()> {
    let flags = driver_sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
    // SAFETY: both live.
    unsafe { driver::stream::wait_event(stream, event, flags) }
        .map_err(refused("wait for an event"))
}

/// Captured work of a stream, to be replayed.
pub struct Graph {
    graph: driver_sys::CUgraph,
    executable: driver_sys::CUgraphExec,
}

impl Graph {
    pub fn capture(
        stream: driver_sys::CUstream,
        run: impl FnOnce() -> Result<()>,
    ) -> Result<Graph> {
        let mode = driver_sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        let what = "capture a graph";
        let (mut graph, mut executable) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the stream lives, and the calls write the locals.
        unsafe {
            let begun = driver_sys::cuStreamBeginCapture_v2(stream, mode);
            begun.result().map_err(refused(what))?;
            let done = run();
            let ended = driver_sys::cuStreamEndCapture(stream, &mut graph);
            ended.result().map_err(refused(what))?;
            done?;
            let made = driver_sys::cuGraphInstantiateWithFlags(&mut executable, graph, 0);
            made.result().map_err(refused(what))?;
        }
        Ok(Graph { graph, executable })
    }

    pub fn launch(&self, stream: driver_sys::CUstream) -> Result<()> {
        // SAFETY: both live, and all that was captured lives as long as the benchmark.
        let launched = unsafe { driver_sys::cuGraphLaunch(self.executable, stream) };
        launched.result().map_err(refused("launch a graph"))
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: made by `capture`, and its last launch has been waited for.
        unsafe {
            let _ = driver_sys::cuGraphExecDestroy(self.executable);
            let _ = driver_sys::cuGraphDestroy(self.graph);
        }
    }
}

/// Makes the primary context of the rank's GPU current for the calls of this folder. Everything lies in it.
pub fn bind(group: &Group<Cuda>) -> Result<()> {
    // SAFETY: the group lives, so its stream does, and the context lives as long.
    unsafe {
        let mut context = std::ptr::null_mut();
        let found = driver_sys::cuStreamGetCtx(group.stream().cast(), &mut context);
        found.result().map_err(refused("find the context"))?;
        driver::ctx::set_current(context).map_err(refused("bind the context"))
    }
}
