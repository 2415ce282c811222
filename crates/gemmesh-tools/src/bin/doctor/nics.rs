//! Network devices, as Linux shows them under /sys.

use std::fs;
use std::path::{Path, PathBuf};

use super::report::{Interface, RdmaPort};

/// The kernel's number of the loopback device's type (ARPHRD_LOOPBACK).
const LOOPBACK: &str = "772";

/// The network interfaces by name, without loopback devices and without virtual devices that are down.
pub fn interfaces(sys: &Path) -> Vec<Interface> {
    let folders = entries(&sys.join("class/net"));
    folders.iter().filter_map(|at| interface(at)).collect()
}

fn interface(at: &Path) -> Option<Interface> {
    let interface = Interface {
        name: name(at),
        up: is_up(at),
        is_virtual: !at.join("device").exists(),
        // A device that is down, or that has no speed, gives an error or -1.
        mbit_per_s: text(at, "speed").and_then(|speed| speed.parse().ok()),
        rdma: entries(&at.join("device/infiniband"))
            .iter()
            .map(|device| name(device))
            .collect(),
    };
    let is_loopback = text(at, "type").as_deref() == Some(LOOPBACK);
    (!is_loopback && (interface.up || !interface.is_virtual)).then_some(interface)
}

/// Some drivers don't keep the state, but they do tell whether there is a carrier.
fn is_up(at: &Path) -> bool {
    match text(at, "operstate").as_deref() {
        Some("unknown") => text(at, "carrier").as_deref() == Some("1"),
        state => state == Some("up"),
    }
}

/// The ports of RDMA devices, by device and port.
pub fn rdma_ports(sys: &Path) -> Vec<RdmaPort> {
    let devices = entries(&sys.join("class/infiniband"));
    let ports_of = |device: &PathBuf| {
        let ports = entries(&device.join("ports"));
        let port = |at: &PathBuf| rdma_port(name(device), at);
        ports.iter().map(port).collect::<Vec<_>>()
    };
    devices.iter().flat_map(ports_of).collect()
}

fn rdma_port(device: String, at: &Path) -> RdmaPort {
    // Such as "4: ACTIVE" and "400 Gb/sec (4X NDR)".
    let state = text(at, "state").unwrap_or_default();
    let state = state.split_once(": ").map_or(&*state, |(_, state)| state);
    let rate = text(at, "rate").unwrap_or_default();
    let gbit = rate
        .split_once(" Gb/sec")
        .and_then(|(rate, _)| rate.parse::<f64>().ok());
    RdmaPort {
        device,
        port: name(at),
        active: state == "ACTIVE",
        state: state.to_lowercase(),
        link_layer: text(at, "link_layer"),
        mbit_per_s: gbit.map(|gbit| (gbit * 1e3).round() as u64),
    }
}

/// What is in a folder, by name. Empty if it can't be read.
fn entries(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    paths.sort();
    paths
}

fn name(path: &Path) -> String {
    path.file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into()
}

/// The text of a file, if it can be read.
fn text(folder: &Path, file: &str) -> Option<String> {
    let text = fs::read_to_string(folder.join(file)).ok()?;
    Some(text.trim().into())
}
