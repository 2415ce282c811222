//! Sums over ranks that each have a part of K.

use gemmesh::tuning::{Chunking, Route};
use gemmesh::{Config, Cuda, Group, bf16, f16};
use rand::RngExt;

use gemmesh::testing::Variant;

use crate::support::gpu::*;
use crate::support::numbers::{bits, rng};
use crate::support::shared::reduce_scatter::{self, Case, Placed};
use crate::test_name;

fn case(rows: &[usize], n: usize, k: usize, more: usize, bias: bool) -> Case {
    Case {
        rows: rows.to_vec(),
        n,
        k,
        more,
        bias,
        cancels: more == 0 && rows.len() > 2,
        workers: 1,
        seed: (n * 1009 + k) as u64,
    }
}

const ROUTES: [Route; 3] = [Route::Pull, Route::Push, Route::Store];

/// The kernels whose CTAs share K in so many parts: what they add up is of the same bits. Blocks are sent in one part
/// and in several.
fn configs_of_split(parts: usize) -> Vec<Option<Config>> {
    let kernels = configs_of_sums(Variant::Sums, Route::Pull, parts);
    let behind = kernels.clone().into_iter().take(2);
    let behind = behind.map(|config| config.with_product_first(true));
    let kernels = kernels.into_iter();
    let chunks = [(1, 2), (1, 1), (2, 4), (3, 2), (1, 3), (3, 1)];
    let chunked = kernels.zip(chunks.into_iter().cycle());
    let chunked = chunked.map(|(config, (count, last))| {
        let chunking = Chunking::new(count).with_last(last);
        Config::new(config.tile, chunking, Route::Pull)
    });
    chunked.chain(behind).map(Some).collect()
}

/// Those that do not share K.
fn configs() -> Vec<Option<Config>> {
    configs_of_split(1)
}

/// Blocks of several parts that are sent from the kernel that makes them.
fn sent_by(route: Route) -> Option<Config> {
    configs()[0].map(|config| config.with_route(route))
}

const SENT: [Route; 2] = [Route::Push, Route::Store];

/// Few rows, which are exchanged by the warps that make them.
fn exchanged(parts: usize) -> Vec<Option<Config>> {
    let kernels = configs_of_sums(Variant::LowLatency, Route::Store, parts);
    kernels.into_iter().map(Some).collect()
}

/// Partials that are stored after the product.
fn behind() -> Option<Config> {
    let config = configs().pop().flatten();
    config.map(|config| config.with_route(Route::Store))
}

/// All ways to send them. The first and the last kernel for few rows swap operands, or do not.
fn ways() -> [Option<Config>; 5] {
    let exchanged = exchanged(1);
    let [first, .., last] = exchanged[..] else {
        panic!("{exchanged:?}");
    };
    [
        sent_by(Route::Push),
        sent_by(Route::Store),
        first,
        last,
        behind(),
    ]
}

/// Rows that end within tiles and within what a warp stores, ranks without rows, columns of no whole tile.
fn cases() -> [Case; 5] {
    [
        case(&[150, 150, 150], 192, 256, 0, false),
        case(&[400, 300, 517], 520, 320, 64, true),
        case(&[170, 0, 233], 41, 130, 7, true),
        case(&[0, 0, 90], 5, 33, 64, true),
        case(&[1, 1, 1], 1, 1, 0, false),
    ]
}

fn partials_are_added_in_the_order_of_the_ranks(test: &str, configs: &[Option<Config>]) {
    let (cases, routes) = (&cases(), &ROUTES);
    reduce_scatter::partials_are_added_in_the_order_of_the_ranks::<Cuda>(
        test, 3, cases, configs, routes,
    );
}

#[test]
fn partials_are_added_in_the_order_of_the_ranks_whatever_comes_first() {
    let Some(_leave) = gpu() else { return };
    partials_are_added_in_the_order_of_the_ranks(test_name!(), &configs());
}

#[test]
fn partials_of_k_in_two_parts_are_added_in_the_order_of_the_ranks() {
    let Some(_leave) = gpu() else { return };
    partials_are_added_in_the_order_of_the_ranks(test_name!(), &configs_of_split(2));
}

