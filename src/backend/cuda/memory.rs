//! Symmetric memory between processes: device memory that every rank maps.
//!
//! It is passed on as descriptors of the driver's virtual memory. Unlike a legacy CUDA IPC handle, such a mapping keeps the
//! memory for as long as it lasts, whatever becomes of the rank that made it; so a rank lets go of its own mappings when
//! its own work has ended, and asks nobody. When all ranks have, or have died, the memory is the driver's again.

use std::collections::HashSet;
use std::mem::offset_of;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::abi::{
    GEMMESH_MAX_FLAGS, GEMMESH_MAX_WORLD, GEMMESH_REFRESH, GemmeshMailbox, GemmeshPushEpoch,
};
use super::driver::{Device, DevicePtr, Mapping, Region, StreamMemOp, Uuid};
use super::landing;
use super::model::rates::Rates;
use super::reclaim::{Deferred, Reclaimer};
use crate::error::{Error, Result};
use crate::ranks::members::{Members, OPENING};
use crate::schedule::{Awaited, Epoch, Schedule, Transfer};
use crate::schedule::{MAX_BLOCKS, MAX_FLAGS, layout::MAX_WORLD};

/// The same number of bytes on every rank's device.
#[derive(Debug)]
pub struct Symmetric {
    rank: usize,
    /// Every rank's memory as this rank has mapped it, by rank.
    maps: Deferred<Vec<Mapping>>,
}

impl Symmetric {
    /// Collective, as `call`. Zeroed, but for what `initialise` writes before another rank can see it. Where there is no
    /// room, all ranks first free what they have dropped, and try once more.
    pub fn allocate(
        device: &Arc<Device>,
        reclaimer: &Arc<Reclaimer>,
        members: &Members,
        peers: &Peers,
        call: &str,
        bytes: usize,
        initialise: impl Fn(&mut Region) -> Result<()>,
    ) -> Result<Symmetric> {
        let attempt = || -> Result<(Mapping, Vec<OwnedFd>)> {
            let mut own = None;
            let mut offer = || -> Result<OwnedFd> {
                let (mut memory, fd) = Mapping::create(device, bytes)?;
                initialise(memory.region_mut())?;
                own = Some(memory);
                Ok(fd)
            };
            reclaimer.settle();
            let gathered = members.exchange(call, offer().map(|fd| (Vec::new(), Some(fd))))?;
            match own {
                Some(own) if gathered.fds.len() == members.world => Ok((own, gathered.fds)),
                _ => Err(members.fail(Error::System {
                    rank: Some(members.rank),
                    action: format!("receive {} descriptors", members.world),
                    reason: format!("{} came; raise the limit on open files", gathered.fds.len()),
                })),
            }
        };
        let (own, fds) = match attempt() {
            // The same on every rank.
            Err(Error::OutOfMemory { .. }) => {
                // The others wait for this rank meanwhile.
                reclaimer.drain(members.timeout / 2);
                members.exchange(call, Ok((Vec::new(), None)))?;
                attempt()?
            }
            first => first?,
        };
        let mut own = Some(own);
        let maps = fds.iter().enumerate().map(|(peer, fd)| {
            let own = own.take_if(|_| peer == members.rank);
            own.map_or_else(|| peers.import(device, members, peer, fd, bytes), Ok)
        });
        // The others have theirs and go on: they must hear of a failure.
        let maps = maps.collect::<Result<Vec<_>>>();
        Ok(Symmetric {
            rank: members.rank,
            maps: Deferred::new(maps.map_err(|e| members.fail(e))?, reclaimer),
        })
    }

    /// This rank's memory.
    pub fn own(&self) -> DevicePtr {
        self.of(self.rank)
    }

    /// As the host copies from and to it.
    pub fn own_region(&self) -> &Region {
        self.maps[self.rank].region()
    }

