//! A product of matrices in cust's memory, on cust's stream, for programs of the Rust-CUDA project. Two ranks, a GPU
//! each. Run: `cargo run --release --features cust --example 08_cust`
#![allow(unsafe_code)]

use cust::context::Context;
use cust::device::Device;
use cust::memory::{CopyDestination, DeviceBuffer};
use cust::stream::{Stream, StreamFlags};
use gemmesh::{AllGatherMatmul, Cuda, Group, Matrix, bf16, launch};

type Outcome = Result<(), Box<dyn std::error::Error>>;

const M: usize = 256;
const N: usize = 128;
const K: usize = 64;

fn main() -> Outcome {
    if !launch::is_rank() {
        return Ok(launch::launch(2)?);
    }
    let group = Group::<Cuda>::from_env()?;
    cust::init(cust::CudaFlags::empty())?;
    // The primary context, which gemmesh uses too.
    let _context = Context::new(Device::get_device(group.device_ordinal() as u32)?)?;
    let stream = Stream::new(StreamFlags::NON_BLOCKING, None)?;

    let mut a = group.sharded::<bf16>(M, K)?;
    let own = a.rows().start * K..a.rows().end * K;
    a.shard_mut().copy_from_host(&values(0, own))?;
    // cust knows the bf16 of an older version of half, so the values are copied as bits.
    let bits = |values: Vec<bf16>| values.into_iter().map(bf16::to_bits).collect::<Vec<u16>>();
    let weight = DeviceBuffer::from_slice(&bits(values(7, 0..N * K)))?;
    let product = DeviceBuffer::from_slice(&vec![0u16; M * N])?;

    // SAFETY: the stream and the memory live until the group has been waited for, which is the last to use them.
    unsafe {
        group.use_cust_stream(&stream)?;
        let b = Matrix::<Cuda, bf16>::from_cust(&group, &weight, N, K)?;
        let mut out = Matrix::<Cuda, bf16>::from_cust(&group, &product, M, N)?;
        AllGatherMatmul::new().run(&a, &b, &mut out)?;
    }
    group.synchronize()?;
    let mut found = vec![0u16; M * N];
    product.copy_to(&mut found)?;
    for (i, found) in found.into_iter().map(bf16::from_bits).enumerate() {
        let term = |k| value(0, i / N * K + k) * value(7, i % N * K + k);
        assert_eq!(found, bf16::from_f64((0..K).map(term).sum()), "element {i}");
    }
    println!("{group:?}: {M} rows are exact up to one rounding");
    // Dropped before the stream that they use.
    drop((a, group));
    Ok(())
}

fn values(seed: usize, range: std::ops::Range<usize>) -> Vec<bf16> {
    range.map(|i| bf16::from_f64(value(seed, i))).collect()
}

/// Whole numbers, whose sums are exact in f32. So results are rounded once.
fn value(seed: usize, i: usize) -> f64 {
    ((seed + i * i + i / 7) % 9) as f64 - 4.0
}
