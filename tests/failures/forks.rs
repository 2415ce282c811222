//! Forks of a rank's process, as Python, or a program that calls `system`, makes them.
#![allow(unsafe_code)] // To fork.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::{Duration, Instant};

use gemmesh::error::Kind;
use gemmesh::launch::{self, Launch};
use gemmesh::{Error, Group, Host, bf16};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Signal, WaitOptions, pidfd_open, waitpid};

use crate::support::errors::kind_of;
use crate::support::forks::{assert_right, end, fork, is_refused};
use crate::support::patience::stretched;
use crate::support::processes::{Rank, sockets_of, start};
use crate::support::products::Arguments as Products;
use crate::support::shared::failures;
use crate::support::tested::{all_done, poisoned, ranks};
use crate::{Arguments, PROMPT, TIMEOUT, noticed, test_name};

/// Every kind of call is refused in a child.
fn all_refused(group: &Group<Host>, arguments: &mut Products<Host>) -> bool {
    let rank = group.rank();
    let reason = Kind::Capturing.on(rank);
    let own = vec![bf16::ONE; arguments.a.rows().len() * arguments.a.shape()[1]];
    // No one hears of it.
    let _ = group.refuse("sharded", reason);
    group.wait_times().iter().all(Duration::is_zero)
        && is_refused(group.barrier(), rank)
        && is_refused(group.all_gather_bytes(&[]), rank)
        && is_refused(group.synchronize(), rank)
        && is_refused(group.sharded::<bf16>(4, 8), rank)
        && is_refused(group.zeros::<bf16>(4, 8), rank)
        && is_refused(arguments.run(), rank)
        && is_refused(arguments.a.shard_mut().copy_from_host(&own), rank)
}

/// Forks once for each way in which a child may end its part; after each the group goes on.
fn forks(group: Group<Host>, mut arguments: Products<Host>) -> Result<(), Error> {
    for way in 0..3 {
        let Some(child) = fork() else {
            let right = all_refused(&group, &mut arguments);
            match way {
                0 => drop((arguments, group)),
                1 => {
                    let caught = catch_unwind(AssertUnwindSafe(move || {
                        let _dropped_by_the_panic = (arguments, group);
                        resume_unwind(Box::new("planted"));
                    }));
                    end(right && caught.is_err());
                }
                _ => drop(std::thread::spawn(move || drop((arguments, group))).join()),
            }
            end(right);
        };
        assert_right(child);
        arguments.run()?;
        group.barrier()?;
    }
    arguments.verify(&group)
}

#[test]
fn a_fork_that_calls_drops_panics_or_ends_leaves_its_parents_group_alone() {
    all_done(ranks::<Host>(test_name!(), 3, |rank| {
        let group = rank.connect(TIMEOUT)?;
        let mut arguments = Arguments::new(&group, 9, 5, 3)?;
        arguments.verify(&group)?;
        if rank.rank < 2 {
            return forks(group, arguments).map(|()| "done".into());
        }
        for _ in 0..3 {
            arguments.run()?;
            group.barrier()?;
        }
        arguments.verify(&group)?;
        Ok("done".into())
    }));
}

#[test]
fn a_fork_amid_a_function_of_the_callers_ends_the_operation_in_the_child_alone() {
    failures::fork_amid_a_function_of_the_callers::<Host>(test_name!());
}

/// Rank `parent` is killed while a child of it lives on, with all that it had open.
fn outlived(test: &str, parent: usize) {
    let mut ranks = ranks::<Host>(test, 3, |rank| {
        let group = rank.connect(TIMEOUT)?;
        let mut arguments = Arguments::new(&group, 9, 5, 3)?;
        arguments.verify(&group)?;
        group.barrier()?;
        if rank.rank == parent {
            if fork().is_none() {
                rank.say("the child lives");
                rank.hear();
                end(true);
            }
            std::thread::sleep(TIMEOUT);
            return Ok("not killed".into());
        }
        let outcome = poisoned(&group, group.barrier());
        rank.say("knows");
        outcome
    });
    ranks.heard(parent, "the child lives");
    let killed = ranks.signal(parent, Signal::KILL);
    let others = (0..3).filter(|&rank| rank != parent);
    for place in others {
        let known = ranks.heard(place, "knows");
        assert!(known.saturating_duration_since(killed) < noticed());
    }
    ranks.tell(parent);
    for outcome in ranks.outcomes() {
        match outcome.rank == parent {
            true => outcome.assert_killed(),
            false => assert!(
                matches!((outcome.error().rank(), outcome.error().kind()), (Some(rank), Kind::RankLost { .. }) if rank == parent),
                "{}",
                outcome.error()
            ),
        }
    }
}

