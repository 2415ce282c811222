//! Products of other forms, on GPUs.

use gemmesh::testing::Variant;
use gemmesh::tuning::{Numerics, Route};
use gemmesh::{Config, Cuda};

use crate::support::gpu::*;
use crate::support::shared::forms;
use crate::test_name;

/// The library's own.
fn own() -> Vec<Option<Config>> {
    vec![None]
}

/// Every kernel, and some with K in slices.
fn each_kernel() -> Vec<Option<Config>> {
    SHAPES.iter().copied().map(Some).collect()
}

#[test]
fn several_weights_give_the_bits_of_each() {
    let Some(_leave) = gpu() else { return };
    forms::several_weights_give_the_bits_of_each::<Cuda>(test_name!(), Numerics::Invariant, own);
}

#[test]
fn several_weights_give_the_bits_of_each_by_every_kernel() {
    let Some(_leave) = gpu() else { return };
    forms::several_weights_give_the_bits_of_each::<Cuda>(test_name!(), Numerics::Fast, each_kernel);
}

#[test]
fn functions_and_gates_are_theirs_in_float64() {
    let Some(_leave) = gpu() else { return };
    forms::functions_and_gates_are_theirs_in_float64::<Cuda>(test_name!(), 200, own);
}

#[test]
fn functions_and_gates_are_theirs_by_every_kernel() {
    let Some(_leave) = gpu() else { return };
    forms::functions_and_gates_are_theirs_in_float64::<Cuda>(test_name!(), 200, each_kernel);
}

#[test]
fn sums_are_finished_by_their_owners() {
    let Some(_leave) = gpu() else { return };
    let routes = ROUTES.into_iter();
    let by_routes = routes.flat_map(|route| {
        let low_and_high = configs_of_sums(Variant::Sums, route, 1).into_iter();
        low_and_high.filter(|config| (config.tile.n, config.tile.cluster_m) == (128, 1))
    });
    let splits = [1, 2, 4, 8].into_iter();
    let low = splits.flat_map(|parts| configs_of_sums(Variant::LowLatency, Route::Store, parts));
    let behind = configs_of_sums(Variant::Forms, Route::Store, 2).into_iter();
    let behind = behind.map(|config| config.with_product_first(true));
    let configs: Vec<Config> = by_routes.chain(low).chain(behind).collect();
    forms::sums_are_finished_by_their_owners::<Cuda>(test_name!(), &configs);
}

crate::support::shared::forms_tests!(Cuda, gpu());
