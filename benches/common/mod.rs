//! Random problems, the float64 check and timing, for the benchmark and the quickstart.

#![allow(dead_code)] // The quickstart uses a part of it.

pub mod gather;
pub mod scales;
pub mod time;

use std::fmt::{Display, Formatter};
use std::ops::Range;
use std::process::ExitCode;
use std::time::Instant;

use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, Table};
use gemm_common::Parallelism;
use gemm_f64::gemm::f64::get_gemm_fn;
use gemmesh::elements::{AddendOf, Element, Number, OutputOf, WeightOf};
use gemmesh::fp8::Scaling;
use gemmesh::trace::Trace;
use gemmesh::tuning::Explanation;
use gemmesh::{Backend, Config, DType, Error, F8E4M3, Group, Result, bf16, f16};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use rand_distr::StandardNormal;
use rayon::prelude::*;
use scales::{BLOCK, ScaleValues};
use time::Time;

/// A type of both operands of a product.
pub trait Multiplied: Element + WeightOf<Self> {
    /// The type of bias, residual and partial sums.
    type Addend: AddendOf<Self> + OutputOf<Self>;
}

impl Multiplied for bf16 {
    type Addend = bf16;
}

impl Multiplied for f16 {
    type Addend = f16;
}

impl Multiplied for F8E4M3 {
    type Addend = bf16;
}

/// Normally distributed elements, the same for the same seed on every machine. After [`PERIOD`] of them they repeat.
pub fn random<T: Number>(count: usize, seed: u64) -> Vec<T> {
    const BLOCK: usize = 1 << 16;
    // Its pages are first touched by all threads.
    let mut values: Vec<T> = bytemuck::zeroed_vec(count);
    let (drawn, repeated) = values.split_at_mut(count.min(PERIOD));
    let blocks = drawn.par_chunks_mut(BLOCK).enumerate();
    blocks.for_each(|(block, values)| {
        let mut rng = SmallRng::seed_from_u64(seed << 32 | block as u64);
        values.fill_with(|| T::from_f32(rng.sample(StandardNormal)));
    });
    let repeated = repeated.par_chunks_mut(PERIOD);
    repeated.for_each(|values| values.copy_from_slice(&drawn[..values.len()]));
    values
}

/// A prime, so that no two rows of a matrix are equal if its rows are fewer and shorter.
const PERIOD: usize = (1 << 24) - 3;

/// Up to `count` different rows of `m`, in order: the first, the last, and random ones.
pub fn sample_rows(m: usize, count: usize, seed: u64) -> Vec<usize> {
    if count >= m {
        return (0..m).collect();
    }
    let mut rng = SmallRng::seed_from_u64(seed);
    let mut rows = vec![0, m - 1];
    while rows.len() < count {
        rows.push(rng.random_range(0..m));
    }
    rows.sort_unstable();
    rows.dedup();
    rows
}

/// How far an output is from the float64 product.
#[derive(Clone, Copy, Debug, Default)]
pub struct Check {
    /// Elements that were compared.
    pub elements: usize,
    /// The largest |out - exact|.
    pub max_abs_err: f64,
    /// The largest |out - exact|, relative to the largest |exact|.
    pub max_rel_err: f64,
    /// The largest |out - exact|, relative to what rounding allows. At most 1 is right.
    pub worst: f64,
}

impl Check {
    pub fn ok(&self) -> bool {
        self.elements > 0 && self.worst <= 1.0
    }

    /// Counts an element with its error, and with its error relative to what rounding allows.
    pub fn add(&mut self, error: f64, share: f64) {
        self.elements += 1;
        self.max_abs_err = worse(error, self.max_abs_err);
        self.worst = worse(share, self.worst);
    }

