//! Calls that differ: whose does is named to every rank.

use std::time::{Duration, Instant};

use gemmesh::error::Kind;
use gemmesh::trace::{Timeline, Trace};
use gemmesh::tuning::Route;
use gemmesh::{
    AllGatherMatmul, Error, Group, Host, MatmulReduceScatter, all_reduce, bf16, broadcast,
    matmul_reduce_scatter,
};

use crate::support::errors::parts;
use crate::support::tested::{assert_call_mismatch, poisoned, ranks};
use crate::{Arguments, MakeCall, TIMEOUT, exchanges_that_differ, noticed, same_error, test_name};

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
        &same_error(&ranks.outcomes()),
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
        &same_error(&ranks.outcomes()),
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
        &same_error(&ranks.outcomes()),
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
        &same_error(&outcomes),
        1,
        "barrier()",
        "all_gather_matmul(M = 6, K = 4, bf16, the 1st sharded matrix of the group)",
    );
    for outcome in outcomes {
        assert!(outcome.at.saturating_duration_since(begin) < noticed());
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
    ("sharded(M = 6, K = 4, bf16)", |group, _| {
        group.sharded::<bf16>(6, 4).map(drop)
    }),
    ("sharded(M = 5, K = 4, bf16)", |group, _| {
        group.sharded::<bf16>(5, 4).map(drop)
    }),
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
        "matmul_reduce_scatter(M = 6, N = 5, bf16) by Route::Push",
        |group, _| {
            let (a, b) = (group.zeros::<bf16>(6, 4)?, group.zeros::<bf16>(5, 4)?);
            matmul_reduce_scatter(&a, &b, &mut group.zeros::<bf16>(3, 5)?)
        },
    ),
    (
        "matmul_reduce_scatter(M = 6, N = 5, bf16) by Route::Store",
        |group, _| {
            let (a, b) = (group.zeros::<bf16>(6, 4)?, group.zeros::<bf16>(5, 4)?);
            let chosen = MatmulReduceScatter::new().prepare(&a, 5)?.config();
            let stored = MatmulReduceScatter::new().config(chosen.with_route(Route::Store));
            stored.run(&a, &b, &mut group.zeros::<bf16>(3, 5)?)
        },
    ),
    (
        "matmul_reduce_scatter(M = 6, N = 7, bf16) by Route::Push",
        |group, _| {
            let (a, b) = (group.zeros::<bf16>(6, 4)?, group.zeros::<bf16>(7, 4)?);
            matmul_reduce_scatter(&a, &b, &mut group.zeros::<bf16>(3, 7)?)
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
                assert!(took < noticed(), "{took:?}");
                Err(error.cause())
            });
        match parts(&result.unwrap_err()) {
            (
                Some(rank),
                Kind::CallMismatch {
                    theirs,
                    other,
                    expected,
                    ..
                },
            ) => {
                assert_eq!((rank, *other), (1, 0));
                let its = [expected, theirs].map(|call| {
                    let route = call.configuration.iter().find(|c| c.starts_with("Route"));
                    let route = route.map(|route| format!(" by {route}"));
                    format!("{call}{}", route.unwrap_or_default())
                });
                assert_eq!(its, calls.map(|(words, _)| *words));
            }
            other => panic!("{other:?}"),
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
            assert!(took < noticed(), "{took:?}");
            result
        });
    assert!(matches!(
        parts(&error.unwrap_err()),
        (Some(1), Kind::CallMismatch { other: 0, .. })
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
    match parts(&error.unwrap_err()) {
        // The first one made a matrix. That the ranks open a group is none.
        (Some(rank), Kind::CallMismatch { number: call, .. }) => {
            assert_eq!((rank, *call), (1, 602))
        }
        other => panic!("{other:?}"),
    }
}

/// What ranks are told that make this as their third call, after a matrix and a barrier.
fn told(world: usize, call: MakeCall) -> Vec<Error> {
    let builder = Group::<Host>::builder().timeout(TIMEOUT).workers(1);
    let told = builder.threads(world, |group| {
        let mut arguments = Arguments::new(&group, 6, 5, 4)?;
        group.barrier()?;
        Ok::<_, Error>(call(&group, &mut arguments).expect_err("another call"))
    });
    told.unwrap()
}

/// That all errors have this sentence, apart from places. Each has that of its rank's own call, which is this line.
#[track_caller]
fn assert_told(errors: &[Error], line: u32, sentence: &str) {
    let place = format!(" at {}:{line}", file!());
    for (rank, error) in errors.iter().enumerate() {
        let words = error.to_string();
        println!("{words}");
        assert_eq!(words.replace(&place, ""), sentence);
        let (
            Some(odd),
            Kind::CallMismatch {
                theirs, expected, ..
            },
        ) = (error.rank(), error.kind())
        else {
            panic!("{error}");
        };
        let own = if rank == odd { theirs } else { expected };
        let its = own.place.as_deref().map(|place| format!(" at {place}"));
        assert_eq!(its.as_ref(), Some(&place), "{words}");
    }
}

#[test]
fn broadcasts_from_different_roots_are_told_by_their_roots() {
    let line = line!() + 2;
    let errors = told(2, |group, arguments| {
        broadcast(&mut arguments.a, group.rank())
    });
    assert_told(
        &errors,
        line,
        "rank 1 called broadcast with root = 1, and rank 0 with root = 0; \
         all ranks must make the same calls in the same order (the 3rd collective call of the group: \
         broadcast(M = 6, N = 4, bf16, root = 0, the 1st sharded matrix of the group) on rank 0)",
    );
}

#[test]
fn a_root_is_told_also_where_there_is_one_row() {
    let line = line!() + 3;
    let errors = told(2, |group, _| {
        let mut a = group.sharded::<bf16>(1, 4)?;
        broadcast(&mut a, group.rank())
    });
    assert_told(
        &errors,
        line,
        "rank 1 called broadcast with root = 1, and rank 0 with root = 0; \
         all ranks must make the same calls in the same order (the 4th collective call of the group: \
         broadcast(M = 1, N = 4, bf16, root = 0, the 2nd sharded matrix of the group) on rank 0)",
    );
}

#[test]
fn what_nobody_has_set_is_told_only_if_it_differs() {
    let line = line!() + 7;
    let errors = told(2, |group, _| {
        let (a, b) = (group.zeros::<bf16>(6, 4)?, group.zeros::<bf16>(5, 4)?);
        let chosen = MatmulReduceScatter::new().prepare(&a, 5)?.config();
        let route = [Route::Push, Route::Store][group.rank()];
        let product = MatmulReduceScatter::new().config(chosen.with_route(route));
        let mut out = group.zeros::<bf16>(3, 5)?;
        product.run(&a, &b, &mut out)
    });
    assert_told(
        &errors,
        line,
        "rank 1 called matmul_reduce_scatter with Route::Store, and rank 0 with Route::Push; all ranks must make the \
         same calls in the same order \
         (the 3rd collective call of the group: matmul_reduce_scatter(M = 6, N = 5, bf16) on rank 0)",
    );
}

#[test]
fn two_sums_of_one_call_are_one_call() {
    let errors = told(3, |group, arguments| {
        // Too many bytes for one step: a sum and a gather.
        let (m, n) = (1 << 12, 64);
        let mut sums = group.sharded::<bf16>(m, n)?;
        all_reduce(&group.zeros(m, n)?, &mut sums)?;
        match group.rank() {
            0 => group.barrier(),
            _ => arguments.run(),
        }
    });
    for error in errors {
        assert!(
            matches!(error.kind(), Kind::CallMismatch { number: 5, .. }),
            "{error}"
        );
    }
}
