//! The forms of a product, as types: which arguments its calls take, and which options it has.

use std::fmt;
use std::marker::PhantomData;

use super::call::RawShards;
use super::operands::{Outputs, WeightWidths, Weights};
use super::product_operands::{Addends, ProductOperands, RawResults, RawRows};
use super::row_split::RowSplit;
use super::scales::{Operand, RawOperand, ShardedOperand};
use crate::backend::Backend;
use crate::element::{AddendOf, Element, OutputOf};
use crate::group::Group;
use crate::matrix::{Matrix, MatrixView, ShardedMatrix};
use crate::schedule::{Operation, Widths};

/// Where the rows of a product come from, and what becomes of it.
///
/// | form | product | rows | outputs |
/// |---|---|---|---|
/// | [`GatherProduct`] | [`AllGatherMatmul`](crate::AllGatherMatmul) | [`ShardedOperand`] | [`Outputs`] |
/// | [`LocalProduct`] | [`Matmul`](crate::Matmul) | [`Operand`] | [`Outputs`] |
/// | [`ScatterProduct`] | [`MatmulReduceScatter`](crate::MatmulReduceScatter) | [`Operand`] | [`Outputs`] |
/// | [`ReduceProduct`] | [`MatmulAllReduce`](crate::MatmulAllReduce) | [`Operand`] | [`SharedOutput`] |
///
/// `prepare` takes rows and outputs like those of the runs.
pub trait ProductForm: sealed::SealedForm {
    /// The rows that are multiplied.
    type Rows<'m, B: Backend, T: Element>: Into<RawRows<'m, B>>;
    /// Where the product goes.
    type Results<'o, B: Backend, T: Element>: Into<RawResults<'o, B>>;
    /// What the rows of a prepared product are like.
    type RowsLike<'m, B: Backend, T: Element>: Into<PlannedRows<'m, B>>;
    /// What the outputs of a prepared product are like.
    type OutputsLike<'m, B: Backend, T: Element>: Into<PlannedOutputs<'m, B>>;
}

/// Forms whose rows are each rank's own.
pub trait OwnRows: ProductForm {}
/// Forms whose outputs are each rank's own.
pub trait OwnOutputs: ProductForm {}
/// Forms that take several weights, because their products are not summed over the ranks.
pub trait SeveralWeights: OwnOutputs {}
/// Forms in which all ranks take part.
pub trait OfAllRanks: ProductForm {}

pub(super) mod sealed {
    use super::Operation;

    pub trait SealedForm {
        const OPERATION: Operation;
        /// The name of the builder, and that of a product that it has prepared.
        const NAMES: [&'static str; 2];
    }
}

/// A form: its type, its operation, the names of its builder and of its prepared product, and the types of its arguments.
macro_rules! form {
    (
        $(#[$doc:meta])* $form:ident: $operation:ident $names:expr,
        ($rows:ident, $like:ty) -> ($outputs:ident, $out_like:ty) $(, $options:ident)*
    ) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug)]
        pub enum $form {}

        impl sealed::SealedForm for $form {
            const OPERATION: Operation = Operation::$operation;
            const NAMES: [&'static str; 2] = $names;
        }

        impl ProductForm for $form {
            type Rows<'m, B: Backend, T: Element> = $rows<'m, B, T>;
            type Results<'m, B: Backend, T: Element> = $outputs<'m, B, T>;
            type RowsLike<'m, B: Backend, T: Element> = $like;
            type OutputsLike<'m, B: Backend, T: Element> = $out_like;
        }

        $(impl $options for $form {})*
    };
}

