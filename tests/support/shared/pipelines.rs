//! Pipelines: what the caller computes, beside what is moved.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::Duration;

use gemmesh::error::Kind;
use gemmesh::pipelines::{AllGatherAndConsume, Chunk, all_gather_and_consume};
use gemmesh::trace::{Lane, Span, Trace, Work};
use gemmesh::{
    AllGatherMatmul, Error, Group, MatmulReduceScatter, Matrix, all_gather_matmul, bf16,
};

use crate::support::errors::{assert_call_in_callback, parts};
use crate::support::numbers::{bits, nan, normal};
use crate::support::processes::Rank;
use crate::support::tested::{
    Tested, all_done, assert_call_mismatch, connect, connect_short, poisoned, ranks, same_error,
    until_failure,
};

/// A backend whose chunks the tests consume.
pub trait Consumes: Tested {
    /// Where rows of [rows, k] are copied to, each to its place.
    type Sink;
    fn sink(rows: usize, k: usize) -> Self::Sink;
    fn take(sink: &mut Self::Sink, chunk: &Chunk<Self, bf16>);
    /// The same by way of a matrix, which is dropped at once.
    fn take_by_way_of(
        sink: &mut Self::Sink,
        between: Matrix<Self, bf16>,
        chunk: &Chunk<Self, bf16>,
    );
    /// The streams have ended.
    fn taken(sink: &Self::Sink) -> Vec<bf16>;
}

/// Own rows first, then those of the next ranks in the ring, each row once, and as it was; in any number of chunks,
/// each rank its own, however late they come.
#[track_caller]
pub fn each_row_is_consumed_once_own_rows_first<B: Consumes>(test: &str) {
    const ROWS: [[usize; 3]; 4] = [[40, 0, 17], [1, 1, 1], [0, 0, 65], [128, 127, 130]];
    const K: usize = 24;
    all_done(ranks::<B>(test, 3, |rank| {
        let group = connect::<B>(rank, B::TIMEOUT)?;
        for seed in 0..60 {
            gemmesh::testing::delay_chunks((seed > 3).then_some(seed));
            let rows = ROWS[seed as usize % ROWS.len()];
            let m = rows.iter().sum();
            let all: Vec<bf16> = normal(seed, m * K);
            let mut a = group.sharded_rows::<bf16>(&rows, K)?;
            let own = a.rows();
            a.shard_mut()
                .copy_from_host(&all[own.start * K..own.end * K])?;
            a.poison(nan())?;
            let mut sink = B::sink(m, K);
            let mut calls: Vec<(usize, Range<usize>)> = Vec::new();
            let chunks = 1 + (seed as usize + rank.rank) % 5;
            AllGatherAndConsume::new().chunks(chunks).run(&a, |chunk| {
                assert_eq!(chunk.shape(), [chunk.rows().len(), K]);
                B::take(&mut sink, &chunk);
                calls.push((chunk.source(), chunk.rows()));
                Ok(())
            })?;
            group.synchronize()?;

            let mut expected = Vec::new();
            for distance in 0..rank.world {
                let source = (rank.rank + distance) % rank.world;
                let of_source = calls.iter().filter(|(from, _)| *from == source);
                let of_source: Vec<_> = of_source.cloned().collect();
                let (owned, count) = (a.rows_of(source), of_source.len());
                let most = if distance == 0 { 1 } else { chunks };
                assert_eq!(count, most.min(owned.len()), "rows of {source}");
                let mut next = owned.start;
                for (_, rows) in &of_source {
                    assert_eq!(rows.start, next, "rows of {source}");
                    next = rows.end;
                }
                assert_eq!(next, owned.end, "rows of {source}");
                expected.extend(of_source);
            }
            assert_eq!(calls, expected, "seed {seed}");
            assert_eq!(bits(&B::taken(&sink)), bits(&all), "seed {seed}");
            assert_eq!(bits(&a.to_vec()?), bits(&all), "seed {seed}");
        }
        gemmesh::testing::delay_chunks(None);
        Ok("60 times".into())
    }));
}

