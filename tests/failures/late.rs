//! Ranks that come late, however late, and ranks that begin a call and do not end it.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use gemmesh::error::{Deadline, Kind};
use gemmesh::pipelines::produce_and_reduce_scatter;
use gemmesh::tuning::Route;
use gemmesh::{AllGatherMatmul, Error, Group, Host, all_gather, bf16, matmul_reduce_scatter};

use crate::support::shared::late;
use crate::support::tested::Tested;
use crate::{Arguments, MakeCall, each_route, short, test_name};

/// Later than a timeout.
const LATER: Duration = Duration::from_millis(500);

/// What a rank may be late for.
const CALLS: [MakeCall; 7] = [
    |group, _| group.barrier(),
    |group, _| group.sharded::<bf16>(6, 4).map(drop),
    |group, arguments| arguments.verify_by(group, Route::Pull),
    |group, arguments| arguments.verify_by(group, Route::Push),
    |group, arguments| arguments.verify_by(group, Route::Store),
    |group, _| {
        // The ranks make room for their partial sums first.
        let [a, b] = [group.zeros::<bf16>(6, 4)?, group.zeros::<bf16>(5, 4)?];
        matmul_reduce_scatter(&a, &b, &mut group.zeros::<bf16>(3, 5)?)
    },
    |_, arguments| all_gather(&arguments.a),
];

#[test]
fn a_rank_that_comes_later_than_the_timeout_is_waited_for() {
    // Long enough for a busy machine to end the calls when the late rank has come.
    let timeout = 4 * short();
    std::thread::scope(|scope| {
        for call in CALLS {
            scope.spawn(move || {
                let builder = Group::<Host>::builder().timeout(timeout).workers(1);
                let come = builder.threads(2, |group| {
                    let mut arguments = Arguments::new(&group, 6, 5, 4)?;
                    if group.rank() == 1 {
                        std::thread::sleep(timeout + LATER);
                    }
                    call(&group, &mut arguments)
                });
                come.unwrap();
            });
        }
    });
}

each_route!(Host::leave, late::wait_longer_than_the_timeout::<Host>:
    a_process_that_comes_later_than_the_timeout_to_pull_is_waited_for by Pull,
    a_process_that_comes_later_than_the_timeout_to_push_is_waited_for by Push,
    a_process_that_comes_later_than_the_timeout_to_store_is_waited_for by Store,
);

#[test]
fn a_process_that_stays_in_a_call_which_a_late_one_has_begun_too_is_named_at_the_timeout() {
    late::stay_in_a_call_that_all_have_begun::<Host>(test_name!());
}

/// Ranks other than 0 learn what to do from it, and wait for as long as it has nothing to do.
#[test]
fn an_idle_rank_waits_for_a_request_longer_than_the_timeout() {
    let late = short() + LATER;
    let builder = Group::<Host>::builder().timeout(short()).workers(1);
    let served = builder.threads(3, |group| {
        let mut arguments = Arguments::new(&group, 6, 5, 4)?;
        for served in 0.. {
            let mut request = Vec::new();
            if group.rank() == 0 {
                std::thread::sleep(late / 2 * served);
                request = vec![u8::from(served < 2)];
            }
            if group.all_gather_bytes(&request)?[0] == [0] {
                return Ok::<_, Error>(served);
            }
            arguments.verify(&group)?;
        }
        unreachable!("requests end")
    });
    assert_eq!(served, Ok(vec![2; 3]));
}

/// Its clock does not run while a rank is late.
#[test]
fn a_rank_that_stays_in_a_call_which_all_have_begun_is_named_at_the_timeout() {
    let (begin, short) = (Instant::now(), short());
    let late = short + LATER;
    let gave_up = AtomicUsize::new(0);
    let builder = Group::<Host>::builder().timeout(short).workers(1);
    let results = builder.threads(3, |group| {
        let mut out = group.zeros::<bf16>(2, 4)?;
        if group.rank() == 2 {
            std::thread::sleep(late);
        }
        let result = produce_and_reduce_scatter(6, &mut out, |_| {
            // If it came to its end sooner, the others might get their sums before they see that the group has failed.
            while group.rank() == 1 && gave_up.load(Ordering::Relaxed) < 2 {
                assert!(
                    begin.elapsed() < late + 2 * Host::short_and_slack(),
                    "nobody gives up"
                );
                std::thread::sleep(Duration::from_millis(1));
            }
            Ok(())
        });
        gave_up.fetch_add(1, Ordering::Relaxed);
        Ok::<_, Error>(result.unwrap_err())
    });
    for error in results.unwrap() {
        let (
            Some(rank),
            Kind::Timeout {
                waited_ms,
                deadline,
                ..
            },
        ) = (error.rank(), error.kind())
        else {
            panic!("{error}")
        };
        assert_eq!((rank, *deadline), (1, Deadline::Call), "{error}");
        let waited = Duration::from_millis(*waited_ms);
        assert!(
            waited >= short && waited < Host::short_and_slack(),
            "{error}"
        );
        assert!(error.to_string().ends_with("or raise Builder::timeout"));
    }
    assert!(begin.elapsed() >= late + short);
}

/// The thread in front of it loses nothing by waiting, so neither does this one.
#[test]
fn a_thread_behind_one_that_waits_for_a_late_rank_waits_longer_than_the_timeout() {
    let builder = Group::<Host>::builder().timeout(short()).workers(1);
    let come = builder.threads(2, |group| {
        let mut arguments = Arguments::new(&group, 6, 5, 4)?;
        let other = group.sharded::<bf16>(6, 4)?;
        let prepared = AllGatherMatmul::<_, bf16>::new().prepare(&other, 5)?;
        if group.rank() == 1 {
            std::thread::sleep(short() + LATER);
            arguments.run()?;
            return prepared.gather(&other);
        }
        std::thread::scope(|scope| {
            let first = scope.spawn(|| arguments.run());
            // If it ends before, the second need not wait for it.
            while group.wait_times()[1].is_zero() && !first.is_finished() {
                std::thread::sleep(Duration::from_millis(1));
            }
            let second = prepared.gather(&other);
            first.join().unwrap().and(second)
        })
    });
    come.unwrap();
}
