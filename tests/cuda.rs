//! What the host backend promises, on GPUs. A rank is a process of its own; several may share a GPU.
//!
//! Tests that need a GPU fail if there is none and `GEMMESH_REQUIRE_GPU` is 1; else they say so and pass.
#![allow(unsafe_code)]

mod support;

use std::time::{Duration, Instant};

use cudarc::driver::sys;
use gemmesh::{
    AllGatherMatmul, Builder, Config, Cuda, Element, Error, Group, Matrix, Transport, bf16, f16,
};
use rustix::process::Signal;
use support::gpu::*;
use support::numbers::{Reference, bits, nan, rng};
use support::processes::{Processes, Rank, Setting, is_rank};

// Without a GPU.

#[test]
fn ranks_as_threads_are_refused() {
    let error = Group::<Cuda>::threads(2, |_| Ok::<(), Error>(())).unwrap_err();
    assert!(matches!(error, Error::NeedsProcesses { .. }), "{error}");
}

#[test]
fn without_a_driver_every_rank_is_told_which_has_no_gpu() {
    if !is_rank() && absence().is_none() {
        println!("there is a GPU: not run");
        return;
    }
    let ranks = ranks(test_name!(), 3, |rank| {
        let begin = Instant::now();
        let error = connect(rank, TIMEOUT).unwrap_err();
        let took = begin.elapsed();
        assert!(took < Duration::from_secs(5), "{took:?}");
        Err(error)
    });
    match same_error(&ranks.outcomes()) {
        Error::NoGpu { rank, reason } => {
            assert!(*rank < 3);
            assert!(!reason.is_empty());
        }
        other => panic!("{other}"),
    }
}

#[test]
fn a_host_rank_among_cuda_ranks_is_named() {
    let ranks = ranks(test_name!(), 3, |rank| match rank.rank {
        2 => rank.connect(TIMEOUT).map(|_| "a group".into()),
        _ => connect(rank, TIMEOUT).map(|_| "a group".into()),
    });
    let expected = Error::Mismatch {
        rank: 2,
        what: "backend".into(),
        theirs: "host".into(),
        expected: "cuda".into(),
    };
    assert_eq!(same_error(&ranks.outcomes()), &expected);
}

// Numbers.

#[track_caller]
fn random_shapes(test: &str, world: usize, count: usize) {
    let ranks = ranks(test, world, |rank| {
        let group = connect(rank, TIMEOUT)?;
        let mut random = rng(world as u64);
        let mut worst = 0f64;
        for index in 0..count {
            let case = Case::random(&mut random, world, index);
            let result = if index % 2 == 0 {
                case.verify::<bf16>(&group)
            } else {
                case.verify::<f16>(&group)
            };
            match result {
                Ok(error) => worst = worst.max(error),
                Err(what) => panic!("rank {}, case {index}, {case:?}: {what}", rank.rank),
            }
        }
        Ok(format!("{count} shapes, worst error {worst:.3} of allowed"))
    });
    all_done(ranks);
}

#[test]
fn random_shapes_are_right_on_1_rank() {
    if let Some(_leave) = gpu() {
        random_shapes(test_name!(), 1, 120);
    }
}

#[test]
fn random_shapes_are_right_on_2_ranks() {
    if let Some(_leave) = gpu() {
        random_shapes(test_name!(), 2, 120);
    }
}

#[test]
fn random_shapes_are_right_on_4_ranks() {
    if let Some(_leave) = gpu() {
        random_shapes(test_name!(), 4, 120);
    }
}

#[test]
fn random_shapes_are_right_on_8_ranks() {
    if let Some(_leave) = gpus(8) {
        random_shapes(test_name!(), 8, 120);
    }
}

/// NaN, infinities and, in f16, sums that are too large, with each kernel.
fn extremes<T: Element>(group: &Group<Cuda>) {
    for shape in 0..SHAPES.len() {
        let case = Case {
            rows: vec![97, 160],
            n: 131,
            more: 0,
            k: 72,
            bias: true,
            config: Some(config(shape, 2, 3)),
            seed: shape as u64,
        };
        let value = |x: f32| T::from_f32(x);
        let mut a = case.a::<T>();
        let (mut b, bias) = case.b::<T>(group.rank());
        let mut bias = bias.unwrap();
        let k = case.k;
        a[3 * k + 5] = nan();
        a[100 * k + 71] = value(f32::INFINITY);
        a[101 * k] = value(f32::NEG_INFINITY);
        a[256 * k + 8] = value(f32::INFINITY);
        a[200 * k..201 * k].fill(value(60000.0));
        b[7 * k + 71] = T::zeroed();
        b[130 * k + 8] = value(f32::NEG_INFINITY);
        b[64 * k + 1] = nan();
        b[9 * k..10 * k].fill(value(60000.0));
        bias[2] = value(f32::INFINITY);
        bias[129] = nan();
        if let Err(what) = case.verify_values(group, &a, &b, Some(&bias)) {
            panic!("{}, {case:?}, rank {}: {what}", T::DTYPE, group.rank());
        }
    }
}

#[test]
fn nan_and_infinity_come_out_where_they_must_and_nowhere_else() {
    let Some(_leave) = gpu() else { return };
    all_done(ranks(test_name!(), 2, |rank| {
        let group = connect(rank, TIMEOUT)?;
        extremes::<bf16>(&group);
        extremes::<f16>(&group);
        Ok("right".into())
    }));
}

