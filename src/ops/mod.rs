//! The operations.

mod all_gather_matmul;

pub use all_gather_matmul::{AllGatherMatmul, Prepared, all_gather_matmul};
