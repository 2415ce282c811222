//! Predicts how long the tiles of a product take, wave by wave.

use crate::backend::cuda::gpu::kernels;
use crate::backend::cuda::gpu::rates::Rates;
use crate::schedule::{Config, Problem};

/// The most waves for which slices are considered. With more waves, the last one matters little.
const MOST_WAVES: usize = 12;
/// More slices are considered only if they take less than this share of the time of fewer slices.
const WORTH: f64 = 0.95;
/// The fewest steps through K of a slice.
const LEAST_STEPS: f64 = 4.0;

/// The tiles of a product of M rows, N columns and depth K.
#[derive(Clone, Copy, Debug)]
pub struct Tiles<'a> {
    pub rates: &'a Rates,
    /// The time around all tiles.
    pub start: f64,
    /// How many entries of the table are made at the same time.
    pub slots: usize,
    /// Rows of an entry.
    pub rows: usize,
    /// Entries across N.
    pub columns: usize,
    /// The number of all entries.
    pub entries: usize,
    /// Steps through K that a CTA makes.
    steps: f64,
    /// The least time of a step.
    step: f64,
    /// The time in the L2 cache that a step takes, for each entry that is made at the same time.
    step_of_cached: f64,
    /// The time in device memory that a step takes, for each entry that is made at the same time.
    step_of_read: f64,
    /// What an entry takes beside its steps.
    beside: f64,
    sums: SliceSums,
}

/// The times of adding slices of K.
#[derive(Clone, Copy, Debug, Default)]
struct SliceSums {
    join: f64,
    /// The least time of an entry.
    each: f64,
    /// The time in the L2 cache of an entry, for each entry at the same time.
    of_cached: f64,
    /// What a tile's last slice takes beside that.
    joined: f64,
}

impl SliceSums {
    /// The times for tiles of `area` elements in `slices` slices, each made by `ctas` CTAs.
    ///
    /// Partial sums are stored once and loaded once. But a tile's last slice loads those of all others.
    fn of(rates: &Rates, slices: usize, ctas: usize, area: f64) -> SliceSums {
        if slices == 1 {
            return SliceSums::default();
        }
        let bytes = area * size_of::<f32>() as f64;
        SliceSums {
            join: rates.slice_join,
            each: 2.0 * bytes / rates.summed,
            of_cached: 2.0 * ctas as f64 * bytes / rates.summed_cached,
            joined: (slices - 2) as f64 * bytes / rates.summed,
        }
    }
}

/// How many clusters of `ctas` CTAs run at the same time on this many multiprocessors.
///
/// Some multiprocessors have too few neighbours for a large cluster.
fn slots(multiprocessors: usize, ctas: usize) -> usize {
    let slots = match (multiprocessors / ctas, ctas) {
        (slots, ..=2) => slots,
        (slots, 3..=4) => slots * 10 / 11,
        (slots, _) => slots * 7 / 8,
    };
    slots.max(1)
}

impl<'a> Tiles<'a> {
    pub fn of(rates: &'a Rates, problem: &Problem, config: &Config) -> Self {
        // Each weight has tiles of its own.
        let tile_n = config.tile.n;
        let padded = |n: &usize| n.next_multiple_of(tile_n);
        let n = match problem.form.widths.is_empty() {
            true => problem.form.multiplied(problem.n),
            false => problem.form.widths.iter().map(padded).sum(),
        };
        let shape = [problem.layout.m(), n, problem.layout.k()];
        Tiles::new(rates, config, shape, problem.dtypes.operands.bytes())
    }

