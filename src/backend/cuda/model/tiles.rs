//! Predicts how long the tiles of a product take, wave by wave.

use super::fitted::{search, tiles as fitted};
use super::variant_of;
use crate::backend::cuda::family::rates::Rates;
use crate::backend::cuda::family::{Arithmetic, Variant};
use crate::backend::cuda::program::quantized::{fit, result_bytes};
use crate::schedule::{Config, Problem, TileShape};

/// Bytes of a line of the L2 cache.
const LINE: usize = 128;

/// The tiles of a product of M rows, N columns and depth K.
#[derive(Clone, Copy, Debug)]
pub struct Tiles<'a> {
    /// The rates of the device.
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
    /// [`UNEVEN_READS`](fitted::UNEVEN_READS) or 0.
    uneven: f64,
    /// The share of multiprocessors that an entry takes.
    share: f64,
    /// What the first reads from device memory take, apart from their bytes.
    first_reads: f64,
    /// What an entry takes, apart from its steps.
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
    /// What a tile's last slice takes in addition.
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
    problem.operation.is_alone() && problem.form.constant_weights
}

/// The time of the kernel that quantises a product's results, if its own kernel does not. Without end if it cannot.
fn quantized_behind(rates: &Rates, problem: &Problem, config: &Config) -> f64 {
    /// Results are written and read.
    const TWICE: f64 = 2.0;
    let Problem {
        form, n, layout, ..
    } = problem;
    let widths = if form.widths.is_empty() {
        std::slice::from_ref(n)
    } else {
        &form.widths
    };
    let (gated, of) = (form.gated, form.quantization);
    match result_bytes(
        rates.family,
        config,
        gated,
        of,
        layout.m(),
        widths.iter().copied(),
    ) {
        None => 0.0,
        Some(bytes) if !fit(config, bytes) => f64::INFINITY,
        Some(bytes) => fitted::QUANTIZE_LAUNCH + TWICE * bytes as f64 / rates.read,
    }
}

/// How many clusters of `ctas` CTAs run at the same time on this many multiprocessors.
fn slots(multiprocessors: usize, ctas: usize) -> usize {
    let [part, of] = match ctas {
        ..=2 => [1, 1],
        3..=4 => fitted::CLUSTERS_OF_FOUR,
        _ => fitted::LARGER_CLUSTERS,
    };
    (multiprocessors / ctas * part / of).max(1)
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
fn smooth_max(one: f64, other: f64) -> f64 {
    let eighth = |time: f64| time.powi(8);
    (eighth(one) + eighth(other)).sqrt().sqrt().sqrt()
}

impl<'a> Tiles<'a> {
    /// The tiles of a problem's product on one rank.
    pub fn of(rates: &'a Rates, problem: &Problem, config: &Config) -> Self {
        // Each weight has tiles of its own.
        let columns = config.entry_columns();
        let padded = |n: &usize| n.next_multiple_of(columns);
        let n = if problem.form.widths.is_empty() {
            problem.form.multiplied(problem.n)
        } else {
            problem.form.widths.iter().map(padded).sum()
        };
        let shape = [problem.layout.m(), n, problem.layout.k()];
        let variant = variant_of(problem, config);
        let arithmetic = Arithmetic::of(rates.family, problem, config);
        let tiles = Tiles::new(rates, config, variant, shape, arithmetic);
        let gathered = !problem.operation.sends_product() && problem.layout.world() > 1;
        // Rows arrive at some CTAs' tiles before others', so these CTAs do not load at the same time.
        let apart = gathered && problem.layout.m() > tiles.rows;
        Tiles {
            start: tiles.start + quantized_behind(rates, problem, config),
            uneven: if begins_early(problem) || (gathered && config.tile.ctas() == 1) {
                fitted::UNEVEN_READS
            } else {
                0.0
            },
            step_of_cached: if apart {
                step_of_cached(rates, &config.tile, arithmetic.bytes(), [1, 1], 1.0)
            } else {
                tiles.step_of_cached
            },
            ..tiles
        }
    }

    pub(super) fn new(
        rates: &'a Rates,
        config: &Config,
        variant: Variant,
        [m, n, k]: [usize; 3],
        arithmetic: Arithmetic,
    ) -> Self {
        let tile = &config.tile;
        let (bytes, products) = (
            arithmetic.bytes(),
            rates.family.step(rates, arithmetic, tile),
        );
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
        let merged = if (k * bytes).is_multiple_of(LINE) {
            merged(rates, walked)
        } else {
            1.0
        };
        let counts = [m.div_ceil(rows), n.div_ceil(config.entry_columns())];
        let read = ((m + n) * k * bytes) as f64 / (entries as f64 * steps);
        let column = rates.family.column(rates, config);
        let beside = column * area / 128.0 + joining(rates, tile.split_k, area);
        let by_turns = rates.family.stores_by_turns(config, variant);
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
            first_reads: first_reads(((m + n) * k * bytes) as f64),
            share: ctas as f64 / multiprocessors as f64,
            beside,
            by_turns,
            sums: SliceSums::of(rates, tile.k_slices, ctas, area),
        }
    }

    /// The same if the rows of each rank have entries of their own, because they are moved while others are multiplied.
    pub fn by_owners(mut self, problem: &Problem) -> Self {
        let rows = problem.layout.rows().into_iter();
        let entries: usize = rows.map(|rows| rows.div_ceil(self.rows)).sum();
        self.entries = entries * self.columns;
        self
    }

    /// The time of `count` entries that are made at the same time.
    pub fn wave(&self, count: usize) -> f64 {
        let count = count as f64;
        let step = smooth_max(self.step, count * self.step_of_cached);
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

    /// What the last tile takes if K is cut, apart from its entries.
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
        let most = most.min((self.steps / search::LEAST_STEPS) as usize);
        let waves = if most > 1 { search::MOST_WAVES } else { 0 };
        let (slots, entries) = (self.slots, self.entries.max(1));
        // The time of the best number of slices so far, in waves of whole tiles.
        let mut least = entries.div_ceil(slots) as f64;
        (1..=waves)
            .map(move |waves| (waves, most.min(waves * slots / entries)))
            .filter(move |&(waves, slices)| {
                let share = waves as f64 / slices as f64;
                let pays = slices > 1 && share < search::SLICES_WORTH * least;
                least = if pays { share } else { least };
                pays
            })
            .map(|(_, slices)| slices)
    }

    /// The time from the launch to the end.
    pub fn alone(&self) -> f64 {
        self.start + self.all()
    }

    /// The same if no operand is cached. What is added is the same for every kernel.
    pub fn cold(&self) -> f64 {
        self.alone() + self.first_reads
    }
}