/// Each kernel's fused product, under delays that differ each time, against the product after the gather.
#[track_caller]
fn fused_is_gather_then_matmul(test: &str, world: usize) {
    let ranks = ranks(test, world, |rank| {
        let group = connect(rank, TIMEOUT)?;
        let mut expected = Vec::new();
        let mut placed = Vec::new();
        for shape in 0..SHAPES.len() {
            let mut rows = vec![150; world];
            rows[shape % world] = [0, 1, 128, 333][shape % 4];
            rows[0] += 1;
            let case = Case {
                rows,
                n: 300 + shape,
                more: 0,
                k: 264,
                bias: shape % 2 == 0,
                config: Some(config(shape, 1 + shape, 1 + shape % 5)),
                seed: shape as u64,
            };
            let a = case.a::<bf16>();
            let (b, bias) = case.b::<bf16>(rank.rank);
            let mut matrices = Placed::new(&group, &case, &a, &b, bias.as_deref())?;
            matrices.poison()?;
            matrices.gather_then_matmul(case.config)?;
            expected.push(matrices.read()?);
            placed.push((case, matrices));
        }
        for seed in 0..100 {
            gemmesh::testing::delay_chunks(Some(seed));
            let shape = seed as usize % SHAPES.len();
            let (case, matrices) = &mut placed[shape];
            let config = case.config.map(|config| Config {
                transport: TRANSPORTS[seed as usize / SHAPES.len() % TRANSPORTS.len()],
                ..config
            });
            matrices.poison()?;
            matrices.fused(config)?;
            let (gathered, out) = matrices.read()?;
            let (all_rows, product) = &expected[shape];
            assert_eq!(bits(&gathered), bits(all_rows), "seed {seed}, {case:?}");
            assert!(bits(&out) == bits(product), "seed {seed}, {case:?}");
        }
        gemmesh::testing::delay_chunks(None);
        Ok("the same bits 100 times".into())
    });
    all_done(ranks);
}

#[test]
fn under_random_delays_2_ranks_get_the_bits_of_gather_then_matmul_100_times() {
    if let Some(_leave) = gpu() {
        fused_is_gather_then_matmul(test_name!(), 2);
    }
}

#[test]
fn under_random_delays_4_ranks_get_the_bits_of_gather_then_matmul_100_times() {
    if let Some(_leave) = gpu() {
        fused_is_gather_then_matmul(test_name!(), 4);
    }
}

// Endurance.

/// `count` operations in turn on matrices of the given shapes [m, n, k]: in its first three quarters a thousand at
/// a time without waiting, then a hundred; other rows each time, and the results compared.
fn soak(
    rank: &Rank,
    address: &str,
    first_epoch: u32,
    shapes: &[[usize; 3]],
    count: usize,
) -> Result<(), Error> {
    let builder = Builder::<Cuda>::new().timeout(TIMEOUT);
    let group = builder
        .first_epoch(first_epoch)
        .connect(rank.rank, rank.world, address)?;
    let mut items = Vec::new();
    for &[m, n, k] in shapes {
        items.push(Arguments::new(&group, m, n, k)?);
    }
    let (mut done, mut base) = (0, 1);
    while done < count {
        let burst = if done < count * 3 / 4 { 1000 } else { 100 };
        let burst = burst.min(count - done);
        base = base % 11 + 1;
        for item in &mut items {
            item.fill(&group, base)?;
        }
        for number in 0..burst {
            let index = (done + number) % items.len();
            // Each way follows each other.
            match (done + number) / items.len() % 10 {
                0 | 1 => items[index].run()?,
                way @ (2 | 3 | 8) => items[index].run_by(TRANSPORTS[way % 3])?,
                way => items[index].run_by(TRANSPORTS[way / 2 % 3])?,
            }
        }
        done += burst;
        group.synchronize()?;
        for item in items.iter().take(burst) {
            item.check(rank.world)?;
        }
    }
    Ok(())
}

/// With fewer GPUs than ranks each operation waits for time slices, unless `GEMMESH_LONG` is 1.
fn operations(world: usize, full: usize, shared: usize) -> usize {
    let long = std::env::var("GEMMESH_LONG").as_deref() == Ok("1");
    if long || devices() >= world {
        full
    } else {
        shared
    }
}

const TINY: [usize; 3] = [16, 16, 8];

#[test]
fn twenty_thousand_operations_in_a_row_are_right_on_1_rank() {
    let Some(_leave) = gpu() else { return };
    all_done(ranks(test_name!(), 1, |rank| {
        let _context = Context::retain(rank.rank);
        soak(rank, &rank.address, 1, &[TINY], 20_000)?;
        let mixed = [TINY, [200, 72, 16]];
        let address = format!("{}-mixed", rank.address);
        soak(rank, &address, u32::MAX - 4_000, &mixed, 20_000)?;
        Ok("right".into())
    }));
}

#[test]
fn twenty_thousand_operations_in_a_row_are_right_on_2_ranks() {
    let Some(_leave) = gpu() else { return };
    let setting = Setting {
        deadline: Duration::from_secs(400),
        ..Setting::default()
    };
    all_done(ranks_with(test_name!(), 2, &setting, |rank| {
        let _context = Context::retain(rank.rank);
        let count = operations(2, 20_000, 2_000);
        soak(rank, &rank.address, 1, &[TINY], count)?;
        Ok(format!("{count} operations"))
    }));
}

#[test]
fn twenty_thousand_operations_on_two_matrices_in_turn_are_right_on_2_ranks() {
    let Some(_leave) = gpu() else { return };
    let setting = Setting {
        deadline: Duration::from_secs(400),
        ..Setting::default()
    };
    all_done(ranks_with(test_name!(), 2, &setting, |rank| {
        let _context = Context::retain(rank.rank);
        let count = operations(2, 20_000, 2_000);
        let first = u32::MAX - count as u32 / 5;
        soak(rank, &rank.address, first, &[TINY, [301, 72, 16]], count)?;
        Ok(format!("{count} operations across the wrap of the epoch"))
    }));
}

#[test]
fn operations_across_the_refresh_of_the_flags_are_right() {
    let Some(_leave) = gpu() else { return };
    all_done(ranks(test_name!(), 2, |rank| {
        let _context = Context::retain(rank.rank);
        for multiple in [0u32, 7, 8] {
            // Half of the operations push, and have numbers of their own: both kinds come across.
            let first = (multiple << 28).wrapping_sub(70);
            let address = format!("{}-{multiple}", rank.address);
            let shapes = [TINY, [301, 72, 264]];
            soak(rank, &address, first, &shapes, 300)?;
        }
        // The operation that refreshes is the first, and waits for its rows as any other.
        for seed in 0..5 {
            gemmesh::testing::delay_chunks(Some(seed));
            let address = format!("{}-first-{seed}", rank.address);
            soak(rank, &address, 3 << 28, &[[301, 72, 264]], 1)?;
        }
        Ok("right".into())
    }));
}

