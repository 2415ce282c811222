//! Replays of several graphs in random order, among live calls of other sizes. Each result is exact, and is looked at
//! each time.
//!
//! `GEMMESH_SOAK_SECONDS` says how long; twenty if it is not given.

use std::time::Instant;

use gemmesh::error::Kind;
use gemmesh::products::Prepared;
use gemmesh::testing::{Variant, ranks_share_gpus};
use gemmesh::tuning::Route;
use gemmesh::{
    Config, Cuda, Error, Group, Host, MatmulAllReduce, MatmulReduceScatter, Matrix, ShardedMatrix,
    all_gather, all_reduce, all_to_all, bf16, broadcast, reduce_scatter,
};
use rand::RngExt;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;

use crate::support::gpu::*;
use crate::support::numbers::{bits, nan, rng};
use crate::support::processes::Setting;
use crate::test_name;

/// How many different inputs a call gets.
const SEEDS: u64 = 5;

/// A whole number from -2 to 2, so small that sums of some hundred products are exact in f32.
fn number(seed: u64, rank: usize, place: usize) -> f64 {
    let mixed =
        (seed << 40 ^ (rank as u64) << 32 ^ place as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    ((mixed >> 32) % 5) as f64 - 2.0
}

fn values(seed: u64, rank: usize, count: usize) -> Vec<f64> {
    (0..count).map(|place| number(seed, rank, place)).collect()
}

fn numbers(seed: u64, rank: usize, count: usize) -> Vec<bf16> {
    rounded(&values(seed, rank, count))
}

fn rounded(values: &[f64]) -> Vec<bf16> {
    values.iter().copied().map(bf16::from_f64).collect()
}

/// The products of rows `[_, k]` with weights `[_, k]`, in float64.
fn products(rows: &[f64], weights: &[f64], k: usize) -> Vec<f64> {
    let rows = rows.chunks_exact(k);
    let of_row = |row| weights.chunks_exact(k).map(move |weight| dot(row, weight));
    rows.flat_map(of_row).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// What weights are made of.
const WEIGHTS: u64 = 77;

/// A call with its matrices.
trait Call {
    /// Other inputs, and outputs that no call leaves so. Nothing of it is under way.
    fn fill(&mut self, seed: u64) -> Result<(), Error>;
    fn run(&mut self) -> Result<(), Error>;
    /// Whether the outputs are what the inputs of `seed` give.
    fn is_right(&self, seed: u64) -> Result<bool, Error>;
}

/// A product of gathered rows.
struct Gather {
    world: usize,
    rank: usize,
    a: ShardedMatrix<Cuda, bf16>,
    b: Matrix<Cuda, bf16>,
    out: Matrix<Cuda, bf16>,
    prepared: Prepared<'static, Cuda, bf16>,
}

impl Gather {
    fn new(group: &Group<Cuda>, [m, n, k]: [usize; 3], route: Route) -> Result<Gather, Error> {
        let rank = group.rank();
        let arguments = Arguments::new(group, m, n, k)?;
        let prepared = arguments.prepare(route)?;
        let Arguments { a, mut b, out, .. } = arguments;
        b.copy_from_host(&numbers(WEIGHTS, rank, n * k))?;
        Ok(Gather {
            world: group.world_size(),
            rank,
            a,
            b,
            out,
            prepared,
        })
    }
}

impl Call for Gather {
    fn fill(&mut self, seed: u64) -> Result<(), Error> {
        let [[_, k], [m, n]] = [self.a.shape(), self.out.shape()];
        let rows = self.a.rows().len();
        let own = numbers(seed, self.rank, rows * k);
        self.a.shard_mut().copy_from_host(&own)?;
        self.a.poison(nan())?;
        self.out.copy_from_host(&vec![nan(); m * n])
    }

    fn run(&mut self) -> Result<(), Error> {
        self.prepared.run(&self.a, &self.b, &mut self.out)
    }

    fn is_right(&self, seed: u64) -> Result<bool, Error> {
        let [[_, k], [_, n]] = [self.a.shape(), self.out.shape()];
        let weights = values(WEIGHTS, self.rank, n * k);
        let of_rank = |rank| {
            let rows = values(seed, rank, self.a.rows_of(rank).len() * k);
            products(&rows, &weights, k)
        };
        let exact: Vec<f64> = (0..self.world).flat_map(of_rank).collect();
        Ok(bits(&self.out.to_vec()?) == bits(&rounded(&exact)))
    }
}

/// A product whose K is spread over the ranks. Each rank gets all rows of the sum, or its own.
struct Sum {
    world: usize,
    rank: usize,
    a: Matrix<Cuda, bf16>,
    b: Matrix<Cuda, bf16>,
    all: ShardedMatrix<Cuda, bf16>,
    /// None if all rows are wanted.
    own: Option<Matrix<Cuda, bf16>>,
    config: Option<Config>,
}

impl Sum {
    fn new(
        group: &Group<Cuda>,
        [m, n, k]: [usize; 3],
        is_scatter: bool,
        config: Option<Config>,
    ) -> Result<Sum, Error> {
        let rank = group.rank();
        let all = group.sharded(m, n)?;
        let own = all.rows().len();
        Ok(Sum {
            world: group.world_size(),
            rank,
            a: group.zeros(m, k)?,
            b: group.upload(&numbers(WEIGHTS, rank, n * k), n, k)?,
            own: is_scatter.then(|| group.zeros(own, n)).transpose()?,
            all,
            config,
        })
    }
}

impl Call for Sum {
    fn fill(&mut self, seed: u64) -> Result<(), Error> {
        let [[m, k], [_, n]] = [self.a.shape(), self.all.shape()];
        self.a.copy_from_host(&numbers(seed, self.rank, m * k))?;
        match &mut self.own {
            Some(own) => own.copy_from_host(&vec![nan(); self.all.rows().len() * n]),
            None => self.all.write(0, &vec![nan(); m * n]),
        }
    }

    fn run(&mut self) -> Result<(), Error> {
        let (scatter, reduce) = (MatmulReduceScatter::new(), MatmulAllReduce::new());
        match (&mut self.own, self.config) {
            (Some(own), None) => scatter.run(&self.a, &self.b, own),
            (Some(own), Some(config)) => scatter.config(config).run(&self.a, &self.b, own),
            (None, None) => reduce.run(&self.a, &self.b, &mut self.all),
            (None, Some(config)) => reduce.config(config).run(&self.a, &self.b, &mut self.all),
        }
    }

    fn is_right(&self, seed: u64) -> Result<bool, Error> {
        let [[m, k], [_, n]] = [self.a.shape(), self.all.shape()];
        let (out, rows) = match &self.own {
            Some(own) => (own.to_vec()?, self.all.rows()),
            None => (self.all.to_vec()?, 0..m),
        };
        // A rank's part is so small that bf16 holds it.
        let mut sum = vec![0.0; m * n];
        for rank in 0..self.world {
            let [a, b] = [values(seed, rank, m * k), values(WEIGHTS, rank, n * k)];
            let part = products(&a, &b, k);
            sum.iter_mut()
                .zip(part)
                .for_each(|(sum, part)| *sum += part);
        }
        let exact = &sum[rows.start * n..rows.end * n];
        Ok(bits(&out) == bits(&rounded(exact)))
    }
}

/// Collectives of the same rows, one after the other. Few rows are stored by kernels.
struct Collectives {
    world: usize,
    rank: usize,
    rows: usize,
    n: usize,
    a: Matrix<Cuda, bf16>,
    gathered: ShardedMatrix<Cuda, bf16>,
    sums: ShardedMatrix<Cuda, bf16>,
    own: Matrix<Cuda, bf16>,
    moved: ShardedMatrix<Cuda, bf16>,
    sent: ShardedMatrix<Cuda, bf16>,
}

impl Collectives {
    /// Each rank has this number of rows.
    fn new(group: &Group<Cuda>, rows: usize, n: usize) -> Result<Collectives, Error> {
        let (rank, world) = (group.rank(), group.world_size());
        let m = world * rows;
        Ok(Collectives {
            world,
            rank,
            rows,
            n,
            a: group.zeros(m, n)?,
            gathered: group.sharded(m, n)?,
            sums: group.sharded(m, n)?,
            own: group.zeros(rows, n)?,
            moved: group.sharded(m, n)?,
            sent: group.sharded(m, n)?,
        })
    }
}

impl Call for Collectives {
    fn fill(&mut self, seed: u64) -> Result<(), Error> {
        let (shard, all) = (self.rows * self.n, self.world * self.rows * self.n);
        let own = numbers(seed, self.rank, all);
        self.a.copy_from_host(&own)?;
        for gathered in [&mut self.gathered, &mut self.sent] {
            gathered.shard_mut().copy_from_host(&own[..shard])?;
            gathered.poison(nan())?;
        }
        self.sums.write(0, &vec![nan(); all])?;
        self.moved.write(0, &vec![nan(); all])?;
        self.own.copy_from_host(&vec![nan(); shard])
    }

    fn run(&mut self) -> Result<(), Error> {
        all_reduce(&self.a, &mut self.sums)?;
        reduce_scatter(&self.a, &mut self.own)?;
        all_to_all(&self.a, &mut self.moved)?;
        all_gather(&self.gathered)?;
        broadcast(&mut self.sent, self.world - 1)
    }

    fn is_right(&self, seed: u64) -> Result<bool, Error> {
        let (shard, all) = (self.rows * self.n, self.world * self.rows * self.n);
        let first = self.rank * shard;
        let inputs: Vec<Vec<bf16>> = (0..self.world)
            .map(|rank| numbers(seed, rank, all))
            .collect();
        let sum = |place: usize| -> f64 { inputs.iter().map(|of| of[place].to_f64()).sum() };
        let sums: Vec<bf16> = (0..all).map(|place| bf16::from_f64(sum(place))).collect();
        let blocks: Vec<bf16> = inputs
            .iter()
            .flat_map(|of| &of[first..first + shard])
            .copied()
            .collect();
        let shards: Vec<bf16> = inputs.iter().flat_map(|of| &of[..shard]).copied().collect();
        let root = self.world - 1;
        let sent = self.sent.to_vec()?;
        let come = &sent[root * shard..(root + 1) * shard];
        Ok(bits(&self.sums.to_vec()?) == bits(&sums)
            && bits(&self.own.to_vec()?) == bits(&sums[first..first + shard])
            && bits(&self.moved.to_vec()?) == bits(&blocks)
            && bits(&self.gathered.to_vec()?) == bits(&shards)
            && bits(come) == bits(&inputs[root][..shard]))
    }
}

/// A call that was captured.
struct Captured {
    name: String,
    call: Box<dyn Call>,
    replay: Replay,
}

/// Kernels of sums that can be captured wherever the ranks are, of few rows and of more.
fn sums() -> [Option<Config>; 3] {
    let few = configs_of_sums(Variant::LowLatency, Route::Store, 1);
    let more = configs_of_sums(Variant::Sums, Route::Pull, 1);
    let more = |route| more.first().map(|config| config.with_route(route));
    [few.first().copied(), more(Route::Store), more(Route::Push)]
}

/// True on the driver that runs on the CPU. It has no kernels that add, and none that wait for copies of their graph.
fn is_cpu() -> bool {
    std::env::var_os("GEMMESH_TEST_CPU_DRIVER").is_some()
}

/// A call that has a name in failures.
type Named = (String, Box<dyn Call>);

fn calls(group: &Group<Cuda>) -> Result<Vec<Named>, Error> {
    let mut calls: Vec<Named> = Vec::new();
    for (rows, n) in [(1, 64), (2, 512), (75, 512)] {
        let call = Collectives::new(group, rows, n)?;
        calls.push((format!("collectives of {rows} rows"), Box::new(call)));
    }
    // Between GPUs kernels add up few rows.
    if !is_cpu() || ranks_share_gpus(group) {
        for (m, is_scatter) in [(8, false), (7, true), (40, true)] {
            let call = Sum::new(group, [m, 72, 32], is_scatter, None)?;
            let name = format!("a sum of {m} rows, of own rows: {is_scatter}");
            calls.push((name, Box::new(call)));
        }
    }
    if is_cpu() {
        return Ok(calls);
    }
    for route in [Route::Store, Route::Push] {
        for shape in [[301, 72, 264], [5, 136, 64]] {
            let call = Gather::new(group, shape, route)?;
            calls.push((
                format!("a gather by {route:?} of {shape:?}"),
                Box::new(call),
            ));
        }
    }
    for (config, m) in sums().into_iter().zip([7, 300, 301]) {
        for is_scatter in [true, false] {
            let shape = [m, 72, 56];
            let call = Sum::new(group, shape, is_scatter, config)?;
            let name = format!("a sum of {shape:?} by {config:?}, of own rows: {is_scatter}");
            calls.push((name, Box::new(call)));
        }
    }
    Ok(calls)
}

fn captured(group: &Group<Cuda>) -> Result<Vec<Captured>, Error> {
    let mut all = Vec::new();
    for (name, mut call) in calls(group)? {
        // The first run allocates.
        call.fill(0)?;
        call.run()?;
        group.synchronize()?;
        assert!(call.is_right(0)?, "{name}, before it was captured");
        let mut result = Ok(());
        let replay = Replay::capture(group, RELAXED, || result = call.run());
        match result {
            Ok(()) => all.push(Captured { name, call, replay }),
            // Rows of ranks that share a GPU are pulled in some calls, which can't be captured.
            Err(error) if *error.kind() == Kind::Capturing && ranks_share_gpus(group) => {
                println!("not captured where ranks share a GPU: {name}");
            }
            Err(error) => panic!("{name}: {error}"),
        }
    }
    assert!(all.len() >= 3, "{} graphs", all.len());
    Ok(all)
}

/// A call of other sizes than those in graphs, the same on every rank.
fn other(group: &Group<Cuda>, random: &mut StdRng) -> Result<Box<dyn Call>, Error> {
    let mut extents = |most: [usize; 3]| most.map(|most| random.random_range(1..=most));
    let [m, n, k] = extents([400, 24, 32]);
    let (n, k) = (8 * n, 8 * k);
    Ok(match random.random_range(0..3) {
        0 => Box::new(Gather::new(
            group,
            [m, n, k],
            ROUTES[random.random_range(0..ROUTES.len())],
        )?),
        1 if !is_cpu() => {
            let is_scatter = random.random_bool(0.5);
            Box::new(Sum::new(group, [m, n, k.min(64)], is_scatter, None)?)
        }
        _ => Box::new(Collectives::new(group, 1 + m / 2, n)?),
    })
}

/// What one rank does.
struct Program<'a> {
    group: &'a Group<Cuda>,
    graphs: Vec<Captured>,
    /// The same on every rank.
    random: StdRng,
    replays: usize,
    live: usize,
}

impl Program<'_> {
    /// Several graphs and live calls in random order, one after the other on the stream. Then all are looked at.
    fn round(&mut self, round: usize) -> Result<(), Error> {
        let mut seed = || self.random.random_range(0..SEEDS);
        let seeds: Vec<u64> = self.graphs.iter().map(|_| seed()).collect();
        let seed_of_others = seed();
        let mut order: Vec<usize> = (0..self.graphs.len()).collect();
        order.shuffle(&mut self.random);
        order.truncate(1 + round % 5);
        let mut others = Vec::new();
        for _ in 0..self.random.random_range(0..3) {
            others.push(other(self.group, &mut self.random)?);
        }
        // Nothing is under way.
        for &place in &order {
            self.graphs[place].call.fill(seeds[place])?;
        }
        others
            .iter_mut()
            .try_for_each(|call| call.fill(seed_of_others))?;
        self.enqueue(&order, &mut others)?;
        self.group.synchronize()?;
        for &place in &order {
            let Captured { name, call, .. } = &self.graphs[place];
            let seed = seeds[place];
            assert!(call.is_right(seed)?, "round {round}, seed {seed}: {name}");
        }
        for call in &others {
            assert!(call.is_right(seed_of_others)?, "round {round}: a live call");
        }
        // Matrices that peers read are dropped when these have them.
        self.group.barrier()
    }

    fn enqueue(&mut self, order: &[usize], others: &mut [Box<dyn Call>]) -> Result<(), Error> {
        let mut others = others.iter_mut();
        for &place in order {
            let Captured { call, replay, .. } = &mut self.graphs[place];
            let times = self.random.random_range(1..=3);
            for _ in 0..times {
                replay.launch();
            }
            self.replays += times;
            if self.random.random_bool(0.2) {
                call.run()?;
                self.live += 1;
            }
            if let Some(other) = others.next() {
                other.run()?;
                self.live += 1;
            }
        }
        for other in others {
            other.run()?;
            self.live += 1;
        }
        Ok(())
    }
}

