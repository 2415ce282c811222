//! Interop with cudarc: its streams, events and memory.
#![allow(unsafe_code)]

use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::Arc;

use cudarc::driver::{
    CudaEvent, CudaSlice, CudaStream, CudaView, CudaViewMut, DevicePtr, DevicePtrMut, DeviceSlice,
    SyncOnDrop,
};

use crate::backend::Cuda;
use crate::element::{AddendOf, Element, OutputOf, Value, WeightOf};
#[cfg(doc)]
use crate::error::Kind;
use crate::error::{Error, Result, require_elements};
use crate::group::Group;
use crate::interop::stream::{PER_THREAD, StreamGuard};
use crate::matrix::{Matrix, MatrixView, MatrixViewMut, bytes_of};
use crate::ops::{AddendView, Operand, Outputs, Weights};
use crate::schedule::limits::require;

mod memory {
    /// Memory that keeps its stream and is freed in the stream's order. Other memory of cudarc, and other types that
    /// implement its traits, may do neither.
    pub trait OrderedByItsStream {}
}

use memory::OrderedByItsStream;

impl<T> OrderedByItsStream for CudaSlice<T> {}
impl<T> OrderedByItsStream for CudaView<'_, T> {}
impl<T> OrderedByItsStream for CudaViewMut<'_, T> {}

/// Streams and events of cudarc.
#[cfg_attr(docsrs, doc(cfg(feature = "cudarc")))]
impl Group<Cuda> {
    /// Puts later operations on a stream of cudarc, which the group keeps as long as it uses it.
    ///
    /// They begin after the stream's earlier work, and its later work begins after them.
    ///
    /// A graph that is captured from the stream holds only addresses. Keep the group and the matrices until the graph
    /// is dropped: cudarc's `CudaGraph::launch` is a safe function, but it cannot see whether they live.
    ///
    /// ```no_run
    /// # fn use_stream(group: gemmesh::Group<gemmesh::Cuda>) -> Result<(), Box<dyn std::error::Error>> {
    /// let stream = cudarc::driver::CudaContext::new(group.device_ordinal())?.new_stream()?;
    /// group.use_cudarc_stream(&stream)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Kind::Unsuitable`] if the stream is not of the GPU's primary context, if it is the default stream of each
    /// thread, or while matrices lie in memory of the current stream ([`CudarcMatrix`]); as [`Group::set_stream`].
    #[track_caller]
    pub fn use_cudarc_stream(&self, stream: &Arc<CudaStream>) -> Result<()> {
        let check = || {
            self.require_context("the stream", stream.context().cu_ctx().cast())?;
            if stream.cu_stream().addr() == PER_THREAD {
                return Err(Error::unsuitable(
                    "the handle of the stream",
                    "one stream, whichever thread uses it",
                    "CU_STREAM_PER_THREAD",
                ));
            }
            Ok(())
        };
        check().map_err(Error::of(self.rank(), "Group::use_cudarc_stream"))?;
        let owner = Arc::new(stream.clone());
        // SAFETY: it is of the device's primary context, and lives as long as what is kept.
        unsafe { self.set_stream_of(stream.cu_stream().cast(), owner) }
    }

    /// Records an event of cudarc after all operations so far. Other streams, or the host, can wait for it.
    ///
    /// # Errors
    /// [`Kind::Unsuitable`] if the event is not of the GPU's primary context; [`Kind::Device`] if the driver refuses;
    /// the group's failure.
    #[track_caller]
    pub fn record_cudarc_event(&self, event: &CudaEvent) -> Result<()> {
        self.require_context("the event", event.context().cu_ctx().cast())
            .map_err(Error::of(self.rank(), "Group::record_cudarc_event"))?;
        // SAFETY: it is of the device's primary context and lives.
        unsafe { self.record_event(event.cu_event().cast()) }
    }

    /// Makes all later operations wait, on the device, for the last recording of an event of cudarc, on any GPU. The
    /// event may be dropped after this call.
    ///
    /// # Errors
    /// [`Kind::Device`] if the driver refuses; the group's failure.
    pub fn wait_for_cudarc_event(&self, event: &CudaEvent) -> Result<()> {
        // SAFETY: it lives.
        unsafe { self.wait_for_event(event.cu_event().cast()) }
    }

    fn require_context(&self, argument: &str, context: *mut std::ffi::c_void) -> Result<()> {
        let device = &self.inner().backend.gpu().device;
        if device.context() == context {
            return Ok(());
        }
        Err(Error::unsuitable(
            format!("the context of {argument}"),
            format!("the primary one of GPU {}", device.ordinal()),
            "another",
        ))
    }
}

