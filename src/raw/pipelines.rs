//! Operations that call a function of the caller, without element types.

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;

use super::Memory;
use crate::backend::Backend;
use crate::error::Result;
use crate::ops::call::RawShards;
use crate::ops::produce::RawBlock;
use crate::ops::{AllGatherAndConsume, CallbackResult, all_gather_and_consume};

/// Rows that have arrived or, on GPUs, that a stream waits for.
pub struct AnyRows {
    /// Their numbers in the matrix.
    pub rows: Range<usize>,
    /// The rank that owns them.
    pub source: usize,
    /// Where the rows are.
    pub memory: Memory,
    /// The CUstream on which work finds them. Null on the host backend.
    pub stream: usize,
}

/// Rows for the caller to make.
pub struct RowsFor {
    /// Their numbers among the rows of a sum, or among those for the owner.
    pub rows: Range<usize>,
    /// The rank that gets them.
    pub owner: usize,
    /// Where the rows go.
    pub memory: Memory,
    /// What keeps the memory, if it is not that of the sharded matrix that the call gets.
    pub keeper: Option<Arc<dyn Any + Send + Sync>>,
    /// The CUstream on which work makes them. Null on the host backend.
    pub stream: usize,
}

/// A function that gets rows.
pub type Consume<'a> = dyn FnMut(AnyRows) -> CallbackResult + 'a;
/// A function that makes rows.
pub type Produce<'a> = dyn FnMut(RowsFor) -> CallbackResult + 'a;

/// Gathers the rows of `a`, and calls `consume` for each chunk of them.
pub(super) fn gather<B: Backend>(
    options: AllGatherAndConsume,
    a: RawShards<B>,
    consume: &mut Consume,
) -> Result<()> {
    let (first, [_, k]) = (a.address(), a.shape());
    options.gather(a, None, None, |chunk: all_gather_and_consume::ChunkRows| {
        let pitch = k * a.dtype.bytes();
        consume(AnyRows {
            memory: Memory {
                address: first + (chunk.rows.start * pitch) as u64,
                dtype: a.dtype,
                shape: [chunk.rows.len(), k],
                pitch,
            },
            rows: chunk.rows,
            source: chunk.source,
            stream: chunk.stream as usize,
        })
    })
}

/// `produce`, as operations call it.
pub(super) fn producer<B: Backend>(
    produce: &mut Produce,
) -> impl FnMut(RawBlock<'_, B>) -> CallbackResult {
    |block| {
        let memory = Memory {
            address: block.address(),
            dtype: block.dtype,
            shape: [block.rows.len(), block.columns],
            pitch: block.pitch * block.dtype.bytes(),
        };
        let keeper = block.room.cloned();
        produce(RowsFor {
            keeper: keeper.map(|room| room as Arc<dyn Any + Send + Sync>),
            rows: block.rows,
            owner: block.owner,
            memory,
            stream: block.stream as usize,
        })
    }
}
