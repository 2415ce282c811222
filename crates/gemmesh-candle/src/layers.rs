//! The tensor-parallel layers.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{Module, Result, Tensor};
use candle_nn::var_builder::{Backend, Shard, VarBuilderArgs};

use crate::error::within;
use crate::load::{Hints, Reader};
use crate::products::{LayerTensors, Product};
use crate::tensor_parallel::TensorParallel;
use crate::weight::Weight;

/// A column-parallel linear layer: each rank has some rows of the weight, and so some columns of the output.
///
/// [`Module::forward`] takes this rank's tokens, [tokens of this rank, K], and returns this rank's columns for all
/// tokens, [tokens, N of this rank]. Tokens are gathered while they are multiplied.
#[derive(Clone, Debug)]
pub struct ColumnParallelLinear(Arc<dyn Product>);

impl ColumnParallelLinear {
    /// Makes a layer of this rank's rows of the weight, [N of this rank, K], and of the bias, [N of this rank].
    /// Collective.
    ///
    /// # Errors
    /// [`Kind::Unsuitable`](gemmesh::error::Kind::Unsuitable) for a tensor on a different device than the ranks', with a
    /// type that weights don't have, or whose rows don't follow one another;
    /// [`Kind::Unsupported`](gemmesh::error::Kind::Unsupported) for a weight of fp8 that this device cannot multiply;
    /// [`Kind::Unsuitable`](gemmesh::error::Kind::Unsuitable) for a weight that does not have two dimensions;
    /// [`Kind::Shape`](gemmesh::error::Kind::Shape);
    /// [`Kind::Unsuitable`](gemmesh::error::Kind::Unsuitable) on GPUs unless N and K are multiples of 8;
    /// [`Kind::OutOfMemory`](gemmesh::error::Kind::OutOfMemory).
    #[track_caller]
    pub fn new(
        ranks: &TensorParallel,
        weight: impl Into<Weight>,
        bias: Option<Tensor>,
    ) -> Result<Self> {
        let (weights, biases) = (vec![weight.into()], Vec::from_iter(bias));
        columns(
            ranks,
            LayerTensors { weights, biases },
            false,
            "ColumnParallelLinear",
        )
        .map(Self)
    }

    /// Makes a layer of this rank's part of the whole weight, [N, K], and of the bias of N elements.
    ///
    /// # Errors
    /// As [`ColumnParallelLinear::new`]; also if the ranks cannot share N evenly.
    #[track_caller]
    pub fn from_whole(
        ranks: &TensorParallel,
        weight: impl Into<Weight>,
        bias: Option<&Tensor>,
    ) -> Result<Self> {
        let weight = weight.into();
        let parts = || {
            let bias = bias.map(|bias| ranks.shard(bias, 0)).transpose()?;
            Ok((ranks.rows_of(&weight)?, bias))
        };
        let (weight, bias) = ranks.before_making("ColumnParallelLinear", parts)?;
        Self::new(ranks, weight, bias)
    }

