//! Rates by which operations are played, and what power takes.
//!
//! The model's own rates are fitted so that it chooses the fastest kernel. These are fitted so that times are right: they
//! have the launch, and memory and links as fast as they are in whole operations. No choice depends on them. Units are
//! those of [`Rates`]. The tests of `accuracy` compare what is played by them with what was measured.

use gemmesh::tools::{H200, Link, Rates, Stores, sum_rates};

/// Rates of an H200, fitted to the products and gathers of bf16 in benches/results, without the time that power takes.
pub const TIMED: Rates = Rates {
    start: 5.3,
    operations: 7.48e6,
    step: 0.0468,
    loaded: 126e3,
    cached: 12.05e6,
    drift: 254.0,
    read: 4.21e6,
    column: 0.0065,
    swap_ab_column: 0.0095,
    split: 5.28,
    slice_join: 2.1,
    summed_cached: 4.31e6,
    push: Link {
        around: 10.7,
        start: 4.0,
        bytes: 330e3,
        chunk: 4.06,
    },
    store: Link {
        around: 8.5,
        start: 0.0,
        bytes: 284e3,
        chunk: 0.0,
    },
    ..H200
};

/// The same where partial sums are copied while a kernel makes others. A copy begins so long after the last tile of its
/// block.
pub const TIMED_SUMS: Rates = Rates {
    push: Link {
        around: sum_rates::AROUND_COPIES,
        start: sum_rates::COPY_START - sum_rates::COPY_NEXT,
        bytes: sum_rates::COPY_BYTES,
        chunk: sum_rates::COPY_NEXT + sum_rates::COPY_FLAG,
    },
    ..TIMED
};

/// The same where no kernel multiplies meanwhile, as in the collectives of benches/results.
pub const TIMED_ALONE: Rates = Rates {
    push: Link {
        around: 4.0,
        start: 4.0,
        bytes: 360e3,
        chunk: 4.0,
    },
    store: Link {
        around: 10.6,
        start: 0.0,
        bytes: 350e3,
        chunk: 0.0,
    },
    ..TIMED
};

/// The part of the memory's rate at which a kernel adds that stores, too. Test:
/// `collectives_are_played_within_5_percent_in_the_mean`.
pub const ADDED_BY_STORES: f64 = 0.5;

/// How kernels store partial sums: as fast as rows of a gather.
pub const STORED_SUMS: Stores = Stores {
    bytes: TIMED.store.bytes,
    low_latency: 13.0,
};

/// How long a product takes that would take `micros` in a burst. `busy` is the share of its tensor cores' rate.
///
/// Power limits the clock after a quarter of a millisecond, the more, the busier the tensor cores are. Both numbers are
/// fitted to the same results.
pub fn sustained(micros: f64, busy: f64) -> f64 {
    /// µs. How long a product runs at the full clock.
    const BURST: f64 = 250.0;
    /// Part of the rest's time, by which it takes longer if the tensor cores are always busy.
    const SLOWER: f64 = 0.28;
    micros + SLOWER * busy * (micros - BURST).max(0.0)
}
