//! The environment: what a launcher says, and the variables that change what gemmesh does.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::path::Path;

use gemmesh::error::Kind;
use gemmesh::launch;

use super::report::{Backend, Finding, Launcher, Variable};

/// The key of a job of several hosts.
const KEY: &str = "GEMMESH_KEY";
/// The variables of the library that are no secrets, beside those of launchers.
const READ: [&str; 5] = [
    "GEMMESH_RATES",
    "GEMMESH_TUNED",
    "GEMMESH_NO_KERNELS",
    "GEMMESH_PORT",
    HOST,
];
/// Makes this process's host a different one than those of other names.
pub const HOST: &str = "GEMMESH_HOST";

/// The launcher's description of this process, as the library reads it.
pub fn launcher(findings: &mut Vec<Finding>) -> Option<Launcher> {
    match launch::rank_environment() {
        Ok(Some(environment)) => Some(Launcher {
            name: environment.launcher,
            rank: environment.rank,
            world_size: environment.world_size,
        }),
        Ok(None) => {
            let what = "no launcher: a program starts its own ranks (gemmesh::launch, or threads on the host), or names rank and world size \
                        (Group::connect)";
            findings.push(Finding::ok("launcher", what));
            None
        }
        Err(error) => {
            let advice = match error.kind() {
                Kind::Environment { .. } => {
                    "Set what is missing, or unset the rank: no group is found without it, and gemmesh::launch refuses to start ranks."
                }
                _ => {
                    "Correct the variable or unset it: no group is found by it, and gemmesh::launch refuses to start ranks."
                }
            };
            findings.push(Finding::problem("launcher", error.to_string(), advice));
            None
        }
    }
}

/// The variables that are set and matter.
pub fn variables(backend: Backend, findings: &mut Vec<Finding>) -> Vec<Variable> {
    let of_launchers: BTreeSet<&str> = launch::variables().collect();
    let mut variables = Vec::new();
    for (name, value) in std::env::vars_os() {
        let Some(name) = name.to_str() else {
            continue;
        };
        let effect = match of_launchers.contains(name) {
            true => Some("tells a rank who it is"),
            false => effect(name, &value, backend, findings),
        };
        let value = match is_shown(name) {
            true => value.to_string_lossy().into(),
            false => "(not shown)".into(),
        };
        variables.extend(effect.map(|effect| Variable {
            name: name.into(),
            value,
            effect,
        }));
    }
    variables.sort_by(|x, y| x.name.cmp(&y.name));
    variables
}

/// Reports are shown to others. So they have no secret, and no value of a name that may be one misspelt.
fn is_shown(name: &str) -> bool {
    let is_read = READ.contains(&name) || launch::variables().any(|read| read == name);
    !launch::is_secret(name) && (is_read || !name.starts_with("GEMMESH_"))
}

/// What a variable does, if it has an effect or seems meant to have one.
fn effect(
    name: &str,
    value: &OsStr,
    backend: Backend,
    findings: &mut Vec<Finding>,
) -> Option<&'static str> {
    let text = value.to_string_lossy();
    let mut file = || {
        if let Err(error) = std::fs::File::open(Path::new(value)) {
            let what = format!("{name} names {text:?}, which can't be read: {error}");
            let advice = "Correct or unset it: groups of GPUs do not open.";
            findings.push(Finding::of_gpus(backend, what, advice));
        }
    };
    match name {
        "CUDA_VISIBLE_DEVICES" => Some("the GPUs that a rank sees, in this order"),
        "CUDA_DEVICE_MAX_CONNECTIONS" if text == "1" => {
            let what = "CUDA_DEVICE_MAX_CONNECTIONS=1 puts streams in one queue: rows are pulled, not pushed or stored";
            let advice = "Unset it, unless another library needs it: gathers of few rows are slower, and overlap less.";
            findings.push(Finding::note("GPUs", what, advice));
            Some("streams share a queue: no pushes, no stores")
        }
        "CUDA_DEVICE_MAX_CONNECTIONS" => Some("none: streams have queues of their own"),
        "CUDA_LAUNCH_BLOCKING" if !["", "0"].contains(&&*text) => {
            let what = "CUDA_LAUNCH_BLOCKING makes every launch wait: nothing overlaps, and rows are not pushed or stored";
            let advice = "Unset it when you are done with debugging.";
            findings.push(Finding::note("GPUs", what, advice));
            Some("launches wait: no overlap, no pushes, no stores")
        }
        "CUDA_LAUNCH_BLOCKING" => Some("none"),
        "CUDA_MPS_PIPE_DIRECTORY" => {
            Some("names MPS, under which streams may have too few priorities for pushes")
        }
        "GEMMESH_RATES" => {
            file();
            Some("rates of the GPU, by which products are cut up")
        }
        "GEMMESH_TUNED" => {
            if text != "none" {
                file();
            }
            Some("measured configurations of products")
        }
        "GEMMESH_NO_KERNELS" => Some("a build with it has no GPU kernels"),
        KEY => Some("the secret by which hosts let one another in"),
        "GEMMESH_PORT" => Some("the port at which rank 0 listens for other hosts"),
        HOST => Some("ranks with another value are on another host"),
        _ if name.starts_with("NCCL_") => {
            Some("configures NCCL, which carries rows only from host to host")
        }
        // Only tests read it.
        "GEMMESH_REQUIRE_GPU" => None,
        _ if name.starts_with("GEMMESH_TEST") => None,
        _ if name.starts_with("GEMMESH_") => {
            findings.push(unread(name));
            Some("none: gemmesh reads no such variable")
        }
        _ => None,
    }
}

fn unread(name: &str) -> Finding {
    let what = format!("gemmesh reads no variable {name}");
    let advice = "See how its name is spelt, or unset it.";
    Finding::note("environment", what, advice)
}
