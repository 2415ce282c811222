//! Operands of products, with their scales if they have any.

use std::fmt;

use super::call::{RawShards, RawView, require_property, require_same_group, require_shape};
use crate::backend::Backend;
use crate::backend::sealed::Bound;
use crate::element::{DType, Element};
use crate::error::{Error, Result};
use crate::group::Group;
use crate::matrix::{Matrix, MatrixView, ShardedMatrix};
use crate::schedule::limits::require;
use crate::schedule::plan::matrices::{A, A_SCALES, BESIDE, MATRICES};
use crate::schedule::scaling::SCALED_BLOCK;
use crate::schedule::{Layout, Scaling};

/// The scales of an fp8 operand: f32 in this rank's own memory, and how many values share one.
///
/// A value is its fp8 number times its scale. [`MatrixView::scaled`] and [`Matrix::scaled`] give a matrix its scales.
///
/// Without blocks, an element of the product is `a_scale * (b_scale * sum)`. With blocks, each 128 of K are summed
/// separately, and `sum = fma(a_scale * b_scale, part, sum)` adds them in ascending order. All of this is f32.
///
/// ```
/// use gemmesh::fp8::Scales;
/// use gemmesh::{F8E4M3, Group, Host, Matmul, Result, bf16};
///
/// fn rank(group: Group<Host>) -> Result<()> {
///     let (m, n, k) = (2, 16, 32);
///     let x = group.upload(&vec![F8E4M3::from_f32(1.0); m * k], m, k)?;
///     let of_x = group.upload(&[0.5f32, 0.25], 1, m)?; // a scale for each row
///     let w = group.upload(&vec![F8E4M3::from_f32(2.0); n * k], n, k)?;
///     let of_w = group.upload(&[0.125f32], 1, 1)?; // one for all values
///     let mut y = group.zeros::<bf16>(m, n)?;
///     let (x, w) = (x.scaled(Scales::rows(&of_x)), w.scaled(Scales::tensor(&of_w)));
///     Matmul::new().run(x, w, &mut y)?;
///     let y = y.to_vec()?;
///     assert_eq!([y[0], y[n]].map(bf16::to_f32), [4.0, 2.0]);
///     Ok(())
/// }
///
/// Group::threads(1, rank)?;
/// # Ok::<_, gemmesh::Error>(())
/// ```
#[must_use = "operands do nothing"]
pub struct Scales<'a, B: Backend> {
    view: RawView<'a, B>,
    scaling: Scaling,
    first_row: usize,
    first_column: usize,
}

// Derived, they would need a backend that can be copied.
impl<B: Backend> Clone for Scales<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Backend> Copy for Scales<'_, B> {}

impl<B: Backend> fmt::Debug for Scales<'_, B> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let (scaling, shape) = (self.scaling, self.view.shape);
        write!(f, "Scales<{}>({scaling:?}, {shape:?})", B::NAME)
    }
}

impl<'a, B: Backend> Scales<'a, B> {
    /// One for all values: [1, 1].
    pub fn tensor(scales: impl Into<MatrixView<'a, B, f32>>) -> Self {
        Scales::new(scales.into(), Scaling::Tensor)
    }

    /// One for each row: [1, M] for `a`, and [1, N] for a weight [N, K].
    pub fn rows(scales: impl Into<MatrixView<'a, B, f32>>) -> Self {
        Scales::new(scales.into(), Scaling::Rows)
    }

    /// One for each block.
    ///
    /// A block of `a` is 1 × 128, and the scales are [M, ⌈K/128⌉]. A block of a weight is 128 × 128, and the scales are
    /// [⌈N/128⌉, ⌈K/128⌉], as checkpoints store them (`weight_scale_inv`). Both operands need such scales.
    pub fn blocks(scales: impl Into<MatrixView<'a, B, f32>>) -> Self {
        Scales::new(scales.into(), Scaling::Blocks)
    }

    /// One for each block of `a`, with those of a row in a column: [⌈K/128⌉, M].
    pub fn transposed_blocks(scales: impl Into<MatrixView<'a, B, f32>>) -> Self {
        Scales::new(scales.into(), Scaling::TransposedBlocks)
    }

    /// Says that the weight's first row is row `first` of the first block of 128 rows.
    ///
    /// A rank's part of a weight may begin inside a block, at a multiple of 16 rows below 128. The scales of a weight's
    /// blocks are then [⌈(first + N)/128⌉, ⌈K/128⌉]. It is for the [`Scales::blocks`] of a weight.
    pub fn first_row(mut self, first: usize) -> Self {
        self.first_row = first;
        self
    }

