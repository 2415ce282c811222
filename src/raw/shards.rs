//! Sharded matrices of any type and backend.

use std::ops::{Deref, DerefMut, Range};

use super::{Memory, group::AnyBackend};
use crate::backend::{Backend, Host, sealed::Implementation};
use crate::element::{DType, F8E4M3, F8E5M2, Value, bf16, f16};
use crate::error::{Error, Result};
use crate::group::Group;
use crate::matrix::ShardedMatrix;
use crate::ops::call::RawShards;

/// How the rows of a sharded matrix are split when it is made.
#[derive(Clone, Copy, Debug)]
pub enum Split<'a> {
    /// M rows, evenly: [`Group::sharded`].
    Even(usize),
    /// The rows of each rank: [`Group::sharded_rows`].
    ByRank(&'a [usize]),
    /// Evenly at first, with room for as many rows: [`Group::sharded_with_capacity`].
    Capacity(usize),
    /// M rows in this number of stages: [`Group::sharded_staged`].
    Staged(usize, usize),
}

/// What a sharded matrix is, whatever its type and backend.
pub trait Shards: Send + Sync {
    /// The type of its elements.
    fn dtype(&self) -> DType;
    /// [M, K]
    fn shape(&self) -> [usize; 2];
    /// The number of ranks.
    fn world(&self) -> usize;
    /// How many rows fit.
    fn capacity(&self) -> usize;
    /// The rows that a rank owns, counted rank after rank: [`ShardedMatrix::rows_of`].
    fn rows_of(&self, rank: usize) -> Range<usize>;
    /// Where they lie in the matrix: [`ShardedMatrix::blocks_of`].
    fn blocks_of(&self, rank: usize) -> Vec<Range<usize>>;
    /// Changes how many rows each rank owns: [`ShardedMatrix::set_rows`].
    fn set_rows(&mut self, rows: &[usize]) -> Result<()>;
    /// This rank's copy of the whole matrix.
    fn whole(&self) -> Memory;
    /// This rank's own rows: [`ShardedMatrix::shard`].
    fn own_rows(&self) -> Result<Memory>;
}

/// A sharded matrix of a backend.
pub trait ShardsOf<B: Backend>: Shards {
    /// The matrix, as calls of its group take it.
    fn raw(&self) -> RawShards<'_, B>;
}

/// A sharded matrix of any type and backend.
pub enum AnyShards {
    /// Of the host backend.
    Host(Box<dyn ShardsOf<Host>>),
    /// Of the CUDA backend.
    #[cfg(feature = "cuda")]
    Cuda(Box<dyn ShardsOf<crate::backend::Cuda>>),
}

impl Deref for AnyShards {
    type Target = dyn Shards;

    fn deref(&self) -> &Self::Target {
        match self {
            AnyShards::Host(shards) => &**shards,
            #[cfg(feature = "cuda")]
            AnyShards::Cuda(shards) => &**shards,
        }
    }
}

impl DerefMut for AnyShards {
    fn deref_mut(&mut self) -> &mut Self::Target {
        match self {
            AnyShards::Host(shards) => &mut **shards,
            #[cfg(feature = "cuda")]
            AnyShards::Cuda(shards) => &mut **shards,
        }
    }
}

impl AnyShards {
    /// The matrix, as calls of a group of backend `B` take it. `argument`: its name in messages.
    pub(super) fn raw<B: AnyBackend>(&self, argument: &str) -> Result<RawShards<'_, B>> {
        match B::shards_of(self) {
            Some(shards) => Ok(shards.raw()),
            None => Err(Error::unsuitable(
                format!("the backend of {argument}"),
                B::NAME,
                "another",
            )),
        }
    }
}

impl<B: Backend, T: Value> Shards for ShardedMatrix<B, T> {
    fn dtype(&self) -> DType {
        T::DTYPE
    }

    fn shape(&self) -> [usize; 2] {
        self.shape()
    }

    fn world(&self) -> usize {
        self.layout().world()
    }

    fn capacity(&self) -> usize {
        self.capacity()
    }

    fn rows_of(&self, rank: usize) -> Range<usize> {
        self.rows_of(rank)
    }

    fn blocks_of(&self, rank: usize) -> Vec<Range<usize>> {
        self.blocks_of(rank)
    }

    fn set_rows(&mut self, rows: &[usize]) -> Result<()> {
        self.set_rows(rows)
    }

    fn whole(&self) -> Memory {
        self.memory_of_rows(0..self.shape()[0])
    }

    fn own_rows(&self) -> Result<Memory> {
        // It says what is wrong if the rows lie in several places.
        let rows = self.shard()?.shape()[0];
        let blocks = self.blocks_of(self.group().rank());
        let first = blocks.first().map_or(0, |rows| rows.start);
        Ok(self.memory_of_rows(first..first + rows))
    }
}

impl<B: Backend, T: Value> ShardedMatrix<B, T> {
    fn memory_of_rows(&self, rows: Range<usize>) -> Memory {
        let [_, k] = self.shape();
        let pitch = k * T::DTYPE.bytes();
        Memory {
            address: <B as Implementation>::address(self.memory()) + (rows.start * pitch) as u64,
            dtype: T::DTYPE,
            shape: [rows.len(), k],
            pitch,
        }
    }
}

impl<B: Backend, T: Value> ShardsOf<B> for ShardedMatrix<B, T> {
    fn raw(&self) -> RawShards<'_, B> {
        self.into()
    }
}

/// Runs a body with the type that a [`DType`] names.
macro_rules! with_type {
    ($dtype:expr, $type:ident => $body:expr) => {
        match $dtype {
            DType::Bf16 => {
                type $type = bf16;
                $body
            }
            DType::F16 => {
                type $type = f16;
                $body
            }
            DType::F32 => {
                type $type = f32;
                $body
            }
            DType::F8E4M3 => {
                type $type = F8E4M3;
                $body
            }
            DType::F8E5M2 => {
                type $type = F8E5M2;
                $body
            }
            DType::U8 => {
                type $type = u8;
                $body
            }
            DType::U16 => {
                type $type = u16;
                $body
            }
            DType::U32 => {
                type $type = u32;
                $body
            }
            DType::U64 => {
                type $type = u64;
                $body
            }
        }
    };
}
pub(super) use with_type;

/// Allocates a sharded matrix. Collective.
pub(super) fn allocate<B: AnyBackend>(
    group: &Group<B>,
    dtype: DType,
    split: Split<'_>,
    k: usize,
) -> Result<AnyShards> {
    with_type!(dtype, T => {
        let matrix: ShardedMatrix<B, T> = match split {
            Split::Even(m) => group.sharded(m, k),
            Split::ByRank(rows) => group.sharded_rows(rows, k),
            Split::Capacity(capacity) => group.sharded_with_capacity(capacity, k),
            Split::Staged(m, stages) => group.sharded_staged(m, k, stages),
        }?;
        Ok(B::any_shards(Box::new(matrix)))
    })
}
