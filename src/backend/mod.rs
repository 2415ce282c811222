//! Backends: what a rank is, where symmetric memory lies, and who runs schedules.

mod contract;
#[cfg(feature = "cuda")]
mod cuda;
mod delays;
mod host;
pub(crate) mod transport;
mod work;

pub use contract::KEPT_PROGRAMS;
pub use contract::{Backend, OpenOptions, Owner};
pub(crate) use contract::{KEPT, sealed};
#[cfg(feature = "cuda")]
pub use cuda::Cuda;
#[cfg(all(feature = "cuda", feature = "unstable-tools"))]
pub use cuda::tools;
#[cfg(feature = "cuda")]
pub use cuda::{Variant, Winner};
#[cfg(all(fuzzing, feature = "cuda"))]
pub use cuda::{peer, winners};
pub use delays::delay_chunks;
pub use host::Host;
