//! The words in which a rank posts a collective call, for the other ranks to compare and to read.

use crate::call::Ordinal;
use crate::call::{self, SourceLine};
use crate::error::MadeCall;
use crate::protocol::epoch::Epoch;
use crate::schedule::Agreed;
use crate::schedule::agreed::hash;

/// Words of a post.
pub const WORDS: usize = FIXED + TEXT;
/// Words of a post before its text: the call's digest, the operation's epoch, and its matrices.
pub const FIXED: usize = 2 + MATRICES / 2;
/// Words of a post that hold text: what ranks must agree on.
const TEXT: usize = 24;
/// The most matrices that ranks share in an operation.
pub const MATRICES: usize = 4;

/// The first word of a call that gathers messages. An operation's first word is a digest, which is always different.
pub const MESSAGES: u64 = u64::MAX;
/// The number in the place of a matrix that is not there.
const NO_MATRIX: u32 = u32::MAX;
/// This bit of the first word is set if the operation is traced.
const TRACED: u64 = 1 << 63;
/// This bit of the first word is set if the operation adds a bias.
const BIASED: u64 = 1 << 62;
/// This bit of the first word is set if the operation adds a residual.
const RESIDUAL: u64 = 1 << 61;

/// A call of a collective operation, as it is posted.
#[derive(Clone, Copy, Debug)]
pub struct PostedCall<'a> {
    /// What all ranks must agree on, apart from the memory that the call binds.
    pub agreed: &'a Agreed,
    /// The numbers of the group's sharded matrices that the call uses, counted from 0. At most [`MATRICES`].
    pub matrices: &'a [u32],
    /// True if the call is traced. All ranks trace it or none does.
    pub traced: bool,
    /// True if it adds a bias. All ranks give one or none does.
    pub biased: bool,
    /// True if it adds a residual. All ranks give one or none does.
    pub residual: bool,
    /// Where the program makes the call. It is not posted, because there is no room.
    pub place: SourceLine,
}

impl PostedCall<'_> {
    /// The words of the post.
    pub fn to_words(self, epoch: Epoch) -> [u64; WORDS] {
        let mut words = [0; WORDS];
        // The shift makes it differ from the first word of a call that gathers messages.
        words[0] = self.agreed.digest() >> 4;
        let bits = [
            (self.traced, TRACED),
            (self.biased, BIASED),
            (self.residual, RESIDUAL),
        ];
        for (is_so, bit) in bits {
            words[0] |= if is_so { bit } else { 0 };
        }
        words[1] = epoch.raw().into();
        let mut matrices = [NO_MATRIX; MATRICES];
        for (place, number) in matrices.iter_mut().zip(self.matrices) {
            *place = *number;
        }
        for (word, pair) in words[2..].iter_mut().zip(matrices.chunks_exact(2)) {
            *word = u64::from(pair[0]) << 32 | u64::from(pair[1]);
        }
        // The text is cut to the room that is left. It is for readers; the digest tells calls apart.
        let bytes = self.agreed.lines().bytes().take(8 * TEXT);
        for (index, byte) in bytes.enumerate() {
            words[FIXED + index / 8] |= u64::from(byte) << (8 * (index % 8));
        }
        words
    }
}

impl PostedCall<'_> {
    /// A number that is the same for equal calls.
    pub fn key(self, epoch: Epoch) -> u64 {
        let words = self.to_words(epoch);
        let bytes: Vec<u8> = words[..FIXED]
            .iter()
            .flat_map(|word| word.to_le_bytes())
            .collect();
        hash(&bytes)
    }

    /// The call with its place.
    pub fn in_words(self) -> String {
        let place = call::in_words(self.place);
        let call = describe(self.to_words(Epoch::FIRST));
        MadeCall { place, ..call }.in_words()
    }
}

/// The operation that a rank posted.
pub fn describe(words: [u64; WORDS]) -> MadeCall {
    let text = words[FIXED..].iter().flat_map(|word| word.to_le_bytes());
    let text: Vec<u8> = text.take_while(|&byte| byte != 0).collect();
    let more = if text.len() == 8 * TEXT { " …" } else { "" };
    let lines = format!("{}{more}", String::from_utf8_lossy(&text));
    let mut call = MadeCall::from_lines(&lines);
    let numbers = words[2..FIXED].iter();
    let numbers = numbers.flat_map(|word| [(word >> 32) as u32, *word as u32]);
    let numbers = numbers.filter(|&number| number != NO_MATRIX);
    let ordinal = |number| Ordinal(u64::from(number) + 1);
    let matrices = numbers.map(|n| format!("the {} sharded matrix of the group", ordinal(n)));
    call.arguments.extend(matrices);
    let added = [
        (TRACED, "a trace"),
        (BIASED, "a bias"),
        (RESIDUAL, "a residual"),
    ];
    let added = added.into_iter().filter(|(bit, _)| words[0] & bit != 0);
    call.arguments.extend(added.map(|(_, word)| word.into()));
    call
}
