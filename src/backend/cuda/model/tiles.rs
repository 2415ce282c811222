//! Predicts how long the tiles of a product take, wave by wave.

use super::variant_of;
use crate::backend::cuda::gpu::kernels::{self, Variant};
use crate::backend::cuda::gpu::rates::Rates;
use crate::schedule::{Config, Operation, Problem, TileShape};

/// The most waves for which slices are considered. With more waves, the last one matters little.
const MOST_WAVES: usize = 12;
/// More slices are considered only if they take less than this share of the time of fewer slices.
const WORTH: f64 = 0.95;
/// Reads take longer by this factor times the share of multiprocessors that are idle, if the kernel begins early. Its
/// CTAs then lie where multiprocessors became free, not evenly. Measured on an H200 in chains of products.
const UNEVEN: f64 = 0.4;
/// The fewest steps through K of a slice.
const LEAST_STEPS: f64 = 4.0;
/// Bytes of a line of the L2 cache.
const LINE: usize = 128;

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

/// How many single CTAs' loads count once, if each makes this many steps through K.
fn merged(rates: &Rates, steps: f64) -> f64 {
    1.0 + (rates.merged - 1.0) * (-(steps / rates.drift).powi(2)).exp()
}

/// The time in the L2 cache that a step takes, for each entry that is made at the same time.
fn step_of_cached(
    rates: &Rates,
    tile: &TileShape,
    bytes: usize,
    entries: [usize; 2],
    merged: f64,
) -> f64 {
    let loaded = loaded_rows(tile, entries, merged) * (tile.k * bytes) as f64;
    tile.ctas() as f64 * loaded / rates.cached
}

/// Rows of `a` and `b` that each CTA loads through the L2 cache in a step, of a product with so many rows and columns of
/// entries.
///
/// CTAs of a cluster share what they load. Of single CTAs, this many with successive entries do so too.
fn loaded_rows(tile: &TileShape, [rows, columns]: [usize; 2], merged: f64) -> f64 {
    let [m, n] = [tile.m, tile.n].map(|extent| extent as f64);
    if tile.ctas() > 1 {
        return m / tile.cluster_n as f64 + n / tile.cluster_m as f64;
    }
    let down = merged.min(tile.group_m.min(rows) as f64);
    let across = (merged / down).clamp(1.0, columns as f64);
    m / across + n / down
}

/// About the longer of two times. Each is hidden behind the other, the better the shorter it is.
fn longer(one: f64, other: f64) -> f64 {
    let eighth = |time: f64| time.powi(8);
    (eighth(one) + eighth(other)).sqrt().sqrt().sqrt()
}