// Errors that leave the group as it was.

#[test]
fn what_cannot_be_done_is_refused_and_the_group_goes_on() {
    let Some(_leave) = gpu() else { return };
    all_done(ranks(test_name!(), 2, |rank| {
        let group = connect(rank, TIMEOUT)?;
        let mut arguments = Arguments::new(&group, 20, 24, 16)?;
        arguments.verify(&group)?;
        let unaligned = Error::Unaligned {
            rank: rank.rank,
            what: "K of sharded".into(),
            value: 12,
            multiple: 8,
        };
        assert_eq!(group.sharded::<bf16>(20, 12).unwrap_err(), unaligned);
        for wrong in [
            Config {
                tile_n: 100,
                ..config(0, 1, 1)
            },
            Config {
                tile_m: 64,
                ..config(0, 1, 1)
            },
            Config {
                tile_k: 32,
                ..config(0, 1, 1)
            },
            Config {
                stages: 3,
                ..config(0, 1, 1)
            },
            Config {
                cluster: 4,
                ..config(0, 1, 1)
            },
        ] {
            let operation = AllGatherMatmul::new().config(wrong);
            let error = operation
                .run(&arguments.a, &arguments.b, &mut arguments.out)
                .unwrap_err();
            match &error {
                Error::NoKernel { known, .. } => assert!(known.contains("128x256x64"), "{error}"),
                other => panic!("{other}"),
            }
        }
        let error = group.zeros::<bf16>(1 << 24, 1 << 24).unwrap_err();
        assert!(matches!(error, Error::OutOfMemory { .. }), "{error}");
        let error = group.sharded::<bf16>(1 << 24, 1 << 24).unwrap_err();
        assert!(matches!(error, Error::OutOfMemory { .. }), "{error}");
        arguments.verify(&group)?;
        Ok("right".into())
    }));
}

#[test]
fn a_gpu_that_is_not_there_is_named_to_every_rank() {
    let Some(_leave) = gpu() else { return };
    let ranks = ranks(test_name!(), 2, |rank| {
        let mut builder = Builder::<Cuda>::new().timeout(TIMEOUT);
        if rank.rank == 1 {
            builder = builder.device(99);
        }
        builder
            .connect(rank.rank, rank.world, &rank.address)
            .map(|_| "a group".into())
    });
    let outcomes = ranks.outcomes();
    let error = same_error(&outcomes);
    assert!(matches!(error, Error::NoGpu { rank: 1, .. }), "{error}");
}

#[test]
fn a_table_that_cannot_be_read_is_named_to_every_rank() {
    let Some(_leave) = gpu() else { return };
    let setting = Setting {
        deadline: DEADLINE,
        variables: &|place| match place {
            1 => vec![("GEMMESH_TUNED", "/nowhere/table".into())],
            _ => Vec::new(),
        },
    };
    let ranks = ranks_with(test_name!(), 3, &setting, |rank| {
        connect(rank, TIMEOUT).map(|_| "a group".into())
    });
    let outcomes = ranks.outcomes();
    let error = same_error(&outcomes);
    assert!(
        matches!(error, Error::System { rank: Some(1), action, .. } if action.contains("/nowhere/table")),
        "{error}"
    );
}

#[track_caller]
fn check_peers(test: &str, world: usize) {
    all_done(ranks(test, world, |rank| {
        let group = connect(rank, TIMEOUT)?;
        group.barrier()?;
        let begin = Instant::now();
        group.check_peers()?;
        let took = begin.elapsed();
        assert!(took < Duration::from_secs(1), "{took:?}");
        for _ in 0..20 {
            group.check_peers()?;
        }
        Arguments::new(&group, 20, 24, 16)?.verify(&group)?;
        Ok(format!("{took:?}"))
    }));
}

#[test]
fn check_peers_finds_2_ranks_well_in_under_a_second() {
    if let Some(_leave) = gpu_alone() {
        check_peers(test_name!(), 2);
    }
}

#[test]
fn check_peers_finds_4_ranks_well_in_under_a_second() {
    if let Some(_leave) = gpu_alone() {
        check_peers(test_name!(), 4);
    }
}

// Ranks that die, stop or stay away.

/// Operations until one fails.
fn until_failure(
    rank: &Rank,
    group: &Group<Cuda>,
    arguments: &mut Arguments,
    transport: Transport,
) -> Result<String, Error> {
    loop {
        if let Err(error) = arguments.verify_by(group, transport) {
            rank.say("failed");
            return poisoned(group, Err(error));
        }
    }
}

#[track_caller]
fn assert_lost(ranks: Processes, world: usize, victim: usize, since: Instant) {
    for place in (0..world).filter(|&place| place != victim) {
        let took = ranks
            .heard(place, "failed")
            .saturating_duration_since(since);
        assert!(took < NOTICED, "rank {place} took {took:?}");
    }
    for outcome in ranks.outcomes() {
        if outcome.rank == victim {
            outcome.assert_killed();
            continue;
        }
        assert!(
            matches!(outcome.error(), Error::RankLost { rank, .. } if *rank == victim),
            "{}",
            outcome.error()
        );
    }
}

/// Rank `victim` is killed while it does not call the operation that the others are in.
#[track_caller]
fn kill_while_the_others_wait(test: &str, victim: usize) {
    let ranks = ranks(test, 3, |rank| {
        let group = connect(rank, TIMEOUT)?;
        let mut arguments = Arguments::new(&group, 300, 24, 16)?;
        arguments.verify(&group)?;
        rank.say("here");
        if rank.rank == victim {
            rank.hear();
        }
        until_failure(rank, &group, &mut arguments, Transport::Pull)
    });
    ranks.all_heard("here");
    std::thread::sleep(Duration::from_millis(200));
    let killed = ranks.signal(victim, Signal::KILL);
    assert_lost(ranks, 3, victim, killed);
}

#[test]
fn a_rank_killed_while_the_others_wait_for_it_is_named() {
    if let Some(_leave) = gpu() {
        kill_while_the_others_wait(test_name!(), 2);
    }
}

