//! `out[M, N] = Σ_p a_p[M, K_p] · b_p[N, K_p]ᵀ` on every rank: each rank has a slice of K and gets the whole sum.
#![allow(unsafe_code)]

use std::fmt;
use std::marker::PhantomData;

use super::call::RawView;
use super::operands::{AddendView, WeightScaling, Weights};
use super::partial_sums::operands;
use super::product::{Addends, ProductOptions};
use super::row_split::RowSplit;
use super::scales::{Operand, RawOperand};
use super::sum_product::{self, PlannedAllReduce};
use crate::backend::Backend;
use crate::element::{AddendOf, DType, Element, WeightOf};
#[cfg(doc)]
use crate::error::Error;
#[cfg(doc)]
use crate::error::Kind;
use crate::error::Result;
use crate::explanation::Explanation;
use crate::group::Group;
use crate::matrix::Matrix;
use crate::matrix::ShardedMatrix;
use crate::schedule::{Accumulation, Activation, Config, Scaling, Schedule, WeightLayout};
use crate::trace::Trace;

/// Sums `a_p · b_pᵀ` over all ranks p; every rank gets the whole sum, with the same bits. Collective.
///
/// `a` is [M, K_p] and `b` is [N, K_p], this rank's slices of K. K_p may differ between ranks. `out` is [M, N].
///
/// The owner of a row of `out` adds its partials and sends the sum to all ranks. For few rows, all ranks send their
/// partials to all ranks instead, and each rank adds all rows. Rows are few if M · N elements fit in 1 MiB on two
/// ranks, in 512 KiB on up to four, or in 256 KiB on up to eight. (Over several hosts: in 1 MiB on two ranks, and on more in
/// 256 KiB and in 2 MiB divided by the ranks of other hosts.) Two ranks of a host also do so if partials are stored behind
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
#[must_use = "nothing is done before it is run"]
pub struct MatmulAllReduce<'a, B: Backend, T: Element> {
    options: ProductOptions,
    addends: Addends<'a, B>,
    element: PhantomData<T>,
}

impl<B: Backend, T: Element> fmt::Debug for MatmulAllReduce<'_, B, T> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        self.options
            .describe(f, "MatmulAllReduce", &self.addends, [])
    }
}

impl<'a, B: Backend, T: Element> MatmulAllReduce<'a, B, T> {
    /// Default options: no bias, and the configuration that the backend chooses.
    pub fn new() -> Self {
        MatmulAllReduce {
            options: ProductOptions::new(T::DTYPE),
            addends: Addends::default(),
            element: PhantomData,
        }
    }

    /// Adds `bias`, [1, N], to each row, in f32 before the last rounding.
    ///
    /// It is added once. Every rank must give the same bias.
    pub fn bias(mut self, bias: impl Into<AddendView<'a, B, T>>) -> Self {
        self.addends.bias = Some(bias.into().view);
        self
    }

    /// Adds `residual`, [M, N], to the sums last, in f32 before the last rounding.
    ///
    /// It is added once. Every rank must give the same residual.
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

    /// Makes [`MatmulAllReduce::prepare`] plan for weights of this type. [`MatmulAllReduce::run`] needs no such hint.
    ///
    /// The default is `T` if it has 16 bits, and F8E4M3 for fp8. [`WeightOf`](crate::elements::WeightOf) lists the others.
    pub fn weight_dtype(mut self, dtype: DType) -> Self {
        self.options.weight_dtype = Some(dtype);
        self
    }

    /// Makes [`MatmulAllReduce::prepare`] plan for scales of `a` and of the weights. [`MatmulAllReduce::run`] needs no
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
    pub fn config(mut self, config: Config) -> Self {
        self.options.config = Some(config);
        self
    }

    /// Runs the operation, as [`matmul_all_reduce`].
    ///
    /// The first call for a shape makes the schedule. Later calls use it again.
    ///
    /// # Errors
    /// As [`matmul_all_reduce`]; [`Kind::Limit`] or [`Kind::Unsupported`] if the configuration can't be used.
    #[track_caller]
    pub fn run<'m, O: AddendOf<T>>(
        &self,
        a: impl Into<Operand<'m, B, T>>,
        b: impl Into<Weights<'m, B, T>>,
        out: &mut ShardedMatrix<B, O>,
    ) -> Result<()> {
        let operands = operands(a, b, self.addends);
        sum_product::all_reduce(&self.options, &operands, (&*out).into())
    }

    /// Plans the sums for matrices like `a` and outputs like `out`, so that they can run many times.
    ///
    /// Later runs need no planning and no rendezvous. The first run that needs more memory for partials than the group
    /// has allocates it. This call is not collective.
    ///
    /// # Errors
    /// [`Kind::Shape`] or [`Kind::Unsuitable`] if the output, the bias or the residual does not fit;
    /// [`Kind::Limit`] or [`Kind::Unsupported`] if the configuration can't be used; the group's failure.
    #[track_caller]
    pub fn prepare<'m, O: AddendOf<T>>(
        &self,
        a: impl Into<Operand<'m, B, T>>,
        out: &ShardedMatrix<B, O>,
    ) -> Result<PreparedAllReduce<'a, B, T>> {
        let RawView { group, shape, .. } = RawOperand::from(a.into()).values;
        let (options, addends) = (&self.options, self.addends);
        let planned = sum_product::prepare_all_reduce(options, group, &addends, shape, out.into())?;
        Ok(PreparedAllReduce {
            planned,
            addends,
            element: PhantomData,
        })
    }

    /// Whether this group can sum such products: `Ok`, or the error that the calls would give.
    ///
    /// `rows` are the extents [M, K] of `a`, of which K is this rank's slice. The rows of the output are split evenly, or
    /// as `rows` says: [`RowSplit`]. N is that of the weight. As [`Matmul::supported`](crate::Matmul::supported), it needs
    /// no matrix and does not block.
    ///
    /// ```
    /// use gemmesh::fp8::Scaling;
    /// use gemmesh::{F8E4M3, Group, Host, MatmulAllReduce, Result};
    ///
    /// fn rank(group: Group<Host>) -> Result<()> {
    ///     let (m, n, k) = (8, 32, 128); // K is this rank's slice
    ///     let sum = MatmulAllReduce::<_, F8E4M3>::new().scaling(Scaling::Blocks, Scaling::Blocks);
    ///     sum.supported(&group, [m, k], n)
    /// }
    ///
    /// Group::threads(2, rank)?;
    /// # Ok::<_, gemmesh::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`MatmulAllReduce::prepare`]; those of [`Group::sharded_rows`] for the output.
    #[track_caller]
    pub fn supported(&self, group: &Group<B>, rows: impl Into<RowSplit>, n: usize) -> Result<()> {
        sum_product::supports_all_reduce(&self.options, group, &self.addends, &rows.into(), n)
    }
}

