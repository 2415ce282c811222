//! Transfers between ranks, the regions that they move, and the blocks that the caller makes.

use std::ops::Range;

use smallvec::{SmallVec, smallvec};

use super::MAX_FLAGS;
use crate::element::DType;
use crate::route::Route;

/// The type and extents of a matrix, which a call binds to memory.
///
/// The rows of a shared matrix follow one another without padding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatrixSpec {
    /// The type of its elements.
    pub dtype: DType,
    /// Its rows.
    pub rows: usize,
    /// Its columns.
    pub columns: usize,
}

impl MatrixSpec {
    /// A matrix of `rows` rows and `columns` columns.
    pub const fn new(dtype: DType, rows: usize, columns: usize) -> MatrixSpec {
        MatrixSpec {
            dtype,
            rows,
            columns,
        }
    }

    /// The bytes of a row.
    pub fn row_bytes(&self) -> usize {
        self.columns * self.dtype.bytes()
    }

    /// The bytes of a region in memory whose rows begin `pitch` bytes apart. In a shared matrix the pitch is
    /// [`row_bytes`](Self::row_bytes).
    pub fn extent_of(&self, region: &Region, pitch: usize) -> Extent {
        let width = self.dtype.bytes();
        Extent {
            offset: region.rows.start * pitch + region.columns.start * width,
            width: region.columns.len() * width,
            pitch,
            rows: region.rows.len(),
        }
    }
}

/// A region of a matrix in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Bytes from the matrix's beginning.
    pub offset: usize,
    /// Bytes of a row of the region.
    pub width: usize,
    /// Bytes from row to row.
    pub pitch: usize,
    /// The number of rows.
    pub rows: usize,
}

impl Extent {
    /// Its length in bytes, if its rows follow one another without a gap.
    pub fn contiguous(&self) -> Option<usize> {
        (self.width == self.pitch || self.rows <= 1).then_some(self.width * self.rows)
    }
}

/// Rows and columns of a shared matrix, or of any matrix of the rank that makes the transfer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Region {
    /// The matrix's number.
    pub matrix: usize,
    /// Its rows.
    pub rows: Range<usize>,
    /// Its columns.
    pub columns: Range<usize>,
}

impl Region {
    /// True if both regions have an element in common.
    pub(super) fn overlaps(&self, other: &Region) -> bool {
        let meet = |a: &Range<usize>, b: &Range<usize>| a.start.max(b.start) < a.end.min(b.end);
        self.matrix == other.matrix
            && meet(&self.rows, &other.rows)
            && meet(&self.columns, &other.columns)
    }
}

/// A region of one rank's memory, and a region of the same size in another rank's memory that it is copied to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Move {
    /// The region that is read.
    pub from: Region,
    /// The region that is written.
    pub to: Region,
}

impl Move {
    /// A move to the same region of the other rank's memory.
    pub fn in_place(region: Region) -> Move {
        Move {
            from: region.clone(),
            to: region,
        }
    }
}

/// Regions that are moved together from one rank's memory into another's, under one flag.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// The rank whose memory is read.
    pub from: usize,
    /// The rank whose memory is written.
    pub to: usize,
    /// The rank whose rows they are. It is `from`, unless `from` passes on rows that it got.
    pub source: usize,
    /// The regions.
    pub regions: SmallVec<[Move; 1]>,
    /// Chunk flags that the mover waits for first.
    pub after: Range<usize>,
    /// A block of the mover's product, or of its caller, that it waits for too.
    pub produced: Option<usize>,
    /// Over a network, the number of the mover's [`HostSum`](super::HostSum) that it sends, if it does.
    pub added: Option<usize>,
    /// The chunk flag of `to` that says that the regions have arrived.
    pub flag: usize,
    /// Who moves the regions.
    pub route: Route,
    /// Over a network, its place in time: a rank takes its transfers by increasing turns, and sends and receives at most
    /// one at each. Both ranks of a transfer know its turn. Within a host it is 0.
    pub turn: usize,
    /// Over a network, whether no rank sends anything at a later step of turns.
    pub last_step: bool,
}

impl Transfer {
    /// A transfer of rows of `from` that waits for nothing, within a host.
    pub(crate) fn of_own(
        [from, to]: [usize; 2],
        moved: Move,
        route: Route,
        flag: usize,
    ) -> Transfer {
        Transfer {
            from,
            to,
            source: from,
            regions: smallvec![moved],
            after: 0..0,
            produced: None,
            added: None,
            flag,
            route,
            turn: 0,
            last_step: false,
        }
    }

    /// The rank that moves the regions. Over a network it is the one that sends them.
    pub fn mover(&self) -> usize {
        match self.route {
            Route::Pull => self.to,
            Route::Push | Route::Store | Route::Net => self.from,
        }
    }

    /// The rank that is not the mover.
    pub fn peer(&self) -> usize {
        match self.route {
            Route::Pull => self.from,
            Route::Push | Route::Store | Route::Net => self.to,
        }
    }

    /// The transfer's name for a profiler.
    pub(crate) fn name(&self) -> String {
        let rows = self
            .regions
            .first()
            .map_or(0..0, |moved| moved.to.rows.clone());
        let Range { start, end } = rows;
        match self.route {
            Route::Pull => format!("pull rows {start}..{end} from rank {}", self.from),
            Route::Push => format!("push rows {start}..{end} to rank {}", self.to),
            Route::Store => format!("store rows {start}..{end} to rank {}", self.to),
            Route::Net => format!(
                "send rows {start}..{end} from rank {} to {}",
                self.from, self.to
            ),
        }
    }

    /// True if it is the last of an odd number of transfers of the last step. `next`: the rank's next one over a network.
    pub(super) fn stays_alone(&self, next: Option<&Transfer>) -> bool {
        self.last_step && next.is_none() && (self.turn % STEP).is_multiple_of(2)
    }

    /// True for the second part of a copied chunk that is cut along K.
    pub fn is_deferred(&self) -> bool {
        let is_behind = |moved: &Move| moved.to.columns.start > 0;
        self.route != Route::Store && self.regions.iter().any(is_behind)
    }
}

/// The turns that a step may have.
const STEP: usize = MAX_FLAGS + 1;

/// The number of the first turn of a step, in which a rank sends to one rank and receives from one. The numbers alternate
/// between even and odd from step to step, too.
pub(in crate::schedule) fn first_turn(step: usize) -> usize {
    step * STEP
}

/// What a rank does over a network at one turn: it sends, or receives, or both.
#[derive(Clone, Copy, Debug)]
pub struct Turn<'a> {
    /// [`Transfer::turn`] of both.
    pub number: usize,
    /// What this rank sends.
    pub sent: Option<&'a Transfer>,
    /// What it receives.
    pub received: Option<&'a Transfer>,
    /// Whether what it sends is the last of an odd number of transfers of the operation's last step. If even and odd turns
    /// are under way at the same time, no other one is when this one is.
    pub sends_alone: bool,
    /// The same of what it receives.
    pub receives_alone: bool,
}

/// A block of rows that the caller makes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// The rank that gets them.
    pub owner: usize,
    /// The rows, counted among all that this rank makes.
    pub rows: Range<usize>,
    /// Where the caller puts them in this rank's memory.
    pub place: Region,
    /// The chunk flags of the other ranks' addends, if this rank keeps the rows.
    pub addends: Range<usize>,
}