impl<'a> Tiles<'a> {
    pub fn of(rates: &'a Rates, problem: &Problem, config: &Config) -> Self {
        // Each weight has tiles of its own.
        let columns = config.entry_columns();
        let padded = |n: &usize| n.next_multiple_of(columns);
        let n = match problem.form.widths.is_empty() {
            true => problem.form.multiplied(problem.n),
            false => problem.form.widths.iter().map(padded).sum(),
        };
        let shape = [problem.layout.m(), n, problem.layout.k()];
        let variant = variant_of(problem, config);
        let bytes = problem.dtypes.operands.bytes();
        let tiles = Tiles::new(rates, config, variant, shape, bytes);
        // Rows arrive at some CTAs' tiles before others', so these CTAs do not load at the same time.
        let arrive = !problem.operation.is_sum() && problem.layout.world() > 1;
        Tiles {
            uneven: if begins_early(problem) { UNEVEN } else { 0.0 },
            step_of_cached: match arrive {
                true => step_of_cached(rates, &config.tile, bytes, [1, 1], 1.0),
                false => tiles.step_of_cached,
            },
            ..tiles
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
        let ctas = tile.ctas();
        let multiprocessors = rates
            .multiprocessors
            .min(config.max_ctas.unwrap_or(usize::MAX));
        let slots = slots(multiprocessors, ctas);
        // A slice of K counts as a tile.
        let rows = config.entry_rows();
        let columns = n.div_ceil(config.entry_columns()) * tile.k_slices;
        let entries = m.div_ceil(rows) * columns;
        let parts = (tile.split_k * tile.k_slices) as f64;
        let steps = (k.div_ceil(tile.k) as f64 / parts).max(1.0);
        let area = (tile.m * tile.n) as f64;
        let of_k = (tile.k * bytes) as f64;
        let walked = steps * entries.div_ceil(slots) as f64;
        let merged = match (k * bytes).is_multiple_of(LINE) {
            true => merged(rates, walked),
            false => 1.0,
        };
        let counts = [m.div_ceil(rows), n.div_ceil(config.entry_columns())];
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
            step_of_cached: step_of_cached(rates, tile, bytes, counts, merged),
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
        let step = longer(self.step, count * self.step_of_cached);
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
        waves(full, self.slots) + waves(1, rest) + self.joined()
    }

    /// What the last tile takes if K is cut, beside the time of its entries.
    pub fn joined(&self) -> f64 {
        self.sums.joined
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
    use super::super::testing::{config, config_of};
    use super::*;
    use crate::backend::cuda::gpu::rates::H200;
    use crate::schedule::{Chunking, Route};

    /// M, N, K, the shape, and the microseconds that an H200 took. Of the shapes for which a kernel was the fastest or
    /// nearly so, this is the one of median size.
    type Alone = ([usize; 3], [usize; 5], f64);

    #[rustfmt::skip]
    const PRODUCTS: [Alone; 62] = [
        ([3, 2688, 3328], [16, 64, 1, 1, 1], 11.2),
        ([14, 13440, 768], [16, 128, 1, 1, 1], 12.1),
        ([16, 5120, 5120], [16, 128, 1, 1, 2], 22.7),
        ([4, 1280, 8192], [16, 128, 1, 1, 4], 13.0),
        ([19, 256, 4736], [16, 128, 1, 1, 8], 7.7),
        ([371, 384, 1024], [32, 64, 1, 1, 1], 6.9),
        ([4, 8192, 3584], [32, 128, 1, 1, 1], 23.6),
        ([248, 640, 2432], [32, 128, 1, 1, 2], 9.4),
        ([23, 1664, 7552], [32, 128, 1, 1, 4], 14.8),
        ([94, 512, 3328], [32, 128, 1, 1, 8], 8.4),
        ([588, 512, 2304], [48, 64, 1, 1, 1], 9.6),
        ([133, 4992, 1408], [48, 128, 1, 1, 1], 10.7),
        ([44, 640, 11136], [48, 128, 1, 1, 8], 12.3),
        ([70, 3456, 576], [64, 64, 1, 1, 1], 7.1),
        ([337, 1280, 3064], [64, 64, 2, 2, 1], 13.9),
        ([2, 21120, 11440], [64, 80, 1, 1, 1], 120.0),
        ([128, 6144, 4096], [64, 96, 1, 1, 1], 23.5),
        ([16, 28672, 4096], [64, 112, 1, 1, 1], 66.7),
        ([291, 2944, 1408], [64, 128, 1, 1, 1], 10.3),
        ([43, 4352, 7808], [64, 128, 1, 1, 2], 28.6),
        ([394, 496, 6048], [64, 128, 1, 1, 4], 14.7),
        ([77, 9000, 13056], [64, 160, 1, 1, 1], 69.9),
        ([3, 17408, 11136], [64, 224, 1, 1, 1], 100.9),
        ([1209, 5120, 576], [64, 256, 1, 1, 1], 16.2),
        ([16, 28672, 4096], [64, 256, 1, 1, 2], 69.9),
        ([8, 5760, 5120], [72, 64, 1, 1, 1], 24.0),
        ([23, 16128, 1920], [80, 64, 1, 1, 1], 24.8),
        ([395, 3200, 3072], [80, 128, 1, 1, 1], 17.7),
        ([295, 3200, 2440], [88, 128, 4, 1, 1], 17.8),
        ([380, 1440, 7552], [96, 64, 1, 1, 1], 22.9),
        ([69, 11392, 7552], [96, 128, 1, 1, 1], 53.1),
        ([3179, 512, 2688], [104, 128, 1, 1, 1], 18.2),
        ([533, 10112, 896], [112, 128, 1, 1, 1], 20.0),
        ([1107, 10112, 2688], [112, 128, 2, 1, 1], 81.2),
        ([256, 4096, 4096], [128, 64, 1, 1, 1], 21.3),
        ([124, 1408, 3816], [128, 64, 1, 1, 4], 12.5),
        ([256, 5120, 3200], [128, 80, 1, 1, 1], 20.5),
        ([466, 2944, 1536], [128, 96, 1, 1, 1], 12.2),
        ([256, 7168, 8192], [128, 112, 1, 1, 1], 46.0),
        ([1470, 1408, 2048], [128, 128, 1, 1, 1], 16.7),
        ([62, 6400, 14208], [128, 128, 1, 1, 2], 58.8),
        ([5401, 256, 792], [128, 128, 2, 1, 1], 12.2),
        ([2048, 2560, 5120], [128, 160, 1, 1, 1], 71.2),
        ([2048, 5120, 3200], [128, 160, 2, 1, 1], 88.5),
        ([553, 4288, 4992], [128, 176, 1, 1, 1], 39.5),
        ([1351, 4352, 5504], [128, 192, 1, 1, 1], 92.5),
        ([2111, 2304, 4472], [128, 192, 2, 1, 1], 78.8),
        ([367, 8064, 7168], [128, 208, 1, 1, 1], 63.6),
        ([2048, 3584, 8192], [128, 224, 2, 1, 1], 150.7),
        ([1377, 3064, 6272], [128, 256, 1, 1, 1], 69.1),
        ([7929, 2000, 6144], [128, 256, 2, 1, 1], 252.3),
        ([1627, 1408, 1408], [136, 64, 1, 1, 1], 14.9),
        ([1700, 2520, 2688], [136, 128, 1, 1, 1], 36.0),
        ([903, 1152, 2304], [144, 64, 1, 1, 1], 13.3),
        ([4533, 512, 9216], [144, 128, 1, 1, 1], 59.6),
        ([6163, 384, 5552], [144, 128, 2, 1, 1], 44.1),
        ([4934, 768, 1280], [152, 64, 1, 1, 1], 19.3),
        ([1211, 3840, 3200], [152, 128, 1, 1, 1], 44.3),
        ([157, 14592, 3072], [168, 128, 1, 1, 1], 36.8),
        ([863, 3328, 768], [176, 64, 1, 1, 1], 11.9),
        ([164, 15952, 6144], [208, 128, 1, 1, 1], 62.2),
        ([708, 5520, 7680], [240, 128, 1, 1, 1], 78.5),
    ];

    #[test]
    fn most_products_are_predicted_within_seven_percent_and_nearly_all_within_a_fifth() {
        let mut offs = PRODUCTS.map(|(shape, tile, measured)| {
            let config = config_of(tile, Route::Pull, Chunking::new(1));
            let time = Tiles::new(&H200, &config, Variant::Forms, shape, 2).alone();
            (measured / time - 1.0).abs()
        });
        offs.sort_by(f64::total_cmp);
        let [half, nearly_all, all] = [0.5, 0.95, 1.0].map(|share| offs[(share * 61.0) as usize]);
        assert!(half < 0.07 && nearly_all < 0.2 && all < 0.26, "{offs:?}");
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
