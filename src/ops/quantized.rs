//! Outputs that are quantised, and their scales.

use std::fmt;

use super::call::{RawOutput, RawView, require_same_group, require_shape};
use super::scales::whole_columns;
use crate::backend::Backend;
use crate::backend::sealed::Bound;
use crate::element::{DType, F8E4M3, Value};
use crate::error::{Error, Result};
use crate::group::Group;
use crate::matrix::{Matrix, MatrixView, MatrixViewMut};
use crate::schedule::limits::require;
use crate::schedule::plan::matrices::{MATRICES, OUT, OUT_SCALES};
use crate::schedule::{Quantization, Scaling};

/// How an output is quantised to [`F8E4M3`](crate::F8E4M3), and its scales: f32 in this rank's own memory.
///
/// [`Quantization`] says what the numbers are. [`Matrix::quantized`] and [`MatrixViewMut::quantized`] give an output of
/// a product its scales, and [`quantize`](crate::fp8::quantize) takes them. Made from a `&mut` [`Matrix`] or a
/// [`MatrixViewMut`], the scales are those of [`Quantized::blocks`].
#[must_use = "scales do nothing"]
pub struct Quantized<'a, B: Backend> {
    pub(super) quantization: Quantization,
    group: &'a Group<B>,
    shape: [usize; 2],
    scales: Bound<'a, B>,
}

impl<B: Backend> fmt::Debug for Quantized<'_, B> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let (quantization, shape) = (self.quantization, self.shape);
        write!(f, "Quantized<{}>({quantization:?}, {shape:?})", B::NAME)
    }
}

impl<'a, B: Backend> Quantized<'a, B> {
    /// Makes a scale for each 128 columns of a row: [M, ⌈N/128⌉]. The last block of a row may have fewer columns.
    ///
    /// The matrix may have as many columns as [`ShardedScales::columns_of_blocks`](crate::fp8::ShardedScales::columns_of_blocks)
    /// says, so that it may be the own rows of scales that are gathered. Those after the scales are not written.
    pub fn blocks(scales: impl Into<MatrixViewMut<'a, B, f32>>) -> Self {
        Quantized::made(scales.into(), Quantization::blocks())
    }

    /// As [`Quantized::blocks`], with the scales of a row in a column: [⌈N/128⌉, M].
    pub fn transposed_blocks(scales: impl Into<MatrixViewMut<'a, B, f32>>) -> Self {
        Quantized::made(scales.into(), Quantization::transposed_blocks())
    }

    /// Quantises by one scale, which is there already: [1, 1].
    pub fn tensor(scale: impl Into<MatrixView<'a, B, f32>>) -> Self {
        let scale = RawView::from(scale.into());
        Quantized {
            quantization: Quantization::tensor(),
            group: scale.group,
            shape: scale.shape,
            scales: scale.input(),
        }
    }

    /// Says that the first column is column `first` of its block, as [`Quantization::first_column`].
    pub fn first_column(mut self, first: usize) -> Self {
        self.quantization = self.quantization.first_column(first);
        self
    }

    /// Rounds the scales that are made up to powers of two.
    pub fn power_of_two(mut self) -> Self {
        self.quantization = self.quantization.power_of_two();
        self
    }

    /// Scales without element types, of which the caller has checked that they are f32.
    pub(crate) fn raw(
        given: RawView<'a, B>,
        made: RawOutput<'a, B>,
        quantization: Quantization,
    ) -> Self {
        Quantized {
            quantization,
            group: given.group,
            shape: given.shape,
            scales: match quantization.scaling {
                Scaling::Tensor => given.input(),
                _ => made.bound,
            },
        }
    }

    fn made(scales: MatrixViewMut<'a, B, f32>, quantization: Quantization) -> Self {
        Quantized {
            quantization,
            group: scales.group(),
            shape: scales.shape(),
            scales: scales.output(),
        }
    }

    /// Checks the scales of an output of this shape against the plan.
    pub(super) fn check(
        &self,
        group: &Group<B>,
        planned: Option<Quantization>,
        shape: [usize; 2],
    ) -> Result<()> {
        require_planned(planned, Some(self.quantization))?;
        let name = match self.quantization.scaling {
            Scaling::Blocks => "scales of out [M, ⌈N/128⌉]",
            Scaling::BlocksFrom { .. } => "scales of out [M, ⌈(first column + N)/128⌉]",
            Scaling::TransposedBlocks => "scales of out [⌈N/128⌉, M]",
            _ => "scales of out [1, 1]",
        };
        require_same_group("scales of out", self.group, group)?;
        let mut expected = self.quantization.shape(shape);
        let whole = [expected[0], whole_columns::<B>(expected[1])];
        // The own rows of scales that are gathered may have columns after them.
        if self.quantization.scaling == Scaling::Blocks && self.shape == whole {
            expected = whole;
        }
        require_shape(name, expected, self.shape)
    }

    /// The memory of the scales.
    pub(super) fn bound(self) -> Bound<'a, B> {
        self.scales
    }
}

impl<'a, B: Backend> From<MatrixViewMut<'a, B, f32>> for Quantized<'a, B> {
    fn from(scales: MatrixViewMut<'a, B, f32>) -> Self {
        Quantized::blocks(scales)
    }
}

