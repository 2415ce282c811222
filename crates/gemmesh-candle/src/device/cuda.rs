//! Tensors of a GPU: operations stand on candle's stream and use candle's memory where it lies.
#![allow(unsafe_code)]

use std::fmt;
use std::sync::Arc;

use candle_core::cuda::cudarc::driver::result::memcpy_dtod_async;
use candle_core::cuda::cudarc::driver::{
    CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DriverError, SyncOnDrop,
};
use candle_core::cuda::{CudaDevice, CudaStorage};
use candle_core::op::BackpropOp;
use candle_core::{Device as CandleDevice, Error as CandleError, Storage, Tensor};
use gemmesh::{Cuda, Error, Group, Matrix, Result, ShardedMatrix};

use super::{Half, Input, Rows, Tensors, other_device};
use crate::failure::Failure;

/// A GPU of candle's, and the stream that candle puts its work on.
pub struct Gpu {
    device: CudaDevice,
    stream: Arc<CudaStream>,
}

/// Memory of candle's that an operation writes.
pub struct Output<T: Half> {
    matrix: Matrix<Cuda, T>,
    slice: CudaSlice<T>,
}

/// CU_STREAM_PER_THREAD.
const PER_THREAD: usize = 2;

impl Gpu {
    /// Copies `bytes` behind all that is on the stream.
    ///
    /// # Safety
    /// Both are memory of the GPU of so many bytes, which stays allocated in the stream's order.
    unsafe fn copy(&self, to: u64, from: u64, bytes: usize) -> Result<(), Failure> {
        if bytes == 0 {
            return Ok(());
        }
        self.stream.context().bind_to_thread().map_err(refused)?;
        // SAFETY: as this function's.
        unsafe { memcpy_dtod_async(to, from, bytes, self.stream.cu_stream()) }.map_err(refused)
    }

    fn tensor<T: Half>(&self, mut slice: CudaSlice<T>, [rows, columns]: [usize; 2]) -> Tensor {
        // What was put on the stream writes it: users on other streams wait for that.
        drop(slice.device_ptr_mut(&self.stream));
        let storage = CudaStorage::wrap_cuda_slice(slice, self.device.clone());
        let storage = Storage::Cuda(storage);
        Tensor::from_storage(storage, (rows, columns), BackpropOp::none(), false)
    }

    fn allocate<T: Half>(&self, [rows, columns]: [usize; 2]) -> Result<CudaSlice<T>, Failure> {
        // SAFETY: an operation writes all of it before anybody reads it.
        Ok(unsafe { self.device.alloc((rows * columns).max(1))? })
    }
}

impl fmt::Debug for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "GPU {}", self.stream.context().ordinal())
    }
}

impl Tensors for Cuda {
    type Place = Gpu;
    type Reading<'a> = Option<SyncOnDrop<'a>>;
    type Output<T: Half> = Output<T>;

    fn place_of(group: &Group<Cuda>, device: &CandleDevice) -> Result<Gpu> {
        let ordinal = group.device_ordinal();
        let expected = format!("the group's GPU, Device::new_cuda_with_stream({ordinal})");
        let CandleDevice::Cuda(cuda) = device else {
            return Err(other_device(group.rank(), device, &expected));
        };
        let stream = cuda.cuda_stream();
        let unsuitable = |what: &str, found: String| Error::Unsuitable {
            rank: group.rank(),
            argument: "a TensorParallel".into(),
            what: what.into(),
            expected: expected.clone(),
            found,
        };
        let found = stream.context().ordinal();
        if found != ordinal {
            return Err(unsuitable("the device", format!("GPU {found}")));
        }
        // It is another stream for each thread, so calls of two threads, or of the library's own, would have no order.
        if stream.cu_stream().addr() == PER_THREAD {
            let found = "on each thread's default stream, as Device::new_cuda makes it";
            return Err(unsuitable("the device", found.into()));
        }
        Ok(Gpu {
            device: cuda.clone(),
            stream,
        })
    }

    fn enter(group: &Group<Cuda>, place: &Gpu) -> Result<()> {
        let stream = place.stream.cu_stream().cast();
        if group.stream() == stream {
            return Ok(());
        }
        // SAFETY: the stream is destroyed when its last owner is dropped.
        unsafe { group.set_stream_of(stream, place.stream.clone()) }
    }

    fn holds(place: &Gpu, storage: &Storage) -> bool {
        let Storage::Cuda(storage) = storage else {
            return false;
        };
        let stream = storage.device.cuda_stream();
        stream.cu_stream() == place.stream.cu_stream()
            && stream.context().ordinal() == place.stream.context().ordinal()
    }

