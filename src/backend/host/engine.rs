//! Runs a schedule with a rank's threads.

use std::ffi::c_void;
use std::sync::atomic::AtomicUsize;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::copies::Copier;
use super::matrices::BoundMatrices;
use super::messages::CallMessages;
use super::recorder::Recorder;
use super::scratch::WorkerScratch;
use super::tile::{add_rows, multiply_tile};
use super::workers::Role;
use super::{Host, HostProgram};
use crate::backend::contract::sealed::{Callback, Consumer, Producer, Run};
use crate::error::{Error, Result};
use crate::profile::span::{Lane, Work};
use crate::protocol::epoch::Epoch;
use crate::protocol::flag::{Flag, FlagBlock};
use crate::ranks::members::Members;
use crate::schedule::drive::{self, CopyThread, Produced};
use crate::schedule::layout::MAX_WORLD;
use crate::schedule::{Product, Reduction, Schedule, Tile, Transfer};

pub fn run(host: &Host, members: &Members, program: &HostProgram, call: Run<Host>) -> Result<()> {
    let schedule = &program.schedule;
    let Run {
        epoch,
        matrices,
        trace,
        callback,
    } = call;
    let blocks: [FlagBlock; MAX_WORLD] =
        std::array::from_fn(|rank| host.flags.of(rank.min(members.world - 1)));
    let blocks = &blocks[..members.world];
    let produced = program.produced.lock();
    let mut produced = produced.unwrap_or_else(PoisonError::into_inner);
    produced
        .iter_mut()
        .for_each(|produced| produced.begin(epoch));
    let run = HostRun {
        host,
        members,
        schedule,
        epoch,
        blocks,
        produced: &produced,
        matrices: BoundMatrices::new(members.rank, schedule.matrices(), matrices),
        recorder: Recorder::new(trace),
        next: AtomicUsize::new(0),
        failure: Mutex::new(None),
    };
    if schedule.handshake() {
        drive::announce(members.rank, epoch, blocks);
    }
    let job = |role| run.job(role);
    let beside = || run.call_back(callback);
    host.workers.run(&job, beside);
    members.refuse_fork()?;
    let failure = run.failure.into_inner();
    if let Some(error) = failure.unwrap_or_else(PoisonError::into_inner) {
        return Err(error);
    }
    drive::complete(schedule, epoch, blocks, members)
}

/// A call while the rank's threads work on it.
struct HostRun<'a> {
    host: &'a Host,
    members: &'a Members,
    schedule: &'a Schedule,
    epoch: Epoch,
    blocks: &'a [FlagBlock<'a>],
    produced: &'a [Produced],
    matrices: BoundMatrices<'a>,
    recorder: Recorder<'a>,
    /// The next tile that no worker has taken.
    next: AtomicUsize,
    /// The first failure of this rank's threads.
    failure: Mutex<Option<Error>>,
}

impl<'r> HostRun<'r> {
    /// What a thread of the pool does.
    fn job(&self, role: Role) {
        let _guard = ReportsPanic(self.members);
        self.note(match role {
            Role::Copier => self.transfer(),
            Role::Sender => self.messages().map_or(Ok(()), |messages| messages.send()),
            Role::Receiver => self
                .messages()
                .map_or(Ok(()), |messages| messages.receive()),
            Role::Worker(worker) => self.work(worker),
        });
    }

    /// What the caller's thread does meanwhile.
    fn call_back(&self, callback: Option<Callback>) {
        self.note(match callback {
            None => Ok(()),
            Some(Callback::Consumer(consumer)) => self.consume(consumer),
            Some(Callback::Producer(producer)) => self.produce(producer),
        });
    }

    fn note(&self, result: Result<()>) {
        // If a callback has forked and returns in the child, a thread that the child does not have may hold this lock.
        if let Err(error) = result
            && self.members.refuse_fork().is_ok()
        {
            let failure = self.failure.lock();
            let mut failure = failure.unwrap_or_else(PoisonError::into_inner);
            failure.get_or_insert(error);
        }
    }

    fn transfer(&self) -> Result<()> {
        let copier = Copier {
            members: self.members,
            matrices: &self.matrices,
            epoch: self.epoch,
            link: self.host.link,
            recorder: &self.recorder,
        };
        let mut engine = CopyThread {
            rank: self.members.rank,
            blocks: self.blocks,
            produced: self.produced,
            waiter: self.members,
            copy: |transfer: &Transfer| copier.copy(transfer),
        };
        drive::transfer(
            self.schedule,
            self.schedule.moves(),
            self.epoch,
            &mut engine,
        )
    }

    /// The call's messages to and from other hosts, if there is a transport.
    fn messages(&self) -> Option<CallMessages<'_, 'r>> {
        let transport = self.host.transport.as_deref()?;
        Some(CallMessages {
            members: self.members,
            transport,
            spares: &self.host.spares,
            schedule: self.schedule,
            matrices: &self.matrices,
            epoch: self.epoch,
            chunk: self.chunk_flags(),
            produced: self.produced,
            scratch: self.host.scratch.first()?,
            recorder: &self.recorder,
        })
    }

