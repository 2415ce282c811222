//! Tensors of a GPU: operations stand on candle's stream and use candle's memory where it lies.
#![allow(unsafe_code)]

use std::fmt;
use std::sync::Arc;

use candle_core::cuda::cudarc::driver::result::memcpy_dtod_async;
use candle_core::cuda::cudarc::driver::{
    CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DriverError, SyncOnDrop, sys,
};
use candle_core::cuda::{CudaDevice, CudaStorage};
use candle_core::op::BackpropOp;
use candle_core::{Device as CandleDevice, Error as CandleError, Storage, Tensor};
use gemmesh::error::Call;
use gemmesh::interop::StreamGuard;
use gemmesh::{Cuda, Error, Group, Matrix, Result, ShardedMatrix};

use super::{Input, Rows, Tensors, Value, other_device};
use crate::failure::Failure;
use crate::products::MAKE;

/// A GPU of candle's, and the stream that candle puts its work on.
pub struct Gpu {
    device: CudaDevice,
    stream: Arc<CudaStream>,
}

/// Memory of candle's that an operation writes.
pub struct Output<T: Value> {
    matrix: Matrix<Cuda, T>,
    slice: CudaSlice<T>,
}

/// CU_STREAM_PER_THREAD.
const PER_THREAD: usize = 2;

impl Gpu {
    /// Copies rows of so many bytes after all that is on the stream. An address comes with the bytes from row to row.
    ///
    /// # Safety
    /// Both are memory of the GPU of so many rows, which stays allocated in the stream's order.
    unsafe fn copy_rows(
        &self,
        (to, to_pitch): (u64, usize),
        (from, from_pitch): (u64, usize),
        [rows, width]: [usize; 2],
    ) -> Result<(), Failure> {
        if rows == 0 {
            return Ok(());
        }
        self.stream.context().bind_to_thread().map_err(refused)?;
        let stream = self.stream.cu_stream();
        if [to_pitch, from_pitch] == [width; 2] {
            // SAFETY: as this function's.
            return unsafe { memcpy_dtod_async(to, from, rows * width, stream) }.map_err(refused);
        }
        let copy = sys::CUDA_MEMCPY2D {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
            srcHost: std::ptr::null(),
            srcDevice: from,
            srcArray: std::ptr::null_mut(),
            srcPitch: from_pitch,
            dstXInBytes: 0,
            dstY: 0,
            dstMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
            dstHost: std::ptr::null_mut(),
            dstDevice: to,
            dstArray: std::ptr::null_mut(),
            dstPitch: to_pitch,
            WidthInBytes: width,
            Height: rows,
        };
        // SAFETY: as this function's.
        let copied = unsafe { sys::cuMemcpy2DAsync_v2(&copy, stream) };
        copied.result().map_err(refused)
    }

