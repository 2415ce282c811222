//! The planner of the product whose partial sums are added up by who owns the rows:
//! `out[rows of this rank, N] = Σ_p a_p[rows, K_p] · b_p[N, K_p]ᵀ + bias`; and of that whose sums all ranks get.
//!
//! Each rank multiplies its part of K for all rows. What it makes of another's rows, a *partial*, goes to a slot in the memory
//! of that one, which adds up all partials in the order of the ranks, its own among them: so the bits do not depend on who owns a
//! row, on the route, or on what comes first.

use std::ops::Range;

use super::config::{Chunking, Config, Route};
use super::layout::{MAX_EXTENT, chunk_rows, limit};
use super::order::{self, TileRow, ring};
use super::{
    Addend, Agreed, Block, Description, MAX_FLAGS, MatrixSpec, Move, Parts, Product, Reduction,
    Region, Schedule, Sum, Tile, Transfer,
};
use crate::error::Result;

/// The number of the matrix whose columns are this rank's part of K.
pub const A: usize = 0;
/// Of the weight.
pub const B: usize = 1;
/// Of what is added to each row of the output.
pub const BIAS: usize = 2;
/// Of the output: this rank's rows, or a matrix in which they have their place.
pub const OUT: usize = 3;
/// Of the partials in symmetric memory.
pub const PARTIALS: usize = 4;
/// How many there are.
pub const MATRICES: usize = 5;

/// Rows of partials are as long as a multiple of this: 16 bytes, as copies and loads on GPUs ask for.
const ALIGNMENT: usize = 16;

/// The partials of one operation: on each rank the slots for those of the others, then its own.
#[derive(Clone, Copy, Debug)]
pub struct Partials {
    /// Rows of a slot: the most that a rank owns.
    slot: usize,
    world: usize,
    m: usize,
    /// Of a row, with what is padding.
    columns: usize,
}

impl Partials {
    /// The same on every rank.
    pub fn of(asked: &Description) -> Partials {
        let layout = &asked.layout;
        let world = layout.world();
        let rows = (0..world).map(|rank| layout.rows_of(rank).len());
        Partials {
            slot: rows.max().unwrap_or(0),
            world,
            m: layout.m(),
            columns: asked.n.next_multiple_of(ALIGNMENT / asked.dtype.bytes()),
        }
    }

    /// All rows.
    pub fn rows(&self) -> usize {
        (self.world - 1) * self.slot + self.m
    }

    /// The elements of a row.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Where what `from` makes of the rows of `to` comes to lie in the memory of `to`: its first row.
    fn slot(&self, from: usize, to: usize) -> usize {
        (from - usize::from(from > to)) * self.slot
    }

    /// Where a rank's own partial of all rows lies: its first row.
    pub fn own(&self) -> usize {
        (self.world - 1) * self.slot
    }
}

/// The name of the call whose sums stay with the owners of the rows,
pub const NAME: &str = "matmul_reduce_scatter";
/// and of that whose sums all ranks get.
pub const ALL_NAME: &str = "matmul_all_reduce";

/// Where partials are pushed or stored: multiplies the peers' rows first, each block sent to its owner when it is there, and this
/// rank's own last, to which is added what has come. Where they are pulled, this stands behind [`multiply`]: takes what the
/// others have made of this rank's rows, and adds it up; nobody needs a kernel of another rank to run.
///
/// # Errors
/// [`Error::Limit`](crate::Error::Limit) when N is out of bounds, a field of the configuration is, or there are too many tiles
/// or blocks.
pub fn reduce_scatter(asked: &Description, rank: usize, config: Config) -> Result<Schedule> {
    let planner = Plan::new(asked, rank, config, Sums::Own)?;
    match config.route {
        Route::Pull => reduce(&planner),
        Route::Push | Route::Store => multiply_and_reduce(&planner),
    }
}

