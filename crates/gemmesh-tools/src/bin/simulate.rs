//! Predicts products and collectives over H200s of several hosts: how much of the network is hidden, beside NCCL's
//! collective and the product one after the other. It needs no GPU.
//!
//! ```sh
//! export GEMMESH_NO_KERNELS=1    # nothing has to compile kernels
//! cargo run --release -p gemmesh-tools --features cuda --bin simulate -- --model 70b --hosts 2 --network 400
//! ```
//!
//! The library plans the schedules of all ranks, and its model of the GPU plays them through. docs/hosts.md says how far it
//! is right on one host, and on two GPUs as two hosts. What it says of several machines was not measured.

use std::fmt;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, ValueEnum, value_parser};
use comfy_table::Table;
use comfy_table::presets::ASCII_MARKDOWN;
use gemmesh::Result;
use gemmesh::schedule::Operation;
use gemmesh_tools::player::{Played, SimulatedNetwork, play_operation};

#[derive(Parser)]
struct Args {
    /// The operation. A gather and its product are a column-parallel layer of the MLP, a product and its sum a
    /// row-parallel one. A collective without a product moves the layer's rows.
    #[arg(long, value_enum, default_value_t = Call::AllGatherMatmul)]
    operation: Call,
    /// The model, of whose MLP the layer is.
    #[arg(long, value_enum, default_value_t = Model::B70)]
    model: Model,
    /// The number of hosts.
    #[arg(long, default_value_t = 2)]
    hosts: usize,
    /// GPUs of a host. There may be 1,024 in all. A group has at most 64.
    #[arg(long, default_value_t = 8)]
    gpus: usize,
    /// The network of each GPU, one way, in Gb/s.
    #[arg(long, default_value_t = 400.0, value_parser = above_zero)]
    network: f64,
    /// The network's latency in microseconds.
    #[arg(long, default_value_t = 10.0, value_parser = above_zero)]
    latency: f64,
    /// Rows of all ranks, up to 2^20: what each rank does is kept.
    #[arg(long = "rows", num_args = 1.., default_values_t = [2048, 8192, 32768],
        value_parser = value_parser!(u32).range(1..=1 << 20))]
    rows: Vec<u32>,
    /// Draws the last of these products, as far as the first host goes.
    #[arg(long)]
    svg: Option<PathBuf>,
}

#[derive(Clone, Copy, ValueEnum)]
enum Call {
    AllGatherMatmul,
    MatmulReduceScatter,
    MatmulAllReduce,
    AllGather,
    ReduceScatter,
    AllReduce,
}

#[derive(Clone, Copy, ValueEnum)]
enum Model {
    #[value(name = "8b")]
    B8,
    #[value(name = "70b")]
    B70,
    #[value(name = "405b")]
    B405,
}

impl Model {
    /// Features of the MLP's hidden layer, and of its input.
    fn features(self) -> [usize; 2] {
        match self {
            Model::B8 => [14336, 4096],
            Model::B70 => [28672, 8192],
            Model::B405 => [53248, 16384],
        }
    }
}

impl Call {
    fn operation(self) -> Operation {
        match self {
            Call::AllGatherMatmul => Operation::ALL_GATHER_MATMUL,
            Call::MatmulReduceScatter => Operation::MATMUL_REDUCE_SCATTER,
            Call::MatmulAllReduce => Operation::MATMUL_ALL_REDUCE,
            Call::AllGather => Operation::ALL_GATHER,
            Call::ReduceScatter => Operation::REDUCE_SCATTER,
            Call::AllReduce => Operation::ALL_REDUCE,
        }
    }

    /// M, N and K of the layer of one rank, if so many share it. Without a product N is 0.
    fn shape(self, model: Model, m: usize, world: usize) -> [usize; 3] {
        let [hidden, input] = model.features();
        let share = hidden.div_ceil(world.max(1));
        match self {
            Call::AllGatherMatmul => [m, share, input],
            Call::MatmulReduceScatter | Call::MatmulAllReduce => [m, input, share],
            Call::AllGather | Call::ReduceScatter | Call::AllReduce => [m, 0, input],
        }
    }

    /// True if all ranks get a sum.
    fn is_all_reduce(self) -> bool {
        matches!(self, Call::MatmulAllReduce | Call::AllReduce)
    }
}

fn above_zero(text: &str) -> std::result::Result<f64, String> {
    match text.parse() {
        Ok(number) if number > 0.0 && number < f64::INFINITY => Ok(number),
        _ => Err("it must be a number above 0".into()),
    }
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<()> {
    let Args {
        operation,
        hosts,
        gpus,
        network,
        ..
    } = *args;
    let mut table = Table::new();
    table.load_style(ASCII_MARKDOWN).set_header([
        "M×N×K of a rank",
        "product",
        "NCCL's ring",
        "NCCL's tree",
        "one after the other",
        "fused",
        "exposed",
        "on one host, fused",
    ]);
    let mut last = None;
    for &m in &args.rows {
        let row = Row::of(args, m as usize)?;
        table.add_row(row.cells());
        last = Some(row);
    }
    let name = operation.operation().name();
    println!(
        "{name}, {hosts} hosts of {gpus} H200s, {network} Gb/s a GPU, in microseconds. Several machines were not measured.\n{table}"
    );
    match (&args.svg, last) {
        (Some(path), Some(row)) => {
            let mut timeline = row.played.timeline;
            timeline.traces.truncate(gpus);
            timeline.write_svg(path, &format!("{name} {}", row.shape))
        }
        _ => Ok(()),
    }
}

/// A layer in so many rows: its times on all hosts and on one.
struct Row {
    shape: Shape,
    played: Played,
    on_one: f64,
    ring: f64,
    tree: Option<f64>,
}

struct Shape([usize; 3]);

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self.0 {
            [m, 0, k] => write!(f, "{m}×{k}"),
            [m, n, k] => write!(f, "{m}×{n}×{k}"),
        }
    }
}