#[test]
fn rank_0_killed_while_the_others_wait_for_it_is_named() {
    if let Some(_leave) = gpu() {
        kill_while_the_others_wait(test_name!(), 0);
    }
}

/// Rank 1 is killed while all do one operation after the other.
#[track_caller]
fn kill_amid_operations(test: &str, transport: Transport) {
    let ranks = ranks(test, 3, |rank| {
        let group = connect(rank, TIMEOUT)?;
        let mut arguments = Arguments::new(&group, 300, 300, 264)?;
        arguments.verify_by(&group, transport)?;
        rank.say("here");
        until_failure(rank, &group, &mut arguments, transport)
    });
    ranks.all_heard("here");
    std::thread::sleep(Duration::from_millis(200));
    let killed = ranks.signal(1, Signal::KILL);
    assert_lost(ranks, 3, 1, killed);
}

each_transport!(gpu, kill_amid_operations:
    a_rank_killed_amid_pulls_is_named by Pull,
    a_rank_killed_amid_pushes_is_named by Push,
    a_rank_killed_amid_stores_is_named by Store,
);

#[test]
fn a_rank_killed_between_operations_is_named_by_the_next() {
    let Some(_leave) = gpu() else { return };
    let mut ranks = ranks(test_name!(), 3, |rank| {
        let group = connect(rank, TIMEOUT)?;
        let mut arguments = Arguments::new(&group, 20, 24, 16)?;
        arguments.verify(&group)?;
        rank.say("here");
        rank.hear();
        until_failure(rank, &group, &mut arguments, Transport::Pull)
    });
    ranks.all_heard("here");
    ranks.signal(1, Signal::KILL);
    std::thread::sleep(Duration::from_millis(100));
    let told = Instant::now();
    ranks.tell(0);
    ranks.tell(2);
    assert_lost(ranks, 3, 1, told);
}

/// All ranks but rank 1 have given up on it; then it goes on, and is told.
#[track_caller]
fn assert_stopped_rank_named(mut ranks: Processes, since: Instant) {
    for place in [0, 2] {
        let took = ranks
            .heard(place, "failed")
            .saturating_duration_since(since);
        assert!(took < SHORT + NOTICED, "rank {place} took {took:?}");
    }
    ranks.signal(1, Signal::CONT);
    ranks.tell(1);
    for outcome in ranks.outcomes() {
        assert_timeout_names(outcome.error(), 1);
    }
}

#[test]
fn a_stopped_rank_is_named_at_the_timeout_and_told_when_it_goes_on() {
    let Some(_leave) = gpu() else { return };
    let mut ranks = ranks(test_name!(), 3, |rank| {
        let (_context, group) = connect_short(rank)?;
        let mut arguments = Arguments::new(&group, 300, 24, 16)?;
        arguments.verify(&group)?;
        rank.say("here");
        rank.hear();
        until_failure(rank, &group, &mut arguments, Transport::Pull)
    });
    ranks.all_heard("here");
    ranks.signal(1, Signal::STOP);
    let stopped = Instant::now();
    ranks.tell(0);
    ranks.tell(2);
    assert_stopped_rank_named(ranks, stopped);
}

/// Rank 1 is stopped while all do one operation after the other.
#[track_caller]
fn stop_amid_operations(test: &str, transport: Transport) {
    let ranks = ranks(test, 3, |rank| {
        let (_context, group) = connect_short(rank)?;
        let mut arguments = Arguments::new(&group, 300, 300, 264)?;
        arguments.verify_by(&group, transport)?;
        rank.say("here");
        until_failure(rank, &group, &mut arguments, transport)
    });
    ranks.all_heard("here");
    std::thread::sleep(Duration::from_millis(200));
    let stopped = ranks.signal(1, Signal::STOP);
    assert_stopped_rank_named(ranks, stopped);
}

each_transport!(gpu, stop_amid_operations:
    a_rank_stopped_amid_pulls_is_named_at_the_timeout_and_told_when_it_goes_on by Pull,
    a_rank_stopped_amid_pushes_is_named_at_the_timeout_and_told_when_it_goes_on by Push,
    a_rank_stopped_amid_stores_is_named_at_the_timeout_and_told_when_it_goes_on by Store,
);

#[test]
fn ranks_that_come_one_after_the_other_are_waited_for_until_the_timeout() {
    let Some(_leave) = gpu() else { return };
    all_done(ranks(test_name!(), 3, |rank| {
        let _context = Context::retain(rank.rank);
        let steps = host_group(rank)?;
        for transport in TRANSPORTS {
            for last in [SHORT * 4 / 5, SHORT * 8 / 5] {
                steps.barrier()?;
                let address = format!("{}-{transport:?}-{last:?}", rank.address);
                let builder = Builder::<Cuda>::new().timeout(SHORT);
                let group = builder.connect(rank.rank, rank.world, &address)?;
                let mut arguments = Arguments::new(&group, 300, 72, 264)?;
                arguments.verify_by(&group, transport)?;
                arguments.fill(&group, 5)?;
                group.barrier()?;
                std::thread::sleep(last * rank.rank as u32 / 2);
                let result = arguments.verify_by(&group, transport);
                if last < SHORT {
                    result?;
                } else {
                    assert_timeout_names(&poisoned(&group, result).unwrap_err(), 2);
                }
            }
        }
        Ok("right in time, named after it".into())
    }));
}

/// `count` times: a group gets a right result; then one rank does not call an operation and the others name it;
/// then all make another group.
fn starve(rank: &Rank, count: usize, transports: &[Transport]) -> Result<String, Error> {
    let starved = Duration::from_millis(250);
    let _context = Context::retain(rank.rank);
    let steps = host_group(rank)?;
    let mut longest = Duration::ZERO;
    for number in 0..=count {
        steps.barrier()?;
        let address = format!("{}-{number}", rank.address);
        let builder = Builder::<Cuda>::new().timeout(starved);
        let group = builder.connect(rank.rank, rank.world, &address)?;
        let mut arguments = Arguments::new(&group, 300, 72, 264)?;
        let transport = transports[number / rank.world % transports.len()];
        arguments.verify_by(&group, transport)?;
        steps.barrier()?;
        if number == count {
            break;
        }
        let culprit = number % rank.world;
        let begin = Instant::now();
        let result = if rank.rank == culprit {
            steps.barrier()?;
            arguments.verify_by(&group, transport)
        } else {
            let result = arguments.verify_by(&group, transport);
            let took = begin.elapsed();
            longest = longest.max(took);
            assert!(took < starved + NOTICED, "round {number}: {took:?}");
            steps.barrier()?;
            result
        };
        let error = poisoned(&group, result).unwrap_err();
        match &error {
            Error::Timeout { rank, .. } => {
                assert_eq!(*rank, culprit, "round {number}: {error}");
            }
            other => panic!("round {number}: {other}"),
        }
    }
    Ok(format!("{count} rounds, the longest wait {longest:?}"))
}

