//! The rows of the CUDA backend's table: gemmesh, and its baselines NCCL and cuBLASLt.
#![allow(unsafe_code)]

mod clock;
pub mod collectives;
mod consume;
pub mod decoding;
mod memory;
mod peers;
mod produce;
mod scales;

use std::path::Path;
use std::rc::Rc;
use std::time::{Duration, Instant};

use clock::{Graph, Side, Timer};
pub use consume::Consume;
use gemmesh::elements::{OutputOf, Value};
use gemmesh::error::Kind;
use gemmesh::testing::{Variant, Winner, ranks_share_gpus, with_each_kernel};
use gemmesh::tuning::{Chunking, Route, TileShape};
use gemmesh::{Config, Cuda, DType, Group, Result};
use memory::{Place, Scratch};
use peers::{Accumulation, Collective, Communication, CublasLt, Nccl, Problem, Product};
pub use produce::Produce;
use serde_json::json;

use crate::common::gather::AllGather;
use crate::common::scales::{BLOCK, GatheredScales, ScaleValues};
use crate::common::time::Time;
use crate::common::{self, Failure, Multiplied, Operation, Row};
use crate::forms::{self, Clock, Peer};
use crate::sums::{AllReduce, Operands, ReduceScatter};
use crate::{Args, PRODUCTS, Timed, Timing, append, verify};

/// Calls in a row whose time on the host is taken. They are few enough for the device's queues.
const CALLS: usize = 12;

/// The base of configurations whose kernel is still to be chosen.
const ANY_TILE: TileShape = TileShape::new(128, 128, 64);

/// A way to move rows.
pub const fn way(route: Route, chunking: Chunking) -> Config {
    Config::new(ANY_TILE, chunking, route)
}

/// An operation, and the baselines that it is timed beside.
pub trait OnGpus<T: Multiplied>: Operation<Cuda, T> {
    /// The same work by cuBLASLt and NCCL, with the same operands. Collective.
    fn peers(&mut self, instruments: &Instruments, prepared: &Self::Prepared) -> Result<Peers>;
    /// Makes a run's copies, without any order.
    fn copy(&mut self, prepared: &Self::Prepared) -> Result<()>;
    /// Ways to move its rows, each with the variant of the kernels that multiply.
    fn ways() -> Vec<(Variant, Config)>;
    /// True if a run can be captured in a CUDA graph.
    fn can_be_captured(prepared: &Self::Prepared) -> bool {
        Self::config(prepared).route != Route::Pull
    }
    /// The host's time in the caller's functions since the last call of this, if there are any.
    fn in_functions(&mut self) -> Option<Duration> {
        None
    }
}

/// The tools that time all shapes. NCCL alone takes a second to set up.
pub struct Instruments {
    timer: Timer,
    side: Side,
    cublaslt: Rc<CublasLt>,
    /// None if ranks share a GPU.
    nccl: Option<Nccl>,
}

impl Instruments {
    fn new(group: &Group<Cuda>) -> Result<Instruments> {
        clock::bind(group)?;
        let nccl = match ranks_share_gpus(group) {
            true => None,
            false => Some(Nccl::new(group)?),
        };
        Ok(Instruments {
            timer: Timer::new(group)?,
            side: Side::new()?,
            cublaslt: Rc::new(CublasLt::new()?),
            nccl,
        })
    }

    /// The fastest product of cuBLASLt. None if it refuses it. Collective.
    fn product(&self, problem: &Problem, accumulation: Accumulation) -> Result<Option<Product>> {
        match Product::find(&self.cublaslt, problem, accumulation)? {
            Some(product) => product.tuned(&self.timer),
            None => Ok(None),
        }
    }
}

impl<T: Multiplied> Clock<Cuda, T> for Instruments {
    fn new(group: &Group<Cuda>) -> Result<Instruments> {
        Instruments::new(group)
    }

    fn time(&self, run: impl FnOnce() -> Result<()>) -> Result<f64> {
        clock::bind(&self.timer.group)?;
        self.timer.time(run)
    }

