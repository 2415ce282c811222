//! Calls of operations without element types. Raw views describe a caller's arguments. The arguments are checked, the
//! ranks agree on the call, and it runs. The typed operations use this module, and bindings for other languages can use
//! it too.
#![allow(unsafe_code)]

use std::mem;
use std::panic::Location;
use std::sync::Arc;

use super::overlap;
use crate::backend::Backend;
use crate::backend::sealed::{Bound, Callback, Run};
use crate::call::place_of;
use crate::element::{DType, Value};
pub(crate) use crate::error::require_shape;
use crate::error::{Error, Kind, Result};
use crate::explanation::Explanation;
use crate::group::{Group, Inner};
use crate::matrix::{MatrixView, MatrixViewMut, Memory, ShardedMatrix, ViewMemory};
use crate::profile::nvtx::range;
use crate::profile::span::Span;
use crate::protocol::epoch::Epoch;
use crate::ranks::call::PostedCall;
use crate::schedule::limits::limit;
use crate::schedule::plan::matrices::MATRICES;
use crate::schedule::{Config, Layout, Problem, RowOrder};

/// A matrix of this rank's own that an operation reads.
pub struct RawView<'a, B: Backend> {
    pub group: &'a Group<B>,
    pub dtype: DType,
    pub shape: [usize; 2],
    memory: RawMemory<'a, B>,
}

/// Where a matrix of this rank's own lies.
enum RawMemory<'a, B: Backend> {
    /// From a byte on.
    View(ViewMemory<'a, B>, usize),
    /// In memory that the caller keeps: the address, and the bytes from row to row.
    Place(u64, usize),
}

// Derived, they would need a backend that can be copied.
impl<B: Backend> Clone for RawMemory<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Backend> Copy for RawMemory<'_, B> {}

// A derived `Clone` would need a backend that can be cloned.
impl<B: Backend> Clone for RawView<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Backend> Copy for RawView<'_, B> {}

impl<'a, B: Backend, T: Value> From<MatrixView<'a, B, T>> for RawView<'a, B> {
    fn from(view: MatrixView<'a, B, T>) -> Self {
        let (memory, offset) = view.memory();
        RawView {
            group: view.group(),
            dtype: T::DTYPE,
            shape: view.shape(),
            memory: RawMemory::View(memory, offset),
        }
    }
}

impl<'a, B: Backend> RawView<'a, B> {
    /// A matrix in memory that the caller keeps. `argument`: its name in messages.
    ///
    /// # Safety
    /// Until the calls that get it are complete, the memory is that of such a matrix, and no one else writes it.
    // Inlined, so that the view is made where it is kept.
    #[inline(always)]
    pub unsafe fn at(
        group: &'a Group<B>,
        argument: &str,
        memory: Memory,
    ) -> Result<RawView<'a, B>> {
        memory.check::<B>(argument)?;
        Ok(RawView {
            group,
            dtype: memory.dtype,
            shape: memory.shape,
            memory: RawMemory::Place(memory.address, memory.effective_pitch::<B>()),
        })
    }

    /// Binds the view as an input.
    pub fn input(&self) -> Bound<'a, B> {
        match self.memory {
            RawMemory::View(memory, offset) => memory.input(offset),
            RawMemory::Place(address, pitch) => Bound::Place(address, pitch),
        }
    }
}

/// A matrix of this rank's own that an operation writes.
pub struct RawOutput<'a, B: Backend> {
    pub group: &'a Group<B>,
    pub dtype: DType,
    pub shape: [usize; 2],
    pub bound: Bound<'a, B>,
}

impl<'a, B: Backend, T: Value> From<&MatrixViewMut<'a, B, T>> for RawOutput<'a, B> {
    fn from(view: &MatrixViewMut<'a, B, T>) -> Self {
        RawOutput {
            group: view.group(),
            dtype: T::DTYPE,
            shape: view.shape(),
            bound: view.output(),
        }
    }
}

impl<'a, B: Backend> RawOutput<'a, B> {
    /// A matrix in memory that the caller keeps. `argument`: its name in messages.
    ///
    /// # Safety
    /// Until the calls that get it are complete, the memory is that of such a matrix, and no one else uses it.
    // Inlined, as `RawView::at`.
    #[inline(always)]
    pub unsafe fn at(
        group: &'a Group<B>,
        argument: &str,
        memory: Memory,
    ) -> Result<RawOutput<'a, B>> {
        memory.check::<B>(argument)?;
        Ok(RawOutput {
            group,
            dtype: memory.dtype,
            shape: memory.shape,
            bound: Bound::Place(memory.address, memory.effective_pitch::<B>()),
        })
    }

    /// Takes the memory, to bind it. None is left.
    pub fn take_bound(&mut self) -> Bound<'a, B> {
        mem::replace(&mut self.bound, Bound::Nothing)
    }
}

