//! Ports that tests give to jobs of several hosts.

use std::net::TcpListener;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};

/// Below those that the system gives to whoever asks for any.
const PORTS: std::ops::Range<u16> = 20_000..32_000;

/// A port that nobody listens on, and that no other test on this machine gets before this program ends.
pub fn free_port() -> u16 {
    let first = std::process::id() as usize % PORTS.len();
    let mut ports = PORTS.cycle().skip(first).take(PORTS.len());
    ports.find(|port| is_got(*port)).expect("a free port")
}

/// Gets `port` for this program, if it is free. The port itself stays free for a rank, so a socket of its name is held.
fn is_got(port: u16) -> bool {
    let name = SocketAddr::from_abstract_name(format!("gemmesh's tests, port {port}")).unwrap();
    let Ok(held) = UnixListener::bind_addr(&name) else {
        return false;
    };
    std::mem::forget(held);
    TcpListener::bind(("0.0.0.0", port)).is_ok()
}
