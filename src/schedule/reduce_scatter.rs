//! The planner of the product whose partial sums are added up by who owns the rows:
//! `out[rows of this rank, N] = Σ_p a_p[rows, K_p] · b_p[N, K_p]ᵀ + bias`; and of that whose sums all ranks get.
//!
//! Each rank multiplies its part of K for all rows. What it makes of another's rows, a *partial*, goes to a slot in the memory
//! of that one, which adds up all partials in the order of the ranks, its own among them: so the bits do not depend on who owns a
//! row, on the route, or on what comes first.

use std::ops::Range;

use smallvec::smallvec;

use super::config::{Chunking, Config, Route, TileShape};
use super::layout::{MAX_EXTENT, chunk_rows, limit};
use super::order::{self, TileRow, ring};
use super::partials::{Incoming, Partials, Piece, among_others};
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

/// The name of the call whose sums stay with the owners of the rows,
pub const NAME: &str = "matmul_reduce_scatter";
/// and of that whose sums all ranks get.
pub const ALL_NAME: &str = "matmul_all_reduce";

/// Whether an operation of this name makes partial sums and moves them.
pub fn is_sum(operation: &str) -> bool {
    [NAME, ALL_NAME].contains(&operation)
}

/// Where partials are pushed or stored: multiplies the peers' rows first, each block sent to its owner when it is there, and this
/// rank's own last, to which is added what has come. Where they are pulled, this stands behind [`multiply`]: takes what the
/// others have made of this rank's rows, and adds it up; nobody needs a kernel of another rank to run. But where [`is_exchanged`] says
/// so, all rows are made at once, and then each rank gets the partials of its own.
///
/// # Errors
/// [`Error::Limit`](crate::Error::Limit) when N is out of bounds, a field of the configuration is, or there are too many tiles
/// or blocks.
pub fn reduce_scatter(asked: &Description, rank: usize, config: Config) -> Result<Schedule> {
    let planner = Plan::new(asked, rank, config, Sums::Own)?;
    if is_exchanged(asked, &config) {
        return exchange(&planner);
    }
    match config.route {
        Route::Pull => reduce(&planner),
        Route::Push | Route::Store => multiply_and_reduce(&planner),
    }
}

/// The same, into a matrix of all rows that ranks share. Where partials are pushed or stored, rows are cut into panels, and each
/// panel of this rank's rows is sent on to all others when it is made, while the next ones are multiplied; where they are pulled, a
/// gather has to follow. But where [`is_exchanged`] says so, every rank gets all partials, and adds up all rows itself.
///
/// # Errors
/// As [`reduce_scatter`].
pub fn all_reduce(asked: &Description, rank: usize, config: Config) -> Result<Schedule> {
    if is_exchanged(asked, &config) {
        return exchange(&Plan::new(asked, rank, config, Sums::Everywhere)?);
    }
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
    let made = planner.all_pieces();
    let incoming: Vec<Incoming> = (0..world).map(|to| Incoming::of(&made, to)).collect();
    let mut rows = Vec::new();
    let mut blocks = Vec::new();
    let mut departures = Vec::new();
    for (block, piece) in made[rank].iter().enumerate() {
        let owner = piece.owner;
        let sum = if owner == rank {
            let first = piece.rows.start - layout.rows_of(rank).start;
            planner.tile_rows(
                block,
                &piece.rows,
                |tile| incoming[rank].flags(tile),
                &mut rows,
            );
            planner.sum(first, |_| Addend::Product)
        } else {
            planner.tile_rows(block, &piece.rows, |_| 0..0, &mut rows);
            planner.own_partials(planner.partials.own(owner, piece.rows.start))
        };
        let is_shared = owner == rank && planner.sums == Sums::All;
        for peer in ring(rank, world).filter(|&peer| peer == owner || is_shared) {
            let flag = incoming[peer].flag(rank, block);
            departures.push(planner.transfer(rank, peer, piece, flag, Some(block)));
        }
        let rows = piece.rows.clone();
        blocks.push(Block { rows, sum });
    }
    // In the order in which they are made: at the same time, those of the nearest rank first.
    let mut arrivals: Vec<(usize, usize, Transfer)> = Vec::new();
    for step in 1..world {
        let from = (rank + world - step) % world;
        for (block, piece) in made[from].iter().enumerate() {
            let is_shared = piece.owner == from && planner.sums == Sums::All;
            if piece.owner == rank || is_shared {
                let flag = incoming[rank].flag(from, block);
                let transfer = planner.transfer(from, rank, piece, flag, Some(block));
                arrivals.push((block, step, transfer));
            }
        }
    }
    arrivals.sort_by_key(|&(block, step, _)| (block, step));
    let arrivals = arrivals.into_iter().map(|(_, _, transfer)| transfer);
    let product = planner.product(A, blocks);
    let tiles = order::walk(&product, &rows);
    let product = Some((product, tiles));
    planner.schedule(true, arrivals.collect(), departures, product, None)
}

