//! `out[rows of this rank, N] = Σ_p a_p[rows, K_p] · b_p[N, K_p]ᵀ`: each rank has a part of K, and gets its rows of the
//! sum.
#![allow(unsafe_code)]

use std::marker::PhantomData;

use super::call::{RawShards, RawView, require_same_group, require_shape};
use super::operands::Outputs;
use super::partial_sums::{PlannedSums, Which, split};
use super::product::{ProductOptions, RawOutputs};
use crate::backend::Backend;
use crate::backend::sealed::Bound;
use crate::element::{DType, Element};
use crate::error::{Error, Result};
use crate::explanation::Explanation;
use crate::matrix::ShardedMatrix;
use crate::matrix::{Matrix, MatrixView};
use crate::profile::span::Span;
use crate::schedule::{Activation, Config, Layout, Schedule, WeightLayout};
use crate::trace::Trace;

/// `out = Σ a_p · b_pᵀ` over all ranks p, of which each gets its rows. Collective.
///
/// `a` is [M, K_p] and `b` is [N, K_p], this rank's own: its part of K, which may be another on each rank. `out` is
/// [rows, N], this rank's rows of the sum: M are split over the ranks as evenly as whole rows allow, the longer parts
/// first. [`MatmulReduceScatter`] has other splits, a bias, and an output that is a sharded matrix.
///
/// # What it computes
/// A rank's *partial* p_r is a_r · b_rᵀ, summed in f32 and rounded once to `T`. Then s = p_0, s += p_1, … in f32, in
/// the order of the ranks, then the bias, the activation and the residual, in f32 too; the result is rounded once,
/// unless the output is of f32. So the bits depend neither on who owns a row nor on what comes first, and are the same
/// each time.
///
/// With u the unit roundoff of `T` (2⁻⁸ for bf16, 2⁻¹¹ for f16) and v = 2⁻²⁴ that of f32, no element is farther from
/// the exact sum, without an activation and a residual, than (K_max + W) · v · Σ |a| · |b| + u · Σ |p_r| + u · |out|,
/// to first order: the sums in f32, the rounding of each partial, and the last one; while no partial is too large for
/// `T` (an f16 ends at 65504), nor so small that it loses digits.
///
/// # Memory
/// At its first call a group allocates room for partials on each rank, in symmetric memory: for what comes, (W - 1)
/// times as many rows as the rank has that owns most; for what goes, M rows, and where it is pushed or stored 15 more
/// for each rank. Where it is stored, 15 more rows stand behind what comes from each. A row is of N elements, rounded
/// up to 16 bytes; on GPUs all of it is rounded up to 2 MiB. Later calls use it again, and only one that needs more
/// allocates anew. It is free when the group ends.
///
/// ```
/// use gemmesh::{Group, Host, Result, bf16, matmul_reduce_scatter};
///
/// fn rank(group: Group<Host>) -> Result<()> {
///     let (m, n, k) = (8, 4, 16); // K is this rank's part
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
/// The call may return before the operation is complete; [`Group::synchronize`](crate::Group::synchronize) waits for
/// it. The host backend's returns when it is.
///
/// # Errors
/// [`Error::Shape`] or [`Error::ForeignArgument`] for arguments that don't fit together, before anything is done.
/// [`Error::CallMismatch`] if another rank makes another call; [`Error::OutOfMemory`] if the room for partials cannot
/// be had; the group's failure.
pub fn matmul_reduce_scatter<B: Backend, T: Element>(
    a: &Matrix<B, T>,
    b: &Matrix<B, T>,
    out: &mut Matrix<B, T>,
) -> Result<()> {
    MatmulReduceScatter::new().run(a, b, out)
}

/// Builder for [`matmul_reduce_scatter`]: bias, activation, residual, f32 output, configuration.
///
/// ```
/// use gemmesh::{Group, Host, MatmulReduceScatter, Result, bf16};
///
/// fn rank(group: Group<Host>) -> Result<()> {
///     let (m, n, k) = (8, 4, 16); // K is this rank's part
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
#[derive(Debug)]
#[must_use = "nothing is done before it is run"]
pub struct MatmulReduceScatter<'a, B: Backend, T: Element> {
    options: ProductOptions<'a, B>,
    rows: Option<&'a [usize]>,
    element: PhantomData<T>,
}

