//! Plays schedules through: the engines of each rank, its tiles, and the flags between ranks.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::ops::Range;

use gemmesh::schedule::{HostSum, Reduction, Schedule, Tile, Transfer};
use gemmesh::tools::{Rates, Tiles, sum_rates};
use gemmesh::trace::{Lane, Span, Work};
use gemmesh::tuning::Route;

use super::SimulatedNetwork;
use super::rates::ADDED_BY_STORES;

/// Of what the ranks are made.
pub struct Machine<'a> {
    pub rates: &'a Rates,
    pub network: &'a SimulatedNetwork,
    /// The tiles of the product, if there is one.
    pub tiles: Option<Tiles<'a>>,
    /// How much longer tiles take than in a burst.
    pub clock: f64,
    /// What adding one more partial takes, if all slots do so.
    pub addend: f64,
}

impl Machine<'_> {
    /// How long a kernel takes that adds rows up, and multiplies nothing.
    fn adding(&self, schedule: &Schedule, Reduction { rows, n, sum }: &Reduction) -> f64 {
        let width = schedule.matrices()[sum.out].dtype.bytes();
        let moved = ((sum.addends.len() + 1) * rows * n * width) as f64;
        // If a kernel stores the rows, it adds them too.
        let (launch, share) = if schedule.uses(Route::Store) {
            (0.0, ADDED_BY_STORES)
        } else {
            (sum_rates::SECOND_KERNEL, 1.0)
        };
        launch + moved / (share * self.rates.read)
    }
}

/// What a rank did.
pub struct PlayedRank {
    /// When its last rows had come, and its last tile or sum was made.
    pub end: f64,
    pub spans: Vec<Span>,
}

/// Plays the schedules of all ranks through, in the order of ranks.
pub fn play_all(machine: &Machine, schedules: &[Schedule]) -> Vec<PlayedRank> {
    let to = |transfer: &Transfer| (transfer.to, transfer.flag);
    let ranks = schedules
        .iter()
        .map(|schedule| Rank::new(machine, schedule, to));
    Player {
        machine,
        ranks: ranks.collect(),
    }
    .play()
}

/// Plays the schedule of rank 0 through, if the ranks of so many hosts and places all do the same. What comes to it comes
/// when it sends the like.
pub fn play_one(machine: &Machine, schedule: &Schedule, extents: [usize; 2]) -> PlayedRank {
    let mut mirror = Mirror::new(schedule, extents);
    let to = |transfer: &Transfer| (0, mirror.flag(transfer));
    let ranks = vec![Rank::new(machine, schedule, to)];
    let mut played = Player { machine, ranks }.play();
    played.remove(0)
}

/// Which of its own flags rank 0 sets in its turn, when it sets that of another rank.
struct Mirror {
    hosts: usize,
    places: usize,
    /// The flags of transfers to rank 0, by who sends them and whose rows they are, in their order.
    flags: HashMap<(usize, usize), VecDeque<usize>>,
}

impl Mirror {
    fn new(schedule: &Schedule, [hosts, places]: [usize; 2]) -> Mirror {
        let mut flags: HashMap<_, VecDeque<usize>> = HashMap::new();
        for Transfer {
            from, source, flag, ..
        } in schedule.arrivals()
        {
            flags.entry((*from, *source)).or_default().push_back(*flag);
        }
        Mirror {
            hosts,
            places,
            flags,
        }
    }

    /// The flag for the next transfer of rank 0 like this one.
    fn flag(&mut self, transfer: &Transfer) -> usize {
        let like = if transfer.mover() == transfer.to {
            (transfer.from, transfer.source)
        } else {
            (
                self.seen_from(transfer.to, transfer.from),
                self.seen_from(transfer.to, transfer.source),
            )
        };
        let flags = self.flags.get_mut(&like);
        let flag = flags.and_then(VecDeque::pop_front);
        flag.expect("a rank gets what it sends")
    }

    /// The rank that is to rank 0 what `rank` is to `to`.
    fn seen_from(&self, to: usize, rank: usize) -> usize {
        let back = |of: usize, by: usize, extent: usize| (of + extent - by) % extent;
        let host = back(rank / self.places, to / self.places, self.hosts);
        host * self.places + back(rank % self.places, to % self.places, self.places)
    }
}

struct Player<'a> {
    machine: &'a Machine<'a>,
    ranks: Vec<Rank<'a>>,
}

struct Rank<'a> {
    schedule: &'a Schedule,
    /// Its copy engine and its card.
    engines: [Engine<'a>; 2],
    /// When each slot for tiles is free. Times are ordered as the bits of numbers that are not negative.
    slots: BinaryHeap<Reverse<(u64, usize)>>,
    /// How many tiles are made.
    made: usize,
    /// True if tiles add partials of other ranks.
    sums: bool,
    blocks: Vec<Block>,
    /// By flag: when it is there. Infinite until that is known.
    flags: Vec<f64>,
    spans: Vec<Span>,
}

