//! `out[M, N] = a[M, K] · b[N, K]ᵀ` on one rank, for the layers between the collective operations.

use super::product_builder::{Prepared, ProductBuilder};
use super::product_form::LocalProduct;
use crate::backend::Backend;
use crate::element::{Element, OutputOf, WeightOf};
#[cfg(doc)]
use crate::error::Kind;
use crate::error::Result;
use crate::matrix::Matrix;

/// Multiplies on this rank alone: `out = a · bᵀ`.
///
/// `a` is [M, K]. `b` is [N, K], as a linear layer stores its weight. `out` is [M, N]. Products are summed in f32 and
/// rounded once.
///
/// The product runs after the earlier operations of this rank. The call may return before the product is complete.
/// [`Group::synchronize`](crate::Group::synchronize) waits for it. On the host backend the product is complete when the
/// call returns.
///
/// The matrices' types may be those of [`WeightOf`] and [`OutputOf`]. For parts of matrices, or for several weights, call
/// [`Matmul::run`], which takes all of them:
///
/// ```
/// use gemmesh::{Activation, Group, Host, Matmul, Result, bf16};
///
/// fn rank(group: Group<Host>) -> Result<()> {
///     let a = group.upload(&[bf16::ONE; 2 * 8], 2, 8)?;
///     let b = group.upload(&[bf16::NEG_ONE; 4 * 8], 4, 8)?;
///     let mut out = group.zeros::<f32>(2, 4)?;
///     Matmul::new().activation(Activation::Relu).run(&a, &b, &mut out)?;
///     assert_eq!(out.to_vec()?, [0.0; 2 * 4]);
///     Ok(())
/// }
///
/// Group::threads(1, rank)?;
/// # Ok::<_, gemmesh::Error>(())
/// ```
///
/// # Errors
/// [`Kind::Shape`] or [`Kind::Unsuitable`] if the arguments don't fit together; the group's failure.
#[track_caller]
pub fn matmul<B: Backend, T: Element, W: WeightOf<T>, O: OutputOf<T>>(
    a: &Matrix<B, T>,
    b: &Matrix<B, W>,
    out: &mut Matrix<B, O>,
) -> Result<()> {
    Matmul::new().run(a, b, out)
}

/// Builder for [`matmul`]: bias, activation, several weights, gates, residual, output types, scales, configuration.
///
/// ```
/// use gemmesh::{Group, Host, Matmul, Result, bf16};
///
/// fn rank(group: Group<Host>) -> Result<()> {
///     let (m, n, k) = (2, 4, 8);
///     let a = group.upload(&vec![bf16::ONE; m * k], m, k)?;
///     let b = group.upload(&vec![bf16::ONE; n * k], n, k)?;
///     let residual = group.upload(&vec![bf16::ONE; m * n], m, n)?;
///     let mut out = group.zeros::<bf16>(m, n)?;
///     Matmul::new().residual(&residual).run(&a, &b, &mut out)?;
///     assert_eq!(out.to_vec()?[0].to_f32(), 9.0);
///     Ok(())
/// }
///
/// Group::threads(1, rank)?;
/// # Ok::<_, gemmesh::Error>(())
/// ```
pub type Matmul<'a, B, T> = ProductBuilder<'a, B, T, LocalProduct>;

/// A product of one rank, planned by [`Matmul::prepare`]. It keeps the group alive.
///
/// ```
/// use gemmesh::{Group, Host, Matmul, Result, bf16};
///
/// fn rank(group: Group<Host>) -> Result<()> {
///     let (m, n, k) = (2, 4, 8);
///     let a = group.upload(&vec![bf16::ONE; m * k], m, k)?;
///     let b = group.upload(&vec![bf16::ONE; n * k], n, k)?;
///     let mut out = group.zeros::<bf16>(m, n)?;
///     let product = Matmul::new().prepare((&group, [m, k]), n)?;
///     product.run(&a, &b, &mut out)?;
///     assert_eq!(out.to_vec()?[0].to_f32(), 8.0);
///     Ok(())
/// }
///
/// Group::threads(1, rank)?;
/// # Ok::<_, gemmesh::Error>(())
/// ```
pub type PreparedMatmul<'a, B, T> = Prepared<'a, B, T, LocalProduct>;
