//! The backend of NVIDIA GPUs.
//!
//! A rank is a process with one GPU. Symmetric memory is CUDA virtual memory, which processes share as file
//! descriptors.
#![allow(unsafe_code)]

mod abi;
pub mod driver;
mod engine;
mod family;
mod gpu;
mod model;
mod program;
mod shared;

pub use family::Variant;
pub use model::tuned::Winner;
#[cfg(fuzzing)]
pub use model::tuned::fuzzing as winners;
#[cfg(fuzzing)]
pub use shared::symmetric::fuzzing as peer;

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};

use engine::context::{EnqueueContext, ProgramCall};
use engine::{align, check_peers, wait, warm_up};
use family::rates::Rates;
use family::{FAMILIES, Family};
use gpu::Gpu;
use gpu::buffer::DeviceBuffer;
use gpu::kernels;
use model::choices::Choices;
use model::tuned;
use program::operands::{CallMatrix, Operands};
use program::{GpuProgram, Selected};
use shared::Shared;
use shared::lanes::{self, Lanes};
use shared::symmetric::{Peers, Symmetric};

use crate::backend::contract::sealed::{self, Bound, Run};
use crate::backend::contract::{Backend, OpenOptions, Owner};
use crate::element::DType;
use crate::error::{Error, Kind, MadeCall, Result};
use crate::explanation::Prediction;
use crate::protocol::epoch::Epoch;
use crate::ranks::members::Members;
use crate::schedule::{Config, Numerics, Problem, Schedule};

#[cfg(feature = "unstable-tools")]
pub mod tools {
    pub use super::MOST_STORED;
    pub use super::family::rates::{Link, Rates};
    pub use super::family::{H100, H200};
    pub use super::model::fitted::sums as sum_rates;
    pub use super::model::gather::gathered;
    pub use super::model::sums::{Stores, time as time_of_sum};
    pub use super::model::tiles::Tiles;
    pub use super::model::{choose, over_hosts, pushed_over_hosts};
    pub use crate::backend::transport::NcclLibrary;

    /// Whether there are kernels for a GPU with this name and compute capability.
    pub fn has_kernels(gpu: &str, capability: (i32, i32)) -> bool {
        super::family::of_gpu(gpu, capability).is_ok()
    }
}

/// The most bytes of a rank in a collective whose rows kernels store. Measured on two H200s.
pub const MOST_STORED: usize = 16 << 20;

