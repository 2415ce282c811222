//! Memory for what slices of K have added up, until the last of a tile's is there.

use std::sync::Arc;

use super::driver::{Device, DevicePtr, Memory};
use super::kernel::CONSUMER_WARPS;
use super::reclaim::{Deferred, Reclaimer};
use crate::error::Result;
use crate::schedule::Config;
use crate::schedule::layout::limit;

/// Bytes of partial sums: of 512 slices of the largest tiles.
const BYTES: usize = 64 << 20;
/// The smallest tile of a CTA.
const SMALLEST: usize = 64 * 64;
/// Warps of as many tiles as there is room for.
const COUNTS: usize = BYTES / (SMALLEST * size_of::<f32>()) * CONSUMER_WARPS as usize;

/// One memory for all operations of a group, for their kernels run one after the other.
#[derive(Debug)]
pub struct Workspace(Deferred<Memory>);

impl Workspace {
    pub fn new(device: &Arc<Device>, reclaimer: &Arc<Reclaimer>) -> Result<Workspace> {
        let bytes = BYTES + COUNTS * size_of::<u32>();
        let memory = Memory::zeroed(device, bytes)?;
        Ok(Workspace(Deferred::new(memory, reclaimer)))
    }

    pub fn partials(&self) -> DevicePtr {
        self.0.ptr()
    }

    /// Zero between operations: who counts the last takes the count back.
    pub fn arrived(&self) -> DevicePtr {
        self.0.ptr() + BYTES as u64
    }
}

/// Whether there is room for what slices of so many entries of the table add up, and a kernel that does it: none that adds partials.
///
/// # Errors
/// [`Error::Limit`](crate::Error::Limit).
pub fn check(config: &Config, entries: usize, adds_partials: bool) -> Result<()> {
    if adds_partials {
        let what = "Config::tile.k_slices of partial sums that are sent,";
        limit(what, config.tile.k_slices, 1, 1)?;
    }
    limit(
        "bytes that Config::tile.k_slices adds up",
        bytes(config, entries),
        0,
        BYTES,
    )
}

/// What they take.
fn bytes(config: &Config, entries: usize) -> usize {
    match config.tile.k_slices {
        1 => 0,
        slices => {
            let factors = [config.entry_rows(), config.tile.n, size_of::<f32>(), slices];
            factors.into_iter().fold(entries, usize::saturating_mul)
        }
    }
}

/// As [`check`].
pub fn fit(config: &Config, entries: usize) -> bool {
    bytes(config, entries) <= BYTES
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::cuda::kernel::{WIDEST, configs};
    use crate::error::Error;
    use crate::schedule::{Chunking, Route};

    fn with_slices(count: usize) -> impl Iterator<Item = Config> {
        let base = Config::new(WIDEST.with_k_slices(count), Chunking::new(1), Route::Pull);
        configs(base, false).filter(move |config| config.tile.k_slices == count)
    }

    #[test]
    fn slices_that_there_is_no_room_for_and_those_of_sums_are_refused() {
        for config in with_slices(4) {
            let of_entry = config.entry_rows() * config.tile.n * 4 * size_of::<f32>();
            let most = BYTES / of_entry;
            assert_eq!(check(&config, most, false), Ok(()));
            let refused = |error: Result<()>, value: usize, max: usize| match error {
                Err(Error::Limit {
                    what,
                    value: v,
                    max: m,
                    ..
                }) => {
                    assert!(what.contains("k_slices"), "{what}");
                    assert_eq!((v, m), (value, max));
                }
                other => panic!("{other:?}"),
            };
            refused(
                check(&config, most + 1, false),
                (most + 1) * of_entry,
                BYTES,
            );
            refused(check(&config, 1, true), 4, 1);
        }
        for config in with_slices(1) {
            assert_eq!(check(&config, usize::MAX, true), Ok(()));
        }
    }

    #[test]
    fn there_is_a_count_for_each_warp_of_as_many_tiles_as_there_is_room_for() {
        for config in with_slices(2) {
            let ctas = BYTES / (config.tile.m * config.tile.n * size_of::<f32>());
            assert!(ctas * CONSUMER_WARPS as usize <= COUNTS, "{config:?}");
        }
    }
}
