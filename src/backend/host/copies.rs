//! What the copy thread does with a transfer.

use std::time::{Duration, Instant};

use super::matrices::BoundMatrices;
use super::recorder::Recorder;
use crate::backend::delays::chunk_delay;
use crate::backend::work::work_of;
use crate::profile::nvtx::range;
use crate::profile::span::Lane;
use crate::protocol::epoch::Epoch;
use crate::ranks::members::Members;
use crate::schedule::{Extent, Move, Transfer};

/// Moves the bytes of a call's transfers.
pub struct Copier<'a, 's> {
    pub members: &'a Members,
    pub matrices: &'a BoundMatrices<'a>,
    pub epoch: Epoch,
    /// The limit of copies in bytes per second, if there is one.
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
        let work = || work_of(transfer, self.members.rank);
        self.recorder.end(begin, Lane::Copy, work);
    }

    /// Copies the transfer's regions. Returns how many bytes they have.
    fn move_regions(&self, transfer: &Transfer) -> usize {
        let mut bytes = 0;
        for Move { from, to } in &transfer.regions {
            let read = self.matrices.region(from, transfer.from);
            let written = self.matrices.region(to, transfer.to);
            let (Some((source, read)), Some((target, written))) = (read, written) else {
                continue;
            };
            // SAFETY: the memories of both ranks hold the matrix. What is read is final. For a pull, the source's
            // `ready` has been acquired, and the source does not write its rows before `done`. This rank's own rows are
            // the caller's, who waits for this copy. For a block that this rank's tiles or its caller make, the block's
            // count has been acquired. For rows that are passed on, their flags have been acquired. No one reads what
            // is written before this transfer's flag is released. Tiles of earlier operations no longer read it: this
            // rank's have ended, and a peer has said `ready` since. Regions of one rank's memory do not overlap.
            unsafe { copy_part(source, &read, target, &written) };
            bytes += read.rows * read.width;
        }
        bytes
    }
}

/// What `rank` does in a transfer, for a trace.
/// Copies a part of a matrix to a part of the same size.
///
/// # Safety
/// Both matrices hold their parts. No one else writes what is read, and no one else reads or writes what is written.
pub unsafe fn copy_part(from: *const u8, read: &Extent, to: *mut u8, written: &Extent) {
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

pub fn delay(rank: usize, flag: usize, epoch: Epoch) {
    if let Some(time) = chunk_delay(rank, flag, epoch) {
        std::thread::sleep(time);
    }
}
