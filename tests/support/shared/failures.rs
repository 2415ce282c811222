//! Ranks that die, stop or leave: the others are told who, in time.

use std::time::{Duration, Instant};

use gemmesh::error::Kind;
use gemmesh::pipelines::{
    AllGatherAndConsume, all_gather_and_consume, produce_and_all_to_all, produce_and_reduce_scatter,
};
use gemmesh::tuning::Route;
use gemmesh::{AllGatherMatmul, Error, Group, bf16};
use rustix::process::Signal;

use crate::support::errors::parts;
use crate::support::forks::{assert_right, end, fork, is_refused};
use crate::support::patience::{again_if_busy, stretched};
use crate::support::processes::{Processes, Rank};
use crate::support::products::Arguments;
use crate::support::tested::{
    MakeCall, Tested, all_done, assert_timeout_names, connect, connect_short, poisoned, ranks,
};

/// A call that must fail does.
pub fn fails<B: Tested>(
    rank: &Rank,
    group: &Group<B>,
    result: Result<(), Error>,
) -> Result<String, Error> {
    assert!(result.is_err(), "an operation that cannot have worked");
    rank.say("failed");
    poisoned(group, result)
}

/// Operations until one fails.
pub fn until_failure<B: Tested>(
    rank: &Rank,
    group: &Group<B>,
    arguments: &mut Arguments<B>,
    route: Route,
) -> Result<String, Error> {
    loop {
        let result = arguments.verify_by(group, route);
        if result.is_err() {
            return fails(rank, group, result);
        }
    }
}

// Killed.

#[track_caller]
pub fn assert_lost<B: Tested>(ranks: Processes, world: usize, victim: usize, since: Instant) {
    for place in (0..world).filter(|&place| place != victim) {
        let took = ranks
            .heard(place, "failed")
            .saturating_duration_since(since);
        assert!(
            took < B::before_timeout(B::NOTICED),
            "rank {place} took {took:?}"
        );
    }
    for outcome in ranks.outcomes() {
        if outcome.rank == victim {
            outcome.assert_killed();
            continue;
        }
        assert!(
            matches!((outcome.error().rank(), outcome.error().kind()), (Some(rank), Kind::RankLost { .. }) if rank == victim),
            "{}",
            outcome.error()
        );
        let ended = outcome.at.saturating_duration_since(since);
        assert!(
            ended < stretched(B::ENDED),
            "rank {} took {ended:?}",
            outcome.rank
        );
    }
}

/// Rank `victim` is killed while it does not make the call that the others are in.
#[track_caller]
pub fn kill_while_the_others_wait<B: Tested>(test: &str, victim: usize, call: MakeCall<B>) {
    again_if_busy(|| {
        let ranks = ranks::<B>(test, 3, |rank| {
            let group = connect::<B>(rank, B::TIMEOUT)?;
            let mut arguments = Arguments::small(&group)?;
            arguments.verify(&group)?;
            rank.say("here");
            if rank.rank == victim {
                rank.hear();
            }
            fails(rank, &group, call(&group, &mut arguments))
        });
        ranks.all_heard("here");
        std::thread::sleep(Duration::from_millis(200));
        let killed = ranks.signal(victim, Signal::KILL);
        assert_lost::<B>(ranks, 3, victim, killed);
    });
}

/// Three ranks that do one operation after the other until one fails.
fn amid_operations<B: Tested>(
    test: &str,
    route: Route,
    connect: fn(&Rank) -> Result<Group<B>, Error>,
) -> Processes {
    let ranks = ranks::<B>(test, 3, |rank| {
        let group = connect(rank)?;
        let mut arguments = Arguments::larger(&group)?;
        arguments.verify_by(&group, route)?;
        rank.say("here");
        until_failure(rank, &group, &mut arguments, route)
    });
    ranks.all_heard("here");
    std::thread::sleep(Duration::from_millis(200));
    ranks
}

/// Rank 1 is killed while all do one operation after the other.
#[track_caller]
pub fn kill_amid_operations<B: Tested>(test: &str, route: Route) {
    kill_amid_operations_of(test, route, |rank| connect::<B>(rank, B::TIMEOUT));
}

