//! A schedule compiled for this GPU: made once, then only read.

pub mod block_table;
pub mod collective;
pub mod k_slices;
mod known;
pub mod launch;
pub mod low_latency;
pub mod operands;
pub mod params;
pub mod product;
pub mod quantized;
pub mod reduction;
pub mod sends;
pub mod staging;
pub mod support;
mod tables;
pub mod waits;

use std::sync::Arc;

use crate::backend::cuda::driver::DevicePtr;
use crate::backend::cuda::gpu::Gpu;
use crate::backend::cuda::gpu::queues::queued_together;
use crate::backend::cuda::gpu::tables::HeldTables;
use crate::backend::cuda::shared::Shared;
use crate::backend::cuda::shared::words::{NetworkTurns, Waits};
#[cfg(doc)]
use crate::error::Kind;
use crate::error::{Error, Result};
use crate::ranks::members::Members;
use crate::schedule::limits::limit;
use crate::schedule::{Reduction, Route, Schedule};
use collective::CollectiveKernel;
use launch::ProductLaunch;
use operands::Operands;
use params::CallNumbers;
use product::{Chosen, ProductKernel};
use reduction::ReductionKernel;
use staging::Staging;
use support::Destination;
use tables::ProgramTables;

/// A schedule with its kernels, and their tables on the device.
#[derive(Debug)]
pub struct GpuProgram {
    pub schedule: Schedule,
    /// Which ranks its operations wait for.
    pub waits: Waits,
    /// What its operations do over the network.
    pub turns: Arc<NetworkTurns>,
    /// Memory for rows that go over the network.
    pub staging: Staging,
    kernel: ProgramKernel,
    /// The kernel that adds rows after copies or after a product's kernel.
    reduction: Option<ReductionKernel>,
    /// The kernel that adds up what goes to other hosts.
    host_sums: Option<ReductionKernel>,
    /// Keeps the kernel's tables.
    _held: HeldTables,
}

/// The kernels that a schedule needs.
pub struct Selected<'a> {
    destination: Destination,
    /// The kernel of its product, if it has one.
    chosen: Option<Chosen<'a>>,
    /// The kernel that adds rows, if the main kernel does not.
    reduction: Option<ReductionKernel>,
    /// The kernel that adds up what goes to other hosts.
    host_sums: Option<ReductionKernel>,
}