/// A matrix that all ranks share.
pub struct RawShards<'a, B: Backend> {
    pub group: &'a Group<B>,
    pub dtype: DType,
    /// The extents, and which rank owns which rows.
    pub layout: &'a Layout,
    /// The matrix's number in the group.
    pub id: u32,
    memory: &'a B::Symmetric,
}

// A derived `Clone` would need a backend that can be cloned.
impl<B: Backend> Clone for RawShards<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Backend> Copy for RawShards<'_, B> {}

impl<'a, B: Backend, T: Value> From<&'a ShardedMatrix<B, T>> for RawShards<'a, B> {
    fn from(matrix: &'a ShardedMatrix<B, T>) -> Self {
        RawShards {
            group: matrix.group(),
            dtype: T::DTYPE,
            layout: matrix.layout(),
            id: matrix.id(),
            memory: matrix.memory(),
        }
    }
}

impl<'a, B: Backend> RawShards<'a, B> {
    /// The shape [M, K].
    pub fn shape(&self) -> [usize; 2] {
        [self.layout.m(), self.layout.k()]
    }

    pub fn bound(&self) -> Bound<'a, B> {
        Bound::Symmetric(self.memory)
    }

    /// The address of this rank's copy of the whole matrix.
    pub fn address(&self) -> u64 {
        B::address(self.memory)
    }

    /// Binds this rank's own rows, which lie rank after rank, as an output.
    pub fn own_rows(&self) -> Bound<'a, B> {
        let width = self.layout.k() * self.dtype.bytes();
        let rows = self.layout.rows_of(self.group.rank());
        Bound::Rows(self.memory, rows.start * width, width)
    }

    /// Checks that the rows lie rank after rank. An operation that makes rows in place needs this.
    pub fn require_by_rank(&self, argument: &str) -> Result<()> {
        let stages = match self.layout.order() {
            RowOrder::ByRank => 1,
            RowOrder::ByStage => self.layout.stages(),
        };
        limit(&format!("the number of stages of {argument}"), stages, 1, 1)
    }

    /// Checks that the matrix is [M, `columns`], with the M and the split of `layout`.
    pub fn require_split(
        &self,
        [name, of_rows]: [&str; 2],
        layout: &Layout,
        columns: usize,
    ) -> Result<()> {
        require_shape(name, [layout.m(), columns], self.shape())?;
        if layout.is_split_as(self.layout) {
            return Ok(());
        }
        Err(Error::of_kind(Kind::Shape {
            argument: of_rows.into(),
            expected: layout.rows(),
            found: self.layout.rows(),
        }))
    }
}

/// Which addends a call has. Either all ranks give an addend or none does.
#[derive(Clone, Copy, Debug, Default)]
pub struct Added {
    pub bias: bool,
    pub residual: bool,
}

/// The arguments of a call, whose matrices are an array or a slice `M`.
pub struct Arguments<'c, M: ?Sized> {
    /// The call's name.
    pub call: &'static str,
    /// The matrices, by number in the schedule.
    pub matrices: &'c M,
    /// The numbers of the sharded matrices among them.
    pub shared: &'c [u32],
    pub added: Added,
}

/// Runs `before`, which is work of this rank alone, and then `program`, with the same matrices.
///
/// If the schedule says what the ranks must agree on, this is an operation of all ranks. Overlapping arguments are refused
/// here, so no operation forgets it.
#[track_caller]
pub fn run<B: Backend>(
    group: &Group<B>,
    before: Option<&Arc<B::Program>>,
    program: &Arc<B::Program>,
    arguments: Arguments<[Bound<B>; MATRICES]>,
    trace: Option<&mut Vec<Span>>,
) -> Result<()> {
    run_with(group, before, program, arguments, trace, None)
}

/// [`run`], with a function of the caller that `program` calls.
#[track_caller]
pub fn run_with<'c, B: Backend>(
    group: &Group<B>,
    before: Option<&Arc<B::Program>>,
    program: &Arc<B::Program>,
    arguments: Arguments<'c, [Bound<'_, B>; MATRICES]>,
    trace: Option<&'c mut Vec<Span>>,
    callback: Option<Callback<'c>>,
) -> Result<()> {
    let Arguments {
        call,
        matrices,
        shared,
        added,
    } = arguments;
    let schedule = B::schedule(program);
    if let Err(refusal) = overlap::check(schedule, matrices) {
        return match schedule.agreed() {
            Some(_) => Err(group.refusal(call)(refusal)),
            None => group.judged(call, Err(refusal)),
        };
    }
    let arguments = Arguments {
        call,
        matrices: &matrices[..],
        shared,
        added,
    };
    run_bound(group, before, program, arguments, trace, callback)
}

