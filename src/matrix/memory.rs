//! Matrices as other languages describe them.

use std::fmt;

use super::bytes_of_dtype;
use crate::backend::Backend;
use crate::element::DType;
use crate::refusal::{Refusal, Result};

/// A matrix in this rank's memory: on the host backend in the process's, on GPUs in the device's.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Memory {
    /// The address of the first element.
    pub address: u64,
    /// The type of the elements.
    pub dtype: DType,
    /// [rows, columns]
    pub shape: [usize; 2],
    /// Bytes from row to row.
    pub pitch: usize,
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Memory {
            address,
            dtype,
            shape,
            pitch,
        } = self;
        write!(f, "{dtype}{shape:?} at {address:#x}, pitch {pitch}")
    }
}

impl Memory {
    /// Bytes of a row that are elements.
    pub fn width(&self) -> usize {
        self.shape[1].saturating_mul(self.dtype.bytes())
    }

    /// Checks that calls can use the memory. `argument`: its name in messages.
    pub(crate) fn check<B: Backend>(&self, argument: &str) -> Result<()> {
        let [rows, columns] = self.shape;
        bytes_of_dtype(self.dtype, rows, columns)?;
        // A power of two, so that no division is needed.
        let multiple = B::ROW_ALIGNMENT.max(self.dtype.bytes());
        let pitch = if rows > 1 { self.pitch } else { 0 };
        for (what, value) in [("address", self.address as usize), ("pitch", pitch)] {
            if rows > 0 && value & (multiple - 1) != 0 {
                return Err(Refusal::Unaligned {
                    what: format!("the {what} of {argument}"),
                    value,
                    multiple,
                });
            }
        }
        if rows > 1 && pitch < self.width() {
            return Err(Refusal::Limit {
                what: format!("the pitch of {argument}, in bytes,"),
                value: pitch,
                min: self.width(),
                max: usize::MAX,
            });
        }
        if rows > 0 && self.address == 0 {
            return Err(Refusal::Unsuitable {
                argument: argument.into(),
                what: "the address".into(),
                expected: "that of memory".into(),
                found: "null".into(),
            });
        }
        Ok(())
    }
}
