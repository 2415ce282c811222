#![no_main]

use gemmesh::fuzzing::peer;

libfuzzer_sys::fuzz_target!(init: gemmesh_fuzz::write("peer", &peer::seeds()), |data: &[u8]| {
    gemmesh_fuzz::bounded(data, peer::parse);
});
