//! Makes the rows of a sum. Addends are added in the schedule's order.

use super::matrices::BoundMatrices;
use super::scratch::{SumScratch, grown};
use crate::element::{DType, F8E4M3, Float, Number, bf16, f16};
use crate::schedule::scaling::SCALED_BLOCK;
use crate::schedule::{Activation, Addend, Bias, OutputScales, Quantization, Residual, Sum};

/// Columns of a sum, as they lie in the call's matrices.
#[derive(Clone, Copy)]
pub struct Columns<'a> {
    pub sum: &'a Sum,
    pub matrices: &'a BoundMatrices<'a>,
    pub begin: usize,
    pub length: usize,
}

impl Columns<'_> {
    /// Makes row `row` of the sum, from addends of the type `dtype`.
    ///
    /// `product`: the unrounded product, which this may overwrite. `up`: the up projection by which the activated gate
    /// is multiplied.
    ///
    /// # Safety
    /// As [`Columns::row`] for everything that is added. No one else touches these columns of the row that is written.
    pub unsafe fn store(
        &self,
        dtype: DType,
        scratch: &mut SumScratch,
        row: usize,
        product: &mut [f32],
        up: Option<&[f32]>,
    ) {
        // SAFETY: as this function's.
        unsafe {
            match dtype {
                DType::Bf16 => self.store_of::<bf16>(scratch, row, product, up),
                DType::F16 => self.store_of::<f16>(scratch, row, product, up),
                DType::F32 => self.store_of::<f32>(scratch, row, product, up),
                // Nothing is added.
                DType::F8E4M3 => self.store_of::<bf16>(scratch, row, product, up),
                other => unreachable!("a schedule adds no {other}"),
            }
        }
    }

    /// # Safety
    /// As [`Columns::store`], and the addends are of this type.
    unsafe fn store_of<T: Float>(
        &self,
        scratch: &mut SumScratch,
        row: usize,
        product: &mut [f32],
        up: Option<&[f32]>,
    ) {
        let out = self.sum.out;
        let activation = self.sum.activation;
        // SAFETY: as this function's.
        unsafe {
            let total = if self.sum.addends.is_empty() {
                product
            } else {
                self.add_up::<T>(scratch, row, product)
            };
            let bias_of_up = self.add_bias::<T>(total, up.is_some());
            if activation != Activation::Identity {
                total.iter_mut().for_each(|x| *x = activation.apply(*x));
            }
            if let Some(up) = up {
                multiply_by(total, up, bias_of_up);
            }
            self.add_residual::<T>(total, row);
            if let Some(scales) = &self.sum.scales {
                self.quantize(scales, row, total);
            }
            match self.matrices.spec(out).dtype {
                DType::F32 => self.round::<f32>(row, total),
                DType::F8E4M3 => self.round::<F8E4M3>(row, total),
                DType::F16 => self.round::<f16>(row, total),
                _ => self.round::<T>(row, total),
            }
        }
    }

    /// The addends' sum, in their order; the product is rounded before it is added.
    ///
    /// # Safety
    /// As [`Columns::store`].
    unsafe fn add_up<'s, T: Float>(
        &self,
        scratch: &'s mut SumScratch,
        row: usize,
        product: &[f32],
    ) -> &'s mut [f32] {
        let total = grown(&mut scratch.total, self.length);
        let wide = grown(&mut scratch.wide, self.length);
        let rounded = &mut scratch.rounded;
        for (index, addend) in self.sum.addends.iter().enumerate() {
            match *addend {
                Addend::Product => {
                    let room = (self.length * size_of::<T>()).div_ceil(size_of::<f32>());
                    let room = bytemuck::cast_slice_mut(grown(rounded, room));
                    let rounded: &mut [T] = &mut room[..self.length];
                    T::round(product, rounded);
                    T::widen(rounded, wide);
                }
                Addend::Rows { matrix, first } => {
                    // SAFETY: as this function's.
                    T::widen(unsafe { self.row(matrix, first + row, 0) }, wide);
                }
            }
            match index {
                0 => total.copy_from_slice(wide),
                _ => add(total, wide.iter().copied()),
            }
        }
        total
    }

    /// Adds the bias, if the call has one. Returns the up projection's bias, which lies after it, if the product is
    /// gated.
    ///
    /// # Safety
    /// As [`Columns::row`].
    unsafe fn add_bias<T: Float>(&self, total: &mut [f32], gated: bool) -> Option<&[T]> {
        let Bias { matrix, first } = self.sum.bias.filter(|bias| self.is_bound(bias.matrix))?;
        // SAFETY: as this function's.
        let bias = unsafe { self.row::<T>(matrix, 0, first) };
        add(total, bias.iter().map(|bias| bias.to_f32()));
        let behind = first + self.matrices.spec(self.sum.out).columns;
        // SAFETY: as this function's.
        gated.then(|| unsafe { self.row(matrix, 0, behind) })
    }

    /// Adds the residual, if the call has one.
    ///
    /// # Safety
    /// As [`Columns::row`].
    unsafe fn add_residual<T: Float>(&self, total: &mut [f32], row: usize) {
        let residual = self.sum.residual;
        if let Some(Residual { matrix, first }) = residual.filter(|r| self.is_bound(r.matrix)) {
            // SAFETY: as this function's.
            let residual = unsafe { self.row::<T>(matrix, first + row, 0) };
            add(total, residual.iter().map(|residual| residual.to_f32()));
        }
    }

    /// Multiplies by one over the scales, and writes the scales that the schedule asks for.
    ///
    /// # Safety
    /// As [`Columns::store`]. Whole blocks are made, and no one else touches their scales.
    unsafe fn quantize(&self, scales: &OutputScales, row: usize, total: &mut [f32]) {
        let &OutputScales {
            matrix,
            quantization,
        } = scales;
        let Quantization { scaling, .. } = quantization;
        let row = self.sum.first + row;
        let (mut place, mut rest) = (scaling.first_column() + self.begin, total);
        while !rest.is_empty() {
            let (block, width) = (place / SCALED_BLOCK, SCALED_BLOCK - place % SCALED_BLOCK);
            let (values, behind) = rest.split_at_mut(width.min(rest.len()));
            (place, rest) = (place + values.len(), behind);
            let [row, column] = scaling.place_of_row(row, block);
            // SAFETY: as this function's.
            let scale = unsafe { self.matrices.place(matrix).element::<f32>(row, column) };
            if scaling.has_blocks() {
                // SAFETY: as this function's.
                unsafe { scale.write(quantization.scale_of(values)) };
            }
            // SAFETY: as this function's. A scale that is given is only read.
            let inverse = 1.0 / unsafe { scale.read() };
            values.iter_mut().for_each(|value| *value *= inverse);
        }
    }

    /// Writes row `row` of the output.
    ///
    /// # Safety
    /// As [`Columns::store`], and the output is of this type.
    unsafe fn round<T: Number>(&self, row: usize, total: &[f32]) {
        // SAFETY: as this function's.
        let to = unsafe {
            let place = self.matrices.place(self.sum.out);
            let first = place.element::<T>(self.sum.first + row, self.begin);
            std::slice::from_raw_parts_mut(first, self.length)
        };
        T::round(total, to);
    }

    /// These columns of a row of a matrix, counted from its column `first`.
    ///
    /// # Safety
    /// The matrix lies at its place, is of this type and aligned for it; no one writes the elements meanwhile.
    unsafe fn row<T: Float>(&self, matrix: usize, row: usize, first: usize) -> &[T] {
        let begin = first + self.begin;
        // SAFETY: as this function's; any bits are a valid float.
        unsafe {
            let first = self.matrices.place(matrix).element::<T>(row, begin);
            std::slice::from_raw_parts(first, self.length)
        }
    }

    /// Whether the call has the matrix.
    fn is_bound(&self, matrix: usize) -> bool {
        self.matrices.place(matrix).is_bound()
    }
}

/// Multiplies by the up projection, to which its bias is added.
fn multiply_by<T: Float>(total: &mut [f32], up: &[f32], bias: Option<&[T]>) {
    for (column, (total, up)) in total.iter_mut().zip(up).enumerate() {
        *total *= up + bias.map_or(0.0, |bias| bias[column].to_f32());
    }
}

fn add(total: &mut [f32], more: impl Iterator<Item = f32>) {
    for (total, more) in total.iter_mut().zip(more) {
        *total += more;
    }
}
