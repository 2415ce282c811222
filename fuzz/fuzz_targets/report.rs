#![no_main]

use gemmesh::fuzzing::report;

libfuzzer_sys::fuzz_target!(init: gemmesh_fuzz::write("report", &report::seeds()), |data: &[u8]| {
    gemmesh_fuzz::bounded(data, report::parse);
});
