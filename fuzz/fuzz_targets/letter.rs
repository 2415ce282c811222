#![no_main]

use gemmesh::fuzzing::letter;

libfuzzer_sys::fuzz_target!(init: gemmesh_fuzz::write("letter", &letter::seeds()), |data: &[u8]| {
    gemmesh_fuzz::bounded(data, letter::parse);
});
