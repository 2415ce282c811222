//! Slices of K: which part of which tile each entry of a kernel's table makes.

use std::ops::Range;

use smallvec::SmallVec;

use crate::backend::cuda::abi::{GEMMESH_TILE_K, GemmeshSlice};
use crate::backend::cuda::gpu::workspace::BYTES;
use crate::refusal::Result;
use crate::schedule::Config;
use crate::schedule::limits::limit;

/// The most shares that stream-K makes of a tile. Adding more takes longer than they save.
const MOST_SHARES: usize = 8;
/// The fewest steps through K of such a share.
const LEAST_STEPS: usize = 4;

/// An entry of the kernel's table if K is cut.
#[derive(Clone, Copy, Debug)]
pub struct SliceEntry {
    /// The number of the tile in the schedule.
    pub tile: usize,
    /// Which slice of the tile it makes.
    pub slice: GemmeshSlice,
}

/// The table's entries for `tiles` tiles of depth `k`, of which `clusters` are made at a time. Empty if K is not cut.
///
/// # Errors
/// `Refusal::Limit` if the workspace has no room for the partial sums.
pub fn cut(config: &Config, tiles: usize, k: usize, clusters: usize) -> Result<Vec<SliceEntry>> {
    let steps = k.div_ceil(GEMMESH_TILE_K as usize);
    let tile = &config.tile;
    let (what, places) = match (tile.k_slices, tile.stream_k) {
        (1, false) => return Ok(Vec::new()),
        (1, true) => ("stream_k", StreamK::of(tiles, steps, clusters).places()),
        (slices, _) => ("k_slices", tiles.saturating_mul(slices)),
    };
    let what = format!("bytes that Config::tile.{what} adds up");
    limit(&what, bytes(config, places), 0, BYTES)?;
    Ok(match tile.k_slices {
        1 => StreamK::of(tiles, steps, clusters).entries(),
        slices => alike(tiles, steps, slices).collect(),
    })
}

/// Bytes of the partial sums of `places` slices.
fn bytes(config: &Config, places: usize) -> usize {
    let factors = [config.entry_rows(), config.tile.n, size_of::<f32>()];
    factors.into_iter().fold(places, usize::saturating_mul)
}

/// Whether the workspace has room for the partial sums of all slices.
pub fn fit(config: &Config, tiles: usize) -> bool {
    bytes(config, tiles.saturating_mul(config.tile.k_slices)) <= BYTES
}

/// Every tile in `count` slices.
fn alike(tiles: usize, steps: usize, count: usize) -> impl Iterator<Item = SliceEntry> {
    (0..tiles * count).map(move |index| {
        let (tile, number) = (index / count, index % count);
        let part = steps * number / count..steps * (number + 1) / count;
        let part = match part.is_empty() {
            // If K is too short to be shared, the slice takes a step behind its end, where operands are zero.
            true => steps..steps + 1,
            false => part,
        };
        entry(tile, part, tile * count, number, count)
    })
}

fn entry(
    tile: usize,
    steps: Range<usize>,
    place: usize,
    number: usize,
    count: usize,
) -> SliceEntry {
    let slice = GemmeshSlice {
        begin: steps.start as u32,
        end: steps.end as u32,
        place: place as u32,
        number: number as u16,
        count: count as u16,
    };
    SliceEntry { tile, slice }
}

/// Stream-K (Osama et al., 2023).
///
/// As many whole tiles are made as fill waves. The steps through K of the other tiles stand in a row, and each cluster
/// gets an equal share of them. A share lies in one tile or in two.
#[derive(Clone, Copy, Debug)]
pub struct StreamK {
    /// Tiles that are not cut.
    whole: usize,
    /// Tiles that are cut, behind the whole ones.
    pub streamed: usize,
    /// The shares into which these are cut.
    pub shares: usize,
    steps: usize,
}

impl StreamK {
    /// Stream-K for `tiles` tiles of `steps` steps each on `clusters` clusters.
    pub fn of(tiles: usize, steps: usize, clusters: usize) -> StreamK {
        let streamed = tiles % clusters;
        let most = (streamed * MOST_SHARES).min(streamed * steps / LEAST_STEPS);
        StreamK {
            whole: tiles - streamed,
            streamed,
            shares: clusters.min(most).max(streamed),
            steps,
        }
    }

    /// How many places of the workspace the slices need.
    fn places(&self) -> usize {
        self.shares + self.streamed
    }

    /// The first step of share `index`, counted over all streamed tiles.
    fn bound(&self, index: usize) -> usize {
        let bound = index * self.streamed * self.steps / self.shares.max(1);
        // A part as short as this is left to the neighbouring share.
        let (behind, before) = (bound % self.steps, self.steps - bound % self.steps);
        match (behind < LEAST_STEPS / 2, before < LEAST_STEPS / 2) {
            (true, _) => bound - behind,
            (_, true) => bound + before,
            _ => bound,
        }
    }

