//! Symmetric memory between processes: device memory that every rank maps by CUDA IPC.

use std::collections::{HashMap, HashSet};
use std::mem::offset_of;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

use super::abi::{
    GEMMESH_MAX_FLAGS, GEMMESH_MAX_WORLD, GEMMESH_REFRESH, GemmeshMailbox, GemmeshTurn,
};
use super::driver::{Device, DevicePtr, Import, Memory};
use crate::error::{Error, Result};
use crate::group::{Call, Members};
use crate::protocol::Epoch;
use crate::protocol::plan::{MAX_FLAGS, MAX_WORLD};

/// What one rank tells the others of an allocation.
#[derive(Serialize, Deserialize)]
struct Offer {
    handle: Vec<u8>,
    uuid: [u8; 16],
    /// Allocations that this rank has stopped mapping since its last offer.
    unmapped: Vec<u32>,
}

impl Offer {
    fn parse(bytes: &[u8]) -> serde_json::Result<Offer> {
        serde_json::from_slice(bytes)
    }
}

/// The same number of bytes on every rank's device.
#[derive(Debug)]
pub struct Symmetric {
    serial: u32,
    /// Taken when this is dropped.
    own: Option<Memory>,
    /// By rank; none for this one.
    imports: Vec<Option<Import>>,
    /// Whether each rank has a device to itself.
    distinct: bool,
    yard: Arc<Yard>,
}

/// Memory that this rank has dropped, until no peer maps it any more: freeing it earlier is undefined.
///
/// Ranks tell one another what they have unmapped with their next allocation; the rest is freed at the group's end.
#[derive(Debug, Default)]
pub struct Yard(Mutex<Lists>);

#[derive(Debug, Default)]
struct Lists {
    allocations: u32,
    unmapped: Vec<u32>,
    kept: HashMap<u32, Memory>,
    /// How many ranks have said that they unmapped an allocation.
    counts: HashMap<u32, usize>,
}

impl Yard {
    fn lists(&self) -> MutexGuard<'_, Lists> {
        // No code that can panic runs while it is held.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets what it keeps without freeing it: for a group that failed with work still on the device.
    pub fn abandon(&self) {
        for (_, memory) in self.lists().kept.drain() {
            std::mem::forget(memory);
        }
    }
}

impl Symmetric {
    /// Collective, as `call`. Zeroed, but for what `initialise` writes before another rank can see it.
    pub fn allocate(
        device: &Result<Arc<Device>>,
        yard: &Arc<Yard>,
        members: &Members,
        call: &Call,
        bytes: usize,
        initialise: impl FnOnce(&mut Memory) -> Result<()>,
    ) -> Result<Symmetric> {
        let rank = members.rank;
        let mut own = None;
        let unmapped = std::mem::take(&mut yard.lists().unmapped);
        let offer = || -> Result<Vec<u8>> {
            let device = device.as_ref().map_err(Clone::clone)?;
            let mut memory = Memory::blocks(device, bytes)?;
            initialise(&mut memory)?;
            let offer = Offer {
                handle: memory.export()?.to_vec(),
                uuid: device.uuid,
                unmapped: unmapped.clone(),
            };
            own = Some(memory);
            serde_json::to_vec(&offer).map_err(|e| Error::Message {
                rank,
                reason: e.to_string(),
            })
        };
        let gathered = members
            .exchange(call, offer().map(|bytes| (bytes, None)))
            .inspect_err(|_| {
                let mut lists = yard.lists();
                // Nobody has read the list; the next offer brings it.
                lists.unmapped.extend(&unmapped);
                // If the exchange broke off, some rank may have its part of it, and map this memory.
                if let (Some(_), Some(own)) = (members.fault(), own.take()) {
                    let serial = lists.allocations;
                    lists.kept.insert(serial, own);
                }
            })?;
        let (Ok(device), Some(own)) = (device, own) else {
            // `exchange` has returned the error that this rank offered.
            return Err(members.fail(Error::NoGpu {
                rank,
                reason: "it was lost".into(),
            }));
        };
        let mut lists = yard.lists();
        let serial = lists.allocations;
        lists.allocations += 1;
        let mut imports = Vec::new();
        let mut uuids = HashSet::new();
        for (peer, bytes) in gathered.payloads.iter().enumerate() {
            let offer = Offer::parse(bytes).map_err(|e| {
                members.fail(Error::Message {
                    rank: peer,
                    reason: e.to_string(),
                })
            })?;
            uuids.insert(offer.uuid);
            for serial in offer.unmapped {
                let count = lists.counts.entry(serial).or_default();
                *count += 1;
                if *count == members.world {
                    lists.counts.remove(&serial);
                    lists.kept.remove(&serial);
                }
            }
            if peer == rank {
                imports.push(None);
                continue;
            }
            let handle = offer.handle.try_into().unwrap_or([0; 64]);
            match import(device, members, peer, &offer.uuid, &handle) {
                Ok(import) => imports.push(Some(import)),
                // The others have their maps and go on: they must hear of a failure, and keep what they map.
                Err(error) => {
                    lists.kept.insert(serial, own);
                    return Err(members.fail(error));
                }
            }
        }
        drop(lists);
        Ok(Symmetric {
            serial,
            own: Some(own),
            imports,
            distinct: uuids.len() == members.world,
            yard: yard.clone(),
        })
    }

