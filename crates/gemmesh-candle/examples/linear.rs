//! A tensor-parallel MLP on two ranks of the CPU, threads of this process, beside candle's own on one.
//!
//! ```sh
//! cargo run --release -p gemmesh-candle --example linear
//! ```

use candle_core::{DType, Device, Module, Tensor};
use candle_nn::Linear;
use gemmesh_candle::{ColumnParallelLinear, Group, Host, RowParallelLinear, TensorParallel};

type Failure = Box<dyn std::error::Error + Send + Sync>;

const TOKENS: usize = 6;
const MODEL: usize = 64;
const HIDDEN: usize = 256;

fn main() -> Result<(), Failure> {
    let random = |rows, columns: usize| {
        let scale = 1.0 / (columns as f32).sqrt();
        Tensor::randn(0f32, scale, (rows, columns), &Device::Cpu)?.to_dtype(DType::BF16)
    };
    let (up, down) = (random(HIDDEN, MODEL)?, random(MODEL, HIDDEN)?);
    let x = (random(TOKENS, MODEL)? * 8.0)?;

    let parts = Group::<Host>::threads(2, |group| {
        let ranks = TensorParallel::new(group, &Device::Cpu, TOKENS)?;
        let up = ColumnParallelLinear::from_whole(&ranks, &up, None)?;
        let down = RowParallelLinear::from_whole(&ranks, &down, None)?;
        let own = ranks.set_tokens(TOKENS)?;
        let x = x.narrow(0, own.start, own.len())?;
        Ok::<_, Failure>(down.forward(&up.forward(&x)?.relu()?)?)
    })?;

    let f32 = |tensor: &Tensor| tensor.to_dtype(DType::F32);
    let found = f32(&Tensor::cat(&parts, 0)?)?;
    let hidden = Linear::new(f32(&up)?, None).forward(&f32(&x)?)?.relu()?;
    let exact = Linear::new(f32(&down)?, None).forward(&hidden)?;
    let off = ((found - &exact)?.sqr()?.sum_all()? / exact.sqr()?.sum_all()?)?.sqrt()?;
    let off: f32 = off.to_scalar()?;
    println!("two ranks differ from one by {off:.4} of the size: bf16 rounds by up to 0.0039");
    assert!(off < 0.01, "the layers are wrong");
    Ok(())
}