    /// All ranks' checks in one, on every rank. Collective.
    pub fn everywhere<B: Backend>(self, group: &Group<B>) -> Result<Check> {
        let fields = [
            self.elements as f64,
            self.max_abs_err,
            self.max_rel_err,
            self.worst,
        ];
        let ranks = group.all_gather_bytes(fields.map(f64::to_le_bytes).as_flattened())?;
        let mut all = Check::default();
        for bytes in ranks {
            let field = |index: usize| {
                let bytes = bytes[index * size_of::<f64>()..].first_chunk();
                bytes.map_or(f64::NAN, |bytes| f64::from_le_bytes(*bytes))
            };
            all.elements += field(0) as usize;
            all.max_abs_err = worse(field(1), all.max_abs_err);
            all.max_rel_err = worse(field(2), all.max_rel_err);
            all.worst = worse(field(3), all.worst);
        }
        Ok(all)
    }
}

/// The larger, or NaN if one is, which `f64::max` would pass over.
fn worse(x: f64, y: f64) -> f64 {
    if x.is_nan() || x > y { x } else { y }
}

/// Factors of an output: rows of `a`, [rows, k], times the weight `b`, [N, k].
///
/// With several of them, the output is the sum of their products.
pub struct Factors<'a, T> {
    a: &'a [T],
    b: &'a [T],
    k: usize,
    /// The row of `a` that makes the output's first.
    first: usize,
    /// Those of `a` and of `b`.
    scales: [Option<&'a ScaleValues>; 2],
}

impl<'a, T> Factors<'a, T> {
    pub fn new(a: &'a [T], b: &'a [T], k: usize) -> Self {
        Factors {
            a,
            b,
            k,
            first: 0,
            scales: [None; 2],
        }
    }

    /// Row `first` of `a` makes the output's first row.
    pub fn at_row(self, first: usize) -> Self {
        Factors { first, ..self }
    }

