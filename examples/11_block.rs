//! A whole transformer block on four ranks, tensor- and sequence-parallel: norms on own rows, grouped-query attention on
//! own heads, a gated MLP, and residuals that are the shards themselves. Compared with float64.

use gemmesh::{
    Activation, AllGatherMatmul, Group, Host, MatmulReduceScatter, Matrix, Result, ShardedMatrix,
    bf16,
};

const RANKS: usize = 4;
const TOKENS: usize = 20;
const MODEL: usize = 64;
const HEAD: usize = 8;
const HEADS: usize = 2; // queries' heads of each rank
const Q: usize = HEADS * HEAD;
const KV: usize = HEAD; // one head of keys and values on each rank
const HIDDEN: usize = 24; // of each rank

fn main() -> Result<()> {
    let off = Group::<Host>::threads(RANKS, rank)?;
    println!("{RANKS} ranks: off by {off:.4?} of the size of their rows");
    Ok(())
}

/// A rank's part of the weights.
struct Block {
    qkv: Matrix<Host, bf16>,    // [Q + 2 KV, MODEL]
    output: Matrix<Host, bf16>, // [MODEL, Q]
    gate: Matrix<Host, bf16>,   // [HIDDEN, MODEL]
    up: Matrix<Host, bf16>,     // [HIDDEN, MODEL]
    down: Matrix<Host, bf16>,   // [MODEL, HIDDEN]
}

/// What blocks share, one after the other.
struct Buffers {
    normed: ShardedMatrix<Host, bf16>, // [TOKENS, MODEL], what is gathered
    middle: ShardedMatrix<Host, bf16>, // [TOKENS, MODEL], after the attention
    qkv: Matrix<Host, bf16>,           // [TOKENS, Q + 2 KV]
    heads: Matrix<Host, bf16>,         // [TOKENS, Q]
    hidden: Matrix<Host, bf16>,        // [TOKENS, HIDDEN]
}

impl Block {
    /// `x` is [TOKENS, MODEL]. Its own rows are the block's input, and then its output.
    fn forward(&self, x: &mut ShardedMatrix<Host, bf16>, buffers: &mut Buffers) -> Result<()> {
        let Buffers {
            normed,
            middle,
            qkv,
            heads,
            hidden,
        } = buffers;
        norm(x.shard_slice()?, normed.shard_slice_mut()?);
        AllGatherMatmul::new().run(&*normed, &self.qkv, &mut *qkv)?;
        heads.copy_from_host(&half(&attend(&wide(qkv.as_slice()?))))?;
        let output = MatmulReduceScatter::new().residual(x.shard()?);
        output.run_into(&*heads, &self.output, middle)?;

        norm(middle.shard_slice()?, normed.shard_slice_mut()?);
        let gated = AllGatherMatmul::new().gated().activation(Activation::Silu);
        gated.run(&*normed, [&self.gate, &self.up], &mut *hidden)?;
        let down = MatmulReduceScatter::new().residual(middle.shard()?);
        down.run_into(&*hidden, &self.down, x)
    }
}

fn rank(group: Group<Host>) -> Result<f64> {
    let [qkv, output, gate, up, down] = weights(group.rank());
    let upload = |weight: &[f64], rows, columns| group.upload(&half(weight), rows, columns);
    let block = Block {
        qkv: upload(&qkv, Q + 2 * KV, MODEL)?,
        output: upload(&output, MODEL, Q)?,
        gate: upload(&gate, HIDDEN, MODEL)?,
        up: upload(&up, HIDDEN, MODEL)?,
        down: upload(&down, MODEL, HIDDEN)?,
    };
    let mut buffers = Buffers {
        normed: group.sharded(TOKENS, MODEL)?,
        middle: group.sharded(TOKENS, MODEL)?,
        qkv: group.zeros(TOKENS, Q + 2 * KV)?,
        heads: group.zeros(TOKENS, Q)?,
        hidden: group.zeros(TOKENS, HIDDEN)?,
    };
    let mut x = group.sharded::<bf16>(TOKENS, MODEL)?;
    let own = x.rows().start * MODEL..x.rows().end * MODEL;
    x.shard_mut()
        .copy_from_host(&half(&tokens()[own.clone()]))?;

    block.forward(&mut x, &mut buffers)?;

    let (found, exact) = (wide(x.shard_slice()?), exact());
    let size = |values: &[f64]| values.iter().map(|x| x * x).sum::<f64>().sqrt();
    let off: Vec<f64> = found
        .iter()
        .zip(&exact[own.clone()])
        .map(|(x, y)| x - y)
        .collect();
    let off = size(&off) / size(&exact[own]);
    assert!(off < 0.02, "rank {}: off by {off}", group.rank());
    Ok(off)
}

