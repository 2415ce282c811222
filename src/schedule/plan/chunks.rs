//! How the rows of a gather are cut into chunks, and the ways that these go.

use std::ops::Range;

use smallvec::{SmallVec, smallvec};

use crate::route::Route;
use crate::schedule::config::{CUT_COLUMNS, Chunking, Config};
use crate::schedule::layout::{Layout, MAX_CHUNKS, RowOrder, chunk_rows};
use crate::schedule::plan::matrices::A;
use crate::schedule::transfer::first_turn;
use crate::schedule::{Hosts, Move, Problem, Region, Transfer};

/// How rows are cut into chunks, and the ways that they go.
///
/// If there are several hosts, a rank sends its rows over its rail, to the rank of its place on each other host. That
/// rank passes them on to its neighbours, chunk by chunk as they arrive. So each row crosses the network once a host.
pub(super) struct Cutter<'a> {
    layout: &'a Layout,
    hosts: &'a Hosts,
    route: Route,
    /// The chunks of each source's shard for the ranks of its host.
    chunks: Vec<Vec<StagedChunk>>,
    /// The chunks of each source's shard for the rank to which it comes last, if they differ.
    last_chunks: Option<Vec<Vec<StagedChunk>>>,
    /// The chunks of each source's shard for the ranks of other hosts. Empty if there are none.
    rail_chunks: Vec<Vec<StagedChunk>>,
}

/// A transfer of a rank's own rows under `flag`, straight to another rank on any host. `part`: its number among those
/// between the two. `near`: the route within a host.
pub(super) fn straight_transfer(
    problem: &Problem,
    near: Route,
    [from, to]: [usize; 2],
    moved: Move,
    [part, flag]: [usize; 2],
) -> Transfer {
    let world = problem.layout.world();
    // A rank sends around the ring of ranks, and receives from it backwards.
    let step = (to + world - from) % world;
    let route = problem.hosts.route(from, to, near);
    Transfer {
        turn: match route {
            Route::Net => first_turn(step) + part,
            _ => 0,
        },
        last_step: route == Route::Net && step + 1 == world,
        ..Transfer::of_own([from, to], moved, route, flag)
    }
}

/// About how many bytes of a shard cross the network at a time: enough to make its latency small, and little enough
/// that passing them on ends soon after the last have come.
pub(super) const RAIL_BYTES: usize = 2 << 20;

/// The most chunks of a shard on the network, if it goes to this number of ranks. A rank then has about as many turns
/// as a shard may have chunks. `copies`: how often a rank copies a chunk to its neighbours, for all shards. A copy
/// takes about three commands, and a GPU's queue holds 1024.
pub(super) fn most_on_rail(ranks: usize, copies: usize) -> usize {
    const MOST_COPIES: usize = 160;
    let turns = MAX_CHUNKS / ranks.max(1);
    turns.min(MOST_COPIES / copies.max(1)).max(1)
}

/// The same if it goes over a rail, and from there to the neighbours.
pub(super) fn most_on_rails(hosts: &Hosts, layout: &Layout) -> usize {
    let others = hosts.count() - 1;
    let neighbours = layout.world() / hosts.count() - 1;
    let sources = layout.rows().into_iter().filter(|&rows| rows > 0);
    most_on_rail(others, neighbours * sources.count().min(others))
}

/// A part of a shard that one transfer moves.
struct StagedChunk {
    /// The stage of its block.
    stage: usize,
    part: Part,
}

/// How rows come to a rank.
#[derive(Clone, Copy)]
struct RowPath {
    from: usize,
    route: Route,
    /// The flag of the first chunk at `from`, if that passes them on.
    come: Option<usize>,
    /// The turn of the first chunk.
    turn: usize,
    last_step: bool,
}

impl RowPath {
    /// The flags that the mover waits for before it moves chunk `index`.
    fn after(&self, index: usize) -> Range<usize> {
        let come = self.come.map(|first| first + index);
        come.map_or(0..0, |flag| flag..flag + 1)
    }

