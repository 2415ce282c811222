//! A product of matrices in cudarc's memory, on cudarc's stream. Nothing is copied, and the host waits once, at the
//! end. Two ranks, a GPU each. Run: `cargo run --release --features cudarc --example 06_cudarc`

use cudarc::driver::CudaContext;
use gemmesh::interop::{CudarcMatrix, CudarcMatrixMut};
use gemmesh::{AllGatherMatmul, Cuda, Group, bf16, launch};

type Outcome = Result<(), Box<dyn std::error::Error>>;

const M: usize = 256;
const N: usize = 128;
const K: usize = 64;

fn main() -> Outcome {
    if !launch::is_rank() {
        return Ok(launch::launch(2)?);
    }
    let group = Group::<Cuda>::from_env()?;
    let stream = CudaContext::new(group.device_ordinal())?.new_stream()?;
    group.use_cudarc_stream(&stream)?;

    let mut a = group.sharded::<bf16>(M, K)?;
    let own = a.rows().start * K..a.rows().end * K;
    a.shard_mut().copy_from_host(&values(0, own))?;
    // Operands that a different library has made.
    let weight = stream.clone_htod(&values(7, 0..N * K))?;
    let mut product = stream.alloc_zeros::<bf16>(M * N)?;
    {
        let b = CudarcMatrix::new(&group, &weight, N, K)?;
        let mut out = CudarcMatrixMut::new(&group, &mut product, M, N)?;
        AllGatherMatmul::new().run(&a, &b, &mut out)?;
    }
    // This copy follows the product on the stream.
    let found: Vec<bf16> = stream.clone_dtoh(&product)?;
    stream.synchronize()?;
    // Checks that the operation succeeded.
    group.synchronize()?;
    for (i, found) in found.into_iter().enumerate() {
        let term = |k| value(0, i / N * K + k) * value(7, i % N * K + k);
        assert_eq!(found, bf16::from_f64((0..K).map(term).sum()), "element {i}");
    }
    println!("{group:?}: {M} rows are exact up to one rounding");
    Ok(())
}

fn values(seed: usize, range: std::ops::Range<usize>) -> Vec<bf16> {
    range.map(|i| bf16::from_f64(value(seed, i))).collect()
}

/// Whole numbers, whose sums are exact in f32. So results are rounded once.
fn value(seed: usize, i: usize) -> f64 {
    ((seed + i * i + i / 7) % 9) as f64 - 4.0
}
