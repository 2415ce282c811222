//! What groups over several hosts promise on the host backend, whatever the network is.

use gemmesh::elements::{Float, Number};
use gemmesh::pipelines::{AllGatherAndConsume, Chunk, ProduceAndAllToAll, ProduceAndReduceScatter};
use gemmesh::testing::delay_chunks;
use gemmesh::tuning::{Chunking, Route, TileShape};
use gemmesh::{
    Config, Error, Group, Host, Matmul, MatmulAllReduce, MatmulReduceScatter, Matrix, all_gather,
    all_reduce, all_to_all, bf16, broadcast, matmul, reduce_scatter,
};

use crate::support::numbers::{bits, nan, normal};
use crate::support::products::{Case, Placed};
use crate::support::shared::collectives::Produces;
use crate::support::shared::counts;

/// Ranks' hosts, and the rows of each rank. Ranks are not all numbered host by host, and some have no rows.
pub const LAYOUTS: [(&str, &[&[usize]]); 6] = [
    ("aabbcc", &[&[4; 6], &[9, 0, 3, 14, 1, 0]]),
    ("aabb", &[&[16; 4], &[9, 0, 21, 4], &[0, 0, 0, 33]]),
    ("abba", &[&[5, 0, 7, 3], &[0, 11, 0, 0]]),
    ("abcd", &[&[6; 4], &[1, 0, 12, 5]]),
    ("abc", &[&[7; 3], &[0, 13, 2]]),
    ("ab", &[&[8, 8], &[0, 9]]),
];

fn config(route: Route) -> Config {
    Config::new(
        TileShape::new(4, 4, 4).with_group_m(2),
        Chunking::new(2),
        route,
    )
}

/// The bits of products of rows that lie as `rows` says, by each route. They are right.
pub fn products(group: &Group<Host>, rows: &[usize]) -> Vec<Vec<u16>> {
    delay_chunks(Some(11));
    let routes = [Route::Pull, Route::Push, Route::Store].into_iter();
    let products = routes.enumerate().map(|(seed, route)| {
        let case = Case {
            rows: rows.to_vec(),
            n: 9,
            more: 1,
            k: 24,
            bias: true,
            config: Some(config(route)),
            seed: seed as u64 + 1,
            ..Case::default()
        };
        let (b, bias) = case.b::<bf16>(group.rank());
        let a = case.a::<bf16>();
        let mut placed = Placed::new(group, &case, &a, &b, bias.as_deref()).unwrap();
        for _ in 0..5 {
            // No one writes what a neighbour passes on.
            group.barrier().unwrap();
            placed.poison().unwrap();
            placed.fused(case.config).unwrap();
        }
        let (_, out) = placed.read().unwrap();
        case.verify::<Host, bf16>(group).unwrap();
        bits(&out).to_vec()
    });
    products.collect()
}

pub fn gathers_bring_all_rows(group: &Group<Host>, hosts: &str, rows: &[usize]) {
    let (m, k) = (rows.iter().sum(), 10);
    let expected: Vec<bf16> = normal(7, m * k);
    let mut a = group.sharded_rows::<bf16>(rows, k).unwrap();
    let own = a.rows();
    let own = own.start * k..own.end * k;
    for consumes in [false, true] {
        a.poison(bf16::NAN).unwrap();
        a.shard_mut()
            .copy_from_host(&expected[own.clone()])
            .unwrap();
        group.barrier().unwrap();
        let mut come = vec![0; m];
        if consumes {
            let consume = AllGatherAndConsume::new();
            let count = |chunk: Chunk<'_, Host, bf16>| {
                chunk.rows().for_each(|row| come[row] += 1);
                Ok(())
            };
            consume.run(&a, count).unwrap();
            assert!(come.iter().all(|&times| times == 1), "{hosts}: {come:?}");
        } else {
            all_gather(&a).unwrap();
        }
        assert_eq!(
            bits(&a.to_vec().unwrap()),
            bits(&expected),
            "{hosts}, {rows:?}"
        );
        group.barrier().unwrap();
    }
}

pub fn bytes(values: &[bf16]) -> Vec<u8> {
    let values = bits(values).iter();
    values.flat_map(|value| value.to_le_bytes()).collect()
}

