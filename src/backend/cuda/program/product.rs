//! The kernel of a product: its choice, and its parameters that are the same at each call.

use smallvec::SmallVec;

use super::block_table::{Places, is_finished};
use super::k_slices::{self, SliceEntry};
use super::known::LastArguments;
use super::low_latency::LowLatencyRows;
use super::operands::Finished;
use super::params::{Fixed, function};
use super::quantized::QuantizedBehind;
use super::support::Destination;
use super::tables::ProgramTables;
use crate::Result;
use crate::backend::cuda::abi::{
    GEMMESH_IDENTITY, GEMMESH_MAX_WEIGHTS, GEMMESH_STORED_E4M3, GEMMESH_STORED_F16,
    GEMMESH_STORED_OUTPUT, GemmeshBlock, GemmeshParams, GemmeshSlice, GemmeshStore, GemmeshSums,
    GemmeshTile,
};
use crate::backend::cuda::family::{Family, Variant};
use crate::backend::cuda::gpu::Gpu;
use crate::backend::cuda::gpu::kernels::Instance;
use crate::backend::cuda::shared::Shared;
use crate::element::DType;
use crate::schedule::limits::limit;
use crate::schedule::product::PROMOTED;
use crate::schedule::{MAX_WEIGHTS, OutputBlock, Product, Reduction, Schedule, Tile, WeightLayout};

/// A product's kernel, with all its parameters except the addresses of a call's operands.
#[derive(Debug)]
pub struct ProductKernel {
    pub instance: Instance,
    /// How many clusters are launched.
    pub clusters: usize,
    /// Whether it begins before the kernel in front of it has ended.
    pub begins_early: bool,
    /// Whether some of its tiles wait for their rows' flags.
    pub awaits_rows: bool,
    /// The entries of the kernel's table, if K is cut. Otherwise empty, and each tile is an entry.
    entries: Vec<SliceEntry>,
    /// Where blocks go, if they go to several places.
    pub places: Option<Places>,
    /// The rows of each rank, if partials are sent by low latency.
    pub low_latency: Option<LowLatencyRows>,
    /// What quantises the results after the kernel, if it does not do so itself.
    pub quantized: Option<QuantizedBehind>,
    /// The type that the kernel stores its results in.
    pub stored: DType,
    pub params: Fixed<GemmeshParams>,
    /// The parameters about blocks, if they go to several places.
    pub sums: Option<Fixed<GemmeshSums>>,
    pub arguments: LastArguments,
}

/// The kernel that was chosen for a product.
pub struct Chosen<'a> {
    product: &'a Product,
    instance: Instance,
    /// The entries of its table if K is cut. Otherwise empty.
    pub entries: Vec<SliceEntry>,
    quantized: Option<QuantizedBehind>,
}

/// Finds the kernel that a product of `schedule` needs.
///
/// # Errors
/// [`Kind::Unsupported`](crate::error::Kind::Unsupported), `Kind::Limit`.
pub fn choose<'a>(
    gpu: &Gpu,
    schedule: &Schedule,
    product: &'a Product,
    destination: &Destination,
) -> Result<Chosen<'a>> {
    // A product of this rank alone has a schedule for a world of one, in which its rank is 0.
    let (config, rank) = (&product.config, gpu.device.rank);
    let variant = match destination {
        Destination::One => Variant::Forms,
        Destination::LowLatency(_) => Variant::LowLatency,
        Destination::Places(_) => Variant::Sums,
    };
    if variant != Variant::Forms {
        let what = "Config::tile.k_slices of partial sums that are sent,";
        limit(what, config.tile.k_slices, 1, 1)?;
    }
    let dtypes = [product.a, product.weights[0].b].map(|number| schedule.matrices()[number].dtype);
    gpu.kernels.check_dtypes(dtypes)?;
    gpu.kernels.check_product(rank, product, variant)?;
    let instance = gpu.kernels.find(rank, dtypes, config, variant)?;
    let (most, ctas) = (gpu.most_ctas(Some(product)), instance.ctas());
    let what = format!("max_ctas of a kernel whose clusters have {ctas} CTAs");
    limit(&what, most, ctas, usize::MAX)?;
    let entries = k_slices::cut(config, schedule.tiles().len(), depth(product))?;
    Ok(Chosen {
        product,
        instance: instance.clone(),
        entries,
        quantized: QuantizedBehind::new(gpu, schedule, product)?,
    })
}