impl<'a, B: Backend, T: Element> MatmulReduceScatter<'a, B, T> {
    /// No bias, an even split, and the backend's configuration for the problem.
    pub fn new() -> Self {
        MatmulReduceScatter {
            options: ProductOptions::new(T::DTYPE),
            rows: None,
            element: PhantomData,
        }
    }

    /// Adds `bias`, [1, N], to each of this rank's rows, in f32 before the last rounding. All ranks give one, or none
    /// does.
    pub fn bias(mut self, bias: impl Into<MatrixView<'a, B, T>>) -> Self {
        self.options.bias = Some(bias.into().into());
        self
    }

    /// Adds `residual`, [rows, N], to the sums last, in f32 before the last rounding. All ranks give one, or none does.
    pub fn residual(mut self, residual: impl Into<MatrixView<'a, B, T>>) -> Self {
        self.options.residual = Some(residual.into().into());
        self
    }

    /// Applies a function to each sum, in f32 behind the bias: never to a part of it.
    pub fn activation(mut self, activation: Activation) -> Self {
        self.options.activation = activation;
        self
    }

    /// How weights lie: [N, K], unless this says [K, N].
    pub fn weight_layout(mut self, layout: WeightLayout) -> Self {
        self.options.weights = layout;
        self
    }

    /// Prepares for an output of f32. (A call that was not prepared sees what it is given.)
    pub fn f32_output(mut self) -> Self {
        self.options.f32_output = true;
        self
    }

    /// Cuts the problem up as `config` says. Where partials are pulled ([`Route::Pull`](crate::Route::Pull)), all rows
    /// are multiplied before any are moved: that needs nothing of other ranks while a kernel runs. Where they are
    /// pushed ([`Route::Push`](crate::Route::Push)), each block is sent when it is made, and the kernel adds what has
    /// come. Where the kernel stores them ([`Route::Store`](crate::Route::Store), on GPUs to seven peers at the most),
    /// each tile goes to its owner at once. Up to eight ranks with GPUs of their own store few rows and push many;
    /// others pull.
    pub fn config(mut self, config: Config) -> Self {
        self.options.config = Some(config);
        self
    }

    /// Gives rank r `rows[r]` rows of the sum, those of rank 0 first. A rank may have none.
    pub fn rows(mut self, rows: &'a [usize]) -> Self {
        self.rows = Some(rows);
        self
    }

    /// Does it, as [`matmul_reduce_scatter`]. The schedule is made at the first call for a shape and kept.
    ///
    /// # Errors
    /// As [`matmul_reduce_scatter`]; [`Error::Limit`] or [`Error::Unsupported`] for a configuration that can't be;
    /// [`Error::Shape`] unless there is one
    /// count of rows a rank, M in all.
    pub fn run<'m, 'o>(
        &self,
        a: impl Into<MatrixView<'m, B, T>>,
        b: impl Into<MatrixView<'m, B, T>>,
        out: impl Into<Outputs<'o, B, T>>,
    ) -> Result<()> {
        let (a, b) = (RawView::from(a.into()), RawView::from(b.into()));
        let out = out.into().all;
        let dtype = out.first().map(|out| out.dtype);
        let plan = || self.plan(a, self.options.n_of(&b), self.layout(a)?, dtype);
        let planned = plan().map_err(|error| a.group.refuse(Which::Own.name(), error))?;
        planned.collective([a, b], out, None)
    }

