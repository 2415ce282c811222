//! Scales that an operation makes of its output, or by which it quantises the output.

use std::fmt;

use super::call::{RawView, require_same_group, require_shape};
use crate::backend::Backend;
use crate::backend::sealed::Bound;
use crate::group::Group;
use crate::matrix::{Matrix, MatrixView, MatrixViewMut};
use crate::refusal::{Refusal, Result};
use crate::schedule::{Quantization, Scaling};

/// How an output is quantised to [`F8E4M3`](crate::F8E4M3), and its scales: f32 in this rank's own memory.
///
/// [`Quantization`] says what the numbers are. Made from a `&mut` [`Matrix`] or a [`MatrixViewMut`], the scales are those
/// of [`Quantized::blocks`].
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

    /// Rounds the scales that are made up to powers of two.
    pub fn power_of_two(mut self) -> Self {
        self.quantization = self.quantization.power_of_two();
        self
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
            Scaling::TransposedBlocks => "scales of out [⌈N/128⌉, M]",
            _ => "scales of out [1, 1]",
        };
        require_same_group("scales of out", self.group, group)?;
        require_shape(name, self.quantization.shape(shape), self.shape)
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

/// Checks that an output is quantised as planned.
pub fn require_planned(planned: Option<Quantization>, found: Option<Quantization>) -> Result<()> {
    if planned == found {
        return Ok(());
    }
    let words = |quantization: Option<Quantization>| match quantization {
        Some(quantization) => format!("{quantization:?}"),
        None => "None".into(),
    };
    let planned = words(planned);
    Err(Refusal::Unsuitable {
        argument: "out".into(),
        what: "the quantization".into(),
        expected: format!("{planned}, for which the call was prepared (quantization)"),
        found: words(found),
    })
}
