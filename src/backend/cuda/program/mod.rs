//! A schedule on the device: its tables, and what a kernel is launched with.

pub mod block_table;
pub mod k_slices;
pub mod low_latency;
pub mod sends;
mod store;
pub mod support;
pub mod tables;
mod tensor_map;

use std::ffi::c_void;
use std::mem::offset_of;
use std::ops::Range;
use std::sync::Arc;

use smallvec::SmallVec;

use crate::backend::cuda::Cuda;
use crate::backend::cuda::abi::{
    GEMMESH_GELU, GEMMESH_GELU_TANH, GEMMESH_IDENTITY, GEMMESH_MAX_WEIGHTS, GEMMESH_REDUCE_THREADS,
    GEMMESH_RELU, GEMMESH_SILU, GEMMESH_THREADS, GEMMESH_TILE_K, GemmeshBlock, GemmeshCopyTask,
    GemmeshExchange, GemmeshFault, GemmeshMailbox, GemmeshOutput, GemmeshParams, GemmeshPushEpoch,
    GemmeshReduction, GemmeshSend, GemmeshSlice, GemmeshStore, GemmeshSums, GemmeshTile,
    GemmeshTraceEvent,
};
use crate::backend::cuda::driver::{DevicePtr, Layout, Memory, Stream};
use crate::backend::cuda::gpu::kernels::{Instance, Variant};
use crate::backend::cuda::gpu::reclaim::Deferred;
use crate::backend::cuda::shared::words::{Signals, Waits};
use crate::backend::sealed::{Bound, Call};
use crate::element::DType;
use crate::error::{Error, Result};
use crate::profile::span::{Lane, Span, Work};
use crate::protocol::epoch::Epoch;
use crate::ranks::members::Members;
use crate::schedule::{
    Activation, Addend, Agreed, Bias, Block, MAX_WEIGHTS, Reduction, Route, Schedule, Sum, Tile,
    WeightLayout,
};
use crate::schedule::{config::CUT_COLUMNS, layout::MAX_WORLD};
use block_table::{BlockTables, Places, TARGETS};
use k_slices::Entry;
use low_latency::Landing;
use support::Outputs;
use tables::Held;
use tensor_map::{Cache, Maps, Matrices};

/// A schedule with its tables on the device.
#[derive(Debug)]
pub struct Program {
    pub schedule: Schedule,
    /// For whom its operations wait.
    pub waits: Waits,
    /// Keeps the tables that follow.
    _held: Held,
    /// Where K is cut: by entry of the kernel's table.
    entries: Vec<Entry>,
    tiles: DevicePtr,
    slices: DevicePtr,
    /// By flag: the rank whose rows it guards.
    sources: DevicePtr,
    /// What the kernel pushes, if it does.
    tasks: DevicePtr,
    task_count: u32,
    /// What is stored where nothing is multiplied.
    sends: DevicePtr,
    send_count: u32,
    /// Whether what is exchanged without a product goes through landing areas.
    lands: bool,
    /// Of a product whose blocks go to several places.
    sums: Option<Sums>,
    /// Of one whose partials go to landing areas.
    landing: Option<Landing>,
    maps: Cache,
}

/// The tables of a kernel that adds partials: as [`GemmeshSums`].
#[derive(Debug)]
struct Sums {
    places: Places,
    blocks: DevicePtr,
    stores: DevicePtr,
    reports: DevicePtr,
}