impl<'a, B: Backend> From<&'a mut Matrix<B, f32>> for Quantized<'a, B> {
    fn from(scales: &'a mut Matrix<B, f32>) -> Self {
        Quantized::blocks(scales)
    }
}

/// An output of a product that is quantised. [`Matrix::quantized`] and [`MatrixViewMut::quantized`] make one.
#[must_use = "outputs do nothing"]
pub struct QuantizedOutput<'a, B: Backend> {
    values: MatrixViewMut<'a, B, F8E4M3>,
    scales: Quantized<'a, B>,
}

impl<B: Backend> fmt::Debug for QuantizedOutput<'_, B> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let (shape, quantization) = (self.values.shape(), self.scales.quantization);
        write!(f, "QuantizedOutput<{}>{shape:?} {quantization:?}", B::NAME)
    }
}

impl<'a, B: Backend> MatrixViewMut<'a, B, F8E4M3> {
    /// The view as an output of a product, which is quantised before it is stored.
    pub fn quantized(self, scales: impl Into<Quantized<'a, B>>) -> QuantizedOutput<'a, B> {
        QuantizedOutput {
            values: self,
            scales: scales.into(),
        }
    }
}

impl<B: Backend> Matrix<B, F8E4M3> {
    /// The matrix as an output of a product, which is quantised before it is stored.
    ///
    /// The products' f32 results are quantised, with their bias, activation, gate and residual. Nothing is rounded in
    /// between. N is a multiple of 16. On GPUs, outputs of bf16 and f16 operands have 16,777,216 elements at the most, and
    /// so have those that begin inside a block ([`Quantized::first_column`]).
    pub fn quantized<'a>(
        &'a mut self,
        scales: impl Into<Quantized<'a, B>>,
    ) -> QuantizedOutput<'a, B> {
        self.view_mut().quantized(scales)
    }
}

/// An output of a product without its element type, and its scales if it is quantised.
pub struct ProductOutput<'a, B: Backend> {
    pub values: RawOutput<'a, B>,
    scales: Option<Quantized<'a, B>>,
}

impl<'a, B: Backend, T: Value> From<MatrixViewMut<'a, B, T>> for ProductOutput<'a, B> {
    fn from(values: MatrixViewMut<'a, B, T>) -> Self {
        ProductOutput {
            values: RawOutput::from(&values),
            scales: None,
        }
    }
}

impl<'a, B: Backend> From<QuantizedOutput<'a, B>> for ProductOutput<'a, B> {
    fn from(output: QuantizedOutput<'a, B>) -> Self {
        ProductOutput {
            values: RawOutput::from(&output.values),
            scales: Some(output.scales),
        }
    }
}

impl<'a, B: Backend> ProductOutput<'a, B> {
    pub fn new(values: RawOutput<'a, B>, scales: Option<Quantized<'a, B>>) -> Self {
        ProductOutput { values, scales }
    }

    fn quantization(&self) -> Option<Quantization> {
        self.scales.as_ref().map(|scales| scales.quantization)
    }

    /// Checks the scales against the plan.
    pub fn check_scales(&self, group: &Group<B>, planned: Option<Quantization>) -> Result<()> {
        match &self.scales {
            Some(scales) => scales.check(group, planned, self.values.shape),
            None => require_planned(planned, None),
        }
    }

    /// Binds values and scales to the matrices of this output, which has none afterwards.
    pub fn bind<'m>(&mut self, matrices: &mut [Bound<'m, B>; MATRICES], number: usize)
    where
        'a: 'm,
    {
        matrices[OUT + number] = self.values.take_bound();
        if let Some(scales) = self.scales.take() {
            matrices[OUT_SCALES + number] = scales.bound();
        }
    }
}

/// The type of all outputs of a product, and how they are quantised.
#[derive(Clone, Copy, Debug)]
pub struct OutputForm {
    pub dtype: DType,
    pub quantization: Option<Quantization>,
}

impl From<DType> for OutputForm {
    fn from(dtype: DType) -> Self {
        OutputForm {
            dtype,
            quantization: None,
        }
    }
}

impl OutputForm {
    /// None if there are no outputs.
    pub fn of<B: Backend>(outputs: &[ProductOutput<B>]) -> Result<Option<OutputForm>> {
        let Some(first) = outputs.first() else {
            return Ok(None);
        };
        let quantization = first.quantization();
        let mut others = outputs.iter().map(ProductOutput::quantization);
        let are_alike = others.all(|other| other == quantization);
        require("all outputs must be quantised alike", are_alike)?;
        Ok(Some(OutputForm {
            dtype: first.values.dtype,
            quantization,
        }))
    }
}

/// Checks that an output is quantised as planned.
fn require_planned(planned: Option<Quantization>, found: Option<Quantization>) -> Result<()> {
    if planned == found {
        return Ok(());
    }
    let words = |quantization: Option<Quantization>| match quantization {
        Some(quantization) => format!("{quantization:?}"),
        None => "None".into(),
    };
    let planned = words(planned);
    Err(Error::unsuitable(
        "the quantization of out",
        format!("{planned}, for which the call was prepared (quantization)"),
        words(found),
    ))
}
