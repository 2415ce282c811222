//! Steps that may crash or hang. Each runs in a separate process with a deadline.

use std::io::{IsTerminal, Read};
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use clap::Subcommand;
use gemmesh::{Group, Host, launch};
use serde::Serialize;
use serde::de::DeserializeOwned;

#[cfg(feature = "cuda")]
use super::report::Peer;
use super::report::{Finding, HostGroup, Nccl};
use super::{measure, print};

/// The shortest time that a step may take.
pub const SHORTEST: Duration = Duration::from_secs(3);

/// What a process of the doctor's own does.
#[derive(Clone, Copy, Subcommand)]
pub enum Step {
    /// A group of the host backend, of so many threads.
    #[command(hide = true)]
    Host { ranks: usize },
    /// What the driver says.
    #[cfg(feature = "cuda")]
    #[command(hide = true)]
    Gpus,
    /// A group of one GPU.
    #[cfg(feature = "cuda")]
    #[command(hide = true)]
    Alone { gpu: usize },
    /// A group of two GPUs.
    #[cfg(feature = "cuda")]
    #[command(hide = true)]
    Pair { first: usize, second: usize },
    /// The NCCL that is found.
    #[cfg(feature = "cuda")]
    #[command(hide = true)]
    Nccl,
    /// A rank of the launcher's group, on GPUs.
    #[cfg(feature = "cuda")]
    #[command(hide = true)]
    Peers,
}

impl Step {
    fn arguments(self) -> Vec<String> {
        match self {
            Step::Host { ranks } => vec!["host".into(), ranks.to_string()],
            #[cfg(feature = "cuda")]
            Step::Gpus => vec!["gpus".into()],
            #[cfg(feature = "cuda")]
            Step::Alone { gpu } => vec!["alone".into(), gpu.to_string()],
            #[cfg(feature = "cuda")]
            Step::Pair { first, second } => {
                vec!["pair".into(), first.to_string(), second.to_string()]
            }
            #[cfg(feature = "cuda")]
            Step::Nccl => vec!["nccl".into()],
            #[cfg(feature = "cuda")]
            Step::Peers => vec!["peers".into()],
        }
    }

    /// True if its process takes this one's place as a rank of the launcher.
    fn is_rank(self) -> bool {
        match self {
            #[cfg(feature = "cuda")]
            Step::Peers => true,
            _ => false,
        }
    }

    /// Runs the step in the process that was started for it.
    pub fn play(self, timeout: Duration) -> ExitCode {
        // A group's own deadline comes first, because its error says more.
        let wait = timeout / 3;
        match self {
            Step::Host { ranks } => {
                let builder = Group::<Host>::builder().timeout(wait);
                let builder = builder.arrival_timeout(wait);
                say(measure::host(builder, ranks))
            }
            #[cfg(feature = "cuda")]
            Step::Gpus => say(super::gpus::inspect()),
            #[cfg(feature = "cuda")]
            Step::Alone { gpu } => say(super::gpus::alone(gpu, wait)),
            #[cfg(feature = "cuda")]
            Step::Nccl => say(super::peers::nccl()),
            #[cfg(feature = "cuda")]
            Step::Peers => say(super::peers::measure(wait)),
            #[cfg(feature = "cuda")]
            Step::Pair { first, second } => match launch::rank_environment() {
                Ok(Some(environment)) => {
                    let gpu = [first, second][environment.rank.min(1)];
                    match super::gpus::pair(gpu, wait) {
                        Ok(_) if environment.rank > 0 => ExitCode::SUCCESS,
                        measured => say(measured),
                    }
                }
                _ => {
                    let timeout = timeout.as_secs().to_string();
                    let ranks = launch::Launch::new(2).args(["--timeout", &timeout]);
                    match ranks.args(self.arguments()).run() {
                        // Rank 0 has said what it has measured.
                        Ok(()) => ExitCode::SUCCESS,
                        failed => say(failed),
                    }
                }
            },
        }
    }

    /// Runs the step in a separate process.
    ///
    /// # Errors
    /// Its error in words, or that it has crashed or did not end in time.
    pub fn run<T: DeserializeOwned>(self, timeout: Duration) -> Result<T, String> {
        let arguments = self.arguments();
        // All steps of many GPUs take minutes.
        let is_watched = std::io::stderr().is_terminal();
        let show = |what: &str| {
            if is_watched {
                print::err(&format!("\r\x1b[K{what}"));
            }
        };
        show(&arguments.join(" "));
        let outcome = run(&arguments, self.is_rank(), timeout);
        show("");
        outcome
    }
}

