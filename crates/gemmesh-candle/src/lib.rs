#![doc = include_str!("../README.md")]

mod any_ranks;
mod device;
mod error;
mod failure;
mod layers;
mod load;
mod multiplied;
mod parameters;
mod pools;
mod products;
mod ranks;
mod tensor_parallel;
mod weight;

pub use device::Device;
pub use error::gemmesh_error;
#[cfg(feature = "cuda")]
pub use gemmesh::Cuda;
pub use gemmesh::{Group, Host, launch};
pub use layers::{ColumnParallelLinear, GatedParallelLinear, QkvParallelLinear, RowParallelLinear};
pub use load::Hints;
pub use tensor_parallel::TensorParallel;
pub use weight::Weight;
