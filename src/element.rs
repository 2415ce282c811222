//! The element types of matrices.

use std::fmt;

use bytemuck::Pod;
pub use float8::{F8E4M3, F8E5M2};
use half::slice::HalfFloatSliceExt;
pub use half::{bf16, f16};
use serde::{Deserialize, Serialize};

/// The type of a matrix's elements, at run time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum DType {
    /// bfloat16: 8 bits of exponent, 7 of fraction.
    Bf16,
    /// IEEE 754 binary16: 5 bits of exponent, 10 of fraction.
    F16,
    /// IEEE 754 binary32.
    F32,
    /// fp8 with 4 bits of exponent and 3 of fraction, up to 448, without infinity: `float8_e4m3fn` of PyTorch.
    F8E4M3,
    /// fp8 with 5 bits of exponent and 2 of fraction, up to 57344: `float8_e5m2` of PyTorch.
    F8E5M2,
    /// A byte, for example of packed numbers.
    U8,
    /// 16 bits.
    U16,
    /// 32 bits.
    U32,
    /// 64 bits.
    U64,
}

impl DType {
    /// The bytes of an element.
    pub fn bytes(self) -> usize {
        match self {
            DType::F8E4M3 | DType::F8E5M2 | DType::U8 => 1,
            DType::Bf16 | DType::F16 | DType::U16 => 2,
            DType::F32 | DType::U32 => 4,
            DType::U64 => 8,
        }
    }

    /// True for the types of [`Float`], whose elements can be added.
    pub fn is_float(self) -> bool {
        matches!(self, DType::Bf16 | DType::F16 | DType::F32)
    }

    /// True for the types of [`Half`], which have 16 bits.
    pub fn is_half(self) -> bool {
        matches!(self, DType::Bf16 | DType::F16)
    }

    /// True for [`F8E4M3`] and [`F8E5M2`].
    pub fn is_fp8(self) -> bool {
        matches!(self, DType::F8E4M3 | DType::F8E5M2)
    }

    /// True for the types of [`Element`], which products take.
    pub fn is_multiplied(self) -> bool {
        self.is_half() || self.is_fp8()
    }

    /// True if weights of the type `weight` multiply rows of this type, as [`WeightOf`](crate::elements::WeightOf) says.
    pub fn is_multiplied_by(self, weight: DType) -> bool {
        let is_e5m2 = |dtype| dtype == DType::F8E5M2;
        if self.is_fp8() && weight.is_fp8() {
            !(is_e5m2(self) && is_e5m2(weight))
        } else {
            self.is_half() && self == weight
        }
    }

    /// True if products of this type can be stored as `output`, as [`OutputOf`](crate::elements::OutputOf) says.
    pub fn is_stored_as(self, output: DType) -> bool {
        match output {
            DType::F32 => self.is_multiplied(),
            DType::F8E4M3 => self.is_fp8(),
            _ => output.is_half() && (self.is_fp8() || self == output),
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            DType::Bf16 => "bf16",
            DType::F16 => "f16",
            DType::F32 => "f32",
            DType::F8E4M3 => "f8e4m3",
            DType::F8E5M2 => "f8e5m2",
            DType::U8 => "u8",
            DType::U16 => "u16",
            DType::U32 => "u32",
            DType::U64 => "u64",
        })
    }
}

/// A type that a matrix may hold. Ranks can move its rows, whatever the bits mean.
///
/// [`F8E4M3`] and [`F8E5M2`] are those of the crate float8. Their `from_f32` rounds to nearest, ties to even. What is too
/// large becomes the largest number, and NaN stays NaN.
#[diagnostic::on_unimplemented(
    message = "matrices cannot hold `{Self}`",
    label = "must be bf16, f16, f32, F8E4M3, F8E5M2, u8, u16, u32 or u64",
    note = "numbers of other types are moved by their bits: i8 as u8, i32 as u32",
    note = "bf16 and f16 are the types of the same names in gemmesh (and in version 2 of the crate half)"
)]
pub trait Value: Pod + sealed::Sealed + Send + Sync + fmt::Debug + PartialEq {
    /// The type, at run time.
    const DTYPE: DType;
}