    fn tensor<T: Value>(&self, mut slice: CudaSlice<T>, [rows, columns]: [usize; 2]) -> Tensor {
        // What was put on the stream writes it: users on other streams wait for that.
        drop(slice.device_ptr_mut(&self.stream));
        let storage = CudaStorage::wrap_cuda_slice(slice, self.device.clone());
        let storage = Storage::Cuda(storage);
        Tensor::from_storage(storage, (rows, columns), BackpropOp::none(), false)
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
    type Output<T: Value> = Output<T>;
    type Memory<T: Value> = CudaSlice<T>;
    type Order = StreamGuard;

    fn place_of(group: &Group<Cuda>, device: &CandleDevice) -> Result<Gpu> {
        let ordinal = group.device_ordinal();
        let expected = format!("the group's GPU, Device::new_cuda_with_stream({ordinal})");
        let CandleDevice::Cuda(cuda) = device else {
            return Err(other_device(group.rank(), device, &expected));
        };
        let stream = cuda.cuda_stream();
        let of = |error: Error| {
            error
                .on(group.rank())
                .in_call(Call::here("TensorParallel::new"))
        };
        let unsuitable = |what: &str, found: String| {
            of(Error::unsuitable(
                format!("{what} of the tensors"),
                &*expected,
                found,
            ))
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

    fn enter(group: &Group<Cuda>, place: &Gpu) -> Result<StreamGuard> {
        let stream = place.stream.cu_stream().cast();
        // SAFETY: the stream is destroyed when its last owner is dropped.
        unsafe { group.hold_stream_of(stream, place.stream.clone()) }
    }

    /// Rows are read and written in pieces of 16 bytes: what is no whole number of them would reach beyond candle's
    /// memory.
    fn check_columns<T: Value>(group: &Group<Cuda>, columns: usize) -> Result<()> {
        let multiple = 16 / size_of::<T>();
        if columns.is_multiple_of(multiple) {
            return Ok(());
        }
        let unaligned = Error::unaligned("the last dimension of a tensor", columns, multiple);
        Err(unaligned.on(group.rank()).in_call(Call::here(MAKE)))
    }

    fn holds<T: Value>(place: &Gpu, storage: &Storage) -> bool {
        let Storage::Cuda(storage) = storage else {
            return false;
        };
        let stream = storage.device.cuda_stream();
        let ordinal = place.stream.context().ordinal();
        // Anybody can put a slice and a device together.
        let of_slice = storage.as_cuda_slice::<T>().map(CudaSlice::ordinal);
        stream.cu_stream() == place.stream.cu_stream()
            && stream.context().ordinal() == ordinal
            && of_slice.is_ok_and(|of_slice| of_slice == ordinal)
    }

    fn length<T: Value>(storage: &Storage) -> usize {
        match storage {
            Storage::Cuda(storage) => storage.as_cuda_slice::<T>().map_or(0, CudaSlice::len),
            _ => 0,
        }
    }

    fn input<'a, T: Value>(
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
        Cuda::check_columns::<T>(group, rows.columns)?;
        let (slice, offset) = slice::<T>(rows)?;
        let (pointer, reading) = slice.device_ptr(&place.stream);
        // SAFETY: the rows have been seen to lie within the storage. They are whole pieces of 16 bytes. The tensor is
        // freed in the order of candle's stream, which operations stand on, and so are writes to it.
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

    fn output<T: Value>(
        group: &Group<Cuda>,
        place: &Gpu,
        [rows, columns]: [usize; 2],
    ) -> Result<Output<T>, Failure> {
        Cuda::check_columns::<T>(group, columns)?;
        let mut slice = Cuda::allocate::<T>(place, [rows, columns])?;
        let matrix = match rows {
            0 => group.zeros(0, columns)?,
            _ => {
                let (pointer, written) = slice.device_ptr_mut(&place.stream);
                // That is said when it is: by `Gpu::tensor`.
                std::mem::forget(written);
                let pitch = columns * size_of::<T>();
                // SAFETY: the slice has as many elements, which no one else knows yet, in whole pieces of 16 bytes. It
                // is freed in the order of candle's stream, which operations stand on.
                unsafe { Matrix::from_device_ptr(group, pointer, rows, columns, pitch)? }
            }
        };
        Ok(Output { matrix, slice })
    }

    fn matrix<T: Value>(output: &mut Output<T>) -> &mut Matrix<Cuda, T> {
        &mut output.matrix
    }

    fn finish<T: Value>(place: &Gpu, output: Output<T>) -> Result<Tensor, Failure> {
        Ok(place.tensor(output.slice, output.matrix.shape()))
    }

    fn put<T: Value>(
        _group: &Group<Cuda>,
        place: &Gpu,
        rows: &Rows<'_>,
        to: &mut ShardedMatrix<Cuda, T>,
    ) -> Result<(), Failure> {
        if rows.rows == 0 {
            return Ok(());
        }
        let (slice, offset) = slice::<T>(rows)?;
        let (from, _reading) = slice.device_ptr(&place.stream);
        let width = rows.columns * size_of::<T>();
        let pitch = rows.pitch * size_of::<T>();
        let to = to.as_device_ptr() + (to.rows().start * width) as u64;
        let extent = [rows.rows, width];
        // SAFETY: the rows have been seen to lie within their storage; the own ones are as many, and free once the
        // stream has done what stands on it.
        unsafe { place.copy_rows((to, width), (from + offset, pitch), extent) }
    }

    fn allocate<T: Value>(
        place: &Gpu,
        [rows, columns]: [usize; 2],
    ) -> Result<CudaSlice<T>, Failure> {
        // SAFETY: an operation writes all of it before anybody reads it.
        Ok(unsafe { place.device.alloc((rows * columns).max(1))? })
    }

    fn take<T: Value>(
        place: &Gpu,
        from: &mut ShardedMatrix<Cuda, T>,
        mut to: CudaSlice<T>,
    ) -> Result<Tensor, Failure> {
        let [rows, columns] = from.shape();
        assert!(to.len() >= rows * columns, "the memory is of this shape");
        let width = columns * size_of::<T>();
        let from = from.as_device_ptr();
        let (pointer, written) = to.device_ptr_mut(&place.stream);
        // As in `output`.
        std::mem::forget(written);
        // SAFETY: both are so large, and the operations before, on the same stream, have filled the matrix.
        unsafe { place.copy_rows((pointer, width), (from, width), [rows, width])? };
        Ok(place.tensor(to, [rows, columns]))
    }
}

/// Candle's memory, and where in it the rows begin, in bytes.
fn slice<'a, T: Value>(rows: &Rows<'a>) -> Result<(&'a CudaSlice<T>, u64), Failure> {
    let Storage::Cuda(storage) = rows.storage else {
        unreachable!("the storage has been checked");
    };
    let offset = rows.offset * size_of::<T>();
    Ok((storage.as_cuda_slice::<T>()?, offset as u64))
}

fn refused(error: DriverError) -> Failure {
    Failure::Candle(CandleError::wrap(error))
}
