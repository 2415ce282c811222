//! Rows that are owned in blocks, and gathered stage by stage over all ranks.

use std::ops::Range;

use gemmesh::error::Kind;
use gemmesh::pipelines::{AllGatherAndConsume, ProduceAndReduceScatter, produce_and_all_to_all};
use gemmesh::tuning::Route;
use gemmesh::{
    AllGatherMatmul, Error, Group, MatmulAllReduce, MatmulReduceScatter, ShardedMatrix, all_gather,
    all_to_all, bf16,
};

use crate::support::errors::is_unsupported;
use crate::support::errors::parts_of;
use crate::support::numbers::{Reference, bits, nan, normal};
use crate::support::shared::pipelines::Consumes;
use crate::support::tested::{
    Tested, all_done, assert_call_mismatch, connect, poisoned, ranks, same_error,
};

const STAGES: [usize; 5] = [1, 2, 4, 8, 3];

/// Where the rows lie, block by block: what nvFuser calls [S, D, M / (S · D), K].
fn places(m: usize, world: usize, stages: usize) -> Vec<Vec<Range<usize>>> {
    let rows = |rank: usize| m / world + usize::from(rank < m % world);
    let cut = |rank: usize, stage: usize| rows(rank) * stage / stages;
    let mut blocks = vec![Vec::new(); world];
    let mut next = 0;
    for stage in 0..stages {
        for (rank, blocks) in blocks.iter_mut().enumerate() {
            let end = next + cut(rank, stage + 1) - cut(rank, stage);
            blocks.push(next..end);
            next = end;
        }
    }
    for blocks in &mut blocks {
        blocks.retain(|rows| !rows.is_empty());
    }
    blocks
}

/// A staged matrix, of which memory is to hold `all`.
fn staged<B: Tested>(
    group: &Group<B>,
    all: &[bf16],
    k: usize,
    stages: usize,
) -> Result<ShardedMatrix<B, bf16>, Error> {
    let m = all.len() / k;
    let mut a = group.sharded_staged::<bf16>(m, k, stages)?;
    let mut own = Vec::new();
    for (rank, expected) in places(m, group.world_size(), stages).iter().enumerate() {
        match stages {
            1 => assert_eq!(a.blocks_of(rank).as_slice(), &expected[..]),
            _ => assert_eq!(&a.blocks_of(rank), expected),
        }
        if rank == group.rank() {
            let rows = expected.iter().cloned();
            own = rows
                .flat_map(|rows| &all[rows.start * k..rows.end * k])
                .copied()
                .collect();
        }
    }
    a.shard_mut().copy_from_host(&own)?;
    a.poison(nan())?;
    Ok(a)
}

/// A product of a staged matrix has its rows where that has them, and one that is only gathered in stages has them in
/// order; by all routes, however late the blocks come.
#[track_caller]
pub fn products_of_staged_rows_are_right<B: Tested>(test: &str) {
    const MS: [usize; 4] = [96, 61, 5, 300];
    let (n, k) = (24, 64);
    all_done(ranks::<B>(test, 3, |rank| {
        let group = connect::<B>(rank, B::TIMEOUT)?;
        let b = normal::<bf16>(1, n * k);
        let bias = normal::<bf16>(2, n);
        let weight = group.upload(&b, n, k)?;
        let added = group.upload(&bias, 1, n)?;
        let routes = [
            None,
            Some(Route::Pull),
            Some(Route::Push),
            Some(Route::Store),
        ];
        let mut seed = 0;
        for stages in STAGES {
            for m in MS {
                for route in routes {
                    seed += 1;
                    gemmesh::testing::delay_chunks((seed % 4 > 0).then_some(seed));
                    let all = normal::<bf16>(seed, m * k);
                    let reference = Reference::new(&all, &b, Some(&bias), k);
                    let mut by_stage = staged(&group, &all, k, stages)?;
                    let mut by_rank = group.sharded::<bf16>(m, k)?;
                    let own = by_rank.rows();
                    by_rank
                        .shard_mut()
                        .copy_from_host(&all[own.start * k..own.end * k])?;
                    by_rank.poison(nan())?;
                    for (a, problem) in [(&mut by_stage, None), (&mut by_rank, Some(stages))] {
                        let mut operation = AllGatherMatmul::new().bias(&added);
                        if let Some(stages) = problem {
                            operation = operation.stages(stages);
                        }
                        if let Some(route) = route {
                            let config = B::config(a, n)?.with_route(route);
                            operation = operation.config(config);
                        }
                        let mut out = group.upload::<bf16>(&vec![nan(); m * n], m, n)?;
                        match operation.run(&*a, &weight, &mut out) {
                            Err(error) if is_unsupported(&error) && route.is_some() => continue,
                            result => result?,
                        }
                        let case =
                            format!("{stages} stages, {m} rows, {route:?}, problem {problem:?}");
                        if let Err(what) = reference.check(&out.to_vec()?) {
                            panic!("rank {}, {case}: {what}", rank.rank);
                        }
                        assert_eq!(bits(&a.to_vec()?), bits(&all), "{case}");
                    }
                }
            }
        }
        gemmesh::testing::delay_chunks(None);
        Ok(format!("{seed} products"))
    }));
}

