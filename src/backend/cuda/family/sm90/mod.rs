//! The family of GPUs of compute capability 9.0. cuda/sm90 has its kernels.

mod abi;
pub mod cost;
mod launch;

use std::sync::Arc;

use launch::Encoder;

use super::launch::{KernelArguments, Matrices};
use super::list::sm90::{
    CONSUMER_WARPS, FAST_COLUMNS, Sm90, gate_rows, is_gated, is_pingpong, promotes, quantizes,
    swaps_ab, takes_kn,
};
use super::rates::Rates;
use super::{Arithmetic, Family, Shape, Variant};
use crate::element::DType;
use crate::error::Result;
use crate::schedule::{Config, Scaling, TileShape, WeightLayout};

/// Rows and columns of a configuration's tile, and columns of a step through K.
fn tile_of(config: &Config) -> [u32; 3] {
    let tile = &config.tile;
    [tile.m, tile.n, tile.k].map(|extent| extent as u32)
}

impl Family for Sm90 {
    fn capability(&self) -> (i32, i32) {
        (9, 0)
    }

    fn gpus(&self) -> &'static str {
        "a Hopper GPU (9.0), such as H100 or H200"
    }

    /// They were measured on an H100 and an H200, and are used for other GPUs of the family too.
    fn rates(&self, gpu: &str) -> Rates {
        if gpu.contains("H100") {
            cost::H100
        } else {
            cost::H200
        }
    }

    fn widest(&self) -> TileShape {
        TileShape::new(128, 256, 64)
            .with_stages(4)
            .with_cluster(2, 1)
            .with_group_m(8)
    }

    fn storing_warps(&self) -> u32 {
        CONSUMER_WARPS
    }

    fn fits(&self, shape: &Shape, gated: bool, layout: WeightLayout) -> bool {
        let lies = layout == WeightLayout::Nk || takes_kn(shape);
        // Each block of 64 columns must belong to one weight.
        let apart = !(gated && layout == WeightLayout::Kn) || gate_rows(shape).is_multiple_of(64);
        lies && apart && (!gated || is_gated(shape))
    }

    /// Those that swap operands do not.
    fn adds_partials(&self, config: &Config) -> bool {
        !swaps_ab(config.tile.m as u32)
    }

    /// With swap_ab, the two halves of a gated tile would be added separately.
    fn adds_slices(&self, config: &Config, gated: bool) -> bool {
        !(gated && swaps_ab(config.tile.m as u32))
    }

    fn can_be_fast(&self, config: &Config) -> bool {
        config.tile.n <= FAST_COLUMNS as usize
    }

    fn quantizes(&self, config: &Config, gated: bool, scaling: Scaling) -> bool {
        let tile = tile_of(config);
        if !scaling.has_blocks() {
            return promotes(tile[2]);
        }
        let is_whole = config.tile.k_slices == 1 || !swaps_ab(tile[0]);
        // Tiles begin where the output does, and so must blocks.
        let begins_alike = scaling.first_column() == 0;
        begins_alike && is_whole && quantizes(tile, config.tile.split_k as u32, gated)
    }

    fn arguments(
        &self,
        rank: usize,
        dtype: DType,
        shape: &Shape,
        matrices: &Matrices,
    ) -> Result<Arc<dyn KernelArguments>> {
        let encoder = Encoder {
            rank,
            dtype,
            shape,
            matrices,
        };
        Ok(Arc::new(encoder.maps()?))
    }

    fn step(&self, rates: &Rates, arithmetic: Arithmetic, tile: &TileShape) -> f64 {
        cost::step(rates, arithmetic, tile)
    }

    fn column(&self, rates: &Rates, config: &Config) -> f64 {
        if swaps_ab(config.tile.m as u32) {
            rates.swap_ab_column
        } else {
            rates.column
        }
    }

    fn stores_by_turns(&self, config: &Config, variant: Variant) -> bool {
        let variant = match variant {
            Variant::Forms => Variant::Plain,
            other => other,
        };
        is_pingpong(tile_of(config), config.tile.split_k as u32, variant)
    }
}

