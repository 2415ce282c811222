//! A rank's group, its device and what its layers share, whatever the backend.

use std::collections::HashMap;
use std::fmt::Debug;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::{DType, Device as CandleDevice, Error as CandleError, Tensor};
use gemmesh::{
    Error, Group, Result, ShardedMatrix, all_gather, all_reduce, bf16, f16, reduce_scatter,
};

use crate::device::{Device, Half, Input, Rows, no_such_dtype};
use crate::error::gemmesh_error;
use crate::failure::Failure;
use crate::products::{Columns, Product, RowsOfWeight};

/// The ranks of a model. Its symmetric matrices are shared by all layers: their operations follow one another.
#[derive(Debug)]
pub struct Ranks<B: Device> {
    pub bf16: Pool<B, bf16>,
    pub f16: Pool<B, f16>,
    place: B::Place,
    capacity: usize,
    /// M of the step.
    tokens: AtomicUsize,
    pub group: Group<B>,
}

/// Symmetric matrices by their columns.
pub type Pool<B, T> = Mutex<HashMap<usize, Symmetric<B, T>>>;

/// A symmetric matrix of as many rows as there may be tokens.
pub type Symmetric<B, T> = Arc<Mutex<ShardedMatrix<B, T>>>;

/// What a layer is made of, of this rank: weights [N, K], and a bias [N] of each or none.
pub struct LayerTensors {
    pub weights: Vec<Tensor>,
    pub biases: Vec<Tensor>,
}

/// What is exchanged between layers.
#[derive(Clone, Copy)]
pub enum Collective {
    AllGather,
    ReduceScatter,
    AllReduce,
}

/// Ranks of any backend.
pub trait AnyRanks: Send + Sync + Debug {
    fn rank(&self) -> usize;
    fn world_size(&self) -> usize;
    fn capacity(&self) -> usize;
    fn set_tokens(&self, tokens: usize) -> Result<()>;
    fn split(&self) -> Vec<usize>;
    fn barrier(&self) -> Result<()>;
    fn synchronize(&self) -> Result<()>;
    fn all_gather_bytes(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>>;
    /// Whether this rank can make a call.
    fn check(&self) -> Result<()>;
    /// An error of a call that is not collective: the others are told of it if this rank leaves because of that.
    fn noted(&self, error: Error) -> Error;
    /// Tells the ranks that wait for this one in the making of a layer why it does not make one.
    fn refuse_making(&self, error: &CandleError);
    /// Column-parallel weights of one input; gated if there are a gate and its up projection.
    fn columns(
        self: Arc<Self>,
        tensors: LayerTensors,
        gated: bool,
    ) -> Result<Arc<dyn Product>, Failure>;
    /// A row-parallel weight.
    fn rows(self: Arc<Self>, tensors: LayerTensors) -> Result<Arc<dyn Product>, Failure>;
    fn exchange(&self, collective: Collective, x: &Tensor) -> Result<Tensor, Failure>;
}

impl<B: Device> Ranks<B> {
    pub fn new(group: Group<B>, device: &CandleDevice, capacity: usize) -> Result<Self> {
        if capacity == 0 {
            return Err(Error::Limit {
                what: "the capacity of a TensorParallel".into(),
                value: capacity,
                min: 1,
                max: i32::MAX as usize,
            });
        }
        Ok(Ranks {
            bf16: Pool::default(),
            f16: Pool::default(),
            place: B::place_of(&group, device)?,
            capacity,
            tokens: AtomicUsize::new(capacity),
            group,
        })
    }

    /// M of the step, and how many of these tokens each rank has, as gemmesh splits rows. Both together, for another thread may set M.
    /// First of all in a call, before anything is locked: in a fork, threads that are not there may have locked it.
    pub fn step(&self) -> Result<(usize, Vec<usize>)> {
        self.group.check()?;
        let m = self.tokens.load(Ordering::Relaxed);
        Ok((m, self.group.even_rows(m)))
    }

