//! Enumerations as they arrive: as numbers, which may be none of the enumeration's.
//!
//! The header names the enumeration instead (cbindgen.toml, `export.rename`).

use gemmesh::fp8::{Accumulation, Quantization, Scaling};
use gemmesh::products::WeightLayout;
use gemmesh::raw::{BackendKind, ProductKind};
use gemmesh::tuning::{Numerics, Route};
use gemmesh::{Activation, DType};

use crate::failure::{Failure, Result};
use crate::types::*;

/// A [`gemmesh_backend`].
pub type BackendNumber = u32;
/// A [`gemmesh_numerics`].
pub type NumericsNumber = u32;
/// A [`gemmesh_dtype`].
pub type DtypeNumber = u32;
/// A [`gemmesh_product_kind`].
pub type ProductKindNumber = u32;
/// A [`gemmesh_activation`].
pub type ActivationNumber = u32;
/// A [`gemmesh_weight_layout`].
pub type WeightLayoutNumber = u32;
/// A [`gemmesh_route`].
pub type RouteNumber = u32;
/// A [`gemmesh_accumulation`].
pub type AccumulationNumber = u32;
/// A [`gemmesh_scaling_kind`].
pub type ScalingKindNumber = u32;
/// A [`gemmesh_quantization_kind`].
pub type QuantizationKindNumber = u32;

/// What a number stands for.
macro_rules! meaning {
    ($number:expr, $argument:expr, $enumeration:ident { $($name:ident => $value:expr,)* }) => {
        named!($number, $argument, $enumeration { $($name => $value,)* }).map(|(value, _)| value)
    };
}

/// What a number stands for, and its name.
macro_rules! named {
    ($number:expr, $argument:expr, $enumeration:ident { $($name:ident => $value:expr,)* }) => {
        match $number {
            $(number if number == $enumeration::$name as u32 => Ok(($value, stringify!($name))),)*
            other => Err(Failure::unsuitable(
                $argument,
                concat!("the ", stringify!($enumeration)),
                "one of the enumeration",
                other,
            )),
        }
    };
}

pub(crate) fn backend(number: BackendNumber) -> Result<BackendKind> {
    meaning!(number, "the options", gemmesh_backend {
        GEMMESH_HOST => BackendKind::Host,
        GEMMESH_CUDA => BackendKind::Cuda,
    })
}

pub(crate) fn numerics(number: NumericsNumber) -> Result<Option<Numerics>> {
    meaning!(number, "the options", gemmesh_numerics {
        GEMMESH_NUMERICS_DEFAULT => None,
        GEMMESH_NUMERICS_FAST => Some(Numerics::Fast),
        GEMMESH_NUMERICS_INVARIANT => Some(Numerics::Invariant),
    })
}

/// The type of `argument`, if one is given.
pub(crate) fn dtype_if_given(argument: &str, number: DtypeNumber) -> Result<Option<DType>> {
    if number == gemmesh_dtype::GEMMESH_NO_DTYPE as u32 {
        return Ok(None);
    }
    dtype(argument, number).map(Some)
}

/// The type of `argument`.
pub(crate) fn dtype(argument: &str, number: DtypeNumber) -> Result<DType> {
    meaning!(number, argument, gemmesh_dtype {
        GEMMESH_BF16 => DType::Bf16,
        GEMMESH_F16 => DType::F16,
        GEMMESH_F32 => DType::F32,
        GEMMESH_F8E4M3 => DType::F8E4M3,
        GEMMESH_F8E5M2 => DType::F8E5M2,
        GEMMESH_U8 => DType::U8,
        GEMMESH_U16 => DType::U16,
        GEMMESH_U32 => DType::U32,
        GEMMESH_U64 => DType::U64,
    })
}

/// The number of a type.
pub(crate) fn of_dtype(dtype: DType) -> DtypeNumber {
    let named = match dtype {
        DType::Bf16 => gemmesh_dtype::GEMMESH_BF16,
        DType::F16 => gemmesh_dtype::GEMMESH_F16,
        DType::F32 => gemmesh_dtype::GEMMESH_F32,
        DType::F8E4M3 => gemmesh_dtype::GEMMESH_F8E4M3,
        DType::F8E5M2 => gemmesh_dtype::GEMMESH_F8E5M2,
        DType::U8 => gemmesh_dtype::GEMMESH_U8,
        DType::U16 => gemmesh_dtype::GEMMESH_U16,
        DType::U32 => gemmesh_dtype::GEMMESH_U32,
        DType::U64 => gemmesh_dtype::GEMMESH_U64,
        // A type that the header does not have cannot have come from it.
        _ => gemmesh_dtype::GEMMESH_NO_DTYPE,
    };
    named as u32
}

