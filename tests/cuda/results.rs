//! Every result is the one that float64 gives, within rounding, by each kernel and in each environment.

use gemmesh::elements::Half;
use gemmesh::tuning::Route;
use gemmesh::{AllGatherMatmul, Config, Cuda, Error, Group, bf16, f16};

use crate::support::gpu::*;
use crate::support::numbers::{bits, nan, normal, rng};
use crate::support::processes::Setting;
use crate::support::shared::{invariant, results};
use crate::test_name;

#[track_caller]
fn random_shapes(test: &str, world: usize, count: usize) {
    let ranks = ranks(test, world, |rank| {
        let group = connect(rank, TIMEOUT)?;
        let mut random = rng(world as u64);
        let mut worst = 0f64;
        for index in 0..count {
            let case = random_case(&mut random, world, index);
            let result = if index % 2 == 0 {
                case.verify::<_, bf16>(&group)
            } else {
                case.verify::<_, f16>(&group)
            };
            match result {
                Ok(error) => worst = worst.max(error),
                Err(what) => panic!("rank {}, case {index}, {case:?}: {what}", rank.rank),
            }
        }
        Ok(format!("{count} shapes, worst error {worst:.3} of allowed"))
    });
    all_done(ranks);
}

/// The product of one rank by a kernel.
fn product_by(
    group: &Group<Cuda>,
    config: Config,
    [a, b]: [&[bf16]; 2],
    [m, n, k]: [usize; 3],
) -> Result<Vec<bf16>, Error> {
    let mut sharded = group.sharded::<bf16>(m, k)?;
    sharded.shard_mut().copy_from_host(a)?;
    let weight = group.upload(b, n, k)?;
    let mut out = group.zeros::<bf16>(m, n)?;
    out.copy_from_host(&vec![nan(); m * n])?;
    let operation = AllGatherMatmul::new().config(config);
    operation.run(&sharded, &weight, &mut out)?;
    out.to_vec()
}

#[test]
fn a_rows_bits_do_not_depend_on_its_place_in_a_tile() {
    let Some(_leave) = gpu() else { return };
    const SHAPE: [usize; 3] = [300, 136, 1096];
    all_done(ranks(test_name!(), 1, |rank| {
        let group = connect(rank, TIMEOUT)?;
        let [m, n, k] = SHAPE;
        let (mut row, mut b) = (normal::<bf16>(1, k), normal::<bf16>(2, n * k));
        // What the first of four parts of K adds up to is large, and the third takes it away: another order of the
        // parts shows.
        let [first, third] = [0, 9 * 64];
        for column in 0..4 * 64 {
            row[first + column] *= bf16::from_f32(2f32.powi(20));
            row[third + column] = -row[first + column];
            b.chunks_exact_mut(k)
                .for_each(|b| b[third + column] = b[first + column]);
        }
        let a = row.repeat(m);
        for config in SHAPES.iter() {
            let config = config.with_route(Route::Pull);
            let out = product_by(&group, config, [&a, &b], SHAPE)?;
            for (row, values) in out.chunks_exact(n).enumerate() {
                assert!(bits(values) == bits(&out[..n]), "row {row}, {config:?}");
            }
        }
        Ok("the same".into())
    }));
}

#[test]
fn the_bits_of_a_product_depend_on_the_parts_of_k_and_not_on_the_tile() {
    let Some(_leave) = gpu() else { return };
    const SHAPE: [usize; 3] = [391, 272, 2056];
    all_done(ranks(test_name!(), 1, |rank| {
        let group = connect(rank, TIMEOUT)?;
        let [m, n, k] = SHAPE;
        let (a, b) = (normal::<bf16>(3, m * k), normal::<bf16>(4, n * k));
        let mut by_parts: Vec<(usize, Vec<bf16>)> = Vec::new();
        for config in SHAPES.iter() {
            let config = config.with_route(Route::Pull);
            let out = product_by(&group, config, [&a, &b], SHAPE)?;
            let parts = config.tile.split_k * config.tile.k_slices;
            match by_parts.iter().find(|(of, _)| *of == parts) {
                Some((_, same)) => assert!(bits(&out) == bits(same), "{config:?}"),
                None => by_parts.push((parts, out)),
            }
        }
        assert!(by_parts.len() < SHAPES.len());
        Ok(format!("{} kernels", SHAPES.len()))
    }));
}

