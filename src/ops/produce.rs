//! Rows that a function of the caller makes block by block. Each block is sent to its owner while the next is made.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use super::call::{self, Added, Arguments, RawOutput, RawShards, require_float, require_shape};
use super::callback::{CallbackResult, Callbacks};
#[cfg(feature = "cuda")]
use crate::backend::Cuda;
use crate::backend::sealed::{Bound, Callback};
use crate::backend::{Backend, Host};
use crate::element::{DType, Float, Value};
use crate::error::{Error, Kind, Result};
use crate::group::Group;
use crate::matrix::Matrix;
use crate::matrix::ShardedMatrix;
use crate::one_line::{option, write_parts};
use crate::profile::span::Span;
use crate::schedule::config::MAX_CHUNKS;
use crate::schedule::limits::limit;
use crate::schedule::plan::collectives::chunked;
use crate::schedule::plan::matrices::{MATRICES, OUT, PARTIALS};
use crate::schedule::{Counts, Layout, Operation, Problem, Request};
use crate::trace::Trace;

const REDUCE: Operation = Operation::PRODUCE_AND_REDUCE_SCATTER;
const EXCHANGE: Operation = Operation::PRODUCE_AND_ALL_TO_ALL;

/// Sums the rows that `produce` makes on all ranks; each rank gets its rows of the sum. Collective.
///
/// Rank r makes the addend p_r, [m, N]. `out` is [rows, N], this rank's rows of Σ p_r. The m rows are split over the
/// ranks evenly. If m is no multiple of the world size, the first ranks get one row more. Sums are made in f32, in the
/// order of the ranks, and rounded once, so they have the same bits each time. Over several hosts, the addends of another
/// host are added up and rounded there, and count as one.
///
/// `produce` is called block by block, first for the rows of the next rank in the ring, then for those of the rank
/// after it, and last for this rank's own. (Over several hosts, the rows of another host's ranks come before those of the
/// own host's.) A block is sent to its owner while the next is made.
///
/// On the host, `produce` writes to [`Block::values_mut`] before it returns. On GPUs, it puts its work on the block's
/// stream and returns at once. The copies wait for that stream; the host never does. The blocks use two streams in
/// turn, so that one block's kernels begin while the last kernels of the previous block end. Both streams begin after
/// the earlier work of the group's stream, and its later work begins when all sums are made. (`produce` must leave the
/// current CUDA context as it was, and must end every capture that it begins.)
///
/// The operation can be captured in a graph after it has run once. `produce` is called during the capture, and not when
/// the graph is replayed. The replay repeats the work that `produce` put on the streams.
///
/// ```
/// use gemmesh::pipelines::produce_and_reduce_scatter;
/// use gemmesh::{Group, Host};
///
/// Group::<Host>::threads(2, |group| {
///     let (m, n) = (4, 3);
///     let mut out = group.zeros::<f32>(m / 2, n)?;
///     produce_and_reduce_scatter(m, &mut out, |mut block| {
///         for (row, values) in block.rows().zip(block.values_mut().chunks_mut(4)) {
///             values.fill(row as f32);
///         }
///         Ok(())
///     })?;
///     let first = group.rank() * 2;
///     assert_eq!(out.to_vec()?[..n], [2.0 * first as f32; 3]);
///     Ok::<(), gemmesh::Error>(())
/// })?;
/// # Ok::<(), gemmesh::Error>(())
/// ```
///
/// # Memory
/// As [`matmul_reduce_scatter`](crate::matmul_reduce_scatter), with which it shares the memory for partials.
///
/// # Errors
/// On every rank, from this call or a later one: [`Kind::ProgramFailed`] if `produce` returns an error on one rank;
/// [`Kind::RankPanicked`] if it panics there; [`Kind::Timeout`], which names the rank, if it does not return there;
/// [`Kind::CallMismatch`] unless all ranks make the same call.
///
/// [`Kind::Shape`] if the output does not fit; [`Kind::OutOfMemory`]; [`Kind::Capturing`] if the first run is
/// captured; the group's failure.
///
/// `produce` is not called once the group has failed. It must not call the same group: such calls return
/// [`Kind::Misuse`]. Nor may it wait for other threads' calls of the group. They wait until this call has
/// returned, at most for the group's timeout, and then get [`Kind::Busy`].
///
/// # Panics
/// If `produce` panics. Its work on the streams has been joined with the group's stream before.
#[track_caller]
pub fn produce_and_reduce_scatter<B: Backend, T: Float>(
    m: usize,
    out: &mut Matrix<B, T>,
    produce: impl FnMut(Block<'_, B, T>) -> CallbackResult,
) -> Result<()> {
    ProduceAndReduceScatter::new().run(m, out, produce)
}

/// Sends each rank the rows that `produce` makes for it. Collective.
///
/// `out` is [M, N]. Rank r makes as many rows for each rank as it owns of `out`. The rows that it makes for rank p
/// become its rows of `out` on rank p. All M rows of `out` are written. `produce` is called as by
/// [`produce_and_reduce_scatter`]. A block's rows count from 0.
///
/// ```
/// use gemmesh::pipelines::produce_and_all_to_all;
/// use gemmesh::{Group, Host, Result};
///
/// fn rank(group: Group<Host>) -> Result<()> {
///     let rank = group.rank() as u32;
///     let mut out = group.sharded::<u32>(2, 1)?;
///     produce_and_all_to_all(&mut out, |mut block| {
///         let owner = block.owner() as u32;
///         block.values_mut().fill(10 * rank + owner);
///         Ok(())
///     })?;
///     let received = [[0, 10], [1, 11]];
///     assert_eq!(out.to_vec()?, received[group.rank()]);
///     Ok(())
/// }
///
/// Group::threads(2, rank)?;
/// # Ok::<_, gemmesh::Error>(())
/// ```
///
/// # Errors
/// As [`produce_and_reduce_scatter`].
///
/// # Panics
/// As [`produce_and_reduce_scatter`].
#[track_caller]
pub fn produce_and_all_to_all<B: Backend, T: Value>(
    out: &mut ShardedMatrix<B, T>,
    produce: impl FnMut(Block<'_, B, T>) -> CallbackResult,
) -> Result<()> {
    ProduceAndAllToAll::new().run(out, produce)
}

/// Builder for [`produce_and_reduce_scatter`]: rows of each rank and chunks.
///
/// ```
/// use gemmesh::pipelines::ProduceAndReduceScatter;
/// use gemmesh::{Group, Host, Result};
///
/// fn rank(group: Group<Host>) -> Result<()> {
///     let rows = [3, 1]; // the rows that each rank gets
///     let mut out = group.zeros::<f32>(rows[group.rank()], 1)?;
///     ProduceAndReduceScatter::new().rows(&rows).run(4, &mut out, |mut block| {
///         let pitch = block.pitch(); // elements from row to row
///         for (row, values) in block.rows().zip(block.values_mut().chunks_mut(pitch)) {
///             values.fill(row as f32);
///         }
///         Ok(())
///     })?;
///     let sums = [vec![0.0, 2.0, 4.0], vec![6.0]];
///     assert_eq!(out.to_vec()?, sums[group.rank()]);
///     Ok(())
/// }
///
/// Group::threads(2, rank)?;
/// # Ok::<_, gemmesh::Error>(())
/// ```
#[derive(Clone, Copy, Default)]
#[must_use = "nothing is done before it is run"]
pub struct ProduceAndReduceScatter<'a> {
    rows: Option<&'a [usize]>,
    chunks: Option<usize>,
}

impl fmt::Debug for ProduceAndReduceScatter<'_> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let rows = self
            .rows
            .map(|rows| format!("rows of {} ranks", rows.len()));
        let options = [rows, option("chunks", self.chunks)];
        f.write_str("ProduceAndReduceScatter")?;
        write_parts(f, options.into_iter().flatten())
    }
}