    fn entries(&self) -> Vec<SliceEntry> {
        let bounds: Vec<usize> = (0..=self.shares).map(|index| self.bound(index)).collect();
        let shares = bounds.windows(2).enumerate().map(|(share, ends)| {
            let tiles = ends[0] / self.steps..ends[1].div_ceil(self.steps);
            let of_tile = |tile: usize| {
                let all = tile * self.steps..(tile + 1) * self.steps;
                let part = ends[0].max(all.start) - all.start..ends[1].min(all.end) - all.start;
                let first = bounds.partition_point(|&bound| bound <= all.start) - 1;
                let behind = bounds.partition_point(|&bound| bound < all.end);
                // From one slice to the next, the share or the tile or both advance, so their sum identifies a slice.
                entry(
                    self.whole + tile,
                    part,
                    first + tile,
                    share - first,
                    behind - first,
                )
            };
            tiles.map(of_tile).collect::<SmallVec<[SliceEntry; 2]>>()
        });
        // Clusters take entries in turn. If a share has two entries, the second must come up when its cluster has made
        // the first.
        let (two, one): (Vec<_>, Vec<_>) = shares.partition(|share| share.len() > 1);
        let whole = (0..self.whole).map(|tile| entry(tile, 0..self.steps, 0, 0, 1));
        let first = two.iter().chain(&one).map(|share| share[0]);
        let second = two.iter().flat_map(|share| share[1..].iter().copied());
        whole.chain(first).chain(second).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::backend::cuda::gpu::kernels::{CONSUMER_WARPS, WIDEST, configs};
    use crate::backend::cuda::gpu::workspace::COUNTS;
    use crate::refusal::Refusal;
    use crate::schedule::{Chunking, Route};

    fn with_slices(count: usize) -> impl Iterator<Item = Config> {
        let base = Config::new(WIDEST.with_k_slices(count), Chunking::new(1), Route::Pull);
        configs(base, false, &Default::default())
            .filter(move |config| config.tile.k_slices == count)
    }

    fn streams() -> impl Iterator<Item = Config> {
        let base = Config::new(WIDEST.with_stream_k(true), Chunking::new(1), Route::Pull);
        configs(base, false, &Default::default()).filter(|config| config.tile.stream_k)
    }

    #[test]
    fn slices_that_there_is_no_room_for_are_refused() {
        for config in with_slices(4) {
            let of_tile = config.entry_rows() * config.tile.n * 4 * size_of::<f32>();
            let most = BYTES / of_tile;
            assert_eq!(cut(&config, most, 4096, 66).unwrap().len(), 4 * most);
            match cut(&config, most + 1, 4096, 66).map(|entries| entries.len()) {
                Err(Refusal::Limit {
                    what, value, max, ..
                }) => {
                    assert!(what.contains("k_slices"), "{what}");
                    assert_eq!((value, max), ((most + 1) * of_tile, BYTES));
                }
                other => panic!("{other:?}"),
            };
        }
        for config in with_slices(1) {
            assert_eq!(cut(&config, usize::MAX, 4096, 66).unwrap().len(), 0);
        }
    }

    #[test]
    fn what_stream_k_adds_up_has_room_on_every_gpu_of_this_family() {
        for config in streams() {
            let clusters = 144 / config.tile.cluster;
            assert!(cut(&config, 2 * clusters - 1, 4096, clusters).is_ok());
        }
        assert!(streams().count() > 4);
    }

    #[test]
    fn there_is_a_count_for_each_warp_of_as_many_tiles_as_there_is_room_for() {
        for config in with_slices(2).chain(streams()) {
            let ctas = BYTES / (config.tile.m * config.tile.n * size_of::<f32>());
            assert!(ctas * CONSUMER_WARPS as usize <= COUNTS, "{config:?}");
        }
    }

    /// The slices of each tile, in their order.
    fn by_tile(entries: &[SliceEntry], tiles: usize) -> Vec<Vec<GemmeshSlice>> {
        let mut slices = vec![Vec::new(); tiles];
        entries
            .iter()
            .for_each(|entry| slices[entry.tile].push(entry.slice));
        slices
            .iter_mut()
            .for_each(|of| of.sort_by_key(|slice| slice.number));
        slices
    }

    #[track_caller]
    fn check(entries: &[SliceEntry], tiles: usize, steps: usize) {
        let mut places = Vec::new();
        for slices in by_tile(entries, tiles) {
            let mut reached = 0;
            for (number, slice) in slices.iter().enumerate() {
                assert_eq!(
                    (slice.number as usize, slice.count as usize),
                    (number, slices.len())
                );
                assert_eq!(slice.place, slices[0].place);
                assert!(slice.begin < slice.end);
                if (slice.begin as usize) < steps {
                    assert_eq!(slice.begin, reached);
                    reached = slice.end;
                }
                if slices.len() > 1 {
                    places.push(slice.place as usize + number);
                }
            }
            assert_eq!(reached as usize, steps);
        }
        let count = places.len();
        places.sort();
        places.dedup();
        assert_eq!(places.len(), count, "no two slices leave sums in one place");
    }

    proptest! {
        #[test]
        fn slices_are_all_of_each_tile(tiles in 1usize..40, steps in 1usize..300, count in 2usize..65) {
            let entries: Vec<SliceEntry> = alike(tiles, steps, count).collect();
            prop_assert_eq!(entries.len(), tiles * count);
            check(&entries, tiles, steps);
        }

        #[test]
        fn stream_k_deals_out_as_many_steps_to_each_cluster(
            tiles in 1usize..600, steps in 1usize..300, clusters in 1usize..145
        ) {
            let stream = StreamK::of(tiles, steps, clusters);
            let entries = stream.entries();
            check(&entries, tiles, steps);
            prop_assert!(stream.shares <= clusters);
            let places = entries.iter().map(|entry| entry.slice.place as usize + entry.slice.number as usize);
            prop_assert!(places.max().unwrap_or(0) < stream.places().max(1));
            // as the kernel takes them
            let mut made = vec![0; clusters];
            for (index, entry) in entries.iter().enumerate() {
                made[index % clusters] += (entry.slice.end - entry.slice.begin) as usize;
            }
            let all = tiles * steps;
            let (most, fair) = (made.iter().max().unwrap(), all.div_ceil(clusters));
            // Shares of the minimum length may leave clusters idle.
            let coarse = stream.shares < clusters;
            prop_assert!(*most <= fair + LEAST_STEPS || coarse, "{} {}", most, fair);
            prop_assert!(*most <= tiles.div_ceil(clusters) * steps);
        }
    }
}
