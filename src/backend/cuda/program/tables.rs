//! The tables that kernels read: their contents and their addresses.

use std::mem::offset_of;

use super::block_table::BlockTables;
use super::k_slices::SliceEntry;
use super::sends;
use super::support::Destination;
use crate::backend::cuda::abi::{GemmeshCopyTask, GemmeshSend, GemmeshSlice, GemmeshTile};
use crate::backend::cuda::driver::DevicePtr;
use crate::backend::cuda::gpu::Gpu;
use crate::backend::cuda::gpu::tables::HeldTables;
use crate::error::Result;
use crate::schedule::{Route, Schedule, Tile};

/// The addresses of a program's tables, named as in abi.h.
#[derive(Debug)]
pub struct ProgramTables {
    pub tiles: DevicePtr,
    pub slices: DevicePtr,
    /// By flag: the rank whose rows it guards.
    pub sources: DevicePtr,
    /// The chunks that a product's kernel stores for peers.
    pub tasks: DevicePtr,
    pub task_count: u32,
    /// What a collective's kernel stores. Arrivals stand after it if they come through low-latency areas.
    pub sends: DevicePtr,
    pub send_count: u32,
    pub blocks: DevicePtr,
    pub stores: DevicePtr,
    pub reports: DevicePtr,
}

impl ProgramTables {
    /// Uploads the tables of a schedule. `entries`: those of the kernel's table if K is cut, otherwise empty.
    pub fn hold(
        gpu: &Gpu,
        schedule: &Schedule,
        destination: &Destination,
        entries: &[SliceEntry],
    ) -> Result<(HeldTables, ProgramTables)> {
        let sources: Vec<u32> = schedule
            .sources()
            .iter()
            .map(|&source| source as u32)
            .collect();
        let tasks = tasks(schedule);
        let (sends, send_count) = sends::table(schedule);
        let BlockTables { blocks, stores } = match destination {
            Destination::Places(places) => BlockTables::of(gpu.kernels.family, schedule, places),
            _ => BlockTables::default(),
        };
        let none_yet = vec![0u32; blocks.len()];
        let cut: Vec<Tile> = entries.iter().map(|e| schedule.tiles()[e.tile]).collect();
        let tiles = if entries.is_empty() {
            schedule.tiles()
        } else {
            &cut
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

/// The chunks that a product's kernel stores, by warps that have nothing else to do.
fn tasks(schedule: &Schedule) -> Vec<GemmeshCopyTask> {
    let stored = schedule
        .moves()
        .filter(|transfer| transfer.route == Route::Store && transfer.produced.is_none());
    let tasks = stored.map(|transfer| {
        let piece = |number: usize| {
            let Some(moved) = transfer.regions.get(number) else {
                return (0, 0);
            };
            let spec = &schedule.matrices()[moved.from.matrix];
            let extent = spec.extent_of(&moved.from, spec.row_bytes());
            let bytes = extent.contiguous().unwrap_or(0);
            (extent.offset as u64, bytes as u32)
        };
        let ((offset, bytes), (beside_offset, beside_bytes)) = (piece(0), piece(1));
        GemmeshCopyTask {
            offset,
            bytes,
            peer: transfer.to as u32,
            flag: transfer.flag as u32,
            beside_bytes,
            beside_offset,
        }
    });
    let mut all = Vec::with_capacity(schedule.moves().count());
    all.extend(tasks);
    all
}

/// The kernel reads the schedule's tiles as they lie in memory.
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