#[cfg(test)]
mod tests {
    use super::abi::{GEMMESH_FAST_COLUMNS, GEMMESH_STAGE_ROW, GEMMESH_THREADS};
    use super::*;
    use crate::backend::cuda::family::{KernelList, of_gpu, variants};

    #[test]
    fn other_gpus_are_refused_in_words() {
        assert_eq!(of_gpu("NVIDIA H200", (9, 0)).unwrap().name(), "sm90");
        assert_eq!(
            of_gpu("NVIDIA L4", (8, 9)).unwrap_err(),
            "there are no kernels for \"NVIDIA L4\" (compute capability 8.9); they need a Hopper GPU (9.0), such as \
             H100 or H200"
        );
    }

    #[test]
    fn the_list_and_the_kernels_agree() {
        assert_eq!(Sm90.threads(), GEMMESH_THREADS);
        assert_eq!(FAST_COLUMNS, GEMMESH_FAST_COLUMNS);
        for (types, bytes) in Sm90.types().iter().zip([2, 1, 1]) {
            for shape in types.shapes {
                assert_eq!(shape.tile_k * bytes, GEMMESH_STAGE_ROW);
            }
        }
    }

    #[test]
    fn each_shape_has_the_variants_that_it_can_have() {
        for types in Sm90.types() {
            let all = types.shapes.iter();
            let kernels: usize = all.map(|shape| variants(&Sm90, shape).count()).sum();
            let count = |is: fn(&&Shape) -> bool| types.shapes.iter().filter(is).count();
            // Of tiles of 64 rows, those of other widths are for one consumer alone.
            let adding = count(|s| {
                let has_halves = s.tile_m == 128 || s.tile_m == 64 && s.tile_n % 128 == 0;
                has_halves && s.cluster_n == 1
            });
            let low = count(|s| s.tile_m <= 64 && s.ctas() == s.split && s.tile_n % 128 == 0);
            assert_eq!(kernels, 3 * types.shapes.len() + adding + low);
        }
    }

    #[test]
    fn a_shape_that_cannot_be_is_refused_and_the_error_says_why() {
        let refused = |change: fn(&mut Shape), why: &str| {
            let mut shape = Sm90.types()[0].shapes[0];
            change(&mut shape);
            let error = Sm90.check(&[shape]).unwrap_err();
            // With the line that it is about.
            assert!(error.contains(&format!("{shape:?}")), "{error}");
            assert!(error.contains("sm90") && error.contains(why), "{error}");
        };
        refused(|s| s.tile_n = 250, "tile_n is a multiple of 16");
        refused(|s| s.tile_n = 272, "from 64 to 256");
        refused(|s| s.stages = 1, "2 stages or more");
        refused(|s| s.stages = 5, "no room in shared memory");
        refused(|s| s.cluster_m = 3, "cluster_m and cluster_n are 1, 2 or 4");
        refused(|s| s.split = 0, "split one of these or 8");
        refused(|s| s.tile_m = 96, "tile_m is 64 or 128");
        let odd = |s: &mut Shape| (s.tile_m, s.tile_n) = (84, 128);
        refused(odd, "a multiple of 8 up to 256");
        let flat_split =
            |s: &mut Shape| (s.tile_m, s.tile_n, s.cluster_m, s.split) = (64, 192, 1, 2);
        refused(flat_split, "tile_n of 64 rows is a multiple of 128");
        let narrow_split =
            |s: &mut Shape| (s.tile_m, s.tile_n, s.cluster_m, s.split) = (96, 64, 1, 2);
        refused(narrow_split, "64 where consumers take turns");
        refused(|s| s.split = 2, "a cluster or split is 1");
        let large = |s: &mut Shape| (s.cluster_m, s.cluster_n) = (4, 4);
        refused(large, "8 CTAs at the most");
        let narrow = |s: &mut Shape| (s.tile_n, s.cluster_m) = (80, 4);
        refused(narrow, "over cluster_n and cluster_m are multiples of 8");
        let twice = [Sm90.types()[0].shapes[0]; 2];
        assert!(Sm90.check(&twice).unwrap_err().contains("twice"));
        assert!(
            Sm90.types()
                .iter()
                .all(|types| Sm90.check(types.shapes).is_ok())
        );
    }
}