impl Program {
    /// `entries`: of the kernel's table, where K is cut; otherwise none.
    pub fn new(
        cuda: &Cuda,
        schedule: Schedule,
        outputs: Outputs,
        entries: Vec<Entry>,
    ) -> Result<Program> {
        let (places, landing) = match outputs {
            Outputs::One => (None, None),
            Outputs::Places(places) => (Some(places), None),
            Outputs::Landing(landing) => (None, Some(landing)),
        };
        let sources: Vec<u32> = schedule.sources().iter().map(|&s| s as u32).collect();
        let tasks = store::tasks(&schedule);
        let task_count = tasks.len() as u32;
        let mut sends = sends::sends(&schedule);
        let send_count = sends.len() as u32;
        let lands = sends::lands(&schedule);
        if lands {
            sends.extend(sends::arrivals(&schedule));
        }
        let BlockTables { blocks, stores } =
            places.as_ref().map_or_else(BlockTables::default, |places| {
                BlockTables::of(&schedule, places)
            });
        let none_yet = vec![0u32; blocks.len()];
        let cut: Vec<Tile> = entries.iter().map(|e| schedule.tiles()[e.tile]).collect();
        let tiles = match entries.is_empty() {
            true => schedule.tiles(),
            false => &cut,
        };
        let slices: Vec<GemmeshSlice> = entries.iter().map(|entry| entry.slice).collect();
        let tables = [
            bytemuck::cast_slice(tiles),
            bytemuck::cast_slice(&slices),
            bytemuck::cast_slice(&sources),
            bytemuck::cast_slice(&tasks),
            bytemuck::cast_slice(&sends),
            bytemuck::cast_slice(&blocks),
            bytemuck::cast_slice(&stores),
            bytemuck::cast_slice(&none_yet),
        ];
        let (held, places_of) = cuda.tables.hold(tables)?;
        let [
            tiles,
            slices,
            sources,
            tasks,
            sends,
            blocks,
            stores,
            reports,
        ] = places_of;
        let sums = places.map(|places| Sums {
            places,
            blocks,
            stores,
            reports,
        });
        Ok(Program {
            entries,
            tiles,
            slices,
            sources,
            tasks,
            task_count,
            sends,
            send_count,
            lands,
            sums,
            landing,
            _held: held,
            waits: Waits::of(&schedule),
            schedule,
            maps: Cache::default(),
        })
    }

    /// How many entries the kernel's table has.
    fn entry_count(&self) -> usize {
        match self.entries.len() {
            0 => self.schedule.tiles().len(),
            count => count,
        }
    }

    /// The tile of an entry.
    fn tile_of(&self, entry: usize) -> &Tile {
        let tile = self.entries.get(entry).map_or(entry, |entry| entry.tile);
        &self.schedule.tiles()[tile]
    }

    /// What is added up behind the kernel: nothing where that does it itself.
    pub fn reduction(&self) -> Option<&Reduction> {
        // Also where a rank sends nothing, the kernel that exchanges rows adds them up.
        let is_exchange = self.schedule.product().is_none() && self.schedule.is_pushed();
        let reduction = self.schedule.reduction();
        reduction.filter(|_| self.landing.is_none() && !is_exchange)
    }

    /// What becomes of sums that the kernel of a product finishes: the number of the weight, a row of `a`, and the sum of which that is
    /// the first row.
    fn finished(&self) -> SmallVec<[(usize, usize, &Sum); MAX_WEIGHTS]> {
        let mut finished = SmallVec::new();
        let Some(product) = self.schedule.product() else {
            return finished;
        };
        match (&self.landing, &self.sums) {
            (Some(landing), _) => {
                let reduction = self.schedule.reduction();
                let first = landing.first_row(self.schedule.rank());
                finished.extend(reduction.map(|reduction| (0, first, &reduction.sum)));
            }
            (None, Some(_)) => {
                let adds = |block: &&Block| !block.sum.addends.is_empty();
                let first = product.blocks.iter().find(adds);
                finished.extend(first.map(|block| (0, block.rows.start, &block.sum)));
            }
            (None, None) => {
                let blocks = product.blocks.iter();
                finished.extend(blocks.map(|block| (block.weight, block.rows.start, &block.sum)));
            }
        }
        finished
    }

    /// What is stored where nothing is multiplied, and how many entries there are. Behind them stands what comes, if it lands.
    pub fn sends(&self) -> (DevicePtr, u32) {
        (self.sends, self.send_count)
    }

