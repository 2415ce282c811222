//! The backend of NVIDIA GPUs: a rank is a process with one GPU, symmetric memory is mapped by CUDA IPC.
#![allow(unsafe_code)]

mod abi;
mod driver;
mod engine;
mod kernel;
mod memory;
mod monitor;
mod program;
mod tensor_map;
mod tuned;

#[cfg(fuzzing)]
pub use memory::fuzzing as offer;
#[doc(hidden)]
pub use tuned::Winner;
#[cfg(fuzzing)]
pub use tuned::fuzzing as winners;

use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use abi::{GEMMESH_MAX_WORLD, GemmeshAlignment};
use driver::{Device, Event, Memory, Stream, Urgency, WordOp};
use kernel::Kernels;
use memory::{BOX, Control, Symmetric, Yard};
use monitor::Monitor;
use program::Program;

use super::{Backend, Part, sealed};
use crate::element::Element;
use crate::error::{Error, Result};
use crate::group::{Call, Group, Members, Options};
use crate::matrix::Matrix;
use crate::protocol::{Config, Epoch, Plan, Problem, Transport};
use crate::trace::Span;

/// NVIDIA GPUs of the Hopper generation (H100, H200), a process each; several processes may share one.
///
/// Operations are put on a stream and return at once; [`Group::synchronize`] waits for them and reports what went
/// wrong. Until then their matrices must not be dropped, nor written in other ways than on that stream.
///
/// Where it was measured to be faster, rows are pushed: kernels of all ranks then run at the same time, and whatever else
/// waits for other GPUs must come in the same order on every rank. [`Transport::Pull`] needs no such order.
#[derive(Debug)]
pub struct Cuda {
    /// First: its thread uses what follows.
    monitor: Monitor,
    device: Arc<Device>,
    kernels: Kernels,
    tuned: tuned::Table,
    /// A variable of the environment that makes streams wait for one another, if there is one.
    queued_together: Option<&'static str>,
    control: Control,
    yard: Arc<Yard>,
    /// Where operations are put; the caller may replace it.
    main: Mutex<Arc<Stream>>,
    copies: Stream,
    /// For what tiles need late: it may come beside what they need first.
    late_copies: Stream,
    /// The main stream has come to an operation's copies.
    begun: Event,
    /// The copies of an operation have begun.
    forked: Event,
    /// Those that are needed late are done.
    joined: Event,
    /// The copies of a gather are done.
    gathered: Event,
    /// The main stream before has come to where another took over.
    handed_over: Event,
    /// How often the ranks' streams have been aligned.
    alignments: AtomicU32,
}

/// Memory of one matrix: rows of whole 16 bytes.
#[derive(Debug)]
pub struct Buffer {
    memory: Memory,
    /// Bytes from row to row.
    pitch: usize,
    /// Bytes of a row that are elements.
    width: usize,
}

impl Backend for Cuda {}

impl sealed::Backend for Cuda {
    const NAME: &'static str = "cuda";
    const K_MULTIPLE: usize = 8;
    type Symmetric = Symmetric;
    type Buffer = Buffer;
    type Program = Program;

    fn open(members: &Members, options: &Options) -> Result<Cuda> {
        if members.in_process {
            return Err(members.fail(Error::NeedsProcesses { rank: members.rank }));
        }
        // What fails before the first exchange is told to the others in it.
        let load = || -> Result<(Arc<Device>, Kernels, tuned::Table)> {
            let device = Device::open(members.rank, options.device)?;
            let kernels = Kernels::load(&device)?;
            let tuned = tuned::Table::load(members.rank, &device.name, members.world)?;
            Ok((device, kernels, tuned))
        };
        let loaded = load();
        let device = loaded.as_ref().map(|(device, ..)| device.clone());
        let device = device.map_err(Clone::clone);
        let yard = Arc::new(Yard::default());
        let open = || -> Result<Cuda> {
            let control = Control::open(&device, &yard, members, options.first_epoch)?;
            let (device, kernels, tuned) = loaded?;
            let own = control.own(members.rank);
            let cuda = Cuda {
                monitor: Monitor::start(&device, members, own, options.first_epoch)?,
                main: Mutex::new(Arc::new(Stream::new(&device, Urgency::Kernels)?)),
                copies: Stream::new(&device, Urgency::Copies)?,
                late_copies: Stream::new(&device, Urgency::Copies)?,
                forked: Event::new(&device, false)?,
                joined: Event::new(&device, false)?,
                begun: Event::new(&device, false)?,
                gathered: Event::new(&device, false)?,
                handed_over: Event::new(&device, false)?,
                alignments: AtomicU32::new(0),
                queued_together: queued_together(),
                tuned,
                kernels,
                control,
                yard: yard.clone(),
                device,
            };
            cuda.warm_up(members)?;
            Ok(cuda)
        };
        open().map_err(|error| {
            let error = members.fail(error);
            // The control block has gone to the yard, and peers may have mapped it.
            members.mark_closed();
            if !members.await_closed() {
                yard.abandon();
            }
            error
        })
    }

