//! The words in a rank's memory: those by which ranks signal one another, and those for its own kernels.

use std::mem::offset_of;
use std::sync::Arc;

use super::symmetric::{Peers, Symmetric};
use crate::backend::cuda::abi::{
    GEMMESH_LOW_LATENCY_BYTES, GEMMESH_MAX_FLAGS, GEMMESH_MAX_WORLD, GEMMESH_REFRESH,
    GemmeshMailbox, GemmeshPushEpoch,
};
use crate::backend::cuda::driver::{DevicePtr, DeviceRegion, StreamMemOp};
use crate::backend::cuda::gpu::Gpu;
use crate::backend::cuda::gpu::streams::LANES;
use crate::error::Result;
use crate::protocol::epoch::Epoch;
use crate::protocol::flag::Awaited;
use crate::ranks::members::{Members, opening};
use crate::schedule::{MAX_BLOCKS, MAX_FLAGS, Schedule, layout::MAX_WORLD};

/// Every rank's flags, and this rank's words for its kernels.
#[derive(Debug)]
pub struct Control {
    memory: Symmetric,
}

/// Offsets in a rank's control block, in words.
mod word {
    use super::{GemmeshMailbox, GemmeshPushEpoch, LANES, MAX_BLOCKS, MAX_FLAGS, MAX_WORLD};
    pub const READY: usize = 0;
    pub const DONE: usize = READY + MAX_WORLD;
    pub const CHUNK: usize = DONE + MAX_WORLD;
    pub const FLAGS: usize = CHUNK + MAX_FLAGS;
    pub const ABORT: usize = FLAGS;
    /// `aligned[p]`, which rank p writes when its stream has reached a benchmark's starting line.
    pub const ALIGNED: usize = ABORT + 64;
    /// What peers write when rows are pushed.
    pub const MAILBOX: usize = ALIGNED + MAX_WORLD;
    /// The count of operations whose rows are pushed.
    pub const PUSH_EPOCH: usize = MAILBOX + size_of::<GemmeshMailbox>() / 4;
    /// By block of a product: the word that the copy stream waits for before it sends the block.
    pub const STORED: usize = PUSH_EPOCH + size_of::<GemmeshPushEpoch>() / 4;
    /// Like READY to CHUNK, but graph words, for captured operations. Between operations they are closed: 0.
    pub const GRAPH: usize = STORED + MAX_BLOCKS;
    /// Whether a captured operation has made all of this rank's transfers.
    pub const MOVED: usize = GRAPH + FLAGS;
    /// How many captured operations have begun.
    pub const REPLAYS: usize = MOVED + 1;
    /// By lane of the network: how many turns it has had since the group was opened.
    pub const TURNS: usize = REPLAYS + 1;
    pub const END: usize = TURNS + LANES;
}

/// The second MiB of the control block is for [`Group::check_peers`](crate::Group::check_peers): a box for each rank.
const BOXES: usize = 1 << 20;
/// Bytes of a box.
pub const BOX: usize = (1 << 20) / MAX_WORLD;
/// Behind that is the low-latency area.
const LOW_LATENCY: usize = BOXES + MAX_WORLD * BOX;
/// Bytes of the control block.
const BYTES: usize = LOW_LATENCY + GEMMESH_LOW_LATENCY_BYTES as usize;

impl Control {
    /// Collective. All flags hold the epoch before `first`.
    pub fn open(gpu: &Gpu, members: &Members, peers: &Peers, first: Epoch) -> Result<Control> {
        const {
            assert!(word::END * 4 <= BOXES);
            // Kernels write two of these words at once.
            assert!(word::PUSH_EPOCH.is_multiple_of(2));
            // Rust and CUDA agree on these limits.
            assert!(MAX_WORLD == GEMMESH_MAX_WORLD as usize);
            assert!(MAX_FLAGS == GEMMESH_MAX_FLAGS as usize);
            assert!(Epoch::REFRESH == GEMMESH_REFRESH);
        };
        let before = first.previous().raw();
        let initialise = |own: &mut DeviceRegion| {
            let mut words = vec![0u32; word::END];
            words[..word::FLAGS].fill(before);
            words[word::MAILBOX..word::PUSH_EPOCH].fill(before);
            words[word::PUSH_EPOCH + offset_of!(GemmeshPushEpoch, epoch) / 4] = before;
            let bytes = bytemuck::cast_slice(&words);
            own.write_rows(0, bytes.len(), bytes.len(), bytes)
        };
        let memory = Symmetric::allocate(gpu, members, peers, &opening(), BYTES, initialise)?;
        Ok(Control { memory })
    }

    /// Leaves the ranks' blocks mapped forever, because this rank's device may still write to them.
    pub fn abandon(&mut self) {
        self.memory.abandon();
    }

