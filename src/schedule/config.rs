//! How an operation is cut up.

use std::fmt;

pub use super::layout::MAX_CHUNKS;

use super::layout::MAX_EXTENT;
use super::limits::{limit, require};
use crate::Result;
use crate::route::Route;

/// Chunks are cut along K at multiples of this many columns, so that a cut lies between two steps of a GPU's kernel.
pub const CUT_COLUMNS: usize = 128;
/// The most CTAs in a cluster.
pub const MAX_CLUSTER: usize = 16;
/// The most slices of K.
pub const MAX_SLICES: usize = 64;

/// How an operation is cut up: its tiles, its chunks, and who moves the chunks.
///
/// The result depends on it only in the order in which f32 sums are made.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Config {
    /// The tiles. A kernel is compiled for a tile shape.
    pub tile: TileShape,
    /// How rows are cut into chunks.
    pub chunking: Chunking,
    /// Who moves the chunks.
    pub route: Route,
    /// True if partial sums that are stored ([`Route::Store`]) are stored after the product, by a second kernel, which
    /// also adds up what comes. So the product's kernel may be any, and each rank chooses its own. It affects nothing but
    /// sums that are stored. (Those that are pulled always follow the product, and those that are pushed never do.)
    pub product_first: bool,
    /// The most CTAs of a kernel on GPUs, so that kernels of other libraries have room beside it. Without it a kernel may
    /// take the whole device. It does not affect the result.
    pub max_ctas: Option<usize>,
}

impl fmt::Debug for Config {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Config {
            tile,
            chunking,
            route,
            product_first,
            max_ctas,
        } = self;
        write!(f, "Config({tile:?}, {chunking:?}, {route:?}")?;
        if *product_first {
            f.write_str(" behind the product")?;
        }
        if let Some(most) = max_ctas {
            write!(f, ", max_ctas {most}")?;
        }
        f.write_str(")")
    }
}

/// What the bits of a product may depend on, if the library chooses how it is cut up
/// ([`Builder::numerics`](crate::Builder::numerics)).
///
/// They never depend on which transfer comes first, who makes a row, who owns it, or how it is moved. With one exception:
/// over several hosts a sum over the ranks depends on which host owns its row, and on whether all ranks get few sums.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Numerics {
    /// On all that affects speed. If there are few tiles, K is cut into parts, which are summed separately and then
    /// added. The number of parts depends on M, N, K and the number of ranks.
    #[default]
    Fast,
    /// On K, the type of the elements and the device only. A sum over ranks also depends on how K is spread over the
    /// ranks.
    ///
    /// No rank cuts its K. An element has the same bits in every batch and next to any other columns. (A configuration
    /// that a call gives the host backend still says how deep its steps through K are.)
    Invariant,
}

/// The tiles of an output.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct TileShape {
    /// Rows of a tile of the output.
    pub m: usize,
    /// Columns of a tile of the output.
    pub n: usize,
    /// The columns of K that are loaded in one step.
    pub k: usize,
    /// Stages of a CTA's ring of loads. The host backend has one.
    pub stages: usize,
    /// CTAs of a cluster that share the loads of `b`. Each has a tile of its own, one above the other. The host backend
    /// has one.
    pub cluster_m: usize,
    /// CTAs of a cluster that share the loads of `a`. Each has a tile of its own, side by side. The cluster has
    /// `cluster_m` rows of them. The host backend has one.
    pub cluster_n: usize,
    /// CTAs that share a tile if there are few tiles. Each has a part of K. The host backend has one.
    pub split_k: usize,
    /// Slices of K that are multiplied separately and added through memory. They help if there are few tiles, or if
    /// tiles leave a part of the device idle. The host backend has one.
    pub k_slices: usize,
    /// Tile rows that are walked together, column by column, so that a cache holds the operands that they share.
    pub group_m: usize,
}

