//! The ranks of a model as a trait object, for every backend.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use candle_core::{DType, Error as CandleError, Tensor};
use gemmesh::error::{Call, Kind};
use gemmesh::raw;
use gemmesh::{Error, F8E4M3, Result, bf16, f16};

use crate::device::{Device, no_such_dtype};
use crate::failure::Failure;
use crate::products::{Columns, LayerTensors, MAKE, Product, RowsOfWeight};
use crate::ranks::{Collective, Ranks};

/// The types of weights, in messages.
const WEIGHTS: &str = "BF16, F16 or F8E4M3";

/// Ranks of any backend.
pub trait AnyRanks: Send + Sync {
    fn rank(&self) -> usize;
    fn world_size(&self) -> usize;
    fn capacity(&self) -> usize;
    fn set_tokens(&self, tokens: usize) -> Result<()>;
    fn split(&self) -> Vec<usize>;
    fn barrier(&self) -> Result<()>;
    fn synchronize(&self) -> Result<()>;
    fn all_gather_bytes(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>>;
    /// Checks that this rank can make a call.
    fn check(&self) -> Result<()>;
    /// Notes an error of a call that is not collective. The other ranks learn of it if this rank leaves because of it.
    fn noted(&self, error: Error) -> Error;
    /// Tells the ranks that wait for this one in the making of a layer why it does not make one.
    fn refuse_making(&self, error: &CandleError);
    /// Makes a layer of column-parallel weights with one input. It is gated if they are a gate and its up projection.
    fn columns(
        self: Arc<Self>,
        tensors: LayerTensors,
        gated: bool,
    ) -> Result<Arc<dyn Product>, Failure>;
    /// Makes a layer of a row-parallel weight.
    fn rows(self: Arc<Self>, tensors: LayerTensors) -> Result<Arc<dyn Product>, Failure>;
    fn exchange(&self, collective: Collective<'_>, x: &Tensor) -> Result<Tensor, Failure>;
}

impl<B: Device> AnyRanks for Ranks<B> {
    fn rank(&self) -> usize {
        self.group.rank()
    }

    fn world_size(&self) -> usize {
        self.group.world_size()
    }

    fn capacity(&self) -> usize {
        self.capacity
    }

    fn set_tokens(&self, tokens: usize) -> Result<()> {
        if tokens > self.capacity {
            return Err(self.noted(
                Kind::Limit {
                    what: "the number of tokens".into(),
                    value: tokens,
                    min: 0,
                    max: self.capacity,
                }
                .on(self.group.rank())
                .in_call(Call::here("TensorParallel::set_tokens")),
            ));
        }
        self.tokens.store(tokens, Ordering::Relaxed);
        Ok(())
    }

    fn split(&self) -> Vec<usize> {
        let m = self.tokens.load(Ordering::Relaxed);
        self.group.even_rows(m)
    }

    fn barrier(&self) -> Result<()> {
        self.group.barrier()
    }

    fn synchronize(&self) -> Result<()> {
        self.group.synchronize()
    }

    fn all_gather_bytes(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.group.all_gather_bytes(bytes)
    }

    fn check(&self) -> Result<()> {
        self.group.check()
    }

    fn noted(&self, error: Error) -> Error {
        raw::noted(&self.group, error)
    }

    fn refuse_making(&self, error: &CandleError) {
        self.refuse(MAKE, error);
    }

    fn columns(
        self: Arc<Self>,
        tensors: LayerTensors,
        gated: bool,
    ) -> Result<Arc<dyn Product>, Failure> {
        Ok(match tensors.dtype() {
            DType::BF16 => Arc::new(Columns::<B, bf16>::new(self, tensors, gated)?),
            DType::F16 => Arc::new(Columns::<B, f16>::new(self, tensors, gated)?),
            DType::F8E4M3 => Arc::new(Columns::<B, F8E4M3>::new(self, tensors, gated)?),
            other => return self.refuse_dtype(MAKE, "weight", WEIGHTS, other),
        })
    }

    fn rows(self: Arc<Self>, tensors: LayerTensors) -> Result<Arc<dyn Product>, Failure> {
        Ok(match tensors.dtype() {
            DType::BF16 => Arc::new(RowsOfWeight::<B, bf16>::new(self, tensors)?),
            DType::F16 => Arc::new(RowsOfWeight::<B, f16>::new(self, tensors)?),
            DType::F8E4M3 => Arc::new(RowsOfWeight::<B, F8E4M3>::new(self, tensors)?),
            other => return self.refuse_dtype(MAKE, "weight", WEIGHTS, other),
        })
    }

    fn exchange(&self, collective: Collective<'_>, x: &Tensor) -> Result<Tensor, Failure> {
        match x.dtype() {
            DType::BF16 => self.exchange_typed::<bf16>(collective, x),
            DType::F16 => self.exchange_typed::<f16>(collective, x),
            other => self.refuse_dtype("a collective", "x", "BF16 or F16", other),
        }
    }
}

impl<B: Device> Ranks<B> {
    fn refuse_dtype<R>(
        &self,
        call: &'static str,
        argument: &str,
        expected: &str,
        dtype: DType,
    ) -> Result<R, Failure> {
        self.before(call, || {
            Err(no_such_dtype(self.group.rank(), argument, expected, dtype).into())
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use candle_core::Device as CandleDevice;
    use gemmesh::{Group, Host};

    use super::*;

    #[test]
    fn m_and_its_split_belong_together_whoever_sets_m_meanwhile() -> Result<()> {
        const CAPACITY: usize = 64;
        let rank = |group| {
            let ranks = Ranks::<Host>::new(group, &CandleDevice::Cpu, CAPACITY)?;
            let done = AtomicBool::new(false);
            std::thread::scope(|scope| {
                let setter = scope.spawn(|| {
                    while !done.load(Ordering::Relaxed) {
                        ranks.set_tokens(1)?;
                        ranks.set_tokens(CAPACITY)?;
                    }
                    Ok::<_, Error>(())
                });
                let apart = (0..1_000_000).find(|_| {
                    let (m, split) = ranks.step().expect("the group goes on");
                    m != split.iter().sum::<usize>()
                });
                done.store(true, Ordering::Relaxed);
                setter.join().expect("the setter ends")?;
                assert_eq!(apart, None, "the step in which they were apart");
                Ok(())
            })
        };
        Group::<Host>::threads(1, rank).map(drop)
    }
}
