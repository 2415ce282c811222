//! Whatever goes wrong on one rank, every rank is told what it was and who: in time, and nothing is left behind.
//! With real processes and real signals.

mod support;

use std::io::Write;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::time::{Duration, Instant};

use gemmesh::launch::{self, Launch};
use gemmesh::trace::{Timeline, Trace};
use gemmesh::{
    AllGatherMatmul, Builder, Config, Error, Group, Host, Matrix, ShardedMatrix, Transport,
    all_gather_matmul, bf16, f16,
};
use rustix::process::{Resource, Rlimit, Signal, getrlimit, setrlimit};
use support::processes::{Outcome, Rank, Setting, group, runs, sockets_of, start, start_with};

/// Of groups in which nobody is waited for in vain.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Of groups in which somebody is.
const SHORT: Duration = Duration::from_millis(1000);
/// What "at the timeout" means on a busy machine: rank 0 reports for the others, half a second later.
const SLACK: Duration = Duration::from_millis(1500);

/// A small product and its arguments.
struct Arguments {
    a: ShardedMatrix<Host, bf16>,
    b: Matrix<Host, bf16>,
    out: Matrix<Host, bf16>,
}

impl Arguments {
    /// Collective. Every element of the product is K.
    fn new(group: &Group<Host>, m: usize, n: usize, k: usize) -> Result<Arguments, Error> {
        let mut a = group.sharded::<bf16>(m, k)?;
        let rows = vec![bf16::ONE; a.rows().len() * k];
        a.shard_mut().copy_from_host(&rows)?;
        Ok(Arguments {
            a,
            b: group.upload(&vec![bf16::ONE; n * k], n, k)?,
            out: group.zeros(m, n)?,
        })
    }

    fn run(&mut self) -> Result<(), Error> {
        all_gather_matmul(&self.a, &self.b, &mut self.out)
    }

    /// Runs it and looks at the result.
    fn verify(&mut self) -> Result<(), Error> {
        self.run()?;
        let k = bf16::from_f32(self.a.shape()[1] as f32);
        assert!(self.out.to_vec()?.iter().all(|&x| x == k), "a wrong result");
        Ok(())
    }
}

/// Makes sure that the group does nothing after `result`'s error but repeat it, and returns it.
#[track_caller]
fn poisoned(group: &Group<Host>, result: Result<(), Error>) -> Result<String, Error> {
    let error = result.expect_err("an operation that cannot have worked");
    let repeated = Error::Poisoned {
        cause: Box::new(error.cause().clone()),
    };
    assert_eq!(group.barrier(), Err(repeated.clone()));
    assert_eq!(group.sharded::<bf16>(4, 4).unwrap_err(), repeated);
    assert_eq!(group.synchronize(), Err(repeated));
    Err(error.cause().clone())
}

/// The one error that all ranks have, none of which waited for its timeout.
#[track_caller]
fn same_error(outcomes: &[Outcome]) -> &Error {
    let error = outcomes[0].error();
    for outcome in outcomes {
        assert_eq!(outcome.error(), error, "rank {}", outcome.rank);
        let took = outcome.at - outcome.begun;
        assert!(took < TIMEOUT, "rank {} after {took:?}", outcome.rank);
    }
    error
}

#[track_caller]
fn assert_call_mismatch(outcomes: &[Outcome], odd: usize, its: &str, others: &str) {
    match same_error(outcomes) {
        Error::CallMismatch {
            rank,
            theirs,
            expected,
            ..
        } => {
            assert_eq!((*rank, theirs.as_str()), (odd, its));
            assert_eq!(expected, others);
        }
        other => panic!("{other}"),
    }
}

#[track_caller]
fn assert_timeout_names(outcomes: &[&Outcome], culprit: usize) {
    for outcome in outcomes {
        match outcome.error() {
            Error::Timeout {
                rank, waited_ms, ..
            } => {
                assert_eq!(*rank, culprit, "{}", outcome.error());
                let waited = Duration::from_millis(*waited_ms);
                assert!((SHORT..SHORT + SLACK).contains(&waited), "{waited:?}");
            }
            other => panic!("rank {}: {other}", outcome.rank),
        }
    }
}

// The rendezvous.

#[test]
fn a_rank_with_another_world_size_is_named() {
    let places = [(0, 3), (1, 3), (2, 4)];
    let ranks = start(test_name!(), &places, |rank| {
        rank.connect(TIMEOUT).map(|_| "a group".into())
    });
    let expected = Error::Mismatch {
        rank: 2,
        what: "world size".into(),
        theirs: "4".into(),
        expected: "3".into(),
    };
    assert_eq!(same_error(&ranks.outcomes()), &expected);
}

#[test]
fn rank_0_with_another_world_size_is_named_to_every_rank() {
    let places = [(0, 2), (1, 4), (2, 4), (3, 4)];
    let ranks = start(test_name!(), &places, |rank| {
        rank.connect(TIMEOUT).map(|_| "a group".into())
    });
    match same_error(&ranks.outcomes()) {
        Error::Mismatch {
            what,
            theirs,
            expected,
            ..
        } => assert_eq!(
            (what.as_str(), theirs.as_str(), expected.as_str()),
            ("world size", "4", "2")
        ),
        other => panic!("{other}"),
    }
}

#[test]
fn two_processes_with_one_rank_are_named() {
    let places = [(0, 3), (1, 3), (1, 3)];
    let ranks = start(test_name!(), &places, |rank| {
        rank.connect(TIMEOUT).map(|_| "a group".into())
    });
    assert_duplicates(ranks, 1, [1, 2]);
}

#[test]
fn two_processes_that_are_both_rank_0_are_named() {
    let places = [(0, 3), (0, 3), (1, 3)];
    let ranks = start(test_name!(), &places, |rank| {
        rank.connect(TIMEOUT).map(|_| "a group".into())
    });
    assert_duplicates(ranks, 0, [0, 1]);
}

#[track_caller]
fn assert_duplicates(ranks: support::processes::Processes, duplicate: usize, places: [usize; 2]) {
    let mut expected = places.map(|place| ranks.pid(place).as_raw_nonzero().get() as u32);
    expected.sort();
    match same_error(&ranks.outcomes()) {
        Error::DuplicateRank { rank, pids } => {
            let mut pids = *pids;
            pids.sort();
            assert_eq!((*rank, pids), (duplicate, expected));
        }
        other => panic!("{other}"),
    }
}

#[test]
fn a_rank_that_never_comes_is_named_at_the_timeout() {
    let ranks = start(test_name!(), &[(0, 3), (1, 3)], |rank| {
        rank.connect(SHORT).map(|_| "a group".into())
    });
    assert_missing(&ranks.outcomes(), 2);
}

#[test]
fn rank_0_that_never_comes_is_named_at_the_timeout() {
    let ranks = start(test_name!(), &[(1, 3), (2, 3)], |rank| {
        rank.connect(SHORT).map(|_| "a group".into())
    });
    assert_missing(&ranks.outcomes(), 0);
}

#[track_caller]
fn assert_missing(outcomes: &[Outcome], missing: usize) {
    for outcome in outcomes {
        match outcome.error() {
            Error::RanksMissing {
                ranks, waited_ms, ..
            } => {
                assert_eq!(ranks, &[missing]);
                let waited = Duration::from_millis(*waited_ms);
                assert!((SHORT..SHORT + SLACK).contains(&waited), "{waited:?}");
            }
            other => panic!("{other}"),
        }
    }
}

