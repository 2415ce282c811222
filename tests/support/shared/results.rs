//! Every result is the one that it must be.

use std::ops::Range;

use gemmesh::error::Kind;
use gemmesh::fp8::{Quantized, Scales, ShardedScales};
use gemmesh::pipelines::{
    CallbackResult, ProduceAndReduceScatter, all_gather_and_consume, produce_and_all_to_all,
    produce_and_reduce_scatter,
};
use gemmesh::tuning::{Numerics, Route};
use gemmesh::views::{MatrixView, MatrixViewMut};
use gemmesh::{
    AllGatherMatmul, Config, Error, F8E4M3, Group, Matmul, MatmulAllReduce, MatmulReduceScatter,
    Matrix, ShardedMatrix, all_gather, all_gather_matmul, all_reduce, all_to_all, bf16, broadcast,
    matmul_all_reduce, matmul_reduce_scatter, reduce_scatter,
};

use crate::support::errors::{kind_of, parts};
use crate::support::numbers::{Reference, bits, normal};
use crate::support::products::{Arguments, Case, Placed, ROUTES};
use crate::support::tested::{Tested, all_done, assert_call_mismatch, poisoned, ranks, same_error};

/// 100 times: the fused product of one of `cases`, under delays that differ each time, has the bits of the product
/// after the gather.
#[track_caller]
pub fn fused_is_gather_then_matmul<B: Tested>(test: &str, world: usize, cases: &[Case]) {
    let ranks = ranks::<B>(test, world, |rank| {
        let workers = cases.iter().map(|case| case.workers).max();
        let builder = Group::<B>::builder()
            .timeout(B::TIMEOUT)
            .workers(workers.unwrap_or(0).max(1));
        let group = builder.connect(rank.rank, rank.world, &rank.address)?;
        let mut expected = Vec::new();
        let mut placed = Vec::new();
        for case in cases {
            let a = case.a::<bf16>();
            let (b, bias) = case.b::<bf16>(rank.rank);
            let mut matrices = Placed::new(&group, case, &a, &b, bias.as_deref())?;
            matrices.poison()?;
            matrices.gather_then_matmul(case.config)?;
            let (gathered, out) = matrices.read()?;
            assert_eq!(bits(&gathered), bits(&a), "{case:?}");
            let reference = Reference::new(&a, &b, bias.as_deref(), case.k);
            if let Err(what) = reference.check(&out) {
                panic!("rank {}, {case:?}: {what}", rank.rank);
            }
            expected.push((gathered, out));
            placed.push(matrices);
        }
        for seed in 0..100 {
            gemmesh::testing::delay_chunks(Some(seed));
            let index = seed as usize % cases.len();
            let (case, matrices) = (&cases[index], &mut placed[index]);
            let route = ROUTES[seed as usize / cases.len() % ROUTES.len()];
            let config = case.config.map(|config| config.with_route(route));
            matrices.poison()?;
            matrices.fused(config)?;
            let (gathered, out) = matrices.read()?;
            let (all_rows, product) = &expected[index];
            assert_eq!(bits(&gathered), bits(all_rows), "seed {seed}, {case:?}");
            assert!(bits(&out) == bits(product), "seed {seed}, {case:?}");
        }
        gemmesh::testing::delay_chunks(None);
        Ok::<_, Error>("the same bits 100 times".into())
    });
    all_done(ranks);
}

