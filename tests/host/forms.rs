//! Products of other forms, on the host.

use crate::support::shared::forms;
use crate::test_name;
use gemmesh::{Chunking, Config, Host, Numerics, Route, TileShape};

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

crate::support::shared::forms_tests!(Host, Some(()));
