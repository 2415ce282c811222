//! The builder of all products, and the products that it prepares.

use std::fmt;
use std::marker::PhantomData;

use super::operands::{AddendView, WeightScaling, WeightWidths, Weights};
use super::planned_product::PlannedProduct;
use super::product::{ProductOptions, ProductRequest};
use super::product_form::{
    GatherProduct, OfAllRanks, OwnOutputs, OwnRows, PlannedOutputs, PlannedRows, ProductForm,
    ScatterProduct, SeveralWeights, into_own_rows, operands,
};
use super::product_operands::{Addends, RawResults};
use super::row_split::RowSplit;
use super::scales::Operand;
use crate::backend::Backend;
use crate::element::{DType, Element, OutputOf};
#[cfg(doc)]
use crate::error::Kind;
use crate::error::Result;
use crate::explanation::Explanation;
use crate::group::Group;
use crate::matrix::ShardedMatrix;
use crate::schedule::{
    Accumulation, Activation, Config, Quantization, Scaling, Schedule, WeightLayout,
};
use crate::trace::Trace;

/// Builder of a product: what is added, which function is applied, types, scales, configuration.
///
/// Its form `F` is one of [four](ProductForm), each with a name of its own:
/// [`AllGatherMatmul`](crate::AllGatherMatmul), [`Matmul`](crate::Matmul),
/// [`MatmulReduceScatter`](crate::MatmulReduceScatter) and [`MatmulAllReduce`](crate::MatmulAllReduce).
///
/// [`ProductBuilder::run`] multiplies at once. [`ProductBuilder::prepare`] plans a product that runs often.
/// [`ProductBuilder::supported`] asks before there are matrices.
#[must_use = "nothing is done before it is run"]
pub struct ProductBuilder<'a, B: Backend, T: Element, F: ProductForm> {
    options: ProductOptions<'a>,
    addends: Addends<'a, B>,
    types: PhantomData<fn() -> (T, F)>,
}

impl<B: Backend, T: Element, F: ProductForm> fmt::Debug for ProductBuilder<'_, B, T, F> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        self.options.describe(f, F::NAMES[0], &self.addends)
    }
}

impl<B: Backend, T: Element, F: ProductForm> Default for ProductBuilder<'_, B, T, F> {
    fn default() -> Self {
        ProductBuilder::new()
    }
}

impl<'a, B: Backend, T: Element, F: ProductForm> ProductBuilder<'a, B, T, F> {
    /// Default options: no bias, an even split, and the configuration that the backend chooses.
    pub fn new() -> Self {
        ProductBuilder {
            options: ProductOptions::new(F::OPERATION, T::DTYPE),
            addends: Addends::default(),
            types: PhantomData,
        }
    }

    /// Adds `bias`, [1, N], to every row of the result, in f32 before it is rounded.
    ///
    /// If there are several weights, N is the sum of their N. To a sum over the ranks it is added once: either all ranks
    /// give a bias or none does, and for [`MatmulAllReduce`](crate::MatmulAllReduce) all give the same.
    pub fn bias(mut self, bias: impl Into<AddendView<'a, B, T>>) -> Self {
        self.addends.bias = Some(bias.into().view);
        self
    }