#[test]
fn starved_ranks_name_the_culprit_and_work_in_a_new_group_100_times() {
    let Some(_leave) = gpu_alone() else { return };
    let setting = Setting {
        deadline: Duration::from_secs(240),
        ..Setting::default()
    };
    all_done(ranks_with(test_name!(), 3, &setting, |rank| {
        starve(rank, 100, &TRANSPORTS)
    }));
}

#[test]
fn starved_ranks_are_set_free_also_when_all_streams_share_one_connection() {
    let Some(_leave) = gpu_alone() else { return };
    let setting = Setting {
        deadline: DEADLINE,
        variables: &|_| vec![("CUDA_DEVICE_MAX_CONNECTIONS", "1".into())],
    };
    all_done(ranks_with(test_name!(), 2, &setting, |rank| {
        starve(rank, 4, &[Transport::Pull, Transport::Store])
    }));
}

#[test]
fn pushes_are_refused_where_copies_and_kernels_share_a_queue() {
    let Some(_leave) = gpu() else { return };
    // The macro names the function that it stands in, which a closure is too.
    let name = test_name!();
    for variable in ["CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING"] {
        let setting = Setting {
            deadline: DEADLINE,
            variables: &|_| vec![(variable, "1".into())],
        };
        all_done(ranks_with(name, 2, &setting, |rank| {
            let blocking = std::env::var_os("CUDA_LAUNCH_BLOCKING").is_some();
            let cause = match blocking {
                true => "CUDA_LAUNCH_BLOCKING",
                false => "CUDA_DEVICE_MAX_CONNECTIONS=1",
            };
            let group = connect(rank, TIMEOUT)?;
            let mut arguments = Arguments::new(&group, 301, 72, 16)?;
            let refused = Error::QueuedTogether {
                rank: rank.rank,
                what: "Transport::Push".into(),
                cause: cause.into(),
            };
            assert_eq!(arguments.run_by(Transport::Push), Err(refused));
            arguments.verify_by(&group, Transport::Store)?;
            Ok("right".into())
        }));
    }
}

/// Rank 1 does not call what rank 0 puts on its stream, as much as it wants to. Both are told in time.
fn run_ahead(
    rank: &Rank,
    m: usize,
    ahead: impl FnOnce(&Group<Cuda>, &mut Arguments) -> Result<(), Error>,
) -> Result<String, Error> {
    let steps = host_group(rank)?;
    let (_context, group) = connect_short(&Rank {
        address: format!("{}-cuda", rank.address),
        ..*rank
    })?;
    let mut arguments = Arguments::new(&group, m, 16, 264)?;
    arguments.verify(&group)?;
    let begin = Instant::now();
    if rank.rank == 1 {
        steps.barrier()?;
        let result = group.synchronize();
        assert_timeout_names(&poisoned(&group, result).unwrap_err(), 1);
        return Ok("told".into());
    }
    let result = ahead(&group, &mut arguments).and_then(|()| group.synchronize());
    let took = begin.elapsed();
    assert!(took < 2 * SHORT + NOTICED, "{took:?}");
    steps.barrier()?;
    assert_timeout_names(&poisoned(&group, result).unwrap_err(), 1);
    Ok(format!("told after {took:?}"))
}

/// More than the queues of a device hold.
const AHEAD: usize = 5_000;

#[track_caller]
fn operations_ahead(test: &str, transport: Transport) {
    all_done(ranks(test, 2, |rank| {
        // 64 chunks a shard: as many entries on the streams as an operation can have.
        run_ahead(rank, 2 * 65 * 128, |_, arguments| {
            let config = Config {
                transport,
                ..config(6, 1, 64)
            };
            let operation = AllGatherMatmul::new().config(config);
            let prepared = operation.prepare(&arguments.a, 16)?;
            for _ in 0..AHEAD {
                prepared.run(&arguments.a, &arguments.b, &mut arguments.out)?;
            }
            panic!("{AHEAD} calls, and none fails");
        })
    }));
}

each_transport!(gpu, operations_ahead:
    a_rank_that_runs_ahead_with_pulls_names_who_does_not_call by Pull,
    a_rank_that_runs_ahead_with_pushes_names_who_does_not_call by Push,
    a_rank_that_runs_ahead_with_stores_names_who_does_not_call by Store,
);

#[track_caller]
fn work_of_the_callers_ahead(test: &str, transport: Transport) {
    all_done(ranks(test, 2, |rank| {
        run_ahead(rank, 301, |group, arguments| {
            let scratch = group.zeros::<bf16>(16, 16)?;
            let (ptr, _) = scratch.as_device_ptr();
            arguments.run_by(transport)?;
            for _ in 0..AHEAD {
                // SAFETY: the scratch lives until the stream has passed.
                unsafe { driver(sys::cuMemsetD32Async(ptr, 1, 16, group.stream().cast())) };
            }
            group.synchronize()
        })
    }));
}

each_transport!(gpu, work_of_the_callers_ahead:
    a_pull_with_much_work_of_the_callers_behind_it_names_who_does_not_call by Pull,
    a_push_with_much_work_of_the_callers_behind_it_names_who_does_not_call by Push,
    a_store_with_much_work_of_the_callers_behind_it_names_who_does_not_call by Store,
);