impl<B: Backend, T: Element> Default for MatmulAllReduce<'_, B, T> {
    fn default() -> Self {
        MatmulAllReduce::new()
    }
}

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
pub struct PreparedAllReduce<'a, B: Backend, T: Element> {
    planned: PlannedAllReduce<B>,
    addends: Addends<'a, B>,
    element: PhantomData<T>,
}

impl<B: Backend, T: Element> fmt::Debug for PreparedAllReduce<'_, B, T> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        self.planned.sums.describe(f, "PreparedAllReduce")
    }
}

impl<B: Backend, T: Element> PreparedAllReduce<'_, B, T> {
    /// The schedule: what is moved and added, and in which order. If partials are moved while the product is made, also
    /// what is multiplied. Otherwise, if each rank adds up only its own rows, a gather follows that is not in this
    /// schedule.
    #[cfg(feature = "unstable-tools")]
    pub fn schedule(&self) -> &Schedule {
        self.planned.sums.schedule()
    }

    /// How the operation is cut up.
    pub fn config(&self) -> Config {
        self.planned.sums.config()
    }

    /// How the operation is cut up, and how long that is expected to take.
    pub fn explain(&self) -> Explanation {
        self.planned.sums.explain()
    }

    /// As [`matmul_all_reduce`]. `a` is [M, K], `b` is [N, K], `out` is [M, N].
    ///
    /// # Errors
    /// As [`matmul_all_reduce`].
    #[track_caller]
    pub fn run<'m, O: AddendOf<T>>(
        &self,
        a: impl Into<Operand<'m, B, T>>,
        b: impl Into<Weights<'m, B, T>>,
        out: &mut ShardedMatrix<B, O>,
    ) -> Result<()> {
        let operands = operands(a, b, self.addends);
        self.planned.run(&operands, (&*out).into(), None)
    }

    /// As [`PreparedAllReduce::run`], and returns a trace of this rank's work.
    ///
    /// Either all ranks trace an operation or none does. Ranks that trace an operation begin it together. (On GPUs the
    /// trace has no copies.)
    ///
    /// # Errors
    /// As [`matmul_all_reduce`].
    #[track_caller]
    pub fn run_traced<'m, O: AddendOf<T>>(
        &self,
        a: impl Into<Operand<'m, B, T>>,
        b: impl Into<Weights<'m, B, T>>,
        out: &mut ShardedMatrix<B, O>,
    ) -> Result<Trace> {
        let mut spans = Vec::new();
        let operands = operands(a, b, self.addends);
        self.planned
            .run(&operands, (&*out).into(), Some(&mut spans))?;
        Ok(Trace::new(self.planned.sums.group().rank(), spans))
    }

    /// Only multiplies, and leaves the partials where they are made. Not collective; for benchmarks, after a run.
    ///
    /// # Errors
    /// [`Kind::Shape`] or [`Kind::Unsuitable`]; the group's failure.
    #[cfg(feature = "unstable-tools")]
    #[track_caller]
    pub fn matmul<W: WeightOf<T>>(&self, a: &Matrix<B, T>, b: &Matrix<B, W>) -> Result<()> {
        self.planned.sums.matmul(&operands(a, b, self.addends))
    }

    /// Only adds the partials that the ranks have made before, and gathers the sums. Collective; for benchmarks, after
    /// a run.
    ///
    /// # Errors
    /// As [`matmul_all_reduce`].
    #[cfg(feature = "unstable-tools")]
    #[track_caller]
    pub fn all_reduce<O: AddendOf<T>>(&self, out: &mut ShardedMatrix<B, O>) -> Result<()> {
        self.planned.reduce(&self.addends, (&*out).into())
    }

    /// Copies the other ranks' partials of this rank's rows, and their rows of `out`, without notifying them. Not
    /// collective; for benchmarks, after a run.
    ///
    /// # Errors
    /// [`Kind::Shape`] or [`Kind::Unsuitable`]; the group's failure.
    ///
    /// # Safety
    /// Until the copy has ended, no other rank begins an operation that makes partials or sums, or writes its rows of
    /// `out`.
    #[cfg(feature = "unstable-tools")]
    #[track_caller]
    pub unsafe fn copy<O: AddendOf<T>>(&self, out: &mut ShardedMatrix<B, O>) -> Result<()> {
        // SAFETY: as this function's.
        unsafe { self.planned.copy((&*out).into()) }
    }
}
