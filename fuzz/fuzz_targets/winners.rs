#![no_main]

use gemmesh::fuzzing::winners;

libfuzzer_sys::fuzz_target!(init: gemmesh_fuzz::write("winners", &winners::seeds()), |data: &[u8]| {
    gemmesh_fuzz::bounded(data, winners::parse);
});
