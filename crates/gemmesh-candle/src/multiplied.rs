//! The rows that are multiplied: tokens as they are, or quantised to fp8.

use std::sync::MutexGuard;

use gemmesh::elements::{AddendOf, Element, OutputOf, WeightOf};
use gemmesh::fp8::{
    Quantization, Quantize, Quantized, Scales, Scaling, ShardedScales, WeightScaling, quantize,
};
use gemmesh::products::{Operand, ShardedOperand};
use gemmesh::{
    AllGatherMatmul, F8E4M3, Matmul, MatmulAllReduce, MatmulReduceScatter, Result, ShardedMatrix,
    bf16,
};

use crate::device::{Device, Half, Input, Rows, Value};
use crate::failure::Failure;
use crate::pools::{Symmetric, lock};
use crate::ranks::Ranks;
use crate::weight::BLOCK;

/// A type of rows that are multiplied, by weights of the same type.
pub trait Multiplied: Value + Element + WeightOf<Self> {
    /// The type of tokens, outputs, bias and residual.
    type Token: Half + OutputOf<Self> + AddendOf<Self>;

    /// Whether blocks of rows and weights have scales.
    const IS_SCALED: bool;

    /// Puts tokens to this rank's own rows.
    fn put<B: Device>(
        ranks: &Ranks<B>,
        tokens: &Rows<'_>,
        to: &mut Gathered<'_, B, Self>,
    ) -> Result<(), Failure>;

    /// Tokens as an operand of this rank's own, of this shape. `first`: the column of its block at which the first block of
    /// scales begins, if blocks have scales.
    fn input<'a, B: Device>(
        ranks: &'a Ranks<B>,
        tokens: &Rows<'a>,
        shape: [usize; 2],
        first: usize,
    ) -> Result<OwnRows<'a, B, Self>, Failure>;
}

impl<T: Half> Multiplied for T {
    type Token = T;

    const IS_SCALED: bool = false;

    fn put<B: Device>(
        ranks: &Ranks<B>,
        tokens: &Rows<'_>,
        to: &mut Gathered<'_, B, T>,
    ) -> Result<(), Failure> {
        ranks.put(tokens, &mut to.values)
    }

    fn input<'a, B: Device>(
        ranks: &'a Ranks<B>,
        tokens: &Rows<'a>,
        _: [usize; 2],
        _: usize,
    ) -> Result<OwnRows<'a, B, T>, Failure> {
        Ok(OwnRows::Tokens(ranks.input(tokens)?))
    }
}

impl Multiplied for F8E4M3 {
    type Token = bf16;

    const IS_SCALED: bool = true;

    fn put<B: Device>(
        ranks: &Ranks<B>,
        tokens: &Rows<'_>,
        to: &mut Gathered<'_, B, F8E4M3>,
    ) -> Result<(), Failure> {
        let tokens = ranks.input::<bf16>(tokens)?;
        let Gathered { values, scales } = to;
        let Some(scales) = scales else {
            unreachable!("rows of fp8 have scales");
        };
        let (values, scales) = (values.shard_mut(), scales.shard_mut());
        Ok(quantize(
            &tokens.matrix,
            values.view_mut()?,
            scales.view_mut()?,
        )?)
    }

    fn input<'a, B: Device>(
        ranks: &'a Ranks<B>,
        tokens: &Rows<'a>,
        [m, k]: [usize; 2],
        first: usize,
    ) -> Result<OwnRows<'a, B, F8E4M3>, Failure> {
        let tokens = ranks.input::<bf16>(tokens)?;
        let mut values = ranks.output::<F8E4M3>([m, k])?;
        let mut scales = ranks.output::<f32>([m, (first + k).div_ceil(BLOCK)])?;
        quantize(
            &tokens.matrix,
            B::matrix(&mut values),
            Quantized::blocks(B::matrix(&mut scales)).first_column(first),
        )?;
        Ok(OwnRows::Quantized(values, scales, first))
    }
}

/// The rows of all ranks, in memory that layers share.
pub struct SharedRows<B: Device, T: Multiplied> {
    values: Symmetric<B, T>,
    scales: Option<Symmetric<B, f32>>,
}

