//! What products take on a GPU, alone and while their rows arrive, from a few rates of the device: so the library chooses where
//! nothing was measured.
//!
//! The model knows waves of tiles. In a wave each multiprocessor is held up by its tensor cores, by what it loads, by what all of them
//! load from the L2 cache, or by what comes from memory. It knows when rows are there, and plays the tiles through in their order.
//! Times are in microseconds. It is a pure function of what all ranks know alike, and of the rank's own N, or of sums K.

use std::fs;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::kernel::{WIDEST, configs};
use crate::error::{Error, Result};
use crate::explanation::Prediction;
use crate::schedule::{Chunking, Config, Description, Numerics, Route, order};

/// What a device does in a microsecond, and what takes how many of them. All ranks go by those of rank 0.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rates {
    pub multiprocessors: usize,
    /// From the launch to the first product, and from the last one to the kernel's end.
    pub start: f64,
    /// Operations of one multiprocessor, two a product; and what each step through K takes beside these.
    pub operations: f64,
    pub step: f64,
    /// Bytes that one multiprocessor loads.
    pub loaded: f64,
    /// Bytes that all of them load, through the L2 cache.
    pub cached: f64,
    /// Bytes that come from memory.
    pub read: f64,
    /// What a tile takes beside its products, for each of its columns of 128 rows.
    pub column: f64,
    /// What CTAs that share K take to wait for one another, and to add up 128 rows of 256 columns.
    pub join: f64,
    pub split: f64,
    pub pull: Link,
    pub push: Link,
    pub store: Link,
}

/// What a route takes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// Before the first tile and behind the last one.
    pub around: f64,
    /// Until the first byte moves, while own tiles are made.
    pub start: f64,
    /// Bytes in a microsecond.
    pub bytes: f64,
    /// Between two chunks, with the flag.
    pub chunk: f64,
}

/// Fitted to 122 and 74 shapes by all kernels, and to the ways of the 74 on two GPUs: benches/NOTES.md.
pub const H200: Rates = Rates {
    multiprocessors: 132,
    start: 7.1,
    operations: 7.13e6,
    step: 0.057,
    loaded: 110e3,
    cached: 9.7e6,
    read: 3.9e6,
    column: 0.0023,
    join: 0.71,
    split: 0.64,
    pull: Link {
        around: 15.3,
        start: 0.0,
        bytes: 378e3,
        chunk: 5.2,
    },
    push: Link {
        around: 8.3,
        start: 3.9,
        bytes: 377e3,
        chunk: 4.2,
    },
    store: Link {
        around: 6.7,
        start: 0.0,
        bytes: 313e3,
        chunk: 0.0,
    },
};

/// Fitted likewise on an H100; links could not be measured.
const H100: Rates = Rates {
    start: 7.0,
    operations: 6.64e6,
    step: 0.009,
    loaded: 113e3,
    cached: 8.18e6,
    read: 2.73e6,
    column: 0.0016,
    join: 0.47,
    split: 0.92,
    ..H200
};

/// Bytes that are stored rather than copied, for each microsecond that copies take to begin and to be told of. More would come
/// sooner by stores too, but these hold up products.
const STORED_INSTEAD: f64 = 320e3;
/// More than any GPU has.
const MOST_MULTIPROCESSORS: usize = 4096;
/// A shard of more bytes is copied in two chunks.
const LARGE_SHARD: f64 = 80e6;

/// The environment variable that names a file with the rates of a device: a [`Rates`] as JSON.
pub const VARIABLE: &str = "GEMMESH_RATES";

impl Rates {
    /// Those of the file that the environment names, or else those that the library has for devices of this name.
    ///
    /// # Errors
    /// [`Error::System`] if the file can't be read, or what it says makes no sense.
    pub fn load(rank: usize, gpu: &str) -> Result<Rates> {
        let Some(path) = std::env::var_os(VARIABLE).map(PathBuf::from) else {
            return Ok(Rates::of(gpu));
        };
        let action = format!("read {} ({VARIABLE})", path.display());
        let text = fs::read_to_string(&path).map_err(Error::system(rank, &action))?;
        let parsed: Result<Rates, String> = serde_json::from_str(&text).map_err(|e| e.to_string());
        let checked = parsed.and_then(|rates| rates.check().map(|()| rates));
        checked.map_err(|reason| Error::System {
            rank: Some(rank),
            action,
            reason,
        })
    }

