//! The hosts on which ranks run: their names, their network devices and their NCCL.

use std::path::Path;
use std::time::Duration;

use gemmesh::{Group, Host};

use super::common::Failure;
use super::environment::HOST;
use super::nics;
use super::report::{Backend, Finding, HostReport, Nccl};
use super::step;

/// This host. Its ranks are not known.
pub fn look(sys: &Path, timeout: Duration) -> HostReport {
    let (nccl, no_nccl) = match step::nccl(timeout) {
        Ok(nccl) => (Some(nccl), None),
        Err(reason) => (None, Some(reason)),
    };
    HostReport {
        name: name(),
        ranks: Vec::new(),
        interfaces: nics::interfaces(sys),
        rdma_ports: nics::rdma_ports(sys),
        nccl,
        no_nccl,
    }
}

/// The host's name, and the one that the environment gives it.
fn name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let name = name.trim();
    match std::env::var(HOST) {
        Ok(role) => format!("{name} as {role}"),
        Err(_) => name.into(),
    }
}

/// The hosts of a group, each as its lowest rank sees it. Collective.
pub fn gather(
    group: &Group<Host>,
    sys: &Path,
    timeout: Duration,
) -> Result<Vec<HostReport>, Failure> {
    let hosts = group.hosts();
    let own = match hosts.iter().any(|ranks| ranks[0] == group.rank()) {
        true => serde_json::to_vec(&look(sys, timeout)).map_err(|_| UNREADABLE)?,
        false => Vec::new(),
    };
    let told = group.all_gather_bytes(&own)?;
    let report = |ranks: Vec<usize>| {
        let host = serde_json::from_slice(&told[ranks[0]]).map_err(|_| UNREADABLE)?;
        Ok(HostReport { ranks, ..host })
    };
    hosts.into_iter().map(report).collect()
}

const UNREADABLE: Failure =
    Failure::Usage("a rank can't describe its host: the ranks' doctors differ");

/// Adds the findings on hosts whose ranks have met.
pub fn judge(hosts: &[HostReport], backend: Backend, findings: &mut Vec<Finding>) {
    let [first, others @ ..] = hosts else { return };
    if others.is_empty() {
        return;
    }
    for other in others {
        note_uneven_nics(first, other, findings);
    }
    // A build without GPUs says so elsewhere.
    if cfg!(feature = "cuda") {
        judge_nccl(hosts, backend, findings);
    }
}

/// Points out network devices that differ in number or speed.
fn note_uneven_nics(one: &HostReport, other: &HostReport, findings: &mut Vec<Finding>) {
    let by_rdma = [one, other]
        .iter()
        .any(|host| host.rdma_ports.iter().any(|port| port.active));
    let nics = |host: &HostReport| match by_rdma {
        true => active_ports(host),
        false => real_interfaces(host),
    };
    let (its, others) = (nics(one), nics(other));
    if its != others {
        let kind = if by_rdma {
            "active RDMA ports"
        } else {
            "interfaces"
        };
        let what = format!(
            "{} has {kind} of {}, and {} of {}",
            one.name,
            in_words(&its),
            other.name,
            in_words(&others)
        );
        let advice = "A group is as fast as its slowest rail. Give all hosts equal NICs, or name equal ones by \
                      NCCL_IB_HCA or NCCL_SOCKET_IFNAME.";
        findings.push(Finding::note("network", what, advice));
    }
}

/// The speeds of the ports that NCCL takes if there are any, in order.
fn active_ports(host: &HostReport) -> Vec<Option<u64>> {
    let ports = host.rdma_ports.iter().filter(|port| port.active);
    sorted(ports.map(|port| port.mbit_per_s))
}

/// The speeds of the hardware's interfaces that are up, in order.
fn real_interfaces(host: &HostReport) -> Vec<Option<u64>> {
    let interfaces = host
        .interfaces
        .iter()
        .filter(|interface| interface.up && !interface.is_virtual);
    sorted(interfaces.map(|interface| interface.mbit_per_s))
}

fn sorted(speeds: impl Iterator<Item = Option<u64>>) -> Vec<Option<u64>> {
    let mut speeds: Vec<_> = speeds.collect();
    speeds.sort();
    speeds
}

/// Speeds in words, such as "2 × 400 Gb/s".
fn in_words(speeds: &[Option<u64>]) -> String {
    let groups = speeds.chunk_by(|one, other| one == other);
    let words: Vec<String> = groups
        .map(|equal| match equal[0] {
            Some(mbit) => format!("{} × {} Gb/s", equal.len(), mbit as f64 / 1e3),
            None => format!("{} × unknown speed", equal.len()),
        })
        .collect();
    match words.is_empty() {
        true => "none".into(),
        false => words.join(" and "),
    }
}

/// Says which hosts lack NCCL, and whether its versions differ.
fn judge_nccl(hosts: &[HostReport], backend: Backend, findings: &mut Vec<Finding>) {
    for host in hosts {
        if let Some(reason) = &host.no_nccl {
            let what = format!(
                "{} has no NCCL, which carries rows between hosts: {reason}",
                host.name
            );
            let advice = "Install NCCL 2.18 or newer there, and let LD_LIBRARY_PATH name the folder of libnccl.so.2.";
            findings.push(Finding::of_gpus(backend, what, advice));
        }
    }
    let mut found = hosts
        .iter()
        .filter_map(|host| Some((&host.name, host.nccl.as_ref()?)));
    let Some((first, Nccl { version, .. })) = found.next() else {
        return;
    };
    if let Some((name, other)) = found.find(|(_, other)| other.version != *version) {
        let what = format!("{first} has NCCL {version}, and {name} {}", other.version);
        let advice =
            "Install the same NCCL on all hosts: its versions may not understand one another.";
        findings.push(Finding::note("network", what, advice));
    }
}
