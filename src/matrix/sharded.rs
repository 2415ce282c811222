//! Matrices whose rows are spread over the ranks.

use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;
use std::panic::Location;

use crate::backend::Backend;
use crate::element::{DType, Value};
#[cfg(doc)]
use crate::error::Kind;
use crate::error::{Error, MadeCall, Result, require_count};
use crate::group::Group;
#[cfg(doc)]
use crate::matrix::Matrix;
use crate::matrix::{MatrixView, MatrixViewMut, ViewMemory, bytes_of};
use crate::ranks::members::Members;
use crate::schedule::layout::{MAX_EXTENT, balanced_rows};
use crate::schedule::limits::limit;
use crate::schedule::{Layout, RowOrder};

/// A row-major [M, K] matrix of which each rank owns some rows.
///
/// Every rank has room for the whole matrix, in symmetric memory. A rank writes its own rows. An operation that gathers
/// fills the other rows, which stay there afterwards.
///
/// ```
/// use gemmesh::{Error, Group, Host, all_gather};
///
/// Group::<Host>::threads(2, |group| {
///     let mut a = group.sharded::<f32>(4, 1)?;
///     let first = a.rows().start as f32; // 0 on rank 0, and 2 on rank 1
///     a.shard_mut().copy_from_host(&[first, first + 1.0])?;
///     all_gather(&a)?;
///     assert_eq!(a.to_vec()?, [0.0, 1.0, 2.0, 3.0]);
///     Ok::<_, Error>(())
/// })?;
/// # Ok::<_, Error>(())
/// ```
///
/// It may be dropped at any time, and dropping it waits for nothing. Operations of this rank and of the others go on.
/// The memory is freed when all ranks have dropped the matrix and their operations have ended.
pub struct ShardedMatrix<B: Backend, T> {
    // Freed before the group that it belongs to can end.
    memory: B::Symmetric,
    group: Group<B>,
    layout: Layout,
    /// How many rows fit.
    capacity: usize,
    id: u32,
    element: PhantomData<T>,
}

/// Sharded matrices.
impl<B: Backend> Group<B> {
    /// Allocates a symmetric [m, k] matrix whose rows are split evenly over the ranks. Collective.
    ///
    /// # Errors
    /// [`Kind::OutOfMemory`] on every rank if one rank has too little memory; [`Kind::CallMismatch`] unless all ranks
    /// give the same shape; the group's failure.
    #[track_caller]
    pub fn sharded<T: Value>(&self, m: usize, k: usize) -> Result<ShardedMatrix<B, T>> {
        self.sharded_for("Group::sharded", &balanced_rows(m, self.world_size()), k)
    }

    /// How many of `m` rows each rank owns if they are split evenly, as [`Group::sharded`] splits them.
    ///
    /// The first ranks own one row more if `m` is no multiple of the world size. [`ShardedMatrix::set_rows`] takes the
    /// result.
    pub fn even_rows(&self, m: usize) -> Vec<usize> {
        balanced_rows(m, self.world_size())
    }

    /// [`Group::sharded`], where rank r owns `rows[r]` rows. Collective.
    ///
    /// # Errors
    /// As [`Group::sharded`]; [`Kind::Unsuitable`] unless `rows` has one count for each rank.
    #[track_caller]
    pub fn sharded_rows<T: Value>(&self, rows: &[usize], k: usize) -> Result<ShardedMatrix<B, T>> {
        self.sharded_for("Group::sharded_rows", rows, k)
    }

    #[track_caller]
    fn sharded_for<T: Value>(
        &self,
        call: &str,
        rows: &[usize],
        k: usize,
    ) -> Result<ShardedMatrix<B, T>> {
        self.check()?;
        let layout = self.layout(rows, k, T::DTYPE);
        let layout = layout.map_err(self.refusal(call))?;
        let m = layout.m();
        let mut agreed = vec![format!("M = {m}")];
        agreed.extend(layout.agreed());
        self.allocate(layout, m, agreed)
    }

