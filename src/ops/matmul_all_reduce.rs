//! `out[M, N] = Σ_p a_p[M, K_p] · b_p[N, K_p]ᵀ` on every rank: each rank has a part of K, and gets all of the sum.
#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::sync::Arc;

use super::call::{self, Added, Arguments, RawShards, RawView, require_same_group, require_shape};
use super::partial_sums::{PlannedSums, Which};
use super::product::ProductOptions;
use crate::backend::Backend;
use crate::backend::sealed::Bound;
use crate::element::Element;
use crate::error::{Error, Result};
use crate::explanation::Explanation;
use crate::group::Group;
use crate::matrix::ShardedMatrix;
use crate::matrix::{Matrix, MatrixView};
use crate::profile::span::Span;
use crate::schedule::plan::matrices::{self, MATRICES};
use crate::schedule::{Activation, Config, Operation, Problem, Schedule, WeightLayout};
use crate::trace::Trace;

/// `out = Σ a_p · b_pᵀ` over all ranks p, on every rank, with the same bits. Collective.
///
/// `a` is [M, K_p] and `b` is [N, K_p], this rank's own: its part of K, which may be another on each rank. `out` is [M,
/// N]; who owns which of its rows says who adds them up, and sends the sums on. For few rows (M · N elements in 1 MiB
/// on two ranks, in 512 KiB on up to four, in 256 KiB on up to eight) all ranks exchange all partials instead, and each
/// adds up all rows.
///
/// Numbers and memory are those of [`matmul_reduce_scatter`](crate::matmul_reduce_scatter), whichever way is taken; but
/// where partials are exchanged, the room for what comes is for (W - 1) · M rows.
///
/// ```
/// use gemmesh::{Group, Host, Result, bf16, matmul_all_reduce};
///
/// fn rank(group: Group<Host>) -> Result<()> {
///     let (m, n, k) = (8, 4, 16); // K is this rank's part
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
/// # Errors
/// As [`matmul_reduce_scatter`](crate::matmul_reduce_scatter).
pub fn matmul_all_reduce<B: Backend, T: Element>(
    a: &Matrix<B, T>,
    b: &Matrix<B, T>,
    out: &mut ShardedMatrix<B, T>,
) -> Result<()> {
    MatmulAllReduce::new().run(a, b, out)
}

/// Builder for [`matmul_all_reduce`]: bias, activation, residual, configuration.
///
/// ```
/// use gemmesh::{Activation, Group, Host, MatmulAllReduce, Result, bf16};
///
/// fn rank(group: Group<Host>) -> Result<()> {
///     let (m, n, k) = (8, 4, 16); // K is this rank's part
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
#[derive(Debug)]
#[must_use = "nothing is done before it is run"]
pub struct MatmulAllReduce<'a, B: Backend, T: Element>(ProductOptions<'a, B>, PhantomData<T>);

impl<'a, B: Backend, T: Element> MatmulAllReduce<'a, B, T> {
    /// No bias, and the backend's configuration for the problem.
    pub fn new() -> Self {
        MatmulAllReduce(ProductOptions::new(T::DTYPE), PhantomData)
    }

    /// Adds `bias`, [1, N], to each row, in f32 before the last rounding. It is added once, and every rank must give
    /// the same.
    pub fn bias(mut self, bias: impl Into<MatrixView<'a, B, T>>) -> Self {
        self.0.bias = Some(bias.into().into());
        self
    }

    /// Adds `residual`, [M, N], to the sums last, in f32 before the last rounding. Every rank gives the same, and its
    /// rows are added once.
    pub fn residual(mut self, residual: impl Into<MatrixView<'a, B, T>>) -> Self {
        self.0.residual = Some(residual.into().into());
        self
    }

    /// Applies a function to each sum, in f32 behind the bias: never to a part of it.
    pub fn activation(mut self, activation: Activation) -> Self {
        self.0.activation = activation;
        self
    }

    /// How weights lie: [N, K], unless this says [K, N].
    pub fn weight_layout(mut self, layout: WeightLayout) -> Self {
        self.0.weights = layout;
        self
    }

    /// Cuts the problem up as `config` says. Where partials are pulled ([`Route::Pull`](crate::Route::Pull)), product,
    /// sum and gather follow one another. Where they are pushed ([`Route::Push`](crate::Route::Push)) or stored by the
    /// kernel ([`Route::Store`](crate::Route::Store), on GPUs to seven peers at the most), the chunks are panels, of
    /// which one is summed while the next is multiplied. Up to eight ranks with GPUs of their own store few rows and
    /// push many; others pull.
    pub fn config(mut self, config: Config) -> Self {
        self.0.config = Some(config);
        self
    }

