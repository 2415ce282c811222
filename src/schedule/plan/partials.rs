//! Partial sums: where they lie in shared memory, in which pieces they are made, and under which flags they come.

use std::ops::Range;

use crate::route::Route;
use crate::schedule::layout::MAX_WORLD;
use crate::schedule::operation::RowResult;
use crate::schedule::{Config, Problem};

/// The length of a row of partials is a multiple of 16 bytes, which copies and loads on GPUs require.
const ALIGNMENT: usize = 16;

/// Kernels store 16 rows at a time, so they overwrite up to 15 rows after a rank's last. These rows lie in the memory
/// of the rank that makes the partials, or after the slot that a kernel stores to.
pub const STORED_ROWS: usize = 16;

/// The most rows of a low tile. Low tiles of all rows take less time than tiles of each rank's few rows.
pub const LOW_ROWS: usize = 64;

/// True if the configuration's tiles are low. They have whole [`STORED_ROWS`].
pub fn has_low_tiles(config: &Config) -> bool {
    let rows = config.entry_rows();
    rows <= LOW_ROWS && rows.is_multiple_of(STORED_ROWS)
}

/// True if partials may be sent tile by tile: low tiles, which are the same on all ranks.
pub(super) fn is_stored_by_tiles(config: &Config) -> bool {
    config.route == Route::Store && !config.stores_behind() && has_low_tiles(config)
}

/// True if the sum is made in one step: each rank makes the partials of all rows, then the ranks that get the sums
/// receive these partials and add them up.
pub fn is_one_shot(problem: &Problem, config: &Config) -> bool {
    match problem.operation.result {
        RowResult::Kept | RowResult::Blocks => false,
        RowResult::SumOfOwnRows => by_owners(problem, config),
        RowResult::SumOfAllRows if problem.hosts.count() > 1 => sends_all_partials(problem),
        // Between two ranks, one step moves as many bytes as two.
        RowResult::SumOfAllRows => {
            are_few(problem) || config.stores_behind() && problem.layout.world() <= 2
        }
    }
}

/// True if over several hosts each rank sends its partials of all rows, which are few, to all ranks when its product is
/// complete, whatever the configuration's route.
pub fn sends_all_partials(problem: &Problem) -> bool {
    let operation = problem.operation;
    let is_for_all = operation.sends_product() && operation.result.is_for_all();
    is_for_all && problem.hosts.count() > 1 && are_few(problem)
}

/// True if over several hosts a sum follows its product, which has a schedule of its own.
pub fn follows_product(problem: &Problem, config: &Config) -> bool {
    let is_over_hosts = problem.operation.sends_product() && problem.hosts.count() > 1;
    is_over_hosts && (config.route == Route::Pull || sends_all_partials(problem))
}

/// True if there are so few rows that one step takes less time than two, though it moves more bytes.
///
/// (The limits are those of vLLM's custom all-reduce. It has none for two ranks. Here that limit is 1 MiB, because
/// above it two steps can be hidden.)
pub(super) fn are_few(problem: &Problem) -> bool {
    let is_one_host = problem.hosts.count() == 1;
    let most = match problem.layout.world() {
        1 => 0,
        2 => 1 << 20,
        _ if !is_one_host => FEW_BYTES,
        3..=4 => 512 << 10,
        5..=8 => 256 << 10,
        _ => 0,
    };
    let columns = problem.n.next_multiple_of(PADDED_COLUMNS);
    let elements = problem.layout.m().saturating_mul(columns);
    let bytes = elements.saturating_mul(problem.dtypes.partials.bytes());
    bytes <= most && is_little_for_network(problem, bytes)
}

/// The most bytes of an addend that each of more than two ranks gets whole, over hosts or without a product.
pub(super) const FEW_BYTES: usize = 256 << 10;

/// True if a rank may send `bytes` to each rank of other hosts, so that all ranks have them after one step. In two steps
/// fewer bytes cross the network, but it takes 60 to 120 µs longer where a GPU's network has 25 to 50 GB/s.
pub(super) fn is_little_for_network(problem: &Problem, bytes: usize) -> bool {
    const LITTLE: usize = 2 << 20;
    let (world, hosts) = (problem.layout.world(), problem.hosts.count());
    // A kernel adds no more addends. (Simulations have more ranks.)
    world <= MAX_WORLD && (world - world / hosts).saturating_mul(bytes) <= LITTLE
}

/// True if a reduce-scatter is made in one step.
pub(super) fn by_owners(problem: &Problem, config: &Config) -> bool {
    is_stored_by_tiles(config) && are_few(problem)
}

/// Kernels send a multiple of this many columns of a row.
pub const PADDED_COLUMNS: usize = 16;

/// The buffer of one operation's partials. It has the rank's own partials, then the slots for those of the peers.
#[derive(Clone, Copy, Debug)]
pub struct Partials {
    /// Rows of a slot: the most rows that come from one rank to another, and padding.
    slot: usize,
    world: usize,
    m: usize,
    /// Rows of padding after the partials of each owner's rows.
    gap: usize,
    /// Columns of a row, with its padding.
    columns: usize,
}

impl Partials {
    /// The buffer of an operation in which each rank gets the partials of its own rows. It is the same on every rank.
    ///
    /// If those of all rows are made first, there is no padding between them.
    pub fn of(problem: &Problem, config: &Config) -> Partials {
        let rows = problem.layout.rows().into_iter();
        Partials::new(problem, Padding::of(config), rows.max().unwrap_or(0))
    }

