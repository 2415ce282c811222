//! MPI as the network of the host backend.

use std::ffi::{c_char, c_int};
use std::fmt;
use std::mem::{ManuallyDrop, forget};

use mpi::ffi;
use mpi::raw::AsRaw;
use mpi::topology::SimpleCommunicator;
use mpi::traits::Communicator;

use super::network::{Message, Network};
use crate::error::{Error, Result};

/// All messages of a group have this tag, because its communicator carries nothing else.
const TAG: c_int = 0;

/// A communicator of a group's own.
pub struct Mpi {
    rank: usize,
    communicator: ManuallyDrop<SimpleCommunicator>,
}

// SAFETY: MPI was initialised so that any thread may call it at any time.
unsafe impl Send for Mpi {}
// SAFETY: as above.
unsafe impl Sync for Mpi {}

impl Mpi {
    /// A copy of `communicator`, whose ranks are those of the group. Collective. MPI must have been initialised with
    /// `Threading::Multiple`.
    ///
    /// Errors of its messages are returned. Without this, MPI would end the process.
    pub fn new(communicator: &impl Communicator) -> Mpi {
        let copy = communicator.duplicate();
        // SAFETY: the communicator is there. The call fails for none that is.
        unsafe { ffi::MPI_Comm_set_errhandler(copy.as_raw(), ffi::RSMPI_ERRORS_RETURN) };
        Mpi {
            rank: communicator.rank() as usize,
            communicator: ManuallyDrop::new(copy),
        }
    }

    /// `begin` gets the message and how many bytes it has.
    fn begin(
        &self,
        what: &'static str,
        bytes: Vec<u8>,
        begin: impl FnOnce(&mut Begun, c_int) -> c_int,
    ) -> Result<Box<dyn Message>> {
        let count = c_int::try_from(bytes.len()).map_err(|_| Error::System {
            rank: Some(self.rank),
            action: format!("{what} by MPI"),
            reason: format!("a message has {} bytes", bytes.len()),
        })?;
        let mut begun = Begun {
            rank: self.rank,
            what,
            bytes,
            // SAFETY: a constant of the library.
            request: unsafe { ffi::RSMPI_REQUEST_NULL },
        };
        let status = begin(&mut begun, count);
        begun.check(status)?;
        Ok(Box::new(begun))
    }
}

impl Network for Mpi {
    fn send(&self, peer: usize, bytes: Vec<u8>) -> Result<Box<dyn Message>> {
        self.begin("send rows", bytes, |message, count| {
            let first = message.bytes.as_ptr().cast();
            let communicator = self.communicator.as_raw();
            // SAFETY: the message keeps its bytes until MPI has read them.
            unsafe {
                ffi::MPI_Isend(
                    first,
                    count,
                    ffi::RSMPI_UINT8_T,
                    peer as c_int,
                    TAG,
                    communicator,
                    &mut message.request,
                )
            }
        })
    }

    fn receive(&self, peer: usize, bytes: Vec<u8>) -> Result<Box<dyn Message>> {
        self.begin("receive rows", bytes, |message, count| {
            let first = message.bytes.as_mut_ptr().cast();
            let communicator = self.communicator.as_raw();
            // SAFETY: the message keeps its bytes until MPI has written them, and nobody else reads them until then.
            unsafe {
                ffi::MPI_Irecv(
                    first,
                    count,
                    ffi::RSMPI_UINT8_T,
                    peer as c_int,
                    TAG,
                    communicator,
                    &mut message.request,
                )
            }
        })
    }
}

impl Drop for Mpi {
    fn drop(&mut self) {
        // A program may end MPI before its groups, which then have nothing left to free.
        if !mpi::is_finalized() {
            // SAFETY: it is dropped once, here.
            unsafe { ManuallyDrop::drop(&mut self.communicator) };
        }
    }
}

impl fmt::Debug for Mpi {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("Mpi")
    }
}

/// A message that MPI sends or receives.
struct Begun {
    rank: usize,
    /// What MPI does, for errors.
    what: &'static str,
    bytes: Vec<u8>,
    /// None once it has ended.
    request: ffi::MPI_Request,
}

impl Begun {
    /// Makes an error of the status of a call.
    fn check(&self, status: c_int) -> Result<()> {
        if status == ffi::MPI_SUCCESS as c_int {
            return Ok(());
        }
        let mut words = [0; ffi::MPI_MAX_ERROR_STRING as usize];
        let mut length = 0;
        // SAFETY: the memory is as long as MPI's longest words.
        unsafe { ffi::MPI_Error_string(status, words.as_mut_ptr().cast::<c_char>(), &mut length) };
        let words = words.get(..length as usize).unwrap_or_default();
        Err(Error::System {
            rank: Some(self.rank),
            action: format!("{} by MPI", self.what),
            reason: String::from_utf8_lossy(words).into(),
        })
    }

    fn is_under_way(&self) -> bool {
        // SAFETY: a constant of the library.
        self.request != unsafe { ffi::RSMPI_REQUEST_NULL }
    }
}

impl Message for Begun {
    fn has_ended(&mut self) -> Result<bool> {
        let mut ended = 0;
        // SAFETY: the request is of this message, or none, which has ended. MPI writes none into it at its end.
        let status =
            unsafe { ffi::MPI_Test(&mut self.request, &mut ended, ffi::RSMPI_STATUS_IGNORE) };
        self.check(status)?;
        Ok(ended != 0)
    }

    fn into_bytes(mut self: Box<Self>) -> Vec<u8> {
        std::mem::take(&mut self.bytes)
    }
}

impl Drop for Begun {
    fn drop(&mut self) {
        // The group has failed. MPI may still read or write the bytes, so they are never freed.
        if self.is_under_way() {
            forget(std::mem::take(&mut self.bytes));
        }
    }
}