#[test]
fn partials_of_k_in_four_parts_are_added_in_the_order_of_the_ranks() {
    let Some(_leave) = gpu() else { return };
    partials_are_added_in_the_order_of_the_ranks(test_name!(), &configs_of_split(4));
}

fn all_ranks_get_the_same_bits(test: &str, configs: &[Option<Config>]) {
    // Rows that ranks share are whole 16 bytes. Few are exchanged; of the long ones the owners send the sums on.
    let cases = cases().map(|case| Case {
        n: case.n.next_multiple_of(8),
        ..case
    });
    let long = |rows: &[usize]| Case {
        rows: rows.to_vec(),
        n: 1032,
        k: 64,
        ..cases[0].clone()
    };
    let long = [long(&[150, 150, 150]), long(&[300, 0, 177])];
    let cases = [&cases[..2], &long].concat();
    reduce_scatter::all_ranks_get_the_same_bits::<Cuda>(test, 3, &cases, configs, &ROUTES);
}

#[test]
fn an_all_reduce_gives_all_ranks_the_bits_of_the_sum_in_their_order() {
    let Some(_leave) = gpu() else { return };
    all_ranks_get_the_same_bits(test_name!(), &configs());
}

#[test]
fn an_all_reduce_of_k_in_four_parts_gives_all_ranks_the_same_bits() {
    let Some(_leave) = gpu() else { return };
    all_ranks_get_the_same_bits(test_name!(), &configs_of_split(4));
}

#[test]
fn sums_that_follow_one_another_at_once_are_right() {
    let Some(_leave) = gpu() else { return };
    all_done(ranks(test_name!(), 2, |rank| {
        let group = connect(rank, TIMEOUT)?;
        let cases = [
            case(&[150, 151], 72, 264, 0, true),
            case(&[0, 33], 520, 64, 8, false),
            case(&[640, 512], 1000, 128, 0, false),
            case(&[1, 0], 8, 8, 0, true),
        ];
        let mut expected = Vec::new();
        for case in &cases {
            let placed = &mut Placed::<Cuda, bf16>::new(&group, case)?;
            expected.push(placed.run(case, configs()[0])?);
        }
        let mut placed = Vec::new();
        for turn in 0..40 {
            placed.push(Placed::<Cuda, bf16>::new(
                &group,
                &cases[turn % cases.len()],
            )?);
        }
        for round in 0..5 {
            for placed in &mut placed {
                placed.poison()?;
            }
            for (turn, placed) in placed.iter_mut().enumerate() {
                let config = configs()[(turn / 4 + round) % configs().len()];
                let route = ROUTES[turn % 7 % 3];
                let config = config.map(|config| config.with_route(route));
                placed.enqueue(&cases[turn % cases.len()], config)?;
            }
            group.synchronize()?;
            for (turn, placed) in placed.iter().enumerate() {
                let expected = &expected[turn % cases.len()];
                assert_eq!(bits(&placed.out.to_vec()?), bits(expected), "{turn}");
            }
        }
        Ok("the same bits".into())
    }));
}

#[test]
fn sums_that_are_sent_are_right_across_the_refresh_of_the_flags() {
    let Some(_leave) = gpu() else { return };
    all_done(ranks(test_name!(), 2, |rank| {
        let builder = Group::<Cuda>::builder().timeout(TIMEOUT);
        let group =
            builder
                .first_epoch((1 << 28) - 6)
                .connect(rank.rank, rank.world, &rank.address)?;
        let case = case(&[150, 151], 72, 264, 0, true);
        let mut placed = Placed::<Cuda, bf16>::new(&group, &case)?;
        let expected = placed.run(&case, configs()[0])?;
        for turn in 0..12 {
            let found = placed.run(&case, ways()[turn / 2 % 5])?;
            assert_eq!(bits(&found), bits(&expected), "{turn}");
        }
        Ok("the same bits".into())
    }));
}

