//! `out[rows of this rank, N] = Σ_p a_p[rows, K_p] · b_p[N, K_p]ᵀ`: each rank has a slice of K and gets its rows of the
//! sum.

use super::product_builder::{Prepared, ProductBuilder};
use super::product_form::ScatterProduct;
use crate::backend::Backend;
use crate::element::{Element, OutputOf, WeightOf};
#[cfg(doc)]
use crate::error::Kind;
use crate::error::Result;
use crate::matrix::Matrix;
#[cfg(doc)]
use crate::schedule::Config;

/// Sums `a_p · b_pᵀ` over all ranks p; each rank gets its rows of the sum. Collective.
///
/// `a` is [M, K_p] and `b` is [N, K_p], this rank's slices of K. K_p may differ between ranks. `out` is [rows, N], this
/// rank's rows of the sum. The M rows are split over the ranks evenly. If M is no multiple of the world size, the first
/// ranks get one row more. [`MatmulReduceScatter`] offers other splits, a bias, and a sharded matrix as output.
///
/// # What it computes
/// A rank's **partial** p_r is a_r · b_rᵀ, summed in f32 and rounded once to `T`. The partials are then added in f32,
/// in the order of the ranks: s = p_0, s += p_1, … Then come the bias, the activation and the residual, in f32 too. The
/// result is rounded once, unless the output is f32. So the bits are the same each time. They depend neither on who
/// owns a row nor on which partial arrives first. Over several hosts, the partials of another host are added up and
/// rounded there, and count as one. So bits depend on which host owns a row.
///
/// Let u be the unit roundoff of `T` (2⁻⁸ for bf16, 2⁻¹¹ for f16) and v = 2⁻²⁴ that of f32. Without an activation and a
/// residual, an element differs from the exact sum by at most (K_max + W) · v · Σ |a| · |b| + u · Σ |p_r| + u · |out|,
/// to first order. The three terms bound the sums in f32, the rounding of the partials, and the last rounding. Over
/// several hosts, the rounding of each other host's sum s_h adds u · Σ |s_h|. This holds while no partial is too large for
/// `T` (f16 ends at 65504) or so small that it loses digits.
///
/// # Memory
/// The first call of a group allocates symmetric memory for partials on each rank:
///
/// - For incoming partials, (W - 1) times as many rows as the rank that owns most has. If partials are stored, 15 more
///   rows for each sender.
/// - For outgoing partials, M rows. If partials are pushed or stored, 15 more rows for each rank.
///
/// A row has N elements, rounded up to 16 bytes. On GPUs the total is rounded up to 2 MiB. Later calls use the same
/// memory. Only a call that needs more allocates again. The memory is freed when the group ends.
///
/// ```
/// use gemmesh::{Group, Host, Result, bf16, matmul_reduce_scatter};
///
/// fn rank(group: Group<Host>) -> Result<()> {
///     let (m, n, k) = (8, 4, 16); // K is this rank's slice
///     let a = group.upload(&vec![bf16::ONE; m * k], m, k)?;
///     let b = group.upload(&vec![bf16::ONE; n * k], n, k)?;
///     let mut out = group.zeros::<bf16>(m / 2, n)?;
///     matmul_reduce_scatter(&a, &b, &mut out)?;
///     assert_eq!(out.to_vec()?[0].to_f32(), 32.0);
///     Ok(())
/// }
///
/// Group::threads(2, rank)?;
/// # Ok::<_, gemmesh::Error>(())
/// ```
///
/// The call may return before the operation is complete. [`Group::synchronize`](crate::Group::synchronize) waits for
/// it. On the host backend the operation is complete when the call returns.
///
/// The matrices' types may be those of [`WeightOf`] and [`OutputOf`]. For parts of matrices, call
/// [`MatmulReduceScatter::run`].
///
/// # Errors
/// [`Kind::Shape`] or [`Kind::Unsuitable`] if the arguments don't fit together; nothing has been done then.
/// [`Kind::CallMismatch`] if a rank makes a different call; [`Kind::OutOfMemory`] if the memory for partials cannot
/// be allocated; the group's failure.
#[track_caller]
pub fn matmul_reduce_scatter<B: Backend, T: Element, W: WeightOf<T>, O: OutputOf<T>>(
    a: &Matrix<B, T>,
    b: &Matrix<B, W>,
    out: &mut Matrix<B, O>,
) -> Result<()> {
    MatmulReduceScatter::new().run(a, b, out)
}

/// Builder for [`matmul_reduce_scatter`]: bias, activation, residual, output types, scales, configuration.
///
/// ```
/// use gemmesh::{Group, Host, MatmulReduceScatter, Result, bf16};
///
/// fn rank(group: Group<Host>) -> Result<()> {
///     let (m, n, k) = (8, 4, 16); // K is this rank's slice
///     let a = group.upload(&vec![bf16::ONE; m * k], m, k)?;
///     let b = group.upload(&vec![bf16::ONE; n * k], n, k)?;
///     let rows = [6, 2]; // the rows that each rank gets
///     let own = rows[group.rank()];
///     let residual = group.upload(&vec![bf16::ONE; own * n], own, n)?;
///     let mut out = group.zeros::<bf16>(own, n)?;
///     MatmulReduceScatter::new().rows(&rows).residual(&residual).run(&a, &b, &mut out)?;
///     assert_eq!(out.to_vec()?[0].to_f32(), 33.0);
///     Ok(())
/// }
///
/// Group::threads(2, rank)?;
/// # Ok::<_, gemmesh::Error>(())
/// ```
///
/// # Configuration
/// - [`Route::Pull`](crate::tuning::Route::Pull): all rows are multiplied before any are moved. While a kernel runs, it
///   needs nothing of other ranks.
/// - [`Route::Push`](crate::tuning::Route::Push): each block is sent when it has been computed, and the kernel adds the
///   blocks that have arrived.
/// - [`Route::Store`](crate::tuning::Route::Store): the kernel stores each tile to its owner at once. On GPUs it stores to
///   at most seven peers. With [`Config::product_first`], a second kernel stores all rows after the product.
///
/// By default, up to eight ranks with GPUs of their own store few rows and push many. Other groups pull.
pub type MatmulReduceScatter<'a, B, T> = ProductBuilder<'a, B, T, ScatterProduct>;

/// A product and its sums, planned by [`MatmulReduceScatter::prepare`].
///
/// They fit every `a`, `b` and output of the same group and shapes. They keep the group alive.
///
/// ```
/// use gemmesh::{Group, Host, MatmulReduceScatter, Result, bf16};
///
/// fn rank(group: Group<Host>) -> Result<()> {
///     let (m, n, k) = (8, 4, 16); // K is this rank's slice
///     let a = group.upload(&vec![bf16::ONE; m * k], m, k)?;
///     let b = group.upload(&vec![bf16::ONE; n * k], n, k)?;
///     let mut next = group.sharded::<bf16>(m, n)?; // the input of the next layer
///     let product = MatmulReduceScatter::new().prepare(&a, n)?;
///     product.run_into(&a, &b, &mut next)?;
///     let first = next.rows().start;
///     assert_eq!(next.to_vec()?[first * n].to_f32(), 32.0);
///     Ok(())
/// }
///
/// Group::threads(2, rank)?;
/// # Ok::<_, gemmesh::Error>(())
/// ```
pub type PreparedReduceScatter<'a, B, T> = Prepared<'a, B, T, ScatterProduct>;
