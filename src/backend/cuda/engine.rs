//! Walks a schedule with a GPU: a stream copies and writes flags while one kernel multiplies.

use std::ffi::c_void;
use std::mem::offset_of;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::Cuda;
use super::abi::GemmeshTurn;
use super::driver::{Event, Stream, StreamMemOp};
use super::monitor::OUTSTANDING;
use super::program::{Launch, Place, Program};
use crate::backend::chunk_delay;
use crate::backend::sealed::{Bound, Call};
use crate::error::{Error, Result};
use crate::ranks::members::Members;
use crate::schedule::drive::{self, CopyEngine};
use crate::schedule::{Awaited, Epoch, Schedule, Transfer, Transport};
use crate::schedule::{MAX_FLAGS, layout::MAX_WORLD};
use crate::trace::span::{Lane, Span, Work};

pub fn run(cuda: &Cuda, members: &Members, program: &Program, mut call: Call<Cuda>) -> Result<()> {
    let _bound = cuda.device.bind()?;
    let main = cuda.main();
    let recorded = main.is_capturing();
    let schedule = &program.schedule;
    let mut begin = || -> Result<()> {
        let at = Place {
            cuda,
            members,
            main: &main,
            recorded: recorded.clone()?,
        };
        make_room(&at, schedule)?;
        let launch = Launch::new(&at, program, &call)?;
        match launch {
            Some(launch) if schedule.is_pushed() => {
                enqueue_pushed(&at, schedule, &mut call, launch)
            }
            launch => enqueue(&at, schedule, &mut call, launch),
        }
    };
    let begun = begin();
    let begun = match recorded {
        Ok(true) => {
            cuda.recorded.store(true, Ordering::Relaxed);
            begun
        }
        // Also what was put on the streams before something failed.
        _ => {
            let joined = match &begun {
                Ok(()) => Ok(()),
                Err(_) => cuda.copies().wait_for(cuda.late_copies(), &cuda.joined),
            };
            let marked = cuda.reclaimer.mark();
            begun.and(joined).and(marked)
        }
    };
    begun.map_err(|error| {
        // If an operation has its number, and this rank does not do it, the peers wait for it in vain and must hear.
        let numbered = schedule.handshake() && !matches!(recorded, Ok(true));
        if numbered { members.fail(error) } else { error }
    })
}

/// The commands that a queue of the device holds.
pub const COMMANDS: usize = 1024;

/// The most commands that an operation puts on one stream.
pub fn commands(schedule: &Schedule) -> usize {
    2 * schedule.moves().count() + 3 * schedule.world() + 4
}

/// Waits until the device's queues have room for another operation. They are bounded, and a driver that waits for room has
/// no deadline and does not hear of a failure.
fn make_room(at: &Place, schedule: &Schedule) -> Result<()> {
    let Place { cuda, members, .. } = *at;
    let most = (COMMANDS / commands(schedule)).clamp(1, OUTSTANDING) as u32;
    let has_room = || match cuda.monitor.outstanding() < most {
        true => Ok(true),
        false => members.fault().map_or(Ok(false), Err),
    };
    cuda.poll(members, has_room)
}

