//! Numbers that no machine has, at every public function that computes with its caller's numbers: an error or a result,
//! never a panic. The tests are compiled with checks for overflow.

use std::time::Duration;

use crate::support::errors::kind_of;
use gemmesh::error::Kind;
use gemmesh::fp8::{Quantize, Scales, ShardedScales};
use gemmesh::pipelines::{AllGatherAndConsume, ProduceAndAllToAll, ProduceAndReduceScatter};
use gemmesh::products::RowSplit;
use gemmesh::tuning::{Chunking, Route, TileShape};
use gemmesh::{
    AllGatherMatmul, Config, Error, F8E4M3, Group, Host, Matmul, MatmulAllReduce,
    MatmulReduceScatter, Result, bf16, broadcast,
};
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::TestRunner;

const HUGE: [usize; 7] = [
    1 << 31,
    (1 << 31) + 1,
    1 << 32,
    (1 << 62) + 1,
    1 << 63,
    usize::MAX - 1,
    usize::MAX,
];

/// A number that a call may take, or one that is far too large.
fn number() -> impl Strategy<Value = usize> {
    prop_oneof![2 => 0..20usize, 3 => select(&HUGE[..])]
}

fn numbers() -> impl Strategy<Value = [usize; 12]> {
    prop::array::uniform12(number())
}

fn config(
    [
        m,
        n,
        k,
        stages,
        cm,
        cn,
        split,
        slices,
        group,
        chunks,
        last,
        ctas,
    ]: [usize; 12],
) -> Config {
    let tile = TileShape::new(m, n, k)
        .with_stages(stages)
        .with_cluster(cm, cn)
        .with_split_k(split)
        .with_k_slices(slices)
        .with_group_m(group);
    let chunking = Chunking::new(chunks)
        .with_last(last)
        .with_cut_last(m % 2 == 0);
    let route = [Route::Pull, Route::Push, Route::Store][n % 3];
    let config = Config::new(tile, chunking, route).with_product_first(k % 2 == 0);
    assert!(!format!("{config:?} {}", tile.ctas()).is_empty());
    match ctas {
        0 => config,
        most => config.with_max_ctas(most),
    }
}

/// Runs `case` with extreme numbers in a group of one rank. Its results are right or errors, and the group goes on.
fn each(cases: u32, case: impl Fn(&Group<Host>, [usize; 12]) -> Result<()> + Sync) {
    let done = Group::<Host>::threads(1, |group| {
        let mut runner = TestRunner::new(ProptestConfig {
            cases,
            failure_persistence: None,
            ..ProptestConfig::default()
        });
        let result = runner.run(&numbers(), |numbers| {
            case(&group, numbers).map_err(|error| TestCaseError::fail(error.to_string()))
        });
        if let Err(what) = result {
            panic!("{what}");
        }
        group.check()
    });
    done.unwrap();
}

/// Extreme numbers among the valid ones, one at a time, so that each check is reached.
fn config_of(numbers: [usize; 12]) -> Config {
    const VALID: [usize; 12] = [16, 16, 64, 1, 1, 1, 1, 1, 1, 1, 1, 8];
    let changed = numbers[11] % 12;
    let mut all = VALID;
    all[changed] = numbers[changed];
    // Sometimes two at once.
    all[(changed + 1) % 12] = match numbers[0] % 2 {
        0 => numbers[1],
        _ => all[(changed + 1) % 12],
    };
    config(all)
}

#[test]
fn configurations_of_extreme_numbers_are_refused() {
    each(2000, |group, numbers| {
        let (a, b) = (group.zeros::<bf16>(4, 32)?, group.zeros::<bf16>(16, 32)?);
        let (mut out, mut all) = (group.zeros::<bf16>(4, 16)?, group.sharded::<bf16>(4, 16)?);
        let x = group.sharded::<bf16>(4, 32)?;
        for config in [config(numbers), config_of(numbers)] {
            let _ = Matmul::new().config(config).run(&a, &b, &mut out);
            let _ = AllGatherMatmul::new().config(config).run(&x, &b, &mut out);
            let _ = MatmulReduceScatter::new()
                .config(config)
                .run(&a, &b, &mut out);
            let _ = MatmulAllReduce::new().config(config).run(&a, &b, &mut all);
            let matmul = || Matmul::new().config(config);
            let prepared = Matmul::<_, bf16>::new()
                .config(config)
                .prepare((group, [4, 32]), 16);
            assert_eq!(prepared.is_ok(), matmul().run(&a, &b, &mut out).is_ok());
        }
        // The group goes on.
        Matmul::new().run(&a, &b, &mut out)
    });
}

