//! Which rank owns which rows of a sharded matrix, also of one that there is not yet.

use std::fmt;

use smallvec::SmallVec;

use crate::backend::Backend;
use crate::error::{Result, require_count};
use crate::group::Group;
use crate::schedule::limits::limit;
use crate::schedule::{Layout, RowOrder};

/// The rows of a matrix [M, K] that need not exist yet, and which rank owns them.
///
/// Made from `[m, k]`, whose rows are split evenly as by [`Group::sharded`](crate::Group::sharded), or from
/// `(rows, k)`, where rank r owns `rows[r]` rows as by [`Group::sharded_rows`](crate::Group::sharded_rows).
#[derive(Clone, PartialEq, Eq)]
pub struct RowSplit {
    rows: RowCounts,
    k: usize,
}

#[derive(Clone, PartialEq, Eq)]
enum RowCounts {
    Even(usize),
    ByRank(SmallVec<[usize; 8]>),
    Layout(Layout),
}

impl fmt::Debug for RowSplit {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match &self.rows {
            RowCounts::Even(m) => write!(f, "RowSplit[{m}, {}]", self.k),
            RowCounts::ByRank(rows) => write!(f, "RowSplit[{rows:?}, {}]", self.k),
            RowCounts::Layout(layout) => write!(f, "RowSplit[{:?}, {}]", layout.rows(), self.k),
        }
    }
}

impl From<[usize; 2]> for RowSplit {
    fn from([m, k]: [usize; 2]) -> Self {
        RowSplit {
            rows: RowCounts::Even(m),
            k,
        }
    }
}

impl From<(&[usize], usize)> for RowSplit {
    fn from((rows, k): (&[usize], usize)) -> Self {
        RowSplit {
            rows: RowCounts::ByRank(rows.into()),
            k,
        }
    }
}

impl From<(&Vec<usize>, usize)> for RowSplit {
    fn from((rows, k): (&Vec<usize>, usize)) -> Self {
        (&rows[..], k).into()
    }
}

impl<const W: usize> From<(&[usize; W], usize)> for RowSplit {
    fn from((rows, k): (&[usize; W], usize)) -> Self {
        (&rows[..], k).into()
    }
}

impl RowSplit {
    /// The rows of a matrix that exists.
    pub(crate) fn of(layout: &Layout) -> RowSplit {
        RowSplit {
            rows: RowCounts::Layout(layout.clone()),
            k: layout.k(),
        }
    }

    /// [M, K]
    pub(crate) fn shape(&self) -> [usize; 2] {
        let m = match &self.rows {
            RowCounts::Even(m) => *m,
            RowCounts::ByRank(rows) => rows.iter().fold(0usize, |m, &rows| m.saturating_add(rows)),
            RowCounts::Layout(layout) => layout.m(),
        };
        [m, self.k]
    }

    /// The layout of these rows over the ranks of a group.
    pub(super) fn layout<B: Backend>(self, group: &Group<B>) -> Result<Layout> {
        match self.rows {
            RowCounts::Even(m) => Layout::balanced(m, self.k, group.world_size()),
            RowCounts::ByRank(rows) => group.row_layout(&rows, self.k),
            RowCounts::Layout(layout) => Ok(layout),
        }
    }
}

/// A layout for a gather in as many stages as the call asks for.
pub(super) fn staged(layout: Layout, stages: Option<usize>) -> Result<Layout> {
    let Some(stages) = stages else {
        return Ok(layout);
    };
    if layout.order() == RowOrder::ByStage {
        let own = layout.stages();
        limit(
            "the number of stages of a gather of a staged matrix",
            stages,
            own,
            own,
        )?;
        return Ok(layout);
    }
    layout.staged(stages, RowOrder::ByRank)
}

/// The split of `m` rows of a product over `k`: rank r gets `rows[r]` rows.
pub(super) fn split<B: Backend>(
    group: &Group<B>,
    rows: &[usize],
    [m, k]: [usize; 2],
) -> Result<Layout> {
    let layout = group.row_layout(rows, k)?;
    // The text is made only for the refusal.
    if layout.m() != m {
        let part = format!("a split into {rows:?}");
        require_count("the product", "row", m, &part, layout.m())?;
    }
    Ok(layout)
}
