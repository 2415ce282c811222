//! A tensor-parallel Llama with random weights: gemmesh's fused layers beside the same products and exchanges one after
//! the other.
//!
//! ```sh
//! cargo run --release -p gemmesh-candle --example llama                                       # two processes on the CPU
//! cargo run --release -p gemmesh-candle --example llama -- --threads --ranks 4                # four threads
//! cargo run --release -p gemmesh-candle --features cuda --example llama -- \
//!     --device cuda --size 8b --prompt 8192 --baseline nccl                                   # two GPUs
//! ```
//!
//! Each way takes a prompt and then decodes greedily. A prompt's tokens are spread over the ranks between the layers
//! (sequence parallelism): each rank has its own, and norms and residuals are of those alone. A decoded token is on
//! every rank. The logits of both ways are compared with candle's own layers in one process, in f32, with the same
//! weights; if they are off by more than rounding allows, the example fails.

mod linears;
mod model;
#[cfg(feature = "cuda")]
mod nccl;
mod weights;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use candle_core::{D, DType, Device, Tensor};
use clap::{Parser, ValueEnum};
use comfy_table::Table;
use gemmesh_candle::{Group, Host, TensorParallel, launch};
use linears::{Fused, Plain, Sequential, Weights};
use model::{Config, Linears, Model};

type Failure = Box<dyn std::error::Error + Send + Sync>;
type Result<T, E = Failure> = std::result::Result<T, E>;

