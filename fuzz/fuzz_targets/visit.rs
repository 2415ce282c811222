#![no_main]

use gemmesh::fuzzing::visit;

libfuzzer_sys::fuzz_target!(init: gemmesh_fuzz::write("visit", &visit::seeds()), |data: &[u8]| {
    gemmesh_fuzz::bounded(data, visit::parse);
});
