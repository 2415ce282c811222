//! Operations without a product, captured in graphs: streams wait for graph words, at each replay for the same values.

use std::ops::Range;
use std::time::{Duration, Instant};

use cudarc::driver::sys;
use gemmesh::error::Kind;
use gemmesh::pipelines::{
    AllGatherAndConsume, Block, ProduceAndAllToAll, ProduceAndReduceScatter,
    all_gather_and_consume, produce_and_all_to_all,
};
use gemmesh::{
    Cuda, Error, Group, Matrix, all_gather, all_reduce, all_to_all, all_to_all_with_counts, bf16,
    broadcast, reduce_scatter,
};

use crate::graphs::miss;
use crate::support::gpu::*;
use crate::support::numbers::{bits, nan, normal};
use crate::support::processes::Setting;
use crate::support::shared::collectives::Produces;
use crate::support::shared::pipelines::Consumes;
use crate::support::tested::connect_short;
use crate::test_name;

/// Longer than most tests: what ranks that share a GPU wait for comes in its turn.
fn patient() -> Setting<'static> {
    Setting {
        deadline: Duration::from_secs(200),
        ..Setting::default()
    }
}

/// The rows of each rank of three.
const ROWS: [usize; 3] = [40, 0, 17];
const M: usize = 57;
const N: usize = 24;

#[test]
fn rows_are_consumed_anew_at_each_replay() {
    let Some(_leave) = gpu() else { return };
    all_done(ranks_with(test_name!(), 3, &patient(), |rank| {
        let group = connect(rank, TIMEOUT)?;
        let mut a = group.sharded_rows::<bf16>(&ROWS, N)?;
        let own = a.rows();
        let mut sinks = [0, 1].map(|_| Cuda::sink(M, N));
        let operation = AllGatherAndConsume::new().chunks(1 + rank.rank);
        // Prepared at its first run.
        operation.run(&a, |_| Ok(()))?;
        group.synchronize()?;
        gemmesh::testing::delay_chunks(Some(3));
        // Two in one graph: the graph words of the first are those of the second.
        let replay = Replay::capture(&group, RELAXED, || {
            for sink in &mut sinks {
                let run = operation.run(&a, |chunk| {
                    Cuda::take(sink, &chunk);
                    Ok(())
                });
                run.expect("it can be captured");
            }
        });
        gemmesh::testing::delay_chunks(None);
        let count = operations(3, 200, 40);
        for turn in 0..count as u64 {
            let all: Vec<bf16> = normal(turn, M * N);
            a.shard_mut()
                .copy_from_host(&all[own.start * N..own.end * N])?;
            a.poison(nan())?;
            // Ranks come at different times; and live operations stand between.
            std::thread::sleep(Duration::from_micros(300 * ((turn + rank.rank as u64) % 3)));
            match turn % 10 {
                3 => (0..3).for_each(|_| replay.launch()),
                6 => operation.run(&a, |_| Ok(()))?,
                _ => {}
            }
            replay.launch();
            group.synchronize()?;
            for sink in &sinks {
                assert_eq!(bits(&Cuda::taken(sink)), bits(&all), "turn {turn}");
            }
            assert_eq!(bits(&a.to_vec()?), bits(&all), "turn {turn}");
        }
        Ok(format!("{count} replays"))
    }));
}

/// The block becomes rows of `from` from `first` on.
fn put(block: &mut Block<Cuda, f32>, from: &Matrix<Cuda, f32>, first: usize) {
    Cuda::put(block, from, &[], first);
}

/// The sums of these elements, in the order of the addends.
fn sums_in_order(addends: &[Vec<f32>], elements: Range<usize>) -> Vec<f32> {
    elements
        .map(|i| addends[1..].iter().fold(addends[0][i], |sum, a| sum + a[i]))
        .collect()
}

/// What `rank` gets of what each rank sends.
fn blocks_for(rank: usize, sent: impl Fn(usize) -> Vec<f32>) -> Vec<f32> {
    let mut blocks = Vec::new();
    for (from, &rows) in ROWS.iter().enumerate() {
        let block = rank * rows * N..(rank + 1) * rows * N;
        blocks.extend_from_slice(&sent(from)[block]);
    }
    blocks
}

