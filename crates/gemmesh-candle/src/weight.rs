//! A weight, with the scales of its blocks if it is of fp8.

use std::ops::Range;

use candle_core::{DType, Device, Result, Tensor};
use gemmesh::error::Call;
use gemmesh::fp8::Quantization;
use gemmesh::{Error, F8E4M3};

use crate::error;
use crate::products::MAKE;

/// Rows and columns of a weight that share a scale.
pub const BLOCK: usize = 128;

/// A weight [N, K]: a tensor of BF16 or F16, or one of F8E4M3 with the scales of its blocks.
///
/// Made from a `Tensor` or a `&Tensor`, which has no scales, or by [`Weight::blocks`] or [`Weight::quantized`].
#[derive(Clone, Debug)]
pub struct Weight {
    pub(crate) values: Tensor,
    pub(crate) scales: Option<Tensor>,
    /// The row and the column of its first block at which it begins.
    pub(crate) first: [usize; 2],
}

impl From<Tensor> for Weight {
    fn from(values: Tensor) -> Self {
        Weight {
            values,
            scales: None,
            first: [0, 0],
        }
    }
}

impl From<&Tensor> for Weight {
    fn from(values: &Tensor) -> Self {
        values.clone().into()
    }
}

impl From<&Weight> for Weight {
    fn from(weight: &Weight) -> Self {
        weight.clone()
    }
}

impl Weight {
    /// A weight of F8E4M3, [N, K], of which 128 × 128 values share a scale: F32, [⌈N/128⌉, ⌈K/128⌉].
    ///
    /// Checkpoints call them `weight` and `weight_scale_inv`. A value is its fp8 number times its scale. N and K of a
    /// rank are multiples of 16.
    pub fn blocks(values: Tensor, scales: Tensor) -> Weight {
        Weight {
            scales: Some(scales),
            ..Weight::from(values)
        }
    }

    /// Says that the first row is row `first` of the first block of 128 rows: a multiple of 16 below 128.
    ///
    /// A rank's part of a weight may begin inside a block. Its scales are then [⌈(first + N)/128⌉, ⌈K/128⌉]. A layer
    /// refuses another `first`, and of a weight without scales each but 0.
    pub fn first_row(mut self, first: usize) -> Weight {
        self.first[0] = first;
        self
    }

    /// Says that the first column is column `first` of the first block of 128 columns: a multiple of 16 below 128.
    ///
    /// A rank's part of K may begin inside a block. Its scales are then [⌈N/128⌉, ⌈(first + K)/128⌉], and tokens are
    /// quantised in the same blocks. It is for row-parallel layers, whose ranks have parts of K. A layer refuses another
    /// `first`, and of a weight without scales each but 0.
    pub fn first_column(mut self, first: usize) -> Weight {
        self.first[1] = first;
        self
    }