    /// [`Group::sharded`], for a gather that goes stage by stage over all ranks. Collective.
    ///
    /// Each rank's rows are cut into `stages` blocks, as evenly as whole rows allow. Memory holds the first block of
    /// each rank, rank after rank, then the second block of each: [stages, W, m / (stages · W), k]. A product of the
    /// matrix has its rows in the same places. A shard is written as usual, its blocks one after the other.
    /// [`ShardedMatrix::blocks_of`] says where they lie.
    ///
    /// # Errors
    /// As [`Group::sharded`]; [`Kind::Limit`] unless there are 1 to 64 stages.
    #[track_caller]
    pub fn sharded_staged<T: Value>(
        &self,
        m: usize,
        k: usize,
        stages: usize,
    ) -> Result<ShardedMatrix<B, T>> {
        self.check()?;
        let layout = self.layout(&balanced_rows(m, self.world_size()), k, T::DTYPE);
        let layout = layout.and_then(|layout| layout.staged(stages, RowOrder::ByStage));
        let layout = layout.map_err(self.refusal("Group::sharded_staged"))?;
        let rows = vec![format!("M = {m}"), format!("stages = {stages}")];
        self.allocate(layout, m, rows)
    }

    /// Allocates a symmetric matrix with room for `capacity` rows of `k` columns, for a program whose M changes from
    /// step to step. Collective.
    ///
    /// Calls use as many rows as [`ShardedMatrix::set_rows`] says. At first they use all rows, split as by
    /// [`Group::sharded`].
    ///
    /// # Errors
    /// As [`Group::sharded`].
    #[track_caller]
    pub fn sharded_with_capacity<T: Value>(
        &self,
        capacity: usize,
        k: usize,
    ) -> Result<ShardedMatrix<B, T>> {
        self.check()?;
        let rows = balanced_rows(capacity, self.world_size());
        let layout = limit("the capacity", capacity, 0, MAX_EXTENT)
            .and_then(|()| self.layout(&rows, k, T::DTYPE));
        let layout = layout.map_err(self.refusal("Group::sharded_with_capacity"))?;
        self.allocate(layout, capacity, vec![format!("capacity = {capacity}")])
    }

    /// Makes a matrix with room for `capacity` rows. All ranks must say the same of its `rows`.
    #[track_caller]
    fn allocate<T: Value>(
        &self,
        layout: Layout,
        capacity: usize,
        rows: Vec<String>,
    ) -> Result<ShardedMatrix<B, T>> {
        let inner = self.inner();
        let (k, dtype) = (layout.k(), T::DTYPE);
        // The capacity and K are within the limits of every matrix.
        let bytes = bytes_of::<T>(capacity, k).map_err(self.refusal("Group::sharded"))?;
        let elements = [format!("K = {k}"), dtype.to_string()];
        let call = MadeCall::new("sharded", rows.into_iter().chain(elements));
        let place = Location::caller();
        let made = inner.numbered(|| {
            // Allocating much memory, or failing to, takes longer than a refusal stands.
            inner.members.withdraw_refusal();
            let make = |members: &Members| inner.backend.symmetric(members, &call, bytes);
            self.collective(place, make)
        });
        // If the allocation fails, the group goes on, but this rank may leave because of it.
        let (memory, id) = self.noted(made)?;
        Ok(ShardedMatrix {
            memory,
            group: self.clone(),
            layout,
            capacity,
            id,
            element: PhantomData,
        })
    }

    /// Which rank owns which rows.
    fn layout(&self, rows: &[usize], k: usize, dtype: DType) -> Result<Layout> {
        let layout = self.row_layout(rows, k)?;
        self.require_whole_pieces("K", k, dtype)?;
        Ok(layout)
    }

    /// Which rank owns which rows, whatever is in them.
    pub(crate) fn row_layout(&self, rows: &[usize], k: usize) -> Result<Layout> {
        require_count(
            "the group",
            "rank",
            self.world_size(),
            "the list of rows",
            rows.len(),
        )?;
        Layout::new(rows, k)
    }

    /// Checks that ranks can share rows of so many columns. `what`: their number, in messages.
    pub(crate) fn require_whole_pieces(
        &self,
        what: &str,
        columns: usize,
        dtype: DType,
    ) -> Result<()> {
        let multiple = (B::ROW_ALIGNMENT / dtype.bytes()).max(1);
        if columns.is_multiple_of(multiple) {
            return Ok(());
        }
        Err(Error::unaligned(what, columns, multiple))
    }
}