    /// Reads this rank's part of a layer from `in_dim` to `out_dim` features. Collective.
    ///
    /// `vb` has a `weight`, [out_dim, in_dim], and a `bias` of out_dim elements if it is wanted. With a
    /// `ShardedVarBuilder` a rank reads nothing else of the file. A plain `VarBuilder` reads the whole weight first.
    ///
    /// If `vb` is of F8E4M3 (`vb.to_dtype(DType::F8E4M3)`), it also has `weight_scale_inv`, which is read as F32: the
    /// scales of [`Weight::blocks`]. The bias is then read as BF16.
    ///
    /// ```
    /// use candle_core::{DType, Device, Module, Tensor};
    /// use candle_nn::VarBuilder;
    /// use gemmesh_candle::{ColumnParallelLinear, Group, Host, TensorParallel};
    ///
    /// Group::<Host>::threads(2, |group| {
    ///     let ranks = TensorParallel::new(group, &Device::Cpu, 4).unwrap();
    ///     let vb = VarBuilder::zeros(DType::BF16, &Device::Cpu).pp("up_proj");
    ///     let layer = ColumnParallelLinear::load(&ranks, 8, 16, true, vb).unwrap();
    ///     let x = Tensor::ones((2, 8), DType::BF16, &Device::Cpu).unwrap(); // two of four tokens
    ///     assert_eq!(layer.forward(&x).unwrap().dims(), [4, 8]);
    ///     Ok::<_, gemmesh::Error>(())
    /// }).unwrap();
    /// ```
    ///
    /// # Errors
    /// As [`ColumnParallelLinear::from_whole`]; [`Kind::Shape`](gemmesh::error::Kind::Shape) also if a tensor has a
    /// different shape in the file; [`Kind::System`](gemmesh::error::Kind::System) if it cannot be read. They name the
    /// tensor.
    #[track_caller]
    pub fn load<B: Backend<Hints: Hints>>(
        ranks: &TensorParallel,
        in_dim: usize,
        out_dim: usize,
        bias: bool,
        vb: VarBuilderArgs<B>,
    ) -> Result<Self> {
        let layer = "ColumnParallelLinear::load";
        let parts = || Reader { ranks, layer }.rows(&vb, [out_dim, in_dim], bias);
        let (weight, bias) = ranks.before_making(layer, parts)?;
        Self::new(ranks, weight, bias)
    }

    /// The product of tokens that every rank has, [tokens, K], without communication, as for a few tokens that are
    /// decoded.
    ///
    /// # Errors
    /// As [`Module::forward`].
    #[track_caller]
    pub fn forward_replicated(&self, x: &Tensor) -> Result<Tensor> {
        let call = "ColumnParallelLinear::forward_replicated";
        within(call, || self.0.replicated(x, None)).map(only)
    }
}

impl Module for ColumnParallelLinear {
    #[track_caller]
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let call = "ColumnParallelLinear::forward";
        within(call, || self.0.sequence_parallel(x, None)).map(only)
    }
}

/// The projections to queries, keys and values: three column-parallel layers of one input.
///
/// The input is gathered once, in one product.
///
/// Each rank has some heads, as [`TensorParallel::heads`] says. If there are fewer heads of keys and values than of
/// queries, neighbouring heads of queries share one, and they belong to the same rank. If there are fewer of them than
/// ranks, neighbouring ranks have the same ones.
#[derive(Clone, Debug)]
pub struct QkvParallelLinear(Arc<dyn Product>);

impl QkvParallelLinear {
    /// Makes layers of this rank's rows of the weights, [N of each, K], and biases, [N of each]. Collective.
    ///
    /// # Errors
    /// As [`ColumnParallelLinear::new`].
    #[track_caller]
    pub fn new(
        ranks: &TensorParallel,
        weights: [impl Into<Weight>; 3],
        bias: Option<[Tensor; 3]>,
    ) -> Result<Self> {
        let biases = bias.map_or_else(Vec::new, Vec::from);
        let weights = weights.map(Into::into).into();
        columns(
            ranks,
            LayerTensors { weights, biases },
            false,
            "QkvParallelLinear",
        )
        .map(Self)
    }