/// Where ranks share a GPU with another test, each replay waits for a time slice.
#[track_caller]
fn replays_ahead(test: &str, transport: Transport) {
    all_done(ranks(test, 2, |rank| {
        run_ahead(rank, 301, |group, arguments| {
            let prepared = arguments.prepare(transport)?;
            let replay = Replay::capture(group, GLOBAL, || {
                let Arguments { a, b, out, .. } = arguments;
                prepared.run(a, b, out).unwrap();
            });
            for _ in 0..AHEAD {
                replay.launch();
            }
            group.synchronize()
        })
    }));
}

each_transport!(gpu_alone, replays_ahead:
    many_replays_of_a_push_that_a_rank_does_not_make_name_it by Push,
    many_replays_of_a_store_that_a_rank_does_not_make_name_it by Store,
);

// Whatever the environment is like.

#[test]
fn the_first_operation_is_right_however_cuda_is_set_up() {
    let Some(_leave) = gpu() else { return };
    // The macro names the function that it stands in, which a closure is too.
    let name = test_name!();
    let mut combinations = Vec::new();
    for connections in ["1", "8", "32"] {
        for blocking in ["0", "1"] {
            for loading in ["LAZY", "EAGER"] {
                combinations.push([
                    ("CUDA_DEVICE_MAX_CONNECTIONS", connections),
                    ("CUDA_LAUNCH_BLOCKING", blocking),
                    ("CUDA_MODULE_LOADING", loading),
                ]);
            }
        }
    }
    for some in combinations.chunks(3) {
        let running: Vec<_> = some
            .iter()
            .map(|combination| {
                let variables = |_| combination.map(|(name, value)| (name, value.into())).into();
                let setting = Setting {
                    deadline: DEADLINE,
                    variables: &variables,
                };
                let ranks = ranks_with(name, 2, &setting, |rank| {
                    let group = connect(rank, TIMEOUT)?;
                    Arguments::new(&group, 301, 72, 16)?.verify(&group)?;
                    Ok("right".into())
                });
                (combination, ranks)
            })
            .collect();
        for (combination, ranks) in running {
            println!("{combination:?}");
            all_done(ranks);
        }
    }
}

/// A verified operation and the GPU of each rank.
fn verify_device(group: &Group<Cuda>) -> Result<String, Error> {
    group.check_peers()?;
    let mut arguments = Arguments::new(group, 301, 72, 16)?;
    for _ in 0..10 {
        arguments.verify(group)?;
    }
    Ok(group.device_name().into())
}

#[test]
fn ranks_that_see_one_gpu_each_work() {
    let Some(_leave) = gpu() else { return };
    let devices = devices().max(1);
    let setting = Setting {
        deadline: DEADLINE,
        variables: &|place| vec![("CUDA_VISIBLE_DEVICES", (place % devices).to_string())],
    };
    all_done(ranks_with(test_name!(), 2, &setting, |rank| {
        verify_device(&connect(rank, TIMEOUT)?)
    }));
}

#[test]
fn ranks_that_see_all_gpus_work_in_any_order() {
    let Some(_leave) = gpus(2) else { return };
    // In a rank it is not used.
    let world = devices().clamp(2, 4);
    all_done(ranks(test_name!(), world, |rank| {
        let forward = connect(rank, TIMEOUT)?;
        verify_device(&forward)?;
        drop(forward);
        let address = format!("{}-reversed", rank.address);
        let builder = Builder::<Cuda>::new().timeout(TIMEOUT);
        let reversed = builder
            .device(rank.world - 1 - rank.rank)
            .connect(rank.rank, rank.world, &address)?;
        verify_device(&reversed)
    }));
}

// The doors for other stacks.

fn refuse_capture(
    rank: &Rank,
    group: &Group<Cuda>,
    mode: sys::CUstreamCaptureMode,
    arguments: &mut Arguments,
) {
    captured(group, mode, || {
        let refused = Error::Capturing { rank: rank.rank };
        assert_eq!(arguments.run_by(Transport::Pull), Err(refused));
    });
}

#[test]
fn a_pull_under_capture_is_refused_and_the_group_goes_on() {
    let Some(_leave) = gpu() else { return };
    all_done(ranks(test_name!(), 2, |rank| {
        let group = connect(rank, TIMEOUT)?;
        let mut arguments = Arguments::new(&group, 301, 72, 16)?;
        arguments.verify(&group)?;
        arguments.verify_by(&group, Transport::Pull)?;
        for mode in [RELAXED, GLOBAL] {
            refuse_capture(rank, &group, mode, &mut arguments);
            arguments.fill(&group, 3)?;
            arguments.verify(&group)?;
        }
        Ok("right".into())
    }));
}

#[test]
fn a_product_that_was_not_prepared_is_refused_under_capture() {
    let Some(_leave) = gpu() else { return };
    all_done(ranks(test_name!(), 2, |rank| {
        let group = connect(rank, TIMEOUT)?;
        let mut arguments = Arguments::new(&group, 301, 72, 16)?;
        captured(&group, GLOBAL, || {
            let refused = Error::Capturing { rank: rank.rank };
            assert_eq!(arguments.run(), Err(refused.clone()));
            assert_eq!(arguments.run_by(Transport::Store), Err(refused));
        });
        arguments.verify(&group)?;
        Ok("right".into())
    }));
}

#[test]
fn a_capture_on_one_rank_does_not_shift_its_operations_against_the_others() {
    let Some(_leave) = gpu() else { return };
    all_done(ranks(test_name!(), 2, |rank| {
        let group = connect(rank, Duration::from_secs(5))?;
        let mut arguments = Arguments::new(&group, 301, 72, 16)?;
        arguments.verify(&group)?;
        for base in 2..5 {
            if rank.rank == 0 {
                refuse_capture(rank, &group, RELAXED, &mut arguments);
            }
            arguments.fill(&group, base)?;
            arguments.verify(&group)?;
        }
        Ok("right".into())
    }));
}