impl<B: Backend, T: Value> ShardedMatrix<B, T> {
    /// Changes how many rows each rank owns: `rows[r]` for rank r, in the order of the ranks.
    ///
    /// The matrix's contents are lost, so each rank writes its rows again. Operations that have begun keep the rows
    /// that they began with. A rank may own no rows. If no rank owns any, operations have nothing to do.
    ///
    /// The call is not collective, but all ranks must give the same `rows`, because operations compare them. The next
    /// operation takes an output of as many rows. The first operation with new `rows` makes a schedule, so it cannot be
    /// captured in a graph. The group keeps the schedules that were used last.
    ///
    /// # Errors
    /// [`Kind::Unsuitable`] unless `rows` has one count for each rank; [`Kind::Limit`] if there are more rows than the
    /// capacity.
    #[track_caller]
    pub fn set_rows(&mut self, rows: &[usize]) -> Result<()> {
        let layout = || {
            let layout = self.group.layout(rows, self.layout.k(), T::DTYPE)?;
            let layout = layout.staged(self.layout.stages(), self.layout.order())?;
            limit("M", layout.m(), 0, self.capacity)?;
            Ok(layout)
        };
        self.layout = self.group.judged("ShardedMatrix::set_rows", layout())?;
        Ok(())
    }

    /// How many rows fit into the matrix.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// The shape [M, K].
    pub fn shape(&self) -> [usize; 2] {
        [self.layout.m(), self.layout.k()]
    }

    /// The rows that this rank owns.
    pub fn rows(&self) -> Range<usize> {
        self.rows_of(self.group.rank())
    }

    /// The rows that `rank` owns, counted rank after rank; empty if the group has no such rank.
    ///
    /// Rows lie in memory in this order too, unless the matrix was made by [`Group::sharded_staged`].
    pub fn rows_of(&self, rank: usize) -> Range<usize> {
        let m = self.layout.m();
        if rank < self.layout.world() {
            self.layout.rows_of(rank)
        } else {
            m..m
        }
    }

    /// Where the rows that `rank` owns lie in the matrix, in order.
    ///
    /// This is one range, or one range for each stage of a staged matrix. Empty ranges are left out.
    pub fn blocks_of(&self, rank: usize) -> Vec<Range<usize>> {
        if rank < self.layout.world() {
            self.layout.rows_in_memory(rank)
        } else {
            Vec::new()
        }
    }

