//! Ranks as processes. Any of these starts them:
//!
//! ```sh
//! cargo run --release --example 02_torchrun   # the program starts four ranks itself
//! torchrun --no-python --nproc-per-node 4 target/release/examples/02_torchrun
//! mpirun -n 4 target/release/examples/02_torchrun
//! srun -n 4 target/release/examples/02_torchrun
//! ```
//!
//! For GPUs, write `Cuda` instead of `Host`, and build with feature `cuda`. Each rank takes a GPU.

use gemmesh::{Group, Host, MatmulReduceScatter, Result, bf16, launch};

const M: usize = 64;
const N: usize = 40;
/// K of each rank.
const K: usize = 32;

fn main() -> Result<()> {
    if !launch::is_rank() {
        return launch::launch(4);
    }
    let group = Group::<Host>::from_env()?;
    let (rank, world) = (group.rank(), group.world_size());

    // out = Σ a_r · b_rᵀ over the ranks r. Each rank has a part of K, and gets some rows of the sum.
    let a: Vec<bf16> = values(M, |row, k| input(rank, row, k));
    let b: Vec<bf16> = values(N, |column, k| weight(rank, column, k));
    let (a, b) = (group.upload(&a, M, K)?, group.upload(&b, N, K)?);
    let mut out = group.sharded::<bf16>(M, N)?;
    MatmulReduceScatter::new().run_into(&a, &b, &mut out)?;

    let own = out.rows().start * N..out.rows().end * N;
    for (i, found) in own.clone().zip(&out.to_vec()?[own]) {
        let (row, column) = (i / N, i % N);
        let part = |r| (0..K).map(move |k| input(r, row, k) * weight(r, column, k));
        let exact: f64 = (0..world).flat_map(part).sum();
        assert_eq!(*found, bf16::from_f64(exact), "element {i}");
    }
    group.barrier()?;
    if rank == 0 {
        println!("{world} processes: all {M} rows are exact up to one rounding");
    }
    Ok(())
}

fn values(rows: usize, value: impl Fn(usize, usize) -> f64) -> Vec<bf16> {
    let all = (0..rows).flat_map(|row| (0..K).map(move |k| (row, k)));
    all.map(|(row, k)| bf16::from_f64(value(row, k))).collect()
}

/// Whole numbers, so small that each rank's part of a sum is exact in bf16.
fn input(rank: usize, row: usize, k: usize) -> f64 {
    ((rank + row * 2 + k * 3) % 5) as f64 - 2.0
}

fn weight(rank: usize, column: usize, k: usize) -> f64 {
    ((rank + column * 3 + k * k) % 7) as f64 - 3.0
}
