//! Ranks that die, stop, leave, panic or stay away.

use std::time::{Duration, Instant};

use gemmesh::error::Kind;
use gemmesh::tuning::Route;
use gemmesh::{Error, Group, Host, all_gather_matmul, bf16};
use rustix::process::Signal;

use crate::support::patience::{again_if_busy, stretched};
use crate::support::processes::sockets_of;
use crate::support::products::ROUTES;
use crate::support::shared::failures;
use crate::support::tested::{Tested, assert_timeout_names, poisoned, ranks};
use crate::{
    Arguments, MakeCall, PROMPT, TIMEOUT, amid_functions, each_route, noticed, short, test_name,
    told_at_once,
};

const PRODUCT: MakeCall = |_, arguments| arguments.run();
const BARRIER: MakeCall = |group, _| group.barrier();

#[test]
fn a_rank_killed_while_the_others_wait_for_it_is_named_at_once() {
    failures::kill_while_the_others_wait(test_name!(), 2, PRODUCT);
}

#[test]
fn rank_0_killed_while_the_others_wait_for_it_is_named_at_once() {
    failures::kill_while_the_others_wait(test_name!(), 0, PRODUCT);
}

#[test]
fn a_rank_killed_at_a_barrier_is_named_at_once() {
    failures::kill_while_the_others_wait(test_name!(), 1, BARRIER);
}

each_route!(Host::leave, failures::kill_amid_operations::<Host>:
    a_rank_killed_amid_operations_is_named_at_once by Pull,
    a_rank_killed_amid_pushes_is_named by Push,
    a_rank_killed_amid_stores_is_named by Store,
);

#[test]
fn a_rank_killed_while_all_are_idle_is_named_by_the_next_call() {
    failures::kill_between_operations::<Host>(test_name!());
}

#[test]
fn a_rank_killed_at_the_rendezvous_is_named_at_the_latest_by_the_first_call() {
    again_if_busy(|| {
        let mut ranks = ranks::<Host>(test_name!(), 3, |rank| {
            if rank.rank == 2 {
                rank.hear();
            }
            rank.say("here");
            let group = rank.connect(3 * short()).map_err(|e| e.cause())?;
            poisoned(&group, group.barrier())
        });
        ranks.heard(0, "here");
        ranks.heard(1, "here");
        let begin = Instant::now();
        // Rank 0's socket and its end of the connection.
        while sockets_of(&ranks.address).len() < 2 && begin.elapsed() < stretched(PROMPT) {
            std::thread::sleep(Duration::from_millis(1));
        }
        // Time for rank 1 to introduce itself.
        std::thread::sleep(stretched(Duration::from_millis(100)));
        ranks.signal(1, Signal::KILL);
        ranks.tell(2);
        for outcome in ranks.outcomes() {
            match outcome.rank {
                1 => outcome.assert_killed(),
                _ => assert!(
                    matches!(
                        (outcome.error().rank(), outcome.error().kind()),
                        (Some(1), Kind::RankLost { .. })
                    ),
                    "{}",
                    outcome.error()
                ),
            }
        }
    });
}

#[test]
fn a_stopped_rank_is_named_at_the_timeout_and_told_when_it_goes_on() {
    failures::stop_between_operations(test_name!(), 1, PRODUCT);
}

#[test]
fn a_stopped_rank_0_is_named_at_the_timeout_of_a_barrier() {
    failures::stop_between_operations(test_name!(), 0, BARRIER);
}

each_route!(Host::leave, failures::stop_amid_operations::<Host>:
    a_rank_stopped_amid_operations_is_named_at_the_timeout_and_told_when_it_goes_on by Pull,
    a_rank_stopped_amid_pushes_is_named_at_the_timeout_and_told_when_it_goes_on by Push,
    a_rank_stopped_amid_stores_is_named_at_the_timeout_and_told_when_it_goes_on by Store,
);

each_route!(Host::leave, failures::wait_for_a_late_rank::<Host>:
    a_rank_that_pulls_late_is_waited_for_by_name by Pull,
    a_rank_that_pushes_late_is_waited_for_by_name by Push,
    a_rank_that_stores_late_is_waited_for_by_name by Store,
);

told_at_once!(Host);

amid_functions!(Host::leave, Host);

#[test]
fn a_rank_that_never_calls_is_named_at_the_timeout() {
    let mut ranks = ranks::<Host>(test_name!(), 3, |rank| {
        rank.come_together();
        let group = rank.connect(short())?;
        let mut arguments = Arguments::new(&group, 9, 5, 3)?;
        arguments.verify(&group)?;
        if rank.rank == 2 {
            rank.hear();
        }
        let outcome = poisoned(&group, arguments.run());
        rank.say("failed");
        outcome
    });
    ranks.let_all_go();
    ranks.heard(0, "failed");
    ranks.heard(1, "failed");
    ranks.tell(2);
    for outcome in ranks.outcomes() {
        assert_timeout_names(outcome.error(), 2);
        failures::assert_waited::<Host>(outcome.error());
    }
}

#[test]
fn a_rank_that_never_calls_is_named_also_by_ranks_without_rows_of_their_own() {
    let given_up = std::sync::Barrier::new(4);
    let error = Group::<Host>::builder()
        .arrival_timeout(short())
        .workers(3)
        .threads(4, |group| {
            let a = group.sharded_rows::<bf16>(&[0, 5, 0, 5], 3)?;
            let b = group.zeros::<bf16>(5, 3)?;
            let mut out = group.zeros::<bf16>(10, 5)?;
            if group.rank() == 1 {
                given_up.wait();
                return all_gather_matmul(&a, &b, &mut out);
            }
            let result = all_gather_matmul(&a, &b, &mut out);
            given_up.wait();
            result
        })
        .unwrap_err();
    assert!(
        matches!(
            (error.rank(), error.kind()),
            (Some(1), Kind::Timeout { .. })
        ),
        "{error}"
    );
}

