//! Ranks whose own program fails: the others are told why.

use std::error::Error as StdError;
use std::fmt;

use gemmesh::error::Kind;
use gemmesh::launch::{self, Launch};
use gemmesh::pipelines::produce_and_all_to_all;
use gemmesh::{AllGatherMatmul, Error, Group, Host, bf16};

use crate::support::errors::parts;
use crate::support::patience::again_if_busy;
use crate::support::processes::start;
use crate::support::tested::{assert_plain, poisoned, ranks, without_place};
use crate::{Arguments, MakeCall, TIMEOUT, same_error, test_name};

/// What a program's errors may be.
type Any = Box<dyn StdError + Send + Sync>;

fn program_failed(rank: usize, reason: &str) -> Error {
    Kind::ProgramFailed {
        function_of: None,
        reason: reason.into(),
    }
    .on(rank)
}

/// Calls in which the others wait.
const CALLS: [MakeCall; 4] = [
    |_, arguments| arguments.run(),
    |group, _| group.barrier(),
    |group, _| group.sharded::<bf16>(6, 4).map(drop),
    |group, _| produce_and_all_to_all(&mut group.sharded::<bf16>(6, 4)?, |_| Ok(())),
];

/// What the others of three ranks get in `call` if rank 1 does `part` instead; and what is returned.
fn told<E: From<Error> + fmt::Display + Send>(
    call: MakeCall,
    part: impl Fn(&Group<Host>) -> Result<(), E> + Sync,
) -> (Vec<Error>, Result<Vec<()>, E>) {
    let told = std::sync::Mutex::new(Vec::new());
    // The others are not to fail before that call.
    let ready = std::sync::Barrier::new(3);
    let returned = Group::<Host>::builder()
        .timeout(TIMEOUT)
        .workers(1)
        .threads(3, |group| {
            let arguments = Arguments::new(&group, 6, 5, 4);
            ready.wait();
            let mut arguments = arguments?;
            if group.rank() == 1 {
                return part(&group);
            }
            let error = call(&group, &mut arguments).expect_err("rank 1 does not make it");
            assert_plain(&error);
            told.lock().unwrap().push(error.cause());
            Ok(error).and_then(|error| Err(E::from(error)))
        });
    (told.into_inner().unwrap(), returned)
}

#[test]
fn an_error_that_a_thread_returns_is_told_to_those_who_wait_for_it() {
    for call in CALLS {
        let (told, returned) = told::<Any>(call, |_| Err("no such file: weights".into()));
        let expected = program_failed(1, "no such file: weights");
        assert_eq!(told, [expected.clone(), expected]);
        assert_eq!(returned.unwrap_err().to_string(), "no such file: weights");
    }
}

/// As those of crates that keep what stands after an error.
struct Chained;

impl From<Error> for Chained {
    fn from(_: Error) -> Chained {
        Chained
    }
}

impl fmt::Display for Chained {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("layer 3")?;
        match f.alternate() {
            true => f.write_str(": no memory"),
            false => Ok(()),
        }
    }
}

#[test]
fn an_error_is_told_with_what_stands_behind_it() {
    let (told, _) = told(CALLS[0], |_| Err(Chained));
    let expected = program_failed(1, "layer 3: no memory");
    assert_eq!(told, [expected.clone(), expected]);
}

#[test]
fn an_error_of_the_library_is_told_as_what_it_is() {
    let (told, returned) = told::<Any>(CALLS[1], |group| {
        Ok(group.upload(&[bf16::ONE; 3], 2, 2).map(drop)?)
    });
    let returned = *returned.unwrap_err().downcast::<Error>().unwrap();
    assert!(
        matches!(
            (returned.rank(), returned.kind()),
            (Some(1), Kind::Unsuitable { .. })
        ),
        "{returned}"
    );
    assert_eq!(told, [returned.clone(), returned]);
}

#[test]
fn a_thread_that_let_go_of_its_group_before_it_failed_is_told_of_by_its_reason() {
    for panics in [false, true] {
        let told = std::sync::Mutex::new(None);
        let caught = std::panic::catch_unwind(|| {
            Group::<Host>::threads(2, |group| -> Result<(), Any> {
                if group.rank() == 0 {
                    *told.lock().unwrap() = group.barrier().err();
                    return Ok(());
                }
                drop(group);
                std::thread::sleep(std::time::Duration::from_millis(50));
                if panics {
                    // As a panic, without its words.
                    std::panic::resume_unwind(Box::new("planted"));
                }
                Err("a reason".into())
            })
        });
        assert_eq!(caught.is_err(), panics);
        let error = told.into_inner().unwrap().unwrap();
        match error.kind() {
            Kind::RankPanicked { .. } if panics => assert_eq!(error.rank(), Some(1)),
            _ => assert_eq!(error.cause(), program_failed(1, "a reason")),
        }
    }
}