#[test]
fn products_that_end_within_a_tile_have_the_bits_of_larger_ones() {
    let Some(_leave) = gpu() else { return };
    const K: usize = 328;
    all_done(ranks(test_name!(), 1, |rank| {
        let group = connect(rank, TIMEOUT)?;
        for config in SHAPES.iter() {
            let config = config.with_route(Route::Pull);
            let [high, wide] = [config.tile.m, config.tile.n];
            let [rows, entry] = [high * config.tile.cluster_m, wide * config.tile.cluster_n];
            let [m, n] = [3 * rows, 3 * entry];
            let (a, b) = (normal::<bf16>(5, m * K), normal::<bf16>(6, n * K));
            let nans = [vec![nan(); m * K], vec![nan(); n * K]];
            let whole = product_by(&group, config, [&a, &b], [m, n, K])?;
            for [within, columns] in [
                [1, 8],
                [high - 1, wide - 3],
                [rows + 1, entry + 1],
                [2 * rows + high / 2, 2 * entry + 9],
            ] {
                // Stages keep what they had where a tile has no rows. It must not reach any result.
                product_by(&group, config, [&nans[0], &nans[1]], [m, n, K])?;
                let operands = [&a[..within * K], &b[..columns * K]];
                let out = product_by(&group, config, operands, [within, columns, K])?;
                for (row, values) in out.chunks_exact(columns).enumerate() {
                    let same = &whole[row * n..][..columns];
                    let what = format!("row {row} of {within}x{columns}, {config:?}");
                    assert!(bits(values) == bits(same), "{what}");
                }
            }
        }
        Ok(format!("{} kernels", SHAPES.len()))
    }));
}

#[test]
fn random_shapes_are_right_on_1_rank() {
    if let Some(_leave) = gpu() {
        random_shapes(test_name!(), 1, 120);
    }
}

#[test]
fn random_shapes_are_right_on_2_ranks() {
    if let Some(_leave) = gpu() {
        random_shapes(test_name!(), 2, 120);
    }
}

#[test]
fn random_shapes_are_right_on_4_ranks() {
    if let Some(_leave) = gpu() {
        random_shapes(test_name!(), 4, 120);
    }
}

#[test]
fn random_shapes_are_right_on_8_ranks() {
    if let Some(_leave) = gpus(8) {
        random_shapes(test_name!(), 8, 120);
    }
}

/// NaN, infinities and, in f16, sums that are too large, with each kernel.
fn extremes<T: Half>(group: &Group<Cuda>) {
    for shape in 0..SHAPES.len() {
        let case = Case {
            rows: vec![97, 160],
            n: 131,
            k: 72,
            bias: true,
            config: Some(config(shape, 2, 3)),
            seed: shape as u64,
            ..Case::default()
        };
        let value = |x: f32| T::from_f32(x);
        let mut a = case.a::<T>();
        let (mut b, bias) = case.b::<T>(group.rank());
        let mut bias = bias.unwrap();
        let k = case.k;
        a[3 * k + 5] = nan();
        a[100 * k + 71] = value(f32::INFINITY);
        a[101 * k] = value(f32::NEG_INFINITY);
        a[256 * k + 8] = value(f32::INFINITY);
        a[200 * k..201 * k].fill(value(60000.0));
        b[7 * k + 71] = T::zeroed();
        b[130 * k + 8] = value(f32::NEG_INFINITY);
        b[64 * k + 1] = nan();
        b[9 * k..10 * k].fill(value(60000.0));
        bias[2] = value(f32::INFINITY);
        bias[129] = nan();
        if let Err(what) = case.verify_values(group, &a, &b, Some(&bias)) {
            panic!("{}, {case:?}, rank {}: {what}", T::DTYPE, group.rank());
        }
    }
}

#[test]
fn nan_and_infinity_come_out_where_they_must_and_nowhere_else() {
    let Some(_leave) = gpu() else { return };
    all_done(ranks(test_name!(), 2, |rank| {
        let group = connect(rank, TIMEOUT)?;
        extremes::<bf16>(&group);
        extremes::<f16>(&group);
        Ok("right".into())
    }));
}

