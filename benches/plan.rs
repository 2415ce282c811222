//! How long planning takes: it stands before the first run of every new shape.

use criterion::{Criterion, criterion_group, criterion_main};
use gemmesh::DType;
use gemmesh::schedule::{Chunking, Config, Description, Layout, Route, TileShape, all_gather};

fn plan(criterion: &mut Criterion) {
    let config = Config::new(
        TileShape::new(128, 256, 64).with_group_m(8),
        Chunking::new(4),
        Route::Pull,
    );
    criterion.bench_function("plan 16384 x 6656 x 16384, 8 ranks", |bencher| {
        bencher.iter(|| {
            let asked = Description {
                operation: "all_gather_matmul",
                dtype: DType::Bf16,
                layout: Layout::balanced(16384, 16384, 8)?,
                n: 6656,
            };
            all_gather::gather_and_multiply(&asked, 3, config)
        });
    });
}

criterion_group!(benches, plan);
criterion_main!(benches);
