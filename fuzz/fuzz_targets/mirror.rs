#![no_main]

use gemmesh::fuzzing::mirror;

libfuzzer_sys::fuzz_target!(init: gemmesh_fuzz::write("mirror", &mirror::seeds()), |data: &[u8]| {
    gemmesh_fuzz::bounded(data, mirror::parse);
});
