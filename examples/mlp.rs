//! Layers of a gated, tensor-parallel MLP, as in Llama. Each rank keeps some rows of `x`, and a part of the three
//! weights.
//!
//! ```sh
//! cargo run --release --example mlp                                      # four ranks of the host
//! cargo run --release --features cuda --example mlp -- --backend cuda   # two GPUs
//! ```
//!
//! `h = silu(gather(x) · gateᵀ) * (gather(x) · upᵀ)` is one call of [`AllGatherMatmul`]. It is one gather and one
//! kernel, and neither product is written. Then `x = Σ h · downᵀ` by [`MatmulReduceScatter`] goes to the rows of `x`
//! that this rank owns, which are the next layer's input, without a copy between. The layers run twice: as gemmesh does
//! it, and with one step after the other.

mod numbers;

use std::time::Instant;

use clap::{Parser, ValueEnum};
use gemmesh::products::{Prepared, PreparedReduceScatter};
use gemmesh::trace::{Timeline, Trace};
use gemmesh::tuning::Route;
use gemmesh::{
    Activation, AllGatherMatmul, Backend, Group, Host, MatmulReduceScatter, Matrix, Result,
    ShardedMatrix, bf16,
};
use numbers::{product, random, wide};

const LAYERS: usize = 3;
/// Rows of each rank that are compared with float64.
const CHECKED: usize = 16;

/// Runs layers of an MLP: on four ranks of the host, threads of this process, or on two GPUs.
#[derive(Parser)]
struct Args {
    /// The backend that runs the ranks.
    #[arg(long, value_enum, default_value_t = BackendName::Host)]
    backend: BackendName,
    /// The most gigabytes per second that a rank of the host copies, to imitate a link between GPUs.
    #[arg(long, default_value_t = 0.1)]
    link: f64,
}

#[derive(Clone, Copy, ValueEnum)]
enum BackendName {
    Host,
    #[cfg(feature = "cuda")]
    Cuda,
}

fn main() -> Result<()> {
    let Args { backend, link } = Args::parse();
    match backend {
        BackendName::Host => {
            let builder = Group::<Host>::builder().link((link * 1e9) as usize);
            let size = Size {
                m: 1024,
                model: 512,
                hidden: 256,
            };
            let outcomes = builder.threads(4, |group| Layer::new(group, size)?.compare())?;
            outcomes[0].report(
                size,
                &format!("4 ranks of the host, each copying at most {link} GB/s (--link)"),
            )
        }
        #[cfg(feature = "cuda")]
        BackendName::Cuda => {
            if !gemmesh::launch::is_rank() {
                return gemmesh::launch::launch(2);
            }
            let group = Group::<gemmesh::Cuda>::from_env()?;
            let (rank, world) = (group.rank(), group.world_size());
            let size = Size {
                m: 8192,
                model: 8192,
                hidden: 28_672 / 8,
            };
            let outcome = Layer::new(group, size)?.compare()?;
            match rank {
                0 => outcome.report(size, &format!("{world} GPUs")),
                _ => Ok(()),
            }
        }
    }
}

/// The worst of the ranks' results, the same on every rank.
struct Outcome {
    /// The error of rows, relative to their size.
    error: f64,
    /// Milliseconds.
    overlapped: f64,
    sequential: f64,
    /// The timeline of one overlapped layer.
    timeline: Timeline,
}

impl Outcome {
    fn report(&self, Size { m, model, hidden }: Size, ranks: &str) -> Result<()> {
        let Outcome {
            error,
            overlapped,
            sequential,
            timeline,
        } = self;
        println!(
            "{LAYERS} layers, [{m}, {model}] tokens, {hidden} hidden features a rank, {ranks}"
        );
        println!("off by {error:.4} of their size from float64");
        println!(
            "overlapped {overlapped:.1} ms, one after the other {sequential:.1} ms: {:.0} % of the time",
            100.0 * overlapped / sequential
        );
        timeline.write_svg(
            "mlp.svg",
            "A layer: gather and multiply by gate and up, multiply by down and scatter",
        )?;
        println!("wrote mlp.svg, the timeline of a layer");
        assert!(*error < 0.02, "a layer is wrong");
        Ok(())
    }
}

/// Tokens, their features, and those of the hidden layer on each rank.
#[derive(Clone, Copy)]
struct Size {
    m: usize,
    model: usize,
    hidden: usize,
}

/// A rank's part of a layer, and its two products, prepared once.
struct Layer<B: Backend> {
    size: Size,
    group: Group<B>,
    x: ShardedMatrix<B, bf16>,
    gate: Matrix<B, bf16>,
    up: Matrix<B, bf16>,
    down: Matrix<B, bf16>,
    hidden: Matrix<B, bf16>,
    gather: Prepared<'static, B, bf16>,
    /// If partials are pushed, each block is sent while the next is made.
    pushed: PreparedReduceScatter<'static, B, bf16>,
    /// If they are pulled, all of them are made before.
    pulled: PreparedReduceScatter<'static, B, bf16>,
}

