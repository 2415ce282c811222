//! Gathers a matrix, and calls a function of the caller for each chunk of rows as it arrives.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use smallvec::SmallVec;

use super::call::{self, Added, Arguments, RawShards, require_same_group};
use super::callback::{CallbackResult, Callbacks};
use super::row_split::staged;
#[cfg(feature = "cuda")]
use crate::backend::Cuda;
use crate::backend::sealed::{Bound, Callback};
use crate::backend::{Backend, Host};
use crate::element::Value;
use crate::error::{Error, Kind, Result};
use crate::matrix::ShardedMatrix;
use crate::one_line::{option, write_parts};
use crate::profile::span::Span;
use crate::schedule::config::MAX_CHUNKS;
use crate::schedule::limits::limit;
use crate::schedule::plan::matrices::{A, BESIDE, MATRICES};
use crate::schedule::{Chunking, Config, Operation, Problem, Route, TileShape, Transfer};
use crate::trace::Trace;

const OPERATION: Operation = Operation::ALL_GATHER_AND_CONSUME;
const NAME: &str = OPERATION.name();

/// Gathers the rows of `a` on every rank, and calls `consume` once for each chunk of rows. Collective.
///
/// This rank's own rows come first. The other ranks' rows follow in the order in which they are expected, beginning
/// with the next rank in the ring. Afterwards `a` holds all rows, as after any gather.
///
/// On the host, `consume` is called when a chunk has arrived, and may read it ([`Chunk::values`]). On GPUs, `consume`
/// is called at once and puts its work on the chunk's stream. That stream waits for the rows; the host never does. The
/// chunks use two streams in turn, so that one chunk's kernels begin while the last kernels of the previous chunk end.
/// Both streams begin after the earlier work of the group's stream, and its later work begins after both. No other rank
/// waits for a consumer. (`consume` must leave the current CUDA context as it was, and must end every capture that it
/// begins.)
///
/// The operation can be captured in a graph after it has run once. `consume` is called during the capture, and not when
/// the graph is replayed. The replay repeats the work that `consume` put on the streams.
///
/// ```
/// use gemmesh::pipelines::all_gather_and_consume;
/// use gemmesh::{Group, Host, bf16};
///
/// Group::<Host>::threads(2, |group| {
///     let (m, k) = (6, 4);
///     let mut a = group.sharded::<bf16>(m, k)?;
///     let own = vec![bf16::from_f32(1.0 + group.rank() as f32); a.rows().len() * k];
///     a.shard_mut().copy_from_host(&own)?;
///     let mut sums = vec![0.0; m];
///     all_gather_and_consume(&a, |chunk| {
///         for (row, values) in chunk.rows().zip(chunk.values().chunks_exact(k)) {
///             sums[row] = values.iter().map(|x| x.to_f32()).sum();
///         }
///         Ok(())
///     })?;
///     assert_eq!(sums, [4.0, 4.0, 4.0, 8.0, 8.0, 8.0]);
///     Ok::<(), gemmesh::Error>(())
/// })?;
/// # Ok::<(), gemmesh::Error>(())
/// ```
///
/// # Errors
/// On every rank, from this call or a later one: [`Kind::ProgramFailed`] if `consume` returns an error on one rank;
/// [`Kind::RankPanicked`] if it panics there; [`Kind::CallMismatch`] unless all ranks make the same call.
///
/// [`Kind::Capturing`] if the first run is captured; the group's failure.
///
/// `consume` is not called once the group has failed. It must not call the same group: such calls return
/// [`Kind::Misuse`], also those that read or write a matrix from the host. Nor may it wait for other threads'
/// calls of the group. They wait until this call has returned, at most for the group's timeout, and then get
/// [`Kind::Busy`].
///
/// # Panics
/// If `consume` panics. Its work on the streams has been joined with the group's stream before.
#[track_caller]
pub fn all_gather_and_consume<B: Backend, T: Value>(
    a: &ShardedMatrix<B, T>,
    consume: impl FnMut(Chunk<'_, B, T>) -> CallbackResult,
) -> Result<()> {
    AllGatherAndConsume::new().run(a, consume)
}

/// Builder for [`all_gather_and_consume`]: stages and chunks.
///
/// ```
/// use gemmesh::pipelines::AllGatherAndConsume;
/// use gemmesh::{Group, Host, Result, bf16};
///
/// fn rank(group: Group<Host>) -> Result<()> {
///     let (m, k) = (8, 4);
///     let mut a = group.sharded::<bf16>(m, k)?;
///     let own = vec![bf16::ONE; a.rows().len() * k];
///     a.shard_mut().copy_from_host(&own)?;
///     let mut sum = 0.0;
///     AllGatherAndConsume::new().chunks(2).run(&a, |chunk| {
///         sum += chunk.values().iter().map(|x| x.to_f32()).sum::<f32>();
///         Ok(())
///     })?;
///     assert_eq!(sum, 32.0);
///     Ok(())
/// }
///
/// Group::threads(2, rank)?;
/// # Ok::<_, gemmesh::Error>(())
/// ```
#[derive(Clone, Copy, Default)]
#[must_use = "nothing is done before it is run"]
pub struct AllGatherAndConsume {
    chunks: Option<usize>,
    stages: Option<usize>,
}

impl fmt::Debug for AllGatherAndConsume {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let options = [option("chunks", self.chunks), option("stages", self.stages)];
        f.write_str("AllGatherAndConsume")?;
        write_parts(f, options.into_iter().flatten())
    }
}