    /// As [`Symmetric::own_region`].
    pub fn own_region_mut(&mut self) -> &mut Region {
        let rank = self.rank;
        self.maps[rank].region_mut()
    }

    /// The memory of `rank`, as this rank has mapped it.
    pub fn of(&self, rank: usize) -> DevicePtr {
        self.maps[rank].ptr()
    }
}

/// What a rank says of itself when the group opens.
#[derive(Debug, Serialize, Deserialize)]
pub struct Introduction {
    /// Its process.
    pid: u32,
    /// Where that number counts.
    namespace: String,
    uuid: Uuid,
    /// The GPUs that it sees.
    visible: Vec<Uuid>,
    /// Whether its GPU was chosen by the caller.
    chosen: bool,
    rates: Rates,
    /// Whether its copies run beside its kernels.
    pushes: bool,
}

impl Introduction {
    fn of(device: &Device, chosen: bool, rates: Rates, pushes: bool) -> Result<Introduction> {
        let namespace = std::fs::read_link("/proc/self/ns/pid");
        Ok(Introduction {
            pid: std::process::id(),
            namespace: namespace.map_or(String::new(), |link| link.to_string_lossy().into()),
            uuid: device.uuid(),
            visible: device.visible_uuids()?,
            chosen,
            rates,
            pushes,
        })
    }

    /// Reads what another rank has sent.
    pub fn parse(bytes: &[u8]) -> Result<Introduction, String> {
        let parsed: Result<Introduction, _> = serde_json::from_slice(bytes);
        let introduction = parsed.map_err(|error| error.to_string())?;
        introduction.rates.check().map(|()| introduction)
    }
}

/// The ranks' GPUs.
#[derive(Debug)]
pub struct Peers {
    uuids: Vec<Uuid>,
    /// Rank 0's, by which all ranks go: they must choose alike.
    pub rates: Rates,
    /// Whether copies run beside kernels on all of them.
    pub push: bool,
}

impl Peers {
    /// Collective. A rank without a device tells the others why.
    ///
    /// # Errors
    /// That of the first rank that has one; [`Error::NeedsProcesses`], [`Error::SharedGpu`].
    pub fn meet(
        members: &Members,
        device: Result<(Arc<Device>, Rates, bool)>,
        chosen: bool,
    ) -> Result<Peers> {
        let own = || -> Result<Vec<u8>> {
            let (device, rates, pushes) = device?;
            let introduction = Introduction::of(&device, chosen, rates, pushes)?;
            serde_json::to_vec(&introduction).map_err(|e| Error::Message {
                rank: members.rank,
                reason: e.to_string(),
            })
        };
        let own = own().map(|bytes| (bytes, None));
        let gathered = members.exchange(OPENING, own)?;
        let introductions = gathered.payloads.iter().enumerate();
        let introductions = introductions.map(|(rank, bytes)| {
            Introduction::parse(bytes).map_err(|reason| Error::Message { rank, reason })
        });
        let ranks = introductions.collect::<Result<Vec<_>>>();
        ranks
            .and_then(|ranks| check(&ranks).map(|()| ranks))
            .map(|ranks| Peers {
                uuids: ranks.iter().map(|rank| rank.uuid).collect(),
                rates: ranks[0].rates,
                push: ranks.iter().all(|rank| rank.pushes),
            })
            .map_err(|error| members.fail(error))
    }

    /// Whether each rank has a GPU to itself.
    pub fn are_distinct(&self) -> bool {
        self.uuids.iter().collect::<HashSet<_>>().len() == self.uuids.len()
    }

    fn import(
        &self,
        device: &Arc<Device>,
        members: &Members,
        peer: usize,
        fd: &OwnedFd,
        bytes: usize,
    ) -> Result<Mapping> {
        let refused = |reason: String| Error::NoPeerAccess {
            rank: members.rank,
            peer,
            reason,
        };
        if !device.can_access(&self.uuids[peer])? {
            return Err(refused("the driver says that it cannot".into()));
        }
        Mapping::import(device, fd, bytes).map_err(|e| refused(e.to_string()))
    }
}

