//! `out[rows of this rank, N] = Σ_p a_p[rows, K_p] · b_p[N, K_p]ᵀ`: each rank has a slice of K and gets its rows of the
//! sum.
#![allow(unsafe_code)]

use std::fmt;
use std::marker::PhantomData;

use super::call::{RawShards, RawView};
use super::operands::{AddendView, Outputs, WeightScaling, Weights};
use super::partial_sums::{PlannedSums, operands};
use super::product::{Addends, ProductOptions};
use super::scales::{Operand, RawOperand};
use super::sum_product::{ScatterProduct, only};
use crate::backend::Backend;
use crate::backend::sealed::Bound;
use crate::element::{DType, Element, OutputOf, WeightOf};
#[cfg(doc)]
use crate::error::Kind;
use crate::error::{Error, Result};
use crate::explanation::Explanation;
use crate::group::Group;
use crate::matrix::Matrix;
use crate::matrix::ShardedMatrix;
use crate::schedule::{Accumulation, Activation, Config, Scaling, Schedule, WeightLayout};
use crate::trace::Trace;

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
#[must_use = "nothing is done before it is run"]
pub struct MatmulReduceScatter<'a, B: Backend, T: Element> {
    options: ProductOptions,
    rows: Option<&'a [usize]>,
    addends: Addends<'a, B>,
    element: PhantomData<T>,
}

impl<B: Backend, T: Element> fmt::Debug for MatmulReduceScatter<'_, B, T> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let rows = self.rows;
        let rows = rows.map(|rows| format!("rows of {} ranks", rows.len()));
        self.options
            .describe(f, "MatmulReduceScatter", &self.addends, [rows])
    }
}

impl<'a, B: Backend, T: Element> MatmulReduceScatter<'a, B, T> {
    /// Default options: no bias, an even split, and the configuration that the backend chooses.
    pub fn new() -> Self {
        MatmulReduceScatter {
            options: ProductOptions::new(T::DTYPE),
            rows: None,
            addends: Addends::default(),
            element: PhantomData,
        }
    }

    /// Adds `bias`, [1, N], to each of this rank's rows, in f32 before the last rounding.
    ///
    /// Either all ranks give a bias or none does.
    pub fn bias(mut self, bias: impl Into<AddendView<'a, B, T>>) -> Self {
        self.addends.bias = Some(bias.into().view);
        self
    }

    /// Adds `residual`, [rows, N], to the sums last, in f32 before the last rounding.
    ///
    /// Either all ranks give a residual or none does.
    pub fn residual(mut self, residual: impl Into<AddendView<'a, B, T>>) -> Self {
        self.addends.residual = Some(residual.into().view);
        self
    }

    /// Applies a function to each sum, in f32, after the bias. It is never applied to a partial.
    pub fn activation(mut self, activation: Activation) -> Self {
        self.options.activation = activation;
        self
    }

    /// How the weights are stored. The default is [N, K]; the other layout is [K, N].
    pub fn weight_layout(mut self, layout: WeightLayout) -> Self {
        self.options.weights = layout;
        self
    }

    /// As [`AllGatherMatmul::constant_weights`](crate::AllGatherMatmul::constant_weights).
    pub fn constant_weights(mut self) -> Self {
        self.options.constant_weights = true;
        self
    }

    /// Makes [`MatmulReduceScatter::prepare`] plan for outputs of this type. [`MatmulReduceScatter::run`] needs no such hint.
    ///
    /// The default is `T` if it has 16 bits, and bf16 for fp8. [`OutputOf`](crate::elements::OutputOf) lists the others.
    pub fn output_dtype(mut self, dtype: DType) -> Self {
        self.options.output_dtype = Some(dtype);
        self
    }

    /// Makes [`MatmulReduceScatter::prepare`] plan for weights of this type. [`MatmulReduceScatter::run`] needs no such
    /// hint.
    ///
    /// The default is `T` if it has 16 bits, and F8E4M3 for fp8. [`WeightOf`](crate::elements::WeightOf) lists the others.
    pub fn weight_dtype(mut self, dtype: DType) -> Self {
        self.options.weight_dtype = Some(dtype);
        self
    }

