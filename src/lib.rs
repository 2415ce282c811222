//! Matrix products over several GPUs that hide communication behind arithmetic.
//!
//! The rows of a sharded matrix are multiplied while they arrive.
//!
//! ```
//! use gemmesh::{Group, Host, all_gather_matmul, bf16};
//!
//! // Four ranks as threads. Processes join a group by Group::<Host>::from_env().
//! Group::<Host>::threads(4, |group| {
//!     let (m, n, k) = (64, 32, 16);
//!     let mut a = group.sharded::<bf16>(m, k)?; // [M, K]; this rank owns the rows a.rows()
//!     let own = vec![bf16::from_f32(0.5); a.rows().len() * k];
//!     a.shard_mut().copy_from_host(&own)?;
//!     let b = group.upload(&vec![bf16::ONE; n * k], n, k)?; // [N, K], this rank's columns
//!     let mut out = group.zeros::<bf16>(m, n)?;
//!     all_gather_matmul(&a, &b, &mut out)?; // out[M, N] = gather(a) · bᵀ
//!     assert_eq!(out.to_vec()?[0].to_f32(), 8.0);
//!     Ok::<_, gemmesh::Error>(())
//! })?;
//! # Ok::<_, gemmesh::Error>(())
//! ```
//!
//! # Where to look
//!
//! | to | use |
//! |---|---|
//! | join the ranks | [`Group::threads`], [`Group::from_env`], [`Group::connect`]; [`Builder`] for time-outs and devices; [`launch`] starts processes |
//! | make matrices | [`Group::sharded`] (rows spread over the ranks), [`Group::upload`] and [`Group::zeros`] (a rank's own) |
//! | change M between calls | [`Group::sharded_with_capacity`], [`ShardedMatrix::set_rows`], [`Matrix::set_rows`] |
//! | use another library's memory | `Matrix::from_device_ptr`, [`interop`], [`dlpack`](interop::dlpack) |
//! | multiply fp8 | [`F8E4M3`], [`F8E5M2`], [`Scales`](fp8::Scales), [`ShardedScales`](fp8::ShardedScales) |
//! | make fp8 of other floats, or of products | [`quantize`](fp8::quantize), [`Matrix::quantized`], [`Quantized`](fp8::Quantized), [`Quantization`](fp8::Quantization) |
//! | use a part of a matrix | [`MatrixView`](views::MatrixView), [`MatrixViewMut`](views::MatrixViewMut) |
//! | read and write own rows between two products | [`ShardedMatrix::shard`], [`ShardMut::copy_from`](views::ShardMut::copy_from), [`ShardMut::view_mut`](views::ShardMut::view_mut) |
//! | multiply rows that other ranks own | [`all_gather_matmul`], [`AllGatherMatmul`] |
//! | sum the ranks' products | [`matmul_reduce_scatter`], [`matmul_all_reduce`], and the builders of the same names |
//! | multiply on one rank | [`matmul`], [`Matmul`] |
//! | move rows, without a product | [`all_gather`], [`reduce_scatter`], [`all_reduce`], [`all_to_all`], [`all_to_all_with_counts`], [`broadcast`] |
//! | overlap a kernel of your own | [`all_gather_and_consume`](pipelines::all_gather_and_consume), [`produce_and_reduce_scatter`](pipelines::produce_and_reduce_scatter), [`produce_and_all_to_all`](pipelines::produce_and_all_to_all) |
//! | plan once and run often | `prepare` of each builder, such as [`AllGatherMatmul::prepare`]; [`Prepared`](products::Prepared) |
//! | ask what is supported before there are matrices | `supported` of each builder, such as [`AllGatherMatmul::supported`] |
//! | see or choose how a product is cut up | [`Prepared::explain`](products::Prepared::explain), [`Explanation`](tuning::Explanation), [`Config`], [`Numerics`](tuning::Numerics) |
//! | see what happened when | [`Prepared::run_traced`](products::Prepared::run_traced), [`trace`] |
//! | see which rank the others wait for | [`Group::wait_times`] |
//! | learn what went wrong | [`Error`] |
//!
//! Most operations have a function, which is the short call, and a builder of the same name, which takes options:
//!
//! | builder | options |
//! |---|---|
//! | all of them | bias, activation, scales of fp8, weights [K, N], configuration |
//! | [`AllGatherMatmul`] | several weights, a gate and its up projection, outputs of other types or quantised |
//! | [`MatmulReduceScatter`] | residual, outputs of other types |
//! | [`MatmulAllReduce`] | residual |
//! | [`Matmul`] | all of these |
//!
//! A **collective** call is one that all ranks make. All ranks make the same collective calls in the same order.
//!
//! # Backends
//!
//! [`Host`] runs on any machine, on shared memory. A rank is a thread or a process. `Cuda` (feature `cuda`) runs on
//! NVIDIA GPUs (H100, H200). A rank is a process with one GPU, and operations go on a stream and return at
//! once. Both walk the same schedules and return the same errors.
//!
//! On GPUs the kernels of all ranks wait for one another. The documentation of `Cuda` has the rules for other kernels
//! on the same GPUs, under *Pushed rows and other kernels*.
//!
//! # Features
//!
//! | feature | what it adds | what it needs |
//! |---|---|---|
//! | `timeline` (default) | draws traces as SVG | |
//! | `cuda` | the backend `Cuda` | nvcc to build, or `GEMMESH_NO_KERNELS=1` to check; the driver is loaded at run time |
//! | `cudarc` | matrices in cudarc 0.19's slices, on its streams, with its events: `CudarcMatrix` | as `cuda` |
//! | `cust` | matrices in cust 0.3's buffers, on its streams: `Matrix::from_cust` | as `cuda`, and a toolkit in `CUDA_LIBRARY_PATH` |
//! | `nvtx` | names operations in NVIDIA's profilers | libclang and a C compiler |
//! | `mpi` | finds the ranks over an MPI communicator | an MPI library and libclang |
//! | `unstable-doors` | `raw`, for packages for other languages. Any release may change it | |
//! | `unstable-tools` | `schedule`, `protocol`, `testing`, `tools`, for work on this library. Any release may change them | |
//! | `bindgen` | compares the kernels' header with its Rust side in the tests | libclang |
//!
//! # More
//!
//! The repository has a user's guide (`docs/guide.md`), pages on training, GPUs, tuning, results and the protocol
//! (`docs/`), and examples of a page each (`examples/`).
#![cfg_attr(docsrs, feature(doc_cfg))]
// loom explores only the protocol. Without the unstable modules, what only they use is unused.
#![cfg_attr(
    any(loom, not(all(feature = "unstable-doors", feature = "unstable-tools"))),
    allow(dead_code, unused_imports)
)]

