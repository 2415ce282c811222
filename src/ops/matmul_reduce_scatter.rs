//! `out[rows of this rank, N] = Σ_p a_p[rows, K_p] · b_p[N, K_p]ᵀ`: each rank has a part of K, and gets its rows of the sum.

use super::partial_sums::{PartialSums, Which, split};
use super::{require_same_group, require_shape};
use crate::backend::Backend;
use crate::backend::sealed::Bound;
use crate::element::Element;
use crate::error::{Error, Result};
use crate::matrix::Matrix;
use crate::schedule::layout::balanced_rows;
use crate::schedule::reduce_scatter::NAME;
use crate::schedule::{Config, Layout};
use crate::sharded::ShardedMatrix;

/// `out = Σ a_p · b_pᵀ` over all ranks p, of which each gets its rows. Collective.
///
/// `a` is [M, K_p] and `b` is [N, K_p], this rank's own: its part of K, which may be another on each rank. `out` is
/// [rows, N], this rank's rows of the sum: M are split over the ranks as evenly as whole rows allow, the longer parts first.
/// [`MatmulReduceScatter`] has other splits, a bias, and an output that is a sharded matrix.
///
/// # What it computes
/// A rank's *partial* p_r is a_r · b_rᵀ, summed in f32 and rounded once to `T`. Then s = p_0, s += p_1, … in f32, in the order of the
/// ranks, the bias last, rounded once. So the bits depend neither on who owns a row nor on what comes first, and are the same
/// each time.
///
/// With u the unit roundoff of `T` (2⁻⁸ for bf16, 2⁻¹¹ for f16) and v = 2⁻²⁴ that of f32, no element is farther from the exact
/// sum than (K_max + W) · v · Σ |a| · |b| + u · Σ |p_r| + u · |out|, to first order: the sums in f32, the rounding of each
/// partial, and the last one.
///
/// # Memory
/// At its first call a group allocates room for partials on each rank, in symmetric memory: for what comes, (W - 1) times as many
/// rows as the rank has that owns most; for what goes, M rows, and where it is pushed 15 more for each rank. Each is of N
/// elements, rounded up to 16 bytes. Later calls use it again, and only one that needs more allocates anew. It is free when the
/// group ends.
///
/// The call may return before the operation is complete; [`Group::synchronize`](crate::Group::synchronize) waits for it. The host
/// backend's returns when it is.
///
/// # Errors
/// [`Error::Shape`] or [`Error::ForeignArgument`] for arguments that don't fit together, before anything is done.
/// [`Error::CallMismatch`] if another rank makes another call; [`Error::OutOfMemory`] if the room for partials cannot be had; the
/// group's failure.
pub fn matmul_reduce_scatter<B: Backend, T: Element>(
    a: &Matrix<B, T>,
    b: &Matrix<B, T>,
    out: &mut Matrix<B, T>,
) -> Result<()> {
    MatmulReduceScatter::new().run(a, b, out)
}

/// [`matmul_reduce_scatter`] with what varies.
#[derive(Debug)]
pub struct MatmulReduceScatter<'a, B: Backend, T: Element> {
    sums: PartialSums<'a, B, T>,
    rows: Option<&'a [usize]>,
}

impl<'a, B: Backend, T: Element> MatmulReduceScatter<'a, B, T> {
    /// No bias, an even split, and the backend's configuration for the problem.
    pub fn new() -> Self {
        MatmulReduceScatter {
            sums: PartialSums::new(),
            rows: None,
        }
    }

    /// Adds `bias`, [1, N], to each of this rank's rows, in f32 before the last rounding.
    #[must_use]
    pub fn bias(mut self, bias: &'a Matrix<B, T>) -> Self {
        self.sums.bias = Some(bias);
        self
    }

    /// Cuts the problem up as `config` says. Where partials are pulled ([`Route::Pull`](crate::Route::Pull)), all rows are
    /// multiplied before any are moved: that needs nothing of other ranks while a kernel runs. Where they are pushed
    /// ([`Route::Push`](crate::Route::Push)), each block is sent when it is made, and the kernel adds what has come. GPUs pull
    /// unless they are asked to push, and have no [`Route::Store`](crate::Route::Store) for it yet.
    #[must_use]
    pub fn config(mut self, config: Config) -> Self {
        self.sums.config = Some(config);
        self
    }

    /// Gives rank r `rows[r]` rows of the sum, those of rank 0 first. A rank may have none.
    #[must_use]
    pub fn rows(mut self, rows: &'a [usize]) -> Self {
        self.rows = Some(rows);
        self
    }

    /// Does it, as [`matmul_reduce_scatter`]. The schedule is made at the first call for a shape and kept.
    ///
    /// # Errors
    /// As [`matmul_reduce_scatter`]; [`Error::Limit`] for a configuration that can't be; [`Error::Shape`] unless there is one
    /// count of rows a rank, M in all.
    pub fn run(&self, a: &Matrix<B, T>, b: &Matrix<B, T>, out: &mut Matrix<B, T>) -> Result<()> {
        let group = a.group();
        let check = || -> Result<Layout> {
            require_same_group("out", out.group(), group)?;
            let [m, k] = a.shape();
            let rows = match self.rows {
                Some(rows) => rows.to_vec(),
                None => balanced_rows(m, group.world_size()),
            };
            let layout = split(group, &rows, [m, k])?;
            let own = layout.rows_of(group.rank()).len();
            let [n, _] = b.shape();
            let what = "out [rows of this rank, N]";
            require_shape(group.rank(), what, [own, n], out.shape())?;
            Ok(layout)
        };
        let layout = check().map_err(|error| group.refuse(NAME, error))?;
        let programs = self.sums.programs(Which::Own, a, b, &layout)?;
        let out = Bound::Output(out.memory_mut());
        self.sums.run(Which::Own, &programs, a, b, out)
    }

    /// The same into the own rows of a sharded matrix, whose split it has: the next layer's input, with no copy. (On GPUs the rows
    /// of a sharded matrix are whole 16 bytes.)
    ///
    /// # Errors
    /// As [`MatmulReduceScatter::run`]; [`Error::Shape`] unless `out` is [M, N], or if other rows were asked for.
    pub fn run_into(
        &self,
        a: &Matrix<B, T>,
        b: &Matrix<B, T>,
        out: &mut ShardedMatrix<B, T>,
    ) -> Result<()> {
        let group = a.group();
        let ([m, k], [n, _]) = (a.shape(), b.shape());
        let check = || -> Result<(Layout, usize)> {
            require_same_group("out", out.group(), group)?;
            require_shape(group.rank(), "out [M, N]", [m, n], out.shape())?;
            let rows = out.layout().rows();
            if let Some(asked) = self.rows.filter(|asked| *asked != rows) {
                return Err(Error::Shape {
                    rank: group.rank(),
                    argument: "out (rows of each rank)".into(),
                    expected: asked.into(),
                    found: rows,
                });
            }
            let offset = out.rows().start * n * size_of::<T>();
            Ok((split(group, &rows, [m, k])?, offset))
        };
        let (layout, offset) = check().map_err(|error| group.refuse(NAME, error))?;
        let programs = self.sums.programs(Which::Own, a, b, &layout)?;
        let out = Bound::Part(out.memory_mut(), offset);
        self.sums.run(Which::Own, &programs, a, b, out)
    }
}

impl<B: Backend, T: Element> Default for MatmulReduceScatter<'_, B, T> {
    fn default() -> Self {
        MatmulReduceScatter::new()
    }
}
