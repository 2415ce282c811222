//! Interop: memory, streams and events of other libraries.

#[cfg(feature = "cudarc")]
pub mod cudarc;
#[cfg(feature = "cust")]
mod cust;
pub mod dlpack;
#[cfg(feature = "cuda")]
pub mod stream;
pub mod tensors;
