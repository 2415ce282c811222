//! The linear layers of a Llama: fused, one after the other, and of one process.

use std::ops::Range;

use candle_core::{DType, Device, Module, Result, Tensor};
use gemmesh_candle::{
    ColumnParallelLinear, GatedParallelLinear, QkvParallelLinear, RowParallelLinear,
    TensorParallel, Weight,
};

use crate::model::{Config, Linears, Tokens};
use crate::weights::{self, Name};

/// The weights of a layer, or a rank's parts of them.
pub struct LayerWeights {
    pub qkv: [Tensor; 3],
    pub output: Tensor,
    pub gate_up: [Tensor; 2],
    pub down: Tensor,
}

/// The weights of all layers, and the head's, of a rank.
pub struct Weights {
    pub layers: Vec<LayerWeights>,
    pub head: Tensor,
}

impl Weights {
    /// Those of a whole model.
    pub fn whole(config: Config, device: &Device) -> Result<Weights> {
        let heads = [0..config.heads, 0..config.kv_heads];
        Weights::of(config, heads, |size| 0..size, device)
    }

    /// This rank's, which can share the model's extents with the others evenly.
    pub fn new(config: Config, ranks: &TensorParallel, device: &Device) -> Result<Weights> {
        let (rank, world) = (ranks.rank(), ranks.world_size());
        let own = |size: usize| size / world * rank..size / world * (rank + 1);
        Weights::of(
            config,
            ranks.heads(config.heads, config.kv_heads)?,
            own,
            device,
        )
    }

    /// Of these heads, and of what else is shared `own`.
    fn of(
        config: Config,
        [queries, keys]: [Range<usize>; 2],
        own: impl Fn(usize) -> Range<usize>,
        device: &Device,
    ) -> Result<Weights> {
        let Config {
            model,
            hidden,
            heads,
            head,
            vocabulary,
            ..
        } = config;
        // Products of rows of mean square 1 have rows of mean square 1; so do, at last, the sums of all layers.
        let unit = |k: usize| (1.0 / k as f64).sqrt();
        let added = |k: usize| unit(k) * (0.5 / config.layers as f64).sqrt();
        let of_heads = |heads: &Range<usize>| heads.start * head..heads.end * head;
        let (queries, keys) = (of_heads(&queries), of_heads(&keys));
        let rows = |name, own, k| weights::part(name, own, 0..k, k, unit(k), device);
        let columns = |name, n, own, k| weights::part(name, 0..n, own, k, added(k), device);
        let layer = |layer| -> Result<LayerWeights> {
            Ok(LayerWeights {
                qkv: [
                    rows(Name::Query(layer), queries.clone(), model)?,
                    rows(Name::Key(layer), keys.clone(), model)?,
                    rows(Name::Value(layer), keys.clone(), model)?,
                ],
                output: columns(Name::Output(layer), model, queries.clone(), heads * head)?,
                gate_up: [
                    rows(Name::Gate(layer), own(hidden), model)?,
                    rows(Name::Up(layer), own(hidden), model)?,
                ],
                down: columns(Name::Down(layer), model, own(hidden), hidden)?,
            })
        };
        Ok(Weights {
            layers: (0..config.layers).map(layer).collect::<Result<_>>()?,
            head: rows(Name::Head, own(vocabulary), model)?,
        })
    }
}

/// Products that hide what they exchange.
#[derive(Clone)]
pub struct Fused {
    ranks: TensorParallel,
    layers: Vec<(
        QkvParallelLinear,
        RowParallelLinear,
        GatedParallelLinear,
        RowParallelLinear,
    )>,
    head: ColumnParallelLinear,
}

impl Fused {
    pub fn new(ranks: &TensorParallel, weights: &Weights) -> Result<Fused> {
        Fused::of(ranks, weights, |weight| Ok(weight.into()))
    }

    /// With layers of fp8, but for the head's. Each rank quantises its own part, whose blocks begin with it.
    pub fn quantized(ranks: &TensorParallel, weights: &Weights) -> Result<Fused> {
        Fused::of(ranks, weights, Weight::quantized)
    }