/// NVIDIA GPUs (H100, H200). A rank is a process with one GPU; several ranks may share a GPU.
///
/// Operations are put on a stream and return at once. [`Group::synchronize`](crate::Group::synchronize) waits for them
/// and reports what failed. Their matrices may be dropped before that: the memory is freed when the operations have
/// ended. Calls that read or write a matrix from the host wait for all that is on the stream: for operations, and for
/// the program's own kernels, however long these take. A program that uses a matrix by its address ([`Matrix::as_device_ptr`](crate::Matrix::as_device_ptr)) uses it on that stream, or after
/// [`Group::synchronize`](crate::Group::synchronize).
///
/// ```no_run
/// use gemmesh::{Cuda, Group, Result, launch, matmul, bf16};
///
/// fn main() -> Result<()> {
///     if !launch::is_rank() {
///         return launch::launch(2); // a process for each of two GPUs
///     }
///     let group = Group::<Cuda>::from_env()?;
///     let a = group.upload(&[bf16::ONE; 8 * 16], 8, 16)?;
///     let b = group.upload(&[bf16::ONE; 8 * 16], 8, 16)?;
///     let mut out = group.zeros::<bf16>(8, 8)?;
///     matmul(&a, &b, &mut out)?; // returns at once
///     group.synchronize()
/// }
/// ```
///
/// Beside its matrices, a group takes about 88 MiB of its GPU's memory. Most of it is kernel code, and workspace for
/// products whose K is cut into slices.
///
/// # Pushed rows and other kernels
///
/// Rows are pushed or stored ([`Route::Push`](crate::tuning::Route::Push), [`Route::Store`](crate::tuning::Route::Store)) if each rank
/// has a GPU to itself and streams share no queue, unless pulls were measured to be faster. The same holds for partial
/// sums of up to eight ranks. (A kernel stores partial sums to seven peers at most.) Kernels store the rows of
/// collectives of up to 16 MiB a rank.
///
/// A kernel whose rows are pushed or stored waits, on the device, for its peers' kernels of the same operation. If a
/// different kernel keeps one of them from starting, and also waits for another GPU, all of them wait until the
/// deadline. So these rules hold:
///
/// 1. *The ranks' kernels must be able to run at the same time.* On each GPU, multiprocessors for at least one cluster
///    of the kernel (one to eight neighbouring multiprocessors) must become free without the help of a rank that waits
///    for this one.
/// 2. *A kernel that holds all multiprocessors of a GPU and waits for another GPU must be ordered with the operation*,
///    in the same order on every rank. A kernel of a second group of this library is such a kernel. A kernel of a
///    different communication library may be one. A kernel that leaves some multiprocessors free beside a gather needs
///    no order.
/// 3. *While partial sums are pushed or stored, rule 2 holds for a kernel on any multiprocessor.* A rank then waits for
///    all partial sums of its rows, which its peers' kernels make.
/// 4. *The device must know the order.* Put both on one stream, or join their streams by an event. The order in which
///    the host makes the calls does not count, because streams are independent.
///
/// A kernel that waits for no other GPU needs no order, because it ends without their help. Operations by
/// [`Route::Pull`](crate::tuning::Route::Pull) need no order either, because they wait only for copies, never for a peer's
/// kernel. Graphs are the exception. A graph may run its branches one after the other, so operations of several groups
/// must not stand on different branches.
///
/// If a program breaks a rule, the operation ends at the deadline ([`Builder::timeout`](crate::Builder::timeout)) with
/// [`Kind::Timeout`], and a new group works.
///
/// # Several hosts
///
/// NCCL carries rows to GPUs of other hosts. A group that spans hosts loads it when it opens (libnccl.so.2, version
/// 2.18 or newer). NCCL's own variables say which network it takes. NCCL's kernels need multiprocessors, so this
/// library's kernels leave them four. Other kernels must leave them some too, because an operation waits for NCCL's
/// kernels. Within a host rows are pushed. Operations cannot be captured into graphs.
#[derive(Debug)]
pub struct Cuda {
    /// Dropped first, because its monitor's thread uses the GPU.
    shared: Shared,
    gpu: Gpu,
    /// Measured configurations.
    tuned: tuned::Table,
    choices: Choices,
    /// Whether a graph was captured. Its replays run on the main stream, and no mark follows them.
    recorded: AtomicBool,
}

impl Backend for Cuda {}

impl sealed::Implementation for Cuda {
    const NAME: &'static str = "cuda";
    const ROW_ALIGNMENT: usize = 16;
    const BLOCK: usize = driver::BLOCK;
    type Symmetric = Symmetric;
    type Buffer = DeviceBuffer;
    type Program = GpuProgram;

    fn open(members: &Members, options: &OpenOptions) -> Result<Cuda> {
        if members.in_process {
            return Err(members.fail(shared::symmetric::needs_processes(members.rank)));
        }
        // A failure before the ranks meet is reported to the other ranks when they meet.
        let load = || -> Result<(Gpu, Rates, tuned::Table)> {
            let place = members.hosts.place_of(members.rank);
            let timeout = members.deadlines.call();
            let mut gpu = Gpu::open(members.rank, place, options, timeout)?;
            if members.hosts.count() > 1 {
                gpu.room = lanes::CTAS;
            }
            let mut rates = Rates::load(members.rank, gpu.kernels.family, gpu.device.name())?;
            rates.multiprocessors = rates.multiprocessors.min(gpu.most_ctas(None));
            let tuned = tuned::Table::load(
                members.rank,
                gpu.kernels.family,
                gpu.device.name(),
                members.world,
            )?;
            Ok((gpu, rates, tuned))
        };
        let loaded = load();
        let own = match &loaded {
            Ok((gpu, rates, _)) => Ok((&*gpu.device, *rates, gpu.queues.together.is_none())),
            Err(error) => Err(error.clone()),
        };
        let mut peers = Peers::meet(members, own, options.device.is_some())?;
        peers.distinct &= !options.shares_gpu;
        let open = || -> Result<Cuda> {
            let (gpu, _, tuned) = loaded?;
            let mut cuda = Cuda {
                shared: Shared::open(&gpu, members, peers, options.first_epoch)?,
                gpu,
                tuned,
                choices: Choices::new(),
                recorded: AtomicBool::new(false),
            };
            match warm_up::warm_up(&cuda.gpu, &cuda.shared, members) {
                Ok(()) => Ok(cuda),
                Err(error) => {
                    cuda.close(members);
                    Err(error)
                }
            }
        };
        open().map_err(|error| members.fail(error))
    }

