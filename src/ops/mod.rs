//! The operations.

mod all_gather_and_consume;
mod all_gather_matmul;
mod bare;
mod callback;
mod collectives;
mod matmul;
mod matmul_all_reduce;
mod matmul_reduce_scatter;
mod operands;
mod partial_sums;
mod produce;

pub use all_gather_and_consume::{AllGatherAndConsume, Chunk, all_gather_and_consume};
pub use all_gather_matmul::{AllGatherMatmul, Prepared, all_gather_matmul};
pub use bare::run_schedule;
pub use callback::CallbackResult;
pub use collectives::{all_gather, all_reduce, all_to_all, broadcast, reduce_scatter};
pub use matmul::{Matmul, PreparedMatmul, matmul};
pub use matmul_all_reduce::{MatmulAllReduce, PreparedAllReduce, matmul_all_reduce};
pub use matmul_reduce_scatter::{
    MatmulReduceScatter, PreparedReduceScatter, matmul_reduce_scatter,
};
pub use operands::{OutputOf, Outputs, Weights};
pub use produce::{
    Block, ProduceAndAllToAll, ProduceAndReduceScatter, produce_and_all_to_all,
    produce_and_reduce_scatter,
};

use std::sync::Arc;

use crate::backend::Backend;
use crate::backend::sealed::{Bound, Call};
use crate::element::Value;
use crate::error::{Error, Result};
use crate::explanation::Explanation;
use crate::group::Group;
use crate::matrix::ShardedMatrix;
use crate::profile::nvtx::range;
use crate::profile::span::Span;
use crate::protocol::epoch::Epoch;
use crate::ranks::call::PostedCall;
use crate::schedule::limits::limit;
use crate::schedule::{Config, Layout, Problem, Product, RowOrder, Schedule};

/// What a call adds to sums that all ranks must give, or none.
#[derive(Clone, Copy, Debug, Default)]
struct Added {
    bias: bool,
    residual: bool,
}

/// Runs `program`, and before it what this rank does by itself, with the same matrices: as an operation of all ranks, if the
/// schedule says on what they must agree. `shared`: the numbers of the sharded matrices among the matrices.
fn run<B: Backend>(
    group: &Group<B>,
    before: Option<&Arc<B::Program>>,
    program: &Arc<B::Program>,
    matrices: &[Bound<B>],
    shared: &[u32],
    added: Added,
    mut trace: Option<&mut Vec<Span>>,
) -> Result<()> {
    let traced = trace.is_some();
    let inner = group.inner();
    let mut run = |program: &B::Program, epoch| {
        let call = Call {
            epoch,
            matrices,
            trace: trace.as_deref_mut(),
            callback: None,
        };
        inner.backend.run(&inner.members, program, call)
    };
    let Some(agreed) = B::schedule(program).agreed() else {
        if group.is_recording()? {
            group.keep_recorded(program)?;
        }
        let _range = range(|| format!("gemmesh {}", B::schedule(program).name()));
        return group.exclusively(|epoch| run(program, epoch));
    };
    let posted = PostedCall {
        agreed,
        matrices: shared,
        traced,
        biased: added.bias,
        residual: added.residual,
    };
    operate(group, before, program, posted, |epoch| {
        if let Some(before) = before {
            let failed = |error| match group.is_recording() {
                Ok(true) => error,
                // The operation has its number: the others wait for this rank.
                _ => inner.members.fail(error),
            };
            run(before, epoch).map_err(failed)?;
        }
        run(program, epoch)
    })
}

/// An operation of all ranks, which `run` puts on the device with these programs: at once or, if it is captured, whenever the graph is
/// launched.
fn operate<B: Backend>(
    group: &Group<B>,
    before: Option<&Arc<B::Program>>,
    program: &Arc<B::Program>,
    call: PostedCall<'_>,
    run: impl FnOnce(Epoch) -> Result<()>,
) -> Result<()> {
    let schedule = B::schedule(program);
    // A kernel that waits for what is pulled has its epoch among its arguments.
    let waits = schedule.product().is_some() && !schedule.is_pushed();
    let can_be_recorded = !waits || schedule.is_idle();
    if can_be_recorded && !call.traced && group.is_recording()? {
        // It has no number among those that run now: any will do.
        let mut programs = before.into_iter().chain([program]);
        programs.try_for_each(|program| group.keep_recorded(program))?;
        let _range = range(|| format!("gemmesh {}, recorded", schedule.name()));
        return group.exclusively(|_| run(Epoch::FIRST));
    }
    group.operate(call, |epoch| {
        let _range = range(|| format!("gemmesh {}, epoch {}", schedule.name(), epoch.raw()));
        run(epoch)
    })
}

/// Why `group` cuts up like that what is asked.
fn explain<B: Backend>(group: &Group<B>, problem: &Problem, config: Config) -> Explanation {
    let predicted = match problem.layout.m() {
        0 => Vec::new(),
        _ => group.inner().backend.predict(problem, &config),
    };
    Explanation { config, predicted }
}

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

/// `group` is that whose rank makes the call.
fn require_same_group<B: Backend>(argument: &str, its: &Group<B>, group: &Group<B>) -> Result<()> {
    if its.is_same(group) {
        return Ok(());
    }
    Err(Error::ForeignArgument {
        rank: group.rank(),
        argument: argument.into(),
    })
}

/// How the rows of `a` lie and are gathered: in as many stages as a call asks for.
fn layout_of<B: Backend, T: Value>(
    a: &ShardedMatrix<B, T>,
    stages: Option<usize>,
) -> Result<Layout> {
    let layout = a.layout().clone();
    let Some(stages) = stages else {
        return Ok(layout);
    };
    if layout.order() == RowOrder::ByStage {
        let own = layout.stages();
        limit("stages of a gather of a staged matrix", stages, own, own)?;
        return Ok(layout);
    }
    layout.staged(stages, RowOrder::ByRank)
}

/// The rows of `matrix`, which are not gathered but made where they lie, follow one another rank after rank.
fn require_by_rank<B: Backend, T: Value>(
    argument: &str,
    matrix: &ShardedMatrix<B, T>,
) -> Result<()> {
    let stages = match matrix.layout().order() {
        RowOrder::ByRank => 1,
        RowOrder::ByStage => matrix.layout().stages(),
    };
    limit(&format!("stages of {argument}"), stages, 1, 1)
}
