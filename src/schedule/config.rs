//! How an operation is cut up.

use serde::{Deserialize, Serialize};

use super::layout::{MAX_EXTENT, limit};
use crate::error::Result;

/// The most chunks a shard can be moved in.
pub const MAX_CHUNKS: usize = 64;
/// Chunks are cut along K at multiples of this: between steps of GPUs' kernels.
pub const CUT_COLUMNS: usize = 64;
/// The most CTAs in a cluster.
pub const MAX_CLUSTER: usize = 16;

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
