//! The backend of NVIDIA GPUs: a rank is a process with one GPU; symmetric memory is virtual memory of CUDA, which processes pass
//! on to one another as descriptors.
#![allow(unsafe_code)]

mod abi;
mod driver;
mod engine;
mod gpu;
mod model;
mod program;
mod shared;

#[doc(hidden)]
pub use model::calibrate::Sample;
#[doc(hidden)]
pub use model::tuned::Winner;
#[cfg(fuzzing)]
pub use model::tuned::fuzzing as winners;
#[cfg(fuzzing)]
pub use shared::symmetric::fuzzing as peer;

use std::any::Any;
use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use abi::{GEMMESH_MAX_WORLD, GemmeshAlignment};
use driver::{Device, Event, Memory, Region, Stream, StreamMemOp};
use gpu::kernels::{self, Instance, Kernels, Variant};
use gpu::queues::Queues;
use gpu::reclaim::{Deferred, Reclaimer};
use model::choices::Choices;
use model::rates::Rates;
use model::tuned;
use program::Program;
use program::k_slices::{self, Workspace};
use program::support::{self, Outputs};
use program::tables::Tables;
use shared::monitor::Monitor;
use shared::symmetric::{Peers, Symmetric};
use shared::words::{BOX, Control};

use super::sealed::{self, Call};
use super::{Backend, Options, Owner};
use crate::error::{Error, Result};
use crate::explanation::Prediction;
use crate::ranks::members::Members;
use crate::schedule::limits::limit;
use crate::schedule::{Config, Numerics, Problem, Route, Schedule};

/// NVIDIA GPUs of the Hopper generation (H100, H200), a process each; several processes may share one.
///
/// Operations are put on a stream and return at once; [`Group::synchronize`](crate::Group::synchronize) waits for them and reports what
/// failed. Their matrices may be dropped before: the memory is freed when the operations have ended. Calls that read or
/// write a matrix from the host wait for the operations before them. A program that uses a matrix by its address
/// ([`Matrix::as_device_ptr`](crate::Matrix::as_device_ptr)) does so on that stream, or after [`Group::synchronize`](crate::Group::synchronize).
///
/// Besides its matrices a group takes about 88 MiB of its GPU, most of it workspace for products whose K is cut into slices, and the
/// kernels' code.
///
/// # Pushed rows and other kernels
///
/// Wherever each rank has a GPU to itself, and streams share no queue, rows are pushed ([`Route::Push`], [`Route::Store`]) unless they
/// were measured to arrive faster by pulls. So are partial sums of up to eight ranks; kernels store partial sums to seven peers at most. A
/// kernel whose rows are pushed waits, on the device, for the peers' kernels of the same operation. Then these rules hold:
///
/// 1. The ranks' kernels must be able to run at the same time: on each GPU, multiprocessors for at least one cluster of the kernel (one to
///    eight neighbours) must become free without the help of a rank that waits for it.
/// 2. A kernel that holds *all* multiprocessors of a GPU and itself waits for another GPU must be ordered with the operation, in the same
///    order on every rank. A kernel of another group of this library is such a kernel. One that leaves some multiprocessors free needs no order.
/// 3. Where partial sums are pushed or stored, a rank waits for all that the peers' kernels make of its rows. There *any* kernel that holds
///    multiprocessors and waits for another GPU must be ordered with the operation.
/// 4. The device must know the order: put both on one stream, or join their streams by an event. The order in which the host makes the
///    calls does not count, because streams are independent.
///
/// An operation that breaks a rule ends at the deadline with an error. [`Route::Pull`] needs no order, except in a graph: a graph may run its
/// branches one after the other, so operations of several groups must not stand on several of them.
#[derive(Debug)]
pub struct Cuda {
    /// First: its thread uses what follows.
    monitor: Monitor,
    device: Arc<Device>,
    kernels: Kernels,
    tuned: tuned::Table,
    choices: Choices,
    /// What makes streams wait for one another, if anything does.
    queues: Queues,
    control: Control,
    tables: Arc<Tables>,
    workspace: Workspace,
    reclaimer: Arc<Reclaimer>,
    /// Whether each rank has a GPU to itself.
    distinct: bool,
    /// Whether a graph was captured: what it runs is on the main stream, behind no mark.
    recorded: AtomicBool,
    /// The main stream has come to an operation's copies.
    begun: Event,
    /// The copies of an operation have begun.
    forked: Event,
    /// Those that are needed late are done.
    joined: Event,
    /// The copies of a gather are done.
    gathered: Event,
    /// A stream of the caller's functions has made a block.
    produced: Event,
    /// Stream 0 has reached the first callback's work.
    turn: Event,
    /// A stream has done all of the callbacks' work.
    called: Event,
    /// Recorded on the old stream by `set_stream`.
    handed_over: Event,
    peers: Peers,
    /// Shared with all who want the main stream to stay what it is.
    stream_guard: Arc<()>,
    /// How often the ranks' streams have been aligned.
    alignments: AtomicU32,
}