/// Where bits may depend on K alone, a row has the same in every batch; and a configuration that cuts K is refused.
#[track_caller]
pub fn a_row_has_the_bits_that_it_has_in_any_batch<B: Tested>(test: &str) {
    const LARGEST: usize = 400;
    let [n, k] = [24, 1000];
    all_done(ranks::<B>(test, 2, |rank| {
        let builder = Group::<B>::builder()
            .timeout(B::TIMEOUT)
            .workers(1)
            .numerics(Numerics::Invariant);
        let group = builder.connect(rank.rank, rank.world, &rank.address)?;
        let rows: Vec<bf16> = normal(1, LARGEST * k);
        let b = group.upload(&normal::<bf16>(2 + rank.rank as u64, n * k), n, k)?;
        let mut known = None;
        for m in [LARGEST, 1, 2, 37, 129] {
            let mut a = group.sharded::<bf16>(m, k)?;
            let own = a.rows();
            a.shard_mut()
                .copy_from_host(&rows[own.start * k..own.end * k])?;
            let mut out = group.zeros::<bf16>(m, n)?;
            all_gather_matmul(&a, &b, &mut out)?;
            let partial = group.upload(&rows[..m * k], m, k)?;
            let mut sums = group.sharded::<bf16>(m, 2 * n)?;
            let weight =
                group.upload(&normal::<bf16>(9 + rank.rank as u64, 2 * n * k), 2 * n, k)?;
            matmul_all_reduce(&partial, &weight, &mut sums)?;
            let found = [out.to_vec()?, sums.to_vec()?];
            let known = known.get_or_insert_with(|| found.clone());
            for (found, known) in found.iter().zip(known) {
                assert!(bits(found) == bits(&known[..found.len()]), "{m} rows");
            }

            let problem = AllGatherMatmul::<B, bf16>::new().prepare(&a, n)?.config();
            for tile in [problem.tile.with_split_k(2), problem.tile.with_k_slices(2)] {
                let config = Config::new(tile, problem.chunking, problem.route);
                let cut = AllGatherMatmul::<B, bf16>::new().config(config);
                let error = cut.prepare(&a, n).err().map(|error| error.to_string());
                let words = error.unwrap_or_default();
                assert!(words.contains("Numerics::Invariant"), "{words:?}");
            }
        }
        Ok("the same bits".into())
    }));
}

/// Every operation of no rows ends, with nothing done, by every route; and ranks are in step after it.
#[track_caller]
pub fn no_rows_are_nothing_to_do<B: Tested>(test: &str) {
    const N: usize = 24;
    const K: usize = 72;
    all_done(ranks::<B>(test, 3, |rank| {
        let builder = Group::<B>::builder().timeout(B::TIMEOUT).workers(1);
        let group = builder.connect(rank.rank, rank.world, &rank.address)?;
        let mut some = Arguments::new(&group, 9, 8, 16)?;
        let mut a = group.sharded::<bf16>(0, K)?;
        assert_eq!((a.shape(), a.to_vec()?.len()), ([0, K], 0));
        a.shard_mut().copy_from_host(&[])?;
        let mut own = group.upload::<bf16>(&[], 0, K)?;
        let mut out = group.zeros::<bf16>(0, N)?;
        let mut sums = group.sharded::<bf16>(0, N)?;
        let residual = group.zeros::<bf16>(0, N)?;
        let b = group.upload(&vec![bf16::ONE; N * K], N, K)?;
        let bias = group.zeros::<bf16>(1, N)?;
        for route in ROUTES {
            let config = B::config(&a, N)?.with_route(route);
            let gather = AllGatherMatmul::new().bias(&bias).config(config);
            let prepared = gather.prepare(&a, N)?;
            assert!(!format!("{}", prepared.explain()).is_empty());
            let scatter = MatmulReduceScatter::new()
                .residual(&residual)
                .config(config);
            let reduce = MatmulAllReduce::new().config(config);
            for base in 1..3 {
                prepared.run(&a, &b, &mut out)?;
                prepared.run_traced(&a, &b, &mut out)?;
                prepared.matmul(&a, &b, &mut out)?;
                scatter.run(&own, &b, &mut out)?;
                scatter.run_into(&own, &b, &mut sums)?;
                reduce.run(&own, &b, &mut sums)?;
                some.fill(&group, base)?;
                some.verify_by(&group, route)?;
            }
        }
        all_gather_matmul(&a, &b, &mut out)?;
        AllGatherMatmul::new().stages(3).run(&a, &b, &mut out)?;
        let staged = group.sharded_staged::<bf16>(0, K, 2)?;
        all_gather_matmul(&staged, &b, &mut out)?;
        let mut more = group.zeros::<bf16>(0, N)?;
        AllGatherMatmul::new().run(&a, [&b, &b], [&mut out, &mut more])?;
        AllGatherMatmul::new().gated().run(&a, [&b, &b], &mut out)?;
        Matmul::new().bias(&bias).run(&own, &b, &mut out)?;
        matmul_reduce_scatter(&own, &b, &mut out)?;
        matmul_all_reduce(&own, &b, &mut sums)?;
        no_rows_are_exchanged(&group, &mut a, &mut own)?;
        some.fill(&group, 5)?;
        some.verify(&group)?;
        Ok("nothing".into())
    }));
}

