//! `out[M, N] = gather(a)[M, K] · b[N, K]ᵀ`: the rows of `a` are multiplied while they arrive.
#![allow(unsafe_code)]

use std::fmt;
use std::marker::PhantomData;

use super::call::RawShards;
use super::gather_product::{GatherProduct, PlannedGather};
use super::operands::{AddendView, Outputs, WeightScaling, WeightWidths, Weights};
use super::product::{Addends, ProductOptions};
use super::row_split::RowSplit;
use super::scales::{RawShardedOperand, ShardedOperand};
use crate::backend::Backend;
use crate::element::{DType, Element, OutputOf, WeightOf};
#[cfg(doc)]
use crate::error::Error;
#[cfg(doc)]
use crate::error::Kind;
use crate::error::Result;
use crate::explanation::Explanation;
use crate::group::Group;
use crate::matrix::Matrix;
use crate::matrix::ShardedMatrix;
use crate::one_line::option;
use crate::profile::span::Work;
use crate::schedule::{
    Accumulation, Activation, Config, Quantization, Scaling, Schedule, WeightLayout,
};
use crate::trace::Trace;

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
#[must_use = "nothing is done before it is run"]
pub struct AllGatherMatmul<'a, B: Backend, T: Element> {
    options: ProductOptions,
    stages: Option<usize>,
    addends: Addends<'a, B>,
    element: PhantomData<T>,
}

impl<B: Backend, T: Element> fmt::Debug for AllGatherMatmul<'_, B, T> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let stages = option("stages", self.stages);
        self.options
            .describe(f, "AllGatherMatmul", &self.addends, [stages])
    }
}

impl<'a, B: Backend, T: Element> AllGatherMatmul<'a, B, T> {
    /// Default options: no bias, and the configuration that the backend chooses.
    pub fn new() -> Self {
        AllGatherMatmul {
            options: ProductOptions::new(T::DTYPE),
            stages: None,
            addends: Addends::default(),
            element: PhantomData,
        }
    }

    /// Adds `bias`, [1, N], to every row, in f32 before the result is rounded.
    ///
    /// If there are several weights, N is the sum of their N.
    pub fn bias(mut self, bias: impl Into<AddendView<'a, B, T>>) -> Self {
        self.addends.bias = Some(bias.into().view);
        self
    }

    /// Applies a function to each element, in f32, after the bias and before the result is rounded.
    pub fn activation(mut self, activation: Activation) -> Self {
        self.options.activation = activation;
        self
    }

    /// Multiplies with two weights, [gate, up], and makes one output of both products, as SwiGLU does.
    ///
    /// The output is `activation(a · gateᵀ) * (a · upᵀ)`, computed in f32 and rounded once. Neither product is written
    /// to memory. Both weights have the same N. A bias is [1, 2 N]; the gate's part comes first.
    pub fn gated(mut self) -> Self {
        self.options.gated = true;
        self
    }

    /// How the weights are stored. The default is [N, K]; the other layout is [K, N].
    pub fn weight_layout(mut self, layout: WeightLayout) -> Self {
        self.options.weights = layout;
        self
    }

    /// Promises that the weights are constant: every kernel that wrote them has ended when the product is enqueued, or
    /// when the graph is launched that has captured it.
    ///
    /// The product's kernel then reads weights before the kernel in front of it has ended, so less time passes between
    /// the products of a graph. All other operands it reads after that end. Weights that were copied from the host keep
    /// the promise. Wait once for kernels that made them:
    /// [`Group::synchronize`](crate::Group::synchronize) waits for this library's, and a synchronised stream for your
    /// own. If the promise is broken, the product may use old weights.
    ///
    /// Ranks may promise different things. The promise has no effect on the host backend, when ranks share a GPU, when
    /// the kernel's CTAs are limited, or when copies bring the rows or take the sums away.
    pub fn constant_weights(mut self) -> Self {
        self.options.constant_weights = true;
        self
    }

    /// Makes [`AllGatherMatmul::prepare`] plan for outputs of this type. [`AllGatherMatmul::run`] needs no such hint.
    ///
    /// The default is `T` if it has 16 bits, and bf16 for fp8. [`OutputOf`](crate::elements::OutputOf) lists the others.
    pub fn output_dtype(mut self, dtype: DType) -> Self {
        self.options.output_dtype = Some(dtype);
        self
    }

    /// Gathers in `stages` stages, from 1 to 64.
    ///
    /// Each rank's rows are cut into `stages` blocks. The first stage gathers the first block of every rank, the second
    /// stage the second block, and so on. The rows of the output stay in order. A matrix made by
    /// [`Group::sharded_staged`] has its own number of stages.
    pub fn stages(mut self, stages: usize) -> Self {
        self.stages = Some(stages);
        self
    }

