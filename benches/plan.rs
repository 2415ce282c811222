//! Times planning, which comes before the first run of every new shape.

use std::hint::black_box;
use std::time::Instant;

use gemmesh::Config;
use gemmesh::DType;
use gemmesh::schedule::plan::plan;
use gemmesh::schedule::{Layout, Operation, Problem};
use gemmesh::tuning::{Chunking, Route, TileShape};

const ROUNDS: usize = 101;

fn main() -> gemmesh::Result<()> {
    let few = Config::new(TileShape::new(16, 64, 64), Chunking::new(1), Route::Store);
    let tile = TileShape::new(128, 256, 64).with_group_m(8);
    let many = Config::new(tile, Chunking::new(2), Route::Push);
    for (m, n, k, world, config) in [
        (16, 1792, 4096, 2, few),
        (64, 1792, 4096, 2, few),
        (4096, 1792, 4096, 2, many),
        (16384, 6656, 16384, 8, many),
    ] {
        let layout = Layout::balanced(m, k, world)?;
        let problem = Problem::new(Operation::ALL_GATHER_MATMUL, DType::Bf16, layout, n);
        let mut times = Vec::with_capacity(ROUNDS);
        for _ in 0..ROUNDS {
            let began = Instant::now();
            black_box(plan(black_box(&problem), 1, config)?);
            times.push(began.elapsed());
        }
        times.sort_unstable();
        let [fastest, median] = [times[0], times[ROUNDS / 2]];
        println!("plan {m}×{n}×{k}, {world} ranks: median {median:.1?}, fastest {fastest:.1?}");
    }
    Ok(())
}