impl Row {
    fn of(args: &Args, m: usize) -> Result<Row> {
        let network = SimulatedNetwork {
            bytes: args.network / 8.0 * 1e3,
            latency: args.latency,
        };
        let Args {
            operation,
            hosts,
            gpus,
            ..
        } = *args;
        let played = |hosts: usize| {
            let shape = operation.shape(args.model, m, hosts.saturating_mul(gpus));
            let played = play_operation(operation.operation(), shape, [hosts, gpus], &network);
            Ok((Shape(shape), played?))
        };
        let (_, on_one) = played(1)?;
        let (shape, played) = played(hosts)?;
        let [_, input] = args.model.features();
        let nccl = Nccl {
            bytes: (m * input * 2) as f64,
            hosts,
            gpus,
            network,
        };
        Ok(Row {
            shape,
            on_one: on_one.micros,
            played,
            ring: match operation.is_all_reduce() {
                true => nccl.ring_all_reduce(),
                false => nccl.ring(),
            },
            tree: operation.is_all_reduce().then(|| nccl.tree_all_reduce()),
        })
    }

    fn cells(&self) -> Vec<String> {
        let Played { micros, alone, .. } = self.played;
        let nccl = self.tree.map_or(self.ring, |tree| tree.min(self.ring));
        let times = [
            Some(alone),
            Some(self.ring),
            self.tree,
            Some(nccl + alone),
            Some(micros),
            Some(micros - alone),
            Some(self.on_one),
        ];
        let words = |time: Option<f64>| time.map_or("-".into(), |micros| format!("{micros:.0}"));
        let times = times.into_iter().map(words);
        std::iter::once(self.shape.to_string())
            .chain(times)
            .collect()
    }
}

/// A collective of NCCL, by the formulas and the latencies of its src/graph/tuning.cc (2.30, the simple protocol), in
/// microseconds. It has no tree for gathers and reduce-scatters.
struct Nccl {
    /// Bytes of the whole matrix.
    bytes: f64,
    hosts: usize,
    gpus: usize,
    network: SimulatedNetwork,
}

impl Nccl {
    /// What a collective takes at least.
    const BASE: f64 = 8.4;
    /// A step between hosts.
    const FAR: f64 = 14.0;

    /// A gather, or a reduce-scatter.
    fn ring(&self) -> f64 {
        Self::BASE + self.once_around()
    }

    /// Both. Over several hosts its latency counts 1.4 times.
    fn ring_all_reduce(&self) -> f64 {
        let latency = Self::BASE + 2.0 * self.latency_around();
        let plateau = if self.hosts > 1 { 1.4 } else { 1.0 };
        plateau * latency + 2.0 * (self.once_around() - self.latency_around())
    }

    fn tree_all_reduce(&self) -> f64 {
        /// A step between GPUs of a host.
        const NEAR: f64 = 4.0;
        /// The part of the links' rate that trees reach.
        const REACHED: f64 = 0.92;
        let up = (self.gpus - 1) as f64 * NEAR + f64::from(self.hosts.ilog2()) * Self::FAR;
        let reached = REACHED * tree_correction(self.bytes) * self.link();
        Self::BASE + 2.0 * up + 2.0 * self.bytes / reached
    }

    fn once_around(&self) -> f64 {
        let world = (self.hosts * self.gpus) as f64;
        self.latency_around() + self.bytes * (world - 1.0) / world / self.link()
    }

    fn latency_around(&self) -> f64 {
        /// A step between GPUs of a host.
        const NEAR: f64 = 3.4;
        let between = self.hosts - 1;
        let within = self.hosts * self.gpus - 1 - between;
        NEAR * within as f64 + Self::FAR * between as f64
    }

    /// Bytes that go around in a microsecond: the slower of a host's cards and its NVLink.
    fn link(&self) -> f64 {
        /// About what NCCL's large gathers on four H200s reach.
        const NVLINK: f64 = 290e3;
        match self.hosts {
            1 => NVLINK,
            _ => NVLINK.min(self.gpus as f64 * self.network.bytes),
        }
    }
}

/// The part of their rate that trees reach with so many bytes: tuning.cc's treeCorrectionFactor, by powers of two from 64
/// on.
fn tree_correction(bytes: f64) -> f64 {
    const FACTORS: [f64; 24] = [
        0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.6, 0.7, 0.8,
        0.7, 0.7, 0.8, 0.9, 0.9, 0.9,
    ];
    let index = (bytes / 64.0).max(1.0).log2() as usize;
    FACTORS.get(index).copied().unwrap_or(1.0)
}
