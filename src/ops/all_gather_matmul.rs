//! `out[M, N] = gather(a)[M, K] · b[N, K]ᵀ`, the rows of `a` arriving while they are multiplied.

use std::sync::Arc;

use super::{Operands, describe, layout_of, product_of, require_same_group, require_shape};
use crate::backend::Backend;
use crate::backend::sealed::Bound;
use crate::element::Element;
use crate::error::{Error, Result};
use crate::explanation::Explanation;
use crate::group::Group;
use crate::matrix::Matrix;
use crate::schedule::all_gather;
use crate::schedule::layout::{MAX_EXTENT, limit};
use crate::schedule::{Config, Description, Layout, MatrixSpec, Planner, Schedule};
use crate::sharded::ShardedMatrix;
use crate::span::Span;
use crate::trace::Trace;

/// `out = gather(a) · bᵀ`: gathers the rows of `a` from every rank while it multiplies them. Collective.
///
/// `a` is [M, K], spread over the ranks by rows; `b` is [N, K], this rank's own, as a linear layer stores its
/// weight; `out` is [M, N]. N may be another on each rank. Products are summed in f32 and rounded once. Afterwards `a` holds
/// all rows. The call may return before the operation is complete;
/// [`Group::synchronize`](crate::Group::synchronize) waits for it. The host backend's returns when it is.
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
    stages: Option<usize>,
}

impl<'a, B: Backend, T: Element> AllGatherMatmul<'a, B, T> {
    /// No bias, and the backend's configuration for the problem.
    pub fn new() -> Self {
        AllGatherMatmul {
            bias: None,
            config: None,
            stages: None,
        }
    }

    /// Adds `bias`, [1, N], to every row, in f32 before the one rounding.
    #[must_use]
    pub fn bias(mut self, bias: &'a Matrix<B, T>) -> Self {
        self.bias = Some(bias);
        self
    }

    /// Gathers in as many stages, from 1 to 64: of each rank's rows the first of so many blocks, then the second of each. The output has its
    /// rows in order. A matrix that was made by [`Group::sharded_staged`] has its own.
    #[must_use]
    pub fn stages(mut self, stages: usize) -> Self {
        self.stages = Some(stages);
        self
    }

    /// Cuts the problem up as `config` says.
    #[must_use]
    pub fn config(mut self, config: Config) -> Self {
        self.config = Some(config);
        self
    }

    /// Does it, as [`all_gather_matmul`]. The schedule is made at the first call for a shape and kept.
    ///
    /// # Errors
    /// As [`all_gather_matmul`], and [`Error::Limit`] for a configuration that can't be.
    pub fn run(
        &self,
        a: &ShardedMatrix<B, T>,
        b: &Matrix<B, T>,
        out: &mut Matrix<B, T>,
    ) -> Result<()> {
        let refuse = |error| a.group().refuse(PRODUCT, error);
        let planned = || {
            let layout = layout_of(a, self.stages)?;
            let program = self.program(a, &layout, b.shape()[0])?;
            Ok((layout, program))
        };
        let (layout, program) = planned().map_err(refuse)?;
        let call = Call {
            program: &program,
            group: a.group(),
            layout: &layout,
            bias: self.bias,
        };
        call.collective(a, Some((b, out)), None)
    }