/// Finds two ranks of one process, or two that share a GPU though there is one for each.
fn check(ranks: &[Introduction]) -> Result<()> {
    let visible: HashSet<&Uuid> = ranks.iter().flat_map(|rank| &rank.visible).collect();
    for (later, rank) in ranks.iter().enumerate() {
        for (earlier, other) in ranks[..later].iter().enumerate() {
            if (rank.pid, &rank.namespace) == (other.pid, &other.namespace) {
                return Err(Error::NeedsProcesses { rank: later });
            }
            let by_accident = rank.uuid == other.uuid && !rank.chosen && !other.chosen;
            if by_accident && visible.len() >= ranks.len() {
                return Err(Error::SharedGpu {
                    ranks: [earlier, later],
                    visible: visible.len(),
                });
            }
        }
    }
    Ok(())
}

/// Every rank's flags, and this rank's words for its kernels.
#[derive(Debug)]
pub struct Control {
    memory: Symmetric,
}

/// Where things lie in a rank's control block, in words.
mod word {
    use super::{GemmeshMailbox, GemmeshPushEpoch, MAX_BLOCKS, MAX_FLAGS, MAX_WORLD};
    pub const READY: usize = 0;
    pub const DONE: usize = READY + MAX_WORLD;
    pub const CHUNK: usize = DONE + MAX_WORLD;
    pub const FLAGS: usize = CHUNK + MAX_FLAGS;
    pub const ABORT: usize = FLAGS;
    /// `aligned[p]`, written by rank p when its stream has come to a benchmark's starting line.
    pub const ALIGNED: usize = ABORT + 64;
    /// What peers write when rows are pushed; and the count of those operations.
    pub const MAILBOX: usize = ALIGNED + MAX_WORLD;
    pub const PUSH_EPOCH: usize = MAILBOX + size_of::<GemmeshMailbox>() / 4;
    /// By block of a product: what its copy stream waits for before it sends it.
    pub const STORED: usize = PUSH_EPOCH + size_of::<GemmeshPushEpoch>() / 4;
    /// As READY to CHUNK, but gates: of operations that are recorded. Closed between them, by value 0.
    pub const GATES: usize = STORED + MAX_BLOCKS;
    /// Whether a recorded operation has moved all that this rank moves.
    pub const MOVED: usize = GATES + FLAGS;
    /// How many of them have begun.
    pub const REPLAYS: usize = MOVED + 1;
    pub const END: usize = REPLAYS + 1;
}

/// The second MiB of the control block is for [`super::Group::check_peers`]: a box for each rank.
const BOXES: usize = 1 << 20;
/// Bytes of a box.
pub const BOX: usize = (1 << 20) / MAX_WORLD;
/// Behind that is the landing area of partial sums.
const LANDING: usize = BOXES + MAX_WORLD * BOX;

impl Control {
    /// Collective. All flags hold the epoch before `first`.
    pub fn open(
        device: &Arc<Device>,
        reclaimer: &Arc<Reclaimer>,
        members: &Members,
        peers: &Peers,
        first: Epoch,
    ) -> Result<Control> {
        const {
            assert!(word::END * 4 <= BOXES);
            // Kernels write two of its words at once.
            assert!(word::PUSH_EPOCH.is_multiple_of(2));
            // Both languages count alike.
            assert!(MAX_WORLD == GEMMESH_MAX_WORLD as usize);
            assert!(MAX_FLAGS == GEMMESH_MAX_FLAGS as usize);
            assert!(Epoch::REFRESH == GEMMESH_REFRESH);
        };
        let before = first.previous().raw();
        let initialise = |own: &mut Region| {
            let mut words = vec![0u32; word::END];
            words[..word::FLAGS].fill(before);
            words[word::MAILBOX..word::PUSH_EPOCH].fill(before);
            words[word::PUSH_EPOCH + offset_of!(GemmeshPushEpoch, epoch) / 4] = before;
            let bytes = bytemuck::cast_slice(&words);
            own.write_rows(0, bytes.len(), bytes.len(), bytes)
        };
        let bytes = LANDING + landing::BYTES;
        let memory = Symmetric::allocate(
            device, reclaimer, members, peers, OPENING, bytes, initialise,
        )?;
        Ok(Control { memory })
    }