impl<B: Device, T: Multiplied> SharedRows<B, T> {
    /// Rows of K = `k` columns. Collective if there are none yet.
    pub fn new(ranks: &Ranks<B>, k: usize) -> Result<Self> {
        let columns = ShardedScales::<B>::columns_of_blocks(k);
        let scales = T::IS_SCALED.then(|| ranks.symmetric(columns));
        Ok(SharedRows {
            values: ranks.symmetric(k)?,
            scales: scales.transpose()?,
        })
    }

    pub fn lock(&self) -> Gathered<'_, B, T> {
        Gathered {
            values: lock(&self.values),
            scales: self.scales.as_ref().map(|scales| lock(scales)),
        }
    }
}

/// The rows of all ranks during a call.
pub struct Gathered<'a, B: Device, T: Multiplied> {
    values: MutexGuard<'a, ShardedMatrix<B, T>>,
    scales: Option<MutexGuard<'a, ShardedMatrix<B, f32>>>,
}

impl<B: Device, T: Multiplied> Gathered<'_, B, T> {
    pub fn set_rows(&mut self, split: &[usize]) -> Result<()> {
        self.values.set_rows(split)?;
        let mut scales = self.scales.iter_mut();
        scales.try_for_each(|scales| scales.set_rows(split))
    }

    pub fn operand(&self) -> ShardedOperand<'_, B, T> {
        match &self.scales {
            Some(scales) => self.values.scaled(ShardedScales::blocks(scales)),
            None => (&*self.values).into(),
        }
    }
}

/// Rows of this rank's own during a call.
pub enum OwnRows<'a, B: Device, T: Multiplied> {
    Tokens(Input<'a, B, T>),
    /// Values, scales, and the column of its block at which the first block begins.
    Quantized(B::Output<T>, B::Output<f32>, usize),
}

impl<B: Device, T: Multiplied> OwnRows<'_, B, T> {
    pub fn operand(&mut self) -> Operand<'_, B, T> {
        match self {
            OwnRows::Tokens(tokens) => (&tokens.matrix).into(),
            OwnRows::Quantized(values, scales, first) => {
                let scales = Scales::blocks(&*B::matrix(scales)).first_column(*first);
                B::matrix(values).view().scaled(scales)
            }
        }
    }
}

/// Checks that the ranks can quantise tokens, if rows are quantised, and multiply them. `widths`: of each weight.
/// `places`: the row and the column at which it begins in its first block.
pub fn check_columns<B: Device, T: Multiplied>(
    ranks: &Ranks<B>,
    widths: &[usize],
    places: &[[usize; 2]],
    gated: bool,
    k: usize,
) -> Result<()> {
    if !T::IS_SCALED {
        return Ok(());
    }
    let (group, shape) = (&ranks.group, [ranks.capacity, k]);
    Quantize::<B, T::Token>::new().supported(group, shape)?;
    let scaling: WeightScaling = places
        .iter()
        .map(|&[row, column]| Scaling::blocks_from(row, column))
        .collect();
    let gather = AllGatherMatmul::<B, T>::new().scaling(Scaling::ShardedBlocks, scaling.clone());
    let own = Matmul::<B, T>::new().scaling(Scaling::Blocks, scaling);
    if gated {
        gather.gated().supported(group, shape, widths)?;
        own.gated().supported(group, shape, widths)
    } else {
        gather.supported(group, shape, widths)?;
        own.supported(group, shape, widths)
    }
}

/// As [`check_columns`], of a row-parallel weight [n, k].
pub fn check_rows<B: Device, T: Multiplied>(
    ranks: &Ranks<B>,
    [n, k]: [usize; 2],
    [row, column]: [usize; 2],
) -> Result<()> {
    if !T::IS_SCALED {
        return Ok(());
    }
    let (group, shape) = (&ranks.group, [ranks.capacity, k]);
    let (of_rows, of_weight) = (
        Scaling::blocks_from(0, column),
        Scaling::blocks_from(row, column),
    );
    let scatter = MatmulReduceScatter::<B, T>::new();
    let scatter = scatter.scaling(of_rows, of_weight);
    scatter.supported(group, shape, n)?;
    let reduce = MatmulAllReduce::<B, T>::new();
    let reduce = reduce.scaling(of_rows, of_weight);
    reduce.supported(group, shape, n)?;
    let quantize = Quantize::<B, T::Token>::new();
    let quantize = quantize.quantization(Quantization::blocks().first_column(column));
    quantize.supported(group, shape)
}
