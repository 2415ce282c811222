//! The protocol's steps in their order, for all engines.
//!
//! An engine says how a step is done: a thread copies and stores, or a stream enqueues. The order of the steps is here.

use std::ops::Range;

use super::{HostSum, Reduction, Request, Schedule, Tile, Transfer};
use crate::protocol::epoch::Epoch;
use crate::protocol::flag::{Awaited, Flag, FlagBlock, Wait};
use crate::protocol::primitive::{AtomicUsize, Ordering};

/// The steps of a rank's transfers. A copy engine does them one after the other.
pub trait CopyEngine {
    /// Why a step could not be done.
    type Error;

    /// Waits until the rows of `peer` are final, and the rows that it gathered before may be overwritten.
    fn wait_ready(&mut self, peer: usize, epoch: Epoch) -> Result<(), Self::Error>;
    /// Waits for the flag of a chunk that this rank passes on.
    fn wait_chunk(
        &mut self,
        flag: usize,
        epoch: Epoch,
        awaited: Awaited,
    ) -> Result<(), Self::Error>;
    /// Waits until this rank has made a block of its product, or its caller has made a block.
    fn wait_produced(&mut self, block: usize, epoch: Epoch) -> Result<(), Self::Error>;
    /// Moves all regions of a transfer.
    fn copy(&mut self, transfer: &Transfer) -> Result<(), Self::Error>;
    /// Writes the chunk flag in the memory of `transfer.to`, after the bytes of the regions.
    fn signal_chunk(&mut self, transfer: &Transfer, epoch: Epoch) -> Result<(), Self::Error>;
    /// Tells `peer` that this rank has made its last transfer from or to it.
    fn signal_done(&mut self, peer: usize, epoch: Epoch) -> Result<(), Self::Error>;
}

/// A copy engine that uses graph words; see [`transfer_in_graph`].
pub trait GraphCopyEngine: CopyEngine {
    /// Notes for reports that all rows are moved. From here on, graph words are closed that were open.
    fn all_moved(&mut self) -> Result<(), Self::Error>;
    /// Closes `ready` of `peer`.
    fn close_ready(&mut self, peer: usize) -> Result<(), Self::Error>;
}

/// Makes `moves`, which are transfers of `schedule` that this engine can make, and writes a flag after each.
pub fn transfer<'s, E: CopyEngine>(
    schedule: &'s Schedule,
    moves: impl Iterator<Item = &'s Transfer> + Clone,
    epoch: Epoch,
    engine: &mut E,
) -> Result<(), E::Error> {
    let done = |engine: &mut E, peer| engine.signal_done(peer, epoch);
    walk(schedule, moves, epoch, engine, done)
}

/// As [`transfer`], for an operation that is recorded once in a graph and replayed.
///
/// Its streams wait for the same values and write the same values each time, so its words hold no epochs. They are
/// **graph words**: a peer opens one, and the rank that has waited for it closes it.
///
/// A graph word is closed before its peer can open it again. A peer opens `ready` in its next operation, which begins
/// when all ranks that move its rows are done with this one. So this rank closes `ready` before it writes `done`. It
/// writes all `done` at the end, so that until then the graph words show which rank is late.
pub fn transfer_in_graph<'s, E: GraphCopyEngine>(
    schedule: &'s Schedule,
    moves: impl Iterator<Item = &'s Transfer> + Clone,
    engine: &mut E,
) -> Result<(), E::Error> {
    let mut peers = Vec::new();
    let done = |_: &mut E, peer| {
        peers.push(peer);
        Ok(())
    };
    walk(schedule, moves, Epoch::OPEN, engine, done)?;
    engine.all_moved()?;
    for &peer in &peers {
        engine.close_ready(peer)?;
    }
    for &peer in &peers {
        engine.signal_done(peer, Epoch::OPEN)?;
    }
    Ok(())
}

/// Makes all transfers, and calls `done` for each peer after the last transfer from or to it.
fn walk<'s, E: CopyEngine>(
    schedule: &'s Schedule,
    mut moves: impl Iterator<Item = &'s Transfer> + Clone,
    epoch: Epoch,
    engine: &mut E,
    mut done: impl FnMut(&mut E, usize) -> Result<(), E::Error>,
) -> Result<(), E::Error> {
    let mut before = None;
    while let Some(transfer) = moves.next() {
        if !schedule.handshake() {
            engine.copy(transfer)?;
            continue;
        }
        let towards = (transfer.peer(), transfer.route);
        // A transfer within a rank waits for no other rank.
        if before != Some(towards) && transfer.from != transfer.to {
            engine.wait_ready(transfer.peer(), epoch)?;
        }
        before = Some(towards);
        for flag in transfer.after.clone() {
            engine.wait_chunk(flag, epoch, schedule.awaited(flag))?;
        }
        if let Some(block) = transfer.produced {
            engine.wait_produced(block, epoch)?;
        }
        engine.copy(transfer)?;
        engine.signal_chunk(transfer, epoch)?;
        // The peer may overwrite its rows after `done`, so this waits for the last transfer from or to it.
        let again = |next: &Transfer| schedule.says_done(next) && next.peer() == transfer.peer();
        if schedule.says_done(transfer) && !moves.clone().any(again) {
            done(engine, transfer.peer())?;
        }
    }
    Ok(())
}

