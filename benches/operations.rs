//! Times all_gather_matmul beside its parts and beside perfect overlap.
//!
//! ```sh
//! cargo bench --bench operations -- --ranks 4 --m 2048 --n 2048 --k 2048
//! ```
//!
//! Launches its ranks itself, unless torchrun, mpirun or srun has.

mod common;
#[cfg(feature = "cuda")]
#[path = "common/cuda.rs"]
mod cuda;

use std::fs::OpenOptions;
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{SystemTime, UNIX_EPOCH};

use clap::builder::RangedU64ValueParser;
use clap::{Parser, ValueEnum};
use common::{Case, Check, Failure};
#[cfg(feature = "cuda")]
use gemmesh::testing::Winner;
use gemmesh::{
    AllGatherMatmul, Backend, Chunking, Config, Element, Error, Group, Host, Prepared, Result,
    Route, TileShape, bf16, f16, launch,
};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Map, Value, json};

/// Times all_gather_matmul beside its parts and beside perfect overlap.
#[derive(Parser)]
struct Args {
    /// Where the ranks run.
    #[arg(long, value_enum, default_value_t = BackendName::Host)]
    backend: BackendName,
    /// Ranks to launch.
    #[arg(long, default_value_t = 4)]
    ranks: usize,
    /// Rows of the gathered matrix [default: 2048 on the host, 4096 on GPUs].
    #[arg(long)]
    m: Option<usize>,
    /// Columns of the output, on each rank [default: 2048 on the host, 6656 on GPUs].
    #[arg(long)]
    n: Option<usize>,
    /// Columns of the gathered matrix [default: 2048 on the host, 16384 on GPUs].
    #[arg(long)]
    k: Option<usize>,
    /// Runs several shapes of a tensor-parallel Llama 3 instead: large, the nine of 4096, 8192 and 16384 rows by 8B, 70B
    /// and 405B; or small, the eight of 128 to 1024 rows by 8B and 70B.
    #[arg(long, value_enum, num_args = 0..=1, default_missing_value = "large", conflicts_with_all = ["m", "n", "k"])]
    sweep: Option<Sweep>,
    /// Times every configuration that may be the fastest, and appends the fastest to this file; a program in whose
    /// environment GEMMESH_TUNED names it uses it.
    #[cfg(feature = "cuda")]
    #[arg(long)]
    tune: Option<PathBuf>,
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
    /// CTAs that share the loads of b.
    #[arg(long)]
    cluster: Option<usize>,
    /// CTAs that share a tile, each with a part of K.
    #[arg(long)]
    split_k: Option<usize>,
    /// Depth of a step through K.
    #[arg(long)]
    tile_k: Option<usize>,
    /// Tile rows that are walked together.
    #[arg(long)]
    group_m: Option<usize>,
    /// Chunks that a shard is moved in.
    #[arg(long)]
    chunks: Option<usize>,
    /// Chunks that the shard that comes last is moved in.
    #[arg(long)]
    last_chunks: Option<usize>,
    /// Whether the last chunk of all comes in two parts along K.
    #[arg(long)]
    cut_last: Option<bool>,
    /// Who moves rows.
    #[arg(long, value_enum)]
    route: Option<RouteName>,
    /// Rounds that count.
    #[arg(long, default_value_t = 20, value_parser = RangedU64ValueParser::<usize>::new().range(1..))]
    iters: usize,
    /// Rounds before them.
    #[arg(long, default_value_t = 2)]
    warmup: usize,
    /// Appends the result to this file, one JSON object a run and line.
    #[arg(long)]
    json: Option<PathBuf>,
    /// Draws a timeline of one fused run into this SVG file, and writes it for Perfetto beside it.
    #[cfg(feature = "timeline")]
    #[arg(long)]
    trace: Option<PathBuf>,
    /// Given by cargo bench.
    #[arg(long, hide = true)]
    bench: bool,
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

#[derive(Clone, Copy, ValueEnum)]
enum Sweep {
    Large,
    Small,
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

/// M, N a rank and K of the small shapes.
const SMALL: [[usize; 3]; 8] = [
    [128, 1792, 4096],
    [256, 1792, 4096],
    [512, 1792, 4096],
    [1024, 1792, 4096],
    [128, 3584, 8192],
    [256, 3584, 8192],
    [512, 3584, 8192],
    [1024, 3584, 8192],
];

/// And of the large ones.
const LARGE: [[usize; 3]; 9] = [
    [4096, 1792, 4096],
    [8192, 1792, 4096],
    [16384, 1792, 4096],
    [4096, 3584, 8192],
    [8192, 3584, 8192],
    [16384, 3584, 8192],
    [4096, 6656, 16384],
    [8192, 6656, 16384],
    [16384, 6656, 16384],
];

fn main() -> ExitCode {
    let args = Args::parse();
    let result = match (launch::is_rank(), args.backend, args.dtype) {
        (false, ..) => launch::launch(args.ranks).map_err(Failure::from),
        (true, BackendName::Host, DTypeName::Bf16) => run::<Host, bf16>(&args),
        (true, BackendName::Host, DTypeName::F16) => run::<Host, f16>(&args),
        #[cfg(feature = "cuda")]
        (true, BackendName::Cuda, DTypeName::Bf16) => run::<gemmesh::Cuda, bf16>(&args),
        #[cfg(feature = "cuda")]
        (true, BackendName::Cuda, DTypeName::F16) => run::<gemmesh::Cuda, f16>(&args),
    };
    common::exit(result)
}

/// What is timed on a backend.
trait Timed: Backend {
    const DEFAULT_SHAPE: [usize; 3];

