//! The report that the doctor prints, for people and as JSON.

use serde::{Deserialize, Serialize};

/// The whole report. `--json` prints it, with the names of the fields.
#[derive(Serialize)]
pub struct Report {
    /// The version of the library.
    pub gemmesh: &'static str,
    /// The backend that must work.
    pub backend: Backend,
    pub machine: Machine,
    /// What the launcher says of this process, if there is one.
    pub launcher: Option<Launcher>,
    /// The environment variables that are set and matter.
    pub variables: Vec<Variable>,
    /// The hosts on which the launcher's ranks have met. Without a launcher: this one.
    pub hosts: Vec<HostReport>,
    /// How the GPUs of the launcher's ranks reach one another. Empty if that was not measured.
    pub peers: Vec<Peer>,
    /// A group of the host backend, if it works.
    pub host: Option<HostGroup>,
    pub cuda: GpuSection,
    /// What works, what to know, and what to mend.
    pub findings: Vec<Finding>,
}

impl Report {
    pub fn has_problem(&self) -> bool {
        self.findings.iter().any(Finding::is_problem)
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Backend {
    Host,
    Cuda,
}

#[derive(Serialize)]
pub struct Machine {
    /// The system's name, release and architecture.
    pub os: String,
    pub cores: usize,
    pub memory_bytes: Option<u64>,
    pub available_memory_bytes: Option<u64>,
    /// True if anonymous shared memory works, which the host backend needs.
    pub memfd: bool,
    /// Free bytes in /dev/shm, which NCCL uses and gemmesh does not.
    pub dev_shm_free_bytes: Option<u64>,
    /// The limit on open files; none if there is no limit.
    pub open_files: Option<u64>,
    /// The limit on addresses in bytes; none if there is no limit.
    pub address_space_bytes: Option<u64>,
}

#[derive(Serialize)]
pub struct Launcher {
    pub name: &'static str,
    pub rank: usize,
    pub world_size: usize,
}

#[derive(Serialize)]
pub struct Variable {
    pub name: String,
    pub value: String,
    /// Its effect on gemmesh.
    pub effect: &'static str,
}

/// A host, as its lowest rank sees it.
#[derive(Serialize, Deserialize)]
pub struct HostReport {
    pub name: String,
    /// Empty without a launcher.
    pub ranks: Vec<usize>,
    pub interfaces: Vec<Interface>,
    pub rdma_ports: Vec<RdmaPort>,
    /// The NCCL that its ranks find, if it can be used.
    pub nccl: Option<Nccl>,
    /// Why there is none.
    pub no_nccl: Option<String>,
}

/// A network interface.
#[derive(Serialize, Deserialize)]
pub struct Interface {
    pub name: String,
    pub up: bool,
    /// True if it is no hardware's, such as a bridge or the interface of a container.
    pub is_virtual: bool,
    /// 10⁶ bits per second. None if the driver does not say.
    pub mbit_per_s: Option<u64>,
    /// The RDMA devices of the same hardware.
    pub rdma: Vec<String>,
}

/// A port of an RDMA device.
#[derive(Serialize, Deserialize)]
pub struct RdmaPort {
    pub device: String,
    pub port: String,
    pub active: bool,
    /// The driver's word, such as "active" or "down".
    pub state: String,
    /// "InfiniBand" or "Ethernet".
    pub link_layer: Option<String>,
    /// 10⁶ bits per second. None if the driver does not say.
    pub mbit_per_s: Option<u64>,
}

/// The library that carries rows between hosts.
#[derive(Serialize, Deserialize)]
pub struct Nccl {
    pub version: String,
    pub path: Option<String>,
    /// True if it has put/signal, which gemmesh does not use.
    pub has_put_signal: bool,
}

/// How rows get from one rank to another.
#[derive(Serialize, Deserialize)]
pub struct Peer {
    pub from: usize,
    pub to: usize,
    pub via: Via,
    /// 10⁹ bytes per second, if the route was measured.
    pub gb_per_s: Option<f64>,
}

/// What brings rows from one rank to another.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Via {
    /// The copy engine of the rank that receives them.
    Pull,
    /// The copy engine of the rank that sends them.
    Push,
    /// The kernel of the rank that sends them.
    Store,
    /// The network, along a rail.
    Network,
    /// This rank of the receiver's host. It gets them over the network, and passes them on.
    Rank(usize),
}

#[derive(Serialize, Deserialize)]
pub struct HostGroup {
    /// Threads of one process.
    pub ranks: usize,
    pub product: Product,
    pub copies: Speed,
}

/// A product that was compared with float64.
#[derive(Serialize, Deserialize)]
pub struct Product {
    pub elements: usize,
    /// The largest error relative to what rounding allows. At most 1 is right.
    pub worst: f64,
}

/// The speed of all-gathers: medians over calls in a row, as the slowest rank sees it.
#[derive(Serialize, Deserialize)]
pub struct Speed {
    /// The time of a call in which each rank has 16 bytes.
    pub latency_us: f64,
    /// 10⁹ bytes that come to a rank in a second if each rank has `bytes`.
    pub gb_per_s: f64,
    pub bytes: usize,
}

#[derive(Default, Serialize)]
pub struct GpuSection {
    /// True if this program was built with feature cuda.
    pub compiled: bool,
    /// The release of nvcc that has compiled the kernels, if there are any.
    pub nvcc: Option<&'static str>,
    /// The newest CUDA that the driver supports, if there is a driver.
    pub driver: Option<String>,
    pub gpus: Vec<Gpu>,
    /// The driver's description of the links between GPUs.
    pub links: Vec<Link>,
    /// The measurements of each pair of GPUs.
    pub pairs: Vec<Pair>,
}

#[derive(Serialize, Deserialize)]
pub struct Gpu {
    /// Its number among the GPUs that this process sees.
    pub ordinal: usize,
    pub name: String,
    pub capability: String,
    /// True if there are kernels for its architecture.
    pub has_kernels: bool,
    pub multiprocessors: i32,
    pub memory_bytes: usize,
    pub free_memory_bytes: usize,
    pub uuid: String,
    pub pci: String,
    pub ecc: bool,
    /// True if it is a part of a GPU.
    pub mig: bool,
    /// The number of priorities that streams can have.
    pub stream_priorities: i32,
    /// A product of one rank on this GPU, if it works.
    pub product: Option<Product>,
}

#[derive(Serialize, Deserialize)]
pub struct Link {
    pub from: usize,
    pub to: usize,
    /// True if one can map the other's memory.
    pub access: bool,
    /// The driver's rank of the link among all: lower is faster.
    pub performance_rank: i32,
    pub native_atomics: bool,
}

#[derive(Serialize)]
pub struct Pair {
    pub gpus: [usize; 2],
    /// None if they can't work together.
    pub measured: Option<Measured>,
}

#[derive(Serialize, Deserialize)]
pub struct Measured {
    pub product: Product,
    /// The speed of copy engines. Each GPU pulls.
    pub copies: Speed,
    /// The speed of stores by kernels, if kernels may wait for one another.
    pub stores: Option<Speed>,
    /// Why kernels may not wait for one another.
    pub no_stores: Option<String>,
}

#[derive(Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// It works.
    Ok,
    /// It works, and there is something to know.
    Note,
    /// It keeps the backend from working.
    Problem,
}

#[derive(Serialize)]
pub struct Finding {
    pub severity: Severity,
    /// Its subject.
    pub about: &'static str,
    pub what: String,
    /// What to do, unless it works.
    pub advice: Option<String>,
}

impl Finding {
    pub fn is_problem(&self) -> bool {
        self.severity == Severity::Problem
    }

    pub fn ok(about: &'static str, what: impl Into<String>) -> Finding {
        Finding {
            severity: Severity::Ok,
            about,
            what: what.into(),
            advice: None,
        }
    }

    pub fn note(about: &'static str, what: impl Into<String>, advice: &str) -> Finding {
        Finding {
            severity: Severity::Note,
            about,
            what: what.into(),
            advice: Some(advice.into()),
        }
    }

    pub fn problem(about: &'static str, what: impl Into<String>, advice: &str) -> Finding {
        Finding {
            severity: Severity::Problem,
            ..Finding::note(about, what, advice)
        }
    }

    /// A finding that is a problem only if GPUs must work.
    pub fn of_gpus(backend: Backend, what: impl Into<String>, advice: &str) -> Finding {
        match backend {
            Backend::Cuda => Finding::problem("GPUs", what, advice),
            Backend::Host => Finding::note("GPUs", what, advice),
        }
    }
}
