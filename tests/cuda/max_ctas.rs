//! Kernels that leave a part of the GPU to other kernels.

use std::collections::BTreeSet;

use gemmesh::trace::{Lane, Work};
use gemmesh::{
    AllGatherMatmul, Config, Cuda, Error, Group, bf16, matmul_all_reduce, matmul_reduce_scatter,
};

use crate::support::gpu::*;
use crate::support::processes::Rank;
use crate::support::products::{Arguments, ROUTES};
use crate::test_name;

const M: usize = 300;
const N: usize = 600;
const K: usize = 136;

fn limited(rank: &Rank, most: usize) -> Result<Group<Cuda>, Error> {
    let builder = Group::<Cuda>::builder().timeout(TIMEOUT).max_ctas(most);
    builder.connect(rank.rank, rank.world, &format!("{}-{most}", rank.address))
}

/// The multiprocessors that multiplied in a traced gather by `route`.
fn multiprocessors(of: &Group<Cuda>, config: Config) -> Result<BTreeSet<usize>, Error> {
    let a = of.sharded::<bf16>(M, K)?;
    let b = of.zeros::<bf16>(N, K)?;
    let mut out = of.zeros::<bf16>(M, N)?;
    let prepared = AllGatherMatmul::new().config(config).prepare(&a, N)?;
    let trace = prepared.run_traced(&a, &b, &mut out)?;
    let tiles = trace
        .spans
        .iter()
        .filter_map(|span| match (&span.work, span.lane) {
            (Work::Tile { .. }, Lane::Worker(number)) => Some(number),
            _ => None,
        });
    Ok(tiles.collect())
}

#[test]
fn a_group_takes_no_more_ctas_than_it_may_and_its_products_are_right() {
    let Some(_leave) = gpu() else { return };
    all_done(ranks(test_name!(), 2, |rank| {
        for most in [1, 5, 100] {
            let group = limited(rank, most)?;
            let mut some = Arguments::new(&group, M, N, K)?;
            for (base, route) in ROUTES.into_iter().enumerate() {
                some.fill(&group, base)?;
                some.verify_by(&group, route)?;
            }
            let a = group.sharded::<bf16>(M, K)?;
            let config = AllGatherMatmul::new().prepare(&a, N)?.config();
            assert_eq!(config.max_ctas, Some(most));
            assert!(config.tile.ctas() <= most, "{config:?}");
            let used = multiprocessors(&group, config)?;
            assert!((1..=most).contains(&used.len()), "{used:?}");
            // A part of the group has the same limit.
            let part = group.split(0, rank.rank)?;
            let a = part.sharded::<bf16>(M, K)?;
            let config = AllGatherMatmul::new().prepare(&a, N)?.config();
            assert_eq!(config.max_ctas, Some(most));
        }
        Ok("as many as it may".into())
    }));
}

#[test]
fn a_call_may_take_fewer_ctas_than_the_group() {
    let Some(_leave) = gpu() else { return };
    all_done(ranks(test_name!(), 2, |rank| {
        let group = connect(rank, TIMEOUT)?;
        let a = group.sharded::<bf16>(M, K)?;
        let config = AllGatherMatmul::new().prepare(&a, N)?.config();
        assert_eq!(config.max_ctas, None);
        let ctas = config.tile.ctas();
        let used = multiprocessors(&group, config.with_max_ctas(2 * ctas))?;
        assert!((1..=2 * ctas).contains(&used.len()), "{used:?}");
        Ok(format!("{} of {}", used.len(), 2 * ctas))
    }));
}

#[test]
fn sums_take_no_more_ctas_than_they_may_and_are_right() {
    let Some(_leave) = gpu() else { return };
    all_done(ranks(test_name!(), 2, |rank| {
        for most in [1, 7] {
            let group = limited(rank, most)?;
            for m in [6, M] {
                let a = group.upload(&vec![bf16::ONE; m * K], m, K)?;
                let b = group.upload(&vec![bf16::ONE; N * K], N, K)?;
                let whole = vec![bf16::from_f32(2.0 * K as f32); m * N];
                let mut sums = group.sharded::<bf16>(m, N)?;
                matmul_all_reduce(&a, &b, &mut sums)?;
                assert_eq!(sums.to_vec()?, whole, "{m} rows");
                let mut own = group.zeros::<bf16>(m / 2, N)?;
                matmul_reduce_scatter(&a, &b, &mut own)?;
                assert_eq!(own.to_vec()?, whole[..m / 2 * N], "{m} rows");
            }
        }
        Ok("right".into())
    }));
}

#[test]
fn a_limit_below_a_cluster_or_of_none_is_refused() {
    let Some(_leave) = gpu() else { return };
    all_done(ranks(test_name!(), 1, |rank| {
        let none = Group::<Cuda>::builder().max_ctas(0);
        let error = none.connect(rank.rank, rank.world, &format!("{}-0", rank.address));
        let words = error
            .err()
            .map(|error| error.to_string())
            .unwrap_or_default();
        let expected = "the most CTAs of a kernel is 0; it must be from 1 to 2147483647";
        assert!(words.contains(expected), "{words:?}");
        let group = connect(rank, TIMEOUT)?;
        let a = group.sharded::<bf16>(M, K)?;
        for config in SHAPES.iter().filter(|config| config.tile.ctas() > 1) {
            let one = AllGatherMatmul::new().config(config.with_max_ctas(1));
            let words = one.prepare(&a, N).err().map(|error| error.to_string());
            let words = words.unwrap_or_default();
            let expected = format!(
                "max_ctas of a kernel whose clusters have {} CTAs",
                config.tile.ctas()
            );
            assert!(words.contains(&expected), "{words:?}");
        }
        Ok("refused".into())
    }));
}
