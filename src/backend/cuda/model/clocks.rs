//! Clusters that take tiles in turn.

use std::collections::VecDeque;

/// When each cluster is done with its latest tile.
///
/// Clusters take tiles in turn, each when it is done with the one before. Neighbours are often done together, and are
/// kept as one entry.
pub struct Clocks(VecDeque<(usize, f64)>);

impl Clocks {
    /// `slots` clusters, all free.
    pub fn new(slots: usize) -> Clocks {
        Clocks(VecDeque::from([(slots, 0.0)]))
    }

    /// Takes the next `tiles` tiles. `make` gets how many clusters take one and at which time, and returns when they
    /// are done.
    pub fn take(&mut self, tiles: usize, mut make: impl FnMut(usize, f64) -> f64) {
        let mut left = tiles;
        while left > 0
            && let Some((clusters, clock)) = self.0.pop_front()
        {
            let count = clusters.min(left);
            if count < clusters {
                self.0.push_front((clusters - count, clock));
            }
            left -= count;
            let clock = make(count, clock);
            match self.0.back_mut() {
                Some((like, at)) if *at == clock => *like += count,
                _ => self.0.push_back((count, clock)),
            }
        }
    }
}
