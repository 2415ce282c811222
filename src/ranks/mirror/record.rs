//! What hosts tell one another, as bytes.

use crate::ranks::call::WORDS;
use crate::ranks::shared_state::{FAULT_BYTES, NOTE_BYTES};

/// The longest record: a failure, or a call with its words.
pub const MAX_RECORD: usize = max(2 + FAULT_BYTES, 2 + 8 * (1 + WORDS) + 1 + NOTE_BYTES);
const LENGTH: usize = size_of::<u32>();

/// Something that a rank has written in its host's block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Record {
    /// The leader `leader` runs.
    Beat { leader: usize },
    /// A call. `lines` are its words, if it is an exchange of messages.
    Post {
        rank: usize,
        number: u64,
        words: Box<[u64; WORDS]>,
        lines: Option<Vec<u8>>,
    },
    /// The same call as that of the [`Record::Post`] before, by another rank. Most calls are.
    Again { rank: usize },
    /// Why the rank was refused its call `number`. `age` is how long ago in ms; None if the refusal was withdrawn.
    Refusal {
        rank: usize,
        number: u64,
        age: Option<u64>,
        note: Vec<u8>,
    },
    /// The rank has waited for a peer, `age` ms ago. `peer` is 0 if it has not waited, or 1 + its number.
    Wait { rank: usize, peer: u8, age: u64 },
    /// The rank has waited for rank `peer` in a part of the group, `age` ms ago. `call`: the part and its call in words.
    /// Empty if the rank's note tells of a different wait, as that of another thread.
    PartWait {
        rank: usize,
        peer: u8,
        age: u64,
        call: Vec<u8>,
    },
    /// The first failure of a host, which one of its ranks has reported.
    Proposal { rank: usize, failure: Vec<u8> },
    /// The group's first failure.
    Fault { rank: usize, failure: Vec<u8> },
    /// The rank has let go of the group or, if `is_gone`, has left for the stated reason.
    Left {
        rank: usize,
        is_gone: bool,
        reason: Option<Vec<u8>>,
    },
}

impl Record {
    /// The rank that has written it.
    pub fn rank(&self) -> Option<usize> {
        match *self {
            Record::Beat { leader } => Some(leader),
            Record::Post { rank, .. }
            | Record::Again { rank }
            | Record::Refusal { rank, .. }
            | Record::Wait { rank, .. }
            | Record::PartWait { rank, .. }
            | Record::Proposal { rank, .. }
            | Record::Fault { rank, .. }
            | Record::Left { rank, .. } => Some(rank),
        }
    }

    /// True if it says only that something goes on.
    pub fn is_minor(&self) -> bool {
        matches!(
            self,
            Record::Beat { .. } | Record::Wait { .. } | Record::PartWait { .. }
        )
    }

    /// The same call by `by`, if this is a call.
    pub fn again_by(&self, by: usize) -> Option<Record> {
        let mut again = self.clone();
        match &mut again {
            Record::Post { rank, .. } => *rank = by,
            _ => return None,
        }
        Some(again)
    }

    /// True if both are calls that differ in their ranks alone.
    pub fn is_again(&self, before: &Record) -> bool {
        let by = before.rank().unwrap_or(0);
        self.again_by(by).as_ref() == Some(before)
    }

    /// Appends the record: the length of what follows in four bytes, its kind, its rank, its fields.
    pub fn encode(&self, bytes: &mut Vec<u8>) {
        let begin = bytes.len();
        bytes.extend([0; LENGTH]);
        bytes.extend([self.kind(), self.rank().unwrap_or(0) as u8]);
        self.encode_fields(bytes);
        let length = (bytes.len() - begin - LENGTH) as u32;
        bytes[begin..][..LENGTH].copy_from_slice(&length.to_le_bytes());
    }

    fn kind(&self) -> u8 {
        match self {
            Record::Beat { .. } => 0,
            Record::Post { .. } => 1,
            Record::Refusal { .. } => 2,
            Record::Wait { .. } => 3,
            Record::Proposal { .. } => 4,
            Record::Fault { .. } => 5,
            Record::Left { .. } => 6,
            Record::Again { .. } => 7,
            Record::PartWait { .. } => 8,
        }
    }

    fn encode_fields(&self, bytes: &mut Vec<u8>) {
        match self {
            Record::Beat { .. } | Record::Again { .. } => {}
            Record::Post {
                number,
                words,
                lines,
                ..
            } => {
                put_number(bytes, *number);
                words.iter().for_each(|&word| put_number(bytes, word));
                put_option(bytes, lines.as_deref());
            }
            Record::Refusal {
                number, age, note, ..
            } => {
                put_number(bytes, *number);
                put_number(bytes, age.unwrap_or(u64::MAX));
                bytes.extend(note);
            }
            Record::Wait { peer, age, .. } => {
                put_number(bytes, *age);
                bytes.push(*peer);
            }
            Record::PartWait {
                peer, age, call, ..
            } => {
                put_number(bytes, *age);
                bytes.push(*peer);
                bytes.extend(call);
            }
            Record::Proposal { failure, .. } | Record::Fault { failure, .. } => {
                bytes.extend(failure);
            }
            Record::Left {
                is_gone, reason, ..
            } => {
                bytes.push(u8::from(*is_gone));
                put_option(bytes, reason.as_deref());
            }
        }
    }

