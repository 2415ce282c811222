//! Sums over ranks that each have a part of K.

use gemmesh::{Cuda, Route};

use crate::support::gpu::*;
use crate::support::shared::reduce_scatter::{self, Case};
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

#[test]
fn partials_are_added_in_the_order_of_the_ranks_whatever_comes_first() {
    let Some(_leave) = gpu() else { return };
    let cases = [
        case(&[150, 150, 150], 192, 256, 0, false),
        case(&[170, 0, 233], 41, 130, 7, true),
        case(&[0, 0, 90], 5, 33, 64, true),
        case(&[1, 1, 1], 1, 1, 0, false),
    ];
    reduce_scatter::partials_are_added_in_the_order_of_the_ranks::<Cuda>(
        test_name!(),
        3,
        &cases,
        &[None],
        &[Route::Pull],
    );
}

#[test]
fn an_all_reduce_gives_all_ranks_the_bits_of_the_sum_in_their_order() {
    let Some(_leave) = gpu() else { return };
    let cases = [
        case(&[150, 150, 150], 192, 256, 0, false),
        case(&[170, 0, 233], 40, 130, 7, true),
    ];
    reduce_scatter::all_ranks_get_the_same_bits::<Cuda>(
        test_name!(),
        3,
        &cases,
        &[None],
        &[Route::Pull],
    );
}

#[test]
fn the_bits_of_a_reduce_scatter_do_not_depend_on_the_split() {
    let Some(_leave) = gpu() else { return };
    let splits = [[140, 140, 140], [420, 0, 0], [0, 1, 419], [137, 150, 133]];
    reduce_scatter::bits_do_not_depend_on_the_split::<Cuda>(test_name!(), &splits, [40, 72], None);
}

#[test]
fn the_output_of_a_reduce_scatter_may_be_the_own_rows_of_a_sharded_matrix() {
    let Some(_leave) = gpu() else { return };
    reduce_scatter::the_output_may_be_the_own_rows_of_a_sharded_matrix::<Cuda>(test_name!());
}

#[test]
fn a_prepared_reduce_scatter_or_all_reduce_gives_the_bits_of_the_plain_one() {
    let Some(_leave) = gpu() else { return };
    reduce_scatter::a_prepared_call_gives_the_bits_of_the_plain_one::<Cuda>(test_name!(), &[None]);
}

#[test]
fn a_reduce_scatter_refuses_what_does_not_fit() {
    let Some(_leave) = gpu() else { return };
    reduce_scatter::what_does_not_fit_is_refused::<Cuda>(test_name!());
}

#[test]
fn another_m_in_a_reduce_scatter_is_a_mismatch() {
    let Some(_leave) = gpu() else { return };
    reduce_scatter::other_rows_are_a_mismatch::<Cuda>(test_name!(), [5, 5]);
}

#[test]
fn a_rank_killed_while_the_others_wait_for_its_partials_is_named_within_a_second() {
    let Some(_leave) = gpu_alone() else { return };
    reduce_scatter::kill_while_the_others_wait::<Cuda>(test_name!(), 1);
}
