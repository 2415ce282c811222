//! Matrices as other languages describe them.

use std::fmt;

use super::{Place, bytes_of_dtype};
use crate::backend::Backend;
use crate::element::DType;
use crate::error::{Error, Kind, Result};

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

    /// Where the elements lie.
    pub(crate) fn place(&self) -> Place {
        Place {
            address: self.address,
            rows: self.shape[0],
            width: self.width(),
            pitch: self.pitch,
        }
    }

    /// The bytes from row to row of memory that has been checked. The pitch of a single row says nothing, and that of
    /// no elements neither, so these have a pitch that fits their width.
    pub(crate) fn effective_pitch<B: Backend>(&self) -> usize {
        let [rows, columns] = self.shape;
        if rows > 1 && columns > 0 {
            return self.pitch;
        }
        self.width().next_multiple_of(B::ROW_ALIGNMENT.max(1))
    }

    /// Checks that calls can use the memory. `argument`: its name in messages.
    pub(crate) fn check<B: Backend>(&self, argument: &str) -> Result<()> {
        let [rows, columns] = self.shape;
        bytes_of_dtype(self.dtype, rows, columns)?;
        // A power of two, so that no division is needed.
        let multiple = B::ROW_ALIGNMENT.max(self.dtype.bytes());
        // Without elements, address and pitch say nothing.
        if rows == 0 || columns == 0 {
            return Ok(());
        }
        let pitch = if rows > 1 { self.pitch } else { 0 };
        for (what, value) in [("address", self.address as usize), ("pitch", pitch)] {
            if value & (multiple - 1) != 0 {
                let what = format!("the {what} of {argument}");
                return Err(Error::unaligned(what, value, multiple));
            }
        }
        // Rust's and CUDA's offsets are signed.
        let most = match rows {
            0 | 1 => usize::MAX,
            _ => (isize::MAX as usize - self.width()) / (rows - 1),
        };
        if rows > 1 && !(self.width()..=most).contains(&pitch) {
            return Err(Error::of_kind(Kind::Limit {
                what: format!("the pitch of {argument}, in bytes,"),
                value: pitch,
                min: self.width(),
                max: most,
            }));
        }
        let bytes = rows.saturating_sub(1) * pitch + self.width();
        let is_there = self.address != 0 && self.address.checked_add(bytes as u64).is_some();
        if !is_there {
            return Err(Error::unsuitable(
                format!("the address of {argument}"),
                format!("that of {bytes} bytes of memory"),
                match self.address {
                    0 => "null".into(),
                    address => format!("{address:#x}"),
                },
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Host;

    fn checked(address: u64, shape: [usize; 2], pitch: usize) -> Result<()> {
        let dtype = DType::Bf16;
        let memory = Memory {
            address,
            dtype,
            shape,
            pitch,
        };
        memory.check::<Host>("a")
    }

    #[test]
    fn memory_ends_within_the_address_space() {
        let most = (isize::MAX as usize - 16) / 7;
        assert_eq!(checked(4096, [8, 8], 16), Ok(()));
        assert_eq!(checked(4096, [8, 8], most - most % 2), Ok(()));
        for pitch in [most + 2 - most % 2, 1 << 62, 1 << 63, usize::MAX - 1] {
            let refused = checked(4096, [8, 8], pitch);
            assert!(matches!(refused.unwrap_err().kind(), Kind::Limit { .. }));
        }
        // A single row has no pitch, and no rows lie nowhere.
        assert_eq!(checked(4096, [1, 8], usize::MAX), Ok(()));
        assert_eq!(checked(u64::MAX, [0, 8], usize::MAX), Ok(()));
        for (shape, counts) in [([1, 8], 16), ([0, 8], 16), ([8, 0], 0), ([8, 8], 48)] {
            let memory = Memory {
                address: 4096,
                dtype: DType::Bf16,
                shape,
                pitch: 48,
            };
            assert_eq!(memory.effective_pitch::<Host>(), counts, "{shape:?}");
        }
        for address in [0, u64::MAX - 15, u64::MAX - 1] {
            let refused = checked(address, [8, 8], 16);
            assert!(matches!(
                refused.unwrap_err().kind(),
                Kind::Unsuitable { .. }
            ));
        }
        for extent in [1 << 31, 1 << 63, usize::MAX] {
            assert!(checked(4096, [extent, 8], 16).is_err());
            assert!(checked(4096, [8, extent], 16).is_err());
        }
    }
}