    /// Makes [`AllGatherMatmul::prepare`] plan for weights of this type. [`AllGatherMatmul::run`] needs no such hint.
    ///
    /// The default is `T` if it has 16 bits, and F8E4M3 for fp8. [`WeightOf`](crate::elements::WeightOf) lists the others.
    pub fn weight_dtype(mut self, dtype: DType) -> Self {
        self.options.weight_dtype = Some(dtype);
        self
    }

    /// Makes [`AllGatherMatmul::prepare`] plan for scales of `a` and of the weights. [`AllGatherMatmul::run`] needs no
    /// such hint.
    pub fn scaling(mut self, a: Scaling, weights: impl Into<WeightScaling>) -> Self {
        self.options.scaling = (a, weights.into().0);
        self
    }

    /// Makes [`AllGatherMatmul::prepare`] plan for outputs that are quantised. [`AllGatherMatmul::run`] needs no such
    /// hint.
    pub fn quantization(mut self, quantization: Quantization) -> Self {
        self.options.quantization = Some(quantization);
        self
    }

    /// How sums of products of fp8 are made. The default is [`Accumulation::Promoted`].
    pub fn accumulation(mut self, accumulation: Accumulation) -> Self {
        self.options.accumulation = accumulation;
        self
    }

    /// Uses `config` instead of the configuration that the backend would choose.
    pub fn config(mut self, config: Config) -> Self {
        self.options.config = Some(config);
        self
    }

    fn product(&self) -> GatherProduct<'_> {
        GatherProduct {
            options: &self.options,
            stages: self.stages,
        }
    }

    /// Runs the product, as [`all_gather_matmul`].
    ///
    /// It takes one weight and one output, or several, whose N may differ, such as `[&q, &k, &v]` and
    /// `[&mut out_q, &mut out_k, &mut out_v]`. Outputs may be f32. They may be parts of a larger matrix
    /// ([`MatrixViewMut::split_columns`](crate::views::MatrixViewMut::split_columns)), or quantised
    /// ([`Matrix::quantized`]). The first call for a shape makes the
    /// schedule. Later calls use it again.
    ///
    /// # Errors
    /// As [`all_gather_matmul`]; [`Kind::Unsuitable`] unless there is one output for each weight, or one for the two weights
    /// of a gated product, and if the outputs' types differ; [`Kind::Limit`] or [`Kind::Unsupported`] if
    /// the configuration can't be used.
    #[track_caller]
    pub fn run<'w, 'o>(
        &self,
        a: impl Into<ShardedOperand<'w, B, T>>,
        weights: impl Into<Weights<'w, B, T>>,
        outputs: impl Into<Outputs<'o, B, T>>,
    ) -> Result<()> {
        let (weights, mut outputs) = (weights.into(), outputs.into());
        let product = (&weights.all[..], &mut outputs.all[..]);
        self.product().run(&self.addends, &a.into().into(), product)
    }

    /// Plans the product of matrices like `a` with a weight of N = `n`, so that it can run many times.
    ///
    /// For several weights, `n` is an array of their N. For a gated product, `n` holds the N of gate and up, which are
    /// equal, or one N for both. Later runs allocate nothing and have no rendezvous. (On the host, the crate that
    /// multiplies two tiles allocates and frees a few words each time.) This call is not collective.
    ///
    /// # Errors
    /// [`Kind::Limit`] if `n` or the configuration is out of range, if there are more than four weights, or if gate
    /// and up differ in N; [`Kind::Unsupported`] if the configuration is not supported; [`Kind::Unsuitable`] if a gated
    /// product has more than two weights; [`Kind::Shape`] or [`Kind::Unsuitable`] if the bias does not fit; the
    /// group's failure.
    #[track_caller]
    pub fn prepare(
        &self,
        a: &ShardedMatrix<B, T>,
        n: impl Into<WeightWidths>,
    ) -> Result<Prepared<'a, B, T>> {
        let planned = self
            .product()
            .prepare(&self.addends, RawShards::from(a), &n.into().0)?;
        Ok(Prepared {
            planned,
            addends: self.addends,
            element: PhantomData,
        })
    }

    /// Whether this group can gather and multiply such rows: `Ok`, or the error that the calls would give. An engine asks
    /// when it loads a model, before there is a matrix.
    ///
    /// `rows` are [M, K], split evenly, or the rows of each rank and K: [`RowSplit`]. The builder says the rest, as for
    /// [`AllGatherMatmul::prepare`]. The stages of a matrix of [`Group::sharded_staged`] are those of
    /// [`AllGatherMatmul::stages`]. It allocates nothing on the device and does not block.
    ///
    /// ```
    /// use gemmesh::fp8::Scaling;
    /// use gemmesh::{AllGatherMatmul, F8E4M3, Group, Host, Result};
    ///
    /// fn rank(group: Group<Host>) -> Result<()> {
    ///     let (m, n, k) = (8, 48, 256);
    ///     let product = || AllGatherMatmul::<_, F8E4M3>::new();
    ///     let scaled = product().scaling(Scaling::ShardedBlocks, Scaling::blocks_from(64, 0));
    ///     scaled.supported(&group, [m, k], [n, n])?; // two weights
    ///     scaled.supported(&group, (&[6, 2], k), n)?; // six rows of rank 0, and two of rank 1
    ///     // A weight may begin at a multiple of 16 rows.
    ///     let scaled = product().scaling(Scaling::ShardedBlocks, Scaling::blocks_from(8, 0));
    ///     assert!(scaled.supported(&group, [m, k], n).is_err());
    ///     Ok(())
    /// }
    ///
    /// Group::threads(2, rank)?;
    /// # Ok::<_, gemmesh::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`AllGatherMatmul::prepare`]; those of [`Group::sharded_rows`] for `a` and its sharded scales.
    #[track_caller]
    pub fn supported(
        &self,
        group: &Group<B>,
        rows: impl Into<RowSplit>,
        n: impl Into<WeightWidths>,
    ) -> Result<()> {
        let (rows, widths) = (rows.into(), n.into().0);
        self.product()
            .supported(group, &self.addends, &rows, &widths)
    }
}