/// The sum that `rank` makes of all ranks' values, which are of the type `T`.
pub fn sum_of_hosts<T: Number>(hosts: &str, rank: usize, value: impl Fn(usize) -> f32) -> T {
    let own = hosts.as_bytes()[rank] as char;
    let mut sum = 0.0;
    for host in ('a'..='z').filter(|host| hosts.contains(*host)) {
        let ranks = hosts.char_indices().filter(|(_, its)| *its == host);
        let values = ranks.map(|(rank, _)| value(rank));
        sum = match host == own {
            true => values.fold(sum, |sum, value| sum + value),
            false => sum + T::from_f32(values.sum()).to_f32(),
        };
    }
    T::from_f32(sum)
}

/// Of its own host a rank adds each rank's partial, and of another host their sum, which is rounded. But if all ranks get
/// few sums, each rank adds all partials.
pub fn sums_are_those_of_hosts(group: &Group<Host>, hosts: &str, rows: &[usize]) {
    let m = rows.iter().sum();
    // Two ranks get more whole of a product's partials.
    let more = if group.world_size() == 2 { 4 } else { 1 };
    sums_of_columns(group, hosts, rows, [11, 4]);
    sums_of_columns(group, hosts, rows, [more * columns_of_many(m), 1024]);
}

/// `n`: the columns, and those of a tile.
pub fn sums_of_columns(group: &Group<Host>, hosts: &str, rows: &[usize], [n, tile_n]: [usize; 2]) {
    let tile = |height| TileShape::new(height, tile_n, 4);
    let (rank, world) = (group.rank(), group.world_size());
    let (m, k) = (rows.iter().sum::<usize>(), 12);
    let sent = 2 * m * n.next_multiple_of(16);
    let are_few = match world {
        2 => sent <= 1 << 20,
        _ => are_few(hosts, sent),
    };
    let a = group
        .upload(&normal::<bf16>(rank as u64, m * k), m, k)
        .unwrap();
    let b = group
        .upload(&normal::<bf16>(!rank as u64, n * k), n, k)
        .unwrap();
    let mut partial = group.zeros::<bf16>(m, n).unwrap();
    // The same steps through K give the same bits.
    Matmul::new()
        .config(Config::new(tile(4), Chunking::new(1), Route::Pull))
        .run(&a, &b, &mut partial)
        .unwrap();
    let partial = partial.to_vec().unwrap();
    let partials = group.all_gather_bytes(&bytes(&partial)).unwrap();
    let first = rows[..rank].iter().sum::<usize>() * n;
    let value = |rank: usize, index: usize| {
        let bytes = [partials[rank][2 * index], partials[rank][2 * index + 1]];
        bf16::from_bits(u16::from_le_bytes(bytes)).to_f32()
    };
    let indices = first..first + rows[rank] * n;
    let expected: Vec<bf16> = indices
        .map(|index| sum_of_hosts(hosts, rank, |rank| value(rank, index)))
        .collect();
    let everywhere = |index| bf16::from_f32((0..world).map(|rank| value(rank, index)).sum());
    let everywhere: Vec<bf16> = (0..m * n).map(everywhere).collect();
    delay_chunks(Some(5));
    let mut out = group.zeros::<bf16>(rows[rank], n).unwrap();
    for (chunks, route) in [1, 2, 5]
        .into_iter()
        .zip([Route::Push, Route::Push, Route::Pull])
        // Many columns take longer.
        .skip(if are_few { 0 } else { 1 })
    {
        // Of partials that are made first, each rank chooses its own tiles.
        let height = match route {
            Route::Pull => 4 << (rank % 2),
            _ => 4,
        };
        let config = Config::new(tile(height), Chunking::new(chunks), route);
        out.copy_from_host(&vec![bf16::NAN; rows[rank] * n])
            .unwrap();
        for _ in 0..if are_few { 5 } else { 1 } {
            let sum = MatmulReduceScatter::new().config(config).rows(rows);
            sum.run(&a, &b, &mut out).unwrap();
        }
        let whole = out.to_vec().unwrap();
        assert_eq!(bits(&whole), bits(&expected), "{hosts}, {rows:?}, {chunks}");
        out.copy_from_host(&vec![bf16::NAN; rows[rank] * n])
            .unwrap();
        let sum = MatmulReduceScatter::new().config(config).rows(rows);
        let sum = sum.prepare(&a, n).unwrap();
        sum.multiply_partials(&a, &b).unwrap();
        sum.sum_partials(&mut out).unwrap();
        let in_parts = out.to_vec().unwrap();
        assert_eq!(
            bits(&in_parts),
            bits(&expected),
            "{hosts}, {rows:?}, {chunks}"
        );
        let mut all = group.sharded_rows::<bf16>(rows, n).unwrap();
        all.poison(bf16::NAN).unwrap();
        group.barrier().unwrap();
        let sum = MatmulAllReduce::new().config(config);
        sum.run(&a, &b, &mut all).unwrap();
        let all = all.to_vec().unwrap();
        let of_rank = &all[first..first + rows[rank] * n];
        let its = match are_few {
            true => &everywhere[first..first + rows[rank] * n],
            false => &expected,
        };
        assert_eq!(bits(of_rank), bits(its), "{hosts}, {rows:?}, {chunks}");
        // Its other rows are their owners'.
        let owned = group.all_gather_bytes(&bytes(of_rank)).unwrap();
        assert_eq!(bytes(&all), owned.concat(), "{hosts}, {rows:?}, {chunks}");
    }
}

