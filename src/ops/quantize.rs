//! Quantises rows on one rank, for the products and gathers of fp8 that follow.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use super::call::{
    self, Added, Arguments, RawOutput, RawView, require_alike, require_dtype, require_float,
    require_same_group, require_shape,
};
use super::quantized::Quantized;
use crate::backend::Backend;
use crate::backend::sealed::Bound;
use crate::element::{DType, F8E4M3, Float};
#[cfg(doc)]
use crate::error::Kind;
use crate::error::Result;
use crate::group::Group;
use crate::matrix::{MatrixView, MatrixViewMut};
use crate::schedule::plan::collectives::chunked;
use crate::schedule::plan::matrices::{A, MATRICES, OUT, OUT_SCALES};
use crate::schedule::{Config, DTypes, Form, Layout, Operation, Problem, Quantization, Schedule};

const OPERATION: Operation = Operation::QUANTIZE;

/// Quantises the rows of `x` on this rank alone: `out` gets fp8 numbers, and `scales` get their scales.
///
/// `x` and `out` are [M, N], of bf16, f16 or f32. `scales` is [M, ⌈N/128⌉]: 128 columns of a row share a scale.
/// [`Quantized`] has other scales: those that lie in columns, powers of two, and one that the caller gives.
/// [`Quantization`] says what the numbers are.
///
/// The outputs may be this rank's own rows of sharded matrices ([`ShardMut::view_mut`](crate::views::ShardMut::view_mut)),
/// which a gather then takes:
///
/// ```
/// use gemmesh::fp8::{Scales, ShardedScales, quantize};
/// use gemmesh::{AllGatherMatmul, F8E4M3, Group, Host, Result, bf16};
///
/// fn rank(group: Group<Host>) -> Result<()> {
///     let (m, n, k) = (4, 16, 256);
///     let mut x = group.sharded::<F8E4M3>(m, k)?;
///     let mut of_x = group.sharded::<f32>(m, k / 128)?;
///     let rows = x.rows().len();
///     let own = group.upload(&vec![bf16::from_f32(7.0); rows * k], rows, k)?;
///     quantize(&own, x.shard_mut().view_mut()?, of_x.shard_mut().view_mut()?)?;
///     assert_eq!(of_x.shard()?.to_vec()?[0], 7.0 / 448.0);
///
///     let w = group.upload(&vec![F8E4M3::from_f32(1.0); n * k], n, k)?;
///     let of_w = group.upload(&[1.0f32; 2], 1, 2)?;
///     let mut y = group.zeros::<bf16>(m, n)?;
///     let x = x.scaled(ShardedScales::blocks(&of_x));
///     AllGatherMatmul::new().run(x, w.scaled(Scales::blocks(&of_w)), &mut y)?;
///     assert_eq!(y.to_vec()?[0].to_f32(), 7.0 * 256.0);
///     Ok(())
/// }
///
/// Group::threads(2, rank)?;
/// # Ok::<_, gemmesh::Error>(())
/// ```
///
/// Like [`matmul`](crate::matmul), it runs after the earlier operations of this rank, and may return before it is
/// complete.
///
/// # Errors
/// [`Kind::Shape`] or [`Kind::Unsuitable`] if the arguments don't fit together; [`Kind::Unsupported`] if a
/// scale that is given would be rounded to a power of two; the group's failure.
#[track_caller]
pub fn quantize<'x, 'o, B: Backend, T: Float>(
    x: impl Into<MatrixView<'x, B, T>>,
    out: impl Into<MatrixViewMut<'o, B, F8E4M3>>,
    scales: impl Into<Quantized<'o, B>>,
) -> Result<()> {
    Quantize::new().run(x, out, scales)
}

