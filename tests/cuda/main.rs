//! What the host backend promises, on GPUs. A rank is a process of its own; several may share a GPU.
//!
//! Tests that need a GPU fail if there is none and `GEMMESH_REQUIRE_GPU` is 1; else they say so and pass.
#![allow(unsafe_code)]

#[path = "../support/mod.rs"]
mod support;

mod ahead;
mod collectives;
mod dependent_launch;
#[cfg(feature = "cudarc")]
mod doors;
mod epochs;
mod failures;
mod forms;
mod fp8;
mod graphs;
mod groups;
mod hosts;
mod max_ctas;
mod pipelines;
mod quantized;
mod recorded;
mod reduce_scatter;
mod refusals;
mod rendezvous;
mod results;
mod shards;
mod streams;
mod views;
