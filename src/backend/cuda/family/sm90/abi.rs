//! cuda/sm90/abi.h, as bindgen reads it; tests/abi.rs fails when the two differ.
#![allow(dead_code)]
pub const GEMMESH_STAGE_ROW: u32 = 128;
pub const GEMMESH_THREADS: u32 = 384;
pub const GEMMESH_STORE_COLUMNS: u32 = 64;
pub const GEMMESH_FAST_COLUMNS: u32 = 176;
