//! Checks whether gemmesh works on this machine, and says how to fix what does not work.
//!
//! It also measures how fast ranks reach one another.
//!
//! ```sh
//! cargo run --release -p gemmesh-tools --bin doctor                    # the host backend
//! cargo run --release -p gemmesh-tools --features cuda --bin doctor    # and GPUs
//! cargo run --release -p gemmesh-tools --bin doctor -- --json          # for a bug report
//! torchrun --nproc-per-node 4 --no-python target/release/doctor        # and whether the launcher's ranks meet
//! ```
//!
//! Ranks of several hosts, too: it shows the hosts with their network devices and NCCL, and how the GPUs of each two
//! ranks reach one another.
//!
//! A step that may hang or crash, for example in a driver, runs as a separate process with a deadline. Its failure is a
//! finding, and the next step goes on. [`report::Report`] is what `--json` prints. The exit code is 1 if a problem
//! keeps the backend from working.

#[path = "../../../../../benches/common/mod.rs"]
mod common;
mod environment;
#[cfg(feature = "cuda")]
mod gpus;
mod hosts;
mod machine;
mod measure;
mod nics;
#[cfg(feature = "cuda")]
mod peers;
mod print;
pub(crate) mod report;
pub(crate) mod routes;
mod step;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, ValueEnum};
use gemmesh::{Group, Host};

use common::Failure;
use report::{Backend, Finding, GpuSection, HostReport, Launcher, Peer, Report};
use step::Step;

/// Checks whether gemmesh works on this machine, measures how fast ranks reach each other, and says how to mend faults.
#[derive(Parser)]
#[command(name = "gemmesh-doctor", version)]
struct Args {
    /// The backend that must work. The exit code is 1 if it does not. The default is cuda in a build with feature cuda,
    /// else host.
    #[arg(long, value_enum)]
    backend: Option<BackendName>,
    /// Ranks of the host backend.
    #[arg(long, default_value_t = 2)]
    ranks: usize,
    /// Seconds that a step may take.
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(step::SHORTEST.as_secs()..=3600))]
    timeout: u64,
    /// Print the report as JSON.
    #[arg(long)]
    json: bool,
    /// Where the system shows its devices. For tests.
    #[arg(long, hide = true, default_value = "/sys")]
    sys: PathBuf,
    #[command(subcommand)]
    step: Option<Step>,
}

#[derive(Clone, Copy, ValueEnum)]
enum BackendName {
    Host,
    Cuda,
}

/// Makes the report, or runs a step of it if this is a process that the doctor has started.
pub fn main() -> ExitCode {
    let args = Args::parse();
    let timeout = Duration::from_secs(args.timeout);
    if let Some(step) = args.step {
        return step.play(timeout);
    }
    let backend = match args.backend {
        Some(BackendName::Host) => Backend::Host,
        Some(BackendName::Cuda) => Backend::Cuda,
        None if cfg!(feature = "cuda") => Backend::Cuda,
        None => Backend::Host,
    };
    let mut findings = Vec::new();
    let launcher = environment::launcher(&mut findings);
    let job = launcher.as_ref();
    let job = job.and_then(|launcher| meet(launcher, backend, &args.sys, timeout, &mut findings));
    if launcher.as_ref().is_some_and(|launcher| launcher.rank > 0) {
        return end_of_other_ranks(&findings);
    }
    let job = job.unwrap_or_else(|| Job {
        hosts: vec![hosts::look(&args.sys, timeout)],
        peers: Vec::new(),
    });
    let machine = machine::look(backend, args.ranks, &mut findings);
    let variables = environment::variables(backend, &mut findings);
    let host = step::host(args.ranks, timeout, &mut findings);
    let cuda = look_at_gpus(backend, timeout, &mut findings);
    let report = Report {
        gemmesh: env!("CARGO_PKG_VERSION"),
        backend,
        machine,
        launcher,
        variables,
        hosts: job.hosts,
        peers: job.peers,
        host,
        cuda,
        findings,
    };
    let printed = print::out(&match args.json {
        true => print::json(&report),
        false => print::text(&report),
    });
    if let Err(error) = &printed {
        print::err(&format!("the report can't be written: {error}\n"));
    }
    ExitCode::from(u8::from(report.has_problem() || printed.is_err()))
}

