//! The order of the tiles, and of the ranks.

use crate::error::{Error, Result};
use crate::schedule::{Config, Problem, Product, Route, Tile, Transfer};

/// About how many bytes a product's tiles take, for checks of memory before planning.
pub fn bytes(problem: &Problem, config: &Config) -> usize {
    let rows = problem.layout.m().div_ceil(config.entry_rows().max(1));
    let columns = problem
        .form
        .multiplied(problem.n)
        .div_ceil(config.entry_columns().max(1));
    rows.saturating_mul(columns)
        .saturating_mul(size_of::<Tile>())
}

/// Every tile of the output, in the order in which tiles become ready.
///
/// Tiles start in an order that suits the cache: groups of `group_m` tile rows, each walked column by column, so that a
/// group's rows of `a` and a column's rows of `b` are used again while they are cached.
///
/// Then a stable sort by readiness moves whole shards before others and keeps the groups inside them. Tiles whose rows
/// are there come first, then each tile after the last arrival that it needs. (This is the rank pivot of
/// symm-mem-recipes' `triton_all_gather_matmul.py`, for any split of rows.)
///
/// There is no sort if a kernel stores the rows, they have few tiles, and `b` is larger than a cache. Then the rows
/// come in less time than a second read of `b` would take.
///
/// `matrix` is the matrix whose rows arrive. Its chunk flags are numbered in the order of rows.
///
/// # Errors
/// [`Kind::OutOfMemory`](crate::error::Kind::OutOfMemory).
pub fn tiles(product: &Product, matrix: usize, arrivals: &[Transfer]) -> Result<Vec<Tile>> {
    let mut rows = tile_rows(product, matrix, arrivals);
    let n = product.weights.iter().map(|weight| weight.n).sum();
    if reads_once(&product.config, [product.m, n, product.k]) {
        rows.iter_mut().for_each(|row| row.ready = 0)
    } else {
        rows.sort_by_key(|row| row.ready)
    }
    walk(product, &rows)
}

/// True if all rows of a column of tiles should come before the next column, in a product of M, N and K.
pub fn reads_once(config: &Config, [m, n, k]: [usize; 3]) -> bool {
    /// About how many elements of `b` stay in a cache.
    const CACHED: usize = 12 << 20;
    let has_few_rows = m.div_ceil(config.entry_rows()) <= config.tile.group_m;
    config.route == Route::Store && has_few_rows && n.saturating_mul(k) > CACHED
}

/// The tiles of these tile rows. In each group, the rows that become ready together are walked column by column, weight
/// after weight.
///
/// With several weights, the tile rows are those of the first weight's block. The blocks of the other weights follow
/// it.
///
/// # Errors
/// [`Kind::OutOfMemory`](crate::error::Kind::OutOfMemory).
pub fn walk(product: &Product, rows: &[TileRow]) -> Result<Vec<Tile>> {
    let config = &product.config;
    let count = |weight: usize| product.weights[weight].n.div_ceil(product.tile_columns()) as u32;
    let columns = || {
        (0..product.outputs())
            .flat_map(|weight| (0..count(weight)).map(move |n| (weight as u32, n)))
    };
    let count = rows.len() * columns().count();
    let mut tiles = Vec::new();
    if tiles.try_reserve_exact(count).is_err() {
        let refused = Error::out_of_memory(None, count * size_of::<Tile>());
        return Err(refused(rustix::io::Errno::NOMEM.into()));
    }
    let panel = |row: &TileRow| (row.ready, row.first.m as usize / config.tile.group_m);
    for rows in rows.chunk_by(|x, y| panel(x) == panel(y)) {
        for (weight, n) in columns() {
            tiles.extend(rows.iter().map(|row| Tile {
                n,
                block: row.first.block + weight,
                ..row.first
            }));
        }
    }
    Ok(tiles)
}

/// What the tiles of one tile row have in common.
#[derive(Clone, Copy, Debug)]
pub struct TileRow {
    /// The first tile.
    pub first: Tile,
    /// Its place in the order of readiness. For rows that arrive it is 0 if the tiles wait for no chunk, or else 1 +
    /// the position, among the arrivals, of the last chunk that they wait for.
    pub ready: usize,
}

fn tile_rows(product: &Product, matrix: usize, arrivals: &[Transfer]) -> Vec<TileRow> {
    // Flags are numbered in the order of rows. By flag: (rows, position in the order of arrivals).
    let mut chunks = vec![(0..0, 0); arrivals.len()];
    for (position, arrival) in arrivals.iter().enumerate() {
        let mut regions = arrival.regions.iter().map(|moved| &moved.to);
        if let Some(region) = regions.find(|region| region.matrix == matrix) {
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
            TileRow {
                first: Tile::new(0, m, 0, flags),
                ready,
            }
        })
        .collect()
}

/// The other ranks in the order in which their rows come: r + 1, r + 2, and so on around the ring.
pub fn ring(rank: usize, world: usize) -> impl Iterator<Item = usize> + Clone {
    (1..world).map(move |step| (rank + step) % world)
}
