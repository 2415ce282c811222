//! The order of the tiles, and of the ranks.

use crate::error::{Error, Result};
use crate::schedule::{Config, Problem, Product, Route, Tile, Transfer};

/// The bytes of a product's tiles, about: for who asks beforehand whether there is so much memory.
pub fn bytes(problem: &Problem, config: &Config) -> usize {
    let rows = problem.layout.m().div_ceil(config.entry_rows().max(1));
    let columns = problem
        .form
        .multiplied(problem.n)
        .div_ceil(config.tile.n.max(1));
    rows.saturating_mul(columns)
        .saturating_mul(size_of::<Tile>())
}

/// Every tile of the output, in the order in which they become ready.
///
/// First the order that a cache likes: groups of `group_m` tile rows, each walked column by column, so
/// that a group's rows of `a` and a column's rows of `b` are used again while they are near. Then a
/// stable sort by readiness, which moves whole shards in front of others and keeps the grouping inside:
/// tiles of rows that are there first, then each tile after the last arrival that it needs. (The rank pivot of
/// symm-mem-recipes' `triton_all_gather_matmul.py`, for any split of rows.)
///
/// Not so where a kernel stores rows of few tiles, and `b` is larger than a cache: the rows come in less time than it
/// takes to read `b` once more for them.
///
/// `matrix` is the one whose rows arrive; its chunk flags are numbered by rows.
///
/// # Errors
/// [`Error::OutOfMemory`] of `rank`.
pub fn tiles(
    rank: usize,
    product: &Product,
    matrix: usize,
    arrivals: &[Transfer],
) -> Result<Vec<Tile>> {
    let mut rows = tile_rows(product, matrix, arrivals);
    let n = product.weights.iter().map(|weight| weight.n).sum();
    match reads_once(&product.config, [product.m, n, product.k]) {
        true => rows.iter_mut().for_each(|row| row.ready = 0),
        false => rows.sort_by_key(|row| row.ready),
    }
    walk(rank, product, &rows)
}

/// Whether a column of tiles should have all its rows before the next one is begun, in a product of M, N and K.
pub fn reads_once(config: &Config, [m, n, k]: [usize; 3]) -> bool {
    /// Elements of `b` that stay in a cache, about.
    const CACHED: usize = 12 << 20;
    let has_few_rows = m.div_ceil(config.entry_rows()) <= config.tile.group_m;
    config.route == Route::Store && has_few_rows && n.saturating_mul(k) > CACHED
}

/// The tiles of these tile rows: of each group, the rows that become ready together, column by column, weight after
/// weight. Of several weights the rows are of the first one's block, behind which the others' stand.
///
/// # Errors
/// [`Error::OutOfMemory`] of `rank`.
pub fn walk(rank: usize, product: &Product, rows: &[TileRow]) -> Result<Vec<Tile>> {
    let config = &product.config;
    let count = |weight: usize| product.weights[weight].n.div_ceil(product.tile_columns()) as u32;
    let columns = || {
        (0..product.outputs())
            .flat_map(|weight| (0..count(weight)).map(move |n| (weight as u32, n)))
    };
    let count = rows.len() * columns().count();
    let mut tiles = Vec::new();
    if tiles.try_reserve_exact(count).is_err() {
        let refused = Error::out_of_memory(rank, count * size_of::<Tile>());
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
    /// The first of them.
    pub first: Tile,
    /// Where it stands among those that become ready at other times: for rows that arrive, 0 if it waits for no chunk,
    /// else 1 + the position among the arrivals of the last one that it waits for.
    pub ready: usize,
}

fn tile_rows(product: &Product, matrix: usize, arrivals: &[Transfer]) -> Vec<TileRow> {
    // Flags are numbered by rows: (rows, position in the order of arrivals) by flag.
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

/// The other ranks, in the order in which their rows come: r + 1, r + 2, … around the ring.
pub fn ring(rank: usize, world: usize) -> impl Iterator<Item = usize> + Clone {
    (1..world).map(move |step| (rank + step) % world)
}
