//! Random shapes, with a line for each and a summary of all.

use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, Table};
use gemmesh::Config;
use gemmesh::tuning::Route;
use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};

use crate::time::Time;

/// The largest M, N and K that are drawn for GPUs.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub const LARGEST: [usize; 3] = [16384, 28672, 28672];
/// The same for the host, where products take long.
pub const LARGEST_ON_HOST: [usize; 3] = [512, 1024, 1024];

/// Draws `count` random shapes M, N and K.
///
/// The same seed gives the same shapes, and fewer of them are the first of more. Logarithms are uniform. M is any
/// number from 1 on. N, from 256 on, and K, from 512 on, are multiples of one of four numbers each.
pub fn draw(seed: u64, count: usize, largest: [usize; 3]) -> Vec<[usize; 3]> {
    let [m, n, k] = largest;
    let mut rng = SmallRng::seed_from_u64(seed);
    let shapes = (0..count).map(|_| {
        [
            log_uniform(&mut rng, 1, m),
            multiple(&mut rng, [8, 64, 128, 256], 256, n),
            multiple(&mut rng, [64, 128, 256, 512], 512, k),
        ]
    });
    shapes.collect()
}

/// The shape with N and K that are rounded up to multiples of these.
pub fn rounded_up([m, n, k]: [usize; 3], [of_n, of_k]: [usize; 2]) -> [usize; 3] {
    [m, n.next_multiple_of(of_n), k.next_multiple_of(of_k)]
}

/// Which dimension of its weight a layer splits over the ranks.
#[derive(Clone, Copy, PartialEq)]
pub enum Split {
    /// N: each rank has columns of the output.
    Columns,
    /// K: each rank has partial sums of the output.
    Depth,
}

/// N and K of a model's layers: QKV, attention's output, gate and up together, down, head.
type Layers = [[usize; 2]; 5];

const SPLITS: [Split; 5] = [
    Split::Columns,
    Split::Depth,
    Split::Columns,
    Split::Depth,
    Split::Columns,
];

/// Llama 3 8B, 70B and 405B, Qwen3 32B, and gpt-oss 120B.
#[rustfmt::skip]
const MODELS: [Layers; 5] = [
    [[6144, 4096], [4096, 4096], [28672, 4096], [4096, 14336], [128256, 4096]],
    [[10240, 8192], [8192, 8192], [57344, 8192], [8192, 28672], [128256, 8192]],
    [[18432, 16384], [16384, 16384], [106496, 16384], [16384, 53248], [128256, 16384]],
    [[10240, 5120], [5120, 8192], [51200, 5120], [5120, 25600], [151936, 5120]],
    [[5120, 2880], [2880, 4096], [5760, 2880], [2880, 2880], [201088, 2880]],
];

/// Draws `count` shapes M, N and K of models' layers, of those in `splits`, each split over one of `parts` ranks. M is a
/// power of two up to 16384.
///
/// The same seed gives the same shapes, and fewer of them are the first of more. None comes twice, so there may be fewer
/// than `count`.
pub fn draw_of_models(
    seed: u64,
    count: usize,
    splits: &[Split],
    parts: &[usize],
) -> Vec<[usize; 3]> {
    let mut all = Vec::new();
    for ([n, k], split) in MODELS.iter().flat_map(|layers| layers.iter().zip(SPLITS)) {
        for &part in parts.iter().filter(|_| splits.contains(&split)) {
            let [n, k] = match split {
                Split::Columns => [n / part, *k],
                Split::Depth => [*n, k / part],
            };
            all.extend((0..=14).map(|exponent| [1 << exponent, n, k]));
        }
    }
    all.sort_unstable();
    all.dedup();
    all.shuffle(&mut SmallRng::seed_from_u64(seed));
    all.truncate(count);
    all
}

/// A multiple of one of `factors`, all of which divide `least` and `most`.
fn multiple(rng: &mut SmallRng, factors: [usize; 4], least: usize, most: usize) -> usize {
    let factor = factors[rng.random_range(0..factors.len())];
    let nearest = (log_uniform(rng, least, most) + factor / 2) / factor;
    nearest * factor
}

/// A number whose logarithm is uniform. Each stands for the numbers between it and the next.
fn log_uniform(rng: &mut SmallRng, least: usize, most: usize) -> usize {
    let [low, high] = [least, most + 1].map(|bound| (bound as f64).ln());
    let logarithm = low + (high - low) * rng.random::<f64>();
    (logarithm.exp() as usize).clamp(least, most)
}

