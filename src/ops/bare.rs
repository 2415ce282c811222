//! Runs a schedule as it is, for tests of schedules that no operation makes yet.
#![allow(unsafe_code)]

use std::sync::Arc;

use super::call::{self, Added, Arguments, require_same_group};
use crate::backend::Backend;
use crate::backend::sealed::{Bound, Implementation};
use crate::element::Element;
use crate::error::{Error, Kind, Result};
use crate::group::Group;
use crate::matrix::Matrix;
use crate::matrix::ShardedMatrix;
use crate::ranks::call::MATRICES;
use crate::schedule::Schedule;
use crate::schedule::limits::{limit, require};

/// The weight and the output of a product.
type BareOperands<'a, B, T> = (&'a Matrix<B, T>, &'a mut Matrix<B, T>);

/// Runs `schedule`. Collective.
///
/// `shared` are the schedule's first matrices. `product` has the weight and the output of its product.
///
/// # Errors
/// [`Kind::Shape`], [`Kind::Limit`] or [`Kind::Unsuitable`] if the matrices do not fit the schedule;
/// [`Kind::Limit`] if the schedule is a different rank's; the errors of any operation.
///
/// # Safety
/// Tiles are disjoint and wait for the flags of the rows that they read. The ranks' schedules belong together: when a
/// rank writes a flag, the rows under it are those that its peer expects, and no rank moves or multiplies rows while
/// they are written. (A rank sees only its own schedule, so it cannot check this.)
#[track_caller]
pub unsafe fn run_schedule<B: Backend, T: Element>(
    group: &Group<B>,
    schedule: Schedule,
    shared: &[&ShardedMatrix<B, T>],
    product: Option<BareOperands<B, T>>,
) -> Result<()> {
    // First, because preparing takes locks, which may be held by threads that a fork lacks.
    group.check()?;
    let rank = group.rank();
    let bound = bind(group, schedule, shared, product);
    let (program, matrices) = bound.map_err(Error::of(rank, "run_schedule"))?;
    let numbers: Vec<u32> = shared.iter().map(|matrix| matrix.id()).collect();
    let arguments = Arguments {
        call: "run_schedule",
        matrices: &matrices[..],
        shared: &numbers,
        added: Added::default(),
    };
    call::run_bound(group, None, &program, arguments, None, None)
}

/// The program of a schedule, and its matrices by number.
type BoundProgram<'m, B> = (Arc<<B as Implementation>::Program>, Vec<Bound<'m, B>>);

fn bind<'m, B: Backend, T: Element>(
    group: &Group<B>,
    schedule: Schedule,
    shared: &[&'m ShardedMatrix<B, T>],
    product: Option<BareOperands<'m, B, T>>,
) -> Result<BoundProgram<'m, B>> {
    let rank = group.rank();
    limit("the rank of a schedule", schedule.rank(), rank, rank)?;
    let world = group.world_size();
    limit("the ranks of a schedule", schedule.world(), world, world)?;
    check_numbers(&schedule, shared.len())?;
    let mut matrices: Vec<Bound<B>> = schedule.matrices().iter().map(|_| Bound::Nothing).collect();
    for (number, matrix) in shared.iter().enumerate() {
        check_matrix::<B, T>(&schedule, number, matrix.shape(), [matrix.group(), group])?;
        matrices[number] = Bound::Symmetric(matrix.memory());
    }
    let fitting = schedule.product().is_some() == product.is_some();
    require(
        "operands must be given for a product, and for nothing else",
        fitting,
    )?;
    if let (Some(described), Some((b, out))) = (schedule.product(), product) {
        let weight = described.weights[0].b;
        let sum = &described.blocks[0].sum;
        check_matrix::<B, T>(&schedule, weight, b.shape(), [b.group(), group])?;
        check_matrix::<B, T>(&schedule, sum.out, out.shape(), [out.group(), group])?;
        matrices[weight] = Bound::Input(b.memory(), 0);
        matrices[sum.out] = Bound::Output(out.memory(), 0);
    }
    let inner = group.inner();
    let program = Arc::new(inner.backend.prepare(&inner.members, schedule)?);
    Ok((program, matrices))
}

/// Checks that a matrix has the schedule's shape and type, and belongs to the group that runs the schedule.
fn check_matrix<B: Backend, T: Element>(
    schedule: &Schedule,
    number: usize,
    found: [usize; 2],
    [its, group]: [&Group<B>; 2],
) -> Result<()> {
    let argument = format!("matrix {number} of the schedule");
    require_same_group(&argument, its, group)?;
    let spec = schedule.matrices().get(number);
    let spec = spec.filter(|spec| spec.dtype == T::DTYPE);
    let expected = spec.map(|spec| [spec.rows, spec.columns]);
    if expected == Some(found) {
        return Ok(());
    }
    Err(Error::of_kind(Kind::Shape {
        argument,
        expected: expected.unwrap_or_default().into(),
        found: found.into(),
    }))
}

/// Checks that every matrix that `schedule` moves or multiplies is bound, and only once. The first `shared` matrices
/// and those of the product are bound.
fn check_numbers(schedule: &Schedule, shared: usize) -> Result<()> {
    let all = schedule.matrices().len();
    limit("shared matrices", shared, 0, MATRICES.min(all))?;
    let is_shared = |what: &str, number: usize| {
        if number < shared {
            Ok(())
        } else {
            Err(Error::of_kind(Kind::Limit {
                what: format!("{what}, of {shared} that are shared,"),
                value: number,
                min: 0,
                max: shared.saturating_sub(1),
            }))
        }
    };
    let none = schedule.reduction().is_none();
    require("a schedule that is run as it is must not reduce", none)?;
    let none = !schedule.quantizes();
    require("a schedule that is run as it is must not quantise", none)?;
    let none = schedule.requests().is_empty();
    require(
        "a schedule that is run as it is must not ask for rows",
        none,
    )?;
    for moved in schedule.moves().flat_map(|transfer| &transfer.regions) {
        is_shared("a matrix that is moved", moved.from.matrix)?;
        is_shared("a matrix that is moved", moved.to.matrix)?;
    }
    let Some(product) = schedule.product() else {
        return Ok(());
    };
    is_shared("the matrix that is multiplied", product.a)?;
    limit("blocks of the product", product.blocks.len(), 1, 1)?;
    limit("weights of the product", product.weights.len(), 1, 1)?;
    let none = product.a_scales.is_none() && product.weights[0].scales.is_none();
    require("a schedule that is run as it is must have no scales", none)?;
    let (weight, sum) = (product.weights[0].b, &product.blocks[0].sum);
    require(
        "nothing must be added to the product",
        sum.addends.is_empty(),
    )?;
    limit("the number of the weight", weight, shared, all)?;
    limit("the number of the output", sum.out, weight + 1, all)
}
