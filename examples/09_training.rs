//! Forward pass and gradients of z = relu(x · w1ᵀ) · w2ᵀ, tensor- and sequence-parallel.

use gemmesh::products::WeightLayout;
use gemmesh::{
    Activation, AllGatherMatmul, Group, Host, MatmulReduceScatter, Matrix, Result, ShardedMatrix,
    bf16,
};

const RANKS: usize = 4;
const TOKENS: usize = 32;
const MODEL: usize = 48;
const HIDDEN: usize = 24; // of each rank

fn main() -> Result<()> {
    for (rank, off) in Group::<Host>::threads(RANKS, rank)?.iter().enumerate() {
        println!("rank {rank}: z, dx, dw1, dw2 are off by {off:.4?} of their size");
    }
    Ok(())
}

type Rows = ShardedMatrix<Host, bf16>; // [TOKENS, MODEL]

/// This rank's parts of the weights, and the hidden rows with their gradient.
struct Mlp {
    w1: Matrix<Host, bf16>,     // [HIDDEN, MODEL]
    w2: Matrix<Host, bf16>,     // [MODEL, HIDDEN]
    hidden: Matrix<Host, bf16>, // [TOKENS, HIDDEN]
    dh: Matrix<Host, bf16>,     // [TOKENS, HIDDEN]
}

impl Mlp {
    /// Gathers x, and writes the own rows of z.
    fn forward(&mut self, x: &Rows, z: &mut Rows) -> Result<()> {
        let first = AllGatherMatmul::new().activation(Activation::Relu);
        first.run(x, &self.w1, &mut self.hidden)?;
        MatmulReduceScatter::new().run_into(&self.hidden, &self.w2, z)
    }

    /// Gathers dz, writes the own rows of dx, and returns dw1 and dw2. The rows of x are still gathered.
    fn backward(&mut self, dz: &mut Rows, x: &mut Rows, dx: &mut Rows) -> Result<[Vec<f64>; 2]> {
        // dh = dz · w2, with the weight's memory read as [K, N].
        let second = AllGatherMatmul::new().weight_layout(WeightLayout::Kn);
        second.run(&*dz, &self.w2, &mut self.dh)?;

        let (hidden, mut dh) = (self.hidden.to_vec()?, self.dh.to_vec()?);
        for (d, h) in dh.iter_mut().zip(&hidden) {
            *d = if *h > bf16::ZERO { *d } else { *h };
        }
        self.dh.copy_from_host(&dh)?;

        // dx = dh · w1
        let first = MatmulReduceScatter::new().weight_layout(WeightLayout::Kn);
        first.run_into(&self.dh, &self.w1, dx)?;

        // dw1 = dhᵀ · x and dw2 = dzᵀ · hidden. Every rank has all rows of x and of dz.
        let [dh, x] = [wide(&dh), wide(&x.to_vec()?)];
        let [dz, hidden] = [wide(&dz.to_vec()?), wide(&hidden)];
        Ok([wgrad(&dh, &x), wgrad(&dz, &hidden)])
    }
}

/// aᵀ · b, of matrices with a row for each token, by the program's own GEMM.
fn wgrad(a: &[f64], b: &[f64]) -> Vec<f64> {
    let (m, n) = (a.len() / TOKENS, b.len() / TOKENS);
    dots([m, n, TOKENS], |i, j, t| a[t * m + i] * b[t * n + j])
}

