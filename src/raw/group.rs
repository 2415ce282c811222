//! A group of any backend.

use std::any::Any;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use super::Memory;
use super::arguments::quantized;
use super::joining::{BackendKind, Options};
use super::pipelines::{Consume, Produce};
use super::product::{self, AnyPrepared, AnyProduct, PreparedFor, ProductCall};
use super::shards::{self, AnyShards, ShardsOf, Split, with_type};
#[cfg(feature = "cuda")]
use crate::backend::Cuda;
use crate::backend::{Backend, Host, Owner};
use crate::element::{DType, F8E4M3, F8E5M2, bf16, f16};
#[cfg(doc)]
use crate::error::Kind;
use crate::error::{Error, Result, called_at, require_count, require_shape};
use crate::group::Group;
use crate::interop::dlpack::{DLDevice, DLTensor};
use crate::interop::tensors;
use crate::matrix::Place;
use crate::ops::call::{RawOutput, RawShards, RawView, require_alike};
use crate::ops::overlap::{check_copy, overlapping};
use crate::ops::{
    AllGatherAndConsume, ProduceAndAllToAll, ProduceAndReduceScatter, RowSplit, collectives,
    quantize,
};
use crate::schedule::{MatrixSpec, Quantization, Scaling};
use crate::trace::{Timeline, Trace};

/// A backend whose matrices can be told from others' at run time.
pub trait AnyBackend: Backend {
    /// The matrix, if it is of this backend.
    fn shards_of(any: &AnyShards) -> Option<&dyn ShardsOf<Self>>;
    /// The matrix, as one of any backend.
    fn any_shards(shards: Box<dyn ShardsOf<Self>>) -> AnyShards;
}

impl AnyBackend for Host {
    fn shards_of(any: &AnyShards) -> Option<&dyn ShardsOf<Host>> {
        match any {
            AnyShards::Host(shards) => Some(&**shards),
            #[cfg(feature = "cuda")]
            AnyShards::Cuda(_) => None,
        }
    }

    fn any_shards(shards: Box<dyn ShardsOf<Host>>) -> AnyShards {
        AnyShards::Host(shards)
    }
}

#[cfg(feature = "cuda")]
impl AnyBackend for Cuda {
    fn shards_of(any: &AnyShards) -> Option<&dyn ShardsOf<Cuda>> {
        match any {
            AnyShards::Cuda(shards) => Some(&**shards),
            AnyShards::Host(_) => None,
        }
    }

    fn any_shards(shards: Box<dyn ShardsOf<Cuda>>) -> AnyShards {
        AnyShards::Cuda(shards)
    }
}

/// A group of any backend. Its methods are those of [`Group`] and the operations.
///
/// # Safety of its calls
/// A [`Memory`] is that of a matrix, as `Matrix::from_device_ptr` asks: valid until the calls that get it are complete,
/// and written by no one else meanwhile. Calls refuse outputs that overlap with what they read.
#[allow(clippy::missing_safety_doc)] // The same for all methods: see above.
pub trait AnyGroup: Any + Send + Sync {
    /// [`Group::rank`].
    fn rank(&self) -> usize;
    /// [`Group::world_size`].
    fn world_size(&self) -> usize;
    /// [`Group::name`].
    fn name(&self) -> Option<&str>;
    /// The group's backend.
    fn backend(&self) -> BackendKind;
    /// Where the memory of matrices is.
    fn device(&self) -> DLDevice;
    /// Rows begin at multiples of this number of bytes.
    fn row_alignment(&self) -> usize;
    /// The rows of each rank if M rows are split evenly.
    fn even_rows(&self, m: usize) -> Vec<usize>;
    /// The columns of sharded scales of rows [M, K], [`Scaling::ShardedRows`] or [`Scaling::ShardedBlocks`].
    fn scale_columns(&self, scaling: Scaling, k: usize) -> usize;