/// A staged matrix is consumed stage by stage: own blocks first, then of each stage those of the next ranks in the
/// ring.
#[track_caller]
pub fn staged_rows_are_consumed_by_stage<B: Consumes>(test: &str) {
    const K: usize = 24;
    all_done(ranks::<B>(test, 3, |rank| {
        let group = connect::<B>(rank, B::TIMEOUT)?;
        let mut seed = 0;
        for stages in STAGES {
            for m in [96, 61, 5] {
                seed += 1;
                gemmesh::testing::delay_chunks(Some(seed));
                let all = normal::<bf16>(seed, m * K);
                let a = staged(&group, &all, K, stages)?;
                let mut sink = B::sink(m, K);
                let mut calls = Vec::new();
                AllGatherAndConsume::new().chunks(1).run(&a, |chunk| {
                    B::take(&mut sink, &chunk);
                    calls.push((chunk.source(), chunk.rows()));
                    Ok(())
                })?;
                group.synchronize()?;
                assert_eq!(bits(&B::taken(&sink)), bits(&all), "{stages} stages of {m}");
                let places = places(m, rank.world, stages);
                let own = places[rank.rank].iter();
                let mut expected: Vec<_> = own.map(|rows| (rank.rank, rows.clone())).collect();
                let begin = expected.len();
                for distance in 1..rank.world {
                    let source = (rank.rank + distance) % rank.world;
                    let blocks = places[source].iter();
                    expected.extend(blocks.map(|rows| (source, rows.clone())));
                }
                // By stage: all blocks of a stage lie before those of the next.
                let mut boundaries = Vec::new();
                for stage in 1..=stages {
                    let rows = |rank: usize| m / 3 + usize::from(rank < m % 3);
                    boundaries.push(
                        (0..3)
                            .map(|rank| rows(rank) * stage / stages)
                            .sum::<usize>(),
                    );
                }
                let stage_of =
                    |rows: &Range<usize>| boundaries.iter().position(|&end| rows.start < end);
                expected[begin..].sort_by_key(|(_, rows)| stage_of(rows));
                assert_eq!(calls, expected, "{stages} stages of {m}");
                all_gather(&a)?;
                assert_eq!(bits(&a.to_vec()?), bits(&all), "{stages} stages of {m}");
            }
        }
        gemmesh::testing::delay_chunks(None);
        Ok("consumed".into())
    }));
}

/// Operations that make rows where they are to lie refuse a staged matrix, and no gather has stages that cannot be.
#[track_caller]
pub fn what_cannot_be_staged_is_refused<B: Tested>(test: &str) {
    all_done(ranks::<B>(test, 2, |rank| {
        let group = connect::<B>(rank, B::TIMEOUT)?;
        let limit = |result: Result<(), Error>| match parts_of(&result) {
            Some((_, Kind::Limit { what, .. })) => assert!(what.contains("stages"), "{what}"),
            other => panic!("{other:?}"),
        };
        limit(group.sharded_staged::<bf16>(16, 8, 0).map(drop));
        limit(group.sharded_staged::<bf16>(16, 8, 65).map(drop));
        let mut a = group.sharded_staged::<bf16>(16, 8, 4)?;
        let flat = group.sharded::<bf16>(16, 8)?;
        let own = group.zeros::<bf16>(16, 8)?;
        let b = group.zeros::<bf16>(8, 8)?;
        let mut out = group.zeros::<bf16>(16, 8)?;
        limit(AllGatherMatmul::new().stages(0).run(&flat, &b, &mut out));
        limit(AllGatherMatmul::new().stages(2).run(&a, &b, &mut out));
        limit(AllGatherAndConsume::new().stages(65).run(&flat, |_| Ok(())));
        limit(MatmulReduceScatter::new().run_into(&own, &b, &mut a));
        limit(MatmulAllReduce::new().run(&own, &b, &mut a));
        limit(ProduceAndReduceScatter::new().run_into(&mut a, |_| Ok(())));
        limit(produce_and_all_to_all(&mut a, |_| Ok(())));
        limit(all_to_all(&own, &mut a));
        AllGatherMatmul::new().run(&a, &b, &mut out)?;
        group.synchronize()?;
        Ok("refused".into())
    }));
}

/// Ranks agree on where rows lie.
#[track_caller]
pub fn other_stages_are_a_mismatch<B: Tested>(test: &str) {
    let ranks = ranks::<B>(test, 2, |rank| {
        let group = connect::<B>(rank, B::TIMEOUT)?;
        let stages = if rank.rank == 1 { 4 } else { 2 };
        let result = group.sharded_staged::<bf16>(16, 8, stages).map(drop);
        poisoned(&group, result)
    });
    let outcomes = ranks.outcomes();
    assert_call_mismatch(
        &same_error(&outcomes),
        1,
        "sharded(M = 16, stages = 4, K = 8, bf16)",
        "sharded(M = 16, stages = 2, K = 8, bf16)",
    );
}
