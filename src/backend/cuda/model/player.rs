//! Plays the schedules of all ranks through, on several hosts too: who moves what when, and when each tile is made.
//!
//! A rank has a copy engine, a network card if there are several hosts, and slots for tiles. Each takes its work in the
//! order of the schedule, and begins it when what it waits for is there. Times are the model's: those of links, and those
//! of tiles that fill all slots. Nothing else limits a link, so hosts' switches are taken to be as fast as their cards.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::choose;
use super::tiles::Tiles;
use crate::backend::cuda::gpu::rates::{H200, Rates};
use crate::element::DType;
use crate::profile::span::{Lane, Span, Work};
use crate::refusal::{Refusal, Result};
use crate::schedule::plan::plan;
use crate::schedule::{
    Config, Hosts, Layout, Numerics, Operation, Problem, Route, Schedule, Tile, Transfer,
};
use crate::trace::{Timeline, Trace};

/// What a rank's network card does.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SimulatedNetwork {
    /// Bytes in a microsecond, one way.
    pub bytes: f64,
    /// Microseconds from the last byte of a chunk until its flag is there.
    pub latency: f64,
}

/// A product of gathered rows that has been played. Times are in microseconds.
#[derive(Debug)]
pub struct Played {
    /// Until it is complete on all ranks.
    pub micros: f64,
    /// Until the last rows have come, of any rank.
    pub arrived: f64,
    /// The product alone, with all rows there.
    pub alone: f64,
    /// What each rank did.
    pub timeline: Timeline,
}

/// Plays an all_gather_matmul of bf16, [M, K] rows of all ranks by [N, K] of each, on H200s: so many hosts of so many
/// GPUs, configured by the model.
///
/// # Errors
/// [`Error::Limit`](crate::Error::Limit) if an extent or the number of ranks is out of range.
pub fn play_all_gather_matmul(
    [m, n, k]: [usize; 3],
    [hosts, places]: [usize; 2],
    network: &SimulatedNetwork,
) -> crate::error::Result<Played> {
    let world = hosts.saturating_mul(places);
    let played = || {
        let layout = Layout::balanced(m, k, world)?;
        let names: Vec<usize> = (0..world).map(|rank| rank / places).collect();
        let of = |layout| Problem::new(Operation::AllGatherMatmul, DType::Bf16, layout, n);
        let choose = |problem: &Problem| choose(&H200, problem, Numerics::Fast, true, None);
        // The product of one rank, with all rows there.
        let alone = of(Layout::balanced(m, k, 1)?);
        let of_alone = choose(&alone);
        let alone = Tiles::of(&H200, &alone, &of_alone).cold();
        let alone = sustained(alone) * alone;
        let problem = Problem {
            hosts: Hosts::of(&names)?,
            ..of(layout)
        };
        let chosen = choose(&problem);
        let mut played = play(&H200, network, &problem, chosen, alone)?;
        if hosts > 1 {
            // The choice knows links within a host only. The tiles that suit the product alone may be better.
            let other = of_alone.with_route(chosen.route);
            let other = play(&H200, network, &problem, other, alone)?;
            if other.micros < played.micros {
                played = other;
            }
        }
        Ok(played)
    };
    played().map_err(Refusal::of(None, "play_all_gather_matmul"))
}

/// `alone`: the time of the product of one rank.
fn play(
    rates: &Rates,
    network: &SimulatedNetwork,
    problem: &Problem,
    config: Config,
    alone: f64,
) -> Result<Played> {
    let world = problem.layout.world();
    let schedules = (0..world).map(|rank| plan(problem, rank, config));
    let schedules = schedules.collect::<Result<Vec<_>>>()?;
    let tiles = Tiles::of(rates, problem, &config);
    let clock = sustained(tiles.cold());
    let moved = Movers::new(rates, network, &schedules).play();
    let mut played = Played {
        micros: 0.0,
        arrived: moved.flags.iter().flatten().copied().fold(0.0, f64::max),
        alone,
        timeline: Timeline { traces: Vec::new() },
    };
    let around = tiles.start + tiles.joined() + rates.link(config.route).around;
    for (schedule, (flags, mut spans)) in schedules.iter().zip(moved.flags.iter().zip(moved.spans))
    {
        let made = multiply(&tiles, clock, schedule, flags, &mut spans);
        let end = flags.iter().copied().fold(made, f64::max) + around;
        played.micros = played.micros.max(end);
        let trace = Trace::new(schedule.rank(), spans);
        played.timeline.traces.push(trace);
    }
    if world == 1 {
        played.micros = alone;
    }
    Ok(played)
}