impl fmt::Debug for TileShape {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let TileShape { m, n, k, .. } = self;
        write!(f, "TileShape({m}x{n}x{k}")?;
        let options = [
            ("stages", self.stages),
            ("cluster_m", self.cluster_m),
            ("cluster_n", self.cluster_n),
            ("split_k", self.split_k),
            ("k_slices", self.k_slices),
            ("group_m", self.group_m),
        ];
        for (name, value) in options {
            if value != 1 {
                write!(f, ", {name} {value}")?;
            }
        }
        f.write_str(")")
    }
}

/// The chunks that a shard is copied in, each with its own flag.
///
/// If kernels store the rows of a gather, rows are cut much finer, whatever these fields say.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Chunking {
    /// The number of chunks. In an all-reduce it is the number of panels.
    pub count: usize,
    /// The number of chunks of the shard that comes last in the ring. When it arrives, its tiles are all that is left
    /// to do.
    ///
    /// For partial sums, it is the number of chunks of the rows that are sent last. When they are made, only moving
    /// them is left to do.
    pub last: usize,
    /// True if the very last chunk is cut in two along K, so that tiles can begin with the first part.
    pub cut_last: bool,
}

impl fmt::Debug for Chunking {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Chunking {
            count,
            last,
            cut_last,
        } = self;
        let cut = if *cut_last { ", cut_last" } else { "" };
        write!(f, "Chunking({count}, last {last}{cut})")
    }
}

impl Config {
    /// A configuration of these three.
    pub const fn new(tile: TileShape, chunking: Chunking, route: Route) -> Config {
        Config {
            tile,
            chunking,
            route,
            product_first: false,
            max_ctas: None,
        }
    }

    /// Sets whether a product is complete before its partial sums are stored.
    #[must_use]
    pub const fn with_product_first(self, product_first: bool) -> Config {
        Config {
            product_first,
            ..self
        }
    }

    /// Sets the most CTAs of a kernel.
    ///
    /// Tiles that suit the whole device may not suit a part of it. [`Builder::max_ctas`](crate::Builder::max_ctas) makes
    /// the library choose tiles for that part.
    #[must_use]
    pub const fn with_max_ctas(self, max_ctas: usize) -> Config {
        Config {
            max_ctas: Some(max_ctas),
            ..self
        }
    }

    /// The same configuration with a different route.
    #[must_use]
    pub const fn with_route(self, route: Route) -> Config {
        Config { route, ..self }
    }

    /// Whether partial sums are stored after the product.
    pub(crate) fn stores_behind(&self) -> bool {
        self.product_first && self.route == Route::Store
    }

    /// Rows of one entry of the table.
    pub(crate) fn entry_rows(&self) -> usize {
        self.tile.m.saturating_mul(self.tile.cluster_m)
    }

    /// Columns of the product in one entry of the table.
    pub(crate) fn entry_columns(&self) -> usize {
        self.tile.n.saturating_mul(self.tile.cluster_n)
    }

    pub(crate) fn check(&self) -> Result<()> {
        let TileShape {
            m,
            n,
            k,
            stages,
            cluster_m,
            cluster_n,
            split_k,
            k_slices,
            group_m,
        } = self.tile;
        let what = "Config::route must be Route::Pull, Route::Push or Route::Store";
        require(what, self.route != Route::Net)?;
        limit("Config::tile.m", m, 1, MAX_EXTENT)?;
        limit("Config::tile.n", n, 1, MAX_EXTENT)?;
        limit("Config::tile.k", k, 1, MAX_EXTENT)?;
        limit("Config::tile.stages", stages, 1, MAX_EXTENT)?;
        limit("Config::tile.cluster_m", cluster_m, 1, MAX_CLUSTER)?;
        limit("Config::tile.cluster_n", cluster_n, 1, MAX_CLUSTER)?;
        let rows = "Config::tile.m · tile.cluster_m";
        limit(rows, self.entry_rows(), 1, MAX_EXTENT)?;
        let columns = "Config::tile.n · tile.cluster_n";
        limit(columns, self.entry_columns(), 1, MAX_EXTENT)?;
        limit("Config::tile.split_k", split_k, 1, MAX_CLUSTER)?;
        limit("Config::tile.k_slices", k_slices, 1, MAX_SLICES)?;
        if k_slices > 1 {
            let what = "Config::tile.split_k, where k_slices is above 1,";
            limit(what, split_k, 1, 1)?;
        }
        limit("Config::tile.group_m", group_m, 1, MAX_EXTENT)?;
        let most = self.max_ctas.unwrap_or(MAX_EXTENT);
        limit("Config::max_ctas", most, 1, MAX_EXTENT)?;
        limit("Config::chunking.count", self.chunking.count, 1, MAX_CHUNKS)?;
        limit("Config::chunking.last", self.chunking.last, 1, MAX_CHUNKS)
    }

