//! Checks whether gemmesh works on this machine, and says how to fix what does not work.
//!
//! It also measures how fast ranks reach one another.
//!
//! ```sh
//! cargo run --release --example doctor                    # the host backend
//! cargo run --release --features cuda --example doctor    # and GPUs
//! cargo run --release --example doctor -- --json          # for a bug report
//! torchrun --nproc-per-node 4 --no-python target/release/examples/doctor    # and whether the launcher's ranks meet
//! ```
//!
//! A step that may hang or crash, for example in a driver, runs as a separate process with a deadline. Its failure is a
//! finding, and the next step goes on. [`report::Report`] is what `--json` prints. The exit code is 1 if a problem
//! keeps the backend from working.

#[path = "../../benches/common/mod.rs"]
mod common;
mod environment;
#[cfg(feature = "cuda")]
mod gpus;
mod machine;
mod measure;
mod print;
mod report;
mod step;

use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, ValueEnum};
use gemmesh::{Group, Host};

use report::{Backend, Finding, GpuSection, Report};
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
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(3..=3600))]
    timeout: u64,
    /// Print the report as JSON.
    #[arg(long)]
    json: bool,
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
    if let Some(launcher) = &launcher {
        // Every rank of the launcher's job is a doctor. They meet, and rank 0 goes on.
        let met = Group::<Host>::builder()
            .timeout(timeout / 3)
            .arrival_timeout(timeout / 3)
            .from_env()
            .and_then(|group| group.barrier().map(|()| group.host_count()));
        let failed = met.is_err();
        findings.push(match met {
            Ok(hosts) => {
                let met = format!("the {} ranks have met", launcher.world_size);
                let on_hosts = match hosts {
                    1 => met,
                    _ => format!("{met}, on {hosts} hosts"),
                };
                Finding::ok("launcher", on_hosts)
            }
            Err(error) => Finding::problem(
                "launcher",
                error.to_string(),
                "Start all ranks of the job (with GEMMESH_KEY if they are on several hosts), or unset the launcher's \
                 variables.",
            ),
        });
        if launcher.rank > 0 {
            let problems = findings.iter().filter(|finding| finding.is_problem());
            problems.for_each(|finding| print::err(&(print::finding(finding) + "\n")));
            return ExitCode::from(u8::from(failed));
        }
    }
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
        host,
        cuda,
        findings,
    };
    print::out(&match args.json {
        true => print::json(&report),
        false => print::text(&report),
    });
    ExitCode::from(u8::from(report.has_problem()))
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
