//! The rows of a sum: what is added to a product, or to what has come, in the order that the schedule says.

use super::matmul::grown;
use crate::element::Float;
use crate::schedule::{Addend, MatrixSpec, Sum};

/// Where a call's matrices lie, by number; null for those that it does without.
pub type Places<'a> = &'a [*mut u8];

/// A thread's memory, kept from row to row.
#[derive(Debug, Default)]
pub struct Scratch {
    total: Vec<f32>,
    wide: Vec<f32>,
}

/// Columns of a sum, as they lie in the call's matrices.
#[derive(Clone, Copy)]
pub struct Columns<'a> {
    pub sum: &'a Sum,
    pub matrices: &'a [MatrixSpec],
    pub places: Places<'a>,
    pub begin: usize,
    pub length: usize,
}

impl Columns<'_> {
    /// These columns of a row of a matrix.
    ///
    /// # Safety
    /// The matrix lies at its place, is of this type and aligned for it; nobody writes the elements meanwhile.
    unsafe fn row<T: Float>(&self, matrix: usize, row: usize) -> &[T] {
        let offset = row * self.matrices[matrix].columns + self.begin;
        // SAFETY: as this function's; any bits are a valid float.
        unsafe {
            let first = self.places[matrix].cast_const().cast::<T>().add(offset);
            std::slice::from_raw_parts(first, self.length)
        }
    }

    /// Makes row `row` of the sum. `product`: as it was multiplied; it is not needed any more then.
    ///
    /// # Safety
    /// As [`Columns::row`] for all addends and the bias; and nobody else touches these columns of the row that is written.
    pub unsafe fn store<T: Float>(&self, scratch: &mut Scratch, row: usize, product: &mut [f32]) {
        let Scratch { total, wide } = scratch;
        let Sum {
            out,
            first,
            ref addends,
            bias,
        } = *self.sum;
        let offset = (first + row) * self.matrices[out].columns + self.begin;
        // SAFETY: as this function's.
        let to = unsafe {
            let first = self.places[out].cast::<T>().add(offset);
            std::slice::from_raw_parts_mut(first, self.length)
        };
        let total = match addends.is_empty() {
            true => product,
            false => {
                let (total, wide) = (grown(total, self.length), grown(wide, self.length));
                for (index, addend) in addends.iter().enumerate() {
                    match *addend {
                        Addend::Product => {
                            T::round(product, to);
                            T::widen(to, wide);
                        }
                        Addend::Rows { matrix, first } => {
                            // SAFETY: as this function's.
                            T::widen(unsafe { self.row(matrix, first + row) }, wide);
                        }
                    }
                    match index {
                        0 => total.copy_from_slice(wide),
                        _ => add(total, wide.iter().copied()),
                    }
                }
                total
            }
        };
        if let Some(bias) = bias.filter(|&bias| !self.places[bias].is_null()) {
            // SAFETY: as this function's.
            let bias = unsafe { self.row::<T>(bias, 0) };
            add(total, bias.iter().map(|bias| bias.to_f32()));
        }
        T::round(total, to);
    }
}

fn add(total: &mut [f32], more: impl Iterator<Item = f32>) {
    for (total, more) in total.iter_mut().zip(more) {
        *total += more;
    }
}
