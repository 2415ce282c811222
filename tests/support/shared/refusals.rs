//! What cannot be had is refused, and the group goes on.

use gemmesh::error::Kind;
use gemmesh::{Error, bf16};

use crate::support::processes::Outcome;
use crate::support::products::Arguments;
use crate::support::tested::{Tested, connect, ranks};

/// More memory than there is, for a matrix of all ranks and for one of each alone: what the ranks were told of the
/// first.
#[track_caller]
pub fn too_much_memory<B: Tested>(test: &str, world: usize, [m, k]: [usize; 2]) -> Vec<Outcome> {
    let ranks = ranks::<B>(test, world, |rank| {
        let group = connect::<B>(rank, B::TIMEOUT)?;
        let error = group.sharded::<bf16>(m, k).unwrap_err();
        let own = group.zeros::<bf16>(m, k).unwrap_err();
        assert!(
            matches!((own.rank(), own.kind()), (Some(r), Kind::OutOfMemory { .. }) if r == rank.rank),
            "{own}"
        );
        // As bytes, more than a usize holds: about half a million are left of it.
        let [m, k] = [2_147_437_309, 1_073_764_994];
        let own = group.zeros::<u64>(m, k).unwrap_err();
        assert!(matches!(own.kind(), Kind::OutOfMemory { .. }), "{own}");
        Arguments::small(&group)?.verify(&group)?;
        Err(error)
    });
    let outcomes = ranks.outcomes();
    for outcome in &outcomes {
        let error = outcome.error();
        assert!(matches!(error.kind(), Kind::OutOfMemory { .. }), "{error}");
    }
    outcomes
}
