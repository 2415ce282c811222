//! The backend for every machine: the protocol between processes or threads, on shared memory.
//!
//! It is the executable specification of the protocol: the same schedule, flags, epochs and errors as on GPUs.
#![allow(unsafe_code)]

mod copies;
mod engine;
mod matmul;
mod matrices;
mod memory;
mod messages;
mod recorder;
mod scratch;
mod sum;
mod tile;
mod workers;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use matrices::MatrixPlace;
use memory::{Flags, HostSymmetric};
use messages::{MAX_ROWS, Spares};
use rustix::io::Errno;
use scratch::WorkerScratch;
use workers::Workers;

use crate::backend::contract::sealed::{self, Bound, Run};
use crate::backend::contract::{Backend, OpenOptions, Owner};
use crate::backend::transport::{HostTransport, NEEDS_A_TRANSPORT};
use crate::error::{Error, Kind, MadeCall, Result};
use crate::protocol::epoch::Epoch;
use crate::ranks::members::Members;
use crate::ranks::memfd::Mapping;
use crate::resources::{explain, require_available};
use crate::schedule::drive::Produced;
use crate::schedule::layout::MAX_EXTENT;
use crate::schedule::limits::{limit, require};
use crate::schedule::{Chunking, Config, Numerics, Problem, Route, Schedule, TileShape};

/// The host's processors and shared memory. A rank is a process or a thread.
///
/// An operation returns when it is complete on this rank: its output is final, and no rank reads this
/// rank's rows any more.
#[derive(Debug)]
pub struct Host {
    flags: Flags,
    workers: Workers,
    /// The limit of copies in bytes per second, if there is one.
    link: Option<usize>,
    /// What carries rows to other hosts and from them, if there are several.
    transport: Option<Arc<HostTransport>>,
    /// Memory for its messages.
    spares: Spares,
    /// By worker.
    scratch: Vec<Mutex<WorkerScratch>>,
}

impl Host {
    /// Reserves each worker's memory for a schedule, so that none lacks memory during an operation.
    fn reserve(&self, rank: usize, schedule: &Schedule) -> Result<()> {
        let needed = WorkerScratch::needed(schedule);
        let scratches = self.scratch.iter();
        // A panic of a holder does not leave one half-changed.
        let scratches = scratches.map(|one| one.lock().unwrap_or_else(PoisonError::into_inner));
        let mut scratches: Vec<MutexGuard<WorkerScratch>> = scratches.collect();
        let missing = scratches.iter_mut().map(|one| one.missing(&needed));
        let bytes = missing.fold(0, usize::saturating_add);
        if bytes == 0 {
            return Ok(());
        }
        let refused = |reason: String| {
            Kind::OutOfMemory {
                bytes,
                reason: format!("for the tiles of its workers: {reason}"),
            }
            .on(rank)
        };
        require_available(bytes).map_err(|error| refused(explain(&error)))?;
        let mut scratches = scratches.iter_mut();
        scratches
            .try_for_each(|one| one.reserve(&needed))
            .map_err(|_| refused(explain(&Errno::NOMEM.into())))
    }
}

/// A rank's own memory of one matrix.
#[derive(Debug)]
pub struct HostBuffer {
    memory: HostMemory,
    /// Bytes from row to row.
    pitch: usize,
    /// Bytes of a row that are elements.
    width: usize,
}

impl HostBuffer {
    /// The address of its first byte.
    pub fn first(&self) -> *mut u8 {
        self.memory.as_ptr()
    }
}

enum HostMemory {
    Own(Mapping),
    /// Another library's memory. Dropping the owner gives it back.
    Adopted(*mut u8, #[allow(dead_code)] Option<Owner>),
}

// SAFETY: memory belongs to the process, not to a thread; an owner can be sent.
unsafe impl Send for HostMemory {}
// SAFETY: shared access yields only a raw pointer.
unsafe impl Sync for HostMemory {}

impl std::fmt::Debug for HostMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "HostMemory at {:p}", self.as_ptr())
    }
}

