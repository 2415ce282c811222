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
use common::{Check, Failure, Operation, Row};
use gemmesh::{
    Backend, Chunking, Config, Error, Explanation, Group, Half, Host, Numerics, Result, Route,
    TileShape, bf16, f16, launch,
};
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
    /// Times all kernels and routes on some shapes, in less than a minute, and writes the device's rates to this file.
    /// The library chooses by them if GEMMESH_RATES names the file.
    #[cfg(feature = "cuda")]
    #[arg(long, value_name = "FILE", conflicts_with_all = ["tune", "sweep"])]
    calibrate: Option<PathBuf>,
    /// What the bits of products may depend on: Builder::numerics.
    #[arg(long, value_enum, default_value_t = NumericsName::Fast)]
    numerics: NumericsName,
    /// Type of the elements.
    #[arg(long, value_enum, default_value_t = DTypeName::Bf16)]
    dtype: DTypeName,
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
    /// True if partial sums that are stored are stored behind the product.
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

#[derive(Clone, Copy, ValueEnum)]
enum DTypeName {
    Bf16,
    F16,
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
        Ok(())
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
                sweep::draw(seed, count, largest)
            }
            Some(Sweep::Models) => {
                let (splits, parts): (&[Split], &[usize]) = match self.op {
                    Op::Matmul => (&[Split::Columns, Split::Depth], &[1, 2, 4, 8]),
                    Op::AllGatherMatmul | Op::Consume => (&[Split::Columns], &[self.ranks]),
                    _ => (&[Split::Depth], &[self.ranks]),
                };
                sweep::draw_of_models(seed, count, splits, parts)
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
    match (launch::is_rank(), args.backend, args.dtype) {
        (false, ..) => launch::launch(args.ranks).map_err(Failure::from),
        (true, BackendName::Host, DTypeName::Bf16) if args.has_form() => {
            forms::run::<Host, bf16, forms::Wall>(args)
        }
        (true, BackendName::Host, DTypeName::F16) if args.has_form() => {
            forms::run::<Host, f16, forms::Wall>(args)
        }
        #[cfg(feature = "cuda")]
        (true, BackendName::Cuda, DTypeName::Bf16) if args.has_form() => {
            forms::run::<gemmesh::Cuda, bf16, cuda::Instruments>(args)
        }
        #[cfg(feature = "cuda")]
        (true, BackendName::Cuda, DTypeName::F16) if args.has_form() => {
            forms::run::<gemmesh::Cuda, f16, cuda::Instruments>(args)
        }
        (true, BackendName::Host, DTypeName::Bf16) => run_op::<Host, bf16>(args),
        (true, BackendName::Host, DTypeName::F16) => run_op::<Host, f16>(args),
        #[cfg(feature = "cuda")]
        (true, BackendName::Cuda, dtype) if matches!(args.op, Op::Consume) => match dtype {
            DTypeName::Bf16 => run::<gemmesh::Cuda, bf16, cuda::Consume<bf16>>(args),
            DTypeName::F16 => run::<gemmesh::Cuda, f16, cuda::Consume<f16>>(args),
        },
        #[cfg(feature = "cuda")]
        (true, BackendName::Cuda, dtype) if matches!(args.op, Op::Produce) => match dtype {
            DTypeName::Bf16 => run::<gemmesh::Cuda, bf16, cuda::Produce<bf16>>(args),
            DTypeName::F16 => run::<gemmesh::Cuda, f16, cuda::Produce<f16>>(args),
        },
        #[cfg(feature = "cuda")]
        (true, BackendName::Cuda, _) if matches!(args.op, Op::Collectives) => {
            let group = args.group::<gemmesh::Cuda>()?;
            cuda::collectives::run(&group, [args.warmup, args.iters], args.json.as_deref())
        }
        #[cfg(feature = "cuda")]
        (true, BackendName::Cuda, _) if matches!(args.op, Op::Decoding) => {
            let group = args.group::<gemmesh::Cuda>()?;
            cuda::decoding::run(&group, [args.warmup, args.iters], args.json.as_deref())
        }
        #[cfg(feature = "cuda")]
        (true, BackendName::Cuda, DTypeName::Bf16) => run_op::<gemmesh::Cuda, bf16>(args),
        #[cfg(feature = "cuda")]
        (true, BackendName::Cuda, DTypeName::F16) => run_op::<gemmesh::Cuda, f16>(args),
    }
}

/// An operation that is timed on a backend.
trait Timed<B: Backend, T: Half>: Operation<B, T> {
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

    /// Writes the device's rates to a file.
    #[cfg(feature = "cuda")]
    fn calibrate(_: &Group<B>, _: &Path) -> Result<(), Failure> {
        Err(Failure::Usage("--calibrate: this backend has no rates"))
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
    baseline: Option<(&'static str, f64)>,
    fused: f64,
    ideal: f64,
    /// A note about the rows.
    note: Option<&'static str>,
}

impl Timing {
    fn get(&self, key: &str) -> Option<f64> {
        self.rows.iter().find(|row| row.key == key)?.time
    }
}

impl Run {
    /// The times that a line of a sweep shows.
    fn in_short(&self) -> sweep::Times {
        let timing = &self.timing;
        sweep::Times {
            alone: timing.get("matmul_us").unwrap_or(f64::NAN),
            cublaslt: timing.get("cublaslt_us"),
            baseline: timing.baseline.map(|(_, time)| time),
            fused: timing.fused,
            ideal: timing.ideal,
            predicted: self.explanation.micros(),
        }
    }
}

impl<T: Half, O: Operation<Host, T>> Timed<Host, T> for O {
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
            baseline: Some((O::SEQUENTIAL, times.sequential)),
            fused: times.fused,
            ideal: times.ideal,
            rows: times.rows,
            note: None,
        })
    }
}

