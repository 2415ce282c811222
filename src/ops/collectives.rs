//! Collectives without a product, for embeddings, logits, norms and the tokens of experts.

use super::call::{
    self, Added, Arguments, RawOutput, RawShards, RawView, require_alike, require_float,
    require_same_group, require_shape,
};
use crate::backend::Backend;
use crate::backend::sealed::Bound;
use crate::element::{Float, Value};
use crate::error::Result;
use crate::group::Group;
use crate::matrix::{MatrixView, MatrixViewMut, ShardedMatrix};
use crate::schedule::limits::limit;
use crate::schedule::plan::collectives::{chunked, leaves_gather, stored};
use crate::schedule::plan::matrices::{A, MATRICES, OUT, PARTIALS};
use crate::schedule::{Counts, Layout, Operation, Problem, Route};

/// Gathers the rows of `a` on every rank, in place. Collective.
///
/// ```
/// use gemmesh::{Group, Host, all_gather};
///
/// Group::<Host>::threads(2, |group| {
///     let mut a = group.sharded::<u32>(4, 1)?;
///     let own = [10, 11].map(|x| x + 2 * group.rank() as u32);
///     a.shard_mut().copy_from_host(&own)?;
///     all_gather(&a)?;
///     assert_eq!(a.to_vec()?, [10, 11, 12, 13]);
///     Ok::<(), gemmesh::Error>(())
/// })?;
/// # Ok::<(), gemmesh::Error>(())
/// ```
///
/// Like every operation, the call may return before it is complete: see
/// [`matmul_reduce_scatter`](crate::matmul_reduce_scatter).
///
/// # Errors
/// [`Kind::CallMismatch`](crate::error::Kind::CallMismatch) if a rank makes a different call;
/// [`Kind::Capturing`](crate::error::Kind::Capturing) if the first run is captured in a graph; the group's failure.
#[track_caller]
pub fn all_gather<B: Backend, T: Value>(a: &ShardedMatrix<B, T>) -> Result<()> {
    gather_rows(a.into())
}

/// [`all_gather`], without element types.
#[track_caller]
pub fn gather_rows<B: Backend>(a: RawShards<B>) -> Result<()> {
    gather(Operation::ALL_GATHER, a)
}

#[track_caller]
fn gather<B: Backend>(operation: Operation, a: RawShards<B>) -> Result<()> {
    let (group, layout) = (a.group, a.layout);
    let problem = Problem::new(operation, a.dtype, layout.clone(), 0);
    let config = if is_better_stored(group, &problem) {
        stored()
    } else {
        chunked(1).with_route(Route::Pull)
    };
    let program = group.program(problem, Some(config));
    let program = program.map_err(group.refusal(operation.name()))?;
    let mut matrices = [const { Bound::Nothing }; MATRICES];
    matrices[A] = a.bound();
    let arguments = Arguments {
        call: operation.name(),
        matrices: &matrices,
        shared: &[a.id],
        added: Added::default(),
    };
    call::run(group, None, &program, arguments, None)
}

/// Copies the whole matrix of rank `root` to every rank, in place. Collective.
///
/// These are the root's own rows, and the other ranks' rows as the root has them.
///
/// ```
/// use gemmesh::{Group, Host, Result, broadcast};
///
/// fn rank(group: Group<Host>) -> Result<()> {
///     let mut a = group.sharded::<f32>(2, 1)?;
///     a.shard_mut().copy_from_host(&[group.rank() as f32 + 1.0])?;
///     broadcast(&mut a, 1)?; // rank 1 has its own row, and zeros in rank 0's
///     assert_eq!(a.to_vec()?, [0.0, 2.0]);
///     Ok(())
/// }
///
/// Group::threads(2, rank)?;
/// # Ok::<_, gemmesh::Error>(())
/// ```
///
/// # Errors
/// As [`all_gather`]; [`Kind::Limit`](crate::error::Kind::Limit) unless `root` is a rank.
#[track_caller]
pub fn broadcast<B: Backend, T: Value>(a: &mut ShardedMatrix<B, T>, root: usize) -> Result<()> {
    broadcast_rows((&*a).into(), root)
}