impl HostMemory {
    fn as_ptr(&self) -> *mut u8 {
        match self {
            HostMemory::Own(mapping) => mapping.as_ptr(),
            HostMemory::Adopted(first, _) => *first,
        }
    }
}

/// A schedule, and its progress while it runs.
#[derive(Debug)]
pub struct HostProgram {
    schedule: Schedule,
    /// By block of the product: what has been made, if transfers wait for blocks.
    produced: Mutex<Vec<Produced>>,
}

impl Backend for Host {}

impl sealed::Implementation for Host {
    const NAME: &'static str = "host";
    const ROW_ALIGNMENT: usize = 1;
    const BLOCK: usize = 1;
    type Symmetric = HostSymmetric;
    type Buffer = HostBuffer;
    type Program = HostProgram;

    fn open(members: &Members, options: &OpenOptions) -> Result<Host> {
        let count = options.workers.unwrap_or_else(|| {
            let cores = std::thread::available_parallelism().map_or(1, usize::from);
            (cores * members.hosts.count() / members.world).max(1)
        });
        // The call that opens the group has set the place.
        let refuse =
            |call: &str, refusal| Err(members.fail(Error::of(members.rank, call)(refusal)));
        if let Err(refusal) = limit("the number of workers", count, 1, 1024) {
            return refuse("Builder::workers", refusal);
        }
        let link = options.link.unwrap_or(usize::MAX);
        if let Err(refusal) = limit("the bytes per second of a link", link, 1, usize::MAX) {
            return refuse("Builder::link", refusal);
        }
        // If this fails, the other ranks learn it from the first message.
        let workers = Workers::start(members.rank, count, options.transport.is_some());
        let ready = workers.as_ref().map(|_| ()).map_err(Error::clone);
        let flags = Flags::open(members, ready, options.first_epoch)?;
        Ok(Host {
            flags,
            workers: workers?,
            link: options.link,
            transport: options.transport.clone(),
            spares: Spares::default(),
            scratch: (0..count).map(|_| Mutex::default()).collect(),
        })
    }

    fn reopening(&self) -> OpenOptions {
        OpenOptions {
            workers: Some(self.scratch.len()),
            link: self.link,
            transport: None,
            device: None,
            max_ctas: None,
            shares_gpu: false,
            first_epoch: Epoch::FIRST,
        }
    }

    fn close(&mut self, _members: &Members) {
        // Nothing to do: a mapping keeps a peer's memory for as long as it is needed.
    }

    fn default_config(&self, problem: &Problem, _: Numerics) -> Config {
        let quantization = problem.form.quantization;
        let columns = match quantization.is_some_and(|of| of.scaling.first_column() > 0) {
            // A tile quantises whole blocks.
            true => problem.form.multiplied(problem.n).clamp(256, MAX_EXTENT),
            false => 256,
        };
        Config::new(
            // As much of K as keeps the widened tiles of both operands in a core's cache.
            TileShape::new(128, columns, problem.layout.k().min(512)).with_group_m(4),
            Chunking::new(4),
            match problem.operation.sends_product() {
                // Pulled partials would not be moved while others are made.
                true => Route::Push,
                false => Route::Pull,
            },
        )
    }

    fn is_recording(&self, _members: &Members) -> Result<bool> {
        Ok(false)
    }

    fn check(&self, schedule: &Schedule) -> Result<()> {
        let matrices = schedule.matrices().len();
        let what = "matrices of a schedule on the host";
        limit(what, matrices, 0, matrices::MAX_MATRICES)?;
        for sent in schedule.sent().chain(schedule.received()) {
            require(NEEDS_A_TRANSPORT, self.transport.is_some())?;
            let bytes = schedule.bytes_of(sent);
            limit("the bytes of a message between hosts", bytes, 0, MAX_ROWS)?;
        }
        // A worker quantises its tile's rows when it has made them.
        let Some(product) = schedule.product() else {
            return Ok(());
        };
        product.blocks.iter().try_for_each(|block| {
            let n = product.weights[block.weight].n;
            let mut scales = block.sum.scales.iter();
            scales.try_for_each(|scales| scales.check_tiles(n, product.tile_columns()))
        })
    }