    /// Multiplies `a` and `b` by their scales.
    pub fn scaled(self, scales: [Option<&'a ScaleValues>; 2]) -> Self {
        Factors { scales, ..self }
    }
}

/// Some values of an operand in float64, times their scales.
fn widened<T: Number>(
    values: &[T],
    k: usize,
    rows: impl Iterator<Item = usize>,
    scales: Option<&ScaleValues>,
) -> Vec<f64> {
    let mut wide = Vec::new();
    for row in rows {
        let blocks = values[row * k..][..k].chunks(BLOCK).enumerate();
        for (block, values) in blocks {
            let scale = scales.map_or(1.0, |scales| scales.of(row, block));
            wide.extend(values.iter().map(|x| f64::from(x.to_f32()) * scale));
        }
    }
    wide
}

/// An element in float64.
#[derive(Clone, Copy, Default)]
pub struct Exact {
    /// The exact value.
    pub value: f64,
    /// Σ|a·b| over all that is added up.
    pub magnitude: f64,
    /// Σ|product| over the products that are added up.
    pub products: f64,
}

/// Compares the given rows of `out`, [rows, N], with the float64 sum of `products`. `allowed` is how far rounding may
/// move an element.
pub fn check<T: Number, O: Number>(
    products: &[Factors<T>],
    out: &[O],
    n: usize,
    rows: &[usize],
    allowed: impl Fn(&Exact) -> f64 + Sync,
) -> Check {
    const ROWS: usize = 64;
    const COLUMNS: usize = 512;
    let blocks: Vec<(&[usize], usize)> = rows
        .chunks(ROWS)
        .flat_map(|rows| (0..n).step_by(COLUMNS).map(move |column| (rows, column)))
        .collect();
    let checked = blocks.into_par_iter().map(|(rows, first)| {
        let width = COLUMNS.min(n - first);
        let exact = exact(products, rows, first..first + width);
        let (mut check, mut largest) = (Check::default(), 0f64);
        for (i, &row) in rows.iter().enumerate() {
            let found = &out[row * n + first..][..width];
            for (found, exact) in found.iter().zip(&exact[i * width..]) {
                let error = (f64::from(found.to_f32()) - nearest::<O>(exact.value)).abs();
                check.add(error, error / allowed(exact));
                largest = largest.max(exact.value.abs());
            }
        }
        (check, largest)
    });
    let (mut check, largest) = checked.reduce(Default::default, |(x, one), (y, other)| {
        let both = Check {
            elements: x.elements + y.elements,
            max_abs_err: worse(x.max_abs_err, y.max_abs_err),
            max_rel_err: 0.0,
            worst: worse(x.worst, y.worst),
        };
        (both, one.max(other))
    });
    if check.elements > 0 {
        check.max_rel_err = check.max_abs_err / largest;
    }
    check
}

/// Some columns of the given rows of the sum of `products`, row after row.
pub fn exact<T: Number>(
    products: &[Factors<T>],
    rows: &[usize],
    columns: Range<usize>,
) -> Vec<Exact> {
    let width = columns.len();
    let mut exact = vec![Exact::default(); rows.len() * width];
    for factors in products {
        let &Factors { k, first, .. } = factors;
        let [of_a, of_b] = factors.scales;
        let a = widened(factors.a, k, rows.iter().map(|row| first + row), of_a);
        let b = widened(factors.b, k, columns.clone(), of_b);
        let absolute = |values: &[f64]| -> Vec<f64> { values.iter().map(|x| x.abs()).collect() };
        let values = product(&a, &b, rows.len(), width, k);
        let magnitudes = product(&absolute(&a), &absolute(&b), rows.len(), width, k);
        for ((exact, value), magnitude) in exact.iter_mut().zip(values).zip(magnitudes) {
            exact.value += value;
            exact.magnitude += magnitude;
            exact.products += value.abs();
        }
    }
    exact
}

/// How many rows of `n` elements over `k` take about `products` products to compare.
pub fn rows_within(products: usize, n: usize, k: usize) -> usize {
    (products / (n * k)).max(16)
}

/// How far the f32 sum of a product over `k` may be off, relative to Σ|a·b|. On GPUs tensor cores drop bits of fp8.
pub fn sums_off<B: Backend, T: Number>(k: usize) -> f64 {
    let parts = k.div_ceil(BLOCK) as f64;
    match (T::DTYPE.is_fp8(), B::NAME == "host") {
        (false, _) => (k as f64).sqrt() * 2f64.powi(-23),
        // Each 128 products are summed apart.
        (true, true) => (131.0 + parts) * 2f64.powi(-24),
        (true, false) => 2f64.powi(-12) + (parts + 4.0) * 2f64.powi(-23),
    }
}

/// The same for fast sums of fp8, with [`gemmesh::fp8::Accumulation::Fast`].
pub fn fast_sums_off(k: usize) -> f64 {
    (k / 32 + 1) as f64 * 2f64.powi(-13)
}

/// The number of `T`'s range that is nearest to `x`. Only fp8 has a largest one that matters.
pub fn nearest<T: Number>(x: f64) -> f64 {
    match T::DTYPE {
        DType::F8E4M3 => x.clamp(-448.0, 448.0),
        _ => x,
    }
}

/// How far a number that is within `off` of `x` may be from `x` when it has been rounded to `T`.
pub fn rounded<T: Number>(x: f64, off: f64) -> f64 {
    off + half_ulp::<T>(x.abs() + off)
}

/// Half the distance between `T`'s neighbours of `x`.
fn half_ulp<T: Number>(x: f64) -> f64 {
    let exponent = x.abs().log2().floor().max(T::MIN_EXPONENT.into());
    2f64.powf(exponent - f64::from(T::DIGITS))
}

/// `a` [m, k] times the transpose of `b` [n, k].
#[allow(unsafe_code)]
fn product(a: &[f64], b: &[f64], m: usize, n: usize, k: usize) -> Vec<f64> {
    assert_eq!((a.len(), b.len()), (m * k, n * k));
    let mut c = vec![0.0; m * n];
    let (n_stride, k_stride) = (n as isize, k as isize);
    // Computed as cᵀ = b · aᵀ, because these kernels want contiguous columns.
    // SAFETY: the slices are as long as the shapes and strides say.
    unsafe {
        get_gemm_fn()(
            n,
            m,
            k,
            c.as_mut_ptr(),
            n_stride,
            1,
            false,
            b.as_ptr(),
            1,
            k_stride,
            a.as_ptr(),
            k_stride,
            1,
            1.0,
            1.0,
            false,
            false,
            false,
            Parallelism::None,
        );
    }
    c
}

/// An operation on random operands, and the parts that are timed beside it.
pub trait Operation<B: Backend, T: Multiplied>: Sized {
    /// The name of the call.
    const NAME: &'static str;
    /// The collective that it communicates by.
    const COLLECTIVE: &'static str;
    /// Its two parts, one after the other.
    const SEQUENTIAL: &'static str;
    /// The type of its output.
    const OUT: DType;
    /// A call that has been planned.
    type Prepared;