    /// Those that the library has: measured for an H100 and an H200, and taken for other GPUs of their kind.
    pub fn of(gpu: &str) -> Rates {
        match gpu.contains("H100") {
            true => H100,
            false => H200,
        }
    }

    /// Refuses rates by which nothing can be reckoned.
    pub fn check(&self) -> Result<(), String> {
        let Rates {
            multiprocessors,
            start,
            operations,
            step,
            loaded,
            cached,
            read,
            column,
            join,
            split,
            pull,
            push,
            store,
        } = *self;
        let links = [pull, push, store];
        let rates = [operations, loaded, cached, read];
        let rates = rates.into_iter().chain(links.map(|link| link.bytes));
        let times = [start, step, column, join, split].into_iter();
        let times = times.chain(links.into_iter().flat_map(|l| [l.around, l.start, l.chunk]));
        let is_rate = |rate: f64| rate.is_finite() && rate > 0.0;
        let is_time = |time: f64| time.is_finite() && time >= 0.0;
        match (1..=MOST_MULTIPROCESSORS).contains(&multiprocessors)
            && rates.clone().all(is_rate)
            && times.clone().all(is_time)
        {
            true => Ok(()),
            false => Err("rates are above 0, and times not below".into()),
        }
    }

    pub fn link(&self, route: Route) -> &Link {
        match route {
            Route::Pull => &self.pull,
            Route::Push => &self.push,
            Route::Store => &self.store,
        }
    }
}

/// The tiles of a product of M rows, N columns and depth K.
#[derive(Clone, Copy, Debug)]
pub struct Tiles<'a> {
    rates: &'a Rates,
    /// Those that are made at the same time, counted by entries of the table.
    pub slots: usize,
    /// Rows of an entry.
    pub rows: usize,
    /// Entries side by side.
    pub columns: usize,
    /// All of them.
    pub entries: usize,
    /// Steps through K that a CTA makes.
    steps: f64,
    /// What a step takes at least, and each of these entries at a time.
    step: f64,
    step_of_cached: f64,
    step_of_read: f64,
    /// What an entry takes beside its steps.
    beside: f64,
}

impl<'a> Tiles<'a> {
    pub fn of(rates: &'a Rates, asked: &Description, config: &Config) -> Self {
        let shape = [asked.layout.m(), asked.n, asked.layout.k()];
        Tiles::new(rates, config, shape, asked.dtype.bytes())
    }

    pub fn new(rates: &'a Rates, config: &Config, [m, n, k]: [usize; 3], bytes: usize) -> Self {
        let tile = &config.tile;
        let ctas = tile.cluster * tile.split_k;
        // Some multiprocessors have too few neighbours for a large cluster.
        let slots = match (rates.multiprocessors / ctas, ctas) {
            (slots, ..=2) => slots,
            (slots, 3..=4) => slots * 10 / 11,
            (slots, _) => slots * 7 / 8,
        };
        let slots = slots.max(1);
        let (rows, columns) = (config.entry_rows(), n.div_ceil(tile.n));
        let entries = m.div_ceil(rows) * columns;
        let steps = (k.div_ceil(tile.k) as f64 / tile.split_k as f64).max(1.0);
        let area = (tile.m * tile.n) as f64;
        let of_k = (tile.k * bytes) as f64;
        let cached = (tile.m as f64 + tile.n as f64 / tile.cluster as f64) * of_k;
        let read = ((m + n) * k * bytes) as f64 / (entries as f64 * steps);
        let products = 2.0 * area * tile.k as f64 / rates.operations + rates.step;
        let split = match tile.split_k {
            1 => 0.0,
            _ => rates.join + rates.split * area / (128.0 * 256.0),
        };
        Tiles {
            rates,
            slots,
            rows,
            columns,
            entries,
            steps,
            step: products.max((tile.m + tile.n) as f64 * of_k / rates.loaded),
            step_of_cached: ctas as f64 * cached / rates.cached,
            step_of_read: read / rates.read,
            beside: rates.column * area / 128.0 + split,
        }
    }

    /// What `count` entries take that are made at the same time.
    pub fn wave(&self, count: usize) -> f64 {
        let count = count as f64;
        let step = self.step.max(count * self.step_of_cached);
        // What comes from memory is hidden behind the rest, the better the less of it there is.
        let read = count * self.step_of_read;
        self.steps * (step * step + read * read).sqrt() + self.beside
    }