    /// [`Group::synchronize`].
    fn synchronize(&self) -> Result<()>;
    /// [`Group::barrier`]. Collective.
    fn barrier(&self) -> Result<()>;
    /// [`Group::all_gather_bytes`]. Collective.
    fn all_gather_bytes(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>>;
    /// [`Group::wait_times`].
    fn wait_times(&self) -> Vec<Duration>;
    /// Brings the ranks' traces together: [`Timeline::collect`]. Collective.
    fn collect(&self, trace: &Trace) -> Result<Timeline>;
    /// [`Group::check`].
    fn check(&self) -> Result<()>;
    /// True if this thread runs a function that an operation of this group has called. Calls are refused there.
    fn is_in_function(&self) -> bool;
    /// [`Group::fail`].
    fn fail(&self, reason: &str) -> Error;
    /// The error of a collective call that a door refuses, because of an argument that no other method sees:
    /// [`unsuitable`]. The ranks that wait for this rank in the call are told.
    fn refuse(&self, call: &str, argument: &str, found: [&str; 3]) -> Error;
    /// As [`AnyGroup::refuse`], for what has no property: [`refused`].
    fn refuse_because(&self, call: &str, what: &str) -> Error;
    /// Tells the other ranks that a collective call is not made because of an error: [`Group::refuse`].
    fn refuse_for(&self, call: &str, error: Error) -> Error;
    /// An error of this group, with its name and the job's numbers of ranks if it has them.
    fn named(&self, error: Error) -> Error;
    /// [`Group::split`], with options of the part. Collective.
    fn split(&self, options: Options, color: usize, key: usize) -> Result<Arc<dyn AnyGroup>>;
    /// The stream of operations, a CUstream. Null on the host backend.
    fn stream(&self) -> usize;
    /// Puts later operations on a stream: [`Group::set_stream`]. Nothing is done on the host backend, or if it is the
    /// group's stream.
    unsafe fn set_stream(&self, stream: usize) -> Result<()>;
    /// The stream of the last [`AnyGroup::set_stream`]. Calls by [`AnyGroup::on_stream`] leave it as it is.
    fn stream_that_was_set(&self) -> Option<usize>;
    /// Puts later operations on a stream, which its `owner` keeps, and makes `call`. Threads that do so take turns, so the
    /// call is on this stream. `awaited`: the name of the call, if other ranks wait for this one in it. They are told if
    /// it is not made.
    unsafe fn on_stream(
        &self,
        stream: usize,
        owner: Option<Arc<dyn Any + Send + Sync>>,
        awaited: Option<&str>,
        call: &mut dyn FnMut() -> Result<()>,
    ) -> Result<()>;
    /// Whether what is put on a stream is recorded into a graph. False on the host backend.
    unsafe fn is_captured(&self, stream: usize) -> Result<bool>;
    /// Records a CUevent after all operations so far. Nothing is done on the host backend.
    unsafe fn record_event(&self, event: usize) -> Result<()>;
    /// Makes later operations wait for a CUevent. Nothing is done on the host backend.
    unsafe fn wait_for_event(&self, event: usize) -> Result<()>;

    /// Makes later work on a stream, a CUstream, wait for all operations so far. Nothing is done on the host backend.
    unsafe fn order_stream(&self, stream: usize) -> Result<()>;
    /// Keeps `owner` until the operations so far are complete.
    fn keep(&self, owner: Box<dyn Any + Send>);

    /// Allocates a matrix of zeros. It is freed when the second value is dropped and its operations are complete.
    fn zeros(
        &self,
        dtype: DType,
        shape: [usize; 2],
    ) -> Result<(Memory, Box<dyn Any + Send + Sync>)>;
    /// Allocates a sharded matrix. Collective.
    fn sharded(&self, dtype: DType, split: Split, k: usize) -> Result<AnyShards>;
    /// The memory of another library's tensor. `call` and `argument` are names for messages.
    unsafe fn memory_of(&self, call: &str, argument: &str, tensor: &DLTensor) -> Result<Memory>;
    /// Copies from the host, row by row, when everything that is on the group's stream is complete. `in_function`: the
    /// memory is rows that an operation's function has got, and the function runs. Then the copy only waits for the work
    /// on their stream.
    unsafe fn write(&self, to: Memory, bytes: &[u8], in_function: bool) -> Result<()>;
    /// Copies to the host, row by row, when [`AnyGroup::write`] would copy from it.
    unsafe fn read(&self, from: Memory, bytes: &mut [u8], in_function: bool) -> Result<()>;
    /// Copies a matrix to another of the same shape and type, after the earlier operations and before the later ones.
    unsafe fn copy(&self, from: Memory, to: Memory) -> Result<()>;

    /// Makes a product, as the short calls do. Collective unless it is [`ProductKind::Matmul`](super::ProductKind::Matmul).
    unsafe fn run(&self, product: &AnyProduct, call: &ProductCall) -> Result<()>;
    /// Plans a product, so that it can run many times.
    fn prepare(
        &self,
        product: &AnyProduct,
        rows: PreparedFor,
        widths: &[usize],
    ) -> Result<Box<dyn AnyPrepared>>;
    /// Whether the group can multiply such rows, [M, K], with weights of these N.
    fn supports(&self, product: &AnyProduct, rows: &RowSplit, widths: &[usize]) -> Result<()>;
    /// Quantises `x` to `out`, whose scales are the last argument.
    unsafe fn quantize(&self, x: Memory, out: Memory, scales: (Memory, Quantization))
    -> Result<()>;

    /// [`all_gather`](crate::all_gather). Collective.
    fn all_gather(&self, a: &AnyShards) -> Result<()>;
    /// [`broadcast`](crate::broadcast). Collective.
    fn broadcast(&self, a: &AnyShards, root: usize) -> Result<()>;
    /// [`reduce_scatter`](crate::reduce_scatter). Collective.
    unsafe fn reduce_scatter(&self, a: Memory, out: Memory) -> Result<()>;
    /// [`all_reduce`](crate::all_reduce). Collective.
    unsafe fn all_reduce(&self, a: Memory, out: &AnyShards) -> Result<()>;
    /// [`all_to_all`](crate::all_to_all). Collective. `counts`: as of
    /// [`all_to_all_with_counts`](crate::all_to_all_with_counts).
    unsafe fn all_to_all(&self, a: Memory, out: &AnyShards, counts: Option<&[usize]>)
    -> Result<()>;

    /// Gathers the rows of `a`, and calls `consume` for each chunk of them. Collective.
    fn all_gather_and_consume(
        &self,
        options: AllGatherAndConsume,
        a: &AnyShards,
        consume: &mut Consume,
    ) -> Result<()>;
    /// The sums go to `out`, of `m` rows in all.
    /// Adds the rows that `produce` makes on all ranks. Collective.
    unsafe fn produce_and_reduce_scatter(
        &self,
        options: ProduceAndReduceScatter,
        m: usize,
        out: Memory,
        produce: &mut Produce,
    ) -> Result<()>;
    /// Sends the rows that `produce` makes to their owners. Collective.
    fn produce_and_all_to_all(
        &self,
        options: ProduceAndAllToAll,
        out: &AnyShards,
        produce: &mut Produce,
    ) -> Result<()>;
}

/// Waits until the host can use a matrix. `in_function`: it is rows that an operation's function has got, which runs.
fn settle<B: Backend>(group: &Group<B>, in_function: bool) -> Result<()> {
    if !in_function {
        return group.settle();
    }
    #[cfg(feature = "cuda")]
    if let Some(group) = as_cuda(group) {
        let inner = group.inner();
        return group.noted(inner.backend.settle_callers(&inner.members));
    }
    // The rows are there when the function is called.
    Ok(())
}

/// The group, if its backend is CUDA.
#[cfg(feature = "cuda")]
fn as_cuda<B: Backend>(group: &Group<B>) -> Option<&Group<Cuda>> {
    (group as &dyn Any).downcast_ref()
}

/// A matrix that a call of a group reads, or the refusal of that call.
///
/// # Safety
/// As [`RawView::at`].
unsafe fn view<'g, B: Backend>(
    group: &'g Group<B>,
    call: &str,
    argument: &str,
    memory: Memory,
) -> Result<RawView<'g, B>> {
    // SAFETY: as this function's.
    unsafe { RawView::at(group, argument, memory) }.map_err(group.refusal(call))
}

