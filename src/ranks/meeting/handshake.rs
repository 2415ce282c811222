//! The handshake between a leader and rank 0, by which each proves to the other that it has the job's key.
//!
//! | bytes | from | what they hold |
//! |---|---|---|
//! | greeting | the leader | magic, protocol version, rank, a random number, a MAC |
//! | answer | rank 0 | a random number, a MAC of both numbers |
//! | proof | the leader | a MAC of both numbers and of what follows; the length of that; a report as JSON |
//!
//! Each MAC (HMAC-SHA256) is of its message's name too, so that none can be used as another. Rank 0 sends no byte to who
//! does not have the key: it answers only to greetings with a right MAC. A greeting that somebody has recorded and sends again
//! gets an answer, which is of no use without the key. What follows the handshake is neither encrypted nor authenticated.

use hmac_sha256::{HMAC, Hash};
use rustix::rand::{GetRandomFlags, getrandom};

use crate::ranks::secret::Secret;

const MAGIC: [u8; 8] = *b"gemmesh\x01";
const NONCE: usize = 32;
const MAC: usize = 32;

/// The key of a job, which all of its ranks have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Key(Secret<[u8; 32]>);

/// A number that is used once.
pub type Nonce = [u8; NONCE];

impl Key {
    /// A text is hashed first, because HMAC does not tell keys apart that differ only in zeros at their end. Jobs with
    /// the same text have different keys.
    pub fn of(text: &str, job: &str) -> Key {
        Key(Secret::new(HMAC::mac(job, Hash::hash(text.as_bytes()))))
    }

    fn text(name: &str, parts: &[&[u8]]) -> Vec<u8> {
        [name.as_bytes(), b"\0", &parts.concat()].concat()
    }

    fn mac(&self, name: &str, parts: &[&[u8]]) -> [u8; MAC] {
        HMAC::mac(Key::text(name, parts), self.0.reveal())
    }

    /// Takes the same time whatever the difference is.
    fn verify(&self, name: &str, parts: &[&[u8]], mac: &[u8; MAC]) -> bool {
        HMAC::verify(Key::text(name, parts), self.0.reveal(), mac)
    }
}

/// Draws a random number.
pub fn nonce() -> std::io::Result<Nonce> {
    let mut nonce = [0; NONCE];
    // So few bytes come in one piece or not at all.
    match getrandom(&mut nonce, GetRandomFlags::empty())? {
        NONCE => Ok(nonce),
        _ => Err(std::io::ErrorKind::UnexpectedEof.into()),
    }
}

/// The first message. Its layout is the same in every version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Greeting {
    pub version: u32,
    pub rank: u32,
    pub nonce: Nonce,
}

impl Greeting {
    pub const BYTES: usize = 8 + 4 + 4 + NONCE + MAC;
    const NAME: &'static str = "greeting";

    pub fn encode(&self, key: &Key) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(self.version.to_le_bytes());
        bytes.extend(self.rank.to_le_bytes());
        bytes.extend(self.nonce);
        bytes.extend(key.mac(Greeting::NAME, &[&bytes]));
        bytes
    }

    /// None if the sender does not have the key.
    pub fn decode(bytes: &[u8; Greeting::BYTES], key: &Key) -> Option<Greeting> {
        let (body, mac) = bytes.split_last_chunk::<MAC>()?;
        if !key.verify(Greeting::NAME, &[body], mac) {
            return None;
        }
        let (magic, rest) = body.split_first_chunk::<8>()?;
        let (version, rest) = rest.split_first_chunk::<4>()?;
        let (rank, rest) = rest.split_first_chunk::<4>()?;
        (*magic == MAGIC).then_some(Greeting {
            version: u32::from_le_bytes(*version),
            rank: u32::from_le_bytes(*rank),
            nonce: *rest.first_chunk()?,
        })
    }

    /// True if a greeting may begin with `bytes`.
    pub fn may_begin_with(bytes: &[u8]) -> bool {
        let known = bytes.len().min(MAGIC.len());
        bytes[..known] == MAGIC[..known]
    }
}

/// The numbers that both ends have drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Nonces {
    pub leaders: Nonce,
    pub first: Nonce,
}

impl Nonces {
    pub const ANSWER_BYTES: usize = NONCE + MAC;
    const ANSWER: &'static str = "answer";

    pub fn answer(&self, key: &Key) -> Vec<u8> {
        let mac = key.mac(Nonces::ANSWER, &[&self.leaders, &self.first]);
        [self.first, mac].concat()
    }

