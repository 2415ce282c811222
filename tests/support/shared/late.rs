//! Ranks that come later than the timeout.

use std::time::Duration;

use gemmesh::error::{Deadline, Kind};
use gemmesh::tuning::Route;
use gemmesh::{Error, Group};
use rustix::process::Signal;

use crate::support::errors::parts;
use crate::support::patience::again_if_busy;
use crate::support::processes::Rank;
use crate::support::products::Arguments;
use crate::support::shared::failures::{fails, produces};
use crate::support::tested::{Tested, all_done, host_group, ranks};

/// A group whose timeout is short, in which late ranks are waited for. What a rank keeps is there from now on.
pub fn connect_patient<B: Tested>(rank: &Rank) -> Result<(B::Kept, Group<B>), Error> {
    let kept = B::keep(rank);
    // A rank may take longer to get there than a call may take.
    host_group(rank)?.barrier()?;
    let builder = Group::<B>::builder().timeout(B::short());
    let group = builder.connect(rank.rank, rank.world, &rank.address)?;
    Ok((kept, group))
}

/// Rank 1 comes later to an operation, and to a barrier, than a call may take.
#[track_caller]
pub fn wait_longer_than_the_timeout<B: Tested>(test: &str, route: Route) {
    again_if_busy(|| {
        // On GPUs ranks that wait for their own device wait two seconds longer.
        let late = B::away() + Duration::from_millis(500);
        all_done(ranks::<B>(test, 2, |rank| {
            let (_kept, group) = connect_patient::<B>(rank)?;
            let mut arguments = Arguments::small(&group)?;
            arguments.verify_by(&group, route)?;
            if rank.rank == 1 {
                std::thread::sleep(late);
            }
            arguments.verify_by(&group, route)?;
            if rank.rank == 0 {
                std::thread::sleep(late);
            }
            group.barrier()?;
            Ok("waited for".into())
        }));
    });
}

/// Rank 1 does not leave its function. The others name it as soon after the late rank 2 has come as if that had not been
/// late.
#[track_caller]
pub fn stay_in_a_call_that_all_have_begun<B: Tested>(test: &str) {
    again_if_busy(|| {
        let ranks = ranks::<B>(test, 3, |rank| {
            let (_kept, group) = connect_patient::<B>(rank)?;
            produces(&group, &mut || ())?;
            group.synchronize()?;
            if rank.rank == 2 {
                std::thread::sleep(B::away());
            }
            rank.say("begins");
            let result = produces(&group, &mut || {
                if rank.rank == 1 {
                    std::thread::sleep(Duration::from_secs(600));
                }
            });
            fails(rank, &group, result.and_then(|()| group.synchronize()))
        });
        let last = ranks.heard(2, "begins");
        for place in [0, 2] {
            let took = ranks.heard(place, "failed").saturating_duration_since(last);
            assert!(took > B::SHORT / 2, "rank {place} took {took:?}");
            assert!(took < B::short_and_slack(), "rank {place} took {took:?}");
        }
        ranks.signal(1, Signal::KILL);
        for outcome in ranks.outcomes() {
            if outcome.rank == 1 {
                outcome.assert_killed();
                continue;
            }
            match parts(outcome.error()) {
                (Some(rank), Kind::Timeout { deadline, .. }) => {
                    assert_eq!((rank, *deadline), (1, Deadline::Call));
                }
                other => panic!("{other:?}"),
            }
        }
    });
}
