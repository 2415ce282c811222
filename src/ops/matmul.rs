//! `out[M, N] = a[M, K] · b[N, K]ᵀ` on one rank, for the layers between the collective operations.

use std::fmt;
use std::marker::PhantomData;

use super::operands::{AddendView, Outputs, WeightScaling, WeightWidths, Weights};
use super::own_product::{self, PlannedProduct};
use super::product::{Addends, ProductOptions};
use super::scales::Operand;
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
use crate::schedule::{
    Accumulation, Activation, Config, Quantization, Scaling, Schedule, WeightLayout,
};

/// Multiplies on this rank alone: `out = a · bᵀ`.
///
/// `a` is [M, K]. `b` is [N, K], as a linear layer stores its weight. `out` is [M, N]. Products are summed in f32 and
/// rounded once.
///
/// The product runs after the earlier operations of this rank. The call may return before the product is complete.
/// [`Group::synchronize`](crate::Group::synchronize) waits for it. On the host backend the product is complete when the
/// call returns.
///
/// The matrices' types may be those of [`WeightOf`] and [`OutputOf`]. For parts of matrices, or for several weights, call
/// [`Matmul::run`], which takes all of them:
///
/// ```
/// use gemmesh::{Activation, Group, Host, Matmul, Result, bf16};
///
/// fn rank(group: Group<Host>) -> Result<()> {
///     let a = group.upload(&[bf16::ONE; 2 * 8], 2, 8)?;
///     let b = group.upload(&[bf16::NEG_ONE; 4 * 8], 4, 8)?;
///     let mut out = group.zeros::<f32>(2, 4)?;
///     Matmul::new().activation(Activation::Relu).run(&a, &b, &mut out)?;
///     assert_eq!(out.to_vec()?, [0.0; 2 * 4]);
///     Ok(())
/// }
///
/// Group::threads(1, rank)?;
/// # Ok::<_, gemmesh::Error>(())
/// ```
///
/// # Errors
/// [`Kind::Shape`] or [`Kind::Unsuitable`] if the arguments don't fit together; the group's failure.
#[track_caller]
pub fn matmul<B: Backend, T: Element, W: WeightOf<T>, O: OutputOf<T>>(
    a: &Matrix<B, T>,
    b: &Matrix<B, W>,
    out: &mut Matrix<B, O>,
) -> Result<()> {
    Matmul::new().run(a, b, out)
}

/// Builder for [`matmul`]: bias, activation, several weights, gates, residual, output types, scales, configuration.
///
/// ```
/// use gemmesh::{Group, Host, Matmul, Result, bf16};
///
/// fn rank(group: Group<Host>) -> Result<()> {
///     let (m, n, k) = (2, 4, 8);
///     let a = group.upload(&vec![bf16::ONE; m * k], m, k)?;
///     let b = group.upload(&vec![bf16::ONE; n * k], n, k)?;
///     let residual = group.upload(&vec![bf16::ONE; m * n], m, n)?;
///     let mut out = group.zeros::<bf16>(m, n)?;
///     Matmul::new().residual(&residual).run(&a, &b, &mut out)?;
///     assert_eq!(out.to_vec()?[0].to_f32(), 9.0);
///     Ok(())
/// }
///
/// Group::threads(1, rank)?;
/// # Ok::<_, gemmesh::Error>(())
/// ```
#[must_use = "nothing is done before it is run"]
pub struct Matmul<'a, B: Backend, T: Element> {
    options: ProductOptions,
    addends: Addends<'a, B>,
    element: PhantomData<T>,
}

impl<B: Backend, T: Element> fmt::Debug for Matmul<'_, B, T> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        self.options.describe(f, "Matmul", &self.addends, [])
    }
}

impl<'a, B: Backend, T: Element> Matmul<'a, B, T> {
    /// Default options: no bias, and the configuration that the backend chooses.
    pub fn new() -> Self {
        Matmul {
            options: ProductOptions::new(T::DTYPE),
            addends: Addends::default(),
            element: PhantomData,
        }
    }

