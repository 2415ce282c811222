//! The whole library on one page. Four ranks gather a sharded matrix while they multiply it.
//!
//! ```sh
//! cargo run --release --example quickstart               # ranks as processes
//! cargo run --release --example quickstart -- --threads  # ranks as threads
//! ```

#[path = "../benches/common/mod.rs"]
mod common;

use std::process::ExitCode;
use std::thread::available_parallelism;
use std::time::Instant;

use clap::Parser;
use common::gather::AllGather;
use common::{Failure, Operation};
use gemmesh::trace::{Picture, Timeline, Trace};
use gemmesh::{AllGatherMatmul, Builder, Group, Host, Result, all_gather_matmul, bf16, launch};

const RANKS: usize = 4;
/// out[M, N] = gather(a)[M, K] · b[N, K]ᵀ on each rank.
const M: usize = 4096;
const K: usize = 4096;
/// The rounds that are timed.
const ROUNDS: usize = 9;

/// Ranks, four unless a launcher says otherwise, multiply a matrix whose rows are spread over them.
#[derive(Parser)]
struct Args {
    /// Run the ranks as threads of this process.
    #[arg(long)]
    threads: bool,
    /// The most gigabytes per second that a rank copies, to imitate a link between GPUs. By default the gather takes
    /// nearly as long as the product.
    #[arg(long)]
    link: Option<f64>,
}

fn main() -> ExitCode {
    let Args { threads, link } = Args::parse();
    if !threads && !launch::is_rank() {
        println!("{RANKS} ranks, as processes of this machine; [0] is what rank 0 prints");
        return common::exit(launch::launch(RANKS).map_err(Failure::from));
    }
    let chosen = match link {
        Some(link) => Ok(link),
        None => meet(Group::builder(), threads, balanced_link),
    };
    common::exit(chosen.and_then(|link| {
        let builder = Group::builder().link((link * 1e9) as usize);
        meet(builder, threads, |group| rank(group, link))
    }))
}

/// What this process's rank returns, or rank 0 of several threads.
fn meet<T: Send>(
    builder: Builder<Host>,
    threads: bool,
    part: impl Fn(Group<Host>) -> std::result::Result<T, Failure> + Sync,
) -> std::result::Result<T, Failure> {
    match threads {
        true => Ok(builder.threads(RANKS, part)?.swap_remove(0)),
        false => part(builder.from_env()?),
    }
}

/// N, eight columns for each core, so that the product takes as long on a large machine.
fn columns() -> usize {
    8 * available_parallelism().map_or(1, usize::from)
}

/// The gigabytes per second at which a gather takes 0.9 of the product's time here.
fn balanced_link(group: Group<Host>) -> std::result::Result<f64, Failure> {
    if group.rank() == 0 {
        println!("measuring how fast this machine multiplies ...");
    }
    let mut case = AllGather::<_, bf16>::random(&group, [M, columns(), K], 1)?;
    let prepared = case.prepare(None)?;
    let mut times = Vec::new();
    for _ in 0..4 {
        group.barrier()?;
        let begin = Instant::now();
        case.multiply(&prepared)?;
        times.push([begin.elapsed().as_secs_f64()]);
    }
    // In the first one the pages are touched.
    let [seconds] = common::medians(&common::slowest(&group, &times[1..])?);
    let others = (M - M / group.world_size()).max(1);
    let link = (others * K * size_of::<bf16>()) as f64 / (0.9 * seconds) / 1e9;
    // Two digits.
    let digit = 10f64.powf(link.log10().floor() - 1.0);
    Ok((link / digit).round() * digit)
}

/// What each rank does.
fn rank(group: Group<Host>, link: f64) -> std::result::Result<(), Failure> {
    let (n, world) = (columns(), group.world_size());
    // Rank 0 speaks for all.
    let say = |words: String| {
        if group.rank() == 0 {
            println!("{words}");
        }
    };
    say(format!(
        "all_gather_matmul: each rank has {} rows of a[{M}, {K}] and its own weight b[{n}, {K}], in bf16,\n\
         and wants out[{M}, {n}] = gather(a) · bᵀ. It copies {link:.2} GB/s, as over a link between GPUs (--link).",
        M / world
    ));
    let mut case = AllGather::<_, bf16>::random(&group, [M, n, K], 1)?;
    case.poison()?;
    all_gather_matmul(&case.a, &case.b, &mut case.out)?;
    group.synchronize()?;

    say("multiplied; comparing with float64 ...".into());
    let check = case.check(usize::MAX)?.everywhere(&group)?;
    if !check.ok() {
        return Err(Failure::Wrong(check));
    }
    say(format!(
        "right: all {} elements agree with float64 to within bf16's rounding",
        check.elements
    ));

    say(format!("timing {ROUNDS} rounds ...\n"));
    let prepared = AllGatherMatmul::new().prepare(&case.a, n)?;
    let times = common::measure(&group, &mut case, &prepared, 1, ROUNDS, || {})?;
    say(format!(
        "{}\n\nfused takes {:.0} % of the time of gather then matmul (median over the rounds)\n",
        common::table(&times.rows[..4]),
        100.0 * times.fused_to_sequential
    ));

    let AllGather { a, b, out, .. } = &mut case;
    let fused = median(&group, || prepared.run_traced(&*a, &*b, &mut *out))?;
    let alone = median(&group, || {
        prepared.run_in_sequence_traced(&*a, &*b, &mut *out)
    })?;
    if group.rank() > 0 {
        return Ok(());
    }
    let title = format!(
        "all_gather_matmul on {world} ranks: out[{M}, {n}] = gather(a)[{M}, {K}] · b[{n}, {K}]ᵀ, bf16"
    );
    let note = format!(
        "Each rank has {} rows of a, copies the others' rows at {link:.2} GB/s, and multiplies all rows by its own b.",
        M / world
    );
    Ok(draw(title, note, [&fused, &alone])?)
}

/// Draws the timelines of the fused product and of the one without overlap.
fn draw(title: String, note: String, [fused, alone]: [&Timeline; 2]) -> Result<()> {
    Picture::new(title)
        .note(note)
        .timeline(
            "fused: rows are multiplied while the next ones arrive",
            fused,
        )
        .timeline("without overlap: first the gather, then the product", alone)
        .write_svg("timeline.svg")?;
    fused.write_chrome("timeline.json")?;
    println!(
        "wrote timeline.svg (open it in a browser) and timeline.json (open it in ui.perfetto.dev)"
    );
    Ok(())
}

/// The timeline of the median of five runs.
fn median(group: &Group<Host>, mut run: impl FnMut() -> Result<Trace>) -> Result<Timeline> {
    let mut runs = Vec::new();
    for _ in 0..5 {
        group.barrier()?;
        runs.push(Timeline::collect(group, &run()?)?);
    }
    runs.sort_by_key(Timeline::duration);
    Ok(runs.swap_remove(2))
}
