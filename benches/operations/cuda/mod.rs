//! The rows of the CUDA backend's table: gemmesh, and its baselines NCCL and cuBLASLt.
#![allow(unsafe_code)]

mod calibrate;
mod clock;
pub mod collectives;
mod consume;
pub mod decoding;
mod memory;
mod peers;
mod produce;

use std::fmt::Debug;
use std::path::Path;
use std::rc::Rc;
use std::time::{Duration, Instant};

use clock::{Graph, Side, Timer};
pub use consume::Consume;
use gemmesh::testing::{Variant, Winner, ranks_share_gpus, with_each_kernel};
use gemmesh::{Chunking, Config, Cuda, Error, Group, Half, Matrix, Result, Route, TileShape};
use memory::{Place, Scratch};
use peers::{Collective, Communication, CublasLt, Nccl, Product};
pub use produce::Produce;
use serde_json::json;

use crate::common::gather::AllGather;
use crate::common::{self, Failure, Operation, Row};
use crate::forms::Clock;
use crate::sums::{AllReduce, Operands, ReduceScatter};
use crate::{Args, PRODUCTS, Timed, Timing, append, verify};

/// Calls in a row whose time on the host is taken. They are few enough for the device's queues.
const CALLS: usize = 12;

/// For `map_err`: the driver, cuBLASLt or NCCL refused `action`.
fn refused<E: Debug>(action: &str) -> impl FnOnce(E) -> Error {
    move |reason| Error::System {
        rank: None,
        action: action.into(),
        reason: format!("{reason:?}"),
    }
}

/// The base of configurations whose kernel is still to be chosen.
const ANY_TILE: TileShape = TileShape::new(128, 128, 64);

/// A way to move rows.
pub const fn way(route: Route, chunking: Chunking) -> Config {
    Config::new(ANY_TILE, chunking, route)
}

/// An operation, and the baselines that it is timed beside.
pub trait OnGpus<T: Half>: Operation<Cuda, T> {
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
}

impl<T: Half> Clock<Cuda, T> for Instruments {
    fn new(group: &Group<Cuda>) -> Result<Instruments> {
        Instruments::new(group)
    }

    fn time(&self, run: impl FnOnce() -> Result<()>) -> Result<f64> {
        clock::bind(&self.timer.group)?;
        self.timer.time(run)
    }

    fn peer<'a>(
        &'a self,
        a: &'a Matrix<Cuda, T>,
        b: &'a Matrix<Cuda, T>,
    ) -> Result<Option<Box<dyn Fn() -> Result<()> + 'a>>> {
        clock::bind(&self.timer.group)?;
        let ([m, k], [n, _]) = (a.shape(), b.shape());
        let pitch = n.next_multiple_of(8);
        let out = Scratch::new(m * pitch * size_of::<T>())?;
        let to = Place {
            ptr: out.ptr(),
            pitch,
        };
        let places = [a, b].map(Place::of);
        let [a, b] = places;
        let mut product = Product::new::<T>(&self.cublaslt, a, b, to, [m, n, k])?;
        product.tune(&self.timer)?;
        Ok(Some(Box::new(move || {
            let _ = &out;
            product.run(self.timer.stream)
        })))
    }
}

/// An operation by cuBLASLt and NCCL, in the benchmark's own memory.
pub struct Peers {
    product: Product,
    communication: Communication,
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

    /// Enqueues one after the other on the stream of `timer`.
    fn run(&self, nccl: &Nccl, timer: &Timer) -> Result<()> {
        match self.communication.collective {
            Collective::Gather => {
                nccl.run(&self.communication, timer.stream)?;
                self.product.run(timer.stream)
            }
            _ => {
                self.product.run(timer.stream)?;
                nccl.run(&self.communication, timer.stream)
            }
        }
    }
}

