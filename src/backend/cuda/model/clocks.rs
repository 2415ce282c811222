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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clusters_take_tiles_in_turn() {
        let mut clocks = Clocks::new(3);
        let mut seen = Vec::new();
        for (tiles, takes) in [(2, 1.0), (3, 2.0), (5, 1.0)] {
            clocks.take(tiles, |count, clock| {
                seen.extend(vec![clock; count]);
                clock + takes
            });
        }
        // The third cluster is a tile behind, until it takes shorter ones.
        assert_eq!(seen, [0.0, 0.0, 0.0, 1.0, 1.0, 2.0, 3.0, 3.0, 3.0, 4.0]);
    }
}