    /// What every kernel that may wait for peers is told, and nothing to multiply. `shared`: the number of the matrix that it stores to, if it
    /// stores rows.
    pub fn params(&self, at: &EnqueueContext, call: &Call<Cuda>, shared: usize) -> GemmeshParams {
        let EnqueueContext { cuda, members, .. } = *at;
        let (schedule, control) = (&self.schedule, &cuda.control);
        let pushed = schedule.is_pushed();
        let flags = match pushed {
            true => control.pushed(members.rank, 0),
            false => control.flags(call.epoch).chunk(members.rank, 0),
        };
        let report = |word: DevicePtr| if at.recorded { 0 } else { word } as *mut u32;
        let mut mailboxes = [std::ptr::null_mut(); MAX_WORLD];
        let mut rows = [std::ptr::null_mut(); MAX_WORLD];
        for peer in 0..members.world {
            mailboxes[peer] = control.mailbox(peer) as *mut GemmeshMailbox;
            let gathered = call.matrices[shared].symmetric();
            rows[peer] = gathered.map_or(0, |a| a.of(peer)) as *mut c_void;
        }
        let exchange = GemmeshExchange {
            push_epoch: if pushed { control.push_epoch() } else { 0 } as *mut GemmeshPushEpoch,
            tasks: self.tasks as *const GemmeshCopyTask,
            // The kernel's waits have deadlines of their own. Where copies push, their stream says that it should run.
            started: match schedule.uses(Route::Push) {
                false => report(cuda.monitor.started()),
                true => std::ptr::null_mut(),
            },
            // What follows a kernel is a part of the operation.
            completed: match self.reduction() {
                None => report(cuda.monitor.completed()),
                Some(_) => std::ptr::null_mut(),
            },
            task_count: self.task_count,
            copies: schedule.uses(Route::Push).into(),
            rank: members.rank as u32,
            world: members.world as u32,
            mailboxes,
            rows,
        };
        GemmeshParams {
            tiles: std::ptr::null(),
            flags: flags as *const u32,
            sources: self.sources as *const u32,
            abort: control.abort() as *mut u32,
            fault: cuda.monitor.fault() as *mut GemmeshFault,
            trace: std::ptr::null_mut(),
            slices: std::ptr::null(),
            partials: std::ptr::null_mut(),
            arrived: std::ptr::null_mut(),
            deadline_ns: members.timeout.as_nanos().min(u64::MAX.into()) as u64,
            tile_count: 0,
            epoch: call.epoch.raw(),
            m: 0,
            k: 0,
            deferred_flag: u32::MAX,
            deferred_step: u32::MAX,
            activation: GEMMESH_IDENTITY,
            is_gated: 0,
            is_f32: 0,
            b_is_kn: 0,
            recording: match at.recorded {
                true => {
                    let name = schedule.agreed().map_or("", Agreed::name);
                    cuda.monitor.record(name, self.waits)
                }
                false => 0,
            },
            reserved: 0,
            outputs: [NO_OUTPUT; MAX_WEIGHTS],
            exchange,
            landing: match self.lands {
                true => low_latency::areas(control, members.world),
                false => low_latency::NONE,
            },
        }
    }
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

/// Where an operation is put.
pub struct EnqueueContext<'a> {
    pub cuda: &'a Cuda,
    pub members: &'a Members,
    pub main: &'a Stream,
    /// It is recorded, to run later and often.
    pub recorded: bool,
}

impl<'a> EnqueueContext<'a> {
    /// The words of operation `epoch`, or of one that is recorded.
    pub fn signals(&self, epoch: Epoch) -> Signals<'a> {
        match self.recorded {
            true => self.cuda.control.gates(),
            false => self.cuda.control.flags(epoch),
        }
    }
}

/// One launch of a kernel, with its arguments.
pub struct Launch {
    instance: Instance,
    maps: Arc<Maps>,
    params: GemmeshParams,
    sums: Option<GemmeshSums>,
    grid: u32,
    trace: Option<Deferred<Memory>>,
}