/// By each operation without a product.
fn no_rows_are_exchanged<B: Tested>(
    group: &Group<B>,
    a: &mut ShardedMatrix<B, bf16>,
    own: &mut Matrix<B, bf16>,
) -> Result<(), Error> {
    let [_, k] = a.shape();
    all_gather(&*a)?;
    broadcast(a, 1)?;
    reduce_scatter(&*own, &mut group.zeros(0, k)?)?;
    all_reduce(&*own, a)?;
    all_to_all(&*own, a)?;
    let called = |what: &str| -> CallbackResult { panic!("called to {what} no rows") };
    all_gather_and_consume(&*a, |_| called("consume"))?;
    produce_and_reduce_scatter(0, own, |_| called("make"))?;
    ProduceAndReduceScatter::new().run_into(a, |_| called("make"))?;
    produce_and_all_to_all(a, |_| called("make"))
}

/// Operands without rows have scales of each kind, and so have outputs: [1, 0], [0, blocks], [blocks, 0].
#[track_caller]
pub fn no_rows_have_scales<B: Tested>(test: &str) {
    const N: usize = 256;
    const K: usize = 128;
    all_done(ranks::<B>(test, 2, |rank| {
        let builder = Group::<B>::builder().timeout(B::TIMEOUT).workers(1);
        let group = builder.connect(rank.rank, rank.world, &rank.address)?;
        let a = group.sharded::<F8E4M3>(0, K)?;
        let own = group.zeros::<F8E4M3>(0, K)?;
        let b = group.upload(&vec![F8E4M3::from_f32(1.0); N * K], N, K)?;
        let (one, each) = (
            group.upload(&[1f32], 1, 1)?,
            group.upload(&[1f32; N], 1, N)?,
        );
        let of_b = group.upload(&[1f32; 2], 2, 1)?;
        let none = group.upload::<f32>(&[], 1, 0)?;
        assert_eq!((none.shape(), none.to_vec()?.len()), ([1, 0], 0));
        let [of_row, in_column] = [group.zeros::<f32>(0, 1)?, group.zeros::<f32>(1, 0)?];
        let mut sums = group.sharded::<bf16>(0, N)?;
        for (of_a, of_b) in [
            (Scales::tensor(&one), Scales::tensor(&one)),
            (Scales::rows(&none), Scales::rows(&each)),
            (Scales::blocks(&of_row), Scales::blocks(&of_b)),
            (Scales::transposed_blocks(&in_column), Scales::blocks(&of_b)),
        ] {
            let b = b.scaled(of_b);
            let mut out = group.zeros::<bf16>(0, N)?;
            Matmul::new().run(own.scaled(of_a), b, &mut out)?;
            AllGatherMatmul::new().run(a.scaled(of_a), b, &mut out)?;
            MatmulReduceScatter::new().run(own.scaled(of_a), b, &mut out)?;
            MatmulAllReduce::new().run(own.scaled(of_a), b, &mut sums)?;
            let mut values = group.zeros::<F8E4M3>(0, N)?;
            let (mut blocks, mut columns) = (group.zeros(0, N / 128)?, group.zeros(N / 128, 0)?);
            for scales in [
                Quantized::blocks(&mut blocks),
                Quantized::transposed_blocks(&mut columns),
                Quantized::tensor(&one),
            ] {
                let out = values.view_mut().quantized(scales);
                Matmul::new().run(own.scaled(of_a), b, out)?;
            }
        }
        let columns = ShardedScales::<B>::columns_of_rows();
        let of_rows = group.sharded::<f32>(0, columns)?;
        let mut out = group.zeros::<bf16>(0, N)?;
        let a = a.scaled(ShardedScales::rows(&of_rows));
        AllGatherMatmul::new().run(a, b.scaled(Scales::rows(&each)), &mut out)?;
        // They are matrices like others.
        let mut copied = group.zeros::<f32>(1, 0)?;
        copied.view_mut().copy_from(&none)?;
        copied.copy_from_host(&[])?;
        let sum = reduce_scatter(&none, &mut copied);
        assert!(matches!(kind_of(&sum), Some(Kind::Limit { .. })), "{sum:?}");
        group.barrier()?;
        Ok("scaled".into())
    }));
}

