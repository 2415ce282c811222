//! Products of fp8, on the host.

use crate::support::numbers::normal;
use crate::support::shared::{fp8, quantized_products};
use crate::test_name;
use gemmesh::fp8::{Accumulation, Scales, Scaling};
use gemmesh::pipelines::AllGatherAndConsume;
use gemmesh::tuning::{Chunking, Route, TileShape};
use gemmesh::{Config, Error, F8E4M3, Group, Host, Matmul, all_gather_matmul, bf16};

const ROUTES: [Route; 3] = [Route::Pull, Route::Push, Route::Store];

/// A gather's configuration, by each route.
pub fn gather(seed: u64) -> Config {
    let chunks = 1 + seed as usize % 4;
    let chunking = Chunking::new(chunks).with_cut_last(chunks.is_multiple_of(2));
    let tile = TileShape::new(16, 16, 64).with_group_m(2);
    Config::new(tile, chunking, ROUTES[seed as usize / 4 % 3])
}

/// As [`gather`], with tiles that hold whole blocks of 128 columns, also those of a gated product.
fn whole_blocks(seed: u64) -> Config {
    let mut config = gather(seed);
    config.tile = TileShape::new(16, 256, 64).with_group_m(2);
    config
}

fn sums() -> Vec<Config> {
    let of = |tile| move |route| Config::new(tile, Chunking::new(2), route);
    let low = ROUTES.map(of(TileShape::new(16, 32, 64)));
    let high = ROUTES.map(of(TileShape::new(96, 48, 64)));
    let behind = high[2].with_product_first(true);
    low.into_iter().chain(high).chain([behind]).collect()
}

#[test]
fn scales_arrive_with_their_rows() {
    fp8::scales_arrive_with_their_rows::<Host>(test_name!(), gather);
}

#[test]
fn gathers_quantise_their_products() {
    quantized_products::gathers_quantise_their_products::<Host>(test_name!(), 144, |_, seed| {
        Ok(whole_blocks(seed))
    });
}

#[test]
fn sums_of_fp8_have_the_bits_of_their_partials() {
    fp8::sums_of_fp8_have_the_bits_of_their_partials::<Host>(test_name!(), sums);
}

/// Each chunk of rows is multiplied when it has come, in a group of this rank alone.
#[test]
fn chunks_of_fp8_are_multiplied_as_they_come() {
    const M: usize = 50;
    const N: usize = 16;
    const K: usize = 144;
    let rank = |group: Group<Host>| {
        let alone = group.split(group.rank(), 0)?;
        let rows: Vec<F8E4M3> = normal(1, M * K);
        let mut a = group.sharded::<F8E4M3>(M, K)?;
        let own = a.rows();
        a.shard_mut()
            .copy_from_host(&rows[own.start * K..own.end * K])?;
        let weight = normal::<F8E4M3>(2, N * K);
        let b = alone.upload(&weight, N, K)?;
        let mut out = alone.zeros::<bf16>(M, N)?;
        AllGatherAndConsume::new().chunks(3).run(&a, |chunk| {
            let [count, _] = chunk.shape();
            let values = alone.upload(chunk.values(), count, K)?;
            let out = out.view_mut().rows(chunk.rows())?;
            Matmul::new().run(&values, &b, out)?;
            Ok(())
        })?;
        let mut expected = group.zeros::<bf16>(M, N)?;
        all_gather_matmul(&a, &group.upload(&weight, N, K)?, &mut expected)?;
        assert_eq!(out.to_vec()?, expected.to_vec()?);
        Ok::<_, Error>(())
    };
    Group::threads(3, rank).unwrap();
}

/// The host has no accumulators of fewer bits.
#[test]
fn fast_sums_have_the_bits_of_promoted_ones() {
    const SHAPE: [usize; 3] = [5, 16, 400];
    let rank = |group: Group<Host>| {
        let [m, n, k] = SHAPE;
        let a = group.upload(&normal::<F8E4M3>(1, m * k), m, k)?;
        let b = group.upload(&normal::<F8E4M3>(2, n * k), n, k)?;
        let [fast, promoted] = [Accumulation::Fast, Accumulation::Promoted].map(|accumulation| {
            let mut out = group.zeros::<f32>(m, n)?;
            Matmul::new()
                .accumulation(accumulation)
                .run(&a, &b, &mut out)?;
            out.to_vec()
        });
        assert_eq!(fast?, promoted?);
        Ok::<_, Error>(())
    };
    Group::threads(1, rank).unwrap();
}

crate::support::shared::on_backend! {
    gemmesh::Host, Some(());
    fp8 {
        products_of_fp8_have_the_bits_of_plain_loops
        scaled_products_have_the_bits_of_plain_loops
        nan_of_a_scale_reaches_its_elements_only
        prepared_products_take_the_scales_that_they_were_prepared_for
        prepared_products_take_the_weights_that_they_were_prepared_for
        wrong_scales_are_refused
        scales_of_other_rows_are_refused
        parts_of_k_that_begin_inside_a_block_are_summed_up
        outputs_of_e4m3_saturate_and_nan_stays
        what_fp8_cannot_do_is_refused
    }
    quantized {
        quantized_rows_have_the_bits_of_plain_loops
        every_kind_of_number_is_quantised
        rows_are_quantised_into_the_next_gathers_input
        prepared_calls_quantise_as_they_were_prepared
        wrong_arguments_of_quantize_are_refused
    }
    quantized_products {
        quantized_products_have_the_bits_of_their_f32_results
        nan_and_large_results_are_quantised
        products_are_quantised_into_the_next_gathers_input
        prepared_products_quantise_as_they_were_prepared
        what_products_cannot_quantise_is_refused
        tiles_of_quantised_outputs_have_whole_blocks
    }
    fp8_gathers {
        gathers_of_fp8_have_gates_and_several_weights
        scales_of_staged_rows_are_staged
        scales_have_as_many_rows_as_their_operand
    };
}

/// A rank's part may begin with a block, whose first row and column are 0.
#[test]
fn calls_prepared_for_blocks_from_their_beginning_take_scales_of_blocks() {
    const N: usize = 16;
    const K: usize = 128;
    let from_0 = Scaling::BlocksFrom { row: 0, column: 0 };
    let result = Group::<Host>::threads(1, |group| {
        let ones = vec![F8E4M3::from_f32(1.0); N * K];
        let (a, b) = (group.upload(&ones, N, K)?, group.upload(&ones, N, K)?);
        let of_a = group.upload(&[2.0f32; N], N, 1)?;
        let of_b = group.upload(&[0.5f32], 1, 1)?;
        let mut out = group.zeros::<bf16>(N, N)?;
        for (rows, weights) in [
            (from_0, from_0),
            (from_0, Scaling::Blocks),
            (Scaling::Blocks, from_0),
        ] {
            let prepared = Matmul::new().scaling(rows, weights);
            let prepared = prepared.prepare((&group, [N, K]), N)?;
            let a = a.scaled(Scales::blocks(&of_a));
            let b = b.scaled(Scales::blocks(&of_b).first_row(0).first_column(0));
            prepared.run(a, b, &mut out)?;
            assert!(out.to_vec()?.iter().all(|x| x.to_f32() == K as f32));
        }
        Ok::<_, Error>(())
    });
    result.unwrap();
}