    /// The same into the own rows of a sharded matrix, whose split it has: the next layer's input, with no copy. (On
    /// GPUs the rows of a sharded matrix are whole 16 bytes.)
    ///
    /// # Errors
    /// As [`MatmulReduceScatter::run`]; [`Error::Shape`] unless `out` is [M, N], or if other rows were asked for.
    pub fn run_into<'m>(
        &self,
        a: impl Into<MatrixView<'m, B, T>>,
        b: impl Into<MatrixView<'m, B, T>>,
        out: &mut ShardedMatrix<B, T>,
    ) -> Result<()> {
        let (a, b) = (RawView::from(a.into()), RawView::from(b.into()));
        let (group, [m, k], n) = (a.group, a.shape, self.options.n_of(&b));
        let plan = || -> Result<PreparedReduceScatter<'a, B, T>> {
            let out = RawShards::from(&*out);
            require_same_group("out", out.group, group)?;
            require_shape(group.rank(), "out [M, N]", [m, n], out.shape())?;
            out.require_by_rank("out")?;
            let layout = match self.rows {
                Some(_) => self.layout(a)?,
                None => out.layout.of_columns(k)?,
            };
            self.plan(a, n, layout, Some(out.dtype))
        };
        let planned = plan().map_err(|error| group.refuse(Which::Own.name(), error))?;
        planned.collective_into([a, b], out, None)
    }

    /// Prepares the sum for matrices like `a` and weights of N = `n`, to be run many times with no planning and no
    /// rendezvous on the way. Not collective. (The first call that needs more room for partials than the group has
    /// allocates it.)
    ///
    /// # Errors
    /// [`Error::Limit`] for an `n` or a configuration that can't be, and [`Error::Unsupported`] for such a
    /// configuration; [`Error::Shape`] unless there is one count of rows a rank, M in all; [`Error::Shape`] or
    /// [`Error::ForeignArgument`] for a bias that does not fit; the group's failure.
    pub fn prepare<'m>(
        &self,
        a: impl Into<MatrixView<'m, B, T>>,
        n: usize,
    ) -> Result<PreparedReduceScatter<'a, B, T>> {
        let a = RawView::from(a.into());
        let plan = || self.plan(a, n, self.layout(a)?, None);
        let group = a.group;
        group.noted(plan().map_err(Error::refused(group.rank(), Which::Own.name())))
    }

    fn plan(
        &self,
        a: RawView<B>,
        n: usize,
        layout: Layout,
        out: Option<DType>,
    ) -> Result<PreparedReduceScatter<'a, B, T>> {
        let planned = PlannedSums::new(&self.options, Which::Own, a.group, layout, n, out)?;
        Ok(PreparedReduceScatter(planned, PhantomData))
    }

    /// Who gets which rows of the product of `a`.
    fn layout(&self, a: RawView<B>) -> Result<Layout> {
        let (group, [m, k]) = (a.group, a.shape);
        match self.rows {
            Some(rows) => split(group, rows, [m, k]),
            None => Layout::balanced(m, k, group.world_size()),
        }
    }
}

impl<B: Backend, T: Element> Default for MatmulReduceScatter<'_, B, T> {
    fn default() -> Self {
        MatmulReduceScatter::new()
    }
}

/// A product and its sums that have been planned, by [`MatmulReduceScatter::prepare`]. They fit every `a`, `b` and
/// output of the same group and shapes. It keeps the group.
///
/// ```
/// use gemmesh::{Group, Host, MatmulReduceScatter, Result, bf16};
///
/// fn rank(group: Group<Host>) -> Result<()> {
///     let (m, n, k) = (8, 4, 16); // K is this rank's part
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
#[derive(Debug)]
pub struct PreparedReduceScatter<'a, B: Backend, T: Element>(PlannedSums<'a, B>, PhantomData<T>);