/// Sends what goes over a network: a block when it is made, and a sum of this host's addends when `add` has made it, of
/// addends that have all come. Other rows were final when the operation began. `send` may return before the rows have
/// gone.
///
/// No one says `ready` or `done` across a network, because both ends take part in a transfer. The sender ends the
/// operation when its rows have been sent. The receiver has begun the operation, so none of its earlier operations uses
/// the memory any more.
pub fn send<'s, W: Wait>(
    schedule: &'s Schedule,
    epoch: Epoch,
    chunk: &[Flag],
    produced: &[Produced],
    waiter: &W,
    mut add: impl FnMut(&'s Reduction),
    mut send: impl FnMut(&'s Transfer) -> Result<(), W::Error>,
) -> Result<(), W::Error> {
    for transfer in schedule.sent() {
        if let Some(block) = transfer.produced {
            produced[block].wait(schedule.rank(), block, epoch, waiter)?;
        }
        if let Some(HostSum { sum, flags }) = transfer.added.map(|sum| &schedule.host_sums()[sum]) {
            wait_chunks(schedule, flags.clone(), epoch, chunk, waiter)?;
            add(sum);
        }
        send(transfer)?;
    }
    Ok(())
}

/// Receives what comes over a network, and writes a flag after each transfer. `receive` returns when its rows are there.
pub fn receive<'s, E>(
    schedule: &'s Schedule,
    epoch: Epoch,
    chunk: &[Flag],
    mut receive: impl FnMut(&'s Transfer) -> Result<(), E>,
) -> Result<(), E> {
    for transfer in schedule.received() {
        receive(transfer)?;
        chunk[transfer.flag].signal(epoch);
    }
    Ok(())
}

/// Takes tiles from the table until it is empty, and runs each when its flags have arrived.
///
/// Any number of workers share `next`. A worker waits only for transfers, never for another worker, so even a single
/// worker finishes the table.
pub fn multiply<W: Wait>(
    schedule: &Schedule,
    epoch: Epoch,
    chunk: &[Flag],
    next: &AtomicUsize,
    produced: &[Produced],
    waiter: &W,
    mut tile: impl FnMut(usize, &Tile),
) -> Result<(), W::Error> {
    while let Some((index, entry)) = take(schedule, next) {
        wait_chunks(schedule, entry.flags(), epoch, chunk, waiter)?;
        tile(index, entry);
        if let Some(produced) = produced.get(entry.block as usize) {
            produced.count(epoch);
        }
    }
    Ok(())
}

/// Waits for these chunk flags of this rank.
fn wait_chunks<W: Wait>(
    schedule: &Schedule,
    mut flags: Range<usize>,
    epoch: Epoch,
    chunk: &[Flag],
    waiter: &W,
) -> Result<(), W::Error> {
    flags.try_for_each(|flag| waiter.wait(&chunk[flag], epoch, schedule.awaited(flag)))
}

/// Waits until all addends of a reduction are there: the transfers to this rank, and the blocks that it makes.
pub fn wait_addends<W: Wait>(
    schedule: &Schedule,
    epoch: Epoch,
    chunk: &[Flag],
    produced: &[Produced],
    waiter: &W,
) -> Result<(), W::Error> {
    wait_chunks(schedule, 0..schedule.arrivals().len(), epoch, chunk, waiter)?;
    for (block, produced) in produced.iter().enumerate() {
        produced.wait(schedule.rank(), block, epoch, waiter)?;
    }
    Ok(())
}

/// Calls `consumer` for rows as they come: first for this rank's own, then for each arrival, in the expected order.
pub fn consume<W: Wait>(
    schedule: &Schedule,
    epoch: Epoch,
    chunk: &[Flag],
    waiter: &W,
    mut consumer: impl FnMut(Option<&Transfer>) -> Result<(), W::Error>,
) -> Result<(), W::Error> {
    consumer(None)?;
    for arrival in schedule.arrivals() {
        waiter.wait(&chunk[arrival.flag], epoch, schedule.awaited(arrival.flag))?;
        consumer(Some(arrival))?;
    }
    Ok(())
}

/// Calls `producer` for the requested blocks, one after the other.
pub fn produce<E>(
    schedule: &Schedule,
    epoch: Epoch,
    produced: &[Produced],
    mut producer: impl FnMut(&Request) -> Result<(), E>,
) -> Result<(), E> {
    for (block, request) in schedule.requests().iter().enumerate() {
        producer(request)?;
        if let Some(produced) = produced.get(block) {
            produced.count(epoch);
        }
    }
    Ok(())
}

/// How much is left to do of a block that this rank makes.
///
/// The rank's copy engine waits for it. Other ranks wait for chunk flags instead.
#[derive(Debug)]
pub struct Produced {
    /// The number of tiles. A block that the caller makes counts as one.
    tiles: usize,
    /// Tiles that are left.
    left: AtomicUsize,
    /// Signalled when no tile is left.
    flag: Flag,
}

impl Produced {
    /// One for each block that the caller makes. Otherwise one for each block of the product, if a transfer or this
    /// rank's reduction waits for blocks.
    pub fn of(schedule: &Schedule) -> Vec<Produced> {
        // A rank that sends nothing still adds its own partials, and several workers make them.
        let adds = schedule.reduction().is_some();
        let mut moves = schedule.moves().chain(schedule.sent());
        let is_awaited = adds || moves.any(|moved| moved.produced.is_some());
        if !schedule.requests().is_empty() {
            return schedule
                .requests()
                .iter()
                .map(|_| Produced::tiles(1))
                .collect();
        }
        let blocks = schedule.product().filter(|_| is_awaited);
        let mut tiles = vec![0; blocks.map_or(0, |product| product.blocks.len())];
        for tile in schedule.tiles().iter().filter(|_| is_awaited) {
            tiles[tile.block as usize] += 1;
        }
        tiles.into_iter().map(Produced::tiles).collect()
    }

    fn tiles(tiles: usize) -> Produced {
        Produced {
            tiles,
            left: AtomicUsize::new(tiles),
            flag: Flag::new(Epoch::FIRST),
        }
    }

    /// Resets the count. Called before the threads of an operation begin.
    pub fn begin(&mut self, epoch: Epoch) {
        self.left = AtomicUsize::new(self.tiles);
        // A block without rows is complete.
        let is_there = self.tiles == 0;
        self.flag = Flag::new(if is_there { epoch } else { epoch.previous() });
    }

    /// Waits until all tiles are done of `block`, which is the block of this count.
    pub fn wait<W: Wait>(
        &self,
        rank: usize,
        block: usize,
        epoch: Epoch,
        waiter: &W,
    ) -> Result<(), W::Error> {
        waiter.wait(&self.flag, epoch, Awaited::Produced { rank, block })
    }

    /// Counts one more tile as done.
    fn count(&self, epoch: Epoch) {
        // A worker's stores come before its count, and all counts before the last one's signal.
        if self.left.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.flag.signal(epoch);
        }
    }
}

