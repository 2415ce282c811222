//! The order of the tiles.

use super::plan::{Config, Problem, Pull, Tile};

/// Every tile of the output, in the order in which they become ready.
///
/// First the order that a cache likes: groups of `group_m` tile rows, each walked column by column, so
/// that a group's rows of `a` and a column's rows of `b` are used again while they are near. Then a
/// stable sort by readiness, which moves whole shards in front of others and keeps the grouping inside:
/// own tiles first, then each tile after the last pull it needs. (The rank pivot of symm-mem-recipes'
/// `triton_all_gather_matmul.py`, for any split of rows.)
pub(super) fn tiles(problem: &Problem, config: &Config, pulls: &[Pull]) -> Vec<Tile> {
    let rows = tile_rows(problem, config, pulls);
    let columns = problem.n().div_ceil(config.tile_n);

    // A counting sort: where the tiles begin that become ready with pull s - 1 (s = 0: at once).
    let mut begin = vec![0; pulls.len() + 2];
    for row in &rows {
        begin[row.ready + 1] += columns;
    }
    for step in 1..begin.len() {
        begin[step] += begin[step - 1];
    }

    let mut tiles = vec![Tile::new(0, 0, 0..0); rows.len() * columns];
    for first in (0..rows.len()).step_by(config.group_m) {
        let group = first..(first + config.group_m).min(rows.len());
        for n in 0..columns {
            for m in group.clone() {
                let place = &mut begin[rows[m].ready];
                tiles[*place] = Tile::new(m, n, rows[m].flags.clone());
                *place += 1;
            }
        }
    }
    tiles
}

/// What the tiles of one tile row have in common.
struct TileRow {
    /// The flags of the chunks that overlap the row.
    flags: std::ops::Range<usize>,
    /// 0 when there are none, else 1 + the position of the last of their pulls.
    ready: usize,
}

fn tile_rows(problem: &Problem, config: &Config, pulls: &[Pull]) -> Vec<TileRow> {
    // Flags are numbered by rows: (rows, position in the order of pulls) by flag.
    let mut chunks = vec![(0..0, 0); pulls.len()];
    for (position, pull) in pulls.iter().enumerate() {
        chunks[pull.flag] = (pull.rows.clone(), position);
    }
    let mut begin = 0;
    (0..problem.m().div_ceil(config.entry_rows()))
        .map(|m| {
            let first = m * config.entry_rows();
            let last = (first + config.entry_rows()).min(problem.m());
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