#[test]
fn blocks_are_made_and_sent_anew_at_each_replay() {
    let Some(_leave) = gpu() else { return };
    all_done(ranks_with(test_name!(), 3, &patient(), |rank| {
        let group = connect(rank, TIMEOUT)?;
        let own = ROWS[rank.rank];
        let first: usize = ROWS[..rank.rank].iter().sum();
        let mut made = group.zeros::<f32>(M, N)?;
        let mut out = group.zeros::<f32>(own, N)?;
        let mut sent = group.zeros::<f32>((3 * own).max(1), N)?;
        let mut brought = group.sharded_rows::<f32>(&ROWS, N)?;
        let sum = ProduceAndReduceScatter::new().rows(&ROWS).chunks(2);
        let exchange = ProduceAndAllToAll::new().chunks(2);
        sum.run(M, &mut out, |_| Ok(()))?;
        exchange.run(&mut brought, |_| Ok(()))?;
        group.synchronize()?;
        gemmesh::testing::delay_chunks(Some(5));
        let replay = Replay::capture(&group, RELAXED, || {
            let summed = sum.run(M, &mut out, |mut block| {
                let first = block.rows().start;
                put(&mut block, &made, first);
                Ok(())
            });
            summed.expect("it can be captured");
            let exchanged = exchange.run(&mut brought, |mut block| {
                let first = block.owner() * own + block.rows().start;
                put(&mut block, &sent, first);
                Ok(())
            });
            exchanged.expect("it can be captured");
        });
        gemmesh::testing::delay_chunks(None);
        let count = operations(3, 200, 40);
        for turn in 0..count as u64 {
            let of = |rank: usize| normal::<f32>(turn * 8 + rank as u64, M * N);
            let to = |rank: usize| {
                let rows = 3 * ROWS[rank];
                normal::<f32>(turn * 8 + 4 + rank as u64, rows.max(1) * N)
            };
            made.copy_from_host(&of(rank.rank))?;
            sent.copy_from_host(&to(rank.rank))?;
            out.copy_from_host(&vec![nan(); own * N])?;
            std::thread::sleep(Duration::from_micros(300 * ((turn + rank.rank as u64) % 3)));
            if turn % 10 == 6 {
                sum.run(M, &mut out, |_| Ok(()))?;
            }
            replay.launch();
            group.synchronize()?;
            let addends: Vec<Vec<f32>> = (0..3).map(of).collect();
            let sums = sums_in_order(&addends, first * N..(first + own) * N);
            assert_eq!(out.to_vec()?, sums, "turn {turn}");
            let expected = blocks_for(rank.rank, to);
            assert_eq!(brought.to_vec()?, expected, "turn {turn}");
        }
        Ok(format!("{count} replays"))
    }));
}

/// A graph has no order but its edges.
#[test]
fn blocks_of_a_replay_are_made_in_their_order() {
    let Some(_leave) = gpu() else { return };
    all_done(ranks(test_name!(), 2, |rank| {
        let group = connect(rank, TIMEOUT)?;
        let _context = Context::retain(rank.rank);
        let last = Foreign::new(size_of::<u32>());
        let mut out = group.sharded::<u8>(64, 16)?;
        let operation = ProduceAndAllToAll::new().chunks(2);
        operation.run(&mut out, |_| Ok(()))?;
        group.synchronize()?;
        let mut calls = 0u32;
        let replay = Replay::capture(&group, RELAXED, || {
            let exchanged = operation.run(&mut out, |block| {
                calls += 1;
                let stream = block.stream().cast();
                // SAFETY: the word and the stream live.
                driver(unsafe { sys::cuMemsetD32Async(last.ptr, calls, 1, stream) });
                Ok(())
            });
            exchanged.expect("it can be captured");
        });
        for turn in 0..10 {
            replay.launch();
            group.synchronize()?;
            assert_eq!(last.read(), calls.to_ne_bytes(), "turn {turn}");
        }
        Ok(format!("the last of {calls}"))
    }));
}

#[test]
fn collectives_of_two_ranks_are_replayed_beside_live_calls() {
    let Some(_leave) = gpu() else { return };
    collectives_are_replayed_beside_live_calls(test_name!(), 2);
}

#[test]
fn collectives_of_three_ranks_are_replayed_beside_live_calls() {
    let Some(_leave) = gpu() else { return };
    collectives_are_replayed_beside_live_calls(test_name!(), 3);
}

