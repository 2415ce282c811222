//! Every result is the one that float64 gives, within rounding, whatever the shape, the split, the type, the way it
//! is cut up, and the order in which rows arrive.

use std::fmt;
use std::time::Duration;

use crate::support::errors::kind_of;
use crate::support::numbers::{Reference, bits, nan, normal, rng};
use crate::support::processes;
use crate::support::products::{Case, Placed};
use crate::support::shared::{invariant, results};
use crate::support::tested::Tested;
use crate::test_name;
use gemmesh::elements::{Element, Half, WeightOf};
use gemmesh::error::Kind;
use gemmesh::tuning::{Chunking, Route, TileShape};
use gemmesh::{
    AllGatherMatmul, Config, Error, F8E4M3, Group, Host, Matmul, all_gather_matmul, bf16, f16,
};
use rand::RngExt;

/// Rows are split evenly; one worker a rank; no bias.
fn even(world: usize, m: usize, n: usize, k: usize) -> Case {
    let split = |rank| m / world + usize::from(rank < m % world);
    Case {
        rows: (0..world).map(split).collect(),
        n,
        k,
        workers: 1,
        seed: (m * 1_000_003 + n * 1009 + k) as u64,
        ..Case::default()
    }
}

/// A case on the host, whose ranks are threads.
trait OnThreads {
    /// Checks everything on every rank.
    fn verify_on_threads<T: Half>(&self);
    /// As [`OnThreads::verify_on_threads`], with an N for each rank.
    fn verify_with<T: Half>(&self, n: &[usize]);
}

impl OnThreads for Case {
    #[track_caller]
    fn verify_on_threads<T: Half>(&self) {
        self.verify_with::<T>(&vec![self.n; self.rows.len()]);
    }

    #[track_caller]
    fn verify_with<T: Half>(&self, n: &[usize]) {
        let worst = Group::<Host>::builder()
            .workers(self.workers)
            .timeout(Host::TIMEOUT)
            .threads(self.rows.len(), |group| {
                let mine = Case {
                    n: n[group.rank()],
                    ..self.clone()
                };
                let worst = mine.verify::<_, T>(&group);
                worst
                    .map_err(|what| Failure(format!("{}, rank {}: {what}", T::DTYPE, group.rank())))
            });
        if let Err(Failure(what)) = worst {
            panic!("{self:?}, N of each rank = {n:?}: {what}");
        }
    }
}

/// For `threads`, whose errors may also be the library's.
#[derive(Debug)]
struct Failure(String);

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure(error.to_string())
    }
}

impl From<String> for Failure {
    fn from(what: String) -> Failure {
        Failure(what)
    }
}

/// Every other one is pushed.
fn route(seed: u64) -> Route {
    [Route::Pull, Route::Push][seed as usize / 2 % 2]
}

fn config(tile_m: usize, tile_n: usize, tile_k: usize, group_m: usize, chunks: usize) -> Config {
    Config::new(
        TileShape::new(tile_m, tile_n, tile_k).with_group_m(group_m),
        Chunking::new(chunks).with_cut_last(!chunks.is_multiple_of(2)),
        Route::Pull,
    )
}

#[test]
fn the_bound_refuses_what_is_wrong() {
    let (a, b) = (normal::<bf16>(1, 6 * 40), normal::<bf16>(2, 5 * 40));
    let reference = Reference::new(&a, &b, None, 40);
    let exact: Vec<bf16> = a
        .chunks(40)
        .flat_map(|row| {
            b.chunks(40).map(move |weights| {
                let terms = row.iter().zip(weights);
                bf16::from_f64(terms.map(|(a, b)| a.to_f64() * b.to_f64()).sum())
            })
        })
        .collect();
    assert!(reference.check(&exact).unwrap() <= 1.0);
    for (index, value) in exact.iter().enumerate() {
        let neighbours = [value.to_bits() + 1, value.to_bits() - 1].map(bf16::from_bits);
        for wrong in neighbours
            .into_iter()
            .chain([bf16::NAN, bf16::INFINITY, -*value])
        {
            let mut out = exact.clone();
            out[index] = wrong;
            assert!(reference.check(&out).is_err(), "{wrong} for {value}");
        }
    }
}

