//! Ranks that die, stop, leave or stay away.

use std::time::{Duration, Instant};

use gemmesh::error::{Deadline, Kind};
use gemmesh::tuning::Route;
use gemmesh::{Cuda, Error};

use crate::support::errors::parts;
use crate::support::gpu::*;
use crate::support::processes::{Rank, Setting};
use crate::support::shared::{failures, late};
use crate::support::tested::MakeCall;
use crate::{amid_functions, each_route, test_name, told_at_once};

/// An operation that is waited for.
const PRODUCT: MakeCall<Cuda> = |group, arguments| arguments.verify_by(group, Route::Pull);

#[test]
fn a_rank_killed_while_the_others_wait_for_it_is_named() {
    if let Some(_leave) = gpu() {
        failures::kill_while_the_others_wait(test_name!(), 2, PRODUCT);
    }
}

#[test]
fn rank_0_killed_while_the_others_wait_for_it_is_named() {
    if let Some(_leave) = gpu() {
        failures::kill_while_the_others_wait(test_name!(), 0, PRODUCT);
    }
}

each_route!(gpu, failures::kill_amid_operations::<Cuda>:
    a_rank_killed_amid_pulls_is_named by Pull,
    a_rank_killed_amid_pushes_is_named by Push,
    a_rank_killed_amid_stores_is_named by Store,
);

#[test]
fn a_rank_killed_between_operations_is_named_by_the_next() {
    if let Some(_leave) = gpu() {
        failures::kill_between_operations::<Cuda>(test_name!());
    }
}

#[test]
fn a_stopped_rank_is_named_at_the_timeout_and_told_when_it_goes_on() {
    if let Some(_leave) = gpu() {
        failures::stop_between_operations(test_name!(), 1, PRODUCT);
    }
}

each_route!(gpu, failures::stop_amid_operations::<Cuda>:
    a_rank_stopped_amid_pulls_is_named_at_the_timeout_and_told_when_it_goes_on by Pull,
    a_rank_stopped_amid_pushes_is_named_at_the_timeout_and_told_when_it_goes_on by Push,
    a_rank_stopped_amid_stores_is_named_at_the_timeout_and_told_when_it_goes_on by Store,
);

each_route!(gpu, failures::wait_for_a_late_rank::<Cuda>:
    a_rank_that_pulls_late_is_waited_for_by_name by Pull,
    a_rank_that_pushes_late_is_waited_for_by_name by Push,
    a_rank_that_stores_late_is_waited_for_by_name by Store,
);

each_route!(gpu, late::wait_longer_than_the_timeout::<Cuda>:
    a_rank_that_comes_later_than_the_timeout_to_pull_is_waited_for by Pull,
    a_rank_that_comes_later_than_the_timeout_to_push_is_waited_for by Push,
    a_rank_that_comes_later_than_the_timeout_to_store_is_waited_for by Store,
);

#[test]
fn a_rank_that_stays_in_a_call_which_a_late_one_has_begun_too_is_named_at_the_timeout() {
    if let Some(_leave) = gpu() {
        late::stay_in_a_call_that_all_have_begun::<Cuda>(test_name!());
    }
}

/// Rank 1 does not call what rank 0 has put on its stream. Rank 0's drop ends all the same, and both are told.
#[track_caller]
fn drop_while_a_rank_does_not_come(test: &str, route: Route) {
    all_done(ranks(test, 2, |rank| {
        let steps = host_group(rank)?;
        let (_context, group) = late::connect_patient::<Cuda>(&beside_the_host(rank))?;
        let mut arguments = Arguments::new(&group, 300, 72, 264)?;
        arguments.verify_by(&group, route)?;
        if rank.rank == 0 {
            arguments.run_by(route)?;
            let begin = Instant::now();
            drop((arguments, group));
            let took = begin.elapsed();
            steps.barrier()?;
            assert!(took < Cuda::short_and_slack(), "{took:?}");
            return Ok(format!("dropped in {took:?}"));
        }
        steps.barrier()?;
        let error = group.barrier().unwrap_err();
        let deadline = Deadline::Arrival;
        assert!(
            matches!((error.rank(), error.kind()), (Some(1), Kind::Timeout { deadline: d, .. }) if *d == deadline),
            "{error}"
        );
        Ok("told".into())
    }));
}

