//! Partial sums that cuBLASLt makes block by block. Each block is sent to its owner while the next one is made.

use std::rc::Rc;
use std::time::{Duration, Instant};

use cudarc::driver::sys::CUstream;
use gemmesh::elements::Half;
use gemmesh::fp8::Scaling;
use gemmesh::pipelines::{Block, ProduceAndReduceScatter};
use gemmesh::products::PreparedReduceScatter;
use gemmesh::testing::Variant;
use gemmesh::trace::Trace;
use gemmesh::tuning::{Chunking, Explanation, Route};
use gemmesh::{Config, Cuda, DType, Group, Result};

use super::clock::Timer;
use super::memory::Place;
use super::peers::{CublasLt, Problem, Product};
use super::{Instruments, OnGpus, Peers, way};
use crate::common::{Check, Multiplied, Operation};
use crate::sums::{Operands, Planned, ReduceScatter};

/// `out[rows of this rank, N] = Σ_p a_p[rows, K_p] · b_p[N, K_p]ᵀ` by produce_and_reduce_scatter, whose producer is
/// cuBLASLt.
pub struct Produce<T: Multiplied> {
    sums: ReduceScatter<Cuda, T>,
    /// One for each of the two streams, because products use the handle's memory.
    cublaslt: [Rc<CublasLt>; 2],
    /// In the order of the calls.
    products: Vec<Product>,
    /// The host's time in them.
    in_functions: Duration,
    /// The group's.
    stream: CUstream,
}

/// The product of a block that is asked for.
fn product<T: Multiplied + Half>(
    operands: &Operands<Cuda, T>,
    cublaslt: &Rc<CublasLt>,
    block: &Block<Cuda, T>,
) -> Result<Product> {
    let ([rows, n], [_, _, k]) = (block.shape(), operands.shape());
    let mut a = Place::of(&operands.a);
    a.ptr += (block.rows().start * a.pitch * size_of::<T>()) as u64;
    let out = Place {
        ptr: block.as_device_ptr(),
        pitch: block.pitch(),
        dtype: T::DTYPE,
    };
    let b = Place::of(&operands.b);
    Product::new(cublaslt, &Problem::new(a, b, out, [rows, n, k]))
}

impl<T: Multiplied + Half> Produce<T> {
    fn tune(&mut self, timer: &Timer) -> Result<()> {
        let mut products = self.products.iter_mut();
        products.try_for_each(|product| product.tune(timer))
    }
}

impl<T: Multiplied + Half> Operation<Cuda, T> for Produce<T> {
    const NAME: &'static str = "produce_and_reduce_scatter";
    const COLLECTIVE: &'static str = "reduce-scatter";
    const SEQUENTIAL: &'static str = "cuBLASLt by blocks, then reduce-scatter";
    const OUT: DType = T::DTYPE;
    type Prepared = Planned<PreparedReduceScatter<'static, Cuda, T>, Cuda, T>;

    fn scaled(
        group: &Group<Cuda>,
        shape: [usize; 3],
        stages: usize,
        scaling: Scaling,
    ) -> Result<Self> {
        super::clock::bind(group)?;
        Ok(Produce {
            sums: ReduceScatter::scaled(group, shape, stages, scaling)?,
            cublaslt: [Rc::new(CublasLt::new()?), Rc::new(CublasLt::new()?)],
            products: Vec::new(),
            in_functions: Duration::ZERO,
            stream: group.stream().cast(),
        })
    }

    fn describe(shape: [usize; 3]) -> String {
        ReduceScatter::<Cuda, T>::describe(shape)
    }

    /// gemmesh's own product, which is timed beside it, and the number of blocks.
    fn prepare(&self, config: Option<Config>) -> Result<Self::Prepared> {
        let pulled = match config {
            Some(config) => config,
            None => {
                let tile = self.sums.prepare(None)?.sum.config().tile;
                Config::new(tile, Chunking::new(1), Route::Pull)
            }
        };
        self.sums.prepare(Some(pulled.with_route(Route::Pull)))
    }

    fn explain(prepared: &Self::Prepared) -> Explanation {
        prepared.sum.explain()
    }

    fn run(&mut self, prepared: &Self::Prepared) -> Result<()> {
        let m = self.sums.operands.a.shape()[0];
        let operation = ProduceAndReduceScatter::new().chunks(prepared.sum.config().chunking.count);
        let Produce {
            sums,
            cublaslt,
            products,
            in_functions,
            ..
        } = self;
        if products.is_empty() {
            operation.run(m, &mut sums.out, |block| {
                let cublaslt = &cublaslt[products.len() % 2];
                products.push(product(&sums.operands, cublaslt, &block)?);
                Ok(())
            })?;
        }
        let mut made = 0;
        operation.run(m, &mut sums.out, |block| {
            let begin = Instant::now();
            products[made].run(block.stream().cast())?;
            made += 1;
            *in_functions += begin.elapsed();
            Ok(())
        })
    }

    fn multiply(&mut self, prepared: &Self::Prepared) -> Result<()> {
        self.sums.multiply(prepared)
    }

    fn communicate(&mut self, prepared: &Self::Prepared) -> Result<()> {
        self.sums.communicate(prepared)
    }

    fn run_in_sequence(&mut self, prepared: &Self::Prepared) -> Result<()> {
        let mut products = self.products.iter();
        products.try_for_each(|product| product.run(self.stream))?;
        self.communicate(prepared)
    }

    fn trace(&mut self, prepared: &Self::Prepared) -> Result<Trace> {
        let m = self.sums.operands.a.shape()[0];
        let operation = ProduceAndReduceScatter::new().chunks(prepared.sum.config().chunking.count);
        let mut products = self.products.iter();
        operation.run_traced(m, &mut self.sums.out, |block| {
            let product = products.next().ok_or("there is a product for each block")?;
            Ok(product.run(block.stream().cast())?)
        })
    }

    fn poison(&mut self) -> Result<()> {
        self.sums.poison()
    }

    fn check(&mut self, products: usize) -> Result<Check> {
        self.sums.check(products)
    }
}

impl<T: Multiplied + Half> OnGpus<T> for Produce<T> {
    fn peers(&mut self, instruments: &Instruments, prepared: &Self::Prepared) -> Result<Peers> {
        let peers = self.sums.peers(instruments, prepared)?;
        self.tune(&instruments.timer)?;
        Ok(peers)
    }

    fn copy(&mut self, prepared: &Self::Prepared) -> Result<()> {
        self.sums.copy(prepared)
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