    /// This rank's copy of the whole matrix, as an operand of this rank's own calls, for example after a gather.
    ///
    /// ```
    /// use gemmesh::{Group, Host, Result, all_gather, bf16, Matmul};
    ///
    /// fn rank(group: Group<Host>) -> Result<()> {
    ///     let mut x = group.sharded::<bf16>(2, 8)?;
    ///     x.shard_mut().copy_from_host(&[bf16::ONE; 8])?;
    ///     all_gather(&x)?;
    ///     let w = group.upload(&[bf16::ONE; 4 * 8], 4, 8)?;
    ///     let mut y = group.zeros::<bf16>(2, 4)?;
    ///     Matmul::new().run(x.view(), &w, &mut y)?;
    ///     assert_eq!(y.to_vec()?, [bf16::from_f32(8.0); 8]);
    ///     Ok(())
    /// }
    ///
    /// Group::threads(2, rank)?;
    /// # Ok::<_, gemmesh::Error>(())
    /// ```
    pub fn view(&self) -> MatrixView<'_, B, T> {
        self.view_of(0..self.layout.m())
    }

    /// This rank's own rows, [rows, K], as an operand, for example as a residual.
    ///
    /// # Errors
    /// [`Kind::Unsupported`] if the rows lie in several places, which [`ShardedMatrix::blocks_of`] lists.
    #[track_caller]
    pub fn shard(&self) -> Result<MatrixView<'_, B, T>> {
        self.shard_for("ShardedMatrix::shard")
    }

    #[track_caller]
    pub(super) fn shard_for(&self, call: &str) -> Result<MatrixView<'_, B, T>> {
        let blocks = self.blocks_of(self.group.rank());
        match &blocks[..] {
            [] => Ok(self.view_of(0..0)),
            [rows] => Ok(self.view_of(rows.clone())),
            several => {
                let what = format!(
                    "own rows must be one block to be viewed as one, but they are {} blocks, of {} stages; use views \
                     of them (ShardedMatrix::view, ShardedMatrix::blocks_of)",
                    several.len(),
                    self.layout.stages()
                );
                let refused = Err(Error::unsupported(what));
                self.group.judged(call, refused)
            }
        }
    }

    /// This rank's own rows, to be written.
    pub fn shard_mut(&mut self) -> ShardMut<'_, B, T> {
        ShardMut(self)
    }

    /// Some rows of this rank's copy of the matrix, which has them.
    pub(super) fn view_of(&self, rows: Range<usize>) -> MatrixView<'_, B, T> {
        let width = self.layout.k() * size_of::<T>();
        MatrixView {
            memory: ViewMemory::Shared(&self.memory, width),
            group: &self.group,
            offset: rows.start * width,
            shape: [rows.len(), self.layout.k()],
            element: PhantomData,
        }
    }

    /// Copies this rank's copy of the whole matrix to `values`, row by row. It waits as [`Matrix::copy_from_host`].
    ///
    /// # Errors
    /// [`Kind::Unsuitable`] unless there are M · K values; as [`Group::synchronize`].
    #[track_caller]
    pub fn copy_to_host(&self, values: &mut [T]) -> Result<()> {
        self.view().read("ShardedMatrix::copy_to_host", values)
    }

    /// Copies this rank's copy of the whole matrix to a new vector, row by row. It waits as [`Matrix::copy_from_host`].
    ///
    /// # Errors
    /// [`Kind::OutOfMemory`]; as [`Group::synchronize`].
    pub fn to_vec(&self) -> Result<Vec<T>> {
        let [m, k] = self.shape();
        let mut values = self.group.zeros_of_host(m * k)?;
        self.copy_to_host(&mut values)?;
        Ok(values)
    }

    /// Overwrites this rank's copy of the other ranks' rows, so that a test sees whether a gather brings them.
    ///
    /// # Errors
    /// The group's failure.
    #[cfg(feature = "unstable-tools")]
    pub fn poison(&mut self, value: T) -> Result<()> {
        let k = self.layout.k();
        let own = self.group.rank();
        for rank in (0..self.layout.world()).filter(|&rank| rank != own) {
            for rows in self.blocks_of(rank) {
                self.overwrite(rows.start, &vec![value; rows.len() * k])?;
            }
        }
        Ok(())
    }

    /// Overwrites rows from `first_row` on, whichever rank owns them. It waits as [`Matrix::copy_from_host`].
    ///
    /// # Errors
    /// [`Kind::Limit`] if there are more values than elements from that row on; as [`Group::synchronize`].
    #[cfg(feature = "unstable-tools")]
    #[track_caller]
    pub fn write(&mut self, first_row: usize, values: &[T]) -> Result<()> {
        self.overwrite(first_row, values)
    }

    #[track_caller]
    fn overwrite(&mut self, first_row: usize, values: &[T]) -> Result<()> {
        let [m, k] = self.shape();
        let check = || {
            limit("the first row that is written", first_row, 0, m)?;
            let most = (m - first_row) * k;
            limit("values from that row on", values.len(), 0, most)
        };
        self.group.judged("ShardedMatrix::write", check())?;
        let offset = first_row * k * size_of::<T>();
        self.group.settle()?;
        let backend = &self.group.inner().backend;
        let values = bytemuck::cast_slice(values);
        self.group
            .noted(backend.write_symmetric(&mut self.memory, offset, values))
    }

    pub(crate) fn group(&self) -> &Group<B> {
        &self.group
    }

    pub(crate) fn memory(&self) -> &B::Symmetric {
        &self.memory
    }

    pub(crate) fn layout(&self) -> &Layout {
        &self.layout
    }

    pub(crate) fn id(&self) -> u32 {
        self.id
    }
}

impl<B: Backend, T: Value> fmt::Debug for ShardedMatrix<B, T> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let [m, k] = self.shape();
        let rows = self.rows();
        write!(
            f,
            "ShardedMatrix<{}, {}>[{m}, {k}] rows {rows:?}",
            B::NAME,
            T::DTYPE
        )
    }
}

/// This rank's own rows of a [`ShardedMatrix`].
#[must_use = "a shard is written by its methods"]
pub struct ShardMut<'a, B: Backend, T: Value>(&'a mut ShardedMatrix<B, T>);

impl<B: Backend, T: Value> fmt::Debug for ShardMut<'_, B, T> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let (name, dtype, rows) = (B::NAME, T::DTYPE, self.0.rows());
        let shape = [rows.len(), self.0.layout.k()];
        write!(f, "ShardMut<{name}, {dtype}>{shape:?} rows {rows:?}")
    }
}

