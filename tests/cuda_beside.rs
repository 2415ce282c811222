//! What else runs in a process or on its GPU: the caller's contexts, captures, streams and kernels, other groups. None
//! of it disturbs a group or is disturbed by one; what can't work is refused, or ends in time with an error.
//!
//! As tests/cuda/main.rs.
#![allow(unsafe_code)]

mod support;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use cudarc::driver::sys;
use gemmesh::error::Kind;
use gemmesh::tuning::Route;
use gemmesh::{AllGatherMatmul, Cuda, Error, Group, bf16};
use support::gpu::*;
use support::patience::stretched;
use support::processes::Setting;

// The caller's context.

fn current() -> sys::CUcontext {
    let mut context = std::ptr::null_mut();
    // SAFETY: writes the local.
    unsafe { driver(sys::cuCtxGetCurrent(&mut context)) };
    context
}

#[test]
fn the_callers_context_is_current_after_every_call() {
    let Some(_leave) = gpu() else { return };
    all_done(ranks(test_name!(), 2, |rank| {
        let group = connect(rank, TIMEOUT)?;
        // None, and that of another GPU if there is one.
        let other = Context::retain(rank.rank + 1);
        let others = current();
        for context in [std::ptr::null_mut(), others] {
            // SAFETY: retained above.
            unsafe { driver(sys::cuCtxSetCurrent(context)) };
            let mut arguments = Arguments::new(&group, 301, 72, 16)?;
            for route in ROUTES {
                arguments.verify_by(&group, route)?;
                assert_eq!(current(), context);
            }
            group.check_peers()?;
            group.driver_version()?;
            group.synchronize()?;
            group.barrier()?;
            assert_eq!(current(), context);
            let second = another_group(rank, context.is_null(), TIMEOUT)?;
            assert_eq!(current(), context);
            Arguments::new(&second, 301, 72, 16)?.verify(&second)?;
            drop((arguments, second));
            assert_eq!(current(), context);
        }
        drop(other);
        Ok("restored".into())
    }));
}

#[test]
fn two_ranks_of_one_process_are_told_to_be_processes() {
    let Some(_leave) = gpu() else { return };
    let address = format!("one-process-{}", std::process::id());
    let connect = |rank: usize| {
        let builder = Group::<Cuda>::builder().timeout(TIMEOUT);
        builder.connect(rank, 2, &address).map(drop)
    };
    let results = std::thread::scope(|scope| {
        let ranks = [0, 1].map(|rank| scope.spawn(move || connect(rank)));
        ranks.map(|rank| rank.join().unwrap())
    });
    for result in results {
        let error = result.unwrap_err();
        assert!(matches!(error.kind(), Kind::Misuse { .. }), "{error}");
    }
}

#[test]
fn ranks_that_see_the_gpus_in_different_orders_are_told_so() {
    let Some(_leave) = gpus(2) else { return };
    let setting = Setting {
        deadline: DEADLINE,
        variables: &|place| {
            let order = ["0,1", "1,0"][place];
            vec![("CUDA_VISIBLE_DEVICES", order.into())]
        },
        ..Setting::default()
    };
    let ranks = ranks_with(test_name!(), 2, &setting, |rank| {
        connect(rank, TIMEOUT).map(|_| "a group".into())
    });
    let outcomes = ranks.outcomes();
    let error = same_error(&outcomes);
    assert!(
        matches!(error.kind(), Kind::SharedGpu { ranks: [0, 1], .. }),
        "{error}"
    );
}

// Captures.

/// A capture of another thread, of the mode that forbids most calls everywhere in the process, as long as `f` runs.
fn while_another_thread_captures(f: impl FnOnce() -> Result<(), Error>) -> Result<(), Error> {
    let context = current() as usize;
    let (begun, over) = (AtomicBool::new(false), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let mut graph = std::ptr::null_mut();
            // SAFETY: the context is retained by the caller.
            unsafe { driver(sys::cuCtxSetCurrent(context as sys::CUcontext)) };
            let stream = stream(0);
            // SAFETY: writes the local; the stream is destroyed once.
            unsafe {
                driver(sys::cuStreamBeginCapture_v2(stream, GLOBAL));
                begun.store(true, Ordering::Relaxed);
                while !over.load(Ordering::Relaxed) {
                    std::thread::sleep(Duration::from_millis(1));
                }
                // It has not been invalidated.
                driver(sys::cuStreamEndCapture(stream, &mut graph));
                driver(sys::cuGraphDestroy(graph));
                driver(sys::cuStreamDestroy_v2(stream));
            }
        });
        while !begun.load(Ordering::Relaxed) && !thread.is_finished() {
            std::thread::sleep(Duration::from_millis(1));
        }
        let result = f();
        over.store(true, Ordering::Relaxed);
        thread.join().unwrap();
        result
    })
}

