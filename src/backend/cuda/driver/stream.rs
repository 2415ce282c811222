//! Streams and events.

use std::any::Any;
use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::sync::Arc;

use cudarc::driver::sys;

use super::memory::plain;
use super::{Device, DevicePtr, check};
use crate::error::Result;

/// A stream, whose work the device does in order. It may be the caller's.
#[derive(Debug)]
pub struct Stream {
    pub(super) device: Arc<Device>,
    pub(super) stream: sys::CUstream,
    /// Keeps a caller's stream alive. None for this library's streams.
    owner: Option<Arc<dyn Any + Send + Sync>>,
}

// SAFETY: streams may be used by any thread.
unsafe impl Send for Stream {}
// SAFETY: the driver's calls are thread-safe.
unsafe impl Sync for Stream {}

/// How urgent a stream's work is. Streams of different priority share no queue of the device.
#[derive(Clone, Copy, Debug)]
pub enum Priority {
    Kernels,
    Copies,
    Rescue,
}

/// One word that a stream waits for or writes.
#[derive(Clone, Copy, Debug)]
pub enum StreamMemOp {
    /// Waits until the word has reached the value, cyclically.
    Wait(DevicePtr, u32),
    /// Writes the value, after everything before on the stream.
    Write(DevicePtr, u32),
}

impl Stream {
    /// A stream that does not wait for the default stream.
    pub fn new(device: &Arc<Device>, priority: Priority) -> Result<Stream> {
        let (least, greatest) = device.priorities()?;
        let priority = match priority {
            Priority::Kernels => least,
            Priority::Copies => (greatest + 1).min(least),
            Priority::Rescue => greatest,
        };
        let _bound = device.bind()?;
        let flags = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
        let mut stream = std::ptr::null_mut();
        // SAFETY: writes the local.
        unsafe {
            cuda!(
                device.rank,
                cuStreamCreateWithPriority(&mut stream, flags, priority)
            )?;
        }
        Ok(Stream {
            device: device.clone(),
            stream,
            owner: None,
        })
    }

