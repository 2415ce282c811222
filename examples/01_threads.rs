//! Four ranks as threads of one process. Each owns some rows of `a`, and multiplies all rows by its own columns of the
//! layer. Run: `cargo run --release --example 01_threads`

use gemmesh::{Group, Host, Result, all_gather_matmul, bf16};

const M: usize = 64;
/// Columns of each rank.
const N: usize = 24;
const K: usize = 96;

fn main() -> Result<()> {
    let checked = Group::<Host>::threads(4, rank)?;
    let (ranks, elements) = (checked.len(), checked.iter().sum::<usize>());
    println!("{ranks} ranks: {elements} elements are exact up to one rounding");
    Ok(())
}

fn rank(group: Group<Host>) -> Result<usize> {
    // All ranks' rows are [M, K]. This rank writes the rows that it owns.
    let mut a = group.sharded::<bf16>(M, K)?;
    let own: Vec<bf16> = a.rows().flat_map(|row| line(row, input)).collect();
    a.shard_mut().copy_from_host(&own)?;

    // [N, K]: each of this rank's columns of the layer is a row, as in the weight of a linear layer.
    let first = group.rank() * N;
    let weights: Vec<bf16> = (first..first + N).flat_map(|n| line(n, weight)).collect();
    let b = group.upload(&weights, N, K)?;

    let mut out = group.zeros::<bf16>(M, N)?;
    all_gather_matmul(&a, &b, &mut out)?;

    for (i, found) in out.to_vec()?.into_iter().enumerate() {
        let (row, column) = (i / N, first + i % N);
        let exact: f64 = (0..K).map(|k| input(row, k) * weight(column, k)).sum();
        assert_eq!(found, bf16::from_f64(exact), "row {row}, column {column}");
    }
    Ok(M * N)
}

/// K values of a row.
fn line(row: usize, value: fn(usize, usize) -> f64) -> impl Iterator<Item = bf16> {
    (0..K).map(move |k| bf16::from_f64(value(row, k)))
}

/// Whole numbers, whose sums are exact in f32. So the result is rounded once.
fn input(row: usize, k: usize) -> f64 {
    ((row * 7 + k * 3) % 9) as f64 - 4.0
}

fn weight(column: usize, k: usize) -> f64 {
    ((column * 5 + k * k) % 11) as f64 - 5.0
}
