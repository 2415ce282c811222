//! Products of fp8, on the host.

crate::support::shared::on_backend! {
    gemmesh::Host, Some(());
    fp8 {
        products_of_fp8_have_the_bits_of_plain_loops
        scaled_products_have_the_bits_of_plain_loops
        nan_of_a_scale_reaches_its_elements_only
        prepared_products_take_the_scales_that_they_were_prepared_for
        wrong_scales_are_refused
        outputs_of_e4m3_saturate_and_nan_stays
        what_fp8_cannot_do_is_refused
    };
}
