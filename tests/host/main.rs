//! What every backend promises, and what the host's alone does, on the host.
#![allow(unsafe_code)]

#[path = "../support/mod.rs"]
mod support;

mod collectives;
mod debug;
mod dlpack;
mod forms;
mod fp8;
mod groups;
mod hosts;
mod lost_hosts;
mod numerics;
mod overlap;
mod pipelines;
mod reduce_scatter;
mod safety;
mod shards;
mod supported;