/// Memory of one matrix: rows of whole 16 bytes.
#[derive(Debug)]
pub struct Buffer {
    storage: Storage,
    /// Bytes from row to row.
    pitch: usize,
    /// Bytes of a row that are elements.
    width: usize,
}

#[derive(Debug)]
enum Storage {
    Own(Deferred<Memory>),
    /// The caller sees to it that it stays.
    Callers(Region),
    /// What is dropped with it gives it back.
    Adopted(Region, #[allow(dead_code)] Deferred<Owner>),
}

impl Buffer {
    fn region(&self) -> &Region {
        match &self.storage {
            Storage::Own(memory) => memory.region(),
            Storage::Callers(region) | Storage::Adopted(region, _) => region,
        }
    }

    fn region_mut(&mut self) -> &mut Region {
        match &mut self.storage {
            Storage::Own(memory) => memory.region_mut(),
            Storage::Callers(region) | Storage::Adopted(region, _) => region,
        }
    }

    fn ptr(&self) -> u64 {
        self.region().ptr()
    }

    /// Where it lies, and the bytes from row to row.
    pub fn place(&self) -> (u64, usize) {
        (self.ptr(), self.pitch)
    }
}

impl Backend for Cuda {}

impl sealed::Backend for Cuda {
    const NAME: &'static str = "cuda";
    const ROW_ALIGNMENT: usize = 16;
    const BLOCK: usize = driver::BLOCK;
    type Symmetric = Symmetric;
    type Buffer = Buffer;
    type Program = Program;

    fn open(members: &Members, options: &Options) -> Result<Cuda> {
        if members.in_process {
            return Err(members.fail(Error::NeedsProcesses { rank: members.rank }));
        }
        // What fails before the first exchange is told to the others in it.
        let load = || -> Result<(Arc<Device>, Rates, Kernels, tuned::Table, Queues)> {
            let device = Device::open(members.rank, options.device, members.timeout)?;
            let rates = Rates::load(members.rank, device.name())?;
            let kernels = Kernels::load(&device)?;
            let tuned = tuned::Table::load(members.rank, device.name(), members.world)?;
            let queues = Queues::found(device.priorities()?);
            queues.check(members.rank)?;
            Ok((device, rates, kernels, tuned, queues))
        };
        let loaded = load();
        let device = loaded.as_ref().map(|(device, rates, .., queues)| {
            let pushes = queues.together.is_none();
            (device.clone(), *rates, pushes)
        });
        let device = device.map_err(Clone::clone);
        let peers = Peers::meet(members, device, options.device.is_some())?;
        let open = || -> Result<Cuda> {
            let (device, _, kernels, tuned, queues) = loaded?;
            let reclaimer = Reclaimer::new(&device)?;
            let tables = Tables::new(&device, &reclaimer)?;
            let workspace = Workspace::new(&device, &reclaimer)?;
            let first = options.first_epoch;
            let control = Control::open(&device, &reclaimer, members, &peers, first)?;
            let own = control.own(members.rank);
            let event = || Event::new(&device, false);
            let (forked, joined, begun) = (event()?, event()?, event()?);
            let (gathered, handed_over) = (event()?, event()?);
            let (produced, turn, called) = (event()?, event()?, event()?);
            let mut cuda = Cuda {
                // Nothing fails between its start and the group's end, which waits for what it has put on the device.
                monitor: Monitor::start(&device, members, own, first)?,
                forked,
                joined,
                begun,
                gathered,
                produced,
                turn,
                called,
                handed_over,
                stream_guard: Arc::new(()),
                alignments: AtomicU32::new(0),
                distinct: peers.are_distinct(),
                recorded: AtomicBool::new(false),
                peers,
                queues,
                tuned,
                choices: Choices::new(),
                kernels,
                control,
                tables,
                workspace,
                reclaimer,
                device,
            };
            match cuda.warm_up(members) {
                Ok(()) => Ok(cuda),
                Err(error) => {
                    cuda.close(members);
                    Err(error)
                }
            }
        };
        open().map_err(|error| members.fail(error))
    }