    fn peer<'a>(&'a self, product: forms::Product<'a, Cuda, T>) -> Result<Peer<'a>> {
        clock::bind(&self.timer.group)?;
        let ([m, k], [n, _]) = (product.a.shape(), product.b.shape());
        let (out, to) = output(product.out, [m, n])?;
        let [a, b] = [product.a, product.b].map(Place::of);
        let problem = Problem::new(a, b, to, [m, n, k]);
        let problem = problem.scaled(product.scales.each_ref().map(Option::as_ref))?;
        let accumulation = match product.fast_accumulation {
            true => Accumulation::Fast,
            false => Accumulation::Promoted,
        };
        Ok(match self.product(&problem, accumulation)? {
            Some(product) => Peer::Prepared(Box::new(move || {
                let _ = &out;
                product.run(self.timer.stream)
            })),
            None => Peer::Refused,
        })
    }
}

/// Memory for cuBLASLt's output. Its rows are a multiple of 16 bytes long.
fn output(dtype: DType, [m, n]: [usize; 2]) -> Result<(Scratch, Place)> {
    let pitch = n.next_multiple_of(16 / dtype.bytes());
    let out = Scratch::new(m * pitch * dtype.bytes())?;
    let place = Place {
        ptr: out.ptr(),
        pitch,
        dtype,
    };
    Ok((out, place))
}

/// An operation by cuBLASLt and NCCL, in the benchmark's own memory.
pub struct Peers {
    problem: Problem,
    communication: Communication,
    /// The gather of scales.
    scales: Option<Communication>,
    /// The product, if it is not communicated.
    _out: Option<Scratch>,
}

impl Peers {
    fn name(&self) -> &'static str {
        match self.communication.collective {
            Collective::Gather => "NCCL + cuBLASLt",
            _ => "cuBLASLt + NCCL",
        }
    }

    /// Enqueues what is communicated on the stream of `timer`.
    fn communicate(&self, nccl: &Nccl, timer: &Timer) -> Result<()> {
        let all = [Some(&self.communication), self.scales.as_ref()];
        let mut all = all.into_iter().flatten();
        all.try_for_each(|one| nccl.run(one, timer.stream))
    }

    /// Enqueues one after the other on the stream of `timer`.
    fn run(&self, product: &Product, nccl: &Nccl, timer: &Timer) -> Result<()> {
        match self.communication.collective {
            Collective::Gather => {
                self.communicate(nccl, timer)?;
                product.run(timer.stream)
            }
            _ => {
                product.run(timer.stream)?;
                self.communicate(nccl, timer)
            }
        }
    }
}

impl<T: Multiplied, O: OutputOf<T>> OnGpus<T> for AllGather<Cuda, T, O> {
    fn peers(&mut self, instruments: &Instruments, prepared: &Self::Prepared) -> Result<Peers> {
        let group = &instruments.timer.group;
        let ([m, k], [n, _]) = (self.a.shape(), self.b.shape());
        let (own, row) = (self.a.rows(), k * size_of::<T>());
        // NCCL gathers equal shards only. If the rows don't divide evenly, each rank sends as many as the longest shard
        // has.
        let (longest, world) = (m.div_ceil(group.world_size()), group.world_size());
        let shard = Scratch::new(longest * row)?;
        let gathered = Scratch::new(world * longest * row)?;
        let (out, to) = output(O::DTYPE, [m, n])?;
        // cuBLASLt's products read the gathered rows, like gemmesh's own.
        prepared.gather(self.scales.a.of(&self.a))?;
        group.synchronize()?;
        let a = self.a.as_device_ptr();
        // SAFETY: one holds a shard and the other M rows, as `a` does, which no one writes now.
        unsafe {
            shard.copy_from(a + (own.start * row) as u64, own.len() * row)?;
            gathered.copy_from(a, m * row)?;
        }
        let a = Place {
            ptr: gathered.ptr(),
            pitch: k,
            dtype: T::DTYPE,
        };
        let of_a = self.scales.a.values()?;
        let problem = Problem::new(a, Place::of(&self.b), to, [m, n, k]);
        // cuBLASLt wants the scales of blocks transposed. No one is timed who does that.
        let problem = problem.scaled([of_a.as_ref(), self.scales.b.as_ref()])?;
        let gather = |dtype: DType, from, to, columns: usize| Communication {
            collective: Collective::Gather,
            dtype,
            from,
            to,
            count: longest * columns,
        };
        let scales = match self.scales.a {
            GatheredScales::Replicated(..) => None,
            GatheredScales::Sharded(_) => {
                let columns = k.div_ceil(BLOCK);
                let bytes = longest * columns * size_of::<f32>();
                let (from, to) = (Scratch::new(bytes)?, Scratch::new(world * bytes)?);
                Some(gather(DType::F32, from, to, columns))
            }
        };
        Ok(Peers {
            problem,
            communication: gather(T::DTYPE, shard, gathered, k),
            scales,
            _out: Some(out),
        })
    }

