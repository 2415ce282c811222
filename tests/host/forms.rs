//! Products of other forms, on the host.

use crate::support::shared::forms;
use crate::test_name;
use gemmesh::tuning::{Chunking, Numerics, Route, TileShape};
use gemmesh::{Config, Host};

/// The backend's own, and small tiles.
fn configs() -> Vec<Option<Config>> {
    let tile = TileShape::new(16, 24, 64);
    let small = Config::new(tile, Chunking::new(3), Route::Push);
    vec![None, Some(small)]
}

#[test]
fn several_weights_give_the_bits_of_each() {
    forms::several_weights_give_the_bits_of_each::<Host>(
        test_name!(),
        Numerics::Invariant,
        configs,
    );
}

#[test]
fn functions_and_gates_are_theirs_in_float64() {
    forms::functions_and_gates_are_theirs_in_float64::<Host>(test_name!(), 200, configs);
}

#[test]
fn so_are_those_of_an_odd_number_of_columns() {
    forms::functions_and_gates_are_theirs_in_float64::<Host>(test_name!(), 203, configs);
}

#[test]
fn sums_are_finished_by_their_owners() {
    let low_and_high = [[64, 128], [128, 64]].into_iter().flat_map(|[m, n]| {
        let routes = [Route::Pull, Route::Push, Route::Store].into_iter();
        routes.map(move |route| Config::new(TileShape::new(m, n, 64), Chunking::new(1), route))
    });
    let behind = Config::new(TileShape::new(96, 64, 64), Chunking::new(1), Route::Store);
    let behind = [behind.with_product_first(true)];
    let configs: Vec<Config> = low_and_high.chain(behind).collect();
    forms::sums_are_finished_by_their_owners::<Host>(test_name!(), &configs);
}

crate::support::shared::forms_tests!(Host, Some(()));