/// Rank `leaver` drops its group; the others go on to `call`.
#[track_caller]
fn leave(test: &str, leaver: usize, call: MakeCall) {
    let mut ranks = ranks::<Host>(test, 3, |rank| {
        let group = rank.connect(TIMEOUT)?;
        let mut arguments = Arguments::new(&group, 9, 5, 3)?;
        arguments.verify(&group)?;
        group.barrier()?;
        if rank.rank == leaver {
            drop((arguments, group));
            rank.say("left");
            return Ok("left".into());
        }
        rank.hear();
        poisoned(&group, call(&group, &mut arguments))
    });
    let left = ranks.heard(leaver, "left");
    let others = (0..3).filter(|&rank| rank != leaver);
    for place in others {
        ranks.tell(place);
    }
    for outcome in ranks.outcomes() {
        if outcome.rank == leaver {
            assert_eq!(outcome.value(), "left");
            continue;
        }
        assert!(
            matches!((outcome.error().rank(), outcome.error().kind()), (Some(rank), Kind::RankLeft { .. }) if rank == leaver),
            "{}",
            outcome.error()
        );
        assert!(outcome.at - left < noticed());
    }
}

#[test]
fn a_rank_that_leaves_before_an_operation_is_named() {
    leave(test_name!(), 2, |_, arguments| arguments.run());
}

#[test]
fn rank_0_that_leaves_before_an_operation_is_named() {
    leave(test_name!(), 0, |_, arguments| arguments.run());
}

#[test]
fn a_rank_that_leaves_before_rows_are_pushed_is_named() {
    leave(test_name!(), 2, |_, arguments| {
        arguments.run_by(Route::Push)
    });
}

#[test]
fn rank_0_that_leaves_before_rows_are_pushed_is_named() {
    leave(test_name!(), 0, |_, arguments| {
        arguments.run_by(Route::Push)
    });
}

#[test]
fn a_rank_that_leaves_before_rows_are_stored_is_named() {
    leave(test_name!(), 1, |_, arguments| {
        arguments.run_by(Route::Store)
    });
}

#[test]
fn a_rank_that_leaves_while_the_others_push_is_named() {
    for route in ROUTES {
        let result = Group::<Host>::builder()
            .timeout(TIMEOUT)
            .threads(3, |group| {
                let mut arguments = Arguments::new(&group, 9, 5, 3)?;
                for _ in 0..20 {
                    arguments.run_by(route)?;
                }
                if group.rank() == 1 {
                    return Ok(());
                }
                let begin = Instant::now();
                let result = arguments.run_by(route);
                assert!(begin.elapsed() < noticed());
                result
            });
        let error = result.unwrap_err();
        assert!(
            matches!(
                (error.rank(), error.kind()),
                (Some(1), Kind::RankLeft { .. })
            ),
            "{route:?}: {error}"
        );
    }
}

#[test]
fn a_rank_that_leaves_before_a_barrier_is_named() {
    leave(test_name!(), 1, |group, _| group.barrier());
}

#[test]
fn rank_0_that_leaves_before_a_barrier_is_named() {
    leave(test_name!(), 0, |group, _| group.barrier());
}

#[test]
fn a_rank_that_panics_is_named_as_that_at_once() {
    let ranks = ranks::<Host>(test_name!(), 3, |rank| {
        let group = rank.connect(TIMEOUT)?;
        let mut arguments = Arguments::new(&group, 9, 5, 3)?;
        arguments.verify(&group)?;
        if rank.rank == 1 {
            let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || {
                let _dropped_by_the_panic = (arguments, group);
                rank.say("panics");
                std::panic::resume_unwind(Box::new("planted"));
            }));
            assert!(caught.is_err());
            return Ok("caught".into());
        }
        poisoned(&group, arguments.run())
    });
    let panicked = ranks.heard(1, "panics");
    let outcomes = ranks.outcomes();
    for survivor in [&outcomes[0], &outcomes[2]] {
        // It may have panicked before the survivor's call or during it.
        let error = survivor.error().cause();
        assert!(
            matches!(
                (error.rank(), error.kind()),
                (Some(1), Kind::RankPanicked { .. })
            ),
            "{error}"
        );
        assert!(survivor.at.saturating_duration_since(panicked) < noticed());
    }
    assert_eq!(outcomes[1].value(), "caught");
}

#[test]
fn a_rank_that_panics_as_a_thread_is_named_to_the_others() {
    let told = std::sync::Mutex::new(Vec::new());
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        Group::<Host>::builder()
            .timeout(TIMEOUT)
            .threads(3, |group| {
                let mut arguments = Arguments::new(&group, 9, 5, 3)?;
                if group.rank() == 0 {
                    std::panic::resume_unwind(Box::new("planted"));
                }
                let result = match group.rank() {
                    1 => arguments.run(),
                    _ => group.barrier(),
                };
                told.lock().unwrap().push(result.unwrap_err());
                Ok::<(), Error>(())
            })
    }));
    assert!(caught.is_err());
    for error in told.into_inner().unwrap() {
        let error = error.cause();
        assert!(
            matches!(
                (error.rank(), error.kind()),
                (Some(0), Kind::RankPanicked { .. })
            ),
            "{error}"
        );
    }
}