    fn prepare(&self, members: &Members, schedule: Schedule) -> Result<HostProgram> {
        self.check(&schedule)?;
        self.reserve(members.rank, &schedule)?;
        Ok(HostProgram {
            produced: Mutex::new(Produced::of(&schedule)),
            schedule,
        })
    }

    fn schedule(program: &HostProgram) -> &Schedule {
        &program.schedule
    }

    fn symmetric(&self, members: &Members, call: &MadeCall, bytes: usize) -> Result<HostSymmetric> {
        HostSymmetric::allocate(members, call, Ok(()), bytes, |_| {})
    }

    fn buffer(&self, members: &Members, rows: usize, width: usize) -> Result<HostBuffer> {
        let bytes = rows.saturating_mul(width);
        let memory = Mapping::private(bytes);
        let memory = memory.map_err(Error::out_of_memory(members.rank, bytes))?;
        Ok(HostBuffer {
            memory: HostMemory::Own(memory),
            pitch: width,
            width,
        })
    }

    unsafe fn adopt(
        &self,
        ptr: u64,
        [_, width]: [usize; 2],
        pitch: usize,
        owner: Option<Owner>,
    ) -> HostBuffer {
        HostBuffer {
            memory: HostMemory::Adopted(ptr as *mut u8, owner),
            pitch,
            width,
        }
    }

    fn address(of: &HostSymmetric) -> u64 {
        of.own() as u64
    }

    fn place(of: &HostBuffer) -> (u64, usize) {
        (of.memory.as_ptr() as u64, of.pitch)
    }

    fn dlpack_device(&self) -> (i32, i32) {
        const CPU: i32 = 1;
        (CPU, 0)
    }

    fn write_symmetric(&self, to: &mut HostSymmetric, offset: usize, from: &[u8]) -> Result<()> {
        // SAFETY: the caller has checked the range. `to` is borrowed exclusively, so no operation of this
        // rank runs; and peers read or write a rank's memory only during its operations.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to.own().add(offset), from.len()) };
        Ok(())
    }

    fn write(&self, to: &mut HostBuffer, from: &[u8]) -> Result<()> {
        // Without columns there are no bytes, so any width will do.
        for (index, row) in from.chunks(to.width.max(1)).enumerate() {
            // SAFETY: the caller has checked that the buffer has as many rows, and borrows it exclusively.
            unsafe {
                let place = to.memory.as_ptr().add(index * to.pitch);
                std::ptr::copy_nonoverlapping(row.as_ptr(), place, row.len());
            }
        }
        Ok(())
    }

    fn read(&self, from: &Bound<Host>, width: usize, to: &mut [u8]) -> Result<()> {
        let Some(from) = MatrixPlace::of(from, width) else {
            return Ok(());
        };
        for (index, row) in to.chunks_mut(width.max(1)).enumerate() {
            // SAFETY: the caller has checked that the matrix has as many rows, and no one writes them meanwhile.
            unsafe {
                std::ptr::copy_nonoverlapping(from.element(index, 0), row.as_mut_ptr(), row.len());
            }
        }
        Ok(())
    }

    fn copy(&self, from: &Bound<Host>, to: &Bound<Host>, rows: usize, width: usize) -> Result<()> {
        let [from, to] = [from, to].map(|bound| MatrixPlace::of(bound, 0));
        let (Some(from), Some(to)) = (from, to) else {
            return Ok(());
        };
        for row in 0..rows {
            // SAFETY: the caller has checked that both have these rows, and borrows `to` exclusively. No operation of
            // this rank runs meanwhile. The caller has checked that they do not overlap.
            unsafe {
                std::ptr::copy_nonoverlapping(from.element::<u8>(row, 0), to.element(row, 0), width)
            };
        }
        Ok(())
    }

    fn run(&self, members: &Members, program: &HostProgram, call: Run<Host>) -> Result<()> {
        engine::run(self, members, program, call)
    }

    fn synchronize(&self, _members: &Members) -> Result<()> {
        Ok(())
    }

    fn settle(&self, _members: &Members) -> Result<()> {
        Ok(())
    }

    fn free_dropped(&self) {}
}
