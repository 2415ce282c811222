//! What differs between tensors on the CPU and tensors on a GPU.

#[cfg(feature = "cuda")]
mod cuda;
mod host;

use std::fmt::Debug;

use candle_core::{DType, Device as CandleDevice, Layout, Storage, Tensor, WithDType};
use gemmesh::error::{Call, Kind};
use gemmesh::{Backend, Error, F8E4M3, Group, Matrix, Result, ShardedMatrix, bf16, f16};

use crate::failure::Failure;
use crate::pools::{Pool, Pools};
use crate::products::MAKE;

/// A backend of gemmesh that works on candle's tensors: `Host` on those of the CPU, `Cuda` (feature `cuda`) on those of
/// a GPU. Sealed.
pub trait Device: Backend + Tensors {}

impl<B: Backend + Tensors> Device for B {}

/// Candle's tensors as gemmesh's matrices.
pub trait Tensors: Backend + Debug {
    /// Where tensors lie and operations run, in candle's terms.
    type Place: Send + Sync + Debug;
    /// What notes that a tensor has been read, when it is dropped.
    type Reading<'a>;
    /// A tensor that an operation writes.
    type Output<T: Value>;
    /// The memory of a tensor that is to be.
    type Memory<T: Value>;
    /// Keeps what the group does on candle's stream, as long as it lives.
    type Order;

    /// That of a device of candle's.
    fn place_of(group: &Group<Self>, device: &CandleDevice) -> Result<Self::Place>;

    /// Puts what the group does next after what candle has begun.
    fn enter(group: &Group<Self>, place: &Self::Place) -> Result<Self::Order>;

    /// Whether there may be rows of so many columns.
    fn check_columns<T: Value>(group: &Group<Self>, columns: usize) -> Result<()>;

    /// Whether the storage lies there, and so does its memory, if that is of this type.
    fn holds<T: Value>(place: &Self::Place, storage: &Storage) -> bool;

    /// How many elements of this type a tensor's memory has.
    fn length<T: Value>(storage: &Storage) -> usize;

    /// A tensor as an operand.
    fn input<'a, T: Value>(
        group: &Group<Self>,
        place: &'a Self::Place,
        rows: &Rows<'a>,
    ) -> Result<Input<'a, Self, T>, Failure>;

    /// A tensor to be written, all of it.
    fn output<T: Value>(
        group: &Group<Self>,
        place: &Self::Place,
        shape: [usize; 2],
    ) -> Result<Self::Output<T>, Failure>;

    /// Where it is written.
    fn matrix<T: Value>(output: &mut Self::Output<T>) -> &mut Matrix<Self, T>;

    /// The tensor, when what writes it has been begun.
    fn finish<T: Value>(place: &Self::Place, output: Self::Output<T>) -> Result<Tensor, Failure>;

    /// Copies a tensor to this rank's own rows.
    fn put<T: Value>(
        group: &Group<Self>,
        place: &Self::Place,
        rows: &Rows<'_>,
        to: &mut ShardedMatrix<Self, T>,
    ) -> Result<(), Failure>;

    /// Memory for [`Tensors::take`].
    fn allocate<T: Value>(
        place: &Self::Place,
        shape: [usize; 2],
    ) -> Result<Self::Memory<T>, Failure>;

    /// Copies all rows to a tensor in `to`.
    fn take<T: Value>(
        place: &Self::Place,
        from: &mut ShardedMatrix<Self, T>,
        to: Self::Memory<T>,
    ) -> Result<Tensor, Failure>;
}

/// The types of elements of tensors that are matrices too.
pub trait Value: gemmesh::elements::Value + WithDType + OnDevice {
    /// The symmetric matrices of this type.
    fn pool<B: Backend>(pools: &Pools<B>) -> &Pool<B, Self>;
}

/// The types of tokens: bf16 and f16.
pub trait Half: gemmesh::elements::Half + Value {}

impl Half for bf16 {}
impl Half for f16 {}

/// The pool of each type.
macro_rules! values {
    ($($type:ident $pool:ident),+) => {$(
        impl Value for $type {
            fn pool<B: Backend>(pools: &Pools<B>) -> &Pool<B, $type> {
                &pools.$pool
            }
        }

        impl OnDevice for $type {}
    )+};
}

values!(bf16 bf16, f16 f16, F8E4M3 f8e4m3, f32 f32);

/// What a type on a GPU must be.
#[cfg(feature = "cuda")]
pub trait OnDevice:
    candle_core::cuda::CudaDType + candle_core::cuda::cudarc::driver::DeviceRepr
{
}
#[cfg(not(feature = "cuda"))]
pub trait OnDevice {}

/// The operand that a tensor is.
pub struct Input<'a, B: Tensors, T> {
    pub matrix: Matrix<B, T>,
    _reading: B::Reading<'a>,
}

