//! Tests of what every backend promises, each written once. A test file lists them for its backend.

pub mod collectives;
pub mod failures;
pub mod forms;
pub mod mismatches;
pub mod pipelines;
pub mod reduce_scatter;
pub mod refusals;
pub mod results;
pub mod staged;
