//! Groups before MPI begins and after it has ended: errors, and no call that would end the process.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use gemmesh::error::Kind;
use gemmesh::{Error, Group, Host, all_gather, bf16};
use mpi::Threading;
use mpi::environment::Universe;
use mpi::topology::SimpleCommunicator;
use mpi::traits::Communicator;

use crate::hosts;

/// Without MPI there is no group.
pub fn mpi_has_not_begun() {
    assert_lacks("mpi::initialize()");
}

/// Ends MPI. Returns how many tests have passed.
pub fn test(universe: Universe, provided: Threading) -> usize {
    let world = universe.world();
    let ranks = world.size() as usize;
    // Hosts have the same number of ranks.
    if provided < Threading::Multiple || ranks % 2 == 1 {
        drop(universe);
        mpi_has_ended();
        return 1;
    }
    let layout: String = (0..ranks)
        .map(|rank| if 2 * rank < ranks { 'a' } else { 'b' })
        .collect();
    let groups = [(); 2].map(|()| hosts::group(&world, &layout));
    calls_after_the_end_fail(universe, groups);
    mpi_has_ended();
    2
}

/// One group is within a call when MPI ends, the other one calls later. The last rank calls neither before.
fn calls_after_the_end_fail(universe: Universe, groups: [Group<Host>; 2]) {
    let [within, later] = groups;
    let last = within.world_size() - 1;
    let (has_begun, has_ended) = (AtomicBool::new(false), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let call = scope.spawn(|| {
            let is_late = within.rank() == last;
            has_begun.store(true, Ordering::Release);
            // So no rank's call ends before MPI does.
            while is_late && !has_ended.load(Ordering::Acquire) {
                std::thread::yield_now();
            }
            gather(&within)
        });
        while !has_begun.load(Ordering::Acquire) {
            std::thread::yield_now();
        }
        // The call should wait for its messages by now.
        std::thread::sleep(Duration::from_millis(100));
        drop(universe);
        has_ended.store(true, Ordering::Release);
        let error = call.join().unwrap().unwrap_err();
        assert_names_the_end(&error);
    });
    assert_names_the_end(&gather(&later).unwrap_err());
    // Nothing is printed, and nothing ends the process.
    drop((within, later));
}

fn gather(group: &Group<Host>) -> Result<(), Error> {
    let a = group.sharded::<bf16>(4 * group.world_size(), 8)?;
    all_gather(&a)
}

/// The group's failure is that of the rank that was the first to see the end.
#[track_caller]
fn assert_names_the_end(error: &Error) {
    let Kind::System { action, reason, .. } = error.kind() else {
        panic!("{error}");
    };
    assert!(action.ends_with("rows by MPI"), "{error}");
    assert!(
        reason.contains("drop the mpi::Universe after the group"),
        "{error}"
    );
}

fn mpi_has_ended() {
    assert_lacks("MPI has been finalised");
}

#[track_caller]
fn assert_lacks(what: &str) {
    let world = SimpleCommunicator::world;
    let builder = Group::<Host>::builder;
    for error in [
        builder().from_mpi().unwrap_err(),
        builder().from_communicator(&world()).unwrap_err(),
    ] {
        let Kind::Environment { launcher, missing } = error.kind() else {
            panic!("{error}");
        };
        assert!(launcher == "MPI" && missing.contains(what), "{error}");
    }
}
