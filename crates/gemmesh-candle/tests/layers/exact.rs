//! What layers should give, by candle's own linear layer with the whole weight in f64.

use candle_core::{DType, Device, Module, Tensor};
use candle_nn::Linear;
use gemmesh_candle::{Group, Host, TensorParallel};

pub type Result<T, E = candle_core::Error> = std::result::Result<T, E>;
pub type Failure = Box<dyn std::error::Error + Send + Sync>;

const WORLDS: [usize; 3] = [1, 2, 4];
/// The most tokens of a step.
pub const CAPACITY: usize = 24;
/// The unit roundoff of f32.
pub const V: f64 = 1.0 / (1 << 24) as f64;

/// A type, and its unit roundoff.
pub const DTYPES: [(DType, f64); 2] = [
    (DType::BF16, 1.0 / (1 << 8) as f64),
    (DType::F16, 1.0 / (1 << 11) as f64),
];

/// Runs `f` on each rank of each world.
pub fn each(f: impl Fn(&TensorParallel) -> Result<(), Failure> + Sync) -> Result<(), Failure> {
    for world in WORLDS {
        Group::<Host>::threads(world, |group| {
            f(&TensorParallel::new(group, &Device::Cpu, CAPACITY)?)
        })?;
    }
    Ok(())
}

/// What candle's linear layer says in f64, and by how much a sum in f32 may differ from it before it is rounded.
#[derive(Clone)]
pub struct Exact {
    pub value: Tensor,
    pub slack: Tensor,
}

impl Exact {
    /// `x · weightᵀ + bias`, summed in f32 in any order: K + 1 roundings of no more than the sum of magnitudes.
    pub fn new(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Exact> {
        let f64 = |tensor: &Tensor| tensor.to_dtype(DType::F64);
        let [x, weight] = [f64(x)?, f64(weight)?];
        let bias = bias.map(f64).transpose()?;
        let magnitudes = bias.as_ref().map(Tensor::abs).transpose()?;
        let magnitudes = Linear::new(weight.abs()?, magnitudes).forward(&x.abs()?)?;
        let k = weight.dim(1)? as f64;
        Ok(Exact {
            value: Linear::new(weight, bias).forward(&x)?,
            slack: (magnitudes * ((k + 1.0) * V))?,
        })
    }

    /// Partial sums of each rank's part of K are rounded to the type, by `u`, before they are added up.
    pub fn partials(mut self, x: &Tensor, weight: &Tensor, world: usize, u: f64) -> Result<Exact> {
        let part = x.dim(1)? / world;
        for rank in 0..world {
            let columns = |tensor: &Tensor| tensor.narrow(1, rank * part, part)?.contiguous();
            let partial = Exact::new(&columns(x)?, &columns(weight)?, None)?;
            self.slack = (self.slack + (partial.value.abs()? * (u + world as f64 * V))?)?;
        }
        Ok(self)
    }

    pub fn plus(&self, residual: &Tensor) -> Result<Exact> {
        let residual = residual.to_dtype(DType::F64)?;
        let value = (&self.value + residual)?;
        let slack = (&self.slack + (value.abs()? * V)?)?;
        Ok(Exact { value, slack })
    }

    /// `silu(self) * up`: silu's slope is less than 1.1, and it is itself exact to 2⁻¹⁹.
    pub fn gated(&self, up: &Exact) -> Result<Exact> {
        let silu = candle_nn::ops::silu(&self.value)?;
        let value = (&silu * &up.value)?;
        let by_gate = (((&self.slack * 1.1)? + (self.value.abs()? * (1.0 / (1 << 19) as f64))?)?
            * up.value.abs()?)?;
        let by_up = (silu.abs()? * &up.slack)?;
        let slack = ((by_gate + by_up)? + (value.abs()? * (2.0 * V))?)?;
        Ok(Exact { value, slack })
    }

    pub fn of_columns(&self, columns: &std::ops::Range<usize>) -> Result<Exact> {
        let columns = |tensor: &Tensor| tensor.narrow(1, columns.start, columns.len());
        Ok(Exact {
            value: columns(&self.value)?,
            slack: columns(&self.slack)?,
        })
    }

    /// Those of this rank.
    pub fn columns(&self, ranks: &TensorParallel) -> Result<Exact> {
        Ok(Exact {
            value: ranks.shard(&self.value, 1)?,
            slack: ranks.shard(&self.slack, 1)?,
        })
    }

    pub fn rows(&self, rows: &std::ops::Range<usize>) -> Result<Exact> {
        let rows = |tensor: &Tensor| tensor.narrow(0, rows.start, rows.len());
        Ok(Exact {
            value: rows(&self.value)?,
            slack: rows(&self.slack)?,
        })
    }

    /// Every element, after the one rounding by `u`; the first order counts twice for all that is not.
    pub fn check(&self, found: &Tensor, u: f64) -> Result<()> {
        assert_eq!(found.dims(), self.value.dims());
        let (found, exact, slack) = (wide(found)?, wide(&self.value)?, wide(&self.slack)?);
        for (element, ((found, exact), slack)) in found.iter().zip(&exact).zip(&slack).enumerate() {
            // Below 2⁻¹⁴ f16 has fewer digits.
            let tolerance = 2.0 * slack + u * exact.abs() + u * 2f64.powi(-14);
            assert!(
                (found - exact).abs() <= tolerance,
                "element {element} is {found} and should be {exact} ± {tolerance}"
            );
        }
        Ok(())
    }
}

pub fn wide(tensor: &Tensor) -> Result<Vec<f64>> {
    tensor.to_dtype(DType::F64)?.flatten_all()?.to_vec1()
}

/// Uniform in -1..1, the same for the same seed.
pub fn random(seed: usize, shape: impl Into<candle_core::Shape>, dtype: DType) -> Result<Tensor> {
    let mut state = (seed as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    let shape = shape.into();
    let values: Vec<f32> = std::iter::repeat_with(next)
        .take(shape.elem_count())
        .collect();
    Tensor::from_vec(values, shape, &Device::Cpu)?.to_dtype(dtype)
}
