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

use super::operation::{OperationPart, RowResult, RowSource, RowWork};
use super::{Config, Operation, Problem, Schedule};
use crate::error::{Error, Result};

/// Makes the schedule of `rank` for `problem`, cut up as `config` says.
///
/// It is a pure function. Each rank plans for itself.
///
/// # Errors
/// `Kind::Limit` if an extent or a field of the configuration is out of bounds, or if a
/// schedule cannot have so many transfers, blocks or tiles. [`Kind::OutOfMemory`](crate::error::Kind::OutOfMemory).
pub fn plan(problem: &Problem, rank: usize, config: Config) -> Result<Schedule> {
    let operation = problem.operation;
    let planner = planner(operation);
    let planner = planner.ok_or_else(|| Error::unsupported("there must be a planner"))?;
    if problem.hosts.count() > 1 {
        let what = "over several hosts copies must not be made without synchronisation";
        require(what, operation.part != OperationPart::Copies)?;
    }
    // The schedule of a rank alone has one rank, 0.
    let rank = if operation.is_alone() { 0 } else { rank };
    planner(problem, rank, config)
}

type Planner = fn(&Problem, usize, Config) -> Result<Schedule>;

/// The planner of this point of the space of operations. None if there is no such operation.
fn planner(operation: Operation) -> Option<Planner> {
    use OperationPart::{Copies, Gather, Whole, Work};
    use RowResult::{Blocks, Kept, SumOfAllRows, SumOfOwnRows};
    use RowSource::{Gathered, Own, Root};
    use RowWork::{Caller, Nothing, Product, Quantization};
    let Operation {
        rows, work, result, ..
    } = operation;
    Some(match (operation.part, rows, work, result) {
        (Gather, ..) => all_gather::plan,
        (_, Gathered, Nothing | Product | Caller, Kept) => all_gather::plan,
        (Whole, Own, Product, Kept) => all_gather::plan,
        (Whole, Own, Quantization, Kept) => quantize::quantize,

        (Whole, Own, Product, SumOfOwnRows) => partial_sums::reduce_scatter,
        (Whole, Own, Product, SumOfAllRows) => partial_sums::all_reduce,
        (Work, Own, Product, SumOfOwnRows) => partial_sums::multiply,
        (Copies, Own, Product, SumOfOwnRows) => partial_sums::copy,
        (Copies, Own, Product, SumOfAllRows) => partial_sums::copy_all,

        (Whole, Own, Nothing | Caller, SumOfOwnRows) => collectives::reduce_scatter,
        (Whole, Own, Nothing, SumOfAllRows) => collectives::all_reduce,
        (Whole, Own, Nothing | Caller, Blocks) => collectives::all_to_all,
        (Whole, Root, Nothing, Kept) => collectives::broadcast,
        _ => return None,
    })
}