/// A matrix that a call of a group writes, or the refusal of that call.
///
/// # Safety
/// As [`RawOutput::at`].
unsafe fn output<'g, B: Backend>(
    group: &'g Group<B>,
    call: &str,
    argument: &str,
    memory: Memory,
) -> Result<RawOutput<'g, B>> {
    // SAFETY: as this function's.
    unsafe { RawOutput::at(group, argument, memory) }.map_err(group.refusal(call))
}

/// A sharded argument as a call of a group takes it, or the refusal of that call.
fn raw<'s, B: AnyBackend>(
    group: &Group<B>,
    call: &str,
    argument: &str,
    shards: &'s AnyShards,
) -> Result<RawShards<'s, B>> {
    let raw = shards.raw(argument).and_then(|raw| {
        group.require_same(argument, raw.group)?;
        Ok(raw)
    });
    raw.map_err(group.refusal(call))
}

impl<B: AnyBackend> AnyGroup for Group<B> {
    fn rank(&self) -> usize {
        self.rank()
    }

    fn world_size(&self) -> usize {
        self.world_size()
    }

    fn name(&self) -> Option<&str> {
        self.name()
    }

    fn backend(&self) -> BackendKind {
        const CPU: i32 = 1;
        match self.device().device_type {
            CPU => BackendKind::Host,
            _ => BackendKind::Cuda,
        }
    }