    fn close(&mut self, members: &Members) {
        // The operations end by themselves, or the monitor ends them: unless the caller's own work in front of them goes on.
        let longest = members.timeout + Duration::from_secs(2);
        if self.recorded.load(Ordering::Relaxed) && !self.main().is_capturing().unwrap_or(true) {
            // Replays stand behind no mark. If this fails, the device has.
            let _ = self.reclaimer.mark();
        }
        let at_rest = || self.reclaimer.latest().is_none_or(|mark| mark.is_passed());
        let mut progress = (self.monitor.progress(), Instant::now());
        while !at_rest() && progress.1.elapsed() < longest {
            std::thread::sleep(Duration::from_micros(200));
            let now = self.monitor.progress();
            if now != progress.0 {
                progress = (now, Instant::now());
            }
        }
        if !at_rest() {
            // Operations that have not begun yet then run through without waiting.
            self.monitor.release();
        }
        let (arrived, reports) = self.monitor.stop();
        if arrived {
            self.reclaimer.retire(reports);
        } else {
            std::mem::forget(reports);
            self.control.abandon();
        }
        self.reclaimer.drain(Duration::from_millis(200));
    }

    fn default_config(&self, problem: &Problem, numerics: Numerics) -> Config {
        // Kernels that wait for one another must be able to run at the same time.
        let pushes = self.distinct && self.peers.push;
        let (rates, measured) = (&self.peers.rates, self.tuned.find(problem));
        self.choices.of(problem, numerics, measured, |problem| {
            model::choose(rates, problem, numerics, pushes, measured)
        })
    }

    fn is_better_stored(&self, bytes: usize) -> bool {
        // Measured on two H200s.
        const MOST: usize = 16 << 20;
        // Kernels that wait for one another must be able to run at the same time.
        self.distinct && self.peers.push && bytes <= MOST
    }

    fn predict(&self, problem: &Problem, config: &Config) -> Vec<Prediction> {
        model::predict(&self.peers.rates, problem, config)
    }

    fn is_recording(&self, _members: &Members) -> Result<bool> {
        self.main().is_capturing()
    }