/// The next entry of the table that no worker has taken.
fn take<'s>(schedule: &'s Schedule, next: &AtomicUsize) -> Option<(usize, &'s Tile)> {
    // Relaxed: the counter shares out indices and guards no data.
    let index = next.fetch_add(1, Ordering::Relaxed);
    schedule.tiles().get(index).map(|tile| (index, tile))
}

/// Tells every peer of this host that this rank's own rows are final, and that its gathered rows may be overwritten.
///
/// In an operation that refreshes, it first sets those flags of this rank to the epoch before that not every operation
/// writes. No one else writes these flags at that time: the operation before has ended, and peers begin this one after
/// they have seen `ready`.
pub fn announce(rank: usize, epoch: Epoch, blocks: &[FlagBlock]) {
    if epoch.refreshes() {
        let own = &blocks[rank];
        for flag in own.done.iter().chain(own.chunk) {
            flag.signal(epoch.previous());
        }
    }
    for (peer, block) in blocks.iter().enumerate() {
        if peer != rank
            && let Some(ready) = block.ready.get(rank)
        {
            ready.signal(epoch);
        }
    }
}

/// As [`announce`], by graph words, and only at the ranks that wait for them, because these ranks close them.
pub fn announce_in_graph(schedule: &Schedule, words: &[FlagBlock]) {
    for &peer in schedule.movers() {
        words[peer].ready[schedule.rank()].signal(Epoch::OPEN);
    }
}

