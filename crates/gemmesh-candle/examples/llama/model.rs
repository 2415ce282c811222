//! A Llama, whatever does its linear layers: rotary embeddings, grouped heads, a cache of keys and values.

use candle_core::{D, DType, Device, IndexOp, Result, Tensor};
use candle_nn::kv_cache::KvCache;
use candle_nn::ops::{rms_norm, softmax_last_dim};
use candle_nn::rotary_emb::rope_thd;

use crate::weights::{self, Name};

#[derive(Clone, Copy, Debug)]
pub struct Config {
    pub layers: usize,
    pub model: usize,
    pub hidden: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head: usize,
    pub vocabulary: usize,
}

const EPSILON: f32 = 1e-5;
const THETA: f64 = 500_000.0;
/// Queries that attend at once: so many rows of scores are there at a time.
const BLOCK: usize = 512;

/// How tokens lie between layers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Tokens {
    /// Each rank has some.
    Spread,
    /// Each rank has all.
    Replicated,
}

/// The linear layers of this rank, each with what it exchanges.
pub trait Linears {
    /// How the tokens of a prompt lie. One token is replicated.
    fn prompt(&self) -> Tokens;
    /// This rank's tokens of so many.
    fn own(&self, tokens: usize, lie: Tokens) -> Result<std::ops::Range<usize>>;
    /// All tokens' queries, keys and values of this rank's heads.
    fn qkv(&self, layer: usize, x: &Tensor, lie: Tokens) -> Result<[Tensor; 3]>;
    /// The attention's output, of all tokens' heads of this rank, added to the residual.
    fn output(&self, layer: usize, x: &Tensor, residual: &Tensor, lie: Tokens) -> Result<Tensor>;
    /// `silu(gate) * up`, of all tokens.
    fn gate_up(&self, layer: usize, x: &Tensor, lie: Tokens) -> Result<Tensor>;
    /// The MLP's output, added to the residual.
    fn down(&self, layer: usize, x: &Tensor, residual: &Tensor, lie: Tokens) -> Result<Tensor>;
    /// All tokens' rows.
    fn gather(&self, x: &Tensor, lie: Tokens) -> Result<Tensor>;
    /// Logits of this rank's part of the vocabulary, of tokens that each rank has.
    fn head(&self, x: &Tensor) -> Result<Tensor>;
}

pub struct Model<L> {
    config: Config,
    linears: L,
    embedding: Tensor,
    /// Before attention and before the MLP.
    norms: Vec<[Tensor; 2]>,
    final_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    /// What is added to the scores of a block of queries and its own keys, so that none sees what follows it.
    mask: Tensor,
    caches: Vec<KvCache>,
}

impl<L: Linears> Model<L> {
    /// A model with room for `positions`.
    pub fn new(
        config: Config,
        linears: L,
        positions: usize,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        let Config {
            model,
            head,
            vocabulary,
            ..
        } = config;
        let norm = |name| weights::norm(name, model, dtype, device);
        let norms = |layer| Ok([norm(Name::Norm(layer, 0))?, norm(Name::Norm(layer, 1))?]);
        let frequency = |pair: usize| 1.0 / THETA.powf(2.0 * pair as f64 / head as f64);
        let angle = |position: usize, pair| (position as f64 * frequency(pair)) as f32;
        let angles = (0..positions).flat_map(|p| (0..head / 2).map(move |pair| angle(p, pair)));
        let angles = Tensor::from_vec(angles.collect(), (positions, head / 2), device)?;
        let mask = |query: usize, key: usize| if key > query { f32::NEG_INFINITY } else { 0.0 };
        let mask = (0..BLOCK).flat_map(|query| (0..BLOCK).map(move |key| mask(query, key)));
        let embedding =
            weights::part(Name::Embedding, 0..vocabulary, 0..model, model, 1.0, device)?;
        Ok(Model {
            config,
            linears,
            embedding: embedding.to_dtype(dtype)?,
            norms: (0..config.layers).map(norms).collect::<Result<_>>()?,
            final_norm: norm(Name::FinalNorm)?,
            cos: angles.cos()?.to_dtype(dtype)?,
            sin: angles.sin()?.to_dtype(dtype)?,
            mask: Tensor::from_vec(mask.collect(), (BLOCK, BLOCK), device)?.to_dtype(dtype)?,
            caches: vec![KvCache::new(1, positions); config.layers],
        })
    }

    /// Forgets all tokens.
    pub fn reset(&mut self) {
        self.caches.iter_mut().for_each(KvCache::reset);
    }