fn run_op<B: Backend, T: Half>(args: &Args) -> Result<(), Failure>
where
    AllGather<B, T>: Timed<B, T>,
    ReduceScatter<B, T>: Timed<B, T>,
    AllReduce<B, T>: Timed<B, T>,
{
    match args.op {
        Op::Matmul => Err(Failure::Usage("--op matmul: is timed as a form")),
        Op::AllGatherMatmul => run::<B, T, AllGather<B, T>>(args),
        Op::Consume | Op::Produce | Op::Collectives | Op::Decoding => Err(Failure::Usage(
            "--op consume, produce, collectives and decoding: beside cuBLASLt and NCCL, so they need --backend cuda",
        )),
        Op::MatmulReduceScatter => run::<B, T, ReduceScatter<B, T>>(args),
        Op::MatmulAllReduce => run::<B, T, AllReduce<B, T>>(args),
    }
}

fn run<B: Backend, T: Half, O: Timed<B, T>>(args: &Args) -> Result<(), Failure> {
    let group = args.group::<B>()?;
    #[cfg(feature = "cuda")]
    if let Some(path) = &args.tune {
        let mut shapes = args.shapes().into_iter();
        return shapes.try_for_each(|shape| O::tune(&group, shape, path));
    }
    #[cfg(feature = "cuda")]
    if let Some(path) = &args.calibrate {
        return O::calibrate(&group, path);
    }
    let instruments = O::instruments(&group)?;
    match args.sweep {
        Some(sweep) if sweep.is_drawn() => run_drawn::<B, T, O>(args, &group, &instruments),
        _ => run_each::<B, T, O>(args, &group, &instruments),
    }
}

/// Reports each shape at length.
fn run_each<B: Backend, T: Half, O: Timed<B, T>>(
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
            report::<B, T, O>(group, &run);
            record::<B, T, O>(args, group, &run)?;
        }
        group.barrier()?;
    }
    Ok(())
}

/// Reports each shape on a line, and then a summary.
fn run_drawn<B: Backend, T: Half, O: Timed<B, T>>(
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
                    introduce::<B, T, O>(group, &run);
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
            "\nverified: all elements that were compared agree with float64 to within {}'s rounding",
            T::DTYPE
        );
    }
    Ok(())
}

/// Prints the head of the table of shapes that were drawn.
fn introduce<B: Backend, T: Half, O: Operation<B, T>>(group: &Group<B>, run: &Run) {
    let timing = &run.timing;
    let (world, dtype) = (group.world_size(), T::DTYPE);
    println!("\n{}, {} backend, {world} ranks, {dtype}", O::NAME, B::NAME);
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
fn bench<B: Backend, T: Half, O: Timed<B, T>>(
    args: &Args,
    group: &Group<B>,
    instruments: &O::Instruments,
    shape: [usize; 3],
    products: usize,
    progress: impl FnMut(),
) -> Result<Run, Failure> {
    let mut operation = O::random(group, shape, args.gather_stages)?;
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
            let ([m, n, k], world, dtype) = (shape, group.world_size(), T::DTYPE);
            let title = format!("{}, {world} ranks: {m}×{n}×{k} {dtype}", O::NAME);
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
fn verify<B: Backend, T: Half, O: Operation<B, T>>(
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

fn report<B: Backend, T: Half, O: Operation<B, T>>(group: &Group<B>, run: &Run) {
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
        T::DTYPE
    );
    println!("{explanation}");
    println!(
        "verified: all {} elements that were compared agree with float64 to within {}'s rounding\n",
        check.elements,
        T::DTYPE
    );
    println!("{}", common::table(&timing.rows));
    if let Some(note) = timing.note {
        println!("\n{note}");
    }
    println!();
    if let Some((name, baseline)) = timing.baseline {
        println!("{name} / fused: {:.3}", baseline / timing.fused);
    }
    if let Some(ratio) = timing.more["fused_to_sequential"].as_f64() {
        let sequential = O::SEQUENTIAL;
        println!("fused / {sequential}, median over the rounds: {ratio:.3}");
    }
    println!("fused / ideal: {:.3}", timing.fused / timing.ideal);
}

/// Appends a line to the file of results, if there is one.
fn record<B: Backend, T: Half, O: Operation<B, T>>(
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
        "op": O::NAME, "backend": B::NAME, "world": group.world_size(), "m": m, "n": n, "k": k,
        "dtype": T::DTYPE.to_string(), "numerics": format!("{:?}", args.numerics), "stages": args.gather_stages, "max_rel_err": check.max_rel_err,
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
    line.extend(rows.map(|row| (row.key.clone(), json!(row.time))));
    append(path, &Value::Object(line).to_string())
}

fn append(path: &Path, line: &str) -> Result<()> {
    let file = OpenOptions::new().create(true).append(true).open(path);
    file.and_then(|mut file| writeln!(file, "{line}"))
        .map_err(|e| Error::System {
            rank: None,
            action: format!("write {}", path.display()),
            reason: e.to_string(),
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
