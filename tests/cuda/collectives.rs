//! Rows that ranks exchange and add up, on GPUs.

use std::ffi::c_void;
use std::time::Duration;

use cudarc::driver::sys;
use gemmesh::{Block, Cuda, Matrix, Value};

use crate::support::gpu::*;
use crate::support::shared::collectives::{self, Produces};
use crate::test_name;

impl Produces for Cuda {
    fn put<T: Value>(block: &mut Block<Cuda, T>, from: &Matrix<Cuda, T>, _: &[T], first: usize) {
        let ([rows, n], (ptr, pitch)) = (block.shape(), from.as_device_ptr());
        let mut copy = std::mem::MaybeUninit::<sys::CUDA_MEMCPY2D>::zeroed();
        // SAFETY: plain numbers, for which zero is valid, but for the two types, which are written first. Both memories hold the rows,
        // and the group's stream joins the block's.
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
        unsafe extern "C" fn sleep(micros: *mut c_void) {
            std::thread::sleep(Duration::from_micros(micros as u64));
        }
        let micros = time.as_micros() as u64 as *mut c_void;
        // SAFETY: the function reads the number that the pointer is, and makes no CUDA call.
        unsafe {
            let stream = block.stream().cast();
            driver(sys::cuLaunchHostFunc(stream, Some(sleep), micros));
        }
    }
}

#[test]
fn what_is_produced_is_summed_by_its_owner() {
    let Some(_leave) = gpu() else { return };
    collectives::what_is_produced_is_summed_by_its_owner::<Cuda>(test_name!());
}

#[test]
fn what_is_produced_is_the_next_input() {
    let Some(_leave) = gpu() else { return };
    collectives::what_is_produced_is_the_next_input::<Cuda>(test_name!());
}

#[test]
fn what_is_produced_reaches_its_rank() {
    let Some(_leave) = gpu() else { return };
    collectives::what_is_produced_reaches_its_rank::<Cuda>(test_name!());
}

#[test]
fn an_error_of_a_producer_is_every_ranks() {
    let Some(_leave) = gpu() else { return };
    collectives::an_error_of_a_producer_is_every_ranks::<Cuda>(test_name!());
}

#[test]
fn a_panic_of_a_producer_ends_the_group() {
    let Some(_leave) = gpu() else { return };
    collectives::a_panic_of_a_producer_ends_the_group::<Cuda>(test_name!());
}

#[test]
fn a_producer_that_takes_too_long_is_named() {
    let Some(_leave) = gpu() else { return };
    collectives::a_producer_that_takes_too_long_is_named::<Cuda>(test_name!());
}

#[test]
fn producers_of_other_blocks_are_a_mismatch() {
    let Some(_leave) = gpu() else { return };
    collectives::producers_of_other_blocks_are_a_mismatch::<Cuda>(test_name!());
}

#[test]
fn what_cannot_be_exchanged_is_refused() {
    let Some(_leave) = gpu() else { return };
    collectives::what_cannot_be_exchanged_is_refused::<Cuda>(test_name!());
}

#[test]
fn collectives_of_one_rank_exchange_what_they_have() {
    let Some(_leave) = gpu() else { return };
    collectives::collectives_exchange_what_ranks_have::<Cuda>(test_name!(), 1);
}

#[test]
fn collectives_of_two_ranks_exchange_what_they_have() {
    let Some(_leave) = gpu() else { return };
    collectives::collectives_exchange_what_ranks_have::<Cuda>(test_name!(), 2);
}

#[test]
fn collectives_of_three_ranks_exchange_what_they_have() {
    let Some(_leave) = gpu() else { return };
    collectives::collectives_exchange_what_ranks_have::<Cuda>(test_name!(), 3);
}

#[test]
fn collectives_of_four_ranks_exchange_what_they_have() {
    let Some(_leave) = gpu() else { return };
    collectives::collectives_exchange_what_ranks_have::<Cuda>(test_name!(), 4);
}

#[test]
fn ranks_out_of_step_lose_time_only() {
    let Some(_leave) = gpu() else { return };
    collectives::ranks_out_of_step_lose_time_only::<Cuda>(test_name!());
}

#[test]
fn a_rank_that_sends_nothing_completes() {
    let Some(_leave) = gpu() else { return };
    collectives::a_rank_that_sends_nothing_completes::<Cuda>(test_name!());
}

#[test]
fn a_trace_shows_blocks_sent_when_they_are_made() {
    let Some(_leave) = gpu() else { return };
    collectives::a_trace_shows_blocks_sent_when_they_are_made::<Cuda>(test_name!());
}
