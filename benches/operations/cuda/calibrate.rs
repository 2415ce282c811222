//! Measures the rates that the library's model uses.

use std::fs;
use std::path::Path;

use gemmesh::error::{Class, Kind};
use gemmesh::schedule::{self, Layout, Problem};
use gemmesh::testing::{Sample, Variant, with_each_kernel};
use gemmesh::{Chunking, Config, Cuda, Group, Result, Route};

use super::clock::{self, Timer};
use crate::common::gather::AllGather;
use crate::common::{self, Failure, Multiplied, Operation};

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
/// Runs that count, after one that does not.
const ROUNDS: usize = 3;

/// Times kernels and ways to move rows on `SHAPES`, and writes the rates that explain the times to a file. Collective.
pub fn calibrate<T: Multiplied>(group: &Group<Cuda>, path: &Path) -> Result<(), Failure> {
    clock::bind(group)?;
    let timer = Timer::new(group)?;
    let mut samples = Vec::new();
    for shape in SHAPES {
        let begin = samples.len();
        let mut operation = AllGather::<Cuda, T, T::Addend>::random(group, shape, 1)?;
        let default = operation.prepare(None)?.config();
        let with = |config: &Config, slices: usize| {
            let tile = config.tile.with_k_slices(slices);
            Config::new(tile, config.chunking, config.route)
        };
        let whole = with_each_kernel(&with(&default, 1), Variant::Forms, [T::DTYPE; 2]);
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
    if group.rank() > 0 {
        return Ok(());
    }
    let (text, error) = gemmesh::testing::calibrate(group, &samples)?;
    fs::write(path, &text).map_err(|e| {
        Kind::System {
            action: format!("write {}", path.display()),
            reason: e.to_string(),
        }
        .on(0)
    })?;
    println!(
        "{text}{} measurements, explained within {:.1} % in the median",
        samples.len(),
        100.0 * error
    );
    Ok(())
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
fn sample<T: Multiplied>(
    timer: &Timer,
    operation: &mut AllGather<Cuda, T, T::Addend>,
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
    let operation = schedule::Operation::ALL_GATHER_MATMUL;
    let problem = Problem::new(operation, T::DTYPE, layout, n);
    Ok(Some(Sample {
        problem,
        config,
        gathers,
        micros,
    }))
}