    pub fn new(rates: &'a Rates, config: &Config, [m, n, k]: [usize; 3], bytes: usize) -> Self {
        let tile = &config.tile;
        let ctas = tile.cluster * tile.split_k;
        let multiprocessors = rates
            .multiprocessors
            .min(config.max_ctas.unwrap_or(usize::MAX));
        let slots = slots(multiprocessors, ctas);
        // A slice of K counts as a tile.
        let (rows, columns) = (config.entry_rows(), n.div_ceil(tile.n) * tile.k_slices);
        let entries = m.div_ceil(rows) * columns;
        let parts = (tile.split_k * tile.k_slices) as f64;
        let steps = (k.div_ceil(tile.k) as f64 / parts).max(1.0);
        let area = (tile.m * tile.n) as f64;
        let of_k = (tile.k * bytes) as f64;
        let cached = (tile.m as f64 + tile.n as f64 / tile.cluster as f64) * of_k;
        let read = ((m + n) * k * bytes) as f64 / (entries as f64 * steps);
        let products = 2.0 * area * tile.k as f64 / rates.operations + rates.step;
        let column = match kernels::swaps_ab(config) {
            true => rates.swap_ab_column,
            false => rates.column,
        };
        let split = match tile.split_k {
            1 => 0.0,
            _ => rates.join + rates.split * area / (128.0 * 256.0),
        };
        Tiles {
            rates,
            start: rates.start + rates.cluster * f64::from(ctas.ilog2()),
            slots,
            rows,
            columns,
            entries,
            steps,
            step: products.max((tile.m + tile.n) as f64 * of_k / rates.loaded),
            step_of_cached: ctas as f64 * cached / rates.cached,
            step_of_read: read / rates.read,
            beside: column * area / 128.0 + split,
            sums: SliceSums::of(rates, tile.k_slices, ctas, area),
        }
    }

    /// The time of `count` entries that are made at the same time.
    pub fn wave(&self, count: usize) -> f64 {
        let count = count as f64;
        let step = self.step.max(count * self.step_of_cached);
        // Reads from memory are hidden behind the rest, the better the fewer there are.
        let read = count * self.step_of_read;
        let sums = self.sums.join + self.sums.each.max(count * self.sums.of_cached);
        self.steps * (step * step + read * read).sqrt() + self.beside + sums
    }

    /// The time of all entries.
    pub fn all(&self) -> f64 {
        let (full, rest) = (self.entries / self.slots, self.entries % self.slots);
        let waves = |number: usize, count: usize| match number * count {
            0 => 0.0,
            _ => number as f64 * self.wave(count),
        };
        waves(full, self.slots) + waves(1, rest) + self.sums.joined
    }

    /// The time of all entries if the last wave were as full as the others.
    pub fn filled(&self) -> f64 {
        let count = self.slots.min(self.entries);
        self.entries as f64 / self.slots as f64 * self.wave(count)
    }

    /// Whether there are so few tiles, and K is so long, that CTAs that share K leave too much to each.
    pub fn is_deep(&self) -> bool {
        const MOST_CTAS: usize = 8;
        const STEPS: f64 = 16.0;
        self.entries * MOST_CTAS <= self.slots / 4 && self.steps >= STEPS * MOST_CTAS as f64
    }

    /// Numbers of slices into which an uncut K may be worth cutting: those that fill whole waves.
    pub fn slices(&self, most: usize) -> impl Iterator<Item = usize> {
        let most = most.min((self.steps / LEAST_STEPS) as usize);
        let waves = if most > 1 { MOST_WAVES } else { 0 };
        let (slots, entries) = (self.slots, self.entries.max(1));
        // The time of the best number of slices so far, in waves of whole tiles.
        let mut least = entries.div_ceil(slots) as f64;
        (1..=waves)
            .map(move |waves| (waves, most.min(waves * slots / entries)))
            .filter(move |&(waves, slices)| {
                let share = waves as f64 / slices as f64;
                let pays = slices > 1 && share < WORTH * least;
                least = if pays { share } else { least };
                pays
            })
            .map(|(_, slices)| slices)
    }

