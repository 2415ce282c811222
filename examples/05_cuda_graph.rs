//! A `matmul_all_reduce` that is captured once in a CUDA graph, and replayed for new rows. Two ranks, a GPU each.
//! Run: `cargo run --release --features cuda --example 05_cuda_graph`
#![allow(unsafe_code)]

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream, sys};
use gemmesh::{Cuda, Group, bf16, launch, matmul_all_reduce};

type Outcome = Result<(), Box<dyn std::error::Error>>;

const M: usize = 8;
const N: usize = 64;
const K: usize = 32;

fn main() -> Outcome {
    if !launch::is_rank() {
        return Ok(launch::launch(2)?);
    }
    let group = Group::<Cuda>::from_env()?;
    // Ranks take the visible GPUs in turn.
    let context = CudaContext::new(group.rank() % CudaContext::device_count()? as usize)?;
    // `rank` drops the group, and the stream lives longer.
    rank(group, &context.new_stream()?)
}

fn rank(group: Group<Cuda>, stream: &Arc<CudaStream>) -> Outcome {
    let (rank, world) = (group.rank(), group.world_size());
    // SAFETY: the stream outlives the group.
    unsafe { group.set_stream(stream.cu_stream().cast())? };
    let mut a = group.zeros::<bf16>(M, K)?;
    let b = group.upload(&values(rank, N * K), N, K)?;
    let mut out = group.sharded::<bf16>(M, N)?;

    // The first run allocates, which is not possible during a capture.
    matmul_all_reduce(&a, &b, &mut out)?;
    stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED)?;
    let captured = matmul_all_reduce(&a, &b, &mut out);
    let graph = stream.end_capture(sys::CUgraphInstantiate_flags(0))?;
    captured?;
    let graph = graph.ok_or("nothing was captured")?;

    // All ranks launch the graph equally often.
    for step in 1..=20 {
        a.copy_from_host(&values(step + rank, M * K))?;
        graph.launch()?;
        group.synchronize()?;
        for (i, found) in out.to_vec()?.into_iter().enumerate() {
            let term = |r, k| value(step + r, i / N * K + k) * value(r, i % N * K + k);
            let exact = (0..world * K).map(|i| term(i / K, i % K)).sum();
            assert_eq!(found, bf16::from_f64(exact), "step {step}, element {i}");
        }
    }
    println!("rank {rank}: 20 replays are exact up to one rounding");
    Ok(())
}

fn values(seed: usize, count: usize) -> Vec<bf16> {
    (0..count).map(|i| bf16::from_f64(value(seed, i))).collect()
}

/// Whole numbers, so small that each rank's part of a sum is exact in bf16.
fn value(seed: usize, i: usize) -> f64 {
    ((seed + i * i + i / 7) % 5) as f64 - 2.0
}
