//! The weights and the outputs of products, one or several, with their element types.

use std::fmt;
use std::marker::PhantomData;

use smallvec::smallvec;

use super::call::{RawOutput, RawView};
use super::product::{RawOutputs, RawWeights};
use crate::backend::Backend;
use crate::element::{AddendOf, DType, Element, OutputOf, Value, WeightOf};
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

/// The weights of a product with rows of `T`: one, or up to four that share one gather of the rows.
///
/// Made from a [`Matrix`], a [`MatrixView`], or an array of either, or collected from views. All of them have one type,
/// which may be any [`WeightOf`] `T`. If the values are a slice or a vector on the host,
/// [`Group::upload`](crate::Group::upload) makes a matrix of them.
#[must_use = "operands do nothing"]
pub struct Weights<'a, B: Backend, T: Element> {
    pub(super) all: RawWeights<'a, B>,
    rows: PhantomData<T>,
}

impl<B: Backend, T: Element> fmt::Debug for Weights<'_, B, T> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let weights = self.all.iter();
        describe::<B>(f, "Weights", weights.map(|one| (one.dtype, one.shape)))
    }
}

impl<'a, B: Backend, T: Element, W: WeightOf<T>> From<&'a Matrix<B, W>> for Weights<'a, B, T> {
    fn from(weight: &'a Matrix<B, W>) -> Self {
        weight.view().into()
    }
}

impl<'a, B: Backend, T: Element, W: WeightOf<T>> From<MatrixView<'a, B, W>> for Weights<'a, B, T> {
    fn from(weight: MatrixView<'a, B, W>) -> Self {
        Weights::from_iter([weight])
    }
}

impl<'a, B: Backend, T: Element, W: WeightOf<T>, const N: usize> From<[&'a Matrix<B, W>; N]>
    for Weights<'a, B, T>
{
    fn from(weights: [&'a Matrix<B, W>; N]) -> Self {
        weights.map(Matrix::view).into()
    }
}

impl<'a, B: Backend, T: Element, W: WeightOf<T>, const N: usize> From<[MatrixView<'a, B, W>; N]>
    for Weights<'a, B, T>
{
    fn from(weights: [MatrixView<'a, B, W>; N]) -> Self {
        weights.into_iter().collect()
    }
}

impl<'a, B: Backend, T: Element, W: WeightOf<T>> FromIterator<MatrixView<'a, B, W>>
    for Weights<'a, B, T>
{
    fn from_iter<I: IntoIterator<Item = MatrixView<'a, B, W>>>(weights: I) -> Self {
        Weights {
            all: weights.into_iter().map(Into::into).collect(),
            rows: PhantomData,
        }
    }
}

/// The bias or the residual of a product with rows of `T`.
///
/// Made from a [`Matrix`] or a [`MatrixView`] of any [`AddendOf`] `T`.
#[must_use = "operands do nothing"]
pub struct AddendView<'a, B: Backend, T: Element> {
    pub(super) view: RawView<'a, B>,
    rows: PhantomData<T>,
}

impl<B: Backend, T: Element> fmt::Debug for AddendView<'_, B, T> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let RawView { dtype, shape, .. } = self.view;
        describe::<B>(f, "AddendView", [(dtype, shape)].into_iter())
    }
}

impl<'a, B: Backend, T: Element, V: AddendOf<T>> From<&'a Matrix<B, V>> for AddendView<'a, B, T> {
    fn from(addend: &'a Matrix<B, V>) -> Self {
        addend.view().into()
    }
}

impl<'a, B: Backend, T: Element, V: AddendOf<T>> From<MatrixView<'a, B, V>>
    for AddendView<'a, B, T>
{
    fn from(addend: MatrixView<'a, B, V>) -> Self {
        AddendView {
            view: addend.into(),
            rows: PhantomData,
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

/// The outputs of a product: one, or one for each of several weights.
///
/// An output has any type that is [`OutputOf`] `T`, the type of the rows. Made from a `&mut` [`Matrix`], a [`MatrixViewMut`], an array of
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