/// The same in the group that `connect` returns.
#[track_caller]
pub fn kill_amid_operations_of<B: Tested>(
    test: &str,
    route: Route,
    connect: fn(&Rank) -> Result<Group<B>, Error>,
) {
    again_if_busy(|| {
        let ranks = amid_operations(test, route, connect);
        let killed = ranks.signal(1, Signal::KILL);
        assert_lost::<B>(ranks, 3, 1, killed);
    });
}

/// Rank 1 is killed while no one calls anything.
#[track_caller]
pub fn kill_between_operations<B: Tested>(test: &str) {
    again_if_busy(|| {
        let mut ranks = ranks::<B>(test, 3, |rank| {
            let group = connect::<B>(rank, B::TIMEOUT)?;
            let mut arguments = Arguments::small(&group)?;
            arguments.verify(&group)?;
            rank.say("here");
            rank.hear();
            let result = arguments.verify_by(&group, Route::Pull);
            fails(rank, &group, result)
        });
        ranks.all_heard("here");
        ranks.signal(1, Signal::KILL);
        std::thread::sleep(Duration::from_millis(100));
        let told = Instant::now();
        ranks.tell(0);
        ranks.tell(2);
        assert_lost::<B>(ranks, 3, 1, told);
    });
}

// Stopped.

/// All ranks but `victim` have given up on it; then it goes on, and is told.
#[track_caller]
fn assert_stopped_rank_named<B: Tested>(mut ranks: Processes, victim: usize, since: Instant) {
    for place in (0..3).filter(|&place| place != victim) {
        let took = ranks
            .heard(place, "failed")
            .saturating_duration_since(since);
        assert!(took < B::short_and_slack(), "rank {place} took {took:?}");
    }
    ranks.signal(victim, Signal::CONT);
    ranks.tell(victim);
    for outcome in ranks.outcomes() {
        assert_timeout_names(outcome.error(), victim);
        assert_waited::<B>(outcome.error());
    }
}

/// That a rank gave up at its timeout.
#[track_caller]
pub fn assert_waited<B: Tested>(error: &Error) {
    match parts(error) {
        (_, Kind::Timeout { waited_ms, .. }) | (_, Kind::RanksMissing { waited_ms, .. }) => {
            let waited = Duration::from_millis(*waited_ms);
            assert!(
                B::WAITED.start <= waited && waited < stretched(B::WAITED.end),
                "{waited:?}"
            );
        }
        other => panic!("{other:?}"),
    }
}

/// Rank `victim` is stopped while no one calls anything.
#[track_caller]
pub fn stop_between_operations<B: Tested>(test: &str, victim: usize, call: MakeCall<B>) {
    again_if_busy(|| {
        let mut ranks = ranks::<B>(test, 3, |rank| {
            let (_kept, group) = connect_short::<B>(rank)?;
            let mut arguments = Arguments::small(&group)?;
            arguments.verify(&group)?;
            rank.say("here");
            rank.hear();
            fails(rank, &group, call(&group, &mut arguments))
        });
        ranks.all_heard("here");
        ranks.signal(victim, Signal::STOP);
        let stopped = Instant::now();
        for place in (0..3).filter(|&place| place != victim) {
            ranks.tell(place);
        }
        assert_stopped_rank_named::<B>(ranks, victim, stopped);
    });
}

/// Rank 1 is stopped while all do one operation after the other.
#[track_caller]
pub fn stop_amid_operations<B: Tested>(test: &str, route: Route) {
    stop_amid_operations_of(test, route, |rank| {
        let (kept, group) = connect_short::<B>(rank)?;
        std::mem::forget(kept);
        Ok(group)
    });
}

/// The same in the group that `connect` returns.
#[track_caller]
pub fn stop_amid_operations_of<B: Tested>(
    test: &str,
    route: Route,
    connect: fn(&Rank) -> Result<Group<B>, Error>,
) {
    again_if_busy(|| {
        let ranks = amid_operations(test, route, connect);
        let stopped = ranks.signal(1, Signal::STOP);
        assert_stopped_rank_named::<B>(ranks, 1, stopped);
    });
}

// Amid a function of the caller's.

/// An operation that calls a function of the caller's, on three ranks: three times at least.
pub type CallsBack<B> = fn(&Group<B>, &mut dyn FnMut()) -> Result<(), Error>;

