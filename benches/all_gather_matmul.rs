//! Times all_gather_matmul beside its parts and beside perfect overlap.
//!
//! ```sh
//! cargo bench --bench all_gather_matmul -- --ranks 4 --m 2048 --n 2048 --k 2048
//! ```
//!
//! Launches its ranks itself, unless torchrun, mpirun or srun has.

mod common;

use std::fs::OpenOptions;
use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::process::{Command, ExitCode};

use clap::{Parser, ValueEnum};
use common::{Case, Check, Times};
use gemmesh::{
    AllGatherMatmul, Backend, Config, Element, Error, Group, Host, Result, bf16, f16, launch,
};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;

/// Times all_gather_matmul beside its parts and beside perfect overlap.
#[derive(Parser)]
struct Args {
    /// Where the ranks run.
    #[arg(long, value_enum, default_value_t = BackendName::Host)]
    backend: BackendName,
    /// Ranks to launch.
    #[arg(long, default_value_t = 4)]
    ranks: usize,
    /// Rows of the gathered matrix.
    #[arg(long, default_value_t = 2048)]
    m: usize,
    /// Columns of the output, on each rank.
    #[arg(long, default_value_t = 2048)]
    n: usize,
    /// Columns of the gathered matrix.
    #[arg(long, default_value_t = 2048)]
    k: usize,
    /// Type of the elements.
    #[arg(long, value_enum, default_value_t = DTypeName::Bf16)]
    dtype: DTypeName,
    /// Rows of a tile.
    #[arg(long)]
    tile_m: Option<usize>,
    /// Columns of a tile.
    #[arg(long)]
    tile_n: Option<usize>,
    /// Depth of a step through K.
    #[arg(long)]
    tile_k: Option<usize>,
    /// Tile rows that are walked together.
    #[arg(long)]
    group_m: Option<usize>,
    /// Chunks that a shard is pulled in.
    #[arg(long)]
    chunks: Option<usize>,
    /// Rounds that count.
    #[arg(long, default_value_t = 20)]
    iters: usize,
    /// Rounds before them.
    #[arg(long, default_value_t = 2)]
    warmup: usize,
    /// Appends the result to this file, one JSON object a run and line.
    #[arg(long)]
    json: Option<PathBuf>,
    /// Given by cargo bench.
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum BackendName {
    Host,
}

#[derive(Clone, Copy, ValueEnum)]
enum DTypeName {
    Bf16,
    F16,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let result = match (launch::is_rank(), args.backend, args.dtype) {
        (false, ..) => launch::launch(args.ranks),
        (true, BackendName::Host, DTypeName::Bf16) => run::<Host, bf16>(&args),
        (true, BackendName::Host, DTypeName::F16) => run::<Host, f16>(&args),
    };
    common::exit(result)
}

fn run<B: Backend, T: Element>(args: &Args) -> Result<()> {
    let group = Group::<B>::from_env()?;
    let &Args { m, n, k, .. } = args;
    let mut case = Case::<B, T>::random(&group, m, n, k)?;

    let default = *AllGatherMatmul::new().prepare(&case.a, n)?.plan().config();
    let config = Config {
        tile_m: args.tile_m.unwrap_or(default.tile_m),
        tile_n: args.tile_n.unwrap_or(default.tile_n),
        tile_k: args.tile_k.unwrap_or(default.tile_k),
        group_m: args.group_m.unwrap_or(default.group_m),
        chunks: args.chunks.unwrap_or(default.chunks),
    };
    let prepared = AllGatherMatmul::new().config(config).prepare(&case.a, n)?;

    case.poison()?;
    prepared.run(&case.a, &case.b, &mut case.out)?;
    let check = case.check(rows_to_check(n, k))?;
    if !check.ok() {
        return Err(Error::Message {
            rank: group.rank(),
            reason: format!("a wrong result, not timed: {check:?}"),
        });
    }
    let check = everywhere(&group, check)?;

    let bar = progress(&group, args.warmup + args.iters);
    let (warmup, iters) = (args.warmup, args.iters);
    let times = common::measure(&group, &prepared, &mut case, warmup, iters, || bar.inc(1))?;
    bar.finish_and_clear();
    if group.rank() == 0 {
        report::<B, T>(args, &group, &config, &check, &times)?;
    }
    group.barrier()
}

/// All rows if that takes seconds, else as many as do.
fn rows_to_check(n: usize, k: usize) -> usize {
    const PRODUCTS: usize = 1 << 33;
    (PRODUCTS / (n * k)).max(16)
}

/// The worst of all ranks' checks.
fn everywhere<B: Backend>(group: &Group<B>, check: Check) -> Result<Check> {
    let message = |rank, e: serde_json::Error| Error::Message {
        rank,
        reason: e.to_string(),
    };
    let bytes = serde_json::to_vec(&check).map_err(|e| message(group.rank(), e))?;
    let mut worst = check;
    for (rank, bytes) in group.all_gather_bytes(&bytes)?.iter().enumerate() {
        let other: Check = serde_json::from_slice(bytes).map_err(|e| message(rank, e))?;
        // A NaN, which JSON has no word for, would not get here.
        worst.elements += if rank == group.rank() {
            0
        } else {
            other.elements
        };
        worst.max_abs_err = worst.max_abs_err.max(other.max_abs_err);
        worst.max_rel_err = worst.max_rel_err.max(other.max_rel_err);
        worst.worst = worst.worst.max(other.worst);
    }
    Ok(worst)
}

fn progress<B: Backend>(group: &Group<B>, rounds: usize) -> ProgressBar {
    if group.rank() > 0 || !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{wide_bar} {pos}/{len} rounds");
    ProgressBar::new(rounds as u64)
        .with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

fn report<B: Backend, T: Element>(
    args: &Args,
    group: &Group<B>,
    config: &Config,
    check: &Check,
    times: &Times,
) -> Result<()> {
    let &Args { m, n, k, .. } = args;
    let world = group.world_size();
    println!(
        "all_gather_matmul, {} backend, {world} ranks: M = {m}, N = {n} a rank, K = {k}, {}",
        B::NAME,
        T::DTYPE
    );
    println!("{config:?}");
    println!(
        "verified {} elements against float64: worst error {:.2e}, {:.3} of what rounding allows\n",
        check.elements, check.max_abs_err, check.worst
    );
    println!("{}", common::table(&times.rows()));
    println!(
        "\ngather then matmul / fused: {:.3}",
        times.sequential / times.fused
    );
    println!(
        "fused / ideal:              {:.3}",
        times.fused / times.ideal
    );
    let Some(path) = &args.json else {
        return Ok(());
    };
    let line = json!({
        "op": "all_gather_matmul", "backend": B::NAME, "world": world, "m": m, "n": n, "k": k,
        "dtype": T::DTYPE.to_string(), "matmul_us": times.matmul, "gather_us": times.gather,
        "sequential_us": times.sequential, "fused_us": times.fused, "ideal_us": times.ideal,
        "max_rel_err": check.max_rel_err, "max_abs_err": check.max_abs_err, "ok": check.ok(),
        "commit": commit(),
    });
    let file = OpenOptions::new().create(true).append(true).open(path);
    file.and_then(|mut file| writeln!(file, "{line}"))
        .map_err(|e| Error::System {
            rank: Some(group.rank()),
            action: format!("write {}", path.display()),
            reason: e.to_string(),
        })
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
