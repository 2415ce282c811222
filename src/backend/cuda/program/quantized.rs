//! Products whose results are quantised after their kernel, because it cannot do so itself.
//!
//! The kernel stores its results as f32 in memory that all operations of a stream share. A second kernel quantises them.

use smallvec::SmallVec;

use super::operands::{CallMatrix, Operands};
use super::reduction::{ReductionKernel, quantized_rows};
use crate::Result;
use crate::backend::cuda::abi::GemmeshQuantization;
use crate::backend::cuda::driver::DevicePtr;
use crate::backend::cuda::family::Family;
use crate::backend::cuda::gpu::Gpu;
use crate::backend::cuda::gpu::workspace::BYTES;
use crate::element::DType;
use crate::error;
use crate::schedule::limits::limit;
use crate::schedule::{Config, MAX_WEIGHTS, Product, Quantization, Schedule};

/// The rows of results begin on a multiple of this number of bytes.
const ALIGNMENT: usize = 16;

/// The kernel that quantises the results of a product, and their memory.
#[derive(Clone, Copy, Debug)]
pub struct QuantizedBehind {
    pub kernel: ReductionKernel,
    /// Whether it is launched before the product's kernel has ended, for which it then waits.
    pub begins_early: bool,
    results: DevicePtr,
}

/// Bytes of the f32 results of outputs of `m` rows and these widths. None if the kernel of `config` quantises them itself.
pub fn result_bytes(
    family: &dyn Family,
    config: &Config,
    gated: bool,
    quantization: Option<Quantization>,
    m: usize,
    widths: impl IntoIterator<Item = usize>,
) -> Option<usize> {
    if family.quantizes(config, gated, quantization?.scaling) {
        return None;
    }
    let bytes = widths.into_iter().map(|n| m.saturating_mul(pitch(n)));
    Some(bytes.fold(0, usize::saturating_add))
}

/// Whether so many bytes of results, which `config` makes, can be quantised after the product.
pub fn fit(config: &Config, bytes: usize) -> bool {
    bytes <= BYTES && config.tile.k_slices == 1
}

/// Bytes from row to row of results.
fn pitch(n: usize) -> usize {
    n.saturating_mul(size_of::<f32>())
        .next_multiple_of(ALIGNMENT)
}

impl QuantizedBehind {
    /// None if the results are not quantised, or if the product's kernel does so.
    ///
    /// # Errors
    /// `Kind::Limit` if there is no memory for the results, or if slices of K use it.
    pub fn new(
        gpu: &Gpu,
        schedule: &Schedule,
        product: &Product,
    ) -> Result<Option<QuantizedBehind>> {
        let scales = product.blocks.first().and_then(|block| block.sum.scales);
        let quantization = scales.map(|scales| scales.quantization);
        let (config, gated) = (&product.config, product.gated);
        let widths = product.blocks.iter().map(|b| product.weights[b.weight].n);
        let family = gpu.kernels.family;
        let Some(bytes) = result_bytes(family, config, gated, quantization, product.m, widths)
        else {
            return Ok(None);
        };
        let what = "bytes of f32 results of a product that are quantised behind it";
        limit(what, bytes, 0, BYTES)?;
        let what = "Config::tile.k_slices of a product that is quantised behind it,";
        limit(what, config.tile.k_slices, 1, 1)?;
        let function = gpu.kernels.quantize(DType::F32);
        Ok(Some(QuantizedBehind {
            kernel: ReductionKernel::of(gpu, schedule, function, DType::F32)?,
            begins_early: false,
            results: gpu.workspace.partials(),
        }))
    }

    /// The operands of the product's kernel: results take the place of outputs, and there are no scales.
    pub fn of_product<'a>(&self, product: &Product, operands: &Operands<'a>) -> Operands<'a> {
        let mut all = operands.all.clone();
        let mut ptr = self.results;
        for block in &product.blocks {
            let pitch = pitch(product.weights[block.weight].n);
            all[block.sum.out] = Some(CallMatrix {
                ptr,
                pitch,
                symmetric: None,
            });
            if let Some(scales) = block.sum.scales {
                all[scales.matrix] = None;
            }
            ptr += (product.m * pitch) as u64;
        }
        let rank = operands.rank;
        Operands { rank, all }
    }

    /// What the second kernel is told of each output. `results`: the operands of the product's kernel.
    pub fn told(
        &self,
        product: &Product,
        results: &Operands,
        operands: &Operands,
    ) -> error::Result<SmallVec<[GemmeshQuantization; MAX_WEIGHTS]>> {
        let told = product.blocks.iter().filter_map(|block| {
            let (sum, scales) = (&block.sum, block.sum.scales?);
            let n = product.weights[block.weight].n;
            let shape = [product.m, n];
            let from = (sum.out, 0);
            Some(quantized_rows(
                (results, from),
                shape,
                sum,
                scales,
                operands,
            ))
        });
        told.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::cuda::family::{H200, Variant};
    use crate::backend::cuda::gpu::kernels::configs;
    use crate::schedule::{Chunking, Form, Route};

    fn tiles(dtype: DType) -> Vec<Config> {
        let base = Config::new(H200.family.widest(), Chunking::new(1), Route::Pull);
        configs(
            H200.family,
            base,
            Variant::Forms,
            [dtype; 2],
            &Form::default(),
        )
        .collect()
    }

    #[test]
    fn kernels_whose_tiles_have_whole_blocks_quantise_and_others_leave_results() {
        let [blocks, given] = [Quantization::blocks(), Quantization::tensor()].map(Some);
        for config in tiles(DType::F8E4M3) {
            let bytes = |gated, of| result_bytes(H200.family, &config, gated, of, 3, [16, 400]);
            let left = Some(3 * 4 * 416);
            let [m, n] = [config.tile.m, config.tile.n];
            // In tiles of 64 rows each consumer has half of the columns. With swap_ab all warps have one block together, but
            // not those of several CTAs.
            let swapped =
                !H200.family.adds_partials(&config) && n == 128 && config.tile.split_k == 1;
            let whole = (m == 128 && n % 128 == 0) || [m, n] == [64, 256] || swapped;
            assert_eq!(bytes(false, blocks), left.filter(|_| !whole), "{config:?}");
            let tile = config.tile.with_k_slices(2);
            let sliced = Config::new(tile, config.chunking, config.route);
            let is_left = result_bytes(H200.family, &sliced, false, blocks, 3, [16]).is_some();
            assert_eq!(is_left, !whole || swapped, "{config:?}");
            let gated = [m, n] == [128, 256];
            assert_eq!(bytes(true, blocks), left.filter(|_| !gated), "{config:?}");
            assert_eq!(bytes(false, given), None);
            assert_eq!(bytes(false, None), None);
        }
        for config in tiles(DType::Bf16) {
            let bytes = result_bytes(H200.family, &config, false, given, 3, [16]);
            assert_eq!(bytes, Some(3 * 64), "{config:?}");
        }
    }

    #[test]
    fn results_fit_that_take_all_of_the_workspace_and_no_slices() {
        let config = tiles(DType::Bf16)[0];
        assert!(fit(&config, BYTES) && !fit(&config, BYTES + 1));
        let tile = config.tile.with_k_slices(2);
        assert!(!fit(&Config::new(tile, config.chunking, config.route), 64));
    }
}