    /// This rank's memory.
    pub fn own(&self) -> DevicePtr {
        self.own.as_ref().map_or(0, Memory::ptr)
    }

    pub fn own_memory(&mut self) -> Option<&mut Memory> {
        self.own.as_mut()
    }

    /// The memory of `rank`, as this rank has mapped it.
    pub fn of(&self, rank: usize) -> DevicePtr {
        self.imports[rank]
            .as_ref()
            .map_or_else(|| self.own(), Import::ptr)
    }
}

fn import(
    device: &Arc<Device>,
    members: &Members,
    peer: usize,
    uuid: &[u8; 16],
    handle: &[u8; 64],
) -> Result<Import> {
    let refused = |reason: String| Error::NoPeerAccess {
        rank: members.rank,
        peer,
        reason,
    };
    if !device.can_access(uuid)? {
        return Err(refused("the driver says that it cannot".into()));
    }
    Import::open(device, handle).map_err(|e| refused(e.to_string()))
}

impl Drop for Symmetric {
    fn drop(&mut self) {
        self.imports.clear();
        let mut lists = self.yard.lists();
        lists.unmapped.push(self.serial);
        if let Some(own) = self.own.take() {
            lists.kept.insert(self.serial, own);
        }
    }
}

/// Every rank's flags, and this rank's words for its kernels.
#[derive(Debug)]
pub struct Control {
    memory: Symmetric,
}

/// Where things lie in a rank's control block, in words.
mod word {
    use super::{GemmeshMailbox, GemmeshTurn, MAX_FLAGS, MAX_WORLD};
    pub const READY: usize = 0;
    pub const DONE: usize = READY + MAX_WORLD;
    pub const CHUNK: usize = DONE + MAX_WORLD;
    pub const FLAGS: usize = CHUNK + MAX_FLAGS;
    pub const ABORT: usize = FLAGS;
    /// As many words as there are chunk flags, always zero.
    pub const ZEROS: usize = ABORT + 64;
    /// `aligned[p]`, written by rank p when its stream has come to a benchmark's starting line.
    pub const ALIGNED: usize = ZEROS + MAX_FLAGS;
    /// What peers write when rows are pushed; and the count of those operations, a turn each.
    pub const MAILBOX: usize = ALIGNED + MAX_WORLD;
    pub const TURN: usize = MAILBOX + size_of::<GemmeshMailbox>() / 4;
    pub const END: usize = TURN + size_of::<GemmeshTurn>() / 4;
}

/// The second half of the control block's 2 MiB is for [`super::Group::check_peers`]: a box for each rank.
const BOXES: usize = 1 << 20;
/// Bytes of a box.
pub const BOX: usize = (1 << 20) / MAX_WORLD;

impl Control {
    /// Collective. All flags hold the epoch before `first`.
    pub fn open(
        device: &Result<Arc<Device>>,
        yard: &Arc<Yard>,
        members: &Members,
        first: Epoch,
    ) -> Result<Control> {
        const {
            assert!(word::END * 4 <= BOXES);
            // Both languages count alike.
            assert!(MAX_WORLD == GEMMESH_MAX_WORLD as usize);
            assert!(MAX_FLAGS == GEMMESH_MAX_FLAGS as usize);
            assert!(Epoch::REFRESH == GEMMESH_REFRESH);
        };
        let call = Call::OpenBackend;
        let before = first.previous().raw();
        let memory = Symmetric::allocate(device, yard, members, &call, 2 * BOXES, |own| {
            let mut words = vec![0u32; word::END];
            words[..word::FLAGS].fill(before);
            words[word::MAILBOX..word::TURN].fill(before);
            words[word::TURN + offset_of!(GemmeshTurn, epoch) / 4] = before;
            let bytes = bytemuck::cast_slice(&words);
            own.write_rows(0, bytes.len(), bytes.len(), bytes)
        })?;
        Ok(Control { memory })
    }

