//! Rows that a function of the caller's makes, block by block, each of which is on its way to its owner while the next
//! is made.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use super::call::{self, Added, Arguments, RawShards, require_shape};
use super::callback::{CallbackResult, Callbacks};
#[cfg(feature = "cuda")]
use crate::backend::Cuda;
use crate::backend::sealed::{Bound, Callback};
use crate::backend::{Backend, Host};
use crate::element::{Float, Value};
use crate::error::{Error, Result};
use crate::group::Group;
use crate::matrix::Matrix;
use crate::matrix::ShardedMatrix;
use crate::profile::span::Span;
use crate::schedule::config::MAX_CHUNKS;
use crate::schedule::limits::limit;
use crate::schedule::plan::collectives::chunked;
use crate::schedule::plan::matrices::{MATRICES, OUT, PARTIALS};
use crate::schedule::{Layout, Operation, Problem, Request};
use crate::trace::Trace;

const REDUCE: Operation = Operation::ProduceAndReduceScatter;
const EXCHANGE: Operation = Operation::ProduceAndAllToAll;

/// `out = the rows of this rank of Σ p_r`, where `produce` makes p_r, [m, N], this rank's addend. Collective.
///
/// `produce` is called block by block: first for the rows of the next rank in the ring, then of the one behind it, and
/// at last for this rank's own. A block is sent to its owner while the next is made. Each rank gets as many rows of the
/// m as any other, the first ones one more if they can't be split evenly; `out` is [rows, N]. Sums are made in f32, in
/// the order of the ranks, and rounded once, so they have the same bits each time.
///
/// On the host `produce` writes to [`Block::values_mut`] before it returns. On GPUs it puts its work on the block's
/// stream, and returns at once: the copies wait for the stream, and the host never does. Such streams alternate between
/// two, so that one block's kernels begin while the last of another's end; both begin after what was put on the group's
/// stream before, which goes on when all sums are made. (It leaves the current CUDA context as it was, and captures
/// nothing that it does not end.) Where the operation is captured in a graph, after it has run once, `produce` is
/// called then, and not when the graph is replayed: what it has put on the streams is.
///
/// ```
/// use gemmesh::{Group, Host, produce_and_reduce_scatter};
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
/// As [`matmul_reduce_scatter`](crate::matmul_reduce_scatter), whose room it shares.
///
/// # Errors
/// On every rank, of this call or a later one: [`Error::Callback`] if `produce` fails on one; [`Error::RankPanicked`]
/// if it panics there; [`Error::Timeout`] names a rank whose function does not return. [`Error::CallMismatch`] unless
/// all ranks make the same call. [`Error::Shape`] for an output that does not fit; [`Error::OutOfMemory`];
/// [`Error::Capturing`] if it is captured at its first run. The group's failure. Calls of the same group that `produce`
/// makes return [`Error::CallInCallback`]. Other threads that make such calls wait until this one has returned, for as
/// long as the group's timeout, and then get [`Error::Busy`]: so `produce` must not wait for them. It is not called
/// once the group has failed.
///
/// # Panics
/// If `produce` does, when what it had put on the streams has been joined with the group's.
pub fn produce_and_reduce_scatter<B: Backend, T: Float>(
    m: usize,
    out: &mut Matrix<B, T>,
    produce: impl FnMut(Block<'_, B, T>) -> CallbackResult,
) -> Result<()> {
    ProduceAndReduceScatter::new().run(m, out, produce)
}

/// Each rank makes a block of rows for each rank, and gets those that the others make for it. Collective.
///
/// `out` is [M, N]: rank r makes as many rows for each rank as it owns of `out`, and those that it makes for rank p
/// become its rows of `out` on rank p, all M of which are written. `produce` is called as by
/// [`produce_and_reduce_scatter`]; a block's rows count from 0.
///
/// ```
/// use gemmesh::{Group, Host, Result, produce_and_all_to_all};
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
pub fn produce_and_all_to_all<B: Backend, T: Value>(
    out: &mut ShardedMatrix<B, T>,
    produce: impl FnMut(Block<'_, B, T>) -> CallbackResult,
) -> Result<()> {
    ProduceAndAllToAll::new().run(out, produce)
}

/// Builder for [`produce_and_reduce_scatter`]: stages and chunks.
///
/// ```
/// use gemmesh::{Group, Host, ProduceAndReduceScatter, Result};
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
#[derive(Clone, Copy, Debug, Default)]
#[must_use = "nothing is done before it is run"]
pub struct ProduceAndReduceScatter<'a> {
    rows: Option<&'a [usize]>,
    chunks: Option<usize>,
}

impl<'a> ProduceAndReduceScatter<'a> {
    /// An even split, and the rows of each other rank in one block.
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

    /// Makes the rows of each other rank in as many blocks, from 1 to 64, of multiples of 128 rows: smaller ones are on
    /// their way sooner, and each costs a copy's start, and kernels of fewer rows. The same on all ranks. (This rank's
    /// own rows are made in two: the last quarter apart, so that little is left to add up when all is made.)
    pub const fn chunks(self, chunks: usize) -> Self {
        ProduceAndReduceScatter {
            chunks: Some(chunks),
            ..self
        }
    }

    /// As [`produce_and_reduce_scatter`]: `m` rows in all.
    ///
    /// # Errors
    /// As [`produce_and_reduce_scatter`]; [`Error::Limit`] for a number of blocks that cannot be; [`Error::Shape`]
    /// unless there is one count of rows a rank, m in all.
    ///
    /// # Panics
    /// As [`produce_and_reduce_scatter`].
    pub fn run<B: Backend, T: Float>(
        &self,
        m: usize,
        out: &mut Matrix<B, T>,
        produce: impl FnMut(Block<'_, B, T>) -> CallbackResult,
    ) -> Result<()> {
        self.sum(m, out, None, produce)
    }

    /// As [`ProduceAndReduceScatter::run`], and returns what happened when on this rank: when rows were sent, when each
    /// call of the function ran, or on GPUs what it had put on its stream, and when they were added up. All ranks trace
    /// an operation, or none does.
    ///
    /// # Errors
    /// As [`ProduceAndReduceScatter::run`].
    ///
    /// # Panics
    /// As [`produce_and_reduce_scatter`].
    pub fn run_traced<B: Backend, T: Float>(
        &self,
        m: usize,
        out: &mut Matrix<B, T>,
        produce: impl FnMut(Block<'_, B, T>) -> CallbackResult,
    ) -> Result<Trace> {
        let rank = out.group().rank();
        Trace::of(rank, |spans| self.sum(m, out, Some(spans), produce))
    }

    fn sum<B: Backend, T: Float>(
        &self,
        m: usize,
        out: &mut Matrix<B, T>,
        trace: Option<&mut Vec<Span>>,
        produce: impl FnMut(Block<'_, B, T>) -> CallbackResult,
    ) -> Result<()> {
        let group = out.group().clone();
        let [rows, n] = out.shape();
        let planned = self.layout(&group, m, n).and_then(|layout| {
            let what = "out [rows of this rank, N]";
            let own = layout.rows_of(group.rank()).len();
            require_shape(group.rank(), what, [own, n], [rows, n])?;
            self.plan::<B, T>(&group, &layout)
        });
        let planned = planned.map_err(|error| group.refuse(REDUCE.name(), error))?;
        planned.run(Bound::Output(out.memory(), 0), &[], trace, produce)
    }

    /// The same into the own rows of a sharded matrix, [m, N], whose split it has: the next layer's input, with no
    /// copy. (On GPUs the rows of a sharded matrix are whole 16 bytes.)
    ///
    /// # Errors
    /// As [`ProduceAndReduceScatter::run`]; [`Error::Shape`] if another split was asked for.
    ///
    /// # Panics
    /// As [`produce_and_reduce_scatter`].
    pub fn run_into<B: Backend, T: Float>(
        &self,
        out: &mut ShardedMatrix<B, T>,
        produce: impl FnMut(Block<'_, B, T>) -> CallbackResult,
    ) -> Result<()> {
        let group = out.group().clone();
        let split = out.layout().rows();
        let planned = || {
            if let Some(rows) = self.rows.filter(|&rows| rows != split) {
                return Err(Error::Shape {
                    rank: group.rank(),
                    argument: "out (rows of each rank)".into(),
                    expected: rows.to_vec(),
                    found: split.clone(),
                });
            }
            RawShards::from(&*out).require_by_rank("out")?;
            self.plan::<B, T>(&group, out.layout())
        };
        let planned = planned().map_err(|error| group.refuse(REDUCE.name(), error))?;
        let offset = out.rows().start * out.shape()[1] * size_of::<T>();
        planned.run(Bound::Part(out.memory_mut(), offset), &[], None, produce)
    }

    fn layout<B: Backend>(&self, group: &Group<B>, m: usize, n: usize) -> Result<Layout> {
        match self.rows {
            Some(rows) => super::partial_sums::split(group, rows, [m, n]),
            None => Layout::balanced(m, n, group.world_size()),
        }
    }

    fn plan<B: Backend, T: Float>(&self, group: &Group<B>, layout: &Layout) -> Result<Planned<B>> {
        Planned::new::<T>(group, REDUCE, layout, self.chunks)
    }
}

/// [`produce_and_all_to_all`] with a number of blocks.
///
/// ```
/// use gemmesh::{Group, Host, ProduceAndAllToAll, Result};
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
#[derive(Clone, Copy, Debug, Default)]
#[must_use = "nothing is done before it is run"]
pub struct ProduceAndAllToAll {
    chunks: Option<usize>,
}

impl ProduceAndAllToAll {
    /// The rows for each rank in one block.
    pub const fn new() -> Self {
        ProduceAndAllToAll { chunks: None }
    }

    /// As [`ProduceAndReduceScatter::chunks`].
    pub const fn chunks(self, chunks: usize) -> Self {
        ProduceAndAllToAll {
            chunks: Some(chunks),
        }
    }

    /// As [`produce_and_all_to_all`].
    ///
    /// # Errors
    /// As [`produce_and_all_to_all`]; [`Error::Limit`] for a number of blocks that cannot be.
    ///
    /// # Panics
    /// As [`produce_and_all_to_all`].
    pub fn run<B: Backend, T: Value>(
        &self,
        out: &mut ShardedMatrix<B, T>,
        produce: impl FnMut(Block<'_, B, T>) -> CallbackResult,
    ) -> Result<()> {
        let group = out.group().clone();
        let planned = RawShards::from(&*out)
            .require_by_rank("out")
            .and_then(|()| Planned::new::<T>(&group, EXCHANGE, out.layout(), self.chunks));
        let planned = planned.map_err(|error| group.refuse(EXCHANGE.name(), error))?;
        planned.run(Bound::Symmetric(out.memory()), &[out.id()], None, produce)
    }
}

/// An operation whose rows the caller makes.
struct Planned<B: Backend> {
    // Freed before the group that it belongs to can end.
    program: Arc<B::Program>,
    group: Group<B>,
    operation: Operation,
}

impl<B: Backend> Planned<B> {
    /// The columns of `layout` are those of the rows.
    fn new<T: Value>(
        group: &Group<B>,
        operation: Operation,
        layout: &Layout,
        chunks: Option<usize>,
    ) -> Result<Self> {
        let chunks = chunks.unwrap_or(1);
        limit("blocks of a rank's rows", chunks, 1, MAX_CHUNKS)?;
        let problem = Problem::new(operation, T::DTYPE, layout.clone(), layout.k());
        Ok(Planned {
            program: group.program(problem, Some(chunked(chunks)))?,
            group: group.clone(),
            operation,
        })
    }

    /// `shared`: the numbers of the sharded matrices that are written on other ranks too.
    fn run<T: Value>(
        &self,
        out: Bound<B>,
        shared: &[u32],
        trace: Option<&mut Vec<Span>>,
        mut produce: impl FnMut(Block<'_, B, T>) -> CallbackResult,
    ) -> Result<()> {
        let schedule = B::schedule(&self.program);
        let group = &self.group;
        let room = match schedule.is_idle() {
            true => None,
            false => Some(group.partials(schedule)?),
        };
        let mut matrices = [const { Bound::Nothing }; MATRICES];
        matrices[OUT] = out;
        if let Some(room) = &room {
            matrices[PARTIALS] = Bound::Symmetric(room.as_ref());
        }
        let arguments = Arguments {
            matrices: &matrices,
            shared,
            added: Added::default(),
        };
        let mut callbacks = Callbacks::new(group, self.operation.name());
        let mut producer = |request: &Request, stream: *mut c_void| {
            let number = request.place.matrix;
            let memory = matrices[number].symmetric();
            let block = Block {
                memory: memory.ok_or_else(|| Error::Internal {
                    rank: group.rank(),
                    what: format!(
                        "a caller makes rows of matrix {number}, which ranks do not share"
                    ),
                })?,
                owner: request.owner,
                rows: request.rows.clone(),
                columns: request.place.columns.len(),
                pitch: schedule.matrices()[number].columns,
                first: request.place.rows.start,
                stream,
                element: PhantomData,
            };
            callbacks.call(|| produce(block))
        };
        let callback = Some(Callback::Producer(&mut producer));
        let result = call::run_with(group, None, &self.program, arguments, trace, callback);
        callbacks.finish(result)
    }
}

/// Rows that the caller is to make.
#[derive(Debug)]
pub struct Block<'a, B: Backend, T: Value> {
    memory: &'a B::Symmetric,
    owner: usize,
    rows: Range<usize>,
    columns: usize,
    pitch: usize,
    /// The first row's number in the memory.
    first: usize,
    /// Nobody else's for as long as the function runs.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    stream: *mut c_void,
    element: PhantomData<T>,
}

impl<B: Backend, T: Value> Block<'_, B, T> {
    /// The rank that gets them.
    pub fn owner(&self) -> usize {
        self.owner
    }

    /// Which rows: of the m of a sum, or of those that this rank makes for `owner`.
    pub fn rows(&self) -> Range<usize> {
        self.rows.clone()
    }

    /// [rows, N]
    pub fn shape(&self) -> [usize; 2] {
        [self.rows.len(), self.columns]
    }

    /// The elements from row to row where they are to lie: N or, so that each row begins with whole 16 bytes, a few
    /// more.
    pub fn pitch(&self) -> usize {
        self.pitch
    }

    /// Bytes of the memory in front of them.
    fn offset(&self) -> usize {
        self.first * self.pitch * size_of::<T>()
    }
}

impl<T: Value> Block<'_, Host, T> {
    /// Where the rows are to lie, [`Block::pitch`] elements each. What they hold at first is of no meaning.
    pub fn values_mut(&mut self) -> &mut [T] {
        let length = self.rows.len() * self.pitch;
        // SAFETY: the memory holds the rows, aligned for their type, whose every bit pattern is a value. Nobody else
        // touches them until the function has returned: what is sent has been made before, and peers write elsewhere.
        unsafe {
            let first = self.memory.own().add(self.offset());
            std::slice::from_raw_parts_mut(first.cast(), length)
        }
    }
}

#[cfg(feature = "cuda")]
impl<T: Value> Block<'_, Cuda, T> {
    /// Where the first of the rows is to lie on the device; each begins [`Block::pitch`] elements behind the one
    /// before. For what is put on the block's stream, or joined with it.
    pub fn as_device_ptr(&self) -> u64 {
        self.memory.own() + self.offset() as u64
    }

    /// A CUstream of the device's primary context, which the copies of the rows wait for: for what is put on it before
    /// the function returns.
    pub fn stream(&self) -> *mut c_void {
        self.stream
    }
}