    /// Makes layers of this rank's parts of the whole weights and biases.
    ///
    /// They are the parts of this rank's heads, of `heads` heads of queries and `kv_heads` heads of keys and values.
    ///
    /// # Errors
    /// As [`QkvParallelLinear::new`] and [`TensorParallel::heads`]; also if an N does not fit its number of heads.
    #[track_caller]
    pub fn from_whole(
        ranks: &TensorParallel,
        [heads, kv_heads]: [usize; 2],
        weights: [impl Into<Weight>; 3],
        bias: Option<[&Tensor; 3]>,
    ) -> Result<Self> {
        let weights: [Weight; 3] = weights.map(Into::into);
        let parts = || {
            let [queries, keys] = ranks.heads(heads, kv_heads)?;
            let weight = |whole: &Weight, count, heads| {
                let rows = ranks.rows_of_heads(&whole.values, count, heads)?;
                whole.rows(ranks.rank(), rows)
            };
            let [q, k, v] = &weights;
            let parts = [
                weight(q, heads, &queries)?,
                weight(k, kv_heads, &keys)?,
                weight(v, kv_heads, &keys)?,
            ];
            let bias = bias.map(|[q, k, v]| -> Result<[Tensor; 3]> {
                let of_keys = |whole| ranks.of_heads(whole, kv_heads, &keys);
                Ok([
                    ranks.of_heads(q, heads, &queries)?,
                    of_keys(k)?,
                    of_keys(v)?,
                ])
            });
            Ok((parts, bias.transpose()?))
        };
        let (weights, bias) = ranks.before_making("QkvParallelLinear", parts)?;
        Self::new(ranks, weights, bias)
    }

    /// Reads this rank's heads of three layers from `in_dim` features. Collective.
    ///
    /// There are `heads` heads of queries and `kv_heads` heads of keys and values, of `head_dim` features each. `vbs`
    /// are those of Q, K and V, such as `["q_proj", "k_proj", "v_proj"].map(|name| vb.pp(name))`. Each has a `weight`,
    /// [heads · head_dim, in_dim], and a `bias` if it is wanted.
    ///
    /// # Errors
    /// As [`ColumnParallelLinear::load`] and [`TensorParallel::heads`].
    #[track_caller]
    pub fn load<B: Backend<Hints: Hints>>(
        ranks: &TensorParallel,
        in_dim: usize,
        [heads, kv_heads]: [usize; 2],
        head_dim: usize,
        bias: bool,
        vbs: [VarBuilderArgs<B>; 3],
    ) -> Result<Self> {
        let layer = "QkvParallelLinear::load";
        let parts = || {
            let [queries, keys] = ranks.heads(heads, kv_heads)?;
            let part = |vb: &VarBuilderArgs<B>, count: usize, own: &Range<usize>| {
                let part = Shard {
                    dim: 0,
                    rank: own.start / own.len(),
                    world_size: count / own.len(),
                };
                Reader { ranks, layer }.part_of_rows(vb, [count * head_dim, in_dim], bias, part)
            };
            let [q, k, v] = &vbs;
            let [(q, q_bias), (k, k_bias), (v, v_bias)] = [
                part(q, heads, &queries)?,
                part(k, kv_heads, &keys)?,
                part(v, kv_heads, &keys)?,
            ];
            let biases = q_bias.zip(k_bias).zip(v_bias);
            Ok(([q, k, v], biases.map(|((q, k), v)| [q, k, v])))
        };
        let (weights, bias) = ranks.before_making(layer, parts)?;
        Self::new(ranks, weights, bias)
    }

    /// Takes this rank's tokens, [tokens of this rank, K], and returns the queries, keys and values of this rank's
    /// heads for all tokens, [tokens, N of each]. Collective.
    ///
    /// # Errors
    /// As for [`ColumnParallelLinear`].
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Result<[Tensor; 3]> {
        let call = "QkvParallelLinear::forward";
        within(call, || self.0.sequence_parallel(x, None)).map(three)
    }

    /// As [`ColumnParallelLinear::forward_replicated`].
    ///
    /// # Errors
    /// As [`ColumnParallelLinear::forward_replicated`].
    #[track_caller]
    pub fn forward_replicated(&self, x: &Tensor) -> Result<[Tensor; 3]> {
        let call = "QkvParallelLinear::forward_replicated";
        within(call, || self.0.replicated(x, None)).map(three)
    }
}

/// The first half of a gated MLP, column-parallel: `silu(x · gateᵀ) * (x · upᵀ)`.
///
/// x is gathered once, and neither product is written to memory.
///
/// [`Module::forward`] is like that of [`ColumnParallelLinear`].
#[derive(Clone, Debug)]
pub struct GatedParallelLinear(Arc<dyn Product>);

