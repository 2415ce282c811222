//! What all ranks must agree on in an operation: compared at each call.

use std::sync::Arc;

/// An operation as far as all ranks must agree on it, in words and as a number that tells operations apart. What a rank
/// multiplies with, into how many columns, is its own affair and no part of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Agreed {
    digest: u64,
    name: Arc<str>,
    details: Arc<str>,
}

impl Agreed {
    /// `name`: the call's. `details`: what ranks must agree on, for a reader.
    pub fn new(name: &str, details: &str) -> Agreed {
        Agreed {
            digest: [name, "(", details, ")"]
                .iter()
                .fold(OFFSET, |digest, part| absorb(digest, part.as_bytes())),
            name: name.into(),
            details: details.into(),
        }
    }

    /// Differs where ranks do not agree.
    pub fn digest(&self) -> u64 {
        self.digest
    }

    /// The name of the call.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What ranks must agree on, in words.
    pub fn details(&self) -> &str {
        &self.details
    }
}

/// FNV-1a: the same in every build.
pub fn hash(bytes: &[u8]) -> u64 {
    absorb(OFFSET, bytes)
}

const OFFSET: u64 = 0xcbf2_9ce4_8422_2325;

/// The hash of what came before and of these bytes.
fn absorb(hash: u64, bytes: &[u8]) -> u64 {
    bytes.iter().fold(hash, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3)
    })
}