pub(crate) fn product_kind(number: ProductKindNumber) -> Result<ProductKind> {
    meaning!(number, "the product", gemmesh_product_kind {
        GEMMESH_MATMUL => ProductKind::Matmul,
        GEMMESH_ALL_GATHER_MATMUL => ProductKind::AllGatherMatmul,
        GEMMESH_MATMUL_REDUCE_SCATTER => ProductKind::MatmulReduceScatter,
        GEMMESH_MATMUL_ALL_REDUCE => ProductKind::MatmulAllReduce,
    })
}

pub(crate) fn activation(number: ActivationNumber) -> Result<Activation> {
    meaning!(number, "the product", gemmesh_activation {
        GEMMESH_IDENTITY => Activation::Identity,
        GEMMESH_RELU => Activation::Relu,
        GEMMESH_GELU => Activation::Gelu,
        GEMMESH_GELU_TANH => Activation::GeluTanh,
        GEMMESH_SILU => Activation::Silu,
    })
}

pub(crate) fn weight_layout(number: WeightLayoutNumber) -> Result<WeightLayout> {
    meaning!(number, "the product", gemmesh_weight_layout {
        GEMMESH_WEIGHTS_NK => WeightLayout::Nk,
        GEMMESH_WEIGHTS_KN => WeightLayout::Kn,
    })
}

pub(crate) fn accumulation(number: AccumulationNumber) -> Result<Accumulation> {
    meaning!(number, "the product", gemmesh_accumulation {
        GEMMESH_ACCUMULATION_PROMOTED => Accumulation::Promoted,
        GEMMESH_ACCUMULATION_FAST => Accumulation::Fast,
    })
}

pub(crate) fn route(number: RouteNumber) -> Result<Option<Route>> {
    meaning!(number, "the product", gemmesh_route {
        GEMMESH_ROUTE_DEFAULT => None,
        GEMMESH_ROUTE_PULL => Some(Route::Pull),
        GEMMESH_ROUTE_PUSH => Some(Route::Push),
        GEMMESH_ROUTE_STORE => Some(Route::Store),
    })
}

/// How `argument` is scaled.
pub(crate) fn scaling(argument: &str, scaling: gemmesh_scaling) -> Result<Scaling> {
    let (kind, name) = named!(scaling.kind, argument, gemmesh_scaling_kind {
        GEMMESH_SCALING_NONE => Scaling::None,
        GEMMESH_SCALING_TENSOR => Scaling::Tensor,
        GEMMESH_SCALING_ROWS => Scaling::Rows,
        GEMMESH_SCALING_BLOCKS => Scaling::Blocks,
        GEMMESH_SCALING_TRANSPOSED_BLOCKS => Scaling::TransposedBlocks,
        GEMMESH_SCALING_SHARDED_ROWS => Scaling::ShardedRows,
        GEMMESH_SCALING_SHARDED_BLOCKS => Scaling::ShardedBlocks,
    })?;
    match (kind, scaling.first_row, scaling.first_column) {
        (Scaling::Blocks, row, column) => Ok(Scaling::blocks_from(row, column)),
        (kind, 0, 0) => Ok(kind),
        _ => Err(Failure::unsuitable(
            argument,
            "the kind of scales that begin inside a block (first_row, first_column)",
            "GEMMESH_SCALING_BLOCKS",
            name,
        )),
    }
}

/// How an output is quantised, if it is.
pub(crate) fn quantization(how: gemmesh_quantization) -> Result<Option<Quantization>> {
    let (kind, name) = named!(how.kind, "out", gemmesh_quantization_kind {
        GEMMESH_QUANTIZATION_NONE => None,
        GEMMESH_QUANTIZATION_TENSOR => Some(Quantization::tensor()),
        GEMMESH_QUANTIZATION_BLOCKS => Some(Quantization::blocks()),
        GEMMESH_QUANTIZATION_TRANSPOSED_BLOCKS => Some(Quantization::transposed_blocks()),
    })?;
    let is_blocks = how.kind == gemmesh_quantization_kind::GEMMESH_QUANTIZATION_BLOCKS as u32;
    let kind = match how.first_column {
        0 => kind,
        first if is_blocks => kind.map(|kind| kind.first_column(first)),
        _ => {
            return Err(Failure::unsuitable(
                "out",
                "the kind of scales that begin inside a block (first_column)",
                "GEMMESH_QUANTIZATION_BLOCKS",
                name,
            ));
        }
    };
    Ok(match how.power_of_two {
        0 => kind,
        _ => kind.map(Quantization::power_of_two),
    })
}