    /// A stream of the caller's.
    ///
    /// # Safety
    /// `stream` is a stream of the device's primary context, and outlives the result or lives as long as `owner`.
    pub unsafe fn borrowed(
        device: &Arc<Device>,
        stream: *mut c_void,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Stream {
        Stream {
            device: device.clone(),
            stream: stream.cast(),
            owner: Some(owner),
        }
    }

    pub fn raw(&self) -> *mut c_void {
        self.stream.cast()
    }

    /// Whether everything on the stream is done.
    pub fn is_idle(&self) -> Result<bool> {
        let _bound = self.device.bind()?;
        // SAFETY: the stream lives.
        match unsafe { sys::cuStreamQuery(self.stream) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            result => check(self.device.rank, "cuStreamQuery", result).map(|()| true),
        }
    }

    /// Whether the device certainly does nothing on the stream any more.
    pub fn is_over(&self) -> bool {
        self.is_idle().unwrap_or_else(|_| self.device.has_ended())
    }

    /// Lower numbers are higher priorities.
    pub fn priority(&self) -> Result<i32> {
        let _bound = self.device.bind()?;
        let mut priority = 0;
        // SAFETY: writes the local; the stream lives.
        unsafe {
            cuda!(
                self.device.rank,
                cuStreamGetPriority(self.stream, &mut priority)
            )?;
        }
        Ok(priority)
    }

    /// Whether what is put on the stream is being recorded into a graph.
    pub fn is_capturing(&self) -> Result<bool> {
        let _bound = self.device.bind()?;
        let mut status = sys::CUstreamCaptureStatus_enum::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: writes the local; the stream lives.
        let result = unsafe { sys::cuStreamIsCapturing(self.stream, &mut status) };
        // The legacy default stream, which no graph captures, is asked while a stream that waits for it is captured.
        if result == sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT {
            return Ok(false);
        }
        check(self.device.rank, "cuStreamIsCapturing", result)?;
        Ok(status != sys::CUstreamCaptureStatus_enum::CU_STREAM_CAPTURE_STATUS_NONE)
    }

    /// # Safety
    /// Both ranges are allocated, and stay so until the copy is done. This copy's place on the stream is ordered with
    /// all other reads and writes of them.
    pub unsafe fn copy(&self, to: DevicePtr, from: DevicePtr, bytes: usize) -> Result<()> {
        // SAFETY: as this function's.
        unsafe {
            cuda!(
                self.device.rank,
                cuMemcpyDtoDAsync_v2(to, from, bytes, self.stream)
            )
        }
    }

    /// # Safety
    /// As [`Stream::copy`]; `from` is page-locked memory of the host.
    pub unsafe fn upload(&self, to: DevicePtr, from: *const u8, bytes: usize) -> Result<()> {
        // SAFETY: as this function's.
        unsafe {
            cuda!(
                self.device.rank,
                cuMemcpyHtoDAsync_v2(to, from.cast(), bytes, self.stream)
            )
        }
    }

    /// # Safety
    /// As [`Stream::copy`], for `rows` rows of `width` bytes. Each address comes with its bytes from row to row.
    pub unsafe fn copy_rows(
        &self,
        (to, to_pitch): (DevicePtr, usize),
        (from, from_pitch): (DevicePtr, usize),
        width: usize,
        rows: usize,
    ) -> Result<()> {
        let mut copy = plain(width, rows);
        (copy.srcDevice, copy.srcPitch) = (from, from_pitch);
        (copy.dstDevice, copy.dstPitch) = (to, to_pitch);
        // SAFETY: as this function's.
        unsafe { cuda!(self.device.rank, cuMemcpy2DAsync_v2(&copy, self.stream)) }
    }

    /// # Safety
    /// As [`Stream::copy`], for `words` words at `to`.
    pub unsafe fn fill(&self, to: DevicePtr, value: u32, words: usize) -> Result<()> {
        // SAFETY: as this function's.
        unsafe {
            cuda!(
                self.device.rank,
                cuMemsetD32Async(to, value, words, self.stream)
            )
        }
    }

    /// Does word operations in order, in one call.
    ///
    /// # Safety
    /// The words are allocated and stay so until the stream has passed.
    pub unsafe fn words(&self, operations: &[StreamMemOp]) -> Result<()> {
        use sys::CUstreamBatchMemOpType_enum as Type;
        // As many as one call for a full group needs.
        const MOST: usize = 72;
        for operations in operations.chunks(MOST) {
            // SAFETY: a union of plain structs.
            let mut batch: [sys::CUstreamBatchMemOpParams; MOST] =
                unsafe { MaybeUninit::zeroed().assume_init() };
            for (entry, operation) in batch.iter_mut().zip(operations) {
                match *operation {
                    StreamMemOp::Wait(address, value) => {
                        entry.waitValue.operation = Type::CU_STREAM_MEM_OP_WAIT_VALUE_32;
                        entry.waitValue.address = address;
                        entry.waitValue.__bindgen_anon_1.value = value;
                        entry.waitValue.flags =
                            sys::CUstreamWaitValue_flags_enum::CU_STREAM_WAIT_VALUE_GEQ as u32;
                    }
                    StreamMemOp::Write(address, value) => {
                        entry.writeValue.operation = Type::CU_STREAM_MEM_OP_WRITE_VALUE_32;
                        entry.writeValue.address = address;
                        entry.writeValue.__bindgen_anon_1.value = value;
                    }
                }
            }
            let count = operations.len() as u32;
            // SAFETY: as this function's; the driver copies the batch.
            unsafe {
                cuda!(
                    self.device.rank,
                    cuStreamBatchMemOp_v2(self.stream, count, batch.as_mut_ptr(), 0)
                )?;
            }
        }
        Ok(())
    }

    /// Makes later work on this stream wait for the work that is on `other` now. `event` is recorded for this.
    pub fn wait_for(&self, other: &Stream, event: &Event) -> Result<()> {
        event.record(other)?;
        self.wait_until(event)
    }

    /// Records an event of the caller's on this stream.
    ///
    /// # Safety
    /// It is a CUevent of the stream's context.
    pub unsafe fn record(&self, event: *mut c_void) -> Result<()> {
        let _bound = self.device.bind()?;
        // SAFETY: as this function's; the stream lives.
        unsafe { cuda!(self.device.rank, cuEventRecord(event.cast(), self.stream)) }
    }

    /// Makes later work on this stream wait for the last record of an event of the caller's.
    ///
    /// # Safety
    /// It is a CUevent.
    pub unsafe fn wait(&self, event: *mut c_void) -> Result<()> {
        let _bound = self.device.bind()?;
        // SAFETY: as this function's; the stream lives.
        unsafe {
            cuda!(
                self.device.rank,
                cuStreamWaitEvent(self.stream, event.cast(), 0)
            )
        }
    }

    /// Makes later work on this stream wait for the last record of `event`.
    pub fn wait_until(&self, event: &Event) -> Result<()> {
        let _bound = self.device.bind()?;
        // SAFETY: both live; an event may be recorded again once a wait for it has been put on a stream.
        unsafe {
            cuda!(
                self.device.rank,
                cuStreamWaitEvent(self.stream, event.event, 0)
            )
        }
    }

    /// Calls `function(data)` on a thread of the driver when the stream reaches the call.
    ///
    /// # Safety
    /// `data` may be used by another thread until the stream has passed. The function makes no CUDA call.
    pub unsafe fn call(
        &self,
        function: unsafe extern "C" fn(*mut c_void),
        data: *mut c_void,
    ) -> Result<()> {
        // SAFETY: as this function's.
        unsafe {
            cuda!(
                self.device.rank,
                cuLaunchHostFunc(self.stream, Some(function), data)
            )
        }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.owner.is_some() {
            return;
        }
        if let Ok(_bound) = self.device.bind() {
            // SAFETY: created by this value; what is on it still runs to its end.
            let _ = unsafe { sys::cuStreamDestroy_v2(self.stream) };
        }
    }
}

/// A position on a stream. It has a time if it was created as timed.
#[derive(Debug)]
pub struct Event {
    device: Arc<Device>,
    event: sys::CUevent,
}

// SAFETY: events may be used by any thread.
unsafe impl Send for Event {}
// SAFETY: the driver's calls are thread-safe.
unsafe impl Sync for Event {}

impl Event {
    pub fn new(device: &Arc<Device>, timed: bool) -> Result<Event> {
        let _bound = device.bind()?;
        use sys::CUevent_flags_enum as flags;
        let flags = if timed {
            flags::CU_EVENT_DEFAULT
        } else {
            flags::CU_EVENT_DISABLE_TIMING
        };
        let mut event = std::ptr::null_mut();
        // SAFETY: writes the local.
        unsafe { cuda!(device.rank, cuEventCreate(&mut event, flags as u32))? };
        Ok(Event {
            device: device.clone(),
            event,
        })
    }