/// The rows of each rank are one chunk.
pub fn consumes<B: Tested>(group: &Group<B>, called: &mut dyn FnMut()) -> Result<(), Error> {
    let a = group.sharded::<bf16>(30, 8)?;
    let operation = AllGatherAndConsume::new().chunks(1);
    operation.run(&a, |_| {
        called();
        Ok(())
    })
}

pub fn produces<B: Tested>(group: &Group<B>, called: &mut dyn FnMut()) -> Result<(), Error> {
    let mut out = group.zeros::<bf16>(10, 8)?;
    produce_and_reduce_scatter(30, &mut out, |_| {
        called();
        Ok(())
    })
}

pub fn exchanges<B: Tested>(group: &Group<B>, called: &mut dyn FnMut()) -> Result<(), Error> {
    let mut out = group.sharded::<bf16>(30, 8)?;
    produce_and_all_to_all(&mut out, |_| {
        called();
        Ok(())
    })
}

/// The second operation of rank 1 goes no further than the call of its function with number `phase`: it says so, and
/// stays there.
fn stay_in_a_function<B: Tested>(
    rank: &Rank,
    group: &Group<B>,
    operation: CallsBack<B>,
    phase: usize,
) -> Result<String, Error> {
    for round in 0.. {
        let mut calls = 0;
        let result = operation(group, &mut || {
            if (rank.rank, round, calls) == (1, 1, phase) {
                rank.say("here");
                std::thread::sleep(Duration::from_secs(600));
            }
            calls += 1;
        });
        let result = result.and_then(|()| group.synchronize());
        if result.is_err() {
            return fails(rank, group, result);
        }
    }
    Ok("no end".into())
}

/// Rank 1 is killed while its function runs.
#[track_caller]
pub fn kill_amid_a_function<B: Tested>(test: &str, operation: CallsBack<B>, phase: usize) {
    again_if_busy(|| {
        let ranks = ranks::<B>(test, 3, |rank| {
            let group = connect::<B>(rank, B::TIMEOUT)?;
            stay_in_a_function(rank, &group, operation, phase)
        });
        ranks.heard(1, "here");
        let killed = ranks.signal(1, Signal::KILL);
        assert_lost::<B>(ranks, 3, 1, killed);
    });
}

/// The function of rank 1 runs for longer than the others wait: by then they have named it.
#[track_caller]
pub fn stay_amid_a_function<B: Tested>(test: &str, operation: CallsBack<B>, phase: usize) {
    again_if_busy(|| {
        let ranks = ranks::<B>(test, 3, |rank| {
            let (_kept, group) = connect_short::<B>(rank)?;
            stay_in_a_function(rank, &group, operation, phase)
        });
        let since = ranks.heard(1, "here");
        for place in [0, 2] {
            let took = ranks
                .heard(place, "failed")
                .saturating_duration_since(since);
            assert!(took < B::short_and_slack(), "rank {place} took {took:?}");
        }
        ranks.signal(1, Signal::KILL);
        for outcome in ranks.outcomes() {
            match outcome.rank {
                1 => outcome.assert_killed(),
                _ => assert_timeout_names(outcome.error(), 1),
            }
        }
    });
}

/// Rank 1 is killed while its function runs, and so do those of the others, for as long as they have not heard of it.
/// They are called no more, whatever is left to do.
#[track_caller]
pub fn call_no_function_after_a_failure<B: Tested>(
    test: &str,
    operation: CallsBack<B>,
    phase: usize,
) {
    again_if_busy(|| {
        let ranks = ranks::<B>(test, 3, |rank| {
            let group = connect::<B>(rank, B::TIMEOUT)?;
            operation(&group, &mut || ())?;
            let mut calls = 0;
            let result = operation(&group, &mut || {
                calls += 1;
                if calls <= phase {
                    return;
                }
                assert_eq!(calls, phase + 1, "called after the failure");
                rank.say("here");
                // It is refused as a call of its own group, or because that has failed.
                while !(group.synchronize()).is_err_and(|error| error.has_ended_group()) {
                    std::thread::sleep(Duration::from_millis(1));
                }
            });
            fails(rank, &group, result)
        });
        ranks.all_heard("here");
        let killed = ranks.signal(1, Signal::KILL);
        assert_lost::<B>(ranks, 3, 1, killed);
    });
}

