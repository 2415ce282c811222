//! What a product is, beside its extents: which weights, how they lie, and what becomes of the sums.

use smallvec::SmallVec;

use super::MatrixSpec;
use super::layout::MAX_EXTENT;
use super::limits::{limit, require};
use crate::element::DType;
use crate::error::Result;

/// The most weights of one product.
pub const MAX_WEIGHTS: usize = 4;

/// An elementwise function, in f32. On GPUs its value is off by 2⁻¹⁹ of x at the most, and GELU's for an output of 16
/// bits by 2⁻¹⁵.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Activation {
    /// x
    #[default]
    Identity,
    /// max(x, 0)
    Relu,
    /// x · Φ(x), Φ being the normal distribution's: GELU as [Hendrycks and Gimpel](https://arxiv.org/abs/1606.08415)
    /// define it.
    Gelu,
    /// Their approximation of it: x/2 · (1 + tanh(√(2/π) · (x + 0.044715 x³))).
    GeluTanh,
    /// x / (1 + e⁻ˣ), also called swish.
    Silu,
}

impl Activation {
    /// Its value at `x`, to within a few units in the last place.
    pub fn apply(self, x: f32) -> f32 {
        match self {
            Activation::Identity => x,
            // As `max`, but it keeps NaN.
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
    /// A weight of N columns of the product.
    pub(super) fn spec(self, dtype: DType, n: usize, k: usize) -> MatrixSpec {
        match self {
            WeightLayout::Nk => MatrixSpec::new(dtype, n, k),
            WeightLayout::Kn => MatrixSpec::new(dtype, k, n),
        }
    }
}

/// Columns of the outputs, by weight.
pub type Widths = SmallVec<[usize; MAX_WEIGHTS]>;

/// What a product is, beside its extents. The default: one weight [N, K], and the sums are the output.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Form {
    /// Of several weights, each with an output of its own: the columns of each, which make up N. Empty: there is one.
    pub widths: Widths,
    /// There are two weights of N columns, and one output: the function of the first product, times the second.
    pub gated: bool,
    /// What becomes of a sum when the bias has been added.
    pub activation: Activation,
    /// How weights lie.
    pub weights: WeightLayout,
}

impl Form {
    /// The columns of each output, of N in all.
    ///
    /// # Errors
    /// [`Error::Limit`](crate::Error::Limit) and [`Error::Unsupported`](crate::Error::Unsupported) for what cannot be.
    pub fn columns(&self, n: usize) -> Result<Widths> {
        limit("N", n, 1, MAX_EXTENT)?;
        if self.widths.is_empty() {
            return Ok(Widths::from_slice(&[n]));
        }
        let count = self.widths.len();
        limit("weights of a product", count, 1, MAX_WEIGHTS)?;
        let fits = !self.gated || count == 1;
        require("a gated product must have one output", fits)?;
        for &width in &self.widths {
            limit("N of a weight", width, 1, MAX_EXTENT)?;
        }
        let sum = self.widths.iter().sum();
        limit("columns of all weights", n, sum, sum)?;
        Ok(self.widths.clone())
    }

    /// Columns of all outputs, of weights of these widths.
    pub fn n_of(&self, widths: &[usize]) -> usize {
        let outputs = if self.gated { 1 } else { widths.len() };
        let outputs = widths.iter().take(outputs);
        outputs.fold(0, |sum: usize, &n| sum.saturating_add(n))
    }

    /// How many weights there are.
    pub fn weight_count(&self) -> usize {
        match self.gated {
            true => 2,
            false => self.widths.len().max(1),
        }
    }

    /// Columns that are multiplied, of N that are made.
    pub fn multiplied(&self, n: usize) -> usize {
        n * (1 + usize::from(self.gated))
    }

    /// In words, for what ranks compare: how it differs from the default, of what all must have alike to get the same
    /// sums.
    pub(crate) fn agreed(&self) -> String {
        match self.activation {
            Activation::Identity => String::new(),
            other => format!(", {}", other.name()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

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
            let refused = form.columns(n);
            let expected = match form.gated {
                true => matches!(refused, Err(Error::Unsupported { .. })),
                false => matches!(refused, Err(Error::Limit { .. })),
            };
            assert!(expected, "{form:?} {n}");
        }
    }
}