    /// Says that the first column is column `first` of the first block of 128 columns, for `a` and for each weight.
    ///
    /// A rank's part of K may begin inside a block of the weight, at a multiple of 16 columns below 128. The first block
    /// then has 128 - `first` columns. Rows of `a` are quantised likewise ([`Quantized::first_column`]), so that each
    /// part of K has one scale of either. The scales are [M, ⌈(first + K)/128⌉], and for a weight
    /// [⌈N/128⌉, ⌈(first + K)/128⌉]. It is for [`Scales::blocks`].
    ///
    /// ```
    /// use gemmesh::fp8::{Quantized, Scales, quantize};
    /// use gemmesh::{F8E4M3, Group, Host, MatmulAllReduce, Result, bf16};
    ///
    /// /// K = 384 is shared by two ranks. The second one's part begins with column 64 of a block.
    /// fn rank(group: Group<Host>) -> Result<()> {
    ///     let (m, n, k) = (4, 16, 192);
    ///     let first = group.rank() * k % 128;
    ///     let x = group.upload(&vec![bf16::from_f32(7.0); m * k], m, k)?;
    ///     let mut own = group.zeros::<F8E4M3>(m, k)?;
    ///     let mut of_own = group.zeros::<f32>(m, 2)?;
    ///     quantize(&x, &mut own, Quantized::blocks(&mut of_own).first_column(first))?;
    ///
    ///     let w = group.upload(&vec![F8E4M3::from_f32(1.0); n * k], n, k)?;
    ///     let of_w = group.upload(&[1.0f32; 2], 1, 2)?;
    ///     let mut sums = group.sharded::<bf16>(m, n)?;
    ///     let own = own.scaled(Scales::blocks(&of_own).first_column(first));
    ///     let w = w.scaled(Scales::blocks(&of_w).first_column(first));
    ///     MatmulAllReduce::new().run(own, w, &mut sums)?;
    ///     assert_eq!(sums.to_vec()?[0].to_f32(), 7.0 * 384.0);
    ///     Ok(())
    /// }
    ///
    /// Group::threads(2, rank)?;
    /// # Ok::<_, gemmesh::Error>(())
    /// ```
    ///
    /// [`Quantized::first_column`]: crate::fp8::Quantized::first_column
    pub fn first_column(mut self, first: usize) -> Self {
        self.first_column = first;
        self
    }

    fn new(view: MatrixView<'a, B, f32>, scaling: Scaling) -> Self {
        Scales {
            view: view.into(),
            scaling,
            first_row: 0,
            first_column: 0,
        }
    }

    /// Scales without element types, of which the caller has checked that they are f32.
    pub(crate) fn raw(view: RawView<'a, B>, scaling: Scaling) -> Self {
        Scales {
            view,
            scaling: match scaling {
                Scaling::BlocksFrom { .. } => Scaling::Blocks,
                other => other,
            },
            first_row: scaling.first_row(),
            first_column: scaling.first_column(),
        }
    }

    fn scaling(&self) -> Result<Scaling> {
        let what = match (self.scaling, self.first_row, self.first_column) {
            (Scaling::Blocks, row, column) => return Ok(Scaling::blocks_from(row, column)),
            (scaling, 0, 0) => return Ok(scaling),
            (_, 0, _) => "Scales::first_column is for Scales::blocks",
            _ => "Scales::first_row is for the blocks of a weight",
        };
        Err(Error::unsupported(what))
    }
}

/// An operand of a product: a matrix, with scales if it has any.
///
/// Made from a [`Matrix`] or a [`MatrixView`], which have no scales, or by [`Matrix::scaled`] or [`MatrixView::scaled`].
#[must_use = "operands do nothing"]
pub struct Operand<'a, B: Backend, T: Element> {
    values: MatrixView<'a, B, T>,
    scales: Option<Scales<'a, B>>,
}

// Derived, they would need a backend that can be copied.
impl<B: Backend, T: Element> Clone for Operand<'_, B, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Backend, T: Element> Copy for Operand<'_, B, T> {}

impl<B: Backend, T: Element> fmt::Debug for Operand<'_, B, T> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let (name, dtype, shape) = (B::NAME, T::DTYPE, self.values.shape());
        write!(f, "Operand<{name}, {dtype}>{shape:?}")?;
        match &self.scales {
            Some(scales) => write!(f, " {:?}", scales.scaling),
            None => Ok(()),
        }
    }
}

