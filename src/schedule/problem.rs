//! What a call is asked to do.

use super::{Config, Form, Layout, Schedule};
use crate::element::DType;
use crate::error::Result;

/// What an operation is asked to do. Its planner makes a schedule of it, a rank and a configuration.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Problem {
    /// Which operation: the name of the call.
    pub operation: &'static str,
    /// Of all matrices.
    pub dtype: DType,
    /// Who owns which rows.
    pub layout: Layout,
    /// Type and columns of a matrix whose rows are gathered with those of the first, and split alike.
    pub beside: Option<(DType, usize)>,
    /// Columns of the output, or of all outputs: each rank's own where rows are gathered, the same on all where sums are made. 0 where
    /// there is none.
    pub n: usize,
    /// What the product is, beside its extents.
    pub form: Form,
}

/// A pure function from what is asked, a rank, and how it is to be cut up, to the rank's schedule.
///
/// # Errors
/// [`Error::Limit`](crate::Error::Limit) when N is out of bounds, a field of the configuration is, or there are more transfers,
/// blocks or tiles than a schedule can have.
pub type Planner = fn(&Problem, rank: usize, config: Config) -> Result<Schedule>;
