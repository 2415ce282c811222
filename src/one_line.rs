//! Parts of `Debug` in one short line. Programs print their own structs, which hold types of this library.

use std::fmt::{Display, Formatter, Result};

/// The most parts that are written.
const MOST: usize = 8;
/// The most characters of a text that are written.
const MOST_CHARACTERS: usize = 40;

/// Writes `(part, part)`, or nothing if there is no part.
pub fn write_parts<P: Display>(f: &mut Formatter, parts: impl IntoIterator<Item = P>) -> Result {
    let mut parts = parts.into_iter().enumerate().peekable();
    if parts.peek().is_none() {
        return Ok(());
    }
    for (number, part) in parts {
        match number {
            0 => write!(f, "({part}")?,
            MOST => return f.write_str(", ..)"),
            _ => write!(f, ", {part}")?,
        }
    }
    f.write_str(")")
}

/// An option of a builder as a part, if it is set.
pub fn option<V: Display>(name: &str, value: Option<V>) -> Option<String> {
    value.map(|value| format!("{name} {value}"))
}

/// The beginning of a text that the program has chosen.
pub fn beginning(text: &str) -> String {
    let beginning: String = text.escape_debug().take(MOST_CHARACTERS).collect();
    format!("\"{beginning}\"")
}
