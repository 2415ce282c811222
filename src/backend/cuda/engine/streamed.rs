//! Operations in which streams, not kernels, wait for peers.

use smallvec::SmallVec;

use super::announce::{announce, announce_in_graph, pause};
use super::callbacks::{Callers, consume, produce};
use super::context::{EnqueueContext, ProgramCall};
use super::copies::{self, Enqueued};
use super::lanes::{self, ChunkFlags};
use super::stamps::{Stamps, stamp};
use super::{ENQUEUED, align, collective, product, wait};
use crate::backend::contract::sealed::{Callback, Consumer};
use crate::backend::cuda::driver::{DevicePtr, StreamMemOp};
use crate::backend::cuda::program::GpuProgram;
use crate::backend::cuda::program::launch::ProductLaunch;
use crate::backend::cuda::shared::words::{Signals, close};
use crate::error::Result;
use crate::protocol::epoch::Epoch;
use crate::schedule::Route;

/// Enqueues a call. Its kernel, if it has one, waits for the flags of copies.
pub fn enqueue(
    at: &EnqueueContext,
    program: &GpuProgram,
    call: &mut ProgramCall,
    launch: Option<ProductLaunch>,
    callback: Option<Callback>,
) -> Result<()> {
    let EnqueueContext { gpu, main, .. } = *at;
    let traced = call.trace.is_some();
    let work = Streamed {
        at,
        program,
        signals: at.signals(call.epoch),
    };
    work.announce(call.epoch, traced)?;
    lanes::fork(at, &program.schedule)?;
    let beside = work.fork(callback.is_some(), launch.is_some())?;
    // Without a kernel, the trace begins here.
    let mut begun = None;
    if traced && launch.is_none() {
        begun = Some(stamp(&gpu.device, main)?);
    }
    let mut callers = Callers::new(gpu, traced);
    let (copies, carried, consumer) = work.copy(call, callback, beside, &mut callers)?;
    if let Some(launch) = &launch {
        if traced {
            begun = Some(stamp(&gpu.device, main)?);
        }
        product::launch(main, launch)?;
    }
    work.join(beside, launch.is_some())?;
    lanes::join(at, &program.schedule)?;
    work.complete(call)?;
    if let Some(consumer) = consumer {
        let schedule = &program.schedule;
        let consumed = consume(at, schedule, &work.signals, &copies, consumer, &mut callers);
        let joined = callers.join(main);
        consumed.and(joined)?;
    }
    work.close_graph_words()?;
    let Some((spans, begun)) = call.trace.as_deref_mut().zip(begun) else {
        return Ok(());
    };
    wait::until_idle(at.shared, at.members, main)?;
    if let Some(launch) = launch {
        launch.spans(spans)?;
    }
    copies.stamps.spans(&begun, spans)?;
    carried.spans(&begun, spans)?;
    callers.stamps.spans(&begun, spans)
}

/// The phases of a call whose streams wait.
struct Streamed<'a> {
    at: &'a EnqueueContext<'a>,
    program: &'a GpuProgram,
    signals: Signals<'a>,
}

impl<'a> Streamed<'a> {
    /// Whether ranks signal by graph words, because the operation is captured.
    fn is_in_graph(&self) -> bool {
        self.program.schedule.handshake() && self.at.recorded
    }

    /// The `done` words of the peers that move rows from or to this rank's memory.
    fn done(&self) -> impl Iterator<Item = DevicePtr> {
        let peers = self.program.schedule.movers().iter();
        peers.map(|&peer| self.signals.done(self.at.members.rank, peer))
    }

    /// Tells the peers that this rank's own rows are final.
    fn announce(&self, epoch: Epoch, traced: bool) -> Result<()> {
        let EnqueueContext {
            gpu,
            shared,
            members,
            main,
            ..
        } = *self.at;
        if self.is_in_graph() {
            return announce_in_graph(self.at, self.program);
        }
        if !self.program.schedule.handshake() {
            return Ok(());
        }
        shared.begin(epoch, &self.program.waits, &self.program.turns);
        if traced {
            // The trace must show the device, not the host, so everything is enqueued before any rank begins.
            pause(main, ENQUEUED)?;
            align::align(gpu, shared, members, main)?;
        }
        let started = StreamMemOp::Write(shared.monitor.started(), epoch.raw());
        announce(self.at, epoch, Some(started))
    }

    fn has_copies(&self) -> bool {
        self.program.schedule.moves().next().is_some()
    }