/// Times of a shape in microseconds.
#[derive(Clone, Copy, Debug)]
pub struct Times {
    /// gemmesh's product without its communication.
    pub alone: Time,
    pub cublaslt: Time,
    /// cuBLASLt with fast accumulation.
    pub fast: Time,
    /// The time of the baseline.
    pub baseline: Time,
    pub fused: f64,
    pub ideal: Time,
    /// The predicted time of `fused`.
    pub predicted: Time,
}

impl Times {
    fn fused(&self) -> Time {
        Time::Taken(self.fused)
    }

    /// The error of the prediction, relative to the time.
    fn misprediction(&self) -> Option<f64> {
        let ratio = self.predicted.over(self.fused());
        ratio.get().map(|ratio| (ratio - 1.0).abs())
    }

    fn alone_to_cublaslt(&self) -> Time {
        self.alone.over(self.cublaslt)
    }

    fn alone_to_fast(&self) -> Time {
        self.alone.over(self.fast)
    }

    fn fused_to_baseline(&self) -> Time {
        self.fused().over(self.baseline)
    }

    fn fused_to_ideal(&self) -> Time {
        self.fused().over(self.ideal)
    }

    fn excess(&self) -> Time {
        match self.alone {
            Time::Taken(alone) => Time::Taken(self.fused - alone),
            other => other,
        }
    }
}

/// A shape that has been timed.
pub struct Line {
    pub shape: [usize; 3],
    pub config: Config,
    pub times: Times,
}