    fn at(base: DevicePtr, word: usize) -> DevicePtr {
        debug_assert_ne!(base, 0, "a rank of another host");
        base + 4 * word as u64
    }

    /// The flags that streams wait for and write in operation `epoch`.
    pub fn flags(&self, epoch: Epoch) -> Signals<'_> {
        Signals {
            memory: &self.memory,
            first: 0,
            epoch,
        }
    }

    /// The graph words that streams wait for and write in a captured operation.
    pub fn graph_words(&self) -> Signals<'_> {
        Signals {
            memory: &self.memory,
            first: word::GRAPH,
            epoch: Epoch::OPEN,
        }
    }

    /// Where a captured operation notes that this rank has made all its transfers.
    pub fn moved(&self) -> DevicePtr {
        Control::at(self.memory.own(), word::MOVED)
    }

    /// Where captured operations are counted.
    pub fn replays(&self) -> DevicePtr {
        Control::at(self.memory.own(), word::REPLAYS)
    }

    /// Where a lane of the network counts its turns.
    pub fn turns(&self, lane: usize) -> DevicePtr {
        Control::at(self.memory.own(), word::TURNS + lane)
    }

    /// The word that makes this rank's kernels stop waiting.
    pub fn abort(&self) -> DevicePtr {
        Control::at(self.memory.own(), word::ABORT)
    }

    /// The mailbox of `rank`, which shares this rank's host.
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

    /// The word that says that a block of this rank's product is stored. It is 0 between operations.
    ///
    /// (It is not in the program's tables, because these are memory of a pool, and no stream can wait for a word
    /// there.)
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
            graph: lines(self.graph_words()),
            moved: self.moved(),
            mailbox: Control::at(self.memory.own(), word::MAILBOX),
            push_epoch: self.push_epoch(),
            stored: self.stored(0),
            turns: self.turns(0),
        }
    }

    /// `aligned` in the memory of `rank`.
    pub fn aligned(&self, rank: usize) -> DevicePtr {
        Control::at(self.memory.of(rank), word::ALIGNED)
    }

    /// The low-latency area of `rank`.
    pub fn low_latency_area(&self, rank: usize) -> DevicePtr {
        self.memory.of(rank) + LOW_LATENCY as u64
    }

    /// The box for `by` in the memory of `rank`.
    pub fn inbox(&self, rank: usize, by: usize) -> DevicePtr {
        self.memory.of(rank) + (BOXES + by * BOX) as u64
    }
}

/// The words by which the ranks' streams signal one another in an operation.
///
/// They are flags with epochs or, in a captured operation, graph words.
#[derive(Clone, Copy, Debug)]
pub struct Signals<'a> {
    memory: &'a Symmetric,
    /// The offset of `ready[0]` in a control block, in words.
    first: usize,
    /// The value that is waited for and written.
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

/// Closes a graph word.
pub fn close(word: DevicePtr) -> StreamMemOp {
    StreamMemOp::Write(word, Epoch::CLOSED.raw())
}

/// Addresses in this rank's own control block.
#[derive(Clone, Copy, Debug)]
pub struct OwnWords {
    pub abort: DevicePtr,
    pub flags: OwnLines,
    pub graph: OwnLines,
    /// Whether a captured operation has made all transfers.
    pub moved: DevicePtr,
    /// The mailbox, which begins with `ready`, by peer.
    pub mailbox: DevicePtr,
    /// The count of the operations whose rows are pushed.
    pub push_epoch: DevicePtr,
    /// The first `stored` word. There is one for each block of a product.
    pub stored: DevicePtr,
    /// The turns of the network's first lane. Those of the others follow.
    pub turns: DevicePtr,
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
    /// `ready` and `done` of the graph words.
    pub graph_ready: FlagLine,
    pub graph_done: FlagLine,
    pub mailbox: GemmeshMailbox,
    pub push_epoch: GemmeshPushEpoch,
    /// Whether the captured operation that runs has made all transfers.
    pub moved: u32,
    pub reserved: u32,
    /// By lane of the network: its turns.
    pub turns: [u32; LANES],
}

// SAFETY: plain words, for which zero is valid.
unsafe impl bytemuck::Zeroable for Snapshot {}

/// Which ranks' words an operation waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Waits {
    /// Its kernel waits for `ready` of the peers, in the mailbox, and then for chunk flags there. Bit r of `ready` stands
    /// for rank r. `sources`: by flag, the rank whose rows it guards. Empty if rows come through low-latency areas.
    Kernel { ready: u64, sources: Arc<[usize]> },
    /// Its streams wait. Bit r stands for rank r. `ready`: the peers from or to whose memory this rank moves something.
    /// `done`: the peers that move something from or to this rank's memory.
    Streams { ready: u64, done: u64 },
    /// The streams of a captured operation wait for graph words, which are opened only for ranks that wait for them.
    /// `ready` and `done`: as for [`Waits::Streams`]. `sources`: ranks whose rows this rank passes on and which say
    /// `done` here too. They are to blame before other ranks that wait for them as well.
    Graph { ready: u64, sources: u64, done: u64 },
}

