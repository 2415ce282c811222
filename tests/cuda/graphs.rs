//! Operations under capture, and their replays.

use std::time::{Duration, Instant};

use cudarc::driver::sys;
use gemmesh::error::Kind;
use gemmesh::tuning::Route;
use gemmesh::{AllGatherMatmul, Cuda, Error, Group, Host, Matmul, all_gather, bf16};

use crate::support::gpu::*;
use crate::support::processes::{Rank, Setting};
use crate::test_name;

fn refuse_capture(
    rank: &Rank,
    group: &Group<Cuda>,
    mode: sys::CUstreamCaptureMode,
    arguments: &mut Arguments,
) {
    captured(group, mode, || {
        let refused = Kind::Capturing.on(rank.rank);
        assert_eq!(arguments.run_by(Route::Pull), Err(refused));
    });
}

#[test]
fn a_pull_under_capture_is_refused_and_the_group_goes_on() {
    let Some(_leave) = gpu() else { return };
    all_done(ranks(test_name!(), 2, |rank| {
        let group = connect(rank, TIMEOUT)?;
        let mut arguments = Arguments::new(&group, 301, 72, 16)?;
        arguments.verify(&group)?;
        arguments.verify_by(&group, Route::Pull)?;
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
            let refused = Kind::Capturing.on(rank.rank);
            assert_eq!(arguments.run(), Err(refused.clone()));
            assert_eq!(arguments.run_by(Route::Store), Err(refused));
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
            let prepared = arguments.prepare(Route::Pull)?;
            let Arguments { a, b, out, .. } = &mut arguments;
            // The first call plans the part, which a capture does not allow.
            prepared.matmul(&*a, &*b, &mut *out)?;
            Replay::capture(&group, GLOBAL, || {
                prepared.matmul(&*a, &*b, &mut *out).unwrap();
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
fn no_rows_are_captured_as_nothing() {
    let Some(_leave) = gpu() else { return };
    all_done(ranks(test_name!(), 2, |rank| {
        let group = connect(rank, TIMEOUT)?;
        let mut some = Arguments::new(&group, 301, 72, 16)?;
        let mut none = Arguments::new(&group, 0, 72, 16)?;
        let alone = group.zeros::<bf16>(0, 16)?;
        let matmul = Matmul::new().prepare((&group, [0, 16]), [72])?;
        // What was never run is refused.
        all_gather(&none.a)?;
        for (base, route) in (1..).zip([Route::Pull, Route::Push, Route::Store]) {
            let prepared = none.prepare(route)?;
            let replay = Replay::capture(&group, GLOBAL, || {
                let Arguments { a, b, out, .. } = &mut none;
                prepared.run(&*a, &*b, &mut *out).unwrap();
                all_gather(a).unwrap();
                matmul.run(&alone, &*b, &mut *out).unwrap();
            });
            replay.launch();
            some.fill(&group, base)?;
            some.verify(&group)?;
        }
        Ok("nothing".into())
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
        for (route, mode) in [(Route::Push, GLOBAL), (Route::Store, RELAXED)] {
            let mut arguments = Arguments::new(&group, 301, 72, 264)?;
            let prepared = arguments.prepare(route)?;
            let replay = Replay::capture(&group, mode, || {
                let Arguments { a, b, out, .. } = &mut arguments;
                prepared.run(&*a, &*b, &mut *out).unwrap();
            });
            for turn in 0..count {
                // Other rows each time; now and then several at once, or another operation in between.
                arguments.fill(&group, 1 + turn % 11)?;
                match turn % 50 {
                    20 => (0..10).for_each(|_| replay.launch()),
                    30 => arguments.run_by(Route::Pull)?,
                    40 => arguments.run_by(route)?,
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

/// Rank 0 launches a graph, and rank 1 does not, which both hear at the deadline.
pub fn miss(
    rank: &Rank,
    steps: &Group<Host>,
    group: &Group<Cuda>,
    replay: &Replay,
) -> Result<Error, Error> {
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
        assert!(took < Cuda::short_and_slack(), "{took:?}");
    }
    let error = poisoned(group, result).unwrap_err();
    assert_timeout_names(&error, 1);
    Ok(error)
}

#[test]
fn a_replay_that_a_rank_does_not_make_ends_at_the_deadline_and_names_it() {
    let Some(_leave) = gpu() else { return };
    all_done(ranks(test_name!(), 2, |rank| {
        let steps = host_group(rank)?;
        for route in [Route::Push, Route::Store] {
            let _context = Context::retain(rank.rank);
            steps.barrier()?;
            let group = another_group(rank, format!("{route:?}"), SHORT)?;
            let mut arguments = Arguments::new(&group, 301, 72, 264)?;
            let prepared = arguments.prepare(route)?;
            let replay = Replay::capture(&group, GLOBAL, || {
                let Arguments { a, b, out, .. } = &mut arguments;
                prepared.run(&*a, &*b, &mut *out).unwrap();
            });
            replay.launch();
            group.synchronize()?;
            arguments.check(rank.world)?;
            miss(rank, &steps, &group, &replay)?;
        }
        Ok("named".into())
    }));
}
