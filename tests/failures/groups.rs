//! Groups that are split from others: what fails in one of them, what fails while they are made, and what is left.
#![allow(unsafe_code)] // To fork.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use gemmesh::error::Kind;
use gemmesh::launch::{self, Launch};
use gemmesh::{Error, Group, Host, Matrix, bf16};
use rustix::process::{Resource, Signal};

use crate::limits::{Limited, limit_for};
use crate::support::forks::{assert_right, end, fork};
use crate::support::patience::{again_if_busy, agreed, stretched};
use crate::support::processes::{Rank, Setting, in_namespaces, start, this_program};
use crate::support::tested::{all_done, ranks, ranks_with, without_places};
use crate::{Arguments, MakeCall, PROMPT, TIMEOUT, noticed, short, test_name};

/// A product that is right.
fn work(group: &Group<Host>) -> Result<(), Error> {
    Arguments::new(group, 9, 5, 3)?.verify(group)
}

/// The pair of this rank, which works.
fn pair_of(world: &Group<Host>) -> Result<Group<Host>, Error> {
    let pair = world.split(world.rank() / 2, world.rank())?;
    work(&pair)?;
    Ok(pair)
}

#[track_caller]
fn assert_lost(result: Result<(), Error>, lost: usize) {
    let error = result.expect_err("a rank that has died");
    let cause = error.cause();
    assert!(
        matches!((cause.rank(), cause.kind()), (Some(rank), Kind::RankLost { .. }) if rank == lost),
        "{error}"
    );
}

/// Rank 3 of four, which has said that it is here, is killed. The others see it in its pair, and in the whole group.
fn see_rank_3_die(rank: &Rank, world: &Group<Host>, pair: &Group<Host>) -> Result<String, Error> {
    rank.say("here");
    match rank.rank {
        3 => rank.hear(),
        2 => {
            assert_lost(pair.barrier(), 3);
            rank.say("knows");
        }
        _ => {}
    }
    assert_lost(world.barrier(), 3);
    if rank.rank < 2 {
        work(pair)?;
    }
    Ok("right".into())
}

/// As [`see_rank_3_die`], where rank 3 may have a child that outlives it, and is started by `setting`.
fn killed(test: &str, setting: &Setting, forks: bool) {
    let mut ranks = ranks_with(test, 4, setting, |rank| {
        let world = rank.connect(TIMEOUT)?;
        let pair = pair_of(&world)?;
        if forks && rank.rank == 3 && fork().is_none() {
            // With all that its parent had open.
            rank.hear();
            end(true);
        }
        rank.say(format!("pid {}", std::process::id()));
        see_rank_3_die(rank, &world, &pair)
    });
    ranks.all_heard("here");
    let died = ranks.signal(3, Signal::KILL);
    let known = ranks.heard(2, "knows");
    assert!(known.saturating_duration_since(died) < noticed());
    ranks.tell(3);
    for outcome in ranks.outcomes() {
        match outcome.rank {
            3 => outcome.assert_killed(),
            _ => assert_eq!(outcome.value(), "right"),
        }
    }
}

#[test]
fn a_killed_rank_is_seen_by_its_part_and_by_the_whole_group_and_the_other_part_goes_on() {
    killed(test_name!(), &Setting::default(), false);
}

#[test]
fn so_is_one_whose_child_lives_on() {
    killed(test_name!(), &Setting::default(), true);
}

#[test]
fn so_is_one_among_ranks_in_pid_namespaces_of_their_own() {
    let options = ["--pid", "--fork", "--kill-child", "--mount-proc"];
    let Some(elsewhere) = in_namespaces(&options) else {
        return;
    };
    let setting = Setting {
        command: &|place| match place {
            2 => elsewhere(),
            _ => std::process::Command::new(this_program()),
        },
        ..Setting::default()
    };
    killed(test_name!(), &setting, false);
}

