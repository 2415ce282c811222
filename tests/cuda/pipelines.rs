//! What the caller computes, beside what is moved, on GPUs.

use cudarc::driver::sys;
use gemmesh::pipelines::Chunk;
use gemmesh::{Cuda, Matrix, bf16};

use crate::support::gpu::*;
use crate::support::shared::pipelines::{self, Consumes};
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
fn what_a_consumer_drops_outlives_its_use() {
    let Some(_leave) = gpu() else { return };
    pipelines::what_a_consumer_drops_outlives_its_use::<Cuda>(test_name!());
}

crate::support::shared::pipelines_tests!(Cuda, gpu());