    /// Forks the copy stream from the main stream if a callback or a kernel runs while copies do. Returns true if so.
    ///
    /// Otherwise the copies go on the main stream, because streams take a while to learn of one another's progress.
    ///
    /// All copies are enqueued before the kernel that waits for them. None of them begins before the previous
    /// operation's kernel, which is on the main stream, has ended.
    fn fork(&self, has_callback: bool, has_kernel: bool) -> Result<bool> {
        let beside = has_callback || (has_kernel && self.has_copies());
        if beside {
            let streams = self.at.gpu.streams();
            streams.begun.record(self.at.main)?;
            streams.copies.wait_until(&streams.begun)?;
        }
        Ok(beside)
    }

    /// Enqueues the transfers, and lets a producer make their rows on the callers' streams. Returns the consumer, if
    /// there is one.
    fn copy<'c>(
        &self,
        call: &ProgramCall,
        callback: Option<Callback<'c>>,
        beside: bool,
        callers: &mut Callers<'a>,
    ) -> Result<(Enqueued, Stamps, Option<&'c mut Consumer<'c>>)> {
        let at = self.at;
        let consumer = match callback {
            Some(Callback::Producer(producer)) => {
                let produced = produce(at, self.program, call, &self.signals, producer, callers);
                let joined = callers.join(at.main);
                let produced = produced.and_then(|enqueued| joined.map(|()| enqueued));
                if produced.is_err() {
                    // This also joins work that was enqueued before the failure.
                    self.join(beside, false)?;
                }
                return produced.map(|(copies, carried)| (copies, carried, None));
            }
            Some(Callback::Consumer(function)) => Some(function),
            None => None,
        };
        let stream = if beside {
            &at.gpu.streams().copies
        } else {
            at.main
        };
        let schedule = &self.program.schedule;
        let copies = copies::enqueue(at, stream, schedule, call, None)?;
        let flags = ChunkFlags::Streams(self.signals);
        let carried = lanes::enqueue(at, self.program, call, flags, None)?;
        Ok((copies, carried, consumer))
    }

    /// Makes the main stream wait for the copies.
    fn join(&self, beside: bool, has_kernel: bool) -> Result<()> {
        let schedule = &self.program.schedule;
        // Tiles that wait for all transfers end after them.
        let awaited = schedule.handshake() && schedule.awaits_all() && has_kernel;
        // (What is captured must be joined.)
        if !beside || awaited || !(self.has_copies() || self.at.recorded) {
            return Ok(());
        }
        let streams = self.at.gpu.streams();
        self.at.main.wait_for(&streams.copies, &streams.gathered)
    }

    /// Adds arrivals, and completes the operation when the peers say `done`.
    ///
    /// Then this rank's own rows are free again, and the rows that peers bring have arrived.
    fn complete(&self, call: &ProgramCall) -> Result<()> {
        let (main, shared) = (self.at.main, self.at.shared);
        let schedule = &self.program.schedule;
        let waits = self.done().map(|word| self.signals.wait(word));
        let mut words: SmallVec<[StreamMemOp; 16]> = waits.collect();
        // A producer's blocks have been added already, one by one.
        if self.program.reduction().is_some() && schedule.requests().is_empty() {
            if schedule.uses(Route::Push) {
                // SAFETY: control blocks are unmapped when the streams have passed.
                unsafe { main.words(&words)? };
                words.clear();
            }
            collective::reduce(main, self.program, None, &call.operands)?;
        }
        if !schedule.handshake() {
            return Ok(());
        }
        if self.is_in_graph() {
            words.push(StreamMemOp::Write(shared.monitor.running(), 0));
            words.extend(self.done().chain([shared.control.moved()]).map(close));
        } else {
            let completed = shared.monitor.completed();
            words.push(StreamMemOp::Write(completed, call.epoch.raw()));
        }
        // SAFETY: as above; the monitor's words live as long as the backend.
        unsafe { main.words(&words) }
    }

    /// Closes the graph words of arrivals, as complete_in_graph does on the host.
    ///
    /// All streams that wait for chunks have been joined. This rank's own pulls open no graph words.
    fn close_graph_words(&self) -> Result<()> {
        if !self.is_in_graph() {
            return Ok(());
        }
        let rank = self.at.members.rank;
        let arrivals = self.program.schedule.arrivals().iter();
        let brought =
            arrivals.filter(|arrival| arrival.from != rank && arrival.route != Route::Pull);
        let chunks = brought.map(|arrival| close(self.signals.chunk(rank, arrival.flag)));
        let words: SmallVec<[StreamMemOp; 16]> = chunks.collect();
        // SAFETY: control blocks are unmapped when the streams have passed.
        unsafe { self.at.main.words(&words)? };
        let streams = self.at.gpu.streams();
        self.at
            .main
            .wait_for(&streams.deferred_copies, &streams.joined)
    }
}
