//! Functions that several routes share.
//!
//! [`copies`](super::copies): a stream pulls or pushes rows, waits for the other rank's flags, and writes flags.
//! [`push`](super::push): the owner's copy stream pushes rows when its kernel gives the permit. The owner's kernel
//! stores rows (cuda/protocol/push.cuh).

use std::ffi::c_void;
use std::time::Duration;

use smallvec::SmallVec;

use super::context::EnqueueContext;
use crate::backend::cuda::driver::{LaunchShape, Stream, StreamMemOp};
use crate::backend::cuda::program::GpuProgram;
use crate::backend::cuda::program::operands::{CallMatrix, Operands};
use crate::backend::cuda::shared::words::Waits;
use crate::backend::delays::chunk_delay;
use crate::error::Result;
use crate::profile::nvtx::range;
use crate::protocol::epoch::Epoch;
use crate::schedule::layout::MAX_WORLD;
use crate::schedule::{MAX_FLAGS, Move, Region, Schedule, Transfer};

/// Tells every peer of this host, on the main stream, that this rank's own rows are final. Refreshes flags first if the
/// epoch asks for it.
///
/// Does what [`announce`](crate::schedule::drive::announce) does on the host. `and`: a word operation in front of the
/// others.
pub fn announce(at: &EnqueueContext, epoch: Epoch, and: Option<StreamMemOp>) -> Result<()> {
    let EnqueueContext {
        shared,
        members,
        main,
        ..
    } = *at;
    let (rank, flags) = (members.rank, shared.control.flags(epoch));
    if epoch.refreshes() {
        // The fills stand ahead of the operation's kernel. A fill may run as a kernel, which might find no room next to
        // a kernel that waits for it.
        // SAFETY: there are as many flags. Their other writers have ended earlier operations, because the main stream
        // has waited for this, and they go on after these fills.
        unsafe {
            let before = epoch.previous().raw();
            main.fill(flags.done(rank, 0), before, members.world)?;
            main.fill(flags.chunk(rank, 0), before, MAX_FLAGS)?;
        }
    }
    let mut words = [StreamMemOp::Write(0, 0); MAX_WORLD + 1];
    let near = members.hosts.neighbours(rank, members.world);
    let ready = near.map(|peer| flags.signal(flags.ready(peer, rank)));
    let mut count = 0;
    for word in and.into_iter().chain(ready) {
        words[count] = word;
        count += 1;
    }
    // SAFETY: control blocks are unmapped when the streams have passed.
    unsafe { main.words(&words[..count]) }
}

/// [`announce`] for a captured operation. Also counts its replays.
///
/// Does what [`announce_in_graph`](crate::schedule::drive::announce_in_graph) does on the host.
pub fn announce_in_graph(at: &EnqueueContext, program: &GpuProgram) -> Result<()> {
    let EnqueueContext {
        gpu,
        shared,
        members,
        main,
        ..
    } = *at;
    let (schedule, graph) = (&program.schedule, shared.control.graph_words());
    let recording = at.record(program, &Waits::in_graph(schedule));
    let mut words: SmallVec<[StreamMemOp; 16]> = SmallVec::new();
    words.push(StreamMemOp::Write(shared.monitor.running(), recording));
    let movers = schedule.movers().iter();
    words.extend(movers.map(|&peer| graph.signal(graph.ready(peer, members.rank))));
    let mut arguments = [shared.control.replays(), shared.monitor.replays()];
    let [count, shown] = &mut arguments;
    let mut arguments = [(&raw mut *count).cast(), (&raw mut *shown).cast()];
    let (counting, kernel) = (&gpu.streams().deferred_copies, gpu.kernels.count);
    // SAFETY: control blocks are unmapped when the streams have passed, and the monitor's words live as long as the
    // backend, which waits for them. The kernel's arguments are two words, which it alone writes; the main stream waits
    // for it.
    unsafe {
        main.words(&words)?;
        counting.wait_for(main, &gpu.streams().forked)?;
        kernel.launch(counting, LaunchShape::new(1, 1), &mut arguments)
    }
}

/// Enqueues the copies of a transfer in which this rank takes part.
///
/// # Safety
/// As [`Stream::copy`] for each region.
pub unsafe fn copy_regions(
    stream: &Stream,
    schedule: &Schedule,
    operands: &Operands,
    transfer: &Transfer,
) -> Result<()> {
    let _range = range(|| format!("gemmesh {}", transfer.name()));
    for Move { from, to } in &transfer.regions {
        let place = |region: &Region, rank: usize| {
            let spec = schedule.matrices()[region.matrix];
            let (base, pitch) = if rank == operands.rank {
                let CallMatrix { ptr, pitch, .. } = operands.get(region.matrix)?;
                (ptr, pitch)
            } else {
                (operands.of_rank(region.matrix, rank)?, spec.row_bytes())
            };
            let extent = spec.extent_of(region, pitch);
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

pub fn delay(stream: &Stream, rank: usize, flag: usize, epoch: Epoch) -> Result<()> {
    chunk_delay(rank, flag, epoch).map_or(Ok(()), |time| pause(stream, time))
}

/// Makes the stream pause.
pub fn pause(stream: &Stream, time: Duration) -> Result<()> {
    unsafe extern "C" fn sleep(micros: *mut c_void) {
        std::thread::sleep(Duration::from_micros(micros as u64));
    }
    let micros = time.as_micros() as u64;
    // SAFETY: the function reads the number that the pointer is, and makes no CUDA call.
    unsafe { stream.call(sleep, micros as *mut c_void) }
}
