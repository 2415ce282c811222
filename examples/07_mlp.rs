//! A gated MLP with its residual, tensor- and sequence-parallel: x + silu(x · gateᵀ) * (x · upᵀ) · downᵀ.

use gemmesh::{Activation, AllGatherMatmul, Group, Host, MatmulReduceScatter, Result, bf16};

const RANKS: usize = 4;
const TOKENS: usize = 32;
const MODEL: usize = 64;
const HIDDEN: usize = 24; // of each rank

fn main() -> Result<()> {
    let off = Group::<Host>::threads(RANKS, rank)?;
    println!("{RANKS} ranks: off by {off:.4?} of the size of their rows");
    Ok(())
}

fn rank(group: Group<Host>) -> Result<f64> {
    let first = 4 * group.rank();
    let upload = |which, m, n| group.upload(&values(first + which, 0..m * n), m, n);
    let (gate, up) = (upload(1, HIDDEN, MODEL)?, upload(2, HIDDEN, MODEL)?);
    let down = upload(3, MODEL, HIDDEN)?;
    let mut x = group.sharded::<bf16>(TOKENS, MODEL)?;
    let own = x.rows().start * MODEL..x.rows().end * MODEL;
    x.shard_mut().copy_from_host(&values(0, own.clone()))?;
    let mut next = group.sharded::<bf16>(TOKENS, MODEL)?;
    let mut hidden = group.zeros::<bf16>(TOKENS, HIDDEN)?;

    let gated = AllGatherMatmul::new().gated().activation(Activation::Silu);
    gated.run(&x, [&gate, &up], &mut hidden)?;
    // The residual is this rank's shard. The sums go to the own rows of the next layer's input.
    let sum = MatmulReduceScatter::new().residual(x.shard()?);
    sum.run_into(&hidden, &down, &mut next)?;
    let (found, mut off, mut size) = (next.to_vec()?, 0.0, 0.0);
    for i in own {
        let exact = exact(i / MODEL, i % MODEL);
        off += (found[i].to_f64() - exact).powi(2);
        size += exact.powi(2);
    }
    assert!(off < 1e-4 * size, "{off} of {size}");
    Ok((off / size).sqrt())
}

fn exact(row: usize, column: usize) -> f64 {
    let term = |w, i| value(0, row * MODEL + i % MODEL) * value(w, i);
    let dot = |w, h| (h * MODEL..(h + 1) * MODEL).fold(0.0, |sum, i| sum + term(w, i));
    let part = |first, h| {
        let (gate, up) = (dot(first + 1, h), dot(first + 2, h));
        gate / (1.0 + (-gate).exp()) * up * value(first + 3, column * HIDDEN + h)
    };
    let parts = (0..RANKS * HIDDEN).map(|i| part(4 * (i / HIDDEN), i % HIDDEN));
    value(0, row * MODEL + column) + parts.sum::<f64>()
}

fn values(seed: usize, range: std::ops::Range<usize>) -> Vec<bf16> {
    range.map(|i| bf16::from_f64(value(seed, i))).collect()
}

/// Multiples of 1/8, which bf16 holds exactly.
fn value(seed: usize, i: usize) -> f64 {
    ((seed * 5 + i * i / 3 + i * 7) % 9) as f64 / 8.0 - 0.5
}
