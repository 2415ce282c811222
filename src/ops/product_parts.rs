//! What prepared products of one form do: their parts alone, and sums in sharded matrices.
#![allow(unsafe_code)]

use super::operands::Weights;
use super::product_builder::Prepared;
use super::product_form::{
    GatherProduct, OfAllRanks, OwnRows, ScatterProduct, into_own_rows, operands,
};
use super::product_operands::RawRows;
use super::{Operand, Outputs, ShardedOperand};
use crate::backend::Backend;
use crate::element::{Element, OutputOf};
#[cfg(doc)]
use crate::error::Kind;
use crate::error::Result;
use crate::matrix::ShardedMatrix;
use crate::profile::span::Work;
use crate::trace::Trace;

impl<'a, B: Backend, T: Element> Prepared<'a, B, T, GatherProduct> {
    /// Only gathers the rows of `a`. Collective. The first call plans it.
    ///
    /// # Errors
    /// As [`Prepared::run`].
    #[track_caller]
    pub fn gather<'m>(&self, a: impl Into<ShardedOperand<'m, B, T>>) -> Result<()> {
        self.planned.gather(&a.into().into(), None)
    }

    /// Only multiplies, with the rows of `a` that this rank has gathered before. Not collective. The first call plans it.
    ///
    /// # Errors
    /// [`Kind::Shape`] or [`Kind::Unsuitable`]; the group's failure.
    #[track_caller]
    pub fn matmul<'m, 'o>(
        &self,
        a: impl Into<ShardedOperand<'m, B, T>>,
        weights: impl Into<Weights<'m, B, T>>,
        outputs: impl Into<Outputs<'o, B, T>>,
    ) -> Result<()>
    where
        'a: 'm,
    {
        let operands = operands::<B, T, GatherProduct>(a, weights, self.addends);
        self.planned
            .multiply(&operands, &mut outputs.into().into(), None)
    }

    /// [`Prepared::gather`] and then [`Prepared::matmul`], and returns a trace of both. Collective; for pictures of what
    /// overlapping gains. On GPUs, copies that are pushed are not in it.
    ///
    /// # Errors
    /// As [`Prepared::run`].
    #[cfg(feature = "unstable-tools")]
    #[track_caller]
    pub fn run_in_sequence_traced<'m, 'o>(
        &self,
        a: impl Into<ShardedOperand<'m, B, T>>,
        weights: impl Into<Weights<'m, B, T>>,
        outputs: impl Into<Outputs<'o, B, T>>,
    ) -> Result<Trace>
    where
        'a: 'm,
    {
        let operands = operands::<B, T, GatherProduct>(a, weights, self.addends);
        let (mut gathered, mut multiplied) = (Vec::new(), Vec::new());
        self.planned.gather(&operands.a, Some(&mut gathered))?;
        let (mut outputs, spans) = (outputs.into().into(), Some(&mut multiplied));
        self.planned.multiply(&operands, &mut outputs, spans)?;
        let rank = self.planned.group.rank();
        let mut trace = Trace::new(rank, gathered);
        trace.extend(Trace::new(rank, multiplied));
        // All rows are there, so the schedule does not say whose they are.
        let rows = self.config().tile.m;
        for span in &mut trace.spans {
            if let Work::Tile { source, m, .. } = &mut span.work {
                *source = self.planned.owner(*m as usize * rows).unwrap_or(rank);
            }
        }
        Ok(trace)
    }

    /// Copies all rows from the other ranks without notifying them. Not collective; for benchmarks.
    ///
    /// # Errors
    /// [`Kind::Shape`] or [`Kind::Unsuitable`]; the group's failure.
    ///
    /// # Safety
    /// Until the copy has ended, no other rank writes its own rows of this matrix.
    #[cfg(feature = "unstable-tools")]
    #[track_caller]
    pub unsafe fn copy<'m>(&self, a: impl Into<ShardedOperand<'m, B, T>>) -> Result<()> {
        // SAFETY: as this function's.
        unsafe { self.planned.copy(Some(&RawRows::from(a.into())), None) }
    }
}

impl<'a, B: Backend, T: Element> Prepared<'a, B, T, ScatterProduct> {
    /// As [`Prepared::run`], but writes into this rank's own rows of a sharded matrix, [M, N].
    ///
    /// # Errors
    /// As [`ProductBuilder::run_into`](crate::products::ProductBuilder::run_into).
    #[track_caller]
    pub fn run_into<'m, O: OutputOf<T>>(
        &self,
        a: impl Into<Operand<'m, B, T>>,
        weights: impl Into<Weights<'m, B, T>>,
        out: &mut ShardedMatrix<B, O>,
    ) -> Result<()>
    where
        'a: 'm,
    {
        let operands = operands::<B, T, ScatterProduct>(a, weights, self.addends);
        self.planned
            .run(&operands, &mut into_own_rows::<B, T, O>(out), None)
    }

    /// As [`Prepared::run_into`], and returns a trace, as [`Prepared::run_traced`].
    ///
    /// # Errors
    /// As [`Prepared::run_into`].
    #[track_caller]
    pub fn run_into_traced<'m, O: OutputOf<T>>(
        &self,
        a: impl Into<Operand<'m, B, T>>,
        weights: impl Into<Weights<'m, B, T>>,
        out: &mut ShardedMatrix<B, O>,
    ) -> Result<Trace>
    where
        'a: 'm,
    {
        self.traced(a, weights, into_own_rows::<B, T, O>(out))
    }
}

/// Parts of sums, for benchmarks, after a run.
#[cfg(feature = "unstable-tools")]
impl<'a, B: Backend, T: Element, F: OwnRows + OfAllRanks> Prepared<'a, B, T, F> {
    /// Only multiplies, and leaves the partials where they are made. Not collective.
    ///
    /// # Errors
    /// [`Kind::Shape`] or [`Kind::Unsuitable`]; the group's failure.
    #[track_caller]
    pub fn multiply_partials<'m>(
        &self,
        a: impl Into<F::Rows<'m, B, T>>,
        weights: impl Into<Weights<'m, B, T>>,
    ) -> Result<()>
    where
        'a: 'm,
    {
        let operands = operands::<B, T, F>(a, weights, self.addends);
        self.planned.multiply_partials(&operands)
    }

    /// Only adds the partials that the ranks have made before, and gathers the sums if all ranks get all. Collective.
    ///
    /// # Errors
    /// As [`Prepared::run`].
    #[track_caller]
    pub fn sum_partials<'o>(&self, outputs: impl Into<F::Results<'o, B, T>>) -> Result<()> {
        self.planned
            .reduce(&self.addends, &mut outputs.into().into())
    }

    /// Copies the other ranks' partials of this rank's rows, and their sums if all ranks get all, without notifying them.
    /// Not collective.
    ///
    /// # Errors
    /// [`Kind::Shape`] or [`Kind::Unsuitable`]; the group's failure.
    ///
    /// # Safety
    /// Until the copy has ended, no other rank begins an operation that makes partials or sums, or writes its rows of the
    /// output.
    #[track_caller]
    pub unsafe fn copy_partials<'o>(&self, outputs: impl Into<F::Results<'o, B, T>>) -> Result<()> {
        // SAFETY: as this function's.
        unsafe { self.planned.copy(None, Some(&mut outputs.into().into())) }
    }
}