impl<'a, B: Backend, T: Element> From<MatrixView<'a, B, T>> for Operand<'a, B, T> {
    fn from(values: MatrixView<'a, B, T>) -> Self {
        let scales = None;
        Operand { values, scales }
    }
}

impl<'a, B: Backend, T: Element> From<&'a Matrix<B, T>> for Operand<'a, B, T> {
    fn from(values: &'a Matrix<B, T>) -> Self {
        values.view().into()
    }
}

impl<'a, B: Backend, T: Element> MatrixView<'a, B, T> {
    /// The view as an operand with scales. Only fp8 has scales.
    pub fn scaled(self, scales: Scales<'a, B>) -> Operand<'a, B, T> {
        Operand {
            values: self,
            scales: Some(scales),
        }
    }
}

impl<B: Backend, T: Element> Matrix<B, T> {
    /// The matrix as an operand with scales. Only fp8 has scales.
    pub fn scaled<'a>(&'a self, scales: Scales<'a, B>) -> Operand<'a, B, T> {
        self.view().scaled(scales)
    }
}

/// The scales of a sharded fp8 operand.
///
/// They are sharded with it, or each rank has all of them ([`Scales`]).
#[must_use = "operands do nothing"]
pub struct ShardedScales<'a, B: Backend>(Placed<'a, B>);

/// Where the scales of a sharded operand lie.
pub enum Placed<'a, B: Backend> {
    Own(Scales<'a, B>),
    Sharded(RawShards<'a, B>, Scaling),
}

impl<'a, B: Backend> Placed<'a, B> {
    /// Sharded scales without element types.
    pub fn sharded(shards: RawShards<'a, B>, scaling: Scaling) -> Result<Self> {
        let is_f32 = shards.dtype == DType::F32;
        require_property("scales of a", "the dtype", is_f32, DType::F32, shards.dtype)?;
        require(
            "sharded scales are those of rows or of blocks",
            scaling.is_sharded(),
        )?;
        Ok(Placed::Sharded(shards, scaling))
    }
}

// Derived, they would need a backend that can be copied.
impl<B: Backend> Clone for Placed<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Backend> Copy for Placed<'_, B> {}

// Derived, they would need a backend that can be copied.
impl<B: Backend> Clone for ShardedScales<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Backend> Copy for ShardedScales<'_, B> {}

impl<B: Backend> fmt::Debug for ShardedScales<'_, B> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match &self.0 {
            Placed::Own(scales) => write!(f, "{scales:?}"),
            Placed::Sharded(shards, scaling) => {
                let shape = shards.shape();
                write!(f, "ShardedScales<{}>({scaling:?}, {shape:?})", B::NAME)
            }
        }
    }
}

impl<'a, B: Backend> ShardedScales<'a, B> {
    /// One for each row, in the first column of [M, [`ShardedScales::columns_of_rows`]]. The rows are split as those of the
    /// operand, and are gathered with it.
    pub fn rows(scales: &'a ShardedMatrix<B, f32>) -> Self {
        ShardedScales(Placed::Sharded(scales.into(), Scaling::ShardedRows))
    }

    /// One for each 128 values of a row, in the first columns of [M, [`ShardedScales::columns_of_blocks`]]. The rows are
    /// split as those of the operand, and are gathered with it.
    pub fn blocks(scales: &'a ShardedMatrix<B, f32>) -> Self {
        ShardedScales(Placed::Sharded(scales.into(), Scaling::ShardedBlocks))
    }

    /// The columns of a matrix of scales of rows: 1. On GPUs they are 4, because rows of sharded matrices are whole pieces of
    /// 16 bytes. What stands in the others has no meaning.
    pub fn columns_of_rows() -> usize {
        whole_columns::<B>(1)
    }

    /// The columns of a matrix of scales of blocks, for an operand [M, `k`]: ⌈`k`/128⌉. On GPUs they are rounded up to a
    /// multiple of 4, as [`ShardedScales::columns_of_rows`].
    ///
    /// ```
    /// use gemmesh::fp8::ShardedScales;
    /// use gemmesh::{Group, Host, Result};
    ///
    /// fn rank(group: Group<Host>) -> Result<()> {
    ///     let columns = ShardedScales::<Host>::columns_of_blocks(2304);
    ///     assert_eq!(columns, 18); // 20 on GPUs
    ///     let of_x = group.sharded::<f32>(8, columns)?;
    ///     # let _ = of_x;
    ///     Ok(())
    /// }
    ///
    /// Group::threads(2, rank)?;
    /// # Ok::<_, gemmesh::Error>(())
    /// ```
    pub fn columns_of_blocks(k: usize) -> usize {
        whole_columns::<B>(k.div_ceil(SCALED_BLOCK))
    }
}

