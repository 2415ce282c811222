//! `out[M, N] = Σ_p a_p[M, K_p] · b_p[N, K_p]ᵀ` on every rank: each rank has a slice of K and gets the whole sum.

use super::product_builder::{Prepared, ProductBuilder};
use super::product_form::ReduceProduct;
use crate::backend::Backend;
use crate::element::{AddendOf, Element, WeightOf};
use crate::error::Result;
use crate::matrix::{Matrix, ShardedMatrix};
#[cfg(doc)]
use crate::schedule::Config;

/// Sums `a_p · b_pᵀ` over all ranks p; every rank gets the whole sum, with the same bits. Collective.
///
/// `a` is [M, K_p] and `b` is [N, K_p], this rank's slices of K. K_p may differ between ranks. `out` is [M, N].
///
/// The owner of a row of `out` adds its partials and sends the sum to all ranks. For few rows, all ranks send their
/// partials to all ranks instead, and each rank adds all rows. Rows are few if M · N elements fit in 1 MiB on two
/// ranks, in 512 KiB on up to four, or in 256 KiB on up to eight. (Over several hosts: in 1 MiB on two ranks, and on more in
/// 256 KiB and in 2 MiB divided by the ranks of other hosts.) Two ranks of a host also do so if partials are stored after
/// the product ([`Config::product_first`]), however many rows there are.
///
/// The numbers and the memory are those of [`matmul_reduce_scatter`](crate::matmul_reduce_scatter), with two exceptions.
/// If each rank adds all rows, the memory for incoming partials has (W - 1) · M rows. And then the partials of all hosts
/// are added in the order of the ranks, as on one host.
///
/// ```
/// use gemmesh::{Group, Host, Result, bf16, matmul_all_reduce};
///
/// fn rank(group: Group<Host>) -> Result<()> {
///     let (m, n, k) = (8, 4, 16); // K is this rank's slice
///     let a = group.upload(&vec![bf16::ONE; m * k], m, k)?;
///     let b = group.upload(&vec![bf16::ONE; n * k], n, k)?;
///     let mut out = group.sharded::<bf16>(m, n)?;
///     matmul_all_reduce(&a, &b, &mut out)?;
///     assert!(out.to_vec()?.iter().all(|x| x.to_f32() == 32.0));
///     Ok(())
/// }
///
/// Group::threads(2, rank)?;
/// # Ok::<_, gemmesh::Error>(())
/// ```
///
/// `out` has the type of a bias ([`AddendOf`]), which has 16 bits. [`MatmulAllReduce::run`] also takes parts of matrices as `a` and `b`.
///
/// # Errors
/// As [`matmul_reduce_scatter`](crate::matmul_reduce_scatter).
#[track_caller]
pub fn matmul_all_reduce<B: Backend, T: Element, W: WeightOf<T>, O: AddendOf<T>>(
    a: &Matrix<B, T>,
    b: &Matrix<B, W>,
    out: &mut ShardedMatrix<B, O>,
) -> Result<()> {
    MatmulAllReduce::new().run(a, b, out)
}

/// Builder for [`matmul_all_reduce`]: bias, activation, residual, scales, configuration.
///
/// ```
/// use gemmesh::{Activation, Group, Host, MatmulAllReduce, Result, bf16};
///
/// fn rank(group: Group<Host>) -> Result<()> {
///     let (m, n, k) = (8, 4, 16); // K is this rank's slice
///     let a = group.upload(&vec![bf16::ONE; m * k], m, k)?;
///     let b = group.upload(&vec![bf16::ONE; n * k], n, k)?;
///     let bias = group.upload(&vec![bf16::from_f32(-40.0); n], 1, n)?;
///     let mut out = group.sharded::<bf16>(m, n)?;
///     MatmulAllReduce::new().bias(&bias).activation(Activation::Relu).run(&a, &b, &mut out)?;
///     assert!(out.to_vec()?.iter().all(|x| x.to_f32() == 0.0));
///     Ok(())
/// }
///
/// Group::threads(2, rank)?;
/// # Ok::<_, gemmesh::Error>(())
/// ```
///
/// # Configuration
/// - [`Route::Pull`](crate::tuning::Route::Pull): product, sum and gather follow one another. If each rank adds all
///   rows, no gather follows.
/// - [`Route::Push`](crate::tuning::Route::Push) and [`Route::Store`](crate::tuning::Route::Store): the chunks are panels. One
///   panel is summed while the next is multiplied. With `Store`, the kernel stores partials itself, on GPUs to at
///   most seven peers.
/// - `Store` with [`Config::product_first`]: product and sum follow one another, and with more than two ranks and
///   many rows a gather follows them. Kernels store what is moved.
///
/// By default, up to eight ranks with GPUs of their own store few rows and push many. Other groups pull. Over several
/// hosts the product of few rows always comes first, and their partials are pushed.
pub type MatmulAllReduce<'a, B, T> = ProductBuilder<'a, B, T, ReduceProduct>;

/// A product and its sums, planned by [`MatmulAllReduce::prepare`].
///
/// They fit every `a`, `b` and output of the same group, shapes and split. They keep the group alive.
///
/// ```
/// use gemmesh::{Group, Host, MatmulAllReduce, Result, bf16};
///
/// fn rank(group: Group<Host>) -> Result<()> {
///     let (m, n, k) = (8, 4, 16); // K is this rank's slice
///     let a = group.upload(&vec![bf16::ONE; m * k], m, k)?;
///     let b = group.upload(&vec![bf16::ONE; n * k], n, k)?;
///     let mut out = group.sharded::<bf16>(m, n)?;
///     let product = MatmulAllReduce::new().prepare(&a, &out)?;
///     product.run(&a, &b, &mut out)?;
///     assert_eq!(out.to_vec()?[0].to_f32(), 32.0);
///     Ok(())
/// }
///
/// Group::threads(2, rank)?;
/// # Ok::<_, gemmesh::Error>(())
/// ```
pub type PreparedAllReduce<'a, B, T> = Prepared<'a, B, T, ReduceProduct>;
