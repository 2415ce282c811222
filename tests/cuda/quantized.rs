//! Products that quantise their results, by their kernel or after it.

use gemmesh::elements::WeightOf;
use gemmesh::error::Kind;
use gemmesh::tuning::{Chunking, Route};
use gemmesh::{
    AllGatherMatmul, Config, Cuda, DType, Error, F8E4M3, F8E5M2, Group, Matmul, bf16, f16,
};
use rand::RngExt;

use crate::support::errors::is_unsupported;
use crate::support::errors::parts_of;
use crate::support::gpu::*;
use crate::support::numbers::{normal, rng};
use crate::support::shared::quantized::Rule;
use crate::support::shared::quantized_products::{self, Case, Made};
use crate::test_name;

/// A product of any form.
fn case(turn: usize, config: Option<Config>) -> Case {
    let mut random = rng(turn as u64);
    let n = 16 * extent(&mut random, &[1, 8, 16, 17], 40);
    let gated = turn % 3 == 1;
    Case {
        m: extent(&mut random, &[1, 16, 64, 65, 128], 300),
        widths: match turn % 3 {
            1 => vec![n; 2],
            2 => vec![n, 16 * random.random_range(1..20)],
            _ => vec![n],
        },
        k: 16 * extent(&mut random, &[1, 8, 9, 40], 60),
        gated,
        plain: turn % 5 > 2,
        residual: turn % 3 != 2 && turn % 5 < 2,
        scaled: turn % 4 < 2,
        config,
    }
}

#[test]
fn every_kernel_quantises_its_results_or_they_are_quantised_behind_it() {
    let Some(_leave) = gpu() else { return };
    all_done(ranks(test_name!(), 1, |rank| {
        let group = connect(rank, TIMEOUT)?;
        let shapes = shapes_of([DType::F8E4M3; 2]);
        let count = shapes.len();
        let (mut made, mut refused) = (0, 0);
        for (turn, config) in shapes.iter().cycle().take(6 * count).enumerate() {
            let turn = turn + turn / count;
            let case = case(turn, Some(*config));
            let rules = [&Rule::ALL[..], &Rule::INSIDE].concat();
            let rule = rules[turn % rules.len()];
            let result = case.verify::<Cuda, F8E4M3, F8E4M3, bf16>(&group, rule, turn as u64);
            match result {
                Ok(_) => made += 1,
                // Narrow tiles are not gated, and slices of K use the memory of results.
                Err(error) if is_unsupported(&error) && case.gated => refused += 1,
                Err(error)
                    if matches!(error.kind(), Kind::Limit { .. }) && config.tile.k_slices > 1 =>
                {
                    refused += 1;
                }
                Err(error) => return Err(error),
            }
        }
        assert!(made > refused, "{made} {refused}");
        Ok(String::new())
    }));
}

#[test]
fn operands_of_every_type_have_quantised_products() {
    let Some(_leave) = gpu() else { return };
    all_done(ranks(test_name!(), 1, |rank| {
        let group = invariant(rank)?;
        let rules = [&Rule::ALL[..], &Rule::INSIDE].concat();
        for turn in 0..64 {
            let rule = rules[turn % rules.len()];
            let seed = 1000 + turn as u64;
            let case = case(turn, None);
            let plain = Case {
                scaled: false,
                ..case.clone()
            };
            case.verify::<Cuda, F8E4M3, F8E4M3, bf16>(&group, rule, seed)?;
            match turn % 4 {
                0 => case.verify::<Cuda, F8E4M3, F8E5M2, bf16>(&group, rule, seed)?,
                1 => case.verify::<Cuda, F8E5M2, F8E4M3, bf16>(&group, rule, seed)?,
                2 => plain.verify::<Cuda, bf16, bf16, bf16>(&group, rule, seed)?,
                _ => plain.verify::<Cuda, f16, f16, f16>(&group, rule, seed)?,
            }
        }
        Ok(String::new())
    }));
}

