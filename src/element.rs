//! The element types of matrices.

use std::fmt;

use bytemuck::Pod;
use half::slice::HalfFloatSliceExt;
pub use half::{bf16, f16};

/// The type of a matrix's elements, at run time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DType {
    /// bfloat16: 8 bits of exponent, 7 of fraction.
    Bf16,
    /// IEEE 754 binary16: 5 bits of exponent, 10 of fraction.
    F16,
    /// IEEE 754 binary32.
    F32,
    /// A byte, for example of fp8 or of packed numbers.
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
            DType::U8 => 1,
            DType::Bf16 | DType::F16 | DType::U16 => 2,
            DType::F32 | DType::U32 => 4,
            DType::U64 => 8,
        }
    }

    /// True for the types of [`Float`], whose elements can be added.
    pub fn is_float(self) -> bool {
        matches!(self, DType::Bf16 | DType::F16 | DType::F32)
    }

    /// True for the types of [`Element`], which products take.
    pub fn is_multiplied(self) -> bool {
        matches!(self, DType::Bf16 | DType::F16)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            DType::Bf16 => "bf16",
            DType::F16 => "f16",
            DType::F32 => "f32",
            DType::U8 => "u8",
            DType::U16 => "u16",
            DType::U32 => "u32",
            DType::U64 => "u64",
        })
    }
}

/// A type that a matrix may hold. Ranks can move its rows, whatever the bits mean. For example, `u8` holds fp8.
#[diagnostic::on_unimplemented(
    message = "matrices cannot hold `{Self}`",
    label = "must be bf16, f16, f32, u8, u16, u32 or u64",
    note = "numbers of other types are moved by their bits: fp8 and i8 as u8, i32 as u32",
    note = "bf16 and f16 are the types of the same names in gemmesh (and in version 2 of the crate half)"
)]
pub trait Value: Pod + sealed::Sealed + Send + Sync + fmt::Debug + PartialEq {
    /// The type, at run time.
    const DTYPE: DType;
}

/// A value whose sums are made in f32 and rounded once.
#[diagnostic::on_unimplemented(
    message = "sums add bf16, f16 or f32, not `{Self}`",
    label = "must be bf16, f16 or f32",
    note = "rows of all types can be gathered and moved without being added, for example by `all_gather`"
)]
pub trait Float: Value {
    /// Bits of the fraction, the hidden one included: one ulp at x is 2^(exponent(x) + 1 - DIGITS).
    const DIGITS: i32;
    /// The smallest exponent of a normal number x = m · 2^e, 1 ≤ m < 2.
    const MIN_EXPONENT: i32;

    /// Rounds to nearest, ties to even.
    fn from_f32(value: f32) -> Self;
    /// Exact.
    fn to_f32(self) -> f32;
    /// `to[i] = from[i]`, exactly. The slices have the same length.
    fn widen(from: &[Self], to: &mut [f32]);
    /// `to[i] = from[i]`, rounded to nearest, ties to even. The slices have the same length.
    fn round(from: &[f32], to: &mut [Self]);
}

/// A 16-bit float, whose products are summed in f32 and rounded once.
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
///     matmul(&a, &b, &mut out) // products multiply bf16 or f16, not `f32`
/// }
/// ```
#[diagnostic::on_unimplemented(
    message = "products multiply bf16 or f16, not `{Self}`",
    label = "must be bf16 or f16",
    note = "convert the operands, for example with `bf16::from_f32`; outputs may be f32, and sums in between are f32"
)]
pub trait Element: Float {}

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

value!(bf16 Bf16, f16 F16, f32 F32, u8 U8, u16 U16, u32 U32, u64 U64);

macro_rules! element {
    ($type:ident) => {
        impl Float for $type {
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

        impl Element for $type {}
    };
}

element!(bf16);
element!(f16);

impl Float for f32 {
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