#[test]
fn two_ranks_of_one_process_meet_as_processes_do() {
    let address = format!("threads of {}", std::process::id());
    let rank = |rank| -> Result<(), Error> {
        let builder = Builder::<Host>::new().timeout(TIMEOUT);
        let group = builder.connect(rank, 2, &address)?;
        Arguments::new(&group, 9, 5, 3)?.verify()?;
        group.barrier()
    };
    std::thread::scope(|scope| {
        let other = scope.spawn(|| rank(1));
        assert_eq!(rank(0), Ok(()));
        assert_eq!(other.join().unwrap(), Ok(()));
    });
}

#[test]
fn a_rank_of_another_protocol_version_is_named() {
    let ranks = group(test_name!(), 3, |rank| {
        let builder = Builder::<Host>::new().timeout(TIMEOUT);
        let group = match rank.rank {
            2 => builder.connect_speaking(2, rank.world, &rank.address, 999),
            _ => builder.connect(rank.rank, rank.world, &rank.address),
        };
        group.map(|_| "a group".into())
    });
    match same_error(&ranks.outcomes()) {
        Error::Mismatch {
            rank, what, theirs, ..
        } => assert_eq!(
            (*rank, what.as_str(), theirs.as_str()),
            (2, "protocol version", "999")
        ),
        other => panic!("{other}"),
    }
}

/// A group of three whose rank 0 waits; `strangers` come to its socket; then the others do.
#[track_caller]
fn group_that_strangers_visit(
    test: &str,
    strangers: impl FnOnce(&dyn Fn() -> UnixStream) -> Vec<UnixStream>,
) {
    let mut ranks = group(test, 3, |rank| {
        if rank.rank != 0 {
            rank.hear();
        }
        let group = rank.connect(TIMEOUT)?;
        Arguments::new(&group, 9, 5, 3)?.verify()?;
        group.barrier()?;
        Ok("done".into())
    });
    let begin = Instant::now();
    let name = loop {
        match sockets_of(&ranks.address).pop() {
            Some(name) => break name,
            None => assert!(begin.elapsed() < TIMEOUT, "rank 0 does not listen"),
        }
        std::thread::sleep(Duration::from_millis(2));
    };
    let address = SocketAddr::from_abstract_name(name).unwrap();
    let connect = || UnixStream::connect_addr(&address).expect("a connection to rank 0");
    let visitors = strangers(&connect);
    ranks.tell(1);
    ranks.tell(2);
    for outcome in ranks.outcomes() {
        assert_eq!(outcome.value(), "done");
    }
    drop(visitors);
}

fn introduction(length: u32, words: &[u8]) -> Vec<u8> {
    let numbers = [2, 1, length].map(u32::to_le_bytes).concat();
    [b"gemmesh\0", numbers.as_slice(), words].concat()
}

#[test]
fn strangers_on_the_socket_are_no_ranks_and_keep_none_away() {
    group_that_strangers_visit(test_name!(), |connect| {
        let messages = [
            b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".to_vec(),
            b"gemmash\0\x01\0\0\0\x01\0\0\0".to_vec(),
            vec![0; 1 << 16],
            introduction(u32::MAX, b"{}"),
            introduction(16, b"this is no JSON!"),
            // The right words so far, then silence.
            b"gemm".to_vec(),
            introduction(100, b"{\"world\":3,"),
            vec![],
        ];
        let mut visitors = Vec::new();
        for message in &messages {
            let mut silent = connect();
            // Rank 0 may hang up before it has read everything.
            let _ = silent.write_all(message);
            visitors.push(silent);
            let mut half_open = connect();
            let _ = half_open.write_all(message);
            half_open.shutdown(std::net::Shutdown::Write).unwrap();
            visitors.push(half_open);
            let mut gone = connect();
            let _ = gone.write_all(message);
        }
        visitors
    });
}

#[test]
fn a_crowd_of_silent_strangers_keeps_no_rank_away() {
    group_that_strangers_visit(test_name!(), |connect| {
        (0..400).map(|_| connect()).collect()
    });
}

// Calls that differ.

#[test]
fn a_sharded_matrix_of_another_shape_on_one_rank_is_named() {
    let ranks = group(test_name!(), 3, |rank| {
        let group = rank.connect(TIMEOUT)?;
        let m = if rank.rank == 1 { 9 } else { 6 };
        poisoned(&group, group.sharded::<bf16>(m, 4).map(drop))
    });
    assert_call_mismatch(
        &ranks.outcomes(),
        1,
        "sharded(rows of each rank = [3, 3, 3], K = 4, bf16)",
        "sharded(rows of each rank = [2, 2, 2], K = 4, bf16)",
    );
}

#[test]
fn a_sharded_matrix_of_another_type_on_one_rank_is_named() {
    let ranks = group(test_name!(), 3, |rank| {
        let group = rank.connect(TIMEOUT)?;
        let result = match rank.rank {
            0 => group.sharded::<f16>(6, 4).map(drop),
            _ => group.sharded::<bf16>(6, 4).map(drop),
        };
        poisoned(&group, result)
    });
    assert_call_mismatch(
        &ranks.outcomes(),
        0,
        "sharded(rows of each rank = [2, 2, 2], K = 4, f16)",
        "sharded(rows of each rank = [2, 2, 2], K = 4, bf16)",
    );
}

#[test]
fn a_rank_that_gathers_while_the_others_multiply_is_named() {
    let ranks = group(test_name!(), 3, |rank| {
        let group = rank.connect(TIMEOUT)?;
        let mut arguments = Arguments::new(&group, 6, 5, 4)?;
        arguments.verify()?;
        let result = match rank.rank {
            1 => AllGatherMatmul::new()
                .prepare(&arguments.a, 5)?
                .gather(&arguments.a),
            _ => arguments.run(),
        };
        poisoned(&group, result)
    });
    assert_call_mismatch(
        &ranks.outcomes(),
        1,
        "gather(M = 6, K = 4, bf16, sharded matrix 0)",
        "all_gather_matmul(M = 6, K = 4, bf16, sharded matrix 0)",
    );
}

