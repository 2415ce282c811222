//! The planners, which make each rank's schedule of a problem.

mod all_gather;
pub mod chunks;
pub mod collectives;
mod host_sums;
pub mod matrices;
mod one_shot;
pub mod partial_sums;
pub mod partials;
mod pieces;
mod quantize;
mod sums_over_hosts;
pub mod tile_order;
mod ways;

use super::limits::require;
pub use all_gather::over_hosts;

use super::{Config, Operation, Problem, Schedule};
use crate::Result;

/// Makes the schedule of `rank` for `problem`, cut up as `config` says.
///
/// It is a pure function. Each rank plans for itself.
///
/// # Errors
/// `Kind::Limit` if an extent or a field of the configuration is out of bounds, or if a
/// schedule cannot have so many transfers, blocks or tiles. [`Kind::OutOfMemory`](crate::error::Kind::OutOfMemory).
pub fn plan(problem: &Problem, rank: usize, config: Config) -> Result<Schedule> {
    let planner = match problem.operation {
        Operation::AllGatherMatmul => all_gather::gather_and_multiply,
        Operation::Matmul => all_gather::multiply_alone,
        Operation::Multiply => all_gather::multiply,
        Operation::Quantize => quantize::quantize,
        Operation::Copy => all_gather::copy,
        Operation::AllGather
        | Operation::GatherOfAllReduce
        | Operation::GatherOfMatmulAllReduce => all_gather::gather,
        Operation::AllGatherAndConsume | Operation::Gather => all_gather::gather_pulled,
        Operation::MatmulReduceScatter => partial_sums::reduce_scatter,
        Operation::MatmulAllReduce => partial_sums::all_reduce,
        Operation::MultiplyPartials => partial_sums::multiply,
        Operation::CopyPartials => partial_sums::copy,
        Operation::CopyPartialsAndSums => partial_sums::copy_all,
        Operation::ReduceScatter => collectives::reduce_scatter,
        Operation::AllReduce => collectives::all_reduce,
        Operation::AllToAll => collectives::all_to_all,
        Operation::Broadcast => collectives::broadcast,
        Operation::ProduceAndReduceScatter => collectives::produce_and_reduce_scatter,
        Operation::ProduceAndAllToAll => collectives::produce_and_all_to_all,
    };
    if problem.hosts.count() > 1 {
        let what = "over several hosts copies must not be made without synchronisation";
        require(what, problem.operation.spans_hosts())?;
    }
    planner(problem, rank, config)
}
