//! The operations.

mod all_gather_matmul;
mod bare;

pub use all_gather_matmul::{AllGatherMatmul, Prepared, all_gather_matmul};
pub use bare::run_schedule;

use crate::matrix::Matrix;

/// The weight and the output of a product.
type Operands<'a, B, T> = (&'a Matrix<B, T>, &'a mut Matrix<B, T>);
