//! The whole library on one page. Four ranks gather a sharded matrix while they multiply it.
//!
//! ```sh
//! cargo run --release --example quickstart               # ranks as processes
//! cargo run --release --example quickstart -- --threads  # ranks as threads
//! ```

#[path = "../benches/common/mod.rs"]
mod common;

use std::process::ExitCode;

use clap::Parser;
use common::gather::AllGather;
use common::{Failure, Operation};
use gemmesh::trace::Timeline;
use gemmesh::{AllGatherMatmul, Group, Host, all_gather_matmul, bf16, launch};

const RANKS: usize = 4;
/// out[M, N] = gather(a)[M, K] · b[N, K]ᵀ, N columns on each rank.
const M: usize = 4096;
const N: usize = 16;
const K: usize = 4096;

/// Ranks, four unless a launcher says otherwise, multiply a matrix whose rows are spread over them.
#[derive(Parser)]
struct Args {
    /// Run the ranks as threads of this process.
    #[arg(long)]
    threads: bool,
    /// The most gigabytes per second that a rank copies, to imitate a link between GPUs.
    #[arg(long, default_value_t = 0.5)]
    link: f64,
}

fn main() -> ExitCode {
    let Args { threads, link } = Args::parse();
    let builder = Group::<Host>::builder().link((link * 1e9) as usize);
    let rank = |group| rank(group, link);
    let result = if threads {
        builder.threads(RANKS, rank).map(drop)
    } else if launch::is_rank() {
        builder.from_env().map_err(Failure::from).and_then(rank)
    } else {
        launch::launch(RANKS).map_err(Failure::from)
    };
    common::exit(result)
}

/// What each rank does.
fn rank(group: Group<Host>, link: f64) -> Result<(), Failure> {
    let mut case = AllGather::<_, bf16>::random(&group, [M, N, K], 1)?;
    case.poison()?;
    all_gather_matmul(&case.a, &case.b, &mut case.out)?;
    group.synchronize()?;

    // Every rank checks its own N columns.
    let check = case.check(usize::MAX)?.everywhere(&group)?;
    if !check.ok() {
        return Err(Failure::Wrong(check));
    }
    let prepared = AllGatherMatmul::new().prepare(&case.a, N)?;
    let times = common::measure(&group, &mut case, &prepared, 2, 15, || {})?;
    let trace = prepared.run_traced(&case.a, &case.b, &mut case.out)?;
    let timeline = Timeline::collect(&group, &trace)?;

    if group.rank() > 0 {
        return Ok(());
    }
    let world = group.world_size();
    println!(
        "all_gather_matmul on {world} ranks of the host: out[{M}, {N}] = gather(a)[{M}, {K}] · b[{N}, {K}]ᵀ, bf16,\n\
         each rank copying at most {link} GB/s (--link), as between GPUs\n"
    );
    println!(
        "verified: {} elements against float64; the worst error is {:.3} of what rounding allows ({:.2e})\n",
        check.elements, check.worst, check.max_abs_err
    );
    println!("{}", common::table(&times.rows[..4]));
    println!(
        "fused takes {:.0} % of the time of gather then matmul (median over the rounds)\n",
        100.0 * times.fused_to_sequential
    );
    let title = format!("all_gather_matmul, {world} ranks: {M}×{N}×{K} bf16");
    timeline.write_svg("timeline.svg", &title)?;
    timeline.write_chrome("timeline.json")?;
    println!(
        "wrote timeline.svg (open it in a browser) and timeline.json (open it in ui.perfetto.dev)"
    );
    Ok(())
}