impl<'a> ProduceAndReduceScatter<'a> {
    /// Default options: an even split, and one block for each other rank.
    pub const fn new() -> Self {
        ProduceAndReduceScatter {
            rows: None,
            chunks: None,
        }
    }

    /// Gives rank r `rows[r]` rows of the sum, those of rank 0 first. A rank may have none.
    pub const fn rows(self, rows: &'a [usize]) -> Self {
        ProduceAndReduceScatter {
            rows: Some(rows),
            ..self
        }
    }

    /// Makes the rows of each other rank in at most `chunks` blocks, from 1 to 64. All ranks give the same number.
    ///
    /// Blocks are cut at multiples of 128 rows, and the last one has the rest. Smaller blocks are sent sooner, but each
    /// costs the start of a copy, and kernels of fewer rows. This rank's own rows are made in two blocks. The second is
    /// the last quarter, so that little is left to add when all rows are made.
    pub const fn chunks(self, chunks: usize) -> Self {
        ProduceAndReduceScatter {
            chunks: Some(chunks),
            ..self
        }
    }

    /// Runs the operation with `m` rows in all, as [`produce_and_reduce_scatter`].
    ///
    /// # Errors
    /// As [`produce_and_reduce_scatter`]; [`Kind::Limit`] if the number of blocks is out of range; [`Kind::Unsuitable`]
    /// unless [`ProduceAndReduceScatter::rows`] has one count for each rank, m in all.
    ///
    /// # Panics
    /// As [`produce_and_reduce_scatter`].
    #[track_caller]
    pub fn run<B: Backend, T: Float>(
        &self,
        m: usize,
        out: &mut Matrix<B, T>,
        produce: impl FnMut(Block<'_, B, T>) -> CallbackResult,
    ) -> Result<()> {
        self.sum(m, out, None, produce)
    }

    /// As [`ProduceAndReduceScatter::run`], and returns a trace of this rank's work.
    ///
    /// The trace shows when rows were sent and when they were added. It also shows when each call of the function ran
    /// or, on GPUs, when the work ran that it put on its stream. Either all ranks trace an operation or none does.
    ///
    /// # Errors
    /// As [`ProduceAndReduceScatter::run`].
    ///
    /// # Panics
    /// As [`produce_and_reduce_scatter`].
    #[track_caller]
    pub fn run_traced<B: Backend, T: Float>(
        &self,
        m: usize,
        out: &mut Matrix<B, T>,
        produce: impl FnMut(Block<'_, B, T>) -> CallbackResult,
    ) -> Result<Trace> {
        let mut spans = Vec::new();
        self.sum(m, out, Some(&mut spans), produce)?;
        Ok(Trace::new(out.group().rank(), spans))
    }

    #[track_caller]
    fn sum<B: Backend, T: Float>(
        &self,
        m: usize,
        out: &mut Matrix<B, T>,
        trace: Option<&mut Vec<Span>>,
        mut produce: impl FnMut(Block<'_, B, T>) -> CallbackResult,
    ) -> Result<()> {
        let out = RawOutput::from(&out.view_mut());
        self.sum_into(m, out, trace, |block| produce(block.into()))
    }

    /// [`ProduceAndReduceScatter::run`], without element types.
    #[track_caller]
    pub(crate) fn sum_into<B: Backend>(
        &self,
        m: usize,
        out: RawOutput<B>,
        trace: Option<&mut Vec<Span>>,
        produce: impl FnMut(RawBlock<'_, B>) -> CallbackResult,
    ) -> Result<()> {
        let (group, [rows, n]) = (out.group, out.shape);
        let planned = self.layout(group, m, n).and_then(|layout| {
            let what = "out [rows of this rank, N]";
            let own = layout.rows_of(group.rank()).len();
            require_shape(what, [own, n], [rows, n])?;
            self.plan(group, &layout, out.dtype)
        });
        let planned = planned.map_err(group.refusal(REDUCE.name()))?;
        planned.run(out.bound, &[], trace, produce)
    }

    /// As [`ProduceAndReduceScatter::run`], but writes into this rank's own rows of a sharded matrix, [m, N].
    ///
    /// The sum is split as `out` is. `out` can be the next layer's input, without a copy. (On GPUs each row of a
    /// sharded matrix is a multiple of 16 bytes long.)
    ///
    /// # Errors
    /// As [`ProduceAndReduceScatter::run`]; [`Kind::Shape`] if [`ProduceAndReduceScatter::rows`] gives a different
    /// split.
    ///
    /// # Panics
    /// As [`produce_and_reduce_scatter`].
    #[track_caller]
    pub fn run_into<B: Backend, T: Float>(
        &self,
        out: &mut ShardedMatrix<B, T>,
        mut produce: impl FnMut(Block<'_, B, T>) -> CallbackResult,
    ) -> Result<()> {
        self.sum_into_own_rows((&*out).into(), |block| produce(block.into()))
    }

    /// [`ProduceAndReduceScatter::run_into`], without element types.
    #[track_caller]
    pub(crate) fn sum_into_own_rows<B: Backend>(
        &self,
        out: RawShards<B>,
        produce: impl FnMut(RawBlock<'_, B>) -> CallbackResult,
    ) -> Result<()> {
        let group = out.group;
        let split = out.layout.rows();
        let planned = || {
            if let Some(rows) = self.rows.filter(|&rows| rows != split) {
                return Err(Error::of_kind(Kind::Shape {
                    argument: "out (rows of each rank)".into(),
                    expected: rows.to_vec(),
                    found: split.clone(),
                }));
            }
            out.require_by_rank("out")?;
            self.plan(group, out.layout, out.dtype)
        };
        let planned = planned().map_err(group.refusal(REDUCE.name()))?;
        planned.run(out.own_rows(), &[], None, produce)
    }

    fn layout<B: Backend>(&self, group: &Group<B>, m: usize, n: usize) -> Result<Layout> {
        match self.rows {
            Some(rows) => super::row_split::split(group, rows, [m, n]),
            None => Layout::balanced(m, n, group.world_size()),
        }
    }

    fn plan<B: Backend>(
        &self,
        group: &Group<B>,
        layout: &Layout,
        dtype: DType,
    ) -> Result<PlannedProduction<B>> {
        require_float("out", dtype)?;
        let problem = Problem::new(REDUCE, dtype, layout.clone(), layout.k());
        PlannedProduction::new(group, problem, self.chunks)
    }
}

/// Builder for [`produce_and_all_to_all`]: a count of rows for each pair of ranks, and chunks.
///
/// ```
/// use gemmesh::pipelines::ProduceAndAllToAll;
/// use gemmesh::{Group, Host, Result};
///
/// fn rank(group: Group<Host>) -> Result<()> {
///     let (rows, n) = (4, 1); // the rows of a block
///     let mut out = group.sharded::<f32>(2 * rows, n)?;
///     ProduceAndAllToAll::new().chunks(2).run(&mut out, |mut block| {
///         block.values_mut().fill(1.0);
///         Ok(())
///     })?;
///     assert!(out.to_vec()?.iter().all(|&x| x == 1.0));
///     Ok(())
/// }
///
/// Group::threads(2, rank)?;
/// # Ok::<_, gemmesh::Error>(())
/// ```
#[derive(Clone, Copy, Default)]
#[must_use = "nothing is done before it is run"]
pub struct ProduceAndAllToAll<'a> {
    counts: Option<&'a [usize]>,
    chunks: Option<usize>,
}

impl fmt::Debug for ProduceAndAllToAll<'_> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let counts = self
            .counts
            .map(|counts| format!("counts of {} pairs", counts.len()));
        let options = [counts, option("chunks", self.chunks)];
        f.write_str("ProduceAndAllToAll")?;
        write_parts(f, options.into_iter().flatten())
    }
}

impl<'a> ProduceAndAllToAll<'a> {
    /// Default options: as many rows for each rank as this rank owns, and one block for each rank.
    pub const fn new() -> Self {
        ProduceAndAllToAll {
            counts: None,
            chunks: None,
        }
    }

    /// Rank s makes `counts[s * W + r]` rows for rank r, which come to lie in `out` as by
    /// [`all_to_all_with_counts`](crate::all_to_all_with_counts). `produce` is not called for a rank that gets none.
    pub const fn counts(self, counts: &'a [usize]) -> Self {
        ProduceAndAllToAll {
            counts: Some(counts),
            ..self
        }
    }

    /// As [`ProduceAndReduceScatter::chunks`].
    pub const fn chunks(self, chunks: usize) -> Self {
        ProduceAndAllToAll {
            chunks: Some(chunks),
            ..self
        }
    }

    /// Runs the operation, as [`produce_and_all_to_all`].
    ///
    /// # Errors
    /// As [`produce_and_all_to_all`]; [`Kind::Limit`] if the number of blocks is out of range, or if a rank gets more rows
    /// than `out` has; [`Kind::Unsuitable`] unless there is one count for each pair of ranks.
    ///
    /// # Panics
    /// As [`produce_and_all_to_all`].
    #[track_caller]
    pub fn run<B: Backend, T: Value>(
        &self,
        out: &mut ShardedMatrix<B, T>,
        mut produce: impl FnMut(Block<'_, B, T>) -> CallbackResult,
    ) -> Result<()> {
        self.exchange((&*out).into(), |block| produce(block.into()))
    }

    /// [`ProduceAndAllToAll::run`], without element types.
    #[track_caller]
    pub(crate) fn exchange<B: Backend>(
        &self,
        out: RawShards<B>,
        produce: impl FnMut(RawBlock<'_, B>) -> CallbackResult,
    ) -> Result<()> {
        let (group, layout) = (out.group, out.layout);
        let planned = out.require_by_rank("out").and_then(|()| {
            let counts = self.counts.map(|rows| Counts::new(rows, layout));
            let problem = Problem {
                counts: counts.transpose()?,
                ..Problem::new(EXCHANGE, out.dtype, layout.clone(), layout.k())
            };
            PlannedProduction::new(group, problem, self.chunks)
        });
        let planned = planned.map_err(group.refusal(EXCHANGE.name()))?;
        planned.run(out.bound(), &[out.id], None, produce)
    }
}

/// A planned operation whose rows the caller makes.
struct PlannedProduction<B: Backend> {
    // Freed before the group that it belongs to can end.
    program: Arc<B::Program>,
    group: Group<B>,
    operation: Operation,
}

impl<B: Backend> PlannedProduction<B> {
    fn new(group: &Group<B>, problem: Problem, chunks: Option<usize>) -> Result<Self> {
        let chunks = chunks.unwrap_or(1);
        limit(
            "the number of chunks of a rank's rows",
            chunks,
            1,
            MAX_CHUNKS,
        )?;
        Ok(PlannedProduction {
            operation: problem.operation,
            program: group.program(problem, Some(chunked(chunks)))?,
            group: group.clone(),
        })
    }

    /// `shared`: the numbers of the sharded matrices that are also written on other ranks.
    #[track_caller]
    fn run(
        &self,
        out: Bound<B>,
        shared: &[u32],
        trace: Option<&mut Vec<Span>>,
        mut produce: impl FnMut(RawBlock<'_, B>) -> CallbackResult,
    ) -> Result<()> {
        let schedule = B::schedule(&self.program);
        let group = &self.group;
        // The same on all ranks, also if only some of them have rows to send.
        let room = match schedule.matrices()[PARTIALS].rows {
            0 => None,
            _ => Some(group.partials(schedule)?),
        };
        let mut matrices = [const { Bound::Nothing }; MATRICES];
        matrices[OUT] = out;
        if let Some(room) = &room {
            matrices[PARTIALS] = Bound::Symmetric(room.as_ref());
        }
        let arguments = Arguments {
            call: self.operation.name(),
            matrices: &matrices,
            shared,
            added: Added::default(),
        };
        let mut callbacks = Callbacks::new(group, self.operation.name());
        let mut producer =
            |request: &Request, stream: *mut c_void| {
                let number = request.place.matrix;
                let memory = matrices[number].symmetric();
                let spec = &schedule.matrices()[number];
                let block =
                    RawBlock {
                        room: room.as_ref().filter(|_| number == PARTIALS),
                        memory: memory.ok_or_else(|| {
                            Kind::Internal { what: format!(
                        "a caller makes rows of matrix {number}, which ranks do not share"
                    ) }.on(group.rank())
                        })?,
                        owner: request.owner,
                        rows: request.rows.clone(),
                        columns: request.place.columns.len(),
                        pitch: spec.columns,
                        dtype: spec.dtype,
                        first: request.place.rows.start,
                        stream,
                    };
                callbacks.call(|| produce(block))
            };
        let callback = Some(Callback::Producer(&mut producer));
        let result = call::run_with(group, None, &self.program, arguments, trace, callback);
        callbacks.finish(result)
    }
}

/// Rows for the caller to make, without their element type.
pub struct RawBlock<'a, B: Backend> {
    memory: &'a B::Symmetric,
    /// The same, if nothing of the caller's keeps it.
    pub room: Option<&'a Arc<B::Symmetric>>,
    /// The rank that gets the rows.
    pub owner: usize,
    pub rows: Range<usize>,
    pub columns: usize,
    /// Elements from row to row.
    pub pitch: usize,
    pub dtype: DType,
    /// The first row's number in the memory.
    first: usize,
    /// Nothing else uses it while the function runs.
    pub stream: *mut c_void,
}

impl<B: Backend> RawBlock<'_, B> {
    /// The address of the first row.
    pub fn address(&self) -> u64 {
        B::address(self.memory) + (self.first * self.pitch * self.dtype.bytes()) as u64
    }
}

/// Rows for the caller to make.
pub struct Block<'a, B: Backend, T: Value> {
    raw: RawBlock<'a, B>,
    element: PhantomData<T>,
}

impl<'a, B: Backend, T: Value> From<RawBlock<'a, B>> for Block<'a, B, T> {
    fn from(raw: RawBlock<'a, B>) -> Self {
        Block {
            raw,
            element: PhantomData,
        }
    }
}

impl<B: Backend, T: Value> fmt::Debug for Block<'_, B, T> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let (name, dtype, shape) = (B::NAME, T::DTYPE, self.shape());
        let (rows, owner) = (&self.raw.rows, self.raw.owner);
        write!(
            f,
            "Block<{name}, {dtype}>{shape:?} rows {rows:?} for rank {owner}"
        )
    }
}

