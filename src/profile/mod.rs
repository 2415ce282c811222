//! What profilers see: named ranges, and spans of time.

pub mod nvtx;
#[cfg(not(loom))]
pub mod span;
