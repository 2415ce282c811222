//! How an operation is cut up.

pub use super::layout::MAX_CHUNKS;

use super::layout::MAX_EXTENT;
use super::limits::{limit, require};
use crate::error::Result;
use crate::route::Route;

/// Chunks are cut along K at multiples of this: between steps of GPUs' kernels.
pub const CUT_COLUMNS: usize = 64;
/// The most CTAs in a cluster.
pub const MAX_CLUSTER: usize = 16;
/// The most slices of K.
pub const MAX_SLICES: usize = 64;

/// How an operation is cut up: the tiles, the chunks, and who moves these. The result depends on it only in the order
/// in which f32 sums are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Config {
    /// What a kernel is made for.
    pub tile: TileShape,
    /// How rows are cut.
    pub chunking: Chunking,
    /// Who moves them.
    pub route: Route,
}

/// What the bits of a product may depend on, where the library chooses how it is cut up
/// ([`Builder::numerics`](crate::Builder::numerics)).
///
/// They never depend on what comes first; nor, but for [`Numerics::StreamK`], on who makes a row, who owns it, or how
/// it is moved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Numerics {
    /// On everything that affects speed: where there are few tiles, K is cut into parts, which are summed apart and
    /// then added. How many depends on M, N, K and the number of ranks.
    #[default]
    Fast,
    /// On K, the type of the elements and the device only, and for sums on how K is spread over the ranks: no rank cuts
    /// its K. A row of a batch has the bits that it has in any other. (A configuration that a call gives the host
    /// backend still says how deep its steps through K are.)
    Invariant,
    /// As [`Numerics::Fast`], and tiles of one product need not be cut alike ([`TileShape::stream_k`]). What that gives
    /// up: rows of `a` that are equal may have different products, and a row's bits depend also on who makes it, who
    /// owns it, how rows are moved, whether they are moved at all, and how many multiprocessors the GPU has. The same
    /// call of the same ranks on the same GPUs still has the same bits each time.
    StreamK,
}

/// The tiles of an output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct TileShape {
    /// Rows of a tile of the output.
    pub m: usize,
    /// Columns of a tile of the output.
    pub n: usize,
    /// How much of K is brought close to the arithmetic at a time.
    pub k: usize,
    /// Stages of a CTA's ring of loads. The host backend has one.
    pub stages: usize,
    /// CTAs that share the loads of `b`, each with a tile of its own, one above the other. The host backend has one.
    pub cluster: usize,
    /// CTAs that share a tile, each with a part of K, where there are few tiles. The host backend has one.
    pub split_k: usize,
    /// Slices of K that are multiplied apart and added through memory, where tiles are few or leave a part of the
    /// device idle. The host backend has one.
    pub k_slices: usize,
    /// Stream-K: tiles that would not fill a last wave are cut along K wherever that gives all CTAs the same to do,
    /// each elsewhere. Only where [`Numerics::StreamK`] is asked for, and not where partial sums are sent. The host
    /// backend has no such thing.
    pub stream_k: bool,
    /// Tile rows that are walked together, column by column, so that a cache holds what they share.
    pub group_m: usize,
}

/// The chunks that a shard is copied in, each with its own flag. What kernels store of rows that are gathered is cut
/// much finer, whatever stands here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Chunking {
    /// How many. Of an all-reduce it is the number of panels.
    pub count: usize,
    /// The same for the shard that comes last in the ring: when it arrives, its tiles are all that is left to do. Of
    /// partial sums, for those that are sent last: when they are made, all that is left to do is to move them.
    pub last: usize,
    /// Whether the last chunk of all comes in two parts along K, for tiles to begin with the first.
    pub cut_last: bool,
}

impl Config {
    /// All of it.
    pub const fn new(tile: TileShape, chunking: Chunking, route: Route) -> Config {
        Config {
            tile,
            chunking,
            route,
        }
    }

    /// The same by another route.
    #[must_use]
    pub const fn with_route(self, route: Route) -> Config {
        Config { route, ..self }
    }

    /// Rows of one entry of the table.
    pub(crate) fn entry_rows(&self) -> usize {
        self.tile.m * self.tile.cluster
    }

