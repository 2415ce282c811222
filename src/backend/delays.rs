//! Delays that tests ask for.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::protocol::epoch::Epoch;

/// A number that depends on every bit of `seed` (SplitMix64's finaliser).
pub fn scatter(seed: u64) -> u64 {
    let x = (seed ^ seed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}

/// 0: no delays.
static DELAY_SEED: AtomicU64 = AtomicU64::new(0);

/// Delays that tests put before the chunks of every rank of this process, to make them arrive in any order.
pub fn delay_chunks(seed: Option<u64>) {
    DELAY_SEED.store(seed.map_or(0, |seed| seed | 1 << 63), Ordering::Relaxed);
}

/// A delay of up to half a millisecond, which differs for every chunk of every operation. None unless a test wants
/// delays.
pub fn chunk_delay(rank: usize, flag: usize, epoch: Epoch) -> Option<Duration> {
    let seed = DELAY_SEED.load(Ordering::Relaxed);
    let chunk = (rank as u64) << 48 ^ (flag as u64) << 32 ^ u64::from(epoch.raw());
    (seed != 0).then(|| Duration::from_micros(scatter(seed ^ chunk) % 500))
}