    fn device(&self) -> DLDevice {
        let (device_type, device_id) = self.inner().backend.dlpack_device();
        DLDevice {
            device_type,
            device_id,
        }
    }

    fn row_alignment(&self) -> usize {
        B::ROW_ALIGNMENT.max(1)
    }

    fn even_rows(&self, m: usize) -> Vec<usize> {
        self.even_rows(m)
    }

    fn scale_columns(&self, scaling: Scaling, k: usize) -> usize {
        match scaling {
            Scaling::ShardedBlocks => crate::fp8::ShardedScales::<B>::columns_of_blocks(k),
            _ => crate::fp8::ShardedScales::<B>::columns_of_rows(),
        }
    }

    fn synchronize(&self) -> Result<()> {
        self.synchronize()
    }

    fn barrier(&self) -> Result<()> {
        self.barrier()
    }

    fn all_gather_bytes(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.all_gather_bytes(bytes)
    }

    fn wait_times(&self) -> Vec<Duration> {
        self.wait_times()
    }

    fn collect(&self, trace: &Trace) -> Result<Timeline> {
        Timeline::collect(self, trace)
    }

    fn check(&self) -> Result<()> {
        self.check()
    }

    fn is_in_function(&self) -> bool {
        self.is_in_callback()
    }

    fn fail(&self, reason: &str) -> Error {
        self.fail(reason)
    }

    fn refuse(&self, call: &str, argument: &str, found: [&str; 3]) -> Error {
        self.refusal(call)(unsuited(argument, found))
    }

    fn refuse_because(&self, call: &str, what: &str) -> Error {
        called_at(None, || self.refusal(call)(Error::unsupported(what)))
    }

    fn refuse_for(&self, call: &str, error: Error) -> Error {
        called_at(None, || self.refuse(call, error))
    }

    fn named(&self, error: Error) -> Error {
        self.inner().members.named(error)
    }

    fn split(&self, options: Options, color: usize, key: usize) -> Result<Arc<dyn AnyGroup>> {
        let part = options.builder().split(self, color, key)?;
        Ok(Arc::new(part))
    }

