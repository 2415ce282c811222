//! Quantising: how sums of f32 become F8E4M3 and scales.

use std::fmt;

use super::limits::require;
use super::scaling::{SCALED_BLOCK, check_first};
use super::{MatrixSpec, Scaling};
use crate::element::DType;
use crate::error::{Error, Result};

/// The largest number of F8E4M3.
const LARGEST: f32 = 448.0;

/// The least `amax` of a block. It keeps the scale of a block of zeros above 0.
const LEAST_AMAX: f32 = 1e-4;

/// N of a product whose output is quantised is a multiple of this, as K of the product that follows.
const PRODUCT_MULTIPLE: usize = 16;

/// How values are quantised to F8E4M3: which of them share a scale, and who makes the scales.
///
/// A value x becomes `q = e4m3(x * (1 / scale))`, in f32: the quotient is rounded, then the product, and then q to
/// nearest, ties to even. A q above 448 becomes 448, and NaN stays NaN.
///
/// A block is 128 columns of a row; the last one of a row may have fewer, and so may the first one
/// ([`Quantization::first_column`]). Its scale is `amax / 448`, where `amax` is the largest |x| of the block, or 0.0001 if
/// that is larger. NaN is no part of `amax`. An infinity makes the scale infinite: then the infinities become NaN, and the
/// other values 0.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Quantization {
    /// [`Scaling::Tensor`] for a scale that the caller gives. [`Scaling::Blocks`], [`Scaling::BlocksFrom`] or
    /// [`Scaling::TransposedBlocks`] for scales that are made.
    pub(crate) scaling: Scaling,
    /// What [`Quantization::first_column`] was given.
    first_column: usize,
    /// True if scales that are made are rounded up to powers of two.
    pub(crate) power_of_two: bool,
}

impl fmt::Debug for Quantization {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let powers = if self.power_of_two {
            ", powers of two"
        } else {
            ""
        };
        write!(f, "Quantization({:?}{powers})", self.scaling)
    }
}

impl Quantization {
    /// By one scale, which the caller gives: [1, 1].
    pub const fn tensor() -> Quantization {
        Quantization::of(Scaling::Tensor)
    }

    /// By a scale for each 128 columns of a row, which the operation makes: [M, ⌈N/128⌉].
    pub const fn blocks() -> Quantization {
        Quantization::of(Scaling::Blocks)
    }

    /// As [`Quantization::blocks`], with the scales of a row in a column: [⌈N/128⌉, M].
    pub const fn transposed_blocks() -> Quantization {
        Quantization::of(Scaling::TransposedBlocks)
    }

    /// Says that the first column is column `first` of its block: a multiple of 16 below 128.
    ///
    /// So the first block has 128 - `first` columns, and the scales are [M, ⌈(`first` + N)/128⌉]. They are those of the
    /// rows that a part of a weight multiplies, if that part begins inside a block
    /// ([`Scales::first_column`](crate::fp8::Scales::first_column)). It is for [`Quantization::blocks`].
    #[must_use]
    pub const fn first_column(self, first: usize) -> Quantization {
        let scaling = match self.scaling {
            Scaling::Blocks | Scaling::BlocksFrom { .. } => Scaling::blocks_from(0, first),
            other => other,
        };
        Quantization {
            scaling,
            first_column: first,
            ..self
        }
    }

    /// Rounds the scales that are made up to powers of two.
    #[must_use]
    pub const fn power_of_two(self) -> Quantization {
        Quantization {
            power_of_two: true,
            ..self
        }
    }

    const fn of(scaling: Scaling) -> Quantization {
        Quantization {
            scaling,
            first_column: 0,
            power_of_two: false,
        }
    }

    /// The shape of the scales of an output [M, N].
    pub fn shape(self, [m, n]: [usize; 2]) -> [usize; 2] {
        let shape = self.scaling.of_rows([m, n]);
        shape.map_or([0, 0], |(shape, _)| shape)
    }

    /// The scale of a block of these values.
    pub fn scale_of(self, values: &[f32]) -> f32 {
        // `max` ignores NaN.
        let largest = |amax: f32, value: &f32| amax.max(value.abs());
        let scale = values.iter().fold(LEAST_AMAX, largest) / LARGEST;
        if self.power_of_two {
            rounded_up(scale)
        } else {
            scale
        }
    }