    fn prepare(&self, members: &Members, schedule: Schedule) -> Result<Program> {
        // Without a product no kernel waits for what is pushed.
        let pushes = schedule.is_pushed() && schedule.uses(Route::Push);
        let outputs = support::check(&schedule)?;
        if pushes && let Some(cause) = &self.queues.together {
            return Err(Error::QueuedTogether {
                rank: members.rank,
                what: "Route::Push".into(),
                cause: cause.clone(),
            });
        }
        // All of a push is on its stream before the kernel that it waits for is launched.
        if pushes {
            let what = "commands of a pushed product, two a chunk";
            limit(what, support::commands(&schedule), 1, support::COMMANDS)?;
        }
        let mut slices = Vec::new();
        if let Some(product) = schedule.product().filter(|_| !schedule.is_idle()) {
            let adds_partials = matches!(outputs, Outputs::Places(_));
            let tile = &product.config.tile;
            if adds_partials {
                let what = "Config::tile.k_slices of partial sums that are sent,";
                limit(what, tile.k_slices, 1, 1)?;
                let what = "Config::tile.stream_k of partial sums that are sent,";
                limit(what, tile.stream_k.into(), 0, 0)?;
            }
            let dtype = schedule.matrices()[product.a].dtype;
            let variant = Variant {
                sums: adds_partials,
            };
            let config = &product.config;
            self.kernels.check_product(members.rank, product, variant)?;
            let instance = self.kernels.find(members.rank, dtype, config, variant)?;
            let tiles = schedule.tiles().len();
            slices = k_slices::cut(config, tiles, product.k, self.clusters(instance))?;
        }
        Program::new(self, schedule, outputs, slices)
    }

    fn schedule(program: &Program) -> &Schedule {
        &program.schedule
    }

    fn symmetric(&self, members: &Members, call: &str, bytes: usize) -> Result<Symmetric> {
        let (device, reclaimer) = (&self.device, &self.reclaimer);
        Symmetric::allocate(device, reclaimer, members, &self.peers, call, bytes, |_| {
            Ok(())
        })
    }

    fn buffer(&self, members: &Members, rows: usize, width: usize) -> Result<Buffer> {
        let pitch = width.next_multiple_of(16);
        let memory = self.own_memory(members, rows.saturating_mul(pitch))?;
        Ok(Buffer {
            storage: Storage::Own(Deferred::new(memory, &self.reclaimer)),
            pitch,
            width,
        })
    }

    fn write_symmetric(&self, to: &mut Symmetric, offset: usize, from: &[u8]) -> Result<()> {
        let length = from.len();
        to.own_region_mut().write_rows(offset, length, length, from)
    }

    fn read_symmetric(&self, from: &mut Symmetric, offset: usize, to: &mut [u8]) -> Result<()> {
        let length = to.len();
        from.own_region().read_rows(offset, length, length, to)
    }

    unsafe fn adopt(
        &self,
        ptr: u64,
        [rows, width]: [usize; 2],
        pitch: usize,
        owner: Owner,
    ) -> Buffer {
        // SAFETY: as this function's.
        let buffer = unsafe { self.view(ptr, rows, width, pitch) };
        Buffer {
            storage: match buffer.storage {
                Storage::Callers(region) => {
                    Storage::Adopted(region, Deferred::new(owner, &self.reclaimer))
                }
                other => other,
            },
            ..buffer
        }
    }

    fn place(of: &Buffer) -> (u64, usize) {
        of.place()
    }

    fn dlpack_device(&self) -> (i32, i32) {
        const CUDA: i32 = 2;
        (CUDA, self.device.ordinal() as i32)
    }

    fn write(&self, to: &mut Buffer, from: &[u8]) -> Result<()> {
        let (pitch, width) = (to.pitch, to.width);
        to.region_mut().write_rows(0, pitch, width, from)
    }

    fn read(&self, from: &Buffer, to: &mut [u8]) -> Result<()> {
        from.region().read_rows(0, from.pitch, from.width, to)
    }

    fn run(&self, members: &Members, program: &Program, call: Call<Cuda>) -> Result<()> {
        engine::run(self, members, program, call)
    }

    fn synchronize(&self, members: &Members) -> Result<()> {
        if self.main().is_capturing()? {
            return Err(Error::Capturing { rank: members.rank });
        }
        if self.recorded.load(Ordering::Relaxed) {
            self.reclaimer.mark()?;
        }
        self.wait_for_operations(members)
    }
}

impl Cuda {
    /// Clusters of a kernel that run at the same time.
    fn clusters(&self, instance: &Instance) -> usize {
        match self.distinct {
            true => instance.resident,
            // A copy between ranks that share a GPU may be a kernel of the driver's, and needs some room.
            false => (instance.resident * 3 / 4).max(1),
        }
    }

