//! A family of tests: it has no kernels, and says so by its name.

use std::sync::Arc;

use super::launch::{KernelArguments, Matrices};
use super::rates::Rates;
use super::{Arithmetic, Family, H200, KernelList, Shape, Variant};
use crate::element::DType;
use crate::error::{Kind, Result};
use crate::schedule::{Config, Scaling, TileShape, WeightLayout};

/// The family of GPUs of compute capability 8.0.
#[derive(Debug)]
pub struct Sm80;

/// The types of its kernels.
const NONE: &[super::list::OperandTypes] = &[];

impl KernelList for Sm80 {
    fn name(&self) -> &'static str {
        "sm80"
    }

    fn arch(&self) -> &'static str {
        "80"
    }

    fn threads(&self) -> u32 {
        256
    }

    fn types(&self) -> &'static [super::list::OperandTypes] {
        NONE
    }

    fn has_variant(&self, _shape: &Shape, _variant: Variant) -> bool {
        false
    }

    fn shared_bytes(&self, _shape: &Shape) -> u32 {
        0
    }

    fn source(&self, _elements: &str, _shapes: &[&Shape]) -> String {
        String::new()
    }

    fn check(&self, shapes: &[Shape]) -> Result<(), String> {
        match shapes.first() {
            None => Ok(()),
            Some(shape) => Err(format!("family sm80 has no kernels, so not {shape:?}")),
        }
    }
}

impl Family for Sm80 {
    fn capability(&self) -> (i32, i32) {
        (8, 0)
    }

    fn gpus(&self) -> &'static str {
        "an A100"
    }

    fn rates(&self, _gpu: &str) -> Rates {
        Rates {
            family: &Sm80,
            ..H200
        }
    }

    fn widest(&self) -> TileShape {
        TileShape::new(128, 128, 32)
    }

    fn storing_warps(&self) -> u32 {
        8
    }

    fn fits(&self, _shape: &Shape, _gated: bool, _layout: WeightLayout) -> bool {
        false
    }

    fn adds_partials(&self, _config: &Config) -> bool {
        false
    }

    fn adds_slices(&self, _config: &Config, _gated: bool) -> bool {
        false
    }

    fn can_be_fast(&self, _config: &Config) -> bool {
        false
    }

    fn quantizes(&self, _config: &Config, _gated: bool, _scaling: Scaling) -> bool {
        false
    }

    fn arguments(
        &self,
        rank: usize,
        _dtype: DType,
        _shape: &Shape,
        _matrices: &Matrices,
    ) -> Result<Arc<dyn KernelArguments>> {
        let what = "products by family sm80, which has no kernels,".into();
        Err(Kind::Unsupported { what }.on(rank))
    }

    fn step(&self, _rates: &Rates, _arithmetic: Arithmetic, _tile: &TileShape) -> f64 {
        f64::INFINITY
    }

    fn column(&self, _rates: &Rates, _config: &Config) -> f64 {
        f64::INFINITY
    }

    fn stores_by_turns(&self, _config: &Config, _variant: Variant) -> bool {
        false
    }
}

mod tests {
    use smallvec::SmallVec;

    use super::*;
    use crate::backend::cuda::driver::DeviceMatrix;
    use crate::backend::cuda::family::{named, of_gpu};
    use crate::backend::cuda::gpu::kernels;
    use crate::backend::cuda::model::choose;
    use crate::schedule::{Chunking, Layout, Numerics, Operation, Problem, Route};

    #[test]
    fn a_family_without_kernels_refuses_by_its_name() {
        assert_eq!(
            of_gpu("NVIDIA A100", (8, 0)).unwrap_err(),
            "there are no kernels for \"NVIDIA A100\" (compute capability 8.0); family sm80 has none"
        );
        let a = DeviceMatrix {
            ptr: 0,
            rows: 8,
            columns: 8,
            pitch: 16,
        };
        let matrices = Matrices {
            a,
            weights: SmallVec::from_slice(&[a]),
            weight_layout: WeightLayout::Nk,
            gated: false,
            outputs: SmallVec::from_slice(&[a]),
            stored: DType::Bf16,
            targets: None,
        };
        let shape = &named("sm90").unwrap().types()[0].shapes[0];
        let error = Sm80
            .arguments(3, DType::Bf16, shape, &matrices)
            .unwrap_err();
        let words = error.to_string();
        assert!(
            words.contains("rank 3") && words.contains("sm80"),
            "{words}"
        );
    }

    #[test]
    fn the_model_asks_the_family_of_the_rates() {
        let layout = Layout::balanced(4096, 4096, 2).unwrap();
        let problem = Problem::new(Operation::ALL_GATHER_MATMUL, DType::Bf16, layout, 1792);
        let rates = Sm80.rates("NVIDIA A100");
        // There is nothing to choose from.
        let base = Config::new(Sm80.widest(), Chunking::new(1), Route::Pull);
        let types = problem.dtypes.multiplied();
        let mut all = kernels::configs(&Sm80, base, Variant::Forms, types, &problem.form);
        assert_eq!(all.next(), None);
        let chosen = choose(&rates, &problem, Numerics::Fast, false, None);
        assert_eq!(chosen.tile, Sm80.widest());
    }

    #[test]
    fn rates_name_their_family() {
        let rates = Sm80.rates("NVIDIA A100");
        let text = serde_json::to_string(&rates).unwrap();
        assert_eq!(serde_json::from_str::<Rates>(&text).unwrap(), rates);
        let unknown = text.replace("sm80", "sm81");
        let error = serde_json::from_str::<Rates>(&unknown).unwrap_err();
        assert!(error.to_string().contains("sm81"), "{error}");
    }
}