#[test]
fn random_problems_of_both_types_give_the_bits_of_the_plain_sum() {
    let Some(_leave) = gpu() else { return };
    all_done(ranks(test_name!(), 2, |rank| {
        let group = connect(rank, TIMEOUT)?;
        for seed in 0..30 {
            let mut rng = rng(seed);
            let mut row = || rng.random_range(0..600) * rng.random_range(0..2) + 1;
            let rows = vec![row(), row()];
            let case = Case {
                // Rows that ranks share are whole 16 bytes.
                n: rng.random_range(1..150) * 8,
                k: rng.random_range(1..500),
                more: rng.random_range(0..90),
                bias: rng.random_bool(0.5),
                workers: 1,
                rows,
                seed,
                ..Case::default()
            };
            let route = ROUTES[seed as usize % 3];
            let config =
                configs()[seed as usize % configs().len()].map(|config| config.with_route(route));
            let config = config.filter(|_| seed % 6 > 0);
            let address = format!("{}-{seed}", rank.address);
            match seed / 2 % 2 {
                0 => reduce_scatter::verify::<Cuda, bf16>(&group, &address, &case, config)?,
                _ => reduce_scatter::verify::<Cuda, f16>(&group, &address, &case, config)?,
            }
        }
        Ok("the same bits".into())
    }));
}

#[test]
fn the_bits_of_a_reduce_scatter_do_not_depend_on_the_split() {
    let Some(_leave) = gpu() else { return };
    let splits = [[140, 140, 140], [420, 0, 0], [0, 1, 419], [137, 150, 133]];
    reduce_scatter::bits_do_not_depend_on_the_split::<Cuda>(test_name!(), &splits, [40, 72], None);
}

#[test]
fn nor_do_those_of_one_that_is_sent_by_its_kernel() {
    let Some(_leave) = gpu() else { return };
    let splits = [[140, 140, 140], [420, 0, 0], [0, 1, 419], [137, 150, 133]];
    for route in SENT {
        let config = sent_by(route);
        let test = test_name!();
        reduce_scatter::bits_do_not_depend_on_the_split::<Cuda>(test, &splits, [40, 72], config);
    }
}

#[test]
fn the_output_of_a_reduce_scatter_may_be_the_own_rows_of_a_sharded_matrix() {
    let Some(_leave) = gpu() else { return };
    let configs = [None, sent_by(Route::Push), sent_by(Route::Store), behind()];
    reduce_scatter::the_output_may_be_the_own_rows_of_a_sharded_matrix::<Cuda>(
        test_name!(),
        &configs,
    );
}

#[test]
fn a_prepared_reduce_scatter_or_all_reduce_gives_the_bits_of_the_plain_one() {
    let Some(_leave) = gpu() else { return };
    reduce_scatter::a_prepared_call_gives_the_bits_of_the_plain_one::<Cuda>(
        test_name!(),
        &[None, sent_by(Route::Push), sent_by(Route::Store), behind()],
    );
}

#[test]
fn a_rank_killed_while_the_others_wait_for_its_partials_is_named_at_once() {
    let Some(_leave) = gpu_alone() else { return };
    reduce_scatter::kill_while_the_others_wait::<Cuda>(test_name!(), 1, None);
}

#[test]
fn so_is_one_whose_partials_would_be_pushed() {
    let Some(_leave) = gpu_alone() else { return };
    let config = sent_by(Route::Push);
    reduce_scatter::kill_while_the_others_wait::<Cuda>(test_name!(), 1, config);
}

#[test]
fn so_is_one_whose_partials_would_be_stored() {
    let Some(_leave) = gpu_alone() else { return };
    let config = sent_by(Route::Store);
    reduce_scatter::kill_while_the_others_wait::<Cuda>(test_name!(), 1, config);
}

#[test]
fn so_is_one_whose_partials_would_be_exchanged() {
    let Some(_leave) = gpu_alone() else { return };
    reduce_scatter::kill_while_the_others_wait::<Cuda>(test_name!(), 1, ways()[3]);
}