impl GatedParallelLinear {
    /// Makes a layer of this rank's rows of both weights, [N of this rank, K], and biases, [N of this rank].
    /// Collective.
    ///
    /// # Errors
    /// As [`ColumnParallelLinear::new`].
    #[track_caller]
    pub fn new(
        ranks: &TensorParallel,
        weights: [impl Into<Weight>; 2],
        bias: Option<[Tensor; 2]>,
    ) -> Result<Self> {
        let biases = bias.map_or_else(Vec::new, Vec::from);
        let weights = weights.map(Into::into).into();
        columns(
            ranks,
            LayerTensors { weights, biases },
            true,
            "GatedParallelLinear",
        )
        .map(Self)
    }

    /// Makes a layer of this rank's parts of the whole weights and biases.
    ///
    /// # Errors
    /// As [`GatedParallelLinear::new`]; also if the ranks cannot share N evenly.
    #[track_caller]
    pub fn from_whole(
        ranks: &TensorParallel,
        weights: [impl Into<Weight>; 2],
        bias: Option<[&Tensor; 2]>,
    ) -> Result<Self> {
        let [gate, up]: [Weight; 2] = weights.map(Into::into);
        let parts = || {
            let bias = bias.map(|[gate, up]| -> Result<[Tensor; 2]> {
                Ok([ranks.shard(gate, 0)?, ranks.shard(up, 0)?])
            });
            Ok((
                [ranks.rows_of(&gate)?, ranks.rows_of(&up)?],
                bias.transpose()?,
            ))
        };
        let (weights, bias) = ranks.before_making("GatedParallelLinear", parts)?;
        Self::new(ranks, weights, bias)
    }

    /// Reads this rank's parts of the gate and of up, from `in_dim` to `out_dim` features. Collective.
    ///
    /// `vbs` are those of the gate and of up, such as `["gate_proj", "up_proj"].map(|name| vb.pp(name))`. Each has a
    /// `weight`, [out_dim, in_dim], and a `bias` if it is wanted.
    ///
    /// # Errors
    /// As [`ColumnParallelLinear::load`].
    #[track_caller]
    pub fn load<B: Backend<Hints: Hints>>(
        ranks: &TensorParallel,
        in_dim: usize,
        out_dim: usize,
        bias: bool,
        vbs: [VarBuilderArgs<B>; 2],
    ) -> Result<Self> {
        let layer = "GatedParallelLinear::load";
        let parts = || {
            let part = |vb| Reader { ranks, layer }.rows(vb, [out_dim, in_dim], bias);
            let [gate, up] = &vbs;
            let [(gate, gate_bias), (up, up_bias)] = [part(gate)?, part(up)?];
            Ok(([gate, up], gate_bias.zip(up_bias).map(Into::into)))
        };
        let (weights, bias) = ranks.before_making(layer, parts)?;
        Self::new(ranks, weights, bias)
    }

    /// As [`ColumnParallelLinear::forward_replicated`].
    ///
    /// # Errors
    /// As [`ColumnParallelLinear::forward_replicated`].
    #[track_caller]
    pub fn forward_replicated(&self, x: &Tensor) -> Result<Tensor> {
        let call = "GatedParallelLinear::forward_replicated";
        within(call, || self.0.replicated(x, None)).map(only)
    }
}

impl Module for GatedParallelLinear {
    #[track_caller]
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let call = "GatedParallelLinear::forward";
        within(call, || self.0.sequence_parallel(x, None)).map(only)
    }
}

/// A row-parallel linear layer: each rank has a part of K, which is some columns of the weight.
///
/// [`Module::forward`] takes this rank's part of all tokens, [tokens, K of this rank], as a column-parallel layer makes
/// it. It returns the sums of this rank's tokens, [tokens of this rank, N]. Other ranks' rows are sent while the next
/// rows are multiplied.
#[derive(Clone, Debug)]
pub struct RowParallelLinear(Arc<dyn Product>);

