//! Data that goes into shards and out of them without the host, on GPUs.

use gemmesh::{Cuda, all_gather, bf16};

use crate::support::gpu::*;
use crate::support::numbers::{bits, nan, normal};
use crate::test_name;

crate::support::shared::shards_tests!(Cuda, gpu());

#[test]
fn copies_into_own_rows_are_replayed() {
    const M: usize = 50;
    const K: usize = 72;
    let Some(_leave) = gpu() else { return };
    all_done(ranks(test_name!(), 2, |rank| {
        let group = connect(rank, TIMEOUT)?;
        let mut x = group.sharded::<bf16>(M, K)?;
        let own = x.rows();
        let mut rows = group.zeros::<bf16>(own.len(), K)?;
        // The first run makes the schedule.
        all_gather(&x)?;
        group.synchronize()?;
        let replay = Replay::capture(&group, GLOBAL, || {
            x.shard_mut().copy_from(&rows).unwrap();
            all_gather(&x).unwrap();
        });
        for step in 0..4 {
            let values = normal::<bf16>(step, M * K);
            rows.copy_from_host(&values[own.start * K..own.end * K])?;
            x.poison(nan())?;
            // No peer stores its rows before this rank's are poisoned.
            group.barrier()?;
            replay.launch();
            assert_eq!(bits(&x.to_vec()?), bits(&values), "replay {step}");
        }
        Ok("right".into())
    }));
}