#[test]
fn a_failure_of_one_part_leaves_the_other_and_the_whole_group() {
    all_done(ranks::<Host>(test_name!(), 4, |rank| {
        let world = rank.connect(TIMEOUT)?;
        let pair = pair_of(&world)?;
        world.barrier()?;
        if rank.rank == 3 {
            pair.fail("its own reason");
        }
        if rank.rank >= 2 {
            let error = pair.barrier().unwrap_err();
            assert!(
                matches!(
                    (error.rank(), error.kind()),
                    (Some(3), Kind::ProgramFailed { .. })
                ),
                "{error}"
            );
        } else {
            work(&pair)?;
        }
        work(&world)?;
        // The ranks that have failed meet again.
        work(&pair_of(&world)?)?;
        Ok("right".into())
    }));
}

#[test]
fn parts_outlive_a_whole_group_that_has_failed_or_is_gone() {
    all_done(ranks::<Host>(test_name!(), 4, |rank| {
        let world = rank.connect(TIMEOUT)?;
        let pair = pair_of(&world)?;
        let other = pair_of(&world)?;
        if rank.rank == 0 {
            world.fail("planted");
        }
        assert!(world.barrier().is_err());
        work(&pair)?;
        drop(world);
        drop(pair);
        work(&other)?;
        Ok("right".into())
    }));
}

#[test]
fn names_that_differ_within_a_color_are_named_to_every_rank_and_the_group_goes_on() {
    all_done(ranks::<Host>(test_name!(), 4, |rank| {
        let world = rank.connect(TIMEOUT)?;
        let named = |name: String| Group::builder().name(name).split(&world, rank.rank / 2, 0);
        let place = format!("{}:{}", file!(), line!() - 1);
        let name = if rank.rank == 3 { "b" } else { "a" };
        let mismatch = Kind::Mismatch {
            what: "group name".into(),
            theirs: "\"b\"".into(),
            other: 2,
            expected: "\"a\"".into(),
        };
        let told = named(name.into()).unwrap_err();
        assert_eq!((told.rank(), told.kind()), (Some(3), &mismatch));
        assert_eq!(told.call().unwrap().name(), "split");
        let words = format!(
            "rank 3, in split at {place}, has group name \"b\" and rank 2 has \"a\"; \
             all ranks of a group must have the same"
        );
        assert_eq!(told.to_string(), words);
        let error = named("x".repeat(101)).unwrap_err();
        assert!(
            matches!(
                error.kind(),
                Kind::Limit {
                    value: 101,
                    max: 100,
                    ..
                }
            ),
            "{error}"
        );
        let pair = named(format!("pair {}", rank.rank / 2))?;
        assert_eq!(
            pair.name(),
            Some(format!("pair {}", rank.rank / 2).as_str())
        );
        work(&pair)?;
        work(&world)?;
        Ok("right".into())
    }));
}

/// Gives an error of one of the groups, the second of which is a part of the first.
type GivesError = fn(&Group<Host>, &Group<Host>) -> Result<(), Error>;

/// The error of each rank of four, which it passes on to a group, and what that group's failure then is.
fn passed_on(gives: GivesError, to_whole: bool) -> Vec<[Error; 2]> {
    let given = std::sync::Barrier::new(4);
    let builder = Group::<Host>::builder().timeout(TIMEOUT).workers(1);
    let told = builder.threads(4, |world| {
        let pair = Group::builder().name(format!("pair {}", world.rank() / 2));
        let pair = pair.split(&world, world.rank() / 2, world.rank())?;
        let error = gives(&world, &pair).expect_err("a mistake");
        // The rank goes on.
        world.zeros::<bf16>(1, 1)?;
        world.barrier()?;
        given.wait();
        let group = if to_whole { &world } else { &pair };
        let failure = group.fail(&error);
        let later = group.barrier().expect_err("a failed group");
        assert_eq!(later.cause(), failure.cause());
        given.wait();
        Ok::<_, Error>([error, failure])
    });
    told.unwrap()
}