impl<'a> Selected<'a> {
    /// Finds the kernels, and puts nothing on the device.
    ///
    /// # Errors
    /// As [`support::check`]; [`Kind::Misuse`]; as [`product::choose`].
    pub fn new(gpu: &Gpu, schedule: &'a Schedule) -> Result<Selected<'a>> {
        let destination = support::check(schedule)?;
        check_pushes(gpu, schedule)?;
        let product = schedule.product().filter(|_| !schedule.is_idle());
        let chosen = product.map(|product| product::choose(gpu, schedule, product, &destination));
        let has_low_latency = matches!(destination, Destination::LowLatency(_));
        let adds_itself = is_collective(schedule) || has_low_latency;
        let added = schedule.reduction().filter(|_| !adds_itself);
        let kernel = |added| ReductionKernel::new(gpu, schedule, added);
        let of_hosts = schedule.host_sums().first();
        Ok(Selected {
            destination,
            chosen: chosen.transpose()?,
            reduction: added.map(kernel).transpose()?,
            host_sums: of_hosts.map(|first| kernel(&first.sum)).transpose()?,
        })
    }
}

/// True if a collective's kernel moves rows. It adds arrivals, also if this rank sends nothing.
fn is_collective(schedule: &Schedule) -> bool {
    schedule.product().is_none() && schedule.is_pushed()
}

/// The kernel that runs while copies do.
#[derive(Debug)]
enum ProgramKernel {
    /// There is no product or it has no rows, and no kernel moves rows.
    None,
    Product(Box<ProductKernel>),
    Collective(Box<CollectiveKernel>),
}

impl GpuProgram {
    /// Compiles a schedule.
    ///
    /// # Errors
    /// As [`support::check`]; [`Kind::Misuse`]; [`Kind::Unsupported`]; [`Kind::OutOfMemory`].
    pub fn new(
        gpu: &Gpu,
        shared: &Shared,
        members: &Members,
        schedule: Schedule,
    ) -> Result<GpuProgram> {
        let Selected {
            destination,
            chosen,
            reduction,
            host_sums,
        } = Selected::new(gpu, &schedule)?;
        let entries = chosen.as_ref().map_or(&[][..], |chosen| &chosen.entries);
        let (held, tables) = ProgramTables::hold(gpu, &schedule, &destination, entries)?;
        let is_collective = is_collective(&schedule);
        let has_low_latency = matches!(destination, Destination::LowLatency(_));
        let near = (0..members.world).filter(|&peer| members.hosts.share(peer, members.rank));
        let waits = Waits::of(
            &schedule,
            !has_low_latency && !sends::is_low_latency(&schedule),
            near.fold(0, |all, peer| all | 1 << peer),
        );
        let completes = ends_with_kernel(&schedule, reduction.as_ref());
        let fixed = params::fixed(shared, members, &schedule, &tables, completes);
        let kernel = match chosen {
            Some(chosen) => ProgramKernel::Product(Box::new(ProductKernel::new(
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
                kernel.map_or(ProgramKernel::None, |kernel| {
                    ProgramKernel::Collective(Box::new(kernel))
                })
            }
            None => ProgramKernel::None,
        };
        Ok(GpuProgram {
            waits,
            turns: Arc::new(NetworkTurns::of(&schedule)),
            staging: Staging::new(gpu, &schedule)?,
            kernel,
            reduction,
            host_sums,
            _held: held,
            schedule,
        })
    }

    /// The reduction after copies or after the main kernel, and its kernel. None if the main kernel adds.
    pub fn reduction(&self) -> Option<(&Reduction, &ReductionKernel)> {
        self.schedule.reduction().zip(self.reduction.as_ref())
    }

    /// The kernel that adds up what goes to other hosts. None if there is no such sum.
    pub fn host_sums(&self) -> Option<&ReductionKernel> {
        self.host_sums.as_ref()
    }

    /// True if an operation whose kernel waits for peers is complete when the kernel has ended.
    pub fn ends_with_kernel(&self) -> bool {
        ends_with_kernel(&self.schedule, self.reduction.as_ref())
    }

    /// The launch that a call of a product needs; none if nothing is multiplied. `run` gives the call its numbers.
    pub fn launch(
        &self,
        gpu: &Gpu,
        run: impl FnOnce() -> CallNumbers,
        operands: &Operands,
        traced: bool,
    ) -> Result<Option<ProductLaunch<'_>>> {
        let (ProgramKernel::Product(kernel), Some(product)) =
            (&self.kernel, self.schedule.product())
        else {
            return Ok(None);
        };
        let launch = ProductLaunch::new(
            gpu,
            kernel,
            &self.schedule,
            product,
            run(),
            operands,
            traced,
        );
        launch.map(Some)
    }

    /// The kernel that moves rows, if one does.
    pub fn collective(&self) -> Option<&CollectiveKernel> {
        match &self.kernel {
            ProgramKernel::Collective(kernel) => Some(kernel),
            _ => None,
        }
    }
}

/// As [`GpuProgram::ends_with_kernel`]. A reduction is after the kernel, and what goes over the network may last longer.
fn ends_with_kernel(schedule: &Schedule, reduction: Option<&ReductionKernel>) -> bool {
    reduction.is_none() && !schedule.uses(Route::Net)
}

/// Checks that pushes can run together with the kernel that waits for them. Without a product, no kernel waits.
fn check_pushes(gpu: &Gpu, schedule: &Schedule) -> Result<()> {
    if !(schedule.is_pushed() && schedule.awaits_permit()) {
        return Ok(());
    }
    if let Some(cause) = &gpu.queues.together {
        return Err(Error::of_kind(queued_together("Route::Push", cause)));
    }
    // All commands of a push are on its stream before the kernel that permits it is launched.
    let what = "commands of a pushed product, two a chunk";
    limit(
        what,
        support::commands_before(schedule),
        1,
        support::COMMANDS,
    )
}

/// A kernel takes addresses as pointers.
const _: () = assert!(size_of::<DevicePtr>() == size_of::<*const std::ffi::c_void>());