    /// Makes [`MatmulReduceScatter::prepare`] plan for scales of `a` and of the weights. [`MatmulReduceScatter::run`] needs no
    /// such hint.
    pub fn scaling(mut self, a: Scaling, weights: impl Into<WeightScaling>) -> Self {
        self.options.scaling = (a, weights.into().0);
        self
    }

    /// How sums of products of fp8 are made. The default is [`Accumulation::Promoted`].
    pub fn accumulation(mut self, accumulation: Accumulation) -> Self {
        self.options.accumulation = accumulation;
        self
    }

    /// Uses `config` instead of the configuration that the backend would choose.
    ///
    /// - [`Route::Pull`](crate::tuning::Route::Pull): all rows are multiplied before any are moved. While a kernel runs, it
    ///   needs nothing of other ranks.
    /// - [`Route::Push`](crate::tuning::Route::Push): each block is sent when it has been computed, and the kernel adds the
    ///   blocks that have arrived.
    /// - [`Route::Store`](crate::tuning::Route::Store): the kernel stores each tile to its owner at once. On GPUs it stores to
    ///   at most seven peers. With [`Config::product_first`], a second kernel stores all rows behind the product.
    ///
    /// By default, up to eight ranks with GPUs of their own store few rows and push many. Other groups pull.
    pub fn config(mut self, config: Config) -> Self {
        self.options.config = Some(config);
        self
    }

    /// Gives rank r `rows[r]` rows of the sum, those of rank 0 first. A rank may have none.
    pub fn rows(mut self, rows: &'a [usize]) -> Self {
        self.rows = Some(rows);
        self
    }

    fn product(&self) -> ScatterProduct<'_> {
        ScatterProduct {
            options: &self.options,
            rows: self.rows,
        }
    }

    /// Runs the operation, as [`matmul_reduce_scatter`].
    ///
    /// The first call for a shape makes the schedule. Later calls use it again.
    ///
    /// # Errors
    /// As [`matmul_reduce_scatter`]; [`Kind::Limit`] or [`Kind::Unsupported`] if the configuration can't be used, or
    /// if the output is quantised; [`Kind::Unsuitable`] unless there is one output, and unless
    /// [`MatmulReduceScatter::rows`] has one count for each rank, M in all.
    #[track_caller]
    pub fn run<'m, 'o>(
        &self,
        a: impl Into<Operand<'m, B, T>>,
        b: impl Into<Weights<'m, B, T>>,
        out: impl Into<Outputs<'o, B, T>>,
    ) -> Result<()> {
        let operands = operands(a, b, self.addends);
        self.product().run(&operands, &mut out.into().all)
    }

    /// As [`MatmulReduceScatter::run`], but writes the sums into this rank's own rows of a sharded matrix.
    ///
    /// The sum is split as `out` is. `out` can be the next layer's input, without a copy. (On GPUs each row of a
    /// sharded matrix is a multiple of 16 bytes long.)
    ///
    /// # Errors
    /// As [`MatmulReduceScatter::run`]; [`Kind::Shape`] unless `out` is [M, N], or if [`MatmulReduceScatter::rows`]
    /// gives a different split.
    #[track_caller]
    pub fn run_into<'m, O: OutputOf<T>>(
        &self,
        a: impl Into<Operand<'m, B, T>>,
        b: impl Into<Weights<'m, B, T>>,
        out: &mut ShardedMatrix<B, O>,
    ) -> Result<()> {
        let operands = operands(a, b, self.addends);
        self.product().run_into(&operands, RawShards::from(&*out))
    }

    /// Plans the sum for matrices like `a` and weights of N = `n`, so that it can run many times.
    ///
    /// Later runs need no planning and no rendezvous. The first run that needs more memory for partials than the group
    /// has allocates it. This call is not collective.
    ///
    /// # Errors
    /// [`Kind::Limit`] if `n` or the configuration is out of range; [`Kind::Unsupported`] if the configuration is not
    /// supported; [`Kind::Unsuitable`] unless [`MatmulReduceScatter::rows`] has one count for each rank, M in all;
    /// [`Kind::Shape`] or [`Kind::Unsuitable`] if the bias or the residual does not fit; the group's failure.
    #[track_caller]
    pub fn prepare<'m>(
        &self,
        a: impl Into<Operand<'m, B, T>>,
        n: usize,
    ) -> Result<PreparedReduceScatter<'a, B, T>> {
        let RawView { group, shape, .. } = RawOperand::from(a.into()).values;
        Ok(PreparedReduceScatter {
            planned: self.product().prepare(group, &self.addends, shape, n)?,
            addends: self.addends,
            element: PhantomData,
        })
    }

    /// Whether this group can multiply a matrix [m, k] by a weight of N = `n` and sum: `Ok`, or the error that the call
    /// would give.
    ///
    /// As [`Matmul::supported`](crate::Matmul::supported), it needs no matrix and does not block.
    ///
    /// ```
    /// use gemmesh::{DType, Group, Host, MatmulReduceScatter, Result, bf16};
    ///
    /// fn rank(group: Group<Host>) -> Result<()> {
    ///     let (m, n, k) = (8, 4, 16); // K is this rank's slice
    ///     let sum = MatmulReduceScatter::<_, bf16>::new().output_dtype(DType::F32);
    ///     sum.supported(&group, [m, k], n)?;
    ///     assert!(sum.rows(&[6, 1]).supported(&group, [m, k], n).is_err()); // 7 rows in all
    ///     Ok(())
    /// }
    ///
    /// Group::threads(2, rank)?;
    /// # Ok::<_, gemmesh::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`MatmulReduceScatter::prepare`].
    #[track_caller]
    pub fn supported(&self, group: &Group<B>, shape: [usize; 2], n: usize) -> Result<()> {
        self.product().supported(group, &self.addends, shape, n)
    }
}

