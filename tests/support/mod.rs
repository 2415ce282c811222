//! What the test files share: ranks as processes, data from seeds, and a reference in float64.
#![allow(dead_code)] // Each test file uses a part of it.

#[cfg(feature = "cuda")]
#[allow(unsafe_code)] // Calls of the CUDA driver.
pub mod gpu;
pub mod numbers;
pub mod processes;