impl<B: Backend> Layer<B> {
    fn new(group: Group<B>, size: Size) -> Result<Layer<B>> {
        let Size {
            m,
            model,
            hidden: width,
        } = size;
        let [gate, up, down] = weights(group.rank(), group.world_size(), size);
        let x = group.sharded::<bf16>(m, model)?;
        let hidden = group.zeros::<bf16>(m, width)?;
        let gated = AllGatherMatmul::new().gated().activation(Activation::Silu);
        let gather = gated.prepare(&x, width)?;
        let chosen = MatmulReduceScatter::new().prepare(&hidden, model)?.config();
        let scatter = |config| {
            let sum = MatmulReduceScatter::new().config(config);
            sum.prepare(&hidden, model)
        };
        // On the host, and if ranks share GPUs, the library pulls unless it is asked to push.
        let route = if chosen.route == Route::Pull {
            Route::Push
        } else {
            chosen.route
        };
        Ok(Layer {
            size,
            pushed: scatter(chosen.with_route(route))?,
            pulled: scatter(chosen.with_route(Route::Pull))?,
            gate: group.upload(&gate, width, model)?,
            up: group.upload(&up, width, model)?,
            down: group.upload(&down, model, width)?,
            gather,
            hidden,
            x,
            group,
        })
    }

    fn run_overlapped(&mut self) -> Result<()> {
        let gate_and_up = [&self.gate, &self.up];
        self.gather.run(&self.x, gate_and_up, &mut self.hidden)?;
        self.pushed.run_into(&self.hidden, &self.down, &mut self.x)
    }

    fn run_in_sequence(&mut self) -> Result<()> {
        self.gather.gather(&self.x)?;
        let gate_and_up = [&self.gate, &self.up];
        self.gather.matmul(&self.x, gate_and_up, &mut self.hidden)?;
        self.pulled.run_into(&self.hidden, &self.down, &mut self.x)
    }

    /// As [`Layer::run_overlapped`], with a trace.
    fn run_traced(&mut self) -> Result<Trace> {
        let gate_and_up = [&self.gate, &self.up];
        let mut trace = self
            .gather
            .run_traced(&self.x, gate_and_up, &mut self.hidden)?;
        let sum = self
            .pushed
            .run_into_traced(&self.hidden, &self.down, &mut self.x)?;
        trace.extend(sum);
        Ok(trace)
    }

    /// Runs all layers. Returns milliseconds.
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

    /// Checks both ways, then times them.
    fn compare(mut self) -> Result<Outcome> {
        let (own, model) = (self.x.rows(), self.size.model);
        let input = random(own.start as u64, own.len() * model, 3f32.sqrt());
        let checked = 0..own.len().min(CHECKED) * model;
        let exact = reference(&input[checked.clone()], self.group.world_size(), self.size);
        let (mut off, mut size) = (0.0, 0.0);
        for overlapped in [true, false] {
            self.all(&input, overlapped)?;
            let found = &self.x.to_vec()?[own.start * model..];
            for (found, exact) in found[checked.clone()].iter().zip(&exact) {
                off += (f64::from(found.to_f32()) - exact).powi(2);
                size += exact.powi(2);
            }
        }
        let mut median = |overlapped| -> Result<f64> {
            let times = (0..7).map(|_| self.all(&input, overlapped));
            let mut times = times.collect::<Result<Vec<f64>>>()?;
            times.sort_by(f64::total_cmp);
            Ok(times[times.len() / 2])
        };
        let found = [(off / size).sqrt(), median(true)?, median(false)?];
        let trace = self.run_traced()?;
        let all = self
            .group
            .all_gather_bytes(&found.map(f64::to_le_bytes).concat())?;
        let worst = |index: usize| {
            let value = |rank: &Vec<u8>| {
                let bytes = rank[8 * index..].first_chunk().copied();
                f64::from_le_bytes(bytes.unwrap_or_default())
            };
            all.iter().map(value).fold(0.0, f64::max)
        };
        Ok(Outcome {
            error: worst(0),
            overlapped: worst(1),
            sequential: worst(2),
            timeline: Timeline::collect(&self.group, &trace)?,
        })
    }
}

/// A rank's parts of the weights: gate and up `[hidden, model]`, and down `[model, hidden]`. Their scale keeps the
/// scale of `x`.
fn weights(rank: usize, world: usize, Size { model, hidden, .. }: Size) -> [Vec<bf16>; 3] {
    // For x ~ N(0, 1), the square of silu(x) is 0.356 on average.
    let scale = |k: usize, square: f32| (3.0 / (k as f32 * square)).sqrt();
    let of = |number: u64, scale| random((3 * rank as u64 + number) << 32, hidden * model, scale);
    let [into, out] = [scale(model, 1.0), scale(world * hidden, 0.356)];
    [of(1, into), of(2, into), of(3, out)]
}

/// All layers of some rows in float64, with nothing rounded between them.
fn reference(input: &[bf16], world: usize, size: Size) -> Vec<f64> {
    let all: Vec<_> = (0..world)
        .map(|rank| weights(rank, world, size).map(|w| wide(&w)))
        .collect();
    let mut x = wide(input);
    for _ in 0..LAYERS {
        let mut sum = vec![0.0; x.len()];
        for [gate, up, down] in &all {
            let mut hidden = product(&x, gate, size.model);
            let up = product(&x, up, size.model);
            let gated = hidden.iter_mut().zip(up);
            gated.for_each(|(x, up)| *x = *x / (1.0 + (-*x).exp()) * up);
            let part = product(&hidden, down, size.hidden);
            sum.iter_mut().zip(part).for_each(|(sum, x)| *sum += x);
        }
        x = sum;
    }
    x
}
