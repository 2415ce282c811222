#![no_main]

use gemmesh::fuzzing::offer;

libfuzzer_sys::fuzz_target!(init: gemmesh_fuzz::write("offer", &offer::seeds()), |data: &[u8]| {
    gemmesh_fuzz::bounded(data, offer::parse);
});
