//! Which arguments of a call may have memory in common.
//!
//! An output has no byte in common with any other argument, except that the residual may be the output: each element is
//! then read just before it is written. What a gather brings into a sharded matrix is an output too, so no operand lies
//! in those rows. Arguments that are only read may overlap.
//!
//! The compiler checks this of typed matrices. It cannot see the memory that other libraries and languages describe.

use crate::backend::Backend;
use crate::backend::sealed::Bound;
use crate::error::{Error, Result};
use crate::matrix::Place;
use crate::schedule::plan::matrices::{
    A, A_SCALES, B, B_SCALES, BESIDE, BIAS, MATRICES, OUT, OUT_SCALES, PARTIALS, RESIDUAL,
};
use crate::schedule::{Addend, Extent, MAX_WEIGHTS, MatrixSpec, Move, Schedule, Transfer};

/// Checks the memory of a call's matrices, which have the numbers of [`matrices`](crate::schedule::plan::matrices).
///
/// # Errors
/// `Kind::Unsuitable` names the two arguments that overlap.
pub fn check<B: Backend>(schedule: &Schedule, bound: &[Bound<B>; MATRICES]) -> Result<()> {
    // In most calls no matrix lies between the first and the last byte of another.
    let mut all = [const { (0, 0..0) }; MATRICES];
    let mut count = 0;
    for (number, (bound, spec)) in bound.iter().zip(schedule.matrices()).enumerate() {
        if let Some(place) = place_of(bound, spec) {
            all[count] = (number, place.address..place.end());
            count += 1;
        }
    }
    let all = &all[..count];
    let may_overlap = all.iter().any(|(number, bytes)| {
        let mut others = all.iter().filter(|(other, _)| other != number);
        may_be_written(*number)
            && others.any(|(_, its)| bytes.start < its.end && its.start < bytes.end)
    });
    if may_overlap {
        CallMemory { schedule, bound }.check()
    } else {
        Ok(())
    }
}

/// True for outputs and their scales, and for rows that are gathered.
fn may_be_written(number: usize) -> bool {
    matches!(number, A | BESIDE | OUT..A_SCALES | OUT_SCALES..MATRICES)
}

/// Checks that a matrix can be copied. Returns true if there is nothing to copy, because target and source are the
/// same. The copy is a call of the group all the same.
///
/// # Errors
/// `Kind::Unsuitable` if they overlap otherwise.
pub fn check_copy<B: Backend>(
    source: &Bound<B>,
    target: &Bound<B>,
    spec: &MatrixSpec,
) -> Result<bool> {
    let (Some(source), Some(target)) = (place_of(source, spec), place_of(target, spec)) else {
        return Ok(true);
    };
    if target.is(&source) {
        return Ok(true);
    }
    if target.overlaps(&source) {
        Err(overlapping("the target", "partly that of the source"))
    } else {
        Ok(false)
    }
}

/// The memory of `argument` is that of a different argument.
pub fn overlapping(argument: &str, found: &str) -> Error {
    Error::unsuitable(format!("the memory of {argument}"), "apart from it", found)
}

/// The place of a bound matrix. None if there is no memory.
#[inline]
fn place_of<B: Backend>(bound: &Bound<B>, spec: &MatrixSpec) -> Option<Place> {
    let (first, offset, pitch) = match *bound {
        Bound::Nothing => return None,
        Bound::Symmetric(memory) => (B::address(memory), 0, spec.row_bytes()),
        Bound::Rows(memory, offset, pitch) => (B::address(memory), offset, pitch),
        Bound::Place(address, pitch) => (address, 0, pitch),
        Bound::Input(memory, offset) | Bound::Output(memory, offset) => {
            let (first, pitch) = B::place(memory);
            (first, offset, pitch)
        }
    };
    Some(Place {
        address: first + offset as u64,
        rows: spec.rows,
        width: spec.row_bytes(),
        pitch,
    })
}

