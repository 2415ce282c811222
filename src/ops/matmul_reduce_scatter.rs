//! `out[rows of this rank, N] = Σ_p a_p[rows, K_p] · b_p[N, K_p]ᵀ`: each rank has a part of K, and gets its rows of the sum.

use super::{require_same_group, require_shape};
use crate::backend::Backend;
use crate::backend::sealed::{Bound, Call};
use crate::element::Element;
use crate::error::{Error, Result};
use crate::group::Group;
use crate::matrix::Matrix;
use crate::ranks::call::Operation;
use crate::schedule::layout::{MAX_EXTENT, balanced_rows, limit};
use crate::schedule::reduce_scatter::{self, MATRICES, NAME, Partials};
use crate::schedule::{Config, Description, Layout};
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
/// At its first call a group allocates room for partials on each rank, in symmetric memory: (W - 1) · ⌈M / W⌉ · N elements for what
/// comes, of which N is rounded up to 16 bytes, and M · N for what goes. Later calls use it again, and only one that needs more
/// allocates anew.
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
    bias: Option<&'a Matrix<B, T>>,
    config: Option<Config>,
    rows: Option<&'a [usize]>,
}

impl<'a, B: Backend, T: Element> MatmulReduceScatter<'a, B, T> {
    /// No bias, an even split, and the backend's configuration for the problem.
    pub fn new() -> Self {
        MatmulReduceScatter {
            bias: None,
            config: None,
            rows: None,
        }
    }

    /// Adds `bias`, [1, N], to each of this rank's rows, in f32 before the last rounding.
    #[must_use]
    pub fn bias(mut self, bias: &'a Matrix<B, T>) -> Self {
        self.bias = Some(bias);
        self
    }

    /// Cuts the problem up as `config` says. Where partials are pulled ([`Route::Pull`](crate::Route::Pull)), all rows are
    /// multiplied before any are moved: that needs nothing of other ranks while a kernel runs.
    #[must_use]
    pub fn config(mut self, config: Config) -> Self {
        self.config = Some(config);
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
        self.call(a, b, layout, Bound::Output(out.memory_mut()))
    }

    /// The same into the own rows of a sharded matrix, whose split it has: the next layer's input, with no copy.
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
        self.call(a, b, layout, Bound::Part(out.memory_mut(), offset))
    }

    /// The output has been checked.
    fn call(
        &self,
        a: &Matrix<B, T>,
        b: &Matrix<B, T>,
        layout: Layout,
        out: Bound<B>,
    ) -> Result<()> {
        let group = a.group();
        let [n, k] = b.shape();
        let describe = |operation| Description {
            operation,
            dtype: T::DTYPE,
            layout: layout.clone(),
            n,
        };
        let programs = || -> Result<_> {
            limit("N", n, 1, MAX_EXTENT)?;
            require_same_group("b", b.group(), group)?;
            require_shape(group.rank(), "b [N, K]", [n, layout.k()], [n, k])?;
            if let Some(bias) = self.bias {
                require_same_group("bias", bias.group(), group)?;
                require_shape(group.rank(), "bias [1, N]", [1, n], bias.shape())?;
            }
            let planner = reduce_scatter::reduce_scatter;
            let program = group.program(planner, describe(NAME), self.config)?;
            // Where partials are pulled, they are made before.
            let multiply = match B::schedule(&program).product() {
                Some(_) => None,
                None => {
                    let planner = reduce_scatter::multiply;
                    Some(group.program(planner, describe(MULTIPLY), self.config)?)
                }
            };
            Ok((program, multiply))
        };
        let (program, multiply) = programs().map_err(|error| group.refuse(NAME, error))?;
        let Some(agreed) = B::schedule(&program).agreed() else {
            unreachable!("all ranks take part");
        };
        let partials = Partials::of(&describe(NAME));
        let bytes = partials.rows() * partials.columns() * size_of::<T>();
        let partials = group.partials(agreed, bytes)?;
        let mut matrices = [const { Bound::Nothing }; MATRICES];
        matrices[reduce_scatter::A] = Bound::Input(a.memory());
        matrices[reduce_scatter::B] = Bound::Input(b.memory());
        matrices[reduce_scatter::OUT] = out;
        matrices[reduce_scatter::PARTIALS] = Bound::Symmetric(partials.as_ref());
        if let Some(bias) = self.bias {
            matrices[reduce_scatter::BIAS] = Bound::Input(bias.memory());
        }
        let operation = Operation {
            agreed,
            matrices: &[],
            traced: false,
        };
        group.operate(operation, |epoch| {
            let inner = group.inner();
            let run = |program| {
                let call = Call {
                    epoch,
                    matrices: &matrices,
                    trace: None,
                };
                inner.backend.run(&inner.members, program, call)
            };
            if let Some(multiply) = &multiply {
                // The operation has its number: the others wait for this rank.
                run(multiply).map_err(|error| inner.members.fail(error))?;
            }
            run(&program)
        })
    }
}

impl<B: Backend, T: Element> Default for MatmulReduceScatter<'_, B, T> {
    fn default() -> Self {
        MatmulReduceScatter::new()
    }
}

/// The part of the call that a rank does by itself, where partials are pulled.
const MULTIPLY: &str = "matmul of matmul_reduce_scatter";

/// `m` rows, of which rank r gets `rows[r]`, of a product over `k`.
fn split<B: Backend>(group: &Group<B>, rows: &[usize], [m, k]: [usize; 2]) -> Result<Layout> {
    let shape = |argument: &str, expected: usize, found: usize| {
        if expected == found {
            return Ok(());
        }
        Err(Error::Shape {
            rank: group.rank(),
            argument: argument.into(),
            expected: vec![expected],
            found: vec![found],
        })
    };
    shape("rows [world size]", group.world_size(), rows.len())?;
    let layout = Layout::new(rows, k)?;
    shape("the rows of all ranks [M]", m, layout.m())?;
    Ok(layout)
}