/// Builder for [`quantize`]: prepared calls.
///
/// ```
/// use gemmesh::fp8::{Quantization, Quantize, Quantized};
/// use gemmesh::{F8E4M3, Group, Host, Result, bf16};
///
/// fn rank(group: Group<Host>) -> Result<()> {
///     let x = group.upload(&[bf16::from_f32(3.0); 2 * 16], 2, 16)?;
///     let mut out = group.zeros::<F8E4M3>(2, 16)?;
///     let mut scales = group.zeros::<f32>(1, 2)?;
///     let operation = Quantize::new().quantization(Quantization::transposed_blocks());
///     let prepared = operation.prepare(&group, [2, 16])?;
///     prepared.run(&x, &mut out, Quantized::transposed_blocks(&mut scales))?;
///     assert_eq!(out.to_vec()?[0].to_f32(), 448.0);
///     Ok(())
/// }
///
/// Group::threads(1, rank)?;
/// # Ok::<_, gemmesh::Error>(())
/// ```
#[must_use = "nothing is done before it is run"]
pub struct Quantize<B: Backend, T: Float> {
    quantization: Quantization,
    rows: PhantomData<(fn() -> B, T)>,
}

impl<B: Backend, T: Float> fmt::Debug for Quantize<B, T> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "Quantize<{}, {}>", B::NAME, T::DTYPE)?;
        write!(f, "({:?})", self.quantization)
    }
}

impl<B: Backend, T: Float> Quantize<B, T> {
    /// Default options: [`Quantization::blocks`].
    pub fn new() -> Self {
        Quantize {
            quantization: Quantization::blocks(),
            rows: PhantomData,
        }
    }

    /// Makes [`Quantize::prepare`] plan for such scales. [`Quantize::run`] needs no such hint.
    pub fn quantization(mut self, quantization: Quantization) -> Self {
        self.quantization = quantization;
        self
    }

    /// Runs the operation, as [`quantize`].
    ///
    /// The first call for a shape makes the schedule. Later calls use it again.
    ///
    /// # Errors
    /// As [`quantize`].
    #[track_caller]
    pub fn run<'x, 'o>(
        &self,
        x: impl Into<MatrixView<'x, B, T>>,
        out: impl Into<MatrixViewMut<'o, B, F8E4M3>>,
        scales: impl Into<Quantized<'o, B>>,
    ) -> Result<()> {
        run(x.into().into(), RawOutput::from(&out.into()), scales.into())
    }

    /// Plans the quantising of matrices [m, n], so that it can run many times. Later runs need no planning.
    ///
    /// # Errors
    /// [`Kind::Limit`] if a shape is out of range; [`Kind::Unsupported`] as [`quantize`]; the group's failure.
    #[track_caller]
    pub fn prepare(&self, group: &Group<B>, shape: [usize; 2]) -> Result<PreparedQuantize<B, T>> {
        let planned = PlannedQuantize::plan(group, T::DTYPE, shape, self.quantization);
        let planned = group.judged(OPERATION.name(), planned)?;
        Ok(PreparedQuantize {
            planned,
            rows: PhantomData,
        })
    }

    /// Whether this group can quantise matrices [m, n] of `T`: `Ok`, or the error that the call would give.
    ///
    /// As [`Matmul::supported`](crate::Matmul::supported), it needs no matrix and does not block.
    ///
    /// ```
    /// use gemmesh::fp8::{Quantization, Quantize};
    /// use gemmesh::{Group, Host, Result, bf16};
    ///
    /// fn rank(group: Group<Host>) -> Result<()> {
    ///     let rule = Quantization::blocks().power_of_two();
    ///     Quantize::<_, bf16>::new().quantization(rule).supported(&group, [2, 256])
    /// }
    ///
    /// Group::threads(1, rank)?;
    /// # Ok::<_, gemmesh::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Quantize::prepare`].
    #[track_caller]
    pub fn supported(&self, group: &Group<B>, shape: [usize; 2]) -> Result<()> {
        let answer = || {
            let problem = problem(T::DTYPE, shape, self.quantization)?;
            group.checked_schedule(&problem, Some(uncut())).map(drop)
        };
        group.answered(OPERATION.name(), answer())
    }
}

impl<B: Backend, T: Float> Default for Quantize<B, T> {
    fn default() -> Self {
        Quantize::new()
    }
}