/// The block in float64, with all ranks' weights.
fn exact() -> Vec<f64> {
    let x = tokens();
    let (mut middle, input) = (x.clone(), normed(&x));
    for [qkv, output, ..] in (0..RANKS).map(weights) {
        let heads = attend(&multiply(&input, &qkv, MODEL));
        add(&mut middle, &multiply(&heads, &output, Q));
    }
    let (mut out, input) = (middle.clone(), normed(&middle));
    for [.., gate, up, down] in (0..RANKS).map(weights) {
        let [gate, up] = [&gate, &up].map(|weight| multiply(&input, weight, MODEL));
        let silu = |x: f64| x / (1.0 + (-x).exp());
        let hidden: Vec<f64> = gate
            .iter()
            .zip(up)
            .map(|(gate, up)| silu(*gate) * up)
            .collect();
        add(&mut out, &multiply(&hidden, &down, HIDDEN));
    }
    out
}

/// `a · bᵀ`, where both have rows of `k` values.
fn multiply(a: &[f64], b: &[f64], k: usize) -> Vec<f64> {
    let dot = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| x * y).sum();
    let row = |x| b.chunks(k).map(move |y| dot(x, y));
    a.chunks(k).flat_map(row).collect()
}

fn add(to: &mut [f64], values: &[f64]) {
    to.iter_mut().zip(values).for_each(|(to, x)| *to += x);
}

/// Divides each row by its root mean square.
fn norm(x: &[bf16], out: &mut [bf16]) {
    out.copy_from_slice(&half(&normed(&wide(x))));
}

fn normed(x: &[f64]) -> Vec<f64> {
    let rows = x.chunks(MODEL).flat_map(|row| {
        let size = (row.iter().map(|x| x * x).sum::<f64>() / MODEL as f64).sqrt();
        row.iter().map(move |x| x / size)
    });
    rows.collect()
}

/// Causal attention of a rank's heads of queries, which share the head of keys and values. `qkv` is [TOKENS, Q + 2 KV],
/// and the result [TOKENS, Q].
fn attend(qkv: &[f64]) -> Vec<f64> {
    let rows: Vec<&[f64]> = qkv.chunks(Q + 2 * KV).collect();
    let mut out = Vec::with_capacity(TOKENS * Q);
    for (token, row) in rows.iter().enumerate() {
        for query in row[..Q].chunks(HEAD) {
            let score = |row: &&[f64]| -> f64 {
                let dot: f64 = query.iter().zip(&row[Q..]).map(|(q, k)| q * k).sum();
                (dot / (HEAD as f64).sqrt()).exp()
            };
            let scores: Vec<f64> = rows[..=token].iter().map(score).collect();
            let all: f64 = scores.iter().sum();
            let value = |d: usize| {
                let terms = scores
                    .iter()
                    .zip(&rows)
                    .map(|(score, row)| score * row[Q + KV + d]);
                terms.sum::<f64>() / all
            };
            out.extend((0..HEAD).map(value));
        }
    }
    out
}

/// A rank's weights of queries, keys and values, of the output, of the gate, of up and of down.
fn weights(rank: usize) -> [Vec<f64>; 5] {
    let first = 5 * rank + 1;
    let lengths = [
        (Q + 2 * KV) * MODEL,
        MODEL * Q,
        HIDDEN * MODEL,
        HIDDEN * MODEL,
        MODEL * HIDDEN,
    ];
    let mut number = 0..;
    lengths.map(|length| {
        let seed = first + number.next().unwrap_or(0);
        values(seed, length).iter().map(|x| x / 4.0).collect()
    })
}

fn tokens() -> Vec<f64> {
    values(0, TOKENS * MODEL)
}

/// Multiples of 1/16, which bf16 holds exactly.
fn values(seed: usize, length: usize) -> Vec<f64> {
    let value = |i: usize| ((seed * 31 + i * i / 3 + i * 7) % 33) as f64 / 16.0 - 1.0;
    (0..length).map(value).collect()
}

fn wide(values: &[bf16]) -> Vec<f64> {
    values.iter().map(|x| x.to_f64()).collect()
}

fn half(values: &[f64]) -> Vec<bf16> {
    values.iter().map(|x| bf16::from_f64(*x)).collect()
}