/// [`broadcast`], without element types.
#[track_caller]
pub fn broadcast_rows<B: Backend>(a: RawShards<B>, root: usize) -> Result<()> {
    const OPERATION: Operation = Operation::BROADCAST;
    let [m, n] = a.shape();
    let group = a.group;
    let world = group.world_size();
    let layout = || {
        limit("the root", root, 0, world - 1)?;
        let mut rows = vec![0; world];
        rows[root] = m;
        Layout::new(&rows, n)
    };
    let layout = layout().map_err(group.refusal(OPERATION.name()))?;
    // With two ranks, no rank sends chunks on while others arrive.
    let chunks = if world == 2 { 1 } else { 4 };
    let call = CollectiveCall {
        problem: Problem::new(OPERATION, a.dtype, layout, n),
        chunks,
    };
    call.run(group, Bound::Nothing, a.bound(), &[a.id])
}

/// Sums the ranks' addends; each rank gets its rows of the sum. Collective.
///
/// Rank r has the addend a_r, which is `a`, [M, N]. `out` is [rows, N], this rank's rows of Σ a_r. The M rows are split
/// over the ranks evenly. If M is no multiple of the world size, the first ranks get one row more.
///
/// Sums are made in f32, in the order of the ranks, and rounded once, so they have the same bits each time. Over several
/// hosts, the addends of another host are added up and rounded there, and count as one. The group keeps the memory for
/// incoming rows.
///
/// ```
/// use gemmesh::{Group, Host, Result, reduce_scatter};
///
/// fn rank(group: Group<Host>) -> Result<()> {
///     let a = group.upload(&[1.0f32, 2.0, 3.0, 4.0], 4, 1)?;
///     let mut out = group.zeros::<f32>(2, 1)?;
///     reduce_scatter(&a, &mut out)?;
///     let sums = [[2.0, 4.0], [6.0, 8.0]];
///     assert_eq!(out.to_vec()?, sums[group.rank()]);
///     Ok(())
/// }
///
/// Group::threads(2, rank)?;
/// # Ok::<_, gemmesh::Error>(())
/// ```
///
/// # Errors
/// As [`all_gather`]; [`Kind::Shape`](crate::error::Kind::Shape) or
/// [`Kind::Unsuitable`](crate::error::Kind::Unsuitable) if the output does not fit;
/// [`Kind::OutOfMemory`](crate::error::Kind::OutOfMemory).
#[track_caller]
pub fn reduce_scatter<'a, 'o, B: Backend, T: Float>(
    a: impl Into<MatrixView<'a, B, T>>,
    out: impl Into<MatrixViewMut<'o, B, T>>,
) -> Result<()> {
    scatter_sums(a.into().into(), RawOutput::from(&out.into()))
}

/// [`reduce_scatter`], without element types.
#[track_caller]
pub fn scatter_sums<B: Backend>(a: RawView<B>, out: RawOutput<B>) -> Result<()> {
    const OPERATION: Operation = Operation::REDUCE_SCATTER;
    let (group, [m, n]) = (a.group, a.shape);
    let layout = || {
        let layout = Layout::balanced(m, n, group.world_size())?;
        require_same_group("out", out.group, group)?;
        let rows = layout.rows_of(group.rank()).len();
        let what = "out [rows of this rank, N]";
        require_shape(what, [rows, n], out.shape)?;
        require_float("a", a.dtype)?;
        require_alike(a.dtype, out.dtype)?;
        Ok(layout)
    };
    let layout = layout().map_err(group.refusal(OPERATION.name()))?;
    let call = CollectiveCall {
        problem: Problem::new(OPERATION, a.dtype, layout, n),
        chunks: 1,
    };
    call.run(group, a.input(), out.bound, &[])
}

/// Sums the ranks' addends; every rank gets the whole sum. Collective.
///
/// Rank r has the addend a_r, which is `a`. `out` is Σ a_r. Both are [M, N].
///
/// Sums are made as by [`reduce_scatter`], and have the same bits on every rank. If there are two ranks or few bytes,
/// each rank gets all addends, and adds them in the order of the ranks. Otherwise each rank adds its own rows of `out` and
/// gathers the others'.
///
/// ```
/// use gemmesh::{Group, Host, Result, all_reduce};
///
/// fn rank(group: Group<Host>) -> Result<()> {
///     let a = group.upload(&[1.0f32, 2.0, 3.0, 4.0], 4, 1)?;
///     let mut out = group.sharded::<f32>(4, 1)?;
///     all_reduce(&a, &mut out)?;
///     assert_eq!(out.to_vec()?, [2.0, 4.0, 6.0, 8.0]);
///     Ok(())
/// }
///
/// Group::threads(2, rank)?;
/// # Ok::<_, gemmesh::Error>(())
/// ```
///
/// # Errors
/// As [`reduce_scatter`].
#[track_caller]
pub fn all_reduce<'a, B: Backend, T: Float>(
    a: impl Into<MatrixView<'a, B, T>>,
    out: &mut ShardedMatrix<B, T>,
) -> Result<()> {
    sum_for_all(a.into().into(), (&*out).into())
}