/// The matrices of a call, by number.
struct CallMemory<'c, 'm, B: Backend> {
    schedule: &'c Schedule,
    bound: &'c [Bound<'m, B>; MATRICES],
}

impl<B: Backend> CallMemory<'_, '_, B> {
    #[cold]
    fn check(&self) -> Result<()> {
        for out in OUT..OUT + MAX_WEIGHTS {
            self.check_output(out)?;
        }
        if self.makes_scales() {
            for scales in OUT_SCALES..OUT_SCALES + MAX_WEIGHTS {
                self.check_output(scales)?;
            }
        }
        match self.bound[A] {
            Bound::Symmetric(_) => self.check_gathered(),
            _ => Ok(()),
        }
    }

    fn place(&self, number: usize) -> Option<Place> {
        place_of(&self.bound[number], &self.schedule.matrices()[number])
    }

    /// True if the call writes the scales of outputs. Otherwise it has none, or they are given.
    fn makes_scales(&self) -> bool {
        if let Bound::Nothing = self.bound[OUT_SCALES] {
            return false;
        }
        let mut scales = self.schedule.sums().filter_map(|sum| sum.scales);
        scales.any(|scales| scales.quantization.scaling.has_blocks())
    }

    /// Checks that an output is apart from all other arguments.
    fn check_output(&self, out: usize) -> Result<()> {
        let Some(place) = self.place(out) else {
            return Ok(());
        };
        // The group keeps the memory of partials, which no argument describes.
        for other in (0..MATRICES).filter(|&other| other != out && other != PARTIALS) {
            if let Some(its) = self.place(other)
                && place.overlaps(&its)
                && !self.may_overlap(other, &place, &its)
            {
                return Err(self.refusal(out, &self.name(other)));
            }
        }
        Ok(())
    }

    /// True if an output may overlap with an argument as it does.
    fn may_overlap(&self, other: usize, out: &Place, its: &Place) -> bool {
        match other {
            RESIDUAL => out.is(its),
            // A schedule has the rows of the longest input of all ranks.
            A if self.schedule.product().is_none() => {
                let rows = self.rows_read();
                !out.overlaps(&Place { rows, ..*its })
            }
            _ => false,
        }
    }

    /// The rows of [`A`] that are sent or added, if nothing is multiplied.
    fn rows_read(&self) -> usize {
        let schedule = self.schedule;
        let own = |moved: &&Transfer| moved.from == schedule.rank();
        let arrivals = schedule.arrivals().iter().filter(own);
        let moved = arrivals.chain(schedule.departures());
        let sent = moved.flat_map(|transfer| &transfer.regions);
        let sent = sent.filter(|Move { from, .. }| from.matrix == A);
        let sent = sent.map(|Move { from, .. }| from.rows.end);
        let added = schedule.reductions().flat_map(|reduction| {
            let rows = |addend: &Addend| match *addend {
                Addend::Rows { matrix: A, first } => Some(first + reduction.rows),
                _ => None,
            };
            reduction.sum.addends.iter().filter_map(rows)
        });
        sent.chain(added).max().unwrap_or(0)
    }

    /// Checks that no operand lies in rows that the call brings into sharded matrices.
    fn check_gathered(&self) -> Result<()> {
        let operands = [BIAS, RESIDUAL, A_SCALES].into_iter();
        let operands = operands
            .chain(B..B + MAX_WEIGHTS)
            .chain(B_SCALES..B_SCALES + MAX_WEIGHTS);
        for operand in operands.chain(OUT_SCALES..OUT_SCALES + MAX_WEIGHTS) {
            let Some(place) = self.place(operand) else {
                continue;
            };
            for gathered in [A, BESIDE] {
                if let Some(whole) = self.place(gathered)
                    && place.overlaps(&whole)
                    && self.is_written(gathered, &whole, &place)
                {
                    let rows = format!("the rows of {} that are gathered", self.name(gathered));
                    return Err(self.refusal(operand, &rows));
                }
            }
        }
        Ok(())
    }