#[test]
fn a_rank_that_is_outlived_by_a_fork_is_named_at_once() {
    outlived(test_name!(), 2);
}

#[test]
fn rank_0_that_is_outlived_by_a_fork_is_named_at_once() {
    outlived(test_name!(), 0);
}

/// A child that lives until it is killed, with all that this process has open.
fn fork_that_stays() -> Pid {
    fork().unwrap_or_else(|| {
        std::thread::sleep(2 * TIMEOUT);
        end(false)
    })
}

fn kill(child: Pid) {
    rustix::process::kill_process(child, Signal::KILL).unwrap();
    waitpid(Some(child), WaitOptions::empty()).unwrap();
}

/// Rank `leaver` leaves in order while a child of it lives on.
fn outlives_the_group(test: &str, leaver: usize) {
    let mut ranks = ranks::<Host>(test, 2, |rank| {
        let group = rank.connect(TIMEOUT)?;
        let mut arguments = Arguments::new(&group, 9, 5, 3)?;
        arguments.verify(&group)?;
        if rank.rank != leaver {
            let outcome = poisoned(&group, group.barrier());
            rank.say("knows");
            return outcome;
        }
        let child = fork_that_stays();
        rank.say("leaves");
        drop((arguments, group));
        rank.say("has left");
        rank.hear();
        kill(child);
        Ok("done".into())
    });
    let leaves = ranks.heard(leaver, "leaves");
    for (place, what) in [(leaver, "has left"), (1 - leaver, "knows")] {
        let after = ranks.heard(place, what).saturating_duration_since(leaves);
        assert!(after < noticed(), "{what}: {after:?}");
    }
    ranks.tell(leaver);
    let outcomes = ranks.outcomes();
    assert_eq!(outcomes[leaver].value(), "done");
    let error = outcomes[1 - leaver].error();
    assert!(
        matches!((error.rank(), error.kind()), (Some(rank), Kind::RankLeft { .. }) if rank == leaver),
        "{error}"
    );
}

#[test]
fn a_rank_leaves_at_once_though_a_fork_lives_on() {
    outlives_the_group(test_name!(), 1);
}

#[test]
fn rank_0_leaves_at_once_though_a_fork_lives_on() {
    outlives_the_group(test_name!(), 0);
}

