//! The projections of a tensor-parallel attention block. Each rank keeps some tokens and some heads.
//!
//! ```sh
//! cargo run --release --example attention                                      # two ranks of the host
//! cargo run --release --features cuda --example attention -- --backend cuda   # two GPUs
//! ```
//!
//! `[q, k, v] = gather(x) · [Wq, Wk, Wv]ᵀ` is one call of [`AllGatherMatmul`] with three weights of different widths.
//! It is one gather and one kernel, with outputs side by side. Then each rank attends with its own heads, here on the
//! CPU. `x += Σ heads · Woᵀ` is one call of [`MatmulReduceScatter`], in which the owner of each row adds the residual.

mod numbers;

use clap::{Parser, ValueEnum};
use gemmesh::{AllGatherMatmul, Backend, Group, Host, MatmulReduceScatter, Result, bf16};
use numbers::{product, random, wide};

const TOKENS: usize = 96;
const MODEL: usize = 256;
/// Query heads of each rank. Two of them share a head of keys and values.
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const HEAD: usize = 32;

/// Runs the projections of an attention block: on two ranks of the host, threads of this process, or on two GPUs.
#[derive(Parser)]
struct Args {
    /// The backend that runs the ranks.
    #[arg(long, value_enum, default_value_t = BackendName::Host)]
    backend: BackendName,
}

#[derive(Clone, Copy, ValueEnum)]
enum BackendName {
    Host,
    #[cfg(feature = "cuda")]
    Cuda,
}

fn main() -> Result<()> {
    match Args::parse().backend {
        BackendName::Host => Group::<Host>::threads(2, |group| block(&group)).map(|_| ()),
        #[cfg(feature = "cuda")]
        BackendName::Cuda if !gemmesh::launch::is_rank() => gemmesh::launch::launch(2),
        #[cfg(feature = "cuda")]
        BackendName::Cuda => block(&Group::<gemmesh::Cuda>::from_env()?),
    }
}

/// A rank's part of the block.
fn block<B: Backend>(group: &Group<B>) -> Result<()> {
    let [q, kv] = [HEADS * HEAD, KV_HEADS * HEAD];
    let [wq, wk, wv, wo] = weights(group.rank());
    let [wq, wk, wv] =
        [(&wq, q), (&wk, kv), (&wv, kv)].map(|(weight, rows)| group.upload(weight, rows, MODEL));
    let (wq, wk, wv, wo) = (wq?, wk?, wv?, group.upload(&wo, MODEL, q)?);

    // The own tokens, and the rows of the next block.
    let mut x = group.sharded::<bf16>(TOKENS, MODEL)?;
    let own = x.rows();
    let tokens = tokens(group.rank(), own.len());
    x.shard_mut().copy_from_host(&tokens)?;
    let mut next = group.sharded::<bf16>(TOKENS, MODEL)?;

    // Q, K and V of all tokens for the own heads, as columns of one matrix.
    let mut qkv = group.zeros::<bf16>(TOKENS, q + 2 * kv)?;
    let parts = qkv.view_mut().split_columns([q, kv, kv])?;
    AllGatherMatmul::new().run(&x, [&wq, &wk, &wv], parts)?;

    let heads: Vec<bf16> = attend(&wide(&qkv.to_vec()?))
        .iter()
        .map(|x| bf16::from_f64(*x))
        .collect();
    let heads = group.upload(&heads, TOKENS, q)?;

    // The residual is the shard.
    let output = MatmulReduceScatter::new().residual(x.shard()?);
    output.run_into(&heads, &wo, &mut next)?;

    let found = wide(&next.shard()?.to_vec()?);
    let exact = reference(group.world_size());
    let exact = &exact[own.start * MODEL..own.end * MODEL];
    let size = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let off =
        size(&mut found.iter().zip(exact).map(|(x, y)| x - y)) / size(&mut exact.iter().copied());
    println!(
        "rank {}: tokens {own:?} are off by {off:.4} of their size from float64",
        group.rank()
    );
    assert!(off < 0.01, "the block is wrong");
    Ok(())
}

/// A rank's weights: of queries, keys and values, [heads · head, MODEL], and of the output, [MODEL, heads · head].
fn weights(rank: usize) -> [Vec<bf16>; 4] {
    let weight = |number, rows, columns: usize| {
        random(
            (10 * rank + number + 1) as u64,
            rows * columns,
            (3.0 / columns as f32).sqrt(),
        )
    };
    let [q, kv] = [HEADS * HEAD, KV_HEADS * HEAD];
    [
        weight(1, q, MODEL),
        weight(2, kv, MODEL),
        weight(3, kv, MODEL),
        weight(4, MODEL, q),
    ]
}

/// Tokens that a rank owns.
fn tokens(rank: usize, count: usize) -> Vec<bf16> {
    random(1001 + rank as u64, count * MODEL, 3f32.sqrt())
}

/// The whole block in float64, with nothing rounded on the way. All ranks own the same number of tokens.
fn reference(world: usize) -> Vec<f64> {
    let x: Vec<bf16> = (0..world)
        .flat_map(|rank| tokens(rank, TOKENS / world))
        .collect();
    let x = wide(&x);
    let mut out = x.clone();
    for rank in 0..world {
        let [wq, wk, wv, wo] = weights(rank).map(|weight| wide(&weight));
        let [q, k, v] = [wq, wk, wv].map(|weight| product(&x, &weight, MODEL));
        let widths = [HEADS * HEAD, KV_HEADS * HEAD, KV_HEADS * HEAD];
        let row = |token: usize| {
            let parts = [&q, &k, &v].into_iter().zip(widths);
            parts.flat_map(move |(part, width)| part[token * width..][..width].to_vec())
        };
        let heads = attend(&(0..TOKENS).flat_map(row).collect::<Vec<_>>());
        let part = product(&heads, &wo, HEADS * HEAD);
        out.iter_mut().zip(part).for_each(|(sum, x)| *sum += x);
    }
    out
}

/// Causal attention of a rank's heads, `softmax(q · kᵀ / √d) · v`: rows are [q, k, v].
fn attend(qkv: &[f64]) -> Vec<f64> {
    let [q, kv] = [HEADS * HEAD, KV_HEADS * HEAD];
    let part = |token: usize, first: usize| &qkv[token * (q + 2 * kv) + first..][..HEAD];
    let mut out = Vec::with_capacity(TOKENS * q);
    for token in 0..TOKENS {
        for head in 0..HEADS {
            let query = part(token, head * HEAD);
            let of_kv = head * KV_HEADS / HEADS * HEAD;
            let score = |other| {
                let products = part(other, q + of_kv).iter().zip(query).map(|(k, q)| k * q);
                products.sum::<f64>() / (HEAD as f64).sqrt()
            };
            let weights: Vec<f64> = (0..=token).map(|other| score(other).exp()).collect();
            let sum: f64 = weights.iter().sum();
            out.extend((0..HEAD).map(|column| {
                let of_value = q + kv + of_kv;
                let values = weights.iter().enumerate();
                values
                    .map(|(other, weight)| weight / sum * part(other, of_value)[column])
                    .sum::<f64>()
            }));
        }
    }
    out
}
