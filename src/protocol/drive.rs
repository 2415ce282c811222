//! The protocol's steps, in order, for any engine: what is waited for, what is moved, what is signalled.
//!
//! An engine says how a step is done (a thread copies and stores, or a stream enqueues); that it is done,
//! and when, is said here once.

use super::epoch::Epoch;
use super::flag::{Awaited, Flag, FlagBlock, Wait};
use super::plan::{Plan, Pull, Push, Tile};
use super::primitive::{AtomicUsize, Ordering};

/// The steps of a gather, as a copy engine does them, one after the other.
pub trait CopyEngine {
    /// Why a step could not be done.
    type Error;

    /// Brings all chunk flags of this rank to `epoch`.
    fn refresh(&mut self, epoch: Epoch) -> Result<(), Self::Error>;
    /// Waits until the rows of `source` are final.
    fn wait_ready(&mut self, source: usize, epoch: Epoch) -> Result<(), Self::Error>;
    /// Copies the rows of a pull from their owner's memory into this rank's.
    fn copy(&mut self, pull: &Pull) -> Result<(), Self::Error>;
    /// Says that a pull has arrived, after its bytes.
    fn signal_chunk(&mut self, flag: usize, epoch: Epoch) -> Result<(), Self::Error>;
    /// Says to `source` that this rank has pulled its rows.
    fn signal_done(&mut self, source: usize, epoch: Epoch) -> Result<(), Self::Error>;
}

/// Pulls every other rank's rows, source by source in ring order, a flag after each chunk.
pub fn gather<E: CopyEngine>(plan: &Plan, epoch: Epoch, engine: &mut E) -> Result<(), E::Error> {
    if epoch.refreshes() {
        engine.refresh(epoch.previous())?;
    }
    for source in plan.sources() {
        engine.wait_ready(source, epoch)?;
        for pull in plan.pulls_from(source) {
            engine.copy(pull)?;
            engine.signal_chunk(pull.flag, epoch)?;
        }
        engine.signal_done(source, epoch)?;
    }
    Ok(())
}

/// Takes tiles from the table until it is empty, each when its flags have arrived.
///
/// Any number of workers share `next`. A worker waits only for copies, never for another worker, so
/// any number of them, down to one, finishes the table.
pub fn multiply<W: Wait>(
    plan: &Plan,
    epoch: Epoch,
    chunk: &[Flag],
    next: &AtomicUsize,
    waiter: &W,
    mut tile: impl FnMut(usize, &Tile),
) -> Result<(), W::Error> {
    while let Some((index, entry)) = take(plan, next) {
        for flag in entry.flags() {
            let source = plan.source_of(flag);
            waiter.wait(&chunk[flag], epoch, Awaited::Chunk { source, flag })?;
        }
        tile(index, entry);
    }
    Ok(())
}

/// The next entry of the table that no worker has taken.
pub fn take<'p>(plan: &'p Plan, next: &AtomicUsize) -> Option<(usize, &'p Tile)> {
    // Relaxed: the counter shares out indices and guards no data.
    let index = next.fetch_add(1, Ordering::Relaxed);
    plan.tiles().get(index).map(|tile| (index, tile))
}

/// Writes this rank's rows into every peer's memory, peer by peer in ring order, a flag after each chunk: the gather of the
/// peers, done by the owner. `copy` moves the bytes of a push.
pub fn push<W: Wait>(
    plan: &Plan,
    epoch: Epoch,
    blocks: &[FlagBlock],
    waiter: &W,
    mut copy: impl FnMut(&Push),
) -> Result<(), W::Error> {
    let ready = blocks[plan.problem().rank()].ready;
    for push in plan.pushes() {
        let (peer, flag) = (push.peer, push.flag);
        waiter.wait(&ready[peer], epoch, Awaited::Ready { source: peer })?;
        copy(push);
        blocks[peer].chunk[flag].signal(epoch);
    }
    Ok(())
}

/// Says to every peer that this rank's own rows are final, and that those it gathered may be overwritten.
pub fn announce(rank: usize, epoch: Epoch, blocks: &[FlagBlock]) {
    for (_, block) in peers(rank, blocks) {
        block.ready[rank].signal(epoch);
    }
}

/// Waits until every peer has pulled this rank's rows, so that they may be overwritten.
pub fn await_done<W: Wait>(
    rank: usize,
    epoch: Epoch,
    blocks: &[FlagBlock],
    waiter: &W,
) -> Result<(), W::Error> {
    for (peer, _) in peers(rank, blocks) {
        waiter.wait(&blocks[rank].done[peer], epoch, Awaited::Done { peer })?;
    }
    Ok(())
}

fn peers<'a, 'b>(
    rank: usize,
    blocks: &'b [FlagBlock<'a>],
) -> impl Iterator<Item = (usize, &'b FlagBlock<'a>)> {
    blocks
        .iter()
        .enumerate()
        .filter(move |(peer, _)| *peer != rank)
}

/// The copy engine of a backend whose flags are words that the processor can store to.
pub struct CopyThread<'a, W, C> {
    /// This rank.
    pub rank: usize,
    /// Every rank's flags, by rank.
    pub blocks: &'a [FlagBlock<'a>],
    /// How to wait.
    pub waiter: &'a W,
    /// Moves the bytes of a pull.
    pub copy: C,
}

impl<W: Wait, C: FnMut(&Pull)> CopyEngine for CopyThread<'_, W, C> {
    type Error = W::Error;

    fn refresh(&mut self, epoch: Epoch) -> Result<(), W::Error> {
        for flag in self.blocks[self.rank].chunk {
            flag.signal(epoch);
        }
        Ok(())
    }

    fn wait_ready(&mut self, source: usize, epoch: Epoch) -> Result<(), W::Error> {
        let flag = &self.blocks[self.rank].ready[source];
        self.waiter.wait(flag, epoch, Awaited::Ready { source })
    }

    fn copy(&mut self, pull: &Pull) -> Result<(), W::Error> {
        (self.copy)(pull);
        Ok(())
    }

    fn signal_chunk(&mut self, flag: usize, epoch: Epoch) -> Result<(), W::Error> {
        self.blocks[self.rank].chunk[flag].signal(epoch);
        Ok(())
    }

    fn signal_done(&mut self, source: usize, epoch: Epoch) -> Result<(), W::Error> {
        self.blocks[source].done[self.rank].signal(epoch);
        Ok(())
    }
}