/// The same, into a matrix of all rows that ranks share. Where partials are pushed or stored, each part of this rank's rows is sent
/// on to all others when it is made; where they are pulled, a gather has to follow.
///
/// # Errors
/// As [`reduce_scatter`].
pub fn all_reduce(asked: &Description, rank: usize, config: Config) -> Result<Schedule> {
    let planner = Plan::new(asked, rank, config, Sums::All)?;
    match config.route {
        Route::Pull => reduce(&planner),
        Route::Push | Route::Store => multiply_and_reduce(&planner),
    }
}

fn multiply_and_reduce(planner: &Plan) -> Result<Schedule> {
    let &Plan { asked, rank, .. } = planner;
    let layout = &asked.layout;
    let world = layout.world();
    let mut blocks = Vec::new();
    let mut rows = Vec::new();
    let mut departures = Vec::new();
    for peer in ring(rank, world) {
        for part in planner.parts(rank, peer) {
            departures.push(planner.transfer(rank, peer, &part, Some(blocks.len())));
            planner.tile_rows(blocks.len(), &part.rows, |_| 0..0, &mut rows);
            let sum = Sum {
                out: PARTIALS,
                first: planner.partials.own() + part.rows.start,
                addends: Vec::new(),
                bias: None,
            };
            let rows = part.rows;
            blocks.push(Block { rows, sum });
        }
    }
    let mut arrivals: Vec<Transfer> = (1..world)
        .map(|step| (rank + world - step) % world)
        .flat_map(|peer| {
            let parts = planner.parts(peer, rank).into_iter();
            let before: usize = ring(peer, world)
                .take_while(|&other| other != rank)
                .map(|other| planner.cut(peer, other).count())
                .sum();
            parts
                .enumerate()
                .map(move |(index, part)| planner.transfer(peer, rank, &part, Some(before + index)))
        })
        .collect();
    let own = layout.rows_of(rank);
    if !own.is_empty() {
        // By flag: the rows of this rank that a part is of.
        let mut chunks = vec![0..0; arrivals.len()];
        for arrival in &arrivals {
            // Of partials: sums come later.
            let first = planner.partials.own();
            let Range { start, end } = arrival.regions[0].from.rows;
            chunks[arrival.flag] = start - first..end - first;
        }
        // Flags are numbered by first rows: what a tile needs stands before the first that begins behind it.
        let flags = |tile: &Range<usize>| {
            let needed = |chunk: &Range<usize>| chunk.start < tile.end && tile.start < chunk.end;
            let begin = chunks.iter().position(needed).unwrap_or(0);
            let end = chunks
                .iter()
                .rposition(needed)
                .map_or(begin, |last| last + 1);
            begin..end
        };
        for (index, part) in planner.cut_sums(rank).enumerate() {
            if let Sums::All = planner.sums {
                let to = |peer| planner.share(rank, peer, index, &part);
                departures.extend(ring(rank, world).map(to));
            }
            planner.tile_rows(blocks.len(), &part, flags, &mut rows);
            let sum = planner.sum(part.start - own.start, |_| Addend::Product);
            blocks.push(Block { rows: part, sum });
        }
    }
    if let Sums::All = planner.sums {
        for peer in ring(rank, world) {
            let parts = planner.cut_sums(peer).enumerate();
            arrivals.extend(parts.map(|(index, part)| planner.share(peer, rank, index, &part)));
        }
    }
    let product = planner.product(A, blocks);
    let tiles = order::walk(&product, &rows);
    planner.schedule(true, arrivals, departures, Some((product, tiles)), None)
}