    /// Applies a function to each element, in f32, after the bias and before the result is rounded.
    ///
    /// Sums over the ranks are complete then: it is never applied to a partial.
    pub fn activation(mut self, activation: Activation) -> Self {
        self.options.activation = activation;
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

    /// The type of the weights, for [`ProductBuilder::prepare`] and [`ProductBuilder::supported`].
    ///
    /// The default is `T` if it has 16 bits, and F8E4M3 for fp8. [`WeightOf`](crate::elements::WeightOf) lists the others.
    /// [`ProductBuilder::run`] sees it in its arguments.
    pub fn weight_dtype(mut self, dtype: DType) -> Self {
        self.options.weight_dtype = Some(dtype);
        self
    }

    /// The scales of `a` and of the weights, for [`ProductBuilder::prepare`] and [`ProductBuilder::supported`].
    /// [`ProductBuilder::run`] sees them in its arguments.
    pub fn scaling(mut self, a: Scaling, weights: impl Into<WeightScaling>) -> Self {
        self.options.scaling = (a, weights.into().0);
        self
    }

    /// Runs the product.
    ///
    /// It takes rows and outputs as its form says ([`ProductForm`]), and one weight. A product that is not summed over
    /// the ranks also takes several weights, whose N may differ, such as `[&q, &k, &v]` with
    /// `[&mut out_q, &mut out_k, &mut out_v]`. Outputs may be f32. They may be parts of a larger matrix
    /// ([`MatrixViewMut::split_columns`](crate::views::MatrixViewMut::split_columns)), or quantised
    /// ([`Matrix::quantized`](crate::Matrix::quantized)). The first call for a shape makes the schedule. Later calls use
    /// it again.
    ///
    /// # Errors
    /// As the function of the same name; [`Kind::Unsuitable`] unless there is one output for each weight, or one for the
    /// two weights of a gated product, and if the outputs' types differ; [`Kind::Limit`] or [`Kind::Unsupported`] if
    /// the configuration can't be used.
    #[track_caller]
    pub fn run<'m, 'o>(
        &self,
        a: impl Into<F::Rows<'m, B, T>>,
        weights: impl Into<Weights<'m, B, T>>,
        outputs: impl Into<F::Results<'o, B, T>>,
    ) -> Result<()>
    where
        'a: 'm,
    {
        let operands = operands::<B, T, F>(a, weights, self.addends);
        self.options.run(&operands, &mut outputs.into().into())
    }

    /// Plans the product of such rows for such outputs, so that it can run many times.
    ///
    /// - `a`: for gathered rows, a sharded matrix. Otherwise a matrix, or `(&group, [m, k])`.
    /// - `outputs`: the weights' N, such as `n` or `[n_q, n_k, n_v]`. For a gated product, N of gate and up, which are
    ///   equal, or one N for both. For [`MatmulAllReduce`](crate::MatmulAllReduce), the sharded matrix of the sums.
    ///
    /// Later runs need no planning and no rendezvous. They allocate nothing, except that the first run that needs more
    /// memory for partials than the group has allocates it. (On the host, the crate that multiplies two tiles allocates
    /// and frees a few words each time.) This call is not collective.
    ///
    /// # Errors
    /// [`Kind::Limit`] if a shape or the configuration is out of range, if there are more than four weights, or if gate
    /// and up differ in N; [`Kind::Unsupported`] if the configuration is not supported; [`Kind::Unsuitable`] if a gated
    /// product has more than two weights, or a sum more than one; [`Kind::Shape`] or [`Kind::Unsuitable`] if the output,
    /// the bias, the residual or the split does not fit; the group's failure.
    #[track_caller]
    pub fn prepare<'m>(
        &self,
        a: impl Into<F::RowsLike<'m, B, T>>,
        outputs: impl Into<F::OutputsLike<'m, B, T>>,
    ) -> Result<Prepared<'a, B, T, F>> {
        let PlannedRows { group, rows } = a.into().into();
        let PlannedOutputs { widths, into } = outputs.into().into();
        let addends = self.addends;
        let request = ProductRequest {
            group,
            addends,
            rows,
            into,
            widths: &widths,
        };
        Ok(Prepared {
            planned: self.options.prepare(request)?,
            addends,
            types: PhantomData,
        })
    }

    /// Whether this group can make the product: `Ok`, or the error that the calls would give. An engine asks when it loads
    /// a model, before there is a matrix.
    ///
    /// `rows` are [M, K], split evenly, or the rows of each rank and K ([`RowSplit`]): those of `a` if they are gathered,
    /// and otherwise those of the sums. The builder says the rest, as for [`ProductBuilder::prepare`]: types, scales,
    /// layout, configuration. The question allocates no memory of the device and does not block. It says nothing of the
    /// memory that a call needs.
    ///
    /// ```
    /// use gemmesh::fp8::Scaling;
    /// use gemmesh::{AllGatherMatmul, DType, F8E4M3, Group, Host, Matmul, MatmulReduceScatter, Result};
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
    ///     // Scales of blocks belong to both operands, or to none.
    ///     let rows = Matmul::<_, F8E4M3>::new().scaling(Scaling::Rows, Scaling::Blocks);
    ///     assert!(rows.supported(&group, [m, k], n).is_err());
    ///     let sum = MatmulReduceScatter::<_, F8E4M3>::new().output_dtype(DType::F32);
    ///     assert!(sum.rows(&[6, 1]).supported(&group, [m, k], n).is_err()); // 7 rows in all
    ///     Ok(())
    /// }
    ///
    /// Group::threads(2, rank)?;
    /// # Ok::<_, gemmesh::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`ProductBuilder::prepare`]; those of [`Group::sharded_rows`] for matrices that are sharded.
    #[track_caller]
    pub fn supported(
        &self,
        group: &Group<B>,
        rows: impl Into<RowSplit>,
        n: impl Into<WeightWidths>,
    ) -> Result<()> {
        self.options.supported(ProductRequest {
            group,
            addends: self.addends,
            rows: rows.into(),
            into: None,
            widths: &n.into().0,
        })
    }
}

