//! Memory, streams and events of other libraries.
//!
//! Methods of matrices and groups take them, such as `Matrix::from_device_ptr`, `Matrix::from_cust` and
//! `Group::set_stream`.

#[cfg(feature = "cudarc")]
mod cudarc;
#[cfg(feature = "cust")]
mod cust;
pub mod dlpack;
#[cfg(feature = "cuda")]
pub(crate) mod stream;
pub(crate) mod tensors;

#[cfg(feature = "cudarc")]
#[cfg_attr(docsrs, doc(cfg(feature = "cudarc")))]
pub use cudarc::{CudarcMatrix, CudarcMatrixMut};
#[cfg(feature = "cuda")]
#[cfg_attr(docsrs, doc(cfg(feature = "cuda")))]
pub use stream::StreamGuard;
