//! What can go wrong, and who is at fault.

pub(crate) mod context;
mod dialect;
mod kind;
mod require;
mod words;

// Users find these at the root.
pub(crate) use self::context::{Error, Result};
pub use self::dialect::Dialect;
pub use self::kind::{Class, Deadline, Kind};
#[cfg(not(loom))]
pub(crate) use self::require::{require_count, require_elements, require_shape};
#[cfg(not(loom))]
pub(crate) use self::words::{Counted, Listed};
pub use crate::call::{Call, MadeCall, called_at};

#[cfg(test)]
mod tests;
#[cfg(test)]
pub(crate) use self::tests::examples;