/// Clusters of a kernel that run at the same time. `most`: the most CTAs.
fn clusters(instance: &Instance, shared: &Shared, most: usize) -> usize {
    let clusters = if shared.peers.distinct {
        instance.resident
    } else {
        // A copy between ranks that share a GPU may be a kernel of the driver's, and needs some room.
        (instance.resident * 3 / 4).max(1)
    };
    clusters.min(most / instance.ctas())
}

/// Whether a kernel that adds no partials begins before the kernel in front of it has ended.
///
/// Starting early pays only if it can prefetch weights, and not if its copies are on streams.
fn begins_early(gpu: &Gpu, shared: &Shared, schedule: &Schedule, product: &Product) -> bool {
    let follows_kernels = if schedule.handshake() {
        schedule.is_pushed() && !schedule.awaits_permit()
    } else {
        true
    };
    product.constant_weights && may_begin_early(gpu, shared, product) && follows_kernels
}

/// Whether kernels may begin before those in front of them have ended. Their CTAs hold multiprocessors while they wait, so
/// they must not if ranks share the GPU, or if CTAs are limited.
fn may_begin_early(gpu: &Gpu, shared: &Shared, product: &Product) -> bool {
    let is_limited = gpu.most_ctas(Some(product)) != usize::MAX;
    shared.peers.distinct && !is_limited
}

impl ProductKernel {
    /// `fixed`: its parameters as a kernel that may wait for peers.
    pub fn new(
        gpu: &Gpu,
        shared: &Shared,
        schedule: &Schedule,
        chosen: Chosen,
        destination: Destination,
        tables: &ProgramTables,
        fixed: GemmeshParams,
    ) -> ProductKernel {
        let Chosen {
            product,
            instance,
            entries,
            quantized,
        } = chosen;
        let (places, low_latency) = match destination {
            Destination::One => (None, None),
            Destination::Places(places) => (Some(places), None),
            Destination::LowLatency(low_latency) => (None, Some(low_latency)),
        };
        let mut kernel = ProductKernel {
            clusters: clusters(&instance, shared, gpu.most_ctas(Some(product))),
            begins_early: places.is_none() && begins_early(gpu, shared, schedule, product),
            awaits_rows: schedule.has_waiting_tiles(),
            sums: places.as_ref().map(|_| sums(shared, schedule, tables)),
            instance,
            entries,
            places,
            low_latency,
            quantized: quantized.map(|mut of| {
                of.begins_early = may_begin_early(gpu, shared, product);
                of
            }),
            stored: DType::Bf16,
            params: Fixed(fixed),
            arguments: LastArguments::default(),
        };
        // All clusters run at the same time, because those that store rows for peers must not wait for those that wait
        // for rows. CTAs without tiles are only good for storing.
        let count = kernel.entry_count(schedule);
        if !schedule.is_pushed() || tables.task_count == 0 {
            kernel.clusters = kernel.clusters.min(count);
        }
        kernel.set_params(gpu, shared, schedule, product, tables, count);
        kernel
    }

    /// Fills in the parameters of a kernel that has `count` entries, and the type that it stores.
    fn set_params(
        &mut self,
        gpu: &Gpu,
        shared: &Shared,
        schedule: &Schedule,
        product: &Product,
        tables: &ProgramTables,
        count: usize,
    ) {
        let finished = self.finished(schedule, product);
        let first = finished.first();
        let activation = first.map_or(GEMMESH_IDENTITY, |of| function(of.sum.activation));
        // Without a sum that is finished, the kernel stores partials.
        let output = product.blocks.first().map(|block| block.sum.out);
        let stored = first.map(|of| of.sum.out).or(output);
        let stored = match self.quantized {
            Some(_) => DType::F32,
            None => stored.map_or(DType::Bf16, |number| schedule.matrices()[number].dtype),
        };
        drop(finished);
        self.stored = stored;
        let params = &mut self.params.0;
        describe(params, gpu.kernels.family, product, activation, stored);
        params.tiles = tables.tiles as *const GemmeshTile;
        params.tile_count = count as u32;
        if self.entries.is_empty() {
            describe_tiles(params, schedule.tiles(), product)
        } else {
            params.slices = tables.slices as *const GemmeshSlice
        }
        params.partials = gpu.workspace.partials() as *mut f32;
        params.arrived = gpu.workspace.arrived() as *mut u32;
        if let Some(low_latency) = &self.low_latency {
            params.low_latency = low_latency.of_kernel(&shared.control);
        }
    }

