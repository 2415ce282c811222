//! Walks a plan with a GPU: a stream copies and writes flags while one kernel multiplies.

use std::ffi::c_void;
use std::mem::offset_of;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::Cuda;
use super::abi::GemmeshTurn;
use super::driver::{DevicePtr, Event, Stream, WordOp};
use super::memory::Symmetric;
use super::monitor::OUTSTANDING;
use super::program::{Launch, Program};
use crate::backend::{Part, chunk_delay, sealed};
use crate::error::{Error, Result};
use crate::protocol::drive::{self, CopyEngine};
use crate::protocol::plan::{MAX_FLAGS, MAX_WORLD};
use crate::protocol::{Epoch, Plan, Pull, Push, Transport};
use crate::ranks::members::Members;
use crate::trace::span::{Lane, Span, Work};

pub fn run(
    cuda: &Cuda,
    members: &Members,
    program: &Program,
    part: Part,
    epoch: Epoch,
    operands: sealed::Operands<Cuda>,
    trace: Option<&mut Vec<Span>>,
) -> Result<()> {
    let _bound = cuda.device.bind()?;
    let main = cuda.main();
    let recorded = main.is_capturing();
    let begin = || -> Result<()> {
        let recorded = recorded.clone()?;
        bound(cuda, members, &program.plan)?;
        let launch = if part.multiplies() {
            let traced = trace.is_some();
            Some(Launch::new(
                cuda, members, program, part, epoch, recorded, &operands, traced,
            )?)
        } else {
            None
        };
        if part == Part::Copies {
            return copy_all(cuda, &program.plan, &operands, &main);
        }
        if part.pushes(&program.plan, epoch) {
            let Some(launch) = launch else { return Ok(()) };
            return enqueue_pushed(
                cuda, members, program, epoch, recorded, &operands, &main, launch, trace,
            );
        }
        enqueue(
            cuda,
            members,
            &program.plan,
            part,
            epoch,
            &operands,
            &main,
            launch,
            trace,
        )
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
        let numbered = part.gathers() && !matches!(recorded, Ok(true));
        if numbered { members.fail(error) } else { error }
    })
}

/// The commands that a queue of the device holds.
pub const COMMANDS: usize = 1024;

/// The most commands that an operation puts on one stream.
pub fn commands(plan: &Plan) -> usize {
    2 * plan.pulls().len().max(plan.pushes().len()) + 3 * plan.problem().world() + 4
}

/// Waits until the device's queues have room for another operation. They are bounded, and a driver that waits for room has
/// no deadline and does not hear of a failure.
fn bound(cuda: &Cuda, members: &Members, plan: &Plan) -> Result<()> {
    let most = (COMMANDS / commands(plan)).clamp(1, OUTSTANDING) as u32;
    let has_room = || match cuda.monitor.outstanding() < most {
        true => Ok(true),
        false => members.fault().map_or(Ok(false), Err),
    };
    cuda.poll(members, has_room)
}

#[allow(clippy::too_many_arguments)]
fn enqueue(
    cuda: &Cuda,
    members: &Members,
    plan: &Plan,
    part: Part,
    epoch: Epoch,
    operands: &sealed::Operands<Cuda>,
    main: &Stream,
    launch: Option<Launch>,
    trace: Option<&mut Vec<Span>>,
) -> Result<()> {
    let (rank, world) = (members.rank, members.world);
    let control = &cuda.control;
    let monitor = &cuda.monitor;
    let peers = || (0..world).filter(move |&peer| peer != rank);
    let mut words = [WordOp::Write(0, 0); 2 * MAX_WORLD];
    let mut copies = Copies {
        cuda,
        main,
        rank,
        epoch,
        a: operands.a,
        plan,
        words: [WordOp::Write(0, 0); BATCH],
        pending: 0,
        stamps: trace.is_some().then(Vec::new),
    };
    let mut begun = None;
    if part.gathers() {
        monitor.begin(epoch, false);
        // Own rows final: tell the peers.
        let mut count = 1;
        words[0] = WordOp::Write(monitor.started(), epoch.raw());
        for peer in peers() {
            words[count] = WordOp::Write(control.ready(peer, rank), epoch.raw());
            count += 1;
        }
        if trace.is_some() {
            // So that the picture shows the device and not the host: everything is on the streams before any rank begins.
            pause(main, ENQUEUED)?;
            super::align(cuda, members, main)?;
        }
        // SAFETY: control blocks are unmapped when the streams have passed.
        unsafe { main.words(&words[..count])? };
        // All copies are put on their stream before the kernel that waits for them; and none of them begins
        // before the kernel of the operation before, which is on the main stream, has ended.
        cuda.copies().wait_for(main, &cuda.begun)?;
        drive::gather(plan, epoch, &mut copies)?;
        copies.flush()?;
    }
    if let Some(launch) = &launch {
        if trace.is_some() {
            let event = Event::new(&cuda.device, true)?;
            event.record(main)?;
            begun = Some(event);
        }
        launch.launch(main)?;
    }
    // The tiles of a fused operation have waited for every copy.
    if part.gathers() && part != Part::Fused {
        main.wait_for(cuda.copies(), &cuda.gathered)?;
    }
    if part.gathers() {
        // Own rows are free again when every peer has pulled them; then the operation is complete.
        let mut count = 0;
        for peer in peers() {
            words[count] = WordOp::Wait(control.done(rank, peer), epoch.raw());
            count += 1;
        }
        words[count] = WordOp::Write(monitor.completed(), epoch.raw());
        // SAFETY: as above; the completed word lives as long as the backend.
        unsafe { main.words(&words[..=count])? };
    }
    if let (Some(spans), Some(launch)) = (trace, launch) {
        cuda.wait_idle(members, main)?;
        launch.spans(plan, spans)?;
        if let Some(begun) = begun {
            copies.spans(&begun, spans)?;
        }
    }
    Ok(())
}

