//! What the library's own tests and benchmarks ask of it.
//!
//! **Unstable**: any release may change or remove what is here, and the feature `unstable-tools` says so.

use crate::Result;
use crate::backend::Backend;
use crate::group::{Builder, Group};

pub use crate::backend::KEPT_PROGRAMS;
pub use crate::backend::delay_chunks;
#[cfg(feature = "cuda")]
pub use crate::backend::{Variant, Winner};
#[cfg(feature = "cuda")]
pub use crate::interop::stream::{align_streams, ranks_share_gpus, with_each_kernel};
pub use crate::json::{of_outcome, outcome};
pub use crate::ops::run_schedule;
pub use crate::ranks::address::meeting_texts;
pub use crate::ranks::rendezvous::PROTOCOL_VERSION;

/// [`Builder::connect`] as a build of protocol version `version`.
///
/// # Errors
/// As [`Builder::connect`].
#[track_caller]
pub fn connect_speaking<B: Backend>(
    builder: Builder<B>,
    rank: usize,
    world: usize,
    address: &str,
    version: u32,
) -> Result<Group<B>> {
    builder.connect_speaking(rank, world, address, version)
}
