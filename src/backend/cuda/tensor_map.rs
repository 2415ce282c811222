//! The tensor maps of an operation, kept as long as its matrices stay where they are.

use std::sync::{Mutex, PoisonError};

use super::abi::{GEMMESH_STORE_COLUMNS, GEMMESH_STORE_ROWS, GEMMESH_TILE_K};
use super::driver::{Layout, TensorMap};
use super::kernel::Instance;
use crate::error::Result;

/// The matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Matrices {
    pub a: Layout,
    pub b: Layout,
    pub out: Layout,
    /// Of a kernel that adds partials: they.
    pub partials: Option<Layout>,
}

/// As the kernel takes them.
#[derive(Clone, Copy, Debug)]
pub struct Maps {
    /// a, b, out
    pub operands: [TensorMap; 3],
    /// Partials as they are stored, and as they are loaded to be added.
    pub partials: Option<[TensorMap; 2]>,
}

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
        let loaded = |matrix, rows| TensorMap::new(rank, dtype, matrix, rows, GEMMESH_TILE_K, true);
        let stored = |matrix| {
            let (rows, columns) = (GEMMESH_STORE_ROWS, GEMMESH_STORE_COLUMNS);
            TensorMap::new(rank, dtype, matrix, rows, columns, false)
        };
        let partials = match matrices.partials {
            Some(partials) => Some([stored(partials)?, loaded(partials, tile_m)?]),
            None => None,
        };
        let maps = Maps {
            operands: [
                loaded(matrices.a, tile_m)?,
                loaded(matrices.b, b_rows)?,
                stored(matrices.out)?,
            ],
            partials,
        };
        *last = Some((matrices, maps));
        Ok(maps)
    }
}
