//! How many rows each rank sends to each other rank.

use std::sync::Arc;

use super::Layout;

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
}