/// All of them in one graph: of few rows, and of more than kernels store.
#[track_caller]
fn collectives_are_replayed_beside_live_calls(test: &str, world: usize) {
    all_done(ranks_with(test, world, &patient(), |rank| {
        let group = connect(rank, TIMEOUT)?;
        let shared = gemmesh::testing::ranks_share_gpus(&group);
        for rows in [2, if shared { 300 } else { 9 << 10 }] {
            let (m, n) = (world * rows, 512);
            let input = |seed: u64| normal::<f32>(seed, m * n);
            let mut a = group.zeros::<f32>(m, n)?;
            let mut gathered = group.sharded::<f32>(m, n)?;
            let mut sums = group.sharded::<f32>(m, n)?;
            let mut own = group.zeros::<f32>(rows, n)?;
            let mut moved = group.sharded::<f32>(m, n)?;
            let mut all = || -> Result<(), Error> {
                all_reduce(&a, &mut sums)?;
                reduce_scatter(&a, &mut own)?;
                all_to_all(&a, &mut moved)?;
                all_gather(&gathered)?;
                broadcast(&mut gathered, 1)
            };
            all()?;
            group.synchronize()?;
            let replay = Replay::capture(&group, RELAXED, || all().expect("it can be captured"));
            for turn in 0..6 {
                let of = |rank: usize| input(turn * 8 + rank as u64);
                a.copy_from_host(&of(rank.rank))?;
                let first = rank.rank * rows * n;
                let shard = &of(rank.rank)[first..first + rows * n];
                gathered.shard_mut().copy_from_host(shard)?;
                gathered.poison(nan())?;
                sums.poison(nan())?;
                moved.poison(nan())?;
                replay.launch();
                if turn % 3 == 1 {
                    replay.launch();
                    all_reduce(&a, &mut sums)?;
                }
                group.synchronize()?;
                let inputs: Vec<Vec<f32>> = (0..world).map(of).collect();
                let add = |i: usize| inputs[1..].iter().fold(inputs[0][i], |sum, of| sum + of[i]);
                let expected: Vec<f32> = (0..m * n).map(add).collect();
                assert!(sums.to_vec()? == expected, "sums, turn {turn}");
                let part = &expected[first..first + rows * n];
                assert!(own.to_vec()? == part, "own sums, turn {turn}");
                let blocks = inputs.iter().map(|of| &of[first..first + rows * n]);
                let blocks: Vec<f32> = blocks.flatten().copied().collect();
                assert!(moved.to_vec()? == blocks, "blocks, turn {turn}");
                let shards = inputs.iter().enumerate();
                let shards = shards.map(|(r, of)| &of[r * rows * n..(r + 1) * rows * n]);
                let shards: Vec<f32> = shards.flatten().copied().collect();
                assert!(gathered.to_vec()? == shards, "rows, turn {turn}");
            }
        }
        Ok("6 replays of each".into())
    }));
}

/// A rank that sends and gets nothing records nothing, and no other rank waits for it.
#[test]
fn blocks_of_counts_are_sent_anew_at_each_replay() {
    let Some(_leave) = gpu() else { return };
    const COUNTS: [usize; 9] = [0, 0, 3, 0, 0, 0, 1, 0, 2];
    all_done(ranks_with(test_name!(), 3, &patient(), |rank| {
        let group = connect(rank, TIMEOUT)?;
        let rows = [3, 0, 3][rank.rank];
        let mut a = group.zeros::<u32>(rows, N)?;
        let mut outs = [group.sharded::<u32>(6, N)?, group.sharded(6, N)?];
        let [moved, made] = &mut outs;
        let mut both = || -> Result<(), Error> {
            all_to_all_with_counts(&a, moved, &COUNTS)?;
            let produced = ProduceAndAllToAll::new().counts(&COUNTS);
            produced.run(made, |mut block| {
                let before = usize::from(rank.rank == 2 && block.owner() == 2);
                let first = before + block.rows().start;
                Cuda::put(&mut block, &a, &[], first);
                Ok(())
            })
        };
        both()?;
        group.synchronize()?;
        let replay = Replay::capture(&group, RELAXED, || both().expect("it can be captured"));
        for turn in 0..6 {
            let row = |of: u32, row: u32| [100 * turn + 10 * of + row; N];
            let own: Vec<u32> = (0..rows)
                .flat_map(|i| row(rank.rank as u32, i as u32))
                .collect();
            a.copy_from_host(&own)?;
            for out in &mut outs {
                out.write(0, &[u32::MAX; 6 * N])?;
            }
            (0..1 + turn % 2).for_each(|_| replay.launch());
            group.synchronize()?;
            let mut expected = match rank.rank {
                0 => row(2, 0).to_vec(),
                1 => Vec::new(),
                _ => [row(0, 0), row(0, 1), row(0, 2), row(2, 1), row(2, 2)].concat(),
            };
            expected.resize(6 * N, u32::MAX);
            for out in &outs {
                assert_eq!(out.to_vec()?, expected, "turn {turn}");
            }
            // No rank writes its rows again before all have theirs.
            group.barrier()?;
        }
        Ok("6 replays".into())
    }));
}