    /// Leaves the ranks' blocks mapped for good: this rank's device may still write to them.
    pub fn abandon(&mut self) {
        self.memory.maps.abandon();
    }

    fn at(base: DevicePtr, word: usize) -> DevicePtr {
        base + 4 * word as u64
    }

    /// What streams wait for and write in operation `epoch`.
    pub fn flags(&self, epoch: Epoch) -> Signals<'_> {
        Signals {
            memory: &self.memory,
            first: 0,
            epoch,
        }
    }

    /// The same where the operation is recorded.
    pub fn gates(&self) -> Signals<'_> {
        Signals {
            memory: &self.memory,
            first: word::GATES,
            epoch: Epoch::OPEN,
        }
    }

    /// Where a recorded operation notes that this rank has moved all that it moves.
    pub fn moved(&self) -> DevicePtr {
        Control::at(self.memory.own(), word::MOVED)
    }

    /// Where recorded operations are counted.
    pub fn replays(&self) -> DevicePtr {
        Control::at(self.memory.own(), word::REPLAYS)
    }

    /// The word that makes this rank's kernels stop waiting.
    pub fn abort(&self) -> DevicePtr {
        Control::at(self.memory.own(), word::ABORT)
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
    pub fn push_epoch(&self) -> DevicePtr {
        Control::at(self.memory.own(), word::PUSH_EPOCH)
    }

    /// The word that says that a block of this rank's product is stored: 0 between operations. (No stream can wait for a word
    /// of a pool's memory, where programs have their tables.)
    pub fn stored(&self, block: usize) -> DevicePtr {
        Control::at(self.memory.own(), word::STORED + block)
    }

    /// What this rank's own streams and kernels wait for.
    pub fn own(&self, rank: usize) -> OwnWords {
        let lines = |signals: Signals| OwnLines {
            ready: signals.ready(rank, 0),
            done: signals.done(rank, 0),
            chunk: signals.chunk(rank, 0),
        };
        OwnWords {
            abort: self.abort(),
            flags: lines(self.flags(Epoch::FIRST)),
            gates: lines(self.gates()),
            moved: self.moved(),
            mailbox: Control::at(self.memory.own(), word::MAILBOX),
            push_epoch: self.push_epoch(),
            stored: self.stored(0),
        }
    }

    /// `aligned` in the memory of `rank`.
    pub fn aligned(&self, rank: usize) -> DevicePtr {
        Control::at(self.memory.of(rank), word::ALIGNED)
    }

    /// The landing area of `rank`.
    pub fn landing(&self, rank: usize) -> DevicePtr {
        self.memory.of(rank) + LANDING as u64
    }

    /// The box for `by` in the memory of `rank`.
    pub fn inbox(&self, rank: usize, by: usize) -> DevicePtr {
        self.memory.of(rank) + (BOXES + by * BOX) as u64
    }
}

/// The words by which the ranks' streams hear of one another in an operation: flags with epochs, or gates where it is recorded.
#[derive(Clone, Copy, Debug)]
pub struct Signals<'a> {
    memory: &'a Symmetric,
    /// The word before `ready[0]`.
    first: usize,
    /// What is waited for and written.
    pub epoch: Epoch,
}