#[test]
fn a_capture_of_another_thread_neither_disturbs_nor_is_disturbed() {
    let Some(_leave) = gpu() else { return };
    all_done(ranks(test_name!(), 2, |rank| {
        let group = connect(rank, TIMEOUT)?;
        let mut arguments = Arguments::new(&group, 301, 72, 16)?;
        for round in 0..3 {
            while_another_thread_captures(|| {
                for route in ROUTES {
                    arguments.fill(&group, 1 + round)?;
                    arguments.verify_by(&group, route)?;
                }
                // Allocations, drops, uploads, shapes that are new.
                let mut other = Arguments::new(&group, 97 + round, 8 + 8 * round, 24)?;
                other.verify(&group)?;
                drop(other);
                group.synchronize()
            })?;
        }
        while_another_thread_captures(|| {
            let second = another_group(rank, "second", TIMEOUT)?;
            Arguments::new(&second, 301, 72, 16)?.verify(&second)
        })?;
        Ok("right".into())
    }));
}

#[test]
fn matrices_may_be_dropped_and_made_while_their_groups_stream_is_captured() {
    let Some(_leave) = gpu() else { return };
    all_done(ranks(test_name!(), 2, |rank| {
        let group = connect(rank, TIMEOUT)?;
        let mut arguments = Arguments::new(&group, 301, 72, 264)?;
        let prepared = arguments.prepare(Route::Store)?;
        arguments.verify(&group)?;
        let other = Arguments::new(&group, 200, 72, 16)?;
        let replay = Replay::capture(&group, GLOBAL, || {
            drop(other);
            let made = group.zeros::<bf16>(100, 100).unwrap();
            let Arguments { a, b, out, .. } = &mut arguments;
            prepared.run(&*a, &*b, &mut *out).unwrap();
            drop(made);
            // What would wait for the stream is refused, and is neither idle nor a failure.
            let refused = Kind::Capturing.on(rank.rank);
            assert_eq!(group.synchronize(), Err(refused.clone()));
            assert_eq!(out.to_vec().unwrap_err(), refused);
        });
        for base in 1..20 {
            arguments.fill(&group, base)?;
            replay.launch();
            group.synchronize()?;
            arguments.check(rank.world)?;
        }
        Ok("right".into())
    }));
}

// The caller's own work on the stream.

#[test]
fn synchronize_waits_for_operations_and_not_for_what_stands_behind_them() {
    let Some(_leave) = gpu() else { return };
    all_done(ranks(test_name!(), 2, |rank| {
        let group = connect(rank, TIMEOUT)?;
        let mut arguments = Arguments::new(&group, 301, 72, 16)?;
        for route in ROUTES {
            arguments.verify_by(&group, route)?;
            arguments.run_by(route)?;
            let hold = Hold::start(1, Some(group.stream().cast()));
            let begin = Instant::now();
            group.synchronize()?;
            let took = begin.elapsed();
            assert!(took < Duration::from_secs(5), "{took:?}");
            group.barrier()?;
            drop(hold);
            // Copies to the host wait for all that is on the stream.
            arguments.check(rank.world)?;
        }
        Ok("right".into())
    }));
}

#[test]
fn a_group_ends_while_the_caller_keeps_its_stream_busy() {
    let Some(_leave) = gpu() else { return };
    all_done(ranks(test_name!(), 2, |rank| {
        let group = connect(rank, TIMEOUT)?;
        let stream = stream(0);
        // SAFETY: the stream is destroyed after the group has ended.
        unsafe { group.set_stream(stream.cast())? };
        let mut arguments = Arguments::new(&group, 301, 72, 16)?;
        arguments.verify(&group)?;
        arguments.run()?;
        let hold = Hold::start(1, Some(stream));
        group.synchronize()?;
        group.barrier()?;
        let begin = Instant::now();
        drop((arguments, group));
        let took = begin.elapsed();
        assert!(took < Duration::from_secs(5), "{took:?}");
        drop(hold);
        // SAFETY: no one uses the stream any more.
        unsafe { driver(sys::cuStreamDestroy_v2(stream)) };
        Ok(format!("ended in {took:?}"))
    }));
}

