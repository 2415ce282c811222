//! The rows of a sum: what is added to a product, or to what has come, in the order that the schedule says.

use std::marker::PhantomData;
use std::ops::Range;

use super::matmul::grown;
use crate::element::{DType, Float};
use crate::schedule::{Activation, Addend, Bias, MatrixSpec, Residual, Sum};

/// Where a call's matrices lie, by number.
pub type Places<'a> = &'a [Place];

/// Where a matrix lies; null if the call does without.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    pub ptr: *mut u8,
    /// Bytes from row to row.
    pub pitch: usize,
}

impl Place {
    pub const NOWHERE: Place = Place {
        ptr: std::ptr::null_mut(),
        pitch: 0,
    };

    /// An element.
    ///
    /// # Safety
    /// The matrix has it, or it is the first behind a row's last.
    unsafe fn element<T>(self, row: usize, column: usize) -> *mut T {
        // SAFETY: as this function's.
        unsafe { self.ptr.add(row * self.pitch).cast::<T>().add(column) }
    }

    /// A part of the matrix.
    ///
    /// # Safety
    /// The matrix holds it, is of this type and aligned for it; nobody writes it while it is used.
    pub unsafe fn part<'a, T>(self, rows: Range<usize>, columns: Range<usize>) -> Rows<'a, T> {
        Rows {
            // SAFETY: as this function's.
            first: unsafe { self.element(rows.start, columns.start) },
            pitch: self.pitch,
            rows: rows.len(),
            columns: columns.len(),
            values: PhantomData,
        }
    }
}

/// Rows of a matrix, or a part of each, that nobody writes meanwhile.
#[derive(Clone, Copy)]
pub struct Rows<'a, T> {
    first: *const T,
    /// Bytes from row to row.
    pitch: usize,
    pub rows: usize,
    pub columns: usize,
    values: PhantomData<&'a [T]>,
}

impl<'a, T> Rows<'a, T> {
    /// A row; none behind the last.
    pub fn get(&self, row: usize) -> Option<&'a [T]> {
        if row >= self.rows {
            return None;
        }
        // SAFETY: who made this has said that the row is there.
        unsafe {
            let first = self.first.byte_add(row * self.pitch);
            Some(std::slice::from_raw_parts(first, self.columns))
        }
    }
}

/// A thread's memory, kept from row to row.
#[derive(Debug, Default)]
pub struct Scratch {
    total: Vec<f32>,
    wide: Vec<f32>,
    /// Room for rounded elements of any type.
    rounded: Vec<f32>,
}

impl Scratch {
    /// Each has as many as a sum has columns, at most.
    pub fn vectors(&mut self) -> [&mut Vec<f32>; 3] {
        let Scratch {
            total,
            wide,
            rounded,
        } = self;
        [total, wide, rounded]
    }
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
    /// These columns of a row of a matrix, counted from the `first` of its columns.
    ///
    /// # Safety
    /// The matrix lies at its place, is of this type and aligned for it; nobody writes the elements meanwhile.
    unsafe fn row<T: Float>(&self, matrix: usize, row: usize, first: usize) -> &[T] {
        let begin = first + self.begin;
        // SAFETY: as this function's; any bits are a valid float.
        unsafe {
            let first = self.places[matrix].element::<T>(row, begin);
            std::slice::from_raw_parts(first, self.length)
        }
    }

    /// Makes row `row` of the sum, of addends of this type. `product`: as it was multiplied; it is not needed any more then. `times`: what
    /// the function of a gate is multiplied with.
    ///
    /// # Safety
    /// As [`Columns::row`] for all that is added; and nobody else touches these columns of the row that is written.
    pub unsafe fn store<T: Float>(
        &self,
        scratch: &mut Scratch,
        row: usize,
        product: &mut [f32],
        times: Option<&[f32]>,
    ) {
        let Scratch {
            total,
            wide,
            rounded,
        } = scratch;
        let Sum {
            out,
            first,
            ref addends,
            bias,
            activation,
            residual,
        } = *self.sum;
        let is_bound = |matrix: usize| !self.places[matrix].ptr.is_null();
        let total = match addends.is_empty() {
            true => product,
            false => {
                let (total, wide) = (grown(total, self.length), grown(wide, self.length));
                for (index, addend) in addends.iter().enumerate() {
                    match *addend {
                        Addend::Product => {
                            rounded.resize(
                                (self.length * size_of::<T>()).div_ceil(size_of::<f32>()),
                                0.0,
                            );
                            let rounded: &mut [T] =
                                &mut bytemuck::cast_slice_mut(rounded)[..self.length];
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
        };
        let bias = bias.filter(|bias| is_bound(bias.matrix));
        // SAFETY: as this function's.
        let bias = bias.map(|Bias { matrix, first }| unsafe {
            let behind = first + self.matrices[out].columns;
            let times = times.map(|_| self.row::<T>(matrix, 0, behind));
            (self.row::<T>(matrix, 0, first), times)
        });
        if let Some((bias, _)) = bias {
            add(total, bias.iter().map(|bias| bias.to_f32()));
        }
        if activation != Activation::Identity {
            total.iter_mut().for_each(|x| *x = activation.apply(*x));
        }
        if let Some(times) = times {
            let of_times = bias.and_then(|(_, of_times)| of_times);
            for (column, (total, times)) in total.iter_mut().zip(times).enumerate() {
                *total *= times + of_times.map_or(0.0, |bias| bias[column].to_f32());
            }
        }
        if let Some(Residual { matrix, first }) = residual.filter(|r| is_bound(r.matrix)) {
            // SAFETY: as this function's.
            let residual = unsafe { self.row::<T>(matrix, first + row, 0) };
            add(total, residual.iter().map(|residual| residual.to_f32()));
        }
        // SAFETY: as this function's.
        unsafe {
            match self.matrices[out].dtype {
                DType::F32 => self.round::<f32>(first + row, total),
                _ => self.round::<T>(first + row, total),
            }
        }
    }

    /// # Safety
    /// As [`Columns::store`], and the output is of this type.
    unsafe fn round<T: Float>(&self, row: usize, total: &[f32]) {
        // SAFETY: as this function's.
        let to = unsafe {
            let first = self.places[self.sum.out].element::<T>(row, self.begin);
            std::slice::from_raw_parts_mut(first, self.length)
        };
        T::round(total, to);
    }
}

fn add(total: &mut [f32], more: impl Iterator<Item = f32>) {
    for (total, more) in total.iter_mut().zip(more) {
        *total += more;
    }
}
