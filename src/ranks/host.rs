//! Which host a process runs on.

use std::io;

use crate::error::{Error, Result};
use crate::resources::is_out_of_descriptors;

/// Names the host, so that ranks of one machine can play several hosts in tests.
#[cfg(feature = "mpi")]
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

/// The host's name: what the environment calls it, or its kernel's id.
#[cfg(feature = "mpi")]
pub fn name(boot_id: &str) -> String {
    let told = std::env::var_os(VARIABLE);
    told.map_or_else(
        || boot_id.into(),
        |name| name.to_string_lossy().into_owned(),
    )
}
