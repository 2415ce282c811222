//! Memory on GPUs: what has been dropped is free again, whoever dropped it and when, and dropping waits for nothing.
//!
//! As tests/cuda/main.rs.
#![allow(unsafe_code)]

mod support;

use std::time::{Duration, Instant};

use gemmesh::error::Kind;
use gemmesh::pipelines::all_gather_and_consume;
use gemmesh::tuning::Route;
use gemmesh::{
    AllGatherMatmul, Cuda, Error, Group, Matrix, ShardedMatrix, all_gather_matmul, bf16,
};
use rustix::process::Signal;
use support::gpu::*;
use support::processes::Rank;
use support::shared::refusals;

const GIB: usize = 1 << 30;

/// Columns of the large matrices here: rows of 2 MiB.
const COLUMNS: usize = 1 << 20;

/// Six tenths of what each rank can have of its GPU, in rows of [`COLUMNS`]: two of that size have no room.
fn most_rows(group: &Group<Cuda>, context: &Context) -> Result<usize, Error> {
    let sharing = group.world_size().div_ceil(devices().max(1));
    let own = context.free_bytes() / sharing / 10 * 6;
    let all = group.all_gather_bytes(&own.to_le_bytes())?;
    let least = all
        .iter()
        .map(|bytes| usize::from_le_bytes(bytes[..].try_into().unwrap()));
    Ok(least.min().unwrap() / (2 * COLUMNS))
}

#[test]
fn memory_that_all_ranks_have_dropped_can_be_had_again_by_whatever_asks_first() {
    let Some(_leave) = gpu_alone() else { return };
    all_done(ranks(test_name!(), 2, |rank| {
        let group = connect(rank, TIMEOUT)?;
        let context = Context::retain(rank.rank);
        let m = most_rows(&group, &context)?;
        for round in 0..3 {
            drop(group.sharded::<bf16>(m, COLUMNS)?);
            // The next collective allocation,
            let again = group.sharded::<bf16>(m, COLUMNS)?;
            drop(again);
            // one of this rank alone, right after it,
            drop(group.zeros::<bf16>(m, COLUMNS)?);
            group.barrier()?;
            if round == 0 {
                // and one that is none of this library's.
                drop(group.sharded::<bf16>(m, COLUMNS)?);
                group.barrier()?;
                drop(Foreign::new(m * 2 * COLUMNS));
                group.barrier()?;
            }
        }
        // In use when it is dropped: the next one waits for the operation and not for a call.
        let large = group.sharded::<bf16>(m, COLUMNS)?;
        let b = group.upload(&vec![bf16::ONE; COLUMNS], 1, COLUMNS)?;
        let mut out = group.zeros::<bf16>(m, 1)?;
        AllGatherMatmul::new().run(&large, &b, &mut out)?;
        drop(large);
        drop(group.sharded::<bf16>(m, COLUMNS)?);
        assert!(out.to_vec()?.iter().all(|&x| x == bf16::ZERO));
        Ok(format!("{m} rows of 2 MiB"))
    }));
}

#[test]
fn more_memory_than_there_is_is_refused_on_every_rank_and_the_group_goes_on() {
    let Some(_leave) = gpu() else { return };
    let m = (300 * GIB) / (2 * COLUMNS);
    refusals::too_much_memory::<Cuda>(test_name!(), 2, [m, COLUMNS]);
}

