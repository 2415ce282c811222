//! Scales of fp8 operands as cuBLASLt wants them.

use cudarc::cublaslt::sys::cublasLtMatmulMatrixScale_t as Mode;
use cudarc::driver::sys::CUdeviceptr;
use gemmesh::Result;
use gemmesh::fp8::Scaling;

use super::memory::Scratch;
use crate::common::scales::ScaleValues;

/// The scales of one operand, in the benchmark's own memory.
pub struct Scale {
    values: Scratch,
    pub mode: Mode,
}

impl Scale {
    /// Those of rows [M, K], if there are any. Blocks are transposed: those of a block of K follow one another.
    pub fn of_rows(scales: Option<&ScaleValues>) -> Result<Option<Scale>> {
        let transposed = |scales: &ScaleValues| {
            let [_, blocks] = scales.shape;
            let column = |block: usize| scales.values[block..].iter().step_by(blocks);
            (0..blocks).flat_map(column).copied().collect()
        };
        let blocks = (Mode::CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F, transposed);
        scales.map(|scales| Scale::new(scales, blocks)).transpose()
    }

    /// Those of a weight [N, K], if there are any. The blocks of a block of rows are a multiple of 4.
    pub fn of_weight(scales: Option<&ScaleValues>) -> Result<Option<Scale>> {
        let padded = |scales: &ScaleValues| {
            let [_, blocks] = scales.shape;
            let pitch = blocks.next_multiple_of(4);
            let rows = scales.values.chunks_exact(blocks);
            let padding = || std::iter::repeat_n(0.0, pitch - blocks);
            rows.flat_map(|row| row.iter().copied().chain(padding()))
                .collect()
        };
        let blocks = (Mode::CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F, padded);
        scales.map(|scales| Scale::new(scales, blocks)).transpose()
    }

    /// `blocks`: the mode and the layout of scales of blocks.
    fn new(
        scales: &ScaleValues,
        blocks: (Mode, impl Fn(&ScaleValues) -> Vec<f32>),
    ) -> Result<Scale> {
        let as_they_are = || scales.values.clone();
        let (mode, values) = match scales.scaling {
            Scaling::Tensor => (Mode::CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F, as_they_are()),
            Scaling::Rows => (
                Mode::CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F,
                as_they_are(),
            ),
            _ => (blocks.0, blocks.1(scales)),
        };
        Ok(Scale {
            values: Scratch::of(&values)?,
            mode,
        })
    }

    /// True if cuBLASLt takes such scales of `rows` rows. Its documentation asks for a multiple of 4 if blocks have scales.
    pub fn fits(&self, rows: usize) -> bool {
        self.mode != Mode::CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F || rows.is_multiple_of(4)
    }

    pub fn ptr(&self) -> CUdeviceptr {
        self.values.ptr()
    }
}
