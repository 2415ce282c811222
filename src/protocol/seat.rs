//! The seat of another host's leader at rank 0.
//!
//! A leader makes two connections in a **visit**: one for messages, one for the mirror. If a connection fails, it gives up
//! both and makes another visit. The network may delay one connection and not the other, so what leaders say of
//! themselves arrives in any order, also after the end of a visit. A seat therefore goes by what each connection says:
//! whose it is, of which visit, and for what.

use serde::{Deserialize, Serialize};

/// A visit of a leader.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Visit {
    /// A random number of the leader. Two processes of one rank have different ones, and so have two of its groups.
    pub leader: u64,
    /// Counts the leader's visits.
    pub number: u32,
}

/// What a connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Line {
    /// For messages of calls.
    Messages,
    /// For the words of shared memory that other hosts read.
    Mirror,
}

/// The connections of the leader of a host.
#[derive(Debug)]
pub struct Seat<C> {
    visit: Option<Visit>,
    messages: Option<C>,
    mirror: Option<C>,
}

/// What becomes of a connection.
#[derive(Debug, PartialEq, Eq)]
pub enum Seating<C> {
    /// It has the seat.
    Seated,
    /// Its leader has begun a later visit, so the connection was dropped.
    Stale,
    /// A different leader has the seat, and its connections are open.
    Rival(C),
}

impl<C> Default for Seat<C> {
    fn default() -> Seat<C> {
        Seat {
            visit: None,
            messages: None,
            mirror: None,
        }
    }
}

impl<C> Seat<C> {
    /// Takes a connection that says `visit` and `line` of itself. `has_ended`: true if the other end of a connection is
    /// closed.
    pub fn take(
        &mut self,
        visit: Visit,
        line: Line,
        connection: C,
        has_ended: impl Fn(&C) -> bool,
    ) -> Seating<C> {
        if let Some(seated) = self.visit.filter(|&seated| seated != visit) {
            let is_same = seated.leader == visit.leader;
            if is_same && visit.number < seated.number {
                return Seating::Stale;
            }
            if !is_same && !self.connections().any(has_ended) {
                return Seating::Rival(connection);
            }
            // What is left of an earlier visit.
            *self = Seat::default();
        }
        self.visit = Some(visit);
        match line {
            Line::Messages => self.messages = Some(connection),
            Line::Mirror => self.mirror = Some(connection),
        }
        Seating::Seated
    }

    fn connections(&self) -> impl Iterator<Item = &C> {
        self.messages.iter().chain(&self.mirror)
    }

    /// True if there is a connection for `line`.
    pub fn has(&self, line: Line) -> bool {
        match line {
            Line::Messages => self.messages.is_some(),
            Line::Mirror => self.mirror.is_some(),
        }
    }

    /// The connections for messages and for the mirror.
    pub fn into_connections(self) -> (Option<C>, Option<C>) {
        (self.messages, self.mirror)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// A connection, named by its visit's number and its line.
    type Named = (u32, Line);

    const BOTH: [Line; 2] = [Line::Messages, Line::Mirror];

    fn visit(leader: u64, number: u32) -> Visit {
        Visit { leader, number }
    }

    /// A seat with the connections of `visit`.
    fn seated(visit: Visit) -> Seat<Named> {
        let mut seat = Seat::default();
        for line in BOTH {
            let seating = seat.take(visit, line, (visit.number, line), |_| false);
            assert_eq!(seating, Seating::Seated);
        }
        seat
    }

    fn of_visit(number: u32) -> (Option<Named>, Option<Named>) {
        let [messages, mirror] = BOTH.map(|line| Some((number, line)));
        (messages, mirror)
    }

    #[test]
    fn the_connections_of_a_visit_come_in_any_order() {
        for lines in [BOTH, [Line::Mirror, Line::Messages]] {
            let mut seat = Seat::default();
            for line in lines {
                assert!(!seat.has(line));
                let seating = seat.take(visit(7, 1), line, (1, line), |_| false);
                assert_eq!(seating, Seating::Seated);
            }
            assert_eq!(seat.into_connections(), of_visit(1));
        }
    }

    #[test]
    fn a_later_visit_replaces_both_connections_of_an_earlier_one() {
        let mut seat = seated(visit(7, 1));
        seat.take(visit(7, 2), Line::Mirror, (2, Line::Mirror), |_| false);
        assert!(!seat.has(Line::Messages) && seat.has(Line::Mirror));
        seat.take(visit(7, 2), Line::Messages, (2, Line::Messages), |_| false);
        assert_eq!(seat.into_connections(), of_visit(2));
    }

    #[test]
    fn what_comes_late_of_an_earlier_visit_changes_nothing() {
        let mut seat = seated(visit(7, 2));
        for line in BOTH {
            let seating = seat.take(visit(7, 1), line, (1, line), |_| false);
            assert_eq!(seating, Seating::Stale);
        }
        assert_eq!(seat.into_connections(), of_visit(2));
    }

    #[test]
    fn another_leader_is_a_rival_until_one_of_the_connections_has_ended() {
        let mut seat = seated(visit(7, 5));
        let other = (1, Line::Mirror);
        let seating = seat.take(visit(8, 1), Line::Mirror, other, |_| false);
        assert_eq!(seating, Seating::Rival(other));
        let has_ended = |&(_, line): &Named| line == Line::Messages;
        let seating = seat.take(visit(8, 1), Line::Mirror, other, has_ended);
        assert_eq!(seating, Seating::Seated);
        assert_eq!(seat.into_connections(), (None, Some(other)));
    }
}