impl<'a, B: Backend, T: Value> ShardMut<'a, B, T> {
    /// How many elements the rows have. [`ShardMut::copy_from_host`] takes as many values.
    pub fn len(&self) -> usize {
        self.0.rows().len() * self.0.layout.k()
    }

    /// True if this rank owns no row.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Overwrites the rows with `values`, row by row. It waits as [`Matrix::copy_from_host`].
    ///
    /// # Errors
    /// [`Kind::Unsuitable`] unless there is one value for each element; as [`Group::synchronize`].
    #[track_caller]
    pub fn copy_from_host(&mut self, values: &[T]) -> Result<()> {
        let k = self.0.layout.k();
        let fits = self.require_length(values.len());
        self.0.group.judged("ShardMut::copy_from_host", fits)?;
        let mut values = values;
        for rows in self.0.blocks_of(self.0.group.rank()) {
            let (block, rest) = values.split_at(rows.len() * k);
            self.0.overwrite(rows.start, block)?;
            values = rest;
        }
        Ok(())
    }

    /// Checks that there is a value for each element of the own rows. All values of the matrix are too many.
    fn require_length(&self, values: usize) -> Result<()> {
        // The text is made only for the refusal.
        if values == self.len() {
            return Ok(());
        }
        let ([m, k], rows) = (self.0.shape(), self.0.rows().len());
        let whole = format!("this rank's part, [{rows}, {k}] of the [{m}, {k}] matrix");
        require_count(&whole, "element", self.len(), "the slice", values)
    }

    /// Overwrites the rows with the values of `rows`, [rows, K], after this rank's earlier operations and before its
    /// later ones.
    ///
    /// On GPUs the copy is put on the group's stream, and no host waits.
    ///
    /// ```
    /// use gemmesh::{Group, Host, Result, all_gather};
    ///
    /// fn rank(group: Group<Host>) -> Result<()> {
    ///     let own = group.upload(&[group.rank() as f32], 1, 1)?;
    ///     let mut x = group.sharded::<f32>(2, 1)?;
    ///     x.shard_mut().copy_from(&own)?;
    ///     all_gather(&x)?;
    ///     assert_eq!(x.to_vec()?, [0.0, 1.0]);
    ///     Ok(())
    /// }
    ///
    /// Group::threads(2, rank)?;
    /// # Ok::<_, gemmesh::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`MatrixViewMut::copy_from`].
    #[track_caller]
    pub fn copy_from<'m>(&mut self, rows: impl Into<MatrixView<'m, B, T>>) -> Result<()> {
        let (from, matrix) = (rows.into(), &mut *self.0);
        let shape = [matrix.rows().len(), matrix.layout.k()];
        const VIEW: &str = "the view to copy [rows of this rank, K]";
        from.require_copied("ShardMut::copy_from", &matrix.group, VIEW, shape)?;
        let mut first = 0;
        for block in matrix.blocks_of(matrix.group.rank()) {
            let rows = first..first + block.len();
            first = rows.end;
            let mut to = MatrixViewMut {
                view: matrix.view_of(block),
                exclusive: PhantomData,
            };
            to.copy_from(from.rows(rows)?)?;
        }
        Ok(())
    }

    /// The rows as an output, [rows, K], so that a product or a kernel of the caller's writes what is gathered next.
    ///
    /// ```
    /// use gemmesh::{Group, Host, Matmul, Result, all_gather, bf16};
    ///
    /// fn rank(group: Group<Host>) -> Result<()> {
    ///     let h = group.upload(&[bf16::ONE; 8], 1, 8)?;
    ///     let w = group.upload(&[bf16::ONE; 4 * 8], 4, 8)?;
    ///     let mut x = group.sharded::<bf16>(2, 4)?;
    ///     Matmul::new().run(&h, &w, x.shard_mut().view_mut()?)?;
    ///     all_gather(&x)?;
    ///     assert_eq!(x.to_vec()?, [bf16::from_f32(8.0); 8]);
    ///     Ok(())
    /// }
    ///
    /// Group::threads(2, rank)?;
    /// # Ok::<_, gemmesh::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`ShardedMatrix::shard`].
    #[track_caller]
    pub fn view_mut(self) -> Result<MatrixViewMut<'a, B, T>> {
        let matrix: &'a ShardedMatrix<B, T> = self.0;
        Ok(MatrixViewMut {
            view: matrix.shard_for("ShardMut::view_mut")?,
            exclusive: PhantomData,
        })
    }
}