#[test]
fn a_captured_product_without_a_gather_outlives_what_prepared_it() {
    let Some(_leave) = gpu() else { return };
    all_done(ranks(test_name!(), 1, |rank| {
        let group = connect(rank, TIMEOUT)?;
        let mut arguments = Arguments::new(&group, 301, 72, 264)?;
        let replay = {
            let prepared = arguments.prepare(Transport::Pull)?;
            Replay::capture(&group, GLOBAL, || {
                let Arguments { a, b, out, .. } = &mut arguments;
                prepared.matmul(a, b, out).unwrap();
            })
        };
        for n in 1..=gemmesh::testing::KEPT_PROGRAMS {
            AllGatherMatmul::<_, bf16>::new().prepare(&arguments.a, n)?;
        }
        // If its table were free, one of these would come to lie there.
        let garbage: Vec<_> = (0..1000)
            .map(|_| group.upload(&[bf16::NAN; 48], 6, 8))
            .collect::<Result<_, _>>()?;
        arguments.out.copy_from_host(&vec![bf16::NAN; 301 * 72])?;
        replay.launch();
        group.synchronize()?;
        arguments.check(rank.world)?;
        drop(garbage);
        Ok("right".into())
    }));
}

#[test]
fn a_captured_operation_is_right_in_each_of_1000_replays() {
    let Some(_leave) = gpu() else { return };
    let setting = Setting {
        deadline: Duration::from_secs(200),
        ..Setting::default()
    };
    all_done(ranks_with(test_name!(), 2, &setting, |rank| {
        let group = connect(rank, TIMEOUT)?;
        let count = operations(2, 1000, 200);
        for (transport, mode) in [(Transport::Push, GLOBAL), (Transport::Store, RELAXED)] {
            let mut arguments = Arguments::new(&group, 301, 72, 264)?;
            let prepared = arguments.prepare(transport)?;
            let replay = Replay::capture(&group, mode, || {
                let Arguments { a, b, out, .. } = &mut arguments;
                prepared.run(a, b, out).unwrap();
            });
            for turn in 0..count {
                // Other rows each time; now and then several at once, or another operation in between.
                arguments.fill(&group, 1 + turn % 11)?;
                match turn % 50 {
                    20 => (0..10).for_each(|_| replay.launch()),
                    30 => arguments.run_by(Transport::Pull)?,
                    40 => arguments.run_by(transport)?,
                    _ => {}
                }
                replay.launch();
                group.synchronize()?;
                arguments.check(rank.world)?;
            }
        }
        Ok(format!("{count} replays of each"))
    }));
}

#[test]
fn a_replay_that_a_rank_does_not_make_ends_at_the_deadline_and_names_it() {
    let Some(_leave) = gpu() else { return };
    all_done(ranks(test_name!(), 2, |rank| {
        let steps = host_group(rank)?;
        for transport in [Transport::Push, Transport::Store] {
            let _context = Context::retain(rank.rank);
            steps.barrier()?;
            let address = format!("{}-{transport:?}", rank.address);
            let builder = Builder::<Cuda>::new().timeout(SHORT);
            let group = builder.connect(rank.rank, rank.world, &address)?;
            let mut arguments = Arguments::new(&group, 301, 72, 264)?;
            let prepared = arguments.prepare(transport)?;
            let replay = Replay::capture(&group, GLOBAL, || {
                let Arguments { a, b, out, .. } = &mut arguments;
                prepared.run(a, b, out).unwrap();
            });
            replay.launch();
            group.synchronize()?;
            arguments.check(rank.world)?;
            steps.barrier()?;
            let begin = Instant::now();
            if rank.rank == 0 {
                replay.launch();
            } else {
                steps.barrier()?;
            }
            let result = group.synchronize();
            let took = begin.elapsed();
            if rank.rank == 0 {
                steps.barrier()?;
                assert!(took < SHORT + NOTICED, "{took:?}");
            }
            let error = poisoned(&group, result).unwrap_err();
            assert_timeout_names(&error, 1);
        }
        Ok("named".into())
    }));
}

#[test]
fn ranks_that_cut_pushed_rows_differently_are_told() {
    let Some(_leave) = gpu() else { return };
    let ranks = ranks(test_name!(), 2, |rank| {
        let group = connect(rank, TIMEOUT)?;
        let mut arguments = Arguments::new(&group, 301, 72, 16)?;
        arguments.run_by(TRANSPORTS[rank.rank])?;
        group.synchronize()?;
        Ok("no error".into())
    });
    let outcomes = ranks.outcomes();
    let error = same_error(&outcomes);
    assert!(
        matches!(error.cause(), Error::CallMismatch { .. }),
        "{error}"
    );
}

/// The device has fewer queues than a process may have streams. A push waits for a kernel that is put on the caller's
/// stream after it: were they in one queue, both would wait for ever.
#[test]
fn pushes_do_not_share_a_queue_with_any_stream_of_the_callers() {
    const STREAMS: usize = 12;
    let Some(_leave) = gpu() else { return };
    all_done(ranks(test_name!(), 2, |rank| {
        let _context = Context::retain(rank.rank);
        let group = connect(rank, TIMEOUT)?;
        let mut arguments = Arguments::new(&group, 301, 72, 264)?;
        let (mut least, mut greatest) = (0, 0);
        let mut streams = Vec::new();
        // SAFETY: writes the locals.
        unsafe {
            driver(sys::cuCtxGetStreamPriorityRange(&mut least, &mut greatest));
            for priority in (greatest..=least).flat_map(|priority| [priority; STREAMS]) {
                let mut stream = std::ptr::null_mut();
                let non_blocking = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
                driver(sys::cuStreamCreateWithPriority(
                    &mut stream,
                    non_blocking,
                    priority,
                ));
                streams.push(stream);
            }
        }
        for (number, &stream) in streams.iter().enumerate() {
            // SAFETY: the stream is destroyed after the group has ended.
            unsafe { group.set_stream(stream.cast())? };
            arguments.fill(&group, 1 + number % 7)?;
            arguments.verify_by(&group, Transport::Push)?;
        }
        drop(arguments);
        drop(group);
        for &stream in &streams {
            // SAFETY: nobody uses the stream any more.
            unsafe { driver(sys::cuStreamDestroy_v2(stream)) };
        }
        Ok(format!("{} streams", streams.len()))
    }));
}