impl<B: Backend, T: Value> Block<'_, B, T> {
    /// The rank that gets the rows.
    pub fn owner(&self) -> usize {
        self.raw.owner
    }

    /// The numbers of the rows, among the m rows of a sum or among the rows that this rank makes for `owner`.
    pub fn rows(&self) -> Range<usize> {
        self.raw.rows.clone()
    }

    /// [rows, N]
    pub fn shape(&self) -> [usize; 2] {
        [self.raw.rows.len(), self.raw.columns]
    }

    /// The number of elements from one row to the next in memory.
    ///
    /// It is N, or a few more so that each row begins at a multiple of 16 bytes.
    pub fn pitch(&self) -> usize {
        self.raw.pitch
    }
}

impl<T: Value> Block<'_, Host, T> {
    /// The memory for the rows, [`Block::pitch`] elements each. Its first contents have no meaning.
    pub fn values_mut(&mut self) -> &mut [T] {
        let length = self.raw.rows.len() * self.raw.pitch;
        // SAFETY: the memory holds the rows and is aligned for their type, of which every bit pattern is a value.
        // Nothing else touches them until the function has returned, because rows are sent after they are made, and
        // peers write elsewhere.
        unsafe { std::slice::from_raw_parts_mut(self.raw.address() as *mut T, length) }
    }
}

#[cfg(feature = "cuda")]
impl<T: Value> Block<'_, Cuda, T> {
    /// The address of the first row on the device. Each row begins [`Block::pitch`] elements after the one before.
    ///
    /// Work on the block's stream, or on a stream that is joined with it, writes the rows.
    pub fn as_device_ptr(&self) -> u64 {
        self.raw.address()
    }

    /// A CUstream of the device's primary context. The copies of the rows wait for it.
    ///
    /// The function must put its work on this stream before it returns.
    pub fn stream(&self) -> *mut c_void {
        self.raw.stream
    }
}