    /// The turn of chunk `index`, if it comes over a network.
    fn turn_of(&self, index: usize) -> usize {
        match self.route {
            Route::Net => self.turn + index,
            _ => 0,
        }
    }
}

/// Rows, or a range of their columns.
pub(super) struct Part {
    pub(super) rows: Range<usize>,
    pub(super) columns: Range<usize>,
}

impl<'a> Cutter<'a> {
    pub(super) fn new(problem: &'a Problem, config: &Config) -> Cutter<'a> {
        let (layout, hosts) = (&problem.layout, &problem.hosts);
        let all = |cut: &dyn Fn(usize) -> Vec<StagedChunk>| (0..layout.world()).map(cut).collect();
        let cut = |is_last| all(&|source| cut_shard(layout, config, source, is_last));
        let Chunking { count, last, .. } = config.chunking;
        let differs = count != last || config.cut(layout.k()).is_some();
        let is_one_host = hosts.count() == 1;
        let width = problem.dtypes.operands.bytes();
        Cutter {
            layout,
            hosts,
            route: config.route,
            chunks: cut(false),
            // Rows of other hosts come last.
            last_chunks: (differs && is_one_host && config.route != Route::Store)
                .then(|| cut(true)),
            rail_chunks: if is_one_host {
                Vec::new()
            } else {
                let most = most_of_block(hosts, layout);
                all(&|source| cut_for_rail(layout, width, most, source))
            },
        }
    }

    /// The chunks in which the shard of `source` is moved to `peer`.
    fn chunks_of(&self, source: usize, peer: usize) -> &[StagedChunk] {
        if !self.hosts.share(source, peer) {
            return &self.rail_chunks[source];
        }
        let is_last = peer == (source + 1) % self.layout.world();
        let last_chunks = self.last_chunks.as_ref().filter(|_| is_last);
        &last_chunks.unwrap_or(&self.chunks)[source]
    }

    /// The other ranks of `rank`'s host, in the order of its ring.
    fn neighbours(&self, rank: usize) -> impl DoubleEndedIterator<Item = usize> {
        self.hosts.neighbours(rank, self.layout.world())
    }

    /// The transfers to `rank`, stage by stage. In each stage the rows of its own host come first, and then host by host
    /// those of the others. All ranks of a host send at the same time, so their chunks alternate.
    pub(super) fn arrivals(&self, rank: usize) -> Vec<Transfer> {
        let mut all = Vec::new();
        for stage in 0..self.layout.stages() {
            let from = |source| self.transfers(source, rank, stage);
            all.extend(self.neighbours(rank).flat_map(from));
            for source in self.hosts.rail(rank) {
                let sources = std::iter::once(source).chain(self.neighbours(source));
                all.extend(alternating(sources.map(from)));
            }
        }
        all
    }

    /// The transfers from `rank`, stage by stage. In each stage its own rows go backwards around the rings, because the
    /// rank before needs them first: around the ring of its host, and then around that of hosts. Then it passes on the
    /// rows that come from its rail.
    pub(super) fn departures(&self, rank: usize) -> Vec<Transfer> {
        let mut all = Vec::new();
        for stage in 0..self.layout.stages() {
            let peers = self
                .neighbours(rank)
                .rev()
                .chain(self.hosts.rail(rank).rev());
            all.extend(peers.flat_map(|peer| self.transfers(rank, peer, stage)));
            for source in self.hosts.rail(rank) {
                all.extend(self.passed_on(source, rank, stage));
            }
        }
        all
    }

    /// The transfers by which `rank` passes on rows of `source`, each chunk to all neighbours.
    fn passed_on(&self, source: usize, rank: usize, stage: usize) -> Vec<Transfer> {
        let neighbours = self.neighbours(rank).rev();
        alternating(neighbours.map(|peer| self.transfers(source, peer, stage)))
    }

    /// The transfers of a stage's rows of `source` to `peer`, each with its flag at `peer`.
    ///
    /// A rank numbers all chunks that come to it in the order of their rows. So the flags that a tile needs are one
    /// range, even if the tile straddles chunks or shards. The second part of a chunk that is cut along K has the
    /// number after the first's.
    fn transfers(
        &self,
        source: usize,
        peer: usize,
        stage: usize,
    ) -> impl Iterator<Item = Transfer> {
        let first = self.first_flag(source, peer, stage);
        let way = self.way(source, peer, stage);
        let own =
            self.chunks_before(source, peer, stage)..self.chunks_before(source, peer, stage + 1);
        let chunks = self.chunks_of(source, peer)[own].iter().enumerate();
        chunks.map(move |(index, StagedChunk { part, .. })| Transfer {
            from: way.from,
            to: peer,
            source,
            regions: smallvec![Move::in_place(Region {
                matrix: A,
                rows: part.rows.clone(),
                columns: part.columns.clone(),
            })],
            after: way.after(index),
            produced: None,
            added: None,
            flag: first + index,
            route: way.route,
            turn: way.turn_of(index),
            last_step: way.last_step,
        })
    }

    /// How a stage's rows of `source` come to `peer`.
    fn way(&self, source: usize, peer: usize, stage: usize) -> RowPath {
        // The rank of the peer's host to which the rail brings them.
        let gateway = self.hosts.beside(peer, source);
        let from = if gateway == peer { source } else { gateway };
        let come = (from != source).then(|| self.first_flag(source, from, stage));
        let near = if from == source {
            self.route
        } else {
            Route::Push
        };
        // All ranks send to the host before their own at the same time, and then to the one before that.
        let hosts = self.hosts.count();
        let step = stage * hosts + self.hosts.steps(peer, from);
        let route = self.hosts.route(from, peer, near);
        RowPath {
            from,
            route,
            come,
            turn: first_turn(step),
            last_step: route == Route::Net && step + 1 == self.layout.stages() * hosts,
        }
    }

    /// The flag of a block's first chunk at the rank to which it comes.
    fn first_flag(&self, source: usize, peer: usize, stage: usize) -> usize {
        let before = |other, stage| self.chunks_before(other, peer, stage);
        let others = (0..self.layout.world()).filter(|&other| other != peer);
        let lower = others.clone().take_while(|&other| other < source);
        match self.layout.order() {
            RowOrder::ByRank => {
                let shards: usize = lower.map(|other| self.chunks_of(other, peer).len()).sum();
                shards + before(source, stage)
            }
            RowOrder::ByStage => {
                let earlier: usize = others.map(|other| before(other, stage)).sum();
                let beside = lower.map(|other| before(other, stage + 1) - before(other, stage));
                earlier + beside.sum::<usize>()
            }
        }
    }

    /// The chunks of a shard in the stages before one.
    fn chunks_before(&self, source: usize, peer: usize, stage: usize) -> usize {
        let chunks = self.chunks_of(source, peer);
        chunks.partition_point(|chunk| chunk.stage < stage)
    }
}

/// The first of each, then the second of each, and so on.
fn alternating<I: Iterator<Item = Transfer>>(each: impl Iterator<Item = I>) -> Vec<Transfer> {
    let mut each: Vec<I> = each.collect();
    let mut all = Vec::new();
    loop {
        let before = all.len();
        all.extend(each.iter_mut().filter_map(Iterator::next));
        if all.len() == before {
            return all;
        }
    }
}

/// Cuts each block of a shard into chunks.
///
/// All blocks together have about as many chunks as the configuration says, and each block has at least one.
fn cut_shard(layout: &Layout, config: &Config, source: usize, is_last: bool) -> Vec<StagedChunk> {
    let (k, stages) = (layout.k(), layout.stages());
    let mut all = Vec::new();
    for stage in 0..stages {
        let block = layout.block(source, stage);
        if config.route == Route::Store {
            let parts = stored_parts(block, k, layout.world());
            all.extend(parts.into_iter().map(|part| StagedChunk { stage, part }));
            continue;
        }
        let (count, cut) = if is_last && stage + 1 == stages {
            (config.chunking.last, config.cut(k))
        } else {
            (config.chunking.count, None)
        };
        let count = (count / stages).max(1);
        let end = block.end;
        let chunks = chunk_rows(block.clone(), count, boundary(block.len() / count));
        all.extend(chunks.flat_map(|rows| {
            let cut = cut.filter(|_| rows.end == end);
            let columns = [Some(0..cut.unwrap_or(k)), cut.map(|column| column..k)];
            let parts = columns.into_iter().flatten().map(move |columns| Part {
                rows: rows.clone(),
                columns,
            });
            parts.map(move |part| StagedChunk { stage, part })
        }));
    }
    all
}

/// Cuts each block of a shard into chunks for the network.
fn cut_for_rail(layout: &Layout, width: usize, most: usize, source: usize) -> Vec<StagedChunk> {
    let (k, stages) = (layout.k(), layout.stages());
    let blocks = (0..stages).map(|stage| (stage, layout.block(source, stage)));
    let chunks = blocks.flat_map(|(stage, block)| {
        let count = chunks_of_block(block.len(), k * width, most);
        let rows = chunk_rows(block.clone(), count, boundary(block.len() / count));
        rows.map(move |rows| StagedChunk {
            stage,
            part: Part {
                rows,
                columns: 0..k,
            },
        })
    });
    chunks.collect()
}

/// The number of chunks for the network of a block of a gather. `row`: the bytes of a row.
fn chunks_of_block(rows: usize, row: usize, most: usize) -> usize {
    (rows.saturating_mul(row) / RAIL_BYTES).clamp(1, most)
}

/// The most of them.
fn most_of_block(hosts: &Hosts, layout: &Layout) -> usize {
    (most_on_rails(hosts, layout) / layout.stages()).max(1)
}

/// The rows of a chunk for the network, of the longest blocks of a gather.
pub fn rows_of_rail_chunk(problem: &Problem) -> usize {
    let (layout, width) = (&problem.layout, problem.dtypes.operands.bytes());
    let shard = layout.rows().into_iter().max().unwrap_or(0);
    let block = shard.div_ceil(layout.stages());
    let most = most_of_block(&problem.hosts, layout);
    block.div_ceil(chunks_of_block(block, layout.k() * width, most))
}

/// The number of rows at whose multiples chunks of `rows` rows are cut.
///
/// It is a power of two, like the height of tiles, so that few tiles wait for two chunks. It does not depend on the
/// tiles, because each rank chooses its own.
fn boundary(rows: usize) -> usize {
    const MOST: usize = 128;
    1 << (rows / 8).clamp(1, MOST).ilog2()
}

/// Cuts rows that a kernel stores into parts, one for each CTA: some rows each, or a piece of a row if there are few
/// rows.
///
/// Each part has a flag. Looking at the flag costs no more than storing the bytes. If there are many peers, each gets
/// fewer parts.
pub(super) fn stored_parts(shard: Range<usize>, k: usize, world: usize) -> Vec<Part> {
    const MOST: usize = 64;
    const ELEMENTS: usize = 3072;
    const LEAST_COLUMNS: usize = 512;
    let count = (shard.len() * k / ELEMENTS).min(MOST / (world - 1).max(1));
    let count = count.max(1);
    let pieces = (count / shard.len().max(1)).min(k / LEAST_COLUMNS).max(1);
    let column = |piece: usize| (k.div_ceil(CUT_COLUMNS) * piece / pieces * CUT_COLUMNS).min(k);
    let columns: SmallVec<[Range<usize>; 8]> = (0..pieces)
        .map(|piece| column(piece)..column(piece + 1))
        .collect();
    let bands = count.min(shard.len());
    let mut parts = Vec::with_capacity(bands * pieces);
    let mut begin = shard.start;
    for band in 1..=bands {
        let end = shard.start + shard.len() * band / bands;
        let rows = std::mem::replace(&mut begin, end)..end;
        parts.extend(columns.iter().map(|columns| Part {
            rows: rows.clone(),
            columns: columns.clone(),
        }));
    }
    parts
}
