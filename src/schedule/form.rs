//! The form of a product: its weights, their layout, and the function that is applied to its sums.

use smallvec::SmallVec;

use super::MatrixSpec;
use super::layout::MAX_EXTENT;
use super::limits::{limit, require};
use super::quantization::Quantization;
use super::scaling::{Scaling, WeightScalings};
use crate::Result;
use crate::element::DType;

/// The most weights of one product.
pub const MAX_WEIGHTS: usize = 4;

/// An elementwise function, computed in f32. On GPUs its value is off by at most 2⁻¹⁹ of x, and GELU's value for an
/// output of 16 bits by at most 2⁻¹⁵ of x.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Activation {
    /// x
    #[default]
    Identity,
    /// max(x, 0)
    Relu,
    /// GELU as [Hendrycks and Gimpel](https://arxiv.org/abs/1606.08415) define it: x · Φ(x), where Φ is the
    /// distribution function of the standard normal distribution.
    Gelu,
    /// The tanh approximation of GELU: x/2 · (1 + tanh(√(2/π) · (x + 0.044715 x³))).
    GeluTanh,
    /// x / (1 + e⁻ˣ), also called swish.
    Silu,
}

impl Activation {
    /// The function's value at `x`, to within a few units in the last place.
    pub fn apply(self, x: f32) -> f32 {
        match self {
            Activation::Identity => x,
            // Unlike `max`, this keeps NaN.
            Activation::Relu if x < 0.0 => 0.0,
            Activation::Relu => x,
            Activation::Gelu => 0.5 * x * libm::erfcf(-x * std::f32::consts::FRAC_1_SQRT_2),
            Activation::GeluTanh => {
                let u = 0.797_884_6 * (x + 0.044_715 * x * x * x);
                x * sigmoid(2.0 * u)
            }
            Activation::Silu => x * sigmoid(x),
        }
    }

    fn name(self) -> &'static str {
        match self {
            Activation::Identity => "",
            Activation::Relu => "relu",
            Activation::Gelu => "gelu",
            Activation::GeluTanh => "gelu_tanh",
            Activation::Silu => "silu",
        }
    }
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// How sums of products of fp8 are made. Those of bf16 and f16 are always sums of f32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Accumulation {
    /// Every 128 of K are summed separately. These sums are then added in f32.
    #[default]
    Promoted,
    /// On GPUs all of K may be summed by tensor cores, which keep about 13 bits of a sum of fp8. It takes less time, and the
    /// error grows with K: up to (K/32 + 1) · 2⁻¹³ of Σ|a·b|, where `Promoted` stays below 2⁻¹². Kernels with tiles of up to
    /// 176 columns do so. All others sum up as with `Promoted`, and so do the host, operands with scales of blocks, and
    /// groups of [`Numerics::Invariant`](crate::tuning::Numerics::Invariant).
    Fast,
}

/// How a weight lies in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum WeightLayout {
    /// [N, K], as PyTorch's linear layers store it.
    #[default]
    Nk,
    /// [K, N], as JAX and GPT-2 store it.
    Kn,
}

impl WeightLayout {
    /// The matrix of a weight that gives N columns of the product.
    pub(super) fn spec(self, dtype: DType, n: usize, k: usize) -> MatrixSpec {
        match self {
            WeightLayout::Nk => MatrixSpec::new(dtype, n, k),
            WeightLayout::Kn => MatrixSpec::new(dtype, k, n),
        }
    }
}

/// Columns of the outputs, one entry for each weight.
pub type Widths = SmallVec<[usize; MAX_WEIGHTS]>;

/// The form of a product, without its extents. The default has one weight [N, K], and its sums are the output.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Form {
    /// The columns of each weight's output if there are several weights; they add up to N. Empty if there is one
    /// weight.
    pub widths: Widths,
    /// True for a gated product. It has two weights of N columns and one output, `activation(a · gateᵀ) * (a · upᵀ)`.
    pub gated: bool,
    /// The function that is applied to a sum after the bias is added.
    pub activation: Activation,
    /// How weights lie in memory.
    pub weights: WeightLayout,
    /// Whether nothing that may still run when the product begins writes the weights.
    pub constant_weights: bool,
    /// How many values of `a` share a scale.
    pub a_scaling: Scaling,
    /// How many values of each weight share a scale. Empty if weights have no scales.
    pub b_scaling: WeightScalings,
    /// How sums of products of fp8 are made.
    pub accumulation: Accumulation,
    /// How outputs are quantised, if they are.
    pub quantization: Option<Quantization>,
}

