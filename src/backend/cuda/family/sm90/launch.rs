//! How kernels of family sm90 are launched: by tensor maps.

use std::ffi::c_void;

use smallvec::{SmallVec, smallvec};

use super::abi::{GEMMESH_STAGE_ROW, GEMMESH_STORE_COLUMNS};
use crate::backend::cuda::abi::{GEMMESH_STORE_ROWS, GemmeshParams, GemmeshSums};
use crate::backend::cuda::driver::{DeviceMatrix, TensorMap};
use crate::backend::cuda::family::Shape;
use crate::backend::cuda::family::launch::{KernelArguments, Matrices, TARGETS};
use crate::backend::cuda::family::list::sm90::gate_box;
use crate::element::DType;
use crate::error::Result;
use crate::schedule::config::CUT_COLUMNS;
use crate::schedule::{MAX_WEIGHTS, WeightLayout};

/// The tensor maps that the kernel takes.
#[derive(Debug)]
pub struct Maps {
    /// Those of a, of b, and of the output or the addends.
    operands: [TensorMap; 3],
    /// Those of the other weights, and of their outputs.
    more: [[TensorMap; MAX_WEIGHTS - 1]; 2],
    /// Those of a, and of each `b`, whose boxes end where the matrix ends.
    tails: Tails,
    /// Those of the targets of a kernel that adds partials.
    targets: Option<Box<[TensorMap; 2 * TARGETS]>>,
}

/// As the kernels have it.
#[derive(Debug)]
#[repr(C)]
pub struct Tails {
    a: TensorMap,
    b: [TensorMap; MAX_WEIGHTS],
}

impl KernelArguments for Maps {
    fn all(
        &self,
        params: &GemmeshParams,
        sums: Option<&GemmeshSums>,
    ) -> SmallVec<[*mut c_void; 6]> {
        fn argument<T>(value: &T) -> *mut c_void {
            (&raw const *value).cast_mut().cast()
        }
        let [a, b, out_or_added] = self.operands.each_ref().map(argument);
        let params = argument(params);
        match (&self.targets, sums) {
            (Some(targets), Some(sums)) => {
                let (targets, sums) = (argument(&**targets), argument(sums));
                smallvec![a, b, out_or_added, params, targets, sums]
            }
            _ => {
                let (more, tails) = (argument(&self.more), argument(&self.tails));
                smallvec![a, b, out_or_added, params, more, tails]
            }
        }
    }
}

/// Makes the maps of a kernel, with the boxes that it loads and stores.
pub struct Encoder<'a> {
    pub rank: usize,
    /// The type of `a`. `b` has as many bytes.
    pub dtype: DType,
    pub shape: &'a Shape,
    pub matrices: &'a Matrices,
}

