//! What a call is asked to do.

use super::{Form, Layout, Operation};
use crate::element::DType;

/// What an operation is asked to do. [`plan`](super::plan::plan) makes a schedule of it, a rank and a configuration.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Problem {
    /// Which operation, or which part of one.
    pub operation: Operation,
    /// Of the matrices.
    pub dtypes: DTypes,
    /// Who owns which rows.
    pub layout: Layout,
    /// Type and columns of a matrix whose rows are gathered with those of the first, and split alike.
    pub beside: Option<(DType, usize)>,
    /// Columns of the output, or of all outputs: each rank's own where rows are gathered, the same on all where sums
    /// are made. 0 where there is none.
    pub n: usize,
    /// What the product is, beside its extents.
    pub form: Form,
}

impl Problem {
    /// With matrices of one type, of which none is gathered beside, and a plain product.
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
    /// Of what is gathered, exchanged or multiplied.
    pub operands: DType,
    /// Of what is added up: partial sums, a bias, a residual.
    pub partials: DType,
    /// Of the output, or of all outputs.
    pub output: DType,
}

impl DTypes {
    /// One for all.
    pub const fn all(dtype: DType) -> DTypes {
        DTypes {
            operands: dtype,
            partials: dtype,
            output: dtype,
        }
    }

    /// In words, for what ranks compare: what is not of the operands' type.
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
