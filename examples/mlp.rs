//! Layers of a tensor-parallel MLP: each rank keeps some rows of `x`, and a part of both weights.
//!
//! ```sh
//! cargo run --release --example mlp
//! ```
//!
//! `h = relu(gather(x) · upᵀ)` by [`all_gather_matmul`](gemmesh::all_gather_matmul), then `x = Σ h · downᵀ` by
//! [`MatmulReduceScatter`], into the rows of `x` that this rank owns: the next layer's input, with no copy between. Once as
//! gemmesh does it, and once with one step after the other.

use std::time::Instant;

use clap::Parser;
use gemmesh::trace::{Timeline, Trace};
use gemmesh::{
    AllGatherMatmul, Builder, Group, Host, MatmulReduceScatter, Matrix, Prepared,
    PreparedReduceScatter, Result, Route, ShardedMatrix, bf16,
};

const RANKS: usize = 4;
const LAYERS: usize = 3;
/// Tokens.
const M: usize = 1024;
/// Features, and those of the hidden layer on each rank.
const MODEL: usize = 512;
const HIDDEN: usize = 256;

/// Runs layers of an MLP on four ranks, threads of this process.
#[derive(Parser)]
struct Args {
    /// Gigabytes per second that a rank copies at the most, as if the ranks were on GPUs of their own.
    #[arg(long, default_value_t = 0.1)]
    link: f64,
}

fn main() -> Result<()> {
    let Args { link } = Args::parse();
    let builder = Builder::<Host>::new().link((link * 1e9) as usize);
    let ranks = builder.threads(RANKS, rank)?;
    let worst = |field: fn(&Outcome) -> f64| ranks.iter().map(field).fold(0.0, f64::max);
    let (error, fused, sequential) = (
        worst(|rank| rank.error),
        worst(|rank| rank.fused),
        worst(|rank| rank.sequential),
    );
    println!(
        "{LAYERS} layers, [{M}, {MODEL}] tokens, {RANKS} ranks of the host, each copying at most {link} GB/s (--link)"
    );
    println!("off by {error:.4} of their size from float64");
    println!(
        "overlapped {fused:.1} ms, one after the other {sequential:.1} ms: {:.0} % of the time",
        100.0 * fused / sequential
    );
    let title = format!("A layer: gather and multiply, relu, multiply and scatter; {RANKS} ranks");
    ranks[0].timeline.write_svg("mlp.svg", &title)?;
    println!("wrote mlp.svg, the timeline of a layer");
    assert!(error < 0.01, "a layer is wrong");
    Ok(())
}

/// What a rank found.
struct Outcome {
    /// How far its rows are off, as a part of their size.
    error: f64,
    /// Milliseconds.
    fused: f64,
    sequential: f64,
    /// Of one layer, overlapped; the same on every rank.
    timeline: Timeline,
}

/// A rank's part of a layer, and its two products, prepared once.
struct Layer {
    group: Group<Host>,
    x: ShardedMatrix<Host, bf16>,
    up: Matrix<Host, bf16>,
    down: Matrix<Host, bf16>,
    hidden: Matrix<Host, bf16>,
    gather: Prepared<'static, Host, bf16>,
    /// Where partials are pushed, each block is sent while the next is made;
    pushed: PreparedReduceScatter<'static, Host, bf16>,
    /// where they are pulled, all of them are made before.
    pulled: PreparedReduceScatter<'static, Host, bf16>,
}

impl Layer {
    fn run_overlapped(&mut self) -> Result<()> {
        self.gather.run(&self.x, &self.up, &mut self.hidden)?;
        relu(&mut self.hidden)?;
        self.pushed.run_into(&self.hidden, &self.down, &mut self.x)
    }

    fn run_in_sequence(&mut self) -> Result<()> {
        self.gather.gather(&self.x)?;
        self.gather.matmul(&self.x, &self.up, &mut self.hidden)?;
        relu(&mut self.hidden)?;
        self.pulled.run_into(&self.hidden, &self.down, &mut self.x)
    }

    /// As [`Layer::run_overlapped`], and what happened when.
    fn run_traced(&mut self) -> Result<Trace> {
        let mut trace = self
            .gather
            .run_traced(&self.x, &self.up, &mut self.hidden)?;
        relu(&mut self.hidden)?;
        let sum = self
            .pushed
            .run_into_traced(&self.hidden, &self.down, &mut self.x)?;
        trace.extend(sum);
        Ok(trace)
    }