/// What an operation does over the network, lane by lane and turn by turn.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NetworkTurns([Vec<NetworkTurn>; LANES]);

/// What a rank waits for at one turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct NetworkTurn {
    number: usize,
    /// The rank that sends, and the flag of its chunk.
    from: Option<(usize, usize)>,
    /// The rank that receives.
    to: Option<usize>,
}

impl NetworkTurns {
    pub fn of(schedule: &Schedule) -> NetworkTurns {
        let mut lanes: [Vec<NetworkTurn>; LANES] = Default::default();
        for turn in schedule.turns() {
            lanes[turn.number % LANES].push(NetworkTurn {
                number: turn.number,
                from: turn.received.map(|moved| (moved.from, moved.flag)),
                to: turn.sent.map(|moved| moved.to),
            });
        }
        NetworkTurns(lanes)
    }

    /// How many turns a lane has.
    pub fn count(&self, lane: usize) -> usize {
        self.0[lane].len()
    }

    /// What the first turn that has not ended waits for, and its lane's count. `before`: the lanes' counts before the
    /// operation. `now`: their counts at this moment.
    ///
    /// A turn may wait for an earlier one on the other lane, which has a half of it.
    pub fn missing(&self, before: [u32; LANES], now: [u32; LANES]) -> Option<(Awaited, u32)> {
        let lanes = self.0.iter().zip(before).zip(now);
        let next = lanes.filter_map(|((turns, before), now)| {
            // A lane that is still in an earlier operation has a lower count.
            let had = (now.wrapping_sub(before) as i32).max(0);
            turns.get(had as usize).map(|turn| (turn, now))
        });
        let (&NetworkTurn { from, to, .. }, now) = next.min_by_key(|(turn, _)| turn.number)?;
        let received = from.map(|(source, flag)| Awaited::Chunk {
            source,
            flag,
            pulled: true,
        });
        let awaited = received.or(to.map(|peer| Awaited::Taken { peer }));
        awaited.map(|awaited| (awaited, now))
    }
}

impl Snapshot {
    /// The epoch of the pushed operation that runs, as the device counts it. None if no kernel runs.
    pub fn pushed_epoch(&self) -> Option<Epoch> {
        let is_running = self.push_epoch.entered > 0;
        is_running.then(|| Epoch::from_raw(self.push_epoch.epoch).next())
    }