/// Says to every peer that this rank's own rows are final, on the main stream; what refreshes flags does so before. As
/// [`drive::announce`].
fn announce(at: &Place, epoch: Epoch, and: Option<StreamMemOp>) -> Result<()> {
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

/// What has no kernel that waits for peers: the streams wait.
fn enqueue(
    at: &Place,
    schedule: &Schedule,
    call: &mut Call<Cuda>,
    launch: Option<Launch>,
) -> Result<()> {
    let Place {
        cuda,
        members,
        main,
        ..
    } = *at;
    let epoch = call.epoch;
    let monitor = &cuda.monitor;
    let traced = call.trace.is_some();
    let mut copies = Copies {
        cuda,
        rank: members.rank,
        epoch,
        schedule,
        matrices: call.matrices,
        words: [StreamMemOp::Write(0, 0); BATCH],
        pending: 0,
        stamps: traced.then(Vec::new),
    };
    let mut begun = None;
    if schedule.handshake() {
        monitor.begin(epoch, false);
        if traced {
            // So that the picture shows the device and not the host: everything is on the streams before any rank begins.
            pause(main, ENQUEUED)?;
            super::align(cuda, members, main)?;
        }
        let started = StreamMemOp::Write(monitor.started(), epoch.raw());
        announce(at, epoch, Some(started))?;
    }
    let moves = schedule.moves().next().is_some();
    if moves {
        // All copies are put on their stream before the kernel that waits for them; and none of them begins
        // before the kernel of the operation before, which is on the main stream, has ended.
        cuda.copies().wait_for(main, &cuda.begun)?;
        drive::transfer(schedule, schedule.moves(), epoch, &mut copies)?;
        copies.flush()?;
    }
    if let Some(launch) = &launch {
        if traced {
            let event = Event::new(&cuda.device, true)?;
            event.record(main)?;
            begun = Some(event);
        }
        launch.launch(main)?;
    }
    // Tiles that wait for all transfers end after them.
    if moves && !(schedule.handshake() && schedule.awaits_all()) {
        main.wait_for(cuda.copies(), &cuda.gathered)?;
    }
    if schedule.handshake() {
        // Own rows are free again when every peer has pulled them; then the operation is complete.
        let mut words = [StreamMemOp::Write(0, 0); MAX_WORLD + 1];
        let mut count = 0;
        for &peer in schedule.readers() {
            words[count] = StreamMemOp::Wait(cuda.control.done(members.rank, peer), epoch.raw());
            count += 1;
        }
        words[count] = StreamMemOp::Write(monitor.completed(), epoch.raw());
        // SAFETY: as above; the completed word lives as long as the backend.
        unsafe { main.words(&words[..=count])? };
    }
    if let (Some(spans), Some(launch)) = (call.trace.as_deref_mut(), launch) {
        cuda.wait_idle(members, main)?;
        launch.spans(schedule, spans)?;
        if let Some(begun) = begun {
            copies.spans(&begun, spans)?;
        }
    }
    Ok(())
}

/// An operation whose rows their owners push: the kernel tells the peers that it runs, and the copy stream when they do. It
/// counts its epochs on the device, so what is enqueued here may as well be recorded, to run again and again.
fn enqueue_pushed(
    at: &Place,
    schedule: &Schedule,
    call: &mut Call<Cuda>,
    launch: Launch,
) -> Result<()> {
    let Place {
        cuda,
        members,
        main,
        recorded,
    } = *at;
    let epoch = call.epoch;
    let (control, monitor) = (&cuda.control, &cuda.monitor);
    if !recorded {
        monitor.begin(epoch, true);
        if epoch.refreshes() {
            // Words that only pulls write, and others read: they too must not come to look like the future.
            announce(at, epoch, None)?;
        }
    }
    if call.trace.is_some() {
        pause(main, ENQUEUED)?;
        super::align(cuda, members, main)?;
    }
    let by_copies = schedule.uses(Transport::Push);
    if by_copies {
        let turn = control.turn();
        let go = turn + offset_of!(GemmeshTurn, go) as u64;
        let current = turn + offset_of!(GemmeshTurn, current) as u64;
        cuda.copies().wait_for(main, &cuda.begun)?;
        // SAFETY: control blocks are unmapped when the streams have passed; all ranks' memories hold M
        // rows. The own rows are final, for the copies wait for the main stream; and the peers' may be written, for the
        // kernel lets the copies go when every peer's kernel has begun, or when the group has failed and nobody uses what
        // they overwrite. A flag is copied after its rows: nobody reads them before.
        unsafe {
            // What the kernel waits for has deadlines. That the kernel runs has one only if the monitor knows that it should.
            let begins = StreamMemOp::Write(monitor.started(), epoch.raw());
            let gate = [begins, StreamMemOp::Wait(go, 1)];
            cuda.copies().words(&gate[usize::from(recorded)..])?;
            // Two flows at once are slower than one after the other, but for a small one: it fills the gaps between
            // the others' copies. In a graph, the second branch may begin at any time, and that is slower.
            let is_late = |push: &Transfer| push.is_late() && !recorded;
            let forks = schedule.moves().any(is_late);
            if forks {
                cuda.late_copies().wait_for(cuda.copies(), &cuda.forked)?;
            }
            for push in schedule.moves() {
                let stream = match is_late(push) {
                    true => cuda.late_copies(),
                    false => cuda.copies(),
                };
                delay(stream, members.rank, push.flag, epoch)?;
                copy_regions(stream, schedule, call.matrices, push)?;
                // Its value is on the device, so that a graph can be replayed; hence a copy, and not a word of the stream.
                // That the peer's kernel, which is polling it, sees the rows once it sees the flag, no text of CUDA's promises
                // in these words. What is promised: a copy begins when the one before it on its stream has ended, and
                // has then been written to where it goes, for whoever is told of that end in any way may read it, on the
                // peer's GPU too. The flag's copy begins then, both go to the memory of one GPU, and the reader acquires
                // the flag at system scope: so the rows are there before the flag is. The fence that streams have
                // (CU_STREAM_MEM_OP_BARRIER) would say it in words; between 4 MiB and their flag it costs 2.3 to 2.5 µs of 16
                // on two H200s, a tenth of a small product's gather. (Evidence: every verified product here, with random
                // delays and without, and never one stale row.)
                let flag = control.pushed(push.to, push.flag);
                stream.copy(flag, current, size_of::<u32>())?;
            }
            if forks {
                cuda.copies().wait_for(cuda.late_copies(), &cuda.joined)?;
            }
            // Before the kernel that sets it next, which waits for these copies.
            cuda.copies().words(&[StreamMemOp::Write(go, 0)])?;
        }
    }
    launch.launch(main)?;
    if by_copies {
        main.wait_for(cuda.copies(), &cuda.gathered)?;
    }
    if let Some(spans) = call.trace.as_deref_mut() {
        cuda.wait_idle(members, main)?;
        launch.spans(schedule, spans)?;
    }
    Ok(())
}

/// Copies the regions of a transfer from the one rank's memory to the same places of the other's.
///
/// # Safety
/// As [`Stream::copy`] for each region.
unsafe fn copy_regions(
    stream: &Stream,
    schedule: &Schedule,
    matrices: &[Bound<Cuda>],
    transfer: &Transfer,
) -> Result<()> {
    for region in &transfer.regions {
        let Some(memory) = matrices[region.matrix].symmetric() else {
            continue;
        };
        let extent = schedule.matrices()[region.matrix].extent_of(region);
        let offset = extent.offset as u64;
        let (to, from) = (
            memory.of(transfer.to) + offset,
            memory.of(transfer.from) + offset,
        );
        // SAFETY: as this function's.
        unsafe {
            match extent.contiguous() {
                Some(bytes) => stream.copy(to, from, bytes)?,
                None => stream.copy_rows(to, from, extent.pitch, extent.width, extent.rows)?,
            }
        }
    }
    Ok(())
}

/// Word operations between two copies: a chunk's flag, `done`, and the next `ready`; more for sources without rows.
const BATCH: usize = 8;
/// Longer than it takes to put an operation on the streams.
const ENQUEUED: Duration = Duration::from_millis(2);

/// The copy engine: a stream.
struct Copies<'a> {
    cuda: &'a Cuda,
    rank: usize,
    epoch: Epoch,
    schedule: &'a Schedule,
    matrices: &'a [Bound<'a, Cuda>],
    /// Word operations that are still to be put on the stream: those between two copies go there in one call.
    words: [StreamMemOp; BATCH],
    pending: usize,
    /// Before and after each pull, if somebody wants to know.
    stamps: Option<Vec<(Transfer, Event, Event)>>,
}