impl<B: Backend, T: Element> Default for AllGatherMatmul<'_, B, T> {
    fn default() -> Self {
        AllGatherMatmul::new()
    }
}

/// A product planned by [`AllGatherMatmul::prepare`].
///
/// It fits every `a` of the same group, shape and split. It keeps the group alive.
///
/// ```
/// use gemmesh::{AllGatherMatmul, Group, Host, Result, bf16};
///
/// fn rank(group: Group<Host>) -> Result<()> {
///     let (m, n, k) = (8, 4, 16);
///     let mut a = group.sharded::<bf16>(m, k)?;
///     let own = vec![bf16::ONE; a.rows().len() * k];
///     a.shard_mut().copy_from_host(&own)?;
///     let b = group.upload(&vec![bf16::ONE; n * k], n, k)?;
///     let mut out = group.zeros::<bf16>(m, n)?;
///     let product = AllGatherMatmul::new().prepare(&a, n)?;
///     for _ in 0..3 {
///         product.run(&a, &b, &mut out)?;
///     }
///     assert_eq!(out.to_vec()?[0].to_f32(), 16.0);
///     Ok(())
/// }
///
/// Group::threads(2, rank)?;
/// # Ok::<_, gemmesh::Error>(())
/// ```
pub struct Prepared<'a, B: Backend, T: Element> {
    planned: PlannedGather<B>,
    addends: Addends<'a, B>,
    element: PhantomData<T>,
}

impl<B: Backend, T: Element> fmt::Debug for Prepared<'_, B, T> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        self.planned.describe(f)
    }
}

// A derived `Clone` would need a backend that can be cloned.
impl<B: Backend, T: Element> Clone for Prepared<'_, B, T> {
    fn clone(&self) -> Self {
        Prepared {
            planned: self.planned.clone(),
            addends: self.addends,
            element: PhantomData,
        }
    }
}