    /// The buffer of an operation in which all ranks get all partials.
    pub fn one_shot(problem: &Problem, config: &Config) -> Partials {
        Partials::new(problem, Padding::of(config), problem.layout.m())
    }

    /// The buffer of rows that no kernel of this library makes, with `own` rows of the rank's own and slots of `slot`
    /// rows.
    pub fn of_callers(problem: &Problem, own: usize, slot: usize) -> Partials {
        Partials {
            m: own,
            ..Partials::new(problem, Padding::NONE, slot)
        }
    }

    fn new(problem: &Problem, padding: Padding, slot: usize) -> Partials {
        Partials {
            slot: slot + padding.slot,
            world: problem.layout.world(),
            m: problem.layout.m(),
            gap: padding.own,
            columns: problem
                .n
                .next_multiple_of(ALIGNMENT / problem.dtypes.partials.bytes()),
        }
    }

    /// The number of all rows.
    pub fn rows(&self) -> usize {
        self.slots() + (self.world - 1) * self.slot
    }

    /// The elements of a row.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// The first row of the first slot. The own partials before it begin at the same place, whatever the slots are for.
    fn slots(&self) -> usize {
        self.m + self.world * self.gap
    }

    /// The first row of the slot, in the memory of `to`, for the partials that `from` makes of the rows of `to`.
    pub(super) fn slot(&self, from: usize, to: usize) -> usize {
        self.numbered_slot(among_others(from, to))
    }

    /// The first row of a slot by its number.
    pub(super) fn numbered_slot(&self, number: usize) -> usize {
        self.slots() + number * self.slot
    }

    /// The row, in a rank's own memory, of its partial of row `row`, which `owner` owns.
    pub fn own(&self, owner: usize, row: usize) -> usize {
        owner * self.gap + row
    }
}

/// Rows after others, which may be overwritten.
struct Padding {
    /// After the partials of each owner's rows.
    own: usize,
    /// After a slot.
    slot: usize,
}

impl Padding {
    const NONE: Padding = Padding { own: 0, slot: 0 };

    fn of(config: &Config) -> Padding {
        let own = STORED_ROWS - 1;
        match config.route {
            Route::Pull | Route::Net => Padding::NONE,
            Route::Store if config.stores_behind() => Padding::NONE,
            Route::Push => Padding { own, slot: 0 },
            Route::Store => Padding { own, slot: own },
        }
    }
}

/// Rows that a rank makes and sends as one. A peer's rows are partials, and its own rows are sums.
#[derive(Clone)]
pub struct Piece {
    /// The rank that owns them.
    pub owner: usize,
    /// The rows.
    pub rows: Range<usize>,
}

/// The pieces that come to one rank, by flag. Flags of partials are numbered by first row, then by sender. Flags of
/// sums come after them.
pub struct Incoming {
    partials: Vec<Partial>,
    sums: Vec<(usize, usize)>,
}

/// Partials on their way: the sender, the number of the piece among its own, and the piece.
pub(super) type Partial = (usize, usize, Piece);

impl Incoming {
    /// The pieces that come to `to`. `made` has the pieces that each rank makes.
    pub fn of(made: &[Vec<Piece>], to: usize) -> Incoming {
        let others = || (0..made.len()).filter(|&from| from != to);
        let pieces = |from: usize| {
            made[from]
                .iter()
                .enumerate()
                .map(move |piece| (from, piece))
        };
        let partials = others()
            .flat_map(pieces)
            .filter(|(_, (_, piece))| piece.owner == to)
            .map(|(from, (number, piece))| (from, number, piece.clone()));
        let sums = others().flat_map(pieces);
        let sums = sums.filter(|(from, (_, piece))| piece.owner == *from);
        Incoming {
            sums: sums.map(|(from, (number, _))| (from, number)).collect(),
            ..Incoming::of_partials(partials)
        }
    }

    /// Partials of rows of one owner, or of several, whose flags follow one another.
    pub(super) fn of_partials(partials: impl Iterator<Item = Partial>) -> Incoming {
        let mut partials: Vec<Partial> = partials.collect();
        partials.sort_by_key(|(from, _, piece)| (piece.owner, piece.rows.start, *from));
        Incoming {
            partials,
            sums: Vec::new(),
        }
    }

    /// The flag of a piece.
    pub fn flag(&self, from: usize, number: usize) -> usize {
        let mut partials = self.partials.iter();
        let partial = partials.position(|(sender, piece, _)| (*sender, *piece) == (from, number));
        let mut sums = self.sums.iter();
        partial.unwrap_or_else(|| {
            let sum = sums.position(|sum| *sum == (from, number));
            // A piece that does not come to this rank has no flag. A schedule that names it is refused.
            sum.map_or(usize::MAX, |sum| self.partials.len() + sum)
        })
    }

    /// The flags of the partials of these rows of `owner`.
    ///
    /// The range may also hold flags of smaller pieces. These come before the pieces that the rows need, or together
    /// with them.
    pub fn flags(&self, owner: usize, rows: &Range<usize>) -> Range<usize> {
        let needed = |(_, _, piece): &Partial| {
            piece.owner == owner && piece.rows.start < rows.end && rows.start < piece.rows.end
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
