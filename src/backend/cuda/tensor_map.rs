//! The tensor maps of an operation, kept as long as its matrices stay where they are.

use std::sync::{Mutex, PoisonError};

use super::abi::{GEMMESH_STORE_COLUMNS, GEMMESH_STORE_ROWS, GEMMESH_TILE_K};
use super::driver::{Layout, TensorMap};
use super::kernel::Instance;
use crate::error::Result;

/// The three matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Matrices {
    pub a: Layout,
    pub b: Layout,
    pub out: Layout,
}

/// As the kernel takes them: a, b, out.
pub type Maps = [TensorMap; 3];

/// The maps of the last call.
#[derive(Debug, Default)]
pub struct Cache(Mutex<Option<(Matrices, Maps)>>);

impl Cache {
    /// The maps for these matrices.
    pub fn get(&self, rank: usize, instance: &Instance, matrices: Matrices) -> Result<Maps> {
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((known, maps)) = *last
            && known == matrices
        {
            return Ok(maps);
        }
        let dtype = instance.dtype;
        let tile_m = instance.family.tile_m;
        let b_rows = instance.shape.tile_n / instance.shape.cluster;
        let maps = [
            TensorMap::new(rank, dtype, matrices.a, tile_m, GEMMESH_TILE_K, true)?,
            TensorMap::new(rank, dtype, matrices.b, b_rows, GEMMESH_TILE_K, true)?,
            TensorMap::new(
                rank,
                dtype,
                matrices.out,
                GEMMESH_STORE_ROWS,
                GEMMESH_STORE_COLUMNS,
                false,
            )?,
        ];
        *last = Some((matrices, maps));
        Ok(maps)
    }
}