form! {
    /// The rows are gathered: [`AllGatherMatmul`](crate::AllGatherMatmul).
    GatherProduct: ALL_GATHER_MATMUL ["AllGatherMatmul", "Prepared"],
    (ShardedOperand, &'m ShardedMatrix<B, T>) -> (Outputs, WeightWidths),
    OwnOutputs, SeveralWeights, OfAllRanks
}

form! {
    /// One rank multiplies alone: [`Matmul`](crate::Matmul).
    LocalProduct: MATMUL ["Matmul", "PreparedMatmul"],
    (Operand, OwnRowsLike<'m, B, T>) -> (Outputs, WeightWidths),
    OwnRows, OwnOutputs, SeveralWeights
}

form! {
    /// Each rank gets its rows of the sum: [`MatmulReduceScatter`](crate::MatmulReduceScatter).
    ScatterProduct: MATMUL_REDUCE_SCATTER ["MatmulReduceScatter", "PreparedReduceScatter"],
    (Operand, OwnRowsLike<'m, B, T>) -> (Outputs, WeightWidths),
    OwnRows, OwnOutputs, OfAllRanks
}

form! {
    /// Each rank gets the whole sum: [`MatmulAllReduce`](crate::MatmulAllReduce).
    ReduceProduct: MATMUL_ALL_REDUCE ["MatmulAllReduce", "PreparedAllReduce"],
    (Operand, OwnRowsLike<'m, B, T>) -> (SharedOutput, OutputLike<'m, B, T>),
    OwnRows, OfAllRanks
}

/// The group and the extents of the rows that a product is prepared for.
pub struct PlannedRows<'m, B: Backend> {
    pub group: &'m Group<B>,
    pub rows: RowSplit,
}

/// N of each weight, and the matrix for sums that a product is prepared for.
pub struct PlannedOutputs<'m, B: Backend> {
    pub widths: Widths,
    pub into: Option<RawShards<'m, B>>,
}

impl<'m, B: Backend, T: Element> From<&'m ShardedMatrix<B, T>> for PlannedRows<'m, B> {
    fn from(a: &'m ShardedMatrix<B, T>) -> Self {
        PlannedRows {
            group: a.group(),
            rows: RowSplit::of(a.layout()),
        }
    }
}

impl<B: Backend> From<WeightWidths> for PlannedOutputs<'_, B> {
    fn from(widths: WeightWidths) -> Self {
        PlannedOutputs {
            widths: widths.0,
            into: None,
        }
    }
}

impl<'m, B: Backend, T: Element> From<ShardedOperand<'m, B, T>> for RawRows<'m, B> {
    fn from(a: ShardedOperand<'m, B, T>) -> Self {
        RawRows::Sharded(a.into())
    }
}

impl<'m, B: Backend, T: Element> From<Operand<'m, B, T>> for RawRows<'m, B> {
    fn from(a: Operand<'m, B, T>) -> Self {
        RawRows::Own(a.into())
    }
}

impl<'o, B: Backend, T: Element> From<Outputs<'o, B, T>> for RawResults<'o, B> {
    fn from(outputs: Outputs<'o, B, T>) -> Self {
        RawResults::Own(outputs.all)
    }
}

/// The operands of a call.
pub(super) fn operands<'m, B: Backend, T: Element, F: ProductForm>(
    a: impl Into<F::Rows<'m, B, T>>,
    weights: impl Into<Weights<'m, B, T>>,
    addends: Addends<'m, B>,
) -> ProductOperands<'m, B> {
    ProductOperands {
        a: a.into().into(),
        weights: weights.into().all,
        addends,
    }
}

/// What a rank's own rows are like: the group and the shape [M, K] of a matrix.
///
/// Made from a [`Matrix`], a [`MatrixView`] or an [`Operand`], or from `(&group, [m, k])` before there is a matrix.
#[derive(Clone, Copy)]
pub struct OwnRowsLike<'m, B: Backend, T: Element> {
    group: &'m Group<B>,
    shape: [usize; 2],
    element: PhantomData<T>,
}

impl<B: Backend, T: Element> fmt::Debug for OwnRowsLike<'_, B, T> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let (name, dtype, shape) = (B::NAME, T::DTYPE, self.shape);
        write!(f, "OwnRowsLike<{name}, {dtype}>{shape:?}")
    }
}

impl<'m, B: Backend, T: Element> From<(&'m Group<B>, [usize; 2])> for OwnRowsLike<'m, B, T> {
    fn from((group, shape): (&'m Group<B>, [usize; 2])) -> Self {
        OwnRowsLike {
            group,
            shape,
            element: PhantomData,
        }
    }
}