/// So many columns of f32, rounded up to whole pieces of a sharded matrix's rows.
pub(super) fn whole_columns<B: Backend>(columns: usize) -> usize {
    columns.next_multiple_of((B::ROW_ALIGNMENT / size_of::<f32>()).max(1))
}

impl<'a, B: Backend> From<Scales<'a, B>> for ShardedScales<'a, B> {
    fn from(scales: Scales<'a, B>) -> Self {
        ShardedScales(Placed::Own(scales))
    }
}

/// A sharded operand of a product, with scales if it has any.
///
/// Made from a [`ShardedMatrix`], which has no scales, or by [`ShardedMatrix::scaled`].
#[must_use = "operands do nothing"]
pub struct ShardedOperand<'a, B: Backend, T: Element> {
    values: &'a ShardedMatrix<B, T>,
    scales: Option<ShardedScales<'a, B>>,
}

// Derived, they would need a backend that can be copied.
impl<B: Backend, T: Element> Clone for ShardedOperand<'_, B, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Backend, T: Element> Copy for ShardedOperand<'_, B, T> {}

impl<B: Backend, T: Element> fmt::Debug for ShardedOperand<'_, B, T> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let (name, dtype, shape) = (B::NAME, T::DTYPE, self.values.shape());
        write!(f, "ShardedOperand<{name}, {dtype}>{shape:?}")?;
        match &self.scales {
            Some(scales) => write!(f, " {scales:?}"),
            None => Ok(()),
        }
    }
}

impl<'a, B: Backend, T: Element> From<&'a ShardedMatrix<B, T>> for ShardedOperand<'a, B, T> {
    fn from(values: &'a ShardedMatrix<B, T>) -> Self {
        let scales = None;
        ShardedOperand { values, scales }
    }
}

impl<B: Backend, T: Element> ShardedMatrix<B, T> {
    /// The matrix as an operand with scales. Only fp8 has scales.
    ///
    /// [`ShardedScales`] are gathered with the rows. [`Scales`] are already there, and are the same on all ranks.
    pub fn scaled<'a>(
        &'a self,
        scales: impl Into<ShardedScales<'a, B>>,
    ) -> ShardedOperand<'a, B, T> {
        ShardedOperand {
            values: self,
            scales: Some(scales.into()),
        }
    }
}

/// An operand without its element type.
pub struct RawOperand<'a, B: Backend> {
    pub values: RawView<'a, B>,
    scales: Option<Scales<'a, B>>,
}

// Derived, they would need a backend that can be copied.
impl<B: Backend> Clone for RawOperand<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Backend> Copy for RawOperand<'_, B> {}

impl<'a, B: Backend, T: Element> From<Operand<'a, B, T>> for RawOperand<'a, B> {
    fn from(operand: Operand<'a, B, T>) -> Self {
        RawOperand {
            values: operand.values.into(),
            scales: operand.scales,
        }
    }
}

/// What a scaled operand must be.
pub struct Expected {
    /// The operand, in messages.
    pub argument: &'static str,
    pub scaling: Scaling,
    /// The scales' shape, and its name in messages.
    pub scales: Option<([usize; 2], &'static str)>,
}

impl Expected {
    /// `a`, [M, K], whose scales are these.
    pub fn rows(scaling: Scaling, shape: [usize; 2]) -> Expected {
        Expected {
            argument: "a",
            scaling,
            scales: scaling.of_rows(shape),
        }
    }

    /// A weight [N, K], whose scales are these.
    pub fn weight(scaling: Scaling, shape: [usize; 2]) -> Expected {
        Expected {
            argument: "b",
            scaling,
            scales: scaling.of_weight(shape),
        }
    }

    /// Checks that values share scales as planned.
    fn require(&self, found: Scaling) -> Result<()> {
        if self.scaling == found {
            return Ok(());
        }
        Err(Error::unsuitable(
            format!("{} of {}", "the scaling", self.argument),
            format!(
                "{:?}, for which the call was prepared (scaling)",
                self.scaling
            ),
            format!("{found:?}"),
        ))
    }
}

/// How many values of an operand share a scale.
fn scaling_of<B: Backend>(scales: Option<&Scales<B>>) -> Result<Scaling> {
    scales.map_or(Ok(Scaling::None), Scales::scaling)
}

/// Checks the scales of an operand.
fn check<B: Backend>(
    scales: Option<&Scales<B>>,
    group: &Group<B>,
    expected: &Expected,
) -> Result<()> {
    expected.require(scaling_of(scales)?)?;
    if let (Some(scales), Some((shape, name))) = (scales, expected.scales) {
        let of = match expected.argument {
            "a" => "scales of a",
            _ => "scales of b",
        };
        require_same_group(of, scales.view.group, group)?;
        require_shape(name, shape, scales.view.shape)?;
    }
    Ok(())
}

impl<'a, B: Backend> RawOperand<'a, B> {
    pub fn new(values: RawView<'a, B>, scales: Option<Scales<'a, B>>) -> Self {
        RawOperand { values, scales }
    }