    /// Does once what the streams do in operations, while nothing waits for them: what the driver does at first
    /// use may wait for kernels to end.
    fn warm_up(&self, members: &Members) -> Result<()> {
        let _bound = self.device.bind()?;
        // Not memory of the pool, whose words no stream can wait for.
        let [from, to] = [0, 1].map(|by| self.control.inbox(members.rank, by));
        let Reclaimer {
            copies,
            deferred_copies,
            ..
        } = &*self.reclaimer;
        for stream in [copies, deferred_copies] {
            // SAFETY: two boxes of the control block, which no rank uses before all have met again.
            unsafe {
                stream.fill(from, 0, BOX / 4)?;
                stream.copy(to, from, BOX)?;
                stream.copy_rows((to, BOX / 4), (from, BOX / 4), BOX / 8, 4)?;
                stream.words(&[StreamMemOp::Write(from, 1), StreamMemOp::Wait(from, 1)])?;
            }
            self.wait_idle(members, stream)?;
        }
        drop(self.tables.hold([&[0]])?);
        self.wait_idle(members, &self.main())
    }

    pub(crate) fn main(&self) -> Arc<Stream> {
        self.reclaimer.main()
    }

    fn copies(&self) -> &Stream {
        &self.reclaimer.copies
    }

    /// For functions of the caller's, by turns.
    fn callers(&self) -> &[Stream; 2] {
        &self.reclaimer.callers
    }

    fn deferred_copies(&self) -> &Stream {
        &self.reclaimer.deferred_copies
    }

    /// Memory that is used on this group's streams, and is not freed while they may use it.
    fn scratch(&self, bytes: usize) -> Result<Deferred<Memory>> {
        let memory = Memory::zeroed(&self.device, bytes)?;
        Ok(Deferred::new(memory, &self.reclaimer))
    }

    /// Memory of a matrix of this rank's own. If there is no room, what was dropped is freed first: by this rank when its
    /// operations have ended, by others perhaps a moment later.
    fn own_memory(&self, members: &Members, bytes: usize) -> Result<Memory> {
        const MOMENT: Duration = Duration::from_millis(250);
        const NAP: Duration = Duration::from_millis(5);
        self.reclaimer.settle();
        let mut memory = Memory::zeroed(&self.device, bytes);
        let is_refused = matches!(memory, Err(Error::OutOfMemory { .. }));
        if is_refused && bytes <= self.device.bytes() {
            self.reclaimer.drain(members.timeout);
            let begin = Instant::now();
            while matches!(memory, Err(Error::OutOfMemory { .. })) && begin.elapsed() < MOMENT {
                std::thread::sleep(NAP);
                memory = Memory::zeroed(&self.device, bytes);
            }
        }
        memory
    }

    /// Waits until what was put on the main stream by this library is done. What never ends, the monitor ends; what the
    /// caller has put in front of it is not waited for longer than the timeout while nothing else moves.
    fn wait_for_operations(&self, members: &Members) -> Result<()> {
        let Some(mark) = self.reclaimer.latest() else {
            return self.report(members);
        };
        self.poll(members, || mark.main_is_passed())?;
        self.report(members)
    }

    /// Waits until everything on a stream of this library's own is done.
    fn wait_idle(&self, members: &Members, stream: &Stream) -> Result<()> {
        self.poll(members, || stream.is_idle())?;
        self.report(members)
    }

    fn report(&self, members: &Members) -> Result<()> {
        self.monitor.look();
        members.fault().map_or(Ok(()), Err)
    }