    fn stream(&self) -> usize {
        #[cfg(feature = "cuda")]
        if let Some(group) = as_cuda(self) {
            return group.stream() as usize;
        }
        0
    }

    unsafe fn set_stream(&self, stream: usize) -> Result<()> {
        let mut note = || {
            let set = self.inner().set_stream.lock();
            *set.unwrap_or_else(PoisonError::into_inner) = Some(stream);
            Ok(())
        };
        // SAFETY: as this function's.
        unsafe { self.on_stream(stream, None, None, &mut note) }
    }

    fn stream_that_was_set(&self) -> Option<usize> {
        // Each change is one assignment.
        let set = self.inner().set_stream.lock();
        *set.unwrap_or_else(PoisonError::into_inner)
    }

    unsafe fn on_stream(
        &self,
        stream: usize,
        owner: Option<Arc<dyn Any + Send + Sync>>,
        awaited: Option<&str>,
        call: &mut dyn FnMut() -> Result<()>,
    ) -> Result<()> {
        let told = |error: Error| match awaited {
            Some(name) => self.refuse_for(name, error),
            None => error,
        };
        let _turn = self.stream_turn().map_err(told)?;
        #[cfg(feature = "cuda")]
        if let Some(group) = as_cuda(self)
            && group.stream() as usize != stream
        {
            let owner = owner.unwrap_or_else(|| Arc::new(()));
            // SAFETY: as this function's.
            unsafe { group.set_stream_of(stream as _, owner) }.map_err(told)?;
            return call();
        }
        let _ = (stream, owner);
        call()
    }

    unsafe fn is_captured(&self, stream: usize) -> Result<bool> {
        #[cfg(feature = "cuda")]
        if let Some(group) = as_cuda(self) {
            // SAFETY: as this function's.
            return unsafe { group.is_captured(stream as _) };
        }
        let _ = stream;
        Ok(false)
    }

    unsafe fn record_event(&self, event: usize) -> Result<()> {
        #[cfg(feature = "cuda")]
        if let Some(group) = as_cuda(self) {
            // SAFETY: as this function's.
            return unsafe { group.record_event(event as _) };
        }
        let _ = event;
        Ok(())
    }

    unsafe fn wait_for_event(&self, event: usize) -> Result<()> {
        #[cfg(feature = "cuda")]
        if let Some(group) = as_cuda(self) {
            // SAFETY: as this function's.
            return unsafe { group.wait_for_event(event as _) };
        }
        let _ = event;
        Ok(())
    }

    unsafe fn order_stream(&self, stream: usize) -> Result<()> {
        #[cfg(feature = "cuda")]
        if let Some(group) = as_cuda(self)
            && group.stream() as usize != stream
        {
            // SAFETY: as this function's.
            return unsafe { group.order_stream(stream as _) };
        }
        let _ = stream;
        Ok(())
    }

    fn keep(&self, owner: Box<dyn Any + Send>) {
        let owner = Some(Owner::new(owner));
        // A buffer keeps its owner as long as the device uses it.
        // SAFETY: a buffer without rows has no memory.
        drop(unsafe { self.inner().backend.adopt(0, [0, 0], 0, owner) });
    }

    fn zeros(
        &self,
        dtype: DType,
        [rows, columns]: [usize; 2],
    ) -> Result<(Memory, Box<dyn Any + Send + Sync>)> {
        with_type!(dtype, T => {
            let matrix = self.zeros::<T>(rows, columns)?;
            let (address, pitch) = B::place(matrix.memory());
            let memory = Memory { address, dtype, shape: [rows, columns], pitch };
            Ok((memory, Box::new(matrix) as Box<dyn Any + Send + Sync>))
        })
    }

    fn sharded(&self, dtype: DType, split: Split, k: usize) -> Result<AnyShards> {
        shards::allocate(self, dtype, split, k)
    }

    unsafe fn memory_of(&self, call: &str, argument: &str, tensor: &DLTensor) -> Result<Memory> {
        // SAFETY: as this function's.
        let memory = unsafe { tensors::memory_of(tensor, AnyGroup::device(self), argument) };
        let checked = memory.and_then(|memory| {
            memory.check::<B>(argument)?;
            Ok(memory)
        });
        called_at(None, || self.judged(call, checked))
    }

