//! Times an operation beside its parts and beside perfect overlap.
//!
//! ```sh
//! cargo bench --bench operations -- --op all-gather-matmul --ranks 4 --m 2048 --n 2048 --k 2048
//! ```
//!
//! It launches its ranks, unless torchrun, mpirun or srun has launched them.

mod common;
#[cfg(feature = "cuda")]
#[path = "operations/cuda/mod.rs"]
mod cuda;
#[path = "operations/forms.rs"]
mod forms;
#[path = "operations/sums.rs"]
mod sums;
#[path = "operations/sweep.rs"]
mod sweep;

use std::fs::OpenOptions;
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{SystemTime, UNIX_EPOCH};

use clap::builder::RangedU64ValueParser;
use clap::{Parser, ValueEnum};
use common::gather::AllGather;
use common::time::{self, Time};
use common::{Check, Failure, Multiplied, Operation, Row};
use gemmesh::elements::{Number, OutputOf};
use gemmesh::error::Kind;
use gemmesh::fp8::Scaling;
use gemmesh::tuning::{Chunking, Explanation, Numerics, Route, TileShape};
use gemmesh::{Backend, Config, DType, Error, F8E4M3, Group, Host, Result, bf16, f16, launch};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Map, Value, json};
use sums::{AllReduce, ReduceScatter};
use sweep::Split;

/// The number of products that are compared with float64. They take seconds.
const PRODUCTS: usize = 1 << 33;