/// A tensor-parallel Llama with random weights, checked against candle's own layers in one process, and timed.
#[derive(Parser)]
struct Args {
    /// The model: a Llama 3, or a tiny one.
    #[arg(long, value_enum, default_value_t = Size::Tiny)]
    size: Size,
    /// The number of ranks to start. A launcher's ranks ignore it.
    #[arg(long, default_value_t = 2)]
    ranks: usize,
    /// Run the ranks as threads of this process. Only on the CPU.
    #[arg(long)]
    threads: bool,
    /// The backend, or device, of the ranks.
    #[arg(long, value_enum, default_value_t = Place::Cpu)]
    device: Place,
    /// The layers that the fused ones are compared with.
    #[arg(long, value_enum, default_value_t = Baseline::Sequential)]
    baseline: Baseline,
    /// Tokens of the prompt.
    #[arg(long, default_value_t = 200)]
    prompt: usize,
    /// Tokens to decode.
    #[arg(long, default_value_t = 16)]
    decode: usize,
    /// Timed runs of each, of which the median is reported.
    #[arg(long, default_value_t = 5)]
    runs: usize,
    /// Also run the fused layers with weights that are quantised to fp8 when they are loaded.
    #[arg(long)]
    fp8: bool,
    /// Skip the comparison with one process, which needs the whole model in f32.
    #[arg(long)]
    no_check: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum Size {
    Tiny,
    #[value(name = "1b")]
    B1,
    #[value(name = "8b")]
    B8,
    #[value(name = "70b")]
    B70,
}

#[derive(Clone, Copy, ValueEnum)]
enum Place {
    Cpu,
    #[cfg(feature = "cuda")]
    Cuda,
}

#[derive(Clone, Copy, ValueEnum)]
enum Baseline {
    /// gemmesh's own collectives before and after its products.
    Sequential,
    /// Candle's products, and NCCL's all-reduce after them, of tokens that every rank has.
    #[cfg(feature = "cuda")]
    Nccl,
}

impl Size {
    fn config(self) -> Config {
        let config = |layers, model, hidden, heads, kv_heads, head, vocabulary| Config {
            layers,
            model,
            hidden,
            heads,
            kv_heads,
            head,
            vocabulary,
        };
        match self {
            Size::Tiny => config(2, 256, 704, 8, 4, 32, 1024),
            Size::B1 => config(16, 2048, 8192, 32, 8, 64, 128_256),
            Size::B8 => config(32, 4096, 14_336, 32, 8, 128, 128_256),
            Size::B70 => config(80, 8192, 28_672, 64, 8, 128, 128_256),
        }
    }
}

/// The way with layers of fp8.
const FP8: &str = "gemmesh, fp8";

/// What a way of running the model has come to.
struct Run {
    way: &'static str,
    /// That follow the prompt.
    tokens: Vec<u32>,
    /// Behind the prompt and behind each of the tokens but the last, the whole vocabulary's.
    logits: Vec<Vec<f32>>,
    prefill: Duration,
    /// What of it the layers' products take, with what is exchanged for them.
    products: Duration,
    /// Of one token.
    decode: Duration,
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<()> {
    // The whole of what ranks share is left before one of them checks, which the others need not wait for.
    let runs = match args.device {
        Place::Cpu if args.threads => {
            let ranks = Group::<Host>::threads(args.ranks, |group| on_cpu(args, group))?;
            ranks.into_iter().next().flatten()
        }
        _ if !launch::is_rank() => return Ok(launch::launch(args.ranks)?),
        Place::Cpu => on_cpu(args, Group::from_env()?)?,
        #[cfg(feature = "cuda")]
        Place::Cuda => {
            let group = Group::<gemmesh_candle::Cuda>::from_env()?;
            let device = Device::new_cuda_with_stream(group.device_ordinal())?;
            let capacity = args.prompt;
            rank(
                args,
                TensorParallel::new(group, &device, capacity)?,
                &device,
            )?
        }
    };
    let Some((world, runs)) = runs else {
        return Ok(());
    };
    report(args, world, &runs)
}

fn on_cpu(args: &Args, group: Group<Host>) -> Result<Option<(usize, Vec<Run>)>> {
    rank(
        args,
        TensorParallel::new(group, &Device::Cpu, args.prompt)?,
        &Device::Cpu,
    )
}

/// What each rank does. Rank 0 returns the number of ranks and what has come out.
fn rank(args: &Args, ranks: TensorParallel, device: &Device) -> Result<Option<(usize, Vec<Run>)>> {
    let config = args.size.config();
    let (rank, world) = (ranks.rank(), ranks.world_size());
    for (what, size) in [("hidden", config.hidden), ("vocabulary", config.vocabulary)] {
        if !size.is_multiple_of(world) {
            return Err(format!("{world} ranks can't share {what} = {size} evenly").into());
        }
    }
    let weights = Weights::new(config, &ranks, device)?;
    let prompt = prompt(args);
    let positions = args.prompt + args.decode;
    let fused = Fused::new(&ranks, &weights)?;
    let timer = Timer {
        args,
        ranks: &ranks,
        device,
        prompt: &prompt,
    };
    let model = Model::new(config, fused.clone(), positions, DType::BF16, device)?;
    let first = timer.run("gemmesh", model, None)?;
    let tokens = Some(first.tokens.as_slice());
    let second = match args.baseline {
        Baseline::Sequential => {
            let linears = Sequential::new(fused, &weights)?;
            let model = Model::new(config, linears, positions, DType::BF16, device)?;
            timer.run("gather, multiply, add up", model, tokens)?
        }
        #[cfg(feature = "cuda")]
        Baseline::Nccl => {
            let all_reduce = nccl::all_reduce(&ranks, device)?;
            let linears = Plain::new(&weights, DType::BF16, all_reduce)?;
            let model = Model::new(config, linears, positions, DType::BF16, device)?;
            timer.run("candle and NCCL", model, tokens)?
        }
    };
    let mut runs = vec![first, second];
    if args.fp8 {
        let linears = Fused::quantized(&ranks, &weights)?;
        let model = Model::new(config, linears, positions, DType::BF16, device)?;
        let tokens = runs[0].tokens.clone();
        runs.push(timer.run(FP8, model, Some(&tokens))?);
    }
    Ok((rank == 0).then_some((world, runs)))
}

struct Timer<'a> {
    args: &'a Args,
    ranks: &'a TensorParallel,
    device: &'a Device,
    prompt: &'a [u32],
}

impl Timer<'_> {
    /// Takes the prompt and decodes, as often as asked for, and once before. The tokens are those that are given, if
    /// any: so all ways have the same.
    fn run<L: Linears>(
        &self,
        way: &'static str,
        mut model: Model<L>,
        given: Option<&[u32]>,
    ) -> Result<Run> {
        let mut times = [Vec::new(), Vec::new(), Vec::new()];
        let (mut tokens, mut logits) = (Vec::new(), Vec::new());
        for run in 0..=self.args.runs {
            model.reset();
            (tokens, logits) = (Vec::new(), Vec::new());
            let prefill = self.time(|| {
                logits.push(model.forward(self.prompt, 1)?);
                self.choose(&logits[0])
            })?;
            let (mut next, prefill) = prefill;
            let (_, decode) = self.time(|| {
                for step in 0..self.args.decode {
                    next = given.map_or(next, |given| given[step]);
                    tokens.push(next);
                    let behind = model.forward(&[next], 1)?;
                    next = self.choose(&behind)?;
                    logits.push(behind);
                }
                Ok(())
            })?;
            let ((), products) = self.time(|| Ok(model.products(self.prompt)?))?;
            if run > 0 {
                times[0].push(prefill);
                times[1].push(products);
                times[2].push(decode / self.args.decode.max(1) as u32);
            }
        }
        let [prefill, products, decode] = times.map(median);
        let logits = logits.iter().map(|logits| self.whole(logits));
        Ok(Run {
            way,
            tokens,
            logits: logits.collect::<Result<_>>()?,
            prefill,
            products,
            decode,
        })
    }

