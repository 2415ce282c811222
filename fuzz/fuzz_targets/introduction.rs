#![no_main]

use gemmesh::fuzzing::introduction;

libfuzzer_sys::fuzz_target!(init: gemmesh_fuzz::write("introduction", &introduction::seeds()), |data: &[u8]| {
    gemmesh_fuzz::bounded(data, introduction::parse);
});
