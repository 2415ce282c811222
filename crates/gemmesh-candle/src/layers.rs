//! The layers.

use std::sync::Arc;

use candle_core::{Module, Result, Tensor};

use crate::failure::Failure;
use crate::products::{LayerTensors, Product};
use crate::tensor_parallel::TensorParallel;

/// A linear layer of which each rank has some columns of the output: rows of the weight.
///
/// [`Module::forward`] takes this rank's tokens, [tokens of this rank, K], and returns all tokens' columns of this
/// rank, [tokens, N of this rank]: the tokens are gathered while they are multiplied.
#[derive(Clone, Debug)]
pub struct ColumnParallelLinear(Arc<dyn Product>);

impl ColumnParallelLinear {
    /// A layer of this rank's rows of the weight, [N of this rank, K], and of the bias, [N of this rank]. Collective.
    ///
    /// # Errors
    /// [`Error::Unsuitable`](gemmesh::Error::Unsuitable) for a tensor of another device than the ranks', of another
    /// type than BF16 or F16, or whose rows don't lie one after the other; [`Error::Shape`](gemmesh::Error::Shape);
    /// [`Error::Unaligned`](gemmesh::Error::Unaligned) on GPUs unless N and K are multiples of 8;
    /// [`Error::OutOfMemory`](gemmesh::Error::OutOfMemory).
    pub fn new(ranks: &TensorParallel, weight: Tensor, bias: Option<Tensor>) -> Result<Self> {
        let (weights, biases) = (vec![weight], Vec::from_iter(bias));
        columns(
            ranks,
            LayerTensors { weights, biases },
            false,
            "ColumnParallelLinear",
        )
        .map(Self)
    }

    /// The same of the whole weight, [N, K], and bias, of N, of which this rank takes its part.
    ///
    /// # Errors
    /// As [`ColumnParallelLinear::new`], and unless the ranks can share N evenly.
    pub fn from_whole(
        ranks: &TensorParallel,
        weight: &Tensor,
        bias: Option<&Tensor>,
    ) -> Result<Self> {
        let parts = || {
            let bias = bias.map(|bias| ranks.shard(bias, 0)).transpose()?;
            Ok((ranks.shard(weight, 0)?, bias))
        };
        let (weight, bias) = ranks.before_making("ColumnParallelLinear", parts)?;
        Self::new(ranks, weight, bias)
    }

    /// The same product of tokens that every rank has, [tokens, K], as when few are decoded: with no communication.
    ///
    /// # Errors
    /// As those of [`Module::forward`].
    pub fn forward_replicated(&self, x: &Tensor) -> Result<Tensor> {
        let out = self.0.replicated(x, None);
        out.map(only)
            .map_err(Failure::of("ColumnParallelLinear::forward_replicated"))
    }
}

impl Module for ColumnParallelLinear {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let out = self.0.sequence_parallel(x, None);
        out.map(only)
            .map_err(Failure::of("ColumnParallelLinear::forward"))
    }
}

/// The projections to queries, keys and values: three column-parallel layers of one input, which is gathered once, in
/// one product.
///
/// Each rank has some heads: [`TensorParallel::heads`]. Where keys and values have fewer heads than queries, these are
/// shared by neighbours, so those of a rank belong together. Where they have fewer than there are ranks, neighbours
/// have the same.
#[derive(Clone, Debug)]
pub struct QkvParallelLinear(Arc<dyn Product>);

impl QkvParallelLinear {
    /// Layers of this rank's rows of the weights, [N of each, K], and biases, [N of each]. Collective.
    ///
    /// # Errors
    /// As [`ColumnParallelLinear::new`].
    pub fn new(
        ranks: &TensorParallel,
        [q, k, v]: [Tensor; 3],
        bias: Option<[Tensor; 3]>,
    ) -> Result<Self> {
        let biases = bias.map_or_else(Vec::new, Vec::from);
        let weights = vec![q, k, v];
        columns(
            ranks,
            LayerTensors { weights, biases },
            false,
            "QkvParallelLinear",
        )
        .map(Self)
    }