    /// How many values share a scale.
    pub fn scaling(&self) -> Result<Scaling> {
        scaling_of(self.scales.as_ref())
    }

    /// Checks the scales.
    pub fn check_scales(&self, group: &Group<B>, expected: &Expected) -> Result<()> {
        check(self.scales.as_ref(), group, expected)
    }

    /// Binds values and scales to these matrices.
    pub fn bind(&self, bound: &mut [Bound<'a, B>; MATRICES], values: usize, scales: usize) {
        bound[values] = self.values.input();
        if let Some(found) = &self.scales {
            bound[scales] = found.view.input();
        }
    }
}

/// A sharded operand without its element type.
pub struct RawShardedOperand<'a, B: Backend> {
    pub values: RawShards<'a, B>,
    scales: Option<Placed<'a, B>>,
}

// Derived, they would need a backend that can be copied.
impl<B: Backend> Clone for RawShardedOperand<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Backend> Copy for RawShardedOperand<'_, B> {}

impl<'a, B: Backend, T: Element> From<ShardedOperand<'a, B, T>> for RawShardedOperand<'a, B> {
    fn from(operand: ShardedOperand<'a, B, T>) -> Self {
        RawShardedOperand {
            values: operand.values.into(),
            scales: operand.scales.map(|ShardedScales(placed)| placed),
        }
    }
}

impl<'a, B: Backend> RawShardedOperand<'a, B> {
    pub fn new(values: RawShards<'a, B>, scales: Option<Placed<'a, B>>) -> Self {
        RawShardedOperand { values, scales }
    }

    /// How many values share a scale.
    pub fn scaling(&self) -> Result<Scaling> {
        match &self.scales {
            None => Ok(Scaling::None),
            Some(Placed::Own(scales)) => scales.scaling(),
            Some(Placed::Sharded(_, scaling)) => Ok(*scaling),
        }
    }

    /// Checks the scales of rows that are spread as `layout` says. `expected`: what the plan says of them.
    pub fn check_scales(&self, layout: &Layout, expected: &Expected) -> Result<()> {
        let group = self.values.group;
        let Some(Placed::Sharded(shards, scaling)) = &self.scales else {
            let own = match &self.scales {
                Some(Placed::Own(scales)) => Some(scales),
                _ => None,
            };
            return check(own, group, expected);
        };
        expected.require(*scaling)?;
        require_same_group("scales of a", shards.group, group)?;
        let ([_, columns], name) = expected.scales.unwrap_or_default();
        let columns = whole_columns::<B>(columns);
        shards.require_split([name, "scales of a (rows of each rank)"], layout, columns)
    }

    /// Binds values and scales.
    pub fn bind(&self, bound: &mut [Bound<'a, B>; MATRICES]) {
        bound[A] = self.values.bound();
        match &self.scales {
            None => {}
            Some(Placed::Own(scales)) => bound[A_SCALES] = scales.view.input(),
            Some(Placed::Sharded(shards, _)) => bound[BESIDE] = shards.bound(),
        }
    }

    /// The numbers of the sharded matrices.
    pub fn shared(&self) -> smallvec::SmallVec<[u32; 2]> {
        let scales = match &self.scales {
            Some(Placed::Sharded(shards, _)) => Some(shards.id),
            _ => None,
        };
        [self.values.id].into_iter().chain(scales).collect()
    }
}

/// The matrix of scales that is gathered with rows of K columns, as its type and its columns.
///
/// # Errors
/// `Kind::Unsupported` if there is one, but no rows are gathered.
pub fn beside<B: Backend>(
    scaling: Scaling,
    k: usize,
    gathers: bool,
) -> Result<Option<(DType, usize)>> {
    let fits = gathers || !scaling.is_sharded();
    require("only scales of rows that are gathered can be sharded", fits)?;
    let shape = scaling.of_rows([1, k]).filter(|_| scaling.is_sharded());
    Ok(shape.map(|([_, columns], _)| (DType::F32, whole_columns::<B>(columns))))
}
