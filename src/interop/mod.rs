//! Doors to other libraries: their memory, and their streams.

#[cfg(feature = "cudarc")]
pub mod cudarc;
#[cfg(feature = "cust")]
mod cust;
pub mod dlpack;
#[cfg(feature = "cuda")]
pub mod stream;
