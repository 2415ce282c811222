//! Plays the schedules of all ranks through, on several hosts too: who moves what when, and when each tile is made.
//!
//! A rank has a copy engine, a network card if there are several hosts, and slots for tiles. Each takes its work in the
//! order of the schedule, and begins it when what it waits for is there. Nothing else limits a link, so hosts' switches
//! are taken to be as fast as their cards. The library's model chooses configurations, and `rates` says by which rates
//! they are played.
//!
//! Groups have at most [`MAX_WORLD`] ranks. Of more ranks one is played: if rows are split evenly, all do the same.

#[cfg(test)]
mod accuracy;
mod ranks;
mod rates;
#[cfg(test)]
mod tests;

use gemmesh::Config;
use gemmesh::error::Call;
use gemmesh::schedule::MAX_WORLD;
use gemmesh::schedule::plan::collectives::{chunked, leaves_gather, stored};
use gemmesh::schedule::plan::partials::{follows_product, sends_all_partials};
use gemmesh::schedule::plan::{self, plan};
use gemmesh::schedule::{Hosts, Layout, Operation, Problem, Schedule};
use gemmesh::tools::{
    H200, MOST_STORED, Tiles, choose, over_hosts, pushed_over_hosts, time_of_sum,
};
use gemmesh::trace::{Lane, Span, Timeline, Trace, Work};
use gemmesh::tuning::{Numerics, Route};
use gemmesh::{DType, Error, Result};
use ranks::{Machine, PlayedRank};
use rates::{STORED_SUMS, TIMED, TIMED_ALONE, TIMED_SUMS, sustained};

/// What a rank's network card does.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SimulatedNetwork {
    /// Bytes in a microsecond, one way.
    pub bytes: f64,
    /// Microseconds from the last byte of a chunk until its flag is there.
    pub latency: f64,
}

/// An operation that has been played. Times are in microseconds.
#[derive(Debug)]
pub struct Played {
    /// Until it is complete on all ranks.
    pub micros: f64,
    /// The product alone, with all rows there and no sums over ranks. 0 if there is none.
    pub alone: f64,
    /// What each rank did, or rank 0 alone if there are more ranks than a group can have.
    pub timeline: Timeline,
}

impl Played {
    /// Adds the operation that follows.
    fn extend(&mut self, next: Played) {
        self.micros += next.micros;
        let traces = self.timeline.traces.iter_mut();
        for (trace, next) in traces.zip(next.timeline.traces) {
            trace.extend(next);
        }
    }
}

/// Plays an operation of bf16 on H200s, so many hosts of so many GPUs: `all_gather_matmul`, `matmul_reduce_scatter`,
/// `matmul_all_reduce`, or without a product `all_gather`, `reduce_scatter` or `all_reduce`. M counts the rows of all
/// ranks, and N and K are those of one rank. Without a product N does not count, and rows have K columns.
///
/// # Errors
/// [`Kind::Limit`](gemmesh::error::Kind::Limit) if an extent or the number of ranks is out of range, or if a rank would have
/// more transfers than flags; [`Kind::Unsupported`](gemmesh::error::Kind::Unsupported) for another operation, and if more than
/// 64 ranks do not have equally many rows.
#[track_caller]
pub fn play_operation(
    operation: Operation,
    [m, n, k]: [usize; 3],
    [hosts, places]: [usize; 2],
    network: &SimulatedNetwork,
) -> Result<Played> {
    let call = Call::here("play_operation");
    let problem = problem_of(operation, [m, n, k], [hosts, places]);
    let played = problem.and_then(|problem| {
        if operation.multiplies() {
            play_chosen(&problem, network)
        } else {
            play_collective(&problem, network)
        }
    });
    played.map_err(|error| error.in_call(call))
}

fn problem_of(
    operation: Operation,
    [m, n, k]: [usize; 3],
    [hosts, places]: [usize; 2],
) -> Result<Problem> {
    let n = match operation {
        Operation::ALL_GATHER => 0,
        Operation::REDUCE_SCATTER | Operation::ALL_REDUCE => k,
        _ => n,
    };
    let what = "a simulation must be of a product and a gather or a sum, or of one of these without a product";
    require(what, is_simulated(operation))?;
    let world = hosts.saturating_mul(places);
    let layout = Layout::simulated(m, k, world)?;
    let what = "more than 64 ranks must have equally many rows";
    require(what, world <= MAX_WORLD || m.is_multiple_of(world))?;
    let names: Vec<usize> = (0..world).map(|rank| rank / places).collect();
    Ok(Problem {
        hosts: Hosts::of(&names)?,
        ..Problem::new(operation, DType::Bf16, layout, n)
    })
}

