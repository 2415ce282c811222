//! The addresses of a call's matrices.

use smallvec::SmallVec;

use super::block_table::TARGETS;
use crate::backend::cuda::driver::{DeviceMatrix, DevicePtr};
use crate::backend::cuda::shared::symmetric::Symmetric;
use crate::error::{Error, Result};
use crate::schedule::plan::matrices::MATRICES;
use crate::schedule::{MAX_WEIGHTS, MatrixSpec, Schedule, WeightLayout};

/// A matrix of a call.
#[derive(Clone, Copy, Debug)]
pub struct Operand<'a> {
    /// Its address in this rank's memory.
    pub ptr: DevicePtr,
    /// Bytes from row to row.
    pub pitch: usize,
    /// Its memory on every rank, if it is symmetric.
    pub symmetric: Option<&'a Symmetric>,
}

/// The matrices of a call, by number in its schedule.
#[derive(Debug)]
pub struct Operands<'a> {
    pub rank: usize,
    pub all: SmallVec<[Option<Operand<'a>>; MATRICES]>,
}

impl<'a> Operands<'a> {
    /// The matrix with this number, if the call has it.
    pub fn get(&self, number: usize) -> Option<Operand<'a>> {
        self.all[number]
    }

    /// A matrix that every call of the schedule must have.
    pub fn require(&self, number: usize) -> Result<Operand<'a>> {
        self.get(number).ok_or_else(|| Error::Internal {
            rank: self.rank,
            what: format!("a call lacks matrix {number} of its schedule"),
        })
    }

    /// The address of a matrix in the memory of `rank`, if it is symmetric.
    pub fn of_rank(&self, number: usize, rank: usize) -> Option<DevicePtr> {
        Some(self.get(number)?.symmetric?.of(rank))
    }

    /// `rows` rows from `first` on, of `columns` columns.
    pub fn part(
        &self,
        number: usize,
        first: usize,
        rows: usize,
        columns: usize,
    ) -> Result<DeviceMatrix> {
        let Operand { ptr, pitch, .. } = self.require(number)?;
        Ok(part(ptr, pitch, first, rows, columns))
    }

    pub fn whole(&self, schedule: &Schedule, number: usize) -> Result<DeviceMatrix> {
        let MatrixSpec { rows, columns, .. } = schedule.matrices()[number];
        self.part(number, 0, rows, columns)
    }
}

/// Rows of a matrix that lies at `ptr`, `pitch` bytes from row to row.
pub fn part(
    ptr: DevicePtr,
    pitch: usize,
    first: usize,
    rows: usize,
    columns: usize,
) -> DeviceMatrix {
    DeviceMatrix {
        ptr: ptr + (first * pitch) as u64,
        rows,
        columns,
        pitch,
    }
}

/// The matrices that a product's kernel reads and writes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Matrices {
    pub a: DeviceMatrix,
    pub weights: SmallVec<[DeviceMatrix; MAX_WEIGHTS]>,
    pub weight_layout: WeightLayout,
    pub gated: bool,
    /// By weight: where its tiles go or, for a kernel that adds partials, the addends.
    pub outputs: SmallVec<[DeviceMatrix; MAX_WEIGHTS]>,
    /// Whether results are stored in f32.
    pub stores_f32: bool,
    /// Where the tiles of a kernel that adds partials go, in the kernel's numbering.
    pub targets: Option<[Option<DeviceMatrix>; 2 * TARGETS]>,
}