    fn copy(&mut self, prepared: &Self::Prepared) -> Result<()> {
        // SAFETY: ranks are timed from the point where their streams are aligned, and no one writes `a` during the
        // copies.
        unsafe { prepared.copy(self.scales.a.of(&self.a)) }
    }

    fn ways() -> Vec<(Variant, Config)> {
        let counts = [(1, 1), (1, 2), (1, 4), (2, 2), (4, 4)].into_iter();
        let cut = |(count, last)| {
            let chunking = Chunking::new(count).with_last(last);
            [false, true].map(|cut| chunking.with_cut_last(cut))
        };
        let copied = counts.flat_map(cut);
        let copied = copied.flat_map(|cut| [Route::Pull, Route::Push].map(|route| way(route, cut)));
        let stored = way(Route::Store, Chunking::new(64));
        let ways = [stored].into_iter().chain(copied);
        ways.map(|way| (Variant::Forms, way)).collect()
    }
}

impl<T: Multiplied> Operands<Cuda, T> {
    /// `dtype`: the type of the sums, which is also that of the partial sums.
    fn peers(&self, dtype: DType, collective: Collective) -> Result<Peers> {
        let shape = self.shape();
        let ([m, n, _], world) = (shape, self.group.world_size());
        // NCCL scatters equal parts only. If the rows don't divide evenly, each rank gets as many as the longest part
        // has.
        let longest = m.div_ceil(world);
        let count = match collective {
            Collective::AllReduce => m * n,
            _ => longest * n,
        };
        let from = Scratch::new(world * longest * n * dtype.bytes())?;
        let to = Scratch::new(count * dtype.bytes())?;
        let partial = Place {
            ptr: from.ptr(),
            pitch: n,
            dtype,
        };
        let [a, b] = [&self.a, &self.b].map(Place::of);
        let scales: [Option<ScaleValues>; 2] = self.scales();
        let problem = Problem::new(a, b, partial, shape);
        Ok(Peers {
            problem: problem.scaled(scales.each_ref().map(Option::as_ref))?,
            communication: Communication {
                collective,
                dtype,
                from,
                to,
                count,
            },
            scales: None,
            _out: None,
        })
    }
}

/// Ways to make sums, by all routes. The last chunks are cut more finely, because when they are made, only moving them
/// is left to do.
fn ways_of_sums(counts: &[(usize, usize)]) -> Vec<(Variant, Config)> {
    let cuts = counts
        .iter()
        .map(|&(count, last)| Chunking::new(count).with_last(last));
    let sent = cuts.flat_map(|cut| [Route::Push, Route::Store].map(|route| way(route, cut)));
    let whole = |route| way(route, Chunking::new(1));
    let others = [
        (Variant::Forms, whole(Route::Pull)),
        (Variant::Forms, whole(Route::Store).with_product_first(true)),
        (Variant::LowLatency, whole(Route::Store)),
    ];
    let sent = sent.map(|way| (Variant::Sums, way));
    others.into_iter().chain(sent).collect()
}

impl<T: Multiplied, O: OutputOf<T>> OnGpus<T> for ReduceScatter<Cuda, T, O> {
    fn peers(&mut self, _: &Instruments, _: &Self::Prepared) -> Result<Peers> {
        self.operands.peers(O::DTYPE, Collective::ReduceScatter)
    }