    fn close(&mut self, members: &Members) {
        // Nothing is freed under a running kernel or copy: if the device does not come to rest, not at all.
        let deadline = Instant::now() + members.timeout + Duration::from_secs(2);
        let at_rest = || {
            let main = self.main();
            let mut streams = [&self.copies, &self.late_copies, &main].into_iter();
            streams.all(|stream| stream.is_idle().unwrap_or(true))
        };
        let mut rested = at_rest();
        while !rested && Instant::now() < deadline {
            std::thread::sleep(Duration::from_micros(200));
            rested = at_rest();
        }
        self.monitor.stop();
        if rested {
            self.control.unmap();
            members.mark_closed();
        }
        // Memory that a peer still maps must not be freed either.
        if !rested || !members.await_closed() {
            self.yard.abandon();
            self.control.abandon();
        }
        if !rested {
            self.device.abandon();
        }
    }

    fn default_config(&self, problem: &Problem) -> Config {
        // Kernels that wait for one another must be able to run at the same time.
        let pushes = self.control.distinct_devices() && self.queued_together.is_none();
        let measured = self.tuned.find(problem);
        let measured = measured.filter(|m| pushes || m.config.transport == Transport::Pull);
        let multiprocessors = self.device.multiprocessors as usize;
        self.kernels
            .default_config(multiprocessors, problem, measured)
    }

    fn is_recording(&self, _members: &Members) -> Result<bool> {
        self.device.bind()?;
        self.main().is_capturing()
    }

    fn prepare(&self, members: &Members, plan: Plan) -> Result<Program> {
        if let (Transport::Push, Some(variable)) = (plan.config().transport, self.queued_together) {
            return Err(Error::QueuedTogether {
                rank: members.rank,
                variable: variable.into(),
            });
        }
        // All of a push is on its stream before the kernel that it waits for is launched.
        let commands = engine::commands(&plan);
        if plan.config().transport == Transport::Push && commands > engine::COMMANDS {
            return Err(Error::Limit {
                what: "commands of a pushed product, two a chunk".into(),
                value: commands,
                min: 1,
                max: engine::COMMANDS,
            });
        }
        // Whether there is such a kernel does not depend on the dtype.
        let dtype = crate::element::DType::Bf16;
        self.kernels
            .find(members.rank, dtype, plan.config(), false)?;
        Program::new(self, plan)
    }

    fn plan(program: &Program) -> &Plan {
        &program.plan
    }

    fn symmetric(&self, members: &Members, call: &Call, bytes: usize) -> Result<Symmetric> {
        let device = Ok(self.device.clone());
        Symmetric::allocate(&device, &self.yard, members, call, bytes, |_| Ok(()))
    }

    fn buffer(&self, _members: &Members, rows: usize, width: usize) -> Result<Buffer> {
        let pitch = width.next_multiple_of(16);
        Ok(Buffer {
            memory: Memory::zeroed(&self.device, rows * pitch)?,
            pitch,
            width,
        })
    }

    fn write_symmetric(&self, to: &mut Symmetric, offset: usize, from: &[u8]) -> Result<()> {
        to.own_memory().map_or(Ok(()), |own| {
            own.write_rows(offset, from.len(), from.len(), from)
        })
    }

    fn read_symmetric(&self, from: &mut Symmetric, offset: usize, to: &mut [u8]) -> Result<()> {
        let length = to.len();
        from.own_memory()
            .map_or(Ok(()), |own| own.read_rows(offset, length, length, to))
    }

    fn write(&self, to: &mut Buffer, from: &[u8]) -> Result<()> {
        to.memory.write_rows(0, to.pitch, to.width, from)
    }

    fn read(&self, from: &Buffer, to: &mut [u8]) -> Result<()> {
        from.memory.read_rows(0, from.pitch, from.width, to)
    }

    fn run(
        &self,
        members: &Members,
        program: &Program,
        part: Part,
        epoch: Epoch,
        operands: sealed::Operands<Cuda>,
        trace: Option<&mut Vec<Span>>,
    ) -> Result<()> {
        engine::run(self, members, program, part, epoch, operands, trace)
    }

