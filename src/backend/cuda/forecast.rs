//! How long an operation should take, from its plan and what H200s were measured to do. It need not be right, only
//! rank configurations well: where it does not, a measured table takes its place.

use crate::protocol::{Config, Plan, Transport};

/// Floating-point operations a microsecond on one multiprocessor, with the widest tiles.
const RATE: f64 = 6.0e6;
/// Microseconds until a kernel's first product, and of each tile's epilogue that no other tile hides.
const KERNEL_START: f64 = 5.0;
const EPILOGUE: f64 = 1.4;

/// Microseconds from the beginning of a fused operation until its last tile.
pub fn fused(plan: &Plan, multiprocessors: usize) -> f64 {
    let (config, problem) = (plan.config(), plan.problem());
    let arrivals = arrivals(plan);
    let clusters = (multiprocessors / config.cluster).max(1);
    let flops = 2.0 * (config.tile_m * config.tile_n * problem.k()) as f64;
    let tile = EPILOGUE + flops / (RATE * efficiency(config));
    let mut free = vec![KERNEL_START; clusters];
    for (index, entry) in plan.tiles().iter().enumerate() {
        // As the kernel does it: the clusters take entries in turn.
        let cluster = &mut free[index % clusters];
        let ready = entry.flags().map(|flag| arrivals[flag]);
        *cluster = ready.fold(*cluster, f64::max) + tile;
    }
    free.into_iter().fold(0.0, f64::max)
}

/// By flag: when its rows are there.
fn arrivals(plan: &Plan) -> Vec<f64> {
    // Microseconds before the first chunk and of each chunk's start and flag, bytes a microsecond.
    let (first, each, rate) = match plan.config().transport {
        Transport::Pull => (14.0, 8.0, 375e3),
        Transport::Push => (12.0, 5.0, 375e3),
        Transport::Store => (10.0, 0.5, 310e3),
    };
    let row_bytes = plan.problem().k() * size_of::<u16>();
    let mut arrivals = vec![0.0; plan.pulls().len()];
    let mut time = first;
    for pull in plan.pulls() {
        time += each + (pull.rows.len() * row_bytes) as f64 / rate;
        arrivals[pull.flag] = time;
    }
    arrivals
}

/// How much of the arithmetic rate of the widest tile a tile shape reaches, measured on an H200 at full waves.
fn efficiency(config: &Config) -> f64 {
    match (config.tile_n, config.cluster) {
        (256.., 2) => 1.0,
        (224.., 2) => 0.99,
        (208.., 2) => 0.98,
        (192.., 2) => 0.97,
        (128.., 2) => 0.9,
        (256.., _) => 0.95,
        _ => 0.5,
    }
}
