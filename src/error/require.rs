//! Checks that many calls make.

use super::{Error, Result};

/// Checks the shape of `argument`, which names its extents too.
pub fn require_shape(argument: &str, expected: [usize; 2], found: [usize; 2]) -> Result<()> {
    if expected == found {
        Ok(())
    } else {
        Err(Error::shape(argument, &expected, &found))
    }
}

/// Checks that `part` has as many things as `whole`. `unit` is the name of one.
pub fn require_count(
    whole: &str,
    unit: &str,
    expected: usize,
    part: &str,
    found: usize,
) -> Result<()> {
    if expected == found {
        return Ok(());
    }
    let what = format!("the number of {unit}s of {part}");
    let expected = format!("{expected}, that of {whole}");
    Err(Error::unsuitable(what, expected, found.to_string()))
}

/// Checks that `part` has an element for each of a matrix of this shape.
pub fn require_elements([rows, columns]: [usize; 2], part: &str, found: usize) -> Result<()> {
    // The text is made only for the error.
    if rows * columns == found {
        return Ok(());
    }
    let whole = format!("a [{rows}, {columns}] matrix");
    require_count(&whole, "element", rows * columns, part, found)
}