/// True on all ranks as long as rank 0 goes on.
fn goes_on(steps: &Group<Host>, until: Instant) -> Result<bool, Error> {
    let own = [u8::from(Instant::now() < until)];
    Ok(steps.all_gather_bytes(&own)?[0] == [1])
}

#[test]
fn graph_replays_among_live_calls_of_other_sizes_are_right() {
    let Some(_leave) = gpu_alone() else { return };
    let length = crate::length();
    let setting = Setting {
        deadline: length + 2 * DEADLINE,
        ..Setting::default()
    };
    all_done(ranks_with(test_name!(), 2, &setting, |rank| {
        let steps = host_group(rank)?;
        let group = connect(&beside_the_host(rank), TIMEOUT)?;
        let mut program = Program {
            group: &group,
            graphs: captured(&group)?,
            random: rng(67),
            replays: 0,
            live: 0,
        };
        let until = Instant::now() + length;
        let mut round = 0;
        while goes_on(&steps, until)? {
            for _ in 0..10 {
                program.round(round)?;
                round += 1;
            }
        }
        assert!(program.replays > 0 && program.live > 0);
        let Program { replays, live, .. } = &program;
        let said = format!("{replays} replays and {live} live calls in {round} rounds");
        drop(program);
        Ok(said)
    }));
}