#[test]
fn shapes_of_extreme_numbers_are_refused() {
    each(3000, |group, numbers| {
        let [
            m,
            k,
            n,
            other,
            stages,
            first,
            rows,
            root,
            chunks,
            begin,
            end,
            width,
        ] = numbers;
        let _ = group.zeros::<f32>(m, k);
        let _ = group.upload(&[0f32; 4], m, k);
        let _ = group.sharded::<f32>(m, k);
        let _ = group.sharded_rows::<f32>(&[rows], k);
        let _ = group.sharded_rows::<f32>(&[rows, other], k);
        let _ = group.sharded_with_capacity::<f32>(m, k);
        let _ = group.sharded_staged::<f32>(m, k, stages);
        assert_eq!(group.even_rows(m).iter().sum::<usize>(), m);
        let _ = ShardedScales::<Host>::columns_of_blocks(k);

        let mut x = group.sharded::<bf16>(8, 32)?;
        let _ = x.set_rows(&[rows]);
        let _ = x.set_rows(&[rows, other]);
        let _ = (x.rows_of(root), x.blocks_of(root));
        let _ = broadcast(&mut x, root);
        let mut matrix = group.zeros::<bf16>(8, 32)?;
        let _ = matrix.view().rows(begin..end).map(|view| view.shape());
        let _ = matrix.view().columns(begin..end).map(|view| view.shape());
        let _ = matrix
            .view_mut()
            .split_columns([begin, end, width])
            .map(|views| views.len());
        let _ = matrix.set_rows(rows);
        matrix.set_rows(8)?;

        x.set_rows(&[8])?;
        let _ = AllGatherAndConsume::new()
            .chunks(chunks)
            .stages(stages)
            .run(&x, |_| Ok(()));
        let mut sums = group.zeros::<f32>(4, 4)?;
        let makes = ProduceAndReduceScatter::new().chunks(chunks);
        let _ = makes.run(m, &mut sums, |_| Ok(()));
        let _ = makes.rows(&[rows, n]).run(m, &mut sums, |_| Ok(()));
        let mut blocks = group.sharded::<f32>(4, 4)?;
        let _ = ProduceAndAllToAll::new()
            .chunks(chunks)
            .run(&mut blocks, |_| Ok(()));

        let weight = group.zeros::<F8E4M3>(16, 128)?;
        let (values, scale) = (group.zeros::<F8E4M3>(4, 128)?, group.zeros::<f32>(1, 1)?);
        let (of_rows, mut out) = (group.zeros::<f32>(4, 1)?, group.zeros::<bf16>(4, 16)?);
        let scales = Scales::blocks(&scale).first_row(first);
        let _ = Matmul::new().run(
            values.scaled(Scales::blocks(&of_rows)),
            weight.scaled(scales),
            &mut out,
        );
        Ok(())
    });
}

#[test]
fn questions_about_extreme_numbers_are_answered() {
    each(3000, |group, numbers| {
        let [m, k, n, other, stages, rows, first, ..] = numbers;
        let _ = Matmul::<Host, bf16>::new().supported(group, [m, k], n);
        let gated = Matmul::<Host, bf16>::new().gated();
        let _ = gated.supported(group, [m, k], [n, n]);
        let _ = Matmul::<Host, bf16>::new().supported(group, [m, k], [n, other, n, rows]);
        let _ = Matmul::<Host, bf16>::new().prepare((group, [m, k]), [n, other]);
        let gather = AllGatherMatmul::<Host, bf16>::new().stages(stages);
        let _ = gather.supported(group, [m, k], n);
        let split = [rows, other];
        let _ =
            AllGatherMatmul::<Host, bf16>::new().supported(group, RowSplit::from((&split, k)), n);
        let _ = MatmulReduceScatter::<Host, bf16>::new().supported(group, [m, k], n);
        let scatter = MatmulReduceScatter::<Host, bf16>::new();
        let _ = scatter.rows(&[rows]).supported(group, [m, k], n);
        let _ = MatmulAllReduce::<Host, bf16>::new().supported(group, [m, k], n);
        let _ = Quantize::<Host, bf16>::new().supported(group, [m, k]);
        let _ = first;
        Ok(())
    });
}

#[test]
fn options_of_extreme_numbers_are_refused() {
    for number in HUGE.into_iter().chain([0, 1, 3]) {
        let open = |builder: gemmesh::Builder<Host>| {
            let opened = builder.threads(1, |group| group.barrier());
            assert!(!format!("{opened:?}").is_empty());
        };
        open(Group::builder().workers(number));
        open(Group::builder().link(number));
        open(Group::builder().max_ctas(number));
        open(Group::builder().device(number));
        open(Group::builder().timeout(Duration::from_millis(number as u64)));
        open(Group::builder().timeout(Duration::from_secs(number as u64)));
        open(Group::builder().arrival_timeout(Duration::from_millis(number as u64)));
        open(Group::builder().arrival_timeout(Duration::from_secs(number as u64)));
        if number > 1 << 30 {
            let many = Group::<Host>::threads(number, |_| Ok::<_, Error>(()));
            assert!(
                matches!(kind_of(&many), Some(Kind::Limit { .. })),
                "{many:?}"
            );
        }
    }
    open_forever();
}

/// The longest times that there are.
fn open_forever() {
    let builder = Group::<Host>::builder().timeout(Duration::MAX);
    let builder = builder.arrival_timeout(Duration::MAX);
    builder.threads(2, |group| group.barrier()).unwrap();
}