/// An operation whose rows their owners push: the kernel tells the peers that it runs, and the copy stream when they do. It
/// counts its epochs on the device, so what is enqueued here may as well be recorded, to run again and again.
#[allow(clippy::too_many_arguments)]
fn enqueue_pushed(
    cuda: &Cuda,
    members: &Members,
    program: &Program,
    epoch: Epoch,
    recorded: bool,
    operands: &sealed::Operands<Cuda>,
    main: &Stream,
    launch: Launch,
    trace: Option<&mut Vec<Span>>,
) -> Result<()> {
    let (plan, control, monitor) = (&program.plan, &cuda.control, &cuda.monitor);
    if !recorded {
        monitor.begin(epoch, true);
    }
    if trace.is_some() {
        pause(main, ENQUEUED)?;
        super::align(cuda, members, main)?;
    }
    let by_copies = plan.config().transport == Transport::Push;
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
            let begins = WordOp::Write(monitor.started(), epoch.raw());
            let gate = [begins, WordOp::Wait(go, 1)];
            cuda.copies().words(&gate[usize::from(recorded)..])?;
            // Two flows at once are slower than one after the other, but for a small one: it fills the gaps between
            // the others' copies. In a graph, the second branch may begin at any time, and that is slower.
            let is_late = |push: &Push| push.columns.start > 0 && !recorded;
            let forks = plan.pushes().iter().any(is_late);
            if forks {
                cuda.late_copies().wait_for(cuda.copies(), &cuda.forked)?;
            }
            for push in plan.pushes() {
                let stream = match is_late(push) {
                    true => cuda.late_copies(),
                    false => cuda.copies(),
                };
                delay(stream, members.rank, push.flag, epoch)?;
                let (to, from) = (operands.a.of(push.peer), operands.a.own());
                copy_part(stream, plan, to, from, &push.rows, &push.columns)?;
                // Its value is on the device, so that a graph can be replayed; hence a copy, and not a word of the stream.
                // That the peer's kernel, which is polling it, sees the rows once it sees the flag, no text of CUDA's promises
                // in these words. What is promised: a copy begins when the one before it on its stream has ended, and
                // has then been written to where it goes, for whoever is told of that end in any way may read it, on the
                // peer's GPU too. The flag's copy begins then, both go to the memory of one GPU, and the reader acquires
                // the flag at system scope: so the rows are there before the flag is. The fence that streams have
                // (CU_STREAM_MEM_OP_BARRIER) would say it in words; between 4 MiB and their flag it costs 2.3 to 2.5 µs of 16
                // on two H200s, a tenth of a small product's gather. (Evidence: every verified product here, with random
                // delays and without, and never one stale row.)
                let flag = control.pushed(push.peer, push.flag);
                stream.copy(flag, current, size_of::<u32>())?;
            }
            if forks {
                cuda.copies().wait_for(cuda.late_copies(), &cuda.joined)?;
            }
            // Before the kernel that sets it next, which waits for these copies.
            cuda.copies().words(&[WordOp::Write(go, 0)])?;
        }
    }
    launch.launch(main)?;
    if by_copies {
        main.wait_for(cuda.copies(), &cuda.gathered)?;
    }
    if let Some(spans) = trace {
        cuda.wait_idle(members, main)?;
        launch.spans(plan, spans)?;
    }
    Ok(())
}