    /// A random problem of M, N and K. If rows are gathered, they come in `stages` stages. Collective.
    fn random(group: &Group<B>, shape: [usize; 3], stages: usize) -> Result<Self> {
        Self::scaled(group, shape, stages, Scaling::None)
    }
    /// The same, with random scales of both operands. Collective.
    fn scaled(group: &Group<B>, shape: [usize; 3], stages: usize, scaling: Scaling)
    -> Result<Self>;
    /// M, N and K, and which of them are a rank's own.
    fn describe(shape: [usize; 3]) -> String;
    /// Plans it. Without a configuration, the backend chooses one.
    fn prepare(&self, config: Option<Config>) -> Result<Self::Prepared>;
    /// How it is cut up.
    fn config(prepared: &Self::Prepared) -> Config {
        Self::explain(prepared).config
    }
    /// The plan, with the time that it is expected to take.
    fn explain(prepared: &Self::Prepared) -> Explanation;
    /// Does all of it.
    fn run(&mut self, prepared: &Self::Prepared) -> Result<()>;
    /// Only multiplies.
    fn multiply(&mut self, prepared: &Self::Prepared) -> Result<()>;
    /// Only communicates.
    fn communicate(&mut self, prepared: &Self::Prepared) -> Result<()>;
    /// Does one part after the other.
    fn run_in_sequence(&mut self, prepared: &Self::Prepared) -> Result<()>;
    /// Does all of it, and returns a trace.
    fn trace(&mut self, prepared: &Self::Prepared) -> Result<Trace>;
    /// Spoils everything that a run should write.
    fn poison(&mut self) -> Result<()>;
    /// Compares rows of this rank's output with float64. It compares all rows, if that takes at most `products`
    /// products.
    fn check(&mut self, products: usize) -> Result<Check>;
}

/// A row of the tables. Times are in microseconds.
pub struct Row {
    pub name: String,
    /// Its field in the JSON.
    pub key: String,
    pub time: Time,
}

impl Row {
    pub fn new(name: impl Into<String>, key: impl Into<String>, time: impl Into<Time>) -> Row {
        let (name, key, time) = (name.into(), key.into(), time.into());
        Row { name, key, time }
    }
}

/// The field of the row of a collective.
pub fn key_of(collective: &str) -> String {
    collective.replace('-', "_") + "_us"
}

/// Median times in microseconds, the slowest rank counted in each run.
pub struct Times {
    pub rows: Vec<Row>,
    pub sequential: f64,
    pub fused: f64,
    /// What perfect overlap would take: the longer of the two parts.
    pub ideal: f64,
    /// The median over the rounds of fused / sequential.
    pub fused_to_sequential: f64,
}

/// Times an operation and its parts in turn, `iterations` times after `warmup`.
///
/// Every second round goes backwards. `progress` is called after each round.
pub fn measure<B: Backend, T: Multiplied, O: Operation<B, T>>(
    group: &Group<B>,
    operation: &mut O,
    prepared: &O::Prepared,
    warmup: usize,
    iterations: usize,
    mut progress: impl FnMut(),
) -> Result<Times> {
    let variants = [O::multiply, O::communicate, O::run_in_sequence, O::run];
    let mut samples: Vec<[f64; 4]> = Vec::new();
    for round in 0..warmup + iterations {
        let mut times = [0.0; 4];
        let mut order = [0, 1, 2, 3];
        if round % 2 == 1 {
            order.reverse();
        }
        for variant in order {
            group.barrier()?;
            let begin = Instant::now();
            variants[variant](operation, prepared)?;
            group.synchronize()?;
            times[variant] = begin.elapsed().as_secs_f64() * 1e6;
        }
        if round >= warmup {
            samples.push(times);
        }
        progress();
    }
    let rounds = slowest(group, &samples)?;
    let [matmul, collective, sequential, fused] = medians(&rounds);
    let ideal = matmul.max(collective);
    let ratios: Vec<[f64; 1]> = rounds.iter().map(|times| [times[3] / times[2]]).collect();
    let [fused_to_sequential] = medians(&ratios);
    let alone = format!("{} alone", O::COLLECTIVE);
    Ok(Times {
        rows: vec![
            Row::new("matmul alone", "matmul_us", matmul),
            Row::new(alone, key_of(O::COLLECTIVE), collective),
            Row::new(O::SEQUENTIAL, "sequential_us", sequential),
            Row::new("fused", "fused_us", fused),
            Row::new("ideal", "ideal_us", ideal),
        ],
        sequential,
        fused,
        ideal,
        fused_to_sequential,
    })
}

/// The times of the slowest rank in each run. Collective.
pub fn slowest<B: Backend, const N: usize>(
    group: &Group<B>,
    samples: &[[f64; N]],
) -> Result<Vec<[f64; N]>> {
    let bytes: Vec<u8> = samples
        .as_flattened()
        .iter()
        .flat_map(|time| time.to_le_bytes())
        .collect();
    let ranks = group.all_gather_bytes(&bytes)?;
    let slowest = |run: usize, column: usize| {
        let at = (run * N + column) * size_of::<f64>();
        let times = ranks.iter().filter_map(|rank| rank[at..].first_chunk());
        times
            .map(|bytes| f64::from_le_bytes(*bytes))
            .fold(0.0, f64::max)
    };
    let runs = 0..samples.len();
    Ok(runs
        .map(|run| std::array::from_fn(|column| slowest(run, column)))
        .collect())
}

/// The median of each column over the runs. There must be at least one run.
pub fn medians<const N: usize>(runs: &[[f64; N]]) -> [f64; N] {
    std::array::from_fn(|column| {
        let mut times: Vec<f64> = runs.iter().map(|run| run[column]).collect();
        times.sort_by(f64::total_cmp);
        times[times.len() / 2]
    })
}

/// Names and times, as a table.
pub fn table(rows: &[Row]) -> Table {
    let mut table = Table::new();
    table.load_style(NOTHING);
    table.set_header(["", "median µs"]);
    for Row { name, time, .. } in rows {
        if *time != Time::Absent {
            table.add_row([name.clone(), time.text(0)]);
        }
    }
    if let Some(column) = table.column_mut(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

/// Why a run has no figures.
#[derive(Debug)]
pub enum Failure {
    Gemmesh(Error),
    /// The result was compared with float64.
    Wrong(Check),
    /// The arguments ask for something that does not exist.
    Usage(&'static str),
    /// One of several problems failed.
    Of {
        problem: String,
        cause: Box<Failure>,
    },
}

impl Failure {
    /// The same failure, with a description of the problem.
    pub fn of(self, problem: String) -> Failure {
        let cause = Box::new(self);
        Failure::Of { problem, cause }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure::Gemmesh(error)
    }
}

impl Display for Failure {
    fn fmt(&self, f: &mut Formatter) -> std::fmt::Result {
        match self {
            Failure::Gemmesh(error) => error.fmt(f),
            Failure::Wrong(Check {
                elements, worst, ..
            }) => write!(
                f,
                "a wrong result: of {elements} elements one is {worst:.3} times as far from float64 as rounding may move it"
            ),
            Failure::Usage(reason) => f.write_str(reason),
            Failure::Of { problem, cause } => write!(f, "{problem}: {cause}"),
        }
    }
}

/// The program's exit code. If there is an error, it prints the error's own words.
pub fn exit(result: Result<(), Failure>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