/// A value that widens to f32 exactly, and to which f32 is rounded.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not computed with",
    label = "must be bf16, f16, f32, F8E4M3 or F8E5M2"
)]
pub trait Number: Value {
    /// Bits of the fraction, the hidden one included: one ulp at x is 2^(exponent(x) + 1 - DIGITS).
    const DIGITS: i32;
    /// The smallest exponent of a normal number x = m · 2^e, 1 ≤ m < 2.
    const MIN_EXPONENT: i32;

    /// Rounds to nearest, ties to even. What is too large for fp8 becomes its largest number.
    fn from_f32(value: f32) -> Self;
    /// Exact.
    fn to_f32(self) -> f32;
    /// `to[i] = from[i]`, exactly. The slices have the same length.
    fn widen(from: &[Self], to: &mut [f32]);
    /// `to[i] = from[i]`, rounded as by [`Number::from_f32`]. The slices have the same length.
    fn round(from: &[f32], to: &mut [Self]);
}

/// A number whose sums are made in f32 and rounded once.
#[diagnostic::on_unimplemented(
    message = "sums add bf16, f16 or f32, not `{Self}`",
    label = "must be bf16, f16 or f32",
    note = "rows of all types can be gathered and moved without being added, for example by `all_gather`"
)]
pub trait Float: Number {}

/// A number that products multiply: bf16, f16, [`F8E4M3`] or [`F8E5M2`]. Products are summed in f32 and rounded once.
///
/// f32 can be the type of an output, but not of an operand:
///
/// ```compile_fail
/// use gemmesh::{Group, Host, Result, matmul};
///
/// fn rank(group: Group<Host>) -> Result<()> {
///     let a = group.zeros::<f32>(2, 8)?;
///     let b = group.zeros::<f32>(4, 8)?;
///     let mut out = group.zeros::<f32>(2, 4)?;
///     matmul(&a, &b, &mut out) // products multiply bf16, f16, F8E4M3 or F8E5M2, not `f32`
/// }
/// ```
#[diagnostic::on_unimplemented(
    message = "products multiply bf16, f16, F8E4M3 or F8E5M2, not `{Self}`",
    label = "must be bf16, f16, F8E4M3 or F8E5M2",
    note = "convert the operands, for example with `bf16::from_f32`; outputs may be f32, and sums in between are f32"
)]
pub trait Element: Number {}

/// bf16 or f16: a type of operands that is also the type of their weights, outputs, bias and residual.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a float of 16 bits",
    label = "must be bf16 or f16"
)]
pub trait Half: Element + Float + WeightOf<Self> + OutputOf<Self> + AddendOf<Self> {}

/// A type of weights that multiply rows of `T`.
///
/// | rows | weights |
/// |---|---|
/// | bf16 | bf16 |
/// | f16 | f16 |
/// | [`F8E4M3`] | [`F8E4M3`], [`F8E5M2`] |
/// | [`F8E5M2`] | [`F8E4M3`] |
///
/// ```compile_fail
/// use gemmesh::{F8E5M2, Group, Host, Result, bf16, matmul};
///
/// fn rank(group: Group<Host>) -> Result<()> {
///     let a = group.zeros::<F8E5M2>(2, 16)?;
///     let b = group.zeros::<F8E5M2>(16, 16)?;
///     let mut out = group.zeros::<bf16>(2, 16)?;
///     matmul(&a, &b, &mut out) // rows of `F8E5M2` cannot be multiplied by weights of `F8E5M2`
/// }
/// ```
#[diagnostic::on_unimplemented(
    message = "rows of `{T}` cannot be multiplied by weights of `{Self}`",
    label = "weights have the type of the rows, bf16 or f16; or both are fp8, of which one at least is F8E4M3"
)]
pub trait WeightOf<T>: Element {}