/// One product for each kernel.
#[track_caller]
fn fused_is_gather_then_matmul(test: &str, world: usize) {
    let case = |shape: usize| {
        let mut rows = vec![150; world];
        rows[shape % world] = [0, 1, 128, 333][shape % 4];
        rows[0] += 1;
        Case {
            rows,
            n: 300 + shape,
            k: 264,
            bias: shape.is_multiple_of(2),
            config: Some(config(shape, 1 + shape, 1 + shape % 5)),
            seed: shape as u64,
            ..Case::default()
        }
    };
    let cases: Vec<Case> = (0..SHAPES.len()).map(case).collect();
    results::fused_is_gather_then_matmul::<Cuda>(test, world, &cases);
}

#[test]
fn under_random_delays_2_ranks_get_the_bits_of_gather_then_matmul_100_times() {
    if let Some(_leave) = gpu() {
        fused_is_gather_then_matmul(test_name!(), 2);
    }
}

#[test]
fn under_random_delays_4_ranks_get_the_bits_of_gather_then_matmul_100_times() {
    if let Some(_leave) = gpu() {
        fused_is_gather_then_matmul(test_name!(), 4);
    }
}

#[test]
fn the_first_operation_is_right_however_cuda_is_set_up() {
    let Some(_leave) = gpu() else { return };
    // The macro names the function that it stands in, which a closure is too.
    let name = test_name!();
    let mut combinations = Vec::new();
    for connections in ["1", "8", "32"] {
        for blocking in ["0", "1"] {
            for loading in ["LAZY", "EAGER"] {
                combinations.push([
                    ("CUDA_DEVICE_MAX_CONNECTIONS", connections),
                    ("CUDA_LAUNCH_BLOCKING", blocking),
                    ("CUDA_MODULE_LOADING", loading),
                ]);
            }
        }
    }
    for some in combinations.chunks(3) {
        let running: Vec<_> = some
            .iter()
            .map(|combination| {
                let variables = |_| combination.map(|(name, value)| (name, value.into())).into();
                let setting = Setting {
                    deadline: DEADLINE,
                    variables: &variables,
                    ..Setting::default()
                };
                let ranks = ranks_with(name, 2, &setting, |rank| {
                    let group = connect(rank, TIMEOUT)?;
                    Arguments::new(&group, 301, 72, 16)?.verify(&group)?;
                    Ok("right".into())
                });
                (combination, ranks)
            })
            .collect();
        for (combination, ranks) in running {
            println!("{combination:?}");
            all_done(ranks);
        }
    }
}

#[test]
fn a_sharded_matrix_serves_any_rows_within_its_capacity() {
    let Some(_leave) = gpu() else { return };
    results::rows_change_within_a_capacity::<Cuda>(test_name!());
}

#[test]
fn no_rows_are_nothing_to_do() {
    let Some(_leave) = gpu() else { return };
    results::no_rows_are_nothing_to_do::<Cuda>(test_name!());
}

#[test]
fn no_rows_have_scales() {
    let Some(_leave) = gpu() else { return };
    results::no_rows_have_scales::<Cuda>(test_name!());
}

#[test]
fn views_of_no_rows_are_operands() {
    let Some(_leave) = gpu() else { return };
    results::views_of_no_rows_are_operands::<Cuda>(test_name!());
}

#[test]
fn no_rows_on_one_rank_are_another_call() {
    let Some(_leave) = gpu() else { return };
    results::no_rows_on_one_rank_are_another_call::<Cuda>(test_name!());
}

#[test]
fn ranks_that_give_a_matrix_other_rows_are_told() {
    let Some(_leave) = gpu() else { return };
    results::other_rows_are_a_mismatch::<Cuda>(test_name!());
}

#[test]
fn where_that_is_asked_for_a_row_has_the_bits_that_it_has_in_any_batch() {
    let Some(_leave) = gpu() else { return };
    results::a_row_has_the_bits_that_it_has_in_any_batch::<Cuda>(test_name!());
}

#[test]
fn where_that_is_asked_for_an_element_has_the_bits_that_it_has_in_any_product() {
    let Some(_leave) = gpu() else { return };
    invariant::an_element_has_the_bits_that_it_has_in_any_product::<Cuda>(test_name!(), 1);
}

#[test]
fn so_it_has_on_2_ranks() {
    let Some(_leave) = gpu() else { return };
    invariant::an_element_has_the_bits_that_it_has_in_any_product::<Cuda>(test_name!(), 2);
}
