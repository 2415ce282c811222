//! Calls without element types and without a backend at compile time: what the packages for C and Python stand on.
//!
//! A [`Memory`] describes a matrix as other languages do: by address, type, extents and pitch. [`AnyGroup`] and
//! [`AnyShards`] are a group and a sharded matrix of any backend. They check, agree and run as the typed calls do,
//! which share their code.
//!
//! Unstable, because it is for this library's own packages. Any release may change it.
#![allow(unsafe_code)]

mod arguments;
mod group;
mod pipelines;
mod product;
mod shards;

pub use crate::interop::tensors::{Tensor, VersionedTensor, export, export_versioned};
pub use crate::matrix::Memory;
pub use crate::schedule::MAX_WEIGHTS;
pub use group::{
    AnyBackend, AnyGroup, BackendKind, Gather, Joining, Options, join, refused, unsuitable,
    wrong_device,
};
pub use pipelines::{Consume, Produce, Rows, RowsFor};
pub use product::{
    Operand, Output, Outputs, Prepared, PreparedFor, Product, ProductCall, ProductKind, RowOperand,
    ShardedScales,
};
pub use shards::{AnyShards, Shards, Split};