impl<'a, B: Backend, T: Element, F: OwnRows> ProductBuilder<'a, B, T, F> {
    /// Adds `residual` to the result last, in f32 before it is rounded. There must be only one output.
    ///
    /// It is shaped like the output. To a sum over the ranks it is added once: either all ranks give a residual or none
    /// does, and for [`MatmulAllReduce`](crate::MatmulAllReduce) all give the same.
    pub fn residual(mut self, residual: impl Into<AddendView<'a, B, T>>) -> Self {
        self.addends.residual = Some(residual.into().view);
        self
    }
}

impl<B: Backend, T: Element, F: OwnOutputs> ProductBuilder<'_, B, T, F> {
    /// The type of the outputs, for [`ProductBuilder::prepare`] and [`ProductBuilder::supported`].
    ///
    /// The default is `T` if it has 16 bits, and bf16 for fp8. [`OutputOf`](crate::elements::OutputOf) lists the others.
    /// [`ProductBuilder::run`] sees it in its arguments.
    pub fn output_dtype(mut self, dtype: DType) -> Self {
        self.options.output_dtype = Some(dtype);
        self
    }
}

impl<B: Backend, T: Element, F: SeveralWeights> ProductBuilder<'_, B, T, F> {
    /// Multiplies with two weights, [gate, up], and makes one output of both products, as SwiGLU does.
    ///
    /// The output is `activation(a · gateᵀ) * (a · upᵀ)`, computed in f32 and rounded once. Neither product is written
    /// to memory. Both weights have the same N. A bias is [1, 2 N]; the gate's part comes first.
    pub fn gated(mut self) -> Self {
        self.options.gated = true;
        self
    }

    /// How the outputs are quantised, for [`ProductBuilder::prepare`] and [`ProductBuilder::supported`].
    /// [`ProductBuilder::run`] sees it in its arguments.
    pub fn quantization(mut self, quantization: Quantization) -> Self {
        self.options.quantization = Some(quantization);
        self
    }
}

impl<B: Backend, T: Element> ProductBuilder<'_, B, T, GatherProduct> {
    /// Gathers in `stages` stages, from 1 to 64.
    ///
    /// Each rank's rows are cut into `stages` blocks. The first stage gathers the first block of every rank, the second
    /// stage the second block, and so on. The rows of the output stay in order. A matrix made by
    /// [`Group::sharded_staged`] has its own number of stages, which [`ProductBuilder::supported`] is told here.
    pub fn stages(mut self, stages: usize) -> Self {
        self.options.stages = Some(stages);
        self
    }
}

impl<'a, B: Backend, T: Element> ProductBuilder<'a, B, T, ScatterProduct> {
    /// Gives rank r `rows[r]` rows of the sum, those of rank 0 first. A rank may have none.
    pub fn rows(mut self, rows: &'a [usize]) -> Self {
        self.options.rows = Some(rows);
        self
    }