    /// Checks that the tiles cut K only in ways that `numerics` allows.
    ///
    /// # Errors
    /// `Kind::Limit` for parts of K.
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
        Ok(())
    }

    /// The column at which the last chunk is cut along K, if it is.
    ///
    /// It is at 5/8 of K. Moving a chunk takes about as long as multiplying it, and beginning a second copy takes a
    /// little. So multiplying the first part takes about as long as moving the second.
    pub(crate) fn cut(&self, k: usize) -> Option<usize> {
        let column = (k.div_ceil(CUT_COLUMNS) * 5).div_ceil(8) * CUT_COLUMNS;
        let cut = self.chunking.cut_last && self.route != Route::Store && column < k;
        cut.then_some(column)
    }
}

impl TileShape {
    /// Tiles of `m` rows and `n` columns, which load `k` columns of the operands in one step. Each has one CTA with one
    /// stage. They are walked row by row.
    pub const fn new(m: usize, n: usize, k: usize) -> TileShape {
        TileShape {
            m,
            n,
            k,
            stages: 1,
            cluster_m: 1,
            cluster_n: 1,
            split_k: 1,
            k_slices: 1,
            group_m: 1,
        }
    }

    /// Sets the stages of loads.
    #[must_use]
    pub const fn with_stages(self, stages: usize) -> TileShape {
        TileShape { stages, ..self }
    }

    /// Sets the CTAs of a cluster: `m` of them share the loads of `b`, and `n` those of `a`.
    #[must_use]
    pub const fn with_cluster(self, m: usize, n: usize) -> TileShape {
        TileShape {
            cluster_m: m,
            cluster_n: n,
            ..self
        }
    }

    /// CTAs of a cluster. Calls refuse a shape of which there are more than a `usize` holds.
    pub const fn ctas(&self) -> usize {
        let tiles = self.cluster_m.saturating_mul(self.cluster_n);
        tiles.saturating_mul(self.split_k)
    }

    /// Sets the number of CTAs that share a tile.
    #[must_use]
    pub const fn with_split_k(self, split_k: usize) -> TileShape {
        TileShape { split_k, ..self }
    }

    /// Sets the number of slices of K.
    #[must_use]
    pub const fn with_k_slices(self, k_slices: usize) -> TileShape {
        TileShape { k_slices, ..self }
    }

    /// Sets the number of tile rows that are walked together.
    #[must_use]
    pub const fn with_group_m(self, group_m: usize) -> TileShape {
        TileShape { group_m, ..self }
    }
}

impl Chunking {
    /// Cuts every shard, also the last one, into `count` chunks.
    pub const fn new(count: usize) -> Chunking {
        Chunking {
            count,
            last: count,
            cut_last: false,
        }
    }

    /// Sets the number of chunks of the last shard.
    #[must_use]
    pub const fn with_last(self, last: usize) -> Chunking {
        Chunking { last, ..self }
    }

    /// Sets whether the very last chunk is cut along K.
    #[must_use]
    pub const fn with_cut_last(self, cut_last: bool) -> Chunking {
        Chunking { cut_last, ..self }
    }
}
