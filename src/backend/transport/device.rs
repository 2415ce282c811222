//! What carries rows between GPUs of different hosts, and messages in a GPU's memory.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::sync::Arc;

use super::Transport;
pub use super::nccl::{NAME, openers};
use crate::backend::cuda::driver::{Device, DevicePtr, Stream};
use crate::error::Result;

/// A transport of a GPU's memory. A message has ended when its stream has passed it.
pub type DeviceTransport = dyn Transport<DeviceBytes>;

/// Opens this rank's end of a transport. Waits for all ranks.
pub type Opener = Box<dyn FnOnce(&Arc<Device>) -> Result<Box<DeviceTransport>> + Send>;

/// The bytes of a message, and the stream on which it is put.
pub struct DeviceBytes {
    pub(super) place: DevicePtr,
    pub(super) bytes: usize,
    pub(super) stream: *mut c_void,
}

impl DeviceBytes {
    /// # Safety
    /// As [`Stream::copy`] for a message that is put on `stream` now. The stream lives as long as this value.
    pub unsafe fn new(place: DevicePtr, bytes: usize, stream: &Stream) -> DeviceBytes {
        DeviceBytes {
            place,
            bytes,
            stream: stream.raw(),
        }
    }
}