#[test]
fn operations_on_a_stream_of_the_callers_keep_its_order() {
    const ROUNDS: usize = 20;
    let Some(_leave) = gpu() else { return };
    all_done(ranks(test_name!(), 2, |rank| {
        let _context = Context::retain(rank.rank);
        let group = connect(rank, TIMEOUT)?;
        let [m, n, k] = [301, 72, 16];
        let mut arguments = Arguments::new(&group, m, n, k)?;
        let mut stream = std::ptr::null_mut();
        let non_blocking = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: writes the local. The stream is destroyed after the group has ended.
        unsafe {
            driver(sys::cuStreamCreate(&mut stream, non_blocking));
            group.set_stream(stream.cast())?;
        }
        assert_eq!(group.stream(), stream.cast());
        let own = arguments.a.rows();
        let rows: Vec<Vec<bf16>> = (0..ROUNDS)
            .map(|round| {
                let value = bf16::from_f32((1 + round % 5 + rank.rank) as f32);
                vec![value; own.len() * k]
            })
            .collect();
        let mut results = vec![vec![bf16::ZERO; m * n]; ROUNDS];
        let (out, pitch) = arguments.out.as_device_ptr();
        assert_eq!(pitch, n * 2);
        for (rows, result) in rows.iter().zip(&mut results) {
            let to = arguments.a.as_device_ptr() + (own.start * k * 2) as u64;
            // SAFETY: the ranges are those of the own rows and of the output; everything is ordered by
            // the stream, and the host's vectors live until it has been waited for.
            unsafe {
                driver(sys::cuMemcpyHtoDAsync_v2(
                    to,
                    rows.as_ptr().cast(),
                    size_of_val(rows.as_slice()),
                    stream,
                ));
                driver(sys::cuMemsetD8Async(out, 0xff, m * n * 2, stream));
            }
            arguments.run()?;
            // SAFETY: as above.
            unsafe {
                driver(sys::cuMemcpyDtoHAsync_v2(
                    result.as_mut_ptr().cast(),
                    out,
                    m * n * 2,
                    stream,
                ));
            }
        }
        // SAFETY: the stream lives.
        unsafe { driver(sys::cuStreamSynchronize(stream)) };
        group.synchronize()?;
        for (round, result) in results.iter().enumerate() {
            for owner in 0..rank.world {
                let expected = bf16::from_f32(((1 + round % 5 + owner) * k) as f32);
                let rows = arguments.a.rows_of(owner);
                let found = &result[rows.start * n..rows.end * n];
                assert!(
                    found.iter().all(|&x| x == expected),
                    "round {round}, rows of rank {owner}"
                );
            }
        }
        drop(arguments);
        drop(group);
        // SAFETY: nobody uses the stream any more.
        unsafe { driver(sys::cuStreamDestroy_v2(stream)) };
        Ok("in order".into())
    }));
}

#[test]
fn matrices_in_memory_of_the_callers_work_and_nothing_beside_them_is_written() {
    let Some(_leave) = gpu() else { return };
    all_done(ranks(test_name!(), 2, |rank| {
        let _context = Context::retain(rank.rank);
        let group = connect(rank, TIMEOUT)?;
        let case = Case {
            rows: vec![130, 71],
            n: 203,
            more: 0,
            k: 72,
            bias: true,
            config: None,
            seed: 5,
        };
        let a_values = case.a::<f16>();
        let (b_values, bias_values) = case.b::<f16>(rank.rank);
        let bias_values = bias_values.unwrap();
        let (b_pitch, out_pitch) = (case.k * 2 + 48, (case.n * 2).next_multiple_of(16) + 80);
        let b_memory = Foreign::new(case.n * b_pitch);
        let out_memory = Foreign::new(case.m() * out_pitch);
        let mut placed = Placed::new(&group, &case, &a_values, &b_values, Some(&bias_values))?;
        // SAFETY: the memory is as large as the matrices, which are dropped before it.
        let (mut b, mut out) = unsafe {
            (
                Matrix::<Cuda, f16>::from_device_ptr(
                    &group,
                    b_memory.ptr,
                    case.n,
                    case.k,
                    b_pitch,
                )?,
                Matrix::<Cuda, f16>::from_device_ptr(
                    &group,
                    out_memory.ptr,
                    case.m(),
                    case.n,
                    out_pitch,
                )?,
            )
        };
        assert_eq!(b.as_device_ptr(), (b_memory.ptr, b_pitch));
        assert_eq!(out.shape(), [case.m(), case.n]);
        b.copy_from_host(&b_values)?;
        for shape in 0..SHAPES.len() {
            out.copy_from_host(&vec![nan(); case.m() * case.n])?;
            placed.a.poison(nan())?;
            let operation = Placed::operation(&placed.bias, Some(config(shape, 2, 2)));
            operation.run(&placed.a, &b, &mut out)?;
            let reference = Reference::new(&a_values, &b_values, Some(&bias_values), case.k);
            if let Err(what) = reference.check(&out.to_vec()?) {
                panic!("rank {}, kernel {shape}: {what}", rank.rank);
            }
            // What is documented: zeros up to the next multiple of eight elements.
            let written = (case.n * 2).next_multiple_of(16);
            let bytes = out_memory.read();
            for (row, bytes) in bytes.chunks(out_pitch).enumerate() {
                assert!(
                    bytes[written..].iter().all(|&byte| byte == 0x5a),
                    "kernel {shape}, row {row}: written beyond the padding"
                );
            }
            assert!(
                b_memory
                    .read()
                    .chunks(b_pitch)
                    .all(|row| { row[case.k * 2..].iter().all(|&byte| byte == 0x5a) })
            );
        }
        let refused = |ptr: u64, columns: usize, pitch: usize| {
            // SAFETY: within the memory if it were made, and never used.
            unsafe { Matrix::<Cuda, f16>::from_device_ptr(&group, ptr, 2, columns, pitch) }
                .unwrap_err()
        };
        for (ptr, pitch) in [(b_memory.ptr + 2, 160), (b_memory.ptr, 152)] {
            let error = refused(ptr, 8, pitch);
            assert!(
                matches!(error, Error::Unaligned { multiple: 16, .. }),
                "{error}"
            );
        }
        let error = refused(b_memory.ptr, 81, 160);
        assert!(matches!(error, Error::Shape { .. }), "{error}");
        drop((b, out, placed));
        Ok("right".into())
    }));
}
