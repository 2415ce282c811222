//! Few rows, which kernels send to the ranks' low-latency areas.
//!
//! No one says first that an area may be written, and no flag follows the data. cuda/protocol/low_latency.cuh says why
//! this is safe. The warps that make partial sums send them, and add the arrivals.

use std::ops::Range;

use crate::backend::cuda::abi::{
    GEMMESH_LOW_LATENCY_BYTES, GEMMESH_MAX_TARGETS, GemmeshLowLatency,
};
use crate::backend::cuda::shared::words::Control;
use crate::schedule::plan::partials::{PADDED_COLUMNS, has_low_tiles};
use crate::schedule::{Addend, Config, Reduction, Schedule};

/// Bytes of a rank's area.
const BYTES: usize = GEMMESH_LOW_LATENCY_BYTES as usize;
/// Bytes of what is stored at once, with two tags.
const UNIT: usize = 16;
/// Elements in a unit.
const ELEMENTS: usize = 4;

/// By rank: the rows whose sums the rank gets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LowLatencyRows(Vec<Range<usize>>);

impl LowLatencyRows {
    /// The rows of a one-shot schedule, if its kernel can use low latency and the areas have room. The same on every
    /// rank.
    pub fn of(schedule: &Schedule) -> Option<LowLatencyRows> {
        let (product, world) = (schedule.product()?, schedule.world());
        let [block] = &product.blocks[..] else {
            return None;
        };
        if !schedule.is_one_shot()
            || schedule.has_waiting_tiles()
            || !fits(&product.config, [product.m, product.n()], world)
        {
            return None;
        }
        // The output rows to which a range of partials belongs.
        let before = block.sum.first;
        let of = |partials: Range<usize>| partials.start - before..partials.end - before;
        let mut rows = vec![0..0; world];
        for sent in schedule.moves() {
            let [moved] = &sent.regions[..] else {
                return None;
            };
            rows[sent.to] = of(moved.from.rows.clone());
        }
        let rank = schedule.rank();
        if let Some(Reduction { rows: own, sum, .. }) = schedule.reduction() {
            let &Addend::Rows { first, .. } = sum.addends.get(rank)? else {
                return None;
            };
            rows[rank] = of(first..first + own);
        }
        Some(LowLatencyRows(rows))
    }

    /// The first of the rows whose sums `rank` gets.
    pub fn first_row(&self, rank: usize) -> usize {
        self.0[rank].start
    }

    /// The kernel's argument.
    pub fn of_kernel(&self, control: &Control) -> GemmeshLowLatency {
        let mut low_latency = areas(control, self.0.len());
        for (rank, rows) in self.0.iter().enumerate() {
            low_latency.begin[rank] = rows.start as u32;
            low_latency.end[rank] = rows.end as u32;
        }
        low_latency
    }
}

/// The argument of a collective's kernel: the areas of all ranks, without rows of a product.
pub fn areas(control: &Control, world: usize) -> GemmeshLowLatency {
    let mut low_latency = NONE;
    for (rank, area) in low_latency.areas.iter_mut().enumerate().take(world) {
        *area = control.low_latency_area(rank) as *mut _;
    }
    low_latency.share = share(world) as u32;
    low_latency
}

/// Whether areas have room for partials of M rows and N columns, and the configuration's kernel can send them.
pub fn fits(config: &Config, [m, n]: [usize; 2], world: usize) -> bool {
    let tile = &config.tile;
    let clusters = (tile.cluster_m, tile.cluster_n);
    let has_kernel = has_low_tiles(config) && (clusters, tile.k_slices) == ((1, 1), 1);
    let units = m.saturating_mul(n.next_multiple_of(PADDED_COLUMNS)) / ELEMENTS;
    has_kernel && world <= GEMMESH_MAX_TARGETS as usize && units <= share(world)
}

/// How many bytes a rank can send to another. 0 if there are too many ranks.
pub fn room(world: usize) -> usize {
    let has_areas = world <= GEMMESH_MAX_TARGETS as usize;
    if has_areas {
        share(world) * UNIT / 2
    } else {
        0
    }
}

