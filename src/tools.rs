//! What the programs of `crates/gemmesh-tools` ask of the library: its model of GPUs, and what the doctor shows.
//!
//! **Unstable**: any release may change or remove what is here, and the feature `unstable-tools` says so. It needs the feature `cuda`.
//!
//! The model predicts times in microseconds from the [`Rates`] of a device. [`choose`] and [`over_hosts`] choose an
//! operation's configuration, [`Tiles`] knows how long the tiles of a product take, [`gathered`] a product whose rows
//! arrive meanwhile, and [`time_of_sum`] a product whose partial sums are added over the ranks.

pub use crate::backend::tools::*;

use crate::backend::Cuda;
use crate::group::Group;

/// The library's rates for this rank's GPU.
pub fn library_rates(group: &Group<Cuda>) -> Rates {
    group.inner().backend.library_rates()
}

/// By rank: 10⁹ bytes that the network carries each way in a second, as measured when the group opened.
///
/// A rank sends to a rank of its rail and receives from one. Empty if all ranks share a host.
pub fn network_gb_per_s(group: &Group<Cuda>) -> Vec<f64> {
    let rates = group.inner().backend.network_rates();
    rates.iter().map(|rate| rate / 1e3).collect()
}