    /// What all of them take.
    pub fn all(&self) -> f64 {
        let (full, rest) = (self.entries / self.slots, self.entries % self.slots);
        let last = if rest > 0 { self.wave(rest) } else { 0.0 };
        full as f64 * self.wave(self.slots) + last
    }

    /// From the launch to the end.
    pub fn alone(&self) -> f64 {
        self.rates.start + self.all()
    }
}

/// Rows that arrive together.
#[derive(Clone, Copy)]
struct Group {
    rows: usize,
    ready: f64,
    /// When the rest of their columns is there, if they come in two parts.
    late: f64,
}

/// The rows of rank 0, then those that come to it, in their order.
fn groups(rates: &Rates, asked: &Description, config: &Config) -> Vec<Group> {
    let layout = &asked.layout;
    let link = rates.link(config.route);
    let row = (layout.k() * asked.dtype.bytes()) as f64;
    let mut groups = vec![Group {
        rows: layout.rows_of(0).len(),
        ready: 0.0,
        late: 0.0,
    }];
    let mut clock = link.start;
    for source in 1..layout.world() {
        let is_last = source + 1 == layout.world();
        let count = match (config.route, is_last) {
            (Route::Store, _) => 1,
            (_, true) => config.chunking.last,
            (_, false) => config.chunking.count,
        };
        let rows = layout.rows_of(source).len();
        for chunk in 0..count {
            let rows = rows * (chunk + 1) / count - rows * chunk / count;
            let time = rows as f64 * row / link.bytes;
            let cut = config
                .cut(layout.k())
                .filter(|_| is_last && chunk + 1 == count);
            let first = cut.map_or(1.0, |column| column as f64 / layout.k() as f64);
            let ready = clock + link.chunk + first * time;
            clock = match cut {
                Some(_) => ready + link.chunk + (1.0 - first) * time,
                None => ready,
            };
            let late = if cut.is_some() { clock } else { 0.0 };
            groups.push(Group { rows, ready, late });
        }
    }
    groups
}

/// Slots that are free from a time on.
#[derive(Clone, Copy)]
struct Free {
    count: usize,
    at: f64,
}

impl Free {
    /// Both, at about the time that they are free.
    fn and(self, other: Free) -> Free {
        let count = self.count + other.count;
        let at = self.count as f64 * self.at + other.count as f64 * other.at;
        Free {
            count,
            at: at / count.max(1) as f64,
        }
    }
}

/// What a product takes whose rows are gathered meanwhile, as rank 0 sees it.
pub fn gathered(rates: &Rates, asked: &Description, config: &Config) -> f64 {
    let tiles = Tiles::of(rates, asked, config);
    gathered_by(&tiles, asked, config, &groups(rates, asked, config))
}

fn gathered_by(tiles: &Tiles, asked: &Description, config: &Config, groups: &[Group]) -> f64 {
    let (rates, layout) = (tiles.rates, &asked.layout);
    let around = match layout.world() {
        1 => rates.start,
        _ => rates.start + rates.link(config.route).around,
    };
    if order::reads_once(config, [layout.m(), asked.n, layout.k()]) {
        let ready = groups.iter().map(|group| group.ready).fold(0.0, f64::max);
        return around + ready + tiles.all();
    }
    let full_wave = tiles.wave(tiles.slots.min(tiles.entries));
    // All slots are free at one of two times: some are a tile ahead of the others.
    let (mut early, mut later) = (tiles.slots, 0);
    let (mut early_at, mut later_at) = (0.0f64, 0.0f64);
    let (mut end, mut rows, mut taken) = (0.0f64, 0, 0);
    for group in groups {
        rows += group.rows;
        // A tile row that two groups share waits for the second.
        let reached = match rows == layout.m() {
            true => tiles.entries,
            false => rows / tiles.rows * tiles.columns,
        };
        let count = reached - taken;
        taken = reached;
        if count == 0 {
            continue;
        }
        (early_at, later_at) = (early_at.max(group.ready), later_at.max(group.ready));
        let (full, rest) = (count / tiles.slots, count % tiles.slots);
        early_at += full as f64 * full_wave;
        later_at += full as f64 * full_wave;
        if full > 0 {
            end = end.max(if later > 0 { later_at } else { early_at });
        }
        let wave = if full > 0 {
            full_wave
        } else {
            tiles.wave(rest)
        };
        let of = |count, at| Free { count, at };
        let (free, busy) = match rest.checked_sub(early) {
            None => {
                let left = of(early - rest, early_at).and(of(later, later_at));
                (left, of(rest, early_at + wave))
            }
            Some(more) => {
                let first = of(early, early_at + wave);
                let second = of(more, later_at + wave);
                end = end.max(if more > 0 { second.at } else { 0.0 });
                (of(later - more, later_at), first.and(second))
            }
        };
        if busy.count > 0 {
            end = end.max(busy.at);
        }
        let (first, second) = match free.count > 0 && (busy.count == 0 || free.at <= busy.at) {
            true => (free, busy),
            false => (busy, free),
        };
        (early, early_at) = (first.count, first.at);
        (later, later_at) = (second.count, second.at);
        if group.late > 0.0 {
            let rest = 1.0 - config.cut(layout.k()).unwrap_or(0) as f64 / layout.k() as f64;
            end = end.max(group.late + rest * full_wave);
        }
    }
    around + end
}