/// What the launcher's ranks have found together.
struct Job {
    hosts: Vec<HostReport>,
    peers: Vec<Peer>,
}

/// Meets the other ranks of the launcher's job. Each of them is a doctor, and rank 0 reports. Collective.
fn meet(
    launcher: &Launcher,
    backend: Backend,
    sys: &Path,
    timeout: Duration,
    findings: &mut Vec<Finding>,
) -> Option<Job> {
    let hosts = match gather_hosts(sys, timeout) {
        Ok(hosts) => hosts,
        Err(error) => {
            let advice = "Start all ranks of the job (with GEMMESH_KEY if they are on several hosts), or unset the \
                          launcher's variables.";
            findings.push(Finding::problem("launcher", error.to_string(), advice));
            return None;
        }
    };
    let met = format!("the {} ranks have met", launcher.world_size);
    let met = match hosts.len() {
        1 => met,
        count => format!("{met}, on {count} hosts"),
    };
    findings.push(Finding::ok("launcher", met));
    if launcher.rank == 0 {
        hosts::judge(&hosts, backend, findings);
    }
    let peers = look_at_peers(&hosts, backend, timeout, findings);
    Some(Job { hosts, peers })
}

/// The hosts of the launcher's ranks. Collective.
fn gather_hosts(sys: &Path, timeout: Duration) -> Result<Vec<HostReport>, Failure> {
    let wait = timeout / 3;
    let builder = Group::<Host>::builder().timeout(wait).arrival_timeout(wait);
    let group = builder.from_env()?;
    group.barrier()?;
    hosts::gather(&group, sys, timeout)
}

/// Ends a rank that does not report. It prints what keeps it from working.
fn end_of_other_ranks(findings: &[Finding]) -> ExitCode {
    let problems = findings.iter().filter(|finding| finding.is_problem());
    let said = problems.map(|finding| print::err(&(print::finding(finding) + "\n")));
    ExitCode::from(u8::from(said.count() > 0))
}

/// Measures how the GPUs of the launcher's ranks reach one another, if they can. Collective.
#[cfg(feature = "cuda")]
fn look_at_peers(
    hosts: &[HostReport],
    backend: Backend,
    timeout: Duration,
    findings: &mut Vec<Finding>,
) -> Vec<Peer> {
    let lacks_nccl = hosts.len() > 1 && hosts.iter().any(|host| host.nccl.is_none());
    let has_kernels = gemmesh::Cuda::nvcc_release().is_some();
    match backend == Backend::Cuda && has_kernels && !lacks_nccl {
        true => step::peers(timeout, findings),
        false => Vec::new(),
    }
}

#[cfg(not(feature = "cuda"))]
fn look_at_peers(_: &[HostReport], _: Backend, _: Duration, _: &mut Vec<Finding>) -> Vec<Peer> {
    Vec::new()
}

#[cfg(feature = "cuda")]
fn look_at_gpus(backend: Backend, timeout: Duration, findings: &mut Vec<Finding>) -> GpuSection {
    gpus::look(backend, timeout, findings)
}

#[cfg(not(feature = "cuda"))]
fn look_at_gpus(backend: Backend, _: Duration, findings: &mut Vec<Finding>) -> GpuSection {
    let what = match machine::nvidia_devices() {
        0 => "this program was built without feature cuda, and the system shows no NVIDIA GPU",
        _ => "this program was built without feature cuda: it can't use this machine's NVIDIA GPUs",
    };
    let advice = "For GPUs, build with --features cuda, on a machine with nvcc 12.4 or later.";
    findings.push(Finding::of_gpus(backend, what, advice));
    GpuSection::default()
}