    /// The time from the launch to the end.
    pub fn alone(&self) -> f64 {
        self.start + self.all()
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::config;
    use super::*;
    use crate::backend::cuda::gpu::rates::H200;
    use crate::schedule::{Chunking, Route};

    /// M, N, K, the shape, and the microseconds that an H200 took. They are of kernels with all forms.
    type Alone = ([usize; 3], [usize; 4], f64);

    #[rustfmt::skip]
    const PRODUCTS: [Alone; 32] = [
        ([177, 4608, 3328], [64, 128, 1, 1], 23.2),
        ([186, 4248, 25088], [64, 128, 1, 1], 118.2),
        ([17, 12160, 2560], [64, 128, 1, 2], 27.7),
        ([143, 384, 1024], [64, 128, 1, 2], 10.2),
        ([16, 1792, 4096], [64, 128, 1, 4], 14.7),
        ([143, 384, 1024], [64, 128, 1, 4], 10.0),
        ([8, 15680, 1792], [64, 256, 1, 1], 24.5),
        ([65, 16320, 1024], [64, 256, 1, 1], 21.0),
        ([10, 21632, 9728], [64, 256, 1, 2], 124.2),
        ([3, 7168, 1024], [64, 256, 1, 2], 12.8),
        ([6, 1856, 1024], [128, 64, 1, 1], 11.0),
        ([1064, 1328, 576], [128, 64, 1, 1], 12.6),
        ([128, 3584, 8192], [128, 64, 1, 2], 29.1),
        ([13, 256, 1024], [128, 64, 1, 2], 8.3),
        ([695, 320, 5184], [128, 64, 1, 4], 16.5),
        ([42, 392, 512], [128, 64, 1, 4], 9.5),
        ([238, 2304, 5632], [128, 128, 1, 2], 25.4),
        ([256, 3584, 8192], [128, 128, 1, 2], 37.3),
        ([8192, 3584, 8192], [128, 128, 2, 1], 670.3),
        ([16384, 512, 8192], [128, 128, 2, 1], 192.9),
        ([960, 1104, 3584], [128, 192, 1, 2], 22.0),
        ([3108, 15744, 7872], [128, 192, 1, 2], 1218.8),
        ([2324, 7680, 28416], [128, 192, 2, 1], 1606.6),
        ([13065, 1024, 2560], [128, 192, 2, 1], 108.9),
        ([1277, 10816, 2048], [128, 208, 2, 1], 83.0),
        ([1686, 9344, 896], [128, 208, 2, 1], 48.0),
        ([1476, 21376, 7744], [128, 224, 2, 1], 650.7),
        ([1863, 5440, 768], [128, 224, 2, 1], 36.4),
        ([1476, 21376, 7744], [128, 256, 1, 1], 693.4),
        ([65, 16320, 1024], [128, 256, 1, 1], 20.8),
        ([3108, 15744, 7872], [128, 256, 2, 1], 1204.9),
        ([619, 5632, 28160], [128, 256, 2, 1], 288.0),
    ];

    #[test]
    fn products_are_predicted_within_a_fifth_of_what_was_measured() {
        for (shape, tile, measured) in PRODUCTS {
            let config = config(tile, Route::Pull, Chunking::new(1));
            let time = Tiles::new(&H200, &config, shape, 2).alone();
            let off = measured / time - 1.0;
            assert!(
                off.abs() < 0.2,
                "{shape:?} {tile:?}: {time} µs, not {measured}"
            );
        }
    }

    #[test]
    fn k_is_cut_into_as_many_slices_as_fill_waves() {
        const NONE: [usize; 0] = [];
        let of = |shape, slots: [usize; 4], most: usize| {
            let config = config(slots, Route::Pull, Chunking::new(1));
            let tiles = Tiles::new(&H200, &config, shape, 2);
            tiles.slices(most).collect::<Vec<_>>()
        };
        // 32 tiles on 132 multiprocessors: four of each are 128.
        assert_eq!(of([2048, 512, 27_136], [128, 256, 1, 1], 8), [4]);
        // 90 tiles: 360 are three waves of a quarter, and 180 two of a half, which is nothing gained.
        assert_eq!(of([300, 7680, 16_896], [128, 256, 1, 1], 8), [4]);
        // 105 tiles: 525 are four waves of a fifth.
        assert_eq!(of([783, 3752, 22_272], [128, 256, 1, 1], 8), [5]);
        assert_eq!(of([783, 3752, 22_272], [128, 256, 1, 1], 4), NONE);
        // Steps too few to be shared, waves that are full, none allowed.
        assert_eq!(of([2048, 512, 448], [128, 256, 1, 1], 8), NONE);
        assert_eq!(of([132 * 128, 256, 27_136], [128, 256, 1, 1], 8), NONE);
        assert_eq!(of([2048, 512, 27_136], [128, 256, 1, 1], 1), NONE);
    }
}
