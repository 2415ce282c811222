//! A rank of a tensor-parallel model.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{Device as CandleDevice, Result, Tensor};
use gemmesh::{Error, Group};

use crate::device::Device;
use crate::error;
use crate::failure::Failure;
use crate::ranks::{AnyRanks, Collective, Ranks, own_of};

/// This rank among the ranks of a tensor-parallel model: its group, its device, and the tokens of the step. Cheap to clone.
///
/// All ranks make their layers, and call them, in the same order.
#[derive(Clone, Debug)]
pub struct TensorParallel(Arc<dyn AnyRanks>);

impl TensorParallel {
    /// The ranks of `group`, whose tensors are on `device`, and of which a step has `capacity` tokens at the most: as many are set at
    /// first.
    ///
    /// A `Group<Host>` goes with `Device::Cpu`. A `Group<Cuda>` goes with a device of candle's on the group's GPU that has a stream of its
    /// own, `Device::new_cuda_with_stream(group.device_ordinal())`: the group's operations then stand on that stream, and no call waits
    /// for the GPU.
    ///
    /// # Errors
    /// [`Error::Unsuitable`] for another device, or one whose stream is each thread's default stream (`Device::new_cuda`);
    /// [`Error::Limit`] for no capacity.
    pub fn new<B: Device>(
        group: Group<B>,
        device: &CandleDevice,
        capacity: usize,
    ) -> Result<TensorParallel> {
        let ranks =
            Ranks::new(group, device, capacity).map_err(error::of("TensorParallel::new"))?;
        Ok(TensorParallel(Arc::new(ranks)))
    }

    /// This rank: 0 to `world_size() - 1`.
    pub fn rank(&self) -> usize {
        self.0.rank()
    }

    /// The number of ranks.
    pub fn world_size(&self) -> usize {
        self.0.world_size()
    }

    /// How many tokens a step may have.
    pub fn capacity(&self) -> usize {
        self.0.capacity()
    }

    /// Says how many tokens the next steps have, all ranks together, and returns those of this rank: they are split as evenly as whole
    /// tokens allow, the longer parts first. All ranks say the same; what has been begun keeps its own.
    ///
    /// # Errors
    /// [`Error::Limit`] for none, or more than the capacity.
    pub fn set_tokens(&self, tokens: usize) -> Result<Range<usize>> {
        let set = self.0.set_tokens(tokens);
        set.map_err(error::of("TensorParallel::set_tokens"))?;
        Ok(self.tokens())
    }

    /// The tokens of this rank, among those of all.
    pub fn tokens(&self) -> Range<usize> {
        own_of(&self.0.split(), self.rank())
    }

    /// This rank's part of a whole weight: of its rows (`dim` 0, for a column-parallel layer) or its columns (1, for a row-parallel one). A
    /// copy, so that the whole may be dropped.
    ///
    /// # Errors
    /// [`Error::Shape`] unless the ranks can share the dimension evenly.
    pub fn shard(&self, whole: &Tensor, dim: usize) -> Result<Tensor> {
        let (size, world) = (whole.dim(dim)?, self.world_size());
        if !size.is_multiple_of(world) {
            return Err(error::of("TensorParallel::shard")(Error::Shape {
                rank: self.rank(),
                argument: format!("dimension {dim} of a weight that {world} ranks share evenly"),
                expected: vec![size.next_multiple_of(world)],
                found: vec![size],
            }));
        }
        let part = size / world;
        whole
            .narrow(dim, self.rank() * part, part)?
            .force_contiguous()
    }

    /// All tokens' rows, [tokens, N], of each rank's own, [tokens of this rank, N]. Collective.
    ///
    /// # Errors
    /// [`Error::Unsuitable`], [`Error::Shape`]; [`Error::CallMismatch`] and the group's failure.
    pub fn all_gather(&self, x: &Tensor) -> Result<Tensor> {
        self.exchange(Collective::AllGather, "TensorParallel::all_gather", x)
    }

    /// The rows of this rank's tokens of the sum over all ranks of `x`, [tokens, N]; summed in f32 and rounded once. Collective.
    ///
    /// # Errors
    /// As [`TensorParallel::all_gather`].
    pub fn reduce_scatter(&self, x: &Tensor) -> Result<Tensor> {
        self.exchange(
            Collective::ReduceScatter,
            "TensorParallel::reduce_scatter",
            x,
        )
    }

    /// The sum over all ranks of `x`, [tokens, N], on every rank; summed in f32 and rounded once. Collective.
    ///
    /// # Errors
    /// As [`TensorParallel::all_gather`].
    pub fn all_reduce(&self, x: &Tensor) -> Result<Tensor> {
        self.exchange(Collective::AllReduce, "TensorParallel::all_reduce", x)
    }

    /// Sends `bytes` to every rank and returns what each sent, by rank. For small things, such as a token: it goes by way of the host.
    /// Collective.
    ///
    /// # Errors
    /// As [`Group::all_gather_bytes`].
    pub fn all_gather_bytes(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        let gathered = self.0.all_gather_bytes(bytes);
        gathered.map_err(error::of("TensorParallel::all_gather_bytes"))
    }

    /// Returns when every rank has called it.
    ///
    /// # Errors
    /// The group's failure.
    pub fn barrier(&self) -> Result<()> {
        self.0
            .barrier()
            .map_err(error::of("TensorParallel::barrier"))
    }

    /// Returns when all that this rank has begun is complete.
    ///
    /// # Errors
    /// The failure of an operation that had not been reported yet: on GPUs calls return before their operations are complete.
    pub fn synchronize(&self) -> Result<()> {
        let done = self.0.synchronize();
        done.map_err(error::of("TensorParallel::synchronize"))
    }

    fn exchange(&self, collective: Collective, call: &'static str, x: &Tensor) -> Result<Tensor> {
        let exchanged = self.0.exchange(collective, x);
        exchanged.map_err(Failure::of(call))
    }

    pub(crate) fn ranks(&self) -> Arc<dyn AnyRanks> {
        self.0.clone()
    }
}