fn rank(group: Group<Host>) -> Result<[f64; 4]> {
    let [w1, w2] = weights(group.rank());
    let mut mlp = Mlp {
        w1: group.upload(&half(&w1), HIDDEN, MODEL)?,
        w2: group.upload(&half(&w2), MODEL, HIDDEN)?,
        hidden: group.zeros(TOKENS, HIDDEN)?,
        dh: group.zeros(TOKENS, HIDDEN)?,
    };
    let rows = || group.sharded::<bf16>(TOKENS, MODEL);
    let [mut x, mut z, mut dz, mut dx] = [rows()?, rows()?, rows()?, rows()?];
    let own = x.rows().start * MODEL..x.rows().end * MODEL;
    let [all_x, all_dz] = [1, 2].map(|seed| values(seed, TOKENS * MODEL));
    x.shard_mut().copy_from_host(&half(&all_x[own.clone()]))?;
    dz.shard_mut().copy_from_host(&half(&all_dz[own.clone()]))?;

    mlp.forward(&x, &mut z)?;
    let [dw1, dw2] = mlp.backward(&mut dz, &mut x, &mut dx)?;

    let exact = exact(group.rank(), &all_x, &all_dz);
    let [z, dx] = [wide(&z.to_vec()?), wide(&dx.to_vec()?)];
    let found = [&z[own.clone()], &dx[own.clone()], &dw1, &dw2];
    let exact = [&exact[0][own.clone()], &exact[1][own], &exact[2], &exact[3]];
    let off = std::array::from_fn(|i| off(found[i], exact[i]));
    assert!(off.iter().all(|off| *off < 0.01), "{off:?}");
    Ok(off)
}

/// z and dx of all tokens, and this rank's dw1 and dw2, in float64.
fn exact(rank: usize, x: &[f64], dz: &[f64]) -> [Vec<f64>; 4] {
    let mut exact: [Vec<f64>; 4] = Default::default();
    let add = |sum: &mut Vec<f64>, part: Vec<f64>| {
        sum.resize(part.len(), 0.0);
        for (sum, part) in sum.iter_mut().zip(part) {
            *sum += part;
        }
    };
    for other in 0..RANKS {
        let [w1, w2] = weights(other);
        let [inner, outer] = [[TOKENS, HIDDEN, MODEL], [TOKENS, MODEL, HIDDEN]];
        let mut hidden = dots(inner, |t, h, m| x[t * MODEL + m] * w1[h * MODEL + m]);
        let mut dh = dots(inner, |t, h, m| dz[t * MODEL + m] * w2[m * HIDDEN + h]);
        for (h, d) in hidden.iter_mut().zip(&mut dh).filter(|(h, _)| **h <= 0.0) {
            (*h, *d) = (0.0, 0.0);
        }
        let z = dots(outer, |t, m, h| hidden[t * HIDDEN + h] * w2[m * HIDDEN + h]);
        let dx = dots(outer, |t, m, h| dh[t * HIDDEN + h] * w1[h * MODEL + m]);
        add(&mut exact[0], z);
        add(&mut exact[1], dx);
        if other == rank {
            exact[2] = wgrad(&dh, x);
            exact[3] = wgrad(dz, &hidden);
        }
    }
    exact
}

/// Each of m · n elements is a sum of k terms.
fn dots([m, n, k]: [usize; 3], term: impl Fn(usize, usize, usize) -> f64) -> Vec<f64> {
    let dot = |at: usize| (0..k).map(|i| term(at / n, at % n, i)).sum();
    (0..m * n).map(dot).collect()
}

/// The root of the mean square of the difference, in units of that of `exact`.
fn off(found: &[f64], exact: &[f64]) -> f64 {
    let off = found
        .iter()
        .zip(exact)
        .map(|(found, exact)| (found - exact).powi(2));
    (off.sum::<f64>() / exact.iter().map(|exact| exact.powi(2)).sum::<f64>()).sqrt()
}

fn weights(rank: usize) -> [Vec<f64>; 2] {
    [3, 4].map(|seed| values(seed + 2 * rank, HIDDEN * MODEL))
}

/// Multiples of 1/8, which bf16 holds exactly.
fn values(seed: usize, count: usize) -> Vec<f64> {
    let value = |i: usize| ((seed * 5 + i * i / 3 + i * 7) % 9) as f64 / 8.0 - 0.5;
    (0..count).map(value).collect()
}

fn half(values: &[f64]) -> Vec<bf16> {
    values.iter().copied().map(bf16::from_f64).collect()
}

fn wide(values: &[bf16]) -> Vec<f64> {
    values.iter().map(|value| value.to_f64()).collect()
}