mod call;
pub mod error;
#[cfg(not(feature = "unstable-tools"))]
mod schedule;
#[cfg(feature = "unstable-tools")]
pub mod schedule;

mod element;
#[cfg(not(loom))]
mod json;
#[cfg(not(loom))]
mod one_line;
mod profile;

#[cfg(not(feature = "unstable-tools"))]
mod protocol;
#[cfg(feature = "unstable-tools")]
pub mod protocol;
mod route;

#[cfg(not(loom))]
mod backend;
#[cfg(not(loom))]
mod explanation;
#[cfg(not(loom))]
mod group;
#[cfg(not(loom))]
mod matrix;
#[cfg(not(loom))]
mod ops;
#[cfg(not(loom))]
mod process;
#[cfg(not(loom))]
mod ranks;
#[cfg(all(feature = "unstable-doors", not(loom)))]
pub mod raw;
mod resources;
#[cfg(all(feature = "unstable-tools", not(loom)))]
pub mod testing;
#[cfg(all(feature = "unstable-tools", feature = "cuda", not(loom)))]
pub mod tools;
#[cfg(not(loom))]
pub mod trace;

// Last, so that the page of `Group` ends with raw streams. rustdoc shows `impl` blocks in the order of the modules.
#[cfg(not(loom))]
pub mod interop;

pub use element::{DType, F8E4M3, F8E5M2, bf16, f16};
pub use error::context::{Error, Result};
pub use schedule::config::Config;
pub use schedule::form::Activation;

#[cfg(not(loom))]
pub use {
    backend::{Backend, Host},
    group::{Builder, DEFAULT_TIMEOUT, GATHERED_BYTES, Group},
    matrix::{Matrix, ShardedMatrix},
    ops::{
        AllGatherMatmul, Matmul, MatmulAllReduce, MatmulReduceScatter, all_gather,
        all_gather_matmul, all_reduce, all_to_all, all_to_all_with_counts, broadcast, matmul,
        matmul_all_reduce, matmul_reduce_scatter, reduce_scatter,
    },
    ranks::launch,
};

#[cfg(all(feature = "cuda", not(loom)))]
#[cfg_attr(docsrs, doc(cfg(feature = "cuda")))]
pub use backend::Cuda;