/// Multiplies all rows; what is made of them stays here. The other ranks take no part.
///
/// # Errors
/// As [`reduce_scatter`].
pub fn multiply(asked: &Description, rank: usize, config: Config) -> Result<Schedule> {
    let planner = Plan::new(asked, rank, config, Sums::Own)?;
    let all = 0..asked.layout.m();
    let mut rows = Vec::new();
    planner.tile_rows(0, &all, |_| 0..0, &mut rows);
    let sum = Sum {
        out: PARTIALS,
        first: planner.partials.own(),
        addends: Vec::new(),
        bias: None,
    };
    let product = planner.product(A, vec![Block { rows: all, sum }]);
    let tiles = order::walk(&product, &rows);
    planner.schedule(false, Vec::new(), Vec::new(), Some((product, tiles)), None)
}

/// Takes what the others have made of this rank's rows, a block of each rank's at a time, with no word to anyone.
///
/// # Errors
/// As [`reduce_scatter`].
pub fn copy(asked: &Description, rank: usize, config: Config) -> Result<Schedule> {
    let planner = Plan::new(asked, rank, whole(config), Sums::Own)?;
    let copies = planner.pulls().collect();
    planner.schedule(false, copies, Vec::new(), None, None)
}

/// The same, and then the sums of the others' rows.
///
/// # Errors
/// As [`reduce_scatter`].
pub fn copy_all(asked: &Description, rank: usize, config: Config) -> Result<Schedule> {
    let planner = &Plan::new(asked, rank, whole(config), Sums::All)?;
    let sums = ring(rank, asked.layout.world()).flat_map(|owner| {
        let parts = planner.cut_sums(owner).enumerate();
        parts.map(move |(index, part)| Transfer {
            produced: None,
            ..planner.share(owner, rank, index, &part)
        })
    });
    let copies = planner.pulls().chain(sums).collect();
    planner.schedule(false, copies, Vec::new(), None, None)
}

/// Pulled in as few parts as there can be.
fn whole(config: Config) -> Config {
    Config {
        chunking: Chunking::new(1),
        ..config.with_route(Route::Pull)
    }
}

fn reduce(planner: &Plan) -> Result<Schedule> {
    let &Plan { asked, rank, .. } = planner;
    let world = asked.layout.world();
    let departures = (1..world)
        .map(|step| (rank + world - step) % world)
        .flat_map(|to| planner.pulls_of(rank, to));
    let own = asked.layout.rows_of(rank);
    let matrix = PARTIALS;
    let first = planner.partials.own() + own.start;
    let reduction = (!own.is_empty()).then(|| Reduction {
        rows: own.len(),
        n: asked.n,
        sum: planner.sum(0, |_| Addend::Rows { matrix, first }),
    });
    let (arrivals, departures) = (planner.pulls().collect(), departures.collect());
    planner.schedule(true, arrivals, departures, None, reduction)
}

/// What is asked, of one rank.
struct Plan<'a> {
    asked: &'a Description,
    rank: usize,
    config: Config,
    partials: Partials,
    sums: Sums,
}

/// Who gets the sums of a rank's rows.
#[derive(Clone, Copy)]
enum Sums {
    Own,
    All,
}

/// Rows that are sent at once.
struct Part {
    rows: Range<usize>,
    /// The flag of their owner that says that they have come.
    flag: usize,
}