#[test]
fn an_error_of_a_group_that_is_passed_on_stays_as_it_is() {
    let gives: [GivesError; 3] = [
        // All ranks get the error of ranks 2 and 3.
        |world, _| {
            let name = if world.rank() == 3 { "b" } else { "a" };
            Group::builder().name(name).split(world, 0, 0).map(drop)
        },
        // Each rank gets its own.
        |_, pair| pair.zeros::<bf16>(1, 0).map(drop),
        |_, pair| {
            let a = pair.sharded::<bf16>(2, 4)?;
            let mut inner = Ok(());
            gemmesh::pipelines::all_gather_and_consume(&a, |_| {
                inner = pair.barrier();
                Ok(())
            })?;
            inner
        },
    ];
    for (number, gives) in gives.into_iter().enumerate() {
        for to_whole in [true, false] {
            let ranks = passed_on(gives, to_whole);
            for [_, failure] in &ranks {
                println!("{number}, to the whole group: {to_whole}: {failure}");
                let is_given = |[error, _]: &[Error; 2]| error.cause() == failure.cause();
                assert!(ranks.iter().any(is_given), "{failure}");
                let words = failure.to_string();
                assert!(!words.contains("in its own program"), "{words}");
                assert!(words.matches("group \"pair").count() < 2, "{words}");
            }
        }
    }
}

#[test]
fn a_failure_of_a_part_that_is_passed_on_later_names_the_rank_at_fault() {
    let over = std::sync::Barrier::new(4);
    let builder = Group::<Host>::builder().timeout(TIMEOUT);
    let result = builder.threads(4, |world| {
        let pair = pair_of(&world)?;
        world.barrier()?;
        if world.rank() == 3 {
            pair.fail("no more data");
        }
        let failed = pair.barrier();
        // The whole group goes on.
        world.barrier()?;
        over.wait();
        let failure = match failed {
            Err(error) if world.rank() == 2 => world.fail(format!("step 7: {error}")),
            _ => world.barrier().expect_err("rank 2's failure"),
        };
        let expected = Kind::ProgramFailed {
            function_of: None,
            reason: "no more data".into(),
        }
        .on(3);
        assert_eq!(failure.cause(), expected, "{failure}");
        Ok::<_, Error>(())
    });
    result.unwrap();
}

#[test]
fn fields_of_an_error_of_a_part_number_ranks_as_its_words_do() {
    let waits: [MakeCall; 2] = [|group, _| group.barrier(), |_, arguments| arguments.run()];
    let ends = [true, false];
    for (wait, leaves) in waits
        .into_iter()
        .flat_map(|wait| ends.map(|leaves| (wait, leaves)))
    {
        let over = std::sync::Barrier::new(4);
        let builder = Group::<Host>::builder().arrival_timeout(short()).workers(1);
        let result = builder.threads(4, |world| {
            let rank = world.rank();
            let pair = world.split(rank / 2, rank)?;
            let mut arguments = Arguments::new(&pair, 6, 5, 4)?;
            let told = match rank {
                2 => wait(&pair, &mut arguments),
                3 if leaves => {
                    drop((arguments, pair));
                    Ok(())
                }
                _ => Ok(()),
            };
            over.wait();
            let Err(error) = told else { return Ok(()) };
            let (Kind::Timeout { waiting, .. } | Kind::RankLeft { waiting, .. }) = error.kind()
            else {
                return Err(error);
            };
            assert_eq!((error.rank(), *waiting), (Some(3), 2), "{error}");
            // All ranks in the words are the fields', also without the group.
            let words = error.cause().to_string();
            let numbers = words.split("rank ").skip(1);
            let mut numbers = numbers.filter_map(|rest| rest.chars().next()?.to_digit(10));
            assert!(numbers.all(|number| number >= 2), "{words}");
            Ok::<_, Error>(())
        });
        result.unwrap();
    }
}

