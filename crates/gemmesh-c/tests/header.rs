//! The checked-in header is what cbindgen makes of the sources.

use std::path::Path;

/// The sources of what the header declares, in its order.
const SOURCES: [&str; 8] = [
    "status",
    "types",
    "group",
    "matrix",
    "sharded",
    "product",
    "collectives",
    "pipelines",
];

fn generated(root: &Path) -> String {
    let config = cbindgen::Config::from_file(root.join("cbindgen.toml")).expect("a configuration");
    let mut builder = cbindgen::Builder::new().with_config(config);
    for source in SOURCES {
        builder = builder.with_src(root.join(format!("src/{source}.rs")));
    }
    let mut header = Vec::new();
    builder
        .generate()
        .expect("sources that can be read")
        .write(&mut header);
    String::from_utf8(header).expect("text")
}

#[test]
fn the_checked_in_header_is_made_of_the_sources() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let path = root.join("include/gemmesh.h");
    let made = generated(root);
    if std::env::var_os("GEMMESH_UPDATE_HEADER").is_some() {
        std::fs::write(&path, &made).expect("the header can be written");
    }
    let there = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        there == made,
        "{} differs from the sources; run GEMMESH_UPDATE_HEADER=1 cargo test -p gemmesh-c --test header",
        path.display()
    );
}
