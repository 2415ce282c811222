//! A schedule compiled for this GPU: made once, then only read.

pub mod block_table;
pub mod k_slices;
pub mod launch;
pub mod low_latency;
pub mod operands;
pub mod params;
pub mod product;
pub mod reduction;
pub mod sends;
pub mod support;
mod tensor_map;
pub mod waits;

use std::mem::offset_of;

use crate::backend::cuda::abi::{GemmeshCopyTask, GemmeshSend, GemmeshSlice, GemmeshTile};
use crate::backend::cuda::driver::DevicePtr;
use crate::backend::cuda::gpu::Gpu;
use crate::backend::cuda::gpu::tables::Held;
use crate::backend::cuda::shared::Shared;
use crate::backend::cuda::shared::words::Waits;
use crate::error::{Error, Result};
use crate::ranks::members::Members;
use crate::schedule::limits::limit;
use crate::schedule::{Reduction, Route, Schedule, Tile};
use block_table::BlockTables;
use k_slices::Entry;
use launch::Launch;
use operands::Operands;
use params::Run;
use product::ProductKernel;
use reduction::ReductionKernel;
use sends::CollectiveKernel;
use support::Destination;

/// A schedule with its kernels, and their tables on the device.
#[derive(Debug)]
pub struct Program {
    pub schedule: Schedule,
    /// For whom its operations wait.
    pub waits: Waits,
    kernel: Kernel,
    /// What adds up rows behind copies, or behind the kernel of a product.
    reduction: Option<ReductionKernel>,
    /// Keeps the tables of its kernel.
    _held: Held,
}

/// What runs on the device beside copies.
#[derive(Debug)]
enum Kernel {
    /// Nothing is multiplied, for lack of a product or of rows, and no kernel moves anything.
    None,
    Product(Box<ProductKernel>),
    Collective(Box<CollectiveKernel>),
}

/// Where the tables of a program lie, as abi.h names them.
#[derive(Debug)]
pub struct ProgramTables {
    pub tiles: DevicePtr,
    pub slices: DevicePtr,
    /// By flag: the rank whose rows it guards.
    pub sources: DevicePtr,
    /// What the kernel of a product stores for peers.
    pub tasks: DevicePtr,
    pub task_count: u32,
    /// What is stored where nothing is multiplied. Behind it stands what comes, if that lands.
    pub sends: DevicePtr,
    pub send_count: u32,
    pub blocks: DevicePtr,
    pub stores: DevicePtr,
    pub reports: DevicePtr,
}

impl Program {
    /// Compiles a schedule.
    ///
    /// # Errors
    /// As [`support::check`]; [`Error::QueuedTogether`]; [`Error::NoKernel`]; [`Error::OutOfMemory`].
    pub fn new(
        gpu: &Gpu,
        shared: &Shared,
        members: &Members,
        schedule: Schedule,
    ) -> Result<Program> {
        let destination = support::check(&schedule)?;
        check_pushes(gpu, &schedule)?;
        let product = schedule.product().filter(|_| !schedule.is_idle());
        let chosen =
            product.map(|product| product::choose(gpu, shared, &schedule, product, &destination));
        let chosen = chosen.transpose()?;
        let entries = chosen.as_ref().map_or(&[][..], |chosen| &chosen.entries);
        let (held, tables) = ProgramTables::hold(gpu, &schedule, &destination, entries)?;
        // Also where a rank sends nothing, the kernel of a collective adds up what comes.
        let is_collective = schedule.product().is_none() && schedule.is_pushed();
        let adds_itself = is_collective || matches!(destination, Destination::Landing(_));
        let added = schedule.reduction().filter(|_| !adds_itself);
        let reduction = added.map(|added| ReductionKernel::new(gpu, &schedule, added));
        let reduction = reduction.transpose()?;
        let fixed = params::fixed(shared, members, &schedule, &tables, reduction.is_none());
        let kernel = match chosen {
            Some(chosen) => Kernel::Product(Box::new(ProductKernel::new(
                gpu,
                shared,
                &schedule,
                chosen,
                destination,
                &tables,
                fixed,
            ))),
            None if is_collective => {
                let kernel = CollectiveKernel::new(gpu, &shared.control, &schedule, &tables, fixed);
                kernel.map_or(Kernel::None, |kernel| Kernel::Collective(Box::new(kernel)))
            }
            None => Kernel::None,
        };
        Ok(Program {
            waits: Waits::of(&schedule),
            kernel,
            reduction,
            _held: held,
            schedule,
        })
    }

    /// What is added up behind copies or behind the kernel, and by what; nothing where the kernel does it.
    pub fn reduction(&self) -> Option<(&Reduction, &ReductionKernel)> {
        self.schedule.reduction().zip(self.reduction.as_ref())
    }

    /// The launch that a call of a product needs; none if nothing is multiplied.
    pub fn launch(
        &self,
        gpu: &Gpu,
        run: Run,
        operands: &Operands,
        traced: bool,
    ) -> Result<Option<Launch<'_>>> {
        let (Kernel::Product(kernel), Some(product)) = (&self.kernel, self.schedule.product())
        else {
            return Ok(None);
        };
        let launch = Launch::new(gpu, kernel, &self.schedule, product, run, operands, traced);
        launch.map(Some)
    }

    /// The kernel that moves rows, if one does.
    pub fn collective(&self) -> Option<&CollectiveKernel> {
        match &self.kernel {
            Kernel::Collective(kernel) => Some(kernel),
            _ => None,
        }
    }
}

