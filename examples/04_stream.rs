//! An operation on the caller's stream, between the caller's copies. The host waits once, at the end. Two ranks, a GPU
//! each. Run: `cargo run --release --features cuda --example 04_stream`
#![allow(unsafe_code)]

use cudarc::driver::{CudaContext, CudaStream, result};
use gemmesh::{Cuda, Group, all_gather_matmul, bf16, launch};

type Outcome = Result<(), Box<dyn std::error::Error>>;

const M: usize = 256;
const N: usize = 128;
const K: usize = 64;

fn main() -> Outcome {
    if !launch::is_rank() {
        return Ok(launch::launch(2)?);
    }
    let group = Group::<Cuda>::from_env()?;
    // Ranks take the visible GPUs in turn.
    let context = CudaContext::new(group.rank() % CudaContext::device_count()? as usize)?;
    // `rank` drops the group, and the stream lives longer.
    rank(group, &*context.new_stream()?)
}

fn rank(group: Group<Cuda>, stream: &CudaStream) -> Outcome {
    let a = group.sharded::<bf16>(M, K)?;
    let b = group.upload(&values(7, 0..N * K), N, K)?;
    let mut out = group.zeros::<bf16>(M, N)?;
    let own = a.rows().start * K..a.rows().end * K;
    let to = a.as_device_ptr() + (own.start * size_of::<bf16>()) as u64;
    let (own, mut found) = (values(0, own), vec![bf16::ZERO; M * N]);
    // SAFETY: the stream outlives the group. The copies stay within the own rows and the output, whose rows are
    // multiples of 16 bytes and so have no padding. The stream orders them, and it is waited for before the vectors are
    // dropped.
    let begun = unsafe {
        group.set_stream(stream.cu_stream().cast())?;
        result::memcpy_htod_async(to, &own, stream.cu_stream())?;
        let begun = all_gather_matmul(&a, &b, &mut out);
        result::memcpy_dtoh_async(&mut found, out.as_device_ptr().0, stream.cu_stream())?;
        begun
    };
    stream.synchronize()?;
    begun?;
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
