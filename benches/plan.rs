//! How long planning takes: it stands before the first run of every new shape.

use criterion::{Criterion, criterion_group, criterion_main};
use gemmesh::DType;
use gemmesh::schedule::{Chunking, Config, Description, Layout, Route, TileShape, all_gather};

fn plan(criterion: &mut Criterion) {
    for (m, n, k, world) in [(16, 1792, 4096, 2), (16384, 6656, 16384, 8)] {
        let config = Config::new(
            TileShape::new(128, 256, 64).with_group_m(8),
            Chunking::new(4),
            Route::Pull,
        );
        let name = format!("plan {m} x {n} x {k}, {world} ranks");
        criterion.bench_function(&name, |bencher| {
            bencher.iter(|| {
                let asked = Description {
                    beside: None,
                    form: Default::default(),
                    operation: "all_gather_matmul",
                    dtype: DType::Bf16,
                    layout: Layout::balanced(m, k, world)?,
                    n,
                };
                all_gather::gather_and_multiply(&asked, 1, config)
            });
        });
    }
}

criterion_group!(benches, plan);
criterion_main!(benches);