    /// What comes before this rank makes `call`. If it fails, the ranks that wait there are told.
    pub fn before<R>(
        &self,
        call: &'static str,
        prepare: impl FnOnce() -> Result<R, Failure>,
    ) -> Result<R, Failure> {
        prepare().map_err(|failure| match failure {
            Failure::Gemmesh(error) => Failure::Gemmesh(self.group.refuse(call, error)),
            Failure::Candle(error) => {
                self.refuse(call, &error);
                Failure::Candle(error)
            }
        })
    }

    /// Tells the ranks that wait for this one in `call` of an error of candle's, or of one of gemmesh's that it wraps.
    fn refuse(&self, call: &'static str, error: &CandleError) {
        let told = gemmesh_error(error).cloned();
        let told = told.unwrap_or_else(|| Error::System {
            rank: Some(self.group.rank()),
            action: format!("use tensors of candle's in {call}"),
            reason: error.to_string(),
        });
        self.group.refuse(call, told);
    }

    /// The symmetric matrix of so many columns. Collective if there is none yet.
    pub fn symmetric<T: Half>(&self, columns: usize) -> Result<Symmetric<B, T>> {
        self.group.check()?;
        let mut pool = lock(T::pool(self));
        if let Some(matrix) = pool.get(&columns) {
            return Ok(matrix.clone());
        }
        let matrix = self.group.sharded_with_capacity(self.capacity, columns)?;
        let matrix = Arc::new(Mutex::new(matrix));
        pool.insert(columns, matrix.clone());
        Ok(matrix)
    }

    /// Checks that a tensor is [rows, columns] of `T`, on this rank's device.
    pub fn rows<'a, T: Half>(
        &self,
        argument: &str,
        storage: (&'a candle_core::Storage, &candle_core::Layout),
        shape: [usize; 2],
    ) -> Result<Rows<'a>> {
        Rows::new::<B, T>(&self.group, &self.place, argument, storage, shape)
    }

    pub fn input<'a, T: Half>(&'a self, rows: &Rows<'a>) -> Result<Input<'a, B, T>, Failure> {
        B::input(&self.group, &self.place, rows)
    }

    pub fn output<T: Half>(&self, shape: [usize; 2]) -> Result<B::Output<T>, Failure> {
        B::output(&self.group, &self.place, shape)
    }

    pub fn finish<T: Half>(&self, output: B::Output<T>) -> Result<Tensor, Failure> {
        B::finish(&self.place, output)
    }

    pub fn put<T: Half>(
        &self,
        rows: &Rows<'_>,
        to: &mut ShardedMatrix<B, T>,
    ) -> Result<(), Failure> {
        B::put(&self.group, &self.place, rows, to)
    }

    pub fn allocate<T: Half>(&self, shape: [usize; 2]) -> Result<B::Memory<T>, Failure> {
        B::allocate(&self.place, shape)
    }

    pub fn take<T: Half>(
        &self,
        from: &mut ShardedMatrix<B, T>,
        to: B::Memory<T>,
    ) -> Result<Tensor, Failure> {
        B::take(&self.place, from, to)
    }

    /// Puts what the group does next behind what candle has begun, as long as what is returned lives.
    pub fn enter(&self) -> Result<B::Order> {
        B::enter(&self.group, &self.place)
    }