impl Launch {
    /// The launch that `call` of `program` needs; none if nothing is multiplied, for lack of a product or of rows.
    pub fn new(
        at: &EnqueueContext,
        program: &Program,
        call: &Call<Cuda>,
    ) -> Result<Option<Launch>> {
        let EnqueueContext { cuda, members, .. } = *at;
        let (schedule, rank) = (&program.schedule, members.rank);
        let Some(product) = schedule.product().filter(|_| !schedule.is_idle()) else {
            return Ok(None);
        };
        let dtype = schedule.matrices()[product.a].dtype;
        let variant = Variant {
            sums: program.sums.is_some(),
        };
        let instance = cuda.kernels.find(rank, dtype, &product.config, variant)?;
        let m = product.m;
        let lost = || Error::Message {
            rank,
            reason: "a product without operands".into(),
        };
        let is_f32 = |number: usize| schedule.matrices()[number].dtype == DType::F32;
        let of_own = |number: usize, first: usize, rows: usize, columns: usize| {
            let (ptr, pitch) = place(schedule, call.matrices, number)?;
            Some(layout(ptr, pitch, first, rows, columns))
        };
        let whole = |number: usize| {
            let spec = &schedule.matrices()[number];
            of_own(number, 0, spec.rows, spec.columns).ok_or_else(lost)
        };
        let a = whole(product.a)?;
        let weights = product.weights.iter().map(|weight| whole(weight.b));
        let weights = weights.collect::<Result<SmallVec<[_; MAX_WEIGHTS]>>>()?;
        // Of partials a rank without rows of its own stores nothing: any matrix will do.
        let (outputs, targets) = match &program.sums {
            Some(Sums { places, .. }) => {
                // Nobody stores to peers' memory where copies push.
                let reached = match schedule.uses(Route::Store) {
                    true => members.world.min(TARGETS),
                    false => 1,
                };
                let mut targets = [None; 2 * TARGETS];
                let mut add = |own_map: usize, number, first, rows, columns| {
                    targets[own_map] = of_own(number, first, rows, columns);
                    let Some(shared) = call.matrices[number].symmetric() else {
                        return;
                    };
                    let pitch = schedule.matrices()[number].row_bytes();
                    for distance in 1..reached {
                        let ptr = shared.of((rank + distance) % members.world);
                        targets[own_map + distance] =
                            Some(layout(ptr, pitch, first, rows, columns));
                    }
                };
                if let Some(number) = places.partials {
                    let spec = schedule.matrices()[number];
                    add(0, number, 0, spec.rows, spec.columns);
                }
                // Sums of f32 are stored without a map.
                let out = places.out.as_ref();
                if let Some((number, rows)) = out.filter(|(number, _)| !is_f32(*number)) {
                    add(TARGETS, *number, rows.start, rows.len(), product.n());
                }
                // Who is alone adds nothing.
                let added = targets[0].or(targets[TARGETS]).unwrap_or(a);
                (SmallVec::from_slice(&[added]), Some(targets))
            }
            None => {
                let out = |block: &Block| {
                    let (rows, sum) = match (&program.landing, schedule.reduction()) {
                        (Some(_), Some(reduction)) => (reduction.rows, &reduction.sum),
                        _ => (m, &block.sum),
                    };
                    let n = product.weights[block.weight].n;
                    of_own(sum.out, sum.first, rows, n).ok_or_else(lost)
                };
                let outputs = product.blocks.iter().map(out);
                let outputs = outputs.collect::<Result<SmallVec<[_; MAX_WEIGHTS]>>>()?;
                (outputs, None)
            }
        };
        let finished = program.finished();
        let stores_f32 = finished.iter().any(|(_, _, sum)| is_f32(sum.out));
        let matrices = Matrices {
            a,
            weights,
            weight_layout: product.weight_layout,
            gated: product.gated,
            outputs,
            stores_f32,
            targets,
        };
        let mut of_weights = [NO_OUTPUT; MAX_WEIGHTS];
        for (weight, of_weight) in product.weights.iter().zip(&mut of_weights) {
            of_weight.n = weight.n as u32;
        }
        for &(weight, row, sum) in &finished {
            let at = |number: usize, first: usize| {
                let (ptr, pitch) = place(schedule, call.matrices, number)?;
                // Row 0 of `a` may be none of it.
                let before = (row as u64)
                    .wrapping_sub(first as u64)
                    .wrapping_mul(pitch as u64);
                Some((ptr.wrapping_sub(before), pitch as u64))
            };
            let of_weight = &mut of_weights[weight];
            if let Some((ptr, pitch)) = at(sum.out, sum.first) {
                (of_weight.out, of_weight.out_pitch) = (ptr as *mut c_void, pitch);
            }
            let residual = sum
                .residual
                .and_then(|residual| at(residual.matrix, residual.first));
            if let Some((ptr, pitch)) = residual {
                (of_weight.residual, of_weight.residual_pitch) = (ptr as *const c_void, pitch);
            }
            if let Some(Bias { matrix, first }) = sum.bias
                && let Some((ptr, _)) = place(schedule, call.matrices, matrix)
            {
                let column =
                    |column: usize| (ptr + (column * dtype.bytes()) as u64) as *const c_void;
                of_weight.bias = column(first);
                if product.gated {
                    of_weights[1].bias = column(first + product.weights[0].n);
                }
            }
        }
        let pushed = schedule.is_pushed();
        let entries = program.entry_count();
        // All of them run at the same time: those that push must not wait for those that wait for pushes.
        let mut clusters = cuda.clusters(instance);
        // CTAs without tiles are good for pushing only.
        if !pushed || program.task_count == 0 {
            clusters = clusters.min(entries);
        }
        let trace = match call.trace.is_some() {
            true => {
                let events = entries * instance.ctas();
                Some(cuda.scratch(events * size_of::<GemmeshTraceEvent>())?)
            }
            false => None,
        };
        let deferred = product.deferred;
        let params = GemmeshParams {
            tiles: program.tiles as *const GemmeshTile,
            trace: trace.as_ref().map_or(0, |trace| trace.ptr()) as *mut GemmeshTraceEvent,
            slices: match program.entries.is_empty() {
                true => std::ptr::null(),
                false => program.slices as *const GemmeshSlice,
            },
            partials: cuda.workspace.partials() as *mut f32,
            arrived: cuda.workspace.arrived() as *mut u32,
            tile_count: entries as u32,
            m: product.m as u32,
            k: product.k as u32,
            activation: finished
                .first()
                .map_or(GEMMESH_IDENTITY, |(_, _, sum)| function(sum.activation)),
            is_gated: product.gated.into(),
            is_f32: stores_f32.into(),
            b_is_kn: (product.weight_layout == WeightLayout::Kn).into(),
            outputs: of_weights,
            deferred_flag: deferred.map_or(u32::MAX, |deferred| deferred.flag as u32),
            deferred_step: deferred
                .map_or(u32::MAX, |deferred| (deferred.column / CUT_COLUMNS) as u32),
            landing: match &program.landing {
                Some(landing) => landing.of_call(&cuda.control),
                None => low_latency::NONE,
            },
            ..program.params(at, call, product.a)
        };
        let unawaited = schedule.unawaited();
        let sums = program.sums.as_ref().map(|sums| GemmeshSums {
            blocks: sums.blocks as *const GemmeshBlock,
            stores: sums.stores as *const GemmeshStore,
            reports: sums.reports as *mut u32,
            stored: cuda.control.stored(0) as *mut u32,
            flag_begin: unawaited.start as u32,
            flag_end: unawaited.end as u32,
        });
        Ok(Some(Launch {
            maps: program.maps.get(rank, instance, matrices)?,
            grid: (clusters * instance.ctas()) as u32,
            instance: instance.clone(),
            params,
            sums,
            trace,
        }))
    }