    fn poll(&self, members: &Members, is_done: impl Fn() -> Result<bool>) -> Result<()> {
        const SPINS: u32 = 1000;
        const NAP: Duration = Duration::from_micros(50);
        /// More than the monitor waits.
        const GRACE: Duration = Duration::from_secs(2);
        let mut progress = (self.monitor.progress(), Instant::now());
        let mut turn = 0;
        while !is_done().map_err(|e| members.fail(e))? {
            turn += 1;
            if turn > SPINS {
                std::thread::sleep(NAP);
            }
            let now = self.monitor.progress();
            if now != progress.0 {
                progress = (now, Instant::now());
            }
            let waited = progress.1.elapsed();
            if waited > members.timeout + GRACE {
                // The group goes on: this rank may ask again.
                return Err(Error::Timeout {
                    rank: members.rank,
                    waiting: members.rank,
                    what: "the work that its own program has put on the stream before".into(),
                    waited_ms: waited.as_millis() as u64,
                });
            }
        }
        Ok(())
    }
}

impl Cuda {
    /// The stream that operations are put on.
    pub fn stream(&self) -> *mut c_void {
        self.main().raw()
    }

    /// Puts later operations on `stream`. Not while another thread has put a part of an operation on the stream before.
    ///
    /// # Safety
    /// It is a stream of the device's primary context, and lives until another takes over or the group has ended.
    pub unsafe fn set_stream(&self, stream: Stream) -> Result<()> {
        let mut main = self.reclaimer.lock_main();
        stream.wait_for(&main, &self.handed_over)?;
        *main = Arc::new(stream);
        Ok(())
    }

    /// As long as it is held, no other stream should take over from the main stream.
    pub fn guard_stream(&self) -> Arc<()> {
        self.stream_guard.clone()
    }

    /// How many hold that.
    pub fn stream_guards(&self) -> usize {
        Arc::strong_count(&self.stream_guard) - 1
    }

