//! Rows that ranks exchange and add up, on the host.

use std::time::Duration;

use crate::support::shared::collectives::{self, Produces};
use crate::test_name;
use gemmesh::{Block, Host, Matrix, Value};

impl Produces for Host {
    fn put<T: Value>(block: &mut Block<Host, T>, _: &Matrix<Host, T>, values: &[T], first: usize) {
        let ([rows, n], pitch) = (block.shape(), block.pitch());
        let to = block.values_mut().chunks_mut(pitch);
        for (to, from) in to.zip(values[first * n..(first + rows) * n].chunks(n)) {
            to[..n].copy_from_slice(from);
        }
    }

    fn linger<T: Value>(_: &Block<Host, T>, time: Duration) {
        std::thread::sleep(time);
    }
}

#[test]
fn what_is_produced_is_summed_by_its_owner() {
    collectives::what_is_produced_is_summed_by_its_owner::<Host>(test_name!());
}

#[test]
fn what_is_produced_is_the_next_input() {
    collectives::what_is_produced_is_the_next_input::<Host>(test_name!());
}

#[test]
fn what_is_produced_reaches_its_rank() {
    collectives::what_is_produced_reaches_its_rank::<Host>(test_name!());
}

#[test]
fn an_error_of_a_producer_is_every_ranks() {
    collectives::an_error_of_a_producer_is_every_ranks::<Host>(test_name!());
}

#[test]
fn a_panic_of_a_producer_ends_the_group() {
    collectives::a_panic_of_a_producer_ends_the_group::<Host>(test_name!());
}

#[test]
fn a_producer_that_takes_too_long_is_named() {
    collectives::a_producer_that_takes_too_long_is_named::<Host>(test_name!());
}

#[test]
fn producers_of_other_blocks_are_a_mismatch() {
    collectives::producers_of_other_blocks_are_a_mismatch::<Host>(test_name!());
}

#[test]
fn what_cannot_be_exchanged_is_refused() {
    collectives::what_cannot_be_exchanged_is_refused::<Host>(test_name!());
}

#[test]
fn collectives_of_one_rank_exchange_what_they_have() {
    collectives::collectives_exchange_what_ranks_have::<Host>(test_name!(), 1);
}

#[test]
fn collectives_of_two_ranks_exchange_what_they_have() {
    collectives::collectives_exchange_what_ranks_have::<Host>(test_name!(), 2);
}

#[test]
fn collectives_of_three_ranks_exchange_what_they_have() {
    collectives::collectives_exchange_what_ranks_have::<Host>(test_name!(), 3);
}

#[test]
fn collectives_of_four_ranks_exchange_what_they_have() {
    collectives::collectives_exchange_what_ranks_have::<Host>(test_name!(), 4);
}

#[test]
fn ranks_out_of_step_lose_time_only() {
    collectives::ranks_out_of_step_lose_time_only::<Host>(test_name!());
}

#[test]
fn a_rank_that_sends_nothing_completes() {
    collectives::a_rank_that_sends_nothing_completes::<Host>(test_name!());
}

#[test]
fn a_trace_shows_blocks_sent_when_they_are_made() {
    collectives::a_trace_shows_blocks_sent_when_they_are_made::<Host>(test_name!());
}
