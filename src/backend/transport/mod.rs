//! Transports: what carries rows between the hosts of a group.
//!
//! A transport is a file of this room, its line here, and the place that chooses it. On the host backend that is a door
//! of the group, which hands the transport over by `Builder::over`. Engines know the trait alone.

mod mailboxes;
#[cfg(feature = "mpi")]
pub mod mpi;

pub use mailboxes::Mailboxes;

use std::fmt::Debug;

use crate::error::Result;

/// What a group of several hosts must have that moves rows on the host backend.
pub const NEEDS_A_TRANSPORT: &str = "a group of several hosts that moves rows must be made by Builder::from_mpi or \
                                     Builder::from_communicator, because MPI carries them";

/// The longest message in the host's memory. MPI counts bytes by a C `int`.
pub const MAX_MESSAGE: usize = i32::MAX as usize;

/// Carries messages between the ranks of a group, from memory of one kind to the same kind.
///
/// `Bytes`: those that are sent, or room for those that are received. `Handle`: what tells that a message has ended.
///
/// Messages from one rank to another arrive in the order in which they were begun.
pub trait Transport<Bytes, Handle = ()>: Send + Debug {
    /// Begins to send `bytes` from this rank, the first, to another.
    fn send(&self, ends: [usize; 2], bytes: Bytes) -> Result<Handle>;

    /// Begins to receive a message from another rank, the first, to this one.
    fn receive(&self, ends: [usize; 2], bytes: Bytes) -> Result<Handle>;
}

/// A transport of the host's memory. Threads of a rank send and receive at the same time.
pub type HostTransport = dyn Transport<Vec<u8>, Box<dyn Message>> + Sync;

/// A message in the host's memory that is under way. It owns its bytes. If it is dropped before it has ended, its bytes
/// are never freed, because the library may still read or write them.
pub trait Message {
    /// Its bytes, once the library has taken them or has received them all. A message that was received has the length
    /// with which it was sent.
    fn take_if_ended(&mut self) -> Result<Option<Vec<u8>>>;
}