#[test]
fn small_and_prime_shapes_of_any_split_are_right() {
    for world in 1..=5 {
        for (m, n, k) in [
            (1, 1, 1),
            (1, 7, 3),
            (2, 1, 13),
            (3, 2, 1),
            (world, 3, 2),
            (world + 1, 17, 31),
            (37, 41, 43),
        ] {
            let case = even(world, m, n, k);
            case.verify_on_threads::<bf16>();
            case.verify_on_threads::<f16>();
        }
    }
}

#[test]
fn shapes_around_the_default_tile_are_right() {
    for (m, n, k) in [
        (127, 255, 511),
        (128, 256, 512),
        (129, 257, 513),
        (129, 255, 1025),
        (255, 257, 64),
        (257, 513, 7),
    ] {
        Case {
            workers: 2,
            ..even(3, m, n, k)
        }
        .verify_on_threads::<bf16>();
    }
}

#[test]
fn shapes_around_any_tile_are_right() {
    let config = Some(config(16, 24, 20, 2, 3));
    for m in [15, 16, 17, 31, 33, 64] {
        for n in [23, 24, 25, 48] {
            for k in [19, 20, 21, 40] {
                Case {
                    config,
                    ..even(2, m, n, k)
                }
                .verify_on_threads::<f16>();
            }
        }
    }
}

#[test]
fn uneven_rows_and_ranks_without_rows_are_right() {
    let splits: [&[usize]; 8] = [
        &[0, 5],
        &[7, 0],
        &[0, 0, 1],
        &[1, 0, 0, 0],
        &[0, 33, 0, 2],
        &[100, 1, 1, 1],
        &[5, 16, 17, 15],
        &[3, 0, 50, 0, 9],
    ];
    for (seed, rows) in splits.into_iter().enumerate() {
        for chunks in [1, 4] {
            let case = Case {
                rows: rows.into(),
                n: 29,
                k: 23,
                bias: true,
                config: Some(config(16, 16, 16, 3, chunks)),
                workers: 2,
                seed: seed as u64,
                ..Case::default()
            };
            case.verify_on_threads::<bf16>();
            case.verify_on_threads::<f16>();
        }
    }
}

#[test]
fn random_problems_cut_up_at_random_are_right() {
    for seed in 0..120 {
        let mut rng = rng(seed);
        let world = rng.random_range(1..=6);
        let row = |rng: &mut rand::rngs::StdRng| match rng.random_range(0..5) {
            0 => 0,
            1 => rng.random_range(1..4),
            _ => rng.random_range(1..40),
        };
        let mut rows: Vec<usize> = (0..world).map(|_| row(&mut rng)).collect();
        rows[rng.random_range(0..world)] += 1;
        let case = Case {
            rows,
            n: rng.random_range(1..70),
            k: rng.random_range(1..150),
            bias: rng.random_bool(0.5),
            config: rng.random_bool(0.8).then(|| {
                config(
                    rng.random_range(1..50),
                    rng.random_range(1..50),
                    rng.random_range(1..170),
                    rng.random_range(1..6),
                    rng.random_range(1..9),
                )
                .with_route(route(seed))
            }),
            workers: rng.random_range(1..=3),
            seed,
            ..Case::default()
        };
        match seed % 2 {
            0 => case.verify_on_threads::<bf16>(),
            _ => case.verify_on_threads::<f16>(),
        }
    }
}

#[test]
fn ranks_may_have_different_n_whoever_moves_the_rows() {
    for seed in 0..60 {
        let mut rng = rng(seed);
        let world = rng.random_range(2..=5);
        let n: Vec<usize> = (0..world).map(|_| rng.random_range(1..70)).collect();
        let routes = [Route::Pull, Route::Push, Route::Store];
        let case = Case {
            bias: rng.random_bool(0.5),
            config: rng.random_bool(0.8).then(|| {
                config(
                    rng.random_range(1..50),
                    rng.random_range(1..50),
                    rng.random_range(1..170),
                    rng.random_range(1..6),
                    rng.random_range(1..9),
                )
                .with_route(routes[seed as usize % 3])
            }),
            workers: rng.random_range(1..=2),
            seed,
            ..even(world, rng.random_range(1..90), 1, rng.random_range(1..150))
        };
        case.verify_with::<bf16>(&n);
    }
}

