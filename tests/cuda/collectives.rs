//! Rows that ranks exchange and add up, on GPUs.

use std::time::Duration;

use cudarc::driver::sys;
use gemmesh::elements::Value;
use gemmesh::pipelines::Block;
use gemmesh::{Cuda, Matrix};

use crate::support::gpu::*;
use crate::support::shared::collectives::Produces;

impl Produces for Cuda {
    fn put<T: Value>(block: &mut Block<Cuda, T>, from: &Matrix<Cuda, T>, _: &[T], first: usize) {
        let ([rows, n], (ptr, pitch)) = (block.shape(), from.as_device_ptr());
        let mut copy = std::mem::MaybeUninit::<sys::CUDA_MEMCPY2D>::zeroed();
        // SAFETY: plain numbers, for which zero is valid, but for the two types, which are written first. Both memories
        // hold the rows, and the group's stream joins the block's.
        unsafe {
            let to = copy.as_mut_ptr();
            (&raw mut (*to).srcMemoryType).write(sys::CUmemorytype::CU_MEMORYTYPE_DEVICE);
            (&raw mut (*to).dstMemoryType).write(sys::CUmemorytype::CU_MEMORYTYPE_DEVICE);
            let mut copy = copy.assume_init();
            (copy.srcDevice, copy.srcPitch) = (ptr + (first * pitch) as u64, pitch);
            copy.dstDevice = block.as_device_ptr();
            copy.dstPitch = block.pitch() * size_of::<T>();
            (copy.WidthInBytes, copy.Height) = (n * size_of::<T>(), rows);
            driver(sys::cuMemcpy2DAsync_v2(&copy, block.stream().cast()));
        }
    }

    fn linger<T: Value>(block: &Block<Cuda, T>, time: Duration) {
        pause(block.stream().cast(), time);
    }
}

crate::support::shared::collectives_tests!(Cuda, gpu());
