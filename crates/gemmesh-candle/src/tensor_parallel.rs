//! A rank of a tensor-parallel model.

use std::fmt::{self, Debug};
use std::ops::Range;
use std::sync::Arc;

use candle_core::{Device as CandleDevice, Error as CandleError, Tensor};
use gemmesh::error::called_at;
use gemmesh::error::{Call, Kind};
use gemmesh::{Error, Group};

use crate::any_ranks::AnyRanks;
use crate::device::Device;
use crate::error::{self, place, within};
use crate::ranks::{Collective, Ranks, own_of};
use crate::weight::Weight;

type Result<T, E = CandleError> = std::result::Result<T, E>;

/// A rank of a tensor-parallel model: its group, its device, and the tokens of the step. Cheap to clone.
///
/// All ranks make and call their layers in the same order.
#[derive(Clone)]
pub struct TensorParallel(Arc<dyn AnyRanks>);

impl Debug for TensorParallel {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.debug_struct("TensorParallel")
            .field("rank", &self.rank())
            .field("world_size", &self.world_size())
            .field("capacity", &self.capacity())
            .finish()
    }
}

impl TensorParallel {
    /// Makes a rank of `group` whose tensors are on `device`, and whose steps have at most `capacity` tokens.
    ///
    /// The first step has `capacity` tokens, until [`TensorParallel::set_tokens`] changes that.
    ///
    /// A `Group<Host>` goes with `Device::Cpu`. A `Group<Cuda>` goes with a candle device on the group's GPU that has a
    /// stream of its own, `Device::new_cuda_with_stream(group.device_ordinal())`. The group's operations then run on
    /// that stream, and no call waits for the GPU.
    ///
    /// # Errors
    /// [`Kind::Unsuitable`] for a different device, or one whose stream is each thread's default stream
    /// (`Device::new_cuda`); [`Kind::Limit`] if `capacity` is 0.
    #[track_caller]
    pub fn new<B: Device>(
        group: Group<B>,
        device: &CandleDevice,
        capacity: usize,
    ) -> Result<TensorParallel> {
        let ranks = within("TensorParallel::new", || {
            Ranks::new(group, device, capacity)
        })?;
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

    /// The most tokens of a step.
    pub fn capacity(&self) -> usize {
        self.0.capacity()
    }

    /// Sets the number of tokens of the next steps, on all ranks together, and returns those of this rank.
    ///
    /// Tokens are split as evenly as whole tokens allow, the longer parts first. A rank may have none, and so may all.
    /// All ranks must set the same number. Operations that have begun keep theirs.
    ///
    /// # Errors
    /// [`Kind::Limit`] for more than the capacity.
    #[track_caller]
    pub fn set_tokens(&self, tokens: usize) -> Result<Range<usize>> {
        within("TensorParallel::set_tokens", || self.0.set_tokens(tokens))?;
        Ok(self.tokens())
    }

    /// The tokens of this rank among all tokens.
    pub fn tokens(&self) -> Range<usize> {
        own_of(&self.0.split(), self.rank())
    }

    /// A copy of this rank's part of a whole weight.
    ///
    /// The part is some of its rows if `dim` is 0, for a column-parallel layer, or of its columns if `dim` is 1, for a
    /// row-parallel layer. It is a copy, so that the whole weight may be dropped.
    ///
    /// # Errors
    /// [`Kind::Shape`] unless the ranks can share the dimension evenly.
    #[track_caller]
    pub fn shard(&self, whole: &Tensor, dim: usize) -> Result<Tensor> {
        let part = self.part_of(whole, dim)?;
        whole
            .narrow(dim, part.start, part.len())?
            .force_contiguous()
    }

    /// This rank's part of a dimension of a whole weight.
    #[track_caller]
    fn part_of(&self, whole: &Tensor, dim: usize) -> Result<Range<usize>> {
        let size = whole.dim(dim)?;
        within("TensorParallel::shard", || {
            let shared = self.check_even("a weight", size, dim);
            shared.map_err(|error| self.0.noted(error))
        })?;
        let part = size / self.world_size();
        Ok(self.rank() * part..(self.rank() + 1) * part)
    }

    /// A copy of this rank's rows of a whole weight, for a column-parallel layer.
    #[track_caller]
    pub(crate) fn rows_of(&self, whole: &Weight) -> Result<Weight> {
        whole.rows(self.rank(), self.part_of(&whole.values, 0)?)
    }

    /// A copy of this rank's columns of a whole weight, for a row-parallel layer.
    #[track_caller]
    pub(crate) fn columns_of(&self, whole: &Weight) -> Result<Weight> {
        whole.columns(self.rank(), self.part_of(&whole.values, 1)?)
    }

    /// Checks that the ranks can share a dimension of `weight` evenly.
    pub(crate) fn check_even(&self, weight: &str, size: usize, dim: usize) -> Result<(), Error> {
        let world = self.world_size();
        if size.is_multiple_of(world) {
            return Ok(());
        }
        Err(Kind::Shape {
            argument: format!("dimension {dim} of {weight} that {world} ranks share evenly"),
            expected: vec![size.next_multiple_of(world)],
            found: vec![size],
        }
        .on(self.rank())
        .in_call(Call::here("TensorParallel::shard")))
    }

    /// This rank's heads of `heads` query heads, and of `kv_heads` heads of keys and values.
    ///
    /// If there are fewer heads of keys and values than ranks, neighbouring ranks share one.
    ///
    /// ```
    /// # use candle_core::Device;
    /// # use gemmesh_candle::{Group, Host, TensorParallel};
    /// # Group::<Host>::threads(4, |group| {
    /// # let ranks = TensorParallel::new(group, &Device::Cpu, 1).unwrap();
    /// let [queries, keys] = ranks.heads(8, 2).unwrap(); // of 4 ranks
    /// assert_eq!(queries, ranks.rank() * 2..ranks.rank() * 2 + 2);
    /// assert_eq!(keys.start, ranks.rank() / 2);
    /// assert_eq!(keys.len(), 1);
    /// # Ok::<_, gemmesh::Error>(())
    /// # }).unwrap();
    /// ```
    ///
    /// # Errors
    /// [`Kind::Shape`] if the ranks cannot share `heads` evenly, if they cannot share `kv_heads` evenly and no equal
    /// number of ranks can share each of these, or if a different number of query heads would go with each of them.
    #[track_caller]
    pub fn heads(&self, heads: usize, kv_heads: usize) -> Result<[Range<usize>; 2]> {
        within("TensorParallel::heads", || {
            let own = self.own_heads(heads, kv_heads);
            own.map_err(|error| self.0.noted(error))
        })
    }

    fn own_heads(&self, heads: usize, kv_heads: usize) -> Result<[Range<usize>; 2], Error> {
        let (rank, world) = (self.rank(), self.world_size());
        let refuse = |argument: String, expected: usize, found: usize| {
            Err(Kind::Shape {
                argument,
                expected: vec![expected],
                found: vec![found],
            }
            .on(rank)
            .in_call(Call::here("TensorParallel::heads")))
        };
        let or_more = |heads: usize, of: usize| heads.max(1).next_multiple_of(of);
        if heads == 0 || !heads.is_multiple_of(world) {
            let argument = format!("query heads that {world} ranks share evenly");
            return refuse(argument, or_more(heads, world), heads);
        }
        let is_split = kv_heads > 0 && kv_heads.is_multiple_of(world);
        let is_replicated = kv_heads > 0 && world.is_multiple_of(kv_heads);
        if !is_split && !is_replicated {
            let argument = format!(
                "heads of keys and values that {world} ranks share evenly, or of which as many ranks have each"
            );
            return refuse(argument, or_more(kv_heads, world), kv_heads);
        }
        if !heads.is_multiple_of(kv_heads) {
            let argument =
                format!("query heads that {kv_heads} heads of keys and values share evenly");
            return refuse(argument, or_more(heads, kv_heads), heads);
        }
        let (own, own_kv) = (heads / world, (kv_heads / world).max(1));
        let first_kv = rank * kv_heads / world;
        Ok([rank * own..(rank + 1) * own, first_kv..first_kv + own_kv])
    }

    /// The rows of `whole`, or the elements of a bias, that belong to these of `count` heads.
    pub(crate) fn of_heads(
        &self,
        whole: &Tensor,
        count: usize,
        heads: &Range<usize>,
    ) -> Result<Tensor> {
        let rows = self.rows_of_heads(whole, count, heads)?;
        whole.narrow(0, rows.start, rows.len())?.force_contiguous()
    }

    /// Which rows of `whole` belong to these of `count` heads.
    pub(crate) fn rows_of_heads(
        &self,
        whole: &Tensor,
        count: usize,
        heads: &Range<usize>,
    ) -> Result<Range<usize>> {
        let size = whole.dim(0)?;
        if !size.is_multiple_of(count) {
            return Err(error::of("QkvParallelLinear")(
                Kind::Shape {
                    argument: format!("dimension 0 of a weight of {count} heads"),
                    expected: vec![size.next_multiple_of(count)],
                    found: vec![size],
                }
                .on(self.rank())
                .in_call(Call::here("QkvParallelLinear")),
            ));
        }
        let head = size / count;
        Ok(heads.start * head..heads.end * head)
    }

    /// Gathers all tokens' rows, [tokens, N], from each rank's own, [tokens of this rank, N]. Collective.
    ///
    /// # Errors
    /// [`Kind::Unsuitable`], [`Kind::Shape`]; [`Kind::CallMismatch`] and the group's failure.
    #[track_caller]
    pub fn all_gather(&self, x: &Tensor) -> Result<Tensor> {
        self.exchange(Collective::AllGather, "TensorParallel::all_gather", x)
    }

    /// The rows of this rank's tokens in the sum of all ranks' `x`, [tokens, N]. Collective.
    ///
    /// The sum is made in f32 and rounded once.
    ///
    /// # Errors
    /// As [`TensorParallel::all_gather`].
    #[track_caller]
    pub fn reduce_scatter(&self, x: &Tensor) -> Result<Tensor> {
        self.exchange(
            Collective::ReduceScatter,
            "TensorParallel::reduce_scatter",
            x,
        )
    }

    /// The sum of all ranks' `x`, [tokens, N], on every rank. It is made in f32 and rounded once. Collective.
    ///
    /// # Errors
    /// As [`TensorParallel::all_gather`].
    #[track_caller]
    pub fn all_reduce(&self, x: &Tensor) -> Result<Tensor> {
        self.exchange(Collective::AllReduce, "TensorParallel::all_reduce", x)
    }

    /// Sends rows of `x`, [rows, N], to all ranks, and returns the rows that come to this one, sender by sender.
    /// Collective.
    ///
    /// Rank s sends rank r `counts[s * W + r]` rows, which may be 0. `x` has the rows for rank 0, then those for rank 1,
    /// and so on. All ranks give the counts of all pairs, which [`TensorParallel::all_gather_bytes`] can bring. A rank
    /// gets no more rows than the capacity.
    ///
    /// # Errors
    /// As [`TensorParallel::all_gather`]; [`Kind::Limit`] if a rank would get more rows than the capacity.
    #[track_caller]
    pub fn all_to_all(&self, x: &Tensor, counts: &[usize]) -> Result<Tensor> {
        self.exchange(
            Collective::AllToAll(counts),
            "TensorParallel::all_to_all",
            x,
        )
    }

    /// Sends `bytes` to every rank and returns what each rank sent, by rank. Collective.
    ///
    /// It is meant for small data, such as a token, because it goes through the host.
    ///
    /// # Errors
    /// As [`Group::all_gather_bytes`].
    #[track_caller]
    pub fn all_gather_bytes(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        let call = "TensorParallel::all_gather_bytes";
        within(call, || self.0.all_gather_bytes(bytes))
    }

    /// Returns when every rank has called it.
    ///
    /// # Errors
    /// The group's failure.
    #[track_caller]
    pub fn barrier(&self) -> Result<()> {
        within("TensorParallel::barrier", || self.0.barrier())
    }

    /// Returns when all operations that this rank has begun are complete.
    ///
    /// # Errors
    /// The failure of an operation, if no call has reported it yet. On GPUs, calls return before their operations are
    /// complete.
    pub fn synchronize(&self) -> Result<()> {
        let done = self.0.synchronize();
        done.map_err(error::of("TensorParallel::synchronize"))
    }

    #[track_caller]
    fn exchange(
        &self,
        collective: Collective<'_>,
        call: &'static str,
        x: &Tensor,
    ) -> Result<Tensor> {
        within(call, || self.0.exchange(collective, x))
    }

    /// Does the work before this rank makes a layer of whole weights, in `call`. If it fails, the ranks that wait there
    /// are told.
    #[track_caller]
    pub(crate) fn before_making<R>(
        &self,
        call: &'static str,
        prepare: impl FnOnce() -> Result<R>,
    ) -> Result<R> {
        self.0.check().map_err(error::of(call))?;
        called_at(place(), || {
            prepare().inspect_err(|error| self.0.refuse_making(error))
        })
    }

    pub(crate) fn ranks(&self) -> Arc<dyn AnyRanks> {
        self.0.clone()
    }
}