    /// What `f` returns, and the time that it takes the slowest rank.
    fn time<R>(&self, f: impl FnOnce() -> Result<R>) -> Result<(R, Duration)> {
        self.ranks.synchronize()?;
        self.device.synchronize()?;
        self.ranks.barrier()?;
        let begin = Instant::now();
        let done = f()?;
        self.ranks.synchronize()?;
        self.device.synchronize()?;
        let nanoseconds = begin.elapsed().as_nanos() as u64;
        let all = self.ranks.all_gather_bytes(&nanoseconds.to_le_bytes())?;
        let all = all
            .iter()
            .filter_map(|bytes| bytes.as_slice().try_into().ok());
        let slowest = all.map(u64::from_le_bytes).max().unwrap_or(nanoseconds);
        Ok((done, Duration::from_nanos(slowest)))
    }

    /// The token with the largest logit of all ranks.
    fn choose(&self, logits: &Tensor) -> Result<u32> {
        let logits = logits.squeeze(0)?;
        let own = logits.argmax(D::Minus1)?.to_scalar::<u32>()?;
        let largest = logits
            .get(own as usize)?
            .to_dtype(DType::F32)?
            .to_scalar::<f32>()?;
        let token = self.ranks.rank() as u32 * logits.elem_count() as u32 + own;
        let bytes = [largest.to_le_bytes(), token.to_le_bytes()].concat();
        let all = self.ranks.all_gather_bytes(&bytes)?;
        let word = |bytes: &[u8], at| <[u8; 4]>::try_from(&bytes[at..at + 4]).unwrap_or_default();
        let all = all
            .iter()
            .map(|bytes| (f32::from_le_bytes(word(bytes, 0)), word(bytes, 4)));
        let (_, token) = all
            .max_by(|x, y| x.0.total_cmp(&y.0))
            .unwrap_or((0.0, [0; 4]));
        Ok(u32::from_le_bytes(token))
    }

    /// The logits of all ranks, one part behind the other.
    fn whole(&self, logits: &Tensor) -> Result<Vec<f32>> {
        let own = logits
            .to_dtype(DType::F32)?
            .flatten_all()?
            .to_vec1::<f32>()?;
        let bytes: Vec<u8> = own.iter().flat_map(|x| x.to_le_bytes()).collect();
        let all = self.ranks.all_gather_bytes(&bytes)?.concat();
        let words = all.chunks_exact(4);
        Ok(words
            .map(|word| f32::from_le_bytes([word[0], word[1], word[2], word[3]]))
            .collect())
    }
}