    /// Takes the first record off `bytes`. None if it has not come whole.
    ///
    /// # Errors
    /// If the bytes are no record.
    pub fn take(bytes: &mut &[u8]) -> Result<Option<Record>, String> {
        let Some((length, rest)) = bytes.split_first_chunk::<LENGTH>() else {
            return Ok(None);
        };
        let length = u32::from_le_bytes(*length) as usize;
        if length > MAX_RECORD {
            return Err(format!("a record of {length} bytes"));
        }
        let Some((body, rest)) = rest.split_at_checked(length) else {
            return Ok(None);
        };
        let record = Record::decode(body).ok_or("bytes that are no record")?;
        *bytes = rest;
        Ok(Some(record))
    }

    fn decode(body: &[u8]) -> Option<Record> {
        let ([kind, rank], mut rest) = body.split_first_chunk::<2>()?;
        let rank = usize::from(*rank);
        let rest = &mut rest;
        Some(match kind {
            0 => Record::Beat { leader: rank },
            1 => {
                let number = take_number(rest)?;
                let mut words = Box::new([0; WORDS]);
                for word in words.iter_mut() {
                    *word = take_number(rest)?;
                }
                Record::Post {
                    rank,
                    number,
                    words,
                    lines: take_option(rest)?,
                }
            }
            2 => Record::Refusal {
                rank,
                number: take_number(rest)?,
                age: Some(take_number(rest)?).filter(|&age| age != u64::MAX),
                note: rest.to_vec(),
            },
            3 => Record::Wait {
                rank,
                age: take_number(rest)?,
                peer: *rest.first()?,
            },
            4 => Record::Proposal {
                rank,
                failure: rest.to_vec(),
            },
            5 => Record::Fault {
                rank,
                failure: rest.to_vec(),
            },
            6 => {
                let (is_gone, rest) = rest.split_first()?;
                Record::Left {
                    rank,
                    is_gone: *is_gone != 0,
                    reason: take_option(&mut &*rest)?,
                }
            }
            7 => Record::Again { rank },
            8 => {
                let age = take_number(rest)?;
                let (&peer, call) = rest.split_first()?;
                Record::PartWait {
                    rank,
                    peer,
                    age,
                    call: call.to_vec(),
                }
            }
            _ => return None,
        })
    }
}

const fn max(one: usize, other: usize) -> usize {
    if one > other { one } else { other }
}

/// Appends a text that may be missing, to the end of the record.
fn put_option(bytes: &mut Vec<u8>, text: Option<&[u8]>) {
    bytes.push(u8::from(text.is_some()));
    bytes.extend(text.unwrap_or_default());
}

fn take_option(bytes: &mut &[u8]) -> Option<Option<Vec<u8>>> {
    let (is_there, text) = bytes.split_first()?;
    Some((*is_there != 0).then(|| text.to_vec()))
}

fn put_number(bytes: &mut Vec<u8>, number: u64) {
    bytes.extend(number.to_le_bytes());
}

fn take_number(bytes: &mut &[u8]) -> Option<u64> {
    let (number, rest) = bytes.split_first_chunk::<8>()?;
    *bytes = rest;
    Some(u64::from_le_bytes(*number))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn records() -> Vec<Record> {
        let (rank, number) = (63, u64::MAX - 1);
        vec![
            Record::Beat { leader: 62 },
            Record::Post {
                rank,
                number,
                words: Box::new(std::array::from_fn(|word| word as u64)),
                lines: Some(b"barrier".to_vec()),
            },
            Record::Post {
                rank,
                number: 1,
                words: Box::new([7; WORDS]),
                lines: None,
            },
            Record::Again { rank: 7 },
            Record::Refusal {
                rank,
                number,
                age: Some(3),
                note: b"why".to_vec(),
            },
            Record::Refusal {
                rank,
                number,
                age: None,
                note: Vec::new(),
            },
            Record::Wait {
                rank,
                peer: 64,
                age: 12,
            },
            Record::PartWait {
                rank,
                peer: 63,
                age: 12,
                call: b"group \"a\" in barrier()".to_vec(),
            },
            Record::Proposal {
                rank,
                failure: b"{}".to_vec(),
            },
            Record::Fault {
                rank,
                failure: b"{}".to_vec(),
            },
            Record::Left {
                rank,
                is_gone: true,
                reason: Some(b"because".to_vec()),
            },
            Record::Left {
                rank: 0,
                is_gone: false,
                reason: None,
            },
        ]
    }

    #[test]
    fn records_are_read_as_they_were_written_and_not_before_they_are_whole() {
        let mut bytes = Vec::new();
        for record in records() {
            let begin = bytes.len();
            record.encode(&mut bytes);
            for end in begin..bytes.len() {
                assert_eq!(Record::take(&mut &bytes[begin..end]), Ok(None));
            }
        }
        let mut rest = &bytes[..];
        for record in records() {
            assert_eq!(Record::take(&mut rest), Ok(Some(record)));
        }
        assert!(rest.is_empty());
    }

    #[test]
    fn a_call_that_another_rank_has_made_is_the_same_again() {
        let records = records();
        let [call, other] = [&records[1], &records[2]];
        let again = call.again_by(5).unwrap();
        assert_eq!(again.rank(), Some(5));
        assert!(again.is_again(call) && !other.is_again(call));
        assert_eq!(records[0].again_by(5), None);
    }

    #[test]
    fn bytes_that_are_no_record_are_refused() {
        for bytes in [
            &u32::MAX.to_le_bytes()[..],
            &[1, 0, 0, 0, 0],
            &[2, 0, 0, 0, 99, 0],
            &[3, 0, 0, 0, 1, 0, 5],
        ] {
            assert!(Record::take(&mut &*bytes).is_err(), "{bytes:?}");
        }
    }
}
