//! A problem becomes a plan: the pulls and the tiles, each in the order in which it is done.

use std::ops::Range;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::schedule;
use crate::error::{Error, Result};

/// The most ranks a group can have.
pub const MAX_WORLD: usize = 64;
/// The most chunks a shard can be pulled in.
pub const MAX_CHUNKS: usize = 64;
/// The most pulls a plan can hold, and so the chunk flags that a rank keeps.
pub const MAX_FLAGS: usize = MAX_WORLD * MAX_CHUNKS;
/// Chunks are cut along K at multiples of this: between steps of GPUs' kernels.
pub const CUT_COLUMNS: usize = 64;
/// The most CTAs in a cluster.
pub const MAX_CLUSTER: usize = 16;
/// The largest extent of a matrix: tile coordinates are 32-bit signed numbers on a GPU.
pub const MAX_EXTENT: usize = i32::MAX as usize;

/// What is to be computed, seen by one rank: `out[M, N] = gather(a)[M, K] · b[N, K]ᵀ`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Problem {
    /// Rank r owns the rows `offsets[r]..offsets[r + 1]`.
    offsets: Arc<[usize]>,
    n: usize,
    k: usize,
    rank: usize,
}

impl Problem {
    /// `m` rows split over `world` ranks as evenly as whole rows allow, the longer shards first.
    ///
    /// # Errors
    /// [`Error::Limit`] when an extent is 0 or above [`MAX_EXTENT`], `world` is 0 or above [`MAX_WORLD`],
    /// or `rank` is not below `world`.
    pub fn balanced(m: usize, n: usize, k: usize, rank: usize, world: usize) -> Result<Problem> {
        limit("world size", world, 1, MAX_WORLD)?;
        Problem::with_rows(&balanced_rows(m, world), n, k, rank)
    }

    /// `rows[r]` rows for rank r; a rank may have none.
    ///
    /// # Errors
    /// As [`Problem::balanced`]; M is the sum of `rows`.
    pub fn with_rows(rows: &[usize], n: usize, k: usize, rank: usize) -> Result<Problem> {
        limit("world size", rows.len(), 1, MAX_WORLD)?;
        limit("rank", rank, 0, rows.len() - 1)?;
        let mut end = 0usize;
        let mut offsets = vec![0];
        for &count in rows {
            end = end.saturating_add(count);
            offsets.push(end);
        }
        limit("M", end, 1, MAX_EXTENT)?;
        limit("N", n, 1, MAX_EXTENT)?;
        limit("K", k, 1, MAX_EXTENT)?;
        Ok(Problem {
            offsets: offsets.into(),
            n,
            k,
            rank,
        })
    }

    /// The same rows with another N. Allocates nothing.
    pub(crate) fn with_n(&self, n: usize) -> Result<Problem> {
        limit("N", n, 1, MAX_EXTENT)?;
        Ok(Problem { n, ..self.clone() })
    }

    /// M, the rows of all ranks together.
    pub fn m(&self) -> usize {
        self.offsets[self.world()]
    }

    /// N, the columns of `out`: this rank's own.
    pub fn n(&self) -> usize {
        self.n
    }

    /// K, the columns of `a` and of `b`.
    pub fn k(&self) -> usize {
        self.k
    }

    /// The rank that this view is of.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The number of ranks.
    pub fn world(&self) -> usize {
        self.offsets.len() - 1
    }

    /// The rows of the gathered matrix that `rank` owns.
    pub fn rows_of(&self, rank: usize) -> Range<usize> {
        self.offsets[rank]..self.offsets[rank + 1]
    }
}

/// `m` rows over `world` ranks, as evenly as whole rows allow, the longer shards first.
pub fn balanced_rows(m: usize, world: usize) -> Vec<usize> {
    (0..world)
        .map(|rank| m / world + usize::from(rank < m % world))
        .collect()
}

/// Who moves the rows of another rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Transport {
    /// The copy engine of the rank that needs them. On GPUs the only one that needs no kernel of another rank to run; an
    /// operation can't be captured in a graph.
    Pull,
    /// The copy engine of the rank that owns them. Kernels of all ranks must be able to run at the same time: the
    /// documentation of `Cuda` says what that asks of other kernels on the same GPUs. When an operation fails, a rank may write to its peers before they are ready: the gathered rows of
    /// operations before may be lost too.
    Push,
    /// The kernel of the rank that owns them, by stores of warps that have nothing else to do: meant for shards so small
    /// that a copy engine's start counts. Kernels as for [`Transport::Push`], which it is on the host backend.
    Store,
}