    /// Does it, as [`matmul_all_reduce`]. The schedule is made at the first call for a shape and kept.
    ///
    /// # Errors
    /// As [`matmul_all_reduce`]; [`Error::Limit`] or [`Error::Unsupported`] for a configuration that can't be.
    pub fn run<'m>(
        &self,
        a: impl Into<MatrixView<'m, B, T>>,
        b: impl Into<MatrixView<'m, B, T>>,
        out: &mut ShardedMatrix<B, T>,
    ) -> Result<()> {
        let (a, b) = (RawView::from(a.into()), RawView::from(b.into()));
        let planned = self.plan(a, RawShards::from(&*out));
        let planned = planned.map_err(|error| a.group.refuse(Which::All.name(), error))?;
        planned.collective([a, b], out, None)
    }

    /// Prepares the sums for matrices like `a` and outputs like `out`, to be run many times with no planning and no
    /// rendezvous on the way. Not collective. (The first call that needs more room for partials than the group has
    /// allocates it.)
    ///
    /// # Errors
    /// [`Error::Shape`] or [`Error::ForeignArgument`] for an output or a bias that does not fit; [`Error::Limit`] or
    /// [`Error::Unsupported`] for a configuration that can't be; the group's failure.
    pub fn prepare<'m>(
        &self,
        a: impl Into<MatrixView<'m, B, T>>,
        out: &ShardedMatrix<B, T>,
    ) -> Result<PreparedAllReduce<'a, B, T>> {
        let a = RawView::from(a.into());
        let planned = self.plan(a, out.into());
        let group = a.group;
        group.noted(planned.map_err(Error::refused(group.rank(), Which::All.name())))
    }

    fn plan(&self, a: RawView<B>, out: RawShards<B>) -> Result<PreparedAllReduce<'a, B, T>> {
        let group = a.group;
        let ([m, k], [_, n]) = (a.shape, out.shape());
        require_same_group("out", out.group, group)?;
        require_shape(group.rank(), "out [M, N]", [m, n], out.shape())?;
        out.require_by_rank("out")?;
        let layout = out.layout.of_columns(k)?;
        let sums = PlannedSums::new(&self.0, Which::All, group, layout, n, None)?;
        let gather = match sums.needs_gather() {
            true => Some(gather_of(group, out, sums.config())?),
            false => None,
        };
        Ok(PreparedAllReduce {
            gather,
            sums,
            element: PhantomData,
        })
    }
}

/// What gathers the sums of all rows, where each rank has those of its own.
fn gather_of<B: Backend>(
    group: &Group<B>,
    out: RawShards<B>,
    config: Config,
) -> Result<Arc<B::Program>> {
    let operation = Operation::GatherOfMatmulAllReduce;
    let problem = Problem::new(operation, out.dtype, out.layout.clone(), 0);
    group.program(problem, Some(config))
}

impl<B: Backend, T: Element> Default for MatmulAllReduce<'_, B, T> {
    fn default() -> Self {
        MatmulAllReduce::new()
    }
}

/// A product and its sums that have been planned, by [`MatmulAllReduce::prepare`]. They fit every `a`, `b` and output
/// of the same group, shapes and split. It keeps the group.
///
/// ```
/// use gemmesh::{Group, Host, MatmulAllReduce, Result, bf16};
///
/// fn rank(group: Group<Host>) -> Result<()> {
///     let (m, n, k) = (8, 4, 16); // K is this rank's part
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
#[derive(Debug)]
pub struct PreparedAllReduce<'a, B: Backend, T: Element> {
    // Freed before the group that it belongs to can end.
    /// Where partials are pulled by the owners of rows, each rank has the sums of its own rows first.
    gather: Option<Arc<B::Program>>,
    sums: PlannedSums<'a, B>,
    element: PhantomData<T>,
}

