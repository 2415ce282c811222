//! MPI as a transport of the host's memory.
#![allow(unsafe_code)]

mod end;

use std::ffi::{c_char, c_int};
use std::fmt;
use std::mem::{MaybeUninit, forget, take};

use mpi::ffi;
use mpi::raw::AsRaw;
use mpi::traits::Communicator;

use self::end::Hold;
pub use self::end::{Unusable, check};
use super::{Message, Transport};
use crate::error::{Error, Kind, Result};

/// All messages of a group have this tag, because its communicator carries nothing else.
const TAG: c_int = 0;

/// A communicator of a group's own.
///
/// It is never freed. A message of a rank that has not heard of the group's end may still come, and MPI must not take it
/// for one of a later communicator.
pub struct Mpi {
    communicator: ffi::MPI_Comm,
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
        let raw = copy.as_raw();
        forget(copy);
        // SAFETY: the communicator is there. The call fails for none that is.
        unsafe { ffi::MPI_Comm_set_errhandler(raw, ffi::RSMPI_ERRORS_RETURN) };
        Mpi { communicator: raw }
    }

    /// `begin` gets the message and how many bytes it has. MPI does not end meanwhile.
    fn begin(
        rank: usize,
        direction: Direction,
        bytes: Vec<u8>,
        begin: impl FnOnce(&mut MpiMessage, c_int) -> c_int,
    ) -> Result<Box<dyn Message>> {
        let mut message = MpiMessage {
            rank,
            direction,
            bytes,
            // SAFETY: a constant of the library.
            request: unsafe { ffi::RSMPI_REQUEST_NULL },
        };
        let _hold = message.hold()?;
        let length = message.bytes.len();
        let Ok(count) = c_int::try_from(length) else {
            return Err(message.failed(format!("a message of {length} bytes is too long")));
        };
        let status = begin(&mut message, count);
        message.check(status)?;
        Ok(Box::new(message))
    }
}

impl Transport<Vec<u8>, Box<dyn Message>> for Mpi {
    fn send(&self, [rank, peer]: [usize; 2], bytes: Vec<u8>) -> Result<Box<dyn Message>> {
        Mpi::begin(rank, Direction::Sent, bytes, |message, count| {
            let first = message.bytes.as_ptr().cast();
            let (peer, request) = (peer as c_int, &mut message.request);
            // SAFETY: MPI has not ended, as `begin` makes sure. The message keeps its bytes until MPI has read them.
            unsafe {
                let bytes = ffi::RSMPI_UINT8_T;
                ffi::MPI_Isend(first, count, bytes, peer, TAG, self.communicator, request)
            }
        })
    }

    fn receive(&self, [peer, rank]: [usize; 2], bytes: Vec<u8>) -> Result<Box<dyn Message>> {
        Mpi::begin(rank, Direction::Received, bytes, |message, count| {
            let first = message.bytes.as_mut_ptr().cast();
            let (peer, request) = (peer as c_int, &mut message.request);
            // SAFETY: MPI has not ended, as `begin` makes sure. The message keeps its bytes until MPI has written them,
            // and no one else reads them until then.
            unsafe {
                let bytes = ffi::RSMPI_UINT8_T;
                ffi::MPI_Irecv(first, count, bytes, peer, TAG, self.communicator, request)
            }
        })
    }
}

impl fmt::Debug for Mpi {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("Mpi")
    }
}

/// Whether this rank sends or receives.
#[derive(Clone, Copy, PartialEq)]
enum Direction {
    Sent,
    Received,
}

/// A message that MPI sends or receives.
struct MpiMessage {
    rank: usize,
    direction: Direction,
    bytes: Vec<u8>,
    /// Null once the message has ended.
    request: ffi::MPI_Request,
}

impl MpiMessage {
    fn failed(&self, reason: String) -> Error {
        let action = match self.direction {
            Direction::Sent => "send rows by MPI",
            Direction::Received => "receive rows by MPI",
        };
        Kind::System {
            action: action.into(),
            reason,
        }
        .on(self.rank)
    }

    /// Keeps MPI from its end until the result is dropped.
    fn hold(&self) -> Result<Hold> {
        end::hold().map_err(|_| {
            let reason = "MPI was finalised before the group's last call; drop the mpi::Universe after the group";
            self.failed(reason.into())
        })
    }

    /// Makes an error of the status of a call. MPI has not ended.
    fn check(&self, status: c_int) -> Result<()> {
        if status == ffi::MPI_SUCCESS as c_int {
            return Ok(());
        }
        let mut words = [0; ffi::MPI_MAX_ERROR_STRING as usize];
        let mut length = 0;
        // SAFETY: the memory is as long as MPI's longest words.
        unsafe { ffi::MPI_Error_string(status, words.as_mut_ptr().cast::<c_char>(), &mut length) };
        let words = words.get(..length as usize).unwrap_or_default();
        Err(self.failed(String::from_utf8_lossy(words).into()))
    }
}

impl Message for MpiMessage {
    fn take_if_ended(&mut self) -> Result<Option<Vec<u8>>> {
        let _hold = self.hold()?;
        let (request, mut ended) = (&mut self.request, 0);
        let mut come = MaybeUninit::zeroed();
        // SAFETY: MPI has not ended, by `_hold`. The request is of this message, or null, which has ended. MPI writes
        // null into it at its end.
        let status = unsafe { ffi::MPI_Test(request, &mut ended, come.as_mut_ptr()) };
        self.check(status)?;
        if ended == 0 {
            return Ok(None);
        }
        if self.direction == Direction::Received {
            let mut length = 0;
            // SAFETY: MPI has written the status of a message that has ended.
            let status =
                unsafe { ffi::MPI_Get_count(come.as_ptr(), ffi::RSMPI_UINT8_T, &mut length) };
            self.check(status)?;
            self.bytes.truncate(usize::try_from(length).unwrap_or(0));
        }
        Ok(Some(take(&mut self.bytes)))
    }
}

impl Drop for MpiMessage {
    fn drop(&mut self) {
        // SAFETY: a constant of the library.
        let is_under_way = self.request != unsafe { ffi::RSMPI_REQUEST_NULL };
        // The group has failed, and MPI may still read or write the bytes.
        if is_under_way {
            forget(take(&mut self.bytes));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    /// Ends a message.
    fn end(mut message: Box<dyn Message>) -> Vec<u8> {
        let deadline = Instant::now() + Duration::from_secs(60);
        while Instant::now() < deadline {
            if let Some(bytes) = message.take_if_ended().unwrap() {
                return bytes;
            }
        }
        panic!("a message to this process does not come");
    }

    /// What stood in the memory before is no part of it. (MPI can be initialised once in a process, so this is the only test
    /// here that uses it.)
    #[test]
    fn a_message_is_as_long_as_it_was_sent() {
        let (_universe, _) = mpi::initialize_with_threading(mpi::Threading::Multiple).unwrap();
        let transport = Mpi::new(&mpi::topology::SimpleCommunicator::self_comm());
        for sent in [vec![1; 100], vec![2; 3], vec![]] {
            let received = transport.receive([0, 0], vec![7; 100]).unwrap();
            let sending = transport.send([0, 0], sent.clone()).unwrap();
            assert_eq!(end(received), sent);
            assert_eq!(end(sending), sent);
        }
    }
}