/// Refuses pushes that could not run beside the kernel that waits for them. Without a product no kernel does.
fn check_pushes(gpu: &Gpu, schedule: &Schedule) -> Result<()> {
    if !(schedule.is_pushed() && schedule.uses(Route::Push)) {
        return Ok(());
    }
    if let Some(cause) = &gpu.queues.together {
        return Err(Error::QueuedTogether {
            rank: schedule.rank(),
            what: "Route::Push".into(),
            cause: cause.clone(),
        });
    }
    // All of a push is on its stream before the kernel that it waits for is launched.
    let what = "commands of a pushed product, two a chunk";
    limit(what, support::commands(schedule), 1, support::COMMANDS)
}

impl ProgramTables {
    /// Brings the tables of a schedule to the device. `entries`: of the kernel's table, where K is cut; otherwise none.
    fn hold(
        gpu: &Gpu,
        schedule: &Schedule,
        destination: &Destination,
        entries: &[Entry],
    ) -> Result<(Held, ProgramTables)> {
        let sources: Vec<u32> = schedule
            .sources()
            .iter()
            .map(|&source| source as u32)
            .collect();
        let tasks = tasks(schedule);
        let mut sends = sends::sends(schedule);
        let send_count = sends.len() as u32;
        if sends::lands(schedule) {
            sends.extend(sends::arrivals(schedule));
        }
        let BlockTables { blocks, stores } = match destination {
            Destination::Places(places) => BlockTables::of(schedule, places),
            _ => BlockTables::default(),
        };
        let none_yet = vec![0u32; blocks.len()];
        let cut: Vec<Tile> = entries.iter().map(|e| schedule.tiles()[e.tile]).collect();
        let tiles = match entries.is_empty() {
            true => schedule.tiles(),
            false => &cut,
        };
        let slices: Vec<GemmeshSlice> = entries.iter().map(|entry| entry.slice).collect();
        let (held, places) = gpu.tables.hold([
            bytemuck::cast_slice(tiles),
            bytemuck::cast_slice(&slices),
            bytemuck::cast_slice(&sources),
            bytemuck::cast_slice(&tasks),
            bytemuck::cast_slice(&sends),
            bytemuck::cast_slice(&blocks),
            bytemuck::cast_slice(&stores),
            bytemuck::cast_slice(&none_yet),
        ])?;
        let [
            tiles,
            slices,
            sources,
            task_table,
            sends,
            blocks,
            stores,
            reports,
        ] = places;
        let tables = ProgramTables {
            tiles,
            slices,
            sources,
            tasks: task_table,
            task_count: tasks.len() as u32,
            sends,
            send_count,
            blocks,
            stores,
            reports,
        };
        Ok((held, tables))
    }
}

/// The chunks that the kernel of a product stores, by warps that have nothing else to do.
fn tasks(schedule: &Schedule) -> Vec<GemmeshCopyTask> {
    let stored = schedule
        .moves()
        .filter(|transfer| transfer.route == Route::Store && transfer.produced.is_none());
    let tasks = stored.flat_map(|transfer| {
        transfer.regions.iter().map(move |moved| {
            let spec = &schedule.matrices()[moved.from.matrix];
            let extent = spec.extent_of(&moved.from, spec.row_bytes());
            GemmeshCopyTask {
                offset: extent.offset as u64,
                bytes: extent.contiguous().unwrap_or(0) as u32,
                peer: transfer.to as u32,
                flag: transfer.flag as u32,
                reserved: [0; 3],
            }
        })
    });
    let mut all = Vec::with_capacity(schedule.moves().count());
    all.extend(tasks);
    all
}

/// The kernel reads tiles as they are.
const _: () = {
    assert!(size_of::<Tile>() == size_of::<GemmeshTile>());
    assert!(offset_of!(Tile, m) == offset_of!(GemmeshTile, m));
    assert!(offset_of!(Tile, n) == offset_of!(GemmeshTile, n));
    assert!(offset_of!(Tile, block) == offset_of!(GemmeshTile, block));
    assert!(offset_of!(Tile, flag_begin) == offset_of!(GemmeshTile, flag_begin));
    assert!(offset_of!(Tile, flag_end) == offset_of!(GemmeshTile, flag_end));
};

// SAFETY: plain words without padding, for which any bits are valid.
unsafe impl bytemuck::Zeroable for Tile {}
// SAFETY: as above.
unsafe impl bytemuck::Pod for Tile {}
// SAFETY: as above.
unsafe impl bytemuck::Zeroable for GemmeshSlice {}
// SAFETY: as above.
unsafe impl bytemuck::Pod for GemmeshSlice {}
// SAFETY: as above.
unsafe impl bytemuck::Zeroable for GemmeshSend {}
// SAFETY: as above.
unsafe impl bytemuck::Pod for GemmeshSend {}
// SAFETY: as above.
unsafe impl bytemuck::Zeroable for GemmeshCopyTask {}
// SAFETY: as above.
unsafe impl bytemuck::Pod for GemmeshCopyTask {}

/// Keeps the compiler honest about what a kernel is given.
const _: () = assert!(size_of::<DevicePtr>() == size_of::<*const std::ffi::c_void>());