/// A rank's share of half an area, in units.
fn share(world: usize) -> usize {
    BYTES / UNIT / 2 / world
}

/// The argument of kernels that use no areas.
pub const NONE: GemmeshLowLatency = GemmeshLowLatency {
    areas: [std::ptr::null_mut(); GEMMESH_MAX_TARGETS as usize],
    begin: [0; GEMMESH_MAX_TARGETS as usize],
    end: [0; GEMMESH_MAX_TARGETS as usize],
    share: 0,
    reserved: 0,
};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::DType;
    use crate::schedule::Operation;
    use crate::schedule::plan::partials::LOW_ROWS;
    use crate::schedule::plan::plan;
    use crate::schedule::{Chunking, Layout, Problem, Route, TileShape};

    fn planned(operation: Operation, rows: &[usize], n: usize, tile_m: usize) -> Vec<Schedule> {
        let layout = Layout::new(rows, 512).unwrap();
        let problem = Problem::new(operation, DType::Bf16, layout, n);
        let tile = TileShape::new(tile_m, 128, 64);
        let config = Config::new(tile, Chunking::new(1), Route::Store);
        let ranks = 0..rows.len();
        ranks
            .map(|rank| plan(&problem, rank, config).unwrap())
            .collect()
    }

    fn areas_of(operation: Operation, rows: &[usize], n: usize) -> Vec<Option<LowLatencyRows>> {
        let schedules = planned(operation, rows, n, LOW_ROWS);
        schedules.iter().map(LowLatencyRows::of).collect()
    }

    #[test]
    fn each_rank_gets_its_rows_of_a_reduce_scatter_and_all_of_an_all_reduce() {
        for rows in [&[5, 3][..], &[0, 1], &[1, 0, 63], &[8; 8]] {
            let (m, world) = (rows.iter().sum::<usize>(), rows.len());
            let all = LowLatencyRows(vec![0..m; world]);
            assert_eq!(
                areas_of(Operation::MATMUL_ALL_REDUCE, rows, 1000),
                vec![Some(all); world]
            );
            let mut end = 0;
            let own = rows.iter().map(|&count| {
                end += count;
                // No one sends rows to a rank that has none.
                if count == 0 { 0..0 } else { end - count..end }
            });
            let own = LowLatencyRows(own.collect());
            assert_eq!(
                areas_of(Operation::MATMUL_REDUCE_SCATTER, rows, 1000),
                vec![Some(own); world]
            );
        }
    }

    #[test]
    fn there_is_room_for_all_that_is_exchanged_by_the_tiles_that_can() {
        for world in 2..=9 {
            for m in [1, 2, 7, 63, 64, 500] {
                for n in [1, 8, 1000, 2048, 8184, 8192, 8200, 1 << 19] {
                    let mut rows = vec![0; world];
                    rows[world - 1] = m;
                    for operation in Operation::SUMS {
                        for schedule in planned(operation, &rows, n, LOW_ROWS) {
                            let is_low_latency = LowLatencyRows::of(&schedule).is_some();
                            assert_eq!(schedule.is_one_shot(), is_low_latency, "{world} {m} {n}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn what_is_too_large_or_made_by_other_kernels_is_not_sent_by_low_latency() {
        for operation in Operation::SUMS {
            for schedule in planned(operation, &[20, 30], 256, 128) {
                assert_eq!(LowLatencyRows::of(&schedule), None);
            }
            let large = areas_of(operation, &[32, 32], 16_384);
            assert_eq!(large, [None, None]);
        }
        // Ranks without rows make only others' rows, in one block. This is not one-shot, because the transfers wait for
        // the block.
        assert_eq!(
            areas_of(Operation::MATMUL_REDUCE_SCATTER, &[0, 0, 90], 4096),
            [None, None, None]
        );
        // Rows of more than one tile are sent as they are made, too.
        assert!(
            areas_of(Operation::MATMUL_ALL_REDUCE, &[100, 30], 256)
                .iter()
                .all(Option::is_some)
        );
    }
}