#[test]
fn a_rank_that_fails_its_group_is_told_of_to_every_rank_whatever_it_does() {
    let ranks = ranks::<Host>(test_name!(), 3, |rank| {
        let group = rank.connect(TIMEOUT)?;
        let mut arguments = Arguments::new(&group, 9, 5, 3)?;
        arguments.verify(&group)?;
        let result = match rank.rank {
            // In a call; outside; and it fails, and then goes on.
            0 => group.barrier(),
            1 => loop {
                if let Err(error) = group.synchronize() {
                    break Err(error);
                }
                std::thread::yield_now();
            },
            _ => Err(group.fail("the \0 weights are ünreadable: ".to_string() + &"x".repeat(9000))),
        };
        poisoned(&group, result)
    });
    let outcomes = ranks.outcomes();
    match parts(&same_error(&outcomes)) {
        (Some(2), Kind::ProgramFailed { reason, .. }) => {
            assert!(
                reason.starts_with("the \0 weights are ünreadable: xxx"),
                "{reason}"
            );
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_group_that_has_failed_before_fails_for_nothing_else() {
    let error = Group::<Host>::threads(1, |group| -> Result<(), Error> {
        let first = group.fail("the first");
        assert_eq!(first, program_failed(0, "the first"));
        assert_eq!(group.fail("the second"), first);
        group.barrier()
    });
    let error = error.unwrap_err();
    assert!(error.has_ended_group(), "{error}");
    assert_eq!(error.cause(), program_failed(0, "the first"));
}

#[test]
fn an_error_that_ends_a_process_is_told_if_the_library_made_it() {
    let ranks = ranks::<Host>(test_name!(), 3, |rank| {
        let group = rank.connect(TIMEOUT)?;
        if rank.rank == 1 {
            // As `?` does: the group is dropped when its program returns the error.
            group.upload(&[bf16::ONE; 3], 2, 2)?;
        }
        poisoned(&group, group.barrier())
    });
    let error = same_error(&ranks.outcomes()).clone();
    assert!(
        matches!(
            (error.rank(), error.kind()),
            (Some(1), Kind::Unsuitable { .. })
        ),
        "{error}"
    );
}

#[test]
fn a_product_that_a_process_cannot_prepare_is_why_it_leaves() {
    let ranks = ranks::<Host>(test_name!(), 2, |rank| {
        let group = rank.connect(TIMEOUT)?;
        let a = group.sharded::<bf16>(6, 4)?;
        if rank.rank == 1 {
            AllGatherMatmul::<_, bf16>::new().prepare(&a, 0)?;
        }
        poisoned(&group, group.barrier())
    });
    let outcomes = ranks.outcomes();
    let error = same_error(&outcomes);
    assert!(
        matches!((error.rank(), error.kind()), (Some(1), Kind::Limit { .. })),
        "{error}"
    );
}

#[test]
fn an_error_that_a_process_has_got_and_lived_with_is_not_why_it_leaves() {
    let ranks = ranks::<Host>(test_name!(), 2, |rank| {
        let group = rank.connect(TIMEOUT)?;
        if rank.rank == 1 {
            group.upload(&[bf16::ONE; 3], 2, 2).unwrap_err();
            group.barrier()?;
            return Ok("left".into());
        }
        group.barrier()?;
        poisoned(&group, group.barrier())
    });
    let outcomes = ranks.outcomes();
    let error = outcomes[0].error();
    assert!(
        matches!(
            (error.rank(), error.kind()),
            (Some(1), Kind::RankLeft { .. })
        ),
        "{error}"
    );
}

/// What a process is refused of its own matrices, and a part of the words.
const OWN_REFUSALS: [(MakeCall, &str); 8] = [
    (
        |_, arguments| arguments.a.set_rows(&[1]),
        "ShardedMatrix::set_rows: the number of ranks of the list of rows is 1 and must be 2, that of the group",
    ),
    (
        |_, arguments| arguments.a.set_rows(&[6, 1]),
        "ShardedMatrix::set_rows: M is 7;",
    ),
    (
        |_, arguments| arguments.a.shard_mut().copy_from_host(&[]),
        "ShardMut::copy_from_host: the number of elements of the slice is 0 and must be 12, that of this rank's \
         part, [3, 4] of the [6, 4] matrix",
    ),
    (
        |_, arguments| arguments.a.copy_to_host(&mut []),
        "ShardedMatrix::copy_to_host: the number of elements of the slice is 0 and must be 24, that of a [6, 4] matrix",
    ),
    (
        |_, arguments| arguments.a.write(7, &[]),
        "the first row that is written",
    ),
    (
        |group, _| group.zeros::<bf16>(2, 2)?.set_rows(3),
        "Matrix::set_rows: the number of rows is 3;",
    ),
    (
        |group, _| group.zeros::<bf16>(2, 2)?.rows(0..3).map(drop),
        "Matrix::rows: the end of the rows is 3;",
    ),
    (
        |group, _| {
            let mut matrix = group.zeros::<bf16>(2, 2)?;
            matrix.view_mut().split_columns([1]).map(drop)
        },
        "MatrixViewMut::split_columns: the number of columns of a split into [1] is 1 and must be 2",
    ),
];

#[test]
fn what_a_process_was_refused_of_its_own_matrices_is_why_it_leaves() {
    let ranks = ranks::<Host>(test_name!(), 2, |rank| {
        for (case, (refused, words)) in OWN_REFUSALS.into_iter().enumerate() {
            let builder = Group::<Host>::builder().timeout(TIMEOUT).workers(1);
            let group = builder.connect(rank.rank, 2, &format!("{}-{case}", rank.address))?;
            let mut arguments = Arguments::new(&group, 6, 5, 4)?;
            group.barrier()?;
            let error = match rank.rank {
                1 => refused(&group, &mut arguments),
                _ => group.barrier(),
            };
            let error = error.unwrap_err();
            let sentence = without_place(&error, concat!(file!(), ":"));
            assert!(sentence.contains(words), "{words}: {error}");
        }
        Ok("told".into())
    });
    for outcome in ranks.outcomes() {
        assert_eq!(outcome.value(), "told");
    }
}

#[test]
fn an_error_that_a_process_has_lived_with_by_a_call_of_its_own_is_not_why_it_leaves() {
    let ranks = ranks::<Host>(test_name!(), 2, |rank| {
        let group = rank.connect(TIMEOUT)?;
        if rank.rank == 1 {
            let error = group.zeros::<bf16>(1 << 24, 1 << 24).unwrap_err();
            assert!(matches!(error.kind(), Kind::OutOfMemory { .. }), "{error}");
            group.zeros::<bf16>(4, 4)?;
            return Ok("left".into());
        }
        poisoned(&group, group.barrier())
    });
    let outcomes = ranks.outcomes();
    let error = outcomes[0].error();
    assert!(
        matches!(
            (error.rank(), error.kind()),
            (Some(1), Kind::RankLeft { .. })
        ),
        "{error}"
    );
}

#[test]
fn a_matrix_that_could_not_be_made_is_why_a_process_leaves_whoever_lives_with_it() {
    let ranks = ranks::<Host>(test_name!(), 2, |rank| {
        let group = rank.connect(TIMEOUT)?;
        // More than the machine has, which rank 0 is the first to say.
        let made = group.sharded::<bf16>(1 << 24, 1 << 24);
        if rank.rank == 0 {
            made?;
        }
        poisoned(&group, group.barrier())
    });
    let outcomes = ranks.outcomes();
    let error = same_error(&outcomes);
    assert!(
        matches!(
            (error.rank(), error.kind()),
            (Some(0), Kind::OutOfMemory { .. })
        ),
        "{error}"
    );
}

/// What the launcher and each rank say if rank 1 of three does `part`.
#[track_caller]
fn launched(test: &str, part: fn(Group<Host>) -> Result<(), Error>) -> (Error, String) {
    let ranks = start(test, &[(0, 1)], |me| {
        if !launch::is_rank() {
            let launch = Launch::new(3).args(["--exact", test, "--nocapture", "--test-threads=1"]);
            return launch.run().map(|()| "all ranks have succeeded".into());
        }
        // The test's own: a group's comes before it.
        std::panic::set_hook(Box::new(|_| eprintln!("the program's own hook")));
        let group = Group::<Host>::from_env()?;
        let met = group.barrier();
        let result = match group.rank() {
            1 => met.and_then(|()| part(group)),
            rank => {
                // Rank 1 may have failed before this one is out of the first.
                let result = met.and_then(|()| group.barrier());
                me.say(format!(
                    "rank {rank}: {:?}",
                    result.as_ref().map_err(|error| error.cause().to_string())
                ));
                result
            }
        };
        std::process::exit(result.is_err().into());
    });
    let outcome = &ranks.outcomes()[0];
    (outcome.error().clone(), outcome.text.clone())
}

/// That the launcher and the other ranks say that `words` is the cause.
#[track_caller]
fn assert_told((error, text): (Error, String), status: &str, words: &str) {
    assert_eq!(
        error.to_string(),
        format!("rank 1 failed: {status} (its group failed: {words})")
    );
    for rank in [0, 2] {
        let says = format!("rank {rank}: Err({words:?})");
        assert!(text.contains(&says), "{text}");
    }
}

#[test]
fn a_launched_rank_that_fails_its_group_is_returned_with_its_reason() {
    again_if_busy(|| {
        let told = launched(test_name!(), |group| Err(group.fail("no such file")));
        assert_told(
            told,
            "exit status: 1",
            "rank 1 failed in its own program: no such file",
        );
    });
}

#[test]
fn a_launched_rank_that_panics_is_returned_with_what_the_panic_said() {
    again_if_busy(|| {
        let line = line!() + 2;
        let told = launched(test_name!(), |group| {
            assert_eq!(group.rank(), 0, "planted");
            Ok(())
        });
        assert!(told.1.contains("the program's own hook"), "{}", told.1);
        let words = told.0.to_string();
        let begin = "rank 1 failed: exit status: 101 (its group failed: rank 1 panicked: assertion";
        assert!(words.starts_with(begin), "{words}");
        let place = format!("({}:{line}:13))", file!());
        assert!(
            words.contains("planted") && words.ends_with(&place),
            "{words}"
        );
        assert!(
            told.1.contains("rank 0: Err(\"rank 1 panicked: assertion"),
            "{}",
            told.1
        );
    });
}

#[test]
fn a_launched_rank_that_returns_an_error_of_the_librarys_is_returned_with_it() {
    again_if_busy(|| {
        let told = launched(test_name!(), |group| group.zeros::<bf16>(1, 0).map(drop));
        let place = format!("{}:{}", file!(), line!() - 1);
        let words = format!(
            "rank 1: Group::zeros at {place}: the number of columns is 0; it must be from 1 to 2147483647"
        );
        assert_told(told, "exit status: 1", &words);
    });
}

#[test]
fn what_a_function_panics_with_is_told_and_a_panic_that_was_caught_before_is_not() {
    let told = std::sync::Mutex::new(Vec::new());
    let caught = std::panic::catch_unwind(|| {
        Group::<Host>::threads(2, |group| -> Result<(), Error> {
            let mut out = group.sharded::<bf16>(6, 4)?;
            if group.rank() == 1 {
                let earlier = std::panic::catch_unwind(|| panic!("planted: an earlier one"));
                assert!(earlier.is_err());
                group.barrier()?;
                // As a panic, without its words: no hook hears of it.
                std::panic::resume_unwind(Box::new(7));
            }
            group.barrier()?;
            let result = produce_and_all_to_all(&mut out, |_| Ok(()));
            told.lock().unwrap().push(result.unwrap_err());
            Ok(())
        })
    });
    caught.unwrap_err();
    let expected = Kind::RankPanicked { message: None }.on(1);
    let words = "rank 1 panicked; see that rank's own output";
    assert_eq!(expected.to_string(), words);
    for error in told.into_inner().unwrap() {
        assert_eq!(error.cause(), expected);
    }
}

#[test]
fn a_group_that_threads_return_goes_on_and_ends_when_it_is_dropped() {
    let groups = Group::<Host>::threads(2, Ok::<_, Error>).unwrap();
    let [first, second] = <[_; 2]>::try_from(groups).unwrap();
    std::thread::scope(|scope| {
        let left = scope.spawn(move || {
            first.barrier().unwrap();
            first.barrier().unwrap_err()
        });
        second.barrier().unwrap();
        drop(second);
        let left = left.join().unwrap();
        assert!(
            matches!((left.rank(), left.kind()), (Some(1), Kind::RankLeft { .. })),
            "{left}"
        );
    });
}
