//! The number of a collective operation.

/// The number of a collective operation of a group. It is 1 for the first operation and one more for each next one, and
/// wraps.
///
/// Flags hold the epoch in which they were last written, and are never reset. Two epochs of one group are never 2³¹
/// operations apart (see [`Epoch::refreshes`]), so their cyclic distance orders them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct Epoch(u32);

impl Epoch {
    /// The first operation of a group.
    pub const FIRST: Epoch = Epoch(1);

    /// The value of an open graph word (see [`drive::transfer_in_graph`](crate::schedule::drive::transfer_in_graph)).
    /// Graph words have only two values.
    pub const OPEN: Epoch = Epoch(1);

    /// The value of a closed graph word: before it is opened, and after a stream has passed it.
    pub const CLOSED: Epoch = Epoch(0);

    /// How many operations apart two refreshes of the flags are; see [`Epoch::refreshes`].
    pub const REFRESH: u32 = 1 << 28;

    /// The epoch that a flag word or a message holds.
    pub const fn from_raw(value: u32) -> Epoch {
        Epoch(value)
    }

    /// The value that is written into a flag.
    pub const fn raw(self) -> u32 {
        self.0
    }

    /// The next operation.
    #[must_use]
    pub const fn next(self) -> Epoch {
        Epoch(self.0.wrapping_add(1))
    }

    /// The operation before.
    #[must_use]
    pub const fn previous(self) -> Epoch {
        Epoch(self.0.wrapping_sub(1))
    }

    /// True if a flag that holds `seen` says that this operation, or a later one, has happened.
    pub const fn reached_by(self, seen: u32) -> bool {
        seen.wrapping_sub(self.0) as i32 >= 0
    }

    /// True if a rank must first set those of its flags to the epoch before that not every operation writes.
    ///
    /// An operation writes only the chunk flags that its schedule uses, and `done` only if its schedule uses it. A flag
    /// that no schedule used for 2³¹ operations would look as if it lay in the future. So all flags are rewritten long
    /// before that.
    pub const fn refreshes(self) -> bool {
        self.0.is_multiple_of(Epoch::REFRESH)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn epochs_are_ordered_across_the_wrap() {
        let last = Epoch::from_raw(u32::MAX);
        assert_eq!(last.next(), Epoch::from_raw(0));
        assert_eq!(last.next().previous(), last);
        assert!(last.reached_by(0), "the epoch after u32::MAX is 0");
        assert!(last.reached_by(5));
        assert!(!Epoch::from_raw(0).reached_by(u32::MAX));
        assert!(!Epoch::from_raw(3).reached_by(u32::MAX - 3));
    }

    #[test]
    fn an_epoch_is_reached_by_itself_and_by_later_ones_only() {
        for e in [0, 1, 7, u32::MAX / 2, u32::MAX - 1] {
            let epoch = Epoch::from_raw(e);
            assert!(epoch.reached_by(e));
            assert!(epoch.reached_by(e.wrapping_add(i32::MAX as u32)));
            assert!(!epoch.reached_by(e.wrapping_sub(1)));
            assert!(!epoch.reached_by(e.wrapping_sub(1 << 31)));
        }
    }

    #[test]
    fn refreshes_come_long_before_an_idle_flag_looks_like_the_future() {
        let refreshes = [0u32, Epoch::REFRESH, 7 * Epoch::REFRESH];
        assert!(
            refreshes
                .into_iter()
                .all(|e| Epoch::from_raw(e).refreshes())
        );
        assert!(!Epoch::FIRST.refreshes());
        const { assert!(Epoch::REFRESH < 1 << 31) };
    }
}