/// As one of a kernel that waits.
#[test]
fn a_replay_that_a_rank_does_not_make_ends_at_the_deadline_and_names_it_and_the_call() {
    let Some(_leave) = gpu_alone() else { return };
    all_done(ranks(test_name!(), 2, |rank| {
        let steps = host_group(rank)?;
        let _context = Context::retain(rank.rank);
        steps.barrier()?;
        let group = another_group(rank, "graphs", SHORT)?;
        let a = group.sharded::<bf16>(30, 8)?;
        all_gather_and_consume(&a, |_| Ok(()))?;
        group.synchronize()?;
        let replay = Replay::capture(&group, GLOBAL, || {
            // So that the streams still have to run through many of them.
            for _ in 0..20 {
                all_gather_and_consume(&a, |_| Ok(())).expect("it can be captured");
            }
        });
        // One may take longer to capture than the other waits.
        steps.barrier()?;
        replay.launch();
        group.synchronize()?;
        let words = miss(rank, &steps, &group, &replay)?.to_string();
        assert!(
            words.contains("all_gather_and_consume in a graph"),
            "{words}"
        );
        Ok("named".into())
    }));
}

/// Replays that follow one another for longer than the timeout make none of them late.
#[test]
fn replays_may_take_longer_than_the_timeout_together() {
    let Some(_leave) = gpu_alone() else { return };
    all_done(ranks(test_name!(), 2, |rank| {
        let (_kept, group) = connect_short::<Cuda>(rank)?;
        let a = group.sharded::<bf16>(30, 8)?;
        let slow = |group: &Group<Cuda>| {
            all_gather_and_consume(&a, |_| Ok(()))?;
            group.synchronize()
        };
        slow(&group)?;
        let replay = Replay::capture(&group, RELAXED, || {
            all_gather_and_consume(&a, |_| Ok(())).expect("it can be captured");
        });
        // Each round takes a quarter of it.
        for _ in 0..13 {
            (0..20).for_each(|_| replay.launch());
            if rank.rank == 1 {
                std::thread::sleep(SHORT / 4);
            }
            group.barrier()?;
        }
        group.synchronize()?;
        Ok("in time".into())
    }));
}

/// Nor is the rank that waits for all of them: they go on.
#[test]
fn many_replays_are_waited_for_as_long_as_they_go_on() {
    let Some(_leave) = gpu_alone() else { return };
    all_done(ranks(test_name!(), 2, |rank| {
        let (_kept, group) = connect_short::<Cuda>(rank)?;
        let mut out = group.sharded::<u8>(30, 16)?;
        let mut exchange = |time| {
            produce_and_all_to_all(&mut out, |block| {
                Cuda::linger(&block, time);
                Ok(())
            })
        };
        exchange(Duration::ZERO)?;
        group.synchronize()?;
        let replay = Replay::capture(&group, RELAXED, || {
            exchange(SHORT / 10).expect("it can be captured");
        });
        // Longer than a rank waits for what does not go on.
        (0..20).for_each(|_| replay.launch());
        group.synchronize()?;
        Ok("in time".into())
    }));
}

/// The group has failed, and the capture ends as it would have.
#[test]
fn an_error_of_a_function_under_capture_is_every_ranks() {
    let Some(_leave) = gpu() else { return };
    let ranks = ranks(test_name!(), 2, |rank| {
        let group = connect(rank, TIMEOUT)?;
        let mut out = group.sharded::<u8>(30, 16)?;
        produce_and_all_to_all(&mut out, |_| Ok(()))?;
        group.synchronize()?;
        let mut result = Ok(());
        drop(Replay::capture(&group, RELAXED, || {
            let mut calls = 0;
            result = produce_and_all_to_all(&mut out, |_| {
                calls += 1;
                match (rank.rank, calls) {
                    (1, 2) => Err("no second block".into()),
                    _ => Ok(()),
                }
            });
        }));
        let result = result.and_then(|()| {
            // The others hear of it in their next call.
            let begin = Instant::now();
            while begin.elapsed() < TIMEOUT {
                group.barrier()?;
            }
            Ok(())
        });
        poisoned(&group, result)
    });
    let outcomes = ranks.outcomes();
    let expected = Kind::ProgramFailed {
        function_of: Some("produce_and_all_to_all".into()),
        reason: "no second block".into(),
    }
    .on(1);
    assert_eq!(same_error(&outcomes), expected);
}