    /// The sums that a product's kernel finishes.
    pub fn finished<'a>(
        &self,
        schedule: &'a Schedule,
        product: &'a Product,
    ) -> SmallVec<[Finished<'a>; MAX_WEIGHTS]> {
        let of_block = |block: &'a OutputBlock| Finished {
            weight: block.weight,
            row: block.rows.start,
            sum: &block.sum,
        };
        match (&self.low_latency, &self.places) {
            (Some(low_latency), _) => {
                let of_reduction = |reduction: &'a Reduction| Finished {
                    weight: 0,
                    row: low_latency.first_row(schedule.rank()),
                    sum: &reduction.sum,
                };
                schedule.reduction().map(of_reduction).into_iter().collect()
            }
            (None, Some(_)) => {
                let mut finished = product.blocks.iter();
                let first = finished.find(|block| is_finished(&block.sum));
                first.map(of_block).into_iter().collect()
            }
            (None, None) => product.blocks.iter().map(of_block).collect(),
        }
    }

    /// How many entries the kernel's table has.
    pub fn entry_count(&self, schedule: &Schedule) -> usize {
        match self.entries.len() {
            0 => schedule.tiles().len(),
            count => count,
        }
    }

    /// The tile of an entry.
    pub fn tile_of<'s>(&self, schedule: &'s Schedule, entry: usize) -> &'s Tile {
        let tile = self.entries.get(entry).map_or(entry, |entry| entry.tile);
        &schedule.tiles()[tile]
    }
}

/// Sets the parameters about the product.
fn describe(
    params: &mut GemmeshParams,
    family: &dyn Family,
    product: &Product,
    activation: u32,
    stored: DType,
) {
    params.m = product.m as u32;
    params.k = depth(product) as u32;
    params.activation = activation;
    params.is_gated = product.gated.into();
    params.is_f32 = (stored == DType::F32).into();
    params.stored_type = stored_type(product, stored);
    params.is_fast = (product.is_fast() && family.can_be_fast(&product.config)).into();
    params.b_is_kn = (product.weight_layout == WeightLayout::Kn).into();
    params.constant_weights = product.constant_weights.into();
    for (weight, output) in product.weights.iter().zip(&mut params.outputs) {
        output.n = weight.n as u32;
    }
    if let Some(deferred) = product.deferred {
        params.deferred_flag = deferred.flag as u32;
        let column = product.first_column() + deferred.column;
        params.deferred_step = (column / product.config.tile.k) as u32;
    }
}

/// The columns through which a kernel steps. A step of a product with scales of blocks has one block, so it begins
/// where the first block does.
fn depth(product: &Product) -> usize {
    product.first_column() + product.k
}

/// The kernels' number of a type that products of fp8 are stored in.
fn stored_type(product: &Product, stored: DType) -> u32 {
    match (product.config.tile.k, stored) {
        (PROMOTED, DType::F16) => GEMMESH_STORED_F16,
        (PROMOTED, DType::F8E4M3) => GEMMESH_STORED_E4M3,
        _ => GEMMESH_STORED_OUTPUT,
    }
}

/// Sets the parameters by which a kernel computes the entries of its table, if they follow from their numbers.
///
/// A kernel of many tiles does not feel that it reads the first entry, and comparing them all would take the host time.
fn describe_tiles(params: &mut GemmeshParams, tiles: &[Tile], product: &Product) {
    const MOST: usize = 1024;
    let Some(first) = tiles.first().filter(|_| tiles.len() <= MOST) else {
        return;
    };
    let rows = product.m.div_ceil(product.config.entry_rows()) as u32;
    let of_weight = |weight: usize| {
        let columns = product.weights[weight].n.div_ceil(product.tile_columns());
        (0..columns as u32).flat_map(move |n| {
            (0..rows).map(move |m| Tile {
                m,
                n,
                block: weight as u32,
                ..*first
            })
        })
    };
    let computed = (0..product.outputs()).flat_map(of_weight);
    params.tile_rows = if computed.eq(tiles.iter().copied()) {
        rows
    } else {
        0
    };
    params.row_flags = u32::from(first.flag_begin) | u32::from(first.flag_end) << 16;
}

/// A kernel's parameters about blocks that go to several places.
fn sums(shared: &Shared, schedule: &Schedule, tables: &ProgramTables) -> Fixed<GemmeshSums> {
    let unawaited = schedule.unawaited();
    Fixed(GemmeshSums {
        blocks: tables.blocks as *const GemmeshBlock,
        stores: tables.stores as *const GemmeshStore,
        reports: tables.reports as *mut u32,
        stored: shared.control.stored(0) as *mut u32,
        flag_begin: unawaited.start as u32,
        flag_end: unawaited.end as u32,
    })
}

/// Rust and CUDA agree on this limit.
const _: () = assert!(MAX_WEIGHTS == GEMMESH_MAX_WEIGHTS as usize);
