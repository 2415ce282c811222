//! src/backend/cuda/abi.rs is what bindgen makes of cuda/abi.h.

use std::fs;
use std::path::Path;

/// The lines of the file that stand above what bindgen writes.
const HEAD: &str = "//! cuda/abi.h, as bindgen reads it; tests/abi.rs fails when the two differ.
#![allow(dead_code)]
";

#[test]
fn the_host_and_the_kernels_share_one_layout() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let header = root.join("cuda/abi.h");
    let bindings = bindgen::Builder::default()
        .header(header.to_string_lossy())
        .allowlist_file(".*abi[.]h")
        .use_core()
        .generate_comments(false)
        .disable_header_comment()
        .generate()
        .expect("cuda/abi.h is plain C")
        .to_string();
    let checked_in = root.join("src/backend/cuda/abi.rs");
    let words = |text: &str| text.split_whitespace().collect::<String>();
    let found = fs::read_to_string(&checked_in).unwrap_or_default();
    if words(&found) == words(&(HEAD.to_string() + &bindings)) {
        return;
    }
    let fresh = Path::new(env!("CARGO_TARGET_TMPDIR")).join("abi.rs");
    fs::write(&fresh, HEAD.to_string() + &bindings).expect("the target folder can be written");
    panic!(
        "cuda/abi.h has changed: copy {} to {} and run cargo fmt",
        fresh.display(),
        checked_in.display()
    );
}