/// A matrix that borrows memory of cudarc, a `CudaSlice` or a `CudaView`.
///
/// The memory's stream must be the one that the group's operations are put on ([`Group::use_cudarc_stream`]). Then
/// cudarc's later uses of the memory, and its freeing, come after the operations, and no host waits. While the matrix
/// lives, the group cannot change its stream.
///
/// When the matrix is dropped, it tells cudarc, so that cudarc's other streams wait too. A matrix that is leaked
/// (`mem::forget`) does not: then a different stream reads meaningless numbers unless it waits by an event, as with
/// cudarc's own guards. Even then nothing is freed too early, because the memory is freed in the order of its stream.
///
/// ```no_run
/// # use cudarc::driver::CudaSlice;
/// # use gemmesh::{Cuda, Group, bf16};
/// # type Slice = CudaSlice<bf16>;
/// # fn multiply(
/// #     group: Group<Cuda>, a: &Slice, b: &Slice, out: &mut Slice, [m, n, k]: [usize; 3],
/// # ) -> gemmesh::Result<()> {
/// use gemmesh::interop::{CudarcMatrix, CudarcMatrixMut};
/// use gemmesh::Matmul;
///
/// group.use_cudarc_stream(a.stream())?;
/// let a = CudarcMatrix::new(&group, a, m, k)?;
/// let b = CudarcMatrix::new(&group, b, n, k)?;
/// let mut out = CudarcMatrixMut::new(&group, out, m, n)?;
/// Matmul::new().run(&a, &b, &mut out)
/// # }
/// ```
#[cfg_attr(docsrs, doc(cfg(feature = "cudarc")))]
pub struct CudarcMatrix<'a, T: Value> {
    matrix: Matrix<Cuda, T>,
    _stream: StreamGuard,
    /// When it is dropped, after the operations that use the matrix, it tells cudarc that the memory is read.
    _read: SyncOnDrop<'a>,
}

/// A matrix that mutably borrows memory of cudarc, a `CudaSlice` or a `CudaViewMut`, for an output.
///
/// [`CudarcMatrix`] has an example, and says what holds of both.
#[cfg_attr(docsrs, doc(cfg(feature = "cudarc")))]
pub struct CudarcMatrixMut<'a, T: Value> {
    matrix: Matrix<Cuda, T>,
    _stream: StreamGuard,
    _written: SyncOnDrop<'a>,
}

impl<'a, T: Value> CudarcMatrix<'a, T> {
    /// A [rows, columns] matrix, row by row, in memory of as many elements.
    ///
    /// # Errors
    /// [`Kind::Unsuitable`] unless the memory's context and stream are the group's, and unless it has
    /// rows · columns elements, and unless the memory and each row begin at a multiple of 16 bytes;
    /// [`Kind::Limit`] if there are no columns and the type is not f32, or more rows or columns than 2³¹ - 1.
    #[track_caller]
    pub fn new<S: DevicePtr<T> + OrderedByItsStream>(
        group: &Group<Cuda>,
        memory: &'a S,
        rows: usize,
        columns: usize,
    ) -> Result<Self> {
        let of = Error::of(group.rank(), "CudarcMatrix::new");
        let guard = hold_stream(group, memory, rows, columns).map_err(of)?;
        let (ptr, read) = memory.device_ptr(memory.stream());
        Ok(CudarcMatrix {
            // SAFETY: the memory has as many elements and is borrowed as long as this matrix lives. Later uses of the
            // memory come after the operations, in the order of its stream.
            matrix: unsafe { of_memory(group, ptr, rows, columns) }.map_err(of)?,
            _stream: guard,
            _read: read,
        })
    }

    /// The matrix as an operand.
    pub fn view(&self) -> MatrixView<'_, Cuda, T> {
        self.matrix.view()
    }
}