    /// True if a rank writes into `place`, which lies in a sharded matrix.
    fn is_written(&self, gathered: usize, whole: &Place, place: &Place) -> bool {
        let spec = &self.schedule.matrices()[gathered];
        let arrivals = self.schedule.arrivals().iter();
        let mut moves = arrivals.flat_map(|transfer| &transfer.regions);
        moves.any(|Move { to, .. }| {
            let Extent {
                offset,
                width,
                pitch,
                rows,
            } = spec.extent_of(to, spec.row_bytes());
            let written = Place {
                address: whole.address + offset as u64,
                rows,
                width,
                pitch,
            };
            to.matrix == gathered && written.overlaps(place)
        })
    }

    fn refusal(&self, argument: usize, other: &str) -> Error {
        overlapping(&self.name(argument), &format!("partly that of {other}"))
    }

    /// A matrix's name in messages.
    fn name(&self, number: usize) -> String {
        let has = |number: &usize| !matches!(self.bound[*number], Bound::Nothing);
        let of_several = |name: &str, unit: &str, first: usize| {
            let count = (first..first + MAX_WEIGHTS).filter(has).count();
            match count {
                0 | 1 => name.into(),
                _ => format!("{name} ({unit} {} of {count})", number - first + 1),
            }
        };
        let quantizes = self.schedule.product().is_none() && has(&OUT_SCALES);
        match number {
            A if quantizes => "x".into(),
            A => "a".into(),
            BESIDE | A_SCALES => "scales of a".into(),
            BIAS => "bias".into(),
            RESIDUAL => "residual".into(),
            B..OUT => of_several("b", "weight", B),
            OUT..A_SCALES => of_several("out", "output", OUT),
            B_SCALES..OUT_SCALES => of_several("scales of b", "weight", B_SCALES),
            _ => of_several("scales of out", "output", OUT_SCALES),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Host;
    use crate::element::DType;
    use crate::schedule::plan::collectives::chunked;
    use crate::schedule::plan::plan;
    use crate::schedule::{Layout, Operation, Problem};

    /// Addresses that no call uses.
    fn bound<'m>(matrices: &[(usize, u64, usize)]) -> [Bound<'m, Host>; MATRICES] {
        let mut bound = [const { Bound::Nothing }; MATRICES];
        for &(number, address, pitch) in matrices {
            bound[number] = Bound::Place(address, pitch);
        }
        bound
    }

    fn schedule(operation: Operation, rows: &[usize]) -> Schedule {
        let layout = Layout::new(rows, 4).unwrap();
        let problem = Problem::new(operation, DType::F32, layout, 4);
        plan(&problem, 1, chunked(1)).unwrap()
    }

    /// So many rows of A may not lie in the output.
    #[track_caller]
    fn assert_rows_read(schedule: &Schedule, rows: u64) {
        let (out, row) = (1 << 20, 16);
        for rows_before in 0..8 {
            let a = out - rows_before * row as u64;
            let checked = check(schedule, &bound(&[(A, a, row), (OUT, out, row)]));
            let is_free = rows_before >= rows;
            assert_eq!(checked.is_ok(), is_free, "{rows_before} {checked:?}");
        }
    }

    #[test]
    fn only_the_rows_that_a_rank_sends_are_read() {
        // Rank 1 sends a row to each rank. The longest input of a rank has six rows.
        let schedule = schedule(Operation::ALL_TO_ALL, &[3, 1]);
        assert_eq!(schedule.matrices()[A].rows, 6);
        assert_rows_read(&schedule, 2);
    }

    #[test]
    fn an_addend_is_read_whole() {
        let schedule = schedule(Operation::REDUCE_SCATTER, &[2, 2]);
        assert_rows_read(&schedule, 4);
    }
}