/// The function of each rank waits for a thread that makes a call of the same group, which waits for the function's
/// operation to end. At the deadline that call is given up, and all goes on.
#[track_caller]
pub fn wait_for_another_thread<B: Tested>(test: &str, operation: CallsBack<B>, phase: usize) {
    again_if_busy(|| {
        let ranks = ranks::<B>(test, 3, |rank| {
            let (_kept, group) = connect_short::<B>(rank)?;
            let mut arguments = Arguments::small(&group)?;
            arguments.verify(&group)?;
            let prepared = arguments.prepare(Route::Pull)?;
            let mut calls = 0;
            let mut given_up = Vec::new();
            let begin = Instant::now();
            let result = operation(&group, &mut || {
                calls += 1;
                if calls != phase + 1 {
                    return;
                }
                let Arguments { a, b, out, .. } = &mut arguments;
                let (prepared, a, b) = (&prepared, &*a, &*b);
                std::thread::scope(|scope| {
                    let another = scope.spawn(|| prepared.gather(a));
                    let product = scope.spawn(|| prepared.matmul(a, b, out));
                    let new =
                        scope.spawn(|| AllGatherMatmul::<B, bf16>::new().prepare(a, 7).map(drop));
                    for thread in [another, product, new] {
                        given_up.push(thread.join().unwrap().expect_err("it waits for its turn"));
                    }
                });
            });
            let took = begin.elapsed();
            assert!(took < 2 * B::short_and_slack(), "{took:?}");
            match result.and_then(|()| group.synchronize()) {
                Ok(()) => {
                    for error in &given_up {
                        let is_right = |its, call: &str| its == rank.rank && NAMES.contains(&call);
                        let right = matches!((error.rank(), error.kind()), (Some(rank), Kind::Busy { call, .. }) if is_right(rank, call));
                        assert!(right, "{error}");
                    }
                    arguments.verify(&group)?;
                }
                // On GPUs what was begun may be given up as soon.
                error => assert_timeout_names(&poisoned(&group, error).unwrap_err(), rank.rank),
            }
            Ok(format!("{given_up:?} after {took:?}"))
        });
        all_done(ranks);
    });
}

/// Of the calls that call a function.
const NAMES: [&str; 2] = ["all_gather_and_consume", "produce_and_reduce_scatter"];

/// Tests of these for a backend, which they may have to get leave to use.
#[macro_export]
macro_rules! amid_functions {
    ($leave:expr, $backend:ty) => {
        $crate::amid_functions!(@ $leave, $backend:
            a_rank_killed_in_its_first_chunk_is_named kill_amid_a_function consumes 0,
            a_rank_killed_in_its_last_chunk_is_named kill_amid_a_function consumes 2,
            a_rank_killed_in_its_first_block_is_named kill_amid_a_function produces 0,
            a_rank_killed_in_its_second_block_is_named kill_amid_a_function produces 1,
            a_rank_killed_in_its_own_block_is_named kill_amid_a_function produces 2,
            a_rank_that_stays_in_its_first_chunk_is_named stay_amid_a_function consumes 0,
            a_rank_that_stays_in_its_last_chunk_is_named stay_amid_a_function consumes 2,
            a_rank_that_stays_in_its_first_block_is_named stay_amid_a_function produces 0,
            a_rank_that_stays_in_its_second_block_is_named stay_amid_a_function produces 1,
            a_rank_that_stays_in_its_own_block_is_named stay_amid_a_function produces 2,
            no_chunk_is_consumed_after_a_failure call_no_function_after_a_failure consumes 0,
            no_block_is_produced_after_a_failure call_no_function_after_a_failure produces 0,
            no_block_is_exchanged_after_a_failure call_no_function_after_a_failure exchanges 1,
            a_consumer_that_waits_for_another_thread_is_told_in_time wait_for_another_thread consumes 0,
            a_producer_that_waits_for_another_thread_is_told_in_time wait_for_another_thread produces 2,
        );
    };
    (@ $leave:expr, $backend:ty: $($test:ident $what:ident $operation:ident $phase:literal,)*) => {
        $(#[test]
        fn $test() {
            let Some(_leave) = $leave() else { return };
            failures::$what::<$backend>(test_name!(), failures::$operation::<$backend>, $phase);
        })*
    };
}