    /// Takes the next tokens, and returns the logits behind the last `wanted` of them, [wanted, vocabulary of this
    /// rank].
    pub fn forward(&mut self, tokens: &[u32], wanted: usize) -> Result<Tensor> {
        let lie = match tokens.len() {
            1 => Tokens::Replicated,
            _ => self.linears.prompt(),
        };
        let own = self.linears.own(tokens.len(), lie)?;
        let ids = Tensor::new(&tokens[own], self.embedding.device())?;
        let mut x = self.embedding.index_select(&ids, 0)?;
        for layer in 0..self.config.layers {
            let [before_attention, before_mlp] = self.norms[layer].clone();
            let normed = rms_norm(&x, &before_attention, EPSILON)?;
            let qkv = self.linears.qkv(layer, &normed, lie)?;
            let heads = self.attend(layer, qkv)?;
            x = self.linears.output(layer, &heads, &x, lie)?;
            let normed = rms_norm(&x, &before_mlp, EPSILON)?;
            let hidden = self.linears.gate_up(layer, &normed, lie)?;
            x = self.linears.down(layer, &hidden, &x, lie)?;
        }
        let normed = rms_norm(&x, &self.final_norm, EPSILON)?;
        let all = self.linears.gather(&normed, lie)?;
        self.linears
            .head(&all.narrow(0, tokens.len() - wanted, wanted)?)
    }

    /// The linear layers alone, each of the same rows: what stands between them is left out.
    pub fn products(&self, tokens: &[u32]) -> Result<()> {
        let lie = self.linears.prompt();
        let own = self.linears.own(tokens.len(), lie)?;
        let ids = Tensor::new(&tokens[own], self.embedding.device())?;
        let x = self.embedding.index_select(&ids, 0)?;
        for layer in 0..self.config.layers {
            let [heads, ..] = self.linears.qkv(layer, &x, lie)?;
            self.linears.output(layer, &heads, &x, lie)?;
            let hidden = self.linears.gate_up(layer, &x, lie)?;
            self.linears.down(layer, &hidden, &x, lie)?;
        }
        Ok(())
    }

    /// Causal attention of this rank's heads: of [tokens, heads · head] each, after what is in the cache.
    fn attend(&mut self, layer: usize, [q, k, v]: [Tensor; 3]) -> Result<Tensor> {
        let head = self.config.head;
        let (tokens, begin) = (q.dim(0)?, self.caches[layer].current_seq_len());
        let cos = self.cos.narrow(0, begin, tokens)?;
        let sin = self.sin.narrow(0, begin, tokens)?;
        let rotate = |x: &Tensor| rope_thd(&x.reshape((1, tokens, (), head))?, &cos, &sin)?.i(0);
        // [heads, tokens, head]
        let by_head = |x: Tensor| x.transpose(0, 1)?.contiguous();
        let q = by_head((rotate(&q)? / (head as f64).sqrt())?)?;
        let k = by_head(rotate(&k)?)?;
        let v = by_head(v.reshape((tokens, (), head))?)?;
        let (k, v) = self.caches[layer].append(&k, &v)?;

        let (heads, kv_heads) = (q.dim(0)?, k.dim(0)?);
        let mut blocks = Vec::new();
        for first in (0..tokens).step_by(BLOCK) {
            let rows = BLOCK.min(tokens - first);
            let keys = begin + first + rows;
            // The queries of neighbouring heads share keys and values.
            let shared = (kv_heads, heads / kv_heads * rows, ());
            let q = q.narrow(1, first, rows)?.reshape(shared)?;
            let mut scores = q.matmul(&k.narrow(1, 0, keys)?.t()?)?;
            if rows > 1 {
                let own = self.mask.i((..rows, ..rows))?;
                let mask = own.pad_with_zeros(1, keys - rows, 0)?;
                scores = scores
                    .reshape((heads, rows, keys))?
                    .broadcast_add(&mask)?
                    .reshape(shared)?;
            }
            let seen = softmax(&scores)?.matmul(&v.narrow(1, 0, keys)?)?;
            blocks.push(seen.reshape((heads, rows, head))?);
        }
        let seen = Tensor::cat(&blocks, 1)?;
        seen.transpose(0, 1)?.contiguous()?.flatten_from(D::Minus2)
    }
}

/// Of each row. Candle's kernel adds up in f32, its loop on the CPU in the type of the scores.
fn softmax(scores: &Tensor) -> Result<Tensor> {
    if scores.device().is_cpu() {
        softmax_last_dim(&scores.to_dtype(DType::F32)?)?.to_dtype(scores.dtype())
    } else {
        softmax_last_dim(scores)
    }
}
