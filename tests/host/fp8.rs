//! Products of fp8, on the host.

use crate::support::shared::fp8;
use crate::test_name;
use gemmesh::{Chunking, Config, Host, Route, TileShape};

const ROUTES: [Route; 3] = [Route::Pull, Route::Push, Route::Store];

fn gather(seed: u64) -> Config {
    let chunks = 1 + seed as usize % 4;
    let chunking = Chunking::new(chunks).with_cut_last(chunks.is_multiple_of(2));
    let tile = TileShape::new(16, 16, 64).with_group_m(2);
    Config::new(tile, chunking, ROUTES[seed as usize / 4 % 3])
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
fn sums_of_fp8_have_the_bits_of_their_partials() {
    fp8::sums_of_fp8_have_the_bits_of_their_partials::<Host>(test_name!(), sums);
}

crate::support::shared::on_backend! {
    gemmesh::Host, Some(());
    fp8 {
        products_of_fp8_have_the_bits_of_plain_loops
        scaled_products_have_the_bits_of_plain_loops
        nan_of_a_scale_reaches_its_elements_only
        prepared_products_take_the_scales_that_they_were_prepared_for
        wrong_scales_are_refused
        scales_of_other_rows_are_refused
        outputs_of_e4m3_saturate_and_nan_stays
        what_fp8_cannot_do_is_refused
    };
}
