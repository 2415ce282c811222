//! What is moved: regions of matrices that ranks share, and what the caller makes.

use std::ops::Range;

use smallvec::SmallVec;

use crate::element::DType;
use crate::route::Route;

/// What is known of a matrix before a call binds it: its rows follow one another without padding where ranks share it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatrixSpec {
    /// Of its elements.
    pub dtype: DType,
    /// Its rows.
    pub rows: usize,
    /// Its columns.
    pub columns: usize,
}

impl MatrixSpec {
    /// Of so many rows and columns.
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

    /// What a region of it takes in memory whose rows begin `pitch` bytes apart: where ranks share it,
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
    /// From the matrix's beginning.
    pub offset: usize,
    /// Of a row of the region.
    pub width: usize,
    /// From row to row.
    pub pitch: usize,
    /// How many rows.
    pub rows: usize,
}

impl Extent {
    /// Its one length, if its rows follow one another without a gap.
    pub fn contiguous(&self) -> Option<usize> {
        (self.width == self.pitch || self.rows <= 1).then_some(self.width * self.rows)
    }
}

/// Rows and columns of a matrix that ranks share; or, in the memory of the rank that moves them, of any.
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
    /// Whether the two have an element in common.
    pub(super) fn overlaps(&self, other: &Region) -> bool {
        let meet = |a: &Range<usize>, b: &Range<usize>| a.start.max(b.start) < a.end.min(b.end);
        self.matrix == other.matrix
            && meet(&self.rows, &other.rows)
            && meet(&self.columns, &other.columns)
    }
}

/// A region of one rank's memory and where it goes in another's: as many rows and columns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Move {
    /// What is read.
    pub from: Region,
    /// What is written.
    pub to: Region,
}

impl Move {
    /// To the same place.
    pub fn in_place(region: Region) -> Move {
        Move {
            from: region.clone(),
            to: region,
        }
    }
}

/// Regions that are moved at once, from one rank's memory into another's, under one flag.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// The rank whose memory is read.
    pub from: usize,
    /// The rank whose memory is written.
    pub to: usize,
    /// The rank whose rows they are: `from`, unless that passes on what it got.
    pub source: usize,
    /// What is moved.
    pub regions: SmallVec<[Move; 1]>,
    /// Chunk flags of the rank that moves them: it waits for these first.
    pub after: Range<usize>,
    /// A block of the product of the rank that moves them, or one that its caller makes: it waits for that too.
    pub produced: Option<usize>,
    /// The chunk flag of `to` that says that they have arrived.
    pub flag: usize,
    /// Who moves them.
    pub route: Route,
}

impl Transfer {
    /// The rank that moves them.
    pub fn mover(&self) -> usize {
        match self.route {
            Route::Pull => self.to,
            Route::Push | Route::Store => self.from,
        }
    }

    /// The other rank, for the one that moves them.
    pub fn peer(&self) -> usize {
        match self.route {
            Route::Pull => self.from,
            Route::Push | Route::Store => self.to,
        }
    }

    /// For a profiler.
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
        }
    }

    /// Whether they are the part of a copied chunk that tiles need late.
    pub fn is_deferred(&self) -> bool {
        let is_behind = |moved: &Move| moved.to.columns.start > 0;
        self.route != Route::Store && self.regions.iter().any(is_behind)
    }
}

/// Rows that the caller makes: a block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// The rank that gets them.
    pub owner: usize,
    /// Which rows, of all that this rank makes.
    pub rows: Range<usize>,
    /// Where they are to lie in this rank's memory.
    pub place: Region,
    /// Of what this rank keeps, and others' is added to: the chunk flags of that.
    pub addends: Range<usize>,
}
