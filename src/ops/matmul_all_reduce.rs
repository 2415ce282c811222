//! `out[M, N] = Σ_p a_p[M, K_p] · b_p[N, K_p]ᵀ` on every rank: each rank has a part of K, and gets all of the sum.

use super::partial_sums::{PartialSums, Which, split};
use super::{require_same_group, require_shape};
use crate::backend::Backend;
use crate::backend::sealed::Bound;
use crate::element::Element;
use crate::error::Result;
use crate::matrix::Matrix;
use crate::schedule::all_gather;
use crate::schedule::reduce_scatter::{ALL_NAME, is_exchanged};
use crate::schedule::{Config, Description, Layout};
use crate::sharded::ShardedMatrix;

/// `out = Σ a_p · b_pᵀ` over all ranks p, on every rank, with the same bits. Collective.
///
/// `a` is [M, K_p] and `b` is [N, K_p], this rank's own: its part of K, which may be another on each rank. `out` is [M, N]; who
/// owns which of its rows says who adds them up, and sends the sums on. For few rows (M · N elements in 1 MiB on two ranks, in
/// 512 KiB on up to four, in 256 KiB on up to eight) all ranks exchange all partials instead, and each adds up all rows.
///
/// Numbers and memory are those of [`matmul_reduce_scatter`](crate::matmul_reduce_scatter), whichever way is taken; but where
/// partials are exchanged, the room on each rank is for W · M rows.
///
/// # Errors
/// As [`matmul_reduce_scatter`](crate::matmul_reduce_scatter).
pub fn matmul_all_reduce<B: Backend, T: Element>(
    a: &Matrix<B, T>,
    b: &Matrix<B, T>,
    out: &mut ShardedMatrix<B, T>,
) -> Result<()> {
    MatmulAllReduce::new().run(a, b, out)
}

/// [`matmul_all_reduce`] with what varies.
#[derive(Debug)]
pub struct MatmulAllReduce<'a, B: Backend, T: Element>(PartialSums<'a, B, T>);

impl<'a, B: Backend, T: Element> MatmulAllReduce<'a, B, T> {
    /// No bias, and the backend's configuration for the problem.
    pub fn new() -> Self {
        MatmulAllReduce(PartialSums::new())
    }

    /// Adds `bias`, [1, N], to each row, in f32 before the last rounding: once, though every rank gives it, and all the same.
    #[must_use]
    pub fn bias(mut self, bias: &'a Matrix<B, T>) -> Self {
        self.0.bias = Some(bias);
        self
    }

    /// Cuts the problem up as `config` says. Where partials are pulled ([`Route::Pull`](crate::Route::Pull)), product, sum and
    /// gather follow one another. Where they are pushed ([`Route::Push`](crate::Route::Push)), the chunks are panels, of which
    /// one is summed while the next is multiplied. GPUs pull unless they are asked to push, and have no
    /// [`Route::Store`](crate::Route::Store) for it yet.
    #[must_use]
    pub fn config(mut self, config: Config) -> Self {
        self.0.config = Some(config);
        self
    }

    /// Does it, as [`matmul_all_reduce`]. The schedule is made at the first call for a shape and kept.
    ///
    /// # Errors
    /// As [`matmul_all_reduce`]; [`Error::Limit`](crate::Error::Limit) for a configuration that can't be.
    pub fn run(
        &self,
        a: &Matrix<B, T>,
        b: &Matrix<B, T>,
        out: &mut ShardedMatrix<B, T>,
    ) -> Result<()> {
        let group = a.group();
        let ([m, k], [n, _]) = (a.shape(), b.shape());
        let check = || -> Result<Layout> {
            require_same_group("out", out.group(), group)?;
            require_shape(group.rank(), "out [M, N]", [m, n], out.shape())?;
            split(group, &out.layout().rows(), [m, k])
        };
        let layout = check().map_err(|error| group.refuse(ALL_NAME, error))?;
        let which = Which::All(out.id());
        let programs = self.0.programs(which, a, b, &layout)?;
        let describe = |operation, n| Description {
            operation,
            dtype: T::DTYPE,
            layout: out.layout().clone(),
            n,
        };
        // Where partials are pulled by the owners of rows, each rank has the sums of its own rows then. What gathers them is made
        // before anything is done.
        let gather = match &programs.multiply {
            Some(_) if !is_exchanged(&describe(ALL_NAME, n)) => {
                let asked = describe("gather of matmul_all_reduce", 0);
                let program = group.program(all_gather::gather, asked, self.0.config);
                Some(program.map_err(|error| group.refuse(ALL_NAME, error))?)
            }
            _ => None,
        };
        let memory = Bound::Symmetric(out.memory());
        self.0.run(which, &programs, a, b, memory)?;
        let Some(gather) = gather else {
            return Ok(());
        };
        let mut matrices = [const { Bound::Nothing }; all_gather::MATRICES];
        matrices[all_gather::A] = Bound::Symmetric(out.memory());
        super::run(group, None, &gather, &matrices, &[out.id()], None)
    }
}

impl<B: Backend, T: Element> Default for MatmulAllReduce<'_, B, T> {
    fn default() -> Self {
        MatmulAllReduce::new()
    }
}