/// A copy engine, or a network card.
struct Engine<'a> {
    lane: Lane,
    /// Each with the rank and the flag that it sets.
    transfers: Vec<(&'a Transfer, (usize, usize))>,
    made: usize,
    free: f64,
}

/// A block of the product: how many tiles are left to be made, and when the last one so far is.
#[derive(Clone)]
struct Block {
    left: usize,
    end: f64,
}

impl<'a> Rank<'a> {
    /// `to` says whose flag a transfer sets, and which.
    fn new(
        machine: &Machine,
        schedule: &'a Schedule,
        mut to: impl FnMut(&Transfer) -> (usize, usize),
    ) -> Rank<'a> {
        let mut engine = |lane, transfers: Vec<&'a Transfer>, free| Engine {
            lane,
            transfers: transfers
                .into_iter()
                .map(|moved| (moved, to(moved)))
                .collect(),
            made: 0,
            free,
        };
        let near: Vec<_> = schedule.moves().collect();
        let start = match near.first() {
            // What is made first begins later.
            Some(moved) if moved.produced.is_none() => machine.rates.link(moved.route).start,
            _ => 0.0,
        };
        let of_product = schedule
            .product()
            .map_or(&[][..], |product| &product.blocks);
        let mut blocks = vec![Block { left: 0, end: 0.0 }; of_product.len()];
        for tile in schedule.tiles() {
            blocks[tile.block as usize].left += 1;
        }
        let slots = machine.tiles.as_ref().map_or(0, |tiles| tiles.slots);
        Rank {
            schedule,
            engines: [
                engine(Lane::Copy, near, start),
                engine(Lane::Network, schedule.sent().collect(), 0.0),
            ],
            slots: (0..slots.min(schedule.tiles().len()))
                .map(|slot| Reverse((0, slot)))
                .collect(),
            made: 0,
            sums: of_product.iter().any(|block| !block.sum.addends.is_empty()),
            blocks,
            flags: vec![f64::INFINITY; schedule.arrivals().len()],
            spans: Vec::new(),
        }
    }

    /// When all of these flags are there.
    fn come(&self, flags: Range<usize>) -> f64 {
        self.flags[flags].iter().copied().fold(0.0, f64::max)
    }

    /// When a block is made.
    fn produced(&self, block: usize) -> f64 {
        match self.blocks[block] {
            Block { left: 0, end } => end,
            _ => f64::INFINITY,
        }
    }
}

impl Player<'_> {
    /// Does everything, each engine's and each slot's work in its order. Schedules have no circle.
    fn play(mut self) -> Vec<PlayedRank> {
        loop {
            let mut moved_any = false;
            for rank in 0..self.ranks.len() {
                while self.transfer(rank, 0) || self.transfer(rank, 1) || self.tiles(rank) {
                    moved_any = true;
                }
            }
            if !moved_any {
                break;
            }
        }
        let machine = self.machine;
        let ranks = self.ranks.into_iter();
        ranks.map(|rank| rank.reduce(machine)).collect()
    }

    /// Makes an engine's next transfer, if it is known when that can begin.
    fn transfer(&mut self, rank: usize, engine: usize) -> bool {
        let state = &self.ranks[rank];
        let Engine {
            lane,
            ref transfers,
            made,
            free,
        } = state.engines[engine];
        let Some(&(transfer, (to, flag))) = transfers.get(made) else {
            return false;
        };
        let link = self.machine.rates.link(transfer.route);
        let made_at = |block| state.produced(block) + link.start;
        let produced = transfer.produced.map_or(0.0, made_at);
        let added = transfer.added.map_or(0.0, |sum| {
            let HostSum { sum, flags } = &state.schedule.host_sums()[sum];
            state.come(flags.clone()) + self.machine.adding(state.schedule, sum)
        });
        let come = state.come(transfer.after.clone());
        let begin = free.max(produced).max(come).max(added);
        if begin.is_infinite() {
            return false;
        }
        let bytes = state.schedule.bytes_of(transfer) as f64;
        let network = self.machine.network;
        let (end, latency) = match transfer.route {
            Route::Net => (begin + bytes / network.bytes, network.latency),
            _ => (begin + link.chunk + bytes / link.bytes, 0.0),
        };
        let state = &mut self.ranks[rank];
        let engine = &mut state.engines[engine];
        (engine.made, engine.free) = (made + 1, end);
        state.spans.push(span(lane, work_of(transfer), begin, end));
        self.ranks[to].flags[flag] = end + latency;
        true
    }

    /// Makes the next tiles that wait for the same flags, if it is known when these are there. Each tile is made in the
    /// slot that is free first.
    fn tiles(&mut self, rank: usize) -> bool {
        let Machine {
            tiles: Some(tiles),
            clock,
            addend,
            ..
        } = self.machine
        else {
            return false;
        };
        let state = &mut self.ranks[rank];
        let schedule = state.schedule;
        let left = &schedule.tiles()[state.made..];
        let Some(first) = left.first() else {
            return false;
        };
        let alike = left.iter().take_while(|tile| tile.flags() == first.flags());
        let alike = &left[..alike.count()];
        if state.come(first.flags()).is_infinite() {
            return false;
        }
        // Tiles that begin together share the caches. Those of sums begin before what they wait for is there.
        let together = if state.sums {
            schedule.tiles().len()
        } else {
            alike.len()
        };
        let time = clock * tiles.wave(together.min(tiles.slots));
        for of_block in alike.chunk_by(|one, other| one.block == other.block) {
            let source = schedule.owner_of_tile(&of_block[0]);
            for tile in of_block {
                state.tile(tile, source, time, *addend);
            }
        }
        state.made += alike.len();
        true
    }
}

