//! The planners: pure functions from a description of an operation to each rank's schedule.

pub mod all_gather;
pub mod collectives;
mod one_shot;
pub mod partial_sums;
pub mod partials;
mod pieces;
pub mod tile_order;
