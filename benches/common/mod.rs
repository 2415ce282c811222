//! What the benchmark and the quickstart share: random problems, the float64 check, and timing.

use std::fmt::{Display, Formatter};
use std::process::ExitCode;
use std::time::Instant;

use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, Table};
use gemm::Parallelism;
use gemmesh::{Backend, Element, Error, Group, Matrix, Prepared, Result, ShardedMatrix};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use rand_distr::StandardNormal;
use rayon::prelude::*;

/// Normally distributed elements, the same for the same seed on every machine.
pub fn random<T: Element>(count: usize, seed: u64) -> Vec<T> {
    const BLOCK: usize = 1 << 16;
    let mut values = vec![T::from_f32(0.0); count];
    let blocks = values.par_chunks_mut(BLOCK).enumerate();
    blocks.for_each(|(block, values)| {
        let mut rng = SmallRng::seed_from_u64(seed << 32 | block as u64);
        values.fill_with(|| T::from_f32(rng.sample(StandardNormal)));
    });
    values
}

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
    /// That, relative to the largest |exact|.
    pub max_rel_err: f64,
    /// The largest |out - exact| as a share of what rounding allows: right if at most 1.
    pub worst: f64,
}

impl Check {
    pub fn ok(&self) -> bool {
        self.elements > 0 && self.worst <= 1.0
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

/// Compares the given rows of `out` [M, N] with the float64 product of `a` [M, K] and `b` [N, K].
///
/// An element may be off by half an ulp of its type, for the one rounding, and by √K · 2⁻²³ · Σ|a·b| for
/// the sums in f32.
pub fn check<T: Element>(a: &[T], b: &[T], out: &[T], n: usize, k: usize, rows: &[usize]) -> Check {
    const ROWS: usize = 64;
    const COLUMNS: usize = 512;
    let blocks: Vec<(&[usize], usize)> = rows
        .chunks(ROWS)
        .flat_map(|rows| (0..n).step_by(COLUMNS).map(move |column| (rows, column)))
        .collect();
    let checked = blocks.into_par_iter().map(|(rows, first)| {
        let a: Vec<f64> = rows
            .iter()
            .flat_map(|&row| &a[row * k..][..k])
            .map(|x| x.to_f32().into())
            .collect();
        let width = COLUMNS.min(n - first);
        let b: Vec<f64> = b[first * k..][..width * k]
            .iter()
            .map(|x| x.to_f32().into())
            .collect();
        let absolute = |values: &[f64]| -> Vec<f64> { values.iter().map(|x| x.abs()).collect() };
        let exact = product(&a, &b, rows.len(), width, k);
        let magnitude = product(&absolute(&a), &absolute(&b), rows.len(), width, k);
        let (mut check, mut largest) = (Check::default(), 0f64);
        for (i, &row) in rows.iter().enumerate() {
            for j in 0..width {
                let (exact, magnitude) = (exact[i * width + j], magnitude[i * width + j]);
                let error = (f64::from(out[row * n + first + j].to_f32()) - exact).abs();
                let sums = (k as f64).sqrt() * 2f64.powi(-23) * magnitude;
                let allowed = half_ulp::<T>(exact) + sums;
                check.elements += 1;
                check.max_abs_err = worse(error, check.max_abs_err);
                check.worst = worse(error / allowed, check.worst);
                largest = largest.max(exact.abs());
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
    check.max_rel_err = check.max_abs_err / largest;
    check
}

/// Half the distance between `T`'s neighbours of `x`.
fn half_ulp<T: Element>(x: f64) -> f64 {
    let exponent = x.abs().log2().floor().max(T::MIN_EXPONENT.into());
    2f64.powf(exponent - f64::from(T::DIGITS))
}

/// `a` [m, k] times the transpose of `b` [n, k].
#[allow(unsafe_code)]
fn product(a: &[f64], b: &[f64], m: usize, n: usize, k: usize) -> Vec<f64> {
    assert_eq!((a.len(), b.len()), (m * k, n * k));
    let mut c = vec![0.0; m * n];
    // SAFETY: the slices are as long as the shapes and strides say.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            c.as_mut_ptr(),
            1,
            n as isize,
            false,
            a.as_ptr(),
            1,
            k as isize,
            b.as_ptr(),
            k as isize,
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

/// The operands of one rank.
pub struct Case<B: Backend, T: Element> {
    pub a: ShardedMatrix<B, T>,
    pub b: Matrix<B, T>,
    pub out: Matrix<B, T>,
    weight: Vec<T>,
}

impl<B: Backend, T: Element> Case<B, T> {
    /// A random problem; `n` columns a rank.
    pub fn random(group: &Group<B>, m: usize, n: usize, k: usize) -> Result<Case<B, T>> {
        let rank = group.rank() as u64;
        let mut a = group.sharded::<T>(m, k)?;
        let count = a.rows().len() * k;
        a.shard_mut()
            .copy_from_host(&random::<T>(count, 1 + rank))?;
        let weight = random::<T>(n * k, 1001 + rank);
        let b = group.upload(&weight, n, k)?;
        let out = group.zeros(m, n)?;
        Ok(Case { a, b, out, weight })
    }

    /// Spoils everything that a run should write.
    pub fn poison(&mut self) -> Result<()> {
        let nan = T::from_f32(f32::NAN);
        let [m, n] = self.out.shape();
        self.a.poison(nan)?;
        self.out.copy_from_host(&vec![nan; m * n])
    }

    /// Compares up to `rows` rows of the output with float64.
    pub fn check(&mut self, rows: usize) -> Result<Check> {
        let [m, n] = self.out.shape();
        let k = self.a.shape()[1];
        let rows = sample_rows(m, rows, 7);
        let (a, out) = (self.a.to_vec()?, self.out.to_vec()?);
        Ok(check(&a, &self.weight, &out, n, k, &rows))
    }
}

/// Median times in microseconds, the slowest rank counted in each run.
#[derive(Clone, Copy, Debug)]
pub struct Times {
    pub matmul: f64,
    pub gather: f64,
    pub sequential: f64,
    pub fused: f64,
    /// What perfect overlap would take: the longer of the two parts.
    pub ideal: f64,
    /// The median over the rounds of fused / sequential.
    pub fused_to_sequential: f64,
}

impl Times {
    pub fn rows(&self) -> [(&'static str, f64); 5] {
        [
            ("matmul alone", self.matmul),
            ("gather alone", self.gather),
            ("gather then matmul", self.sequential),
            ("fused", self.fused),
            ("ideal", self.ideal),
        ]
    }
}

/// Times all variants, alternating, every other round backwards, `iterations` times after `warmup`; `progress` is called after each round.
pub fn measure<B: Backend, T: Element>(
    group: &Group<B>,
    prepared: &Prepared<B, T>,
    case: &mut Case<B, T>,
    warmup: usize,
    iterations: usize,
    mut progress: impl FnMut(),
) -> Result<Times> {
    let Case { a, b, out, .. } = case;
    let mut samples: Vec<[f64; 4]> = Vec::new();
    for round in 0..warmup + iterations {
        let mut times = [0.0; 4];
        let mut variants: [usize; 4] = std::array::from_fn(|variant| variant);
        if round % 2 == 1 {
            variants.reverse();
        }
        for variant in variants {
            group.barrier()?;
            let begin = Instant::now();
            match variant {
                0 => prepared.matmul(a, b, out)?,
                1 => prepared.gather(a)?,
                2 => {
                    prepared.gather(a)?;
                    prepared.matmul(a, b, out)?;
                }
                _ => prepared.run(a, b, out)?,
            }
            group.synchronize()?;
            times[variant] = begin.elapsed().as_secs_f64() * 1e6;
        }
        if round >= warmup {
            samples.push(times);
        }
        progress();
    }
    let rounds = slowest(group, &samples)?;
    let [matmul, gather, sequential, fused] = medians(&rounds);
    let ratios: Vec<[f64; 1]> = rounds.iter().map(|times| [times[3] / times[2]]).collect();
    let [fused_to_sequential] = medians(&ratios);
    Ok(Times {
        matmul,
        gather,
        sequential,
        fused,
        ideal: matmul.max(gather),
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

/// The median of each column over the runs, of which there is one at least.
pub fn medians<const N: usize>(runs: &[[f64; N]]) -> [f64; N] {
    std::array::from_fn(|column| {
        let mut times: Vec<f64> = runs.iter().map(|run| run[column]).collect();
        times.sort_by(f64::total_cmp);
        times[times.len() / 2]
    })
}

/// Names and times, as a table.
pub fn table(rows: &[(&str, f64)]) -> Table {
    let mut table = Table::new();
    table.load_style(NOTHING);
    table.set_header(["", "median µs"]);
    for (name, time) in rows {
        table.add_row([name.to_string(), format!("{time:.0}")]);
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
    /// The arguments ask for what there is not.
    #[allow(dead_code)]
    Usage(&'static str),
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
            Failure::Wrong(check) => write!(f, "a wrong result: {check:?}"),
            Failure::Usage(reason) => f.write_str(reason),
        }
    }
}

/// Ends the program, in an error's own words if there is one.
pub fn exit(result: Result<(), Failure>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