    fn of(
        ranks: &TensorParallel,
        weights: &Weights,
        weight: impl Fn(&Tensor) -> Result<Weight>,
    ) -> Result<Fused> {
        let layer = |weights: &LayerWeights| {
            let ([q, k, v], [gate, up]) = (&weights.qkv, &weights.gate_up);
            let qkv = [weight(q)?, weight(k)?, weight(v)?];
            let gate_up = [weight(gate)?, weight(up)?];
            Ok((
                QkvParallelLinear::new(ranks, qkv, None)?,
                RowParallelLinear::new(ranks, weight(&weights.output)?, None)?,
                GatedParallelLinear::new(ranks, gate_up, None)?,
                RowParallelLinear::new(ranks, weight(&weights.down)?, None)?,
            ))
        };
        Ok(Fused {
            ranks: ranks.clone(),
            layers: weights.layers.iter().map(layer).collect::<Result<_>>()?,
            head: ColumnParallelLinear::new(ranks, weights.head.clone(), None)?,
        })
    }
}

impl Linears for Fused {
    fn prompt(&self) -> Tokens {
        Tokens::Spread
    }

    fn own(&self, tokens: usize, lie: Tokens) -> Result<Range<usize>> {
        own(&self.ranks, tokens, lie)
    }

    fn qkv(&self, layer: usize, x: &Tensor, lie: Tokens) -> Result<[Tensor; 3]> {
        let (qkv, ..) = &self.layers[layer];
        match lie {
            Tokens::Spread => qkv.forward(x),
            Tokens::Replicated => qkv.forward_replicated(x),
        }
    }

    fn output(&self, layer: usize, x: &Tensor, residual: &Tensor, lie: Tokens) -> Result<Tensor> {
        add_up(&self.layers[layer].1, x, residual, lie)
    }

    fn gate_up(&self, layer: usize, x: &Tensor, lie: Tokens) -> Result<Tensor> {
        let (_, _, gate_up, _) = &self.layers[layer];
        match lie {
            Tokens::Spread => gate_up.forward(x),
            Tokens::Replicated => gate_up.forward_replicated(x),
        }
    }

    fn down(&self, layer: usize, x: &Tensor, residual: &Tensor, lie: Tokens) -> Result<Tensor> {
        add_up(&self.layers[layer].3, x, residual, lie)
    }

    fn gather(&self, x: &Tensor, lie: Tokens) -> Result<Tensor> {
        gather(&self.ranks, x, lie)
    }

    fn head(&self, x: &Tensor) -> Result<Tensor> {
        self.head.forward_replicated(x)
    }
}

fn own(ranks: &TensorParallel, tokens: usize, lie: Tokens) -> Result<Range<usize>> {
    let own = ranks.set_tokens(tokens)?;
    Ok(match lie {
        Tokens::Spread => own,
        Tokens::Replicated => 0..tokens,
    })
}

fn gather(ranks: &TensorParallel, x: &Tensor, lie: Tokens) -> Result<Tensor> {
    match lie {
        Tokens::Spread => ranks.all_gather(x),
        Tokens::Replicated => Ok(x.clone()),
    }
}

fn add_up(layer: &RowParallelLinear, x: &Tensor, residual: &Tensor, lie: Tokens) -> Result<Tensor> {
    match lie {
        Tokens::Spread => layer.forward_residual(x, residual),
        Tokens::Replicated => layer.forward_replicated(x, Some(residual)),
    }
}

/// The same products and the same exchanges, one after the other: gather then multiply, multiply then add up.
pub struct Sequential {
    columns: Fused,
    /// Of each layer's output and down projection: products of this rank alone.
    parts: Vec<[ColumnParallelLinear; 2]>,
}

impl Sequential {
    /// The others are those of `columns`.
    pub fn new(columns: Fused, weights: &Weights) -> Result<Sequential> {
        let ranks = &columns.ranks;
        let part = |weight: &Tensor| ColumnParallelLinear::new(ranks, weight.clone(), None);
        let parts = |layer: &LayerWeights| Ok([part(&layer.output)?, part(&layer.down)?]);
        let parts = weights.layers.iter().map(parts).collect::<Result<_>>()?;
        Ok(Sequential { columns, parts })
    }

    fn add_up(
        &self,
        part: &ColumnParallelLinear,
        x: &Tensor,
        residual: &Tensor,
        lie: Tokens,
    ) -> Result<Tensor> {
        let part = part.forward_replicated(x)?;
        let ranks = &self.columns.ranks;
        let sums = match lie {
            Tokens::Spread => ranks.reduce_scatter(&part)?,
            Tokens::Replicated => ranks.all_reduce(&part)?,
        };
        sums + residual
    }
}