/// No rows of a matrix that has some are a view like others, wherever they would begin.
#[track_caller]
pub fn views_of_no_rows_are_operands<B: Tested>(test: &str) {
    all_done(ranks::<B>(test, 1, |rank| {
        let group = Group::<B>::builder().connect(rank.rank, rank.world, &rank.address)?;
        let a = group.upload(&[bf16::ONE; 3 * 32], 3, 32)?;
        let b = group.upload(&[bf16::ONE; 8 * 16], 8, 16)?;
        let seven = vec![bf16::from_f32(7.0); 3 * 8];
        let mut out = group.upload(&seven, 3, 8)?;
        for begin in 0..=3 {
            let view = a.rows(begin..begin)?.columns(16..32)?;
            assert_eq!(view.shape(), [0, 16]);
            matmul_of(view, &b, out.view_mut().rows(begin..begin)?)?;
        }
        let none = group.zeros::<bf16>(0, 32)?;
        matmul_of(none.columns(8..24)?, &b, out.view_mut().rows(0..0)?)?;
        assert_eq!(bits(&out.to_vec()?), bits(&seven), "nothing was written");
        let limited = |what: Result<MatrixView<'_, B, bf16>, Error>| {
            assert!(
                matches!(kind_of(&what), Some(Kind::Limit { .. })),
                "{what:?}"
            );
        };
        limited(a.rows(4..4));
        limited(a.rows(Range { start: 2, end: 1 }));
        limited(none.rows(0..1));
        // Without columns there is no number of rows to tell.
        limited(a.columns(8..8));
        assert!(matches!(
            kind_of(&group.zeros::<bf16>(0, 0)),
            Some(Kind::Limit { .. })
        ));
        assert!(matches!(
            kind_of(&group.sharded::<bf16>(0, 0)),
            Some(Kind::Limit { .. })
        ));
        Ok("views".into())
    }));
}

fn matmul_of<B: Tested>(
    a: MatrixView<'_, B, bf16>,
    b: &Matrix<B, bf16>,
    out: MatrixViewMut<'_, B, bf16>,
) -> Result<(), Error> {
    Matmul::new().run(a, b, out)
}

/// A rank that has no rows where others have some makes another call, and all hear of it.
#[track_caller]
pub fn no_rows_on_one_rank_are_another_call<B: Tested>(test: &str) {
    let ranks = ranks::<B>(test, 3, |rank| {
        let group = Group::<B>::builder().timeout(B::TIMEOUT);
        let group = group.connect(rank.rank, rank.world, &rank.address)?;
        let mut a = group.sharded_with_capacity::<bf16>(9, 8)?;
        let b = group.upload(&[bf16::ONE; 64], 8, 8)?;
        let mut out = group.zeros::<bf16>(9, 8)?;
        if rank.rank == 2 {
            a.set_rows(&[0; 3])?;
            out.set_rows(0)?;
        }
        let begun = all_gather_matmul(&a, &b, &mut out);
        // Who has nothing to do may have done it before the others came.
        let result = begun
            .and_then(|()| group.synchronize())
            .and_then(|()| group.barrier());
        poisoned(&group, result)
    });
    match parts(&same_error(&ranks.outcomes())) {
        (Some(rank), Kind::CallMismatch { .. }) => assert_eq!(rank, 2),
        other => panic!("{other:?}"),
    }
}

/// One matrix, whose rows change from call to call: any number up to its capacity, however they are split.
#[track_caller]
pub fn rows_change_within_a_capacity<B: Tested>(test: &str) {
    const CAPACITY: usize = 300;
    const K: usize = 72;
    const N: usize = 24;
    const SPLITS: [[usize; 3]; 9] = [
        [100, 100, 100],
        [0, 0, 0],
        [1, 0, 0],
        [0, 0, 2],
        [128, 0, 129],
        [7, 150, 30],
        [0, 300, 0],
        [1, 1, 1],
        [43, 42, 42],
    ];
    all_done(ranks::<B>(test, 3, |rank| {
        let builder = Group::<B>::builder().timeout(B::TIMEOUT).workers(1);
        let group = builder.connect(rank.rank, rank.world, &rank.address)?;
        let mut a = group.sharded_with_capacity::<bf16>(CAPACITY, K)?;
        assert_eq!((a.shape(), a.capacity()), ([CAPACITY, K], CAPACITY));
        let mut out = group.zeros(CAPACITY, N)?;
        for (step, rows) in SPLITS.iter().cycle().take(40).enumerate() {
            let case = Case {
                rows: rows.to_vec(),
                n: N,
                k: K,
                seed: step as u64,
                ..Case::default()
            };
            verify_in(&group, &case, &mut a, &mut out)?;
        }
        rows_beyond_the_capacity_are_refused(&mut a, &mut out, CAPACITY);
        Ok("right".into())
    }));
}