#[test]
fn a_rank_that_traces_while_the_others_do_not_is_named() {
    let ranks = group(test_name!(), 3, |rank| {
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
        &ranks.outcomes(),
        2,
        "traced all_gather_matmul(M = 6, K = 4, bf16, sharded matrix 0)",
        "all_gather_matmul(M = 6, K = 4, bf16, sharded matrix 0)",
    );
}

#[test]
fn a_rank_that_multiplies_another_matrix_of_the_same_shape_is_named() {
    let ranks = group(test_name!(), 3, |rank| {
        let group = rank.connect(TIMEOUT)?;
        let mut first = Arguments::new(&group, 6, 5, 4)?;
        let mut second = Arguments::new(&group, 6, 5, 4)?;
        first.verify()?;
        second.verify()?;
        let result = if rank.rank == 0 {
            first.run()
        } else {
            second.run()
        };
        poisoned(&group, result)
    });
    assert_call_mismatch(
        &ranks.outcomes(),
        0,
        "all_gather_matmul(M = 6, K = 4, bf16, sharded matrix 0)",
        "all_gather_matmul(M = 6, K = 4, bf16, sharded matrix 1)",
    );
}

#[test]
fn a_rank_at_a_barrier_while_the_others_allocate_is_named() {
    let ranks = group(test_name!(), 3, |rank| {
        let group = rank.connect(TIMEOUT)?;
        let result = match rank.rank {
            1 => group.barrier(),
            _ => group.sharded::<bf16>(6, 4).map(drop),
        };
        poisoned(&group, result)
    });
    assert_call_mismatch(
        &ranks.outcomes(),
        1,
        "barrier()",
        "sharded(rows of each rank = [2, 2, 2], K = 4, bf16)",
    );
}

#[test]
fn a_rank_at_a_barrier_while_the_others_multiply_is_named_within_a_second() {
    let ranks = group(test_name!(), 3, |rank| {
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
        &outcomes,
        1,
        "barrier()",
        "all_gather_matmul(M = 6, K = 4, bf16, sharded matrix 0)",
    );
    for outcome in outcomes {
        assert!(outcome.at.saturating_duration_since(begin) < NOTICED);
    }
}

/// A call as a rank makes it.
type MakeCall = fn(&Group<Host>, &mut Arguments) -> Result<(), Error>;
/// A call in words, and as it is made.
type CollectiveCall = (&'static str, MakeCall);

/// Every collective call.
const COLLECTIVE_CALLS: [CollectiveCall; 7] = [
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
        "all_gather_matmul(M = 6, K = 4, bf16, sharded matrix 0)",
        |_, arguments| arguments.run(),
    ),
    (
        "gather(M = 6, K = 4, bf16, sharded matrix 0)",
        |_, arguments| {
            let prepared = AllGatherMatmul::new().prepare(&arguments.a, 5)?;
            prepared.gather(&arguments.a)
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
fn any_two_calls_that_differ_are_named_within_a_second_whoever_comes_first() {
    let pairs = COLLECTIVE_CALLS.iter().flat_map(|one| {
        let others = COLLECTIVE_CALLS.iter().filter(|other| other.0 != one.0);
        others.map(move |other| [one, other])
    });
    for (calls, late) in pairs.flat_map(|calls| [(calls, 0), (calls, 1)]) {
        let result = Builder::<Host>::new().timeout(TIMEOUT).workers(1).threads(
            2,
            |group| -> Result<(), Error> {
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
            },
        );
        match result.unwrap_err() {
            Error::CallMismatch {
                rank,
                theirs,
                other,
                expected,
                ..
            } => {
                assert_eq!((rank, other), (1, 0));
                assert_eq!([expected.as_str(), &theirs], calls.map(|(words, _)| *words));
            }
            other => panic!("{other}"),
        }
    }
}

#[test]
fn calls_that_differ_are_named_within_a_second_though_a_rank_makes_none() {
    let error = Builder::<Host>::new().timeout(TIMEOUT).threads(3, |group| {
        let mut arguments = Arguments::new(&group, 6, 5, 4)?;
        let begin = Instant::now();
        let result = match group.rank() {
            0 => group.barrier(),
            1 => arguments.run(),
            _ => {
                std::thread::sleep(NOTICED);
                return group.barrier();
            }
        };
        let took = begin.elapsed();
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
    let error = Builder::<Host>::new()
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
        // Two exchanges open a group, and two make a matrix.
        Error::CallMismatch { rank, call, .. } => assert_eq!((rank, call), (1, 605)),
        other => panic!("{other}"),
    }
}

// Arguments that one rank alone is refused.

/// How long the others wait at most for a rank that was refused its call.
const REFUSED: Duration = Duration::from_millis(1000);

/// Rank 1 of 3 makes `refused`, and neither leaves nor calls again, while the others make `call`. All get `expected`.
#[track_caller]
fn refuse(expected: Error, call: MakeCall, refused: MakeCall) {
    let over = std::sync::Barrier::new(3);
    Builder::<Host>::new()
        .timeout(TIMEOUT)
        .workers(1)
        .threads(3, |group| -> Result<(), Error> {
            let mut arguments = Arguments::new(&group, 6, 5, 4)?;
            let begin = Instant::now();
            let result = match group.rank() {
                1 => refused(&group, &mut arguments),
                _ => call(&group, &mut arguments),
            };
            let took = begin.elapsed();
            over.wait();
            assert_eq!(result, Err(expected.clone()));
            assert!(took < REFUSED, "{took:?}");
            let cause = Box::new(expected.clone());
            assert_eq!(group.barrier(), Err(Error::Poisoned { cause }));
            Ok(())
        })
        .unwrap();
}

fn shape(argument: &str, expected: [usize; 2], found: [usize; 2]) -> Error {
    Error::Shape {
        rank: 1,
        argument: argument.into(),
        expected: expected.into(),
        found: found.into(),
    }
}

#[test]
fn a_wrong_weight_on_one_rank_is_named_to_all() {
    let expected = shape("b [N, K] of all_gather_matmul", [5, 4], [5, 3]);
    assert_eq!(
        expected.to_string(),
        "rank 1: b [N, K] of all_gather_matmul is [5, 3] and must be [5, 4]"
    );
    refuse(
        expected,
        |_, arguments| arguments.run(),
        |group, arguments| {
            let b = group.zeros(5, 3)?;
            all_gather_matmul(&arguments.a, &b, &mut arguments.out)
        },
    );
}

#[test]
fn a_wrong_output_on_one_rank_is_named_to_all() {
    refuse(
        shape("out [M, N] of all_gather_matmul", [6, 5], [5, 6]),
        |_, arguments| arguments.run(),
        |group, arguments| {
            let mut out = group.zeros(5, 6)?;
            all_gather_matmul(&arguments.a, &arguments.b, &mut out)
        },
    );
}

#[test]
fn a_wrong_bias_on_one_rank_is_named_to_all() {
    refuse(
        shape("bias [1, N] of all_gather_matmul", [1, 5], [1, 4]),
        |_, arguments| arguments.run(),
        |group, arguments| {
            let bias = group.zeros(1, 4)?;
            let biased = AllGatherMatmul::new().bias(&bias);
            biased.run(&arguments.a, &arguments.b, &mut arguments.out)
        },
    );
}

#[test]
fn a_wrong_matrix_on_one_rank_is_named_to_all() {
    refuse(
        shape("a [M, K] of gather", [6, 4], [6, 3]),
        |group, arguments| {
            group.sharded::<bf16>(6, 3)?;
            let prepared = AllGatherMatmul::new().prepare(&arguments.a, 5)?;
            prepared.gather(&arguments.a)
        },
        |group, arguments| {
            let other = group.sharded::<bf16>(6, 3)?;
            let prepared = AllGatherMatmul::new().prepare(&arguments.a, 5)?;
            prepared.gather(&other)
        },
    );
}

#[test]
fn a_wrong_split_of_a_sharded_matrix_on_one_rank_is_named_to_all() {
    refuse(
        Error::Shape {
            rank: 1,
            argument: "rows [world size] of sharded".into(),
            expected: vec![3],
            found: vec![2],
        },
        |group, _| group.sharded::<bf16>(6, 3).map(drop),
        |group, _| group.sharded_rows::<bf16>(&[3, 3], 3).map(drop),
    );
}

#[test]
fn a_configuration_that_cannot_be_on_one_rank_is_named_to_all() {
    let expected = Error::Limit {
        what: "Config::tile_n of all_gather_matmul on rank 1".into(),
        value: 0,
        min: 1,
        max: i32::MAX as usize,
    };
    refuse(
        expected,
        |_, arguments| arguments.run(),
        |_, arguments| {
            let prepared = AllGatherMatmul::<_, bf16>::new().prepare(&arguments.a, 5)?;
            let config = gemmesh::Config {
                tile_n: 0,
                ..prepared.config()
            };
            let product = AllGatherMatmul::new().config(config);
            product.run(&arguments.a, &arguments.b, &mut arguments.out)
        },
    );
}

#[test]
fn a_rank_that_is_refused_what_it_prepares_and_takes_its_time_has_done_no_harm() {
    Builder::<Host>::new()
        .timeout(TIMEOUT)
        .threads(3, |group| -> Result<(), Error> {
            let mut arguments = Arguments::new(&group, 6, 5, 4)?;
            if group.rank() == 1 {
                let bias = group.zeros::<bf16>(1, 4)?;
                let biased = AllGatherMatmul::new().bias(&bias);
                assert!(biased.prepare(&arguments.a, 5).is_err());
                std::thread::sleep(2 * REFUSED);
            }
            arguments.verify()
        })
        .unwrap();
}

#[test]
fn a_rank_that_leaves_when_it_is_refused_a_call_is_named_with_the_reason() {
    let calls: [MakeCall; 2] = [|_, arguments| arguments.run(), |group, _| group.barrier()];
    for call in calls {
        let begin = Instant::now();
        let error = Builder::<Host>::new().timeout(TIMEOUT).threads(3, |group| {
            let mut arguments = Arguments::new(&group, 6, 5, 4)?;
            if group.rank() != 1 {
                let result = call(&group, &mut arguments);
                let expected = shape("b [N, K] of all_gather_matmul", [5, 4], [5, 3]);
                assert_eq!(result.unwrap_err().cause(), &expected);
                return Ok(());
            }
            let b = group.zeros(5, 3)?;
            all_gather_matmul(&arguments.a, &b, &mut arguments.out)
        });
        assert!(matches!(error, Err(Error::Shape { rank: 1, .. })));
        assert!(begin.elapsed() < REFUSED);
    }
}

#[test]
fn a_rank_that_corrects_its_call_in_time_has_done_no_harm() {
    Builder::<Host>::new()
        .timeout(TIMEOUT)
        .threads(3, |group| {
            let mut arguments = Arguments::new(&group, 6, 5, 4)?;
            for _ in 0..3 {
                if group.rank() == 1 {
                    let b = group.zeros(5, 3)?;
                    all_gather_matmul(&arguments.a, &b, &mut arguments.out).unwrap_err();
                    std::thread::sleep(Duration::from_millis(200));
                }
                arguments.verify()?;
            }
            // Longer ago than a refusal stands, but of a call that was made.
            if group.rank() == 1 {
                std::thread::sleep(REFUSED);
            }
            arguments.verify()?;
            group.barrier()
        })
        .unwrap();
}

#[test]
fn a_rank_that_makes_another_call_when_it_is_refused_one_is_named_with_that() {
    let error = Builder::<Host>::new().timeout(TIMEOUT).threads(2, |group| {
        let mut arguments = Arguments::new(&group, 6, 5, 4)?;
        if group.rank() == 0 {
            return arguments.run();
        }
        let b = group.zeros(5, 3)?;
        all_gather_matmul(&arguments.a, &b, &mut arguments.out).unwrap_err();
        group.barrier()
    });
    assert!(matches!(error, Err(Error::CallMismatch { rank: 1, .. })));
}

#[test]
fn a_refusal_is_the_reason_also_where_the_timeout_is_short() {
    let timeout = Duration::from_millis(200);
    let error = Builder::<Host>::new().timeout(timeout).threads(2, |group| {
        let mut arguments = Arguments::new(&group, 6, 5, 4)?;
        if group.rank() == 0 {
            return arguments.run();
        }
        let b = group.zeros(5, 3)?;
        let result = all_gather_matmul(&arguments.a, &b, &mut arguments.out);
        std::thread::sleep(2 * timeout);
        result
    });
    assert!(matches!(error, Err(Error::Shape { rank: 1, .. })));
}

// The words of what ranks are told.

#[test]
fn a_rank_that_does_not_come_is_told_of_by_the_call_the_rank_and_the_flag() {
    let calls: [(MakeCall, &str); 2] = [
        (
            |_, arguments| arguments.run(),
            "all_gather_matmul(M = 6, K = 4, bf16, sharded matrix 0): rank 0 has not begun it \
             (flag ready[0] should be 2 and is 1); see whether rank 0 is stopped, slow, or making other calls",
        ),
        (
            |group, _| group.barrier(),
            "barrier(): rank 0 has not come; see whether rank 0 is stopped, slow, or making other calls",
        ),
    ];
    for (call, what) in calls {
        let given_up = std::sync::Barrier::new(2);
        let result = Builder::<Host>::new()
            .timeout(Duration::from_millis(300))
            .workers(1)
            .threads(2, |group| {
                let mut arguments = Arguments::new(&group, 6, 5, 4)?;
                arguments.verify()?;
                let result = match group.rank() {
                    0 => {
                        given_up.wait();
                        Ok(())
                    }
                    _ => call(&group, &mut arguments),
                };
                if group.rank() == 1 {
                    given_up.wait();
                }
                result
            });
        let error = result.unwrap_err();
        let Error::Timeout { waited_ms, .. } = error else {
            panic!("{error}")
        };
        let expected = format!("rank 1 gave up after {waited_ms} ms in {what}");
        assert_eq!(error.to_string(), expected);
    }
}

#[test]
fn a_rank_that_holds_up_the_one_that_is_waited_for_is_told_of() {
    let result = Builder::<Host>::new().timeout(SHORT).threads(3, |group| {
        if group.rank() == 2 {
            std::thread::sleep(SHORT + SLACK);
            return Ok(());
        }
        if group.rank() == 0 {
            // So that rank 1's time is over first, though it waits half a second longer for an intermediary.
            std::thread::sleep(Duration::from_millis(700));
        }
        group.barrier()
    });
    let error = result.unwrap_err();
    let Error::Timeout { waited_ms, .. } = error else {
        panic!("{error}")
    };
    assert_eq!(
        error.to_string(),
        format!(
            "rank 1 gave up after {waited_ms} ms in barrier(): rank 0 has not come, held up by rank 2; \
             see whether rank 2 is stopped, slow, or making other calls"
        )
    );
}

#[test]
fn a_rank_that_left_is_told_of_by_the_call_the_rank_and_the_flag() {
    let calls: [(MakeCall, &str); 2] = [
        (
            |_, arguments| arguments.run(),
            "all_gather_matmul(M = 6, K = 4, bf16, sharded matrix 0): rank 0 has not begun it \
             (flag ready[0] should be 2 and is 1)",
        ),
        (|group, _| group.barrier(), "barrier()"),
    ];
    for (call, what) in calls {
        let result = Builder::<Host>::new()
            .timeout(TIMEOUT)
            .workers(1)
            .threads(2, |group| {
                let mut arguments = Arguments::new(&group, 6, 5, 4)?;
                arguments.verify()?;
                match group.rank() {
                    0 => Ok(()),
                    _ => call(&group, &mut arguments),
                }
            });
        let error = result.unwrap_err();
        assert!(matches!(error, Error::RankLeft { rank: 0, .. }), "{error}");
        // A worker that waits for the rows may be the one to see it.
        let rows =
            "rank 0 has rows that have not come to rank 1 (flag chunk[0] should be 2 and is 1)";
        let rows = what
            .split_once(": ")
            .map(|(call, _)| format!("{call}: {rows}"));
        let expected = [Some(what.to_string()), rows].into_iter().flatten().map(|what| {
            format!("rank 0 left the group while rank 1 waited in {what}; all ranks must make the same calls")
        });
        assert!(
            expected.into_iter().any(|e| e == error.to_string()),
            "{error}"
        );
    }
}

// Memory.

/// Lets this process map `spare` bytes more than now, until the limit is lifted.
fn limit_memory(spare: u64) -> Rlimit {
    let before = getrlimit(Resource::As);
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let mapped = status.lines().find_map(|l| l.strip_prefix("VmSize:"));
    let mapped: u64 = mapped
        .unwrap()
        .trim()
        .trim_end_matches(" kB")
        .parse()
        .unwrap();
    let limit = Rlimit {
        current: Some(mapped * 1024 + spare),
        maximum: before.maximum,
    };
    setrlimit(Resource::As, limit).unwrap();
    before
}

const MIB: u64 = 1 << 20;

/// So that none of them maps memory for its first allocation later.
fn start_all_threads(group: &Group<Host>) -> Result<(), Error> {
    Arguments::new(group, 999, 300, 3)?.verify()?;
    group.barrier()
}

#[test]
fn a_rank_without_memory_is_named_and_the_group_goes_on() {
    let ranks = group(test_name!(), 3, |rank| {
        let group = rank.connect(TIMEOUT)?;
        start_all_threads(&group)?;
        let limit = (rank.rank == 1).then(|| limit_memory(32 * MIB));
        let error = group.sharded::<bf16>(32 << 10, 1 << 10).unwrap_err();
        if let Some(limit) = limit {
            setrlimit(Resource::As, limit).unwrap();
        }
        // With the limit lifted, this works: also the call that has failed.
        group.sharded::<bf16>(32 << 10, 1 << 10)?;
        Arguments::new(&group, 9, 5, 3)?.verify()?;
        Err(error)
    });
    match same_error(&ranks.outcomes()) {
        Error::OutOfMemory { rank, bytes, .. } => assert_eq!((*rank, *bytes), (1, 64 << 20)),
        other => panic!("{other}"),
    }
}

#[test]
fn a_rank_that_cannot_map_its_peers_memory_is_named() {
    let ranks = group(test_name!(), 3, |rank| {
        let group = rank.connect(TIMEOUT)?;
        start_all_threads(&group)?;
        // Enough for its own memory, not for that of all ranks.
        let limit = (rank.rank == 1).then(|| limit_memory(150 * MIB));
        let result = group.sharded::<bf16>(32 << 10, 1 << 10);
        if let Some(limit) = limit {
            setrlimit(Resource::As, limit).unwrap();
        }
        // The others may have theirs, and learn of it at their next call.
        let result = result.and_then(|_| Arguments::new(&group, 9, 5, 3)?.run());
        poisoned(&group, result)
    });
    match same_error(&ranks.outcomes()) {
        Error::OutOfMemory { rank, bytes, .. } => assert_eq!((*rank, *bytes), (1, 64 << 20)),
        other => panic!("{other}"),
    }
}

#[test]
fn more_memory_than_the_machine_has_is_refused_and_the_group_goes_on() {
    let ranks = group(test_name!(), 3, |rank| {
        let group = rank.connect(TIMEOUT)?;
        let huge = 1 << 24;
        let error = group.sharded::<bf16>(huge, huge).unwrap_err();
        let own = group.zeros::<bf16>(huge, huge).unwrap_err();
        assert!(
            matches!(own, Error::OutOfMemory { rank: r, .. } if r == rank.rank),
            "{own}"
        );
        Arguments::new(&group, 9, 5, 3)?.verify()?;
        Err(error)
    });
    assert!(matches!(
        same_error(&ranks.outcomes()),
        Error::OutOfMemory { bytes, .. } if *bytes == 1 << 49
    ));
}

#[test]
fn memory_for_one_rank_but_not_for_all_is_refused_before_any_takes_it() {
    let ranks = group(test_name!(), 3, |rank| {
        let group = rank.connect(TIMEOUT)?;
        // Half of what rank 0 sees, in rows of 2 MiB.
        let seen = group.all_gather_bytes(&available().to_le_bytes())?;
        let available = usize::from_le_bytes(seen[0][..].try_into().unwrap());
        let error = group.sharded::<bf16>((available / 2) >> 21, 1 << 20);
        let error = error.unwrap_err();
        Arguments::new(&group, 9, 5, 3)?.verify()?;
        Err(error)
    });
    let outcomes = ranks.outcomes();
    let Error::OutOfMemory { reason, .. } = same_error(&outcomes) else {
        panic!("{}", outcomes[0].error())
    };
    assert!(reason.contains("are needed in all"), "{reason}");
}

/// What the machine has left, in bytes.
fn available() -> usize {
    let memory = std::fs::read_to_string("/proc/meminfo").unwrap();
    let line = memory.lines().find_map(|l| l.strip_prefix("MemAvailable:"));
    let kib: usize = line
        .unwrap()
        .trim()
        .trim_end_matches(" kB")
        .parse()
        .unwrap();
    kib << 10
}

// Ranks that end, stop or stay away.

/// Survivors of a SIGKILL know within this.
const NOTICED: Duration = Duration::from_millis(1000);

/// Kills rank `victim`, which does not call the operation that the others are in.
#[track_caller]
fn kill_while_the_others_wait(test: &str, victim: usize) {
    let ranks = group(test, 3, |rank| {
        let group = rank.connect(TIMEOUT)?;
        let mut arguments = Arguments::new(&group, 9, 5, 3)?;
        arguments.verify()?;
        rank.say("here");
        if rank.rank == victim {
            rank.hear();
        }
        poisoned(&group, arguments.run())
    });
    ranks.all_heard("here");
    std::thread::sleep(Duration::from_millis(50));
    let killed = ranks.signal(victim, Signal::KILL);
    assert_lost(&ranks.outcomes(), victim, killed);
}

#[track_caller]
fn assert_lost(outcomes: &[Outcome], victim: usize, killed: Instant) {
    for outcome in outcomes {
        if outcome.rank == victim {
            outcome.assert_killed();
            continue;
        }
        assert!(
            matches!(outcome.error(), Error::RankLost { rank, .. } if *rank == victim),
            "{}",
            outcome.error()
        );
        let noticed = outcome.at - killed;
        assert!(noticed < NOTICED, "rank {} took {noticed:?}", outcome.rank);
    }
}

#[test]
fn a_rank_killed_while_the_others_wait_for_it_is_named_within_a_second() {
    kill_while_the_others_wait(test_name!(), 2);
}

#[test]
fn rank_0_killed_while_the_others_wait_for_it_is_named_within_a_second() {
    kill_while_the_others_wait(test_name!(), 0);
}

#[test]
fn a_rank_killed_amid_operations_is_named_within_a_second() {
    let ranks = group(test_name!(), 3, |rank| {
        let group = rank.connect(TIMEOUT)?;
        let mut arguments = Arguments::new(&group, 99, 50, 30)?;
        rank.say("here");
        loop {
            if let Err(error) = arguments.verify() {
                return poisoned(&group, Err(error));
            }
        }
    });
    ranks.all_heard("here");
    std::thread::sleep(Duration::from_millis(100));
    let killed = ranks.signal(1, Signal::KILL);
    assert_lost(&ranks.outcomes(), 1, killed);
}

#[test]
fn a_rank_killed_at_a_barrier_is_named_within_a_second() {
    let ranks = group(test_name!(), 3, |rank| {
        let group = rank.connect(TIMEOUT)?;
        rank.say("here");
        if rank.rank == 1 {
            rank.hear();
        }
        poisoned(&group, group.barrier())
    });
    ranks.all_heard("here");
    let killed = ranks.signal(1, Signal::KILL);
    assert_lost(&ranks.outcomes(), 1, killed);
}

#[test]
fn a_rank_killed_while_all_are_idle_is_named_by_the_next_call() {
    let mut ranks = group(test_name!(), 3, |rank| {
        let group = rank.connect(TIMEOUT)?;
        let mut arguments = Arguments::new(&group, 9, 5, 3)?;
        arguments.verify()?;
        rank.say("here");
        rank.hear();
        poisoned(&group, arguments.run())
    });
    ranks.all_heard("here");
    ranks.signal(1, Signal::KILL);
    std::thread::sleep(Duration::from_millis(50));
    let told = Instant::now();
    ranks.tell(0);
    ranks.tell(2);
    assert_lost(&ranks.outcomes(), 1, told);
}

#[test]
fn a_rank_killed_at_the_rendezvous_is_named_at_the_latest_by_the_first_call() {
    let mut ranks = group(test_name!(), 3, |rank| {
        if rank.rank == 2 {
            rank.hear();
        }
        rank.say("here");
        let group = rank.connect(SHORT).map_err(|e| e.cause().clone())?;
        poisoned(&group, group.barrier())
    });
    ranks.heard(0, "here");
    ranks.heard(1, "here");
    let begin = Instant::now();
    // Rank 0's socket and its end of the connection.
    while sockets_of(&ranks.address).len() < 2 && begin.elapsed() < TIMEOUT {
        std::thread::sleep(Duration::from_millis(1));
    }
    // Time for rank 1 to introduce itself.
    std::thread::sleep(Duration::from_millis(100));
    ranks.signal(1, Signal::KILL);
    ranks.tell(2);
    for outcome in ranks.outcomes() {
        match outcome.rank {
            1 => outcome.assert_killed(),
            _ => assert!(
                matches!(outcome.error(), Error::RankLost { rank: 1, .. }),
                "{}",
                outcome.error()
            ),
        }
    }
}

/// Stops rank `victim`; the others give up at their timeout; then it goes on.
#[track_caller]
fn stop(test: &str, victim: usize, call: MakeCall) {
    let mut ranks = group(test, 3, |rank| {
        let group = rank.connect(SHORT)?;
        let mut arguments = Arguments::new(&group, 9, 5, 3)?;
        arguments.verify()?;
        rank.say("here");
        rank.hear();
        let outcome = poisoned(&group, call(&group, &mut arguments));
        rank.say("failed");
        outcome
    });
    ranks.all_heard("here");
    ranks.signal(victim, Signal::STOP);
    let others = (0..3).filter(|&rank| rank != victim);
    for place in others.clone() {
        ranks.tell(place);
    }
    for place in others {
        ranks.heard(place, "failed");
    }
    ranks.signal(victim, Signal::CONT);
    ranks.tell(victim);
    assert_timeout_names(&ranks.outcomes().iter().collect::<Vec<_>>(), victim);
}

#[test]
fn a_stopped_rank_is_named_at_the_timeout_and_told_when_it_goes_on() {
    stop(test_name!(), 1, |_, arguments| arguments.run());
}

#[test]
fn a_stopped_rank_0_is_named_at_the_timeout_of_a_barrier() {
    stop(test_name!(), 0, |group, _| group.barrier());
}

#[test]
fn a_rank_stopped_amid_operations_is_named_at_the_timeout_and_told_when_it_goes_on() {
    let ranks = group(test_name!(), 3, |rank| {
        let group = rank.connect(SHORT)?;
        let mut arguments = Arguments::new(&group, 99, 50, 30)?;
        rank.say("here");
        loop {
            if let Err(error) = arguments.verify() {
                rank.say("failed");
                return poisoned(&group, Err(error));
            }
        }
    });
    ranks.all_heard("here");
    std::thread::sleep(Duration::from_millis(100));
    ranks.signal(1, Signal::STOP);
    ranks.heard(0, "failed");
    ranks.heard(2, "failed");
    ranks.signal(1, Signal::CONT);
    assert_timeout_names(&ranks.outcomes().iter().collect::<Vec<_>>(), 1);
}

#[test]
fn a_rank_that_never_calls_is_named_at_the_timeout() {
    let mut ranks = group(test_name!(), 3, |rank| {
        let group = rank.connect(SHORT)?;
        let mut arguments = Arguments::new(&group, 9, 5, 3)?;
        arguments.verify()?;
        if rank.rank == 2 {
            rank.hear();
        }
        let outcome = poisoned(&group, arguments.run());
        rank.say("failed");
        outcome
    });
    ranks.heard(0, "failed");
    ranks.heard(1, "failed");
    ranks.tell(2);
    assert_timeout_names(&ranks.outcomes().iter().collect::<Vec<_>>(), 2);
}

#[test]
fn a_rank_that_never_calls_is_named_also_by_ranks_without_rows_of_their_own() {
    let error = Builder::<Host>::new()
        .timeout(SHORT)
        .workers(3)
        .threads(4, |group| {
            let a = group.sharded_rows::<bf16>(&[0, 5, 0, 5], 3)?;
            let b = group.zeros::<bf16>(5, 3)?;
            let mut out = group.zeros::<bf16>(10, 5)?;
            if group.rank() == 1 {
                std::thread::sleep(SHORT + SLACK);
            }
            all_gather_matmul(&a, &b, &mut out)
        })
        .unwrap_err();
    assert!(matches!(error, Error::Timeout { rank: 1, .. }), "{error}");
}

/// Rank `leaver` drops its group; the others go on to `call`.
#[track_caller]
fn leave(test: &str, leaver: usize, call: MakeCall) {
    let mut ranks = group(test, 3, |rank| {
        let group = rank.connect(TIMEOUT)?;
        let mut arguments = Arguments::new(&group, 9, 5, 3)?;
        arguments.verify()?;
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
            matches!(outcome.error(), Error::RankLeft { rank, .. } if *rank == leaver),
            "{}",
            outcome.error()
        );
        assert!(outcome.at - left < NOTICED);
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

fn run_by(transport: Transport, arguments: &mut Arguments) -> Result<(), Error> {
    let config = Config {
        transport,
        ..AllGatherMatmul::new().prepare(&arguments.a, 5)?.config()
    };
    AllGatherMatmul::new()
        .config(config)
        .run(&arguments.a, &arguments.b, &mut arguments.out)
}

#[test]
fn a_rank_that_leaves_before_rows_are_pushed_is_named() {
    leave(test_name!(), 2, |_, arguments| {
        run_by(Transport::Push, arguments)
    });
}

#[test]
fn rank_0_that_leaves_before_rows_are_pushed_is_named() {
    leave(test_name!(), 0, |_, arguments| {
        run_by(Transport::Push, arguments)
    });
}

#[test]
fn a_rank_that_leaves_before_rows_are_stored_is_named() {
    leave(test_name!(), 1, |_, arguments| {
        run_by(Transport::Store, arguments)
    });
}

#[test]
fn a_rank_that_leaves_while_the_others_push_is_named() {
    for transport in [Transport::Pull, Transport::Push, Transport::Store] {
        let result = Builder::<Host>::new().timeout(TIMEOUT).threads(3, |group| {
            let mut arguments = Arguments::new(&group, 9, 5, 3)?;
            for _ in 0..20 {
                run_by(transport, &mut arguments)?;
            }
            if group.rank() == 1 {
                return Ok(());
            }
            let begin = Instant::now();
            let result = run_by(transport, &mut arguments);
            assert!(begin.elapsed() < NOTICED);
            result
        });
        let error = result.unwrap_err();
        assert!(
            matches!(error.cause(), Error::RankLeft { rank: 1, .. }),
            "{transport:?}: {error}"
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
fn a_rank_that_panics_is_named_as_that_within_a_second() {
    let ranks = group(test_name!(), 3, |rank| {
        let group = rank.connect(TIMEOUT)?;
        let mut arguments = Arguments::new(&group, 9, 5, 3)?;
        arguments.verify()?;
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
        assert_eq!(survivor.error().cause(), &Error::RankPanicked { rank: 1 });
        assert!(survivor.at.saturating_duration_since(panicked) < NOTICED);
    }
    assert_eq!(outcomes[1].value(), "caught");
}

#[test]
fn a_rank_that_panics_as_a_thread_is_named_to_the_others() {
    let told = std::sync::Mutex::new(Vec::new());
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        Builder::<Host>::new().timeout(TIMEOUT).threads(3, |group| {
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
        assert_eq!(error.cause(), &Error::RankPanicked { rank: 0 });
    }
}

// The launcher. Rank processes inherit the test's environment, so they play the same part.

fn launched(rank: &Rank, test: &str, world: usize) -> Result<String, Error> {
    assert_eq!(rank.place, 0);
    Launch::new(world)
        .args(["--exact", test, "--nocapture", "--test-threads=1"])
        .run()
        .map(|()| "all ranks have succeeded".into())
}

#[test]
fn launched_ranks_meet_and_their_output_is_forwarded() {
    let test = test_name!();
    let ranks = start(test, &[(0, 1)], |me| {
        if !launch::is_rank() {
            return launched(me, test, 3);
        }
        let group = Group::<Host>::from_env()?;
        Arguments::new(&group, 9, 5, 3)?.verify()?;
        me.say(format!("rank {} of {}", group.rank(), group.world_size()));
        let message = format!("an error message of rank {}\n", group.rank());
        std::io::stderr().write_all(message.as_bytes()).unwrap();
        drop(group);
        std::process::exit(0);
    });
    let outcome = &ranks.outcomes()[0];
    assert_eq!(outcome.value(), "all ranks have succeeded");
    for rank in 0..3 {
        assert!(outcome.text.contains(&format!("rank {rank} of 3")));
        assert!(
            outcome
                .text
                .contains(&format!("an error message of rank {rank}"))
        );
    }
}

#[test]
fn the_first_launched_rank_that_fails_is_returned_and_the_others_are_killed() {
    let test = test_name!();
    let ranks = start(test, &[(0, 1)], |me| {
        if !launch::is_rank() {
            return launched(me, test, 3);
        }
        let group = Group::<Host>::from_env()?;
        me.say(format!("pid {}", std::process::id()));
        group.barrier()?;
        if group.rank() == 1 {
            std::process::exit(7);
        }
        // The others don't end by themselves.
        std::thread::sleep(Duration::from_secs(60));
        std::process::exit(0);
    });
    let begin = Instant::now();
    let outcome = &ranks.outcomes()[0];
    assert!(begin.elapsed() < Duration::from_secs(5));
    match outcome.error() {
        Error::RankFailed { rank, status, .. } => {
            assert_eq!(*rank, 1);
            assert!(status.contains('7'), "{status}");
        }
        other => panic!("{other}"),
    }
    assert_all_ended(&outcome.text, 3);
}

#[test]
fn a_launched_rank_that_is_killed_is_returned() {
    let test = test_name!();
    let ranks = start(test, &[(0, 1)], |me| {
        if !launch::is_rank() {
            return launched(me, test, 3);
        }
        let group = Group::<Host>::from_env()?;
        me.say(format!("pid {}", std::process::id()));
        group.barrier()?;
        if group.rank() == 2 {
            rustix::process::kill_process(rustix::process::getpid(), Signal::KILL).unwrap();
        }
        // The others find it lost and fail at once, on its account.
        std::process::exit(group.barrier().is_err().into());
    });
    let outcome = &ranks.outcomes()[0];
    match outcome.error() {
        Error::RankFailed { rank, status, .. } => {
            assert_eq!(*rank, 2);
            assert!(status.contains("signal: 9"), "{status}");
        }
        other => panic!("{other}"),
    }
    assert_all_ended(&outcome.text, 3);
}

#[test]
fn launched_ranks_die_with_their_launcher() {
    let test = test_name!();
    let ranks = start(test, &[(0, 1)], |me| {
        if !launch::is_rank() {
            return launched(me, test, 3);
        }
        let group = Group::<Host>::from_env()?;
        me.say(format!("pid {}", std::process::id()));
        group.barrier()?;
        me.say(format!("rank {} is here", group.rank()));
        std::thread::sleep(Duration::from_secs(60));
        std::process::exit(0);
    });
    for rank in 0..3 {
        ranks.heard(0, &format!("rank {rank} is here"));
    }
    let killed = ranks.signal(0, Signal::KILL);
    // Also the ends of their outputs have been waited for here.
    let outcome = &ranks.outcomes()[0];
    outcome.assert_killed();
    assert!(outcome.at - killed < NOTICED);
    assert_all_ended(&outcome.text, 3);
}

/// Says in the environment of launched ranks what they are to do.
const PART: &str = "GEMMESH_TEST_PART";

/// What is wrong with one of the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    Panics,
    ExitsWith3,
    ReturnsAnError,
    ReturnsEarly,
    ExitsWith0,
    IsKilled,
}

impl Fault {
    const ALL: [Fault; 6] = [
        Fault::Panics,
        Fault::ExitsWith3,
        Fault::ReturnsAnError,
        Fault::ReturnsEarly,
        Fault::ExitsWith0,
        Fault::IsKilled,
    ];

    fn status(self) -> &'static str {
        match self {
            Fault::Panics => "exit status: 101",
            Fault::ExitsWith3 => "exit status: 3",
            Fault::ReturnsAnError => "exit status: 1",
            Fault::ReturnsEarly | Fault::ExitsWith0 => "exit status: 0",
            Fault::IsKilled => "signal: 9 (SIGKILL)",
        }
    }

    /// Whether `error` is what the other ranks see of it, if `faulty` has it.
    fn is_seen_as(self, error: &Error, faulty: usize) -> bool {
        match (self, error) {
            (Fault::ReturnsAnError | Fault::ReturnsEarly, Error::RankLeft { rank, .. }) => {
                *rank == faulty
            }
            (Fault::Panics, Error::RankPanicked { rank }) => *rank == faulty,
            (Fault::ReturnsAnError | Fault::ReturnsEarly | Fault::Panics, _) => false,
            (_, Error::RankLost { rank, .. }) => *rank == faulty,
            _ => false,
        }
    }
}

/// Ends a launched rank as a `main` that returns `result` would.
fn end(result: Result<(), Error>) -> ! {
    std::process::exit(result.is_err().into())
}

/// Launches three ranks of `test` with each fault, `times` times each, on rank `faulty`, and lists what was returned and is
/// wrong; in such a rank: plays its part.
fn faulty(test: &str, faulty: usize, times: usize) -> Result<String, Error> {
    if !launch::is_rank() {
        let mut wrong = Vec::new();
        for fault in Fault::ALL {
            for time in 0..times {
                let result = Launch::new(3)
                    .args(["--exact", test, "--nocapture", "--test-threads=1"])
                    .env(PART, format!("{fault:?}"))
                    .run();
                let right = match &result {
                    Err(Error::RankFailed {
                        rank,
                        status,
                        cause: Some(cause),
                    }) => {
                        (*rank, status.as_str()) == (faulty, fault.status())
                            && fault.is_seen_as(cause, faulty)
                    }
                    _ => false,
                };
                if !right {
                    wrong.push(format!("{fault:?}, time {time}: {result:?}"));
                }
            }
        }
        return Ok(wrong.join("\n"));
    }
    let part = std::env::var(PART).unwrap();
    let fault = Fault::ALL.into_iter().find(|f| format!("{f:?}") == part);
    let group = Group::<Host>::from_env()?;
    let met = group.barrier();
    if group.rank() != faulty {
        // The faulty rank may be gone before this one is out of the first.
        let result = met.and_then(|()| group.barrier());
        drop(group);
        end(result);
    }
    match fault.unwrap() {
        Fault::Panics => {
            let _dropped_by_the_panic = group;
            std::panic::resume_unwind(Box::new("planted"));
        }
        Fault::ExitsWith3 => std::process::exit(3),
        Fault::ReturnsAnError => {
            drop(group);
            end(Err(Error::Capturing { rank: faulty }));
        }
        Fault::ReturnsEarly => {
            drop(group);
            end(Ok(()));
        }
        Fault::ExitsWith0 => std::process::exit(0),
        Fault::IsKilled => {
            rustix::process::kill_process(rustix::process::getpid(), Signal::KILL).unwrap();
            unreachable!("killed");
        }
    }
}

#[test]
fn the_rank_that_made_the_others_fail_is_returned_with_the_cause_however_it_ends() {
    let test = test_name!();
    let ranks = start(test, &[(0, 1)], |_| faulty(test, 1, 12));
    assert_eq!(ranks.outcomes()[0].value(), "", "wrong");
}

#[test]
fn rank_0_that_made_the_others_fail_is_returned_with_the_cause_however_it_ends() {
    let test = test_name!();
    let ranks = start(test, &[(0, 1)], |_| faulty(test, 0, 12));
    assert_eq!(ranks.outcomes()[0].value(), "", "wrong");
}

/// What the launch of three ranks returns, each of which is `part`. It leaves nothing open, here or in the ranks.
#[track_caller]
fn launched_failure(test: &str, part: impl Fn() -> Result<(), Error>) -> Error {
    let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let ranks = start(test, &[(0, 1)], |me| {
        if launch::is_rank() {
            let launchers = std::env::var(PART).unwrap().parse().unwrap();
            assert!(open() <= launchers, "inherited");
            end(part());
        }
        assert_eq!(me.place, 0);
        let before = open();
        let result = Launch::new(3)
            .args(["--exact", test, "--nocapture", "--test-threads=1"])
            .env(PART, before.to_string())
            .run();
        assert_eq!(open(), before, "left open");
        result.map(|()| "all ranks have succeeded".into())
    });
    ranks.outcomes()[0].error().clone()
}

#[track_caller]
fn assert_failed(error: &Error, culprit: usize, its_status: &str) -> Option<Error> {
    match error {
        Error::RankFailed {
            rank,
            status,
            cause,
        } => {
            assert_eq!((*rank, status.as_str()), (culprit, its_status), "{error}");
            cause.as_deref().cloned()
        }
        other => panic!("{other}"),
    }
}

#[test]
fn launched_ranks_without_a_group_are_judged_by_how_they_end() {
    let error = launched_failure(test_name!(), || {
        if std::env::var("GEMMESH_RANK").unwrap() == "1" {
            std::process::exit(4);
        }
        Ok(())
    });
    assert_eq!(assert_failed(&error, 1, "exit status: 4"), None);
}

#[test]
fn a_launched_rank_that_ends_before_the_others_meet_it_is_returned() {
    let error = launched_failure(test_name!(), || {
        if std::env::var("GEMMESH_RANK").unwrap() == "1" {
            return Ok(());
        }
        let builder = Builder::<Host>::new().timeout(SHORT / 2);
        builder.from_env().map(drop)
    });
    let cause = assert_failed(&error, 1, "exit status: 0").expect("a cause");
    assert!(
        matches!(&cause, Error::RanksMissing { ranks, .. } if ranks == &[1]),
        "{cause}"
    );
}

#[test]
fn a_launched_rank_that_never_calls_is_returned_and_killed() {
    let error = launched_failure(test_name!(), || {
        let group = Builder::<Host>::new().timeout(SHORT / 2).from_env()?;
        group.barrier()?;
        if group.rank() == 2 {
            std::thread::sleep(Duration::from_secs(60));
        }
        group.barrier()
    });
    let cause = assert_failed(&error, 2, "still running, and killed").expect("a cause");
    assert!(matches!(cause, Error::Timeout { rank: 2, .. }), "{cause}");
}

#[test]
fn the_failure_of_an_earlier_group_is_not_the_cause() {
    let error = launched_failure(test_name!(), || {
        let group = Group::<Host>::from_env()?;
        let m = if group.rank() == 1 { 9 } else { 6 };
        group.sharded::<bf16>(m, 4).map(drop).unwrap_err();
        drop(group);
        let group = Group::<Host>::from_env()?;
        let rank = group.rank();
        group.barrier()?;
        drop(group);
        if rank == 2 {
            std::process::exit(5);
        }
        Ok(())
    });
    assert_eq!(assert_failed(&error, 2, "exit status: 5"), None);
}

#[test]
fn the_failure_of_a_later_group_is_the_cause() {
    let error = launched_failure(test_name!(), || {
        let group = Group::<Host>::from_env()?;
        group.barrier()?;
        drop(group);
        let group = Group::<Host>::from_env()?;
        if group.rank() == 1 {
            return Ok(());
        }
        group.barrier()
    });
    let cause = assert_failed(&error, 1, "exit status: 0").expect("a cause");
    assert!(matches!(cause, Error::RankLeft { rank: 1, .. }), "{cause}");
}

/// How many processes of this program this one descends from.
fn generation() -> usize {
    let program = |pid: &str| std::fs::read_link(format!("/proc/{pid}/exe")).ok();
    let parent = |pid: &str| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let (_, fields) = stat.rsplit_once(')')?;
        fields.split_whitespace().nth(1).map(str::to_string)
    };
    let own = program("self");
    let ancestors = std::iter::successors(parent("self"), |pid| parent(pid));
    ancestors.take_while(|pid| program(pid) == own).count()
}

/// Tries to launch as a rank of some launcher. Were it possible, the ranks would try too: those of a third generation don't.
fn launch_as_rank(me: &Rank, test: &str) -> Result<String, Error> {
    if generation() > 2 {
        me.say("a rank of a rank");
        std::process::exit(1);
    }
    let refused = |result: Result<(), Error>| match result {
        Err(Error::AlreadyRank { launcher }) => launcher,
        other => panic!("not refused: {other:?}"),
    };
    let simple = refused(launch::launch(2));
    let builder = Launch::new(2).args(["--exact", test, "--nocapture", "--test-threads=1"]);
    assert_eq!(refused(builder.run()), simple);
    me.say(format!("refused: {simple}"));
    Ok(simple)
}

#[test]
fn a_launched_rank_cannot_launch() {
    let test = test_name!();
    let ranks = start(test, &[(0, 1)], |me| {
        if !launch::is_rank() {
            return launched(me, test, 2);
        }
        launch_as_rank(me, test)?;
        std::process::exit(0);
    });
    ranks.heard(0, "refused: gemmesh::launch");
    let said = ranks.said(0);
    assert!(!said.contains(&"a rank of a rank".into()), "{said:?}");
    assert_eq!(ranks.outcomes()[0].value(), "all ranks have succeeded");
}

#[test]
fn a_rank_of_another_launcher_cannot_launch() {
    let test = test_name!();
    let environments: [&[(&str, &str)]; 3] = [
        &[
            ("GEMMESH_RANK", "0"),
            ("GEMMESH_WORLD_SIZE", "1"),
            ("GEMMESH_ADDRESS", "by hand"),
        ],
        &[
            ("RANK", "0"),
            ("WORLD_SIZE", "1"),
            ("LOCAL_RANK", "0"),
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", "29500"),
        ],
        &[("PMI_RANK", "0"), ("PMI_SIZE", "1")],
    ];
    let variables = |place: usize| {
        let variables = environments[place].iter();
        variables.map(|&(k, v)| (k, v.to_string())).collect()
    };
    let setting = Setting {
        variables: &variables,
        ..Setting::default()
    };
    let places = [(0, 1), (1, 1), (2, 1)];
    let ranks = start_with(test, &places, &setting, |me| launch_as_rank(me, test));
    let outcomes = ranks.outcomes();
    let launchers: Vec<&str> = outcomes.iter().map(Outcome::value).collect();
    let expected = ["gemmesh::launch", "torchrun", "a PMI launcher (mpiexec)"];
    assert_eq!(launchers, expected);
}

#[track_caller]
fn assert_all_ended(text: &str, world: usize) {
    let pids: Vec<&str> = text
        .lines()
        .filter_map(|line| line.split_once("pid "))
        .map(|(_, pid)| pid.trim())
        .collect();
    assert_eq!(pids.len(), world, "{text}");
    for pid in pids {
        assert!(!runs(pid), "process {pid} still runs");
    }
}
