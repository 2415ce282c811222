//! What all ranks must agree on in an operation. It is compared at each call.

use std::sync::Arc;

/// What all ranks must agree on in an operation, in words, and as a digest that tells operations apart.
///
/// If rows are gathered, the weight of a rank and its N are not part of it, because they may differ between ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Agreed {
    digest: u64,
    name: Arc<str>,
    details: Arc<str>,
}

impl Agreed {
    /// `name` is the name of the call. `details` says what ranks must agree on, for a reader.
    pub fn new(name: &str, details: &str) -> Agreed {
        Agreed {
            digest: [name, "(", details, ")"]
                .iter()
                .fold(OFFSET, |digest, part| absorb(digest, part.as_bytes())),
            name: name.into(),
            details: details.into(),
        }
    }

    /// A number that differs if ranks do not agree.
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

/// The FNV-1a hash, which is the same in every build.
pub fn hash(bytes: &[u8]) -> u64 {
    absorb(OFFSET, bytes)
}

const OFFSET: u64 = 0xcbf2_9ce4_8422_2325;

/// Continues `hash` with these bytes.
fn absorb(hash: u64, bytes: &[u8]) -> u64 {
    bytes.iter().fold(hash, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3)
    })
}