impl<T: Half> OnGpus<T> for AllGather<Cuda, T> {
    fn peers(&mut self, instruments: &Instruments, prepared: &Self::Prepared) -> Result<Peers> {
        let group = &instruments.timer.group;
        let ([m, k], [n, _]) = (self.a.shape(), self.b.shape());
        let (own, row) = (self.a.rows(), k * size_of::<T>());
        // NCCL gathers equal shards only. If the rows don't divide evenly, each rank sends as many as the longest shard
        // has.
        let (longest, world) = (m.div_ceil(group.world_size()), group.world_size());
        let shard = Scratch::new(longest * row)?;
        let gathered = Scratch::new(world * longest * row)?;
        let pitch = n.next_multiple_of(8);
        let out = Scratch::new(m * pitch * size_of::<T>())?;
        // cuBLASLt's products read the gathered rows, like gemmesh's own.
        prepared.gather(&self.a)?;
        group.synchronize()?;
        let a = self.a.as_device_ptr();
        // SAFETY: one holds a shard and the other M rows, as `a` does, which nobody writes now.
        unsafe {
            shard.copy_from(a + (own.start * row) as u64, own.len() * row)?;
            gathered.copy_from(a, m * row)?;
        }
        let a = Place {
            ptr: gathered.ptr(),
            pitch: k,
        };
        let b = Place::of(&self.b);
        let to = Place {
            ptr: out.ptr(),
            pitch,
        };
        Ok(Peers {
            product: Product::new::<T>(&instruments.cublaslt, a, b, to, [m, n, k])?,
            communication: Communication {
                collective: Collective::Gather,
                dtype: T::DTYPE,
                from: shard,
                to: gathered,
                count: longest * k,
            },
            _out: Some(out),
        })
    }

