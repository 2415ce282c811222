//! The kernel's tables for a product whose blocks go to several places, with partials that are added.

use std::ops::Range;

use crate::backend::cuda::abi::{
    GEMMESH_ADDED, GEMMESH_COPIED, GEMMESH_FINISHED, GEMMESH_PARTIAL, GEMMESH_STORE_ROWS,
    GEMMESH_UNTOLD, GemmeshBlock, GemmeshStore,
};
use crate::backend::cuda::family::Family;
use crate::backend::cuda::family::launch::TARGETS;
#[cfg(doc)]
use crate::error::Kind;
use crate::error::{Error, Result};
use crate::schedule::limits::{limit, require};
use crate::schedule::plan::matrices::PARTIALS;
use crate::schedule::plan::partials::STORED_ROWS;
use crate::schedule::{Addend, Agreed, OutputBlock, Product, Route, Schedule, Sum, Transfer};

/// Where the rows of all blocks go: sums to one matrix, partials to a second one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Places {
    /// The number of the matrix of sums, and which of its rows are written.
    pub out: Option<(usize, Range<usize>)>,
    /// The number of the matrix of partials, both stored and added ones.
    pub partials: Option<usize>,
}

impl Places {
    /// The places of a product's blocks. None if no block adds anything and no block is sent.
    pub fn of(schedule: &Schedule) -> Option<Places> {
        let product = schedule.product()?;
        let adds = |block: &OutputBlock| !block.sum.addends.is_empty();
        let mut sent = schedule.moves().chain(schedule.sent());
        let is_sent = sent.any(|moved| moved.produced.is_some());
        if !is_sent && !product.blocks.iter().any(adds) {
            return None;
        }
        let mut places = Places {
            out: None,
            partials: None,
        };
        for OutputBlock { rows, sum, .. } in &product.blocks {
            if is_finished(sum) {
                let end = sum.first + rows.len();
                let (_, written) = places.out.get_or_insert((sum.out, sum.first..end));
                *written = written.start.min(sum.first)..written.end.max(end);
            } else {
                places.partials = Some(sum.out);
            }
            for addend in &sum.addends {
                if let Addend::Rows { matrix, .. } = *addend {
                    places.partials = Some(matrix);
                }
            }
        }
        Some(places)
    }

    /// Checks that the kernel supports the blocks and their transfers.
    ///
    /// # Errors
    /// [`Kind::Unsupported`] if there are more ranks than a kernel stores to; it and [`Kind::Limit`] for schedules that no
    /// operation needs.
    pub fn check(&self, schedule: &Schedule, product: &Product) -> Result<()> {
        if schedule.uses(Route::Store) && schedule.world() > TARGETS {
            let operation = schedule.agreed().map_or("this", Agreed::name);
            return Err(Error::unsupported(format!(
                "GPUs cannot do {operation} by Route::Store among so many ranks; choose Route::Push (Config::route)"
            )));
        }
        let first = product.blocks.iter().find(|block| is_finished(&block.sum));
        for block in &product.blocks {
            limit("rows of a block on GPUs", block.rows.len(), 1, product.m)?;
            let what = "the weight of a block of partials on GPUs";
            limit(what, block.weight, 0, 0)?;
            self.check_sum(block, first.unwrap_or(block))?;
        }
        let mut sent = schedule.moves().chain(schedule.sent());
        sent.try_for_each(|moved| check_sent(moved, product))
    }

    /// `first`: the first block whose sum is finished.
    fn check_sum(&self, block: &OutputBlock, first: &OutputBlock) -> Result<()> {
        let sum = &block.sum;
        let is_sum = !sum.addends.is_empty();
        // All sums have the same bias, activation and residual, and the same distance from their rows of `a`.
        let finished = |block: &OutputBlock| {
            let OutputBlock { rows, sum, .. } = block;
            let behind = |first: usize| first.wrapping_sub(rows.start);
            let residual = sum.residual.map(|r| (r.matrix, behind(r.first)));
            (sum.bias, sum.activation, residual, behind(sum.first))
        };
        let alike = !is_finished(sum) || finished(first) == finished(block);
        require("sums on GPUs must all be finished in the same way", alike)?;
        let matrix = if is_finished(sum) {
            self.out.as_ref().map(|(number, _)| *number)
        } else {
            self.partials
        };
        let what = "a kernel must store sums to one matrix, and partials to one";
        require(what, matrix == Some(sum.out))?;
        let is_product = |addend: &&Addend| matches!(addend, Addend::Product);
        let products = sum.addends.iter().filter(is_product).count();
        let what = "sums on GPUs must add the product once";
        require(what, products == usize::from(is_sum))?;
        let is_added = |addend: &Addend| match *addend {
            Addend::Product => true,
            Addend::Rows { matrix, .. } => self.partials == Some(matrix),
        };
        let added = sum.addends.iter().all(is_added);
        require("a kernel must add partials of one matrix", added)?;
        let (added, _) = addends(sum);
        let step = |pair: &[usize]| pair[1].wrapping_sub(pair[0]);
        let steps = added.windows(2).map(step);
        let even = steps.clone().zip(steps.skip(1)).all(|(x, y)| x == y);
        require("addends must lie at equal distances on GPUs", even)
    }
}

/// True if a sum is the last of its rows. A rank may also send what it has added up to another that adds it to more.
pub fn is_finished(sum: &Sum) -> bool {
    !sum.addends.is_empty() && sum.out != PARTIALS
}