impl AllGatherAndConsume {
    /// Default options: each shard is one chunk, or two chunks if there are two ranks.
    pub const fn new() -> AllGatherAndConsume {
        AllGatherAndConsume {
            chunks: None,
            stages: None,
        }
    }

    /// Gathers in `stages` stages, from 1 to 64.
    ///
    /// Each rank's rows are cut into `stages` blocks. The first stage gathers the first block of every rank, the second
    /// stage the second block, and so on. A matrix made by [`Group::sharded_staged`](crate::Group::sharded_staged) has
    /// its own number of stages.
    pub const fn stages(self, stages: usize) -> AllGatherAndConsume {
        AllGatherAndConsume {
            stages: Some(stages),
            ..self
        }
    }

    /// Cuts each other rank's shard into `chunks` chunks, from 1 to 64.
    ///
    /// Smaller chunks arrive sooner, but each costs the start of a copy. The number may differ between ranks.
    pub const fn chunks(self, chunks: usize) -> AllGatherAndConsume {
        AllGatherAndConsume {
            chunks: Some(chunks),
            ..self
        }
    }

    /// Runs the operation, as [`all_gather_and_consume`].
    ///
    /// # Errors
    /// As [`all_gather_and_consume`]; [`Kind::Limit`] if the number of chunks or stages is out of range.
    ///
    /// # Panics
    /// As [`all_gather_and_consume`].
    #[track_caller]
    pub fn run<B: Backend, T: Value>(
        &self,
        a: &ShardedMatrix<B, T>,
        mut consume: impl FnMut(Chunk<'_, B, T>) -> CallbackResult,
    ) -> Result<()> {
        self.gather(a.into(), None, None, |rows| consume(Chunk { a, rows }))
    }

    /// As [`AllGatherAndConsume::run`], and returns a trace of this rank's work.
    ///
    /// The trace shows when rows arrived and what the function waited for. It also shows when each call of the function
    /// ran or, on GPUs, when the work ran that it put on its stream. Either all ranks trace an operation or none does.
    ///
    /// # Errors
    /// As [`AllGatherAndConsume::run`].
    ///
    /// # Panics
    /// As [`all_gather_and_consume`].
    #[track_caller]
    pub fn run_traced<B: Backend, T: Value>(
        &self,
        a: &ShardedMatrix<B, T>,
        mut consume: impl FnMut(Chunk<'_, B, T>) -> CallbackResult,
    ) -> Result<Trace> {
        let mut spans = Vec::new();
        let consume = |rows| consume(Chunk { a, rows });
        self.gather(a.into(), None, Some(&mut spans), consume)?;
        Ok(Trace::new(a.group().rank(), spans))
    }

    /// Gathers two matrices whose rows belong together, such as values and their scales.
    ///
    /// The rows of both arrive under one flag. The function gets the same rows of both, on the same stream.
    ///
    /// # Errors
    /// As [`AllGatherAndConsume::run`]; [`Kind::Shape`] or [`Kind::Unsuitable`] unless the rows of `beside` are
    /// split like those of `a`.
    ///
    /// # Panics
    /// As [`all_gather_and_consume`].
    #[track_caller]
    pub fn run_with<B: Backend, T: Value, U: Value>(
        &self,
        a: &ShardedMatrix<B, T>,
        beside: &ShardedMatrix<B, U>,
        mut consume: impl FnMut(Chunk<'_, B, T>, Chunk<'_, B, U>) -> CallbackResult,
    ) -> Result<()> {
        self.gather(a.into(), Some(beside.into()), None, |rows| {
            let of_other = Chunk {
                a: beside,
                rows: rows.clone(),
            };
            consume(Chunk { a, rows }, of_other)
        })
    }

    /// The operation, without element types. `beside`: a matrix that is gathered together with `a`.
    #[track_caller]
    pub(crate) fn gather<B: Backend>(
        &self,
        a: RawShards<B>,
        beside: Option<RawShards<B>>,
        trace: Option<&mut Vec<Span>>,
        mut consume: impl FnMut(ChunkRows) -> CallbackResult,
    ) -> Result<()> {
        let group = a.group;
        let program = self.plan(a, beside).map_err(group.refusal(NAME))?;
        let mut matrices = [const { Bound::Nothing }; MATRICES];
        let mut shared: SmallVec<[u32; 2]> = SmallVec::from_iter([a.id]);
        matrices[A] = a.bound();
        if let Some(beside) = &beside {
            matrices[BESIDE] = beside.bound();
            shared.push(beside.id);
        }
        let arguments = Arguments {
            call: NAME,
            matrices: &matrices,
            shared: &shared,
            added: Added::default(),
        };
        let mut callbacks = Callbacks::new(group, NAME);
        let own: SmallVec<[Range<usize>; 1]> = a.layout.rows_in_memory(group.rank()).into();
        let mut consumer = |transfer: Option<&Transfer>, stream: *mut c_void| {
            let (source, blocks) = match transfer {
                Some(transfer) => {
                    let rows = transfer.regions[0].to.rows.clone();
                    (transfer.source, SmallVec::from_iter([rows]))
                }
                None => (group.rank(), own.clone()),
            };
            blocks.into_iter().try_for_each(|rows| {
                let rows = ChunkRows {
                    rows,
                    source,
                    stream,
                };
                callbacks.call(|| consume(rows))
            })
        };
        let callback = Some(Callback::Consumer(&mut consumer));
        let result = call::run_with(group, None, &program, arguments, trace, callback);
        callbacks.finish(result)
    }

    fn plan<B: Backend>(
        &self,
        a: RawShards<B>,
        beside: Option<RawShards<B>>,
    ) -> Result<Arc<B::Program>> {
        if let Some(beside) = &beside {
            require_same_group("beside", beside.group, a.group)?;
            if !a.layout.is_split_as(beside.layout) {
                return Err(Error::of_kind(Kind::Shape {
                    argument: "beside (rows of each rank)".into(),
                    expected: a.layout.rows(),
                    found: beside.layout.rows(),
                }));
            }
        }
        // If there are two ranks, only one shard moves. Half of it is consumed while the other half arrives.
        let default = if a.group.world_size() == 2 { 2 } else { 1 };
        let chunks = self.chunks.unwrap_or(default);
        limit("the number of chunks of a shard", chunks, 1, MAX_CHUNKS)?;
        let problem = Problem {
            beside: beside.map(|beside| (beside.dtype, beside.shape()[1])),
            ..Problem::new(
                OPERATION,
                a.dtype,
                staged(a.layout.clone(), self.stages)?,
                0,
            )
        };
        // Nothing is multiplied.
        let tile = TileShape::new(1, 1, 1);
        let config = Config::new(tile, Chunking::new(chunks), Route::Pull);
        a.group.program(problem, Some(config))
    }
}

/// The rows of a chunk.
#[derive(Clone)]
pub struct ChunkRows {
    pub rows: Range<usize>,
    /// The rank that owns them.
    pub source: usize,
    /// Nothing else uses it while the function runs.
    pub stream: *mut c_void,
}

/// Rows of a sharded matrix that have arrived or, on GPUs, that a stream waits for.
pub struct Chunk<'a, B: Backend, T: Value> {
    a: &'a ShardedMatrix<B, T>,
    rows: ChunkRows,
}

impl<B: Backend, T: Value> fmt::Debug for Chunk<'_, B, T> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let (name, dtype, shape) = (B::NAME, T::DTYPE, self.shape());
        let ChunkRows { rows, source, .. } = &self.rows;
        write!(
            f,
            "Chunk<{name}, {dtype}>{shape:?} rows {rows:?} of rank {source}"
        )
    }
}

