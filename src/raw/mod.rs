//! Calls without element types and without a backend at compile time: what the packages for C and Python stand on.
//!
//! A [`Memory`] describes a matrix as other languages do: by address, type, extents and pitch. [`AnyGroup`] and
//! [`AnyShards`] are a group and a sharded matrix of any backend. They check, agree and run as the typed calls do,
//! which share their code.
//!
//! **Unstable**: any release may change or remove what is here, and the feature `unstable-doors` says so.
#![allow(unsafe_code)]

mod arguments;
mod group;
mod joining;
mod pipelines;
mod product;
mod shards;

use crate::backend::Backend;
use crate::element::Value;
use crate::group::Group;
use crate::launch::Launch;
use crate::{Error, Result};

pub use crate::interop::tensors::{Tensor, VersionedTensor, export, export_versioned};
pub use crate::matrix::Memory;
pub use group::{AnyBackend, AnyGroup, refused, unsuitable, wrong_device};
pub use joining::{BackendKind, Gather, Joining, Options, join};
pub use pipelines::{AnyRows, Consume, Produce, RowsFor};
pub use product::{
    AnyOperand, AnyOutput, AnyOutputs, AnyPrepared, AnyProduct, AnyShardedScales, PreparedFor,
    ProductCall, ProductKind, RowOperand,
};
pub use shards::{AnyShards, Shards, Split};

/// Notes the error of a call that leaves the group as it is, and returns it with this rank's name.
///
/// If this rank then leaves, the ranks that wait for it get the noted error. The next call that succeeds clears the note.
pub fn noted<B: Backend>(group: &Group<B>, error: Error) -> Error {
    group.noted::<()>(Err(error.clone())).err().unwrap_or(error)
}

/// A vector of zeros on the host, which the caller writes at once.
///
/// `vec!` would end the process if the memory cannot be allocated, or is promised and then missing when it is written.
///
/// # Errors
/// [`Kind::OutOfMemory`](crate::error::Kind::OutOfMemory).
pub fn zeros_of_host<B: Backend, T: Value>(group: &Group<B>, elements: usize) -> Result<Vec<T>> {
    group.zeros_of_host(elements)
}

/// [`Launch::run`], as long as `goes_on` returns true, which is asked every 50 ms.
///
/// Then the ranks have 1.5 seconds to end, and are killed. For languages whose handlers of signals don't end the process.
///
/// # Errors
/// As [`launch`](crate::launch::launch).
#[track_caller]
pub fn launch_while(launch: Launch, goes_on: &mut dyn FnMut() -> bool) -> Result<()> {
    launch.run_while(Some(goes_on))
}
