//! TCP as control connections.
#![allow(unsafe_code)]

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use rustix::io::Errno;
use rustix::net::{self, AddressFamily, SocketFlags, SocketType};

use super::wire::Connection;

/// A control connection by TCP. It does not block, and sends what it is given at once.
pub fn connection(stream: TcpStream) -> io::Result<Connection> {
    stream.set_nonblocking(true)?;
    stream.set_nodelay(true)?;
    // Messages are sent and received in the same way as on sockets within a host.
    let stream = UnixStream::from(OwnedFd::from(stream));
    Ok(Connection::between_machines(stream))
}

/// Begins to connect to `address`, without waiting. The connection can be written to when that has succeeded.
pub fn begin_to_connect(address: SocketAddr) -> io::Result<Connection> {
    let family = match address {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = net::socket_with(family, SocketType::STREAM, flags, None)?;
    net::sockopt::set_tcp_nodelay(&socket, true)?;
    match net::connect(&socket, &address) {
        Ok(()) | Err(Errno::INPROGRESS) => {}
        Err(error) => return Err(error.into()),
    }
    Ok(Connection::between_machines(UnixStream::from(socket)))
}

/// Listens at `port`, or at a free port if it is 0, of all addresses of this machine.
pub fn listen(port: u16) -> io::Result<TcpListener> {
    // Some kernels have no IPv6.
    let listener = open(AddressFamily::INET6, (Ipv6Addr::UNSPECIFIED, port).into());
    let listener = listener.or_else(|error| match error.kind() {
        io::ErrorKind::AddrInUse | io::ErrorKind::PermissionDenied => Err(error),
        _ => open(AddressFamily::INET, (Ipv4Addr::UNSPECIFIED, port).into()),
    })?;
    Ok(TcpListener::from(listener))
}

fn open(family: AddressFamily, address: SocketAddr) -> io::Result<OwnedFd> {
    const WAITING: i32 = 1024;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = net::socket_with(family, SocketType::STREAM, flags, None)?;
    if family == AddressFamily::INET6 {
        // IPv4 too, whatever the system's default is.
        net::sockopt::set_ipv6_v6only(&socket, false)?;
    }
    // Connections of an earlier job that are still closing do not matter.
    net::sockopt::set_socket_reuseaddr(&socket, true)?;
    net::bind(&socket, &address)?;
    net::listen(&socket, WAITING)?;
    Ok(socket)
}

/// The addresses by which other machines may reach this one, IPv4 first. If there are none, that of the loopback device.
pub fn addresses() -> io::Result<Vec<IpAddr>> {
    let mut all = interface_addresses()?;
    all.sort_by_key(IpAddr::is_ipv6);
    all.dedup();
    let (near, far): (Vec<IpAddr>, Vec<IpAddr>) = all.into_iter().partition(IpAddr::is_loopback);
    Ok(if far.is_empty() { near } else { far })
}

/// The addresses of all network devices that are up, without those that mean nothing elsewhere.
fn interface_addresses() -> io::Result<Vec<IpAddr>> {
    let mut first = std::ptr::null_mut();
    // SAFETY: the system writes a list to the local, which is freed below.
    if unsafe { libc::getifaddrs(&mut first) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let mut addresses = Vec::new();
    let mut next = first;
    // SAFETY: the list's entries are valid until it is freed.
    while let Some(entry) = unsafe { next.as_ref() } {
        next = entry.ifa_next;
        if entry.ifa_flags & libc::IFF_UP as libc::c_uint != 0 {
            // SAFETY: the address is null or valid, and as long as its family says.
            addresses.extend(unsafe { address_at(entry.ifa_addr) });
        }
    }
    // SAFETY: the list that the system has made, and of which nothing is used any more.
    unsafe { libc::freeifaddrs(first) };
    Ok(addresses)
}

/// # Safety
/// `address` is null, or it points to an address as long as its family says.
unsafe fn address_at(address: *const libc::sockaddr) -> Option<IpAddr> {
    // SAFETY: by this function's contract. Reads do not need alignment.
    unsafe {
        let family = address.as_ref()?.sa_family;
        match i32::from(family) {
            libc::AF_INET => {
                let address = address.cast::<libc::sockaddr_in>().read_unaligned();
                Some(Ipv4Addr::from_bits(u32::from_be(address.sin_addr.s_addr)).into())
            }
            libc::AF_INET6 => {
                let address = address.cast::<libc::sockaddr_in6>().read_unaligned();
                let address = Ipv6Addr::from(address.sin6_addr.s6_addr);
                (!address.is_unicast_link_local()).then_some(address.into())
            }
            _ => None,
        }
    }
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
