//! TCP as control connections.
#![allow(unsafe_code)]

use std::io;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use super::wire::Connection;

/// A control connection by TCP. It does not block, and sends what it is given at once.
pub fn connection(stream: TcpStream) -> io::Result<Connection> {
    stream.set_nonblocking(true)?;
    stream.set_nodelay(true)?;
    // Messages are sent and received in the same way as on sockets within a host.
    Ok(UnixStream::from(OwnedFd::from(stream)).into())
}

/// A connected pair, by the loopback device.
pub fn pair() -> io::Result<(Connection, Connection)> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let one = TcpStream::connect(listener.local_addr()?)?;
    loop {
        let (other, from) = listener.accept()?;
        // Another process may have connected too.
        if from == one.local_addr()? {
            return Ok((connection(one)?, connection(other)?));
        }
    }
}

/// True if something was sent and the other system has acknowledged nothing for `time`.
///
/// The system at the other end acknowledges what comes also while its process is stopped. If it has no room left, it
/// says so, and then nothing is on its way.
pub fn is_silent(stream: &UnixStream, time: Duration) -> bool {
    // Of the system's report: the number of packets on their way, and the time since the last acknowledgement in ms.
    const ON_THEIR_WAY: usize = 4;
    const LAST_ACKNOWLEDGED: usize = 12;
    const HEADER: usize = 2;
    let mut words = [0_u32; 26];
    let mut bytes = size_of_val(&words) as libc::socklen_t;
    // SAFETY: the system writes at most the number of bytes that it is told, which is the local's size. All bytes are
    // valid for it.
    let result = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            words.as_mut_ptr().cast(),
            &mut bytes,
        )
    };
    let is_on_its_way = words[HEADER + ON_THEIR_WAY] > 0;
    let silence = Duration::from_millis(words[HEADER + LAST_ACKNOWLEDGED].into());
    result == 0 && is_on_its_way && silence >= time
}