/// How a problem is cut up. The result depends on it only in the order in which f32 sums are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Config {
    /// Rows of a tile of the output.
    pub tile_m: usize,
    /// Columns of a tile of the output.
    pub tile_n: usize,
    /// How much of K is brought close to the arithmetic at a time.
    pub tile_k: usize,
    /// Stages of a CTA's ring of loads. The host backend has one.
    pub stages: usize,
    /// CTAs that share the loads of `b`, each with a tile of its own, one above the other. The host backend has one.
    pub cluster: usize,
    /// CTAs that share a tile, each with a part of K, where there are few tiles. The host backend has one.
    pub split_k: usize,
    /// Tile rows that are walked together, column by column, so that a cache holds what they share.
    pub group_m: usize,
    /// Chunks that a shard is moved in, each with its own flag.
    pub chunks: usize,
    /// The same for the shard that comes last in the ring: when it arrives, its tiles are all that is left to do.
    pub last_chunks: usize,
    /// Whether the last chunk of all comes in two parts along K, for tiles to begin with the first. Not with
    /// [`Transport::Store`], whose chunks may be as small as a tile for nothing.
    pub cut_last: bool,
    /// Who moves them.
    pub transport: Transport,
}

impl Config {
    /// Rows of one entry of the table.
    pub(crate) fn entry_rows(&self) -> usize {
        self.tile_m * self.cluster
    }

    pub(crate) fn check(&self) -> Result<()> {
        limit("Config::tile_m", self.tile_m, 1, MAX_EXTENT)?;
        limit("Config::tile_n", self.tile_n, 1, MAX_EXTENT)?;
        limit("Config::tile_k", self.tile_k, 1, MAX_EXTENT)?;
        limit("Config::stages", self.stages, 1, MAX_EXTENT)?;
        limit("Config::cluster", self.cluster, 1, MAX_CLUSTER)?;
        limit("Config::tile_m · cluster", self.entry_rows(), 1, MAX_EXTENT)?;
        limit("Config::split_k", self.split_k, 1, MAX_CLUSTER)?;
        limit("Config::group_m", self.group_m, 1, MAX_EXTENT)?;
        limit("Config::chunks", self.chunks, 1, MAX_CHUNKS)?;
        limit("Config::last_chunks", self.last_chunks, 1, MAX_CHUNKS)
    }

    /// Where the last chunk is cut along K, if it is. Where moving a chunk takes about as long as multiplying it, and
    /// beginning another copy a little, the first part's products then take as long as moving the second.
    pub(crate) fn cut(&self, k: usize) -> Option<usize> {
        let column = (k.div_ceil(CUT_COLUMNS) * 5).div_ceil(8) * CUT_COLUMNS;
        let cut = self.cut_last && self.transport != Transport::Store && column < k;
        cut.then_some(column)
    }
}

/// One chunk of another rank's rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pull {
    /// The rank that owns the rows.
    pub source: usize,
    /// The rows, as indices into the gathered matrix, which are the same on every rank.
    pub rows: Range<usize>,
    /// And their columns: all K, but for the two parts of a chunk that is cut along K.
    pub columns: Range<usize>,
    /// The chunk flag that says that they have arrived.
    pub flag: usize,
}

/// One chunk of this rank's own rows, for a peer: the peer's pull, as its owner sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Push {
    /// The rank that needs the rows.
    pub peer: usize,
    /// The rows, as indices into the gathered matrix, which are the same on every rank.
    pub rows: Range<usize>,
    /// And their columns.
    pub columns: Range<usize>,
    /// The peer's chunk flag that says that they have arrived.
    pub flag: usize,
}

/// One entry of the table: a tile of the output, or as many, one above the other, as a cluster has CTAs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Tile {
    /// The tile's row: output rows from `m * tile_m * cluster`.
    pub m: u32,
    /// The tile's column: output columns from `n * tile_n`.
    pub n: u32,
    flag_begin: u32,
    flag_end: u32,
}

impl Tile {
    pub(super) fn new(m: usize, n: usize, flags: Range<usize>) -> Tile {
        // Every value is below MAX_EXTENT, checked when the plan was made.
        Tile {
            m: m as u32,
            n: n as u32,
            flag_begin: flags.start as u32,
            flag_end: flags.end as u32,
        }
    }

    /// The chunk flags that this tile's rows of `a` wait for; none if they are all this rank's own.
    pub fn flags(&self) -> Range<usize> {
        self.flag_begin as usize..self.flag_end as usize
    }
}

