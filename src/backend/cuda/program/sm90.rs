//! How kernels of family sm90 are launched: by tensor maps, which are kept while the matrices stay where they are.

use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};

use smallvec::{SmallVec, smallvec};

use super::block_table::TARGETS;
use super::operands::Matrices;
use super::params::Fixed;
use crate::backend::cuda::abi::{
    GEMMESH_STORE_COLUMNS, GEMMESH_STORE_ROWS, GEMMESH_TILE_K, GemmeshParams, GemmeshSums,
};
use crate::backend::cuda::driver::{DeviceMatrix, TensorMap};
use crate::backend::cuda::gpu::kernels::Instance;
use crate::element::DType;
use crate::error::Result;
use crate::schedule::{MAX_WEIGHTS, WeightLayout};

/// The tensor maps that the kernel takes.
#[derive(Debug)]
pub struct Maps {
    /// Those of a, of b, and of the output or the addends.
    pub operands: [TensorMap; 3],
    /// Those of the other weights, and of their outputs.
    pub more: [[TensorMap; MAX_WEIGHTS - 1]; 2],
    /// Those of a, and of each `b`, whose boxes end where the matrix ends.
    pub tails: Tails,
    /// Those of the targets of a kernel that adds partials.
    pub targets: Option<Box<[TensorMap; 2 * TARGETS]>>,
}

/// As the kernels have it.
#[derive(Debug)]
#[repr(C)]
pub struct Tails {
    a: TensorMap,
    b: [TensorMap; MAX_WEIGHTS],
}

impl Maps {
    /// The kernel's arguments, in order. `sums` are those of a kernel with block sums.
    pub fn arguments(
        &self,
        params: &GemmeshParams,
        sums: Option<&Fixed<GemmeshSums>>,
    ) -> SmallVec<[*mut c_void; 6]> {
        fn argument<T>(value: &T) -> *mut c_void {
            (&raw const *value).cast_mut().cast()
        }
        let [a, b, out_or_added] = self.operands.each_ref().map(argument);
        let params = argument(params);
        match (&self.targets, sums) {
            (Some(targets), Some(sums)) => {
                let (targets, sums) = (argument(&**targets), argument(&sums.0));
                smallvec![a, b, out_or_added, params, targets, sums]
            }
            _ => {
                let (more, tails) = (argument(&self.more), argument(&self.tails));
                smallvec![a, b, out_or_added, params, more, tails]
            }
        }
    }
}

/// The maps of the last call. They are thousands of bytes, so they are shared and not copied.
#[derive(Debug, Default)]
pub struct KnownMaps(Mutex<Option<Box<Known>>>);

#[derive(Debug)]
struct Known {
    matrices: Matrices,
    maps: Arc<Maps>,
}

impl KnownMaps {
    /// The maps for these matrices.
    pub fn get(&self, rank: usize, instance: &Instance, matrices: Matrices) -> Result<Arc<Maps>> {
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = &*last
            && known.matrices == matrices
        {
            return Ok(known.maps.clone());
        }
        let dtype = instance.dtype;
        let shape = instance.shape;
        let (tile_m, part_n) = (shape.tile_m, shape.tile_n / shape.cluster);
        let loaded = |matrix, rows| TensorMap::new(rank, dtype, matrix, rows, GEMMESH_TILE_K, true);
        let weight = |&matrix: &DeviceMatrix| match (matrices.weight_layout, matrices.gated) {
            (WeightLayout::Nk, false) => loaded(matrix, part_n),
            (WeightLayout::Nk, true) => loaded(matrix, shape.gate_box()),
            // The box is as wide as a step through K, but along N.
            (WeightLayout::Kn, _) => loaded(matrix, GEMMESH_TILE_K),
        };
        let boxes = |matrix, dtype, columns| {
            TensorMap::new(rank, dtype, matrix, GEMMESH_STORE_ROWS, columns, false)
        };
        let stored = |matrix| boxes(matrix, dtype, GEMMESH_STORE_COLUMNS);
        let out_or_added = |&matrix: &DeviceMatrix| match matrices.targets {
            Some(_) => loaded(matrix, tile_m),
            // Half the columns are as many bytes.
            None if matrices.stores_f32 => boxes(matrix, DType::F32, GEMMESH_STORE_COLUMNS / 2),
            None => stored(matrix),
        };
        // The box of the rows behind the last whole box of `rows`, in multiples of `of`. Kernels that add partials load
        // whole boxes.
        let has_tails = matrices.targets.is_none();
        let tail = |matrix: DeviceMatrix, rows: u32, of: u32| match matrix.rows as u32 % rows {
            left if left > 0 && has_tails => loaded(matrix, left.next_multiple_of(of)),
            _ => Ok(TensorMap::none()),
        };
        let none = || [TensorMap::none(); MAX_WEIGHTS];
        let (mut weights, mut outputs, mut tails) = (none(), none(), none());
        let is_plain = (matrices.weight_layout, matrices.gated) == (WeightLayout::Nk, false);
        for ((map, tail_map), &matrix) in weights.iter_mut().zip(&mut tails).zip(&matrices.weights)
        {
            *map = weight(&matrix)?;
            if is_plain {
                *tail_map = tail(matrix, part_n, 8)?;
            }
        }
        for (map, matrix) in outputs.iter_mut().zip(&matrices.outputs) {
            *map = out_or_added(matrix)?;
        }
        let ([b, more_b @ ..], [out, more_out @ ..]) = (weights, outputs);
        let targets = match matrices.targets {
            Some(targets) => {
                let mut maps = Box::new([TensorMap::none(); 2 * TARGETS]);
                for (map, target) in maps.iter_mut().zip(targets) {
                    if let Some(target) = target {
                        *map = stored(target)?;
                    }
                }
                Some(maps)
            }
            None => None,
        };
        let maps = Arc::new(Maps {
            operands: [loaded(matrices.a, tile_m)?, b, out],
            more: [more_b, more_out],
            tails: Tails {
                a: tail(matrices.a, tile_m, 1)?,
                b: tails,
            },
            targets,
        });
        let known = Known {
            matrices,
            maps: maps.clone(),
        };
        *last = Some(Box::new(known));
        Ok(maps)
    }
}
