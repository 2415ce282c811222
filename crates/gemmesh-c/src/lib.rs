//! The C API of gemmesh. `include/gemmesh.h` is made of it, and its comments are for readers of C.
//!
//! The library converts C's descriptions to those of `gemmesh::raw` and back. What operations do is said in gemmesh's
//! own documentation.
//!
//! # Safety All functions ask the same of their caller. A pointer is null or points to what its type and the function's
//! text say, until the function returns. Null pointers, numbers that no enumeration has, and handles that were freed or
//! never given are errors. Handles are numbers, which are looked up and never followed.
#![allow(unsafe_code)]
// As the module says, for all functions.
#![allow(clippy::missing_safety_doc)]
// C's names.
#![allow(non_camel_case_types)]

mod calls;
mod convert;
mod failure;
mod numbers;
mod table;

pub mod collectives;
pub mod group;
pub mod matrix;
pub mod pipelines;
pub mod product;
pub mod sharded;
pub mod status;
pub mod types;
