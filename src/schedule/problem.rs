//! What a call is asked to do.

use super::{Form, Layout, Operation};
use crate::element::DType;

/// What an operation is asked to do. [`plan`](super::plan::plan) makes a schedule of a problem, a rank and a
/// configuration.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Problem {
    /// Which operation, or which part of one.
    pub operation: Operation,
    /// The types of the matrices.
    pub dtypes: DTypes,
    /// Which rank owns which rows.
    pub layout: Layout,
    /// Type and columns of a second matrix. Its rows are split like the first one's and gathered with them.
    pub beside: Option<(DType, usize)>,
    /// Columns of the output, or of all outputs together.
    ///
    /// If rows are gathered, each rank has its own N. If sums are made, N is the same on all ranks. It is 0 if there is
    /// no output.
    pub n: usize,
    /// The form of the product.
    pub form: Form,
}

impl Problem {
    /// A problem with matrices of one type, no second matrix, and a product of the default form.
    pub fn new(operation: Operation, dtype: DType, layout: Layout, n: usize) -> Problem {
        Problem {
            operation,
            dtypes: DTypes::all(dtype),
            layout,
            beside: None,
            n,
            form: Form::default(),
        }
    }
}

/// The types of an operation's matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DTypes {
    /// The type of rows that are gathered, sent or multiplied.
    pub operands: DType,
    /// The type of addends: partial sums, a bias, a residual.
    pub partials: DType,
    /// The type of the output, or of all outputs.
    pub output: DType,
}

impl DTypes {
    /// One type for all matrices.
    pub const fn all(dtype: DType) -> DTypes {
        DTypes {
            operands: dtype,
            partials: dtype,
            output: dtype,
        }
    }

    /// The types that differ from the operands' type, in words that ranks compare.
    pub(super) fn agreed(&self) -> String {
        let mut words = String::new();
        if self.partials != self.operands {
            words += &format!(", partials of {}", self.partials);
        }
        if self.output != self.operands {
            words += &format!(", to {}", self.output);
        }
        words
    }
}
