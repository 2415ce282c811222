//! `out[M, N] = gather(a)[M, K] · b[N, K]ᵀ`, the rows of `a` arriving while they are multiplied.

use std::sync::Arc;

use crate::backend::sealed::Operands;
use crate::backend::{Backend, Part};
use crate::element::Element;
use crate::error::{Error, Result};
use crate::group::Group;
use crate::matrix::Matrix;
use crate::protocol::{Config, Epoch, Plan, Problem};
use crate::ranks::commons::{Cuts, Operation, OperationName};
use crate::sharded::ShardedMatrix;
use crate::trace::Trace;
use crate::trace::span::Span;

/// `out = gather(a) · bᵀ`: gathers the rows of `a` from every rank while it multiplies them. Collective.
///
/// `a` is [M, K], spread over the ranks by rows; `b` is [N, K], this rank's own, as a linear layer stores its
/// weight; `out` is [M, N]. N may be another on each rank. Products are summed in f32 and rounded once. Afterwards `a` holds all rows.
/// The call may return before the operation is complete; [`Group::synchronize`](crate::Group::synchronize)
/// waits for it. The host backend's returns when it is.
///
/// # Errors
/// [`Error::Shape`] or [`Error::ForeignArgument`] for arguments that don't fit together, before anything is
/// done: the call may be made again with others, and if it is not, the ranks that wait for this one in it get the error as
/// the group's failure. [`Error::CallMismatch`] if another rank makes another call; the group's failure.
pub fn all_gather_matmul<B: Backend, T: Element>(
    a: &ShardedMatrix<B, T>,
    b: &Matrix<B, T>,
    out: &mut Matrix<B, T>,
) -> Result<()> {
    AllGatherMatmul::new().run(a, b, out)
}

/// [`all_gather_matmul`] with what varies.
#[derive(Debug)]
pub struct AllGatherMatmul<'a, B: Backend, T: Element> {
    bias: Option<&'a Matrix<B, T>>,
    config: Option<Config>,
}

impl<'a, B: Backend, T: Element> AllGatherMatmul<'a, B, T> {
    /// No bias, and the backend's configuration for the problem.
    pub fn new() -> Self {
        AllGatherMatmul {
            bias: None,
            config: None,
        }
    }

    /// Adds `bias`, [1, N], to every row, in f32 before the one rounding.
    #[must_use]
    pub fn bias(mut self, bias: &'a Matrix<B, T>) -> Self {
        self.bias = Some(bias);
        self
    }

    /// Cuts the problem up as `config` says.
    #[must_use]
    pub fn config(mut self, config: Config) -> Self {
        self.config = Some(config);
        self
    }

    /// Does it, as [`all_gather_matmul`]. The plan is made at the first call for a shape and kept.
    ///
    /// # Errors
    /// As [`all_gather_matmul`], and [`Error::Limit`] for a configuration that can't be.
    pub fn run(
        &self,
        a: &ShardedMatrix<B, T>,
        b: &Matrix<B, T>,
        out: &mut Matrix<B, T>,
    ) -> Result<()> {
        let prepared = self.plan(a, b.shape()[0]);
        let prepared = prepared.map_err(|error| a.group().refuse(PRODUCT, error))?;
        prepared.run(a, b, out)
    }

    /// Prepares the product of matrices like `a` with a weight of `n` rows, to be run many times with no
    /// allocation and no rendezvous. Not collective. (On the host, the crate that multiplies two tiles allocates a few
    /// words each time, and frees them.)
    ///
    /// # Errors
    /// [`Error::Limit`] for an `n` or a configuration that can't be; [`Error::Shape`] or [`Error::ForeignArgument`] for a
    /// bias that does not fit; the group's failure.
    pub fn prepare(&self, a: &ShardedMatrix<B, T>, n: usize) -> Result<Prepared<'a, B, T>> {
        let refused = Error::refused(a.group().rank(), PRODUCT);
        self.plan(a, n).map_err(refused)
    }

    fn plan(&self, a: &ShardedMatrix<B, T>, n: usize) -> Result<Prepared<'a, B, T>> {
        let group = a.group();
        let problem = a.layout().with_n(n)?;
        if let Some(bias) = self.bias {
            require_same_group("bias", bias.group(), group)?;
            require_shape(group.rank(), "bias [1, N]", [1, n], bias.shape())?;
        }
        Ok(Prepared {
            program: group.program(problem, self.config)?,
            group: group.clone(),
            bias: self.bias,
        })
    }
}