    fn reopening(&self) -> OpenOptions {
        OpenOptions {
            workers: None,
            link: None,
            transport: None,
            // A GPU by the rank's number in the part would be a different one.
            device: Some(self.gpu.device.ordinal()),
            max_ctas: self.gpu.max_ctas,
            shares_gpu: !self.is_distinct(),
            first_epoch: Epoch::FIRST,
        }
    }

    fn close(&mut self, members: &Members) {
        let has_graphs = self.recorded.load(Ordering::Relaxed);
        wait::for_the_end(&self.gpu, &mut self.shared, members, has_graphs);
    }

    fn default_config(&self, problem: &Problem, numerics: Numerics) -> Config {
        let peers = &self.shared.peers;
        let max_ctas = self.gpu.max_ctas;
        // Winners were measured on whole devices.
        let measured = self.tuned.find(problem).filter(|_| max_ctas.is_none());
        let chosen = self.choices.of(problem, numerics, measured, |problem| {
            let (rates, pushes) = (&peers.rates, peers.can_push());
            match self.lanes_of(problem) {
                Some(lanes) => model::over_hosts(rates, problem, numerics, lanes.rate()),
                None => model::choose(rates, problem, numerics, pushes, measured),
            }
        });
        Config { max_ctas, ..chosen }
    }

    fn is_better_stored(&self, bytes: usize) -> bool {
        self.shared.lanes.is_none() && self.shared.peers.can_push() && bytes <= MOST_STORED
    }

    fn predict(&self, problem: &Problem, config: &Config) -> Vec<Prediction> {
        let rates = &self.shared.peers.rates;
        match self.lanes_of(problem) {
            Some(lanes) => model::predict_over_hosts(rates, problem, config, lanes.rate()),
            None => model::predict(rates, problem, config),
        }
    }

    fn is_recording(&self, _members: &Members) -> Result<bool> {
        self.gpu.main().is_capturing()
    }

    fn check(&self, schedule: &Schedule) -> Result<()> {
        Selected::new(&self.gpu, schedule).map(drop)
    }

    fn prepare(&self, members: &Members, schedule: Schedule) -> Result<GpuProgram> {
        GpuProgram::new(&self.gpu, &self.shared, members, schedule)
    }

    fn schedule(program: &GpuProgram) -> &Schedule {
        &program.schedule
    }

    fn symmetric(&self, members: &Members, call: &MadeCall, bytes: usize) -> Result<Symmetric> {
        self.shared.symmetric(&self.gpu, members, call, bytes)
    }

    fn buffer(&self, members: &Members, rows: usize, width: usize) -> Result<DeviceBuffer> {
        self.gpu.buffer([rows, width], members.deadlines.call())
    }

    fn write_symmetric(&self, to: &mut Symmetric, offset: usize, from: &[u8]) -> Result<()> {
        let length = from.len();
        to.own_region_mut().write_rows(offset, length, length, from)
    }

    unsafe fn adopt(
        &self,
        ptr: u64,
        shape: [usize; 2],
        pitch: usize,
        owner: Option<Owner>,
    ) -> DeviceBuffer {
        // SAFETY: as this function's.
        unsafe { self.gpu.view(ptr, shape, pitch, owner) }
    }

    fn address(of: &Self::Symmetric) -> u64 {
        of.own()
    }

    fn place(of: &DeviceBuffer) -> (u64, usize) {
        of.place()
    }