    /// All layers. Returns milliseconds.
    fn all(&mut self, input: &[bf16], overlapped: bool) -> Result<f64> {
        self.x.shard_mut().copy_from_host(input)?;
        self.group.barrier()?;
        let begin = Instant::now();
        for _ in 0..LAYERS {
            match overlapped {
                true => self.run_overlapped()?,
                false => self.run_in_sequence()?,
            }
        }
        self.group.synchronize()?;
        Ok(begin.elapsed().as_secs_f64() * 1e3)
    }
}

/// A program on GPUs has a kernel for this.
fn relu(hidden: &mut Matrix<Host, bf16>) -> Result<()> {
    let mut values = hidden.to_vec()?;
    values.iter_mut().for_each(|x| *x = x.max(bf16::ZERO));
    hidden.copy_from_host(&values)
}

/// What each rank does.
fn rank(group: Group<Host>) -> Result<Outcome> {
    let [up, down] = weights(group.rank());
    let x = group.sharded::<bf16>(M, MODEL)?;
    let hidden = group.zeros::<bf16>(M, HIDDEN)?;
    let gather = AllGatherMatmul::new().prepare(&x, HIDDEN)?;
    let scatter = |route| {
        let config = gather.config().with_route(route);
        let sum = MatmulReduceScatter::new().config(config);
        sum.prepare(&hidden, MODEL)
    };
    let mut layer = Layer {
        pushed: scatter(Route::Push)?,
        pulled: scatter(Route::Pull)?,
        up: group.upload(&up, HIDDEN, MODEL)?,
        down: group.upload(&down, MODEL, HIDDEN)?,
        gather,
        hidden,
        x,
        group,
    };
    let own = layer.x.rows();
    let own = own.start * MODEL..own.end * MODEL;
    let input = random(0, M * MODEL, 1.0);
    let input = &input[own.clone()];

    let exact = reference(input);
    let (mut off, mut size) = (0.0, 0.0);
    for overlapped in [true, false] {
        layer.all(input, overlapped)?;
        let found = layer.x.to_vec()?;
        for (found, exact) in found[own.clone()].iter().zip(&exact) {
            off += (f64::from(found.to_f32()) - exact).powi(2);
            size += exact.powi(2);
        }
    }
    let mut median = |overlapped| -> Result<f64> {
        let times = (0..7).map(|_| layer.all(input, overlapped));
        let mut times = times.collect::<Result<Vec<f64>>>()?;
        times.sort_by(f64::total_cmp);
        Ok(times[times.len() / 2])
    };
    let (fused, sequential) = (median(true)?, median(false)?);
    let trace = layer.run_traced()?;
    Ok(Outcome {
        error: (off / size).sqrt(),
        fused,
        sequential,
        timeline: Timeline::collect(&layer.group, &trace)?,
    })
}

/// A rank's parts of the weights: `[HIDDEN, MODEL]` and `[MODEL, HIDDEN]`.
fn weights(rank: usize) -> [Vec<bf16>; 2] {
    let seed = 2 * rank as u64 + 1;
    [seed, seed + 1].map(|seed| random(seed, HIDDEN * MODEL, 0.1))
}

/// Uniform in `-scale..scale`.
fn random(seed: u64, count: usize, scale: f32) -> Vec<bf16> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    let values = (0..count).map(|_| bf16::from_f32(next() * scale));
    values.collect()
}

/// All layers of some rows in float64, with nothing rounded between them.
fn reference(input: &[bf16]) -> Vec<f64> {
    let wide = |values: &[bf16]| -> Vec<f64> { values.iter().map(|x| x.to_f64()).collect() };
    let mut x = wide(input);
    for _ in 0..LAYERS {
        let mut sum = vec![0.0; x.len()];
        for rank in 0..RANKS {
            let [up, down] = weights(rank).map(|weights| wide(&weights));
            let mut hidden = product(&x, &up, MODEL);
            hidden.iter_mut().for_each(|x| *x = x.max(0.0));
            let part = product(&hidden, &down, HIDDEN);
            sum.iter_mut().zip(part).for_each(|(sum, x)| *sum += x);
        }
        x = sum;
    }
    x
}

/// `a · bᵀ`, over `k`.
fn product(a: &[f64], b: &[f64], k: usize) -> Vec<f64> {
    let dot = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| x * y).sum();
    let rows = a.chunks_exact(k);
    rows.flat_map(|row| b.chunks_exact(k).map(move |column| dot(row, column)))
        .collect()
}
