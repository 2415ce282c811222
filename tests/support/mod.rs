//! What the test files share: ranks as processes, data from seeds, and a reference in float64.
#![allow(dead_code)] // Each test file uses a part of it.

pub mod numbers;
pub mod processes;