impl Plan<'_> {
    fn new(asked: &Description, rank: usize, config: Config, sums: Sums) -> Result<Plan<'_>> {
        limit("rank", rank, 0, asked.layout.world() - 1)?;
        config.check()?;
        limit("N", asked.n, 1, MAX_EXTENT)?;
        let entries = asked.layout.m().div_ceil(config.entry_rows()) + asked.layout.world();
        let tiles = entries.saturating_mul(asked.n.div_ceil(config.tile.n));
        limit("tiles of the output", tiles, 1, 1 << 28)?;
        let partials = Partials::of(asked);
        limit("rows of all partials", partials.rows(), 1, MAX_EXTENT)?;
        // Also of the rank to which the most comes: all ranks find the same.
        let Chunking { count, last, .. } = config.chunking;
        let shares = match sums {
            Sums::Own => 0,
            Sums::All => count,
        };
        let flags = (asked.layout.world() - 1) * (count.max(last) + shares);
        let what = "transfers to a rank, of the chunks that Config::chunking asks for,";
        limit(what, flags, 0, MAX_FLAGS)?;
        Ok(Plan {
            asked,
            rank,
            config,
            partials,
            sums,
        })
    }

    /// How the rows of `to` are cut that `from` sends. Its last peer's are cut finer: when they are there, all that is left to do is
    /// to move them.
    fn cut(&self, from: usize, to: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let layout = &self.asked.layout;
        let world = layout.world();
        let is_last = to == (from + world - 1) % world;
        let chunking = self.config.chunking;
        let count = if is_last {
            chunking.last
        } else {
            chunking.count
        };
        chunk_rows_of_block(layout.rows_of(to), count, self.config.entry_rows())
    }

    /// What `from` sends to `to`. Flags of a rank are numbered by the first row that they are for, and then by sender.
    fn parts(&self, from: usize, to: usize) -> Vec<Part> {
        let world = self.asked.layout.world();
        let others = (0..world).filter(|&other| other != to);
        let all: Vec<(usize, usize)> = others
            .flat_map(|other| self.cut(other, to).map(move |rows| (rows.start, other)))
            .collect();
        let number = |start: usize| {
            let before = all.iter().filter(|&&part| part < (start, from));
            before.count()
        };
        self.cut(from, to)
            .map(|rows| Part {
                flag: number(rows.start),
                rows,
            })
            .collect()
    }

    fn transfer(&self, from: usize, to: usize, part: &Part, produced: Option<usize>) -> Transfer {
        let own = self.asked.layout.rows_of(to).start;
        let region = |first: usize| Region {
            matrix: PARTIALS,
            rows: first..first + part.rows.len(),
            columns: 0..self.partials.columns,
        };
        Transfer {
            from,
            to,
            source: from,
            regions: vec![Move {
                from: region(self.partials.own() + part.rows.start),
                to: region(self.partials.slot(from, to) + part.rows.start - own),
            }],
            after: 0..0,
            produced,
            flag: part.flag,
            route: self.config.route,
        }
    }

    /// What `to` pulls from `from`.
    fn pulls_of(&self, from: usize, to: usize) -> impl Iterator<Item = Transfer> {
        let parts = self.parts(from, to).into_iter();
        parts.map(move |part| self.transfer(from, to, &part, None))
    }

    /// What this rank pulls.
    fn pulls(&self) -> impl Iterator<Item = Transfer> {
        ring(self.rank, self.asked.layout.world()).flat_map(|from| self.pulls_of(from, self.rank))
    }

    /// The tile rows of a block, which wait for the flags that `flags` says of the rows that they are of, counted from the
    /// block's first.
    fn tile_rows(
        &self,
        block: usize,
        rows: &Range<usize>,
        flags: impl Fn(&Range<usize>) -> Range<usize>,
        all: &mut Vec<TileRow>,
    ) {
        let height = self.config.entry_rows();
        all.extend((0..rows.len().div_ceil(height)).map(|m| {
            let begin = rows.start + m * height;
            let flags = flags(&(begin..(begin + height).min(rows.end)));
            TileRow {
                first: Tile::new(block, m, 0, flags),
                ready: block,
            }
        }));
    }

    /// How the sums of the rows of `owner` are cut: where they go to all, each part when it is made.
    fn cut_sums(&self, owner: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let count = match self.sums {
            Sums::Own => 1,
            Sums::All => self.config.chunking.count,
        };
        let rows = self.asked.layout.rows_of(owner);
        chunk_rows_of_block(rows, count, self.config.entry_rows())
    }

    /// A part of the sums of `owner`, on its way to another rank. Its flags there stand behind those of partials.
    fn share(&self, owner: usize, to: usize, index: usize, part: &Range<usize>) -> Transfer {
        let world = self.asked.layout.world();
        let others = |rank: usize| (0..world).filter(move |&other| other != rank);
        let partials: usize = others(to).map(|from| self.cut(from, to).count()).sum();
        let before = others(to).take_while(|&other| other != owner);
        let before: usize = before.map(|other| self.cut_sums(other).count()).sum();
        let sent = others(owner).map(|other| self.cut(owner, other).count());
        Transfer {
            from: owner,
            to,
            source: owner,
            regions: vec![Move::in_place(Region {
                matrix: OUT,
                rows: part.clone(),
                columns: 0..self.asked.n,
            })],
            after: 0..0,
            produced: Some(sent.sum::<usize>() + index),
            flag: partials + before + index,
            route: self.config.route,
        }
    }

    /// All partials of this rank's rows from `first` on, in the order of the ranks, its own where `own` says, and the bias.
    fn sum(&self, first: usize, own: impl Fn(usize) -> Addend) -> Sum {
        let addend = |from: usize| match from == self.rank {
            true => own(from),
            false => Addend::Rows {
                matrix: PARTIALS,
                first: self.partials.slot(from, self.rank) + first,
            },
        };
        let place = match self.sums {
            Sums::Own => 0,
            Sums::All => self.asked.layout.rows_of(self.rank).start,
        };
        Sum {
            out: OUT,
            first: place + first,
            addends: (0..self.asked.layout.world()).map(addend).collect(),
            bias: Some(BIAS),
        }
    }

    fn product(&self, a: usize, blocks: Vec<Block>) -> Product {
        Product {
            a,
            b: B,
            m: self.asked.layout.m(),
            n: self.asked.n,
            k: self.asked.layout.k(),
            config: self.config,
            deferred: None,
            blocks,
        }
    }

    fn schedule(
        &self,
        collective: bool,
        arrivals: Vec<Transfer>,
        departures: Vec<Transfer>,
        product: Option<(Product, Vec<Tile>)>,
        reduction: Option<Reduction>,
    ) -> Result<Schedule> {
        let (asked, partials) = (self.asked, self.partials);
        let matrix = |rows, columns| MatrixSpec {
            dtype: asked.dtype,
            rows,
            columns,
        };
        let (m, k, n) = (asked.layout.m(), asked.layout.k(), asked.n);
        let out = match self.sums {
            Sums::Own => asked.layout.rows_of(self.rank).len(),
            Sums::All => m,
        };
        let (product, tiles) = product.unzip();
        Schedule::new(Parts {
            rank: self.rank,
            world: asked.layout.world(),
            agreed: collective.then(|| self.agree()),
            matrices: vec![
                matrix(m, k),
                matrix(n, k),
                matrix(1, n),
                matrix(out, n),
                matrix(partials.rows(), partials.columns),
            ],
            arrivals,
            departures,
            product,
            tiles: tiles.unwrap_or_default(),
            reduction,
        })
    }

    /// What the ranks must agree on: each has a K of its own. How partials are pulled is each rank's own affair.
    fn agree(&self) -> Agreed {
        let Description {
            layout, n, dtype, ..
        } = self.asked;
        let mut details = format!("M = {}, N = {n}, {dtype}", layout.m());
        if self.config.route != Route::Pull {
            let (chunks, last) = (self.config.chunking.count, self.config.chunking.last);
            let rows = self.config.entry_rows();
            details += &format!(", sent in {chunks} parts, the last in {last}, of {rows}s of rows");
        }
        if !layout.is_balanced() {
            details += &format!(", rows of each rank = {:?}", layout.rows());
        }
        Agreed::new(self.asked.operation, &details)
    }
}

/// As [`chunk_rows`], at boundaries of tiles that begin with the block.
fn chunk_rows_of_block(
    rows: Range<usize>,
    count: usize,
    entry_rows: usize,
) -> impl Iterator<Item = Range<usize>> {
    let parts = chunk_rows(0..rows.len(), count, entry_rows);
    parts.map(move |part| rows.start + part.start..rows.start + part.end)
}