    /// The numbers after rank 0's answer. None if the sender does not have the key.
    pub fn of_answer(
        leaders: Nonce,
        bytes: &[u8; Nonces::ANSWER_BYTES],
        key: &Key,
    ) -> Option<Nonces> {
        let (first, mac) = bytes.split_first_chunk::<NONCE>()?;
        let parts: [&[u8]; 2] = [&leaders, first];
        let is_right = key.verify(Nonces::ANSWER, &parts, mac.first_chunk()?);
        is_right.then_some(Nonces {
            leaders,
            first: *first,
        })
    }
}

/// The last message.
pub struct Proof;

impl Proof {
    /// The bytes before the report.
    pub const HEADER: usize = MAC + 4;
    const NAME: &'static str = "proof";

    pub fn encode(nonces: &Nonces, report: &[u8], key: &Key) -> Vec<u8> {
        let length = (report.len() as u32).to_le_bytes();
        let mac = key.mac(
            Proof::NAME,
            &[&nonces.leaders, &nonces.first, &length, report],
        );
        [&mac[..], &length, report].concat()
    }

    /// How long the report is.
    pub fn length(header: &[u8; Proof::HEADER]) -> usize {
        let length = header.last_chunk().copied().unwrap_or_default();
        u32::from_le_bytes(length) as usize
    }

    /// True if the sender of `header` and `report` has the key.
    pub fn is_right(
        nonces: &Nonces,
        header: &[u8; Proof::HEADER],
        report: &[u8],
        key: &Key,
    ) -> bool {
        let Some((mac, length)) = header.split_first_chunk::<MAC>() else {
            return false;
        };
        key.verify(
            Proof::NAME,
            &[&nonces.leaders, &nonces.first, length, report],
            mac,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn greeting(nonce: Nonce) -> Greeting {
        Greeting {
            version: 3,
            rank: 5,
            nonce,
        }
    }

    fn array<const N: usize>(bytes: &[u8]) -> &[u8; N] {
        bytes.try_into().unwrap()
    }

    #[test]
    fn both_ends_prove_that_they_have_the_key() {
        let (key, other) = (Key::of("secret", "job"), Key::of("secret", "another job"));
        let (leaders, first) = (nonce().unwrap(), nonce().unwrap());
        let bytes = greeting(leaders).encode(&key);
        assert_eq!(
            Greeting::decode(array(&bytes), &key),
            Some(greeting(leaders))
        );
        assert_eq!(Greeting::decode(array(&bytes), &other), None);
        let nonces = Nonces { leaders, first };
        let answer = nonces.answer(&key);
        assert_eq!(
            Nonces::of_answer(leaders, array(&answer), &key),
            Some(nonces)
        );
        assert_eq!(Nonces::of_answer(leaders, array(&answer), &other), None);
        assert_eq!(Nonces::of_answer(first, array(&answer), &key), None);
        let proof = Proof::encode(&nonces, b"report", &key);
        let (header, report) = proof.split_at(Proof::HEADER);
        let header = array(header);
        assert_eq!(Proof::length(header), report.len());
        assert!(Proof::is_right(&nonces, header, report, &key));
        assert!(!Proof::is_right(&nonces, header, report, &other));
        assert!(!Proof::is_right(&nonces, header, b"forged", &key));
    }

    #[test]
    fn what_was_recorded_proves_nothing_to_others() {
        let key = Key::of("secret", "job");
        let [leaders, first, later] = [0; 3].map(|_| nonce().unwrap());
        let nonces = Nonces { leaders, first };
        let again = Nonces {
            leaders,
            first: later,
        };
        let proof = Proof::encode(&nonces, b"report", &key);
        let (header, report) = proof.split_at(Proof::HEADER);
        assert!(!Proof::is_right(&again, array(header), report, &key));
        let answer = nonces.answer(&key);
        assert_eq!(Nonces::of_answer(later, array(&answer), &key), None);
    }

    #[test]
    fn every_bit_of_a_greeting_counts() {
        let key = Key::of("secret", "job");
        let bytes = greeting([7; NONCE]).encode(&key);
        for bit in 0..8 * bytes.len() {
            let mut forged = bytes.clone();
            forged[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Greeting::decode(array(&forged), &key), None, "bit {bit}");
        }
    }

    #[test]
    fn a_key_is_not_shown() {
        assert_eq!(format!("{:?}", Key::of("a key", "job")), "Key(secret)");
    }
}
