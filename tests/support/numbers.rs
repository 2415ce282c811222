//! Data from seeds, and what a product of it must be.

use gemmesh::elements::{Half, Number};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rand_distr::StandardNormal;

pub fn rng(seed: u64) -> StdRng {
    StdRng::seed_from_u64(seed)
}

/// `count` standard normal numbers, rounded to `T`.
pub fn normal<T: Number>(seed: u64, count: usize) -> Vec<T> {
    rng(seed)
        .sample_iter::<f32, _>(StandardNormal)
        .take(count)
        .map(T::from_f32)
        .collect()
}

pub fn nan<T: Number>() -> T {
    T::from_f32(f32::NAN)
}

/// The elements as bits: NaN equals itself, and 0 is not -0.
pub fn bits<T: Half>(values: &[T]) -> &[u16] {
    bytemuck::cast_slice(values)
}

/// `a · bᵀ + bias` in float64, and the sum of the absolute values of all its terms.
#[derive(Clone, Debug)]
pub struct Reference {
    n: usize,
    k: usize,
    product: Vec<f64>,
    magnitude: Vec<f64>,
}

impl Reference {
    pub fn new<T: Half>(a: &[T], b: &[T], bias: Option<&[T]>, k: usize) -> Reference {
        let wide =
            |values: &[T]| -> Vec<f64> { values.iter().map(|v| v.to_f32().into()).collect() };
        let (a, b, bias) = (wide(a), wide(b), bias.map(wide));
        let n = b.len() / k;
        let (mut product, mut magnitude) = (Vec::new(), Vec::new());
        for row in a.chunks_exact(k) {
            for (column, weights) in b.chunks_exact(k).enumerate() {
                let first = bias.as_ref().map_or(0.0, |bias| bias[column]);
                let terms = row.iter().zip(weights).map(|(a, b)| a * b);
                let (sum, size) = terms.fold((first, first.abs()), |(sum, size), term| {
                    (sum + term, size + term.abs())
                });
                product.push(sum);
                magnitude.push(size);
            }
        }
        Reference {
            n,
            k,
            product,
            magnitude,
        }
    }

    /// Says where and how `out` is not what it must be: NaN and infinities where they are here, everything
    /// else at most ½ ulp of the output + √K · 2⁻²³ · (|A| · |B|) off. Returns the worst error, as a part of
    /// what is allowed.
    pub fn check<T: Half>(&self, out: &[T]) -> Result<f64, String> {
        assert_eq!(out.len(), self.product.len(), "another shape");
        let mut worst = 0.0f64;
        for (index, (&found, (&exact, &magnitude))) in out
            .iter()
            .zip(self.product.iter().zip(&self.magnitude))
            .enumerate()
        {
            let found = f64::from(found.to_f32());
            let summing = (self.k as f64).sqrt() * 2f64.powi(-23) * magnitude;
            let fine = if exact.is_nan() {
                found.is_nan()
            } else if exact.is_infinite() {
                found == exact
            } else if found.is_infinite() {
                exact.signum() == found.signum() && exact.abs() + summing >= overflow::<T>()
            } else {
                let allowed = ulp::<T>(exact) / 2.0 + summing;
                let error = (found - exact).abs();
                worst = worst.max(error / allowed);
                // False if the result is NaN.
                error <= allowed && exact.abs() - summing <= overflow::<T>()
            };
            if !fine {
                let (row, column) = (index / self.n, index % self.n);
                return Err(format!(
                    "row {row}, column {column}: {found:e} and must be {exact:e}"
                ));
            }
        }
        Ok(worst)
    }
}

/// The distance of two neighbours in `T` around `x`.
fn ulp<T: Half>(x: f64) -> f64 {
    let exponent = if x == 0.0 {
        T::MIN_EXPONENT
    } else {
        // The exponent field of a float64; what is subnormal there is below T's range anyway.
        let field = (x.to_bits() >> 52 & 0x7ff) as i32 - 1023;
        field.max(T::MIN_EXPONENT)
    };
    2f64.powi(exponent + 1 - T::DIGITS)
}

/// The least number that is rounded to infinity: the largest finite one and half of its ulp.
fn overflow<T: Half>() -> f64 {
    let infinity = T::from_f32(f32::INFINITY);
    let largest = bytemuck::cast::<T, u16>(infinity) - 1;
    let largest = f64::from(bytemuck::cast::<u16, T>(largest).to_f32());
    largest + ulp::<T>(largest) / 2.0
}