    /// The same of the whole weights and biases, of which this rank takes its parts: those of its heads, of `heads` of
    /// the queries, and of `kv_heads` of the keys and the values.
    ///
    /// # Errors
    /// As [`QkvParallelLinear::new`] and [`TensorParallel::heads`], and unless each N is that of as many heads.
    pub fn from_whole(
        ranks: &TensorParallel,
        [heads, kv_heads]: [usize; 2],
        weights: [&Tensor; 3],
        bias: Option<[&Tensor; 3]>,
    ) -> Result<Self> {
        let parts = || {
            let [queries, keys] = ranks.heads(heads, kv_heads)?;
            let parts = |[q, k, v]: [&Tensor; 3]| -> Result<[Tensor; 3]> {
                let of_keys = |whole| ranks.of_heads(whole, kv_heads, &keys);
                Ok([
                    ranks.of_heads(q, heads, &queries)?,
                    of_keys(k)?,
                    of_keys(v)?,
                ])
            };
            Ok((parts(weights)?, bias.map(parts).transpose()?))
        };
        let (weights, bias) = ranks.before_making("QkvParallelLinear", parts)?;
        Self::new(ranks, weights, bias)
    }

    /// All tokens' queries, keys and values of this rank's heads, [tokens, N of each], of this rank's tokens, [tokens
    /// of this rank, K]. Collective.
    ///
    /// # Errors
    /// As those of [`ColumnParallelLinear`].
    pub fn forward(&self, x: &Tensor) -> Result<[Tensor; 3]> {
        let out = self.0.sequence_parallel(x, None);
        out.map(three)
            .map_err(Failure::of("QkvParallelLinear::forward"))
    }

    /// As [`ColumnParallelLinear::forward_replicated`].
    ///
    /// # Errors
    /// As [`ColumnParallelLinear::forward_replicated`].
    pub fn forward_replicated(&self, x: &Tensor) -> Result<[Tensor; 3]> {
        let out = self.0.replicated(x, None);
        out.map(three)
            .map_err(Failure::of("QkvParallelLinear::forward_replicated"))
    }
}

/// The first half of a gated MLP, `silu(x · gateᵀ) * (x · upᵀ)`, column-parallel: x is gathered once, and neither
/// product is written.
///
/// [`Module::forward`] is as [`ColumnParallelLinear`]'s.
#[derive(Clone, Debug)]
pub struct GatedParallelLinear(Arc<dyn Product>);

impl GatedParallelLinear {
    /// A layer of this rank's rows of both weights, [N of this rank, K], and biases, [N of this rank]. Collective.
    ///
    /// # Errors
    /// As [`ColumnParallelLinear::new`].
    pub fn new(
        ranks: &TensorParallel,
        [gate, up]: [Tensor; 2],
        bias: Option<[Tensor; 2]>,
    ) -> Result<Self> {
        let biases = bias.map_or_else(Vec::new, Vec::from);
        let weights = vec![gate, up];
        columns(
            ranks,
            LayerTensors { weights, biases },
            true,
            "GatedParallelLinear",
        )
        .map(Self)
    }

    /// The same of the whole weights and biases, of which this rank takes its parts.
    ///
    /// # Errors
    /// As [`GatedParallelLinear::new`], and unless the ranks can share N evenly.
    pub fn from_whole(
        ranks: &TensorParallel,
        weights: [&Tensor; 2],
        bias: Option<[&Tensor; 2]>,
    ) -> Result<Self> {
        let parts = |[gate, up]: [&Tensor; 2]| -> Result<[Tensor; 2]> {
            Ok([ranks.shard(gate, 0)?, ranks.shard(up, 0)?])
        };
        let parts = || Ok((parts(weights)?, bias.map(parts).transpose()?));
        let (weights, bias) = ranks.before_making("GatedParallelLinear", parts)?;
        Self::new(ranks, weights, bias)
    }

