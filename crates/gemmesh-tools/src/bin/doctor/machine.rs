//! The machine, as far as gemmesh depends on it.

use std::fs;
use std::io;

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::process::{Resource, getrlimit};

use super::report::{Backend, Finding, Machine};

/// Enough descriptors for a group of 64 ranks: a connection to each, and the memory of each while it is mapped.
const OPEN_FILES: u64 = 256;

pub fn look(backend: Backend, ranks: usize, findings: &mut Vec<Finding>) -> Machine {
    let memfd = memfd();
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let machine = Machine {
        os: format!("Linux {} {}", release(), std::env::consts::ARCH),
        cores: std::thread::available_parallelism().map_or(1, usize::from),
        memory_bytes: meminfo(&text, "MemTotal:"),
        available_memory_bytes: meminfo(&text, "MemAvailable:"),
        memfd: memfd.is_ok(),
        dev_shm_free_bytes: rustix::fs::statvfs("/dev/shm")
            .ok()
            .map(|shm| shm.f_bavail * shm.f_frsize),
        open_files: getrlimit(Resource::Nofile).current,
        address_space_bytes: getrlimit(Resource::As).current,
    };
    if let Err(error) = memfd {
        let what = format!("shared memory without a name can't be had (memfd_create): {error}");
        let advice =
            "Allow memfd_create and fallocate: the seccomp profile of a container may forbid them.";
        findings.push(Finding::problem("machine", what, advice));
    }
    if let Some(limit) = machine.open_files.filter(|limit| *limit < OPEN_FILES) {
        let what = format!("this process may open {limit} files; a group of 64 ranks needs more");
        let advice = "Raise the limit, as by ulimit -n 1024.";
        findings.push(Finding::note("machine", what, advice));
    }
    if let (Some(limit), Backend::Cuda) = (machine.address_space_bytes, backend) {
        let what = format!(
            "this process may use {limit} bytes of addresses; CUDA reserves more than it uses"
        );
        let advice = "Lift the limit: ulimit -v unlimited.";
        findings.push(Finding::note("machine", what, advice));
    }
    if machine.cores < ranks {
        let what = format!(
            "{ranks} ranks of the host backend share {} cores",
            machine.cores
        );
        let advice = "Times of the host backend then say little.";
        findings.push(Finding::note("machine", what, advice));
    }
    machine
}

/// How many NVIDIA GPUs the system shows this process.
#[cfg(not(feature = "cuda"))]
pub fn nvidia_devices() -> usize {
    let names = fs::read_dir("/dev").into_iter().flatten().flatten();
    let names = names.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let is_gpu = |name: &String| {
        let number = name.strip_prefix("nvidia");
        number.is_some_and(|number| number.parse::<u32>().is_ok())
    };
    names.filter(is_gpu).count()
}

fn release() -> String {
    let text = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    text.trim().into()
}

fn meminfo(text: &str, field: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(field))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

/// Makes shared memory as the host backend does for each sharded matrix.
fn memfd() -> io::Result<()> {
    let bytes = 1 << 20;
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = rustix::fs::memfd_create("gemmesh-doctor", flags)?;
    rustix::fs::ftruncate(&fd, bytes)?;
    rustix::fs::fallocate(&fd, FallocateFlags::empty(), 0, bytes)?;
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW)?;
    Ok(())
}
