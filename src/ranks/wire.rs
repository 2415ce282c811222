//! Messages between ranks on control connections. A message is a frame of bytes, perhaps with descriptors.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::ops::Deref;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};

use super::forked::LostInForks;
use super::pidfd::Ended;
use super::poll::poll;
use crate::schedule::layout::MAX_WORLD;

/// The longest message of a group. Traces are the longest messages.
pub const MAX_FRAME: usize = 256 << 20;
/// How often a wait for the other end runs the caller's check.
const SLICE: Duration = Duration::from_millis(20);
/// How much memory is allocated ahead of the bytes that have arrived.
const PIECE: usize = 1 << 20;

/// Why a frame could not be sent or received.
#[derive(Debug)]
pub enum WireError<E> {
    /// The deadline passed.
    Late,
    /// The other end is closed.
    Closed,
    /// The other end sent bytes that are no frame.
    Garbage(String),
    /// The caller's check said to stop.
    Stopped(E),
    /// The operating system refused.
    Io(io::Error),
}

impl<E> From<io::Error> for WireError<E> {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::UnexpectedEof
            | io::ErrorKind::BrokenPipe
            | io::ErrorKind::ConnectionReset => WireError::Closed,
            _ => WireError::Io(error),
        }
    }
}

impl WireError<Ended> {
    /// The same error, or `Closed` if the process at the other end has ended.
    pub fn or_closed<E>(self) -> WireError<E> {
        match self {
            WireError::Stopped(Ended) | WireError::Closed => WireError::Closed,
            WireError::Late => WireError::Late,
            WireError::Garbage(reason) => WireError::Garbage(reason),
            WireError::Io(error) => WireError::Io(error),
        }
    }
}

/// A frame: its bytes, and the descriptors that came with it, or why this process could not have all of them.
pub type Frame = (Vec<u8>, io::Result<Vec<OwnedFd>>);

/// A control connection, with a deadline for waits on it.
pub struct Channel<'a, C> {
    /// Non-blocking.
    pub stream: &'a UnixStream,
    pub deadline: Instant,
    /// Called every few milliseconds during a wait. An error ends the wait.
    pub check: C,
}

impl<E, C: Fn() -> Result<(), E>> Channel<'_, C> {
    /// Sends `payload`, and `fds` with its first byte.
    pub fn send(&self, payload: &[u8], fds: &[BorrowedFd]) -> Result<(), WireError<E>> {
        let length = u32::try_from(payload.len())
            .ok()
            .filter(|&n| n as usize <= MAX_FRAME)
            .ok_or_else(|| WireError::Garbage(format!("a message of {} bytes", payload.len())))?;
        self.send_part(&length.to_le_bytes(), fds)?;
        self.send_part(payload, &[])
    }

    /// Sends bytes as they are.
    pub fn send_raw(&self, bytes: &[u8]) -> Result<(), WireError<E>> {
        self.send_part(bytes, &[])
    }

    fn send_part(&self, mut bytes: &[u8], mut fds: &[BorrowedFd]) -> Result<(), WireError<E>> {
        while !bytes.is_empty() {
            let mut space = [MaybeUninit::uninit(); ancillary_space()];
            let mut control = SendAncillaryBuffer::new(&mut space);
            if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
                return Err(WireError::Garbage(format!("{} descriptors", fds.len())));
            }
            let sent = rustix::net::sendmsg(
                self.stream,
                &[IoSlice::new(bytes)],
                &mut control,
                SendFlags::NOSIGNAL,
            );
            match sent {
                Ok(count) => {
                    bytes = &bytes[count..];
                    fds = &[];
                }
                Err(rustix::io::Errno::AGAIN) => self.pause(PollFlags::OUT)?,
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(io::Error::from(errno).into()),
            }
        }
        Ok(())
    }

    /// Receives a frame of at most `limit` bytes.
    pub fn receive(&self, limit: usize) -> Result<Frame, WireError<E>> {
        let mut fds = Ok(Vec::new());
        let mut length = [0; 4];
        self.receive_part(&mut length, &mut fds)?;
        let length = u32::from_le_bytes(length) as usize;
        if length > limit {
            return Err(WireError::Garbage(format!("a message of {length} bytes")));
        }
        let mut payload = Vec::new();
        while payload.len() < length {
            let begin = payload.len();
            let piece = PIECE.min(length - begin);
            let refused = |_| WireError::Io(rustix::io::Errno::NOMEM.into());
            payload.try_reserve(piece).map_err(refused)?;
            payload.resize(begin + piece, 0);
            self.receive_part(&mut payload[begin..], &mut fds)?;
        }
        Ok((payload, fds))
    }

    /// Fills `bytes` and adds the descriptors that come with them to `fds`.
    fn receive_part(
        &self,
        mut bytes: &mut [u8],
        fds: &mut io::Result<Vec<OwnedFd>>,
    ) -> Result<(), WireError<E>> {
        while !bytes.is_empty() {
            let mut space = [MaybeUninit::uninit(); ancillary_space()];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let received = rustix::net::recvmsg(
                self.stream,
                &mut [IoSliceMut::new(bytes)],
                &mut control,
                RecvFlags::CMSG_CLOEXEC,
            );
            for message in control.drain() {
                if let (RecvAncillaryMessage::ScmRights(rights), Ok(fds)) = (message, &mut *fds) {
                    fds.extend(rights);
                }
            }
            if let Some(count) = fds.as_ref().ok().map(Vec::len).filter(|&n| n > MAX_WORLD) {
                return Err(WireError::Garbage(format!("{count} descriptors")));
            }
            // There is room for all descriptors of a frame. So the receiver's limit holds some back.
            if matches!(&received, Ok(message) if message.flags.contains(ReturnFlags::CTRUNC)) {
                *fds = Err(rustix::io::Errno::MFILE.into());
            }
            match received {
                Ok(message) if message.bytes == 0 => return Err(WireError::Closed),
                Ok(message) => bytes = &mut bytes[message.bytes..],
                Err(rustix::io::Errno::AGAIN) => self.pause(PollFlags::IN)?,
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(io::Error::from(errno).into()),
            }
        }
        Ok(())
    }

    fn pause(&self, event: PollFlags) -> Result<(), WireError<E>> {
        (self.check)().map_err(WireError::Stopped)?;
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(WireError::Late);
        }
        poll(&mut [PollFd::new(self.stream, event)], left.min(SLICE))?;
        Ok(())
    }
}