/// [`run_with`], without a check of the memory, of as many matrices as the schedule has.
#[track_caller]
pub fn run_bound<'c, B: Backend>(
    group: &Group<B>,
    before: Option<&Arc<B::Program>>,
    program: &Arc<B::Program>,
    arguments: Arguments<'c, [Bound<'_, B>]>,
    mut trace: Option<&'c mut Vec<Span>>,
    callback: Option<Callback<'c>>,
) -> Result<()> {
    let traced = trace.is_some();
    let Arguments {
        matrices,
        shared,
        added,
        ..
    } = arguments;
    let Inner {
        backend, members, ..
    } = group.inner();
    let run = |epoch| {
        if let Some(before) = before {
            let call = Run {
                epoch,
                matrices,
                trace: trace.as_deref_mut(),
                callback: None,
            };
            let failed = |error| match group.is_recording() {
                Ok(true) => error,
                // The operation has its number, so the other ranks wait for this one.
                _ => members.fail(error),
            };
            backend.run(members, before, call).map_err(failed)?;
        }
        let call = Run {
            epoch,
            matrices,
            trace,
            callback,
        };
        backend.run(members, program, call)
    };
    let Some(agreed) = B::schedule(program).agreed() else {
        if group.is_recording()? {
            group.keep_recorded(program)?;
        }
        let _range = range(|| format!("gemmesh {}", B::schedule(program).name()));
        return group.exclusively(run);
    };
    let posted = PostedCall {
        agreed,
        matrices: shared,
        traced,
        biased: added.bias,
        residual: added.residual,
        place: place_of(Location::caller()),
    };
    operate(group, before, program, posted, run)
}

/// Runs an operation of all ranks: `run` enqueues these programs. If the operation is captured, it runs whenever the
/// graph is launched.
fn operate<B: Backend>(
    group: &Group<B>,
    before: Option<&Arc<B::Program>>,
    program: &Arc<B::Program>,
    call: PostedCall<'_>,
    run: impl FnOnce(Epoch) -> Result<()>,
) -> Result<()> {
    let schedule = B::schedule(program);
    // A kernel that waits for pulled rows has its epoch among its arguments, so it can't be captured.
    let waits = schedule.product().is_some() && !schedule.is_pushed();
    let can_be_recorded = !waits || schedule.is_idle();
    if can_be_recorded && !call.traced && group.is_recording()? {
        // A captured operation has no number among the operations that run now, so any number will do.
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

/// How `group` cuts a problem up, and how long it expects that to take.
pub fn explain<B: Backend>(group: &Group<B>, problem: &Problem, config: Config) -> Explanation {
    let predicted = match problem.layout.m() {
        0 => Vec::new(),
        _ => group.inner().backend.predict(problem, &config),
    };
    Explanation::new(problem, group.host_map().count() > 1, config, predicted)
}

/// Checks that a type is the planned one.
pub fn require_dtype(argument: &str, expected: DType, found: DType) -> Result<()> {
    if expected == found {
        return Ok(());
    }
    // More words may follow the name, such as which output it is.
    let option = match argument {
        _ if argument.starts_with("out") => "output_dtype",
        _ if argument.starts_with('b') && expected.is_fp8() && found.is_fp8() => "weight_dtype",
        _ => "",
    };
    let remedy = match option {
        "" => format!("give it {expected}"),
        option => format!("prepare it with {option}(DType::{found:?})"),
    };
    Err(Error::of_kind(Kind::Unsuitable {
        what: format!("the dtype of {argument}"),
        expected: format!("{expected}, for which this call was prepared"),
        found: found.to_string(),
        remedy: Some(remedy),
    }))
}

/// Checks that an output has the type of the rows. Without element types, the compiler has not checked it.
pub fn require_alike(rows: DType, out: DType) -> Result<()> {
    require_property("out", "the dtype", rows == out, rows, out)
}

/// Checks that rows can be added, as [`Float`](crate::elements::Float) says.
pub fn require_float(argument: &str, rows: DType) -> Result<()> {
    require_property(
        argument,
        "the dtype",
        rows.is_float(),
        "bf16, f16 or f32",
        rows,
    )
}

/// Fails with `(property, expected, found)` unless `fits`.
pub fn require_property(
    argument: &str,
    what: &str,
    fits: bool,
    expected: impl ToString,
    found: impl ToString,
) -> Result<()> {
    if fits {
        return Ok(());
    }
    Err(Error::unsuitable(
        format!("{what} of {argument}"),
        expected.to_string(),
        found.to_string(),
    ))
}

/// `group`: the group whose rank makes the call.
pub fn require_same_group<B: Backend>(
    argument: &str,
    its: &Group<B>,
    group: &Group<B>,
) -> Result<()> {
    group.require_same(argument, its)
}