    /// Prepares the product of matrices like `a` with a weight of `n` rows, to be run many times with no
    /// allocation and no rendezvous. Not collective. (On the host, the crate that multiplies two tiles allocates a few
    /// words each time, and frees them.)
    ///
    /// # Errors
    /// [`Error::Limit`] for an `n` or a configuration that can't be; [`Error::Shape`] or [`Error::ForeignArgument`] for a
    /// bias that does not fit; the group's failure.
    pub fn prepare(&self, a: &ShardedMatrix<B, T>, n: usize) -> Result<Prepared<'a, B, T>> {
        let group = a.group();
        let prepare = || -> Result<Prepared<'a, B, T>> {
            let layout = layout_of(a, self.stages)?;
            let program = self.program(a, &layout, n)?;
            let config = Some(product_of(B::schedule(&program)).config);
            let kept = |name, planner: Planner, n| {
                group.program(planner, describe::<T>(name, &layout, n), config)
            };
            Ok(Prepared {
                gather: kept(GATHER, all_gather::gather, 0)?,
                multiply: kept(MULTIPLY, all_gather::multiply, n)?,
                program,
                group: group.clone(),
                layout: layout.clone(),
                bias: self.bias,
            })
        };
        prepare().map_err(Error::refused(group.rank(), PRODUCT))
    }

    fn program(
        &self,
        a: &ShardedMatrix<B, T>,
        layout: &Layout,
        n: usize,
    ) -> Result<Arc<B::Program>> {
        let group = a.group();
        if let Some(bias) = self.bias {
            // Before the shape: what fits no product is refused as that.
            limit("N", n, 1, MAX_EXTENT)?;
            require_same_group("bias", bias.group(), group)?;
            require_shape(group.rank(), "bias [1, N]", [1, n], bias.shape())?;
        }
        let asked = describe::<T>(PRODUCT, layout, n);
        group.program(all_gather::gather_and_multiply, asked, self.config)
    }
}

impl<B: Backend, T: Element> Default for AllGatherMatmul<'_, B, T> {
    fn default() -> Self {
        AllGatherMatmul::new()
    }
}

/// The names of calls.
const PRODUCT: &str = "all_gather_matmul";
const GATHER: &str = "gather";
const MULTIPLY: &str = "matmul";
const COPY: &str = "copy";

/// A product that has been planned. It fits every `a` of the same group, shape and split. It keeps the group.
#[derive(Debug)]
pub struct Prepared<'a, B: Backend, T: Element> {
    // Freed before the group that they belong to can end.
    program: Arc<B::Program>,
    gather: Arc<B::Program>,
    multiply: Arc<B::Program>,
    group: Group<B>,
    /// Who owns which rows of `a`.
    layout: Layout,
    bias: Option<&'a Matrix<B, T>>,
}

// Derived, it would need a backend that can be cloned.
impl<B: Backend, T: Element> Clone for Prepared<'_, B, T> {
    fn clone(&self) -> Self {
        Prepared {
            program: self.program.clone(),
            gather: self.gather.clone(),
            multiply: self.multiply.clone(),
            group: self.group.clone(),
            layout: self.layout.clone(),
            bias: self.bias,
        }
    }
}

impl<B: Backend, T: Element> Prepared<'_, B, T> {
    /// What is moved and multiplied, and in which order.
    pub fn schedule(&self) -> &Schedule {
        B::schedule(&self.program)
    }

    /// How the product is cut up.
    pub fn config(&self) -> Config {
        product_of(self.schedule()).config
    }

    /// How the product is cut up, and what that is expected to take.
    pub fn explain(&self) -> Explanation {
        let asked = Description {
            beside: None,
            operation: PRODUCT,
            dtype: T::DTYPE,
            layout: self.layout.clone(),
            n: product_of(self.schedule()).n,
        };
        super::explain(&self.group, &asked, self.config())
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
        self.call(&self.program).collective(a, Some((b, out)), None)
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
        let call = self.call(&self.program);
        let rank = a.group().rank();
        Trace::of(rank, |spans| {
            call.collective(a, Some((b, out)), Some(spans))
        })
    }

    /// Only gathers the rows of `a`. Collective.
    ///
    /// # Errors
    /// As [`all_gather_matmul`].
    pub fn gather(&self, a: &ShardedMatrix<B, T>) -> Result<()> {
        self.call(&self.gather).collective(a, None, None)
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
        self.call(&self.multiply).alone(MULTIPLY, a, Some((b, out)))
    }

    /// Copies all rows from the other ranks, who must not be writing them. Not collective; for benchmarks.
    ///
    /// # Errors
    /// [`Error::Shape`] or [`Error::ForeignArgument`]; the group's failure.
    #[doc(hidden)]
    pub fn copy(&self, a: &ShardedMatrix<B, T>) -> Result<()> {
        let asked = describe::<T>(COPY, &self.layout, 0);
        let program = self
            .group
            .program(all_gather::copy, asked, Some(self.config()))?;
        self.call(&program).alone(COPY, a, None)
    }

    fn call<'c>(&'c self, program: &'c Arc<B::Program>) -> Call<'c, B, T> {
        Call {
            program,
            group: &self.group,
            layout: &self.layout,
            bias: self.bias,
        }
    }
}