#[test]
fn gathers_quantise_their_products() {
    let Some(_leave) = gpu() else { return };
    // Three blocks, whose scales have a column after them.
    const K: usize = 384;
    quantized_products::gathers_quantise_their_products::<Cuda>(test_name!(), K, |group, seed| {
        let quantization = Rule::ALL[0].quantization();
        let can = |config: &Config| {
            let operation = Matmul::<_, F8E4M3>::new().quantization(quantization);
            let operation = operation.gated().config(*config);
            operation.supported(group, [70, K], 272).is_ok()
        };
        let shapes: Vec<Config> = shapes_of([DType::F8E4M3; 2])
            .into_iter()
            .filter(|config| config.tile.split_k == 1 && can(config))
            .collect();
        let tile = shapes[seed as usize % shapes.len()].tile;
        let route = ROUTES[seed as usize / 2 % ROUTES.len()];
        let chunking = Chunking::new(1 + seed as usize % 3);
        Ok(Config::new(tile, chunking, route))
    });
}

/// Captures a gather whose product is quantised, and replays it with other rows each time.
fn replay<T: WeightOf<T>>(group: &Group<Cuda>, config: Config) -> Result<(), Error> {
    let [m, n, k] = [150, 272, 384];
    let rule = Rule::ALL[0];
    let mut a = group.sharded::<T>(m, k)?;
    let own = a.rows();
    let b = group.upload(&normal::<T>(1, n * k), n, k)?;
    let mut made = Made::new(group, rule, m, &[n])?;
    let gather = || AllGatherMatmul::<Cuda, T>::new().config(config);
    let quantised = gather().quantization(rule.quantization());
    let prepared = quantised.prepare(&a, n)?;
    let replay = Replay::capture(group, GLOBAL, || {
        prepared.run(&a, &b, made.outputs()).unwrap();
    });
    let mut result = [group.zeros::<f32>(m, n)?];
    for turn in 0..20 {
        let rows = normal::<T>(2 + turn, m * k);
        a.shard_mut()
            .copy_from_host(&rows[own.start * k..own.end * k])?;
        replay.launch();
        group.synchronize()?;
        gather().run(&a, &b, &mut result[0])?;
        made.check(&result, &format!("turn {turn}, {config:?}"))?;
    }
    Ok(())
}

#[test]
fn captured_gathers_quantise_in_each_replay() {
    let Some(_leave) = gpu() else { return };
    all_done(ranks(test_name!(), 2, |rank| {
        let group = connect(rank, TIMEOUT)?;
        for (turn, [tile_m, tile_n]) in [[16, 128], [128, 256], [64, 64]].into_iter().enumerate() {
            let mut shapes = shapes_of([DType::F8E4M3; 2]).into_iter();
            let is_it = |config: &Config| {
                let tile = &config.tile;
                [tile.m, tile.n, tile.split_k] == [tile_m, tile_n, 1]
            };
            let tile = shapes.find(is_it).expect("there is one").tile;
            for route in [Route::Push, Route::Store] {
                replay::<F8E4M3>(&group, Config::new(tile, Chunking::new(1 + turn), route))?;
            }
        }
        // Kernels of 16 bits don't quantise, so another one does so after them.
        let tile = shapes_of([DType::Bf16; 2])[0].tile;
        replay::<bf16>(&group, Config::new(tile, Chunking::new(2), Route::Push))?;
        Ok(String::new())
    }));
}

#[test]
fn results_of_bf16_that_there_is_no_memory_for_are_refused() {
    let Some(_leave) = gpu() else { return };
    all_done(ranks(test_name!(), 1, |rank| {
        let group = connect(rank, TIMEOUT)?;
        let operation = Matmul::<Cuda, bf16>::new().quantization(Rule::ALL[0].quantization());
        operation.supported(&group, [2048, 64], 8192)?;
        match parts_of(&operation.supported(&group, [2049, 64], 8192)) {
            Some((_, Kind::Limit { what, max, .. })) => {
                assert!(what.contains("quantised behind"), "{what}");
                assert_eq!(*max, 2048 * 8192 * 4);
            }
            other => panic!("{other:?}"),
        }
        // Kernels of fp8 need none.
        let operation = Matmul::<Cuda, F8E4M3>::new().quantization(Rule::ALL[0].quantization());
        operation.supported(&group, [16384, 64], 8192)?;
        Ok(String::new())
    }));
}

crate::support::shared::on_backend! {
    Cuda, gpu();
    quantized_products {
        nan_and_large_results_are_quantised
        products_are_quantised_into_the_next_gathers_input
        prepared_products_quantise_as_they_were_prepared
        what_products_cannot_quantise_is_refused
    };
}