    pub fn launch(&self, stream: &Stream) -> Result<()> {
        fn argument<T>(value: &T) -> *mut c_void {
            (&raw const *value).cast_mut().cast()
        }
        let Maps {
            operands,
            targets,
            more,
        } = &*self.maps;
        let [a, b, out_or_added] = operands.each_ref().map(argument);
        let params = argument(&self.params);
        let mut with_sums;
        let mut plain;
        let arguments: &mut [*mut c_void] = match (targets, &self.sums) {
            (Some(targets), Some(sums)) => {
                with_sums = [
                    a,
                    b,
                    out_or_added,
                    params,
                    argument(&**targets),
                    argument(sums),
                ];
                &mut with_sums
            }
            _ => {
                plain = [a, b, out_or_added, params, argument(more)];
                &mut plain
            }
        };
        let instance = &self.instance;
        // SAFETY: the arguments are what abi.h says. The matrices, the tables and the flags are alive until the stream
        // has passed: a caller's memory by contract of its view, the rest because it is freed after that only.
        unsafe {
            instance.function.launch(
                stream,
                self.grid,
                GEMMESH_THREADS,
                instance.shared_bytes,
                arguments,
            )
        }
    }

    /// What the kernel noted. It has ended.
    pub fn spans(&self, program: &Program, spans: &mut Vec<Span>) -> Result<()> {
        let Some(trace) = &self.trace else {
            return Ok(());
        };
        let schedule = &program.schedule;
        let of_entry = self.instance.ctas();
        let count = program.entry_count() * of_entry;
        let mut bytes = vec![0u8; count * size_of::<GemmeshTraceEvent>()];
        let length = bytes.len();
        trace.region().read_rows(0, length, length, &mut bytes)?;
        for (index, event) in bytes
            .chunks_exact(size_of::<GemmeshTraceEvent>())
            .enumerate()
        {
            // SAFETY: the kernel wrote events of this layout; any bytes are valid for it.
            let event = unsafe { event.as_ptr().cast::<GemmeshTraceEvent>().read_unaligned() };
            let tile = program.tile_of(index / of_entry);
            let source = schedule.source_of_tile(tile);
            let lane = Lane::Worker(event.sm as usize);
            if !tile.flags().is_empty() {
                spans.push(Span {
                    lane,
                    work: Work::Wait { source },
                    begin: event.wait_begin,
                    end: event.wait_end,
                });
            }
            spans.push(Span {
                lane,
                work: Work::Tile {
                    source: schedule.owner_of_tile(tile),
                    m: tile.m,
                    n: tile.n,
                },
                begin: event.load_begin,
                end: event.done,
            });
        }
        // GPUs' clocks differ by fractions of a millisecond; the ranks began together.
        let origin = spans.iter().map(|span| span.begin).min().unwrap_or(0);
        for span in spans.iter_mut() {
            span.begin -= origin;
            span.end -= origin;
        }
        Ok(())
    }
}

