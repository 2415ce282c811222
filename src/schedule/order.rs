//! The order of the tiles.

use std::ops::Range;

use super::{Product, Tile, Transfer};

/// Every tile of the output, in the order in which they become ready.
///
/// First the order that a cache likes: groups of `group_m` tile rows, each walked column by column, so
/// that a group's rows of `a` and a column's rows of `b` are used again while they are near. Then a
/// stable sort by readiness, which moves whole shards in front of others and keeps the grouping inside:
/// tiles of rows that are there first, then each tile after the last arrival that it needs. (The rank pivot of
/// symm-mem-recipes' `triton_all_gather_matmul.py`, for any split of rows.)
///
/// `matrix` is the one whose rows arrive; its chunk flags are numbered by rows. Without `waits`, tiles stand in this order and
/// wait for nothing.
pub fn tiles(product: &Product, matrix: usize, arrivals: &[Transfer], waits: bool) -> Vec<Tile> {
    let config = &product.config;
    let rows = tile_rows(product, matrix, arrivals);
    let columns = product.n.div_ceil(config.tile.n);

    // A counting sort: where the tiles begin that become ready with arrival s - 1 (s = 0: at once).
    let mut begin = vec![0; arrivals.len() + 2];
    for row in &rows {
        begin[row.ready + 1] += columns;
    }
    for step in 1..begin.len() {
        begin[step] += begin[step - 1];
    }

    let mut tiles = vec![Tile::new(0, 0, 0..0); rows.len() * columns];
    for first in (0..rows.len()).step_by(config.tile.group_m) {
        let group = first..(first + config.tile.group_m).min(rows.len());
        for n in 0..columns {
            for m in group.clone() {
                let place = &mut begin[rows[m].ready];
                let flags = if waits { rows[m].flags.clone() } else { 0..0 };
                tiles[*place] = Tile::new(m, n, flags);
                *place += 1;
            }
        }
    }
    tiles
}

/// What the tiles of one tile row have in common.
struct TileRow {
    /// The flags of the chunks that overlap the row.
    flags: Range<usize>,
    /// 0 when there are none, else 1 + the position of the last of them among the arrivals.
    ready: usize,
}

fn tile_rows(product: &Product, matrix: usize, arrivals: &[Transfer]) -> Vec<TileRow> {
    // Flags are numbered by rows: (rows, position in the order of arrivals) by flag.
    let mut chunks = vec![(0..0, 0); arrivals.len()];
    for (position, arrival) in arrivals.iter().enumerate() {
        let region = arrival.regions.iter().find(|part| part.matrix == matrix);
        if let Some(region) = region {
            chunks[arrival.flag] = (region.rows.clone(), position);
        }
    }
    let entry_rows = product.config.entry_rows();
    let mut begin = 0;
    (0..product.m.div_ceil(entry_rows))
        .map(|m| {
            let first = m * entry_rows;
            let last = (first + entry_rows).min(product.m);
            while begin < chunks.len() && chunks[begin].0.end <= first {
                begin += 1;
            }
            let count = chunks[begin..]
                .iter()
                .take_while(|(rows, _)| rows.start < last)
                .count();
            let flags = begin..begin + count;
            let ready = chunks[flags.clone()]
                .iter()
                .map(|(_, position)| position + 1)
                .max()
                .unwrap_or(0);
            TileRow { flags, ready }
        })
        .collect()
}