impl<'m, B: Backend, T: Element> From<Operand<'m, B, T>> for OwnRowsLike<'m, B, T> {
    fn from(a: Operand<'m, B, T>) -> Self {
        let values = RawOperand::from(a).values;
        (values.group, values.shape).into()
    }
}

impl<'m, B: Backend, T: Element> From<&'m Matrix<B, T>> for OwnRowsLike<'m, B, T> {
    fn from(a: &'m Matrix<B, T>) -> Self {
        Operand::from(a).into()
    }
}

impl<'m, B: Backend, T: Element> From<MatrixView<'m, B, T>> for OwnRowsLike<'m, B, T> {
    fn from(a: MatrixView<'m, B, T>) -> Self {
        Operand::from(a).into()
    }
}

impl<'m, B: Backend, T: Element> From<OwnRowsLike<'m, B, T>> for PlannedRows<'m, B> {
    fn from(a: OwnRowsLike<'m, B, T>) -> Self {
        PlannedRows {
            group: a.group,
            rows: a.shape.into(),
        }
    }
}

/// A sharded matrix, [M, N], that gets all rows of a sum on each rank.
///
/// Made from a `&mut` [`ShardedMatrix`] of any [`AddendOf`] `T`, the type of the rows.
#[must_use = "operands do nothing"]
pub struct SharedOutput<'o, B: Backend, T: Element> {
    pub(super) out: RawShards<'o, B>,
    rows: PhantomData<T>,
}

impl<B: Backend, T: Element> fmt::Debug for SharedOutput<'_, B, T> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let (name, dtype, shape) = (B::NAME, self.out.dtype, self.out.shape());
        write!(f, "SharedOutput<{name}>({dtype}{shape:?})")
    }
}

impl<'o, B: Backend, T: Element, O: AddendOf<T>> From<&'o mut ShardedMatrix<B, O>>
    for SharedOutput<'o, B, T>
{
    fn from(out: &'o mut ShardedMatrix<B, O>) -> Self {
        SharedOutput {
            out: (&*out).into(),
            rows: PhantomData,
        }
    }
}

impl<'o, B: Backend, T: Element> From<SharedOutput<'o, B, T>> for RawResults<'o, B> {
    fn from(output: SharedOutput<'o, B, T>) -> Self {
        RawResults::Sharded(output.out)
    }
}

/// What the output of a prepared sum is like. Made from a [`ShardedMatrix`] of any [`AddendOf`] `T`.
#[derive(Clone, Copy)]
pub struct OutputLike<'m, B: Backend, T: Element> {
    out: RawShards<'m, B>,
    rows: PhantomData<T>,
}

impl<B: Backend, T: Element> fmt::Debug for OutputLike<'_, B, T> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let (name, dtype, shape) = (B::NAME, self.out.dtype, self.out.shape());
        write!(f, "OutputLike<{name}>({dtype}{shape:?})")
    }
}

impl<'m, B: Backend, T: Element, O: AddendOf<T>> From<&'m ShardedMatrix<B, O>>
    for OutputLike<'m, B, T>
{
    fn from(out: &'m ShardedMatrix<B, O>) -> Self {
        OutputLike {
            out: out.into(),
            rows: PhantomData,
        }
    }
}

impl<'m, B: Backend, T: Element> From<OutputLike<'m, B, T>> for PlannedOutputs<'m, B> {
    fn from(OutputLike { out, .. }: OutputLike<'m, B, T>) -> Self {
        PlannedOutputs {
            widths: Widths::from_slice(&out.shape()[1..]),
            into: Some(out),
        }
    }
}

/// The sums of a scattered product in a sharded matrix.
pub(super) fn into_own_rows<'o, B: Backend, T: Element, O: OutputOf<T>>(
    out: &'o mut ShardedMatrix<B, O>,
) -> RawResults<'o, B> {
    RawResults::Sharded((&*out).into())
}
