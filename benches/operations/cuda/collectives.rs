//! Collectives without a product, beside NCCL's.

use std::path::Path;

use gemmesh::{
    Cuda, DType, Group, Matrix, Result, ShardedMatrix, all_gather, all_reduce, all_to_all, bf16,
    broadcast, reduce_scatter,
};
use serde_json::json;

use super::clock::{self, Timer};
use super::memory::Scratch;
use super::peers::{Collective, Communication, Nccl};
use crate::common::{self, Failure, random};
use crate::{append, commit, unix_time};

/// Bytes of a rank: of its rows if they are gathered or scattered, of all that it sends in an all-to-all, of its
/// addend, or of all rows that are broadcast.
const BYTES: [usize; 8] = [
    1 << 10,
    16 << 10,
    128 << 10,
    1 << 20,
    4 << 20,
    16 << 20,
    64 << 20,
    256 << 20,
];
/// Elements of a row.
const COLUMNS: usize = 256;
const ALL: [(&str, Collective); 5] = [
    ("all_gather", Collective::Gather),
    ("reduce_scatter", Collective::ReduceScatter),
    ("all_reduce", Collective::AllReduce),
    ("all_to_all", Collective::AllToAll),
    ("broadcast", Collective::Broadcast),
];

/// One collective, and its matrices.
struct Exchange {
    collective: Collective,
    /// This rank's input.
    input: Matrix<Cuda, bf16>,
    own: Matrix<Cuda, bf16>,
    shared: ShardedMatrix<Cuda, bf16>,
}

impl Exchange {
    /// Makes the matrices of random numbers, which differ between ranks.
    fn new(group: &Group<Cuda>, collective: Collective, bytes: usize) -> Result<Exchange> {
        let world = group.world_size();
        let rows = bytes / (COLUMNS * size_of::<bf16>());
        // The rows of the input, of this rank's result, and of the sharded matrix.
        let [input, own, shared] = match collective {
            Collective::Gather => [1, 1, world * rows],
            Collective::ReduceScatter => [world * rows, rows, world],
            Collective::AllReduce | Collective::AllToAll => [rows, 1, rows],
            Collective::Broadcast => [1, 1, rows],
        };
        let mut exchange = Exchange {
            collective,
            input: group.upload(&values(group.rank(), input), input, COLUMNS)?,
            own: group.zeros(own, COLUMNS)?,
            shared: group.sharded(shared, COLUMNS)?,
        };
        let poison = vec![bf16::NAN; shared * COLUMNS];
        exchange.shared.write(0, &poison)?;
        let given = values(group.rank(), shared);
        let rows = match collective {
            Collective::Broadcast => 0..shared,
            _ => exchange.shared.rows(),
        };
        let given = &given[rows.start * COLUMNS..rows.end * COLUMNS];
        exchange.shared.write(rows.start, given)?;
        Ok(exchange)
    }

    fn run(&mut self) -> Result<()> {
        match self.collective {
            Collective::Gather => all_gather(&self.shared),
            Collective::ReduceScatter => reduce_scatter(&self.input, &mut self.own),
            Collective::AllReduce => all_reduce(&self.input, &mut self.shared),
            Collective::AllToAll => all_to_all(&self.input, &mut self.shared),
            Collective::Broadcast => broadcast(&mut self.shared, 0),
        }
    }