/// A program that is about to be run.
struct Call<'c, B: Backend, T: Element> {
    program: &'c Arc<B::Program>,
    /// That it belongs to.
    group: &'c Group<B>,
    /// Who owns which rows of `a`.
    layout: &'c Layout,
    bias: Option<&'c Matrix<B, T>>,
}

impl<B: Backend, T: Element> Call<'_, B, T> {
    fn schedule(&self) -> &Schedule {
        B::schedule(self.program)
    }

    /// An operation of all ranks.
    fn collective(
        &self,
        a: &ShardedMatrix<B, T>,
        product: Option<Operands<B, T>>,
        trace: Option<&mut Vec<Span>>,
    ) -> Result<()> {
        let schedule = self.schedule();
        let Some(agreed) = schedule.agreed() else {
            return self.alone(PRODUCT, a, product);
        };
        self.check(a, product.as_ref().map(|(b, out)| [*b, &**out]))
            .map_err(|error| self.group.refuse(agreed.name(), error))?;
        self.launch(a, product, trace)
    }

    /// What this rank does by itself, in the call `name`.
    fn alone(
        &self,
        name: &str,
        a: &ShardedMatrix<B, T>,
        product: Option<Operands<B, T>>,
    ) -> Result<()> {
        self.check(a, product.as_ref().map(|(b, out)| [*b, &**out]))
            .map_err(Error::refused(a.group().rank(), name))?;
        self.launch(a, product, None)
    }

    fn launch(
        &self,
        a: &ShardedMatrix<B, T>,
        product: Option<Operands<B, T>>,
        trace: Option<&mut Vec<Span>>,
    ) -> Result<()> {
        let mut matrices = [const { Bound::Nothing }; all_gather::MATRICES];
        matrices[all_gather::A] = Bound::Symmetric(a.memory());
        if let Some((b, out)) = product {
            matrices[all_gather::B] = Bound::Input(b.memory());
            matrices[all_gather::OUT] = Bound::Output(out.memory_mut());
        }
        if let Some(bias) = self.bias {
            matrices[all_gather::BIAS] = Bound::Input(bias.memory());
        }
        let shared = [a.id()];
        super::run(
            self.group,
            None,
            self.program,
            &matrices,
            &shared,
            false,
            trace,
        )
    }

    /// Checks the arguments against the schedule, before anything is done. The bias was checked when it was made.
    fn check(&self, a: &ShardedMatrix<B, T>, product: Option<[&Matrix<B, T>; 2]>) -> Result<()> {
        let group = a.group();
        let shape = |argument: &str, number: usize, found| {
            let MatrixSpec { rows, columns, .. } = self.schedule().matrices()[number];
            require_shape(group.rank(), argument, [rows, columns], found)
        };
        require_same_group("the prepared product", self.group, group)?;
        shape("a [M, K]", all_gather::A, a.shape())?;
        if !self.layout.is_split_as(a.layout()) {
            return Err(Error::Shape {
                rank: group.rank(),
                argument: "a (rows of each rank)".into(),
                expected: self.layout.rows(),
                found: a.layout().rows(),
            });
        }
        if let Some([b, out]) = product {
            require_same_group("b", b.group(), group)?;
            require_same_group("out", out.group(), group)?;
            shape("b [N, K]", all_gather::B, b.shape())?;
            shape("out [M, N]", all_gather::OUT, out.shape())?;
        }
        Ok(())
    }
}
