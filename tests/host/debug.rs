//! What `Debug` prints.

use std::fmt::Debug;
use std::time::Duration;

use gemmesh::fp8::{Accumulation, Scales, Scaling};
use gemmesh::launch::Launch;
use gemmesh::pipelines::{AllGatherAndConsume, ProduceAndAllToAll, ProduceAndReduceScatter};
use gemmesh::products::{Outputs, WeightLayout, WeightWidths, Weights};
use gemmesh::trace::Timeline;
use gemmesh::tuning::{Chunking, Numerics, Route, TileShape};
use gemmesh::{
    Activation, AllGatherMatmul, Config, DType, Error, F8E4M3, Group, Host, Matmul,
    MatmulAllReduce, MatmulReduceScatter, Matrix, bf16,
};

const ROWS: [usize; 2] = [128, 384];

/// Checks that a value is printed in one short line, in either form, and begins so.
fn is_short(value: &dyn Debug, begin: &str) {
    for printed in [format!("{value:?}"), format!("{value:#?}")] {
        assert!(printed.starts_with(begin), "{printed}");
        assert!(printed.len() < 200 && !printed.contains('\n'), "{printed}");
    }
}

fn check_on_ranks(check: impl Fn(&Group<Host>) -> Result<(), Error> + Sync) {
    let done = Group::<Host>::threads(2, |group| check(&group));
    assert_eq!(done, Ok(vec![(); 2]));
}

fn config() -> Config {
    let tile = TileShape::new(128, 256, 64);
    let tile = tile.with_stages(4).with_cluster(2, 1).with_split_k(16);
    let tile = tile.with_k_slices(64);
    let chunking = Chunking::new(64).with_cut_last(true);
    Config::new(tile.with_group_m(16), chunking, Route::Store).with_max_ctas(100)
}

#[test]
fn options_are_printed_in_a_short_line() {
    let builder = Group::<Host>::builder();
    is_short(&builder, "Builder<host>");
    let builder = builder.name("n\n".repeat(50)).workers(16).device(0);
    let builder = builder.timeout(Duration::from_secs(30));
    let builder = builder.arrival_timeout(Duration::from_millis(1500));
    is_short(&builder.numerics(Numerics::Invariant), "Builder<host>(");
    let launch = Launch::new(64).args(["--verbose"; 100]);
    is_short(
        &launch.env("TOKEN", "secret"),
        "Launch(ranks 64, args 100, envs 1)",
    );
    is_short(&config(), "Config(TileShape(128x256x64, stages 4, ");
    is_short(
        &AllGatherAndConsume::new().chunks(2),
        "AllGatherAndConsume(chunks 2)",
    );
    is_short(&ProduceAndAllToAll::new(), "ProduceAndAllToAll");
    let rows = [0; 64];
    let produce = ProduceAndReduceScatter::new().rows(&rows).chunks(2);
    is_short(
        &produce,
        "ProduceAndReduceScatter(rows of 64 ranks, chunks 2)",
    );
    is_short(&WeightWidths::from([4096; 64]), "WeightWidths(4096, ");
}

#[test]
fn matrices_are_printed_in_a_short_line() {
    check_on_ranks(|group| {
        is_short(group, "Group<host>(rank ");
        let mut a = group.sharded_rows::<bf16>(&ROWS, 256)?;
        is_short(&a, "ShardedMatrix<host, bf16>[512, 256] rows ");
        is_short(&a.shard_mut(), "ShardMut<host, bf16>[");
        let mut b = group.zeros::<bf16>(128, 256)?;
        is_short(&b, "Matrix<host, bf16>[128, 256]");
        is_short(&b.view(), "MatrixView<host, bf16>[128, 256]");
        is_short(&b.view_mut(), "MatrixViewMut<host, bf16>[128, 256]");
        let weights: Weights<_, bf16> = (0..64).map(|_| b.view()).collect();
        is_short(&weights, "Weights<host>(bf16[128, 256], ");
        drop(weights);
        let mut out = group.zeros::<f32>(512, 128)?;
        let outputs: Outputs<Host, bf16> = (&mut out).into();
        is_short(&outputs, "Outputs<host>(f32[512, 128])");
        let tensor = Matrix::into_dlpack(b);
        // SAFETY: the tensor is alive until it is taken back.
        let managed = unsafe { &*tensor };
        is_short(managed, "DLManagedTensor(DLTensor(0x");
        // SAFETY: no one else uses the tensor.
        unsafe { Matrix::<Host, bf16>::from_dlpack(group, tensor)? };
        Ok(())
    });
}

