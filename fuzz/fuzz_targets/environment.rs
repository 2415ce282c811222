#![no_main]

use gemmesh::fuzzing::environment;

libfuzzer_sys::fuzz_target!(init: gemmesh_fuzz::write("environment", &environment::seeds()), |data: &[u8]| {
    gemmesh_fuzz::bounded(data, environment::parse);
});