    fn copy(&mut self, prepared: &Self::Prepared) -> Result<()> {
        // SAFETY: ranks are timed from the point where their streams are aligned, and no one makes partials during the
        // copies.
        unsafe { prepared.sum.copy_partials(&mut self.out) }
    }

    fn ways() -> Vec<(Variant, Config)> {
        ways_of_sums(&[(1, 1), (1, 2), (1, 3), (1, 4), (1, 8)])
    }
}

impl<T: Multiplied> OnGpus<T> for AllReduce<Cuda, T> {
    fn peers(&mut self, _: &Instruments, _: &Self::Prepared) -> Result<Peers> {
        self.operands.peers(T::Addend::DTYPE, Collective::AllReduce)
    }

    fn copy(&mut self, prepared: &Self::Prepared) -> Result<()> {
        // SAFETY: as above.
        unsafe { prepared.sum.copy_partials(&mut self.out) }
    }

    fn ways() -> Vec<(Variant, Config)> {
        ways_of_sums(&[(1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (4, 2), (8, 1)])
    }
}

/// The variants that are timed on the device.
#[derive(Clone, Copy)]
enum Measured {
    Cublaslt,
    /// cuBLASLt with fast accumulation.
    Fast,
    Matmul,
    Nccl,
    Collective,
    Peers,
    Sequential,
    Fused,
    /// The fused call, replayed from a CUDA graph, if it can be captured.
    Graph,
    /// cuBLASLt on one stream and plain copies on another, with nothing between them.
    Ideal,
}

impl Measured {
    const ALL: [Measured; 10] = [
        Measured::Cublaslt,
        Measured::Fast,
        Measured::Matmul,
        Measured::Nccl,
        Measured::Collective,
        Measured::Peers,
        Measured::Sequential,
        Measured::Fused,
        Measured::Graph,
        Measured::Ideal,
    ];

    fn row<T: Multiplied, O: OnGpus<T>>(self, peers: &Peers, time: Time) -> Row {
        let collective = O::COLLECTIVE;
        let (name, key) = match self {
            Measured::Cublaslt => ("cuBLASLt alone".into(), "cublaslt_us".into()),
            Measured::Fast => (
                "cuBLASLt alone, fast accumulation".into(),
                "cublaslt_fast_us".into(),
            ),
            Measured::Matmul => ("gemmesh matmul alone".into(), "matmul_us".into()),
            Measured::Nccl => (format!("NCCL {collective} alone"), "nccl_us".into()),
            Measured::Collective => (
                format!("gemmesh {collective} alone"),
                common::key_of(collective),
            ),
            Measured::Peers => (peers.name().into(), "nccl_cublaslt_us".into()),
            Measured::Sequential => (format!("gemmesh {}", O::SEQUENTIAL), "sequential_us".into()),
            Measured::Fused => ("gemmesh fused".into(), "fused_us".into()),
            Measured::Graph => ("gemmesh fused, in a graph".into(), "graph_us".into()),
            Measured::Ideal => ("ideal".into(), "ideal_us".into()),
        };
        Row { name, key, time }
    }
}

/// A run in a CUDA graph, verified, if it can be captured. Collective.
fn captured<T: Multiplied, O: OnGpus<T>>(
    operation: &mut O,
    prepared: &O::Prepared,
    timer: &Timer,
) -> Result<Option<Graph>, Failure> {
    if !O::can_be_captured(prepared) {
        return Ok(None);
    }
    let graph = Graph::capture(timer.stream, || operation.run(prepared))?;
    verify(&timer.group, operation, PRODUCTS, |_| {
        graph.launch(timer.stream)
    })?;
    Ok(Some(graph))
}

/// The times of these variants, which run in turn, as often as `args` says. `progress` is called after each round.
fn samples(
    timer: &Timer,
    args: &Args,
    variants: &[Measured],
    mut run: impl FnMut(Measured) -> Result<()>,
    mut progress: impl FnMut(),
) -> Result<Vec<[f64; Measured::ALL.len()]>> {
    let mut samples = Vec::new();
    for round in 0..args.warmup + args.iters {
        let mut times = [0.0; Measured::ALL.len()];
        for &variant in variants {
            times[variant as usize] = timer.time(|| run(variant))?;
        }
        if round >= args.warmup {
            samples.push(times);
        }
        progress();
    }
    Ok(samples)
}

/// The host's time in one of several fused calls in a row: in all, and without the caller's functions if there are any.
/// Collective.
fn rows_of_host<T: Multiplied, O: OnGpus<T>>(
    operation: &mut O,
    prepared: &O::Prepared,
    timer: &Timer,
    rounds: usize,
) -> Result<[Row; 2]> {
    let mut times = Vec::new();
    let mut has_functions = false;
    for _ in 0..rounds {
        timer.prepare()?;
        operation.in_functions();
        let begin = Instant::now();
        for _ in 0..CALLS {
            operation.run(prepared)?;
        }
        let took = begin.elapsed();
        let in_functions = operation.in_functions();
        has_functions = in_functions.is_some();
        let library = took.saturating_sub(in_functions.unwrap_or_default());
        times.push([took, library].map(|time| time.as_secs_f64() * 1e6 / CALLS as f64));
        timer.group.synchronize()?;
    }
    let [all, library] = common::medians(&common::slowest(&timer.group, &times)?);
    let library = has_functions.then_some(library);
    Ok([
        Row::new("host, a fused call", "host_us", all),
        Row::new("host, without its functions", "host_library_us", library),
    ])
}

impl<T: Multiplied, O: OnGpus<T>> Timed<Cuda, T> for O {
    type Instruments = Instruments;