#[test]
fn ranks_may_have_different_n_and_tiles_of_different_columns() {
    for route in [Route::Pull, Route::Push, Route::Store] {
        Group::<Host>::builder()
            .threads(3, |group| {
                let rank = group.rank();
                let case = Case {
                    n: [3, 70, 31][rank],
                    config: Some(
                        config(16, [8, 64, 16][rank], [16, 48, 32][rank], rank + 1, 2)
                            .with_route(route),
                    ),
                    ..even(3, 100, 1, 60)
                };
                let (b, bias) = case.b::<f16>(rank);
                let worst = case.verify_values(&group, &case.a::<f16>(), &b, bias.as_deref());
                worst.map_err(Failure)
            })
            .unwrap();
    }
}

#[test]
fn a_bias_is_added_before_the_one_rounding() {
    // 1 + 2⁻⁸ is half way between two bf16 numbers; with 2⁻⁹ more, it is nearer to the upper. Rounding
    // twice would lose that.
    Group::<Host>::threads(2, |group| {
        let mut a = group.sharded::<bf16>(2, 2)?;
        a.shard_mut().copy_from_host(&[bf16::ONE, bf16::ONE])?;
        let small = |exponent| bf16::from_f32(2f32.powi(exponent));
        let b = group.upload(&[bf16::ONE, small(-8)], 1, 2)?;
        let bias = group.upload(&[small(-9)], 1, 1)?;
        let mut out = group.zeros::<bf16>(2, 1)?;
        AllGatherMatmul::new().bias(&bias).run(&a, &b, &mut out)?;
        assert_eq!(out.to_vec()?, [bf16::from_f32(1.0 + 2f32.powi(-7)); 2]);
        Ok::<(), Error>(())
    })
    .unwrap();
}

#[test]
fn nan_and_infinity_are_exactly_where_the_reference_has_them() {
    fn verify<T: Half>() {
        for seed in 0..12 {
            let case = Case {
                bias: seed % 2 == 0,
                config: Some(config(16, 16, 16, 2, 2)),
                workers: 2,
                seed,
                ..even(3, 50, 37, 45)
            };
            let mut random = rng(seed);
            let mut plant = |values: &mut [T], count: usize| {
                for _ in 0..count {
                    let specials = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0];
                    let special = specials[random.random_range(0..specials.len())];
                    values[random.random_range(0..values.len())] = T::from_f32(special);
                }
            };
            let mut a = case.a::<T>();
            plant(&mut a, 8);
            let mut weights: Vec<_> = (0..3).map(|rank| case.b::<T>(rank)).collect();
            for (b, bias) in &mut weights {
                plant(b, 5);
                if let Some(bias) = bias {
                    plant(bias, 3);
                }
            }
            Group::<Host>::builder()
                .workers(case.workers)
                .threads(3, |group| {
                    let (b, bias) = &weights[group.rank()];
                    let worst = case.verify_values(&group, &a, b, bias.as_deref());
                    worst.map_err(Failure)
                })
                .unwrap_or_else(|Failure(what)| panic!("{} seed {seed}: {what}", T::DTYPE));
        }
    }
    verify::<bf16>();
    verify::<f16>();
}

#[test]
fn sums_beyond_the_largest_number_become_infinite() {
    // 2 · 32760 = 65520 is the least that f16 rounds to infinity; 2 · 32752 = 65504 is its largest number.
    Group::<Host>::threads(2, |group| {
        let mut a = group.sharded::<f16>(4, 2)?;
        let large = [[1.0, 1.0], [-1.0, -1.0]].concat();
        a.shard_mut()
            .copy_from_host(&large.into_iter().map(f16::from_f32).collect::<Vec<_>>())?;
        let b = [32752.0, 32752.0, 32768.0, 32752.0];
        let b = group.upload(&b.map(f16::from_f32), 2, 2)?;
        let mut out = group.zeros::<f16>(4, 2)?;
        all_gather_matmul(&a, &b, &mut out)?;
        let row = [f16::MAX, f16::INFINITY];
        let below = [f16::MIN, f16::NEG_INFINITY];
        assert_eq!(out.to_vec()?, [row, below, row, below].concat());
        Ok::<(), Error>(())
    })
    .unwrap();
}