/// What one rank does in an operation, as data: the pulls in the order in which they are made, and
/// the tiles in the order in which they become ready.
///
/// Chunk flags are numbered by rows, and own rows have none. So the flags that a tile needs, whatever
/// chunks or shards it straddles, are one range. The second part of a chunk that is cut along K has the number after the
/// first's.
#[derive(Clone, Debug)]
pub struct Plan {
    problem: Problem,
    config: Config,
    pulls: Vec<Pull>,
    pushes: Vec<Push>,
    /// `pulls[by_source[s]]` are the pulls from rank s.
    by_source: Vec<Range<usize>>,
    /// The rank whose rows a flag guards.
    source_of: Arc<[usize]>,
    late: Option<Late>,
    tiles: Vec<Tile>,
}

/// The second part of a chunk that is cut along K: what tiles need of it they need late.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Late {
    /// Its chunk flag.
    pub flag: usize,
    /// Its first column, a multiple of [`CUT_COLUMNS`].
    pub column: usize,
}

impl Plan {
    /// Plans `problem` as `config` says.
    ///
    /// # Errors
    /// [`Error::Limit`] when a field of `config` is 0, there are more than [`MAX_CHUNKS`] chunks, or the
    /// table would have more than 2²⁸ tiles.
    pub fn new(problem: Problem, config: Config) -> Result<Plan> {
        config.check()?;
        let tiles = problem
            .m()
            .div_ceil(config.entry_rows())
            .saturating_mul(problem.n().div_ceil(config.tile_n));
        limit("tiles of the output", tiles, 1, 1 << 28)?;

        let mut pulls = Vec::new();
        let mut by_source = vec![0..0; problem.world()];
        let cutter = Cutter::new(&problem, &config);
        for source in ring(problem.rank(), problem.world()) {
            let begin = pulls.len();
            let chunks = cutter.chunks(source, problem.rank());
            pulls.extend(chunks.map(|(flag, chunk)| Pull {
                source,
                rows: chunk.rows,
                columns: chunk.columns,
                flag,
            }));
            by_source[source] = begin..pulls.len();
        }
        let mut source_of = vec![0; pulls.len()];
        for pull in &pulls {
            source_of[pull.flag] = pull.source;
        }
        let late = pulls.iter().find(|pull| pull.columns.start > 0);
        let late = late.map(|pull| Late {
            flag: pull.flag,
            column: pull.columns.start,
        });
        let tiles = schedule::tiles(&problem, &config, &pulls);
        let pushes = cutter.pushes();
        Ok(Plan {
            problem,
            config,
            pulls,
            pushes,
            by_source,
            source_of: source_of.into(),
            late,
            tiles,
        })
    }

    /// The problem that was planned.
    pub fn problem(&self) -> &Problem {
        &self.problem
    }

    /// How it was cut up.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Every pull, in the order in which they are made.
    pub fn pulls(&self) -> &[Pull] {
        &self.pulls
    }

    /// Every push, in the order in which they are made: those to r - 1 first, for it needs this rank's rows first, then
    /// those to r - 2, … around the ring.
    pub fn pushes(&self) -> &[Push] {
        &self.pushes
    }

    /// The other ranks, in the order in which their rows are pulled: r + 1, r + 2, … around the ring.
    pub fn sources(&self) -> impl Iterator<Item = usize> + use<> {
        ring(self.problem.rank(), self.problem.world())
    }

    /// The pulls from one rank, in order.
    pub fn pulls_from(&self, source: usize) -> &[Pull] {
        &self.pulls[self.by_source[source].clone()]
    }

    /// The rank whose rows a chunk flag guards.
    pub fn source_of(&self, flag: usize) -> usize {
        self.source_of[flag]
    }

    /// The rank whose rows a tile holds; if it straddles shards, the last one's.
    pub fn source_of_tile(&self, tile: &Tile) -> usize {
        let last = tile.flags().last();
        last.map_or(self.problem.rank(), |flag| self.source_of(flag))
    }

    /// The rank whose rows each chunk flag guards, by flag.
    pub fn sources_of_flags(&self) -> &Arc<[usize]> {
        &self.source_of
    }

    /// The one chunk that tiles do not need from their beginning on, if there is one.
    pub fn late(&self) -> Option<Late> {
        self.late
    }

    /// Every tile of the output once, in the order in which they become ready.
    pub fn tiles(&self) -> &[Tile] {
        &self.tiles
    }