#[test]
fn a_rank_that_makes_a_different_call_than_split_is_named() {
    all_done(ranks::<Host>(test_name!(), 3, |rank| {
        let world = rank.connect(TIMEOUT)?;
        let error = match rank.rank {
            1 => world.barrier().unwrap_err(),
            _ => world.split(0, 0).unwrap_err(),
        };
        let cause = error.cause();
        assert!(
            matches!(
                (cause.rank(), cause.kind()),
                (Some(1), Kind::CallMismatch { .. })
            ),
            "{error}"
        );
        Ok("right".into())
    }));
}

fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Threads of this process.
fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}

#[test]
fn nothing_is_left_of_groups_that_were_split_and_dropped() {
    all_done(ranks::<Host>(test_name!(), 4, |rank| {
        let world = rank.connect(TIMEOUT)?;
        drop(pair_of(&world)?);
        let before = (open_descriptors(), threads());
        for _ in 0..10 {
            drop(pair_of(&world)?);
        }
        // A thread that has ended may still be in the list for a moment.
        let is_left = || open_descriptors() > before.0 || threads() > before.1;
        let begin = Instant::now();
        while is_left() && begin.elapsed() < agreed(PROMPT) {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(!is_left());
        // Until then all processes are watched.
        world.barrier()?;
        Ok("right".into())
    }));
}

/// Four ranks split their group while rank `limited` may have ever more descriptors.
fn few_descriptors(test: &str, limited: usize) {
    all_done(ranks::<Host>(test, 4, |rank| {
        let keeper = rank.connect(TIMEOUT)?;
        let world = rank.connect_as(&format!("{}-world", rank.address), TIMEOUT)?;
        let mut refused = 0;
        for more in 0.. {
            let before = open_descriptors();
            let limit =
                (rank.rank == limited).then(|| Limited::to(Resource::Nofile, limit_for(more)));
            let split = world.split(rank.rank / 2, 0);
            drop(limit);
            let all = keeper.all_gather_bytes(&[u8::from(split.is_ok())])?;
            assert!(
                all.iter().all(|one| *one == all[0]),
                "with {more} more: {all:?}"
            );
            let Err(error) = split else { break };
            let words = error.to_string();
            assert!(words.contains("RLIMIT_NOFILE"), "with {more} more: {words}");
            // The parts that others have opened may be closing.
            keeper.barrier()?;
            assert!(open_descriptors() <= before, "with {more} more");
            world.barrier()?;
            refused += 1;
            assert!(refused < 60, "{error}");
        }
        assert!(refused > 3, "only {refused} attempts were refused");
        work(&pair_of(&world)?)?;
        Ok("right".into())
    }));
}

#[test]
fn a_rank_that_may_have_few_descriptors_is_named_and_the_group_goes_on() {
    few_descriptors(test_name!(), 2);
}

#[test]
fn so_is_rank_0_that_may_have_few_descriptors() {
    few_descriptors(test_name!(), 0);
}

#[test]
fn a_fork_leaves_parts_alone() {
    all_done(ranks::<Host>(test_name!(), 2, |rank| {
        let world = rank.connect(TIMEOUT)?;
        let part = world.split(0, 0)?;
        if rank.rank == 1 {
            let Some(child) = fork() else {
                let refused = |result: Result<(), Error>| matches!(result, Err(error) if matches!(error.kind(), Kind::Misuse { .. }));
                let right = refused(part.barrier()) && refused(world.split(0, 0).map(drop));
                drop((part, world));
                end(right);
            };
            assert_right(child);
        }
        work(&part)?;
        work(&world)?;
        Ok("right".into())
    }));
}

#[test]
fn a_thread_that_leaves_a_part_or_panics_in_it_is_named_at_once() {
    let begin = Instant::now();
    Group::<Host>::builder()
        .timeout(TIMEOUT)
        .threads(4, |world| {
            let pair = pair_of(&world)?;
            if world.rank() == 3 {
                drop(pair);
            } else if world.rank() == 2 {
                let error = pair.barrier().unwrap_err();
                assert!(
                    matches!(
                        (error.rank(), error.kind()),
                        (Some(3), Kind::RankLeft { .. })
                    ),
                    "{error}"
                );
            } else {
                work(&pair)?;
            }
            work(&world)
        })
        .unwrap();
    assert!(begin.elapsed() < stretched(PROMPT));
}

#[test]
fn a_call_within_a_function_of_an_operation_cannot_split_its_group() {
    Group::<Host>::threads(1, |group| {
        let a = group.sharded::<bf16>(4, 4)?;
        let result = gemmesh::pipelines::all_gather_and_consume(&a, |_| {
            group.split(0, 0)?;
            Ok(())
        });
        let error = result.unwrap_err();
        assert!(
            error
                .to_string()
                .contains("makes another call of the same group"),
            "{error}"
        );
        Ok::<_, Error>(())
    })
    .unwrap();
}

/// A program's error.
type Failure = Box<dyn std::error::Error + Send + Sync>;

/// How rank 3 of four, in two kinds of pairs, ends while the others wait.
#[derive(Clone, Copy, Debug)]
enum Ending {
    Leaves,
    Fails,
}

/// Rank 3 ends, and rank 2 waits for it. Rank 0 waits for rank 2, and rank 1 for rank 0: in pairs or in the whole group.
fn wait_for_a_neighbour(
    world: &Group<Host>,
    rank: usize,
    ending: Ending,
    in_pairs: bool,
) -> Result<(), Error> {
    let tensor = Group::builder().name(format!("tensor {}", rank / 2));
    let tensor = tensor.split(world, rank / 2, rank)?;
    let data = Group::builder().name(format!("data {}", rank % 2));
    let data = data.split(world, rank % 2, rank)?;
    match (rank, ending) {
        (3, Ending::Leaves) => Ok(()),
        (3, Ending::Fails) => Err(tensor.fail("no more data")),
        (0, _) if in_pairs => data.barrier(),
        (0 | 1, _) if !in_pairs => world.barrier(),
        _ => tensor.barrier(),
    }
}

/// That an error blames rank 3 of the job first.
#[track_caller]
fn assert_names_rank_3(words: &str, ending: Ending) {
    let named = "group \"tensor 1\" of the job's ranks 2 and 3";
    let blames = match ending {
        Ending::Leaves => "rank 3 left the group while rank 2 waited in barrier()",
        Ending::Fails => "rank 3 failed in its own program: no more data",
    };
    // The group may have failed before the rank makes its call.
    let says = ["", " has failed"].map(|failed| format!("{named}{failed}: {blames}"));
    assert!(says.iter().any(|says| words.starts_with(says)), "{words}");
}

fn an_innocent_neighbour_is_not_named(test: &str, ending: Ending, in_pairs: bool) {
    let ranks = ranks::<Host>(test, 4, |rank| {
        let world = rank.connect(TIMEOUT)?;
        let result = wait_for_a_neighbour(&world, rank.rank, ending, in_pairs);
        result.map(|()| "left".into())
    });
    let outcomes = ranks.outcomes();
    for outcome in &outcomes[..3] {
        assert_names_rank_3(&outcome.error().to_string(), ending);
    }
}

#[test]
fn a_rank_that_leaves_is_named_to_those_that_wait_for_its_neighbour_in_a_pair() {
    an_innocent_neighbour_is_not_named(test_name!(), Ending::Leaves, true);
}

#[test]
fn a_rank_that_leaves_is_named_to_those_that_wait_for_its_neighbour_in_the_whole_group() {
    an_innocent_neighbour_is_not_named(test_name!(), Ending::Leaves, false);
}

#[test]
fn a_rank_whose_program_fails_is_named_to_those_that_wait_for_its_neighbour() {
    an_innocent_neighbour_is_not_named(test_name!(), Ending::Fails, true);
}

/// The same of threads, whose errors are known in words when their functions end.
#[test]
fn threads_that_wait_for_the_neighbour_of_a_failed_one_are_told_its_name() {
    for (ending, in_pairs) in [
        (Ending::Leaves, true),
        (Ending::Leaves, false),
        (Ending::Fails, true),
        (Ending::Fails, false),
    ] {
        let errors = Mutex::new(Vec::new());
        let builder = Group::<Host>::builder().timeout(TIMEOUT);
        let result = builder.threads(4, |world| {
            let rank = world.rank();
            let result = wait_for_a_neighbour(&world, rank, ending, in_pairs);
            result.map_err(|error| {
                errors.lock().unwrap().push((rank, error.to_string()));
                let in_its_words: Failure = format!("step 7: {error}").into();
                in_its_words
            })
        });
        for (rank, words) in errors.into_inner().unwrap() {
            println!("{ending:?}, rank {rank}: {words}");
            assert_names_rank_3(&words, ending);
        }
        let returned = result.unwrap_err().to_string();
        let words = returned.strip_prefix("step 7: ");
        assert_names_rank_3(words.unwrap(), ending);
    }
}

/// How rank 3 of a launched job fails in the pair {2, 3}.
#[derive(Clone, Copy)]
enum Failing {
    Dies,
    Panics,
    Differs,
}

/// The pair of this process in a launched job of four, and its rank in the job.
fn launched_pair(me: &Rank, by_split: bool) -> Result<(Group<Host>, usize), Error> {
    let job = launch::rank_environment()?.expect("a rank").rank;
    if !by_split {
        let address = format!("{} tp {}", me.address, job / 2);
        return Ok((Group::connect(job % 2, 2, &address)?, job));
    }
    let world = Group::<Host>::from_env()?;
    let builder = Group::builder().name(format!("{} tp {}", me.address, job / 2));
    Ok((builder.split(&world, job / 2, job)?, job))
}

/// The launcher of four ranks in pairs blames rank 3, and rank 2 reads the pair's name and who its ranks are.
fn blamed(test: &str, failing: Failing, by_split: bool) {
    // The other pair's ranks may not have ended when the launcher kills them.
    again_if_busy(|| blamed_once(test, failing, by_split));
}

fn blamed_once(test: &str, failing: Failing, by_split: bool) {
    let ranks = start(test, &[(0, 1)], |me| {
        if !launch::is_rank() {
            return Launch::new(4).run().map(|()| "all have succeeded".into());
        }
        if let Failing::Panics = failing {
            std::panic::set_hook(Box::new(|_| {}));
        }
        let (pair, job) = launched_pair(me, by_split)?;
        pair.barrier()?;
        let result = match (job, failing) {
            (3, Failing::Dies) => {
                rustix::process::kill_process(rustix::process::getpid(), Signal::KILL).unwrap();
                Ok(())
            }
            (3, Failing::Panics) => panic!("planted"),
            (3, Failing::Differs) => pair.all_gather_bytes(&[]).map(drop),
            (0 | 1, _) => Ok(()),
            _ => pair.barrier(),
        };
        if let Err(error) = &result {
            me.say(format!("rank {job} says: {error}"));
        }
        std::process::exit(result.is_err().into());
    });
    let address = ranks.address.clone();
    let outcome = &ranks.outcomes()[0];
    let (Some(rank), Kind::RankFailed { .. }) = (outcome.error().rank(), outcome.error().kind())
    else {
        panic!("{}", outcome.error());
    };
    assert_eq!(rank, 3, "{}", outcome.error());
    let name = format!("group \"{address} tp 1\" of the job's ranks 2 and 3");
    let words = match failing {
        Failing::Dies => "rank 3 died",
        Failing::Panics => "rank 3 panicked",
        Failing::Differs => "rank 3 called all_gather_bytes while rank 2 called barrier",
    };
    let said = outcome
        .text
        .lines()
        .find(|line| line.contains("rank 2 says: "))
        .unwrap();
    let says = ["", " has failed"].map(|failed| format!("{name}{failed}: {words}"));
    let said = without_places(said, file!());
    assert!(says.iter().any(|says| said.contains(says)), "{said}");
    let report = without_places(&outcome.error().to_string(), file!());
    assert!(
        report.contains(&format!("({name} failed: {words}")),
        "{report}"
    );
    for other in [0, 1] {
        assert!(!report.contains(&format!("rank {other}")), "{report}");
    }
}

#[test]
fn the_launcher_blames_the_rank_of_the_job_that_dies_in_a_split_pair() {
    blamed(test_name!(), Failing::Dies, true);
}

#[test]
fn the_launcher_blames_the_rank_of_the_job_that_dies_in_a_connected_pair() {
    blamed(test_name!(), Failing::Dies, false);
}

#[test]
fn the_launcher_blames_the_rank_of_the_job_that_panics_in_a_split_pair() {
    blamed(test_name!(), Failing::Panics, true);
}

#[test]
fn the_launcher_blames_the_rank_of_the_job_that_panics_in_a_connected_pair() {
    blamed(test_name!(), Failing::Panics, false);
}

#[test]
fn the_launcher_blames_the_rank_of_the_job_that_makes_a_different_call_in_a_split_pair() {
    blamed(test_name!(), Failing::Differs, true);
}

#[test]
fn the_launcher_blames_the_rank_of_the_job_that_makes_a_different_call_in_a_connected_pair() {
    blamed(test_name!(), Failing::Differs, false);
}

/// That an error names its group once, and who its ranks are.
#[track_caller]
fn assert_named<T>(result: Result<T, Error>, group: &str) {
    let Err(error) = result else {
        panic!("a call that cannot have worked");
    };
    let words = error.to_string();
    assert_eq!(
        words.matches(&format!("group {group:?}")).count(),
        1,
        "{words}"
    );
    let jobs = format!("group {group:?} of the job's ranks 2 and 3");
    assert_eq!(words.contains(&jobs), group == "pair 1", "{words}");
}

#[test]
fn an_argument_of_a_different_group_is_refused_with_the_names_of_both() {
    Group::<Host>::threads(1, |world| {
        let named = |name: &str| Group::builder().name(name).split(&world, 0, 0);
        let (tensor, data) = (named("tensor")?, named("data")?);
        let (a, mut out) = (tensor.zeros::<bf16>(4, 4)?, tensor.zeros(4, 4)?);
        let refused = |b: Matrix<Host, bf16>, out: &mut Matrix<Host, bf16>| {
            let error = gemmesh::matmul(&a, &b, out).unwrap_err().to_string();
            let (_, words) = error
                .split_once("the group of b is ")
                .expect("the argument");
            words.split_once(';').expect("a remedy").0.to_string()
        };
        let call = "and must be that of this call, group \"tensor\"";
        let words = refused(data.zeros(4, 4)?, &mut out);
        assert_eq!(words, format!("group \"data\" {call}"));
        let words = refused(world.zeros(4, 4)?, &mut out);
        assert_eq!(words, format!("a group without a name {call}"));
        let words = refused(named("tensor")?.zeros(4, 4)?, &mut out);
        assert_eq!(
            words,
            "a different group of the same name, \"tensor\", and must be that of this call"
        );
        gemmesh::matmul(&a, &tensor.zeros::<bf16>(4, 4)?, &mut out)
    })
    .unwrap();
}

#[test]
fn every_call_of_a_named_group_names_it() {
    // A rank may find that its group has failed before it finds that the group's barrier is complete.
    let all_out = std::sync::Barrier::new(4);
    Group::<Host>::threads(4, |world| {
        let name = format!("pair {}", world.rank() / 2);
        let builder = Group::builder().name(&name);
        let pair = builder.split(&world, world.rank() / 2, world.rank())?;
        let mut arguments = Arguments::new(&pair, 9, 5, 3)?;
        let wrong = pair.zeros::<bf16>(5, 4)?;
        let a = &mut arguments.a;
        assert_named(a.shard_mut().copy_from_host(&[bf16::ONE]), &name);
        assert_named(
            gemmesh::all_gather_matmul(a, &wrong, &mut arguments.out),
            &name,
        );
        assert_named(
            gemmesh::AllGatherMatmul::new().prepare(&*a, 0).map(drop),
            &name,
        );
        assert_named(pair.sharded_rows::<bf16>(&[1], 3), &name);
        assert_named(pair.upload(&[bf16::ONE], 5, 4), &name);
        assert_named(pair.zeros::<bf16>(1 << 30, 1 << 20), &name);
        assert_named(pair.sharded::<bf16>(1 << 30, 1 << 20), &name);
        arguments.verify(&pair)?;
        pair.barrier()?;
        all_out.wait();
        let failed = pair.fail("planted");
        assert_named(Err::<(), _>(failed), &name);
        assert_named(pair.barrier(), &name);
        assert_named(pair.synchronize(), &name);
        assert_named(pair.check(), &name);
        assert_named(pair.all_gather_bytes(&[]), &name);
        assert_named(pair.sharded::<bf16>(4, 8), &name);
        assert_named(pair.split(0, 0), &name);
        assert_named(arguments.run(), &name);
        Ok::<_, Error>(())
    })
    .unwrap();
}

/// Where ranks 0 and 1 wait for rank 2, which waits in a pair for rank 3.
#[derive(Clone, Copy)]
enum Waiting {
    InTheWhole,
    InAPair,
}

/// Rank 3 of four is stopped, and all others wait, at the end for it. Each names it at the deadline of its own wait, also
/// in a group that rank 3 is not in.
fn a_stopped_rank_is_named(test: &str, waiting: Waiting) {
    again_if_busy(|| {
        let mut ranks = ranks::<Host>(test, 4, |rank| {
            let patient = rank.connect(TIMEOUT)?;
            let split = |name: &str, color, arrival| {
                let builder = Group::builder().name(name).arrival_timeout(arrival);
                builder.split(&patient, color, rank.rank)
            };
            let (pair, row) = (rank.rank / 2, rank.rank % 2);
            let tensor = split(&format!("tensor {pair}"), pair, TIMEOUT)?;
            let data = split(&format!("data {row}"), row, 2 * short())?;
            let hasty = split("hasty", 0, 2 * short())?;
            rank.say("here");
            if rank.rank == 3 {
                rank.hear();
            }
            let result = match (rank.rank, waiting) {
                (2 | 3, _) => tensor.barrier(),
                (_, Waiting::InTheWhole) => hasty.barrier(),
                (0, Waiting::InAPair) => data.barrier(),
                (_, Waiting::InAPair) => Ok(()),
            };
            rank.say("over");
            result.map(|()| "over".into())
        });
        ranks.all_heard("here");
        ranks.signal(3, Signal::STOP);
        ranks.heard(0, "over");
        if let Waiting::InTheWhole = waiting {
            ranks.heard(1, "over");
        }
        ranks.signal(3, Signal::CONT);
        ranks.tell(3);
        let outcomes = ranks.outcomes();
        let waits = match waiting {
            Waiting::InTheWhole => 0..2,
            Waiting::InAPair => 0..1,
        };
        for outcome in &outcomes[waits] {
            let error = outcome.error();
            let (Some(rank), Kind::Timeout { .. }) = (error.rank(), error.kind()) else {
                panic!("{error}");
            };
            assert_eq!(rank, 3, "{error}");
            let words = without_places(&error.to_string(), file!());
            let holds =
                "held up by rank 3, for which rank 2 waits in group \"tensor 1\" in barrier()";
            assert!(words.contains(holds), "{words}");
        }
    });
}

#[test]
fn a_stopped_rank_is_named_to_those_that_wait_for_its_neighbour_in_the_whole_group() {
    a_stopped_rank_is_named(test_name!(), Waiting::InTheWhole);
}

#[test]
fn a_stopped_rank_is_named_to_those_that_wait_for_its_neighbour_in_a_pair() {
    a_stopped_rank_is_named(test_name!(), Waiting::InAPair);
}
