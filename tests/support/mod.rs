//! What the test files share: ranks as processes, data from seeds, a reference in float64, and the tests of what every
//! backend promises.
#![allow(dead_code, unused_imports, unused_macros)] // Each test file uses a part of it.

pub mod errors;
pub mod forks;
#[cfg(feature = "cuda")]
#[allow(unsafe_code)] // Calls of the CUDA driver.
pub mod gpu;
pub mod numbers;
pub mod patience;
pub mod ports;
pub mod processes;
pub mod products;
pub mod shared;
pub mod tested;