pub fn blocks_and_a_root_s_rows_come(group: &Group<Host>, hosts: &str, rows: &[usize]) {
    let (rank, world) = (group.rank(), group.world_size());
    let (m, n) = (rows.iter().sum::<usize>(), 5);
    delay_chunks(Some(3));
    // Rank s has the row (s, p, i) in row i of its block for rank p.
    let value = |from: usize, to: usize, row: usize| (from * 100 + to * 10 + row % 10) as u32;
    let blocks = (0..world).flat_map(|to| (0..rows[rank]).map(move |row| (to, row)));
    let blocks: Vec<u32> = blocks
        .flat_map(|(to, row)| [value(rank, to, row); 5])
        .collect();
    let a = group.upload(&blocks, world * rows[rank], n).unwrap();
    let mut out = group.sharded_rows::<u32>(rows, n).unwrap();
    let come = (0..world).flat_map(|from| (0..rows[from]).map(move |row| (from, row)));
    let come: Vec<u32> = come
        .flat_map(|(from, row)| [value(from, rank, row); 5])
        .collect();
    for _ in 0..3 {
        out.poison(u32::MAX).unwrap();
        group.barrier().unwrap();
        all_to_all(&a, &mut out).unwrap();
        assert_eq!(out.to_vec().unwrap(), come, "{hosts}, {rows:?}");
        out.poison(u32::MAX).unwrap();
        group.barrier().unwrap();
        let made = ProduceAndAllToAll::new().chunks(2);
        let produced = made.run(&mut out, |mut block| {
            let (to, first, pitch) = (block.owner(), block.rows().start, block.pitch());
            for (row, place) in block.values_mut().chunks_mut(pitch).enumerate() {
                place[..n].fill(value(rank, to, first + row));
            }
            Ok(())
        });
        produced.unwrap();
        assert_eq!(out.to_vec().unwrap(), come, "{hosts}, {rows:?}");
    }
    for seed in 4..8 {
        counts::step::<Host, bf16>(group, seed).unwrap();
    }
    for root in 0..world {
        out.poison(u32::MAX).unwrap();
        let all: Vec<u32> = (0..m * n).map(|index| (index + root) as u32).collect();
        if rank == root {
            out.write(0, &all).unwrap();
        }
        group.barrier().unwrap();
        broadcast(&mut out, root).unwrap();
        assert_eq!(out.to_vec().unwrap(), all, "{hosts}, {rows:?}, {root}");
        group.barrier().unwrap();
    }
}

/// The addends of all ranks, [M, N]. M is split evenly.
struct Addends<T> {
    n: usize,
    /// By rank: how many rows it owns.
    rows: Vec<usize>,
    of: Vec<Vec<T>>,
}

impl<T: Float> Addends<T> {
    fn new([m, n]: [usize; 2], world: usize) -> Addends<T> {
        Addends {
            n,
            rows: (0..world)
                .map(|rank| (m + world - 1 - rank) / world)
                .collect(),
            of: (0..world)
                .map(|rank| normal(rank as u64 + 50, m * n))
                .collect(),
        }
    }