/// The problem of quantising a matrix [m, n] of `dtype`.
fn problem(dtype: DType, [m, n]: [usize; 2], quantization: Quantization) -> Result<Problem> {
    Ok(Problem {
        dtypes: DTypes {
            output: DType::F8E4M3,
            ..DTypes::all(dtype)
        },
        form: Form {
            quantization: Some(quantization),
            ..Form::default()
        },
        ..Problem::new(OPERATION, dtype, Layout::new(&[m], n)?, n)
    })
}

/// The configuration of an operation of which nothing is cut up.
fn uncut() -> Config {
    chunked(1)
}

/// Quantising of one rank, planned by [`Quantize::prepare`]. It keeps the group alive.
pub struct PreparedQuantize<B: Backend, T: Float> {
    planned: PlannedQuantize<B>,
    rows: PhantomData<T>,
}

impl<B: Backend, T: Float> fmt::Debug for PreparedQuantize<B, T> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let (name, dtype, shape) = (B::NAME, T::DTYPE, self.planned.shape);
        write!(f, "PreparedQuantize<{name}, {dtype}>{shape:?}")
    }
}

impl<B: Backend, T: Float> PreparedQuantize<B, T> {
    /// The schedule: what is quantised, and how.
    #[cfg(feature = "unstable-tools")]
    pub fn schedule(&self) -> &Schedule {
        B::schedule(&self.planned.program)
    }

    /// As [`Quantize::run`].
    ///
    /// # Errors
    /// As [`quantize`]; [`Kind::Unsuitable`] if the scales are others than planned ([`Quantize::quantization`]).
    #[track_caller]
    pub fn run<'x, 'o>(
        &self,
        x: impl Into<MatrixView<'x, B, T>>,
        out: impl Into<MatrixViewMut<'o, B, F8E4M3>>,
        scales: impl Into<Quantized<'o, B>>,
    ) -> Result<()> {
        let out = RawOutput::from(&out.into());
        self.planned.run(x.into().into(), out, scales.into())
    }
}

/// [`Quantize::run`], without element types.
#[track_caller]
pub fn run<B: Backend>(x: RawView<B>, out: RawOutput<B>, scales: Quantized<B>) -> Result<()> {
    let planned = PlannedQuantize::plan(x.group, x.dtype, x.shape, scales.quantization);
    let planned = x.group.judged(OPERATION.name(), planned)?;
    planned.run(x, out, scales)
}

/// Quantising that has been planned, without element types.
struct PlannedQuantize<B: Backend> {
    // Freed before the group that it belongs to can end.
    program: Arc<B::Program>,
    group: Group<B>,
    dtype: DType,
    shape: [usize; 2],
    quantization: Quantization,
}

impl<B: Backend> PlannedQuantize<B> {
    fn plan(
        group: &Group<B>,
        dtype: DType,
        shape: [usize; 2],
        quantization: Quantization,
    ) -> Result<Self> {
        require_float("x", dtype)?;
        let problem = problem(dtype, shape, quantization)?;
        Ok(PlannedQuantize {
            program: group.program(problem, Some(uncut()))?,
            group: group.clone(),
            dtype,
            shape,
            quantization,
        })
    }

    #[track_caller]
    fn run(&self, x: RawView<B>, out: RawOutput<B>, scales: Quantized<B>) -> Result<()> {
        let (group, shape) = (&self.group, self.shape);
        let check = || {
            require_same_group("x", x.group, group)?;
            require_shape("x [M, N] of a prepared call", shape, x.shape)?;
            require_dtype("x", self.dtype, x.dtype)?;
            require_same_group("out", out.group, group)?;
            require_shape("out [M, N]", shape, out.shape)?;
            require_alike(DType::F8E4M3, out.dtype)?;
            scales.check(group, Some(self.quantization), shape)
        };
        group.judged(OPERATION.name(), check())?;
        let mut matrices = [const { Bound::Nothing }; MATRICES];
        matrices[A] = x.input();
        matrices[OUT] = out.bound;
        matrices[OUT_SCALES] = scales.bound();
        let arguments = Arguments {
            call: OPERATION.name(),
            matrices: &matrices,
            shared: &[],
            added: Added::default(),
        };
        call::run(group, None, &self.program, arguments, None)
    }
}