/// A time or a ratio.
type Value = fn(&Times) -> Time;
/// A column of the table: its title, its decimals and its value.
type Column = (&'static str, usize, Value);

const COLUMNS: [Column; 12] = [
    ("alone", 1, |times| times.alone),
    ("cuBLASLt", 1, |times| times.cublaslt),
    ("fast", 1, |times| times.fast),
    ("baseline", 1, |times| times.baseline),
    ("fused", 1, Times::fused),
    ("predicted", 1, |times| times.predicted),
    ("ideal", 1, |times| times.ideal),
    ("alone/cuBLASLt", 3, Times::alone_to_cublaslt),
    ("alone/fast", 3, Times::alone_to_fast),
    ("fused/baseline", 3, Times::fused_to_baseline),
    ("fused-alone", 1, Times::excess),
    ("fused/ideal", 3, Times::fused_to_ideal),
];

/// The titles of the columns above lines with such times.
pub fn head(times: &Times) -> String {
    let cell = |&(title, ..): &Column| format!("{title:>0$}", width(title));
    row(["#", "M", "N", "K", "config"], times, cell)
}

impl Line {
    /// A row of the table. Shapes are counted from 1.
    pub fn row(&self, number: usize) -> String {
        let [m, n, k] = self.shape.map(|extent| extent.to_string());
        let (number, config) = (number.to_string(), in_short(&self.config));
        let cell = |&(title, decimals, value): &Column| {
            let value = value(&self.times).text(decimals);
            format!("{value:>0$}", width(title))
        };
        row([&number, &m, &n, &k, &config], &self.times, cell)
    }
}

fn row(
    [number, m, n, k, config]: [&str; 5],
    times: &Times,
    cell: impl Fn(&Column) -> String,
) -> String {
    let there = COLUMNS
        .iter()
        .filter(|(.., value)| value(times) != Time::Absent);
    let cells: Vec<String> = there.map(cell).collect();
    let problem = format!("{number:>4} {m:>6} {n:>6} {k:>6}  {config:<31}");
    format!("{problem} {}", cells.join(" "))
}

fn width(title: &str) -> usize {
    title.len().max(9)
}

/// Route, tile, CTAs of a cluster, those that share a tile (s) or slices of K (k), chunks of a shard and of the last.
pub fn in_short(config: &Config) -> String {
    let route = match config.route {
        Route::Pull => "pull",
        Route::Push => "push",
        Route::Store if config.product_first => "behind",
        Route::Store => "store",
        Route::Net => "net",
    };
    let (tile, chunking) = (&config.tile, &config.chunking);
    let cut = if chunking.cut_last { "+cut" } else { "" };
    let parts = match tile.k_slices {
        1 => format!("s{}", tile.split_k),
        slices => format!("k{slices}"),
    };
    format!(
        "{route} {}×{} c{}×{} {parts} {}/{}{cut}",
        tile.m, tile.n, tile.cluster_m, tile.cluster_n, chunking.count, chunking.last
    )
}

/// A class of shapes by their M.
type Class = (&'static str, fn(usize) -> bool);

const CLASSES: [Class; 4] = [
    ("M <= 64", |m| m <= 64),
    ("64 < M < 1024", |m| 64 < m && m < 1024),
    ("M >= 1024", |m| m >= 1024),
    ("all", |_| true),
];

/// A row of the summary: a name, and its value for each class.
type Statistic = (String, [String; CLASSES.len()]);

/// How the ratios of each class are spread. `of` says the shapes' M too.
pub fn spread(name: &str, of: &[(usize, f64)]) -> Vec<Statistic> {
    let classes = CLASSES.map(|(_, holds)| -> Vec<f64> {
        let of = of.iter().filter(|(m, _)| holds(*m));
        of.map(|(_, ratio)| *ratio).collect()
    });
    type Value = fn(&[f64]) -> Option<f64>;
    let statistics: [(&str, Value); 3] = [
        ("geometric mean", geometric_mean),
        ("95th percentile", |ratios| percentile(ratios, 0.95)),
        ("worst", |ratios| percentile(ratios, 1.0)),
    ];
    let row = |(statistic, value): (&str, Value)| {
        let values = classes.each_ref().map(|ratios| cell(value(ratios), 3));
        (format!("{name}, {statistic}"), values)
    };
    statistics.into_iter().map(row).collect()
}

/// How many shapes there are in each class, and how ratios and differences are spread over them.
pub fn summary(lines: &[Line]) -> Vec<Statistic> {
    let classes = CLASSES.map(|(_, holds)| -> Vec<Times> {
        let lines = lines.iter().filter(|line| holds(line.shape[0]));
        lines.map(|line| line.times).collect()
    });
    let mut rows: Vec<Statistic> = Vec::new();
    let counts = classes.each_ref().map(|times| times.len().to_string());
    rows.push(("shapes".into(), counts));
    let ratios: [(&str, Value); 4] = [
        ("alone / cuBLASLt", Times::alone_to_cublaslt),
        ("alone / fast cuBLASLt", Times::alone_to_fast),
        ("fused / baseline", Times::fused_to_baseline),
        ("fused / ideal", Times::fused_to_ideal),
    ];
    for (name, ratio) in ratios {
        let of = |line: &Line| Some((line.shape[0], ratio(&line.times).get()?));
        let of: Vec<(usize, f64)> = lines.iter().filter_map(of).collect();
        if of.is_empty() {
            continue;
        }
        rows.extend(spread(name, &of));
        if name == "fused / baseline" {
            let losses = classes.each_ref().map(|times| {
                let ratios = times.iter().filter_map(|times| ratio(times).get());
                ratios.filter(|&ratio| ratio > 1.0).count().to_string()
            });
            rows.push((format!("{name} > 1.00"), losses));
        }
    }
    let mut add = |name: String, value: &dyn Fn(&[Times]) -> String| {
        rows.push((name, classes.each_ref().map(|times| value(times))));
    };
    if lines
        .iter()
        .any(|line| line.times.misprediction().is_some())
    {
        add("|predicted / fused - 1|, median".into(), &|times| {
            let off: Vec<f64> = times.iter().filter_map(Times::misprediction).collect();
            cell(percentile(&off, 0.5), 3)
        });
    }
    for (statistic, share) in [("median", 0.5), ("95th percentile", 0.95)] {
        add(format!("fused - alone, {statistic}, µs"), &|times| {
            let excess = times.iter().filter_map(|times| times.excess().get());
            let excess: Vec<f64> = excess.collect();
            cell(percentile(&excess, share), 1)
        });
    }
    rows
}

/// A summary, as a table.
pub fn table(summary: &[Statistic]) -> Table {
    let mut table = Table::new();
    table.load_style(NOTHING);
    table.set_header([""].into_iter().chain(CLASSES.map(|(name, _)| name)));
    for (name, values) in summary {
        table.add_row([name].into_iter().chain(values));
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

fn cell(value: Option<f64>, decimals: usize) -> String {
    value.map_or("-".into(), |value| format!("{value:.decimals$}"))
}

/// The smallest of the values that this share of them, 0.0 to 1.0, does not exceed. None if there are no values.
pub fn percentile(values: &[f64], share: f64) -> Option<f64> {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    let rank = (share * values.len() as f64).ceil() as usize;
    values.get(rank.saturating_sub(1)).copied()
}

/// The geometric mean of positive values. None if there are no values.
pub fn geometric_mean(values: &[f64]) -> Option<f64> {
    let logarithms: f64 = values.iter().map(|value| value.ln()).sum();
    let mean = logarithms / values.len() as f64;
    (!values.is_empty()).then(|| mean.exp())
}