    /// A stream of the caller's, if operations can be put on it.
    ///
    /// # Safety
    /// As [`Cuda::set_stream`].
    pub unsafe fn borrow_stream(
        &self,
        rank: usize,
        stream: *mut c_void,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<Stream> {
        // SAFETY: as this function's.
        let stream = unsafe { Stream::borrowed(&self.device, stream, owner) };
        self.queues.check_main(rank, stream.priority()?)?;
        Ok(stream)
    }

    /// The GPU.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Memory of the caller's as a matrix.
    ///
    /// # Safety
    /// `ptr` is memory of the device of at least `(rows - 1) * pitch + width` bytes, while the buffer is used; of no rows it may be 0.
    pub unsafe fn view(&self, ptr: u64, rows: usize, width: usize, pitch: usize) -> Buffer {
        let bytes = match rows {
            0 => 0,
            _ => (rows - 1).saturating_mul(pitch).saturating_add(width),
        };
        // SAFETY: as this function's.
        let region = unsafe { Region::new(&self.device, ptr, bytes) };
        Buffer {
            storage: Storage::Callers(region),
            pitch,
            width,
        }
    }

    /// Whether each rank has a GPU to itself.
    pub fn is_distinct(&self) -> bool {
        self.distinct
    }

    /// `config` with the tile shape of each kernel there is; or of those that add partials.
    pub fn configs(config: &Config, sums: bool) -> impl Iterator<Item = Config> {
        kernels::configs(*config, sums, &Default::default())
    }

    /// The rates by which the model comes closest to the samples, as a file that `GEMMESH_RATES` may name, and by how much it is off
    /// in the median.
    pub fn calibrate(&self, rank: usize, samples: &[Sample]) -> Result<(String, f64)> {
        let begin = Rates {
            multiprocessors: self.device.multiprocessors(),
            ..Rates::of(self.device.name())
        };
        let rates = model::calibrate::fit(&begin, samples);
        let error = model::calibrate::median_error(&rates, samples);
        let text = serde_json::to_string_pretty(&rates);
        let text = text.map_err(|e| Error::System {
            rank: Some(rank),
            action: "write rates as JSON".into(),
            reason: e.to_string(),
        })?;
        Ok((text + "\n", error))
    }

    /// What is put on the ranks' streams later begins at the same time. Collective.
    pub fn align_streams(&self, members: &Members) -> Result<()> {
        if self.main().is_capturing()? {
            return Err(Error::Capturing { rank: members.rank });
        }
        align(self, members, &self.main())?;
        self.reclaimer.mark()
    }

    /// Writes a pattern into every peer's memory, reads every peer's, and verifies both. Collective.
    ///
    /// # Errors
    /// [`Error::PeerMemory`] names a pair that fails; the group's failure.
    pub fn check_peers(&self, members: &Members) -> Result<()> {
        let (rank, world) = (members.rank, members.world);
        let _bound = self.device.bind()?;
        let mut scratch = self.scratch(2 * BOX)?;
        // Box p of rank r gets what r expects of p: first written by r itself, for p to read back ...
        let verify = |scratch: &Region, from: usize, to: usize, peer: usize| -> Result<()> {
            let mut seen = vec![0u8; BOX];
            scratch.read_rows(0, BOX, BOX, &mut seen)?;
            if seen == pattern(from, to) {
                return Ok(());
            }
            Err(members.fail(Error::PeerMemory { rank, peer }))
        };
        let stream = self.main();
        if stream.is_capturing()? {
            return Err(Error::Capturing { rank });
        }
        let copy = |to: u64, from: u64| -> Result<()> {
            // SAFETY: boxes and the scratch are BOX bytes long; the barriers keep writers and readers apart.
            unsafe { stream.copy(to, from, BOX)? };
            self.wait_idle(members, &stream)
        };
        let peers = || (0..world).filter(move |&peer| peer != rank);
        for peer in peers() {
            scratch
                .region_mut()
                .write_rows(0, BOX, BOX, &pattern(rank, peer))?;
            copy(self.control.inbox(rank, peer), scratch.ptr())?;
        }
        members.barrier()?;
        for peer in peers() {
            copy(scratch.ptr(), self.control.inbox(peer, rank))?;
            verify(scratch.region(), peer, rank, peer)?;
        }
        members.barrier()?;
        // ... then by p, for r to find.
        for peer in peers() {
            scratch
                .region_mut()
                .write_rows(0, BOX, BOX, &pattern(rank + world, peer))?;
            copy(self.control.inbox(peer, rank), scratch.ptr())?;
        }
        members.barrier()?;
        for peer in peers() {
            copy(scratch.ptr(), self.control.inbox(rank, peer))?;
            verify(scratch.region(), peer + world, rank, peer)?;
        }
        members.barrier()
    }
}

fn align(cuda: &Cuda, members: &Members, stream: &Stream) -> Result<()> {
    let control = &cuda.control;
    let mut words = [std::ptr::null_mut(); GEMMESH_MAX_WORLD as usize];
    for (rank, words) in words.iter_mut().enumerate().take(members.world) {
        *words = control.aligned(rank) as *mut u32;
    }
    let mut alignment = GemmeshAlignment {
        words,
        abort: control.abort() as *const u32,
        deadline_ns: members.timeout.as_nanos().min(u64::MAX.into()) as u64,
        count: cuda.alignments.fetch_add(1, Ordering::Relaxed) + 1,
        rank: members.rank as u32,
        world: members.world as u32,
        reserved: 0,
    };
    let mut arguments = [(&raw mut alignment).cast()];
    let _bound = cuda.device.bind()?;
    // SAFETY: the argument is what abi.h says; control blocks are unmapped when the streams have passed.
    unsafe {
        let align = cuda.kernels.align;
        align.launch(stream, 1, GEMMESH_MAX_WORLD, 0, &mut arguments)
    }
}

/// Bytes that depend on who wrote them for whom.
fn pattern(from: usize, to: usize) -> Vec<u8> {
    let seed = (from as u64) << 32 | to as u64;
    (0..BOX as u64 / 8)
        .flat_map(|i| super::scatter(seed ^ i << 8).to_le_bytes())
        .collect()
}
