//! What profilers see: ranges by name, and spans of what was done when.

pub mod nvtx;
#[cfg(not(loom))]
pub mod span;
