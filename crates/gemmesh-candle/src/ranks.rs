//! A rank's group, its device, and the matrices that its layers share.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use candle_core::{Device as CandleDevice, Error as CandleError, Tensor};
use gemmesh::error::{Call, Kind};
use gemmesh::{
    Group, Result, ShardedMatrix, all_gather, all_reduce, all_to_all_with_counts, reduce_scatter,
};

use crate::device::{Device, Half, Input, Rows, Value};
use crate::error::{gemmesh_error, words};
use crate::failure::Failure;
use crate::pools::{Pool, Pools, Symmetric, lock};

/// The ranks of a model. All layers share its symmetric matrices, because their operations follow one another.
pub struct Ranks<B: Device> {
    pools: Pools<B>,
    place: B::Place,
    /// The most tokens of a step.
    pub capacity: usize,
    /// M of the step.
    pub tokens: AtomicUsize,
    pub group: Group<B>,
}

/// A collective that a model calls between layers.
#[derive(Clone, Copy)]
pub enum Collective<'a> {
    AllGather,
    ReduceScatter,
    AllReduce,
    /// With a count of rows for each pair of ranks.
    AllToAll(&'a [usize]),
}

impl<B: Device> Ranks<B> {
    pub fn new(group: Group<B>, device: &CandleDevice, capacity: usize) -> Result<Self> {
        if capacity == 0 {
            return Err(Kind::Limit {
                what: "the capacity".into(),
                value: capacity,
                min: 1,
                max: i32::MAX as usize,
            }
            .on(group.rank())
            .in_call(Call::here("TensorParallel::new")));
        }
        Ok(Ranks {
            pools: Pools {
                bf16: Pool::default(),
                f16: Pool::default(),
                f8e4m3: Pool::default(),
                f32: Pool::default(),
            },
            place: B::place_of(&group, device)?,
            capacity,
            tokens: AtomicUsize::new(capacity),
            group,
        })
    }

    /// M of the step, and how many of these tokens each rank has. Both are read together, because a different thread
    /// may set M.
    ///
    /// A call does this first, before it locks anything. In a fork, threads that no longer exist may hold a lock.
    pub fn step(&self) -> Result<(usize, Vec<usize>)> {
        self.group.check()?;
        let m = self.tokens.load(Ordering::Relaxed);
        Ok((m, self.group.even_rows(m)))
    }

    /// Does the work before this rank makes `call`. If it fails, the ranks that wait there are told.
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

    /// Tells the ranks that wait for this one in `call` of an error of candle, or of the error of gemmesh inside it.
    pub fn refuse(&self, call: &'static str, error: &CandleError) {
        let told = gemmesh_error(error).cloned();
        let told = told.unwrap_or_else(|| {
            Kind::System {
                action: format!("use tensors of candle's in {call}"),
                reason: words(error),
            }
            .on(self.group.rank())
        });
        self.group.refuse(call, told);
    }

    /// The symmetric matrix with this number of columns. Collective if there is none yet.
    pub fn symmetric<T: Value>(&self, columns: usize) -> Result<Symmetric<B, T>> {
        self.group.check()?;
        let mut pool = lock(T::pool(&self.pools));
        if let Some(matrix) = pool.get(&columns) {
            return Ok(matrix.clone());
        }
        let matrix = self.group.sharded_with_capacity(self.capacity, columns)?;
        let matrix = Arc::new(Mutex::new(matrix));
        pool.insert(columns, matrix.clone());
        Ok(matrix)
    }

    /// Checks that a tensor is [rows, columns] of `T`, on this rank's device.
    pub fn rows<'a, T: Value>(
        &self,
        argument: &str,
        storage: (&'a candle_core::Storage, &candle_core::Layout),
        shape: [usize; 2],
    ) -> Result<Rows<'a>> {
        Rows::new::<B, T>(&self.group, &self.place, argument, storage, shape)
    }

    pub fn input<'a, T: Value>(&'a self, rows: &Rows<'a>) -> Result<Input<'a, B, T>, Failure> {
        B::input(&self.group, &self.place, rows)
    }

    pub fn output<T: Value>(&self, shape: [usize; 2]) -> Result<B::Output<T>, Failure> {
        B::output(&self.group, &self.place, shape)
    }

    pub fn finish<T: Value>(&self, output: B::Output<T>) -> Result<Tensor, Failure> {
        B::finish(&self.place, output)
    }

    pub fn put<T: Value>(
        &self,
        rows: &Rows<'_>,
        to: &mut ShardedMatrix<B, T>,
    ) -> Result<(), Failure> {
        B::put(&self.group, &self.place, rows, to)
    }

    pub fn allocate<T: Value>(&self, shape: [usize; 2]) -> Result<B::Memory<T>, Failure> {
        B::allocate(&self.place, shape)
    }

    pub fn take<T: Value>(
        &self,
        from: &mut ShardedMatrix<B, T>,
        to: B::Memory<T>,
    ) -> Result<Tensor, Failure> {
        B::take(&self.place, from, to)
    }

    /// Orders the group's next operations after candle's, as long as the returned value lives.
    pub fn enter(&self) -> Result<B::Order> {
        B::enter(&self.group, &self.place)
    }

    pub fn exchange_typed<T: Half>(
        &self,
        collective: Collective<'_>,
        x: &Tensor,
    ) -> Result<Tensor, Failure> {
        let (m, split) = self.step()?;
        let (storage, layout) = x.storage_and_layout();
        let columns = *layout.dims().last().unwrap_or(&0);
        let (own, world) = (own_of(&split, self.group.rank()), self.group.world_size());
        let (call, argument, rows) = match collective {
            Collective::AllGather => ("all_gather", "x [tokens of this rank, N]", own.len()),
            Collective::ReduceScatter => ("reduce_scatter", "x [tokens, N]", m),
            Collective::AllReduce => ("all_reduce", "x [tokens, N]", m),
            Collective::AllToAll(counts) => {
                let sent = counts.iter().skip(self.group.rank() * world).take(world);
                let sent = total(sent);
                ("all_to_all", "x [rows that this rank sends, N]", sent)
            }
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
            Collective::AllToAll(counts) => {
                let out = self.symmetric::<T>(columns)?;
                let mut out = lock(&out);
                let received: Vec<usize> = (0..world)
                    .map(|to| total(counts.iter().skip(to).step_by(world)))
                    .collect();
                let most = received.iter().copied().max().unwrap_or(0);
                let prepare = || {
                    out.set_rows(&self.group.even_rows(most))?;
                    Ok((self.input::<T>(&rows)?, self.allocate([most, columns])?))
                };
                let (a, memory) = self.before(call, prepare)?;
                all_to_all_with_counts(&a.matrix, &mut out, counts)?;
                let all = self.take(&mut out, memory)?;
                all.narrow(0, 0, received[self.group.rank()])?
            }
        };
        Ok(with_leading(out, x)?)
    }
}

/// The sum of counts. The call refuses those that are too large.
fn total<'c>(counts: impl Iterator<Item = &'c usize>) -> usize {
    counts.fold(0, |sum, &count| sum.saturating_add(count))
}

/// The rows of `rank` among all rows.
pub fn own_of(split: &[usize], rank: usize) -> Range<usize> {
    let begin = split[..rank].iter().sum();
    begin..begin + split[rank]
}

/// Gives `out` the leading dimensions of 1 that `x` has.
pub fn with_leading(out: Tensor, x: &Tensor) -> candle_core::Result<Tensor> {
    let leading = x.rank().saturating_sub(2);
    (0..leading).try_fold(out, |out, _| out.unsqueeze(0))
}