    /// As [`ColumnParallelLinear::forward_replicated`].
    ///
    /// # Errors
    /// As [`ColumnParallelLinear::forward_replicated`].
    pub fn forward_replicated(&self, x: &Tensor) -> Result<Tensor> {
        let out = self.0.replicated(x, None);
        out.map(only)
            .map_err(Failure::of("GatedParallelLinear::forward_replicated"))
    }
}

impl Module for GatedParallelLinear {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let out = self.0.sequence_parallel(x, None);
        out.map(only)
            .map_err(Failure::of("GatedParallelLinear::forward"))
    }
}

/// A linear layer of which each rank has a part of K: columns of the weight.
///
/// [`Module::forward`] takes all tokens' part of this rank, [tokens, K of this rank], as a column-parallel layer makes
/// it, and returns the sums of this rank's tokens, [tokens of this rank, N]: rows of others are sent while the next are
/// multiplied.
#[derive(Clone, Debug)]
pub struct RowParallelLinear(Arc<dyn Product>);

impl RowParallelLinear {
    /// A layer of this rank's columns of the weight, [N, K of this rank], and of the whole bias, of N, which is added
    /// once: every rank has one, or none does. Collective.
    ///
    /// # Errors
    /// As [`ColumnParallelLinear::new`].
    pub fn new(ranks: &TensorParallel, weight: Tensor, bias: Option<Tensor>) -> Result<Self> {
        let (weights, biases) = (vec![weight], Vec::from_iter(bias));
        let made = ranks.ranks().rows(LayerTensors { weights, biases });
        made.map(Self).map_err(Failure::of("RowParallelLinear"))
    }

    /// The same of the whole weight, [N, K], of which this rank takes its part.
    ///
    /// # Errors
    /// As [`RowParallelLinear::new`], and unless the ranks can share K evenly.
    pub fn from_whole(
        ranks: &TensorParallel,
        weight: &Tensor,
        bias: Option<&Tensor>,
    ) -> Result<Self> {
        let part = || ranks.shard(weight, 1);
        let weight = ranks.before_making("RowParallelLinear", part)?;
        Self::new(ranks, weight, bias.cloned())
    }

    /// As [`Module::forward`], and adds `residual`, [tokens of this rank, N], before the one rounding.
    ///
    /// # Errors
    /// As those of [`ColumnParallelLinear`].
    pub fn forward_residual(&self, x: &Tensor, residual: &Tensor) -> Result<Tensor> {
        let out = self.0.sequence_parallel(x, Some(residual));
        out.map(only)
            .map_err(Failure::of("RowParallelLinear::forward_residual"))
    }

    /// The sums of all tokens on every rank, [tokens, N], as when few are decoded; with a `residual` that every rank
    /// has, [tokens, N]. Collective.
    ///
    /// # Errors
    /// As those of [`ColumnParallelLinear`].
    pub fn forward_replicated(&self, x: &Tensor, residual: Option<&Tensor>) -> Result<Tensor> {
        let out = self.0.replicated(x, residual);
        out.map(only)
            .map_err(Failure::of("RowParallelLinear::forward_replicated"))
    }
}

impl Module for RowParallelLinear {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let out = self.0.sequence_parallel(x, None);
        out.map(only)
            .map_err(Failure::of("RowParallelLinear::forward"))
    }
}

fn columns(
    ranks: &TensorParallel,
    tensors: LayerTensors,
    gated: bool,
    call: &'static str,
) -> Result<Arc<dyn Product>> {
    let made = ranks.ranks().columns(tensors, gated);
    made.map_err(Failure::of(call))
}

fn only(mut tensors: Vec<Tensor>) -> Tensor {
    tensors.remove(0)
}

fn three(tensors: Vec<Tensor>) -> [Tensor; 3] {
    let three: std::result::Result<[Tensor; 3], _> = tensors.try_into();
    three.unwrap_or_else(|_| unreachable!("there is one for each weight"))
}