/// Waits until no transfer is under way into this rank's memory or out of it.
///
/// That is when all chunks have come, also those that no tile awaits, and all movers have written `done`.
pub fn complete<W: Wait>(
    schedule: &Schedule,
    epoch: Epoch,
    blocks: &[FlagBlock],
    waiter: &W,
) -> Result<(), W::Error> {
    let own = &blocks[schedule.rank()];
    if !schedule.awaits_all() {
        wait_chunks(
            schedule,
            0..schedule.arrivals().len(),
            epoch,
            own.chunk,
            waiter,
        )?;
    }
    for &peer in schedule.movers() {
        waiter.wait(&own.done[peer], epoch, Awaited::Done { peer })?;
    }
    Ok(())
}

/// As [`complete`], by graph words, for operations without a product.
///
/// It closes the words, because no one opens one of them before this rank has announced its next operation. The words
/// of chunks are all open by now, even if no one waited for them: each was written by a rank that has written `done`,
/// or by this rank, whose transfers have ended.
pub fn complete_in_graph<W: Wait>(
    schedule: &Schedule,
    words: &[FlagBlock],
    waiter: &W,
) -> Result<(), W::Error> {
    let own = &words[schedule.rank()];
    for &peer in schedule.movers() {
        waiter.wait(&own.done[peer], Epoch::OPEN, Awaited::Done { peer })?;
        own.done[peer].signal(Epoch::CLOSED);
    }
    for arrival in schedule.arrivals() {
        own.chunk[arrival.flag].signal(Epoch::CLOSED);
    }
    Ok(())
}

/// The copy engine of a backend whose flags the processor can write.
pub struct CopyThread<'a, W, C> {
    /// This rank.
    pub rank: usize,
    /// Every rank's flags, by rank.
    pub blocks: &'a [FlagBlock<'a>],
    /// What is left of each block that this rank makes.
    pub produced: &'a [Produced],
    /// How to wait.
    pub waiter: &'a W,
    /// Moves the bytes of a transfer.
    pub copy: C,
}

impl<W: Wait, C: FnMut(&Transfer)> CopyEngine for CopyThread<'_, W, C> {
    type Error = W::Error;

    fn wait_ready(&mut self, peer: usize, epoch: Epoch) -> Result<(), W::Error> {
        let flag = &self.blocks[self.rank].ready[peer];
        let awaited = Awaited::Ready { source: peer };
        self.waiter.wait(flag, epoch, awaited)
    }

    fn wait_chunk(&mut self, flag: usize, epoch: Epoch, awaited: Awaited) -> Result<(), W::Error> {
        self.waiter
            .wait(&self.blocks[self.rank].chunk[flag], epoch, awaited)
    }

    fn wait_produced(&mut self, block: usize, epoch: Epoch) -> Result<(), W::Error> {
        self.produced[block].wait(self.rank, block, epoch, self.waiter)
    }

    fn copy(&mut self, transfer: &Transfer) -> Result<(), W::Error> {
        (self.copy)(transfer);
        Ok(())
    }

    fn signal_chunk(&mut self, transfer: &Transfer, epoch: Epoch) -> Result<(), W::Error> {
        self.blocks[transfer.to].chunk[transfer.flag].signal(epoch);
        Ok(())
    }

    fn signal_done(&mut self, peer: usize, epoch: Epoch) -> Result<(), W::Error> {
        self.blocks[peer].done[self.rank].signal(epoch);
        Ok(())
    }
}

impl<W: Wait, C: FnMut(&Transfer)> GraphCopyEngine for CopyThread<'_, W, C> {
    fn all_moved(&mut self) -> Result<(), W::Error> {
        Ok(())
    }

    fn close_ready(&mut self, peer: usize) -> Result<(), W::Error> {
        self.blocks[self.rank].ready[peer].signal(Epoch::CLOSED);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::DType;
    use crate::route::Route;
    use crate::schedule::plan::plan;
    use crate::schedule::{Chunking, Config, Layout, Operation, Problem, TileShape};

    /// One worker may be done with its tiles and begin to add while another still multiplies.
    #[test]
    fn a_rank_that_sends_nothing_waits_for_its_own_partials() {
        let layout = Layout::new(&[0, 0, 90], 33).unwrap();
        let problem = Problem::new(Operation::MATMUL_REDUCE_SCATTER, DType::Bf16, layout, 5);
        let tile = TileShape::new(64, 16, 64);
        let schedule = plan(
            &problem,
            2,
            Config::new(tile, Chunking::new(1), Route::Store),
        )
        .unwrap();
        assert!(schedule.reduction().is_some() && schedule.moves().next().is_none());
        let blocks = &schedule.product().unwrap().blocks;
        assert!(!blocks.is_empty());
        assert_eq!(Produced::of(&schedule).len(), blocks.len());
    }
}