    /// The output rows of a tile.
    pub fn tile_rows(&self, tile: &Tile) -> Range<usize> {
        extent(tile.m, self.config.entry_rows(), self.problem.m())
    }

    /// The output columns of a tile.
    pub fn tile_columns(&self, tile: &Tile) -> Range<usize> {
        extent(tile.n, self.config.tile_n, self.problem.n())
    }
}

fn extent(index: u32, length: usize, end: usize) -> Range<usize> {
    let begin = index as usize * length;
    begin..(begin + length).min(end)
}

fn ring(rank: usize, world: usize) -> impl Iterator<Item = usize> {
    (1..world).map(move |step| (rank + step) % world)
}

/// How a problem is cut into chunks.
struct Cutter<'a> {
    problem: &'a Problem,
    config: &'a Config,
    /// By source: how many chunks its shard is moved in; to the rank for which it is the last, if not.
    counts: Vec<[usize; 2]>,
}

/// A part of a shard that is moved at once.
struct Chunk {
    rows: Range<usize>,
    columns: Range<usize>,
}

impl<'a> Cutter<'a> {
    fn new(problem: &'a Problem, config: &'a Config) -> Cutter<'a> {
        let count = |source, is_last| cut_shard(problem, config, source, is_last).count();
        let counts = (0..problem.world())
            .map(|source| [false, true].map(|is_last| count(source, is_last)))
            .collect();
        Cutter {
            problem,
            config,
            counts,
        }
    }

    /// Whether the shard of `source` is the last that comes to `peer`.
    fn is_last(&self, source: usize, peer: usize) -> bool {
        peer == (source + 1) % self.problem.world()
    }

    /// What the shard of `source` is moved to `peer` in, each with its flag there: a rank numbers the chunks of all
    /// others by rows.
    fn chunks(&self, source: usize, peer: usize) -> impl Iterator<Item = (usize, Chunk)> + use<> {
        let before = (0..source).filter(|&before| before != peer);
        let count = |source: usize| self.counts[source][usize::from(self.is_last(source, peer))];
        let first: usize = before.map(count).sum();
        let is_last = self.is_last(source, peer);
        let chunks = cut_shard(self.problem, self.config, source, is_last).enumerate();
        chunks.map(move |(index, chunk)| (first + index, chunk))
    }

    /// The pulls of the peers from this rank, in the order in which the ring comes to them.
    fn pushes(&self) -> Vec<Push> {
        let (rank, world) = (self.problem.rank(), self.problem.world());
        let peers = (1..world).map(|step| (rank + world - step) % world);
        peers
            .flat_map(|peer| {
                self.chunks(rank, peer).map(move |(flag, chunk)| Push {
                    peer,
                    rows: chunk.rows,
                    columns: chunk.columns,
                    flag,
                })
            })
            .collect()
    }
}

fn cut_shard(
    problem: &Problem,
    config: &Config,
    source: usize,
    is_last: bool,
) -> impl Iterator<Item = Chunk> + use<> {
    let (shard, k) = (problem.rows_of(source), problem.k());
    let (count, cut) = match is_last {
        true => (config.last_chunks, config.cut(k)),
        false => (config.chunks, None),
    };
    chunk_rows(shard.clone(), count, config.entry_rows()).flat_map(move |rows| {
        let cut = cut.filter(|_| rows.end == shard.end);
        let columns = [Some(0..cut.unwrap_or(k)), cut.map(|column| column..k)];
        columns.into_iter().flatten().map(move |columns| Chunk {
            rows: rows.clone(),
            columns,
        })
    })
}

/// Cuts `rows` into at most `chunks` parts, about equal, at boundaries of tiles, so that few tiles wait for
/// two chunks; parts that this leaves empty are dropped.
fn chunk_rows(
    rows: Range<usize>,
    chunks: usize,
    entry_rows: usize,
) -> impl Iterator<Item = Range<usize>> {
    let cut = move |i: usize| {
        let even = rows.start + rows.len() * i / chunks;
        match i {
            0 => rows.start,
            _ if i == chunks => rows.end,
            _ => ((even + entry_rows / 2) / entry_rows * entry_rows).clamp(rows.start, rows.end),
        }
    };
    (0..chunks)
        .map(move |i| cut(i)..cut(i + 1))
        .filter(|rows| !rows.is_empty())
}

fn limit(what: &str, value: usize, min: usize, max: usize) -> Result<()> {
    if (min..=max).contains(&value) {
        return Ok(());
    }
    Err(Error::Limit {
        what: what.into(),
        value,
        min,
        max,
    })
}