#[test]
fn a_hundred_orders_of_arrival_give_the_same_bits_as_gathering_first() {
    let case = Case {
        rows: vec![33, 0, 47, 20],
        n: 50,
        k: 70,
        bias: true,
        config: Some(config(16, 16, 32, 2, 4)),
        workers: 2,
        seed: 7,
        ..Case::default()
    };
    results::fused_is_gather_then_matmul::<Host>(test_name!(), 4, &[case]);
}

#[test]
fn many_more_ranks_than_cores_with_one_worker_each_are_right() {
    Case {
        config: Some(config(8, 16, 16, 2, 2)),
        ..even(16, 130, 33, 40)
    }
    .verify_on_threads::<bf16>();
    Case {
        config: Some(config(8, 8, 16, 2, 2)),
        ..even(33, 40, 9, 5)
    }
    .verify_on_threads::<f16>();
}

#[test]
fn many_more_workers_than_tiles_are_right() {
    Case {
        workers: 9,
        ..even(2, 20, 9, 30)
    }
    .verify_on_threads::<f16>();
}

#[test]
fn ranks_as_processes_are_right() {
    let ranks = processes::group(test_name!(), 4, |me| {
        let group = me.connect(Host::TIMEOUT)?;
        let mut worst = 0.0f64;
        for (rows, bias) in [
            (vec![30, 31, 0, 29], true),
            (vec![1, 0, 0, 1], false),
            (vec![17, 17, 17, 16], true),
        ] {
            let case = Case {
                rows,
                n: 45,
                k: 101,
                bias,
                config: Some(config(16, 32, 48, 2, 3)),
                workers: 1,
                seed: 5,
                ..Case::default()
            };
            let found = [
                case.verify::<_, bf16>(&group),
                case.verify::<_, f16>(&group),
            ];
            for found in found {
                worst = worst.max(found.unwrap_or_else(|what| panic!("{case:?}: {what}")));
            }
        }
        Ok(worst.to_string())
    });
    for outcome in ranks.outcomes() {
        let worst: f64 = outcome.value().parse().unwrap();
        assert!(worst > 0.0 && worst <= 1.0, "{worst}");
    }
}

#[test]
fn own_rows_may_be_overwritten_after_each_operation() {
    let case = even(3, 40, 11, 20);
    Group::<Host>::threads(3, |group| {
        let (b, _) = case.b::<bf16>(group.rank());
        let first = case.a::<bf16>();
        let mut placed = Placed::new(&group, &case, &first, &b, None)?;
        let own = placed.a.rows();
        let own = own.start * case.k..own.end * case.k;
        for seed in 0..50 {
            let a = normal::<bf16>(seed, case.m() * case.k);
            placed.a.shard_mut().copy_from_host(&a[own.clone()])?;
            placed.poison()?;
            placed.fused(None)?;
            // At once, while slower ranks may still be at it.
            placed
                .a
                .shard_mut()
                .copy_from_host(&vec![nan(); own.len()])?;
            let out = placed.out.to_vec()?;
            Reference::new(&a, &b, None, case.k).check(&out)?;
        }
        Ok::<(), Failure>(())
    })
    .unwrap();
}

// Arguments that don't fit.