fn median(times: &[f64]) -> f64 {
    let mut times = times.to_vec();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// As in a serving loop: other rows, and another split of them, at every step. Allocating would take a hundred
/// microseconds more. Beside two H100s a call takes 9 to 13 µs for few rows and 21 to 36 for thousands, and other rows
/// 14 to 24 more. Where cores are busy all of these take longer, so the bounds are ratios. benches/calls.rs takes the
/// times.
#[test]
fn a_call_with_other_rows_takes_no_longer_than_planning_does() {
    const CAPACITY: usize = 8192;
    const N: usize = 1792;
    const K: usize = 4096;
    // As many of few rows, and as many of many, as are kept, and then again as many.
    const KEPT: usize = gemmesh::testing::KEPT_PROGRAMS;
    const STEPS: usize = 4 * KEPT;
    const FLIGHT: usize = 8;
    let Some(_leave) = gpu_alone() else { return };
    // Few rows as in decoding, in every split.
    let few: Vec<[usize; 2]> = (1..=64)
        .flat_map(|m| (0..=m).map(move |first| [first, m - first]))
        .collect();
    assert!(few.len() > STEPS / 2);
    all_done(ranks(test_name!(), 2, |rank| {
        let group = connect(rank, TIMEOUT)?;
        let mut a = group.sharded_with_capacity::<bf16>(CAPACITY, K)?;
        let b = group.zeros::<bf16>(N, K)?;
        let mut out = group.zeros::<bf16>(CAPACITY, N)?;
        let mut times = [Vec::new(), Vec::new()];
        for steps in 0..STEPS / FLIGHT {
            for times in &mut times {
                // The device's queues are empty, and hold what follows; the ranks begin together.
                group.synchronize()?;
                group.barrier()?;
                for step in steps * FLIGHT..(steps + 1) * FLIGHT {
                    // Few rows at first, then as many as there is room for; none comes twice.
                    let m = 1 + step * 7919 % CAPACITY;
                    let rows = match step < STEPS / 2 {
                        true => few[step * 7919 % few.len()],
                        false => [step % (m + 1), m - step % (m + 1)],
                    };
                    let begin = Instant::now();
                    a.set_rows(&rows)?;
                    out.set_rows(rows[0] + rows[1])?;
                    all_gather_matmul(&a, &b, &mut out)?;
                    times.push(begin.elapsed().as_secs_f64() * 1e6);
                }
            }
        }
        group.synchronize()?;
        // Not those that came before as many programs were kept as there may be.
        let mut words = Vec::new();
        for (steps, most) in [(KEPT..STEPS / 2, 4.0), (STEPS / 2..STEPS, 2.5)] {
            let [new, known] = times.each_ref().map(|times| median(&times[steps.clone()]));
            words.push(format!("{new:.1} and {known:.1} µs"));
            assert!(new < most * known, "{}", words.join("; "));
        }
        let kept = mean(|| {
            let prepared = AllGatherMatmul::<Cuda, bf16>::new().prepare(&a, N);
            prepared.expect("it has just been called");
        });
        words.push(format!("{kept:?} to prepare what is kept"));
        assert!(kept < Duration::from_micros(8), "{}", words.join("; "));
        Ok(words.join("; "))
    }));
}

/// What a gather with a consumer takes on the host, besides the consumer: 15 µs on one rank of two H200s and 47 on the
/// other. Events or streams made for each call would take hundreds.
#[test]
fn a_gather_whose_rows_are_consumed_takes_the_host_microseconds() {
    const CALLS: u32 = 8;
    let Some(_leave) = gpu_alone() else { return };
    all_done(ranks(test_name!(), 2, |rank| {
        let group = connect(rank, TIMEOUT)?;
        let a = group.sharded::<bf16>(1024, 1024)?;
        let mut times = Vec::new();
        for _ in 0..60 {
            // The device's queues are empty, and hold what follows; the ranks begin together.
            group.synchronize()?;
            group.barrier()?;
            let begin = Instant::now();
            for _ in 0..CALLS {
                all_gather_and_consume(&a, |_| Ok(()))?;
            }
            times.push(begin.elapsed() / CALLS);
        }
        times.sort();
        let median = times[times.len() / 2];
        assert!(median < Duration::from_micros(60), "{median:?}");
        Ok(format!("{median:?}"))
    }));
}

/// Rank 0 calls an operation and drops everything at once, its group too. The others come later.
#[track_caller]
fn drop_before_the_others_come(test: &str, route: Route) {
    all_done(ranks(test, 3, |rank| {
        let steps = host_group(rank)?;
        let group = connect(rank, TIMEOUT)?;
        let mut arguments = Arguments::new(&group, 1301, 72, 264)?;
        arguments.verify_by(&group, route)?;
        arguments.fill(&group, 4)?;
        group.barrier()?;
        if rank.rank == 0 {
            arguments.run_by(route)?;
            let begin = Instant::now();
            drop(arguments);
            let took = begin.elapsed();
            assert!(took < Duration::from_millis(50), "dropped in {took:?}");
            steps.barrier()?;
            // Waits for the operation.
            drop(group);
        } else {
            steps.barrier()?;
            std::thread::sleep(Duration::from_millis(100));
            arguments.verify_by(&group, route)?;
        }
        steps.barrier()?;
        Ok("right".into())
    }));
}

each_route!(gpu, drop_before_the_others_come:
    a_matrix_that_is_dropped_before_the_others_pull_its_rows_gives_them by Pull,
    a_matrix_that_is_dropped_before_its_rows_are_pushed_gives_them by Push,
    a_matrix_that_is_dropped_before_its_rows_are_stored_gives_them by Store,
);

/// Host time of `f`, the mean of many.
fn mean(mut f: impl FnMut()) -> Duration {
    const COUNT: u32 = 20_000;
    let begin = Instant::now();
    (0..COUNT).for_each(|_| f());
    begin.elapsed() / COUNT
}

#[test]
fn a_view_of_the_callers_memory_costs_less_than_a_microsecond_also_while_the_device_is_busy() {
    let Some(_leave) = gpu_alone() else { return };
    all_done(ranks(test_name!(), 1, |rank| {
        let group = connect(rank, TIMEOUT)?;
        let (rows, columns, pitch) = (512, 200, 1024);
        let memory = Foreign::new(rows * pitch);
        let hold = Hold::start(4, Some(group.stream().cast()));
        let view = |first: usize, rows: usize, left: usize| {
            let ptr = memory.ptr + (first * pitch + left * 2) as u64;
            // SAFETY: within the memory, which outlives the view.
            unsafe { Matrix::<Cuda, bf16>::from_device_ptr(&group, ptr, rows, columns, pitch) }
        };
        // All of it, and some rows of some columns.
        let whole = mean(|| drop(view(0, rows, 0).unwrap()));
        let part = mean(|| drop(view(100, 50, 8).unwrap()));
        for took in [whole, part] {
            assert!(took < Duration::from_micros(1), "{took:?}");
        }
        hold.release();
        // A part is what it should be: written by an operation, nothing beside it.
        let (m, k) = (50, 64);
        let mut a = group.sharded::<bf16>(m, k)?;
        a.shard_mut().copy_from_host(&vec![bf16::ONE; m * k])?;
        let b = group.upload(&vec![bf16::ONE; columns * k], columns, k)?;
        AllGatherMatmul::new().run(&a, &b, &mut view(100, m, 8)?)?;
        group.synchronize()?;
        let expected = bf16::from_f32(k as f32).to_le_bytes();
        for (row, bytes) in memory.read().chunks(pitch).enumerate() {
            let own = (100..100 + m).contains(&row);
            for (column, value) in bytes.chunks(2).enumerate() {
                let written = own && (8..8 + columns).contains(&column);
                let expected = if written { &expected[..] } else { &[0x5a; 2] };
                assert_eq!(value, expected, "row {row}, column {column}");
            }
        }
        Ok(format!("{whole:?} and {part:?}"))
    }));
}

#[test]
fn dropping_what_the_device_still_uses_waits_for_nothing_and_frees_it_afterwards() {
    let Some(_leave) = gpu_alone() else { return };
    all_done(ranks(test_name!(), 1, |rank| {
        let group = connect(rank, TIMEOUT)?;
        let context = Context::retain(rank.rank);
        let (m, n, k) = (16 << 10, 32 << 10, 512);
        let a = group.sharded::<bf16>(m, k)?;
        let b = group.zeros::<bf16>(n, k)?;
        group.synchronize()?;
        let before = context.free_bytes();
        let mut out = group.zeros::<bf16>(m, n)?;
        let hold = Hold::start(4, Some(group.stream().cast()));
        AllGatherMatmul::new().run(&a, &b, &mut out)?;
        let begin = Instant::now();
        drop((a, b, out));
        let took = begin.elapsed();
        assert!(took < Duration::from_millis(10), "dropped in {took:?}");
        assert!(context.free_bytes() < before, "freed while it is in use");
        hold.release();
        let deadline = Instant::now() + Duration::from_secs(5);
        while context.free_bytes() < before {
            assert!(Instant::now() < deadline, "not freed");
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(format!("dropped in {took:?}"))
    }));
}

#[test]
fn more_shapes_than_are_kept_come_and_go_while_an_operation_waits() {
    let Some(_leave) = gpu_alone() else { return };
    all_done(ranks(test_name!(), 2, |rank| {
        let steps = host_group(rank)?;
        let (_context, group) = connect_short(&beside_the_host(rank))?;
        let k = 264;
        let mut a = group.sharded::<bf16>(301, k)?;
        let expected = bf16::from_f32(k as f32);
        let mut worst = Duration::ZERO;
        let mut product = |m: usize, n: usize| -> Result<(), Error> {
            a.set_rows(&group.even_rows(m))?;
            let own = a.rows().len();
            a.shard_mut().copy_from_host(&vec![bf16::ONE; own * k])?;
            let b = group.upload(&vec![bf16::ONE; n * k], n, k)?;
            let mut out = group.zeros::<bf16>(m, n)?;
            let begin = Instant::now();
            gemmesh::all_gather_matmul(&a, &b, &mut out)?;
            worst = worst.max(begin.elapsed());
            let is_right = out.to_vec()?.iter().all(|&x| x == expected);
            assert!(is_right, "M = {m}, N = {n}");
            Ok(())
        };
        // In turn, and twice: all are evicted before they come again.
        let shapes = gemmesh::testing::KEPT_PROGRAMS + 128;
        for shape in (0..shapes).chain(0..shapes) {
            product(301 - shape / 80, 8 * (1 + shape % 80))?;
        }
        a.set_rows(&group.even_rows(301))?;
        steps.barrier()?;
        let begin = Instant::now();
        let result = if rank.rank == 1 {
            steps.barrier()?;
            group.synchronize()
        } else {
            // Rank 1 does not come. Meanwhile many shapes are evicted.
            let b = group.upload(&vec![bf16::ONE; 8 * k], 8, k)?;
            let mut out = group.zeros::<bf16>(301, 8)?;
            gemmesh::all_gather_matmul(&a, &b, &mut out)?;
            for n in 1..=2 * gemmesh::testing::KEPT_PROGRAMS {
                AllGatherMatmul::<_, bf16>::new().prepare(&a, 8 * n)?;
            }
            let took = begin.elapsed();
            assert!(took < Cuda::short(), "prepared in {took:?}");
            let result = group.synchronize();
            let took = begin.elapsed();
            assert!(took < Cuda::short_and_slack(), "{took:?}");
            steps.barrier()?;
            result
        };
        assert_timeout_names(&poisoned(&group, result).unwrap_err(), 1);
        Ok(format!("the longest call {worst:?}"))
    }));
}

/// What is free once nothing more comes back.
fn settled_free_bytes(context: &Context, at_least: usize) -> usize {
    let deadline = Instant::now() + Duration::from_secs(5);
    loop {
        let free = context.free_bytes();
        if free >= at_least || Instant::now() > deadline {
            return free;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_group_that_lost_two_ranks_leaves_the_survivors_memory_as_it_was() {
    const SPARE: usize = 64 << 20;
    let Some(_leave) = gpu_alone() else { return };
    let ranks = ranks(test_name!(), 3, |rank| {
        let context = Context::retain(rank.rank);
        // What a first group makes for good.
        drop(connect(
            &Rank {
                address: format!("{}-first", rank.address),
                ..*rank
            },
            TIMEOUT,
        )?);
        let before = context.free_bytes();
        let group = connect(rank, TIMEOUT)?;
        // 2 GiB, of which each rank has its own copy.
        let large = group.sharded::<bf16>(GIB / COLUMNS, COLUMNS)?;
        let mut arguments = Arguments::new(&group, 301, 72, 16)?;
        arguments.verify(&group)?;
        rank.say("here");
        if rank.rank != 0 {
            rank.hear();
        }
        let error = loop {
            match arguments.verify(&group) {
                Ok(()) => continue,
                Err(error) => break error,
            }
        };
        drop((large, arguments, group));
        let free = settled_free_bytes(&context, before - SPARE);
        assert!(
            free + SPARE >= before,
            "{before} bytes were free, now {free}"
        );
        Err(error)
    });
    ranks.all_heard("here");
    ranks.signal(1, Signal::KILL);
    ranks.signal(2, Signal::KILL);
    let outcomes = ranks.outcomes();
    outcomes[1].assert_killed();
    outcomes[2].assert_killed();
    let error = outcomes[0].error().cause();
    assert!(matches!(error.kind(), Kind::RankLost { .. }), "{error}");
}

#[test]
fn a_group_that_timed_out_leaves_all_memory_as_it_was() {
    const SPARE: usize = 64 << 20;
    let Some(_leave) = gpu_alone() else { return };
    all_done(ranks(test_name!(), 2, |rank| {
        let context = Context::retain(rank.rank);
        let steps = host_group(rank)?;
        let mut before = None;
        for (number, route) in ROUTES.into_iter().enumerate() {
            steps.barrier()?;
            let group = another_group(rank, number, SHORT)?;
            let large: ShardedMatrix<Cuda, bf16> = group.sharded(GIB / COLUMNS, COLUMNS)?;
            let mut arguments = Arguments::new(&group, 301, 72, 16)?;
            arguments.verify_by(&group, route)?;
            if rank.rank == 0 {
                let result = arguments.verify_by(&group, route);
                assert_timeout_names(&poisoned(&group, result).unwrap_err(), 1);
            }
            steps.barrier()?;
            drop((large, arguments, group));
            steps.barrier()?;
            let first = before.unwrap_or(0);
            let free = settled_free_bytes(&context, first);
            before.get_or_insert(free);
            assert!(free + SPARE >= first, "{first} bytes were free, now {free}");
        }
        Ok("as before".into())
    }));
}

/// Where two ranks share a GPU, the driver takes some hundred megabytes for each process at some point. So what a
/// thousand groups leave is measured from the groups on after which it has.
#[test]
fn a_thousand_groups_leave_the_gpus_memory_as_it_was() {
    const SPARE: usize = 16 << 20;
    let Some(_leave) = gpu_alone() else { return };
    let setting = support::processes::Setting {
        deadline: Duration::from_secs(240),
        ..Default::default()
    };
    all_done(ranks_with(test_name!(), 2, &setting, |rank| {
        let context = Context::retain(rank.rank);
        let steps = host_group(rank)?;
        let group = |world: usize, number: usize| -> Result<(), Error> {
            let (address, own) = match world {
                1 => (format!("{}-{}-{number}", rank.address, rank.rank), 0),
                _ => (format!("{}-{number}", rank.address), rank.rank),
            };
            let builder = Group::<Cuda>::builder().timeout(TIMEOUT);
            // Alone, a rank is rank 0, whose default is another GPU.
            let group = builder
                .device(rank.rank % devices().max(1))
                .connect(own, world, &address)?;
            Arguments::new(&group, 301, 72, 16)?.verify(&group)
        };
        let free = || -> Result<usize, Error> {
            steps.barrier()?;
            let free = context.free_bytes();
            steps.barrier()?;
            Ok(free)
        };
        let mut report = Vec::new();
        // 1000 groups in all: two processes with 450 of one rank each, at the same time, and 100 of two.
        for (world, count) in [(2, 100), (1, 450)] {
            let begin = Instant::now();
            let mut course = Vec::new();
            for number in 0..count + 10 {
                if number % 10 == 0 {
                    course.push(free()? >> 20);
                }
                group(world, number)?;
            }
            let after = free()? >> 20;
            // The first ten may make what stays.
            let before = course[1];
            assert!(
                after + (SPARE >> 20) >= before,
                "{count} groups of {world}: {before} MiB were free, now {after}: {course:?}"
            );
            report.push(format!(
                "{count} groups of {world} in {:?}, {} MiB gone of {:?}",
                begin.elapsed(),
                before.saturating_sub(after),
                &course[..course.len().min(6)]
            ));
        }
        Ok(report.join("; "))
    }));
}

#[test]
fn matrices_that_come_and_go_in_one_group_leave_the_gpus_memory_as_it_was() {
    let Some(_leave) = gpu_alone() else { return };
    all_done(ranks(test_name!(), 2, |rank| {
        let context = Context::retain(rank.rank);
        let group = connect(rank, TIMEOUT)?;
        let mut before = None;
        for number in 0..200 {
            // 4 MiB of sharded matrix a time.
            Arguments::new(&group, 2048, 64, 1024)?.run()?;
            group.synchronize()?;
            if number == 10 || number == 199 {
                group.barrier()?;
                let free = context.free_bytes();
                group.barrier()?;
                let first = *before.get_or_insert(free);
                assert!(free + (32 << 20) >= first, "{first} bytes became {free}");
            }
        }
        Ok("as before".into())
    }));
}