/// An activation, as kernels know it.
fn function(activation: Activation) -> u32 {
    match activation {
        Activation::Identity => GEMMESH_IDENTITY,
        Activation::Relu => GEMMESH_RELU,
        Activation::Gelu => GEMMESH_GELU,
        Activation::GeluTanh => GEMMESH_GELU_TANH,
        Activation::Silu => GEMMESH_SILU,
    }
}

/// An unused weight slot.
const NO_OUTPUT: GemmeshOutput = GemmeshOutput {
    bias: std::ptr::null(),
    out: std::ptr::null_mut(),
    out_pitch: 0,
    residual: std::ptr::null(),
    residual_pitch: 0,
    n: 0,
    reserved: 0,
};

/// Rows of a matrix that lies at `ptr`, `pitch` bytes from row to row.
fn layout(ptr: DevicePtr, pitch: usize, first: usize, rows: usize, columns: usize) -> Layout {
    Layout {
        ptr: ptr + (first * pitch) as u64,
        rows,
        columns,
        pitch,
    }
}

/// Where a matrix of a call lies in this rank's memory, and the bytes from row to row; if it is bound.
pub fn place(
    schedule: &Schedule,
    matrices: &[Bound<Cuda>],
    number: usize,
) -> Option<(DevicePtr, usize)> {
    let shared = schedule.matrices()[number].row_bytes();
    match &matrices[number] {
        Bound::Nothing => None,
        Bound::Symmetric(memory) => Some((memory.own(), shared)),
        Bound::Part(memory, offset) => Some((memory.own() + *offset as u64, shared)),
        Bound::Input(memory, offset) | Bound::Output(memory, offset) => {
            let (ptr, pitch) = memory.place();
            Some((ptr + *offset as u64, pitch))
        }
    }
}

