//! What a call is asked to do.

use super::{Counts, Form, Hosts, Layout, Operation, Quantization};
use crate::element::DType;
use crate::error::{Error, Result};

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
    /// The rows that each rank sends to each, if ranks exchange blocks. They come to the first rows of the output. If not
    /// given, a rank sends every rank as many rows as it has in the layout.
    pub counts: Option<Counts>,
    /// Which ranks share a host.
    pub hosts: Hosts,
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
            counts: None,
            hosts: Hosts::default(),
            beside: None,
            n,
            form: Form::default(),
        }
    }

    /// What begins the words that ranks compare: the rows, these columns, and the operands' type.
    pub(super) fn agreed(&self, columns: String) -> Vec<String> {
        let rows = format!("M = {}", self.layout.m());
        vec![rows, columns, self.dtypes.operands.to_string()]
    }
}

/// The types of an operation's matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DTypes {
    /// The type of rows that are gathered, sent or multiplied.
    pub operands: DType,
    /// The type of weights.
    pub weights: DType,
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
            weights: dtype,
            partials: dtype,
            output: dtype,
        }
    }

    /// The types of a product. What it adds has the operands' type if that has 16 bits, and is bf16 if it does not.
    ///
    /// # Errors
    /// `Kind::Unsupported` if products of these operands cannot be stored as `output` without being quantised.
    pub fn of_product(
        [operands, weights]: [DType; 2],
        output: DType,
        quantization: Option<Quantization>,
    ) -> Result<DTypes> {
        if quantization.is_none() && !operands.is_stored_as(output) {
            let what = format!("a product of {operands} cannot be stored as {output}");
            return Err(Error::unsupported(what));
        }
        let partials = if operands.is_half() {
            operands
        } else {
            DType::Bf16
        };
        Ok(DTypes {
            operands,
            weights,
            partials,
            output,
        })
    }

    /// The types of `a` and of weights.
    pub fn multiplied(&self) -> [DType; 2] {
        [self.operands, self.weights]
    }

    /// The types that differ from the operands' type, in words that ranks compare.
    pub(super) fn agreed(&self) -> impl Iterator<Item = String> + use<> {
        let of = |what: &str, dtype: DType| {
            (dtype != self.operands).then(|| format!("{what} of {dtype}"))
        };
        let words = [
            of("weights", self.weights),
            of("partials", self.partials),
            of("output", self.output),
        ];
        words.into_iter().flatten()
    }
}
