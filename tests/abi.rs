//! src/backend/cuda/abi.rs is what bindgen makes of cuda/abi.h, and so is that of each family.

use std::fs;
use std::path::Path;

#[test]
fn the_host_and_the_kernels_share_one_layout() {
    check("cuda/abi.h", "src/backend/cuda/abi.rs");
    check("cuda/sm90/abi.h", "src/backend/cuda/family/sm90/abi.rs");
}

/// Checks that the Rust file is what bindgen makes of the header.
fn check(header: &str, checked_in: &str) {
    // The lines that stand above what bindgen writes.
    let head = format!(
        "//! {header}, as bindgen reads it; tests/abi.rs fails when the two differ.\n#![allow(dead_code)]\n"
    );
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let path = root.join(header);
    let bindings = bindgen::Builder::default()
        .header(path.to_string_lossy())
        .allowlist_file(".*abi[.]h")
        .use_core()
        .generate_comments(false)
        .disable_header_comment()
        .generate()
        .unwrap_or_else(|error| panic!("{header} is plain C: {error}"))
        .to_string();
    let checked_in = root.join(checked_in);
    let words = |text: &str| text.split_whitespace().collect::<String>();
    let found = fs::read_to_string(&checked_in).unwrap_or_default();
    if words(&found) == words(&(head.clone() + &bindings)) {
        return;
    }
    let fresh = Path::new(env!("CARGO_TARGET_TMPDIR")).join("abi.rs");
    fs::write(&fresh, head + &bindings).expect("the target folder can be written");
    panic!(
        "{header} has changed: copy {} to {} and run cargo fmt",
        fresh.display(),
        checked_in.display()
    );
}