impl<B: Backend, T: Element> PreparedAllReduce<'_, B, T> {
    /// What is moved and added up, and in which order; and what is multiplied, where partials are not pulled. Where
    /// they are, and are not exchanged, a gather follows.
    #[doc(hidden)]
    pub fn schedule(&self) -> &Schedule {
        self.sums.schedule()
    }

    /// How it is cut up.
    pub fn config(&self) -> Config {
        self.sums.config()
    }

    /// How it is cut up, and what that is expected to take.
    pub fn explain(&self) -> Explanation {
        self.sums.explain()
    }

    /// As [`matmul_all_reduce`]. `a` is [M, K], `b` is [N, K], `out` is [M, N].
    ///
    /// # Errors
    /// As [`matmul_all_reduce`].
    pub fn run<'m>(
        &self,
        a: impl Into<MatrixView<'m, B, T>>,
        b: impl Into<MatrixView<'m, B, T>>,
        out: &mut ShardedMatrix<B, T>,
    ) -> Result<()> {
        self.collective([a.into().into(), b.into().into()], out, None)
    }

    /// As [`PreparedAllReduce::run`], and returns what happened when on this rank. All ranks trace an operation, or
    /// none does: those that do begin it together. (On GPUs copies are not in it.)
    ///
    /// # Errors
    /// As [`matmul_all_reduce`].
    pub fn run_traced<'m>(
        &self,
        a: impl Into<MatrixView<'m, B, T>>,
        b: impl Into<MatrixView<'m, B, T>>,
        out: &mut ShardedMatrix<B, T>,
    ) -> Result<Trace> {
        let rank = self.sums.group().rank();
        let operands = [a.into().into(), b.into().into()];
        Trace::of(rank, |spans| self.collective(operands, out, Some(spans)))
    }

    fn collective(
        &self,
        operands: [RawView<B>; 2],
        out: &mut ShardedMatrix<B, T>,
        mut trace: Option<&mut Vec<Span>>,
    ) -> Result<()> {
        let out = RawShards::from(&*out);
        let checked = self.sums.check_sharded(out);
        let (sums, shared) = (out.bound(), [out.id]);
        let first = trace.as_deref_mut();
        self.sums.run(operands, checked, sums, &shared, first)?;
        match &self.gather {
            Some(gather) => self.gather(gather, out, trace),
            None => Ok(()),
        }
    }

    fn gather(
        &self,
        gather: &Arc<B::Program>,
        out: RawShards<B>,
        trace: Option<&mut Vec<Span>>,
    ) -> Result<()> {
        let mut bound = [const { Bound::Nothing }; MATRICES];
        bound[matrices::A] = out.bound();
        let arguments = Arguments {
            matrices: &bound,
            shared: &[out.id],
            added: Added::default(),
        };
        call::run(self.sums.group(), None, gather, arguments, trace)
    }

    /// Only multiplies: partials stay where they are made. Not collective; for benchmarks, after a run.
    ///
    /// # Errors
    /// [`Error::Shape`] or [`Error::ForeignArgument`]; the group's failure.
    #[doc(hidden)]
    pub fn matmul(&self, a: &Matrix<B, T>, b: &Matrix<B, T>) -> Result<()> {
        self.sums.matmul([a.view().into(), b.view().into()])
    }

    /// Only adds up the partials that the ranks have made before, and gathers the sums. Collective; for benchmarks,
    /// after a run.
    ///
    /// # Errors
    /// As [`matmul_all_reduce`].
    #[doc(hidden)]
    pub fn all_reduce(&self, out: &mut ShardedMatrix<B, T>) -> Result<()> {
        let out = RawShards::from(&*out);
        self.sums.check_sharded(out)?;
        let gather = match (&self.gather, self.sums.reduces_own_rows) {
            (Some(gather), _) => Some(gather.clone()),
            (None, true) => Some(gather_of(self.sums.group(), out, self.config())?),
            (None, false) => None,
        };
        self.sums.reduce(out.bound(), &[out.id])?;
        gather.map_or(Ok(()), |gather| self.gather(&gather, out, None))
    }

    /// Copies the others' partials of this rank's rows, and their rows of `out`, with no word to them. Not collective;
    /// for benchmarks, after a run.
    ///
    /// # Errors
    /// [`Error::Shape`] or [`Error::ForeignArgument`]; the group's failure.
    ///
    /// # Safety
    /// Until it has ended no other rank begins anything that makes partials or sums, nor writes its rows of `out`.
    #[doc(hidden)]
    pub unsafe fn copy(&self, out: &mut ShardedMatrix<B, T>) -> Result<()> {
        let out = RawShards::from(&*out);
        self.sums.check_sharded(out)?;
        // SAFETY: as this function's.
        unsafe { self.sums.copy(out.bound()) }
    }
}