    /// True if a run has brought the other ranks' rows, bit for bit.
    fn check(&mut self, group: &Group<Cuda>) -> Result<bool> {
        let (rank, world) = (group.rank(), group.world_size());
        let [input, _] = self.input.shape();
        let sums = || {
            let addends: Vec<Vec<bf16>> = (0..world).map(|rank| values(rank, input)).collect();
            let sum = |i: usize| {
                let addends = addends.iter().map(|addend| addend[i].to_f32());
                bf16::from_f32(addends.reduce(|sum, addend| sum + addend).unwrap_or(0.0))
            };
            (0..input * COLUMNS).map(sum).collect::<Vec<_>>()
        };
        let [rows, _] = self.shared.shape();
        let of_each = |of: &dyn Fn(usize, Vec<bf16>) -> Vec<bf16>, rows: usize| {
            let each = (0..world).map(|rank| of(rank, values(rank, rows)));
            each.collect::<Vec<_>>().concat()
        };
        let (found, expected) = match self.collective {
            Collective::Gather => {
                let part = |rank: usize, values: Vec<bf16>| {
                    let of = self.shared.rows_of(rank);
                    values[of.start * COLUMNS..of.end * COLUMNS].to_vec()
                };
                let expected = of_each(&part, rows);
                (self.shared.to_vec()?, expected)
            }
            Collective::ReduceScatter => {
                let own = input / world * COLUMNS;
                let sums = sums();
                (
                    self.own.to_vec()?,
                    sums[rank * own..(rank + 1) * own].to_vec(),
                )
            }
            Collective::AllReduce => (self.shared.to_vec()?, sums()),
            Collective::AllToAll => {
                let block = input / world * COLUMNS;
                let part =
                    |_: usize, values: Vec<bf16>| values[rank * block..(rank + 1) * block].to_vec();
                (self.shared.to_vec()?, of_each(&part, input))
            }
            Collective::Broadcast => (self.shared.to_vec()?, values(0, rows)),
        };
        let bits = |values: &[bf16]| -> Vec<u8> { bytemuck::cast_slice(values).to_vec() };
        Ok(bits(&found) == bits(&expected))
    }

    /// The same collective by NCCL, in the benchmark's own memory.
    fn communication(&self, world: usize, bytes: usize) -> Result<Communication> {
        let count = bytes / size_of::<bf16>();
        let (from, to, count) = match self.collective {
            Collective::Gather => (bytes, world * bytes, count),
            Collective::ReduceScatter => (world * bytes, bytes, count),
            Collective::AllToAll => (bytes, bytes, count / world),
            Collective::AllReduce | Collective::Broadcast => (bytes, bytes, count),
        };
        Ok(Communication {
            collective: self.collective,
            dtype: DType::Bf16,
            from: Scratch::new(from)?,
            to: Scratch::new(to)?,
            count,
        })
    }
}

/// The rows of rank `rank`.
fn values(rank: usize, rows: usize) -> Vec<bf16> {
    random(rows * COLUMNS, 1 + rank as u64)
}

/// Times all collectives, from a kilobyte for each rank on. Collective.
pub fn run(group: &Group<Cuda>, rounds: [usize; 2], json: Option<&Path>) -> Result<(), Failure> {
    let [warmup, iters] = rounds;
    clock::bind(group)?;
    let (timer, nccl) = (Timer::new(group)?, Nccl::new(group)?);
    let world = group.world_size();
    if group.rank() == 0 {
        println!(
            "Collectives, {world} ranks, microseconds: medians of {iters} rounds of the slowest rank.\n"
        );
        println!("| | bytes a rank | gemmesh | NCCL | NCCL / gemmesh |\n|---|--:|--:|--:|--:|");
    }
    for (name, collective) in ALL {
        for bytes in BYTES {
            let mut exchange = Exchange::new(group, collective, bytes)?;
            let communication = exchange.communication(world, bytes)?;
            exchange.run()?;
            if !exchange.check(group)? {
                return Err(Failure::Usage(
                    "a collective brought other bits than the ranks had",
                ));
            }
            let mut samples = Vec::new();
            for round in 0..warmup + iters {
                let own = timer.time(|| exchange.run())?;
                let theirs = timer.time(|| nccl.run(&communication, timer.stream))?;
                if round >= warmup {
                    samples.push([own, theirs]);
                }
            }
            let [own, theirs] = common::medians(&common::slowest(group, &samples)?);
            if group.rank() > 0 {
                continue;
            }
            println!(
                "| {name} | {bytes} | {own:.1} | {theirs:.1} | {:.2} |",
                theirs / own
            );
            if let Some(path) = json {
                let line = json!({
                    "op": name, "backend": "cuda", "world": world, "bytes": bytes, "dtype": "bf16", "ok": true,
                    "commit": commit(), "iters": iters, "unix_time": unix_time(), "gpu": group.device_name(),
                    "us": own, "nccl_us": theirs,
                });
                append(path, &line.to_string())?;
            }
        }
    }
    Ok(())
}