/// What the first reads of this number of bytes take, apart from their bytes.
fn first_reads(bytes: f64) -> f64 {
    fitted::FIRST_READS * (1.0 - (-bytes / fitted::FIRST_READ_BYTES).exp())
}

/// What a tile of `area` elements takes if `ctas` CTAs share its K, apart from their products.
fn joining(rates: &Rates, ctas: usize, area: f64) -> f64 {
    if ctas == 1 {
        0.0
    } else {
        rates.join + rates.split * area / (128.0 * 256.0)
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{config, config_of};
    use super::*;
    use crate::backend::cuda::family::H200;
    use crate::schedule::{Chunking, Route};

    /// M, N, K, the shape, and the microseconds that an H200 took. Of the shapes for which a kernel was the fastest or
    /// nearly so, this is the one at the first quartile of sizes.
    type Alone = ([usize; 3], [usize; 5], f64);

    #[rustfmt::skip]
    const PRODUCTS: [Alone; 62] = [
        ([1, 2880, 2880], [16, 64, 1, 1, 1], 11.0),
        ([2, 13136, 2560], [16, 128, 1, 1, 1], 26.1),
        ([1, 5120, 5120], [16, 128, 1, 1, 2], 22.6),
        ([2, 1408, 2688], [16, 128, 1, 1, 4], 8.9),
        ([16, 256, 2176], [16, 128, 1, 1, 8], 6.7),
        ([16, 2176, 1024], [32, 64, 1, 1, 1], 7.4),
        ([8, 10752, 640], [32, 128, 1, 1, 1], 9.7),
        ([248, 640, 2432], [32, 128, 1, 1, 2], 9.4),
        ([32, 1536, 4096], [32, 128, 1, 1, 4], 10.5),
        ([18, 944, 5504], [32, 128, 1, 1, 8], 9.9),
        ([153, 1280, 1536], [48, 64, 1, 1, 1], 8.3),
        ([1, 10240, 8192], [48, 128, 1, 1, 1], 51.2),
        ([125, 512, 4040], [48, 128, 1, 1, 8], 9.9),
        ([58, 896, 528], [64, 64, 1, 1, 1], 6.0),
        ([182, 1512, 4360], [64, 64, 2, 2, 1], 16.4),
        ([2, 17792, 4760], [64, 80, 1, 1, 1], 54.1),
        ([256, 2880, 2880], [64, 96, 1, 1, 1], 13.5),
        ([22, 14336, 1536], [64, 112, 1, 1, 1], 19.4),
        ([1792, 512, 512], [64, 128, 1, 1, 1], 7.5),
        ([43, 4352, 7808], [64, 128, 1, 1, 2], 28.6),
        ([416, 384, 4240], [64, 128, 1, 1, 4], 11.5),
        ([159, 6144, 1024], [64, 160, 1, 1, 1], 10.6),
        ([3, 17408, 11136], [64, 224, 1, 1, 1], 100.9),
        ([1209, 5120, 576], [64, 256, 1, 1, 1], 16.2),
        ([4, 28672, 4096], [64, 256, 1, 1, 2], 69.0),
        ([4, 6144, 4096], [72, 64, 1, 1, 1], 21.5),
        ([4, 7168, 8192], [80, 64, 1, 1, 1], 39.2),
        ([2626, 512, 1920], [80, 128, 1, 1, 1], 12.9),
        ([2030, 376, 1656], [88, 128, 4, 1, 1], 13.0),
        ([261, 1856, 640], [96, 64, 1, 1, 1], 7.0),
        ([1041, 3072, 1408], [96, 128, 1, 1, 1], 18.4),
        ([6521, 512, 1152], [104, 128, 1, 1, 1], 17.1),
        ([439, 4192, 1152], [112, 128, 1, 1, 1], 11.8),
        ([6579, 256, 1848], [112, 128, 2, 1, 1], 20.7),
        ([256, 4096, 4096], [128, 64, 1, 1, 1], 21.3),
        ([124, 1408, 3816], [128, 64, 1, 1, 4], 12.5),
        ([332, 3200, 2240], [128, 80, 1, 1, 1], 13.9),
        ([4590, 272, 1024], [128, 96, 1, 1, 1], 10.8),
        ([356, 4736, 1024], [128, 112, 1, 1, 1], 11.4),
        ([512, 4096, 1024], [128, 128, 1, 1, 1], 11.8),
        ([128, 6144, 4096], [128, 128, 1, 1, 2], 24.5),
        ([5401, 256, 792], [128, 128, 2, 1, 1], 12.2),
        ([1733, 2736, 768], [128, 160, 1, 1, 1], 16.7),
        ([175, 10240, 10952], [128, 160, 2, 1, 1], 91.7),
        ([553, 4288, 4992], [128, 176, 1, 1, 1], 39.5),
        ([744, 4096, 5888], [128, 192, 1, 1, 1], 51.1),
        ([178, 11008, 4440], [128, 192, 2, 1, 1], 51.6),
        ([488, 6688, 5888], [128, 208, 1, 1, 1], 54.5),
        ([2023, 1784, 4984], [128, 224, 2, 1, 1], 52.3),
        ([1024, 4096, 2880], [128, 256, 1, 1, 1], 35.6),
        ([1024, 4096, 14336], [128, 256, 2, 1, 1], 148.7),
        ([128, 8192, 1024], [136, 64, 1, 1, 1], 11.3),
        ([231, 7464, 2048], [136, 128, 1, 1, 1], 19.3),
        ([4601, 256, 1024], [144, 64, 1, 1, 1], 10.2),
        ([2303, 1024, 5888], [144, 128, 1, 1, 1], 39.6),
        ([1130, 8200, 768], [144, 128, 2, 1, 1], 26.7),
        ([604, 2016, 768], [152, 64, 1, 1, 1], 8.5),
        ([1030, 11592, 1152], [152, 128, 1, 1, 1], 43.5),
        ([2090, 1280, 1104], [168, 128, 1, 1, 1], 14.9),
        ([159, 6144, 1024], [176, 64, 1, 1, 1], 10.6),
        ([404, 7040, 5248], [208, 128, 1, 1, 1], 48.4),
        ([6184, 640, 5360], [240, 128, 1, 1, 1], 59.2),
    ];

    #[test]
    fn products_are_predicted_within_a_fifth_and_most_within_seven_percent() {
        let mut offs = PRODUCTS.map(|(shape, tile, measured)| {
            let config = config_of(tile, Route::Pull, Chunking::new(1));
            let time = Tiles::new(&H200, &config, Variant::Forms, shape, Arithmetic::Half).cold();
            let off = (measured / time - 1.0).abs();
            assert!(off < 0.2, "{shape:?} {tile:?}: {time} µs, not {measured}");
            off
        });
        offs.sort_by(f64::total_cmp);
        assert!(offs[offs.len() / 2] < 0.07, "{offs:?}");
    }

    #[test]
    fn k_is_cut_into_as_many_slices_as_fill_waves() {
        const NONE: [usize; 0] = [];
        let of = |shape, slots: [usize; 4], most: usize| {
            let config = config(slots, Route::Pull, Chunking::new(1));
            let tiles = Tiles::new(&H200, &config, Variant::Forms, shape, Arithmetic::Half);
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