#[test]
fn synchronize_ends_in_time_also_behind_work_of_the_callers_that_does_not() {
    let Some(_leave) = gpu_alone() else { return };
    all_done(ranks(test_name!(), 1, |rank| {
        let (_context, group) = connect_short(rank)?;
        let mut arguments = Arguments::new(&group, 301, 72, 16)?;
        let prepared = arguments.prepare(Route::Pull)?;
        let hold = Hold::start(1, Some(group.stream().cast()));
        let Arguments { a, b, out, .. } = &mut arguments;
        prepared.matmul(&*a, &*b, &mut *out)?;
        let begin = Instant::now();
        let error = group.synchronize().unwrap_err();
        let took = begin.elapsed();
        assert!(
            matches!(
                (error.rank(), error.kind()),
                (Some(0), Kind::Timeout { .. })
            ),
            "{error}"
        );
        assert!(
            took < Cuda::short_and_slack() + stretched(NOTICED),
            "{took:?}"
        );
        // The group is as good as before.
        hold.release();
        group.synchronize()?;
        arguments.check(rank.world)?;
        Ok(format!("told after {took:?}"))
    }));
}

// Other kernels and groups on the GPU.

/// Most multiprocessors of rank 0's GPU are held by a kernel that waits for the operation to end on the other rank.
#[track_caller]
fn beside_a_foreign_kernel(test: &str, route: Route) {
    const HELD: u32 = 100;
    all_done(ranks(test, 2, |rank| {
        let steps = host_group(rank)?;
        let group = connect(rank, TIMEOUT)?;
        // More pieces to store than the multiprocessors that are left can take at once.
        let mut arguments = Arguments::new(&group, 4096, 256, 1024)?;
        for (round, shape) in [6, 0, 9, 4].into_iter().enumerate() {
            let config = config(shape, 2, 2).with_route(route);
            let operation = AllGatherMatmul::new().config(config);
            let prepared = operation.prepare(&arguments.a, 256)?;
            // No rank is late.
            for held in [false, true] {
                arguments.fill(&group, 1 + round)?;
                let hold = (held && rank.rank == 0).then(|| Hold::start(HELD, None));
                std::thread::sleep(Duration::from_millis(50));
                group.barrier()?;
                let begin = Instant::now();
                let Arguments { a, b, out, .. } = &mut arguments;
                prepared.run(&*a, &*b, &mut *out)?;
                if rank.rank == 1 {
                    group.synchronize()?;
                    let took = begin.elapsed();
                    assert!(took < Duration::from_secs(5), "shape {shape}: {took:?}");
                    arguments.check(rank.world)?;
                }
                steps.barrier()?;
                drop(hold);
                group.synchronize()?;
                arguments.check(rank.world)?;
                group.barrier()?;
            }
        }
        Ok("right".into())
    }));
}

each_route!(gpu_alone, beside_a_foreign_kernel:
    pulls_end_beside_a_kernel_that_waits_for_them by Pull,
    pushes_end_beside_a_kernel_that_waits_for_them by Push,
    stores_end_beside_a_kernel_that_waits_for_them by Store,
);

/// Rank 0 calls an operation of one group and then one of another, rank 1 the other way round.
#[track_caller]
fn two_groups_in_opposite_orders(test: &str, route: Route) {
    all_done(ranks(test, 2, |rank| {
        let _context = Context::retain(rank.rank);
        let steps = host_group(rank)?;
        let open = |name: &str| -> Result<Group<Cuda>, Error> {
            steps.barrier()?;
            another_group(rank, name, SHORT)
        };
        let mut failed = 0;
        for round in 0..5 {
            let groups = [
                open(&format!("first-{round}"))?,
                open(&format!("second-{round}"))?,
            ];
            // More tiles than multiprocessors: each kernel fills the GPU. Where ranks share one, copies between them
            // need room beside both kernels.
            let (m, n) = if devices() > 1 {
                (4096, 2048)
            } else {
                (301, 256)
            };
            let mut both = [
                Arguments::new(&groups[0], m, n, 64)?,
                Arguments::new(&groups[1], m, n, 64)?,
            ];
            for (arguments, group) in both.iter_mut().zip(&groups) {
                arguments.verify_by(group, route)?;
            }
            steps.barrier()?;
            let begin = Instant::now();
            let order = if rank.rank == 0 { [0, 1] } else { [1, 0] };
            let mut results = Vec::new();
            for index in order {
                results.push((index, both[index].run_by(route)));
            }
            for (index, result) in results {
                let result = result.and_then(|()| groups[index].synchronize());
                match result.and_then(|()| both[index].check(rank.world)) {
                    Ok(()) => {}
                    // Each kernel may hold the GPU that the other's peer needs: then both end at the deadline. A rank whose
                    // own kernel has ended before may read so when it copies the result.
                    Err(error) => {
                        assert!(route != Route::Pull, "{error}");
                        assert!(matches!(error.kind(), Kind::Timeout { .. }), "{error}");
                        failed += 1;
                    }
                }
            }
            let took = begin.elapsed();
            assert!(took < 2 * Cuda::short_and_slack(), "{took:?}");
            steps.barrier()?;
        }
        // And nothing is left of it.
        let group = open("last")?;
        Arguments::new(&group, 301, 72, 16)?.verify_by(&group, route)?;
        Ok(format!("{failed} of 10 operations gave up"))
    }));
}