/// As [`Step::run`].
fn run<T: DeserializeOwned>(
    arguments: &[String],
    is_rank: bool,
    timeout: Duration,
) -> Result<T, String> {
    let mut command = Command::new("/proc/self/exe");
    if !is_rank {
        launch::variables().for_each(|name| {
            command.env_remove(name);
        });
    }
    let seconds = timeout.as_secs().to_string();
    let process = command
        .args(["--timeout", &seconds])
        .args(arguments)
        // The last lines say why it has crashed.
        .env("RUST_BACKTRACE", "0")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let mut process = process.map_err(|error| format!("can't start a process: {error}"))?;
    let (said, complained) = (read(process.stdout.take()), read(process.stderr.take()));
    let status = end(&mut process, timeout)?;
    // Processes that it has started end with it.
    const MOMENT: Duration = Duration::from_secs(1);
    let said = said.recv_timeout(MOMENT).unwrap_or_default();
    // Before what a launched rank has said stands the rank.
    let outcomes = said
        .lines()
        .filter_map(|line| serde_json::from_str(&line[line.find('{')?..]).ok());
    let outcomes: Vec<Result<T, String>> = outcomes.collect();
    let first_error = outcomes.iter().position(Result::is_err).unwrap_or(0);
    match outcomes.into_iter().nth(first_error) {
        // It may have crashed after it reported.
        Some(Ok(value)) if status.success() => return Ok(value),
        Some(Err(error)) => return Err(error),
        _ => (),
    }
    let complained = complained.recv_timeout(MOMENT).unwrap_or_default();
    let words: Vec<&str> = complained.lines().filter(|line| !line.is_empty()).collect();
    let last = words.len().saturating_sub(3);
    Err(format!(
        "it has crashed ({status}): {}",
        words[last..].join("; ")
    ))
}

/// Reports the outcome of a step to the doctor.
fn say<T: Serialize, E: ToString>(outcome: Result<T, E>) -> ExitCode {
    let outcome = outcome.map_err(|error| error.to_string());
    let printed = print::out(&(serde_json::to_string(&outcome).unwrap_or_default() + "\n"));
    ExitCode::from(u8::from(outcome.is_err() || printed.is_err()))
}

/// Reads everything until the end.
fn read(from: Option<impl Read + Send + 'static>) -> Receiver<String> {
    let (to, received) = mpsc::channel();
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut from) = from {
            // An error leaves what was read before.
            let _ = from.read_to_end(&mut bytes);
        }
        let _ = to.send(String::from_utf8_lossy(&bytes).into_owned());
    });
    received
}

/// Waits for a process, and kills it if it does not end in time.
fn end(process: &mut Child, timeout: Duration) -> Result<ExitStatus, String> {
    const NAP: Duration = Duration::from_millis(5);
    let begin = Instant::now();
    loop {
        match process.try_wait() {
            Ok(Some(status)) => return Ok(status),
            Ok(None) if begin.elapsed() < timeout => std::thread::sleep(NAP),
            Ok(None) => {
                // If a driver does not let the process end, no one waits for it.
                let _ = process.kill();
                let seconds = timeout.as_secs();
                return Err(format!("it did not end within {seconds} s, and was killed"));
            }
            Err(error) => return Err(format!("can't wait for a process: {error}")),
        }
    }
}

/// A group of the host backend.
pub fn host(ranks: usize, timeout: Duration, findings: &mut Vec<Finding>) -> Option<HostGroup> {
    match (Step::Host { ranks }).run::<HostGroup>(timeout) {
        Ok(group) => {
            let what = format!("the host backend works on {ranks} ranks");
            findings.push(Finding::ok("host", what));
            Some(group)
        }
        Err(error) => {
            let advice =
                "The message says what to change. A group needs memfd, Unix sockets and threads.";
            findings.push(Finding::problem("host", error, advice));
            None
        }
    }
}

/// The NCCL that processes of this host find.
///
/// # Errors
/// What is missing.
#[cfg(feature = "cuda")]
pub fn nccl(timeout: Duration) -> Result<Nccl, String> {
    // Other hosts wait for the answer, no longer than a group's deadline.
    Step::Nccl.run((timeout / 4).max(SHORTEST))
}

#[cfg(not(feature = "cuda"))]
pub fn nccl(_: Duration) -> Result<Nccl, String> {
    Err("this program was built without feature cuda".into())
}

/// How the GPUs of the launcher's ranks reach one another. Collective.
#[cfg(feature = "cuda")]
pub fn peers(timeout: Duration, findings: &mut Vec<Finding>) -> Vec<Peer> {
    match Step::Peers.run(timeout) {
        Ok(peers) => {
            findings.push(Finding::ok("launcher", "the ranks' GPUs reach one another"));
            peers
        }
        Err(error) => {
            let what = format!("the ranks' GPUs: {error}");
            let advice = "The message says what to change. Between hosts NCCL carries rows, and NCCL_DEBUG=WARN says \
                          what keeps it from that.";
            findings.push(Finding::problem("launcher", what, advice));
            Vec::new()
        }
    }
}