    fn synchronize(&self, members: &Members) -> Result<()> {
        self.wait_idle(members, &self.main())
    }
}

/// Pushes wait on their stream for a kernel that is launched after them. With one of these the kernel would wait for them.
fn queued_together() -> Option<&'static str> {
    let value = |name| std::env::var(name).unwrap_or_default();
    if value("CUDA_DEVICE_MAX_CONNECTIONS") == "1" {
        Some("CUDA_DEVICE_MAX_CONNECTIONS=1")
    } else if !["", "0"].contains(&&*value("CUDA_LAUNCH_BLOCKING")) {
        Some("CUDA_LAUNCH_BLOCKING")
    } else {
        None
    }
}

impl Cuda {
    /// Does once what the copy streams do in operations, while nothing waits for them: what the driver does at first
    /// use may wait for kernels to end.
    fn warm_up(&self, members: &Members) -> Result<()> {
        let scratch = Memory::zeroed(&self.device, 2 * BOX)?;
        let (from, to) = (scratch.ptr(), scratch.ptr() + BOX as u64);
        for stream in [&self.copies, &self.late_copies] {
            // SAFETY: the scratch holds both boxes and lives until the stream is idle.
            unsafe {
                stream.fill(from, 0, BOX / 4)?;
                stream.copy(to, from, BOX)?;
                stream.copy_rows(to, from, BOX / 4, BOX / 8, 4)?;
                stream.words(&[WordOp::Write(from, 1), WordOp::Wait(from, 1)])?;
            }
            self.wait_idle(members, stream)?;
        }
        Ok(())
    }

    fn main(&self) -> Arc<Stream> {
        self.main
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Waits until everything on `stream` is done. What never ends, the monitor ends.
    fn wait_idle(&self, members: &Members, stream: &Stream) -> Result<()> {
        self.device.bind()?;
        if stream.is_capturing()? {
            return Err(Error::Capturing { rank: members.rank });
        }
        const SPINS: u32 = 1000;
        const NAP: Duration = Duration::from_micros(50);
        let mut turn = 0;
        while !stream.is_idle().map_err(|e| members.fail(e))? {
            turn += 1;
            if turn > SPINS {
                std::thread::sleep(NAP);
            }
        }
        self.monitor.look();
        members.fault().map_or(Ok(()), Err)
    }
}

impl Group<Cuda> {
    /// The stream that operations are put on: a CUstream of the device's primary context.
    pub fn stream(&self) -> *mut c_void {
        self.inner().backend.main().raw()
    }

    /// Puts later operations on `stream`, a CUstream of the device's primary context, instead of the group's own.
    /// They begin after what was put on the stream before.
    ///
    /// # Errors
    /// [`Error::Cuda`] if the driver refuses; the group's failure.
    ///
    /// # Safety
    /// The stream lives until another takes over or the group has ended.
    pub unsafe fn set_stream(&self, stream: *mut c_void) -> Result<()> {
        let cuda = &self.inner().backend;
        // SAFETY: as this function's.
        let next = unsafe { Stream::borrowed(&cuda.device, stream) };
        // Not while another thread has put a part of an operation on the stream before.
        self.exclusively(|_| {
            let mut main = cuda.main.lock().unwrap_or_else(PoisonError::into_inner);
            next.wait_for(&main, &cuda.handed_over)?;
            *main = Arc::new(next);
            Ok(())
        })
    }

    /// The name of this rank's GPU.
    pub fn device_name(&self) -> &str {
        &self.inner().backend.device.name
    }

    /// The version of CUDA that the driver supports, as major · 1000 + minor · 10.
    ///
    /// # Errors
    /// [`Error::Cuda`] if the driver refuses.
    pub fn driver_version(&self) -> Result<i32> {
        self.inner().backend.device.driver_version()
    }