/// What a rank makes and sends at once, in this order, where its kernel runs beside the transfers and nothing is exchanged.
///
/// # Errors
/// As the operation's.
pub fn pieces(asked: &Description, rank: usize, config: Config) -> Result<Vec<Piece>> {
    let sums = match asked.operation {
        ALL_NAME => Sums::All,
        _ => Sums::Own,
    };
    Ok(Plan::new(asked, rank, config, sums)?.pieces(rank))
}

/// Rows of the lowest tiles: no fewer are multiplied at a time.
pub const LOW_ROWS: usize = 64;

/// Whether each rank makes the partials of all rows at once, then those who are to have the sums get them, and add them up at the end.
/// For few rows, one exchange takes less time than two, though more is moved; and where the sums stay with the owners, low tiles of all
/// rows take less than tiles for each rank's. (The limits are those of vLLM's custom all-reduce. It has none for two ranks; here it is
/// 1 MiB, because above that two steps can be hidden.)
pub fn is_exchanged(asked: &Description, config: &Config) -> bool {
    let most = match asked.layout.world() {
        1 => 0,
        2 => 1 << 20,
        3..=4 => 512 << 10,
        5..=8 => 256 << 10,
        _ => 0,
    };
    let columns = asked.n.next_multiple_of(PADDED_COLUMNS);
    let elements = asked.layout.m().saturating_mul(columns);
    let is_asked = match asked.operation {
        NAME => config.route == Route::Store && config.entry_rows() == LOW_ROWS,
        _ => true,
    };
    is_asked && elements.saturating_mul(asked.dtype.bytes()) <= most
}

/// What kernels send of a row is a multiple of this.
pub const PADDED_COLUMNS: usize = 16;

/// All rows are multiplied, then their partials go to those who are to have the sums, who add them up at the end.
fn exchange(planner: &Plan) -> Result<Schedule> {
    let &Plan {
        asked,
        rank,
        config,
        partials,
        sums,
    } = planner;
    let (m, world) = (asked.layout.m(), asked.layout.world());
    let count = match sums {
        Sums::Everywhere => config.chunking.count,
        // Parts that owners' rows straddle have no one place to go to.
        Sums::Own | Sums::All => 1,
    };
    let parts: Vec<Range<usize>> = chunk_rows(0..m, count, config.entry_rows()).collect();
    let is_pulled = config.route == Route::Pull;
    let rows_for = |to: usize| match sums {
        Sums::Everywhere => 0..m,
        Sums::Own | Sums::All => asked.layout.rows_of(to),
    };
    let transfer = |from: usize, to: usize, (index, part): (usize, &Range<usize>)| {
        let wanted = rows_for(to);
        let rows = part.start.max(wanted.start)..part.end.min(wanted.end);
        let region = |first: usize| planner.partial(first..first + rows.len());
        (!rows.is_empty()).then(|| Transfer {
            from,
            to,
            source: from,
            regions: smallvec![Move {
                from: region(partials.own(0, rows.start)),
                to: region(partials.slot(from, to) + rows.start - wanted.start),
            }],
            after: 0..0,
            produced: (!is_pulled).then_some(index),
            flag: among_others(from, to) * parts.len() + index,
            route: config.route,
        })
    };
    let all = || parts.iter().enumerate();
    let arrivals = ring(rank, world).flat_map(|from| all().map(move |part| (from, part)));
    let arrivals = arrivals.filter_map(|(from, part)| transfer(from, rank, part));
    let departures = all().flat_map(|part| ring(rank, world).map(move |to| (to, part)));
    let departures = departures.filter_map(|(to, part)| transfer(rank, to, part));
    let (arrivals, departures) = (arrivals.collect(), departures.collect());
    let product = (!is_pulled).then(|| {
        let mut rows = Vec::new();
        let blocks = all().map(|(block, part)| {
            planner.tile_rows(block, part, |_| 0..0, &mut rows);
            Block {
                rows: part.clone(),
                sum: planner.own_partials(partials.own(0, part.start)),
            }
        });
        let product = planner.product(A, blocks.collect());
        let tiles = order::walk(&product, &rows);
        (product, tiles)
    });
    let own = rows_for(rank);
    let addend = |from: usize| Addend::Rows {
        matrix: PARTIALS,
        first: match from == rank {
            true => partials.own(0, own.start),
            false => partials.slot(from, rank),
        },
    };
    let reduction = (!own.is_empty()).then(|| Reduction {
        rows: own.len(),
        n: asked.n,
        sum: Sum {
            out: OUT,
            first: 0,
            addends: (0..world).map(addend).collect(),
            bias: Some(BIAS),
        },
    });
    planner.schedule(true, arrivals, departures, product, reduction)
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
    let sum = planner.own_partials(planner.partials.own(0, 0));
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
    let copies = planner.pulls(&planner.all_pieces());
    planner.schedule(false, copies, Vec::new(), None, None)
}