impl RowParallelLinear {
    /// Makes a layer of this rank's columns of the weight, [N, K of this rank], and of the whole bias. Collective.
    ///
    /// The bias is added once. Every rank gives it, or none does.
    ///
    /// # Errors
    /// As [`ColumnParallelLinear::new`].
    #[track_caller]
    pub fn new(
        ranks: &TensorParallel,
        weight: impl Into<Weight>,
        bias: Option<Tensor>,
    ) -> Result<Self> {
        let (weights, biases) = (vec![weight.into()], Vec::from_iter(bias));
        let tensors = LayerTensors { weights, biases };
        within("RowParallelLinear", || ranks.ranks().rows(tensors)).map(Self)
    }

    /// Makes a layer of this rank's part of the whole weight, [N, K].
    ///
    /// # Errors
    /// As [`RowParallelLinear::new`]; also if the ranks cannot share K evenly, or if a rank's part of a weight with
    /// scales of blocks begins inside a block.
    #[track_caller]
    pub fn from_whole(
        ranks: &TensorParallel,
        weight: impl Into<Weight>,
        bias: Option<&Tensor>,
    ) -> Result<Self> {
        let weight = weight.into();
        let part = || ranks.columns_of(&weight);
        let weight = ranks.before_making("RowParallelLinear", part)?;
        Self::new(ranks, weight, bias.cloned())
    }

    /// Reads this rank's part of a layer from `in_dim` to `out_dim` features. Collective.
    ///
    /// `vb` has a `weight`, [out_dim, in_dim], of which a rank reads its columns. Each rank reads the whole `bias`, of
    /// out_dim elements, if it is wanted. It is added once.
    ///
    /// # Errors
    /// As [`ColumnParallelLinear::load`].
    #[track_caller]
    pub fn load<B: Backend<Hints: Hints>>(
        ranks: &TensorParallel,
        in_dim: usize,
        out_dim: usize,
        bias: bool,
        vb: VarBuilderArgs<B>,
    ) -> Result<Self> {
        let layer = "RowParallelLinear::load";
        let parts = || Reader { ranks, layer }.columns(&vb, [out_dim, in_dim], bias);
        let (weight, bias) = ranks.before_making(layer, parts)?;
        Self::new(ranks, weight, bias)
    }

    /// As [`Module::forward`], and adds `residual`, [tokens of this rank, N], before the result is rounded once.
    ///
    /// # Errors
    /// As for [`ColumnParallelLinear`].
    #[track_caller]
    pub fn forward_residual(&self, x: &Tensor, residual: &Tensor) -> Result<Tensor> {
        let call = "RowParallelLinear::forward_residual";
        within(call, || self.0.sequence_parallel(x, Some(residual))).map(only)
    }

    /// The sums of all tokens on every rank, [tokens, N], as for a few tokens that are decoded. Collective.
    ///
    /// It adds `residual`, [tokens, N], if every rank has one.
    ///
    /// # Errors
    /// As for [`ColumnParallelLinear`].
    #[track_caller]
    pub fn forward_replicated(&self, x: &Tensor, residual: Option<&Tensor>) -> Result<Tensor> {
        let call = "RowParallelLinear::forward_replicated";
        within(call, || self.0.replicated(x, residual)).map(only)
    }
}

impl Module for RowParallelLinear {
    #[track_caller]
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let call = "RowParallelLinear::forward";
        within(call, || self.0.sequence_parallel(x, None)).map(only)
    }
}

#[track_caller]
fn columns(
    ranks: &TensorParallel,
    tensors: LayerTensors,
    gated: bool,
    call: &'static str,
) -> Result<Arc<dyn Product>> {
    within(call, || ranks.ranks().columns(tensors, gated))
}

fn only(mut tensors: Vec<Tensor>) -> Tensor {
    tensors.remove(0)
}

fn three(tensors: Vec<Tensor>) -> [Tensor; 3] {
    let three: std::result::Result<[Tensor; 3], _> = tensors.try_into();
    three.unwrap_or_else(|_| unreachable!("there is one for each weight"))
}