    unsafe fn write(&self, to: Memory, bytes: &[u8], in_function: bool) -> Result<()> {
        let fits = to
            .check::<B>("the matrix")
            .and_then(|()| require_bytes(to, bytes));
        self.judged("Matrix::copy_from_host", fits)?;
        settle(self, in_function)?;
        let backend = &self.inner().backend;
        // SAFETY: as this function's.
        let mut buffer =
            unsafe { backend.adopt(to.address, [to.shape[0], to.width()], to.pitch, None) };
        self.noted(backend.write(&mut buffer, bytes))
    }

    unsafe fn read(&self, from: Memory, bytes: &mut [u8], in_function: bool) -> Result<()> {
        // SAFETY: as this function's.
        let view = unsafe { RawView::at(self, "the matrix", from) };
        let view = view.and_then(|view| {
            require_bytes(from, bytes)?;
            Ok(view)
        });
        let view = self.judged("Matrix::copy_to_host", view)?;
        settle(self, in_function)?;
        self.noted(
            self.inner()
                .backend
                .read(&view.input(), from.width(), bytes),
        )
    }

    unsafe fn copy(&self, from: Memory, to: Memory) -> Result<()> {
        // SAFETY: as this function's.
        let both = unsafe {
            RawView::at(self, "the source", from)
                .and_then(|source| Ok((source, RawOutput::at(self, "the target", to)?)))
        };
        let both = both.and_then(|both| {
            require_shape("the source", to.shape, from.shape)?;
            require_alike(from.dtype, to.dtype)?;
            Ok(both)
        });
        let checked = both.and_then(|(source, target)| {
            let (source, target) = (source.input(), target.bound);
            let [rows, columns] = from.shape;
            let spec = MatrixSpec::new(from.dtype, rows, columns);
            let is_done = check_copy(&source, &target, &spec)?;
            Ok((source, target, is_done))
        });
        let (source, target, is_done) = self.judged("Matrix::copy_from", checked)?;
        let (rows, width) = (from.shape[0], from.width());
        let backend = &self.inner().backend;
        self.exclusively(|_| {
            if is_done {
                Ok(())
            } else {
                backend.copy(&source, &target, rows, width)
            }
        })
    }

    unsafe fn run(&self, product: &AnyProduct, call: &ProductCall) -> Result<()> {
        // SAFETY: as this function's.
        unsafe { product::run(self, product, call) }
    }

    fn prepare(
        &self,
        product: &AnyProduct,
        rows: PreparedFor,
        widths: &[usize],
    ) -> Result<Box<dyn AnyPrepared>> {
        product::prepare(self, product, rows, widths)
    }

    fn supports(&self, product: &AnyProduct, rows: &RowSplit, widths: &[usize]) -> Result<()> {
        product::supports(self, product, rows, widths)
    }

    unsafe fn quantize(
        &self,
        x: Memory,
        out: Memory,
        (scales, quantization): (Memory, Quantization),
    ) -> Result<()> {
        const CALL: &str = "quantize";
        // SAFETY: as this function's.
        let all = unsafe {
            RawView::at(self, "x", x).and_then(|x| {
                let scales = quantized(self, scales, quantization)?;
                Ok((x, RawOutput::at(self, "out", out)?, scales))
            })
        };
        let (x, out, scales) = self.judged(CALL, all)?;
        quantize::run(x, out, scales)
    }

    fn all_gather(&self, a: &AnyShards) -> Result<()> {
        collectives::gather_rows(raw(self, "all_gather", "a", a)?)
    }

    fn broadcast(&self, a: &AnyShards, root: usize) -> Result<()> {
        collectives::broadcast_rows(raw(self, "broadcast", "a", a)?, root)
    }