/// What a kernel is told that adds up rows of a reduction.
pub fn sums(
    at: &EnqueueContext,
    schedule: &Schedule,
    reduction: &Reduction,
    rows: Range<usize>,
    call: &Call<Cuda>,
) -> Result<GemmeshReduction> {
    let Reduction { n, sum, .. } = reduction;
    let lost = || Error::Message {
        rank: at.members.rank,
        reason: "a sum without operands".into(),
    };
    let (out, out_pitch) = place(schedule, call.matrices, sum.out).ok_or_else(lost)?;
    let bias = sum
        .bias
        .and_then(|bias| place(schedule, call.matrices, bias.matrix));
    let residual = sum.residual.and_then(|residual| {
        let (ptr, pitch) = place(schedule, call.matrices, residual.matrix)?;
        Some((ptr + ((residual.first + rows.start) * pitch) as u64, pitch))
    });
    let (residual, residual_pitch) = residual.unwrap_or((0, 0));
    let mut addends = [std::ptr::null(); MAX_WORLD];
    let mut addend_pitches = [0; MAX_WORLD];
    for (index, addend) in sum.addends.iter().enumerate() {
        let &Addend::Rows { matrix, first } = addend else {
            return Err(lost());
        };
        let (ptr, pitch) = place(schedule, call.matrices, matrix).ok_or_else(lost)?;
        addend_pitches[index] = pitch as u64;
        addends[index] = (ptr + ((first + rows.start) * pitch) as u64) as *const c_void;
    }
    Ok(GemmeshReduction {
        addends,
        addend_pitches,
        bias: bias.map_or(0, |(ptr, _)| ptr) as *const c_void,
        out: (out + ((sum.first + rows.start) * out_pitch) as u64) as *mut c_void,
        out_pitch: out_pitch as u64,
        residual: residual as *const c_void,
        residual_pitch: residual_pitch as u64,
        count: sum.addends.len() as u32,
        rows: rows.len() as u32,
        n: *n as u32,
        activation: function(sum.activation),
        is_f32: (schedule.matrices()[sum.out].dtype == DType::F32).into(),
        reserved: 0,
    })
}

/// Adds up rows of a reduction on `stream`, behind what has brought them.
pub fn reduce(
    at: &EnqueueContext,
    stream: &Stream,
    schedule: &Schedule,
    reduction: &Reduction,
    rows: Range<usize>,
    call: &Call<Cuda>,
) -> Result<()> {
    let mut sums = sums(at, schedule, reduction, rows, call)?;
    let dtype = reduction.dtype(schedule.matrices());
    let kernel = at.cuda.kernels.reduce(dtype);
    let kernel = kernel.ok_or_else(|| Error::Message {
        rank: at.members.rank,
        reason: format!("a sum of {dtype}"),
    })?;
    // Enough to fill the device, each with the same number of pieces, about.
    let pieces = sums.n.div_ceil(16 / dtype.bytes() as u32) as usize * sums.rows as usize;
    let most = at.cuda.device.multiprocessors() * CTAS;
    let grid = pieces
        .div_ceil(GEMMESH_REDUCE_THREADS as usize)
        .clamp(1, most);
    let mut arguments = [(&raw mut sums).cast()];
    // SAFETY: the argument is what abi.h says. The matrices are alive until the stream has passed: as in `Launch::launch`.
    unsafe {
        kernel.launch(
            stream,
            grid as u32,
            GEMMESH_REDUCE_THREADS,
            0,
            &mut arguments,
        )
    }
}

/// CTAs of a reduction that a multiprocessor holds.
const CTAS: usize = 8;

/// Keeps the compiler honest about what a kernel is given.
const _: () = assert!(size_of::<DevicePtr>() == size_of::<*const c_void>());
/// Both languages count alike.
const _: () = assert!(MAX_WEIGHTS == GEMMESH_MAX_WEIGHTS as usize);
/// A cut lies between two steps of a kernel.
const _: () = assert!(CUT_COLUMNS == GEMMESH_TILE_K as usize);