    /// # Errors
    /// `Kind::Unsupported` if a scale that the caller gives would be rounded, or if the first column can't be where it
    /// is said to be.
    fn check(self) -> Result<()> {
        check_first(
            "the first column of an output in its first block",
            self.first_column,
        )?;
        let is_said = self.scaling.first_column() == self.first_column;
        require(
            "Quantization::first_column is for Quantization::blocks",
            is_said,
        )?;
        let is_made = self.scaling.has_blocks();
        let what = "a scale that is given must not be rounded to a power of two";
        require(what, is_made || !self.power_of_two)
    }
}

/// The least power of two that is not below a normal number above 0. Infinity stays.
fn rounded_up(scale: f32) -> f32 {
    const FRACTION: u32 = (1 << (f32::MANTISSA_DIGITS - 1)) - 1;
    f32::from_bits((scale.to_bits() + FRACTION) & !FRACTION)
}

/// The scales of an output that is quantised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutputScales {
    /// Their matrix, of f32. It has the output's rows.
    pub matrix: usize,
    /// Which values share a scale, and who makes the scales.
    pub quantization: Quantization,
}

impl OutputScales {
    /// None if the output is not quantised.
    pub(super) fn new(matrix: usize, quantization: Option<Quantization>) -> Option<OutputScales> {
        quantization.map(|quantization| OutputScales {
            matrix,
            quantization,
        })
    }

    /// The matrix of the scales of a sum whose output is this one, and has `n` columns that are written.
    ///
    /// # Errors
    /// `Kind::Unsupported` if the output cannot be quantised like this.
    pub(super) fn spec(&self, out: MatrixSpec, n: usize) -> Result<MatrixSpec> {
        self.quantization.check()?;
        let is_stored = out.dtype == DType::F8E4M3;
        require("outputs that are quantised must be F8E4M3", is_stored)?;
        let [rows, columns] = self.quantization.shape([out.rows, n]);
        Ok(MatrixSpec::new(DType::F32, rows, columns))
    }

    /// Checks that a product of N columns can be quantised.
    ///
    /// # Errors
    /// `Kind::Unsupported` if N is not a multiple of 16.
    pub(super) fn check_width(&self, n: usize) -> Result<()> {
        if n.is_multiple_of(PRODUCT_MULTIPLE) {
            return Ok(());
        }
        let what = format!(
            "N of an output that is quantised must be a multiple of {PRODUCT_MULTIPLE}, not {n}"
        );
        Err(Error::unsupported(what))
    }

    /// Checks that a product of N columns can be quantised tile by tile. A tile has this number of columns.
    ///
    /// # Errors
    /// `Kind::Unsupported` if a block lies in several tiles.
    pub fn check_tiles(&self, n: usize, columns: usize) -> Result<()> {
        let begins_with_block = self.quantization.scaling.first_column() == 0;
        let is_whole = begins_with_block && columns.is_multiple_of(SCALED_BLOCK) || columns >= n;
        let what = if begins_with_block {
            "tiles of an output that is quantised in blocks must have a multiple of 128 columns, or all"
        } else {
            "tiles of an output that begins inside a block and is quantised must have all columns"
        };
        require(what, is_whole || !self.quantization.scaling.has_blocks())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn powers_of_two_are_exact() {
        for exponent in -60..=100 {
            let power = 2f32.powi(exponent);
            assert_eq!(rounded_up(power), power);
            assert_eq!(rounded_up(power.next_up()), 2.0 * power);
            assert_eq!(rounded_up((2.0 * power).next_down()), 2.0 * power);
        }
        assert_eq!(rounded_up(f32::INFINITY), f32::INFINITY);
    }

    #[test]
    fn a_block_has_a_scale_whatever_it_holds() {
        let blocks = Quantization::blocks();
        assert_eq!(blocks.scale_of(&[0.0; 3]), 1e-4 / 448.0);
        assert_eq!(blocks.scale_of(&[f32::NAN; 3]), 1e-4 / 448.0);
        assert_eq!(blocks.scale_of(&[f32::NAN, -896.0, 1.0]), 2.0);
        assert_eq!(blocks.scale_of(&[f32::INFINITY, 1.0]), f32::INFINITY);
        let power = blocks.power_of_two();
        assert_eq!(power.scale_of(&[-896.0]), 2.0);
        assert_eq!(power.scale_of(&[896.5]), 4.0);
    }
}
