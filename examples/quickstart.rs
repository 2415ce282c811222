//! The whole library on one page: four ranks gather a sharded matrix while they multiply it.
//!
//! ```sh
//! cargo run --release --example quickstart               # ranks as processes
//! cargo run --release --example quickstart -- --threads  # ranks as threads
//! ```

#[path = "../benches/common/mod.rs"]
mod common;

use std::process::ExitCode;

use clap::Parser;
use common::{Case, Failure};
use gemmesh::trace::Timeline;
use gemmesh::{AllGatherMatmul, Group, Host, all_gather_matmul, bf16, launch};

const RANKS: usize = 4;
/// out[M, N] = gather(a)[M, K] · b[N, K]ᵀ, N columns on each rank.
const M: usize = 4096;
const N: usize = 64;
const K: usize = 4096;

/// Ranks, four unless a launcher says otherwise, multiply a matrix whose rows are spread over them.
#[derive(Parser)]
struct Args {
    /// Run the ranks as threads of this process.
    #[arg(long)]
    threads: bool,
}

fn main() -> ExitCode {
    let result = if Args::parse().threads {
        Group::threads(RANKS, rank).map(drop)
    } else if launch::is_rank() {
        Group::from_env().map_err(Failure::from).and_then(rank)
    } else {
        launch::launch(RANKS).map_err(Failure::from)
    };
    common::exit(result)
}

/// What each rank does.
fn rank(group: Group<Host>) -> Result<(), Failure> {
    let mut case = Case::<_, bf16>::random(&group, M, N, K)?;
    case.poison()?;
    all_gather_matmul(&case.a, &case.b, &mut case.out)?;
    group.synchronize()?;

    // Every rank checks its own N columns.
    let check = case.check(M)?.everywhere(&group)?;
    if !check.ok() {
        return Err(Failure::Wrong(check));
    }
    let prepared = AllGatherMatmul::new().prepare(&case.a, N)?;
    let times = common::measure(&group, &prepared, &mut case, 2, 15, || {})?;
    let trace = prepared.run_traced(&case.a, &case.b, &mut case.out)?;
    let timeline = Timeline::collect(&group, &trace)?;

    if group.rank() > 0 {
        return Ok(());
    }
    let world = group.world_size();
    println!(
        "all_gather_matmul on {world} ranks of the host: out[{M}, {N}] = gather(a)[{M}, {K}] · b[{N}, {K}]ᵀ, bf16\n"
    );
    println!(
        "verified: {} elements against float64; the worst error is {:.3} of what rounding allows ({:.2e})\n",
        check.elements, check.worst, check.max_abs_err
    );
    println!("{}", common::table(&times.rows()[..4]));
    println!(
        "overlap gained: {:.0} µs, {:.0} % of the gather's time; fused / gather then matmul, median over the rounds: {:.3}\n",
        times.sequential - times.fused,
        100.0 * (times.sequential - times.fused) / times.gather,
        times.fused_to_sequential
    );
    let title = format!("all_gather_matmul, {world} ranks: {M}×{N}×{K} bf16");
    timeline.write_svg("timeline.svg", &title)?;
    timeline.write_chrome("timeline.json")?;
    println!(
        "wrote timeline.svg (open it in a browser) and timeline.json (open it in ui.perfetto.dev)"
    );
    Ok(())
}