impl<B: Backend, T: Element> Default for MatmulReduceScatter<'_, B, T> {
    fn default() -> Self {
        MatmulReduceScatter::new()
    }
}

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
pub struct PreparedReduceScatter<'a, B: Backend, T: Element> {
    planned: PlannedSums<B>,
    addends: Addends<'a, B>,
    element: PhantomData<T>,
}

impl<B: Backend, T: Element> fmt::Debug for PreparedReduceScatter<'_, B, T> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        self.planned.describe(f, "PreparedReduceScatter")
    }
}

impl<B: Backend, T: Element> PreparedReduceScatter<'_, B, T> {
    /// The schedule: what is moved and added, and in which order. If partials are moved while the product is made, also
    /// what is multiplied.
    #[cfg(feature = "unstable-tools")]
    pub fn schedule(&self) -> &Schedule {
        self.planned.schedule()
    }

    /// How the operation is cut up.
    pub fn config(&self) -> Config {
        self.planned.config()
    }

    /// How the operation is cut up, and how long that is expected to take.
    pub fn explain(&self) -> Explanation {
        self.planned.explain()
    }

    /// As [`MatmulReduceScatter::run`]. `a` is [M, K], `b` is [N, K], `out` is [rows, N].
    ///
    /// # Errors
    /// As [`matmul_reduce_scatter`]; [`Kind::Unsuitable`] unless there is one output, and if it has a different
    /// type than planned ([`MatmulReduceScatter::output_dtype`]).
    #[track_caller]
    pub fn run<'m, 'o>(
        &self,
        a: impl Into<Operand<'m, B, T>>,
        b: impl Into<Weights<'m, B, T>>,
        out: impl Into<Outputs<'o, B, T>>,
    ) -> Result<()> {
        let operands = operands(a, b, self.addends);
        self.planned.scatter(&operands, &mut out.into().all, None)
    }

    /// As [`PreparedReduceScatter::run`], and returns a trace of this rank's work.
    ///
    /// Either all ranks trace an operation or none does. Ranks that trace an operation begin it together. (On GPUs the
    /// trace has no copies.)
    ///
    /// # Errors
    /// As [`matmul_reduce_scatter`].
    #[track_caller]
    pub fn run_traced<'m, 'o>(
        &self,
        a: impl Into<Operand<'m, B, T>>,
        b: impl Into<Weights<'m, B, T>>,
        out: impl Into<Outputs<'o, B, T>>,
    ) -> Result<Trace> {
        let mut spans = Vec::new();
        let operands = operands(a, b, self.addends);
        self.planned
            .scatter(&operands, &mut out.into().all, Some(&mut spans))?;
        Ok(Trace::new(self.planned.group().rank(), spans))
    }

    /// As [`PreparedReduceScatter::run`], but writes into this rank's own rows of a sharded matrix, [M, N].
    ///
    /// # Errors
    /// As [`MatmulReduceScatter::run_into`].
    #[track_caller]
    pub fn run_into<'m, O: OutputOf<T>>(
        &self,
        a: impl Into<Operand<'m, B, T>>,
        b: impl Into<Weights<'m, B, T>>,
        out: &mut ShardedMatrix<B, O>,
    ) -> Result<()> {
        let operands = operands(a, b, self.addends);
        self.planned.scatter_into(&operands, (&*out).into(), None)
    }

    /// As [`PreparedReduceScatter::run_into`], and returns a trace, as [`PreparedReduceScatter::run_traced`].
    ///
    /// # Errors
    /// As [`MatmulReduceScatter::run_into`].
    #[track_caller]
    pub fn run_into_traced<'m, O: OutputOf<T>>(
        &self,
        a: impl Into<Operand<'m, B, T>>,
        b: impl Into<Weights<'m, B, T>>,
        out: &mut ShardedMatrix<B, O>,
    ) -> Result<Trace> {
        let mut spans = Vec::new();
        let operands = operands(a, b, self.addends);
        self.planned
            .scatter_into(&operands, (&*out).into(), Some(&mut spans))?;
        Ok(Trace::new(self.planned.group().rank(), spans))
    }

    /// Only multiplies, and leaves the partials where they are made. Not collective; for benchmarks, after a run.
    ///
    /// # Errors
    /// [`Kind::Shape`] or [`Kind::Unsuitable`]; the group's failure.
    #[cfg(feature = "unstable-tools")]
    #[track_caller]
    pub fn matmul<W: WeightOf<T>>(&self, a: &Matrix<B, T>, b: &Matrix<B, W>) -> Result<()> {
        self.planned.matmul(&operands(a, b, self.addends))
    }

    /// Only adds the partials that the ranks have made before. Collective; for benchmarks, after a run.
    ///
    /// # Errors
    /// As [`matmul_reduce_scatter`].
    #[cfg(feature = "unstable-tools")]
    #[track_caller]
    pub fn reduce_scatter<O: OutputOf<T>>(&self, out: &mut Matrix<B, O>) -> Result<()> {
        let mut out = Outputs::<B, T>::from(out).all;
        let checked = self.planned.check_out(&out);
        checked.map_err(Error::of(self.planned.group().rank(), "reduce_scatter"))?;
        self.planned.reduce(&self.addends, only(&mut out), &[])
    }

    /// Copies the other ranks' partials of this rank's rows without notifying them. Not collective; for benchmarks,
    /// after a run.
    ///
    /// # Errors
    /// The group's failure.
    ///
    /// # Safety
    /// Until the copy has ended, no other rank begins an operation that makes partials or sums.
    #[cfg(feature = "unstable-tools")]
    #[track_caller]
    pub unsafe fn copy(&self) -> Result<()> {
        // SAFETY: as this function's.
        unsafe { self.planned.copy(Bound::Nothing) }
    }
}
