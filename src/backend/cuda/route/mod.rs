//! How rows get from one rank to another: a file a route, and here what they share.
//!
//! [`copies`]: a stream takes or brings them, which waits for the other rank's word, and writes flags. [`push`]: the owner's copy stream
//! brings them, when its kernel lets it. [`store`]: the owner's kernel brings them itself (cuda/common/push.cuh).

pub mod copies;
pub mod push;
pub mod store;

use std::ffi::c_void;
use std::time::Duration;

use super::Cuda;
use super::driver::{Stream, StreamMemOp};
use super::program::{self, Place};
use crate::backend::chunk_delay;
use crate::backend::sealed::Bound;
use crate::error::Result;
use crate::schedule::layout::MAX_WORLD;
use crate::schedule::{Epoch, Extent, MAX_FLAGS, Move, Region, Schedule, Transfer};

/// Says to every peer that this rank's own rows are final, on the main stream; what refreshes flags does so before. As
/// [`announce`](crate::schedule::drive::announce) of the host.
pub fn announce(at: &Place, epoch: Epoch, and: Option<StreamMemOp>) -> Result<()> {
    let Place {
        cuda,
        members,
        main,
        ..
    } = *at;
    let (rank, control) = (members.rank, &cuda.control);
    if epoch.refreshes() {
        // Ahead of the operation's kernel: a fill may run as one, and find no room beside a kernel that waits for it.
        // SAFETY: the flags are as many words. Whoever else writes them has ended what came before, for the main stream
        // has waited for it, and goes on after this.
        unsafe {
            main.fill(control.done(rank, 0), epoch.previous().raw(), members.world)?;
            main.fill(control.chunk(0), epoch.previous().raw(), MAX_FLAGS)?;
        }
    }
    let mut words = [StreamMemOp::Write(0, 0); MAX_WORLD + 1];
    let peers = (0..members.world).filter(|&peer| peer != rank);
    let ready = peers.map(|peer| StreamMemOp::Write(control.ready(peer, rank), epoch.raw()));
    let mut count = 0;
    for word in and.into_iter().chain(ready) {
        words[count] = word;
        count += 1;
    }
    // SAFETY: control blocks are unmapped when the streams have passed.
    unsafe { main.words(&words[..count]) }
}

/// Copies the regions of a transfer, in which rank `own` takes part.
///
/// # Safety
/// As [`Stream::copy`] for each region.
unsafe fn copy_regions(
    stream: &Stream,
    own: usize,
    schedule: &Schedule,
    matrices: &[Bound<Cuda>],
    transfer: &Transfer,
) -> Result<()> {
    for Move { from, to } in &transfer.regions {
        let place = |region: &Region, rank: usize| {
            let spec = schedule.matrices()[region.matrix];
            let (base, pitch) = match rank == own {
                true => program::place(schedule, matrices, region.matrix)?,
                false => {
                    let memory = matrices[region.matrix].symmetric()?;
                    (memory.of(rank), spec.row_bytes())
                }
            };
            let extent = Extent {
                pitch,
                offset: region.rows.start * pitch + region.columns.start * spec.dtype.bytes(),
                ..spec.extent_of(region)
            };
            Some((base + extent.offset as u64, extent))
        };
        let places = (place(from, transfer.from), place(to, transfer.to));
        let (Some((from, read)), Some((to, written))) = places else {
            continue;
        };
        // SAFETY: as this function's.
        unsafe {
            match (read.contiguous(), written.contiguous()) {
                (Some(bytes), Some(_)) => stream.copy(to, from, bytes)?,
                _ => {
                    let (to, from) = ((to, written.pitch), (from, read.pitch));
                    stream.copy_rows(to, from, read.width, read.rows)?;
                }
            }
        }
    }
    Ok(())
}

fn delay(stream: &Stream, rank: usize, flag: usize, epoch: Epoch) -> Result<()> {
    chunk_delay(rank, flag, epoch).map_or(Ok(()), |time| pause(stream, time))
}

/// The stream does nothing for a while.
pub fn pause(stream: &Stream, time: Duration) -> Result<()> {
    unsafe extern "C" fn sleep(micros: *mut c_void) {
        std::thread::sleep(Duration::from_micros(micros as u64));
    }
    let micros = time.as_micros() as u64;
    // SAFETY: the function reads the number that the pointer is, and makes no CUDA call.
    unsafe { stream.call(sleep, micros as *mut c_void) }
}