#[track_caller]
fn await_true(otherwise: &str, mut look: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !look() {
        assert!(begin.elapsed() < stretched(PROMPT), "{otherwise}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Waits until rank 0 has so many sockets of the rendezvous at `address`.
#[track_caller]
fn await_sockets(address: &str, count: usize) {
    await_true("rank 0 waits for nobody", || {
        sockets_of(address).len() >= count
    });
}

/// The numbers of rank 0's sockets, but of connections that it has not accepted.
fn inodes_of(address: &str) -> Vec<String> {
    let ours = gemmesh::testing::meeting_texts(address);
    let sockets = std::fs::read_to_string("/proc/net/unix").unwrap();
    let lines = sockets.lines().filter_map(|line| line.split_once(" @"));
    let lines = lines.filter(|(_, name)| ours.iter().any(|own| own == name));
    let inodes = lines.filter_map(|(fields, _)| fields.split_whitespace().last());
    inodes
        .filter(|&inode| inode != "0")
        .map(String::from)
        .collect()
}

fn meets(rank: &Rank) -> Result<String, Error> {
    let group = rank.connect(TIMEOUT)?;
    Arguments::new(&group, 9, 5, 3)?.verify(&group)?;
    group.barrier()?;
    rank.say("met");
    Ok("done".into())
}

#[test]
fn rank_0_that_forked_while_it_listened_in_vain_can_be_met_later() {
    let mut ranks = ranks::<Host>(test_name!(), 2, |rank| {
        if rank.rank == 1 {
            rank.hear();
            return meets(rank);
        }
        let (missing, child) = std::thread::scope(|scope| {
            let first = scope.spawn(|| rank.connect(Duration::from_secs(1)).map(drop));
            await_sockets(&rank.address, 1);
            let child = fork_that_stays();
            (first.join().unwrap(), child)
        });
        assert!(matches!(kind_of(&missing), Some(Kind::RanksMissing { .. })));
        rank.say("again");
        let outcome = meets(rank);
        kill(child);
        outcome
    });
    ranks.heard(0, "again");
    ranks.tell(1);
    for outcome in ranks.outcomes() {
        assert_eq!(outcome.value(), "done");
    }
}

/// Rank `killed` is killed while it waits for the others, and comes again while a child of the first lives on.
fn comes_again(test: &str, killed: usize) {
    let places = [(0, 3), (1, 3), (2, 3), (killed, 3)];
    let mut ranks = start(test, &places, |rank| {
        if rank.place >= 2 {
            rank.hear();
        }
        if rank.place != killed {
            return meets(rank);
        }
        std::thread::scope(|scope| {
            scope.spawn(|| rank.connect(TIMEOUT).map(drop));
            rank.hear();
            if fork().is_none() {
                rank.say("the child lives");
                rank.hear();
                end(true);
            }
        });
        Ok("not killed".into())
    });
    // Rank 0's socket and its end of the connection.
    await_sockets(&ranks.address, 2);
    // Time for rank 1 to introduce itself.
    std::thread::sleep(Duration::from_millis(100));
    ranks.tell(killed);
    ranks.heard(killed, "the child lives");
    let process = pidfd_open(ranks.pid(killed), PidfdFlags::empty()).unwrap();
    ranks.signal(killed, Signal::KILL);
    poll(&mut [PollFd::new(&process, PollFlags::IN)], None).unwrap();
    let known = inodes_of(&ranks.address);
    ranks.tell(3);
    if killed != 0 {
        // It takes its old place before the others are complete.
        await_true("rank 0 goes by the dead rank", || {
            let now = inodes_of(&ranks.address);
            now.len() == 2 && now.iter().any(|inode| !known.contains(inode))
        });
    }
    ranks.tell(2);
    for place in [1 - killed, 2, 3] {
        ranks.heard(place, "met");
    }
    ranks.tell(killed);
    for (place, outcome) in ranks.outcomes().iter().enumerate() {
        match place == killed {
            true => outcome.assert_killed(),
            false => assert_eq!(outcome.value(), "done"),
        }
    }
}

#[test]
fn rank_0_that_is_killed_at_the_rendezvous_may_come_again_though_a_fork_lives_on() {
    comes_again(test_name!(), 0);
}

#[test]
fn a_rank_that_is_killed_at_the_rendezvous_may_come_again_though_a_fork_lives_on() {
    comes_again(test_name!(), 1);
}

#[test]
fn a_fork_of_a_launched_rank_tells_the_launcher_nothing() {
    let test = test_name!();
    let ranks = start(test, &[(0, 1)], |me| {
        if !launch::is_rank() {
            assert_eq!(me.place, 0);
            return Launch::new(2).run().map(|()| "done".into());
        }
        let group = Group::<Host>::from_env()?;
        group.barrier()?;
        if fork().is_none() {
            let caught = catch_unwind(AssertUnwindSafe(|| {
                let _dropped_by_the_panic = group;
                resume_unwind(Box::new("planted"));
            }));
            end(caught.is_err());
        }
        group.barrier()?;
        drop(group);
        std::process::exit(0);
    });
    assert_eq!(ranks.outcomes()[0].value(), "done");
}