    fn dlpack_device(&self) -> (i32, i32) {
        const CUDA: i32 = 2;
        (CUDA, self.gpu.device.ordinal() as i32)
    }

    fn write(&self, to: &mut DeviceBuffer, from: &[u8]) -> Result<()> {
        let (pitch, width) = (to.pitch, to.width);
        to.region_mut().write_rows(0, pitch, width, from)
    }

    fn read(&self, from: &Bound<Cuda>, width: usize, to: &mut [u8]) -> Result<()> {
        let (memory, offset, pitch) = match from {
            Bound::Nothing => return Ok(()),
            Bound::Symmetric(memory) => (memory.own_region(), 0, width),
            Bound::Rows(memory, offset, pitch) => (memory.own_region(), *offset, *pitch),
            Bound::Input(memory, offset) | Bound::Output(memory, offset) => {
                (memory.region(), *offset, memory.pitch)
            }
            Bound::Place(address, pitch) => {
                let rows = to.len() / width.max(1);
                // SAFETY: the caller keeps the memory, which has these rows.
                let memory = unsafe { self.gpu.view(*address, [rows, width], *pitch, None) };
                return memory.region().read_rows(0, *pitch, width, to);
            }
        };
        memory.read_rows(offset, pitch, width, to)
    }

    fn copy(&self, from: &Bound<Cuda>, to: &Bound<Cuda>, rows: usize, width: usize) -> Result<()> {
        match (operand(from, 0), operand(to, 0)) {
            (Some(from), Some(to)) if rows > 0 && width > 0 => {
                engine::copy_rows::copy_rows(&self.gpu, from, to, rows, width)
            }
            _ => Ok(()),
        }
    }

    fn run(&self, members: &Members, program: &GpuProgram, call: Run<Cuda>) -> Result<()> {
        let _bound = self.gpu.device.bind()?;
        let main = self.gpu.main();
        let schedule = &program.schedule;
        let recorded = main.is_capturing();
        let is_recorded = matches!(recorded, Ok(true));
        // Any other idle operation runs, because the other ranks and the monitor count its epoch.
        if schedule.is_idle() && (is_recorded || !schedule.handshake()) {
            return Ok(());
        }
        if is_recorded {
            self.refuse_recording(members, schedule)?;
            self.recorded.store(true, Ordering::Relaxed);
        }
        let run = |recorded: bool| {
            let at = EnqueueContext {
                gpu: &self.gpu,
                shared: &self.shared,
                members,
                main: &main,
                recorded,
            };
            let its = ProgramCall {
                epoch: call.epoch,
                operands: bind(self.gpu.device.rank, schedule, call.matrices),
                trace: call.trace,
            };
            engine::run(&at, program, its, call.callback)
        };
        // If this rank fails an operation that has an epoch, its peers wait in vain, so they must be told.
        let numbered = schedule.handshake() && !is_recorded;
        recorded
            .and_then(run)
            .map_err(|error| if numbered { members.fail(error) } else { error })
    }

    fn synchronize(&self, members: &Members) -> Result<()> {
        if self.gpu.main().is_capturing()? {
            return Err(Kind::Capturing.on(members.rank));
        }
        if self.recorded.load(Ordering::Relaxed) {
            self.gpu.reclaimer.mark()?;
        }
        wait::for_operations(&self.gpu, &self.shared, members)
    }

    fn settle(&self, members: &Members) -> Result<()> {
        if self.gpu.main().is_capturing()? {
            return Err(Kind::Capturing.on(members.rank));
        }
        wait::for_all_work(&self.gpu, &self.shared, members)
    }

    fn free_dropped(&self) {
        self.gpu.reclaimer.settle();
    }
}

/// The addresses of the matrices of a call of `rank`.
fn bind<'a>(rank: usize, schedule: &Schedule, matrices: &'a [Bound<Cuda>]) -> Operands<'a> {
    let bound = matrices.iter().zip(schedule.matrices());
    let all = bound.map(|(bound, spec)| operand(bound, spec.row_bytes()));
    Operands {
        rank,
        all: all.collect(),
    }
}