#[test]
fn products_are_printed_in_a_short_line() {
    check_on_ranks(|group| {
        let [n, k] = [128, 256];
        let bias = group.zeros::<bf16>(1, 2 * n)?;
        let gather = AllGatherMatmul::new().bias(&bias).gated().stages(2);
        let gather = gather.activation(Activation::Silu).output_dtype(DType::F32);
        let all = "AllGatherMatmul<host, bf16>(bias, Silu, gated, f32 output, stages 2)";
        is_short(&gather, all);
        let a = group.sharded_rows::<bf16>(&ROWS, k)?;
        let prepared = gather.prepare(&a, n)?;
        is_short(&prepared, "Prepared<host, bf16>[512, 256] x [256, 256]");
        is_short(&prepared.explain(), "Explanation(Config(");

        let scaled = Matmul::<Host, F8E4M3>::new().scaling(Scaling::Rows, Scaling::Tensor);
        let scaled = scaled.accumulation(Accumulation::Fast);
        is_short(&scaled, "Matmul<host, f8e4m3>(scaled, fast accumulation)");
        let x = group.zeros::<F8E4M3>(4, 16)?;
        let scales = group.zeros::<f32>(1, 4)?;
        let scales = Scales::rows(&scales);
        is_short(&scales, "Scales<host>(Rows, [1, 4])");
        is_short(&x.scaled(scales), "Operand<host, f8e4m3>[4, 16] Rows");

        let alone = Matmul::<Host, bf16>::new().weight_layout(WeightLayout::Kn);
        let alone = alone.config(config());
        is_short(&alone, "Matmul<host, bf16>(weights [K, N], config)");
        let prepared = Matmul::<Host, bf16>::new().prepare((group, [512, k]), n)?;
        is_short(
            &prepared,
            "PreparedMatmul<host, bf16>[512, 256] x [128, 256]",
        );

        let x = group.zeros::<bf16>(512, k)?;
        let scatter = MatmulReduceScatter::new().rows(&ROWS);
        is_short(&scatter, "MatmulReduceScatter<host, bf16>(rows of 2 ranks)");
        let prepared = scatter.prepare(&x, n)?;
        is_short(
            &prepared,
            "PreparedReduceScatter<host, bf16>[512, 256] x [128, 256]",
        );

        let sum = group.sharded::<bf16>(512, n)?;
        let reduce = MatmulAllReduce::new();
        is_short(&reduce, "MatmulAllReduce<host, bf16>");
        let prepared = reduce.prepare(&x, &sum)?;
        is_short(
            &prepared,
            "PreparedAllReduce<host, bf16>[512, 256] x [128, 256]",
        );
        Ok(())
    });
}

#[test]
fn chunks_blocks_and_traces_are_printed_in_a_short_line() {
    check_on_ranks(|group| {
        let a = group.sharded::<bf16>(512, 4)?;
        let trace = AllGatherAndConsume::new()
            .chunks(64)
            .run_traced(&a, |chunk| {
                is_short(&chunk, "Chunk<host, bf16>[");
                Ok(())
            })?;
        is_short(&trace, &format!("Trace(rank {}, ", group.rank()));
        let timeline = Timeline::collect(group, &trace)?;
        is_short(&timeline, "Timeline(2 ranks, ");
        #[cfg(feature = "timeline")]
        {
            let picture = gemmesh::trace::Picture::new("long\n".repeat(100));
            let picture = picture.note("a note").timeline("two ranks", &timeline);
            is_short(&picture, "Picture(\"long");
        }
        let mut out = group.sharded::<f32>(512, 1)?;
        ProduceAndAllToAll::new().run(&mut out, |block| {
            is_short(&block, "Block<host, f32>[");
            Ok(())
        })
    });
}