    fn exchange_typed<T: Half>(
        &self,
        collective: Collective,
        x: &Tensor,
    ) -> Result<Tensor, Failure> {
        let (m, split) = self.step()?;
        let (storage, layout) = x.storage_and_layout();
        let columns = *layout.dims().last().unwrap_or(&0);
        let own = own_of(&split, self.group.rank());
        let (call, argument, rows) = match collective {
            Collective::AllGather => ("all_gather", "x [tokens of this rank, N]", own.len()),
            Collective::ReduceScatter => ("reduce_scatter", "x [tokens, N]", m),
            Collective::AllReduce => ("all_reduce", "x [tokens, N]", m),
        };
        let prepare = || {
            let rows = self.rows::<T>(argument, (&storage, layout), [rows, columns])?;
            Ok((rows, self.enter()?))
        };
        let (rows, _order) = self.before(call, prepare)?;
        let out = match collective {
            Collective::AllGather => {
                let a = self.symmetric::<T>(columns)?;
                let mut a = lock(&a);
                let prepare = || {
                    a.set_rows(&split)?;
                    self.put(&rows, &mut a)?;
                    self.allocate([m, columns])
                };
                let all = self.before(call, prepare)?;
                all_gather(&a)?;
                self.take(&mut a, all)?
            }
            Collective::ReduceScatter => {
                let prepare = || {
                    let a = self.input::<T>(&rows)?;
                    Ok((a, self.output([own.len(), columns])?))
                };
                let (a, mut out) = self.before(call, prepare)?;
                reduce_scatter(&a.matrix, B::matrix(&mut out))?;
                self.finish(out)?
            }
            Collective::AllReduce => {
                let out = self.symmetric::<T>(columns)?;
                let mut out = lock(&out);
                let prepare = || {
                    out.set_rows(&split)?;
                    Ok((self.input::<T>(&rows)?, self.allocate([m, columns])?))
                };
                let (a, sums) = self.before(call, prepare)?;
                all_reduce(&a.matrix, &mut out)?;
                self.take(&mut out, sums)?
            }
        };
        Ok(with_leading(out, x)?)
    }
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
            return Err(self.noted(Error::Limit {
                what: "the tokens of a step".into(),
                value: tokens,
                min: 0,
                max: self.capacity,
            }));
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
        let noted = self.group.noted::<()>(Err(error.clone()));
        noted.err().unwrap_or(error)
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
            other => return self.refuse_dtype(MAKE, "weight", other),
        })
    }

    fn rows(self: Arc<Self>, tensors: LayerTensors) -> Result<Arc<dyn Product>, Failure> {
        Ok(match tensors.dtype() {
            DType::BF16 => Arc::new(RowsOfWeight::<B, bf16>::new(self, tensors)?),
            DType::F16 => Arc::new(RowsOfWeight::<B, f16>::new(self, tensors)?),
            other => return self.refuse_dtype(MAKE, "weight", other),
        })
    }

    fn exchange(&self, collective: Collective, x: &Tensor) -> Result<Tensor, Failure> {
        match x.dtype() {
            DType::BF16 => self.exchange_typed::<bf16>(collective, x),
            DType::F16 => self.exchange_typed::<f16>(collective, x),
            other => self.refuse_dtype("a collective", "x", other),
        }
    }
}

impl<B: Device> Ranks<B> {
    fn refuse_dtype<R>(
        &self,
        call: &'static str,
        argument: &str,
        dtype: DType,
    ) -> Result<R, Failure> {
        self.before(call, || {
            Err(no_such_dtype(self.group.rank(), argument, dtype).into())
        })
    }
}

/// The collective call in which ranks make a layer.
pub const MAKE: &str = "a parallel layer";

impl LayerTensors {
    fn dtype(&self) -> DType {
        self.weights[0].dtype()
    }
}

/// The rows of `rank` among those of all.
pub fn own_of(split: &[usize], rank: usize) -> Range<usize> {
    let begin = split[..rank].iter().sum();
    begin..begin + split[rank]
}

/// With the leading dimensions of 1 that `x` has.
pub fn with_leading(out: Tensor, x: &Tensor) -> candle_core::Result<Tensor> {
    let leading = x.rank().saturating_sub(2);
    (0..leading).try_fold(out, |out, _| out.unsqueeze(0))
}

/// A panic while it was held has not left it half-changed: each change is one call.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use gemmesh::Host;

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