/// What an operation takes that gathers rows, cut up like that.
pub fn predict(rates: &Rates, asked: &Description, config: &Config) -> Vec<Prediction> {
    let arrived = groups(rates, asked, config).into_iter();
    let arrived = arrived
        .map(|group| group.ready.max(group.late))
        .fold(0.0, f64::max);
    let parts = [
        ("matmul alone", Tiles::of(rates, asked, config).alone()),
        ("the last rows' arrival", rates.start + arrived),
        ("fused", gathered(rates, asked, config)),
    ];
    parts
        .map(|(what, micros)| Prediction { what, micros })
        .into()
}

/// How rows should be moved: by what all ranks have alike, so not by N. That counts where the product takes longer than the gather, and
/// there it matters little how rows come.
fn moved(rates: &Rates, asked: &Description, pushes: bool) -> (Route, Chunking) {
    let world = asked.layout.world();
    let bytes = (asked.layout.m() * asked.layout.k() * asked.dtype.bytes()) as f64;
    let shard = bytes / world as f64;
    let Link { start, chunk, .. } = rates.push;
    let copies_begin = start + world as f64 * chunk;
    match pushes {
        false => (Route::Pull, Chunking::new(1)),
        true if (bytes - shard) / STORED_INSTEAD <= copies_begin => {
            (Route::Store, Chunking::new(1))
        }
        true => {
            let count = if shard > LARGE_SHARD { 2 } else { 1 };
            (Route::Push, Chunking::new(count).with_cut_last(true))
        }
    }
}

/// How a gather and its product should be cut up. `pushes`: whether owners may move their rows. `near`: how rows were moved where the
/// most similar problem was the fastest, if one was measured. Ranks whose problems differ in N get configurations that agree.
pub fn of_gather(
    rates: &Rates,
    asked: &Description,
    numerics: Numerics,
    pushes: bool,
    near: Option<Config>,
) -> Config {
    let (route, chunking) = match near {
        Some(near) => (near.route, near.chunking),
        None => moved(rates, asked, pushes),
    };
    let base = Config::new(WIDEST, chunking, route);
    let groups = groups(rates, asked, &base);
    fastest(base, numerics, |config, best| {
        let tiles = Tiles::of(rates, asked, config);
        // Most are slower with all rows there.
        match tiles.alone() < best {
            true => gathered_by(&tiles, asked, config, &groups),
            false => f64::INFINITY,
        }
    })
}

/// How a product should be cut up whose rows are moved as in `base`, where that takes as long by all tiles.
pub fn of_product(rates: &Rates, asked: &Description, numerics: Numerics, base: Config) -> Config {
    fastest(base, numerics, |config, _| {
        // Pieces that are sent are cut by tiles, and ranks must agree on them, whose K may differ.
        let agrees = base.route == Route::Pull || config.entry_rows() == base.entry_rows();
        match agrees {
            true => Tiles::of(rates, asked, config).alone(),
            false => f64::INFINITY,
        }
    })
}

