//! Compares a group's product with float64, and times all-gathers, on every backend.

use std::time::Instant;

use gemmesh::products::Prepared;
use gemmesh::{
    AllGatherMatmul, Backend, Builder, Group, Host, ShardedMatrix, all_gather, all_gather_matmul,
    bf16,
};

use super::common::gather::AllGather;
use super::common::{self, Failure, Operation};
use super::report::{HostGroup, Product, Speed};

/// M, N and K of the product. All its elements are compared.
const SHAPE: [usize; 3] = [512, 128, 512];
/// Bytes of each rank, to measure latency.
const FEW: usize = 16;
/// Elements of a row, to measure bandwidth.
const COLUMNS: usize = 4096;
/// The number of times that are taken. The median counts.
const ROUNDS: usize = 9;

/// How an all-gather is done.
pub enum Way {
    /// By the backend's copies. Each rank pulls.
    Copies,
    /// By the route that the library chooses. On GPUs it stores so few bytes.
    #[cfg(feature = "cuda")]
    Chosen,
}

/// Ranks of the host backend, as threads of this process.
pub fn host(builder: Builder<Host>, ranks: usize) -> Result<HostGroup, Failure> {
    const BYTES: usize = 8 << 20;
    let measured = builder.threads(ranks, |group| {
        let product = product(&group)?;
        let copies = gather(&group, Way::Copies, BYTES)?;
        Ok::<_, Failure>((product, copies))
    })?;
    let (product, copies) = measured.into_iter().next().ok_or(NOTHING)?;
    Ok(HostGroup {
        ranks,
        product,
        copies,
    })
}

const NOTHING: Failure = Failure::Usage("there is no rank");

/// Compares a product of all ranks with float64. Collective.
pub fn product<B: Backend>(group: &Group<B>) -> Result<Product, Failure> {
    let mut case = AllGather::<B, bf16>::random(group, SHAPE, 1)?;
    case.poison()?;
    all_gather_matmul(&case.a, &case.b, &mut case.out)?;
    group.synchronize()?;
    let check = case.check(usize::MAX)?.everywhere(group)?;
    match check.ok() {
        true => Ok(Product {
            elements: check.elements,
            worst: check.worst,
        }),
        false => Err(Failure::Wrong(check)),
    }
}

/// Times all-gathers of few and of many bytes, each of which is verified first. Collective.
pub fn gather<B: Backend>(group: &Group<B>, way: Way, bytes: usize) -> Result<Speed, Failure> {
    let few = Gather::new(group, &way, FEW, FEW / size_of::<bf16>())?;
    let latency = few.time(group, 20)?;
    drop(few);
    let many = Gather::new(group, &way, bytes, COLUMNS)?;
    let time = many.time(group, 2)?;
    let from_others = (group.world_size() - 1) * bytes;
    Ok(Speed {
        latency_us: latency * 1e6,
        gb_per_s: from_others as f64 / time / 1e9,
        bytes,
    })
}

/// An all-gather of random numbers.
struct Gather<B: Backend> {
    matrix: ShardedMatrix<B, bf16>,
    /// The prepared gather, if ranks pull.
    pulls: Option<Prepared<'static, B, bf16>>,
}

impl<B: Backend> Gather<B> {
    /// Makes and verifies a gather in which each rank has `bytes`, in rows of `columns`. Collective.
    fn new(group: &Group<B>, way: &Way, bytes: usize, columns: usize) -> Result<Self, Failure> {
        let rows = bytes / (columns * size_of::<bf16>());
        let (rank, world) = (group.rank(), group.world_size());
        let values = |rank: usize| common::random::<bf16>(rows * columns, 1 + rank as u64);
        let mut matrix = group.sharded(world * rows, columns)?;
        matrix.shard_mut().copy_from_host(&values(rank))?;
        let pulls = match way {
            Way::Copies => Some(AllGatherMatmul::new().prepare(&matrix, 8)?),
            #[cfg(feature = "cuda")]
            Way::Chosen => None,
        };
        let gather = Gather { matrix, pulls };
        gather.run()?;
        group.synchronize()?;
        let bits = |values: Vec<bf16>| values.into_iter().map(bf16::to_bits).collect::<Vec<_>>();
        let expected = (0..world).flat_map(|rank| bits(values(rank)));
        let is_right = bits(gather.matrix.to_vec()?).into_iter().eq(expected);
        // All ranks go on or none does.
        let all = group.all_gather_bytes(&[u8::from(is_right)])?;
        match all.iter().all(|rank| rank == &[1]) {
            true => Ok(gather),
            false => Err(Failure::Usage(
                "an all-gather brought other bits than the ranks had",
            )),
        }
    }

    fn run(&self) -> gemmesh::Result<()> {
        match &self.pulls {
            Some(pulls) => pulls.gather(&self.matrix),
            None => all_gather(&self.matrix),
        }
    }

    /// Seconds of one of `calls` in a row. It is the median, over the rounds, of the slowest rank's time. Collective.
    fn time(&self, group: &Group<B>, calls: usize) -> Result<f64, Failure> {
        let mut samples = Vec::new();
        for round in 0..=ROUNDS {
            group.barrier()?;
            let begin = Instant::now();
            for _ in 0..calls {
                self.run()?;
            }
            group.synchronize()?;
            // The first round warms up.
            if round > 0 {
                samples.push([begin.elapsed().as_secs_f64() / calls as f64]);
            }
        }
        let [median] = common::medians(&common::slowest(group, &samples)?);
        Ok(median)
    }
}