    pub fn record(&self, stream: &Stream) -> Result<()> {
        let _bound = self.device.bind()?;
        // SAFETY: both live.
        unsafe { cuda!(self.device.rank, cuEventRecord(self.event, stream.stream)) }
    }

    /// Whether all work in front of the event's last record is done. True if it was never recorded.
    pub fn is_done(&self) -> Result<bool> {
        let _bound = self.device.bind()?;
        // SAFETY: the event lives.
        match unsafe { sys::cuEventQuery(self.event) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            result => check(self.device.rank, "cuEventQuery", result).map(|()| true),
        }
    }

    /// Whether the device certainly does no more work in front of the event's last record.
    pub fn is_over(&self) -> bool {
        self.is_done().unwrap_or_else(|_| self.device.has_ended())
    }

    /// Microseconds from `earlier` to this event. Both must be timed, and the device must have passed both.
    pub fn micros_since(&self, earlier: &Event) -> Result<f64> {
        let mut millis = 0f32;
        let elapsed = self.device.gpu.symbols.event_elapsed_time;
        // SAFETY: writes the local; both live.
        let result = unsafe { elapsed(&mut millis, earlier.event, self.event) };
        check(self.device.rank, "cuEventElapsedTime", result)?;
        Ok(f64::from(millis) * 1e3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Ok(_bound) = self.device.bind() {
            // SAFETY: created by this value; a stream that still waits for it goes on doing so.
            let _ = unsafe { sys::cuEventDestroy_v2(self.event) };
        }
    }
}