impl Linears for Sequential {
    fn prompt(&self) -> Tokens {
        Tokens::Spread
    }

    fn own(&self, tokens: usize, lie: Tokens) -> Result<Range<usize>> {
        self.columns.own(tokens, lie)
    }

    fn qkv(&self, layer: usize, x: &Tensor, lie: Tokens) -> Result<[Tensor; 3]> {
        let all = self.gather(x, lie)?;
        self.columns.qkv(layer, &all, Tokens::Replicated)
    }

    fn output(&self, layer: usize, x: &Tensor, residual: &Tensor, lie: Tokens) -> Result<Tensor> {
        self.add_up(&self.parts[layer][0], x, residual, lie)
    }

    fn gate_up(&self, layer: usize, x: &Tensor, lie: Tokens) -> Result<Tensor> {
        let all = self.gather(x, lie)?;
        self.columns.gate_up(layer, &all, Tokens::Replicated)
    }

    fn down(&self, layer: usize, x: &Tensor, residual: &Tensor, lie: Tokens) -> Result<Tensor> {
        self.add_up(&self.parts[layer][1], x, residual, lie)
    }

    fn gather(&self, x: &Tensor, lie: Tokens) -> Result<Tensor> {
        self.columns.gather(x, lie)
    }

    fn head(&self, x: &Tensor) -> Result<Tensor> {
        self.columns.head(x)
    }
}

/// Candle's own layers: of a whole model in one process, or of a rank's part with a function that adds up.
pub struct Plain<A> {
    layers: Vec<LayerLinears>,
    head: candle_nn::Linear,
    all_reduce: A,
}

struct LayerLinears {
    qkv: [candle_nn::Linear; 3],
    output: candle_nn::Linear,
    gate_up: [candle_nn::Linear; 2],
    down: candle_nn::Linear,
}

impl<A: Fn(Tensor) -> Result<Tensor>> Plain<A> {
    pub fn new(weights: &Weights, dtype: DType, all_reduce: A) -> Result<Plain<A>> {
        let linear = |weight: &Tensor| -> Result<candle_nn::Linear> {
            Ok(candle_nn::Linear::new(weight.to_dtype(dtype)?, None))
        };
        let layer = |weights: &LayerWeights| -> Result<LayerLinears> {
            let ([q, k, v], [gate, up]) = (&weights.qkv, &weights.gate_up);
            Ok(LayerLinears {
                qkv: [linear(q)?, linear(k)?, linear(v)?],
                output: linear(&weights.output)?,
                gate_up: [linear(gate)?, linear(up)?],
                down: linear(&weights.down)?,
            })
        };
        Ok(Plain {
            layers: weights.layers.iter().map(layer).collect::<Result<_>>()?,
            head: linear(&weights.head)?,
            all_reduce,
        })
    }
}

impl<A: Fn(Tensor) -> Result<Tensor>> Linears for Plain<A> {
    fn prompt(&self) -> Tokens {
        Tokens::Replicated
    }

    fn own(&self, tokens: usize, _: Tokens) -> Result<Range<usize>> {
        Ok(0..tokens)
    }

    fn qkv(&self, layer: usize, x: &Tensor, _: Tokens) -> Result<[Tensor; 3]> {
        let [q, k, v] = &self.layers[layer].qkv;
        Ok([q.forward(x)?, k.forward(x)?, v.forward(x)?])
    }

    fn output(&self, layer: usize, x: &Tensor, residual: &Tensor, _: Tokens) -> Result<Tensor> {
        (self.all_reduce)(self.layers[layer].output.forward(x)?)? + residual
    }

    fn gate_up(&self, layer: usize, x: &Tensor, _: Tokens) -> Result<Tensor> {
        let [gate, up] = &self.layers[layer].gate_up;
        gate.forward(x)?.silu()? * up.forward(x)?
    }

    fn down(&self, layer: usize, x: &Tensor, residual: &Tensor, _: Tokens) -> Result<Tensor> {
        (self.all_reduce)(self.layers[layer].down.forward(x)?)? + residual
    }

    fn gather(&self, x: &Tensor, _: Tokens) -> Result<Tensor> {
        Ok(x.clone())
    }

    fn head(&self, x: &Tensor) -> Result<Tensor> {
        self.head.forward(x)
    }
}
