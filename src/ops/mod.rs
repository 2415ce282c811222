//! The operations.

mod all_gather_matmul;
mod bare;

pub use all_gather_matmul::{AllGatherMatmul, Prepared, all_gather_matmul};
pub use bare::run_schedule;
