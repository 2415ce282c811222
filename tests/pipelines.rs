//! What the caller computes, beside what is moved, on the host.

mod support;

use gemmesh::{Chunk, Host, Matrix, bf16};
use support::numbers::nan;
use support::shared::pipelines::{self, Consumes};
use support::shared::staged;

impl Consumes for Host {
    type Sink = (Vec<bf16>, usize);

    fn sink(rows: usize, k: usize) -> Self::Sink {
        (vec![nan(); rows * k], k)
    }

    fn take((sink, k): &mut Self::Sink, chunk: &Chunk<Host, bf16>) {
        let rows = chunk.rows();
        sink[rows.start * *k..rows.end * *k].copy_from_slice(chunk.values());
    }

    fn take_by_way_of(sink: &mut Self::Sink, _: Matrix<Host, bf16>, chunk: &Chunk<Host, bf16>) {
        // Matrices of the host are read and written by calls, which a consumer makes none of.
        Self::take(sink, chunk);
    }

    fn taken((sink, _): &Self::Sink) -> Vec<bf16> {
        sink.clone()
    }
}

#[test]
fn each_row_is_consumed_once_own_rows_first() {
    pipelines::each_row_is_consumed_once_own_rows_first::<Host>(test_name!());
}

#[test]
fn a_product_follows_a_consumer_of_the_same_rows() {
    pipelines::a_product_follows_a_consumer_of_the_same_rows::<Host>(test_name!());
}

#[test]
fn an_error_of_a_consumer_is_every_ranks() {
    pipelines::an_error_of_a_consumer_is_every_ranks::<Host>(test_name!());
}

#[test]
fn a_panic_of_a_consumer_ends_the_group() {
    pipelines::a_panic_of_a_consumer_ends_the_group::<Host>(test_name!());
}

#[test]
fn a_consumer_makes_no_calls_of_its_group() {
    pipelines::a_consumer_makes_no_calls_of_its_group::<Host>(test_name!());
}

#[test]
fn a_consumer_beside_a_product_is_a_mismatch() {
    pipelines::a_consumer_beside_a_product_is_a_mismatch::<Host>(test_name!());
}

#[test]
fn a_consumer_that_takes_too_long_is_named() {
    pipelines::a_consumer_that_takes_too_long_is_named::<Host>(test_name!());
}

#[test]
fn products_of_staged_rows_are_right() {
    staged::products_of_staged_rows_are_right::<Host>(test_name!());
}

#[test]
fn staged_rows_are_consumed_by_stage() {
    staged::staged_rows_are_consumed_by_stage::<Host>(test_name!());
}

#[test]
fn what_cannot_be_staged_is_refused() {
    staged::what_cannot_be_staged_is_refused::<Host>(test_name!());
}

#[test]
fn other_stages_are_a_mismatch() {
    staged::other_stages_are_a_mismatch::<Host>(test_name!());
}

#[test]
fn two_matrices_are_consumed_together() {
    pipelines::two_matrices_are_consumed_together::<Host>(test_name!());
}