impl<B: Backend, T: Element> Prepared<'_, B, T> {
    /// The schedule: what is moved and multiplied, and in which order.
    #[cfg(feature = "unstable-tools")]
    pub fn schedule(&self) -> &Schedule {
        self.planned.schedule()
    }

    /// How the product is cut up.
    pub fn config(&self) -> Config {
        self.planned.config()
    }

    /// How the product is cut up, and how long that is expected to take.
    pub fn explain(&self) -> Explanation {
        self.planned.explain()
    }

    /// As [`AllGatherMatmul::run`].
    ///
    /// # Errors
    /// As [`all_gather_matmul`]; [`Kind::Unsuitable`] unless there are as many weights and outputs as planned, and
    /// if an output has a different type than planned ([`AllGatherMatmul::output_dtype`]).
    #[track_caller]
    pub fn run<'w, 'o>(
        &self,
        a: impl Into<ShardedOperand<'w, B, T>>,
        weights: impl Into<Weights<'w, B, T>>,
        outputs: impl Into<Outputs<'o, B, T>>,
    ) -> Result<()> {
        let (weights, mut outputs) = (weights.into(), outputs.into());
        let product = (&weights.all[..], &mut outputs.all[..]);
        self.planned
            .run(&self.addends, &a.into().into(), product, None)
    }

    /// As [`Prepared::run`], and returns a trace of this rank's work.
    ///
    /// Either all ranks trace an operation or none does. Ranks that trace an operation begin it together.
    ///
    /// # Errors
    /// As [`all_gather_matmul`].
    #[track_caller]
    pub fn run_traced<'w, 'o>(
        &self,
        a: impl Into<ShardedOperand<'w, B, T>>,
        weights: impl Into<Weights<'w, B, T>>,
        outputs: impl Into<Outputs<'o, B, T>>,
    ) -> Result<Trace> {
        let a = RawShardedOperand::from(a.into());
        let mut spans = Vec::new();
        let (weights, mut outputs) = (weights.into(), outputs.into());
        let product = (&weights.all[..], &mut outputs.all[..]);
        self.planned
            .run(&self.addends, &a, product, Some(&mut spans))?;
        Ok(Trace::new(a.values.group.rank(), spans))
    }

    /// Only gathers the rows of `a`. Collective.
    ///
    /// # Errors
    /// As [`all_gather_matmul`].
    #[track_caller]
    pub fn gather<'w>(&self, a: impl Into<ShardedOperand<'w, B, T>>) -> Result<()> {
        self.planned.gather(&a.into().into(), None)
    }

    /// Only multiplies, with the rows of `a` that this rank has gathered before. Not collective.
    ///
    /// # Errors
    /// [`Kind::Shape`] or [`Kind::Unsuitable`]; the group's failure.
    #[track_caller]
    pub fn matmul<'w, 'o>(
        &self,
        a: impl Into<ShardedOperand<'w, B, T>>,
        weights: impl Into<Weights<'w, B, T>>,
        outputs: impl Into<Outputs<'o, B, T>>,
    ) -> Result<()> {
        let (weights, mut outputs) = (weights.into(), outputs.into());
        let product = (&weights.all[..], &mut outputs.all[..]);
        self.planned
            .matmul(&self.addends, &a.into().into(), product, None)
    }

    /// [`Prepared::gather`] and then [`Prepared::matmul`], and returns a trace of both. Collective; for pictures of what
    /// overlapping gains. On GPUs, copies that are pushed are not in it.
    ///
    /// # Errors
    /// As [`all_gather_matmul`].
    #[cfg(feature = "unstable-tools")]
    #[track_caller]
    pub fn run_in_sequence_traced<'w, 'o>(
        &self,
        a: impl Into<ShardedOperand<'w, B, T>>,
        weights: impl Into<Weights<'w, B, T>>,
        outputs: impl Into<Outputs<'o, B, T>>,
    ) -> Result<Trace> {
        let a = RawShardedOperand::from(a.into());
        let RawShards { group, layout, .. } = a.values;
        let rank = group.rank();
        let (mut gathered, mut multiplied) = (Vec::new(), Vec::new());
        self.planned.gather(&a, Some(&mut gathered))?;
        let (weights, mut outputs) = (weights.into(), outputs.into());
        let product = (&weights.all[..], &mut outputs.all[..]);
        let multiplied_spans = Some(&mut multiplied);
        self.planned
            .matmul(&self.addends, &a, product, multiplied_spans)?;
        let mut trace = Trace::new(rank, gathered);
        trace.extend(Trace::new(rank, multiplied));
        // All rows are there, so the schedule does not say whose they are.
        let rows = self.config().tile.m;
        let owner = |row| (0..group.world_size()).find(|&rank| layout.rows_of(rank).contains(&row));
        for span in &mut trace.spans {
            if let Work::Tile { source, m, .. } = &mut span.work {
                *source = owner(*m as usize * rows).unwrap_or(rank);
            }
        }
        Ok(trace)
    }

    /// Copies all rows from the other ranks without notifying them. Not collective; for benchmarks.
    ///
    /// # Errors
    /// [`Kind::Shape`] or [`Kind::Unsuitable`]; the group's failure.
    ///
    /// # Safety
    /// Until the copy has ended, no other rank writes its own rows of this matrix.
    #[cfg(feature = "unstable-tools")]
    #[track_caller]
    pub unsafe fn copy<'w>(&self, a: impl Into<ShardedOperand<'w, B, T>>) -> Result<()> {
        // SAFETY: as this function's.
        unsafe { self.planned.copy(&a.into().into()) }
    }
}