    fn work(&self, worker: usize) -> Result<()> {
        if let Some(product) = self.schedule.product() {
            self.multiply(worker, product)?;
        }
        if let Some(reduction) = self.schedule.reduction() {
            self.reduce(worker, reduction)?;
        }
        Ok(())
    }

    fn multiply(&self, worker: usize, product: &Product) -> Result<()> {
        let (schedule, recorder) = (self.schedule, &self.recorder);
        let mut scratch = self.scratch(worker);
        let lane = Lane::Worker(worker);
        let mut idle_since = recorder.begin();
        let tile = |_: usize, tile: &Tile| {
            let source = schedule.source_of_tile(tile);
            if !tile.flags().is_empty() {
                recorder.end(idle_since, lane, || Work::Wait { source });
            }
            let begin = recorder.begin();
            // SAFETY: the tile's flags have been acquired; if it has none, its rows are this rank's own, or the caller
            // has made sure of them in another way. Tiles of the output are disjoint, and taken once each.
            unsafe { multiply_tile(&mut scratch, product, tile, &self.matrices) };
            recorder.end(begin, lane, || Work::Tile {
                source: schedule.owner_of_tile(tile),
                m: tile.m,
                n: tile.n,
            });
            idle_since = recorder.begin();
        };
        let (epoch, produced) = (self.epoch, self.produced);
        let (chunk, members) = (self.chunk_flags(), self.members);
        drive::multiply(schedule, epoch, chunk, &self.next, produced, members, tile)
    }

    fn reduce(&self, worker: usize, reduction: &Reduction) -> Result<()> {
        let (schedule, epoch, produced) = (self.schedule, self.epoch, self.produced);
        let (chunk, members, recorder) = (self.chunk_flags(), self.members, &self.recorder);
        let idle_since = recorder.begin();
        drive::wait_addends(schedule, epoch, chunk, produced, members)?;
        if let Some(&source) = schedule.sources().last() {
            recorder.end(idle_since, Lane::Worker(worker), || Work::Wait { source });
        }
        let begin = recorder.begin();
        let workers = self.host.scratch.len();
        let share = |part: usize| reduction.rows * part / workers;
        let rows = share(worker)..share(worker + 1);
        let mut scratch = self.scratch(worker);
        // SAFETY: all arrivals have come, and all of this rank's blocks are made. Each worker makes rows of its own.
        unsafe { add_rows(&mut scratch, reduction, rows.clone(), &self.matrices) };
        recorder.end(begin, Lane::Worker(worker), || Work::Add { rows });
        Ok(())
    }

    fn consume(&self, consumer: &mut Consumer) -> Result<()> {
        let (members, recorder, lane) = (self.members, &self.recorder, Lane::Caller(0));
        let mut idle_since = recorder.begin();
        let consumer = |transfer: Option<&Transfer>| {
            let source = transfer.map_or(members.rank, |transfer| transfer.source);
            if transfer.is_some() {
                recorder.end(idle_since, lane, || Work::Wait { source });
            }
            let begin = recorder.begin();
            let consumed = consumer(transfer, NO_STREAM);
            members.refuse_fork()?;
            recorder.end(begin, lane, || Work::Call { rank: source });
            idle_since = recorder.begin();
            consumed
        };
        drive::consume(
            self.schedule,
            self.epoch,
            self.chunk_flags(),
            members,
            consumer,
        )
    }

    fn produce(&self, producer: &mut Producer) -> Result<()> {
        drive::produce(self.schedule, self.epoch, self.produced, |request| {
            let begin = self.recorder.begin();
            let produced = producer(request, NO_STREAM);
            self.members.refuse_fork()?;
            let rank = request.owner;
            self.recorder
                .end(begin, Lane::Caller(0), || Work::Call { rank });
            produced
        })
    }

    /// The chunk flags of this rank's arrivals.
    fn chunk_flags(&self) -> &[Flag] {
        self.blocks[self.members.rank].chunk
    }

    /// A worker's memory. A panic in a tile leaves nothing in it that the next tile reads.
    fn scratch(&self, worker: usize) -> MutexGuard<'_, WorkerScratch> {
        let scratch = self.host.scratch[worker].lock();
        scratch.unwrap_or_else(PoisonError::into_inner)
    }
}

/// The stream that callbacks get on the host.
const NO_STREAM: *mut c_void = std::ptr::null_mut();

/// Reports a panic of its thread at once, because this rank's other threads too may wait for that thread's work.
struct ReportsPanic<'a>(&'a Members);

impl Drop for ReportsPanic<'_> {
    fn drop(&mut self) {
        self.0.report_panic();
    }
}