    fn input<'a, T: Half>(
        group: &Group<Cuda>,
        place: &'a Gpu,
        rows: &Rows<'a>,
    ) -> Result<Input<'a, Cuda, T>, Failure> {
        if rows.rows == 0 {
            let matrix = group.zeros(0, rows.columns)?;
            return Ok(Input {
                matrix,
                _reading: None,
            });
        }
        require_whole_pieces::<T>(group, rows.columns)?;
        let (slice, offset) = slice::<T>(rows)?;
        let (pointer, reading) = slice.device_ptr(&place.stream);
        // SAFETY: candle's layout lies within its storage. Rows are whole pieces of 16 bytes. The tensor is freed in the order of candle's
        // stream, which operations stand on, and so are writes to it.
        let matrix = unsafe {
            Matrix::from_device_ptr(
                group,
                pointer + offset,
                rows.rows,
                rows.columns,
                rows.pitch * size_of::<T>(),
            )?
        };
        Ok(Input {
            matrix,
            _reading: Some(reading),
        })
    }

    fn output<T: Half>(
        group: &Group<Cuda>,
        place: &Gpu,
        [rows, columns]: [usize; 2],
    ) -> Result<Output<T>, Failure> {
        require_whole_pieces::<T>(group, columns)?;
        let mut slice = place.allocate::<T>([rows, columns])?;
        let matrix = match rows {
            0 => group.zeros(0, columns)?,
            _ => {
                let (pointer, _) = slice.device_ptr_mut(&place.stream);
                let pitch = columns * size_of::<T>();
                // SAFETY: the slice has as many elements, which nobody else knows yet, in whole pieces of 16 bytes. It is freed in the
                // order of candle's stream, which operations stand on.
                unsafe { Matrix::from_device_ptr(group, pointer, rows, columns, pitch)? }
            }
        };
        Ok(Output { matrix, slice })
    }

    fn matrix<T: Half>(output: &mut Output<T>) -> &mut Matrix<Cuda, T> {
        &mut output.matrix
    }

    fn finish<T: Half>(place: &Gpu, output: Output<T>) -> Result<Tensor, Failure> {
        Ok(place.tensor(output.slice, output.matrix.shape()))
    }

    fn put<T: Half>(
        place: &Gpu,
        rows: &Rows<'_>,
        to: &mut ShardedMatrix<Cuda, T>,
    ) -> Result<(), Failure> {
        let (slice, offset) = slice::<T>(rows)?;
        let (from, _reading) = slice.device_ptr(&place.stream);
        let (from, width) = (from + offset, rows.columns * size_of::<T>());
        let pitch = rows.pitch * size_of::<T>();
        let to = to.as_device_ptr() + (to.rows().start * width) as u64;
        if pitch == width {
            // SAFETY: the own rows are as many as the tensor's, and free once the stream has done what stands on it.
            return unsafe { place.copy(to, from, rows.rows * width) };
        }
        for row in 0..rows.rows {
            // SAFETY: likewise, row by row.
            unsafe {
                place.copy(
                    to + (row * width) as u64,
                    from + (row * pitch) as u64,
                    width,
                )?
            };
        }
        Ok(())
    }

    fn take<T: Half>(place: &Gpu, from: &mut ShardedMatrix<Cuda, T>) -> Result<Tensor, Failure> {
        let [rows, columns] = from.shape();
        let mut slice = place.allocate::<T>([rows, columns])?;
        let (to, _) = slice.device_ptr_mut(&place.stream);
        let bytes = rows * columns * size_of::<T>();
        // SAFETY: the matrix is so large, and the operations before, on the same stream, have filled it.
        unsafe { place.copy(to, from.as_device_ptr(), bytes)? };
        Ok(place.tensor(slice, [rows, columns]))
    }
}

/// Candle's memory, and where in it the rows begin, in bytes.
fn slice<'a, T: Half>(rows: &Rows<'a>) -> Result<(&'a CudaSlice<T>, u64), Failure> {
    let Storage::Cuda(storage) = rows.storage else {
        unreachable!("the storage has been checked");
    };
    let offset = rows.offset * size_of::<T>();
    Ok((storage.as_cuda_slice::<T>()?, offset as u64))
}

/// Rows are read and written in pieces of 16 bytes: what is no whole number of them would reach beyond candle's memory.
fn require_whole_pieces<T: Half>(group: &Group<Cuda>, columns: usize) -> Result<()> {
    let multiple = 16 / size_of::<T>();
    if columns.is_multiple_of(multiple) {
        return Ok(());
    }
    Err(Error::Unaligned {
        rank: group.rank(),
        what: "the last dimension of a tensor".into(),
        value: columns,
        multiple,
    })
}

fn refused(error: DriverError) -> Failure {
    Failure::Candle(CandleError::wrap(error))
}
