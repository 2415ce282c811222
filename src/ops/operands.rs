//! The weights and the outputs of products, one or several, and what varies of what is made of them.

use std::marker::PhantomData;

use smallvec::{SmallVec, smallvec};

use super::{require_same_group, require_shape};
use crate::backend::Backend;
use crate::backend::sealed::Bound;
use crate::element::{DType, Element, Value};
use crate::error::{Error, Result};
use crate::group::Group;
use crate::matrix::{Matrix, MatrixView, MatrixViewMut};
use crate::schedule::layout::MAX_EXTENT;
use crate::schedule::limits::limit;
use crate::schedule::plan::matrices::{self, MATRICES};
use crate::schedule::{
    Activation, Config, Form, Layout, MAX_WEIGHTS, Operation, Problem, WeightLayout, Widths,
};

/// What varies of a product, wherever its rows come from and go to.
#[derive(Debug)]
pub struct Options<'a, B: Backend, T: Element> {
    pub bias: Option<MatrixView<'a, B, T>>,
    pub residual: Option<MatrixView<'a, B, T>>,
    pub activation: Activation,
    pub gated: bool,
    pub weights: WeightLayout,
    pub f32_output: bool,
    pub config: Option<Config>,
}

impl<'a, B: Backend, T: Element> Options<'a, B, T> {
    pub fn new() -> Self {
        Options {
            bias: None,
            residual: None,
            activation: Activation::Identity,
            gated: false,
            weights: WeightLayout::Nk,
            f32_output: false,
            config: None,
        }
    }

    /// What products of these widths are asked to do. `out`: the output's type, if it is known.
    pub fn problem(
        &self,
        operation: Operation,
        layout: Layout,
        widths: &[usize],
        out: Option<DType>,
    ) -> Problem {
        let several = widths.len() > 1 && !self.gated;
        let form = Form {
            widths: if several {
                widths.into()
            } else {
                Widths::new()
            },
            gated: self.gated,
            activation: self.activation,
            weights: self.weights,
        };
        let mut problem = Problem::new(operation, T::DTYPE, layout, form.n_of(widths));
        problem.form = form;
        if let Some(out) = out.or(self.f32_output.then_some(DType::F32)) {
            problem.dtypes.output = out;
        }
        problem
    }

    /// Refuses widths that gate and up can't have; one may stand for both.
    pub fn check_widths(&self, group: &Group<B>, widths: &[usize]) -> Result<()> {
        let [gate, others @ ..] = widths else {
            return Ok(());
        };
        if self.gated && !others.is_empty() {
            require_count(group, "weights", 2, widths.len())?;
            limit("N of up, as of the gate,", others[0], *gate, *gate)?;
        }
        Ok(())
    }

    /// N of each weight.
    pub fn widths(&self, weights: &Weights<B, T>) -> Widths {
        weights.0.iter().map(|&weight| self.n_of(weight)).collect()
    }

    /// N of a weight.
    pub fn n_of(&self, weight: MatrixView<B, T>) -> usize {
        let [rows, columns] = weight.shape();
        match self.weights {
            WeightLayout::Nk => rows,
            WeightLayout::Kn => columns,
        }
    }

    /// Checks what is added to `rows` rows.
    pub fn check(&self, group: &Group<B>, problem: &Problem, rows: usize) -> Result<()> {
        let (form, n) = (&problem.form, problem.n);
        if let Some(bias) = &self.bias {
            // Before the shape: what fits no product is refused as that.
            limit("N", n, 1, MAX_EXTENT)?;
            require_same_group("bias", bias.group(), group)?;
            let (what, columns) = match form.gated {
                true => ("bias [1, 2 N]", form.multiplied(n)),
                false => ("bias [1, N]", n),
            };
            require_shape(group.rank(), what, [1, columns], bias.shape())?;
        }
        if let Some(residual) = &self.residual {
            let outputs = form.widths.len();
            limit("outputs of a product with a residual", outputs, 0, 1)?;
            require_same_group("residual", residual.group(), group)?;
            let shape = [rows, n];
            require_shape(group.rank(), "residual, as out,", shape, residual.shape())?;
        }
        Ok(())
    }

    pub fn bind<'m>(&'m self, matrices: &mut [Bound<'m, B>; MATRICES]) {
        if let Some(view) = &self.bias {
            matrices[matrices::BIAS] = view.input();
        }
        if let Some(view) = &self.residual {
            matrices[matrices::RESIDUAL] = view.input();
        }
    }
}

// Derived, it would need a backend that can be cloned.
impl<B: Backend, T: Element> Clone for Options<'_, B, T> {
    fn clone(&self) -> Self {
        Options { ..*self }
    }
}

/// What rows are multiplied with: a weight or, for one gather of the rows, up to four. Made from a [`Matrix`], a [`MatrixView`], or an
/// array of either, or collected from views.
#[derive(Debug)]
#[must_use = "operands do nothing"]
pub struct Weights<'a, B: Backend, T: Value>(SmallVec<[MatrixView<'a, B, T>; MAX_WEIGHTS]>);