// Elsewhere, while the others are in an operation.

/// Rank 1 plays `part` instead of calling the operation that the others are in, which must end within [`TOLD`] with an
/// error that `expected` knows.
#[track_caller]
fn told_at_once<B: Tested>(
    test: &str,
    route: Route,
    part: impl Fn(&Rank, Group<B>, Arguments<B>) -> Result<String, Error>,
    expected: fn(&Error) -> bool,
) {
    again_if_busy(|| {
        let ranks = ranks::<B>(test, 3, |rank| {
            let group = connect::<B>(rank, B::TIMEOUT)?;
            let mut arguments = Arguments::larger(&group)?;
            arguments.verify_by(&group, route)?;
            group.barrier()?;
            if rank.rank == 1 {
                return part(rank, group, arguments);
            }
            std::thread::sleep(Duration::from_millis(100));
            let begin = Instant::now();
            let result = arguments.verify_by(&group, route);
            let took = begin.elapsed();
            assert!(
                took < B::before_timeout(TOLD),
                "told after {took:?}: {result:?}"
            );
            poisoned(&group, result)
        });
        for outcome in ranks.outcomes() {
            if outcome.rank != 1 {
                let error = outcome.error().cause();
                assert!(expected(&error), "rank {}: {error}", outcome.rank);
            }
        }
    });
}

/// Within this everybody knows, long before the timeout and on a machine as busy as it may be.
const TOLD: Duration = Duration::from_secs(10);

#[track_caller]
pub fn leave<B: Tested>(test: &str, route: Route) {
    told_at_once::<B>(
        test,
        route,
        |_, group, arguments| {
            drop((arguments, group));
            Ok("left".into())
        },
        |error| {
            matches!(
                (error.rank(), error.kind()),
                (Some(1), Kind::RankLeft { .. })
            )
        },
    );
}

#[track_caller]
pub fn panic<B: Tested>(test: &str, route: Route) {
    told_at_once::<B>(
        test,
        route,
        |_, group, arguments| {
            let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || {
                let _dropped_by_the_panic = (arguments, group);
                std::panic::resume_unwind(Box::new("planted"));
            }));
            assert!(caught.is_err());
            Ok("caught".into())
        },
        |error| {
            matches!(
                (error.rank(), error.kind()),
                (Some(1), Kind::RankPanicked { .. })
            )
        },
    );
}

#[track_caller]
pub fn barrier<B: Tested>(test: &str, route: Route) {
    told_at_once::<B>(
        test,
        route,
        |_, group, _arguments| poisoned(&group, group.barrier()),
        |error| {
            matches!(
                (error.rank(), error.kind()),
                (Some(1), Kind::CallMismatch { .. })
            )
        },
    );
}

#[track_caller]
pub fn wrong_argument<B: Tested>(test: &str, route: Route) {
    told_at_once::<B>(
        test,
        route,
        |_, group, arguments| {
            let [m, n, k] = B::LARGER;
            let wrong = group.zeros::<bf16>(5, k)?;
            let mut out = group.zeros::<bf16>(m, n)?;
            let prepared = arguments.prepare(route)?;
            let error = prepared.run(&arguments.a, &wrong, &mut out).unwrap_err();
            assert!(
                matches!((error.rank(), error.kind()), (Some(1), Kind::Shape { .. })),
                "{error}"
            );
            // It does not leave before they are told.
            let begin = Instant::now();
            while group.synchronize().is_ok() {
                assert!(begin.elapsed() < stretched(2 * TOLD), "nobody is told");
                std::thread::sleep(Duration::from_millis(1));
            }
            Ok("refused".into())
        },
        |error| matches!((error.rank(), error.kind()), (Some(1), Kind::Shape { argument, .. }) if argument.contains("b [N, K]")),
    );
}