impl<'a, T: Value> CudarcMatrixMut<'a, T> {
    /// As [`CudarcMatrix::new`].
    ///
    /// # Errors
    /// As [`CudarcMatrix::new`].
    #[track_caller]
    pub fn new<S: DevicePtrMut<T> + OrderedByItsStream>(
        group: &Group<Cuda>,
        memory: &'a mut S,
        rows: usize,
        columns: usize,
    ) -> Result<Self> {
        let of = Error::of(group.rank(), "CudarcMatrixMut::new");
        let guard = hold_stream(group, memory, rows, columns).map_err(of)?;
        let stream = memory.stream().clone();
        let (ptr, written) = memory.device_ptr_mut(&stream);
        // SAFETY: `written` borrows the stream that the memory keeps. So the stream lives as long as the memory is
        // borrowed.
        let written = unsafe { std::mem::transmute::<SyncOnDrop<'_>, SyncOnDrop<'a>>(written) };
        Ok(CudarcMatrixMut {
            // SAFETY: as in `CudarcMatrix::new`.
            matrix: unsafe { of_memory(group, ptr, rows, columns) }.map_err(of)?,
            _stream: guard,
            _written: written,
        })
    }

    /// The matrix as an output.
    pub fn view_mut(&mut self) -> MatrixViewMut<'_, Cuda, T> {
        self.matrix.view_mut()
    }
}

/// Rows of the library's matrices, as memory of cudarc.
#[cfg_attr(docsrs, doc(cfg(feature = "cudarc")))]
impl<T: Value> MatrixView<'_, Cuda, T> {
    /// Calls `f` with the rows as memory of cudarc, for kernels and copies that read them.
    ///
    /// `stream` must be the group's stream ([`Group::use_cudarc_stream`]). What `f` puts on it follows the group's
    /// earlier operations. cudarc's events order its other streams: they begin after the earlier operations, and the
    /// group's later operations wait for them.
    ///
    /// # Errors
    /// [`Kind::Unsuitable`] unless `stream` is the group's; [`Kind::Unsupported`] unless the rows follow one another
    /// without padding; the group's failure.
    #[track_caller]
    pub fn with_cudarc<R>(
        &self,
        stream: &Arc<CudaStream>,
        f: impl FnOnce(CudaView<'_, T>) -> R,
    ) -> Result<R> {
        lend(self, stream, |memory| f(memory.as_view()))
    }
}

/// Rows of the library's matrices, as memory of cudarc that is written.
#[cfg_attr(docsrs, doc(cfg(feature = "cudarc")))]
impl<T: Value> MatrixViewMut<'_, Cuda, T> {
    /// As [`MatrixView::with_cudarc`], for kernels and copies that write the rows, for example those that a gather
    /// sends next.
    ///
    /// ```no_run
    /// # use std::sync::Arc;
    /// # use cudarc::driver::{CudaSlice, CudaStream};
    /// # use gemmesh::{Cuda, ShardedMatrix, all_gather, bf16};
    /// # type Outcome = Result<(), Box<dyn std::error::Error>>;
    /// fn send(
    ///     x: &mut ShardedMatrix<Cuda, bf16>,
    ///     normed: &CudaSlice<bf16>,
    ///     stream: &Arc<CudaStream>,
    /// ) -> Outcome {
    ///     let mut own = x.shard_mut().view_mut()?;
    ///     own.with_cudarc(stream, |mut rows| stream.memcpy_dtod(normed, &mut rows))??;
    ///     Ok(all_gather(x)?)
    /// }
    /// ```
    ///
    /// # Errors
    /// As [`MatrixView::with_cudarc`].
    #[track_caller]
    pub fn with_cudarc<R>(
        &mut self,
        stream: &Arc<CudaStream>,
        f: impl FnOnce(CudaViewMut<'_, T>) -> R,
    ) -> Result<R> {
        lend(&self.as_view(), stream, |memory| f(memory.as_view_mut()))
    }
}

/// Memory of this library that cudarc uses for a while. cudarc never frees it.
struct Lent<T> {
    memory: ManuallyDrop<CudaSlice<T>>,
}

impl<T> Drop for Lent<T> {
    // Also if the caller's function has panicked.
    fn drop(&mut self) {
        // SAFETY: the value is not used again. Leaking it makes its stream wait for cudarc's other streams, and gives
        // back all but the memory.
        unsafe { ManuallyDrop::take(&mut self.memory) }.leak();
    }
}

