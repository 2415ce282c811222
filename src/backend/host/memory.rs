//! Symmetric memory between processes: one anonymous shared memory a rank, mapped by every rank.

use std::io;
use std::os::fd::OwnedFd;

use crate::error::{Error, Kind, MadeCall, Result};
use crate::protocol::epoch::Epoch;
use crate::protocol::flag::Flag;
use crate::protocol::flag::FlagBlock;
use crate::ranks::members::{Members, opening};
use crate::ranks::memfd::{Mapping, memfd};
use crate::resources::{SMALL, lacking, rooms};
use crate::schedule::{MAX_FLAGS, layout::MAX_WORLD};

/// The same number of bytes on every rank.
#[derive(Debug)]
pub struct HostSymmetric {
    rank: usize,
    /// The memory of the ranks of this host, as this rank has mapped it, by rank. None of the other hosts' ranks.
    maps: Vec<Option<Mapping>>,
}

impl HostSymmetric {
    /// Allocates memory on every rank. Collective, as `call`.
    ///
    /// `ready`: the result of this rank's earlier steps, which all ranks learn. `initialise` writes this rank's memory
    /// before another rank can see it. If a rank cannot allocate its memory or map that of all ranks, all ranks get its
    /// error, and the group goes on.
    pub fn allocate(
        members: &Members,
        call: &MadeCall,
        ready: Result<()>,
        bytes: usize,
        initialise: impl FnOnce(*mut u8),
    ) -> Result<HostSymmetric> {
        let rank = members.rank;
        // A small matrix takes less time than this. A rank finds out that it has no memory when it makes its part.
        let is_small = bytes.saturating_mul(members.world) as u64 <= SMALL;
        let ready = if is_small {
            ready
        } else {
            Ok(require_room(members, call, ready, bytes)?)
        };
        let allocate = || -> io::Result<OwnedFd> {
            let fd = memfd(bytes)?;
            initialise(Mapping::shared(&fd, bytes)?.as_ptr());
            Ok(fd)
        };
        let own = ready.and_then(|()| allocate().map_err(Error::out_of_memory(rank, bytes)));
        let maps = members.share(call, own, |fds| {
            let map = |(owner, fd): (usize, &Option<OwnedFd>)| {
                let Some(fd) = fd else {
                    return Ok(None);
                };
                let mapping = Mapping::shared(fd, bytes).map(Some);
                mapping.map_err(|error| match error.kind() {
                    io::ErrorKind::InvalidData => Kind::Message {
                        reason: error.to_string(),
                    }
                    .on(owner),
                    _ => Error::out_of_memory(rank, bytes)(error),
                })
            };
            fds.iter().enumerate().map(map).collect::<Result<Vec<_>>>()
        })?;
        Ok(HostSymmetric { rank, maps })
    }

    /// This rank's memory.
    pub fn own(&self) -> *mut u8 {
        let own = self.maps[self.rank].as_ref();
        own.map_or(std::ptr::null_mut(), Mapping::as_ptr)
    }

    /// The memory of `rank`. None if that runs on another host.
    pub fn of(&self, rank: usize) -> Option<*mut u8> {
        self.maps[rank].as_ref().map(Mapping::as_ptr)
    }
}

/// Fails unless there is room for `bytes` on every rank, so that no rank begins in vain. Ranks share a machine, and
/// perhaps a control group.
fn require_room(members: &Members, call: &MadeCall, ready: Result<()>, bytes: usize) -> Result<()> {
    let rooms = ready.map(|()| (serde_json::to_vec(&rooms()).unwrap_or_default(), None));
    let rooms = members.gather_messages(call, rooms)?.payloads;
    let rooms = rooms.iter().enumerate().map(|(rank, rooms)| {
        serde_json::from_slice(rooms).map_err(|error| {
            let reason = error.to_string();
            members.fail(Kind::Message { reason }.on(rank))
        })
    });
    match lacking(&rooms.collect::<Result<Vec<_>>>()?, bytes) {
        Some((rank, reason)) => Err(Kind::OutOfMemory { bytes, reason }.on(rank)),
        None => Ok(()),
    }
}

/// Every rank's flags.
#[derive(Debug)]
pub struct Flags {
    memory: HostSymmetric,
    world: usize,
}

#[repr(C)]
struct ControlLayout {
    ready: [Flag; MAX_WORLD],
    done: [Flag; MAX_WORLD],
    chunk: [Flag; MAX_FLAGS],
}

impl Flags {
    /// Collective. All flags hold the epoch before `first`. `ready`: the result of this rank's earlier steps, which all
    /// ranks learn.
    pub fn open(members: &Members, ready: Result<()>, first: Epoch) -> Result<Flags> {
        let bytes = size_of::<ControlLayout>();
        let memory = HostSymmetric::allocate(members, &opening(), ready, bytes, |own| {
            for index in 0..bytes / size_of::<Flag>() {
                // SAFETY: the memory is page-aligned, as long as a ControlLayout, which consists of flags, and not
                // known to any other rank yet.
                unsafe {
                    own.cast::<Flag>()
                        .add(index)
                        .write(Flag::new(first.previous()))
                };
            }
        })?;
        Ok(Flags {
            memory,
            world: members.world,
        })
    }

    /// The flags in the memory of `rank`, or [`FlagBlock::ELSEWHERE`].
    pub fn of(&self, rank: usize) -> FlagBlock<'_> {
        let Some(memory) = self.memory.of(rank) else {
            return FlagBlock::ELSEWHERE;
        };
        // SAFETY: each rank's memory is page-aligned, as long as a ControlLayout, and initialised by its owner before
        // it was published. A ControlLayout consists of atomics, which every rank may write at any time. The
        // mapping lives as long as `self`.
        let layout = unsafe { &*memory.cast::<ControlLayout>() };
        FlagBlock {
            ready: &layout.ready[..self.world],
            done: &layout.done[..self.world],
            chunk: &layout.chunk,
        }
    }
}