/// `base` with the shape that takes the shortest time. `time` is told the shortest so far.
fn fastest(base: Config, numerics: Numerics, time: impl Fn(&Config, f64) -> f64) -> Config {
    let mut best = (f64::INFINITY, base);
    for config in configs(base).filter(|config| config.check_numerics(numerics).is_ok()) {
        let time = time(&config, best.0);
        if time < best.0 {
            best = (time, config);
        }
    }
    best.1
}

#[cfg(test)]
mod tests {
    use super::super::tuned::agree;
    use super::*;
    use crate::element::DType;
    use crate::schedule::Layout;
    use crate::schedule::all_gather::gather_and_multiply;

    fn asked(m: usize, n: usize, k: usize, world: usize) -> Description {
        Description {
            operation: "all_gather_matmul",
            dtype: DType::Bf16,
            layout: Layout::balanced(m, k, world).unwrap(),
            n,
        }
    }

    /// The shape of rows, columns, CTAs that share `b`, and K.
    fn config(
        [m, n, cluster, split_k]: [usize; 4],
        route: Route,
        count: usize,
        cut: bool,
    ) -> Config {
        let chunking = Chunking::new(count).with_cut_last(cut);
        let mut all = configs(Config::new(WIDEST, chunking, route));
        let shape = |c: &Config| [c.tile.m, c.tile.n, c.tile.cluster, c.tile.split_k];
        all.find(|c| shape(c) == [m, n, cluster, split_k]).unwrap()
    }

    /// M, N, K, the shape, and the microseconds that an H200 took.
    type Alone = ([usize; 3], [usize; 4], f64);
    /// With the route, the chunks, and whether the last is cut; on two.
    type Gathered = ([usize; 3], Route, usize, bool, [usize; 4], f64);