impl Copies<'_> {
    fn push(&mut self, operation: StreamMemOp) -> Result<()> {
        if self.pending == BATCH {
            self.flush()?;
        }
        self.words[self.pending] = operation;
        self.pending += 1;
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        if self.pending > 0 {
            // SAFETY: control blocks are unmapped when the streams have passed.
            unsafe { self.cuda.copies().words(&self.words[..self.pending])? };
            self.pending = 0;
        }
        Ok(())
    }

    /// What was pulled when, since `begun`.
    fn spans(self, begun: &Event, spans: &mut Vec<Span>) -> Result<()> {
        let nanos = |event: &Event| -> Result<u64> {
            Ok((event.micros_since(begun)?.max(0.0) * 1e3) as u64)
        };
        for (pull, before, after) in self.stamps.unwrap_or_default() {
            spans.push(Span {
                lane: Lane::Copy,
                begin: nanos(&before)?,
                end: nanos(&after)?,
                work: Work::Pull {
                    source: pull.source,
                    rows: pull.regions[0].rows.clone(),
                },
            });
        }
        Ok(())
    }
}

impl CopyEngine for Copies<'_> {
    type Error = Error;

    fn wait_ready(&mut self, source: usize, epoch: Epoch) -> Result<()> {
        let flag = self.cuda.control.ready(self.rank, source);
        self.push(StreamMemOp::Wait(flag, epoch.raw()))
    }

    fn wait_chunk(&mut self, flag: usize, epoch: Epoch, _: Awaited) -> Result<()> {
        self.push(StreamMemOp::Wait(
            self.cuda.control.chunk(flag),
            epoch.raw(),
        ))
    }

    fn copy(&mut self, pull: &Transfer) -> Result<()> {
        self.flush()?;
        delay(self.cuda.copies(), self.rank, pull.flag, self.epoch)?;
        let stamp = |engine: &Self| -> Result<Event> {
            let event = Event::new(&engine.cuda.device, true)?;
            event.record(engine.cuda.copies())?;
            Ok(event)
        };
        let before = match self.stamps {
            Some(_) => Some(stamp(self)?),
            None => None,
        };
        // SAFETY: both ranks' memories hold the matrix. The source's rows are final, for the stream has waited
        // for `ready`, and the source does not write them before `done`. Here, nobody reads the same
        // rows before this pull's flag is written, and the kernels of earlier operations have ended.
        unsafe { copy_regions(self.cuda.copies(), self.schedule, self.matrices, pull)? };
        if let Some(before) = before {
            let after = stamp(self)?;
            self.stamps
                .get_or_insert_default()
                .push((pull.clone(), before, after));
        }
        Ok(())
    }

    fn signal_chunk(&mut self, pull: &Transfer, epoch: Epoch) -> Result<()> {
        let flag = self.cuda.control.chunk(pull.flag);
        self.push(StreamMemOp::Write(flag, epoch.raw()))
    }

    fn signal_done(&mut self, source: usize, epoch: Epoch) -> Result<()> {
        let flag = self.cuda.control.done(source, self.rank);
        self.push(StreamMemOp::Write(flag, epoch.raw()))
    }
}

fn delay(stream: &Stream, rank: usize, flag: usize, epoch: Epoch) -> Result<()> {
    chunk_delay(rank, flag, epoch).map_or(Ok(()), |time| pause(stream, time))
}

/// The stream does nothing for a while.
fn pause(stream: &Stream, time: Duration) -> Result<()> {
    unsafe extern "C" fn sleep(micros: *mut c_void) {
        std::thread::sleep(Duration::from_micros(micros as u64));
    }
    let micros = time.as_micros() as u64;
    // SAFETY: the function reads the number that the pointer is, and makes no CUDA call.
    unsafe { stream.call(sleep, micros as *mut c_void) }
}
