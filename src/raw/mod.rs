//! Calls without element types and without a backend at compile time: what the packages for C and Python stand on.
//!
//! A [`Memory`] describes a matrix as other languages do: by address, type, extents and pitch. [`AnyGroup`] and
//! [`AnyShards`] are a group and a sharded matrix of any backend. They check, agree and run as the typed calls do, which
//! share their code.
//!
//! Unstable, because it is for this library's own packages. Any release may change it.
#![allow(unsafe_code)]

mod group;
mod kind;
mod pipelines;
mod product;
mod shards;

pub use crate::interop::tensors::{Tensor, VersionedTensor, export, export_versioned};
pub use crate::matrix::Memory;
pub use group::{
    AnyBackend, AnyGroup, BackendKind, Gather, Joining, Options, join, unsuitable, wrong_device,
};
pub use kind::ErrorKind;
pub use pipelines::{Consume, Produce, Rows, RowsFor};
pub use product::{
    Operand, Output, Outputs, Prepared, PreparedFor, Product, ProductCall, ProductKind, RowOperand,
    ShardedScales,
};
pub use shards::{AnyShards, Shards, Split};

use crate::backend::Backend;
use crate::group::Group;
use crate::ops::call::{RawOutput, RawView};
use crate::refusal::Result;

/// A [`Memory`] that has been checked, as a call of a group takes it.
struct Placed<'g, B: Backend> {
    group: &'g Group<B>,
    memory: Memory,
    buffer: B::Buffer,
}

impl<'g, B: Backend> Placed<'g, B> {
    /// # Safety
    /// The memory is that of a matrix, of which the caller disposes until the calls that get it are complete.
    unsafe fn new(group: &'g Group<B>, argument: &str, memory: Memory) -> Result<Placed<'g, B>> {
        memory.check::<B>(argument)?;
        let shape = [memory.shape[0], memory.width()];
        // A single row has no pitch.
        let pitch = memory
            .pitch
            .max(shape[1].next_multiple_of(B::ROW_ALIGNMENT.max(1)));
        let backend = &group.inner().backend;
        // SAFETY: as this function's.
        let buffer = unsafe { backend.adopt(memory.address, shape, pitch, None) };
        Ok(Placed {
            group,
            memory,
            buffer,
        })
    }

    fn view(&self) -> RawView<'_, B> {
        let Memory { dtype, shape, .. } = self.memory;
        RawView::of(self.group, &self.buffer, dtype, shape)
    }

    fn output(&self) -> RawOutput<'_, B> {
        let Memory { dtype, shape, .. } = self.memory;
        RawOutput::of(self.group, &self.buffer, dtype, shape)
    }
}