/// Checks that the kernel can send a transfer's block.
fn check_sent(moved: &Transfer, product: &Product) -> Result<()> {
    let waits_for_none = moved.after.is_empty();
    require("transfers must wait for no flags on GPUs", waits_for_none)?;
    let made = moved.produced.filter(|_| moved.route != Route::Pull);
    let made = made.and_then(|block| product.blocks.get(block));
    let what = "transfers beside a product must wait for a block of it on GPUs";
    require(what, made.is_some())?;
    let Some(OutputBlock { rows, sum, .. }) = made.filter(|_| moved.route == Route::Store) else {
        return Ok(());
    };
    limit("regions that a kernel stores", moved.regions.len(), 1, 1)?;
    let (from, to) = (&moved.regions[0].from, &moved.regions[0].to);
    let is_whole = from.matrix == sum.out
        && to.matrix == sum.out
        && from.rows == (sum.first..sum.first + rows.len())
        && from.columns == to.columns
        && from.columns.start == 0
        && from.columns.end >= product.n();
    let is_within = sum.addends.is_empty() || to.rows == from.rows;
    require("a kernel must store whole blocks", is_whole && is_within)
}

/// The kernel's tables of blocks.
#[derive(Debug, Default)]
pub struct BlockTables {
    pub blocks: Vec<GemmeshBlock>,
    pub stores: Vec<GemmeshStore>,
}

impl BlockTables {
    pub fn of(family: &dyn Family, schedule: &Schedule, places: &Places) -> BlockTables {
        let mut tables = BlockTables::default();
        let Some(product) = schedule.product() else {
            return tables;
        };
        let warps = family.storing_warps() * product.config.tile.cluster_m as u32;
        let mut tiles = vec![0u32; product.blocks.len()];
        for tile in schedule.tiles() {
            tiles[tile.block as usize] += 1;
        }
        let mut sent: Vec<Vec<&Transfer>> = vec![Vec::new(); product.blocks.len()];
        for moved in schedule.moves().chain(schedule.sent()) {
            if let Some(block) = moved.produced {
                sent[block].push(moved);
            }
        }
        for ((block, sent), tiles) in product.blocks.iter().zip(sent).zip(tiles) {
            tables.add(schedule, places, block, &sent, tiles * warps);
        }
        tables
    }

    /// Adds a block. `sent`: its transfers. `reports`: the number of reports that all of its rows are stored.
    fn add(
        &mut self,
        schedule: &Schedule,
        places: &Places,
        OutputBlock { rows, sum, .. }: &OutputBlock,
        sent: &[&Transfer],
        reports: u32,
    ) {
        let is_sum = !sum.addends.is_empty();
        // The number of this rank's tensor map, and the matrix's row at which the maps begin.
        let (own_map, origin) = match (&places.out, is_finished(sum)) {
            (Some((_, rows)), true) => (TARGETS, rows.start),
            _ => (0, 0),
        };
        let store_begin = self.stores.len();
        let is_copied = sent
            .iter()
            .any(|moved| matches!(moved.route, Route::Push | Route::Net));
        // Partials that are stored to a peer directly need no place in this rank's memory, unless somebody reads them
        // here.
        if is_sum || is_copied || sent.is_empty() || schedule.reduction().is_some() {
            self.stores.push(GemmeshStore {
                map: own_map as u32,
                row: (sum.first - origin) as u32,
                to: schedule.rank() as u32,
                flag: if is_copied {
                    GEMMESH_COPIED
                } else {
                    GEMMESH_UNTOLD
                },
            });
        }
        self.add_stores_to_peers(schedule, sent, [own_map, origin]);
        let (addends, before) = addends(sum);
        let first = addends.first().copied().unwrap_or(0);
        self.blocks.push(GemmeshBlock {
            row: rows.start as u32,
            rows: rows.len() as u32,
            addend: first as u32,
            addend_step: addends.get(1).map_or(0, |next| next.wrapping_sub(first)) as u32,
            addends: addends.len() as u16,
            before: before as u16,
            store_begin: store_begin as u32,
            stores: (self.stores.len() - store_begin) as u16,
            sum: match (is_sum, is_finished(sum)) {
                (false, _) => GEMMESH_PARTIAL,
                (true, false) => GEMMESH_ADDED,
                (true, true) => GEMMESH_FINISHED,
            } as u16,
            reports: if sent.is_empty() { 0 } else { reports },
        });
    }

    /// Adds the transfers of a block that the kernel stores. Maps are counted from this rank's, and rows from `origin`.
    fn add_stores_to_peers(
        &mut self,
        schedule: &Schedule,
        sent: &[&Transfer],
        [own_map, origin]: [usize; 2],
    ) {
        let (rank, world) = (schedule.rank(), schedule.world());
        let stored = sent.iter().filter(|moved| moved.route == Route::Store);
        self.stores.extend(stored.map(|moved| GemmeshStore {
            map: (own_map + (moved.to + world - rank) % world) as u32,
            row: (moved.regions[0].to.rows.start - origin) as u32,
            to: moved.to as u32,
            flag: moved.flag as u32,
        }));
    }
}

/// The first row of each addend other than the product, and how many of these come before the product.
fn addends(sum: &Sum) -> (Vec<usize>, usize) {
    let is_product = |addend: &Addend| matches!(addend, Addend::Product);
    let rows = sum.addends.iter().filter_map(|addend| match *addend {
        Addend::Product => None,
        Addend::Rows { first, .. } => Some(first),
    });
    let before = sum.addends.iter().position(is_product);
    (rows.collect(), before.unwrap_or(0))
}

const _: () = assert!(STORED_ROWS == GEMMESH_STORE_ROWS as usize);

// SAFETY: plain words without padding, for which any bits are valid.
unsafe impl bytemuck::Zeroable for GemmeshBlock {}
// SAFETY: as above.
unsafe impl bytemuck::Pod for GemmeshBlock {}
// SAFETY: as above.
unsafe impl bytemuck::Zeroable for GemmeshStore {}
// SAFETY: as above.
unsafe impl bytemuck::Pod for GemmeshStore {}