    /// As [`AllGatherMatmul::bias`](crate::AllGatherMatmul::bias).
    pub fn bias(mut self, bias: impl Into<AddendView<'a, B, T>>) -> Self {
        self.addends.bias = Some(bias.into().view);
        self
    }

    /// As [`AllGatherMatmul::activation`](crate::AllGatherMatmul::activation).
    pub fn activation(mut self, activation: Activation) -> Self {
        self.options.activation = activation;
        self
    }

    /// Adds `residual`, [M, N], last, in f32 before the result is rounded. There must be only one output.
    pub fn residual(mut self, residual: impl Into<AddendView<'a, B, T>>) -> Self {
        self.addends.residual = Some(residual.into().view);
        self
    }

    /// As [`AllGatherMatmul::gated`](crate::AllGatherMatmul::gated).
    pub fn gated(mut self) -> Self {
        self.options.gated = true;
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

    /// Makes [`Matmul::prepare`] plan for outputs of this type. [`Matmul::run`] needs no such hint.
    ///
    /// The default is `T` if it has 16 bits, and bf16 for fp8. [`OutputOf`](crate::elements::OutputOf) lists the others.
    pub fn output_dtype(mut self, dtype: DType) -> Self {
        self.options.output_dtype = Some(dtype);
        self
    }

    /// Makes [`Matmul::prepare`] plan for weights of this type. [`Matmul::run`] needs no such hint.
    ///
    /// The default is `T` if it has 16 bits, and F8E4M3 for fp8. [`WeightOf`](crate::elements::WeightOf) lists the others.
    pub fn weight_dtype(mut self, dtype: DType) -> Self {
        self.options.weight_dtype = Some(dtype);
        self
    }

    /// Makes [`Matmul::prepare`] plan for scales of `a` and of the weights. [`Matmul::run`] needs no such hint.
    pub fn scaling(mut self, a: Scaling, weights: impl Into<WeightScaling>) -> Self {
        self.options.scaling = (a, weights.into().0);
        self
    }

    /// Makes [`Matmul::prepare`] plan for outputs that are quantised. [`Matmul::run`] needs no such hint.
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

    /// Runs the product, as [`matmul`].
    ///
    /// It takes one weight and one output, or several, as [`AllGatherMatmul::run`](crate::AllGatherMatmul::run).
    ///
    /// # Errors
    /// As [`matmul`]; [`Kind::Unsuitable`] as
    /// [`AllGatherMatmul::run`](crate::AllGatherMatmul::run); [`Kind::Limit`] or [`Kind::Unsupported`] if the
    /// configuration can't be used.
    #[track_caller]
    pub fn run<'m, 'o>(
        &self,
        a: impl Into<Operand<'m, B, T>>,
        weights: impl Into<Weights<'m, B, T>>,
        outputs: impl Into<Outputs<'o, B, T>>,
    ) -> Result<()> {
        let (weights, mut outputs) = (weights.into(), outputs.into());
        let product = (&weights.all[..], &mut outputs.all[..]);
        own_product::run(&self.options, &self.addends, &a.into().into(), product)
    }

    /// Plans products of a matrix [m, k] with a weight of N = `n`, so that they can run many times.
    ///
    /// For several weights, `n` is an array of their N. For a gated product, `n` holds the N of gate and up, which are
    /// equal, or one N for both. Later runs need no planning.
    ///
    /// # Errors
    /// [`Kind::Limit`] if a shape or the configuration is out of range, or if gate and up differ in N;
    /// [`Kind::Unsuitable`] if a gated product has more than two weights; [`Kind::Unsupported`] if the configuration is
    /// not supported; [`Kind::Shape`] or [`Kind::Unsuitable`] if the bias or the residual does not fit; the
    /// group's failure.
    #[track_caller]
    pub fn prepare(
        &self,
        group: &Group<B>,
        shape: [usize; 2],
        n: impl Into<WeightWidths>,
    ) -> Result<PreparedMatmul<'a, B, T>> {
        let (options, addends) = (&self.options, &self.addends);
        Ok(PreparedMatmul {
            planned: own_product::prepare(options, group, addends, shape, &n.into().0)?,
            addends: *addends,
            element: PhantomData,
        })
    }

