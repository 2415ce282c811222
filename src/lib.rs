#![doc = include_str!("../README.md")]
// loom explores the protocol alone.
#![cfg_attr(loom, allow(dead_code))]

pub mod error;
pub mod schedule;

mod element;
mod ranges;

#[cfg(not(loom))]
mod backend;
#[cfg(all(feature = "cuda", not(loom)))]
mod device;
#[cfg(not(loom))]
mod explanation;
#[cfg(not(loom))]
mod group;
#[cfg(not(loom))]
mod matrix;
#[cfg(not(loom))]
mod memory;
#[cfg(not(loom))]
mod ops;
#[cfg(not(loom))]
mod ranks;
#[cfg(not(loom))]
mod sharded;
#[cfg(not(loom))]
mod span;
#[cfg(not(loom))]
pub mod trace;

pub use element::{DType, Element, Float, Value, bf16, f16};
pub use error::{Error, Result};
pub use schedule::{Activation, Chunking, Config, Numerics, Route, TileShape, WeightLayout};

#[cfg(not(loom))]
pub use {
    backend::{Backend, Host},
    explanation::{Explanation, Prediction},
    group::{Builder, DEFAULT_TIMEOUT, Group},
    matrix::{Matrix, MatrixView, MatrixViewMut},
    ops::{
        AllGatherAndConsume, AllGatherMatmul, Block, CallbackResult, Chunk, Matmul,
        MatmulAllReduce, MatmulReduceScatter, OutputOf, Outputs, Prepared, PreparedAllReduce,
        PreparedMatmul, PreparedReduceScatter, ProduceAndAllToAll, ProduceAndReduceScatter,
        Weights, all_gather, all_gather_and_consume, all_gather_matmul, all_reduce, all_to_all,
        broadcast, matmul, matmul_all_reduce, matmul_reduce_scatter, produce_and_all_to_all,
        produce_and_reduce_scatter, reduce_scatter,
    },
    ranks::launch,
    sharded::{ShardMut, ShardedMatrix},
};

#[cfg(all(feature = "cuda", not(loom)))]
pub use backend::Cuda;

#[cfg(not(loom))]
#[doc(hidden)]
pub mod testing {
    //! What only the tests and benchmarks of this library use.
    pub use crate::backend::KEPT_PROGRAMS;
    pub use crate::backend::delay_chunks;
    #[cfg(feature = "cuda")]
    pub use crate::backend::{Sample, Winner};
    #[cfg(feature = "cuda")]
    pub use crate::device::{align_streams, calibrate, ranks_share_gpus, with_each_kernel};
    pub use crate::ops::run_schedule;
}

#[cfg(fuzzing)]
pub mod fuzzing {
    //! What reads bytes that others wrote, for the targets in fuzz/. Each has a `parse`, which must not panic, and `seeds`,
    //! which the library's own code writes.
    #[cfg(feature = "cuda")]
    pub use crate::backend::{peer, winners};
    pub use crate::ranks::env::fuzzing as environment;
    pub use crate::ranks::members::fuzzing as frame;
    pub use crate::ranks::rendezvous::fuzzing as introduction;
    pub use crate::ranks::reports::fuzzing as report;
    pub use crate::trace::fuzzing as trace;
}
