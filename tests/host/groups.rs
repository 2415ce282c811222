//! Parts of a group as groups of their own, on the host.

use std::sync::Barrier;
use std::time::Duration;

use gemmesh::error::Kind;
use gemmesh::tuning::Numerics;
use gemmesh::{Error, Group, Host};

use crate::support::patience::agreed;
use crate::support::products::Arguments;

crate::support::shared::groups_tests!(Host, Some(()));

#[test]
fn ranks_that_are_threads_split_as_well() {
    let builder = Group::<Host>::builder()
        .numerics(Numerics::Invariant)
        .workers(2);
    builder
        .threads(6, |world| {
            let rank = world.rank();
            // {0, 2, 4} and {1, 3, 5}, and of each the ranks in reversed order.
            let half = world.split(rank % 2, 6 - rank)?;
            assert_eq!((half.rank(), half.world_size()), (2 - rank / 2, 3));
            assert_eq!(half.name(), Some(format!("color {}", rank % 2).as_str()));
            Arguments::small(&half)?.verify(&half)?;
            // Equal keys keep the order. A color may be any number, and belongs to its call.
            let pair = half.split(usize::MAX - half.rank() / 2, 7)?;
            let [rank, size] = [[0, 2], [1, 2], [0, 1]][half.rank()];
            assert_eq!((pair.rank(), pair.world_size()), (rank, size));
            Arguments::small(&pair)?.verify(&pair)?;
            let explanation = format!("{:?}", pair.name());
            assert!(explanation.ends_with(&format!("of color {}\")", world.rank() % 2)));
            drop((half, world));
            Arguments::small(&pair)?.verify(&pair)
        })
        .unwrap();
}

#[test]
fn a_part_has_the_timeout_of_its_group_unless_it_is_given_another() {
    let timeout = agreed(Duration::from_millis(300));
    let builder = Group::<Host>::builder().arrival_timeout(timeout);
    // Rank 1 is there, and does not come.
    let over = Barrier::new(2);
    let assert_waits = |group: &Group<Host>, timeout: Duration| {
        if group.rank() == 0 {
            let error = group.barrier().unwrap_err();
            let Kind::Timeout { waited_ms, .. } = error.kind() else {
                panic!("{error}");
            };
            assert!(u128::from(*waited_ms) >= timeout.as_millis(), "{error}");
        }
    };
    builder
        .threads(2, |world| {
            let alike = world.split(0, 0)?;
            let builder = Group::builder()
                .arrival_timeout(timeout * 3)
                .name("patient");
            let patient = builder.split(&world, 0, 0)?;
            assert_eq!(patient.name(), Some("patient"));
            assert_waits(&alike, timeout);
            assert_waits(&patient, timeout * 3);
            over.wait();
            Ok::<_, Error>(())
        })
        .unwrap();
}