fn is_simulated(operation: Operation) -> bool {
    let others = [
        Operation::ALL_GATHER_MATMUL,
        Operation::ALL_GATHER,
        Operation::REDUCE_SCATTER,
        Operation::ALL_REDUCE,
    ];
    operation.sends_product() || others.contains(&operation)
}

/// Plays a collective without a product. On one host few rows are stored, as the library does.
fn play_collective(problem: &Problem, network: &SimulatedNetwork) -> Result<Played> {
    let Problem { layout, hosts, .. } = problem;
    let row = layout.k() * problem.dtypes.operands.bytes();
    let share = layout.m().div_ceil(layout.world()) * row;
    let is_stored = hosts.count() == 1 && row.is_multiple_of(16) && share <= MOST_STORED;
    let config = if is_stored { stored() } else { chunked(1) };
    let mut played = play_schedules(problem, config, network, 0.0)?;
    if problem.operation == Operation::ALL_REDUCE && leaves_gather(problem) {
        let gather = gather_of(problem, Operation::GATHER_OF_ALL_REDUCE)?;
        played.extend(play_schedules(&gather, config, network, 0.0)?);
    }
    Ok(played)
}

/// Plays a problem with the library's choice. But more ranks than a group can have push their partials, because a kernel
/// cannot add so many at once.
fn play_chosen(problem: &Problem, network: &SimulatedNetwork) -> Result<Played> {
    let choose_over_hosts = if problem.layout.world() > MAX_WORLD {
        pushed_over_hosts
    } else {
        over_hosts
    };
    let config = match problem.hosts.count() {
        1 => choose(&H200, problem, Numerics::Fast, true, None),
        _ => choose_over_hosts(&H200, problem, Numerics::Fast, network.bytes),
    };
    play_configured(problem, config, network)
}

/// The product of one rank, with all rows there: its time, and the library's choice for it.
fn alone(problem: &Problem) -> Result<(f64, Config)> {
    let layout = Layout::balanced(problem.layout.m(), problem.layout.k(), 1)?;
    let alone = Problem::new(Operation::MATMUL, DType::Bf16, layout, problem.n);
    let config = choose(&H200, &alone, Numerics::Fast, true, None);
    Ok((made(&alone, &config), config))
}

/// How long a product takes whose rows are there.
fn made(problem: &Problem, config: &Config) -> f64 {
    let burst = Tiles::of(&TIMED, problem, config).cold();
    burst * slower(problem, burst)
}

/// How much longer a product takes than `burst`.
fn slower(problem: &Problem, burst: f64) -> f64 {
    let Problem { layout, n, .. } = problem;
    let operations = 2.0 * layout.m() as f64 * *n as f64 * layout.k() as f64;
    let most = TIMED.multiprocessors as f64 * TIMED.operations * burst;
    sustained(burst, operations / most) / burst
}

/// Plays a problem with one configuration.
fn play_configured(
    problem: &Problem,
    config: Config,
    network: &SimulatedNetwork,
) -> Result<Played> {
    let (alone, _) = alone(problem)?;
    let (world, is_sent) = (problem.layout.world(), problem.operation.sends_product());
    let mut played = match world {
        1 => Played {
            micros: made(problem, &config),
            alone,
            timeline: made_alone(problem, config)?,
        },
        _ if follows_product(problem, &config) => {
            let mut product = Played {
                micros: made(problem, &config),
                alone,
                timeline: made_alone(problem, config)?,
            };
            product.extend(play_schedules(problem, config, network, alone)?);
            product
        }
        _ if is_sent && config.route != Route::Push => by_model(problem, config, alone)?,
        _ => play_schedules(problem, config, network, alone)?,
    };
    let is_over_hosts =
        problem.operation == Operation::MATMUL_ALL_REDUCE && problem.hosts.count() > 1;
    if is_over_hosts && !sends_all_partials(problem) {
        let gather = gather_of(problem, Operation::GATHER_OF_MATMUL_ALL_REDUCE)?;
        let config = plan::over_hosts(&gather, config);
        played.extend(play_schedules(&gather, config, network, alone)?);
    }
    Ok(played)
}

/// The gather that follows an all-reduce.
fn gather_of(problem: &Problem, operation: Operation) -> Result<Problem> {
    let layout = problem.layout.of_columns(problem.n)?;
    Ok(Problem {
        hosts: problem.hosts.clone(),
        ..Problem::new(operation, DType::Bf16, layout, 0)
    })
}

