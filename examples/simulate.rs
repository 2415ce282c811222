//! Predicts products of gathered rows on H200s of several hosts: how much of the network is hidden, beside NCCL's gather
//! and the product one after the other. It needs no GPU.
//!
//! ```sh
//! export GEMMESH_NO_KERNELS=1    # nothing has to compile kernels
//! cargo run --release --features cuda --example simulate -- --model 70b --hosts 2 --network 400
//! ```
//!
//! The library plans the schedules of all ranks, and its model of the GPU plays them through. On one host it is right
//! within 8 % for the models' prefills (docs/hosts.md). What it says of several hosts was not measured.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, ValueEnum, value_parser};
use comfy_table::Table;
use comfy_table::presets::ASCII_MARKDOWN;
use gemmesh::Result;
use gemmesh::simulation::{Played, SimulatedNetwork, play_all_gather_matmul};

#[derive(Parser)]
struct Args {
    /// The model: a column-parallel layer of its MLP.
    #[arg(long, value_enum, default_value_t = Model::B70)]
    model: Model,
    /// The number of hosts.
    #[arg(long, default_value_t = 2)]
    hosts: usize,
    /// GPUs of a host. A group has at most 64 in all.
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
    /// Draws the last of these products.
    #[arg(long)]
    svg: Option<PathBuf>,
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
    let network = SimulatedNetwork {
        bytes: args.network / 8.0 * 1e3,
        latency: args.latency,
    };
    let mut table = Table::new();
    table.load_style(ASCII_MARKDOWN).set_header([
        "M×N×K of a rank",
        "product",
        "NCCL's gather",
        "one after the other",
        "fused",
        "exposed",
        "on one host, fused",
    ]);
    let mut last = None;
    for m in args.rows.iter().map(|&rows| rows as usize) {
        let (_, on_one) = played(args, m, 1, &network)?;
        let ([m, n, k], played) = played(args, m, args.hosts, &network)?;
        let name = format!("{m}×{n}×{k}");
        let gather = nccl_gather((m * k * 2) as f64, [args.hosts, args.gpus], &network);
        let times = [
            played.alone,
            gather,
            gather + played.alone,
            played.micros,
            played.micros - played.alone,
            on_one.micros,
        ];
        let times = times.map(|micros| format!("{micros:.0}"));
        table.add_row([name.clone()].into_iter().chain(times));
        last = Some((name, played));
    }
    println!(
        "{} hosts of {} H200s, {} Gb/s a GPU, in microseconds. Several hosts were not measured.\n{table}",
        args.hosts, args.gpus, args.network
    );
    match (&args.svg, last) {
        (Some(path), Some((title, played))) => played.timeline.write_svg(path, &title),
        _ => Ok(()),
    }
}

/// M, N and K of a layer that so many hosts share, and its time.
fn played(
    args: &Args,
    m: usize,
    hosts: usize,
    network: &SimulatedNetwork,
) -> Result<([usize; 3], Played)> {
    let [hidden, k] = args.model.features();
    let world = hosts.saturating_mul(args.gpus).max(1);
    let shape = [m, hidden.div_ceil(world), k];
    let played = play_all_gather_matmul(shape, [hosts, args.gpus], network)?;
    Ok((shape, played))
}

/// NCCL's gather of so many bytes in all, by rings, in microseconds: the latencies of its tuning.cc (the simple
/// protocol), and the slower of a host's cards and its NVLink. It has no tree for gathers.
fn nccl_gather(bytes: f64, [hosts, gpus]: [usize; 2], network: &SimulatedNetwork) -> f64 {
    /// What a gather takes, a step between GPUs of a host, and a step between hosts.
    const LATENCIES: [f64; 3] = [8.4, 3.4, 14.0];
    /// Bytes of NVLink in a microsecond: about what NCCL's large gathers on four H200s reach.
    const NVLINK: f64 = 290e3;
    let (world, between) = (hosts * gpus, hosts - 1);
    let within = world - 1 - between;
    let [once, near, far] = LATENCIES;
    let latency = once + near * within as f64 + far * between as f64;
    let link = match between {
        0 => NVLINK,
        _ => NVLINK.min(gpus as f64 * network.bytes),
    };
    latency + bytes * (world - 1) as f64 / world as f64 / link
}
