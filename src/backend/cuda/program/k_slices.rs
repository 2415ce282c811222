//! Slices of K: which part of which tile each entry of a kernel's table makes.

use crate::Result;
use crate::backend::cuda::abi::GemmeshSlice;
use crate::backend::cuda::gpu::workspace::BYTES;
use crate::schedule::Config;
use crate::schedule::limits::limit;

/// An entry of the kernel's table if K is cut.
#[derive(Clone, Copy, Debug)]
pub struct SliceEntry {
    /// The number of the tile in the schedule.
    pub tile: usize,
    /// Which slice of the tile it makes.
    pub slice: GemmeshSlice,
}

/// The table's entries for `tiles` tiles of depth `k`. Empty if K is not cut.
///
/// # Errors
/// `Kind::Limit` if the workspace has no room for the partial sums.
pub fn cut(config: &Config, tiles: usize, k: usize) -> Result<Vec<SliceEntry>> {
    let slices = config.tile.k_slices;
    if slices == 1 {
        return Ok(Vec::new());
    }
    let what = "bytes that Config::tile.k_slices adds up";
    limit(what, bytes(config, tiles), 0, BYTES)?;
    Ok(entries(tiles, k.div_ceil(config.tile.k), slices).collect())
}

/// Bytes of the partial sums of the slices of `tiles` tiles.
fn bytes(config: &Config, tiles: usize) -> usize {
    let (rows, columns) = (config.entry_rows(), config.entry_columns());
    let factors = [config.tile.k_slices, rows, columns, size_of::<f32>()];
    factors.into_iter().fold(tiles, usize::saturating_mul)
}

/// Whether the workspace has room for the partial sums of all slices.
pub fn fit(config: &Config, tiles: usize) -> bool {
    bytes(config, tiles) <= BYTES
}

/// Every tile of `steps` steps through K, in `count` slices.
fn entries(tiles: usize, steps: usize, count: usize) -> impl Iterator<Item = SliceEntry> {
    (0..tiles * count).map(move |index| {
        let (tile, number) = (index / count, index % count);
        let part = steps * number / count..steps * (number + 1) / count;
        let part = match part.is_empty() {
            // If K is too short to be shared, the slice takes a step after its end, where operands are zero.
            true => steps..steps + 1,
            false => part,
        };
        let slice = GemmeshSlice {
            begin: part.start as u32,
            end: part.end as u32,
            place: (tile * count) as u32,
            number: number as u16,
            count: count as u16,
        };
        SliceEntry { tile, slice }
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::backend::cuda::family::{H200, Variant};
    use crate::backend::cuda::gpu::kernels::configs;
    use crate::backend::cuda::gpu::workspace::counts;
    use crate::element::DType;
    use crate::error::Kind;
    use crate::schedule::{Chunking, Route};

    fn with_slices(count: usize) -> impl Iterator<Item = Config> {
        let base = Config::new(
            H200.family.widest().with_k_slices(count),
            Chunking::new(1),
            Route::Pull,
        );
        configs(
            H200.family,
            base,
            Variant::Forms,
            [DType::Bf16; 2],
            &Default::default(),
        )
        .filter(move |config| config.tile.k_slices == count)
    }

    #[test]
    fn slices_that_there_is_no_room_for_are_refused() {
        for config in with_slices(4) {
            let of_tile = config.entry_rows() * config.entry_columns() * 4 * size_of::<f32>();
            let most = BYTES / of_tile;
            assert_eq!(cut(&config, most, 4096).unwrap().len(), 4 * most);
            let error = cut(&config, most + 1, 4096).expect_err("no room");
            let Kind::Limit {
                what, value, max, ..
            } = error.kind()
            else {
                panic!("{error}");
            };
            assert!(what.contains("k_slices"), "{what}");
            assert_eq!((*value, *max), ((most + 1) * of_tile, BYTES));
        }
        for config in with_slices(1) {
            assert_eq!(cut(&config, usize::MAX, 4096).unwrap().len(), 0);
        }
    }

    #[test]
    fn there_is_a_count_for_each_warp_of_as_many_tiles_as_there_is_room_for() {
        for config in with_slices(2) {
            let ctas = BYTES / (config.tile.m * config.tile.n * size_of::<f32>());
            assert!(
                ctas * H200.family.storing_warps() as usize <= counts(H200.family),
                "{config:?}"
            );
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
            let entries: Vec<SliceEntry> = entries(tiles, steps, count).collect();
            prop_assert_eq!(entries.len(), tiles * count);
            check(&entries, tiles, steps);
        }
    }
}
