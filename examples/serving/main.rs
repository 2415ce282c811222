//! A serving loop with continuous batching. Requests come, their prompts are prefilled when there is room, and all
//! running requests are decoded together, a token each. So M, the tokens of a step, changes at every step. Memory is
//! allocated once, for a capacity.
//!
//! ```sh
//! cargo run --release --example serving                                      # two ranks of the host
//! cargo run --release --features cudarc --example serving -- --backend cuda # two GPUs
//! ```
//!
//! The same 1,000 steps run by short calls, which plan each M when it comes first, and by calls that were prepared for
//! every M before. On GPUs they also run with decoding steps that are replayed from CUDA graphs, one for each size that
//! M is rounded up to. Prefills stay calls.

mod batching;
#[cfg(feature = "cudarc")]
mod graphs;
mod model;

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::time::{Duration, Instant};

use batching::{Batching, Step};
use clap::{Parser, ValueEnum};
use gemmesh::{Backend, Group, Host, Result};
use model::{Model, PreparedLayers};

const STEPS: usize = 1000;
/// Steps between two that are compared with float64.
const CHECKED: usize = 249;

/// Serves random requests on two ranks, and times how M that changes is dealt with.
#[derive(Parser)]
struct Args {
    /// The backend that runs the ranks.
    #[arg(long, value_enum, default_value_t = BackendName::Host)]
    backend: BackendName,
    /// Columns of a token.
    #[arg(long, default_value_t = 64)]
    model: usize,
    /// Hidden columns on each rank.
    #[arg(long, default_value_t = 64)]
    hidden: usize,
    /// Layers, of two products each.
    #[arg(long, default_value_t = 2)]
    layers: usize,
    /// The most tokens of a step.
    #[arg(long, default_value_t = 512)]
    capacity: usize,
}

#[derive(Clone, Copy, ValueEnum)]
enum BackendName {
    Host,
    #[cfg(feature = "cudarc")]
    Cuda,
}

fn main() -> Result<()> {
    let args = Args::parse();
    match args.backend {
        BackendName::Host => {
            let serve = |group| serve(&group, &args, |_, _| Ok(Vec::new()));
            Group::<Host>::threads(2, serve).map(drop)
        }
        #[cfg(feature = "cudarc")]
        BackendName::Cuda if !gemmesh::launch::is_rank() => gemmesh::launch::launch(2),
        #[cfg(feature = "cudarc")]
        BackendName::Cuda => {
            let group = Group::<gemmesh::Cuda>::from_env()?;
            let stream = graphs::stream(&group)?;
            serve(&group, &args, |model, steps| {
                graphs::run(&group, &stream, model, steps)
            })
        }
    }
}

/// A rank's part. `replay` runs the steps once more, if the backend has something to replay.
fn serve<B: Backend>(
    group: &Group<B>,
    args: &Args,
    replay: impl Fn(&mut Model<B>, &[Step]) -> Result<Vec<Duration>>,
) -> Result<()> {
    // All ranks know all requests, and so make the same steps.
    let steps: Vec<Step> = Batching::new(args.capacity).take(STEPS).collect();
    let mut model = Model::new(group, args.capacity, [args.model, args.hidden], args.layers)?;

    // Allocates room for sums of the most rows, because a larger M than before allocates.
    model.take_tokens(args.capacity, 0)?;
    model.run()?;
    group.synchronize()?;
    // A call only finds plans that calls before it have made.
    let by_calls = run(group, &mut model, &steps, |model, _| model.run())?;
    let mut prepared: BTreeMap<usize, PreparedLayers<B>> = BTreeMap::new();
    for step in &steps {
        if let Entry::Vacant(entry) = prepared.entry(step.tokens) {
            model.set_tokens(step.tokens)?;
            entry.insert(model.prepare()?);
        }
    }
    let by_prepared = run(group, &mut model, &steps, |model, step| {
        model.run_prepared(&prepared[&step.tokens])
    })?;
    drop(prepared);
    let by_graphs = replay(&mut model, &steps)?;

    if group.rank() == 0 {
        report(
            &steps,
            &[
                ("calls", by_calls),
                ("prepared", by_prepared),
                ("graphs", by_graphs),
            ],
        );
    }
    Ok(())
}

/// Runs all steps, and returns how long each took.
fn run<B: Backend>(
    group: &Group<B>,
    model: &mut Model<B>,
    steps: &[Step],
    layers: impl Fn(&mut Model<B>, &Step) -> Result<()>,
) -> Result<Vec<Duration>> {
    let mut times = Vec::with_capacity(steps.len());
    for (number, step) in steps.iter().enumerate() {
        model.take_tokens(step.tokens, number)?;
        // Ranks begin a step at about the same time, so that one rank's other work does not count in the others' time.
        group.barrier()?;
        let began = Instant::now();
        layers(model, step)?;
        group.synchronize()?;
        times.push(began.elapsed());
        if number % CHECKED == 0 {
            model.check(number)?;
        }
    }
    Ok(times)
}

fn report(steps: &[Step], ways: &[(&str, Vec<Duration>)]) {
    let tokens: usize = steps.iter().map(|step| step.tokens).sum();
    let prefills = steps.iter().filter(|step| !step.decodes).count();
    let mut sizes: Vec<usize> = steps.iter().map(|step| step.tokens).collect();
    sizes.sort_unstable();
    sizes.dedup();
    println!(
        "{} steps, {prefills} of them prefills; {tokens} tokens; {} different M, from {} to {}",
        steps.len(),
        sizes.len(),
        sizes[0],
        sizes[sizes.len() - 1]
    );
    println!(
        "{:10} {:>10} {:>22} {:>22}",
        "", "all, ms", "a prefill, µs (median)", "a decode, µs (median)"
    );
    for (way, times) in ways.iter().filter(|(_, times)| !times.is_empty()) {
        let median = |decodes: bool| {
            let of_kind = steps
                .iter()
                .zip(times)
                .filter(|(step, _)| step.decodes == decodes);
            let mut times: Vec<Duration> = of_kind.map(|(_, time)| *time).collect();
            times.sort_unstable();
            times
                .get(times.len() / 2)
                .map_or(f64::NAN, |time| time.as_secs_f64() * 1e6)
        };
        let all: Duration = times.iter().sum();
        println!(
            "{way:10} {:10.1} {:22.1} {:22.1}",
            all.as_secs_f64() * 1e3,
            median(false),
            median(true)
        );
    }
}