const fn ancillary_space() -> usize {
    rustix::cmsg_space!(ScmRights(MAX_WORLD))
}

/// A connection that ends when it is dropped.
///
/// Closing it would not be enough, because the other end sees nothing while a forked child has it open too. Bytes that
/// were sent before still arrive.
#[derive(Debug)]
pub struct Connection {
    /// Dropped before the stream. None if forks of this process keep it open, which does not matter within a machine.
    _lost: Option<LostInForks>,
    stream: UnixStream,
}

impl Connection {
    /// A connection to another machine.
    pub fn between_machines(stream: UnixStream) -> Connection {
        Connection {
            _lost: LostInForks::new(&stream),
            stream,
        }
    }
}

impl From<UnixStream> for Connection {
    fn from(stream: UnixStream) -> Connection {
        Connection {
            _lost: None,
            stream,
        }
    }
}

impl Deref for Connection {
    type Target = UnixStream;

    fn deref(&self) -> &UnixStream {
        &self.stream
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // The call fails if the other end has already done so.
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

/// A connected pair of control connections.
pub fn pair() -> io::Result<(Connection, Connection)> {
    let (one, two) = UnixStream::pair()?;
    one.set_nonblocking(true)?;
    two.set_nonblocking(true)?;
    Ok((one.into(), two.into()))
}

/// True if the other end is closed.
pub fn has_hung_up(stream: &UnixStream) -> bool {
    let mut fds = [PollFd::new(stream, PollFlags::RDHUP)];
    let closed = PollFlags::HUP | PollFlags::RDHUP | PollFlags::ERR;
    poll(&mut fds, Duration::ZERO).is_ok() && fds[0].revents().intersects(closed)
}

/// True if bytes have come, or if the other end is closed.
pub fn has_something(stream: &UnixStream) -> bool {
    let mut fds = [PollFd::new(stream, PollFlags::IN)];
    poll(&mut fds, Duration::ZERO).is_ok() && !fds[0].revents().is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::convert::Infallible;
    use std::io::Write;
    use std::os::fd::AsFd;

    fn channel(
        stream: &UnixStream,
        ms: u64,
    ) -> Channel<'_, impl Fn() -> Result<(), Infallible> + use<>> {
        Channel {
            stream,
            deadline: Instant::now() + Duration::from_millis(ms),
            check: || Ok(()),
        }
    }

    #[test]
    fn frames_longer_than_the_socket_buffer_arrive_whole_with_their_descriptors() {
        let (one, two) = pair().unwrap();
        let payload: Vec<u8> = (0..3 * PIECE + 17).map(|i| (i % 251) as u8).collect();
        let (received, fds) = std::thread::scope(|scope| {
            let receiver = scope.spawn(|| channel(&two, 10_000).receive(MAX_FRAME).unwrap());
            let fds = [one.as_fd(), two.as_fd()];
            channel(&one, 10_000).send(&payload, &fds).unwrap();
            receiver.join().unwrap()
        });
        assert_eq!(received, payload);
        assert_eq!(fds.unwrap().len(), 2);
    }

    #[test]
    fn a_length_above_the_limit_is_refused_before_anything_is_allocated() {
        let (one, two) = pair().unwrap();
        (&*one).write_all(&u32::MAX.to_le_bytes()).unwrap();
        assert!(matches!(
            channel(&two, 1000).receive(64),
            Err(WireError::Garbage(_))
        ));
    }

    #[test]
    fn silence_ends_at_the_deadline_and_a_closed_end_at_once() {
        let (one, two) = pair().unwrap();
        assert!(matches!(
            channel(&two, 50).receive(64),
            Err(WireError::Late)
        ));
        drop(one);
        assert!(matches!(
            channel(&two, 10_000).receive(64),
            Err(WireError::Closed)
        ));
    }
}