    unsafe fn reduce_scatter(&self, a: Memory, out: Memory) -> Result<()> {
        const CALL: &str = "reduce_scatter";
        // SAFETY: as this function's.
        let (a, out) = unsafe { (view(self, CALL, "a", a)?, output(self, CALL, "out", out)?) };
        collectives::scatter_sums(a, out)
    }

    unsafe fn all_reduce(&self, a: Memory, out: &AnyShards) -> Result<()> {
        const CALL: &str = "all_reduce";
        // SAFETY: as this function's.
        let a = unsafe { view(self, CALL, "a", a)? };
        collectives::sum_for_all(a, raw(self, CALL, "out", out)?)
    }

    unsafe fn all_to_all(
        &self,
        a: Memory,
        out: &AnyShards,
        counts: Option<&[usize]>,
    ) -> Result<()> {
        const CALL: &str = "all_to_all";
        // SAFETY: as this function's.
        let a = unsafe { view(self, CALL, "a", a)? };
        collectives::exchange_blocks(a, raw(self, CALL, "out", out)?, counts)
    }

    fn all_gather_and_consume(
        &self,
        options: AllGatherAndConsume,
        a: &AnyShards,
        consume: &mut Consume,
    ) -> Result<()> {
        let raw = raw(self, "all_gather_and_consume", "a", a)?;
        super::pipelines::gather(options, raw, consume)
    }

    unsafe fn produce_and_reduce_scatter(
        &self,
        options: ProduceAndReduceScatter,
        m: usize,
        out: Memory,
        produce: &mut Produce,
    ) -> Result<()> {
        // SAFETY: as this function's.
        let out = unsafe { output(self, "produce_and_reduce_scatter", "out", out)? };
        let produce = super::pipelines::producer(produce);
        options.sum_into(m, out, None, produce)
    }

    fn produce_and_all_to_all(
        &self,
        options: ProduceAndAllToAll,
        out: &AnyShards,
        produce: &mut Produce,
    ) -> Result<()> {
        let raw = raw(self, "produce_and_all_to_all", "out", out)?;
        options.exchange(raw, super::pipelines::producer(produce))
    }
}

/// Checks that the host's bytes are as many as the matrix has, and not the matrix's own.
fn require_bytes(memory: Memory, bytes: &[u8]) -> Result<()> {
    let expected = memory.shape[0].saturating_mul(memory.width());
    if bytes.len() != expected {
        let what = format!("a matrix {}{:?}", memory.dtype, memory.shape);
        require_count(&what, "byte", expected, "the buffer", bytes.len())?;
    }
    let buffer = Place {
        address: bytes.as_ptr() as u64,
        rows: 1,
        width: bytes.len(),
        pitch: bytes.len(),
    };
    if memory.place().overlaps(&buffer) {
        Err(overlapping("the buffer", "partly that of the matrix"))
    } else {
        Ok(())
    }
}

/// The refusal of a tensor that is on `found` and not on the group's device.
pub fn wrong_device(group: &dyn AnyGroup, call: &str, argument: &str, found: DLDevice) -> Error {
    let [expected, found] = [group.device(), found].map(crate::interop::dlpack::device);
    unsuitable(group, call, argument, ["the device", &expected, &found])
}

/// An error of a door's own: an argument of `call` that no [`AnyGroup`] sees.
pub fn unsuitable(group: &dyn AnyGroup, call: &str, argument: &str, found: [&str; 3]) -> Error {
    group.named(
        unsuited(argument, found)
            .on(group.rank())
            .in_call(call.into()),
    )
}

/// An error of a door's own: `what` is wrong with an argument of `call`.
pub fn refused(group: &dyn AnyGroup, call: &str, what: &str) -> Error {
    group.named(
        Error::unsupported(what)
            .on(group.rank())
            .in_call(call.into()),
    )
}

/// `(property, expected, found)`.
fn unsuited(argument: &str, [what, expected, found]: [&str; 3]) -> Error {
    Error::unsuitable(format!("{what} of {argument}"), expected, found)
}
