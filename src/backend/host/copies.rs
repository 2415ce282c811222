//! What the copy thread does with a transfer.

use std::time::{Duration, Instant};

use super::matrices::BoundMatrices;
use super::recorder::Recorder;
use crate::backend::delays::chunk_delay;
use crate::profile::nvtx::range;
use crate::profile::span::{Lane, Work};
use crate::protocol::epoch::Epoch;
use crate::ranks::members::Members;
use crate::schedule::{Extent, Move, Transfer};

/// Moves the bytes of a call's transfers.
pub struct Copier<'a, 's> {
    pub members: &'a Members,
    pub matrices: &'a BoundMatrices<'a>,
    pub epoch: Epoch,
    /// Bytes per second of copies, if they are held to that.
    pub link: Option<usize>,
    pub recorder: &'a Recorder<'s>,
}

impl Copier<'_, '_> {
    pub fn copy(&self, transfer: &Transfer) {
        let _range = range(|| format!("gemmesh {}", transfer.name()));
        let begin = self.recorder.begin();
        let begun = Instant::now();
        delay(transfer.to, transfer.flag, self.epoch);
        let bytes = self.move_regions(transfer);
        if let Some(rate) = self.link {
            let time = Duration::from_secs_f64(bytes as f64 / rate as f64);
            pace(self.members, begun, time);
        }
        self.recorder.end(begin, Lane::Copy, || {
            let rows = transfer.regions[0].to.rows.clone();
            match transfer.to == self.members.rank {
                true => Work::Pull {
                    source: transfer.source,
                    rows,
                },
                false => Work::Push {
                    to: transfer.to,
                    rows,
                },
            }
        });
    }

    /// Returns how many bytes that were.
    fn move_regions(&self, transfer: &Transfer) -> usize {
        let mut bytes = 0;
        for Move { from, to } in &transfer.regions {
            let read = self.matrices.region(from, transfer.from);
            let written = self.matrices.region(to, transfer.to);
            let (Some((source, read)), Some((target, written))) = (read, written) else {
                continue;
            };
            // SAFETY: the memories of both ranks hold the matrix. What is read is final: `ready` of a source that is
            // pulled from has been acquired, and it does not write its rows before `done`; the own rows are the
            // caller's, who waits for this; and of what is passed on the flags have been acquired. Nobody reads what is
            // written before this transfer's flag is released, nor do tiles of an operation before any more: this
            // rank's have ended, and a peer has said `ready` since. What tiles of this rank make, or its caller, they
            // have made: the block's count has been acquired. Regions of one rank's memory do not overlap.
            unsafe { copy_part(source, &read, target, &written) };
            bytes += read.rows * read.width;
        }
        bytes
    }
}

/// Copies a part of a matrix to a part of another that is as large.
///
/// # Safety
/// Both matrices hold the part; nobody writes what is read, nor reads or writes what is written.
unsafe fn copy_part(from: *const u8, read: &Extent, to: *mut u8, written: &Extent) {
    let copy = |from_offset: usize, to_offset: usize, bytes: usize| {
        // SAFETY: as this function's.
        unsafe { std::ptr::copy_nonoverlapping(from.add(from_offset), to.add(to_offset), bytes) };
    };
    if let (Some(bytes), Some(_)) = (read.contiguous(), written.contiguous()) {
        return copy(read.offset, written.offset, bytes);
    }
    for row in 0..read.rows {
        let [from, to] = [read, written].map(|extent| extent.offset + row * extent.pitch);
        copy(from, to, read.width);
    }
}

/// Returns when `time` has passed since `begun`, or the group has failed.
fn pace(members: &Members, begun: Instant, time: Duration) {
    const NAP: Duration = Duration::from_millis(5);
    while let Some(left) = time.checked_sub(begun.elapsed()) {
        if left.is_zero() || members.fault().is_some() {
            return;
        }
        std::thread::sleep(left.min(NAP));
    }
}

fn delay(rank: usize, flag: usize, epoch: Epoch) {
    if let Some(time) = chunk_delay(rank, flag, epoch) {
        std::thread::sleep(time);
    }
}