pub mod elements {
    //! The element types that go together, as traits: other pairs do not compile.
    //!
    //! A [`Value`] can be moved, a [`Number`] be computed with. A [`Float`] can be added over the ranks. An [`Element`]
    //! can be multiplied:
    //!
    //! | rows `T`: [`Element`] | weights: [`WeightOf<T>`](WeightOf) | outputs: [`OutputOf<T>`](OutputOf) | bias, residual: [`AddendOf<T>`](AddendOf) |
    //! |---|---|---|---|
    //! | bf16 | bf16 | bf16, f32 | bf16 |
    //! | f16 | f16 | f16, f32 | f16 |
    //! | F8E4M3 | F8E4M3, F8E5M2 | bf16, f16, f32, F8E4M3 | bf16 |
    //! | F8E5M2 | F8E4M3 | bf16, f16, f32, F8E4M3 | bf16 |
    //!
    //! [`Half`] is what bf16 and f16 have in common.
    pub use crate::element::{AddendOf, Element, Float, Half, Number, OutputOf, Value, WeightOf};
}

#[cfg(not(loom))]
pub mod views {
    //! Parts of matrices: rows, columns, and a rank's own rows of a sharded matrix.
    pub use crate::matrix::{MatrixView, MatrixViewMut, ShardMut};
}

pub mod products {
    //! The builder of all products and its forms; what it takes and returns: operands, weights, outputs, and calls that
    //! are planned once.
    //!
    //! A program names a form by the builder's alias: [`AllGatherMatmul`](crate::AllGatherMatmul),
    //! [`Matmul`](crate::Matmul), [`MatmulReduceScatter`](crate::MatmulReduceScatter) or
    //! [`MatmulAllReduce`](crate::MatmulAllReduce). Functions that take any of them are generic over [`ProductForm`].
    #[cfg(not(loom))]
    pub use crate::ops::{
        AddendView, GatherProduct, LocalProduct, OfAllRanks, Operand, OutputLike, Outputs,
        OwnOutputs, OwnRows, OwnRowsLike, Prepared, PreparedAllReduce, PreparedMatmul,
        PreparedReduceScatter, ProductBuilder, ProductForm, ReduceProduct, RowSplit,
        ScatterProduct, SeveralWeights, ShardedOperand, SharedOutput, WeightWidths, Weights,
    };
    pub use crate::schedule::form::{MAX_WEIGHTS, WeightLayout};
}

pub mod fp8 {
    //! Scales of fp8: of operands, of weights and of outputs; and how other floats become fp8.
    #[cfg(not(loom))]
    pub use crate::ops::{
        PreparedQuantize, Quantize, Quantized, QuantizedOutput, Scales, ShardedScales,
        WeightScaling, quantize,
    };
    pub use crate::schedule::form::Accumulation;
    pub use crate::schedule::quantization::Quantization;
    pub use crate::schedule::scaling::Scaling;
}

#[cfg(not(loom))]
pub mod pipelines {
    //! Operations around a kernel of the caller, which consumes rows that arrive or makes rows that leave.
    pub use crate::ops::{
        AllGatherAndConsume, Block, CallbackResult, Chunk, ProduceAndAllToAll,
        ProduceAndReduceScatter, all_gather_and_consume, produce_and_all_to_all,
        produce_and_reduce_scatter,
    };
}

pub mod tuning {
    //! How an operation is cut up, how its sums are made, and how long it is expected to take.
    #[cfg(not(loom))]
    pub use crate::explanation::{Explanation, Prediction};
    pub use crate::route::Route;
    pub use crate::schedule::config::{Chunking, Numerics, TileShape};
}

#[cfg(fuzzing)]
pub mod fuzzing {
    //! Parsers of bytes from other processes, for the targets in fuzz/. Each module has a `parse`, which must not
    //! panic, and `seeds`, which are valid inputs.
    #[cfg(feature = "cuda")]
    pub use crate::backend::{peer, winners};
    pub use crate::ranks::env::fuzzing as environment;
    pub use crate::ranks::members::messages::fuzzing as frame;
    pub use crate::ranks::mirror::fuzzing as mirror;
    pub use crate::ranks::rendezvous::fuzzing as introduction;
    pub use crate::ranks::rendezvous::fuzzing_visits as visit;
    pub use crate::ranks::reports::fuzzing as report;
    pub use crate::trace::fuzzing as trace;
}

/// Runs the code of these pages as tests.
#[cfg(all(doctest, not(loom)))]
mod pages {
    #[doc = include_str!("../README.md")]
    mod readme {}
    #[doc = include_str!("../docs/guide.md")]
    mod guide {}
    #[doc = include_str!("../docs/training.md")]
    mod training {}
    #[doc = include_str!("../docs/tuning.md")]
    mod tuning {}
}