    #[rustfmt::skip]
    const PRODUCTS: [Alone; 38] = [
        ([177, 4608, 3328], [64, 128, 1, 1], 23.2),
        ([186, 4248, 25088], [64, 128, 1, 1], 118.2),
        ([17, 12160, 2560], [64, 128, 1, 2], 27.7),
        ([143, 384, 1024], [64, 128, 1, 2], 10.2),
        ([16, 1792, 4096], [64, 128, 1, 4], 14.7),
        ([143, 384, 1024], [64, 128, 1, 4], 10.0),
        ([32, 24064, 5696], [64, 128, 1, 8], 93.1),
        ([67, 320, 1536], [64, 128, 1, 8], 8.3),
        ([8, 15680, 1792], [64, 256, 1, 1], 24.5),
        ([65, 16320, 1024], [64, 256, 1, 1], 21.0),
        ([10, 21632, 9728], [64, 256, 1, 2], 124.2),
        ([3, 7168, 1024], [64, 256, 1, 2], 12.8),
        ([1, 5768, 1600], [64, 256, 1, 4], 14.4),
        ([186, 4248, 25088], [64, 256, 1, 4], 115.0),
        ([6, 1856, 1024], [128, 64, 1, 1], 11.0),
        ([1064, 1328, 576], [128, 64, 1, 1], 12.6),
        ([128, 3584, 8192], [128, 64, 1, 2], 29.1),
        ([13, 256, 1024], [128, 64, 1, 2], 8.3),
        ([695, 320, 5184], [128, 64, 1, 4], 16.5),
        ([42, 392, 512], [128, 64, 1, 4], 9.5),
        ([238, 2304, 5632], [128, 128, 1, 2], 25.4),
        ([256, 3584, 8192], [128, 128, 1, 2], 37.3),
        ([635, 512, 2048], [128, 128, 1, 4], 11.3),
        ([3697, 256, 15488], [128, 128, 1, 4], 66.5),
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

    #[rustfmt::skip]
    const GATHERS: [Gathered; 30] = [
        ([2048, 512, 28672], Route::Pull, 1, false, [64, 256, 1, 2], 264.9),
        ([13129, 768, 1600], Route::Pull, 1, false, [128, 128, 2, 1], 110.5),
        ([11406, 8384, 1536], Route::Pull, 1, false, [128, 192, 2, 1], 414.0),
        ([9778, 1664, 768], Route::Pull, 1, false, [128, 128, 2, 1], 69.9),
        ([7347, 8768, 1536], Route::Pull, 1, false, [128, 256, 2, 1], 291.0),
        ([388, 768, 2240], Route::Push, 1, false, [128, 64, 1, 2], 31.4),
        ([1565, 480, 512], Route::Push, 1, false, [128, 64, 1, 1], 30.2),
        ([349, 256, 576], Route::Push, 1, false, [128, 64, 1, 1], 22.1),
        ([570, 4864, 640], Route::Push, 1, false, [128, 256, 1, 1], 32.1),
        ([5102, 1664, 3072], Route::Push, 1, false, [128, 192, 2, 1], 112.7),
        ([161, 768, 3904], Route::Push, 1, true, [128, 64, 1, 4], 32.0),
        ([786, 7808, 6144], Route::Push, 1, true, [128, 256, 1, 1], 153.0),
        ([4096, 1792, 4096], Route::Push, 1, true, [128, 224, 2, 1], 86.6),
        ([13129, 768, 1600], Route::Push, 1, true, [128, 256, 1, 1], 105.0),
        ([1064, 1328, 576], Route::Push, 1, true, [64, 256, 1, 1], 28.8),
        ([512, 3584, 8192], Route::Push, 2, false, [128, 128, 2, 1], 85.2),
        ([2961, 1024, 21504], Route::Push, 2, false, [128, 224, 2, 1], 370.4),
        ([3413, 2960, 1792], Route::Push, 2, false, [128, 224, 2, 1], 65.3),
        ([9188, 6528, 17920], Route::Push, 2, false, [128, 128, 2, 1], 3233.2),
        ([9778, 1664, 768], Route::Push, 2, false, [128, 128, 2, 1], 64.0),
        ([13540, 1792, 11776], Route::Push, 2, true, [128, 256, 2, 1], 793.2),
        ([5951, 7336, 14080], Route::Push, 2, true, [128, 224, 2, 1], 1788.7),
        ([8518, 512, 1024], Route::Push, 2, true, [64, 256, 1, 1], 55.9),
        ([2961, 1024, 21504], Route::Push, 2, true, [128, 208, 2, 1], 324.4),
        ([355, 3248, 4096], Route::Push, 2, true, [64, 256, 1, 1], 48.1),
        ([1924, 304, 1280], Route::Store, 1, false, [128, 64, 1, 1], 25.5),
        ([32, 24064, 5696], Route::Store, 1, false, [64, 128, 1, 2], 89.9),
        ([16, 1792, 4096], Route::Store, 1, false, [64, 128, 1, 8], 20.8),
        ([143, 384, 1024], Route::Store, 1, false, [64, 128, 1, 4], 15.2),
        ([8518, 512, 1024], Route::Store, 1, false, [128, 128, 2, 1], 51.9),
    ];

    #[test]
    fn products_are_predicted_within_a_fifth_of_what_was_measured() {
        for (shape, tile, measured) in PRODUCTS {
            let config = config(tile, Route::Pull, 1, false);
            let time = Tiles::new(&H200, &config, shape, 2).alone();
            let off = measured / time - 1.0;
            assert!(
                off.abs() < 0.2,
                "{shape:?} {tile:?}: {time} µs, not {measured}"
            );
        }
    }

    #[test]
    fn so_are_products_whose_rows_arrive_meanwhile() {
        for (shape, route, count, cut, tile, measured) in GATHERS {
            let [m, n, k] = shape;
            let config = config(tile, route, count, cut);
            let time = gathered(&H200, &asked(m, n, k, 2), &config);
            let off = measured / time - 1.0;
            assert!(
                off.abs() < 0.2,
                "{shape:?} {config:?}: {time} µs, not {measured}"
            );
        }
    }

    fn chosen(m: usize, n: usize, k: usize, world: usize) -> Config {
        of_gather(&H200, &asked(m, n, k, world), Numerics::Fast, true, None)
    }

    #[test]
    fn few_rows_are_stored_and_read_by_low_tiles_and_many_copied() {
        for (m, n, k) in [(1, 3584, 8192), (16, 1792, 4096), (64, 8192, 3584)] {
            let Config { tile, route, .. } = chosen(m, n, k, 2);
            assert_eq!((tile.m, route), (64, Route::Store), "{m}x{n}x{k}");
        }
        for (m, n, k) in [(4096, 1792, 4096), (8192, 3584, 8192), (16_384, 512, 8192)] {
            let Config {
                tile,
                route,
                chunking,
            } = chosen(m, n, k, 2);
            assert_eq!((tile.m, route), (128, Route::Push), "{m}x{n}x{k}");
            assert!(chunking.cut_last);
        }
        assert_eq!(chosen(16_384, 512, 8192, 2).chunking.count, 2);
    }

    #[test]
    fn where_owners_may_not_move_rows_these_are_pulled() {
        let of = |pushes| {
            of_gather(
                &H200,
                &asked(64, 1792, 4096, 2),
                Numerics::Fast,
                pushes,
                None,
            )
        };
        assert_eq!(of(false).route, Route::Pull);
        assert_ne!(of(true).route, Route::Pull);
    }

    #[test]
    fn ranks_whose_n_differ_agree_and_each_has_tiles_of_its_own() {
        for world in 1..=8 {
            for (m, k) in [
                (1, 512),
                (64, 4096),
                (700, 8192),
                (8192, 1024),
                (16_384, 28_672),
            ] {
                let all = [1, 64, 700, 1792, 3584, 20_000].map(|n| chosen(m, n, k, world));
                assert!(
                    all.iter().all(|config| agree(config, &all[0])),
                    "{m} {k} {world}"
                );
            }
        }
        let near = Some(config([128, 224, 2, 1], Route::Push, 3, false));
        let with = |n| of_gather(&H200, &asked(1024, n, 4096, 4), Numerics::Fast, true, near);
        assert_eq!(
            (with(128).route, with(128).chunking),
            (Route::Push, Chunking::new(3))
        );
        assert_ne!(with(128).tile, with(20_000).tile);
    }

    #[test]
    fn where_bits_depend_on_k_alone_it_is_cut_for_no_shape() {
        for m in [1, 16, 128, 1000, 8192] {
            for n in [64, 512, 1792, 20_000] {
                let asked = asked(m, n, 4096, 4);
                let config = of_gather(&H200, &asked, Numerics::Invariant, true, None);
                assert_eq!(config.tile.split_k, 1);
                let config = of_product(&H200, &asked, Numerics::Invariant, config);
                assert_eq!(config.tile.split_k, 1);
            }
        }
    }

    #[test]
    fn ranks_that_send_sums_cut_them_alike_whatever_their_k() {
        for shape in [[128, 256, 2, 1], [64, 128, 1, 4], [128, 128, 1, 2]] {
            let base = config(shape, Route::Push, 1, false);
            for k in [64, 1600, 1792, 20_000] {
                let asked = asked(4096, 4096, k, 2);
                let config = of_product(&H200, &asked, Numerics::Fast, base);
                assert_eq!(config.entry_rows(), base.entry_rows(), "{k}");
            }
        }
    }

    #[test]
    fn what_is_chosen_can_be_planned_for_any_rows() {
        for rows in [&[1][..], &[0, 1], &[5, 0, 700], &[4096; 8], &[1; 64]] {
            let layout = Layout::new(rows, 512).unwrap();
            let asked = Description {
                layout,
                ..asked(1, 300, 512, 1)
            };
            let config = of_gather(&H200, &asked, Numerics::Fast, true, None);
            for rank in 0..rows.len() {
                let schedule = gather_and_multiply(&asked, rank, config).unwrap();
                super::super::engine::check(&schedule).unwrap();
            }
        }
    }

    #[test]
    fn a_choice_takes_a_few_microseconds() {
        let begin = std::time::Instant::now();
        for m in 1..=1000 {
            std::hint::black_box(chosen(m, 3584, 8192, 8));
        }
        let micros = begin.elapsed().as_micros();
        println!("{micros} ns");
        // Without optimisation, on a machine that does other things as well.
        assert!(micros < 200_000, "{micros} ns");
    }

    #[test]
    fn rates_by_which_nothing_can_be_reckoned_are_refused() {
        assert_eq!(H200.check(), Ok(()));
        assert_eq!(H100.check(), Ok(()));
        let refused: [fn(&mut Rates); 5] = [
            |rates| rates.multiprocessors = 1 << 40,
            |rates| rates.read = 0.0,
            |rates| rates.cached = f64::NAN,
            |rates| rates.start = -1.0,
            |rates| rates.store.bytes = f64::INFINITY,
        ];
        for spoil in refused {
            let mut rates = H200;
            spoil(&mut rates);
            assert!(rates.check().is_err(), "{rates:?}");
        }
        let text = serde_json::to_string(&H200).unwrap();
        assert_eq!(serde_json::from_str::<Rates>(&text).unwrap(), H200);
    }
}