    /// As [`ProductBuilder::run`], but writes the sums into this rank's own rows of a sharded matrix.
    ///
    /// The sum is split as `out` is. `out` can be the next layer's input, without a copy. (On GPUs each row of a
    /// sharded matrix is a multiple of 16 bytes long.)
    ///
    /// # Errors
    /// As [`ProductBuilder::run`]; [`Kind::Shape`] unless `out` is [M, N], or if [`ProductBuilder::rows`] gives a
    /// different split.
    #[track_caller]
    pub fn run_into<'m, O: OutputOf<T>>(
        &self,
        a: impl Into<Operand<'m, B, T>>,
        weights: impl Into<Weights<'m, B, T>>,
        out: &mut ShardedMatrix<B, O>,
    ) -> Result<()>
    where
        'a: 'm,
    {
        let operands = operands::<B, T, ScatterProduct>(a, weights, self.addends);
        self.options
            .run(&operands, &mut into_own_rows::<B, T, O>(out))
    }
}

/// A product planned by [`ProductBuilder::prepare`].
///
/// It fits all arguments of the same group, shapes and split. It keeps the group alive.
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
pub struct Prepared<'a, B: Backend, T: Element, F: ProductForm = GatherProduct> {
    pub(super) planned: PlannedProduct<B>,
    pub(super) addends: Addends<'a, B>,
    types: PhantomData<fn() -> (T, F)>,
}

impl<B: Backend, T: Element, F: ProductForm> fmt::Debug for Prepared<'_, B, T, F> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        self.planned.describe(f, F::NAMES[1])
    }
}

// A derived `Clone` would need a backend that can be cloned.
impl<B: Backend, T: Element, F: ProductForm> Clone for Prepared<'_, B, T, F> {
    fn clone(&self) -> Self {
        Prepared {
            planned: self.planned.clone(),
            addends: self.addends,
            types: PhantomData,
        }
    }
}

impl<'a, B: Backend, T: Element, F: ProductForm> Prepared<'a, B, T, F> {
    /// The schedule: what is moved, multiplied and added, and in which order. The product of a sum is in it if partials
    /// are moved while it is made. A gather of sums that follows is not.
    #[cfg(feature = "unstable-tools")]
    pub fn schedule(&self) -> &Schedule {
        self.planned.schedule()
    }

    /// How the product is cut up.
    pub fn config(&self) -> Config {
        self.planned.config
    }

    /// How the product is cut up, and how long that is expected to take.
    pub fn explain(&self) -> Explanation {
        self.planned.explain()
    }

    /// As [`ProductBuilder::run`].
    ///
    /// # Errors
    /// As [`ProductBuilder::run`]; [`Kind::Unsuitable`] unless there are the planned numbers of weights and outputs, and
    /// if an output has a different type than planned ([`ProductBuilder::output_dtype`]).
    #[track_caller]
    pub fn run<'m, 'o>(
        &self,
        a: impl Into<F::Rows<'m, B, T>>,
        weights: impl Into<Weights<'m, B, T>>,
        outputs: impl Into<F::Results<'o, B, T>>,
    ) -> Result<()>
    where
        'a: 'm,
    {
        let operands = operands::<B, T, F>(a, weights, self.addends);
        self.planned
            .run(&operands, &mut outputs.into().into(), None)
    }
}

impl<'a, B: Backend, T: Element, F: OfAllRanks> Prepared<'a, B, T, F> {
    /// As [`Prepared::run`], and returns a trace of this rank's work.
    ///
    /// Either all ranks trace an operation or none does. Ranks that trace an operation begin it together. (On GPUs the
    /// trace of a sum has no copies.)
    ///
    /// # Errors
    /// As [`Prepared::run`].
    #[track_caller]
    pub fn run_traced<'m, 'o>(
        &self,
        a: impl Into<F::Rows<'m, B, T>>,
        weights: impl Into<Weights<'m, B, T>>,
        outputs: impl Into<F::Results<'o, B, T>>,
    ) -> Result<Trace>
    where
        'a: 'm,
    {
        self.traced(a, weights, outputs.into().into())
    }

    #[track_caller]
    pub(super) fn traced<'m>(
        &self,
        a: impl Into<F::Rows<'m, B, T>>,
        weights: impl Into<Weights<'m, B, T>>,
        mut results: RawResults<B>,
    ) -> Result<Trace>
    where
        'a: 'm,
    {
        let mut spans = Vec::new();
        let operands = operands::<B, T, F>(a, weights, self.addends);
        self.planned
            .run(&operands, &mut results, Some(&mut spans))?;
        Ok(Trace::new(self.planned.group.rank(), spans))
    }
}
