//! The weights and the outputs of products, one or several, with their element types.

use std::fmt;
use std::marker::PhantomData;

use smallvec::smallvec;

use super::call::RawView;
use super::product_operands::{RawOutputs, RawWeights};
use super::quantized::QuantizedOutput;
use super::scales::Operand;
use crate::backend::Backend;
use crate::element::{AddendOf, DType, Element, OutputOf, Value, WeightOf};
use crate::matrix::{Matrix, MatrixView, MatrixViewMut};
use crate::one_line::write_parts;
use crate::schedule::scaling::WeightScalings;
use crate::schedule::{Scaling, Widths};

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
/// Made from a [`Matrix`], a [`MatrixView`], an [`Operand`], which may have scales, or an array of these, or collected
/// from views or operands. All of them have one type, which may be any [`WeightOf`] `T`, and are scaled alike. If the values are a slice or a vector on the host,
/// [`Group::upload`](crate::Group::upload) makes a matrix of them.
#[must_use = "operands do nothing"]
pub struct Weights<'a, B: Backend, T: Element> {
    pub(super) all: RawWeights<'a, B>,
    rows: PhantomData<T>,
}

impl<B: Backend, T: Element> fmt::Debug for Weights<'_, B, T> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let weights = self.all.iter();
        describe::<B>(
            f,
            "Weights",
            weights.map(|one| (one.values.dtype, one.values.shape)),
        )
    }
}

/// Weights of these, of an array of these, and of an iterator over these.
macro_rules! weights_of {
    ($($one:ty),+) => {$(
        impl<'a, B: Backend, T: Element, W: WeightOf<T>> From<$one> for Weights<'a, B, T> {
            fn from(weight: $one) -> Self {
                Weights::from_iter([weight])
            }
        }

        impl<'a, B: Backend, T: Element, W: WeightOf<T>, const N: usize> From<[$one; N]>
            for Weights<'a, B, T>
        {
            fn from(weights: [$one; N]) -> Self {
                Weights::from_iter(weights)
            }
        }

        impl<'a, B: Backend, T: Element, W: WeightOf<T>> FromIterator<$one> for Weights<'a, B, T> {
            fn from_iter<I: IntoIterator<Item = $one>>(weights: I) -> Self {
                let mut collected = Weights {
                    all: RawWeights::new(),
                    rows: PhantomData,
                };
                // `collect` would move the whole list.
                for weight in weights {
                    collected.all.push(Operand::from(weight).into());
                }
                collected
            }
        }
    )+};
}

weights_of!(&'a Matrix<B, W>, MatrixView<'a, B, W>, Operand<'a, B, W>);

/// How many values of each weight of a prepared product share a scale.
///
/// Made from one [`Scaling`], which is that of all weights, or from an array with one for each, or collected.
#[derive(Clone, PartialEq, Eq)]
pub struct WeightScaling(pub(super) WeightScalings);

impl fmt::Debug for WeightScaling {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("WeightScaling")?;
        write_parts(f, self.0.iter().map(|scaling| format!("{scaling:?}")))
    }
}

impl From<Scaling> for WeightScaling {
    fn from(scaling: Scaling) -> Self {
        WeightScaling(smallvec![scaling])
    }
}

impl<const N: usize> From<[Scaling; N]> for WeightScaling {
    fn from(scalings: [Scaling; N]) -> Self {
        WeightScaling(scalings.into_iter().collect())
    }
}

impl FromIterator<Scaling> for WeightScaling {
    fn from_iter<I: IntoIterator<Item = Scaling>>(scalings: I) -> Self {
        WeightScaling(scalings.into_iter().collect())
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
/// An output has any type that is [`OutputOf`] `T`, the type of the rows, or it is quantised. Made from a `&mut`
/// [`Matrix`], a [`MatrixViewMut`], a [`QuantizedOutput`], an array of these, or collected from views or quantised
/// outputs.
#[must_use = "operands do nothing"]
pub struct Outputs<'a, B: Backend, T: Value> {
    pub(super) all: RawOutputs<'a, B>,
    element: PhantomData<T>,
}

impl<B: Backend, T: Value> fmt::Debug for Outputs<'_, B, T> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let outputs = self.all.iter();
        let matrices = outputs.map(|one| (one.values.dtype, one.values.shape));
        describe::<B>(f, "Outputs", matrices)
    }
}

impl<'a, B: Backend, T: Element, O: OutputOf<T>> From<&'a mut Matrix<B, O>> for Outputs<'a, B, T> {
    fn from(out: &'a mut Matrix<B, O>) -> Self {
        out.view_mut().into()
    }
}

impl<'a, B: Backend, T: Element, O: OutputOf<T>, const N: usize> From<[&'a mut Matrix<B, O>; N]>
    for Outputs<'a, B, T>
{
    fn from(outputs: [&'a mut Matrix<B, O>; N]) -> Self {
        outputs.map(Matrix::view_mut).into()
    }
}

/// Outputs of this, of an array of these, and of an iterator over these.
macro_rules! outputs_of {
    ($one:ty $(, $type:ident)?) => {
        impl<'a, B: Backend, T: Element $(, $type: OutputOf<T>)?> From<$one> for Outputs<'a, B, T> {
            fn from(out: $one) -> Self {
                Outputs::from_iter([out])
            }
        }

        impl<'a, B: Backend, T: Element $(, $type: OutputOf<T>)?, const N: usize> From<[$one; N]>
            for Outputs<'a, B, T>
        {
            fn from(outputs: [$one; N]) -> Self {
                Outputs::from_iter(outputs)
            }
        }

        impl<'a, B: Backend, T: Element $(, $type: OutputOf<T>)?> FromIterator<$one>
            for Outputs<'a, B, T>
        {
            fn from_iter<I: IntoIterator<Item = $one>>(outputs: I) -> Self {
                let mut collected = Outputs {
                    all: RawOutputs::new(),
                    element: PhantomData,
                };
                // `collect` would move the whole list.
                for out in outputs {
                    collected.all.push(out.into());
                }
                collected
            }
        }
    };
}

outputs_of!(MatrixViewMut<'a, B, O>, O);
outputs_of!(QuantizedOutput<'a, B>);