/// The same, and then the sums of the others' rows.
///
/// # Errors
/// As [`reduce_scatter`].
pub fn copy_all(asked: &Description, rank: usize, config: Config) -> Result<Schedule> {
    let planner = Plan::new(asked, rank, whole(config), Sums::All)?;
    let made = planner.all_pieces();
    let mut copies = planner.pulls(&made);
    let incoming = Incoming::of(&made, rank);
    for owner in ring(rank, asked.layout.world()) {
        let pieces = made[owner].iter().enumerate();
        let sums = pieces.filter(|(_, piece)| piece.owner == owner);
        copies.extend(sums.map(|(number, piece)| {
            planner.transfer(owner, rank, piece, incoming.flag(owner, number), None)
        }));
    }
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
    let made = planner.all_pieces();
    let mut departures = Vec::new();
    for to in (1..world).map(|step| (rank + world - step) % world) {
        let incoming = Incoming::of(&made, to);
        departures.extend(planner.pulls_of(&made, &incoming, rank, to));
    }
    let own = asked.layout.rows_of(rank);
    let matrix = PARTIALS;
    let first = planner.partials.own(rank, own.start);
    let reduction = (!own.is_empty()).then(|| Reduction {
        rows: own.len(),
        n: asked.n,
        sum: planner.sum(0, |_| Addend::Rows { matrix, first }),
    });
    planner.schedule(true, planner.pulls(&made), departures, None, reduction)
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
#[derive(Clone, Copy, PartialEq)]
enum Sums {
    /// It alone.
    Own,
    /// All ranks, from it.
    All,
    /// All ranks, which make them.
    Everywhere,
}

impl Plan<'_> {
    fn new(asked: &Description, rank: usize, config: Config, sums: Sums) -> Result<Plan<'_>> {
        limit("rank", rank, 0, asked.layout.world() - 1)?;
        config.check()?;
        limit("N", asked.n, 1, MAX_EXTENT)?;
        let entries = asked.layout.m().div_ceil(config.entry_rows()) + asked.layout.world();
        let tiles = entries.saturating_mul(asked.n.div_ceil(config.tile.n));
        limit("tiles of the output", tiles, 1, 1 << 28)?;
        let partials = match sums {
            Sums::Own | Sums::All => Partials::of(asked, config.route),
            Sums::Everywhere => Partials::exchanged(asked, config.route),
        };
        limit("rows of all partials", partials.rows(), 1, MAX_EXTENT)?;
        // Also of the rank to which the most comes: all ranks find the same.
        let Chunking { count, last, .. } = config.chunking;
        let each = match sums {
            Sums::Own => count.max(last),
            // Panels of partials, the last of them in parts, and panels of sums.
            Sums::All => (count - 1 + last) + count,
            Sums::Everywhere => count,
        };
        let flags = (asked.layout.world() - 1) * each;
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

    /// What each rank makes.
    fn all_pieces(&self) -> Vec<Vec<Piece>> {
        let ranks = 0..self.asked.layout.world();
        ranks.map(|rank| self.pieces(rank)).collect()
    }

    /// All that a rank makes, in this order: panel by panel, the peers' rows; and its own rows of a panel when the peers' of the
    /// next one are made too, for by then what the peers have made of them has usually come. Where sums stay with the owners, all rows
    /// are one panel, and peers' rows are cut as the configuration says; the last peer's finer: when they are there, all that is
    /// left to do is to move them.
    fn pieces(&self, rank: usize) -> Vec<Piece> {
        let layout = &self.asked.layout;
        let world = layout.world();
        let height = self.config.entry_rows();
        let Chunking { count, last, .. } = self.config.chunking;
        let (panels, count) = match self.sums {
            Sums::All => (count, 1),
            Sums::Own | Sums::Everywhere => (1, count),
        };
        let panels_of = |owner| chunk_rows_of_block(layout.rows_of(owner), panels, height);
        let rows_of = |owner, panel| panels_of(owner).nth(panel).unwrap_or(0..0);
        let last_peer = (rank + world - 1) % world;
        let last_panel = panels_of(last_peer).count();
        let mut pieces = Vec::new();
        for panel in 0..=panels {
            for owner in ring(rank, world).filter(|_| panel < panels) {
                let is_last = (owner, panel + 1) == (last_peer, last_panel);
                let count = if is_last { last } else { count };
                let parts = chunk_rows_of_block(rows_of(owner, panel), count, height);
                pieces.extend(parts.map(|rows| Piece { owner, rows }));
            }
            let own = panel.checked_sub(1).map(|before| rows_of(rank, before));
            if let Some(rows) = own.filter(|rows| !rows.is_empty()) {
                pieces.push(Piece { owner: rank, rows });
            }
        }
        pieces
    }

    /// A piece on its way: a partial to its owner, sums to another rank.
    fn transfer(
        &self,
        from: usize,
        to: usize,
        piece: &Piece,
        flag: usize,
        produced: Option<usize>,
    ) -> Transfer {
        let Piece { owner, rows } = piece;
        let region = |first: usize| self.partial(first..first + rows.len());
        let moved = if *owner == to {
            let before = rows.start - self.asked.layout.rows_of(to).start;
            Move {
                from: region(self.partials.own(to, rows.start)),
                to: region(self.partials.slot(from, to) + before),
            }
        } else {
            Move::in_place(Region {
                matrix: OUT,
                rows: rows.clone(),
                columns: 0..self.asked.n,
            })
        };
        Transfer {
            from,
            to,
            source: from,
            regions: smallvec![moved],
            after: 0..0,
            produced,
            flag,
            route: self.config.route,
        }
    }

    /// Rows of partials, with their padding.
    fn partial(&self, rows: Range<usize>) -> Region {
        Region {
            matrix: PARTIALS,
            rows,
            columns: 0..self.partials.columns(),
        }
    }

    /// What becomes of rows that this rank makes for others, or pulls together with what those have made: from `first` on.
    fn own_partials(&self, first: usize) -> Sum {
        Sum {
            out: PARTIALS,
            first,
            addends: Vec::new(),
            bias: None,
        }
    }

    /// What `to` pulls from `from` of what the ranks make.
    fn pulls_of(
        &self,
        made: &[Vec<Piece>],
        incoming: &Incoming,
        from: usize,
        to: usize,
    ) -> impl Iterator<Item = Transfer> {
        let pieces = made[from].iter().enumerate();
        let pieces = pieces.filter(move |(_, piece)| piece.owner == to);
        pieces.map(move |(number, piece)| {
            self.transfer(from, to, piece, incoming.flag(from, number), None)
        })
    }

    /// What this rank pulls.
    fn pulls(&self, made: &[Vec<Piece>]) -> Vec<Transfer> {
        let peers = ring(self.rank, self.asked.layout.world());
        let incoming = Incoming::of(made, self.rank);
        let pulls = peers.flat_map(|from| self.pulls_of(made, &incoming, from, self.rank));
        pulls.collect()
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
        let mut ready = all.last().map_or(0, |row| row.ready + 1);
        let mut last = None;
        for m in 0..rows.len().div_ceil(height) {
            let begin = rows.start + m * height;
            let flags = flags(&(begin..(begin + height).min(rows.end)));
            // What has not come yet would hold up the tiles behind: those that wait for other rows are walked apart.
            if last
                .replace(flags.end)
                .is_some_and(|last| last != flags.end)
            {
                ready += 1;
            }
            let first = Tile::new(block, m, 0, flags);
            all.push(TileRow { first, ready });
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
            Sums::All | Sums::Everywhere => self.asked.layout.rows_of(self.rank).start,
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
            Sums::All | Sums::Everywhere => m,
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
                matrix(partials.rows(), partials.columns()),
            ],
            arrivals,
            departures,
            product,
            tiles: tiles.unwrap_or_default(),
            reduction,
            exchanged: collective && is_exchanged(asked, &self.config),
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
            let route = self.config.route;
            details += &format!(
                ", {chunks} chunks, last {last}, in multiples of {rows} rows, by Route::{route:?}"
            );
        }
        if self.config.route == Route::Store && is_exchanged(self.asked, &self.config) {
            // Tiles that wait for the others' of the same place must come in the same order.
            let TileShape { n, group_m, .. } = self.config.tile;
            details += &format!(", tiles of {n} columns, {group_m} one above the other");
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
