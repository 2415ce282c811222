//! Checks that return an error: `limit` for numbers out of bounds, `require` for what is not supported.

use crate::error::{Error, Kind, Result};

/// # Errors
/// `Kind::Limit` if `value` is below `min` or above `max`.
#[inline]
pub(crate) fn limit(what: &str, value: usize, min: usize, max: usize) -> Result<()> {
    if (min..=max).contains(&value) {
        return Ok(());
    }
    Err(out_of(what, value, min, max))
}

/// A separate cold function, so that the common path stays short.
#[cold]
pub(super) fn out_of(what: &str, value: usize, min: usize, max: usize) -> Error {
    Error::of_kind(Kind::Limit {
        what: what.into(),
        value,
        min,
        max,
    })
}

/// Checks that `holds`. `what` says what must hold, for example "operands must be bf16 or f16".
///
/// # Errors
/// `Kind::Unsupported` if `holds` is false.
#[inline]
pub(crate) fn require(what: &str, holds: bool) -> Result<()> {
    if holds {
        Ok(())
    } else {
        Err(unsupported(what))
    }
}

#[cold]
fn unsupported(what: &str) -> Error {
    Error::unsupported(what)
}
