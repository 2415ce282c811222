//! What tiles of family sm90 take, and the rates of its GPUs.

use super::super::list::sm90::Sm90;
use super::super::rates::{Link, Rates};
use crate::backend::cuda::family::Arithmetic;
use crate::schedule::TileShape;

/// Rates of an H200.
///
/// They are fitted to 306 shapes by all kernels, so that the kernel that is chosen is the fastest: what a kernel takes
/// where others are far faster counts little. The links are fitted to 74 shapes (benches/NOTES.md). Tests:
/// `products_are_predicted_within_a_fifth_and_most_within_seven_percent`,
/// `products_whose_rows_arrive_meanwhile_are_predicted_within_a_fifth`.
pub const H200: Rates = Rates {
    family: &Sm90,
    multiprocessors: 132,
    start: 4.52,
    cluster: 0.085,
    operations: 7.66e6,
    step: 0.060,
    promoted: 14.1e6,
    scaled: 12.1e6,
    promoted_step: 0.118,
    loaded: 122e3,
    cached: 8.67e6,
    merged: 10.4,
    drift: 232.0,
    read: 4.77e6,
    column: 0.0059,
    swap_ab_column: 0.0092,
    join: 0.26,
    split: 6.2,
    slice_join: 2.15,
    summed: 78e3,
    summed_cached: 4.05e6,
    pull: Link {
        around: 18.3,
        start: 0.0,
        bytes: 378e3,
        chunk: 5.2,
    },
    push: Link {
        around: 11.3,
        start: 3.9,
        bytes: 377e3,
        chunk: 4.2,
    },
    store: Link {
        around: 9.6,
        start: 0.0,
        bytes: 313e3,
        chunk: 0.0,
    },
};

/// Rates of an H100, fitted to the same 306 shapes. Its links were not measured, so they are the H200's.
pub const H100: Rates = Rates {
    start: 4.55,
    cluster: 0.21,
    step: 0.0727,
    loaded: 113e3,
    cached: 7.53e6,
    merged: 11.9,
    drift: 181.0,
    read: 3.05e6,
    column: 0.0042,
    swap_ab_column: 0.0073,
    join: 0.62,
    split: 5.87,
    slice_join: 2.63,
    summed: 87.6e3,
    summed_cached: 3.82e6,
    ..H200
};

/// Tiles of fp8, on an H100. No test compares them with measurements.
pub mod fp8 {
    /// Part of a step's time, of a tile with registers for two parts of a step: one is promoted while the other is
    /// multiplied.
    pub const TWO_PARTS: f64 = 0.945;
    /// Part of the rate with promoted sums at which sums without promotion are made.
    pub const FAST: f64 = 0.975;
    /// Elements of a small tile. It has too few products to hide the reads of its blocks' scales.
    pub const SMALL_TILE: usize = 16384;
    /// µs. What these reads add to a step of a small tile of 64 rows.
    pub const SCALES_OF_64_ROWS: f64 = 0.05;
    /// µs. What they add to a step of another small tile.
    pub const SCALES_OF_SMALL: f64 = 0.08;
    /// Columns of a tile, and the part of a step's time, if the columns have several blocks, each with its own scale.
    pub const MIXED_BLOCKS: [(usize, f64); 6] = [
        (144, 1.24),
        (160, 1.12),
        (176, 1.18),
        (192, 1.04),
        (208, 1.14),
        (224, 1.04),
    ];
}

/// Microseconds that the products of a tile's step through K take.
pub fn step(rates: &Rates, arithmetic: Arithmetic, tile: &TileShape) -> f64 {
    let operations = (2 * tile.m * tile.n * tile.k) as f64;
    match arithmetic {
        Arithmetic::Half => operations / rates.operations + rates.step,
        Arithmetic::Promoted => {
            let promoted = operations / rates.promoted + rates.promoted_step;
            promoted * hidden(tile)
        }
        Arithmetic::Scaled => {
            let beside = rates.promoted_step + scales_of_small(tile);
            (operations / rates.scaled + beside) * mixed(tile)
        }
        Arithmetic::Fast => operations / (fp8::FAST * rates.promoted) + rates.step,
    }
}

/// The part of a step's time, because some tiles have registers for two parts of a step.
fn hidden(tile: &TileShape) -> f64 {
    if (144..=192).contains(&tile.n) {
        fp8::TWO_PARTS
    } else {
        1.0
    }
}

/// How much longer a step takes if blocks have scales, in microseconds.
fn scales_of_small(tile: &TileShape) -> f64 {
    match tile.m {
        _ if tile.m * tile.n >= fp8::SMALL_TILE => 0.0,
        64 => fp8::SCALES_OF_64_ROWS,
        _ => fp8::SCALES_OF_SMALL,
    }
}

/// The part of a step's time, if columns of a tile have scales of several blocks.
fn mixed(tile: &TileShape) -> f64 {
    let blocks = fp8::MIXED_BLOCKS.iter();
    let found = blocks.copied().find(|(columns, _)| *columns == tile.n);
    found.map_or(1.0, |(_, factor)| factor)
}
