//! Rows that are gathered, and multiplied by cuBLASLt as they come.

use std::rc::Rc;
use std::time::{Duration, Instant};

use cudarc::driver::sys::CUstream;
use gemmesh::elements::Half;
use gemmesh::fp8::Scaling;
use gemmesh::pipelines::{AllGatherAndConsume, Chunk};
use gemmesh::products::Prepared;
use gemmesh::testing::Variant;
use gemmesh::trace::Trace;
use gemmesh::tuning::{Chunking, Explanation, Route};
use gemmesh::{Config, Cuda, DType, Group, Result};

use super::clock::Timer;
use super::memory::Place;
use super::peers::{CublasLt, Problem, Product};
use super::{Instruments, OnGpus, Peers, way};
use crate::common::gather::AllGather;
use crate::common::{Check, Multiplied, Operation};

/// `out[M, N] = gather(a)[M, K] · b[N, K]ᵀ` by all_gather_and_consume, whose consumer is cuBLASLt.
pub struct Consume<T: Multiplied> {
    gather: AllGather<Cuda, T>,
    /// One for each of the two streams, because products use the handle's memory.
    cublaslt: [Rc<CublasLt>; 2],
    /// In the order of the calls.
    products: Vec<Product>,
    /// The host's time in them.
    in_functions: Duration,
    /// The group's.
    stream: CUstream,
}

impl<T: Multiplied + Half> Consume<T> {
    /// The product of the chunk that call `index` gets.
    fn product(&self, index: usize, chunk: &Chunk<Cuda, T>) -> Result<Product> {
        let ([rows, k], [n, _]) = (chunk.shape(), self.gather.b.shape());
        let a = Place {
            ptr: chunk.as_device_ptr(),
            pitch: k,
            dtype: T::DTYPE,
        };
        let mut out = Place::of(&self.gather.out);
        out.ptr += (chunk.rows().start * out.pitch * size_of::<T>()) as u64;
        let cublaslt = &self.cublaslt[index % 2];
        let b = Place::of(&self.gather.b);
        Product::new(cublaslt, &Problem::new(a, b, out, [rows, n, k]))
    }

    fn tune(&mut self, timer: &Timer) -> Result<()> {
        let mut products = self.products.iter_mut();
        products.try_for_each(|product| product.tune(timer))
    }
}

impl<T: Multiplied + Half> Operation<Cuda, T> for Consume<T> {
    const NAME: &'static str = "all_gather_and_consume";
    const COLLECTIVE: &'static str = "gather";
    const SEQUENTIAL: &'static str = "gather, then cuBLASLt by chunks";
    const OUT: DType = T::DTYPE;
    type Prepared = Prepared<'static, Cuda, T>;

    fn scaled(
        group: &Group<Cuda>,
        shape: [usize; 3],
        stages: usize,
        scaling: Scaling,
    ) -> Result<Self> {
        super::clock::bind(group)?;
        Ok(Consume {
            gather: AllGather::scaled(group, shape, stages, scaling)?,
            cublaslt: [Rc::new(CublasLt::new()?), Rc::new(CublasLt::new()?)],
            products: Vec::new(),
            in_functions: Duration::ZERO,
            stream: group.stream().cast(),
        })
    }

    fn describe(shape: [usize; 3]) -> String {
        AllGather::<Cuda, T>::describe(shape)
    }

    /// gemmesh's own product, which is timed beside it, and the number of chunks.
    fn prepare(&self, config: Option<Config>) -> Result<Self::Prepared> {
        let pulled = match config {
            Some(config) => config,
            None => {
                let tile = self.gather.prepare(None)?.config().tile;
                // The number that the library chooses.
                let chunks = if self.gather.a.rows().len() < self.gather.a.shape()[0] / 3 {
                    1
                } else {
                    2
                };
                Config::new(tile, Chunking::new(chunks), Route::Pull)
            }
        };
        self.gather.prepare(Some(pulled.with_route(Route::Pull)))
    }

    fn explain(prepared: &Self::Prepared) -> Explanation {
        prepared.explain()
    }

    fn run(&mut self, prepared: &Self::Prepared) -> Result<()> {
        let chunks = prepared.config().chunking.count;
        let operation = AllGatherAndConsume::new().chunks(chunks);
        let mut made = 0;
        if self.products.is_empty() {
            let mut products = Vec::new();
            operation.run(&self.gather.a, |chunk| {
                products.push(self.product(products.len(), &chunk)?);
                Ok(())
            })?;
            self.products = products;
        }
        operation.run(&self.gather.a, |chunk| {
            let begin = Instant::now();
            self.products[made].run(chunk.stream().cast())?;
            made += 1;
            self.in_functions += begin.elapsed();
            Ok(())
        })
    }

    fn multiply(&mut self, prepared: &Self::Prepared) -> Result<()> {
        self.gather.multiply(prepared)
    }

    fn communicate(&mut self, prepared: &Self::Prepared) -> Result<()> {
        self.gather.communicate(prepared)
    }

    fn run_in_sequence(&mut self, prepared: &Self::Prepared) -> Result<()> {
        self.communicate(prepared)?;
        let mut products = self.products.iter();
        products.try_for_each(|product| product.run(self.stream))
    }

    fn trace(&mut self, prepared: &Self::Prepared) -> Result<Trace> {
        let operation = AllGatherAndConsume::new().chunks(prepared.config().chunking.count);
        let mut products = self.products.iter();
        operation.run_traced(&self.gather.a, |chunk| {
            let product = products.next().ok_or("there is a product for each chunk")?;
            Ok(product.run(chunk.stream().cast())?)
        })
    }

    fn poison(&mut self) -> Result<()> {
        self.gather.poison()
    }

    fn check(&mut self, products: usize) -> Result<Check> {
        self.gather.check(products)
    }
}

impl<T: Multiplied + Half> OnGpus<T> for Consume<T> {
    fn peers(&mut self, instruments: &Instruments, prepared: &Self::Prepared) -> Result<Peers> {
        let peers = self.gather.peers(instruments, prepared)?;
        self.tune(&instruments.timer)?;
        Ok(peers)
    }

    fn copy(&mut self, prepared: &Self::Prepared) -> Result<()> {
        self.gather.copy(prepared)
    }

    fn ways() -> Vec<(Variant, Config)> {
        [1, 2, 4]
            .map(|count| (Variant::Forms, way(Route::Pull, Chunking::new(count))))
            .into()
    }

    fn can_be_captured(_: &Self::Prepared) -> bool {
        true
    }

    fn in_functions(&mut self) -> Option<Duration> {
        Some(std::mem::take(&mut self.in_functions))
    }
}
