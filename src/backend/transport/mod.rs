//! Transports: what carries rows between the hosts of a group.
//!
//! A transport is a file of this room, its line here, and the place that chooses it. On the host backend that is a door
//! of the group, which hands the transport over by `Builder::over`. Between GPUs it is `device`. Engines know the
//! trait alone.

#[cfg(feature = "cuda")]
pub mod device;
mod mailboxes;
#[cfg(feature = "mpi")]
pub mod mpi;
#[cfg(feature = "cuda")]
mod nccl;

pub use mailboxes::Mailboxes;
#[cfg(all(feature = "cuda", feature = "unstable-tools"))]
pub use nccl::library::NcclLibrary;

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

    /// Messages that `begin` begins are moved at the same time. All messages of a GPU's memory are begun so.
    fn together(&self, begin: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        begin()
    }

    /// # Errors
    /// What has failed since the transport was opened, if no message's handle tells that.
    fn require_alive(&self) -> Result<()> {
        Ok(())
    }

    /// Frees it when what was sent has gone. What was to be received has come.
    fn close(self: Box<Self>) {}

    /// Ends its messages, whatever they wait for, and frees it. Unless this or `close` is called, it lives as long as the
    /// process.
    fn abort(self: Box<Self>) {}
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
