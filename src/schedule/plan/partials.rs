//! Partial sums: when they are exchanged, where they lie in the memory that ranks share, in which pieces they are made,
//! and under which flags they come.

use std::ops::Range;

use crate::route::Route;
use crate::schedule::{Config, Operation, Problem};

/// Rows of partials are as long as a multiple of this: 16 bytes, as copies and loads on GPUs ask for.
const ALIGNMENT: usize = 16;

/// Kernels store 16 rows at a time, so up to 15 rows past a rank's last are overwritten: in the memory of who makes
/// them or, where kernels store to slots, there.
pub const STORED_ROWS: usize = 16;

/// Rows of the lowest tiles: no fewer are multiplied at a time.
pub const LOW_ROWS: usize = 64;

/// Whether each rank makes the partials of all rows at once, then those who are to have the sums get them, and add them
/// up at the end.
pub fn is_one_shot(problem: &Problem, config: &Config) -> bool {
    match problem.operation {
        Operation::MatmulReduceScatter => by_owners(problem, config),
        _ => are_few(problem),
    }
}

/// Whether rows are so few that, where all ranks are to have the sums, one exchange takes less time than two, though
/// more is moved. (The limits are those of vLLM's custom all-reduce. It has none for two ranks; here it is 1 MiB,
/// because above that two steps can be hidden.)
pub(super) fn are_few(problem: &Problem) -> bool {
    let most = match problem.layout.world() {
        1 => 0,
        2 => 1 << 20,
        3..=4 => 512 << 10,
        5..=8 => 256 << 10,
        _ => 0,
    };
    let columns = problem.n.next_multiple_of(PADDED_COLUMNS);
    let elements = problem.layout.m().saturating_mul(columns);
    elements.saturating_mul(problem.dtypes.partials.bytes()) <= most
}

/// Where the sums stay with the owners of the rows: low tiles of all of few rows take less than tiles for each rank's.
pub(super) fn by_owners(problem: &Problem, config: &Config) -> bool {
    config.route == Route::Store && config.entry_rows() == LOW_ROWS && are_few(problem)
}

/// What kernels send of a row is a multiple of this.
pub const PADDED_COLUMNS: usize = 16;

/// The partials of one operation: on each rank its own, then the slots for those of the others.
#[derive(Clone, Copy, Debug)]
pub struct Partials {
    /// Rows of a slot: the most that come from a rank to another, and some that nobody uses.
    slot: usize,
    world: usize,
    m: usize,
    /// Rows that nobody uses, behind what a rank makes of the rows of each.
    gap: usize,
    /// Of a row, with what is padding.
    columns: usize,
}

impl Partials {
    /// The same on every rank. Where partials are pulled, those of all rows are made at once, and there are no gaps.
    pub fn of(problem: &Problem, route: Route) -> Partials {
        let rows = problem.layout.rows().into_iter();
        Partials::new(problem, route, rows.max().unwrap_or(0))
    }

    /// Those of operations in which all ranks get all of them.
    pub fn one_shot(problem: &Problem, route: Route) -> Partials {
        Partials::new(problem, route, problem.layout.m())
    }

    /// Those of rows that no kernel of this library makes: `own` rows of this rank's own, and slots of `slot` rows.
    pub fn of_callers(problem: &Problem, own: usize, slot: usize) -> Partials {
        Partials {
            m: own,
            ..Partials::new(problem, Route::Pull, slot)
        }
    }

    fn new(problem: &Problem, route: Route, slot: usize) -> Partials {
        let [gap, behind_slot] = match route {
            Route::Pull => [0, 0],
            Route::Push => [STORED_ROWS - 1, 0],
            Route::Store => [STORED_ROWS - 1; 2],
        };
        Partials {
            slot: slot + behind_slot,
            world: problem.layout.world(),
            m: problem.layout.m(),
            gap,
            columns: problem
                .n
                .next_multiple_of(ALIGNMENT / problem.dtypes.partials.bytes()),
        }
    }

    /// All rows.
    pub fn rows(&self) -> usize {
        self.slots() + (self.world - 1) * self.slot
    }

    /// The elements of a row.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// The first row of all slots. The own partials before them begin in the same place, whatever the slots are for.
    fn slots(&self) -> usize {
        self.m + self.world * self.gap
    }

    /// Where what `from` makes of the rows of `to` comes to lie in the memory of `to`: its first row.
    pub(super) fn slot(&self, from: usize, to: usize) -> usize {
        self.slots() + among_others(from, to) * self.slot
    }

    /// Where what a rank makes of row `row`, which `owner` owns, lies in its own memory.
    pub fn own(&self, owner: usize, row: usize) -> usize {
        owner * self.gap + row
    }
}

/// Rows that a rank makes, and sends, at once: of another rank, a partial; its own, sums.
pub struct Piece {
    /// The rank that owns them.
    pub owner: usize,
    /// Which.
    pub rows: Range<usize>,
}

/// What comes to one rank, by flag: partials are numbered by the first row that they are of, and then by sender, and
/// all sums behind them.
pub struct Incoming {
    /// The sender, the number of the piece among its own, and the rows.
    partials: Vec<(usize, usize, Range<usize>)>,
    sums: Vec<(usize, usize)>,
}

impl Incoming {
    /// `made`: by rank.
    pub fn of(made: &[Vec<Piece>], to: usize) -> Incoming {
        let others = || (0..made.len()).filter(|&from| from != to);
        let pieces = |from: usize| {
            made[from]
                .iter()
                .enumerate()
                .map(move |piece| (from, piece))
        };
        let mut partials: Vec<_> = others()
            .flat_map(pieces)
            .filter(|(_, (_, piece))| piece.owner == to)
            .map(|(from, (number, piece))| (from, number, piece.rows.clone()))
            .collect();
        partials.sort_by_key(|(from, _, rows)| (rows.start, *from));
        let sums = others().flat_map(pieces);
        let sums = sums.filter(|(from, (_, piece))| piece.owner == *from);
        Incoming {
            partials,
            sums: sums.map(|(from, (number, _))| (from, number)).collect(),
        }
    }

    /// The flag of a piece.
    pub fn flag(&self, from: usize, number: usize) -> usize {
        let mut partials = self.partials.iter();
        let partial = partials.position(|(sender, piece, _)| (*sender, *piece) == (from, number));
        let mut sums = self.sums.iter();
        partial.unwrap_or_else(|| {
            let sum = sums.position(|sum| *sum == (from, number));
            // What never comes has no flag: a schedule with that is refused.
            sum.map_or(usize::MAX, |sum| self.partials.len() + sum)
        })
    }

    /// Those of partials of these rows. Between the first and the last there may be others of smaller pieces, which
    /// come before what the rows need, or with it.
    pub fn flags(&self, rows: &Range<usize>) -> Range<usize> {
        let needed = |(_, _, piece): &(usize, usize, Range<usize>)| {
            piece.start < rows.end && rows.start < piece.end
        };
        let begin = self.partials.iter().position(needed).unwrap_or(0);
        let last = self.partials.iter().rposition(needed);
        begin..last.map_or(begin, |last| last + 1)
    }
}

/// The place of `rank` among the ranks other than `than`.
pub fn among_others(rank: usize, than: usize) -> usize {
    rank - usize::from(rank > than)
}
