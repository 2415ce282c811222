//! Calls that differ: whose does is named to every rank.

use std::time::{Duration, Instant};

use gemmesh::trace::{Timeline, Trace};
use gemmesh::{
    AllGatherMatmul, Error, Group, Host, MatmulReduceScatter, Route, bf16, matmul_reduce_scatter,
};

use crate::support::tested::{assert_call_mismatch, poisoned, ranks};
use crate::{Arguments, MakeCall, NOTICED, TIMEOUT, exchanges_that_differ, same_error, test_name};

exchanges_that_differ!(Host);

#[test]
fn a_rank_that_gathers_while_the_others_multiply_is_named() {
    let ranks = ranks::<Host>(test_name!(), 3, |rank| {
        let group = rank.connect(TIMEOUT)?;
        let mut arguments = Arguments::new(&group, 6, 5, 4)?;
        arguments.verify(&group)?;
        let result = match rank.rank {
            1 => AllGatherMatmul::new()
                .prepare(&arguments.a, 5)?
                .gather(&arguments.a),
            _ => arguments.run(),
        };
        poisoned(&group, result)
    });
    assert_call_mismatch(
        same_error(&ranks.outcomes()),
        1,
        "gather(M = 6, K = 4, bf16, the 1st sharded matrix of the group)",
        "all_gather_matmul(M = 6, K = 4, bf16, the 1st sharded matrix of the group)",
    );
}

#[test]
fn a_rank_that_traces_while_the_others_do_not_is_named() {
    let ranks = ranks::<Host>(test_name!(), 3, |rank| {
        let group = rank.connect(TIMEOUT)?;
        let mut arguments = Arguments::new(&group, 6, 5, 4)?;
        let prepared = AllGatherMatmul::new().prepare(&arguments.a, 5)?;
        let result = match rank.rank {
            2 => prepared
                .run_traced(&arguments.a, &arguments.b, &mut arguments.out)
                .map(drop),
            _ => arguments.run(),
        };
        poisoned(&group, result)
    });
    assert_call_mismatch(
        same_error(&ranks.outcomes()),
        2,
        "all_gather_matmul(M = 6, K = 4, bf16, the 1st sharded matrix of the group, a trace)",
        "all_gather_matmul(M = 6, K = 4, bf16, the 1st sharded matrix of the group)",
    );
}

#[test]
fn a_rank_that_multiplies_another_matrix_of_the_same_shape_is_named() {
    let ranks = ranks::<Host>(test_name!(), 3, |rank| {
        let group = rank.connect(TIMEOUT)?;
        let mut first = Arguments::new(&group, 6, 5, 4)?;
        let mut second = Arguments::new(&group, 6, 5, 4)?;
        first.verify(&group)?;
        second.verify(&group)?;
        let result = if rank.rank == 0 {
            first.run()
        } else {
            second.run()
        };
        poisoned(&group, result)
    });
    assert_call_mismatch(
        same_error(&ranks.outcomes()),
        0,
        "all_gather_matmul(M = 6, K = 4, bf16, the 1st sharded matrix of the group)",
        "all_gather_matmul(M = 6, K = 4, bf16, the 2nd sharded matrix of the group)",
    );
}

#[test]
fn a_rank_at_a_barrier_while_the_others_multiply_is_named_at_once() {
    let ranks = ranks::<Host>(test_name!(), 3, |rank| {
        let group = rank.connect(TIMEOUT)?;
        let mut arguments = Arguments::new(&group, 6, 5, 4)?;
        rank.say("calls");
        let result = match rank.rank {
            1 => group.barrier(),
            _ => arguments.run(),
        };
        poisoned(&group, result)
    });
    ranks.all_heard("calls");
    let begin = Instant::now();
    let outcomes = ranks.outcomes();
    assert_call_mismatch(
        same_error(&outcomes),
        1,
        "barrier()",
        "all_gather_matmul(M = 6, K = 4, bf16, the 1st sharded matrix of the group)",
    );
    for outcome in outcomes {
        assert!(outcome.at.saturating_duration_since(begin) < NOTICED);
    }
}

