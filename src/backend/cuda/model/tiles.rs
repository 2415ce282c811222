//! Predicts how long the tiles of a product take, wave by wave.

use super::variant_of;
use crate::backend::cuda::gpu::kernels::{self, Variant};
use crate::backend::cuda::gpu::rates::Rates;
use crate::schedule::{Config, Operation, Problem};

/// The most waves for which slices are considered. With more waves, the last one matters little.
const MOST_WAVES: usize = 12;
/// More slices are considered only if they take less than this share of the time of fewer slices.
const WORTH: f64 = 0.95;
/// Reads take longer by this factor times the share of multiprocessors that are idle, if the kernel begins early. Its
/// CTAs then lie where multiprocessors became free, not evenly. Measured on an H200 in chains of products.
const UNEVEN: f64 = 0.4;
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
    /// [`UNEVEN`] if the kernel begins early, or 0.
    uneven: f64,
    /// The share of multiprocessors that an entry takes.
    share: f64,
    /// What an entry takes beside its steps.
    beside: f64,
    /// Whether two consumers take entries by turns, so that an entry is stored while the next one is multiplied.
    by_turns: bool,
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

/// Whether a product's kernel is taken to begin early. For sums the ranks must choose alike, and may promise different
/// things.
pub fn begins_early(problem: &Problem) -> bool {
    problem.operation == Operation::Matmul && problem.form.constant_weights
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
        let variant = variant_of(problem, config);
        let bytes = problem.dtypes.operands.bytes();
        Tiles {
            uneven: if begins_early(problem) { UNEVEN } else { 0.0 },
            ..Tiles::new(rates, config, variant, shape, bytes)
        }
    }

    pub fn new(
        rates: &'a Rates,
        config: &Config,
        variant: Variant,
        [m, n, k]: [usize; 3],
        bytes: usize,
    ) -> Self {
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
        let beside = column * area / 128.0 + split;
        let by_turns = kernels::is_pingpong(config, variant);
        // The last entry's stores have no products to lie under.
        let last = if by_turns { beside } else { 0.0 };
        Tiles {
            rates,
            start: rates.start + rates.cluster * f64::from(ctas.ilog2()) + last,
            slots,
            rows,
            columns,
            entries,
            steps,
            step: products.max((tile.m + tile.n) as f64 * of_k / rates.loaded),
            step_of_cached: ctas as f64 * cached / rates.cached,
            step_of_read: read / rates.read,
            uneven: 0.0,
            share: ctas as f64 / multiprocessors as f64,
            beside,
            by_turns,
            sums: SliceSums::of(rates, tile.k_slices, ctas, area),
        }
    }

    /// The time of `count` entries that are made at the same time.
    pub fn wave(&self, count: usize) -> f64 {
        let count = count as f64;
        let step = self.step.max(count * self.step_of_cached);
        // Reads from memory are hidden behind the rest, the better the fewer there are.
        let idle = 1.0 - (count * self.share).min(1.0);
        let read = count * self.step_of_read * (1.0 + self.uneven * idle);
        let sums = self.sums.join + self.sums.each.max(count * self.sums.of_cached);
        let products = self.steps * (step * step + read * read).sqrt();
        let stored = match self.by_turns {
            // Each consumer begins its next entry when it has stored its last one.
            true => products.max((products + self.beside) / 2.0),
            false => products + self.beside,
        };
        stored + sums
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

    /// M, N, K, the shape, and the microseconds that an H200 took. Of the shapes for which a kernel was the fastest or
    /// nearly so, this is the one at the third quartile of sizes, or for the latest kernels a model's.
    type Alone = ([usize; 3], [usize; 4], f64);

    #[rustfmt::skip]
    const PRODUCTS: [Alone; 46] = [
        ([3, 5760, 10240], [16, 128, 1, 1], 41.0),
        ([16, 50272, 2880], [16, 128, 1, 2], 80.7),
        ([86, 512, 1280], [16, 128, 1, 4], 7.5),
        ([26, 384, 7552], [16, 128, 1, 8], 9.6),
        ([14, 16768, 7936], [32, 128, 1, 1], 73.3),
        ([16, 4608, 16384], [32, 128, 1, 2], 49.6),
        ([16, 2560, 8192], [32, 128, 1, 4], 20.2),
        ([16, 768, 25792], [32, 128, 1, 8], 21.1),
        ([16, 50272, 2880], [48, 128, 1, 1], 80.0),
        ([43, 2624, 3776], [48, 128, 1, 4], 13.9),
        ([15, 1280, 25088], [48, 128, 1, 8], 28.0),
        ([236, 1024, 2304], [64, 64, 1, 1], 11.1),
        ([40, 9216, 2560], [64, 80, 1, 1], 21.0),
        ([64, 11008, 3584], [64, 96, 1, 1], 30.8),
        ([64, 14336, 4096], [64, 112, 1, 1], 40.0),
        ([14, 25560, 8192], [64, 128, 1, 1], 111.5),
        ([16, 50272, 2880], [64, 128, 1, 2], 81.5),
        ([632, 280, 8448], [64, 128, 1, 4], 16.2),
        ([64, 57344, 8192], [64, 224, 1, 1], 229.2),
        ([8, 64128, 16384], [64, 256, 1, 1], 495.0),
        ([8, 64128, 16384], [64, 256, 1, 2], 492.4),
        ([477, 1408, 2944], [80, 64, 2, 1], 14.8),
        ([128, 8192, 4096], [80, 128, 2, 1], 28.9),
        ([50, 8064, 3584], [96, 64, 1, 1], 24.0),
        ([32, 16032, 8192], [96, 128, 1, 1], 74.7),
        ([43, 20680, 15808], [96, 128, 1, 2], 172.2),
        ([1431, 1024, 13184], [96, 128, 2, 1], 60.7),
        ([587, 9984, 9728], [112, 128, 2, 1], 180.5),
        ([128, 8192, 4096], [128, 64, 1, 1], 28.7),
        ([523, 704, 17408], [128, 64, 1, 2], 36.6),
        ([123, 1344, 2880], [128, 64, 1, 4], 11.3),
        ([8, 64128, 16384], [128, 128, 1, 2], 499.1),
        ([4534, 1408, 14848], [128, 128, 2, 1], 243.1),
        ([4943, 12416, 3072], [128, 160, 2, 1], 489.4),
        ([587, 9984, 9728], [128, 192, 1, 2], 179.5),
        ([4943, 12416, 3072], [128, 192, 2, 1], 493.6),
        ([6376, 1408, 23552], [128, 208, 2, 1], 573.3),
        ([4943, 12416, 3072], [128, 224, 2, 1], 490.0),
        ([10848, 2304, 3584], [128, 256, 1, 1], 232.3),
        ([3662, 11136, 4608], [128, 256, 2, 1], 478.0),
        ([128, 28672, 4096], [144, 128, 1, 1], 72.0),
        ([6376, 1408, 23552], [144, 128, 2, 1], 562.1),
        ([8192, 640, 2880], [160, 128, 1, 1], 45.4),
        ([6237, 4224, 1408], [176, 128, 1, 1], 103.0),
        ([13282, 2432, 4864], [176, 128, 2, 1], 390.8),
        ([818, 20608, 20480], [208, 128, 2, 1], 973.7),
    ];

    #[test]
    fn products_are_predicted_within_a_fifth_of_what_was_measured() {
        for (shape, tile, measured) in PRODUCTS {
            let config = config(tile, Route::Pull, Chunking::new(1));
            let time = Tiles::new(&H200, &config, Variant::Forms, shape, 2).alone();
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
            let tiles = Tiles::new(&H200, &config, Variant::Forms, shape, 2);
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