/// A type in which products of rows of `T` can be stored.
///
/// | rows | outputs |
/// |---|---|
/// | bf16 | bf16, f32 |
/// | f16 | f16, f32 |
/// | [`F8E4M3`], [`F8E5M2`] | bf16, f16, f32, [`F8E4M3`] |
///
/// A product of any rows can also be quantised to [`F8E4M3`]: [`Matrix::quantized`](crate::Matrix::quantized).
///
/// ```compile_fail
/// use gemmesh::{Group, Host, Matmul, Result, bf16, f16};
///
/// fn rank(group: Group<Host>) -> Result<()> {
///     let a = group.zeros::<bf16>(2, 8)?;
///     let b = group.zeros::<bf16>(4, 8)?;
///     let mut out = group.zeros::<f16>(2, 4)?;
///     Matmul::new().run(&a, &b, &mut out) // a product of `bf16` cannot be stored as `f16`
/// }
/// ```
#[diagnostic::on_unimplemented(
    message = "a product of `{T}` cannot be stored as `{Self}`",
    label = "outputs of bf16 and f16 have the type of the operands or f32; those of fp8 are bf16, f16, f32 or F8E4M3",
    note = "an output of F8E4M3 can also be quantised, whatever the operands are: `out.quantized(&mut scales)`"
)]
pub trait OutputOf<T>: Number {}

/// The type of bias and residual that products of rows of `T` add: `T` if it has 16 bits, and bf16 for fp8.
///
/// The partial sums that ranks send one another have it too.
///
/// ```compile_fail
/// use gemmesh::{Group, Host, Matmul, Result, bf16};
///
/// fn rank(group: Group<Host>) -> Result<()> {
///     let a = group.zeros::<bf16>(2, 8)?;
///     let b = group.zeros::<bf16>(4, 8)?;
///     let bias = group.zeros::<f32>(1, 4)?;
///     let mut out = group.zeros::<f32>(2, 4)?;
///     Matmul::new().bias(&bias).run(&a, &b, &mut out) // `f32` cannot be added to a product of `bf16`
/// }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be added to a product of `{T}`",
    label = "bias and residual have the type of the operands, bf16 or f16; beside fp8 they are bf16"
)]
pub trait AddendOf<T>: Float {}

mod sealed {
    pub trait Sealed {}
}

macro_rules! value {
    ($($type:ident $dtype:ident),*) => {$(
        impl sealed::Sealed for $type {}
        impl Value for $type {
            const DTYPE: DType = DType::$dtype;
        }
    )*};
}

value!(bf16 Bf16, f16 F16, f32 F32, F8E4M3 F8E4M3, F8E5M2 F8E5M2, u8 U8, u16 U16, u32 U32, u64 U64);

macro_rules! half {
    ($type:ident) => {
        impl Number for $type {
            const DIGITS: i32 = $type::MANTISSA_DIGITS as i32;
            // half counts exponents as C does, for m in [½, 1).
            const MIN_EXPONENT: i32 = $type::MIN_EXP - 1;

            fn from_f32(value: f32) -> Self {
                $type::from_f32(value)
            }

            fn to_f32(self) -> f32 {
                $type::to_f32(self)
            }

            fn widen(from: &[Self], to: &mut [f32]) {
                from.convert_to_f32_slice(to);
            }

            fn round(from: &[f32], to: &mut [Self]) {
                to.convert_from_f32_slice(from);
            }
        }

        impl Float for $type {}
        impl Element for $type {}
        impl Half for $type {}
    };
}

half!(bf16);
half!(f16);

macro_rules! fp8 {
    ($type:ident, $digits:literal, $min_exponent:literal) => {
        impl Number for $type {
            const DIGITS: i32 = $digits;
            const MIN_EXPONENT: i32 = $min_exponent;

            fn from_f32(value: f32) -> Self {
                $type::from_f32(value)
            }

            fn to_f32(self) -> f32 {
                $type::to_f32(&self)
            }

            fn widen(from: &[Self], to: &mut [f32]) {
                for (to, from) in to.iter_mut().zip(from) {
                    *to = from.to_f32();
                }
            }

            fn round(from: &[f32], to: &mut [Self]) {
                for (to, from) in to.iter_mut().zip(from) {
                    *to = $type::from_f32(*from);
                }
            }
        }

        impl Element for $type {}
    };
}

fp8!(F8E4M3, 4, -6);
fp8!(F8E5M2, 3, -14);