    /// The first word that has not reached `epoch`, and its value, in the order in which an operation waits.
    pub fn missing(
        &self,
        rank: usize,
        world: usize,
        epoch: Epoch,
        waits: &Waits,
    ) -> Option<(Awaited, u32)> {
        let mut guards: &[usize] = &[];
        let (words, ready, done_words, sources, done) = match waits {
            Waits::Kernel { ready, sources } => {
                guards = sources;
                (&self.mailbox.ready, *ready, &self.done, 0, 0)
            }
            &Waits::Streams { ready, done } => (&self.ready, ready, &self.done, 0, done),
            &Waits::Graph {
                ready,
                sources,
                done,
            } => {
                // The graph words that it has passed are closed again.
                let ready = if self.moved == 0 { ready } else { 0 };
                (&self.graph_ready, ready, &self.graph_done, sources, done)
            }
        };
        let ring = |among: u64| {
            let ranks = (1..world).map(move |step| (rank + step) % world);
            ranks.filter(move |rank| among >> rank & 1 == 1)
        };
        let words = ring(ready).map(|source| (Awaited::Ready { source }, words[source]));
        let done = ring(sources).chain(ring(done));
        let done = done.map(|peer| (Awaited::Done { peer }, done_words[peer]));
        let chunks = guards.iter().zip(self.mailbox.chunk).enumerate();
        let chunks = chunks.map(|(flag, (&source, seen))| {
            let pulled = false;
            let awaited = Awaited::Chunk {
                source,
                flag,
                pulled,
            };
            (awaited, seen)
        });
        let words = words.chain(chunks).chain(done);
        let mut late = words.filter(|(_, seen)| !epoch.reached_by(*seen));
        late.next()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_found_in_the_order_in_which_it_is_waited_for() {
        let mut words: Snapshot = bytemuck::Zeroable::zeroed();
        let epoch = Epoch::from_raw(5);
        words.ready[..4].fill(5);
        words.done[..4].fill(5);
        words.mailbox.ready[..4].copy_from_slice(&[5, 5, 4, 3]);
        words.mailbox.chunk[..3].copy_from_slice(&[5, 5, 4]);
        let streams = |ready, done| Waits::Streams { ready, done };
        let all = &streams(0b1111, 0b1111);
        assert_eq!(words.missing(1, 4, epoch, all), None);
        let kernel = |sources: &[usize]| Waits::Kernel {
            ready: u64::MAX,
            sources: sources.into(),
        };
        let pushed = words.missing(1, 4, epoch, &kernel(&[2, 3, 0]));
        assert_eq!(pushed, Some((Awaited::Ready { source: 2 }, 4)));
        // Once all are ready, rows are missing.
        words.mailbox.ready[..4].fill(5);
        let pushed = words.missing(1, 4, epoch, &kernel(&[2, 3, 0]));
        let (source, flag, pulled) = (0, 2, false);
        let rows = Awaited::Chunk {
            source,
            flag,
            pulled,
        };
        assert_eq!(pushed, Some((rows, 4)));
        assert_eq!(words.missing(1, 4, epoch, &kernel(&[2, 3])), None);
        words.done[0] = 4;
        let pulled = words.missing(1, 4, epoch, all);
        assert_eq!(pulled, Some((Awaited::Done { peer: 0 }, 4)));
        // Ranks from which nothing is pulled, and ranks that pull nothing, are not waited for.
        words.ready[3] = 4;
        assert_eq!(words.missing(1, 4, epoch, &streams(0b101, 0b1100)), None);
        let pulled = words.missing(1, 4, epoch, &streams(0b1000, 0));
        assert_eq!(pulled, Some((Awaited::Ready { source: 3 }, 4)));
    }

    #[test]
    fn a_turn_that_has_not_ended_is_found() {
        let turn = |number, from: Option<usize>, to| NetworkTurn {
            number,
            from: from.map(|rank| (rank, 7)),
            to,
        };
        let turns = NetworkTurns([
            vec![turn(2, Some(2), Some(3)), turn(6, None, Some(1))],
            Vec::new(),
        ]);
        let missing = |had: u32| turns.missing([u32::MAX, 4], [u32::MAX.wrapping_add(had), 4]);
        let received = Awaited::Chunk {
            source: 2,
            flag: 7,
            pulled: true,
        };
        assert_eq!(missing(0), Some((received, u32::MAX)));
        assert_eq!(missing(1), Some((Awaited::Taken { peer: 1 }, 0)));
        assert_eq!(missing(2), None);
        // An earlier operation has not ended.
        let earlier = turns.missing([9, 4], [8, 4]);
        assert_eq!(earlier, Some((received, 8)));
        // Of both lanes' next turns, the later one may wait for the other.
        let both = NetworkTurns([vec![turn(6, Some(2), None)], vec![turn(5, None, Some(1))]]);
        let first = both.missing([0, 4], [0, 4]);
        assert_eq!(first, Some((Awaited::Taken { peer: 1 }, 4)));
        assert_eq!(both.missing([0, 4], [0, 5]), Some((received, 0)));
    }

    #[test]
    fn graph_words_that_were_passed_are_closed_once_all_is_moved() {
        let mut words: Snapshot = bytemuck::Zeroable::zeroed();
        let graph = &Waits::Graph {
            ready: 0b101,
            sources: 0,
            done: 0b1101,
        };
        words.graph_ready[2] = 1;
        let missing = |words: &Snapshot| words.missing(1, 4, Epoch::OPEN, graph);
        assert_eq!(missing(&words), Some((Awaited::Ready { source: 0 }, 0)));
        (words.moved, words.graph_ready[2]) = (1, 0);
        words.graph_done[2] = 1;
        assert_eq!(missing(&words), Some((Awaited::Done { peer: 3 }, 0)));
        // The rank whose rows are passed on is to blame first.
        let relayed = &Waits::Graph {
            ready: 0,
            sources: 0b1,
            done: 0b1001,
        };
        let first = words.missing(1, 4, Epoch::OPEN, relayed);
        assert_eq!(first, Some((Awaited::Done { peer: 0 }, 0)));
        words.graph_done[..4].fill(1);
        assert_eq!(missing(&words), None);
    }

    #[test]
    fn the_pushed_operation_is_the_next_one_while_a_kernel_runs() {
        let mut words: Snapshot = bytemuck::Zeroable::zeroed();
        words.push_epoch.epoch = u32::MAX;
        assert_eq!(words.pushed_epoch(), None);
        words.push_epoch.entered = 1;
        assert_eq!(words.pushed_epoch(), Some(Epoch::from_raw(0)));
    }
}