#[test]
fn arguments_of_another_shape_are_refused_with_nothing_done() {
    Group::<Host>::threads(2, |group| {
        let case = even(2, 12, 6, 5);
        let a = case.a::<bf16>();
        let (b, _) = case.b::<bf16>(group.rank());
        let mut placed = Placed::new(&group, &case, &a, &b, None)?;
        placed.poison()?;
        let untouched = placed.read()?;
        // Only one rank makes the mistakes; the others must not notice.
        if group.rank() == 1 {
            operands_of_another_shape_are_refused(&group, &placed, &untouched.1)?;
            values_of_another_number_are_refused(&group, &mut placed)?;
            let chunks = AllGatherMatmul::new().config(config(8, 8, 8, 1, 65));
            let result = chunks.run(&placed.a, &placed.b, &mut placed.out);
            assert!(matches!(kind_of(&result), Some(Kind::Limit { .. })));
            assert_eq!(bits(&placed.a.to_vec()?), bits(&untouched.0));
        }
        placed.fused(None)?;
        let (_, out) = placed.read()?;
        Reference::new(&a, &b, None, case.k).check(&out)?;
        Ok::<(), Failure>(())
    })
    .unwrap();
}

/// By rank 1, whose output stays as it was.
fn operands_of_another_shape_are_refused(
    group: &Group<Host>,
    placed: &Placed<Host, bf16>,
    untouched: &[bf16],
) -> Result<(), Error> {
    let prepared = AllGatherMatmul::new().prepare(&placed.a, 6)?;
    let shape = |result: Result<(), Error>, name: &str, must: &[usize], is: &[usize]| {
        let (call, argument) = name.split_once(": ").unwrap();
        let expected = Kind::Shape {
            argument: argument.into(),
            expected: must.into(),
            found: is.into(),
        }
        .on(1)
        .in_call(call.into());
        assert_eq!(result, Err(expected));
        assert_eq!(bits(&placed.out.to_vec()?), bits(untouched));
        Ok::<(), Error>(())
    };
    let mut out = group.zeros::<bf16>(12, 6)?;
    let other = group.zeros::<bf16>(7, 5)?;
    let result = prepared.run(&placed.a, &other, &mut out);
    shape(result, "all_gather_matmul: b [N, K]", &[6, 5], &[7, 5])?;
    let result = prepared.matmul(&placed.a, &other, &mut out);
    shape(result, "matmul: b [N, K]", &[6, 5], &[7, 5])?;
    let transposed = group.zeros::<bf16>(5, 6)?;
    let result = prepared.run(&placed.a, &transposed, &mut out);
    shape(result, "all_gather_matmul: b [N, K]", &[6, 5], &[5, 6])?;
    for (rows, columns) in [(11, 6), (12, 7), (6, 12)] {
        let mut other = group.zeros::<bf16>(rows, columns)?;
        let result = all_gather_matmul(&placed.a, &placed.b, &mut other);
        shape(
            result,
            "all_gather_matmul: out [M, N]",
            &[12, 6],
            &[rows, columns],
        )?;
    }
    let bias = group.zeros::<bf16>(6, 1)?;
    let biased = AllGatherMatmul::new().bias(&bias);
    let result = biased.run(&placed.a, &placed.b, &mut out);
    shape(result, "all_gather_matmul: bias [1, N]", &[1, 6], &[6, 1])?;
    let result = biased.prepare(&placed.a, 6).map(drop);
    shape(result, "all_gather_matmul: bias [1, N]", &[1, 6], &[6, 1])
}

fn values_of_another_number_are_refused(
    group: &Group<Host>,
    placed: &mut Placed<Host, bf16>,
) -> Result<(), Error> {
    let short = vec![bf16::ONE; 11];
    let result = placed.b.copy_from_host(&short);
    assert!(matches!(kind_of(&result), Some(Kind::Unsuitable { .. })));
    let result = placed.a.shard_mut().copy_from_host(&short);
    assert!(matches!(kind_of(&result), Some(Kind::Unsuitable { .. })));
    let result = group.upload(&short, 3, 4);
    assert!(matches!(kind_of(&result), Some(Kind::Unsuitable { .. })));
    let result = group.sharded_rows::<bf16>(&[12], 5);
    assert!(matches!(kind_of(&result), Some(Kind::Unsuitable { .. })));
    Ok(())
}