#[test]
fn so_is_one_whose_partials_would_be_stored_behind_its_product() {
    let Some(_leave) = gpu_alone() else { return };
    reduce_scatter::kill_while_the_others_wait::<Cuda>(test_name!(), 1, behind());
}

#[test]
fn few_rows_are_exchanged_by_each_kernel() {
    let Some(_leave) = gpu() else { return };
    all_done(ranks(test_name!(), 3, |rank| {
        let group = connect(rank, TIMEOUT)?;
        // Rows of one tile and of several, ranks without rows, columns of no whole tile.
        let cases = [
            case(&[1, 1, 1], 40, 1, 0, true),
            case(&[5, 0, 2], 520, 300, 64, true),
            case(&[30, 33, 1], 1000, 4100, 0, false),
            case(&[150, 0, 51], 264, 700, 8, true),
        ];
        let kernels = [1, 2, 4, 8].into_iter().flat_map(exchanged);
        for (index, config) in kernels.enumerate() {
            // Each height and each split meets each case.
            let case = &cases[(index + index / cases.len()) % cases.len()];
            let address = format!("{}-{index}", rank.address);
            // What cancels is too large for f16.
            match index % 2 == 0 || case.cancels {
                true => reduce_scatter::verify::<Cuda, bf16>(&group, &address, case, config)?,
                false => reduce_scatter::verify::<Cuda, f16>(&group, &address, case, config)?,
            }
        }
        Ok("the same bits".into())
    }));
}

#[test]
fn a_captured_reduce_scatter_gives_the_same_bits_at_each_replay() {
    let Some(_leave) = gpu() else { return };
    all_done(ranks(test_name!(), 2, |rank| {
        let group = connect(rank, TIMEOUT)?;
        let case = case(&[150, 151], 72, 264, 0, true);
        let mut placed = Placed::<Cuda, bf16>::new(&group, &case)?;
        let pulled = sent_by(Route::Pull);
        let expected = placed.run(&case, pulled)?;
        for way in ways() {
            placed.run(&case, way)?;
        }
        let replays = ways().map(|config| {
            Replay::capture(&group, GLOBAL, || placed.enqueue(&case, config).unwrap())
        });
        // It needs more partials than there are: those of the graph stay where they are.
        let large = Case {
            rows: vec![15_000, 15_500],
            ..case.clone()
        };
        Placed::<Cuda, bf16>::new(&group, &large)?.run(&large, ways()[0])?;
        for turn in 0..operations(2, 200, 50) {
            placed.poison()?;
            if turn % 7 == 0 {
                let live = [&[pulled], &ways()[..]].concat();
                placed.enqueue(&case, live[turn / 7 % live.len()])?;
                placed.poison()?;
            }
            replays[turn % replays.len()].launch();
            group.synchronize()?;
            assert_eq!(
                bits(&placed.out.to_vec()?),
                bits(&expected),
                "replay {turn}"
            );
        }
        Ok("the same bits".into())
    }));
}

/// The product first, then a gather of partials by graph words, then their sum: no kernel waits for another rank's.
#[test]
fn a_captured_reduce_scatter_by_pulls_gives_the_same_bits_at_each_replay() {
    let Some(_leave) = gpu() else { return };
    all_done(ranks(test_name!(), 2, |rank| {
        let group = connect(rank, TIMEOUT)?;
        let case = case(&[150, 151], 72, 264, 0, true);
        let mut placed = Placed::<Cuda, bf16>::new(&group, &case)?;
        let pulled = sent_by(Route::Pull);
        let expected = placed.run(&case, pulled)?;
        let replay = Replay::capture(&group, GLOBAL, || placed.enqueue(&case, pulled).unwrap());
        for turn in 0..operations(2, 100, 30) {
            placed.poison()?;
            if turn % 7 == 0 {
                placed.enqueue(&case, pulled)?;
                placed.poison()?;
            }
            replay.launch();
            group.synchronize()?;
            let found = placed.out.to_vec()?;
            assert_eq!(bits(&found), bits(&expected), "replay {turn}");
        }
        Ok("the same bits".into())
    }));
}

crate::support::shared::reduce_scatter_tests!(Cuda, gpu());