/// A trace shows the own rows' call first, each other call when its rows had come, and between them what was waited
/// for.
#[track_caller]
pub fn a_trace_shows_calls_behind_their_rows<B: Consumes>(test: &str) {
    const K: usize = 64;
    all_done(ranks::<B>(test, 3, |rank| {
        let group = connect::<B>(rank, B::TIMEOUT)?;
        let a = group.sharded::<bf16>(900, K)?;
        let operation = AllGatherAndConsume::new();
        for seed in 0..10 {
            gemmesh::testing::delay_chunks(Some(seed));
            let mut sink = B::sink(900, K);
            let trace = operation.run_traced(&a, |chunk| {
                B::take(&mut sink, &chunk);
                Ok(())
            })?;
            let calls = called(&trace);
            assert_in_turn(&calls, [0, 1, 2].map(|step| (rank.rank + step) % 3));
            for (source, call) in calls.iter().filter(|(source, _)| *source != rank.rank) {
                let of_source = |span: &&Span| match span.work {
                    Work::Pull { source: from, .. } | Work::Wait { source: from } => {
                        from == *source
                    }
                    _ => false,
                };
                let before: Vec<&Span> = trace.spans.iter().filter(of_source).collect();
                assert_eq!(before.len(), 2, "seed {seed}, rows of {source}");
                for span in before {
                    let late = span.end.saturating_sub(call.begin);
                    assert!(late < TICK, "seed {seed}: {span:?} after {call:?}");
                }
            }
        }
        gemmesh::testing::delay_chunks(None);
        Ok("10 times".into())
    }));
}

/// What clocks of devices may be off, in nanoseconds.
pub const TICK: u64 = 2_000;

/// The calls of the caller's function, and whose rows each had.
pub fn called(trace: &Trace) -> Vec<(usize, &Span)> {
    let calls = trace.spans.iter().filter_map(|span| match span.work {
        Work::Call { rank } => Some((rank, span)),
        _ => None,
    });
    calls.collect()
}

/// That the function was called for these ranks' rows and no others, on each of its streams in this order.
#[track_caller]
pub fn assert_in_turn(calls: &[(usize, &Span)], ranks: [usize; 3]) {
    let place = |rank: &usize| ranks.iter().position(|of| of == rank).expect("a rank");
    for lane in [0, 1].map(Lane::Caller) {
        let on_it = calls.iter().filter(|(_, span)| span.lane == lane);
        assert!(on_it.is_sorted_by_key(|(rank, _)| place(rank)), "{calls:?}");
    }
    let has = |rank: &usize| calls.iter().any(|(of, _)| of == rank);
    assert!(ranks.iter().all(has), "{calls:?}");
}

/// Values and their scales come together: the function gets the same rows of both. Only matrices that are split alike
/// go together.
#[track_caller]
pub fn two_matrices_are_consumed_together<B: Consumes>(test: &str) {
    const ROWS: [[usize; 3]; 3] = [[40, 0, 17], [1, 1, 1], [128, 127, 130]];
    const K: usize = 24;
    const SCALES: usize = 8;
    all_done(ranks::<B>(test, 3, |rank| {
        let group = connect::<B>(rank, B::TIMEOUT)?;
        for seed in 0..30 {
            gemmesh::testing::delay_chunks((seed > 3).then_some(seed));
            let rows = ROWS[seed as usize % ROWS.len()];
            let m: usize = rows.iter().sum();
            let (all, all_scales) = (normal(seed, m * K), normal(seed + 100, m * SCALES));
            let mut a = group.sharded_rows::<bf16>(&rows, K)?;
            let mut scales = group.sharded_rows::<bf16>(&rows, SCALES)?;
            let own = a.rows();
            a.shard_mut()
                .copy_from_host(&all[own.start * K..own.end * K])?;
            scales
                .shard_mut()
                .copy_from_host(&all_scales[own.start * SCALES..own.end * SCALES])?;
            a.poison(nan())?;
            scales.poison(nan())?;
            let mut sinks = (B::sink(m, K), B::sink(m, SCALES));
            let operation = AllGatherAndConsume::new().chunks(1 + seed as usize % 3);
            operation.run_with(&a, &scales, |values, scales| {
                assert_eq!(values.rows(), scales.rows());
                assert_eq!(values.source(), scales.source());
                B::take(&mut sinks.0, &values);
                B::take(&mut sinks.1, &scales);
                Ok(())
            })?;
            group.synchronize()?;
            assert_eq!(bits(&B::taken(&sinks.0)), bits(&all), "seed {seed}");
            assert_eq!(bits(&B::taken(&sinks.1)), bits(&all_scales), "seed {seed}");
        }
        gemmesh::testing::delay_chunks(None);
        let a = group.sharded::<bf16>(6, 8)?;
        let other = group.sharded_rows::<bf16>(&[1, 2, 3], 8)?;
        let result = AllGatherAndConsume::new().run_with(&a, &other, |_, _| Ok(()));
        let error = result.expect_err("they are split otherwise");
        assert!(matches!(error.kind(), Kind::Shape { .. }), "{error}");
        group.barrier()?;
        Ok("30 times".into())
    }));
}