    fn copy(&mut self, prepared: &Self::Prepared) -> Result<()> {
        // SAFETY: ranks are timed from the point where their streams are aligned, and nobody writes `a` during the
        // copies.
        unsafe { prepared.copy(&self.a) }
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

impl<T: Half> Operands<Cuda, T> {
    fn peers(&self, instruments: &Instruments, collective: Collective) -> Result<Peers> {
        let shape = self.shape();
        let ([m, n, _], world) = (shape, self.group.world_size());
        // NCCL scatters equal parts only. If the rows don't divide evenly, each rank gets as many as the longest part
        // has.
        let longest = m.div_ceil(world);
        let count = match collective {
            Collective::AllReduce => m * n,
            _ => longest * n,
        };
        let from = Scratch::new(world * longest * n * size_of::<T>())?;
        let to = Scratch::new(count * size_of::<T>())?;
        let partial = Place {
            ptr: from.ptr(),
            pitch: n,
        };
        let [a, b] = [&self.a, &self.b].map(Place::of);
        Ok(Peers {
            product: Product::new::<T>(&instruments.cublaslt, a, b, partial, shape)?,
            communication: Communication {
                collective,
                dtype: T::DTYPE,
                from,
                to,
                count,
            },
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

impl<T: Half> OnGpus<T> for ReduceScatter<Cuda, T> {
    fn peers(&mut self, instruments: &Instruments, _: &Self::Prepared) -> Result<Peers> {
        self.operands.peers(instruments, Collective::ReduceScatter)
    }

    fn copy(&mut self, prepared: &Self::Prepared) -> Result<()> {
        // SAFETY: ranks are timed from the point where their streams are aligned, and nobody makes partials during the
        // copies.
        unsafe { prepared.copy() }
    }

    fn ways() -> Vec<(Variant, Config)> {
        ways_of_sums(&[(1, 1), (1, 2), (1, 3), (1, 4), (1, 8)])
    }
}

impl<T: Half> OnGpus<T> for AllReduce<Cuda, T> {
    fn peers(&mut self, instruments: &Instruments, _: &Self::Prepared) -> Result<Peers> {
        self.operands.peers(instruments, Collective::AllReduce)
    }

    fn copy(&mut self, prepared: &Self::Prepared) -> Result<()> {
        // SAFETY: as above.
        unsafe { prepared.copy(&mut self.out) }
    }

    fn ways() -> Vec<(Variant, Config)> {
        ways_of_sums(&[(1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (4, 2), (8, 1)])
    }
}

/// The variants that are timed on the device.
#[derive(Clone, Copy)]
enum Measured {
    Cublaslt,
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
    const ALL: [Measured; 9] = [
        Measured::Cublaslt,
        Measured::Matmul,
        Measured::Nccl,
        Measured::Collective,
        Measured::Peers,
        Measured::Sequential,
        Measured::Fused,
        Measured::Graph,
        Measured::Ideal,
    ];

    fn row<T: Half, O: OnGpus<T>>(self, peers: &Peers, time: Option<f64>) -> Row {
        let collective = O::COLLECTIVE;
        let (name, key) = match self {
            Measured::Cublaslt => ("cuBLASLt alone".into(), "cublaslt_us".into()),
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
fn captured<T: Half, O: OnGpus<T>>(
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
fn rows_of_host<T: Half, O: OnGpus<T>>(
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
        Row::new("host, a fused call", "host_us", Some(all)),
        Row::new("host, without its functions", "host_library_us", library),
    ])
}

impl<T: Half, O: OnGpus<T>> Timed<Cuda, T> for O {
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
        let mut peers = self.peers(instruments, prepared)?;
        peers.product.tune(timer)?;
        let graph = captured(self, prepared, timer)?;
        let can = |variant| match variant {
            Measured::Nccl | Measured::Peers => nccl.is_some(),
            Measured::Graph => graph.is_some(),
            _ => true,
        };
        let run = |variant| match variant {
            Measured::Cublaslt => peers.product.run(timer.stream),
            Measured::Matmul => self.multiply(prepared),
            Measured::Nccl => nccl
                .iter()
                .try_for_each(|nccl| nccl.run(&peers.communication, timer.stream)),
            Measured::Collective => self.communicate(prepared),
            Measured::Peers => nccl.iter().try_for_each(|nccl| peers.run(nccl, timer)),
            Measured::Sequential => self.run_in_sequence(prepared),
            Measured::Fused => self.run(prepared),
            Measured::Graph => graph
                .iter()
                .try_for_each(|graph| graph.launch(timer.stream)),
            Measured::Ideal => side.run(
                timer,
                |stream| peers.product.run(stream),
                || self.copy(prepared),
            ),
        };
        let there: Vec<Measured> = Measured::ALL.into_iter().filter(|&one| can(one)).collect();
        let samples = samples(timer, args, &there, run, progress)?;
        let times = common::medians(&common::slowest(group, &samples)?);
        let host = rows_of_host(self, prepared, timer, args.iters.min(5))?;
        let time = |variant: Measured| can(variant).then_some(times[variant as usize]);
        let rows = Measured::ALL.map(|variant| variant.row::<T, O>(&peers, time(variant)));
        let shared = "NCCL's rows are left out: it needs a GPU for each rank, and ranks share one.";
        Ok(Timing {
            rows: rows.into_iter().chain(host).collect(),
            more: json!({ "gpu": group.device_name(), "cuda_driver": group.driver_version()? }),
            baseline: time(Measured::Peers).map(|time| (peers.name(), time)),
            fused: times[Measured::Fused as usize],
            ideal: times[Measured::Ideal as usize],
            note: nccl.is_none().then_some(shared),
        })
    }

    fn calibrate(group: &Group<Cuda>, path: &Path) -> Result<(), Failure> {
        calibrate::calibrate::<T>(group, path)
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
fn fastest<T: Half, O: OnGpus<T>>(group: &Group<Cuda>, operation: &mut O) -> Result<(Config, f64)> {
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
                // A different kernel cannot use this route either.
                Err(Error::NoRoute { .. }) => break,
                // Its low-latency kernel is for fewer rows.
                Err(Error::NoKernel { .. }) => continue,
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