    /// Whether this group can multiply a matrix [m, k] by weights of N = `n`: `Ok`, or the error that the product would
    /// give. An engine asks when it loads a model, before there is a matrix.
    ///
    /// The builder says what [`Matmul::prepare`] needs to know: types, scales, layout, configuration. The question
    /// allocates no memory of the device and does not block. It says nothing of the memory that a call needs.
    ///
    /// ```
    /// use gemmesh::fp8::Scaling;
    /// use gemmesh::{DType, F8E4M3, Group, Host, Matmul, Result};
    ///
    /// fn rank(group: Group<Host>) -> Result<()> {
    ///     let (m, n, k) = (2, 48, 256);
    ///     let product = || Matmul::<_, F8E4M3>::new().output_dtype(DType::F32);
    ///     let blocks = product().scaling(Scaling::Blocks, Scaling::Blocks);
    ///     assert!(blocks.supported(&group, [m, k], n).is_ok());
    ///     // Scales of blocks belong to both operands, or to none.
    ///     let rows = product().scaling(Scaling::Rows, Scaling::Blocks);
    ///     assert!(rows.supported(&group, [m, k], n).is_err());
    ///     Ok(())
    /// }
    ///
    /// Group::threads(1, rank)?;
    /// # Ok::<_, gemmesh::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Matmul::prepare`].
    #[track_caller]
    pub fn supported(
        &self,
        group: &Group<B>,
        shape: [usize; 2],
        n: impl Into<WeightWidths>,
    ) -> Result<()> {
        own_product::supported(&self.options, group, &self.addends, shape, &n.into().0)
    }
}

impl<B: Backend, T: Element> Default for Matmul<'_, B, T> {
    fn default() -> Self {
        Matmul::new()
    }
}

/// A product of one rank, planned by [`Matmul::prepare`]. It keeps the group alive.
///
/// ```
/// use gemmesh::{Group, Host, Matmul, Result, bf16};
///
/// fn rank(group: Group<Host>) -> Result<()> {
///     let (m, n, k) = (2, 4, 8);
///     let a = group.upload(&vec![bf16::ONE; m * k], m, k)?;
///     let b = group.upload(&vec![bf16::ONE; n * k], n, k)?;
///     let mut out = group.zeros::<bf16>(m, n)?;
///     let product = Matmul::new().prepare(&group, [m, k], n)?;
///     product.run(&a, &b, &mut out)?;
///     assert_eq!(out.to_vec()?[0].to_f32(), 8.0);
///     Ok(())
/// }
///
/// Group::threads(1, rank)?;
/// # Ok::<_, gemmesh::Error>(())
/// ```
pub struct PreparedMatmul<'a, B: Backend, T: Element> {
    planned: PlannedProduct<B>,
    addends: Addends<'a, B>,
    element: PhantomData<T>,
}

impl<B: Backend, T: Element> fmt::Debug for PreparedMatmul<'_, B, T> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        self.planned.describe(f)
    }
}

impl<B: Backend, T: Element> PreparedMatmul<'_, B, T> {
    /// The schedule: what is multiplied, and in which order.
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

    /// As [`Matmul::run`].
    ///
    /// # Errors
    /// As [`matmul`]; [`Kind::Unsuitable`] unless there are as many weights and outputs as planned, and if an
    /// output has a different type than planned ([`Matmul::output_dtype`]).
    #[track_caller]
    pub fn run<'m, 'o>(
        &self,
        a: impl Into<Operand<'m, B, T>>,
        weights: impl Into<Weights<'m, B, T>>,
        outputs: impl Into<Outputs<'o, B, T>>,
    ) -> Result<()> {
        let (weights, mut outputs) = (weights.into(), outputs.into());
        let product = (&weights.all[..], &mut outputs.all[..]);
        self.planned.run(&self.addends, &a.into().into(), product)
    }
}