/// The product of `case`, in matrices that get the rows of the case. Collective.
fn verify_in<B: Tested>(
    group: &Group<B>,
    case: &Case,
    a: &mut ShardedMatrix<B, bf16>,
    out: &mut Matrix<B, bf16>,
) -> Result<(), Error> {
    let (m, n, k) = (case.m(), case.n, case.k);
    a.set_rows(&case.rows)?;
    assert_eq!(a.shape(), [m, k]);
    let all = case.a::<bf16>();
    let own = a.rows();
    a.shard_mut()
        .copy_from_host(&all[own.start * k..own.end * k])?;
    a.poison(bf16::NAN)?;
    let (weight, _) = case.b::<bf16>(group.rank());
    let b = group.upload(&weight, n, k)?;
    out.set_rows(m)?;
    out.copy_from_host(&vec![bf16::NAN; m * n])?;
    // No one poisons what a peer has written already.
    group.barrier()?;
    all_gather_matmul(&*a, &b, &mut *out)?;
    let gathered = a.to_vec()?;
    assert_eq!(bits(&gathered), bits(&all), "{case:?}");
    let reference = Reference::new(&all, &weight, None, k);
    if let Err(what) = reference.check(&out.to_vec()?) {
        panic!("rank {}, {case:?}: {what}", group.rank());
    }
    Ok(())
}

fn rows_beyond_the_capacity_are_refused<B: Tested>(
    a: &mut ShardedMatrix<B, bf16>,
    out: &mut Matrix<B, bf16>,
    capacity: usize,
) {
    let assert_limited = |error: Error| match error.kind() {
        Kind::Limit { value, max, .. } => assert_eq!((*value, *max), (capacity + 1, capacity)),
        other => panic!("{other:?}"),
    };
    let before = a.shape();
    assert_limited(a.set_rows(&[capacity, 0, 1]).unwrap_err());
    assert!(matches!(
        kind_of(&a.set_rows(&[1; 2])),
        Some(Kind::Unsuitable { .. })
    ));
    assert_eq!(a.shape(), before);
    let before = out.shape();
    assert_limited(out.set_rows(capacity + 1).unwrap_err());
    assert_eq!(out.shape(), before);
}

/// Ranks that give a matrix other rows are told so at their next operation, also where there are as many in all.
#[track_caller]
pub fn other_rows_are_a_mismatch<B: Tested>(test: &str) {
    let ranks = ranks::<B>(test, 3, |rank| {
        let builder = Group::<B>::builder().timeout(B::TIMEOUT).workers(1);
        let group = builder.connect(rank.rank, rank.world, &rank.address)?;
        let mut a = group.sharded_with_capacity::<bf16>(30, 8)?;
        a.set_rows(match rank.rank {
            1 => &[3, 4, 5],
            _ => &[4, 4, 4],
        })?;
        let b = group.upload(&[bf16::ONE; 64], 8, 8)?;
        let mut out = group.zeros::<bf16>(12, 8)?;
        // Who moves the rows by default depends on the GPUs that there are.
        let chosen = AllGatherMatmul::new().prepare(&a, 8)?.config();
        let pulled = AllGatherMatmul::new().config(chosen.with_route(Route::Pull));
        let result = pulled.run(&a, &b, &mut out);
        poisoned(&group, result.and_then(|()| group.synchronize()))
    });
    let outcomes = ranks.outcomes();
    assert_call_mismatch(
        &same_error(&outcomes),
        1,
        "all_gather_matmul(M = 12, K = 8, bf16, rows of each rank = [3, 4, 5], the 1st sharded matrix of the group)",
        "all_gather_matmul(M = 12, K = 8, bf16, the 1st sharded matrix of the group)",
    );
}