impl<'a, B: Backend, T: Value> From<&'a Matrix<B, T>> for Weights<'a, B, T> {
    fn from(weight: &'a Matrix<B, T>) -> Self {
        Weights(smallvec![weight.view()])
    }
}

impl<'a, B: Backend, T: Value> From<MatrixView<'a, B, T>> for Weights<'a, B, T> {
    fn from(weight: MatrixView<'a, B, T>) -> Self {
        Weights(smallvec![weight])
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
        Weights(weights.into_iter().collect())
    }
}

impl<'a, B: Backend, T: Value> Weights<'a, B, T> {
    /// Checks them against what was planned.
    pub(super) fn check(
        &self,
        group: &Group<B>,
        form: &Form,
        widths: &[usize],
        k: usize,
    ) -> Result<()> {
        require_count(group, "weights", form.weight_count(), self.0.len())?;
        for (number, weight) in self.0.iter().enumerate() {
            require_same_group("b", weight.group(), group)?;
            let n = widths[if form.gated { 0 } else { number }];
            let (what, shape) = match form.weights {
                WeightLayout::Nk => ("b [N, K]", [n, k]),
                WeightLayout::Kn => ("b [K, N]", [k, n]),
            };
            require_shape(group.rank(), what, shape, weight.shape())?;
        }
        Ok(())
    }

    pub(super) fn bind<'m>(&self, matrices: &mut [Bound<'m, B>; MATRICES])
    where
        'a: 'm,
    {
        let places = matrices[matrices::B..matrices::OUT].iter_mut();
        for (matrix, weight) in places.zip(&self.0) {
            *matrix = weight.input();
        }
    }
}

/// A type that products of `T` can be stored as: itself, or f32.
pub trait OutputOf<T>: Value {}

impl<T: Element> OutputOf<T> for T {}
impl<T: Element> OutputOf<T> for f32 {}

/// Where products go: a matrix of their operands' type or of f32, or one for each of several weights. Made from a `&mut`
/// [`Matrix`], a [`MatrixViewMut`], an array of either, or collected from views.
#[derive(Debug)]
#[must_use = "operands do nothing"]
pub struct Outputs<'a, B: Backend, T: Value> {
    all: SmallVec<[Output<'a, B>; MAX_WEIGHTS]>,
    element: PhantomData<T>,
}

#[derive(Debug)]
struct Output<'a, B: Backend> {
    bound: Bound<'a, B>,
    group: &'a Group<B>,
    shape: [usize; 2],
    dtype: DType,
}

impl<'a, B: Backend> Output<'a, B> {
    fn new<O: Value>(view: &MatrixViewMut<'a, B, O>) -> Self {
        Output {
            bound: view.output(),
            group: view.group(),
            shape: view.shape(),
            dtype: O::DTYPE,
        }
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
            all: smallvec![Output::new(&out)],
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
            all: outputs.into_iter().map(|out| Output::new(&out)).collect(),
            element: PhantomData,
        }
    }
}

impl<'a, B: Backend, T: Element> Outputs<'a, B, T> {
    /// Their type, if there are any.
    pub(super) fn dtype(&self) -> Option<DType> {
        self.all.first().map(|out| out.dtype)
    }

    /// Checks them against what was planned: `m` rows each.
    pub(super) fn check(
        &self,
        group: &Group<B>,
        what: &str,
        problem: &Problem,
        widths: &[usize],
        m: usize,
    ) -> Result<()> {
        let rank = group.rank();
        require_count(group, "outputs", widths.len(), self.all.len())?;
        for (out, &n) in self.all.iter().zip(widths) {
            require_same_group("out", out.group, group)?;
            require_shape(rank, what, [m, n], out.shape)?;
            let expected = problem.dtypes.output;
            if out.dtype != expected {
                return Err(Error::Shape {
                    rank,
                    argument: format!("bytes of an element of out, of {expected} as planned,"),
                    expected: vec![expected.bytes()],
                    found: vec![out.dtype.bytes()],
                });
            }
        }
        Ok(())
    }

    /// The one that there is: it has been checked.
    pub(super) fn only(self) -> Bound<'a, B> {
        let out = self.all.into_iter().next();
        out.map_or(Bound::Nothing, |out| out.bound)
    }

    pub(super) fn bind<'m>(self, matrices: &mut [Bound<'m, B>; MATRICES])
    where
        'a: 'm,
    {
        for (matrix, out) in matrices[matrices::OUT..].iter_mut().zip(self.all) {
            *matrix = out.bound;
        }
    }
}

fn require_count<B: Backend>(
    group: &Group<B>,
    what: &str,
    expected: usize,
    found: usize,
) -> Result<()> {
    if expected == found {
        return Ok(());
    }
    Err(Error::Shape {
        rank: group.rank(),
        argument: format!("how many {what} there are"),
        expected: vec![expected],
        found: vec![found],
    })
}