impl Signals<'_> {
    /// `ready[by]` in the memory of `rank`.
    pub fn ready(&self, rank: usize, by: usize) -> DevicePtr {
        self.at(rank, word::READY + by)
    }

    /// `done[by]` in the memory of `rank`.
    pub fn done(&self, rank: usize, by: usize) -> DevicePtr {
        self.at(rank, word::DONE + by)
    }

    /// `chunk[flag]` in the memory of `rank`.
    pub fn chunk(&self, rank: usize, flag: usize) -> DevicePtr {
        self.at(rank, word::CHUNK + flag)
    }

    fn at(&self, rank: usize, word: usize) -> DevicePtr {
        Control::at(self.memory.of(rank), self.first + word)
    }

    /// Waits until `word` has been signalled.
    pub fn wait(&self, word: DevicePtr) -> StreamMemOp {
        StreamMemOp::Wait(word, self.epoch.raw())
    }

    /// Signals `word`.
    pub fn signal(&self, word: DevicePtr) -> StreamMemOp {
        StreamMemOp::Write(word, self.epoch.raw())
    }
}

/// Closes a gate.
pub fn close(gate: DevicePtr) -> StreamMemOp {
    StreamMemOp::Write(gate, Epoch::CLOSED.raw())
}

/// Addresses in this rank's own control block.
#[derive(Clone, Copy, Debug)]
pub struct OwnWords {
    pub abort: DevicePtr,
    pub flags: OwnLines,
    pub gates: OwnLines,
    /// Whether a recorded operation has moved all.
    pub moved: DevicePtr,
    /// `ready`, by peer, stands first in it.
    pub mailbox: DevicePtr,
    /// The count of the operations whose rows are pushed.
    pub push_epoch: DevicePtr,
    /// By block of a product.
    pub stored: DevicePtr,
}

/// Addresses of what this rank's streams wait for.
#[derive(Clone, Copy, Debug)]
pub struct OwnLines {
    /// By peer; `done` follows.
    pub ready: DevicePtr,
    /// By peer.
    pub done: DevicePtr,
    /// By flag.
    pub chunk: DevicePtr,
}

/// A word for each peer.
pub type FlagLine = [u32; MAX_WORLD];

/// A rank's own words at one moment.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Snapshot {
    /// `ready` and `done` as they lie in a control block.
    pub ready: FlagLine,
    pub done: FlagLine,
    /// The same of the gates.
    pub gates_ready: FlagLine,
    pub gates_done: FlagLine,
    /// `ready` of the mailbox.
    pub mailbox: FlagLine,
    pub push_epoch: GemmeshPushEpoch,
    /// Whether the recorded operation that runs has moved all.
    pub moved: u32,
    pub reserved: u32,
}

// SAFETY: plain words, for which zero is valid.
unsafe impl bytemuck::Zeroable for Snapshot {}

/// For whose words an operation waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waits {
    /// Its kernel, for `ready` of every peer in the mailbox.
    Kernel,
    /// Its streams, for `ready` of the peers whose memory it moves something from or to, and for `done` of those that do so with this
    /// rank's: bit r for rank r.
    Streams { ready: u64, done: u64 },
    /// The same of a recorded operation, for gates.
    Gates { ready: u64, done: u64 },
}

impl Waits {
    pub fn of(schedule: &Schedule) -> Waits {
        let ranks = |ranks: &mut dyn Iterator<Item = usize>| ranks.fold(0, |all, r| all | 1 << r);
        if schedule.is_pushed() {
            return Waits::Kernel;
        }
        let others = || schedule.moves().filter(|moved| moved.from != moved.to);
        // What is passed on waits for its source, which therefore is to blame before those who wait for it too.
        let passed_on = others().filter(|moved| !moved.after.is_empty());
        let sources = passed_on.map(|moved| moved.source);
        Waits::Streams {
            ready: ranks(&mut others().map(Transfer::peer).chain(sources)),
            done: ranks(&mut schedule.movers().iter().copied()),
        }
    }