/// A gather whose rows are consumed stands among other operations as any other: they follow one another on the same
/// matrix.
#[track_caller]
pub fn a_product_follows_a_consumer_of_the_same_rows<B: Consumes>(test: &str) {
    const K: usize = 16;
    all_done(ranks::<B>(test, 2, |rank| {
        let group = connect::<B>(rank, B::TIMEOUT)?;
        let mut a = group.sharded::<bf16>(90, K)?;
        let b = group.upload(&vec![bf16::ONE; 8 * K], 8, K)?;
        let mut out = group.zeros::<bf16>(90, 8)?;
        for step in 0..30 {
            let mine = bf16::from_f32((1 + step % 4 + rank.rank) as f32);
            let own = a.rows();
            a.shard_mut().copy_from_host(&vec![mine; own.len() * K])?;
            let mut sink = B::sink(90, K);
            all_gather_and_consume(&a, |chunk| {
                B::take(&mut sink, &chunk);
                Ok(())
            })?;
            all_gather_matmul(&a, &b, &mut out)?;
            let (product, rows) = (out.to_vec()?, B::taken(&sink));
            for source in 0..2 {
                let value = bf16::from_f32((1 + step % 4 + source) as f32);
                let of = a.rows_of(source);
                assert!(rows[of.start * K..of.end * K].iter().all(|&x| x == value));
                let sum = bf16::from_f32(value.to_f32() * K as f32);
                assert!(product[of.start * 8..of.end * 8].iter().all(|&x| x == sum));
            }
        }
        Ok("30 times".into())
    }));
}

/// An error of the function that rank 1 gives, at its second chunk, is every rank's.
#[track_caller]
pub fn an_error_of_a_consumer_is_every_ranks<B: Consumes>(test: &str) {
    let ranks = ranks::<B>(test, 3, |rank: &Rank| {
        let group = connect::<B>(rank, B::TIMEOUT)?;
        let a = group.sharded::<bf16>(30, 8)?;
        until_failure(&group, || {
            let mut calls = 0;
            let result = all_gather_and_consume(&a, |_| {
                calls += 1;
                match (rank.rank, calls) {
                    (1, 2) => Err("no room for the second chunk".into()),
                    _ => Ok(()),
                }
            });
            assert!(rank.rank != 1 || calls == 2, "{calls} calls");
            result
        })
    });
    let outcomes = ranks.outcomes();
    let error = same_error(&outcomes);
    let expected = Kind::ProgramFailed {
        function_of: Some("all_gather_and_consume".into()),
        reason: "no room for the second chunk".into(),
    }
    .on(1);
    assert_eq!(error, expected);
}

/// A panic of the function that rank 0 gives goes on there, and ends the group on every rank.
#[track_caller]
pub fn a_panic_of_a_consumer_ends_the_group<B: Consumes>(test: &str) {
    let ranks = ranks::<B>(test, 2, |rank: &Rank| {
        let group = connect::<B>(rank, B::TIMEOUT)?;
        let a = group.sharded::<bf16>(30, 8)?;
        if rank.rank == 0 {
            let panic = catch_unwind(AssertUnwindSafe(|| {
                // As a panic, without its words.
                all_gather_and_consume(&a, |_| resume_unwind(Box::new("planted")))
            }));
            let payload = panic.expect_err("the panic goes on");
            assert_eq!(payload.downcast_ref(), Some(&"planted"));
        }
        until_failure(&group, || all_gather_and_consume(&a, |_| Ok(())))
    });
    let outcomes = ranks.outcomes();
    let message = Some("planted".into());
    let expected = Kind::RankPanicked { message }.on(0);
    assert_eq!(same_error(&outcomes), expected);
}

