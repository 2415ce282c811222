//! How many rows each rank sends to each other rank.

use std::sync::Arc;

use super::Layout;
use super::limits::limit;
use crate::error::{Error, Result};

/// A count of rows for each pair of ranks, which all ranks know.
///
/// The rows that a rank sends lie receiver by receiver, and those that it gets sender by sender.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Counts {
    world: usize,
    /// By sender, then by receiver.
    rows: Arc<[usize]>,
}

impl Counts {
    /// Rank s sends rank r `rows[s * W + r]` rows. What a rank gets has to fit in the rows of `out`.
    ///
    /// # Errors
    /// `Kind::Unsuitable` unless there is one count for each pair of ranks; `Kind::Limit` if a rank gets more rows than
    /// `out` has.
    pub fn new(rows: &[usize], out: &Layout) -> Result<Counts> {
        let world = out.world();
        let pairs = world * world;
        if rows.len() != pairs {
            let expected = format!("{pairs}, one for each pair of ranks");
            let found = rows.len().to_string();
            return Err(Error::unsuitable("the number of counts", expected, found));
        }
        let counts = Counts {
            world,
            rows: rows.into(),
        };
        for to in 0..world {
            let what = format!("the number of rows for rank {to}");
            limit(&what, counts.received(to), 0, out.m())?;
        }
        Ok(counts)
    }

    /// Each rank sends every rank as many rows as it has in the layout.
    pub(crate) fn of_senders(layout: &Layout) -> Counts {
        let world = layout.world();
        let rows = layout.rows().into_iter();
        Counts {
            world,
            rows: rows
                .flat_map(|rows| (0..world).map(move |_| rows))
                .collect(),
        }
    }

    /// The rows that `from` sends to `to`.
    pub fn between(&self, from: usize, to: usize) -> usize {
        self.rows[from * self.world + to]
    }

    /// The rows that `from` sends to the ranks before `to`.
    pub(crate) fn sent_before(&self, from: usize, to: usize) -> usize {
        (0..to).map(|other| self.between(from, other)).sum()
    }

    /// The rows that `to` gets from the ranks before `from`.
    pub(crate) fn received_before(&self, from: usize, to: usize) -> usize {
        (0..from).map(|other| self.between(other, to)).sum()
    }

    /// The rows that `from` sends, those to itself among them.
    pub fn sent(&self, from: usize) -> usize {
        self.sent_before(from, self.world)
    }
    /// The rows that `to` gets, those of itself among them.
    pub fn received(&self, to: usize) -> usize {
        let rows = (0..self.world).map(|from| self.between(from, to));
        rows.fold(0, usize::saturating_add)
    }

    /// The most rows that a rank sends or gets.
    pub(crate) fn most(&self) -> usize {
        let of = |rank| self.sent(rank).max(self.received(rank));
        (0..self.world).map(of).max().unwrap_or(0)
    }

    /// True if each rank sends or gets rows, or none does.
    pub(crate) fn reach_all(&self) -> bool {
        let takes_part = |rank: usize| self.sent(rank) > 0 || self.received(rank) > 0;
        (0..self.world).all(takes_part) || self.most() == 0
    }

    /// The number of ranks.
    pub(crate) fn world(&self) -> usize {
        self.world
    }

    /// The rows that each rank sends, in words that ranks compare.
    pub(crate) fn agreed(&self) -> impl Iterator<Item = String> {
        let of_ranks = self.rows.chunks(self.world).enumerate();
        of_ranks.map(|(from, rows)| format!("rank {from} sends {rows:?}"))
    }
}

#[cfg(test)]
mod tests {
    use super::Counts;
    use crate::element::DType;
    use crate::error::Kind;
    use crate::schedule::plan::collectives::{chunked, stored};
    use crate::schedule::plan::plan;
    use crate::schedule::{Layout, Operation, Problem};

    /// The kernel of each rank waits for those of all others.
    #[test]
    fn rows_are_stored_if_all_ranks_send_or_get_some() {
        let problem = |rows: [usize; 9]| {
            let layout = Layout::new(&[5, 0, 0], 8).unwrap();
            let counts = Counts::new(&rows, &layout).unwrap();
            Problem {
                counts: Some(counts),
                ..Problem::new(Operation::ALL_TO_ALL, DType::U8, layout, 8)
            }
        };
        let all = problem([0, 0, 1, 0, 2, 0, 0, 0, 0]);
        let some = problem([0, 0, 1, 0, 0, 0, 0, 0, 4]);
        for rank in 0..3 {
            let schedule = plan(&all, rank, stored()).unwrap();
            assert!(schedule.is_pushed(), "rank {rank} has no kernel");
            let error = plan(&some, rank, stored()).unwrap_err();
            assert!(matches!(error.kind(), Kind::Unsupported { .. }), "{error}");
            assert!(plan(&some, rank, chunked(1)).is_ok());
            assert!(plan(&problem([0; 9]), rank, stored()).unwrap().is_idle());
        }
    }

    #[test]
    fn counts_of_other_ranks_are_refused() {
        let [two, three] = [2, 3].map(|world| Layout::balanced(6, 8, world).unwrap());
        let counts = Counts::new(&[1; 4], &two).unwrap();
        let problem = Problem {
            counts: Some(counts),
            ..Problem::new(Operation::ALL_TO_ALL, DType::U8, three, 8)
        };
        assert!(plan(&problem, 0, chunked(1)).is_err());
    }
}