impl Encoder<'_> {
    pub fn maps(&self) -> Result<Maps> {
        let matrices = self.matrices;
        let [b, more_b @ ..] = each(&matrices.weights, |matrix| self.weight(matrix))?;
        let [out, more_out @ ..] = each(&matrices.outputs, |matrix| self.out_or_added(matrix))?;
        Ok(Maps {
            operands: [self.loaded(matrices.a, self.part_m())?, b, out],
            more: [more_b, more_out],
            tails: self.tails()?,
            targets: self.targets()?,
        })
    }

    /// A map for loads of this number of rows at a time.
    fn loaded(&self, matrix: DeviceMatrix, rows: u32) -> Result<TensorMap> {
        let columns = GEMMESH_STAGE_ROW / self.dtype.bytes() as u32;
        TensorMap::new(self.rank, self.dtype, matrix, rows, columns, true)
    }

    /// A map for stores of this number of columns at a time.
    fn stored(&self, matrix: DeviceMatrix, dtype: DType, columns: u32) -> Result<TensorMap> {
        TensorMap::new(self.rank, dtype, matrix, GEMMESH_STORE_ROWS, columns, false)
    }

    /// The type of partial sums and of sums that are rounded.
    fn rounded(&self) -> DType {
        if self.dtype.is_half() {
            self.dtype
        } else {
            DType::Bf16
        }
    }

    /// Rows of `b` that a CTA loads at a time, as [N, K] without a gate.
    fn part_n(&self) -> u32 {
        self.shape.tile_n / self.shape.cluster_m
    }

    /// Rows of `a` that a CTA loads at a time.
    fn part_m(&self) -> u32 {
        self.shape.tile_m / self.shape.cluster_n
    }

    fn weight(&self, matrix: DeviceMatrix) -> Result<TensorMap> {
        let rows = match (self.matrices.weight_layout, self.matrices.gated) {
            (WeightLayout::Nk, false) => self.part_n(),
            (WeightLayout::Nk, true) => gate_box(self.shape),
            // The box is as wide as a step through K, but along N.
            (WeightLayout::Kn, _) => GEMMESH_STAGE_ROW / self.dtype.bytes() as u32,
        };
        self.loaded(matrix, rows)
    }

    fn out_or_added(&self, matrix: DeviceMatrix) -> Result<TensorMap> {
        match self.matrices.targets {
            // Addends come through the stages of `a`.
            Some(_) => {
                let (rows, columns) = (self.shape.tile_m, GEMMESH_STORE_COLUMNS);
                TensorMap::new(self.rank, self.rounded(), matrix, rows, columns, true)
            }
            None => match self.matrices.stored {
                // Half the columns are as many bytes.
                DType::F32 => self.stored(matrix, DType::F32, GEMMESH_STORE_COLUMNS / 2),
                // These are stored without a map.
                DType::F8E4M3 => Ok(TensorMap::none()),
                dtype => self.stored(matrix, dtype, GEMMESH_STORE_COLUMNS),
            },
        }
    }

    /// Kernels that add partials load whole boxes, and so does every kernel from `b` that is gated or [K, N].
    fn tails(&self) -> Result<Tails> {
        let matrices = self.matrices;
        let mut tails = Tails {
            a: TensorMap::none(),
            b: [TensorMap::none(); MAX_WEIGHTS],
        };
        if matrices.targets.is_some() {
            return Ok(tails);
        }
        // The box of the rows after the last whole box of `rows`, in multiples of `of`.
        let tail = |matrix: DeviceMatrix, rows: u32, of: u32| match matrix.rows as u32 % rows {
            0 => Ok(TensorMap::none()),
            left => self.loaded(matrix, left.next_multiple_of(of)),
        };
        tails.a = tail(matrices.a, self.part_m(), 1)?;
        if (matrices.weight_layout, matrices.gated) == (WeightLayout::Nk, false) {
            tails.b = each(&matrices.weights, |matrix| tail(matrix, self.part_n(), 8))?;
        }
        Ok(tails)
    }

    fn targets(&self) -> Result<Option<Box<[TensorMap; 2 * TARGETS]>>> {
        let Some(targets) = self.matrices.targets else {
            return Ok(None);
        };
        let mut maps = Box::new([TensorMap::none(); 2 * TARGETS]);
        for (map, target) in maps.iter_mut().zip(targets) {
            if let Some(target) = target {
                *map = self.stored(target, self.rounded(), GEMMESH_STORE_COLUMNS)?;
            }
        }
        Ok(Some(maps))
    }
}

/// A map of each matrix. The others are not used.
fn each(
    matrices: &[DeviceMatrix],
    map_of: impl Fn(DeviceMatrix) -> Result<TensorMap>,
) -> Result<[TensorMap; MAX_WEIGHTS]> {
    let mut maps = [TensorMap::none(); MAX_WEIGHTS];
    for (map, &matrix) in maps.iter_mut().zip(matrices) {
        *map = map_of(matrix)?;
    }
    Ok(maps)
}

/// A cut through the columns of `a` lies between two steps of a kernel.
const _: () = assert!(CUT_COLUMNS.is_multiple_of(GEMMESH_STAGE_ROW as usize));
