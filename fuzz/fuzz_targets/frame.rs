#![no_main]

use gemmesh::fuzzing::frame;

libfuzzer_sys::fuzz_target!(init: gemmesh_fuzz::write("frame", &frame::seeds()), |data: &[u8]| {
    gemmesh_fuzz::bounded(data, frame::parse);
});