/// Copies a part of the gathered matrix to the same place of another rank's.
///
/// # Safety
/// Both memories hold M rows; as [`Stream::copy`] for the part.
unsafe fn copy_part(
    stream: &Stream,
    plan: &Plan,
    to: DevicePtr,
    from: DevicePtr,
    rows: &Range<usize>,
    columns: &Range<usize>,
) -> Result<()> {
    let pitch = plan.problem().k() * size_of::<u16>();
    let offset = (rows.start * pitch + columns.start * size_of::<u16>()) as u64;
    let (to, from) = (to + offset, from + offset);
    let width = columns.len() * size_of::<u16>();
    // SAFETY: as this function's.
    unsafe {
        if width == pitch {
            stream.copy(to, from, rows.len() * pitch)
        } else {
            stream.copy_rows(to, from, pitch, width, rows.len())
        }
    }
}

/// Copies every other rank's rows, in ring order, and nothing else.
fn copy_all(
    cuda: &Cuda,
    plan: &Plan,
    operands: &sealed::Operands<Cuda>,
    main: &Stream,
) -> Result<()> {
    let (problem, a) = (plan.problem(), operands.a);
    let row_bytes = problem.k() * size_of::<u16>();
    cuda.copies().wait_for(main, &cuda.begun)?;
    for source in plan.sources() {
        let rows = problem.rows_of(source);
        if rows.is_empty() {
            continue;
        }
        let offset = (rows.start * row_bytes) as u64;
        // SAFETY: both ranks' memories hold M rows; the caller has made sure that nobody writes the source's.
        unsafe {
            cuda.copies().copy(
                a.own() + offset,
                a.of(source) + offset,
                rows.len() * row_bytes,
            )?;
        }
    }
    main.wait_for(cuda.copies(), &cuda.gathered)
}

/// Word operations between two copies: a chunk's flag, `done`, and the next `ready`; more for sources without rows.
const BATCH: usize = 8;
/// Longer than it takes to put an operation on the streams.
const ENQUEUED: Duration = Duration::from_millis(2);

/// The copy engine: a stream.
struct Copies<'a> {
    cuda: &'a Cuda,
    /// Where the operation is put.
    main: &'a Stream,
    rank: usize,
    epoch: Epoch,
    a: &'a Symmetric,
    plan: &'a Plan,
    /// Word operations that are still to be put on the stream: those between two copies go there in one call.
    words: [WordOp; BATCH],
    pending: usize,
    /// Before and after each pull, if somebody wants to know.
    stamps: Option<Vec<(Pull, Event, Event)>>,
}

impl Copies<'_> {
    fn push(&mut self, operation: WordOp) -> Result<()> {
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
                    rows: pull.rows,
                },
            });
        }
        Ok(())
    }
}

impl CopyEngine for Copies<'_> {
    type Error = Error;

    fn refresh(&mut self, epoch: Epoch) -> Result<()> {
        let first = self.cuda.control.chunk(0);
        self.flush()?;
        // Ahead of the operation's kernel: a fill may run as one, and find no room beside a kernel that waits for it.
        // SAFETY: the chunk flags are as many words. The copy stream, which else writes them, has ended what came before,
        // for the main stream has waited for it, and goes on after this.
        unsafe { self.main.fill(first, epoch.raw(), MAX_FLAGS)? };
        self.cuda.copies().wait_for(self.main, &self.cuda.begun)
    }

    fn wait_ready(&mut self, source: usize, epoch: Epoch) -> Result<()> {
        let flag = self.cuda.control.ready(self.rank, source);
        self.push(WordOp::Wait(flag, epoch.raw()))
    }

    fn copy(&mut self, pull: &Pull) -> Result<()> {
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
        let (to, from) = (self.a.own(), self.a.of(pull.source));
        // SAFETY: both ranks' memories hold M rows. The source's rows are final, for the stream has waited
        // for `ready`, and the source does not write them before `done`. Here, nobody reads the same
        // rows before this pull's flag is written, and the kernels of earlier operations have ended.
        unsafe {
            copy_part(
                self.cuda.copies(),
                self.plan,
                to,
                from,
                &pull.rows,
                &pull.columns,
            )?;
        }
        if let Some(before) = before {
            let after = stamp(self)?;
            self.stamps
                .get_or_insert_default()
                .push((pull.clone(), before, after));
        }
        Ok(())
    }

    fn signal_chunk(&mut self, flag: usize, epoch: Epoch) -> Result<()> {
        self.push(WordOp::Write(self.cuda.control.chunk(flag), epoch.raw()))
    }

    fn signal_done(&mut self, source: usize, epoch: Epoch) -> Result<()> {
        let flag = self.cuda.control.done(source, self.rank);
        self.push(WordOp::Write(flag, epoch.raw()))
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