    pub(crate) fn check(&self) -> Result<()> {
        let TileShape {
            m,
            n,
            k,
            stages,
            cluster,
            split_k,
            k_slices,
            stream_k,
            group_m,
        } = self.tile;
        limit("Config::tile.m", m, 1, MAX_EXTENT)?;
        limit("Config::tile.n", n, 1, MAX_EXTENT)?;
        limit("Config::tile.k", k, 1, MAX_EXTENT)?;
        limit("Config::tile.stages", stages, 1, MAX_EXTENT)?;
        limit("Config::tile.cluster", cluster, 1, MAX_CLUSTER)?;
        let rows = "Config::tile.m · tile.cluster";
        limit(rows, self.entry_rows(), 1, MAX_EXTENT)?;
        limit("Config::tile.split_k", split_k, 1, MAX_CLUSTER)?;
        limit("Config::tile.k_slices", k_slices, 1, MAX_SLICES)?;
        if k_slices > 1 {
            let what = "Config::tile.split_k, where k_slices is above 1,";
            limit(what, split_k, 1, 1)?;
        }
        if stream_k {
            let what = "Config::tile.split_k · tile.k_slices, where stream_k is set,";
            limit(what, split_k * k_slices, 1, 1)?;
        }
        limit("Config::tile.group_m", group_m, 1, MAX_EXTENT)?;
        limit("Config::chunking.count", self.chunking.count, 1, MAX_CHUNKS)?;
        limit("Config::chunking.last", self.chunking.last, 1, MAX_CHUNKS)
    }

    /// Refuses to cut K where the bits must not depend on it.
    ///
    /// # Errors
    /// [`Error::Limit`](crate::Error::Limit); [`Error::Unsupported`](crate::Error::Unsupported) of tiles that are cut.
    pub(crate) fn check_numerics(&self, numerics: Numerics) -> Result<()> {
        if numerics == Numerics::Invariant {
            let TileShape {
                split_k, k_slices, ..
            } = self.tile;
            let what = "Config::tile.split_k, where Numerics::Invariant is asked for,";
            limit(what, split_k, 1, 1)?;
            let what = "Config::tile.k_slices, where Numerics::Invariant is asked for,";
            limit(what, k_slices, 1, 1)?;
        }
        if numerics != Numerics::StreamK {
            let what = "Config::tile.stream_k must be false unless Numerics::StreamK is asked for";
            require(what, !self.tile.stream_k)?;
        }
        Ok(())
    }

    /// Where the last chunk is cut along K, if it is. Where moving a chunk takes about as long as multiplying it, and
    /// beginning another copy a little, the first part's products then take as long as moving the second.
    pub(crate) fn cut(&self, k: usize) -> Option<usize> {
        let column = (k.div_ceil(CUT_COLUMNS) * 5).div_ceil(8) * CUT_COLUMNS;
        let cut = self.chunking.cut_last && self.route != Route::Store && column < k;
        cut.then_some(column)
    }
}

impl TileShape {
    /// Tiles of `m` rows and `n` columns, of which `k` columns of the operands are brought close at a time: one CTA a
    /// tile, with one stage, row by row.
    pub const fn new(m: usize, n: usize, k: usize) -> TileShape {
        TileShape {
            m,
            n,
            k,
            stages: 1,
            cluster: 1,
            split_k: 1,
            k_slices: 1,
            stream_k: false,
            group_m: 1,
        }
    }

    /// With as many stages of loads.
    #[must_use]
    pub const fn with_stages(self, stages: usize) -> TileShape {
        TileShape { stages, ..self }
    }

    /// With as many CTAs that share the loads of `b`.
    #[must_use]
    pub const fn with_cluster(self, cluster: usize) -> TileShape {
        TileShape { cluster, ..self }
    }

    /// With as many CTAs that share a tile.
    #[must_use]
    pub const fn with_split_k(self, split_k: usize) -> TileShape {
        TileShape { split_k, ..self }
    }

    /// With as many slices of K.
    #[must_use]
    pub const fn with_k_slices(self, k_slices: usize) -> TileShape {
        TileShape { k_slices, ..self }
    }

    /// With tiles that are cut along K to fill the last wave, or not.
    #[must_use]
    pub const fn with_stream_k(self, stream_k: bool) -> TileShape {
        TileShape { stream_k, ..self }
    }

    /// With as many tile rows that are walked together.
    #[must_use]
    pub const fn with_group_m(self, group_m: usize) -> TileShape {
        TileShape { group_m, ..self }
    }
}

impl Chunking {
    /// As many chunks a shard, the last one's too.
    pub const fn new(count: usize) -> Chunking {
        Chunking {
            count,
            last: count,
            cut_last: false,
        }
    }

    /// With as many chunks of the last shard.
    #[must_use]
    pub const fn with_last(self, last: usize) -> Chunking {
        Chunking { last, ..self }
    }

    /// With the last chunk of all cut along K, or not.
    #[must_use]
    pub const fn with_cut_last(self, cut_last: bool) -> Chunking {
        Chunking { cut_last, ..self }
    }
}
