#![no_main]

use gemmesh::fuzzing::trace;

libfuzzer_sys::fuzz_target!(init: gemmesh_fuzz::write("trace", &trace::seeds()), |data: &[u8]| {
    gemmesh_fuzz::bounded(data, trace::parse);
});