impl Form {
    /// The columns of each output. Together they are N.
    ///
    /// # Errors
    /// `Kind::Limit` if N or a width is out of bounds, or if the widths don't add up to N.
    /// `Kind::Unsupported` if a gated product has several widths.
    pub fn columns(&self, n: usize) -> Result<Widths> {
        limit("N", n, 1, MAX_EXTENT)?;
        if self.widths.is_empty() {
            return Ok(Widths::from_slice(&[n]));
        }
        let count = self.widths.len();
        limit("the number of weights of a product", count, 1, MAX_WEIGHTS)?;
        let fits = !self.gated || count == 1;
        require("a gated product must have one output", fits)?;
        for &width in &self.widths {
            limit("N of a weight", width, 1, MAX_EXTENT)?;
        }
        let sum = self.widths.iter().sum();
        limit("columns of all weights", n, sum, sum)?;
        Ok(self.widths.clone())
    }

    /// The columns of all outputs together, if the weights have these widths.
    pub fn n_of(&self, widths: &[usize]) -> usize {
        let outputs = if self.gated { 1 } else { widths.len() };
        let outputs = widths.iter().take(outputs);
        outputs.fold(0, |sum: usize, &n| sum.saturating_add(n))
    }

    /// The number of weights.
    pub fn weight_count(&self) -> usize {
        if self.gated {
            2
        } else {
            self.widths.len().max(1)
        }
    }

    /// The columns that are multiplied to make `n` columns of output.
    pub fn multiplied(&self, n: usize) -> usize {
        n.saturating_mul(1 + usize::from(self.gated))
    }

    /// How many values of a weight share a scale.
    pub fn scaling_of_weight(&self, number: usize) -> Scaling {
        self.b_scaling.get(number).copied().unwrap_or_default()
    }

    /// True if sums of fp8 are not promoted. As [`Product::is_fast`](super::Product::is_fast).
    pub fn is_fast(&self) -> bool {
        self.accumulation == Accumulation::Fast && !self.a_scaling.has_blocks()
    }

    /// How this form differs from the default, in words that ranks compare. It has only what all ranks must have alike
    /// to get the same sums.
    pub(super) fn agreed(&self) -> impl Iterator<Item = String> + use<> {
        let is_applied = self.activation != Activation::Identity;
        let applied = is_applied.then(|| self.activation.name().into());
        let is_fast = self.accumulation == Accumulation::Fast;
        let accumulated = is_fast.then(|| "fast accumulation".into());
        [applied, accumulated].into_iter().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Kind;

    #[test]
    fn functions_are_theirs_to_a_few_units_in_the_last_place() {
        let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        let exact = |function, x: f64| match function {
            Activation::Identity => x,
            Activation::Relu => x.max(0.0),
            Activation::Gelu => 0.5 * x * libm::erfc(-x / std::f64::consts::SQRT_2),
            Activation::GeluTanh => {
                x * sigmoid(2.0 * (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3)))
            }
            Activation::Silu => x * sigmoid(x),
        };
        for function in [
            Activation::Identity,
            Activation::Relu,
            Activation::Gelu,
            Activation::GeluTanh,
            Activation::Silu,
        ] {
            for step in -2000..=2000 {
                let x = step as f32 * 0.005;
                let (got, expected) = (f64::from(function.apply(x)), exact(function, f64::from(x)));
                let bound = 3e-6 * expected.abs() + 1e-9;
                assert!(
                    (got - expected).abs() <= bound,
                    "{function:?}({x}) = {got}, not {expected}"
                );
            }
            for (x, least) in [
                (-3e38_f32, 0.0_f32),
                (3e38, 3e38),
                (f32::INFINITY, f32::INFINITY),
            ] {
                let of = function.apply(x);
                assert!(!of.is_nan(), "{function:?}({x})");
                assert!(
                    function == Activation::Identity || of == least,
                    "{function:?}({x}) = {of}"
                );
            }
            assert!(function.apply(f32::NAN).is_nan(), "{function:?}");
        }
    }

    #[test]
    fn widths_make_up_n() {
        let form = |widths: &[usize], gated| Form {
            widths: Widths::from_slice(widths),
            gated,
            ..Form::default()
        };
        assert_eq!(form(&[], false).columns(7), Ok(Widths::from_slice(&[7])));
        let three = form(&[4, 1, 2], false);
        assert_eq!(three.columns(7), Ok(three.widths.clone()));
        for (form, n) in [
            (form(&[], false), 0),
            (form(&[4, 1, 2], false), 8),
            (form(&[4, 0, 4], false), 8),
            (form(&[1; MAX_WEIGHTS + 1], false), MAX_WEIGHTS + 1),
            (form(&[4, 4], true), 8),
        ] {
            let refused = form.columns(n).unwrap_err();
            let expected = if form.gated {
                matches!(refused.kind(), Kind::Unsupported { .. })
            } else {
                matches!(refused.kind(), Kind::Limit { .. })
            };
            assert!(expected, "{form:?} {n}");
        }
    }
}
