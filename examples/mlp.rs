//! Layers of a tensor-parallel MLP: each rank keeps some rows of `x`, and a part of both weights.
//!
//! ```sh
//! cargo run --release --example mlp
//! ```
//!
//! `h = relu(gather(x) · upᵀ)` by [`all_gather_matmul`], then `x = Σ h · downᵀ` by [`MatmulReduceScatter`], into the rows of `x`
//! that this rank owns: the next layer's input, with no copy between.

use gemmesh::{Group, Host, MatmulReduceScatter, Result, all_gather_matmul, bf16};

const RANKS: usize = 4;
const LAYERS: usize = 3;
/// Tokens.
const M: usize = 256;
/// Features, and those of the hidden layer on each rank.
const MODEL: usize = 128;
const HIDDEN: usize = 96;

fn main() -> Result<()> {
    let errors = Group::threads(RANKS, rank)?;
    let worst = errors.into_iter().fold(0.0, f64::max);
    println!("{LAYERS} layers on {RANKS} ranks: off by {worst:.4} of their size from float64");
    assert!(worst < 0.01, "a layer is wrong");
    Ok(())
}

/// What each rank does. Returns how far its rows are off.
fn rank(group: Group<Host>) -> Result<f64> {
    let mut x = group.sharded::<bf16>(M, MODEL)?;
    let own = x.rows();
    let input = random(0, M * MODEL, 1.0);
    x.shard_mut()
        .copy_from_host(&input[own.start * MODEL..own.end * MODEL])?;
    let [up, down] = weights(group.rank());
    let up = group.upload(&up, HIDDEN, MODEL)?;
    let down = group.upload(&down, MODEL, HIDDEN)?;
    let mut hidden = group.zeros::<bf16>(M, HIDDEN)?;

    for _ in 0..LAYERS {
        all_gather_matmul(&x, &up, &mut hidden)?;
        // A program on GPUs has a kernel for this.
        let mut values = hidden.to_vec()?;
        values.iter_mut().for_each(|x| *x = x.max(bf16::ZERO));
        hidden.copy_from_host(&values)?;
        MatmulReduceScatter::new().run_into(&hidden, &down, &mut x)?;
    }

    let exact = reference(&input);
    let found = x.to_vec()?;
    let own = own.start * MODEL..own.end * MODEL;
    let (mut off, mut size) = (0.0, 0.0);
    for (found, exact) in found[own.clone()].iter().zip(&exact[own]) {
        off += (f64::from(found.to_f32()) - exact).powi(2);
        size += exact.powi(2);
    }
    Ok((off / size).sqrt())
}

/// A rank's parts of the weights: `[HIDDEN, MODEL]` and `[MODEL, HIDDEN]`.
fn weights(rank: usize) -> [Vec<bf16>; 2] {
    let seed = 2 * rank as u64 + 1;
    [seed, seed + 1].map(|seed| random(seed, HIDDEN * MODEL, 0.1))
}

/// Uniform in `-scale..scale`.
fn random(seed: u64, count: usize, scale: f32) -> Vec<bf16> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(|_| bf16::from_f32(next() * scale)).collect()
}

/// All layers in float64, with nothing rounded between them.
fn reference(input: &[bf16]) -> Vec<f64> {
    let wide = |values: &[bf16]| -> Vec<f64> { values.iter().map(|x| x.to_f64()).collect() };
    let mut x = wide(input);
    for _ in 0..LAYERS {
        let mut sum = vec![0.0; M * MODEL];
        for rank in 0..RANKS {
            let [up, down] = weights(rank).map(|weights| wide(&weights));
            let mut hidden = product(&x, &up, MODEL);
            hidden.iter_mut().for_each(|x| *x = x.max(0.0));
            let part = product(&hidden, &down, HIDDEN);
            sum.iter_mut().zip(part).for_each(|(sum, x)| *sum += x);
        }
        x = sum;
    }
    x
}

/// `a · bᵀ`, over `k`.
fn product(a: &[f64], b: &[f64], k: usize) -> Vec<f64> {
    let dot = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| x * y).sum();
    let rows = a.chunks_exact(k);
    rows.flat_map(|row| b.chunks_exact(k).map(move |column| dot(row, column)))
        .collect()
}