#[test]
fn a_matrix_split_in_another_way_is_refused_by_a_prepared_product() {
    Group::<Host>::threads(2, |group| {
        let even = group.sharded::<bf16>(12, 5)?;
        let uneven = group.sharded_rows::<bf16>(&[4, 8], 5)?;
        let longer = group.sharded::<bf16>(13, 5)?;
        let b = group.zeros::<bf16>(6, 5)?;
        let mut out = group.zeros::<bf16>(12, 6)?;
        let prepared = AllGatherMatmul::new().prepare(&even, 6)?;
        for other in [&uneven, &longer] {
            let result = prepared.run(other, &b, &mut out);
            assert!(
                matches!(kind_of(&result), Some(Kind::Shape { .. })),
                "{result:?}"
            );
            let result = prepared.gather(other);
            assert!(
                matches!(kind_of(&result), Some(Kind::Shape { .. })),
                "{result:?}"
            );
        }
        prepared.run(&even, &b, &mut out)
    })
    .unwrap();
}

/// That a call was refused because `argument` belongs to a different group.
#[track_caller]
fn assert_foreign(result: &Result<(), Error>, rank: usize, call: &str, argument: &str) {
    let error = result.as_ref().unwrap_err();
    let Kind::Unsuitable { what, .. } = error.kind() else {
        panic!("{error}");
    };
    assert_eq!(*what, format!("the group of {argument}"));
    let its = error.call().map(|call| call.name());
    assert_eq!((error.rank(), its), (Some(rank), Some(call)));
}

#[test]
fn arguments_of_another_group_are_refused_with_nothing_done() {
    Group::<Host>::threads(2, |group| {
        let foreign = |result: Result<(), Error>, name: &str| {
            assert_foreign(&result, group.rank(), "all_gather_matmul", name);
        };
        let address = format!("foreign-{}-{}", std::process::id(), group.rank());
        let other = Group::<Host>::connect(0, 1, &address)?;
        let a = group.sharded::<bf16>(12, 5)?;
        let b = group.zeros::<bf16>(6, 5)?;
        let mut out = group.zeros::<bf16>(12, 6)?;
        if group.rank() == 0 {
            let b2 = other.zeros::<bf16>(6, 5)?;
            let bias2 = other.zeros::<bf16>(1, 6)?;
            let mut out2 = other.zeros::<bf16>(12, 6)?;
            foreign(all_gather_matmul(&a, &b2, &mut out), "b");
            foreign(all_gather_matmul(&a, &b, &mut out2), "out");
            let biased = AllGatherMatmul::new().bias(&bias2);
            foreign(biased.run(&a, &b, &mut out), "bias");
            foreign(biased.prepare(&a, 6).map(drop), "bias");
        }
        all_gather_matmul(&a, &b, &mut out)
    })
    .unwrap();
}

#[test]
fn a_product_prepared_on_another_rank_or_in_another_group_is_refused() {
    // Ranks can be threads, so one can get hold of another's plan.
    let handed = std::sync::Mutex::new(None);
    const PRODUCT: &str = "all_gather_matmul";
    Group::<Host>::threads(2, |group| {
        let a = group.sharded::<bf16>(12, 5)?;
        let b = group.zeros::<bf16>(6, 5)?;
        let mut out = group.zeros::<bf16>(12, 6)?;
        let mine = AllGatherMatmul::new().prepare(&a, 6)?;
        if group.rank() == 0 {
            *handed.lock().unwrap() = Some(mine.clone());
        }
        group.barrier()?;
        if group.rank() == 1 {
            let theirs = handed.lock().unwrap().take().unwrap();
            let result = theirs.run(&a, &b, &mut out);
            assert_foreign(&result, 1, PRODUCT, "the prepared product");
        }
        // A rank of another group has the same number and the same plan.
        let address = format!("other-{}", std::process::id());
        let other = Group::<Host>::connect(group.rank(), 2, &address)?;
        let twin = other.sharded::<bf16>(12, 5)?;
        let theirs = AllGatherMatmul::new().prepare(&twin, 6)?;
        let rank = group.rank();
        assert_foreign(
            &theirs.run(&a, &b, &mut out),
            rank,
            PRODUCT,
            "the prepared product",
        );
        assert_foreign(
            &theirs.matmul(&a, &b, &mut out),
            rank,
            "matmul",
            "the prepared product",
        );
        assert_foreign(&theirs.gather(&a), rank, "gather", "the prepared product");
        mine.run(&a, &b, &mut out)
    })
    .unwrap();
}