    /// Writes a pattern into every peer's memory, reads every peer's, and verifies both. Collective.
    ///
    /// # Errors
    /// [`Error::PeerMemory`] names a pair that fails; the group's failure.
    pub fn check_peers(&self) -> Result<()> {
        let inner = self.inner();
        let (cuda, members) = (&inner.backend, &inner.members);
        let (rank, world) = (members.rank, members.world);
        let mut scratch = Memory::zeroed(&cuda.device, 2 * BOX)?;
        // Box p of rank r gets what r expects of p: first written by r itself, for p to read back ...
        let verify = |scratch: &Memory, from: usize, to: usize, peer: usize| -> Result<()> {
            let mut seen = vec![0u8; BOX];
            scratch.read_rows(0, BOX, BOX, &mut seen)?;
            if seen == pattern(from, to) {
                return Ok(());
            }
            Err(members.fail(Error::PeerMemory { rank, peer }))
        };
        let stream = Stream::new(&cuda.device, Urgency::Kernels)?;
        let copy = |to: u64, from: u64| -> Result<()> {
            // SAFETY: boxes and the scratch are BOX bytes long; the barriers keep writers and readers apart.
            unsafe { stream.copy(to, from, BOX)? };
            cuda.wait_idle(members, &stream)
        };
        let peers = || (0..world).filter(move |&peer| peer != rank);
        for peer in peers() {
            scratch.write_rows(0, BOX, BOX, &pattern(rank, peer))?;
            copy(cuda.control.inbox(rank, peer), scratch.ptr())?;
        }
        self.barrier()?;
        for peer in peers() {
            copy(scratch.ptr(), cuda.control.inbox(peer, rank))?;
            verify(&scratch, peer, rank, peer)?;
        }
        self.barrier()?;
        // ... then by p, for r to find.
        for peer in peers() {
            scratch.write_rows(0, BOX, BOX, &pattern(rank + world, peer))?;
            copy(cuda.control.inbox(peer, rank), scratch.ptr())?;
        }
        self.barrier()?;
        for peer in peers() {
            copy(scratch.ptr(), cuda.control.inbox(rank, peer))?;
            verify(&scratch, peer + world, rank, peer)?;
        }
        self.barrier()
    }
}

/// `config` with the tile shape of each kernel there is; for benchmarks.
#[doc(hidden)]
pub fn with_each_kernel(group: &Group<Cuda>, config: &Config) -> Vec<Config> {
    group.inner().backend.kernels.configs(config).collect()
}

/// Aligns the ranks' streams: what is put on them later begins at the same time. Collective; for benchmarks.
///
/// # Errors
/// [`Error::Cuda`] if the driver refuses.
#[doc(hidden)]
pub fn align_streams(group: &Group<Cuda>) -> Result<()> {
    let inner = group.inner();
    align(&inner.backend, &inner.members, &inner.backend.main())
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
    cuda.device.bind()?;
    // SAFETY: the argument is what abi.h says; control blocks live as long as the backend, whose end waits for its streams.
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

impl<T: Element> Matrix<Cuda, T> {
    /// A matrix in memory of the caller's, such as a tensor of candle, cust or burn: the door for other stacks.
    ///
    /// # Errors
    /// [`Error::Unaligned`] unless `ptr` and `pitch`, the bytes from row to row, are multiples of 16;
    /// [`Error::Shape`] if a row is longer than the pitch.
    ///
    /// # Safety
    /// `ptr` is memory of the group's device of at least `rows * pitch` bytes, which stays allocated until the
    /// operations that use the matrix are complete, and nobody else uses meanwhile. If `columns` is no multiple
    /// of 8, an operation whose output it is writes into a row's padding up to the next multiple: zeros, or NaN where the
    /// row of `a` is not finite.
    pub unsafe fn from_device_ptr(
        group: &Group<Cuda>,
        ptr: u64,
        rows: usize,
        columns: usize,
        pitch: usize,
    ) -> Result<Matrix<Cuda, T>> {
        let rank = group.rank();
        let width = columns * size_of::<T>();
        for (what, value) in [("device pointer", ptr as usize), ("pitch", pitch)] {
            if !value.is_multiple_of(16) {
                return Err(Error::Unaligned {
                    rank,
                    what: what.into(),
                    value,
                    multiple: 16,
                });
            }
        }
        if width > pitch {
            return Err(Error::Shape {
                rank,
                argument: "the bytes of a row".into(),
                expected: vec![pitch],
                found: vec![width],
            });
        }
        // SAFETY: as this function's.
        let memory = unsafe { Memory::borrowed(&group.inner().backend.device, ptr, rows * pitch) };
        let buffer = Buffer {
            memory,
            pitch,
            width,
        };
        Ok(Matrix::new(group.clone(), buffer, rows, columns))
    }

    /// Where the matrix lies on the device, and the bytes from row to row.
    pub fn as_device_ptr(&self) -> (u64, usize) {
        let buffer = self.memory();
        (buffer.memory.ptr(), buffer.pitch)
    }
}

impl<T: Element> crate::sharded::ShardedMatrix<Cuda, T> {
    /// Where the whole [M, K] matrix of this rank lies on the device; its rows follow one another without padding.
    pub fn as_device_ptr(&self) -> u64 {
        self.memory().own()
    }
}