/// Plays the schedules that the planner makes.
fn play_schedules(
    problem: &Problem,
    config: Config,
    network: &SimulatedNetwork,
    alone: f64,
) -> Result<Played> {
    let (world, hosts) = (problem.layout.world(), problem.hosts.count());
    let machine = machine_of(problem, config, network);
    let played = if world > MAX_WORLD {
        let schedule = plan(problem, 0, config)?;
        vec![ranks::play_one(&machine, &schedule, [hosts, world / hosts])]
    } else {
        let schedules = (0..world).map(|rank| plan(problem, rank, config));
        ranks::play_all(&machine, &schedules.collect::<Result<Vec<Schedule>>>()?)
    };
    let end = played.iter().map(|rank| rank.end).fold(0.0, f64::max);
    let traces = (0..).zip(played);
    let traces = traces.map(|(rank, PlayedRank { mut spans, .. })| {
        spans.sort_by_key(|span| (span.begin, span.lane));
        Trace { rank, spans }
    });
    Ok(Played {
        micros: end + around(problem, config, &machine),
        alone,
        timeline: Timeline {
            traces: traces.collect(),
        },
    })
}

/// Checks that `holds`. `what` says what must hold.
fn require(what: &str, holds: bool) -> Result<()> {
    if holds {
        Ok(())
    } else {
        Err(Error::unsupported(what))
    }
}

/// What the ranks of a problem are made of.
fn machine_of<'a>(problem: &Problem, config: Config, network: &'a SimulatedNetwork) -> Machine<'a> {
    let multiplies = problem.operation.multiplies() && !follows_product(problem, &config);
    let tiles = multiplies.then(|| Tiles::of(&TIMED, problem, &config));
    let tile = &config.tile;
    let [rows, columns] = [tile.m * tile.cluster_m, tile.n * tile.cluster_n];
    let bytes = rows * columns * problem.dtypes.partials.bytes();
    Machine {
        rates: match problem.operation {
            _ if tiles.is_none() => &TIMED_ALONE,
            operation if operation.sends_product() => &TIMED_SUMS,
            _ => &TIMED,
        },
        network,
        tiles,
        clock: tiles.map_or(1.0, |tiles| slower(problem, tiles.cold())),
        addend: tiles.map_or(0.0, |tiles| (tiles.slots * bytes) as f64 / TIMED.read),
    }
}

/// The time before and after all that is played.
fn around(problem: &Problem, config: Config, machine: &Machine) -> f64 {
    let route = match follows_product(problem, &config) {
        // The partials that are made are pushed.
        true => Route::Push,
        false => plan::over_hosts(problem, config).route,
    };
    let link = machine.rates.link(route);
    match machine.tiles {
        Some(tiles) if !problem.operation.sends_product() => {
            tiles.start + tiles.joined() + link.around
        }
        _ => link.around,
    }
}

/// A sum whose partials are stored, on one host: the model says how long it takes. Its timeline has the tiles of the
/// product, and then one span for what is stored and added.
fn by_model(problem: &Problem, config: Config, alone: f64) -> Result<Played> {
    let burst = Tiles::of(&TIMED, problem, &config).cold();
    let slower = made(problem, &config) - burst;
    let micros = time_of_sum(&TIMED, STORED_SUMS, problem, &config) + slower;
    let mut timeline = made_alone(problem, config)?;
    for trace in &mut timeline.traces {
        let begin = trace.spans.iter().map(|span| span.end).max().unwrap_or(0);
        trace.spans.push(Span {
            lane: Lane::Copy,
            work: Work::Add {
                rows: problem.layout.rows_of(trace.rank),
            },
            begin,
            end: begin.max((micros * 1e3) as u64),
        });
    }
    Ok(Played {
        micros,
        alone,
        timeline,
    })
}

/// The timeline of a product that each rank makes of rows that are there.
fn made_alone(problem: &Problem, config: Config) -> Result<Timeline> {
    let operation = if problem.operation.sends_product() {
        Operation::MULTIPLY_PARTIALS
    } else {
        Operation::MULTIPLY
    };
    let problem = Problem {
        operation,
        hosts: Hosts::default(),
        ..problem.clone()
    };
    let network = SimulatedNetwork {
        bytes: 1.0,
        latency: 0.0,
    };
    Ok(play_schedules(&problem, config, &network, 0.0)?.timeline)
}
