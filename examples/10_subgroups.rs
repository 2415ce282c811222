//! Tensor parallelism within data parallelism: two replicas of a layer, each on two ranks, and the mean of what they
//! make.

use gemmesh::{Group, Host, Result, all_gather_matmul, all_reduce, bf16, matmul_reduce_scatter};

const RANKS: usize = 4;
const TENSOR: usize = 2; // ranks of a replica
const TOKENS: usize = 32; // of a replica
const MODEL: usize = 64;
const HIDDEN: usize = 48; // of each rank
const OWN: usize = TOKENS / TENSOR;

fn main() -> Result<()> {
    let off = Group::<Host>::threads(RANKS, rank)?;
    println!("{RANKS} ranks: off by {off:.4?} of the size of their rows");
    Ok(())
}

fn rank(world: Group<Host>) -> Result<f64> {
    let (replica, part) = (world.rank() / TENSOR, world.rank() % TENSOR);
    // Ranks 0 and 1, and ranks 2 and 3.
    let builder = Group::builder().name(format!("tensor {replica}"));
    let tensor = builder.split(&world, replica, part)?;
    // Ranks 0 and 2, and ranks 1 and 3.
    let builder = Group::builder().name(format!("data {part}"));
    let data = builder.split(&world, part, replica)?;

    // Each replica has its own tokens, and both have the same weights.
    let mut x = tensor.sharded::<bf16>(TOKENS, MODEL)?;
    let first = replica * TOKENS + x.rows().start;
    let own = values(0, first * MODEL..(first + OWN) * MODEL);
    x.shard_mut().copy_from_host(&own)?;
    let weight = |which: usize| values(1 + 2 * part + which, 0..HIDDEN * MODEL);
    let up = tensor.upload(&weight(0), HIDDEN, MODEL)?;
    let down = tensor.upload(&weight(1), MODEL, HIDDEN)?;
    let mut hidden = tensor.zeros::<bf16>(TOKENS, HIDDEN)?;
    let mut out = tensor.zeros::<bf16>(OWN, MODEL)?;
    all_gather_matmul(&x, &up, &mut hidden)?;
    matmul_reduce_scatter(&hidden, &down, &mut out)?;

    // Matrices stay with the group that made them.
    let addend = data.upload(&out.to_vec()?, OWN, MODEL)?;
    let mut sum = data.sharded::<bf16>(OWN, MODEL)?;
    all_reduce(&addend, &mut sum)?;

    let (sum, replicas) = (sum.to_vec()?, RANKS / TENSOR);
    let (mut off, mut size) = (0.0, 0.0);
    for (i, found) in sum.iter().enumerate() {
        let (row, column) = (part * OWN + i / MODEL, i % MODEL);
        let all = (0..replicas).map(|replica| exact(replica * TOKENS + row, column));
        let mean = all.sum::<f64>() / replicas as f64;
        off += (found.to_f64() / replicas as f64 - mean).powi(2);
        size += mean.powi(2);
    }
    assert!(off < 1e-4 * size, "{off} of {size}");
    Ok((off / size).sqrt())
}

/// What one rank would make with the whole weights: x · upᵀ · downᵀ.
fn exact(row: usize, column: usize) -> f64 {
    let hidden = |part: usize, h: usize| {
        let terms =
            (0..MODEL).map(|k| value(0, row * MODEL + k) * value(1 + 2 * part, h * MODEL + k));
        terms.sum::<f64>() * value(2 + 2 * part, column * HIDDEN + h)
    };
    let parts = (0..TENSOR).flat_map(|part| (0..HIDDEN).map(move |h| (part, h)));
    parts.map(|(part, h)| hidden(part, h)).sum()
}

fn values(seed: usize, range: std::ops::Range<usize>) -> Vec<bf16> {
    range.map(|i| bf16::from_f64(value(seed, i))).collect()
}

/// Multiples of 1/8, which bf16 holds exactly.
fn value(seed: usize, i: usize) -> f64 {
    ((seed * 5 + i * i / 3 + i * 7) % 9) as f64 / 8.0 - 0.5
}