/// [`all_reduce`], without element types.
#[track_caller]
pub fn sum_for_all<B: Backend>(a: RawView<B>, out: RawShards<B>) -> Result<()> {
    const OPERATION: Operation = Operation::ALL_REDUCE;
    let (group, [m, n]) = (a.group, a.shape);
    let fits = require_same_group("out", out.group, group)
        .and_then(|()| out.require_by_rank("out"))
        .and_then(|()| require_shape("out [M, N]", [m, n], out.shape()))
        .and_then(|()| require_float("a", a.dtype))
        .and_then(|()| require_alike(a.dtype, out.dtype));
    fits.map_err(group.refusal(OPERATION.name()))?;
    let problem = Problem::new(OPERATION, a.dtype, out.layout.clone(), n);
    let over_hosts = Problem {
        hosts: group.host_map().clone(),
        ..problem.clone()
    };
    let call = CollectiveCall { problem, chunks: 1 };
    call.run(group, a.input(), out.bound(), &[out.id])?;
    if leaves_gather(&over_hosts) {
        gather(Operation::GATHER_OF_ALL_REDUCE, out)
    } else {
        Ok(())
    }
}

/// Sends block p of each rank's input to rank p. Collective.
///
/// Block p of rank s becomes s's rows of `out` on rank p. `out` is [M, N]. The input `a` is [W · rows, N]. Each block
/// has as many rows as this rank owns of `out`.
///
/// ```
/// use gemmesh::{Group, Host, Result, all_to_all};
///
/// fn rank(group: Group<Host>) -> Result<()> {
///     let first = group.rank() as u32 * 10;
///     let a = group.upload(&[first, first + 1], 2, 1)?; // a row for each rank
///     let mut out = group.sharded::<u32>(2, 1)?;
///     all_to_all(&a, &mut out)?;
///     let received = [[0, 10], [1, 11]];
///     assert_eq!(out.to_vec()?, received[group.rank()]);
///     Ok(())
/// }
///
/// Group::threads(2, rank)?;
/// # Ok::<_, gemmesh::Error>(())
/// ```
///
/// # Errors
/// As [`reduce_scatter`].
#[track_caller]
pub fn all_to_all<'a, B: Backend, T: Value>(
    a: impl Into<MatrixView<'a, B, T>>,
    out: &mut ShardedMatrix<B, T>,
) -> Result<()> {
    exchange_blocks(a.into().into(), (&*out).into(), None)
}

/// [`all_to_all`], with a count of rows for each pair of ranks. Collective.
///
/// Rank s sends rank r `counts[s * W + r]` rows, which may be 0. `a` has the rows for rank 0, then those for rank 1, and
/// so on, and no others. The first rows of `out`, [M, N], become those of rank 0, then those of rank 1, and so on. The
/// rows after these stay as they are, so one `out` serves all calls if M is the most rows that a rank may get.
///
/// All ranks give the counts of all pairs, because where a block lies at its receiver depends on the ranks before its
/// sender. If a rank knows only its own counts, as in a layer of experts, the ranks gather them first. What goes back to
/// the senders has the transposed counts, and needs no second gather. Calls with the same counts are planned once.
///
/// ```
/// use gemmesh::{Group, Host, Result, all_to_all_with_counts};
///
/// fn rank(group: Group<Host>) -> Result<()> {
///     let rank = group.rank();
///     let own: [u8; 2] = [[1, 2], [0, 1]][rank]; // the rows for each rank
///     let counts: Vec<usize> = group.all_gather_bytes(&own)?.concat().into_iter().map(usize::from).collect();
///     let a = group.upload(&[[10u32, 20, 21].as_slice(), &[30]][rank], [3, 1][rank], 1)?;
///     let mut out = group.sharded::<u32>(4, 1)?;
///     all_to_all_with_counts(&a, &mut out, &counts)?;
///     let received = [[10, 0, 0, 0], [20, 21, 30, 0]];
///     assert_eq!(out.to_vec()?, received[rank]);
///     Ok(())
/// }
///
/// Group::threads(2, rank)?;
/// # Ok::<_, gemmesh::Error>(())
/// ```
///
/// # Errors
/// As [`all_to_all`]; [`Kind::Unsuitable`](crate::error::Kind::Unsuitable) unless there is one count for each pair of
/// ranks; [`Kind::Limit`](crate::error::Kind::Limit) if a rank gets more than M rows.
#[track_caller]
pub fn all_to_all_with_counts<'a, B: Backend, T: Value>(
    a: impl Into<MatrixView<'a, B, T>>,
    out: &mut ShardedMatrix<B, T>,
    counts: &[usize],
) -> Result<()> {
    exchange_blocks(a.into().into(), (&*out).into(), Some(counts))
}