/// Lends the memory of a view to `f`.
///
/// A function instead of a guard: no one can leak it, so the group's stream always waits for what `f` has begun on
/// cudarc's other streams, before the memory can be freed.
#[track_caller]
fn lend<T: Value, R>(
    view: &MatrixView<'_, Cuda, T>,
    stream: &Arc<CudaStream>,
    f: impl FnOnce(&mut CudaSlice<T>) -> R,
) -> Result<R> {
    let group = view.group();
    let [rows, columns] = view.shape();
    let (first, pitch) = view.as_device_ptr();
    let hold = || {
        let what = format!("rows must follow one another, but they are {pitch} bytes apart");
        require(&what, rows <= 1 || pitch == columns * size_of::<T>())?;
        hold(group, "this call", stream)
    };
    let _guard = group.judged("with_cudarc", hold())?;
    // SAFETY: the view borrows this memory, which has as many elements and is initialised. `Lent` leaks the slice.
    let memory = unsafe { stream.upgrade_device_ptr(first, rows * columns) };
    let mut lent = Lent {
        memory: ManuallyDrop::new(memory),
    };
    // cudarc's other streams wait for this use of the memory, and so for the group's operations so far.
    drop(lent.memory.device_ptr_mut(stream));
    Ok(f(&mut lent.memory))
}

/// Keeps the group's operations on `stream`, which must be theirs, until the guard is dropped.
fn hold(group: &Group<Cuda>, argument: &str, stream: &Arc<CudaStream>) -> Result<StreamGuard> {
    // The default streams of all contexts have the same handle, so the context is compared too.
    group.require_context(argument, stream.context().cu_ctx().cast())?;
    group.exclusively(|_| {
        let (own, groups) = (stream.cu_stream().cast(), group.stream());
        if own == groups {
            return Ok(Ok(group.guard_stream()));
        }
        Ok(Err(Error::unsuitable(
            format!("the stream of {argument}"),
            format!("the group's, {groups:p}: see Group::use_cudarc_stream"),
            format!("{own:p}"),
        )))
    })?
}

/// Checks memory for a matrix. The group's operations stay on the memory's stream until the guard is dropped.
fn hold_stream<T: Value>(
    group: &Group<Cuda>,
    memory: &impl DeviceSlice<T>,
    rows: usize,
    columns: usize,
) -> Result<StreamGuard> {
    bytes_of::<T>(rows, columns)?;
    require_elements([rows, columns], "the memory", memory.len())?;
    hold(group, "the memory of a matrix", memory.stream())
}

/// # Safety
/// As [`Matrix::from_device_ptr`]: rows follow one another.
unsafe fn of_memory<T: Value>(
    group: &Group<Cuda>,
    ptr: u64,
    rows: usize,
    columns: usize,
) -> Result<Matrix<Cuda, T>> {
    let pitch = columns * size_of::<T>();
    // SAFETY: as this function's.
    unsafe { Matrix::of_device_ptr(group, ptr, [rows, columns], pitch) }
}

impl<'m, T: Value> From<&'m CudarcMatrix<'_, T>> for MatrixView<'m, Cuda, T> {
    fn from(matrix: &'m CudarcMatrix<'_, T>) -> Self {
        matrix.view()
    }
}

impl<'m, T: Element> From<&'m CudarcMatrix<'_, T>> for Operand<'m, Cuda, T> {
    fn from(matrix: &'m CudarcMatrix<'_, T>) -> Self {
        matrix.view().into()
    }
}

impl<'m, T: Element, W: WeightOf<T>> From<&'m CudarcMatrix<'_, W>> for Weights<'m, Cuda, T> {
    fn from(matrix: &'m CudarcMatrix<'_, W>) -> Self {
        matrix.view().into()
    }
}

impl<'m, 's, T: Element, W: WeightOf<T>, const N: usize> From<[&'m CudarcMatrix<'s, W>; N]>
    for Weights<'m, Cuda, T>
{
    fn from(matrices: [&'m CudarcMatrix<'s, W>; N]) -> Self {
        matrices.map(CudarcMatrix::view).into()
    }
}

impl<'m, T: Element, V: AddendOf<T>> From<&'m CudarcMatrix<'_, V>> for AddendView<'m, Cuda, T> {
    fn from(matrix: &'m CudarcMatrix<'_, V>) -> Self {
        matrix.view().into()
    }
}

impl<'m, T: Element, O: OutputOf<T>> From<&'m mut CudarcMatrixMut<'_, O>> for Outputs<'m, Cuda, T> {
    fn from(matrix: &'m mut CudarcMatrixMut<'_, O>) -> Self {
        matrix.view_mut().into()
    }
}

impl<T: Value> fmt::Debug for CudarcMatrix<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "CudarcMatrix({:?})", self.matrix)
    }
}

impl<T: Value> fmt::Debug for CudarcMatrixMut<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "CudarcMatrixMut({:?})", self.matrix)
    }
}