/// How much longer a product takes than in a burst, for power limits the clock after about a millisecond. Fitted to the
/// products of benches/results, of random values, on H200s.
fn sustained(micros: f64) -> f64 {
    const MOST: f64 = 0.22;
    const SOON: f64 = 1000.0;
    1.0 + MOST * (1.0 - (-micros / SOON).exp())
}

/// What moves rows, of all ranks.
struct Movers<'a> {
    rates: &'a Rates,
    network: &'a SimulatedNetwork,
    schedules: &'a [Schedule],
    /// By rank: the transfers of its copy engine and those of its card, each with how many are made and when it is free.
    lanes: Vec<[MoverLane<'a>; 2]>,
    /// By rank and flag: when it is there. Infinite until that is known.
    flags: Vec<Vec<f64>>,
    spans: Vec<Vec<Span>>,
}

/// One of a rank's engines.
struct MoverLane<'a> {
    transfers: Vec<&'a Transfer>,
    made: usize,
    free: f64,
}

impl<'a> Movers<'a> {
    fn new(
        rates: &'a Rates,
        network: &'a SimulatedNetwork,
        schedules: &'a [Schedule],
    ) -> Movers<'a> {
        let lanes = schedules.iter().map(|schedule| {
            let (near, far): (Vec<_>, Vec<_>) =
                (schedule.moves().collect(), schedule.sent().collect());
            let start = near
                .first()
                .map_or(0.0, |moved| rates.link(moved.route).start);
            [(near, start), (far, 0.0)].map(|(transfers, free)| MoverLane {
                transfers,
                made: 0,
                free,
            })
        });
        Movers {
            rates,
            network,
            schedules,
            lanes: lanes.collect(),
            flags: schedules
                .iter()
                .map(|schedule| vec![f64::INFINITY; schedule.arrivals().len()])
                .collect(),
            spans: schedules.iter().map(|_| Vec::new()).collect(),
        }
    }

    /// Makes all transfers, each when its engine is free and what it passes on has come. A schedule has no circle.
    fn play(mut self) -> Self {
        loop {
            let mut moved_any = false;
            for rank in 0..self.schedules.len() {
                for lane in 0..2 {
                    while self.step(rank, lane) {
                        moved_any = true;
                    }
                }
            }
            if !moved_any {
                return self;
            }
        }
    }

    /// Makes an engine's next transfer, if it is known when that can begin.
    fn step(&mut self, rank: usize, lane: usize) -> bool {
        let engine = &mut self.lanes[rank][lane];
        let Some(&transfer) = engine.transfers.get(engine.made) else {
            return false;
        };
        let come = self.flags[rank][transfer.after.clone()].iter();
        let begin = come.copied().fold(engine.free, f64::max);
        if begin.is_infinite() {
            return false;
        }
        let bytes = self.schedules[rank].bytes_of(transfer) as f64;
        let (end, flagged) = match lane {
            0 => {
                let link = self.rates.link(transfer.route);
                let end = begin + link.chunk + bytes / link.bytes;
                (end, end)
            }
            _ => {
                let end = begin + bytes / self.network.bytes;
                (end, end + self.network.latency)
            }
        };
        (engine.made, engine.free) = (engine.made + 1, end);
        self.flags[transfer.to][transfer.flag] = flagged;
        let rows = transfer.regions[0].to.rows.clone();
        let work = match transfer.route {
            Route::Pull => Work::Pull {
                source: transfer.source,
                rows,
            },
            Route::Push | Route::Store | Route::Net => Work::Push {
                to: transfer.to,
                rows,
            },
        };
        let on = [Lane::Copy, Lane::Network][lane];
        self.spans[rank].push(span(on, work, begin, end));
        true
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

/// Makes all tiles in their order, each in the slot that is free first. Returns when the last one is made.
///
/// `clock`: how much longer a tile takes than in a burst. Tiles whose rows come together are made at the same time, as
/// far as there are slots, and share the caches.
fn multiply(
    tiles: &Tiles,
    clock: f64,
    schedule: &Schedule,
    flags: &[f64],
    spans: &mut Vec<Span>,
) -> f64 {
    // A chunk that is cut along K is waited for before the steps that read its second part.
    let deferred = schedule.product().and_then(|product| product.deferred);
    let is_deferred = |flag: usize| deferred.is_some_and(|cut| cut.flag == flag);
    let ready = |tile: &Tile| {
        let whole = tile.flags().filter(|&flag| !is_deferred(flag));
        whole.map(|flag| flags[flag]).fold(0.0, f64::max)
    };
    let behind_cut = |tile: &Tile, time: f64| match (deferred, schedule.product()) {
        (Some(cut), Some(product)) if tile.flags().contains(&cut.flag) => {
            flags[cut.flag] + (1.0 - cut.column as f64 / product.k as f64) * time
        }
        _ => 0.0,
    };
    let slots = tiles.slots.min(schedule.tiles().len());
    // Times are ordered as the bits of numbers that are not negative.
    let mut free: BinaryHeap<Reverse<(u64, usize)>> =
        (0..slots).map(|slot| Reverse((0, slot))).collect();
    let mut end = 0.0f64;
    for together in schedule
        .tiles()
        .chunk_by(|one, other| ready(one) == ready(other))
    {
        let time = clock * tiles.wave(together.len().min(slots));
        for tile in together {
            let Some(Reverse((at, slot))) = free.pop() else {
                break;
            };
            let at = f64::from_bits(at);
            let begin = ready(tile).max(at);
            let source = schedule.source_of_tile(tile);
            if begin > at {
                spans.push(span(Lane::Worker(slot), Work::Wait { source }, at, begin));
            }
            let made = (begin + time).max(behind_cut(tile, time));
            let (m, n) = (tile.m, tile.n);
            let work = Work::Tile { source, m, n };
            spans.push(span(Lane::Worker(slot), work, begin, made));
            end = end.max(made);
            free.push(Reverse((made.to_bits(), slot)));
        }
    }
    end
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 400 Gb/s a GPU.
    const NETWORK: SimulatedNetwork = SimulatedNetwork {
        bytes: 50e3,
        latency: 10.0,
    };

    fn played(shape: [usize; 3], hosts: usize, places: usize) -> Played {
        play_all_gather_matmul(shape, [hosts, places], &NETWORK).unwrap()
    }

    /// The products of 4096 rows and more, of benches/results.
    fn measured(world: usize) -> Vec<([usize; 3], f64)> {
        let root = env!("CARGO_MANIFEST_DIR");
        let text = std::fs::read_to_string(format!("{root}/benches/results/h200x{world}.json"));
        let records = text.unwrap();
        let records = records.lines().map(|line| {
            let record: serde_json::Value = serde_json::from_str(line).unwrap();
            let number = |key: &str| record[key].as_f64().unwrap();
            (
                ["m", "n", "k"].map(|key| number(key) as usize),
                number("fused_us"),
            )
        });
        records.filter(|(shape, _)| shape[0] >= 4096).collect()
    }

    #[test]
    fn what_was_measured_on_one_host_is_played_within_8_percent() {
        for world in [2, 4] {
            let mut errors = Vec::new();
            for (shape, found) in measured(world) {
                let error = played(shape, 1, world).micros / found - 1.0;
                println!(
                    "{world} GPUs, {shape:?}: {found:.0} µs, played {:+.1} %",
                    100.0 * error
                );
                assert!(error.abs() < 0.08, "{world} {shape:?}: {error}");
                errors.push(error.abs());
            }
            assert_eq!(errors.len(), 9);
            let mean = errors.iter().sum::<f64>() / 9.0;
            assert!(mean < 0.03, "{world}: {mean}");
        }
    }

    #[test]
    fn a_network_as_fast_as_a_product_is_hidden_and_a_slower_one_takes_its_time() {
        // 405B, 8192 rows, two hosts of eight: each rank's rail brings 16 MiB.
        let shape = [8192, 53248 / 16, 16384];
        let fast = played(shape, 2, 8);
        assert!(fast.micros < 1.2 * fast.alone, "{fast:?}");
        let slow = SimulatedNetwork {
            bytes: NETWORK.bytes / 10.0,
            ..NETWORK
        };
        let slow = play_all_gather_matmul(shape, [2, 8], &slow).unwrap();
        let wire = (16 << 20) as f64 / 5e3;
        assert!(slow.arrived > wire && slow.micros > wire && slow.micros < wire + fast.alone);
    }

    #[test]
    fn all_rows_come_and_all_tiles_are_made_on_every_rank_of_64() {
        let played = played([4096, 128, 1024], 8, 8);
        assert!(played.micros.is_finite() && played.arrived < played.micros);
        assert_eq!(played.timeline.traces.len(), 64);
        let tiles = |trace: &Trace| {
            let made = trace
                .spans
                .iter()
                .filter(|span| matches!(span.work, Work::Tile { .. }));
            made.count()
        };
        let counts: Vec<usize> = played.timeline.traces.iter().map(tiles).collect();
        assert!(counts[0] > 0 && counts.iter().all(|count| *count == counts[0]));
        assert!(play_all_gather_matmul([8, 8, 8], [65, 1], &NETWORK).is_err());
    }
}
