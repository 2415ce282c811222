//! The tensor maps of an operation, kept as long as its matrices stay where they are.

use std::sync::{Mutex, PoisonError};

use super::abi::{GEMMESH_STORE_COLUMNS, GEMMESH_STORE_ROWS, GEMMESH_TILE_K};
use super::driver::{Layout, TensorMap};
use super::kernel::Instance;
use super::sums::TARGETS;
use crate::error::Result;

/// The matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Matrices {
    pub a: Layout,
    pub b: Layout,
    /// Where tiles go; of a kernel that adds partials, what is added.
    pub out_or_added: Layout,
    /// Where the tiles of that kernel go, as it numbers these places.
    pub targets: Option<[Option<Layout>; 2 * TARGETS]>,
}

/// As the kernel takes them.
#[derive(Clone, Copy, Debug)]
pub struct Maps {
    /// a, b, and where tiles go or what is added.
    pub operands: [TensorMap; 3],
    /// Of a kernel that adds partials.
    pub targets: Option<[TensorMap; 2 * TARGETS]>,
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
        let tile_m = instance.shape.tile_m;
        let b_rows = instance.shape.tile_n / instance.shape.cluster;
        let loaded = |matrix, rows| TensorMap::new(rank, dtype, matrix, rows, GEMMESH_TILE_K, true);
        let stored = |matrix| {
            let (rows, columns) = (GEMMESH_STORE_ROWS, GEMMESH_STORE_COLUMNS);
            TensorMap::new(rank, dtype, matrix, rows, columns, false)
        };
        let out_or_added = match matrices.targets {
            Some(_) => loaded(matrices.out_or_added, tile_m)?,
            None => stored(matrices.out_or_added)?,
        };
        let targets = match matrices.targets {
            Some(targets) => {
                let mut maps = [TensorMap::none(); 2 * TARGETS];
                for (map, target) in maps.iter_mut().zip(targets) {
                    if let Some(target) = target {
                        *map = stored(target)?;
                    }
                }
                Some(maps)
            }
            None => None,
        };
        let maps = Maps {
            operands: [
                loaded(matrices.a, tile_m)?,
                loaded(matrices.b, b_rows)?,
                out_or_added,
            ],
            targets,
        };
        *last = Some((matrices, maps));
        Ok(maps)
    }
}