impl<B: Backend, T: Value> Chunk<'_, B, T> {
    /// The numbers of the rows in the matrix.
    pub fn rows(&self) -> Range<usize> {
        self.rows.rows.clone()
    }

    /// The rank that owns the rows.
    pub fn source(&self) -> usize {
        self.rows.source
    }

    /// [rows, K]
    pub fn shape(&self) -> [usize; 2] {
        [self.rows.rows.len(), self.a.shape()[1]]
    }

    /// Bytes of the matrix before the rows.
    fn offset(&self) -> usize {
        self.rows.rows.start * self.shape()[1] * size_of::<T>()
    }
}

impl<T: Value> Chunk<'_, Host, T> {
    /// The values, row by row.
    pub fn values(&self) -> &[T] {
        let [rows, k] = self.shape();
        // SAFETY: the memory holds the matrix and is aligned for its type, of which every bit pattern is a value. The
        // operation borrows the matrix, so the own rows are not written while it runs. Other ranks' rows are not
        // written after their flag has been acquired and before the next operation.
        unsafe {
            let first = self.a.memory().own().add(self.offset());
            std::slice::from_raw_parts(first.cast_const().cast(), rows * k)
        }
    }
}

#[cfg(feature = "cuda")]
impl<T: Value> Chunk<'_, Cuda, T> {
    /// The address of the first row on the device. The other rows follow it without padding.
    ///
    /// Code on the chunk's stream, or after it, may read the rows.
    pub fn as_device_ptr(&self) -> u64 {
        self.a.as_device_ptr() + self.offset() as u64
    }

    /// A CUstream of the device's primary context that waits for the rows.
    ///
    /// The function must put its work on this stream before it returns.
    pub fn stream(&self) -> *mut c_void {
        self.rows.stream
    }
}
