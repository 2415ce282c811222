//! Parts of a group as groups of their own, on GPUs.

use gemmesh::Cuda;
use gemmesh::testing::ranks_share_gpus;

use crate::support::gpu::*;
use crate::test_name;

crate::support::shared::groups_tests!(Cuda, gpu());

#[test]
fn a_part_of_a_group_shares_gpus_if_the_group_does() {
    let Some(_leave) = gpu() else { return };
    all_done(ranks(test_name!(), 2, |rank| {
        let group = connect(rank, TIMEOUT)?;
        let alone = group.split(rank.rank, 0)?;
        assert_eq!(alone.world_size(), 1);
        assert_eq!(ranks_share_gpus(&alone), ranks_share_gpus(&group));
        Ok("as the group".into())
    }));
}
