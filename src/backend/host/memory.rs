//! Symmetric memory between processes: one anonymous shared memory a rank, mapped by every rank.

use std::io;
use std::os::fd::OwnedFd;

use crate::error::{Error, Result};
use crate::memory::{Mapping, memfd, require_available};
use crate::ranks::members::{Members, OPENING};
use crate::schedule::{Epoch, Flag, FlagBlock};
use crate::schedule::{MAX_FLAGS, layout::MAX_WORLD};

/// The same number of bytes on every rank.
#[derive(Debug)]
pub struct Symmetric {
    rank: usize,
    /// Every rank's memory as this rank has mapped it, by rank.
    maps: Vec<Mapping>,
}

impl Symmetric {
    /// Collective, as `call`. `initialise` writes this rank's memory before another rank can see it.
    pub fn allocate(
        members: &Members,
        call: &str,
        bytes: usize,
        initialise: impl FnOnce(*mut u8),
    ) -> Result<Symmetric> {
        let rank = members.rank;
        // All ranks take theirs from one machine: nobody begins unless it has room for all.
        let room = if rank == 0 {
            require_available(bytes.saturating_mul(members.world))
        } else {
            Ok(())
        };
        let room = room.map_err(out_of_memory(rank, bytes));
        members.exchange(call, room.map(|()| (Vec::new(), None)))?;
        let allocate = || -> io::Result<OwnedFd> {
            let fd = memfd(bytes)?;
            initialise(Mapping::shared(&fd, bytes)?.as_ptr());
            Ok(fd)
        };
        let own = allocate().map_err(out_of_memory(rank, bytes));
        let gathered = members.exchange(call, own.map(|fd| (Vec::new(), Some(fd))))?;
        if gathered.fds.len() != members.world {
            return Err(members.fail(Error::System {
                rank: Some(rank),
                action: format!("receive {} descriptors", members.world),
                reason: format!("{} came; raise the limit on open files", gathered.fds.len()),
            }));
        }
        let maps = gathered
            .fds
            .iter()
            .enumerate()
            .map(|(owner, fd)| {
                Mapping::shared(fd, bytes).map_err(|error| match error.kind() {
                    io::ErrorKind::InvalidData => Error::Message {
                        rank: owner,
                        reason: error.to_string(),
                    },
                    _ => out_of_memory(rank, bytes)(error),
                })
            })
            .collect::<Result<Vec<_>>>()
            // The others have theirs and go on: they must hear of it.
            .map_err(|e| members.fail(e))?;
        Ok(Symmetric { rank, maps })
    }

    /// This rank's memory.
    pub fn own(&self) -> *mut u8 {
        self.maps[self.rank].as_ptr()
    }

    /// The memory of `rank`.
    pub fn of(&self, rank: usize) -> *mut u8 {
        self.maps[rank].as_ptr()
    }
}

pub fn out_of_memory(rank: usize, bytes: usize) -> impl FnOnce(io::Error) -> Error {
    move |error| Error::OutOfMemory {
        rank,
        bytes,
        reason: error.to_string(),
    }
}

/// Every rank's flags.
#[derive(Debug)]
pub struct Flags {
    memory: Symmetric,
    world: usize,
}

#[repr(C)]
struct Layout {
    ready: [Flag; MAX_WORLD],
    done: [Flag; MAX_WORLD],
    chunk: [Flag; MAX_FLAGS],
}

impl Flags {
    /// Collective. All flags hold the epoch before `first`.
    pub fn open(members: &Members, first: Epoch) -> Result<Flags> {
        let bytes = size_of::<Layout>();
        let memory = Symmetric::allocate(members, OPENING, bytes, |own| {
            for index in 0..bytes / size_of::<Flag>() {
                // SAFETY: the memory is page-aligned, as long as a Layout, which consists of flags, and not
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

    /// The flags in the memory of `rank`.
    pub fn of(&self, rank: usize) -> FlagBlock<'_> {
        // SAFETY: each rank's memory is page-aligned, as long as a Layout, and initialised by its owner before
        // it was published. A Layout consists of atomics, which every rank may write at any time. The
        // mapping lives as long as `self`.
        let layout = unsafe { &*self.memory.of(rank).cast::<Layout>() };
        FlagBlock {
            ready: &layout.ready[..self.world],
            done: &layout.done[..self.world],
            chunk: &layout.chunk,
        }
    }
}