impl Number for f32 {
    const DIGITS: i32 = f32::MANTISSA_DIGITS as i32;
    const MIN_EXPONENT: i32 = f32::MIN_EXP - 1;

    fn from_f32(value: f32) -> f32 {
        value
    }

    fn to_f32(self) -> f32 {
        self
    }

    fn widen(from: &[f32], to: &mut [f32]) {
        to.copy_from_slice(from);
    }

    fn round(from: &[f32], to: &mut [f32]) {
        to.copy_from_slice(from);
    }
}

impl Float for f32 {}

/// For each type of rows, the types that have the trait.
macro_rules! of_rows {
    ($trait:ident: $($rows:ident [$($type:ident)+])+) => {$($(
        impl $trait<$rows> for $type {}
    )+)+};
}

of_rows!(WeightOf: bf16 [bf16] f16 [f16] F8E4M3 [F8E4M3 F8E5M2] F8E5M2 [F8E4M3]);
of_rows!(OutputOf: bf16 [bf16] f16 [f16] F8E4M3 [bf16 f16 F8E4M3] F8E5M2 [bf16 f16 F8E4M3]);
impl<T: Element> OutputOf<T> for f32 {}
of_rows!(AddendOf: bf16 [bf16] f16 [f16] F8E4M3 [bf16] F8E5M2 [bf16]);

#[cfg(test)]
mod tests {
    use super::*;

    /// The conversions of a type of fp8.
    struct Fp8 {
        to_f32: fn(u8) -> f32,
        from_f32: fn(f32) -> u8,
        /// The code of the largest number.
        largest: u8,
        /// Its value.
        most: f32,
    }

    const E4M3: Fp8 = Fp8 {
        to_f32: |code| F8E4M3::from_bits(code).to_f32(),
        from_f32: |value| F8E4M3::from_f32(value).to_bits(),
        largest: 0x7e,
        most: 448.0,
    };
    const E5M2: Fp8 = Fp8 {
        to_f32: |code| F8E5M2::from_bits(code).to_f32(),
        from_f32: |value| F8E5M2::from_f32(value).to_bits(),
        largest: 0x7b,
        most: 57344.0,
    };

    #[test]
    fn fp8_is_rounded_to_nearest_and_ties_to_even() {
        const SIGN: u8 = 0x80;
        for of in [E4M3, E5M2] {
            assert_eq!((of.to_f32)(of.largest), of.most);
            for code in 0..of.largest {
                let [low, high] = [code, code + 1].map(of.to_f32);
                // Both have few bits, so this is exact.
                let middle = (low + high) / 2.0;
                let even = code + code % 2;
                for (value, nearest) in [
                    (low, code),
                    (middle.next_down(), code),
                    (middle, even),
                    (middle.next_up(), code + 1),
                ] {
                    assert_eq!((of.from_f32)(value), nearest, "{value}");
                    assert_eq!((of.from_f32)(-value), nearest | SIGN, "-{value}");
                }
            }
        }
    }

    #[test]
    fn fp8_saturates_and_nan_stays_nan() {
        for of in [E4M3, E5M2] {
            for value in [of.most * 1.01, of.most * 16.0, f32::MAX, f32::INFINITY] {
                assert_eq!((of.from_f32)(value), of.largest, "{value}");
                assert_eq!((of.to_f32)((of.from_f32)(-value)), -of.most, "-{value}");
            }
            assert!((of.to_f32)((of.from_f32)(f32::NAN)).is_nan());
        }
    }

    #[test]
    fn each_type_has_the_bytes_of_its_values() {
        fn check<T: Value>(name: &str) {
            assert_eq!(T::DTYPE.bytes(), size_of::<T>());
            assert_eq!(T::DTYPE.to_string(), name);
        }
        check::<bf16>("bf16");
        check::<f16>("f16");
        check::<f32>("f32");
        check::<F8E4M3>("f8e4m3");
        check::<F8E5M2>("f8e5m2");
        check::<u8>("u8");
        check::<u16>("u16");
        check::<u32>("u32");
        check::<u64>("u64");
    }
}
