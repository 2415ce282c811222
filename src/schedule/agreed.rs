//! What all ranks must agree on in an operation. It is compared at each call.

use std::sync::Arc;

/// What all ranks must agree on in an operation, in words, and as a digest that tells operations apart.
///
/// If rows are gathered, the weight of a rank and its N are not part of it, because they may differ between ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Agreed {
    digest: u64,
    /// The call's name and then its arguments, a line each.
    lines: Arc<str>,
}

impl Agreed {
    /// `name` is the name of the call. `arguments` say what ranks must agree on, for a reader. Those of the configuration
    /// are of `of_configuration`.
    pub fn new<S: AsRef<str>>(name: &str, arguments: impl IntoIterator<Item = S>) -> Agreed {
        let mut lines = String::from(name);
        for argument in arguments {
            lines.push('\n');
            lines.push_str(argument.as_ref());
        }
        Agreed {
            digest: hash(lines.as_bytes()),
            lines: lines.into(),
        }
    }

    /// A number that differs if ranks do not agree.
    pub fn digest(&self) -> u64 {
        self.digest
    }

    /// The name of the call.
    pub fn name(&self) -> &str {
        self.lines.split('\n').next().unwrap_or_default()
    }

    /// What ranks must agree on, in words.
    pub fn details(&self) -> String {
        let arguments = self.lines.split('\n').skip(1).map(str::trim_start);
        arguments.collect::<Vec<_>>().join(", ")
    }

    /// The name of the call and then what ranks must agree on, a line each.
    pub fn lines(&self) -> &str {
        &self.lines
    }
}

/// The FNV-1a hash, which is the same in every build.
pub fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3)
    })
}
