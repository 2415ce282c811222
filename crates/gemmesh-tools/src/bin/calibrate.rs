//! Measures the rates by which the library's model predicts times on this GPU, in less than a minute.
//!
//! ```sh
//! cargo run --release -p gemmesh-tools --features cuda --bin calibrate -- rates.json --ranks 2
//! ```
//!
//! The library chooses by them if `GEMMESH_RATES` names the file. It launches its ranks, unless torchrun, mpirun or
//! srun has launched them.

#[path = "../../../../benches/operations/cuda/clock.rs"]
#[allow(dead_code, unsafe_code)] // This uses a part of it.
mod clock;
#[path = "../../../../benches/common/mod.rs"]
mod common;
#[path = "../../../../benches/operations/cuda/memory.rs"]
#[allow(dead_code, unsafe_code)] // This uses a part of it.
mod memory;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::{fs, io};

use clap::Parser;
use clock::Timer;
use common::gather::AllGather;
use common::{Failure, Operation as _};
use gemmesh::error::{Class, Kind};
use gemmesh::schedule::{Layout, Operation, Problem};
use gemmesh::testing::{Variant, with_each_kernel};
use gemmesh::tools::{Rates, library_rates};
use gemmesh::tuning::{Chunking, Route};
use gemmesh::{Config, Cuda, DType, Group, Result, bf16, launch};
use gemmesh_tools::calibrate::{Sample, fit, median_error};

/// Times all kernels and routes on some shapes, in less than a minute, and writes the device's rates to a file. The
/// library chooses by them if GEMMESH_RATES names the file.
#[derive(Parser)]
struct Args {
    /// The file.
    file: PathBuf,
    /// Ranks to launch.
    #[arg(long, default_value_t = 4)]
    ranks: usize,
}

/// Shapes with few, hundreds and thousands of rows; narrow and wide, shallow and deep.
const SHAPES: [[usize; 3]; 28] = [
    [1, 3584, 2048],
    [2, 1024, 12_288],
    [8, 16_384, 1024],
    [16, 1792, 4096],
    [24, 12_288, 6144],
    [48, 512, 16_384],
    [64, 4096, 8192],
    [80, 6144, 3072],
    [100, 2304, 1024],
    [130, 16_384, 4096],
    [150, 896, 8192],
    [200, 4096, 12_288],
    [260, 3584, 6144],
    [300, 10_240, 1024],
    [400, 640, 3072],
    [500, 5632, 4096],
    [640, 1280, 10_240],
    [800, 9216, 2048],
    [1000, 3072, 3072],
    [1200, 24_576, 512],
    [1500, 768, 2048],
    [2000, 1152, 12_288],
    [2200, 8192, 3072],
    [3000, 2048, 1024],
    [4096, 3584, 4096],
    [5000, 448, 8192],
    [8192, 1792, 2048],
    [12_000, 4096, 1024],
];
/// Slices of K that are tried, beside none.
const SLICES: [usize; 4] = [2, 4, 12, 24];
/// What is timed.
type Gather = AllGather<Cuda, bf16, bf16>;

/// Runs that count, after one that does not.
const ROUNDS: usize = 3;

fn main() -> ExitCode {
    let args = Args::parse();
    common::exit(launch_or_run(&args))
}

fn launch_or_run(args: &Args) -> Result<(), Failure> {
    if !launch::is_rank() {
        return launch::launch(args.ranks).map_err(Failure::from);
    }
    let group = Group::<Cuda>::from_env()?;
    let samples = measure(&group)?;
    if group.rank() > 0 {
        return Ok(());
    }
    let rates = fit(&library_rates(&group), &samples);
    let text = write(&rates, &args.file)?;
    println!(
        "{text}{} measurements, explained within {:.1} % in the median",
        samples.len(),
        100.0 * median_error(&rates, &samples)
    );
    Ok(())
}

/// Writes rates to a file for `GEMMESH_RATES`. Returns its text.
fn write(rates: &Rates, path: &Path) -> Result<String> {
    let text = serde_json::to_string_pretty(rates).map_err(io::Error::from);
    let text = text.map(|text| text + "\n");
    let written = text.and_then(|text| fs::write(path, &text).map(|()| text));
    written.map_err(|error| {
        Kind::System {
            action: format!("write {}", path.display()),
            reason: error.to_string(),
        }
        .on(0)
    })
}

/// Times kernels and ways to move rows on `SHAPES`. Collective.
fn measure(group: &Group<Cuda>) -> Result<Vec<Sample>> {
    clock::bind(group)?;
    let timer = Timer::new(group)?;
    let mut samples = Vec::new();
    for shape in SHAPES {
        let begin = samples.len();
        let mut operation = Gather::random(group, shape, 1)?;
        let default = operation.prepare(None)?.config();
        let with = |config: &Config, slices: usize| {
            let tile = config.tile.with_k_slices(slices);
            Config::new(tile, config.chunking, config.route)
        };
        let whole = with_each_kernel(&with(&default, 1), Variant::Forms, [DType::Bf16; 2]);
        let unsplit = whole.iter().filter(|config| config.tile.split_k == 1);
        let sliced: Vec<Config> = unsplit
            .flat_map(|config| SLICES.map(|slices| with(config, slices)))
            .collect();
        for config in whole.into_iter().chain(sliced) {
            samples.extend(sample(&timer, &mut operation, shape, config, false)?);
        }
        if group.world_size() == 1 {
            continue;
        }
        let alone = samples[begin..].iter();
        let best = alone.min_by(|one, other| one.micros.total_cmp(&other.micros));
        let tile = best.map_or(default.tile, |best| best.config.tile);
        for (route, chunking) in ways() {
            let config = Config::new(tile, chunking, route);
            samples.extend(sample(&timer, &mut operation, shape, config, true)?);
        }
    }
    Ok(samples)
}

/// Ways to move rows.
fn ways() -> [(Route, Chunking); 5] {
    let one = Chunking::new(1);
    [
        (Route::Pull, one),
        (Route::Push, one),
        (Route::Push, one.with_cut_last(true)),
        (Route::Push, Chunking::new(2)),
        (Route::Store, one),
    ]
}

/// The median time of a configuration. None if the shape can't have it. Collective.
fn sample(
    timer: &Timer,
    operation: &mut Gather,
    shape: [usize; 3],
    config: Config,
    gathers: bool,
) -> Result<Option<Sample>> {
    let prepared = match operation.prepare(Some(config)) {
        // Slices need more room than there is, or ranks share a GPU and no one pushes.
        Err(error) if error.kind().class() == Class::Argument => return Ok(None),
        prepared => prepared?,
    };
    let group = &timer.group;
    let mut times = Vec::new();
    for _ in 0..=ROUNDS {
        let time = timer.time(|| match gathers {
            true => operation.run(&prepared),
            false => operation.multiply(&prepared),
        })?;
        times.push([time]);
    }
    let [micros] = common::medians(&common::slowest(group, &times[1..])?);
    let [m, n, k] = shape;
    let layout = Layout::balanced(m, k, group.world_size())?;
    let problem = Problem::new(Operation::ALL_GATHER_MATMUL, DType::Bf16, layout, n);
    Ok(Some(Sample {
        problem,
        config,
        gathers,
        micros,
    }))
}
