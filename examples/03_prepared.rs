//! A loop whose M changes at every step. Memory is allocated once, and a product is prepared for each size that M is
//! rounded up to. Run: `cargo run --release --example 03_prepared`

use std::collections::BTreeMap;

use gemmesh::{AllGatherMatmul, Group, Host, Result, bf16};

const RANKS: usize = 4;
const CAPACITY: usize = 96;
const SIZES: [usize; 3] = [16, 48, CAPACITY];
const N: usize = 24;
const K: usize = 64;

fn main() -> Result<()> {
    let rows = Group::<Host>::threads(RANKS, rank)?;
    println!("{} rows in 60 steps: exact up to one rounding", rows[0]);
    Ok(())
}

fn rank(group: Group<Host>) -> Result<usize> {
    let mut a = group.sharded_with_capacity::<bf16>(CAPACITY, K)?;
    let mut out = group.zeros::<bf16>(CAPACITY, N)?;
    let weights: Vec<bf16> = (0..N * K).map(|i| bf16::from_f64(value(7, i))).collect();
    let b = group.upload(&weights, N, K)?;

    // A product is prepared for the rows that `a` has at the time.
    let mut products = BTreeMap::new();
    for m in SIZES {
        a.set_rows(&[m / RANKS; RANKS])?;
        products.insert(m, AllGatherMatmul::new().prepare(&a, N)?);
    }
    let mut rows = 0;
    for step in 0..60 {
        let tokens = 1 + step * 37 % CAPACITY;
        // The smallest size that holds the tokens. Rows after them are multiplied too, and not read.
        let fitting = products.range(tokens..).next();
        let (&m, product) = fitting.expect("tokens are at most CAPACITY");
        a.set_rows(&[m / RANKS; RANKS])?;
        out.set_rows(m)?;
        let own = a.rows().start * K..a.rows().end * K;
        let own: Vec<bf16> = own.map(|i| bf16::from_f64(value(step, i))).collect();
        a.shard_mut().copy_from_host(&own)?;
        product.run(&a, &b, &mut out)?;

        for (i, found) in out.to_vec()?.into_iter().take(tokens * N).enumerate() {
            let term = |k| value(step, i / N * K + k) * value(7, i % N * K + k);
            let exact: f64 = (0..K).map(term).sum();
            assert_eq!(found, bf16::from_f64(exact), "step {step}, element {i}");
        }
        rows += tokens;
    }
    Ok(rows)
}

/// Whole numbers, whose sums are exact in f32. So results are rounded once.
fn value(seed: usize, i: usize) -> f64 {
    ((seed + i * i + i / 7) % 9) as f64 - 4.0
}