    fn instruments(group: &Group<Cuda>) -> Result<Instruments> {
        Instruments::new(group)
    }

    /// Times all rows in turn, as often as `args` says. `progress` is called after each round.
    fn time(
        &mut self,
        instruments: &Instruments,
        prepared: &O::Prepared,
        args: &Args,
        progress: impl FnMut(),
    ) -> Result<Timing, Failure> {
        let Instruments {
            timer, side, nccl, ..
        } = instruments;
        let group = &timer.group;
        clock::bind(group)?;
        let peers = self.peers(instruments, prepared)?;
        let product = instruments.product(&peers.problem, Accumulation::Promoted)?;
        let fast = match args.fast_accumulation {
            true => instruments.product(&peers.problem, Accumulation::Fast)?,
            false => None,
        };
        // Over hosts there are no graphs.
        let is_one_host = group.host_count() == 1;
        let graph = match is_one_host {
            true => captured(self, prepared, timer)?,
            false => None,
        };
        let is_refused = |variant| match variant {
            Measured::Cublaslt | Measured::Peers | Measured::Ideal => product.is_none(),
            Measured::Fast => fast.is_none(),
            _ => false,
        };
        let is_here = |variant| match variant {
            Measured::Nccl | Measured::Peers => nccl.is_some(),
            Measured::Graph => graph.is_some(),
            // No copy engine reaches another host.
            Measured::Ideal => is_one_host,
            Measured::Fast => args.fast_accumulation,
            _ => true,
        };
        let run = |variant| match (variant, &product, nccl) {
            (Measured::Cublaslt, Some(product), _) => product.run(timer.stream),
            (Measured::Fast, ..) => fast
                .iter()
                .try_for_each(|product| product.run(timer.stream)),
            (Measured::Nccl, _, Some(nccl)) => peers.communicate(nccl, timer),
            (Measured::Peers, Some(product), Some(nccl)) => peers.run(product, nccl, timer),
            (Measured::Ideal, Some(product), _) => {
                side.run(timer, |stream| product.run(stream), || self.copy(prepared))
            }
            (Measured::Matmul, ..) => self.multiply(prepared),
            (Measured::Collective, ..) => self.communicate(prepared),
            (Measured::Sequential, ..) => self.run_in_sequence(prepared),
            (Measured::Fused, ..) => self.run(prepared),
            (Measured::Graph, ..) => graph
                .iter()
                .try_for_each(|graph| graph.launch(timer.stream)),
            (Measured::Cublaslt | Measured::Nccl | Measured::Peers | Measured::Ideal, ..) => Ok(()),
        };
        let there: Vec<Measured> = Measured::ALL
            .into_iter()
            .filter(|&one| is_here(one) && !is_refused(one))
            .collect();
        let samples = samples(timer, args, &there, run, progress)?;
        let times = common::medians(&common::slowest(group, &samples)?);
        let host = rows_of_host(self, prepared, timer, args.iters.min(5))?;
        let time = |variant: Measured| match (is_here(variant), is_refused(variant)) {
            (false, _) => Time::Absent,
            (true, true) => Time::Refused,
            (true, false) => Time::Taken(times[variant as usize]),
        };
        let rows = Measured::ALL.map(|variant| variant.row::<T, O>(&peers, time(variant)));
        let shared = "NCCL's rows are left out: it needs a GPU for each rank, and ranks share one.";
        Ok(Timing {
            rows: rows.into_iter().chain(host).collect(),
            more: json!({ "gpu": group.device_name(), "cuda_driver": group.driver_version()? }),
            baseline: nccl.as_ref().map(|_| (peers.name(), time(Measured::Peers))),
            fused: times[Measured::Fused as usize],
            ideal: time(Measured::Ideal),
            note: nccl.is_none().then_some(shared),
        })
    }