    /// Quantises a weight [N, K] to F8E4M3 by the largest number of each block, as the tools of checkpoints do.
    ///
    /// ```
    /// use candle_core::{DType, Device, Module, Tensor};
    /// use gemmesh_candle::{ColumnParallelLinear, Group, Host, TensorParallel, Weight};
    ///
    /// Group::<Host>::threads(2, |group| {
    ///     let ranks = TensorParallel::new(group, &Device::Cpu, 4).unwrap();
    ///     let whole = Tensor::full(0.5f32, (32, 256), &Device::Cpu).unwrap();
    ///     let layer = ColumnParallelLinear::from_whole(&ranks, Weight::quantized(&whole).unwrap(), None).unwrap();
    ///     let x = Tensor::ones((2, 256), DType::BF16, &Device::Cpu).unwrap(); // two of four tokens
    ///     let y = layer.forward(&x).unwrap();
    ///     assert_eq!(y.dims(), [4, 16]);
    ///     assert_eq!(y.to_dtype(DType::F32).unwrap().max_all().unwrap().to_scalar::<f32>().unwrap(), 128.0);
    ///     Ok::<_, gemmesh::Error>(())
    /// }).unwrap();
    /// ```
    ///
    /// # Errors
    /// candle's, for a tensor that is not [N, K], or whose type has no conversion to F32.
    pub fn quantized(weight: &Tensor) -> Result<Weight> {
        let (n, k) = weight.dims2()?;
        let device = weight.device();
        let wide = weight.to_device(&Device::Cpu)?.to_dtype(DType::F32)?;
        let wide = wide.flatten_all()?.to_vec1::<f32>()?;
        let rows: Vec<&[f32]> = wide.chunks(k.max(1)).collect();
        let (mut values, mut scales) = (vec![F8E4M3::from_f32(0.0); n * k], Vec::new());
        for (block, rows) in rows.chunks(BLOCK).enumerate() {
            for columns in (0..k).step_by(BLOCK).map(|c| c..(c + BLOCK).min(k)) {
                let of_block: Vec<f32> = rows
                    .iter()
                    .flat_map(|row| &row[columns.clone()])
                    .copied()
                    .collect();
                let scale = Quantization::blocks().scale_of(&of_block);
                scales.push(scale);
                for (row, from) in of_block.chunks(columns.len()).enumerate() {
                    let first = (block * BLOCK + row) * k + columns.start;
                    for (to, from) in values[first..].iter_mut().zip(from) {
                        *to = F8E4M3::from_f32(from * (1.0 / scale));
                    }
                }
            }
        }
        let blocks = (n.div_ceil(BLOCK), k.div_ceil(BLOCK));
        let values = Tensor::from_vec(values, (n, k), device)?;
        Ok(Weight::blocks(
            values,
            Tensor::from_vec(scales, blocks, device)?,
        ))
    }

    /// Rows of a whole weight from `first` on, with their part of the whole weight's scales.
    pub(crate) fn of_rows(values: Tensor, scales: &Tensor, first: usize) -> Result<Weight> {
        let blocks = first / BLOCK..(first + values.dim(0)?).div_ceil(BLOCK);
        let scales = scales.narrow(0, blocks.start, blocks.len())?;
        let weight = Weight::blocks(values, scales.force_contiguous()?);
        Ok(weight.first_row(first % BLOCK))
    }

    /// Columns of a whole weight from `first` on, with their part of the whole weight's scales.
    pub(crate) fn of_columns(values: Tensor, scales: &Tensor, first: usize) -> Result<Weight> {
        let blocks = first / BLOCK..(first + values.dim(1)?).div_ceil(BLOCK);
        let scales = scales.narrow(1, blocks.start, blocks.len())?;
        let weight = Weight::blocks(values, scales.force_contiguous()?);
        Ok(weight.first_column(first % BLOCK))
    }

    /// Checks that the place at which it begins in its first block is in one, on this rank. Products check its step.
    pub(crate) fn check_first(&self, rank: usize) -> gemmesh::Result<()> {
        let [without, expected] = match &self.scales {
            None if self.first != [0, 0] => [" without scales", "[0, 0]"],
            Some(_) if self.first.iter().any(|&at| at >= BLOCK) => ["", "below 128"],
            _ => return Ok(()),
        };
        let what = format!("[first row, first column] of a weight{without} in its first block");
        let error = Error::unsuitable(what, expected, format!("{:?}", self.first));
        Err(error.on(rank).in_call(Call::here(MAKE)))
    }

    /// A copy of some rows, for this rank.
    pub(crate) fn rows(&self, rank: usize, rows: Range<usize>) -> Result<Weight> {
        self.check_first(rank).map_err(error::of(MAKE))?;
        let values = self.values.narrow(0, rows.start, rows.len())?;
        let values = values.force_contiguous()?;
        let Some(scales) = &self.scales else {
            return Ok(values.into());
        };
        let [first, column] = self.first;
        let weight = Weight::of_rows(values, scales, first + rows.start)?;
        Ok(weight.first_column(column))
    }

    /// A copy of some columns, for this rank.
    pub(crate) fn columns(&self, rank: usize, columns: Range<usize>) -> Result<Weight> {
        self.check_first(rank).map_err(error::of(MAKE))?;
        let values = self.values.narrow(1, columns.start, columns.len())?;
        let values = values.force_contiguous()?;
        let Some(scales) = &self.scales else {
            return Ok(values.into());
        };
        let [row, first] = self.first;
        let weight = Weight::of_columns(values, scales, first + columns.start)?;
        Ok(weight.first_row(row))
    }
}
