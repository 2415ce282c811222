//! The introduction of a rank to rank 0, and the connections from which rank 0 expects one.

use std::io::{self, Read};
use std::sync::Arc;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use crate::error::Result;
use crate::ranks::host;
use crate::ranks::identity::Identity;
use crate::ranks::pidfd;
use crate::ranks::wire::{self, Connection};

const MAGIC: [u8; 8] = *b"gemmesh\0";
/// The longest introduction: a few numbers and names.
pub const MAX_HELLO: usize = 4096;

/// The introduction, after its [`Prefix`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    pub world: usize,
    pub backend: String,
    /// The running kernel's id: the same for all processes that can share memory.
    pub boot_id: String,
    pub pid: u32,
}

impl Hello {
    /// # Errors
    /// If this process has no descriptors left.
    pub fn new(identity: &Identity) -> Result<Hello> {
        Ok(Hello {
            world: identity.world,
            backend: identity.backend.into(),
            boot_id: host::boot_id(identity.rank)?,
            pid: std::process::id(),
        })
    }
}

/// The first bytes of an introduction. Their layout is the same in every version.
pub struct Prefix {
    pub version: u32,
    pub rank: u32,
    pub length: u32,
}

impl Prefix {
    pub const BYTES: usize = 20;

    pub fn encode(&self) -> [u8; Prefix::BYTES] {
        let mut bytes = [0; Prefix::BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        for (field, value) in [self.version, self.rank, self.length].iter().enumerate() {
            bytes[8 + 4 * field..][..4].copy_from_slice(&value.to_le_bytes());
        }
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<Prefix> {
        let (magic, rest) = bytes.split_at_checked(8)?;
        if magic != MAGIC {
            return None;
        }
        let mut fields = rest
            .chunks_exact(4)
            .map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]));
        Some(Prefix {
            version: fields.next()?,
            rank: fields.next()?,
            length: fields.next()?,
        })
    }
}

/// A connection that has not introduced itself yet.
pub struct Stranger {
    pub stream: Arc<Connection>,
    pub since: Instant,
    pub bytes: Vec<u8>,
}

/// What a stranger turned out to be.
pub enum Introduced {
    NotYet,
    /// A process that is not a rank of this library. Its connection is dropped.
    Nobody,
    Rank(Guest),
}

/// A connection that has introduced itself.
pub struct Guest {
    pub stream: Arc<Connection>,
    pub rank: usize,
    pub version: u32,
    /// None if its protocol version is different, because then its words can't be understood.
    pub hello: Option<Hello>,
}

impl Guest {
    pub fn has_gone(&self) -> bool {
        wire::has_hung_up(&self.stream) || pidfd::has_ended(&self.stream)
    }
}

impl Stranger {
    pub fn new(stream: Connection) -> Stranger {
        Stranger {
            stream: Arc::new(stream),
            since: Instant::now(),
            bytes: Vec::new(),
        }
    }

    /// Reads what has come, without waiting.
    pub fn listen(&mut self, version: u32) -> Introduced {
        let mut piece = [0; 1024];
        let ended = loop {
            match (&**self.stream).read(&mut piece) {
                Ok(0) => break true,
                Ok(count) => self.bytes.extend(&piece[..count]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => break error.kind() != io::ErrorKind::WouldBlock,
            }
            if self.bytes.len() > Prefix::BYTES + MAX_HELLO {
                return Introduced::Nobody;
            }
        };
        let known = self.bytes.len().min(MAGIC.len());
        if self.bytes[..known] != MAGIC[..known] {
            return Introduced::Nobody;
        }
        match self.introduction(version) {
            Some(guest) => guest,
            None if ended => Introduced::Nobody,
            None => Introduced::NotYet,
        }
    }

    /// The introduction, once it is complete.
    fn introduction(&mut self, version: u32) -> Option<Introduced> {
        let words = self.bytes.get(Prefix::BYTES..)?;
        let prefix = Prefix::decode(&self.bytes[..Prefix::BYTES])?;
        if prefix.length as usize > MAX_HELLO {
            return Some(Introduced::Nobody);
        }
        let hello = if prefix.version == version {
            match serde_json::from_slice(words.get(..prefix.length as usize)?) {
                Ok(hello) => Some(hello),
                Err(_) => return Some(Introduced::Nobody),
            }
        } else {
            None
        };
        Some(Introduced::Rank(Guest {
            stream: self.stream.clone(),
            rank: prefix.rank as usize,
            version: prefix.version,
            hello,
        }))
    }
}
