//! The weights and the outputs of products, one or several, with their element types.

use std::fmt;
use std::marker::PhantomData;

use smallvec::smallvec;

use super::call::RawOutput;
use super::product::{RawOutputs, RawWeights};
use crate::backend::Backend;
use crate::element::{DType, Element, Value};
use crate::matrix::{Matrix, MatrixView, MatrixViewMut};
use crate::one_line::write_parts;
use crate::schedule::Widths;

/// Writes the matrices of a product for `Debug`.
fn describe<B: Backend>(
    f: &mut fmt::Formatter,
    what: &str,
    matrices: impl Iterator<Item = (DType, [usize; 2])>,
) -> fmt::Result {
    write!(f, "{what}<{}>", B::NAME)?;
    write_parts(
        f,
        matrices.map(|(dtype, shape)| format!("{dtype}{shape:?}")),
    )
}

/// The weights of a product: one, or up to four that share one gather of the rows.
///
/// Made from a [`Matrix`], a [`MatrixView`], or an array of either, or collected from views. If the values are a slice
/// or a vector on the host, [`Group::upload`](crate::Group::upload) makes a matrix of them.
#[must_use = "operands do nothing"]
pub struct Weights<'a, B: Backend, T: Value> {
    pub(super) all: RawWeights<'a, B>,
    element: PhantomData<T>,
}

impl<B: Backend, T: Value> fmt::Debug for Weights<'_, B, T> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let weights = self.all.iter();
        describe::<B>(f, "Weights", weights.map(|one| (one.dtype, one.shape)))
    }
}

impl<'a, B: Backend, T: Value> From<&'a Matrix<B, T>> for Weights<'a, B, T> {
    fn from(weight: &'a Matrix<B, T>) -> Self {
        weight.view().into()
    }
}

impl<'a, B: Backend, T: Value> From<MatrixView<'a, B, T>> for Weights<'a, B, T> {
    fn from(weight: MatrixView<'a, B, T>) -> Self {
        Weights {
            all: smallvec![weight.into()],
            element: PhantomData,
        }
    }
}

impl<'a, B: Backend, T: Value, M: Into<MatrixView<'a, B, T>>, const N: usize> From<[M; N]>
    for Weights<'a, B, T>
{
    fn from(weights: [M; N]) -> Self {
        weights.into_iter().map(Into::into).collect()
    }
}

impl<'a, B: Backend, T: Value> FromIterator<MatrixView<'a, B, T>> for Weights<'a, B, T> {
    fn from_iter<I: IntoIterator<Item = MatrixView<'a, B, T>>>(weights: I) -> Self {
        Weights {
            all: weights.into_iter().map(Into::into).collect(),
            element: PhantomData,
        }
    }
}

/// The N of each weight of a prepared product.
///
/// Made from one number, or from an array or a slice of numbers.
#[derive(Clone, PartialEq, Eq)]
pub struct WeightWidths(pub(super) Widths);

impl fmt::Debug for WeightWidths {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("WeightWidths")?;
        write_parts(f, &self.0)
    }
}

impl From<usize> for WeightWidths {
    fn from(n: usize) -> Self {
        WeightWidths(smallvec![n])
    }
}

impl From<&[usize]> for WeightWidths {
    fn from(widths: &[usize]) -> Self {
        WeightWidths(widths.into())
    }
}

impl<const N: usize> From<&[usize; N]> for WeightWidths {
    fn from(widths: &[usize; N]) -> Self {
        widths[..].into()
    }
}

impl<const N: usize> From<[usize; N]> for WeightWidths {
    fn from(widths: [usize; N]) -> Self {
        widths[..].into()
    }
}

/// A type in which products of `T` can be stored: `T` or f32.
///
/// ```compile_fail
/// use gemmesh::{Group, Host, Matmul, Result, bf16, f16};
///
/// fn rank(group: Group<Host>) -> Result<()> {
///     let a = group.zeros::<bf16>(2, 8)?;
///     let b = group.zeros::<bf16>(4, 8)?;
///     let mut out = group.zeros::<f16>(2, 4)?;
///     Matmul::new().run(&a, &b, &mut out) // a product of `bf16` cannot be stored as `f16`
/// }
/// ```
#[diagnostic::on_unimplemented(
    message = "a product of `{T}` cannot be stored as `{Self}`",
    label = "outputs have the type of the operands, bf16 or f16, or f32"
)]
pub trait OutputOf<T>: Value {}

impl<T: Element> OutputOf<T> for T {}
impl<T: Element> OutputOf<T> for f32 {}

/// The outputs of a product: one, or one for each of several weights.
///
/// An output has the type of the operands, or f32. Made from a `&mut` [`Matrix`], a [`MatrixViewMut`], an array of
/// either, or collected from views.
#[must_use = "operands do nothing"]
pub struct Outputs<'a, B: Backend, T: Value> {
    pub(super) all: RawOutputs<'a, B>,
    element: PhantomData<T>,
}

impl<B: Backend, T: Value> fmt::Debug for Outputs<'_, B, T> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let outputs = self.all.iter();
        describe::<B>(f, "Outputs", outputs.map(|one| (one.dtype, one.shape)))
    }
}

impl<'a, B: Backend, T: Element, O: OutputOf<T>> From<&'a mut Matrix<B, O>> for Outputs<'a, B, T> {
    fn from(out: &'a mut Matrix<B, O>) -> Self {
        out.view_mut().into()
    }
}

impl<'a, B: Backend, T: Element, O: OutputOf<T>> From<MatrixViewMut<'a, B, O>>
    for Outputs<'a, B, T>
{
    fn from(out: MatrixViewMut<'a, B, O>) -> Self {
        Outputs {
            all: smallvec![RawOutput::from(&out)],
            element: PhantomData,
        }
    }
}

impl<'a, B: Backend, T: Element, O: OutputOf<T>, const N: usize> From<[&'a mut Matrix<B, O>; N]>
    for Outputs<'a, B, T>
{
    fn from(outputs: [&'a mut Matrix<B, O>; N]) -> Self {
        outputs.map(Matrix::view_mut).into()
    }
}

impl<'a, B: Backend, T: Element, O: OutputOf<T>, const N: usize> From<[MatrixViewMut<'a, B, O>; N]>
    for Outputs<'a, B, T>
{
    fn from(outputs: [MatrixViewMut<'a, B, O>; N]) -> Self {
        outputs.into_iter().collect()
    }
}

impl<'a, B: Backend, T: Element, O: OutputOf<T>> FromIterator<MatrixViewMut<'a, B, O>>
    for Outputs<'a, B, T>
{
    fn from_iter<I: IntoIterator<Item = MatrixViewMut<'a, B, O>>>(outputs: I) -> Self {
        Outputs {
            all: outputs
                .into_iter()
                .map(|out| RawOutput::from(&out))
                .collect(),
            element: PhantomData,
        }
    }
}