/// The address of a bound matrix. `shared`: bytes from row to row of symmetric memory.
fn operand<'a>(bound: &Bound<'a, Cuda>, shared: usize) -> Option<CallMatrix<'a>> {
    let (ptr, pitch) = match bound {
        Bound::Nothing => return None,
        Bound::Symmetric(memory) => (memory.own(), shared),
        Bound::Rows(memory, offset, pitch) => (memory.own() + *offset as u64, *pitch),
        Bound::Place(address, pitch) => (*address, *pitch),
        Bound::Input(memory, offset) | Bound::Output(memory, offset) => {
            let (ptr, pitch) = memory.place();
            (ptr + *offset as u64, pitch)
        }
    };
    let symmetric = bound.symmetric();
    Some(CallMatrix {
        ptr,
        pitch,
        symmetric,
    })
}

/// What `Group<Cuda>` and the integrations use.
impl Cuda {
    /// The lanes between hosts, if ranks of several hosts solve the problem.
    fn lanes_of(&self, problem: &Problem) -> Option<&Lanes> {
        let spans_hosts = problem.hosts.count() > 1;
        self.shared.lanes.as_deref().filter(|_| spans_hosts)
    }

    /// Fails if an operation of a group of several hosts is being captured.
    fn refuse_recording(&self, members: &Members, schedule: &Schedule) -> Result<()> {
        let Some(agreed) = schedule.agreed().filter(|_| self.shared.lanes.is_some()) else {
            return Ok(());
        };
        let what = "graphs of operations over several hosts";
        Err(Error::of(members.rank, agreed.name())(Error::unsupported(
            what,
        )))
    }

    /// Waits until the work on the streams of the caller's functions is done, in such a function.
    ///
    /// Such a stream waits for rows that other ranks bring. They bring them without this rank's host, because what it
    /// puts on streams for that is there before the function is called.
    pub(crate) fn settle_callers(&self, members: &Members) -> Result<()> {
        for stream in &self.gpu.streams().callers {
            if stream.is_capturing()? {
                return Err(Kind::Capturing.on(members.rank));
            }
            wait::until_idle(&self.shared, members, stream)?;
        }
        Ok(())
    }

    /// The GPU, with its streams.
    pub(crate) fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// The stream that operations are put on.
    pub(crate) fn stream(&self) -> *mut c_void {
        self.gpu.main().raw()
    }

    /// By rank: bytes per microsecond that the network carries each way. Empty if all ranks share a host.
    #[cfg(feature = "unstable-tools")]
    pub(crate) fn network_rates(&self) -> &[f64] {
        let lanes = self.shared.lanes.as_ref();
        lanes.map_or(&[], |lanes| &lanes.rates)
    }

    /// Whether each rank has a GPU to itself.
    pub(crate) fn is_distinct(&self) -> bool {
        self.shared.peers.distinct
    }

    /// `config` with the tile shape of each family's kernels of this variant for these types of `a` and `b`.
    pub(crate) fn configs(
        config: Config,
        variant: Variant,
        dtypes: [DType; 2],
    ) -> impl Iterator<Item = Config> {
        let of = move |family: &&'static dyn Family| {
            kernels::configs(*family, config, variant, dtypes, &Default::default())
        };
        FAMILIES.iter().flat_map(of)
    }

    /// The library's rates for this GPU.
    #[cfg(feature = "unstable-tools")]
    pub(crate) fn library_rates(&self) -> Rates {
        let device = &self.gpu.device;
        Rates {
            multiprocessors: device.multiprocessors(),
            ..self.gpu.kernels.family.rates(device.name())
        }
    }

    /// Makes later work on the ranks' streams begin at the same time. Collective.
    pub(crate) fn align_streams(&self, members: &Members) -> Result<()> {
        let main = self.gpu.main();
        if main.is_capturing()? {
            return Err(Kind::Capturing.on(members.rank));
        }
        align::align(&self.gpu, &self.shared, members, &main)?;
        self.gpu.reclaimer.mark()
    }

    /// Writes a pattern to every peer's memory, reads one from it, and verifies both. Collective.
    pub(crate) fn check_peers(&self, members: &Members) -> Result<()> {
        check_peers::check_peers(&self.gpu, &self.shared, members)
    }
}
