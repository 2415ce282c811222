//! Any schedule, as it is: for tests of what schedules can say and no operation needs yet.

use std::sync::Arc;

use crate::backend::Backend;
use crate::backend::sealed::{Bound, Call};
use crate::element::Element;
use crate::error::{Error, Result};
use crate::group::Group;
use crate::matrix::Matrix;
use crate::ranks::shared_state::Operation;
use crate::schedule::Schedule;
use crate::sharded::ShardedMatrix;

/// The weight and the output of a product.
type Operands<'a, B, T> = (&'a Matrix<B, T>, &'a mut Matrix<B, T>);

/// Does what `schedule` says, with `shared` as its first matrices and `product` as the weight and the output of its product.
/// Collective.
///
/// # Errors
/// [`Error::Shape`] for matrices that are not those of the schedule; as any operation.
pub fn run_schedule<B: Backend, T: Element>(
    group: &Group<B>,
    schedule: Schedule,
    shared: &[&ShardedMatrix<B, T>],
    product: Option<Operands<B, T>>,
) -> Result<()> {
    let specs = schedule.matrices().to_vec();
    let fits = |number: usize, found: [usize; 2]| {
        let expected = specs.get(number).map(|spec| [spec.rows, spec.columns]);
        if expected == Some(found) {
            return Ok(());
        }
        Err(Error::Shape {
            rank: group.rank(),
            argument: format!("matrix {number} of the schedule"),
            expected: expected.unwrap_or_default().into(),
            found: found.into(),
        })
    };
    let mut matrices: Vec<Bound<B>> = specs.iter().map(|_| Bound::Nothing).collect();
    for (number, matrix) in shared.iter().enumerate() {
        fits(number, matrix.shape())?;
        matrices[number] = Bound::Symmetric(matrix.memory());
    }
    if let (Some(described), Some((b, out))) = (schedule.product(), product) {
        fits(described.b, b.shape())?;
        fits(described.out, out.shape())?;
        matrices[described.b] = Bound::Input(b.memory());
        matrices[described.out] = Bound::Output(out.memory_mut());
    }
    let inner = group.inner();
    let agreed = schedule.agreed().cloned();
    let program = Arc::new(inner.backend.prepare(&inner.members, schedule)?);
    let run = |epoch| {
        let call = Call {
            epoch,
            matrices: &matrices,
            trace: None,
        };
        inner.backend.run(&inner.members, &program, call)
    };
    let Some(agreed) = agreed else {
        return group.exclusively(run);
    };
    let numbers: Vec<u32> = shared.iter().map(|matrix| matrix.id()).collect();
    let operation = Operation {
        agreed: &agreed,
        matrices: &numbers,
        traced: false,
    };
    group.operate(operation, run)
}
