//! The operations.

mod all_gather_matmul;
mod bare;
mod matmul_all_reduce;
mod matmul_reduce_scatter;
mod partial_sums;

pub use all_gather_matmul::{AllGatherMatmul, Prepared, all_gather_matmul};
pub use bare::run_schedule;
pub use matmul_all_reduce::{MatmulAllReduce, matmul_all_reduce};
pub use matmul_reduce_scatter::{MatmulReduceScatter, matmul_reduce_scatter};

use crate::backend::Backend;
use crate::error::{Error, Result};
use crate::group::Group;
use crate::matrix::Matrix;
use crate::schedule::{Product, Schedule};

/// The weight and the output of a product.
type Operands<'a, B, T> = (&'a Matrix<B, T>, &'a mut Matrix<B, T>);

/// The product of a schedule that has one.
fn product_of(schedule: &Schedule) -> &Product {
    match schedule.product() {
        Some(product) => product,
        None => unreachable!("the planner of a product makes one"),
    }
}

fn require_shape(
    rank: usize,
    argument: &str,
    expected: [usize; 2],
    found: [usize; 2],
) -> Result<()> {
    if expected == found {
        return Ok(());
    }
    Err(Error::Shape {
        rank,
        argument: argument.into(),
        expected: expected.into(),
        found: found.into(),
    })
}

/// `group` is that of the sharded matrix, whose rank makes the call.
fn require_same_group<B: Backend>(argument: &str, its: &Group<B>, group: &Group<B>) -> Result<()> {
    if its.is_same(group) {
        return Ok(());
    }
    Err(Error::ForeignArgument {
        rank: group.rank(),
        argument: argument.into(),
    })
}
