//! The numbers of the matrices in the schedules of all planners. A call binds memory to those that it has.

use crate::element::DType;
use crate::schedule::{MAX_WEIGHTS, MatrixSpec};

/// What is gathered or multiplied, or what a rank sends of its own.
pub const A: usize = 0;
/// What is gathered beside it.
pub const BESIDE: usize = 1;
/// What is added to each row of the outputs: columns for the first weight, then those for the next.
pub const BIAS: usize = 2;
/// What is added to the output last. It has the output's rows.
pub const RESIDUAL: usize = 3;
/// Room in symmetric memory, which a group keeps: for what a rank makes for others, then for what comes.
pub const PARTIALS: usize = 4;
/// The first weight; the others have the next numbers.
pub const B: usize = 5;
/// The first weight's output; likewise. Where nothing is multiplied, what a rank gets.
pub const OUT: usize = B + MAX_WEIGHTS;
/// How many there are.
pub const MATRICES: usize = OUT + MAX_WEIGHTS;

/// Their specifications, if an operation had none of them.
pub(super) fn unused(dtype: DType) -> Vec<MatrixSpec> {
    vec![MatrixSpec::new(dtype, 0, 0); MATRICES]
}
