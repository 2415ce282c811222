//! Groups that are split from others: what fails in one of them, what fails while they are made, and what is left.
#![allow(unsafe_code)] // To fork.

use std::time::{Duration, Instant};

use gemmesh::{Error, Group, Host, bf16};
use rustix::process::{Resource, Signal};

use crate::limits::{Limited, limit_for};
use crate::support::forks::{assert_right, end, fork};
use crate::support::processes::{Rank, Setting, in_namespaces, this_program};
use crate::support::tested::{all_done, ranks, ranks_with};
use crate::{Arguments, NOTICED, SHORT, TIMEOUT, test_name};

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
        matches!(cause, Error::RankLost { rank, .. } if *rank == lost),
        "{error}"
    );
}

/// Rank 3 of four, which has said that it is here, is killed. The others see it in its pair, and in the whole group.
fn see_rank_3_die(rank: &Rank, world: &Group<Host>, pair: &Group<Host>) -> Result<String, Error> {
    rank.say("here");
    match rank.rank {
        3 => rank.hear(),
        2 => {
            assert_lost(pair.barrier(), 1);
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
    assert!(known.saturating_duration_since(died) < NOTICED);
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
                matches!(error.cause(), Error::ProgramFailed { rank: 1, .. }),
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
        let name = if rank.rank == 3 { "b" } else { "a" };
        let mismatch = Error::Mismatch {
            rank: 3,
            what: "group name".into(),
            theirs: "\"b\"".into(),
            other: 2,
            expected: "\"a\"".into(),
        };
        assert_eq!(named(name.into()).unwrap_err(), mismatch);
        let error = named("x".repeat(101)).unwrap_err();
        assert!(
            matches!(
                error,
                Error::Limit {
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
            matches!(cause, Error::CallMismatch { rank: 1, .. }),
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
        while is_left() && begin.elapsed() < SHORT {
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
                let refused = |result: Result<(), Error>| matches!(result, Err(error) if matches!(error.cause(), Error::Forked { .. }));
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
                    matches!(error.cause(), Error::RankLeft { rank: 1, .. }),
                    "{error}"
                );
            } else {
                work(&pair)?;
            }
            work(&world)
        })
        .unwrap();
    assert!(begin.elapsed() < TIMEOUT);
}

#[test]
fn a_call_within_a_function_of_an_operation_cannot_split_its_group() {
    Group::<Host>::threads(1, |group| {
        let a = group.sharded::<bf16>(4, 4)?;
        let result = gemmesh::all_gather_and_consume(&a, |_| {
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