impl Rank<'_> {
    /// Adds up what has come, if no tiles do so.
    fn reduce(mut self, machine: &Machine) -> PlayedRank {
        let come = self.come(0..self.flags.len());
        let blocks = (0..self.blocks.len()).map(|block| self.produced(block));
        let mut end = blocks.fold(come, f64::max);
        if let Some(sum) = self.schedule.reduction() {
            let begin = end;
            end += machine.adding(self.schedule, sum);
            let work = Work::Add { rows: 0..sum.rows };
            self.spans.push(span(Lane::Worker(0), work, begin, end));
        }
        PlayedRank {
            end,
            spans: self.spans,
        }
    }

    /// Makes a tile of rows of `source` in the slot that is free first.
    fn tile(&mut self, tile: &Tile, source: usize, time: f64, addend: f64) {
        let Some(Reverse((bits, slot))) = self.slots.pop() else {
            return;
        };
        let free = f64::from_bits(bits);
        let work = Work::Tile {
            source,
            m: tile.m,
            n: tile.n,
        };
        let lane = Lane::Worker(slot);
        let end = match self.addends(tile) {
            0 => self.multiply(tile, (lane, work), free, time),
            addends => {
                let adding = sum_rates::ADD + (addends - 1) as f64 * addend;
                self.spans.push(span(lane, work, free, free + time));
                self.add(tile, (lane, source), free + time, adding)
            }
        };
        let block = &mut self.blocks[tile.block as usize];
        (block.left, block.end) = (block.left - 1, block.end.max(end));
        self.slots.push(Reverse((end.to_bits(), slot)));
    }

    /// How many partials of other ranks are added to a tile.
    fn addends(&self, tile: &Tile) -> usize {
        let block = self.schedule.product().map(|product| product.block(tile));
        let addends = block.map_or(0, |block| block.sum.addends.len());
        addends.saturating_sub(1)
    }

    /// Multiplies rows when they have come. Returns when the tile is made.
    fn multiply(&mut self, tile: &Tile, (lane, work): (Lane, Work), free: f64, time: f64) -> f64 {
        let source = self.schedule.source_of_tile(tile);
        let product = self.schedule.product();
        let cut = product.and_then(|product| Some((product.deferred?, product.k)));
        let cut = cut.filter(|(cut, _)| tile.flags().contains(&cut.flag));
        let is_cut = |flag: usize| cut.is_some_and(|(cut, _)| cut.flag == flag);
        let whole = tile.flags().filter(|&flag| !is_cut(flag));
        let begin = whole.map(|flag| self.flags[flag]).fold(free, f64::max);
        // A chunk that is cut along K is waited for before the steps that read its second part.
        let behind = cut.map_or(0.0, |(cut, k)| {
            self.flags[cut.flag] + (1.0 - cut.column as f64 / k as f64) * time
        });
        let end = (begin + time).max(behind);
        self.wait((lane, source), free, begin);
        self.spans.push(span(lane, work, begin, end));
        end
    }

    /// Adds other ranks' partials to what was multiplied, when they have come. Returns when the tile is made.
    fn add(&mut self, tile: &Tile, of: (Lane, usize), multiplied: f64, adding: f64) -> f64 {
        let ready = multiplied.max(self.come(tile.flags()));
        let end = ready + adding;
        self.wait(of, multiplied, ready);
        let product = self.schedule.product();
        let rows = product.map_or(0..0, |product| product.rows(tile));
        let (lane, _) = of;
        self.spans.push(span(lane, Work::Add { rows }, ready, end));
        end
    }

    /// Waits for rows of `source`, if they are not there.
    fn wait(&mut self, (lane, source): (Lane, usize), begin: f64, end: f64) {
        if end > begin {
            self.spans
                .push(span(lane, Work::Wait { source }, begin, end));
        }
    }
}

fn work_of(transfer: &Transfer) -> Work {
    let rows = transfer.regions[0].to.rows.clone();
    match transfer.route {
        Route::Pull => Work::Pull {
            source: transfer.source,
            rows,
        },
        Route::Push | Route::Store | Route::Net => Work::Push {
            to: transfer.to,
            rows,
        },
    }
}

fn span(lane: Lane, work: Work, begin: f64, end: f64) -> Span {
    let nanoseconds = |micros: f64| (micros * 1e3) as u64;
    Span {
        lane,
        work,
        begin: nanoseconds(begin),
        end: nanoseconds(end),
    }
}