each_route!(gpu, drop_while_a_rank_does_not_come:
    a_group_that_pulls_from_a_rank_that_does_not_come_can_be_dropped by Pull,
    a_group_that_pushes_to_a_rank_that_does_not_come_can_be_dropped by Push,
    a_group_that_stores_at_a_rank_that_does_not_come_can_be_dropped by Store,
);

told_at_once!(Cuda);

amid_functions!(gpu, Cuda);

#[test]
fn ranks_that_come_one_after_the_other_are_waited_for_until_the_timeout() {
    let Some(_leave) = gpu() else { return };
    all_done(ranks(test_name!(), 3, |rank| {
        let _context = Context::retain(rank.rank);
        let steps = host_group(rank)?;
        let short = Cuda::short();
        for route in ROUTES {
            for last in [short * 4 / 5, short * 8 / 5] {
                steps.barrier()?;
                let group = another_group(rank, format!("{route:?}-{last:?}"), short)?;
                let mut arguments = Arguments::new(&group, 300, 72, 264)?;
                arguments.verify_by(&group, route)?;
                arguments.fill(&group, 5)?;
                group.barrier()?;
                std::thread::sleep(last * rank.rank as u32 / 2);
                let result = arguments.verify_by(&group, route);
                if last < short {
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
fn starve(rank: &Rank, count: usize, routes: &[Route]) -> Result<String, Error> {
    let starved = Duration::from_millis(250);
    let _context = Context::retain(rank.rank);
    let steps = host_group(rank)?;
    let mut longest = Duration::ZERO;
    for number in 0..=count {
        steps.barrier()?;
        let group = another_group(rank, number, starved)?;
        let mut arguments = Arguments::new(&group, 300, 72, 264)?;
        let route = routes[number / rank.world % routes.len()];
        arguments.verify_by(&group, route)?;
        steps.barrier()?;
        if number == count {
            break;
        }
        let culprit = number % rank.world;
        let begin = Instant::now();
        let result = if rank.rank == culprit {
            steps.barrier()?;
            arguments.verify_by(&group, route)
        } else {
            let result = arguments.verify_by(&group, route);
            let took = begin.elapsed();
            longest = longest.max(took);
            assert!(took < starved + NOTICED, "round {number}: {took:?}");
            steps.barrier()?;
            result
        };
        let error = poisoned(&group, result).unwrap_err();
        match parts(&error) {
            (Some(rank), Kind::Timeout { .. }) => {
                assert_eq!(rank, culprit, "round {number}: {error}");
            }
            other => panic!("round {number}: {other:?}"),
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
        starve(rank, 100, &ROUTES)
    }));
}

#[test]
fn starved_ranks_are_set_free_also_when_all_streams_share_one_connection() {
    let Some(_leave) = gpu_alone() else { return };
    let setting = Setting {
        deadline: DEADLINE,
        variables: &|_| vec![("CUDA_DEVICE_MAX_CONNECTIONS", "1".into())],
        ..Setting::default()
    };
    all_done(ranks_with(test_name!(), 2, &setting, |rank| {
        starve(rank, 4, &[Route::Pull, Route::Store])
    }));
}

/// A fork makes no CUDA call, and tells no one: the group is its parent's.
#[test]
fn a_fork_amid_a_function_of_the_callers_ends_the_operation_in_the_child_alone() {
    if let Some(_leave) = gpu() {
        failures::fork_amid_a_function_of_the_callers::<Cuda>(test_name!());
    }
}