    fn at(base: DevicePtr, word: usize) -> DevicePtr {
        base + 4 * word as u64
    }

    /// `ready[by]` in the memory of `rank`.
    pub fn ready(&self, rank: usize, by: usize) -> DevicePtr {
        Control::at(self.memory.of(rank), word::READY + by)
    }

    /// `done[by]` in the memory of `rank`.
    pub fn done(&self, rank: usize, by: usize) -> DevicePtr {
        Control::at(self.memory.of(rank), word::DONE + by)
    }

    /// This rank's `chunk[flag]`.
    pub fn chunk(&self, flag: usize) -> DevicePtr {
        Control::at(self.memory.own(), word::CHUNK + flag)
    }

    /// The word that makes this rank's kernels stop waiting.
    pub fn abort(&self) -> DevicePtr {
        Control::at(self.memory.own(), word::ABORT)
    }

    /// Whether each rank has a device to itself.
    pub fn distinct_devices(&self) -> bool {
        self.memory.distinct
    }

    /// The mailbox of `rank`.
    pub fn mailbox(&self, rank: usize) -> DevicePtr {
        Control::at(self.memory.of(rank), word::MAILBOX)
    }

    /// The chunk flag `flag` in the mailbox of `rank`.
    pub fn pushed(&self, rank: usize, flag: usize) -> DevicePtr {
        let word = word::MAILBOX + offset_of!(GemmeshMailbox, chunk) / 4 + flag;
        Control::at(self.memory.of(rank), word)
    }

    /// This rank's count of the operations whose rows are pushed.
    pub fn turn(&self) -> DevicePtr {
        Control::at(self.memory.own(), word::TURN)
    }

    /// What this rank's own streams and kernels wait for.
    pub fn own(&self, rank: usize) -> OwnWords {
        OwnWords {
            abort: self.abort(),
            ready: self.ready(rank, 0),
            done: self.done(rank, 0),
            mailbox: Control::at(self.memory.own(), word::MAILBOX),
            go: self.turn() + offset_of!(GemmeshTurn, go) as u64,
        }
    }

    /// Flags that have always reached epoch 0.
    pub fn zeros(&self) -> DevicePtr {
        Control::at(self.memory.own(), word::ZEROS)
    }

    /// `aligned` in the memory of `rank`.
    pub fn aligned(&self, rank: usize) -> DevicePtr {
        Control::at(self.memory.of(rank), word::ALIGNED)
    }

    /// The box for `by` in the memory of `rank`.
    pub fn inbox(&self, rank: usize, by: usize) -> DevicePtr {
        self.memory.of(rank) + (BOXES + by * BOX) as u64
    }

    /// Leaves this rank's block allocated for good, because a peer may still map it.
    pub fn abandon(&mut self) {
        std::mem::forget(self.memory.own.take());
    }

    /// Stops mapping the peers' blocks. Nothing uses them any more.
    pub fn unmap(&mut self) {
        self.memory.imports.clear();
    }
}

/// Addresses in this rank's own control block.
#[derive(Clone, Copy, Debug)]
pub struct OwnWords {
    pub abort: DevicePtr,
    /// By peer; `done` follows.
    pub ready: DevicePtr,
    /// By peer.
    pub done: DevicePtr,
    /// `ready`, by peer, stands first in it.
    pub mailbox: DevicePtr,
    /// What the copy stream waits for before it pushes.
    pub go: DevicePtr,
}

/// `ready` and `done` as they lie in a control block, and `ready` of the mailbox.
pub type FlagWords = [FlagLine; 3];

/// A word for each peer.
pub type FlagLine = [u32; MAX_WORLD];

#[cfg(fuzzing)]
pub mod fuzzing {
    //! What another rank offers.
    use super::*;

    /// An offer.
    pub fn parse(data: &[u8]) {
        let _ = Offer::parse(data);
    }

    /// As a rank makes it.
    pub fn seeds() -> Vec<Vec<u8>> {
        let offer = Offer {
            handle: (0..64).collect(),
            uuid: [200; 16],
            unmapped: vec![0, 1, u32::MAX],
        };
        vec![serde_json::to_vec(&offer).unwrap_or_default()]
    }
}
