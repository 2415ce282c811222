//! Which host a process runs on.

use std::borrow::Cow;
use std::io;

use crate::error::{Error, Result};
use crate::resources::is_out_of_descriptors;
use crate::schedule::agreed::hash;

/// Names the host, so that ranks of one machine can play several hosts in tests.
const VARIABLE: &str = "GEMMESH_HOST";

/// The running kernel's id, which is the same for all processes that can share memory.
///
/// # Errors
/// If this process has no descriptors left.
pub fn boot_id(rank: usize) -> Result<String> {
    let id: io::Result<String> = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
    match id {
        Ok(id) => Ok(id.trim().into()),
        Err(error) if is_out_of_descriptors(&error) => {
            Err(Error::system(rank, "read the kernel's id")(error))
        }
        Err(_) => Ok("unknown".into()),
    }
}

/// The host, in a few bytes that differ for other hosts: its kernel, the network namespace, and what the environment
/// calls it.
///
/// Ranks of one host meet on sockets that belong to a network namespace.
pub fn tag(boot_id: &str) -> u64 {
    let namespace = std::fs::read_link("/proc/self/ns/net").unwrap_or_default();
    let name = std::env::var_os(VARIABLE).unwrap_or_default();
    let words: [Cow<str>; 3] = [
        boot_id.into(),
        namespace.to_string_lossy(),
        name.to_string_lossy(),
    ];
    hash(words.join("\n").as_bytes())
}
