//! A rank that puts more on its stream than the device's queues hold is told in time of who does not call.

use std::time::Instant;

use cudarc::driver::sys;
use gemmesh::tuning::Route;
use gemmesh::{AllGatherMatmul, Cuda, Error, Group, bf16};

use crate::each_route;
use crate::support::gpu::*;
use crate::support::processes::Rank;

/// Rank 1 does not call what rank 0 puts on its stream, as much as it wants to. Both are told in time.
fn run_ahead(
    rank: &Rank,
    m: usize,
    ahead: impl FnOnce(&Group<Cuda>, &mut Arguments) -> Result<(), Error>,
) -> Result<String, Error> {
    let steps = host_group(rank)?;
    let (_context, group) = connect_short(&beside_the_host(rank))?;
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
    assert!(took < 2 * Cuda::short_and_slack(), "{took:?}");
    steps.barrier()?;
    assert_timeout_names(&poisoned(&group, result).unwrap_err(), 1);
    Ok(format!("told after {took:?}"))
}

/// More than the queues of a device hold.
const AHEAD: usize = 5_000;

#[track_caller]
fn operations_ahead(test: &str, route: Route) {
    all_done(ranks(test, 2, |rank| {
        // 64 chunks a shard: as many entries on the streams as an operation can have.
        run_ahead(rank, 2 * 65 * 128, |_, arguments| {
            let config = config(6, 1, 64).with_route(route);
            let operation = AllGatherMatmul::new().config(config);
            let prepared = operation.prepare(&arguments.a, 16)?;
            for _ in 0..AHEAD {
                prepared.run(&arguments.a, &arguments.b, &mut arguments.out)?;
            }
            panic!("{AHEAD} calls, and none fails");
        })
    }));
}

each_route!(gpu, operations_ahead:
    a_rank_that_runs_ahead_with_pulls_names_who_does_not_call by Pull,
    a_rank_that_runs_ahead_with_pushes_names_who_does_not_call by Push,
    a_rank_that_runs_ahead_with_stores_names_who_does_not_call by Store,
);

#[track_caller]
fn work_of_the_callers_ahead(test: &str, route: Route) {
    all_done(ranks(test, 2, |rank| {
        run_ahead(rank, 301, |group, arguments| {
            let scratch = group.zeros::<bf16>(16, 16)?;
            let (ptr, _) = scratch.as_device_ptr();
            arguments.run_by(route)?;
            for _ in 0..AHEAD {
                // SAFETY: the scratch lives until the stream has passed.
                unsafe { driver(sys::cuMemsetD32Async(ptr, 1, 16, group.stream().cast())) };
            }
            group.synchronize()
        })
    }));
}

each_route!(gpu, work_of_the_callers_ahead:
    a_pull_with_much_work_of_the_callers_behind_it_names_who_does_not_call by Pull,
    a_push_with_much_work_of_the_callers_behind_it_names_who_does_not_call by Push,
    a_store_with_much_work_of_the_callers_behind_it_names_who_does_not_call by Store,
);

/// Where ranks share a GPU with another test, each replay waits for a time slice.
#[track_caller]
fn replays_ahead(test: &str, route: Route) {
    all_done(ranks(test, 2, |rank| {
        run_ahead(rank, 301, |group, arguments| {
            let prepared = arguments.prepare(route)?;
            let replay = Replay::capture(group, GLOBAL, || {
                let Arguments { a, b, out, .. } = arguments;
                prepared.run(&*a, &*b, &mut *out).unwrap();
            });
            for _ in 0..AHEAD {
                replay.launch();
            }
            group.synchronize()
        })
    }));
}

each_route!(gpu_alone, replays_ahead:
    many_replays_of_a_push_that_a_rank_does_not_make_name_it by Push,
    many_replays_of_a_store_that_a_rank_does_not_make_name_it by Store,
);