impl<B: Backend, T: Element> PreparedReduceScatter<'_, B, T> {
    /// What is moved and added up, and in which order; and what is multiplied, where partials are not pulled.
    #[doc(hidden)]
    pub fn schedule(&self) -> &Schedule {
        self.0.schedule()
    }

    /// How it is cut up.
    pub fn config(&self) -> Config {
        self.0.config()
    }

    /// How it is cut up, and what that is expected to take.
    pub fn explain(&self) -> Explanation {
        self.0.explain()
    }

    /// As [`MatmulReduceScatter::run`]. `a` is [M, K], `b` is [N, K], `out` is [rows, N].
    ///
    /// # Errors
    /// As [`matmul_reduce_scatter`].
    pub fn run<'m, 'o>(
        &self,
        a: impl Into<MatrixView<'m, B, T>>,
        b: impl Into<MatrixView<'m, B, T>>,
        out: impl Into<Outputs<'o, B, T>>,
    ) -> Result<()> {
        self.collective([a.into().into(), b.into().into()], out.into().all, None)
    }

    /// As [`PreparedReduceScatter::run`], and returns what happened when on this rank. All ranks trace an operation, or
    /// none does: those that do begin it together. (On GPUs copies are not in it.)
    ///
    /// # Errors
    /// As [`matmul_reduce_scatter`].
    pub fn run_traced<'m, 'o>(
        &self,
        a: impl Into<MatrixView<'m, B, T>>,
        b: impl Into<MatrixView<'m, B, T>>,
        out: impl Into<Outputs<'o, B, T>>,
    ) -> Result<Trace> {
        let rank = self.0.group().rank();
        let (operands, out) = ([a.into().into(), b.into().into()], out.into().all);
        Trace::of(rank, |spans| self.collective(operands, out, Some(spans)))
    }

    fn collective(
        &self,
        operands: [RawView<B>; 2],
        out: RawOutputs<B>,
        trace: Option<&mut Vec<Span>>,
    ) -> Result<()> {
        let checked = self.0.check_out(&out);
        self.0.run(operands, checked, only(out), &[], trace)
    }

    /// The same into the own rows of a sharded matrix, [M, N], as [`MatmulReduceScatter::run_into`].
    ///
    /// # Errors
    /// As [`MatmulReduceScatter::run_into`].
    pub fn run_into<'m>(
        &self,
        a: impl Into<MatrixView<'m, B, T>>,
        b: impl Into<MatrixView<'m, B, T>>,
        out: &mut ShardedMatrix<B, T>,
    ) -> Result<()> {
        self.collective_into([a.into().into(), b.into().into()], out, None)
    }

    /// As [`PreparedReduceScatter::run_into`], and returns what [`PreparedReduceScatter::run_traced`] does.
    ///
    /// # Errors
    /// As [`MatmulReduceScatter::run_into`].
    pub fn run_into_traced<'m>(
        &self,
        a: impl Into<MatrixView<'m, B, T>>,
        b: impl Into<MatrixView<'m, B, T>>,
        out: &mut ShardedMatrix<B, T>,
    ) -> Result<Trace> {
        let rank = self.0.group().rank();
        let operands = [a.into().into(), b.into().into()];
        Trace::of(rank, |spans| {
            self.collective_into(operands, out, Some(spans))
        })
    }

    fn collective_into(
        &self,
        operands: [RawView<B>; 2],
        out: &mut ShardedMatrix<B, T>,
        trace: Option<&mut Vec<Span>>,
    ) -> Result<()> {
        let checked = self.0.check_sharded(RawShards::from(&*out));
        let [_, n] = self.0.shape();
        let offset = self.0.own_rows().start * n * size_of::<T>();
        let out = Bound::Part(out.memory_mut(), offset);
        self.0.run(operands, checked, out, &[], trace)
    }

    /// Only multiplies: partials stay where they are made. Not collective; for benchmarks, after a run.
    ///
    /// # Errors
    /// [`Error::Shape`] or [`Error::ForeignArgument`]; the group's failure.
    #[doc(hidden)]
    pub fn matmul(&self, a: &Matrix<B, T>, b: &Matrix<B, T>) -> Result<()> {
        self.0.matmul([a.view().into(), b.view().into()])
    }

    /// Only adds up the partials that the ranks have made before. Collective; for benchmarks, after a run.
    ///
    /// # Errors
    /// As [`matmul_reduce_scatter`].
    #[doc(hidden)]
    pub fn reduce_scatter(&self, out: &mut Matrix<B, T>) -> Result<()> {
        let out = Outputs::<B, T>::from(out).all;
        self.0.check_out(&out)?;
        self.0.reduce(only(out), &[])
    }

    /// Copies the others' partials of this rank's rows, with no word to them. Not collective; for benchmarks, after a
    /// run.
    ///
    /// # Errors
    /// The group's failure.
    ///
    /// # Safety
    /// Until it has ended no other rank begins anything that makes partials or sums.
    #[doc(hidden)]
    pub unsafe fn copy(&self) -> Result<()> {
        // SAFETY: as this function's.
        unsafe { self.0.copy(Bound::Nothing) }
    }
}

/// The one output that there is: it has been checked.
fn only<B: Backend>(outputs: RawOutputs<B>) -> Bound<B> {
    let mut outputs = outputs.into_iter();
    outputs.next().map_or(Bound::Nothing, |out| out.bound)
}