/// [`all_to_all`] or, with counts, [`all_to_all_with_counts`], without element types.
#[track_caller]
pub fn exchange_blocks<B: Backend>(
    a: RawView<B>,
    out: RawShards<B>,
    counts: Option<&[usize]>,
) -> Result<()> {
    const OPERATION: Operation = Operation::ALL_TO_ALL;
    let (group, layout, n) = (a.group, out.layout, out.layout.k());
    let problem = require_same_group("out", out.group, group).and_then(|()| {
        out.require_by_rank("out")?;
        let counts = counts.map(|rows| Counts::new(rows, layout)).transpose()?;
        let (what, rows) = match &counts {
            Some(counts) => (
                "a [rows that this rank sends, N]",
                counts.sent(group.rank()),
            ),
            None => {
                let rows = layout.rows_of(group.rank()).len();
                ("a [W · rows of this rank, N]", group.world_size() * rows)
            }
        };
        require_shape(what, [rows, n], a.shape)?;
        require_alike(a.dtype, out.dtype)?;
        Ok(Problem {
            counts,
            ..Problem::new(OPERATION, a.dtype, layout.clone(), n)
        })
    });
    let problem = problem.map_err(group.refusal(OPERATION.name()))?;
    let call = CollectiveCall { problem, chunks: 1 };
    call.run(group, a.input(), out.bound(), &[out.id])
}

/// A collective without a product whose input exists when it begins.
struct CollectiveCall {
    problem: Problem,
    /// How many chunks each block has.
    chunks: usize,
}

impl CollectiveCall {
    /// `shared`: the numbers of the sharded matrices.
    #[track_caller]
    fn run<B: Backend>(
        self,
        group: &Group<B>,
        input: Bound<B>,
        out: Bound<B>,
        shared: &[u32],
    ) -> Result<()> {
        let CollectiveCall { problem, chunks } = self;
        let call = problem.operation.name();
        let config = if is_better_stored(group, &problem) {
            stored()
        } else {
            chunked(chunks)
        };
        let program = group.program(problem, Some(config));
        let program = program.map_err(group.refusal(call))?;
        let schedule = B::schedule(&program);
        let room = match schedule.matrices()[PARTIALS].rows {
            0 => None,
            _ => Some(group.partials(schedule)?),
        };
        let mut matrices = [const { Bound::Nothing }; MATRICES];
        matrices[A] = input;
        matrices[OUT] = out;
        if let Some(room) = &room {
            matrices[PARTIALS] = Bound::Symmetric(room.as_ref());
        }
        let arguments = Arguments {
            call,
            matrices: &matrices,
            shared,
            added: Added::default(),
        };
        call::run(group, None, &program, arguments, None)
    }
}

/// True if a kernel should store the rows. They must be few, and each a multiple of 16 bytes long.
fn is_better_stored<B: Backend>(group: &Group<B>, problem: &Problem) -> bool {
    let counts = problem.counts.as_ref();
    let rows = counts.map_or(problem.layout.m(), Counts::most);
    let row = problem.layout.k() * problem.dtypes.operands.bytes();
    let bytes = rows.div_ceil(group.world_size()) * row;
    let is_possible = row.is_multiple_of(16) && counts.is_none_or(Counts::reach_all);
    is_possible && group.inner().backend.is_better_stored(bytes)
}