/// What all ranks are told long before the timeout, however rows move.
#[macro_export]
macro_rules! told_at_once {
    ($backend:ident) => {
        $crate::each_route!($backend::leave_alone, $crate::support::shared::failures::leave::<$backend>:
            a_rank_that_leaves_while_the_others_pull_is_named_at_once by Pull,
            a_rank_that_leaves_while_the_others_push_is_named_at_once by Push,
            a_rank_that_leaves_while_the_others_store_is_named_at_once by Store,
        );
        $crate::each_route!($backend::leave_alone, $crate::support::shared::failures::panic::<$backend>:
            a_rank_that_panics_while_the_others_pull_is_named_at_once by Pull,
            a_rank_that_panics_while_the_others_push_is_named_at_once by Push,
            a_rank_that_panics_while_the_others_store_is_named_at_once by Store,
        );
        $crate::each_route!($backend::leave_alone, $crate::support::shared::failures::barrier::<$backend>:
            a_rank_at_a_barrier_while_the_others_pull_is_named_at_once by Pull,
            a_rank_at_a_barrier_while_the_others_push_is_named_at_once by Push,
            a_rank_at_a_barrier_while_the_others_store_is_named_at_once by Store,
        );
        $crate::each_route!($backend::leave_alone, $crate::support::shared::failures::wrong_argument::<$backend>:
            a_wrong_weight_on_one_rank_is_known_to_all_that_pull_at_once by Pull,
            a_wrong_weight_on_one_rank_is_known_to_all_that_push_at_once by Push,
            a_wrong_weight_on_one_rank_is_known_to_all_that_store_at_once by Store,
        );
    };
}

// Late.

/// Rank 2 comes late to operations. The others have waited for it, and where each takes its rows itself for no one else
/// as long; it has waited for no one.
pub fn wait_for_a_late_rank<B: Tested>(test: &str, route: Route) {
    again_if_busy(|| {
        const LATE: usize = 2;
        const TIMES: u32 = 4;
        let ranks = ranks::<B>(test, 3, |rank| {
            let group = connect::<B>(rank, B::TIMEOUT)?;
            let mut arguments = Arguments::small(&group)?;
            arguments.verify_by(&group, route)?;
            let before = group.wait_times();
            let begin = Instant::now();
            for _ in 0..TIMES {
                group.barrier()?;
                if rank.rank == LATE {
                    std::thread::sleep(B::LATE);
                }
                arguments.verify_by(&group, route)?;
            }
            let waited = group.wait_times().into_iter().zip(before);
            let waited: Vec<Duration> = waited.map(|(after, before)| after - before).collect();
            let all = format!("rank {}: {waited:?}", rank.rank);
            assert_eq!(waited.len(), 3, "{all}");
            assert_eq!(waited[rank.rank], Duration::ZERO, "{all}");
            let late = B::LATE * TIMES;
            match rank.rank {
                LATE => assert!(waited.iter().all(|time| *time < late), "{all}"),
                other => {
                    let third = waited[1 - other];
                    assert!(waited[LATE] > late / 2, "{all}");
                    // What is pushed may wait behind what its owner pushes to the late one.
                    assert!(route != Route::Pull || waited[LATE] > third, "{all}");
                    assert!(waited[LATE] <= begin.elapsed(), "{all}");
                }
            }
            Ok(all)
        });
        all_done(ranks);
    });
}

/// The call that a function of the caller's has forked in fails in the child, and the parent's group goes on.
pub fn fork_amid_a_function_of_the_callers<B: Tested>(test: &str) {
    all_done(ranks::<B>(test, 2, |rank| {
        let group = connect::<B>(rank, B::TIMEOUT)?;
        let mut a = group.sharded::<bf16>(64, 16)?;
        let own = vec![bf16::ONE; a.rows().len() * 16];
        a.shard_mut().copy_from_host(&own)?;
        let (mut calls, mut parent, mut child) = (0, true, None);
        let result = all_gather_and_consume(&a, |_| {
            calls += 1;
            if calls == 1 && group.rank() == 1 {
                child = fork();
                parent = child.is_some();
            }
            Ok(())
        });
        if !parent {
            end(calls == 1 && is_refused(result, 1));
        }
        result?;
        if let Some(child) = child {
            assert_right(child);
        }
        group.barrier()?;
        Ok("done".into())
    }));
}
