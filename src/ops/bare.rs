//! Any schedule, as it is: for tests of what schedules can say and no operation needs yet.

use std::sync::Arc;

use super::Added;
use crate::backend::Backend;
use crate::backend::sealed::Bound;
use crate::element::Element;
use crate::error::{Error, Result};
use crate::group::Group;
use crate::matrix::Matrix;
use crate::ranks::call::MATRICES;
use crate::schedule::Schedule;
use crate::schedule::layout::limit;
use crate::sharded::ShardedMatrix;

/// The weight and the output of a product.
type Operands<'a, B, T> = (&'a Matrix<B, T>, &'a mut Matrix<B, T>);

/// Does what `schedule` says, with `shared` as its first matrices and `product` as the weight and the output of its product.
/// Collective.
///
/// # Errors
/// [`Error::Shape`], [`Error::Limit`] and [`Error::ForeignArgument`] for matrices that are not those of the schedule; as any
/// operation.
pub fn run_schedule<B: Backend, T: Element>(
    group: &Group<B>,
    schedule: Schedule,
    shared: &[&ShardedMatrix<B, T>],
    product: Option<Operands<B, T>>,
) -> Result<()> {
    let rank = group.rank();
    let fits = |number: usize, found: [usize; 2], of: &Group<B>| {
        let argument = format!("matrix {number} of the schedule");
        if !of.is_same(group) {
            return Err(Error::ForeignArgument { rank, argument });
        }
        let spec = schedule.matrices().get(number);
        let spec = spec.filter(|spec| spec.dtype == T::DTYPE);
        let expected = spec.map(|spec| [spec.rows, spec.columns]);
        if expected == Some(found) {
            return Ok(());
        }
        Err(Error::Shape {
            rank,
            argument,
            expected: expected.unwrap_or_default().into(),
            found: found.into(),
        })
    };
    let mut matrices: Vec<Bound<B>> = schedule.matrices().iter().map(|_| Bound::Nothing).collect();
    limit(
        "shared matrices",
        shared.len(),
        0,
        MATRICES.min(matrices.len()),
    )?;
    for (number, matrix) in shared.iter().enumerate() {
        fits(number, matrix.shape(), matrix.group())?;
        matrices[number] = Bound::Symmetric(matrix.memory());
    }
    // What is moved, and what is multiplied, is bound.
    let reductions = usize::from(schedule.reduction().is_some());
    limit("reductions", reductions, 0, 0)?;
    let last = shared.len().max(1) - 1;
    for moved in schedule.moves().flat_map(|transfer| &transfer.regions) {
        limit("a matrix that is moved", moved.from.matrix, 0, last)?;
        limit("a matrix that is moved", moved.to.matrix, 0, last)?;
    }
    if schedule.product().is_some() != product.is_some() {
        return Err(Error::Shape {
            rank,
            argument: "the operands of the schedule's product".into(),
            expected: vec![schedule.product().is_some().into()],
            found: vec![product.is_some().into()],
        });
    }
    if let (Some(described), Some((b, out))) = (schedule.product(), product) {
        limit("the matrix that is multiplied", described.a, 0, last)?;
        limit("blocks of the product", described.blocks.len(), 1, 1)?;
        limit("weights of the product", described.weights.len(), 1, 1)?;
        let weight = described.weights[0].b;
        let sum = &described.blocks[0].sum;
        limit("what is added to the product", sum.addends.len(), 0, 0)?;
        fits(weight, b.shape(), b.group())?;
        fits(sum.out, out.shape(), out.group())?;
        matrices[weight] = Bound::Input(b.memory(), 0);
        matrices[sum.out] = Bound::Output(out.memory(), 0);
    }
    let inner = group.inner();
    let program = Arc::new(inner.backend.prepare(&inner.members, schedule)?);
    let numbers: Vec<u32> = shared.iter().map(|matrix| matrix.id()).collect();
    super::run(
        group,
        None,
        &program,
        &matrices,
        &numbers,
        Added::default(),
        None,
    )
}
