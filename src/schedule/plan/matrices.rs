//! The numbers of the matrices in all schedules. A call binds memory to those that it has.

use crate::Result;
use crate::element::DType;
use crate::schedule::{MAX_WEIGHTS, MatrixSpec, Product, ScaleMatrix, Sum};

/// The rows that are gathered, multiplied or sent.
pub const A: usize = 0;
/// A second matrix that is gathered with the first.
pub const BESIDE: usize = 1;
/// The bias, which is added to each row of the outputs: first the columns for the first weight, then those for the
/// next.
pub const BIAS: usize = 2;
/// The residual, which is added to the output last. It has the output's rows.
pub const RESIDUAL: usize = 3;
/// A buffer in symmetric memory that the group keeps. It has the partials that a rank makes, then the slots for those
/// that come.
pub const PARTIALS: usize = 4;
/// The first weight. The other weights have the next numbers.
pub const B: usize = 5;
/// The first weight's output. The other outputs have the next numbers. If nothing is multiplied, it is the result.
pub const OUT: usize = B + MAX_WEIGHTS;
/// The scales of `a`, unless they are gathered with it. Then they are [`BESIDE`].
pub const A_SCALES: usize = OUT + MAX_WEIGHTS;
/// The scales of the first weight. Those of the other weights have the next numbers.
pub const B_SCALES: usize = A_SCALES + 1;
/// The scales of the first output, if it is quantised. Those of the other outputs have the next numbers.
pub const OUT_SCALES: usize = B_SCALES + MAX_WEIGHTS;
/// The number of matrices.
pub const MATRICES: usize = OUT_SCALES + MAX_WEIGHTS;

/// The specifications of all matrices of an operation that uses none.
pub(super) fn unused(dtype: DType) -> Vec<MatrixSpec> {
    vec![MatrixSpec::new(dtype, 0, 0); MATRICES]
}

/// Specifies the scales of a product, so that a call can bind them.
pub(super) fn specify_scales(matrices: &mut [MatrixSpec], product: &Product) {
    let mut specify = |scales: Option<ScaleMatrix>, shape: Option<([usize; 2], &str)>| {
        if let (Some(ScaleMatrix { matrix, .. }), Some(([rows, columns], _))) = (scales, shape) {
            matrices[matrix] = MatrixSpec::new(DType::F32, rows, columns);
        }
    };
    let Product { m, k, .. } = *product;
    let of = |scales: Option<ScaleMatrix>| scales.map(|scales| scales.scaling).unwrap_or_default();
    specify(product.a_scales, of(product.a_scales).of_rows([m, k]));
    for weight in &product.weights {
        specify(weight.scales, of(weight.scales).of_weight([weight.n, k]));
    }
}

/// Specifies the scales of a sum of `n` columns, if it is quantised, so that a call can bind them.
///
/// # Errors
/// `Kind::Unsupported` if the output cannot be quantised like this.
pub(super) fn specify_output_scales(
    matrices: &mut [MatrixSpec],
    sum: &Sum,
    n: usize,
) -> Result<()> {
    if let Some(scales) = sum.scales {
        matrices[scales.matrix] = scales.spec(matrices[sum.out], n)?;
    }
    Ok(())
}