    fn tune(group: &Group<Cuda>, shape: [usize; 3], path: &Path) -> Result<(), Failure> {
        let mut operation = O::random(group, shape, 1)?;
        let (config, time) = fastest(group, &mut operation)?;
        let prepared = operation.prepare(Some(config))?;
        verify(group, &mut operation, PRODUCTS, |operation| {
            operation.run(&prepared)
        })?;
        if group.rank() > 0 {
            return Ok(());
        }
        let [m, n, k] = shape;
        let winner = Winner {
            gpu: group.device_name().into(),
            world: group.world_size(),
            operation: gemmesh::schedule::Operation::named(O::NAME)
                .ok_or(Failure::Usage("no operation has this name"))?,
            dtype: T::DTYPE,
            m,
            n,
            k,
            config,
            us: (time * 10.0).round() / 10.0,
        };
        let line = json!(winner).to_string();
        println!("{line}");
        Ok(append(path, &line)?)
    }
}

/// The fastest configuration of an operation, and its median time in microseconds. Collective.
fn fastest<T: Multiplied, O: OnGpus<T>>(
    group: &Group<Cuda>,
    operation: &mut O,
) -> Result<(Config, f64)> {
    const ROUNDS: usize = 9;
    /// A configuration that takes this many times as long in a first round is not tried again.
    const HOPELESS: f64 = 1.2;
    /// A configuration is only chosen if it is faster by this factor. Less is noise.
    const NOISE: f64 = 0.995;
    clock::bind(group)?;
    let timer = Timer::new(group)?;
    let mut best = operation.prepare(None)?;
    let mut best_time = f64::INFINITY;
    let tile = O::config(&best).tile.with_k_slices(1);
    for (variant, mut way) in O::ways() {
        way.tile = tile;
        for config in with_each_kernel(&way, variant, [T::DTYPE; 2]) {
            let other = match operation.prepare(Some(config)) {
                // Its low-latency kernel is for fewer rows, or no kernel can use this route.
                Err(error) if matches!(error.kind(), Kind::Unsupported { .. }) => continue,
                other => other?,
            };
            let mut run = |prepared: &O::Prepared| timer.time(|| operation.run(prepared));
            run(&other)?;
            // It runs in turn with the best so far. If the GPU gets slower as it grows warm, both lose the same.
            let mut rounds = |count: usize| -> Result<[f64; 2]> {
                let times: Vec<[f64; 2]> = (0..count)
                    .map(|_| Ok([run(&best)?, run(&other)?]))
                    .collect::<Result<_>>()?;
                Ok(common::medians(&common::slowest(group, &times)?))
            };
            let mut times = rounds(1)?;
            if times[1] < HOPELESS * times[0] {
                times = rounds(ROUNDS)?;
                best_time = times[0];
            }
            let [champion, challenger] = times;
            if group.rank() == 0 {
                println!("{challenger:.1} µs, the best {champion:.1} µs: {config:?}");
            }
            if challenger < NOISE * champion {
                (best, best_time) = (other, challenger);
            }
        }
    }
    Ok((O::config(&best), best_time))
}