    /// By rank: the sums of its rows. `sum` makes that of an element.
    fn sums(&self, sum: impl Fn(usize, usize) -> T) -> Vec<Vec<T>> {
        let mut indices = 0..self.of[0].len();
        let ranks = self.rows.iter().enumerate();
        let own = ranks.map(|(rank, rows)| {
            let own = indices.by_ref().take(rows * self.n);
            own.map(|index| sum(rank, index)).collect()
        });
        own.collect()
    }

    /// This rank's addend.
    fn upload<B: Produces>(&self, group: &Group<B>) -> Result<Matrix<B, T>, Error> {
        let own = &self.of[group.rank()];
        group.upload(own, own.len() / self.n, self.n)
    }

    /// Where a rank has its rows of the sum.
    fn poisoned<B: Produces>(&self, group: &Group<B>) -> Result<Matrix<B, T>, Error> {
        let rows = self.rows[group.rank()];
        let mut out = group.zeros::<T>(rows, self.n)?;
        out.copy_from_host(&vec![nan(); rows * self.n])?;
        Ok(out)
    }

    fn reduce<B: Produces>(&self, group: &Group<B>) -> Result<Vec<T>, Error> {
        let (a, mut out) = (self.upload(group)?, self.poisoned(group)?);
        reduce_scatter(&a, &mut out)?;
        out.to_vec()
    }

    fn reduce_everywhere<B: Produces>(&self, group: &Group<B>) -> Result<Vec<T>, Error> {
        let a = self.upload(group)?;
        let mut out = group.sharded::<T>(self.rows.iter().sum(), self.n)?;
        out.poison(nan())?;
        group.barrier()?;
        all_reduce(&a, &mut out)?;
        out.to_vec()
    }

    fn produce<B: Produces>(&self, group: &Group<B>, chunks: usize) -> Result<Vec<T>, Error> {
        let (a, mut out) = (self.upload(group)?, self.poisoned(group)?);
        let own = &self.of[group.rank()];
        let produced = ProduceAndReduceScatter::new().chunks(chunks);
        produced.run(self.rows.iter().sum(), &mut out, |mut block| {
            let first = block.rows().start;
            B::put(&mut block, &a, own, first);
            Ok(())
        })?;
        out.to_vec()
    }
}

/// Without a product sums are made as those of products. But if all ranks get few sums, each rank adds all addends.
pub fn addends_are_added_host_by_host<B: Produces, T: Float>(
    group: &Group<B>,
    hosts: &str,
    [m, n]: [usize; 2],
) -> Result<(), Error> {
    let (rank, world) = (group.rank(), group.world_size());
    let addends = Addends::<T>::new([m, n], world);
    let value = |rank: usize, index: usize| addends.of[rank][index].to_f32();
    let sums = addends.sums(|owner, index| sum_of_hosts(hosts, owner, |rank| value(rank, index)));
    let bytes = size_of::<T>() * m * n;
    let everywhere = match world == 2 || are_few(hosts, bytes) {
        true => {
            addends.sums(|_, index| T::from_f32((0..world).map(|rank| value(rank, index)).sum()))
        }
        false => sums.clone(),
    };
    let what = format!("rank {rank} of {hosts}, {m} by {n}");
    for _ in 0..3 {
        assert!(addends.reduce(group)? == sums[rank], "{what}");
    }
    for chunks in [1, 2] {
        assert!(
            addends.produce(group, chunks)? == sums[rank],
            "{what}, {chunks}"
        );
    }
    // Rows of a sharded matrix on GPUs are whole pieces of 16 bytes.
    if n.is_multiple_of(8) {
        assert!(
            addends.reduce_everywhere(group)? == everywhere.concat(),
            "{what}"
        );
    }
    Ok(())
}

/// The most bytes of an addend that each of more than two ranks gets whole.
const FEW_BYTES: usize = 256 << 10;

/// Whether each of more than two ranks gets whole addends of so many bytes. A rank sends at most 2 MiB to other hosts.
fn are_few(hosts: &str, bytes: usize) -> bool {
    let sent = bytes
        * hosts
            .chars()
            .filter(|host| !hosts.starts_with(*host))
            .count();
    bytes <= FEW_BYTES && sent <= 2 << 20
}

/// So many columns that `m` rows of 16 bits are more.
pub fn columns_of_many(m: usize) -> usize {
    (FEW_BYTES / 2 / m + 1).next_multiple_of(8)
}
