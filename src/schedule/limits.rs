//! What is out of bounds is refused by its name, and what is not supported by what must hold instead.

use crate::error::{Error, Result};

/// # Errors
/// [`Error::Limit`] where `value` is below `min` or above `max`.
#[inline]
pub(crate) fn limit(what: &str, value: usize, min: usize, max: usize) -> Result<()> {
    if (min..=max).contains(&value) {
        return Ok(());
    }
    Err(out_of(what, value, min, max))
}

/// Apart, so that what is within its limits takes no longer for it.
#[cold]
pub(super) fn out_of(what: &str, value: usize, min: usize, max: usize) -> Error {
    Error::Limit {
        what: what.into(),
        value,
        min,
        max,
    }
}

/// `what`: what must hold, for example "operands must be bf16 or f16".
///
/// # Errors
/// [`Error::Unsupported`] unless it holds.
#[inline]
pub(crate) fn require(what: &str, holds: bool) -> Result<()> {
    match holds {
        true => Ok(()),
        false => Err(unsupported(what)),
    }
}

#[cold]
fn unsupported(what: &str) -> Error {
    Error::Unsupported { what: what.into() }
}