impl<B: Backend, T: Element> Default for AllGatherMatmul<'_, B, T> {
    fn default() -> Self {
        AllGatherMatmul::new()
    }
}

/// The name of the call.
const PRODUCT: &str = "all_gather_matmul";

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

/// A product that has been planned. It fits every `a` of the same group, shape and split. It keeps the group.
#[derive(Debug)]
pub struct Prepared<'a, B: Backend, T: Element> {
    // Freed before the group that it belongs to can end.
    program: Arc<B::Program>,
    group: Group<B>,
    bias: Option<&'a Matrix<B, T>>,
}

// Derived, it would need a backend that can be cloned.
impl<B: Backend, T: Element> Clone for Prepared<'_, B, T> {
    fn clone(&self) -> Self {
        Prepared {
            program: self.program.clone(),
            group: self.group.clone(),
            bias: self.bias,
        }
    }
}

/// `b` and `out`.
type Product<'a, B, T> = (&'a Matrix<B, T>, &'a mut Matrix<B, T>);

impl<B: Backend, T: Element> Prepared<'_, B, T> {
    /// The plan: what is pulled and multiplied, and in which order.
    pub fn plan(&self) -> &Plan {
        B::plan(&self.program)
    }

    /// As [`all_gather_matmul`].
    ///
    /// # Errors
    /// As [`all_gather_matmul`].
    pub fn run(
        &self,
        a: &ShardedMatrix<B, T>,
        b: &Matrix<B, T>,
        out: &mut Matrix<B, T>,
    ) -> Result<()> {
        self.collective(Part::Fused, a, Some((b, out)), None)
    }

    /// As [`Prepared::run`], and returns what happened when on this rank. All ranks trace an operation, or none does: those
    /// that do begin it together.
    ///
    /// # Errors
    /// As [`all_gather_matmul`].
    pub fn run_traced(
        &self,
        a: &ShardedMatrix<B, T>,
        b: &Matrix<B, T>,
        out: &mut Matrix<B, T>,
    ) -> Result<Trace> {
        let mut spans = Vec::new();
        self.collective(Part::Fused, a, Some((b, out)), Some(&mut spans))?;
        Ok(Trace::new(a.group().rank(), spans))
    }

    /// Only gathers the rows of `a`. Collective.
    ///
    /// # Errors
    /// As [`all_gather_matmul`].
    pub fn gather(&self, a: &ShardedMatrix<B, T>) -> Result<()> {
        self.collective(Part::Gather, a, None, None)
    }

    /// Only multiplies, with the rows of `a` as they are on this rank: gathered before. Not collective.
    ///
    /// # Errors
    /// [`Error::Shape`] or [`Error::ForeignArgument`]; the group's failure.
    pub fn matmul(
        &self,
        a: &ShardedMatrix<B, T>,
        b: &Matrix<B, T>,
        out: &mut Matrix<B, T>,
    ) -> Result<()> {
        self.check(a, Some([b, out]))
            .map_err(Error::refused(a.group().rank(), "matmul"))?;
        let group = &self.group;
        if group.is_recording()? {
            group.keep_recorded(&self.program);
        }
        group.exclusively(|epoch| self.launch(Part::Matmul, epoch, a, Some((b, out)), None))
    }

    /// Gathers and multiplies at once with no order between them, which is what perfect overlap would take.
    /// The output is not to be used. Collective; for benchmarks.
    ///
    /// # Errors
    /// As [`all_gather_matmul`].
    #[doc(hidden)]
    pub fn run_unordered(
        &self,
        a: &ShardedMatrix<B, T>,
        b: &Matrix<B, T>,
        out: &mut Matrix<B, T>,
    ) -> Result<()> {
        self.collective(Part::Unordered, a, Some((b, out)), None)
    }

    /// Copies all rows from the other ranks, who must not be writing them. Not collective; for benchmarks.
    ///
    /// # Errors
    /// [`Error::Shape`] or [`Error::ForeignArgument`]; the group's failure.
    #[cfg(feature = "cuda")]
    #[doc(hidden)]
    pub fn copy(&self, a: &ShardedMatrix<B, T>) -> Result<()> {
        self.check(a, None)?;
        self.group
            .exclusively(|epoch| self.launch(Part::Copies, epoch, a, None, None))
    }

    fn collective(
        &self,
        part: Part,
        a: &ShardedMatrix<B, T>,
        product: Option<Product<B, T>>,
        trace: Option<&mut Vec<Span>>,
    ) -> Result<()> {
        let call = match part {
            Part::Gather => "gather",
            _ => PRODUCT,
        };
        self.check(a, product.as_ref().map(|(b, out)| [*b, &**out]))
            .map_err(|error| a.group().refuse(call, error))?;
        let (problem, config) = (self.plan().problem(), self.plan().config());
        let pushes = part.may_push(self.plan());
        let group = &self.group;
        if pushes && trace.is_none() && group.is_recording()? {
            // It runs when the graph does, and has no number among those that run now: any will do.
            group.keep_recorded(&self.program);
            return group.exclusively(|_| self.launch(part, Epoch::FIRST, a, product, None));
        }
        let operation = Operation {
            name: match part {
                Part::Gather => OperationName::AllGather,
                _ if trace.is_some() => OperationName::TracedAllGatherMatmul,
                _ => OperationName::AllGatherMatmul,
            },
            dtype: T::DTYPE,
            m: problem.m(),
            k: problem.k(),
            matrix: a.id(),
            // The plan's limits have been checked.
            pushed: pushes.then(|| Cuts {
                rows: config.entry_rows() as u32,
                chunks: [config.chunks as u8, config.last_chunks as u8],
                cut_last: config.cut(problem.k()).is_some(),
            }),
        };
        group.operate(operation, |epoch| {
            self.launch(part, epoch, a, product, trace)
        })
    }

    fn launch(
        &self,
        part: Part,
        epoch: Epoch,
        a: &ShardedMatrix<B, T>,
        product: Option<Product<B, T>>,
        trace: Option<&mut Vec<Span>>,
    ) -> Result<()> {
        let inner = self.group.inner();
        let (b, out) = product.unzip();
        let operands = Operands {
            dtype: T::DTYPE,
            a: a.memory(),
            b: b.map(Matrix::memory),
            bias: self.bias.map(Matrix::memory),
            out: out.map(Matrix::memory_mut),
        };
        let (backend, members) = (&inner.backend, &inner.members);
        backend.run(members, &self.program, part, epoch, operands, trace)
    }

    /// Checks the arguments against the plan, before anything is done. The bias was checked when the plan was made.
    fn check(&self, a: &ShardedMatrix<B, T>, product: Option<[&Matrix<B, T>; 2]>) -> Result<()> {
        let problem = self.plan().problem();
        let group = a.group();
        let (m, n, k) = (problem.m(), problem.n(), problem.k());
        let shape = |argument: &str, expected, found| {
            require_shape(group.rank(), argument, expected, found)
        };
        require_same_group("the prepared product", &self.group, group)?;
        shape("a [M, K]", [m, k], a.shape())?;
        let split = |p: &Problem| -> Vec<usize> {
            (0..p.world()).map(|rank| p.rows_of(rank).len()).collect()
        };
        let same_split = (0..problem.world()).all(|r| problem.rows_of(r) == a.rows_of(r));
        if !same_split {
            return Err(Error::Shape {
                rank: group.rank(),
                argument: "a (rows of each rank)".into(),
                expected: split(problem),
                found: split(a.layout()),
            });
        }
        if let Some([b, out]) = product {
            require_same_group("b", b.group(), group)?;
            require_same_group("out", out.group(), group)?;
            shape("b [N, K]", [n, k], b.shape())?;
            shape("out [M, N]", [m, n], out.shape())?;
        }
        Ok(())
    }
}