each_route!(gpu_alone, two_groups_in_opposite_orders:
    pulls_of_two_groups_in_opposite_orders_are_right by Pull,
    pushes_of_two_groups_in_opposite_orders_end_in_time by Push,
    stores_of_two_groups_in_opposite_orders_end_in_time by Store,
);

// Queues of the device.

/// A stream of each priority.
fn streams() -> Vec<(i32, sys::CUstream)> {
    let of = |priority| (priority, stream(priority));
    priorities().map(of).collect()
}

#[test]
fn a_starved_rank_is_set_free_on_any_stream_that_it_may_use_where_streams_share_queues() {
    let Some(_leave) = gpu_alone() else { return };
    let setting = Setting {
        deadline: DEADLINE,
        variables: &|_| vec![("CUDA_DEVICE_MAX_CONNECTIONS", "1".into())],
        ..Setting::default()
    };
    all_done(ranks_with(test_name!(), 2, &setting, |rank| {
        let _context = Context::retain(rank.rank);
        let steps = host_group(rank)?;
        let streams = streams();
        let greatest = streams[0].0;
        for &(priority, stream) in &streams {
            for route in [Route::Pull, Route::Store] {
                steps.barrier()?;
                let group = another_group(rank, format!("{priority}-{route:?}"), SHORT)?;
                // SAFETY: the streams live as long as the process.
                let set = unsafe { group.set_stream(stream.cast()) };
                if priority <= greatest + 2 {
                    let error = set.unwrap_err();
                    assert!(matches!(error.kind(), Kind::Misuse { .. }), "{error}");
                    continue;
                }
                set?;
                let mut arguments = Arguments::new(&group, 301, 72, 264)?;
                arguments.verify_by(&group, route)?;
                steps.barrier()?;
                let begin = Instant::now();
                let result = if rank.rank == 1 {
                    steps.barrier()?;
                    arguments.verify_by(&group, route)
                } else {
                    let result = arguments.verify_by(&group, route);
                    let took = begin.elapsed();
                    assert!(
                        took < Cuda::short_and_slack(),
                        "priority {priority}: {took:?}"
                    );
                    steps.barrier()?;
                    result
                };
                assert_timeout_names(&poisoned(&group, result).unwrap_err(), 1);
            }
        }
        Ok("set free".into())
    }));
}

#[test]
fn a_starved_rank_is_set_free_on_any_stream() {
    let Some(_leave) = gpu_alone() else { return };
    all_done(ranks(test_name!(), 2, |rank| {
        let _context = Context::retain(rank.rank);
        let steps = host_group(rank)?;
        // More than the device has queues, so that some share one.
        let streams: Vec<_> = (0..6).flat_map(|_| streams()).collect();
        for (number, &(_, stream)) in streams.iter().enumerate().step_by(5) {
            steps.barrier()?;
            let group = another_group(rank, number, Duration::from_millis(500))?;
            // SAFETY: the streams live as long as the process.
            unsafe { group.set_stream(stream.cast())? };
            let mut arguments = Arguments::new(&group, 301, 72, 264)?;
            arguments.verify_by(&group, Route::Pull)?;
            steps.barrier()?;
            let result = if rank.rank == 1 {
                steps.barrier()?;
                arguments.verify_by(&group, Route::Pull)
            } else {
                let result = arguments.verify_by(&group, Route::Pull);
                steps.barrier()?;
                result
            };
            assert_timeout_names(&poisoned(&group, result).unwrap_err(), 1);
        }
        Ok("set free".into())
    }));
}
