//! What the caller computes, beside what is moved, on GPUs.

use cudarc::driver::sys;
use gemmesh::{Chunk, Cuda, Matrix, bf16};

use crate::support::gpu::*;
use crate::support::shared::pipelines::{self, Consumes};
use crate::support::shared::staged;
use crate::test_name;

impl Consumes for Cuda {
    /// Memory, and the bytes of a row.
    type Sink = (Foreign, usize);

    fn sink(rows: usize, k: usize) -> Self::Sink {
        let width = k * size_of::<bf16>();
        (Foreign::new(rows * width), width)
    }

    fn take((sink, width): &mut Self::Sink, chunk: &Chunk<Cuda, bf16>) {
        let rows = chunk.rows();
        // SAFETY: both hold the rows; they are there on the stream, which the group's joins.
        unsafe {
            driver(sys::cuMemcpyDtoDAsync_v2(
                sink.ptr + (rows.start * *width) as u64,
                chunk.as_device_ptr(),
                rows.len() * *width,
                chunk.stream().cast(),
            ));
        }
    }

    fn take_by_way_of(
        (sink, width): &mut Self::Sink,
        between: Matrix<Cuda, bf16>,
        chunk: &Chunk<Cuda, bf16>,
    ) {
        let (rows, stream) = (chunk.rows(), chunk.stream().cast());
        let (ptr, pitch) = between.as_device_ptr();
        assert_eq!(pitch, *width);
        let bytes = rows.len() * *width;
        // SAFETY: all hold the rows; they are there on the stream, and the matrix is freed when it has ended.
        unsafe {
            driver(sys::cuMemcpyDtoDAsync_v2(
                ptr,
                chunk.as_device_ptr(),
                bytes,
                stream,
            ));
            let to = sink.ptr + (rows.start * *width) as u64;
            driver(sys::cuMemcpyDtoDAsync_v2(to, ptr, bytes, stream));
        }
    }

    fn taken((sink, _): &Self::Sink) -> Vec<bf16> {
        let bytes = sink.read();
        let values = bytes.chunks_exact(2);
        values
            .map(|pair| bf16::from_le_bytes([pair[0], pair[1]]))
            .collect()
    }
}

#[test]
fn each_row_is_consumed_once_own_rows_first() {
    let Some(_leave) = gpu() else { return };
    pipelines::each_row_is_consumed_once_own_rows_first::<Cuda>(test_name!());
}

#[test]
fn a_product_follows_a_consumer_of_the_same_rows() {
    let Some(_leave) = gpu() else { return };
    pipelines::a_product_follows_a_consumer_of_the_same_rows::<Cuda>(test_name!());
}

#[test]
fn an_error_of_a_consumer_is_every_ranks() {
    let Some(_leave) = gpu() else { return };
    pipelines::an_error_of_a_consumer_is_every_ranks::<Cuda>(test_name!());
}

#[test]
fn a_panic_of_a_consumer_ends_the_group() {
    let Some(_leave) = gpu() else { return };
    pipelines::a_panic_of_a_consumer_ends_the_group::<Cuda>(test_name!());
}

#[test]
fn a_consumer_makes_no_calls_of_its_group() {
    let Some(_leave) = gpu() else { return };
    pipelines::a_consumer_makes_no_calls_of_its_group::<Cuda>(test_name!());
}

#[test]
fn a_consumer_beside_a_product_is_a_mismatch() {
    let Some(_leave) = gpu() else { return };
    pipelines::a_consumer_beside_a_product_is_a_mismatch::<Cuda>(test_name!());
}

#[test]
fn a_consumer_that_takes_too_long_is_named() {
    let Some(_leave) = gpu() else { return };
    pipelines::a_consumer_that_takes_too_long_is_named::<Cuda>(test_name!());
}

#[test]
fn what_a_consumer_drops_outlives_its_use() {
    let Some(_leave) = gpu() else { return };
    pipelines::what_a_consumer_drops_outlives_its_use::<Cuda>(test_name!());
}

#[test]
fn products_of_staged_rows_are_right() {
    let Some(_leave) = gpu() else { return };
    staged::products_of_staged_rows_are_right::<Cuda>(test_name!());
}

#[test]
fn staged_rows_are_consumed_by_stage() {
    let Some(_leave) = gpu() else { return };
    staged::staged_rows_are_consumed_by_stage::<Cuda>(test_name!());
}

#[test]
fn what_cannot_be_staged_is_refused() {
    let Some(_leave) = gpu() else { return };
    staged::what_cannot_be_staged_is_refused::<Cuda>(test_name!());
}

#[test]
fn other_stages_are_a_mismatch() {
    let Some(_leave) = gpu() else { return };
    staged::other_stages_are_a_mismatch::<Cuda>(test_name!());
}

#[test]
fn two_matrices_are_consumed_together() {
    let Some(_leave) = gpu() else { return };
    pipelines::two_matrices_are_consumed_together::<Cuda>(test_name!());
}

#[test]
fn a_trace_shows_calls_behind_their_rows() {
    let Some(_leave) = gpu() else { return };
    pipelines::a_trace_shows_calls_behind_their_rows::<Cuda>(test_name!());
}