/// A tensor of the right device, type and shape, as rows of memory, which holds them. All but `storage` counts
/// elements.
pub struct Rows<'a> {
    storage: &'a Storage,
    rows: usize,
    columns: usize,
    offset: usize,
    /// From row to row: no less than the columns.
    pitch: usize,
}

impl<'a> Rows<'a> {
    /// Checks a tensor that should be [rows, columns], with as many leading dimensions of 1 as it likes.
    pub fn new<B: Tensors, T: Value>(
        group: &Group<B>,
        place: &B::Place,
        argument: &str,
        (storage, layout): (&'a Storage, &Layout),
        shape: [usize; 2],
    ) -> Result<Rows<'a>> {
        let rank = group.rank();
        let unsuitable = |unfit: Unfit| {
            let what = format!("{} of {argument}", unfit.what);
            let error = Error::unsuitable(what, unfit.expected, unfit.found);
            error.on(rank).in_call(Call::here(MAKE))
        };
        check_kind::<B, T>(place, storage).map_err(unsuitable)?;
        let dims = layout.dims();
        let leading = dims.len().saturating_sub(2);
        if dims[leading..] != shape || dims[..leading].iter().any(|&dim| dim != 1) {
            return Err(Kind::Shape {
                argument: argument.into(),
                expected: shape.into(),
                found: dims.into(),
            }
            .on(rank)
            .in_call(Call::here(MAKE)));
        }
        let [rows, columns] = shape;
        let checked = Rows {
            storage,
            rows,
            columns,
            offset: layout.start_offset(),
            pitch: pitch_of(&layout.stride()[leading..], shape).map_err(unsuitable)?,
        };
        let length = B::length::<T>(storage);
        checked.check_length(length).map_err(unsuitable)?;
        Ok(checked)
    }

    /// A tensor may be made of any storage, whatever its shape.
    fn check_length(&self, length: usize) -> Result<(), Unfit> {
        let end = match self.rows {
            0 => 0,
            rows => (rows - 1)
                .saturating_mul(self.pitch)
                .saturating_add(self.columns)
                .saturating_add(self.offset),
        };
        if end > length {
            return Err(Unfit {
                what: "the storage",
                found: format!("{length} elements"),
                expected: format!("{end} elements at least, as its shape says"),
            });
        }
        Ok(())
    }
}

/// What of a tensor does not fit.
struct Unfit {
    what: &'static str,
    found: String,
    expected: String,
}

/// The device and the dtype.
fn check_kind<B: Tensors, T: Value>(place: &B::Place, storage: &Storage) -> Result<(), Unfit> {
    if !B::holds::<T>(place, storage) {
        let found = match storage {
            Storage::Cpu(_) => "the CPU",
            Storage::Cuda(_) => "CUDA, of another GPU or stream",
            Storage::Metal(_) => "Metal",
        };
        return Err(Unfit {
            what: "the device",
            found: found.into(),
            expected: format!("{place:?}, where the group's tensors are"),
        });
    }
    let expected = <T as WithDType>::DTYPE;
    if storage.dtype() != expected {
        return Err(Unfit {
            what: "the dtype",
            found: format!("{:?}", storage.dtype()),
            expected: format!("{expected:?}, as of the weight"),
        });
    }
    Ok(())
}

/// Elements from row to row. Of one row that stride says nothing, and without rows no stride does.
fn pitch_of(strides: &[usize], [rows, columns]: [usize; 2]) -> Result<usize, Unfit> {
    let pitch = match rows {
        0 => return Ok(columns),
        1 => columns,
        _ => strides[0],
    };
    if pitch < columns || columns > 1 && strides[1] != 1 {
        return Err(Unfit {
            what: "the strides",
            found: format!("{strides:?}"),
            expected: format!(
                "[{columns}, 1], or [more, 1], in elements; Tensor::contiguous makes a copy that is"
            ),
        });
    }
    Ok(pitch)
}

/// The error of a type that there are no products of.
pub fn no_such_dtype(rank: usize, argument: &str, expected: &str, found: DType) -> Error {
    let what = format!("the dtype of {argument}");
    let error = Error::unsuitable(what, expected, format!("{found:?}"));
    error.on(rank).in_call(Call::here(MAKE))
}

/// The error of a device that is not the group's.
fn other_device(rank: usize, found: &CandleDevice, expected: &str) -> Error {
    let found = match found {
        CandleDevice::Cpu => "the CPU",
        CandleDevice::Cuda(_) => "CUDA",
        CandleDevice::Metal(_) => "Metal",
    };
    let error = Error::unsuitable("the device of the tensors", expected, found);
    error.on(rank).in_call(Call::here("TensorParallel::new"))
}