/// Calls of the same group that the function makes are refused, for they would wait for it; those of another are not.
/// The group goes on.
#[track_caller]
pub fn a_consumer_makes_no_calls_of_its_group<B: Consumes>(test: &str) {
    all_done(ranks::<B>(test, 2, |rank| {
        let group = connect::<B>(rank, B::TIMEOUT)?;
        let a = group.sharded::<bf16>(30, 8)?;
        let b = group.upload(&[bf16::ONE; 64], 8, 8)?;
        let mut out = group.zeros::<bf16>(30, 8)?;
        let prepared = AllGatherMatmul::new().prepare(&a, 8)?;
        // It has not run, so it has no memory for partial sums yet.
        let partial = group.zeros::<bf16>(30, 8)?;
        let mut own = group.zeros::<bf16>(15, 8)?;
        let sum = MatmulReduceScatter::new().prepare(&partial, 8)?;
        for _ in 0..2 {
            let mut refused = 0;
            all_gather_and_consume(&a, |_| {
                for result in [
                    all_gather_and_consume(&a, |_| Ok(())),
                    all_gather_matmul(&a, &b, &mut out),
                    prepared.run(&a, &b, &mut out),
                    prepared.matmul(&a, &b, &mut out),
                    sum.run(&partial, &b, &mut own),
                    group.synchronize(),
                    group.barrier(),
                    group.sharded::<bf16>(30, 8).map(drop),
                    b.to_vec().map(drop),
                ] {
                    let error = result.expect_err("it would wait for itself");
                    assert_call_in_callback(&error, rank.rank);
                    refused += 1;
                }
                // Longer than a refused call's rank has to make it after all: no one waits for these.
                std::thread::sleep(Duration::from_millis(700));
                Ok(())
            })?;
            assert_eq!(refused, 9 * (1 + 2));
            all_gather_matmul(&a, &b, &mut out)?;
            group.synchronize()?;
        }
        Ok("refused".into())
    }));
}

/// As any call: all ranks make the same.
#[track_caller]
pub fn a_consumer_beside_a_product_is_a_mismatch<B: Consumes>(test: &str) {
    let ranks = ranks::<B>(test, 3, |rank: &Rank| {
        let group = connect::<B>(rank, B::TIMEOUT)?;
        let a = group.sharded::<bf16>(30, 8)?;
        let b = group.upload(&[bf16::ONE; 64], 8, 8)?;
        let mut out = group.zeros::<bf16>(30, 8)?;
        let result = match rank.rank {
            2 => {
                let product = AllGatherMatmul::new().prepare(&a, 8)?;
                let pulled = product.config().with_route(gemmesh::tuning::Route::Pull);
                AllGatherMatmul::new().config(pulled).run(&a, &b, &mut out)
            }
            _ => all_gather_and_consume(&a, |_| Ok(())),
        };
        poisoned(&group, result.and_then(|()| group.synchronize()))
    });
    let outcomes = ranks.outcomes();
    let details = "M = 30, K = 8, bf16, the 1st sharded matrix of the group";
    assert_call_mismatch(
        &same_error(&outcomes),
        2,
        &format!("all_gather_matmul({details})"),
        &format!("all_gather_and_consume({details})"),
    );
}

/// A function that does not return keeps its own rank only, until the others wait for that rank's next call.
#[track_caller]
pub fn a_consumer_that_takes_too_long_is_named<B: Consumes>(test: &str) {
    let ranks = ranks::<B>(test, 2, |rank: &Rank| {
        let (_kept, group) = connect_short::<B>(rank)?;
        let a = group.sharded::<bf16>(30, 8)?;
        let mut slow = rank.rank == 1;
        until_failure(&group, || {
            all_gather_and_consume(&a, |_| {
                if std::mem::take(&mut slow) {
                    std::thread::sleep(B::away() + Duration::from_secs(3));
                }
                Ok(())
            })
        })
    });
    for outcome in ranks.outcomes() {
        match parts(outcome.error()) {
            (Some(1), Kind::Timeout { what, .. }) => {
                assert!(what.contains("all_gather_and_consume"), "{what}");
            }
            other => panic!("{other:?}"),
        }
    }
}

/// Memory that the function makes and drops stays until what it has put on the stream is done.
#[track_caller]
pub fn what_a_consumer_drops_outlives_its_use<B: Consumes>(test: &str) {
    const K: usize = 512;
    all_done(ranks::<B>(test, 2, |rank| {
        let group = connect::<B>(rank, B::TIMEOUT)?;
        let (m, seeds) = (2048, 20);
        for seed in 0..seeds {
            gemmesh::testing::delay_chunks(Some(seed));
            let all: Vec<bf16> = normal(seed, m * K);
            let mut a = group.sharded::<bf16>(m, K)?;
            let own = a.rows();
            a.shard_mut()
                .copy_from_host(&all[own.start * K..own.end * K])?;
            let mut sink = B::sink(m, K);
            all_gather_and_consume(&a, |chunk| {
                let between = group.zeros::<bf16>(chunk.rows().len(), K)?;
                B::take_by_way_of(&mut sink, between, &chunk);
                Ok(())
            })?;
            group.synchronize()?;
            assert_eq!(bits(&B::taken(&sink)), bits(&all), "seed {seed}");
        }
        gemmesh::testing::delay_chunks(None);
        Ok(format!("{seeds} times"))
    }));
}