    fn time<T: Element>(
        group: &Group<Self>,
        prepared: &Prepared<Self, T>,
        case: &mut Case<Self, T>,
        args: &Args,
        progress: impl FnMut(),
    ) -> Result<Timing>;

    /// Appends the fastest configuration for a shape to a file.
    #[cfg(feature = "cuda")]
    fn tune<T: Element>(_: &Group<Self>, _: [usize; 3], _: &Path) -> Result<(), Failure> {
        Err(Failure::Usage("--tune: this backend has nothing to tune"))
    }
}

struct Timing {
    rows: Vec<(&'static str, f64)>,
    /// The rows' names and times in the JSON, and what else belongs there.
    json: Value,
    baseline: (&'static str, f64),
    fused: f64,
    ideal: f64,
}

impl Timed for Host {
    const DEFAULT_SHAPE: [usize; 3] = [2048, 2048, 2048];

    fn time<T: Element>(
        group: &Group<Host>,
        prepared: &Prepared<Host, T>,
        case: &mut Case<Host, T>,
        args: &Args,
        progress: impl FnMut(),
    ) -> Result<Timing> {
        let times = common::measure(group, prepared, case, args.warmup, args.iters, progress)?;
        Ok(Timing {
            rows: times.rows().into(),
            json: json!({
                "matmul_us": times.matmul, "gather_us": times.gather,
                "sequential_us": times.sequential, "fused_us": times.fused, "ideal_us": times.ideal,
                "fused_to_sequential": times.fused_to_sequential,
            }),
            baseline: ("gather then matmul", times.sequential),
            fused: times.fused,
            ideal: times.ideal,
        })
    }
}

#[cfg(feature = "cuda")]
impl Timed for gemmesh::Cuda {
    const DEFAULT_SHAPE: [usize; 3] = [4096, 6656, 16384];

    fn time<T: Element>(
        group: &Group<Self>,
        prepared: &Prepared<Self, T>,
        case: &mut Case<Self, T>,
        args: &Args,
        progress: impl FnMut(),
    ) -> Result<Timing> {
        let (warmup, iters) = (args.warmup, args.iters);
        let times = cuda::measure(group, prepared, case, warmup, iters, progress)?;
        Ok(Timing {
            rows: times.rows(),
            json: json!({
                "cublaslt_us": times.cublaslt, "matmul_us": times.matmul, "nccl_us": times.nccl,
                "gather_us": times.gather, "nccl_cublaslt_us": times.nccl_cublaslt,
                "sequential_us": times.sequential, "fused_us": times.fused,
                "graph_us": times.graph, "ideal_us": times.ideal, "host_us": times.host,
                "gpu": group.device_name(), "cuda_driver": group.driver_version()?,
            }),
            baseline: ("NCCL + cuBLASLt", times.nccl_cublaslt),
            fused: times.fused,
            ideal: times.ideal,
        })
    }

    fn tune<T: Element>(
        group: &Group<Self>,
        [m, n, k]: [usize; 3],
        path: &Path,
    ) -> Result<(), Failure> {
        let mut case = Case::<Self, T>::random(group, m, n, k)?;
        let (config, time) = cuda::fastest(group, &mut case)?;
        let prepared = AllGatherMatmul::new().config(config).prepare(&case.a, n)?;
        verify(group, &prepared, &mut case)?;
        if group.rank() > 0 {
            return Ok(());
        }
        let winner = Winner {
            gpu: group.device_name().into(),
            world: group.world_size(),
            operation: "all_gather_matmul".into(),
            dtype: T::DTYPE,
            m,
            n,
            k,
            config,
            us: (time * 10.0).round() / 10.0,
        };
        let line = json!(winner).to_string();
        println!("{line}");
        Ok(append(path, &line)?)
    }
}

fn run<B: Timed, T: Element>(args: &Args) -> Result<(), Failure> {
    let group = Group::<B>::from_env()?;
    let [m, n, k] = B::DEFAULT_SHAPE;
    let one = [[
        args.m.unwrap_or(m),
        args.n.unwrap_or(n),
        args.k.unwrap_or(k),
    ]];
    let shapes: &[[usize; 3]] = match args.sweep {
        Some(Sweep::Large) => &LARGE,
        Some(Sweep::Small) => &SMALL,
        None => &one,
    };
    for &shape in shapes {
        #[cfg(feature = "cuda")]
        if let Some(path) = &args.tune {
            B::tune::<T>(&group, shape, path)?;
            continue;
        }
        bench::<B, T>(args, &group, shape)?;
    }
    Ok(())
}

fn bench<B: Timed, T: Element>(
    args: &Args,
    group: &Group<B>,
    shape: [usize; 3],
) -> Result<(), Failure> {
    let [m, n, k] = shape;
    let mut case = Case::<B, T>::random(group, m, n, k)?;

    let default = AllGatherMatmul::new().prepare(&case.a, n)?.config();
    let config = Config::new(
        TileShape::new(
            args.tile_m.unwrap_or(default.tile.m),
            args.tile_n.unwrap_or(default.tile.n),
            args.tile_k.unwrap_or(default.tile.k),
        )
        .with_stages(args.stages.unwrap_or(default.tile.stages))
        .with_cluster(args.cluster.unwrap_or(default.tile.cluster))
        .with_split_k(args.split_k.unwrap_or(default.tile.split_k))
        .with_group_m(args.group_m.unwrap_or(default.tile.group_m)),
        Chunking::new(args.chunks.unwrap_or(default.chunking.count))
            .with_last(
                args.last_chunks
                    .or(args.chunks)
                    .unwrap_or(default.chunking.last),
            )
            .with_cut_last(args.cut_last.unwrap_or(default.chunking.cut_last)),
        args.route.map_or(default.route, Route::from),
    );
    let prepared = AllGatherMatmul::new().config(config).prepare(&case.a, n)?;

    let check = verify(group, &prepared, &mut case)?;
    let bar = progress(group, args.warmup + args.iters);
    let timing = B::time(group, &prepared, &mut case, args, || bar.inc(1))?;
    bar.finish_and_clear();
    if group.rank() == 0 {
        report::<B, T>(args, group, shape, &config, &check, &timing)?;
    }
    #[cfg(feature = "timeline")]
    if let Some(path) = &args.trace {
        // The first run with a trace loads what it needs.
        prepared.run_traced(&case.a, &case.b, &mut case.out)?;
        let trace = prepared.run_traced(&case.a, &case.b, &mut case.out)?;
        let timeline = gemmesh::trace::Timeline::collect(group, &trace)?;
        if group.rank() == 0 {
            let world = group.world_size();
            let dtype = T::DTYPE;
            timeline.write_svg(
                path,
                &format!("all_gather_matmul, {world} ranks: {m}×{n}×{k} {dtype}"),
            )?;
            timeline.write_chrome(path.with_extension("json"))?;
        }
    }
    Ok(group.barrier()?)
}

/// Runs a product on poisoned memory and compares it with float64, on every rank.
fn verify<B: Backend, T: Element>(
    group: &Group<B>,
    prepared: &Prepared<B, T>,
    case: &mut Case<B, T>,
) -> Result<Check, Failure> {
    let [n, k] = case.b.shape();
    case.poison()?;
    group.barrier()?;
    prepared.run(&case.a, &case.b, &mut case.out)?;
    let check = case.check(rows_to_check(n, k))?.everywhere(group)?;
    if check.ok() {
        Ok(check)
    } else {
        Err(Failure::Wrong(check))
    }
}

/// All rows if that takes seconds, else as many as do.
fn rows_to_check(n: usize, k: usize) -> usize {
    const PRODUCTS: usize = 1 << 33;
    (PRODUCTS / (n * k)).max(16)
}

fn progress<B: Backend>(group: &Group<B>, rounds: usize) -> ProgressBar {
    if group.rank() > 0 || !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{wide_bar} {pos}/{len} rounds");
    ProgressBar::new(rounds as u64)
        .with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

fn report<B: Timed, T: Element>(
    args: &Args,
    group: &Group<B>,
    [m, n, k]: [usize; 3],
    config: &Config,
    check: &Check,
    timing: &Timing,
) -> Result<()> {
    let world = group.world_size();
    println!(
        "\nall_gather_matmul, {} backend, {world} ranks: M = {m}, N = {n} a rank, K = {k}, {}",
        B::NAME,
        T::DTYPE
    );
    println!("{config:?}");
    println!(
        "verified {} elements against float64: worst error {:.2e}, {:.3} of what rounding allows\n",
        check.elements, check.max_abs_err, check.worst
    );
    println!("{}", common::table(&timing.rows));
    let (name, baseline) = timing.baseline;
    println!("\n{name} / fused: {:.3}", baseline / timing.fused);
    if let Some(ratio) = timing.json["fused_to_sequential"].as_f64() {
        println!("fused / gather then matmul, median over the rounds: {ratio:.3}");
    }
    println!("fused / ideal: {:.3}", timing.fused / timing.ideal);
    let Some(path) = &args.json else {
        return Ok(());
    };
    let mut line = Map::new();
    let problem = json!({
        "op": "all_gather_matmul", "backend": B::NAME, "world": world, "m": m, "n": n, "k": k,
        "dtype": T::DTYPE.to_string(), "max_rel_err": check.max_rel_err,
        "max_abs_err": check.max_abs_err, "ok": check.ok(), "commit": commit(),
        "config": format!("{config:?}"), "iters": args.iters, "unix_time": unix_time(),
    });
    for fields in [&problem, &timing.json] {
        line.extend(
            fields
                .as_object()
                .into_iter()
                .flatten()
                .map(|(k, v)| (k.clone(), v.clone())),
        );
    }
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
