//! `out[M, N] = gather(a)[M, K] · b[N, K]ᵀ`: the rows of `a` are multiplied while they arrive.

use super::product_builder::ProductBuilder;
use super::product_form::GatherProduct;
use crate::backend::Backend;
use crate::element::{Element, OutputOf, WeightOf};
#[cfg(doc)]
use crate::error::Kind;
use crate::error::Result;
use crate::matrix::{Matrix, ShardedMatrix};

/// Gathers the rows of `a` from every rank and multiplies them as they arrive: `out = gather(a) · bᵀ`. Collective.
///
/// `a` is [M, K], and its rows are sharded over the ranks. `b` is [N, K], this rank's own, as a linear layer stores its
/// weight. `out` is [M, N]. N may differ between ranks. Products are summed in f32 and rounded once. Afterwards `a`
/// holds all rows.
///
/// The call may return before the operation is complete. [`Group::synchronize`](crate::Group::synchronize) waits for
/// it. On the host backend the operation is complete when the call returns.
///
/// ```
/// use gemmesh::{Group, Host, Result, all_gather_matmul, bf16};
///
/// fn rank(group: Group<Host>) -> Result<()> {
///     let (m, n, k) = (8, 4, 16);
///     let mut a = group.sharded::<bf16>(m, k)?;
///     let own = vec![bf16::ONE; a.rows().len() * k];
///     a.shard_mut().copy_from_host(&own)?;
///     let b = group.upload(&vec![bf16::ONE; n * k], n, k)?;
///     let mut out = group.zeros::<bf16>(m, n)?;
///     all_gather_matmul(&a, &b, &mut out)?;
///     assert_eq!(out.to_vec()?[0].to_f32(), 16.0);
///     Ok(())
/// }
///
/// Group::threads(2, rank)?;
/// # Ok::<_, gemmesh::Error>(())
/// ```
///
/// The matrices' types may be those of [`WeightOf`] and [`OutputOf`]. For parts of matrices, or for several weights, call
/// [`AllGatherMatmul::run`], which takes all of them:
///
/// ```
/// # use gemmesh::{Group, Host, Result};
/// use gemmesh::{AllGatherMatmul, bf16};
///
/// # fn rank(group: Group<Host>) -> Result<()> {
/// # let (m, n, k) = (8, 4, 16);
/// # let a = group.sharded::<bf16>(m, k)?;
/// # let b = group.zeros::<bf16>(2 * n, k)?;
/// let mut wide = group.zeros::<f32>(m, n)?;
/// AllGatherMatmul::new().run(&a, b.rows(0..n)?, &mut wide)?;
/// # Ok(())
/// # }
/// # Group::threads(2, rank)?;
/// # Ok::<_, gemmesh::Error>(())
/// ```
///
/// # Errors
/// [`Kind::Shape`] or [`Kind::Unsuitable`] if the arguments don't fit together. Nothing has been done then, and
/// you may make the call again with other arguments. If you don't call again, the waiting ranks get this error half a
/// second later, and the group has failed. [`Kind::CallMismatch`] if a rank makes a different call; the group's
/// failure.
#[track_caller]
pub fn all_gather_matmul<B: Backend, T: Element, W: WeightOf<T>, O: OutputOf<T>>(
    a: &ShardedMatrix<B, T>,
    b: &Matrix<B, W>,
    out: &mut Matrix<B, O>,
) -> Result<()> {
    AllGatherMatmul::new().run(a, b, out)
}

/// Builder for [`all_gather_matmul`]: bias, activation, several weights, gates, output types, scales, configuration.
///
/// ```
/// use gemmesh::{Activation, AllGatherMatmul, Group, Host, Result, bf16};
///
/// fn rank(group: Group<Host>) -> Result<()> {
///     let (m, n, k) = (8, 4, 16);
///     let mut a = group.sharded::<bf16>(m, k)?;
///     let own = vec![bf16::ONE; a.rows().len() * k];
///     a.shard_mut().copy_from_host(&own)?;
///     let b = group.upload(&vec![bf16::ONE; n * k], n, k)?;
///     let bias = group.upload(&vec![bf16::NEG_ONE; n], 1, n)?;
///     let mut out = group.zeros::<f32>(m, n)?;
///     AllGatherMatmul::new().bias(&bias).activation(Activation::Relu).run(&a, &b, &mut out)?;
///     assert_eq!(out.to_vec()?[0], 15.0);
///     Ok(())
/// }
///
/// Group::threads(2, rank)?;
/// # Ok::<_, gemmesh::Error>(())
/// ```
pub type AllGatherMatmul<'a, B, T> = ProductBuilder<'a, B, T, GatherProduct>;