#[test]
fn a_sharded_matrix_serves_any_rows_within_its_capacity() {
    results::rows_change_within_a_capacity::<Host>(test_name!());
}

#[test]
fn no_rows_are_nothing_to_do() {
    results::no_rows_are_nothing_to_do::<Host>(test_name!());
}

#[test]
fn no_rows_have_scales() {
    results::no_rows_have_scales::<Host>(test_name!());
}

#[test]
fn views_of_no_rows_are_operands() {
    results::views_of_no_rows_are_operands::<Host>(test_name!());
}

#[test]
fn no_rows_on_one_rank_are_another_call() {
    results::no_rows_on_one_rank_are_another_call::<Host>(test_name!());
}

#[test]
fn ranks_that_give_a_matrix_other_rows_are_told() {
    results::other_rows_are_a_mismatch::<Host>(test_name!());
}

#[test]
fn where_that_is_asked_for_a_row_has_the_bits_that_it_has_in_any_batch() {
    results::a_row_has_the_bits_that_it_has_in_any_batch::<Host>(test_name!());
}

#[test]
fn where_that_is_asked_for_an_element_has_the_bits_that_it_has_in_any_product() {
    invariant::an_element_has_the_bits_that_it_has_in_any_product::<Host>(test_name!(), 1);
}

#[test]
fn so_it_has_on_2_ranks() {
    invariant::an_element_has_the_bits_that_it_has_in_any_product::<Host>(test_name!(), 2);
}

#[test]
fn so_it_has_on_3_ranks() {
    invariant::an_element_has_the_bits_that_it_has_in_any_product::<Host>(test_name!(), 3);
}

#[test]
fn an_elements_bits_do_not_depend_on_its_tile() {
    fn verify<T: Element + WeightOf<T>>(n: usize, tiles: [[usize; 2]; 4]) -> Result<(), Error> {
        const M: usize = 33;
        const K: usize = 592;
        let group = Group::<Host>::connect(0, 1, &format!("tiles-{}", std::process::id()))?;
        let a = group.upload(&normal::<T>(1, M * K), M, K)?;
        let b = group.upload(&normal::<T>(2, n * K), n, K)?;
        let mut out = group.zeros::<f32>(M, n)?;
        Matmul::new().run(&a, &b, &mut out)?;
        let expected = out.to_vec()?;
        for [tile_m, tile_n] in tiles {
            let config = config(tile_m, tile_n, 512, 1, 1);
            Matmul::new().config(config).run(&a, &b, &mut out)?;
            let found = out.to_vec()?;
            let mut both = found.iter().zip(&expected);
            let is_same = both.all(|(found, expected)| found.to_bits() == expected.to_bits());
            assert!(is_same, "{}, tiles of {tile_n} columns", T::DTYPE);
        }
        Ok(())
    }
    let tiles = [[1, 1], [16, 15], [5, 47], [32, 31]];
    verify::<f16>(48, tiles).unwrap();
    verify::<bf16>(48, tiles).unwrap();
    verify::<F8E4M3>(48, tiles).unwrap();
}

#[test]
fn copies_keep_to_a_stated_speed_and_bring_the_same() {
    const SPEED: usize = 100_000_000;
    let case = even(2, 512, 8, 4096);
    let took = Group::<Host>::builder()
        .workers(1)
        .link(SPEED)
        .threads(2, |group| {
            let begin = std::time::Instant::now();
            case.verify::<_, bf16>(&group).unwrap();
            Ok::<_, Error>(begin.elapsed())
        })
        .unwrap();
    // Half of the rows come from the other rank.
    let bytes = 256 * 4096 * 2;
    let least = Duration::from_secs_f64(bytes as f64 / SPEED as f64);
    assert!(took.iter().all(|took| *took >= least), "{took:?}");
    let refused = Group::<Host>::builder().link(0).threads(2, |_| Ok(()));
    assert!(
        matches!(
            kind_of(&refused),
            Some(Kind::Limit {
                value: 0,
                min: 1,
                ..
            })
        ),
        "{refused:?}"
    );
}