    /// Of the same operation when it is recorded.
    pub fn by_gates(self) -> Waits {
        match self {
            Waits::Streams { ready, done } => Waits::Gates { ready, done },
            other => other,
        }
    }
}

impl Snapshot {
    /// The epoch of the operation whose rows are being pushed, as the device counts them; none if no kernel is at it.
    pub fn pushed_epoch(&self) -> Option<Epoch> {
        let is_running = self.push_epoch.entered > 0;
        is_running.then(|| Epoch::from_raw(self.push_epoch.epoch).next())
    }

    /// The first word, in the order in which an operation waits for them, that has not reached `epoch`; and its value.
    pub fn missing(
        &self,
        rank: usize,
        world: usize,
        epoch: Epoch,
        waits: Waits,
    ) -> Option<(Awaited, u32)> {
        let (words, ready, done_words, done) = match waits {
            Waits::Kernel => (&self.mailbox, u64::MAX, &self.done, 0),
            Waits::Streams { ready, done } => (&self.ready, ready, &self.done, done),
            Waits::Gates { ready, done } => {
                // Those that it has passed are closed again.
                let ready = if self.moved == 0 { ready } else { 0 };
                (&self.gates_ready, ready, &self.gates_done, done)
            }
        };
        let ring = |among: u64| {
            let ranks = (1..world).map(move |step| (rank + step) % world);
            ranks.filter(move |rank| among >> rank & 1 == 1)
        };
        let words = ring(ready).map(|source| (Awaited::Ready { source }, words[source]));
        let done = ring(done).map(|peer| (Awaited::Done { peer }, done_words[peer]));
        let words = words.chain(done);
        let mut late = words.filter(|(_, seen)| !epoch.reached_by(*seen));
        late.next()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::DType;
    use crate::schedule::{Description, Layout, collectives};

    fn rank(pid: u32, gpu: u8, visible: &[u8], chosen: bool) -> Introduction {
        Introduction {
            pid,
            namespace: "pid:[1]".into(),
            uuid: [gpu; 16],
            visible: visible.iter().map(|&gpu| [gpu; 16]).collect(),
            chosen,
            rates: Rates::of(""),
            pushes: true,
        }
    }

    #[test]
    fn two_ranks_of_one_process_are_told_so() {
        let ranks = [rank(1, 1, &[1, 2], false), rank(1, 2, &[1, 2], false)];
        assert_eq!(check(&ranks), Err(Error::NeedsProcesses { rank: 1 }));
        let mut elsewhere = ranks;
        elsewhere[1].namespace = "pid:[2]".into();
        assert_eq!(check(&elsewhere), Ok(()));
    }

    #[test]
    fn ranks_that_share_a_gpu_by_accident_are_told_so() {
        // Rank 0 sees GPUs 1 and 2, rank 1 sees 2 and 1, and each takes the one of its number.
        let crossed = [rank(1, 1, &[1, 2], false), rank(2, 1, &[2, 1], false)];
        let shared = Error::SharedGpu {
            ranks: [0, 1],
            visible: 2,
        };
        assert_eq!(check(&crossed), Err(shared));
        let chosen = [rank(1, 1, &[1, 2], true), rank(2, 1, &[2, 1], false)];
        assert_eq!(check(&chosen), Ok(()));
        let scarce = [rank(1, 1, &[1], false), rank(2, 1, &[1], false)];
        assert_eq!(check(&scarce), Ok(()));
    }

    #[test]
    fn what_is_missing_is_found_in_the_order_in_which_it_is_waited_for() {
        let mut words: Snapshot = bytemuck::Zeroable::zeroed();
        let epoch = Epoch::from_raw(5);
        words.ready[..4].fill(5);
        words.done[..4].fill(5);
        words.mailbox[..4].copy_from_slice(&[5, 5, 4, 3]);
        let streams = |ready, done| Waits::Streams { ready, done };
        let all = streams(0b1111, 0b1111);
        assert_eq!(words.missing(1, 4, epoch, all), None);
        let pushed = words.missing(1, 4, epoch, Waits::Kernel);
        assert_eq!(pushed, Some((Awaited::Ready { source: 2 }, 4)));
        words.done[0] = 4;
        let pulled = words.missing(1, 4, epoch, all);
        assert_eq!(pulled, Some((Awaited::Done { peer: 0 }, 4)));
        // Whom nothing is pulled from, and who pulls nothing, is not waited for.
        words.ready[3] = 4;
        assert_eq!(words.missing(1, 4, epoch, streams(0b101, 0b1100)), None);
        let pulled = words.missing(1, 4, epoch, streams(0b1000, 0));
        assert_eq!(pulled, Some((Awaited::Ready { source: 3 }, 4)));
        // Of gates, those that were passed are closed, once all is moved.
        let gates = Waits::Gates {
            ready: 0b101,
            done: 0b1101,
        };
        words.gates_ready[2] = 1;
        let missing = |words: &Snapshot| words.missing(1, 4, Epoch::OPEN, gates);
        assert_eq!(missing(&words), Some((Awaited::Ready { source: 0 }, 0)));
        (words.moved, words.gates_ready[2]) = (1, 0);
        words.gates_done[2] = 1;
        assert_eq!(missing(&words), Some((Awaited::Done { peer: 3 }, 0)));
        words.gates_done[..4].fill(1);
        assert_eq!(missing(&words), None);
        words.push_epoch.epoch = u32::MAX;
        assert_eq!(words.pushed_epoch(), None);
        words.push_epoch.entered = 1;
        assert_eq!(words.pushed_epoch(), Some(Epoch::from_raw(0)));
    }

    #[test]
    fn who_passes_on_waits_for_the_source_too() {
        let asked = Description {
            operation: "broadcast",
            dtype: DType::U8,
            beside: None,
            layout: Layout::new(&[512, 0, 0], 16).unwrap(),
            n: 16,
        };
        let waits = |rank| {
            let schedule = collectives::broadcast(&asked, rank, collectives::chunked(2));
            Waits::of(&schedule.unwrap())
        };
        let streams = |ready, done| Waits::Streams { ready, done };
        assert_eq!(waits(0), streams(0b110, 0));
        assert_eq!(waits(1), streams(0b101, 0b101));
        assert_eq!(waits(2), streams(0b011, 0b011));
    }

    #[test]
    fn an_introduction_that_makes_no_sense_is_an_error() {
        for bytes in [&b""[..], b"{}", b"[1,2]", b"{\"pid\":-1}", b"\xff"] {
            assert!(Introduction::parse(bytes).is_err());
        }
        let sent = serde_json::to_vec(&rank(7, 1, &[1, 2], true)).unwrap();
        assert_eq!(Introduction::parse(&sent).unwrap().visible.len(), 2);
    }
}

#[cfg(fuzzing)]
pub mod fuzzing {
    //! What another rank says of itself.
    use super::*;

    /// An introduction; and what several of them, made of parts of the bytes, say together.
    pub fn parse(data: &[u8]) {
        let ranks = data.split(|&byte| byte == b'\n');
        let ranks: Vec<_> = ranks.flat_map(Introduction::parse).collect();
        let _ = check(&ranks);
    }

    /// As ranks make it.
    pub fn seeds() -> Vec<Vec<u8>> {
        let introduction = |pid, chosen| Introduction {
            pid,
            namespace: "pid:[4026531836]".into(),
            uuid: [200; 16],
            visible: vec![[200; 16], [7; 16]],
            chosen,
            rates: Rates::of(""),
            pushes: chosen,
        };
        let ranks = [introduction(7, false), introduction(8, true)];
        let ranks = ranks.map(|rank| serde_json::to_vec(&rank).unwrap_or_default());
        vec![ranks[0].clone(), ranks.join(&b'\n')]
    }
}