/// Prints the table, and fails if the logits are wrong.
fn report(args: &Args, world: usize, runs: &[Run]) -> Result<()> {
    let exact = if args.no_check {
        None
    } else {
        Some(reference(args, &runs[0].tokens)?)
    };
    let mut table = Table::new();
    table.set_header([
        "",
        "prefill, ms",
        "tokens/s",
        "of it products, ms",
        "decode, ms a token",
        "logits off by",
        "tolerance",
    ]);
    let mut wrong = None;
    for run in runs {
        let tolerance = tolerance(&args.size.config(), run.way == FP8);
        let off = exact.as_ref().map(|exact| farthest(&run.logits, exact));
        // What is no number is wrong too.
        if off.is_some_and(|off| off.is_nan() || off > tolerance) {
            wrong = Some(run.way);
        }
        table.add_row([
            run.way.to_string(),
            format!("{:.2}", run.prefill.as_secs_f64() * 1e3),
            format!("{:.0}", args.prompt as f64 / run.prefill.as_secs_f64()),
            format!("{:.2}", run.products.as_secs_f64() * 1e3),
            format!("{:.3}", run.decode.as_secs_f64() * 1e3),
            off.map_or("not checked".into(), |off| format!("{off:.4}")),
            format!("{tolerance:.4}"),
        ]);
    }
    println!(
        "a prompt of {} tokens and {} decoded, {world} ranks, medians of {}\n{table}",
        args.prompt, args.decode, args.runs
    );
    for run in runs.iter().filter(|run| run.way == FP8) {
        let off = farthest(&run.logits, &runs[0].logits);
        println!("logits with weights of fp8 are off by {off:.4} from those with weights of bf16");
    }
    match wrong {
        None => Ok(()),
        Some(way) => Err(format!("the logits of {way:?} are wrong").into()),
    }
}

/// The logits of candle's own layers in one process, in f32, behind the prompt and each of `tokens`: all of them at
/// once, with nothing cached.
fn reference(args: &Args, tokens: &[u32]) -> Result<Vec<Vec<f32>>> {
    let device = match args.device {
        Place::Cpu => Device::Cpu,
        #[cfg(feature = "cuda")]
        Place::Cuda => Device::new_cuda(0)?,
    };
    let config = args.size.config();
    let weights = Weights::whole(config, &device)?;
    let linears = Plain::new(&weights, DType::F32, Ok)?;
    drop(weights);
    let all = [prompt(args).as_slice(), tokens].concat();
    let mut model = Model::new(config, linears, all.len(), DType::F32, &device)?;
    Ok(model.forward(&all, tokens.len() + 1)?.to_vec2()?)
}

/// How far logits are from exact ones at the most, of any token: the length of the difference, as a part of that of the
/// exact.
fn farthest(logits: &[Vec<f32>], exact: &[Vec<f32>]) -> f64 {
    let length = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let off = |(found, exact): (&Vec<f32>, &Vec<f32>)| {
        let both = found.iter().zip(exact);
        let difference = length(&mut both.map(|(x, y)| f64::from(x - y)));
        difference / length(&mut exact.iter().map(|&x| f64::from(x)))
    };
    // Not f64::max, which drops what is no number.
    let all = logits.iter().zip(exact).map(off);
    all.fold(0.0, |most, off| if off <= most { most } else { off })
}

/// How far the logits of a model that rounds to bf16 may be from those of one that does not, as a part of their length.
///
/// On the way to a logit 15 tensors are rounded in each layer: two norms, the projections, the rotation and its two
/// factors, the scaled queries, scores, their softmax, what is seen, the gated product, and of both sums the parts, the
/// sums, and the sums with their residual. Three more follow: the last norm, what is gathered as it is, the logits.
/// Each rounding changes an element by a part of at most u = 2⁻⁸. What stands behind passes a change on as it passes on
/// the tensor: norms and products with random weights keep its part of the length, a residual makes it smaller.
/// Rounding errors do not know of one another, so R of them add up to √R · u, and not to R · u (Higham and Mary, 2019).
///
/// `fp8`: if layers are of fp8, both operands of four products of each layer are rounded to it too, by u = 2⁻⁴.
fn tolerance(config: &Config, fp8: bool) -> f64 {
    const UNIT_ROUNDOFF: f64 = 1.0 / (1 << 8) as f64;
    const OF_FP8: f64 = 1.0 / (1 << 4) as f64;
    let roundings = 15 * config.layers + 3;
    let of_fp8 = if fp8 { 8 * config.layers } else { 0 };
    (roundings as f64 * UNIT_ROUNDOFF.powi(2) + of_fp8 as f64 * OF_FP8.powi(2)).sqrt()
}

/// Random tokens, the same on every rank.
fn prompt(args: &Args) -> Vec<u32> {
    let vocabulary = args.size.config().vocabulary as u64;
    let mut state = 1u64;
    let next = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        ((state >> 33) % vocabulary) as u32
    };
    std::iter::repeat_with(next).take(args.prompt).collect()
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times.get(times.len() / 2).copied().unwrap_or_default()
}