/// A call in words, and as it is made.
type MadeCall = (&'static str, MakeCall);

/// Every collective call.
const COLLECTIVE_CALLS: [MadeCall; 10] = [
    ("barrier()", |group, _| group.barrier()),
    ("all_gather_bytes()", |group, _| {
        group.all_gather_bytes(b"word").map(drop)
    }),
    (
        "sharded(rows of each rank = [3, 3], K = 4, bf16)",
        |group, _| group.sharded::<bf16>(6, 4).map(drop),
    ),
    (
        "sharded(rows of each rank = [3, 2], K = 4, bf16)",
        |group, _| group.sharded::<bf16>(5, 4).map(drop),
    ),
    (
        "all_gather_matmul(M = 6, K = 4, bf16, the 1st sharded matrix of the group)",
        |_, arguments| arguments.run(),
    ),
    (
        "gather(M = 6, K = 4, bf16, the 1st sharded matrix of the group)",
        |_, arguments| {
            let prepared = AllGatherMatmul::new().prepare(&arguments.a, 5)?;
            prepared.gather(&arguments.a)
        },
    ),
    (
        "matmul_reduce_scatter(M = 6, N = 5, bf16, chunks = 4, chunks of the last rows = 4, multiples of 128 rows, Route::Push)",
        |group, _| {
            let (a, b) = (group.zeros::<bf16>(6, 4)?, group.zeros(5, 4)?);
            matmul_reduce_scatter(&a, &b, &mut group.zeros(3, 5)?)
        },
    ),
    (
        "matmul_reduce_scatter(M = 6, N = 5, bf16, chunks = 4, chunks of the last rows = 4, multiples of 128 rows, Route::Store)",
        |group, _| {
            let (a, b) = (group.zeros::<bf16>(6, 4)?, group.zeros(5, 4)?);
            let chosen = MatmulReduceScatter::new().prepare(&a, 5)?.config();
            let stored = MatmulReduceScatter::new().config(chosen.with_route(Route::Store));
            stored.run(&a, &b, &mut group.zeros::<bf16>(3, 5)?)
        },
    ),
    (
        "matmul_reduce_scatter(M = 6, N = 7, bf16, chunks = 4, chunks of the last rows = 4, multiples of 128 rows, Route::Push)",
        |group, _| {
            let (a, b) = (group.zeros::<bf16>(6, 4)?, group.zeros(7, 4)?);
            matmul_reduce_scatter(&a, &b, &mut group.zeros(3, 7)?)
        },
    ),
    ("Timeline::collect()", |group, _| {
        let trace = Trace {
            rank: group.rank(),
            spans: Vec::new(),
        };
        Timeline::collect(group, &trace).map(drop)
    }),
];

#[test]
fn any_two_calls_that_differ_are_named_at_once_whoever_comes_first() {
    let pairs = COLLECTIVE_CALLS.iter().flat_map(|one| {
        let others = COLLECTIVE_CALLS.iter().filter(|other| other.0 != one.0);
        others.map(move |other| [one, other])
    });
    for (calls, late) in pairs.flat_map(|calls| [(calls, 0), (calls, 1)]) {
        let result = Group::<Host>::builder()
            .timeout(TIMEOUT)
            .workers(1)
            .threads(2, |group| -> Result<(), Error> {
                let mut arguments = Arguments::new(&group, 6, 5, 4)?;
                let (_, call) = calls[group.rank()];
                if group.rank() == late {
                    std::thread::sleep(Duration::from_millis(20));
                }
                let begin = Instant::now();
                let error = call(&group, &mut arguments).unwrap_err();
                let took = begin.elapsed();
                assert!(took < NOTICED, "{took:?}");
                Err(error.cause().clone())
            });
        match result.unwrap_err() {
            Error::CallMismatch {
                rank,
                theirs,
                other,
                expected,
                ..
            } => {
                assert_eq!((rank, other), (1, 0));
                let its = [expected, theirs].map(|call| call.to_string());
                assert_eq!(its, calls.map(|(words, _)| *words));
            }
            other => panic!("{other}"),
        }
    }
}

#[test]
fn calls_that_differ_are_named_at_once_though_a_rank_makes_none() {
    let over = std::sync::Barrier::new(3);
    let error = Group::<Host>::builder()
        .timeout(TIMEOUT)
        .threads(3, |group| {
            let mut arguments = Arguments::new(&group, 6, 5, 4)?;
            let begin = Instant::now();
            let result = match group.rank() {
                0 => group.barrier(),
                1 => arguments.run(),
                _ => {
                    over.wait();
                    return group.barrier();
                }
            };
            let took = begin.elapsed();
            over.wait();
            assert!(took < NOTICED, "{took:?}");
            result
        });
    assert!(matches!(
        error.unwrap_err(),
        Error::CallMismatch {
            rank: 1,
            other: 0,
            ..
        }
    ));
}

#[test]
fn calls_are_compared_after_many_operations_and_exchanges() {
    let error = Group::<Host>::builder()
        .timeout(TIMEOUT)
        .workers(1)
        .threads(2, |group| {
            let mut arguments = Arguments::new(&group, 6, 5, 4)?;
            for _ in 0..300 {
                arguments.run()?;
                group.barrier()?;
            }
            match group.rank() {
                0 => group.barrier(),
                _ => arguments.run(),
            }
        });
    match error.unwrap_err() {
        // Three exchanges open a group, and three make a matrix.
        Error::CallMismatch { rank, call, .. } => assert_eq!((rank, call), (1, 607)),
        other => panic!("{other}"),
    }
}
