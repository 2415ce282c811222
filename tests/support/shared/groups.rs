//! Parts of a group as groups of their own.

use gemmesh::{Backend, Error, Group, bf16};

use super::reduce_scatter::{self, verify};
use crate::support::products::{Arguments, Case};
use crate::support::tested::{Tested, all_done, connect, ranks};

/// Splits a group of four into {0, 1} and {2, 3}, whose ranks are in reversed order.
fn pairs<B: Backend>(world: &Group<B>) -> Result<Group<B>, Error> {
    let pair = world.split(world.rank() / 2, world.world_size() - world.rank())?;
    let expected = (1 - world.rank() % 2, 2);
    assert_eq!((pair.rank(), pair.world_size()), expected);
    Ok(pair)
}

/// Both parts multiply at once, and the whole group before and after them. Each pair has products of its own.
pub fn products_of_all_parts_at_once_are_right<B: Tested>(test: &str) {
    all_done(ranks::<B>(test, 4, |rank| {
        let world = connect::<B>(rank, B::TIMEOUT)?;
        let mut whole = Arguments::small(&world)?;
        whole.verify(&world)?;
        let pair = pairs(&world)?;
        for turn in 0..5 {
            let case = Case {
                rows: vec![130, 71],
                n: 48,
                more: 16,
                k: 32 + 16 * (rank.rank / 2),
                bias: true,
                workers: 1,
                seed: 7 + 10 * turn + rank.rank as u64 / 2,
                ..Case::default()
            };
            case.verify::<B, bf16>(&pair).unwrap();
        }
        whole.verify(&world)?;
        drop((whole, world));
        Arguments::small(&pair)?.verify(&pair)?;
        Ok("right".into())
    }));
}

/// As above, with partial sums.
pub fn sums_of_all_parts_at_once_are_right<B: Tested>(test: &str) {
    all_done(ranks::<B>(test, 4, |rank| {
        let world = connect::<B>(rank, B::TIMEOUT)?;
        let pair = pairs(&world)?;
        let address = format!("{}-{}", rank.address, rank.rank / 2);
        for seed in 0..3 {
            let case = reduce_scatter::Case {
                rows: vec![40, 61],
                n: 48,
                k: 16,
                more: 16,
                bias: true,
                workers: 1,
                seed: seed + rank.rank as u64 / 2,
                ..Default::default()
            };
            verify::<B, bf16>(&pair, &format!("{address}-{seed}"), &case, None)?;
        }
        world.barrier()?;
        Ok("right".into())
    }));
}

/// Tensor parallelism in {0, 1} and {2, 3}, data parallelism in {0, 2} and {1, 3}: each row of the sum over all ranks.
pub fn a_rank_is_in_several_groups<B: Tested>(test: &str) {
    all_done(ranks::<B>(test, 4, |rank| {
        let world = connect::<B>(rank, B::TIMEOUT)?;
        let tensor = world.split(rank.rank / 2, rank.rank)?;
        let data = world.split(rank.rank % 2, rank.rank)?;
        let alone = data.split(rank.rank, 0)?;
        assert_eq!((alone.rank(), alone.world_size()), (0, 1));
        Arguments::small(&alone)?.verify(&alone)?;
        let gathered = |group: &Group<B>| -> Result<Vec<f32>, Error> {
            let mut rows = group.sharded::<bf16>(group.world_size(), 8)?;
            let own = [bf16::from_f32(rank.rank as f32); 8];
            rows.shard_mut().copy_from_host(&own)?;
            gemmesh::all_gather(&rows)?;
            let values = rows.to_vec()?;
            Ok(values.chunks(8).map(|row| row[0].to_f32()).collect())
        };
        for _ in 0..5 {
            let first = (rank.rank / 2 * 2) as f32;
            assert_eq!(gathered(&tensor)?, [first, first + 1.0]);
            let first = (rank.rank % 2) as f32;
            assert_eq!(gathered(&data)?, [first, first + 2.0]);
            assert_eq!(gathered(&world)?, [0.0, 1.0, 2.0, 3.0]);
        }
        Ok("right".into())
    }));
}
