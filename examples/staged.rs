//! A stage-parallel gather and product with a bias, as in nvFuser's test (its #3606 and #3923). On D ranks, out[S, D, M
//! / (S · D), N] = linear(gather(a)[S, D, M / (S · D), K], b[N, K], bias[N]). The rows are gathered stage by stage.
//!
//! ```sh
//! cargo build --release --example staged
//! mpirun --oversubscribe -n 4 target/release/examples/staged
//! ```
//!
//! Any launcher works. Without one it launches four ranks. `--backend cuda` runs on GPUs (feature `cuda`).

use std::process::ExitCode;
use std::time::Instant;

use clap::{Parser, ValueEnum};
use gemmesh::error::Kind;
use gemmesh::{AllGatherMatmul, Backend, Group, Host, Result, bf16, launch};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rand_distr::StandardNormal;
use rayon::prelude::*;

/// Rounds whose results are compared with float64, and rounds that are timed.
const WARMUPS: usize = 5;
const ROUNDS: usize = 15;

/// Gathers stage by stage, multiplies, and adds a bias.
#[derive(Parser)]
struct Args {
    #[arg(long, default_value_t = 1024)]
    m: usize,
    #[arg(long, default_value_t = 1024)]
    n: usize,
    #[arg(long, default_value_t = 1024)]
    k: usize,
    /// The number of stages.
    #[arg(long, default_value_t = 8)]
    s: usize,
    /// The backend that runs the ranks.
    #[arg(long, value_enum, default_value_t = BackendName::Host)]
    backend: BackendName,
}

#[derive(Clone, Copy, ValueEnum)]
enum BackendName {
    Host,
    #[cfg(feature = "cuda")]
    Cuda,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let result = match (launch::is_rank(), args.backend) {
        (false, _) => launch::launch(4),
        (true, BackendName::Host) => run::<Host>(&args),
        #[cfg(feature = "cuda")]
        (true, BackendName::Cuda) => run::<gemmesh::Cuda>(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn run<B: Backend>(args: &Args) -> Result<()> {
    let group = Group::<B>::builder().from_env()?;
    let &Args { m, n, k, s, .. } = args;
    // The same on every rank, so that each can check its output.
    let all = normal(1, m * k);
    let (weight, bias) = (normal(2, n * k), normal(3, n));
    let mut a = group.sharded_staged::<bf16>(m, k, s)?;
    let own = a.blocks_of(group.rank());
    let own = own.iter().map(|rows| &all[rows.start * k..rows.end * k]);
    let own: Vec<bf16> = own.flatten().copied().collect();
    a.shard_mut().copy_from_host(&own)?;
    let b = group.upload(&weight, n, k)?;
    let added = group.upload(&bias, 1, n)?;
    let mut out = group.zeros(m, n)?;
    let expected = reference(&all, &weight, &bias, k);

    let linear = AllGatherMatmul::new().bias(&added).prepare(&a, n)?;
    let mut worst = 0.0f64;
    for _ in 0..WARMUPS {
        out.copy_from_host(&vec![bf16::NAN; m * n])?;
        linear.run(&a, &b, &mut out)?;
        worst = worst.max(error(&out.to_vec()?, &expected));
    }
    let worst = slowest(&group, worst)?;
    // One rounding takes half of this. The error of sums in f32 is far smaller.
    let allowed = 2f64.powi(-8);
    if worst.is_nan() || worst > allowed {
        return Err(Kind::System {
            action: "verify the product".into(),
            reason: format!("it is {worst:.2e} off, {allowed:.2e} is allowed"),
        }
        .on(group.rank()));
    }
    let mut times = Vec::new();
    for _ in 0..ROUNDS {
        group.barrier()?;
        let begin = Instant::now();
        linear.run(&a, &b, &mut out)?;
        group.synchronize()?;
        times.push(slowest(&group, begin.elapsed().as_secs_f64() * 1e6)?);
    }
    if group.rank() == 0 {
        let ranks = group.world_size();
        println!(
            "m = {m}, n = {n}, k = {k}, s = {s}, d = {ranks}, bf16 with bias, {} backend: the worst error of {WARMUPS} warm-ups is \
             {worst:.2e}",
            B::NAME
        );
        table(&mut times);
    }
    Ok(())
}

fn normal(seed: u64, count: usize) -> Vec<bf16> {
    let numbers = StdRng::seed_from_u64(seed).sample_iter::<f32, _>(StandardNormal);
    numbers.take(count).map(bf16::from_f32).collect()
}

/// The result in float64.
fn reference(a: &[bf16], b: &[bf16], bias: &[bf16], k: usize) -> Vec<f64> {
    let wide = |values: &[bf16]| -> Vec<f64> { values.iter().map(|x| x.to_f64()).collect() };
    let (a, b, bias) = (wide(a), wide(b), wide(bias));
    let row = |row: &[f64]| -> Vec<f64> {
        let columns = b.chunks_exact(k).zip(&bias);
        let dot = |column: &[f64]| row.iter().zip(column).map(|(x, y)| x * y).sum::<f64>();
        columns.map(|(column, bias)| bias + dot(column)).collect()
    };
    a.par_chunks_exact(k).flat_map_iter(row).collect()
}

/// The largest error, relative to the largest expected number. NaN if any number is NaN.
fn error(found: &[bf16], expected: &[f64]) -> f64 {
    let largest = expected
        .iter()
        .fold(0.0f64, |largest, x| largest.max(x.abs()));
    let errors = found.iter().zip(expected);
    let errors = errors.map(|(found, expected)| (found.to_f64() - expected).abs() / largest);
    errors.fold(0.0, |worst, error| {
        if error > worst || error.is_nan() {
            error
        } else {
            worst
        }
    })
}

/// The largest of all ranks'.
fn slowest<B: Backend>(group: &Group<B>, value: f64) -> Result<f64> {
    let all = group.all_gather_bytes(&value.to_le_bytes())?;
    let value = |bytes: &Vec<u8>| {
        bytes
            .as_slice()
            .try_into()
            .map_or(f64::NAN, f64::from_le_bytes)
    };
    Ok(all
        .iter()
        .map(value)
        .fold(f64::MIN, |x, y| if y > x || y.is_nan() { y } else { x }))
}

/// Prints the times as pytest-benchmark does.
fn table(times: &mut [f64]) {
    times.sort_by(f64::total_cmp);
    let count = times.len() as f64;
    let mean = times.iter().sum::<f64>() / count;
    let variance = times.iter().map(|time| (time - mean).powi(2)).sum::<f64>() / (count - 1.0);
    let quartile = |part: usize| times[(times.len() * part / 4).min(times.len() - 1)];
    println!("\n| time in us | Min | Max | Mean | StdDev | Median | IQR | OPS | Rounds |");
    println!("|---|--:|--:|--:|--:|--:|--:|--:|--:|");
    println!(
        "| allgather_matmul_stream_outermost | {:.1} | {:.1} | {mean:.1} | {:.1} | {:.1} | {:.1} | {:.1} | {} |",
        times[0],
        times[times.len() - 1],
        variance.sqrt(),
        quartile(2),
        quartile(3) - quartile(1),
        1e6 / mean,
        times.len()
    );
}