/// Times an operation beside its parts and beside perfect overlap.
#[derive(Parser)]
struct Args {
    /// The operation to time.
    #[arg(long, value_enum, default_value_t = Op::AllGatherMatmul)]
    op: Op,
    /// The backend that runs it.
    #[arg(long, value_enum, default_value_t = BackendName::Host)]
    backend: BackendName,
    /// Ranks to launch.
    #[arg(long, default_value_t = 4)]
    ranks: usize,
    /// Rows of all ranks [default: 2048 on the host, 4096 on GPUs].
    #[arg(long)]
    m: Option<usize>,
    /// Columns of a rank's output [default: 2048 on the host; on GPUs 6656, or 16384 for sums].
    #[arg(long)]
    n: Option<usize>,
    /// Columns of a rank's operands [default: 2048 on the host; on GPUs 16384, or 6656 for sums].
    #[arg(long)]
    k: Option<usize>,
    /// Times several shapes: large or small ones of a tensor-parallel Llama 3, or random ones or ones of models' layers,
    /// with a summary. Large: 4096, 8192 and 16384 rows of 8B, 70B and 405B. Small: powers of two up to 1024 rows of 8B
    /// and 70B (all-gather-matmul from 128 rows on). Models: Llama 3, Qwen3 32B and gpt-oss 120B, whole and split over
    /// the ranks (matmul: over up to 8), drawn at random.
    #[arg(long, value_enum, num_args = 0..=1, default_missing_value = "large", conflicts_with_all = ["m", "n", "k"])]
    sweep: Option<Sweep>,
    /// The seed of shapes that are drawn [default: 1].
    #[arg(long)]
    seed: Option<u64>,
    /// The number of shapes that are drawn [default: 20].
    #[arg(long, value_parser = RangedU64ValueParser::<usize>::new().range(1..))]
    count: Option<usize>,
    /// Uses no table of measured winners, neither the library's nor the one that GEMMESH_TUNED names.
    #[cfg(feature = "cuda")]
    #[arg(long)]
    no_table: bool,
    /// The most CTAs of a kernel: Builder::max_ctas.
    #[cfg(feature = "cuda")]
    #[arg(long)]
    max_ctas: Option<usize>,
    /// Times every configuration that may be the fastest, and appends the fastest to this file. Programs use the file
    /// if GEMMESH_TUNED names it.
    #[cfg(feature = "cuda")]
    #[arg(long)]
    tune: Option<PathBuf>,
    /// What the bits of products may depend on: Builder::numerics.
    #[arg(long, value_enum, default_value_t = NumericsName::Fast)]
    numerics: NumericsName,
    /// Type of the operands' elements. Sweeps of e4m3 have N and K that are multiples of 16.
    #[arg(long, value_enum, default_value_t = DTypeName::Bf16)]
    dtype: DTypeName,
    /// The values of e4m3 that share a scale. Scales of rows are replicated. Those of blocks are gathered with the rows, so
    /// K of drawn gathers is then a multiple of 512 [default: tensor].
    #[arg(long, value_enum)]
    scales: Option<ScalesName>,
    /// Type of the output's elements. Products of bf16 and f16 have their own type; see --epilogue f32 [default: bf16, or f16
    /// of f16].
    #[arg(long, value_enum)]
    out: Option<OutName>,
    /// Also times cuBLASLt's products of e4m3 with fast accumulation, whose sums have fewer bits. Matmul and operations with
    /// a form sum up so, too (Accumulation::Fast), beside plain products with promoted sums.
    #[arg(long)]
    fast_accumulation: bool,
    /// Rows of a tile.
    #[arg(long)]
    tile_m: Option<usize>,
    /// Columns of a tile.
    #[arg(long)]
    tile_n: Option<usize>,
    /// Stages of a CTA's ring of loads.
    #[arg(long)]
    stages: Option<usize>,
    /// CTAs of a cluster that share the loads of b.
    #[arg(long)]
    cluster_m: Option<usize>,
    /// CTAs of a cluster that share the loads of a.
    #[arg(long)]
    cluster_n: Option<usize>,
    /// CTAs that share a tile, each with a part of K.
    #[arg(long)]
    split_k: Option<usize>,
    /// Slices of K that are multiplied apart and added through memory.
    #[arg(long)]
    k_slices: Option<usize>,
    /// Depth of a step through K.
    #[arg(long)]
    tile_k: Option<usize>,
    /// Tile rows that are walked together.
    #[arg(long)]
    group_m: Option<usize>,
    /// Chunks of a shard.
    #[arg(long)]
    chunks: Option<usize>,
    /// Chunks of the shard that comes last.
    #[arg(long)]
    last_chunks: Option<usize>,
    /// True if the very last chunk comes in two parts along K.
    #[arg(long)]
    cut_last: Option<bool>,
    /// Stages of the gather. The gathered matrix is [stages, ranks, M / (stages · ranks), K].
    #[arg(long, default_value_t = 1)]
    gather_stages: usize,
    /// The route by which rows move.
    #[arg(long, value_enum)]
    route: Option<RouteName>,
    /// True if partial sums that are stored are stored after the product.
    #[arg(long)]
    product_first: Option<bool>,
    /// Multiplies with several weights that share N in these parts, such as 4,1,1 for Q, K and V.
    #[arg(long, value_delimiter = ',')]
    weights: Vec<usize>,
    /// Steps between the product and its rounding.
    #[arg(long, value_enum, value_delimiter = ',')]
    epilogue: Vec<forms::Epilogue>,
    /// The layout of weights, [N, K] or [K, N].
    #[arg(long, value_enum, default_value_t = forms::Layouts::Nk)]
    b_layout: forms::Layouts,
    /// Timed rounds.
    #[arg(long, default_value_t = 20, value_parser = RangedU64ValueParser::<usize>::new().range(1..))]
    iters: usize,
    /// Rounds before the timed ones.
    #[arg(long, default_value_t = 2)]
    warmup: usize,
    /// Appends each result to this file, as one line of JSON.
    #[arg(long)]
    json: Option<PathBuf>,
    /// Draws a timeline of one fused run into this SVG file, and writes a trace for Perfetto beside it.
    #[cfg(feature = "timeline")]
    #[arg(long)]
    trace: Option<PathBuf>,
    /// Given by cargo bench.
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Op {
    /// Each rank's own.
    Matmul,
    AllGatherMatmul,
    /// all_gather_and_consume, with cuBLASLt as the consumer.
    Consume,
    MatmulReduceScatter,
    /// produce_and_reduce_scatter, with cuBLASLt as the producer.
    Produce,
    MatmulAllReduce,
    /// all_gather, reduce_scatter, all_reduce, all_to_all and broadcast, from a kilobyte a rank on.
    Collectives,
    /// The products of layers of Llama 3 for few rows, back to back from a graph, whole and split. Each rank's own.
    Decoding,
}

#[derive(Clone, Copy, ValueEnum)]
enum BackendName {
    Host,
    #[cfg(feature = "cuda")]
    Cuda,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum DTypeName {
    Bf16,
    F16,
    E4m3,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum OutName {
    Bf16,
    F16,
    F32,
    E4m3,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum ScalesName {
    /// There are no scales.
    None,
    /// All values of an operand.
    Tensor,
    /// A row of `a`, or of the weight.
    Row,
    /// 128 columns of a row of `a`, and 128 × 128 values of the weight.
    Block,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum NumericsName {
    Fast,
    Invariant,
}

#[derive(Clone, Copy, ValueEnum)]
enum Sweep {
    Large,
    Small,
    Random,
    Models,
}

impl Sweep {
    /// Whether its shapes are drawn, and each has a line of a table.
    fn is_drawn(self) -> bool {
        matches!(self, Sweep::Random | Sweep::Models)
    }
}

#[derive(Clone, Copy, ValueEnum)]
enum RouteName {
    Pull,
    Push,
    Store,
}

impl From<RouteName> for Route {
    fn from(name: RouteName) -> Route {
        match name {
            RouteName::Pull => Route::Pull,
            RouteName::Push => Route::Push,
            RouteName::Store => Route::Store,
        }
    }
}

impl Args {
    /// Refuses arguments that clap can't check.
    fn check(&self) -> Result<(), Failure> {
        if self.gather_stages != 1 && !matches!(self.op, Op::AllGatherMatmul | Op::Consume) {
            return Err(Failure::Usage(
                "--gather-stages: only with --op all-gather-matmul or consume",
            ));
        }
        let draws = self.seed.is_some() || self.count.is_some();
        if draws && !self.sweep.is_some_and(Sweep::is_drawn) {
            return Err(Failure::Usage(
                "--seed and --count: only with --sweep random or models",
            ));
        }
        let is_large = matches!(self.sweep, Some(Sweep::Models));
        if is_large && matches!(self.backend, BackendName::Host) {
            return Err(Failure::Usage(
                "--sweep models: its products take hours on the host",
            ));
        }
        self.check_types()
    }

    /// Refuses types and scales that don't fit the operation or each other.
    fn check_types(&self) -> Result<(), Failure> {
        let refuse = |holds: bool, reason| match holds {
            true => Err(Failure::Usage(reason)),
            false => Ok(()),
        };
        let own = match self.dtype {
            DTypeName::Bf16 => Some(OutName::Bf16),
            DTypeName::F16 => Some(OutName::F16),
            DTypeName::E4m3 => None,
        };
        if own.is_some() {
            let has_scales = self.scales_name() != "none" || self.fast_accumulation;
            refuse(
                has_scales,
                "--scales and --fast-accumulation: only with --dtype e4m3",
            )?;
            return refuse(
                self.out.is_some_and(|out| Some(out) != own),
                "--out: other than --dtype only with --dtype e4m3; --epilogue f32 makes f32 of the others",
            );
        }
        let is_product = matches!(
            self.op,
            Op::Matmul | Op::AllGatherMatmul | Op::MatmulReduceScatter | Op::MatmulAllReduce
        );
        refuse(
            !is_product,
            "--dtype e4m3: only of matmul, all-gather-matmul, matmul-reduce-scatter and matmul-all-reduce",
        )?;
        refuse(
            self.op == Op::MatmulAllReduce && self.out() != OutName::Bf16,
            "--out: the sums of matmul-all-reduce are bf16 if --dtype is e4m3",
        )?;
        refuse(
            self.b_layout != forms::Layouts::Nk,
            "--b-layout kn: weights of e4m3 are [N, K]",
        )?;
        refuse(
            self.epilogue.contains(&forms::Epilogue::F32),
            "--epilogue f32: with --dtype e4m3, give --out f32",
        )?;
        refuse(
            self.fast_accumulation && matches!(self.backend, BackendName::Host),
            "--fast-accumulation: of cuBLASLt, so it needs --backend cuda",
        )?;
        #[cfg(feature = "cuda")]
        refuse(self.tune.is_some(), "--tune: only of bf16 and f16")?;
        Ok(())
    }

    /// How many values share a scale.
    fn scaling(&self) -> Scaling {
        match (self.scales, self.dtype) {
            (Some(ScalesName::Tensor), _) | (None, DTypeName::E4m3) => Scaling::Tensor,
            (Some(ScalesName::Row), _) => Scaling::Rows,
            (Some(ScalesName::Block), _) => Scaling::Blocks,
            (Some(ScalesName::None) | None, _) => Scaling::None,
        }
    }

    /// The same in words.
    fn scales_name(&self) -> &'static str {
        match self.scaling() {
            Scaling::None => "none",
            Scaling::Tensor => "tensor",
            Scaling::Rows => "row",
            _ => "block",
        }
    }

    fn out(&self) -> OutName {
        self.out.unwrap_or(match self.dtype {
            DTypeName::Bf16 | DTypeName::E4m3 => OutName::Bf16,
            DTypeName::F16 => OutName::F16,
        })
    }

    /// What N and K of drawn shapes are multiples of, as GPUs want them.
    fn multiples(&self) -> [usize; 2] {
        match (self.dtype, self.op, self.scaling()) {
            // A row of the scales that are gathered has a multiple of 16 bytes.
            (DTypeName::E4m3, Op::AllGatherMatmul, Scaling::Blocks) => [16, 512],
            (DTypeName::E4m3, ..) => [16, 16],
            _ => [1, 1],
        }
    }

    /// The group that the arguments ask for.
    fn group<B: Backend>(&self) -> Result<Group<B>> {
        let builder = Group::<B>::builder().numerics(match self.numerics {
            NumericsName::Fast => Numerics::Fast,
            NumericsName::Invariant => Numerics::Invariant,
        });
        #[cfg(feature = "cuda")]
        let builder = match self.max_ctas {
            Some(most) => builder.max_ctas(most),
            None => builder,
        };
        builder.from_env()
    }

    /// True if the arguments ask for a product that is not of the plain form, or for one of each rank alone, which is
    /// compared with the same.
    fn has_form(&self) -> bool {
        let plain = self.weights.is_empty() && self.epilogue.is_empty();
        self.op == Op::Matmul || !plain || self.b_layout != forms::Layouts::Nk
    }

    /// M, N and K of each run.
    fn shapes(&self) -> Vec<[usize; 3]> {
        /// N and K of the first half of an MLP on each rank. The second half has them the other way round.
        const LAYERS: [[usize; 2]; 3] = [[1792, 4096], [3584, 8192], [6656, 16384]];
        let of = |m: usize, [n, k]: [usize; 2]| match self.op {
            Op::Matmul | Op::AllGatherMatmul | Op::Consume => [m, n, k],
            _ => [m, k, n],
        };
        let each = |layers: &[[usize; 2]], rows: &[usize]| {
            let each = layers
                .iter()
                .flat_map(|&layer| rows.iter().map(move |&m| of(m, layer)));
            each.collect()
        };
        let smallest = match self.op {
            Op::AllGatherMatmul | Op::Consume => 7,
            _ => 0,
        };
        let small: Vec<usize> = (smallest..=10).map(|exponent| 1 << exponent).collect();
        let (seed, count) = (self.seed.unwrap_or(1), self.count.unwrap_or(20));
        match self.sweep {
            Some(Sweep::Large) => each(&LAYERS, &[4096, 8192, 16384]),
            Some(Sweep::Small) => each(&LAYERS[..2], &small),
            Some(Sweep::Random) => {
                let largest = match self.backend {
                    BackendName::Host => sweep::LARGEST_ON_HOST,
                    #[cfg(feature = "cuda")]
                    BackendName::Cuda => sweep::LARGEST,
                };
                let shapes = sweep::draw(seed, count, largest).into_iter();
                shapes
                    .map(|shape| sweep::rounded_up(shape, self.multiples()))
                    .collect()
            }
            Some(Sweep::Models) => {
                let (splits, parts): (&[Split], &[usize]) = match self.op {
                    Op::Matmul => (&[Split::Columns, Split::Depth], &[1, 2, 4, 8]),
                    Op::AllGatherMatmul | Op::Consume => (&[Split::Columns], &[self.ranks]),
                    _ => (&[Split::Depth], &[self.ranks]),
                };
                let mut shapes = sweep::draw_of_models(seed, usize::MAX, splits, parts);
                shapes.retain(|&shape| shape == sweep::rounded_up(shape, self.multiples()));
                shapes.truncate(count);
                shapes
            }
            None => {
                let [m, n, k] = match self.backend {
                    BackendName::Host => [2048; 3],
                    #[cfg(feature = "cuda")]
                    BackendName::Cuda => of(4096, LAYERS[2]),
                };
                vec![[
                    self.m.unwrap_or(m),
                    self.n.unwrap_or(n),
                    self.k.unwrap_or(k),
                ]]
            }
        }
    }

    /// The configuration that the arguments ask for. The default fills the rest.
    fn config(&self, default: Config) -> Config {
        let tile = TileShape::new(
            self.tile_m.unwrap_or(default.tile.m),
            self.tile_n.unwrap_or(default.tile.n),
            self.tile_k.unwrap_or(default.tile.k),
        );
        let last = self.last_chunks.or(self.chunks);
        let config = Config::new(
            tile.with_stages(self.stages.unwrap_or(default.tile.stages))
                .with_cluster(
                    self.cluster_m.unwrap_or(default.tile.cluster_m),
                    self.cluster_n.unwrap_or(default.tile.cluster_n),
                )
                .with_split_k(self.split_k.unwrap_or(default.tile.split_k))
                .with_k_slices(self.k_slices.unwrap_or(default.tile.k_slices))
                .with_group_m(self.group_m.unwrap_or(default.tile.group_m)),
            Chunking::new(self.chunks.unwrap_or(default.chunking.count))
                .with_last(last.unwrap_or(default.chunking.last))
                .with_cut_last(self.cut_last.unwrap_or(default.chunking.cut_last)),
            self.route.map_or(default.route, Route::from),
        );
        config.with_product_first(self.product_first.unwrap_or(default.product_first))
    }
}

fn main() -> ExitCode {
    let args = Args::parse();
    #[cfg(feature = "cuda")]
    if args.no_table {
        use_no_table();
    }
    common::exit(args.check().and_then(|()| launch_or_run(&args)))
}

/// Tells the library, and the ranks that this process launches, to use no table of measured winners.
#[cfg(feature = "cuda")]
#[allow(unsafe_code)]
fn use_no_table() {
    // SAFETY: this process has no other thread yet.
    unsafe { std::env::set_var("GEMMESH_TUNED", "none") };
}

fn launch_or_run(args: &Args) -> Result<(), Failure> {
    /// Runs products of the types that the arguments name.
    macro_rules! products {
        ($backend:ty, $clock:ty) => {
            match (args.dtype, args.out()) {
                (DTypeName::Bf16, _) => run_op::<$backend, bf16, bf16, $clock>(args),
                (DTypeName::F16, _) => run_op::<$backend, f16, f16, $clock>(args),
                (DTypeName::E4m3, OutName::Bf16) => run_op::<$backend, F8E4M3, bf16, $clock>(args),
                (DTypeName::E4m3, OutName::F16) => run_op::<$backend, F8E4M3, f16, $clock>(args),
                (DTypeName::E4m3, OutName::F32) => run_op::<$backend, F8E4M3, f32, $clock>(args),
                (DTypeName::E4m3, OutName::E4m3) => {
                    run_op::<$backend, F8E4M3, F8E4M3, $clock>(args)
                }
            }
        };
    }
    if !launch::is_rank() {
        return launch::launch(args.ranks).map_err(Failure::from);
    }
    match (args.backend, args.op) {
        (BackendName::Host, _) => products!(Host, forms::Wall),
        #[cfg(feature = "cuda")]
        (BackendName::Cuda, Op::Consume | Op::Produce) if !args.has_form() => match args.dtype {
            DTypeName::F16 => run_with_functions::<f16>(args),
            _ => run_with_functions::<bf16>(args),
        },
        #[cfg(feature = "cuda")]
        (BackendName::Cuda, Op::Collectives | Op::Decoding) if !args.has_form() => {
            let group = args.group::<gemmesh::Cuda>()?;
            let (rounds, json) = ([args.warmup, args.iters], args.json.as_deref());
            match args.op {
                Op::Collectives => cuda::collectives::run(&group, rounds, json),
                _ => cuda::decoding::run(&group, rounds, json),
            }
        }
        #[cfg(feature = "cuda")]
        (BackendName::Cuda, _) => products!(gemmesh::Cuda, cuda::Instruments),
    }
}

/// Runs an operation whose products the caller's functions make.
#[cfg(feature = "cuda")]
fn run_with_functions<T: Multiplied + gemmesh::elements::Half>(args: &Args) -> Result<(), Failure> {
    match args.op {
        Op::Consume => run::<gemmesh::Cuda, T, cuda::Consume<T>>(args),
        _ => run::<gemmesh::Cuda, T, cuda::Produce<T>>(args),
    }
}

/// An operation that is timed on a backend.
trait Timed<B: Backend, T: Multiplied>: Operation<B, T> {
    /// The tools that time all shapes. Making them may take seconds.
    type Instruments;

    /// Makes them. Collective.
    fn instruments(group: &Group<B>) -> Result<Self::Instruments>;

    fn time(
        &mut self,
        instruments: &Self::Instruments,
        prepared: &Self::Prepared,
        args: &Args,
        progress: impl FnMut(),
    ) -> Result<Timing, Failure>;

    /// Appends the fastest configuration for a shape to a file.
    #[cfg(feature = "cuda")]
    fn tune(_: &Group<B>, _: [usize; 3], _: &Path) -> Result<(), Failure> {
        Err(Failure::Usage("--tune: this backend has nothing to tune"))
    }
}

/// The report on a shape.
struct Run {
    shape: [usize; 3],
    explanation: Explanation,
    check: Check,
    timing: Timing,
}

/// Its times, in microseconds.
struct Timing {
    rows: Vec<Row>,
    /// Further fields of the JSON.
    more: Value,
    /// The baseline, if it can be timed here.
    baseline: Option<(&'static str, Time)>,
    fused: f64,
    ideal: Time,
    /// A note about the rows.
    note: Option<&'static str>,
}

impl Timing {
    fn get(&self, key: &str) -> Time {
        let row = self.rows.iter().find(|row| row.key == key);
        row.map_or(Time::Absent, |row| row.time)
    }
}

impl Run {
    /// The times that a line of a sweep shows.
    fn in_short(&self) -> sweep::Times {
        let timing = &self.timing;
        sweep::Times {
            alone: timing.get("matmul_us"),
            cublaslt: timing.get("cublaslt_us"),
            fast: timing.get("cublaslt_fast_us"),
            baseline: timing.baseline.map_or(Time::Absent, |(_, time)| time),
            fused: timing.fused,
            ideal: timing.ideal,
            predicted: self.explanation.micros().into(),
        }
    }
}

impl<T: Multiplied, O: Operation<Host, T>> Timed<Host, T> for O {
    type Instruments = Group<Host>;

    fn instruments(group: &Group<Host>) -> Result<Group<Host>> {
        Ok(group.clone())
    }

    fn time(
        &mut self,
        group: &Group<Host>,
        prepared: &O::Prepared,
        args: &Args,
        progress: impl FnMut(),
    ) -> Result<Timing, Failure> {
        let (warmup, iters) = (args.warmup, args.iters);
        let times = common::measure(group, self, prepared, warmup, iters, progress)?;
        Ok(Timing {
            more: json!({ "fused_to_sequential": times.fused_to_sequential }),
            baseline: Some((O::SEQUENTIAL, times.sequential.into())),
            fused: times.fused,
            ideal: times.ideal.into(),
            rows: times.rows,
            note: None,
        })
    }
}

fn run_op<B, T, O, C>(args: &Args) -> Result<(), Failure>
where
    B: Backend,
    T: Multiplied,
    O: OutputOf<T>,
    C: forms::Clock<B, T>,
    AllGather<B, T, O>: Timed<B, T>,
    ReduceScatter<B, T, O>: Timed<B, T>,
    AllReduce<B, T>: Timed<B, T>,
{
    if args.has_form() {
        return forms::run::<B, T, O, C>(args);
    }
    match args.op {
        Op::Matmul => Err(Failure::Usage("--op matmul: is timed as a form")),
        Op::AllGatherMatmul => run::<B, T, AllGather<B, T, O>>(args),
        Op::Consume | Op::Produce | Op::Collectives | Op::Decoding => Err(Failure::Usage(
            "--op consume, produce, collectives and decoding: beside cuBLASLt and NCCL, so they need --backend cuda",
        )),
        Op::MatmulReduceScatter => run::<B, T, ReduceScatter<B, T, O>>(args),
        Op::MatmulAllReduce => run::<B, T, AllReduce<B, T>>(args),
    }
}

fn run<B: Backend, T: Multiplied, O: Timed<B, T>>(args: &Args) -> Result<(), Failure> {
    let group = args.group::<B>()?;
    #[cfg(feature = "cuda")]
    if let Some(path) = &args.tune {
        let mut shapes = args.shapes().into_iter();
        return shapes.try_for_each(|shape| O::tune(&group, shape, path));
    }
    let instruments = O::instruments(&group)?;
    match args.sweep {
        Some(sweep) if sweep.is_drawn() => run_drawn::<B, T, O>(args, &group, &instruments),
        _ => run_each::<B, T, O>(args, &group, &instruments),
    }
}

/// Reports each shape at length.
fn run_each<B: Backend, T: Multiplied, O: Timed<B, T>>(
    args: &Args,
    group: &Group<B>,
    instruments: &O::Instruments,
) -> Result<(), Failure> {
    for shape in args.shapes() {
        let bar = progress(group, args.warmup + args.iters, "rounds");
        let tick = || bar.inc(1);
        let run = bench::<B, T, O>(args, group, instruments, shape, PRODUCTS, tick)
            .map_err(|failure| failure.of(O::describe(shape)))?;
        bar.finish_and_clear();
        if group.rank() == 0 {
            report::<B, T, O>(args, group, &run);
            record::<B, T, O>(args, group, &run)?;
        }
        group.barrier()?;
    }
    Ok(())
}

/// Reports each shape on a line, and then a summary.
fn run_drawn<B: Backend, T: Multiplied, O: Timed<B, T>>(
    args: &Args,
    group: &Group<B>,
    instruments: &O::Instruments,
) -> Result<(), Failure> {
    /// There are many shapes. This many products take a fraction of a second.
    const PRODUCTS: usize = 1 << 30;
    let shapes = args.shapes();
    let bar = progress(group, shapes.len(), "shapes");
    let mut lines = Vec::new();
    for (index, shape) in shapes.into_iter().enumerate() {
        let run = bench::<B, T, O>(args, group, instruments, shape, PRODUCTS, || {})
            .map_err(|failure| failure.of(O::describe(shape)))?;
        let line = sweep::Line {
            shape,
            config: run.explanation.config,
            times: run.in_short(),
        };
        if group.rank() == 0 {
            bar.suspend(|| {
                if index == 0 {
                    introduce::<B, T, O>(args, group, &run);
                }
                println!("{}", line.row(index + 1));
            });
            record::<B, T, O>(args, group, &run)?;
        }
        lines.push(line);
        bar.inc(1);
        group.barrier()?;
    }
    bar.finish_and_clear();
    if group.rank() == 0 {
        println!("\n{}", sweep::table(&sweep::summary(&lines)));
        println!(
            "\nverified: all elements that were compared agree with float64 to within {}",
            allowance::<B, T>(O::OUT)
        );
    }
    Ok(())
}

/// The types of a product, and its scales if it has any.
fn types<T: Number>(args: &Args, out: DType) -> String {
    let (dtype, scales) = (T::DTYPE, args.scales_name());
    match dtype.is_fp8() {
        true => format!("{dtype}, out {out}, scales {scales}"),
        false if dtype == out => dtype.to_string(),
        false => format!("{dtype}, out {out}"),
    }
}

/// What an element may be off by, in words.
fn allowance<B: Backend, T: Number>(out: DType) -> String {
    match T::DTYPE.is_fp8() && B::NAME != "host" {
        true => format!("{out}'s rounding and the bits that tensor cores drop of fp8"),
        false => format!("{out}'s rounding"),
    }
}

/// Prints the head of the table of shapes that were drawn.
fn introduce<B: Backend, T: Multiplied, O: Operation<B, T>>(
    args: &Args,
    group: &Group<B>,
    run: &Run,
) {
    let timing = &run.timing;
    let (world, types) = (group.world_size(), types::<T>(args, O::OUT));
    println!("\n{}, {} backend, {world} ranks, {types}", O::NAME, B::NAME);
    println!("microseconds; alone: the product without communication");
    if let Some((name, _)) = timing.baseline {
        println!("baseline: {name}");
    }
    if let Some(note) = timing.note {
        println!("{note}");
    }
    println!("\n{}", sweep::head(&run.in_short()));
}

/// Verifies a shape by comparing at most about `products` products, and times it.
fn bench<B: Backend, T: Multiplied, O: Timed<B, T>>(
    args: &Args,
    group: &Group<B>,
    instruments: &O::Instruments,
    shape: [usize; 3],
    products: usize,
    progress: impl FnMut(),
) -> Result<Run, Failure> {
    let mut operation = O::scaled(group, shape, args.gather_stages, args.scaling())?;
    let default = O::config(&operation.prepare(None)?);
    let config = args.config(default);
    let prepared = operation.prepare(Some(config))?;
    let check = verify(group, &mut operation, products, |operation| {
        operation.run(&prepared)
    })?;
    #[cfg(feature = "timeline")]
    if let Some(path) = &args.trace {
        // The first run with a trace loads what it needs.
        operation.trace(&prepared)?;
        let trace = operation.trace(&prepared)?;
        let timeline = gemmesh::trace::Timeline::collect(group, &trace)?;
        if group.rank() == 0 {
            let ([m, n, k], world) = (shape, group.world_size());
            let types = types::<T>(args, O::OUT);
            let title = format!("{}, {world} ranks: {m}×{n}×{k} {types}", O::NAME);
            timeline.write_svg(path, &title)?;
            timeline.write_chrome(path.with_extension("json"))?;
        }
    }
    let timing = operation.time(instruments, &prepared, args, progress)?;
    Ok(Run {
        shape,
        explanation: O::explain(&prepared),
        check,
        timing,
    })
}

/// Runs an operation on poisoned memory and compares it with float64, on every rank.
fn verify<B: Backend, T: Multiplied, O: Operation<B, T>>(
    group: &Group<B>,
    operation: &mut O,
    products: usize,
    run: impl FnOnce(&mut O) -> Result<()>,
) -> Result<Check, Failure> {
    operation.poison()?;
    group.barrier()?;
    run(operation)?;
    let check = operation.check(products)?.everywhere(group)?;
    if check.ok() {
        Ok(check)
    } else {
        Err(Failure::Wrong(check))
    }
}

fn progress<B: Backend>(group: &Group<B>, length: usize, unit: &str) -> ProgressBar {
    if group.rank() > 0 || !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template(&format!("{{wide_bar}} {{pos}}/{{len}} {unit}"));
    ProgressBar::new(length as u64)
        .with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

fn report<B: Backend, T: Multiplied, O: Operation<B, T>>(args: &Args, group: &Group<B>, run: &Run) {
    let Run {
        shape,
        explanation,
        check,
        timing,
    } = run;
    println!(
        "\n{}, {} backend, {} ranks: {}, {}",
        O::NAME,
        B::NAME,
        group.world_size(),
        O::describe(*shape),
        types::<T>(args, O::OUT)
    );
    println!("{explanation}");
    println!(
        "verified: all {} elements that were compared agree with float64 to within {}\n",
        check.elements,
        allowance::<B, T>(O::OUT)
    );
    println!("{}", common::table(&timing.rows));
    if let Some(note) = timing.note {
        println!("\n{note}");
    }
    println!();
    let fused = Time::Taken(timing.fused);
    if let Some((name, baseline)) = timing.baseline {
        println!("{name} / fused: {}", baseline.over(fused).text(3));
    }
    if let Some(ratio) = timing.more["fused_to_sequential"].as_f64() {
        let sequential = O::SEQUENTIAL;
        println!("fused / {sequential}, median over the rounds: {ratio:.3}");
    }
    println!("fused / ideal: {}", fused.over(timing.ideal).text(3));
}

/// Appends a line to the file of results, if there is one.
fn record<B: Backend, T: Multiplied, O: Operation<B, T>>(
    args: &Args,
    group: &Group<B>,
    run: &Run,
) -> Result<()> {
    let Some(path) = &args.json else {
        return Ok(());
    };
    let Run {
        shape: [m, n, k],
        explanation,
        check,
        timing,
    } = run;
    let problem = json!({
        "op": O::NAME, "backend": B::NAME, "world": group.world_size(), "hosts": group.host_count(), "m": m, "n": n, "k": k,
        "dtype": T::DTYPE.to_string(), "out": O::OUT.to_string(), "scales": args.scales_name(), "numerics": format!("{:?}", args.numerics), "stages": args.gather_stages, "max_rel_err": check.max_rel_err,
        "max_abs_err": check.max_abs_err, "ok": check.ok(), "commit": commit(),
        "config": format!("{:?}", explanation.config), "predicted_us": explanation.micros(), "iters": args.iters, "unix_time": unix_time(),
    });
    let fields = [&problem, &timing.more]
        .into_iter()
        .filter_map(Value::as_object);
    let fields = fields
        .flatten()
        .map(|(key, value)| (key.clone(), value.clone()));
    let mut line: Map<String, Value> = fields.collect();
    let rows = timing.rows.iter();
    line.extend(rows.map(|row| (row.key.clone(), row.time.into())));
    append(path, &Value::Object(line).to_string())
}

fn append(path: &Path, line: &str) -> Result<()> {
    let file = OpenOptions::new().create(true).append(true).open(path);
    file.and_then(|mut file| writeln!(file, "{line}"))
        .map_err(|e| {
            Error::of_kind(Kind::System {
                action: format!("write {}", path.display()),
                reason: e.to_string(),
            })
        })
}

fn unix_time() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.unwrap_or_default().as_secs()
}

/// The commit of the source that this was built from, with a + if it had changes.
fn commit() -> String {
    if let Ok(commit) = std::env::var("GEMMESH_COMMIT") {
        return commit;
    }
    let git = Command::new("git")
        .args(["describe", "--always", "--abbrev=12", "--dirty=+"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output();
    match git {
        Ok(output) if output.status.success() => {
            String::from_utf8_lossy(&output.stdout).trim().to_string()
        }
        _ => "unknown".into(),
    }
}
