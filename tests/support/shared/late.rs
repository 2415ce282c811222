//! Ranks that come later than the timeout.

use std::time::Duration;

use gemmesh::{Error, Group, Route};

use crate::support::processes::Rank;
use crate::support::products::Arguments;
use crate::support::tested::{Tested, all_done, host_group, ranks};

/// A group whose timeout is short, in which late ranks are waited for. What a rank keeps is there from now on.
pub fn connect_patient<B: Tested>(rank: &Rank) -> Result<(B::Kept, Group<B>), Error> {
    let kept = B::keep(rank);
    // A rank may take longer to get there than a call may take.
    host_group(rank)?.barrier()?;
    let builder = Group::<B>::builder().timeout(B::SHORT);
    let group = builder.connect(rank.rank, rank.world, &rank.address)?;
    Ok((kept, group))
}

/// Rank 1 comes later to an operation, and to a barrier, than a call may take.
#[track_caller]
pub fn wait_longer_than_the_timeout<B: Tested>(test: &str, route: Route) {
    // On GPUs ranks that wait for their own device wait two seconds longer.
    let late = B::SHORT + B::SLACK + Duration::from_millis(500);
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
}
